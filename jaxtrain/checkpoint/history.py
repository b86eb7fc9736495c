"""The history of a run, saved with its state: changes of its data, rewinds, the best step so far.

workdir/best.json (with config.checkpoint.folder, there):

                     {"step": 40, "value": 1.25, "metric": "-loss", "progress": {"step": 30,
                     "value": 1.3}}

A value that is not finite is never the best one, and no progress. While there is no other, step and
values are null, and "progress" has the first evaluation's step, from which config.train.patience
counts.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxtrain.config import Checkpoint
from loaders.io import atomic_write, files
from loaders.io.checks import UserError

log = logging.getLogger("jaxtrain")


class CheckpointError(UserError, RuntimeError):
    """Saved state that a run cannot resume from. It is never followed by a silent fresh start."""


class SaveError(CheckpointError):
    """A save that failed. ``is_of_disk``: because a disk was full, by the message."""

    def __init__(self, message: str):
        super().__init__(message)
        self.is_of_disk = atomic_write.is_full(self)


class History(NamedTuple):
    # batches read of earlier data, before the data were exchanged: position = step - offset
    offset: int = 0
    rewinds: int = 0  # times that bad steps took the run back to a checkpoint
    # the source of the frozen weights (`base_weights.Base`); None = none is recorded
    base: dict[str, str] | None = None


class Scores:
    """The best step so far, kept in workdir/best.json. An Orbax preservation policy, it keeps it.

    best.json also has the step and value of the last progress: an improvement on the previous one
    by more than min_delta.
    """

    def __init__(self, path: epath.Path, config: Checkpoint, min_delta: float):
        self._path = path
        self._min_delta = min_delta
        self._metric = config.best
        self._name = config.best.lstrip("-")
        self._sign = -1 if config.best.startswith("-") else 1
        self._best: dict[str, Any] = _read(path) if config.best and path.exists() else {}
        metric_of_file = self._best.get("metric", config.best)
        if metric_of_file != config.best:
            self.forget(
                f"it is of {metric_of_file!r}, and config.checkpoint.best is {config.best!r}"
            )

    def forget(self, reason: str) -> None:
        """Begin again: the scores of before are those of other evaluations."""
        if self._best:
            log.warning("%s is not used: %s", self._path, reason)
        self._best = {}

    def add(self, step: int, record: Mapping[str, float]) -> None:
        """Compare the evaluation of ``step`` with the best one so far. Process 0 writes best.json.

        Raises CheckpointError when the evaluation has no metric as config.checkpoint.best names it.
        """
        if not self._name:
            return
        if self._name not in record:
            raise CheckpointError(
                f"config.checkpoint.best names {self._name!r}; an evaluation has"
                f" {', '.join(sorted(record))}"
            )
        value = float(record[self._name])
        if not math.isfinite(value):
            log.warning(
                "%s of step %d is %s: it is not the best, and no progress", self._name, step, value
            )
        entry: dict[str, Any] = {"step": step, "value": value}
        best = {name: self._best.get(name) for name in entry}
        if self._is_better(value, than=best["value"]):
            best = entry
        progress = self._best.get("progress", {"step": step, "value": None})
        if self._is_better(value, than=progress["value"], by=self._min_delta):
            progress = entry
        scores = {**best, "metric": self._metric, "progress": progress}
        if scores != self._best:
            self._best = scores
            if jax.process_index() == 0:
                temporary = self._path.parent / f"{self._path.name}.new"
                temporary.write_text(json.dumps(self._best))
                temporary.replace(self._path)

    def _is_better(self, value: float, *, than: float | None, by: float = 0.0) -> bool:
        if not math.isfinite(value):
            return False
        return than is None or self._sign * (value - than) > by

    @property
    def progress(self) -> int | None:
        """The step of the last progress, or None before the first evaluation."""
        return self._best["progress"]["step"] if "progress" in self._best else None

    def has_passed(self, least: float | None) -> bool:
        """Whether the best value is better than ``least``, which may be None for any."""
        if least is None:
            return True
        value = self._best.get("value")
        return value is not None and self._is_better(value, than=least)

    def has_reached(self, target: float | None) -> bool:
        """Whether the best value is ``target`` or better. None is never reached."""
        return target is not None and (self._best.get("value") == target or self.has_passed(target))

    def described(self) -> str:
        """Return the best value and its step in words."""
        step, value = self._best.get("step"), self._best.get("value")
        if step is None:
            return f"no {self._name} was finite"
        return f"the best {self._name}, {value:.4f}, is of step {step:,}, which is kept"

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        return [checkpoint.step == self._best.get("step") for checkpoint in checkpoints]


def _read(path: epath.Path) -> dict[str, Any]:
    try:
        scores = files.read_json(path)
        if not isinstance(scores.get("metric", ""), str):
            raise files.FileError(f"{path} has no metric's name")
        is_best = _is_entry(scores, may_have_no_step=True)
        is_progress = "progress" not in scores or _is_entry(scores["progress"])
        if not (is_best and is_progress):
            raise files.FileError(f"{path} has no step with its value")
    except files.FileError as error:
        raise CheckpointError(
            f"{error}; remove it, and the next evaluation counts as the best one so far"
        ) from error
    return scores


def _is_entry(entry: Any, *, may_have_no_step: bool = False) -> bool:
    """Whether an entry of the file has a step, and a finite value or none."""
    if not isinstance(entry, dict):
        return False
    step, value = entry.get("step"), entry.get("value", "")
    if step is None:
        return may_have_no_step and value is None
    if type(step) is not int:
        return False
    if type(value) is int:
        return abs(value) < 1e300
    return value is None or type(value) is float and math.isfinite(value)
