"""The update of a step: new parameters and moments in place of the old ones, and their norms.

`update` is the definition. XLA copies a donated array first if the array is still read when its
new values are written. `update_on_gpu` and `update_on_one_cpu` compute the same numbers in an order
that avoids these copies. `choose` takes one of the three when a step is made.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim import Optimizer, root_of_sum, square_sums
from jaxtrain.parallel.layout import Layout
from jaxtrain.types import Array, Mean, PyTree


class Gradients(NamedTuple):
    """The inputs of an update besides the state."""

    grads: PyTree
    # bool []; false = parameters keep every bit, and moments are the caller's to keep
    accepted: Array
    # path of a table -> int32 [rows], how often the loss read each row
    sparse_rows: Mapping[str, Array]
    # bool [], whether the norms are read: if not, they may be NaN. None = always
    due: Array | None = None


class Moved(NamedTuple):
    params: PyTree
    opt_state: PyTree  # as of a step that is accepted
    # update_norm, param_norm_before, param_norm_after, and of each part of the parameters
    norms: dict[str, Mean]


Update = Callable[[Optimizer, Gradients, PyTree, PyTree], Moved]  # (tx, given, opt_state, params)


def choose(layout: Layout, opt_state: PyTree, params: PyTree) -> Update:
    """Return the update for the devices of a layout, by the shapes of the state."""
    if layout.devices.platform == "gpu":
        return update_on_gpu
    if (
        layout.devices.platform == "cpu"
        and layout.mesh.size == 1
        and _is_elementwise(opt_state, params)
    ):
        return update_on_one_cpu
    return update


def update(tx: Optimizer, given: Gradients, opt_state: PyTree, params: PyTree) -> Moved:
    """Apply the optimizer. The compiler chooses the order: on TPUs, and on several CPU devices."""
    updates, moments = tx.update(given.grads, opt_state, params, sparse_rows=given.sparse_rows)
    new = _applied(params, updates, given.accepted)
    return Moved(new, moments, _norms_of_move(new, params) | norms("param_norm_after", new))


def update_on_gpu(tx: Optimizer, given: Gradients, opt_state: PyTree, params: PyTree) -> Moved:
    """Measure first, then compute a repeatable update again, so that one fusion writes all."""
    updates, moments = tx.update(given.grads, opt_state, params, sparse_rows=given.sparse_rows)
    found = _norms_of_move(_applied(params, updates, given.accepted), params)
    accepted, state, found = jax.lax.optimization_barrier((given.accepted, opt_state, found))
    if tx.repeatable:
        updates, moments = tx.update(given.grads, state, params, sparse_rows=given.sparse_rows)
    new = _applied(params, updates, accepted)
    return Moved(new, moments, found | norms("param_norm_after", new))


def update_on_one_cpu(tx: Optimizer, given: Gradients, opt_state: PyTree, params: PyTree) -> Moved:
    """Write the norms, then the parameters, then the moments that the update reads.

    XLA for CPUs makes each output in a loop of its own. Without this order it copied the whole
    state in each step. Norms that nobody reads are left out.
    """

    def proposed(opt_state: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(given.grads, opt_state, params, sparse_rows=given.sparse_rows)

    def measured() -> dict[str, Mean]:
        new = _applied(params, proposed(opt_state)[0] if tx.repeatable else updates, given.accepted)
        return _norms_of_move(new, params) | norms("param_norm_after", new)

    def unknown() -> dict[str, Mean]:
        nans: dict[str, Mean] = jax.tree.map(
            lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(measured)
        )
        return nans

    updates, _ = proposed(opt_state)
    found = measured() if given.due is None else jax.lax.cond(given.due, measured, unknown)
    new = _applied(params, updates, given.accepted & _is_there(found["update_norm"].total))
    there = [_is_there(x.ravel()[0]) for x in jax.tree.leaves(new) if x.size]
    # A sort, since XLA fuses other reductions into the loop of each moment, and all of them would
    # read all parameters. The program would grow with the square of the number of arrays.
    once = jnp.sort(jnp.stack([*there, jnp.ones((), bool)]))[0].astype(jnp.float32)
    later = jax.tree.map(lambda m: (m * once).astype(m.dtype) if m.ndim else m, opt_state)
    return Moved(new, proposed(later)[1], found)


def norms(name: str, tree: PyTree) -> dict[str, Mean]:
    """Return the norm of a tree, and of each top-level dict in it: ``name_encoder``, …"""
    sums = square_sums(tree)
    parts = (
        {f"{name}_{part}": sub for part, sub in sums.items() if isinstance(sub, dict)}
        if isinstance(sums, dict)
        else {}
    )
    each = {name: sums, **{part: sub for part, sub in parts.items() if sub}}
    return {name: Mean(root_of_sum(sub), jnp.ones(())) for name, sub in each.items()}


def _applied(params: PyTree, updates: PyTree, accepted: Array) -> PyTree:
    # Adding -0.0 keeps the bits of every number, also of -0.0. XLA for GPUs shared 0.0 with the
    # arrays that gradients are accumulated in, and held both for the whole step.
    some = jax.tree.map(lambda u: jnp.where(accepted, u, jnp.full_like(u, -0.0)), updates)
    return optax.apply_updates(params, some)


def _norms_of_move(new: PyTree, old: PyTree) -> dict[str, Mean]:
    # Measured on the rounded parameters. The update itself has one reader only, its addition: with
    # another reader it would be an array as large as the gradient.
    moved = jax.tree.map(lambda n, o: n.astype(jnp.float32) - o.astype(jnp.float32), new, old)
    return norms("update_norm", moved) | norms("param_norm_before", old)


def _is_elementwise(opt_state: PyTree, params: PyTree) -> bool:
    """Whether each moment is floats of a parameter's shape. Others are not worth making twice."""
    shapes = {x.shape for x in jax.tree.leaves(params)}
    moments = [x for x in jax.tree.leaves(opt_state) if x.ndim]
    return all(x.shape in shapes and jnp.issubdtype(x.dtype, jnp.floating) for x in moments)


def _is_there(x: Array) -> Array:
    """Return true, always, but data-dependent on x [], so XLA schedules its users after x."""
    bits = jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (bits | 1) != 0
