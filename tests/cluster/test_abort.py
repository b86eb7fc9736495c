"""A library that aborts because another process has died: the links still name that process."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """import ctypes, os, threading, time
from loaders.io import machine
machine.delay_abort()
def end():
    time.sleep({seconds})
    os._exit(70)
threading.Thread(target=end, daemon=True).start()
ctypes.CDLL(None).abort()  # without the GIL, as a thread of Gloo or XLA
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.2, 70), (30, -signal.SIGABRT)])
def test_another_thread_has_a_second_to_end_the_process(seconds, code):
    began = time.monotonic()
    script = SCRIPT.format(seconds=seconds)
    assert subprocess.run([sys.executable, "-c", script], timeout=25).returncode == code
    assert time.monotonic() - began < 20
