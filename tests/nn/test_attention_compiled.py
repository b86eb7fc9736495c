"""Attention compiled for eight H100s and for TPUs, without any: the kernels called, and the data
that a device holds and moves.

The compilers are those of `--plan-setup gpu` and `--plan-setup tpu`, fetched once. Without them the
tests skip. `FULL` has every mesh with every mask and is slow.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxtrain.nn import attention, tokamax_attention
from jaxtrain.plan import environment
from loaders.text import packing

ROOT = pathlib.Path(__file__).parents[2]
FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
TPU = "tpu_custom_call"
MOSAIC = "mosaic_gpu_v2"  # tokamax's kernels, of which the backward pass has two
VARIANTS = (
    {},
    {"accumulate": 2},
    {"remat": "full"},
    {"remat": "save attention"},
    {"packed": True},
    {"packed": True, "remat": "full", "accumulate": 2},
    {"packed": True, "remat": "save attention"},
    {"packed": True, "kv_heads": 2, "window": 64},
    {"packed": True, "documents": 6},
    {"packed": True, "documents": 6, "kv_heads": 2, "remat": "save attention"},
    {"packed": True, "documents": 6, "kv_heads": 2, "window": 64},
    {"packed": True, "documents": 6, "causal": False, "window": 64},
    {"packed": True, "documents": 6, "tokens": 257, "remat": "full", "accumulate": 2},
    {"packed": True, "documents": 6, "train": False},
    {"window": 64},
    {"causal": False, "window": 64},
    {"kv_heads": 2},
    {"kv_heads": 1},
    {"tokens": 257, "causal": False},
    {"tokens": 257},
    {"tokens": 257, "packed": True},
    {"head_dim": 16},
    {"head_dim": 20},
    {"head_dim": 20, "packed": True, "documents": 6, "kv_heads": 2, "remat": "save attention"},
    {"head_dim": 80, "tokens": 352},
    {"head_dim": 128},
    {"head_dim": 256},
    {"head_dim": 256, "packed": True},
    {"dtype": "float32"},
    {"dtype": "float32", "packed": True},
    {"train": False},
    {"train": False, "packed": True},
)
MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2))
WIDE = {"heads": 8, "kv_heads": 8}
FULL = [
    *({**variant, "mesh": mesh} for mesh in MESHES for variant in VARIANTS),
    *(
        {**WIDE, "mesh": mesh, **v}
        for mesh in ((4, 1, 2), (1, 4, 2), (1, 1, 8))
        for v in ({}, {"packed": True})
    ),
    *(
        {**WIDE, "chips": "gpu:h100x8*2", "mesh": mesh}
        for mesh in ((16, 1, 1), (2, 8, 1), (2, 4, 2))
    ),
    {"chips": "gpu:h100x8*2", "mesh": (2, 4, 2), "train": False},
    {"packed": True, "documents": 1, "kv_heads": 2, "chips": "gpu:a100x8"},
    {"packed": True, "kv_heads": 2, "remat": "save attention"},
]
FEW = [
    {"mesh": (2, 2, 2), "accumulate": 2, "remat": "full", "kv_heads": 2},
    {"packed": True, "documents": 6, "kv_heads": 2, "window": 64, "remat": "save attention"},
    {"mesh": (2, 2, 2), "packed": True, "kv_heads": 2, "window": 64, "remat": "full"},
]
LONG = {
    "rows": 1,
    "tokens": 32768,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "packed": True,
    "documents": attention.MAX_DOCUMENTS,
    "remat": "full",
}


def compiled(kind: str, cases: list[dict], seconds: int = 600) -> list[dict]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    place = environment.folder(kind)
    env["PYTHONPATH"] = os.pathsep.join([str(place), str(ROOT), *filter(None, sys.path)])
    command = [
        sys.executable,
        str(ROOT / "tests" / "nn" / "attention_programs.py"),
        environment.versions(place),
    ]
    done = subprocess.run(
        command, input=json.dumps(cases), env=env, capture_output=True, text=True, timeout=seconds
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(cases), done.stderr[-3000:]
    return found


def expected(case: dict) -> dict[str, int]:
    """The calls of the kernels. A loop over the layers has each once. A recomputed kernel appears
    twice, unless its result is kept."""
    forward = 2 if case.get("remat") == "full" and case.get("train", True) else 1
    train = case.get("train", True)
    if case.get("dtype") == "float32" or in_chunks(case):
        return {}
    if is_refused(case):
        return {MOSAIC: forward + 2 * train}
    return {FORWARD: forward, **({BACKWARD: 1} if train else {})}


def is_refused(case: dict) -> bool:
    """Whether cuDNN refuses: other heads, windows to both sides, documents of an unknown or large
    number."""
    is_packed, documents = case.get("packed", False), case.get("documents", 0)
    is_beyond = is_packed and not 0 < documents <= attention.MAX_DOCUMENTS
    is_two_sided = bool(case.get("window") and not case.get("causal", True))
    return is_beyond or is_two_sided or case.get("head_dim", 64) % 8 > 0


def in_chunks(case: dict) -> bool:
    return is_refused(case) and not tokamax_attention.is_installed()


def right(found: dict) -> None:
    case = found["case"]
    assert "error" not in found, f"{case}: {found['error']}"
    assert found["kernels"] == expected(case), found
    assert not found["gathered"], f"{case}: q, k or v is gathered: {found['gathered']}"
    # a sequence that is no longer than a chunk is computed at once
    if case.get("dtype") != "float32" and not (in_chunks(case) and case.get("tokens", 320) <= 512):
        assert not found["square"], f"{case}: {found['square']}"


def test_attention_on_eight_h100s(gpu_compiler):
    """The kernels are in the program, and each device's kernel works on its own rows and heads. No
    array has all weights or masks."""
    for found in compiled("gpu", FEW):
        right(found)


@pytest.mark.slow
def test_attention_on_h100s_on_every_mesh_with_every_mask(gpu_compiler):
    for found in compiled("gpu", FULL, seconds=3000):
        right(found)


@pytest.mark.slow
def test_a_packed_row_of_32k_tokens_on_h100s_holds_nothing_that_grows_with_its_square(gpu_compiler):
    """Twice the tokens need twice the bytes: an array of T² bits would be 134 MB for a row.

    The kernel keeps numbers for each document that a row may have, here for as many as it takes.
    """
    whole, half = compiled("gpu", [LONG, {**LONG, "tokens": LONG["tokens"] // 2}])
    right(whole), right(half)
    assert whole["temporaries"] < 2.1 * half["temporaries"], (whole, half)


def test_the_largest_limit_by_the_documents_is_the_most_that_the_kernel_takes():
    assert packing.LIMITS[-1] == attention.MAX_DOCUMENTS


PACKED = {"chips": "tpu:v5e:2x4", "mesh": (8, 1, 1), "tokens": 512, "packed": True}


def spoken(found: list[dict], forward: int = 1, backward: int = 1) -> None:
    for one in found:
        assert "error" not in one, one
        assert one["kernels"] == {TPU: forward + backward}, one
        assert not one["square"] and not one["gathered"], one


def test_documents_on_a_tpu_whose_replicas_are_along_data(tpu_compiler):
    spoken(compiled("tpu", [PACKED]))


@pytest.mark.slow
def test_documents_on_every_generation_and_mesh(tpu_compiler):
    cases = [{**PACKED, "mesh": mesh} for mesh in ((1, 8, 1), (2, 2, 2))]
    cases.append({**PACKED, "remat": "save attention"})
    of_four = {**PACKED, "mesh": (4, 2, 1), "accumulate": 2}
    cases.append({**of_four, "chips": "tpu:v6e:2x4"})
    spoken(compiled("tpu", cases, seconds=1800))
    of_two = {**PACKED, "mesh": (2, 1, 2), "remat": "save attention"}
    older = [{**of_four, "chips": "tpu:v4:2x2x2"}, {**of_two, "chips": "tpu:v4:2x2x1"}]
    spoken(compiled("tpu", older), backward=2)  # splash


@pytest.mark.slow
def test_a_packed_row_on_a_tpu_holds_nothing_that_grows_with_its_square(tpu_compiler):
    """An array of T² bits would be 0.54 GB at the second length and 2.1 GB at the third.

    The first two are of the kernel that goes over a list of blocks, whose sums have no padding:
    at the second, splash took 0.54 GB, with a copy of its log-sum-exp for 128 lanes.
    """
    short = {**LONG, "chips": "tpu:v5e:2x4"}
    lengths = [n * LONG["tokens"] for n in (1, 2, 4)]
    rows = compiled("tpu", [{**short, "tokens": tokens} for tokens in lengths], seconds=1800)
    spoken(rows[:2], forward=2)
    spoken(rows[2:], forward=2, backward=2)  # splash
    one, two, four = (found["temporaries"] for found in rows)
    assert two < 0.45 * lengths[1] ** 2 / 8, (one, two, four)
    assert four < 0.6 * lengths[2] ** 2 / 8, (one, two, four)
