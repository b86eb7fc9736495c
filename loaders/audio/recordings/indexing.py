"""Sources to an index, in one call."""

import dataclasses
import errno
import itertools
import lzma
import os
import pathlib
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from loaders.audio.recordings import class_names, columns, sources, store
from loaders.audio.recordings import headers as header_lib
from loaders.audio.recordings.annotations import Annotation, Errors
from loaders.audio.recordings.headers import Header
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
    if class_file:
        class_names.read(class_file)  # its errors come before the sources'
    annotations: list[Annotation] = []
    for source in given:
        annotations += sources.read(source, reading, errors)
    labels = set(itertools.chain.from_iterable(a.labels for a in annotations))
    classes = class_names.read(class_file, labels) if class_file else None
    _count_joined(annotations, labels, classes, reading, errors)
    paths = {annotation.path for annotation in annotations}
    sources.count_unnamed(given, reading, paths, errors)
    note(f"{len(annotations)} annotations of {len(paths)} recordings")
    root = _root(given, reading, root, paths)
    # Before any is opened: the contents of a folder elsewhere are private.
    paths -= _leading_out(paths, root, errors)
    headers, n_read = header_lib.read_all(
        paths, store.read_recordings(out), errors, threads, samples=True
    )
    note(f"{len(headers)} headers, {n_read} of them read now")
    _count_time_expansions(annotations, headers, errors)
    planned = plan(annotations, headers, classes, root, options, splitter, errors)
    errors.refuse()
    settings = {**options.__dict__, **reading.__dict__, "sources": list(given)}
    settings["class_file"] = class_file
    stated = {name: value for name, value in settings.items() if value not in ("", False)}
    about = store.write(out, planned, errors, stated)
    used = set()
    labelled = set()
    for key, events in planned.events.items():
        path, _, _ = key.partition("\0")
        used.add(path)
        if any(event.labels for event in events):
            labelled.add(path)
    return {**about, "n_read": n_read, "n_used": len(used), "n_without": len(used - labelled)}


def _count_joined(
    annotations: Sequence[Annotation],
    labels: Collection[str],
    classes: class_names.Classes | None,
    reading: columns.Options,
    errors: Errors,
) -> None:
    """Count labels that may be several: not those of --classes, nor names that jaxtrain wrote."""
    whole: set[str] = set()
    if reading.separator == columns.NO_SEPARATOR:
        whole.update(labels)
    for annotation in annotations:
        if annotation.is_name:
            whole.update(annotation.labels)
    if classes:
        whole.update(label for label in labels if classes.of(label))
    lines = ((annotation.where, annotation.labels) for annotation in annotations)
    class_names.refuse_joined(lines, errors, whole)


def _count_time_expansions(
    annotations: Sequence[Annotation], headers: dict[str, Header], errors: Errors
) -> None:
    """Count recordings that a table alone calls slower than life, and leave out those to drop."""
    seen = set()
    for annotation in annotations:
        stated = annotation.about.get("time_expansion", "1")
        path = annotation.path
        if float(stated) == 1 or path in seen or path not in headers:
            continue
        if "time_expansion" in headers[path].about:  # counted already
            continue
        seen.add(path)
        text = (
            f"{annotation.where} states the time expansion {stated} of {path}; times and"
            " frequencies are taken as those of the file; train with"
            f" --config.data.time_expansion={stated}"
        )
        if not errors.add("time-expansion", text):
            del headers[path]


def _leading_out(paths: Iterable[str], root: str, errors: Errors) -> set[str]:
    """Return recordings below the root that are links out of it, and are not to be kept."""
    below = os.path.join(root, "")
    targets = {path: leads_out(path, root) for path in sorted(paths) if path.startswith(below)}
    left_out = set()
    for path, target in targets.items():
        if target and not errors.add("link-outside", f"{path} leads to {target}"):
            left_out.add(path)
    return left_out


def archives_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the tar archives in a folder. Raises DataError for one that a link leads out to."""
    paths = [path for path in sorted(folder.rglob("*.tar*")) if path.is_file()]
    remedy = "; name that archive itself, or the folder that it lies in"
    return [files.inside(folder, str(path.relative_to(folder)), remedy=remedy) for path in paths]


def unpack(archives: Sequence[str], folder: pathlib.Path) -> int:
    """Unpack the files of tar archives that are not there yet. Return their number.

    Raises DataError: an archive that cannot be read, or holds anything but files below the folder.
    """
    n_unpacked = 0
    for archive in archives:
        try:
            with tarfile.open(archive, tarinfo=_Member) as tar:
                for member in tar:
                    # else it keeps all that it has been through
                    tar.members = []  # type: ignore[attr-defined]
                    if not member.isdir():
                        n_unpacked += _unpack_member(archive, tar, member, folder)
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
    return n_unpacked


def _unpack_member(
    archive: str, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: pathlib.Path
) -> bool:
    """Write a file of an archive, unless it is there. Return whether it was written."""
    name = os.path.normpath(member.name)
    # A sparse one has its stated size, for any size of the archive.
    if not member.isfile() or member.issparse() or name.startswith(("..", "/")):
        raise DataError(
            f"{archive} holds {member.name!r}, which is no plain file below it; unpack it by hand"
        )
    # a link may be there, of the archive's maker
    place = files.inside(folder, name)
    if place.is_file() and place.stat().st_size == member.size:
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    with content, atomic_write.file(place) as file:
        shutil.copyfileobj(content, file, 1 << 20)
    return True


def _check(options: Options) -> None:
    for name in ("windows", "hop", "min_overlap"):
        flag = f"--{name.replace('_', '-')}"
        value = getattr(options, name)
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
    named = root or reading.audio
    if named:
        return os.path.abspath(files.expanded(named))
    if len(given) == 1:
        folder = os.path.expanduser(given[0])
        if os.path.isdir(folder):
            return os.path.abspath(sources.root_of(pathlib.Path(folder)) or folder)
    if not paths:
        return os.getcwd()
    return os.path.commonpath([os.path.dirname(path) for path in paths])
