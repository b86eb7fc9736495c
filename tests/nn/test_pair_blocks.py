"""Attention over rows of documents on TPUs, by the interpreter against the formula."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain import plan
from jaxtrain.config import AXIS_RULES
from jaxtrain.nn import attention, pair_blocks
from jaxtrain.nn.splash import document_blocks
from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_mesh

ROWS = {
    "aligned": [1] * 128 + [2] * 128 + [3] * 128,
    "across blocks": [1] * 100 + [2] * 200 + [3] * 60 + [0] * 24,
    "mostly padding": [1] * 30 + [0] * 354,
    "one": [1] * 384,
    "in no order": [5] * 130 + [2] * 130 + [5] * 124,
}
SEGMENTS = jnp.asarray(list(ROWS.values()), jnp.int32)


def blocks_of(segments, *, causal=True, window=0):
    return document_blocks(segments, causal=causal, window=window, size=pair_blocks.BLOCK)


def inputs(b, t, h, g, k):
    rng = np.random.default_rng(0)
    shapes = ((b, t, h, k), (b, t, g, k), (b, t, g, k), (b, t, h, k))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def result_and_gradients(segments, *qkv_and_dy, causal=True, window=0):
    @jax.jit
    def both(q, k, v, dy):
        how = dict(causal=causal, window=window, segments_bt=segments, interpret=True)
        y, pull = jax.vjp(lambda *qkv: pair_blocks.pair_blocks(*qkv, **how), q, k, v)
        return y, *pull(dy)

    return both(*qkv_and_dy)


def by_the_formula(segments, *qkv_and_dy, causal=True, window=0):
    *qkv, dy = qkv_and_dy
    places = jnp.arange(segments.shape[1])
    seen = attention.visible(places, places, causal=causal, window=window)[None]
    seen &= attention.same_segment(segments, segments)
    y, pull = jax.vjp(lambda *qkv: attention.masked(*qkv, seen), *qkv)
    return y, *pull(dy)


def assert_same(ours, exact):
    for x, y in zip(ours, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


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
    arrays = inputs(*SEGMENTS.shape, *heads)
    how = dict(causal=causal, window=window)
    assert_same(
        result_and_gradients(SEGMENTS, *arrays, **how), by_the_formula(SEGMENTS, *arrays, **how)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_steps_are_the_blocks_with_a_pair_in_the_order_of_queries(causal):
    segments = jnp.asarray([row for name, row in ROWS.items() if name != "in no order"], jnp.int32)
    list_p, count = pair_blocks.steps(blocks_of(segments, causal=causal), causal=causal)
    entries = np.asarray(list_p)[: int(count)]
    rows, queries, keys = entries >> 18 & 0x3FF, entries >> 9 & 0x1FF, entries & 0x1FF
    places = jnp.arange(384)
    seen = attention.visible(places, places, causal=causal, window=0)[None]
    seen = np.asarray(seen & attention.same_segment(segments, segments))
    seen = seen.reshape(-1, 3, 128, 3, 128).any((2, 4))
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


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [([128] * 6, 6), ([384, 384], 12), ([768], 21), ([256, 512], 13)],
)
def test_steps_are_counted_against_documents(lengths, computed):
    """A causal document of n whole blocks has n (n + 1) / 2."""
    numbers = np.repeat(np.arange(len(lengths)) + 1, lengths)
    _, count = pair_blocks.steps(blocks_of(jnp.asarray(numbers, jnp.int32)[None]), causal=True)
    assert count == computed


def test_a_document_reads_no_block_of_another_one():
    """Keys and values of all other documents and rows are not numbers: forward and backward."""
    segments = jnp.asarray([ROWS["aligned"], ROWS["one"]], jnp.int32)
    q, k, v, dy = inputs(2, 384, 2, 1, 64)
    is_second = jnp.asarray(np.array([ROWS["aligned"], [0] * 384]) == 2)[:, :, None, None]
    poisoned = [jnp.where(is_second, x, jnp.nan) for x in (k, v)]
    exact = by_the_formula(segments, q, k, v, dy)
    for ours, of_formula in zip(
        result_and_gradients(segments, q, *poisoned, dy), exact, strict=True
    ):
        np.testing.assert_allclose(ours[0, 128:256], of_formula[0, 128:256], rtol=0, atol=2e-5)


def test_keys_get_no_gradient_from_queries_of_other_blocks():
    """Queries and gradients of all other documents and rows are not numbers."""
    segments = jnp.asarray([ROWS["aligned"], ROWS["one"]], jnp.int32)
    q, k, v, dy = inputs(2, 384, 2, 1, 64)
    is_second = jnp.asarray(np.array([ROWS["aligned"], [0] * 384]) == 2)[:, :, None, None]
    exact = by_the_formula(segments, q, k, v, dy)
    q, dy = (jnp.where(is_second, x, jnp.nan) for x in (q, dy))
    for ours, of_formula in zip(result_and_gradients(segments, q, k, v, dy), exact, strict=True):
        np.testing.assert_allclose(ours[0, 128:256], of_formula[0, 128:256], rtol=0, atol=2e-5)


def test_heads_that_exceed_the_memory_of_a_chip_take_several_parts(monkeypatch):
    arrays = inputs(*SEGMENTS.shape, 4, 2, 64)
    exact = by_the_formula(SEGMENTS, *arrays)
    monkeypatch.setattr(pair_blocks, "BLOCKS", 1 << 10)
    assert pair_blocks._parts(4, 2, 64, 384, 4) == 2
    assert_same(result_and_gradients(SEGMENTS, *arrays), exact)


def test_rows_whose_list_exceeds_the_scalar_memory_take_several_calls(monkeypatch):
    monkeypatch.setattr(pair_blocks, "LISTS", 2 * 4 * 6)
    assert pair_blocks.rows_of_a_call(384, causal=True) == 2
    arrays = inputs(*SEGMENTS.shape, 2, 1, 64)
    assert_same(result_and_gradients(SEGMENTS, *arrays), by_the_formula(SEGMENTS, *arrays))


def test_rows_may_have_more_documents_than_blocks_and_any_numbers():
    """A document for each token, for each pair of them, and numbers up to the largest int32."""
    largest = np.iinfo(np.int32).max
    tokens = np.arange(384)
    high = np.where(tokens < 200, largest - 1, np.where(tokens < 300, largest, 0))
    segments = jnp.asarray([1 + tokens, 1 + tokens // 2, high], jnp.int32)
    arrays = inputs(*segments.shape, 2, 1, 64)
    assert_same(result_and_gradients(segments, *arrays), by_the_formula(segments, *arrays))


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
    device = plan.compile.tpu_devices(plan.parse_target("tpu:v5e:2x2"))[0]
    on = SingleDeviceSharding(device)
    h, g, k = heads
    q, key = (jax.ShapeDtypeStruct((rows, tokens, n, k), jnp.bfloat16, sharding=on) for n in (h, g))
    segments = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=on)

    def step(q, k, v, dy, segments):
        how = dict(causal=True, window=0, segments_bt=segments)
        y, pull = jax.vjp(lambda *qkv: pair_blocks.pair_blocks(*qkv, **how), q, k, v)
        return y, *pull(dy)

    text = jax.jit(step).lower(q, key, key, q, segments).compile().as_text()
    calls = text.count('custom_call_target="tpu_custom_call"')
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
    *qkv, dy = arrays = inputs(*segments.shape, 4, 2, 64)

    @jax.jit
    def both(dy, *qkv):
        blocks = attention.blocks_of(segments, shard, 64, causal=True, window=0)
        how = dict(causal=True, segments_bt=segments, blocks=blocks)
        y, pull = jax.vjp(lambda *qkv: attention.within(shard, *qkv, **how), *qkv)
        return y, *pull(dy)

    assert_same(both(dy, *qkv), by_the_formula(segments, *arrays))
