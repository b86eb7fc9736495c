"""Pin the packages of `make test`: python -m tools.lock writes requirements.lock, which make test LOCKED=1 installs instead.

Each line is one package with its version and the checksum of the file that pip takes for this machine. Then pip
installs these files and no others. So it is for one kind of machine, named in the first line. Likewise rust/Cargo.lock
pins the crates, and LOCKED=1 builds with it. With --keep the present versions stay, and only changed requirements of
pyproject.toml are added or dropped.
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from typing import Any

from tools.needs import needs

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"


def lines(report: dict[str, Any]) -> list[str]:
    """The pins of pip's report of an installation. Raises ValueError for a package that has no checksum."""
    found = []
    for each in report["install"]:
        name, version = each["metadata"]["name"].lower().replace("_", "-"), each["metadata"]["version"]
        digest = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"{name} {version} comes without a checksum; install it from an index of packages")
        found.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(found)


def head() -> str:
    version = ".".join(platform.python_version_tuple()[:2])
    return f"# Written by python -m tools.lock for Python {version} on {sys.platform}, {platform.machine()}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the versions of requirements.lock")
    args = parser.parse_args(argv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*needs(project["project"], ["dev"]), *project["build-system"]["requires"]]
    with tempfile.TemporaryDirectory() as folder:
        report, pins = pathlib.Path(folder, "report.json"), pathlib.Path(folder, "pins.txt")
        pins.write_text("\n".join(pin.split()[0] for pin in LOCK.read_text().splitlines()[1:]) if args.keep else "")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary=:all:"]
        subprocess.run([*command, f"--report={report}", f"--constraint={pins}", *wanted], check=True)
        found = lines(json.loads(report.read_text()))
    LOCK.write_text("\n".join([head(), *found]) + "\n")
    print(f"{LOCK.name}: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
