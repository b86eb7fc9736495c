"""How long a run stands still after a fault: python -m tests.proofs.recovery [options]

    python -m tests.proofs.recovery --minutes 60 --seed 0 --faults 200 --out results
    python -m tests.proofs.recovery --minutes 60 --seed 1 --mesh fsdp --out results
    python -m tests.proofs.recovery --faults 20 --without-supervisors
    python -m tests.proofs.recovery --out results --undisturbed 1500
    python -m tests.proofs.recovery --out results --table

Four processes on two hosts (network namespaces, if this user may make them) train the bird demo of
the soak, with a step in memory after each. Faults are drawn from the seed, each some steps after
the run went on, and the seconds from the fault to the next new step are measured:

    kill         SIGKILL of one of the processes 1 to 3     coordinator  of process 0
    supervisor   SIGKILL of a supervisor, which is started again at once, as by its scheduler
    host         SIGKILL of all on one host, whose memory is lost; started again at once
    takeover     SIGKILL of a process, and within the next seconds of another, or of a supervisor
    both-hosts   as host, and within the next seconds as host for the other
    partners     SIGKILL of a process, of the one with the copy of its steps and of their
                 supervisors; the memory of both is lost
    stop         SIGSTOP of a process for 16 to 20 s, longer than a host may be silent: nothing is
                 taken for dead. The seconds count from its end
    disk         the disk of the workdir is full for 8 s: the run trains on meanwhile
    full-kill    the disk is full for 12 s, and meanwhile a process is killed. The seconds count
                 from the end of the full disk, or from the kill if the run goes on before it
    full-host    the same, and a host meanwhile
    cut          the link between the hosts is down for 16 s

With --wait=5 (supervise.wait) there is one kind:

    gone         as host, but the host is started again only once the others have gone on without
                 it. The seconds until then count, and "back" has those until all go on

Its runs have several meshes, so that only their rows and the numbers of their records are compared.

A kind is drawn by its weight (`KINDS`): the kinds that last long come seldom. A fault comes 2 to 4
steps after the run went on, so that each step has a copy in memory, and a checkpoint every ten
steps.

With --model=toy they train a model that takes no time. With --mesh=data all hosts have replicas,
with --mesh=fsdp each process has its own part, and partners on the other host get copies. Without
supervisors the same command is started again as soon as all processes have ended, as by a
scheduler without a queue.

New steps and those that are made again are counted by their records: on a full disk steps have
none, and a start there may have none, too, so that it counts no step again.

In the end every batch's rows, every record's loss and every digest are compared with those of an
undisturbed run, which --out keeps for the next time. --undisturbed makes its steps beforehand. Each
fault is a line of faults.jsonl there, and logs/RUN has the logs of its supervisors. A seed whose
faults are there goes on with the next one, and --faults counts them, too. After a fault behind
which the run stands still another run begins, and so it does after an error of this program: both
are lines, and count as wrong. Prints a row for each kind, and exits with 1 if something differs or
is wrong.
"""

import argparse
import collections
import contextlib
import ctypes
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtrain.parallel.cluster import processes as cluster_processes
from jaxtrain.supervise import steps_in_memory, template
from jaxtrain.telemetry import goodput
from tests.proofs import soak
from tests.support import small_runs

PROCESSES = 4
WHAT = {
    "kill": "a process is killed",
    "coordinator": "process 0 is killed",
    "supervisor": "a supervisor is killed",
    "host": "a host is gone, and comes back at once",
    "takeover": "a second process or supervisor is killed during the restart",
    "both-hosts": "both hosts are lost, one during the restart of the other",
    "partners": "both partners of a copy are lost, with its memory",
    "stop": "a process is stopped for 16 to 20 s, counted from its end",
    "disk": "the disk is full for 8 s",
    "full-kill": "the disk is full for 12 s, and a process is killed",
    "full-host": "the disk is full for 12 s, and a host is gone",
    "cut": "the link is cut for 16 s",
    "gone": "a host is gone, until the others go on without it",
}
KINDS = {  # how often each is drawn
    "kill": 4,
    "coordinator": 3,
    "supervisor": 3,
    "host": 3,
    "takeover": 2,
    "both-hosts": 1,
    "partners": 2,
    "stop": 1,
    "disk": 1,
    "full-kill": 1,
    "full-host": 1,
    "cut": 2,
}
GONE = "gone"
OF_SUPERVISORS = (
    "supervisor",
    "takeover",
    "both-hosts",
    "partners",
    "disk",
    "full-kill",
    "full-host",
)
TWICE = ("takeover", "both-hosts")
ONE_RESTART = ("kill", "coordinator", "supervisor", "host")
OF_DISK = ("disk", "full-kill", "full-host")
CUT = 16.0  # [s] longer than a host may be silent
MARGIN = 40.0  # [s] for a last fault, and the comparison
UNTIL = "until the next start"
VERSION = "version.txt"  # of an undisturbed run
FULL = 8.0  # [s] several records and a checkpoint
FULL_DURING_FAULT = 12.0  # [s] also the next attempt starts on a full disk
STOPPED = (16.0, 20.0)  # [s]
TAKEOVER = (0.05, 4.0)  # [s] between two faults, of which the second meets the take-over
BETWEEN = (2, 4)  # [steps] from one fault's next new step to the next fault
STUCK = 300.0  # [s] without a new step
BOUND = 30.0  # [s] from a fault to the next new step
MESHES = {
    "data": (),
    "fsdp": ("--config.mesh.data=1", "--config.mesh.fsdp=4"),
}
RUN = (
    "--config.train.steps=20000",  # more than it reaches
    "--config.metrics.every=1",
    "--config.metrics.digest=true",
    "--config.checkpoint.every=10",
    "--config.loader=soak_loader",
)
MODELS = {  # their options, and the loader whose batches are noted
    "bird": (soak.MODELS["bird"], "loaders.audio.spectrogram"),
    "toy": (
        ("--config={folder}/toy.py", "--config.train.eval_every=0", "--config.mesh.data=4"),
        "tests.support.toy_rows",
    ),
}
SUPERVISED = (
    "--supervise",
    "--config.checkpoint.memory_every=1",
    "--config.supervise.restarts=100000",
)
COMPARED = ("loss", "digest_high", "digest_low")


class Job:
    """The processes of a run, or their supervisors. ``folder``: of logs and rows."""

    def __init__(
        self,
        folder: pathlib.Path,
        workdir: pathlib.Path,
        hosts: soak.Hosts,
        options: Sequence[str],
        *,
        model: str,
        starts: bool = True,
    ):
        self.model, self.loader = MODELS[model]
        self.folder = folder
        self.workdir = workdir
        self.hosts = hosts
        self.options = options
        self.supervised = "--supervise" in options
        self.port = random.SystemRandom().randrange(20_000, 32_000)
        self.ends: list[int] = []  # codes with which supervisors ended by themselves
        self.processes: list[subprocess.Popen] = []
        if starts:
            self.start_all()

    def start_all(self) -> None:
        self.processes = [self.start(i) for i in range(PROCESSES)]

    def start(self, process: int) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
        env |= {
            "PYTHONPATH": f"{soak.ROOT}:{self.folder}",
            "JAX_PLATFORMS": "cpu",
            "NO_GCE_CHECK": "true",
            "SOAK_LOADER": self.loader,
            "SOAK_ROWS": str(self.folder / f"rows-{process}.jsonl"),
            "JAXTRAIN_SECRET": "5e" * 16,
            "JAXTRAIN_COORDINATOR": self.hosts.coordinator(self.port),
            "JAXTRAIN_PROCESSES": str(PROCESSES),
            "JAXTRAIN_PROCESS": str(process),
        }
        command = [*self.hosts.inside(host_of(process)), sys.executable, "-m", "jaxtrain.main"]
        command += [option.format(folder=self.folder) for option in self.model]
        command += [*RUN, *self.options, f"--config.workdir={self.workdir}"]
        with (self.folder / f"log-{process}.txt").open("ab") as log:
            return subprocess.Popen(
                command, cwd=soak.ROOT, env=env, stdout=log, stderr=log, preexec_fn=end_with_parent
            )

    def start_ended(self) -> None:
        """Act as a scheduler: start ended ones again, without supervisors all at once."""
        ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
        if ended and not self.supervised:
            if len(ended) < PROCESSES:
                return
            self.port += 1  # as another job would have
        for process in ended:
            code = self.processes[process].returncode
            self.ends += [code] if code >= 0 else []
            self.processes[process] = self.start(process)

    def heads(self, process: int) -> list[dict[str, Any]]:
        """The starts of a process, as its goodput has them."""
        return [line for line in self.goodput(process) if "pid" in line]

    def goodput(self, process: int) -> list[dict[str, Any]]:
        path = self.workdir / "goodput" / f"process-{process}.jsonl"
        return list(whole_lines(path.read_text())) if path.exists() else []

    def pid(self, process: int) -> int:
        """The process id of a process that trains, 0 if there is none now.

        Its number in the launcher may be another than in the attempt, by which its goodput goes.
        """
        pids = [self.processes[process].pid]
        for _ in range(2 if self.supervised else 0):  # its template, and the template's fork
            pids = [child for pid in pids for child in children_of(pid)]
        return pids[0] if pids else 0

    def restart(self, began: float) -> dict[str, float]:
        """Seconds of process 0's newest start by phase, and from a fault [s since 1970] to it."""
        totals = [line for line in self.goodput(0) if "phase" in line]
        seconds: dict[str, float] = totals[-1]["seconds"]
        phases = {name: seconds[name] for name in goodput.STARTING if name in seconds}
        return {UNTIL: round(self.heads(0)[-1]["began"] - began, 3), **phases}

    def cpu_seconds(self) -> float:
        """CPU time of the newest start of all processes: on a busy machine it says more."""
        ticks = 0
        for process in range(PROCESSES):
            with contextlib.suppress(OSError):
                stat = pathlib.Path(f"/proc/{self.pid(process)}/stat").read_text()
                fields = stat.rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # in user and in kernel mode
        return ticks / os.sysconf("SC_CLK_TCK")

    def first_step(self) -> int:
        """The step that the newest start resumed from."""
        return int([line["first"] for line in self.goodput(0) if "first" in line][-1])

    def records(self) -> dict[int, list[float]]:
        """Step -> its loss and digest."""
        found = {}
        path = self.workdir / "metrics.jsonl"
        for record in whole_lines(path.read_text()) if path.exists() else ():
            if record["split"] == "train":
                found[record["step"]] = [record[name] for name in COMPARED]
        return found

    def step(self) -> int:
        path = self.workdir / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 20_000, 0))
            for line in reversed(file.read().splitlines()):
                with contextlib.suppress(ValueError):
                    return int(json.loads(line)["step"])
        return 0

    def rows(self) -> dict[tuple[int, int], str]:
        """(Position, row) -> digest. Raises AssertionError: two contents."""
        found: dict[tuple[int, int], str] = {}
        for path in sorted(self.folder.glob("rows-*.jsonl")):
            for position, row, digest in whole_lines(path.read_text()):
                known = found.setdefault((position, row), digest)
                assert known == digest, f"row {row} of batch {position} has two contents"
        return found

    def position(self) -> int:
        """The last batch that process 0 has read."""
        return int(list(whole_lines((self.folder / "rows-0.jsonl").read_text()))[-1][0])

    def reaches(self, step: int, *, starts: bool = True) -> bool:
        """Wait for a step. ``starts``: start ended processes again meanwhile."""
        deadline = time.monotonic() + STUCK
        while self.step() < step:
            if time.monotonic() > deadline:
                return False
            if starts:
                self.start_ended()
            time.sleep(0.05)
        return True

    def kill(self, process: int) -> None:
        if pid := self.pid(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose(self, process: int) -> None:
        """Kill a process and its supervisor, whose memory is lost."""
        self.kill(process)
        supervisor = self.processes[process]
        supervisor.kill()
        supervisor.wait()
        for holder in steps_in_memory.PARENT.glob(f"jaxtrain-*/{steps_in_memory.HOLDER}"):
            with contextlib.suppress(OSError, ValueError):  # of another run
                if json.loads(holder.read_text())["pid"] == supervisor.pid:
                    shutil.rmtree(holder.parent)

    def lose_host(self, host: int) -> None:
        for process in range(PROCESSES):
            if host_of(process) == host:
                self.lose(process)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def logs(self) -> str:
        texts = []
        for log in sorted(self.folder.glob("log-*.txt")):
            texts.append(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)


def host_of(process: int) -> int:
    return process * soak.HOSTS // PROCESSES


def end_with_parent() -> None:
    """Let the kernel end a supervisor with this program, which may be killed."""
    ctypes.CDLL(None).prctl(template.PR_SET_PDEATHSIG, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return children


def whole_lines(text: str) -> Iterator[Any]:
    """Yield the JSON of each line. One may be cut by a kill, or is being written."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


@contextlib.contextmanager
def full(disk: pathlib.Path) -> Iterator[None]:
    """Keep a disk full: also what a save that failed has freed."""
    filler = disk / "filler"
    program = (
        "import sys, time\n"
        "while True:\n"
        "    for size in (1 << 20, 4096):\n"
        "        try:\n"
        "            with open(sys.argv[1], 'ab', buffering=0) as file:\n"
        "                while file.write(bytes(size)): pass\n"
        "        except OSError:\n"
        "            time.sleep(0.02)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(filler)])
    try:
        deadline = time.monotonic() + 60
        while shutil.disk_usage(disk).free >= 4096 and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()
        filler.unlink(missing_ok=True)


class Faults:
    """Does faults to a job. Each returns the time from which its seconds count."""

    def __init__(self, job: Job, disk: pathlib.Path, draw: random.Random):
        self.job = job
        self._folder = disk
        self.draw = draw
        self.notes: dict[str, Any] = {}

    def do(self, kind: str) -> float:
        name = kind.replace("-", "_")
        began: float = getattr(self, name)(time.monotonic())
        return began

    def kill(self, began: float) -> float:
        self.job.kill(self.draw.randrange(1, PROCESSES))
        return began

    def coordinator(self, began: float) -> float:
        self.job.kill(0)
        return began

    def supervisor(self, began: float) -> float:
        victim = self.notes["victim"] = self.draw.randrange(PROCESSES)
        self.job.processes[victim].kill()
        return began

    def host(self, began: float) -> float:
        host = self.notes["victim"] = self.draw.randrange(soak.HOSTS)
        self.job.lose_host(host)
        return began

    def takeover(self, began: float) -> float:
        first, second = self.draw.sample(range(PROCESSES), 2)
        wait, of_supervisor = self.draw.uniform(*TAKEOVER), self.draw.random() < 0.5
        self.notes |= {"victim": [first, second], "wait": wait, "supervisor": of_supervisor}
        self.job.kill(first)
        self._await(wait)
        if of_supervisor:
            self.job.processes[second].kill()
        else:
            self.job.kill(second)
        return began

    def both_hosts(self, began: float) -> float:
        first = self.draw.randrange(soak.HOSTS)
        wait = self.draw.uniform(*TAKEOVER)
        self.notes |= {"victim": [first, 1 - first], "wait": wait}
        self.job.lose_host(first)
        self._await(wait)
        self.job.lose_host(1 - first)
        return began

    def _await(self, seconds: float) -> None:
        """Wait, while ended supervisors are started again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.job.start_ended()
            time.sleep(0.05)

    def gone(self, began: float) -> float:
        host = self.notes["victim"] = self.draw.randrange(soak.HOSTS)
        step = self.job.step()
        self.job.lose_host(host)
        if not self.job.reaches(step + 2, starts=False):
            return began
        self.notes["seconds"] = time.monotonic() - began
        self.notes["members"] = self.job.heads(0)[-1]["processes"]
        returned = time.monotonic()
        self.job.start_ended()
        while self.job.heads(0)[-1]["processes"] < PROCESSES:
            if time.monotonic() > returned + STUCK:
                return began
            time.sleep(0.05)
        self.job.reaches(self.job.step() + 2)
        self.notes["back"] = time.monotonic() - returned
        return began

    def partners(self, began: float) -> float:
        first = self.draw.randrange(PROCESSES)
        elsewhere = [i % PROCESSES for i in range(first + 1, first + PROCESSES)]
        second = next(i for i in elsewhere if host_of(i) != host_of(first))
        self.notes["victim"] = [first, second]
        self.job.lose(first)
        self.job.lose(second)
        return began

    def stop(self, began: float) -> float:
        seconds = self.notes["stopped"] = self.draw.uniform(*STOPPED)
        victim = self.draw.randrange(PROCESSES)
        heads = [len(self.job.heads(i)) for i in range(PROCESSES)]
        pid = self.job.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        began = time.monotonic()
        self.job.reaches(self.job.step() + 2)
        if heads != [len(self.job.heads(i)) for i in range(PROCESSES)]:
            self.notes["wrong"] = "a process that was stopped is taken for dead"
        return began

    def disk(self, began: float) -> float:
        with full(self._folder):
            began = time.monotonic()
            position = self.job.position()
            while self.job.position() < position + 2 and time.monotonic() < began + STUCK:
                self.job.start_ended()
                time.sleep(0.05)
            self.notes["seconds"] = time.monotonic() - began
            time.sleep(max(began + FULL - time.monotonic(), 0))
        # Until its records are written no step is copied into memory (docs/clusters.md).
        self.job.reaches(self.job.position() + 1)
        return began

    def full_kill(self, began: float) -> float:
        victim = self.notes["victim"] = self.draw.randrange(PROCESSES)
        return self._while_full(lambda: self.job.kill(victim))

    def full_host(self, began: float) -> float:
        victim = self.notes["victim"] = self.draw.randrange(soak.HOSTS)
        return self._while_full(lambda: self.job.lose_host(victim))

    def _while_full(self, fault: Callable[[], None]) -> float:
        """Do a fault while the disk is full. Return when there is room again.

        If the next new step is there before, note its seconds since the fault.
        """
        with full(self._folder):
            began = time.monotonic()
            self._await(self.draw.uniform(1, 4))
            fault()
            at, step = time.monotonic(), self.job.step()
            self.notes["step"] = step  # some may have been recorded on the full disk
            while time.monotonic() < began + FULL_DURING_FAULT:
                self._await(0.05)
                if "seconds" not in self.notes and self.job.step() >= step + 2:
                    self.notes["seconds"] = time.monotonic() - at
        return time.monotonic()

    def cut(self, began: float) -> float:
        self.job.hosts.cable("down")
        time.sleep(CUT)
        self.job.hosts.cable("up")
        return began


class Results:
    """Lines of faults, and of the sessions that they were done in, in a file."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.lines = list(whole_lines(path.read_text())) if path.exists() else []

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def done(self, chosen: dict[str, Any]) -> int:
        """The number of faults of a seed, mesh and kind of run."""
        same = [line for line in self.lines if "kind" in line and chosen.items() <= line.items()]
        return len(same)

    def table(self) -> str:
        """Return a table for each mesh and kind of run, as docs/results/proofs.md has it."""
        by_run = collections.defaultdict(list)
        for line in self.lines:
            by_run[run_of(line)].append(line)
        return "\n\n".join(table_of(run, lines) for run, lines in by_run.items())


def run_of(line: dict[str, Any]) -> str:
    supervised = "with supervisors" if line["supervised"] else "without supervisors"
    waits = f", supervise.wait={line['fewer_after']}" if line["fewer_after"] else ""
    return f"{line['model']}, mesh {line['mesh']}, {supervised}{waits}"


def table_of(run: str, lines: Sequence[dict[str, Any]]) -> str:
    faults = [line for line in lines if "again" in line]
    odd = [line for line in lines if "kind" in line and "again" not in line]
    by_kind = collections.defaultdict(list)
    for fault in faults:
        by_kind[fault["kind"]].append(fault)
    rows = [
        f"| {run} | n | median, 90 %, most [s] | steps again: most |",
        "|---|---:|---:|---:|",
    ]
    for kind, text in WHAT.items():
        if of_kind := by_kind[kind]:
            rows.append(row(text, of_kind))
    returns = [{**line, "seconds": line["back"]} for line in faults if "back" in line]
    if returns:
        rows.append(row("it comes back, until all go on together", returns))
    if faults:
        rows.append(row("all", faults))
        late = sum(fault["seconds"] > BOUND for fault in faults)
        rows.append(f"\n{late} of {len(faults)} took more than {BOUND:.0f} s.")
    restarts = [fault for fault in faults if fault["kind"] in ONE_RESTART and fault["phases"]]
    phases = collections.defaultdict(list)
    for restart in restarts:
        for name, seconds in restart["phases"].items():
            phases[name].append(seconds)
    if restarts:
        listed = [f"{name} {statistics.median(of):.1f}" for name, of in phases.items()]
        cpu = statistics.median(restart["cpu"] for restart in restarts)
        rows += [
            f"\nAfter {', '.join(ONE_RESTART)}, median seconds:",
            f"process 0: {', '.join(listed)}",
            f"CPU time of the {PROCESSES} processes: {cpu:.1f}",
        ]
    totals = collections.Counter[str]()
    sessions = [line for line in lines if "kind" not in line]
    for session in sessions:
        totals.update({name: session[name] for name in ("records", "rows", "wrong")})
    rows.append(
        f"\n{len(sessions)} runs: {totals['records']} records and {totals['rows']} rows"
        f" compared with an undisturbed run's, {totals['wrong']} differ or are missing"
    )
    compared = {session["session"] for session in sessions}
    if lost := [fault for fault in faults if fault["session"] not in compared]:
        rows.append(f"{len(lost)} faults are of runs that ended before they were compared")
    if odd:
        rows.append(f"{len(odd)} faults without a time: {', '.join(line['kind'] for line in odd)}")
    if ends := [code for fault in faults for code in fault["ends"]]:
        rows.append(f"supervisors that ended by themselves, with codes {sorted(set(ends))}")
    return "\n".join(rows)


def row(text: str, faults: Sequence[dict[str, Any]]) -> str:
    seconds = sorted(fault["seconds"] for fault in faults)
    nine_tenths = seconds[min(int(0.9 * len(seconds)), len(seconds) - 1)]
    again = max(fault["again"] for fault in faults)
    median = statistics.median(seconds)
    return (
        f"| {text} | {len(seconds)} | {median:.1f}, {nine_tenths:.1f}, {seconds[-1]:.1f} |"
        f" {again} |"
    )


def extend(job: Job, until: int) -> None:
    """Let an undisturbed run of these files reach a step. One of other files begins again."""
    if not is_current(job):
        shutil.rmtree(job.folder, ignore_errors=True)
        write_sources(job.folder)
        (job.folder / VERSION).write_text(cluster_processes.digest_of_files())
    if job.step() < until:
        job.start_all()
        try:
            if not job.reaches(until):
                raise SystemExit(f"the undisturbed run stood still:\n{job.logs()}")
        finally:
            job.end()


def is_current(job: Job) -> bool:
    """Whether an undisturbed run is of these files."""
    version = job.folder / VERSION
    return version.exists() and version.read_text() == cluster_processes.digest_of_files()


def write_sources(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    small_runs.toy(folder)
    (folder / "soak_loader.py").write_text(soak.LOADER)


def differences(job: Job, expected: Job, *, bits: bool) -> tuple[dict[str, int], list[str]]:
    """Compare a disturbed run with an undisturbed one: numbers for the results, and texts.

    ``bits``: compare losses and digests, too.
    """
    texts = []
    records, other_records = job.records(), expected.records()
    last = max(records, default=0)
    for step in range(1, last + 1):
        is_same = records.get(step) == other_records.get(step) if bits else step in records
        if not is_same:
            texts.append(f"record {step}: {records.get(step)}, not {other_records.get(step)}")
    try:
        rows = job.rows()
    except AssertionError as error:
        rows = {}
        texts.append(str(error))
    n_rows = 0
    for (position, row), digest in expected.rows().items():
        if position < last:
            n_rows += 1
            if rows.get((position, row)) != digest:
                texts.append(f"row {row} of batch {position}: {rows.get((position, row))}")
    return {"records": last, "rows": n_rows, "wrong": len(texts)}, texts


class Campaign:
    """Runs with faults, one after the other, until the time or the number of faults is over."""

    def __init__(self, args: argparse.Namespace, out: pathlib.Path, may_fill: bool):
        self._args = args
        self._out = out
        self._hosts = soak.Hosts()
        self.close = self._hosts.close
        supervised = not args.without_supervisors
        self._run = {"seed": args.seed, "mesh": args.mesh, "model": args.model}
        self._run |= {"supervised": supervised, "fewer_after": args.wait}
        self.results = Results(out / "faults.jsonl")
        self._kinds = []
        for kind in args.kinds.split(","):
            is_possible = may_fill or kind not in OF_DISK
            is_possible &= self._hosts.real or kind != "cut"
            if is_possible and (supervised or kind not in OF_SUPERVISORS):
                self._kinds.append(kind)
        self._options = (*MESHES[args.mesh], *(SUPERVISED if supervised else ()))
        if args.wait:
            self._options += (f"--config.supervise.wait={args.wait}",)
        self._deadline = time.monotonic() + 60 * args.minutes
        self.wrong = 0
        self._session = ""
        self._pace = 1.0

    def undisturbed(self) -> Job:
        """Return an undisturbed run, which is not started yet."""
        folder = self._out / f"undisturbed-{self._args.model}-{self._args.mesh}"
        options, model = MESHES[self._args.mesh], self._args.model
        return Job(folder, folder / "run", self._hosts, options, model=model, starts=False)

    def session(self, folder: pathlib.Path) -> bool:
        """Do faults to a run in a folder, and compare it. Return whether another one may begin."""
        write_sources(folder)
        expected = self.undisturbed()
        name = self._session = f"run-{len(self.results.lines)}"
        workdir = folder / soak.DISK / name
        job = Job(folder, workdir, self._hosts, self._options, model=self._args.model)
        goes_on = False
        try:
            goes_on = self._disturb(job, known=expected.step() if is_current(expected) else 0)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        finally:
            job.end()
            self._keep_logs(folder)
        extend(expected, job.step())
        numbers, texts = differences(job, expected, bits=not self._args.wait)
        self.wrong += numbers["wrong"]
        self.results.add({**self._run, "session": name, **numbers})
        print("\n".join(texts[:20]), flush=True)
        return goes_on

    def _keep_logs(self, folder: pathlib.Path) -> None:
        """Copy the logs of all supervisors before their folder is removed."""
        kept = self._out / "logs" / self._session
        kept.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("log-*.txt"):
            shutil.copy(log, kept)

    def _disturb(self, job: Job, known: int) -> bool:
        """Do faults. Return whether it ends because the run stands still, or of an error."""
        while (number := self.results.done(self._run)) < self._args.faults:
            draw = random.Random(f"{self._args.seed} {number}")
            before, since = job.step(), time.monotonic()
            problem = ""
            line = {**self._run, "session": self._session, "kind": "before a fault"}
            try:
                if job.reaches(before + draw.randint(*BETWEEN)):
                    if before:
                        self._pace = (time.monotonic() - since) / (job.step() - before)
                    # the undisturbed run may have to make as many steps
                    coming = self._pace * max(job.step() - known, 0) + MARGIN
                    if time.monotonic() + coming > self._deadline:
                        return False
                    (kind,) = draw.choices(
                        self._kinds, [KINDS.get(kind, 1) for kind in self._kinds]
                    )
                    line["kind"] = kind
                    problem = self._fault(job, Faults(job, job.workdir.parent, draw), line)
                else:
                    problem = "it stood still"
            except Exception:  # noqa: BLE001  a campaign goes on
                problem = traceback.format_exc()
            if problem:
                line["problem"] = problem
                self.wrong += 1
            self.results.add(line)
            print(json.dumps(line), flush=True)
            if problem:
                print(f"{problem}\n{job.logs()}", flush=True)
                return True
        return False

    def _fault(self, job: Job, faults: "Faults", line: dict[str, Any]) -> str:
        """Do a fault, and measure it into its line. Return a problem, or ""."""
        kind = line["kind"]
        step, ends, starts = job.step(), len(job.ends), len(job.heads(0))
        line["step"] = step
        at = time.time()
        began = faults.do(kind)
        # the next step may have been computed before, and some before a second fault
        step = faults.notes.get("step", step)
        after = job.step() if kind in TWICE else step
        if not job.reaches(after + 2):
            return "it stood still"
        seconds = time.monotonic() - began
        restarted = len(job.heads(0)) > starts
        line |= {
            "seconds": seconds,
            "again": max(step - job.first_step(), 0) if restarted else 0,
            "phases": job.restart(at) if restarted else {},
            "cpu": job.cpu_seconds() if restarted else 0.0,
            "load": os.getloadavg()[0],
            "ends": job.ends[ends:],
            **faults.notes,
        }
        return str(faults.notes.get("wrong", ""))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", type=int, default=100_000, help="with those in --out; default: any number"
    )
    parser.add_argument(
        "--minutes", type=float, default=60, help="with the comparison; default: 60"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults; default: 0")
    parser.add_argument("--mesh", choices=MESHES, default="data", help="default: data")
    parser.add_argument("--model", choices=MODELS, default="bird", help="default: bird")
    parser.add_argument("--without-supervisors", action="store_true", help="measure as before")
    parser.add_argument("--wait", type=int, default=0, help="[s] supervise.wait, for hosts gone")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument("--out", type=pathlib.Path, help="folder that keeps the results")
    parser.add_argument("--undisturbed", type=int, default=0, help="make its steps alone")
    parser.add_argument("--table", action="store_true", help="print the results of --out alone")
    args = parser.parse_args(argv)
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds names {', '.join(sorted(unknown))}; expected: {', '.join(KINDS)}")
    if args.wait:
        args.kinds = GONE
    with tempfile.TemporaryDirectory() as temporary:
        out = (args.out or pathlib.Path(temporary)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        if args.table:
            print(Results(out / "faults.jsonl").table())
            return 0
        return campaign(args, out)


def campaign(args: argparse.Namespace, out: pathlib.Path) -> int:
    goes_on = True
    wrong = 0
    while goes_on:
        with soak.place() as (folder, may_fill):
            runs = Campaign(args, out, may_fill)
            with contextlib.closing(runs):
                if args.undisturbed:
                    extend(runs.undisturbed(), args.undisturbed)
                    return 0
                began = time.monotonic()
                goes_on = runs.session(folder)
                args.minutes -= (time.monotonic() - began) / 60
                wrong += runs.wrong
                print(runs.results.table(), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    # also where a shell's job in the background ignores the first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
