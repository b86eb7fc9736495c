"""Recordings cut into windows, which the loader reads as rows. Only headers are read."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

import numpy as np

from loaders.audio import shards
from loaders.audio.recordings import columns, headers, rows, sources, store
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

    def clock(self, seconds: float) -> str:
        """Date and time at a place, ISO 8601, or "" if neither header nor name has the begin."""
        return clock(self.header.about.get("date"), self.header.about.get("time"), seconds)


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
        return sum(each.header.seconds for each in self.recordings)

    @property
    def digest(self) -> str:
        """A hash of the recordings' names, their headers, and the cut."""
        digest = hashlib.sha256(f"{self.seconds!r} {self.hop!r}".encode())
        for each in self.recordings:
            h = each.header
            digest.update(
                f"\n{each.name} {h.size} {h.rate} {h.frames} {h.channels} {h.digest}".encode()
            )
        return digest.hexdigest()[:32]

    def between(self, start: int, stop: int) -> Iterator[tuple[int, float, float]]:
        """Windows by number: the number of the recording, and start and end in it [s]."""
        k = int(np.searchsorted(self.first, start, side="right")) - 1
        while start < stop:
            of_it = _cut(self.recordings[k].header, self.seconds, self.hop)
            low, high = (
                start - int(self.first[k]),
                min(stop, int(self.first[k + 1])) - int(self.first[k]),
            )
            yield from ((k, begin, end) for begin, end in of_it[low:high])
            start = int(self.first[k + 1])
            k += 1

    def write(self, folder: pathlib.Path) -> None:
        """Write the index that the loader reads them by, into a folder that is new or empty."""
        at = {os.path.join(self.root, each.name): each.header for each in self.recordings}
        whole = {path: [Annotation(path)] for path in at}
        options = rows.Options(windows=self.seconds, hop=self.hop)
        splits = dict.fromkeys(at, "train")
        plan = rows.Plan(
            names=[], events=whole, splits=splits, headers=at, root=self.root, options=options
        )
        (folder / "data").mkdir(parents=True)
        about = store.write_split(folder / "data", "train", plan)
        root = os.path.relpath(self.root, os.path.realpath(folder))
        text = json.dumps(
            {"version": store.VERSION, "root": root, "classes": [], "splits": {"train": about}}
        )
        (folder / "index.json").write_text(text)


def clock(date: str | None, time: str | None, seconds: float) -> str:
    """Date and time so many seconds after a recording's begin, or "" if one of them is unknown."""
    if not date or not time:
        return ""
    try:
        return (datetime.fromisoformat(f"{date}T{time}") + timedelta(seconds=seconds)).isoformat()
    except (ValueError, TypeError, OverflowError):
        return ""


def cut(
    given: Sequence[str],
    *,
    seconds: float,
    hop: float,
    root: str = "",
    links: bool = False,
    reading: columns.Options | None = None,
    errors: Errors,
    note: Callable[[str], None] = lambda text: None,
) -> Windows:
    """Return the windows of recordings: files, folders, indexes, tables or lists that name some.

    Args:
      root: the folder that names are relative to; empty = a folder or index that is alone given, or
        the nearest that holds all.
      links: whether links may lead out of the root.
      errors: takes every recording that cannot be read.

    Raises DataError: something given that is none of these, or nothing that can be read.
    """
    if hop < rows.SHORTEST:
        raise DataError(
            f"windows would begin every {hop:g} s; at least {rows.SHORTEST:g} s apart: give less"
            " overlap"
        )
    known: dict[str, Header] = {}
    paths: set[str] = set()
    roots: list[str] = []
    for each in given:
        folder, found = _recordings_of(each, root, known, reading or columns.Options(), errors)
        paths |= found
        roots.append(folder)
    common = (
        root
        or (roots[0] if len(roots) == 1 else "")
        or os.path.commonpath([os.path.dirname(p) for p in paths] or ["/"])
    )
    root = os.path.abspath(files.expanded(common))
    for path in sorted(paths):
        if not path.startswith(os.path.join(root, "")):
            errors.add("outside-root", f"{path} is not below {root}")
            paths.discard(path)
        elif not links and (led := rows.leads_out(path, root)):
            errors.add(
                "link-outside", f"{path} leads to {led}; links are followed with --follow-links"
            )
            paths.discard(path)
    found_headers, n_read = headers.read_all(paths, known, errors)
    note(f"{len(found_headers)} recordings, {n_read} headers read")
    recordings = []
    for path in sorted(found_headers, key=lambda path: os.path.relpath(path, root)):
        if found_headers[path].frames > 0:
            recordings.append(
                Recording(os.path.relpath(path, root).replace(os.sep, "/"), found_headers[path])
            )
        else:
            errors.add("unreadable-file", f"{path} holds no samples")
    if not recordings:
        first = f" ({errors.lines[0][1]})" if errors.lines else ""
        raise DataError(f"none of {len(paths)} recordings can be read{first}; name some that can")
    counts = [len(_cut(each.header, seconds, hop)) for each in recordings]
    return Windows(
        root, recordings, seconds, hop, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    )


def _cut(header: Header, seconds: float, hop: float) -> list[tuple[float, float]]:
    return [
        part[:2]
        for part in rows.windows_of([], header.seconds, {}, rows.Options(windows=seconds, hop=hop))
    ]


def _recordings_of(
    given: str, root: str, known: dict[str, Header], reading: columns.Options, errors: Errors
) -> tuple[str, set[str]]:
    """Return the folder of a source, or "", and its recordings. Add to the ``known`` headers."""
    path = files.expanded(given)
    if (path / "index.json").is_file():
        of_index: Mapping[str, Header] = store.read_recordings(path)
        if not of_index:
            raise DataError(
                f"{path} is an index without the list of its recordings (headers.cache); make it"
                " again"
            )
        known.update(of_index)
        return str(shards.index_root(path / "index.json")), set(of_index)
    if path.is_dir():
        names = list(walk(path, errors))
        found = {each for each in names if is_audio(each)}
        sources.passed_over(path, names, errors)
        if not found:
            raise DataError(
                f"{given} holds no recordings (.wav, .flac, .mp3, .ogg, .opus, .aiff, .caf, .m4a)"
            )
        return os.path.abspath(path), found
    if is_audio(path.name):
        if path.is_file() or not path.exists():
            return "", {os.path.abspath(path)}
        raise files.FileError(f"{given} is neither a file nor a folder")
    return "", {
        each.path
        for each in sources.read(
            given, dataclasses.replace(reading, audio=root, whole=True), errors
        )
    }


def lenient() -> Errors:
    """Drop the rows of all errors. Read a truncated recording to its end."""
    return Errors(
        [
            "all=drop",
            *(f"{kind}={KEEP}" for kind in ("truncated-file", "stale-header", "opposite-channels")),
        ]
    )
