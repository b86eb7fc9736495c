"""Gradients that replicas sum up early: in the backward pass, each where it is there.

Under `jax.shard_map` over "data", a parameter is one value for all replicas, and each of them uses
it for rows of its own. `shared` makes this change for all parameters at the top, so that the sum of
a gradient follows the whole backward pass. The loop over a stack's layers makes it for a layer at a
time instead (`by_layer`). Then the sum of one layer overlaps the backward pass of the next.

A model may read its parameters in any way: only a loop that asks for it has them unchanged.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.parallel.layout import DATA, Layout
from jaxtrain.types import Array, Axes, PyTree, T


class _Shared(NamedTuple):
    value: Array  # the same on all replicas
    own: Array  # the same numbers, as a value of each replica
    axes: Axes
    layout: Layout


# By the identity of `_Shared.own`, while a loss is traced.
_SHARED: contextvars.ContextVar[Mapping[int, _Shared] | None] = contextvars.ContextVar(
    "shared", default=None
)


@contextlib.contextmanager
def shared(layout: Layout, params: PyTree, table: PyTree) -> Iterator[PyTree]:
    """Give parameters that all replicas share as values of each, under a shard_map over "data".

    Their derivatives are sums over the replicas, of which each device sums up its own shard alone.

    Args:
      table: the parameters' `Spec`.
    """
    known: dict[int, _Shared] = {}

    def own(value: Array, axes: Axes) -> Array:
        x = layout.shard(_as_own(layout, value), *axes)
        known[id(x)] = _Shared(value, x, axes, layout)
        return x

    owned = jax.tree.map(lambda value, spec: own(value, spec.axes), params, table)
    token = _SHARED.set(known)
    try:
        yield owned
    finally:
        _SHARED.reset(token)


def by_layer(
    layer: Callable[[T, PyTree], tuple[T, PyTree]], stack: PyTree
) -> tuple[Callable[[T, PyTree], tuple[T, PyTree]], PyTree]:
    """Return a loop's body and its stack, so that each layer's gradients are summed in the body.

    It changes nothing without `shared` parameters. The loss must run through the stack once: each
    loop sends the sums of its own gradients.
    """
    known = _SHARED.get() or {}
    leaves, tree = jax.tree.flatten(stack)
    shares = [known.get(id(x)) for x in leaves]
    if not any(shares):
        return layer, stack
    values = [None if share is None else share.value for share in shares]
    # Read by the body in place of `own`, whose gradient would be summed up after the loop.
    owned = [
        x if share is None else jax.lax.stop_gradient(x)
        for x, share in zip(leaves, shares, strict=True)
    ]

    def summing_layer(x: T, rows: PyTree) -> tuple[T, PyTree]:
        of_layer = [
            own if share is None else _entering(share, own, value)
            for own, value, share in zip(*rows, shares, strict=True)
        ]
        return layer(x, jax.tree.unflatten(tree, of_layer))

    return summing_layer, (owned, values)


def _entering(share: _Shared, own: Array, value: Array) -> Array:
    """Give ``own``, whose gradient becomes that of ``value``, summed up over the replicas.

    Both are a layer's entry of one parameter. Were ``own`` made here, the forward loop would stack
    what it made of each layer for the backward loop: a copy of all parameters.
    """
    enter = jax.custom_vjp(lambda own, value: own)
    enter.defvjp(lambda own, value: (own, None), functools.partial(_summed, share))
    entered: Array = enter(own, value)
    return entered


def _summed(share: _Shared, _: None, gradient: Array) -> tuple[None, Array]:
    # Without it, XLA would sum up the gradient before it is split over "fsdp".
    gradient = share.layout.shard(gradient, *share.axes[1:])
    return None, summed_over_data(share.layout, gradient)


def _as_own(layout: Layout, x: Array) -> Array:
    cast = functools.partial(jax.lax.pcast, axis_name=(DATA,), to="varying")
    own: Array = wide_on_cpus(layout, cast, x)  # whose derivative is a sum
    return own


def summed_over_data(layout: Layout, tree: PyTree) -> PyTree:
    """Sum arrays over the replicas, under a shard_map over "data". Each keeps its type."""
    return wide_on_cpus(layout, functools.partial(jax.lax.psum, axis_name=DATA), tree)


def wide_on_cpus(layout: Layout, f: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Call f, of the same types, and on CPUs in float32 for arrays of 16 bits.

    XLA for CPUs ends the process at a sum of 16 bits under a shard_map over some of the mesh axes
    (`AllReducePromotion`, jax 0.10.2).
    """
    if layout.devices.platform != "cpu":
        return f(tree)
    narrow = (jnp.bfloat16, jnp.float16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in narrow else x, tree)
    return jax.tree.map(lambda y, x: y.astype(x.dtype), f(wide), tree)
