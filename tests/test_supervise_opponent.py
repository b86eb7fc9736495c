"""Faults during the take-over of others, in real runs: a supervised run goes on after all of them.

Between the end of a process and the next step its supervisor votes, starts a process, and hands it
the steps in memory. The instants of the second fault spread over this time.
"""

import os
import signal
import time

import pytest

from tests.support.processes import free_port, ids, records, step_of, wait_for
from tests.support.supervised_hosts import MEMORY, Job, fill
from tests.support.supervised_runs import (
    ENDLESS,
    outputs_of,
    pid_of_run,
    reaches,
    saves,
    supervised,
)

INSTANTS = (0.0, 0.02, 0.1, 0.3, 0.8, 1.5, 2.5)  # [s] after the first fault


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_supervisor_killed_at_any_instant_of_a_restart_comes_back(folder, ending, victim):
    port = free_port()
    many = "--config.supervise.restarts=1000"

    def start(process):
        run = supervised(folder, *ENDLESS, *MEMORY, many, port=port, process=process, processes=2)
        ending.append(run)
        return run

    both = [start(0), start(1)]
    reaches(folder, 3, both)
    for instant in INSTANTS:
        os.kill(pid_of_run(folder, 1 - victim), signal.SIGKILL)
        time.sleep(instant)
        both[victim].kill()
        both[victim].communicate()
        step = step_of(folder / "runs" / "toy")  # the run may have gone on meanwhile
        both[victim] = start(victim)  # as its scheduler would
        reaches(folder, step + 3, both)
    both[0].send_signal(signal.SIGTERM)
    outputs = outputs_of(both)
    assert [process.returncode for process in both] == [75, 75], outputs
    steps = list(records(folder / "runs" / "toy", "train"))
    assert steps == list(range(1, len(steps) + 1))
    for process in (0, 1):
        assert ids(folder, f"ids{process}.jsonl")  # the same rows, if a batch was read twice


@pytest.mark.slow
def test_both_partners_of_a_copy_are_lost_and_the_run_resumes_from_its_disk(folder, ending):
    halves = ("--config.mesh.fsdp=2", "--config.mesh.data=1", "--config.supervise.wait=60")
    every = ("--config.checkpoint.memory_every=1", "--config.checkpoint.every=5")
    job = Job(folder, ending, *every, *halves)
    saves(folder, job.watch)
    job.lose(0, 1)
    job.start(0)
    job.start(1)
    wait_for(lambda: len(job.starts()) == 2, watch=job.watch)
    job.goes_on(members=2)
    job.end()
    first = job.starts()[1].first
    assert first > 0 and first % 5 == 0, "a saved step"


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, 1.0, 20.0])
def test_a_second_host_is_lost_during_the_take_over_of_process_0s(folder, ending, wait):
    """At once, as the others meet, and while one of them waits for the lease."""
    job = Job(folder, ending, *MEMORY, processes=4)
    job.reaches(3)
    job.lose(0)
    time.sleep(wait)
    job.lose(1)
    job.goes_on(members=2)
    job.start(0)
    job.start(1)
    job.goes_on(members=4)
    job.end()


@pytest.mark.slow
def test_process_0s_host_is_lost_while_the_disk_is_full(folder, ending, small_disk):
    disk = small_disk(30_000, lazily=True)
    job = Job(folder, ending, *MEMORY, workdir=disk / "run")
    job.reaches(3)
    fill(disk)
    position = max(ids(folder, "ids1.jsonl"))
    wait_for(lambda: max(ids(folder, "ids1.jsonl")) > position + 20, watch=job.watch)
    job.lose(0)
    full = time.monotonic() + 70  # longer than the lease
    while time.monotonic() < full:
        fill(disk)
        time.sleep(0.2)
        assert job.supervisors[1].poll() is None
    (disk / "ballast").unlink()
    job.goes_on(members=1)
    job.start(0)
    job.goes_on(members=2)
    job.end()


LOADER_OF_A_HOST = """
import errno, json, os
from loaders.base import DataError
from tests.support import proxy_loader
from tests.support.proxy_loader import Config, dataset_info, element_spec

class Full(proxy_loader.Proxy):
    def __next__(self):
        position, batch = super().__next__()
        if position >= 6:
            raise OSError(errno.ENOSPC, "No space left on device", "/tmp/cache")
        return position, batch

def make_loader(config, **given):
    host = os.environ.get("HOST_IS", "")
    attempt = json.loads(os.environ["JAXTRAIN_SUPERVISOR"])["attempt"]
    if host == "without its data":
        raise DataError("/data is not mounted")
    loader = proxy_loader.make_loader(config, **given)
    if host == "full" and attempt == 0 and given["split"] == "train":
        loader = Full(loader, given["split"], given["rows"])
    return loader
"""


@pytest.mark.slow
def test_a_host_that_returns_without_its_data_ends_alone(folder, ending):
    (folder / "of_a_host.py").write_text(LOADER_OF_A_HOST)
    job = Job(folder, ending, "--config.loader=of_a_host")
    saves(folder, job.watch)
    job.lose(1)
    job.goes_on(members=1)
    job.environments[1] = {"HOST_IS": "without its data"}
    other = job.start(1)
    output, _ = other.communicate(timeout=240)
    assert other.returncode == 2 and "/data is not mounted" in output, output
    del job.supervisors[1], job.environments[1]
    job.goes_on(members=1)
    job.start(1)
    job.goes_on(members=2)
    job.end()


@pytest.mark.slow
def test_a_host_that_waits_for_room_is_not_left_behind(folder, ending):
    """Its supervisor waits for 5 s, which is longer than supervise.wait."""
    (folder / "of_a_host.py").write_text(LOADER_OF_A_HOST)
    environments = {1: {"HOST_IS": "full"}}
    job = Job(folder, ending, "--config.loader=of_a_host", environments=environments)
    wait_for(lambda: len(job.starts()) == 2, watch=job.watch)
    job.reaches(10)
    outputs = job.end()
    assert "a disk refused this run's files" in outputs[1], outputs
    assert "go on, with the same batches on" not in outputs[0], outputs
    assert [start.processes for start in job.starts()] == [2, 2]
    assert "No space left on device" in job.starts()[1].facts["cause"]
