"""Pictures and generations of a run, by step behind a slider."""

import base64
import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtrain.telemetry.report import records as records_lib
from jaxtrain.telemetry.report.markup import esc, identifier, slider, spread, table, title
from jaxtrain.telemetry.report.run import Run
from loaders.io import files

PICTURES = 1_000_000  # [bytes] of all pictures together
GENERATIONS = 300_000  # [bytes] of all generations together, unless one of each step is more


class Series(NamedTuple):
    """The pictures of one kind in a run."""

    run: Run
    id: str  # of the element
    kind: str
    names: Mapping[int, Sequence[str]]  # by step: files in its folder of pictures


def pictures(runs: Sequence[Run], notes: list[str]) -> str:
    """Return the pictures of evaluations that fit, behind a slider. ``notes`` names the others."""
    all_series = []
    for run in runs:
        for k, (kind, names) in enumerate(records_lib.pictures(run.path / "pictures").items()):
            all_series.append(Series(run, f"{identifier(run.name)}-{k}", kind, names))
    html = ""
    n_bytes_left = PICTURES
    too_large: list[str] = []
    for number, series in enumerate(all_series):
        label = f"{series.run.name}: {series.kind}" if len(runs) > 1 else series.kind
        images = _as_many_as_fit(series, n_bytes_left // (len(all_series) - number))
        if images is None:
            too_large.append(label)
            continue
        n_bytes_left -= _size(images)
        html += f"<h3>{esc(label)}</h3>{_sets(series.id, label, images)}"
    if too_large:
        listed = ", ".join(too_large[:8])
        if len(too_large) > 8:
            listed += f" and {len(too_large) - 8} more"
        if len(runs) > 1:
            listed += "; the page of one run alone has room for more"
        notes.append(f"pictures that are too large for the page are left out: {listed}")
    return html


def _as_many_as_fit(series: Series, n_bytes: int) -> dict[int, list[str]] | None:
    """Return the tags of pictures by step: of as many steps, and as many of each, as fit."""
    for n_steps, n_of_each in itertools.product((12, 6, 3, 2, 1), (8, 4, 2, 1)):
        images = {}
        for step in spread(list(series.names), n_steps):
            names = series.names[step][:n_of_each]
            images[step] = _images(series.run, names, series.kind, step)
        if _size(images) <= n_bytes:
            return images
    return None


def _size(images: Mapping[int, Sequence[str]]) -> int:
    return sum(len(tag) for tags in images.values() for tag in tags)


def _sets(target: str, label: str, images: Mapping[int, Sequence[str]]) -> str:
    sets = ""
    for step, tags in images.items():
        name = "as the run began" if step < 0 else f"step {step:,}"
        sets += f'<div class="pictures" data-name="{esc(name)}">{"".join(tags)}</div>'
    return slider(target, len(images), label) + f'<div id="{target}">{sets}</div>'


def generations(run: Run, number: int, *, of: int) -> str:
    """Return the generations of evaluations with scores, of run ``number`` of the page's ``of``."""
    by_step = records_lib.generations(
        run.path / "generations.jsonl", steps=max(10 // of, 1), each=max(12 // of, 2)
    )
    if not by_step:
        return ""
    for n_of_each in (12, 6, 3, 1):  # as many of a step as there is room for
        sets = [_generation_table(step, rows[:n_of_each]) for step, rows in by_step.items()]
        if sum(map(len, sets)) <= GENERATIONS // of:
            break
    target = f"generations-{number}"
    control = slider(target, len(sets), "generations")
    return title(run.name, of > 1) + control + f'<div id="{target}">{"".join(sets)}</div>'


def _generation_table(step: int, rows: Sequence[Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [(name, "text") for name in names]
    cells = ([esc(row.get(name, "")) for name in names] for row in rows)
    return table(columns, cells, f"step {step:,}")


def _images(run: Run, names: Sequence[str], kind: str, step: int) -> list[str]:
    tags = []
    for k, name in enumerate(names):
        try:
            content = files.read(run.file(f"pictures/{name}"), most=PICTURES)
        except (files.FileError, OSError):
            continue  # removed since the folder was listed, or a link that leads elsewhere
        if not content.startswith(b"\x89PNG") or len(content) <= 24:
            continue
        width, height = struct.unpack(">II", content[16:24])  # of its header
        # several side by side, each of which is to be seen
        strip = ' class="strip"' if width > 5 * height else ""
        alt = f"{kind} {k + 1}"
        if step >= 0:
            alt += f" at step {step}"
        data = base64.b64encode(content).decode()
        tags.append(f'<img{strip} alt="{esc(alt)}" src="data:image/png;base64,{data}">')
    return tags
