"""The meaning of a table's columns by their names, in one table, `NAMES`, for every command that reads tables.

Names are compared without case, blanks, points, underscores and brackets: "Begin Time (s)", `begin_time_s` and R's
`Begin.Time..s.` are one name. A unit at the end scales the values: s, ms, min and h, Hz and kHz.

A table that would lose its times or labels is refused: one with a column that looks like either by its name or values, while
no column is recognised. Every option for a column also takes "none".
"""

import dataclasses
import re
import unicodedata
from collections.abc import Mapping, Sequence

from loaders.audio.recordings import values
from loaders.audio.recordings.tables import Table
from loaders.base import DataError
from loaders.io import checks

# Meaning -> names. Of several columns with one meaning, the one whose name is listed first is used.
NAMES: Mapping[str, tuple[str, ...]] = {
    "file": (
        "begin path", "file path", "audio file path", "audio path", "begin file", "in file", "file name", "file",
        "audio file name", "audio file", "audio", "path", "recording", "recording name", "recording file", "fname",
        "sound files", "sound file", "wav file name", "wav file", "wav", "slice file name", "segment id", "ytid", "item id",
        "item name", "clip name", "clip", "source file", "soundscape", "sample name", "media", "datei", "dateiname", "archivo",
        "fichier",
    ),
    "folder": ("indir", "in dir", "folder", "directory", "dir", "subfolder"),
    "start": (
        "start", "start time", "begin", "begin time", "onset", "onset time", "event start", "event start time",
        "segment start", "event onset", "window start", "window start time", "time begin", "clip start", "clip start time",
        "start offset", "time start", "t start", "t min", "min t", "time min", "t0", "x1", "from", "starts", "beginn",
        "anfang", "inicio", "debut",
    ),
    "end": (
        "end", "end time", "stop", "stop time", "event end", "event end time", "segment end", "event offset", "window end",
        "window end time", "clip end", "clip end time", "end offset", "time end", "t end", "t stop", "t max", "max t",
        "time max", "t1", "x2", "to", "ends", "finish", "ende", "fin",
    ),
    "duration": ("duration", "dur", "delta time", "event duration", "segment duration", "length"),
    "offset": ("offset",),  # an end next to an onset, a start next to a duration
    "file offset": ("file offset", "begin file offset"),  # Raven's start in the file; its Begin Time counts over all files
    "label": (
        "manual id", "label", "labels", "annotation", "annotations", "class name", "class label", "species", "species name",
        "ebird code", "species ebird code", "primary label", "species code", "alpha code", "common name", "scientific name",
        "event label", "positive labels", "category", "class", "tags", "tag", "taxon", "taxon name", "vernacular name",
        "english name", "sci name", "latin name", "target", "auto id", "top1match", "art", "especie", "espece",
    ),
    "genus": ("gen", "genus"),  # with "epithet" a scientific name, if no column of labels is there
    "epithet": ("sp", "specific epithet"),
    "low": (
        "low", "low freq", "low f", "freq low", "f low", "f min", "min freq", "freq min", "low frequency", "min frequency",
        "lower frequency", "frequency min", "frequency low", "bottom freq", "y1",
    ),
    "high": (
        "high", "high freq", "high f", "freq high", "f high", "f max", "max freq", "freq max", "high frequency",
        "max frequency", "upper frequency", "frequency max", "frequency high", "top freq", "y2",
    ),
    "channel": ("channel",),
    "selection": ("selection", "selec"),
    "view": ("view",),
    "answer": ("answer", "validated", "validation", "validation status"),
    "asked": ("asked",),
    "score": ("score", "confidence"),
    "clock": ("clock",),
    "embeddings": ("embeddings",),
    "split": ("split",),
    "recording": ("recording id",),
    "site": ("site", "location", "station", "site name", "site id", "locality", "loc", "deployment"),
    "date": ("date", "recording date", "date recorded", "event date", "datum", "fecha"),
    "time": ("time", "local time", "recording time", "time of day"),
    "datetime": ("date time", "recorded at", "timestamp", "recording date time", "recording start"),
    "latitude": ("latitude", "lat", "decimal latitude"),
    "longitude": ("longitude", "lon", "lng", "long", "decimal longitude"),
}  # fmt: skip
# Columns of the same programs that say nothing about times and labels.
OTHER = (
    "notes", "note", "comment", "comments", "remarks", "rmk", "observer", "recordist", "rec", "author", "reviewer",
    "annotator", "url", "license", "lic", "rating", "quality", "q", "id", "index", "unnamed", "row", "x", "key", "uuid",
    "model", "overlap", "sensitivity", "week", "min conf", "species list", "seconds", "windows", "unreadable windows",
    "detections", "query", "begin clock time", "end clock time", "begin date", "begin date time", "begin hour",
    "sample rate", "rate", "samplerate", "peak time", "center time", "delta freq", "peak freq", "center freq",
    "avg power density", "inband power", "occupancy", "type", "sex", "stage", "method", "cnt", "country", "elevation",
    "alt", "uploaded", "also", "sono", "osci", "ssp", "group", "grp", "en", "manufacturer", "device", "recorder",
    "temperature", "temp", "battery", "gain", "humidity", "weather", "hour", "day", "month", "year", "fs id", "salience",
    "fold", "class id", "esc10", "src file", "take", "secondary labels", "mids", "out file", "out dir", "out file fs",
    "out file zc", "time 12", "date 12", "hour 12", "n", "verified", "checked", "file size", "size", "channels", "fmean",
    "fc", "dur mean", "match", "matching", "margin", "pulses", "qual", "sc", "tk", "files", "top1dist", "s1",
)  # fmt: skip
ABOUT = ("recording", "site", "latitude", "longitude")
SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds", "ss", "hhmmss"), 1.0),
    **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 1e-3),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
}
HERTZ = {"hz": 1.0, "khz": 1e3}
KILOHERTZ = ("bottomfreq", "topfreq")  # of warbleR, without a unit
# Words in the name of a column that looks like a time, and like a label.
TIME = set(
    "start starts started begin begins onset end ends ended stop offset finish from to t t0 t1 t2 time times timestamp sec "
    "secs second seconds s ms msec position at frame frames sample samples tstart tend".split()
)
LABEL = set("label species class taxon taxa name annotation tag category code bird call sound event common scientific".split())
# Tables that give times in another recording than the one that they name.
ELSEWHERE = ("ytid", "slicefilename")


def words(name: str) -> list[str]:
    """Return the words of a column's name in lower case, without marks between them."""
    text = unicodedata.normalize("NFKC", name).strip("\ufeff")
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).casefold())


def plain(name: str) -> str:
    return "".join(words(name))


KNOWN = {plain(name): (meaning, place) for meaning, its in NAMES.items() for place, name in enumerate(its)}
IGNORED = {plain(name) for name in OTHER}


def is_other(name: str) -> bool:
    """Whether a column is known to say nothing about times and labels."""
    parts = words(name)
    return (
        not parts
        or parts[0] == "unnamed"
        or "".join(parts) in IGNORED
        or (parts[-1] in SECONDS | HERTZ and "".join(parts[:-1]) in IGNORED)
    )


def meaning_of(name: str) -> tuple[str, int, float] | None:
    """Return the meaning of a column, the place of its name in `NAMES`, and the scale of its values, or None."""
    parts = words(name)
    whole = "".join(parts)
    if whole in KNOWN:
        return (*KNOWN[whole], 1e3 if whole in KILOHERTZ else 1.0)
    unit = parts[-1] if parts else ""
    if parts[-2:-1] == ["in"]:  # "start in s"
        parts = [*parts[:-2], unit]
    if parts[-3:] == ["hh", "mm", "ss"]:
        parts, unit = [*parts[:-3], "hhmmss"], "hhmmss"
    stem = "".join(parts[:-1])
    meaning, place = KNOWN.get(stem, ("", 0))
    if unit in SECONDS:
        if meaning in ("time", "datetime"):  # "time (s)" is a place in a recording, "time" one in a day
            return "start", len(NAMES["start"]), SECONDS[unit]
        if meaning in ("start", "end", "duration", "offset", "file offset"):
            return meaning, place, SECONDS[unit]
    if unit in HERTZ and meaning in ("low", "high"):
        return meaning, place, HERTZ[unit]
    return None


def what(name: str) -> str:
    """Return the meaning of a column, or ""."""
    found = meaning_of(name)
    return found[0] if found else ""


@dataclasses.dataclass(frozen=True)
class Options:
    """How sources are read: the names of columns, and where labels come from; empty: found by themselves."""

    audio: str = ""  # [path] the folder that names in tables are relative to
    labels: str = ""  # "folder", "none", or a pattern of the path with (?P<label>…): where a folder's labels come from
    file_column: str = ""
    start_column: str = ""
    end_column: str = ""
    duration_column: str = ""
    label_column: str = ""  # several between commas: columns of 0 and 1
    date_column: str = ""
    split_column: str = ""
    dates: str = ""  # "day-first" or "month-first": of 01/06/2024
    separator: str = ""  # between several labels in one field; empty: none but for lists in brackets
    optional: bool = False  # labels may be missing
    whole: bool = False  # the names of recordings alone are read


@dataclasses.dataclass
class Layout:
    """The columns of one table by their meaning."""

    table: Table
    used: dict[str, list[str]]  # meaning -> columns; of several, the first that is not empty in a row counts
    scales: dict[str, float]  # of columns, to s and Hz
    classes: list[str]  # columns of 0 and 1, whose names are labels
    ignored: list[str]
    unused: dict[str, str]  # columns that look like times or labels, and as what

    def column(self, meaning: str) -> str | None:
        return next(iter(self.used.get(meaning, ())), None)

    def text(self, row: Mapping[str, str], meaning: str) -> str:
        """Return the value of a row, "" if it has none."""
        for name in self.used.get(meaning, ()):
            if row[name] not in values.MISSING:
                return row[name]
        return ""

    def describe(self) -> list[str]:
        """Return the columns that were found, a meaning a line."""
        units = {1e-3: "ms", 60.0: "min", 3600.0: "h", 1e3: "kHz"}
        lines = [f"{self.table.path}: {len(self.table.rows())} lines, {self.table.encoding}"]
        found = {
            meaning: ", ".join(self._shown(name, units) for name in names) for meaning, names in self.used.items() if names
        }
        found |= {"classes": ", ".join(self.classes)} if self.classes else {}
        found |= {"ignored": ", ".join(name for name in self.ignored if name)} if self.ignored else {}
        return lines + [f"    {meaning:12} {text}" for meaning, text in found.items()]

    def _shown(self, name: str, units: Mapping[float, str]) -> str:
        unit = units.get(self.scales.get(name, 1.0))
        return f"{name} [{unit}]" if unit else name


FLAGS = {
    "file": "--file-column", "start": "--start-column", "end": "--end-column", "duration": "--duration-column",
    "label": "--label-column", "date": "--date-column", "split": "--split-column",
}  # fmt: skip


def find(table: Table, options: Options) -> Layout:
    """Return the columns of a table.

    Raises DataError: an option names a column that is not there, or times or labels would be lost.
    """
    places: dict[str, list[tuple[int, str]]] = {}
    scales: dict[str, float] = {}
    for name in table.columns:
        if found := meaning_of(name):
            places.setdefault(found[0], []).append((found[1], name))
            scales[name] = found[2]
    used = {meaning: [name for _, name in sorted(several, key=lambda each: each[0])] for meaning, several in places.items()}
    classes: list[str] = []
    for meaning, flag in FLAGS.items():
        if option := getattr(options, f"{meaning}_column"):
            columns = _named(table, option, flag)
            for each in used.values():
                each[:] = [name for name in each if name not in columns]
            if len(columns) > 1:
                _refuse_no_answers(table, columns)
            used[meaning] = columns if len(columns) < 2 else []
            classes = columns if len(columns) > 1 else classes
            for name in columns:
                scales.setdefault(name, SECONDS.get((words(name) or [""])[-1], 1.0))
    _choose_files(table, used)
    _choose_times(table, used, options)
    _choose_labels(used, options)
    if options.date_column == "none":
        used |= {"date": [], "time": [], "datetime": []}
    if options.whole:
        used = {meaning: used.get(meaning, []) for meaning in ("file", "folder", "start", "label")}
        return Layout(
            table, used | {"start": [], "label": []}, scales, [], [n for n in table.columns if n not in used["file"]], {}
        )
    taken = {name for several in used.values() for name in several}
    rest = [name for name in table.columns if name not in taken and name not in classes]
    if (used["file"] or used["start"]) and not used["label"] and not classes and options.label_column != "none":
        classes = _classes(table, [name for name in rest if not is_other(name) and name not in scales])
        rest = [name for name in rest if name not in classes]
    unused = {name: what for name in rest if (what := _looks_like(table, name, used))}
    for name in (*used.get("time", ()), *used.get("datetime", ())):  # 12.5 is no time of day
        if not used["start"] and options.start_column != "none" and values.are_numbers(table.values(name)):
            unused[name] = "a time"
    layout = Layout(table, used, scales, classes, [name for name in rest if name not in unused], unused)
    if used["file"] or used["start"]:  # else it is no table of recordings
        _refuse_lost_times(layout, options)
        _refuse_lost_labels(layout, options)
    return layout


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


def _choose_files(table: Table, used: dict[str, list[str]]) -> None:
    """Leave out columns of addresses, and folders if there is no file in them."""
    files = used.setdefault("file", [])
    files[:] = [name for name in files if not any("://" in value for value in table.values(name))] or files


def _choose_times(table: Table, used: dict[str, list[str]], options: Options) -> None:
    """Decide which columns are start, end and duration. Raises DataError if two say different things."""
    for meaning in ("start", "end", "duration"):
        columns = used.setdefault(meaning, [])
        readable = [name for name in columns if values.are_times(table.values(name))]
        columns[:] = readable or columns[:1]
        if len(columns) > 1 and any(table.values(name) != table.values(columns[0]) for name in columns[1:]):
            names = " and ".join(map(repr, columns))
            raise DataError(f"{table.path} has {names}, which differ; name the {meaning}: {FLAGS[meaning]}")
        del columns[1:]
    offset, by_file = used.pop("offset", []), used.setdefault("file offset", [])
    if offset and not used["start"] and options.start_column != "none" and (used["duration"] or used["end"]):
        used["start"] = offset
    elif offset and used["start"] and not used["end"] and not used["duration"] and options.end_column != "none":
        used["end"] = offset
    elif offset and used["start"] and plain(used["start"][0]).startswith("begintime"):
        used["file offset"] = by_file or offset
    if used["end"] or not (used["start"] or used["file offset"]):
        used["duration"] = []
    if any(plain(name) in ELSEWHERE for name in used["file"]):
        used |= {meaning: [] for meaning in ("start", "end", "duration", "file offset")}


def _choose_labels(used: dict[str, list[str]], options: Options) -> None:
    """Keep one column of labels, or Kaleidoscope's: the label of a person counts first."""
    columns = used.setdefault("label", [])
    genus, epithet = used.pop("genus", []), used.pop("epithet", [])
    programs = [name for name in columns if plain(name) in ("manualid", "autoid", "top1match")]
    if options.label_column:
        return
    if programs and programs[0] == columns[0]:
        columns[:] = programs
    elif not columns and genus and epithet:
        used["genus"], used["epithet"] = genus, epithet
    else:
        columns[:] = (columns or epithet)[:1]


def _classes(table: Table, names: Sequence[str]) -> list[str]:
    """Return the columns of a wide table whose names are labels: they hold nothing but yes and no. Raises DataError.

    A column of other numbers next to them might be a class, too.
    """
    rows = {name: table.values(name) for name in names}
    classes = [name for name, its in rows.items() if values.are_answers(its)]
    numbers = [name for name, its in rows.items() if name not in classes and _is_nearly(its)]
    if classes and numbers:
        odd = next(value for value in rows[numbers[0]] if values.given(value) and values.answer(value) is None)
        raise DataError(
            f"{table.path} has columns of 0 and 1 ({', '.join(classes[:4])}), and {numbers[0]!r} holds {odd}; "
            f"name the classes: --label-column '{','.join(classes[:3])},…'"
        )
    return classes


def _is_nearly(texts: Sequence[str]) -> bool:
    """Whether a column may be one of yes and no: it holds numbers, or answers in half of its cells or more."""
    given = list(filter(values.given, texts))
    return values.are_numbers(texts) or 0 < len(given) <= 2 * sum(values.answer(text) is not None for text in given)


def _refuse_no_answers(table: Table, names: Sequence[str]) -> None:
    """Raise DataError for a cell of named columns of 0 and 1 that is no answer."""
    for name in names:
        for number, row in table.rows():
            text = row[name]
            if values.given(text) and values.answer(text) is None and text.casefold() not in values.OPEN:
                raise DataError(
                    f"{table.path}:{number}: {name!r} holds {text!r}; a column of a class holds 0 and 1, or yes and no"
                )


def _looks_like(table: Table, name: str, used: Mapping[str, list[str]]) -> str:
    """Return the likely meaning of an unused column, by its name and values: "a time", "a label", "a class" or ""."""
    its = [value for value in table.values(name) if values.given(value)]
    if not its or is_other(name):
        return ""
    if values.are_times(its) and TIME & set(words(name)):
        return "a time"
    meaning = meaning_of(name)
    if used["label"] and not meaning and values.are_answers(its):
        return "a class"
    hint = meaning[0] in ("label", "genus") if meaning else bool(LABEL & set(words(name)))
    return "a label" if hint and (meaning or not values.are_times(its)) else ""


def _refuse_lost_times(layout: Layout, options: Options) -> None:
    table, used = layout.table, layout.used
    if used["start"] or used["file offset"]:
        if not used["end"] and not used["duration"] and options.end_column != "none":
            start = (used["start"] or used["file offset"])[0]
            if any(map(values.given, table.values(start))):
                raise DataError(
                    f"{table.path} has starts ({start!r}), and no end or duration that is known; it has "
                    f"{', '.join(table.columns)[:200]}; name one: --end-column or --duration-column"
                )
        return
    if options.start_column == "none" or any(plain(name) in ELSEWHERE for name in used["file"]):
        return
    times = [name for name, what in layout.unused.items() if what == "a time"]
    ends = [name for name in used["end"] if any(map(values.given, table.values(name)))]
    column = layout.column("file")
    if not times and not ends and column:
        names = table.values(column)
        numbers = [n for n in layout.ignored if not is_other(n) and not what(n) and values.are_numbers(table.values(n))]
        ordered = [(a, b) for a in numbers for b in numbers if a != b and _is_before(table, a, b)]
        times = numbers if len(set(names)) < len(names) else list(ordered[0]) if ordered else []
    if times or ends:
        raise DataError(
            f"{table.path}: {', '.join(map(repr, (times + ends)[:4]))} looks like times, and no start is known, so its events "
            "would become whole recordings; name it: --start-column and --end-column, or --start-column none"
        )


def _is_before(table: Table, first: str, second: str) -> bool:
    """Whether one column of numbers is less than another in every line, and not the same in all of them."""
    pairs = [(values.number(a), values.number(b)) for a, b in zip(table.values(first), table.values(second), strict=True)]
    return all(a is not None and b is not None and a < b for a, b in pairs) and len(set(pairs)) > 1


def _refuse_lost_labels(layout: Layout, options: Options) -> None:
    used = layout.used
    if used["label"] or used.get("genus") or layout.classes or options.label_column == "none" or options.optional:
        return
    rest = [*layout.unused, *(name for name in layout.ignored if not is_other(name) and not meaning_of(name))]
    labels = [name for name in rest if any(map(values.given, layout.table.values(name)))]
    if labels:
        raise DataError(
            f"{layout.table.path} has no column of labels that is known, and {', '.join(map(repr, labels[:4]))} may be one; "
            "name it: --label-column, or --label-column none"
        )
