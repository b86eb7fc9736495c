"""Every metric as a curve, grouped and thinned to its peaks, with its meaning and values."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    "steps_per_second",
    "examples_per_second",
    "mfu",
    "mfu_full_attention",
    "mfu_documents",
    "data_wait_share",
    "goodput",
    "rows_asked_per_second",
    "rows_given_per_second",
    "cores_missing",
)
HIDDEN = ("step", "eta_seconds", "failures")
COUNTS = ("skipped", "miscomputed")  # shown if one is not zero
PART_OF_A_NORM = re.compile(r"(grad|update|param)_norm_(?!before$|after$)")
GROUPS = (
    "Results",
    "Losses and metrics",
    "Speed",
    "Gradients and parameters",
    "Saves",
    "Order of the examples",
)


class Curve(NamedTuple):
    run: int  # its place on the page
    split: str  # train, test, expected, …
    step: np.ndarray
    values: np.ndarray


Chart = tuple[str, str]  # a metric, and its split unless that is train or test


def section(
    runs: Sequence[Run], records: Sequence[Records], charts: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """(Group, figures) of each metric of ``records`` by run, with the curves in ``charts``."""
    curves = _curves(runs, records)
    n_curves = max(sum(map(len, curves.values())), 1)
    n_points = max(min(MAX_POINTS, POINTS // n_curves), 4)
    restarts: list[int] = []
    spikes: list[int] = []
    if len(runs) == 1:
        restarts = sorted({start.first for start in runs[0].starts if start.first})
        train = records[0].splits.get("train", {})
        spikes = [step for step, _, _ in records_lib.spikes(train)]
    figures: dict[str, list[tuple[str, str]]] = {}  # group -> (metric, figure)
    for chart in sorted(curves, key=_order):
        name, split = chart
        drawn = [_thinned(curve, n_points) for curve in sorted(curves[chart], key=_train_first)]
        title = name if split in ("", "data", "save", "verify") else f"{name} ({split})"
        charts.append(
            {
                "title": title,
                "curves": drawn,
                "restarts": restarts,
                "spikes": spikes if name == "loss" else [],
            }
        )
        is_tested = any(curve.split == "test" for curve in curves[chart])
        group = figures.setdefault(_group(name, split, is_tested), [])
        group.append((name, _figure(runs, len(charts) - 1, title, chart, drawn)))
    for name in GROUPS:
        if name in figures:
            yield name, _group_html(figures[name])


def _order(chart: Chart) -> tuple[bool, bool, str]:
    name, _ = chart
    return name != "loss", name != "learning_rate", name


def _train_first(curve: Curve) -> tuple[int, bool]:
    return curve.run, curve.split != "train"


def _curves(runs: Sequence[Run], records: Sequence[Records]) -> dict[Chart, list[Curve]]:
    """Return the curves of each chart: metrics of records, and the schedules of learning rates."""
    curves: dict[Chart, list[Curve]] = {}
    for i, run_records in enumerate(records):
        for split, columns in run_records.splits.items():
            chart_split = "" if split in ("train", "test") else split
            for name, values in columns.items():
                if not _is_shown(name, split, values):
                    continue
                chart = curves.setdefault((name, chart_split), [])
                chart.append(Curve(i, split, columns["step"], values))
                expected = columns.get(f"{name}_expected")
                if expected is not None and np.isfinite(expected).any():
                    chart.append(Curve(i, "expected", columns["step"], expected))
    for i, run in enumerate(runs):
        schedule = _schedule(run)
        if schedule:
            chart = curves.setdefault(("learning_rate", ""), [])
            chart.append(Curve(i, "schedule", *schedule))
    return curves


def _is_shown(name: str, split: str, values: np.ndarray) -> bool:
    if name in HIDDEN or name.startswith("digest_") or not np.isfinite(values).any():
        return False
    if split == "data" and name.endswith("_expected"):
        return False  # beside the curve that it belongs to
    return name not in COUNTS or bool(np.nansum(values))


def _thinned(curve: Curve, n_points: int) -> dict[str, Any]:
    """Return a curve of ``n_points`` at most, as the page's script reads it."""
    step, values = records_lib.thinned(curve.step, curve.values, n_points)
    return {
        "run": curve.run,
        "split": curve.split,
        "x": [int(x) for x in step],
        "y": [float(f"{y:.5g}") for y in values],
    }


def _group_html(figures: Sequence[tuple[str, str]]) -> str:
    """Lay out the figures of a group, those of parts of the model folded away."""
    plain: list[str] = []
    parts: list[str] = []
    for name, figure in figures:
        if PART_OF_A_NORM.match(name):
            parts.append(figure)
        else:
            plain.append(figure)
    html = grid(plain) if plain else ""
    if parts:
        summary = f"<summary>{len(parts)} norms of parts of the model</summary>"
        html += f"<details>{summary}{grid(parts)}</details>"
    return html


def _figure(
    runs: Sequence[Run],
    number_on_page: int,
    title: str,
    chart: Chart,
    curves: Sequence[Mapping[str, Any]],
) -> str:
    name, split = chart
    if name == "learning_rate":
        meaning = "of the schedule, as optim.lr and its warm-up and decay give it"
    else:
        workload = str(runs[0].setting("workload", ""))
        meaning = glossary.meaning(name, workload=workload, split=split or "train")
    is_of_one_run = len(runs) == 1
    descriptions = []
    last_values = []
    for curve in curves:
        run_name = "" if is_of_one_run else f"{runs[curve['run']].name} "
        descriptions.append(run_name + _description(curve))
        last_values.append(f"{curve['split']} {number(curve['y'][-1])}")
    label = f"{title} by step: {'; '.join(descriptions[:8])}"
    last = ", ".join(last_values) if is_of_one_run else ""
    return (
        f'<figure><h3>{esc(title)} <span class="soft">{esc(last)}</span></h3><p'
        f' class="meaning">{esc(meaning)}</p><div class="chart" tabindex="0" role="img"'
        f' data-chart="{number_on_page}" aria-label="{esc(label)}"></div></figure>'
    )


def _description(curve: Mapping[str, Any]) -> str:
    """Describe a curve in words, for a reader who cannot see it."""
    y = curve["y"]
    first, last, low, high = number(y[0]), number(y[-1]), number(min(y)), number(max(y))
    return (
        f"{curve['split']} from {first} to {last} at step {curve['x'][-1]}, between {low} and"
        f" {high}"
    )


def _schedule(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Return steps and learning rates of schedule.json, or None if it cannot be read."""
    try:
        columns = files.read_json(run.file("schedule.json"))
        steps = [run_lib.number(x) for x in columns["step"][:5000]]
        rates = [run_lib.number(x) for x in columns["lr"][:5000]]
    except (files.FileError, OSError, KeyError, TypeError):
        return None
    points = []
    for step, rate in zip(steps, rates, strict=False):
        if math.isfinite(step) and math.isfinite(rate) and 0 <= step < 1 << 53:
            points.append((step, rate))
    if not points:
        return None
    x, y = np.array(points).T
    return x, y


def _group(name: str, split: str, is_tested: bool) -> str:
    if split == "save":
        return "Saves"
    if split and split != "verify":
        return "Order of the examples"
    if name in RATES:
        return "Speed"
    if re.match(r"(grad|update|param)_norm", name) or name in COUNTS:
        return "Gradients and parameters"
    if is_tested or name in ("loss", "learning_rate"):
        return "Results"
    return "Losses and metrics"
