"""Comparison of runs: a ranking, the fields that differ, a sweep as parallel coordinates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.telemetry.report import run as run_lib
from jaxtrain.telemetry.report.markup import esc, number, short, table
from jaxtrain.telemetry.report.run import Run, Score

MAX_FIELDS = 40  # of the ranking
MAX_AXES = 12  # of the parallel coordinates


def section(
    runs: Sequence[Run], scores: Sequence[Score | None], charts: list[dict[str, Any]]
) -> str:
    """Return a ranking, differing fields, and a sweep, which are added to ``charts``."""
    differ = run_lib.differences({str(i): run.config for i, run in enumerate(runs)})
    name = next((score.name for score in scores if score), "score")
    fields = list(differ)[:MAX_FIELDS]
    columns = [("run", ""), ("state", ""), ("step", "n"), (f"best {name}", "n"), ("last", "n")]
    columns += [(field, "code") for field in fields]
    rows = []
    for i in ranked(scores):
        settings = [differ[field][str(i)] for field in fields]
        rows.append(_ranking_row(i, runs[i], scores[i], name, settings))
    html = f"<p>Ranked by {esc(name)}.</p>{table(columns, rows)}"
    n_hidden = len(differ) - len(fields)
    if n_hidden:
        html += f"<p class='soft'>{n_hidden} more fields differ.</p>"
    if not differ:
        html += "<p class='soft'>Their configs are equal.</p>"
    return html + _parallel(runs, differ, scores, charts)


def _ranking_row(
    i: int, run: Run, score: Score | None, score_name: str, settings: Sequence[Any]
) -> list[str]:
    name = f'<span class="swatch run{i % 8}"></span>{esc(run.name)}'
    best = last = "–"
    if score and score.name == score_name:
        best = number(score.best)
        last = number(score.last)
    values = [esc(short(value)) for value in settings]
    return [name, run.state, f"{run.step:,}", best, last, *values]


def ranked(scores: Sequence[Score | None]) -> list[int]:
    """Return the numbers of the runs, the best first, those without the same score last."""
    name = next((score.name for score in scores if score), "")

    def rank(i: int) -> float:
        score = scores[i]
        return -score.sign * score.best if score and score.name == name else math.inf

    return sorted(range(len(scores)), key=rank)


def _parallel(
    runs: Sequence[Run],
    differ: Mapping[str, Mapping[str, Any]],
    scores: Sequence[Score | None],
    charts: list[dict[str, Any]],
) -> str:
    """Parallel coordinates of the fields that a sweep varied, and the score."""
    first = next((score for score in scores if score), None)
    if first is None:
        return ""
    chosen = []
    best = []
    for i, score in enumerate(scores):
        if score and score.name == first.name:
            chosen.append(i)
            best.append(score.best)
    fields = list(differ.items())[:MAX_AXES]
    if len(chosen) < 3 or not fields:
        return ""
    axes = [_axis(field, [values[str(i)] for i in chosen]) for field, values in fields]
    axes.append(_axis(f"best {first.name}", best))
    names = [runs[i].name for i in chosen]
    charts.append(
        {
            "kind": "parallel",
            "title": "sweep",
            "dimensions": axes,
            "names": names,
            "sign": first.sign,
        }
    )
    return (
        "<figure><h3>The varied fields and the scores</h3><p class='meaning'>A line is a run: the"
        " darker, the better; green are the best.</p><div class='chart tall' tabindex='0'"
        f" role='img' data-chart='{len(charts) - 1}' aria-label='parallel coordinates of"
        f" {len(names)} runs; the table above has the same numbers'></div></figure>"
    )


def _axis(label: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return an axis of parallel coordinates: each value's place in 0..1, and its ticks."""
    texts = [short(value) for value in values]
    if all(map(_is_finite, values)):
        places = _number_places(values)
        ticks = {int(places.argmin()), int(places.argmax())}
        if len(set(texts)) < 6:
            ticks.add(int(np.abs(places - 0.5).argmin()))
        ends = sorted(ticks)
    else:
        names = sorted(set(texts))
        places = np.array([names.index(text) / max(len(names) - 1, 1) for text in texts])
        ends = [texts.index(name) for name in names[:12]]
    return {
        "label": label,
        "at": [round(float(place), 4) for place in places],
        "texts": texts,
        "ticks": [[round(float(places[i]), 4), texts[i][:24]] for i in ends],
    }


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(run_lib.number(value))


def _number_places(values: Sequence[Any]) -> np.ndarray:
    """Return the places of numbers in 0..1, logarithmic if they are far apart."""
    x = np.array([run_lib.number(value) for value in values])
    if x.min() > 0 and x.max() > 30 * x.min():
        x = np.log(x)
    x = x / (np.abs(x).max() or 1.0)  # the difference of two numbers may be none
    if x.max() == x.min():
        return np.full(len(x), 0.5)
    places: np.ndarray = (x - x.min()) / (x.max() - x.min())
    return places
