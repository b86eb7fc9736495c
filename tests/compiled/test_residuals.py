"""Published sizes, compiled for eight H100s with parameters split over all: what no device may hold."""

import pathlib
import re

import pytest

from jaxtrain import config as config_lib
from jaxtrain.plan import worker

ROOT = pathlib.Path(__file__).parents[2]
SPLIT = (("mesh.data", "1"), ("mesh.fsdp", "8"))
pytestmark = pytest.mark.usefixtures("gpu_compiler")


def compiled(source, *overrides):
    config = config_lib.load(f"{ROOT}/{source}", [*overrides, *SPLIT])
    [answer] = worker.ask([worker.Job(config, "gpu:h100x8", worker.LAST)])
    assert answer.compiled, answer.error
    return answer.compiled


def shapes(text):
    """(dtype, dims) of all arrays of a program, those inside of fusions too."""
    return {(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in re.findall(r"\b(\w+)\[([\d,]+)\]", text)}


def test_an_encoder_keeps_no_float32_for_every_layer_and_token():
    """ViT-S, bfloat16, 128 spectrograms of 257 tokens on each device, twice."""
    model = {"embed": 384, "depth": 12, "heads": 6, "patch": (16, 16), "dtype": "bfloat16"}
    size = [(f"model.{name}", str(value)) for name, value in model.items()]
    found = compiled("configs/xcm.py", ("train.batch", "2048"), ("train.accumulate", "2"), *size)
    kept = {(dtype, dims) for dtype, dims in shapes(found.text) if dims[:3] == (12, 128, 257)}
    assert ("bf16", (12, 128, 257, 1536)) in kept
    assert not [dims for dtype, dims in kept if dtype == "f32"]


def test_no_device_has_the_whole_embedding_or_head_of_a_language_model(tmp_path):
    """qwen3-0.6b, 64 rows of 2,048 tokens. It was 4.89 GB, of which 0.62 each were embedding, head and gradient."""
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 2000)
    sources = ("data.sources", f"({{'path': '{tmp_path / 'text.txt'}'}},)")
    found = compiled("configs/lm.py:qwen3-0.6b", sources)
    assert not [dims for _, dims in shapes(found.text) if sorted(dims) == [1024, 151936]]
    assert found.peak < 3.8e9
    assert sum(sent for _, sent in found.collectives.values()) < 3.3e9


def test_matrices_are_not_written_beside_adapters():
    """Higgs Audio, 64 rows. Merged with the adapters', the feed-forward nets' matrices were [3072, 8192 + 8192 + 32 + 32]."""
    found = compiled("configs/higgs.py:blank", ("train.batch", "64"))
    assert not [dims for _, dims in shapes(found.text) if sorted(dims) == [3072, 128256]]
    assert not [dims for _, dims in shapes(found.text) if sorted(dims) == [3072, 16448]]
    assert found.peak < 4.2e9
