"""Find the first step at which two runs differ, and which fields, versions and arrays differ.

    jaxtrain diff RUN RUN

    jaxtrain diff runs/xcm-demo runs/longer

Steps are compared by their digests, if both runs have config.metrics.digest, and else by loss and
gradient norm. The arrays are those of the first checkpoints of one step that differ. Ends with 0 if
the runs are identical as far as both came, else with 1.
"""

import contextlib
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.commands import arguments

if TYPE_CHECKING:
    from jaxtrain.arrays.stored import Stored
    from jaxtrain.telemetry.report.run import Run


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain diff", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs=2, help="a run's workdir")
    args = parser.parse_args(argv)

    from jaxtrain.telemetry.report import run as run_lib
    from jaxtrain.telemetry.report import step_differences

    first, second = map(run_lib.open_run, args.runs)
    compared = step_differences.Compared(
        step_differences.read(first), step_differences.read(second)
    )
    print(*_settings(first, second, compared.differs), compared.summary(), sep="\n")
    if compared.differs is None:
        return 0 if compared.steps else 1
    print(*_arrays(first, second), sep="\n")
    return 1


def _settings(a: "Run", b: "Run", step: int | None) -> list[str]:
    """Return the fields of the configs that differ, and the facts of the starts that made a step.

    ``step``: the first that differs. None = the newest.
    """
    from jaxtrain.arrays import saved_steps

    lines = []
    for run in (a, b):
        if not run.config:
            lines.append(
                f"{run.name}: config.json is missing or cannot be read, so no field is compared"
            )
    for name, old, new in saved_steps.changes(a.config, b.config):
        if name != "workdir":
            lines.append(f"config.{name}: {old} → {new}")
    facts_a, facts_b = _facts(a, step), _facts(b, step)
    for name, old, new in saved_steps.changes(facts_a, facts_b):
        if name.partition(".")[0] not in ("source", "overrides"):
            lines.append(f"start.{name}: {old} → {new}")
    return lines


def _facts(run: "Run", step: int | None) -> Mapping[str, Any]:
    if not run.starts:
        return {}
    start = run.starts[-1] if step is None else run.start_of(step)
    return start.facts if start else {}


def _arrays(a: "Run", b: "Run") -> list[str]:
    """Return the arrays that differ in the first intact checkpoints of one step that differ."""
    checkpoints_a, checkpoints_b = a.checkpoints(), b.checkpoints()
    steps_of_both = sorted(checkpoints_a.keys() & checkpoints_b.keys())
    damage: list[str] = []
    for step in steps_of_both:
        problems = _damage(checkpoints_a[step], checkpoints_b[step])
        damage += problems
        if problems:
            continue
        lines = _differences(a, b, step)
        if lines:
            return [*damage, *lines]
    steps = ", ".join(map(str, steps_of_both)) or "none"
    return [*damage, f"no checkpoint of one step differs; steps that both runs have kept: {steps}"]


def _damage(*checkpoints: pathlib.Path) -> list[str]:
    """Return a line for each checkpoint that differs from its checksums."""
    from jaxtrain.arrays import checksums, source

    lines = []
    for checkpoint in checkpoints:
        with contextlib.suppress(checksums.NoManifest):
            problems = source.find(str(checkpoint), verified=False).damage()
            if problems:
                lines.append(f"{checkpoint} is damaged, and not compared: {'; '.join(problems)}")
    return lines


def _differences(a: "Run", b: "Run", step: int) -> list[str]:
    """Return how the arrays of two checkpoints of one step differ, or nothing."""
    from jaxtrain.arrays import source

    arrays_a = source.find(str(a.checkpoints()[step]), verified=False).arrays()
    arrays_b = source.find(str(b.checkpoints()[step]), verified=False).arrays()
    paths_of_both = [path for path in arrays_a if path in arrays_b]
    lines = []
    for path in paths_of_both:
        difference = _difference(arrays_a[path], arrays_b[path])
        if difference:
            lines.append(f"  {path}: {difference}")
    if not lines and arrays_a.keys() == arrays_b.keys():
        return []
    summary = f"checkpoints of step {step}: {len(lines)} of {len(paths_of_both)} arrays differ"
    if len(lines) > 10:
        lines = [*lines[:10], f"  and {len(lines) - 10} more"]
    only_a = [path for path in arrays_a if path not in arrays_b]
    only_b = [path for path in arrays_b if path not in arrays_a]
    return [summary, *lines, *_only(a, only_a), *_only(b, only_b)]


def _difference(x: "Stored", y: "Stored") -> str:
    """Describe how an array differs in two checkpoints, or return ""."""
    from jaxtrain.arrays import saved_steps

    if x.shape != y.shape:
        return f"its shape is {list(x.shape)} and {list(y.shape)}"
    difference = saved_steps.Difference(x, y)
    if difference.equal:
        return ""
    share = difference.unequal / max(math.prod(x.shape), 1)
    return f"{share:.2%} of its values differ, by {difference.largest:.3g} at most"


def _only(run: "Run", paths: list[str]) -> list[str]:
    """Return a line on the arrays that only ``run`` has."""
    if not paths:
        return []
    ellipsis = " …" if len(paths) > 5 else ""
    return [f"  only {run.name} has {', '.join(paths[:5])}{ellipsis}"]
