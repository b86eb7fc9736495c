"""Nothing lost, for processes and hosts: promises 13, 14 and 16, and what else ends a run from outside, in real processes."""

import http.server
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from test_reliability import cluster, step_of, wait_for
from test_train import ROOT, command, corpus, folder, free_port, records, run  # noqa: F401

from jaxtrain import gce

QUIET = ("--config.train.eval_every=0", "--config.checkpoint.every=1000")


def at(port, process, processes=2):
    return {
        "JAXTRAIN_COORDINATOR": f"127.0.0.1:{port}",
        "JAXTRAIN_PROCESSES": str(processes),
        "JAXTRAIN_PROCESS": str(process),
    }


def ended(processes, *, within):
    began = time.monotonic()
    outputs = [p.communicate(timeout=within)[0] for p in processes]
    assert time.monotonic() - began < within
    return outputs


def test_promise_14_a_late_process_is_named(folder, corpus):  # noqa: F811
    port = free_port()
    both = [
        command(folder, f"tiny.py:{corpus}", "--config.distributed.init_timeout=4", **at(port, i, processes=4)) for i in (0, 2)
    ]
    for process, output in zip(both, ended(both, within=60), strict=True):
        assert process.returncode == 2 and "processes 1, 3 of 4 did not come" in output and "within 4 s" in output
        assert "Traceback" not in output and "core dumped" not in output
    logs = folder / "runs" / "tiny" / "logs"
    assert "process 2 of 4" in (logs / "process-2.log").read_text()


def test_promise_14_a_taken_port_is_told(folder, corpus):  # noqa: F811
    port = free_port()
    with socket.create_server(("", port)):
        process = command(folder, f"tiny.py:{corpus}", "--config.distributed.init_timeout=2", **at(port, 0))
        (output,) = ended([process], within=60)
    assert process.returncode == 2 and f"process 0 ({socket.gethostname()}) cannot listen on port {port}" in output


def test_promise_14_processes_that_differ_are_named_with_what_differs(folder, corpus):  # noqa: F811
    port = free_port()
    both = [
        command(folder, f"tiny.py:{corpus}", f"--config.optim.lr={lr}", **at(port, i)) for i, lr in enumerate(("1e-3", "2e-3"))
    ]
    for process, output in zip(both, ended(both, within=60), strict=True):
        assert process.returncode == 2 and "process 1" in output and "config.optim.lr is 0.002, elsewhere 0.001" in output


def test_promise_14_processes_with_different_numbers_of_devices(folder, corpus):  # noqa: F811
    port = free_port()
    both = [command(folder, f"tiny.py:{corpus}", devices=1 + i // 2, **at(port, i, processes=3)) for i in range(3)]
    for process, output in zip(both, ended(both, within=120), strict=True):
        assert process.returncode == 2 and "process 2 has 2, the others 1" in output, output


def test_promise_14_an_ssh_into_an_allocation_is_one_process(folder, corpus):  # noqa: F811
    partial = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    output = run(folder, f"tiny.py:{corpus}", "--config.train.steps=1", *QUIET, **partial)
    assert "no task of a step of SLURM job 77" in output and "one process" in output
    assert list(records(folder / "runs" / "tiny", "train")) == [1]


def test_promise_9_a_signal_to_one_process_while_it_waits_for_the_others(folder, corpus):  # noqa: F811
    port = free_port()
    both = [command(folder, f"tiny.py:{corpus}", **at(port, i, processes=3)) for i in range(2)]
    logs = [folder / "runs" / "tiny" / "logs" / f"process-{i}.log" for i in range(2)]
    wait_for(lambda: all(log.exists() and "coordinator" in log.read_text() for log in logs), watch=both)
    time.sleep(1)
    both[1].send_signal(signal.SIGTERM)
    for process, output in zip(both, ended(both, within=30), strict=True):
        assert process.returncode == 75 and "process 1" in output and "asked to stop" in output, output


@pytest.fixture
def metadata():
    """A metadata server, whose answers a test sets."""
    answers = {"maintenance-event": "NONE", "preempted": "FALSE"}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = answers.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
            known = text is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((text or "").encode() if known else b"")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", answers
        server.shutdown()


def test_promise_9_a_notice_of_maintenance_saves_and_ends(folder, corpus, metadata):  # noqa: F811
    host, answers = metadata
    overrides = ("--config.train.steps=100000", *QUIET)
    process = command(folder, f"tiny.py:{corpus}", *overrides, NO_GCE_CHECK="", GCE_METADATA_HOST=host)
    wait_for(lambda: step_of(folder / "runs" / "tiny") >= 2, watch=[process])
    answers["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"  # a machine that moves goes on
    time.sleep(6)
    assert process.poll() is None
    answers["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    (output,) = ended([process], within=60)
    assert process.returncode == 75 and "ended by maintenance-event=TERMINATE_ON_HOST_MAINTENANCE after step" in output


def test_notices_and_the_attributes_of_a_pod(metadata, monkeypatch):
    host, answers = metadata
    told = []
    notices = gce.Notices(host, told.append, pause=0.05)
    time.sleep(0.3)
    assert not told
    answers["preempted"] = "TRUE"
    wait_for(lambda: told, seconds=5)
    notices.close()
    assert told == ["preempted=TRUE"]
    assert gce.read(host, "attributes/none") is None and gce.read("127.0.0.1:1", "preempted") is None
    assert gce.server({"NO_GCE_CHECK": "true", "GCE_METADATA_HOST": "h"}) == ""
    assert gce.server({"GCE_METADATA_HOST": "h"}) == gce.server({"GCE_METADATA_IP": "h"}) == "h"
    assert gce.tpu_metadata({"GCE_METADATA_HOST": host, "TPU_SKIP_MDS_QUERY": "1"}) == {}


def test_a_loader_that_is_blocked_stops_no_other_thread(tmp_path):
    """Heartbeats are threads: were the GIL held while a file does not answer, a run would be taken for dead.

    A recording that is a pipe nobody writes into blocks whoever opens it, until the other thread does.
    """
    script = """
        import os, sys, threading, time
        import pyarrow as pa
        from loaders import _rust
        folder = sys.argv[1]
        audio = pa.array([{"bytes": None, "path": "a.wav"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        table = pa.table({"audio": audio})
        with pa.OSFile(f"{folder}/data.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        os.mkfifo(f"{folder}/a.wav")
        index = _rust.Index([f"{folder}/data.arrow"])
        ticks = 0
        def beat():
            global ticks
            while ticks < 50:
                time.sleep(0.01)
                ticks += 1
            os.close(os.open(f"{folder}/a.wav", os.O_WRONLY))
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            index.encoded(0)
        except ValueError as error:
            print(error)
        assert ticks >= 50, ticks
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0 and "a.wav" in done.stdout, done.stderr + done.stdout


@pytest.mark.slow
def test_promise_10_one_of_four_that_is_stuck(folder, corpus):  # noqa: F811
    overrides = ("--config.train.steps=100000", *QUIET, "--config.distributed.step_timeout=15")
    four = cluster(folder, f"tiny.py:{corpus}", *overrides, processes=4)
    try:
        wait_for(lambda: step_of(folder / "runs" / "tiny") >= 3, watch=four, seconds=500)
        four[2].send_signal(signal.SIGSTOP)
        others = [four[i] for i in (0, 1, 3)]
        outputs = [p.communicate(timeout=120)[0] for p in others]
        assert [p.returncode for p in others].count(70) >= 1 and all(p.returncode for p in others)
        assert any("process 2 has been silent" in output for output in outputs), outputs
    finally:
        four[2].kill()
        four[2].communicate()


# Two hosts: network namespaces, joined by a cable that can be pulled.


@pytest.fixture
def hosts(tmp_path):
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    name = f"jt{os.getpid()}"
    names = [f"{name}-0", f"{name}-1"]
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    folders = []

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    try:
        ip("netns", "add", names[1])
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for i, n in enumerate(names):
            ip("-n", n, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", n, "link", "set", device, "up")
            # `ip netns exec` shows these as /etc/hosts: each host is known by its own address, which collectives publish.
            folders.append(pathlib.Path("/etc/netns") / n)
            folders[-1].mkdir(parents=True)
            (folders[-1] / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {socket.gethostname()}\n")
        yield names, lambda: ip("-n", names[0], "link", "set", "cable", "down")
    finally:
        for n in names:
            subprocess.run(["ip", "netns", "del", n], capture_output=True)
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)


def on_hosts(names, folder, source, *overrides, port=27508):  # noqa: F811
    """One process on each host, told of the first one's address."""
    started = []
    for i, name in enumerate(names):
        environment = at(port, i, len(names)) | {"JAXTRAIN_COORDINATOR": f"10.77.0.1:{port}"}
        environment["IDS"] = str(folder / f"ids{i}.jsonl")
        started.append(command(folder, source, *overrides, inside=["ip", "netns", "exec", name], **environment))
    return started


BOUNDS = ("--config.distributed.heartbeat_timeout=8", "--config.distributed.init_timeout=30")


@pytest.mark.parametrize("phase", ["a step", pytest.param("a save", marks=pytest.mark.slow)])
def test_promise_16_a_host_that_drops_off_the_network_ends_the_job_and_the_rest_goes_on(folder, corpus, hosts, phase):  # noqa: F811
    names, pull = hosts
    workdir = folder / "runs" / "tiny"
    overrides = ("--config.train.eval_every=0", "--config.checkpoint.every=3", *BOUNDS)
    both = on_hosts(names, folder, f"tiny.py:{corpus}", "--config.train.steps=100000", *overrides)
    try:
        wait_for(lambda: (workdir / "checkpoints" / "3").is_dir() and step_of(workdir) >= 4, watch=both)
        if phase == "a save":  # Orbax writes into a directory that it renames in the end
            wait_for(lambda: any("tmp" in p.name for p in (workdir / "checkpoints").iterdir()), watch=both)
        pull()
        outputs = ended(both, within=60)
    finally:
        for process in both:
            process.kill()
    assert all(process.returncode not in (0, None) for process in both), outputs
    assert "heartbeat" in outputs[0] and "Task 1" in outputs[0], outputs[0]
    saved = [int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()]
    steps = max(saved) + 2
    output = run(folder, f"tiny.py:{corpus}", *overrides, f"--config.train.steps={steps}")
    assert "going on from step" in output and step_of(workdir) >= steps - 1


def test_promise_16_a_host_that_is_off_the_network_at_the_start_is_named(folder, corpus, hosts):  # noqa: F811
    names, pull = hosts
    pull()
    both = on_hosts(names, folder, f"tiny.py:{corpus}", "--config.distributed.init_timeout=5")
    outputs = ended(both, within=60)
    assert [p.returncode for p in both] == [2, 2], outputs
    assert "process 1 of 2 did not come" in outputs[0]
    assert "process 1" in outputs[1] and "no process 0 at 10.77.0.1:27508 within 5 s" in outputs[1]
