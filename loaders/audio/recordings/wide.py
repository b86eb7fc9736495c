"""The columns of a wide table that are classes: they hold 0 and 1, or yes and no."""

from collections.abc import Mapping, Sequence

from loaders.audio.recordings import values
from loaders.audio.recordings.column_names import (
    NUMBERING,
    NUMBERS,
    OF_DAY,
    SPLIT,
    is_other,
    may_deny,
    meaning_of,
    plain,
    what,
    words,
)
from loaders.audio.recordings.tables import Table
from loaders.base import DataError

# Meanings whose columns may be a class if they hold 0 and 1: `fin`, `low`, `view`.
SOFT = ("end", "low", "high", "view")
# Meanings that no class has.
HARD = (
    "file", "folder", "start", "duration", "offset", "file offset", "channel", "selection", "answer", "asked", "embeddings",
    "split", "date", "time",
)  # fmt: skip
PLACES = ("recording", "site", "latitude", "longitude", "score", "clock", "datetime")  # none has, unless next to another


def classes(table: Table, used: Mapping[str, list[str]], optional: bool) -> list[str]:
    """Return the columns whose names are labels: they hold yes and no alone.

    Names with another meaning (`fin`, `low`) are classes next to others if they hold both.
    Raises DataError: a column may be a class or not.
    """
    rows = {name: table.values(name) for name in table.columns}
    unknown = [name for name in rows if not is_other(name) and not meaning_of(name) and name not in used.get("split", ())]
    unknown = [name for name in unknown if not NUMBERING & set(words(name)[-1:])]
    found = [name for name in unknown if values.are_answers(rows[name])]
    if used["label"] or used.get("genus"):
        label = next((name for name in used["label"] if values.are_answers(rows[name], both=True)), None)
        if label and found:
            _refuse_doubt(table, found, label, "0 and 1, too")
        return []
    odd = [name for name in found if _is_about(name)]
    if odd and len(odd) < len(found):
        _refuse_doubt(
            table, [name for name in found if name not in odd], odd[0], "0 and 1, too, about the recording or the line"
        )
    again = [name for name in found if name.rpartition(".")[0] in found and name.rpartition(".")[2].isdigit()]
    if again:
        once = ",".join(name for name in found if name not in again)
        raise DataError(f"{table.path} has {again[0].rpartition('.')[0]!r} twice; name the classes: --label-column '{once}'")
    hours = {name for name in unknown if OF_DAY & set(words(name))} if table.find("hour") else set()
    numbers = [name for name in unknown if name not in found and name not in hours and values.are_nearly_answers(rows[name])]
    if found and numbers:
        value = next(value for value in rows[numbers[0]] if values.given(value) and values.answer(value) is None)
        _refuse_doubt(table, found, numbers[0], value)
    hard = HARD if found else (*HARD, *PLACES)
    others = [
        name for name in rows if (is_other(name) or meaning_of(name)) and what(name) not in hard and plain(name) not in NUMBERS
    ]
    others = [name for name in others if name and (values.are_answers(rows[name], both=True) or values.are_posneg(rows[name]))]
    if not found:  # DCASE's has a column Q
        found = [name for name in others if values.are_posneg(rows[name])]
    if not found and others and not optional and not _are_frequencies(table, used, others[0]):
        raise DataError(
            f"{table.path} has no column of labels that is known, and {', '.join(map(repr, others))} with 0 and 1 may be "
            f"classes; name them: --label-column '{','.join(others)}', or --label-column none"
        )
    for name in others:
        if _are_frequencies(table, used, name):
            continue
        if what(name) not in SOFT and name not in found:
            _refuse_doubt(table, found, name, "0 and 1, too")
        found.append(name)
    return [name for name in table.columns if name in found]


def _is_about(name: str) -> bool:
    """Whether 0 and 1 are about a line or recording by the name: is_test, has_audio, usable."""
    parts = words(name)
    return (
        bool(SPLIT & set(parts))
        or may_deny(name)
        or parts[0] in ("is", "has", "was")
        or parts[-1] in ("usable", "total", "any")
    )


def _are_frequencies(table: Table, used: Mapping[str, list[str]], name: str) -> bool:
    """Whether 0 and 1 are frequencies: the other bound holds more than that."""
    other = {"low": "high", "high": "low"}.get(what(name), "")
    return any(not values.are_answers(table.values(each)) for each in used.get(other, ()))


def _refuse_doubt(table: Table, classes: Sequence[str], name: str, odd: str) -> list[str]:
    """Raise DataError for a column that may be a class, and may not."""
    raise DataError(
        f"{table.path} has columns of 0 and 1 ({', '.join(classes[:4])}), and {name!r} holds {odd}; "
        f"name the classes: --label-column '{','.join([*classes, name])}', or without {name!r}"
    )


def refuse_no_answers(table: Table, names: Sequence[str]) -> None:
    """Raise DataError for a cell of named columns of 0 and 1 that is no answer."""
    for name in names:
        for number, row in table.rows():
            text = row[name]
            if values.given(text) and values.answer(text) is None and text.casefold() not in values.OPEN:
                raise DataError(
                    f"{table.path}:{number}: {name!r} holds {text!r}; a column of a class holds 0 and 1, or yes and no"
                )
