"""The wall time of a run by phase: each second of each process is in one, over all starts.

``workdir/goodput/process-N.jsonl`` has a line for each start of process N: host, process id, when,
versions. A thread appends a line with the start's totals every few seconds: ``{"id": …, "now":
1760000000.0, "step": 120, "seconds": {"steps": 31.5, …}, …}``. The last complete line counts. So a
kill loses a few seconds at most. They lie between two starts, in the phase `STOPPED`.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import pathlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.parallel import lease
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import jsonl

log = logging.getLogger("jaxtrain")

FOLDER = "goodput"
# The phases, in the order of a run.
QUEUE, IMPORTS, OTHERS, MODEL, PLAN = (
    "queue",
    "imports and config",
    "other processes",
    "devices and model",
    "plan",
)
INDEX, RESTORE, COMPILATION = "data index", "init or restore", "compilation"
STEPS, AGAIN, WAIT, SAVES, EVALUATION = (
    "steps",
    "steps made again",
    "waiting for data",
    "saves",
    "evaluation",
)
ENDING, STOPPED = "ending", "stopped"
PHASES = (
    QUEUE,
    IMPORTS,
    OTHERS,
    MODEL,
    PLAN,
    INDEX,
    RESTORE,
    COMPILATION,
    STEPS,
    AGAIN,
    WAIT,
    SAVES,
    EVALUATION,
    ENDING,
    STOPPED,
)
MAX_BYTES = 100_000_000  # of a file that is read
# Fields of the first line of a start and of its totals, with the values of a start without one.
HEAD = {"id": "", "host": "", "process": 0, "processes": 0, "pid": 0, "began": 0.0, "queued": 0.0}
TOTALS: dict[str, Any] = {
    "first": 0,
    "step": 0,
    "phase": IMPORTS,
    "end": "",
    "now": 0.0,
    "seconds": {},
    "timed": 0,
    "total": 0.0,
    "squares": 0.0,
    "longest": 0.0,
    "blocked": 0.0,
}
DATA = "data"  # in the totals, and then a fact of the start: the digest of the data
# of totals, after which all but the last are dropped: else a start of some weeks has `MAX_BYTES`
MAX_LINES = 1000


class Clock:
    """This process's time: each second since its start is in the phase that `switch` named last.

    Nothing is written before `open`. After it a thread writes, and the loop only adds numbers.
    """

    def __init__(self) -> None:
        self.began = _process_start()
        # the start, by the clock that never jumps
        self._zero = time.perf_counter() - (time.time() - self.began)
        self._last, self._phase, self._seconds = self._zero, IMPORTS, {IMPORTS: 0.0}
        self._lock, self._writing, self._closed = (
            threading.Lock(),
            threading.Lock(),
            threading.Event(),
        )
        self._thread: threading.Thread | None = None
        self._file: jsonl.Appended | None = None
        self._id, self._highest = uuid.uuid4().hex, 0
        self._totals = dict(TOTALS)
        self._first: int | None = None
        self._read_at = math.nan
        self._data: dict[str, str] = {}
        self._before: dict[str, float] = {}  # seconds until this start, by phase

    def switch(self, phase: str) -> str:
        """Begin a phase. Returns the one before."""
        with self._lock:
            before, self._phase = self._phase, phase
            now = time.perf_counter()
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._last
            self._last = now
        return before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Make a context a phase. The one before follows, unless an error ends the process."""
        before = self.switch(phase)
        yield
        self.switch(before)

    def resumed(self, step: int) -> None:
        """Record the step that this start resumes from, at once: a kill may come."""
        self._first = self._totals["step"] = step
        self._write()

    def reads(self, data: str) -> None:
        """Record which data this start reads, by their digest."""
        self._data = {DATA: data}

    def steps(self, step: int) -> None:
        """Begin the steps after ``step``."""
        self.switch(AGAIN if step < self._highest else STEPS)
        self._totals["step"], self._read_at = step, math.nan
        self._first = step if self._first is None else self._first

    def read(self, step: int, blocked: float) -> None:
        """Note at every step that ``step`` was read, after the loop waited ``blocked`` seconds."""
        now, totals = time.perf_counter(), self._totals
        if (seconds := now - self._read_at) > 0:
            totals["timed"] += 1
            totals["total"] += seconds
            totals["squares"] += seconds * seconds
            totals["longest"] = max(totals["longest"], seconds)
            totals["blocked"] += blocked
        totals["step"], self._read_at = step, now
        if self._phase == AGAIN and step >= self._highest:
            self.switch(STEPS)

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds until now. They add up to the age of the process."""
        with self._lock:
            return {
                **self._seconds,
                self._phase: self._seconds.get(self._phase, 0.0) + time.perf_counter() - self._last,
            }

    def goodput(self) -> float:
        """Return this process's goodput until now, over all its starts that are known."""
        seconds = self.seconds()
        return goodput(
            {phase: self._before.get(phase, 0.0) + seconds.get(phase, 0.0) for phase in PHASES}
        )

    def line(self) -> str:
        """How long each part of the start took, once the first step is read."""
        parts = {
            ("first step" if name in (STEPS, AGAIN) else name): s
            for name, s in self.seconds().items()
        }
        each = ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05
        )
        return f"{sum(parts.values()):.1f} s from the command to the first step: {each}"

    def open(self, workdir: str, *, process: int, processes: int, facts: Mapping[str, Any]) -> None:
        """Begin to write into ``workdir``, with ``facts`` in the first line.

        A full disk ends the file, not the run. Raises WorkdirError: something else than a file has
        its name.
        """
        self._path = path = pathlib.Path(workdir) / FOLDER / f"process-{process}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = starts(path)
            self._highest = max((start.step for start in before), default=0)
            head = {
                "id": self._id,
                "began": round(self.began, 3),
                "process": process,
                "processes": processes,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "queued": _queued(self.began, before),
                **facts,
            }
            self._before = totals([*before, _start(head, {})])
            self._shorten()
        except OSError as error:
            log.warning("goodput is not recorded: %s cannot be written (%s)", path, error.strerror)
            return
        self._append(head)
        self._write()
        self._thread = threading.Thread(target=self._run, name="goodput", daemon=True)
        self._thread.start()

    def close(self, end: str) -> None:
        """Write the last totals, with the reason of the process's end in a few words."""
        self._closed.set()
        if self._thread:
            self._thread.join()
            self._totals["end"] = end.encode()[:200].decode(errors="ignore")
            self._write()
            assert self._file
            self._file.close()
            self._thread = self._file = None
            if self._path.name == "process-0.jsonl":
                with contextlib.suppress(OSError, WorkdirError):
                    if before := starts(self._path):  # none if the workdir was deleted
                        log.info("%s", summary(totals(before)))

    def _run(self) -> None:
        for lines in itertools.count(1):
            if self._closed.wait(min(max(1.0, (time.perf_counter() - self._zero) / 500), 10.0)):
                return
            self._write()
            if lines % MAX_LINES == 0:
                with contextlib.suppress(OSError, WorkdirError):
                    self._shorten()

    def _shorten(self) -> None:
        """Leave the first and the last line of each start, without a kill's incomplete ones."""
        with self._writing:
            if self._file and self._file.waiting:
                return
            jsonl.rewrite(
                self._path, [line for pair in _pairs(self._path) for _, line in pair if line]
            )
            self._file = jsonl.Appended(self._path)

    def _write(self) -> None:
        """Append the totals, which wait in memory while a disk is full, unless there is no file."""
        with self._writing:
            seconds = {phase: round(s, 3) for phase, s in self.seconds().items()}
            now = round(self.began + sum(seconds.values()), 3)
            known = {
                "first": self._first or 0,
                "phase": self._phase,
                "now": now,
                "seconds": seconds,
            }
            self._append({"id": self._id, **self._totals, **known, **self._data})

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of one process, as its file tells it."""

    process: int
    processes: int
    host: str
    began: float  # [s since 1970]
    queued: float  # [s] in a queue before it began. In the rest of a gap it was stopped
    now: float  # [s since 1970] the last that was heard of it
    first: int  # step that it resumed from, or 0
    step: int  # the last that it read
    phase: str  # the last
    end: str  # "ended", another reason, or "" for a process that was killed or still runs
    seconds: Mapping[str, float]  # by phase
    timed: int  # steps whose time is known
    total: float  # [s] of them
    squares: float  # [s²] of them, summed
    longest: float  # [s]
    # [s] that reading the steps took: waiting for the devices, and so for other processes
    blocked: float
    # versions, commit, source and overrides of the config, and the digest of the data
    facts: Mapping[str, Any]

    @property
    def own(self) -> float:
        """Seconds of a step that the process did not wait for devices: a straggler has the most."""
        return (self.total - self.blocked) / self.timed if self.timed else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of a step's time [s]."""
        mean = self.total / self.timed if self.timed else math.nan
        return (
            math.sqrt(max(self.squares / self.timed - mean * mean, 0.0)) if self.timed else math.nan
        )


def restarts(each: Sequence[Start]) -> int:
    """Count the later starts that made a step or were killed before one, not refused ones."""
    return max(
        sum(not start.end or STEPS in start.seconds or AGAIN in start.seconds for start in each)
        - 1,
        0,
    )


def starts(path: pathlib.Path) -> list[Start]:
    """Read a file's starts by time, without odd lines. Raises WorkdirError: none, or huge."""
    found = [_start(head, last) for (head, _), (last, _) in _pairs(path)]
    return sorted(found, key=lambda start: start.began)


def _pairs(
    path: pathlib.Path,
) -> list[tuple[tuple[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]]:
    """Return the first record of each start, with its line, and the last."""
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        raise WorkdirError(
            f"{path} has {path.stat().st_size} bytes, which no run writes; move it away"
        )
    records = jsonl.read(path, _problem)[0]
    heads = {record["id"]: (record, line) for record, line in records if "began" in record}
    last = {record["id"]: (record, line) for record, line in records if "began" not in record}
    return [(head, last.get(name, ({}, b""))) for name, head in heads.items()]


def _start(head: Mapping[str, Any], last: Mapping[str, Any]) -> Start:
    facts = {name: value for name, value in head.items() if name not in HEAD}
    facts |= {DATA: last[DATA]} if isinstance(last.get(DATA), str) else {}
    known = {name: head[name] for name in HEAD if name not in ("id", "pid")} | {
        n: last.get(n, TOTALS[n]) for n in TOTALS
    }
    return Start(**known | {"now": max(known["now"], head["began"]), "facts": facts})


def _problem(record: Mapping[str, Any]) -> str:
    expected = HEAD if "began" in record else {"id": "", **TOTALS}
    wrong = [name for name, value in expected.items() if not _is(type(value), record.get(name))]
    return f"its {wrong[0]} is not as a run writes it" if wrong else ""


def _is(kind: type, value: Any) -> bool:
    if kind is dict:
        return (
            type(value) is dict
            and value.keys() <= set(PHASES)
            and all(_is(float, s) for s in value.values())
        )
    if kind is str:
        return type(value) is str and len(value) <= 300
    return type(value) in (int, kind) and 0 <= value < (2**31 if kind is int else 1e12)


def read(workdir: str | os.PathLike[str]) -> dict[int, list[Start]]:
    """Process -> its starts, {} without a record of a workdir. Raises WorkdirError."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        return {}
    files = {
        int(m[1]): path
        for path in folder.iterdir()
        if (m := re.fullmatch(r"process-(\d{1,7})\.jsonl", path.name))
    }
    found = {process: starts(files[process]) for process in sorted(files)}
    return {process: each for process, each in found.items() if each}


def totals(each: Iterable[Start]) -> dict[str, float]:
    """Phase -> seconds of a process from its first start or queue on; stopped for the rest."""
    seconds: collections.Counter[str] = collections.Counter()
    until = None
    for start in each:
        gap = max(start.began - until, 0.0) if until is not None else start.queued
        queued = min(start.queued, gap)
        seconds.update({QUEUE: queued, STOPPED: gap - queued})
        seconds.update(start.seconds)
        until = max(start.now, until or 0.0)
    return {phase: seconds[phase] for phase in PHASES if seconds[phase] > 0}


def of_run(processes: Mapping[int, Sequence[Start]]) -> dict[str, float]:
    """Phase -> seconds, added over all processes."""
    seconds: collections.Counter[str] = collections.Counter()
    for each in processes.values():
        seconds.update(totals(each))
    return {phase: seconds[phase] for phase in PHASES if seconds[phase] > 0}


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the share of steps' wall time that was made first, or nan without time."""
    whole = sum(seconds.values())
    return seconds.get(STEPS, 0.0) / whole if whole else math.nan


def summary(seconds: Mapping[str, float]) -> str:
    """Return a line about one process: its goodput, and the largest other phases."""
    whole = sum(seconds.values())
    rest = sorted(
        (s, phase) for phase, s in seconds.items() if phase != STEPS and s >= 0.005 * whole
    )[::-1]
    most = ", ".join(f"{phase} {s / whole:.0%}" for s, phase in rest[:4])
    return (
        f"goodput {goodput(seconds):.0%} of {whole:.0f} s over all"
        f" starts{f'; {most}' if most else ''}"
    )


def straggler(processes: Mapping[int, Sequence[Start]]) -> Start | None:
    """Return the process that delays the others by a tenth of a step or more, if there is one.

    Processes leave a step together. The one that comes late (its data, its host) waits least for
    the devices. A slow device does not show here: all wait for it alike.
    """
    newest = [each[-1] for each in processes.values() if each[-1].timed]
    newest = [start for start in newest if start.began >= max(s.began for s in newest) - 3600]
    if len(newest) < 2:
        return None
    by_own = sorted(newest, key=lambda start: start.own)
    worst, median = by_own[-1], by_own[(len(by_own) - 1) // 2]
    return worst if worst.own - median.own >= 0.1 * worst.total / worst.timed else None


def _queued(began: float, before: Sequence[Start]) -> float:
    """Seconds in a scheduler's queue, since its submission or the end of the start before."""
    submitted = os.environ.get("JAXTRAIN_SUBMITTED", "")
    if before and lease.slurm("SLURM_RESTART_COUNT"):
        return round(max(began - before[-1].now, 0.0), 3)
    if re.fullmatch(r"\d{9,11}", submitted):
        return round(max(began - max(int(submitted), before[-1].now if before else 0), 0.0), 3)
    return 0.0


def _process_start() -> float:
    """Return the process's start [s since 1970] by proc(5): stat's field 22 in ticks; else now."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.time()
