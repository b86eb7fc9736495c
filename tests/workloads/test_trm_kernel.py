"""SwiGLU by tokamax's kernel, for which a function of the same formula and limits stands in."""

import sys
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend

from jaxtrain import specs
from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.workloads.trm import model as trm
from jaxtrain.workloads.trm import tokamax_glu
from loaders.io import machine
from tests.support.cases.trm import TINY

C = replace(TINY, inner_multiple=128, kernel="tokamax")


@pytest.fixture
def calls(monkeypatch):
    """Put a stand-in for the package in its place. The kernel takes whole tiles alone."""
    rows = []

    def gated_linear_unit(x_nk, w_k2o, *, activation, implementation):
        assert implementation == "mosaic"
        assert x_nk.shape[0] % 256 == 0 == x_nk.shape[1] % 64 == w_k2o.shape[2] % 128
        rows.append(x_nk.shape)
        gate, up = (x_nk @ w_k2o[:, i] for i in range(2))
        return activation(gate) * up

    package = types.SimpleNamespace(gated_linear_unit=gated_linear_unit)
    monkeypatch.setitem(sys.modules, "tokamax", package)
    monkeypatch.setattr(backend, "get_default_device", backend.get_default_device)
    return rows


def shard_on(*sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return make_layout(make_mesh(*sizes, devices=devices), {}).shard


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_each_device_computes_its_rows_and_columns_of_the_formula(sizes, calls):
    x, w = values(8, 5, 18), values(18, 2, 256, seed=1)
    shard = shard_on(*sizes)
    run = jax.jit(lambda x, w: tokamax_glu.swiglu(x, w, shard, ("batch", "seq", "mlp")))
    gate, up = (x @ w[:, i] for i in range(2))
    np.testing.assert_allclose(run(x, w), gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
    assert calls == [(256, 64)]


def test_only_cycles_without_a_gradient_use_it(calls, monkeypatch):
    """The step's results and gradients are those of XLA's products."""
    monkeypatch.setattr(tokamax_glu, "fits", lambda *_: True)
    params = specs.materialise(trm.make_specs(C), jax.random.key(0))
    rows = {
        "inputs": np.arange(32).reshape(2, 16) % 6,
        "puzzle": np.arange(2),
        "z_h": values(2, C.n_tokens, 16),
        "z_l": values(2, C.n_tokens, 16, seed=1),
    }
    shard = shard_on(1, 1, 1)

    def loss(params, c):
        z_h, z_l, logits, q = trm.refine(c, params, rows, c.cycles, shard)
        return sum(jnp.square(x.astype(jnp.float32)).sum() for x in (z_h, z_l, logits, q))

    plain = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, replace(C, kernel="xla"))
    assert not calls
    fast = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, C)
    # Two layers in each of two loops' bodies: thoughts, and the answer. Each has two SwiGLUs.
    assert len(calls) == 2 * 2 * C.depth
    for a, b in zip(*map(jax.tree.leaves, (fast, plain)), strict=True):
        assert np.linalg.norm(a - b) < 1e-4 * np.linalg.norm(b)


def test_it_is_for_16_bits_on_hopper_gpus():
    def fits(dtype, *devices, parts=1, outputs=256):
        mesh = layout.abstract_mesh(1, 1, parts, count=parts, what="a test")
        shard = make_layout(mesh, {}, devices=layout.Devices(*devices)).shard
        x, w = jnp.zeros((2, 4, 8), dtype), jnp.zeros((8, 2, outputs), dtype)
        return tokamax_glu.fits(x, w, shard, ("batch", None, "mlp"))

    assert fits("bfloat16", "gpu", "9.0") and not fits("float32", "gpu", "9.0")
    assert fits("bfloat16", "gpu", "9.0", parts=2)
    assert not fits("bfloat16", "gpu", "9.0", parts=4), "64 columns of a device"
    others = [("gpu", "8.0"), ("gpu", "10.0"), ("gpu", ""), ("cpu", ""), ("tpu", "")]
    assert not any(fits("bfloat16", *devices) for devices in others)


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_takes_it_if_it_is_installed_and_says_so_once(has_it, calls, monkeypatch, caplog):
    monkeypatch.setattr(machine, "has_package", lambda name: has_it)
    tokamax_glu.is_installed.cache_clear()
    mesh = layout.abstract_mesh(1, 1, 1, count=1, what="a test")
    shard = make_layout(mesh, {}, devices=layout.Devices("gpu", "9.0")).shard
    x = jax.ShapeDtypeStruct((2, 5, 18), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((18, 2, 128), jnp.bfloat16)

    def run(x, w, kernel):
        return trm.gated("btd,dcm->btcm", x, w, shard, "batch", "seq", "mlp", kernel=kernel)

    with caplog.at_level("INFO", "jaxtrain"):
        for _ in range(2):
            jax.eval_shape(lambda x, w: run(x, w, "auto"), x, w)
    tokamax_glu.is_installed.cache_clear()
    assert len(calls) == (2 if has_it else 0)
    [line] = caplog.messages
    said = "one kernel of tokamax" if has_it else "not installed; pip install 'jaxtrain[tokamax]'"
    assert said in line
    jax.eval_shape(lambda x, w: run(x, w, "xla"), x, w)
    assert len(calls) == (2 if has_it else 0)


def test_settings_that_the_kernel_does_not_take_are_named(monkeypatch):
    half = replace(C, dtype="bfloat16")
    monkeypatch.setattr(machine, "has_package", lambda name: False)
    assert "pip install 'jaxtrain[tokamax]'" in dict(half.validate())["kernel"]
    monkeypatch.setattr(machine, "has_package", lambda name: True)
    assert not list(half.validate())
    assert "dtype='bfloat16'" in dict(C.validate())["kernel"]
    assert "multiples of 128" in dict(replace(half, inner_multiple=64).validate())["inner_multiple"]
    assert "kernel" in dict(replace(half, kernel="triton").validate())
