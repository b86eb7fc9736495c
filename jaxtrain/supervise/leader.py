"""The supervisor that decides: the one that holds the lease of the workdir, at first process 0's.

With config.supervise.wait another one takes the lease once its holder has not answered for so long.
The lease has the address at which the others find it. So two supervisors never decide at once, even
if their hosts do not reach each other. One that returns follows the new leader.
"""

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from jaxtrain.parallel import lease as lease_lib
from jaxtrain.parallel.cluster import Cluster, rendezvous
from jaxtrain.parallel.lease import Lease
from jaxtrain.supervise import partners

PROBE = 0.5  # [s] for a leader to accept a connection


class SupersededError(Exception):
    """There is a leader, and this supervisor is not it."""


class Leader:
    """The leader as one supervisor knows it.

    Args:
      folders: those with a lease, the workdir first.
      job: the name of the run.
      changes: whether another supervisor may take the place of one that is lost.
    """

    def __init__(self, membership: Cluster, folders: list[str], job: str, *, changes: bool):
        self._membership = membership
        self._folders = folders
        self._job = job
        self._changes = changes and membership.processes > 1
        self.is_here = membership.process == 0 and self._process() == 0
        self._own_address = membership.coordinator if membership.process == 0 else ""

    def address(self) -> str:
        """Return the host:port at which the leader meets the others."""
        if self.is_here:
            return self._own_address
        return str(self._note().get("address", self._membership.coordinator))

    def _process(self) -> int:
        """Return the number of the process whose supervisor took the lease last."""
        return int(self._note().get("process", 0))

    def _note(self) -> dict[str, Any]:
        """Return the note in the lease, {} if it is not of this run."""
        if not self._changes:
            return {}
        note = lease_lib.note_in(self._folders[0])
        return note if note.get("job") == self._job else {}

    def make_lease(self, leave: Callable[[], Any]) -> Lease:
        """Return the lease that makes this supervisor the leader. ``leave`` as for `Lease`."""
        note = {
            "job": self._job,
            "process": self._membership.process,
            "address": self._own_address,
        }
        return Lease(self._folders, leave=leave, note=note)

    def succeed(self, enter: Callable[[Lease], None], leave: Callable[[], Any]) -> Lease | None:
        """Take the place of a leader that does not answer. None: there is one.

        ``enter`` enters the context of the lease.
        """
        lost, note = self.address(), self._note()

        def leave_or_follow() -> None:
            leave()
            if self._note() != note or _answers(lost):
                raise SupersededError

        try:
            self._own_address = self._own_address or self._find_own_address()
        except OSError:  # this host reaches no other one
            return None
        lease = self.make_lease(leave_or_follow)
        try:
            enter(lease)
        except (lease_lib.WorkdirError, SupersededError):
            return None
        self.is_here = True
        return lease

    def _find_own_address(self) -> str:
        """Return the address of this host on the way to process 0's, with the same port."""
        coordinator = self._membership.coordinator
        host = partners.own_host(coordinator)
        port = coordinator.rpartition(":")[2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError):
        host_and_port = rendezvous.host_and_port(address)
        socket.create_connection(host_and_port, PROBE).close()
        return True
    return False
