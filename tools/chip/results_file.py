"""The figures of a check of a card that is done in parts: one file, which each part adds to.

A part is one call of tools/gpu_check.py. It takes over the figures of earlier parts with the same
code in the same form, and measures the rest. The file is whole after each unit.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from loaders.io import atomic_write

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ("jaxtrain", "loaders", "tools", "configs")
Found = dict[str, Any]


class ResultsError(Exception):
    """The file cannot take this part's figures. The text names it and a remedy."""


def code() -> str:
    """Return a digest of the sources that the figures depend on, also without a git."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def earlier(path: pathlib.Path, form: str) -> Found:
    """Return the figures of earlier parts, empty if there are none of this code and form.

    Raises ResultsError if the file is not one of this check.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        same = (found["code"], found["form"]) == (code(), form)
    except (OSError, ValueError, LookupError, TypeError) as error:
        remedy = "give another file by --out, or remove it"
        raise ResultsError(f"{path} has no figures of this check ({error!r}); {remedy}") from error
    return found if same else {}


def refuse_another_machine(path: pathlib.Path, found: Found, machine: Mapping[str, Any]) -> None:
    """Raise ResultsError if an earlier part ran on another kind of device or another jax."""
    for part in found["parts"]:
        if part["machine"] is None:
            continue
        for name in ("device", "versions"):
            before, now = part["machine"][name], machine[name]
            if before != now:
                raise ResultsError(
                    f"{path} has figures of {name} {before}, and this machine has {now}: figures"
                    " of two machines are not put into one table; give another file by --out"
                )


def write(path: pathlib.Path, found: Found) -> None:
    atomic_write.write(path, json.dumps(found, indent=1) + "\n")
