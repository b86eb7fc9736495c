"""The installers of make: uv, or pip if uv cannot be used."""

import os
import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

from loaders.io import machine
from tools import install

TOOL = pathlib.Path(install.__file__)
UV = """#!/bin/sh
echo "$@" >"{said}"
exit {code}
"""
PYTHON = """#!/bin/sh
[ "$*" = "-m pip config list" ] && printf "%s\\n" "{settings}"
"""


@pytest.fixture
def environment(tmp_path):
    """An environment that has the pip of the Python below it, which may have none, and a wheel to
    install there."""
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=True)
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "x = 1\n")
        file.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        file.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    return tmp_path / "env" / "bin" / "python", wheel


def a_uv(folder, settings="", code=0):
    """A folder with an environment like uv's, which logs its calls."""
    (folder / "bin").mkdir(parents=True)
    for name, text in (
        ("uv", UV.format(said=folder / "said", code=code)),
        ("python", PYTHON.format(settings=settings)),
    ):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


def run(python, folder, *arguments):
    command = [python, TOOL, folder, "--no-index", *arguments]
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)


def imports(python):
    return (
        subprocess.run(
            [python, "-c", "import tiny; print(tiny.x)"], capture_output=True, text=True
        ).stdout
        == "1\n"
    )


def test_uv_installs_for_the_python_that_runs_it(environment, tmp_path):
    python, wheel = environment
    folder = a_uv(tmp_path / "uv", settings=":env:.find-links='/a /b'\nglobal.timeout='60'")
    done = run(python, folder, wheel)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    told = (folder / "said").read_text().strip()
    assert (
        told == f"pip install --quiet --python={python} --find-links=/a --find-links=/b --no-index"
        f" {wheel}"
    )


@pytest.mark.parametrize(
    "settings",
    ["global.index-url='https://packages.example/simple'", ":env:.proxy='http://proxy.example'"],
)
def test_pip_installs_if_it_is_configured_and_uv_is_not(environment, tmp_path, settings):
    python, wheel = environment
    folder = a_uv(tmp_path / "uv", settings)
    assert run(python, folder, wheel).returncode == 0
    assert imports(python) and not (folder / "said").exists()


def test_pip_installs_if_uv_fails(environment, tmp_path):
    python, wheel = environment
    done = run(python, a_uv(tmp_path / "uv", code=2), wheel)
    assert done.returncode == 0 and imports(python)
    assert "uv could not install that; pip tries to" in done.stderr


def test_pip_installs_and_gives_the_reason_if_uv_cannot_be_kept(environment, tmp_path):
    python, wheel = environment
    settings = tmp_path / "env" / "pyvenv.cfg"  # here the environment has no pip either
    settings.write_text(
        settings.read_text().replace(
            "include-system-site-packages = true", "include-system-site-packages = false"
        )
    )
    (tmp_path / "file").write_text("")
    done = run(python, tmp_path / "file" / "uv", wheel)
    assert done.returncode == 0 and imports(python)
    assert "pip installs, since uv cannot be had" in done.stderr


def test_a_wheel_that_neither_installer_finds_is_an_error(environment, tmp_path):
    python, _ = environment
    done = run(python, a_uv(tmp_path / "uv", code=1), tmp_path / "missing-1.0-py3-none-any.whl")
    assert done.returncode and "missing-1.0" in done.stderr


def test_the_real_uv_installs(environment, tmp_path):
    """The test uses the uv of this checkout's make, if it is installed."""
    made = machine.cache_folder("uv")
    if not (made / "bin" / "uv").exists():
        pytest.skip(f"no uv in {made}: this environment was made with LOCKED=1, or by pip")
    python, wheel = environment
    done = run(python, made, wheel)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and imports(python)
    assert not (pathlib.Path(sys.prefix) / "tiny.py").exists()
