"""What a run leaves for people and programs to read: metric records, pictures, samples.

workdir/metrics.jsonl has one JSON object per line: ``{"step": 10, "split": "train", "loss": 2.3, …}``. Steps rise within a
split; when a run resumes from an earlier step, the records after it are dropped first, so that no step is there twice.
"""

import dataclasses
import errno
import json
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from jaxtrain import jsonl
from jaxtrain.config import Config
from jaxtrain.owner import WorkdirError

log = logging.getLogger("jaxtrain")


class Writer(Protocol):
    def write(self, step: int, split: str, record: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlWriter:
    """workdir/metrics.jsonl, continued after ``step``. Lines that are no records are moved to metrics.jsonl.odd.

    Raises WorkdirError: something else than a file has that name; when writing and closing, the file is not there any more.
    """

    def __init__(self, workdir: str, step: int):
        self._path = path = pathlib.Path(workdir) / "metrics.jsonl"
        records, odd = jsonl.read(path, jsonl.record_problem)
        kept = [line for record, line in records if record["step"] <= step]
        if odd or len(kept) < len(records):
            jsonl.rewrite(path, kept, odd)
        self._file = jsonl.opened(path)
        self._waiting: list[bytes] = []
        self._warned = False

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, "split": split, **{k: _rounded(v) for k, v in record.items()}}) + "\n"
        self._waiting.append(line.encode())
        self._flush()

    def _flush(self) -> None:
        """Writes what waits; on a disk that is full, keeps it for the next record. A line is written whole or not at all."""
        if not jsonl.is_there(self._path, self._file.fileno()):
            raise WorkdirError(
                f"{self._path} was deleted or moved while the run wrote to it, and its records with it; rerun the same command "
                "to resume from the newest checkpoint, if there is one still"
            )
        try:
            while self._waiting:
                end = os.fstat(self._file.fileno()).st_size
                if self._file.write(self._waiting[0]) != len(self._waiting[0]):
                    self._file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting.pop(0)
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.error("%s cannot be written (%s); records are kept in memory until it can", self._path, error.strerror)
            self._warned = True

    def close(self) -> None:
        try:
            self._flush()
            if self._waiting:
                log.error("%d records of %s were never written", len(self._waiting), self._path)
        finally:
            self._file.close()


class TensorboardWriter:
    """workdir/tensorboard. Records after ``step`` are marked as purged, as TensorBoard does for a restarted run."""

    def __init__(self, workdir: str, step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(pathlib.Path(workdir) / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        for name, value in record.items():
            self._writer.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run whose id is kept in workdir/wandb_id, so that a resumed run continues it."""

    def __init__(self, workdir: str, project: str, config: Mapping[str, Any]):
        import wandb

        path = pathlib.Path(workdir) / "wandb_id"
        if not path.exists():
            path.write_text(wandb.util.generate_id())
        self._run = wandb.init(project=project, id=path.read_text(), resume="allow", dir=workdir, config=dict(config))

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        if step >= self._run.step:  # the service keeps steps that rise; a replayed one is already there
            self._run.log({f"{split}/{name}": value for name, value in record.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def make_writers(config: Config, step: int) -> list[Writer]:
    """The writers that a config asks for, continued after ``step``."""
    writers: list[Writer] = [JsonlWriter(config.workdir, step)]
    if config.metrics.tensorboard:
        writers.append(TensorboardWriter(config.workdir, step))
    if config.metrics.wandb_project:
        writers.append(WandbWriter(config.workdir, config.metrics.wandb_project, dataclasses.asdict(config)))
    return writers


def write_pictures(
    folder: str | os.PathLike, pictures: Mapping[str, np.typing.ArrayLike], *, limit: int = 8
) -> list[pathlib.Path]:
    """Writes [n, height, width] arrays in 0..1 as grey PNG files, low rows at the bottom. Returns their paths."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, images in pictures.items():
        for i, image in enumerate(np.asarray(images)[:limit]):
            pixels = (np.clip(np.nan_to_num(image), 0, 1) * 255).astype(np.uint8)[::-1]
            paths.append(folder / f"{name}_{i}.png")
            Image.fromarray(pixels).save(paths[-1])
    return paths


def write_samples(workdir: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
    """workdir/samples.jsonl: one JSON object per line, {"step": 500, …}. A step that is written again takes its own place."""
    path = pathlib.Path(workdir) / "samples.jsonl"
    records, odd = jsonl.read(path, jsonl.step_problem)
    lines = [line for record, line in records if record["step"] < step]
    lines += [json.dumps({"step": step, **sample}, ensure_ascii=False).encode() for sample in samples]
    jsonl.rewrite(path, lines, odd)


def left_behind(config: Config) -> list[tuple[str, str]]:
    """What a run has left for a person to look at: (path, what it is), of what is there."""
    workdir = pathlib.Path(config.workdir)
    saved = config.checkpoint.folder or str(workdir / "checkpoints")
    found = [(saved, "state and parameters" if config.checkpoint.final == "resumable" else "parameters")]
    for name, what in (
        ("metrics.jsonl", "records of training and evaluations, a line each"),
        ("samples.jsonl", "what the model wrote at each evaluation"),
        ("pictures", "what the model saw"),
        ("tensorboard", "the records, for TensorBoard"),
        ("traces", "traces of steps, for Perfetto, XProf and jaxtrain report"),
    ):
        path = workdir / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            found.append((str(path), what))
    return found


def is_written(workdir: str, step: int, split: str) -> bool:
    """Whether metrics.jsonl holds this record."""
    records, _ = jsonl.read(pathlib.Path(workdir) / "metrics.jsonl", jsonl.record_problem)
    return any(record["step"] == step and record["split"] == split for record, _ in records)


def _rounded(value: float) -> float | None:
    return float(f"{value:.9g}") if math.isfinite(value) else None  # nan and inf are no JSON; 9 digits hold a float32
