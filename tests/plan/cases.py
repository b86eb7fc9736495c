"""Small and larger configs of each workload, for the tests of plans."""

import pathlib

import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.parallel import layout as layout_lib
from tests.support import installed

ROOT = pathlib.Path(__file__).parents[2]
BOARDS = "({'kind': 'sudoku4', 'n_train': 20, 'n_test': 5, 'blanks': (3, 6)},)"
BIRD = (("model.embed", "64"), ("model.depth", "2"), ("model.heads", "2"), ("model.unroll", "1"))
TRM = (("data.sources", BOARDS), ("train.batch", "64"))
LANGUAGE = (("model.unroll", "1"), ("train.batch", "64"), ("model.generation.prompts", "('one',)"))
NARROW = "(32, 32, 32)"
WIDTHS = ("trunk", "decode_video", "decode_audio", "decode_text")
GIBLET = (
    ("train.batch", "16"),
    ("model.dtype", "float32"),
    ("model.video_widths", NARROW),
    ("model.head_width", "32"),
    ("model.bottleneck", "32"),
    ("model.decoder_widths", "(64, 64, 64, 64)"),
    *((f"model.{name}_widths", "(64, 64)") for name in WIDTHS),
)
AUDIO_LANGUAGE = (
    ("model.embed", "64"),
    ("model.depth", "2"),
    ("model.heads", "4"),
    ("model.kv_heads", "2"),
    ("model.head_dim", "16"),
    ("model.mlp", "128"),
    ("train.batch", "16"),
    ("train.accumulate", "1"),
    ("model.remat", "none"),
)
WORKLOADS = {
    "bird": ("configs/xcm.py", BIRD),
    "trm": ("configs/trm_sudoku.py:4x4", TRM),
    "language": ("configs/shakespeare_char.py:{text}", LANGUAGE),
    "giblet": ("configs/giblet.py:blank", GIBLET),
    "audio_language": ("configs/higgs.py:blank", AUDIO_LANGUAGE),
    "language, recomputed": (
        "configs/shakespeare_char.py:{text}",
        (*LANGUAGE, ("model.remat", "full")),
    ),
    "trm, recomputed": ("configs/trm_sudoku.py:4x4", (*TRM, ("model.remat", "full"))),
}


DTYPE = ("model.dtype", "bfloat16")
LARGE = {
    "bird": (
        ("model.embed", "128"),
        ("model.depth", "4"),
        ("model.heads", "4"),
        ("model.patch", "(16, 16)"),
        DTYPE,
    ),
    "trm": (
        ("data.sources", "({'n_train': 20, 'n_test': 5, 'blanks': (20, 30)},)"),
        ("model.embed", "128"),
        ("model.heads", "4"),
        ("model.inner_multiple", "256"),
        ("model.puzzle_embed", "128"),
        ("model.puzzle_tokens", "16"),
        DTYPE,
        ("model.cycles_low", "6"),
    ),
    "language": (
        ("model.embed", "512"),
        ("model.depth", "8"),
        ("model.heads", "8"),
        ("model.mlp", "1536"),
        ("data.context", "512"),
        DTYPE,
    ),
}
LARGE["trm, recomputed"] = LARGE["trm"]
LARGE["language, recomputed"] = LARGE["language"]


def load(workload, tmp_path, monkeypatch, *overrides):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("JAXTRAIN_XCM", raising=False)
    source, own = WORKLOADS[workload]
    if workload.partition(",")[0] not in installed.NAMES:
        pytest.skip(f"jaxtrain.workloads has no {workload}")
    if "{text}" in source:
        (tmp_path / "text.txt").write_text(
            "one two three four five six seven eight nine ten\n" * 200
        )
        source = source.format(text=tmp_path / "text.txt")
    return config_lib.load(source, [*own, ("workdir", str(tmp_path)), *overrides])


def on(mesh, devices):
    sizes = dict(zip(("data", "fsdp", "model"), mesh, strict=True))
    return layout_lib.make_mesh(**sizes, devices=devices[: np.prod(mesh)])
