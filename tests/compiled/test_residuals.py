"""Published sizes, compiled for eight H100s with parameters split over all: what no device may hold."""

import glob
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SPLIT = ("--config.mesh.data=1", "--config.mesh.fsdp=8")


def environment() -> str | None:
    """The folder of packages that compile for GPUs: $JAXTRAIN_GPU_ENV (or an environment there), else the cache's."""
    base = os.environ.get("JAXTRAIN_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxtrain")
    jaxlib, python = importlib.metadata.version("jaxlib"), f"{sys.version_info.major}{sys.version_info.minor}"
    place = os.environ.get("JAXTRAIN_GPU_ENV") or os.path.join(base, "envs", f"plan-gpu-jaxlib-{jaxlib}-py{python}")
    place = os.path.expanduser(place)
    packages = [*glob.glob(os.path.join(place, "lib", "python3*", "site-packages")), place][0]
    return packages if os.path.isdir(os.path.join(packages, "jax_plugins")) else None


pytestmark = pytest.mark.skipif(
    environment() is None, reason="no compiler for GPUs: set JAXTRAIN_GPU_ENV to an environment with jax-cuda12-plugin"
)


def compiled(*arguments):
    path = os.pathsep.join([environment(), str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).with_name("on_h100s.py")), *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def shapes(text):
    """(dtype, dims) of all arrays of a program, those inside of fusions too."""
    return {(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in re.findall(r"\b(\w+)\[([\d,]+)\]", text)}


def test_an_encoder_keeps_no_float32_for_every_layer_and_token():
    """ViT-S, bfloat16, 128 spectrograms of 257 tokens on each device, twice."""
    model = {"embed": 384, "depth": 12, "heads": 6, "patch": (16, 16), "dtype": "bfloat16"}
    size = [f"--config.model.{name}={value}" for name, value in model.items()]
    found = compiled("configs/xcm.py", "--config.train.batch=2048", "--config.train.accumulate=2", *size, *SPLIT)
    kept = {(dtype, dims) for dtype, dims in shapes(found["text"]) if dims[:3] == (12, 128, 257)}
    assert ("bf16", (12, 128, 257, 1536)) in kept
    assert not [dims for dtype, dims in kept if dtype == "f32"]


def test_no_device_has_the_whole_embedding_or_head_of_a_language_model(tmp_path):
    """qwen3-0.6b, 64 rows of 2,048 tokens. It was 4.89 GB, of which 0.62 each were embedding, head and gradient."""
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 2000)
    sources = f"--config.data.sources=({{'path': '{tmp_path / 'text.txt'}'}},)"
    found = compiled("configs/lm.py:qwen3-0.6b", sources, *SPLIT)
    assert not [dims for _, dims in shapes(found["text"]) if sorted(dims) == [1024, 151936]]
    assert found["peak"] < 3.8e9
    assert found["sent"] < 3.3e9


def test_matrices_are_not_written_beside_adapters():
    """Higgs Audio, 64 rows. Merged with the adapters', the feed-forward nets' matrices were [3072, 8192 + 8192 + 32 + 32]."""
    found = compiled("configs/higgs.py:blank", "--config.train.batch=64", *SPLIT)
    assert not [dims for _, dims in shapes(found["text"]) if sorted(dims) == [3072, 128256]]
    assert not [dims for _, dims in shapes(found["text"]) if sorted(dims) == [3072, 16448]]
    assert found["peak"] < 4.2e9
