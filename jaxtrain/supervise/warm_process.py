"""A supervisor's side of `template`: it starts processes of the run without their imports."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.parallel import lease


class Ended(NamedTuple):
    """The process of the run has ended, with an exit code or by a signal (negative)."""

    code: int


class WarmProcess:
    """A template, and the process of the run, which is its fork. Its end is put into ``events``."""

    def __init__(
        self, argv: Sequence[str], modules: Sequence[str], events: "queue.SimpleQueue[Any]"
    ):
        self._setup = {"path": sys.path, "argv": list(argv), "modules": list(modules)}
        self._events = events
        self._lifeline, self._end_of_lifeline = os.pipe()
        self._pid = 0  # 0 = none runs
        self._request: dict[str, Any] = {}  # of a start that has not been confirmed
        self._signals: list[int] = []  # that came before the process had started
        self._lock = threading.Lock()
        self._spawn()

    def _spawn(self) -> None:
        self._server, template_end = socket.socketpair()
        numbers = template_end.fileno(), self._lifeline
        command = [sys.executable, "-m", "jaxtrain.supervise.template", *map(str, numbers)]
        # Ctrl-C in a terminal is for the supervisor alone.
        self._template = subprocess.Popen(command, pass_fds=numbers, start_new_session=True)
        template_end.close()
        self._send(self._setup)
        threading.Thread(target=self._read, name="warm process", daemon=True).start()

    def start(self, environment: Mapping[str, str], argv: Sequence[str] = ()) -> None:
        """Start a process of the run with more variables in its environment, and arguments."""
        with self._lock:
            self._signals = []
            self._request = {"environment": dict(environment), "argv": list(argv)}
            if self._template.poll() is None:
                self._send(self._request)
            else:
                self._restart()

    def signal(self, number: int) -> None:
        """Pass a signal on to the process of the run, at the latest once it has started."""
        with self._lock:
            if self._request:
                self._signals.append(number)
            elif self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)

    def close(self) -> None:
        """End the template, and the process of the run, if there is one."""
        os.close(self._end_of_lifeline)
        self._template.kill()
        self._template.wait()
        self._server.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the reader sees that it has ended
            self._server.sendall(json.dumps(message).encode() + b"\n")

    def _restart(self) -> None:
        """Begin another template, with the start that is waiting."""
        self._server.close()
        self._spawn()
        self._send(self._request)

    def _read(self) -> None:
        server, template = self._server, self._template
        with server.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                message = json.loads(line)
                if "code" in message:
                    self._note_end(message["code"])
                elif "pid" in message:
                    self._note_start(message["pid"])
        template.wait()
        with self._lock:
            if server is not self._server:
                return  # a start has begun another template
            pid = self._pid
            if self._request and not template.returncode:
                self._restart()  # files have changed
                return
        if pid:  # the template was killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _await_end(pid)
            self._note_end(-signal.SIGKILL)
        elif self._request:
            self._note_end(template.returncode)

    def _note_start(self, pid: int) -> None:
        with self._lock:
            self._pid = pid
            self._request = {}
            signals = self._signals
        for number in signals:
            self.signal(number)

    def _note_end(self, code: int) -> None:
        with self._lock:
            self._pid = 0
            self._request = {}
        self._events.put(Ended(code))


def _await_end(pid: int) -> None:
    """Wait for a process whose parent has ended, also if nothing collects its exit code."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)  # process 1 of a container inherits it
    with contextlib.suppress(ProcessLookupError):
        while lease.state_of(pid)[0] not in lease.ENDED:
            os.kill(pid, 0)
            time.sleep(0.02)
