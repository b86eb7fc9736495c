"""Calls of functions on each device's own part of their arguments.

They are for functions that XLA splits badly, or not at all. Shapes and axes are as in
`jaxtrain.types.Shard`: whole along the mesh axes that are not manual yet. On one device each of
these is a plain call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtrain.parallel.layout import manual_axes
from jaxtrain.types import Array, Axes, PyTree, Shard

T = TypeVar("T")
# The activations of a kernel: those that are arguments or the result, by their place in
# (*args, y), and the others, which have a new first axis.
Activations = tuple[dict[int, Array], list[Array]]


def local(
    shard: Shard, f: Callable[..., T], args: Sequence[Any], axes: Sequence[Axes], out: Any
) -> T:
    """Compute f(*args) on every device's own part of the arguments, by their logical ``axes``.

    ``out`` has a PartitionSpec (by ``shard.spec``) for each result. It is not differentiable, as
    activations of nested shard_maps get a wrong sharding (jax 0.10): define the derivative by
    `jax.custom_vjp`, or call `differentiable` or `kernel`.
    """
    return _map(shard, f, args, _specs(shard, args, axes), out)


def differentiable(
    shard: Shard,
    f: Callable[..., Array],
    args: Sequence[Array],
    axes: Sequence[Axes],
    out: PartitionSpec,
    *,
    constants: int = 0,
) -> Array:
    """Compute f as `local`, and again in a backward pass by all but the last ``constants``."""
    if shard.mesh is None:
        return f(*args)
    n = len(args) - constants
    specs = _specs(shard, args, axes)

    def forward(*args: Array) -> Array:
        return _map(shard, f, args, specs, out)

    def backward(args: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
        def pull(cotangent: Array, *args: Array) -> tuple[Array, ...]:
            _, pullback = jax.vjp(lambda *a: f(*a, *args[n:]), *args[:n])
            grads: tuple[Array, ...] = pullback(cotangent)
            return grads

        grads = _map(shard, pull, (cotangent, *args), [out, *specs], tuple(specs[:n]))
        return (*grads, *map(_no_derivative, args[n:]))

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call(*args)


def kernel(
    shard: Shard,
    f: Callable[..., Array],
    args: Sequence[Array],
    axes: Sequence[Axes],
    out: PartitionSpec,
    *,
    constants: int = 0,
) -> Array:
    """Compute f as `differentiable` does, for kernels that XLA must not split.

    Every mesh axis is manual, as XLA would leave any other to the kernel's own partitioner, or to
    none. The derivative is f's own, with f's activations: the forward pass is not computed again.
    One that is an argument or the result is kept once.
    """
    if shard.mesh is None:
        return f(*args)
    n = len(args) - constants
    specs = _specs(shard, args, axes)
    # along a new first axis: each device's own, whatever its shape
    free = tuple(name for name in shard.mesh.axis_names if name not in manual_axes())
    per_device = PartitionSpec(free)
    run = functools.partial(_map, shard, every=True)
    # the form of f's activations; `backward` is traced after `on_device`
    form: dict[str, Any] = {}

    def on_device(*args: Array) -> tuple[Array, list[Array]]:
        y, pull = jax.vjp(lambda *a: f(*a, *args[n:]), *args[:n])
        activations, form["tree"] = jax.tree.flatten(pull)
        form["places"] = [_place_among((*args, y), x) for x in activations]
        places = zip(activations, form["places"], strict=True)
        return y, [x[None] for x, place in places if place is None]

    def forward(*args: Array) -> tuple[Array, Activations]:
        y, others = run(on_device, args, specs, (out, per_device))
        args_and_y = (*args, y)
        shared = {place: args_and_y[place] for place in form["places"] if place is not None}
        return y, (shared, others)

    def pull(cotangent: Array, activations: Activations) -> tuple[Array, ...]:
        shared, others = activations
        own = iter(others)
        leaves = [next(own)[0] if place is None else shared[place] for place in form["places"]]
        grads: tuple[Array, ...] = jax.tree.unflatten(form["tree"], leaves)(cotangent)
        return grads

    def backward(activations: Activations, cotangent: Array) -> tuple[Any, ...]:
        shared, others = activations
        specs_of_shared = {place: (*specs, out)[place] for place in shared}
        ins = [out, (specs_of_shared, [per_device] * len(others))]
        grads = run(pull, (cotangent, activations), ins, tuple(specs[:n]))
        return (*grads, *map(_no_derivative, args[n:]))

    call = jax.custom_vjp(lambda *args: run(f, args, specs, out))
    call.defvjp(forward, backward)
    return call(*args)


def _place_among(arrays: Sequence[Array], x: Array) -> int | None:
    """Return the place of the same array among others, or None."""
    return next((i for i, array in enumerate(arrays) if array is x), None)


def _specs(shard: Shard, args: Sequence[Array], axes: Sequence[Axes]) -> list[PartitionSpec]:
    return [shard.spec(x.shape, a) for x, a in zip(args, axes, strict=True)]


def _map(
    shard: Shard,
    f: Callable[..., T],
    args: Sequence[Any],
    ins: Sequence[Any],
    outs: Any,
    *,
    every: bool = False,
) -> T:
    """Call f under shard_map. ``every``: over axes of one device too, without tracking."""
    if shard.mesh is None or shard.mesh.size == 1:
        return f(*args)
    return _map_over(shard.mesh, f, args, ins, outs, every=every)


def _map_over(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    f: Callable[..., T],
    args: Sequence[Any],
    ins: Sequence[Any],
    outs: Any,
    *,
    every: bool,
) -> T:
    manual = manual_axes()
    # Axes of one device split nothing, and jax 0.10.2 fails over them (a RET_CHECK).
    free = {name for name, size in mesh.shape.items() if name not in manual and (size > 1 or every)}
    if not free and not every:
        return f(*args)
    nested = tuple(sorted(manual)) if every else ()
    part = (lambda *xs: f(*jax.tree.map(_untracked, xs))) if nested else f
    mapped = jax.shard_map(
        part,
        mesh=jax.sharding.get_abstract_mesh() if manual else mesh,
        in_specs=tuple(ins),
        out_specs=outs,
        axis_names=free,
        check_vma=not every,
    )
    # In a loop over layers, JAX computes masks before the loop, since they depend on no layer. It
    # would cut `f` in two, with arrays between that it cannot place. A checkpoint has none.
    outputs: T = jax.checkpoint(mapped, prevent_cse=False)(*args)
    return _varying(outputs, nested) if nested else outputs


def _untracked(x: Array) -> Array:
    """Make JAX forget along which axes an argument differs. A reshape does so."""
    return jnp.squeeze(x[None], 0)


def _varying(tree: PyTree, names: tuple[str, ...]) -> PyTree:
    """Declare that arrays differ along manual axes, as JAX forgets in part. Computes nothing."""
    differs = jax.lax.pcast(jnp.ones((), bool), names, to="varying")
    return jax.tree.map(lambda x: jnp.where(differs, x, x), tree)


def _no_derivative(x: Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)
