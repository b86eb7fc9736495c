"""Learning-rate schedules."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxtrain.config import Optim

Schedule = Callable[[Any], Any]  # step -> ratio, of jax's arrays or of numpy's


def make_schedule(optim: Optim, steps: int, xp: Any = jnp) -> Schedule:
    """Makes update s = 0, 1, … -> ratio of the peak learning rate: 1 at s = warmup, the floor from s = steps on.

    cosine: floor + (1 - floor) (1 + cos(pi x)) / 2 with x = (s - warmup) / (steps - warmup) (Loshchilov & Hutter 2017).
    wsd: 1 until s = steps - decay, then 1 - (1 - floor) falls as 1 - x, (1 + cos(pi x)) / 2 or 1 - sqrt(x) (Hu et al. 2024).
    three_phase: wsd in shares of the run, as in prime-rl: a warm-up from 1e-8 in the first 5 %, a decay in the last 20 %,
    unless optim sets them.

    ``xp``: numpy makes it a function of numpy's arrays, for those who draw it.
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
