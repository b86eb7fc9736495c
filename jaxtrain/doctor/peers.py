"""The rendezvous of a doctor's processes, on the coordinator's port and with the job's secret.

There are three, each a `jaxtrain.parallel.cluster.rendezvous` of processes that may differ:

    the presence             which clocks differ, and whether there are several machines
    the findings of each     process 0 compares them, and assigns the checks of each other
    the check of each other  of ports and files. All processes learn whether anything failed
"""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.doctor import network, software
from jaxtrain.doctor.check import FAIL, Check, fail, from_json, ok
from jaxtrain.parallel.cluster import Cluster, RendezvousError, discover, rendezvous
from jaxtrain.parallel.cluster.handshake import HandshakeError

Messages = Sequence[dict[str, Any]]
Conclude = Callable[[Messages], Any]


class Peers:
    """The rendezvous of a process. Process 0 alone calls `met`, `found`, `saw`, has findings."""

    def __init__(self, membership: Cluster, *, wait: float):
        """Hold the first. Raises RendezvousError, or ClusterError if there is no secret."""
        self.process, self._membership = membership.process, membership
        self._secret = discover.secret_of(os.environ, membership.coordinator)
        self._present: Sequence[int] = range(membership.processes)
        self._late: list[str] = []
        self.checks: list[tuple[int, Check]] = []
        self.hosts: dict[int, str] = {}
        self.token, self.several = self.hold(
            "the presence", {"machine": network.machine_id()}, self.met, wait
        )

    def hold(self, subject: str, facts: Any, conclude: Conclude, within: float) -> Any:
        """Return process 0's conclusion from the facts of all present. Raises RendezvousError."""

        def concluded(messages: Messages, late: str) -> Any:
            self._present = [message["process"] for message in messages]
            self._late += [late] if late else []
            for message in messages:
                checks = [from_json(check) for check in message["facts"].get("checks", [])]
                self.checks += [(message["process"], check) for check in checks]
            return conclude(messages)

        member = self._membership
        return rendezvous.await_peers(
            member.coordinator,
            process=member.process,
            processes=member.processes,
            job=f"the doctor of {member.job or 'a job'}, {subject}",
            facts=facts,
            timeout=within,
            secret=self._secret,
            awaited=self._present,
            conclude=concluded,
        )

    def met(self, messages: Messages) -> tuple[str, bool]:
        """Conclude a token and whether there are several machines, of {"machine": machine_id}."""
        self.hosts = {message["process"]: message["host"] for message in messages}
        self.checks += network.clocks({m["process"]: m.get("ahead", 0.0) for m in messages})
        return secrets.token_hex(8), len({message["facts"]["machine"] for message in messages}) > 1

    def found(self, messages: Messages) -> dict[str, Any]:
        """Conclude the ports and folders to check, of {"machine", "port", "folder", "facts", …}."""
        reports = [message | {"facts": message["facts"]["facts"]} for message in messages]
        self.checks += [(0, check) for check in software.compare(reports)]
        places: dict[str, Any] = {}  # of the first process of each machine
        for m in messages:
            address = m.get("address", self._membership.coordinator.rpartition(":")[0].strip("[]"))
            place = (m["process"], m["host"], address, m["facts"]["port"])
            places.setdefault(m["facts"]["machine"], place)
        folders = {message["process"]: message["facts"]["folder"] for message in messages}
        shared = [p for p, folder in folders.items() if folder and folder == folders[0]]
        return {"places": list(places.values()), "shared": shared}

    def saw(self, messages: Messages) -> bool:
        """Conclude whether nothing failed, of {"checks"}."""
        member = self._membership
        for late in self._late:
            remedy = f"start it; each that cannot reach {member.coordinator} prints why"
            self.checks.append((0, fail("processes", "present", late, remedy)))
        if not self._late:
            text = f"all {member.processes} processes met at {member.coordinator}"
            self.checks.append((0, ok("processes", "present", f"{text} ({member.launcher})")))
        return all(check.verdict != FAIL for _, check in self.checks)


def unmet(error: RendezvousError, membership: Cluster) -> Check:
    """Make the finding of a process that could not meet the others."""
    host, _, port = membership.coordinator.rpartition(":")
    cause = error.__cause__
    remedy = (
        f"start process 0 on {host}, or correct JAXTRAIN_COORDINATOR, the route to {host} (ip route"
        f" get {host}), "
    )
    remedy += f"or the firewall for port {port}"
    if membership.process == 0:
        remedy = f"see the process there: ss -ltnp sport = :{port}; end it, or choose another port"
    elif isinstance(cause, socket.gaierror):
        remedy = f"the name {host} is unknown here: correct DNS or /etc/hosts, or use an address"
    elif isinstance(cause, HandshakeError):
        remedy = "set one JAXTRAIN_SECRET in all processes, or choose another port"
    elif not isinstance(cause, OSError):
        remedy = "give every job a port of its own, and every process its number"
    return fail("processes", "rendezvous", str(error), remedy)
