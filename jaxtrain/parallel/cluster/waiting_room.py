"""The waiting room: supervisors that come while an attempt runs wait at the leader's address.

A host that was lost and returns waits here until the others take it back. One that differs from
them is refused by name. So is a second supervisor of a host that takes part.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxtrain.parallel.cluster import rendezvous
from jaxtrain.parallel.cluster.discover import Cluster
from jaxtrain.parallel.cluster.rendezvous import Rendezvous, RendezvousError, Verdict

log = logging.getLogger("jaxtrain")

POLL = 0.5  # [s]
LISTENING = 10.0  # [s] within which the port must be free
# [s] after which a member's number must be that of a second supervisor: the end of the first would
# have ended the attempt (`links.KEEPALIVE`)
SECOND = 20.0
SIGN_OF_LIFE = 30.0  # [s] between two messages to those that wait


class WaitingRoom:
    """A thread of the leading supervisor that receives others until `close`.

    Args:
      members: the numbers of the processes that take part in the attempt.
      facts: returns the facts of the leading process, with which those of the others are compared.
      on_arrival: gets number -> host of the waiting supervisors, again and again.
    """

    def __init__(
        self,
        membership: Cluster,
        *,
        job: str,
        facts: Callable[[], Mapping[str, Any]],
        secret: str,
        members: Collection[int],
        on_arrival: Callable[[dict[int, str]], None],
    ):
        self._closed = threading.Event()
        hello = rendezvous.hello_of(membership, job, {})
        room = _Room(hello, secret.encode(), facts, members, self._closed)
        work = room.receive(membership.coordinator, on_arrival)
        name = "waiting room"
        self._thread = threading.Thread(target=_run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the wait of all. They come again, to the rendezvous that follows."""
        self._closed.set()
        self._thread.join()


def _run(work: Any) -> None:
    try:
        asyncio.run(work)
    except RendezvousError as error:
        log.warning("no host can be taken back during this attempt: %s", error)


class _Room(Rendezvous):
    def __init__(
        self,
        hello: rendezvous.Message,
        secret: bytes,
        facts: Callable[[], Mapping[str, Any]],
        members: Collection[int],
        closed: threading.Event,
    ):
        super().__init__(hello, secret, timeout=LISTENING, leave=closed.is_set)
        self._facts = facts
        self._members = members
        self._closed = closed
        self._arrived: dict[int, float] = {}

    async def receive(self, coordinator: str, on_arrival: Callable[[dict[int, str]], None]) -> None:
        host, port = rendezvous.host_and_port(coordinator)
        async with self._listening(host, port, time.monotonic() + self._timeout):
            while not self._closed.is_set():
                await asyncio.sleep(POLL)
                await self._answer()
                waiting = {}
                for process, (message, _) in self._present.items():
                    if process not in self._members:
                        waiting[process] = str(message["host"])
                if waiting:
                    on_arrival(waiting)

    def _problem(self, message: Any) -> str:
        if problem := super()._problem(message):
            return problem
        mine = {**self._hello, "facts": self._facts()}
        return rendezvous.differences([mine, message])

    async def _answer(self) -> None:
        """Let supervisors wait on, and refuse second ones of members."""
        now = time.monotonic()
        for process in list(self._arrived):
            if process not in self._present:
                del self._arrived[process]
        for process, (message, line) in list(self._present.items()):
            if self._stopped == process:
                self._stopped = None
                del self._present[process]
                continue
            since = now - self._arrived.setdefault(process, now)
            verdict = None
            if process in self._members and since > SECOND:
                text = f"process {process} of this run takes part already; the one on"
                verdict = Verdict(f"{text} {message['host']} has the same number")
            elif since > SIGN_OF_LIFE:
                verdict = Verdict("", waits=True)
                self._arrived[process] = now
            if verdict:
                with contextlib.suppress(OSError):  # it has left
                    async with asyncio.timeout(rendezvous.REPLYING):
                        await line.send(verdict._asdict())
