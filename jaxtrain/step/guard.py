"""Decides on the device which steps are accepted. The host reacts to several that are not."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxtrain.config import Guard
from jaxtrain.types import Array


class GuardState(NamedTuple):
    """The gradient norms of accepted steps, as the guard remembers them."""

    average: Array  # float32
    steps: Array  # int32


def accept(guard: Guard, state: GuardState, norm: Array, loss: Array) -> tuple[Array, GuardState]:
    """Whether a step is accepted, by its gradient norm and loss, and the guard's next state."""
    # a finite loss can have a gradient that is not
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    spike = norm > guard.spike * state.average if guard.spike else jnp.zeros((), bool)
    good = finite & ~(spike & (state.steps >= guard.settle))
    # a plain mean until the decay takes over
    decay = jnp.minimum(guard.decay, state.steps / (state.steps + 1.0))
    average = decay * state.average + (1 - decay) * norm
    return good, GuardState(jnp.where(good, average, state.average), state.steps + good)


class SkippedSteps:
    """Steps skipped in a row, as the host reads them.

    ``last_good``: the newest accepted step before too many were skipped. ``broken``: whether
    guard.patience steps in a row were skipped, until `restart`.
    """

    def __init__(self, guard: Guard, *, step: int):
        self._patience = guard.patience
        self._length = 0
        self.last_good, self.broken = step, False

    def add(self, step: int, *, skipped: bool) -> None:
        """Count one step more."""
        if skipped:
            self._length += 1
            self.broken = self.broken or self._length >= self._patience
        else:
            self._length = 0
            if not self.broken:
                self.last_good = step

    def restart(self, step: int) -> None:
        """Begin again after ``step``, with an older state."""
        self._length, self.last_good, self.broken = 0, step, False
