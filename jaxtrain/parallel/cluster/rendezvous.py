"""The rendezvous before a run: process 0 checks that all processes are present and identical.

jax.distributed aborts without a name if a process is late. It ends with a segmentation fault if the
port is taken, and it lets two runs that share a port mix. So the processes meet here first, on the
same port, and each of these is an error that names the process and the reason.
After both ends have proven that they know the job's secret (`handshake`), a process sends one
message, and gets the verdict once the rendezvous is over:

    → {"job": "…", "process": 3, "processes": 4, "host": "node7", "clock": 1.7e9, "facts": {…}}
    ← {"error": "", "stopped": false}    all are present and agree; or the reason, the same for all

A process that a signal stops during the wait sends one more message, and the rendezvous ends for
all. Unauthenticated peers are bounded in number and time. They learn nothing, and cost the others a
retry at most.
"""

import asyncio
import contextlib
import errno
import ipaddress
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.parallel.cluster import handshake
from jaxtrain.parallel.cluster.handshake import HandshakeError, Line
from loaders.io.checks import UserError, flatten

MAX_UNAUTHENTICATED = 128  # peers that may be connected
PATIENCE = 10.0  # [s] for a peer to authenticate and to send its message
CONNECTING = 5.0  # [s] for a connection to process 0, and for its proof
POLL = 0.1  # [s]
Conclude = Callable[[Sequence[dict[str, Any]], str], Any]  # (messages, late) -> the conclusion
Leave = Callable[[], Any]


class RendezvousError(UserError, RuntimeError):
    """The processes did not all connect, or they differ."""


class Stopped(RendezvousError):
    """A process was asked to stop while it waited for the others."""


def await_peers(
    coordinator: str,
    *,
    process: int,
    processes: int,
    job: str,
    facts: Mapping[str, Any],
    timeout: float,
    leave: Leave = lambda: False,
    secret: str = "",
    refusal: str = "",
    awaited: Collection[int] | None = None,
    conclude: Conclude | None = None,
) -> Any:
    """Return once all processes have reported that they are present, with equal facts.

    With ``conclude`` the facts may differ. After ``timeout`` process 0 goes on with those present,
    and every one of them returns its conclusion.

    Args:
      coordinator: host:port, where process 0 listens.
      job: the same in all processes of this run, and in no other run.
      facts: nested dictionaries that must be equal in all processes.
      timeout: seconds within which all must have connected.
      leave: called repeatedly during the wait, which ends when it returns true.
      secret: the same in all processes of the job. If it is empty, every peer is admitted.
      refusal: the reason for which process 0 cannot begin. It becomes the error of all.
      awaited: the processes that process 0 waits for. By default all.
      conclude: called by process 0 with the messages of all present, its own first, and the names
        of those late, or "". Those of others have "ahead", the seconds by which the clock is ahead
        of process 0's, and "address", from which the process connected.

    Raises RendezvousError: ``refusal``, a taken port, processes that did not connect or differ, by
    number; Stopped: ``leave`` returned true, here or in another process.
    """
    hello = {
        "job": job,
        "process": process,
        "processes": processes,
        "host": socket.gethostname(),
        "facts": facts,
    }
    place, _, port = coordinator.rpartition(":")
    host, key = place.strip("[]"), secret.encode()

    def decide(messages: Sequence[dict[str, Any]], late: str) -> dict[str, Any]:
        if conclude:
            return {"error": "", "conclusion": conclude(messages, late)}
        return {"error": refusal or late or differences(messages)}

    if process == 0:
        others = set(range(processes) if awaited is None else awaited) - {0}
        verdict = asyncio.run(
            Rendezvous(hello, key, timeout, leave, others).hold(host, int(port), decide)
        )
    else:
        verdict = asyncio.run(_report(hello, host, int(port), key, timeout, leave))
    if verdict["error"]:
        raise (Stopped if verdict["stopped"] else RendezvousError)(verdict["error"])
    return verdict.get("conclusion")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a host of this name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.strip("[]").lower() == "localhost"


def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of ``host`` on this machine, where process 0 listens, [] = everywhere.

    [] if the name leads to no address of this machine, as that of a service in front of it, or to
    loopback, as a machine's own name does on some systems although others reach it by that name.
    """
    try:
        found = [
            str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
    except (socket.gaierror, UnicodeError):
        return []
    usable = (a for a in dict.fromkeys(found) if is_loopback(host) or not is_loopback(a))
    return [a for a in usable if _is_own(a)]


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


class Rendezvous:
    def __init__(
        self, hello: dict[str, Any], secret: bytes, timeout: float, leave: Leave, awaited: set[int]
    ):
        self._hello, self._secret, self._timeout = hello, secret, timeout
        self._leave, self._awaited = leave, awaited
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._present: dict[int, tuple[dict[str, Any], Line]] = {}
        self._stopped: int | None = None  # the process that was asked to stop
        self._tasks: set[asyncio.Task[None]] = set()

    async def hold(
        self, host: str, port: int, decide: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """Wait for all others, and reply to them with the verdict, which is returned."""
        deadline = time.monotonic() + self._timeout
        verdict = {"error": f"process 0 ({self._hello['host']}) has failed", "stopped": False}
        listeners = await _listen(host, port, min(deadline, time.monotonic() + 10), self._leave)
        for listener in listeners:
            self._start(self._accept(listener))
        try:
            verdict |= await self._wait(port, deadline, decide)
        finally:
            lines = [line for _, line in self._present.values()]
            await asyncio.gather(*(_reply(line, verdict) for line in lines))
            for task in self._tasks:
                task.cancel()
            for listener in listeners:
                listener.close()
        return verdict

    async def _wait(
        self, port: int, deadline: float, decide: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        hello, present, late = self._hello, self._present, ""
        while missing := sorted(self._awaited - set(present)):
            stopped = f"process 0 ({hello['host']})" if self._leave() else ""
            if self._stopped is not None:
                stopped = f"process {self._stopped}"
            if stopped:
                return {
                    "error": f"{stopped} was asked to stop while it waited for others",
                    "stopped": True,
                }
            if time.monotonic() > deadline:
                late = f"{_numbered(missing)} of {hello['processes']} did not connect to "
                late += f"{hello['host']}:{port} within {self._timeout:g} s"
                break
            await asyncio.sleep(POLL)
        return decide([hello, *(present[p][0] for p in sorted(present))], late)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections. If there are too many, the oldest unauthenticated peer makes way."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=connection)
            except OSError:  # no file descriptor is left, or the peer has gone
                self._drop_oldest()
                await asyncio.sleep(0.05)
                continue
            self._unauthenticated[writer] = None
            self._start(self._serve(reader, writer))
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self._unauthenticated:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Admit a process by its first message until its connection ends. A second says stop."""
        process = None
        try:
            async with asyncio.timeout(PATIENCE):
                line = await handshake.admit(reader, writer, self._secret)
                message = await line.receive()
            if problem := self._problem(message):
                await line.send({"error": problem, "stopped": False})
                return
            process = message["process"]
            message["ahead"] = message["clock"] - time.time()
            message["address"] = writer.get_extra_info("peername")[0].removeprefix("::ffff:")
            self._present[process] = message, line
            self._unauthenticated.pop(writer, None)
            await line.receive()
            self._stopped = process
        except OSError:
            if process is not None:
                del self._present[process]
        finally:
            self._unauthenticated.pop(writer, None)
            writer.close()

    def _problem(self, other: Any) -> str:
        hello, present = self._hello, self._present
        kinds = {
            "job": str,
            "process": int,
            "processes": int,
            "host": str,
            "clock": float,
            "facts": dict,
        }
        # Exactly these: True, 0.5 and 1.0 are not the number of a process.
        if type(other) is not dict or any(
            type(other.get(n)) is not kind for n, kind in kinds.items()
        ):
            return "this was not a process of a run"
        own, number, name = f"process 0 ({hello['host']})", other["process"], other["host"]
        if other["job"] != hello["job"]:
            return f"another run's {own} listens here: {hello['job']}, not {other['job']}"
        if other["processes"] != hello["processes"]:
            run = f"belongs to a run of {other['processes']} processes"
            return f"process {number} ({name}) {run}, and {own} to one of {hello['processes']}"
        if number in present or not 0 < number < hello["processes"]:
            first = present[number][0]["host"] if number in present else hello["host"]
            return f"two processes have the number {number}: one on {first}, one on {name}"
        return ""


async def _listen(host: str, port: int, deadline: float, leave: Leave) -> list[socket.socket]:
    """Open the port for this process alone: gRPC would share it with another run."""
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
                    f"process 0 ({socket.gethostname()}) cannot listen on port {port}:"
                    f" {error.strerror}. If another run uses it, choose another port"
                ) from error
        await asyncio.sleep(0.5)


def sockets(places: Sequence[str], port: int) -> Iterator[socket.socket]:
    """Listen at each of ``places``, or on every interface if there are none. Raises OSError."""
    # With SO_REUSEADDR, which create_server sets, another listener is still an error.
    for place in places:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        yield socket.create_server((place, port), family=family, backlog=1024)
    if not places:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        yield socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)


async def _reply(line: Line, verdict: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has left; the others still get their reply
        async with asyncio.timeout(5):
            await line.send(verdict)
            line.writer.close()
            await line.writer.wait_closed()


async def _report(
    hello: dict[str, Any], host: str, port: int, secret: bytes, timeout: float, leave: Leave
) -> dict[str, Any]:
    """Report to process 0, as any other process, and return its verdict."""
    name, last = f"process {hello['process']} ({hello['host']})", OSError("no answer")
    deadline = time.monotonic() + timeout
    while not leave():
        if time.monotonic() > deadline:
            reason = last.strerror or str(last) or type(last).__name__
            text = f"{name} found no process 0 at {host}:{port} within {timeout:g} s: {reason}"
            raise RendezvousError(text) from last
        try:
            connection = await asyncio.to_thread(socket.create_connection, (host, port), CONNECTING)
            connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=connection)
            with contextlib.closing(writer):
                async with asyncio.timeout(CONNECTING):
                    line = await handshake.prove(reader, writer, secret)
                    await line.send(hello | {"clock": time.time()})
                # Process 0 names those late. It may have begun to wait later than this process.
                if verdict := await _verdict(line, deadline + 10, leave):
                    return verdict
                if leave():
                    break
                text = f"{name} waited for the others, and process 0 no longer answers"
                return {"error": text, "stopped": False}
        except OSError as error:  # a failed handshake says more than a later refused connection
            last = last if isinstance(last, HandshakeError) else error
        await asyncio.sleep(0.3)
    return {"error": f"{name} was asked to stop while it waited for others", "stopped": True}


async def _verdict(line: Line, deadline: float, leave: Leave) -> dict[str, Any] | None:
    """Wait for the verdict. None if the time is up, or this process leaves, which it reports."""
    answer: asyncio.Task[dict[str, Any]] = asyncio.ensure_future(line.receive())
    while time.monotonic() < deadline:
        if leave():
            answer.cancel()
            await line.send("stop")
            return None
        if (await asyncio.wait([answer], timeout=POLL))[0]:
            return answer.result()
    answer.cancel()
    return None


def differences(reports: Sequence[Mapping[str, Any]]) -> str:
    """List the processes that differ from most others, and in which facts. Else return ""."""
    flat = [
        {key: json.dumps(value) for key, value in flatten(report["facts"]).items()}
        for report in reports
    ]
    lines = []
    for key in sorted({key for f in flat for key in f}):
        values = [f.get(key, "nothing") for f in flat]
        usual = Counter(values).most_common(1)[0][0]  # the first of equals is process 0's
        for value in sorted({v for v in values if v != usual}):
            those = [
                report["process"] for report, v in zip(reports, values, strict=True) if v == value
            ]
            hosts = ", ".join(
                sorted(
                    {
                        report["host"]
                        for report in reports
                        if report["process"] in those and "host" in report
                    }
                )
            )
            lines.append(
                f"  {_numbered(those)}{hosts and f' ({hosts})'}: {key} is {value}, elsewhere"
                f" {usual}"
            )
    return "\n".join([f"the {len(reports)} processes of this run differ:", *lines]) if lines else ""


def _numbered(processes: Sequence[int]) -> str:
    if len(processes) > 16:
        return f"{len(processes)} processes ({processes[0]} … {processes[-1]})"
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
