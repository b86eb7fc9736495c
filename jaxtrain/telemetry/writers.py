"""The writers of a run: metric records, pictures, generations.

workdir/metrics.jsonl has one JSON object per line: ``{"step": 10, "split": "train", "loss": 2.3,
…}``. Steps rise within a split. If a run resumes from an earlier step, the records after it are
dropped first, so that no step is there twice.
"""

import errno
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from jaxtrain.config import Config
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import jsonl

log = logging.getLogger("jaxtrain")

FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk that is full, or of a quota that is used up
GENERATIONS = "generations.jsonl"  # generations of the model at each evaluation
MAX_PICTURES = 8  # of a name
# The files and folders of a workdir, for a person.
DESCRIPTIONS = {
    "metrics.jsonl": "records of training and evaluations, a line each",
    GENERATIONS: "generations of the model at each evaluation",
    "classes.jsonl": "rows and answers by class at each evaluation",
    "pictures": "inputs of the model",
    "tensorboard": "the records, for TensorBoard",
    "traces": "traces of steps, for Perfetto, XProf and jaxtrain report",
}


class Writer(Protocol):
    """Takes records. The workdir has the pictures and generations that a writer does not take."""

    def resume(self, step: int) -> None:
        """Note the step after which records follow. Later ones, which it may have, are void."""
        return None

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None: ...

    def pictures(self, step: int, pictures: Mapping[str, np.typing.ArrayLike]) -> None:
        """Take arrays [n, height, width] in 0..1, low rows at the bottom. Step 0 is the start."""
        return None

    def generations(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        return None

    def close(self) -> None: ...


class JsonlWriter(Writer):
    """A file of records in the workdir, continued after ``step``.

    Lines that are no records are moved to its neighbour .odd.

    Raises WorkdirError: something else than a file has that name, or the file is gone when it is
    written or closed.
    """

    def __init__(
        self,
        workdir: str,
        step: int,
        name: str = "metrics.jsonl",
        problem: jsonl.Check = jsonl.record_problem,
    ):
        path = pathlib.Path(workdir) / name
        self._path = path
        records, odd = jsonl.read(path, problem)
        lines = [line for record, line in records if record["step"] <= step]
        if odd or len(lines) < len(records):
            jsonl.rewrite(path, lines, odd)
        self._file = jsonl.Appended(path)

    def write(self, step: int, split: str, record: Mapping[str, Any]) -> None:
        values = {name: _rounded(value) for name, value in record.items()}
        line = json.dumps({"step": step, "split": split, **values})
        self._confirm()
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def flush(self) -> bool:
        """Try again to write waiting lines. Return whether all are written."""
        self._file.flush()
        return not self._file.waiting

    def _confirm(self) -> None:
        if not jsonl.is_there(self._path, self._file.file.fileno()):
            raise WorkdirError(
                f"{self._path} was deleted or moved while the run wrote to it,"
                " and its records with it; rerun the same command"
                " to resume from the newest checkpoint, if there is one still"
            )

    def close(self) -> None:
        try:
            self._confirm()
        finally:
            self._file.close()


def write_pictures(
    folder: str | os.PathLike[str],
    pictures: Mapping[str, np.typing.ArrayLike],
    *,
    limit: int = MAX_PICTURES,
) -> list[pathlib.Path]:
    """Write [n, height, width] arrays in 0..1 as grey PNG files, low rows at the bottom.

    Return their paths. The folder is made only if its parent exists: a deleted workdir must not
    come back.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    paths = []
    for name, images in pictures.items():
        for i, image in enumerate(pixels(images)[:limit]):
            path = folder / f"{name}_{i}.png"
            Image.fromarray(image).save(path)
            paths.append(path)
    return paths


def pixels(images: np.typing.ArrayLike) -> np.ndarray:
    """Grey pixels, the top row first, of arrays in 0..1."""
    values = np.clip(np.nan_to_num(np.asarray(images)), 0, 1)
    return np.asarray(values * 255, np.uint8)[:, ::-1]


def write_lines(workdir: str, name: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines {"step": 500, …} of the workdir. A step written again takes its own place."""
    path = pathlib.Path(workdir) / name
    records, odd = jsonl.read(path, jsonl.step_problem)
    content = [line for record, line in records if record["step"] < step]
    for line in lines:
        content.append(json.dumps({"step": step, **line}, ensure_ascii=False).encode())
    jsonl.rewrite(path, content, odd)


class Lines:
    """Lines of evaluations by `write_lines`. What a full disk refuses waits in memory."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._waiting: list[tuple[str, int, Sequence[Mapping[str, Any]]]] = []
        self._warned = False

    def write(self, name: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        self._waiting.append((name, step, lines))
        self.flush()

    def flush(self) -> bool:
        """Try again to write waiting lines. Return whether all are written.

        Raises WorkdirError as `jsonl.read`.
        """
        try:
            while self._waiting:
                write_lines(self._workdir, *self._waiting[0])
                self._waiting.pop(0)
            self._warned = False
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._warned:
                path = os.path.join(self._workdir, self._waiting[0][0])
                log.error(
                    "%s cannot be written (%s); its lines are kept in memory until it can",
                    path,
                    error.strerror,
                )
            self._warned = True
        return not self._waiting

    def close(self) -> None:
        self.flush()
        for name, step, _ in self._waiting:
            log.error(
                "the results of the evaluation after step %d were never written into %s", step, name
            )


def write_schedule(
    workdir: str, steps: int, rate: Callable[[np.ndarray], np.ndarray | None]
) -> None:
    """Write workdir/schedule.json: learning rates of some updates, unless ``rate`` gives None."""
    step = np.unique(np.linspace(0, steps, 401).astype(int))
    rates = rate(step)
    if rates is None:
        return
    content = {"step": step.tolist(), "lr": [_rounded(float(x)) for x in rates]}
    (pathlib.Path(workdir) / "schedule.json").write_text(json.dumps(content) + "\n")


def left_behind(config: Config) -> list[tuple[str, str]]:
    """List the existing files of a run for a person to look at: (path, description)."""
    workdir = pathlib.Path(config.workdir)
    checkpoints = config.checkpoint.folder or str(workdir / "checkpoints")
    is_resumable = config.checkpoint.final == "resumable"
    files = [(checkpoints, "state and parameters" if is_resumable else "parameters")]
    for name, description in DESCRIPTIONS.items():
        path = workdir / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            files.append((str(path), description))
    return files


def reached(workdir: str) -> dict[str, int]:
    """Split -> the last step that metrics.jsonl holds, which a tracker has, too."""
    records, _ = jsonl.read(pathlib.Path(workdir) / "metrics.jsonl", jsonl.record_problem)
    return {record["split"]: record["step"] for record, _ in records}


def is_written(workdir: str, step: int, split: str) -> bool:
    records, _ = jsonl.read(pathlib.Path(workdir) / "metrics.jsonl", jsonl.record_problem)
    return any(record["step"] == step and record["split"] == split for record, _ in records)


def _rounded(value: Any) -> Any:
    if not isinstance(value, float | np.floating):  # of a digest, which has all its digits
        return value
    # nan and inf are no JSON; 9 digits hold a float32
    return float(f"{value:.9g}") if math.isfinite(value) else None
