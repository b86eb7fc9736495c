"""Connections that stay open during a run, and show at once that a process has ended.

They are the rendezvous's connections, between process 0 and each other process. The kernel closes
them when their process ends for any reason, and its keepalive notices within 15 s that a host
has vanished. A process that is stopped or busy for minutes is not taken for dead, because the
kernel of its host still answers.

A message is 4 bytes of length, then JSON:

    {"end": "", "seconds": 0}          the sender has left the run. Its connection may close
    {"end": "reason", "seconds": 10}   the receiver has to end within this time, for this reason

Process 0 sends the reason on to all others, and every process exits with `EXIT_CODE`, or with the
code of its own error. Between supervisors (`jaxtrain.supervise`) a message may have a "code", with
which their run ends for good, and the last one of a supervisor whose run has ended has a "code",
too.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxtrain.parallel import supervised_attempt
from loaders.io.checks import first_line

log = logging.getLogger("jaxtrain")

EXIT_CODE = 70
# A vanished host is noticed after 5 s of silence and 4 probes that nothing answers: 13 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 13_000}
ERROR_SECONDS = 10.0  # for the other processes to end by the same error, or to write their stacks
FIRST_SECONDS = 5.0  # [s] for this process to end by its own error, before the others
OWN_ERROR_SECONDS = 12.0  # for this process to end by its own error, after the others
UNWIND_SECONDS = 1.0  # of these, at least, if another process is lost meanwhile
FORWARD_SECONDS = 0.3  # for the reason to leave process 0 before JAX's service ends with it
MAX_MESSAGE = 1 << 16  # [bytes]


class Peer(NamedTuple):
    """Another process, and the connection to it."""

    process: int
    host: str
    connection: socket.socket


class Loss(NamedTuple):
    """The reason for which this process has to end."""

    reason: str
    code: int = 0  # of the whole run's end, if it ends for good
    grace: float = 3.0  # [s] for a process to end by itself before its supervisor kills it


class Links:
    """The connections to other processes: to all of them in process 0, to process 0 elsewhere.

    A thread watches them until `close`. If a process ends before it has left the run, the thread
    ends this process too, and names the other, or it calls ``on_end`` with the reason.
    """

    def __init__(
        self,
        process: int,
        peers: Sequence[Peer],
        *,
        name: str = "process",
        on_end: Callable[[Loss], None] | None = None,
    ):
        self._process = process
        self._name = name
        self._on_end = on_end
        self._peers = {peer.process: _Reader(peer) for peer in peers}
        self._on_loss: Callable[[str], None] = lambda reason: None
        self._loss: Loss | None = None
        self._deadline = float("inf")
        self._is_unwinding = False  # by an error of its own
        self._code = EXIT_CODE
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="links", daemon=True)
        if peers:
            self._thread.start()

    def on_loss(self, note: Callable[[str], None]) -> None:
        """Call ``note(reason)`` before a loss ends this process."""
        self._on_loss = note

    def report(self, reason: str, *, code: int = 0, is_first: bool = False) -> None:
        """Tell the other processes that this one ends early, and why.

        An error may be the consequence of another process's death. Its connection then names it.
        From then on this process has `OWN_ERROR_SECONDS` to end, since JAX's own end waits for all
        processes, and for a dead one until its heartbeats have timed out.

        ``code``: the exit code of an error that is no consequence. It stays if this process is
        ended here, and the others end at once. ``is_first``: they end later than this process, so
        that the supervisors learn its code first.
        """
        if not self._peers:
            return
        self._code = code or self._code
        time.sleep(FORWARD_SECONDS)
        loss = Loss(f"process {self._process} ended: {reason}")
        self._send(loss, 0 if code and not is_first else ERROR_SECONDS)
        self._is_unwinding = True
        self._end_in(FIRST_SECONDS if is_first else OWN_ERROR_SECONDS, loss)
        self._wake.send(b"x")

    def report_error(self, error: BaseException) -> None:
        """Report an error that ends this process, with the code that its supervisor expects."""
        code = supervised_attempt.code_of(error)
        self.report(first_line(error), code=code, is_first=code in supervised_attempt.OWN)

    def report_loss(self, loss: Loss) -> None:
        """Tell the other supervisors at once that the processes have to end."""
        self._send(loss, 0)

    @property
    def has_loss(self) -> bool:
        """Whether another process, or supervisor, has ended."""
        return self._loss is not None

    @property
    def have_left(self) -> bool:
        """Whether another supervisor has left for good."""
        return any(reader.has_finished for reader in self._peers.values())

    def close(self, *, code: int = 0) -> None:
        """Leave the run. The other processes go on without this one.

        After a loss or `report` the thread stays, and ends this process if it does not end itself.
        ``code``: of a supervisor that leaves for good, anything but 0.
        """
        self._is_unwinding = False
        if self._closed.is_set() or (self._loss and not self._on_end):
            return
        self._closed.set()
        self._send(Loss("", code), 0)
        self._wake.send(b"x")
        if self._thread.is_alive():
            self._thread.join()
        for reader in self._peers.values():
            reader.peer.connection.close()
        self._wake.close()
        self._woken.close()

    def _send(self, loss: Loss, seconds: float) -> None:
        fields = {"end": loss.reason[: MAX_MESSAGE // 8], "seconds": seconds, "code": loss.code}
        fields["grace"] = loss.grace
        body = json.dumps(fields).encode()
        message = len(body).to_bytes(4, "big") + body
        with self._sending:
            for reader in self._peers.values():
                with contextlib.suppress(OSError):  # it has left
                    reader.peer.connection.sendall(message)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for reader in self._peers.values():
                selector.register(reader.peer.connection, selectors.EVENT_READ, reader)
            while not self._closed.is_set():
                for key, _ in selector.select(self._patience()):
                    if key.data is None:
                        self._woken.recv(1)
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= self._deadline and not self._closed.is_set():
                    self._end()

    def _patience(self) -> float | None:
        if self._deadline == float("inf"):
            return None
        return max(0.0, self._deadline - time.monotonic())

    def _read(self, reader: "_Reader") -> bool:
        """Read the messages of a process. False if its connection is at its end."""
        try:
            messages = reader.read()
        except OSError as error:
            if not reader.has_left:
                process, host, _ = reader.peer
                text = f"{self._name} {process} ({host}) has died: {_in_words(error)}"
                self._lose(Loss(text), 0)
            return False
        for message in messages:
            reader.has_left = True
            reader.has_finished |= message.code != 0
            if message.end:
                loss = Loss(message.end, message.code, message.grace)
                self._lose(loss, message.seconds)
        return True

    def _lose(self, loss: Loss, seconds: float) -> None:
        """End this process in so many seconds. Process 0 sends the reason to the others first."""
        if self._process == 0:
            self._send(loss, seconds)
            seconds += FORWARD_SECONDS
        self._end_in(max(seconds, UNWIND_SECONDS) if self._is_unwinding else seconds, loss)

    def _end_in(self, seconds: float, loss: Loss) -> None:
        """End this process in so many seconds, unless it has to end earlier."""
        with self._ending:
            if time.monotonic() + seconds < self._deadline:
                self._loss = loss
                self._deadline = time.monotonic() + seconds

    def _end(self) -> None:
        assert self._loss
        if self._on_end:
            self._deadline = float("inf")
            self._on_end(self._loss)
            return
        text = f"{self._loss.reason}; ending process {self._process}. Rerun the command to resume"
        log.error(text)
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # the process has to end in any case
            self._on_loss(self._loss.reason)
        os._exit(self._code)


def notice_vanished_host(connection: socket.socket) -> None:
    """Let the kernel close a connection whose other host no longer answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class _Message(NamedTuple):
    end: str
    seconds: float
    code: int = 0
    grace: float = 3.0


class _Reader:
    """The messages of one connection."""

    def __init__(self, peer: Peer):
        self.peer = peer
        self.has_left = False
        self.has_finished = False
        self._unread = b""
        peer.connection.settimeout(2)
        notice_vanished_host(peer.connection)

    def read(self) -> list[_Message]:
        """Return the messages that are whole. Raises OSError at the end of the connection."""
        received = self.peer.connection.recv(MAX_MESSAGE)
        if not received:
            raise ConnectionError("its connection was closed")
        self._unread += received
        messages: list[_Message] = []
        while len(self._unread) >= 4:
            size = int.from_bytes(self._unread[:4], "big")
            if size > MAX_MESSAGE:
                raise ConnectionError(f"it sent a message of {size} bytes")
            if len(self._unread) < 4 + size:
                break
            try:
                messages.append(_Message(**json.loads(self._unread[4 : 4 + size])))
            except (ValueError, TypeError) as error:
                raise ConnectionError("it sent something that is not a message") from error
            self._unread = self._unread[4 + size :]
        return messages


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "its host no longer answers"
    return error.strerror or str(error)
