"""Print pip's requirements of this checkout, one a line: python tools/needs.py [EXTRA …].

The package itself is not among them, so that `make` can build it meanwhile.
"""

import pathlib
import re
import sys
import tomllib
from typing import Any


def needs(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the dependencies, and those of ``extras``; one that names others is followed."""
    found, waiting = list(project["dependencies"]), list(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
            waiting += re.split(r"\s*,\s*", own[1]) if own else []
            found += [] if own else [requirement]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    pyproject = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    print(*needs(tomllib.loads(pyproject.read_text())["project"], sys.argv[1:]), sep="\n")
