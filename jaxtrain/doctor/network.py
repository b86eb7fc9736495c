"""The network of a host and between hosts: the host's name, ports, clocks."""

import concurrent.futures
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.doctor.check import Check, fail, ok, warn
from jaxtrain.parallel.cluster import rendezvous

GROUP = "network"
NEIGHBOURS = 16  # hosts that each host connects to
CONNECTING = 5.0  # [s]
CLOCKS, CLOCKS_BROKEN = 2.0, 60.0  # [s] that two clocks may be apart


def host_name(*, several_hosts: bool) -> Check:
    """Check that this host's name leads to an address that others can use, as Gloo publishes it."""
    name, grade = socket.gethostname(), fail if several_hosts else warn
    remedy = f"add the address by which others reach this host to /etc/hosts: ADDRESS {name}"
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError as error:
        return grade(GROUP, "host name", f"{name} leads nowhere: {error}", remedy)
    text = f"{name} is {', '.join(sorted(found))}"
    if several_hosts and all(rendezvous.is_loopback(address) for address in found):
        text += ": collectives on CPUs would make other hosts connect to themselves"
        return fail(GROUP, "host name", text, remedy)
    return ok(GROUP, "host name", text)


def clocks(ahead: Mapping[int, float]) -> Iterator[tuple[int, Check]]:
    """Judge by how many seconds the clock of each process is ahead of process 0's."""
    remedy = "let all hosts follow a time server: chronyc tracking, timedatectl set-ntp true"
    for process, seconds in ahead.items():
        if abs(seconds) <= CLOCKS:
            yield process, ok(GROUP, "clocks", f"at most {CLOCKS:g} s apart")
            continue
        text = (
            f"the clock is {abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'}"
            " process 0's"
        )
        yield (
            process,
            (fail if abs(seconds) > CLOCKS_BROKEN else warn)(GROUP, "clocks", text, remedy),
        )


def ports(process: int, places: Sequence[Sequence[Any]]) -> Iterator[Check]:
    """Connect to the next `NEIGHBOURS` of ``places``, each (process, host, address, port)."""
    own = next((i for i, place in enumerate(places) if place[0] == process), len(places))
    others = [*places[own + 1 :], *places[:own]][:NEIGHBOURS] if own < len(places) else []
    remedy = "NCCL and Gloo use ports that the system picks: open all between the hosts of a job"
    with concurrent.futures.ThreadPoolExecutor(NEIGHBOURS) as pool:
        errors = list(pool.map(lambda place: _connect(*place[2:]), others))
    for (other, host, address, port), error in zip(others, errors, strict=True):
        if error:
            yield fail(
                GROUP,
                "ports",
                f"process {other} ({host}) cannot be reached at {address}:{port}: {error}",
                remedy,
            )
    if others and not any(errors):
        yield ok(
            GROUP,
            "ports",
            f"{len(others)} of {len(places) - 1} other hosts reached, at ports that they picked",
        )


def _connect(address: str, port: int) -> str:
    """Return the reason if nothing can be reached there, else ""."""
    try:
        socket.create_connection((address, port), timeout=CONNECTING).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def machine_id() -> str:
    """Name this machine, or a container with a network of its own."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = space = ""
    return f"{socket.gethostname()} {boot} {space}"
