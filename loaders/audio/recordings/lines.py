"""The lines of a table, understood: a recording, or a part of one, and its labels."""

import dataclasses
import functools
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from loaders.audio.recordings import column_names, column_values, values
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.columns import Layout, Options, fixed_length
from loaders.base import DataError

INVISIBLE = re.compile("[\u200b\u200e\u200f\u2060\ufeff\u00ad]")
Row = Mapping[str, str]
SIDES = {"l": 0, "left": 0, "links": 0, "gauche": 0, "r": 1, "right": 1, "rechts": 1, "droite": 1}
FLAGS = {
    "a date": "--date-column",
    "a time": "--start-column and --end-column",
    "numbers": "--start-column and --end-column",
    "a split": "--split-column",
    "an answer": "--answer-column",
}


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


def read(layout: Layout, options: Options, errors: Errors) -> Iterator[Line]:
    """Yield the lines of a table. Others are errors. Raises DataError: ambiguous dates."""
    table, used = layout.table, layout.used
    for text in table.wrong:
        errors.add("bad-row", text)
    for number in table.comments:
        errors.add("comment-line", f"{table.path}:{number}")
    if table.encoding != "UTF-8":
        errors.add("other-encoding", f"{table.path} is read as {table.encoding}")
    for name, what in layout.unused.items():
        flag = FLAGS.get(what, "--label-column")
        errors.add("unused-column", f"{table.path}: {name!r} looks like {what}; to use it: {flag}")
    about = _About(layout, options, errors)
    times = _Times(layout, options)
    rows = _one_of_views(layout)
    has_times = any(layout.text(row, "start") or layout.text(row, "file offset") for _, row in rows)
    has_splits = any(layout.text(row, "split") for _, row in rows)
    labels_of = _Labels(layout, options)
    channel_of = _Channels(layout, errors)
    needed = [*(name for several in used.values() for name in several), *layout.classes]
    needed = [name for name in needed if any(map(values.is_sheet_error, table.values(name)))]
    letters = (
        values.are_letters(table.values(asked)) if (asked := layout.column("answer")) else False
    )
    for number, row in rows:
        where = f"{table.path}:{number}"
        try:
            if needed and (
                broken := next((name for name in needed if values.is_sheet_error(row[name])), None)
            ):
                raise _WrongLine(
                    f"has {row[broken]!r} as its {broken!r}, an error of a spreadsheet"
                )
            start, end = times.of(row)
            its_labels = labels_of(row)
            answer = _answer(layout, row, letters)
            its_about = about.of(row, where)
        except _WrongLine as error:
            errors.add("bad-row", f"{where} {error}")
            continue
        except ValueError as error:
            errors.add("bad-date", f"{where}: {error}, or --date-column none")
            continue
        is_open = layout.classes and any(
            row[name].casefold() in values.OPEN for name in layout.classes
        )
        if is_open and not errors.add("open-class" if its_labels else "unanswered", where):
            continue
        if joined := labels_of.joined(its_labels):
            errors.add("joined-labels", f"{where}: {joined}")
        heard = not all(map(values.says_none, its_labels))
        if has_times and start is None and heard and not errors.add("no-times", where):
            continue
        text = layout.text(row, "label")
        silent = (
            start is not None
            and not (layout.classes or used.get("answer"))
            and options.label_column != "none"
        )
        if not its_labels and (silent or text):
            errors.add("no-label", f"{where}: {text!r}" if text else where)
        split = values.split_of(layout.text(row, "split"))
        if has_splits and not split and not errors.add("no-split", where):
            continue
        yield Line(
            where,
            _file(layout, row),
            start,
            end,
            its_labels,
            _frequency(layout, row, "low"),
            _frequency(layout, row, "high"),
            channel_of(row, where),
            answer,
            split,
            its_about,
            row,
        )


class _WrongLine(ValueError):
    """A line whose times, labels or answer are none."""


class _Labels:
    def __init__(self, layout: Layout, options: Options):
        self._layout = layout
        its = layout.used["label"]
        texts = [text for name in its for text in layout.table.values(name)]
        self._numbered = values.are_numbers(texts)
        # 5.0, but not 1.0 and 1.1
        self._counted = self._numbered and all(
            map(re.compile(r"-?\d+(\.0*)?|\D*").fullmatch, texts)
        )
        listed = any(column_names.plain(name) == "positivelabels" for name in its)
        self._separator = options.separator or ("," if listed else "")
        self._several = its if len(its) > 1 and options.label_column else []
        self._reported: set[str] = set()
        last = (column_names.words(its[0]) if its else [""])[-1]
        plural = last[-1:] == "s" and last not in ("species", "class")
        self._between = (
            (*",/+&", *(" " if last in ("tags", "keywords") else ""))
            if plural and not self._separator
            else ()
        )

    def __call__(self, row: Row) -> tuple[str, ...]:
        """Raise _WrongLine for a field that holds more than labels."""
        if self._layout.classes:
            return tuple(name for name in self._layout.classes if values.answer(row[name]))
        if self._layout.used.get("genus"):
            genus, epithet = self._layout.text(row, "genus"), self._layout.text(row, "epithet")
            if epithet and not genus:
                raise _WrongLine(f"has {epithet!r} as its species, and no genus")
            return labels(epithet if epithet.startswith(f"{genus} ") else f"{genus} {epithet}", "")
        text = self._layout.text(row, "label")
        found = labels(values.whole(text) if self._counted else text, self._separator)
        if self._several:
            found = tuple(
                dict.fromkeys(
                    label for name in self._several for label in labels(row[name], self._separator)
                )
            )
        if found and found[0].startswith("{") and ":" in found[0]:
            raise _WrongLine(f"has {found[0][:60]!r} as its label; write the labels alone")
        numbers = (
            [] if self._numbered else [label for label in found if values.are_numbers([label])]
        )
        if 0 < len(numbers) < len(found):
            raise _WrongLine(
                f"has the number {numbers[0]} among its labels; write it into a column of its own"
            )
        return found

    def joined(self, its_labels: tuple[str, ...]) -> str:
        """Return why a label of a plural column may be several, or "" if not, or not again."""
        name = (
            its_labels[0]
            if len(its_labels) == 1 and self._between and not self._layout.classes
            else ""
        )
        for between in self._between if name and name not in self._reported else ():
            if len(parts := name.split(between)) > 1 and all(map(str.strip, parts)):
                self._reported.add(name)
                return f"{name!r}; split it with --separator {between!r}"
        return ""


def _one_of_views(layout: Layout) -> list[tuple[int, Row]]:
    """Return the lines of a table, of which Raven lists a selection once for each view."""
    view, selection = layout.column("view"), layout.column("selection")
    if not view or not selection or len(set(layout.table.values(view))) < 2:
        return list(layout.table.rows())
    meanings = ("selection", "start", "end", "duration", "file", "channel")
    places = [name for meaning in meanings for name in layout.used.get(meaning, ())]
    found: dict[tuple[str, ...], list[tuple[int, dict[str, str]]]] = {}
    for number, row in layout.table.rows():
        several = found.setdefault(tuple(row[name] for name in places), [])
        for _, other in several:
            same = all(not row[n] or not other[n] or row[n] == other[n] for n in row if n != view)
            if same and row[view] != other[view]:
                other.update({name: text for name, text in row.items() if text and not other[name]})
                break
        else:
            several.append((number, dict(row)))
    return sorted(
        (each for several in found.values() for each in several), key=lambda each: each[0]
    )


class _Channels:
    """The channel of lines, from 0: of 0, 1, 1.0, L, R, "Channel 2"."""

    def __init__(self, layout: Layout, errors: Errors):
        self._layout, self._errors = layout, errors
        texts = [self._number(layout.text(row, "channel")) for _, row in layout.table.rows()]
        zero = "0" in texts or any(
            column_names.plain(name) == "infile" for name in layout.used["file"]
        )
        self._first = 0 if zero else 1

    @staticmethod
    @functools.lru_cache(1 << 10)
    def _number(text: str) -> str:
        found = re.fullmatch(
            r"(?:ch|channel|kanal|canal)?[ ._]*(\d{1,9})(?:\.0+)?", text.strip().casefold()
        )
        return str(int(found[1])) if found else text.strip().casefold()

    def __call__(self, row: Row, where: str) -> int | None:
        text = self._number(self._layout.text(row, "channel"))
        if text in SIDES:
            return SIDES[text]
        if text.isdecimal() and len(text) < 10 and int(text) >= self._first:
            return int(text) - self._first
        if text:
            self._errors.add("odd-channel", f"{where}: {text!r}")
        return None


@functools.lru_cache(1 << 14)
def labels(text: str | None, separator: str) -> tuple[str, ...]:
    """Return the labels of a field: one, or several in brackets or between separators.

    Lines and tabs of a cell are shown with | between them, and refused as one label. Marks alone,
    such as -, are no label. ???? is one, of published sets.
    """
    text = re.sub(r"\s*[\r\n\t]\s*", " | ", unicodedata.normalize("NFC", text or "").strip())
    text = html.unescape(text) if re.search(r"&(#\d+|#x[0-9a-fA-F]+|[a-z]{2,6});", text) else text
    text = INVISIBLE.sub("", " ".join(re.sub(r"[\x00-\x1f\x7f]+", " ", text).split()))
    parts: Iterable[str] = [text]
    wrapped = re.fullmatch(
        r"(?:array|Index|set|frozenset|tuple|list|c)\((.*?)(?:, dtype=.*)?\)", text
    )
    listed = re.fullmatch(r"[\[{(]*(.*?)[\]})]*", wrapped[1]) if wrapped else None
    if listed := listed or re.fullmatch(r"\[+(.*?)\]+|\((\s*['\"].*|.*,.*)\)|\{([^:]*)\}", text):
        parts = _parts(next(part for part in listed.groups() if part is not None))
    elif separator:
        parts = text.split(separator)
    found = (unquoted(part.strip()) for part in parts)
    marks = re.compile(r"[-\u2013\u2014.*_/#+!]+")
    return tuple(
        dict.fromkeys(part for part in found if values.given(part) and not marks.fullmatch(part))
    )


def _parts(text: str) -> list[str]:
    """Return the parts of a list: between commas, or in quotes, which no apostrophe is."""
    quoted = r"(['\"])(?P<quoted>(?:(?!\1(?:\s|,|$)).)*)\1(?=\s|,|$)"
    text = text.replace("\\'", "'")
    return [
        each["quoted"] or each["plain"] or ""
        for each in re.finditer(rf"{quoted}|(?P<plain>[^,\s][^,]*)", text)
    ]


def unquoted(text: str) -> str:
    """Return a text without the quotes around it, as a spreadsheet or NumPy writes it."""
    text = re.sub(r"^(?:np\.str_\()?b?(['\"].*['\"])\)?$", r"\1", text)
    if (
        len(text) > 1
        and text[0] == text[-1]
        and text[0] in "\"'"
        and text[0] not in text[1:-1].replace(text[0] * 2, "")
    ):
        return text[1:-1].replace(text[0] * 2, text[0]).strip()
    return text


class _Times:
    def __init__(self, layout: Layout, options: Options):
        self._length = fixed_length(layout.table, options)
        self._names = [
            layout.column(meaning) for meaning in ("start", "end", "duration", "file offset")
        ]
        self._scales = [layout.scales.get(name or "", 1.0) for name in self._names]
        cells = (row[name] for name in self._names if name for _, row in layout.table.rows())
        self._comma = not any("." in cell for cell in cells)
        self._spans = bool(self._names[0]) and values.are_spans(
            layout.table.values(self._names[0] or "")
        )
        self._minutes = {name for name in self._names if name and column_names.in_minutes(name)}
        self._offsets = any(layout.text(row, "file offset") for _, row in layout.table.rows())
        self._days = _are_days(
            row[name] for name in self._names[:2] if name for _, row in layout.table.rows()
        )
        # columns, and the forms of cells in them that may be thousands or a fraction
        self._grouped: dict[str, str] = {}
        for name, scale in zip(self._names, self._scales, strict=True):
            form = r"\d{1,3}(,\d{3})+" if layout.table.separator == "," else ""
            marked = (
                [text for text in layout.table.values(name) if "," in text or "." in text]
                if name and scale < 1
                else []
            )
            # of ms, 2.000
            if marked and all(re.fullmatch(r"\d{1,3}([.,]\d{3})+", text) for text in marked):
                form = r"\d{1,3}([.,]\d{3})+"
            self._grouped |= {name: form} if name and form else {}

    def of(self, row: Row) -> tuple[float | None, float | None]:
        """Start and end, each None if the line has no times. Raises _WrongLine."""
        if self._days:
            cell = f"{row[self._names[0] or '']!r} as its {self._names[0]!r}"
            raise _WrongLine(f"has {cell}, a spreadsheet's part of a day; format it in s")
        if self._spans:
            return values.span(row[self._names[0] or ""]) or (None, None)
        found: list[float | None] = []
        for name, scale in zip(self._names, self._scales, strict=True):
            text = row[name] if name else ""
            if name in self._grouped and re.fullmatch(self._grouped[name], text):
                mark = "," if "," in text else "."
                raise _WrongLine(
                    f"has {text!r} as its {name!r}, which may be thousands or a fraction; write it"
                    f" without {mark}"
                )
            try:
                is_clock = name in self._minutes and ":" in text
                found.append(
                    values.minutes(text) if is_clock else values.seconds(text, scale, self._comma)
                )
            except ValueError:
                hint = (
                    "; write 0:00:12 for 0:12, or (mm:ss) into the column's name"
                    if ":" in text
                    else ""
                )
                raise _WrongLine(
                    f"has {text!r} as its {name!r}, which is no number of seconds{hint}"
                ) from None
        start, end, duration, offset = found
        if self._offsets and offset is None and start is not None:
            raise _WrongLine(
                f"has no {self._names[3]!r}, which other lines have, so its start counts over all"
                " files"
            )
        duration = self._length if duration is None else duration
        if start is None and end is not None and self._length is not None:
            start = round(max(0.0, end - self._length), 9)
        if end is None and start is not None and duration is not None:
            end = round(start + duration, 9)
        if end is None and start is None and duration is not None and offset is not None:
            start, end = offset, round(offset + duration, 9)
        if (start is None) != (end is None):
            raise _WrongLine("has a start or an end, and not both")
        if start is not None and end is not None and offset is not None:
            start, end = offset, round(offset + end - start, 9)
        return start, end


def _are_days(texts: Iterable[str]) -> bool:
    """Whether all times are parts of a day, as of a spreadsheet: many digits, or within 1 ms."""
    found = [text.strip() for text in texts if values.given(text.strip())]
    number = r"0(\.0*)?|0[.,]\d{8,}|\d([.,]\d+)?[eE]-0?\d|0[.,]000\d+"
    if not all(re.fullmatch(number, text) for text in found):
        return False
    days = [float(text.replace(",", ".")) for text in found]
    return any(days) and (
        max(days) < 1e-3 or all(abs(day * 86400 - round(day * 86400)) < 1e-3 for day in days)
    )


def _frequency(layout: Layout, row: Row, meaning: str) -> float | None:
    if not (name := layout.column(meaning)):
        return None
    try:
        value = values.number(row[name])
    except ValueError:
        return None  # of a figure that nothing depends on
    return None if value is None else value * layout.scales.get(name, 1.0)


def _file(layout: Layout, row: Row) -> str:
    """Return the recording's name, after folders that the table names in other columns."""
    # 64760.0, as pandas writes a number
    name = values.whole(layout.text(row, "file")).replace("\\", "/")
    folders = [row[column] for column in layout.used.get("folder", ()) if values.given(row[column])]
    return column_values.joined(folders, name) if name and folders else name


def _answer(layout: Layout, row: Row, letters: bool) -> str:
    """Return the answer about a label, of a column of P and A if ``letters``. Raises _WrongLine."""
    if not (text := layout.text(row, "answer")):
        return ""
    name = layout.column("answer") or ""
    absent = column_names.is_absent(name, text)
    found = values.verdict(text, letters) if absent is None else "no" if absent else "yes"
    if found is None:
        raise _WrongLine(f"has {text!r} as its answer; expected yes, no or skip")
    denying = column_names.plain(name) in column_names.DENYING
    return {"yes": "no", "no": "yes"}.get(found, found) if denying else found


class _About:
    def __init__(self, layout: Layout, options: Options, errors: Errors):
        self._layout, self._errors = layout, errors
        self._given = [key for key in column_names.ABOUT if layout.used.get(key)]
        # of each column, as one may have days first, and another months
        self._dates: dict[str, values.Dates] = {}
        for name in (*layout.used.get("date", ()), *layout.used.get("datetime", ())):
            try:
                self._dates[name] = values.Dates(
                    list(filter(values.given, layout.table.values(name))), options.dates
                )
            except ValueError as error:
                raise DataError(
                    f"{layout.table.path}: in {name!r}, {error}, or omit them: --date-column none"
                ) from error

    def of(self, row: Row, where: str) -> dict[str, str]:
        """Return the place's facts. Raises ValueError: a date or a time that is none."""
        about = {key: self._layout.text(row, key) for key in self._given}
        for key, negative in (("latitude", "S"), ("longitude", "W")):
            try:
                about[key] = f"{values.degrees(about[key], negative):.9g}" if about.get(key) else ""
            except ValueError as error:
                self._errors.add("odd-place", f"{where}: {error}")
                about[key] = ""
        for meaning in ("datetime", "date"):
            name = next(
                (name for name in self._layout.used.get(meaning, ()) if values.given(row[name])),
                None,
            )
            if name:
                about["date"], time = self._dates[name].read(row[name])
                about["time"] = time or about.get("time", "")
        if text := self._layout.text(row, "time"):
            about["time"] = values.time_of_day(text) if re.search(r"\d", text) else ""
        return {key: value for key, value in about.items() if value}
