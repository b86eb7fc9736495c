"""Attention over rows of documents on TPUs, by the interpreter against the formula."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import AXIS_RULES
from jaxtrain.nn import attention, pair_blocks
from jaxtrain.nn.splash import document_blocks
from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_mesh
from tests.nn import document_rows
from tests.nn.document_rows import ROWS, assert_equals_the_formula

SEGMENTS = jnp.asarray(list(ROWS.values()), jnp.int32)


def blocks_of(segments, *, causal=True, window=0):
    return document_blocks(segments, causal=causal, window=window, size=pair_blocks.BLOCK)


@pytest.mark.parametrize(
    ("heads", "causal", "window"),
    [
        ((4, 2, 64), True, 0),
        ((2, 2, 128), False, 0),
        ((4, 1, 64), True, 60),
        ((2, 2, 64), False, 130),
    ],
    ids=str,
)
def test_it_equals_the_formula_and_its_gradients(heads, causal, window):
    masks = dict(causal=causal, window=window)
    assert_equals_the_formula(pair_blocks.pair_blocks, SEGMENTS, heads, **masks)


@pytest.mark.parametrize("causal", [True, False])
def test_steps_are_the_blocks_with_a_pair_in_the_order_of_queries(causal):
    segments = jnp.asarray([row for name, row in ROWS.items() if name != "in no order"], jnp.int32)
    list_p, count = pair_blocks.steps(blocks_of(segments, causal=causal), causal=causal)
    entries = np.asarray(list_p)[: int(count)]
    rows, queries, keys = entries >> 18 & 0x3FF, entries >> 9 & 0x1FF, entries & 0x1FF
    seen = document_rows.blocks_with_a_pair(segments, causal=causal)
    assert list(zip(rows, queries, keys, strict=True)) == list(
        zip(*map(np.ndarray.tolist, np.nonzero(seen)), strict=True)
    )
    blocks = list(zip(rows, queries, strict=True))
    is_first = [i == 0 or blocks[i] != blocks[i - 1] for i in range(len(blocks))]
    assert is_first == ((entries & pair_blocks.FIRST) != 0).tolist()
    assert is_first[1:] + [True] == ((entries & pair_blocks.LAST) != 0).tolist()
    assert (
        is_first
        == (((entries & pair_blocks.FIRST_OF_ROW) != 0) | is_first & (queries > 0)).tolist()
    )


@pytest.mark.parametrize(("lengths", "computed"), document_rows.WHOLE_BLOCKS)
def test_steps_are_counted_against_documents(lengths, computed):
    segments = document_rows.of_lengths(lengths)
    _, count = pair_blocks.steps(blocks_of(segments), causal=True)
    assert count == computed


@pytest.mark.parametrize("poisoned", [(1, 2), (0, 3)], ids=["keys and values", "queries and dy"])
def test_a_document_reads_no_block_of_another_one(poisoned):
    """Neither its results nor the gradients of its keys."""
    document_rows.assert_reads_no_other_blocks(pair_blocks.pair_blocks, poisoned)


def test_heads_that_exceed_the_memory_of_a_chip_take_several_parts(monkeypatch):
    monkeypatch.setattr(pair_blocks, "BLOCKS", 1 << 10)
    assert pair_blocks._parts(4, 2, 64, 384, 4) == 2
    assert_equals_the_formula(pair_blocks.pair_blocks, SEGMENTS, (4, 2, 64))


def test_rows_whose_list_exceeds_the_scalar_memory_take_several_calls(monkeypatch):
    monkeypatch.setattr(pair_blocks, "LISTS", 2 * 4 * 6)
    assert pair_blocks.rows_of_a_call(384, causal=True) == 2
    assert_equals_the_formula(pair_blocks.pair_blocks, SEGMENTS, (2, 1, 64))


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


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("rows", "tokens", "heads"),
    [
        (256, 2048, (2, 1, 128)),
        (1, 32768, (8, 2, 128)),
        (1, 65536, (4, 2, 64)),
        (2, 8192, (32, 32, 64)),
    ],
    ids=str,
)
def test_lists_and_gradients_fit_into_the_memory_of_a_chip(rows, tokens, heads):
    calls = document_rows.kernels_on_tpu(pair_blocks.pair_blocks, rows, tokens, heads)
    assert calls == 2 * -(-rows // pair_blocks.rows_of_a_call(tokens, causal=True))


@pytest.mark.parametrize("version", ["v5e", "v4"])
def test_a_chip_with_less_memory_than_the_kernel_takes_has_splash(version):
    q = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.bfloat16)
    kernel = {"v5e": "pair_blocks", "v4": "splash"}[version]
    assert attention.choose(q, ("tpu", version), attention.Masks(packed=True)) == kernel


@pytest.mark.parametrize("version", ["v5e", "v4"], ids=["pair_blocks", "splash"])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2), (2, 1, 2)], ids=str)
def test_devices_of_a_mesh_attend_to_their_own_rows_and_heads(version, mesh, monkeypatch):
    """The blocks of documents are found once, and split as the rows are."""
    for module, name in ((attention, "splash"), (pair_blocks, "pair_blocks")):
        in_interpreter = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, in_interpreter)
    devices = make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)])
    shard = layout.Layout(devices, AXIS_RULES, layout.Devices("tpu", version)).shard
    segments = jnp.asarray([ROWS["aligned"], ROWS["across blocks"]], jnp.int32)
    *qkv, dy = arrays = document_rows.inputs(*segments.shape, 4, 2, 64)

    @jax.jit
    def both(dy, *qkv):
        blocks = attention.blocks_of(segments, shard, 64, causal=True, window=0)
        how = dict(causal=True, segments_bt=segments, blocks=blocks)
        y, pull = jax.vjp(lambda *qkv: attention.within(shard, *qkv, **how), *qkv)
        return y, *pull(dy)

    exact = document_rows.by_the_formula(segments, *arrays)
    document_rows.assert_same(both(dy, *qkv), exact)
