"""The history of a run, saved with its state: changes of its data, rewinds, and the best step so far.

workdir/best.json    {"step": 40, "value": 1.25, "metric": "loss", "progress": {"step": 30, "value": 1.3}}
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxtrain.config import Checkpoint
from loaders.io import files


class CheckpointError(RuntimeError):
    """Saved state that a run cannot resume from. It is never followed by a silent fresh start."""


class History(NamedTuple):
    """Facts about a run that are saved with its state."""

    offset: int = 0  # batches read of earlier data, before the data were exchanged: position = step - offset
    rewinds: int = 0  # times that bad steps took the run back to a checkpoint
    base: dict[str, str] | None = None  # the source of the frozen weights (`base_weights.Base`); None = none is recorded


class Scores:
    """The best step so far, kept in workdir/best.json. As an Orbax preservation policy, it keeps that step.

    best.json also has the step and value of the last progress: an improvement on the previous one by more than min_delta.
    """

    def __init__(self, path: epath.Path, config: Checkpoint, min_delta: float):
        """Raise CheckpointError: best.json is damaged."""
        self._min_delta = min_delta
        self._path, self._name, self._sign = path, config.best.lstrip("-"), -1 if config.best.startswith("-") else 1
        self._best: dict[str, Any] = _read(path) if config.best and path.exists() else {}

    def add(self, step: int, record: Mapping[str, float]) -> None:
        """Compare the evaluation of ``step`` with the best one so far. Process 0 writes best.json.

        Raises CheckpointError when the evaluation has no metric of the name that config.checkpoint.best gives.
        """
        if not self._name:
            return
        if self._name not in record:
            raise CheckpointError(f"config.checkpoint.best names {self._name!r}; an evaluation has {', '.join(sorted(record))}")
        new = {"step": step, "value": record[self._name]}

        def beats(old: Mapping[str, Any] | None, by: float = 0.0) -> bool:
            return not old or self._sign * (new["value"] - old["value"]) > by

        progress = new if beats(self._best.get("progress"), self._min_delta) else self._best["progress"]
        best = new if beats(self._best) else {name: self._best[name] for name in new}
        changed = {**best, "metric": self._name, "progress": progress}
        if changed != self._best:
            self._best = changed
            if jax.process_index() == 0:
                temporary = self._path.parent / f"{self._path.name}.new"
                temporary.write_text(json.dumps(self._best))
                temporary.replace(self._path)

    @property
    def progress(self) -> int | None:
        """The step of the last progress, or None before the first evaluation."""
        return self._best["progress"]["step"] if "progress" in self._best else None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of Orbax's checkpoints stay: the best one."""
        del context
        return [checkpoint.step == self._best.get("step") for checkpoint in checkpoints]


def _read(path: epath.Path) -> dict[str, Any]:
    """Read best.json. Raises CheckpointError."""
    try:
        found = files.read_json(path)
        for entry in (found, found.get("progress", found)):
            if not (isinstance(entry, dict) and type(entry.get("step")) is int and _is_number(entry.get("value"))):
                raise files.FileError(f"{path} has no step with its value")
    except files.FileError as error:
        raise CheckpointError(f"{error}; remove it, and the next evaluation counts as the best one so far") from error
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not math.isnan(value)
