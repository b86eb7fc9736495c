"""Folders, tables and metadata to annotations."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

from loaders.audio import shards
from loaders.audio.recordings import tables
from loaders.audio.recordings.annotations import Annotation, Mistakes
from loaders.audio.recordings.find import Finder, is_audio, walk
from loaders.audio.recordings.rows import leads_out
from loaders.base import DataError
from loaders.io import files

FILE = ("file", "filename", "file_name", "filepath", "path", "audio", "audio_path", "recording", "fname", "segment_id", "YTID")
START = ("start", "start_time", "start_seconds", "start_time_seconds", "start (s)", "begin time (s)", "onset", "begin")
END = ("end", "end_time", "end_seconds", "end_time_seconds", "end (s)", "end time (s)", "offset", "stop")
LABEL = ("label", "labels", "annotation", "annotations", "class", "class_name", "category", "species", "ebird_code",
         "primary_label", "species code", "common name", "scientific name", "event_label",
         "positive_labels", "tags")  # fmt: skip
LOW = ("low", "low freq (hz)", "low_freq", "low_f", "freq_low", "Fmin")
HIGH = ("high", "high freq (hz)", "high_freq", "high_f", "freq_high", "Fmax")
ABOUT = {
    "recording": ("recording_id",),
    "site": ("site", "location", "station"),
    "date": ("date",),
    "time": ("time", "local_time"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon", "lng", "long"),
}
RAVEN = ("Begin Time (s)", "End Time (s)")


@dataclasses.dataclass(frozen=True)
class Options:
    """How sources are read: the names of columns, and where labels come from; empty: found by themselves."""

    audio: str = ""  # [path] the folder that names in tables are relative to
    labels: str = ""  # "folder", "none", or a pattern of the path with (?P<label>…): where a folder's labels come from
    file_column: str = ""
    start_column: str = ""
    end_column: str = ""
    label_column: str = ""
    split_column: str = ""
    separator: str = ""  # between several labels in one field; empty: none but for lists in brackets


def read(source: str, options: Options, mistakes: Mistakes) -> Iterator[Annotation]:
    """The annotations of a folder, a table, metadata or a list of paths.

    Raises DataError: it does not exist, or is none of these.
    """
    path = pathlib.Path(source).expanduser()
    finder = Finder(pathlib.Path(options.audio).expanduser() if options.audio else None, mistakes)
    if path.is_dir():
        yield from _of_folder(path, options, mistakes, finder)
    elif not path.exists():
        raise DataError(f"{source} does not exist{shards.nearest(path)}; name a folder of recordings, a table, or metadata")
    elif is_audio(path.name):
        yield Annotation(os.path.abspath(path), where=source)
    else:
        yield from _of_file(path, options, mistakes, finder)


def _of_folder(folder: pathlib.Path, options: Options, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    names = list(walk(folder, mistakes))
    metadata = [path for path in names if re.search(r"_metadata(_train|_test|_test_5s)?\.(parquet|csv)$", path)]
    selections = [path for path in names if path.endswith(".selections.txt")]
    catalogues = [path for path in names if path.endswith(".json") and _is_xeno_canto(path, folder, mistakes)]
    for each in (*metadata, *selections, *catalogues):
        remedy = "; name that file itself, or the folder that it lies in"
        files.inside(folder, os.path.relpath(each, os.path.abspath(folder)), remedy=remedy)
    if metadata or selections or catalogues:
        finder = finder if options.audio else Finder(folder, mistakes)
        for each in metadata:
            yield from _birdset(pathlib.Path(each), mistakes, finder)
        for each in sorted([*selections, *catalogues]):
            yield from _of_file(pathlib.Path(each), options, mistakes, finder)
        return
    audio = [path for path in names if is_audio(path)]
    if not audio:
        archives = ", ".join(os.path.basename(path) for path in names if re.search(r"\.(tar|tar\.gz|tgz)$", path))
        hint = f"; unpack {archives[:80]} first: --unpack" if archives else f"; it holds {len(names)} other files"
        raise DataError(f"{folder} holds no recordings (.wav, .flac, .mp3, .ogg, .opus, .aiff, .caf, .m4a){hint}")
    top = os.path.abspath(folder)
    nested = any(os.path.dirname(path) != top for path in audio)
    label = options.labels or ("folder" if nested else "none")
    pattern = None
    if label not in ("folder", "none"):
        try:
            pattern = re.compile(label)
        except re.error as error:
            raise DataError(f"--labels {label!r} is no pattern: {error}") from error
        if "label" not in pattern.groupindex:
            raise DataError(f"--labels {label!r} has no group (?P<label>…); use folder, none, or a pattern with that group")
    for path in audio:
        labels: tuple[str, ...] = ()
        about: dict[str, str] = {}
        inside = os.path.relpath(path, top).replace(os.sep, "/")
        if label == "folder" and "/" in inside:
            labels = (inside.split("/")[-2],)
        elif pattern:
            found = pattern.search(inside)
            if not found:
                mistakes.add("bad-row", f"{path} does not match the pattern {label!r}")
                continue
            groups = {key: value for key, value in found.groupdict().items() if value is not None}
            labels = tuple(filter(None, [groups.pop("label", "")]))
            about = {key: value for key, value in groups.items() if key in ABOUT}
        yield Annotation(path, labels=labels, where=path, about=about)


def _of_file(path: pathlib.Path, options: Options, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    if path.suffix == ".parquet":
        yield from _birdset(path, mistakes, finder)
        return
    text = tables.text_of(path)
    if path.suffix == ".json":
        yield from _xeno_canto(path, text, mistakes, finder)
        return
    first = next((line for line in text.splitlines() if line.strip()), "")
    if not first:
        raise DataError(f"{path} is empty; expected a table, a list of recordings, or metadata")
    if re.match(r"^[\d.,]+\t[\d.,]+(\t|$)", first):
        yield from _audacity(path, text, mistakes, finder)
        return
    table = tables.Table(path, text)
    if table.find(*RAVEN[:1]) and table.separator == "\t" and not options.file_column:
        yield from _raven(table, options, mistakes, finder)
    elif table.find("IN FILE") and table.find("OFFSET"):
        yield from _kaleidoscope(table, options, mistakes, finder)
    elif options.file_column or table.find(*FILE):
        yield from _columns(table, options, mistakes, finder)
    elif is_audio(first.strip()):
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                where = f"{path}:{number}"
                if found := finder.find(line.strip(), path, where):
                    yield Annotation(found, where=where)
    elif table.find(*START) or options.start_column:
        yield from _columns(table, options, mistakes, finder)
    else:
        raise DataError(
            f"{path} is no table that names recordings: its columns are {', '.join(table.columns)[:200]}; name them with "
            "--file-column, --start-column, --end-column, --label-column"
        )


def _labels(text: str | None, separator: str) -> tuple[str, ...]:
    """The labels of a field: one, several in brackets, or several between separators, in one line each."""
    text = re.sub(r"[\x00-\x1f\x7f]+", " ", text or "").strip()
    if text.startswith("[") and text.endswith("]"):
        parts = re.findall(r"'([^']*)'|\"([^\"]*)\"|([^,\s\[\]'\"][^,\[\]'\"]*)", text)
        return tuple(dict.fromkeys(filter(None, ("".join(part).strip() for part in parts))))
    if separator:
        return tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(separator)))))
    return (text,) if text else ()


def _times(
    row: Mapping[str, str], start: str | None, end: str | None, where: str, mistakes: Mistakes
) -> tuple[float | None, float | None] | None:
    """Start and end of a row, each None if it is missing. None if they are no numbers, which is counted."""
    try:
        times = tables.number(row.get(start or "")), tables.number(row.get(end or ""))
    except ValueError:
        mistakes.add("bad-row", f"{where}: the times {row.get(start or '')!r} and {row.get(end or '')!r} are no numbers")
        return None
    if (times[0] is None) != (times[1] is None):
        mistakes.add("bad-row", f"{where} has a start or an end, and not both")
        return None
    return times


def _frequency(row: Mapping[str, str], column: str | None) -> float | None:
    try:
        return tables.number(row.get(column or ""))
    except ValueError:
        return None  # of a figure that nothing depends on


def _channel(row: Mapping[str, str], column: str | None, first: int) -> int | None:
    """The channel that a row was annotated on, from 0, if the table counts from ``first``, or None without one."""
    text = row.get(column or "", "")
    return int(text) - first if text.isdecimal() and len(text) < 10 and int(text) >= first else None


def _about(table: tables.Table) -> Callable[[Mapping[str, str]], dict[str, str]]:
    columns = {key: column for key, names in ABOUT.items() if (column := table.find(*names))}
    return lambda row: {key: row[column] for key, column in columns.items() if row.get(column)}


def _named(table: tables.Table, option: str, flag: str, names: tuple[str, ...]) -> str | None:
    """The column that an option names, or that has one of the usual names. Raises DataError."""
    if not option:
        return table.find(*names)
    column = table.find(option)
    if not column:
        raise DataError(f"{table.path} has no column {option!r} ({flag}); it has {', '.join(table.columns)}")
    return column


def _columns(table: tables.Table, options: Options, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    """A table with a recording, or a part of one, a line, or of opensoundscape, with a class a column of 0 and 1."""
    file = _named(table, options.file_column, "--file-column", FILE)
    start = _named(table, options.start_column, "--start-column", START)
    end = _named(table, options.end_column, "--end-column", END) if start else None
    label = _named(table, options.label_column, "--label-column", LABEL)
    split = _named(table, options.split_column, "--split-column", ("split",))
    low, high, about = table.find(*LOW), table.find(*HIGH), _about(table)
    rest = [name for name in table.columns if name not in (file, start, end, split, low, high) and name]
    rows = list(table.rows())
    binary = {"0", "1", "0.0", "1.0", "True", "False", "true", "false"}
    hot = not label and bool(rest) and all(row.get(name) in binary for _, row in rows for name in rest)
    # AudioSet's table of clips gives the times in the film that the clip was cut from.
    if file and file.lower() == "ytid":
        start = end = None
    separator = options.separator or ("," if label == "positive_labels" else "")
    for number, row in rows:
        where = f"{table.path}:{number}"
        times = _times(row, start, end, where, mistakes)
        path = finder.find(row.get(file, ""), table.path, where) if file else finder.next_to(table.path, where)
        if times is None or not path:
            continue
        if hot:
            labels = tuple(name for name in rest if row[name] in ("1", "1.0", "True", "true"))
        else:
            labels = _labels(row.get(label or ""), separator)
        (begins, ends), lows, highs = times, _frequency(row, low), _frequency(row, high)
        yield Annotation(path, begins, ends, labels, lows, highs, None, row.get(split or "", ""), where, about(row))


def _raven(table: tables.Table, options: Options, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    """A selection table of Raven. Times count from its first recording.

    A selection is listed once for each view of it. Joined tables have several of one number, which differ in other columns.
    """
    begin, end = (table.find(name) for name in RAVEN)
    selection, view = table.find("Selection"), table.find("View")
    file, offset, channel = table.find("Begin Path", "Begin File"), table.find("File Offset (s)"), table.find("Channel")
    name = table.find("Begin File") if file and offset else file
    label = _named(table, options.label_column, "--label-column", ("Annotation", "Label", "Species", "Species Code", *LABEL))
    low, high, about = table.find(*LOW), table.find(*HIGH), _about(table)
    seen = set()
    for number, row in table.rows():
        where = f"{table.path}:{number}"
        if selection and view:
            key = tuple(value for column, value in row.items() if column != view)
            if key in seen:
                continue
            seen.add(key)
        times = _times(row, begin, end, where, mistakes)
        path = None
        for column in dict.fromkeys(filter(None, (file, name))):
            if row.get(column):
                path = path or finder.find(row[column], table.path, where)
        path = path or (None if file and row.get(file) else finder.next_to(table.path, where))
        if times is None or not path:
            continue
        start, stop = times
        if start is None or stop is None:
            mistakes.add("bad-row", f"{where} has no times")
            continue
        if offset and row.get(offset):
            try:
                at = tables.number(row[offset])
            except ValueError:
                mistakes.add("bad-row", f"{where}: the offset {row[offset]!r} is no number")
                continue
            start, stop = at or 0.0, round((at or 0.0) + stop - start, 9)
        labels = _labels(row.get(label or ""), options.separator)
        heard = _channel(row, channel, 1)
        about_it = about(row)
        yield Annotation(path, start, stop, labels, _frequency(row, low), _frequency(row, high), heard, "", where, about_it)


def _audacity(path: pathlib.Path, text: str, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    """A label track of Audacity: start, end and label between tabs, and below it, after a backslash, the frequencies."""
    audio = finder.next_to(path, str(path))
    if not audio:
        return
    last: Annotation | None = None
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("\t")
        if not line.strip():
            continue
        try:
            numbers = [tables.number(field) for field in (fields[1:3] if fields[0] == "\\" else fields[:2])]
        except ValueError:
            numbers = []
        if len(numbers) < 2 or None in numbers:
            mistakes.add("bad-row", f"{path}:{number}: {line[:60]!r} is no label; expected start, end and label between tabs")
        elif fields[0] == "\\":
            if last:
                last.low, last.high = (value if value and value > 0 else None for value in numbers)
        else:
            if last:
                yield last
            label = fields[2].strip() if len(fields) > 2 else ""
            last = Annotation(audio, numbers[0], numbers[1], (label,) if label else (), where=f"{path}:{number}")
    if last:
        yield last


def _kaleidoscope(table: tables.Table, options: Options, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    """A table of Kaleidoscope: a file, an offset and a duration a line. The label of a person counts first."""
    folders = [table.find(name) for name in ("INDIR", "FOLDER")]
    file, offset, duration = table.find("IN FILE"), table.find("OFFSET"), table.find("DURATION")
    manual = [_named(table, options.label_column, "--label-column", ("MANUAL ID",))]
    automatic = [] if options.label_column else [table.find("AUTO ID"), table.find("TOP1MATCH")]
    low, high, channel, about = table.find("Fmin"), table.find("Fmax"), table.find("CHANNEL"), _about(table)
    for number, row in table.rows():
        where = f"{table.path}:{number}"
        times = _times(row, offset, duration, where, mistakes)
        name = "/".join(row[folder] for folder in folders if folder and row.get(folder))
        path = finder.find(
            f"{name}/{row.get(file or '', '')}".lstrip("/") if name else row.get(file or "", ""), table.path, where
        )
        if times is None or not path:
            continue
        start, length = times
        label = next((row[column] for column in (*manual, *automatic) if column and row.get(column)), "")
        stop = None if start is None or length is None else round(start + length, 9)
        labels = _labels(label, options.separator)
        heard = _channel(row, channel, 0)
        about_it = about(row)
        yield Annotation(path, start, stop, labels, _frequency(row, low), _frequency(row, high), heard, "", where, about_it)


def _is_xeno_canto(path: str, folder: pathlib.Path, mistakes: Mistakes) -> bool:
    """Whether a JSON file holds xeno-canto's metadata. One outside the folder, to which a link leads, is not opened."""
    if led := leads_out(path, str(folder)):
        mistakes.add("link-outside", f"{path} leads to {led}")
        return False
    try:
        with files.regular(pathlib.Path(path)) as file:
            return re.search(rb'"recordings"\s*:\s*\[', file.read(4096)) is not None
    except files.FileError:
        return False


def _xeno_canto(path: pathlib.Path, text: str, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    """xeno-canto's answer to a query: recordings are next to it as XC<number>, or under its stated name."""
    try:
        recordings = files.parse(text, str(path))["recordings"]
        if not isinstance(recordings, list) or not all(isinstance(each, dict) for each in recordings):
            raise TypeError("recordings is no list of objects")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no metadata of xeno-canto, which has a list of recordings: {error}") from error
    for n, each in enumerate(recordings):
        where = f"{path}: recording {each.get('id', n)}"
        quiet = Finder(finder._folder, Mistakes())
        found = quiet.find(f"XC{each.get('id')}", path, where)
        if not found and not (found := finder.find(str(each.get("file-name") or f"XC{each.get('id')}"), path, where)):
            continue
        species = " ".join(str(each.get(key) or "") for key in ("gen", "sp")).strip()
        place = {"latitude": each.get("lat"), "longitude": each.get("lng", each.get("lon")), "site": each.get("loc")}
        time = str(each.get("time") or "")
        about = {"recording": f"XC{each.get('id')}", "date": each.get("date"), "time": f"{time}:00" if len(time) == 5 else time}
        about |= place
        yield Annotation(
            found, labels=(species,) if species else (), where=where, about={k: str(v) for k, v in about.items() if v}
        )


def _birdset(path: pathlib.Path, mistakes: Mistakes, finder: Finder) -> Iterator[Annotation]:
    """The metadata of one split of BirdSet: recordings in train, events of recordings in test, clips of 5 s in test_5s."""
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    try:
        with files.regular(path):  # a pipe would be waited for
            table = pq.read_table(path) if path.suffix == ".parquet" else pc.read_csv(path)
        rows = table.to_pylist()
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged table makes pyarrow raise many kinds
        raise DataError(f"{path} cannot be read: {files.said(error)[:300]}") from error
    named = re.search(r"_metadata_(train|test|test_5s)\.", path.name)
    split = named[1] if named else "train"
    columns = set(table.column_names)
    file = next((name for name in ("filepath", "__index_level_0__") if name in columns), None)
    if not file or not columns & {"ebird_code", "ebird_code_multilabel"}:
        raise DataError(
            f"{path} is no metadata of BirdSet: it has no filepath, or neither ebird_code nor ebird_code_multilabel"
        )
    numbers = ("start_time", "end_time", "low_freq", "high_freq")
    kinds: dict[str, tuple[type, ...]] = {"ebird_code_multilabel": (str, list), **dict.fromkeys(numbers, (int, float))}
    for n, row in enumerate(rows):
        where = f"{path}: row {n}"
        if wrong := [name for name, kind in kinds.items() if not isinstance(row.get(name), (*kind, type(None)))]:
            raise DataError(f"{where}: its {wrong[0]} is {str(row[wrong[0]])[:80]!r}, which no metadata of BirdSet has")
        found = finder.find(str(row[file] or ""), path, where)
        if not found:
            continue
        several = row.get("ebird_code_multilabel")
        several = _labels(several, "") if isinstance(several, str) else tuple(map(str, several if several is not None else ()))
        single = (str(row["ebird_code"]),) if row.get("ebird_code") else ()
        start, end = (row.get("start_time"), row.get("end_time")) if split == "test" else (None, None)
        about = {"latitude": row.get("lat"), "longitude": row.get("long"), "time": row.get("local_time")}
        yield Annotation(
            found,
            start,
            end,
            several if split == "test_5s" else single or several,
            row.get("low_freq") if split == "test" else None,
            row.get("high_freq") if split == "test" else None,
            split=split,
            where=where,
            about={key: str(value) for key, value in about.items() if value not in (None, "")},
        )
