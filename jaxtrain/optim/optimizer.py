"""The optimizer: a clip, an update rule, decoupled decay, and a rate by parameter and by step.

An optimizer of optax or of one's own takes the place of all that follows the clip.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config import SCHEDULES, UPDATE_RULES, Group, Optim, factories
from jaxtrain.optim import moments as moments_lib
from jaxtrain.optim import random_keys
from jaxtrain.optim.param_groups import OptimError, group_of_each, rate_factors, update_rule_of_each
from jaxtrain.optim.update_rules import scale_by_adafactor, scale_by_adam_atan2, scale_by_muon
from jaxtrain.specs import is_spec, map_specs, path_name, paths
from jaxtrain.types import Array, PyTree, Spec

Schedule = Callable[[Any], Any]  # step -> ratio, of jax's arrays or of numpy's
NONE_KNOWN: Mapping[str, Array] = {}


# name of `UPDATE_RULES` -> (optim, path -> Spec of every parameter) -> the rule
RULES: dict[str, Callable[[Optim, Mapping[str, Spec]], optax.GradientTransformation]] = {
    "adamw": lambda optim, _: optax.scale_by_adam(optim.b1, optim.b2, optim.eps),
    "adam_atan2": lambda optim, _: scale_by_adam_atan2(optim.b1, optim.b2),
    "adafactor": lambda optim, _: scale_by_adafactor(),
    "lion": lambda optim, _: optax.scale_by_lion(optim.b1, optim.b2),
    "muon": lambda _, table: scale_by_muon(table),
    "sign_sgd": lambda optim, _: optax.scale_by_sign(),
}


class Optimizer(NamedTuple):
    """A transformation of gradients in optax's terms, from the clip to the learning rate."""

    init: Callable[[PyTree], PyTree]
    # (gradients, state, parameters, sparse_rows=as in `types.LossOut`) -> updates, state
    update: Callable[..., tuple[PyTree, PyTree]]
    repeatable: bool = False  # computing an update again costs less than keeping it


def make_optimizer(optim: Optim, specs: PyTree, *, steps: int, seed: int = 0) -> Optimizer:
    """Make the optimizer: p -= lr(s) (u + weight_decay p), with u from one of `UPDATE_RULES`.

    A table under sign_sgd moves and decays only in the rows that the step has read, if the loss
    reports them (``sparse_rows``). ``seed`` is the run's, for an optimizer that draws numbers.

    Raises:
      OptimError: neither or both of optim.decayed and optim.undecayed match a parameter, a group
        has no parameters, a parameter cannot have its rule, no parameter needs masters or
        layer_decay, or an optimizer of one's own fails on these parameters.
    """
    groups = group_of_each(optim, specs)
    frozen = jax.tree.map(lambda g: g.freeze, groups)
    # Frozen ones are dropped first, since they must not count in the norm of the others.
    is_any_frozen = any(jax.tree.leaves(frozen))
    dropping = optax.masked(optax.set_to_zero(), frozen) if is_any_frozen else optax.identity()
    clips = _clips(optim, groups)
    if optim.name not in UPDATE_RULES:
        named = _named(optim, frozen, steps, seed)
        tx = _with_masters(optim, specs, dropping, *clips, named)
        _try(optim.name, tx, specs)
        return Optimizer(tx.init, tx.update)
    rule_names = update_rule_of_each(optim, specs, groups)
    repeatable = all(UPDATE_RULES[name].repeatable for name in jax.tree.leaves(rule_names))
    rules = _built_in(optim, specs, groups, rule_names, steps)
    tx = _with_masters(optim, specs, dropping, *clips, *rules)
    return Optimizer(tx.init, tx.update, repeatable)


def _with_masters(
    optim: Optim, specs: PyTree, *transforms: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Chain transformations, and keep float32 masters of the parameters if optim.masters."""
    tx = optax.chain(*transforms)
    if not optim.masters:
        return tx
    _require_narrow_parameters(specs)
    return moments_lib.with_masters(tx)


def _require_narrow_parameters(specs: PyTree) -> None:
    """Raise OptimError if every parameter is float32, so that none needs a master."""
    leaves: Sequence[Spec] = jax.tree.leaves(specs, is_leaf=is_spec)
    if all(jnp.dtype(spec.dtype) == jnp.float32 for spec in leaves):
        raise OptimError(
            "optim.masters=True, but every parameter is float32 already; unset it, or make them"
            " bfloat16"
        )


def _built_in(
    optim: Optim, specs: PyTree, groups: PyTree, rule_names: PyTree, steps: int
) -> Iterator[optax.GradientTransformation]:
    """Yield each rule for its own parameters, decay, rates, and the mask of sparse tables."""
    depth_factors = rate_factors(optim, specs)
    table = dict(zip(paths(specs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True))
    used = sorted(set(jax.tree.leaves(rule_names)))
    for rule in used:
        tx = _rule(optim, rule, table)
        if len(used) > 1:
            tx = optax.masked(tx, jax.tree.map(lambda name, rule=rule: name == rule, rule_names))
        yield tx
    decays = map_specs(lambda path, _: re.search(optim.decayed, path) is not None, specs)
    yield _add_decayed(jax.tree.map(lambda g, d: _decay_of(optim, g) * d, groups, decays))
    rates = jax.tree.map(lambda g, factor: _rate_of(optim, g) * factor, groups, depth_factors)
    yield _scale_by_rates(rates, make_schedule(optim, steps))
    is_sparse = jax.tree.map(lambda name: UPDATE_RULES[name].sparse, rule_names)
    if any(jax.tree.leaves(is_sparse)):
        yield _only_read_rows(is_sparse)


def _decay_of(optim: Optim, group: Group) -> float:
    if group.freeze:
        return 0.0
    return optim.weight_decay if group.weight_decay is None else group.weight_decay


def _rate_of(optim: Optim, group: Group) -> float:
    if group.freeze:
        return 0.0
    return peak(optim) if group.lr is None else group.lr


def _rule(optim: Optim, name: str, table: Mapping[str, Spec]) -> optax.GradientTransformation:
    """Make a built-in rule, which keeps its moments as optim.moments says."""
    rule = UPDATE_RULES[name]
    tx = RULES[name](optim, table)
    if rule.sparse:
        return tx
    if optim.moments != "float32" and rule.moments:
        tx = moments_lib.stored(tx, optim.moments, rule.moments)
    return _in_float32(tx)


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Make a rule compute in float32 and keep float32 moments for parameters of any dtype."""

    def wide(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda params: tx.init(wide(params)),
        lambda grads, state, params: tx.update(wide(grads), state, wide(params)),
    )


def _named(optim: Optim, frozen: PyTree, steps: int, seed: int) -> optax.GradientTransformation:
    """Make the optimizer of optim.name, module:factory, for all but frozen parameters."""
    schedule, top = make_schedule(optim, steps), peak(optim)
    arguments = factories.with_key(optim.name, optim.arguments, seed)
    tx: optax.GradientTransformation = factories.call(
        optim.name, arguments, learning_rate=lambda count: top * schedule(count)
    )
    tx = random_keys.stored_as_numbers(tx)
    if any(jax.tree.leaves(frozen)):
        return optax.masked(tx, jax.tree.map(lambda f: not f, frozen))
    return tx


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
        is_repeatable = _program(updated, params) == _program(updated, params)
        states = jax.eval_shape(updated, params)
    except Exception as error:  # any error of its functions
        raise OptimError(
            f"config.optim.name={name!r} cannot update these parameters:"
            f" {factories.first_line(error)}"
        ) from error
    if not is_repeatable:
        raise OptimError(
            f"config.optim.name={name!r} is another function each time that it is traced, so that"
            " no run of it resumes; draw random numbers with jax.random, from a key in its state"
        )
    old, new = (
        {path_name(path): (x.shape, x.dtype.name) for path, x in jax.tree.leaves_with_path(state)}
        for state in states
    )
    for path in sorted(old | new):
        if old.get(path) != new.get(path):
            raise OptimError(
                f"config.optim.name={name!r} changes its state {path!r} from {old.get(path)} to"
                f" {new.get(path)}; expected the same"
            )


def _program(function: Callable[[PyTree], Any], params: PyTree) -> tuple[str, list[bytes]]:
    """Trace a function. Return its text without addresses, and the numbers that it was given."""
    # a new function, since JAX keeps the trace of one that it has seen
    traced = jax.make_jaxpr(lambda params: function(params))(params)
    numbers = [np.asarray(x).tobytes() for x in traced.consts if not random_keys.is_key(x)]
    return re.sub(r"0x[0-9a-f]+", "", str(traced)), numbers


def _clips(optim: Optim, groups: PyTree) -> Iterator[optax.GradientTransformation]:
    """Yield the clips of the global norm and of groups, so that none shrinks others' steps."""
    clipped_alone = list(dict.fromkeys(g for g in jax.tree.leaves(groups) if g.clip is not None))
    frozen = {path_name(path) for path, group in jax.tree.leaves_with_path(groups) if group.freeze}
    clip = functools.partial(_clip, frozen=frozen)
    if optim.clip:
        others = jax.tree.map(lambda g: g.clip is None, groups)
        yield optax.masked(clip(optim.clip), others) if clipped_alone else clip(optim.clip)
    for group in clipped_alone:
        if group.clip:
            members = jax.tree.map(lambda g, group=group: g == group, groups)
            yield optax.masked(clip(group.clip), members)


def _clip(most: float, frozen: Set[str]) -> optax.GradientTransformationExtraArgs:
    """Scale all gradients down to a global norm of ``most``, which is summed in float32.

    ``frozen``: paths whose gradients are zeros here, whatever ``square_sums`` says.
    """

    def clipped(
        grads: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        square_sums: Mapping[str, Array] | None = None,
        **_: Any,
    ) -> tuple[PyTree, optax.EmptyState]:
        known = {path: x for path, x in (square_sums or {}).items() if path not in frozen}
        norm = global_norm(grads, known)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clipped)


def global_norm(tree: PyTree, known: Mapping[str, Array] = NONE_KNOWN) -> Array:
    """Return the root of the sum of all squares, in float32. ``known``: as in `square_sums`."""
    return root_of_sum(square_sums(tree, known))


def square_sums(tree: PyTree, known: Mapping[str, Array] = NONE_KNOWN) -> PyTree:
    """Return each array's sum of squares, in float32. ``known``: those of some paths."""

    def of_array(path: tuple[Any, ...], x: Array) -> Array:
        if known and (found := known.get(path_name(path))) is not None:
            return found
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return jax.tree.map_with_path(of_array, tree)


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
            if not is_sparse or not sparse_rows:
                return u
            count = sparse_rows.get(path_name(path))
            if count is None:
                return u
            return jnp.where(count.reshape(-1, *[1] * (u.ndim - 1)) > 0, u, 0)

        return jax.tree.map_with_path(keep, updates, sparse), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _add_decayed(weights: PyTree) -> optax.GradientTransformation:
    def decayed(updates: PyTree, params: PyTree) -> PyTree:
        return jax.tree.map(lambda u, p, w: u + w * p if w else u, updates, params, weights)

    return optax.stateless(decayed)


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


def peak(optim: Optim) -> float:
    """Return the learning rate at a ratio of 1. It is 1 for module:factory, which gives rates."""
    return optim.lr if optim.schedule in SCHEDULES else 1.0


def learning_rates(optim: Optim, steps: int, at: np.ndarray) -> np.ndarray | None:
    """Return the learning rates of updates ``at``, or None if one's own optimizer takes none."""
    if optim.name not in UPDATE_RULES and not factories.takes(optim.name, "learning_rate"):
        return None
    if optim.schedule not in SCHEDULES:
        return np.asarray(jax.vmap(make_schedule(optim, steps))(at))
    return np.broadcast_to(optim.lr * make_schedule(optim, steps, np)(at), at.shape)


def make_schedule(optim: Optim, steps: int, xp: Any = jnp) -> Schedule:
    """Make the function update s = 0, 1, … -> ratio of `peak`.

    The ratio is 1 at s = warmup, and the floor from s = steps on. With x from 0 to 1 over the
    decay:

        cosine          floor + (1 - floor) (1 + cos(pi x)) / 2 (Loshchilov & Hutter 2017)
        cycle           cosine over optim.cycle updates, with its warm-up, again and again (warm
                        restarts, Loshchilov & Hutter 2017)
        wsd             1 until s = steps - decay. Then it falls as 1 - x, (1 + cos(pi x)) / 2 or
                        1 - sqrt(x) (Hu et al. 2024)
        three_phase     wsd in shares of the run, as in prime-rl. Unless optim sets them, a warm-up
                        from 1e-8 in the first 5 %, and a decay in the last 20 %
        module:factory  the result of that function, called with optim.schedule_arguments

    ``xp``: with numpy, a built-in schedule is a function of numpy's arrays, for drawing it.
    """
    if optim.schedule not in SCHEDULES:
        return _named_schedule(optim, steps)
    warmup, decay, init = optim.warmup, optim.decay, optim.lr_init
    if optim.schedule == "three_phase":
        warmup = warmup or round(0.05 * steps)
        decay = decay or round(0.2 * steps)
        init = init or 1e-8
    cycle = min(optim.cycle, steps) or steps
    start, length, shape = {
        "constant": (steps, 0, "linear"),
        "cosine": (warmup, steps - warmup, "cosine"),
        "cycle": (warmup, cycle - warmup, "cosine"),
        "wsd": (steps - decay, decay, optim.decay_shape),
        "three_phase": (steps - decay, decay, optim.decay_shape),
    }[optim.schedule]
    ratio = functools.partial(_ratio, xp, start, length, shape, optim.lr_floor, warmup, init)
    if optim.schedule == "cycle":
        return lambda s: ratio(_place_in_cycle(xp, cycle, steps, s))
    return ratio


def _place_in_cycle(xp: Any, cycle: int, steps: int, s: Any) -> Any:
    """Return how many updates of its cycle lie before update s: all of them from ``steps`` on."""
    return xp.where(xp.asarray(s) < steps, s % cycle, cycle)


def _named_schedule(optim: Optim, steps: int) -> Schedule:
    """Make the schedule of optim.schedule, module:factory."""
    rate = factories.call(
        optim.schedule, optim.schedule_arguments, steps=steps, learning_rate=optim.lr
    )
    return lambda s: jnp.asarray(rate(s), jnp.float32)


def _ratio(
    xp: Any,
    start: int,
    length: int,
    shape: str,
    floor: float,
    warmup: int,
    init: float,
    s: Any,
) -> Any:
    """Return the ratio of update s: a decay of this shape and length from ``start`` on."""
    s = xp.asarray(s, xp.float32)
    rate = xp.float32(1)
    if length:  # without a decay phase the rate stays at its peak, also after the last step
        x = xp.clip((s - start) / length, 0, 1)
        rate = floor + (1 - floor) * _fall(xp, shape, x)
    if warmup:
        rate = xp.where(s < warmup, init + (1 - init) * s / warmup, rate)
    return rate


def _fall(xp: Any, shape: str, x: Any) -> Any:
    if shape == "linear":
        return 1 - x
    if shape == "cosine":
        return (1 + xp.cos(xp.pi * x)) / 2
    return 1 - xp.sqrt(x)
