"""The optimizer: clip, each parameter's update rule, decoupled decay, each parameter's own rate."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import Optim
from jaxtrain.optim import moments as moments_lib
from jaxtrain.optim.param_groups import OptimError, group_of_each, rate_factors, update_rule_of_each
from jaxtrain.optim.schedules import Schedule, make_schedule
from jaxtrain.optim.update_rules import UPDATE_RULES
from jaxtrain.specs import is_spec, map_specs, path_name, paths
from jaxtrain.types import Array, PyTree


def make_optimizer(optim: Optim, specs: PyTree, *, steps: int) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer: clip the global norm, apply each update rule, add decoupled decay, scale by each parameter's rate.

    p -= lr(s) (u + weight_decay p), where u comes from one of `UPDATE_RULES`. ``update`` takes ``touched`` (`types.LossOut`):
    of a table under sign_sgd that is named there, only the rows that the step has read move or decay.

    Raises:
      OptimError: a parameter that neither or both of optim.decayed and optim.undecayed match, a group without parameters, a
        rule that a parameter cannot have, masters or layer_decay that no parameter asks for.
    """
    groups, depths = group_of_each(optim, specs), rate_factors(optim, specs)
    schedule = make_schedule(optim, steps)
    decays = map_specs(lambda path, _: re.search(optim.decayed, path) is not None, specs)
    rates = jax.tree.map(lambda g, d: (0.0 if g.freeze else optim.lr if g.lr is None else g.lr) * d, groups, depths)
    weights = jax.tree.map(
        lambda g, decay: (optim.weight_decay if g.weight_decay is None else g.weight_decay) * decay * (not g.freeze),
        groups,
        decays,
    )
    frozen = jax.tree.map(lambda g: g.freeze, groups)
    names = update_rule_of_each(optim, specs, groups)
    tx = optax.chain(
        # Frozen gradients are dropped first: they must not count in the norm that the others are clipped by.
        optax.masked(optax.set_to_zero(), frozen) if any(jax.tree.leaves(frozen)) else optax.identity(),
        *_clips(optim, groups),
        *_by_rule(optim, specs, names),
        _add_decayed(weights),
        _scale_by_rates(rates, schedule),
        _only_touched(jax.tree.map(lambda name: name == "sign_sgd", names)),
    )
    if not optim.masters:
        return tx
    if all(jnp.dtype(spec.dtype) == jnp.float32 for spec in jax.tree.leaves(specs, is_leaf=is_spec)):
        raise OptimError("optim.masters=True, but every parameter is float32 already; unset it, or make them bfloat16")
    return moments_lib.with_masters(tx)


def _by_rule(optim: Optim, specs: PyTree, names: PyTree) -> list[optax.GradientTransformation]:
    """Applies each rule to its own parameters, and keeps moments of these alone, as optim.moments says."""
    table = dict(zip(paths(specs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True))
    used = sorted(set(jax.tree.leaves(names)))
    made = {name: UPDATE_RULES[name](optim, table) for name in used}
    made = {
        name: tx
        if name == "sign_sgd"
        else moments_lib.in_float32(tx if name == "adafactor" else moments_lib.stored(tx, optim.moments))
        for name, tx in made.items()
    }
    if len(used) == 1:
        return [made[used[0]]]
    return [optax.masked(made[rule], jax.tree.map(lambda name, rule=rule: name == rule, names)) for rule in used]


def _clips(optim: Optim, groups: PyTree) -> Iterator[optax.GradientTransformation]:
    """Yields the clip of the global norm, and one for each group with its own: a probe must not shrink the encoder's steps."""
    clipped_alone = list(dict.fromkeys(g for g in jax.tree.leaves(groups) if g.clip is not None))
    for group, most in ((None, optim.clip), *((g, g.clip) for g in clipped_alone)):
        if most:
            members = jax.tree.map(lambda g, group=group: (g if g.clip is not None else None) == group, groups)
            yield optax.masked(_clip(most), members) if clipped_alone else _clip(most)


def _clip(most: float) -> optax.GradientTransformation:
    """Scales all gradients down to a global norm of ``most``, which is summed in float32 whatever their dtype."""

    def update(grads: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        del params
        norm = global_norm(grads)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: PyTree) -> Array:
    """Returns the root of the sum of all squares, in float32."""
    return root_of_sum(square_sums(tree))


def square_sums(tree: PyTree) -> PyTree:
    """Returns each array's sum of squares, in float32."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)


def root_of_sum(tree: PyTree) -> Array:
    """Returns the root of the sum of numbers: of some of `square_sums`, their norm."""
    return jnp.sqrt(sum(jax.tree.leaves(tree)))


def _only_touched(sparse: PyTree) -> optax.GradientTransformationExtraArgs:
    """Keeps the rows of a sparse table that the batch has not read as they are.

    The gradient itself is dense. It does not show which rows were read, since the gradients of one row's readers may cancel,
    and that row still decays; so the workload counts the reads. A gradient of indices and values would need rules of its own
    in microbatches, the reduction over data, clipping and norms. The dense one passes through all of them like any other, is
    split over devices like its table, and costs a few passes over it: for 876,406 puzzles of 512 values 1.8 GB, some
    milliseconds of a step that takes seconds.
    """

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None, *, touched: PyTree = None, **_: Any) -> tuple:
        del params

        def keep(path: tuple, u: Array, is_sparse: bool) -> Array:
            count = (touched or {}).get(path_name(path)) if is_sparse else None
            return u if count is None else jnp.where(count.reshape(-1, *[1] * (u.ndim - 1)) > 0, u, 0)

        return jax.tree.map_with_path(keep, updates, sparse), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _add_decayed(weights: PyTree) -> optax.GradientTransformation:
    def update(updates: PyTree, state: optax.EmptyState, params: PyTree) -> tuple[PyTree, optax.EmptyState]:
        return jax.tree.map(lambda u, p, w: u + w * p if w else u, updates, params, weights), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale_by_rates(rates: PyTree, schedule: Schedule) -> optax.GradientTransformation:
    def update(updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree) -> tuple[PyTree, optax.ScaleByScheduleState]:
        ratio = schedule(state.count)
        # In the dtype of the parameter that it is added to: a wider one would be the largest array of a step.
        moves = jax.tree.map(lambda u, r, p: (-r * ratio * u).astype(p.dtype), updates, rates, params)
        return moves, optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)), update)
