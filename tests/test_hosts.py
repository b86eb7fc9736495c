"""Nothing is lost with several processes and hosts: promises 13, 14 and 16, and other ways to end a
run from outside, in real processes."""

import http.server
import json
import math
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxtrain.arrays import checksums, orbax_steps
from jaxtrain.parallel.cluster import notices
from loaders import _rust
from loaders.audio import spectrogram
from loaders.base import Rows
from tests.support.processes import (
    ROOT,
    at,
    cluster,
    command,
    free_port,
    records,
    run,
    step_of,
    wait_for,
)

QUIET = ("--config.train.eval_every=0", "--config.checkpoint.every=1000")


def ended(processes):
    """The outputs of processes that end by themselves. A busy machine gets enough time."""
    return [p.communicate(timeout=300)[0] for p in processes]


def test_promise_14_a_late_process_is_named(folder):
    port = free_port()
    both = [
        command(folder, "toy.py", "--config.distributed.init_timeout=4", **at(port, i, processes=4))
        for i in (0, 2)
    ]
    for process, output in zip(both, ended(both), strict=True):
        assert (
            process.returncode == 2
            and "processes 1, 3 of 4 did not connect" in output
            and "within 4 s" in output
        )
        assert "Traceback" not in output and "core dumped" not in output
    logs = folder / "runs" / "toy" / "logs"
    assert "process 2 of 4" in (logs / "process-2.log").read_text()


def test_promise_14_a_taken_port_is_reported(folder):
    port = free_port()
    with socket.create_server(("", port)):
        process = command(folder, "toy.py", "--config.distributed.init_timeout=2", **at(port, 0))
        (output,) = ended([process])
    assert (
        process.returncode == 2
        and f"process 0 ({socket.gethostname()}) cannot listen on port {port}" in output
    )


def test_promise_14_processes_that_differ_are_named_with_what_differs(folder):
    port = free_port()
    precise = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    both = [
        command(folder, "toy.py", f"--config.optim.lr={lr}", **at(port, i), **environment)
        for i, (lr, environment) in enumerate((("1e-3", {}), ("2e-3", precise)))
    ]
    for process, output in zip(both, ended(both), strict=True):
        assert process.returncode == 2
        assert "config.optim.lr is 0.002, elsewhere 0.001" in output, output
        assert re.search(
            r'process 1 .*environment.JAX_DEFAULT_MATMUL_PRECISION is "highest", elsewhere null',
            output,
        ), output


def test_promise_14_processes_with_different_numbers_of_devices(folder):
    port = free_port()
    both = [
        command(folder, "toy.py", devices=1 + i // 2, **at(port, i, processes=3)) for i in range(3)
    ]
    for process, output in zip(both, ended(both), strict=True):
        assert process.returncode == 2 and "process 2 has 2, the others 1" in output, output


PRECISE_WORKLOAD = """
import dataclasses
import os

import jax

from tests.support import toy


def make_task(config, shard, batch):
    task = toy.make_task(config, shard, batch)
    return task._replace(loss=precise(task.loss), evaluate=precise(task.evaluate))


def precise(function):
    def call(*args):
        with jax.default_matmul_precision("highest" if "PRECISE" in os.environ else None):
            return function(*args)

    return call


WORKLOAD = dataclasses.replace(toy.WORKLOAD, make_task=make_task)
"""


def test_promise_14_a_process_with_another_program_is_named_before_it_is_compiled(folder):
    """One process multiplies matrices in another precision. Without a comparison the processes
    would wait for each other for ever."""
    (folder / "precise.py").write_text(PRECISE_WORKLOAD)
    workload = "--config.workload=precise"
    both = cluster(folder, "toy.py", workload, processes=2, only1={"PRECISE": "1"})
    for process, output in zip(both, ended(both), strict=True):
        assert (
            process.returncode == 2
            and "process 1: step's hash is" in output
            and "process 1: evaluation's hash" in output
        )
        assert "data's hash" not in output and "Traceback" not in output


def test_promise_14_an_ssh_into_an_allocation_is_one_process(folder):
    partial = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    output = run(folder, "toy.py", "--config.train.steps=1", *QUIET, **partial)
    assert "not a task of a step of SLURM job 77" in output and "one process" in output
    assert list(records(folder / "runs" / "toy", "train")) == [1]


def test_promise_9_a_signal_to_one_process_while_it_waits_for_the_others(folder):
    port = free_port()
    both = [command(folder, "toy.py", **at(port, i, processes=3)) for i in range(2)]
    logs = [folder / "runs" / "toy" / "logs" / f"process-{i}.log" for i in range(2)]
    wait_for(
        lambda: all(log.exists() and "coordinator" in log.read_text() for log in logs), watch=both
    )
    time.sleep(1)
    both[1].send_signal(signal.SIGTERM)
    for process, output in zip(both, ended(both), strict=True):
        assert process.returncode == 75 and "process 1" in output and "asked to stop" in output, (
            output
        )


@pytest.fixture
def metadata():
    """A metadata server with answers that a test sets."""
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


def test_promise_9_a_notice_of_maintenance_saves_and_ends(folder, metadata):
    host, answers = metadata
    overrides = ("--config.train.steps=100000", *QUIET)
    process = command(folder, "toy.py", *overrides, NO_GCE_CHECK="", GCE_METADATA_HOST=host)
    wait_for(lambda: step_of(folder / "runs" / "toy") >= 2, watch=[process])
    # a machine that is migrated continues
    answers["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    time.sleep(6)
    assert process.poll() is None
    answers["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    (output,) = ended([process])
    assert (
        process.returncode == 75
        and "ended by maintenance-event=TERMINATE_ON_HOST_MAINTENANCE after step" in output
    )


def test_notices_and_the_attributes_of_a_pod(metadata, monkeypatch):
    host, answers = metadata
    told = []
    heard = notices.Notices(host, told.append, pause=0.05)
    time.sleep(0.3)
    assert not told
    answers["preempted"] = "TRUE"
    wait_for(lambda: told, seconds=5)
    heard.close()
    assert told == ["preempted=TRUE"]
    assert (
        notices.read(host, "attributes/none") is None
        and notices.read("127.0.0.1:1", "preempted") is None
    )
    assert notices.metadata_server({"NO_GCE_CHECK": "true", "GCE_METADATA_HOST": "h"}) == ""
    assert (
        notices.metadata_server({"GCE_METADATA_HOST": "h"})
        == notices.metadata_server({"GCE_METADATA_IP": "h"})
        == "h"
    )
    assert notices.tpu_metadata({"GCE_METADATA_HOST": host, "TPU_SKIP_MDS_QUERY": "1"}) == {}


def lets_others_run(call, size):
    """Whether another thread can run during a call: more often, the longer the call is."""
    ticks, stop = [0], threading.Event()

    def beat():
        while not stop.wait(0.005):
            ticks[0] += 1

    def during(n):
        before = ticks[0]
        call(n)
        return ticks[0] - before

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        first = during(size)  # also what the call does outside the native code
        return any(during(size * times) >= first + 10 for times in (4, 16, 64, 256))
    finally:
        stop.set()
        thread.join()


NATIVE = {
    "resample": (lambda n: _rust.resample(np.zeros(n, np.float32), 44_100, 32_000), 1 << 20),
    "fbank": (lambda n: _rust.fbank(np.zeros(n, np.float32), normalise=False), 1 << 20),
    "permutation": (lambda n: _rust.permutation(0, 0, n, np.arange(n)), 1 << 18),
    "block_order": (
        lambda n: _rust.block_order(0, 0, np.arange(0, n + 1, 8), 4, np.arange(n)),
        1 << 18,
    ),
    "sudoku_generate": (lambda n: _rust.sudoku_generate(n), 64),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_code_stops_no_other_thread(name):
    """Heartbeats are threads: if long calls held the GIL, a busy process would be taken for
    dead."""
    assert lets_others_run(*NATIVE[name])


def test_a_loader_that_one_waits_for_stops_no_other_thread(corpus):
    config = spectrogram.Config(train=str(corpus), threads=1)

    def batch(n):
        loader = spectrogram.make_loader(config, split="train", rows=Rows(n, ((0, n),)), seed=0)
        loader.seek(0)
        next(loader)
        loader.close()

    assert lets_others_run(batch, 64)


def test_promise_10_a_start_that_never_ends_is_ended(tmp_path):
    script = (
        "import sys, time; from jaxtrain.parallel.cluster import Watchdog\n"
        "dog = Watchdog(sys.argv[1], process=0, processes=2, timeout=100, start_timeout=1)\n"
        "dog.starting('its compilation'); time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 70 and "process 1 has never sent a heartbeat" in done.stderr
    assert (
        "no progress for 1 s" in done.stderr and "Thread" in (tmp_path / "stacks-0.txt").read_text()
    )


def test_compilation_after_the_first_batch_gets_the_timeout_of_a_start(tmp_path):
    script = (
        "import sys, time; from jaxtrain.parallel.cluster import Watchdog\ndog ="
        " Watchdog(sys.argv[1], process=0, processes=1, timeout=0.5,"
        " start_timeout=100)\ndog.beat('step 1'); dog.starting('its pictures'); time.sleep(1.5);"
        " print('compiled', flush=True)\ndog.beat('step 1'); time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 70 and done.stdout == "compiled\n", done.stderr


ENDLESS = ("--config.train.steps=100000", *QUIET)


def running(folder, processes, *overrides):
    """Start an endless run with the default timeouts, and wait for its third step."""
    started = cluster(folder, "toy.py", *ENDLESS, *overrides, processes=processes)
    try:
        wait_for(lambda: step_of(folder / "runs" / "toy") >= 3, watch=started, seconds=500)
    except BaseException:
        for process in started:
            process.kill()
        raise
    return started


@pytest.mark.parametrize(
    ("processes", "victim"), [(2, 0), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_promise_17_a_killed_process_is_noticed_at_once(folder, processes, victim):
    """By its heartbeats alone it would be noticed after 120 s."""
    started = running(folder, processes)
    started[victim].kill()
    killed = time.monotonic()
    try:
        survivors = [process for i, process in enumerate(started) if i != victim]
        outputs = [p.communicate(timeout=60)[0] for p in survivors]
        seconds = time.monotonic() - killed
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert {p.returncode for p in survivors} == {70}, outputs
    host = socket.gethostname()
    for output in outputs:
        name = r"\S+" if victim == 0 else re.escape(host)  # process 0 by its address
        assert re.search(rf"process {victim} \({name}\) has died", output), output
    assert seconds < 2


FAILING_LOADER = """import os
from tests.support import proxy_loader
from tests.support.proxy_loader import Config, dataset_info, element_spec

def make_loader(config, **given):
    loader = proxy_loader.make_loader(config, **given)
    if "FAIL" in os.environ and given["split"] == "train":
        loader = Failing(loader, given["split"], given["rows"])
    return loader

class Failing(proxy_loader.Proxy):
    def __next__(self):
        position, batch = super().__next__()
        if position >= 4:
            raise RuntimeError("the disk of this host is gone")
        return position, batch
"""


def test_promise_17_an_error_in_one_process_ends_the_others_with_its_reason(folder):
    (folder / "failing.py").write_text(FAILING_LOADER)
    overrides = ("--config.loader=failing", *ENDLESS)
    both = cluster(folder, "toy.py", *overrides, processes=2, only1={"FAIL": "1"})
    outputs = ended(both)
    assert all(process.returncode for process in both), outputs
    assert "the disk of this host is gone" in outputs[1], outputs[1]
    assert "process 1 ended: the disk of this host is gone" in outputs[0], outputs[0]
    assert both[0].returncode == 70, outputs[0]


@pytest.mark.slow
def test_promise_17_a_process_that_is_stopped_for_a_minute_is_not_taken_for_dead(folder):
    all_two = running(folder, 2)
    try:
        for process in all_two:
            process.send_signal(signal.SIGSTOP)
            time.sleep(60)
            process.send_signal(signal.SIGCONT)
            step = step_of(folder / "runs" / "toy")
            wait_for(lambda step=step: step_of(folder / "runs" / "toy") > step + 2, watch=all_two)
        all_two[1].send_signal(signal.SIGTERM)
        assert [p.wait(timeout=300) for p in all_two] == [75, 75]
    finally:
        for process in all_two:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_promise_10_one_of_four_that_is_stuck(folder):
    overrides = ("--config.train.steps=100000", *QUIET, "--config.distributed.step_timeout=15")
    four = cluster(folder, "toy.py", *overrides, processes=4)
    try:
        wait_for(lambda: step_of(folder / "runs" / "toy") >= 3, watch=four, seconds=500)
        four[2].send_signal(signal.SIGSTOP)
        others = [four[i] for i in (0, 1, 3)]
        outputs = [p.communicate(timeout=120)[0] for p in others]
        assert [p.returncode for p in others].count(70) >= 1 and all(p.returncode for p in others)
        assert any("process 2 has been silent" in output for output in outputs), outputs
    finally:
        four[2].kill()
        four[2].communicate()


# A loader that measures its process's memory at every batch, and before and after the state is
# restored.
WEIGHING_LOADER = """
import concurrent.futures, ctypes, gc, json, os, re
from jaxtrain.run import step_compiler as programs
from tests.support import proxy_loader, toy_rows
from tests.support.proxy_loader import Config, dataset_info, element_spec

def weigh(what, name):
    kilobytes = int(re.search(rf"{name}:\\s+(\\d+)", open("/proc/self/status").read())[1])
    with open("weights.jsonl", "a") as file:
        file.write(json.dumps([what, kilobytes / 1024]) + "\\n")

# their compilation, or reading from the cache, takes memory beside the restore
def wait_for_programs():
    for pool in gc.get_objects():
        is_pool = isinstance(pool, concurrent.futures.ThreadPoolExecutor)
        if is_pool and pool._thread_name_prefix == programs.THREAD:
            pool.submit(int).result()  # after what its one thread has to do

class Weighing(proxy_loader.Proxy):
    def state(self, position):  # the last that a run asks before it restores
        if self._split == "train" and not os.path.exists("weights.jsonl"):
            wait_for_programs()
            # what they freed, which the state would otherwise come to lie in
            ctypes.CDLL(None).malloc_trim(0)
            open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
            weigh("before", "VmRSS")
        return self._loader.state(position)
    def seek(self, position):  # and the first that it does afterwards
        if self._split == "train":
            weigh("after", "VmHWM")
        self._loader.seek(position)
    def __next__(self):
        if self._split == "train":
            weigh("batch", "VmRSS")
        return next(self._loader)

def make_loader(config, *, split, rows, seed):
    return Weighing(toy_rows.make_loader(config, split=split, rows=rows, seed=seed), split, rows)
"""


@pytest.mark.slow
@pytest.mark.parametrize("saves", [10, 110])
def test_promise_13_memory_does_not_grow_with_saves_and_a_restore_makes_no_second_copy(
    folder, saves
):
    if not pathlib.Path("/proc/self/clear_refs").exists():
        pytest.skip("/proc tells the memory of a process on Linux")
    (folder / "weighing.py").write_text(WEIGHING_LOADER)
    weights = folder / "weights.jsonl"
    overrides = (
        "--config.loader=weighing",
        "--config.train.eval_every=0",
        "--config.checkpoint.every=1",
        "--config.checkpoint.keep=1",
    )
    # Make the state large and the computation small.
    overrides += ("--config.model.embed=512", "--config.model.depth=3", "--config.train.batch=2")
    # Return freed memory to the system at once: the measurement then shows the memory in use, not a
    # peak that malloc keeps.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    # [s] on one core
    run(folder, "toy.py", *overrides, f"--config.train.steps={saves}", within=20 * 60, **malloc)
    (step,) = (p for p in (folder / "runs" / "toy" / "checkpoints").iterdir() if p.name.isdigit())
    state = orbax_steps.open_step(step)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in state.values()) / 2**20  # MB
    assert size > 80
    batches = [
        mb for what, mb in map(json.loads, weights.read_text().splitlines()) if what == "batch"
    ][6:]
    slope = np.polyfit(np.arange(len(batches)), batches, 1)[0]
    assert slope < (0.25 if saves < 100 else 0.03) * size, (
        f"{slope:.1f} MB per save of {size:.0f} MB: {batches}"
    )
    weights.unlink()
    run(folder, "toy.py", *overrides, f"--config.train.steps={saves + 1}", **malloc)
    found = dict(map(json.loads, weights.read_text().splitlines()[:2]))
    grown = found["after"] - found["before"]
    # 164 MB for this state of 96. Two further copies of the one array that is read and the
    # memory of libraries are in it.
    assert 0.9 * size < grown < 1.2 * size + 64, f"{grown:.0f} MB for a state of {size:.0f} MB"


BLIND_LOADER = """
import os
import orbax.checkpoint as ocp
from tests.support.proxy_loader import Config, dataset_info, element_spec, make_loader

if "BLIND" in os.environ:
    whole = ocp.StandardCheckpointHandler.restore

    def restore(self, folder, *args, **named):
        if folder.parent.name == "4":
            raise OSError(5, "Input/output error")
        return whole(self, folder, *args, **named)

    ocp.StandardCheckpointHandler.restore = restore
"""


@pytest.mark.slow
def test_a_checkpoint_that_one_process_cannot_read_is_taken_by_none(folder):
    """The processes find each other, although the environment has proxies that do not answer."""
    (folder / "blind.py").write_text(BLIND_LOADER)
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "grpc_proxy")}
    overrides = (
        "--config.loader=blind",
        "--config.train.eval_every=0",
        "--config.checkpoint.every=2",
        "--config.optim.schedule=constant",
    )
    steps = "--config.train.steps=4"
    ended(cluster(folder, "toy.py", *overrides, steps, processes=2, only0=proxies, only1=proxies))
    before = records(folder / "runs" / "toy", "train")
    both = cluster(
        folder, "toy.py", *overrides, "--config.train.steps=5", processes=2, only1={"BLIND": "1"}
    )
    log = folder / "runs" / "toy" / "logs" / "process-1.log"
    for process, output, reason in zip(
        both, ended(both), ("process 1 says why", "Input/output error"), strict=True
    ):
        text = log.read_text() if process is both[1] else output
        assert process.returncode == 0 and re.search(
            f"/4 cannot be read and is skipped: .*{reason}", text
        ), text
        assert "resuming from step 2" in text, text
    after = records(folder / "runs" / "toy", "train")
    assert list(after) == [1, 2, 3, 4, 5] and {step: after[step] for step in before} == before


SAVES_OF_TWO = """
import json
import os
import pathlib
from jaxtrain.arrays import checksums
from tests.support.proxy_loader import Config, dataset_info, element_spec, make_loader

measured = checksums._measure


def recorded(path):
    with open(os.environ["IDS"] + ".read", "a") as file:
        print(pathlib.Path(path).relative_to(os.getcwd()), file=file)
    return measured(path)


checksums._measure = recorded
"""


def test_each_process_hashes_and_verifies_its_part_and_damage_of_any_is_damage_for_all(folder):
    (folder / "recorded.py").write_text(SAVES_OF_TWO)
    overrides = (
        "--config.loader=recorded",
        "--config.train.eval_every=0",
        "--config.checkpoint.every=2",
        "--config.mesh.data=1",
        "--config.mesh.fsdp=2",
    )
    both = cluster(folder, "toy.py", *overrides, "--config.train.steps=4", processes=2)
    for process, output in zip(both, ended(both), strict=True):
        assert process.returncode == 0, output
    reads = [(folder / f"ids{i}.jsonl.read").read_text().splitlines() for i in range(2)]
    assert len(reads[1]) >= 4 and all("/ocdbt.process_1/" in name for name in reads[1])
    assert not any("/ocdbt.process_1/" in name for name in reads[0])
    steps = folder / "runs" / "toy" / "checkpoints"
    for step in ("2", "4"):
        assert checksums.verify(steps / step) == []
        assert not [p.name for p in (steps / step).iterdir() if p.name.startswith(".")]
    of_other, *_ = sorted((steps / "4").glob("state/ocdbt.process_1/d/*"))
    content = bytearray(of_other.read_bytes())
    content[len(content) // 2] ^= 1
    of_other.write_bytes(content)
    for i in range(2):
        (folder / f"ids{i}.jsonl.read").unlink()
    both = cluster(folder, "toy.py", *overrides, "--config.train.steps=5", processes=2)
    for process, output in zip(both, ended(both), strict=True):
        assert process.returncode == 0, output
        if process is both[0]:
            assert re.search(f"/4 is damaged and is skipped: .*{of_other.name}", output), output
            assert "resuming from step 2" in output, output
    assert list(steps.glob("4.damaged-*"))
    verified = [
        {line for line in (folder / f"ids{i}.jsonl.read").read_text().splitlines() if "/4/" in line}
        for i in range(2)
    ]
    assert verified[0] and verified[1] and not verified[0] & verified[1]


# Two hosts are network namespaces, joined by a cable that can be pulled.


def on_hosts(names, folder, source, *overrides, port=27508):
    """Start one process on each host, all with the address of the first one."""
    started = []
    for i, name in enumerate(names):
        environment = at(port, i, len(names)) | {
            "JAXTRAIN_COORDINATOR": f"10.77.0.1:{port}",
            "JAXTRAIN_SECRET": "5e" * 16,
        }
        environment["IDS"] = str(folder / f"ids{i}.jsonl")
        started.append(
            command(folder, source, *overrides, inside=["ip", "netns", "exec", name], **environment)
        )
    return started


BOUNDS = ("--config.distributed.init_timeout=30",)


@pytest.mark.parametrize("phase", ["a step", pytest.param("a save", marks=pytest.mark.slow)])
def test_promise_16_a_host_that_drops_off_the_network_ends_the_job_and_the_rest_resumes(
    folder, hosts, phase
):
    names, pull = hosts
    workdir = folder / "runs" / "toy"
    overrides = ("--config.train.eval_every=0", "--config.checkpoint.every=3", *BOUNDS)
    both = on_hosts(names, folder, "toy.py", "--config.train.steps=100000", *overrides)
    try:
        wait_for(
            lambda: (workdir / "checkpoints" / "3").is_dir() and step_of(workdir) >= 4, watch=both
        )
        if phase == "a save":  # Orbax writes into a directory that it renames in the end
            wait_for(
                lambda: any("tmp" in p.name for p in (workdir / "checkpoints").iterdir()),
                watch=both,
            )
        pull()
        outputs = ended(both)
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [70, 70], outputs
    assert re.search(r"process 1 \(\S+\) has died: its host no longer answers", outputs[0])
    assert "process 0 (10.77.0.1) has died: its host no longer answers" in outputs[1], outputs[1]
    saved = [int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()]
    steps = max(saved) + 2
    output = run(folder, "toy.py", *overrides, f"--config.train.steps={steps}")
    assert "resuming from step" in output and step_of(workdir) >= steps - 1


def test_promise_16_a_host_that_is_off_the_network_at_the_start_is_named(folder, hosts):
    names, pull = hosts
    pull()
    both = on_hosts(names, folder, "toy.py", "--config.distributed.init_timeout=5")
    outputs = ended(both)
    assert [p.returncode for p in both] == [2, 2], outputs
    assert "process 1 of 2 did not connect" in outputs[0]
    assert "process 1" in outputs[1] and "no process 0 at 10.77.0.1:27508 within 5 s" in outputs[1]
