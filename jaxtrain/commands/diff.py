"""Find the first step at which two runs differ, and which fields, versions and arrays differ.

    jaxtrain diff RUN RUN

    jaxtrain diff runs/xcm runs/xcm-again

Steps are compared by their digests, if both runs have config.metrics.digest, and else by loss and
gradient norm. The arrays are those of the first checkpoints of one step that differ. Ends with 0 if
the runs are identical as far as both came, else with 1.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain.commands import arguments

if TYPE_CHECKING:
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
    print(*_settings(first, second), compared.summary(), sep="\n")
    if compared.differs is None:
        return 0 if compared.steps else 1
    print(*_arrays(first, second), sep="\n")
    return 1


def _settings(a: "Run", b: "Run") -> list[str]:
    """Return the fields of the configs, and the facts of the newest starts, that differ."""
    from jaxtrain.arrays import saved_steps

    facts_a, facts_b = (run.starts[-1].facts if run.starts else {} for run in (a, b))
    changes = [
        ("config", *change)
        for change in saved_steps.changes(a.config, b.config)
        if change[0] != "workdir"
    ]
    changes += [
        ("start", *change)
        for change in saved_steps.changes(facts_a, facts_b)
        if change[0].partition(".")[0] not in ("source", "overrides")
    ]
    why = "config.json is missing or cannot be read, so no field is compared"
    unread = [f"{run.name}: {why}" for run in (a, b) if not run.config]
    return unread + [f"{kind}.{name}: {old} → {new}" for kind, name, old, new in changes]


def _arrays(a: "Run", b: "Run") -> list[str]:
    """Return the arrays that differ in the first checkpoints of one step that are not equal."""
    from jaxtrain.arrays import saved_steps, source

    kept = [run.checkpoints() for run in (a, b)]
    both = sorted(kept[0].keys() & kept[1].keys())
    for step in both:
        one, other = (source.find(str(saved[step])).arrays() for saved in kept)
        shared = [path for path in one if path in other]
        lines = []
        for path in shared:
            x, y = one[path], other[path]
            if x.shape != y.shape:
                lines.append(f"  {path}: its shape is {list(x.shape)} and {list(y.shape)}")
                continue
            found = saved_steps.Difference(x, y)
            if not found.equal:
                share = found.unequal / max(math.prod(x.shape), 1)
                lines.append(
                    f"  {path}: {share:.2%} of its values differ, by {found.largest:.3g} at most"
                )
        if lines or one.keys() != other.keys():
            more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
            for run, own, others in ((a, one, other), (b, other, one)):
                alone = [path for path in own if path not in others]
                more += (
                    [f"  only {run.name} has {', '.join(alone[:5])}{' …' * (len(alone) > 5)}"]
                    if alone
                    else []
                )
            return [
                f"checkpoints of step {step}: {len(lines)} of {len(shared)} arrays differ",
                *lines[:10],
                *more,
            ]
    return [
        "no checkpoint of one step differs; steps that both runs have kept:"
        f" {', '.join(map(str, both)) or 'none'}"
    ]
