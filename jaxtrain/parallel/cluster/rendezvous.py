"""A roll call before the run: every process connects to process 0, which checks that all are present and identical.

jax.distributed aborts when a process is late, without naming it, ends with a segmentation fault when the port is taken, and
lets two runs that share a port mix. So the processes meet here first, on the same port, where each of these is an error that
names the process and the reason. Both ends prove that they know the job's secret (`handshake`); then a process sends one
message, and gets one back once the roll call is over:

    → {"job": "…", "process": 3, "processes": 4, "host": "node7", "clock": 1.7e9, "facts": {"config": {…}, "versions": {…}}}
    ← {"error": "", "stopped": false}    all are present and agree; or the reason, the same for all

A process that a signal asks to stop while it waits sends one more message, and the roll call ends for all. Strangers are
bounded in number, bytes and time, learn nothing, and cost the others nothing but a retry.
"""

import contextlib
import errno
import ipaddress
import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.parallel.cluster.handshake import Guest, HandshakeError, Line, prove

STRANGERS = 128  # connections that may be open without having proven anything
PATIENCE = 10.0  # [s] for a connection to prove that it knows the secret, and to say who it is
Conclude = Callable[[Sequence[dict[str, Any]], str], Any]  # (messages, late) -> the reply to all present


class RendezvousError(RuntimeError):
    """The processes did not all connect, or they differ."""


class Stopped(RendezvousError):
    """A process was asked to stop while it waited for the others."""


def meet(
    coordinator: str,
    *,
    process: int,
    processes: int,
    job: str,
    facts: Mapping[str, Any],
    timeout: float,
    leave: Callable[[], Any] = lambda: False,
    secret: str = "",
    refusal: str = "",
    awaited: Collection[int] | None = None,
    conclude: Conclude | None = None,
) -> Any:
    """Returns once all processes have reported that they are present, with equal facts.

    With ``conclude`` the facts may differ. After ``timeout`` process 0 goes on with those present,
    and every one of them returns its conclusion.

    Args:
      coordinator: host:port, where process 0 listens.
      job: the same in all processes of this run, and in no other run.
      facts: nested dictionaries that must be equal in all processes.
      timeout: seconds within which all must have connected.
      leave: called repeatedly during the wait, which ends when it returns true.
      secret: of the job, the same in all processes, and known to nobody else; "" = whoever connects is believed.
      refusal: why process 0 cannot begin, which becomes the error of all.
      awaited: the processes that process 0 waits for. By default all.
      conclude: called by process 0 with the messages of all present, its own first, and with the
        names of those late, or "". Those of others have two more fields: "ahead", the seconds by
        which the clock is ahead of process 0's, and "address", from which the process connected.

    Raises:
      RendezvousError: processes, by number, did not connect, or differ in named facts; the port is taken; ``refusal``.
      Stopped: ``leave`` returned true, here or in another process.
    """
    hello = {"job": job, "process": process, "processes": processes, "host": socket.gethostname(), "facts": facts}
    host, _, port = coordinator.rpartition(":")
    deadline, key = time.monotonic() + timeout, secret.encode()
    if process == 0:
        others = set(range(processes) if awaited is None else awaited) - {0}
        roll_call = RollCall(hello, key, timeout, leave, refusal, others, conclude)
        verdict = roll_call.hold(host.strip("[]"), int(port), deadline)
    else:
        verdict = _answer_roll_call(hello, host.strip("[]"), int(port), key, deadline, timeout, leave)
    if verdict["error"]:
        raise (Stopped if verdict["stopped"] else RendezvousError)(verdict["error"])
    return verdict.get("conclusion")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of this name or address."""
    if host.strip("[]").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def addresses(host: str, port: int) -> list[str]:
    """Where process 0 listens for those who connect to ``host``: its addresses on this machine; [] = on every interface.

    That is where the name leads to none of this machine's addresses (a service's, behind which it is), or to loopback, as a
    machine's own name does on some systems although others reach it by that name.
    """
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (socket.gaierror, UnicodeError):
        return []
    return [a for a in dict.fromkeys(found) if (is_loopback(host) or not is_loopback(a)) and _is_own(a)]


def _is_own(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


class RollCall:
    """The roll call as process 0 holds it."""

    def __init__(
        self,
        hello: dict,
        secret: bytes,
        timeout: float,
        leave: Callable[[], Any],
        refusal: str,
        awaited: set[int],
        conclude: Conclude | None,
    ):
        self._hello, self._secret, self._timeout, self._leave, self._refusal = hello, secret, timeout, leave, refusal
        self._awaited, self._conclude = awaited, conclude
        self._selector = selectors.DefaultSelector()
        self._guests: dict[Guest, float] = {}  # who has not said yet who it is, and since when [s]
        self._present: dict[int, tuple[dict, Guest]] = {}

    def hold(self, host: str, port: int, deadline: float) -> dict:
        """Waits for all others, and replies to them. Returns the verdict."""
        verdict = {"error": f"process 0 ({self._hello['host']}) has failed", "stopped": False}
        with contextlib.ExitStack() as closing:
            closing.enter_context(self._selector)
            for listener in listen(host, port, min(deadline, time.monotonic() + 10), self._leave):
                closing.enter_context(listener)
                self._selector.register(listener, selectors.EVENT_READ, None)
            try:
                verdict = self._verdict(port, deadline)
            finally:
                for _, guest in self._present.values():
                    _reply(guest, verdict)
                    guest.connection.close()
                for guest in self._guests:
                    guest.connection.close()
        return verdict

    def _verdict(self, port: int, deadline: float) -> dict:
        hello, present, late = self._hello, self._present, ""
        while missing := sorted(self._awaited - set(present)):
            if self._leave():
                return {"error": f"process 0 ({hello['host']}) was asked to stop while it waited for others", "stopped": True}
            if time.monotonic() > deadline:
                late = f"{_numbered(missing)} of {hello['processes']} did not connect to {hello['host']}:{port}"
                late += f" within {self._timeout:g} s"
                break
            for guest in [g for g, since in self._guests.items() if time.monotonic() - since > PATIENCE]:
                self._drop(guest)
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._admit(key.fileobj)
                elif (stopped := self._receive(key.data)) is not None:
                    return {"error": f"process {stopped} was asked to stop while it waited for others", "stopped": True}
        reports = [hello, *(present[p][0] for p in sorted(present))]
        if self._conclude:
            return {"error": "", "stopped": False, "conclusion": self._conclude(reports, late)}
        return {"error": self._refusal or late or differences(reports), "stopped": False}

    def _admit(self, listener: socket.socket) -> None:
        """Takes a connection; the oldest stranger makes way where there are many, or no descriptors left."""
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                if self._guests:
                    self._drop(next(iter(self._guests)))
                time.sleep(0.05)  # whoever knocks goes on knocking
            return
        guest = Guest(connection, self._secret)
        self._guests[guest] = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, guest)
        if len(self._guests) > STRANGERS:
            self._drop(next(iter(self._guests)))

    def _drop(self, guest: Guest) -> None:
        self._guests.pop(guest, None)
        with contextlib.suppress(KeyError, ValueError):  # it is not registered any more
            self._selector.unregister(guest.connection)
        guest.connection.close()

    def _receive(self, guest: Guest) -> int | None:
        """Reads from a connection: its first message admits a process, its end removes one. Returns who asks to stop."""
        known = next((p for p, (_, g) in self._present.items() if g is guest), None)
        try:
            for message in guest.receive():
                if known is not None:
                    return known
                if refusal := self._problem(message):
                    _reply(guest, {"error": refusal, "stopped": False})
                    raise HandshakeError(refusal)
                known = message["process"]
                message["ahead"] = message["clock"] - time.time()
                message["address"] = guest.connection.getpeername()[0].removeprefix("::ffff:")
                self._present[known] = (message, guest)
                self._guests.pop(guest)
        except OSError:
            if known is not None:
                self._present.pop(known, None)
            self._drop(guest)
        return None

    def _problem(self, other: Any) -> str:
        """Why a process is not admitted; "" when it is."""
        hello, present = self._hello, self._present
        kinds = {"job": str, "process": int, "processes": int, "host": str, "clock": float, "facts": dict}
        # Exactly these: True, 0.5 and 1.0 are no numbers of processes.
        if type(other) is not dict or any(type(other.get(name)) is not kind for name, kind in kinds.items()):
            return "this was not a process of a run"
        if other["job"] != hello["job"]:
            return f"another run's process 0 ({hello['host']}) listens here: {hello['job']}, not {other['job']}"
        if other["processes"] != hello["processes"]:
            return (
                f"process {other['process']} ({other['host']}) belongs to a run of {other['processes']} processes, and "
                f"process 0 ({hello['host']}) to one of {hello['processes']}"
            )
        if other["process"] in present or not 0 < other["process"] < hello["processes"]:
            first = present[other["process"]][0]["host"] if other["process"] in present else hello["host"]
            return f"two processes have the number {other['process']}: one on {first}, one on {other['host']}"
        return ""


def listen(host: str, port: int, deadline: float, leave: Callable[[], Any]) -> list[socket.socket]:
    """Opens the port for this process alone, where the coordinator is: gRPC would share it with another run."""
    while True:
        listeners: list[socket.socket] = []
        try:
            for listener in sockets(addresses(host, port), port):
                listener.setblocking(False)
                listeners.append(listener)
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if time.monotonic() > deadline or leave():
                raise RendezvousError(
                    f"process 0 ({socket.gethostname()}) cannot listen on port {port}: {error.strerror}. If another run uses "
                    "it, choose another port"
                ) from error
        time.sleep(0.5)


def sockets(places: Sequence[str], port: int) -> Iterator[socket.socket]:
    """Listen at each of ``places``, or on every interface if there are none. Raises OSError."""
    # create_server sets SO_REUSEADDR: another listener is an error, connections left by an earlier run are not.
    for place in places:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        yield socket.create_server((place, port), family=family, backlog=1024)
    if not places:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        yield socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)


def _reply(guest: Guest, verdict: dict) -> None:
    with contextlib.suppress(OSError):  # it has left; the others are still answered
        if guest.line:
            guest.connection.settimeout(5)
            guest.connection.sendall(guest.line.pack(verdict))


def _answer_roll_call(
    hello: dict, host: str, port: int, secret: bytes, deadline: float, timeout: float, leave: Callable[[], Any]
) -> dict:
    """Reports to process 0, as any other process, and waits for its reply. Returns the verdict."""
    name, last = f"process {hello['process']} ({hello['host']})", OSError("no answer")
    while not leave():
        if time.monotonic() > deadline:
            reason = last.strerror or str(last) or type(last).__name__
            raise RendezvousError(f"{name} found no process 0 at {host}:{port} within {timeout:g} s: {reason}") from last
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                line = prove(connection, secret)
                connection.sendall(line.pack(hello | {"clock": time.time()}))
                # Process 0 names those who are late; it may have begun to wait later than this process.
                if verdict := _wait(connection, line, deadline + 10, leave):
                    return verdict
                if leave():
                    break
                return {"error": f"{name} waited for the others, and process 0 no longer answers", "stopped": False}
        except OSError as error:
            last = last if isinstance(last, HandshakeError) else error  # it says more than the end of what listened
        time.sleep(0.3)
    return {"error": f"{name} was asked to stop while it waited for others", "stopped": True}


def _wait(connection: socket.socket, line: Line, deadline: float, leave: Callable[[], Any]) -> dict | None:
    """The verdict; None when this process leaves, which it reports to process 0, or the time is up."""
    connection.settimeout(0.3)
    while time.monotonic() < deadline:
        if leave():
            connection.sendall(line.pack("stop"))
            return None
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            continue
        if not data:
            raise HandshakeError("it closed the connection")
        for verdict in line.unpack(data):
            if type(verdict) is dict and type(verdict.get("error")) is str and type(verdict.get("stopped")) is bool:
                return verdict
            raise HandshakeError("it sent no verdict")
    return None


def differences(reports: Sequence[Mapping[str, Any]]) -> str:
    """Lists the processes that differ from most others, and in which facts; "" when they are identical."""
    flat = [_flat(report["facts"]) for report in reports]
    lines = []
    for key in sorted({key for f in flat for key in f}):
        values = [f.get(key, "nothing") for f in flat]
        usual = Counter(values).most_common(1)[0][0]  # the first of equals is process 0's
        for value in sorted({v for v in values if v != usual}):
            who = [report["process"] for report, v in zip(reports, values, strict=True) if v == value]
            hosts = ", ".join(sorted({report["host"] for report in reports if report["process"] in who and "host" in report}))
            lines.append(f"  {_numbered(who)}{hosts and f' ({hosts})'}: {key} is {value}, elsewhere {usual}")
    return "\n".join([f"the {len(reports)} processes of this run differ:", *lines]) if lines else ""


def _flat(tree: Any, path: str = "") -> dict[str, str]:
    if isinstance(tree, Mapping) and tree:
        return {k: v for name, x in tree.items() for k, v in _flat(x, f"{path}.{name}".lstrip(".")).items()}
    return {path: json.dumps(tree)}


def _numbered(processes: Sequence[int]) -> str:
    if len(processes) > 16:
        return f"{len(processes)} processes ({processes[0]} … {processes[-1]})"
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
