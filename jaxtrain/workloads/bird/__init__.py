"""Bird sound: a vision transformer over spectrograms, with labels or without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxtrain.workload import Command, Workload
from jaxtrain.workloads.bird.glossary import GLOSSARY

if TYPE_CHECKING:
    from jaxtrain.config import Config as RunConfig
    from jaxtrain.types import Example, Export, Foreign, Format, PyTree, Shard, Task
    from jaxtrain.workloads.bird.model import Config

_HERE = "jaxtrain.workloads.bird"


# Each function imports when it is called: the commands are listed without JAX.
def _config() -> type[Config]:
    from jaxtrain.workloads.bird.model import Config

    return Config


def _make_task(config: RunConfig[Config], shard: Shard, batch: int) -> Task:
    from jaxtrain.workloads.bird import model

    return model.make_task(config, shard, batch)


def _make_specs(model: Config) -> PyTree:
    from jaxtrain.workloads.bird.model import make_specs

    return make_specs(model)


def _examples(
    config: RunConfig[Config], model_state: PyTree, batch: Mapping[str, Any], position: int
) -> Iterable[Example]:
    from jaxtrain.workloads.bird import examples

    return examples.examples(config, model_state, batch, position)


def _export() -> Export:
    from jaxtrain.workloads.bird.export import EXPORT

    return EXPORT


def _timm() -> Format:
    from jaxtrain.workloads.bird.export.timm import FORMAT

    return FORMAT


def _onnx() -> Format:
    from jaxtrain.workloads.bird.export.onnx import FORMAT

    return FORMAT


def _timm_weights() -> Foreign:
    from jaxtrain.workloads.bird.export.timm import FOREIGN

    return FOREIGN


_FORMATS = """\
Encoders of sound have the formats `timm` (`timm.create_model` reads its config.json) and `onnx`.
The latter adds model.onnx and example_onnx.py: samples in, features and scores out, float32,
opset 20. Its metadata hold the sample rate, the number of samples and the classes.

    jaxtrain export runs/xcm --format timm --license cc-by-4.0 --out xcm-timm
    jaxtrain export runs/xcm --format onnx --out xcm-onnx
"""

WORKLOAD = Workload(
    config=_config,
    make_task=_make_task,
    make_specs=_make_specs,
    commands={
        "index": Command(
            f"{_HERE}.commands.index",
            "data",
            "index recordings: folders, tables of annotations, hours-long files",
        ),
        "prepare": Command(
            f"{_HERE}.commands.prepare",
            "data",
            "decode recordings once, for training on many accelerators or few cores",
        ),
        "detect": Command(
            f"{_HERE}.commands.detect",
            "inference",
            "what is heard when: tables and scores of recordings of any length",
            caches=True,
        ),
        "fit": Command(
            f"{_HERE}.commands.fit",
            "inference",
            "a head for new classes, from few examples on embeddings",
            caches=True,
        ),
        "search": Command(
            f"{_HERE}.commands.search",
            "inference",
            "windows of embeddings that sound like a clip, or that a head gives most",
            caches=True,
        ),
        "review": Command(
            f"{_HERE}.commands.review",
            "inference",
            "review the results of detect or search, on a page of this machine",
        ),
        "embed": Command(
            f"{_HERE}.commands.embed",
            "evaluate",
            "embed any dataset with a trained encoder",
            caches=True,
        ),
        "probe": Command(
            f"{_HERE}.commands.probe",
            "evaluate",
            "measure how good embeddings are: linear probe, k-NN, few shot",
        ),
        "benchmark": Command(
            f"{_HERE}.commands.benchmark",
            "evaluate",
            "score a run as BirdSet, ESC-10 or ESC-50 does, from their files",
            caches=True,
        ),
    },
    glossary=GLOSSARY,
    examples=_examples,
    export=_export,
    formats={"timm": _timm, "onnx": _onnx},
    needs={"onnx": "onnx"},
    formats_help=_FORMATS,
    foreign={r"(^|/)patch_embed/proj/weight$": _timm_weights},
    next_steps=(("jaxtrain embed {run} --out {run}-embeddings", "for the features of recordings"),),
)
