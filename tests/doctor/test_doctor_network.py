"""Meeting and measuring over real sockets: threads stand for processes."""

import concurrent.futures
import itertools
import socket
import subprocess
import sys
import time

import pytest

from jaxtrain.doctor import network
from jaxtrain.doctor.check import FAIL, OK, WARN
from jaxtrain.doctor.meeting import Host, MeetingError, Visitor
from tests.test_train import free_port

TOKEN = b"0123456789abcdef" * 2


def met(port, *processes, of, wait=1.0, job="", secret="", then=lambda meeting, process: None):
    """What each process gets of ``then``, or its error."""

    def one(process):
        kind, more = (Host, {}) if process == 0 else (Visitor, {"process": process, "answer": 60})
        try:
            meeting = kind(
                f"127.0.0.1:{port}",
                processes=of,
                job=job if isinstance(job, str) else job[process],
                secret=secret if isinstance(secret, str) else secret[process],
                wait=wait,
                **more,
            )
        except MeetingError as error:
            return error
        try:
            return then(meeting, process)
        except MeetingError as error:
            return error
        finally:
            meeting.close()

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(one, processes))


def test_values_are_gathered_and_shared_in_rounds():
    def rounds(meeting, process):
        first = meeting.gather({"mine": process}, within=5)
        told = meeting.share(sorted(first) if process == 0 else None)
        second = meeting.gather(process * 10, within=5)
        meeting.share(None)
        return told, second

    found = met(free_port(), 0, 1, 2, of=3, wait=5, then=rounds)
    assert [told for told, _ in found] == [[0, 1, 2]] * 3 and found[0][1] == {0: 0, 1: 10, 2: 20}


def test_who_is_missing_leaves_or_belongs_elsewhere_is_known_and_the_others_go_on():
    def rounds(meeting, process):
        if process == 1:
            return "left"  # and its connection with it
        found = meeting.gather(process, within=1.0)
        shared = meeting.share(1)
        return (meeting.met, sorted(found), meeting.refused) if process == 0 else shared

    zero, one, two, four = met(free_port(), 0, 1, 2, 4, of=5, job={0: "a", 1: "a", 2: "a", 4: "b"}, then=rounds)
    assert zero[0] == [0, 1, 2] and zero[1] == [0, 2] and "process 4" in zero[2][0] and "belongs to another job" in zero[2][0]
    assert (one, two) == ("left", 1) and "belongs to another job" in str(four)


def test_why_process_0_is_not_met_is_told_with_what_to_do():
    began = time.monotonic()
    (error,) = met(free_port(), 1, of=2)
    assert "was not met" in str(error) and "refused" in str(error) and "nothing listens" in error.remedy
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (error,) = met(silent.getsockname()[1], 0, of=2)
        assert "cannot listen" in str(error)
    zero, one = met(free_port(), 0, 1, of=2, secret={0: "a" * 16, 1: "b" * 16}, then=lambda meeting, process: meeting.met)
    assert zero == [0] and "another JAXTRAIN_SECRET" in str(one) and "JAXTRAIN_SECRET differs" in one.remedy
    assert time.monotonic() - began < 20


def test_who_has_the_port_is_named():
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=-1, stdout=-1, text=True) as process:
        owner = network.port_owner(int(process.stdout.readline()))
        process.stdin.close()
    assert owner.startswith(f"process {process.pid} (") and "socket" in owner
    assert network.port_owner(free_port()) == ""


def test_a_link_is_measured_and_a_clock_that_is_ahead_is_seen(monkeypatch):
    monkeypatch.setattr(network, "SENDING", 0.05)
    listener = network.Listener("127.0.0.1", TOKEN, clock=lambda: time.time() + 90)
    try:
        link = network.measure("127.0.0.1", listener.port, TOKEN)
        with pytest.raises(OSError):
            network.measure("127.0.0.1", listener.port, TOKEN[::-1])
    finally:
        listener.close()
    assert 0 < link.latency < 1 and link.rate > 1e5 and abs(link.ahead - 90) < 1
    speed, clock = network.judge("0 to 1", network.Link(1e-4, 1e9, 90.0))
    assert speed.verdict == OK and clock.verdict == FAIL and "90.0 s ahead" in clock.text and "time server" in clock.remedy
    slow, clock = network.judge("0 to 1", network.Link(0.05, 1e6, 0.0))
    assert slow.verdict == WARN and "1 MB/s" in slow.text and (clock.name, clock.verdict) == ("clocks", OK)


def test_a_far_host_is_asked_until_the_time_is_up(monkeypatch):
    monkeypatch.setattr(network, "SENDING", 0.05)
    monkeypatch.setattr(network, "PINGING", 0.0)
    asked = []
    listener = network.Listener("127.0.0.1", TOKEN, clock=lambda: asked.append(1) or time.time())
    try:
        link = network.measure("127.0.0.1", listener.port, TOKEN)
    finally:
        listener.close()
    assert len(asked) == 1 and link.latency < 1


def test_every_host_measures_every_other_once_in_turns():
    for n in (2, 3, 6, 7):
        found = network.rounds(list(range(n)), most=100)
        assert sorted(pair for pairs in found for pair in pairs) == sorted(itertools.permutations(range(n), 2))
        for pairs in found:
            busy = [station for pair in pairs for station in pair]
            assert len(busy) == len(set(busy))
    assert len(network.rounds(list(range(64)))) == network.MOST_ROUNDS


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^eth", ["ib0"]),
        ("^=eth0", ["eth1", "ib0"]),
        ("en", []),
        ("ib,eth1", ["eth1", "ib0"]),
    ],
)
def test_interfaces_are_chosen_as_nccl_does(given, chosen):
    assert sorted(network._chosen(given, ["lo", "eth0", "eth1", "ib0"])) == chosen


def test_an_interface_that_is_not_there_and_a_name_that_leads_home_fail(monkeypatch):
    (check,) = network.interfaces({"NCCL_SOCKET_IFNAME": "nothere"}, "")
    assert check.verdict == FAIL and "names no interface" in check.text
    (check,) = network.interfaces({"GLOO_SOCKET_IFNAME": "nothere"}, "")
    assert check.verdict == OK and "not set" in check.text, "JAX's Gloo reads no such variable"
    (check,) = network.names(several_hosts=True, resolve=lambda name: ["127.0.1.1"])
    assert check.verdict == FAIL and "/etc/hosts" in check.remedy

    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    def nobody(address):
        raise socket.herror(1, "Unknown host")

    monkeypatch.setattr(socket, "gethostbyaddr", nobody)
    (check,) = network.names(several_hosts=True, resolve=lambda name: ["10.77.0.1"])
    assert check.verdict == WARN and "no name belongs to that address" in check.text
    (check,) = network.names(several_hosts=False, resolve=lambda name: ["10.77.0.1"])
    assert check.verdict == OK and "no name belongs to that address; that matters only to a job on several hosts" in check.text
    (check,) = network.names(several_hosts=False, resolve=unknown)
    assert check.verdict == WARN and "leads nowhere" in check.text
