"""Scores of all windows of recordings of any length, written so that a command can be resumed.

The folder that `detect` writes (`jaxtrain.workloads.bird.inference.detections` makes the tables):

      scores/part-00000-of-00012.parquet    file, start_time, end_time, clock_time, and a column of
                                            float32 for each class
      detect.json                           their model, recordings and options

A part holds `PART` windows, and is complete or not there. It is a pure function of the run, the
recordings and the options. Processes share the parts among themselves, and need not know of each
other.
"""

import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxtrain.types import PyTree
from jaxtrain.workloads.bird.inference import InferenceError, embed, encoder, heads
from jaxtrain.workloads.bird.inference.heads import Head
from loaders.audio import spectrogram
from loaders.audio.recordings import class_names as class_files
from loaders.audio.recordings.windows import Windows
from loaders.base import DataError
from loaders.io import atomic_write, columnar, files

PART = 2048  # [windows] of a part, about: whole batches
ABOUT = "detect.json"
MAX_PATH = 4096 - 80  # [bytes] of a table's path, without the names that are added to it
INDEX = ".windows-"  # the folder of each process's index, while it works
META = ("file", "start_time", "end_time", "clock_time")


class Parts(NamedTuple):
    """The windows of recordings in parts, and the columns of their scores."""

    windows: Windows
    rows: int  # windows of a part, the last one excepted
    names: tuple[str, ...]  # of the columns
    folder: pathlib.Path

    @property
    def n(self) -> int:
        return -(-self.windows.n // self.rows)

    def path(self, number: int) -> pathlib.Path:
        return self.folder / f"part-{number:05d}-of-{self.n:05d}.parquet"

    def between(self, number: int) -> tuple[int, int]:
        """Its first window, and the one behind its last."""
        start = number * self.rows
        return start, min(self.windows.n, start + self.rows)

    def n_windows(self, number: int) -> int:
        start, stop = self.between(number)
        return stop - start

    def is_there(self, number: int) -> bool:
        try:
            with files.regular(self.path(number)) as file:
                metadata = pq.read_metadata(file)
        except (files.FileError, pa.ArrowException, OSError):
            return False
        has_rows = metadata.num_rows == self.n_windows(number)
        has_columns = metadata.num_columns == len(META) + len(self.names)
        return bool(has_rows and has_columns)

    def read(self, number: int) -> np.ndarray:
        """Return a part's scores, float32 [windows, classes], nan if bad. Raises InferenceError."""
        try:
            with columnar.native(self.path(number)) as file:
                table = pq.read_table(file)
            has_rows = table.num_rows == self.n_windows(number)
            if not has_rows or table.column_names != [*META, *self.names]:
                raise ValueError("it has other windows or classes")
            score_columns = table.columns[len(META) :]
            if not score_columns:
                return np.zeros((table.num_rows, 0), np.float32)
            scores = [column.to_numpy(zero_copy_only=False) for column in score_columns]
            return np.stack(scores, 1).astype(np.float32)
        except files.FileError as error:
            raise InferenceError(f"{error}; remove it, then rerun the same command") from error
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InferenceError(
                f"{self.path(number)} cannot be read: {files.reason(error)}; remove it, then rerun"
                " the same command"
            ) from error


def head_of(model: encoder.Model, names: Sequence[str] = ()) -> Head:
    """Return a run's own head, else its online probe. Raises InferenceError.

    ``names``: of its classes; empty: as the run, or else its data, name them.
    """
    config = model.config
    if model.head:
        kind = "linear"
        arrays = model.head
        is_softmax = config.section("supervised").loss == "softmax"
    elif model.probe:
        kind = "probe"
        arrays = model.probe
        is_softmax = not config.multilabel
    else:
        raise InferenceError(
            f"{model.name} has no head for classes: it is an export of the encoder alone, or was"
            " trained without labels; fit one with `jaxtrain fit`, and name it with --model"
        )
    n_classes = int(arrays["b"].shape[0])
    head_names = tuple(names) or class_names(model)
    if len(head_names) != n_classes:
        if names:
            source = "--names lists"
        elif head_names:
            source = "its data name"
        else:
            source = "nothing names"
        raise InferenceError(
            f"{model.name} has {n_classes} classes, and {source} {len(head_names) or 'them'}; list"
            " them in order, one a line: --names FILE"
        )
    return Head(
        kind=kind,
        pool=encoder.pool_of(model),
        scores="softmax" if is_softmax else "sigmoid",
        arrays=arrays,
        names=head_names,
        name=model.name,
    )


def class_names(model: encoder.Model) -> tuple[str, ...]:
    """Return the names of a run's classes: its own, or those of its data, or empty."""
    if model.config.class_names:
        return tuple(model.config.class_names)
    section = model.run.get("data") or {}
    changes = {name: section[name] for name in ("label", "multilabel") if name in section}
    try:
        info = spectrogram.dataset_info(encoder.data_config(model, **changes))
    except (DataError, ValueError, OSError):
        return ()
    return tuple(info.get("class_names", ()))


def read_classes(names: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of classes: those of a file, a class a line, or between commas. Raises DataError.

    A name with a comma is in quotes, or one of the ``known`` classes. Of these, a file may have
    synonyms, too.
    """
    if files.expanded(names).is_file():
        return tuple(class_files.read(names, known, synonyms=bool(known)).names)
    return tuple(class_files.split_names(names, known))


def prepare(
    model: encoder.Model,
    head: Head,
    windows: Windows,
    out: pathlib.Path,
    *,
    chosen: Sequence[int],
    batch: int,
) -> tuple[Parts, dict[str, Any]]:
    """Return the parts of the folder ``out``, and the origin of their scores.

    ``chosen``: numbers of the classes whose scores are kept. Raises InferenceError: it holds other
    things, or scores that were made of something else.
    """
    n_devices = len(jax.devices())
    batch = -(-batch // n_devices) * n_devices
    rows = -(-PART // batch) * batch
    names = tuple(head.names[i] for i in chosen)
    if reserved := {*META} & {*names}:
        raise InferenceError(
            f"the class {min(reserved)!r} has the name of a column of the scores; rename it:"
            " --names FILE"
        )
    parts = Parts(windows, rows, names, out / "scores")
    made_of = {
        "encoder": model.digest,
        "head": head.digest,
        "recordings": windows.digest,
        "windows": windows.n,
        "seconds": windows.seconds,
        "hop": windows.hop,
        "batch": batch,
        "part": rows,
        "classes": list(parts.names),
    }
    if out.exists() and not out.is_dir():
        raise InferenceError(f"--out {out} is not a folder")
    longest = max([recording.name for recording in windows.recordings], key=_n_bytes)
    if _n_bytes(os.path.abspath(out)) + _n_bytes(longest) > MAX_PATH:
        raise InferenceError(
            f"--out {out} is too long a name for a folder with tables of {longest}; choose a"
            " shorter one"
        )
    if (out / ABOUT).exists():
        embed.refuse_other(out / ABOUT, made_of, "scores")
    elif out.is_dir() and any(not name.startswith(".") for name in os.listdir(out)):
        raise InferenceError(f"--out {out} holds other things than detections; name a new folder")
    return parts, made_of


def _n_bytes(path: str) -> int:
    return len(os.fsencode(path))


def score(
    model: encoder.Model,
    head: Head,
    data: spectrogram.Config,
    parts: Parts,
    made_of: Mapping[str, Any],
    *,
    chosen: Sequence[int],
    share: tuple[int, int] = (0, 1),
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Write the parts that are missing of this process's ``share``, (number, of how many).

    Returns windows, seconds and the share spent waiting. Raises DataError, OSError.
    """
    out = parts.folder.parent
    parts.folder.mkdir(parents=True, exist_ok=True)
    description = {**made_of, "root": parts.windows.root}
    with atomic_write.shared(out / ABOUT) as path:
        path.write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    process, processes = share
    first_part = parts.n * process // processes
    end_part = parts.n * (process + 1) // processes
    todo = [number for number in range(first_part, end_part) if not parts.is_there(number)]
    if not todo:
        return {"windows": 0, "seconds": 0.0, "waiting": 0.0}
    batch = made_of["batch"]
    # always the same name, by which the loader caches headers of large recordings
    folder = out / f"{INDEX}{process}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        parts.windows.write(folder)
        data = dataclasses.replace(data, train=str(folder))
        compute = compute_of(head, chosen)
        setup = encoder.set_up(model, data, compute, dict(head.arrays), batch=batch)
        n_windows = sum(parts.n_windows(number) for number in todo)
        meter = _Meter(parts.windows, n_windows, progress)
        with concurrent.futures.ThreadPoolExecutor(1) as writer:
            writing: concurrent.futures.Future[Any] | None = None
            for number, scores in _computed(setup, data, parts, todo, batch, meter):
                if writing:
                    writing.result()
                writing = writer.submit(_write, parts, number, scores)
            if writing:
                writing.result()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "windows": meter.done,
        "seconds": time.perf_counter() - meter.began,
        "waiting": meter.waiting,
    }


def _computed(
    setup: encoder.Setup,
    data: spectrogram.Config,
    parts: Parts,
    todo: Sequence[int],
    batch: int,
    meter: "_Meter",
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the scores of parts, in their order."""
    steps = parts.rows // batch
    for run in _runs(todo):
        loader = setup.loader
        if run[0] != todo[0]:  # a stream that was closed reads no more
            split = encoder.of_split(data, "train")
            loader = spectrogram.make_loader(
                split, split="train", rows=setup.rows, seed=0, in_order=True
            )
        loader.seek(run[0] * steps)
        stream = setup._replace(loader=loader).stream()
        _, end = parts.between(run[-1])
        batches: list[np.ndarray] = []
        try:
            for position, values in setup.outputs(stream, last=-(-end // batch)):
                stop = min(position * batch, end)
                n_valid = stop - (position - 1) * batch
                is_decoded = values["weight"][:n_valid, None] > 0
                scores = values["scores"][:n_valid]
                batches.append(np.where(is_decoded, scores, np.nan))
                meter.waited = stream.waited
                meter.add(n_valid, stop)
                number = (position - 1) // steps
                _, end_of_part = parts.between(number)
                if stop == end_of_part:
                    yield number, np.concatenate(batches)
                    batches.clear()
        finally:
            stream.close()


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Split ascending numbers into runs of neighbours."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def compute_of(head: Head, chosen: Sequence[int]) -> encoder.Compute:
    columns = np.asarray(chosen, np.int32)
    has_all_classes = list(chosen) == list(range(len(head.names)))

    def compute(
        weights: PyTree, pooled: encoder.Arrays, patches: jax.Array, batch: encoder.Arrays
    ) -> dict[str, jax.Array]:
        scores = heads.scores(head, weights, pooled, patches)
        if not has_all_classes:
            scores = scores[:, columns]
        return {"scores": scores, "weight": batch["weight"]}

    return compute


def _write(parts: Parts, number: int, scores: np.ndarray) -> None:
    recordings = parts.windows.recordings
    recording_of, starts, ends, clocks = [], [], [], []
    for recording, start, end in parts.windows.between(*parts.between(number)):
        recording_of.append(recording)
        starts.append(start)
        ends.append(end)
        clocks.append(recordings[recording].clock(start) or None)
    used_recordings, codes = np.unique(recording_of, return_inverse=True)
    names = [recordings[recording].name for recording in used_recordings]
    files_column = pa.DictionaryArray.from_arrays(
        pa.array(codes, pa.int32()), pa.array(names, pa.string())
    )
    columns: dict[str, pa.Array] = {
        "file": files_column,
        "start_time": pa.array(starts, pa.float64()),
        "end_time": pa.array(ends, pa.float64()),
        "clock_time": pa.array(clocks, pa.string()),
    }
    is_unreadable = np.isnan(scores[:, :1]).any(1)
    for i, name in enumerate(parts.names):
        values = np.ascontiguousarray(scores[:, i])
        columns[name] = pa.array(values, pa.float32(), mask=is_unreadable)
    with atomic_write.shared(parts.path(number)) as path:
        pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=["file"])


def remove_partial(folder: pathlib.Path) -> None:
    """Remove unfinished files of killed processes, when no other process can be writing any."""
    for path in folder.iterdir():
        if path.name.startswith(INDEX):
            shutil.rmtree(path, ignore_errors=True)
        elif re.fullmatch(r"\..+\.\d+", path.name) and path.is_file():
            path.unlink(missing_ok=True)


class _Meter:
    """Counts the windows that are scored, and reports the speed."""

    def __init__(self, windows: Windows, todo: int, progress: Callable[[str], None]):
        self._windows = windows
        self._todo = todo
        self._progress = progress
        self._ratio = windows.total / windows.n  # seconds of recording that a window stands for
        self.began = time.perf_counter()
        self.done = 0
        self.waited = 0.0

    @property
    def waiting(self) -> float:
        return self.waited / max(time.perf_counter() - self.began, 1e-9)

    def add(self, n: int, stop: int) -> None:
        """Report ``n`` more windows, of which ``stop`` is behind the last."""
        self.done += n
        seconds = max(time.perf_counter() - self.began, 1e-9)
        seconds_left = (self._todo - self.done) * seconds / self.done
        left = datetime.timedelta(seconds=round(seconds_left))
        speed = self.done * self._ratio / seconds
        recording = np.searchsorted(self._windows.first, stop - 1, side="right") - 1
        name = self._windows.recordings[int(recording)].name
        self._progress(
            f"{stop}/{self._windows.n} windows  {speed:.0f} × real time"
            f"  {left} left  waiting for the loader {self.waiting:.0%}  {name}"
        )
