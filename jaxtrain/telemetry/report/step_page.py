"""One HTML file of a step: its records, examples, norms by parameter, largest activations."""

import base64
import io
import math
import wave
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


def html(run: Run, step: int, dissected: Any, verdict: Sequence[str]) -> str:
    """Write the page of a step.

    ``dissected``: the step, taken apart (`jaxtrain.dissect.Step`). ``verdict``: lines that compare
    the replay with the record.
    """
    columns = records.read(run.file("metrics.jsonl")).splits.get("train", {})
    title = f"{run.name}, step {step:,}"
    head = f"<h1>{esc(title)}</h1>"
    for line in verdict:
        head += f"<p class='soft'>{esc(line)}</p>"
    sections = {
        "The step": _variants(columns, step, dissected.variants),
        "The steps around it": _around(columns, step),
        "Examples": _examples(dissected),
        "Parameters": _params(dissected.params),
        "Largest activations": _activations(dissected.activations),
    }
    return document(title, head, [(name, text) for name, text in sections.items() if text])


class Moved(NamedTuple):
    """A metric at a step, compared with the records before."""

    metric: str
    value: float
    usual: float
    deviations: float  # of usual size between the two; infinite if the metric never moved before

    @property
    def rank(self) -> tuple[float, str]:
        distance = -math.inf if math.isnan(self.deviations) else -abs(self.deviations)
        return distance, self.metric


def moved(columns: Mapping[str, np.ndarray], step: int) -> list[Moved]:
    """Compare each metric with its usual value. The one that moved most is first."""
    place = _place(columns, step)
    if place is None:
        return []
    metrics = []
    for name, values in columns.items():
        earlier = values[max(place - records.USUAL, 0) : place]
        earlier = earlier[np.isfinite(earlier)]
        if name in (*HIDDEN, *RATES) or name.startswith("digest_") or not len(earlier):
            continue
        usual, spread = records.usually(earlier)
        value = float(values[place])
        metrics.append(Moved(name, value, usual, _deviations(value - usual, spread)))
    return sorted(metrics, key=lambda metric: metric.rank)


def _place(columns: Mapping[str, np.ndarray], step: int) -> int | None:
    """Return the place of a step's last record, or None without one."""
    places = np.flatnonzero(columns.get("step", np.zeros(0)) == step)
    return int(places[-1]) if len(places) else None


def _deviations(difference: float, spread: float) -> float:
    if spread:
        return difference / spread
    return math.copysign(math.inf, difference) if difference else 0.0


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Write a table whose columns are numbers, but for the first ``text``."""
    columns = [(name, "n" if i >= text else "") for i, name in enumerate(head)]
    return table(columns, rows)


def _variants(columns: Mapping[str, np.ndarray], step: int, variants: Sequence[Any]) -> str:
    place = _place(columns, step)
    rows = []
    for name in variants[0].numbers:
        if name.startswith(("grad_norm_", "update_norm_", "param_norm_")):
            continue
        is_recorded = place is not None and name in columns
        recorded = float(columns[name][place]) if is_recorded else math.nan
        values = [number(variant.numbers.get(name)) for variant in variants]
        rows.append([esc(name), number(recorded), *values])
    head = ["", "recorded", "again, on one device", *(variant.name for variant in variants[1:])]
    note = (
        "loss_after is the loss of the same examples after the update. The record has none of it."
    )
    return _table(head, rows) + f"<p class='soft'>{note}</p>"


def _around(columns: Mapping[str, np.ndarray], step: int) -> str:
    place = _place(columns, step)
    metrics = moved(columns, step)
    if place is None or not metrics:
        return ""
    near = range(max(place - AROUND, 0), min(place + AROUND + 1, len(columns["step"])))
    rows = []
    for metric in metrics[:MAX_ROWS]:
        is_infinite = math.isinf(metric.deviations)
        cells = [number(columns[metric.metric][i]) for i in near]
        cells[place - near.start] = f"<b>{cells[place - near.start]}</b>"
        deviations = "∞" if is_infinite else number(metric.deviations)
        rows.append([esc(metric.metric), number(metric.usual), deviations, *cells])
    steps = [f"step {int(columns['step'][i]):,}" for i in near]
    note = (
        f"Usual is the median of the {records.USUAL} records before, and a deviation their median"
        " one. The one that moved most comes first."
    )
    head = ["", "usual", "deviations apart", *steps]
    return f"<p class='meaning'>{note}</p>" + _table(head, rows)


def _examples(dissected: Any) -> str:
    n_bytes_left = MEDIA
    rows = []
    examples = dissected.rows
    for k in sorted(range(len(examples)), key=lambda k: (-_finite(examples[k].grad_norm), k)):
        example = examples[k]
        media = "".join(_media(example.shown, example.id))
        if len(media) > n_bytes_left:
            media = "<span class='soft'>left out: the page is full</span>"
        n_bytes_left -= len(media)
        numbers = map(number, (example.loss, example.weight, example.grad_norm))
        content = media + _text(example.shown.text)
        rows.append([esc(example.id), content, f"row:{k}", *numbers])
    note = (
        "The largest gradient first. Loss and gradient norm are of the mean over each example"
        " alone."
    )
    if not math.isclose(dissected.loss, dissected.sum_of_rows, rel_tol=1e-3):
        note += (
            f" The loss of the batch is {number(dissected.loss)}, and the examples alone give"
            f" {number(dissected.sum_of_rows)}: this loss has statistics of the whole batch,"
            " without which an example's own numbers are others."
        )
    head = ["example", "", "place", "loss", "weight", "gradient norm"]
    return f"<p class='meaning'>{esc(note)}</p>" + _table(head, rows, text=2)


def _text(text: str) -> str:
    ending = " …" if len(text) > TEXT else ""
    return f'<div class="text">{esc(text[:TEXT])}{ending}</div>'


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.inf


def _media(shown: Any, example: str) -> list[str]:
    parts = []
    for name, picture in shown.pictures.items():
        file = io.BytesIO()
        pixels = writers.pixels(np.asarray(picture)[None])[0]
        Image.fromarray(pixels).save(file, "PNG")
        label = esc(f"{name} of {example}")
        data = base64.b64encode(file.getvalue()).decode()
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
    wave_f = np.nan_to_num(np.asarray(samples, np.float32))
    peak = float(np.abs(wave_f).max(initial=0))
    pcm = (wave_f / max(1.0, peak) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm.tobytes())
    return base64.b64encode(file.getvalue()).decode()


def _params(params: Mapping[str, tuple[float, float, float]]) -> str:
    rows = []
    for path in sorted(params, key=lambda path: (-_finite(params[path][1]), path)):
        norm, gradient, update = params[path]
        ratio = number(update / norm) if norm else "–"
        name = f'<span class="code">{esc(path)}</span>'
        rows.append([name, number(norm), number(gradient), number(update), ratio])
    head = ["parameter", "norm", "gradient", "update", "update / norm"]
    html = _table(head, rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        summary = f"<summary>{len(rows) - MAX_ROWS} more</summary>"
        html += f"<details>{summary}{_table(head, rows[MAX_ROWS:])}</details>"
    return html


def _activations(activations: Sequence[tuple[str, float]]) -> str:
    rows = []
    for name, value in sorted(activations, key=lambda row: -_finite(row[1]))[:MAX_ROWS]:
        text = number(value) if math.isfinite(value) else str(value)
        rows.append([f'<span class="code">{esc(name)}</span>', text])
    if not rows:
        return ""
    note = "The largest magnitude of each product and of each loop's state."
    html = f"<p class='meaning'>{note} Numbers in brackets are the turn of a loop: the layer.</p>"
    first = next((name for name, value in activations if not math.isfinite(value)), "")
    if first:
        html += f'<p class="notice">The first value that is not finite is in {esc(first)}.</p>'
    return html + _table(["scope in the program", "largest"], rows)
