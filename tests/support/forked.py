"""`python -m jaxtrain.main` as forks of one process, which has already done two seconds of imports.

A fork is a process of its own: it has its own devices, environment, working directory and end. The
earlier part of a start (the interpreter, its imports, and settings that only an environment makes)
is tested if `starts` is false, and by tests that call Python. As a script, with a socket's
descriptor, this file is that process. A request is JSON with the descriptor to write to. The
answers are a process's number and, later, the code or signal with which it ended.
"""

import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

IMPORTS = (
    "jax",
    "jax.experimental.multihost_utils",
    "orbax.checkpoint",
    "optax",
    "jaxtrain.run.loop",
    "jaxtrain.commands.train",
    "jaxtrain.commands.explain",
    "jaxtrain.plan.summary",
    "loaders.audio.spectrogram",
)
OWN = ("JAX_", "LD_", "MALLOC_", "PYTHON")  # variables that are read when a process starts
SIZE = 1 << 20


def starts(environment: Mapping[str, str]) -> bool:
    """Whether a fork can have this environment."""
    return not any(name.startswith(OWN) for name in environment)


class Process:
    """A replacement for subprocess.Popen with both streams in one pipe."""

    _server: socket.socket | None = None
    _ended: dict[int, int] = {}

    def __init__(self, arguments: list[str], *, cwd: os.PathLike, env: Mapping[str, str]):
        self.args, self.returncode = arguments, None
        reading, writing = os.pipe()
        request = json.dumps({"argv": arguments, "cwd": str(cwd), "env": dict(env)}).encode()
        socket.send_fds(self._connected(), [request], [writing])
        os.close(writing)
        self.pid = self._answer()["pid"]
        self._text = b""
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    @classmethod
    def _connected(cls) -> socket.socket:
        if cls._server is None:
            cls._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            inherited = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("JAX_", "XLA_"))
            }
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=inherited | {"JAX_PLATFORMS": "cpu"},
            )
            theirs.close()
        return cls._server

    @classmethod
    def _answer(cls) -> dict:
        """The next message about a start. Earlier messages about ends are stored."""
        while True:
            message = json.loads(cls._server.recv(SIZE))
            if "code" not in message:
                return message
            cls._ended[message["pid"]] = message["code"]

    def _read(self, descriptor: int) -> None:
        while part := os.read(descriptor, 65536):
            self._text += part
        os.close(descriptor)

    def poll(self) -> int | None:
        while self.returncode is None and select.select([self._server], [], [], 0)[0]:
            message = json.loads(self._server.recv(SIZE))
            self._ended[message["pid"]] = message["code"]
        if self.returncode is None:
            self.returncode = self._ended.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout, self._text)
            time.sleep(0.01)
        return self.returncode

    @property
    def text(self) -> bytes:
        """Its output until now."""
        return self._text

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Its output until its end. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        self._reader.join(timeout)  # a child process may still write
        return self._text.decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def serve(descriptor: int) -> list[str] | None:
    """Forks until the other side closes. Returns the arguments of a start in each fork, and None at
    the end."""
    server, children = socket.socket(fileno=descriptor), set()
    while True:
        if select.select([server], [], [], 0.01 if children else None)[0]:
            message, descriptors, _, _ = socket.recv_fds(server, SIZE, 1)
            if not message:
                return None
            request, [output] = json.loads(message), descriptors
            if not (child := os.fork()):
                server.close()
                return _become(request, output)
            os.close(output)
            children.add(child)
            server.send(json.dumps({"pid": child}).encode())
        while children:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            children.discard(ended)
            server.send(
                json.dumps({"pid": ended, "code": os.waitstatus_to_exitcode(status)}).encode()
            )


def _become(request: dict, output: int) -> list[str]:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored if nohup runs the tests
    os.environ.clear()
    os.environ.update(request["env"])
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        open(1, "wb", closefd=False), write_through=through
    )
    sys.stderr = sys.__stderr__ = open(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.chdir(request["cwd"])
    # for this file's own folder
    sys.path[0:1] = [request["cwd"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    import jax

    for name, value in os.environ.items():
        if (old := jax.config.values.get(name := name.lower(), ...)) is not ...:
            is_number = isinstance(old, bool | int | float)
            jax.config.update(name, type(old)(json.loads(value.lower())) if is_number else value)
    return request["argv"]


if __name__ == "__main__":
    for name in IMPORTS:
        __import__(name)
    gc.freeze()  # a fork copies no page of theirs to collect its own garbage
    gc.set_threshold(100_000, 50, 100)  # as in conftest.py
    arguments = serve(int(sys.argv[1]))
    if arguments is not None:
        from jaxtrain import cli
        from jaxtrain.main import main

        sys.argv = ["jaxtrain", *arguments]
        sys.exit(cli.process(main))
