"""Every kernel of attention is compared with the formula in numpy float64: causal, windows,
documents, few key heads."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as kernel_lib

from jaxtrain import plan
from jaxtrain.nn import attention as attention_lib
from jaxtrain.nn import cudnn, splash, transformer
from jaxtrain.nn.ring import Ring, over_mesh, whole
from jaxtrain.parallel.layout import abstract_mesh, devices_of, make_layout, make_mesh
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
        *((case, dict(b=1, t=127)) for case in CASES),  # less than a chunk
        (CASES[2], dict(b=1, t=600, h=6, g=2, k=24)),  # three heads of a key head; 1.2 chunks
        (dict(causal=False, window=24, packed=True), dict(b=1, t=600, h=1, g=1, k=5)),
    ],
    ids=str,
)
def test_chunks_of_keys_equal_the_definition_and_its_gradients(case, shape):
    """Gradients are compared with XLA's own gradients of the formula."""
    q, key, v, segments = inputs(**shape)
    segments = segments if case["packed"] else np.zeros_like(segments)
    dy = np.random.default_rng(1).normal(size=q.shape).astype("f4")
    masks = {name: case[name] for name in ("causal", "window")}
    own = jnp.asarray(segments) if case["packed"] else None

    def in_chunks(q, key, v):
        return whole(q, key, v, own, **masks, keep="attention")

    def formula(q, key, v):
        return attention_lib.attention(
            q, key, v, **masks, segments_bt=segments, devices=("cpu", "")
        )

    found, pull = jax.vjp(in_chunks, q, key, v)
    expected_y, expected_pull = jax.vjp(formula, q, key, v)
    np.testing.assert_allclose(found, expected_y, rtol=0, atol=1e-5)
    for a, b in zip(pull(dy), expected_pull(dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


ROWS = {
    "several documents": [1] * 20 + [2] * 1 + [3] * 75,
    "padding": [1] * 40 + [2] * 30 + [0] * 26,
    "one document": [1] * 96,
    "padding alone": [0] * 96,
    "as many as there may be": [1, 2, 3, 4] + [0] * 92,
    "equal numbers apart": [1] * 30 + [2] * 30 + [1] * 36,
}


@pytest.mark.parametrize("most", [4, 5, 9, 200])
def test_documents_are_where_their_bounds_say(most):
    """The bounds of each row make its documents again, each in its own place."""
    rows = np.array([row for name, row in ROWS.items() if "many" not in name], "i4")
    starts, lengths, n = (np.asarray(x) for x in cudnn.bounds(jnp.asarray(rows), most))
    assert starts.shape == lengths.shape == (len(rows), most)
    assert n.tolist() == [3, 3, 1, 1, 3]
    for row, row_starts, row_lengths, count in zip(rows, starts, lengths, n, strict=True):
        assert (row_starts[count:] == -1).all() and (row_lengths[count:] == -1).all()
        parts = [row[a : a + k] for a, k in zip(row_starts[:count], row_lengths, strict=False)]
        assert all(len(set(part.tolist())) == 1 for part in parts)
        np.testing.assert_array_equal(np.concatenate(parts), row)


def test_more_documents_than_there_may_be_are_counted():
    row = jnp.asarray([[1, 1, 2, 3, 3, 4, 0, 0]], jnp.int32)
    starts, lengths, n = cudnn.bounds(row, 3)
    assert (starts.tolist(), lengths.tolist()) == ([[0, 2, 3]], [[2, 1, 2]]) and n == 5


def as_cudnn(q, key, v, *, q_seqlen, q_offsets, kv_seqlen, kv_offsets, scale, **masks):
    """Compute what cuDNN's kernel does with offsets and lengths, as JAX passes them to it: each
    sequence begins at its offset in memory. What no sequence has stays NaN."""
    q_seqlen, kv_seqlen, q_offsets, kv_offsets = (
        np.asarray(x).reshape(-1)
        for x in kernel_lib._fix_seqlen_offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, q, key)
    )
    (b, t, h, k), g = q.shape, key.shape[2]
    q, key, v = (np.asarray(x, "f8").reshape(b * t, -1, k) for x in (q, key, v))
    assert scale == k**-0.5
    out = np.full((b * t, h, k), np.nan)
    for i in range(len(q_seqlen)):
        if n := q_seqlen[i]:
            at, from_ = q_offsets[i] // (h * k), kv_offsets[i] // (g * k)
            assert n == kv_seqlen[i]
            span, keys = slice(at, at + n), slice(from_, from_ + n)
            part = (x[None] for x in (q[span], key[keys], v[keys]))
            causal = masks["mask_type"] == kernel_lib.MaskType.PADDING_CAUSAL
            window = masks["sliding_window_length"] or 0
            same = np.zeros((1, n), int)
            out[span] = plain(*part, same, causal=causal, window=window)[0]
    return jnp.asarray(out.reshape(b, t, h, k), jnp.float32)


@pytest.mark.parametrize("places", [96, 95])
@pytest.mark.parametrize("masks", [(True, 0), (False, 0), (True, 7)])
def test_documents_by_offsets_equal_the_definition(masks, places, monkeypatch):
    """Rows with different numbers of documents lie side by side in memory."""
    monkeypatch.setattr(kernel_lib, "dot_product_attention", as_cudnn)
    segments = np.array(list(ROWS.values()), "i4")[:-1, :places]
    q, key, v, _ = inputs(b=len(segments), t=places, h=4, g=2, k=8)
    causal, window = masks
    found = cudnn.packed(
        q,
        key,
        v,
        jnp.asarray(segments),
        documents=4,
        causal=causal,
        window=window,
        capability="9.0",
    )
    plainly = plain(q, key, v, segments, causal=causal, window=window)
    np.testing.assert_allclose(found, plainly, rtol=0, atol=1e-5)


def test_a_row_with_too_many_documents_is_not_a_number(monkeypatch):
    monkeypatch.setattr(
        kernel_lib, "dot_product_attention", lambda q, *args, **kwargs: q * jnp.float32(1)
    )
    segments = np.array([ROWS["several documents"], ROWS["as many as there may be"]], "i4")
    q, key, v, _ = inputs(b=2, t=96, h=1, g=1, k=8)
    found = cudnn.packed(q, key, v, jnp.asarray(segments), documents=2, causal=True, window=0)
    assert not np.isnan(found[0]).any() and np.isnan(found[1]).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_splash_equals_the_definition(case):
    """The kernel for TPUs, interpreted."""
    q, key, v, segments = inputs()
    segments = segments if case["packed"] else None
    assert splash.splash_fits(q.shape, packed=True)
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
    ("mesh", "case", "t"),
    [
        *(((1, 4, 2), case, 128) for case in CASES),
        ((1, 8, 1), CASES[2], 128),
        ((2, 2, 2), CASES[3], 128),
        ((1, 4, 1), CASES[4], 120),  # each part has two chunks of 15 keys
        *(((1, 4, 1), case, 124) for case in CASES[3:]),  # one of 16 and one of 15, filled
    ],
    ids=str,
)
def test_a_ring_of_devices_equals_the_definition_and_its_gradients(case, mesh, t):
    """Each device has its part of the sequence. Gradients are compared with XLA's own gradients of
    the whole."""
    rules = {"batch": "data", "seq": "fsdp"}
    shard = make_layout(make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))]), rules).shard
    q, key, v, segments = (x[:, :t] for x in inputs())
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

    masks = {name: case[name] for name in ("causal", "window")}
    grads, found = jax.jit(jax.grad(parts, (0, 1, 2), has_aux=True))(q, key, v)
    np.testing.assert_allclose(found, plain(q, key, v, segments, **masks), rtol=0, atol=1e-5)
    for a, b in zip(grads, jax.jit(jax.grad(whole, (0, 1, 2)))(q, key, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)


@pytest.mark.parametrize("part", [512, 528, 521])
def test_a_device_of_a_ring_holds_no_more_than_its_part_times_a_chunk(part):
    """The bytes that XLA plans for 8 devices, compared with all weights at once: T × T a head.
    Parts that are no multiple of a chunk had one chunk."""
    t, h = 8 * part, 2
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
    """On a machine without a GPU, the program is lowered for CUDA, and must hold cuDNN's kernels
    if they take the case. Without them it has no array of all weights."""

    def loss(on="", **case):
        def f(*args):
            q, key, v, *segments = args
            y = attention_lib.attention(
                q,
                key,
                v,
                **case,
                segments_bt=segments[0] if segments else None,
                devices=("gpu", on),
            )
            return y.astype(jnp.float32).sum()

        return f

    for t in (128, 97):
        q, key, v, segments = (x[:, :t] for x in inputs())
        narrow = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, key, v))
        for case in (dict(causal=True, window=24), dict(causal=False)):
            text = lowered(jax.grad(loss(**case)), *narrow)
            assert "__cudnn$fmha" in text and "Backward" in text
        for case in (dict(causal=True), dict(), dict(causal=True, window=24)):
            packed = loss(**case, documents=4, on="9.0")
            text = lowered(jax.grad(packed, (0, 1, 2)), *narrow, jnp.asarray(segments))
            assert "__cudnn$fmhaSoftmaxBackward" in text
            assert f"max_seg_per_batch\\22: {5 + t % 2}" in text, "padding, and an odd place"
        text = lowered(jax.grad(loss(causal=True), (0, 1, 2)), *narrow, jnp.asarray(segments))
        assert "cudnn" not in text and "triton" not in text
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
        ("gpu", "8.0", 256, dict(causal=True), "chunked"),
        ("gpu", "9.0", 256, dict(causal=True, packed=True, documents=8), "cudnn"),
        ("gpu", "9.0", 64, dict(packed=True, documents=8), "cudnn"),
        ("gpu", "9.0", 64, dict(causal=True, window=8, packed=True, documents=8), "cudnn"),
        ("gpu", "9.0", 64, dict(window=8, packed=True, documents=8), "chunked"),
        ("gpu", "9.0", 20, dict(causal=True, packed=True, documents=8), "chunked"),
        ("gpu", "8.0", 64, dict(causal=True, packed=True, documents=8), "chunked"),
        ("gpu", "", 64, dict(causal=True, packed=True, documents=8), "chunked"),
        ("gpu", "9.0", 64, dict(causal=True, packed=True, documents=128), "cudnn"),
        ("gpu", "9.0", 64, dict(causal=True, packed=True, documents=129), "chunked"),
        ("gpu", "9.0", 256, dict(causal=True, packed=True), "chunked"),
        ("gpu", "8.0", 136, dict(causal=True, packed=True), "chunked"),
        ("gpu", "9.0", 512, dict(causal=True), "chunked"),
        ("gpu", "9.0", 20, dict(causal=True), "chunked"),
        ("gpu", "9.0", 64, dict(window=8), "chunked"),
        ("gpu", "9.0", 64, dict(causal=True, window=8, packed=True), "chunked"),
        ("gpu", "9.0", 64, dict(causal=True, window=8), "cudnn"),
        ("gpu", "9.0", 64, dict(causal=True, dtype="float32"), "xla"),
        ("gpu", "7.0", 64, dict(causal=True), "chunked"),
        ("gpu", "gfx942", 64, dict(causal=True), "chunked"),
        ("tpu", "", 64, dict(causal=True, packed=True), "pair_blocks"),
        ("tpu", "", 64, dict(causal=True, dtype="float32"), "splash"),
        ("tpu", "", 64, dict(causal=True), "short"),
        ("tpu", "", 128, dict(window=8), "short"),
        ("tpu", "", 80, dict(causal=True), "xla"),
        ("cpu", "", 64, dict(causal=True), "xla"),
    ],
)
def test_the_kernel_is_that_of_the_devices_that_a_program_is_for(
    platform, capability, k, case, kernel
):
    case = {"dtype": "bfloat16", **case}
    q_bthk = jax.ShapeDtypeStruct((2, 256, 4, k), jnp.dtype(case.pop("dtype")))
    masks = attention_lib.Masks(**case)
    assert attention_lib.choose(q_bthk, (platform, capability), masks) == kernel


def test_what_cudnn_refuses_is_logged_once_with_what_is_used_instead(caplog):
    attention_lib._log_once.cache_clear()
    mesh = abstract_mesh(1, 1, 1, count=1, what="NVIDIA A100")
    shard = make_layout(mesh, {}, devices=devices_of("NVIDIA A100")).shard
    q = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    a100 = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0"
    )

    def layers(q, segments, **masks):
        for _ in range(2):
            q = attention_lib.within(shard, q, q, q, segments_bt=segments, documents=4, **masks)
        return q

    with caplog.at_level("INFO", "jaxtrain"), for_kernels(a100):
        jax.eval_shape(functools.partial(layers, causal=True), q, segments)
        jax.eval_shape(functools.partial(layers, window=8), q, segments)
    assert [line for line in caplog.messages if "cuDNN" in line] == [
        "cuDNN's attention does not take documents on compute capability 8.0, below 9.0:"
        " XLA's own is used instead, some keys at a time",
        "cuDNN's attention does not take a window to both sides: XLA's own is used instead, some"
        " keys at a time",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
def test_a_tpu_is_given_the_kernel_for_documents():
    """XLA compiles for four chips, with heads and rows split over them. The kernel is in the
    program, forward and back."""
    devices = plan.compile.tpu_devices(plan.parse_target("tpu:v5e:2x2"))
    shard = make_layout(make_mesh(1, 2, 2, devices=devices), {}).shard
    c = transformer.Decoder(embed=512, heads=8, kv_heads=1, head_dim=64)

    def loss(q, key, v):
        mix = transformer.mixer(c, jnp.ones((4, 512), jnp.int32), shard)
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
    assert text.count("tpu_custom_call") == 2, "forward and back"


def test_rows_of_one_document_are_one_sequence_on_gpus_with_padding_at_their_end(monkeypatch):
    """cuDNN's kernel of one sequence takes them on any card. It is XLA's here, called alike."""
    q, key, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in inputs(b=4, t=64, h=2, g=2, k=16))
    segments = np.ones((4, 64), np.int32)
    segments[1, 40:] = 0  # padding at the end
    segments[2, :8] = 0  # padding before a document, which queries of it would see
    segments[3, 40:] = 2  # two documents
    fused = functools.partial(cudnn.fused, implementation="xla")
    monkeypatch.setattr(cudnn, "fused", fused)
    monkeypatch.setattr(cudnn, "packed", lambda *_, **__: pytest.fail("called with documents"))
    given = dict(causal=True, segments_bt=jnp.asarray(segments), documents=1)
    y = attention_lib.attention(q, key, v, devices=("gpu", "8.6"), **given)
    whole = attention_lib.attention(q, key, v, devices=("cpu", ""), **given)
    np.testing.assert_allclose(*(x[0].astype("f4") for x in (y, whole)), atol=2e-2)
    np.testing.assert_allclose(*(x[1, :40].astype("f4") for x in (y, whole)), atol=2e-2)
    assert np.isnan(y[2:].astype("f4")).all()
