"""The tiny recursive model on Sudoku."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.workload import Command, Workload
from jaxtrain.workloads.trm.glossary import GLOSSARY

if TYPE_CHECKING:
    from jaxtrain.config import Config as RunConfig
    from jaxtrain.types import Example, Export, PyTree, Shard, Task
    from jaxtrain.workloads.trm.model import Config

_HERE = "jaxtrain.workloads.trm"


# Each function imports when it is called: the commands are listed without JAX.
def _config() -> type[Config]:
    from jaxtrain.workloads.trm.model import Config

    return Config


def _make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    from jaxtrain.workloads.trm import loss

    return loss.make_task(config, shard, batch)


def _make_specs(model: Config) -> PyTree:
    from jaxtrain.workloads.trm.model import make_specs

    return make_specs(model)


def _examples(
    config: RunConfig[Config], model_state: PyTree, batch: Mapping[str, Any], position: int
) -> Iterable[Example]:
    from jaxtrain.workloads.trm import loss

    return loss.examples(config, model_state, batch, position)


def _export() -> Export:
    from jaxtrain.workloads.trm.model import EXPORT

    return EXPORT


WORKLOAD = Workload(
    config=_config,
    make_task=_make_task,
    make_specs=_make_specs,
    commands={
        "sudoku": Command(f"{_HERE}.commands.sudoku", "data", "generate puzzles with one solution"),
        "solve": Command(
            f"{_HERE}.commands.solve",
            "inference",
            "solve puzzles with a recursive model",
            caches=True,
        ),
    },
    glossary=GLOSSARY,
    examples=_examples,
    export=_export,
)
