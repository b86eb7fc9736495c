"""Nothing is lost: short proofs of the promises about signals, bad numbers, damage and stuck
processes, in real processes."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from jaxtrain import cli
from tests.support.processes import (
    at,
    cluster,
    command,
    free_port,
    hashes,
    ids,
    records,
    run,
    step_of,
    wait_for,
)


def test_promise_8_a_bad_step_is_skipped_counted_and_its_examples_are_named(folder):
    """One of four devices has NaN in one row. The other steps equal those of a run without it."""
    overrides = ("--config.train.steps=4", "--config.train.eval_every=0", "--config.mesh.data=4")
    output = run(folder, "toy.py", *overrides, devices=4, POISON="3")
    assert "step 3 skipped" in output and "examples [" in output
    found = records(folder / "runs" / "toy", "train")
    assert [found[s]["skipped"] for s in (1, 2, 3, 4)] == [0, 0, 1, 0]
    assert found[3]["loss"] is None and found[4]["loss"] > 0
    assert found[4]["param_norm_after"] == pytest.approx(found[2]["param_norm_after"], rel=1e-3)


def test_promise_8_too_many_bad_steps_in_a_row_end_the_run(folder):
    output = run(folder, "toy.py", "--config.guard.patience=3", POISON="2,3,4,5,6", code=1)
    assert "3 steps in a row after 1 were skipped" in output


@pytest.mark.slow
def test_promise_8_a_rewind_equals_a_run_that_skipped_all_since_the_checkpoint(folder):
    """Batches 8 to 10 are bad, and the last checkpoint is of step 6: its state continues after step
    11. A kill on the way changes nothing."""
    args = (folder, "toy.py", "--config.train.eval_every=0", "--config.checkpoint.every=6")
    args = (*args, "--config.train.steps=18")
    rewinding = (*args, "--config.guard.patience=3", "--config.guard.rewinds=1")
    output = run(*rewinding, "--config.workdir=rewound", POISON="8,9,10")
    assert (
        "3 steps in a row after 7 were skipped: the state is again that of step 6, and batches 7 to"
        " 11 count" in output
    )
    run(*args, "--config.workdir=skipped", POISON="7,8,9,10,11")
    assert hashes(folder / "rewound", 18) == hashes(folder / "skipped", 18)
    found = records(folder / "rewound", "train")
    assert sorted(found) == list(range(1, 19)) and [s for s in found if found[s]["skipped"]] == [
        8,
        9,
        10,
    ]

    killed, after = (
        (*rewinding, "--config.workdir=killed"),
        str(folder / "killed" / "checkpoints" / "6"),
    )
    run(*killed, code=-signal.SIGKILL, POISON="8,9,10", KILL_AT="14", KILL_AFTER=after)
    run(*killed, POISON="8,9,10")
    assert hashes(folder / "killed", 18) == hashes(folder / "rewound", 18)
    assert records(folder / "killed", "train") == found

    output = run(
        *rewinding,
        "--config.workdir=twice",
        "--config.guard.patience=2",
        POISON="8,9,12,13",
        code=1,
    )
    assert "the run has rewound 1 times" in output


def test_promise_9_a_signal_to_one_of_two_processes_saves_and_ends_both(folder):
    overrides = ("--config.checkpoint.every=1000", "--config.train.eval_every=0")
    both = cluster(folder, "toy.py", *overrides, "--config.train.steps=1000", processes=2)
    wait_for(lambda: step_of(folder / "runs" / "toy") >= 3, watch=both)
    both[1].send_signal(signal.SIGUSR1)
    outputs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [75, 75], outputs
    assert "SIGUSR1" in outputs[1] and "saved in" in outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGUSR1", 75), ("SIGINT", 130)])
def test_promise_9_two_processes_that_a_signal_ended_resume_bit_for_bit(folder, name, code):
    overrides = (
        "--config.train.steps=30",
        "--config.checkpoint.every=1000",
        "--config.train.eval_every=0",
    )
    each = {
        "JAXTRAIN_CACHE": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    caches = {"only0": each, "only1": each}
    both = cluster(folder, "toy.py", *overrides, processes=2, **caches)
    wait_for(lambda: step_of(folder / "runs" / "toy") >= 3, watch=both)
    both[1].send_signal(getattr(signal, name))
    outputs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [code, code], outputs
    assert name.replace("SIGINT", "Ctrl-C") in outputs[1] and "saved in" in outputs[0]
    again = cluster(folder, "toy.py", *overrides, processes=2, **caches)
    outputs = [p.communicate(timeout=240)[0] for p in again]
    assert [p.returncode for p in again] == [0, 0] and "resuming from step" in outputs[0], outputs
    logs = [(folder / "runs" / "toy" / "logs" / f"process-{i}.log").read_text() for i in range(2)]
    # If only one process could read a program back, its collectives would be in another order than
    # those of the others.
    assert all("is that of an earlier start" in log for log in logs)
    kept = sorted((folder / "cache" / "xla-processes").iterdir())[0]
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    whole = cluster(folder, "toy.py", *overrides, "--config.workdir=whole", processes=2, **caches)
    assert [p.wait(timeout=240) for p in whole] == [0, 0]
    logs = [(folder / "whole" / "logs" / f"process-{i}.log").read_text() for i in range(2)]
    # Of the initialisation, the step and the evaluation, which may not have been compiled in time.
    assert [log.count("is that of an earlier start") for log in logs] in ([1, 1], [2, 2])
    assert hashes(folder / "runs" / "toy", 30) == hashes(folder / "whole", 30)
    assert records(folder / "runs" / "toy", "train") == records(folder / "whole", "train")


def test_promise_9_a_signal_while_the_data_stall(folder):
    stalled = folder / "stalled"
    process = command(
        folder,
        "toy.py",
        "--config.checkpoint.every=1000",
        STALL_AT="4",
        STALLED=str(stalled),
    )
    # The second step is written while the third one is computed, and the fourth one has no data.
    wait_for(lambda: stalled.exists() and step_of(folder / "runs" / "toy") >= 2, watch=[process])
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "after step 3" in output, output
    assert "resuming from step 3" in run(folder, "toy.py", "--config.train.steps=5")


def test_promise_9_a_signal_before_the_first_step_ends_a_run_at_once(folder):
    starting = folder / "starting"
    process = command(folder, "toy.py", STARTING=str(starting))
    wait_for(starting.exists, watch=[process])
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "ended by SIGHUP before its first step: nothing is lost; rerun" in output
    process = command(folder, "toy.py")
    wait_for(lambda: b"compiling" in process._text, watch=[process])
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "ended by Ctrl-C" in output, output


def is_evaluating(log):
    return log.exists() and '["test", ' in log.read_text()


def test_promise_9_ctrl_c_gives_up_an_evaluation_which_the_next_start_makes(folder, capsys):
    args = (folder, "toy.py", "--config.data.n_test=400", "--config.train.steps=8")
    process = command(*args, PAUSE_TEST="0.5")
    wait_for(lambda: is_evaluating(folder / "ids.jsonl"), watch=[process])
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=15)
    assert process.returncode == 130, output
    assert "ended by Ctrl-C after step 8, saved in runs/toy; rerun" in output
    assert cli.main(["runs", str(folder)]) == 0
    assert re.search(r"toy +saved +8/8 +8 ", capsys.readouterr().out)
    assert "the run has already reached step 8" in run(*args)
    assert list(records(folder / "runs" / "toy", "test")) == [8]


def test_promise_9_a_second_ctrl_c_ends_a_run_at_once(folder):
    process = command(folder, "toy.py", "--config.train.eval_every=4", PAUSE_TEST="60")
    wait_for(lambda: is_evaluating(folder / "ids.jsonl"), watch=[process])
    process.send_signal(signal.SIGINT)
    wait_for(lambda: b"a second one ends it at once" in process._text, watch=[process])
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 130 and "saved in" not in output


@pytest.mark.slow
def test_promise_9_two_processes_give_up_an_evaluation_together(folder):
    overrides = ("--config.data.n_test=4000", "--config.train.steps=8")
    pause = {"PAUSE_TEST": "0.1"}
    both = cluster(folder, "toy.py", *overrides, processes=2, only0=pause, only1=pause)
    wait_for(lambda: is_evaluating(folder / "ids0.jsonl"), watch=both)
    both[1].send_signal(signal.SIGUSR2)
    outputs = [p.communicate(timeout=60)[0] for p in both]
    assert [p.returncode for p in both] == [75, 75], outputs
    assert all("after step 8, saved in" in output for output in outputs)


# What a shell does to a background job of a script.
BACKGROUND = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "name"), [(["nohup"], "SIGHUP"), (BACKGROUND, "SIGINT")])
def test_promise_9_a_signal_that_the_shell_ignores_is_ignored(folder, inside, name):
    process = command(folder, "toy.py", inside=inside)
    wait_for(lambda: step_of(folder / "runs" / "toy") >= 2, watch=[process])
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output


def test_promise_10_a_stuck_process_ends_the_job_by_name_with_every_stack(folder):
    overrides = (
        "--config.train.steps=100000",
        "--config.train.eval_every=0",
        "--config.distributed.step_timeout=8",
    )
    both = cluster(folder, "toy.py", *overrides, processes=2)
    try:
        wait_for(lambda: step_of(folder / "runs" / "toy") >= 3, watch=both)
        both[1].send_signal(signal.SIGSTOP)
        output, _ = both[0].communicate(timeout=90)
        assert both[0].returncode == 70, output
        assert "process 1 has been silent" in output
        assert "Thread" in (folder / "runs" / "toy" / "logs" / "stacks-0.txt").read_text()
    finally:
        both[1].kill()
        both[1].communicate()


def test_promises_6_and_7_a_damaged_newest_step_falls_back_loudly_and_all_damaged_ends(folder):
    args = (folder, "toy.py", "--config.train.eval_every=0", "--config.checkpoint.every=2")
    run(*args, "--config.train.steps=4")
    workdir = folder / "runs" / "toy"
    largest = max(
        (p for p in (workdir / "checkpoints" / "4").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    output = run(*args, "--config.train.steps=3")
    assert "damaged" in output and largest.name in output and "resuming from step 2" in output
    for step in (workdir / "checkpoints").iterdir():
        for file in step.rglob("*"):
            if file.is_file():
                os.truncate(file, file.stat().st_size // 2)
    output = run(*args, "--config.train.steps=5", code=2)
    assert "can be read" in output and "going on" not in output


@pytest.mark.slow
def test_changed_data_start_again_when_told_to_and_go_on_from_there(folder):
    args = (folder, "toy.py", "--config.train.eval_every=0", "--config.checkpoint.every=2")
    run(*args, "--config.train.steps=2")
    changed = (*args, "--config.data.exclude=(3,)", "--config.resume.data=restart")
    assert "from their beginning" in run(
        *changed, "--config.train.steps=4", IDS=str(folder / "changed.jsonl")
    )
    output = run(*changed, "--config.train.steps=6", IDS=str(folder / "changed.jsonl"))
    assert "resuming from step 4" in output and "from their beginning" not in output
    run(
        *args,
        "--config.data.exclude=(3,)",
        "--config.train.steps=4",
        "--config.workdir=fresh",
        IDS=str(folder / "fresh.jsonl"),
    )
    changed_ids, fresh_ids = ids(folder, "changed.jsonl"), ids(folder, "fresh.jsonl")
    assert {p: changed_ids[p] for p in range(1, 5)} == {p: fresh_ids[p] for p in range(1, 5)}


@pytest.mark.slow
def test_a_final_step_of_weights_is_explicit(folder):
    args = (folder, "toy.py", "--config.checkpoint.every=4", "--config.checkpoint.final=weights")
    run(*args, "--config.train.steps=6")
    workdir = folder / "runs" / "toy"
    meta = json.loads((workdir / "checkpoints" / "6" / "meta" / "metadata").read_text())
    assert meta["weights_only"] and 6 in records(workdir, "test")
    saved = {path.split("'")[1] for path in hashes(workdir, 6)}
    # the model state would be saved, too, but this workload has none
    assert saved == {"step", "params", "ema"}
    assert {"opt_state", "norms"} <= {path.split("'")[1] for path in hashes(workdir, 4)}
    assert "already ended at step 6, with weights only" in run(*args, "--config.train.steps=6")
    output = run(*args, "--config.train.steps=8", code=2)
    assert "weights only" in output and "config.warm_start.source" in output
    source = str(workdir / "checkpoints" / "6")
    warm = run(
        *args,
        "--config.train.steps=1",
        "--config.workdir=warm",
        f"--config.warm_start.source={source}",
    )
    assert "warm start from" in warm


@pytest.mark.parametrize(
    ("policy", "processes"),
    [
        ("continue", 1),
        pytest.param("continue", 2, marks=pytest.mark.slow),
        pytest.param("stop", 1, marks=pytest.mark.slow),
    ],
)
def test_promise_12_a_full_disk_stops_or_not_by_policy_and_loses_no_checkpoint(
    folder, policy, processes, small_disk
):
    def run(*args, code=0):
        several = cluster(
            folder, "toy.py", *args, f"--config.mesh.data={processes}", processes=processes
        )
        outputs = [process.communicate(timeout=300)[0] for process in several]
        assert [process.returncode for process in several] == [code] * processes, outputs
        return outputs[0]

    disk = small_disk(20_000)
    args = (
        f"--config.workdir={disk}/run",
        "--config.train.eval_every=0",
        "--config.metrics.tensorboard=true",
    )
    args = (*args, "--config.checkpoint.every=2", f"--config.checkpoint.on_error={policy}")
    run(*args, "--config.train.steps=2")
    before = hashes(disk / "run", 2)
    (disk / "ballast").write_bytes(
        bytes((lambda f: f.f_bavail * f.f_frsize)(os.statvfs(disk)) - 80_000)
    )
    output = run(*args, "--config.train.steps=8", code=0 if policy == "continue" else 2)
    assert "could not be written" in output and "the newest complete one is 2" in output
    assert ("training continues" if policy == "continue" else "Make room") in output
    # Orbax's threads fail one by one. Each of them used to print a traceback of its own.
    assert output.count("Traceback") == output.count("Event loop is closed") == 0, output
    assert hashes(disk / "run", 2) == before
    (disk / "ballast").unlink()
    output = run(*args, "--config.train.steps=10")
    assert "resuming from step 2" in output
    assert sorted(records(disk / "run", "train")) == list(range(1, 11))


# The save of step 4 fails in process 0 at its end, and the save of step 6 fails in process 1 at its
# beginning.
FAILING_LOADER = """
import errno, os
from orbax.checkpoint._src.checkpointers import async_checkpointer as orbax
from jaxtrain.arrays import checksums
from tests.support.proxy_loader import Config, dataset_info, element_spec, make_loader

def failing(function, step, process, number):
    def call(folder, *args, **kwargs):
        if folder.name.startswith(step) and os.environ["JAXTRAIN_PROCESS"] == process:
            raise OSError(number, os.strerror(number))
        return function(folder, *args, **kwargs)
    return call

checksums.write = failing(checksums.write, "4", "0", errno.EIO)
wait = orbax._background_wait_for_commit_futures
orbax._background_wait_for_commit_futures = failing(wait, "6", "1", errno.ESTALE)
"""


@pytest.mark.parametrize("policy", ["continue", pytest.param("stop", marks=pytest.mark.slow)])
def test_promise_12_a_save_that_fails_in_one_process_fails_in_all(folder, policy):
    """No process waits for one that never comes: process 0 waits for no other, and no other waits
    for process 0."""
    (folder / "failing.py").write_text(FAILING_LOADER)
    args = ("toy.py", "--config.mesh.data=2", "--config.loader=failing", "--config.train.steps=8")
    args = (
        *args,
        "--config.train.eval_every=0",
        "--config.checkpoint.every=2",
        f"--config.checkpoint.on_error={policy}",
    )
    both = cluster(folder, *args, "--config.workdir=run", processes=2)
    outputs = [process.communicate(timeout=300)[0] for process in both]
    codes = [process.returncode for process in both]
    failed = (
        f"{folder}/run/checkpoints/4 could not be written: [Errno 5] Input/output error; the newest"
        " complete one is 2"
    )
    assert failed in outputs[0], outputs
    saved = sorted(
        int(path.name)
        for path in (folder / "run" / "checkpoints").iterdir()
        if path.name.isdecimal()
    )
    if policy == "stop":
        assert codes == [2, 2] and saved == [2], (codes, outputs)
        return
    assert codes == [0, 0] and saved == [2, 8], (codes, outputs)
    assert (
        f"checkpoints/6 could not be written: process 1: [Errno {errno.ESTALE}] Stale file handle"
        in outputs[0]
    )
    assert sorted(records(folder / "run", "train")) == list(range(1, 9))


def test_promise_12_a_disk_that_is_full_at_the_start_is_named(folder, small_disk):
    disk = small_disk(20_000)
    (disk / "run").mkdir()
    (disk / "ballast").write_bytes(
        bytes((lambda f: f.f_bavail * f.f_frsize)(os.statvfs(disk)) - 8192)
    )
    output = run(folder, "toy.py", f"--config.workdir={disk}/run", code=2)
    assert (
        f"error: {disk}/run" in output and "No space left on device; free some space" in output
    ), output
    assert "Traceback" not in output, output


@pytest.mark.slow
def test_a_workdir_that_only_one_host_has_is_refused_by_name(folder):
    """Process 1 has a mount namespace of its own with another disk at the workdir, like two hosts
    without a shared disk."""
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if (
        os.geteuid() != 0
        or not shutil.which("unshare")
        or subprocess.run([*unshare, "true"]).returncode
    ):
        pytest.skip("only root may make a mount namespace")
    (folder / "elsewhere").mkdir()
    (folder / "runs" / "toy").mkdir(parents=True)
    (folder / "apart.sh").write_text('mount --bind elsewhere runs/toy && exec "$@"\n')
    port = free_port()
    prefixes = ([], [*unshare, "sh", "apart.sh"])
    both = [
        command(
            folder,
            "toy.py",
            inside=prefix,
            IDS=str(folder / f"ids{i}.jsonl"),
            **at(port, i),
        )
        for i, prefix in enumerate(prefixes)
    ]
    outputs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [2, 2], outputs
    assert "is not the same folder for all processes: 1 of 2 do not see" in outputs[0]


def test_retention_keeps_the_last_the_milestones_and_the_best(folder):
    run(
        folder,
        "toy.py",
        "--config.train.steps=8",
        "--config.train.eval_every=1",
        "--config.checkpoint.every=1",
        "--config.checkpoint.keep=2",
        "--config.checkpoint.keep_every=3",
        "--config.checkpoint.best=-loss",
    )
    workdir = folder / "runs" / "toy"
    losses = {step: r["loss"] for step, r in records(workdir, "test").items()}
    kept = {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()}
    assert {3, 6, 7, 8} <= kept
    assert min(losses, key=losses.get) in kept and len(kept) <= 5
