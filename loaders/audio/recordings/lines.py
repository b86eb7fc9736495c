"""The lines of a table, understood: a recording, or a part of one, and its labels."""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterator, Mapping

from loaders.audio.recordings import columns, values
from loaders.audio.recordings.annotations import Mistakes
from loaders.audio.recordings.columns import Layout, Options
from loaders.base import DataError

Row = Mapping[str, str]


@dataclasses.dataclass(slots=True)
class Line:
    """One line of a table. Times in s, frequencies in Hz."""

    where: str  # the table and its line, for messages
    file: str  # the name of the recording; empty: the table names none
    start: float | None
    end: float | None
    labels: tuple[str, ...]
    low: float | None
    high: float | None
    channel: int | None  # from 0
    answer: str  # "yes", "no" or "skip"; "" without a column of answers
    split: str
    about: Mapping[str, str]  # recording, site, date, time, latitude, longitude
    row: Row


def read(layout: Layout, options: Options, mistakes: Mistakes) -> Iterator[Line]:
    """Yield the lines of a table. Lines that cannot be understood are mistakes.

    Raises DataError: nothing tells day and month of its dates apart.
    """
    table, used = layout.table, layout.used
    for text in table.wrong:
        mistakes.add("bad-row", text)
    for number in table.comments:
        mistakes.add("comment-line", f"{table.path}:{number}")
    if table.encoding != "UTF-8":
        mistakes.add("other-encoding", f"{table.path} is read as {table.encoding}")
    for name, what in layout.unused.items():
        flag = "--start-column and --end-column" if what == "a time" else "--label-column"
        mistakes.add("unused-column", f"{table.path}: {name!r} looks like {what}; to use it: {flag}")
    about = _About(layout, options)
    times = _Times(layout)
    has_times = any(layout.text(row, "start") or layout.text(row, "file offset") for _, row in table.rows())
    numbered = used["label"] and all(values.are_numbers(table.values(name)) for name in used["label"])
    channels = [layout.text(row, "channel") for _, row in table.rows()]
    first = 0 if "0" in channels or any(columns.plain(name) == "infile" for name in used["file"]) else 1
    separator = options.separator or ("," if any(columns.plain(n) == "positivelabels" for n in used["label"]) else "")
    view, seen = layout.column("view"), set()
    for number, row in table.rows():
        where = f"{table.path}:{number}"
        if view and used.get("selection"):  # Raven lists a selection for each of its views
            key = tuple(value for column, value in row.items() if column != view)
            if key in seen:
                continue
            seen.add(key)
        try:
            start, end = times.of(row)
            its_about = about.of(row)
        except _WrongTime as error:
            mistakes.add("bad-row", f"{where} {error}")
            continue
        except ValueError as error:
            mistakes.add("bad-date", f"{where}: {error}, or --date-column none")
            continue
        if layout.classes:
            its_labels = tuple(name for name in layout.classes if values.answer(row[name]))
        elif used.get("genus"):
            its_labels = labels(f"{layout.text(row, 'genus')} {layout.text(row, 'epithet')}", "")
        else:
            text = layout.text(row, "label")
            its_labels = labels(values.whole(text) if numbered else text, separator)
        if has_times and start is None and its_labels:
            if not mistakes.add("no-times", where):
                continue
        if not (its_labels or layout.classes or used.get("answer")) and start is not None and options.label_column != "none":
            mistakes.add("no-label", where)
        text = layout.text(row, "channel")
        channel = int(text) - first if text.isdecimal() and len(text) < 10 and int(text) >= first else None
        if (answer := _answer(layout, row)) is None:
            mistakes.add("bad-row", f"{where} has {layout.text(row, 'answer')!r} as its answer; expected yes, no or skip")
            continue
        yield Line(
            where, _file(layout, row), start, end, its_labels, _frequency(layout, row, "low"), _frequency(layout, row, "high"),
            channel, answer, values.whole(layout.text(row, "split")), its_about, row,
        )  # fmt: skip


@functools.lru_cache(1 << 14)
def labels(text: str | None, separator: str) -> tuple[str, ...]:
    """Return the labels of a field: one, several in brackets, or several between separators, in one line each."""
    text = " ".join(re.sub(r"[\x00-\x1f\x7f]+", " ", unicodedata.normalize("NFC", text or "")).split())
    if not values.given(text):
        return ()
    if text.startswith("[") and text.endswith("]"):
        parts = re.findall(r"'([^']*)'|\"([^\"]*)\"|([^,\s\[\]'\"][^,\[\]'\"]*)", text)
        return tuple(dict.fromkeys(filter(None, ("".join(part).strip() for part in parts))))
    if separator:
        return tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(separator)))))
    return (text,)


class _WrongTime(ValueError):
    """Times of a line that are none."""


class _Times:
    """The start and the end of lines."""

    def __init__(self, layout: Layout):
        self._names = [layout.column(meaning) for meaning in ("start", "end", "duration", "file offset")]
        self._scales = [layout.scales.get(name or "", 1.0) for name in self._names]
        cells = (row[name] for name in self._names if name for _, row in layout.table.rows())
        self._comma = not any("." in cell for cell in cells)
        self._thousands = layout.table.separator == ","  # in such a table 1,500 may be either

    def of(self, row: Row) -> tuple[float | None, float | None]:
        """Start and end, each None if the line has no times. Raises _WrongTime."""
        found: list[float | None] = []
        for name, scale in zip(self._names, self._scales, strict=True):
            if name and self._thousands and re.fullmatch(r"\d{1,3}(,\d{3})+", row[name]):
                raise _WrongTime(f"has {row[name]!r} as its {name!r}, which may be thousands or a fraction; write it without ,")
            try:
                found.append(values.seconds(row[name], scale, self._comma) if name else None)
            except ValueError:
                raise _WrongTime(f"has {row[name or '']!r} as its {name!r}, which is no number of seconds") from None
        start, end, duration, offset = found
        if end is None and start is not None and duration is not None:
            end = round(start + duration, 9)
        if end is None and start is None and duration is not None and offset is not None:
            start, end = offset, round(offset + duration, 9)
        if (start is None) != (end is None):
            raise _WrongTime("has a start or an end, and not both")
        if start is not None and end is not None and offset is not None:
            start, end = offset, round(offset + end - start, 9)
        return start, end


def _frequency(layout: Layout, row: Row, meaning: str) -> float | None:
    name = layout.column(meaning)
    try:
        value = values.number(row[name]) if name else None
    except ValueError:
        return None  # of a figure that nothing depends on
    return None if value is None else value * layout.scales.get(name or "", 1.0)


def _file(layout: Layout, row: Row) -> str:
    """Return the name of the recording, after the folders that the table names in columns of their own."""
    name = layout.text(row, "file").replace("\\", "/")
    folders = [
        row[column].replace("\\", "/").rstrip("/") for column in layout.used.get("folder", ()) if values.given(row[column])
    ]
    return "/".join([*folders, name]) if name and folders and "/" not in name else name


def _answer(layout: Layout, row: Row) -> str | None:
    """Return the answer of `jaxtrain review`, or of a person in Arbimon, about the label. None: it is none."""
    text = layout.text(row, "answer")
    if not text or text.casefold() in values.OPEN:
        return "skip" if text else ""
    found = values.answer(text)
    return None if found is None else "yes" if found else "no"


class _About:
    """Date, time, site and place of the recordings of a table."""

    def __init__(self, layout: Layout, options: Options):
        self._layout = layout
        self._given = [key for key in columns.ABOUT if layout.used.get(key)]
        texts = [row[c] for m in ("date", "datetime") for c in layout.used.get(m, ()) for _, row in layout.table.rows()]
        try:
            self._dates = values.Dates(list(filter(values.given, texts)), options.dates)
        except ValueError as error:
            raise DataError(f"{layout.table.path}: in its dates, {error}, or omit them: --date-column none") from error

    def of(self, row: Row) -> dict[str, str]:
        """Return the place's facts. Raises ValueError: a date or a time that is none."""
        about = {key: self._layout.text(row, key) for key in self._given}
        for meaning in ("datetime", "date"):
            if text := self._layout.text(row, meaning):
                about["date"], time = self._dates.read(text)
                about["time"] = time or about.get("time", "")
        if text := self._layout.text(row, "time"):
            about["time"] = values.time_of_day(text) if re.search(r"\d", text) else ""
        return {key: value for key, value in about.items() if value}
