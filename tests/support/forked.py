"""`python -m jaxtrain.main` as forks of one process, which has imported what takes two seconds of
every start.

A fork is a process of its own: it has its devices, environment, working directory and end. What a
start does before (the interpreter, its imports, what is set by an environment alone) is tested
where `starts` is false, and where tests call Python. As a script, with a socket's descriptor, this
is that process: a request is JSON with the descriptor to write to; answers are a process's number
and, later, the code or signal by which it has ended.
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
    "jax", "jax.experimental.multihost_utils", "orbax.checkpoint", "optax", "jaxtrain.loop", "jaxtrain.commands.train",
    "jaxtrain.commands.explain", "jaxtrain.plan.summary", "jaxtrain.workloads.bird", "loaders.audio.spectrogram",
)  # fmt: skip
OWN = ("LD_", "MALLOC_", "PYTHON")  # of an environment: what has to be there when a process starts
SIZE = 1 << 20


def starts(environment: Mapping[str, str]) -> bool:
    """Whether a fork can have this environment."""
    return not any(name.startswith(OWN) for name in environment)


class Process:
    """As subprocess.Popen with both streams in one pipe."""

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
            inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=inherited | {"JAX_PLATFORMS": "cpu"},
            )
            theirs.close()
        return cls._server

    @classmethod
    def _answer(cls) -> dict:
        """The next message about a start; what comes before it about ends is kept."""
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

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it wrote until its end. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        self._reader.join(timeout)  # a process of its own may still write
        return self._text.decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def serve(descriptor: int) -> list[str] | None:
    """Forks until the other side is gone. Returns the arguments of a start in each fork, None in
    the end."""
    server, children = socket.socket(fileno=descriptor), set()
    while True:
        if select.select([server], [], [], 0.01)[0]:
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
            server.send(json.dumps({"pid": ended, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: dict, output: int) -> list[str]:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb", closefd=False), write_through=through)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(request["cwd"])
    sys.path[0:1] = [request["cwd"], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # for this file's own folder
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
    arguments = serve(int(sys.argv[1]))
    if arguments is not None:
        from jaxtrain import cli
        from jaxtrain.main import main

        sys.argv = ["jaxtrain", *arguments]
        sys.exit(cli.process(main))
