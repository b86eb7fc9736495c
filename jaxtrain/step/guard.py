"""The memory of the guard, and the count of steps skipped in a row.

`train_step.accept` decides on the device which steps are accepted. The host reacts to several that
are not.
"""

from typing import NamedTuple

from jaxtrain.config import Guard
from jaxtrain.types import Array


class GuardState(NamedTuple):
    """The gradient norms of accepted steps, as the guard remembers them."""

    average: Array  # float32
    steps: Array  # int32


class SkippedSteps:
    """Steps skipped in a row, as the host reads them.

    ``last_good``: the newest accepted step before too many were skipped. ``broken``: whether
    guard.patience steps in a row were skipped, until `restart`.
    """

    def __init__(self, guard: Guard, *, step: int):
        self._patience = guard.patience
        self._length = 0
        self.last_good = step
        self.broken = False

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
        self._length = 0
        self.last_good = step
        self.broken = False
