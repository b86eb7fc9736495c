"""One folder with all that tools/gpu_check.py needs on a machine without a network.

python -m tools.pack_gpu_check --out FOLDER

    FOLDER/
      run.sh              installs wheels/ once, and runs the check: run.sh --quick
      requirements.txt    the wheels, by name and version
      wheels/             this project's, for any Python from 3.11 on, and every package that the
                          machine lacks
      configs/ tools/     from this checkout

The machine has Python and the packages of --has, with a jaxlib for its accelerator; and all of
their requirements. pip's own resolver finds the other requirements of this project, for the
machine's Python and platform, not for this one's. No package of the machine is replaced. The folder
has --limit MiB at most; one that would be larger is an error.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
HAS = ("jax==0.11.*", "flax", "optax", "orbax-checkpoint", "numpy")
# Beyond the project's own needs: Higgs's tokenizer, without its dependencies.
ALONE = ("tokenizers",)
# Of a package that has grown: pyarrow 26 has 53 MiB, 21 has 41, and writes the same here.
SMALLER = ("pyarrow<22",)
# Of Linux distributions since 2022: glibc 2.35 (Ubuntu 22.04) and before.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)),
    "manylinux2014_x86_64",
    "linux_x86_64",
)
TAKEN = ("configs/*.py", "tools/gpu_check.py", "tools/chip/*.py")
RUN = """#!/bin/sh
# Installs the wheels into packages/, next to what this machine's Python has, and runs the check: ./run.sh [--quick] [--only …]
set -eu
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
if [ ! -e packages/.whole ]; then
    rm -rf packages
    "$PYTHON" -m pip install --quiet --no-index --find-links wheels --no-deps --target packages -r requirements.txt
    touch packages/.whole
fi
PYTHONPATH="$PWD/packages${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" tools/gpu_check.py "$@"
"""


class PackError(RuntimeError):
    """A package that could not be packed, and the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="the folder, which must not exist"
    )
    parser.add_argument("--python", default="3.12", help="of the machine (default: 3.12)")
    parser.add_argument(
        "--has", default=",".join(HAS), help=f"packages that it has (default: {','.join(HAS)})"
    )
    parser.add_argument(
        "--wheel", type=pathlib.Path, help="of this project; default: pip wheel makes it"
    )
    parser.add_argument("--limit", type=float, default=64, help="[MiB] of the folder (default: 64)")
    args = parser.parse_args(argv)
    try:
        if args.out.exists():
            raise PackError(f"--out={args.out} exists; name a new folder, or remove it")
        wheels = args.out / "wheels"
        wheels.mkdir(parents=True)
        own = shutil.copy(args.wheel, wheels) if args.wheel else build(wheels)
        fetch(missing(pathlib.Path(own), args.has.split(","), args.python), args.python, wheels)
        size = assemble(args.out, args.limit)
    except (PackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {size / 2**20:.1f} MiB; there: {args.out.name}/run.sh --quick")
    return 0


def build(wheels: pathlib.Path) -> str:
    """Build this project's wheel, without the lines of its sources, seven eighths of it."""
    pip(
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        str(ROOT),
        env={"CARGO_PROFILE_RELEASE_STRIP": "debuginfo"},
    )
    return str(next(wheels.glob("*.whl")))


def missing(own: pathlib.Path, has: Sequence[str], python: str) -> list[str]:
    """name==version of ``own``'s needs beyond ``has``. Raises PackError if none agree."""
    there = {name.lower() for name, _ in resolve(has, python)}
    needed = [*resolve([*has, str(own), *SMALLER], python), *resolve(ALONE, python, deps=False)]
    left_out = there | {own.name.partition("-")[0].lower()}
    return [f"{name}=={version}" for name, version in needed if name.lower() not in left_out]


def resolve(wanted: Iterable[str], python: str, *, deps: bool = True) -> list[tuple[str, str]]:
    """(name, version) of all that pip would install on the machine, were nothing there."""
    how = [
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report=-",
        *([] if deps else ["--no-deps"]),
    ]
    report = pip("install", *how, *target(python), *wanted)
    return [
        (one["metadata"]["name"], one["metadata"]["version"])
        for one in json.loads(report)["install"]
    ]


def fetch(packages: Sequence[str], python: str, wheels: pathlib.Path) -> None:
    if packages:
        pip("download", "--quiet", "--no-deps", "--dest", str(wheels), *target(python), *packages)


def target(python: str) -> list[str]:
    """pip's words for the machine: Linux on x86-64."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    abis = [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    return [
        "--only-binary=:all:",
        f"--python-version={python}",
        "--implementation=cp",
        *abis,
        *platforms,
    ]


def assemble(folder: pathlib.Path, limit: float) -> int:
    """Put the rest next to the wheels, return all bytes. Raises PackError above ``limit`` MiB."""
    for pattern in TAKEN:
        for file in ROOT.glob(pattern):
            copy = folder / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    names = [wheel.name.split("-")[:2] for wheel in sorted((folder / "wheels").glob("*.whl"))]
    (folder / "requirements.txt").write_text(
        "".join(f"{name}=={version}\n" for name, version in names)
    )
    (folder / "run.sh").write_text(RUN)
    (folder / "run.sh").chmod(0o755)
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file()
    }
    if sum(sizes.values()) > limit * 2**20:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        raise PackError(
            f"{folder} has {sum(sizes.values()) / 2**20:.1f} MiB, and --limit is {limit:g}; the"
            " largest files: " + ", ".join(f"{name} {sizes[name] / 2**20:.1f}" for name in largest)
        )
    return sum(sizes.values())


def pip(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    if done.returncode:
        text = [
            line for line in done.stderr.splitlines() if re.search(r"error", line, re.I)
        ] or done.stderr.splitlines()
        raise PackError(f"pip {arguments[0]} failed: {'; '.join(text[-3:])}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
