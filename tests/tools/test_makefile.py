"""`make train` and `make test`: an error is one line before anything is installed, and the console
is readable."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Replaces a Python: it does nothing, but prints its version if asked, and reports that it trains.
PYTHON = """#!/bin/sh
case "$2" in
    *print*) echo "{version}" ;;
    *exit*) [ "{version}" != "(3, 9)" ] ;;
    jaxtrain.main) echo "it trains" ;;
esac
"""


def python(path, version):
    path.parent.mkdir(parents=True)
    path.write_text(PYTHON.format(version=version))
    path.chmod(0o755)
    return path


# The variables that `make test` was called with: make passes them on to every process below it.
GIVEN = {
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "MAKEOVERRIDES",
    "ARGS",
    "CONFIG",
    "LOCKED",
    "PYTHON",
    "VENV",
}


def make(*arguments, **environment):
    own = {name: value for name, value in os.environ.items() if name not in GIVEN}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=own | environment, capture_output=True, text=True, timeout=60
    )


def refusal(done):
    [line] = done.stdout.splitlines()
    assert done.returncode == 2 and "Error" in done.stderr
    return line


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    line = refusal(make("train", f"VENV={tmp_path}/env", f"JAXTRAIN_CACHE={tmp_path}/file/cache"))
    assert line.startswith(
        f"the cache folder {tmp_path}/file/cache cannot be written; say make JAXTRAIN_CACHE="
    )
    assert not (tmp_path / "env").exists(), "before anything is installed"


@pytest.mark.parametrize("stamped", [False, True])
def test_an_environment_of_another_python_is_one_line(tmp_path, stamped):
    """This is also an error if everything is installed in it, since the tests would run with the
    other Python."""
    python(tmp_path / "env" / "bin" / "python", "(3, 11)")
    other = python(tmp_path / "other" / "python3.13", "(3, 13)")
    if stamped:
        for name in (".installed", ".installed-dev"):
            (tmp_path / "env" / name).touch()
    line = refusal(make("test", f"VENV={tmp_path}/env", f"PYTHON={other}"))
    assert (
        line == f"{tmp_path}/env has another Python than PYTHON={other}; say make VENV=.venv-other"
        f" PYTHON={other} …"
    )


def test_an_environment_of_an_old_python_is_one_line(tmp_path):
    python(tmp_path / "env" / "bin" / "python", "(3, 9)")
    line = refusal(make("train", f"VENV={tmp_path}/env"))
    assert line.startswith(
        f"the Python in {tmp_path}/env is older than 3.11; remove {tmp_path}/env"
    )


def test_the_console_of_a_first_training_is_readable(tmp_path):
    """The console shows the installation and the training, and no line of the recipe."""
    python(tmp_path / "env" / "bin" / "python", "(3, 11)")
    done = make("train", f"VENV={tmp_path}/env", JAXTRAIN_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"installing into {tmp_path}/env, and building the loader: some minutes the first time",
        f"{tmp_path}/env/bin/python -m jaxtrain.main --config=configs/xcm.py ",
        "it trains",
    ]


def test_the_python_of_the_tests_is_the_one_that_make_takes():
    """The stand-ins above answer the Makefile's questions to a real one."""
    asked = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("VERSION := ")
    ]
    said = subprocess.run(
        [sys.executable, "-c", asked[0].removeprefix("VERSION := ")], capture_output=True, text=True
    )
    assert said.stdout == f"{sys.version_info[:2]}\n"


def test_locked_packages_are_installed_into_an_environment_of_their_own():
    """The environment of the unlocked packages is complete, so the tests would run there without
    the lock."""
    recipe = make("-n", "test", "LOCKED=1").stdout
    assert ".venv-locked/bin/python -m pytest" in recipe and ".venv/" not in recipe
    assert (
        "environment/bin/python -m pytest"
        in make("-n", "test", "LOCKED=1", "VENV=environment").stdout
    )


def test_a_changed_lock_is_installed_again(tmp_path):
    environment = tmp_path / "env"
    python(environment / "bin" / "python", "(3, 11)")
    make("train", f"VENV={environment}", "LOCKED=1", JAXTRAIN_CACHE=str(tmp_path / "cache"))
    again = [f"VENV={environment}", "LOCKED=1", "-n", "train", "--what-if=requirements.lock"]
    assert (
        "--requirement requirements.lock"
        in make(*again, JAXTRAIN_CACHE=str(tmp_path / "cache")).stdout
    )
