"""A process that ends with the one that started it, and with all that it started itself.

Else a measurement that is ended by a signal would leave its child on the card.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

GRACE = 120.0  # [s] after SIGTERM, for a run to save
PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def child(command: Sequence[str], cwd: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own. At the end, the group is ended.

    Meanwhile SIGTERM ends this process by SystemExit, with 143. On Linux, a process that is killed
    has SIGTERM sent to its child.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(
        command, cwd=cwd, start_new_session=True, preexec_fn=_end_with_parent
    )
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not leave it there
        end(process)
        signal.signal(signal.SIGTERM, before)


def run(command: Sequence[str], cwd: pathlib.Path) -> int:
    """Return a command's exit status, as of `subprocess.run`."""
    with child(command, cwd) as process:
        return process.wait()


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end if it runs, and kill all of its group that is there after `GRACE` s."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.poll() is None:
            _send(process, signal.SIGTERM)
            process.wait(GRACE)
    _send(process, signal.SIGKILL)
    process.wait()


def _send(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, number)


def _libc() -> Any:
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # Linux alone has it
        return None


PRCTL = _libc()  # before the fork


def _end_with_parent() -> None:
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
