"""The columns of one table by their meaning: by names, values, and neighbours.

A name alone does not decide: `fin` is an end in Spanish and a whale, and `low` may be a class of a
wide table. So a column of 0 and 1 next to others is a class. A table that would lose its times or
labels is refused: one with a column that looks like either by its name or values, while no column
is recognised. Every option for a column also takes "none".
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from loaders.audio.recordings import answer_columns, class_names, column_values, values
from loaders.audio.recordings.column_names import (
    BOXES,
    CATALOGUE,
    COUNTS,
    ELSEWHERE,
    FREQUENCY,
    LABEL,
    MINUTES,
    MORE_LABELS,
    NUMBERING,
    OF_DAY,
    RECORDING,
    SPLIT,
    TIME,
    WEIGHTS,
    counting,
    is_absent,
    is_of_program,
    is_other,
    meaning_of,
    plain,
    says_time,
    unit_of,
    what,
    words,
)
from loaders.audio.recordings.tables import Table
from loaders.base import DataError
from loaders.io import checks


@dataclasses.dataclass(frozen=True)
class Options:
    """How sources are read: names of columns, and where labels come from; empty: found."""

    audio: str = ""  # [path] the folder that names in tables are relative to
    # "folder", "none", or a pattern of the path with (?P<label>…): where a folder's labels come
    # from
    labels: str = ""
    file_column: str = ""
    start_column: str = ""
    end_column: str = ""
    duration_column: str = ""
    label_column: str = ""  # several between commas: columns of 0 and 1
    date_column: str = ""
    split_column: str = ""
    answer_column: str = ""
    channel_column: str = ""
    dates: str = ""  # "day-first" or "month-first": of 01/06/2024
    encoding: str = ""  # of tables; empty: their bytes tell
    # between several labels in one field; empty: none but for lists in brackets; "none": a field
    # is one label
    separator: str = ""
    optional: bool = False  # labels may be missing
    files_only: bool = False  # the names of recordings alone are read

    @property
    def between(self) -> str:
        """What stands between several labels in one field, "" if nothing does."""
        return "" if self.separator == NO_SEPARATOR else self.separator


@dataclasses.dataclass
class Layout:
    """The columns of one table by their meaning."""

    table: Table
    # meaning -> columns; of several, the first that is not empty in a row counts
    by_meaning: dict[str, list[str]]
    scales: dict[str, float]  # of columns, to s and Hz
    classes: list[str]  # columns of 0 and 1, whose names are labels
    ignored: list[str]
    unused: dict[str, str]  # columns that look like times or labels, and as what
    durations: str = ""  # a column of them next to the ends, which count

    def column(self, meaning: str) -> str | None:
        return next(iter(self.by_meaning.get(meaning, ())), None)

    def text(self, row: Mapping[str, str], meaning: str) -> str:
        """Return the value of a row, "" if it has none."""
        for name in self.by_meaning.get(meaning, ()):
            if values.given(row[name]):
                return row[name]
        return ""

    def has_labels(self) -> bool:
        """Whether the table names labels in any of the three ways."""
        return bool(self.by_meaning["label"] or self.by_meaning.get("genus") or self.classes)

    def describe(self) -> list[str]:
        """Return the columns that were found, a meaning a line."""
        lines = [f"{self.table.path}: {len(self.table.rows())} lines, {self.table.encoding}"]
        for meaning, names in self.by_meaning.items():
            self._describe_columns(lines, meaning, [self._with_unit(name) for name in names])
        self._describe_columns(lines, "classes", self.classes)
        self._describe_columns(lines, "ignored", list(filter(None, self.ignored)))
        return lines

    def _with_unit(self, name: str) -> str:
        scale = self.scales.get(name, 1.0)
        return name + UNITS.get(scale, "")

    @staticmethod
    def _describe_columns(lines: list[str], meaning: str, names: Sequence[str]) -> None:
        if names:
            lines.append(f"    {meaning:12} {', '.join(names)}")


NO_SEPARATOR = "none"
SHOWN_VALUES = 4  # that a message counts one by one
UNITS = {1e-3: " [ms]", 60.0: " [min]", 3600.0: " [h]", 1e3: " [kHz]"}
FLAGS = {
    "file": "--file-column",
    "start": "--start-column",
    "end": "--end-column",
    "duration": "--duration-column",
    "label": "--label-column",
    "answer": "--answer-column",
    "date": "--date-column",
    "split": "--split-column",
    "channel": "--channel-column",
}
SPECIES = ("species", "speciesname", "art", "spezies", "especie", "espece")
# Meanings of columns that may hold times in a recording all the same.
MAY_BE_POSITIONS = ("", "time", "clock", "date", "datetime", "duration", "offset")
WRITTEN_TIME = re.compile(r":\d|\d ?(s|secs?|seconds?|ms|mins?|minutes?)\b|\d['\u2032]")
ByMeaning = dict[str, list[str]]


def find(table: Table, options: Options) -> Layout:
    """Return a table's columns. Raises DataError: one is missing, or times or labels are lost."""
    by_meaning, scales = _find_by_names(table)
    classes = _apply_options(table, options, by_meaning, scales)
    column_values.choose_files(table, by_meaning, bool(options.file_column))
    if options.files_only:
        return _layout_of_files(table, by_meaning, scales)
    _choose_labels(table, by_meaning, options)
    lists_recordings = bool(by_meaning["file"] or by_meaning.get("start"))
    if lists_recordings and not classes and not options.label_column:
        classes = column_values.classes(table, by_meaning, options.optional)
        _remove_columns(by_meaning, classes)
    _choose_boxes(table, by_meaning)
    durations = _choose_times(table, by_meaning, options, scales)
    _choose_dates(table, by_meaning, options)
    if not options.split_column:
        column_values.choose_split(table, by_meaning, classes)
    ignored, unused = _sort_leftovers(table, by_meaning, classes)
    layout = Layout(table, by_meaning, scales, classes, ignored, unused, durations)
    if lists_recordings:
        _refuse_lost_times(layout, options)
        _refuse_lost_labels(layout, options)
        _refuse_denials(layout, options)
    return layout


def _layout_of_files(table: Table, by_meaning: ByMeaning, scales: dict[str, float]) -> Layout:
    """Return the layout of a table of which only the names of recordings are read."""
    files = by_meaning["file"]
    folders = by_meaning.get("folder", [])
    ignored = [name for name in table.columns if name not in files]
    by_meaning = {"file": files, "folder": folders, "start": [], "label": []}
    return Layout(table, by_meaning, scales, classes=[], ignored=ignored, unused={})


def _remove_columns(by_meaning: ByMeaning, removed: Collection[str]) -> None:
    for columns in by_meaning.values():
        columns[:] = [name for name in columns if name not in removed]


def _sort_leftovers(
    table: Table, by_meaning: ByMeaning, classes: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the columns to ignore, and the unused ones with what they look like."""
    columns_in_use = {*classes, *itertools.chain.from_iterable(by_meaning.values())}
    plain_columns = []
    unused: dict[str, str] = {}
    for name in table.columns:
        if name in columns_in_use:
            continue
        likeness = ""
        if not is_of_program(name, table.columns):
            likeness = _looks_like(table, name, by_meaning)
        if likeness:
            unused[name] = likeness
        else:
            plain_columns.append(name)
    numbered_words = _find_numbered_words(table, by_meaning, plain_columns)
    unused |= dict.fromkeys(numbered_words, "a label")
    ignored = [name for name in plain_columns if name not in numbered_words]
    return ignored, unused


def _find_by_names(table: Table) -> tuple[ByMeaning, dict[str, float]]:
    """Return the columns of each meaning, the best name first, and the scales of columns."""
    by_meaning: ByMeaning = {}
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    for name in table.columns:
        if meaning := meaning_of(name):
            by_meaning.setdefault(meaning.name, []).append(name)
            ranks[name] = meaning.rank
            scales[name] = meaning.scale
    for columns in by_meaning.values():
        columns.sort(key=ranks.__getitem__)
    return by_meaning, scales


def _apply_options(
    table: Table, options: Options, by_meaning: ByMeaning, scales: dict[str, float]
) -> list[str]:
    """Use the columns that the options name. Returns those of classes."""
    classes: list[str] = []
    for meaning, flag in FLAGS.items():
        option = getattr(options, f"{meaning}_column")
        if not option:
            continue
        columns: list[str] = []
        if meaning != "duration" or not fixed_length(table, options):
            columns = _named_columns(table, option, flag)
        _remove_columns(by_meaning, columns)
        if _hold_classes(table, meaning, columns):
            by_meaning[meaning] = []
            classes = columns
        else:
            by_meaning[meaning] = columns
        for name in columns:
            scales.setdefault(name, unit_of(name))
    return classes


def _hold_classes(table: Table, meaning: str, columns: Sequence[str]) -> bool:
    """Whether named columns are classes: cells of 0 and 1, under names that are labels."""
    if len(columns) > 1:
        if _are_words(table, columns):
            return False
        column_values.refuse_no_answers(table, columns)
        return True
    if meaning == "label" and columns and what(columns[0]) != "label":
        return values.are_answers(table.values(columns[0]), both=True)
    return False


def fixed_length(table: Table, options: Options) -> float | None:
    """Return the length of all events, if --duration-column gives one, such as 5s."""
    length = re.fullmatch(r"(\d+(?:\.\d+)?) ?s", options.duration_column)
    if length is None or table.find(options.duration_column):
        return None
    return float(length[1])


def _are_words(table: Table, names: Sequence[str]) -> bool:
    """Whether all named columns hold labels, as species 1 and species 2, not 0 and 1."""
    texts: set[str] = set()
    for name in names:
        texts.update(column_values.filled_cells(table, name))
    for text in texts:
        if values.answer(text) is not None or values.are_numbers([text]):
            return False
    return bool(texts)


def _named_columns(table: Table, option: str, flag: str) -> list[str]:
    """Return the column that an option names, or the columns between commas. Raises DataError."""
    if option == "none" and not table.find("none"):
        return []
    if column := table.find(option):
        return [column]
    columns = list(map(table.find, class_names.split_names(option, table.columns)))
    if flag == "--label-column" and len(columns) > 1 and all(columns):
        return list(filter(None, columns))
    near = checks.expected(option, list(filter(None, table.columns)))
    raise DataError(f"{table.path} has no column {option!r} ({flag}); {near}")


def _choose_times(
    table: Table, by_meaning: ByMeaning, options: Options, scales: Mapping[str, float]
) -> str:
    """Decide which columns are start, end and duration. Raises DataError if two differ.

    Returns the column of durations if there are ends, which count, too, or "".
    """
    # Kaleidoscope's Dur is of a bat's pulses
    if "infile" in map(plain, by_meaning["file"]):
        by_meaning["duration"] = [
            name for name in by_meaning.get("duration", ()) if plain(name) != "dur"
        ]
    for meaning in ("start", "end", "duration"):
        _choose_time(table, by_meaning, meaning, scales)
    _place_offset(by_meaning, options)
    durations = ""
    if by_meaning["end"] and by_meaning["start"]:
        durations = next(iter(by_meaning["duration"]), "")
    if by_meaning["end"] or not (by_meaning["start"] or by_meaning["file offset"]):
        by_meaning["duration"] = []
    _refuse_joined_files(table, by_meaning, options)
    if _times_elsewhere(by_meaning) and not _names_times(options):
        # then a user has the whole recordings
        by_meaning |= {"start": [], "end": [], "duration": [], "file offset": []}
        return ""
    return durations


def _choose_boxes(table: Table, by_meaning: ByMeaning) -> None:
    """Find the column of APLOSE that tells boxes from lines about whole files."""
    kinds = table.find("type")
    if by_meaning.get("box") or not kinds or what(kinds):
        return
    cells = set(map(str.casefold, column_values.filled_cells(table, kinds)))
    if cells and cells <= BOXES and not cells.isdisjoint({"weak", "box"}):
        by_meaning["box"] = [kinds]


def _times_elsewhere(by_meaning: ByMeaning) -> bool:
    """Whether the times of a table are in another recording than the one that it names."""
    return any(plain(name) in ELSEWHERE for name in by_meaning["file"])


def _names_times(options: Options) -> bool:
    return not {options.start_column, options.end_column} <= {"", "none"}


def _choose_time(
    table: Table, by_meaning: ByMeaning, meaning: str, scales: Mapping[str, float]
) -> None:
    """Keep one column of a meaning. Raises DataError if two differ, or if it counts samples."""
    columns = by_meaning.setdefault(meaning, [])
    readable = [name for name in columns if values.are_times(table.values(name))]
    columns[:] = readable or columns[:1]
    if not columns:
        return
    for name in columns[1:]:
        if not _are_equal(table, columns[0], name, scales):
            _refuse_different_times(table, meaning, columns, scales)
    del columns[1:]
    if counting_word := counting(columns[0]):
        raise DataError(
            f"{table.path}: {columns[0]!r} is in {counting_word}, and no command reads those as"
            f" times; write seconds into a column of its own, or say {FLAGS[meaning]} none"
        )


def _refuse_different_times(
    table: Table, meaning: str, columns: Sequence[str], scales: Mapping[str, float]
) -> None:
    names = " and ".join(map(repr, columns))
    units = {scales[name] for name in columns}
    hint = ", or write their sum in s into one column" if len(units) > 1 else ""
    raise DataError(
        f"{table.path} has {names}, which differ; name the {meaning}: {FLAGS[meaning]}{hint}"
    )


def _place_offset(by_meaning: ByMeaning, options: Options) -> None:
    """Decide whether a column named offset is a start, an end, or a start in the file."""
    offset = by_meaning.pop("offset", [])
    file_offset = by_meaning.setdefault("file offset", [])
    if not offset:
        return
    if not by_meaning["start"]:
        if options.start_column != "none" and (by_meaning["duration"] or by_meaning["end"]):
            by_meaning["start"] = offset
        return
    has_length = by_meaning["end"] or by_meaning["duration"]
    if not has_length and options.end_column != "none":
        by_meaning["end"] = offset
    elif plain(by_meaning["start"][0]).startswith("begintime"):
        by_meaning["file offset"] = file_offset or offset


def _choose_dates(table: Table, by_meaning: ByMeaning, options: Options) -> None:
    """Count a column of times with days as one of dates and times."""
    if options.date_column == "none":
        by_meaning |= {"date": [], "time": [], "datetime": []}
        return
    times = []
    dates_and_times = by_meaning.get("datetime", [])
    for name in by_meaning.get("time", ()):
        if any(map(values.has_day, table.values(name))):
            dates_and_times.append(name)
        else:
            times.append(name)
    by_meaning["datetime"] = dates_and_times
    by_meaning["time"] = times


def _refuse_joined_files(table: Table, by_meaning: ByMeaning, options: Options) -> None:
    """Raise DataError if Raven's times, no multiples of places in samples, count over files."""
    samples = table.find("Beg File Samp (samples)", "Begin File Samp (samples)")
    if not samples or not by_meaning["start"] or by_meaning["file offset"] or options.start_column:
        return
    start = by_meaning["start"][0]
    if not plain(start).startswith("begintime"):
        return
    try:
        rates = _sample_rates(table, samples, start)
    except ValueError:
        return
    if rates and (min(rates) < 1000 or max(rates) > 1.005 * min(rates)):
        raise DataError(
            f"{table.path}: {start!r} counts over all files, as {samples!r} does not grow with it;"
            f" add Raven's measurement File Offset (s), or say --start-column {start!r} if it"
            " counts from the start of each file"
        )


def _sample_rates(table: Table, samples: str, start: str) -> list[float]:
    """Return samples per s at the lines of 1 s and later. Raises ValueError: no numbers."""
    rates = []
    for _, row in table.rows():
        position = values.number(row[samples])
        time = values.number(row[start])
        if position is not None and time is not None and time >= 1:
            rates.append(position / time)
    return rates


def _are_equal(table: Table, first: str, second: str, scales: Mapping[str, float]) -> bool:
    pairs = zip(table.values(first), table.values(second), strict=True)
    try:
        for first_text, second_text in pairs:
            if first_text == second_text:
                continue
            first_time = values.seconds(first_text, scales[first])
            if first_time != values.seconds(second_text, scales[second]):
                return False
    except ValueError:
        return False
    return True


def _choose_labels(table: Table, by_meaning: ByMeaning, options: Options) -> None:
    """Keep one column of labels. Raises DataError: it is blank in lines in which another is not."""
    columns = by_meaning.setdefault("label", [])
    genus = by_meaning.pop("genus", [])
    epithet = by_meaning.pop("epithet", [])
    if options.label_column:
        return
    programs = [name for name in columns if plain(name) in ("manualid", "autoid", "top1match")]
    if programs and programs[0] == columns[0]:  # Kaleidoscope's: the label of a person counts first
        columns[:] = programs
        return
    filled = [name for name in columns if _is_filled(table, name)]
    if genus and _follows_genus(table, genus[0], filled, epithet):
        by_meaning["genus"] = genus
        by_meaning["epithet"] = filled[:1] or epithet
        columns.clear()
        return
    columns[:] = filled or columns[:1] or epithet[:1]
    if columns:
        # one continues the other
        columns[1:] = _find_continuations(table, columns[0], columns[1:])


def _follows_genus(
    table: Table, genus: str, species: Sequence[str], epithet: Sequence[str]
) -> bool:
    """Whether labels are a genus and the species in another column."""
    if species:
        return _are_epithets(table, genus, species[0])
    return bool(epithet)


def _find_continuations(table: Table, label: str, others: Sequence[str]) -> list[str]:
    """Return the columns that hold labels only in lines in which ``label`` is blank.

    Raises DataError: one holds labels in other lines, too, or ``label`` holds yes and no.
    """
    blank_rows: list[Mapping[str, str]] = []
    filled_rows: list[Mapping[str, str]] = []
    for _, row in table.rows():
        rows = filled_rows if values.given(row[label]) else blank_rows
        rows.append(row)
    continuations = [name for name in others if _count_filled(blank_rows, name)]
    if continuations and _count_filled(filled_rows, continuations[0]):
        n_lines = _count_filled(blank_rows, continuations[0])
        raise DataError(
            f"{table.path}: {label!r} is blank in {n_lines} lines in which {continuations[0]!r} is"
            f" not; name the column of labels: --label-column {label!r} or {continuations[0]!r}"
        )
    names = [name for name in others if not values.are_numbers(table.values(name))]
    if names and values.are_answers(table.values(label), both=True):
        raise DataError(
            f"{table.path}: {label!r} holds yes and no, and {names[0]!r} names; if it denies them,"
            f" --label-column {names[0]!r} --answer-column {label!r}, and if it numbers them,"
            f" --label-column {names[0]!r}"
        )
    return continuations


def _is_filled(table: Table, name: str) -> bool:
    return any(map(values.given, table.values(name)))


def _count_filled(rows: Sequence[Mapping[str, str]], name: str) -> int:
    return sum(values.given(row[name]) for row in rows)


def _find_numbered_words(table: Table, by_meaning: ByMeaning, names: Sequence[str]) -> list[str]:
    """Return the columns of words that each belong to a number of the labels: 5, with Blackbird."""
    numbers = table.values(by_meaning["label"][0]) if by_meaning["label"] else []
    n_classes = len(set(numbers))
    if n_classes < 2 or not values.are_numbers(numbers):
        return []
    numbered_words = []
    for name in names:
        if is_other(name) or meaning_of(name):
            continue
        texts = table.values(name)
        n_pairs = len(set(zip(numbers, texts, strict=True)))
        if n_classes == len(set(texts)) == n_pairs and not values.are_numbers(texts):
            numbered_words.append(name)
    return numbered_words


def _are_epithets(table: Table, genus: str, species: str) -> bool:
    """Whether species are single words in lower case, such as major, or begin with their genus.

    Raises DataError: one species has two genera, and may be a common name.
    """
    pairs = []
    for _, row in table.rows():
        if values.given(row[genus]) and values.given(row[species]):
            pairs.append((row[genus], row[species]))
    if not pairs or plain(species) not in SPECIES:
        return False
    if all(itertools.starmap(_is_epithet, pairs)):
        return True
    genera: dict[str, str] = {}
    for genus_name, text in pairs:
        first_genus = genera.setdefault(text, genus_name)
        if first_genus != genus_name:
            raise DataError(
                f"{table.path}: {species!r} holds {text!r} for {first_genus} and for {genus_name}"
                f" ({genus!r}); write both into one column, or say --label-column {species!r}"
            )
    return False


def _is_epithet(genus: str, species: str) -> bool:
    letters = species.replace("-", "").rstrip(".")
    is_lower_word = species.islower() and letters.isalpha()
    return is_lower_word or species.startswith(f"{genus} ")


def _looks_like(table: Table, name: str, by_meaning: ByMeaning) -> str:
    """Return what an unused column may be by name and values: "a time", "a label", "a class"."""
    texts = [text for text in column_values.filled_cells(table, name) if text != "[]"]
    meaning = what(name)
    if not meaning and values.are_posneg(texts):
        return "a class"
    if likeness := answer_columns.AnswerColumn(name, texts).likeness():
        return likeness
    if texts and not meaning and _names_more_labels(name):
        if not values.are_numbers(texts) and not values.are_answers(texts):
            return "a label"
    if not texts or is_other(name) or meaning == "duration":
        return ""
    name_words = set(words(name))
    if meaning == "split" or SPLIT & name_words or values.are_splits(texts):
        return "a split"
    are_dates = all(map(values.has_day, texts))
    if not meaning and are_dates:
        return "a date"
    named_time = says_time(name)
    named_label = bool(LABEL & name_words)
    holds_times = (named_time or named_label) and _may_be_times(texts)
    if holds_times and named_time and not are_dates:
        return "a time"
    if values.are_spans(texts) or values.are_clocks(texts):
        return "a time"
    if meaning:
        is_label = meaning in ("label", "genus", "epithet")
        return "a label" if is_label and not _says_the_same(table, name, by_meaning) else ""
    if values.are_answers(texts):
        return "a class"
    is_of_day = bool(table.find("hour") and OF_DAY & name_words)
    if not by_meaning["start"] and values.are_numbers(texts) and not is_of_day:
        return "numbers"
    return "a label" if named_label and not holds_times else ""


def _says_the_same(table: Table, name: str, by_meaning: ByMeaning) -> bool:
    """Whether a column has the label of each line once more."""
    labels = by_meaning["label"]
    return bool(labels) and table.values(name) == table.values(labels[0])


def _may_be_times(texts: Sequence[str]) -> bool:
    return values.are_times(texts) or values.like_times(texts)


def _names_more_labels(name: str) -> bool:
    """Whether a name is of further labels of a line: also, species 2."""
    plain_name = plain(name)
    return plain_name in MORE_LABELS or what(plain_name.rstrip("0123456789")) == "label"


def _refuse_lost_times(layout: Layout, options: Options) -> None:
    table = layout.table
    by_meaning = layout.by_meaning
    starts = by_meaning["start"] or by_meaning["file offset"]
    if starts:
        _refuse_missing_end(layout, options, starts[0])
        return
    if options.start_column == "none" or _times_elsewhere(by_meaning):
        return
    if by_meaning["end"] and fixed_length(table, options):
        return
    ends = [name for name in by_meaning["end"] if _is_filled(table, name)]
    times = [name for name in table.columns if name in ends or _is_position(layout, name)]
    if not times:
        return
    names = ", ".join(map(repr, times[:4]))
    remedy = ""
    odd_times = next(filter(None, map(counting, times)), "") or _find_odd_time(table, times)
    if odd_times:
        remedy = f"write seconds in place of {odd_times}, and "
    hint = "; a time of day is written 05:30" if "time" in map(what, times) else ""
    raise DataError(
        f"{table.path}: {names} looks like times, and no start is known, so its events would become"
        f" whole recordings; {remedy}name it: --start-column and --end-column, or --start-column"
        f" none{hint}"
    )


def _refuse_missing_end(layout: Layout, options: Options, start: str) -> None:
    """Raise DataError if events with a start have neither an end nor a duration."""
    table = layout.table
    if layout.by_meaning["end"] or layout.by_meaning["duration"]:
        return
    if options.end_column == "none" or fixed_length(table, options):
        return
    if _is_filled(table, start) and not values.are_spans(table.values(start)):
        raise DataError(
            f"{table.path} has starts ({start!r}), and no end or duration that is known; it has"
            f" {', '.join(table.columns)[:200]}; name one: --end-column or --duration-column, or"
            " the length of all: --duration-column 5s"
        )


def _find_odd_time(table: Table, names: Sequence[str]) -> str:
    """Return the first cell that no command reads as a time, in quotes, or ""."""
    for name in names:
        for text in column_values.filled_cells(table, name):
            if not values.are_times([text]) and not values.are_spans([text]):
                return repr(text)
    return ""


def _is_position(layout: Layout, name: str) -> bool:
    """Whether a column holds times that would be lost, by values, name and how they vary."""
    table = layout.table
    texts = column_values.filled_cells(table, name)
    meaning = what(name)
    if not texts or name in layout.classes or meaning not in MAY_BE_POSITIONS:
        return False
    is_catalogue = CATALOGUE in map(plain, layout.by_meaning["file"])
    if is_catalogue or not FREQUENCY.isdisjoint(words(name)):
        return False
    numbers = values.are_numbers(texts)
    clocks = values.are_clocks(texts)
    varies = _varies_in_recordings(layout, name)
    if not numbers and not clocks and not values.are_spans(texts):
        return _holds_written_times(layout, name, texts, varies)
    if meaning == "date":
        return False
    name_words = set(words(name))
    is_of_day = bool(table.find("hour") and name_words & OF_DAY)
    if is_of_day or NUMBERING & set(words(name)[-1:]):
        return varies and bool(name_words & (TIME | {"clip"}))
    if meaning == "duration":
        return varies
    if meaning in ("time", "clock", "datetime"):
        dated = bool(layout.by_meaning.get("date"))
        if numbers:
            return not values.are_hours(texts, dated)
        return varies or not clocks or (not dated and all(map(_is_early, texts)))
    if is_other(name):
        if not name_words & {"seconds", "time"} or not layout.has_labels():
            return False
        return varies or name_words.isdisjoint({"begin", "end", "12"})
    if varies or _names_position(name):
        return True
    if numbers:
        return _borders_unused(layout, name)
    return clocks or any(":" in text for text in texts)


def _names_position(name: str) -> bool:
    return says_time(name) or not MINUTES.isdisjoint(words(name))


def _varies_in_recordings(layout: Layout, name: str) -> bool:
    """Whether a column has several values in one recording."""
    table = layout.table
    files = table.values(layout.column("file") or name)
    files_with_texts = set()
    for file, text in zip(files, table.values(name), strict=True):
        if values.given(text):
            files_with_texts.add((file, text))
    return len(files_with_texts) > len({file for file, _ in files_with_texts})


def _holds_written_times(layout: Layout, name: str, texts: Sequence[str], varies: bool) -> bool:
    """Whether cells that are neither numbers, clocks nor spans are still times in recordings."""
    meaning = what(name)
    if all(map(values.has_day, texts)):
        # of a recording, if it says so, and of an event otherwise
        of_recording = not RECORDING.isdisjoint(words(name))
        is_recording_date = of_recording or bool(meaning) or not _names_position(name)
        has_clock = any(":" in text for text in texts)
        return has_clock and not is_other(name) and (varies or not is_recording_date)
    if meaning:
        return False
    files = layout.table.values(layout.column("file") or name)
    if values.are_parts(files, layout.table.values(name)):
        return True
    has_form = _names_position(name) or all(map(WRITTEN_TIME.search, texts))
    return has_form and values.like_times(texts)


def _is_early(text: str) -> bool:
    """Whether a clock is within the first hour, and not a full minute."""
    return bool(re.match("00?:", text)) and not re.search(r":\d\d:00$", text)


def _borders_unused(layout: Layout, name: str) -> bool:
    """Whether a column of numbers is a start or an end, by another unused column next to it."""
    table = layout.table
    for unused_name in layout.unused:
        if unused_name == name:
            continue
        if _is_before(table, name, unused_name) or _is_before(table, unused_name, name):
            return True
    return False


def _is_before(table: Table, first: str, second: str) -> bool:
    first_texts = table.values(first)
    second_texts = table.values(second)
    if not values.are_numbers(first_texts) or not values.are_numbers(second_texts):
        return False
    pairs = set()
    for first_text, second_text in zip(first_texts, second_texts, strict=True):
        start = values.number(first_text)
        end = values.number(second_text)
        if start is None or end is None or start >= end:
            return False
        pairs.add((start, end))
    return len(pairs) > 1


def _refuse_lost_labels(layout: Layout, options: Options) -> None:
    if layout.has_labels() or options.label_column == "none" or options.optional:
        return
    candidates = list(layout.unused)
    for name in layout.ignored:
        has_no_meaning = not is_other(name) and not meaning_of(name)
        if has_no_meaning or plain(name) == "en":
            candidates.append(name)
    labels = [name for name in candidates if _is_filled(layout.table, name)]
    if labels:
        raise DataError(
            f"{layout.table.path} has no column of labels that is known, and"
            f" {', '.join(map(repr, labels[:4]))} may be one; name it: --label-column, or"
            " --label-column none"
        )


def _refuse_denials(layout: Layout, options: Options) -> None:
    """Raise DataError for a column that may deny labels, or call them unchecked."""
    if options.answer_column or layout.by_meaning.get("answer") or not layout.has_labels():
        return
    _refuse_absences(layout)
    for name in (*layout.ignored, *layout.unused, *layout.by_meaning.get("score", ())):
        texts = layout.table.values(name)
        column = answer_columns.AnswerColumn(name, texts)
        if column.kind is None and not values.are_verdicts(texts):
            continue
        if doubtful := column.doubtful():
            why = "are uncertain" if column.grades else "are denied or not checked yet"
            _refuse_doubtful(layout, name, doubtful, why)


def _refuse_absences(layout: Layout) -> None:
    """Raise DataError for a count or weight of 0 next to a label: nothing of it was there."""
    if layout.classes:
        return
    for name in (*layout.ignored, *layout.unused, *layout.by_meaning.get("score", ())):
        texts = column_values.filled_cells(layout.table, name)
        are_absent = [is_absent(name, text) for text in texts]
        if None in are_absent or not any(are_absent):
            continue
        is_weight = plain(name) in WEIGHTS and all(map(values.is_share, texts))
        if plain(name) in COUNTS or (is_weight and not all(are_absent)):
            absent_texts = list(itertools.compress(texts, are_absent))
            _refuse_doubtful(layout, name, absent_texts, "are then absent")


def _refuse_doubtful(layout: Layout, name: str, texts: Sequence[str], why: str) -> None:
    counts = Counter(texts).most_common()
    parts = [f"{text!r} in {n}" for text, n in counts[:SHOWN_VALUES]]
    if len(counts) > SHOWN_VALUES:
        n_lines = sum(n for _, n in counts[SHOWN_VALUES:])
        parts.append(f"{len(counts) - SHOWN_VALUES} other values in {n_lines}")
    raise DataError(
        f"{layout.table.path}: {name!r} holds {', '.join(parts)} lines, whose labels {why}; say"
        f" which: --answer-column {name!r} leaves their labels out, --answer-column none keeps them"
    )
