"""The optimizer: a clip, then an update rule, decoupled decay and a rate for each parameter.

An optimizer of optax or of one's own takes the place of all that follows the clip.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import OF_RULES, UPDATE_RULES, Optim, factories
from jaxtrain.optim import moments as moments_lib
from jaxtrain.optim.param_groups import OptimError, group_of_each, rate_factors, update_rule_of_each
from jaxtrain.optim.schedules import Schedule, make_schedule, peak
from jaxtrain.specs import is_spec, map_specs, path_name, paths
from jaxtrain.types import Array, PyTree, Spec


class Optimizer(NamedTuple):
    """A transformation of gradients in optax's terms, from the clip to the learning rate."""

    init: Callable[[PyTree], PyTree]
    # (gradients, state, parameters, sparse_rows=as in `types.LossOut`) -> updates, state
    update: Callable[..., tuple[PyTree, PyTree]]
    repeatable: bool = False  # computing an update again costs less than keeping it


def make_optimizer(optim: Optim, specs: PyTree, *, steps: int) -> Optimizer:
    """Make the optimizer: p -= lr(s) (u + weight_decay p), with u from one of `UPDATE_RULES`.

    A table under sign_sgd moves and decays only in the rows that the step has read, if the loss
    reports them (``sparse_rows``).

    Raises:
      OptimError: neither or both of optim.decayed and optim.undecayed match a parameter, a group
        has no parameters, a parameter cannot have its rule, no parameter needs masters or
        layer_decay, or an optimizer of one's own fails on these parameters.
    """
    groups = group_of_each(optim, specs)
    frozen = jax.tree.map(lambda g: g.freeze, groups)
    is_named = factories.is_factory(optim.name)
    rest = [_named(optim, frozen, steps)] if is_named else _built_in(optim, specs, groups, steps)
    tx = optax.chain(
        # Frozen gradients are dropped first, since they must not count in the norm of the others.
        (
            optax.masked(optax.set_to_zero(), frozen)
            if any(jax.tree.leaves(frozen))
            else optax.identity()
        ),
        *_clips(optim, groups),
        *rest,
    )
    if optim.masters:
        if all(
            jnp.dtype(spec.dtype) == jnp.float32 for spec in jax.tree.leaves(specs, is_leaf=is_spec)
        ):
            raise OptimError(
                "optim.masters=True, but every parameter is float32 already; unset it, or make them"
                " bfloat16"
            )
        tx = moments_lib.with_masters(tx)
    if is_named:
        _try(optim.name, tx, specs)
    repeatable = not is_named and all(UPDATE_RULES[name].repeatable for name in optim.rules())
    return Optimizer(tx.init, tx.update, repeatable)


def _built_in(
    optim: Optim, specs: PyTree, groups: PyTree, steps: int
) -> Iterator[optax.GradientTransformation]:
    """Yield each rule for its own parameters, decay, rates, and the mask of sparse tables."""
    decays = map_specs(lambda path, _: re.search(optim.decayed, path) is not None, specs)
    depths, top = rate_factors(optim, specs), peak(optim)
    rates = jax.tree.map(
        lambda g, d: (0.0 if g.freeze else top if g.lr is None else g.lr) * d, groups, depths
    )
    weights = jax.tree.map(
        lambda g, decay: (
            (optim.weight_decay if g.weight_decay is None else g.weight_decay)
            * decay
            * (not g.freeze)
        ),
        groups,
        decays,
    )
    names = update_rule_of_each(optim, specs, groups)
    table = dict(zip(paths(specs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True))
    used = sorted(set(jax.tree.leaves(names)))
    for rule in used:
        tx = _rule(optim, rule, table)
        yield (
            tx
            if len(used) == 1
            else optax.masked(tx, jax.tree.map(lambda name, rule=rule: name == rule, names))
        )
    yield _add_decayed(weights)
    yield _scale_by_rates(rates, make_schedule(optim, steps))
    yield _only_read_rows(jax.tree.map(lambda name: UPDATE_RULES[name].sparse, names))


def _rule(optim: Optim, name: str, table: Mapping[str, Spec]) -> optax.GradientTransformation:
    """Make a built-in rule, which keeps its moments as optim.moments says."""
    rule = UPDATE_RULES[name]
    tx = factories.call(
        rule.factory, {}, specs=table, **{field: getattr(optim, field) for field in OF_RULES}
    )
    return (
        tx
        if rule.sparse
        else moments_lib.in_float32(moments_lib.stored(tx, optim.moments, rule.moments))
    )


def _named(optim: Optim, frozen: PyTree, steps: int) -> optax.GradientTransformation:
    """Make the optimizer of optim.name, module:factory, for all but frozen parameters."""
    schedule, top = make_schedule(optim, steps), peak(optim)
    tx = factories.call(
        optim.name, optim.arguments, learning_rate=lambda count: top * schedule(count)
    )
    return (
        optax.masked(tx, jax.tree.map(lambda f: not f, frozen))
        if any(jax.tree.leaves(frozen))
        else tx
    )


def _try(name: str, tx: optax.GradientTransformation, specs: PyTree) -> None:
    """Raise OptimError if an optimizer cannot update these parameters twice. Makes no array."""
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)), specs, is_leaf=is_spec
    )

    def updated(params: PyTree) -> tuple[PyTree, PyTree]:
        state = tx.init(params)
        updates, new = optax.with_extra_args_support(tx).update(
            params, state, params, sparse_rows={}
        )
        optax.apply_updates(params, updates)  # which would broadcast
        for path, update, param in zip(
            paths(params), jax.tree.leaves(updates), jax.tree.leaves(params), strict=True
        ):
            if jnp.shape(update) != param.shape:
                raise ValueError(
                    f"its update of {path} is of shape {jnp.shape(update)}, and the parameter of"
                    f" {param.shape}"
                )
        return state, new

    try:
        states = jax.eval_shape(updated, params)
    except Exception as error:  # any error of its functions
        raise OptimError(
            f"config.optim.name={name!r} cannot update these parameters:"
            f" {factories.first_line(error)}"
        ) from error
    before, after = (
        {path_name(path): (x.shape, x.dtype.name) for path, x in jax.tree.leaves_with_path(state)}
        for state in states
    )
    if changed := [path for path in sorted(before | after) if before.get(path) != after.get(path)]:
        old, new = before.get(changed[0]), after.get(changed[0])
        raise OptimError(
            f"config.optim.name={name!r} changes its state {changed[0]!r} from {old} to {new};"
            " expected the same"
        )


def _clips(optim: Optim, groups: PyTree) -> Iterator[optax.GradientTransformation]:
    """Yield the clips of the global norm and of groups, so that none shrinks others' steps."""
    clipped_alone = list(dict.fromkeys(g for g in jax.tree.leaves(groups) if g.clip is not None))
    for group, most in ((None, optim.clip), *((g, g.clip) for g in clipped_alone)):
        if most:
            members = jax.tree.map(
                lambda g, group=group: (g if g.clip is not None else None) == group, groups
            )
            yield optax.masked(_clip(most), members) if clipped_alone else _clip(most)


def _clip(most: float) -> optax.GradientTransformation:
    """Scale all gradients down to a global norm of ``most``, which is summed in float32."""

    def update(
        grads: PyTree, state: optax.EmptyState, params: PyTree = None
    ) -> tuple[PyTree, optax.EmptyState]:
        norm = global_norm(grads)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: PyTree) -> Array:
    """Return the root of the sum of all squares, in float32."""
    return root_of_sum(square_sums(tree))


def square_sums(tree: PyTree) -> PyTree:
    """Return each array's sum of squares, in float32."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)


def root_of_sum(tree: PyTree) -> Array:
    """Return the root of the sum of numbers: of some of `square_sums`, their norm."""
    return jnp.sqrt(sum(jax.tree.leaves(tree)))


def _only_read_rows(sparse: PyTree) -> optax.GradientTransformationExtraArgs:
    """Keep the rows of a sparse table that the batch has not read as they are.

    The gradient is dense, and split over devices like its table, so that microbatches, reductions,
    clipping and norms need no rules for it. It does not show which rows were read: the gradients of
    a row's readers may cancel, and that row still decays. So the workload counts the reads.
    """

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        sparse_rows: PyTree = None,
        **_: Any,
    ) -> tuple[PyTree, optax.EmptyState]:

        def keep(path: tuple[Any, ...], u: Array, is_sparse: bool) -> Array:
            count = (sparse_rows or {}).get(path_name(path)) if is_sparse else None
            return (
                u if count is None else jnp.where(count.reshape(-1, *[1] * (u.ndim - 1)) > 0, u, 0)
            )

        return jax.tree.map_with_path(keep, updates, sparse), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _add_decayed(weights: PyTree) -> optax.GradientTransformation:
    def update(
        updates: PyTree, state: optax.EmptyState, params: PyTree
    ) -> tuple[PyTree, optax.EmptyState]:
        return jax.tree.map(lambda u, p, w: u + w * p if w else u, updates, params, weights), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale_by_rates(rates: PyTree, schedule: Schedule) -> optax.GradientTransformation:
    def update(
        updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree
    ) -> tuple[PyTree, optax.ScaleByScheduleState]:
        ratio = schedule(state.count)
        # In the dtype of its parameter, since a wider one would be the largest array of a step.
        moves = jax.tree.map(
            lambda u, r, p: (-r * ratio * u).astype(p.dtype), updates, rates, params
        )
        return moves, optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)), update
    )
