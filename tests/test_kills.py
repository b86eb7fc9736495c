"""SIGKILL at any instant, again and again: the long proof that nothing is lost (promises 1 to
5)."""

import json
import random
import signal
import time
from collections import Counter

import pytest

from jaxtrain.arrays import checksums
from tests.support.processes import cluster, command, hashes, ids, records, run

KILLS = 50  # of each seed
STEPS = 60

# Kills its process just before the n-th operation of Python on a checkpoint file, between any two
# operations of Orbax and of the checksums. The writes of C++ in between (the bytes of the arrays)
# are left to timed kills. With KILL_BEFORE, only operations of this name count.
KILLING_LOADER = """
import os, signal, sys, threading
from tests.support.proxy_loader import Config, dataset_info, element_spec, make_loader

left, lock = int(os.environ.get("KILL_EVENT", 0)), threading.Lock()
names = (os.environ["KILL_BEFORE"],) if "KILL_BEFORE" in os.environ else ("open", "os", "shutil")

def hook(event, arguments):
    global left
    is_named = event in names or event.split(".")[0] in names
    if left and is_named and any("/checkpoints" in str(a) for a in arguments[:2]):
        with lock:
            left -= 1
            if not left:
                os.write(2, f"killed before {event}\\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

if left:
    sys.addaudithook(hook)
"""


def _steps(workdir):
    return sorted(
        (p for p in workdir.glob("checkpoints/*") if p.name.isdecimal()), key=lambda p: int(p.name)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_promises_1_and_2_kills_at_any_instant_change_nothing(
    seed, folder, corpus, record_property, monkeypatch
):
    """Runs are killed and started again until they end. Each then equals the undisturbed run, bit
    for bit."""
    (folder / "killing.py").write_text(KILLING_LOADER)
    args = (
        folder,
        f"tiny.py:{corpus}",
        "--config.loader=killing",
        f"--config.train.steps={STEPS}",
        "--config.checkpoint.keep=2",
    )
    args = (*args, "--config.checkpoint.every=3", "--config.train.eval_every=10")
    # a kill by the clock may also come while Python imports modules
    monkeypatch.setenv("JAXTRAIN_TESTS_FORK", "0")
    began = time.monotonic()
    run(*args, "--config.workdir=whole", IDS=str(folder / "whole.jsonl"))
    seconds = time.monotonic() - began
    expected = hashes(folder / "whole", STEPS)
    draw = random.Random(seed)
    kills, runs, where = 0, 0, Counter()
    while kills < KILLS:
        runs += 1
        workdir, read = folder / f"run{runs}", f"ids{runs}.jsonl"
        while True:
            by_event = draw.random() < 0.5
            event = {"KILL_EVENT": str(draw.randint(1, 400))} if by_event else {}
            if by_event and draw.random() < 0.2:
                event = {"KILL_EVENT": str(draw.randint(1, 5)), "KILL_BEFORE": "os.rename"}
            monkeypatch.setenv("JAXTRAIN_TESTS_FORK", "1" if by_event else "0")
            process = command(*args, f"--config.workdir={workdir}", IDS=str(folder / read), **event)
            if not by_event:
                time.sleep(draw.uniform(0, seconds))
                process.kill()
            output, _ = process.communicate(timeout=300)
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, output
            assert "cannot be read" not in output and "damaged" not in output, output
            kills += 1
            for newest in _steps(workdir)[-1:]:  # an older step may be half deleted
                assert checksums.verify(newest) == []
            where[
                next(
                    (line for line in output.splitlines() if line.startswith("killed before")),
                    "by the clock",
                )
            ] += 1
        assert hashes(workdir, STEPS) == expected
        for split in ("train", "test"):
            assert records(workdir, split) == records(folder / "whole", split)
        read_ids, whole_ids = ids(folder, read), ids(folder, "whole.jsonl")
        assert {p: read_ids[p] for p in whole_ids} == whole_ids
    record_property("trials", kills)
    print(f"{kills} kills in {runs} runs: {dict(where)}")
    assert {"killed before os.rename", "by the clock"} <= set(where)


@pytest.mark.slow
def test_promises_4_and_5_one_sequence_for_any_number_of_processes(folder, corpus):
    """1 device, then 4 processes of 2 (2 x 2 x 2) and two microbatches, then 2 processes of 4: the
    recordings come in the same order."""
    args = (f"tiny.py:{corpus}", "--config.train.eval_every=0", "--config.checkpoint.every=4")
    args = (*args, "--config.optim.schedule=constant")  # the parts have different numbers of steps
    run(
        folder,
        *args,
        "--config.train.steps=12",
        "--config.workdir=whole",
        IDS=str(folder / "whole.jsonl"),
    )
    run(folder, *args, "--config.train.steps=4")
    mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.model=2")
    parts = [folder / "ids.jsonl"]
    for processes, devices, accumulate, steps in ((4, 2, 2, 8), (2, 4, 1, 12)):
        overrides = (
            *args[1:],
            *mesh,
            f"--config.train.accumulate={accumulate}",
            f"--config.train.steps={steps}",
        )
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        several = cluster(
            folder,
            args[0],
            *overrides,
            processes=processes,
            **{f"only{i}": flags for i in range(processes)},
        )  # the later processes of a row of devices read the same rows
        outputs = [p.communicate(timeout=400)[0] for p in several]
        assert [p.returncode for p in several] == [0] * processes, outputs
        assert f"resuming from step {steps - 4}" in outputs[0]
        parts += [folder / f"ids{i}.jsonl" for i in range(processes)]
    lines = {line for path in parts for line in path.read_text().splitlines()}
    (folder / "all.jsonl").write_text("\n".join(sorted(lines)) + "\n")
    whole, found = ids(folder, "whole.jsonl"), {}
    for split, position, rows, index, *_ in map(
        json.loads, (folder / "all.jsonl").read_text().splitlines()
    ):
        for row, one in zip(range(*rows), index, strict=True) if split == "train" else ():
            assert found.setdefault((position, row), one) == one
    assert {k: i for k, i in found.items() if k[0] <= 12} == {
        (p, row): i for p in whole for row, i in enumerate(whole[p]) if p <= 12
    }
    ours, theirs = (records(folder / name, "train") for name in ("runs/tiny", "whole"))
    assert {s: r["loss"] for s, r in ours.items()} == pytest.approx(
        {s: r["loss"] for s, r in theirs.items()}, rel=2e-3
    )
