"""Each query head meets its own key head on a mesh, under any axis rules."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn import attention, pair_blocks, transformer
from jaxtrain.parallel import layout
from jaxtrain.parallel.layout import make_mesh

KEYS_WHOLE = {"kv_heads": ""}
QUERIES_WHOLE = {"heads": "", "kv_heads": "model?"}
LAYOUTS = [(KEYS_WHOLE, 2), (KEYS_WHOLE, 1), (QUERIES_WHOLE, 2)]
CASES = {
    "xla": (layout.Devices("cpu"), (1, 1, 2), "float32", {}),
    "chunked": (layout.Devices("gpu", "8.0"), (1, 1, 2), "bfloat16", {}),
    "short": (layout.Devices("tpu", "v5e"), (1, 1, 2), "bfloat16", {}),
    "splash": (layout.Devices("tpu", "v4"), (1, 1, 2), "float32", {}),
    "pair_blocks": (layout.Devices("tpu", "v5e"), (1, 1, 2), "float32", {}),
    "ring": (layout.Devices("cpu"), (1, 2, 2), "float32", {"batch": "data", "seq": "fsdp"}),
}
T, K = 128, 128


@pytest.fixture(autouse=True)
def in_interpreter(monkeypatch):
    kernels = ((attention, "short"), (attention, "splash"), (pair_blocks, "pair_blocks"))
    for module, name in kernels:
        run = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, run)


def result_and_gradients(f, q, k, v, dy):
    @jax.jit
    def both(q, k, v, dy):
        y, pull = jax.vjp(f, q, k, v)
        return y, *pull(dy)

    return both(q, k, v, dy)


@pytest.mark.parametrize(("rules", "key_heads"), LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_devices_that_split_heads_compute_what_one_device_does(name, key_heads, rules):
    devices, mesh, dtype, of_sequence = CASES[name]
    is_packed = name != "short"
    sizes = {"q": 4, "k": key_heads, "v": key_heads, "dy": 4}
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((2, T, n, K)), dtype) for n in sizes.values()]
    segments = jnp.asarray([[1] * 90 + [2] * 38, [1] * 128], jnp.int32) if is_packed else None
    seen = jnp.tri(T, dtype=bool)[None]
    if is_packed:
        seen &= attention.same_segment(segments, segments)
    exact = [x.astype(jnp.float32) for x in arrays]
    exact = result_and_gradients(lambda *qkv: attention.masked(*qkv, seen), *exact)

    config = transformer.Decoder(heads=4, kv_heads=key_heads, head_dim=K)
    placed = make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)])
    every_rule = {**layout.AXIS_RULES, **rules, **of_sequence}
    shard = layout.Layout(placed, every_rule, devices).shard

    def attend(*qkv):
        return transformer.mixer(config, segments, shard)(*qkv)[0]

    found = result_and_gradients(attend, *arrays)
    error = 2e-5 if dtype == "float32" else 0.05
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(np.asarray(x, "f4"), y, rtol=0, atol=error)
