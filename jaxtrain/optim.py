"""Learning-rate schedules, and the optimizer with its parameter groups.

Which parameters decay, which are frozen and which have their own rate is decided by path, and the coverage is checked:
a parameter that no pattern names, or a pattern that names no parameter, is an error.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import Group, Optim
from jaxtrain.specs import map_specs, paths
from jaxtrain.types import Array, PyTree

Schedule = Callable[[Array | int], Array]


class OptimError(ValueError):
    """Patterns that do not cover the parameters. The message lists what is not covered, and how to name it."""


def make_schedule(optim: Optim, steps: int) -> Schedule:
    """Ratio of the peak learning rate used by update s = 0, 1, …; 1 at s = warmup, floor from s = steps on.

    cosine: floor + (1 - floor) (1 + cos(pi x)) / 2 with x = (s - warmup) / (steps - warmup) (Loshchilov & Hutter 2017).
    wsd: 1 until s = steps - decay, then 1 - (1 - floor) falls as 1 - x, (1 + cos(pi x)) / 2 or 1 - sqrt(x) (Hu et al. 2024).
    """
    warmup, floor = optim.warmup, optim.lr_floor
    start, length, shape = {
        "constant": (steps, 0, "linear"),
        "cosine": (warmup, steps - warmup, "cosine"),
        "wsd": (steps - optim.decay, optim.decay, optim.decay_shape),
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
            rate = jnp.where(s < warmup, optim.lr_init + (1 - optim.lr_init) * s / warmup, rate)
        return rate

    return schedule


def make_optimizer(optim: Optim, specs: PyTree, *, steps: int) -> optax.GradientTransformation:
    """Clip the global norm, scale by Adam, add decoupled decay, scale by each parameter's own rate.

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay p;  p -= lr(s) u (Loshchilov & Hutter 2019).

    Raises:
      OptimError: a parameter that neither or both of optim.decayed and optim.undecayed match, a group without parameters.
    """
    groups = _groups(optim, specs)
    schedule = make_schedule(optim, steps)
    decays = map_specs(lambda path, _: re.search(optim.decayed, path) is not None, specs)
    rates = jax.tree.map(lambda g: 0.0 if g.freeze else optim.lr if g.lr is None else g.lr, groups)
    weights = jax.tree.map(
        lambda g, decay: (optim.weight_decay if g.weight_decay is None else g.weight_decay) * decay * (not g.freeze),
        groups,
        decays,
    )
    frozen = jax.tree.map(lambda g: g.freeze, groups)
    return optax.chain(
        # Frozen gradients leave first: they must not count in the norm that the others are clipped by.
        optax.masked(optax.set_to_zero(), frozen) if any(jax.tree.leaves(frozen)) else optax.identity(),
        optax.clip_by_global_norm(optim.clip) if optim.clip else optax.identity(),
        optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps),
        _add_decayed(weights),
        _scale_by_rates(rates, schedule),
    )


def _add_decayed(weights: PyTree) -> optax.GradientTransformation:
    def update(updates: PyTree, state: optax.EmptyState, params: PyTree) -> tuple[PyTree, optax.EmptyState]:
        return jax.tree.map(lambda u, p, w: u + w * p if w else u, updates, params, weights), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale_by_rates(rates: PyTree, schedule: Schedule) -> optax.GradientTransformation:
    def update(updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree) -> tuple[PyTree, optax.ScaleByScheduleState]:
        ratio = schedule(state.count)
        return jax.tree.map(lambda u, r: -r * ratio * u, updates, rates), optax.ScaleByScheduleState(count=state.count + 1)

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
