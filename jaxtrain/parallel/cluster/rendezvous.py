"""The rendezvous before a run: process 0 checks that all processes are present and identical.

jax.distributed aborts without a name if a process is late. It ends with a segmentation fault if the
port is taken, and it lets two runs that share a port mix. So the processes meet here first, on the
same port, and each of these is an error that names the process and the reason.
After both ends have proven that they know the job's secret (`handshake`), a process sends one
message, and gets the verdict once the rendezvous is over:

    → {"job": "…", "process": 3, "processes": 4, "host": "node7", "facts": {…}}
    ← {"error": "", "stopped": false}    all are present and agree; or the reason, the same for all

Supervisors (`jaxtrain.supervise`) also send a report, and get the decision of process 0 about
all reports. It may decide to begin without the missing processes.

If the run begins, the connections stay open until its end, and show when a process dies (`links`).

A process that a signal stops during the wait sends one more message, and the rendezvous ends for
all. Unauthenticated peers are bounded in number and time. They learn nothing, and cost the others a
retry at most.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.parallel.cluster import addresses, handshake
from jaxtrain.parallel.cluster.discover import Cluster
from jaxtrain.parallel.cluster.handshake import HandshakeError, Line
from jaxtrain.parallel.cluster.links import Peer, notice_vanished_host
from loaders.io import machine
from loaders.io.checks import UserError, flatten

MAX_UNAUTHENTICATED = 128  # peers that may be connected, and one for each process of the run
REPLIES = 64  # at once: a connection that stays open takes two files for a moment
PATIENCE = 10.0  # [s] for a peer to authenticate and to send its message
CONNECTING = 5.0  # [s] for a connection to process 0, and for its proof
REPLYING = 5.0  # [s] for a verdict to be sent
POLL = 0.1  # [s]
OWN_FILES = 1000  # of process 0 without its connections: shards, checkpoints, devices
FEW_FILES = 24  # that it has open before the run, at least
MAX_NAMED = 16  # processes that a message lists by number
# The fields of a message. Exactly these types: True, 0.5 and 1.0 are not the number of a process.
FIELDS = {"job": str, "process": int, "processes": int, "host": str, "facts": dict}
Leave = Callable[[], Any]
Message = dict[str, Any]


class RendezvousError(UserError, RuntimeError):
    """The processes did not all connect, or they differ."""


class UnreachableError(RendezvousError):
    """Nothing answers at the address of process 0."""


class Stopped(RendezvousError):
    """A process was asked to stop while it waited for the others."""


class Verdict(NamedTuple):
    """The end of a rendezvous, the same for all processes."""

    error: str  # "" if all are present and agree
    stopped: bool = False
    decision: Any = None  # by process 0's `Vote`
    waits: bool = False  # it is not the end yet: the process is to wait on (`waiting_room`)


class Outcome(NamedTuple):
    """The verdict, and the connections that stay open if all are present and agree."""

    verdict: Verdict
    peers: list[Peer]


class Vote(NamedTuple):
    """A decision by process 0 about reports of processes, once they are present and agree."""

    report: Any = None  # of this process, as JSON
    decide: Callable[[Mapping[int, Any]], Any] = len  # of process -> report; process 0 calls it
    # Why the present ones do not begin without the others, by their reports and the seconds of the
    # wait, or "". Without it all are needed.
    objection: Callable[[Mapping[int, Any], float], str] | None = None
    leads: bool | None = None  # this process takes process 0's part; None = if it is process 0
    # host:port of the process that leads, if that may change; the membership's by default
    where: Callable[[], str] | None = None
    patience: float | None = None  # [s] until the leader is unreachable; the timeout by default


def await_peers(
    membership: Cluster,
    *,
    job: str,
    facts: Mapping[str, Any],
    timeout: float,
    leave: Leave = lambda: False,
    secret: str = "",
    refusal: str = "",
) -> list[Peer]:
    """Return once all processes have reported that they are present, with equal facts.

    The connections stay open and are returned: to every other process in process 0, and to
    process 0 in the others (`links.Links`). The arguments and errors are those of `vote`.
    """
    outcome = vote(
        membership,
        Vote(),
        job=job,
        facts=facts,
        timeout=timeout,
        leave=leave,
        secret=secret,
        refusal=refusal,
    )
    return outcome.peers


def vote(
    membership: Cluster,
    ballot: Vote,
    *,
    job: str,
    facts: Mapping[str, Any],
    timeout: float,
    leave: Leave = lambda: False,
    secret: str = "",
    refusal: str = "",
) -> Outcome:
    """Return the decision about all processes' reports, and the connections, as `await_peers`.

    Args:
      membership: the place of this process. Process 0 listens at the coordinator's address.
      job: the same in all processes of this run, and in no other run.
      facts: nested dictionaries that must be equal in all processes.
      timeout: seconds within which all must have connected.
      leave: called repeatedly during the wait, which ends when it returns true.
      secret: the same in all processes of the job. If it is empty, every peer is admitted.
      refusal: the reason for which process 0 cannot begin. It becomes the error of all.

    Raises RendezvousError: ``refusal``, a taken port, processes that did not connect or differ, by
    number; Stopped: ``leave`` returned true, here or in another process.
    """
    hello = hello_of(membership, job, facts) | {"report": ballot.report}
    key = secret.encode()
    work: Coroutine[Any, Any, Outcome]
    leads = membership.process == 0 if ballot.leads is None else ballot.leads
    if leads:
        rendezvous = Rendezvous(hello, key, timeout, leave, refusal, ballot)
        work = rendezvous.hold(membership.coordinator)
    else:
        where = ballot.where or (lambda: membership.coordinator)
        patience = timeout if ballot.patience is None else ballot.patience
        work = _report(hello, where, key, _Patience(patience, timeout), leave)
    outcome = asyncio.run(work)
    verdict = outcome.verdict
    if verdict.stopped:
        raise Stopped(verdict.error)
    if verdict.error:
        raise RendezvousError(verdict.error)
    return outcome


def hello_of(membership: Cluster, job: str, facts: Mapping[str, Any]) -> Message:
    """Return the first message of a process."""
    return {
        "job": job,
        "process": membership.process,
        "processes": membership.processes,
        "host": socket.gethostname(),
        "facts": facts,
    }


def host_and_port(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


class Rendezvous:
    """The rendezvous at process 0, which waits for all others."""

    def __init__(
        self,
        hello: Message,
        secret: bytes,
        timeout: float,
        leave: Leave,
        refusal: str = "",
        ballot: Vote | None = None,
    ):
        self._hello = hello
        self._ballot = ballot or Vote()
        self._secret = secret
        self._timeout = timeout
        self._leave = leave
        self._refusal = refusal
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._present: dict[int, tuple[Message, Line]] = {}
        self._stopped: int | None = None  # the process that was asked to stop
        self._tasks: set[asyncio.Task[None]] = set()

    async def hold(self, coordinator: str) -> Outcome:
        """Wait for all others, and reply to them with the verdict, which is returned."""
        host, port = host_and_port(coordinator)
        _allow_connections(self._hello["processes"])
        deadline = time.monotonic() + self._timeout
        own = self._hello["process"]
        verdict = Verdict(f"process {own} ({self._hello['host']}) has failed")
        peers = []
        async with self._listening(host, port, min(deadline, time.monotonic() + 10)):
            try:
                verdict = await self._wait(port, deadline)
            finally:
                at_once = asyncio.Semaphore(REPLIES)
                replies = [_reply(*present, verdict, at_once) for present in self._present.values()]
                for peer in await asyncio.gather(*replies):
                    peers += [peer] if peer else []
        return Outcome(verdict, peers)

    @contextlib.asynccontextmanager
    async def _listening(self, host: str, port: int, deadline: float) -> AsyncIterator[None]:
        try:
            listeners = await _listen(host, port, deadline, self._leave)
        except RendezvousError as error:
            if self._refusal:  # the run that has the workdir may listen there
                raise RendezvousError(self._refusal) from error
            raise
        for listener in listeners:
            self._start(self._accept(listener))
        try:
            yield
        finally:
            for listener in listeners:
                listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, port: int, deadline: float) -> Verdict:
        host = self._hello["host"]
        processes = self._hello["processes"]
        own = self._hello["process"]
        others = set(range(processes)) - {own}
        began = time.monotonic()
        while missing := sorted(others - set(self._present)):
            stopped = f"process {self._stopped}" if self._stopped is not None else ""
            if not stopped and self._leave():
                stopped = f"process {own} ({host})"
            if stopped:
                text = f"{stopped} was asked to stop while it waited for others"
                return Verdict(text, stopped=True)
            if time.monotonic() > deadline:
                late = f"{_numbered(missing)} of {processes} did not connect to {host}:{port}"
                late = f"{late} within {self._timeout:g} s"
                if objection := self._objection(time.monotonic() - began):
                    late = f"{late}, and the others do not go on alone: {objection}"
                return Verdict(self._refusal or late)
            if self._objection(time.monotonic() - began) == "":
                break
            await asyncio.sleep(POLL)
        messages = self._messages()
        if problem := self._refusal or differences(list(messages.values())):
            return Verdict(problem)
        return Verdict("", decision=self._ballot.decide(_reports(messages)))

    def _messages(self) -> dict[int, Message]:
        others = {process: message for process, (message, _) in self._present.items()}
        return dict(sorted({**others, self._hello["process"]: self._hello}.items()))

    def _objection(self, seconds: float) -> str | None:
        """Return why those present do not begin without the others. None: all are needed."""
        if not self._ballot.objection:
            return None
        return self._ballot.objection(_reports(self._messages()), seconds)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds no reference
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections. If there are too many, the oldest unauthenticated peer makes way."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                notice_vanished_host(connection)  # its successor could not join
                reader, writer = await asyncio.open_connection(sock=connection)
            except OSError:  # no file descriptor is left, or the peer has gone
                self._drop_oldest()
                await asyncio.sleep(0.05)
                continue
            self._unauthenticated[writer] = None
            self._start(self._serve(reader, writer))
            # All processes of a run may come at once. One that makes way has to come again.
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED + self._hello["processes"]:
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
                await line.send(Verdict(problem)._asdict())
                return
            process = message["process"]
            self._present[process] = message, line
            self._unauthenticated.pop(writer, None)
            await line.receive()
            self._stopped = process
        except OSError:
            if process is not None:
                self._present.pop(process, None)
        finally:
            self._unauthenticated.pop(writer, None)
            writer.close()

    def _problem(self, message: Any) -> str:
        """Return the reason for which a process cannot join, or ""."""
        if not _is_hello(message):
            return "this was not a process of a run"
        hello = self._hello
        process_0 = f"process {hello['process']} ({hello['host']})"
        number, host = message["process"], message["host"]
        if message["job"] != hello["job"]:
            jobs = f"{hello['job']}, not {message['job']}"
            return f"another run's {process_0} listens here: {jobs}"
        if message["processes"] != hello["processes"]:
            run = f"belongs to a run of {message['processes']} processes"
            return (
                f"process {number} ({host}) {run}, and {process_0} to one of {hello['processes']}"
            )
        is_own = number == hello["process"]
        if number in self._present or is_own or not 0 <= number < hello["processes"]:
            first, _ = self._present.get(number, (hello, None))
            hosts = f"one on {first['host']}, one on {host}"
            return f"two processes have the number {number}: {hosts}"
        return ""


def files_of_leader(processes: int) -> int:
    """Return how many files process 0 opens at least, to hold a connection to each other one."""
    return processes + min(processes, REPLIES) + FEW_FILES


def _allow_connections(processes: int) -> None:
    """Let process 0 open a connection to each other process. Raises RendezvousError."""
    needs = files_of_leader(processes)
    allowed = machine.allow_open_files(OWN_FILES + processes)
    if allowed != machine.UNLIMITED and allowed < needs:
        raise RendezvousError(
            f"process 0 ({socket.gethostname()}) may open {allowed} files at once, and needs"
            f" {needs} for connections to {processes - 1} others. Run ulimit -n"
            f" {OWN_FILES + processes} before the launcher's command"
        )


def _reports(messages: Mapping[int, Message]) -> dict[int, Any]:
    return {process: message.get("report") for process, message in messages.items()}


def _is_hello(message: Any) -> bool:
    if type(message) is not dict:
        return False
    return all(type(message.get(name)) is kind for name, kind in FIELDS.items())


async def _listen(host: str, port: int, deadline: float, leave: Leave) -> list[socket.socket]:
    """Open the port for this process alone: gRPC would share it with another run."""
    while True:
        listeners: list[socket.socket] = []
        try:
            for listener in addresses.listeners(addresses.on_this_machine(host, port), port):
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


async def _reply(
    hello: Message, line: Line, verdict: Verdict, at_once: asyncio.Semaphore
) -> Peer | None:
    """Send the verdict to a process. Return it if the run begins, and it is still there."""
    peer = None
    with contextlib.suppress(OSError):  # it has left; the others still get their reply
        async with at_once, asyncio.timeout(REPLYING):
            await line.send(verdict._asdict())
            if not verdict.error:
                peer = Peer(hello["process"], hello["host"], line.connection())
            line.writer.close()
            await line.writer.wait_closed()
    return peer


class _Patience(NamedTuple):
    connecting: float  # [s] to a process 0 that does not answer
    verdict: float  # [s]


async def _report(
    hello: Message,
    where: Callable[[], str],
    secret: bytes,
    patience: _Patience,
    leave: Leave,
) -> Outcome:
    """Report to process 0, as any other process, and return its verdict."""
    timeout = patience.connecting
    name = f"process {hello['process']} ({hello['host']})"
    last_error = OSError("no answer")
    deadline = time.monotonic() + timeout
    while not leave():
        host, port = host_and_port(where())
        if time.monotonic() > deadline:
            reason = last_error.strerror or str(last_error) or type(last_error).__name__
            text = f"{name} found no process 0 at {host}:{port} within {timeout:g} s: {reason}"
            raise UnreachableError(text) from last_error
        try:
            reader, writer = await _connect(host, port)
            with contextlib.closing(writer):
                async with asyncio.timeout(CONNECTING):
                    line = await handshake.prove(reader, writer, secret)
                    await line.send(hello)
                # Process 0 names those late. It may have begun to wait later than this process.
                if verdict := await _verdict(line, patience.verdict + 10, leave):
                    peers = [] if verdict.error else [Peer(0, host, line.connection())]
                    return Outcome(verdict, peers)
                if leave():
                    break
                text = f"{name} waited for the others, and process 0 no longer answers"
                return Outcome(Verdict(text), [])
        except OSError as error:
            # A failed handshake says more than a later refused connection.
            if not isinstance(last_error, HandshakeError):
                last_error = error
        await asyncio.sleep(0.3)
    text = f"{name} was asked to stop while it waited for others"
    return Outcome(Verdict(text, stopped=True), [])


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = await asyncio.to_thread(socket.create_connection, (host, port), CONNECTING)
    connection.setblocking(False)
    return await asyncio.open_connection(sock=connection)


async def _verdict(line: Line, timeout: float, leave: Leave) -> Verdict | None:
    """Wait for the verdict. None if the time is up, or this process leaves, which it reports."""
    answer: asyncio.Task[Message] = asyncio.ensure_future(line.receive())
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if leave():
            answer.cancel()
            await line.send("stop")
            return None
        finished, _ = await asyncio.wait([answer], timeout=POLL)
        if finished:
            verdict = Verdict(**answer.result())
            if not verdict.waits:
                return verdict
            answer = asyncio.ensure_future(line.receive())
            deadline = time.monotonic() + timeout
    answer.cancel()
    return None


def differences(reports: Sequence[Mapping[str, Any]]) -> str:
    """List the processes that differ from most others, and in which facts. Else return ""."""
    facts = [_flat(report["facts"]) for report in reports]
    lines = []
    for key in sorted(set().union(*facts)):
        values = [facts_of_one.get(key, "nothing") for facts_of_one in facts]
        usual, _ = Counter(values).most_common(1)[0]  # the first of equals is process 0's
        for value in sorted(set(values) - {usual}):
            odd = [report for report, v in zip(reports, values, strict=True) if v == value]
            lines.append(f"  {_named(odd)}: {key} is {value}, elsewhere {usual}")
    if not lines:
        return ""
    return "\n".join([f"the {len(reports)} processes of this run differ:", *lines])


def _flat(facts: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in flatten(facts).items()}


def _named(reports: Sequence[Mapping[str, Any]]) -> str:
    numbers = _numbered([report["process"] for report in reports])
    hosts = sorted({report["host"] for report in reports if "host" in report})
    return f"{numbers} ({', '.join(hosts)})" if hosts else numbers


def _numbered(processes: Sequence[int]) -> str:
    if len(processes) > MAX_NAMED:
        return f"{len(processes)} processes ({processes[0]} … {processes[-1]})"
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {', '.join(map(str, processes))}"
