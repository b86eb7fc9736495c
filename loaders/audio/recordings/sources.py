"""Folders, tables and metadata to annotations."""

import functools
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loaders.audio import shards
from loaders.audio.recordings import (
    column_names,
    columns,
    durations,
    joined_files,
    label_words,
    lines,
    tables,
    values,
)
from loaders.audio.recordings.annotations import Annotation, Errors
from loaders.audio.recordings.columns import Options
from loaders.audio.recordings.find import Finder, is_audio, walk
from loaders.audio.recordings.rows import leads_out
from loaders.base import DataError
from loaders.io import files

Note = Callable[[str], None]
# The first bytes of recordings.
SOUND_SIGNATURE = re.compile(
    rb"RIF[FX]|RF64|BW64|riff\x2e\x91\xcf\x11|fLaC|OggS|ID3|\xff[\xf1-\xfb]|....ftyp|caff"
    rb"|\x1aE\xdf\xa3|FORM....AIF|wvpk|\.snd|#!AMR|MAC |\x30\x26\xb2\x75\x8e\x66\xcf\x11|TTA1"
    rb"|#!SILK|wac0|NIST_1A|Creative Voice|DSD |FRM8|FORM....(8SVX|16SV)|MP\+|MPCK",
    re.DOTALL,
)
# Endings of recordings that are not read here.
UNREAD_SOUND_ENDINGS = tuple(
    ".3g2 .3gp .8svx .aa3 .aac .ac3 .adts .amr .ape .avi .avr .awb .dff .dsf .dts .f4a .fap .flv"
    " .gsm .iff .latm .loas .m4b .m4r .m4v .mka .mkv .mov .mp1 .mp2 .mpc .mpeg .mpg .mpga .nist"
    " .oma .ra .ram .raw .rm .sd2 .sf .snd .sph .spx .svx .tak .tta .voc .vox .wma .wv .wve .webm"
    " .weba .xi .zc".split()
)
# The first line of a label track of Audacity, between tabs, or blanks as of old.
AUDACITY_LINE = re.compile(r"\"?-?[\d.,]+\"?(\t|  *)\"?-?[\d.,]+\"?(\t| |$)")
AUDACITY_BAND = "\\"  # the first field of a line with the frequencies of the label above it
BIRDSET_NAME = re.compile(r"_metadata(_train|_test|_test_5s)?\.(parquet|csv)$")
BIRDSET_TYPES: Mapping[str, tuple[type, ...]] = {
    "ebird_code_multilabel": (str, list),
    **dict.fromkeys(("start_time", "end_time", "low_freq", "high_freq"), (int, float)),
}
# Endings of files that may hold recordings.
ARCHIVE_ENDINGS = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".wac", ".aup", ".aup3")
# Endings of files that people annotate in. The first three hold other texts, too.
SHEET_ENDINGS = tuple(".csv .tsv .txt .xls .xlsx .ods .data .textgrid .eaf .svl".split())
TABLE_ENDINGS = (
    *SHEET_ENDINGS,
    *".json .jsonl .geojson .xml .parquet .feather .arrow .sqlite .sqlite3 .db .mdb .accdb".split(),
    *".rds .rda .rdata .mat .lab .mlf .antx .cha".split(),
)
# Groups of --labels.
STATED_FIELDS = ("recording", "site", "date", "time", "latitude", "longitude")
NEGATIVE = re.compile(r"-[^\W\d_]")  # of the name of a folder of BirdNET: -wren
# Files in the folders that jaxtrain makes.
OWN_FILES = ("index.json", "detect.json", "embeddings.json")


def read(
    source: str, options: Options, errors: Errors, note: Note = lambda text: None
) -> Iterator[Annotation]:
    """Yield the annotations of a source, and call ``note`` with lines about its columns.

    Raises DataError: it does not exist, or is no folder, table, metadata or list of paths.
    """
    own_names = classes_of(files.expanded(source))
    for annotation in _read_source(source, options, errors, note):
        if annotation.labels and own_names.issuperset(annotation.labels):
            annotation.is_name = True
        if _is_kept(annotation, errors):
            yield annotation


def _is_kept(annotation: Annotation, errors: Errors) -> bool:
    """Count labels that say none, not or unknown, and remove the first. Return if to yield."""
    labels = annotation.labels
    if any(map(label_words.says_none, labels)):
        if not errors.add("no-label", f"{annotation.where}: {', '.join(labels)!r}"):
            return False
        annotation.labels = tuple(label for label in labels if not label_words.says_none(label))
    denials = [] if annotation.is_name else list(filter(label_words.denies, annotation.labels))
    if denials and not errors.add("denied-label", f"{annotation.where}: {denials[0]!r}"):
        annotation.labels = ()
        annotation.unanswered = True  # of the other classes, it says nothing
        return True
    open_labels = list(filter(label_words.says_unknown, annotation.labels))
    if open_labels and not errors.add("open-label", f"{annotation.where}: {open_labels[0]!r}"):
        annotation.labels = ()
        annotation.unanswered = True  # there is a call
    return True


def _read_source(source: str, options: Options, errors: Errors, note: Note) -> Iterator[Annotation]:
    path = files.expanded(source)
    finder = Finder(_audio_folder(path, options), errors)
    if path.is_dir():
        yield from _read_folder(path, options, errors, finder, note)
    elif not path.exists():
        raise DataError(
            f"{source} does not exist{shards.nearest(path)}; name a folder of recordings, a table,"
            " or metadata"
        )
    elif is_audio(path.name):
        yield Annotation(os.path.abspath(path), where=source)
    else:
        yield from _read_file(path, options, errors, finder, note)


def _audio_folder(source: pathlib.Path, options: Options) -> pathlib.Path | None:
    """Return the folder of --audio, or that of the detections that a source is one of."""
    if not options.audio:
        root = root_of(source)
        return files.expanded(root) if root else None
    folder = files.expanded(options.audio)
    if not folder.is_dir():
        raise DataError(
            f"--audio={options.audio} is not a folder; name the folder of the"
            f" recordings{shards.nearest(folder)}"
        )
    return folder


def root_of(path: pathlib.Path) -> str:
    """Return the recordings' folder that `jaxtrain detect` notes for its tables, or ""."""
    root = _note_of_detect(path, "root")
    return root if isinstance(root, str) and "\0" not in root else ""


def classes_of(path: pathlib.Path) -> set[str]:
    """Return the classes that `jaxtrain detect` notes for its tables, or none."""
    names = _note_of_detect(path, "classes")
    if not isinstance(names, list):
        return set()
    return {name for name in names if isinstance(name, str)}


def _note_of_detect(path: pathlib.Path, name: str) -> Any:
    """Return a value of detect.json in the folder of a table's detections, or None."""
    path = pathlib.Path(os.path.abspath(path))
    nearest_folders = (path, *path.parents)[:8]
    for folder in nearest_folders:
        if (folder / "detect.json").is_file():
            return files.read_json(files.inside(folder, "detect.json")).get(name)
    return None


def count_unread(
    folder: pathlib.Path, names: Iterable[str], errors: Errors, used: Collection[str] = ()
) -> None:
    """Count files of a folder that are neither recordings nor ``used``, by kind.

    A link out of it is judged by its name: what it leads to may be private.
    """
    names = list(names)
    own_folders = _own_folders(names)
    for path in names:
        is_own = os.path.basename(path) in ("index.json", "errors.csv")
        if is_own or is_audio(path) or path in used:
            continue
        if own_folders.isdisjoint(map(str, pathlib.PurePath(path).parents)):
            errors.add(_unread_kind(path, folder), path)


def _own_folders(names: Sequence[str]) -> set[str]:
    """Return the folders that jaxtrain made, of those without recordings."""
    own_folders: set[str] = set()
    audio_folders: set[str] = set()
    for path in names:
        folder, name = os.path.split(path)
        if name in OWN_FILES:
            own_folders.add(folder)
        if is_audio(path):
            audio_folders.add(folder)
    return own_folders - audio_folders


def _unread_kind(path: str, folder: pathlib.Path) -> str:
    """Return the kind of error that a file is which is neither a recording nor used."""
    first_bytes = _read_first_bytes(path, folder)
    lower_path = path.lower()
    if SOUND_SIGNATURE.match(first_bytes):
        return "unread-sound"
    if lower_path.endswith(ARCHIVE_ENDINGS + UNREAD_SOUND_ENDINGS):
        return "unread-sound"
    if lower_path.endswith(TABLE_ENDINGS) and leads_out(path, str(folder)):
        return "unread-table"
    return "unread-table" if _is_table(path, first_bytes) else "other-file"


def _read_first_bytes(path: str, folder: pathlib.Path) -> bytes:
    """Return the first bytes of a file, none if it cannot be read or leads out of ``folder``."""
    if leads_out(path, str(folder)):
        return b""
    try:
        with files.regular(pathlib.Path(path)) as file:
            return file.read(4096)
    except (files.FileError, OSError):
        return b""


def count_unnamed(
    given: Iterable[str], options: Options, named: Collection[str], errors: Errors
) -> None:
    """Count recordings of --audio, or next to ``given`` tables' own, that are not ``named``."""
    if all(os.path.isdir(path) or is_audio(path) for path in map(os.path.expanduser, given)):
        return
    if options.audio:
        candidates = list(walk(files.expanded(options.audio), Errors()))
    else:
        candidates = _list_neighbours(named)
    for path in sorted(candidates):
        is_hidden = os.path.basename(path).startswith(".")
        if is_audio(path) and not is_hidden and path not in named and os.path.isfile(path):
            errors.add("no-table", path)


def _list_neighbours(paths: Iterable[str]) -> list[str]:
    """Return the paths of all files and folders in the folders of ``paths``."""
    neighbours: list[str] = []
    for folder in set(map(os.path.dirname, paths)):
        neighbours += map(os.fspath, os.scandir(folder))
    return neighbours


def _is_table(path: str, first_bytes: bytes) -> bool:
    ending = os.path.splitext(path)[1].lower()
    is_thumbnails = os.path.basename(path).lower() == "thumbs.db"
    if ending not in TABLE_ENDINGS or not first_bytes or is_thumbnails:
        return False
    is_utf_16 = first_bytes.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = first_bytes.decode("utf-16" if is_utf_16 else "latin-1", errors="replace")
    line = text.partition("\n")[0]
    if ending != ".txt" or AUDACITY_LINE.match(line):
        return True
    first_field = line.partition("\t")[0].split(",")[0]
    if is_audio(first_field.split(" ")[0]):
        return True
    cells = [cell.strip(' "') for cell in line.split(tables.separator(line))]
    return not {"file", "start", "label"}.isdisjoint(map(column_names.what, cells))


def _is_raven(path: str, folder: pathlib.Path) -> bool:
    if not path.lower().endswith(".txt"):
        return False
    first_bytes = _read_first_bytes(path, folder).lower()
    if b"begin time (s)" not in first_bytes or b"\t" not in first_bytes:
        return False
    return first_bytes.lstrip(b"\xef\xbb\xbf").startswith(b"selection")


class _Contents(NamedTuple):
    """The paths of a folder's files, and of those that are read, by what they hold."""

    paths: list[str]
    audio: list[str]
    metadata: list[str]  # of BirdSet
    selections: list[str]  # of Raven, or label tracks of Audacity in a folder of its own
    catalogues: list[str]  # of xeno-canto
    archives: list[str]

    def tables(self) -> list[str]:
        return [*self.metadata, *self.selections, *self.catalogues]

    def is_nested(self, folder: pathlib.Path) -> bool:
        """Return whether a recording lies in a subfolder."""
        top = os.path.abspath(folder)
        return any(os.path.dirname(path) != top for path in self.audio)


def _list_contents(folder: pathlib.Path, options: Options, errors: Errors) -> _Contents:
    contents = _Contents(list(walk(folder, errors)), [], [], [], [], [])
    for path in contents.paths:
        if is_audio(path):
            contents.audio.append(path)
        elif BIRDSET_NAME.search(path):
            contents.metadata.append(path)
        elif path.endswith(ARCHIVE_ENDINGS):
            contents.archives.append(path)
        elif path.endswith(".json"):
            if _is_xeno_canto(path, folder, errors):
                contents.catalogues.append(path)
        elif not options.labels:
            if path.endswith(".selections.txt") or _is_raven(path, folder):
                contents.selections.append(path)
    if not (contents.audio or contents.tables() or options.labels):
        tracks = [path for path in contents.paths if _is_label_track(path, folder)]
        contents.selections.extend(tracks)
    return contents


def _is_label_track(path: str, folder: pathlib.Path) -> bool:
    """Whether a text is a label track of Audacity, by its first line."""
    if not path.lower().endswith(".txt"):
        return False
    first_bytes = _read_first_bytes(path, folder)
    return bool(AUDACITY_LINE.match(_first_line(first_bytes.decode("utf-8", errors="replace"))))


def _read_folder(
    folder: pathlib.Path, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    contents = _list_contents(folder, options, errors)
    used = set(contents.tables())
    if contents.metadata:  # whose archives were unpacked
        used.update(contents.archives)
    count_unread(folder, contents.paths, errors, used)
    _refuse_labels_of_two_kinds(folder, contents)
    for path in contents.tables():
        name = os.path.relpath(path, os.path.abspath(folder))
        remedy = "; name that file itself, or the folder that it lies in"
        files.inside(folder, name, remedy=remedy)
    if contents.tables():
        if not finder.folder:
            finder = Finder(folder, errors)
        yield from _read_tables(contents, options, errors, finder, note)
    elif contents.audio:
        yield from _read_recordings(folder, contents, options.labels, errors)
    else:
        raise DataError(
            f"{folder} holds no recordings (.wav, .flac, .mp3, .ogg, .opus, .aiff, .caf, .m4a)"
            f"{_hint_without_audio(contents.paths)}"
        )


def _refuse_labels_of_two_kinds(folder: pathlib.Path, contents: _Contents) -> None:
    """Raise DataError if both subfolders and tables may be the labels."""
    selections = contents.selections
    if not selections or not contents.is_nested(folder):
        return
    if any(path.endswith(".selections.txt") for path in selections):
        return
    raise DataError(
        f"{folder} has subfolders, which may be labels, and {len(selections)} tables, for"
        f" example {selections[0]}; say --labels folder (or none), or name the tables as"
        " sources"
    )


def _hint_without_audio(paths: Sequence[str]) -> str:
    """Return a remedy for a folder that holds no recordings."""
    archives = [path for path in paths if re.search(r"\.(tar|tar\.gz|tgz)$", path)]
    if archives:
        archive_names = ", ".join(map(os.path.basename, archives))
        return f"; unpack {archive_names[:80]} first: --unpack"
    sheets = [path for path in paths if path.lower().endswith(SHEET_ENDINGS)]
    if sheets:
        return (
            f"; of its tables, such as {sheets[0]}, name each as a source, and the folder of the"
            " recordings: --audio"
        )
    return f"; it holds {len(paths)} other files"


def _read_tables(
    contents: _Contents, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    """Yield the annotations of a folder's tables. Count its recordings that no table is about."""
    annotated: set[str] = set()
    for path in (*contents.metadata, *sorted([*contents.selections, *contents.catalogues])):
        if path in contents.metadata:
            annotations = _read_birdset(pathlib.Path(path), errors, finder)
        else:
            annotations = _read_file(pathlib.Path(path), options, errors, finder, note)
        for annotation in annotations:
            annotated.add(annotation.path)
            yield annotation
    for path in contents.audio:
        if os.path.abspath(path) not in annotated:
            errors.add("no-table", path)


def _read_recordings(
    folder: pathlib.Path, contents: _Contents, labels_option: str, errors: Errors
) -> Iterator[Annotation]:
    """Yield the recordings of a folder without tables, labelled by --labels."""
    top = os.path.abspath(folder)
    default = "folder" if contents.is_nested(folder) else "none"
    label_source = labels_option or default
    pattern: re.Pattern[str] | None = None
    if label_source not in ("folder", "none"):
        pattern = _label_pattern(label_source)
    if label_source == "folder":
        _refuse_splits_as_labels(folder, contents.audio)
    for path in contents.audio:
        name = os.path.relpath(path, top).replace(os.sep, "/")
        label = ""
        stated: dict[str, str] = {}
        if pattern:
            match = pattern.search(name)
            if not match:
                errors.add("bad-row", f"{path} does not match the pattern {label_source!r}")
                continue
            groups = match.groupdict()
            label = groups["label"]
            stated = {key: groups[key] for key in groups if key in STATED_FIELDS and groups[key]}
        elif label_source == "folder" and "/" in name:
            label = unicodedata.normalize("NFC", name.split("/")[-2])
            parts = label.split(",")
            if any(map(NEGATIVE.match, parts)):
                if errors.add("negative-folder", f"{path} is in {label!r}"):
                    positive = tuple(part for part in parts if not NEGATIVE.match(part))
                    yield Annotation(path, labels=positive, where=path)
                continue
        yield Annotation(path, labels=(label,) if label else (), where=path, about=stated)


def _label_pattern(labels_option: str) -> re.Pattern[str]:
    """Compile the pattern of --labels. Raises DataError."""
    try:
        pattern = re.compile(labels_option)
    except re.error as error:
        raise DataError(f"--labels {labels_option!r} is no pattern: {error}") from error
    if "label" not in pattern.groupindex:
        raise DataError(
            f"--labels {labels_option!r} has no group (?P<label>…); use folder, none, or a pattern"
            " with that group"
        )
    return pattern


def _refuse_splits_as_labels(folder: pathlib.Path, audio: Sequence[str]) -> None:
    """Raise DataError if the names of the recordings' folders are those of splits."""
    subfolders = set(map(os.path.dirname, audio)) - {os.path.abspath(folder)}
    folder_names = sorted(set(map(os.path.basename, subfolders)))
    if len(folder_names) > 1 and values.are_splits(folder_names, train=True):
        raise DataError(
            f"{folder}: its recordings lie in {', '.join(folder_names)}, which are splits and"
            " would be labels; take the folder above as the label: --labels"
            " '(?P<label>[^/]+)/[^/]+/[^/]+$', or no label: --labels none"
        )


def _read_file(
    path: pathlib.Path, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    if path.suffix == ".parquet":
        yield from _read_birdset(path, errors, finder)
        return
    text, encoding = tables.read_text(path, options.encoding)
    if path.suffix == ".json":
        yield from _read_xeno_canto(path, text, errors, finder)
    elif not text.strip():
        without_events = _without_events(path, finder)  # a label track without a label
        if not without_events:
            raise DataError(f"{path} is empty; expected a table, a list of recordings, or metadata")
        yield without_events
    elif AUDACITY_LINE.match(_first_line(text)):
        if audio := finder.next_to(path, str(path)):
            if encoding != "UTF-8":
                errors.add("other-encoding", f"{path} is read as {encoding}")
            yield from _read_audacity(path, text, audio, options.between, errors)
    else:
        yield from _read_text(path, text, encoding, options, errors, finder, note)


def _first_line(text: str) -> str:
    """Return the first line with text that is no comment, or ""."""
    for line in files.lines(text):
        if line.strip() and not line.startswith("#"):
            return line.strip()
    return ""


def _without_events(table: pathlib.Path, finder: Finder) -> Annotation | None:
    """Return the annotation of an empty table's recording: it has no events."""
    audio = finder.next_to(table, str(table), quiet=True)
    return Annotation(audio, where=str(table), nothing=True) if audio else None


def _read_text(
    path: pathlib.Path,
    text: str,
    encoding: str,
    options: Options,
    errors: Errors,
    finder: Finder,
    note: Note,
) -> Iterator[Annotation]:
    """Yield the annotations of a table or a list of recordings."""
    table = tables.Table(path, text, encoding)
    if is_audio(_first_line(text)) and not any(map(column_names.meaning_of, table.columns)):
        yield from _read_list(path, text, errors, finder)
        return
    states_columns = options.file_column or options.start_column
    meanings = set(map(column_names.what, table.columns))
    if not states_columns and meanings.isdisjoint({"file", "start"}):
        raise DataError(
            f"{path} is no table that names recordings: its columns are"
            f" {', '.join(table.columns)[:200]}; name them with --file-column, --start-column,"
            " --end-column, --label-column"
        )
    yield from _read_table(table, options, errors, finder, note)


def _read_list(
    path: pathlib.Path, text: str, errors: Errors, finder: Finder
) -> Iterator[Annotation]:
    for number, line in enumerate(files.lines(text), 1):
        where = f"{path}:{number}"
        name = line.strip()
        if line.startswith("#") and not is_audio(name):
            errors.add("comment-line", where)
        elif name and (audio := finder.find(name, path, where)):
            yield Annotation(audio, where=where)


def _read_table(
    table: tables.Table, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    layout = columns.find(table, options)
    for description in layout.describe():
        note(description)
    names_files = bool(layout.by_meaning["file"])
    has_times = bool(layout.by_meaning["start"])
    if not table.rows() and not table.wrong and (has_times or not names_files):
        without_events = _without_events(table.path, finder)
        if without_events:
            yield without_events
            return
    read_lines = list(lines.read(layout, options, errors))
    quiet_finder = Finder(finder.folder, Errors())
    seconds = functools.partial(_seconds, table.path, quiet_finder)
    joined_files.refuse(layout, options, read_lines, seconds)
    durations.report(layout, options, read_lines, seconds, errors)
    for line in read_lines:
        finder_of_line = quiet_finder if line.is_dropped else finder
        if names_files:
            audio = finder_of_line.find(line.file, table.path, line.where)
        else:
            audio = finder_of_line.next_to(table.path, line.where)
        is_unanswered = _is_unanswered(line, errors)
        if audio:
            annotation = _of_line(line, audio, has_times, is_unanswered)
            annotation.is_name = bool(layout.by_meaning.get("asked"))  # of jaxtrain review
            yield annotation


def _seconds(table: pathlib.Path, finder: Finder, line: lines.Line) -> float:
    path = finder.find(line.file, table, line.where)
    return joined_files.seconds_of(path) if path else 0.0


def _is_unanswered(line: lines.Line, errors: Errors) -> bool:
    """Count a line of whose classes some are unknown. Return whether it is none of its labels."""
    if line.is_dropped:
        return True
    if line.answer == "skip" or (line.open_classes and not line.labels):
        errors.add("unanswered", line.where)
        return True
    return bool(line.open_classes) and not errors.add("open-class", line.where)


def _of_line(line: lines.Line, audio: str, has_times: bool, is_unanswered: bool) -> Annotation:
    """Return the annotation of a line of a table, which may have a column of times."""
    says_nothing = all(map(label_words.says_none, line.labels))
    return Annotation(
        audio,
        start=line.start,
        end=line.end,
        labels=() if line.answer == "no" or is_unanswered else line.labels,
        low=line.low,
        high=line.high,
        channel=line.channel,
        split=line.split,
        where=line.where,
        about=line.about,
        nothing=has_times and line.start is None and says_nothing and not is_unanswered,
        unanswered=is_unanswered,
        hides_others=is_unanswered and bool(line.open_classes),
    )


def _read_audacity(
    path: pathlib.Path, text: str, audio: str, separator: str, errors: Errors
) -> Iterator[Annotation]:
    """Yield Audacity's labels: start, end and text, and below, after a backslash, frequencies."""
    latest: Annotation | None = None  # to which a line of frequencies may follow
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if line.startswith("#"):
            errors.add("comment-line", where)
            continue
        fields = _audacity_fields(line)
        numbers = _audacity_numbers(fields)
        if error := _audacity_error(fields, numbers, where, line):
            errors.add("bad-row", error)
            yield Annotation(audio, where=where, unanswered=True)
        elif fields[0] != AUDACITY_BAND:
            if latest:
                yield latest
            labels = lines.labels(_audacity_label(fields), separator)
            if not labels:
                errors.add("no-label", where)
            latest = Annotation(audio, numbers[0], numbers[1], labels, where=where)
        elif latest:
            latest.low = _positive(numbers[0])
            latest.high = _positive(numbers[1])
    if latest:
        yield latest


def _audacity_fields(line: str) -> list[str]:
    fields = line.split("\t") if "\t" in line else line.split(None, 2)
    return [lines.unquoted(field.strip()) for field in fields]


def _audacity_numbers(fields: Sequence[str]) -> list[float | None]:
    """Return a label's start and end, or its frequencies, or nothing if one is no number."""
    texts = fields[:2]
    if fields[0] == AUDACITY_BAND:
        texts = fields[1:3]
    try:
        return [values.number(text) for text in texts]
    except ValueError:
        return []


def _audacity_label(fields: Sequence[str]) -> str:
    return fields[2].strip() if len(fields) > 2 else ""


def _audacity_error(
    fields: Sequence[str], numbers: Sequence[float | None], where: str, line: str
) -> str:
    """Return the error of a line of a label track, or ""."""
    label = _audacity_label(fields)
    quoted = f"{where}: {line[:60]!r}"
    if values.is_sheet_error(label):
        return f"{where} has {label!r} as its label, an error of a spreadsheet"
    if len(fields) > 3 and fields[0] != AUDACITY_BAND:
        if values.are_numbers([label]):
            return f"{quoted} has a number for its label; expected start, end and label"
        if len(fields) == 4 and fields[3] and re.fullmatch(r"0*(\.0*)?", fields[3]):
            return f"{quoted} has the weight 0, so its label is absent; remove the line"
    if len(numbers) < 2 or None in numbers:
        return f"{quoted} is no label; expected start, end and label between tabs"
    return ""


def _positive(frequency: float | None) -> float | None:
    if frequency and frequency > 0:
        return frequency
    return None


def _is_xeno_canto(path: str, folder: pathlib.Path, errors: Errors) -> bool:
    if target := leads_out(path, str(folder)):
        errors.add("link-outside", f"{path} leads to {target}")
        return False
    return re.search(rb'"recordings"\s*:\s*\[', _read_first_bytes(path, folder)) is not None


def _read_xeno_canto(
    path: pathlib.Path, text: str, errors: Errors, finder: Finder
) -> Iterator[Annotation]:
    """xeno-canto's answer to a query: recordings next to it are XC<number> or by name."""
    try:
        recordings = files.parse(text, str(path))["recordings"]
        is_list = isinstance(recordings, list)
        if not is_list or not all(isinstance(recording, dict) for recording in recordings):
            raise TypeError("recordings is no list of objects")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no metadata of xeno-canto, which has a list of recordings: {error}"
        ) from error
    for number, recording in enumerate(recordings):
        where = f"{path}: recording {recording.get('id', number)}"
        name = f"XC{recording.get('id')}"
        audio = Finder(finder.folder, Errors()).find(name, path, where)
        if not audio:
            audio = finder.find(str(recording.get("file-name") or name), path, where)
        if audio:
            genus = str(recording.get("gen") or "")
            epithet = str(recording.get("sp") or "")
            species = f"{genus} {epithet}".strip()
            labels = (species,) if species else ()
            about = _about_xeno_canto(recording)
            yield Annotation(audio, labels=labels, where=where, about=about)


def _about_xeno_canto(recording: Mapping[str, Any]) -> dict[str, str]:
    time = str(recording.get("time") or "")
    about = {
        "recording": f"XC{recording.get('id')}",
        "date": recording.get("date"),
        "time": f"{time}:00" if len(time) == 5 else time,
        "latitude": recording.get("lat"),
        "longitude": recording.get("lng", recording.get("lon")),
        "site": recording.get("loc"),
    }
    return {key: str(value) for key, value in about.items() if value}


def _read_birdset(path: pathlib.Path, errors: Errors, finder: Finder) -> Iterator[Annotation]:
    """Yield BirdSet's metadata: recordings (train), events (test), clips of 5 s (test_5s)."""
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    with files.reading(path):
        table = pq.read_table(path) if path.suffix == ".parquet" else pc.read_csv(path)
        rows = table.to_pylist()
    split_match = re.search(r"_metadata_(train|test|test_5s)\.", path.name)
    split = split_match[1] if split_match else "train"
    file_column = _birdset_file_column(path, set(table.column_names))
    for number, row in enumerate(rows):
        where = f"{path}: row {number}"
        _refuse_other_types(row, where)
        audio = finder.find(str(row[file_column] or ""), path, where)
        if not audio:
            continue
        part = row if split == "test" else {}
        yield Annotation(
            audio,
            start=part.get("start_time"),
            end=part.get("end_time"),
            labels=_birdset_labels(row, split),
            low=part.get("low_freq"),
            high=part.get("high_freq"),
            split=split,
            where=where,
            about=_about_birdset(row),
        )


def _birdset_file_column(path: pathlib.Path, names: Collection[str]) -> str:
    """Return the column of the recordings' names. Raises DataError: this is no such table."""
    has_labels = "ebird_code" in names or "ebird_code_multilabel" in names
    for column in ("filepath", "__index_level_0__"):
        if column in names and has_labels:
            return column
    raise DataError(
        f"{path} is no metadata of BirdSet: it lacks filepath, or ebird_code and"
        " ebird_code_multilabel"
    )


def _refuse_other_types(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError if a value of a row is of a type that BirdSet does not have there."""
    for name, types in BIRDSET_TYPES.items():
        value = row.get(name)
        if value is not None and not isinstance(value, types):
            raise DataError(
                f"{where}: its {name} is {str(value)[:80]!r}, which no metadata of BirdSet has"
            )


def _birdset_labels(row: Mapping[str, Any], split: str) -> tuple[str, ...]:
    code = row.get("ebird_code")
    if code and split != "test_5s":
        return (str(code),)
    codes = row.get("ebird_code_multilabel") or ()
    if isinstance(codes, str):
        return lines.labels(codes, "")
    return tuple(map(str, codes))


def _about_birdset(row: Mapping[str, Any]) -> dict[str, str]:
    about = {
        "latitude": row.get("lat"),
        "longitude": row.get("long"),
        "time": row.get("local_time"),
    }
    return {key: str(value) for key, value in about.items() if value not in (None, "")}
