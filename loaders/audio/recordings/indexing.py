"""Sources to an index, in one call."""

import dataclasses
import errno
import lzma
import os
import pathlib
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from loaders.audio.recordings import class_names, columns, headers, sources, store
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.rows import SHORTEST, Options, Splitter, leads_out, plan
from loaders.base import DataError
from loaders.io import atomic_write, files

MAX_ABOUT = 1 << 20  # [bytes] of a member's name, and of its other metadata


class _Member(tarfile.TarInfo):
    """A member of an archive, of whose description at most `MAX_ABOUT` is read."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        kinds = (
            tarfile.XHDTYPE,
            tarfile.XGLTYPE,
            tarfile.SOLARIS_XHDTYPE,
            tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
        )
        if self.type in kinds and self.size > MAX_ABOUT:
            raise tarfile.ReadError(f"it describes a member with {self.size:,} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"it holds {self.name[:200]!r}, a sparse file")
        return super()._proc_member(archive)  # type: ignore[misc]  # typeshed leaves it out


def make(
    given: Sequence[str],
    out: pathlib.Path,
    *,
    reading: columns.Options,
    options: Options,
    class_file: str = "",
    root: str = "",
    errors: Errors,
    note: Callable[[str], None] = lambda text: None,
    threads: int = 0,
) -> dict[str, Any]:
    """Read sources, check them and write the index ``out``.

    Args:
      root: the folder that names in the index are relative to; empty = that of --audio, a folder
        that is the only source, or the folder that all recordings lie in.
      note: is called with a line of progress.

    Returns its index.json, with counts of recordings: "n_read" now, "n_used", "n_without" a label.

    Raises DataError, and writes nothing: a source that is none, an ``out`` that holds other things,
    errors that no option says to drop or keep (`IndexErrors`).
    """
    out = out if out.name not in ("", "..") else pathlib.Path(os.path.abspath(out))
    store.refuse_other(out)
    atomic_write.refuse_unwritable(out, folder=True)
    splitter = Splitter(options.split, options.seed)
    if splitter.kind and not reading.split_column:
        reading = dataclasses.replace(reading, split_column=splitter.column or "none")
    _check(options)
    known = class_names.read(class_file) if class_file else None
    annotations = [each for source in given for each in sources.read(source, reading, errors)]
    class_names.refuse_joined(((each.where, each.labels) for each in annotations), errors)
    paths = {each.path for each in annotations}
    sources.unnamed(given, reading, paths, errors)
    note(f"{len(annotations)} annotations of {len(paths)} recordings")
    where = _root(given, reading, root, paths)
    below = os.path.join(where, "")
    links = {
        path: led
        for path in sorted(paths)
        if path.startswith(below) and (led := leads_out(path, where))
    }
    # Before any is opened: the folder's contents are private.
    paths -= {
        path
        for path, led in links.items()
        if not errors.add("link-outside", f"{path} leads to {led}")
    }
    found, n_read = headers.read_all(paths, store.read_recordings(out), errors, threads)
    note(f"{len(found)} headers, {n_read} of them read now")
    planned = plan(annotations, found, known, where, options, splitter, errors)
    errors.refuse()
    asked = {
        **options.__dict__,
        **reading.__dict__,
        "sources": list(given),
        "class_file": class_file,
    }
    about = store.write(
        out,
        planned,
        errors,
        {name: value for name, value in asked.items() if value not in ("", False)},
    )
    used = {path.partition("\0")[0] for path in planned.events}
    labelled = {
        path.partition("\0")[0]
        for path, its in planned.events.items()
        if any(each.labels for each in its)
    }
    return {**about, "n_read": n_read, "n_used": len(used), "n_without": len(used - labelled)}


def archives_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the tar archives in a folder. Raises DataError for one that a link leads out to."""
    found = [path for path in sorted(folder.rglob("*.tar*")) if path.is_file()]
    remedy = "; name that archive itself, or the folder that it lies in"
    return [files.inside(folder, str(path.relative_to(folder)), remedy=remedy) for path in found]


def unpack(archives: Sequence[str], folder: pathlib.Path) -> int:
    """Unpack the files of tar archives that are not there yet. Return their number.

    Raises DataError: an archive that cannot be read, or holds anything but files below the folder.
    """
    n = 0
    for archive in archives:
        try:
            with tarfile.open(archive, tarinfo=_Member) as tar:
                for member in tar:
                    # else it keeps all that it has been through
                    tar.members = []  # type: ignore[attr-defined]
                    name = os.path.normpath(member.name)
                    if member.isdir():
                        continue
                    # A sparse one has its stated size, for any size of the archive.
                    if not member.isfile() or member.issparse() or name.startswith(("..", "/")):
                        raise DataError(
                            f"{archive} holds {member.name!r}, which is no plain file below it;"
                            " unpack it by hand"
                        )
                    # a link may be there, of the archive's maker
                    place = files.inside(folder, name)
                    if place.is_file() and place.stat().st_size == member.size:
                        continue
                    place.parent.mkdir(parents=True, exist_ok=True)
                    content = tar.extractfile(member)
                    assert content is not None
                    with content, atomic_write.file(place) as file:
                        shutil.copyfileobj(content, file, 1 << 20)
                    n += 1
        except DataError:
            raise
        except (
            tarfile.TarError,
            EOFError,
            ValueError,
            OSError,
            zlib.error,
            lzma.LZMAError,
        ) as error:
            # Full disks, and paths in the way, are reported as they are everywhere.
            if isinstance(error, OSError) and error.errno not in (None, errno.ENAMETOOLONG):
                raise
            raise DataError(
                f"{archive} cannot be unpacked: {files.reason(error)[:300]}; fetch it again"
            ) from error
    return n


def _check(options: Options) -> None:
    for name in ("windows", "hop", "min_overlap"):
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if not 0 <= value < float("inf"):
            raise DataError(f"{flag} is {value}; it must be a number of seconds, at least 0")
        if value and name != "min_overlap" and value < SHORTEST:
            raise DataError(f"{flag} is {value:g}; it must be at least {SHORTEST:g} s")
    if options.hop and not options.windows:
        raise DataError("--hop is given without --windows, whose distance it is")
    if options.windows and options.channels == "table":
        raise DataError(
            "--channels table is for rows of a table, and windows have no channel; say --channels"
            " each or a number"
        )
    if options.min_count < 1:
        raise DataError(f"--min-count is {options.min_count}; it must be at least 1")
    if not re.fullmatch(r"mean|each|table|\d{1,4}", options.channels):
        raise DataError(
            f"--channels is {options.channels!r}; expected mean, each, table, or a number from 0"
        )


def _root(given: Sequence[str], reading: columns.Options, root: str, paths: set[str]) -> str:
    if named := root or reading.audio:
        return os.path.abspath(files.expanded(named))
    if len(given) == 1 and os.path.isdir(folder := os.path.expanduser(given[0])):
        return os.path.abspath(sources.root_of(pathlib.Path(folder)) or folder)
    return os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else os.getcwd()
