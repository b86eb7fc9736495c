"""The columns of a table by their values: names of recordings, splits, and classes of 0 and 1."""

import itertools
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from loaders.audio.recordings import answer_columns, answer_words, values
from loaders.audio.recordings.column_names import (
    LABEL,
    NUMBERING,
    NUMBERS,
    OF_DAY,
    SPLIT,
    is_other,
    meaning_of,
    plain,
    what,
    words,
)
from loaders.audio.recordings.find import is_audio
from loaders.audio.recordings.tables import Table
from loaders.base import DataError

LONGEST_LABEL = 8  # [words]
MAX_FLAGS = 4  # columns of 0 and 1 that may all be about the line, and no classes
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
    "box",
    "answer",
    "asked",
    "embeddings",
    "split",
    "date",
    "time",
)
# Meanings that no class has, unless next to another class.
PLACES = ("recording", "site", "latitude", "longitude", "score", "clock", "datetime")


def filled_cells(table: Table, name: str) -> list[str]:
    return list(filter(values.given, table.values(name)))


def choose_files(table: Table, by_meaning: dict[str, list[str]], named: bool) -> None:
    """Keep the columns that name the recording, the best first, and those of folders.

    ``named``: an option names the column. Raises DataError: two name different recordings.
    """
    files = by_meaning.setdefault("file", [])
    if named or not table.rows():
        return
    files[:] = [name for name in files if not _holds_urls(table, name)] or files
    if not files:
        files[:] = _find_audio_columns(table)
    if not files:
        return
    audio_columns = [name for name in files if are_audio(table, name)]
    best = (audio_columns or files)[0]
    for name in files.copy():
        if name == best or _name_same_files(table, best, name):
            continue
        if name not in audio_columns and _holds_folders(table, name):
            files.remove(name)
            by_meaning.setdefault("folder", []).insert(0, name)
            continue
        is_numbered = values.are_numbers(table.values(name)) or not by_meaning.get("start")
        if name not in audio_columns and audio_columns and is_numbered:
            # the number or title of a recording, whose file another column names
            files.remove(name)
            continue
        raise DataError(
            f"{table.path} has {best!r} and {name!r}, which name different recordings; say"
            f" which: --file-column {best!r} or {name!r}"
        )
    files.sort(key=lambda name: name != best)


def _holds_urls(table: Table, name: str) -> bool:
    return any("://" in text for text in table.values(name))


def _find_audio_columns(table: Table) -> list[str]:
    """Return the columns without a meaning of which all cells end like a recording."""
    audio_columns = []
    for name in table.columns:
        is_unknown = not meaning_of(name) and not is_other(name)
        if is_unknown and are_audio(table, name):
            audio_columns.append(name)
    return audio_columns


def _name_same_files(table: Table, first: str, second: str) -> bool:
    """Whether two columns name one file in every line in which both have a name."""
    for _, row in table.rows():
        has_both = values.given(row[first]) and values.given(row[second])
        if has_both and _file_stem(row[first]) != _file_stem(row[second]):
            return False
    return True


def _holds_folders(table: Table, name: str) -> bool:
    """Whether a column may hold folders by its name, or by the slashes in all its cells."""
    if PATHS & set(words(name)):
        return True
    return all(re.search(r"[/\\]", text) for text in filled_cells(table, name))


def are_audio(table: Table, name: str) -> bool:
    """Whether every cell that is not empty has the ending of a recording."""
    texts = filled_cells(table, name)
    return bool(texts) and all(map(is_audio, texts)) and "://" not in texts[0]


def joined(folders: Sequence[str], name: str) -> str:
    """Return a recording's name after its folders. Parts that both state are there once."""
    parts = re.split(r"[/\\]+", name)
    if not parts[0] or re.fullmatch("[A-Za-z]:", parts[0]):
        return "/".join(parts)  # a whole path
    for folder in reversed(folders):
        parts = _join_parts(folder, parts)
    return "/".join(parts)


def _join_parts(folder: str, parts: list[str]) -> list[str]:
    """Return the parts of a path in a folder whose last parts may be the path's first ones."""
    root, *subfolders = re.split(r"[/\\]+", folder)
    folder_parts = [root, *(part for part in subfolders if part not in ("", "."))]
    largest = min(len(folder_parts), len(parts) - 1)
    for n_shared in range(largest, 0, -1):
        if folder_parts[-n_shared:] == parts[:n_shared]:
            return folder_parts + parts[n_shared:]
    return folder_parts + parts


def _file_stem(text: str) -> str:
    """Return a file's name for comparison: without its folders, case and audio ending."""
    last_part = re.split(r"[/\\]+", text)[-1]
    name = unicodedata.normalize("NFC", last_part).casefold()
    return name.rpartition(".")[0] if is_audio(name) else name


def choose_split(table: Table, by_meaning: dict[str, list[str]], classes: Collection[str]) -> None:
    """Keep a column of splits, by its name or its values.

    Raises DataError: a column tells test lines apart in other words: they would be trained on.
    """
    split_columns = by_meaning.get("split", [])
    texts_of = {name: filled_cells(table, name) for name in split_columns}
    for name in _free_columns(table, by_meaning, classes):
        texts_of[name] = filled_cells(table, name)
    for name, texts in texts_of.items():
        if values.are_splits(texts, train=name not in split_columns):
            by_meaning["split"] = [name]
            return
    by_meaning["split"] = [name for name in split_columns if plain(name) == "split"]
    if by_meaning["split"]:
        return
    for name, texts in texts_of.items():
        if name in split_columns:
            _refuse_odd_split(table, name, texts)
        _refuse_test_flag(table, name, texts)


def _free_columns(
    table: Table, by_meaning: Mapping[str, list[str]], classes: Collection[str]
) -> list[str]:
    """Return the columns that have no meaning, by their names or their use."""
    columns_in_use = {*classes, *itertools.chain.from_iterable(by_meaning.values())}
    return [name for name in table.columns if name not in columns_in_use and not meaning_of(name)]


def _refuse_odd_split(table: Table, name: str, texts: Sequence[str]) -> None:
    """Raise DataError for a column of splits with a cell that is none."""
    odd_texts = [text for text in texts if text.casefold() not in values.SPLITS]
    if len(odd_texts) < len(texts):
        raise DataError(
            f"{table.path}: {name!r} holds splits, and {odd_texts[0]!r}; to split by it:"
            f" --split-column {name!r}, or --split-column none"
        )


def _refuse_test_flag(table: Table, name: str, texts: Sequence[str]) -> None:
    """Raise DataError for a column of yes and no that may tell recordings to test on."""
    name_words = set(words(name))
    if not SPLIT & name_words or not values.are_answers(texts, both=True):
        return
    is_train_flag = bool(name_words & {"train", "training"})
    test_texts = [text for text in texts if values.answer(text) != is_train_flag]
    test_text = test_texts[0] if test_texts else "1"
    raise DataError(
        f"{table.path}: {name!r} may tell recordings to test on; to split by it: --split"
        f" column={name}:{test_text}, or --split-column none"
    )


def classes(table: Table, by_meaning: Mapping[str, list[str]], optional: bool) -> list[str]:
    """Return the columns whose names are labels: they hold yes and no alone.

    Names with another meaning (`fin`, `low`) are classes next to others if they hold both.
    Raises DataError: a column may be a class or not.
    """
    unknown = _unknown_columns(table, by_meaning.get("split", ()))
    class_names = [name for name in unknown if values.are_answers(table.values(name))]
    if by_meaning["label"] or by_meaning.get("genus"):
        for name in by_meaning["label"]:
            if class_names and values.are_answers(table.values(name), both=True):
                _refuse_doubt(table, class_names, name, "0 and 1, too")
        return []
    if class_names:
        _refuse_flags(table, class_names)
        _refuse_repeated(table, class_names)
        _refuse_numbers(table, class_names, unknown)
        _refuse_words(table, class_names, unknown)
    candidates = _named_candidates(table, HARD if class_names else (*HARD, *PLACES))
    if not class_names:  # DCASE's has a column Q
        class_names = [name for name in candidates if values.are_posneg(table.values(name))]
    if candidates and not class_names and not optional:
        _refuse_unnamed_classes(table, by_meaning, candidates)
    for name in candidates:
        if _are_frequencies(table, by_meaning, name):
            continue
        if what(name) not in SOFT and name not in class_names:
            _refuse_doubt(table, class_names, name, "0 and 1, too")
        class_names.append(name)
    return [name for name in table.columns if name in class_names]


def _unknown_columns(table: Table, splits: Sequence[str]) -> list[str]:
    """Return the columns whose names have no meaning, and do not number or count."""
    unknown = []
    for name in table.columns:
        if is_other(name) or meaning_of(name) or name in splits:
            continue
        if words(name)[-1] not in NUMBERING:
            unknown.append(name)
    return unknown


def _refuse_flags(table: Table, class_names: Sequence[str]) -> None:
    """Raise DataError if some columns of 0 and 1, and not all, are about the line."""
    flags = list(filter(_is_about, class_names))
    if flags and len(flags) < len(class_names):
        sure = [name for name in class_names if name not in flags]
        _refuse_doubt(table, sure, flags[0], "0 and 1, too, about the recording or the line")


def _refuse_repeated(table: Table, class_names: Sequence[str]) -> None:
    """Raise DataError for a class that has two columns, of which a reader names one X.1."""
    repeated = []
    for name in class_names:
        first_name, _, number = name.rpartition(".")
        if first_name in class_names and number.isdigit():
            repeated.append(name)
    if repeated:
        first_name = repeated[0].rpartition(".")[0]
        unique_names = ",".join(name for name in class_names if name not in repeated)
        raise DataError(
            f"{table.path} has {first_name!r} twice; name the classes:"
            f" --label-column '{unique_names}'"
        )


def _refuse_numbers(table: Table, class_names: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise DataError for a column of numbers or of some answers: it may be a class."""
    has_hours = table.find("hour")
    for name in unknown:
        if name in class_names or (has_hours and OF_DAY & set(words(name))):
            continue
        if values.are_nearly_answers(table.values(name)):
            texts = filled_cells(table, name)
            number = next(text for text in texts if values.answer(text) is None)
            _refuse_doubt(table, class_names, name, number)


def _refuse_words(table: Table, class_names: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise DataError for a column of words next to some of 0 and 1: it may be the labels.

    Several columns of which each line has a yes are classes all the same.
    """
    if _are_all_labelled(table, class_names):
        return
    for name in unknown:
        if name in class_names or not _holds_words(table, name):
            continue
        if len(class_names) > MAX_FLAGS and LABEL.isdisjoint(words(name)):
            continue
        text = filled_cells(table, name)[0]
        raise DataError(
            f"{table.path} has columns of 0 and 1 ({', '.join(class_names[:4])}), and {name!r}"
            f" holds words such as {text[:40]!r}; name the labels: --label-column {name!r}, or the"
            f" classes: --label-column '{','.join(class_names)}'"
        )


def _are_all_labelled(table: Table, class_names: Sequence[str]) -> bool:
    """Whether each line has a yes in one of several columns."""
    if len(class_names) < 2:
        return False
    for _, row in table.rows():
        if not any(values.answer(row[name]) for name in class_names):
            return False
    return True


def _holds_words(table: Table, name: str) -> bool:
    """Whether a column may hold labels: words that are no dates, times, paths or sentences."""
    texts = filled_cells(table, name)
    named = [text for text in texts if re.search(r"[^\W\d_]{2}", text)]
    if not named or len(named) < len(texts) / 2:
        return False
    if values.are_answers(texts) or values.are_splits(texts) or are_audio(table, name):
        return False
    are_dates = all(map(values.has_day, texts))
    are_places = all(re.search(r"[/\\]|://", text) for text in texts)
    are_sentences = max(len(text.split()) for text in texts) > LONGEST_LABEL
    return not (are_dates or are_places or are_sentences or values.like_times(texts))


def _named_candidates(table: Table, excluded_meanings: Collection[str]) -> list[str]:
    """Return the columns of 0 and 1 that may be classes although their names mean other things."""
    candidates = []
    for name in table.columns:
        if not name or plain(name) in NUMBERS or what(name) in excluded_meanings:
            continue
        if not is_other(name) and not meaning_of(name):
            continue
        texts = table.values(name)
        if values.are_answers(texts, both=True) or values.are_posneg(texts):
            candidates.append(name)
    return candidates


def _refuse_unnamed_classes(
    table: Table, by_meaning: Mapping[str, list[str]], candidates: Sequence[str]
) -> None:
    if _are_frequencies(table, by_meaning, candidates[0]):
        return
    raise DataError(
        f"{table.path} has no column of labels that is known, and"
        f" {', '.join(map(repr, candidates))} with 0 and 1 may be classes; name them:"
        f" --label-column '{','.join(candidates)}', or --label-column none"
    )


def _is_about(name: str) -> bool:
    """Whether 0 and 1 are about a line or recording by the name: is_test, has_audio, usable."""
    parts = words(name)
    if parts[0] in ("is", "has", "was") or parts[-1] in ("usable", "total", "any"):
        return True
    return bool(SPLIT & set(parts)) or answer_columns.kind_of(name) is not None


def _are_frequencies(table: Table, by_meaning: Mapping[str, list[str]], name: str) -> bool:
    opposite = {"low": "high", "high": "low"}.get(what(name), "")
    return any(
        not values.are_answers(table.values(bound)) for bound in by_meaning.get(opposite, ())
    )


def _refuse_doubt(table: Table, classes: Sequence[str], name: str, content: str) -> NoReturn:
    """Raise DataError for a column that may be a class, and may not."""
    raise DataError(
        f"{table.path} has columns of 0 and 1 ({', '.join(classes[:4])}), and {name!r} holds"
        f" {content}; name the classes: --label-column '{','.join([*classes, name])}', or without"
        f" {name!r}"
    )


def refuse_no_answers(table: Table, names: Sequence[str]) -> None:
    """Raise DataError for a cell of named columns of 0 and 1 that is no answer."""
    for name in names:
        for number, row in table.rows():
            text = row[name]
            if not values.given(text) or answer_words.is_open(text):
                continue
            if values.answer(text) is None:
                raise DataError(
                    f"{table.path}:{number}: {name!r} holds {text!r}; a column of a class holds 0"
                    " and 1, or yes and no"
                )
