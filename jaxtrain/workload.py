"""All that the trainer knows of a workload: the `Workload` value of a config's package.

Nothing here imports jax, so that `jaxtrain --help` lists the commands of every workload at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from loaders.io.checks import UserError

if TYPE_CHECKING:  # the types of higher floors, which only a type checker imports
    from jaxtrain.config import Config, ModelSection
    from jaxtrain.telemetry.glossary import Entry
    from jaxtrain.types import Example, Export, Foreign, Format, PyTree, Shard, Task

PACKAGE = "jaxtrain.workloads"
Model = TypeVar("Model", bound="ModelSection")


class WorkloadError(UserError, ValueError):
    """A module's WORKLOAD that is missing or cannot be used."""


class Command(NamedTuple):
    """One command: ``main(argv) -> exit code`` of ``module``, whose docstring is its help."""

    module: str
    group: str  # heading in the listing of `jaxtrain`
    summary: str
    takes_workload: bool = False  # whether its parser has --workload too
    caches: bool = False  # whether it writes compiled programs or other files into the cache folder
    own_code: tuple[str, ...] = ()  # its flags that may name a module of the user's


@dataclasses.dataclass(frozen=True)
class Workload(Generic[Model]):
    """A workload, as its module's ``WORKLOAD``.

    ``config`` and the fields that are functions may import JAX when they are called. A shipped
    workload does so, and its package imports none.
    """

    # dataclass of the section `model`, or a function that imports and returns it
    config: type[Model] | Callable[[], type[Model]]
    # (run's config, layout, rows of a global step) -> the task
    make_task: Callable[[Config[Model], Shard, int], Task]
    # section `model` -> tree of `jaxtrain.types.Spec`, to merge adapters without a task
    make_specs: Callable[[Model], PyTree] | None = None
    commands: Mapping[str, Command] = dataclasses.field(default_factory=dict)
    glossary: tuple[Entry, ...] = ()  # meaning of its metrics
    # names and files of its exports; None = the defaults of `jaxtrain.types.Export`
    export: Callable[[], Export] | None = None
    # other formats of its exports, by the names that `jaxtrain export --format` takes
    formats: Mapping[str, Callable[[], Format]] = dataclasses.field(default_factory=dict)
    # package, and extra of jaxtrain, that a format needs, by the format's name
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    formats_help: str = ""  # a paragraph on the formats in `jaxtrain export --help`
    # weights of other systems, by a regex of an array's path in a folder of safetensors
    foreign: Mapping[str, Callable[[], Foreign]] = dataclasses.field(default_factory=dict)
    # (run's config, model state and batch as NumPy arrays, position of the batch) -> an example of
    # each row
    examples: (
        Callable[[Config[Model], PyTree, Mapping[str, Any], int], Iterable[Example]] | None
    ) = None
    # (command with {run}, why) that a run which ended prints
    next_steps: tuple[tuple[str, str], ...] = ()

    def config_class(self) -> type[Model]:
        """Return the dataclass of the section `model`. Raises as an import does."""
        return self.config if isinstance(self.config, type) else self.config()


def shipped() -> list[str]:
    """List the workloads of this package by their dotted names. Imports none."""
    package = importlib.import_module(PACKAGE)
    return sorted(f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__))


def foreign_to(arrays: Iterable[str]) -> Foreign | None:
    """Return the `jaxtrain.types.Foreign` of a shipped workload that knows these paths, or None."""
    paths = list(arrays)
    for name in shipped():
        for pattern, load_foreign in of(name).foreign.items():
            if any(re.search(pattern, path) for path in paths):
                return load_foreign()
    return None


def is_imported(name: str) -> bool:
    """Whether this process has imported the workload ``name``, as --workload does."""
    return hasattr(sys.modules.get(name), "WORKLOAD")


def is_kind(name: str | None, expected: str) -> bool:
    """Whether ``name`` is ``expected``, or a module imported by --workload with its `config`."""
    if name == expected:
        return True
    if name is None or not is_imported(name):
        return False
    return of(name).config_class() is of(expected).config_class()


def of(name: str) -> Workload[Any]:
    """Import the workload ``name``.

    Raises WorkloadError: its WORKLOAD is missing or is none; ImportError and every error of its
    module.
    """
    module = importlib.import_module(name)
    if not hasattr(module, "WORKLOAD"):
        raise WorkloadError(
            f"the module {name} has no WORKLOAD; add the line WORKLOAD ="
            " Workload(config=Config, make_task=make_task), with Workload from jaxtrain"
        )
    workload: object = module.WORKLOAD
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{name}.WORKLOAD is a {type(workload).__name__}; expected a jaxtrain.workload.Workload"
        )
    for command_name, command in workload.commands.items():
        if not isinstance(command, Command):
            raise WorkloadError(
                f"the command {command_name!r} of {name}.WORKLOAD is no jaxtrain.workload.Command;"
                " make it one"
            )
    return workload
