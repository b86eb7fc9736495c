"""The configuration of a run: one frozen `Config`, or every error in it at once.

schema        the sections and their fields: value, unit, meaning
build         a config file and overrides -> `Config`; `Config` -> JSON
changes       differences to the config of a checkpoint
consistency   errors between sections, or on this machine
factories     functions that a config names as module:function
explain       every field with its value, unit and meaning
sweep         the points of a sweep
command_line  the command line of a run
"""

from jaxtrain.config.build import from_dict, load, read, save, section, to_json
from jaxtrain.config.changes import ENVIRONMENT, Change, compare, digest_of, digests_of
from jaxtrain.config.command_line import Arguments, parse_args
from jaxtrain.config.consistency import ArgumentError, ConfigError
from jaxtrain.config.explain import explain, gloss
from jaxtrain.config.schema import (
    AXIS_RULES,
    OF_SCHEDULE,
    RESHAPE,
    REST,
    SCHEDULES,
    UPDATE_RULES,
    WITHOUT_OUTPUTS,
    Checkpoint,
    Config,
    Group,
    Guard,
    Lora,
    Mesh,
    Metrics,
    ModelSection,
    Optim,
    Preemption,
    Train,
    WarmStart,
)
from jaxtrain.config.sweep import sweeps
from loaders.io.checks import DataSection, Section

__all__ = [
    "AXIS_RULES",
    "OF_SCHEDULE",
    "REST",
    "RESHAPE",
    "SCHEDULES",
    "UPDATE_RULES",
    "ArgumentError",
    "Arguments",
    "ENVIRONMENT",
    "Change",
    "Checkpoint",
    "Config",
    "ConfigError",
    "DataSection",
    "Group",
    "Guard",
    "Lora",
    "Mesh",
    "Metrics",
    "ModelSection",
    "Optim",
    "Preemption",
    "Section",
    "Train",
    "WITHOUT_OUTPUTS",
    "WarmStart",
    "compare",
    "digest_of",
    "digests_of",
    "explain",
    "from_dict",
    "gloss",
    "load",
    "parse_args",
    "read",
    "save",
    "section",
    "sweeps",
    "to_json",
]
