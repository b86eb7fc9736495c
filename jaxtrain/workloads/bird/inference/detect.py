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
import itertools
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
        return number * self.rows, min(self.windows.n, (number + 1) * self.rows)

    def is_there(self, number: int) -> bool:
        start, stop = self.between(number)
        try:
            with files.regular(self.path(number)) as file:
                about = pq.read_metadata(file)
            return bool(
                about.num_rows == stop - start and about.num_columns == len(META) + len(self.names)
            )
        except (files.FileError, pa.ArrowException, OSError):
            return False

    def read(self, number: int) -> np.ndarray:
        """Return a part's scores, float32 [windows, classes], nan if bad. Raises InferenceError."""
        start, stop = self.between(number)
        try:
            with columnar.native(self.path(number)) as file:
                table = pq.read_table(file)
            if table.num_rows != stop - start or table.column_names != [*META, *self.names]:
                raise ValueError("it has other windows or classes")
            columns = [
                column.to_numpy(zero_copy_only=False) for column in table.columns[len(META) :]
            ]
            return (
                np.stack(columns, 1).astype(np.float32)
                if columns
                else np.zeros((table.num_rows, 0), np.float32)
            )
        except files.FileError as error:
            raise InferenceError(f"{error}; remove it, then rerun the same command") from error
        except (pa.ArrowException, ValueError, TypeError) as error:
            text = f"{self.path(number)} cannot be read: {files.reason(error)}"
            raise InferenceError(f"{text}; remove it, then rerun the same command") from error


def head_of(model: encoder.Model, names: Sequence[str] = ()) -> Head:
    """Return a run's own head, else its online probe. Raises InferenceError.

    ``names``: of its classes; empty: as the run, or else its data, name them.
    """
    c = model.config
    if model.head:
        kind, arrays, softmax = "linear", model.head, c.section("supervised").loss == "softmax"
    elif model.probe:
        kind, arrays, softmax = "probe", model.probe, not c.multilabel
    else:
        raise InferenceError(
            f"{model.name} has no head for classes: it is an export of the encoder alone, or was"
            " trained without labels; fit one with `jaxtrain fit`, and name it with --model"
        )
    n = int(arrays["b"].shape[0])
    found = tuple(names) or class_names(model)
    if len(found) != n:
        where = "--names lists" if names else "its data name" if found else "nothing names"
        raise InferenceError(
            f"{model.name} has {n} classes, and {where} {len(found) or 'them'}; list them in order,"
            " one a line: --names FILE"
        )
    return Head(
        kind, encoder.pool_of(model), "softmax" if softmax else "sigmoid", arrays, found, model.name
    )


def class_names(model: encoder.Model) -> tuple[str, ...]:
    """Return the names of a run's classes: its own, or those of its data, or empty."""
    if model.config.class_names:
        return tuple(model.config.class_names)
    section = model.run.get("data") or {}
    changes = {name: section[name] for name in ("label", "multilabel") if name in section}
    try:
        return tuple(
            spectrogram.dataset_info(encoder.data_config(model, **changes)).get("class_names", ())
        )
    except (DataError, ValueError, OSError):
        return ()


def read_classes(given: str) -> tuple[str, ...]:
    """Names of classes: those of a file, a class a line, or between commas. Raises DataError."""
    if files.expanded(given).is_file():
        return tuple(class_files.read(given).names)
    return tuple(name for name in (name.strip() for name in given.split(",")) if name)


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
    batch = -(-batch // len(jax.devices())) * len(jax.devices())
    rows = -(-PART // batch) * batch
    if twice := {*META} & {head.names[i] for i in chosen}:
        raise InferenceError(
            f"the class {min(twice)!r} has the name of a column of the scores; rename it: --names"
            " FILE"
        )
    parts = Parts(windows, rows, tuple(head.names[i] for i in chosen), out / "scores")
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
    longest = max(
        (each.name for each in windows.recordings), key=lambda name: len(os.fsencode(name))
    )
    if len(os.fsencode(os.path.abspath(out))) + len(os.fsencode(longest)) > MAX_PATH:
        raise InferenceError(
            f"--out {out} is too long a name for a folder with tables of {longest}; choose a"
            " shorter one"
        )
    if (out / ABOUT).exists():
        embed.refuse_other(out / ABOUT, made_of, "scores")
    elif out.is_dir() and any(not name.startswith(".") for name in os.listdir(out)):
        raise InferenceError(f"--out {out} holds other things than detections; name a new folder")
    return parts, made_of


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
    about = json.dumps({**made_of, "root": parts.windows.root}, indent=2, ensure_ascii=False) + "\n"
    with atomic_write.shared(out / ABOUT) as path:
        path.write_text(about)
    process, processes = share
    mine = range(parts.n * process // processes, parts.n * (process + 1) // processes)
    todo = [number for number in mine if not parts.is_there(number)]
    if not todo:
        return {"windows": 0, "seconds": 0.0, "waiting": 0.0}
    batch = made_of["batch"]
    # always the same name, by which the loader caches headers of large recordings
    folder = out / f"{INDEX}{process}"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        parts.windows.write(folder)
        data = dataclasses.replace(data, train=str(folder))
        setup = encoder.set_up(
            model, data, compute_of(head, chosen), dict(head.arrays), batch=batch
        )
        meter = _Meter(
            parts.windows, sum(len(range(*parts.between(number))) for number in todo), progress
        )
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
    # of neighbouring parts
    for _, run in itertools.groupby(enumerate(todo), key=lambda each: each[1] - each[0]):
        first, *_, last = [number for _, number in run] * 2
        loader = setup.loader
        if first != todo[0]:  # a stream that was closed reads no more
            split = encoder.of_split(data, "train")
            loader = spectrogram.make_loader(
                split, split="train", rows=setup.rows, seed=0, in_order=True
            )
        loader.seek(first * steps)
        stream, ends = setup._replace(loader=loader).stream(), parts.between(last)[1]
        found: list[np.ndarray] = []
        try:
            for position, values in setup.outputs(stream, last=-(-ends // batch)):
                stop = min(position * batch, ends)
                n = stop - (position - 1) * batch
                found.append(np.where(values["weight"][:n, None] > 0, values["scores"][:n], np.nan))
                meter.waited = stream.waited
                meter.add(n, stop)
                number = (position - 1) // steps
                if stop == parts.between(number)[1]:
                    yield number, np.concatenate(found)
                    found.clear()
        finally:
            stream.close()


def compute_of(head: Head, chosen: Sequence[int]) -> encoder.Compute:
    columns = None if list(chosen) == list(range(len(head.names))) else np.asarray(chosen, np.int32)

    def compute(
        weights: PyTree, pooled: encoder.Arrays, patches: jax.Array, batch: encoder.Arrays
    ) -> dict[str, jax.Array]:
        scores = heads.scores(head, weights, pooled, patches)
        return {
            "scores": scores if columns is None else scores[:, columns],
            "weight": batch["weight"],
        }

    return compute


def _write(parts: Parts, number: int, scores: np.ndarray) -> None:
    rows = list(parts.windows.between(*parts.between(number)))
    recordings = parts.windows.recordings
    used, codes = np.unique([k for k, _, _ in rows], return_inverse=True)
    names = pa.array([recordings[k].name for k in used], pa.string())
    clocks = [recordings[k].clock(start) or None for k, start, _ in rows]
    columns: dict[str, pa.Array] = {
        "file": pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), names),
        "start_time": pa.array([start for _, start, _ in rows], pa.float64()),
        "end_time": pa.array([end for _, _, end in rows], pa.float64()),
        "clock_time": pa.array(clocks, pa.string()),
    }
    missing = np.isnan(scores[:, :1]).any(1)
    for i, name in enumerate(parts.names):
        columns[name] = pa.array(np.ascontiguousarray(scores[:, i]), pa.float32(), mask=missing)
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
    def __init__(self, windows: Windows, todo: int, progress: Callable[[str], None]):
        self._windows, self._todo, self._progress = windows, todo, progress
        self._ratio = windows.total / windows.n  # seconds of recording that a window stands for
        self.began, self.done, self.waited = time.perf_counter(), 0, 0.0

    @property
    def waiting(self) -> float:
        return self.waited / max(time.perf_counter() - self.began, 1e-9)

    def add(self, n: int, stop: int) -> None:
        self.done += n
        seconds = max(time.perf_counter() - self.began, 1e-9)
        left = datetime.timedelta(seconds=round((self._todo - self.done) * seconds / self.done))
        name = self._windows.recordings[
            int(np.searchsorted(self._windows.first, stop - 1, side="right")) - 1
        ].name
        self._progress(
            f"{stop}/{self._windows.n} windows  {self.done * self._ratio / seconds:.0f} × real time"
            f"  {left} left  waiting for the loader {self.waiting:.0%}  {name}"
        )
