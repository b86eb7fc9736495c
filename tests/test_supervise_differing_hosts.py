"""A supervised run on hosts whose clocks differ goes on, and a host with other code is refused.

Real processes, each of which stands for a host.
"""

import json
import os
import pathlib
import shutil
import signal

import pytest

from jaxtrain.parallel.cluster import watchdog
from tests.support.processes import ROOT, free_port, wait_for
from tests.support.supervised_hosts import MEMORY, Job
from tests.support.supervised_runs import (
    ENDLESS,
    outputs_of,
    pid_of_run,
    reaches,
    saves,
    starts,
    supervised,
)

WRONG_CLOCK = """
import time

HOURS = {hours}

def shifted(function):
    return lambda: function() + 3600 * HOURS

time.time = shifted(time.time)
"""


def with_clock(folder, hours):
    """Return the variables of a host whose clock is wrong."""
    place = folder / f"clock{hours}"
    place.mkdir()
    (place / "sitecustomize.py").write_text(WRONG_CLOCK.format(hours=hours))
    return {"PYTHONPATH": f"{place}:{ROOT}:{folder}"}


def with_other_code(folder):
    """Return the variables of a host whose files of jaxtrain are others."""
    place = folder / "other"
    for package in ("jaxtrain", "loaders"):
        shutil.copytree(
            ROOT / package, place / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    with (place / "jaxtrain" / "__init__.py").open("a") as file:
        file.write("# a line more\n")
    return {"PYTHONPATH": f"{place}:{ROOT}:{folder}"}


def test_supervisors_whose_code_differs_are_refused_by_name_at_the_start(folder, ending):
    port = free_port()
    both = [
        supervised(folder, *ENDLESS, port=port, process=0, processes=2),
        supervised(folder, *ENDLESS, port=port, process=1, processes=2, **with_other_code(folder)),
    ]
    ending += both
    outputs = outputs_of(both)
    assert [run.returncode for run in both] == [2, 2], outputs
    for output in outputs:
        assert "the digest of jaxtrain's files is" in output, output
        assert "process 1" in output and "Traceback" not in output
    assert not (folder / "runs" / "toy" / "checkpoints").exists()


@pytest.mark.slow
def test_a_host_that_returns_with_other_code_is_refused_and_the_run_goes_on(folder, ending):
    job = Job(folder, ending)
    saves(folder, job.watch)
    job.lose(1)
    job.goes_on(members=1)
    job.environments[1] = with_other_code(folder)
    other = job.start(1)
    output, _ = other.communicate(timeout=240)
    assert other.returncode == 2 and "the digest of jaxtrain's files is" in output, output
    del job.supervisors[1], job.environments[1]
    job.goes_on(members=1)
    job.start(1)
    job.goes_on(members=2)
    job.end()


@pytest.mark.slow
@pytest.mark.parametrize("hours", [3, -3])
def test_clocks_that_differ_by_hours_change_no_restart(folder, ending, hours):
    """One process is killed, and then process 0's host is gone: the other one leads."""
    job = Job(folder, ending, *MEMORY, environments={1: with_clock(folder, hours)})
    reaches(folder, 3, job.watch)
    began = [starts(folder, process)[0].began for process in (0, 1)]
    assert abs(began[1] - began[0] - 3600 * hours) < 600, "the clock is wrong"
    first = pid_of_run(folder, 1)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: pid_of_run(folder, 1) != first, watch=job.watch)
    job.goes_on(members=2)
    job.lose(0)
    job.goes_on(members=1)
    job.start(0)
    job.goes_on(members=2)
    outputs = job.end()
    assert "leads: nothing answered at 127.0.0.1" in outputs[0], "of process 1's supervisor"
    every_start = starts(folder)
    assert [start.processes for start in every_start] == [2, 2, 1, 2]
    assert "process 1 (" in every_start[1].facts["cause"]
    resumed = [start.first for start in every_start]
    assert resumed == sorted(resumed) and resumed[1] > 0, "from memory, and no step twice"


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_watchdog_takes_no_host_for_silent_because_of_its_clock(tmp_path, monkeypatch, is_cached):
    """NFS may answer with an old time for a path. That of an open file is new."""
    (tmp_path / "alive-1.json").write_text(json.dumps({"count": 2, "doing": "step 6", "time": 5.0}))
    reasons = []
    dog = watchdog.Watchdog(
        tmp_path, process=0, processes=2, timeout=0, start_timeout=0, report=reasons.append
    )
    dog.beat("step 7")
    dog.beat("step 7")
    dog.beat("step 7")
    dog._report()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: None)
    stat = pathlib.Path.stat

    def cached(path, **named):
        status = stat(path, **named)
        return os.stat_result([*status[:8], 1, status[9]]) if "alive-1" in path.name else status

    if is_cached:
        monkeypatch.setattr(pathlib.Path, "stat", cached)
    dog._end(5.0)
    dog.close()
    assert "process 1 is stuck at step 6" in reasons[0], reasons
