"""Nothing lost: short proofs of the promises about signals, bad numbers, damage and stuck processes, in real processes."""

import json
import os
import signal
import time

import pytest
from test_train import command, corpus, folder, free_port, hashes, ids, records, run  # noqa: F401

# A loader that can poison a batch, and that can stop to deliver.
UNRULY_LOADER = """
import os, time
import numpy as np
from loaders.spectrogram import Config, facts, fields
from loaders import spectrogram

class Unruly:
    def __init__(self, loader, split):
        self._loader, self._split = loader, split
    def __getattr__(self, name):
        return getattr(self._loader, name)
    def __next__(self):
        position, batch = next(self._loader)
        if self._split == "train":
            if position == int(os.environ.get("STALL_AT", 0)):
                open(os.environ["STALLED"], "w").close()
                time.sleep(300)
            if position in [int(p) for p in os.environ.get("POISON", "").split(",") if p]:
                # In the last shard of rows only: one device sees it, all must skip.
                parts = [np.array(x) for x in batch["spectrogram"]]
                parts[-1][-1] = np.nan
                batch = {**batch, "spectrogram": parts}
        return position, batch

def make_loader(config, *, split, rows, seed):
    return Unruly(spectrogram.make_loader(config, split=split, rows=rows, seed=seed), split)
"""


@pytest.fixture
def unruly(folder):  # noqa: F811
    (folder / "unruly.py").write_text(UNRULY_LOADER)
    return folder


def cluster(folder, source, *overrides, processes, devices=1, **environment):  # noqa: F811
    port = free_port()
    return [
        command(
            folder,
            source,
            *overrides,
            devices=devices,
            IDS=str(folder / f"ids{i}.jsonl"),
            JAXTRAIN_COORDINATOR=f"127.0.0.1:{port}",
            JAXTRAIN_PROCESSES=str(processes),
            JAXTRAIN_PROCESS=str(i),
            **environment.get(f"only{i}", {}),
        )
        for i in range(processes)
    ]


def wait_for(condition, *, seconds=240, watch=()):
    deadline = time.monotonic() + seconds
    while not condition():
        ended = [p.communicate()[0] for p in watch if p.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < deadline
        time.sleep(0.05)


def step_of(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)


def test_promise_8_a_bad_step_is_skipped_counted_and_its_recordings_are_named(unruly, corpus):  # noqa: F811
    """NaN in one row of one of four devices. The steps around it are those of a run that never had it."""
    overrides = ("--config.loader=unruly", "--config.train.steps=4", "--config.train.eval_every=0", "--config.mesh.data=4")
    output = run(unruly, f"tiny.py:{corpus}", *overrides, devices=4, POISON="3")
    assert "step 3 skipped" in output and "recordings [" in output
    found = records(unruly / "runs" / "tiny", "train")
    assert [found[s]["skipped"] for s in (1, 2, 3, 4)] == [0, 0, 1, 0]
    assert found[3]["loss"] is None and found[4]["loss"] > 0
    assert found[4]["param_norm"] == pytest.approx(found[2]["param_norm"], rel=1e-3)


def test_promise_8_too_many_bad_steps_in_a_row_end_the_run(unruly, corpus):  # noqa: F811
    output = run(unruly, f"tiny.py:{corpus}", "--config.loader=unruly", "--config.guard.patience=3", POISON="2,3,4,5,6", code=1)
    assert "3 steps in a row up to 4 were skipped" in output


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR2", marks=pytest.mark.slow)])
def test_promise_9_a_signal_to_one_of_two_processes_saves_and_ends_both(folder, corpus, name):  # noqa: F811
    """And what goes on from there ends where the undisturbed run does, bit for bit."""
    overrides = ("--config.train.steps=60", "--config.checkpoint.every=1000", "--config.train.eval_every=0")
    both = cluster(folder, f"tiny.py:{corpus}", *overrides, processes=2)
    wait_for(lambda: step_of(folder / "runs" / "tiny") >= 3, watch=both)
    both[1].send_signal(getattr(signal, name))
    outputs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [75, 75], outputs
    assert name in outputs[1] and "saved in" in outputs[0]
    again = cluster(folder, f"tiny.py:{corpus}", *overrides, processes=2)
    outputs = [p.communicate(timeout=240)[0] for p in again]
    assert [p.returncode for p in again] == [0, 0] and "going on from step" in outputs[0], outputs
    whole = cluster(folder, f"tiny.py:{corpus}", *overrides, "--config.workdir=whole", processes=2)
    assert [p.wait(timeout=240) for p in whole] == [0, 0]
    assert hashes(folder / "runs" / "tiny", 60) == hashes(folder / "whole", 60)
    assert records(folder / "runs" / "tiny", "train") == records(folder / "whole", "train")


def test_promise_9_a_signal_while_the_data_stall(unruly, corpus):  # noqa: F811
    stalled = unruly / "stalled"
    process = command(
        unruly,
        f"tiny.py:{corpus}",
        "--config.loader=unruly",
        "--config.checkpoint.every=1000",
        STALL_AT="4",
        STALLED=str(stalled),
    )
    wait_for(lambda: stalled.exists() and step_of(unruly / "runs" / "tiny") >= 1, watch=[process])
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "after step 3" in output, output
    assert "going on from step 3" in run(unruly, f"tiny.py:{corpus}", "--config.loader=unruly", "--config.train.steps=5")


def test_promise_10_a_stuck_process_ends_the_job_by_name_with_every_stack(folder, corpus):  # noqa: F811
    overrides = ("--config.train.steps=100000", "--config.train.eval_every=0", "--config.distributed.step_timeout=8")
    both = cluster(folder, f"tiny.py:{corpus}", *overrides, processes=2)
    try:
        wait_for(lambda: step_of(folder / "runs" / "tiny") >= 3, watch=both)
        both[1].send_signal(signal.SIGSTOP)
        output, _ = both[0].communicate(timeout=90)
        assert both[0].returncode == 70, output
        assert "process 1 has been silent" in output
        assert "Thread" in (folder / "runs" / "tiny" / "logs" / "stacks-0.txt").read_text()
    finally:
        both[1].kill()
        both[1].communicate()


def test_promises_6_and_7_a_damaged_newest_step_falls_back_loudly_and_all_damaged_ends(folder, corpus):  # noqa: F811
    args = (folder, f"tiny.py:{corpus}", "--config.train.eval_every=0", "--config.checkpoint.every=2")
    run(*args, "--config.train.steps=4")
    workdir = folder / "runs" / "tiny"
    largest = max((p for p in (workdir / "checkpoints" / "4").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    output = run(*args, "--config.train.steps=3")
    assert "damaged" in output and largest.name in output and "going on from step 2" in output
    for step in (workdir / "checkpoints").iterdir():
        for file in step.rglob("*"):
            if file.is_file():
                os.truncate(file, file.stat().st_size // 2)
    output = run(*args, "--config.train.steps=5", code=2)
    assert "can be read" in output and "going on" not in output


def test_changed_data_start_again_when_told_to_and_go_on_from_there(folder, corpus):  # noqa: F811
    args = (folder, f"tiny.py:{corpus}", "--config.train.eval_every=0", "--config.checkpoint.every=2")
    run(*args, "--config.train.steps=2")
    changed = (*args, "--config.data.exclude=(3,)", "--config.resume.data=restart")
    assert "from their beginning" in run(*changed, "--config.train.steps=4", IDS=str(folder / "changed.jsonl"))
    output = run(*changed, "--config.train.steps=6", IDS=str(folder / "changed.jsonl"))
    assert "going on from step 4" in output and "from their beginning" not in output
    run(
        *args, "--config.data.exclude=(3,)", "--config.train.steps=4", "--config.workdir=fresh", IDS=str(folder / "fresh.jsonl")
    )
    changed_ids, fresh_ids = ids(folder, "changed.jsonl"), ids(folder, "fresh.jsonl")
    assert {p: changed_ids[p] for p in range(1, 5)} == {p: fresh_ids[p] for p in range(1, 5)}


def test_retention_keeps_the_last_the_milestones_and_the_best(folder, corpus):  # noqa: F811
    run(
        folder,
        f"tiny.py:{corpus}",
        "--config.train.steps=12",
        "--config.train.eval_every=1",
        "--config.checkpoint.every=1",
        "--config.checkpoint.keep=2",
        "--config.checkpoint.keep_every=5",
        "--config.checkpoint.best=-objective_loss",
    )
    workdir = folder / "runs" / "tiny"
    losses = {step: r["objective_loss"] for step, r in records(workdir, "test").items()}
    kept = {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()}
    assert {5, 10, 11, 12} <= kept
    assert min(losses, key=losses.get) in kept and len(kept) <= 5
