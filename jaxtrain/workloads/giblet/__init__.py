"""An autoencoder of films and the fMRI of their viewers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.workload import Command, Workload
from jaxtrain.workloads.giblet.glossary import GLOSSARY

if TYPE_CHECKING:
    from jaxtrain.config import Config as RunConfig
    from jaxtrain.types import Example, Export, PyTree, Shard, Task
    from jaxtrain.workloads.giblet.model import Config

_HERE = "jaxtrain.workloads.giblet"


# Each function imports when it is called: the commands are listed without JAX.
def _config() -> type[Config]:
    from jaxtrain.workloads.giblet.model import Config

    return Config


def _make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    from jaxtrain.workloads.giblet import loss

    return loss.make_task(config, shard, batch)


def _make_specs(model: Config) -> PyTree:
    from jaxtrain.workloads.giblet.model import make_specs

    return make_specs(model)


def _examples(
    config: RunConfig[Config], model_state: PyTree, batch: Mapping[str, Any], position: int
) -> Iterable[Example]:
    from jaxtrain.workloads.giblet import loss

    return loss.examples(config, model_state, batch, position)


def _export() -> Export:
    from jaxtrain.workloads.giblet.model import EXPORT

    return EXPORT


WORKLOAD = Workload(
    config=_config,
    make_task=_make_task,
    make_specs=_make_specs,
    commands={
        "prepare-giblet": Command(
            f"{_HERE}.commands.prepare_giblet",
            "data",
            "make a dataset of a film and the brains of its viewers",
        ),
        "predict": Command(
            f"{_HERE}.commands.predict",
            "inference",
            "predict the fMRI of a film, as NIfTI",
            caches=True,
        ),
    },
    glossary=GLOSSARY,
    examples=_examples,
    export=_export,
)
