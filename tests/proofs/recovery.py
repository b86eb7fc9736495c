"""How long a run stands still after a fault: python -m tests.proofs.recovery [options]

    python -m tests.proofs.recovery --faults 20 --seed 0
    python -m tests.proofs.recovery --faults 20 --seed 0 --without-supervisors

Four processes on two hosts (network namespaces, if this user may make them) train the bird demo of
the soak. Faults are drawn from the seed, each some steps after the run went on, and the seconds
from the fault to the next new step are measured:

    kill         SIGKILL of one of the processes 1 to 3     coordinator  of process 0
    supervisor   SIGKILL of a supervisor, which is started again at once, as by its scheduler
    host         SIGKILL of all on the second host, whose memory is lost; started again at once
    cut          the link between the hosts is down for 16 s

Without supervisors the same command is started again as soon as all processes have ended, as by a
scheduler without a queue. In the end an undisturbed run must have the same loss in each record.
Prints a row for each kind, and exits with 1 if a loss differs or the run stood still.
"""

import argparse
import collections
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
from collections.abc import Sequence

from jaxtrain.supervise import steps_in_memory
from tests.proofs import soak

PROCESSES = 4
KINDS = ("kill", "coordinator", "supervisor", "host", "cut")
CUT = 16.0  # [s]
STUCK = 400.0  # [s] without a new step
RUN = (
    *soak.MODELS["bird"],
    "--config.train.steps=100000",
    "--config.metrics.every=1",
    "--config.checkpoint.every=50",
)
SUPERVISED = (
    "--supervise",
    "--config.checkpoint.memory_every=1",
    "--config.supervise.restarts=100000",
)


class Job:
    """The processes of a run, or their supervisors."""

    def __init__(self, folder: pathlib.Path, hosts: soak.Hosts, *, supervised: bool):
        self.folder = folder
        self.hosts = hosts
        self.supervised = supervised
        self.port = random.SystemRandom().randrange(20_000, 32_000)
        self.workdir = folder / "run"
        self.processes = [self.start(i) for i in range(PROCESSES)]

    def start(self, process: int) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA"))}
        env |= {
            "PYTHONPATH": str(soak.ROOT),
            "JAX_PLATFORMS": "cpu",
            "NO_GCE_CHECK": "true",
            "JAXTRAIN_SECRET": "5e" * 16,
            "JAXTRAIN_COORDINATOR": self.hosts.coordinator(self.port),
            "JAXTRAIN_PROCESSES": str(PROCESSES),
            "JAXTRAIN_PROCESS": str(process),
        }
        inside = self.hosts.inside(process * soak.HOSTS // PROCESSES)
        command = [*inside, sys.executable, "-m", "jaxtrain.main", *RUN]
        command += [*(SUPERVISED if self.supervised else ()), f"--config.workdir={self.workdir}"]
        with (self.folder / f"log-{process}.txt").open("ab") as log:
            return subprocess.Popen(command, cwd=soak.ROOT, env=env, stdout=log, stderr=log)

    def start_ended(self) -> None:
        """Act as a scheduler: start ended ones again, without supervisors all at once."""
        ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
        if ended and not self.supervised:
            if len(ended) < PROCESSES:
                return
            self.port += 1  # as another job would have
        for process in ended:
            self.processes[process] = self.start(process)

    def pid(self, process: int) -> int:
        """The process that trains."""
        path = self.workdir / "goodput" / f"process-{process}.jsonl"
        lines = [line for line in path.read_text().splitlines() if '"pid"' in line]
        return int(json.loads(lines[-1])["pid"])

    def losses(self) -> dict[int, float]:
        found = {}
        path = self.workdir / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["split"] == "train":
                found[record["step"]] = record["loss"]
        return found

    def reaches(self, step: int) -> bool:
        deadline = time.monotonic() + STUCK
        while max(self.losses(), default=0) < step:
            if time.monotonic() > deadline:
                return False
            self.start_ended()
            time.sleep(0.05)
        return True

    def kill(self, process: int) -> None:
        try:
            os.kill(self.pid(process), signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def do(kind: str, job: Job, draw: random.Random) -> float:
    """Do a fault. Return its time."""
    began = time.monotonic()
    if kind == "kill":
        job.kill(draw.randrange(1, PROCESSES))
    elif kind == "coordinator":
        job.kill(0)
    elif kind == "supervisor":
        job.processes[draw.randrange(PROCESSES)].kill()
    elif kind == "host":
        for process in range(PROCESSES // soak.HOSTS, PROCESSES):
            job.kill(process)
            job.processes[process].kill()
            for folder in steps_in_memory.PARENT.glob(f"jaxtrain-*-{process}"):
                shutil.rmtree(folder)
    elif kind == "cut":
        job.hosts.cable("down")
        time.sleep(CUT)
        job.hosts.cable("up")
    return began


def table(seconds: dict[str, list[float]]) -> str:
    lines = ["| fault | n | seconds to the next new step: median, most |", "|---|---:|---:|"]
    everything = [x for each in seconds.values() for x in each]
    for kind, taken in [*seconds.items(), ("all", everything)]:
        lines.append(
            f"| {kind} | {len(taken)} | {statistics.median(taken):.1f}, {max(taken):.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=0, help="of the faults; default: 0")
    parser.add_argument("--without-supervisors", action="store_true", help="measure as before")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    args = parser.parse_args(argv)
    supervised = not args.without_supervisors
    hosts = soak.Hosts()
    kinds = [kind for kind in args.kinds.split(",") if kind != "cut" or hosts.real]
    if not supervised:
        kinds = [kind for kind in kinds if kind != "supervisor"]
    draw = random.Random(args.seed)
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = pathlib.Path(name)
        try:
            job = Job(folder, hosts, supervised=supervised)
            try:
                for _ in range(args.faults):
                    if not job.reaches(max(job.losses(), default=0) + draw.randint(3, 6)):
                        print(f"it stood still:\n{(folder / 'log-0.txt').read_text()[-3000:]}")
                        return 1
                    kind = draw.choice(kinds)
                    step = max(job.losses())
                    began = do(kind, job, draw)
                    if not job.reaches(step + 2):  # the next one may have been computed before
                        print(f"{kind}: it stood still:")
                        for log in sorted(folder.glob("log-*.txt")):
                            print(f"{log.name}:\n{log.read_text()[-2500:]}")
                        return 1
                    seconds[kind].append(time.monotonic() - began)
                    print(f"{kind} at step {step}: {seconds[kind][-1]:.1f} s", flush=True)
            finally:
                job.end()
            losses = job.losses()
            job.workdir.rename(folder / "disturbed")
            undisturbed = Job(folder, hosts, supervised=False)
            try:
                undisturbed.reaches(max(losses))
            finally:
                undisturbed.end()
            expected = undisturbed.losses()
        finally:
            hosts.close()
    wrong = [step for step in losses if losses[step] != expected.get(step)]
    missing = sorted(set(range(1, max(losses) + 1)) - set(losses))
    print(table(seconds))
    print(
        f"{len(losses)} records, {len(wrong)} differ from the undisturbed run's, {missing} missing"
    )
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
