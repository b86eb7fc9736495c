"""The lines of a table, understood: a recording, or a part of one, and its labels."""

import contextlib
import dataclasses
import functools
import html
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from loaders.audio.recordings import (
    answer_columns,
    answer_words,
    column_names,
    column_values,
    label_words,
    values,
)
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.columns import Layout, Options, fixed_length
from loaders.audio.recordings.tables import Table
from loaders.base import DataError

MARKS = re.compile(r"[-\u2013\u2014.*_/#+!]+")  # alone in a cell, no label
WRAPPED_LIST = re.compile(r"(?:array|Index|set|frozenset|tuple|list|c)\((.*?)(?:, dtype=.*)?\)")
INVISIBLE = re.compile("[\u200b\u200e\u200f\u2060\ufeff\u00ad]")
Row = Mapping[str, str]
SIDES = {"l": 0, "left": 0, "links": 0, "gauche": 0, "r": 1, "right": 1, "rechts": 1, "droite": 1}
FLAGS = {
    "a date": "--date-column",
    "a time": "--start-column and --end-column",
    "numbers": "--start-column and --end-column",
    "a split": "--split-column",
    "an answer": "--answer-column",
    "a degree of certainty": "write high or low in its cells, and --answer-column",
}
HIGHEST_KILOHERTZ = 200.0  # bats call below it


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
    open_classes: tuple[str, ...]  # columns of classes of which the line says unknown
    split: str
    # recording, site, date, time, latitude, longitude, time_expansion
    about: Mapping[str, str]
    row: Row
    is_dropped: bool = False  # by an error that is counted: nobody knows what is there


def read(layout: Layout, options: Options, errors: Errors) -> Iterator[Line]:
    """Yield the lines of a table, those with errors too. Raises DataError: ambiguous dates."""
    _report_table(layout, errors)
    reader = _LineReader(layout, options, errors)
    for number, row in layout.table.wrong_rows:
        yield _dropped(layout, f"{layout.table.path}:{number}", row)
    for number, row in reader.rows:
        yield reader.read(f"{layout.table.path}:{number}", row)


def _dropped(
    layout: Layout, where: str, row: Row, start: float | None = None, end: float | None = None
) -> Line:
    """Return a line with an error, of which the recording counts alone, and the times if known."""
    return Line(
        where=where,
        file=_file(layout, row),
        start=start,
        end=end,
        labels=(),
        low=None,
        high=None,
        channel=None,
        answer="skip",
        open_classes=(),
        split=values.split_of(layout.text(row, "split")),
        about={},
        row=row,
        is_dropped=True,
    )


def _report_table(layout: Layout, errors: Errors) -> None:
    """Report the lines and columns that are not read, and an encoding other than UTF-8."""
    table = layout.table
    for text in table.wrong:
        errors.add("bad-row", text)
    for number in table.comments:
        errors.add("comment-line", f"{table.path}:{number}")
    if table.encoding != "UTF-8":
        errors.add("other-encoding", f"{table.path} is read as {table.encoding}")
    for name, likeness in layout.unused.items():
        flag = FLAGS.get(likeness, "--label-column")
        errors.add(
            "unused-column", f"{table.path}: {name!r} looks like {likeness}; to use it: {flag}"
        )


def _has_clear_band(layout: Layout, errors: Errors) -> bool:
    """Whether the frequencies of a table are in Hz, or an error keeps them as if they were."""
    names = [name for name in map(layout.column, ("low", "high")) if name]
    for name in names:
        unit = column_names.words(name)[-1]
        if layout.scales.get(name, 1.0) != 1.0 or unit in column_names.HERTZ:
            return True
    numbers = []
    for name in names:
        for text in column_values.filled_cells(layout.table, name):
            with contextlib.suppress(ValueError):
                numbers.append(values.number(text) or 0.0)
    largest = max(numbers, default=0.0)
    if not 0 < largest < HIGHEST_KILOHERTZ:
        return True
    listed = ", ".join(names)
    text = f"{layout.table.path}: {listed} are at most {largest:g}"
    return errors.add(
        "unclear-unit", f"{text}; if that is kHz, name the columns so: {names[0]} kHz"
    )


class _WrongLine(ValueError):
    """A line whose times, labels or answer are none."""


class _LineReader:
    def __init__(self, layout: Layout, options: Options, errors: Errors):
        self._layout = layout
        self._errors = errors
        self._about = _About(layout, options, errors)
        self._times = _Times(layout, options)
        self._labels = _Labels(layout, options)
        self._channels = _Channels(layout, errors)
        self._has_clear_band = _has_clear_band(layout, errors)
        self.rows = _one_of_views(layout)
        self._has_times = self._is_in_some_row("start") or self._is_in_some_row("file offset")
        self._has_splits = self._is_in_some_row("split")
        self._sheet_error_columns = _find_sheet_errors(layout)
        self._answers: answer_columns.AnswerColumn | None = None
        if name := layout.column("answer"):
            self._answers = answer_columns.AnswerColumn(name, layout.table.values(name))
        self._blanks_are_open = _says_no(layout)
        has_answers = bool(layout.classes or layout.by_meaning.get("answer"))
        self._may_lack_label = has_answers or options.label_column == "none"

    def _is_in_some_row(self, meaning: str) -> bool:
        return any(self._layout.text(row, meaning) for _, row in self.rows)

    def read(self, where: str, row: Row) -> Line:
        """Return a line, which is dropped if an error says so."""
        layout = self._layout
        start: float | None = None
        end: float | None = None
        try:
            self._refuse_sheet_errors(row)
            start, end = self._times.of(row)
            labels_of_row = self._labels.of(row)
            answer = self._answer(row)
            about = self._about.of(row, where)
        except _WrongLine as error:
            self._errors.add("bad-row", f"{where} {error}")
            return _dropped(layout, where, row, start, end)
        except ValueError as error:
            self._errors.add("bad-date", f"{where}: {error}, or --date-column none")
            return _dropped(layout, where, row, start, end)
        is_about_file = _is_about_file(layout, row) and not start
        if is_about_file:
            start = end = None
        may_lack_times = is_about_file or start is not None
        if not self._keeps_labels(where, row, start, labels_of_row, may_lack_times):
            return _dropped(layout, where, row)
        low = high = None
        if self._has_clear_band and not is_about_file:
            low, high = _band(layout, row)
        split = values.split_of(layout.text(row, "split"))
        if self._has_splits and not split and not self._errors.add("no-split", where):
            return _dropped(layout, where, row, start, end)
        return Line(
            where=where,
            file=_file(layout, row),
            start=start,
            end=end,
            labels=labels_of_row,
            low=low,
            high=high,
            channel=self._channels.of(row, where),
            answer=answer,
            open_classes=self._open_classes(row, bool(labels_of_row)),
            split=split,
            about=about,
            row=row,
        )

    def _answer(self, row: Row) -> str:
        """Return the answer about a label, "" without such a column. Raises _WrongLine."""
        if self._answers is None:
            return ""
        text = self._layout.text(row, "answer")
        verdict = self._answers.verdict(text)
        if verdict is None:
            raise _WrongLine(f"has {text!r} as its answer; expected yes, no or skip")
        return verdict

    def _open_classes(self, row: Row, has_labels: bool) -> tuple[str, ...]:
        """Return the columns of classes that hold an answer that is none, such as unknown.

        A blank cell and NA are one if the table has a no, and NA is in a line without a label.
        """
        open_classes = []
        for name in self._layout.classes:
            text = row[name]
            if not values.given(text):
                is_open = self._blanks_are_open
            elif column_names.plain(text) == "na":
                is_open = self._blanks_are_open or not has_labels
            else:
                is_open = answer_words.is_open(text)
            if is_open:
                open_classes.append(name)
        return tuple(open_classes)

    def _refuse_sheet_errors(self, row: Row) -> None:
        for name in self._sheet_error_columns:
            if values.is_sheet_error(row[name]):
                raise _WrongLine(f"has {row[name]!r} as its {name!r}, an error of a spreadsheet")

    def _keeps_labels(
        self,
        where: str,
        row: Row,
        start: float | None,
        labels_of_row: tuple[str, ...],
        may_lack_times: bool,
    ) -> bool:
        """Report doubtful labels of a line. Returns whether no error drops the line."""
        if problem := self._labels.joined(labels_of_row):
            self._errors.add("joined-labels", f"{where}: {problem}")
        has_calls = not all(map(label_words.says_none, labels_of_row))
        if self._has_times and not may_lack_times and has_calls:
            if not self._errors.add("no-times", where):
                return False
        text = self._layout.text(row, "label")
        needs_label = start is not None and not self._may_lack_label
        if not labels_of_row and (needs_label or text):
            self._errors.add("no-label", f"{where}: {text!r}" if text else where)
        return True


def _says_no(layout: Layout) -> bool:
    """Return whether a column of a class holds 0 or no, so that a blank cell is no answer."""
    for name in layout.classes:
        for text in column_values.filled_cells(layout.table, name):
            if values.answer(text) is False:
                return True
    return False


def _find_sheet_errors(layout: Layout) -> list[str]:
    """Return the columns in use that hold errors of a spreadsheet."""
    columns_in_use = [*itertools.chain.from_iterable(layout.by_meaning.values()), *layout.classes]
    columns_with_errors = []
    for name in columns_in_use:
        if any(map(values.is_sheet_error, layout.table.values(name))):
            columns_with_errors.append(name)
    return columns_with_errors


class _Labels:
    def __init__(self, layout: Layout, options: Options):
        self._layout = layout
        columns = layout.by_meaning["label"]
        texts: list[str] = []
        for name in columns:
            texts += layout.table.values(name)
        self._are_numbers = values.are_numbers(texts)
        # 5.0, but not 1.0 and 1.1
        whole_number = re.compile(r"-?\d+(\.0*)?|\D*")
        self._are_whole_numbers = self._are_numbers and all(map(whole_number.fullmatch, texts))
        lists_positives = "positivelabels" in map(column_names.plain, columns)
        self._separator = options.between
        if lists_positives and not options.separator:
            self._separator = ","
        self._named_columns = columns if len(columns) > 1 and options.label_column else []
        self._reported: set[str] = set()
        self._likely_separators = ""
        if columns and not options.separator and not self._separator:
            self._likely_separators = _likely_separators(columns[0])

    def of(self, row: Row) -> tuple[str, ...]:
        """Return the labels of a line. Raises _WrongLine: a field holds more than labels."""
        layout = self._layout
        if layout.classes:
            return tuple(name for name in layout.classes if values.answer(row[name]))
        if layout.by_meaning.get("genus"):
            return self._scientific_name(row)
        if self._named_columns:
            row_labels = self._of_columns(row)
        else:
            text = layout.text(row, "label")
            if self._are_whole_numbers:
                text = values.whole(text)
            row_labels = labels(text, self._separator)
        if row_labels and row_labels[0].startswith("{") and ":" in row_labels[0]:
            raise _WrongLine(f"has {row_labels[0][:60]!r} as its label; write the labels alone")
        if not self._are_numbers:
            self._refuse_numbers(row_labels)
        return row_labels

    def _scientific_name(self, row: Row) -> tuple[str, ...]:
        genus = self._layout.text(row, "genus")
        epithet = self._layout.text(row, "epithet")
        if epithet and not genus:
            raise _WrongLine(f"has {epithet!r} as its species, and no genus")
        name = epithet if epithet.startswith(f"{genus} ") else f"{genus} {epithet}"
        return labels(name, "")

    def _of_columns(self, row: Row) -> tuple[str, ...]:
        row_labels: dict[str, None] = {}
        for name in self._named_columns:
            row_labels |= dict.fromkeys(labels(row[name], self._separator))
        return tuple(row_labels)

    @staticmethod
    def _refuse_numbers(row_labels: tuple[str, ...]) -> None:
        """Raise _WrongLine for a number among other labels."""
        numbers = [label for label in row_labels if values.are_numbers([label])]
        if numbers and len(numbers) < len(row_labels):
            raise _WrongLine(
                f"has the number {numbers[0]} among its labels; write it into a column of its own"
            )

    def joined(self, row_labels: tuple[str, ...]) -> str:
        """Return why a label of a plural column may be several, or "" if not, or not again."""
        if len(row_labels) != 1 or self._layout.classes:
            return ""
        label = row_labels[0]
        if label in self._reported:
            return ""
        for separator in self._likely_separators:
            parts = label.split(separator)
            if len(parts) > 1 and all(map(str.strip, parts)):
                self._reported.add(label)
                remedy = f"split it with --separator {separator!r}, or keep it: --separator none"
                return f"{label!r}; {remedy}"
        return ""


def _likely_separators(column: str) -> str:
    """Return the marks that may stand between labels if a column's name is a plural."""
    last_word = "".join(column_names.words(column)[-1:])
    if not last_word.endswith("s") or last_word in ("species", "class"):
        return ""
    return ",/+& " if last_word in ("tags", "keywords") else ",/+&"


def _one_of_views(layout: Layout) -> list[tuple[int, Row]]:
    """Return the lines of a table, of which Raven lists a selection once for each view."""
    view = layout.column("view")
    selection = layout.column("selection")
    if not view or not selection or len(set(layout.table.values(view))) < 2:
        return list(layout.table.rows())
    key_columns: list[str] = []
    for meaning in ("selection", "start", "end", "duration", "file", "channel"):
        key_columns += layout.by_meaning.get(meaning, ())
    selections: dict[tuple[str, ...], list[dict[str, str]]] = {}
    lines: list[tuple[int, Row]] = []
    for number, row in layout.table.rows():
        key = tuple(row[name] for name in key_columns)
        rows_of_selection = selections.setdefault(key, [])
        if not _merge_view(rows_of_selection, row, view):
            merged_row = dict(row)
            rows_of_selection.append(merged_row)
            lines.append((number, merged_row))
    return lines


def _merge_view(rows: Sequence[dict[str, str]], row: Row, view: str) -> bool:
    """Fill the first of ``rows`` that is another view of ``row``. Returns whether there is one."""
    for other_row in rows:
        if row[view] != other_row[view] and _agree(row, other_row, view):
            for name, text in row.items():
                other_row[name] = other_row[name] or text
            return True
    return False


def _agree(row: Row, other_row: Row, view: str) -> bool:
    """Whether no cell but the view differs where both lines have one."""
    for name, text in row.items():
        other_text = other_row[name]
        if name != view and text and other_text and text != other_text:
            return False
    return True


class _Channels:
    """The channel of lines, from 0: of 0, 1, 1.0, L, R, "Channel 2"."""

    def __init__(self, layout: Layout, errors: Errors):
        self._layout = layout
        self._errors = errors
        texts = {self._plain_channel(layout.text(row, "channel")) for _, row in layout.table.rows()}
        counts_from_zero = "0" in texts or "infile" in map(
            column_names.plain, layout.by_meaning["file"]
        )
        self._first = 0 if counts_from_zero else 1

    @staticmethod
    @functools.lru_cache(1 << 10)
    def _plain_channel(text: str) -> str:
        folded = text.strip().casefold()
        channel = re.fullmatch(r"(?:ch|channel|kanal|canal)?[ ._]*(\d{1,9})(?:\.0+)?", folded)
        return str(int(channel[1])) if channel else folded

    def of(self, row: Row, where: str) -> int | None:
        text = self._plain_channel(self._layout.text(row, "channel"))
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
    text = _clean(text or "")
    list_content = _content_of_list(text)
    parts = [text]
    if list_content is not None:
        parts = _parts(list_content)
    elif separator:
        parts = text.split(separator)
    unique_labels: dict[str, None] = {}
    for part in parts:
        label = unquoted(part.strip())
        if values.given(label) and not MARKS.fullmatch(label):
            unique_labels[label] = None
    return tuple(unique_labels)


def _clean(text: str) -> str:
    """Return a cell in one line, without entities of HTML and letters that nobody sees."""
    text = unicodedata.normalize("NFC", text).strip()
    text = re.sub(r"\s*[\r\n\t]\s*", " | ", text)
    if re.search(r"&(#\d+|#x[0-9a-fA-F]+|[a-z]{2,6});", text):
        text = html.unescape(text)
    text = re.sub(r"[\x00-\x1f\x7f]+", " ", text)
    return INVISIBLE.sub("", " ".join(text.split()))


def _content_of_list(text: str) -> str | None:
    """Return the text in the brackets of a list, as Python, NumPy, pandas and R write it."""
    if wrapped := WRAPPED_LIST.fullmatch(text):
        if in_brackets := re.fullmatch(r"[\[{(]*(.*?)[\]})]*", wrapped[1]):
            return in_brackets[1]
    in_brackets = re.fullmatch(r"\[+(.*?)\]+|\((\s*['\"].*|.*,.*)\)|\{([^:]*)\}", text)
    if in_brackets is None:
        return None
    return in_brackets[in_brackets.lastindex or 0]


def _parts(text: str) -> list[str]:
    """Return the parts of a list: between commas, or in quotes, which no apostrophe is."""
    quoted = r"(['\"])(?P<quoted>(?:(?!\1(?:\s|,|$)).)*)\1(?=\s|,|$)"
    text = text.replace("\\'", "'")
    parts = re.finditer(rf"{quoted}|(?P<plain>[^,\s][^,]*)", text)
    return [part["quoted"] or part["plain"] or "" for part in parts]


def unquoted(text: str) -> str:
    """Return a text without the quotes around it, as a spreadsheet or NumPy writes it."""
    text = re.sub(r"^(?:np\.str_\()?b?(['\"].*['\"])\)?$", r"\1", text)
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "\"'":
        return text
    quote = text[0]
    content = text[1:-1]
    if quote in content.replace(quote * 2, ""):
        return text
    return content.replace(quote * 2, quote).strip()


class _Times:
    def __init__(self, layout: Layout, options: Options):
        table = layout.table
        self._length = fixed_length(table, options)
        self._start = layout.column("start")
        self._end = layout.column("end")
        self._duration = layout.column("duration")
        self._file_offset = layout.column("file offset")
        self._scales = layout.scales
        columns = list(filter(None, (self._start, self._end, self._duration, self._file_offset)))
        self._comma_is_point = not any("." in text for text in _cells(table, columns))
        self._are_spans = bool(self._start) and values.are_spans(_cells(table, columns[:1]))
        self._minutes = set(filter(column_names.in_minutes, columns))
        self._has_offsets = any(layout.text(row, "file offset") for _, row in table.rows())
        start_and_end = list(filter(None, (self._start, self._end)))
        self._are_days = _are_days(_cells(table, start_and_end))
        # columns, and the forms of cells in them that may be thousands or a fraction
        self._grouped: dict[str, str] = {}
        for name in columns:
            if form := self._form_of_groups(table, name):
                self._grouped[name] = form

    def _scale(self, name: str) -> float:
        return self._scales.get(name, 1.0)

    def _form_of_groups(self, table: Table, name: str) -> str:
        if self._scale(name) < 1:
            marked_texts = [text for text in table.values(name) if "," in text or "." in text]
            either_mark = r"\d{1,3}([.,]\d{3})+"
            # of ms, 2.000
            if marked_texts and all(re.fullmatch(either_mark, text) for text in marked_texts):
                return either_mark
        return r"\d{1,3}(,\d{3})+" if table.separator == "," else ""

    def of(self, row: Row) -> tuple[float | None, float | None]:
        """Start and end, each None if the line has no times. Raises _WrongLine."""
        if self._are_days:
            name = self._start or self._end or ""
            raise _WrongLine(
                f"has {row[name]!r} as its {name!r}, a spreadsheet's part of a day; format it in s"
            )
        if self._are_spans:
            return values.span(row[self._start or ""]) or (None, None)
        start = self._read_time(row, self._start)
        end = self._read_time(row, self._end)
        duration = self._read_time(row, self._duration)
        offset = self._read_time(row, self._file_offset)
        if self._has_offsets and offset is None and start is not None:
            raise _WrongLine(
                f"has no {self._file_offset!r}, which other lines have, so its start counts over"
                " all files"
            )
        if duration is None:
            duration = self._length
        if start is None and end is not None and self._length is not None:
            start = round(max(0.0, end - self._length), 9)
        if end is None and start is not None and duration is not None:
            end = round(start + duration, 9)
        if end is None and start is None and duration is not None and offset is not None:
            start = offset
            end = round(offset + duration, 9)
        if (start is None) != (end is None):
            raise _WrongLine("has a start or an end, and not both")
        if start is not None and end is not None and offset is not None:
            return offset, round(offset + end - start, 9)
        return start, end

    def _read_time(self, row: Row, name: str | None) -> float | None:
        if not name:
            return None
        text = row[name]
        if name in self._grouped and re.fullmatch(self._grouped[name], text):
            mark = "," if "," in text else "."
            raise _WrongLine(
                f"has {text!r} as its {name!r}, which may be thousands or a fraction; write it"
                f" without {mark}"
            )
        try:
            if name in self._minutes and ":" in text:
                return values.minutes(text)
            return values.seconds(text, self._scale(name), self._comma_is_point)
        except ValueError:
            hint = ""
            if ":" in text:
                hint = "; write 0:00:12 for 0:12, or (mm:ss) into the column's name"
            raise _WrongLine(
                f"has {text!r} as its {name!r}, which is no number of seconds{hint}"
            ) from None


def _cells(table: Table, columns: Sequence[str]) -> Iterator[str]:
    return itertools.chain.from_iterable(map(table.values, columns))


def _are_days(cells: Iterable[str]) -> bool:
    """Whether all times are parts of a day, as of a spreadsheet: many digits, or within 1 ms."""
    texts = list(filter(values.given, map(str.strip, cells)))
    day_part = re.compile(r"0(\.0*)?|0[.,]\d{8,}|\d([.,]\d+)?[eE]-0?\d|0[.,]000\d+")
    if not all(map(day_part.fullmatch, texts)):
        return False
    days = [float(text.replace(",", ".")) for text in texts]
    if not any(days):
        return False
    return max(days) < 1e-3 or all(map(_is_near_full_second, days))


def _is_near_full_second(day: float) -> bool:
    seconds = day * 86400
    return abs(seconds - round(seconds)) < 1e-3


def _is_about_file(layout: Layout, row: Row) -> bool:
    """Whether a line of APLOSE says that its label is somewhere in the file: is_box 0, or WEAK."""
    text = layout.text(row, "box")
    return text.casefold() == "weak" or (bool(text) and values.answer(text) is False)


def _band(layout: Layout, row: Row) -> tuple[float | None, float | None]:
    """Return the lowest and highest frequency of a line: a falling sound ends in the lowest.

    Under names that say lowest and highest, they stay as they are: the index counts such a line.
    """
    low = _frequency(layout, row, "low")
    high = _frequency(layout, row, "high")
    is_first = not {"start", "y1"}.isdisjoint(column_names.words(layout.column("low") or ""))
    if low is not None and high is not None and low > high and is_first:
        return high, low
    return low, high


def _frequency(layout: Layout, row: Row, meaning: str) -> float | None:
    name = layout.column(meaning)
    if not name:
        return None
    try:
        value = values.number(row[name])
    except ValueError:
        return None  # of a figure that nothing depends on
    if value is None:
        return None
    return value * layout.scales.get(name, 1.0)


def _file(layout: Layout, row: Row) -> str:
    """Return the recording's name, after folders that the table names in other columns."""
    # 64760.0, as pandas writes a number
    name = values.whole(layout.text(row, "file")).replace("\\", "/")
    folders = [
        row[column] for column in layout.by_meaning.get("folder", ()) if values.given(row[column])
    ]
    return column_values.joined(folders, name) if name and folders else name


class _About:
    def __init__(self, layout: Layout, options: Options, errors: Errors):
        self._layout = layout
        self._errors = errors
        self._columns = [key for key in column_names.ABOUT if layout.by_meaning.get(key)]
        files = map(column_names.plain, layout.by_meaning["file"])
        self._is_catalogue = column_names.CATALOGUE in files
        # of each column, as one may have days first, and another months
        self._dates: dict[str, values.Dates] = {}
        for name in (*layout.by_meaning.get("date", ()), *layout.by_meaning.get("datetime", ())):
            texts = column_values.filled_cells(layout.table, name)
            try:
                self._dates[name] = values.Dates(texts, options.dates)
            except ValueError as error:
                raise DataError(
                    f"{layout.table.path}: in {name!r}, {error}, or omit them: --date-column none"
                ) from error

    def of(self, row: Row, where: str) -> dict[str, str]:
        """Return the place's facts. Raises ValueError: a date or a time that is none."""
        about = {key: self._layout.text(row, key) for key in self._columns}
        about["latitude"] = self._degrees(about.get("latitude", ""), "S", where)
        about["longitude"] = self._degrees(about.get("longitude", ""), "W", where)
        about["time_expansion"] = self._time_expansion(row)
        for meaning in ("datetime", "date"):
            self._add_date(about, row, meaning)
        if text := self._layout.text(row, "time"):
            if self._is_catalogue and text.isdecimal():
                text = text.zfill(4)  # 615
            about["time"] = values.time_of_day(text) if re.search(r"\d", text) else ""
        return {key: value for key, value in about.items() if value}

    def _time_expansion(self, row: Row) -> str:
        # of x10, 10x and 1:10, too
        text = re.sub(
            r"^\s*(?:1\s*:|[x\u00d7])\s*|\s*[x\u00d7]\s*$",
            "",
            self._layout.text(row, "time expansion").casefold(),
        )
        with contextlib.suppress(ValueError):
            number = values.number(text)
            if number and number > 0:
                return f"{number:g}"
        return ""

    def _degrees(self, text: str, negative: str, where: str) -> str:
        if not text:
            return ""
        try:
            return f"{values.degrees(text, negative):.9g}"
        except ValueError as error:
            self._errors.add("odd-place", f"{where}: {error}")
            return ""

    def _add_date(self, about: dict[str, str], row: Row, meaning: str) -> None:
        for name in self._layout.by_meaning.get(meaning, ()):
            if values.given(row[name]):
                about["date"], time = self._dates[name].read(row[name])
                about["time"] = time or about.get("time", "")
                return
