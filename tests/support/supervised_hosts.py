"""Supervised runs of the toy workload on several hosts, which are lost and come back."""

import contextlib
import json
import shutil
import signal

import numpy as np

from jaxtrain.supervise import steps_in_memory
from jaxtrain.telemetry import goodput
from loaders.base import Rows
from tests.support import toy_rows
from tests.support.processes import at, command, free_port, records, step_of, wait_for
from tests.support.supervised_runs import ENDLESS, QUIET, outputs_of

BATCH = 8
WAIT = ("--config.supervise.wait=2",)
MEMORY = ("--config.checkpoint.memory_every=1", "--config.checkpoint.every=100000")


class Job:
    """Supervisors of a run, each on a host of its own.

    ``environments``: process -> variables of its host.
    """

    def __init__(
        self,
        folder,
        ending,
        *overrides,
        processes=2,
        hosts=None,
        workdir="runs/toy",
        environments=None,
    ):
        self.folder = folder
        self.hosts = hosts  # network namespaces, one for each process
        self.workdir = folder / workdir
        self._ending = ending
        place = f"--config.workdir={workdir}"
        self._overrides = (*ENDLESS, *WAIT, place, *overrides)
        self._processes = processes
        self._port = free_port()
        self.supervisors = {}
        self.environments = environments or {}
        for process in range(processes):
            self.start(process)

    def start(self, process, *overrides):
        environment = at(self._port, process, self._processes)
        environment["IDS"] = str(self.folder / f"ids{process}.jsonl")
        inside = ()
        if self.hosts:
            environment["JAXTRAIN_COORDINATOR"] = self.hosts.coordinator(self._port)
            environment["JAXTRAIN_SECRET"] = "5e" * 16
            inside = self.hosts.inside(process)
        environment |= self.environments.get(process, {})
        arguments = ("--supervise", *QUIET, *self._overrides, *overrides)
        supervisor = command(self.folder, "toy.py", *arguments, inside=inside, **environment)
        self.supervisors[process] = supervisor
        self._ending.append(supervisor)
        return supervisor

    def lose(self, *processes):
        """Kill whole hosts: their supervisors, with them their processes, and their memory."""
        for process in processes:
            lost = self.supervisors.pop(process)
            lost.kill()
            lost.communicate()
            for holder in steps_in_memory.PARENT.glob(f"jaxtrain-*/{steps_in_memory.HOLDER}"):
                if json.loads(holder.read_text())["pid"] == lost.pid:
                    shutil.rmtree(holder.parent)

    @property
    def watch(self):
        return list(self.supervisors.values())

    def goes_on(self, members):
        """Wait for an attempt of so many processes, and for steps of it."""
        wait_for(lambda: self.starts()[-1].processes == members, watch=self.watch)
        self.reaches(step_of(self.workdir) + 3)

    def starts(self, process=0):
        return goodput.starts(self.workdir / "goodput" / f"process-{process}.jsonl")

    def reaches(self, step):
        wait_for(lambda: step_of(self.workdir) >= step, watch=self.watch, seconds=300)

    def end(self):
        self.watch[0].send_signal(signal.SIGTERM)
        outputs = outputs_of(self.watch)
        assert {supervisor.returncode for supervisor in self.watch} == {75}, outputs
        steps = list(records(self.workdir, "train"))
        assert steps == list(range(1, len(steps) + 1))
        self.has_one_sequence(steps[-1])
        return outputs

    def has_one_sequence(self, steps):
        """Every row of every batch is the one of a single process, however often it was read."""
        indices = {}
        for path in self.folder.glob("ids[0-9].jsonl"):
            for line in path.read_text().splitlines():
                _, position, rows, index, *_ = json.loads(line)
                for row, number in zip(range(*rows), index, strict=True):
                    assert indices.setdefault((position, row), number) == number
        whole = toy_rows.make_loader(
            toy_rows.Config(), split="train", rows=Rows(BATCH, ((0, BATCH),)), seed=0
        )
        for _ in range(steps):
            position, batch = next(whole)
            for row, number in enumerate(np.concatenate(batch["index"]).tolist()):
                assert indices[position, row] == number, (position, row)


def fill(disk):
    """Fill a disk. It has to be called again: a save that fails frees its part."""
    with contextlib.suppress(OSError), (disk / "ballast").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
