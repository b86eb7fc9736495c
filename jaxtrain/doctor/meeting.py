"""Rounds in which the processes of a job tell process 0 what they found, on the coordinator's port and with the job's secret.

Unlike a run's roll call (`jaxtrain.parallel.cluster.rendezvous`) it takes processes that differ,
and goes on without those that are
missing: what is wrong with them is what the doctor is asked for.
"""

import contextlib
import errno
import selectors
import socket
import time
from collections import deque
from typing import Any

from jaxtrain.parallel.cluster import rendezvous
from jaxtrain.parallel.cluster.handshake import Guest, HandshakeError, Line, prove


class MeetingError(RuntimeError):
    """Process 0 cannot be met, or went.

    Attributes:
      remedy: what to do about it.
    """

    def __init__(self, text: str, remedy: str):
        super().__init__(text)
        self.remedy = remedy


class Host:
    """Process 0's side. ``met``: who came in time, itself included. ``refused``: who was sent away, and why."""

    def __init__(self, coordinator: str, *, processes: int, job: str, secret: str, wait: float):
        """Waits until all are there, at most ``wait`` [s]. Raises MeetingError where the port cannot be had."""
        host, _, port = coordinator.rpartition(":")
        self._job, self._processes, self._secret = job, processes, secret.encode()
        self._selector = selectors.DefaultSelector()
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(self._selector)
        self._strangers: dict[Guest, float] = {}
        self._guests: dict[int, Guest] = {}
        self._inbox: dict[int, deque[Any]] = {}
        self.met, self.refused = [0], list[str]()
        try:
            for listener in rendezvous.listen(host.strip("[]"), int(port), time.monotonic(), lambda: False):
                self._closing.enter_context(listener)
                self._selector.register(listener, selectors.EVENT_READ, None)
        except rendezvous.RendezvousError as error:
            self._closing.close()
            raise MeetingError(str(error).partition(". ")[0], "") from error
        deadline = time.monotonic() + wait
        while len(self._guests) < processes - 1 and time.monotonic() < deadline:
            self._pump()

    def gather(self, value: Any, *, within: float) -> dict[int, Any]:
        """Everyone's value of this round. Those from whom none comes within ``within`` [s] are present no longer."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and not all(self._inbox[p] for p in self._guests):
            self._pump()
        for process in [p for p in self._guests if not self._inbox[p]]:
            self._drop(self._guests[process])
        return {0: value} | {p: self._inbox[p].popleft() for p in sorted(self._guests)}

    def share(self, value: Any) -> Any:
        """Tells everyone a value, and returns it."""
        for guest in list(self._guests.values()):
            try:
                assert guest.line is not None
                guest.connection.settimeout(10)
                guest.connection.sendall(guest.line.pack(value))
                guest.connection.setblocking(False)
            except OSError:
                self._drop(guest)
        return value

    def close(self) -> None:
        for guest in [*self._guests.values(), *self._strangers]:
            guest.connection.close()
        self._closing.close()

    def _pump(self) -> None:
        for guest in [g for g, since in self._strangers.items() if time.monotonic() - since > rendezvous.PATIENCE]:
            self._drop(guest)
        for key, _ in self._selector.select(0.1):
            if key.data is not None:
                self._receive(key.data)
                continue
            assert isinstance(key.fileobj, socket.socket)
            try:
                connection, _ = key.fileobj.accept()
            except OSError:
                continue
            guest = Guest(connection, self._secret)
            self._strangers[guest] = time.monotonic()
            self._selector.register(connection, selectors.EVENT_READ, guest)
            if len(self._strangers) > rendezvous.STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _receive(self, guest: Guest) -> None:
        known = next((p for p, g in self._guests.items() if g is guest), None)
        try:
            for message in guest.receive():
                if known is None:
                    known = self._admit(message, guest)
                    self._strangers.pop(guest, None)
                    self._guests[known], self._inbox[known] = guest, deque()
                    self.met = sorted({*self.met, known})
                else:
                    self._inbox[known].append(message)
        except OSError:
            self._drop(guest)

    def _admit(self, message: Any, guest: Guest) -> int:
        """The number of a process. Raises HandshakeError for one that does not belong here."""
        if not isinstance(message, dict) or type(message.get("process")) is not int:
            raise HandshakeError("this was not a doctor's process")
        process, who = message["process"], f"process {message['process']} ({str(message.get('host'))[:80]})"
        problem = ""
        if message.get("job") != self._job or message.get("processes") != self._processes:
            job, processes = str(message.get("job"))[:80], str(message.get("processes"))[:20]
            problem = f"{who} belongs to another job: {job!r} of {processes} processes, not {self._job!r} of {self._processes}"
        elif process in self._guests or not 0 < process < self._processes:
            problem = f"two processes have the number {process}; {who} is one of them"
        if problem:
            self.refused.append(problem)
            with contextlib.suppress(OSError):
                assert guest.line is not None
                guest.connection.send(guest.line.pack({"refused": problem}))
            raise HandshakeError(problem)
        return process

    def _drop(self, guest: Guest) -> None:
        self._strangers.pop(guest, None)
        for process in [p for p, g in self._guests.items() if g is guest]:
            del self._guests[process], self._inbox[process]
        with contextlib.suppress(KeyError, ValueError):  # it is not registered any more
            self._selector.unregister(guest.connection)
        guest.connection.close()


class Visitor:
    """The side of every other process. ``address``: of this host, as the network sees it on the way to process 0."""

    def __init__(self, coordinator: str, *, process: int, processes: int, job: str, secret: str, wait: float, answer: float):
        """Raises MeetingError when process 0 is not met within ``wait`` [s]. ``answer``: that it may take for anything else."""
        host, _, port = coordinator.rpartition(":")
        deadline = time.monotonic() + wait
        last: OSError = OSError("no answer")
        while True:
            try:
                self._connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
                self._line = _proven(self._connection, secret.encode())
                break
            except OSError as error:  # what was not understood says more than that it has gone
                last = last if isinstance(last, HandshakeError) else error
            if time.monotonic() > deadline:
                raise MeetingError(
                    f"process 0 was not met at {coordinator} within {wait:g} s: {last.strerror or last}",
                    _remedy(last, host, port),
                ) from last
            time.sleep(0.3)
        self.address = self._connection.getsockname()[0]
        self._waiting: deque[Any] = deque()
        self._answer = answer
        self._say({"process": process, "processes": processes, "job": job, "host": socket.gethostname()})

    def gather(self, value: Any, *, within: float) -> dict[int, Any]:
        """Tells process 0 this process's value; process 0 alone has everyone's."""
        self._say(value)
        return {}

    def share(self, value: Any = None) -> Any:
        """Process 0's value."""
        deadline = time.monotonic() + self._answer
        while not self._waiting:
            self._connection.settimeout(max(deadline - time.monotonic(), 0.1))
            try:
                data = self._connection.recv(1 << 16)
                if not data:
                    raise HandshakeError("it closed the connection")
                self._waiting.extend(self._line.unpack(data))
            except OSError as error:
                text = f"process 0 went while the job was looked at: {error.strerror or error}"
                raise MeetingError(
                    text, "read what process 0 printed; a stop of its host or a cut network looks like this"
                ) from error
        value = self._waiting.popleft()
        if isinstance(value, dict) and "refused" in value:
            raise MeetingError(
                f"process 0 refused it: {value['refused']}", "give every job a port, and every process a number, of its own"
            )
        return value

    def _say(self, value: Any) -> None:
        try:
            self._connection.settimeout(30)
            self._connection.sendall(self._line.pack(value))
        except OSError as error:
            raise MeetingError(f"process 0 went: {error.strerror or error}", "read what process 0 printed") from error

    def close(self) -> None:
        self._connection.close()


def _proven(connection: socket.socket, secret: bytes) -> Line:
    """The line to process 0. Raises OSError, and closes the connection, when something else listens there."""
    try:
        return prove(connection, secret)
    except TimeoutError as error:
        connection.close()
        raise HandshakeError("what listens there says nothing") from error
    except OSError:
        connection.close()
        raise


def _remedy(error: OSError, host: str, port: str) -> str:
    """What to do when process 0 cannot be reached."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} is unknown here: correct DNS or /etc/hosts, or name process 0's host by its address"
    if isinstance(error, HandshakeError):
        return (
            "another program or job has the port, or JAXTRAIN_SECRET differs: set it alike everywhere, or choose another port"
        )
    if error.errno == errno.ECONNREFUSED:
        return f"{host} answers, but nothing listens at {port}: start process 0 there too, and check JAXTRAIN_COORDINATOR"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
        return f"no route leads from here to {host}: name an address of a network that both hosts are in (ip route get {host})"
    return (
        f"packets to {host}:{port} get no answer: open this port in the firewall between the hosts, and see that {host} is up"
    )
