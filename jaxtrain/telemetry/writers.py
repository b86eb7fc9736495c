"""The writers of a run: metric records, pictures, generations.

workdir/metrics.jsonl has one JSON object per line: ``{"step": 10, "split": "train", "loss": 2.3,
…}``. Steps rise within a split. If a run resumes from an earlier step, the records after it are
dropped first, so that no step is there twice.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from jaxtrain.config import Config, ConfigError
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import jsonl
from loaders.io.checks import first_line, flatten

log = logging.getLogger("jaxtrain")

FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk that is full, or of a quota that is used up
GENERATIONS = "generations.jsonl"  # generations of the model at each evaluation


class Writer(Protocol):
    """Takes records. The workdir has the pictures and generations that a writer does not take."""

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

    ``reached``: split -> the last step that was written before, also after ``step``. Raises
    WorkdirError: something else than a file has that name, or the file is gone when it is written
    or closed.
    """

    def __init__(
        self,
        workdir: str,
        step: int,
        name: str = "metrics.jsonl",
        problem: jsonl.Check = jsonl.record_problem,
    ):
        self._path = path = pathlib.Path(workdir) / name
        records, odd = jsonl.read(path, problem)
        self.reached = {record.get("split", ""): record["step"] for record, _ in records}
        kept = [line for record, line in records if record["step"] <= step]
        if odd or len(kept) < len(records):
            jsonl.rewrite(path, kept, odd)
        self._file = jsonl.Appended(path)

    def write(self, step: int, split: str, record: Mapping[str, Any]) -> None:
        line = (
            json.dumps(
                {"step": step, "split": split, **{k: _rounded(v) for k, v in record.items()}}
            )
            + "\n"
        )
        self._confirm()
        self._file.write(line.encode())
        self._file.flush()

    def _confirm(self) -> None:
        if not jsonl.is_there(self._path, self._file.file.fileno()):
            raise WorkdirError(
                f"{self._path} was deleted or moved while the run wrote to it, and its records with"
                " it; rerun the same command to resume from the newest checkpoint, if there is one"
                " still"
            )

    def close(self) -> None:
        try:
            self._confirm()
        finally:
            self._file.close()


class TensorboardWriter(Writer):
    """workdir/tensorboard. Records after ``step`` are marked as purged, as for a restarted run.

    tensorboardX writes them at once, into a file that waits for room (`jsonl.Appended`). Its
    SummaryWriter would write in a thread, which ends for good at the first error.
    """

    def __init__(self, workdir: str, step: int):
        from tensorboardX import event_file_writer, record_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event, self._summary = Event, summary
        folder = pathlib.Path(workdir) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        record_writer.register_writer_factory("appended", jsonl.Appended)
        self._events = event_file_writer.EventsWriter(
            f"appended:{folder}/events", f".{os.getpid()}"
        )
        if step:
            self._events.write_event(
                Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
            )
        self._events.flush()

    def _add(self, step: int, summaries: Iterable[Any]) -> None:
        """Write them in one call: a file on a shared disk costs by the call."""
        for summary in summaries:
            self._events.write_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._events.flush()

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        self._add(
            step, (self._summary.scalar(f"{split}/{name}", value) for name, value in record.items())
        )

    def pictures(self, step: int, pictures: Mapping[str, np.typing.ArrayLike]) -> None:
        named = (
            (f"{name}/{i}", one)
            for name, images in pictures.items()
            for i, one in enumerate(pixels(images)[:8])
        )
        self._add(step, (self._summary.image(name, one, dataformats="HW") for name, one in named))

    def generations(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        texts = []
        for generation in generations[:32]:
            lines = (f"{name}: {value}" for name, value in generation.items())
            # Indented: TensorBoard renders Markdown, and a generation is plain text.
            texts.append("\n".join(f"    {x}" for line in lines for x in line.splitlines()))
        self._add(
            step, (self._summary.text(f"generations/{i}", text) for i, text in enumerate(texts))
        )

    def close(self) -> None:
        self._events.close()


class WandbWriter(Writer):
    """A W&B run that resumes by workdir/wandb_id."""

    def __init__(self, workdir: str, project: str, config: Mapping[str, Any]):
        import wandb

        path = pathlib.Path(workdir) / "wandb_id"
        if not path.exists():
            path.write_text(wandb.util.generate_id())
        self._run = wandb.init(
            project=project,
            id=path.read_text(),
            resume="allow",
            dir=workdir,
            config=dict(config),
        )

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        # the service takes rising steps only, and has a replayed one already
        if step >= self._run.step:
            self._run.log({f"{split}/{name}": value for name, value in record.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowWriter(Writer):
    """An MLflow run whose id is kept in workdir/mlflow_id, at MLFLOW_TRACKING_URI.

    It is sent in the background.

    ``reached``: split -> the last step that was sent before. Steps up to it are not sent again.
    """

    def __init__(
        self, workdir: str, experiment: str, config: Mapping[str, Any], reached: Mapping[str, int]
    ):
        import mlflow

        self._mlflow, self._reached, path = (
            mlflow,
            dict(reached),
            pathlib.Path(workdir) / "mlflow_id",
        )
        with _reachable("metrics.mlflow_experiment", experiment):
            mlflow.set_experiment(experiment)
            if path.exists():
                mlflow.start_run(run_id=path.read_text())
                return
            path.write_text(mlflow.start_run(run_name=pathlib.Path(workdir).name).info.run_id)
            flat = [(name, str(value)) for name, value in flatten(config).items()]
            for i in range(0, len(flat), 100):  # the most that a request may hold
                mlflow.log_params(dict(flat[i : i + 100]))

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        if step > self._reached.get(split, -1):
            known = {name: float(value) for name, value in record.items() if math.isfinite(value)}
            # as it asks
            found = {
                re.sub(r"[^\w\-. :/]", "_", f"{split}/{name}"): value
                for name, value in known.items()
            }
            self._mlflow.log_metrics(found, step=step, synchronous=False)

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()


class TrackioWriter(Writer):
    """A Trackio run with its name in workdir/trackio_name. ``reached`` as in `MlflowWriter`."""

    def __init__(
        self, workdir: str, project: str, config: Mapping[str, Any], reached: Mapping[str, int]
    ):
        import trackio

        path = pathlib.Path(workdir) / "trackio_name"
        if not path.exists():
            path.write_text(f"{pathlib.Path(workdir).name}-{secrets.token_hex(3)}")
        self._reached = dict(reached)
        with _reachable("metrics.trackio_project", project):
            given = {name: str(value) for name, value in flatten(config).items()}
            self._run = trackio.init(
                project=project, name=path.read_text(), resume="allow", config=given, embed=False
            )

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        if step > self._reached.get(split, -1):
            self._run.log(
                {f"{split}/{name}": float(value) for name, value in record.items()}, step=step
            )

    def close(self) -> None:
        self._run.finish()


@contextlib.contextmanager
def _reachable(field: str, name: str) -> Iterator[None]:
    """Turn any error of a service's client at the start into a ConfigError."""
    try:
        yield
    except Exception as error:  # clients raise what they like
        why = first_line(error)
        raise ConfigError(
            [(field, f"is {name!r}, which cannot be used now: {why}; or unset it")]
        ) from error


def make_writers(config: Config, step: int) -> list[Writer]:
    """Return the writers that a config asks for, continued after ``step``."""
    records = JsonlWriter(config.workdir, step)
    writers: list[Writer] = [records]
    if config.metrics.tensorboard:
        writers.append(TensorboardWriter(config.workdir, step))
    if project := config.metrics.wandb_project:
        writers.append(WandbWriter(config.workdir, project, dataclasses.asdict(config)))
    if experiment := config.metrics.mlflow_experiment:
        writers.append(
            MlflowWriter(config.workdir, experiment, dataclasses.asdict(config), records.reached)
        )
    if project := config.metrics.trackio_project:
        writers.append(
            TrackioWriter(config.workdir, project, dataclasses.asdict(config), records.reached)
        )
    return writers


def write_pictures(
    folder: str | os.PathLike[str], pictures: Mapping[str, np.typing.ArrayLike], *, limit: int = 8
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
            paths.append(folder / f"{name}_{i}.png")
            Image.fromarray(image).save(paths[-1])
    return paths


def pixels(images: np.typing.ArrayLike) -> np.ndarray:
    """Grey pixels, the top row first, of arrays in 0..1."""
    return np.asarray(np.clip(np.nan_to_num(np.asarray(images)), 0, 1) * 255, np.uint8)[:, ::-1]


def write_lines(workdir: str, name: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write lines {"step": 500, …} of the workdir. A step written again takes its own place."""
    path = pathlib.Path(workdir) / name
    records, odd = jsonl.read(path, jsonl.step_problem)
    kept = [line for record, line in records if record["step"] < step]
    kept += [json.dumps({"step": step, **line}, ensure_ascii=False).encode() for line in lines]
    jsonl.rewrite(path, kept, odd)


class Lines:
    """Lines of evaluations by `write_lines`. What a full disk refuses waits in memory."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self._waiting: list[tuple[str, int, Sequence[Mapping[str, Any]]]] = []
        self._warned = False

    def write(self, name: str, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        self._waiting.append((name, step, lines))
        self.flush()

    def flush(self) -> None:
        """Try again to write the waiting lines. Raises WorkdirError as `jsonl.read`."""
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
    if (rates := rate(step)) is None:
        return
    content = {"step": step.tolist(), "lr": [_rounded(float(x)) for x in rates]}
    (pathlib.Path(workdir) / "schedule.json").write_text(json.dumps(content) + "\n")


def left_behind(config: Config) -> list[tuple[str, str]]:
    """List the existing files of a run for a person to look at: (path, description)."""
    workdir = pathlib.Path(config.workdir)
    saved = config.checkpoint.folder or str(workdir / "checkpoints")
    found = [
        (saved, "state and parameters" if config.checkpoint.final == "resumable" else "parameters")
    ]
    for name, about in (
        ("metrics.jsonl", "records of training and evaluations, a line each"),
        (GENERATIONS, "generations of the model at each evaluation"),
        ("classes.jsonl", "rows and answers by class at each evaluation"),
        ("pictures", "inputs of the model"),
        ("tensorboard", "the records, for TensorBoard"),
        ("traces", "traces of steps, for Perfetto, XProf and jaxtrain report"),
    ):
        path = workdir / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            found.append((str(path), about))
    return found


def is_written(workdir: str, step: int, split: str) -> bool:
    records, _ = jsonl.read(pathlib.Path(workdir) / "metrics.jsonl", jsonl.record_problem)
    return any(record["step"] == step and record["split"] == split for record, _ in records)


def _rounded(value: Any) -> Any:
    if not isinstance(value, float | np.floating):  # of a digest, which has all its digits
        return value
    # nan and inf are no JSON; 9 digits hold a float32
    return float(f"{value:.9g}") if math.isfinite(value) else None
