"""`jaxtrain train --supervise`: a run whose processes or supervisors are killed goes on by itself,
and ends in order when it is asked to, or cannot go on. Real processes, real kills."""

import contextlib
import errno
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types

import pytest

from jaxtrain.config import Config
from jaxtrain.config.schema import Supervise
from jaxtrain.parallel import supervised_attempt
from jaxtrain.parallel.cluster import Cluster, Links, rendezvous
from jaxtrain.parallel.cluster.links import Loss, Peer
from jaxtrain.parallel.layout import LayoutError
from jaxtrain.parallel.lease import LostWorkdirError
from jaxtrain.run import verify
from jaxtrain.supervise import attempts, steps_in_memory, supervisor
from jaxtrain.supervise.attempts import Report
from jaxtrain.supervise.warm_process import Ended
from tests.support.processes import ROOT, free_port, ids, records, step_of, wait_for
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
import builtins, os
from loaders.base import DataError
from tests.support import proxy_loader
from tests.support.proxy_loader import Config, dataset_info, element_spec

class Failing(proxy_loader.Proxy):
    def __next__(self):
        position, batch = super().__next__()
        if position >= 4:
            raise getattr(builtins, os.environ["FAILS"], DataError)("this host's disk is gone")
        return position, batch

def make_loader(config, **given):
    loader = proxy_loader.make_loader(config, **given)
    if given["split"] == "train":
        loader = Failing(loader, given["split"], given["rows"])
    return loader
"""


@pytest.mark.parametrize(
    "error", ["RuntimeError", pytest.param("DataError", marks=pytest.mark.slow)]
)
def test_a_crash_loop_ends_with_the_cause_of_each_attempt(folder, error):
    """Also if each attempt ends with 2, after the run's first step."""
    (folder / "failing.py").write_text(FAILING_LOADER)
    options = ("--config.loader=failing", "--config.supervise.idle=2")
    run = supervised(folder, *ENDLESS, *options, FAILS=error)
    (output,) = outputs_of([run])
    assert run.returncode == 1, output
    assert "2 attempts in a row made no progress (config.supervise.idle)" in output, output
    given_up = output[output.index("the run is given up") :]
    assert given_up.count("this host's disk is gone") == 3, output
    assert [start.facts["attempt"] for start in starts(folder)] == [0, 1, 2]


def test_an_error_of_the_config_ends_all_at_once(folder):
    both = several(folder, "--config.mesh.model=3")
    outputs = outputs_of(both)
    assert [process.returncode for process in both] == [2, 2], outputs
    assert "attempt 1" not in outputs[0] and "mesh" in outputs[0]


def test_an_error_to_fix_is_final_before_the_first_step_alone():
    config = Config()
    assert attempts.is_final(2, config, has_trained=False)
    assert not attempts.is_final(2, config, has_trained=True)
    for begun in (True, False):
        for code in (0, 78, 130, 137, config.preemption.exit_code):
            assert attempts.is_final(code, config, has_trained=begun), code
        for code in (1, 70, 74, -9):
            assert not attempts.is_final(code, config, has_trained=begun), code


def test_an_error_of_one_process_has_its_code_before_the_others_end():
    """Else their end is the cause, and this process has no code but that of lost ones."""
    environment = os.environ | supervised_attempt.Attempt(1).to_environment()
    command = [sys.executable, "-c", WITH_AN_ERROR]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment
    )
    assert process.returncode == 2, process.stderr
    seconds, until_the_end = re.findall(r"within (\S+) s", process.stdout)[0], 5
    assert float(seconds) > until_the_end + 1, "for the others"


WITH_AN_ERROR = """
import json, socket, threading, time
from jaxtrain.parallel.cluster.links import Links, Peer
from loaders.io.checks import UserError
with socket.create_server(("127.0.0.1", 0)) as listener:
    one = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
def read():
    message = json.loads(other.recv(10_000)[4:])
    print("within", message["seconds"], "s", flush=True)
threading.Thread(target=read, daemon=True).start()
Links(0, [Peer(1, "b", one)]).report_error(UserError("no device"))
time.sleep(30)  # as JAX's end, which waits for the other process
"""


def test_an_error_that_no_restart_mends_has_a_code_of_its_own(monkeypatch):
    wrong, local = verify.WrongStepError("cpu 1 computes wrong"), LayoutError("no device")
    lost, other = LostWorkdirError("another run has it"), ValueError("of this code")
    errors = (wrong, local, lost, other)
    assert [supervised_attempt.code_of(error) for error in errors] == [0, 0, 0, 0]
    for name, text in supervised_attempt.Attempt(1).to_environment().items():
        monkeypatch.setenv(name, text)
    assert [supervised_attempt.code_of(error) for error in errors] == [78, 2, 78, 0]


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


class StandIn:
    """A process of a run that cannot be started, or that ends with a code at once."""

    def __init__(self, events, code, error=None):
        self._events = events
        self._code = code
        self._error = error

    def start(self, environment, argv):
        if self._error:
            raise self._error
        self._events.put(Ended(self._code))


def first_of_two(tmp_path, code=0, error=None, **options):
    """Return process 0's supervisor, its links, those of process 1, and the losses seen there."""
    events, found = queue.SimpleQueue(), queue.SimpleQueue()
    config = Config(workdir=str(tmp_path), **options)
    signals = types.SimpleNamespace(came=lambda: False, code=75)
    first = supervisor.Supervisor(
        config,
        Cluster(2, 0, "127.0.0.1:1"),
        process=StandIn(events, code, error),
        signals=signals,
        events=events,
    )
    ours, theirs = tcp_pair()
    links = Links(0, [Peer(1, "b", ours)], on_end=lambda loss: None)
    return first, links, Links(1, [Peer(0, "a", theirs)], on_end=found.put), found


def decision_of(attempt):
    decision = {"attempt": attempt, "cause": "", "members": [0, 1], "hosts": ["a", "b"]}
    return decision | {"run": "f" * 32, "argv": [], "coordinator": "127.0.0.1:1", "idle": 0}


@pytest.mark.parametrize(
    ("attempt", "error", "code", "final"),
    [
        (0, steps_in_memory.SharedMemoryError("no room in /dev/shm"), 2, 2),
        (3, steps_in_memory.SharedMemoryError("no room in /dev/shm"), 2, None),
        (0, OSError(errno.ENOMEM, "no memory for a process"), 1, None),
        (0, OSError(errno.ENOSPC, "no room for a process"), 74, None),
    ],
)
def test_a_process_that_cannot_be_started_ends_the_attempt_of_all(
    tmp_path, attempt, error, code, final
):
    first, links, second, found = first_of_two(tmp_path, error=error)
    first._waiting_room = lambda attempt: contextlib.nullcontext()
    outcome = first._attempt(decision_of(attempt), links, is_new=attempt == 0)
    loss = found.get(timeout=10)
    assert f"ended with code {code}: " in loss.reason and "no " in loss.reason
    assert loss.code == (final or 0) and outcome.code == final
    assert outcome.report.of_disk == (code == 74) and outcome.report.cause == loss.reason
    links.close()
    second.close()


def test_a_supervisor_that_fails_leaves_no_other_one_waiting(tmp_path, monkeypatch):
    """The end of its links alone would be that of a supervisor whose process goes on."""
    first, links, second, found = first_of_two(tmp_path)
    monkeypatch.setattr(first, "_agree", lambda report, refusal: ({"code": 0}, links))
    monkeypatch.setattr(first, "_take_lease", lambda closing: "")
    with pytest.raises(KeyError):  # of a decision without an attempt
        first.run()
    assert "the supervisor of process 0" in found.get(timeout=10).reason
    second.close()


@pytest.mark.parametrize("wait", [0, 5])
def test_a_host_that_was_taken_back_with_an_error_to_fix_ends_alone(tmp_path, wait):
    """With supervise.wait. Without it, all of them try again until the run is given up."""
    first, links, second, found = first_of_two(tmp_path, code=2, supervise=Supervise(wait=wait))
    first._waiting_room = lambda attempt: contextlib.nullcontext()
    outcome = first._attempt(decision_of(3), links, is_new=True)
    assert (outcome.code, outcome.is_alone) == ((2, True) if wait else (None, False))
    loss = found.get(timeout=10)
    assert loss.code == 0 and "ended with code 2" in loss.reason
    links.close()
    second.close()
    first, links, second, found = first_of_two(tmp_path, code=2, supervise=Supervise(wait=wait))
    first._waiting_room = lambda attempt: contextlib.nullcontext()
    outcome = first._attempt(decision_of(3), links, is_new=False)
    assert outcome.code is None, "it has been here before"
    links.close()
    second.close()


def test_a_supervisor_votes_before_it_waits_for_a_full_disk(tmp_path, monkeypatch):
    """The others would go on without it once supervise.wait is over."""
    did = []
    first, *others, _ = first_of_two(tmp_path)
    reports = [Report(0, "full", of_disk=True), Report(1, "full", of_disk=True)]
    outcomes = [supervisor.Outcome(report) for report in reports]
    outcomes.append(supervisor.Outcome(reports[0], 0))

    def agree(report, refusal):
        did.append("vote")
        return {"code": 0}, Links(0, [])

    def attempt(decision, links, *, is_new):
        did.append("attempt")
        return outcomes.pop(0)

    def wait(folders, seconds, leave):
        did.append(f"wait {seconds:.0f}")
        assert str(tmp_path) in folders and tempfile.gettempdir() in folders
        assert not leave()

    monkeypatch.setattr(first, "_agree", agree)
    monkeypatch.setattr(first, "_attempt", attempt)
    monkeypatch.setattr(first, "_take_lease", lambda closing: "")
    monkeypatch.setattr(supervisor.full_disk, "wait", wait)
    assert first.run() == 0
    assert did == "vote,attempt,vote,wait 5,attempt,vote,wait 10,attempt".split(",")
    for links in others:
        links.close()


def test_the_wait_for_a_full_disk_ends_with_the_process_of_another_host(tmp_path):
    first, links, second, _ = first_of_two(tmp_path)
    second.report_loss(Loss("process 1 (b) was killed by SIGKILL"))
    wait_for(lambda: links.has_loss, seconds=10)
    began = time.monotonic()
    first._await_disk(Report(1, "full", of_disk=True), links)
    assert time.monotonic() - began < 4, "of 5 s"
    links.close()
    second.close()
