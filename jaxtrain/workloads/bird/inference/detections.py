"""Scores to detections and the tables of `commands.detect`, a pure function of both and options."""

import contextlib
import hashlib
import itertools
import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.workloads.bird.inference import InferenceError
from jaxtrain.workloads.bird.inference.detect import Parts, remove_partial
from jaxtrain.workloads.bird.inference.heads import read_names
from loaders.audio.recordings import headers, tables, values
from loaders.audio.recordings.annotations import Errors
from loaders.audio.recordings.windows import Recording
from loaders.io import atomic_write, files

THRESHOLD = 0.5
BIRDNET = ("Start (s)", "End (s)", "Scientific name", "Common name", "Confidence", "File", "Clock")
RAVEN = (
    "Selection",
    "View",
    "Channel",
    "Begin Time (s)",
    "End Time (s)",
    "Low Freq (Hz)",
    "High Freq (Hz)",
    "Begin File",
    "Begin Path",
    "File Offset (s)",
    "Annotation",
    "Score",
)
RECORDINGS = ("file", "seconds", "clock", "windows", "unreadable_windows", "detections")
NEAR = 1e-6  # [s] by which a window may begin behind the end of its neighbour


Window = tuple[float, float, np.ndarray]  # its start and end [s], and its scores [classes]


class Detection(NamedTuple):
    """A class that is heard in neighbouring windows."""

    start: float  # [s]
    end: float
    label: int  # the column of its scores
    score: float  # the highest of its windows


class Options(NamedTuple):
    """The rules for a detection, and how it is written."""

    thresholds: np.ndarray  # float32 [classes]: a score from which on a class is there
    merge: bool = True  # neighbouring windows are one detection
    min_duration: float = 0.0  # [s] of a detection, at least
    # [Hz] that the encoder hears, for tables with frequencies
    band: tuple[float, float] = (0.0, 0.0)


def thresholds(given: str, names: Sequence[str], fitted: np.ndarray | None) -> np.ndarray:
    """Return each class's threshold: a number or table's, else ``fitted`` (a model's) or 0.5.

    Raises InferenceError.
    """
    found = (
        np.full(len(names), THRESHOLD, np.float32)
        if fitted is None
        else np.array(fitted, np.float32)
    )
    if not given:
        return found
    path = files.expanded(given)
    if not path.is_file():
        try:
            value = float(given)
        except ValueError:
            raise InferenceError(
                f"--threshold is {given!r}, which is neither a number nor a file"
            ) from None
        if not 0 <= value <= 1:
            raise InferenceError(f"--threshold is {given}; scores lie in [0, 1]")
        return np.full(len(names), value, np.float32)
    table = tables.read(path)
    label, column = (
        table.find("class", "label", "species"),
        table.find("threshold", "score", "min_conf"),
    )
    if not label or not column:
        raise InferenceError(
            f"{path} has the columns {', '.join(table.columns)[:200]}; expected class and threshold"
        )
    for number, row in table.rows():
        where = f"{path}:{number}"
        bound = number_of(row.get(column, ""))
        if not 0 <= bound <= 1:
            raise InferenceError(
                f"{where}: the threshold is {row.get(column, '')!r}; expected a number in [0, 1]"
            )
        found[read_names([row.get(label, "")], names, where)] = bound
    return found


def number_of(text: str) -> float:
    """Return the number that a field of a table holds, or nan."""
    try:
        value = values.number(text)
    except ValueError:
        value = None
    return float("nan") if value is None else value


def of_recording(scores: Iterable[Window], options: Options) -> list[Detection]:
    """Return the detections of a recording by time and class. Scores of nan count as silence."""
    found: list[Detection] = []
    heard: dict[int, Detection] = {}
    for start, end, row in scores:
        for label in [label for label, each in heard.items() if each.end < start - NEAR]:
            found.append(heard.pop(label))
        with np.errstate(invalid="ignore"):
            hits = np.flatnonzero(row >= options.thresholds).tolist()
        for label in hits:
            each = Detection(start, end, label, float(row[label]))
            if not options.merge:
                found.append(each)
                continue
            before = heard.get(label)
            heard[label] = (
                each
                if before is None
                else before._replace(end=end, score=max(before.score, each.score))
            )
    found += heard.values()
    return sorted(each for each in found if each.end - each.start >= options.min_duration - NEAR)


def write(parts: Parts, options: Options, errors: Errors) -> dict[str, int]:
    """Write the tables from the scores, in place of earlier ones. Return counts.

    Raises InferenceError: scores that cannot be read; OSError.
    """
    out, counts = parts.folder.parent, {"detections": 0, "unreadable": 0, "silent": 0}
    remove_partial(out)
    remove_partial(parts.folder)
    headings = {"recordings": RECORDINGS, "detections": BIRDNET}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(atomic_write.table(out / f"{name}.csv")) for name in headings
        }
        for name, columns in headings.items():
            writers[name].writerow(columns)
        folders = {
            name: stack.enter_context(atomic_write.folder(out / name, replace=True))
            for name in ("raven", "audacity")
        }
        unreadable: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for k, rows in itertools.groupby(_rows(parts, unreadable), key=lambda row: row[0]):
            recording = parts.windows.recordings[k]
            found = of_recording((window for _, window in rows), options)
            missing = len(unreadable[k])
            n = int(parts.windows.first[k + 1] - parts.windows.first[k])
            about = (
                f"{recording.header.seconds:.6f}",
                recording.clock(0.0),
                n,
                missing,
                len(found),
            )
            writers["recordings"].writerow((recording.name, *about))
            if missing:
                why = headers.fault(
                    os.path.join(parts.windows.root, recording.name), *unreadable[k][0]
                )
                errors.add(
                    "unreadable-file",
                    f"{recording.name}: {missing} of its {n} windows cannot be decoded{why}",
                )
            counts["unreadable"] += missing
            counts["detections"] += len(found)
            counts["silent"] += not found
            if found:
                _write_tables(parts, recording, found, options.band, folders, writers)
    errors.save(out / "errors.csv", always=True)
    return {**counts, "errors": errors.serious}


def _rows(
    parts: Parts, missing: defaultdict[int, list[tuple[float, float]]]
) -> Iterator[tuple[int, Window]]:
    """Yield each window with its recording's number, part by part. ``missing`` takes bad ones."""
    for number in range(parts.n):
        scores = parts.read(number)
        for (k, start, end), row in zip(
            parts.windows.between(*parts.between(number)), scores, strict=True
        ):
            if np.isnan(row[:1]).any():
                missing[k].append((start, end))
            yield k, (start, end, row)


def _write_tables(
    parts: Parts,
    recording: Recording,
    found: Sequence[Detection],
    band: tuple[float, float],
    folders: dict[str, pathlib.Path],
    writers: dict[str, Any],
) -> None:
    path = os.path.join(parts.windows.root, recording.name)
    names = [_plain(name) for name in parts.names]
    for each in found:
        name, times = names[each.label], (seconds(each.start), seconds(each.end))
        writers["detections"].writerow(
            (*times, name, name, f"{each.score:.4f}", path, recording.clock(each.start))
        )
    lines = ["\t".join(RAVEN)]
    low, high = (f"{value:.1f}" for value in band)
    last = _plain(recording.name.rpartition("/")[2])
    for number, each in enumerate(found, 1):
        start, end = seconds(each.start), seconds(each.end)
        row = (
            number,
            "Spectrogram 1",
            1,
            start,
            end,
            low,
            high,
            last,
            _plain(path),
            start,
            names[each.label],
        )
        lines.append("\t".join(map(str, (*row, f"{each.score:.4f}"))))
    _put_text(_place(folders["raven"], recording.name, ".selections.txt"), lines)
    labels = [f"{each.start:.6f}\t{each.end:.6f}\t{names[each.label]}" for each in found]
    _put_text(_place(folders["audacity"], recording.name, ".txt"), labels)


def _place(folder: pathlib.Path, name: str, ending: str) -> pathlib.Path:
    """Return a recording's file. A name that is too long is cut, and ends in a digest."""
    place = folder / f"{name}{ending}"
    if len(os.fsencode(place.name)) <= atomic_write.NAME_MAX:
        return place
    ending = f"~{hashlib.blake2b(os.fsencode(place.name), digest_size=4).hexdigest()}{ending}"
    kept = os.fsencode(place.name)[: atomic_write.NAME_MAX - len(ending)].decode(
        "utf-8", errors="ignore"
    )
    return place.with_name(kept + ending)


def _put_text(path: pathlib.Path, lines: Sequence[str]) -> None:
    with atomic_write.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")


def _plain(text: str) -> str:
    """Return a name that keeps to its column."""
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)


def seconds(value: float) -> str:
    """Format a time, to the microsecond."""
    return repr(round(value, 6))


def complete(parts: Parts) -> bool:
    """Whether all parts are there, this process's and the others'."""
    there = set(os.listdir(parts.folder))
    return all(parts.path(number).name in there for number in range(parts.n))
