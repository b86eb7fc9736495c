"""Measure the rendezvous of many light processes on this machine.

    python -m tools.bench rendezvous [--processes 16 64 256 1024] [--facts CONFIG]

Process 0 is a process of its own. The others are light: each has its own connections and speaks the
whole protocol, but all of them share one process and its event loop. They compare the facts of a
run with CONFIG. After the rendezvous one of them is lost, and the time is that until the last of
the others has the reason. JAX's own service is joined by as many clients, threads of one process.

The times are those until all have the verdict, of process 0's CPU, until the loss has reached all,
and until all clients of JAX have joined and passed a barrier. Connections are those that the others
opened: more than one each if process 0 was too busy. Messages and bytes go both ways after the
handshakes. The memory is the growth of process 0's, next to its most open files.
"""

import argparse
import asyncio
import json
import math
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from jaxtrain import config as config_lib
from jaxtrain.parallel.cluster import Cluster, handshake, processes, rendezvous
from jaxtrain.parallel.cluster.links import Links

TIMEOUT = 120.0  # [s]
SECRET = "a secret of the bench of the rendezvous"
POLL = 0.05  # [s]
HEAD = (
    "| processes | seconds | CPU of process 0 [s] | connections | messages | MB | memory [MB] |"
    " open files | loss reaches all [s] | JAX [s] |\n" + "|---:" * 10 + "|"
)


class Traffic:
    """What the light processes sent and received."""

    def __init__(self) -> None:
        self.connections = self.messages = self.bytes = 0

    def count(self) -> None:
        """Count the messages of every line, and the connections, from now on."""
        send, receive, connect = handshake.Line.send, handshake.Line.receive, rendezvous._connect

        async def counted_send(line: handshake.Line, message: Any) -> None:
            self.messages += 1
            self.bytes += len(json.dumps(message)) + 4 + handshake.MAC
            await send(line, message)

        async def counted_receive(line: handshake.Line) -> Any:
            message = await receive(line)
            self.messages += 1
            self.bytes += len(json.dumps(message)) + 4 + handshake.MAC
            return message

        async def counted_connect(host: str, port: int) -> Any:
            self.connections += 1
            return await connect(host, port)

        handshake.Line.send = counted_send  # type: ignore[method-assign,assignment]
        handshake.Line.receive = counted_receive  # type: ignore[method-assign,assignment]
        rendezvous._connect = counted_connect


class Lead(NamedTuple):
    """The figures of process 0."""

    cpu: float  # [s]
    memory: float  # [bytes]
    files: int


def lead(place: str, n: int, facts: dict[str, Any]) -> None:
    """Hold a rendezvous as process 0, print its figures, and stay until stdin ends."""
    files, memory = [0], [0.0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL):
            files.append(len(os.listdir("/proc/self/fd")))
            memory.append(resident())

    threading.Thread(target=watch, daemon=True).start()
    before, began = resident(), time.process_time()
    peers = rendezvous.await_peers(
        Cluster(n, 0, place), job="bench", facts=facts, timeout=TIMEOUT, secret=SECRET
    )
    cpu, growth = time.process_time() - began, max(*memory, resident()) - before
    links = Links(0, peers, on_end=lambda loss: None)
    print(json.dumps(Lead(cpu, growth, max(files))._asdict()), flush=True)
    sys.stdin.read()
    ended.set()
    links.close()


def resident() -> float:
    """Return the bytes of memory that this process holds."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return float(pages * resource.getpagesize())


async def follow(place: str, n: int, facts: dict[str, Any]) -> tuple[float, list[socket.socket]]:
    """Take part as all other processes. Return the seconds, and the connections that stay open."""
    patience = rendezvous._Patience(TIMEOUT, TIMEOUT)

    async def one(process: int) -> rendezvous.Outcome:
        hello = rendezvous.hello_of(Cluster(n, process, place), "bench", facts) | {"report": None}
        return await rendezvous._report(
            hello, lambda: place, SECRET.encode(), patience, lambda: False
        )

    began = time.perf_counter()
    outcomes = await asyncio.gather(*(one(process) for process in range(1, n)))
    seconds = time.perf_counter() - began
    for outcome in outcomes:
        if outcome.verdict.error:
            sys.exit(outcome.verdict.error)
    return seconds, [outcome.peers[0].connection for outcome in outcomes]


def lose_one(connections: Sequence[socket.socket]) -> float:
    """End one connection without a word. Return the seconds until all others have the reason."""
    began = time.perf_counter()
    connections[0].close()
    for connection in connections[1:]:
        connection.settimeout(30)
        while True:
            size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
            message = json.loads(connection.recv(size, socket.MSG_WAITALL))
            if message["end"]:
                break
    return time.perf_counter() - began


def join_jax(n: int) -> NoReturn:
    """Let clients join JAX's service, as jax.distributed.initialize does. Prints the seconds."""
    from jaxlib import _jax

    place = free_place()
    service: Any = _jax.get_distributed_runtime_service(place, n)
    clients: list[Any] = []

    def one(process: int) -> None:
        client: Any = _jax.get_distributed_runtime_client(place, process, init_timeout=int(TIMEOUT))
        client.connect()
        client.key_value_set(f"topology/{process}", "x" * 200)
        client.wait_at_barrier("all", int(1e3 * TIMEOUT))
        clients.append(client)

    threads = [threading.Thread(target=one, args=(process,)) for process in range(n)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    print(seconds if len(clients) == n else math.nan, flush=True)
    assert service
    os._exit(0)  # a service that ends before its clients would abort this process


def free_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def measure(n: int, facts: dict[str, Any], traffic: Traffic) -> str:
    place = free_place()
    bench = [sys.executable, "-m", "tools.bench", "rendezvous"]
    command = [*bench, "--lead", place, str(n)]
    process = subprocess.Popen(
        [*command, json.dumps(facts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for(place, process)
        counted = traffic.connections, traffic.messages, traffic.bytes
        seconds, connections = asyncio.run(follow(place, n, facts))
        assert process.stdout
        found = Lead(**json.loads(process.stdout.readline()))
        n_connections, messages, sent = (
            after - before
            for after, before in zip(
                (traffic.connections, traffic.messages, traffic.bytes), counted, strict=True
            )
        )
        loss = f"{lose_one(connections):.2f}" if n > 2 else ""
        for connection in connections:
            connection.close()
    finally:
        process.communicate()
    joined = subprocess.run(
        [*bench, "--jax", str(n)], stdout=subprocess.PIPE, text=True, check=True
    )
    return (
        f"| {n} | {seconds:.2f} | {found.cpu:.2f} | {n_connections} | {messages} | {sent / 1e6:.2f}"
        f" | {found.memory / 1e6:.0f} | {found.files} | {loss} | {float(joined.stdout):.2f} |"
    )


def wait_for(place: str, process: subprocess.Popen[str]) -> None:
    """Return once process 0 listens."""
    host, _, port = place.partition(":")
    while process.poll() is None:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            time.sleep(POLL)
        else:
            return
    sys.exit(f"process 0 ended with {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--facts", default="trm_sudoku", metavar="CONFIG")
    parser.add_argument("--lead", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--jax", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jax:
        join_jax(args.jax)
    if args.lead:
        place, n, facts = args.lead
        lead(place, int(n), json.loads(facts))
        return 0
    config, _ = config_lib.read(args.facts)
    facts = json.loads(json.dumps(processes.facts_of(Cluster(1, 0, ""), config)))
    print(f"each compares {len(json.dumps(facts)):,} bytes of facts\n")
    traffic = Traffic()
    traffic.count()
    print(HEAD)
    for n in args.processes:
        print(measure(n, facts, traffic), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
