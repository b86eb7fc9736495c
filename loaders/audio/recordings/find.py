"""Recordings below a folder, and the file that a table's name means."""

import errno
import functools
import os
import pathlib
import re
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
SUFFIXES = (
    ".wav .flac .mp3 .ogg .oga .opus .aif .aiff .aifc .au .caf .m4a .mp4 .rf64 .bw64 .w64 .wave"
).split()

_one_form = functools.partial(unicodedata.normalize, "NFC")


def is_audio(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def walk(folder: pathlib.Path, errors: Errors) -> Iterator[str]:
    """Yield every file below a folder, by name, links followed.

    Folders that cannot be entered, and recordings in hidden ones, are errors.
    """

    def wrong(path: str, error: OSError) -> None:
        kind = {
            errno.EACCES: "no-permission",
            errno.EPERM: "no-permission",
            errno.ELOOP: "link-circle",
        }
        errors.add(
            kind.get(error.errno or 0, "missing-file"), f"{path}: {(error.strerror or '').lower()}"
        )

    def enter(path: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        try:
            stat = os.stat(path)
            here = (stat.st_dev, stat.st_ino)
            if here in above:
                errors.add("link-circle", f"{path} leads to a folder that it lies in")
                return
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            wrong(path, error)
            return
        for entry in entries:
            try:
                inside, is_file = entry.is_dir(), entry.is_file()
            except OSError as error:
                wrong(entry.path, error)
                continue
            if not inside and not is_file and entry.is_symlink():
                errors.add("missing-file", f"{entry.path} is a link to no file or folder")
            elif inside and (entry.name.startswith(".") or entry.name.casefold() in SYSTEM):
                for above_it, _, names in os.walk(entry.path):
                    for name in sorted(filter(is_audio, names)):
                        errors.add("hidden-file", os.path.join(above_it, name))
            elif inside:
                yield from enter(entry.path, (*above, here))
            elif is_file and not entry.name.startswith("."):
                yield entry.path
            elif is_file and is_audio(entry.name):
                errors.add("hidden-file", entry.path)

    yield from enter(os.path.abspath(folder), ())


class Names:
    """Recordings by their names below a folder. A name is compared in one Unicode form."""

    def __init__(self, names: Iterable[str]):
        """names: of recordings, relative to a folder, "/" between."""
        self.all: set[str] = set()
        self.folders: set[str] = set()  # their names, in lower case
        self._by_last: dict[str, list[str]] = {}
        self._any_case: dict[str, list[str]] = {}
        self._meant: dict[str, str] = {}  # recording -> the name that a table has for it
        for name in names:
            self.all.add(name)
            *above, last = _one_form(name).split("/")
            self.folders.update(map(str.casefold, above))
            for key in dict.fromkeys((last, last.rpartition(".")[0])):
                self._by_last.setdefault(key, []).append(name)
                self._any_case.setdefault(key.casefold(), []).append(name)

    def match(self, name: str) -> tuple[list[str], list[str]]:
        """Return the recordings that a name may mean, and namesakes whose folders contradict it.

        Folders are compared from the right, as far as both names have some. Of several that agree,
        those count that agree longest. The file name may lack its ending, or have another one.
        """
        parts = _parts(name)
        if not parts:
            return [], []
        last = parts[-1]
        # of YouTube, whose downloads AudioSet's tools name with a Y
        video = re.fullmatch(r"[\w-]{11}(\.\w+)?", last)
        for key in (
            last,
            last.rpartition(".")[0] if is_audio(last) else last,
            *(["Y" + last] if video else []),
        ):
            if found := self._by_last.get(key) or self._any_case.get(key.casefold()):
                break
        agreeing: dict[int, list[str]] = {}
        others = []
        for each in found or []:
            folders = list(zip(reversed(_parts(each)[:-1]), reversed(parts[:-1]), strict=False))
            if any(ours.casefold() != theirs.casefold() for ours, theirs in folders):
                others.append(each)
            else:
                agreeing.setdefault(len(folders), []).append(each)
        return (agreeing[max(agreeing)] if agreeing else []), others

    def contradicted(self, recording: str, name: str) -> str:
        """Return an earlier name of a recording whose folders contradict a new one, or ""."""
        before = self._meant.setdefault(recording, name)
        return "" if Names([before]).match(name)[0] else before


def _parts(name: str) -> list[str]:
    parts = [
        part for part in _one_form(name).replace("\\", "/").split("/") if part not in ("", ".")
    ]
    return parts[1:] if parts and re.fullmatch(r"[A-Za-z]:", parts[0]) else parts


class Finder:
    """Finds the file that a table's name means, in the folder or by the table, in parts too."""

    def __init__(self, folder: pathlib.Path | None, errors: Errors):
        self.folder, self._errors = folder, errors
        self._found: dict[tuple[str, str], str | None] = {}
        self._names: dict[pathlib.Path, Names] = {}

    def find(self, name: str, table: pathlib.Path, where: str) -> str | None:
        """Return a recording's absolute path, or None for none or several, and an error."""
        key = (name, str(table.parent))
        if key not in self._found:
            name = re.sub(r"^(https?://[^?#]*)[?#].*", r"\1", name)  # the address of a download
            self._found[key] = self._find(
                name.removeprefix("file://").replace("\\", "/"), table, where
            )
        return self._found[key]

    def _find(self, name: str, table: pathlib.Path, where: str) -> str | None:
        if not name:
            self._errors.add("bad-row", f"{where} names no recording")
            return None
        folders = [self.folder] if self.folder else []
        for folder in (*folders, table.parent):
            path = os.path.normpath(os.path.join(os.path.abspath(folder), name))
            # A table may come from anyone: its files are below the folder that the user named, or
            # next to the table.
            if (
                "\0" not in name
                and os.path.isfile(path)
                and pathlib.Path(path).is_relative_to(os.path.abspath(folder))
            ):
                return path
        # Tables hold the paths of the machine that they were made on, and names without their
        # ending.
        folder = (folders or [table.parent])[0]
        found, others = self._of(folder).match(name)
        if not found and not others and "%" in name:
            found, others = self._of(folder).match(urllib.parse.unquote(name))
        if "/" not in name and table.name.casefold().startswith(
            os.path.splitext(name)[0].casefold()
        ):
            found, others = self._in_folder_of(table, folder, found), found
        paths = [os.path.join(os.path.abspath(folder), each) for each in found]
        if len(paths) > 1:
            self._errors.add(
                "ambiguous-name", f"{where} names {name!r}, and there are {', '.join(paths[:3])}"
            )
            return None
        if not paths:
            near = (
                f"; {others[0]!r} has its file name, in a folder that contradicts the table's"
                if others
                else ""
            )
            self._errors.add(
                "missing-file", f"{where} names {name!r}, which is not below {folder}{near}"
            )
            return None
        if before := self._of(folder).contradicted(found[0], name):
            text = f"{where} names {name!r}, another line {before!r}, and there is {paths[0]} alone"
            self._errors.add("ambiguous-name", text)
            return None
        return None if self._is_elsewhere(folder, paths[0], name, where) else paths[0]

    def _is_elsewhere(self, folder: pathlib.Path, path: str, name: str, where: str) -> bool:
        """Whether a name means a file next to the folder. In another folder, it is an error."""
        ours, theirs = pathlib.Path(path).parts[:-1], _parts(name)[:-1]
        pairs = zip(reversed(ours), reversed(theirs), strict=False)
        at = next(
            (n for n, (a, b) in enumerate(pairs, 1) if _one_form(a).casefold() != b.casefold()), 0
        )
        if not at:
            return False
        there = os.path.join(*ours[:-at], *theirs[-at:], os.path.basename(path))
        if ".." not in theirs and os.path.isfile(there):
            self._errors.add(
                "missing-file", f"{where} names {name!r}, which is not below {folder}, but {there}"
            )
            return True
        if re.match("/|[A-Za-z]:", name):  # a whole path, of another machine perhaps
            return False
        return not self._errors.add("other-folder", f"{where} names {name!r}, which is {path}")

    def next_to(self, table: pathlib.Path, where: str, quiet: bool = False) -> str | None:
        """Return the recording of a table without file names: the one whose name it begins with."""
        stem = table.name
        while stem:
            for folder in (table.parent, *([self.folder] if self.folder else [])):
                found, others = self._of(folder).match(
                    os.path.join(os.path.abspath(table.parent), stem)
                )
                near = [
                    path
                    for path in (*found, *others)
                    if os.path.dirname(os.path.join(folder, path)) == str(table.parent)
                ]
                if not near and self._has_own(folder, table.parent):
                    continue  # a recording elsewhere is another one
                if not near:
                    near = (
                        found
                        if found and "/" in found[0]
                        else self._in_folder_of(table, folder, [*found, *others])
                    )
                if len(near) == 1:
                    return os.path.join(os.path.abspath(folder), near[0])
                if near and not quiet:
                    self._errors.add(
                        "ambiguous-name",
                        f"{where} is about {stem!r}, and there are {', '.join(near[:3])}",
                    )
                if near:
                    return None
            rest, _, part = stem.rpartition(".")
            if part.isdecimal() and not rest.endswith("Table"):
                break  # a number is a part of the recording's name
            stem = rest
        if not quiet:
            text = (
                f"{where}: no recording has the name that the table begins with; name it in a"
                " column"
            )
            self._errors.add("missing-file", text)
        return None

    def _in_folder_of(
        self, table: pathlib.Path, folder: pathlib.Path, names: list[str]
    ) -> list[str]:
        """Return the recordings in a folder named like a table, or all without such a folder."""
        own = table.parent.name.casefold()
        if own not in self._of(folder).folders:
            return names
        top = os.path.abspath(folder)
        return [
            name
            for name in names
            if own in map(str.casefold, pathlib.PurePath(top, name).parent.parts)
        ]

    def _has_own(self, folder: pathlib.Path, place: pathlib.Path) -> bool:
        where = os.path.relpath(os.path.abspath(place), os.path.abspath(folder))
        return any(
            os.path.dirname(name) == ("" if where == "." else where)
            for name in self._of(folder).all
        )

    def _of(self, folder: pathlib.Path) -> Names:
        if folder not in self._names:
            top = os.path.abspath(folder)
            self._names[folder] = Names(
                os.path.relpath(path, top) for path in walk(folder, Errors()) if is_audio(path)
            )
        return self._names[folder]
