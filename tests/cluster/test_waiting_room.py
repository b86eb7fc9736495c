"""The waiting room over real sockets: who comes during an attempt waits, or is refused by name."""

import contextlib
import queue
import socket
import threading

import pytest

from jaxtrain.parallel.cluster import Cluster, rendezvous, waiting_room
from jaxtrain.parallel.cluster.rendezvous import RendezvousError, Vote

FACTS = {"config": {"lr": 1}}


@pytest.fixture
def address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def room(address, arrivals, members=(0, 1)):
    made = waiting_room.WaitingRoom(
        Cluster(3, 0, address),
        job="run",
        facts=lambda: FACTS,
        secret="",
        members=members,
        on_arrival=arrivals.put,
    )
    return contextlib.closing(made)


def vote(address, process, facts=FACTS, objection=None, timeout=20.0, refusal=""):
    ballot = Vote([process], lambda reports: sorted(reports), objection)
    membership = Cluster(3, process, address)
    given = {"job": "run", "facts": facts, "timeout": timeout, "refusal": refusal}
    return rendezvous.vote(membership, ballot, **given).verdict


def coming(address, process, **given):
    """A thread in which a supervisor comes. Its verdict or its error is put into the queue."""
    ended = queue.SimpleQueue()

    def come():
        try:
            ended.put(vote(address, process, **given))
        except RendezvousError as error:
            ended.put(error)

    threading.Thread(target=come, daemon=True).start()
    return ended


def test_one_that_returns_waits_for_the_end_of_the_attempt_and_takes_part_in_the_next(address):
    arrivals = queue.SimpleQueue()
    with room(address, arrivals):
        returned = coming(address, 2, timeout=5.0)
        assert arrivals.get(timeout=20) == {2: socket.gethostname()}
        assert returned.empty()
    member = coming(address, 1)
    assert vote(address, 0).decision == [0, 1, 2]
    assert returned.get(timeout=10).decision == member.get(timeout=10).decision == [0, 1, 2]


def test_one_with_another_config_is_refused_and_the_attempt_does_not_hear_of_it(address):
    arrivals = queue.SimpleQueue()
    with room(address, arrivals):
        refused = coming(address, 2, facts={"config": {"lr": 2}}).get(timeout=10)
        assert "config.lr is 2, elsewhere 1" in str(refused)
    assert arrivals.empty()


def test_a_second_supervisor_of_a_member_is_refused_by_name(address, monkeypatch):
    monkeypatch.setattr(waiting_room, "SECOND", 1.0)
    arrivals = queue.SimpleQueue()
    with room(address, arrivals):
        refused = coming(address, 1).get(timeout=10)
        assert "process 1 of this run takes part already" in str(refused)
    assert arrivals.empty()


def test_a_second_process_0_hears_that_the_workdir_is_in_use_and_not_that_the_port_is(address):
    with room(address, queue.SimpleQueue()):
        with pytest.raises(RendezvousError, match="^runs/a is in use by another run"):
            vote(address, 0, timeout=1.0, refusal="runs/a is in use by another run")


def test_those_that_have_come_begin_without_the_others_or_the_error_says_why_not(address):
    def objection(reports, seconds):
        if len(reports) < 2:
            return "2 processes are needed"
        return "" if seconds >= 0.5 else "they wait for it"

    member = coming(address, 2)
    assert vote(address, 0, objection=objection).decision == [0, 2]
    assert member.get(timeout=10).decision == [0, 2]
    with pytest.raises(RendezvousError, match=r"within 1 s, and .* alone: 2 processes are needed"):
        vote(address, 0, objection=objection, timeout=1.0)
