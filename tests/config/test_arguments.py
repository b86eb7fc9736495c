"""The command line reports unknown arguments and errors before it touches a device."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxtrain import config
from jaxtrain.config import ConfigError
from tests.config.toys import load

ROOT = pathlib.Path(__file__).parents[2]


def test_errors_of_the_command_line_are_reported_together():
    with pytest.raises(ConfigError) as error:
        load(
            "--confg.train.steps=3",
            "train.steps=4",
            "--plan-setup=cpu",
            "--config.seed",
            source="configs/tyo.py",
        )
    text = str(error.value)
    assert len(error.value.problems) == 5 and text.startswith("the config has 5 errors:")
    for part in (
        "'--confg.train.steps=3' is unknown",
        "'train.steps=4' is unknown",
        "--plan-setup is 'cpu'; expected one of: gpu, tpu",
        "--config.seed is given without a value",
        "did you mean 'configs/toy.py'?",
    ):
        assert part in text


def test_an_empty_value_is_a_value():
    """As a shell passes an empty variable on."""
    given = config.parse_args(
        ["--config", "toy.py", "--config.resume.path", "", "--config.seed="], find=False
    )
    assert given.source == "toy.py" and given.overrides == [("resume.path", ""), ("seed", "")]


def test_the_command_line_is_read_without_the_workload(here):
    """The workload's module may import packages that take a second."""
    program = (
        "import sys\nfrom jaxtrain import config\ngiven ="
        " config.parse_args(['--config=configs/toy.py', '--config.model.whole=3'])\nassert"
        " given.overrides == [('model.whole', '3')] and 'toy_workload' not in sys.modules and 'jax'"
        " not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{here}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=here, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--config.train.bacth=3", "config.train.bacth does not exist; expected one of: "),
        ("--confg.seed=3", "the config has an error: argument '--confg.seed=3' is unknown; "),
    ],
)
def test_a_single_error_is_one_line(argument, line):
    with pytest.raises(ConfigError) as error:
        load(argument)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def command(here, *arguments):
    """Run the command in a process without a valid platform, so that any use of a device fails."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "nonexistent",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{here}",
    }
    return subprocess.run(
        [sys.executable, "-m", "jaxtrain.main", "--config=configs/toy.py", *arguments],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_errors_are_reported_before_a_device_is_touched(here):
    done = command(here, "--config.train.bacth=3", "--config.model.whole=x")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "config.train.bacth" in done.stderr and "config.model.whole" in done.stderr
    # without errors a device is requested, and the missing platform is reported
    assert "nonexistent" in command(here).stderr


def test_explain_touches_no_device_and_trains_nothing(here):
    done = command(here, "--explain")
    assert done.returncode == 0, done.stderr
    assert "config.train.steps" in done.stdout and not (here / "runs").exists()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_the_command_finds_the_users_modules_like_python_m(here, where):
    """`jaxtrain` starts without the working directory among its modules. The config's own folder
    counts, too."""
    file, folder = "configs/toy.py", here
    if where == "elsewhere":
        (here / "configs" / "toy.py").rename(here / "toy.py")
        file, folder = "../toy.py", here / "configs"
    command = [
        str(pathlib.Path(sys.executable).with_name("jaxtrain")),
        "explain",
        f"--config={file}",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "config.model.n_classes" in done.stdout, done.stderr
