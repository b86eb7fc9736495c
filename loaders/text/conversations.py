"""Rows of conversations, as chat datasets of Hugging Face have them. They are no texts yet."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

# Fields of a turn: of "messages", and of ShareGPT's "conversations".
TURNS = ({"role", "content"}, {"from", "value"})
# Columns that are a text together.
PARTS = (
    {"prompt", "completion"},
    {"prompt", "response"},
    {"prompt", "chosen"},
    {"instruction", "output"},
    {"instruction", "response"},
    {"question", "answer"},
)
PAGE = "docs/workloads/language.md"


def column_of(row: Mapping[str, Any]) -> str:
    """Return the first column of a row that holds a conversation, or ""."""
    for name, value in row.items():
        is_list = isinstance(value, list) and bool(value)
        if is_list and isinstance(value[0], Mapping) and _is_turn(set(value[0])):
            return name
    return ""


def column_of_schema(schema: pa.Schema) -> str:
    """Return the first column of a table whose values are conversations, or ""."""
    for field in schema:
        kind = field.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and pa.types.is_struct(kind.value_type):
            if _is_turn({part.name for part in kind.value_type}):
                return str(field.name)
    return ""


def _is_turn(names: set[str]) -> bool:
    return any(turn <= names for turn in TURNS)


def problem(column: str) -> str:
    """Return the reason for which a column of conversations is refused, and the way to a text."""
    return (
        f"column {column!r} holds conversations, which have no text of their own; write the text of"
        f" each row first: tokenizer.apply_chat_template(row[{column!r}], tokenize=False), as"
        f" {PAGE} says"
    )


def joined(names: set[str]) -> str:
    """Return how columns that are a text together become one, or "" for other columns."""
    for parts in PARTS:
        if parts <= names:
            listed = " and ".join(sorted(parts))
            return f"; {listed} are one text together: join them first, as {PAGE} says"
    return ""
