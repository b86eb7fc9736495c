"""The update of a step: new parameters and moments, where the old ones were, and the norms around it.

A donated array that is still read when its new values are written is copied first, and a compiler that makes each output in a
loop of its own must be told in which order they come. So each platform has its own way to the same numbers:

- GPUs: the norms come first, and the update is computed again when they are there. One fusion then writes all outputs.
- A single CPU device: the norms that nobody records are left out; parameters are written once the norms are there, and the
  moments, which the update was made of, after the parameters. Without that order each step copied the whole state.
- TPUs, and CPU devices that share a state: as the compiler has it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim import root_of_sum, square_sums
from jaxtrain.parallel.layout import Layout
from jaxtrain.types import Array, Mean, PyTree


class Moved(NamedTuple):
    params: PyTree
    opt_state: PyTree  # as of a step that is accepted
    norms: dict[str, Mean]  # update_norm, param_norm_before, param_norm_after, and of each part of the parameters


def update(
    tx: optax.GradientTransformation,
    layout: Layout,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    accepted: Array,
    *,
    touched: Mapping[str, Array],
    due: Array | None = None,
) -> Moved:
    """Applies the rule. Where ``accepted`` (bool []) is false, the parameters keep every bit; moments are the caller's to keep.

    Args:
      touched: path of a table -> int32 [rows], how often the loss read each row.
      due: bool [], whether anybody reads the norms; where not, they may be NaN. None = always.
    """
    tx = optax.with_extra_args_support(tx)

    def proposed(opt_state: PyTree) -> tuple[PyTree, PyTree]:
        return tx.update(grads, opt_state, params, touched=touched)

    def applied(updates: PyTree, accepted: Array) -> PyTree:
        # -0.0 is what every number, -0.0 too, keeps its bits with. XLA for GPUs shared zeros with those that gradients
        # are accumulated in, and held both for the whole step.
        some = jax.tree.map(lambda u: jnp.where(accepted, u, jnp.full_like(u, -0.0)), updates)
        return optax.apply_updates(params, some)

    def with_old(new: PyTree) -> dict[str, Mean]:
        # Measured on the parameters, rounded as they are. The update itself has one reader only, where it is added: with
        # another it would be an array, as large as the gradient.
        moved = jax.tree.map(lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32), new, params)
        return norms("update_norm", moved) | norms("param_norm_before", params)

    def around(new: PyTree) -> dict[str, Mean]:
        return with_old(new) | norms("param_norm_after", new)

    def is_made_twice() -> bool:
        """Matrices are not multiplied twice (Muon): there the update is an array anyway."""
        return "dot_general" not in str(jax.make_jaxpr(proposed)(opt_state))

    updates, moments = proposed(opt_state)
    if layout.devices.platform == "cpu" and layout.mesh.size == 1 and _is_elementwise(opt_state, params):
        twice = is_made_twice()

        def measured() -> dict[str, Mean]:
            return around(applied(proposed(opt_state)[0] if twice else updates, accepted))

        if due is None:
            found = measured()
        else:
            unknown = jax.eval_shape(around, params)
            found = jax.lax.cond(due, measured, lambda: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), unknown))
        new = applied(updates, accepted & _is_there(found["update_norm"].total))
        there = [_is_there(x.ravel()[0]) for x in jax.tree.leaves(new) if x.size]
        once = jnp.stack([*there, jnp.ones((), bool)]).all().astype(jnp.float32)
        later = jax.tree.map(lambda m: (m * once).astype(m.dtype) if m.ndim else m, opt_state)
        return Moved(new, proposed(later)[1], found)

    new = applied(updates, accepted)
    found = with_old(new)
    if layout.devices.platform == "gpu":
        last, state, found = jax.lax.optimization_barrier((accepted, opt_state, found))
        if is_made_twice():
            updates, moments = proposed(state)
        new = applied(updates, last)
    return Moved(new, moments, found | norms("param_norm_after", new))


def norms(name: str, tree: PyTree) -> dict[str, Mean]:
    """The norm of all, and of each part of the table that is a table itself: ``name_encoder``, …"""
    sums = square_sums(tree)
    parts = {f"{name}_{part}": sub for part, sub in sums.items() if isinstance(sub, dict)} if isinstance(sums, dict) else {}
    each = {name: sums, **{part: sub for part, sub in parts.items() if sub}}
    return {name: Mean(root_of_sum(sub), jnp.ones(())) for name, sub in each.items()}


def _is_elementwise(opt_state: PyTree, params: PyTree) -> bool:
    """Whether each moment is made from its own old value, the gradient and the parameter, place by place, in floats: what is
    made in rows is not worth making twice."""
    shapes = {x.shape for x in jax.tree.leaves(params)}
    moments = [x for x in jax.tree.leaves(opt_state) if x.ndim]
    return all(x.shape in shapes and jnp.issubdtype(x.dtype, jnp.floating) for x in moments)


def _is_there(x: Array) -> Array:
    """True, once x [] is known: what is made from it comes after x. XLA does not see that no bits are none of all."""
    bits = jax.lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (bits | 1) != 0
