"""Recordings cut into windows, which the loader reads as rows. Only headers are read."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np

from loaders.audio import shards
from loaders.audio.recordings import columns, grid, headers, rows, sources, store
from loaders.audio.recordings.annotations import KEEP, Annotation, Errors
from loaders.audio.recordings.find import is_audio, walk
from loaders.audio.recordings.headers import Header
from loaders.base import DataError
from loaders.io import files


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording that windows are cut from."""

    name: str  # relative to the root
    header: Header
    time_expansion: float = 1.0  # times slower than life that it is

    def clock(self, seconds: float) -> str:
        """Date and time at a place, ISO 8601, or "" if neither header nor name has the begin."""
        date = self.header.about.get("date")
        time = self.header.about.get("time")
        return clock(date, time, seconds / self.time_expansion)

    @property
    def highest(self) -> float:
        """The highest frequency that it holds [Hz]."""
        return self.header.rate / 2


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of recordings, in the order of names and time."""

    root: str  # an absolute path
    recordings: Sequence[Recording]
    seconds: float  # of a window. A shorter recording is one
    hop: float  # [s] from window to window. The last one is at the end of its recording
    # int64 [recordings + 1]: the number of each recording's first window, and of all
    first: np.ndarray

    @property
    def n(self) -> int:
        return int(self.first[-1])

    @property
    def total(self) -> float:
        """Seconds of all recordings."""
        return sum(recording.header.seconds for recording in self.recordings)

    @property
    def digest(self) -> str:
        """A hash of the recordings' names, their headers, and the cut."""
        digest = hashlib.sha256(f"{self.seconds!r} {self.hop!r}".encode())
        for recording in self.recordings:
            header = recording.header
            signal = f"{header.size} {header.rate} {header.frames} {header.channels}"
            digest.update(f"\n{recording.name} {signal} {header.digest}".encode())
        return digest.hexdigest()[:32]

    def between(self, start: int, stop: int) -> Iterator[tuple[int, float, float]]:
        """Windows by number: the number of the recording, and start and end in it [s]."""
        recording_number = int(np.searchsorted(self.first, start, side="right")) - 1
        while start < stop:
            header = self.recordings[recording_number].header
            first = int(self.first[recording_number])
            next_first = int(self.first[recording_number + 1])
            parts = grid.spans(header.seconds, self.seconds, self.hop)
            for begin, end in parts[start - first : min(stop, next_first) - first]:
                yield recording_number, begin, end
            start = next_first
            recording_number += 1

    def write(self, folder: pathlib.Path) -> None:
        """Write the index that the loader reads them by, into a folder that is new or empty."""
        headers_by_path: dict[str, Header] = {}
        annotations: dict[str, list[Annotation]] = {}
        for recording in self.recordings:
            path = os.path.join(self.root, recording.name)
            headers_by_path[path] = recording.header
            annotations[path] = [Annotation(path)]
        plan = rows.Plan(
            names=[],
            events=annotations,
            splits=dict.fromkeys(annotations, "train"),
            headers=headers_by_path,
            root=self.root,
            options=rows.Options(windows=self.seconds, hop=self.hop),
        )
        (folder / "data").mkdir(parents=True)
        index = {
            "version": store.VERSION,
            "root": os.path.relpath(self.root, os.path.realpath(folder)),
            "classes": [],
            "splits": {"train": store.write_split(folder / "data", "train", plan)},
        }
        (folder / "index.json").write_text(json.dumps(index))


def clock(date: str | None, time: str | None, seconds: float) -> str:
    """Date and time so many seconds after a recording's begin, or "" if one of them is unknown."""
    if not date or not time:
        return ""
    try:
        begin = datetime.fromisoformat(f"{date}T{time}")
        return (begin + timedelta(seconds=seconds)).isoformat()
    except (ValueError, TypeError, OverflowError):
        return ""


def cut(
    inputs: Sequence[str],
    *,
    seconds: float,
    hop: float,
    root: str = "",
    links: bool = False,
    reading: columns.Options | None = None,
    time_expansion: float = 1.0,
    errors: Errors,
    note: Callable[[str], None] = lambda text: None,
) -> Windows:
    """Return the windows of recordings: files, folders, indexes, tables or lists that name some.

    Args:
      seconds, hop: of a window, and from one to the next, in the time of the files.
      root: the folder that names are relative to; empty = a folder or index that is alone given, or
        the nearest that holds all.
      links: whether links may lead out of the root.
      time_expansion: times slower than life that the recordings are.
      errors: takes every recording that cannot be read.

    Raises DataError: something given that is none of these, or nothing that can be read.
    """
    if hop < rows.SHORTEST:
        raise DataError(
            f"windows would begin every {hop:g} s; at least {rows.SHORTEST:g} s apart: give less"
            " overlap"
        )
    known_headers: dict[str, Header] = {}
    paths: set[str] = set()
    folders: list[str] = []
    options = reading or columns.Options()
    for name in inputs:
        folder, recording_paths = _recordings_of(name, root, known_headers, options, errors)
        paths |= recording_paths
        folders.append(folder)
    root = os.path.abspath(files.expanded(root or _common_root(folders, paths)))
    for path in sorted(paths):
        if not path.startswith(os.path.join(root, "")):
            errors.add("outside-root", f"{path} is not below {root}")
            paths.discard(path)
        elif not links and (target := rows.leads_out(path, root)):
            errors.add(
                "link-outside", f"{path} leads to {target}; links are followed with --follow-links"
            )
            paths.discard(path)
    headers_by_path, n_read = headers.read_all(
        paths, known_headers, errors, time_expansion=time_expansion
    )
    note(f"{len(headers_by_path)} recordings, {n_read} headers read")
    recordings = _with_samples(headers_by_path, root, time_expansion, errors)
    if not recordings:
        first_error = f" ({errors.lines[0][1]})" if errors.lines else ""
        raise DataError(
            f"none of {len(paths)} recordings can be read{first_error}; name some that can"
        )
    n_windows = [
        len(grid.spans(recording.header.seconds, seconds, hop)) for recording in recordings
    ]
    first = np.concatenate([[0], np.cumsum(n_windows)])
    return Windows(root, recordings, seconds, hop, first.astype(np.int64))


def _common_root(folders: Sequence[str], paths: Iterable[str]) -> str:
    """Return the folder or index that is alone given, or the nearest folder that holds all."""
    if len(folders) == 1 and folders[0]:
        return folders[0]
    return os.path.commonpath(list(map(os.path.dirname, paths)) or ["/"])


def _with_samples(
    headers_by_path: Mapping[str, Header], root: str, time_expansion: float, errors: Errors
) -> list[Recording]:
    """Return the recordings with samples, at a rate that can be read, by name. Count the others."""
    recordings = []
    for path in sorted(headers_by_path, key=lambda path: os.path.relpath(path, root)):
        header = headers_by_path[path]
        rate = round(header.rate * time_expansion)
        if header.frames <= 0:
            errors.add("unreadable-file", f"{path} holds no samples")
        elif not headers.LOWEST <= rate <= headers.HIGHEST:
            text = (
                f"{path}: its sample rate is {header.rate} Hz, of which"
                f" time_expansion={time_expansion:g} makes {rate}; expected {headers.LOWEST} to"
                f" {headers.HIGHEST}"
            )
            errors.add("unreadable-file", text)
        else:
            name = os.path.relpath(path, root).replace(os.sep, "/")
            recordings.append(Recording(name, header, time_expansion))
    return recordings


def _recordings_of(
    name: str, root: str, known_headers: dict[str, Header], reading: columns.Options, errors: Errors
) -> tuple[str, set[str]]:
    """Return the folder of a source, or "", and its recordings. Add to the known headers."""
    path = files.expanded(name)
    if (path / "index.json").is_file():
        index_headers = store.read_recordings(path)
        if not index_headers:
            raise DataError(
                f"{path} is an index without the list of its recordings (headers.cache); make it"
                " again"
            )
        known_headers.update(index_headers)
        return str(shards.index_root(path / "index.json")), set(index_headers)
    if path.is_dir():
        file_paths = list(walk(path, errors))
        recording_paths = set(filter(is_audio, file_paths))
        sources.count_unread(path, file_paths, errors)
        if not recording_paths:
            raise DataError(
                f"{name} holds no recordings (.wav, .flac, .mp3, .ogg, .opus, .aiff, .caf, .m4a)"
            )
        return os.path.abspath(path), recording_paths
    if is_audio(path.name):
        if path.is_file() or not path.exists():
            return "", {os.path.abspath(path)}
        raise files.FileError(f"{name} is neither a file nor a folder")
    options = dataclasses.replace(reading, audio=root, files_only=True)
    return "", {annotation.path for annotation in sources.read(name, options, errors)}


def lenient() -> Errors:
    """Drop the rows of all errors. Read a truncated recording to its end."""
    kept_kinds = (
        "truncated-file",
        "stale-header",
        "float-range",
        "not-finite",
        "opposite-channels",
        "time-expansion",
    )
    policies = [f"{kind}={KEEP}" for kind in kept_kinds]
    return Errors(["all=drop", *policies])
