"""A template that is killed: its process ends with it, and the next start has another template."""

import os
import queue
import subprocess
import sys
import threading

import pytest

from jaxtrain.supervise.warm_process import Ended, WarmProcess
from tests.support.processes import ROOT

# A module of the run after which its process does nothing.
SLEEPER = """
import runpy, time

runpy.run_module = lambda *arguments, **named: time.sleep(100)
"""
# A supervisor whose template is killed.
KILLED = """
import os, queue, signal, time
from jaxtrain.supervise.warm_process import WarmProcess

events = queue.SimpleQueue()
process = WarmProcess([], ["sleeper"], events)
process.start({})
while not process._pid:
    time.sleep(0.01)
os.kill(process._template.pid, signal.SIGKILL)
print(events.get(timeout=10).code, flush=True)
process.close()
"""
# Process 1 of a container, which inherits processes, and waits for none that it has not started.
FIRST = """
import ctypes, subprocess, sys

PR_SET_CHILD_SUBREAPER = 36
assert not ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
"""
ABOVE = FIRST + "sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)\n"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("program", [FIRST + KILLED, ABOVE], ids=["supervisor", "above"])
def test_the_end_of_a_process_is_noticed_if_process_1_does_not_wait_for_it(tmp_path, program):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        [sys.executable, "-c", program, KILLED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "-9\n", ended.stderr


def test_a_template_that_ends_right_before_a_start_is_no_end_of_the_process():
    """The thread that reads from the first template sees its end after the start."""
    events = queue.SimpleQueue()
    process = WarmProcess([], [], events)
    has_started = threading.Event()
    template = process._template
    wait = template.wait

    def wait_late():
        has_started.wait()
        return wait()

    template.wait = wait_late
    template.kill()
    wait()
    process.start({}, ["--help"])
    has_started.set()
    assert events.get(timeout=120) == Ended(0)
    assert events.empty()
    process.close()
