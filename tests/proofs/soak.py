"""A run under hours of mixed faults, without help: make soak, or one of

    SOAK_HOURS=3 make soak                          the bird demo
    SOAK_HOURS=3 SOAK_MODEL=language make soak      a small language model, on the pages of docs/
    python -m tests.proofs.soak --hours 3 --seed 1 --model language --config.train.steps=400
    python -m tests.proofs.soak --hours 3 --config=my_config.py --config.train.steps=60 …

Four processes on two hosts (network namespaces, if this user may make them, else on this one)
train, lap by lap, a run of the model's config to its end. A supervisor acts as a scheduler: after
the end of a process it waits for the others, and starts the same command again. Faults are drawn
from the seed, one after the other, each some steps after the run went on:

    kill         SIGKILL of one of the processes                 term    SIGTERM to one: all save
                 and end
    coordinator  SIGKILL of process 0                            stop    SIGSTOP of one for 16 s,
                 and the run continues
    cut          the link between the hosts is down              slow    it has 20 Mbit/s for 10 s,
                 and the run continues
    damage       all killed, and a byte of a file of the newest checkpoint is changed (a kill if it
                 is the only one)
    full         the workdir's file system is full until the run has ended
    host         a host is gone: the run resumes on the other alone, and after the next fault on
                 both

With --supervise each process has a supervisor, and each step is kept in memory. The supervisors go
on after a fault by themselves: a cut lasts 16 s, a full disk 20 s, and no host is gone.

All timeouts are the defaults, which users have. The first lap has no fault. Each later one must end
like it: with the same rows in each batch, a record of every step and, unless a host was gone
meanwhile, the same loss in each record and the same bytes in every array. Prints a row for each
kind of fault: its number, seconds until the end of the job (noticed) and from its restart to its
next new step (going on), median and most, and steps computed again. Then come all laps' times by
phase. It exits with 1 if something was lost or wrong, or if the supervisor ended a job that stood
still (by hand). Ctrl-C and SIGTERM end it with the results so far.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtrain import config as config_lib
from jaxtrain.supervise import steps_in_memory
from jaxtrain.telemetry import goodput

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROCESSES, HOSTS = 4, 2
STUCK = 600.0  # [s] without a step after which the supervisor gives up on a job
# below a soak's folder: workdirs; a file system of its own where this user may mount one
DISK = "disk"
SIZE = "1g"  # of that
KINDS = ("kill", "coordinator", "term", "stop", "damage", "host")
LASTING = {"slow": 10.0, "stop": 16.0}  # [s] no run ends by these faults
# [s] nor one with supervisors by these
SUPERVISED_LASTING = {"kill": 0.0, "coordinator": 0.0, "cut": 16.0, "full": 20.0}
SUPERVISED = (
    "--supervise",
    "--config.checkpoint.memory_every=1",
    "--config.supervise.restarts=100000",
)
ADDRESS = "10.78.0.{}"
# of the cable: a step sends 4 MB over it
SLOW = ("tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")
# What is trained, where no --config is given; {folder} is the soak's.
SMALL = (
    "--config.train.batch=16",
    "--config.train.eval_every=0",
    "--config.mesh.data=4",
    "--config.data.threads=1",
)
MODELS = {
    "bird": (
        "--config=configs/xcm.py",
        "--config.train.steps=40",
        "--config.checkpoint.every=4",
        *SMALL,
    ),
    "language": (
        "--config=configs/shakespeare_char.py:{folder}/text.txt",
        "--config.train.steps=120",
        "--config.checkpoint.every=8",
        "--config.model.generation.prompts=()",
        *SMALL,
    ),
}
RECORDS = ("--config.metrics.every=1",)

# Wraps the config's loader: each process notes a digest of every row that it trains on.
LOADER = """
import hashlib, importlib, json, os
inner = importlib.import_module(os.environ["SOAK_LOADER"])
Config, element_spec, dataset_info = inner.Config, inner.element_spec, inner.dataset_info

class Noting:
    def __init__(self, loader, rows):
        self._loader, self._rows = loader, rows
    def __getattr__(self, name):
        return getattr(self._loader, name)
    def __iter__(self):
        return self
    def __next__(self):
        position, batch = next(self._loader)
        with open(os.environ["SOAK_ROWS"], "a") as file:
            for i, (start, stop) in enumerate(self._rows.ranges):
                for row in range(start, stop):
                    digest = hashlib.blake2b(digest_size=8)
                    for name in sorted(batch):
                        digest.update(memoryview(batch[name][i][row - start].reshape(-1)).cast("B"))
                    file.write(json.dumps([position, row, digest.hexdigest()]) + "\\n")
        return position, batch

def make_loader(config, *, split, rows, seed):
    loader = inner.make_loader(config, split=split, rows=rows, seed=seed)
    return Noting(loader, rows) if split == "train" else loader
"""


@dataclasses.dataclass
class Fault:
    kind: str
    step: int  # before it
    noticed: float = 0.0  # [s] until the job had ended; 0 = it did not
    resumed: float = 0.0  # [s] until a new step, from the restart if there was one
    lost: int = 0  # steps that were computed again
    by_hand: bool = False

    def __str__(self) -> str:
        times = f"noticed {self.noticed:.1f} s, going on {self.resumed:.1f} s"
        return f"{self.kind} at step {self.step}: {times}, {self.lost} steps again"


class Hosts:
    """Two network namespaces joined by a cable, or none if they cannot be made."""

    def __init__(self) -> None:
        self.names = [f"soak{os.getpid()}-{i}" for i in range(HOSTS)]
        self.real = os.geteuid() == 0 and shutil.which("ip") is not None and self._make()

    def _make(self) -> bool:
        a, b = self.names
        commands = [["netns", "add", a], ["netns", "add", b]]
        commands += [
            [
                "link",
                "add",
                "cable",
                "netns",
                a,
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                b,
            ]
        ]
        for i, name in enumerate(self.names):
            commands.append(
                ["-n", name, "addr", "add", f"{ADDRESS.format(i + 1)}/24", "dev", "cable"]
            )
            commands += [["-n", name, "link", "set", device, "up"] for device in ("lo", "cable")]
        for command in commands:
            if subprocess.run(["ip", *command], capture_output=True).returncode:
                self.close()
                return False
        for i, name in enumerate(self.names):  # collectives publish what a host's own name leads to
            folder = pathlib.Path("/etc/netns", name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{ADDRESS.format(i + 1)} {socket.gethostname()}\n"
            )
        return True

    def inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]] if self.real else []

    def coordinator(self, port: int) -> str:
        return f"{ADDRESS.format(1) if self.real else '127.0.0.1'}:{port}"

    def cable(self, state: str) -> None:
        subprocess.run(["ip", "-n", self.names[0], "link", "set", "cable", state], check=True)

    def queue(self, action: str, *queue: str) -> bool:
        """Make the cable slow ("add", of `SLOW`) or fast ("del"). False: this kernel cannot."""
        command = ["tc", "-n", self.names[0], "qdisc", action, "dev", "cable", "root", *queue]
        return subprocess.run(command, capture_output=True).returncode == 0

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(pathlib.Path("/etc/netns", name), ignore_errors=True)


class Job:
    """One start of the run: its processes, on both hosts or on the first alone."""

    def __init__(
        self,
        hosts: Hosts,
        config: Sequence[str],
        folder: pathlib.Path,
        lap: int,
        *,
        alone: bool,
        loader: str,
        supervised: bool = False,
    ):
        self.supervised = supervised
        self.began, self.workdir = time.monotonic(), folder / DISK / f"lap{lap}"
        # of each process, and where this start's lines begin
        n = PROCESSES // HOSTS if alone else PROCESSES
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        devices = PROCESSES // n  # the same mesh in all
        self.processes = []
        for i in range(n):
            env = {k: v for k, v in os.environ.items() if not k.startswith(("JAXTRAIN_", "XLA_"))}
            env |= {
                "PYTHONPATH": f"{ROOT}:{folder}",
                "JAX_PLATFORMS": "cpu",
                "NO_GCE_CHECK": "true",
                "SOAK_LOADER": loader,
            }
            env |= {"SOAK_ROWS": str(folder / f"rows{lap}-{i}.jsonl"), "JAXTRAIN_SECRET": "5e" * 16}
            env |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
            env |= {
                "JAXTRAIN_COORDINATOR": hosts.coordinator(port),
                "JAXTRAIN_PROCESSES": str(n),
                "JAXTRAIN_PROCESS": str(i),
            }
            command = [
                *hosts.inside(i * HOSTS // n if not alone else 0),
                sys.executable,
                "-m",
                "jaxtrain.main",
            ]
            command += [
                *RECORDS,
                *config,
                *(SUPERVISED if supervised else ()),
                "--config.loader=soak_loader",
                f"--config.workdir={self.workdir}",
            ]
            log = (folder / f"log{lap}-{i}.txt").open("ab")
            self.processes.append(
                subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
            )
            log.close()

    def steps(self) -> int:
        with contextlib.suppress(OSError):
            lines = (self.workdir / "metrics.jsonl").read_text().splitlines()
            for line in reversed(lines):
                with contextlib.suppress(ValueError):
                    return int(json.loads(line)["step"])
        return 0

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def signal(self, process: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.processes[process].send_signal(number)

    def pid(self, process: int) -> int:
        """Return the id of a process that trains, and not that of its supervisor."""
        if not self.supervised:
            return self.processes[process].pid
        path = self.workdir / "goodput" / f"process-{process}.jsonl"
        starts = [line for line in path.read_text().splitlines() if '"pid"' in line]
        return int(json.loads(starts[-1])["pid"])

    def kill(self) -> None:
        for i in range(len(self.processes)):
            self.signal(i, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        pids = [process.pid for process in self.processes]
        for holder in steps_in_memory.PARENT.glob(f"jaxtrain-*/{steps_in_memory.HOLDER}"):
            if json.loads(holder.read_text())["pid"] in pids:
                shutil.rmtree(holder.parent)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Soak:
    def __init__(
        self,
        folder: pathlib.Path,
        config: Sequence[str],
        kinds: Sequence[str],
        hosts: Hosts,
        seed: int,
        loader: str,
        supervised: bool = False,
    ):
        self.supervised = supervised
        self.folder, self.config, self.kinds, self.hosts, self.loader = (
            folder,
            config,
            kinds,
            hosts,
            loader,
        )
        self.draw, self.faults, self.wrong = random.Random(seed), list[Fault](), list[str]()
        # of all laps, by what they went into
        self.seconds: collections.Counter[str] = collections.Counter()

    def lap(self, number: int, *, until: float, most: int = 0) -> bool:
        """Return a run to its end, with faults before ``until``; and whether a host was gone."""
        alone, was_alone, pending = False, False, None
        while True:
            job = Job(
                self.hosts,
                self.config,
                self.folder,
                number,
                alone=alone,
                loader=self.loader,
                supervised=self.supervised,
            )
            try:
                before = job.steps()
                if pending and not self._goes_on(job, pending, before):
                    return was_alone
                while True:  # until a fault ends the job
                    fault = (
                        self._fault(job, until)
                        if number and not (most and len(self.faults) >= most)
                        else None
                    )
                    if fault is None:  # it is to end by itself
                        if self._ends(job):
                            return was_alone
                        self.wrong.append(
                            f"lap {number} stood still, or ended with"
                            f" {job.codes()}:\n{self._log(number)[-3000:]}"
                        )
                        return was_alone
                    self.faults.append(fault)
                    if fault.noticed:
                        break
                    print(f"  {fault}", flush=True)
            finally:
                job.kill()
            alone, pending = fault.kind == "host", fault
            was_alone |= alone

    def _goes_on(self, job: Job, fault: Fault, before: int) -> bool:
        """Whether a step beyond ``before``, or the end, came: it did not stand still."""
        # the fault may have come behind the last step
        if self._reaches(job, before + 1) or self._ends(job):
            fault.resumed = time.monotonic() - job.began
        elif any(code is None for code in job.codes()):
            fault.by_hand = True
            return False
        found = re.findall(
            r"resuming from step (\d+)", self._log(int(job.workdir.name.removeprefix("lap")))
        )
        fault.lost = max(fault.step - int(found[-1]), 0) if found else fault.step
        print(f"  {fault}", flush=True)
        return True

    def _reaches(self, job: Job, step: int) -> bool:
        """Wait for a step. Whether it came before a process ended, or `STUCK` seconds passed."""
        deadline = time.monotonic() + STUCK
        while job.steps() < step:
            if any(code is not None for code in job.codes()) or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _fault(self, job: Job, until: float) -> Fault | None:
        """Do one some steps from now, until the job ended. None: it ended itself, or too late."""
        if (
            not self._reaches(job, job.steps() + self.draw.randint(2, 12))
            or time.monotonic() > until
        ):
            return None
        time.sleep(self.draw.random())
        fault, began = Fault(self.draw.choice(list(self.kinds)), job.steps()), time.monotonic()
        undo = self._do(fault, job)
        lasting = LASTING | (SUPERVISED_LASTING if self.supervised else {})
        try:
            if fault.kind in lasting:
                time.sleep(lasting[fault.kind])
                undo()
                if self._reaches(job, fault.step + 2):  # the next one may have been computed before
                    fault.resumed = time.monotonic() - began
                return fault  # the job goes on: if it does not, it is found out at its end
            while any(code is None for code in job.codes()):
                if time.monotonic() - began > STUCK:
                    fault.by_hand = True
                    break
                time.sleep(0.1)
            fault.noticed = time.monotonic() - began
            job.kill()
        finally:
            undo()
        return fault

    def _do(self, fault: Fault, job: Job) -> Callable[[], Any]:
        """Return the function that takes it back."""
        kind = fault.kind
        one = self.draw.randrange(len(job.processes))
        if kind in ("kill", "coordinator"):
            send(job.pid(one if kind == "kill" else 0), signal.SIGKILL)
        elif kind == "term":
            job.signal(one, signal.SIGTERM)
        elif kind == "stop":
            pid = job.pid(one)
            send(pid, signal.SIGSTOP)
            return lambda: send(pid, signal.SIGCONT)
        elif kind == "host":
            for i in range(len(job.processes) // HOSTS, len(job.processes)):
                job.signal(i, signal.SIGKILL)
        elif kind == "cut":
            self.hosts.cable("down")
            return lambda: self.hosts.cable("up")
        elif kind == "slow":
            self.hosts.queue("add", *SLOW)
            return lambda: self.hosts.queue("del")
        elif kind == "damage":
            job.kill()
            if not self._damage(job.workdir):
                fault.kind = "kill"
        elif kind == "full":
            filler = self.folder / DISK / "filler"
            with contextlib.suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
            return lambda: filler.unlink(missing_ok=True)
        return lambda: None

    def _damage(self, workdir: pathlib.Path) -> bool:
        """Change a bit of the newest checkpoint. False: no other would stay whole."""
        *others, newest = _checkpoints(workdir) or [workdir]
        if not others:
            return False
        path = self.draw.choice(
            sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
        )
        data = bytearray(path.read_bytes())
        data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(data)
        return True

    def _ends(self, job: Job) -> bool:
        """Wait until all have ended. Return whether they have with 0."""
        last, since = -1, time.monotonic()
        while any(code is None for code in job.codes()):
            if (now := job.steps()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > STUCK:
                return False
            time.sleep(0.2)
        return set(job.codes()) == {0}

    def _log(self, number: int) -> str:
        """Return the output of process 0 in a lap."""
        path = self.folder / f"log{number}-0.txt"
        return path.read_text(errors="replace") if path.exists() else "nothing"

    def compare(self, number: int, *, bits: bool) -> None:
        """Compare the files of a lap with those of the first one."""
        expected, found = self._rows(0), self._rows(number)
        if odd := sorted(key for key in expected if found.get(key) != expected[key]):
            at, row = odd[0]
            self.wrong.append(
                f"lap {number}: row {row} of batch {at} is {found.get(odd[0])}, not"
                f" {expected[odd[0]]}"
            )
        pairs = itertools.zip_longest(self._losses(0), self._losses(number), fillvalue=(0, 0.0))
        if odd_pair := next(
            (pair for pair in pairs if pair[0] != pair[1] and (bits or pair[0][0] != pair[1][0])),
            None,
        ):
            (step, loss), (other_step, other) = odd_pair
            what = (
                f"record {other_step} has the loss {other}, where the first lap's record {step} has"
                f" {loss}"
            )
            self.wrong.append(f"lap {number}: {what}; process 0 said:\n{self._log(number)}")
        if bits and (arrays := self._arrays(number) ^ self._arrays(0)):
            self.wrong.append(
                f"lap {number}: {len(arrays) // 2} arrays differ, for example {min(arrays)[0]}"
            )

    def _rows(self, number: int) -> dict[tuple[int, int], str]:
        found: dict[tuple[int, int], str] = {}
        for path in sorted(self.folder.glob(f"rows{number}-*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a kill may have cut the last one
                    position, row, digest = json.loads(line)
                    if found.setdefault((position, row), digest) != digest:
                        self.wrong.append(
                            f"lap {number}: row {row} of batch {position} was read with two"
                            " contents"
                        )
        return found

    def _losses(self, number: int) -> list[tuple[int, float]]:
        lines = map(
            json.loads,
            (self.folder / DISK / f"lap{number}" / "metrics.jsonl").read_text().splitlines(),
        )
        return [(line["step"], line["loss"]) for line in lines if line["split"] == "train"]

    def _arrays(self, number: int) -> set[tuple[str, str]]:
        from jaxtrain.arrays import orbax_steps

        state = orbax_steps.open_step(orbax_steps.find_step(self.folder / DISK / f"lap{number}"))
        return {
            (name, hashlib.sha256(array.read(()).tobytes()).hexdigest())
            for name, array in state.items()
        }

    def forget(self, number: int) -> None:
        workdir = self.folder / DISK / f"lap{number}"
        self.seconds.update(goodput.of_run(goodput.read(workdir)))
        if number:
            shutil.rmtree(workdir)
            for path in [*self.folder.glob(f"rows{number}-*"), *self.folder.glob(f"log{number}-*")]:
                path.unlink()


def _checkpoints(workdir: pathlib.Path) -> list[pathlib.Path]:
    return sorted(
        (p for p in (workdir / "checkpoints").glob("[0-9]*") if p.name.isdigit()),
        key=lambda p: int(p.name),
    )


def pages() -> str:
    return "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def table(faults: Sequence[Fault]) -> Iterator[str]:
    by_kind = collections.defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    yield (
        "| fault | n | noticed [s]: median, most | going on [s]: median, most | steps again:"
        " median, most | by hand |"
    )
    yield "|---|---:|---:|---:|---:|---:|"
    for kind, some in [*sorted(by_kind.items()), ("all", list(faults))]:
        cells = []
        for values in (
            [f.noticed for f in some if f.noticed],
            [f.resumed for f in some if f.resumed],
            [f.lost for f in some],
        ):
            cells.append(f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "")
        yield f"| {kind} | {len(some)} | {' | '.join(cells)} | {sum(f.by_hand for f in some)} |"


@contextlib.contextmanager
def place() -> Iterator[tuple[pathlib.Path, bool]]:
    """Yield a folder, and whether its `DISK` is a file system of its own, which may be filled."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        disk = pathlib.Path(name, DISK)
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk)]
        mounted = os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode
        try:
            yield pathlib.Path(name), mounted
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(disk)], check=False)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="python -m tests.proofs.soak [options] [--config=FILE] [--config.field=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hours, model = os.environ.get("SOAK_HOURS", "3"), os.environ.get("SOAK_MODEL", "bird")
    parser.add_argument(
        "--hours", type=float, default=hours, help="until the last fault; default: SOAK_HOURS, or 3"
    )
    parser.add_argument(
        "--faults",
        type=int,
        default=0,
        help="end after so many of them, too; default: 0, any number",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults; default: 0")
    parser.add_argument(
        "--kinds",
        default="",
        help="of faults, between commas; default: all that this machine can do",
    )
    parser.add_argument(
        "--model", default=model, help=f"{' or '.join(MODELS)}; default: SOAK_MODEL, or bird"
    )
    text = (
        "what is trained, in place of the model; --config.section.field=value changes a field of"
        " either"
    )
    parser.add_argument("--config", metavar="FILE", help=text)
    parser.add_argument("--supervise", action="store_true", help="under supervisors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args, fields = parser.parse_known_args(argv)
    if not 0 < args.hours < math.inf:  # with NaN no lap would be run, and nothing found wrong
        parser.error(f"--hours is {args.hours}; expected a number above 0")
    if args.faults < 0:
        parser.error(f"--faults is {args.faults}; expected a number of faults, or 0 for any")
    if args.model not in MODELS:
        parser.error(f"--model is {args.model!r}; expected one of: {', '.join(MODELS)}")
    hosts = Hosts()
    try:
        with place() as (folder, may_fill):
            kinds = [*KINDS, *(["cut"] if hosts.real else []), *(["full"] if may_fill else [])]
            if args.supervise:
                kinds.remove("host")
            if hosts.real and hosts.queue("add", *SLOW):
                hosts.queue("del")
                kinds.append("slow")
            if unknown := set(filter(None, args.kinds.split(","))) - set(kinds):
                parser.error(
                    f"--kinds names {', '.join(sorted(unknown))}; this machine can do"
                    f" {', '.join(kinds)}"
                )
            kinds = [kind for kind in kinds if not args.kinds or kind in args.kinds.split(",")]
            (folder / "soak_loader.py").write_text(LOADER)
            (folder / "text.txt").write_text(pages())
            given = (
                [f"--config={args.config}"]
                if args.config
                else [x.format(folder=folder) for x in MODELS[args.model]]
            )
            config = [*given, *fields]
            arguments = config_lib.parse_args(config)
            loader = config_lib.load(arguments.source, arguments.overrides).loader
            print(
                f"{PROCESSES} processes on {HOSTS if hosts.real else 1} hosts; faults:"
                f" {', '.join(kinds)}",
                flush=True,
            )
            print(f"each lap: {' '.join(config)}", flush=True)
            return report(
                Soak(folder, config, kinds, hosts, args.seed, loader, args.supervise),
                args.hours,
                args.faults,
            )
    finally:
        hosts.close()


def report(soak: Soak, hours: float, most: int) -> int:
    """Run laps for some hours, or until ``most`` faults (0: any). Print their outcomes."""
    began, number, ended = time.monotonic(), 0, ""
    try:
        soak.lap(0, until=0)
        print(f"lap 0, without faults: {time.monotonic() - began:.0f} s", flush=True)
        until = began + 3600 * hours
        while (
            not soak.wrong and time.monotonic() < until and not (most and len(soak.faults) >= most)
        ):
            number += 1
            was_alone = soak.lap(number, until=until, most=most)
            if not soak.wrong:
                soak.compare(number, bits=not was_alone)
            text = "recordings and records" if was_alone else "recordings, records and bits"
            print(
                f"lap {number}: {len(soak.faults)} faults so far; {text} compared,"
                f" {len(soak.wrong)} wrong",
                flush=True,
            )
            if not soak.wrong:
                soak.forget(number)
    except KeyboardInterrupt:
        ended = f"interrupted in lap {number}, which is not compared"
    print("\n".join(table(soak.faults)))
    by_hand = sum(fault.by_hand for fault in soak.faults)
    took = (time.monotonic() - began) / 3600
    print(
        f"{len(soak.faults)} faults in {took:.2f} h, {number} laps: {len(soak.wrong)} wrong,"
        f" {by_hand} by hand"
    )
    print(f"laps with faults, added over processes: {goodput.summary(soak.seconds)}")
    for text in [f"wrong: {text}" for text in soak.wrong] + [ended] * bool(ended):
        print(text)
    return 1 if soak.wrong or by_hand else 130 if ended else 0


if __name__ == "__main__":
    # also where a shell's job in the background ignores the first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
