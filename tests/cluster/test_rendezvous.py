"""The rendezvous over real sockets. Threads stand for processes."""

import asyncio
import concurrent.futures
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

import jaxtrain
from jaxtrain.config import Config
from jaxtrain.parallel.cluster import Cluster, addresses, handshake, processes, rendezvous
from jaxtrain.parallel.cluster.handshake import HandshakeError, prove
from jaxtrain.parallel.cluster.rendezvous import RendezvousError, Stopped, await_peers, differences


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(
    port,
    *processes,
    of,
    timeout=10.0,
    facts=None,
    job="run",
    leave=None,
    delay=None,
    secret="",
    refusal="",
    **more,
):
    """The result of each process, which is None or its error, and the seconds it took."""

    def one(process):
        time.sleep((delay or {}).get(process, 0))
        began = time.monotonic()
        try:
            await_peers(
                Cluster(of, process, f"127.0.0.1:{port}"),
                job=job,
                facts=(facts or {}).get(process, {"config": {"lr": 1}}),
                timeout=timeout,
                leave=(leave or {}).get(process, lambda: False),
                secret=secret if isinstance(secret, str) else secret[process],
                refusal=refusal if process == 0 else "",
                **more,
            )
        except RendezvousError as error:
            return error, time.monotonic() - began
        return None, time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_processes_may_arrive_in_any_order_and_the_port_is_free_afterwards(port):
    for _ in range(2):
        assert [error for error, _ in call(port, 2, 1, 0, 3, of=4, delay={0: 0.5, 3: 0.8})] == [
            None
        ] * 4


def test_late_processes_are_named_to_all_within_the_bound(port):
    found = call(port, 0, 2, of=5, timeout=1.0)
    for error, seconds in found:
        assert "processes 1, 3, 4 of 5 did not connect" in str(error) and "within 1 s" in str(error)
        assert seconds < 20
    ((error, seconds),) = call(port, 1, of=2, timeout=1.0)
    assert (
        "process 1" in str(error)
        and "no process 0" in str(error)
        and "refused" in str(error)
        and seconds < 20
    )


def knock(port, message, secret="", wait=0.0, change=lambda sent: sent):
    """Send one message after the proof. Returns the verdict, "closed" if the connection ended, or
    None.

    Args:
      message: bytes are sent as they are, also if they are not JSON.
      change: applied to the bytes on their way.
    """

    async def answer():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            line = await prove(reader, writer, secret.encode())
            body = message if isinstance(message, bytes) else json.dumps(message).encode()
            text = len(body).to_bytes(4, "big") + body
            writer.write(change(text + line._seal(line._out, 1, text)))
            if wait:  # it leaves without waiting for an answer
                await asyncio.sleep(wait)
                return None
            async with asyncio.timeout(0.5):
                return await line.receive()
        except HandshakeError as error:
            if "JAXTRAIN_SECRET" in str(error):
                raise
            return "closed"
        except TimeoutError:
            return None
        finally:
            writer.close()

    return asyncio.run(answer())


def hello(**changed):
    return {
        "job": "run",
        "process": 1,
        "processes": 3,
        "host": "a",
        "facts": {"config": {"lr": 1}},
    } | changed


def test_a_process_that_leaves_and_returns_is_counted_once(port):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        both = pool.submit(call, port, 0, 1, 2, of=3, delay={1: 1.2, 2: 1.0})
        time.sleep(0.3)
        assert knock(port, hello(), wait=0.3) is None
        assert [error for error, _ in both.result()] == [None] * 3


def test_differences_between_processes_name_the_process_and_the_field(port):
    facts = {
        i: {"config": {"train": {"batch": 8}, "lr": 1}, "versions": {"jax": "0.10"}}
        for i in range(4)
    }
    facts[2] = {"config": {"train": {"batch": 16}, "lr": 1}, "versions": {"jax": "0.11"}}
    for error, _ in call(port, 0, 1, 2, 3, of=4, facts=facts):
        lines = str(error).splitlines()
        assert len(lines) == 3
        assert "process 2" in lines[1] and "config.train.batch is 16, elsewhere 8" in lines[1]
        assert "process 2" in lines[2] and 'versions.jax is "0.11", elsewhere "0.10"' in lines[2]


def test_process_0_may_be_the_one_that_differs_and_a_missing_field_is_a_difference():
    told = [{"process": p, "facts": {"a": 1, "b": {}}} for p in range(3)]
    assert differences(told) == ""
    told[0]["facts"] = {"a": 2}
    assert "process 0: a is 2, elsewhere 1" in differences(
        told
    ) and "b is nothing, elsewhere {}" in differences(told)


def test_a_port_that_is_taken_is_an_error_of_process_0_soon(port):
    with socket.create_server(("", port)):
        ((error, seconds),) = call(port, 0, of=2, timeout=2.0)
    assert (
        f"cannot listen on port {port}" in str(error)
        and "in use" in str(error)
        and "process 0" in str(error)
    )
    assert seconds < 20


def test_a_run_that_finds_anothers_process_0_does_not_mix_with_it(port):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ours = pool.submit(call, port, 0, 1, of=2, delay={1: 2.0})
        time.sleep(0.5)
        ((error, _),) = call(port, 1, of=2, job="another", timeout=1.0)
        assert "another run's process 0" in str(error)
        ((error, _),) = call(port, 1, of=3, timeout=1.0)
        assert "belongs to a run of 3 processes" in str(error)
        assert [error for error, _ in ours.result()] == [None, None]


def test_two_processes_of_one_number(port):
    found = call(port, 0, 1, 1, of=3, timeout=2.0, delay={0: 0.2})
    assert sum("two processes have the number 1" in str(error) for error, _ in found) == 1
    assert "process 2 of 3 did not connect" in str(found[0][0])


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_ends_the_wait_of_all(port, who):
    began = time.monotonic()
    found = call(
        port, 0, 1, of=3, timeout=30.0, leave={who: lambda: time.monotonic() - began > 0.7}
    )
    assert all(isinstance(error, Stopped) and f"process {who}" in str(error) for error, _ in found)
    assert all(seconds < 20 for _, seconds in found)


def test_a_refusal_of_process_0_is_reported_by_every_process(port):
    for error, _ in call(port, 0, 1, 2, of=3, refusal="the workdir is in use"):
        assert str(error) == "the workdir is in use"


SECRET = "5e" * 32


def stranger(port, data, *, seconds=5.0):
    """All bytes that a client without the secret receives."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        heard = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(1 << 16):
                heard += more
        except OSError:
            pass
        return heard


def test_unauthenticated_peers_receive_only_random_bytes(port):
    """The processes of the run meet, although many others connect with all kinds of messages."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(call, port, 0, 1, of=2, delay={1: 1.5}, secret=SECRET)
        time.sleep(0.5)
        heard = [
            stranger(port, data)
            for data in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"",
                b"\x00" * 64,
                b"\xff" * 100_000,
                b'{"job": "run", "process": 1, "processes": 2, "host": "a", "facts": {}}\n' * 3,
                b"[" * 100_000,
            )
        ]
        assert {len(x) for x in heard} <= {0, handshake.NONCE} and len(set(heard)) == len(
            [x for x in heard if x]
        ) + 1
        with pytest.raises(ConnectionError, match="JAXTRAIN_SECRET"):
            knock(port, hello(processes=2), secret="another")
        assert [error for error, _ in run.result()] == [None, None]


def test_a_process_with_another_secret_is_not_admitted_and_says_why(port):
    found = call(port, 0, 1, of=2, timeout=1.5, secret={0: SECRET, 1: "another"})
    assert "process 1 of 2 did not connect" in str(found[0][0])
    assert "the listener there has another JAXTRAIN_SECRET" in str(found[1][0])


def test_a_listener_that_echoes_messages_is_not_taken_for_process_0(port):
    """No message of a process is a proof for another one, and nobody receives its facts before the
    proof."""
    heard = []

    def mirror():
        with socket.create_server(("127.0.0.1", port)) as listener:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(2)
                for _ in range(2):
                    heard.append(connection.recv(1000))
                    connection.sendall(heard[-1])
                heard.append(connection.recv(1000))

    thread = threading.Thread(target=mirror)
    thread.start()
    time.sleep(0.2)
    ((error, _),) = call(port, 1, of=2, timeout=0.5, secret=SECRET)
    thread.join()
    assert "no process 0" in str(error) and [len(x) for x in heard] == [32, 32, 0]


def test_messages_of_another_kind_admit_nobody(port):
    """The sender knows the secret. It sends other types for numbers, deep JSON, long messages and
    changed ones."""
    odd = [hello(process=p) for p in (True, 1.0, 0.5, "1", None, [], 1 << 70, -1, 0, 3)]
    odd += [
        hello(processes=3.0),
        hello(job=["run"]),
        hello(host=1),
        hello(facts=[]),
        [hello()],
        "stop",
        None,
    ]
    odd += [b"[" * 100_000, b'{"a":' * 90 + b"1" + b"}" * 90, b"\xff", b"NaN", b""]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(call, port, 0, 1, 2, of=3, delay={1: 3.0}, timeout=20.0, secret=SECRET)
        time.sleep(0.5)
        for message in odd:
            verdict = knock(port, message, secret=SECRET)
            assert verdict in (None, "closed") or verdict["error"], message
        for change in (
            lambda sent: sent[:-1] + bytes([sent[-1] ^ 1]),
            lambda sent: b"\xff" * 4 + sent,
        ):
            # One message was changed on its way, and the other claims 4 GB.
            assert knock(port, hello(), secret=SECRET, change=change) == "closed"
        assert [error for error, _ in run.result()] == [None] * 3


def test_more_unauthenticated_peers_than_descriptors_do_not_end_the_rendezvous(port):
    """The process may open few descriptors, and gets more idle connections than that."""
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from jaxtrain.parallel.cluster import Cluster
from jaxtrain.parallel.cluster.rendezvous import await_peers
await_peers(
    Cluster(2, 0, "127.0.0.1:{port}"), job="run", facts={{}}, timeout=30, secret="{SECRET}"
)
print("met")
"""
    root = pathlib.Path(jaxtrain.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True
    )
    idle = []
    try:
        deadline = time.monotonic() + 30
        while len(idle) < 200 and time.monotonic() < deadline:
            try:
                idle.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            except ConnectionRefusedError:
                time.sleep(0.1)
        assert len(idle) == 200
        found = call(port, 1, of=2, timeout=25.0, facts={1: {}}, secret=SECRET)
        assert found[0][0] is None and process.communicate(timeout=30)[0] == "met\n"
    finally:
        process.kill()
        process.communicate()
        for connection in idle:
            connection.close()


def test_a_listener_that_answers_byte_by_byte_is_not_waited_for_beyond_the_timeout():
    def drip():
        for _ in range(handshake.NONCE - 1):
            there.sendall(b"x")
            time.sleep(0.1)
        there.close()

    async def wait():
        async with asyncio.timeout(0.3):
            await prove(*await asyncio.open_connection(sock=here), SECRET.encode())

    here, there = socket.socketpair()
    thread = threading.Thread(target=drip)
    with here:
        here.setblocking(False)
        thread.start()
        # the timeout comes first, before the end of the connection
        with pytest.raises(TimeoutError):
            asyncio.run(wait())
        thread.join()


def test_an_idle_unauthenticated_peer_is_disconnected(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.5)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(call, port, 0, 1, of=2, delay={1: 2.0}, secret=SECRET)
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
            connection.sendall(b"x")
            assert connection.recv(100) == b""
        assert [error for error, _ in run.result()] == [None, None]


def test_process_0_listens_at_the_coordinators_address(port):
    """If the address is 127.0.0.1, a connection to another address of this machine is refused."""
    outside = next(f"127.0.0.{i}" for i in (2, 3))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(call, port, 0, 1, of=2, delay={1: 1.0})
        time.sleep(0.4)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((outside, port), timeout=1)
        assert [error for error, _ in run.result()] == [None, None]


def test_the_address_that_process_0_listens_on():
    assert addresses.on_this_machine("127.0.0.1", 1) == [
        "127.0.0.1"
    ] and "127.0.0.1" in addresses.on_this_machine("localhost", 1)
    assert addresses.on_this_machine("192.0.2.1", 1) == [], (
        "an address that is another machine's: every interface"
    )
    assert addresses.on_this_machine("no-such-host.invalid", 1) == []


@pytest.fixture
def edited(tmp_path):
    """A copy of the packages, whose ``jaxtrain/run/loop.py`` has one more line."""
    root = pathlib.Path(jaxtrain.__file__).parents[1]
    for package in ("jaxtrain", "loaders"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, tmp_path / "edited" / package, ignore=ignored)
    edited = tmp_path / "edited" / "jaxtrain" / "run" / "loop.py"
    edited.write_text(edited.read_text() + "\n")
    return tmp_path / "edited"


def digest_in(root):
    """The digest of a process that imports jaxtrain from ``root``."""
    program = "from jaxtrain.parallel.cluster import processes; print(processes.digest_of_files())"
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-P", "-c", program]
    return subprocess.check_output(command, env=environment, cwd=root, text=True).strip()


def test_a_run_is_refused_whose_processes_have_other_files_of_one_version(
    port, tmp_path, edited, monkeypatch
):
    """The processes are like two checkouts of one commit, and one of them is edited."""
    digest = processes.digest_of_files()
    digest_of_edited = digest_in(edited)
    found = threading.local()
    monkeypatch.setattr(processes, "digest_of_files", lambda: found.digest)
    message = f'process 1 .*the digest of jaxtrain\'s files is "{digest_of_edited}".*"{digest}"'

    def join(process):
        found.digest = digest_of_edited if process else digest
        with pytest.raises(RendezvousError, match=message):
            processes.await_peers(
                Cluster(2, process, f"127.0.0.1:{port}"), Config(workdir=str(tmp_path))
            )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))


def test_the_digest_is_of_the_files_that_python_imports(edited):
    root = pathlib.Path(jaxtrain.__file__).parents[1]
    shutil.copy(root / "jaxtrain" / "run" / "loop.py", edited / "jaxtrain" / "run" / "loop.py")
    (edited / "jaxtrain" / "run" / ".#loop.py").write_text("an editor's")
    (edited / "jaxtrain" / "notes.txt").write_text("no module")
    assert digest_in(edited) == processes.digest_of_files()


def test_a_process_joins_jax_once_process_0s_listens(monkeypatch):
    """gRPC would wait for a second after its first refusal."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    late = threading.Timer(0.3, lambda: listeners.append(listen(address)))
    listeners = []
    late.start()
    began = time.monotonic()
    processes._await_service(address)
    assert 0.25 < time.monotonic() - began < processes.SERVICE / 2
    listeners.pop().close()
    monkeypatch.setattr(processes, "SERVICE", 0.2)
    began = time.monotonic()
    processes._await_service(address)
    assert 0.15 < time.monotonic() - began < 2, "JAX says that nothing answers"


def listen(address):
    return socket.create_server(rendezvous.host_and_port(address))


def test_process_0_raises_its_limit_of_open_files_or_says_how_many_it_needs(port):
    """By default Linux allows 1024, and process 0 has a connection to each of the others."""
    program = f"""
import resource, sys
from jaxtrain.parallel.cluster import Cluster
from jaxtrain.parallel.cluster.rendezvous import RendezvousError, await_peers
limit, n, timeout = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit))
try:
    await_peers(Cluster(n, 0, "127.0.0.1:{port}"), job="run", facts={{}}, timeout=timeout)
except RendezvousError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    root = pathlib.Path(jaxtrain.__file__).parents[1]

    def run(*arguments):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60).stdout

    found = run(600, 600, 100)
    assert "may open 600 files at once, and needs 688 for connections to 599 others" in found
    assert "ulimit -n 1600" in found and found.endswith("600\n")
    found = run(2000, 200, 0)
    assert "did not connect" in found and found.endswith("1200\n")


def test_as_many_processes_as_are_in_the_run_come_at_once_and_none_has_to_come_again(
    port, monkeypatch
):
    monkeypatch.setattr(rendezvous, "MAX_UNAUTHENTICATED", 0)
    n_connections = 0
    connect = rendezvous._connect

    async def counted(host, port):
        nonlocal n_connections
        n_connections += 1
        return await connect(host, port)

    async def all_at_once(n):
        leader = rendezvous.Rendezvous(
            rendezvous.hello_of(Cluster(n, 0, ""), "run", {}), b"", 20.0, lambda: False
        )
        holding = asyncio.ensure_future(leader.hold(f"127.0.0.1:{port}"))
        await asyncio.sleep(0.5)
        monkeypatch.setattr(rendezvous, "_connect", counted)
        patience = rendezvous._Patience(20.0, 20.0)
        reports = []

        def place():
            return f"127.0.0.1:{port}"

        for process in range(1, n):
            hello = rendezvous.hello_of(Cluster(n, process, ""), "run", {})
            reports.append(rendezvous._report(hello, place, b"", patience, lambda: False))
        return await asyncio.gather(holding, *reports)

    outcomes = asyncio.run(all_at_once(150))
    assert [outcome.verdict.error for outcome in outcomes] == [""] * 150
    assert len(outcomes[0].peers) == n_connections == 149
    for outcome in outcomes:
        for peer in outcome.peers:
            peer.connection.close()
