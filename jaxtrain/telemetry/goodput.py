"""Where a run's wall time went: every second of every process, over all of its starts, has one owner.

workdir/goodput/process-N.jsonl has three lines for each start of process N. The first says what began: host, process id, when,
versions. The other two are slots of one width, which a thread overwrites in turn every few seconds with the same totals:
``{"id": …, "now": 1760000000.0, "step": 120, "seconds": {"steps": 31.5, …}, …}``. A kill, or a power cut, that tears one leaves
the other, so that a few seconds are lost at most: they lie between two starts, and are owned by `STOPPED`.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import socket
import threading
import time
import types
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.parallel import lease
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import jsonl

log = logging.getLogger("jaxtrain")

FOLDER = "goodput"
WIDTH = 2048  # [bytes] of a slot, its line break included
SLOTS = 2
# The owners of time: of which a process is in one, in the order of a run.
QUEUE, IMPORTS, OTHERS, MODEL, PLAN = "queue", "imports and config", "other processes", "devices and model", "plan"
INDEX, RESTORE, COMPILATION = "data index", "restore", "compilation"
STEPS, AGAIN, WAIT, SAVES, EVALUATION = "steps", "steps made again", "waiting for data", "saves", "evaluation"
ENDING, STOPPED = "ending", "stopped"
OWNERS = (
    QUEUE, IMPORTS, OTHERS, MODEL, PLAN, INDEX, RESTORE, COMPILATION, STEPS, AGAIN, WAIT, SAVES, EVALUATION, ENDING, STOPPED,
)  # fmt: skip
MOST = 100_000_000  # [bytes] of a file that is read


class Clock:
    """This process's time. Each second from the process's start on belongs to the owner that `switch` named last.

    Nothing is written before `open`. Afterwards a thread keeps the file; the loop itself only adds numbers.
    """

    def __init__(self) -> None:
        self.began = _process_start()
        self._zero = time.perf_counter() - (time.time() - self.began)  # when this process began, by the clock that never jumps
        self._last, self._owner = self._zero, IMPORTS
        self._seconds = dict.fromkeys((IMPORTS,), 0.0)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._file, self._tail, self._writes, self._warned = -1, 0, 0, False
        self._id, self._end = uuid.uuid4().hex, ""
        self._highest = self._step = self._steps = 0
        self._first: int | None = None
        self._read_at = math.nan
        self._total = self._squares = self._longest = self._blocked = 0.0
        self._before: dict[str, float] = {}  # seconds until this start, by owner

    def switch(self, owner: str) -> str:
        """What follows belongs to ``owner``. Returns whose time it was until now."""
        with self._lock:
            now, before = time.perf_counter(), self._owner
            self._seconds[before] = self._seconds.get(before, 0.0) + now - self._last
            self._last, self._owner = now, owner
        return before

    def during(self, owner: str) -> "During":
        """A context whose time belongs to ``owner``; what follows belongs to the owner before."""
        return During(self, owner)

    def resumed(self, step: int) -> None:
        """Records the step that this start resumes from, in the file at once: a kill may come before the next write."""
        self._first = self._step = step
        if self._thread:  # else the file could not be opened
            self._try()

    def steps(self, step: int) -> None:
        """What follows are steps: those after ``step``."""
        self.switch(AGAIN if step < self._highest else STEPS)
        self._step, self._read_at = step, math.nan
        self._first = step if self._first is None else self._first

    def read(self, step: int, blocked: float) -> None:
        """Notes that ``step`` was read, for which the loop waited ``blocked`` seconds. Called at every step."""
        now = time.perf_counter()
        if (seconds := now - self._read_at) > 0:
            self._steps += 1
            self._total += seconds
            self._squares += seconds * seconds
            self._longest = max(self._longest, seconds)
            self._blocked += blocked
        self._step, self._read_at = step, now
        if self._owner == AGAIN and step >= self._highest:
            self.switch(STEPS)

    def seconds(self) -> dict[str, float]:
        """Owner -> seconds until now. They add up to the age of the process."""
        with self._lock:
            now = time.perf_counter()
            self._seconds[self._owner] = self._seconds.get(self._owner, 0.0) + now - self._last
            self._last = now
            return dict(self._seconds)

    def goodput(self) -> float:
        """This process's goodput until now, over all its starts that are known."""
        seconds = self.seconds()
        return goodput({owner: self._before.get(owner, 0.0) + seconds.get(owner, 0.0) for owner in OWNERS})

    def line(self) -> str:
        """How long each part of the start took, once the first step is read."""
        parts = {("first step" if name in (STEPS, AGAIN) else name): s for name, s in self.seconds().items()}
        each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
        return f"{sum(parts.values()):.1f} s from the command to the first step: {each}"

    def open(self, workdir: str, *, process: int, processes: int, facts: Mapping[str, Any]) -> None:
        """Begins to write into ``workdir``; ``facts`` go into the first line. A disk that is full costs the file, not the run.

        Raises WorkdirError: something else than a file has its name.
        """
        self._path = path = pathlib.Path(workdir) / FOLDER / f"process-{process}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = starts(path)
            self._highest = max((start.step for start in before), default=0)
            head = {
                "id": self._id, "began": round(self.began, 3), "process": process, "processes": processes,
                "host": socket.gethostname(), "pid": os.getpid(), "queued": _queued(self.began, before), **facts,
            }  # fmt: skip
            self._before = totals([*before, _start(head, {})])
            with jsonl.opened(path) as file:
                torn = os.fstat(file.fileno()).st_size and path.read_bytes()[-1:] != b"\n"
                file.write(b"\n" * bool(torn) + json.dumps(head).encode() + b"\n")
            self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            self._tail = os.fstat(self._file).st_size
            for _ in range(SLOTS):  # whoever appends to the file later does so behind both
                self._write()
        except OSError as error:
            log.warning("where this run's time goes is not kept: %s cannot be written (%s)", path, error.strerror)
            return
        self._thread = threading.Thread(target=self._run, name="goodput", daemon=True)
        self._thread.start()

    def close(self, end: str) -> None:
        """Writes the last totals, with what ended the process, in a few words."""
        self._closed.set()
        if self._thread:
            self._thread.join()
            self._end = end.encode()[:200].decode(errors="ignore")
            self._try()
            os.close(self._file)
            self._thread = None
            if self._path.name == "process-0.jsonl":
                with contextlib.suppress(OSError, WorkdirError):
                    if before := starts(self._path):  # none where the workdir was deleted
                        log.info("%s", summary(totals(before)))

    def _run(self) -> None:
        while not self._closed.wait(min(max(1.0, (time.perf_counter() - self._zero) / 500), 10.0)):
            self._try()

    def _try(self) -> None:
        """Writes the totals; a full disk must not end a run, and is reported once."""
        try:
            with self._writing:
                self._write()
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.warning("where this run's time goes cannot be written (%s); it is kept in memory", error.strerror)
            self._warned = True

    def _write(self) -> None:
        """Overwrites the older slot. Raises OSError."""
        seconds = {owner: round(s, 3) for owner, s in self.seconds().items()}
        record = {
            "id": self._id, "write": self._writes, "now": round(self.began + sum(seconds.values()), 3), "end": self._end,
            "first": self._first or 0, "step": self._step, "owner": self._owner, "seconds": seconds, "timed": self._steps,
            "total": round(self._total, 4), "squares": float(f"{self._squares:.6g}"), "longest": round(self._longest, 4),
            "blocked": round(self._blocked, 4),
        }  # fmt: skip
        line = json.dumps(record, ensure_ascii=False).encode()
        os.pwrite(self._file, line.ljust(WIDTH - 1) + b"\n", self._tail + WIDTH * (self._writes % SLOTS))
        self._writes += 1


class During:
    """A context of `Clock.during`."""

    def __init__(self, clock: Clock, owner: str):
        self._clock, self._own = clock, owner

    def __enter__(self) -> None:
        self._before = self._clock.switch(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if kind is None:  # else the rest of its life is the process's end
            self._clock.switch(self._before)


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of one process, as its file tells it."""

    process: int
    processes: int
    host: str
    began: float  # [s since 1970]
    now: float  # [s since 1970] the last that was heard of it
    queued: float  # [s] before it began, in a queue; the rest of a gap it was stopped
    first: int  # step that it resumed from; 0 where it began, or had restored none
    step: int  # the last that it read
    owner: str  # what it was at
    end: str  # what ended it: "ended", a reason, or "" for a process that was killed, or lives
    seconds: Mapping[str, float]  # by owner
    timed: int  # steps whose time is known
    total: float  # [s] of them
    deviation: float  # [s] of a step's time
    longest: float  # [s]
    blocked: float  # [s] that reading the steps took: waiting for the devices, and so for other processes
    facts: Mapping[str, Any]  # versions, commit, source and overrides of the config

    @property
    def own(self) -> float:
        """Seconds of a step that the process did not spend waiting for its devices: a straggler has the most."""
        return (self.total - self.blocked) / self.timed if self.timed else math.nan


def starts(path: pathlib.Path) -> list[Start]:
    """The starts that a file tells of, by time. Lines that are none are left out: a kill tears one slot of two.

    Raises WorkdirError: ``path`` is no regular file, or a huge one.
    """
    if path.is_file() and path.stat().st_size > MOST:
        raise WorkdirError(f"{path} has {path.stat().st_size} bytes, which no run writes; move it away")
    heads: dict[str, dict[str, Any]] = {}
    slots: dict[str, dict[str, Any]] = {}
    for record, _ in jsonl.read(path, _problem)[0]:
        known = heads if "began" in record else slots
        if known is heads or record["id"] not in slots or record["write"] > slots[record["id"]]["write"]:
            known[record["id"]] = record
    found = [_start(head, slots.get(name, {})) for name, head in heads.items()]
    return sorted(found, key=lambda start: start.began)


def _start(head: Mapping[str, Any], slot: Mapping[str, Any]) -> Start:
    timed, total = slot.get("timed", 0), slot.get("total", 0.0)
    mean = total / timed if timed else 0.0
    spread = math.sqrt(max(slot["squares"] / timed - mean * mean, 0.0)) if timed else math.nan
    own = {"id", "began", "process", "processes", "host", "pid", "queued"}
    return Start(
        process=head["process"], processes=head["processes"], host=head["host"], began=head["began"],
        now=max(slot.get("now", head["began"]), head["began"]), queued=head["queued"],
        first=slot.get("first", 0), step=slot.get("step", 0), owner=slot.get("owner", IMPORTS), end=slot.get("end", ""),
        seconds=slot.get("seconds", {}),
        timed=timed, total=total, deviation=spread, longest=slot.get("longest", 0.0), blocked=slot.get("blocked", 0.0),
        facts={name: value for name, value in head.items() if name not in own},
    )  # fmt: skip


def _problem(record: Mapping[str, Any]) -> str:
    """Checks a line of the file: what is wrong with it; "" where nothing is."""
    texts: tuple[str, ...] = ("id", "owner", "end")
    counts: tuple[str, ...] = ("write", "first", "step", "timed")
    numbers: tuple[str, ...] = ("now", "total", "squares", "longest", "blocked")
    if "began" in record:
        texts, counts, numbers = ("id", "host"), ("process", "processes", "pid"), ("began", "queued")
    if odd := [name for name in texts if type(record.get(name)) is not str or len(record[name]) > 300]:
        return f"its {odd[0]} is no text"
    if odd := [name for name in counts if type(record.get(name)) is not int or not 0 <= record[name] < 2**31]:
        return f"its {odd[0]} is no count"
    seconds = record.get("seconds", {})
    if type(seconds) is not dict or not seconds.keys() <= set(OWNERS) or ("began" not in record and "seconds" not in record):
        return "its seconds have no owner"
    if odd := [n for n in numbers if not _is_time(record.get(n))] or [n for n, s in seconds.items() if not _is_time(s)]:
        return f"its {odd[0]} is no time"
    return ""


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12  # type: ignore[operator]  # it is a number


def read(workdir: str | os.PathLike) -> dict[int, list[Start]]:
    """Process -> its starts, of a run's workdir; {} for a run that an older version wrote. Raises WorkdirError as `starts`."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        return {}
    files = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(r"process-(\d{1,7})\.jsonl", path.name))}
    found = {process: starts(files[process]) for process in sorted(files)}
    return {process: each for process, each in found.items() if each}


def totals(each: Iterable[Start]) -> dict[str, float]:
    """Owner -> seconds of one process from its first start (or its queue) to the last that was heard of it.

    They add up to that time: what no start of it accounts for, it was stopped.
    """
    seconds = dict.fromkeys(OWNERS, 0.0)
    until = None
    for start in each:
        gap = max(start.began - until, 0.0) if until is not None else start.queued
        queued = min(start.queued, gap)
        seconds[QUEUE] += queued
        seconds[STOPPED] += gap - queued
        for owner, s in start.seconds.items():
            seconds[owner] += s
        until = max(start.now, until or 0.0)
    return {owner: s for owner, s in seconds.items() if s > 0}


def of_run(processes: Mapping[int, Sequence[Start]]) -> dict[str, float]:
    """Owner -> seconds, added over all processes."""
    seconds = dict.fromkeys(OWNERS, 0.0)
    for each in processes.values():
        for owner, s in totals(each).items():
            seconds[owner] += s
    return {owner: s for owner, s in seconds.items() if s > 0}


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of the wall time that went into steps which were made for the first time; nan of no time."""
    whole = sum(seconds.values())
    return seconds.get(STEPS, 0.0) / whole if whole else math.nan


def summary(seconds: Mapping[str, float]) -> str:
    """A line about one process: its goodput, and what took most of the rest."""
    whole = sum(seconds.values())
    rest = sorted((s, owner) for owner, s in seconds.items() if owner != STEPS and s >= 0.005 * whole)[::-1]
    most = ", ".join(f"{owner} {s / whole:.0%}" for s, owner in rest[:4])
    return f"goodput {goodput(seconds):.0%} of {whole:.0f} s over all starts{f'; {most}' if most else ''}"


def straggler(processes: Mapping[int, Sequence[Start]]) -> Start | None:
    """The process that holds the others up: whose own part of a step is longer than the median by a tenth of a step, or more.

    Processes leave a step together. The one that comes late (its data, its host) waits least for the devices. A slow device
    does not show here: all wait for it alike.
    """
    newest = [each[-1] for each in processes.values() if each[-1].timed]
    newest = [start for start in newest if start.began >= max(s.began for s in newest) - 3600]
    if len(newest) < 2:
        return None
    by_own = sorted(newest, key=lambda start: start.own)
    worst, median = by_own[-1], by_own[(len(by_own) - 1) // 2]
    return worst if worst.own - median.own >= 0.1 * worst.total / worst.timed else None


def _queued(began: float, before: Sequence[Start]) -> float:
    """Seconds before this start in a scheduler's queue: since it was submitted, or, of a job started again, since it ended."""
    submitted = os.environ.get("JAXTRAIN_SUBMITTED", "")
    if before and lease.slurm("SLURM_RESTART_COUNT"):
        return round(max(began - before[-1].now, 0.0), 3)
    if re.fullmatch(r"\d{9,11}", submitted):
        return round(max(began - max(int(submitted), before[-1].now if before else 0), 0.0), 3)
    return 0.0


def _process_start() -> float:
    """This process's start [s since 1970], from /proc (proc(5): stat, field 22, in clock ticks since boot); else now."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
            return time.time() - float(uptime.read().split()[0]) + ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.time()
