"""The blocks that attention on TPUs computes for rows of documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain import plan
from jaxtrain.nn import attention, splash
from jaxtrain.nn.splash import LANES

ROWS = {
    "aligned": [1] * 128 + [2] * 128 + [3] * 128,
    "across blocks": [1] * 100 + [2] * 200 + [3] * 60 + [0] * 24,
    "mostly padding": [1] * 30 + [0] * 354,
    "one": [1] * 384,
    "in no order": [5] * 130 + [2] * 130 + [5] * 124,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", LANES)


def visible_blocks(segments, *, causal, window):
    """Whether a block of queries [N] sees a key of a block [N], by all pairs."""
    places = jnp.arange(segments.shape[1])
    seen = attention.visible(places, places, causal=causal, window=window)[None]
    seen = np.asarray(seen & attention.same_segment(segments, segments))
    b, t, _ = seen.shape
    return seen.reshape(b, t // LANES, LANES, t // LANES, LANES).any((2, 4))


@pytest.mark.parametrize("case", [(True, 0), (False, 0), (True, 60), (False, 129)], ids=str)
def test_blocks_are_those_with_a_pair_that_is_seen(case):
    causal, window = case
    segments = jnp.asarray(list(ROWS.values()), jnp.int32)
    blocks = splash.document_blocks(segments, causal=causal, window=window)
    seen = visible_blocks(segments, causal=causal, window=window)
    for name, row, seen_nm in zip(ROWS, np.asarray(blocks), seen, strict=True):
        for (first, last), is_seen in [
            *zip(row[:, :2], seen_nm, strict=True),
            *zip(row[:, 2:], seen_nm.T, strict=True),
        ]:
            places = np.flatnonzero(is_seen)
            assert first <= places[0] and last >= places[-1], name
            if name != "in no order":
                assert (first, last) == (places[0], places[-1]), name


@pytest.mark.parametrize(
    ("lengths", "computed"),
    [([128] * 6, 6), ([384, 384], 12), ([768], 21), ([256, 512], 13)],
)
def test_steps_that_compute_are_counted_against_documents(lengths, computed):
    """A causal document of n whole blocks has n (n + 1) / 2."""
    numbers = np.repeat(np.arange(len(lengths)) + 1, lengths)
    segments = jnp.asarray(numbers, jnp.int32)[None]
    blocks = splash.document_blocks(segments, causal=True, window=0)
    first_key, last_key, first_query, last_query = jnp.moveaxis(blocks, 2, 0)
    data_next, is_active = splash._lists(first_key, last_key)
    assert int(is_active.sum()) == computed
    assert int(splash._lists(first_query, last_query)[1].sum()) == computed
    # steps that compute nothing read the block that is there
    moves = (np.diff(data_next, axis=1) != 0).sum() + len(data_next)
    assert int(moves) == computed


def attend_both_ways(segments, key_heads=1, *, causal=True, window=0):
    """Return results and gradients of the kernel on the interpreter, and of the formula."""
    b, t = segments.shape
    rng = np.random.default_rng(0)
    shapes = [(b, t, heads, 64) for heads in (2, key_heads, key_heads, 2)]
    q, k, v, dy = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    places = jnp.arange(t)
    seen = attention.visible(places, places, causal=causal, window=window)[None]
    seen = seen & attention.same_segment(segments, segments)

    def attend(q, k, v):
        how = dict(causal=causal, window=window, segments_bt=segments)
        return splash.splash(q, k, v, **how, interpret=True)

    def both(attend):
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    exact = both(lambda *qkv: attention.masked(*qkv, seen))
    return jax.jit(both, static_argnums=0)(attend), exact


@pytest.mark.parametrize(
    ("key_heads", "causal", "window"), [(1, True, 60), (2, False, 0), (1, False, 140)]
)
def test_documents_under_other_masks_equal_the_formula_and_its_gradients(key_heads, causal, window):
    """The last row is padding alone."""
    segments = jnp.asarray([ROWS["one"], ROWS["across blocks"], [0] * 384], jnp.int32)
    both = attend_both_ways(segments, key_heads, causal=causal, window=window)
    for ours, exact in zip(*both, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-5)


def test_rows_may_have_more_documents_than_blocks_and_any_numbers():
    """A document for each token, for each pair of them, and numbers up to the largest int32."""
    largest = np.iinfo(np.int32).max
    tokens = np.arange(384)
    high = np.where(tokens < 200, largest - 1, np.where(tokens < 300, largest, 0))
    segments = jnp.asarray([1 + tokens, 1 + tokens // 2, high], jnp.int32)
    for ours, exact in zip(*attend_both_ways(segments), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-5)


def test_rows_whose_lists_exceed_the_scalar_memory_take_several_calls(monkeypatch):
    monkeypatch.setattr(splash, "LISTS", 2 * 3 * LANES * splash.BYTES)
    assert splash.rows_of_a_call(384) == 2
    segments = jnp.asarray([ROWS["aligned"], ROWS["across blocks"], ROWS["one"]], jnp.int32)
    for ours, exact in zip(*attend_both_ways(segments), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-5)


def test_longer_rows_have_larger_blocks_so_that_their_lists_fit(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 512)
    sizes = {t: splash.block_size(t) for t in (1 << 11, 1 << 18, 1 << 19, 1 << 20)}
    assert sizes == {1 << 11: 512, 1 << 18: 512, 1 << 19: 1024, 1 << 20: 2048}
    for t in sizes:
        n = t // splash.block_size(t)
        assert splash.rows_of_a_call(t) * n * max(n, LANES) * splash.BYTES <= 1 << 20


@pytest.mark.parametrize(
    ("tokens", "longer"),
    [(76_928, 77_056), (130_944, 131_072), (153_856, 154_112), (524_416, 526_336)],
)
def test_rows_whose_lists_exceed_the_scalar_memory_are_refused_by_name(
    tokens, longer, monkeypatch, caplog
):
    """Before, they were left to libtpu."""
    monkeypatch.setattr(splash, "BLOCK", 512)
    attention._log_no_kernel.cache_clear()
    q = jax.ShapeDtypeStruct((1, tokens, 4, 128), jnp.bfloat16)
    masks = attention.Masks(causal=True, packed=True)
    with caplog.at_level("INFO", "jaxtrain"):
        assert attention.choose(q, ("tpu", "v5e"), masks) == "xla"
    assert caplog.text.strip().endswith(f"all pairs of tokens; one takes rows of {longer}")
    assert attention.choose(q, ("tpu", "v5e"), masks._replace(packed=False)) == "splash"


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(("rows", "tokens"), [(256, 2048), (4096, 512), (64, 8192)])
def test_lists_of_many_rows_fit_into_the_scalar_memory(rows, tokens, monkeypatch):
    """Before, libtpu refused 256 rows of 2,048 tokens, by 1.1 kB."""
    monkeypatch.setattr(splash, "BLOCK", 512)
    device = plan.compile.tpu_devices(plan.parse_target("tpu:v5e:2x2"))[0]
    on = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((rows, tokens, 1, 128), jnp.bfloat16, sharding=on)
    segments = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=on)

    def step(q, k, v, dy, segments):
        how = dict(causal=True, window=0, segments_bt=segments)
        y, pull = jax.vjp(lambda *qkv: splash.splash(*qkv, **how), q, k, v)
        return y, *pull(dy)

    text = jax.jit(step).lower(x, x, x, x, segments).compile().as_text()
    calls = text.count('custom_call_target="tpu_custom_call"')
    assert calls == 3 * -(-rows // splash.rows_of_a_call(tokens))


def test_a_document_reads_no_block_of_another_one():
    """Keys and values of other documents are not numbers: forward and backward."""
    rng = np.random.default_rng(0)
    segments = jnp.asarray([ROWS["aligned"], ROWS["one"]], jnp.int32)
    shapes = ((2, 384, 2, 64), (2, 384, 1, 64), (2, 384, 1, 64), (2, 384, 2, 64))
    q, k, v, dy = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    is_second = jnp.asarray(np.array([ROWS["aligned"], [0] * 384]) == 2)[:, :, None, None]
    poisoned = [jnp.where(is_second, x, jnp.nan) for x in (k, v)]

    def attend(q, k, v, blocks):
        how = dict(causal=True, window=0, segments_bt=segments, blocks=blocks)
        return splash.splash(q, k, v, **how, interpret=True)

    @jax.jit
    def both(q, k, v, dy, blocks):
        y, pull = jax.vjp(lambda *qkv: attend(*qkv, blocks), q, k, v)
        return y, *pull(dy)

    blocks = splash.document_blocks(segments, causal=True, window=0)
    seen = attention.same_segment(segments, segments) & jnp.tri(384, dtype=bool)[None]
    y, pull = jax.vjp(lambda *qkv: attention.masked(*qkv, seen), q, k, v)
    for ours, exact in zip(both(q, k, v, dy, blocks), (y, *pull(dy)), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-5)
    for ours, exact in zip(both(q, *poisoned, dy, blocks), (y, *pull(dy)), strict=True):
        np.testing.assert_allclose(ours[0, 128:256], exact[0, 128:256], rtol=0, atol=2e-5)
