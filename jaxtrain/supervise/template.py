"""A process with the imports done, whose forks train: python -m jaxtrain.supervise.template A B.

A is the descriptor of a socket to the supervisor. The messages are lines of JSON:

    ← {"path": […], "argv": […], "modules": […]}      sys.path, the arguments of `jaxtrain train`
    ← {"environment": {…}, "argv": […]}               start a fork with these, too
    → {"pid": 123}                                    it is started
    → {"stale": true}                                 instead: files of jaxtrain have changed since
    → {"pid": 123, "code": -9}                        it has ended

B is a pipe that only the supervisor writes to, and never does. At its end, template and fork end.
No device is touched here, and there is no second thread: both would not survive the fork.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

IMPORTS = ("jax", "orbax.checkpoint", "jaxtrain.run.loop", "jaxtrain.commands.train")
LOST = 70
PR_SET_PDEATHSIG = 1
POLL = 0.02  # [s] between two looks for the end of the fork


def main() -> int:
    """Serve the supervisor until its end. A fork does not return."""
    # A signal to all processes of a job is for the fork, by way of the supervisor.
    signal.pthread_sigmask(signal.SIG_BLOCK, _stop_signals())
    server = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    messages = _messages(server)
    setup = next(messages, None)
    if setup is None:
        return 0
    sys.path[:] = setup["path"]
    for name in (*IMPORTS, *setup["modules"]):
        importlib.import_module(name)
    from jaxtrain.parallel.cluster import processes

    digest = processes.digest_of_files()
    gc.freeze()  # a fork copies no page of theirs to collect its own garbage
    for request in messages:
        if processes.digest_of_files() != digest:
            _send(server, {"stale": True})
            return 0
        pid = os.fork()
        if not pid:
            os.close(server.detach())  # `messages` would keep a closed socket open
            os.environ.update(request["environment"])
            _train([*setup["argv"], *request["argv"]], lifeline)
        _send(server, {"pid": pid})
        code = _wait(pid, server)
        if code is None:
            return 0
        _send(server, {"pid": pid, "code": code})
    return 0


def _stop_signals() -> set[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    return {signal.Signals[name] for name in names}


def _messages(server: socket.socket) -> Iterator[Any]:
    with server.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _send(server: socket.socket, message: dict[str, Any]) -> None:
    server.sendall(json.dumps(message).encode() + b"\n")


def _wait(pid: int, server: socket.socket) -> int | None:
    """Return the exit code of the fork, or None once the supervisor is gone."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([server], [], [], POLL)[0] and not server.recv(1, socket.MSG_PEEK):
            return None


def _train(argv: list[str], lifeline: int) -> NoReturn:
    """Train in a fork, as `jaxtrain train` does."""
    _end_with_parent()
    for number in _stop_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _stop_signals())
    sys.argv = ["jaxtrain", "train", *argv]
    runpy.run_module("jaxtrain", run_name="__main__")  # which exits with the command's code
    raise AssertionError("unreachable")


def _end_with_parent() -> None:
    """Let the kernel kill this process when the template has ended, also while it is stopped."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(lifeline: int) -> None:
    """End this process when its supervisor has ended: another one may start the run again."""
    waiting = select.poll()
    waiting.register(lifeline, 0)  # of the end of the pipe alone
    waiting.poll()
    print("the supervisor of this process has ended; ending it", file=sys.stderr, flush=True)
    os._exit(LOST)


if __name__ == "__main__":
    sys.exit(main())
