"""One owner of a workdir: real processes, killed and delayed, on disks and in a stand-in for an object store."""

import contextlib
import dataclasses
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
from jaxtrain.parallel.lease import Owner, WorkdirError, disk, store, who
from jaxtrain.process_context import Host
from jaxtrain.telemetry import writers
from tests.support import object_store
from tests.test_reliability import cluster, wait_for
from tests.test_train import ROOT, command, corpus, folder, free_port  # noqa: F401

# A process that becomes the owner, says so, and does what its standard input says.
PROGRAM = """
import os, random, sys, time
from jaxtrain.parallel import lease as owner
from jaxtrain.parallel.lease import disk, store, who
delay = float(os.environ.get("DELAY", 0))
for kind in (disk.Disk, store.Store):  # every look is followed by a pause, in which others act
    def slow(self, *args, look=kind._read):
        found = look(self, *args)
        time.sleep(random.random() * delay)
        return found
    kind._read = slow
who.BEAT = owner.BEAT = 0.2
who.SILENCE = float(os.environ.get("SILENCE", 60))
if os.environ.get("ELSEWHERE"):
    who._boot_id = lambda: os.environ["ELSEWHERE"]
try:
    with owner.Owner(sys.argv[1:]) as mine:
        print("owner", flush=True)
        for line in sys.stdin:
            if line == "fork\\n" and not os.fork():
                time.sleep(60)
            if line == "end\\n":
                break
            mine.confirm(saving=True)
            print("confirmed", flush=True)
except owner.WorkdirError as error:
    print("error:", error, flush=True)
"""


class Process:
    """One of them."""

    def __init__(self, *folders, **environment):
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.popen = subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, folders)], env=environment, text=True, **pipes)

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


def dead(folder, **fields):  # noqa: F811
    """The owner.json of a process that is no more."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    me = dataclasses.replace(who.here(), pid=gone.pid, start=12345, **fields)
    folder.mkdir(exist_ok=True)
    (folder / "owner.json").write_bytes(me.to_json())
    return me


def old(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_second_start_is_told_who_since_when_and_what_frees_it(tmp_path, start):
    first = start(tmp_path)
    assert first.says() == "owner"
    content = json.loads((tmp_path / "owner.json").read_text())
    assert content["pid"] == first.popen.pid and content["host"] and content["boot"] and content["start"]
    message = start(tmp_path).says()
    assert str(tmp_path) in message and f"process {first.popen.pid} on {content['host']}" in message
    assert f"since {content['since']}" in message and "last heard of" in message
    assert "config.workdir" in message and f"`kill {first.popen.pid}`" in message
    assert first.do() == "confirmed"
    first.end()
    assert list(tmp_path.iterdir()) == []
    assert start(tmp_path).says() == "owner"


def test_a_killed_owner_is_followed_at_once_even_where_its_child_lives(tmp_path, start):
    first = start(tmp_path)
    assert first.says() == "owner" and first.do("fork") == "confirmed"
    first.popen.send_signal(signal.SIGKILL)  # not waited for: a zombie
    second = start(tmp_path)
    assert second.says() == "owner" and second.do() == "confirmed"


def test_an_owner_that_is_stopped_is_alive(tmp_path, start):
    first = start(tmp_path)
    assert first.says() == "owner"
    first.popen.send_signal(signal.SIGSTOP)
    old(tmp_path / "owner.json", 3600)
    assert "in use" in start(tmp_path).says()
    first.popen.send_signal(signal.SIGCONT)
    assert first.do() == "confirmed"


def test_the_number_of_a_process_that_is_gone_may_be_anothers_now(tmp_path):
    me = dataclasses.replace(who.here(), start=77)  # this very process, which began at another time
    (tmp_path / "owner.json").write_bytes(me.to_json())
    with Owner([str(tmp_path)]) as owner:
        owner.confirm()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_of_many_that_find_a_dead_owner_one_goes_on(tmp_path, start, links):
    for trial in range(2):
        folder = tmp_path / str(trial)  # noqa: F811
        dead(folder)
        delays = dict(DELAY="0.3", PYTHONPATH=f"{tmp_path}:{ROOT}")
        if not links:
            (tmp_path / "sitecustomize.py").write_text(
                "import os\ndef link(*_, **__): raise OSError(95, 'Operation not supported')\nos.link = link\n"
            )
        many = [start(folder, **delays) for _ in range(4)]
        said = [process.says() for process in many]
        assert said.count("owner") == 1 and sum("in use" in text for text in said) == 3, said
        assert many[said.index("owner")].do() == "confirmed"
        assert [p.name for p in folder.iterdir()] == ["owner.json"]


def test_one_that_is_killed_while_it_takes_over_stops_nobody(tmp_path):
    """It has won the right to replace a dead owner, and is gone: so is the one that would have replaced it."""
    gone = [dead(tmp_path, token=f"{i:032x}") for i in range(3)]
    (tmp_path / "owner.json").write_bytes(gone[0].to_json())
    rivals = [disk.Disk(str(tmp_path), me, lambda: None) for me in gone[1:]]
    for rival in rivals:
        with rival._own_file() as own:
            assert rival._win("owner.json", gone[0].to_json(), own, [])
    with Owner([str(tmp_path)]) as owner:
        owner.confirm()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["owner.json"]


def test_another_machine_is_believed_dead_after_its_silence_and_alive_by_a_sign(tmp_path, start):
    there = start(tmp_path, ELSEWHERE="there")
    assert there.says() == "owner"
    message = start(tmp_path, SILENCE="30").says()  # it hears a heartbeat
    assert "in use" in message and f"`kill {there.popen.pid} on" in message and "60 s after" not in message
    there.popen.send_signal(signal.SIGSTOP)
    here = start(tmp_path, SILENCE="2")
    assert here.says() == "owner" and here.do() == "confirmed"
    there.popen.send_signal(signal.SIGCONT)
    assert "was taken over by another run" in there.do()
    there.end()
    assert here.do() == "confirmed"
    here.end()
    dead(tmp_path, boot="there")
    old(tmp_path / "owner.json", 61)
    assert start(tmp_path).says() == "owner"


@pytest.mark.parametrize("seconds", [-1e9, -100])
def test_a_heartbeat_of_the_future_is_waited_for_once(tmp_path, start, seconds):
    dead(tmp_path, boot="there")
    old(tmp_path / "owner.json", seconds)
    assert start(tmp_path, SILENCE="2").says() == "owner"


def test_a_requeued_job_takes_its_own_over_and_no_others(tmp_path, start):
    job = dict(SLURM_JOB_ID="17", ELSEWHERE="node1")
    assert start(tmp_path, **job).says() == "owner"
    job["ELSEWHERE"] = "node2"
    assert "in use" in start(tmp_path, **job).says()  # a second step of the same start
    assert "in use" in start(tmp_path, **job | dict(SLURM_JOB_ID="18", SLURM_RESTART_COUNT="1")).says()
    assert start(tmp_path, **job, SLURM_RESTART_COUNT="1").says() == "owner"


ODD = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{",
    "deep": b"[" * 60_000,
    "a list": b"[1, 2]",
    "numbers of other kinds": who.here().to_json(pid=True),
    "a negative process": who.here().to_json(pid=-1),
    "a huge process": who.here().to_json(pid=1 << 40),
    "not a number": who.here().to_json().replace(b'"pid": ', b'"pid": NaN, "x": '),
    "a line break in a name": who.here().to_json(host="a\nb"),
    "a path as a token": who.here().to_json(token="../../x"),
}


@pytest.mark.parametrize("kind", sorted(ODD))
def test_an_owner_that_cannot_be_read_is_believed_dead_after_its_silence(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(who, "SILENCE", 0.5)
    (tmp_path / "owner.json").write_bytes(ODD[kind])
    with Owner([str(tmp_path)]) as owner:
        owner.confirm()
    assert list(tmp_path.iterdir()) == []


def test_what_no_run_writes_under_that_name_is_refused_by_name(tmp_path):
    path = tmp_path / "owner.json"
    for make, undo in (
        (lambda: path.symlink_to("/dev/zero"), path.unlink),
        (lambda: os.mkfifo(path), path.unlink),
        (path.mkdir, path.rmdir),
        (lambda: path.write_bytes(bytes(1 << 20)), path.unlink),
    ):
        make()
        with pytest.raises(WorkdirError, match=f"{path} is .*remove it"), Owner([str(tmp_path)]):
            pass
        undo()


def test_what_went_away_is_noticed_and_what_was_only_removed_is_written_again(tmp_path):
    workdir = tmp_path / "run"
    with Owner([str(workdir)]) as owner:
        (workdir / "owner.json").unlink()
        owner.confirm()
        assert (workdir / "owner.json").exists()
        owner.confirm()
    for away in (shutil.rmtree, lambda path: path.rename(tmp_path / "moved")):
        with pytest.raises(WorkdirError, match="was deleted or moved"), Owner([str(workdir)]) as owner:
            away(workdir)
            owner.confirm()
        assert not workdir.exists()
    with pytest.raises(WorkdirError, match="was deleted"), Owner([str(workdir)]):
        shutil.rmtree(workdir)  # behind the last record
        workdir.mkdir()


def test_leftovers_of_killed_processes_are_swept_and_young_ones_are_not(tmp_path):
    for name, age in (("owner.json.0123", 3600), ("owner.json.4567", 1), ("owner.json.d", 3600), ("other", 3600)):
        (tmp_path / name).touch()
        old(tmp_path / name, age)
    with Owner([str(tmp_path)]):
        assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "owner.json", "owner.json.4567"]


def test_a_wait_for_silence_can_be_left(tmp_path):
    dead(tmp_path, boot="there")

    def leave():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Owner([str(tmp_path)], leave=leave):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["owner.json"]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    port = free_port()
    server = subprocess.Popen([sys.executable, object_store.__file__, str(port), str(tmp_path / "objects")])
    for name, value in object_store.environment(port).items():
        monkeypatch.setenv(name, value)
    try:
        wait_for(lambda: (tmp_path / "objects").exists(), seconds=30, watch=[])
        yield object_store.Store(tmp_path / "objects")
    finally:
        server.kill()
        server.wait()


def test_a_folder_in_an_object_store_has_one_owner_too(tmp_path, start, bucket):
    url = "gs://bucket/run/checkpoints"

    def content():
        return json.loads(bucket.get("bucket", "run/checkpoints/owner.json")[0])

    first = start(url)
    assert first.says() == "owner"
    wait_for(lambda: content()["beats"] > 2, seconds=60)
    assert "in use" in start(url).says() and first.do() == "confirmed"
    first.kill()
    many = [start(url, DELAY="0.3") for _ in range(3)]
    said = [process.says() for process in many]
    assert said.count("owner") == 1 and sum("in use" in text for text in said) == 2, said
    winner = many[said.index("owner")]
    assert winner.do() == "confirmed"
    winner.end()
    assert bucket.get("bucket", "run/checkpoints/owner.json") is None

    there = start(url, ELSEWHERE="there")
    assert there.says() == "owner"
    assert "in use" in start(url, SILENCE="30").says()
    there.popen.send_signal(signal.SIGSTOP)
    here = start(url, SILENCE="2")
    assert here.says() == "owner"
    there.popen.send_signal(signal.SIGCONT)
    assert "was taken over by another run" in there.do()
    there.end()
    assert here.do() == "confirmed"
    bucket.delete("bucket", "run/checkpoints/owner.json")
    assert here.do() == "confirmed" and content()["pid"] == here.popen.pid


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    for name, value in object_store.environment(free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "PATIENCE", 0.5)
    with pytest.raises(WorkdirError, match="gs://bucket/run/owner.json cannot be written: .*config.checkpoint.folder"):
        Owner(["gs://bucket/run"]).__enter__()


def test_a_second_run_in_a_workdir_is_refused_in_all_its_processes(folder, corpus, start):  # noqa: F811
    workdir = folder / "runs" / "tiny"
    first = start(workdir)
    assert first.says() == "owner"
    before = {p.name for p in workdir.iterdir()}
    for process in cluster(folder, f"tiny.py:{corpus}", processes=2):
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 2 and f"is in use by another run: process {first.popen.pid} on " in output, output
        assert "Traceback" not in output
    assert first.do() == "confirmed" and {p.name for p in workdir.iterdir()} - before <= {"logs"}


def test_a_workdir_that_is_deleted_ends_the_run_with_a_code(folder, corpus):  # noqa: F811
    process = command(folder, f"tiny.py:{corpus}", "--config.train.steps=100000", "--config.train.eval_every=0")
    workdir = folder / "runs" / "tiny"
    wait_for(lambda: (workdir / "metrics.jsonl").exists(), watch=[process])
    assert f"process {process.pid} on " in command(folder, f"tiny.py:{corpus}").communicate(timeout=60)[0]
    workdir.rename(folder / "moved")  # in one stroke, as the last step of a deletion
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and "was deleted or moved while the run wrote to it" in output, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("where", [lambda host: host.writing(), contextlib.nullcontext])
def test_a_file_that_went_with_its_workdir_is_no_error_of_the_file(tmp_path, caplog, where):
    workdir = tmp_path / "run"
    picture = workdir / "pictures" / "augmented_3.png"
    with (
        pytest.raises(WorkdirError, match="was deleted or moved while the run"),
        Host(config_lib.Config(workdir=str(workdir))) as h,
    ):
        with where(h):
            workdir.rename(tmp_path / "moved")
            writers.write_pictures(picture.parent, {"augmented": np.zeros((4, 8, 8))})
    assert not workdir.exists(), "a folder in its place would keep it from being moved back"
    assert "goodput" not in caplog.text  # of no time, as its file is gone
    with pytest.raises(FileNotFoundError), Host(config_lib.Config(workdir=str(workdir))) as h:
        with where(h):
            picture.touch()


def test_what_process_0_lost_is_lost_for_all(monkeypatch):
    def process(found):
        host = Host(config_lib.Config(workdir="runs/tiny"))
        host._processes, host._signals = 2, cluster_lib.StopSignals(())
        host._signals.close()
        host.owner = types.SimpleNamespace(confirm=lambda saving=False: found() if found else None)
        return host

    def gone():
        raise WorkdirError("runs/tiny was deleted")

    first, second = process(gone), process(None)
    first.lose(WorkdirError("the first"))  # between two steps: they stop at the next one, as for a signal
    assert first.stopping() and first.has_lost and not second.stopping()
    third = process(gone)
    with third.writing():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/tiny/pictures/augmented_3.png")
    assert third.stopping() and third.has_lost
    for host, agreed, said in (
        (first, lambda own: own, "the first"),
        (third, lambda own: own, "runs/tiny was deleted"),
        (process(gone), lambda own: own, "runs/tiny was deleted"),
        (second, lambda own: True, "process 0 of this run says which"),
    ):
        monkeypatch.setattr(cluster_lib, "agree", agreed)
        with pytest.raises(WorkdirError, match=said):
            host.confirm()
    monkeypatch.setattr(cluster_lib, "agree", lambda own: own)
    process(None).confirm(saving=True)


@pytest.mark.slow
def test_a_workdir_that_is_deleted_ends_every_process_with_a_code(folder, corpus):  # noqa: F811
    args = (folder, f"tiny.py:{corpus}", "--config.train.steps=100000", "--config.train.eval_every=0")
    both = cluster(*args, processes=2)
    workdir = folder / "runs" / "tiny"
    wait_for(lambda: (workdir / "metrics.jsonl").exists() and (workdir / "metrics.jsonl").stat().st_size, watch=both)
    workdir.rename(folder / "moved")
    began = time.monotonic()
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], outputs
    assert "was deleted or moved while the run wrote to it" in outputs[0] and "process 0 of this run says which" in outputs[1]
    assert time.monotonic() - began < 60 and "Traceback" not in "".join(outputs), outputs


def test_lines_that_are_no_records_are_set_aside_and_told(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 1, "split": "train", "loss": 2.0}', b'{"step": 2, "split": "train", "loss": null}']
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
    assert "11 lines are no records and were moved to metrics.jsonl.odd (line 2: it is not UTF-8" in caplog.text
    path.write_bytes(path.read_bytes() + b"\xff\n")
    assert writers.is_written(str(tmp_path), 3, "train") and not writers.is_written(str(tmp_path), 3, "test")


def test_samples_with_odd_lines_are_continued(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1, "text": "\xc2\x85 \xe2\x80\xa8"}\n\xff\n{"step": 3}\n')
    writers.write_lines(str(tmp_path), writers.SAMPLES, 2, [{"text": "b"}])
    assert path.read_bytes() == b'{"step": 1, "text": "\xc2\x85 \xe2\x80\xa8"}\n{"step": 2, "text": "b"}\n'
    assert (tmp_path / "samples.jsonl.odd").read_bytes() == b"\xff\n"


def test_records_that_are_no_file_are_refused_by_name(tmp_path):
    for name, write in (
        ("metrics.jsonl", lambda: writers.JsonlWriter(str(tmp_path), 0)),
        ("metrics.jsonl", lambda: writers.is_written(str(tmp_path), 0, "test")),
        ("samples.jsonl", lambda: writers.write_lines(str(tmp_path), "samples.jsonl", 1, [{}])),
    ):
        path = tmp_path / name
        for make, undo in ((lambda p: p.symlink_to("/dev/zero"), os.unlink), (os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
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
