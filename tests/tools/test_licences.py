"""The crates that are compiled into the extension, and so go out with every wheel: the licences that their authors state."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

RUST = pathlib.Path(__file__).resolve().parents[2] / "rust"
# They ask for no more than their notice; MPL-2.0 also for changes to its own files.
FREE = {
    "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "MIT", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Zlib", "CC0-1.0",
    "Unlicense", "Unicode-3.0", "MPL-2.0",
}  # fmt: skip


def is_free(expression: str) -> bool:
    """Of an SPDX expression, or of an older one with "/" for OR."""
    if inner := re.fullmatch(r"(.*)\(([^()]*)\)(.*)", expression):
        return is_free(f"{inner[1]}{'MIT' if is_free(inner[2]) else 'no'}{inner[3]}")
    alternatives = re.split(r" OR |/", expression)
    return any(all(part.strip() in FREE for part in each.split(" AND ")) for each in alternatives)


def test_every_crate_has_a_licence_that_allows_it():
    assert is_free("(MIT OR GPL-3.0) AND Unicode-3.0") and is_free("GPL-3.0/MIT")
    assert not is_free("MIT AND GPL-3.0") and not is_free("")
    if not shutil.which("cargo"):
        pytest.skip("cargo reads the crates' licences")
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", str(RUST / "Cargo.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    crates = {crate["name"]: crate["license"] or "" for crate in json.loads(done.stdout)["packages"]}
    assert len(crates) > 100
    assert not {name: licence for name, licence in crates.items() if not is_free(licence)}
