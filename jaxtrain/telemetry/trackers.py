"""Trackers: TensorBoard, W&B, MLflow and Trackio, each in a thread of its own.

A tracker that cannot be used at the start is an error of its field. Later it neither ends nor
delays the run: its failure is a warning, the record is sent again, and metrics.jsonl has them all.
"""

import collections
import contextlib
import dataclasses
import logging
import math
import os
import pathlib
import re
import secrets
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import Config, ConfigError
from jaxtrain.telemetry import jsonl, writers
from jaxtrain.telemetry.writers import MAX_PICTURES, Writer, pixels
from loaders.io.checks import first_line, flatten

log = logging.getLogger("jaxtrain")

MAX_WAITING = 10_000  # records of a tracker; the oldest ones give way
TRIES = 5  # of a record, which the tracker may refuse for itself
PAUSE, MAX_PAUSE = 1.0, 300.0  # [s] between two tries; twice as long each time
START = 300.0  # [s] for a tracker to answer at the start
PATIENCE, HURRIED = 60.0, 10.0  # [s] for all trackers to end; of a run that was asked to stop
MAX_GENERATIONS = 32  # that TensorBoard shows of an evaluation
MAX_PARAMS = 100  # that a request to MLflow may hold


class Tracker(Writer):
    """A writer in a thread, which opens the client, sends what `write` and others leave, and ends.

    ``field``: of config.metrics, with its ``value``. ``open_client`` is called in the thread.
    """

    def __init__(self, field: str, value: object, open_client: Callable[[], Writer]):
        self.field = field
        self._value = value
        self._open_client = open_client
        self._client: Writer | None = None
        self._calls: collections.deque[tuple[str, tuple[Any, ...]]] = collections.deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._started = threading.Event()
        self._reason = ""  # of the newest failure
        self._failing = ""  # the method that has failed, and did not succeed since
        self._pause = PAUSE
        self._n_lost = 0
        self._lost_to = "they came faster than they could be sent"
        self._thread = threading.Thread(target=self._run, name=field, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def problem(self, leave: Callable[[], bool]) -> str:
        """Wait until a tracker that was started can be used. Return the reason if it cannot.

        ``leave()`` ends the wait.
        """
        deadline = time.monotonic() + START
        while not self._started.wait(0.1) and not leave():
            if time.monotonic() > deadline:
                self._reason = f"it gives no answer within {START:g} s"
                break
        if not self._reason:
            return ""
        return f"is {self._value!r}, which cannot be used now: {self._reason}; or unset it"

    def resume(self, step: int) -> None:
        self._put("resume", step)

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        self._put("write", step, split, dict(record))

    def pictures(self, step: int, pictures: Mapping[str, np.typing.ArrayLike]) -> None:
        self._put("pictures", step, dict(pictures))

    def generations(self, step: int, generations: Sequence[Mapping[str, Any]]) -> None:
        self._put("generations", step, list(generations))

    def close(self) -> None:
        """Ask the thread to send the records that wait, and to end the client."""
        self._closing.set()
        self._wake.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, and report the records that it did not send."""
        if not self._started.is_set():  # nobody waits for a client that does not open
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn("it did not end in time")
        elif self._n_lost:
            self._warn(f"{self._n_lost} records were not sent: {self._lost_to}")

    def _put(self, name: str, *args: Any) -> None:
        if not self._thread.ident:
            self.start()
        if len(self._calls) >= MAX_WAITING:
            name_of_oldest, _ = self._calls.popleft()
            self._n_lost += name_of_oldest == "write"
        self._calls.append((name, args))
        self._wake.set()

    def _warn(self, text: str) -> None:
        log.warning("config.metrics.%s: %s; metrics.jsonl has every record", self.field, text)

    def _run(self) -> None:
        self._try("", ())
        self._started.set()
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            self._send_all()
        self._send_all()  # those that came since
        if self._client:
            self._try("close", ())

    def _send_all(self) -> None:
        while self._calls:
            self._send(*self._calls.popleft())

    def _send(self, name: str, args: tuple[Any, ...]) -> None:
        """Try a call until it succeeds. At the end of the run, the first failure is the last."""
        for _ in range(TRIES):
            if self._try(name, args):
                self._pause = PAUSE
                return
            if self._closing.is_set():
                break
            self._closing.wait(self._pause)
            self._pause = min(2 * self._pause, MAX_PAUSE)
        self._lose(name)
        while self._closing.is_set() and self._calls:
            self._lose(self._calls.popleft()[0])

    def _try(self, name: str, args: tuple[Any, ...]) -> bool:
        """Open the client, unless it is open, and call its method ``name``. Tell if it worked."""
        try:
            if self._client is None:
                self._client = self._open_client()
            if name:
                getattr(self._client, name)(*args)
        except BaseException as error:  # noqa: BLE001  even a SystemExit
            reason = first_line(error)
            if name == "close":
                self._warn(f"it could not be ended: {reason}")
            elif self._started.is_set() and not self._failing:
                self._warn(f"{reason}; the run goes on, and tries again")
                self._failing = name
            # W&B's settings name the wrong one only in a later line
            self._reason = " ".join(str(error).split())[:300] or reason
            return False
        if name == self._failing:
            self._failing = ""
            if name:
                log.info("config.metrics.%s: records are sent again", self.field)
        return True

    def _lose(self, name: str) -> None:
        """Count a call that is given up, if it has a record."""
        self._n_lost += name == "write"
        self._lost_to = self._reason


class TensorboardWriter(Writer):
    """workdir/tensorboard. Records after a resumed step are marked as purged.

    tensorboardX writes them at once, into a file that waits for room (`jsonl.Appended`). Its
    SummaryWriter would write in a thread, which ends for good at the first error.
    """

    def __init__(self, workdir: str):
        from tensorboardX import event_file_writer, record_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        self._summary = summary
        self._folder = pathlib.Path(workdir) / "tensorboard"
        self._events_writer = event_file_writer.EventsWriter
        self._file: jsonl.Appended | None = None
        self._register = record_writer.register_writer_factory
        self._restart = SessionLog(status=SessionLog.START)
        self._begin_file()

    def _open(self, path: str) -> jsonl.Appended:
        self._file = jsonl.Appended.open(path)
        return self._file

    def _begin_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._register("appended", types.SimpleNamespace(open=self._open))
        prefix = f"appended:{self._folder}/events"
        self._events = self._events_writer(prefix, f".{os.getpid()}")
        self._events.flush()

    def resume(self, step: int) -> None:
        if step:
            restart = self._event(step=step + 1, session_log=self._restart)
            self._events.write_event(restart)
            self._events.flush()

    def _add(self, step: int, summaries: Iterable[Any]) -> None:
        """Write them in one call: a file on a shared disk costs by the call.

        If the file was removed, which no write notices, they begin another one.
        """
        if self._file and not self._file.is_there():
            self._begin_file()
            text = "config.metrics.tensorboard: %s was removed; records from step %d on are there"
            log.warning(f"{text}, and metrics.jsonl has every record", self._folder, step)
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
            path.write_text(secrets.token_hex(4))
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

    ``reached``: split -> the last step that was sent before. Steps up to it are not sent again.
    """

    def __init__(
        self, workdir: str, experiment: str, config: Mapping[str, Any], reached: Mapping[str, int]
    ):
        import mlflow

        self._mlflow = mlflow
        self._reached = dict(reached)
        path = pathlib.Path(workdir) / "mlflow_id"
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
        self._mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioWriter(Writer):
    """A Trackio run with its name in workdir/trackio_name. ``reached`` as in `MlflowWriter`."""

    def __init__(
        self, workdir: str, project: str, config: Mapping[str, Any], reached: Mapping[str, int]
    ):
        import trackio

        if not any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))):
            # its thread writes into this folder, and drops the records if it cannot
            trackio.utils.TRACKIO_DIR.mkdir(parents=True, exist_ok=True)
            if not os.access(trackio.utils.TRACKIO_DIR, os.W_OK):
                raise OSError(f"{trackio.utils.TRACKIO_DIR} may not be written to (TRACKIO_DIR)")
        path = pathlib.Path(workdir) / "trackio_name"
        if not path.exists():
            path.write_text(f"{pathlib.Path(workdir).name}-{secrets.token_hex(3)}")
        self._reached = dict(reached)
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


def make(config: Config) -> list[Tracker]:
    """Return the trackers that a config asks for. None is started yet.

    Raises WorkdirError: something else than the run's records has the name metrics.jsonl.
    """
    workdir, metrics = config.workdir, config.metrics
    fields = dataclasses.asdict(config)
    reached: dict[str, int] = {}
    if metrics.mlflow_experiment or metrics.trackio_project:
        reached = writers.reached(workdir)
    openers: dict[str, Callable[[], Writer]] = {
        "tensorboard": lambda: TensorboardWriter(workdir),
        "wandb_project": lambda: WandbWriter(workdir, metrics.wandb_project, fields),
        "mlflow_experiment": lambda: MlflowWriter(
            workdir, metrics.mlflow_experiment, fields, reached
        ),
        "trackio_project": lambda: TrackioWriter(workdir, metrics.trackio_project, fields, reached),
    }
    trackers = []
    for field, open_client in openers.items():
        value = getattr(metrics, field)
        if value:
            trackers.append(Tracker(field, value, open_client))
    return trackers


def connect(trackers: Sequence[Tracker], leave: Callable[[], bool]) -> None:
    """Start trackers, and wait for them. Raises ConfigError: those that cannot be used."""
    for tracker in trackers:
        tracker.start()
    problems = [(f"metrics.{tracker.field}", tracker.problem(leave)) for tracker in trackers]
    problems = [(field, problem) for field, problem in problems if problem]
    if problems:
        raise ConfigError(problems)


@contextlib.contextmanager
def closing(trackers: Sequence[Tracker], is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Close trackers at the end of a context. A run that was asked to stop waits less for them."""
    try:
        yield
    finally:
        patience = HURRIED if is_stopping() else PATIENCE
        deadline = time.monotonic() + patience
        for tracker in trackers:
            tracker.close()
        for tracker in trackers:
            tracker.join(max(0.0, deadline - time.monotonic()))
