"""An audio language model (Higgs Audio): text and codes of sound, with adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.workload import Command, Workload
from jaxtrain.workloads.audio_language.glossary import GLOSSARY

if TYPE_CHECKING:
    from jaxtrain.config import Config as RunConfig
    from jaxtrain.types import Example, Export, PyTree, Shard, Task
    from jaxtrain.workloads.audio_language.model import Config

_HERE = "jaxtrain.workloads.audio_language"


# Each function imports when it is called: the commands are listed without JAX.
def _config() -> type[Config]:
    from jaxtrain.workloads.audio_language.model import Config

    return Config


def _make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    from jaxtrain.workloads.audio_language import loss

    return loss.make_task(config, shard, batch)


def _make_specs(model: Config) -> PyTree:
    from jaxtrain.workloads.audio_language.model import make_specs

    return make_specs(model)


def _examples(
    config: RunConfig[Config], model_state: PyTree, batch: Mapping[str, Any], position: int
) -> Iterable[Example]:
    from jaxtrain.workloads.audio_language import examples

    return examples.examples(config, model_state, batch, position)


def _export() -> Export:
    from jaxtrain.workloads.audio_language.hugging_face import EXPORT

    return EXPORT


WORKLOAD = Workload(
    config=_config,
    make_task=_make_task,
    make_specs=_make_specs,
    commands={
        "train-codec": Command(
            f"{_HERE}.commands.train_codec", "data", "learn an audio codec from recordings"
        ),
        "encode-audio": Command(
            f"{_HERE}.commands.encode_audio",
            "data",
            "encode a manifest's recordings ahead of training",
            own_code=("--codec",),
        ),
        "generate-audio": Command(
            f"{_HERE}.commands.generate_audio",
            "inference",
            "answer prompts with sound, by an audio language model",
            caches=True,
            own_code=("--codec",),
        ),
    },
    glossary=GLOSSARY,
    examples=_examples,
    export=_export,
)
