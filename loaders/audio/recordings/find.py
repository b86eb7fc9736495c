"""Recordings below a folder, and the file that a table's name means."""

import os
import pathlib
from collections.abc import Iterator

from loaders.audio.recordings.annotations import Mistakes

SUFFIXES = (".wav .flac .mp3 .ogg .oga .opus .aif .aiff .aifc .caf .m4a .mp4 .rf64 .bw64 .wave").split()


def is_audio(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def walk(folder: pathlib.Path, mistakes: Mistakes) -> Iterator[str]:
    """Every file below a folder, by name, links followed. A folder that cannot be entered is a mistake."""

    def enter(path: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        try:
            stat = os.stat(path)
            here = (stat.st_dev, stat.st_ino)
            if here in above:
                mistakes.add("link-circle", f"{path} leads to a folder that it lies in")
                return
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except PermissionError:
            mistakes.add("no-permission", f"{path}: permission denied")
            return
        except OSError as error:
            kind = "link-circle" if error.errno == 40 else "missing-file"
            mistakes.add(kind, f"{path}: {error.strerror}")
            return
        for entry in entries:
            try:
                inside, is_file = entry.is_dir(), entry.is_file()
            except OSError as error:
                mistakes.add("link-circle" if error.errno == 40 else "missing-file", f"{entry.path}: {error.strerror}")
                continue
            if not inside and not is_file and entry.is_symlink():
                mistakes.add("missing-file", f"{entry.path} is a link to no file or folder")
            elif inside and not entry.name.startswith("."):
                yield from enter(entry.path, (*above, here))
            elif is_file and not entry.name.startswith("."):
                yield entry.path

    yield from enter(os.path.abspath(folder), ())


class Finder:
    """Finds the file that a table's name means: below the folder of recordings, next to the table, or by its name alone."""

    def __init__(self, folder: pathlib.Path | None, mistakes: Mistakes):
        self._folder, self._mistakes = folder, mistakes
        self._found: dict[tuple[str, str], str | None] = {}
        self._names: dict[pathlib.Path, dict[str, list[str]]] = {}

    def find(self, name: str, table: pathlib.Path, where: str) -> str | None:
        """The absolute path of a recording. None for none or several, which is counted once for each name."""
        key = (name, str(table.parent))
        if key not in self._found:
            self._found[key] = self._find(name.replace("\\", "/"), table, where)
        return self._found[key]

    def _find(self, name: str, table: pathlib.Path, where: str) -> str | None:
        if not name:
            self._mistakes.add("bad-row", f"{where} names no recording")
            return None
        folders = [self._folder] if self._folder else []
        for folder in (*folders, table.parent):
            path = os.path.normpath(os.path.join(os.path.abspath(folder), name))
            # A table may come from anyone: its files are below the folder that the user named, or next to the table.
            if "\0" not in name and os.path.isfile(path) and pathlib.Path(path).is_relative_to(os.path.abspath(folder)):
                return path
        # Tables hold the paths of the machine that they were made on, and names without their ending.
        last = name.rpartition("/")[2]
        for folder in folders or [table.parent]:
            names = self._by_name(folder)
            found = names.get(last) or names.get(last.rpartition(".")[0] if is_audio(last) else last) or names.get("Y" + last)
            if found and len(found) > 1:
                tail = [path for path in found if path.endswith("/" + "/".join(name.split("/")[-2:]))]
                found = tail if len(tail) == 1 else found
            if found and len(found) == 1:
                return found[0]
            if found:
                self._mistakes.add("ambiguous-name", f"{where} names {name!r}, and there are {', '.join(found[:3])}")
                return None
        self._mistakes.add("missing-file", f"{where} names {name!r}, which is not below {(folders or [table.parent])[0]}")
        return None

    def next_to(self, table: pathlib.Path, where: str) -> str | None:
        """The recording that a table without file names is about: the one whose name it begins with."""
        stem = table.name
        while stem:
            for folder in (table.parent, *([self._folder] if self._folder else [])):
                found = self._by_name(folder).get(stem, [])
                near = [path for path in found if os.path.dirname(path) == os.path.abspath(table.parent)] or found
                if len(near) == 1:
                    return near[0]
                if near:
                    self._mistakes.add("ambiguous-name", f"{where} is about {stem!r}, and there are {', '.join(near[:3])}")
                    return None
            stem = stem.rpartition(".")[0]
        self._mistakes.add(
            "missing-file", f"{where}: no recording has the name that the table begins with; name it in a column"
        )
        return None

    def _by_name(self, folder: pathlib.Path) -> dict[str, list[str]]:
        """The recordings below a folder by their name, with and without its ending."""
        if folder not in self._names:
            names: dict[str, list[str]] = {}
            for path in walk(folder, Mistakes()):
                if is_audio(path):
                    last = path.rpartition("/")[2]
                    names.setdefault(last, []).append(path)
                    names.setdefault(last.rpartition(".")[0], []).append(path)
            self._names[folder] = names
        return self._names[folder]
