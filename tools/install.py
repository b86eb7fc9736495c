"""Install packages for the running Python, with pip's arguments.

python tools/install.py FOLDER ARGUMENT…

uv does it in seconds, and pip in more than a minute. uv is fetched once and kept in FOLDER. If it
cannot be fetched, if it fails, or if pip has settings that uv does not share (other indexes, a
proxy), pip does it.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib

# pip's settings that uv has too, and those that change nothing that is installed.
SHARED = {"find-links": "--find-links"}
WITHOUT_EFFECT = {
    "cert",
    "default-timeout",
    "timeout",
    "retries",
    "no-cache-dir",
    "cache-dir",
    "no-compile",
    "no-input",
    "quiet",
}
WITHOUT_EFFECT |= {
    "disable-pip-version-check",
    "progress-bar",
    "no-color",
    "root-user-action",
    "break-system-packages",
}


def main(folder: pathlib.Path, arguments: list[str]) -> int:
    uv = folder / "bin" / "uv"
    try:
        if not uv.exists():
            fetch(folder)
        if (settings := shared(folder)) is not None:
            command = [
                str(uv),
                "pip",
                "install",
                "--quiet",
                f"--python={sys.executable}",
                *settings,
                *arguments,
            ]
            if not subprocess.run(command, env=environment()).returncode:
                return 0
            print("uv could not install that; pip tries to", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"pip installs, since uv cannot be had: {error}", file=sys.stderr)
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        if subprocess.run([sys.executable, "-m", "ensurepip"], capture_output=True).returncode:
            print(
                "this Python has neither pip nor ensurepip; install them (on Debian, apt install"
                " python3-venv)",
                file=sys.stderr,
            )
            return 1
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    ).returncode


def fetch(folder: pathlib.Path) -> None:
    """Make an environment with uv and pip. Raises OSError, CalledProcessError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    pyproject = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    wanted = tomllib.loads(pyproject.read_text())["dependency-groups"]["install"]
    made = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
        subprocess.run(
            [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted], check=True
        )
        if not folder.exists():  # another make has been quicker
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def shared(folder: pathlib.Path) -> list[str] | None:
    """uv's arguments for pip's settings, or None if it has none for one of them."""
    listed = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "config", "list"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = []
    # section.name='value', of which :env: is a section
    for line in filter(str.strip, listed.stdout.splitlines()):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in SHARED:
            found += [f"{SHARED[name]}={each}" for each in value.strip("'").split()]
        elif name not in WITHOUT_EFFECT:
            return None
    return found


def environment() -> dict[str, str]:
    """pip's certificates, and its timeout."""
    here = dict(os.environ)
    if "PIP_CERT" in here:
        here.setdefault("SSL_CERT_FILE", here["PIP_CERT"])
    if "PIP_DEFAULT_TIMEOUT" in here:
        here.setdefault("UV_HTTP_TIMEOUT", here["PIP_DEFAULT_TIMEOUT"])
    return here


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2:]))
