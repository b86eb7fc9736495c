"""Pieces of a page: escaped texts, numbers and times for people, and a selector of sets."""

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any


def esc(text: object) -> str:
    """Any text, for HTML."""
    printable = [c if c.isprintable() or c in "\n\t" else "�" for c in str(text)]
    return html.escape("".join(printable))


def number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time as a page shows it, for example 2 h 05 min."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_minutes:02} min"
    return f"{minutes} min {rest_seconds:02} s"


def short(value: object) -> str:
    """Return a value of a config, on a line."""
    if isinstance(value, str):
        text = value
    elif type(value) is float:
        text = f"{value:.6g}"
    else:
        text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "…"


def identifier(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "section"


def grid(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Iterable[str]], name: str = "") -> str:
    """Write a table, which may be one of the sets of a `slider`, by its name.

    Args:
      columns: the heading and the class of each: n for numbers, code, text, or none.
      rows: the cells of each row, as HTML.
    """
    head = ""
    classes = []
    for text, kind in columns:
        head += f'<th class="n">{esc(text)}</th>' if kind == "n" else f"<th>{esc(text)}</th>"
        classes.append(f' class="{kind}"' if kind else "")
    lines = ""
    for row in rows:
        cells = zip(classes, row, strict=True)
        lines += "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in cells) + "</tr>"
    attribute = f' data-name="{esc(name)}"' if name else ""
    return f'<div class="scroll"{attribute}><table><tr>{head}</tr>{lines}</table></div>'


def title(name: str, several: bool) -> str:
    """Return the name of a run as a heading, on a page of several."""
    return f"<h3>{esc(name)}</h3>" if several else ""


def slider(target: str, n: int, label: str) -> str:
    """Return a control that selects one of ``n`` sets of the element ``target`` below it."""
    kind = "range" if n > 1 else "hidden"
    value = f'min="0" max="{n - 1}" value="{n - 1}"'
    tag = (
        f'<input class="wide" type="{kind}" {value} data-steps="{target}" aria-label="step of'
        f' {esc(label)}">'
    )
    return f'<p>{tag} <span id="{target}-value" class="soft" aria-live="polite"></span></p>'


def spread(items: list[Any], most: int) -> list[Any]:
    """At most ``most`` of a list, evenly, with first and last. If ``most`` is 1, the last."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[-1:]
    stride = (len(items) - 1) / (most - 1)
    return [items[round(i * stride)] for i in range(most)]
