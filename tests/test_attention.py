"""Every kernel of attention against the formula in numpy float64: causal, windows, documents, few key heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.layout import make_layout, make_mesh
from jaxtrain.nn import attention as attention_lib
from jaxtrain.nn import transformer

CASES = [
    dict(causal=False, window=0, packed=False),
    dict(causal=True, window=0, packed=False),
    dict(causal=True, window=0, packed=True),
    dict(causal=True, window=24, packed=True),
    dict(causal=False, window=24, packed=True),
]


def inputs(b=2, t=128, h=4, g=2, k=64, dtype="f4"):
    rng = np.random.default_rng(0)
    q, key, v = (rng.normal(size=(b, t, n, k)).astype(dtype) for n in (h, g, g))
    segments = np.sort(rng.integers(0, 4, (b, t), dtype="i4"), axis=1)
    return q, key, v, segments


def plain(q, key, v, segments, *, causal, window):
    """The definition, query by query."""
    b, t, h, k = q.shape
    q, key, v = (x.astype("f8") for x in (q, key, v))
    out = np.zeros(q.shape)
    for row, i, head in np.ndindex(b, t, h):
        j = np.arange(t)
        seen = segments[row] == segments[row, i]
        seen &= (j <= i) if causal else True
        seen &= (np.abs(i - j) < window) if window else True
        group = head // (h // key.shape[2])
        x = key[row, seen, group] @ q[row, i, head] / np.sqrt(k)
        p = np.exp(x - x.max())
        out[row, i, head] = p / p.sum() @ v[row, seen, group]
    return out


@functools.cache
def expected(causal, window, packed):
    q, key, v, segments = inputs()
    return plain(q, key, v, segments if packed else np.zeros_like(segments), causal=causal, window=window)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_equals_the_definition(case):
    q, key, v, segments = inputs()
    found = attention_lib.attention(
        q,
        key,
        v,
        causal=case["causal"],
        window=case["window"],
        segments_bt=segments if case["packed"] else None,
        platform="cpu",
    )
    np.testing.assert_allclose(found, expected(**case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_odd_length_sees_nothing_of_what_makes_it_even(case):
    """What cuDNN's kernel is given, by XLA: 127 places, as a ViT's patches and its CLS token are."""
    t = 127
    q, key, v, segments = (x[:, :t] for x in inputs())
    segments = segments if case["packed"] else np.zeros_like(segments)
    found = attention_lib.fused(
        q, key, v, causal=case["causal"], window=case["window"], segments_bt=segments if case["packed"] else None,
        implementation="xla",
    )  # fmt: skip
    assert found.shape == q.shape
    np.testing.assert_allclose(found, plain(q, key, v, segments, causal=case["causal"], window=case["window"]), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_splash_equals_the_definition(case):
    """The kernel for TPUs, interpreted."""
    q, key, v, segments = inputs()
    segments = segments if case["packed"] else None
    assert attention_lib.splash_fits(q.shape)
    found = attention_lib.splash(q, key, v, causal=case["causal"], window=case["window"], segments_bt=segments, interpret=True)
    np.testing.assert_allclose(found, expected(**case), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("mesh", "case"), [*(((1, 4, 2), case) for case in CASES), ((1, 8, 1), CASES[2]), ((2, 2, 2), CASES[3])], ids=str
)
def test_a_ring_of_devices_equals_the_definition_and_its_gradients(case, mesh):
    """Each device has its part of the sequence. Gradients against XLA's own of the whole."""
    rules = {"batch": "data", "seq": "fsdp"}
    shard = make_layout(make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))]), rules).shard
    q, key, v, segments = inputs()
    segments = segments if case["packed"] else np.zeros_like(segments)
    ring = attention_lib.Ring("fsdp", mesh[1], 0, case["causal"], case["window"], chunk=16)
    dy = np.random.default_rng(1).normal(size=q.shape).astype("f4")

    def parts(q, key, v):
        y = transformer._ring(shard, ring, q, key, v, jnp.asarray(segments))
        return (y * dy).sum(), y

    def whole(q, key, v):
        y = attention_lib.attention(
            q, key, v, causal=case["causal"], window=case["window"], segments_bt=segments, platform="cpu"
        )
        return (y * dy).sum()

    grads, found = jax.jit(jax.grad(parts, (0, 1, 2), has_aux=True))(q, key, v)
    np.testing.assert_allclose(found, expected(**case), rtol=0, atol=1e-5)
    for a, b in zip(grads, jax.jit(jax.grad(whole, (0, 1, 2)))(q, key, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


def test_a_device_of_a_ring_holds_no_more_than_its_part_times_a_chunk():
    """Bytes that XLA plans for 8 devices, beside those of all weights at once: T × T of each head."""
    t, h = 4096, 2
    shard = make_layout(make_mesh(1, 8, 1), {"batch": "data", "seq": "fsdp"}).shard
    ring = attention_lib.Ring("fsdp", 8, 0, chunk=64)

    def loss(x):
        return transformer._ring(shard, ring, x, x, x, jnp.zeros((1, t), jnp.int32)).sum()

    x = jax.ShapeDtypeStruct((1, t, h, 8), jnp.float32, sharding=shard.layout.sharding((None, "seq", None, None), (1, t, h, 8)))
    temp = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temp < t * t * h * 4 / 8 / 4, "a quarter of one device's rows of weights"


def test_cudnn_takes_documents_windows_and_few_key_heads(monkeypatch):
    """What a GPU is given, from a machine without one: the program is lowered for CUDA, and must hold cuDNN's kernels."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)

    def loss(q, key, v, segments):
        y = attention_lib.attention(q, key, v, causal=True, window=24, segments_bt=segments, platform="gpu")
        return y.astype(jnp.float32).sum()

    for t in (128, 97):  # JAX itself derives no odd length
        q, key, v, segments = (x[:, :t] for x in inputs())
        args = (*(jnp.asarray(x, jnp.bfloat16) for x in (q, key, v)), jnp.asarray(segments))
        text = jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert "__cudnn$fmha" in text and "Backward" in text
    bare = functools.partial(attention_lib.attention, platform="gpu")
    text = (
        jax.jit(jax.grad(lambda *x: bare(*x).sum().astype("f4"))).trace(*args[:3]).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert "__cudnn$fmha" in text and "Backward" in text
    wide = (*(jnp.asarray(x) for x in (q, key, v)), jnp.asarray(segments))
    text = jax.jit(loss).trace(*wide).lower(lowering_platforms=("cuda",)).as_text()
    assert "cudnn" not in text, "float32 goes through XLA"


@pytest.mark.slow
def test_a_tpu_is_given_splash():
    """Compiled by XLA for four chips, with heads and rows split over them: the kernel is in the program, forward and back."""
    from jax.experimental import topologies

    devices = list(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
    shard = make_layout(make_mesh(1, 2, 2, devices=devices), {}).shard
    c = transformer.Decoder(embed=512, heads=8, kv_heads=1, head_dim=64)
    mix = transformer.mixer(c, jnp.ones((4, 512), jnp.int32), shard)

    def loss(q, key, v):
        return mix(q, key, v)[0].astype(jnp.float32).sum()

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=shard.layout.sharding(("batch", None, a, None), s))
        for s, a in (((4, 512, 8, 64), "heads"), ((4, 512, 1, 64), "kv_heads"), ((4, 512, 1, 64), "kv_heads"))
    ]
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().as_text()
    assert text.count("tpu_custom_call") >= 3, "forward, and the two kernels of the backward pass"
