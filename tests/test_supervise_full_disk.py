"""A supervised run on a disk that is full trains on, and a kill meanwhile loses no record."""

import os
import pathlib
import signal

import pytest

from jaxtrain.config import Config
from jaxtrain.supervise import attempts
from jaxtrain.supervise.attempts import Past
from jaxtrain.telemetry import goodput
from tests.support.processes import ids, records, step_of, wait_for
from tests.support.supervised_hosts import fill
from tests.support.supervised_runs import has_saved, outputs_of, pid_in, supervised

SAVING = (
    "--config.train.steps=100000",
    "--config.checkpoint.every=5",
    "--config.checkpoint.memory_every=1",
    "--config.metrics.every=1",
)


@pytest.mark.slow
def test_a_full_disk_stops_no_supervised_run_and_no_record_is_lost(folder, ending, small_disk):
    disk = small_disk(20_000, lazily=True)
    workdir = disk / "run"
    run = supervised(folder, *SAVING, f"--config.workdir={workdir}")
    ending.append(run)
    wait_for(lambda: has_saved(workdir), watch=[run])

    def trains_on(position):
        fill(disk)  # also what a save that failed has freed
        return max(ids(folder)) >= position

    first = max(ids(folder))
    before_it_was_full = step_of(workdir)
    wait_for(lambda: trains_on(first + 100), watch=[run])
    written = step_of(workdir)
    victim = pid_in(workdir)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not pathlib.Path(f"/proc/{victim}").exists())

    def waits():
        fill(disk)
        return b"or once there is room" in run.text

    wait_for(waits, watch=[run])
    assert step_of(workdir) == written
    (disk / "ballast").unlink()
    wait_for(lambda: step_of(workdir) > first + 120, watch=[run])
    # No step is in memory whose record was not written: those that the run made meanwhile come
    # again.
    resumed = goodput.starts(workdir / "goodput" / "process-0.jsonl")[-1].first
    assert before_it_was_full - 1 <= resumed <= written
    run.send_signal(signal.SIGTERM)
    (output,) = outputs_of([run])
    assert run.returncode == 75, output
    assert "training continues, and the next save tries again" in output, output
    steps = list(records(workdir, "train"))
    assert steps == list(range(1, len(steps) + 1))
    assert ids(folder)  # the same rows, if a batch was read twice


def test_an_attempt_that_a_disk_ends_waits_longer_each_time_and_is_no_idle_one():
    config = Config()
    waits = [attempts.wait_for_disk(n, config) for n in range(1, 9)]
    assert waits == [5, 10, 20, 40, 80, 160, 240, 240]
    past = [Past(n, 0.0, 0, "no space", of_disk=True) for n in range(20)]
    assert attempts.why_given_up(past, config, 0.0) == ""
    assert "restarts within an hour" in attempts.why_given_up([*past, past[0]], config, 0.0)
    assert not attempts.is_final(74, config)
