"""Attention over short rows on TPUs, by the interpreter against the formula."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import AXIS_RULES
from jaxtrain.nn import attention, short
from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_mesh


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


FORMS = [
    ((3, 37, 4, 4, 64), False, 0),  # two heads in the 128 lanes, and rows that no tile divides
    ((2, 24, 4, 2, 128), True, 0),  # two heads of queries share one of keys
    ((1, 40, 4, 4, 32), True, 7),
    ((1, 40, 2, 2, 64), False, 7),
]


def kernel_and_formula(tokens, causal, window):
    places = jnp.arange(tokens)
    mask = attention.visible(places, places, causal=causal, window=window)[None]
    how = dict(causal=causal, window=window, interpret=True)
    return functools.partial(short.short, **how), lambda *qkv: attention.masked(*qkv, mask)


@pytest.mark.parametrize(("sizes", "causal", "window"), FORMS, ids=str)
def test_it_equals_the_formula_and_its_gradients(sizes, causal, window):
    arrays = inputs(*sizes)
    kernel, formula = kernel_and_formula(sizes[1], causal, window)
    ours = result_and_gradients(kernel, *arrays)
    exact = result_and_gradients(formula, *arrays)
    for x, y in zip(ours, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("sizes", "causal", "window"), FORMS, ids=str)
def test_sixteen_bits_are_as_near_to_the_formula_as_attention_of_xla(sizes, causal, window):
    arrays = inputs(*sizes)
    kernel, formula = kernel_and_formula(sizes[1], causal, window)
    exact = result_and_gradients(formula, *arrays)
    narrow = [x.astype(jnp.bfloat16) for x in arrays]
    ours = result_and_gradients(kernel, *narrow)
    theirs = result_and_gradients(formula, *narrow)

    def error(x, y):
        return float(np.linalg.norm(np.asarray(x, "f4") - y) / np.linalg.norm(y))

    for x, other, y in zip(ours, theirs, exact, strict=True):
        assert x.dtype == jnp.bfloat16 and error(x, y) < 1.2 * error(other, y)


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


@pytest.mark.parametrize(
    ("heads", "kernel"),
    [((8, 8, 64), "short"), ((4, 2, 128), "short"), ((6, 6, 64), "xla"), ((2, 2, 64), "xla")],
    ids=str,
)
def test_a_device_with_a_part_of_the_heads_gets_a_kernel_that_takes_its_own(
    heads, kernel, monkeypatch
):
    """Before, the third of a device's three heads of 64 values was never written."""
    monkeypatch.setattr(attention, "short", functools.partial(short.short, interpret=True))
    mesh = make_mesh(1, 1, 2, devices=jax.devices()[:2])
    shard = layout.Layout(mesh, AXIS_RULES, layout.Devices("tpu")).shard
    wide = inputs(2, 17, *heads)
    seen = jnp.ones((1, 17, 17), bool)
    exact = result_and_gradients(lambda *qkv: attention.masked(*qkv, seen), *wide)
    narrow = [x.astype(jnp.bfloat16) for x in wide]

    def attend(*qkv):
        return attention.within(shard, *qkv)

    is_called = "pallas_call" in str(jax.make_jaxpr(attend)(*narrow[:3]))
    assert is_called == (kernel == "short")
    for x, y in zip(result_and_gradients(attend, *narrow), exact, strict=True):
        np.testing.assert_allclose(np.asarray(x, "f4"), y, rtol=0, atol=0.03)


def test_rows_of_a_step_divide_the_batch_and_fit():
    assert short._rows(256, 257, 2) == 4
    assert short._rows(7, 257, 2) == 1
    assert short._rows(6, 97, 2) == 6
    assert short._rows(32, 608, 2) == 2


@pytest.mark.parametrize(
    ("dtype", "heads", "parts", "values"),
    [
        ("bfloat16", (3, 3), 1, "3 heads of 64 bfloat16 values"),  # which do not fill lanes
        ("bfloat16", (6, 6), 2, "3 heads of 64 bfloat16 values"),
        ("bfloat16", (3, 1), 1, "3 heads of 64 bfloat16 values"),
        ("bfloat16", (4, 2), 1, "4 heads of 64 bfloat16 values and 2 key heads"),
        ("bfloat16", (4, 2), 2, "2 heads of 64 bfloat16 values and 1 key head"),
        ("bfloat16", (8, 4), 2, "4 heads of 64 bfloat16 values and 2 key heads"),
        ("float16", (6, 6), 1, "6 heads of 64 float16 values"),
        ("float32", (6, 2), 1, "6 heads of 64 float32 values"),
    ],
)
def test_a_slice_without_a_kernel_for_these_heads_is_reported_once(
    dtype, heads, parts, values, caplog
):
    attention._log_no_kernel.cache_clear()
    n_queries, n_keys = heads
    q = jax.ShapeDtypeStruct((2, 257, n_queries, 64), jnp.dtype(dtype))
    how = dict(keys=(2, 257, n_keys, 64), n_parts=parts)
    with caplog.at_level(logging.INFO, "jaxtrain"):
        for _ in range(2):
            assert attention.choose(q, ("tpu", ""), attention.Masks(), **how) == "xla"
    assert caplog.messages == [
        f"no kernel for TPUs takes rows of one sequence of 257 tokens with {values}: XLA's own"
        " attention is used, which writes all pairs of tokens; one takes rows of 384"
    ]


@pytest.mark.parametrize(
    ("version", "tokens", "kernel"),
    [("v4", 257, "short"), ("v4", 640, "splash"), ("v4", 608, "xla"), ("v5e", 640, "short")],
)
def test_rows_whose_scores_exceed_the_memory_of_a_core_are_not_its(version, tokens, kernel):
    q = jax.ShapeDtypeStruct((2, tokens, 6, 64), jnp.bfloat16)
    assert attention.choose(q, ("tpu", version), attention.Masks()) == kernel
