"""Where the time went: one owner for each second, through kills, torn files and several processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import goodput

ROOT = pathlib.Path(__file__).parent.parent
# A process that is busy until it is killed, and says when its file is there.
BUSY = """
import sys, time
from jaxtrain.telemetry import goodput
clock = goodput.Clock()
clock.switch(goodput.RESTORE)
clock.open(sys.argv[1], process=0, processes=1, facts={})
first = int(sys.argv[2])
clock.steps(first)
for step in range(first + 1, 10_000):
    before = clock.switch(goodput.WAIT)
    time.sleep(0.01)
    clock.switch(before)
    time.sleep(0.02)
    clock.read(step, 0.015)
    print(step, flush=True)
"""


def test_kills_leave_parts_that_are_the_whole(tmp_path):
    """SIGKILL between any two instructions, three times: what the file tells adds up to the time that passed."""
    began, reached = time.time(), []
    for first in (0, 10, 20):
        process = subprocess.Popen(
            [sys.executable, "-c", BUSY, str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        while (step := int(process.stdout.readline())) < first + 45:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        reached.append(step)
    ended = time.time()
    [starts] = goodput.read(tmp_path).values()
    seconds = goodput.totals(starts)
    # The last start has nobody behind it who would own what followed its last sign of life: 1 s at most.
    assert sum(seconds.values()) + ended - starts[-1].now == pytest.approx(ended - began, rel=0.01)
    assert 0 <= ended - starts[-1].now < 1.3
    assert [s.first for s in starts] == [0, 10, 20] and [s.end for s in starts] == [""] * 3
    assert all(0 <= last - s.step < 45 for last, s in zip(reached, starts, strict=True))
    assert seconds[goodput.AGAIN] > 0.3 and seconds[goodput.STEPS] > 0.5 and seconds[goodput.WAIT] > 0.5
    assert set(seconds) <= set(goodput.OWNERS) and goodput.QUEUE not in seconds
    assert starts[0].timed and 0.03 <= starts[0].total / starts[0].timed < 0.06 and starts[0].own < starts[0].longest


RESUMED = """
import os, signal, sys
from jaxtrain.telemetry import goodput
clock = goodput.Clock()
clock.open(sys.argv[1], process=0, processes=1, facts={})
clock.resumed(int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_right_after_a_restore_leaves_the_step_that_it_resumed_from(tmp_path):
    """With programs from the cache, steps and a checkpoint are made within the second between two writes of the thread."""
    for step in (4, 8):
        command = [sys.executable, "-c", RESUMED, str(tmp_path), str(step)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
        assert done.returncode == -signal.SIGKILL
    [starts] = goodput.read(tmp_path).values()
    assert [(start.first, start.step) for start in starts] == [(4, 4), (8, 8)]


def test_a_torn_slot_costs_nothing_and_a_torn_file_little(tmp_path):
    clock = goodput.Clock()
    clock.open(tmp_path, process=3, processes=8, facts={"commit": "abc"})
    clock.steps(7)
    clock.close("ended by SIGTERM after step 8")
    path = tmp_path / "goodput" / "process-3.jsonl"
    whole = path.read_bytes()
    [start] = goodput.starts(path)
    assert (start.process, start.processes, start.first, start.end) == (3, 8, 7, "ended by SIGTERM after step 8")
    assert start.facts == {"commit": "abc"} and sum(start.seconds.values()) == pytest.approx(start.now - start.began, abs=0.01)
    slots = len(whole) - goodput.SLOTS * goodput.WIDTH
    for torn in range(slots, len(whole), 397):  # whichever slot was being written, something of this start is known
        path.write_bytes(whole[:torn] + b"\0" * 40 + whole[torn + 40 :])
        [start] = goodput.starts(path)
        assert start.first == 7 or start.end == ""
        assert start.now >= start.began
    path.write_bytes(whole[:-700])  # cut short; and the next start begins a line of its own
    again = goodput.Clock()
    again.open(tmp_path, process=3, processes=8, facts={})
    again.close("ended")
    assert {s.end for s in goodput.starts(path)} == {"ended by SIGTERM after step 8", "ended"}


@pytest.mark.parametrize("line", ["[]", "{", '{"id": 3, "began": 1}', '{"id": "x", "now": 1e99, "seconds": {}}', "\0" * 50])
def test_lines_of_others_are_left_out(tmp_path, line):
    clock = goodput.Clock()
    clock.open(tmp_path, process=0, processes=1, facts={})
    clock.close("ended")
    with (tmp_path / "goodput" / "process-0.jsonl").open("a") as file:
        file.write(line + "\n")
    assert [s.end for s in goodput.read(tmp_path)[0]] == ["ended"]
    (tmp_path / "goodput" / "process-1.jsonl").symlink_to("process-0.jsonl")
    with pytest.raises(WorkdirError, match="process-1.jsonl is a link"):
        goodput.read(tmp_path)


def test_time_in_a_queue_is_no_time_that_it_was_stopped(tmp_path, monkeypatch):
    clock = goodput.Clock()
    monkeypatch.setenv("JAXTRAIN_SUBMITTED", str(int(clock.began) - 100))
    clock.open(tmp_path, process=0, processes=1, facts={})
    clock.close("ended")
    [starts] = goodput.read(tmp_path).values()
    assert goodput.totals(starts)[goodput.QUEUE] == pytest.approx(100, abs=1.1)
    assert clock.goodput() == 0.0, "no step yet"
    assert goodput.goodput({goodput.STEPS: 3.0, goodput.STOPPED: 1.0}) == 0.75
    told = goodput.summary({goodput.STEPS: 300.0, goodput.STOPPED: 60.0, goodput.SAVES: 40.0})
    assert told == "goodput 75% of 400 s over all starts; stopped 15%, saves 10%"


def test_the_process_that_the_others_wait_for_is_named(tmp_path):
    """Process 2 prepares its steps for longer; the others wait for their devices, and so for it."""
    folder = tmp_path / "goodput"
    folder.mkdir()
    for process, blocked in enumerate((90.0, 89.0, 60.0, 91.0)):
        head = {"id": "a", "began": 100.0, "process": process, "processes": 4, "host": f"n{process}", "pid": 1, "queued": 0}
        slot = {
            "id": "a", "write": 5, "now": 300.0, "first": 0, "step": 100, "owner": "steps", "end": "",
            "seconds": {"steps": 200.0}, "timed": 100, "total": 100.0, "squares": 100.0, "longest": 1.0, "blocked": blocked,
        }  # fmt: skip
        (folder / f"process-{process}.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(slot)}\n")
    found = goodput.read(tmp_path)
    assert goodput.straggler(found).host == "n2"
    assert goodput.straggler({p: each for p, each in found.items() if p != 2}) is None
    assert goodput.of_run(found) == {"steps": 800.0}
