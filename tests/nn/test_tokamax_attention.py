"""Attention by tokamax's kernels, for which a function of the same formula and ranges stands in."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend

from jaxtrain.nn import attention, remat, tokamax_attention, tokamax_tracing
from jaxtrain.parallel.layout import abstract_mesh, devices_of, make_layout, make_mesh
from tests.support import tokamax_package

CASES = [
    dict(causal=False, window=0, packed=False),
    dict(causal=True, window=0, packed=True),
    dict(causal=True, window=24, packed=True),
    dict(causal=False, window=24, packed=True),
]
SETTINGS = tokamax_attention.Settings(causal=True, window=0, capability="9.0", keep=None)


def inputs(b=2, t=128, h=4, g=2, k=64):
    rng = np.random.default_rng(0)
    qkv = (rng.normal(size=(b, t, n, k)).astype("f4") for n in (h, g, g))
    segments = np.sort(rng.integers(0, 4, (b, t), dtype="i4"), axis=1)
    return map(jnp.asarray, (*qkv, segments))


def by_xla(case, segments):
    """Return the attention that test_attention compares with the definition."""
    masks = {name: case[name] for name in ("causal", "window")}
    own = segments if case["packed"] else None
    return functools.partial(attention.attention, **masks, segments_bt=own, devices=("cpu", ""))


@pytest.fixture
def calls(monkeypatch):
    """Put a stand-in for the package in its place, and say that it is installed."""
    shapes = []

    def kernel(*qkv, mask):
        shapes.append(qkv[0].shape)
        return tokamax_package.formula(*qkv, mask=mask)

    for name, module in tokamax_package.modules(kernel).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tokamax_attention, "is_installed", lambda: True)
    monkeypatch.setattr(backend, "get_default_device", backend.get_default_device)
    return shapes


@pytest.mark.parametrize("keep", [None, "attention"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_xlas_attention_and_its_gradients(case, keep, calls):
    *qkv, segments = inputs()
    own = segments if case["packed"] else None
    masks = {name: case[name] for name in ("causal", "window")}
    settings = SETTINGS._replace(**masks, keep=keep)
    found, pull = jax.vjp(lambda *qkv: tokamax_attention.attend(settings, *qkv, own), *qkv)
    dy = np.random.default_rng(1).normal(size=found.shape).astype("f4")
    expected, expected_pull = jax.vjp(by_xla(case, segments), *qkv)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    for a, b in zip(pull(dy), expected_pull(dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokamaxs_own_formula_with_its_mask_equals_xlas(case, monkeypatch):
    """With the package itself, whose own attention by XLA is in its kernel's place."""
    pytest.importorskip("tokamax")
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu

    kernel = "PallasMosaicGpuFlashAttention"
    monkeypatch.setattr(pallas_mosaic_gpu, kernel, base.DotProductAttention)
    *qkv, segments = inputs()
    masks = {name: case[name] for name in ("causal", "window")}
    own = segments if case["packed"] else None
    with jax.numpy_rank_promotion("allow"):
        found = tokamax_attention.attend(SETTINGS._replace(**masks), *qkv, own)
    expected = by_xla(case, segments)(*qkv)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("policy", "forward"), [("full", 2), ("save attention", 1)])
def test_a_layer_that_keeps_attention_calls_it_forward_once(policy, forward, calls):
    """Each forward pass has one exponential of all scores."""
    *qkv, segments = inputs()
    settings = SETTINGS._replace(keep="attention")

    def layer(x, _):
        y = tokamax_attention.attend(settings, x, *qkv[1:], segments)
        return jnp.sin(y), None

    def loss(x):
        x, _ = remat.scan(layer, x, jnp.arange(2), policy)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(qkv[0]).as_text()
    assert text.count("stablehlo.exponential") == forward


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_each_device_computes_its_own_rows_and_heads(sizes, calls, monkeypatch):
    """``documents`` is unknown here, for which cuDNN's kernel has no form."""
    *qkv, segments = inputs(b=4)
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    shard = make_layout(mesh, {}).shard
    expected = by_xla(CASES[1], segments)(*qkv)
    monkeypatch.setattr(attention, "choose", lambda *_, **__: "tokamax")
    run = functools.partial(attention.within, shard, causal=True)
    found = jax.jit(lambda *x: run(*x[:3], segments_bt=x[3]))(*qkv, segments)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    data, fsdp, model = sizes
    assert calls == [(4 // data // fsdp, 128, 4 // model, 64)]


@pytest.mark.parametrize(
    ("capability", "head_dim", "is_installed", "kernel"),
    [
        ("9.0", 20, True, "tokamax"),
        ("9.0", 20, False, "chunked"),
        ("9.0", 64, True, "cudnn"),
        ("9.0", 512, True, "chunked"),
        ("8.0", 20, True, "chunked"),
        ("10.0", 20, True, "chunked"),
    ],
)
def test_it_is_used_on_hopper_if_cudnn_refuses(
    capability, head_dim, is_installed, kernel, monkeypatch
):
    monkeypatch.setattr(tokamax_attention, "is_installed", lambda: is_installed)
    q = jax.ShapeDtypeStruct((2, 256, 4, head_dim), jnp.bfloat16)
    assert attention.choose(q, ("gpu", capability), attention.Masks(causal=True)) == kernel
    wide = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    assert attention.choose(wide, ("gpu", capability), attention.Masks(causal=True)) == "xla"


@pytest.mark.parametrize("has_it", [True, False])
def test_what_is_used_is_logged_once(has_it, calls, monkeypatch, caplog):
    monkeypatch.setattr(tokamax_attention, "is_installed", lambda: has_it)
    attention._log_once.cache_clear()
    mesh = abstract_mesh(1, 1, 1, count=1, what="NVIDIA H100")
    shard = make_layout(mesh, {}, devices=devices_of("NVIDIA H100")).shard
    q = jax.ShapeDtypeStruct((2, 64, 4, 20), jnp.bfloat16)
    with caplog.at_level("INFO", "jaxtrain"):
        for _ in range(2):
            jax.eval_shape(lambda q: attention.within(shard, q, q, q, causal=True), q)
    [line] = caplog.messages
    assert "cuDNN's attention does not take heads of 20 values" in line
    assert ("tokamax's kernel is used instead" in line) == has_it
    assert ("pip install 'jaxtrain[tokamax]'" in line) != has_it


def test_only_tokamax_sees_a_card_that_is_not_here(monkeypatch):
    """It asks the default device for what it needs to know of a card."""
    monkeypatch.setattr(backend, "get_default_device", backend.get_default_device)
    tokamax_tracing.trace_for.__wrapped__("9.0")
    assert backend.get_default_device().platform == "cpu"
    names = {"__name__": "tokamax._src.gpu_utils", "backend": backend}
    exec("device = backend.get_default_device()", names)
    card = names["device"]
    assert (card.platform, card.compute_capability, card.core_count) == ("gpu", "9.0", 132)
    assert hash(card)
