"""One HTML file of a step: its records, examples, norms by parameter, largest activations."""

import base64
import io
import math
import wave
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from jaxtrain.telemetry import writers
from jaxtrain.telemetry.report import records
from jaxtrain.telemetry.report.curves import HIDDEN, RATES
from jaxtrain.telemetry.report.markup import esc, number, table
from jaxtrain.telemetry.report.page import document
from jaxtrain.telemetry.report.run import Run

AROUND = 3  # records before and after the step that are shown
MEDIA = 12_000_000  # [bytes] of pictures and sounds, for the examples with the largest gradients
TEXT = 1500  # [characters] of an example
MAX_ROWS = 60  # of the tables of parameters and activations


def html(run: Run, step: int, found: Any, verdict: Sequence[str]) -> str:
    """Write the page of a step.

    ``found``: the step, taken apart (`jaxtrain.dissect.Step`). ``verdict``: lines that compare the
    replay with the record.
    """
    columns = records.read(run.file("metrics.jsonl")).splits.get("train", {})
    title = f"{run.name}, step {step:,}"
    head = f"<h1>{esc(title)}</h1>" + "".join(
        f"<p class='soft'>{esc(line)}</p>" for line in verdict
    )
    sections = [
        ("The step", _variants(columns, step, found)),
        ("The steps around it", _around(columns, step)),
        ("Examples", _examples(found)),
        ("Parameters", _params(found.params)),
        ("Largest activations", _activations(found.activations)),
    ]
    return document(title, head, [(name, text) for name, text in sections if text])


def moved(columns: Mapping[str, np.ndarray], step: int) -> list[tuple[str, float, float, float]]:
    """(Metric, value, usual value, usual deviations apart), the one that moved most first."""
    if "step" not in columns or step not in columns["step"]:
        return []
    at = int(np.flatnonzero(columns["step"] == step)[-1])
    found = []
    for name, values in columns.items():
        before = values[max(at - records.USUAL, 0) : at]
        before = before[np.isfinite(before)]
        if name in (*HIDDEN, *RATES) or name.startswith("digest_") or not len(before):
            continue
        usual, spread = records.usually(before)
        value = float(values[at])
        apart = (
            (value - usual) / spread
            if spread
            else 0.0
            if value == usual
            else math.copysign(math.inf, value - usual)
        )
        found.append((name, value, usual, apart))
    return sorted(found, key=lambda row: (-abs(row[3]) if row[3] == row[3] else -math.inf, row[0]))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Write a table whose columns are numbers, but for the first ``text``."""
    return table([(name, "n" * (i >= text)) for i, name in enumerate(head)], rows)


def _variants(columns: Mapping[str, np.ndarray], step: int, found: Any) -> str:
    at = np.flatnonzero(columns.get("step", np.zeros(0)) == step)
    first, *tries = found.variants
    names = [
        n for n in first.numbers if not n.startswith(("grad_norm_", "update_norm_", "param_norm_"))
    ]
    rows = []
    for name in names:
        recorded = float(columns[name][at[-1]]) if len(at) and name in columns else math.nan
        rows.append(
            [esc(name), number(recorded), *(number(v.numbers.get(name)) for v in found.variants)]
        )
    head = ["", "recorded", "again, on one device", *(v.name for v in tries)]
    note = (
        "loss_after is the loss of the same examples after the update. The record has none of it."
    )
    return _table(head, rows) + f"<p class='soft'>{note}</p>"


def _around(columns: Mapping[str, np.ndarray], step: int) -> str:
    ranked = moved(columns, step)
    if not ranked:
        return ""
    at = int(np.flatnonzero(columns["step"] == step)[-1])
    near = range(max(at - AROUND, 0), min(at + AROUND + 1, len(columns["step"])))
    rows = [
        [
            esc(name),
            number(usual),
            "∞" if math.isinf(apart) else number(apart),
            *(
                f"<b>{number(columns[name][i])}</b>" if i == at else number(columns[name][i])
                for i in near
            ),
        ]
        for name, _, usual, apart in ranked[:MAX_ROWS]
    ]
    head = ["", "usual", "deviations apart", *(f"step {int(columns['step'][i]):,}" for i in near)]
    note = (
        f"Usual is the median of the {records.USUAL} records before, and a deviation their median"
        " one."
    )
    note += " The one that moved most comes first."
    return f"<p class='meaning'>{note}</p>" + _table(head, rows)


def _examples(found: Any) -> str:
    left = MEDIA
    rows = []
    order = sorted(range(len(found.rows)), key=lambda k: (-_finite(found.rows[k].grad_norm), k))
    for k in order:
        row = found.rows[k]
        media = _media(row.shown, row.id)
        shown = (
            "".join(media)
            if sum(map(len, media)) <= left
            else "<span class='soft'>left out: the page is full</span>"
        )
        left -= len(shown)
        text = (
            "<div"
            f' class="text">{esc(row.shown.text[:TEXT])}{" …" if len(row.shown.text) > TEXT else ""}</div>'
        )
        rows.append(
            [
                esc(row.id),
                f"{shown}{text}",
                f"row:{k}",
                *map(number, (row.loss, row.weight, row.grad_norm)),
            ]
        )
    notes = [
        "The largest gradient first. Loss and gradient norm are of the mean over each example"
        " alone."
    ]
    if not math.isclose(found.loss, found.sum_of_rows, rel_tol=1e-3):
        notes.append(
            f"The loss of the batch is {number(found.loss)}, and the examples alone give"
            f" {number(found.sum_of_rows)}: this loss has statistics of the whole batch, without"
            " which an example's own numbers are others."
        )
    return f"<p class='meaning'>{esc(' '.join(notes))}</p>" + _table(
        ["example", "", "place", "loss", "weight", "gradient norm"], rows, text=2
    )


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.inf


def _media(shown: Any, example: str) -> list[str]:
    parts = []
    for name, picture in shown.pictures.items():
        file = io.BytesIO()
        Image.fromarray(writers.pixels(np.asarray(picture)[None])[0]).save(file, "PNG")
        label, data = esc(f"{name} of {example}"), base64.b64encode(file.getvalue()).decode()
        parts.append(f'<img alt="{label}" src="data:image/png;base64,{data}">')
    if shown.sound is not None:
        label = esc(f"sound of {example}")
        sound = _wav(*shown.sound)
        parts.append(
            f'<br><audio controls aria-label="{label}" preload="none"'
            f' src="data:audio/wav;base64,{sound}"></audio>'
        )
    return parts


def _wav(samples: Any, rate: int) -> str:
    x = np.nan_to_num(np.asarray(samples, np.float32))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(
            (x / max(1.0, float(np.abs(x).max(initial=0))) * 32767).astype("<i2").tobytes()
        )
    return base64.b64encode(file.getvalue()).decode()


def _params(params: Mapping[str, tuple[float, float, float]]) -> str:
    order = sorted(params, key=lambda path: (-_finite(params[path][1]), path))
    rows = [
        [
            f'<span class="code">{esc(path)}</span>',
            *map(number, params[path]),
            number(params[path][2] / params[path][0]) if params[path][0] else "–",
        ]
        for path in order
    ]
    head = ["parameter", "norm", "gradient", "update", "update / norm"]
    more = (
        f"<details><summary>{len(rows) - MAX_ROWS}"
        f" more</summary>{_table(head, rows[MAX_ROWS:])}</details>"
    )
    return _table(head, rows[:MAX_ROWS]) + (more if len(rows) > MAX_ROWS else "")


def _activations(activations: Sequence[tuple[str, float]]) -> str:
    first = next((name for name, x in activations if not math.isfinite(x)), "")
    note = "The largest magnitude of each product and of each loop's state."
    text = f"<p class='meaning'>{note} Numbers in brackets are the turn of a loop: the layer.</p>"
    if first:
        text += f'<p class="notice">The first value that is not finite is in {esc(first)}.</p>'
    rows = [
        [f'<span class="code">{esc(name)}</span>', number(x) if math.isfinite(x) else str(x)]
        for name, x in sorted(activations, key=lambda row: -_finite(row[1]))[:MAX_ROWS]
    ]
    return text + _table(["scope in the program", "largest"], rows) if rows else ""
