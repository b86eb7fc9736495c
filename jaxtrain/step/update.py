"""The update of a step: new parameters and moments in place of the old ones, and their norms.

`update` is the definition. XLA copies a donated array first if the array is still read when its
new values are written. `update_on_gpu` and `update_on_one_cpu` compute the same numbers in an order
that avoids these copies. `choose` takes one of the three when a step is made.

Norms of the update read parameters, moments and gradients once more than the update itself. A large
model has a second program for the steps whose norms nobody reads, with `update_without_norms`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.nn import cpu
from jaxtrain.optim import Optimizer, root_of_sum, square_sums
from jaxtrain.parallel.layout import Layout
from jaxtrain.step.state import bytes_per_device
from jaxtrain.types import Array, Mean, PyTree

# [bytes] of the arrays of a device that norms read, from which on a program without norms is made.
# On an H100 that is 1.4 ms a step, on a TPU v5e 1.3. The program is compiled while the run trains.
MIN_BYTES_OF_NORMS = 4 << 30
MIN_BYTES_OF_NORMS_ON_TPUS = 1 << 30


class Gradients(NamedTuple):
    """The inputs of an update besides the state."""

    grads: PyTree
    # bool []; false = parameters keep every bit, and moments are the caller's to keep
    accepted: Array
    # path of a table -> int32 [rows], how often the loss read each row
    sparse_rows: Mapping[str, Array]
    # bool [], whether the norms are read: if not, they may be NaN. None = always
    due: Array | None = None
    square_sums: Mapping[str, Array] = {}  # as in `types.LossOut`

    def update(self, tx: Optimizer, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the optimizer's updates, and its new state."""
        known = {"square_sums": self.square_sums} if self.square_sums else {}
        return tx.update(self.grads, opt_state, params, sparse_rows=self.sparse_rows, **known)


class Moved(NamedTuple):
    params: PyTree
    opt_state: PyTree  # as of a step that is accepted
    # update_norm, param_norm_before, param_norm_after, and of each part of the parameters, or none
    norms: dict[str, Mean]


# (tx, gradients, opt_state, params)
Update = Callable[[Optimizer, Gradients, PyTree, PyTree], Moved]


def choose(layout: Layout, opt_state: PyTree, params: PyTree) -> Update:
    """Return the update for the devices of a layout, by the shapes of the state."""
    platform = layout.devices.platform
    if platform == "gpu":
        return update_on_gpu
    if platform == "cpu" and layout.mesh.size == 1 and cpu.is_elementwise(opt_state, params):
        return update_on_one_cpu
    return update


def are_norms_expensive(layout: Layout, opt_state: PyTree, params: PyTree) -> bool:
    """Whether steps whose norms nobody reads are worth a program of their own.

    `update_on_one_cpu` computes norms in a branch. XLA for GPUs takes both sides of a branch.
    """
    if choose(layout, opt_state, params) is update_on_one_cpu:
        return False
    gradients = params
    is_tpu = layout.devices.platform == "tpu"
    least = MIN_BYTES_OF_NORMS_ON_TPUS if is_tpu else MIN_BYTES_OF_NORMS
    return bytes_per_device((gradients, params, opt_state)) >= least


def update_without_norms(
    tx: Optimizer, gradients: Gradients, opt_state: PyTree, params: PyTree
) -> Moved:
    """Apply the optimizer in one pass over its arrays, and measure nothing."""
    updates, new_state = gradients.update(tx, opt_state, params)
    return Moved(_applied(params, updates, gradients.accepted), new_state, {})


def update(tx: Optimizer, gradients: Gradients, opt_state: PyTree, params: PyTree) -> Moved:
    """Apply the optimizer. The compiler chooses the order: on TPUs, and on several CPU devices."""
    updates, new_state = gradients.update(tx, opt_state, params)
    new_params = _applied(params, updates, gradients.accepted)
    return Moved(new_params, new_state, _norms_of_update(new_params, params))


def update_on_gpu(tx: Optimizer, gradients: Gradients, opt_state: PyTree, params: PyTree) -> Moved:
    """Measure first, then compute a repeatable update again, so that one fusion writes all."""
    accepted = gradients.accepted
    updates, new_state = gradients.update(tx, opt_state, params)
    measured = _norms_of_move(_applied(params, updates, accepted), params)
    accepted, opt_state, measured = jax.lax.optimization_barrier((accepted, opt_state, measured))
    if tx.repeatable:
        updates, new_state = gradients.update(tx, opt_state, params)
    new_params = _applied(params, updates, accepted)
    after = norms("param_norm_after", square_sums(new_params))
    return Moved(new_params, new_state, measured | after)


def update_on_one_cpu(
    tx: Optimizer, gradients: Gradients, opt_state: PyTree, params: PyTree
) -> Moved:
    """Apply the optimizer in the order of `cpu.update_in_place`."""
    new_params, new_state, measured = cpu.update_in_place(
        lambda state: gradients.update(tx, state, params),
        lambda updates, accepted: _applied(params, updates, accepted),
        lambda new_params: _norms_of_update(new_params, params),
        opt_state,
        gradients.accepted,
        due=gradients.due,
        repeatable=tx.repeatable,
    )
    return Moved(new_params, new_state, measured)


def norms(name: str, sums: PyTree) -> dict[str, Mean]:
    """Return a tree's norm, and of each top-level dict in it (``name_encoder`` …), by their sums.

    ``sums``: the tree's `square_sums`.
    """
    sums_by_name = {name: sums}
    if isinstance(sums, dict):
        for part, sums_of_part in sums.items():
            if isinstance(sums_of_part, dict) and sums_of_part:
                sums_by_name[f"{name}_{part}"] = sums_of_part
    return {name: Mean(root_of_sum(sub), jnp.ones(())) for name, sub in sums_by_name.items()}


def _applied(params: PyTree, updates: PyTree, accepted: Array) -> PyTree:
    # Adding -0.0 keeps the bits of every number, also of -0.0. XLA for GPUs shared 0.0 with the
    # arrays that gradients are accumulated in, and held both for the whole step.
    accepted_updates = jax.tree.map(
        lambda u: jnp.where(accepted, u, jnp.full_like(u, -0.0)), updates
    )
    return optax.apply_updates(params, accepted_updates)


def _norms_of_update(new: PyTree, old: PyTree) -> dict[str, Mean]:
    return _norms_of_move(new, old) | norms("param_norm_after", square_sums(new))


def _norms_of_move(new: PyTree, old: PyTree) -> dict[str, Mean]:
    # Measured on the rounded parameters. The update itself has one reader only, its addition: with
    # another reader it would be an array as large as the gradient.
    moved = jax.tree.map(lambda n, o: n.astype(jnp.float32) - o.astype(jnp.float32), new, old)
    of_update = norms("update_norm", square_sums(moved))
    return of_update | norms("param_norm_before", square_sums(old))
