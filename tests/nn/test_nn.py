"""Layers that workloads share, each compared with numbers computed in another way."""

import math
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.nn import cross_entropy as cross_entropy_lib
from jaxtrain.nn import layers, remat
from jaxtrain.nn.cpu import heads_first
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.nn.layers import product, scaled, spread
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.parallel.layout import abstract_mesh, devices_of, make_layout, make_mesh

DATA = pathlib.Path(__file__).parents[1] / "data"


def shard_on(data, fsdp, model, **rules):
    return make_layout(
        make_mesh(data, fsdp, model, devices=jax.devices()[: data * fsdp * model]), rules
    ).shard


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_cross_entropy_and_z_loss_equal_float64(mesh, chunk):
    """Logits are x times the identity, so that the golden gradient by logits is the gradient by x.
    Labels outside the vocabulary do not count."""
    g = np.load(DATA / "ce" / "ce.npz")
    logits, labels = np.tile(g["logits"], (4, 1, 1)).astype("f4"), np.tile(g["labels"], (4, 1))
    pad = -logits.shape[1] % 8
    logits, labels = (
        np.pad(logits, ((0, 0), (0, pad), (0, 0))),
        np.pad(labels, ((0, 0), (0, pad)), constant_values=-100),
    )
    # One or two more symbols, always with logit -1e4, so that the vocabulary splits in two.
    n, z = logits.shape[2], float(g["z_coef"])
    more = 2 - n % 2
    logits = np.pad(logits, ((0, 0), (0, 0), (0, more)), constant_values=1)
    w = jnp.diag(jnp.concatenate([jnp.ones(n), jnp.full(more, -1e4)]))
    shard = shard_on(*mesh)
    assert shard.size("vocab", n + more) == mesh[2]

    def loss(x, w):
        sums = cross_entropy(
            x,
            w,
            jnp.asarray(labels),
            jnp.asarray(labels >= 0, jnp.float32),
            shard,
            z_loss=z,
            chunk=chunk,
        )
        return sums.loss / (4 * float(g["n_valid"])), sums

    ((value, sums), (dx, dw)) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        jnp.asarray(logits), w
    )
    np.testing.assert_allclose(value, g["softmax_plus_z_mean"], rtol=2e-6)
    np.testing.assert_allclose(
        sums.cross_entropy / (4 * g["n_valid"]), g["softmax_mean"], rtol=2e-6
    )
    np.testing.assert_allclose(sums.z * z / (4 * g["n_valid"]), g["z_loss_mean"], rtol=2e-6)
    best = (logits[..., :n].argmax(-1) == labels) & (labels >= 0)
    assert sums.correct == best.sum()
    expected = np.tile(g["softmax_plus_z_mean_grad"], (4, 1, 1)) / 4
    np.testing.assert_allclose(
        dx[:, : expected.shape[1], :n], expected, rtol=0, atol=2e-6 * np.abs(expected).max()
    )
    expected = np.einsum("btv,btd->vd", expected, logits[:, : expected.shape[1]].astype("f8"))
    np.testing.assert_allclose(dw[:n], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("vocab", [40, 37])
def test_cross_entropy_on_tpus_counts_the_same_words_in_float32(vocab, monkeypatch):
    """Two words have the largest logit of some tokens: the first one is the answer."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 8, 16)), rng.normal(size=(40, 16))
    w[20:30] = w[:10]
    label = (x @ w[:vocab].T).argmax(-1)
    label[:, ::3] += 20
    args = [jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)]

    def sums_and_gradients(kind):
        monkeypatch.setattr(layout_lib, "devices_like", lambda device: devices_of(kind))
        shard = shard_on(1, 1, 1)

        def loss(x, w):
            sums = cross_entropy(x, w, jnp.asarray(label), jnp.ones((2, 8)), shard, size=vocab)
            return sums.loss, sums

        return jax.value_and_grad(loss, (0, 1), has_aux=True)

    plain, on_tpu = (sums_and_gradients(kind) for kind in ("cpu", "TPU v5 lite"))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(plain)(*args), jax.jit(on_tpu)(*args))
    (_, sums), _ = on_tpu(*args)
    assert 0 < sums.correct < 16
    texts = [str(jax.make_jaxpr(f)(*args)) for f in (plain, on_tpu)]
    assert ["i32[16] = reduce_min" in text for text in texts] == [True, False]


def test_cross_entropy_never_holds_all_logits():
    """The bytes besides the arguments: gradients, and a chunk's logits instead of 2048 × 4096."""
    n, d, v = 2048, 8, 4096
    shard = shard_on(1, 1, 1)

    def temp(chunk):
        def loss(x, w):
            return cross_entropy(
                x, w, jnp.zeros((1, n), jnp.int32), jnp.ones((1, n)), shard, chunk=chunk
            ).loss

        shapes = (
            jax.ShapeDtypeStruct((1, n, d), jnp.float32),
            jax.ShapeDtypeStruct((v, d), jnp.float32),
        )
        return (
            jax.jit(jax.grad(loss, (0, 1)))
            .lower(*shapes)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    whole = n * v * 4
    assert temp(n) >= whole
    assert temp(64) < whole / 8


@pytest.mark.parametrize("word", ["full", "save b", "save a,b"])
def test_rematerialisation_changes_no_number(word):
    stack = jax.random.normal(jax.random.key(0), (7, 4, 4)) / 2
    x = jax.random.normal(jax.random.key(1), (3, 4))

    def layer(x, w):
        y = remat.name(jnp.tanh(x @ w), "a")
        return x + remat.name(jnp.sin(y), "b"), y.sum()

    def loss(stack, word):
        y, sums = remat.scan(layer, x, stack, word)
        return (y**2).sum() + sums @ jnp.arange(7.0)

    expected, found = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(stack, w) for w in ("none", word)
    )
    # of up to 15
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1.5e-5), expected, found
    )


def test_rematerialisation_keeps_fewer_activations():
    def kept(word):
        def layer(x, w):
            y = remat.name(jnp.tanh(x @ w), "a")
            return x + jnp.sin(y @ w), None

        def loss(stack):
            return (remat.scan(layer, jnp.ones((256, 64)), stack, word)[0] ** 2).sum()

        shape = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32)
        return jax.jit(jax.grad(loss)).lower(shape).compile().memory_analysis().temp_size_in_bytes

    none, full = kept("none"), kept("full")
    assert full < kept("save a") < none


@pytest.mark.parametrize(
    ("kind", "unroll", "prevented"),
    [
        ("NVIDIA H100", 0, True),
        ("NVIDIA H100", 3, True),
        ("NVIDIA H100", 1, False),
        ("cpu", 3, False),
        ("cpu", 0, False),
    ],
)
def test_written_out_layers_on_gpus_keep_what_is_recomputed_apart(kind, unroll, prevented):
    """XLA would merge a recomputation with the forward pass, unless a loop divides the two."""
    mesh = abstract_mesh(1, 1, 1, count=1, what=kind)
    shard = make_layout(mesh, {}, devices=devices_of(kind)).shard

    def layer(x, w):
        return remat.cheap("none", lambda x, w: jnp.tanh(x) @ w, x, w), None

    def loss(stack):
        x = jnp.ones((2, 4), jnp.bfloat16)
        y, _ = remat.scan(layer, x, stack, "none", unroll=unroll, shard=shard)
        return remat.cheap("none", jnp.tanh, y).astype(jnp.float32).sum()

    stack = jnp.ones((3, 4, 4), jnp.bfloat16)
    text = str(jax.make_jaxpr(jax.grad(loss))(stack))
    # the one after the stack is always merged
    assert ("prevent_cse=True" in text) == prevented and "prevent_cse=False" in text


@pytest.mark.parametrize(
    ("kind", "unroll", "is_ordered"),
    [("NVIDIA H100", 1, True), ("NVIDIA H100", 3, False), ("cpu", 1, False)],
)
def test_with_jax_12_a_loop_on_gpus_takes_inputs_and_cotangents_by_rows(
    kind, unroll, is_ordered, monkeypatch
):
    """The part `newest` of the proofs holds the memory that this saves."""
    monkeypatch.setattr(remat, "TRANSPOSES", True)
    mesh = abstract_mesh(1, 1, 1, count=1, what=kind)
    shard = make_layout(mesh, {}, devices=devices_of(kind)).shard

    def loss(x, stack):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return remat.scan(layer, x, stack, "full", unroll=unroll, shard=shard)[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 4)), jnp.ones((3, 4, 4))))
    # forward, in the recomputation, and of the cotangent
    found = re.findall(r"layout_constraint\[[^\]]*major_to_minor=\((\d), (\d)\)", text)
    assert found == [("0", "1")] * 3 * is_ordered


@pytest.mark.parametrize(
    ("kind", "fsdp", "unroll", "waits"),
    [
        ("NVIDIA H100", 8, 1, True),
        ("NVIDIA H100", 8, 3, False),
        ("NVIDIA H100", 1, 1, False),
        ("cpu", 8, 1, False),
    ],
)
def test_in_loops_of_gpus_with_fsdp_a_cotangent_waits_for_the_gradients_of_trained_weights(
    kind, fsdp, unroll, waits
):
    mesh = abstract_mesh(8 // fsdp, fsdp, 1, count=8, what=kind)
    shard = make_layout(mesh, {}, devices=devices_of(kind)).shard

    def loss(x, stack, shard):
        def layer(x, w):
            y = jnp.tanh(x)
            if shard is not None:
                y, w = layers.after_sums(y, w, shard)
            return y @ w["trained"] @ w["frozen"], None

        return remat.scan(layer, x, stack, "full", unroll=unroll, shard=shard)[0].sum()

    rng = np.random.default_rng(0)
    x, trained, frozen = (
        jnp.asarray(rng.normal(size=s), "f4") for s in ((2, 4), (3, 4, 4), (3, 4, 4))
    )
    of_trained = jax.grad(lambda x, w: loss(x, {"trained": w, "frozen": frozen}, shard), (0, 1))
    program = str(jax.make_jaxpr(of_trained)(x, trained))
    barriers = re.findall(r"optimization_barrier (.*)", program)
    assert [len(operands.split()) for operands in barriers] == ([2] if waits else [])
    expected = jax.grad(lambda x, w: loss(x, {"trained": w, "frozen": frozen}, None), (0, 1))
    for a, b in zip(of_trained(x, trained), expected(x, trained), strict=True):
        np.testing.assert_array_equal(a, b)


def gradients_of_wide_product(kind, dtype, plain=False):
    """The gradients of a product that is summed up in float32, as a function and its arguments."""
    shard = make_layout(abstract_mesh(1, 1, 1, count=1, what=kind), {}, devices=devices_of(kind))
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in ((2, 9, 16), (16, 5), (2, 9, 5)))

    def loss(x, w):
        if plain:
            y = jnp.einsum("btd,dv->btv", x, w, preferred_element_type=jnp.float32)
        else:
            y = layers.product_in_float32("btd,dv->btv", x, w, shard.shard)
        assert y.dtype == jnp.float32
        return (y * dy).sum()

    return jax.value_and_grad(loss, (0, 1)), (x, w)


def test_a_gradient_of_16_bit_products_on_gpus_multiplies_16_bits():
    gradients, args = gradients_of_wide_product("NVIDIA H100", "bfloat16")
    text = jax.jit(gradients).lower(*args).as_text()
    operands = re.findall(r"stablehlo.dot_general.*: \((.*)\) ->", text)
    assert len(operands) == 3 and not any("f32" in types for types in operands)
    exact, exact_args = gradients_of_wide_product("NVIDIA H100", "float32")
    (loss, found), (expected_loss, expected) = gradients(*args), exact(*exact_args)
    np.testing.assert_allclose(loss, expected_loss, rtol=0.02)
    for a, b in zip(found, expected, strict=True):
        scale = np.abs(np.asarray(b)).max()
        np.testing.assert_allclose(np.asarray(a, "f4"), b, atol=0.02 * scale)


@pytest.mark.parametrize(("kind", "dtype"), [("NVIDIA H100", "float32"), ("cpu", "bfloat16")])
def test_products_in_float32_and_on_cpus_have_the_program_that_they_had(kind, dtype):
    texts = []
    for plain in (False, True):
        gradients, args = gradients_of_wide_product(kind, dtype, plain)
        texts.append(jax.jit(gradients).lower(*args).as_text())
    assert texts[0] == texts[1]


def test_an_unknown_choice_is_reported():
    names = ("qkv", "mlp")
    assert not [*remat.problems("full", names), *remat.problems("save qkv,mlp", names)]
    for word, text in (
        ("some", "expected one of: none, full"),
        ("save ", "expected one of"),
        ("save x", "qkv, mlp"),
    ):
        assert text in " ".join(remat.problems(word, names))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_what_stands_in_every_row_is_the_sum_over_rows(mesh, dtype):
    """The sum equals numpy's in float64, also if rows and columns are split over devices."""
    rng = np.random.default_rng(0)
    x, dy = (
        rng.standard_normal((6, 4)).astype("f4"),
        rng.standard_normal((8, 50, 6, 4)).astype("f4"),
    )
    dy = np.asarray(jnp.asarray(dy, dtype).astype(jnp.float32))
    shard = shard_on(*mesh)

    def total(x):
        y = shard(spread(x.astype(dtype), dy.shape, shard), "batch", "seq", "heads", None)
        return (y * jnp.asarray(dy, dtype)).astype(jnp.float32).sum()

    value, grad = jax.jit(jax.value_and_grad(total))(x)
    rounding = 2e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(grad, dy.astype("f8").sum((0, 1)), rtol=rounding, atol=rounding * 20)
    np.testing.assert_allclose(
        value, (np.asarray(jnp.asarray(x, dtype), "f8") * dy).sum(), rtol=1e-2
    )


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_the_gradients_of_rows_times_a_scale_are_those_of_the_formula(mesh):
    """The gradients equal those in float64, and no row of the scale is kept for them."""
    rng = np.random.default_rng(0)
    y, dy = rng.standard_normal((2, 8, 6, 4)).astype("f4")
    scale, shard = rng.standard_normal(4).astype("f4"), shard_on(*mesh)
    d_y, d_scale = jax.jit(
        jax.grad(lambda y, s: (scaled(shard(y, "batch", "seq", None), s, shard) * dy).sum(), (0, 1))
    )(y, scale)
    np.testing.assert_allclose(d_y, dy * scale, rtol=1e-6)
    np.testing.assert_allclose(d_scale, (dy.astype("f8") * y).sum((0, 1)), rtol=1e-5, atol=1e-5)
    kept = jax.eval_shape(lambda y, s: jax.vjp(lambda y, s: scaled(y, s, shard), y, s)[1], y, scale)
    assert sorted(x.shape for x in jax.tree.leaves(kept)) == [(4,), (8, 6, 4)]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize(
    "equation", ["btd,dm->btm", "btm,dm->btd", "btd,dhk->bthk", "bthk,dhk->btd"]
)
def test_the_gradients_of_a_product_are_those_of_its_formula(mesh, equation):
    """The gradients equal those in float64, from narrow to wide rows and back, with matrices of
    either orientation."""
    rng, size = np.random.default_rng(0), {"b": 8, "t": 6, "d": 4, "m": 24, "h": 4, "k": 6}
    (of_x, of_w), of_y = (parts := equation.split("->"))[0].split(","), parts[1]
    x, w, dy = (rng.standard_normal([size[i] for i in of]) for of in (of_x, of_w, of_y))
    shard = shard_on(*mesh)

    def total(x, w):
        return (
            product(equation, shard(x, "batch", *[None] * (x.ndim - 1)), w, shard) * dy.astype("f4")
        ).sum()

    dx, dw = jax.jit(jax.grad(total, (0, 1)))(x.astype("f4"), w.astype("f4"))
    np.testing.assert_allclose(dx, np.einsum(f"{of_y},{of_w}->{of_x}", dy, w), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum(f"{of_x},{of_y}->{of_w}", x, dy), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "equation", ["btd,dm->btm", "btm,dm->btd", "btd,dhk->bthk", "bthk,dhk->btd"]
)
def test_on_cpus_a_product_and_its_gradients_copy_no_activations(equation):
    """An einsum copies them: XLA writes out a transposed copy of each array that is contracted over
    B and T."""
    size, shard = {"b": 4, "t": 96, "d": 64, "m": 128, "h": 4, "k": 32}, shard_on(1, 1, 1)
    of_x, of_w = equation.split("->")[0].split(",")
    x, w = (np.ones([size[i] for i in of], "f4") for of in (of_x, of_w))
    ours = copied(lambda x, w: (product(equation, x, w, shard) ** 2).sum(), x, w)
    rows = size["b"] * size["t"] * size["d"]  # of the narrower of both sides
    assert max(ours, default=0) <= w.size < rows
    assert max(copied(lambda x, w: (jnp.einsum(equation, x, w) ** 2).sum(), x, w)) >= rows


def test_on_cpus_attention_copies_none_of_its_weights():
    (b, t, h, k), rng = (2, 64, 4, 16), np.random.default_rng(0)
    q, keys, values = rng.standard_normal((3, b, t, h, k), "f4")
    mask, weights = np.tri(t, dtype=bool)[None], b * h * t * t

    def behind(q, k, v):
        p = jax.nn.softmax(jnp.where(mask[:, :, None], jnp.einsum("bthk,bshk->bths", q, k), -1e9))
        return (jnp.einsum("bths,bshk->bthk", p, v) ** 2).sum()

    assert (
        max(copied(lambda *x: (heads_first(*x, mask) ** 2).sum(), q, keys, values), default=0)
        <= q.size
        < weights
    )
    assert max(copied(behind, q, keys, values)) >= weights


def copied(f, *arrays):
    """The sizes of the arrays that the compiled CPU program of f's gradients copies or
    transposes."""
    text = jax.jit(jax.grad(f, range(len(arrays)))).lower(*arrays).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]*)\]\S* (?:copy|transpose)\(", text)
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]


@pytest.mark.parametrize(
    "gelu", [layers.gelu, layers._gelu], ids=["this jax's", "with its own derivative"]
)
def test_gelu_and_its_derivative_are_the_error_functions_where_a_mesh_axis_is_manual(gelu):
    x = np.linspace(-6, 6, 48, dtype="f4")
    mesh, rows = make_mesh(2, 1, 1, devices=jax.devices()[:2]), PartitionSpec("data")
    both = lambda x: (gelu(x), jax.grad(lambda x: gelu(x).sum())(x))  # noqa: E731
    y, dy = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"})
    )(x)
    below = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    np.testing.assert_allclose(y, x * below, atol=2e-7)
    np.testing.assert_allclose(
        dy, below + x * np.exp(-(x.astype("f8") ** 2) / 2) / math.sqrt(2 * math.pi), atol=5e-7
    )


@pytest.mark.parametrize(
    ("platform", "vocab", "columns", "places"),
    [
        ("gpu", 151_936, (), 0),
        ("gpu", 128_256, ("fsdp",), 0),
        ("gpu", 151_936, ("fsdp",), 1024),
        ("tpu", 151_936, (), 0),
        ("tpu", 128_256, ("fsdp",), 1024),
    ],
)
def test_a_chunk_is_short_if_devices_share_a_matrix_of_many_words(platform, vocab, columns, places):
    shard = types.SimpleNamespace(size=lambda axis, n: 1, devices=(platform, ""))
    split = cross_entropy_lib.Split(columns=columns)
    found = cross_entropy_lib._chunk_of_several(shard, ("vocab", "embed"), vocab, split)
    assert found == places
