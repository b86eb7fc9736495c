"""Recordings below a folder, and the file that a table's name means."""

import errno
import functools
import itertools
import os
import pathlib
import re
import shlex
import unicodedata
import urllib.parse
from collections.abc import Iterable, Iterator

from loaders.audio.recordings.annotations import Errors

# Folders that systems make, besides those whose names begin with a point: bins, thumbnails, halves
# of files of other systems.
SYSTEM = {
    "$recycle.bin",
    "recycler",
    "@eadir",
    "#recycle",
    "@recycle",
    "__macosx",
    "system volume information",
    "lost+found",
}
MAX_ENTRIES = 10_000  # of a folder, among which a recording is looked for
TABLES = (".csv", ".tsv", ".txt")
SUFFIXES = (
    ".wav .flac .mp3 .ogg .oga .opus .aif .aiff .aifc .au .caf .m4a .mp4 .rf64 .bw64 .w64 .wave"
).split()

_one_form = functools.partial(unicodedata.normalize, "NFC")


def is_audio(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def how_to_index(path: pathlib.Path) -> str:
    """Return the remedy for recordings, or a table of them, where an index belongs, or ""."""
    out = shlex.quote(f"{path.name or 'recordings'}-index")
    command = f"jaxtrain index {shlex.quote(str(path))} --out {out} --split recording=0.2"
    if path.is_dir():
        entries = itertools.islice(walk(path, Errors()), MAX_ENTRIES)
        if not any(map(is_audio, entries)):
            return ""
        kind = "a folder of recordings"
    elif is_audio(path.name):
        kind = "a recording"
    elif path.suffix.lower() in TABLES:
        kind = "a table"
        command += " --audio FOLDER"
    else:
        return ""
    return f"it is {kind}; make an index first: {command}, and name {out}"


def walk(folder: pathlib.Path, errors: Errors) -> Iterator[str]:
    """Yield every file below a folder, by name, links followed.

    Folders that cannot be entered, and recordings in hidden ones, are errors.
    """

    yield from _walk(os.path.abspath(folder), (), errors)


def _walk(path: str, above: tuple[tuple[int, int], ...], errors: Errors) -> Iterator[str]:
    """``above``: device and inode of the folders that ``path`` lies in."""
    try:
        stat = os.stat(path)
        inode = (stat.st_dev, stat.st_ino)
        if inode in above:
            errors.add("link-circle", f"{path} leads to a folder that it lies in")
            return
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        _add_error(path, error, errors)
        return
    for entry in entries:
        try:
            is_folder = entry.is_dir()
            is_file = entry.is_file()
        except OSError as error:
            _add_error(entry.path, error, errors)
            continue
        is_hidden = entry.name.startswith(".")
        if is_folder and (is_hidden or entry.name.casefold() in SYSTEM):
            _add_hidden(entry.path, errors)
        elif is_folder:
            yield from _walk(entry.path, (*above, inode), errors)
        elif is_file and not is_hidden:
            yield entry.path
        elif is_file and is_audio(entry.name):
            errors.add("hidden-file", entry.path)
        elif not is_file and entry.is_symlink():
            errors.add("missing-file", f"{entry.path} is a link to no file or folder")


def _add_error(path: str, error: OSError, errors: Errors) -> None:
    kinds = {
        errno.EACCES: "no-permission",
        errno.EPERM: "no-permission",
        errno.ELOOP: "link-circle",
    }
    kind = kinds.get(error.errno or 0, "missing-file")
    errors.add(kind, f"{path}: {(error.strerror or '').lower()}")


def _add_hidden(folder: str, errors: Errors) -> None:
    for parent, _, names in os.walk(folder):
        for name in sorted(filter(is_audio, names)):
            errors.add("hidden-file", os.path.join(parent, name))


class Names:
    """Recordings by their names below a folder. A name is compared in one Unicode form."""

    def __init__(self, names: Iterable[str]):
        """names: of recordings, relative to a folder, "/" between."""
        self.all: set[str] = set()
        self.folders: set[str] = set()  # their names, in lower case
        self._by_file_name: dict[str, list[str]] = {}
        self._any_case: dict[str, list[str]] = {}
        self._name_in_table: dict[str, str] = {}  # recording -> the name that a table has for it
        for name in names:
            self.all.add(name)
            *folders, file_name = _one_form(name).split("/")
            self.folders.update(map(str.casefold, folders))
            for key in dict.fromkeys((file_name, file_name.rpartition(".")[0])):
                self._by_file_name.setdefault(key, []).append(name)
                self._any_case.setdefault(key.casefold(), []).append(name)

    def match(self, name: str) -> tuple[list[str], list[str]]:
        """Return the recordings that a name may mean, and namesakes whose folders contradict it.

        Folders are compared from the right, as far as both names have some. Of several that agree,
        those count that agree longest. The file name may lack its ending, or have another one.
        """
        parts = _parts(name)
        if not parts:
            return [], []
        *folders, file_name = parts
        agreeing: dict[int, list[str]] = {}  # number of compared folders -> recordings
        contradicted = []
        for recording in self._namesakes(file_name):
            *folders_of_recording, _ = _parts(recording)
            pairs = list(zip(reversed(folders_of_recording), reversed(folders), strict=False))
            if any(ours.casefold() != theirs.casefold() for ours, theirs in pairs):
                contradicted.append(recording)
            else:
                agreeing.setdefault(len(pairs), []).append(recording)
        longest = agreeing[max(agreeing)] if agreeing else []
        return longest, contradicted

    def _namesakes(self, file_name: str) -> list[str]:
        """Return the recordings with this file name, which may lack its ending or a catalogue's."""
        keys = [file_name, file_name.rpartition(".")[0] if is_audio(file_name) else file_name]
        if re.fullmatch(r"[\w-]{11}(\.\w+)?", file_name):
            # of YouTube, whose downloads AudioSet's tools name with a Y
            keys.append("Y" + file_name)
        if re.fullmatch(r"\d{4,}", file_name):
            keys.append("ML" + file_name)  # a number of the Macaulay Library
        for key in keys:
            recordings = self._by_file_name.get(key) or self._any_case.get(key.casefold())
            if recordings:
                return recordings
        return []

    def contradicted(self, recording: str, name: str) -> str:
        """Return an earlier name of a recording whose folders contradict a new one, or ""."""
        earlier = self._name_in_table.setdefault(recording, name)
        matching, _ = Names([earlier]).match(name)
        return "" if matching else earlier


def _parts(name: str) -> list[str]:
    path = _one_form(name).replace("\\", "/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if parts and re.fullmatch(r"[A-Za-z]:", parts[0]):  # a drive
        return parts[1:]
    return parts


def _file_below(folder: pathlib.Path, name: str) -> str:
    """Return the path of a file that a name means below ``folder``, or "" without one.

    A table may come from anyone: its files are below the folder that the user named, or next to the
    table.
    """
    if "\0" in name:
        return ""
    top = os.path.abspath(folder)
    path = os.path.normpath(os.path.join(top, name))
    is_below = os.path.isfile(path) and pathlib.Path(path).is_relative_to(top)
    return path if is_below else ""


class Finder:
    """Finds the file that a table's name means, in the folder or by the table, in parts too."""

    def __init__(self, folder: pathlib.Path | None, errors: Errors):
        self.folder = folder
        self._errors = errors
        self._paths: dict[tuple[str, str], str | None] = {}
        self._names: dict[pathlib.Path, Names] = {}

    def find(self, name: str, table: pathlib.Path, where: str) -> str | None:
        """Return a recording's absolute path, or None for none or several, and an error."""
        key = (name, str(table.parent))
        if key not in self._paths:
            name = re.sub(r"^(https?://[^?#]*)[?#].*", r"\1", name)  # the address of a download
            name = name.removeprefix("file://").replace("\\", "/")
            self._paths[key] = self._find(name, table, where)
        return self._paths[key]

    def _find(self, name: str, table: pathlib.Path, where: str) -> str | None:
        if not name:
            self._errors.add("bad-row", f"{where} names no recording")
            return None
        folders = [self.folder] if self.folder else []
        for folder in (*folders, table.parent):
            path = _file_below(folder, name)
            if path:
                return path
        # Tables hold the paths of the machine that they were made on, and names without their
        # ending.
        folder = (folders or [table.parent])[0]
        matching, contradicted = self._match(folder, table, name)
        paths = [os.path.join(os.path.abspath(folder), recording) for recording in matching]
        if len(paths) > 1:
            text = f"{where} names {name!r}, and there are {', '.join(paths[:3])}"
            self._errors.add("ambiguous-name", text)
            return None
        if not paths:
            text = f"{where} names {name!r}, which is not below {folder}"
            if contradicted:
                text += (
                    f"; {contradicted[0]!r} has its file name, in a folder that contradicts the"
                    " table's"
                )
            self._errors.add("missing-file", text)
            return None
        path = paths[0]
        earlier = self._of(folder).contradicted(matching[0], name)
        if earlier:
            text = f"{where} names {name!r}, another line {earlier!r}, and there is {path} alone"
            self._errors.add("ambiguous-name", text)
            return None
        return None if self._is_elsewhere(folder, path, name, where) else path

    def _match(
        self, folder: pathlib.Path, table: pathlib.Path, name: str
    ) -> tuple[list[str], list[str]]:
        """Return `Names.match` of a name, or of the name that an address escapes."""
        matching, contradicted = self._of(folder).match(name)
        if not matching and not contradicted and "%" in name:
            matching, contradicted = self._of(folder).match(urllib.parse.unquote(name))
        stem, _ = os.path.splitext(name)
        if "/" not in name and table.name.casefold().startswith(stem.casefold()):
            return self._in_folder_of(table, folder, matching), matching
        return matching, contradicted

    def _is_elsewhere(self, folder: pathlib.Path, path: str, name: str, where: str) -> bool:
        """Whether a name means a file next to the folder. In another folder, it is an error."""
        ours = pathlib.Path(path).parts[:-1]
        theirs = _parts(name)[:-1]
        n_up = 0  # from the file to the first folder that differs
        for n, (our, their) in enumerate(zip(reversed(ours), reversed(theirs), strict=False), 1):
            if _one_form(our).casefold() != their.casefold():
                n_up = n
                break
        if not n_up:
            return False
        elsewhere = os.path.join(*ours[:-n_up], *theirs[-n_up:], os.path.basename(path))
        if ".." not in theirs and os.path.isfile(elsewhere):
            text = f"{where} names {name!r}, which is not below {folder}, but {elsewhere}"
            self._errors.add("missing-file", text)
            return True
        if re.match("/|[A-Za-z]:", name):  # a whole path, of another machine perhaps
            return False
        return not self._errors.add("other-folder", f"{where} names {name!r}, which is {path}")

    def next_to(self, table: pathlib.Path, where: str, quiet: bool = False) -> str | None:
        """Return the recording of a table without file names: the one whose name it begins with."""
        folders = [table.parent]
        if self.folder:
            folders.append(self.folder)
        stem = table.name
        while stem:
            for folder in folders:
                recordings = self._recordings_of(table, folder, stem)
                if len(recordings) == 1:
                    return os.path.join(os.path.abspath(folder), recordings[0])
                if recordings and not quiet:
                    text = f"{where} is about {stem!r}, and there are {', '.join(recordings[:3])}"
                    self._errors.add("ambiguous-name", text)
                if recordings:
                    return None
            shorter, _, part = stem.rpartition(".")
            if part.isdecimal() and not shorter.endswith("Table"):
                break  # a number is a part of the recording's name
            stem = shorter
        if not quiet:
            text = (
                f"{where}: no recording has the name that the table begins with; name it in a"
                " column"
            )
            self._errors.add("missing-file", text)
        return None

    def _recordings_of(self, table: pathlib.Path, folder: pathlib.Path, stem: str) -> list[str]:
        """Return the recordings in ``folder`` that a table with this name may be about."""
        path = os.path.join(os.path.abspath(table.parent), stem)
        matching, contradicted = self._of(folder).match(path)
        namesakes = [*matching, *contradicted]
        next_to_table = []
        for recording in namesakes:
            if os.path.dirname(os.path.join(folder, recording)) == str(table.parent):
                next_to_table.append(recording)
        if next_to_table:
            return next_to_table
        if self._has_recordings(folder, table.parent):
            return []  # a recording elsewhere is another one
        if matching and "/" in matching[0]:
            return matching
        return self._in_folder_of(table, folder, namesakes)

    def _in_folder_of(
        self, table: pathlib.Path, folder: pathlib.Path, names: list[str]
    ) -> list[str]:
        """Return the recordings in a folder named like a table, or all without such a folder."""
        folder_name = table.parent.name.casefold()
        if folder_name not in self._of(folder).folders:
            return names
        top = os.path.abspath(folder)
        inside = []
        for name in names:
            parts = pathlib.PurePath(top, name).parent.parts
            if folder_name in map(str.casefold, parts):
                inside.append(name)
        return inside

    def _has_recordings(self, folder: pathlib.Path, place: pathlib.Path) -> bool:
        """Whether recordings of ``folder`` lie in its folder ``place`` itself."""
        path = os.path.relpath(os.path.abspath(place), os.path.abspath(folder))
        inside = "" if path == "." else path
        return any(os.path.dirname(name) == inside for name in self._of(folder).all)

    def _of(self, folder: pathlib.Path) -> Names:
        if folder not in self._names:
            top = os.path.abspath(folder)
            recordings = filter(is_audio, walk(folder, Errors()))
            self._names[folder] = Names(os.path.relpath(path, top) for path in recordings)
        return self._names[folder]
