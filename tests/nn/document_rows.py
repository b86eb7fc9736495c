"""Rows of documents for tests of attention on TPUs, and the formula for attention to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxtrain import plan
from jaxtrain.nn import attention

BLOCK = 128  # tokens of the smallest block of the kernels
ROWS = {
    "aligned": [1] * 128 + [2] * 128 + [3] * 128,
    "across blocks": [1] * 100 + [2] * 200 + [3] * 60 + [0] * 24,
    "mostly padding": [1] * 30 + [0] * 354,
    "one": [1] * 384,
    "in no order": [5] * 130 + [2] * 130 + [5] * 124,
}
# Lengths of causal documents of whole blocks, and their blocks: n (n + 1) / 2 for n of a document
WHOLE_BLOCKS = [([128] * 6, 6), ([384, 384], 12), ([768], 21), ([256, 512], 13)]


def of_lengths(lengths):
    """One row of documents with these lengths."""
    numbers = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return jnp.asarray(numbers, jnp.int32)[None]


def with_any_numbers():
    """A document for each token, for each pair of them, and numbers up to the largest int32."""
    largest = np.iinfo(np.int32).max
    tokens = np.arange(384)
    high = np.where(tokens < 200, largest - 1, np.where(tokens < 300, largest, 0))
    return jnp.asarray([1 + tokens, 1 + tokens // 2, high], jnp.int32)


def pairs(segments, *, causal=True, window=0):
    """Which keys a query sees, bool [B, T, S]."""
    places = jnp.arange(segments.shape[1])
    seen = attention.visible(places, places, causal=causal, window=window)[None]
    return seen & attention.same_segment(segments, segments)


def blocks_with_a_pair(segments, *, causal=True, window=0):
    """Whether a block of queries [N] sees a key of a block [N], by all pairs."""
    seen = np.asarray(pairs(segments, causal=causal, window=window))
    n = segments.shape[1] // BLOCK
    return seen.reshape(-1, n, BLOCK, n, BLOCK).any((2, 4))


def inputs(b, t, h, g, k):
    """Return q, k, v and the gradients of the result, float32."""
    rng = np.random.default_rng(0)
    shapes = ((b, t, h, k), (b, t, g, k), (b, t, g, k), (b, t, h, k))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def by_the_kernel(kernel, segments, *qkv_and_dy, causal=True, window=0):
    """Return the result, and the gradients of q, k and v, from Pallas's interpreter."""
    how = dict(causal=causal, window=window, segments_bt=segments, interpret=True)
    return _result_and_gradients(functools.partial(kernel, **how), *qkv_and_dy)


def by_the_formula(segments, *qkv_and_dy, causal=True, window=0):
    """Return the result, and the gradients of q, k and v."""
    seen = pairs(segments, causal=causal, window=window)
    return _result_and_gradients(lambda *qkv: attention.masked(*qkv, seen), *qkv_and_dy)


@functools.partial(jax.jit, static_argnums=0)
def _result_and_gradients(attend, *qkv_and_dy):
    *qkv, dy = qkv_and_dy
    y, pull = jax.vjp(attend, *qkv)
    return y, *pull(dy)


def assert_same(results, exact, place=...):
    for x, y in zip(results, exact, strict=True):
        np.testing.assert_allclose(x[place], y[place], rtol=0, atol=2e-5)


def assert_equals_the_formula(kernel, segments, heads, **masks):
    """Check the results and gradients of heads (H, G, K)."""
    arrays = inputs(*segments.shape, *heads)
    exact = by_the_formula(segments, *arrays, **masks)
    assert_same(by_the_kernel(kernel, segments, *arrays, **masks), exact)


def assert_reads_no_other_blocks(kernel, poisoned):
    """Check the second document of a row whose three documents are a block each.

    ``poisoned``: which of q, k, v and the gradients of the result are NaN in all other documents
    and rows.
    """
    segments = jnp.asarray([ROWS["aligned"], ROWS["one"]], jnp.int32)
    arrays = inputs(2, 384, 2, 1, 64)
    exact = by_the_formula(segments, *arrays)
    is_second = jnp.asarray(np.array([ROWS["aligned"], [0] * 384]) == 2)[:, :, None, None]
    for i in poisoned:
        arrays[i] = jnp.where(is_second, arrays[i], jnp.nan)
    assert_same(by_the_kernel(kernel, segments, *arrays), exact, place=(0, slice(128, 256)))


def kernels_on_tpu(attend, rows, tokens, heads, target="tpu:v5e:2x2"):
    """Return how many kernels the compiled program has, forward and backward."""
    device = plan.compile.tpu_devices(plan.parse_target(target))[0]
    on = SingleDeviceSharding(device)
    h, g, k = heads
    q, key = (jax.ShapeDtypeStruct((rows, tokens, n, k), jnp.bfloat16, sharding=on) for n in (h, g))
    segments = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=on)

    def step(q, k, v, dy, segments):
        how = dict(causal=True, window=0, segments_bt=segments)
        y, pull = jax.vjp(lambda *qkv: attend(*qkv, **how), q, k, v)
        return y, *pull(dy)

    text = jax.jit(step).lower(q, key, key, q, segments).compile().as_text()
    return text.count('custom_call_target="tpu_custom_call"')
