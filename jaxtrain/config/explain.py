"""Every field that a config sets: its value, unit and meaning, from the dataclasses' comments."""

import ast
import dataclasses
import functools
import inspect
import io
import tokenize
from typing import Any

from jaxtrain.config.schema import Config

MAX_VALUES = 32  # of a tuple that are printed


def explain(config: Config) -> str:
    """Every field with its value, unit and meaning, one line each."""
    lines = []

    def walk(section: Any, path: str) -> None:
        # mypy: a class of which nothing is known may not hash
        glosses = gloss(type(section))  # type: ignore[arg-type]
        for f in dataclasses.fields(section):
            value, field_path = getattr(section, f.name), f"{path}{f.name}"
            if field_path in ("model", "data") and value is None:
                continue  # no module is named
            if f.name in getattr(section, "facts", ()):
                continue
            if dataclasses.is_dataclass(value):
                walk(value, f"{field_path}.")
            else:
                unit, meaning = glosses[f.name]
                lines.append((f"config.{field_path}", _short(value), unit, meaning))

    walk(config, "")
    path_width, value_width, unit_width = (
        min(max(len(line[i]) for line in lines), 40) for i in range(3)
    )
    padded = []
    for path, value, unit, meaning in lines:
        start = f"{path:{path_width}}  {value:{value_width}}  {unit:{unit_width}}"
        padded.append(f"{start}  {meaning}")
    return "\n".join(padded)


def _short(value: Any) -> str:
    """Return a value as Python writes it, and the beginning and length of a long tuple."""
    if isinstance(value, tuple) and len(value) > MAX_VALUES:
        return f"({', '.join(map(repr, value[:3]))}, … {len(value)} in all)"
    return repr(value)


@functools.cache
def gloss(cls: type) -> dict[str, tuple[str, str]]:
    """Field -> (unit, meaning), from ``# [unit] meaning`` at its end, or above it."""
    glosses: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            glosses |= _own_gloss(base)
    # Sections that a workload adds, which no line of a source file declares.
    return glosses | {
        f.name: ("section", "") for f in dataclasses.fields(cls) if f.name not in glosses
    }


def _own_gloss(cls: type) -> dict[str, tuple[str, str]]:
    source = inspect.getsource(cls)
    comments = {}  # by their lines
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    (definition,) = ast.parse(inspect.cleandoc(source)).body
    assert isinstance(definition, ast.ClassDef)
    glosses = {}
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = comments.get(node.end_lineno or 0, "")
        if not text.startswith("["):
            text = _comment_above(node.lineno, comments)
        unit, _, meaning = text.removeprefix("[").partition("]")
        glosses[node.target.id] = (unit, meaning.strip())
    return glosses


def _comment_above(line: int, comments: dict[int, str]) -> str:
    """Return the comment that begins with ``[`` and ends above ``line``, or an empty one."""
    text = ""
    for above in range(line - 1, 0, -1):
        if above not in comments:
            return ""
        text = f"{comments[above]} {text}"
        if text.startswith("["):
            return text
    return ""
