"""All that the trainer knows of a workload: the `Workload` value of a config's package.

Nothing here imports jax, so that `jaxtrain --help` lists the commands of every workload at once.
"""

import dataclasses
import functools
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

from loaders.io.checks import UserError

PACKAGE = "jaxtrain.workloads"


class WorkloadError(UserError, ValueError):
    """A module's WORKLOAD that cannot be used."""


class Command(NamedTuple):
    """One command: ``main(argv) -> exit code`` of ``module``, whose docstring is its help."""

    module: str
    group: str  # heading in the listing of `jaxtrain`
    summary: str
    takes_workload: bool = False  # whether its parser has --workload too
    caches: bool = False  # whether it writes compiled programs or other files into the cache folder
    own_code: tuple[str, ...] = ()  # its flags that may name a module of the user's


class WorkloadModule(Protocol):
    """The attributes of a workload's module: ``WORKLOAD``, or else the others.

    Without ``WORKLOAD``, ``Config`` and ``make_task`` are required.
    """

    WORKLOAD: "Workload | None"
    Config: type[Any]
    """The section ``model`` of a config, a `jaxtrain.config.ModelSection`."""
    make_specs: Callable[[Any], Any] | None
    """The section -> a tree of `jaxtrain.types.Spec`."""
    EXPORT: Any
    GLOSSARY: Iterable[Any]

    def make_task(self, config: Any, shard: Any, batch: int) -> Any:
        """Return the `jaxtrain.types.Task` of a run's config."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A workload, as its package's ``WORKLOAD``.

    A field may be the object itself, or "module:name", imported at its first use.

    A module without ``WORKLOAD`` trains too, by the attributes of `WorkloadModule`.
    """

    config: Any  # the dataclass of the section `model`, a `jaxtrain.config.ModelSection`
    make_task: Any  # (config, shard, batch) -> jaxtrain.types.Task
    make_specs: Any = None  # (model section) -> tree of Spec, to merge adapters without a task
    commands: Mapping[str, Command] = dataclasses.field(default_factory=dict)
    glossary: Any = ()  # of jaxtrain.telemetry.glossary.Entry: the meaning of its metrics
    export: Any = None  # a jaxtrain.types.Export; None = its defaults
    # name -> jaxtrain.types.Format
    formats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # format -> the package, and extra of jaxtrain, it needs
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    formats_help: str = ""  # a paragraph on the formats in `jaxtrain export --help`
    # [regex of an array's path, in a folder of safetensors: jaxtrain.types.Foreign]
    foreign: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # (run's config, model state and batch as NumPy arrays, position of the batch) -> a
    # jaxtrain.types.Example of each row
    examples: Any = None
    # (command with {run}, why) that a run which ended prints
    next_steps: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> Any:
        """Return the object of a field. Raises ImportError, AttributeError: it names none."""
        return resolved(getattr(self, name))


@functools.cache
def _imported(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def resolved(value: Any) -> Any:
    """Return the object of "module:name", other values as they are. Raises as an import does."""
    return _imported(value) if isinstance(value, str) else value


def shipped() -> list[str]:
    """List the workloads of this package by their dotted names. Imports none."""
    package = importlib.import_module(PACKAGE)
    return sorted(f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__))


def foreign_to(arrays: Iterable[str]) -> Any:
    """Return the `jaxtrain.types.Foreign` of a shipped workload that knows these paths, or None."""
    paths = list(arrays)
    for name in shipped():
        for pattern, reference in of(name).foreign.items():
            if any(re.search(pattern, path) for path in paths):
                return resolved(reference)
    return None


def is_kind(name: Any, expected: str) -> bool:
    """Whether ``name`` is ``expected``, or a module imported by --workload with its `config`."""
    if name == expected or not sys.modules.get(str(name)):
        return bool(name == expected)
    return of(name).get("config") is of(expected).get("config")


def of(name: str) -> Workload:
    """Import the workload ``name``.

    Raises WorkloadError: its WORKLOAD is none; ImportError and every error of its module.
    """
    module = cast(WorkloadModule, importlib.import_module(name))
    if (found := module.WORKLOAD if hasattr(module, "WORKLOAD") else None) is not None:
        if not isinstance(found, Workload):
            raise WorkloadError(
                f"{name}.WORKLOAD is a {type(found).__name__}; expected a"
                " jaxtrain.workload.Workload"
            )
        if wrong := [
            word for word, command in found.commands.items() if not isinstance(command, Command)
        ]:
            raise WorkloadError(
                f"the command {wrong[0]!r} of {name}.WORKLOAD is no jaxtrain.workload.Command; make"
                " it one"
            )
        return found
    return Workload(
        # None: an error of the config that names it
        module.Config if hasattr(module, "Config") else None,
        module.make_task if hasattr(module, "make_task") else None,
        module.make_specs if hasattr(module, "make_specs") else None,
        glossary=module.GLOSSARY if hasattr(module, "GLOSSARY") else (),
        export=module.EXPORT if hasattr(module, "EXPORT") else None,
    )
