"""A supervised run on a disk that is full trains on, and a kill meanwhile loses no record."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxtrain.checkpoint import SaveError
from jaxtrain.config import Config
from jaxtrain.parallel import supervised_attempt
from jaxtrain.supervise import attempts, steps_in_memory
from jaxtrain.supervise.attempts import Past
from jaxtrain.telemetry import goodput
from tests.support.processes import free_port, ids, records, step_of, wait_for
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


@pytest.mark.slow
def test_two_processes_on_a_full_disk_repeat_lost_steps_and_are_not_given_up(
    folder, ending, small_disk
):
    """Each kill comes before the run is as far again as on the full disk."""
    disk = small_disk(20_000, lazily=True)
    workdir = disk / "run"
    port = free_port()
    both = []
    for process in (0, 1):
        place = f"--config.workdir={workdir}"
        both.append(supervised(folder, *SAVING, place, port=port, process=process, processes=2))
    ending += both
    wait_for(lambda: has_saved(workdir), watch=both)

    def reads(position):
        fill(disk)
        return max(ids(folder, "ids0.jsonl")) >= position

    lost = max(ids(folder, "ids0.jsonl")) + 100
    wait_for(lambda: reads(lost), watch=both)
    os.kill(pid_in(workdir, 1), signal.SIGKILL)

    def waits():
        fill(disk)
        return b"a disk refused this run's files" in both[0].text

    wait_for(waits, watch=both)  # process 0 says so, although process 1 ends at once, too
    (disk / "ballast").unlink()
    for attempt in range(2, 6):  # more than config.supervise.idle
        wait_for(lambda n=attempt: resumed_from(workdir, n), watch=both)
        first = resumed_from(workdir, attempt)
        wait_for(lambda n=first + 3: step_of(workdir) >= n, watch=both)
        os.kill(pid_in(workdir, 1), signal.SIGKILL)
    assert step_of(workdir) < lost - 10
    wait_for(lambda: step_of(workdir) > lost, watch=both)
    both[0].send_signal(signal.SIGTERM)
    outputs = outputs_of(both)
    assert [run.returncode for run in both] == [75, 75], outputs
    assert "process 0" in outputs[0] and "could not be written" in outputs[0]
    steps = list(records(workdir, "train"))
    assert steps == list(range(1, len(steps) + 1))
    for process in (0, 1):
        assert ids(folder, f"ids{process}.jsonl")  # the same rows, if a batch was read twice


def resumed_from(workdir, attempt):
    """The step that an attempt resumed from, 0 before it has."""
    start = goodput.starts(workdir / "goodput" / "process-0.jsonl")[-1]
    return start.first if start.facts["attempt"] >= attempt else 0


def test_an_attempt_that_a_disk_ends_waits_longer_each_time_and_is_no_idle_one():
    config = Config()
    waits = [attempts.wait_for_disk(n, config) for n in range(1, 9)]
    assert waits == [5, 10, 20, 40, 80, 160, 240, 240]
    past = [Past(n, 0.0, 0, "no space", of_disk=True) for n in range(30)]
    assert attempts.why_given_up(past, config, 0.0) == ""
    killed = [Past(n, 0.0, n, "killed") for n in range(1, 22)]
    assert attempts.why_given_up([*past, *killed[1:]], config, 0.0) == ""
    assert "restarts within an hour" in attempts.why_given_up([*past, *killed], config, 0.0)


@pytest.mark.parametrize("start", [1.0, 20.0, 120.0])
def test_a_run_on_a_disk_that_stays_full_is_given_up_after_twelve_hours(start):
    """By the waits of the defaults, and ``start`` seconds until each attempt meets the disk."""
    config, past, now = Config(), [Past(0, 0.0, 100, "killed")], 0.0
    while not (rule := attempts.why_given_up(past, config, now)):
        n = len(past)
        now += start + (attempts.wait_for_disk(n - 1, config) if n > 1 else 0)
        past.append(Past(n, now, 100, "no space", of_disk=True))
        assert n < 1000, "never"
    assert rule == "full disks have ended its attempts for 12 h"
    assert 12 < now / 3600 < 12.2
    # One that makes progress meanwhile goes on.
    middle = len(past) // 2
    past[middle] = past[middle]._replace(step=101)
    past[middle + 1 :] = [attempt._replace(step=101) for attempt in past[middle + 1 :]]
    assert attempts.why_given_up(past, config, now) == ""


def test_only_a_full_disk_is_waited_for():
    """A disk that refuses for another reason may refuse for ever."""
    full = ("[Errno 28] No space left on device: '/runs/a'", "Disk quota exceeded")
    others = (
        "[Errno 30] Read-only file system: '/runs/a'",
        "[Errno 13] Permission denied: '/runs/a'",
        "TypeError: unhashable type",
        "DEADLINE_EXCEEDED: Barrier timed out",
    )
    for texts, expected in ((full, True), (others, False)):
        for text in texts:
            error = SaveError(f"checkpoint /runs/a/7 could not be written: {text}; there is none")
            assert supervised_attempt.is_of_disk(error) == expected, text


def past_of(*steps_and_kept):
    return [
        Past(n, 0.0, step, "killed", kept=kept) for n, (step, kept) in enumerate(steps_and_kept)
    ]


def test_steps_that_were_lost_and_are_made_again_are_progress():
    config = Config()
    # on a full disk the run went on to step 570, and a restart resumed from step 553
    again = past_of((570, 553), (570, 556), (570, 559), (570, 562))
    assert attempts.count_idle(again) == 0
    # both hosts lost their memory: the restart resumed from the disk
    lost = past_of((570, 569), (570, 540), (570, 543), (570, 546), (570, 549))
    assert attempts.count_idle(lost) == 0
    # the same step each time, with and without steps in memory
    for kept in (0, 100, 149):
        loop = past_of(*[(150, kept)] * 4)
        assert attempts.count_idle(loop) == 3
        assert "3 attempts in a row" in attempts.why_given_up(loop, config, 0.0)
    # memory is lost at every second attempt, and none gets further
    lossy = past_of((150, 149), (150, 140), (150, 149), (150, 140), (150, 149), (150, 140))
    assert [attempts.count_idle(lossy[:n]) for n in range(1, 7)] == [0, 1, 0, 1, 2, 3]
    # a new step makes the others count again
    newer = past_of((151, 150), (151, 140), (151, 149))
    assert attempts.count_idle([*lossy, *newer]) == 0
    # once the steps are made again, the loop is one
    assert attempts.count_idle([*again, *past_of((570, 562), (570, 562))]) == 2


def test_the_step_that_a_restart_resumes_from_is_whole_somewhere():
    whole = steps_in_memory._whole(["a", "b"])
    first = [[7, 0, "a", whole], [8, 0, "a", whole]]
    second = [[7, 0, "b", whole]]
    assert steps_in_memory.newest_whole([first, second]) == 7
    copy = [[8, 0, "b", whole]]
    assert steps_in_memory.newest_whole([first, [*second, *copy]]) == 8
    assert steps_in_memory.newest_whole([first, []]) == 0
    assert steps_in_memory.newest_whole([[], ()]) == 0


def test_a_process_that_a_disk_refused_says_so_if_another_one_ends_it():
    """Process 1 dies while process 0 unwinds, before or after it could tell the others."""
    for delay in ("0", "0.6"):
        command = [sys.executable, "-c", UNWINDING, delay]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.returncode == 74, process.stderr
        assert "process 1 (b) has died" in process.stderr


UNWINDING = """
import socket, sys, threading, time
from jaxtrain.parallel.cluster.links import Links, Peer
with socket.create_server(("127.0.0.1", 0)) as listener:
    one = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
links = Links(0, [Peer(1, "b", one)])
threading.Timer(float(sys.argv[1]), other.close).start()
links.report("No space left on device", code=74)
time.sleep(30)  # as JAX's end, which waits for the other process
"""
