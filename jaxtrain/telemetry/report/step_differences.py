"""The training steps of two runs, compared by what their records say of them."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxtrain.telemetry.report import records
from jaxtrain.telemetry.report.run import Run, RunError
from loaders.io import files

FIELDS = ("loss", "grad_norm")  # that each record of a training step has
DIGEST = ("digest_high", "digest_low")  # the halves of `jaxtrain.step.digest` in a record with one
# The digest of each array at each record: {"step": 10, "arrays": 16 hexadecimal digits for each,
# "names": of the arrays}. A start of the run writes the names in its first line.
DIGESTS = "digests.jsonl"
SHOWN = 3  # arrays that a line names


class Steps(NamedTuple):
    """Recorded training steps: step -> value."""

    name: str
    values: dict[str, dict[int, float]]  # of `FIELDS`; nan = no number
    digests: dict[int, str]
    arrays: dict[int, dict[str, str]]  # step -> the digest of each array


def read(run: Run) -> Steps:
    """Read the training steps of a run. Raises RunError if there is none, FileError."""
    columns = records.read(run.file("metrics.jsonl")).splits.get("train", {})
    if not columns:
        raise RunError(
            f"{run.path}: no record of a training step in metrics.jsonl; name a run that has"
            " taken one"
        )
    steps = [int(step) for step in columns["step"]]
    values = {}
    for name in FIELDS:
        # a column without a number is left out of the columns
        numbers = columns[name].tolist() if name in columns else [math.nan] * len(steps)
        values[name] = dict(zip(steps, numbers, strict=True))
    digests = {}
    if all(name in columns for name in DIGEST):
        high, low = (columns[name].tolist() for name in DIGEST)
        for step, *halves in zip(steps, high, low, strict=True):
            if np.isfinite(halves).all():
                digests[step] = digest_text(halves)
    return Steps(run.name, values, digests, arrays(run))


def arrays(run: Run) -> dict[int, dict[str, str]]:
    """Read the digests of arrays. Lines that are none are left out."""
    by_step: dict[int, dict[str, str]] = {}
    names: list[str] = []
    path = run.file(DIGESTS)
    if not path.exists():
        return by_step
    for line in files.read(path, most=1 << 31).split(b"\n"):
        try:
            record = files.parse(line.decode(), DIGESTS)
            step, names, text = record["step"], record.get("names", names), record["arrays"]
            by_step[step] = {name: text[16 * i : 16 * (i + 1)] for i, name in enumerate(names)}
        except (ValueError, KeyError, TypeError):
            continue
    return by_step


def digest_text(halves: Iterable[float]) -> str:
    """Format a digest as 16 hexadecimal digits."""
    return "".join(f"{int(half):08x}" for half in halves)


class Compared:
    """Two runs, step by step.

    Attributes:
      by: the fields by which steps are compared: the digest alone, if both have it.
      steps: that both have recorded, with a number to compare.
      differs: the first of them that is not the same, or None.
    """

    def __init__(self, a: Steps, b: Steps):
        self._a = a
        self._b = b
        with_digests = sorted(a.digests.keys() & b.digests.keys())
        self.by = "digest" if with_digests else " and ".join(FIELDS)
        self._of_both = sorted(a.values["loss"].keys() & b.values["loss"].keys())
        comparable = [step for step in self._of_both if self._is_comparable(step)]
        self.steps = with_digests or comparable
        self.differs = next((step for step in self.steps if self._wrong(step)), None)

    def _is_comparable(self, step: int) -> bool:
        """Whether a field of a step is a number in one run at least: two NaNs show nothing."""
        for run in (self._a, self._b):
            for name in FIELDS:
                if not math.isnan(run.values[name][step]):
                    return True
        return False

    def _wrong(self, step: int) -> list[str]:
        """Return the fields that differ at a step, as "loss 2.5 and 2.25". A nan equals a nan."""
        fields = []
        if self.by == "digest":
            x, y = self._a.digests.get(step), self._b.digests.get(step)
            if x != y:
                fields.append(f"digest {x} and {y}{self._where(step)}")
        for name in FIELDS:
            a = self._a.values[name].get(step, math.nan)
            b = self._b.values[name].get(step, math.nan)
            are_nan = math.isnan(a) and math.isnan(b)
            if a != b and not are_nan:
                fields.append(f"{name} {a:.9g} and {b:.9g}")
        return fields

    def arrays(self, step: int) -> list[str]:
        """List the arrays of a step with unlike digests, those of the batch first."""
        a = self._a.arrays.get(step, {})
        b = self._b.arrays.get(step, {})
        return [name for name in a if name in b and a[name] != b[name]]

    def _where(self, step: int) -> str:
        names = self.arrays(step)
        if not names:
            return ""
        listed = ", ".join(names[:SHOWN])
        if len(names) > SHOWN:
            listed += " …"
        return f" ({len(names)} of {len(self._a.arrays.get(step, {}))} arrays: {listed})"

    def summary(self) -> str:
        """One line: identical to a step, or the first step that differs."""
        if not self.steps and self._of_both:
            return (
                f"nothing is compared: of the {len(self._of_both)} steps that {self._a.name} and"
                f" {self._b.name} have both recorded, none has a {self.by} that is a number"
            )
        if not self.steps:
            return f"{self._a.name} and {self._b.name} have recorded no step in common"
        if self.differs is None:
            return (
                f"identical to step {self.steps[-1]}: {len(self.steps)} recorded steps have the"
                f" same {self.by}"
            )
        earlier = [step for step in self.steps if step < self.differs]
        if earlier:
            until = f"the same {self.by} to step {earlier[-1]}"
        else:
            until = "no step before it is recorded in both"
        return f"step {self.differs} differs: {', '.join(self._wrong(self.differs))}; {until}"

    def apart(self) -> str:
        """One line: how far apart the losses and the gradient norms of the steps are."""

        def largest_gap(name: str) -> float:
            a, b = self._a.values[name], self._b.values[name]
            gaps = []
            for step in self.steps:
                gap = abs(a.get(step, math.nan) - b.get(step, math.nan))
                if not math.isnan(gap):
                    gaps.append(gap / max(abs(a[step]), 1e-30))
            return max(gaps, default=math.nan)

        loss, norm = map(largest_gap, FIELDS)
        text = (
            f"the losses of {len(self.steps)} recorded steps are at most {loss:.2g} apart, and the"
            f" gradient norms {norm:.2g}"
        )
        return f"{text}, relative to their size"
