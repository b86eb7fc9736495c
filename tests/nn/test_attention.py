"""Every kernel of attention is compared with the formula in numpy float64: causal, windows,
documents, few key heads."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import plan
from jaxtrain.nn import attention as attention_lib
from jaxtrain.nn import cudnn, splash, transformer
from jaxtrain.nn.attention import flash
from jaxtrain.nn.ring import Ring, over_mesh
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.plan.compile import for_kernels

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
    return plain(
        q, key, v, segments if packed else np.zeros_like(segments), causal=causal, window=window
    )


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
        devices=("cpu", ""),
    )
    np.testing.assert_allclose(found, expected(**case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if not c["packed"]], ids=str)
def test_padding_an_odd_length_changes_no_result(case):
    """XLA computes on the input that cuDNN's kernel gets: 127 places, like a ViT's patches and its
    CLS token."""
    q, key, v, segments = (x[:, :127] for x in inputs())
    found = cudnn.fused(
        q, key, v, causal=case["causal"], window=case["window"], implementation="xla"
    )
    assert found.shape == q.shape
    plainly = plain(
        q, key, v, np.zeros_like(segments), causal=case["causal"], window=case["window"]
    )
    np.testing.assert_allclose(found, plainly, atol=1e-5)


@pytest.mark.parametrize("kernel", ["cudnn", "xla"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_query_sees_the_padding_after_a_length(kernel, causal):
    """Rows of 121 places, padded to 128. XLA computes on the input of cuDNN's kernel, too."""
    q, key, v, segments = inputs()
    if kernel == "cudnn":
        found = cudnn.fused(q, key, v, causal=causal, window=0, length=121, implementation="xla")
        assert not np.any(found[:, 121:])
    else:
        shard = make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {}).shard
        found = attention_lib.within(shard, q, key, v, causal=causal, length=121)
    real = (x[:, :121] for x in (q, key, v, np.zeros_like(segments)))
    plainly = plain(*real, causal=causal, window=0)
    np.testing.assert_allclose(found[:, :121], plainly, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        *((case, dict(t=127)) for case in CASES[:3]),  # fewer than two tiles
        (CASES[2], dict(b=1, t=300, h=6, g=2, k=24)),  # three heads of a key head; five tiles
        # smaller tiles, and not a power of two of values
        (CASES[2], dict(b=1, t=100, h=2, g=1, k=192)),
        (dict(causal=False, window=0, packed=True), dict(b=1, t=200, h=1, g=1, k=16)),
    ],
    ids=str,
)
def test_flash_equals_the_definition_and_its_gradients(case, shape):
    """The kernel for GPUs, interpreted. Its gradients are compared with XLA's own gradients of the
    formula."""
    q, key, v, segments = inputs(**shape)
    segments = segments if case["packed"] else np.zeros_like(segments)
    dy = np.random.default_rng(1).normal(size=q.shape).astype("f4")
    causal, own = case["causal"], jnp.asarray(segments) if case["packed"] else None

    def kernel(q, key, v):
        return flash(q, key, v, causal=causal, segments_bt=own, interpret=True)

    def formula(q, key, v):
        return attention_lib.attention(
            q, key, v, causal=causal, segments_bt=segments, devices=("cpu", "")
        )

    found, pull = jax.vjp(kernel, q, key, v)
    np.testing.assert_allclose(
        found, plain(q, key, v, segments, causal=causal, window=0), rtol=0, atol=1e-5
    )
    for a, b in zip(pull(dy), jax.vjp(formula, q, key, v)[1](dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


def test_flash_takes_documents_in_any_order():
    q, key, v, _ = inputs(b=2, t=200, h=2, g=1, k=16)
    segments = np.random.default_rng(2).integers(-3, 3, (2, 200), dtype="i4")
    segments[1, :150] = np.repeat([7, 2, 5], 50)
    found = flash(q, key, v, causal=True, segments_bt=jnp.asarray(segments), interpret=True)
    np.testing.assert_allclose(
        found, plain(q, key, v, segments, causal=True, window=0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_splash_equals_the_definition(case):
    """The kernel for TPUs, interpreted."""
    q, key, v, segments = inputs()
    segments = segments if case["packed"] else None
    assert splash.splash_fits(q.shape)
    found = splash.splash(
        q,
        key,
        v,
        causal=case["causal"],
        window=case["window"],
        segments_bt=segments,
        interpret=True,
    )
    np.testing.assert_allclose(found, expected(**case), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("mesh", "case"),
    [*(((1, 4, 2), case) for case in CASES), ((1, 8, 1), CASES[2]), ((2, 2, 2), CASES[3])],
    ids=str,
)
def test_a_ring_of_devices_equals_the_definition_and_its_gradients(case, mesh):
    """Each device has its part of the sequence. Gradients are compared with XLA's own gradients of
    the whole."""
    rules = {"batch": "data", "seq": "fsdp"}
    shard = make_layout(make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))]), rules).shard
    q, key, v, segments = inputs()
    segments = segments if case["packed"] else np.zeros_like(segments)
    ring = Ring("fsdp", mesh[1], case["causal"], case["window"], chunk=16)
    dy = np.random.default_rng(1).normal(size=q.shape).astype("f4")

    def parts(q, key, v):
        y = over_mesh(shard, ring, q, key, v, jnp.asarray(segments))
        return (y * dy).sum(), y

    def whole(q, key, v):
        y = attention_lib.attention(
            q,
            key,
            v,
            causal=case["causal"],
            window=case["window"],
            segments_bt=segments,
            devices=("cpu", ""),
        )
        return (y * dy).sum()

    grads, found = jax.jit(jax.grad(parts, (0, 1, 2), has_aux=True))(q, key, v)
    np.testing.assert_allclose(found, expected(**case), rtol=0, atol=1e-5)
    for a, b in zip(grads, jax.jit(jax.grad(whole, (0, 1, 2)))(q, key, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


def test_a_device_of_a_ring_holds_no_more_than_its_part_times_a_chunk():
    """The bytes that XLA plans for 8 devices, compared with all weights at once: T × T a head."""
    t, h = 4096, 2
    shard = make_layout(make_mesh(1, 8, 1), {"batch": "data", "seq": "fsdp"}).shard
    ring = Ring("fsdp", 8, chunk=64)

    def loss(x):
        return over_mesh(shard, ring, x, x, x, jnp.zeros((1, t), jnp.int32)).sum()

    x = jax.ShapeDtypeStruct(
        (1, t, h, 8),
        jnp.float32,
        sharding=shard.layout.sharding((None, "seq", None, None), (1, t, h, 8)),
    )
    temp = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temp < t * t * h * 4 / 8 / 4, "a quarter of one device's rows of weights"


def lowered(f, *args):
    h100 = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0"
    )
    with for_kernels(h100):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_for_gpus_holds_a_fused_attention_kernel():
    """On a machine without a GPU, the program is lowered for CUDA, and must hold cuDNN's kernels or
    Triton's."""

    def loss(**case):
        def f(*args):
            q, key, v, *segments = args
            y = attention_lib.attention(
                q,
                key,
                v,
                **case,
                segments_bt=segments[0] if segments else None,
                devices=("gpu", ""),
            )
            return y.astype(jnp.float32).sum()

        return f

    for t in (128, 97):
        q, key, v, segments = (x[:, :t] for x in inputs())
        narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, key, v))
        for case in (dict(causal=True, window=24), dict(causal=False)):
            text = lowered(jax.grad(loss(**case)), *narrow)
            assert "__cudnn$fmha" in text and "Backward" in text
        text = lowered(jax.grad(loss(causal=True), (0, 1, 2)), *narrow, jnp.asarray(segments))
        kernels = text.count("xla.gpu.triton")
        assert "cudnn" not in text and kernels == 3, (
            "forward, and the two kernels of the backward pass"
        )
        text = lowered(
            loss(causal=True, window=24),
            *(jnp.asarray(x) for x in (q, key, v)),
            jnp.asarray(segments),
        )
        assert "cudnn" not in text and "triton" not in text, "float32 goes through XLA"


@pytest.mark.parametrize(
    ("platform", "capability", "k", "case", "kernel"),
    [
        ("gpu", "9.0", 256, dict(causal=True), "cudnn"),
        ("gpu", "10.0", 256, dict(causal=True), "cudnn"),
        ("gpu", "8.0", 128, dict(causal=True), "cudnn"),
        ("gpu", "8.0", 256, dict(causal=True), "xla"),
        ("gpu", "9.0", 256, dict(causal=True, packed=True), "flash"),
        ("gpu", "8.0", 136, dict(causal=True, packed=True), "xla"),
        ("gpu", "9.0", 512, dict(causal=True), "xla"),
        ("gpu", "9.0", 20, dict(causal=True), "flash"),
        ("gpu", "9.0", 64, dict(window=8), "xla"),
        ("gpu", "9.0", 64, dict(causal=True, window=8, packed=True), "xla"),
        ("gpu", "9.0", 64, dict(causal=True, window=8), "cudnn"),
        ("gpu", "9.0", 64, dict(causal=True, dtype="float32"), "xla"),
        ("gpu", "7.0", 64, dict(causal=True), "xla"),
        ("gpu", "gfx942", 64, dict(causal=True), "xla"),
        ("tpu", "", 64, dict(causal=True, packed=True), "splash"),
        ("tpu", "", 80, dict(causal=True), "xla"),
        ("cpu", "", 64, dict(causal=True), "xla"),
    ],
)
def test_the_kernel_is_that_of_the_devices_that_a_program_is_for(
    platform, capability, k, case, kernel
):
    case = dict(dtype="bfloat16", causal=False, window=0, packed=False) | case
    q_bthk = jax.ShapeDtypeStruct((2, 256, 4, k), jnp.dtype(case.pop("dtype")))
    assert attention_lib.choose(q_bthk, (platform, capability), **case) == kernel


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_a_tpu_is_given_splash():
    """XLA compiles for four chips, with heads and rows split over them. The kernel is in the
    program, forward and back."""
    devices = plan.compile.tpu_devices(plan.parse_target("tpu:v5e:2x2"))
    shard = make_layout(make_mesh(1, 2, 2, devices=devices), {}).shard
    c = transformer.Decoder(embed=512, heads=8, kv_heads=1, head_dim=64)
    mix = transformer.mixer(c, jnp.ones((4, 512), jnp.int32), shard)

    def loss(q, key, v):
        return mix(q, key, v)[0].astype(jnp.float32).sum()

    shapes = [
        jax.ShapeDtypeStruct(
            s, jnp.bfloat16, sharding=shard.layout.sharding(("batch", None, a, None), s)
        )
        for s, a in (
            ((4, 512, 8, 64), "heads"),
            ((4, 512, 1, 64), "kv_heads"),
            ((4, 512, 1, 64), "kv_heads"),
        )
    ]
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().as_text()
    assert text.count("tpu_custom_call") == 3, "forward, and the two kernels of the backward pass"
