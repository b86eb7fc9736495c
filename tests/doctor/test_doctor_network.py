"""Names, clocks and ports, and peers over real sockets. Threads stand for processes."""

import concurrent.futures
import json
import socket
import threading

import pytest

from jaxtrain.doctor import network
from jaxtrain.doctor.check import FAIL, OK, WARN, fail, ok
from jaxtrain.doctor.peers import Peers, unmet
from jaxtrain.parallel.cluster import Cluster, RendezvousError
from tests.support.processes import free_port


@pytest.fixture
def met(monkeypatch):
    """The result of ``then`` for each process, or the finding of its error. Each process is a
    machine of its own."""
    monkeypatch.setattr(network, "machine_id", lambda: f"machine {threading.get_ident()}")

    def met(port, *processes, of, wait=60.0, job="", then=lambda peers: None):
        def one(process):
            name = job if isinstance(job, str) else job[process]
            cluster = Cluster(of, process, f"127.0.0.1:{port}", launcher="test", job=name)
            try:
                return then(Peers(cluster, wait=wait))
            except RendezvousError as error:
                return unmet(error, cluster)

        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            return list(pool.map(one, processes))

    return met


def whole(peers):
    """Hold each rendezvous of a process that has findings and facts."""
    process = peers.process
    checks = [
        list(
            fail("disk", "workdir", "it is full", "free some")
            if process == 2
            else ok("disk", "workdir", "well")
        )
    ]
    facts = {"commit": "abc", "packages": {"optax": str(process == 1)}}
    own = {
        "machine": f"host{process}",
        "port": 1,
        "folder": "/runs/x" if process else "/runs/y",
        "checks": checks,
    }
    plan = peers.hold("the findings of each", own | {"facts": facts}, peers.found, 60.0)
    return (
        peers.token,
        plan,
        peers.hold("the check of each other", {"checks": []}, peers.saw, 60.0),
        peers,
    )


def test_process_0_collects_and_compares_findings_and_sends_every_process_the_verdict(met):
    zero, one, two = met(free_port(), 0, 1, 2, of=3, then=whole)
    told = [json.loads(json.dumps(each[:3])) for each in (zero, one, two)]
    assert told[0] == told[1] == told[2] and not zero[2]
    _, plan, _, peers = zero
    host = socket.gethostname()
    assert peers.several and plan["places"] == [(p, host, "127.0.0.1", 1) for p in range(3)]
    assert plan["shared"] == [0], "the others have another folder"
    found = {(check.group, check.name, process): check for process, check in peers.checks}
    assert found["disk", "workdir", 2].verdict == FAIL and found["disk", "workdir", 1].verdict == OK
    packages = found["software", "same packages", 0]
    assert packages.verdict == FAIL and packages.text.startswith("process 1 (")
    assert found["network", "clocks", 2].verdict == OK
    text = found["processes", "present", 0].text
    assert text.startswith("all 3 processes met at 127.0.0.1:") and text.endswith(" (test)")


def test_processes_that_never_arrive_or_leave_are_named_and_the_others_continue(met):
    def then(peers):
        if peers.process == 2:
            return "left"
        own = {"machine": "host", "port": 1, "folder": "", "checks": [], "facts": {"commit": "abc"}}
        peers.hold("the findings of each", own, peers.found, 60.0 if peers.process else 1.0)
        return peers.hold("the check of each other", {"checks": []}, peers.saw, 60.0), peers.checks

    zero, one, two = met(free_port(), 0, 1, 2, of=4, wait=3.0, then=then)
    assert two == "left" and zero[0] is one[0] is False
    never, gone = [check for _, check in zero[1] if check.name == "present"]
    assert never.verdict == gone.verdict == FAIL
    assert never.text.startswith("process 3 of 4 did not connect to ")
    assert gone.text.startswith("process 2 of 4 did not connect to ")


def test_a_process_that_cannot_reach_process_0_reports_the_reason(met):
    (check,) = met(free_port(), 1, of=2, wait=0.5)
    assert (
        "found no process 0" in check.text
        and "refused" in check.text
        and "start process 0 on 127.0.0.1" in check.remedy
    )
    zero, one = met(port := free_port(), 0, 1, of=2, wait=3.0, job={0: "a", 1: "b"}, then=whole)
    assert (
        "another run's process 0" in one.text
        and "the doctor of a" in one.text
        and "a port of its own" in one.remedy
    )
    assert any("process 1 of 2 did not connect" in check.text for _, check in zero[3].checks)
    with socket.create_server(("127.0.0.1", port)):
        (check,) = met(port, 0, of=2, wait=0.5)
    assert (
        f"cannot listen on port {port}" in check.text
        and f"ss -ltnp sport = :{port}" in check.remedy
    )


def test_processes_with_other_secrets_say_so(met, monkeypatch):
    secrets = iter("ab")
    monkeypatch.setattr(
        "jaxtrain.doctor.peers.discover.secret_of", lambda *given: next(secrets) * 16
    )
    zero, one = met(free_port(), 0, 1, of=2, wait=2.0, then=whole)
    assert "another JAXTRAIN_SECRET" in one.text and "one JAXTRAIN_SECRET" in one.remedy
    assert any("process 1 of 2 did not connect" in check.text for _, check in zero[3].checks)


def test_clocks_that_differ_are_judged_by_process():
    assert [check.verdict for _, check in network.clocks({0: 0.0, 1: 0.3, 2: -0.4})] == [OK] * 3
    _, (_, ahead), (process, behind) = network.clocks({0: 0.0, 1: 90.0, 2: -5.0})
    assert (
        ahead.verdict == FAIL
        and "90.0 s ahead of process 0's" in ahead.text
        and "time server" in ahead.remedy
    )
    assert (process, behind.verdict) == (2, WARN) and "5.0 s behind process 0's" in behind.text


def test_hosts_are_connected_to_and_those_that_cannot_be_reached_are_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = [(4 * i, f"host{i}", "127.0.0.1", listener.getsockname()[1]) for i in range(4)]
        (check,) = network.ports(4, places)
        assert (
            check.verdict == OK
            and check.text == "3 of 3 other hosts reached, at ports that they picked"
        )
        assert not list(network.ports(1, places)), "another process of its host connects"
        assert not list(network.ports(0, places[:1])), "there is no other host"
        monkeypatch.setattr(network, "NEIGHBOURS", 2)
        (check,) = network.ports(8, places)
        assert check.text.startswith("2 of 3 other hosts")
        places[0] = (0, "host0", "127.0.0.1", free_port())
        (check,) = network.ports(12, places)
        assert (
            check.verdict == FAIL
            and "process 0 (host0) cannot be reached at 127.0.0.1:" in check.text
        )
        assert "refused" in check.text and "open all" in check.remedy


def test_a_host_name_that_leads_home_fails(monkeypatch):
    def leads_to(address):
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda *given, **more: [(socket.AF_INET, 1, 6, "", (address, 0))]
        )

    leads_to("127.0.1.1")
    check = network.host_name(several_hosts=True)
    assert check.verdict == FAIL and "/etc/hosts" in check.remedy
    assert network.host_name(several_hosts=False).verdict == OK
    leads_to("10.77.0.1")
    assert network.host_name(several_hosts=True).verdict == OK

    def unknown(*given, **more):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for several, verdict in ((True, FAIL), (False, WARN)):
        check = network.host_name(several_hosts=several)
        assert check.verdict == verdict and "leads nowhere" in check.text
