"""The command line: unknown arguments, and mistakes that are reported before a device is touched."""

import os
import pathlib
import subprocess
import sys

import pytest
from toys import load

from jaxtrain.config import ConfigError

ROOT = pathlib.Path(__file__).parents[2]


def test_unknown_arguments_are_reported_with_the_mistakes_of_the_config():
    with pytest.raises(ConfigError) as error:
        load("--confg.train.steps=3", "train.steps=4", "--config.train.bacth=3", "--config.seed")
    text = str(error.value)
    assert len(error.value.problems) == 4 and text.startswith("the config has 4 mistakes:")
    for part in (
        "'--confg.train.steps=3' is unknown",
        "'train.steps=4' is unknown",
        "config.train.bacth",
        "config.seed is given",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--config.train.bacth=3", "config.train.bacth does not exist; expected one of: "),
        ("--confg.seed=3", "the config has a mistake: argument '--confg.seed=3' is unknown; "),
    ],
)
def test_a_single_mistake_is_one_line(argument, line):
    with pytest.raises(ConfigError) as error:
        load(argument)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def command(here, *arguments):
    """The command in a process where any use of a device fails: no such platform."""
    environment = {**os.environ, "JAX_PLATFORMS": "nonexistent", "PYTHONPATH": f"{ROOT}{os.pathsep}{here}"}
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.main", "--config=configs/toy.py", *arguments],
        cwd=here, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_mistakes_are_reported_before_a_device_is_touched(here):
    done = command(here, "--config.train.bacth=3", "--config.model.whole=x")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "config.train.bacth" in done.stderr and "config.model.whole" in done.stderr
    assert "nonexistent" in command(here).stderr  # without mistakes a device is asked for, and the platform is missed


def test_explain_touches_no_device_and_trains_nothing(here):
    done = command(here, "--explain")
    assert done.returncode == 0, done.stderr
    assert "config.train.steps" in done.stdout and not (here / "runs").exists()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_modules_of_ones_own_are_found_by_the_command_as_by_python_m(here, where):
    """`jaxtrain` starts without the folder where it is typed among its modules; the config's own folder counts, too."""
    file, folder = "configs/toy.py", here
    if where == "elsewhere":
        (here / "configs" / "toy.py").rename(here / "toy.py")
        file, folder = "../toy.py", here / "configs"
    command = [str(pathlib.Path(sys.executable).with_name("jaxtrain")), "explain", f"--config={file}"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "config.model.n_classes" in done.stdout, done.stderr
