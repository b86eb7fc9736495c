"""Numbers for people: metric records and their writers, the console, MFU, pictures.

workdir/metrics.jsonl has one JSON object per line: ``{"step": 10, "split": "train", "loss": 2.3, …}``. Steps rise within a
split; when a run goes on from an earlier step, what was written after it is dropped first, so that no step is there twice.
"""

import dataclasses
import errno
import json
import logging
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from jaxtrain import chips
from jaxtrain.config import Config
from jaxtrain.types import Mean

log = logging.getLogger("jaxtrain")
WAIT_WORTH_MENDING = 0.05  # [share] of the time


def mean(sums: Sequence[Mapping[str, Mean]]) -> dict[str, Any]:
    """Adds sums over batches in float64 and divides, on the host. Waits for the device. No weight gives nan.

    A sum that is an array gives an array; every weight is a number.
    """
    host = jax.device_get([dict(s) for s in sums])
    totals = {
        name: (sum(np.asarray(s[name].total, np.float64) for s in host), sum(float(s[name].weight) for s in host))
        for name in (host[0] if host else ())
    }
    means = {name: total / weight if weight else total * math.nan for name, (total, weight) in totals.items()}
    return {name: x if np.ndim(x) else float(x) for name, x in means.items()}


class Writer(Protocol):
    def write(self, step: int, split: str, record: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlWriter:
    """workdir/metrics.jsonl, continued after ``step``."""

    def __init__(self, workdir: str, step: int):
        path = pathlib.Path(workdir) / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) is not None and _step_of(line) <= step]
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text("".join(line + "\n" for line in kept))
            temporary.replace(path)
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self._warned = False

    def write(self, step: int, split: str, record: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, "split": split, **{k: _rounded(v) for k, v in record.items()}}) + "\n"
        self._waiting.append(line.encode())
        self._flush()

    def _flush(self) -> None:
        """Writes what waits; on a disk that is full, keeps it for the next record. A line is written whole or not at all."""
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
                log.error("%s cannot be written (%s); records are kept in memory until it can", self._file.name, error.strerror)
            self._warned = True

    def close(self) -> None:
        self._flush()
        if self._waiting:
            log.error("%d records of %s were never written", len(self._waiting), self._file.name)
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
    """A Weights & Biases run whose id is kept in workdir/wandb_id, so that a resumed run goes on in the same one."""

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
    """The writers that a config asks for, ready to go on after ``step``."""
    writers: list[Writer] = [JsonlWriter(config.workdir, step)]
    if config.metrics.tensorboard:
        writers.append(TensorboardWriter(config.workdir, step))
    if config.metrics.wandb_project:
        writers.append(WandbWriter(config.workdir, config.metrics.wandb_project, dataclasses.asdict(config)))
    return writers


class Console:
    """One progress line that is rewritten in place on a terminal, and printed now and then elsewhere.

    It is also a logging handler: a message clears the line, is printed above it, and the line comes back.
    """

    def __init__(self, stream: TextIO | None = None, *, every: float = 10.0):
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._every = 0.1 if self._live else every  # [s] between lines
        self._line, self._shown, self._printed = "", "", -math.inf

    def progress(self, line: str) -> None:
        # A line that wraps could not be cleared.
        self._line = line[: shutil.get_terminal_size().columns - 1] if self._live else line
        if time.monotonic() - self._printed >= self._every:
            self._print()

    def finish(self) -> None:
        """Leaves the last progress line on the screen."""
        if self._line:
            if self._live or self._shown != self._line:
                self._print()
            self._stream.write("\n" if self._live else "")
            self._stream.flush()
        self._line = ""

    def _print(self) -> None:
        self._printed, self._shown = time.monotonic(), self._line
        self._stream.write(f"\r\x1b[2K{self._line}" if self._live else self._line + "\n")
        self._stream.flush()

    def message(self, text: str) -> None:
        clear, back = ("\r\x1b[2K", self._line) if self._live and self._line else ("", "")
        self._stream.write(f"{clear}{text}\n{back}")
        self._stream.flush()


class ConsoleHandler(logging.Handler):
    """Sends log records above the progress line."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._console.message(prefix + self.format(record))


def start_console(*, process: int = 0, folder: str = "") -> Console:
    """Routes logging (ours from INFO, everybody's from WARNING) through a console, which only process 0 has.

    With ``folder``, every process also logs into ``folder``/process-N.log, with the time.
    """
    console = Console() if process == 0 else Console(open(os.devnull, "w"))
    root = logging.getLogger()
    # Ours take the place of older ones, and of the plain handler that some library has set up by then.
    for old in [h for h in root.handlers if isinstance(h, ConsoleHandler | LogFile) or type(h) is logging.StreamHandler]:
        root.removeHandler(old)
        old.close()
    root.addHandler(ConsoleHandler(console))
    if folder:
        root.addHandler(LogFile(folder, process))
    logging.getLogger("jaxtrain").setLevel(logging.INFO)
    logging.captureWarnings(True)
    return console


class LogFile(logging.FileHandler):
    """``folder``/process-N.log."""

    def __init__(self, folder: str, process: int):
        os.makedirs(folder, exist_ok=True)
        super().__init__(os.path.join(folder, f"process-{process}.log"))
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs this file its lines, and the console no tracebacks: they say what matters there."""


class StartUp:
    """How long each phase took, from the command to the first step."""

    def __init__(self):
        self._last = self._began = _process_start()
        self._phases: list[tuple[str, float]] = []

    def done(self, phase: str) -> None:
        """What there was since the phase before was ``phase``."""
        now = time.time()
        self._phases.append((phase, now - self._last))
        self._last = now

    def line(self) -> str:
        each = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._phases)
        return f"{self._last - self._began:.1f} s from the command to the first step: {each}"


def _process_start() -> float:
    """[s since 1970] where /proc tells (proc(5): stat, field 22, in clock ticks since boot); else now."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.time()


class Meter:
    """Rates between two progress lines: samples/s, MFU, share of time spent waiting for data, time left.

    Attributes:
      seconds_per_step: the latest; nan before the first.
    """

    def __init__(self, *, steps: int, batch: int, flops: int, peak: float, full_flops: int = 0):
        self.seconds_per_step = math.nan
        self._steps, self._batch, self._flops, self._full_flops, self._peak = steps, batch, flops, full_flops, peak
        self._start = self._last = (time.perf_counter(), 0, 0.0)

    def begin(self, step: int, waited: float) -> None:
        """Starts (again) to count here: after compilation, an evaluation, a restart."""
        self._last = (time.perf_counter(), step, waited)

    def rates(self, step: int, waited: float) -> dict[str, float]:
        now = time.perf_counter()
        then, first, waited_then = self._last
        seconds, steps = max(now - then, 1e-9), step - first
        self._last = (now, step, waited)
        self.seconds_per_step = seconds / steps if steps else self.seconds_per_step
        return {
            "steps_per_second": steps / seconds,
            "samples_per_second": steps * self._batch / seconds,
            "mfu": steps * self._flops / seconds / self._peak,
            **({"mfu_full_attention": steps * self._full_flops / seconds / self._peak} if self._full_flops else {}),
            "data_wait_share": min((waited - waited_then) / seconds, 1.0),
            "eta_seconds": (self._steps - step) * seconds / steps if steps else math.nan,
        }


def progress_line(step: int, steps: int, loss: float, rates: Mapping[str, float], *, slowest: str | None = None) -> str:
    """``slowest``, the loader's stage that takes most time, is named where waiting for data is worth mending."""
    blame = f" (most in {slowest})" if slowest and rates["data_wait_share"] >= WAIT_WORTH_MENDING else ""
    return (
        f"step {step}/{steps}  loss {loss:.4f}  {rates['samples_per_second']:.1f} samples/s  MFU {rates['mfu']:.1%}  "
        f"waiting for data {rates['data_wait_share']:.0%}{blame}  {_duration(rates['eta_seconds'])} left"
    )


def peak_flops() -> tuple[float, str]:
    """FLOP/s of all devices together, and where the number comes from.

    The datasheet's dense bf16 peak where the chip is known, else the best of a few float32 matrix products measured now.
    """
    devices = jax.devices()
    kind = devices[0].device_kind
    if chip := chips.find(kind):
        return chip.flops * len(devices), f"{kind} datasheet, bf16"
    n, best = 1024, math.inf
    local = jax.local_devices()
    x = jax.device_put(jnp.ones((n, n), jnp.float32), local[0])
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(x))
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(product(x))
        best = min(best, time.perf_counter() - start)
    # Host devices share the cores that one product already uses all of.
    count = jax.process_count() if devices[0].platform == "cpu" else len(devices)
    return 2 * n**3 / best * count, f"measured {n}×{n} float32 product on {kind}"


def write_pictures(folder: str | os.PathLike, pictures: Mapping[str, np.ndarray], *, limit: int = 8) -> list[pathlib.Path]:
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
    kept = [line for line in (path.read_text().splitlines() if path.exists() else []) if (_step_of(line) or math.inf) < step]
    lines = [*kept, *(json.dumps({"step": step, **sample}, ensure_ascii=False) for sample in samples)]
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text("".join(line + "\n" for line in lines))
    temporary.replace(path)


def is_written(workdir: str, step: int, split: str) -> bool:
    """Whether metrics.jsonl holds this record."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if _step_of(line) == step]
    return any(r["split"] == split for r in records)


def _step_of(line: str) -> int | None:
    """None for a line that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def _rounded(value: float) -> float | None:
    return float(f"{value:.9g}") if math.isfinite(value) else None  # nan and inf are no JSON; 9 digits hold a float32


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}"
