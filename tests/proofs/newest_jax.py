"""An environment with the newest jax, below the cache: its releases need a newer Python than ours.

    python -m tests.proofs newest

The gate's Python is the oldest that the package supports, and its jax is the last one for it. The
compiler of a newer jax makes other programs of the same steps. The environment has what the tests
need in their newest versions, and tokamax, which needs a newer Python too. It is renewed once a
week.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from loaders.io import atomic_write, machine
from tools import needs

ROOT = pathlib.Path(__file__).resolve().parents[2]
OLDEST = (3, 12)  # that the newest jax supports
NAMES = ("python3.14", "python3.13", "python3.12")
WEEK = 7 * 24 * 3600  # [s]
MARK = "complete.json"


def interpreters() -> list[str]:
    """List the commands that may be a Python of at least OLDEST, the newest first."""
    found = [sys.executable] if sys.version_info >= OLDEST else []
    found += [path for name in NAMES if (path := shutil.which(name))]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for name in NAMES:
        versions = pyenv.glob(f"versions/{name.removeprefix('python')}.*/bin/{name}")
        found += map(str, sorted(versions))
    return found


def base_interpreter() -> str:
    """Return the first interpreter that starts. Raises FileNotFoundError if there is none."""
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {OLDEST})"
    for path in interpreters():
        if not subprocess.run([path, "-c", check], capture_output=True).returncode:
            return path
    wanted = ".".join(map(str, OLDEST))
    raise FileNotFoundError(
        f"the newest jax needs Python {wanted} or newer, and none of {', '.join(NAMES)} is here;"
        " install one, or put it on PATH"
    )


def python() -> str:
    """Return the environment's interpreter, and make the environment if it is missing or old.

    Raises FileNotFoundError without a Python that is new enough, and CalledProcessError if the
    packages cannot be installed.
    """
    folder = machine.cache_folder("envs", "newest-jax")
    if not is_current(folder):
        base = base_interpreter()
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
        install(folder)
    return str(folder / "bin" / "python")


def is_current(folder: pathlib.Path) -> bool:
    try:
        made = json.loads((folder / MARK).read_text())["made"]
    except (OSError, ValueError, LookupError):
        return False
    return time.time() - made < WEEK


def install(folder: pathlib.Path) -> None:
    """Install what the tests need. The package itself is imported from the checkout."""
    interpreter = str(folder / "bin" / "python")
    listed = subprocess.run(
        [sys.executable, needs.__file__, "dev", "tokamax"],
        check=True,
        capture_output=True,
        text=True,
    )
    uv = machine.cache_folder("uv")
    command = [interpreter, str(ROOT / "tools" / "install.py"), str(uv), "--upgrade"]
    subprocess.run([*command, *listed.stdout.splitlines()], check=True)
    atomic_write.write(folder / MARK, json.dumps({"made": time.time()}) + "\n")
