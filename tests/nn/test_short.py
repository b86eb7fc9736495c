"""Attention over short rows on TPUs, by the interpreter against the formula."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn import attention, short


def inputs(b, t, h, g, k):
    shapes = {"q": (b, t, h, k), "k": (b, t, g, k), "v": (b, t, g, k), "dy": (b, t, h, k)}
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes.values()]


def result_and_gradients(f, *qkv_and_dy):
    @jax.jit
    def both(*qkv_and_dy):
        *qkv, dy = qkv_and_dy
        y, pull = jax.vjp(f, *qkv)
        return y, *pull(dy)

    return both(*qkv_and_dy)


@pytest.mark.parametrize(
    ("sizes", "causal", "window"),
    [
        ((3, 37, 4, 4, 64), False, 0),  # two heads in the 128 lanes, and rows that no tile divides
        ((2, 24, 4, 2, 128), True, 0),  # two heads of queries share one of keys
        ((1, 40, 4, 4, 32), True, 7),
        ((1, 40, 2, 2, 64), False, 7),
    ],
    ids=str,
)
def test_it_equals_the_formula_and_its_gradients(sizes, causal, window):
    arrays = inputs(*sizes)
    places = jnp.arange(sizes[1])
    mask = attention.visible(places, places, causal=causal, window=window)[None]
    how = dict(causal=causal, window=window, interpret=True)
    ours = result_and_gradients(lambda *qkv: short.short(*qkv, **how), *arrays)
    exact = result_and_gradients(lambda *qkv: attention.masked(*qkv, mask), *arrays)
    for x, y in zip(ours, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-6)


def test_no_query_reads_a_key_behind_it_or_of_another_row():
    """What must not be read is so large that a millionth of it would be seen."""
    q, k, v, dy = inputs(2, 16, 2, 2, 64)
    how = dict(causal=True, window=0, interpret=True)

    def first_half(*qkv):
        return short.short(*qkv, **how)[:1, :8]

    poisoned = [x.at[:1, 8:].set(1e6).at[1:].set(1e6) for x in (k, v)]
    plain = result_and_gradients(first_half, q, k, v, dy[:1, :8])
    found = result_and_gradients(first_half, q, *poisoned, dy[:1, :8])
    for x, y in zip(plain, found, strict=True):
        np.testing.assert_array_equal(x[:1, :8], y[:1, :8])


def test_rows_of_a_step_divide_the_batch_and_fit():
    assert short._rows(256, 257, 2) == 4
    assert short._rows(7, 257, 2) == 1
    assert short._rows(6, 97, 2) == 6
    assert short._rows(32, 608, 2) == 2


def test_a_slice_without_a_kernel_for_these_heads_is_reported_once(caplog):
    attention._log_no_kernel.cache_clear()
    q = jax.ShapeDtypeStruct((2, 257, 3, 64), jnp.bfloat16)
    masks = attention.Masks()
    kernel = attention.choose(q, ("tpu", ""), masks)
    assert kernel == "xla", "three heads of 64 values do not fill lanes"
    with caplog.at_level(logging.INFO, "jaxtrain"):
        for _ in range(2):
            attention._log_refusal(q, ("tpu", ""), masks, kernel)
    assert caplog.messages == [
        "no kernel for TPUs takes rows of one sequence of 257 tokens with 3 heads of 64 values:"
        " XLA's own attention is used, which writes all pairs of tokens"
    ]
