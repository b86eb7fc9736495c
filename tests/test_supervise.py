"""`jaxtrain train --supervise`: a run whose processes or supervisors are killed goes on by itself,
and ends in order when it is asked to, or cannot go on. Real processes, real kills."""

import os
import pathlib
import queue
import signal
import socket
import types

import pytest

from jaxtrain.config import Config
from jaxtrain.parallel.cluster import Cluster, Links, rendezvous
from jaxtrain.parallel.cluster.links import Peer
from jaxtrain.supervise import supervisor
from jaxtrain.supervise.attempts import Report
from tests.support.processes import free_port, ids, records, step_of, wait_for
from tests.support.supervised_runs import (
    ENDLESS,
    outputs_of,
    pid_of_run,
    reaches,
    saves,
    several,
    starts,
    supervised,
)


def test_a_killed_process_goes_on_by_itself_and_its_run_ends_in_order(folder, ending):
    run = supervised(folder, *ENDLESS)
    ending.append(run)
    saves(folder, [run])
    first = pid_of_run(folder)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: pid_of_run(folder) != first, watch=[run])
    second = supervised(folder, *ENDLESS)
    ending.append(second)
    (output,) = outputs_of([second])
    assert second.returncode == 2 and f"in use by another run: process {run.pid} on" in output
    step = step_of(folder / "runs" / "toy")
    reaches(folder, step + 3, [run])
    run.send_signal(signal.SIGTERM)
    (output,) = outputs_of([run])
    assert run.returncode == 75, output
    assert "was killed by SIGKILL; attempt 1 begins" in output, output
    assert "resuming from step" in output and "SIGTERM" in output
    assert "is the program of attempt 0, and is not traced again" in output, output
    first_start, second = starts(folder)
    assert second.facts["attempt"] == 1 and "was killed by SIGKILL" in second.facts["cause"]
    assert first_start.facts["attempt"] == 0 and second.queued == 0
    steps = list(records(folder / "runs" / "toy", "train"))
    assert steps == list(range(1, len(steps) + 1))
    assert ids(folder)  # the same rows, if a batch was read twice
    assert not pathlib.Path(f"/proc/{pid_of_run(folder)}").exists()
    assert not list((folder / "runs" / "toy").glob("lease.json"))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_processes_start_again_after_one_is_killed(folder, ending, victim):
    both = several(folder, *ENDLESS)
    ending += both
    saves(folder, both)
    pids = [pid_of_run(folder, process) for process in (0, 1)]
    os.kill(pids[victim], signal.SIGKILL)
    wait_for(lambda: all(pid_of_run(folder, i) != pids[i] for i in (0, 1)), watch=both)
    step = step_of(folder / "runs" / "toy")
    reaches(folder, step + 3, both)
    both[1].send_signal(signal.SIGTERM)  # to one of the supervisors, for all
    outputs = outputs_of(both)
    assert [process.returncode for process in both] == [75, 75], outputs
    for process in (0, 1):
        assert starts(folder, process)[-1].first > 0
        assert ids(folder, f"ids{process}.jsonl")  # the same rows, if a batch was read twice
    second = starts(folder)[-1]
    assert f"process {victim} (" in second.facts["cause"], second.facts
    assert second.facts["attempt"] == 1


@pytest.mark.slow
def test_a_supervisor_that_is_killed_takes_its_process_along_and_comes_back(folder, ending):
    port = free_port()
    both = [supervised(folder, *ENDLESS, port=port, process=i, processes=2) for i in (0, 1)]
    ending += both
    saves(folder, both)
    first = pid_of_run(folder, 1)
    os.kill(first, signal.SIGSTOP)  # it cannot end by itself
    both[1].kill()
    wait_for(lambda: not pathlib.Path(f"/proc/{first}").exists(), seconds=20)
    both[1].communicate()
    # as its scheduler would
    again = supervised(folder, *ENDLESS, port=port, process=1, processes=2)
    ending.append(again)
    wait_for(lambda: pid_of_run(folder, 1) != first, watch=[both[0], again])
    step = step_of(folder / "runs" / "toy")
    reaches(folder, step + 3, [both[0], again])
    both[0].send_signal(signal.SIGINT)
    outputs = outputs_of([both[0], again])
    assert [both[0].returncode, again.returncode] == [130, 130], outputs
    assert "the supervisor of process 1" in starts(folder)[-1].facts["cause"]


@pytest.mark.slow
def test_a_killed_template_is_replaced_and_a_process_that_is_asked_to_stop_is_not(folder, ending):
    run = supervised(folder, *ENDLESS)
    ending.append(run)
    saves(folder, [run])
    first = pid_of_run(folder)
    template = int(pathlib.Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(template, signal.SIGKILL)
    wait_for(lambda: pid_of_run(folder) != first, watch=[run])
    assert not pathlib.Path(f"/proc/{first}").exists()
    second = pid_of_run(folder)
    reaches(folder, step_of(folder / "runs" / "toy") + 3, [run])
    os.kill(second, signal.SIGTERM)  # to the process itself: it saves, and the run ends in order
    (output,) = outputs_of([run])
    assert run.returncode == 75 and "attempt 2" not in output, output


FAILING_LOADER = """
import os
from tests.support import proxy_loader
from tests.support.proxy_loader import Config, dataset_info, element_spec

class Failing(proxy_loader.Proxy):
    def __next__(self):
        position, batch = super().__next__()
        if position >= 4:
            raise RuntimeError("the disk of this host is gone")
        return position, batch

def make_loader(config, **given):
    loader = proxy_loader.make_loader(config, **given)
    if given["split"] == "train":
        loader = Failing(loader, given["split"], given["rows"])
    return loader
"""


def test_a_crash_loop_ends_with_the_cause_of_each_attempt(folder):
    (folder / "failing.py").write_text(FAILING_LOADER)
    run = supervised(folder, *ENDLESS, "--config.loader=failing", "--config.supervise.idle=2")
    (output,) = outputs_of([run])
    assert run.returncode == 1, output
    assert "2 attempts in a row made no progress (config.supervise.idle)" in output, output
    given_up = output[output.index("the run is given up") :]
    assert given_up.count("the disk of this host is gone") == 3, output
    assert [start.facts["attempt"] for start in starts(folder)] == [0, 1, 2]


def test_an_error_of_the_config_ends_all_at_once(folder):
    both = several(folder, "--config.mesh.model=3")
    outputs = outputs_of(both)
    assert [process.returncode for process in both] == [2, 2], outputs
    assert "attempt 1" not in outputs[0] and "mesh" in outputs[0]


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_all_supervisors_learn_that_one_ended_between_the_vote_and_the_start(monkeypatch):
    """Process 0's has a connection to the third alone, which has none to the second."""
    ours, theirs = tcp_pair()
    verdict = rendezvous.Verdict("", decision={"attempt": 3, "members": [0, 1, 2]})
    outcome = rendezvous.Outcome(verdict, [Peer(2, "c", ours)])
    monkeypatch.setattr(rendezvous, "vote", lambda *given, **more: outcome)
    events, found = queue.SimpleQueue(), queue.SimpleQueue()
    signals = types.SimpleNamespace(came=lambda: False)
    first = supervisor.Supervisor(
        Config(), Cluster(3, 0, "127.0.0.1:1"), process=None, signals=signals, events=events
    )
    third = Links(2, [Peer(0, "a", theirs)], on_end=found.put)
    _, links = first._agree(Report(2, "killed"), "")
    assert events.get(timeout=10).attempt == 3
    assert "ended as the attempt began" in found.get(timeout=10).reason
    links.close()
    third.close()
