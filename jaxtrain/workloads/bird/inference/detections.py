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
    # [Hz] of the files that the encoder hears, for tables with frequencies
    band: tuple[float, float] = (0.0, 0.0)


def thresholds(given: str, names: Sequence[str], fitted: np.ndarray | None) -> np.ndarray:
    """Return each class's threshold: a number or table's, else ``fitted`` (a model's) or 0.5.

    Raises InferenceError.
    """
    path = files.expanded(given)
    if given and not path.is_file():
        return np.full(len(names), _threshold_for_all(given), np.float32)
    if fitted is None:
        bounds = np.full(len(names), THRESHOLD, np.float32)
    else:
        bounds = np.array(fitted, np.float32)
    if not given:
        return bounds
    table = tables.read(path)
    label_column = table.find("class", "label", "species")
    bound_column = table.find("threshold", "score", "min_conf")
    if not label_column or not bound_column:
        raise InferenceError(
            f"{path} has the columns {', '.join(table.columns)[:200]}; expected class and threshold"
        )
    for number, row in table.rows():
        where = f"{path}:{number}"
        text = row.get(bound_column, "")
        bound = number_of(text)
        if not 0 <= bound <= 1:
            raise InferenceError(f"{where}: the threshold is {text!r}; expected a number in [0, 1]")
        label = read_names([row.get(label_column, "")], names, where)
        bounds[label] = bound
    return bounds


def _threshold_for_all(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InferenceError(
            f"--threshold is {text!r}, which is neither a number nor a file"
        ) from None
    if not 0 <= value <= 1:
        raise InferenceError(f"--threshold is {text}; scores lie in [0, 1]")
    return value


def number_of(text: str) -> float:
    """Return the number that a field of a table holds, or nan."""
    try:
        value = values.number(text)
    except ValueError:
        value = None
    return float("nan") if value is None else value


def of_recording(scores: Iterable[Window], options: Options) -> list[Detection]:
    """Return the detections of a recording by time and class. Scores of nan count as silence."""
    detections: list[Detection] = []
    unfinished: dict[int, Detection] = {}  # by class: one that the next window may continue
    for start, end, row in scores:
        ended = [label for label, last in unfinished.items() if last.end < start - NEAR]
        for label in ended:
            detections.append(unfinished.pop(label))
        with np.errstate(invalid="ignore"):
            labels = np.flatnonzero(row >= options.thresholds).tolist()
        for label in labels:
            score = float(row[label])
            if not options.merge:
                detections.append(Detection(start, end, label, score))
            elif label in unfinished:
                last = unfinished[label]
                unfinished[label] = last._replace(end=end, score=max(last.score, score))
            else:
                unfinished[label] = Detection(start, end, label, score)
    detections += unfinished.values()
    shortest = options.min_duration - NEAR
    return sorted(detection for detection in detections if _duration(detection) >= shortest)


def _duration(detection: Detection) -> float:
    return detection.end - detection.start


def write(parts: Parts, options: Options, errors: Errors) -> dict[str, int]:
    """Write the tables from the scores, in place of earlier ones. Return counts.

    Raises InferenceError: scores that cannot be read; OSError.
    """
    out = parts.folder.parent
    counts = {"detections": 0, "unreadable": 0, "silent": 0}
    remove_partial(out)
    remove_partial(parts.folder)
    with contextlib.ExitStack() as stack:
        recordings_table = stack.enter_context(atomic_write.table(out / "recordings.csv"))
        recordings_table.writerow(RECORDINGS)
        detections_table = stack.enter_context(atomic_write.table(out / "detections.csv"))
        detections_table.writerow(BIRDNET)
        raven = stack.enter_context(atomic_write.folder(out / "raven", replace=True))
        audacity = stack.enter_context(atomic_write.folder(out / "audacity", replace=True))
        places = _Tables(detections_table, raven, audacity)
        unreadable: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        by_recording = itertools.groupby(_rows(parts, unreadable), key=lambda row: row[0])
        for number, rows in by_recording:
            recording = parts.windows.recordings[number]
            detections = of_recording((window for _, window in rows), options)
            n_unreadable = len(unreadable[number])
            first, behind_last = parts.windows.first[number : number + 2].tolist()
            n_windows = behind_last - first
            recordings_table.writerow(
                (
                    recording.name,
                    f"{recording.header.seconds:.6f}",
                    recording.clock(0.0),
                    n_windows,
                    n_unreadable,
                    len(detections),
                )
            )
            if n_unreadable:
                path = os.path.join(parts.windows.root, recording.name)
                reason = headers.fault(path, *unreadable[number][0])
                errors.add(
                    "unreadable-file",
                    f"{recording.name}: {n_unreadable} of its {n_windows} windows cannot be"
                    f" decoded{reason}",
                )
            counts["unreadable"] += n_unreadable
            counts["detections"] += len(detections)
            counts["silent"] += not detections
            if detections:
                _write_tables(parts, recording, detections, options.band, places)
    errors.save(out / "errors.csv", always=True)
    return {**counts, "errors": errors.serious}


def _rows(
    parts: Parts, unreadable: defaultdict[int, list[tuple[float, float]]]
) -> Iterator[tuple[int, Window]]:
    """Yield each window with its recording's number, part by part.

    ``unreadable`` takes start and end of those that cannot be decoded.
    """
    for part in range(parts.n):
        scores = parts.read(part)
        windows = parts.windows.between(*parts.between(part))
        for (recording, start, end), row in zip(windows, scores, strict=True):
            if np.isnan(row[:1]).any():
                unreadable[recording].append((start, end))
            yield recording, (start, end, row)


class _Tables(NamedTuple):
    """The places of a recording's detections."""

    detections: Any  # the writer of detections.csv
    raven: pathlib.Path
    audacity: pathlib.Path


def _write_tables(
    parts: Parts,
    recording: Recording,
    detections: Sequence[Detection],
    band: tuple[float, float],
    places: _Tables,
) -> None:
    path = os.path.join(parts.windows.root, recording.name)
    names = [_plain(name) for name in parts.names]
    low = f"{band[0]:.1f}"
    high = f"{min(band[1], recording.highest):.1f}"
    file_name = _plain(recording.name.rpartition("/")[2])
    selections = ["\t".join(RAVEN)]
    labels = []
    for number, detection in enumerate(detections, 1):
        name = names[detection.label]
        start = seconds(detection.start)
        end = seconds(detection.end)
        score = f"{detection.score:.4f}"
        clock = recording.clock(detection.start)
        places.detections.writerow((start, end, name, name, score, path, clock))
        times = (start, end, low, high)
        selection = (number, "Spectrogram 1", 1, *times, file_name, _plain(path), start, name)
        selections.append("\t".join(map(str, (*selection, score))))
        labels.append(f"{detection.start:.6f}\t{detection.end:.6f}\t{name}")
    _put_text(_place(places.raven, recording.name, ".selections.txt"), selections)
    _put_text(_place(places.audacity, recording.name, ".txt"), labels)


def _place(folder: pathlib.Path, name: str, ending: str) -> pathlib.Path:
    """Return a recording's file. A name that is too long is cut, and ends in a digest."""
    place = folder / f"{name}{ending}"
    encoded = os.fsencode(place.name)
    if len(encoded) <= atomic_write.NAME_MAX:
        return place
    digest = hashlib.blake2b(encoded, digest_size=4).hexdigest()
    ending = f"~{digest}{ending}"
    stem = encoded[: atomic_write.NAME_MAX - len(ending)].decode("utf-8", errors="ignore")
    return place.with_name(stem + ending)


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
    file_names = set(os.listdir(parts.folder))
    return all(parts.path(number).name in file_names for number in range(parts.n))
