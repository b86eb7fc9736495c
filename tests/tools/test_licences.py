"""The licences of the crates that are compiled into the extension, and of the packages that pip
installs with it."""

import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools.needs import needs

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUST = ROOT / "rust"
# These licences require only their notice. MPL-2.0 also covers changes to its own files.
FREE = {
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "0BSD",
    "Zlib",
    "CC0-1.0",
    "Unlicense",
    "Unicode-3.0",
    "MPL-2.0",
    "ISC",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
}
NAMES = {  # of older metadata without an SPDX expression
    "Apache Software License": "Apache-2.0",
    "Apache License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}


def licence(metadata: dict[str, Any]) -> str:
    """Return the licence in `importlib.metadata`: an SPDX expression, or a name."""
    prefix = "License :: OSI Approved :: "
    classifiers = [c for c in metadata.get("classifier", []) if c.startswith(prefix)]
    names = " AND ".join(classifier.rpartition(" :: ")[2] for classifier in classifiers)
    first_line = metadata.get("license", "").strip().partition("\n")[0]
    return metadata.get("license_expression") or names or first_line


def is_free(expression: str) -> bool:
    """Whether an SPDX expression, or an older one with "/" for OR, is free."""
    if inner := re.fullmatch(r"(.*)\(([^()]*)\)(.*)", expression):
        return is_free(f"{inner[1]}{'MIT' if is_free(inner[2]) else 'no'}{inner[3]}")
    alternatives = re.split(r" OR |/", expression)
    return any(all(part.strip() in FREE for part in each.split(" AND ")) for each in alternatives)


def test_every_crate_has_a_licence_that_allows_it():
    assert is_free("(MIT OR GPL-3.0) AND Unicode-3.0") and is_free("GPL-3.0/MIT")
    assert not is_free("MIT AND GPL-3.0") and not is_free("")
    if not shutil.which("cargo"):
        pytest.skip("cargo reads the crates' licences")
    command = [
        "cargo",
        "metadata",
        "--locked",
        "--format-version",
        "1",
        "--manifest-path",
        str(RUST / "Cargo.toml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not not_free(json.loads(done.stdout)["packages"])


def not_free(crates):
    """Crates may share a name. Each version of one may have its own licence."""
    assert len(crates) > 1
    return {
        (crate["name"], crate["version"]): crate["license"]
        for crate in crates
        if not is_free(crate["license"] or "")
    }


def test_each_version_of_a_crate_is_looked_at():
    crates = [
        dict(name="a", version=str(i), license=name)
        for i, name in enumerate(("MIT", "GPL-3.0", "MIT", None))
    ]
    assert set(not_free(crates)) == {("a", "1"), ("a", "3")}


def installed_with(requirements):
    """The packages, by name, that pip installs for some requirements: the required ones, their own
    requirements, and so on."""
    found, waiting = {}, [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        about = importlib.metadata.distribution(requirement.name)
        new = {"", *requirement.extras} - found.setdefault(about.name, (about, set()))[1]
        found[about.name][1].update(new)
        waiting += [(Requirement(text), each) for text in about.requires or () for each in new]
    return {name: about for name, (about, _) in found.items()}


def test_every_package_that_comes_along_has_a_licence_that_allows_it():
    """The test covers the wheel's requirements as installed here, without its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = installed_with(needs(project, []))
    assert {"jax", "jaxlib", "numpy", "scipy", "pycparser"} <= set(
        packages
    ) and "pytest" not in packages
    stated = {name: licence(about.metadata.json) for name, about in packages.items()}
    spdx = {
        name: " AND ".join(NAMES.get(part, part) for part in text.split(" AND "))
        for name, text in stated.items()
    }
    assert not {name: stated[name] for name, text in spdx.items() if not is_free(text)}
