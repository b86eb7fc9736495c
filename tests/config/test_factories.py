"""Functions that a config names: each error is one line, reported before a device is used."""

import os
import subprocess
import sys

import pytest

from tests.config.toys import errors, load

OWN = """
import optax

def optimizer(learning_rate, *, strength):
    return optax.sgd(learning_rate, momentum=strength)

def number(learning_rate=0.1):
    return 0.5

def broken(size=1):
    raise KeyError("no such size")

def sized(learning_rate, size=1, other=2):
    return optax.sgd(learning_rate, momentum=size / other)

def pair():
    return lambda step: (step, step)

transformation = optax.sgd(0.1)
"""


@pytest.fixture(autouse=True)
def module(here):
    (here / "own_optim.py").write_text(OWN)
    yield
    sys.modules.pop("own_optim", None)


def test_arguments_are_read_from_the_command_line():
    optim = load(
        "--config.optim.name=optax:adamw",
        "--config.optim.arguments.b2=0.95",
        "--config.optim.arguments.mu_dtype=bfloat16",
        "--config.optim.schedule=optax:cosine_decay_schedule",
        "--config.optim.schedule_arguments={'init_value': 0.1, 'decay_steps': 9}",
    ).optim
    assert optim.arguments == {"b2": 0.95, "mu_dtype": "bfloat16"}
    assert optim.schedule_arguments == {"init_value": 0.1, "decay_steps": 9}
    assert load(
        "--config.optim.name=optax:adamw", "--config.optim.arguments.nesterov=false"
    ).optim.arguments == {"nesterov": False}


@pytest.mark.parametrize(
    ("arguments", "path", "told"),
    [
        (
            ["name=optax:adamv"],
            "name",
            "is 'optax:adamv', and optax has no function 'adamv'; did you mean",
        ),
        (
            ["name=optacks:adamw"],
            "name",
            "importing 'optacks' failed: ModuleNotFoundError: No module named 'optacks'",
        ),
        (["name=own_optim:transformation"], "name", "has no function 'transformation'"),
        (["name=optax.adamw"], "name", "sign_sgd, module:factory; did you mean 'optax:adamw'?"),
        (
            ["name=own_optim:number"],
            "name",
            "returned a float; expected an optax.GradientTransformation",
        ),
        (
            ["name=optax:lbfgs"],
            "name",
            "which needs the loss at each update, which a step does not give; name one",
        ),
        (
            ["name=own_optim:optimizer"],
            "arguments",
            "lacks 'strength', which own_optim:optimizer needs",
        ),
        (
            ["name=own_optim:broken"],
            "arguments",
            "own_optim:broken failed: KeyError: 'no such size'",
        ),
        (
            ["name=own_optim:sized", "arguments.size=3", "arguments.other=0"],
            "arguments.other",
            "is 0, and own_optim:sized failed: ZeroDivisionError",
        ),
        (
            ["name=optax:adamw", "arguments.b1='0.9'"],
            "arguments.b1",
            "is '0.9' (str); optax:adamw expects a number",
        ),
        (
            ["name=optax:adamw", "arguments.mu_dtype=int99", "arguments.b2=0.9"],
            "arguments.mu_dtype",
            "is 'int99', and optax",
        ),
        (
            ["name=optax:adamw", "arguments.nesterov=no"],
            "arguments.nesterov",
            "is 'no' (str); optax:adamw expects True or False",
        ),
        (
            ["name=optax:adamw", "arguments.b2=[0.9]"],
            "arguments.b2",
            "(list); optax:adamw expects a number",
        ),
        (
            ["name=optax:adamw", "arguments.beta2=0.9"],
            "arguments.beta2",
            "is no parameter of optax:adamw; expected one of: b1",
        ),
        (
            ["name=optax:adamw", "arguments.learning_rate=1"],
            "arguments.learning_rate",
            "leave it out",
        ),
        (
            ["name=optax:adamw", "weight_decay=0.1"],
            "weight_decay",
            "does not read; leave it at 0.05",
        ),
        (
            ["name=optax:adamw", "layer_decay=0.7"],
            "layer_decay",
            "name='optax:adamw' does not read",
        ),
        (["name=optax:adamw", "moments=int8"], "moments", "does not read"),
        (
            ["name=optax:adamw", "groups=({'match': '^w', 'lr': 0.1},)"],
            "groups[0].lr",
            "leave it out",
        ),
        (
            ["name=own_optim:broken", "arguments.size=2", "lr=0.1"],
            "lr",
            "does not read; leave it at 0.0001",
        ),
        (["arguments.b1=0.9"], "arguments", "name='adamw' does not read"),
        (["schedule_arguments.a=1"], "schedule_arguments", "schedule='cosine' does not read"),
        (
            ["schedule=own_optim:number"],
            "schedule",
            "returned a float; expected a function from the step",
        ),
        (["schedule=own_optim:pair"], "schedule", "expected a number, the learning rate"),
        (["schedule=optax:constant_schedule"], "schedule_arguments", "lacks 'value'"),
        (
            ["schedule=optax:constant_schedule", "schedule_arguments.value=1", "warmup=3"],
            "warmup",
            "leave it at 0",
        ),
        (
            ["schedule=optax:constant_schedule", "schedule_arguments.value=1", "lr=0.1"],
            "lr",
            "schedule='optax:constant_schedule'",
        ),
    ],
)
def test_an_error_of_a_factory_is_one_line_with_the_path_of_its_field(arguments, path, told):
    found = errors(*[f"--config.optim.{a}" for a in arguments])
    assert f"optim.{path}" in found, found
    assert told in found[f"optim.{path}"]
    assert len(found[f"optim.{path}"].splitlines()) == 1


def test_all_fields_that_nothing_reads_are_named_together():
    found = errors(
        "--config.optim.name=optax:adamw",
        "--config.optim.b2=0.95",
        "--config.optim.moments=int8",
        "--config.optim.groups=({'match': '^w', 'lr': 0.1, 'weight_decay': 0.0, 'name': 'lion',"
        " 'freeze': True},)",
    )
    assert set(found) == {
        f"optim.{name}"
        for name in ("b2", "moments", *(f"groups[0].{x}" for x in ("lr", "weight_decay", "name")))
    }


def test_no_device_is_touched(here):
    """The platform does not exist, so asking for a device fails."""
    code = """
from tests.config.toys import errors, load
load(
    "--config.optim.name=optax.contrib:schedule_free_adamw",
    "--config.optim.schedule=optax:linear_schedule",
    "--config.optim.schedule_arguments="
    "{'init_value': 0.1, 'end_value': 0.0, 'transition_steps': 5}",
)
print(list(errors("--config.optim.name=own_optim:number")))
"""
    environment = os.environ | {
        "JAX_PLATFORMS": "nowhere",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "['optim.name']\n", done.stderr
