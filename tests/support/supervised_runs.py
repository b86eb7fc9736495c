"""Supervised runs of the toy workload, as a user starts them."""

import json

from jaxtrain.telemetry import goodput
from tests.support.processes import at, command, free_port, step_of, wait_for

ENDLESS = ("--config.train.steps=100000", "--config.checkpoint.every=5")
QUIET = ("--config.train.eval_every=0",)


def supervised(folder, *overrides, port=0, process=0, processes=1, **environment):
    """Start one supervisor."""
    if processes > 1:
        environment |= at(port, process, processes)
        environment["IDS"] = str(folder / f"ids{process}.jsonl")
    return command(folder, "toy.py", "--supervise", *QUIET, *overrides, **environment)


def several(folder, *overrides, processes=2):
    port = free_port()
    return [
        supervised(folder, *overrides, port=port, process=i, processes=processes)
        for i in range(processes)
    ]


def starts(folder, process=0):
    return goodput.starts(folder / "runs" / "toy" / "goodput" / f"process-{process}.jsonl")


def pid_of_run(folder, process=0):
    """The process id of the newest start."""
    return pid_in(folder / "runs" / "toy", process)


def pid_in(workdir, process=0):
    path = workdir / "goodput" / f"process-{process}.jsonl"
    heads = [json.loads(line) for line in path.read_text().splitlines() if '"pid"' in line]
    return heads[-1]["pid"]


def reaches(folder, step, watch):
    wait_for(lambda: step_of(folder / "runs" / "toy") >= step, watch=watch, seconds=300)


def saves(folder, watch):
    """Wait for a checkpoint."""
    wait_for(lambda: has_saved(folder / "runs" / "toy"), watch=watch, seconds=300)


def has_saved(workdir):
    """Whether there is a complete checkpoint, under its last name."""
    paths = workdir.glob("checkpoints/*/manifest.json")
    return any(path.parent.name.isdecimal() for path in paths)


def outputs_of(processes, seconds=240):
    return [process.communicate(timeout=seconds)[0] for process in processes]
