"""Pictures and generations of a run, by step behind a slider."""

import base64
import itertools
import struct
from collections.abc import Sequence

from jaxtrain.telemetry.report import records as records_lib
from jaxtrain.telemetry.report.markup import esc, identifier, slider, spread, table, title
from jaxtrain.telemetry.report.run import Run
from loaders.io import files

PICTURES = 1_000_000  # [bytes] of all pictures together
GENERATIONS = 300_000  # [bytes] of all generations together, unless one of each step is more


def pictures(runs: Sequence[Run], notes: list[str]) -> str:
    """Return the pictures of evaluations that fit, behind a slider. ``notes`` names the others."""
    several = len(runs) > 1
    found = [
        (run, k, kind, by_step)
        for run in runs
        for k, (kind, by_step) in enumerate(records_lib.pictures(run.path / "pictures").items())
    ]
    parts, left, without = [], PICTURES, []
    for number, (run, k, kind, by_step) in enumerate(found):
        label = f"{run.name}: {kind}" if several else kind
        # so many steps, and pictures of each, as fit
        for most, each in itertools.product((12, 6, 3, 2, 1), (8, 4, 2, 1)):
            images = {
                step: _images(run, by_step[step][:each], kind, step)
                for step in spread(list(by_step), most)
            }
            size = sum(len(text) for row in images.values() for text in row)
            if size <= left // (len(found) - number):
                break
        else:
            without.append(label)
            continue
        left -= size
        sets = []
        for step, row in images.items():
            name = "as the run began" if step < 0 else f"step {step:,}"
            sets.append(f'<div class="pictures" data-name="{esc(name)}">{"".join(row)}</div>')
        which = f"{identifier(run.name)}-{k}"
        parts.append(
            f"<h3>{esc(label)}</h3>"
            + slider(which, len(sets), label)
            + f'<div id="{which}">{"".join(sets)}</div>'
        )
    if without:
        more = f" and {len(without) - 8} more" if len(without) > 8 else ""
        remedy = "; the page of one run alone has room for more" if several else ""
        notes.append(
            "pictures that are too large for the page are left out:"
            f" {', '.join(without[:8])}{more}{remedy}"
        )
    return "".join(parts)


def generations(run: Run, number: int, *, of: int) -> str:
    """Return the generations of evaluations with scores, of run ``number`` of the page's ``of``."""
    by_step = records_lib.generations(
        run.path / "generations.jsonl", steps=max(10 // of, 1), each=max(12 // of, 2)
    )
    if not by_step:
        return ""
    for each in (12, 6, 3, 1):  # so many of a step as there is room for
        sets = []
        for step, rows in by_step.items():
            names = list(dict.fromkeys(name for row in rows[:each] for name in row))
            cells = ([esc(row.get(name, "")) for name in names] for row in rows[:each])
            sets.append(table([(name, "text") for name in names], cells, f"step {step:,}"))
        if sum(map(len, sets)) <= GENERATIONS // of:
            break
    which = f"generations-{number}"
    return (
        title(run.name, of > 1)
        + slider(which, len(sets), "generations")
        + f'<div id="{which}">{"".join(sets)}</div>'
    )


def _images(run: Run, names: Sequence[str], kind: str, step: int) -> list[str]:
    found = []
    for k, name in enumerate(names):
        try:
            content = files.read(run.file(f"pictures/{name}"), most=PICTURES)
        except (files.FileError, OSError):
            continue  # removed since the folder was listed, or a link that leads elsewhere
        alt = f"{kind} {k + 1}" + (f" at step {step}" if step >= 0 else "")
        if content.startswith(b"\x89PNG") and len(content) > 24:
            width, height = struct.unpack(">II", content[16:24])  # of its header
            # several side by side, each of which is to be seen
            strip = ' class="strip"' if width > 5 * height else ""
            found.append(
                f'<img{strip} alt="{esc(alt)}"'
                f' src="data:image/png;base64,{base64.b64encode(content).decode()}">'
            )
    return found
