"""The arrays that a stack of layers keeps for its backward pass, read from the jaxpr of its
gradient."""

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.specs import map_specs

L, B, T, D, M = 3, 2, 10, 64, 256  # layers, rows, tokens, embed, inner width
# what `kept` gives for an array
ONE, WIDE, HALF = ("bfloat16", D), ("bfloat16", M), ("bfloat16", D // 2)


def shard_on(data, fsdp, model, **rules):
    return make_layout(
        make_mesh(data, fsdp, model, devices=jax.devices()[: data * fsdp * model]), rules
    ).shard


def gradient(run, table, dtype):
    """The jaxpr of run(params, x)'s gradient with respect to its parameters and its input."""
    params = map_specs(lambda path, s: jax.ShapeDtypeStruct(s.shape, jnp.float32), table)
    x = jax.ShapeDtypeStruct((B, T, D), jnp.dtype(dtype))
    return jax.make_jaxpr(jax.grad(lambda p, x: run(p, x).astype(jnp.float32).sum(), (0, 1)))(
        params, x
    ).jaxpr


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


def depth(jaxpr):
    """The number of nested checkpoints."""
    found = 0
    for eqn in jaxpr.eqns:
        inner = max((depth(j) for j in inside(eqn)), default=0)
        found = max(found, inner + (eqn.primitive.name in ("checkpoint", "remat", "remat2")))
    return found


def kept(jaxpr):
    """The (dtype, values for each token) of the arrays that the forward loop writes out for every
    layer and token."""
    forward = next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    p = forward.params
    # from jax 0.11 on: the first
    n_carry = len(p["ft_in"].unpack()[1]) if "ft_in" in p else p["num_carry"]
    arrays = [v.aval for v in forward.outvars[n_carry:]]
    # by row, or with all rows as one dimension, as products for CPUs have them
    tokens = ((L, B, T), (L, B * T))
    return sorted(
        (str(x.dtype), x.size // (L * B * T))
        for x in arrays
        if any(x.shape[: len(t)] == t for t in tokens)
    )


def check(of, stack, expected):
    """A loop of 16-bit layers keeps ``expected``, what norms and activations read, and nothing in
    float32. Float32 layers, whose numbers are compared bit by bit, and layers that are recomputed
    whole are as they were: a layer that is recomputed twice gathers its matrices once more.

    ``of``: stack, dtype, recomputation -> the jaxpr of its gradient.
    """
    assert kept(of(stack, "bfloat16")) == sorted(expected)
    assert depth(of(stack, "float32")) == 0
    for word in ("none", "full", "save mlp"):
        assert depth(of(stack, "bfloat16", word)) == 1, word
