"""Attention over rows of documents on TPUs, by the interpreter against the formula."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import AXIS_RULES
from jaxtrain.nn import attention, pair_blocks
from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_mesh
from tests.nn import document_rows
from tests.nn.document_rows import ROWS, assert_equals_the_formula
from tools.chip import correctness

SEGMENTS = jnp.asarray(list(ROWS.values()), jnp.int32)
# The last document of these rows begins in each slab of the first and the second block of keys.
slow = pytest.mark.slow
OFFSETS = [[1] * first + [2] * (384 - first) for first in (20, 50, 80, 110, 140, 170, 200, 230)]


def steps_of(segments, *, causal=True, window=0):
    """The steps' rows, blocks of queries and of keys, first slabs of keys, and flags."""
    [listed] = np.asarray(pair_blocks.document_steps(segments, causal=causal, window=window))
    entries = listed[1 : 1 + listed[0]]
    numbers = entries >> 18 & 0x3FF, entries >> 9 & 0x1FF, entries & 0x1FF, entries >> 30 & 3
    return *numbers, entries & (3 << 28)


@pytest.mark.parametrize(
    ("heads", "causal", "window"),
    [
        ((4, 2, 64), True, 0),
        pytest.param((2, 2, 128), False, 0, marks=slow),
        pytest.param((4, 1, 64), True, 60, marks=slow),
        ((2, 2, 64), False, 130),
    ],
    ids=str,
)
def test_it_equals_the_formula_and_its_gradients(heads, causal, window):
    masks = dict(causal=causal, window=window)
    segments = jnp.asarray([*ROWS.values(), *OFFSETS], jnp.int32)
    assert_equals_the_formula(pair_blocks.pair_blocks, segments, heads, **masks)


IN_ORDER = jnp.asarray([row for name, row in ROWS.items() if name != "in no order"], jnp.int32)


@pytest.mark.parametrize(
    ("segments", "causal"),
    [
        (IN_ORDER, True),
        (IN_ORDER, False),
        # rows of the check of a card or of a slice, which had padding before their documents
        *(
            (jnp.asarray(correctness.documents_of(shape.rows, shape.tokens)), shape.causal)
            for shape in correctness.attention_shapes(quick=False).values()
            if shape.packed
        ),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_steps_are_the_blocks_with_a_pair_in_the_order_of_queries(segments, causal):
    rows, queries, keys, _, flags = steps_of(segments, causal=causal)
    seen = document_rows.blocks_with_a_pair(segments, causal=causal)
    assert list(zip(rows, queries, keys, strict=True)) == list(
        zip(*map(np.ndarray.tolist, np.nonzero(seen)), strict=True)
    )
    blocks = list(zip(rows, queries, strict=True))
    is_first = [i == 0 or blocks[i] != blocks[i - 1] for i in range(len(blocks))]
    assert is_first == ((flags & pair_blocks.FIRST) != 0).tolist()
    assert is_first[1:] + [True] == ((flags & pair_blocks.LAST) != 0).tolist()


@pytest.mark.parametrize("masks", [(True, 0), (True, 60), (False, 0), (False, 130)], ids=str)
def test_a_step_begins_at_the_first_slab_of_keys_with_a_pair(masks):
    """All other steps of a block of queries have all keys."""
    masks = dict(zip(("causal", "window"), masks, strict=True))
    segments = jnp.asarray([*OFFSETS, *(row for row in ROWS.values() if row[0] != 5)], jnp.int32)
    seen = np.asarray(document_rows.pairs(segments, **masks))
    seen = seen.reshape(-1, 3, 128, 3, 4, 32).any((2, 5))
    rows, queries, keys, slabs, flags = steps_of(segments, **masks)
    first = np.where(flags & pair_blocks.FIRST, seen[rows, queries, keys].argmax(1), 0)
    assert slabs.tolist() == first.tolist()
    assert set(slabs) >= {0, 3}


def test_long_rows_compute_at_most_1_3_of_the_pairs_that_documents_need():
    """Documents are as long as those of the measured models."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 0.9, 100), 16, 8_000).astype(int) + 2
    numbers = np.repeat(np.arange(100) + 1, lengths)[: 4 * 8192].reshape(4, 8192)
    needed = sum(
        length * (length + 1) // 2
        for row in numbers
        for length in np.unique(row, return_counts=True)[1]
    )
    *_, slabs, _ = steps_of(jnp.asarray(numbers, jnp.int32))
    assert (128 - 32 * slabs).sum() * 128 <= 1.3 * needed < 128 * 128 * len(slabs)


@pytest.mark.parametrize(("lengths", "computed"), document_rows.WHOLE_BLOCKS)
def test_steps_are_counted_against_documents(lengths, computed):
    segments = document_rows.of_lengths(lengths)
    assert len(steps_of(segments)[0]) == computed


@pytest.mark.parametrize("poisoned", [(1, 2), (0, 3)], ids=["keys and values", "queries and dy"])
def test_a_document_reads_no_block_of_another_one(poisoned):
    """Neither its results nor the gradients of its keys."""
    document_rows.assert_reads_no_other_blocks(pair_blocks.pair_blocks, poisoned)


FIRST_SLABS = [32, *(pytest.param(first, marks=slow) for first in (64, 96))]


@pytest.mark.parametrize("first", FIRST_SLABS)
def test_a_step_reads_no_keys_and_values_of_the_slabs_that_it_leaves_out(first):
    """Keys of a document that ends in the first block are not numbers, forward and backward."""
    is_poisoned = np.arange(384) < first
    assert_reads_no_slab(first, (1, 2), is_poisoned, slice(128, 384))


@pytest.mark.parametrize("first", FIRST_SLABS)
def test_the_slabs_that_a_step_leaves_out_get_no_gradient(first):
    """Queries of the other blocks and their gradients are not numbers."""
    is_poisoned = np.arange(384) >= 128
    assert_reads_no_slab(first, (0, 3), is_poisoned, slice(0, first))


def assert_reads_no_slab(first, poisoned, is_poisoned, place):
    segments = jnp.asarray([[1] * first + [2] * (384 - first)], jnp.int32)
    arrays = document_rows.inputs(1, 384, 2, 1, 64)
    exact = document_rows.by_the_formula(segments, *arrays)
    for i in poisoned:
        arrays[i] = jnp.where(is_poisoned[None, :, None, None], jnp.nan, arrays[i])
    results = document_rows.by_the_kernel(pair_blocks.pair_blocks, segments, *arrays)
    document_rows.assert_same(results, exact, place=(0, place))


def test_heads_that_exceed_the_memory_of_a_chip_take_several_parts(monkeypatch):
    """Two of keys, and two of queries to each, which get a key head of their own."""
    monkeypatch.setattr(pair_blocks, "BLOCKS", 1 << 10)
    assert pair_blocks._times(2, 64, 384, 4) == 2
    assert pair_blocks._parts(4, 4, 64, 384, 4) == 4
    assert_equals_the_formula(pair_blocks.pair_blocks, SEGMENTS, (4, 2, 64))


def test_rows_whose_list_exceeds_the_scalar_memory_take_several_calls(monkeypatch):
    monkeypatch.setattr(pair_blocks, "LISTS", 2 * 4 * 6)
    assert pair_blocks.rows_of_a_call(384, causal=True) == 2
    assert_equals_the_formula(pair_blocks.pair_blocks, SEGMENTS, (2, 1, 64))


@pytest.mark.slow
def test_devices_of_a_mesh_have_calls_of_their_own(monkeypatch):
    """Each has three rows, of which a call of the kernel takes two."""
    monkeypatch.setattr(pair_blocks, "LISTS", 2 * 4 * 6)
    names = ["aligned", "across blocks", "in no order"]
    attend_on_a_mesh((2, 1, 1), "v5e", [ROWS[name] for name in names + names[::-1]], monkeypatch)


def test_lists_that_a_rule_would_split_otherwise_than_rows_are_made_in_each_layer(monkeypatch):
    """Three rows are whole on both devices, and their two calls could be split."""
    monkeypatch.setattr(pair_blocks, "LISTS", 2 * 4 * 6)
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    rules = {**AXIS_RULES, "batch": "fsdp?"}
    shard = layout.Layout(mesh, rules, layout.Devices("tpu", "v5e")).shard

    def blocks_of(segments):
        return attention.blocks_of(segments, shard, 64, causal=True, window=0)

    assert jax.eval_shape(blocks_of, SEGMENTS[:2]) is not None
    assert jax.eval_shape(blocks_of, SEGMENTS[:3]) is None


def test_rows_may_have_more_documents_than_blocks_and_any_numbers():
    segments = document_rows.with_any_numbers()
    assert_equals_the_formula(pair_blocks.pair_blocks, segments, (2, 1, 64))


@pytest.mark.parametrize(
    ("tokens", "k", "causal", "fits"),
    [
        (65_536, 64, True, True),
        (65_536, 64, False, False),  # its list exceeds the scalar memory
        (32_768, 64, False, True),
        (65_536, 128, True, False),  # its gradients of keys exceed VMEM
        (131_072, 64, True, False),
        (2_048, 80, True, False),
        (2_000, 64, True, False),
    ],
)
def test_rows_beyond_the_memory_of_a_chip_are_those_of_splash(tokens, k, causal, fits):
    q = jax.ShapeDtypeStruct((1, tokens, 4, k), jnp.bfloat16)
    masks = attention.Masks(causal=causal, packed=True)
    other = "xla" if k == 80 or tokens % 128 else "splash"
    assert attention.choose(q, ("tpu", ""), masks) == ("pair_blocks" if fits else other)


@pytest.mark.parametrize(
    ("version", "tokens", "k", "causal", "reason"),
    [
        ("v4", 2_048, 64, True, "TPU v4, whose cores have 16 MiB of VMEM, below 48"),
        (
            "v5e",
            65_536,
            128,
            True,
            "causal rows of 65536 tokens with heads of 128 values, only up to 32768",
        ),
        (
            "v5e",
            65_536,
            64,
            False,
            "rows of 65536 tokens with heads of 64 values, only up to 56704",
        ),
        ("v5e", 2_048, 64, True, ""),
    ],
)
def test_documents_that_splash_takes_instead_are_reported_once(
    version, tokens, k, causal, reason, caplog
):
    attention._log_splash.cache_clear()
    q = jax.ShapeDtypeStruct((1, tokens, 4, k), jnp.bfloat16)
    with caplog.at_level("INFO", "jaxtrain"):
        for packed in (True, True, False):
            attention.choose(q, ("tpu", version), attention.Masks(causal, packed=packed))
    text = f"pair_blocks, the kernel of TPUs for documents, does not take {reason}: splash is used"
    assert caplog.messages == ([text] if reason else [])


@slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("target", "rows", "tokens", "heads"),
    [
        ("tpu:v5e:2x2", 256, 2048, (2, 1, 128)),
        ("tpu:v5e:2x2", 1, 32768, (8, 2, 128)),
        ("tpu:v5e:2x2", 1, 32768, (64, 1, 128)),  # as much again for 64 heads of queries
        ("tpu:v5e:2x2", 1, 65536, (4, 2, 64)),
        ("tpu:v5e:2x2", 2, 8192, (32, 32, 64)),
        ("tpu:v5p:2x2x1", 1, 65536, (4, 2, 64)),
        ("tpu:v6e:2x2", 1, 65536, (4, 2, 64)),
    ],
    ids=str,
)
def test_lists_and_gradients_fit_into_the_memory_of_a_chip(target, rows, tokens, heads):
    calls = document_rows.kernels_on_tpu(pair_blocks.pair_blocks, rows, tokens, heads, target)
    assert calls == 2 * -(-rows // pair_blocks.rows_of_a_call(tokens, causal=True))


@pytest.mark.parametrize("version", ["v5e", "v4"])
def test_a_chip_with_less_memory_than_the_kernel_takes_has_splash(version):
    q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.bfloat16)
    kernel = {"v5e": "pair_blocks", "v4": "splash"}[version]
    assert attention.choose(q, ("tpu", version), attention.Masks(packed=True)) == kernel


@pytest.mark.parametrize("version", ["v5e", "v4"], ids=["pair_blocks", "splash"])
@pytest.mark.parametrize(
    "mesh",
    [*(pytest.param(mesh, marks=slow) for mesh in ((2, 1, 1), (1, 1, 2))), (2, 1, 2)],
    ids=str,
)
def test_devices_of_a_mesh_attend_to_their_own_rows_and_heads(version, mesh, monkeypatch):
    """The blocks of documents are found once, and split as the rows are."""
    attend_on_a_mesh(mesh, version, [ROWS["aligned"], ROWS["across blocks"]], monkeypatch)


def attend_on_a_mesh(mesh, version, rows, monkeypatch):
    for module, name in ((attention, "splash"), (pair_blocks, "pair_blocks")):
        in_interpreter = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, in_interpreter)
    devices = make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)])
    shard = layout.Layout(devices, AXIS_RULES, layout.Devices("tpu", version)).shard
    segments = jnp.asarray(rows, jnp.int32)
    *qkv, dy = arrays = document_rows.inputs(*segments.shape, 4, 2, 64)

    @jax.jit
    def both(dy, *qkv):
        blocks = attention.blocks_of(segments, shard, 64, causal=True, window=0)
        how = dict(causal=True, segments_bt=segments, blocks=blocks)
        y, pull = jax.vjp(lambda *qkv: attention.within(shard, *qkv, **how), *qkv)
        return y, *pull(dy)

    exact = document_rows.by_the_formula(segments, *arrays)
    document_rows.assert_same(both(dy, *qkv), exact)
