"""The columns of a table that name its recordings, and the folders that these lie in."""

import re
import unicodedata
from collections.abc import Sequence

from loaders.audio.recordings import values
from loaders.audio.recordings.column_names import is_other, meaning_of, words
from loaders.audio.recordings.find import is_audio
from loaders.audio.recordings.tables import Table
from loaders.base import DataError

PATHS = {"path", "filepath", "dir", "folder"}  # words in the name of a column that may hold folders


def choose(table: Table, used: dict[str, list[str]], named: bool) -> None:
    """Keep the columns that name the recording, the best first, and those of folders.

    Args:
      named: an option names the column.

    Raises DataError: two columns name different recordings.
    """
    files = used.setdefault("file", [])
    if named or not table.rows():
        return
    files[:] = [name for name in files if not any("://" in value for value in table.values(name))] or files
    if not files:
        files[:] = [name for name in table.columns if not meaning_of(name) and not is_other(name) and are_audio(table, name)]
    ended = [name for name in files if are_audio(table, name)]
    best = (ended or files)[:1]
    for name in [name for name in files if name not in best]:
        if not _differ(table, best[0], name):
            continue
        if name in ended or not _are_folders(table, name):
            if name not in ended and ended and (values.are_numbers(table.values(name)) or not used.get("start")):
                files.remove(name)  # the number or title of a recording, whose file another column names
                continue
            raise DataError(
                f"{table.path} has {best[0]!r} and {name!r}, which name different recordings; say which: "
                f"--file-column {best[0]!r} or {name!r}"
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
        above = [part for n, part in enumerate(re.split(r"[/\\]+", folder)) if part not in ("", ".") or n == 0]
        most = min(len(above), len(parts) - 1)
        shared = next((n for n in range(most, 0, -1) if above[-n:] == parts[:n]), 0)
        parts = above + parts[shared:]
    return "/".join(parts)


def _last(text: str) -> str:
    """Return the file name of a path in one form, without the ending of a recording."""
    last = unicodedata.normalize("NFC", re.split(r"[/\\]+", text)[-1]).casefold()
    return last.rpartition(".")[0] if is_audio(last) else last


def _differ(table: Table, first: str, second: str) -> bool:
    pairs = [(row[first], row[second]) for _, row in table.rows() if values.given(row[first]) and values.given(row[second])]
    return any(_last(a) != _last(b) for a, b in pairs)


def _are_folders(table: Table, name: str) -> bool:
    """Whether a column may hold folders, by its name or its values."""
    return bool(PATHS & set(words(name))) or all(re.search(r"[/\\]", text) for text in filter(values.given, table.values(name)))
