"""A training stack in pure JAX.

config ─▶ process ─▶ assembly ─▶ plan ─▶ data ─▶ checkpoints ─▶ programs ─▶ init_or_restore ─▶ step
─▶ metrics_logger

`jaxtrain.run.loop.run` is the whole program, on one page. The names below are the public API,
imported when they are used:

    train, load             train a config; load a run or an export and call its model on arrays
    Trained, Model          what they return
    Config, read_config     a run's configuration, and the one that a file and overrides describe
    ConfigError, Preempted  every error of a config; a run that was asked to end, and is saved
    Task, LossOut, Mean, Spec, Variables, ModelSection   a workload: its functions, losses,
                                                         parameters and section
    Workload, Command, Entry   its value: commands and the meaning of metrics
    Export, Hub             how it is exported, and its model card
    Loader, DataSection, Field, Rows   a loader: rows of the global batch as NumPy arrays
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# as in pyproject.toml: of the code that runs, which may be a checkout that nobody installed
__version__ = "0.2.0"

# a checkout is not asked by pip; printed before any syntax that is too new
if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write(
        "error: jaxtrain needs Python 3.11 or newer, and this is"
        f" {sys.version_info[0]}.{sys.version_info[1]}\n"
    )
    sys.exit(2)

_MODULES = {
    "jaxtrain.api": "train load Trained Model",
    "jaxtrain.config": "Config read_config ConfigError ModelSection DataSection",
    "jaxtrain.run.loop": "Preempted",
    "jaxtrain.types": "Task LossOut Mean Spec Variables Export Hub",
    "jaxtrain.workload": "Workload Command",
    "jaxtrain.telemetry.glossary": "Entry",
    "loaders.base": "Loader Field Rows",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [
    "train",
    "load",
    "Trained",
    "Model",
    "Config",
    "read_config",
    "ConfigError",
    "Preempted",
    "Task",
    "LossOut",
    "Mean",
    "Spec",
    "Variables",
    "ModelSection",
    "Workload",
    "Command",
    "Entry",
    "Export",
    "Hub",
    "Loader",
    "DataSection",
    "Field",
    "Rows",
]

if TYPE_CHECKING:
    from jaxtrain.api import Model, Trained, load, train
    from jaxtrain.config import Config, ConfigError, DataSection, ModelSection
    from jaxtrain.config import load as read_config
    from jaxtrain.run.loop import Preempted
    from jaxtrain.telemetry.glossary import Entry
    from jaxtrain.types import Export, Hub, LossOut, Mean, Spec, Task, Variables
    from jaxtrain.workload import Command, Workload
    from loaders.base import Field, Loader, Rows


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    return getattr(module, "load" if name == "read_config" else name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
