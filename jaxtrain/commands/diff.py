"""Find the first step at which two runs differ, and which fields, versions and arrays differ.

    jaxtrain diff RUN RUN

    jaxtrain diff runs/xcm runs/xcm-again

Steps are compared by their digests, if both runs have config.metrics.digest, and else by loss and
gradient norm. The arrays are those of the first checkpoints of one step that differ. Ends with 0 if
the runs are identical as far as both came, else with 1.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxtrain.commands import arguments


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain diff", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs=2, help="a run's workdir")
    args = parser.parse_args(argv)

    from jaxtrain.telemetry.report import run as run_lib
    from jaxtrain.telemetry.report import steps

    first, second = map(run_lib.open_run, args.runs)
    compared = steps.Compared(steps.read(first), steps.read(second))
    for line in (*_settings(first, second), compared.summary()):
        print(line)
    if compared.differs is None:
        return 0 if compared.steps else 1
    for line in _arrays(first, second):
        print(line)
    return 1


def _settings(a: Any, b: Any) -> list[str]:
    """Return the fields of the configs, and the facts of the newest starts, that differ."""
    from jaxtrain.arrays import saved_steps

    facts = [run.starts[-1].facts if run.starts else {} for run in (a, b)]
    changes = [("config", *one) for one in saved_steps.changes(a.config, b.config) if one[0] != "workdir"]
    changes += [
        ("start", *one) for one in saved_steps.changes(*facts) if one[0].partition(".")[0] not in ("source", "overrides")
    ]
    unread = [
        f"{run.name}: config.json is missing or cannot be read, so no field is compared" for run in (a, b) if not run.config
    ]
    return unread + [f"{kind}.{name}: {old} → {new}" for kind, name, old, new in changes]


def _arrays(a: Any, b: Any) -> list[str]:
    """Return the arrays that differ in the first checkpoints of one step that are not equal."""
    from jaxtrain.arrays import source

    kept = [run.checkpoints() for run in (a, b)]
    both = sorted(kept[0].keys() & kept[1].keys())
    for step in both:
        one, other = (source.find(str(saved[step])).arrays() for saved in kept)
        shared = [path for path in one if path in other]
        lines = [line for path in shared if (line := _difference(path, one[path], other[path]))]
        if lines or one.keys() != other.keys():
            more = [f"  and {len(lines) - 10} more"] if len(lines) > 10 else []
            for run, own, others in ((a, one, other), (b, other, one)):
                alone = [path for path in own if path not in others]
                more += [f"  only {run.name} has {', '.join(alone[:5])}{' …' * (len(alone) > 5)}"] if alone else []
            return [f"checkpoints of step {step}: {len(lines)} of {len(shared)} arrays differ", *lines[:10], *more]
    return [f"no checkpoint of one step differs; steps that both runs have kept: {', '.join(map(str, both)) or 'none'}"]


def _difference(path: str, a: Any, b: Any) -> str:
    """Say how an array differs in two checkpoints, or return ""."""
    from jaxtrain.arrays import saved_steps

    if a.shape != b.shape:
        return f"  {path}: its shape is {list(a.shape)} and {list(b.shape)}"
    found = saved_steps.Difference(a, b)
    if found.equal:
        return ""
    return f"  {path}: {found.unequal / max(math.prod(a.shape), 1):.2%} of its values differ, by {found.largest:.3g} at most"
