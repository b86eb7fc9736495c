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
MAX_NAME = 80  # characters of a class's name
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
    record: dict[str, Any] = {"n": int(rows.sum()), "classes": len(rows)}
    if confusions is not None:
        record["confused"] = _most_confused(confusions)
    if len(rows) > MAX_CLASSES:
        largest = np.argsort(-rows, kind="stable")[:MAX_CLASSES]
        classes = np.sort(largest)
        record["of"] = classes.tolist()
        rows = rows[classes]
        right = right[classes]
        answers = answers[classes]
    record["rows"] = rows.tolist()
    record["right"] = right.tolist()
    record["answers"] = answers.tolist()
    return record


def _most_confused(confusions: np.ndarray) -> list[list[int]]:
    """Return the pairs [class, answer, rows] of wrong answers, the most frequent first."""
    wrong = np.rint(confusions).astype(int)
    np.fill_diagonal(wrong, 0)
    pairs = []
    for place in np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS]:
        count = int(wrong.flat[place])
        if count:
            label, answer = divmod(int(place), len(wrong))
            pairs.append([label, answer, count])
    return pairs


def read(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Step -> its line, by step. Lines that are none are left out."""
    lines = {record["step"]: record for record in run_lib.objects(path) if _is_line(record)}
    return dict(sorted(lines.items()))


def _is_line(record: Mapping[str, Any]) -> bool:
    if not _is_count(record.get("n")) or not _is_count(record.get("classes")):
        return False
    lists: list[Any] = [record.get(name) for name in ("rows", "right", "answers")]
    if not all(map(_are_counts, lists)):
        return False
    rows, right, answers = lists
    n_classes = len(rows)
    if not len(right) == len(answers) == n_classes <= record["classes"]:
        return False
    if sum(rows) > record["n"]:
        return False
    for n_rows, n_right, n_answers in zip(rows, right, answers, strict=True):
        if n_right > min(n_rows, n_answers):
            return False
    classes = record.get("of", list(range(n_classes)))
    if not _are_counts(classes) or len(classes) != n_classes:
        return False
    pairs = record.get("confused", [])
    if not isinstance(pairs, list) or len(pairs) > MAX_PAIRS:
        return False
    return all(_is_pair(pair, n_classes) for pair in pairs)


def _is_pair(pair: object, n_classes: int) -> bool:
    """Whether a value of a file is [class, answer, rows]."""
    if not isinstance(pair, list) or len(pair) != 3 or not all(map(_is_count, pair)):
        return False
    label, answer, _ = pair
    return bool(label < n_classes and answer < n_classes)


def _are_counts(values: Any) -> bool:
    """Whether a value of a file is a list with a count for each class of a line."""
    is_list = isinstance(values, list) and 0 < len(values) <= MAX_CLASSES
    return is_list and all(map(_is_count, values))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def interval(right: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of the share ``right`` of ``of`` (Wilson 1927), or nan, nan."""
    if not of:
        return math.nan, math.nan
    share = right / of
    middle = share + Z * Z / (2 * of)
    half = Z * math.sqrt(share * (1 - share) / of + Z * Z / (4 * of * of))
    scale = 1 + Z * Z / of
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)


def section(run: Run) -> str:
    """Return a run's evaluations behind a slider."""
    by_step = read(run.path / FILE)
    if not by_step:
        return ""
    steps = spread(list(by_step), EVALUATIONS)
    names = _class_names(run)
    sets = []
    for step in steps:
        tables = _evaluation(by_step[step], names, with_all_classes=step == steps[-1])
        sets.append(f'<div data-name="step {step:,}">{tables}</div>')
    control = slider("classes-of", len(sets), "classes")
    return control + f'<div id="classes-of">{"".join(sets)}</div>'


def _class_names(run: Run) -> list[str]:
    names = run.setting("model.class_names")
    return [str(name) for name in names] if isinstance(names, list) else []


def _class_name(names: Sequence[str], record: Mapping[str, Any], i: int) -> str:
    """Return the name of the class in place ``i`` of a line."""
    label = record["of"][i] if "of" in record else i
    return names[label] if label < len(names) else f"class {label}"


def _evaluation(record: Mapping[str, Any], names: Sequence[str], *, with_all_classes: bool) -> str:
    """Return the tables of one evaluation. Without all classes, those of the lowest F1."""
    rows = record["rows"]
    right = record["right"]
    answers = record["answers"]
    tested = [i for i in range(len(rows)) if rows[i] or answers[i]]
    by_f1 = sorted(tested, key=lambda i: (_f1(rows[i], right[i], answers[i]), -rows[i], i))
    lines = [_line(_class_name(names, record, i), rows[i], right[i], answers[i]) for i in by_f1]
    summary = f"<p>{_summary(record, tested)}</p>"
    scores = _score_tables(lines, with_all_classes=with_all_classes) if lines else ""
    return summary + _matrix(record, names) + scores


def _summary(record: Mapping[str, Any], tested: Sequence[int]) -> str:
    n_rows = record["n"]
    if "confused" in record:
        n_right = sum(record["right"])
        low, high = interval(n_right, n_rows)
        share = f"{n_right / n_rows:.1%}" if n_rows else "–"
        text = (
            f"Of {n_rows:,} rows <b>{share}</b> were answered right (95 % interval {low:.1%}"
            f" to {high:.1%}); "
        )
    else:
        text = f"{n_rows:,} labels; "
    recalls = [record["right"][i] / record["rows"][i] for i in tested if record["rows"][i]]
    mean = f"{sum(recalls) / len(recalls):.1%}" if recalls else "–"
    text += f"the mean of the recalls of {len(recalls):,} classes is <b>{mean}</b>."
    left_out = record["classes"] - len(record["rows"])
    if left_out:
        text += f" {left_out:,} classes with fewer rows are left out."
    return text


def _score_tables(lines: Sequence[list[str]], *, with_all_classes: bool) -> str:
    note = "Intervals of 95 % by Wilson; the classes with the lowest F1 come first."
    html = f"<h3>Scores by class</h3>{table(COLUMNS, lines[:SHOWN])}<p class='soft'>{note}</p>"
    hidden = lines[SHOWN:]
    if with_all_classes and hidden:
        summary = f"<summary>{len(hidden):,} more classes</summary>"
        html += f"<details>{summary}{table(COLUMNS, hidden)}</details>"
    return html


def _f1(rows: int, right: int, answers: int) -> float:
    return 2 * right / (rows + answers) if rows + answers else 0.0


def _line(name: str, rows: int, right: int, answers: int) -> list[str]:
    counts = [f"{rows:,}", f"{right:,}", f"{answers:,}"]
    shares = [_range(right, rows), _range(right, answers)]
    return [esc(name[:MAX_NAME]), *counts, *shares, f"{_f1(rows, right, answers):.2f}"]


def _range(right: int, of: int) -> str:
    """Return a share with its interval, in numbers and drawn."""
    if not of:
        return '<span class="soft">–</span>'
    share = right / of
    low, high = interval(right, of)
    bar = f'<i style="left:{100 * low:.0f}%;width:{100 * (high - low):.0f}%"></i>'
    mark = f'<b style="left:{100 * share:.0f}%"></b>'
    numbers = f'{share:.0%} <span class="soft">{low:.0%}–{high:.0%}</span>'
    return f'<span class="range">{bar}{mark}</span>{numbers}'


def _matrix(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Rows of a class by answer: of all classes if they are few, else of the most confused ones."""
    pairs = record.get("confused", [])
    if not pairs:
        return ""
    classes = _most_confused_classes(pairs, len(record["rows"]))
    counts = {(label, answer): count for label, answer, count in pairs}
    for i in classes:
        counts[i, i] = record["right"][i]
    titles = {i: esc(_class_name(names, record, i)[:MAX_NAME]) for i in classes}
    head = "".join(f'<th scope="col">{titles[i]}</th>' for i in classes)
    body = ""
    for i in classes:
        cells = "".join(_cell(counts.get((i, j), 0), record["rows"][i], i == j) for j in classes)
        body += f'<tr><th scope="row">{titles[i]}</th>{cells}</tr>'
    is_part = len(classes) != record["classes"]
    selection = f"the {len(classes)} classes that are confused most; " if is_part else ""
    note = (
        f"A row is a class, a column an answer: {selection}the darker, the larger the share of the"
        " row."
    )
    return (
        f'<h3>Confusions</h3><p class="meaning">{note}</p><div class="scroll"><table'
        f' class="matrix"><tr><td></td>{head}</tr>{body}</table></div>'
    )


def _most_confused_classes(pairs: Sequence[Sequence[int]], n_classes: int) -> list[int]:
    n_wrong = dict.fromkeys(range(n_classes), 0)
    for label, answer, count in pairs:
        n_wrong[label] += count
        n_wrong[answer] += count
    most_first = sorted(n_wrong, key=lambda i: (-n_wrong[i], i))
    return sorted(most_first[:MATRIX])


def _cell(count: int, n_rows: int, is_right: bool) -> str:
    if not count:
        return "<td></td>"
    share = count / n_rows if n_rows else 0.0
    kind = "hit" if is_right else "miss"
    return f'<td class="{kind}" style="--s:{70 * math.sqrt(share):.0f}%">{count}</td>'
