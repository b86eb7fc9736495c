"""A config of a toy workload and a toy loader, for the tests of this folder."""

import pytest

from jaxtrain import config as config_lib
from jaxtrain.config import ConfigError

# A workload and a loader with fields of every allowed type, which need no data on disk.
WORKLOAD = '''
from dataclasses import dataclass, field
from jaxtrain.config import ModelSection
from jaxtrain.workload import Workload

@dataclass(frozen=True)
class Layer:
    """One layer."""

    width: int = 8  # [values] of its output
    bias: bool = True  # [bool] whether it has one

@dataclass(frozen=True)
class Config(ModelSection):
    """A toy."""

    n_classes: int | None = None  # [classes] None = what the data say
    whole: int = 1  # [1] a whole number
    real: float = 0.5  # [1] a number
    text: str = "a"  # [name] some text
    flag: bool = False  # [bool] a switch
    pair: tuple[int, int] = (1, 2)  # [1] two numbers
    many: tuple[float, ...] = ()  # [1] any number of numbers
    maybe: float | None = None  # [1] a number or nothing
    table: dict[str, float] = field(default_factory=dict)  # [name: 1] named numbers
    first: Layer = field(default_factory=Layer)  # [section]
    layers: tuple[Layer, ...] = ()  # [layers] any number of layers

    def validate(self):
        if self.whole < 0:
            yield "whole", f"is {self.whole}; it must not be negative"

    def validate_data(self, info):
        if self.n_classes != info["n_classes"]:
            yield "n_classes", f"is {self.n_classes}, and the data have {info['n_classes']} classes"

def make_task(config, shard, batch):
    raise AssertionError("no test of this folder trains")

WORKLOAD = Workload(config=Config, make_task=make_task)
'''
LOADER = '''
import os
from dataclasses import dataclass
from jaxtrain.config import DataSection

@dataclass(frozen=True)
class Config(DataSection):
    """Toy data."""

    path: str = ""  # [path] of the data; empty = none needed

    def validate(self):
        if self.path and not os.path.exists(self.path):
            yield "path", f"is {self.path!r}, which does not exist"

def dataset_info(config):
    if config.path.endswith("broken"):
        raise ValueError("shard 3 is cut short")
    return {"n_classes": 3, "n_train": 7}

def element_spec(config):
    return {}

def make_loader(config, *, split, rows, seed):
    raise AssertionError("no test of this folder reads data")
'''
FILE = """
def get_config(argument=""):
    model = dict(text=argument or "a")
    return dict(workload="toy_workload", loader="toy_loader", model=model, train=dict(batch=32))
"""


def load(*arguments, source="configs/toy.py"):
    found = config_lib.parse_args([f"--config={source}", *arguments])
    return config_lib.load(found.source, found.overrides)


def errors(*arguments, source="configs/toy.py"):
    """All errors of the config as {path: text}."""
    with pytest.raises(ConfigError) as error:
        load(*arguments, source=source)
    for path, text in error.value.problems:
        assert (f"config.{path} {text}" if path else text) in str(error.value)
    assert len(dict(error.value.problems)) == len(error.value.problems)
    return dict(error.value.problems)
