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
from typing import Any, NamedTuple

from jaxtrain.parallel import lease, supervised_attempt
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import jsonl

log = logging.getLogger("jaxtrain")

FOLDER = "goodput"
# The phases, in the order of a run.
QUEUE = "queue"
IMPORTS = "imports and config"
OTHERS = "other processes"
MODEL = "devices and model"
PLAN = "plan"
INDEX = "data index"
RESTORE = "init or restore"
COMPILATION = "compilation"
STEPS = "steps"
AGAIN = "steps made again"
WAIT = "waiting for data"
SAVES = "saves"
EVALUATION = "evaluation"
ENDING = "ending"
STOPPED = "stopped"
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
STARTING = (IMPORTS, OTHERS, MODEL, PLAN, INDEX, RESTORE, COMPILATION)
MAX_BYTES = 100_000_000  # of a file that is read
NEWEST = 3600.0  # [s] before the newest start, within which another process's is compared with it
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
# In the totals, and then facts of the start: the digests of the data, and of the weights that the
# state was initialised from
DATA = "data"
WARM = "warm_start"
# of totals, after which all but the last are dropped: else a start of some weeks has `MAX_BYTES`
MAX_LINES = 1000


class Clock:
    """This process's time: each second since its start is in the phase that `switch` named last.

    Nothing is written before `open`. After it a thread writes, and the loop only adds numbers.
    """

    def __init__(self) -> None:
        self.began = _process_start()
        # The start, by the clock that never jumps.
        self._zero = time.perf_counter() - (time.time() - self.began)
        self._switched = self._zero
        self._phase = IMPORTS
        self._seconds = {IMPORTS: 0.0}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._path: pathlib.Path | None = None
        self._file: jsonl.Appended | None = None
        self._id = uuid.uuid4().hex
        self._highest_step = 0  # of earlier starts
        self._totals = dict(TOTALS)
        self._first_step: int | None = None
        self._read_at = math.nan
        self._inputs: dict[str, str] = {}  # the facts of a start that its totals have
        self._earlier_seconds: dict[str, float] = {}  # until this start, by phase

    def switch(self, phase: str) -> str:
        """Begin a phase. Returns the one before."""
        with self._lock:
            now = time.perf_counter()
            last_phase = self._phase
            seconds = self._seconds.get(last_phase, 0.0) + now - self._switched
            self._seconds[last_phase] = seconds
            self._phase = phase
            self._switched = now
        return last_phase

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Make a context a phase. The one before follows, unless an error ends the process."""
        last_phase = self.switch(phase)
        yield
        self.switch(last_phase)

    def resumed(self, step: int, *, warm: str = "") -> None:
        """Record the step that this start resumes from, at once: a kill may come.

        ``warm``: the digest of the weights that the state was initialised from.
        """
        self._first_step = step
        if warm:
            self._inputs[WARM] = warm
        self._totals["step"] = step
        self._write()

    def reads(self, data: str) -> None:
        """Record which data this start reads, by their digest."""
        self._inputs[DATA] = data

    def steps(self, step: int) -> None:
        """Begin the steps after ``step``."""
        self.switch(AGAIN if step < self._highest_step else STEPS)
        self._totals["step"] = step
        self._read_at = math.nan
        if self._first_step is None:
            self._first_step = step

    def read(self, step: int, blocked: float) -> None:
        """Note at every step that ``step`` was read, after the loop waited ``blocked`` seconds."""
        now = time.perf_counter()
        totals = self._totals
        seconds = now - self._read_at
        if seconds > 0:  # it is nan at the first step
            totals["timed"] += 1
            totals["total"] += seconds
            totals["squares"] += seconds * seconds
            totals["longest"] = max(totals["longest"], seconds)
            totals["blocked"] += blocked
        totals["step"] = step
        self._read_at = now
        if self._phase == AGAIN and step >= self._highest_step:
            self.switch(STEPS)

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds until now. They add up to the age of the process."""
        with self._lock:
            seconds = dict(self._seconds)
            since_switch = time.perf_counter() - self._switched
            seconds[self._phase] = seconds.get(self._phase, 0.0) + since_switch
            return seconds

    def goodput(self) -> float:
        """Return this process's goodput until now, over all its starts that are known."""
        seconds = collections.Counter(self._earlier_seconds)
        seconds.update(self.seconds())
        return goodput(seconds)

    def line(self) -> str:
        """How long each part of the start took, once the first step is read."""
        parts = {}
        for phase, seconds in self.seconds().items():
            name = "first step" if phase in (STEPS, AGAIN) else phase
            parts[name] = seconds
        listing = [f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05]
        total = sum(parts.values())
        return f"{total:.1f} s from the command to the first step: {', '.join(listing)}"

    def open(self, workdir: str, *, process: int, processes: int, facts: Mapping[str, Any]) -> None:
        """Begin to write into ``workdir``, with ``facts`` in the first line.

        A full disk ends the file, not the run. Raises WorkdirError: something else than a file has
        its name.
        """
        path = pathlib.Path(workdir) / FOLDER / f"process-{process}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            earlier = starts(path)
            head = {
                "id": self._id,
                "began": round(self.began, 3),
                "process": process,
                "processes": processes,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "queued": _queued(self.began, earlier),
                **facts,
            }
            self._highest_step = max((start.step for start in earlier), default=0)
            self._earlier_seconds = totals([*earlier, _start(head, {})])
            self._path = path
            self._shorten(path)
        except OSError as error:
            log.warning("goodput is not recorded: %s cannot be written (%s)", path, error.strerror)
            return
        self._append(head)
        self._write()
        self._thread = threading.Thread(target=self._run, args=(path,), name="goodput", daemon=True)
        self._thread.start()

    def close(self, end: str) -> None:
        """Write the last totals, with the reason of the process's end in a few words."""
        self._closed.set()
        if not self._thread:
            return
        self._thread.join()
        self._totals["end"] = end.encode()[:200].decode(errors="ignore")
        self._write()
        assert self._file
        assert self._path
        self._file.close()
        self._thread = None
        self._file = None
        if self._path.name == "process-0.jsonl":
            with contextlib.suppress(OSError, WorkdirError):
                every_start = starts(self._path)
                if every_start:  # none if the workdir was deleted
                    log.info("%s", summary(totals(every_start)))
                for cause, seconds in seconds_by_cause(every_start).items():
                    log.info("%.0f s were lost because %s", seconds, cause)

    def _run(self, path: pathlib.Path) -> None:
        for n_lines in itertools.count(1):
            age = time.perf_counter() - self._zero
            if self._closed.wait(min(max(1.0, age / 500), 10.0)):
                return
            self._write()
            if n_lines % MAX_LINES == 0:
                with contextlib.suppress(OSError, WorkdirError):
                    self._shorten(path)

    def _shorten(self, path: pathlib.Path) -> None:
        """Leave the first and the last line of each start, without a kill's incomplete ones."""
        with self._writing:
            if self._file and self._file.waiting:
                return
            lines = []
            for record in _records(path):
                lines += [line for line in (record.head_line, record.last_line) if line]
            jsonl.rewrite(path, lines)
            self._file = jsonl.Appended(path)

    def _write(self) -> None:
        """Append the totals, which wait in memory while a disk is full, unless there is no file."""
        with self._writing:
            seconds = {phase: round(s, 3) for phase, s in self.seconds().items()}
            record = {
                "id": self._id,
                **self._totals,
                "first": self._first_step or 0,
                "phase": self._phase,
                "now": round(self.began + sum(seconds.values()), 3),
                "seconds": seconds,
                **self._inputs,
            }
            self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._file:
            line = json.dumps(record, ensure_ascii=False)
            self._file.write(line.encode() + b"\n")
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
        if not self.timed:
            return math.nan
        mean = self.total / self.timed
        return math.sqrt(max(self.squares / self.timed - mean * mean, 0.0))


def restarts(every_start: Sequence[Start]) -> int:
    """Count the later starts that made a step or were killed before one, not refused ones."""
    made_steps = {STEPS, AGAIN}
    counted = [s for s in every_start if not s.end or made_steps & s.seconds.keys()]
    return max(len(counted) - 1, 0)


class Restart(NamedTuple):
    """A start by a supervisor after a fault."""

    attempt: int
    began: float  # [s since 1970]
    cause: str
    seconds: float  # stopped, starting, and making steps again
    processes: int
    hosts: tuple[str, ...]  # one for each process; () if they are unknown


def supervised_restarts(every_start: Sequence[Start]) -> list[Restart]:
    """List the starts that a supervisor made after a fault, and the time that each took."""
    listed = []
    for before, start in itertools.pairwise(every_start):
        attempt, cause = start.facts.get("attempt"), start.facts.get("cause")
        if type(attempt) is not int or not isinstance(cause, str) or not cause:
            continue
        seconds = max(start.began - before.now, 0.0)
        seconds += sum(start.seconds.get(phase, 0.0) for phase in (*STARTING, AGAIN))
        hosts = start.facts.get("hosts")
        names = tuple(map(str, hosts)) if isinstance(hosts, list) else ()
        restart = Restart(attempt, start.began, cause[:300], seconds, start.processes, names)
        listed.append(restart)
    return listed


def seconds_by_cause(every_start: Sequence[Start]) -> dict[str, float]:
    """Cause of a fault -> seconds until its run was as far again, the most first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for restart in supervised_restarts(every_start):
        seconds[restart.cause] += restart.seconds
    return {cause: seconds[cause] for cause in sorted(seconds, key=seconds.__getitem__)[::-1]}


def starts(path: pathlib.Path) -> list[Start]:
    """Read a file's starts in their order, without odd lines. Raises WorkdirError: none, or huge.

    They need not be of one host, and the clocks of hosts differ.
    """
    return [_start(record.head, record.last) for record in _records(path)]


class _Record(NamedTuple):
    """The first and the last record of a start, with their lines. It may have one alone."""

    head: dict[str, Any]
    head_line: bytes
    last: dict[str, Any]
    last_line: bytes


def _records(path: pathlib.Path) -> list[_Record]:
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        size = path.stat().st_size
        raise WorkdirError(f"{path} has {size} bytes, which no run writes; move it away")
    records, _ = jsonl.read(path, _problem)
    heads: dict[str, tuple[dict[str, Any], bytes]] = {}
    last: dict[str, tuple[dict[str, Any], bytes]] = {}
    for record, line in records:
        by_start = heads if "began" in record else last
        by_start[record["id"]] = record, line
    return [_Record(*head, *last.get(start, ({}, b""))) for start, head in heads.items()]


def _start(head: Mapping[str, Any], last: Mapping[str, Any]) -> Start:
    facts = {name: value for name, value in head.items() if name not in HEAD}
    for name in (DATA, WARM):
        if isinstance(last.get(name), str):
            facts[name] = last[name]
    fields = {name: head[name] for name in HEAD if name not in ("id", "pid")}
    fields |= {name: last.get(name, default) for name, default in TOTALS.items()}
    fields["now"] = max(fields["now"], head["began"])
    return Start(**fields, facts=facts)


def _problem(record: Mapping[str, Any]) -> str:
    expected = HEAD if "began" in record else {"id": "", **TOTALS}
    for name, value in expected.items():
        if not _is(type(value), record.get(name)):
            return f"its {name} is not as a run writes it"
    return ""


def _is(kind: type, value: Any) -> bool:
    """Tell whether a run could have written ``value`` for a field of this kind."""
    if kind is dict:
        if type(value) is not dict or not value.keys() <= set(PHASES):
            return False
        return all(_is(float, seconds) for seconds in value.values())
    if kind is str:
        return type(value) is str and len(value) <= 300
    limit = 2**31 if kind is int else 1e12
    return type(value) in (int, kind) and 0 <= value < limit


def read(workdir: str | os.PathLike[str]) -> dict[int, list[Start]]:
    """Process -> its starts, {} without a record of a workdir. Raises WorkdirError."""
    folder = pathlib.Path(workdir) / FOLDER
    if not folder.is_dir():
        return {}
    files = {}
    for path in folder.iterdir():
        if match := re.fullmatch(r"process-(\d{1,7})\.jsonl", path.name):
            files[int(match[1])] = path
    starts_by_process = {process: starts(path) for process, path in sorted(files.items())}
    return {process: listed for process, listed in starts_by_process.items() if listed}


def totals(every_start: Iterable[Start]) -> dict[str, float]:
    """Phase -> seconds of a process from its first start or queue on; stopped for the rest."""
    seconds: collections.Counter[str] = collections.Counter()
    until = None
    for start in every_start:
        gap = start.queued if until is None else max(start.began - until, 0.0)
        queued = min(start.queued, gap)
        seconds.update({QUEUE: queued, STOPPED: gap - queued})
        seconds.update(start.seconds)
        until = max(start.now, until or 0.0)
    return _in_order(seconds)


def of_run(processes: Mapping[int, Sequence[Start]]) -> dict[str, float]:
    """Phase -> seconds, added over all processes."""
    seconds: collections.Counter[str] = collections.Counter()
    for starts_of_process in processes.values():
        seconds.update(totals(starts_of_process))
    return _in_order(seconds)


def _in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: seconds[phase] for phase in PHASES if seconds[phase] > 0}


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the share of steps' wall time that was made first, or nan without time."""
    total = sum(seconds.values())
    return seconds.get(STEPS, 0.0) / total if total else math.nan


def summary(seconds: Mapping[str, float]) -> str:
    """Return a line about one process: its goodput, and the largest other phases."""
    total = sum(seconds.values())
    losses = [(s, phase) for phase, s in seconds.items() if phase != STEPS and s >= 0.005 * total]
    text = f"goodput {goodput(seconds):.0%} of {total:.0f} s over all starts"
    if losses:
        largest = sorted(losses, reverse=True)[:4]
        text += f"; {', '.join(f'{phase} {s / total:.0%}' for s, phase in largest)}"
    return text


def straggler(processes: Mapping[int, Sequence[Start]]) -> Start | None:
    """Return the process that delays the others by a tenth of a step or more, if there is one.

    Processes leave a step together. The one that comes late (its data, its host) waits least for
    the devices. A slow device does not show here: all wait for it alike.
    """
    newest = [every_start[-1] for every_start in processes.values() if every_start[-1].timed]
    began = max((start.began for start in newest), default=0.0)
    newest = [start for start in newest if start.began >= began - NEWEST]
    if len(newest) < 2:
        return None
    by_own = sorted(newest, key=lambda start: start.own)
    slowest = by_own[-1]
    median = by_own[(len(by_own) - 1) // 2]
    seconds_per_step = slowest.total / slowest.timed
    return slowest if slowest.own - median.own >= 0.1 * seconds_per_step else None


def _queued(began: float, earlier: Sequence[Start]) -> float:
    """Seconds in a scheduler's queue, since its submission or the end of the start before."""
    if supervised_attempt.from_environment().attempt > 0:
        return 0.0  # its supervisor had no queue to wait in
    ended = earlier[-1].now if earlier else 0.0
    if earlier and lease.slurm("SLURM_RESTART_COUNT"):
        return round(max(began - ended, 0.0), 3)
    submitted = os.environ.get("JAXTRAIN_SUBMITTED", "")
    if re.fullmatch(r"\d{9,11}", submitted):
        return round(max(began - max(int(submitted), ended), 0.0), 3)
    return 0.0


def _process_start() -> float:
    """Return the process's start [s since 1970] by proc(5): stat's field 22 in ticks; else now."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            fields = stat.read().rsplit(")", 1)[1].split()
            seconds_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            boot = time.time() - float(uptime.read().split()[0])
            return boot + seconds_after_boot
    except OSError:
        return time.time()
