"""The arrays that a training step keeps for its backward pass, and the arrays that no device may
hold whole."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxtrain.nn import remat, transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.nn.layers import lookup
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.specs import map_specs
from jaxtrain.workloads.bird import vit

L, B, T, D, M = 3, 2, 10, 64, 256
VIT = vit.Stack(embed=D, depth=L, heads=4, hidden=M)
DECODER = transformer.Decoder(embed=D, depth=L, heads=4, mlp=M, context=T)
GPT = replace(DECODER, norm="layer", activation="gelu", positions="learned", bias=True)
STACKS = {
    "vit, gelu": VIT,
    "vit, swiglu, norms and rotation of q and k": VIT._replace(gated=True, qk_norm=True, layer_scale=0.1),
    "swiglu, norms and rotation of q and k": replace(DECODER, qk_norm=True, kv_heads=2),
    "gelu": GPT,
}


def shard_on(data, fsdp, model, **rules):
    return make_layout(make_mesh(data, fsdp, model, devices=jax.devices()[: data * fsdp * model]), rules).shard


def gradient(stack, dtype, word="none"):
    """The jaxpr of a stack's gradient with respect to its parameters and its input."""
    how, shard = {"dtype": dtype, "remat": word}, shard_on(1, 1, 1)
    stack = stack._replace(**how) if isinstance(stack, vit.Stack) else replace(stack, **how)
    if isinstance(stack, vit.Stack):
        table = vit.stack_specs(stack)
        turns = (jnp.ones((1, T, 1, 8)), jnp.zeros((1, T, 1, 8))) if stack.qk_norm else None

        def run(params, x):
            return vit.run_stack(stack, params, x, shard, turns=turns)
    else:
        table = {**transformer.attention_specs(stack), **transformer.feed_forward_specs(stack)}
        position_bt = jnp.broadcast_to(jnp.arange(T), (B, T))

        def run(params, x):
            mix = transformer.mixer(stack, None, shard)
            angles = transformer.angles(stack, position_bt)
            layer = lambda x, w: transformer.layer(stack, shard, angles, mix, x, w)  # noqa: E731
            return remat.scan(layer, x.astype(dtype), params, stack.remat)[0]

    params = map_specs(lambda path, s: jax.ShapeDtypeStruct(s.shape, jnp.float32), table)
    x = jax.ShapeDtypeStruct((B, T, D), jnp.dtype(dtype))
    return jax.make_jaxpr(jax.grad(lambda p, x: run(p, x).astype(jnp.float32).sum(), (0, 1)))(params, x).jaxpr


def inside(eqn):
    """The jaxprs among an equation's parameters."""
    both = (core.Jaxpr, core.ClosedJaxpr)
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, both)):
        if isinstance(x, both):
            yield x.jaxpr if isinstance(x, core.ClosedJaxpr) else x


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inside(eqn):
            yield from equations(inner)


def kept(jaxpr):
    """The (dtype, values for each token) of the arrays that the forward loop writes out for every
    layer and token."""
    forward = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    p = forward.params
    n_carry = len(p["ft_in"].unpack()[1]) if "ft_in" in p else p["num_carry"]  # from jax 0.11 on: the first
    arrays = [v.aval for v in forward.outvars[n_carry:]]
    tokens = ((L, B, T), (L, B * T))  # by row, or with all rows as one dimension, as products for CPUs have them
    return sorted((str(x.dtype), x.size // (L * B * T)) for x in arrays if any(x.shape[: len(t)] == t for t in tokens))


ONE, WIDE, HALF = ("bfloat16", D), ("bfloat16", M), ("bfloat16", D // 2)
# The inputs of both parts, q, k and v as attention reads them, its output, and the input of the
# activation.
KEPT = {
    "vit, gelu": [WIDE, *[ONE] * 6],
    # In addition q and k before their norms, and both parts before they are scaled.
    "vit, swiglu, norms and rotation of q and k": [WIDE, WIDE, *[ONE] * 10],
    # In addition q and k before their norms. k and v have half of the heads.
    "swiglu, norms and rotation of q and k": [WIDE, WIDE, *[ONE] * 5, *[HALF] * 3],
    "gelu": [WIDE, *[ONE] * 6],
}


@pytest.mark.parametrize("name", STACKS)
def test_a_loop_of_16_bit_layers_keeps_what_norms_and_activations_read_and_nothing_in_float32(name):
    assert kept(gradient(STACKS[name], "bfloat16")) == sorted(KEPT[name])


@pytest.mark.parametrize("name", STACKS)
def test_float32_layers_and_those_that_are_recomputed_whole_are_as_they_were(name):
    """Their numbers are compared bit by bit. A layer that is recomputed twice gathers its matrices
    once more."""

    def depth(jaxpr):
        """The number of nested checkpoints."""
        found = 0
        for eqn in jaxpr.eqns:
            inner = max((depth(j) for j in inside(eqn)), default=0)
            found = max(found, inner + (eqn.primitive.name in ("checkpoint", "remat", "remat2")))
        return found

    assert depth(gradient(STACKS[name], "float32")) == 0
    assert depth(gradient(STACKS[name], "bfloat16")) == 1
    for word in ("full", "save mlp"):
        assert depth(gradient(STACKS[name], "bfloat16", word)) == 1, word


ROWS, TOKENS, V, WIDTH = 8, 4, 512, 16
SPLIT = {"batch": "data", "seq": "fsdp"}
ON_MESHES = [((1, 8, 1), {}), ((2, 2, 2), {}), ((1, 2, 4), {}), ((2, 4, 1), SPLIT)]


def tokens(v=V):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((ROWS, TOKENS, WIDTH), (v, WIDTH)))
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
                x, w, label, weight, shard, z_loss=0.01, smoothing=0.1, chunk=chunk, size=v - 12, axes=transformer.TABLE
            )
            return sums.loss, sums

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)

    x, w, label = tokens(v)
    shard = shard_on(*mesh, **rules)
    expected = jax.jit(functools.partial(measure, shard_on(1, 1, 1)))(x, w, label)
    found = jax.jit(functools.partial(measure, shard))(*placed(shard, x, w, label))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6 * np.abs(a).max()), expected, found)


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


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 2, 4)])
def test_no_device_has_the_whole_embedding_or_head_or_a_gradient_of_them(mesh):
    """No array as large is summed over all devices, either: each has its part of a sum."""

    def loss(w, x, index):
        y = lookup(w, index, shard, dtype="bfloat16")
        weight = jnp.ones(index.shape, jnp.float32)
        return cross_entropy(x.astype("bfloat16") + y, w, index, weight, shard, axes=transformer.TABLE).loss

    shard = shard_on(*mesh)
    x, w, index = placed(shard, *tokens())
    text = jax.jit(jax.grad(loss, (0, 1))).lower(w, x, index).compile().as_text()
    largest = max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\w\[([\d,]+)\]", text))
    assert largest <= V * WIDTH // 4, "logits of all tokens, for an eighth of the rows"
    assert "all-to-all" in text
