"""Language models on packed documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.workload import Command, Workload
from jaxtrain.workloads.language.glossary import GLOSSARY

if TYPE_CHECKING:
    from jaxtrain.config import Config as RunConfig
    from jaxtrain.types import Example, Export, PyTree, Shard, Task
    from jaxtrain.workloads.language.model import Config

_HERE = "jaxtrain.workloads.language"


# Each function imports when it is called: the commands are listed without JAX.
def _config() -> type[Config]:
    from jaxtrain.workloads.language.model import Config

    return Config


def _make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    from jaxtrain.workloads.language import loss

    return loss.make_task(config, shard, batch)


def _make_specs(model: Config) -> PyTree:
    from jaxtrain.workloads.language.model import make_specs

    return make_specs(model)


def _examples(
    config: RunConfig[Config], model_state: PyTree, batch: Mapping[str, Any], position: int
) -> Iterable[Example]:
    from jaxtrain.workloads.language import text

    return text.examples(config, model_state, batch, position)


def _export() -> Export:
    from jaxtrain.workloads.language.hugging_face import EXPORT

    return EXPORT


WORKLOAD = Workload(
    config=_config,
    make_task=_make_task,
    make_specs=_make_specs,
    commands={
        "tokens": Command(
            f"{_HERE}.commands.tokens", "data", "make token files of text, JSONL, Parquet or Arrow"
        ),
        "generate": Command(
            f"{_HERE}.commands.generate",
            "inference",
            "continue prompts with a language model",
            caches=True,
        ),
    },
    glossary=GLOSSARY,
    examples=_examples,
    export=_export,
)
