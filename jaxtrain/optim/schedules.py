"""Learning-rate schedules: built-in ones as ratios of a peak, and any function of one's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Optim, factories

Schedule = Callable[[Any], Any]  # step -> ratio, of jax's arrays or of numpy's


def peak(optim: Optim) -> float:
    """Return the learning rate at a ratio of 1. It is 1 for module:factory, which gives rates."""
    return 1.0 if factories.is_factory(optim.schedule) else optim.lr


def learning_rates(optim: Optim, steps: int, at: np.ndarray) -> np.ndarray | None:
    """Return the learning rates of updates ``at``, or None if one's own optimizer takes none."""
    if factories.is_factory(optim.name) and not factories.takes(optim.name, "learning_rate"):
        return None
    if factories.is_factory(optim.schedule):
        return np.asarray(jax.vmap(make_schedule(optim, steps))(at))
    return np.broadcast_to(optim.lr * make_schedule(optim, steps, np)(at), at.shape)


def make_schedule(optim: Optim, steps: int, xp: Any = jnp) -> Schedule:
    """Make the function update s = 0, 1, … -> ratio of `peak`.

    The ratio is 1 at s = warmup, and the floor from s = steps on. With x from 0 to 1 over the
    decay:

        cosine          floor + (1 - floor) (1 + cos(pi x)) / 2 (Loshchilov & Hutter 2017)
        wsd             1 until s = steps - decay. Then it falls as 1 - x, (1 + cos(pi x)) / 2 or
                        1 - sqrt(x) (Hu et al. 2024)
        three_phase     wsd in shares of the run, as in prime-rl. Unless optim sets them, a warm-up
                        from 1e-8 in the first 5 %, and a decay in the last 20 %
        module:factory  the result of that function, called with optim.schedule_arguments

    ``xp``: with numpy, a built-in schedule is a function of numpy's arrays, for drawing it.
    """
    if factories.is_factory(optim.schedule):
        rate = factories.call(
            optim.schedule, optim.schedule_arguments, steps=steps, learning_rate=optim.lr
        )
        return lambda s: jnp.asarray(rate(s), jnp.float32)
    warmup, decay, init, floor = optim.warmup, optim.decay, optim.lr_init, optim.lr_floor
    if optim.schedule == "three_phase":
        warmup, decay, init = (
            warmup or round(0.05 * steps),
            decay or round(0.2 * steps),
            init or 1e-8,
        )
    start, length, shape = {
        "constant": (steps, 0, "linear"),
        "cosine": (warmup, steps - warmup, "cosine"),
        "wsd": (steps - decay, decay, optim.decay_shape),
        "three_phase": (steps - decay, decay, optim.decay_shape),
    }[optim.schedule]
    falls = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + xp.cos(xp.pi * x)) / 2,
        "sqrt": lambda x: 1 - xp.sqrt(x),
    }

    def schedule(s: Any) -> Any:
        s = xp.asarray(s, xp.float32)
        rate = xp.float32(1)
        if length:  # without a decay phase the rate stays at its peak, also after the last step
            x = xp.clip((s - start) / length, 0, 1)
            rate = floor + (1 - floor) * falls[shape](x)
        if warmup:
            rate = xp.where(s < warmup, init + (1 - init) * s / warmup, rate)
        return rate

    return schedule
