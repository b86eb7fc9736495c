"""Learning-rate schedules, and the optimizer with its parameter groups.

Which parameters decay, which are frozen and which have their own rate is decided by path, and the coverage is checked:
a parameter that no pattern names, or a pattern that names no parameter, is an error.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import rules
from jaxtrain.config import Group, Optim
from jaxtrain.specs import is_spec, map_specs, path_name, paths
from jaxtrain.types import Array, PyTree, Spec

Schedule = Callable[[Array | int], Array]


class OptimError(ValueError):
    """Patterns that do not cover the parameters. The message lists what is not covered, and how to name it."""


def make_schedule(optim: Optim, steps: int) -> Schedule:
    """Ratio of the peak learning rate used by update s = 0, 1, …; 1 at s = warmup, floor from s = steps on.

    cosine: floor + (1 - floor) (1 + cos(pi x)) / 2 with x = (s - warmup) / (steps - warmup) (Loshchilov & Hutter 2017).
    wsd: 1 until s = steps - decay, then 1 - (1 - floor) falls as 1 - x, (1 + cos(pi x)) / 2 or 1 - sqrt(x) (Hu et al. 2024).
    three_phase: wsd in shares of the run, as prime-rl has it: a warm-up from 1e-8 in the first 5 %, a decay in the last 20 %,
    where optim does not say otherwise.
    """
    warmup, decay, init, floor = optim.warmup, optim.decay, optim.lr_init, optim.lr_floor
    if optim.schedule == "three_phase":
        warmup, decay, init = warmup or round(0.05 * steps), decay or round(0.2 * steps), init or 1e-8
    start, length, shape = {
        "constant": (steps, 0, "linear"),
        "cosine": (warmup, steps - warmup, "cosine"),
        "wsd": (steps - decay, decay, optim.decay_shape),
        "three_phase": (steps - decay, decay, optim.decay_shape),
    }[optim.schedule]
    falls = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + jnp.cos(jnp.pi * x)) / 2,
        "sqrt": lambda x: 1 - jnp.sqrt(x),
    }

    def schedule(s: Array | int) -> Array:
        s = jnp.asarray(s, jnp.float32)
        rate = jnp.float32(1)
        if length:  # without a decay phase the rate stays at its peak, also after the last step
            x = jnp.clip((s - start) / length, 0, 1)
            rate = floor + (1 - floor) * falls[shape](x)
        if warmup:
            rate = jnp.where(s < warmup, init + (1 - init) * s / warmup, rate)
        return rate

    return schedule


def make_optimizer(optim: Optim, specs: PyTree, *, steps: int) -> optax.GradientTransformationExtraArgs:
    """Clip the global norm, apply each parameter's rule, add decoupled decay, scale by each parameter's own rate.

    p -= lr(s) (u + weight_decay p), u by one of `RULES`. ``update`` takes ``touched`` (`types.LossOut`): of a table under
    sign_sgd that is named there, only the rows that the step has read move or decay.

    Raises:
      OptimError: a parameter that neither or both of optim.decayed and optim.undecayed match, a group without parameters, a
        rule that a parameter cannot have, masters or layer_decay that no parameter asks for.
    """
    groups, depths = _groups(optim, specs), _depths(optim, specs)
    schedule = make_schedule(optim, steps)
    decays = map_specs(lambda path, _: re.search(optim.decayed, path) is not None, specs)
    rates = jax.tree.map(lambda g, d: (0.0 if g.freeze else optim.lr if g.lr is None else g.lr) * d, groups, depths)
    weights = jax.tree.map(
        lambda g, decay: (optim.weight_decay if g.weight_decay is None else g.weight_decay) * decay * (not g.freeze),
        groups,
        decays,
    )
    frozen = jax.tree.map(lambda g: g.freeze, groups)
    names = _rules(optim, specs, groups)
    tx = optax.chain(
        # Frozen gradients leave first: they must not count in the norm that the others are clipped by.
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
        raise OptimError("optim.masters=True, but every parameter is float32 already; leave it out, or make them bfloat16")
    return rules.with_masters(tx)


def scale_by_adam_atan2(b1: float, b2: float, *, a: float, b: float, correction: str) -> optax.GradientTransformation:
    """Adam's quotient as an angle, which needs no eps and does not see the gradient's scale (Everett et al. 2024).

    inside: a atan2(m_hat, b sqrt(v_hat)), as published. outside: a / (1 - b1^t) atan2(m, b sqrt(v_hat)), what the package
    adam-atan2 computes (0.0.3); the two differ while 1 - b1^t is far from 1.
    """

    def init(params: PyTree) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(grads: PyTree, state: optax.ScaleByAdamState, params: PyTree = None) -> tuple[PyTree, optax.ScaleByAdamState]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        count = state.count + 1
        first, second = 1 - b1**count, 1 - b2**count

        def angle(m: Array, v: Array) -> Array:
            root = b * jnp.sqrt(v / second)
            return a * jnp.arctan2(m / first, root) if correction == "inside" else a / first * jnp.arctan2(m, root)

        return jax.tree.map(angle, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


# name -> (optim, path -> spec) -> the update before decay and rate.
RULES: dict[str, Callable[[Optim, Mapping[str, Spec]], optax.GradientTransformation]] = {
    # m_hat / (sqrt(v_hat) + eps) (Loshchilov & Hutter 2019)
    "adamw": lambda o, _: optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
    "adam_atan2": lambda o, _: scale_by_adam_atan2(o.b1, o.b2, a=o.atan2_a, b=o.atan2_b, correction=o.atan2_correction),
    # g / sqrt(v) with v of rank one: rows + columns numbers instead of rows × columns
    "adafactor": lambda o, _: rules.scale_by_adafactor(),
    # sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g (Chen et al. 2023)
    "lion": lambda o, _: optax.scale_by_lion(b1=o.b1, b2=o.b2),
    "muon": lambda o, specs: rules.scale_by_muon(specs, momentum=o.momentum, scale=o.muon_scale),
    # sign(g), without state: a table of millions of rows needs no moments
    "sign_sgd": lambda o, _: optax.scale_by_sign(),
}


def _rules(optim: Optim, specs: PyTree, groups: PyTree) -> PyTree:
    """The name of every parameter's rule; optim.name="muon" leaves what is no hidden matrix to optim.rest."""
    problems = []

    def name(path: str, spec: Spec, group: Group) -> str:
        if group.name == "muon" and not group.freeze:
            try:
                rules.matrix_axes(path, spec)
            except rules.RuleError as error:
                problems.append(str(error))
        # Of two dimensions or more are also positions, CLS tokens and biases of several heads: what decay spares is no matrix.
        hidden = rules.is_hidden_matrix(path, spec) and re.search(optim.decayed, path)
        if group.name is None and optim.name == "muon" and not hidden:
            return optim.rest
        return group.name or optim.name

    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    names = [name(*each) for each in zip(paths(specs), leaves, jax.tree.leaves(groups), strict=True)]
    if problems:
        raise OptimError("\n".join(problems))
    return tree.unflatten(names)


def _by_rule(optim: Optim, specs: PyTree, names: PyTree) -> list[optax.GradientTransformation]:
    """Each rule on its own parameters, keeping moments of these alone, as optim.moments says."""
    table = dict(zip(paths(specs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True))
    used = sorted(set(jax.tree.leaves(names)))
    made = {name: RULES[name](optim, table) for name in used}
    made = {
        name: tx if name == "sign_sgd" else rules.in_float32(tx if name == "adafactor" else rules.stored(tx, optim.moments))
        for name, tx in made.items()
    }
    if len(used) == 1:
        return [made[used[0]]]
    return [optax.masked(made[rule], jax.tree.map(lambda name, rule=rule: name == rule, names)) for rule in used]


def _clips(optim: Optim, groups: PyTree) -> Iterator[optax.GradientTransformation]:
    """The clip of the global norm, and one for each group that has its own: a probe must not shrink what it looks at."""
    own = list(dict.fromkeys(g for g in jax.tree.leaves(groups) if g.clip is not None))
    for one, most in ((None, optim.clip), *((g, g.clip) for g in own)):
        if most:
            counts = jax.tree.map(lambda g, one=one: (g if g.clip is not None else None) == one, groups)
            yield optax.masked(_clip(most), counts) if own else _clip(most)


def _clip(most: float) -> optax.GradientTransformation:
    """Scales all gradients down to a global norm of ``most``, which is summed in float32 whatever their dtype."""

    def update(grads: PyTree, state: optax.EmptyState, params: PyTree = None) -> tuple[PyTree, optax.EmptyState]:
        del params
        norm = global_norm(grads)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(tree: PyTree) -> Array:
    """The root of the sum of all squares, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def _depths(optim: Optim, specs: PyTree) -> PyTree:
    """What each parameter's rate is multiplied by: layer_decay to the number of layers above (Clark et al. 2020).

    Layer i of a stack of n has n - i of them (the head is one), what matches optim.layer_first n + 1, all else none.
    """
    stacks = [spec.shape[spec.axes.index("layer")] for spec in jax.tree.leaves(specs, is_leaf=is_spec) if "layer" in spec.axes]
    if optim.layer_decay == 1:
        return map_specs(lambda path, spec: 1.0, specs)
    if not stacks:
        raise OptimError(f"optim.layer_decay={optim.layer_decay}, but no parameter has an axis 'layer'; leave it at 1")
    if not any(re.search(optim.layer_first, path) for path in paths(specs)):
        known = ", ".join(paths(specs))
        raise OptimError(
            f"optim.layer_first={optim.layer_first!r} matches no parameter; name those below the layers of {known}"
        )

    def one(path: str, spec: Spec) -> float | np.ndarray:
        if "layer" in spec.axes:
            at = spec.axes.index("layer")
            above = spec.shape[at] - np.arange(spec.shape[at])
            shape = [1] * at + [-1] + [1] * (len(spec.shape) - at - 1)
            return (optim.layer_decay**above).astype(np.float32).reshape(shape)
        return optim.layer_decay ** (max(stacks) + 1) if re.search(optim.layer_first, path) else 1.0

    return map_specs(one, specs)


def _only_touched(sparse: PyTree) -> optax.GradientTransformationExtraArgs:
    """Leaves the rows of a sparse table where they are that no row of the batch has read.

    The gradient itself is dense. It cannot say which rows were read, since the gradients of one row's readers may cancel,
    and then the row still decays; so the workload counts. A gradient of indices and values would have to be carried through
    microbatches, the reduction over data, clipping and norms by rules of its own. The dense one goes through all of them as
    any other, is split over devices like its table, and costs a few passes over it: at 876,406 puzzles of 512 values 1.8 GB,
    some milliseconds beside a step of seconds.
    """

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree = None, *, touched: PyTree = None, **_) -> tuple:
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
        # No more digits than the parameter has to which it is added: wider ones would be the largest array of a step.
        moves = jax.tree.map(lambda u, r, p: (-r * ratio * u).astype(p.dtype), updates, rates, params)
        return moves, optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32)), update)


def _groups(optim: Optim, specs: PyTree) -> PyTree:
    """The `Group` of every parameter, after checking that the patterns cover the table."""
    names, rest, problems = paths(specs), Group(), []
    for path in names:
        matches = [bool(re.search(pattern, path)) for pattern in (optim.decayed, optim.undecayed)]
        if sum(matches) != 1:
            which = "both" if all(matches) else "neither"
            problems.append(
                f"parameter {path!r} matches {which} of optim.decayed={optim.decayed!r} and optim.undecayed={optim.undecayed!r}"
            )
    for i, group in enumerate(optim.groups):
        if not any(re.search(group.match, path) for path in names):
            problems.append(f"optim.groups[{i}].match={group.match!r} matches no parameter; there are {', '.join(names)}")
    if problems:
        raise OptimError("\n".join(problems))
    return map_specs(lambda path, _: next((g for g in optim.groups if re.search(g.match, path)), rest), specs)
