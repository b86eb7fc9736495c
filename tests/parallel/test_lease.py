"""The lease of a workdir: real processes are killed and delayed, on disks and in a stand-in for an
object store."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.parallel import cluster as cluster_lib
from jaxtrain.parallel import lease as lease_lib
from jaxtrain.parallel.lease import Lease, WorkdirError
from jaxtrain.run.process_context import ProcessContext
from jaxtrain.telemetry import writers
from tests.support import object_store
from tests.support.processes import ROOT, cluster, command, free_port, wait_for

# A process that takes the lease, reports it, and follows commands on its standard input.
PROGRAM = """
import os, random, sys, time
from jaxtrain.parallel import lease
delay = float(os.environ.get("DELAY", 0))
def slow(self, read=lease.Folder._read):  # every look is followed by a pause, in which others act
    found = read(self)
    time.sleep(random.random() * delay)
    return found
lease.Folder._read = slow
lease.RENEWAL = 0.2
lease.LEASE_TIMEOUT = float(os.environ.get("LEASE_TIMEOUT", 60))
if os.environ.get("ELSEWHERE"):
    here = lease.this_process()
    lease.this_process = lambda: here._replace(machine=os.environ["ELSEWHERE"])
try:
    with lease.Lease(sys.argv[1:]) as held:
        print("holder", flush=True)
        for line in sys.stdin:
            if line == "fork\\n" and not os.fork():
                time.sleep(60)
            if line == "end\\n":
                break
            held.confirm(saving=True)
            print("confirmed", flush=True)
except lease.WorkdirError as error:
    print("error:", error, flush=True)
"""


class Process:
    """A process that runs `PROGRAM`."""

    def __init__(self, *folders, **environment):
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, folders)], env=environment, text=True, **pipes
        )

    def says(self):
        return self.popen.stdout.readline().strip()

    def do(self, what="confirm"):
        self.popen.stdin.write(f"{what}\n")
        self.popen.stdin.flush()
        return "" if what == "end" else self.says()

    def kill(self):
        self.popen.kill()
        self.popen.wait()

    def end(self):
        self.popen.communicate("end\n", timeout=60)


@pytest.fixture
def start():
    started = []

    def make(*folders, **environment):
        started.append(Process(*folders, **environment))
        return started[-1]

    yield make
    for process in started:
        if process.popen.poll() is None:
            process.kill()
        process.popen.stdin.close()
        process.popen.stdout.close()


def content(**fields):
    """The content of this process's lease, with other values in some fields."""
    return json.dumps(lease_lib.this_process()._asdict() | fields).encode()


def dead(folder, **fields):
    """The lease of a process that has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder.mkdir(exist_ok=True)
    (folder / "lease.json").write_bytes(content(pid=gone.pid, start="12345", **fields))


def old(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_second_run_is_refused_by_name(tmp_path, start):
    first = start(tmp_path)
    assert first.says() == "holder"
    holder = json.loads((tmp_path / "lease.json").read_text())
    assert (
        holder["pid"] == first.popen.pid
        and holder["host"]
        and holder["machine"]
        and holder["start"]
    )
    message = start(tmp_path).says()
    assert str(tmp_path) in message and f"process {first.popen.pid} on {holder['host']}" in message
    assert f"since {holder['since']}" in message and "last heard of" in message
    assert "config.workdir" in message and f"`kill {first.popen.pid}`" in message
    assert first.do() == "confirmed"
    first.end()
    assert list(tmp_path.iterdir()) == []
    assert start(tmp_path).says() == "holder"


def test_the_lease_of_a_killed_run_is_taken_over_at_once_even_if_its_child_lives(tmp_path, start):
    first = start(tmp_path)
    assert first.says() == "holder" and first.do("fork") == "confirmed"
    first.popen.send_signal(signal.SIGKILL)  # not waited for: a zombie
    second = start(tmp_path)
    assert second.says() == "holder" and second.do() == "confirmed"


def test_a_holder_that_is_stopped_is_alive(tmp_path, start):
    first = start(tmp_path)
    assert first.says() == "holder"
    first.popen.send_signal(signal.SIGSTOP)
    old(tmp_path / "lease.json", 3600)
    assert "in use" in start(tmp_path).says()
    first.popen.send_signal(signal.SIGCONT)
    assert first.do() == "confirmed"


def test_the_number_of_a_process_that_is_gone_may_be_anothers_now(tmp_path):
    # This very process, with another start time.
    (tmp_path / "lease.json").write_bytes(content(start="77"))
    with Lease([str(tmp_path)]) as lease:
        lease.confirm()


@pytest.mark.parametrize("trials", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_of_many_contenders_for_an_expired_lease_one_takes_over(tmp_path, start, trials):
    for trial in range(trials):
        folder = tmp_path / str(trial)
        dead(folder)
        many = [start(folder, DELAY="0.3") for _ in range(4)]
        said = [process.says() for process in many]
        assert said.count("holder") == 1 and sum("in use" in text for text in said) == 3, said
        assert many[said.index("holder")].do() == "confirmed"
        assert [p.name for p in folder.iterdir()] == ["lease.json"]


def test_of_many_runs_that_start_at_once_one_trains(tmp_path, start):
    many = [start(tmp_path, DELAY="0.3") for _ in range(4)]
    said = [process.says() for process in many]
    assert said.count("holder") == 1 and sum("in use" in text for text in said) == 3, said
    assert many[said.index("holder")].do() == "confirmed"


def test_a_contender_that_is_killed_while_it_writes_stops_nobody(tmp_path, start):
    """The killed contender leaves TensorStore's lock file of the lease behind."""
    dead(tmp_path)
    (tmp_path / "lease.json.__lock").write_bytes(b"half")
    assert start(tmp_path).says() == "holder"


def test_another_machine_counts_as_dead_after_the_lease_timeout_and_alive_after_a_heartbeat(
    tmp_path, start
):
    there = start(tmp_path, ELSEWHERE="there")
    assert there.says() == "holder"
    message = start(tmp_path, LEASE_TIMEOUT="30").says()  # it notices a heartbeat
    assert (
        "in use" in message
        and f"`kill {there.popen.pid} on" in message
        and "60 s after" not in message
    )
    there.popen.send_signal(signal.SIGSTOP)
    here = start(tmp_path, LEASE_TIMEOUT="2")
    assert here.says() == "holder" and here.do() == "confirmed"
    there.popen.send_signal(signal.SIGCONT)
    assert "was taken over by another run" in there.do()
    there.end()
    assert here.do() == "confirmed"
    here.end()
    dead(tmp_path, machine="there")
    old(tmp_path / "lease.json", 61)
    assert start(tmp_path).says() == "holder"


@pytest.mark.parametrize("seconds", [-1e9, -100])
def test_a_heartbeat_of_the_future_is_waited_for_once(tmp_path, start, seconds):
    dead(tmp_path, machine="there")
    old(tmp_path / "lease.json", seconds)
    assert start(tmp_path, LEASE_TIMEOUT="2").says() == "holder"


def test_a_requeued_job_takes_its_own_over_and_no_others(tmp_path, start):
    job = dict(SLURM_JOB_ID="17", ELSEWHERE="node1")
    assert start(tmp_path, **job).says() == "holder"
    job["ELSEWHERE"] = "node2"
    assert "in use" in start(tmp_path, **job).says()  # a second step of the same start
    assert (
        "in use" in start(tmp_path, **job | dict(SLURM_JOB_ID="18", SLURM_RESTART_COUNT="1")).says()
    )
    assert start(tmp_path, **job, SLURM_RESTART_COUNT="1").says() == "holder"


ODD = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{",
    "deep": b"[" * 60_000,
    "a list": b"[1, 2]",
    "numbers of other kinds": content(pid=True),
    "a negative process": content(pid=-1),
    "a huge process": content(pid=1 << 40),
    "not a number": content().replace(b'"pid": ', b'"pid": NaN, "x": '),
    "a line break in a name": content(host="a\nb"),
}


@pytest.mark.parametrize("kind", sorted(ODD))
def test_a_lease_that_cannot_be_read_expires_after_its_timeout(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(lease_lib, "LEASE_TIMEOUT", 0.5)
    (tmp_path / "lease.json").write_bytes(ODD[kind])
    with Lease([str(tmp_path)]) as lease:
        lease.confirm()
    assert list(tmp_path.iterdir()) == []


def test_a_special_or_huge_lease_file_is_refused_by_name(tmp_path):
    path = tmp_path / "lease.json"
    for make, undo in (
        (lambda: path.symlink_to("/dev/zero"), path.unlink),
        (lambda: os.mkfifo(path), path.unlink),
        (path.mkdir, path.rmdir),
        (lambda: path.write_bytes(bytes(1 << 20)), path.unlink),
    ):
        make()
        with (
            pytest.raises(
                WorkdirError, match=f"{path} cannot be written: it is not a lease; remove it"
            ),
            Lease([str(tmp_path)]),
        ):
            pass
        undo()


def test_a_lost_workdir_is_noticed_and_a_removed_lease_is_written_again(tmp_path):
    workdir = tmp_path / "run"
    with Lease([str(workdir)]) as lease:
        (workdir / "lease.json").unlink()
        lease.confirm()
        assert (workdir / "lease.json").exists()
        lease.confirm()
    for away in (shutil.rmtree, lambda path: path.rename(tmp_path / "moved")):
        with (
            pytest.raises(WorkdirError, match="was deleted or moved"),
            Lease([str(workdir)]) as lease,
        ):
            away(workdir)
            lease.confirm()
        assert not workdir.exists()
    with pytest.raises(WorkdirError, match="was deleted"), Lease([str(workdir)]):
        shutil.rmtree(workdir)  # behind the last record
        workdir.mkdir()


def test_a_wait_for_the_lease_timeout_can_be_left(tmp_path):
    dead(tmp_path, machine="there")

    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Lease([str(tmp_path)], leave=leave):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["lease.json"]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, object_store.__file__, str(port), str(tmp_path / "objects")]
    )
    for name, value in object_store.environment(port).items():
        monkeypatch.setenv(name, value)
    try:
        wait_for(lambda: (tmp_path / "objects").exists(), seconds=30, watch=[])
        yield object_store.Store(tmp_path / "objects")
    finally:
        server.kill()
        server.wait()


def test_a_folder_in_an_object_store_has_one_holder_too(tmp_path, start, bucket):
    url = "gs://bucket/run/checkpoints"

    def lease():
        return json.loads(bucket.get("bucket", "run/checkpoints/lease.json")[0])

    first = start(url)
    assert first.says() == "holder"
    taken = lease()["renewed"]
    wait_for(lambda: lease()["renewed"] > taken, seconds=60)
    assert "in use" in start(url).says() and first.do() == "confirmed"
    first.kill()
    many = [start(url, DELAY="0.3") for _ in range(3)]
    said = [process.says() for process in many]
    assert said.count("holder") == 1 and sum("in use" in text for text in said) == 2, said
    winner = many[said.index("holder")]
    assert winner.do() == "confirmed"
    winner.end()
    assert bucket.get("bucket", "run/checkpoints/lease.json") is None

    there = start(url, ELSEWHERE="there")
    assert there.says() == "holder"
    assert "in use" in start(url, LEASE_TIMEOUT="30").says()
    there.popen.send_signal(signal.SIGSTOP)
    here = start(url, LEASE_TIMEOUT="2")
    assert here.says() == "holder"
    there.popen.send_signal(signal.SIGCONT)
    assert "was taken over by another run" in there.do()
    there.end()
    assert here.do() == "confirmed"
    bucket.delete("bucket", "run/checkpoints/lease.json")
    assert here.do() == "confirmed" and lease()["pid"] == here.popen.pid


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    for name, value in object_store.environment(free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lease_lib, "STORE_TIMEOUT", 0.5)
    with pytest.raises(
        WorkdirError,
        match="gs://bucket/run/lease.json cannot be written: .*config.checkpoint.folder",
    ):
        Lease(["gs://bucket/run"]).__enter__()


def test_a_second_run_in_a_workdir_is_refused_in_all_its_processes(folder, start):
    workdir = folder / "runs" / "toy"
    first = start(workdir)
    assert first.says() == "holder"
    before = {p.name for p in workdir.iterdir()}
    for process in cluster(folder, "toy.py", processes=2):
        output = process.communicate(timeout=120)[0]
        assert (
            process.returncode == 2
            and f"is in use by another run: process {first.popen.pid} on " in output
        ), output
        assert "Traceback" not in output
    assert first.do() == "confirmed" and {p.name for p in workdir.iterdir()} - before <= {"logs"}


def test_a_workdir_that_is_deleted_ends_the_run_with_a_code(folder):
    process = command(
        folder, "toy.py", "--config.train.steps=100000", "--config.train.eval_every=0"
    )
    workdir = folder / "runs" / "toy"
    wait_for(lambda: (workdir / "metrics.jsonl").exists(), watch=[process])
    assert f"process {process.pid} on " in command(folder, "toy.py").communicate(timeout=60)[0]
    workdir.rename(folder / "moved")  # in one atomic operation, as the last step of a deletion
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "was deleted or moved while the run wrote to it" in output, (
        output
    )
    assert "Traceback" not in output, output


@pytest.mark.parametrize("where", [lambda host: host.writing(), contextlib.nullcontext])
def test_a_file_that_went_with_its_workdir_is_no_error_of_the_file(tmp_path, caplog, where):
    workdir = tmp_path / "run"
    picture = workdir / "pictures" / "augmented_3.png"
    with (
        pytest.raises(WorkdirError, match="was deleted or moved while the run"),
        ProcessContext.join(config_lib.Config(workdir=str(workdir))) as h,
    ):
        with where(h):
            workdir.rename(tmp_path / "moved")
            writers.write_pictures(picture.parent, {"augmented": np.zeros((4, 8, 8))})
    assert not workdir.exists(), "a folder in its place would keep it from being moved back"
    assert "goodput" not in caplog.text  # of no time, as its file is gone
    with (
        pytest.raises(FileNotFoundError),
        ProcessContext.join(config_lib.Config(workdir=str(workdir))) as h,
    ):
        with where(h):
            picture.touch()


def test_a_workdir_that_process_0_lost_ends_every_process(monkeypatch):
    def process(found):
        signals = cluster_lib.StopSignals(())
        signals.close()
        return ProcessContext(
            config_lib.Config(workdir="runs/toy"),
            processes=2,
            signals=signals,
            lease=types.SimpleNamespace(confirm=lambda saving=False: found() if found else None),
            console=None,
            watchdog=types.SimpleNamespace(beat=None, starting=None),
            clock=None,
            links=cluster_lib.Links(0, []),
        )

    def gone():
        raise WorkdirError("runs/toy was deleted")

    first, second = process(gone), process(None)
    # between two steps: they stop at the next one, as for a signal
    first.lose(WorkdirError("the first"))
    assert first.stopping() and first.has_lost and not second.stopping()
    third = process(gone)
    with third.writing():
        raise FileNotFoundError(
            errno.ENOENT, "No such file or directory", "runs/toy/pictures/augmented_3.png"
        )
    assert third.stopping() and third.has_lost
    for host, agreed, said in (
        (first, lambda own: own, "the first"),
        (third, lambda own: own, "runs/toy was deleted"),
        (process(gone), lambda own: own, "runs/toy was deleted"),
        (second, lambda own: True, "process 0 of this run says which"),
    ):
        monkeypatch.setattr(cluster_lib, "agree", agreed)
        with pytest.raises(WorkdirError, match=said):
            host.confirm()
    monkeypatch.setattr(cluster_lib, "agree", lambda own: own)
    process(None).confirm(saving=True)


@pytest.mark.slow
def test_a_workdir_that_is_deleted_ends_every_process_with_a_code(folder):
    args = (folder, "toy.py", "--config.train.steps=100000", "--config.train.eval_every=0")
    both = cluster(*args, processes=2)
    workdir = folder / "runs" / "toy"
    wait_for(
        lambda: (workdir / "metrics.jsonl").exists() and (workdir / "metrics.jsonl").stat().st_size,
        watch=both,
    )
    workdir.rename(folder / "moved")
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], outputs
    assert (
        "was deleted or moved while the run wrote to it" in outputs[0]
        and "process 0 of this run says which" in outputs[1]
    )
    assert "Traceback" not in "".join(outputs), outputs


def test_lines_that_are_no_records_are_set_aside_and_told(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = [
        b'{"step": 1, "split": "train", "loss": 2.0}',
        b'{"step": 2, "split": "train", "loss": null}',
    ]
    odd = [
        b'{"step": 1, "split": "train", "loss": "\xff"}',
        b'{"step": "2", "split": "train"}',
        b'{"step": true, "split": "train"}',
        b'{"step": 1.5, "split": "train"}',
        b'{"step": 1}',
        b'{"step": 1, "split": []}',
        b'{"step": 1, "split": "train", "loss": {"a": 1}}',
        b"[" * 100_000,
        b"[1]",
        b"\x00" * 10,
        b'{"step": 2, "split": "tr',
    ]
    path.write_bytes(b"\n".join([good[0], *odd[:-1], good[1], odd[-1]]))
    writer = writers.JsonlWriter(str(tmp_path), 2)
    writer.write(3, "train", {"loss": 1.0})
    writer.close()
    assert path.read_bytes() == b"\n".join([*good, b'{"step": 3, "split": "train", "loss": 1.0}\n'])
    assert (tmp_path / "metrics.jsonl.odd").read_bytes().split(b"\n") == [*odd, b""]
    assert (
        "11 lines are no records and were moved to metrics.jsonl.odd (line 2: it is not UTF-8"
        in caplog.text
    )
    path.write_bytes(path.read_bytes() + b"\xff\n")
    assert writers.is_written(str(tmp_path), 3, "train") and not writers.is_written(
        str(tmp_path), 3, "test"
    )


def test_samples_with_odd_lines_are_continued(tmp_path):
    path = tmp_path / "generations.jsonl"
    path.write_bytes(b'{"step": 1, "text": "\xc2\x85 \xe2\x80\xa8"}\n\xff\n{"step": 3}\n')
    writers.write_lines(str(tmp_path), writers.GENERATIONS, 2, [{"text": "b"}])
    assert (
        path.read_bytes()
        == b'{"step": 1, "text": "\xc2\x85 \xe2\x80\xa8"}\n{"step": 2, "text": "b"}\n'
    )
    assert (tmp_path / "generations.jsonl.odd").read_bytes() == b"\xff\n"


def test_records_that_are_no_file_are_refused_by_name(tmp_path):
    for name, write in (
        ("metrics.jsonl", lambda: writers.JsonlWriter(str(tmp_path), 0)),
        ("metrics.jsonl", lambda: writers.is_written(str(tmp_path), 0, "test")),
        (
            "generations.jsonl",
            lambda: writers.write_lines(str(tmp_path), "generations.jsonl", 1, [{}]),
        ),
    ):
        path = tmp_path / name
        for make, undo in (
            (lambda p: p.symlink_to("/dev/zero"), os.unlink),
            (os.mkfifo, os.unlink),
            (os.mkdir, os.rmdir),
        ):
            make(path)
            with pytest.raises(WorkdirError, match=f"{path} is a link, a folder or a device"):
                write()
            undo(path)


def test_records_that_were_deleted_are_missed(tmp_path):
    writer = writers.JsonlWriter(str(tmp_path), 0)
    writer.write(1, "train", {"loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(WorkdirError, match="was deleted or moved"):
        writer.write(2, "train", {"loss": 1.0})
    with pytest.raises(WorkdirError, match="was deleted or moved"):
        writer.close()
