"""The roll call: threads stand for processes, over real sockets."""

import concurrent.futures
import socket
import threading
import time

import pytest

from jaxtrain.cluster.rendezvous import RendezvousError, Stopped, differences, meet


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def call(port, *processes, of, timeout=10.0, facts=None, job="run", leave=None, delay=None):
    """What each process gets: None, or its error; and the seconds it took."""

    def one(process):
        time.sleep((delay or {}).get(process, 0))
        began = time.monotonic()
        try:
            meet(
                f"127.0.0.1:{port}",
                process=process,
                processes=of,
                job=job,
                facts=(facts or {}).get(process, {"config": {"lr": 1}}),
                timeout=timeout,
                leave=(leave or {}).get(process, lambda: False),
            )
        except RendezvousError as error:
            return error, time.monotonic() - began
        return None, time.monotonic() - began

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_all_come_in_any_order_and_the_port_is_free_again(port):
    for _ in range(2):
        assert [error for error, _ in call(port, 2, 1, 0, 3, of=4, delay={0: 0.5, 3: 0.8})] == [None] * 4


def test_late_processes_are_named_to_all_within_the_bound(port):
    found = call(port, 0, 2, of=5, timeout=1.0)
    for error, seconds in found:
        assert "processes 1, 3, 4 of 5 did not connect" in str(error) and "within 1 s" in str(error)
        assert seconds < 4
    ((error, seconds),) = call(port, 1, of=2, timeout=1.0)
    assert "process 1" in str(error) and "no process 0" in str(error) and "refused" in str(error) and seconds < 4


def test_one_that_leaves_and_comes_again_is_counted_once(port):
    def interloper():
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.sendall(b'{"job": "run", "process": 1, "processes": 3, "host": "a", "facts": {"config": {"lr": 1}}}\n')
            time.sleep(0.3)

    thread = threading.Thread(target=interloper)
    thread.start()
    assert [error for error, _ in call(port, 0, 1, 2, of=3, delay={1: 1.2, 2: 1.0})] == [None] * 3
    thread.join()


def test_what_differs_is_named_with_the_process_and_the_field(port):
    facts = {i: {"config": {"train": {"batch": 8}, "lr": 1}, "versions": {"jax": "0.10"}} for i in range(4)}
    facts[2] = {"config": {"train": {"batch": 16}, "lr": 1}, "versions": {"jax": "0.11"}}
    for error, _ in call(port, 0, 1, 2, 3, of=4, facts=facts):
        lines = str(error).splitlines()
        assert len(lines) == 3
        assert "process 2" in lines[1] and "config.train.batch is 16, elsewhere 8" in lines[1]
        assert "process 2" in lines[2] and 'versions.jax is "0.11", elsewhere "0.10"' in lines[2]


def test_process_0_may_be_the_odd_one_and_a_missing_field_is_a_difference():
    told = [{"process": p, "facts": {"a": 1, "b": {}}} for p in range(3)]
    assert differences(told) == ""
    told[0]["facts"] = {"a": 2}
    assert "process 0: a is 2, elsewhere 1" in differences(told) and "b is nothing, elsewhere {}" in differences(told)


def test_a_port_that_is_taken_is_an_error_of_process_0_soon(port):
    with socket.create_server(("", port)):
        ((error, seconds),) = call(port, 0, of=2, timeout=2.0)
    assert f"cannot listen on port {port}" in str(error) and "in use" in str(error) and "process 0" in str(error)
    assert seconds < 5


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
    found = call(port, 0, 1, of=3, timeout=30.0, leave={who: lambda: time.monotonic() - began > 0.7})
    assert all(isinstance(error, Stopped) and f"process {who}" in str(error) for error, _ in found)
    assert all(seconds < 5 for _, seconds in found)


def test_noise_on_the_port_is_no_process(port):
    def noise():
        time.sleep(0.3)
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"", b"\x00" * 100):
            with socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(text)

    thread = threading.Thread(target=noise)
    thread.start()
    assert [error for error, _ in call(port, 0, 1, of=2, delay={1: 0.8})] == [None, None]
    thread.join()
