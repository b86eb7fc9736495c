"""The arrays that a training step keeps for its backward pass, and the arrays that no device may
hold whole."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn import remat, transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.nn.layers import lookup
from jaxtrain.parallel import layout as layout_lib
from tests.support import residuals
from tests.support.residuals import HALF, ONE, WIDE, B, D, L, M, T, gradient, shard_on

DECODER = transformer.Decoder(embed=D, depth=L, heads=4, mlp=M, context=T)
STACKS = {
    "swiglu, norms and rotation of q and k": replace(DECODER, qk_norm=True, kv_heads=2),
    "gelu": replace(DECODER, norm="layer", activation="gelu", positions="learned", bias=True),
}


def of(stack, dtype, word="none"):
    """The jaxpr of a stack's gradient."""
    stack, shard = replace(stack, dtype=dtype, remat=word), shard_on(1, 1, 1)
    position_bt = jnp.broadcast_to(jnp.arange(T), (B, T))

    def run(params, x):
        mix = transformer.mixer(stack, None, shard)
        angles = transformer.angles(stack, position_bt)
        layer = lambda x, w: transformer.layer(stack, shard, angles, mix, x, w)  # noqa: E731
        return remat.scan(layer, x.astype(dtype), params, stack.remat)[0]

    return gradient(
        run, {**transformer.attention_specs(stack), **transformer.feed_forward_specs(stack)}, dtype
    )


# The inputs of both parts, q, k and v as attention reads them, its output, and the input of the
# activation.
KEPT = {
    # In addition q and k before their norms. k and v have half of the heads.
    "swiglu, norms and rotation of q and k": [WIDE, WIDE, *[ONE] * 5, *[HALF] * 3],
    "gelu": [WIDE, *[ONE] * 6],
}


@pytest.mark.parametrize("name", STACKS)
def test_layers_keep_what_norms_and_activations_read_in_16_bits_alone(name):
    residuals.check(of, STACKS[name], KEPT[name])


ROWS, TOKENS, V, WIDTH = 8, 4, 512, 16
SPLIT = {"batch": "data", "seq": "fsdp"}
ON_MESHES = [((1, 8, 1), {}), ((2, 2, 2), {}), ((1, 2, 4), {}), ((2, 4, 1), SPLIT)]


def tokens(v=V):
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((ROWS, TOKENS, WIDTH), (v, WIDTH))
    )
    return x, w, jnp.asarray(rng.integers(0, v - 12, (ROWS, TOKENS)), jnp.int32)


def placed(shard, x, w, index):
    layout = shard.layout
    x_btd = jax.device_put(x, layout.sharding(("batch", "seq", None), x.shape))
    return (
        x_btd,
        jax.device_put(w, layout.sharding(transformer.TABLE, w.shape)),
        jax.device_put(index, layout.sharding(("batch", "seq"), index.shape)),
    )


@pytest.mark.parametrize(("mesh", "rules"), ON_MESHES)
@pytest.mark.parametrize(("v", "chunk"), [(V, 3), (V, 1024), (24, 1024)])
def test_cross_entropy_with_a_matrix_split_by_columns_is_that_of_one_device(mesh, rules, v, chunk):
    """512 rows are more than the tokens. 24 are fewer, so these are gathered."""

    def measure(shard, x, w, label):
        def loss(x, w):
            weight = (label % 3 > 0).astype(jnp.float32)
            sums = cross_entropy(
                x,
                w,
                label,
                weight,
                shard,
                z_loss=0.01,
                smoothing=0.1,
                chunk=chunk,
                size=v - 12,
                axes=transformer.TABLE,
            )
            return sums.loss, sums

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

    x, w, label = tokens(v)
    shard = shard_on(*mesh, **rules)
    expected = jax.jit(functools.partial(measure, shard_on(1, 1, 1)))(x, w, label)
    found = jax.jit(functools.partial(measure, shard))(*placed(shard, x, w, label))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6 * np.abs(a).max()),
        expected,
        found,
    )


@pytest.mark.parametrize(("mesh", "rules"), ON_MESHES)
@pytest.mark.parametrize("v", [V, 24])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rows_of_a_table_split_by_columns_are_those_of_one_device(mesh, rules, v, dtype):
    def measure(shard, x, w, index):
        def loss(w):
            y = lookup(w, index, shard, dtype=dtype)
            return (y * x).sum(), y

        (_, y), dw = jax.value_and_grad(loss, has_aux=True)(w)
        return y, dw

    x, w, index = tokens(v)
    shard = shard_on(*mesh, **rules)
    expected = jax.jit(functools.partial(measure, shard_on(1, 1, 1)))(x, w, index)
    found = jax.jit(functools.partial(measure, shard))(*placed(shard, x, w, index))
    assert found[0].dtype == jnp.dtype(dtype or "float32")
    np.testing.assert_array_equal(found[0].astype(jnp.float32), expected[0].astype(jnp.float32))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("platform", "dtype"), [("gpu", "bf16"), ("cpu", "f32")])
def test_gpus_add_up_looked_up_rows_in_the_type_of_the_result(platform, dtype):
    """A sum of one row and zeros is exact in 16 bits, and XLA for CPUs fails at some of them."""
    mesh = layout_lib.abstract_mesh(1, 1, 8, count=8, what="a test")
    shard = layout_lib.make_layout(mesh, {}, devices=layout_lib.Devices(platform)).shard

    def look_up(w, index):
        return lookup(w, index, shard, axes=transformer.TABLE, dtype="bfloat16")

    arguments = jax.ShapeDtypeStruct((V, 16), "f4"), jax.ShapeDtypeStruct((2, 4), "i4")
    program = str(jax.make_jaxpr(look_up)(*arguments))
    assert re.findall(r":(\w+)\[[\d,]+\]\S* = psum", program) == [dtype]


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 2, 4)])
def test_no_device_has_the_whole_embedding_or_head_or_a_gradient_of_them(mesh):
    """No array as large is summed over all devices, either: each has its part of a sum."""

    def loss(w, x, index):
        y = lookup(w, index, shard, dtype="bfloat16")
        weight = jnp.ones(index.shape, jnp.float32)
        return cross_entropy(
            x.astype("bfloat16") + y, w, index, weight, shard, axes=transformer.TABLE
        ).loss

    shard = shard_on(*mesh)
    x, w, index = placed(shard, *tokens())
    text = jax.jit(jax.grad(loss, (0, 1))).lower(w, x, index).compile().as_text()
    largest = max(
        int(np.prod([int(n) for n in dims.split(",")]))
        for dims in re.findall(r"\w\[([\d,]+)\]", text)
    )
    assert largest <= V * WIDTH // 4, "logits of all tokens, for an eighth of the rows"
    assert "all-to-all" in text
