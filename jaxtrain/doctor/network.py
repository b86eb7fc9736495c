"""The network between the hosts: names, interfaces, who has the coordinator's port; latency, bandwidth and clocks.

Each host listens at a port that the system picks, as NCCL and Gloo do, and every other one connects to it. Hosts take turns,
so that no measurement disturbs another; of many hosts each measures some others (`rounds`).
"""

import contextlib
import fcntl
import hmac
import os
import pathlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.doctor.check import Check, fail, ok, warn
from jaxtrain.parallel.cluster import rendezvous

GROUP = "network"
TOKEN = 32  # [bytes]
PINGS = 50
PINGING = 5.0  # [s] at most
SENDING = 0.5  # [s]
MOST_ROUNDS = 8
SLOW, FAR = 20e6, 0.020  # [bytes/s], [s]: below or above it, steps wait for each other
CLOCKS, CLOCKS_BROKEN = 2.0, 60.0  # [s] that two hosts' clocks may be apart
SIOCGIFADDR = 0x8915


class Link(NamedTuple):
    """What one host measured to another."""

    latency: float  # [s] there and back, the least
    rate: float  # [bytes/s] of one TCP connection
    ahead: float  # [s] that the other's clock is ahead


class Listener:
    """Answers those who know the token, until it is closed."""

    def __init__(self, address: str, token: bytes, *, clock: Callable[[], float] = time.time):
        self._token, self._clock = token, clock
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, name="doctor", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError, struct.error):
                    connection.settimeout(10)
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        head = _exactly(connection, TOKEN + 1)
        if not hmac.compare_digest(head[:TOKEN], self._token):
            return
        if head[TOKEN:] == b"p":
            for _ in range(PINGS):
                _exactly(connection, 1)
                connection.sendall(struct.pack("!d", self._clock()))
            return
        received, until = 0, time.monotonic() + 20 * SENDING
        while time.monotonic() < until and (data := connection.recv(1 << 18)):
            received += len(data)
        connection.sendall(struct.pack("!q", received))


def measure(address: str, port: int, token: bytes) -> Link:
    """Connects to another host's `Listener`. Raises OSError."""
    with socket.create_connection((address, port), timeout=5) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token + b"p")
        best, until = (float("inf"), 0.0), time.monotonic() + PINGING
        for _ in range(PINGS):
            began, wall = time.perf_counter(), time.time()
            connection.sendall(b".")
            there = struct.unpack("!d", _exactly(connection, 8))[0]
            took = time.perf_counter() - began
            best = min(best, (took, there - (wall + took / 2)))
            if time.monotonic() > until:
                break
    with socket.create_connection((address, port), timeout=5) as connection:
        connection.settimeout(20 * SENDING)
        connection.sendall(token + b"s")
        data, began = b"\0" * (1 << 18), time.perf_counter()
        while time.perf_counter() < began + SENDING:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = struct.unpack("!q", _exactly(connection, 8))[0]
        return Link(best[0], received / (time.perf_counter() - began), best[1])


def rounds(stations: Sequence[int], most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Who connects to whom, round by round: in each, a station is in one pair at most. At most ``most`` rounds.

    The circle method: of n stations, every ordered pair comes in 2 (n - 1) rounds, n rounded up to be even.
    """
    ring: list[int | None] = [*stations, *([None] if len(stations) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = [(a, b) for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a is not None and b is not None]
        found += [pairs, [(b, a) for a, b in pairs]]
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found[:most]


def measured(stations: int, rounds: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Check]:
    """How many of the pairs of hosts were measured, where that is not all of them. ``stations``: how many hosts measure."""
    pairs, done = stations * (stations - 1), sum(map(len, rounds))
    if done < pairs:
        text = f"{done:,} of the {pairs:,} links between {stations} hosts are measured (each way is one)"
        yield ok(GROUP, "links", text)


def judge(who: str, link: Link) -> Iterator[Check]:
    """The findings of one measurement. ``who``: from where to where."""
    text = f"{who}: {1e3 * link.latency:.3g} ms, {link.rate / 1e6:,.0f} MB/s over one TCP connection"
    if link.rate < SLOW or link.latency > FAR:
        remedy = "see which interface is taken (ip route get ADDRESS), its speed (ethtool), and who else uses it"
        yield warn(GROUP, "link", f"{text}; expected at least {SLOW / 1e6:g} MB/s, at most {1e3 * FAR:g} ms", remedy)
    else:
        yield ok(GROUP, "link", text)
    if abs(link.ahead) > CLOCKS:
        judged = fail if abs(link.ahead) > CLOCKS_BROKEN else warn
        way = "ahead" if link.ahead > 0 else "behind"
        text = f"{who}: the other's clock is {abs(link.ahead):,.1f} s {way}"
        yield judged(GROUP, "clocks", text, "let both follow a time server: chronyc tracking, timedatectl set-ntp true")
    else:
        yield ok(GROUP, "clocks", f"{who}: {abs(link.ahead):.3f} s apart; at most {CLOCKS:g} s are well")


def unreached(who: str, address: str, port: int, error: OSError) -> Check:
    """A host that cannot be connected to at a port that the system picked."""
    text = f"{who}: {address}:{port} cannot be reached: {error.strerror or error}"
    remedy = "NCCL and Gloo use ports that the system picks: open all ports between the hosts of a job in the firewall"
    return fail(GROUP, "link", text, remedy)


def names(*, several_hosts: bool, resolve: Callable[[str], list[str]] | None = None) -> Iterator[Check]:
    """Whether this host's own name leads to an address that others could use: Gloo publishes what it resolves to."""
    name = socket.gethostname()
    found = _within(5.0, lambda: (resolve or resolved)(name))
    remedy = f"add the address by which others reach this host to /etc/hosts: ADDRESS {name}"
    if isinstance(found, Exception):
        judged = fail if several_hosts else warn
        yield judged(GROUP, "host name", f"{name} leads nowhere: {found}", remedy)
        return
    text = f"{name} is {', '.join(found)}"
    if several_hosts and all(rendezvous.is_loopback(address) for address in found):
        text += ": collectives on CPUs would tell other hosts to connect to themselves"
        yield fail(GROUP, "host name", text, remedy)
        return
    back = _within(5.0, lambda: socket.gethostbyaddr(found[0])[0])
    if isinstance(back, Exception):
        text, remedy = f"{text}, and no name belongs to that address", f"add it to DNS, or to /etc/hosts: {found[0]} {name}"
    elif back.split(".")[0].lower() != name.split(".")[0].lower():
        text, remedy = f"{text}, and that address is {back}", "correct DNS, or /etc/hosts on all hosts"
    else:
        yield ok(GROUP, "host name", text)
        return
    if several_hosts:
        yield warn(GROUP, "host name", text, remedy)
    else:
        yield ok(GROUP, "host name", f"{text}; that matters only to a job on several hosts")


def resolved(name: str) -> list[str]:
    """The addresses of a name. Raises OSError."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


def interfaces(environment: Mapping[str, str], address: str) -> Iterator[Check]:
    """What NCCL_SOCKET_IFNAME chooses; ``address``: of this host, by which others reach it.

    Collectives on CPUs go by the address that the host's name leads to (`names`): JAX's Gloo reads no such variable.
    """
    there, variable = addresses(), "NCCL_SOCKET_IFNAME"
    used = next((name for name, found in there.items() if found and found == address), "")
    given = environment.get(variable, "")
    chosen = _chosen(given, list(there)) if given else []
    remedy = f"unset it, or name one of {', '.join(name for name in there if name != 'lo') or 'lo'}"
    if not given:
        yield ok(GROUP, variable, "not set: NCCL chooses among all interfaces, InfiniBand first")
    elif not chosen:
        yield fail(GROUP, variable, f"{given!r} names no interface of this host", remedy)
    elif all(_is_down(name) for name in chosen):
        yield fail(GROUP, variable, f"{', '.join(chosen)} is down", f"ip link set {chosen[0]} up, or {remedy}")
    elif used and used not in chosen and used != "lo":
        text = f"it chooses {', '.join(chosen)}, and the coordinator is reached by {used}"
        yield warn(GROUP, variable, text, f"unset it, or set it to {used} if both hosts are in that network alone")
    else:
        yield ok(GROUP, variable, f"it chooses {', '.join(chosen)}")
    if used and address:
        yield ok(GROUP, "interface", f"others reach this host at {address}, by {used}")


def _chosen(given: str, there: Sequence[str]) -> list[str]:
    """NCCL's rule: a list of prefixes; "=" before it means whole names, "^" all but these."""
    kind, listed = (given[0], given[1:]) if given[0] in "=^" else ("", given)
    if listed.startswith("="):
        kind, listed = kind + "=", listed[1:]
    wanted = [name for name in listed.split(",") if name]
    exact = "=" in kind
    hit = [name for name in there if any(name == w if exact else name.startswith(w) for w in wanted)]
    return [name for name in there if name not in hit and name != "lo"] if "^" in kind else hit


def addresses() -> dict[str, str]:
    """IPv4 address by interface; "" where it has none."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:
                found[name] = ""
    return found


def _is_down(name: str) -> bool:
    try:
        return pathlib.Path("/sys/class/net", name, "operstate").read_text().strip() in ("down", "lowerlayerdown")
    except OSError:
        return False


def port_owner(port: int) -> str:
    """Who listens at a TCP port of this host, for a person; "" where that cannot be seen."""
    inodes = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(file).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A" and int(parts[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{parts[9]}]")
    for process in pathlib.Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            if any(_link(file) in inodes for file in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({re.sub(r'[^ -~]', '?', command)[:80]})"
    return ""


def _link(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def host_id() -> str:
    """The same for all processes that share a network: of a machine, or of a container with a network of its own."""
    try:
        boot, space = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        boot = space = ""
    return f"{socket.gethostname()} {boot} {space}"


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or the exception that it raised; TimeoutError if it takes longer, as DNS without servers does."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else TimeoutError(f"no answer within {seconds:g} s")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("it closed the connection")
        data += more
    return data
