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
MAX_PICTURES = 8  # of a name
MAX_GENERATIONS = 32  # that TensorBoard shows of an evaluation
MAX_PARAMS = 100  # that a request to MLflow may hold
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
        path = pathlib.Path(workdir) / name
        self._path = path
        records, odd = jsonl.read(path, problem)
        self.reached = {record.get("split", ""): record["step"] for record, _ in records}
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


class TensorboardWriter(Writer):
    """workdir/tensorboard. Records after ``step`` are marked as purged, as for a restarted run.

    tensorboardX writes them at once, into a file that waits for room (`jsonl.Appended`). Its
    SummaryWriter would write in a thread, which ends for good at the first error.
    """

    def __init__(self, workdir: str, step: int):
        from tensorboardX import event_file_writer, record_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        self._summary = summary
        folder = pathlib.Path(workdir) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        record_writer.register_writer_factory("appended", jsonl.Appended)
        prefix = f"appended:{folder}/events"
        self._events = event_file_writer.EventsWriter(prefix, f".{os.getpid()}")
        if step:
            restart = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(step=step + 1, session_log=restart))
        self._events.flush()

    def _add(self, step: int, summaries: Iterable[Any]) -> None:
        """Write them in one call: a file on a shared disk costs by the call."""
        for summary in summaries:
            event = self._event(step=step, wall_time=time.time(), summary=summary)
            self._events.write_event(event)
        self._events.flush()

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        scalar = self._summary.scalar
        self._add(step, [scalar(f"{split}/{name}", value) for name, value in record.items()])

    def pictures(self, step: int, pictures: Mapping[str, np.typing.ArrayLike]) -> None:
        summaries = []
        for name, images in pictures.items():
            for i, image in enumerate(pixels(images)[:MAX_PICTURES]):
                summaries.append(self._summary.image(f"{name}/{i}", image, dataformats="HW"))
        self._add(step, summaries)

    def generations(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        summaries = []
        for i, generation in enumerate(generations[:MAX_GENERATIONS]):
            lines = []
            for name, value in generation.items():
                lines += f"{name}: {value}".splitlines()
            # Indented: TensorBoard renders Markdown, and a generation is plain text.
            text = "\n".join(f"    {line}" for line in lines)
            summaries.append(self._summary.text(f"generations/{i}", text))
        self._add(step, summaries)

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
            values = {f"{split}/{name}": value for name, value in record.items()}
            self._run.log(values, step=step)

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

        self._mlflow = mlflow
        self._reached = dict(reached)
        path = pathlib.Path(workdir) / "mlflow_id"
        with _reachable("metrics.mlflow_experiment", experiment):
            mlflow.set_experiment(experiment)
            if path.exists():
                mlflow.start_run(run_id=path.read_text())
                return
            run = mlflow.start_run(run_name=pathlib.Path(workdir).name)
            path.write_text(run.info.run_id)
            fields = [(name, str(value)) for name, value in flatten(config).items()]
            for i in range(0, len(fields), MAX_PARAMS):
                mlflow.log_params(dict(fields[i : i + MAX_PARAMS]))

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        if step <= self._reached.get(split, -1):
            return
        metrics = {}
        for name, value in record.items():
            if math.isfinite(value):
                # The service takes these characters alone.
                key = re.sub(r"[^\w\-. :/]", "_", f"{split}/{name}")
                metrics[key] = float(value)
        self._mlflow.log_metrics(metrics, step=step, synchronous=False)

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
            self._run = trackio.init(
                project=project,
                name=path.read_text(),
                resume="allow",
                config={name: str(value) for name, value in flatten(config).items()},
                embed=False,
            )

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        if step > self._reached.get(split, -1):
            values = {f"{split}/{name}": float(value) for name, value in record.items()}
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


@contextlib.contextmanager
def _reachable(field: str, name: str) -> Iterator[None]:
    """Turn any error of a service's client at the start into a ConfigError."""
    try:
        yield
    except Exception as error:  # clients raise what they like
        problem = f"is {name!r}, which cannot be used now: {first_line(error)}; or unset it"
        raise ConfigError([(field, problem)]) from error


def make_writers(config: Config, step: int) -> list[Writer]:
    """Return the writers that a config asks for, continued after ``step``."""
    workdir, services = config.workdir, config.metrics
    records = JsonlWriter(workdir, step)
    writers: list[Writer] = [records]
    if services.tensorboard:
        writers.append(TensorboardWriter(workdir, step))
    if project := services.wandb_project:
        writers.append(WandbWriter(workdir, project, dataclasses.asdict(config)))
    if experiment := services.mlflow_experiment:
        fields = dataclasses.asdict(config)
        writers.append(MlflowWriter(workdir, experiment, fields, records.reached))
    if project := services.trackio_project:
        fields = dataclasses.asdict(config)
        writers.append(TrackioWriter(workdir, project, fields, records.reached))
    return writers


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


def is_written(workdir: str, step: int, split: str) -> bool:
    records, _ = jsonl.read(pathlib.Path(workdir) / "metrics.jsonl", jsonl.record_problem)
    return any(record["step"] == step and record["split"] == split for record, _ in records)


def _rounded(value: Any) -> Any:
    if not isinstance(value, float | np.floating):  # of a digest, which has all its digits
        return value
    # nan and inf are no JSON; 9 digits hold a float32
    return float(f"{value:.9g}") if math.isfinite(value) else None
