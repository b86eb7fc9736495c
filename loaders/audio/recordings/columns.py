"""The columns of one table by their meaning: by names, values, and neighbours.

A name alone does not decide: `fin` is an end in Spanish and a whale, and `low` may be a class of a
wide table. So a column of 0 and 1 next to others is a class. A table that would lose its times or
labels is refused: one with a column that looks like either by its name or values, while no column
is recognised. Every option for a column also takes "none".
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from loaders.audio.recordings import column_values, values
from loaders.audio.recordings.column_names import (
    COUNTS,
    DENYING,
    ELSEWHERE,
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
    is_other,
    may_deny,
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
    # between several labels in one field; empty: none but for lists in brackets
    separator: str = ""
    optional: bool = False  # labels may be missing
    whole: bool = False  # the names of recordings alone are read


@dataclasses.dataclass
class Layout:
    """The columns of one table by their meaning."""

    table: Table
    # meaning -> columns; of several, the first that is not empty in a row counts
    used: dict[str, list[str]]
    scales: dict[str, float]  # of columns, to s and Hz
    classes: list[str]  # columns of 0 and 1, whose names are labels
    ignored: list[str]
    unused: dict[str, str]  # columns that look like times or labels, and as what

    def column(self, meaning: str) -> str | None:
        return next(iter(self.used.get(meaning, ())), None)

    def text(self, row: Mapping[str, str], meaning: str) -> str:
        """Return the value of a row, "" if it has none."""
        return next(
            (row[name] for name in self.used.get(meaning, ()) if values.given(row[name])), ""
        )

    def describe(self) -> list[str]:
        """Return the columns that were found, a meaning a line."""
        units = {1e-3: " [ms]", 60.0: " [min]", 3600.0: " [h]", 1e3: " [kHz]"}
        found = {
            meaning: [name + units.get(self.scales.get(name, 1.0), "") for name in names]
            for meaning, names in self.used.items()
        }
        found |= {"classes": self.classes, "ignored": list(filter(None, self.ignored))}
        lines = [f"{self.table.path}: {len(self.table.rows())} lines, {self.table.encoding}"]
        return lines + [
            f"    {meaning:12} {', '.join(names)}" for meaning, names in found.items() if names
        ]


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
Used = dict[str, list[str]]


def find(table: Table, options: Options) -> Layout:
    """Return a table's columns. Raises DataError: one is missing, or times or labels are lost."""
    used, scales = _by_names(table)
    classes = _as_named(table, options, used, scales)
    column_values.choose_files(table, used, bool(options.file_column))
    if options.whole:
        used = {"file": used["file"], "folder": used.get("folder", []), "start": [], "label": []}
        return Layout(
            table,
            used,
            scales,
            [],
            [name for name in table.columns if name not in used["file"]],
            {},
        )
    _choose_labels(table, used, options)
    is_about = bool(used["file"] or used.get("start"))  # else it is no table of recordings
    if is_about and not classes and not options.label_column:
        classes = column_values.classes(table, used, options.optional)
        for several in used.values():
            several[:] = [name for name in several if name not in classes]
    _choose_times(table, used, options, scales)
    dated = [name for name in used.get("time", ()) if any(map(values.has_day, table.values(name)))]
    used["datetime"] = [*used.get("datetime", ()), *dated]
    used["time"] = [name for name in used.get("time", ()) if name not in dated]
    if options.date_column == "none":
        used |= {"date": [], "time": [], "datetime": []}
    if not options.split_column:
        column_values.choose_split(table, used, classes)
    taken = {name for several in used.values() for name in several} | set(classes)
    rest = [name for name in table.columns if name not in taken]
    unused = {name: like for name in rest if (like := _looks_like(table, name, used))}
    unused |= dict.fromkeys(
        _named_numbers(table, used, [name for name in rest if name not in unused]), "a label"
    )
    layout = Layout(
        table, used, scales, classes, [name for name in rest if name not in unused], unused
    )
    if is_about:
        _refuse_lost_times(layout, options)
        _refuse_lost_labels(layout, options)
        _refuse_denials(layout, options)
    return layout


def _by_names(table: Table) -> tuple[Used, dict[str, float]]:
    places: dict[str, list[tuple[int, str]]] = {}
    scales: dict[str, float] = {}
    for name in table.columns:
        if found := meaning_of(name):
            places.setdefault(found[0], []).append((found[1], name))
            scales[name] = found[2]
    return {
        key: [name for _, name in sorted(several, key=lambda each: each[0])]
        for key, several in places.items()
    }, scales


def _as_named(table: Table, options: Options, used: Used, scales: dict[str, float]) -> list[str]:
    classes: list[str] = []
    for meaning, flag in FLAGS.items():
        if option := getattr(options, f"{meaning}_column"):
            columns = (
                []
                if meaning == "duration" and fixed_length(table, options)
                else _named(table, option, flag)
            )
            for each in used.values():
                each[:] = [name for name in each if name not in columns]
            several = len(columns) > 1 and not _are_words(table, columns)
            if several:
                column_values.refuse_no_answers(table, columns)
            if meaning == "label" and len(columns) == 1 and what(columns[0]) != "label":
                several = values.are_answers(table.values(columns[0]), both=True)
            used[meaning] = [] if several else columns
            classes = columns if several else classes
            for name in columns:
                scales.setdefault(name, unit_of(name))
    return classes


def fixed_length(table: Table, options: Options) -> float | None:
    """Return the length of all events, if --duration-column gives one, such as 5s."""
    fixed = re.fullmatch(r"(\d+(?:\.\d+)?) ?s", options.duration_column)
    return float(fixed[1]) if fixed and not table.find(options.duration_column) else None


def _are_words(table: Table, names: Sequence[str]) -> bool:
    """Whether all named columns hold labels, as species 1 and species 2, not 0 and 1."""
    texts = {text for name in names for text in table.values(name) if values.given(text)}
    return bool(texts) and all(
        values.answer(text) is None and not values.are_numbers([text]) for text in texts
    )


def _named(table: Table, option: str, flag: str) -> list[str]:
    """Return the column that an option names, or the columns between commas. Raises DataError."""
    if option == "none" and not table.find("none"):
        return []
    if column := table.find(option):
        return [column]
    several = [table.find(part.strip()) for part in option.split(",")]
    if flag == "--label-column" and len(several) > 1 and all(several):
        return [name for name in several if name]
    near = checks.expected(option, [name for name in table.columns if name])
    raise DataError(f"{table.path} has no column {option!r} ({flag}); {near}")


def _choose_times(table: Table, used: Used, options: Options, scales: Mapping[str, float]) -> None:
    """Decide which columns are start, end and duration. Raises DataError if two differ."""
    # Kaleidoscope's Dur is of a bat's pulses
    if any(plain(name) == "infile" for name in used["file"]):
        used["duration"] = [name for name in used.get("duration", ()) if plain(name) != "dur"]
    for meaning in ("start", "end", "duration"):
        columns = used.setdefault(meaning, [])
        readable = [name for name in columns if values.are_times(table.values(name))]
        columns[:] = readable or columns[:1]
        if len(columns) > 1 and any(
            not _are_equal(table, columns[0], name, scales) for name in columns[1:]
        ):
            names = " and ".join(map(repr, columns))
            hint = (
                ", or write their sum in s into one column"
                if len({scales[name] for name in columns}) > 1
                else ""
            )
            raise DataError(
                f"{table.path} has {names}, which differ; name the {meaning}:"
                f" {FLAGS[meaning]}{hint}"
            )
        del columns[1:]
        if columns and (counted := counting(columns[0])):
            remedy = f"write seconds into a column of its own, or say {FLAGS[meaning]} none"
            raise DataError(
                f"{table.path}: {columns[0]!r} is in {counted}, and no command reads those as"
                f" times; {remedy}"
            )
    offset, by_file = used.pop("offset", []), used.setdefault("file offset", [])
    if (
        offset
        and not used["start"]
        and options.start_column != "none"
        and (used["duration"] or used["end"])
    ):
        used["start"] = offset
    elif (
        offset
        and used["start"]
        and not used["end"]
        and not used["duration"]
        and options.end_column != "none"
    ):
        used["end"] = offset
    elif offset and used["start"] and plain(used["start"][0]).startswith("begintime"):
        used["file offset"] = by_file or offset
    if used["end"] or not (used["start"] or used["file offset"]):
        used["duration"] = []
    _refuse_joined_files(table, used, options)
    # then a user has the whole recordings
    named = {options.start_column, options.end_column} - {"", "none"}
    if not named and any(plain(name) in ELSEWHERE for name in used["file"]):
        used |= {meaning: [] for meaning in ("start", "end", "duration", "file offset")}


def _refuse_joined_files(table: Table, used: Used, options: Options) -> None:
    """Raise DataError if Raven's times, no multiples of places in samples, count over files."""
    samples = table.find("Beg File Samp (samples)", "Begin File Samp (samples)")
    start = used["start"][0] if used["start"] else ""
    if (
        not samples
        or used["file offset"]
        or options.start_column
        or not plain(start).startswith("begintime")
    ):
        return
    try:
        pairs = [
            (values.number(row[samples]), values.number(row[start])) for _, row in table.rows()
        ]
    except ValueError:
        return
    rates = [
        place / time
        for place, time in pairs
        if place is not None and time is not None and time >= 1
    ]
    if rates and (min(rates) < 1000 or max(rates) > 1.005 * min(rates)):
        raise DataError(
            f"{table.path}: {start!r} counts over all files, as {samples!r} does not grow with it;"
            f" add Raven's measurement File Offset (s), or say --start-column {start!r} if it"
            " counts from the start of each file"
        )


def _are_equal(table: Table, first: str, second: str, scales: Mapping[str, float]) -> bool:
    pairs = zip(table.values(first), table.values(second), strict=True)
    try:
        return all(
            a == b or values.seconds(a, scales[first]) == values.seconds(b, scales[second])
            for a, b in pairs
        )
    except ValueError:
        return False


def _choose_labels(table: Table, used: Used, options: Options) -> None:
    """Keep one column of labels. Raises DataError: it is blank in lines in which another is not."""
    columns = used.setdefault("label", [])
    genus, epithet = used.pop("genus", []), used.pop("epithet", [])
    if options.label_column:
        return
    programs = [name for name in columns if plain(name) in ("manualid", "autoid", "top1match")]
    if programs and programs[0] == columns[0]:  # Kaleidoscope's: the label of a person counts first
        columns[:] = programs
        return
    filled = [name for name in columns if any(map(values.given, table.values(name)))]
    if genus and (not filled or _are_epithets(table, genus[0], filled[0])) and (filled or epithet):
        used["genus"], used["epithet"] = genus, filled[:1] or epithet
        columns.clear()
        return
    columns[:] = filled or columns[:1] or epithet[:1]
    blank = [row for _, row in table.rows() if columns and not values.given(row[columns[0]])]
    more = [name for name in columns[1:] if any(values.given(row[name]) for row in blank)]
    if more and any(
        values.given(row[more[0]]) for _, row in table.rows() if values.given(row[columns[0]])
    ):
        n = sum(values.given(row[more[0]]) for row in blank)
        raise DataError(
            f"{table.path}: {columns[0]!r} is blank in {n} lines in which {more[0]!r} is not; name"
            f" the column of labels: --label-column {columns[0]!r} or {more[0]!r}"
        )
    names = [name for name in columns[1:] if not values.are_numbers(table.values(name))]
    if names and values.are_answers(table.values(columns[0]), both=True):
        raise DataError(
            f"{table.path}: {columns[0]!r} holds yes and no, and {names[0]!r} names; if it denies"
            f" them, --label-column {names[0]!r} --answer-column {columns[0]!r}, and if it numbers"
            f" them, --label-column {names[0]!r}"
        )
    columns[:] = [*columns[:1], *more]  # one continues the other


def _named_numbers(table: Table, used: Used, names: Sequence[str]) -> list[str]:
    """Return the columns of words that each belong to a number of the labels: 5, with Blackbird."""
    numbers = table.values(used["label"][0]) if used["label"] else []
    if len(set(numbers)) < 2 or not values.are_numbers(numbers):
        return []
    texts = {
        name: table.values(name) for name in names if not is_other(name) and not meaning_of(name)
    }
    return [
        name
        for name, its in texts.items()
        if len(set(numbers)) == len(set(its)) == len(set(zip(numbers, its, strict=True)))
        and not values.are_numbers(its)
    ]


def _are_epithets(table: Table, genus: str, species: str) -> bool:
    """Whether species are single words in lower case, such as major, or begin with their genus.

    Raises DataError: one species has two genera, and may be a common name.
    """
    rows = [
        (row[genus], row[species])
        for _, row in table.rows()
        if values.given(row[genus]) and values.given(row[species])
    ]
    if not rows or plain(species) not in (
        "species",
        "speciesname",
        "art",
        "spezies",
        "especie",
        "espece",
    ):
        return False
    words_alone = (
        text.islower() and text.replace("-", "").rstrip(".").isalpha() for _, text in rows
    )
    if all(
        alone or text.startswith(f"{name} ")
        for alone, (name, text) in zip(words_alone, rows, strict=True)
    ):
        return True
    genera: dict[str, str] = {}
    for name, text in rows:
        if genera.setdefault(text, name) != name:
            raise DataError(
                f"{table.path}: {species!r} holds {text!r} for {genera[text]} and for {name}"
                f" ({genus!r}); write both into one column, or say --label-column {species!r}"
            )
    return False


def _looks_like(table: Table, name: str, used: Used) -> str:
    """Return what an unused column may be by name and values: "a time", "a label", "a class"."""
    its = [value for value in table.values(name) if values.given(value) and value != "[]"]
    meaning = what(name)
    if not meaning and values.are_posneg(its):
        return "a class"
    if may_deny(name) and any(values.verdict(text) is None for text in its):
        return "an answer"
    more = plain(name) in MORE_LABELS or what(plain(name).rstrip("0123456789")) == "label"
    if its and more and not meaning and not values.are_numbers(its) and not values.are_answers(its):
        return "a label"
    if not its or is_other(name) or meaning == "duration":
        return ""
    if meaning == "split" or SPLIT & set(words(name)) or values.are_splits(its):
        return "a split"
    if not meaning and all(map(values.has_day, its)):
        return "a date"
    like = (says_time(name) or bool(LABEL & set(words(name)))) and (
        values.are_times(its) or values.like_times(its)
    )
    if (
        like
        and says_time(name)
        and not all(map(values.has_day, its))
        or values.are_spans(its)
        or values.are_clocks(its)
    ):
        return "a time"
    if not meaning and values.are_answers(its):
        return "a class"
    if (
        not meaning
        and not used["start"]
        and values.are_numbers(its)
        and not (table.find("hour") and OF_DAY & set(words(name)))
    ):
        return "numbers"
    hint = meaning in ("label", "genus", "epithet") if meaning else bool(LABEL & set(words(name)))
    return "a label" if hint and (meaning or not like) else ""


def _refuse_lost_times(layout: Layout, options: Options) -> None:
    table, used = layout.table, layout.used
    if used["start"] or used["file offset"]:
        start = (used["start"] or used["file offset"])[0]
        its = table.values(start)
        has_end = (
            used["end"]
            or used["duration"]
            or options.end_column == "none"
            or fixed_length(table, options)
        )
        if not has_end and any(map(values.given, its)) and not values.are_spans(its):
            raise DataError(
                f"{table.path} has starts ({start!r}), and no end or duration that is known; it has"
                f" {', '.join(table.columns)[:200]}; name one: --end-column or --duration-column,"
                " or the length of all: --duration-column 5s"
            )
        return
    elsewhere = any(plain(name) in ELSEWHERE for name in used["file"])
    if (
        options.start_column == "none"
        or (used["end"] and fixed_length(table, options))
        or elsewhere
    ):
        return
    ends = [name for name in used["end"] if any(map(values.given, table.values(name)))]
    if times := [name for name in table.columns if name in ends or _is_position(layout, name)]:
        its = [text for name in times for text in table.values(name) if values.given(text)]
        odd = next(
            (text for text in its if not values.are_times([text]) and not values.are_spans([text])),
            "",
        )
        counted = next(filter(None, map(counting, times)), "")
        remedy = f"write seconds in place of {counted or repr(odd)}, and " if counted or odd else ""
        raise DataError(
            f"{table.path}: {', '.join(map(repr, times[:4]))} looks like times, and no start is"
            f" known, so its events would become whole recordings; {remedy}name it: --start-column"
            " and --end-column, or --start-column none"
            + (
                "; a time of day is written 05:30"
                if any(what(name) == "time" for name in times)
                else ""
            )
        )


def _is_position(layout: Layout, name: str) -> bool:
    """Whether a column holds times that would be lost, by values, name and how they vary."""
    table, its = layout.table, list(filter(values.given, layout.table.values(name)))
    meaning, parts = what(name), set(words(name))
    if (
        not its
        or name in layout.classes
        or meaning not in ("", "time", "clock", "date", "datetime", "duration", "offset")
    ):
        return False
    numbers, clocks = values.are_numbers(its), values.are_clocks(its)
    files = table.values(layout.column("file") or name)
    of_files = {
        (file, text)
        for file, text in zip(files, table.values(name), strict=True)
        if values.given(text)
    }
    varies = len(of_files) > len({file for file, _ in of_files})  # in a recording
    named = says_time(name) or bool(parts & MINUTES)
    if not numbers and not clocks and not values.are_spans(its):
        # of a recording, if it says so, and of an event otherwise
        if all(map(values.has_day, its)):
            own = bool(parts & RECORDING) or bool(meaning) or not named
            return any(":" in text for text in its) and not is_other(name) and (varies or not own)
        form = named or all(
            re.search(r":\d|\d ?(s|secs?|seconds?|ms|mins?|minutes?)\b|\d['\u2032]", text)
            for text in its
        )
        return not meaning and (
            values.are_parts(files, table.values(name)) or form and values.like_times(its)
        )
    if meaning == "date":
        return False
    if NUMBERING & set(words(name)[-1:]) or (table.find("hour") and parts & OF_DAY):
        return varies and bool(parts & (TIME | {"clip"}))
    if meaning == "duration":
        return varies
    if meaning in ("time", "clock", "datetime"):
        dated = bool(layout.used.get("date"))
        early = (
            clocks
            and not dated
            and all(re.match("00?:", text) and not re.search(r":\d\d:00$", text) for text in its)
        )
        return not values.are_hours(its, dated) if numbers else varies or early or not clocks
    if is_other(name):
        labelled = bool(layout.used["label"] or layout.used.get("genus") or layout.classes)
        return (
            bool(parts & {"seconds", "time"})
            and labelled
            and (varies or parts.isdisjoint({"begin", "end", "12"}))
        )
    if numbers:
        others = [other for other in layout.unused if other != name]
        return (
            named
            or varies
            or any(
                _is_before(table, name, other) or _is_before(table, other, name) for other in others
            )
        )
    return named or varies or any(":" in text for text in its) or clocks


def _is_before(table: Table, first: str, second: str) -> bool:
    if not values.are_numbers(table.values(first)) or not values.are_numbers(table.values(second)):
        return False
    pairs = [
        (values.number(a), values.number(b))
        for a, b in zip(table.values(first), table.values(second), strict=True)
    ]
    return all(a is not None and b is not None and a < b for a, b in pairs) and len(set(pairs)) > 1


def _refuse_lost_labels(layout: Layout, options: Options) -> None:
    used = layout.used
    if (
        used["label"]
        or used.get("genus")
        or layout.classes
        or options.label_column == "none"
        or options.optional
    ):
        return
    rest = [
        *layout.unused,
        *(n for n in layout.ignored if not is_other(n) and not meaning_of(n) or plain(n) == "en"),
    ]
    if labels := [name for name in rest if any(map(values.given, layout.table.values(name)))]:
        raise DataError(
            f"{layout.table.path} has no column of labels that is known, and"
            f" {', '.join(map(repr, labels[:4]))} may be one; name it: --label-column, or"
            " --label-column none"
        )


def _refuse_denials(layout: Layout, options: Options) -> None:
    """Raise DataError for a column that may deny labels, or call them unchecked."""
    labelled = layout.used["label"] or layout.used.get("genus") or layout.classes
    if options.answer_column or layout.used.get("answer") or not labelled:
        return
    _refuse_absences(layout)
    for name in (*layout.ignored, *layout.unused):
        texts = layout.table.values(name)
        if may_deny(name) or values.are_verdicts(texts):
            wrong = "yes" if plain(name) in DENYING else "no"
            letters = values.are_letters(texts)
            found = [(text, values.verdict(text, letters)) for text in texts]
            mixed = any(each for _, each in found)  # else it is no column of verdicts
            if denied := [
                text for text, each in found if each == wrong or (each is None and mixed)
            ]:
                _refuse_doubtful(layout, name, denied, "are denied or not checked yet")


def _refuse_absences(layout: Layout) -> None:
    """Raise DataError for a count or weight of 0 next to a label: nothing of it was there."""
    if layout.classes:
        return
    for name in (*layout.ignored, *layout.unused, *layout.used.get("score", ())):
        texts = list(filter(values.given, layout.table.values(name)))
        absent = [is_absent(name, text) for text in texts]
        is_weight = plain(name) in WEIGHTS and all(map(values.is_share, texts)) and not all(absent)
        if (is_weight or plain(name) in COUNTS) and None not in absent and any(absent):
            _refuse_doubtful(
                layout,
                name,
                [text for text, each in zip(texts, absent, strict=True) if each],
                "are then absent",
            )


def _refuse_doubtful(layout: Layout, name: str, texts: Sequence[str], why: str) -> None:
    raise DataError(
        f"{layout.table.path}: {name!r} holds {texts[0]!r} in {len(texts)} lines, whose labels"
        f" {why}; say which: --answer-column {name!r} leaves their labels out, --answer-column none"
        " keeps them"
    )
