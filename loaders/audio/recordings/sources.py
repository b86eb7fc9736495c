"""Folders, tables and metadata to annotations."""

import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator

from loaders.audio import shards
from loaders.audio.recordings import column_names, columns, lines, tables, values
from loaders.audio.recordings.annotations import Annotation, Errors
from loaders.audio.recordings.columns import Options
from loaders.audio.recordings.find import Finder, is_audio, walk
from loaders.audio.recordings.rows import leads_out
from loaders.base import DataError
from loaders.io import files

Note = Callable[[str], None]
SOUND = re.compile(
    rb"RIF[FX]|RF64|BW64|riff\x2e\x91\xcf\x11|fLaC|OggS|ID3|\xff[\xf1-\xfb]|....ftyp|caff|\x1aE\xdf\xa3|FORM....AIF|wvpk|\.snd|#!AMR"
    rb"|MAC |\x30\x26\xb2\x75\x8e\x66\xcf\x11|TTA1|#!SILK|wac0|NIST_1A|Creative Voice|DSD"
    rb" |FRM8|FORM....(8SVX|16SV)|MP\+|MPCK",
    re.DOTALL,
)  # the first bytes of recordings
SOUNDS = (
    ".3g2 .3gp .8svx .aa3 .aac .ac3 .adts .amr .ape .avi .avr .awb .dff .dsf .dts .f4a .fap .flv"
    " .gsm .iff .latm .loas .m4b .m4r .m4v .mka .mkv .mov .mp1 .mp2 .mpc .mpeg .mpg .mpga .nist"
    " .oma .ra .ram .raw .rm .sd2 .sf .snd .sph .spx .svx .tak .tta .voc .vox .wma .wv .wve .webm"
    " .weba .xi .zc"
).split()  # endings of recordings that are not read here
# its first line, between tabs, or blanks as of old
AUDACITY = re.compile(r"\"?-?[\d.,]+\"?(\t|  *)\"?-?[\d.,]+\"?(\t| |$)")
# that may hold recordings
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".wac", ".aup", ".aup3")
TABLES = (
    ".csv .tsv .txt .xls .xlsx .ods .data .textgrid .eaf .svl .json .jsonl .geojson .xml .parquet"
    " .feather .arrow .sqlite .sqlite3 .db .mdb .accdb .rds .rda .rdata .mat .lab .mlf .antx .cha"
).split()  # that people annotate in, of which the first three hold other texts, too
STATED = ("recording", "site", "date", "time", "latitude", "longitude")  # groups of --labels
OWN = ("index.json", "detect.json", "embeddings.json")  # in the folders that jaxtrain makes


def read(
    source: str, options: Options, errors: Errors, note: Note = lambda text: None
) -> Iterator[Annotation]:
    """Yield the annotations of a source, and call ``note`` with lines about its columns.

    Raises DataError: it does not exist, or is no folder, table, metadata or list of paths.
    """
    for annotation in _annotations(source, options, errors, note):
        if any(map(values.says_none, annotation.labels)):
            if not errors.add("no-label", f"{annotation.where}: {', '.join(annotation.labels)!r}"):
                continue
            annotation.labels = tuple(
                label for label in annotation.labels if not values.says_none(label)
            )
        if open_labels := list(filter(values.says_unknown, annotation.labels)):
            if not errors.add("open-label", f"{annotation.where}: {open_labels[0]!r}"):
                continue
        yield annotation


def _annotations(source: str, options: Options, errors: Errors, note: Note) -> Iterator[Annotation]:
    path = files.expanded(source)
    if options.audio and not (named := files.expanded(options.audio)).is_dir():
        raise DataError(
            f"--audio={options.audio} is not a folder; name the folder of the"
            f" recordings{shards.nearest(named)}"
        )
    audio = options.audio or root_of(path)
    finder = Finder(files.expanded(audio) if audio else None, errors)
    if path.is_dir():
        yield from _of_folder(path, options, errors, finder, note)
    elif not path.exists():
        raise DataError(
            f"{source} does not exist{shards.nearest(path)}; name a folder of recordings, a table,"
            " or metadata"
        )
    elif is_audio(path.name):
        yield Annotation(os.path.abspath(path), where=source)
    else:
        yield from _of_file(path, options, errors, finder, note)


def root_of(path: pathlib.Path) -> str:
    """Return the recordings' folder that `jaxtrain detect` notes for its tables, or ""."""
    path = pathlib.Path(os.path.abspath(path))
    for folder in (path, *path.parents)[:8]:
        if (folder / "detect.json").is_file():
            root = files.read_json(files.inside(folder, "detect.json")).get("root")
            return root if isinstance(root, str) and "\0" not in root else ""
    return ""


def passed_over(
    folder: pathlib.Path, names: Iterable[str], errors: Errors, used: Collection[str] = ()
) -> None:
    """Count files of a folder that are neither recordings nor ``used``, by kind.

    A link out of it is judged by its name: what it leads to may be private.
    """
    names = list(names)
    with_audio = {os.path.dirname(path) for path in names if is_audio(path)}
    made = {os.path.dirname(path) for path in names if os.path.basename(path) in OWN} - with_audio
    for path in names:
        above = map(str, pathlib.PurePath(path).parents)
        is_own = os.path.basename(path) in ("index.json", "errors.csv")
        if is_audio(path) or path in used or made.intersection(above) or is_own:
            continue
        first = _begin(path, folder)
        if SOUND.match(first) or path.lower().endswith((*ARCHIVES, *SOUNDS)):
            errors.add("unread-sound", path)
        else:
            named = path.lower().endswith(tuple(TABLES)) and leads_out(path, str(folder))
            errors.add("unread-table" if named or _is_table(path, first) else "other-file", path)


def _begin(path: str, folder: pathlib.Path) -> bytes:
    """Return the first bytes of a file, none if it cannot be read or leads out of ``folder``."""
    if leads_out(path, str(folder)):
        return b""
    try:
        with files.regular(pathlib.Path(path)) as file:
            return file.read(4096)
    except (files.FileError, OSError):
        return b""


def unnamed(given: Iterable[str], options: Options, named: Collection[str], errors: Errors) -> None:
    """Count recordings of --audio, or next to ``given`` tables' own, that are not ``named``."""
    if all(os.path.isdir(path) or is_audio(path) for path in map(os.path.expanduser, given)):
        return
    if options.audio:
        near = list(walk(files.expanded(options.audio), Errors()))
    else:
        near = [
            entry.path
            for folder in {os.path.dirname(path) for path in named}
            for entry in os.scandir(folder)
        ]
    for path in sorted(near):
        if (
            is_audio(path)
            and not os.path.basename(path).startswith(".")
            and path not in named
            and os.path.isfile(path)
        ):
            errors.add("no-table", path)


def _is_table(path: str, first: bytes) -> bool:
    ending = os.path.splitext(path)[1].lower()
    if ending not in TABLES or not first or os.path.basename(path).lower() == "thumbs.db":
        return False
    line = first.decode(
        "utf-16" if first[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin-1", errors="replace"
    ).partition("\n")[0]
    if (
        ending != ".txt"
        or AUDACITY.match(line)
        or is_audio(line.partition("\t")[0].split(",")[0].split(" ")[0])
    ):
        return True
    cells = [cell.strip(' "') for cell in line.split(tables.separator(line))]
    return bool({"file", "start", "label"} & set(map(column_names.what, cells)))


def _is_raven(path: str, folder: pathlib.Path) -> bool:
    first = _begin(path, folder).lower() if path.lower().endswith(".txt") else b""
    return (
        b"begin time (s)" in first
        and b"\t" in first
        and first.lstrip(b"\xef\xbb\xbf").startswith(b"selection")
    )


def _of_folder(
    folder: pathlib.Path, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    names = list(walk(folder, errors))
    metadata = [
        path
        for path in names
        if re.search(r"_metadata(_train|_test|_test_5s)?\.(parquet|csv)$", path)
    ]
    selections = (
        []
        if options.labels
        else [path for path in names if path.endswith(".selections.txt") or _is_raven(path, folder)]
    )
    catalogues = [
        path for path in names if path.endswith(".json") and _is_xeno_canto(path, folder, errors)
    ]
    audio = [path for path in names if is_audio(path)]
    # that were unpacked
    archives = [path for path in names if path.endswith(ARCHIVES)] if metadata else []
    passed_over(folder, names, errors, {*metadata, *selections, *catalogues, *archives})
    top = os.path.abspath(folder)
    nested = any(os.path.dirname(path) != top for path in audio)
    if nested and selections and not any(path.endswith(".selections.txt") for path in selections):
        raise DataError(
            f"{folder} has subfolders, which may be labels, and {len(selections)} tables, for"
            f" example {selections[0]}; say --labels folder (or none), or name the tables as"
            " sources"
        )
    for each in (*metadata, *selections, *catalogues):
        remedy = "; name that file itself, or the folder that it lies in"
        files.inside(folder, os.path.relpath(each, os.path.abspath(folder)), remedy=remedy)
    if metadata or selections or catalogues:
        finder = finder if finder.folder else Finder(folder, errors)
        about: set[str] = set()
        for each in (*metadata, *sorted([*selections, *catalogues])):
            of_it = _birdset(pathlib.Path(each), errors, finder) if each in metadata else None
            for annotation in of_it or _of_file(pathlib.Path(each), options, errors, finder, note):
                about.add(annotation.path)
                yield annotation
        for each in audio:
            if os.path.abspath(each) not in about:
                errors.add("no-table", each)
        return
    if not audio:
        packed = ", ".join(
            os.path.basename(path) for path in names if re.search(r"\.(tar|tar\.gz|tgz)$", path)
        )
        given = [path for path in names if path.lower().endswith(tuple(TABLES[:10]))]
        hint = f"; it holds {len(names)} other files"
        if packed:
            hint = f"; unpack {packed[:80]} first: --unpack"
        elif given:
            hint = (
                f"; of its tables, such as {given[0]}, name each as a source, and the folder of the"
                " recordings: --audio"
            )
        raise DataError(
            f"{folder} holds no recordings (.wav, .flac, .mp3, .ogg, .opus, .aiff, .caf,"
            f" .m4a){hint}"
        )
    label = options.labels or ("folder" if nested else "none")
    pattern = None
    if label not in ("folder", "none"):
        try:
            pattern = re.compile(label)
        except re.error as error:
            raise DataError(f"--labels {label!r} is no pattern: {error}") from error
        if "label" not in pattern.groupindex:
            raise DataError(
                f"--labels {label!r} has no group (?P<label>…); use folder, none, or a pattern with"
                " that group"
            )
    last = sorted(
        {os.path.basename(os.path.dirname(path)) for path in audio if os.path.dirname(path) != top}
    )
    if label == "folder" and len(last) > 1 and values.are_splits(last, train=True):
        raise DataError(
            f"{folder}: its recordings lie in {', '.join(last)}, which are splits and would be"
            " labels; take the folder above as the label: --labels"
            " '(?P<label>[^/]+)/[^/]+/[^/]+$', or no label: --labels none"
        )
    for path in audio:
        inside = os.path.relpath(path, top).replace(os.sep, "/")
        found = pattern.search(inside) if pattern else None
        if pattern and not found:
            errors.add("bad-row", f"{path} does not match the pattern {label!r}")
            continue
        groups = {key: value for key, value in found.groupdict().items() if value} if found else {}
        its = groups.pop("label", "")
        if label == "folder" and "/" in inside:
            its = unicodedata.normalize("NFC", inside.split("/")[-2])
        stated = {key: value for key, value in groups.items() if key in STATED}
        yield Annotation(path, labels=(its,) if its else (), where=path, about=stated)


def _of_file(
    path: pathlib.Path, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    if path.suffix == ".parquet":
        yield from _birdset(path, errors, finder)
        return
    text, encoding = tables.read_text(path, options.encoding)
    if path.suffix == ".json":
        yield from _xeno_canto(path, text, errors, finder)
        return
    first = next(
        (line for line in files.lines(text) if line.strip() and not line.startswith("#")), ""
    ).strip()
    if not text.strip():
        if found := finder.next_to(path, str(path), quiet=True):  # a label track without a label
            yield Annotation(found, where=str(path), nothing=True)
            return
        raise DataError(f"{path} is empty; expected a table, a list of recordings, or metadata")
    if AUDACITY.match(first):
        yield from _audacity(path, text, encoding, options.separator, errors, finder)
        return
    table = tables.Table(path, text, encoding)
    if is_audio(first) and not any(map(column_names.meaning_of, table.columns)):
        yield from _list(path, text, errors, finder)
    elif (
        options.file_column
        or options.start_column
        or {"file", "start"} & set(map(column_names.what, table.columns))
    ):
        yield from _of_table(table, options, errors, finder, note)
    else:
        raise DataError(
            f"{path} is no table that names recordings: its columns are"
            f" {', '.join(table.columns)[:200]}; name them with --file-column, --start-column,"
            " --end-column, --label-column"
        )


def _list(path: pathlib.Path, text: str, errors: Errors, finder: Finder) -> Iterator[Annotation]:
    for number, line in enumerate(files.lines(text), 1):
        where = f"{path}:{number}"
        if line.startswith("#") and not is_audio(line.strip()):
            errors.add("comment-line", where)
        elif line.strip() and (found := finder.find(line.strip(), path, where)):
            yield Annotation(found, where=where)


def _of_table(
    table: tables.Table, options: Options, errors: Errors, finder: Finder, note: Note
) -> Iterator[Annotation]:
    layout = columns.find(table, options)
    for text in layout.describe():
        note(text)
    if (
        not table.rows()
        and not table.wrong
        and not layout.used["file"]
        or (layout.used["start"] and not table.rows())
    ):
        if found := finder.next_to(table.path, str(table.path), quiet=True):
            yield Annotation(found, where=str(table.path), nothing=True)
            return
    named = bool(layout.used["file"])
    for line in lines.read(layout, options, errors):
        found = (
            finder.find(line.file, table.path, line.where)
            if named
            else finder.next_to(table.path, line.where)
        )
        if line.answer == "skip" and not line.labels:
            errors.add("unanswered", line.where)
        elif found:
            nothing = (
                line.start is None
                and all(map(values.says_none, line.labels))
                and bool(layout.used["start"])
            )
            yield Annotation(
                found,
                line.start,
                line.end,
                () if line.answer == "no" else line.labels,
                line.low,
                line.high,
                line.channel,
                line.split,
                line.where,
                line.about,
                nothing,
            )


def _audacity(
    path: pathlib.Path, text: str, encoding: str, separator: str, errors: Errors, finder: Finder
) -> Iterator[Annotation]:
    """Yield Audacity's labels: start, end and text, and below, after a backslash, frequencies."""
    audio = finder.next_to(path, str(path))
    if not audio:
        return
    if encoding != "UTF-8":
        errors.add("other-encoding", f"{path} is read as {encoding}")
    last: Annotation | None = None
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        fields = [
            lines.unquoted(field.strip())
            for field in (line.split("\t") if "\t" in line else line.split(None, 2))
        ]
        if not line.strip():
            continue
        if line.startswith("#"):
            errors.add("comment-line", f"{path}:{number}")
            continue
        try:
            numbers = [
                values.number(field) for field in (fields[1:3] if fields[0] == "\\" else fields[:2])
            ]
        except ValueError:
            numbers = []
        text = fields[2].strip() if len(fields) > 2 else ""
        is_band = fields[0] == "\\"
        shown = f"{path}:{number}: {line[:60]!r}"
        if values.is_sheet_error(text):
            errors.add(
                "bad-row", f"{path}:{number} has {text!r} as its label, an error of a spreadsheet"
            )
        elif len(fields) > 3 and not is_band and values.are_numbers([text]):
            errors.add(
                "bad-row", f"{shown} has a number for its label; expected start, end and label"
            )
        elif (
            len(fields) == 4 and not is_band and re.fullmatch(r"0*(\.0*)?", fields[3]) and fields[3]
        ):
            errors.add(
                "bad-row", f"{shown} has the weight 0, so its label is absent; remove the line"
            )
        elif len(numbers) < 2 or None in numbers:
            errors.add(
                "bad-row", f"{shown} is no label; expected start, end and label between tabs"
            )
        elif is_band:
            if last:
                last.low, last.high = (value if value and value > 0 else None for value in numbers)
        else:
            if last:
                yield last
            its_labels = lines.labels(text, separator)
            if not its_labels:
                errors.add("no-label", f"{path}:{number}")
            last = Annotation(audio, numbers[0], numbers[1], its_labels, where=f"{path}:{number}")
    if last:
        yield last


def _is_xeno_canto(path: str, folder: pathlib.Path, errors: Errors) -> bool:
    if led := leads_out(path, str(folder)):
        errors.add("link-outside", f"{path} leads to {led}")
        return False
    return re.search(rb'"recordings"\s*:\s*\[', _begin(path, folder)) is not None


def _xeno_canto(
    path: pathlib.Path, text: str, errors: Errors, finder: Finder
) -> Iterator[Annotation]:
    """xeno-canto's answer to a query: recordings next to it are XC<number> or by name."""
    try:
        recordings = files.parse(text, str(path))["recordings"]
        if not isinstance(recordings, list) or not all(
            isinstance(each, dict) for each in recordings
        ):
            raise TypeError("recordings is no list of objects")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no metadata of xeno-canto, which has a list of recordings: {error}"
        ) from error
    for n, each in enumerate(recordings):
        where = f"{path}: recording {each.get('id', n)}"
        quiet = Finder(finder.folder, Errors())
        found = quiet.find(f"XC{each.get('id')}", path, where)
        if not found and not (
            found := finder.find(str(each.get("file-name") or f"XC{each.get('id')}"), path, where)
        ):
            continue
        species = " ".join(str(each.get(key) or "") for key in ("gen", "sp")).strip()
        time = str(each.get("time") or "")
        about = {
            "recording": f"XC{each.get('id')}",
            "date": each.get("date"),
            "time": f"{time}:00" if len(time) == 5 else time,
            "latitude": each.get("lat"),
            "longitude": each.get("lng", each.get("lon")),
            "site": each.get("loc"),
        }
        stated = {key: str(value) for key, value in about.items() if value}
        yield Annotation(found, labels=(species,) if species else (), where=where, about=stated)


def _birdset(path: pathlib.Path, errors: Errors, finder: Finder) -> Iterator[Annotation]:
    """Yield BirdSet's metadata: recordings (train), events (test), clips of 5 s (test_5s)."""
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    with files.reading(path):
        table = pq.read_table(path) if path.suffix == ".parquet" else pc.read_csv(path)
        rows = table.to_pylist()
    named = re.search(r"_metadata_(train|test|test_5s)\.", path.name)
    split = named[1] if named else "train"
    columns = set(table.column_names)
    file = next((name for name in ("filepath", "__index_level_0__") if name in columns), None)
    if not file or not columns & {"ebird_code", "ebird_code_multilabel"}:
        raise DataError(
            f"{path} is no metadata of BirdSet: it lacks filepath, or ebird_code and"
            " ebird_code_multilabel"
        )
    numbers = ("start_time", "end_time", "low_freq", "high_freq")
    kinds: dict[str, tuple[type, ...]] = {
        "ebird_code_multilabel": (str, list),
        **dict.fromkeys(numbers, (int, float)),
    }
    for n, row in enumerate(rows):
        where = f"{path}: row {n}"
        if wrong := [
            name
            for name, kind in kinds.items()
            if not isinstance(row.get(name), (*kind, type(None)))
        ]:
            raise DataError(
                f"{where}: its {wrong[0]} is {str(row[wrong[0]])[:80]!r}, which no metadata of"
                " BirdSet has"
            )
        found = finder.find(str(row[file] or ""), path, where)
        if not found:
            continue
        several = row.get("ebird_code_multilabel") or ()
        several = (
            lines.labels(several, "") if isinstance(several, str) else tuple(map(str, several))
        )
        single = (str(row["ebird_code"]),) if row.get("ebird_code") else ()
        names = several if split == "test_5s" else single or several
        part = {name: row.get(name) for name in numbers} if split == "test" else {}
        about = {
            "latitude": row.get("lat"),
            "longitude": row.get("long"),
            "time": row.get("local_time"),
        }
        about = {key: str(value) for key, value in about.items() if value not in (None, "")}
        yield Annotation(
            found,
            start=part.get("start_time"),
            end=part.get("end_time"),
            labels=names,
            low=part.get("low_freq"),
            high=part.get("high_freq"),
            split=split,
            where=where,
            about=about,
        )
