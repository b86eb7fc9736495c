"""Text with columns between commas, semicolons or tabs, in UTF-8 (with or without its mark), UTF-16 or Latin-1."""

import csv
import io
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from loaders.base import DataError
from loaders.io import files

LARGEST = 2 << 30  # [bytes] of a table


def text_of(path: pathlib.Path) -> str:
    """The text of a file. Raises DataError if it is no text."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} is larger than 2 GiB, more than a table of annotations; split it")
        data = files.read(path, most=LARGEST)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    if b"\0" in data[:4096]:
        raise DataError(f"{path} is not text; name a table (CSV, TSV, Raven, Audacity), a folder, or metadata (JSON)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def said_separator(line: str) -> str | None:
    """The separator in a table's first line, as Excel writes it: "sep=;". None for every other line."""
    found = re.fullmatch(r"sep=([;,\t|])", line.strip('\r\n" '), re.IGNORECASE)
    return found[1] if found else None


def separator(header: str) -> str:
    """The separator that a header line has most of."""
    return max("\t;,", key=header.count)


class Table:
    """A table's columns and rows. A column is found by any of its names, in any case."""

    def __init__(self, path: pathlib.Path, text: str):
        self.path = path
        lines = text.splitlines()
        # Comments: AudioSet's files begin with some, the last of which is the header.
        stated = said_separator(lines[0]) if lines else None
        n = 1 if stated else 0
        while n + 1 < len(lines) and lines[n].startswith("#") and lines[n + 1].startswith("#"):
            n += 1
        header = lines[n].lstrip("# ") if n < len(lines) else ""
        self.separator = stated or separator(header)
        self._first = n + 1
        self._lines = lines[n + 1 :]
        self.columns = [name.strip().strip('"') for name in next(iter(self._reader([header])), [])]

    def _reader(self, lines: Sequence[str]) -> Iterator[list[str]]:
        try:
            yield from csv.reader(io.StringIO("\n".join(lines)), delimiter=self.separator, skipinitialspace=True)
        except csv.Error as error:  # a field of 131,072 characters
            raise DataError(f"{self.path} cannot be read as a table: {error}") from error

    def find(self, *names: str) -> str | None:
        """The first column that has one of these names, or None."""
        known = {_plain(name): name for name in reversed(self.columns)}
        return next((known[_plain(name)] for name in names if _plain(name) in known), None)

    def rows(self) -> Iterator[tuple[int, Mapping[str, str]]]:
        """The number of each line in the file, and its values by column, without empty lines and comments."""
        for number, values in enumerate(self._reader(self._lines), self._first + 1):
            if any(value.strip() for value in values) and not values[0].startswith("#"):
                yield number, {name: value.strip() for name, value in zip(self.columns, values, strict=False)}


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name).casefold()


def number(text: str | None) -> float | None:
    """A number with a point or a comma, or None for an empty field. Raises ValueError."""
    if text is None or not text.strip():
        return None
    value = float(text.strip().replace(",", ".") if "." not in text else text)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{text!r} is not a number")
    return value
