"""List the contents of a wheel.

python -m tools.sbom dist/*.whl writes a WHEEL.cdx.json next to each (make wheel does). It is the
list of crates that maturin puts into the wheel (CycloneDX), and of each Python package that pip
installs with it, in the version of the tests (requirements.lock), each with name, version, checksum
and licence. It asks pip, which installs nothing. Extras are not in it.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from typing import Any

from tools.needs import needs

ROOT = pathlib.Path(__file__).resolve().parents[1]


def crates(wheel: pathlib.Path) -> dict[str, Any]:
    """Return the list of crates in a wheel. Raises ValueError without one."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if "/sboms/" in name]
        if len(found) != 1:
            raise ValueError(
                f"{wheel} holds {len(found)} lists of crates; expected 1: build it with maturin 1.9"
                " or newer"
            )
        listed: dict[str, Any] = json.loads(archive.read(found[0]))
        return listed


def packages(processor: str) -> list[dict[str, Any]]:
    """Return pip's report on installing jaxtrain for a Linux CPU. Raises CalledProcessError."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as folder:
        report, pins = pathlib.Path(folder, "report.json"), pathlib.Path(folder, "pins.txt")
        pins.write_text(
            "\n".join(re.findall(r"^[^\s=]+==\S+", (ROOT / "requirements.lock").read_text(), re.M))
        )
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--only-binary=:all:",
        ]
        # Of each glibc up to that of the wheel: pip does not include the older ones.
        command += [f"--platform=manylinux_2_{minor}_{processor}" for minor in range(28, 4, -1)]
        command += [
            f"--platform={old}_{processor}"
            for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")
        ]
        subprocess.run(
            [*command, f"--report={report}", f"--constraint={pins}", *needs(project, [])],
            check=True,
        )
        installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return installed


def processor(wheel: pathlib.Path) -> str:
    """Whose wheel it is, as its name says. Raises ValueError for none of Linux."""
    # of several that mean the same, the first
    tag = wheel.stem.rpartition("-")[2].partition(".")[0]
    if not (match := re.fullmatch(r"(?:many)?linux_(?:\d+_\d+_)?(\w+)", tag)):
        raise ValueError(
            f"{wheel} is a wheel for {tag}; expected one for Linux, as make wheel builds them"
        )
    return match[1]


def component(package: dict[str, Any]) -> dict[str, Any]:
    about = package["metadata"]
    name, version = about["name"].lower().replace("_", "-"), about["version"]
    purl = f"pkg:pypi/{name}@{version}"
    found = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "scope": "required",
        "purl": purl,
    }
    hashes = package["download_info"].get("archive_info", {}).get("hashes", {})
    if "sha256" in hashes:
        found["hashes"] = [{"alg": "SHA-256", "content": hashes["sha256"]}]
    if expression := about.get("license_expression"):
        found["licenses"] = [{"expression": expression}]
    elif name := licence(about):
        found["licenses"] = [{"license": {"name": name}}]
    return found


def licence(about: dict[str, Any]) -> str:
    """Return the licence in `importlib.metadata`: an SPDX expression, or a name."""
    classifiers = [
        each
        for each in about.get("classifier", [])
        if each.startswith("License :: OSI Approved :: ")
    ]
    names = " AND ".join(each.rpartition(" :: ")[2] for each in classifiers)
    return (
        about.get("license_expression")
        or names
        or about.get("license", "").strip().partition("\n")[0]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "wheels",
        nargs="+",
        type=pathlib.Path,
        metavar="WHEEL",
        help="whose list is written next to it",
    )
    args = parser.parse_args(argv)
    for wheel in args.wheels:
        listed = crates(wheel)
        installed = [component(package) for package in packages(processor(wheel))]
        listed["components"] += installed
        path = wheel.with_suffix(".cdx.json")
        path.write_text(json.dumps(listed, indent=1) + "\n")
        print(
            f"{path}: {len(listed['components']) - len(installed)} crates, {len(installed)} Python"
            " packages"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
