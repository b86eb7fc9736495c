"""The account of a run's time: one phase for each second, through kills, torn files and several
processes."""

import dataclasses
import errno
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import timeline

ROOT = pathlib.Path(__file__).parent.parent
# A process that is busy until it is killed, and prints a line once its file exists.
BUSY = """
import sys, time
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import timeline
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
    """SIGKILL arrives three times, between any two instructions. The parts in the file still add up
    to the time that passed."""
    began, reached = time.time(), []

    def read_steps():
        return goodput.read(tmp_path).get(0, [])

    for number, first in enumerate((0, 10, 20), start=1):
        process = subprocess.Popen(
            [sys.executable, "-c", BUSY, str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        # Wait until the file has steps that this start was the first to make.
        before = max(reached, default=0)
        reached.append(0)
        for line in process.stdout:
            reached[-1], found = int(line), read_steps()
            if len(found) == number and found[-1].step > max(before, first) + 10:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    ended = time.time()
    starts = read_steps()
    seconds = goodput.totals(starts)
    # No later start accounts for the time after the last line of the last start.
    assert sum(seconds.values()) + ended - starts[-1].now == pytest.approx(ended - began, rel=0.01)
    assert ended >= starts[-1].now
    assert [s.first for s in starts] == [0, 10, 20] and [s.end for s in starts] == [""] * 3
    assert all(s.first < s.step <= last + 1 for last, s in zip(reached, starts, strict=True))
    assert seconds[goodput.AGAIN] > 0 and seconds[goodput.STEPS] > 0 and seconds[goodput.WAIT] > 0
    assert set(seconds) <= set(goodput.PHASES) and goodput.QUEUE not in seconds
    assert (
        starts[0].timed
        and starts[0].total / starts[0].timed >= 0.03
        and starts[0].own < starts[0].longest
    )


RESUMED = """
import os, signal, sys
from jaxtrain.telemetry import goodput
from jaxtrain.telemetry.report import timeline
clock = goodput.Clock()
clock.open(sys.argv[1], process=0, processes=1, facts={})
clock.resumed(int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_right_after_a_restore_leaves_the_step_that_it_resumed_from(tmp_path):
    """With cached programs, steps and a checkpoint are made within a second, between two writes of
    the thread."""
    for step in (4, 8):
        command = [sys.executable, "-c", RESUMED, str(tmp_path), str(step)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
        assert done.returncode == -signal.SIGKILL
    [starts] = goodput.read(tmp_path).values()
    assert [(start.first, start.step) for start in starts] == [(4, 4), (8, 8)]


def test_a_line_that_is_cut_short_costs_that_line(tmp_path):
    clock = goodput.Clock()
    clock.open(tmp_path, process=3, processes=8, facts={"commit": "abc"})
    clock.steps(7)
    clock.close("ended by SIGTERM after step 8")
    path = tmp_path / "goodput" / "process-3.jsonl"
    whole = path.read_bytes()
    [start] = goodput.starts(path)
    assert (start.process, start.processes, start.first, start.end) == (
        3,
        8,
        7,
        "ended by SIGTERM after step 8",
    )
    assert start.facts == {"commit": "abc"} and sum(start.seconds.values()) == pytest.approx(
        start.now - start.began, abs=0.01
    )
    head = whole.index(b"\n") + 1
    # the file may be cut anywhere: the line before counts
    for size in range(head, len(whole) - 1, 29):
        path.write_bytes(whole[:size])
        [start] = goodput.starts(path)
        assert start.end == "" and start.now >= start.began
    again = goodput.Clock()  # its lines begin behind the one that was cut short
    again.open(tmp_path, process=3, processes=8, facts={})
    again.close("ended")
    assert {s.end for s in goodput.starts(path)} == {"", "ended"}


def test_the_file_of_a_long_run_stays_short(tmp_path, monkeypatch):
    monkeypatch.setattr(goodput, "MAX_LINES", 3)
    for first in (4, 8):
        clock = goodput.Clock()
        clock.open(tmp_path, process=0, processes=1, facts={})
        clock._closed.wait = lambda seconds, clock=clock: threading.Event.wait(clock._closed, 0.001)
        clock.resumed(first)
        path, sizes = tmp_path / "goodput" / "process-0.jsonl", []
        # the file has become shorter three times
        while sum(b < a for a, b in itertools.pairwise(sizes)) < 3:
            sizes.append(path.read_bytes().count(b"\n"))
        clock.close("ended")
        assert max(sizes) <= 10
    assert sorted((start.first, start.end) for start in goodput.starts(path)) == [
        (4, "ended"),
        (8, "ended"),
    ]


def test_a_full_disk_costs_lines_and_no_run(tmp_path, caplog):
    clock = goodput.Clock()
    clock.open(tmp_path, process=0, processes=1, facts={})
    room = [10]
    file = clock._file.file

    class Full:
        """A disk that accepts ten bytes, then none, and later all of them."""

        def write(self, data):
            if not room:
                return file.write(data)
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken, room[0] = file.write(data[: room[0]]), 0
            return taken

        def close(self):
            file.close()

    clock._file.file = Full()
    clock.resumed(5)
    clock.resumed(6)
    assert (
        sum("cannot be written (No space left on device)" in message for message in caplog.messages)
        == 1
    )
    room.clear()
    clock.close("ended")
    assert [(start.first, start.end) for start in goodput.read(tmp_path)[0]] == [(6, "ended")]


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"id": 3, "began": 1}', '{"id": "x", "now": 1e99, "seconds": {}}', "\0" * 50],
)
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
    """Process 2 takes longer to prepare its steps. The others wait for their devices, and so for
    it."""
    folder = tmp_path / "goodput"
    folder.mkdir()
    for process, blocked in enumerate((90.0, 89.0, 60.0, 91.0)):
        head = {
            "id": "a",
            "began": 100.0,
            "process": process,
            "processes": 4,
            "host": f"n{process}",
            "pid": 1,
            "queued": 0,
        }
        last = {
            "id": "a",
            "now": 300.0,
            "first": 0,
            "step": 100,
            "phase": "steps",
            "end": "",
            "seconds": {"steps": 200.0},
            "timed": 100,
            "total": 100.0,
            "squares": 100.0,
            "longest": 1.0,
            "blocked": blocked,
        }
        (folder / f"process-{process}.jsonl").write_text(
            f"{json.dumps(head)}\n{json.dumps(last)}\n"
        )
    found = goodput.read(tmp_path)
    assert goodput.straggler(found).host == "n2"
    assert goodput.straggler({p: each for p, each in found.items() if p != 2}) is None
    assert goodput.of_run(found) == {"steps": 800.0}


def test_restarts_of_a_supervisor_have_a_cause_and_a_price(tmp_path):
    """Two restarts by one cause, and one by hand, which a supervisor did not make."""
    killed = "process 1 (node7) was killed by SIGKILL"
    causes = [{"attempt": 0, "cause": ""}, {"attempt": 1, "cause": killed}, {}]
    hosts = ["node0", "node7", "node7"]
    causes += [{"attempt": 0, "cause": ""}, {"attempt": 1, "cause": killed, "hosts": hosts}]
    causes += [{"attempt": "2", "cause": killed}, {"attempt": 2, "cause": 3}]  # of nobody's
    lines = []
    for number, facts in enumerate(causes):
        began = 1000.0 + 100 * number
        head = {**goodput.HEAD, "id": str(number), "processes": 1, "began": began, **facts}
        seconds = {goodput.IMPORTS: 1.0, goodput.COMPILATION: 4.0, goodput.AGAIN: 2.0}
        seconds[goodput.STEPS] = 90.0 - sum(seconds.values())
        last = {"id": str(number), **goodput.TOTALS, "now": began + 90.0, "seconds": seconds}
        lines += [json.dumps(head), json.dumps(last)]
    path = tmp_path / goodput.FOLDER / "process-0.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f"{line}\n" for line in lines))
    starts = goodput.starts(path)
    assert [restart[:3] for restart in goodput.supervised_restarts(starts)] == [
        (1, 1100.0, killed),
        (1, 1400.0, killed),
    ]
    # 10 s stopped, 5 s of a start, 2 s of steps made again, twice
    assert goodput.seconds_by_cause(starts) == {killed: 34.0}
    page = timeline._restarts(starts)
    assert page.count(killed) == 3 and "34.0 s because" in page
    assert "node0, node7<" in page, "the hosts that took part"
    assert "on another mesh" not in page
    fewer = [*starts[:-1], dataclasses.replace(starts[-1], processes=2)]
    assert "read the same batches on another mesh" in timeline._restarts(fewer)
