"""Every metric as a curve, grouped and thinned to its peaks, with its meaning and values."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.telemetry import glossary
from jaxtrain.telemetry.report import records as records_lib
from jaxtrain.telemetry.report import run as run_lib
from jaxtrain.telemetry.report.markup import esc, grid, number
from jaxtrain.telemetry.report.records import Records
from jaxtrain.telemetry.report.run import Run
from loaders.io import files

POINTS = 110_000  # of all curves together: 1.6 MB
MAX_POINTS = 2000  # of a curve
RATES = (
    *(
        "steps_per_second",
        "examples_per_second",
        "mfu",
        "mfu_full_attention",
        "data_wait_share",
        "goodput",
    ),
    *("rows_asked_per_second", "rows_given_per_second", "cores_missing"),
)
HIDDEN = ("step", "eta_seconds", "failures")
GROUPS = (
    "Results",
    "Losses and metrics",
    "Speed",
    "Gradients and parameters",
    "Saves",
    "Order of the examples",
)


def section(
    runs: Sequence[Run], records: Sequence[Records], charts: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """(Group, figures) of each metric of ``records`` by run, with the curves in ``charts``."""
    found: dict[tuple[str, str], list[tuple[int, str, np.ndarray, np.ndarray]]] = {}
    for i, of_run in enumerate(records):
        for split, columns in of_run.splits.items():
            for name, values in columns.items():
                if (
                    name in HIDDEN
                    or name.startswith("digest_")
                    or (split == "data" and name.endswith("_expected"))
                ):
                    continue
                if np.isfinite(values).any() and (
                    name not in ("skipped", "miscomputed") or np.nansum(values)
                ):
                    curves = found.setdefault(
                        (name, "" if split in ("train", "test") else split), []
                    )
                    curves.append((i, split, columns["step"], values))
                    expected = columns.get(f"{name}_expected")
                    if expected is not None and np.isfinite(expected).any():
                        curves.append((i, "expected", columns["step"], expected))
    for i, run in enumerate(runs):
        if rates := _schedule(run):
            found.setdefault(("learning_rate", ""), []).append((i, "schedule", *rates))
    most = max(min(MAX_POINTS, POINTS // max(sum(map(len, found.values())), 1)), 4)
    groups: dict[str, list[tuple[str, str]]] = {}
    tested = {
        place
        for place, curves in found.items()
        if any(split == "test" for _, split, _, _ in curves)
    }
    for place in sorted(
        found, key=lambda place: (place[0] != "loss", place[0] != "learning_rate", place[0])
    ):
        name, split = place
        group = _group(name, split, place in tested)
        drawn: list[dict[str, Any]] = []
        for i, of, step, values in sorted(found[place], key=lambda c: (c[0], c[1] != "train")):
            x, y = records_lib.thinned(step, values, most)
            drawn.append(
                {
                    "run": i,
                    "split": of,
                    "x": [int(s) for s in x],
                    "y": [float(f"{v:.5g}") for v in y],
                }
            )
        restarts = sorted({s.first for s in runs[0].starts if s.first}) if len(runs) == 1 else []
        title = f"{name} ({split})" if split not in ("", "data", "save", "verify") else name
        spikes = (
            [s for of in records for s, _, _ in records_lib.spikes(of.splits.get("train", {}))]
            if name == "loss"
            else []
        )
        charts.append(
            {
                "title": title,
                "curves": drawn,
                "restarts": restarts,
                "spikes": spikes if len(runs) == 1 else [],
            }
        )
        groups.setdefault(group, []).append(
            (_figure(runs, len(charts) - 1, title, name, split, drawn), name)
        )
    for group in GROUPS:
        if figures := groups.get(group):
            plain = [
                text
                for text, name in figures
                if not re.match(r"(grad|update|param)_norm_(?!before$|after$)", name)
            ]
            inner = [text for text, name in figures if text not in plain]
            more = (
                f"<details><summary>{len(inner)} norms of parts of the"
                f" model</summary>{grid(inner)}</details>"
            )
            yield group, (grid(plain) if plain else "") + (more if inner else "")


def _figure(
    runs: Sequence[Run],
    chart: int,
    title: str,
    name: str,
    split: str,
    curves: Sequence[Mapping[str, Any]],
) -> str:
    workload = str(runs[0].setting("workload", ""))
    meaning = glossary.meaning(name, workload=workload, split=split or "train")
    meaning = (
        "of the schedule, as optim.lr and its warm-up and decay give it"
        if name == "learning_rate"
        else meaning
    )
    values = [
        f"{runs[c['run']].name + ' ' if len(runs) > 1 else ''}{c['split']} from {number(c['y'][0])}"
        f" to {number(c['y'][-1])} at step {c['x'][-1]}, between {number(min(c['y']))} and"
        f" {number(max(c['y']))}"
        for c in curves[:8]
    ]
    label = f"{title} by step: {'; '.join(values)}"
    last = ", ".join(f"{c['split']} {number(c['y'][-1])}" for c in curves) if len(runs) == 1 else ""
    return (
        f'<figure><h3>{esc(title)} <span class="soft">{esc(last)}</span></h3><p'
        f' class="meaning">{esc(meaning)}</p><div class="chart" tabindex="0" role="img"'
        f' data-chart="{chart}" aria-label="{esc(label)}"></div></figure>'
    )


def _schedule(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Return steps and learning rates of schedule.json, or None if it cannot be read."""
    try:
        found = files.read_json(run.file("schedule.json"))
        step, rate = ([run_lib.number(x) for x in found[name][:5000]] for name in ("step", "lr"))
    except (files.FileError, OSError, KeyError, TypeError):
        return None
    known = [
        (s, r)
        for s, r in zip(step, rate, strict=False)
        if math.isfinite(s) and math.isfinite(r) and 0 <= s < 1 << 53
    ]
    return (np.array([s for s, _ in known]), np.array([r for _, r in known])) if known else None


def _group(name: str, split: str, tested: bool) -> str:
    if split == "save":
        return "Saves"
    if split and split != "verify":
        return "Order of the examples"
    if name in RATES:
        return "Speed"
    if re.match(r"(grad|update|param)_norm", name) or name in ("skipped", "miscomputed"):
        return "Gradients and parameters"
    return "Results" if tested or name in ("loss", "learning_rate") else "Losses and metrics"
