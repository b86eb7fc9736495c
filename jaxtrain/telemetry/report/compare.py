"""Comparison of runs: a ranking, the fields that differ, a sweep as parallel coordinates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.telemetry.report import run as run_lib
from jaxtrain.telemetry.report.markup import esc, number, short, table
from jaxtrain.telemetry.report.run import Run, Score


def section(
    runs: Sequence[Run], scores: Sequence[Score | None], charts: list[dict[str, Any]]
) -> str:
    """Return a ranking, differing fields, and a sweep, which are added to ``charts``."""
    differ = run_lib.differences({str(i): run.config for i, run in enumerate(runs)})
    known = [score for score in scores if score]
    shown = [score if score and score.name == known[0].name else None for score in scores]
    fields = list(differ)[:40]
    name = known[0].name if known else "score"
    columns = [("run", ""), ("state", ""), ("step", "n"), (f"best {name}", "n"), ("last", "n")]
    rows = []
    for i in ranked(scores):
        score = shown[i]
        called = f'<span class="swatch run{i % 8}"></span>{esc(runs[i].name)}'
        best_and_last = (number(score.best), number(score.last)) if score else ("–", "–")
        settings = (esc(short(differ[field][str(i)])) for field in fields)
        rows.append([called, runs[i].state, f"{runs[i].step:,}", *best_and_last, *settings])
    ranking = table([*columns, *((field, "code") for field in fields)], rows)
    more = f"<p class='soft'>{len(differ) - 40} more fields differ.</p>" if len(differ) > 40 else ""
    none = "" if differ else "<p class='soft'>Their configs are equal.</p>"
    return f"<p>Ranked by {esc(name)}.</p>{ranking}{more}{none}" + _parallel(
        runs, differ, scores, charts
    )


def ranked(scores: Sequence[Score | None]) -> list[int]:
    """Return the numbers of the runs, the best first, those without the same score last."""
    known = [score for score in scores if score]

    def place(score: Score | None) -> float:
        return -score.sign * score.best if score and score.name == known[0].name else math.inf

    return sorted(range(len(scores)), key=lambda i: place(scores[i]))


def _parallel(
    runs: Sequence[Run],
    differ: Mapping[str, Mapping[str, Any]],
    scores: Sequence[Score | None],
    charts: list[dict[str, Any]],
) -> str:
    """Parallel coordinates of the fields that a sweep varied, and the score."""
    name, sign = next(((s.name, s.sign) for s in scores if s), ("", 1))
    chosen = [i for i, score in enumerate(scores) if score and score.name == name]
    if len(chosen) < 3:
        return ""
    dimensions = [
        _axis(field, [row[str(i)] for i in chosen]) for field, row in list(differ.items())[:12]
    ]
    if not dimensions:
        return ""
    dimensions.append(_axis(f"best {name}", [s.best for i in chosen if (s := scores[i])]))
    names = [runs[i].name for i in chosen]
    charts.append(
        {
            "kind": "parallel",
            "title": "sweep",
            "dimensions": dimensions,
            "names": names,
            "sign": sign,
        }
    )
    return (
        "<figure><h3>The varied fields and the scores</h3><p class='meaning'>A line is a run: the"
        " darker, the better; green are the best.</p><div class='chart tall' tabindex='0'"
        f" role='img' data-chart='{len(charts) - 1}' aria-label='parallel coordinates of"
        f" {len(names)} runs; the table above has the same numbers'></div></figure>"
    )


def _axis(label: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return an axis of parallel coordinates: each value's place in 0..1, logarithmic if wide."""
    texts = [short(value) for value in values]
    if all(type(v) in (int, float) and math.isfinite(run_lib.number(v)) for v in values):
        x = np.array([run_lib.number(v) for v in values])
        x = np.log(x) if x.min() > 0 and x.max() > 30 * x.min() else x
        x = x / (np.abs(x).max() or 1.0)  # the difference of two numbers may be none
        at = (x - x.min()) / (x.max() - x.min()) if x.max() > x.min() else np.full(len(x), 0.5)
        ends = sorted(
            {
                int(at.argmin()),
                int(at.argmax()),
                *([int(np.abs(at - 0.5).argmin())] if len(set(texts)) < 6 else []),
            }
        )
    else:
        names = sorted(set(texts))
        at = np.array([names.index(text) / max(len(names) - 1, 1) for text in texts])
        ends = [texts.index(name) for name in names[:12]]
    return {
        "label": label,
        "at": [round(float(a), 4) for a in at],
        "texts": texts,
        "ticks": [[round(float(at[i]), 4), texts[i][:24]] for i in ends],
    }
