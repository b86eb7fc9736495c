"""Counts of classes in an evaluation, as a line of workdir/classes.jsonl, and as tables of a page.

A line has the step, ``n`` rows, and three lists with a number for each class: ``rows`` of it,
``right`` ones that were answered with it, and ``answers`` that were it. If confusions are counted,
the pairs [class, answer, rows] that were ``confused`` most.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.telemetry.report import run as run_lib
from jaxtrain.telemetry.report.markup import esc, slider, spread, table
from jaxtrain.telemetry.report.run import Run

FILE = "classes.jsonl"
MAX_CLASSES = 512  # classes of a line: those with the most rows
MAX_PAIRS = 200  # of a line
EVALUATIONS = 6  # of a page
SHOWN, MATRIX = 30, 20  # classes of a table, and of a matrix
COLUMNS = [
    ("class", ""),
    ("rows", "n"),
    ("right", "n"),
    ("answers", "n"),
    ("recall", ""),
    ("precision", ""),
    ("F1", "n"),
]
Z = 1.959964  # of a normal distribution's 95 %


def line(counts: np.ndarray, confusions: np.ndarray | None) -> dict[str, Any]:
    """Return the line of counts, which `jaxtrain.types.COUNTS` describes."""
    rows, right, answers = np.rint(counts).astype(int)
    found: dict[str, Any] = {"n": int(rows.sum()), "classes": len(rows)}
    if confusions is not None:
        wrong = np.rint(confusions).astype(int)
        np.fill_diagonal(wrong, 0)
        most = [
            int(i)
            for i in np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS]
            if wrong.flat[i]
        ]
        found["confused"] = [[*divmod(i, len(wrong)), int(wrong.flat[i])] for i in most]
    if len(rows) > MAX_CLASSES:
        kept = np.sort(np.argsort(-rows, kind="stable")[:MAX_CLASSES])
        found["of"] = kept.tolist()
        rows, right, answers = rows[kept], right[kept], answers[kept]
    return {**found, "rows": rows.tolist(), "right": right.tolist(), "answers": answers.tolist()}


def read(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Step -> its line, by step. Lines that are none are left out."""
    found = {record["step"]: record for record in run_lib.objects(path) if _is_line(record)}
    return {step: found[step] for step in sorted(found)}


def _is_line(record: Mapping[str, Any]) -> bool:
    if not all(_is_count(record.get(name)) for name in ("n", "classes")):
        return False
    lists: list[Any] = [record.get(name) for name in ("rows", "right", "answers")]
    if not all(
        isinstance(x, list) and 0 < len(x) <= MAX_CLASSES and all(map(_is_count, x)) for x in lists
    ):
        return False
    rows, right, answers = lists
    of, pairs = record.get("of", list(range(len(rows)))), record.get("confused", [])
    return (
        isinstance(of, list)
        and isinstance(pairs, list)
        and len(rows) == len(right) == len(answers) == len(of)
        and all(map(_is_count, of))
        and all(t <= r and t <= a for r, t, a in zip(rows, right, answers, strict=True))
        and sum(rows) <= record["n"]
        and len(rows) <= record["classes"]
        and len(pairs) <= MAX_PAIRS
        and all(
            isinstance(p, list)
            and len(p) == 3
            and all(map(_is_count, p))
            and max(p[:2]) < len(rows)
            for p in pairs
        )
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def interval(right: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of the share ``right`` of ``of`` (Wilson 1927), or nan, nan."""
    if not of:
        return math.nan, math.nan
    p, n = right / of, of
    middle, half = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return max((middle - half) / (1 + Z * Z / n), 0.0), min((middle + half) / (1 + Z * Z / n), 1.0)


def section(run: Run) -> str:
    """Return a run's evaluations behind a slider."""
    if not (by_step := read(run.path / FILE)):
        return ""
    steps = spread(list(by_step), EVALUATIONS)
    names = _names(run)
    sets = [
        '<div data-name="step'
        f' {step:,}">{_evaluation(by_step[step], names, whole=step == steps[-1])}</div>'
        for step in steps
    ]
    return (
        slider("classes-of", len(sets), "classes") + f'<div id="classes-of">{"".join(sets)}</div>'
    )


def _names(run: Run) -> list[str]:
    given = run.setting("model.class_names")
    return [str(name) for name in given] if isinstance(given, list) else []


def _name(names: Sequence[str], record: Mapping[str, Any], i: int) -> str:
    own = record["of"][i] if "of" in record else i
    return names[own] if own < len(names) else f"class {own}"


def _evaluation(record: Mapping[str, Any], names: Sequence[str], *, whole: bool) -> str:
    """Return the tables of one evaluation. ``whole``: with every class."""
    rows, right, answers = (record[name] for name in ("rows", "right", "answers"))
    known = [i for i in range(len(rows)) if rows[i] or answers[i]]
    recalls = [right[i] / rows[i] for i in known if rows[i]]
    mean = f"{sum(recalls) / len(recalls):.1%}" if recalls else "–"
    if "confused" in record:
        low, high = interval(sum(right), record["n"])
        share = f"{sum(right) / record['n']:.1%}" if record["n"] else "–"
        text = (
            f"Of {record['n']:,} rows <b>{share}</b> were answered right (95 % interval {low:.1%}"
            f" to {high:.1%}); "
        )
    else:
        text = f"{record['n']:,} labels; "
    text += f"the mean of the recalls of {len(recalls):,} classes is <b>{mean}</b>."
    if left := record["classes"] - len(rows):
        text += f" {left:,} classes with fewer rows are left out."
    order = sorted(known, key=lambda i: (_f1(rows[i], right[i], answers[i]), -rows[i], i))
    lines = [_line(_name(names, record, i), rows[i], right[i], answers[i]) for i in order]
    more = ""
    if whole and len(lines) > SHOWN:
        more = (
            f"<details><summary>{len(lines) - SHOWN:,} more"
            f" classes</summary>{table(COLUMNS, lines[SHOWN:])}</details>"
        )
    note = "Intervals of 95 % by Wilson; the classes with the lowest F1 come first."
    shown = (
        f"<h3>Scores by class</h3>{table(COLUMNS, lines[:SHOWN])}<p class='soft'>{note}</p>{more}"
        if lines
        else ""
    )
    return f"<p>{text}</p>{_matrix(record, names)}{shown}"


def _f1(rows: int, right: int, answers: int) -> float:
    return 2 * right / (rows + answers) if rows + answers else 0.0


def _line(name: str, rows: int, right: int, answers: int) -> list[str]:
    counts = (f"{x:,}" for x in (rows, right, answers))
    shares = (_range(right, of) for of in (rows, answers))
    return [esc(name[:80]), *counts, *shares, f"{_f1(rows, right, answers):.2f}"]


def _range(right: int, of: int) -> str:
    """Return a share with its interval, in numbers and drawn."""
    if not of:
        return '<span class="soft">–</span>'
    low, high = interval(right, of)
    return (
        '<span class="range"><i'
        f' style="left:{100 * low:.0f}%;width:{100 * (high - low):.0f}%"></i><b'
        f' style="left:{100 * right / of:.0f}%"></b></span>{right / of:.0%} <span'
        f' class="soft">{low:.0%}–{high:.0%}</span>'
    )


def _matrix(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Rows of a class by answer: of all classes if they are few, else of the most confused ones."""
    rows, right, pairs = record["rows"], record["right"], record.get("confused", [])
    wrong = dict.fromkeys(range(len(rows)), 0)
    for own, answer, count in pairs:
        wrong[own] += count
        wrong[answer] += count
    chosen = sorted(sorted(wrong, key=lambda i: (-wrong[i], i))[:MATRIX])
    if not pairs:
        return ""
    counts = {(own, answer): count for own, answer, count in pairs} | {
        (i, i): right[i] for i in chosen
    }
    called = {i: _name(names, record, i) for i in chosen}
    head = "".join(
        f'<th scope="col" title="{esc(called[i])}">{esc(called[i][:12])}</th>' for i in chosen
    )
    body = []
    for i in chosen:
        cells = []
        for j in chosen:
            count = counts.get((i, j), 0)
            share = count / rows[i] if rows[i] else 0.0
            kind = "hit" if i == j else "miss"
            cells.append(
                f'<td class="{kind}" style="--s:{70 * math.sqrt(share):.0f}%">{count}</td>'
                if count
                else "<td></td>"
            )
        body.append(f'<tr><th scope="row">{esc(called[i][:24])}</th>{"".join(cells)}</tr>')
    which = (
        ""
        if len(chosen) == record["classes"]
        else f"the {len(chosen)} classes that are confused most; "
    )
    note = (
        f"A row is a class, a column an answer: {which}the darker, the larger the share of the row."
    )
    return (
        f'<h3>Confusions</h3><p class="meaning">{note}</p><div class="scroll"><table'
        f' class="matrix"><tr><td></td>{head}</tr>'
        f"{''.join(body)}</table></div>"
    )
