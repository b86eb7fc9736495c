"""The columns of a table by their values: names of recordings, splits, and classes of 0 and 1."""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

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
from loaders.audio.recordings.find import is_audio
from loaders.audio.recordings.tables import Table
from loaders.base import DataError

PATHS = {"path", "filepath", "dir", "folder"}  # words in the name of a column that may hold folders
# Meanings whose columns may be a class if they hold 0 and 1: `fin`, `low`, `view`.
SOFT = ("end", "low", "high", "view")
# Meanings that no class has.
HARD = (
    "file",
    "folder",
    "start",
    "duration",
    "offset",
    "file offset",
    "channel",
    "selection",
    "answer",
    "asked",
    "embeddings",
    "split",
    "date",
    "time",
)
# none has, unless next to another
PLACES = ("recording", "site", "latitude", "longitude", "score", "clock", "datetime")


def choose_files(table: Table, used: dict[str, list[str]], named: bool) -> None:
    """Keep the columns that name the recording, the best first, and those of folders.

    ``named``: an option names the column. Raises DataError: two name different recordings.
    """
    files = used.setdefault("file", [])
    if named or not table.rows():
        return
    files[:] = [
        name for name in files if not any("://" in value for value in table.values(name))
    ] or files
    if not files:
        files[:] = [
            name
            for name in table.columns
            if not meaning_of(name) and not is_other(name) and are_audio(table, name)
        ]
    ended = [name for name in files if are_audio(table, name)]
    best = (ended or files)[:1]
    for name in [name for name in files if name not in best]:
        its = [
            (row[best[0]], row[name])
            for _, row in table.rows()
            if values.given(row[best[0]]) and values.given(row[name])
        ]
        if all(_last(a) == _last(b) for a, b in its):
            continue
        texts = filter(values.given, table.values(name))
        if name in ended or not (
            PATHS & set(words(name)) or all(re.search(r"[/\\]", text) for text in texts)
        ):
            if (
                name not in ended
                and ended
                and (values.are_numbers(table.values(name)) or not used.get("start"))
            ):
                # the number or title of a recording, whose file another column names
                files.remove(name)
                continue
            raise DataError(
                f"{table.path} has {best[0]!r} and {name!r}, which name different recordings; say"
                f" which: --file-column {best[0]!r} or {name!r}"
            )
        files.remove(name)
        used.setdefault("folder", []).insert(0, name)
    files.sort(key=lambda name: name not in best)


def are_audio(table: Table, name: str) -> bool:
    """Whether every cell that is not empty has the ending of a recording."""
    given = list(filter(values.given, table.values(name)))
    return bool(given) and all(map(is_audio, given)) and "://" not in given[0]


def joined(folders: Sequence[str], name: str) -> str:
    """Return a recording's name after its folders. Parts that both state are there once."""
    parts = re.split(r"[/\\]+", name)
    if not parts[0] or re.fullmatch("[A-Za-z]:", parts[0]):
        return "/".join(parts)  # a whole path
    for folder in reversed(folders):
        above = [
            part
            for n, part in enumerate(re.split(r"[/\\]+", folder))
            if part not in ("", ".") or n == 0
        ]
        most = min(len(above), len(parts) - 1)
        shared = next((n for n in range(most, 0, -1) if above[-n:] == parts[:n]), 0)
        parts = above + parts[shared:]
    return "/".join(parts)


def _last(text: str) -> str:
    last = unicodedata.normalize("NFC", re.split(r"[/\\]+", text)[-1]).casefold()
    return last.rpartition(".")[0] if is_audio(last) else last


def choose_split(table: Table, used: dict[str, list[str]], classes: Collection[str]) -> None:
    """Keep a column of splits, by its name or its values.

    Raises DataError: a column tells test lines apart in other words: they would be trained on.
    """
    taken = {
        name for meaning, several in used.items() if meaning != "split" for name in several
    } | set(classes)
    named = used.get("split", [])
    others = [
        name
        for name in table.columns
        if name not in taken and name not in named and not meaning_of(name)
    ]
    texts = {name: list(filter(values.given, table.values(name))) for name in (*named, *others)}
    fits = [name for name, its in texts.items() if values.are_splits(its, train=name not in named)]
    used["split"] = fits[:1] or [name for name in named if plain(name) == "split"]
    for name, its in texts.items() if not used["split"] else ():
        if name in named and any(text.casefold() in values.SPLITS for text in its):
            odd = next(text for text in its if text.casefold() not in values.SPLITS)
            raise DataError(
                f"{table.path}: {name!r} holds splits, and {odd!r}; to split by it: --split-column"
                f" {name!r}, or --split-column none"
            )
        if SPLIT & set(words(name)) and values.are_answers(its, both=True):
            of_test = next(
                (
                    text
                    for text in its
                    if values.answer(text) != bool({"train", "training"} & set(words(name)))
                ),
                "1",
            )
            raise DataError(
                f"{table.path}: {name!r} may tell recordings to test on; to split by it: --split"
                f" column={name}:{of_test}, or --split-column none"
            )


def classes(table: Table, used: Mapping[str, list[str]], optional: bool) -> list[str]:
    """Return the columns whose names are labels: they hold yes and no alone.

    Names with another meaning (`fin`, `low`) are classes next to others if they hold both.
    Raises DataError: a column may be a class or not.
    """
    rows = {name: table.values(name) for name in table.columns}
    unknown = [
        name
        for name in rows
        if not is_other(name) and not meaning_of(name) and name not in used.get("split", ())
    ]
    unknown = [name for name in unknown if not NUMBERING & set(words(name)[-1:])]
    found = [name for name in unknown if values.are_answers(rows[name])]
    if used["label"] or used.get("genus"):
        label = next(
            (name for name in used["label"] if values.are_answers(rows[name], both=True)), None
        )
        if label and found:
            _refuse_doubt(table, found, label, "0 and 1, too")
        return []
    odd = [name for name in found if _is_about(name)]
    if odd and len(odd) < len(found):
        sure = [name for name in found if name not in odd]
        _refuse_doubt(table, sure, odd[0], "0 and 1, too, about the recording or the line")
    again = [
        name
        for name in found
        if name.rpartition(".")[0] in found and name.rpartition(".")[2].isdigit()
    ]
    if again:
        once = ",".join(name for name in found if name not in again)
        raise DataError(
            f"{table.path} has {again[0].rpartition('.')[0]!r} twice; name the classes:"
            f" --label-column '{once}'"
        )
    hours = {name for name in unknown if OF_DAY & set(words(name))} if table.find("hour") else set()
    numbers = [
        name
        for name in unknown
        if name not in found and name not in hours and values.are_nearly_answers(rows[name])
    ]
    if found and numbers:
        value = next(
            value
            for value in rows[numbers[0]]
            if values.given(value) and values.answer(value) is None
        )
        _refuse_doubt(table, found, numbers[0], value)
    hard = HARD if found else (*HARD, *PLACES)
    others = [
        name for name in rows if (is_other(name) or meaning_of(name)) and what(name) not in hard
    ]
    others = [name for name in others if name and plain(name) not in NUMBERS]
    others = [
        name
        for name in others
        if values.are_answers(rows[name], both=True) or values.are_posneg(rows[name])
    ]
    if not found:  # DCASE's has a column Q
        found = [name for name in others if values.are_posneg(rows[name])]
    if not found and others and not optional and not _are_frequencies(table, used, others[0]):
        raise DataError(
            f"{table.path} has no column of labels that is known, and"
            f" {', '.join(map(repr, others))} with 0 and 1 may be classes; name them:"
            f" --label-column '{','.join(others)}', or --label-column none"
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
    about = parts[0] in ("is", "has", "was") or parts[-1] in ("usable", "total", "any")
    return about or bool(SPLIT & set(parts)) or may_deny(name)


def _are_frequencies(table: Table, used: Mapping[str, list[str]], name: str) -> bool:
    other = {"low": "high", "high": "low"}.get(what(name), "")
    return any(not values.are_answers(table.values(each)) for each in used.get(other, ()))


def _refuse_doubt(table: Table, classes: Sequence[str], name: str, odd: str) -> list[str]:
    """Raise DataError for a column that may be a class, and may not."""
    raise DataError(
        f"{table.path} has columns of 0 and 1 ({', '.join(classes[:4])}), and {name!r} holds {odd};"
        f" name the classes: --label-column '{','.join([*classes, name])}', or without {name!r}"
    )


def refuse_no_answers(table: Table, names: Sequence[str]) -> None:
    """Raise DataError for a cell of named columns of 0 and 1 that is no answer."""
    for name in names:
        for number, row in table.rows():
            text = row[name]
            if (
                values.given(text)
                and values.answer(text) is None
                and text.casefold() not in values.OPEN
            ):
                wrong = f"{table.path}:{number}: {name!r} holds {text!r}"
                raise DataError(f"{wrong}; a column of a class holds 0 and 1, or yes and no")
