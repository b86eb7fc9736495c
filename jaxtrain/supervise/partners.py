"""Copies of a process's step in the memory of a process on another host, over the network.

A process sends each step to its partner behind the steps that follow. Both prove that they know the
job's secret (`handshake`). Then:

    → {"run": "6f1c…", "stem": "copy-3-1", "header": {"step": 120, "bytes": …, "sha256": …, …}}
    ← {"error": ""}     there is room for it; or the reason for which it is refused
    → the parts
    ← {"error": ""}     they are whole there; or the reason

The header is authenticated, and the parts are compared with its checksum.
"""

import asyncio
import hashlib
import json
import logging
import os
import pathlib
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.parallel.cluster import addresses, handshake
from loaders.io import atomic_write

log = logging.getLogger("jaxtrain")

STEM = re.compile(r"copy-\d{1,7}-[01]")
PATIENCE = 10.0  # [s] for a connection, and for its proof
TRANSFER = 600.0  # [s] for the parts of a step
CHUNK = 1 << 20  # [bytes]


class PartnerError(ConnectionError):
    """A partner that does not take a step."""


class Address(NamedTuple):
    """The place at which a process takes copies."""

    host: str
    port: int


def choose(layouts: Sequence[str], hosts: Sequence[str]) -> list[int]:
    """Return the partner of each process, -1 = none.

    It is the next process on another host. A process has none if its host is the only one, or if a
    process on another host has the same parts.
    """
    partners = []
    n = len(hosts)
    for process in range(n):
        elsewhere = [q for q in range(process + 1, process + n) if hosts[q % n] != hosts[process]]
        has_replica = any(layouts[q % n] == layouts[process] for q in elsewhere)
        partners.append(-1 if has_replica or not elsewhere else elsewhere[0] % n)
    return partners


def own_host(coordinator: str) -> str:
    """Return the address at which other processes of the run reach this host, equal in all of it.

    It is the coordinator's name on a machine that has this name as loopback. Raises OSError.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        address = str(probe.getsockname()[0])
    return host if addresses.is_loopback(address) else address


class Receiver:
    """A thread that takes the copies of other processes into ``folder``."""

    def __init__(self, folder: pathlib.Path, run: str, secret: bytes, host: str):
        self._folder = folder
        self._run = run
        self._secret = secret
        places = addresses.on_this_machine(host, 0)[:1]
        [self._listener] = addresses.listeners(places, 0)
        self.address = Address(host, int(self._listener.getsockname()[1]))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = asyncio.start_server(self._take, sock=self._listener)
        self._loop.run_until_complete(server)
        self._loop.run_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                line = await handshake.admit(reader, writer, self._secret)
                message = await line.receive()
            problem = self._problem(message) or self._make_room(message)
            if not problem:
                transport: Any = writer.transport
                transport.pause_reading()  # the parts take no way through its buffers
            await line.send({"error": problem})
            if not problem:
                with line.connection() as connection:
                    async with asyncio.timeout(TRANSFER):
                        problem = await self._store(message, connection)
                await line.send({"error": problem})
            if problem:
                log.warning("a step in memory of another process is refused: %s", problem)
        except (OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError) as error:
            log.debug("a copy did not arrive: %s", error)
        finally:
            writer.close()

    def _problem(self, message: Mapping[str, Any]) -> str:
        """Return the reason for which a step is not taken, or ""."""
        if message["run"] != self._run or message["header"]["run"] != self._run:
            return f"it is of the run {str(message['run'])[:32]}, and this one is {self._run}"
        if not STEM.fullmatch(message["stem"]):
            return "it has another name than a copy"
        return ""

    def _make_room(self, message: Mapping[str, Any]) -> str:
        """Allocate the place of a step. Return the reason for which that fails, or ""."""
        path = self._path(message)
        size = int(message["header"]["bytes"])
        path.with_suffix(".json").unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            return f"{size:,} bytes of shared memory are needed for it: {error.strerror}"
        finally:
            os.close(descriptor)
        return ""

    async def _store(self, message: Mapping[str, Any], connection: socket.socket) -> str:
        """Store the parts of a step. Return the reason for which they are refused, or ""."""
        header = message["header"]
        path = self._path(message)
        unread = int(header["bytes"])
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(CHUNK))  # small enough for a cache of the CPU
        with path.open("r+b") as file:
            while unread:
                n = await self._loop.sock_recv_into(connection, buffer[: min(CHUNK, unread)])
                if not n:
                    raise PartnerError("it closed the connection")
                file.write(buffer[:n])
                digest.update(buffer[:n])
                unread -= n
                # While data are there, nothing else lets other senders, and the limit, have a turn.
                await asyncio.sleep(0)
        if digest.hexdigest() != header["sha256"]:
            return "it fails its checksum"
        atomic_write.write(path.with_suffix(".json"), json.dumps(header))
        return ""

    def _path(self, message: Mapping[str, Any]) -> pathlib.Path:
        return self._folder / f"{message['stem']}.bin"


def send(
    address: Address, secret: bytes, stem: str, header: Mapping[str, Any], content: memoryview
) -> None:
    """Send the parts of a step to a partner. Raises OSError: it does not have them."""
    asyncio.run(_send(address, secret, stem, header, content))


async def _send(
    address: Address, secret: bytes, stem: str, header: Mapping[str, Any], content: memoryview
) -> None:
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(*address)
        line = await handshake.prove(reader, writer, secret)
    try:
        async with asyncio.timeout(TRANSFER):
            await line.send({"run": header["run"], "stem": stem, "header": dict(header)})
            _raise_refusal(address, await line.receive())
            for start in range(0, len(content), CHUNK):
                writer.write(content[start : start + CHUNK])
                await writer.drain()
            _raise_refusal(address, await line.receive())
    finally:
        writer.close()


def _raise_refusal(address: Address, answer: Mapping[str, Any]) -> None:
    if answer["error"]:
        raise PartnerError(f"{address.host}: {answer['error']}")
