"""The program as a user meets it: real processes, real recordings, real kills."""

import json
import pathlib
import re
import signal
import socket
import time

import jax
import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain import config as config_lib
from jaxtrain.arrays import orbax_steps
from jaxtrain.assembly import assemble
from jaxtrain.data import feed
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry import goodput
from loaders.base import Rows
from tests.support import toy, toy_rows
from tests.support.processes import command, free_port, hashes, ids, records, run

TRACED = "--config.metrics.profile=(2, 2)"


def test_promises_1_and_2_and_3_a_killed_run_resumed_in_a_fresh_process_equals_the_undisturbed_one(
    folder,
):
    run(folder, "toy.py", "--config.workdir=whole", IDS=str(folder / "whole.jsonl"))
    began = time.time()
    after = str(folder / "killed" / "checkpoints" / "10")
    killed = (folder, "toy.py", "--config.workdir=killed")
    run(*killed, code=-signal.SIGKILL, KILL_AT="16", KILL_AFTER=after)
    assert not (folder / "killed" / "checkpoints" / "20").exists()
    output = run(*killed)
    assert "resuming from step 10" in output
    assert hashes(folder / "killed", 20) == hashes(folder / "whole", 20)
    assert len(hashes(folder / "whole", 20)) > 24
    assert ids(folder)[20] == ids(folder, "whole.jsonl")[20]
    assert {p: ids(folder)[p] for p in range(1, 21)} == {
        p: ids(folder, "whole.jsonl")[p] for p in range(1, 21)
    }
    for split in ("train", "test"):
        assert records(folder / "killed", split) == records(folder / "whole", split)
    of_classes = (folder / "whole" / "classes.jsonl").read_bytes()
    assert (folder / "killed" / "classes.jsonl").read_bytes() == of_classes
    for line in map(json.loads, of_classes.splitlines()):
        tested = records(folder / "whole", "test")[line["step"]]
        assert line["n"] == 13 and sum(line["right"]) == round(13 * tested["accuracy"])
    assert "schedule of the learning rate" not in output
    ended = run(*killed)
    assert (
        "goodput " in output and "already reached step 20" in ended and "compiling" not in ended
    ), "a run that has ended says so at once"
    # Three starts of one process: their parts account for all the time that passed.
    starts, now = goodput.read(folder / "killed")[0], time.time()
    seconds, wall = goodput.totals(starts), starts[-1].now - began
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
    assert now - starts[-1].now < wall / 4, (
        "an interpreter's end is no run's time, and little: a busy machine stretches both"
    )
    assert [(s.first, s.end) for s in starts] == [(0, ""), (10, "ended"), (20, "ended")] and starts[
        1
    ].step == 20
    assert (
        starts[0].step <= 16 and 0 < seconds[goodput.STEPS] + seconds.get(goodput.AGAIN, 0) < wall
    )
    assert (
        min(
            seconds[name]
            for name in (goodput.IMPORTS, goodput.COMPILATION, goodput.SAVES, goodput.EVALUATION)
        )
        > 0
    )


def test_promise_4_two_processes_equal_one(folder):
    port = free_port()
    overrides = (
        "--config.train.steps=4",
        "--config.train.eval_every=2",
        "--config.mesh.fsdp=2",
        "--config.train.accumulate=2",
    )
    run(
        folder,
        "toy.py",
        "--config.workdir=one",
        *overrides,
        devices=4,
        IDS=str(folder / "one.jsonl"),
    )
    both = [
        command(
            folder,
            "toy.py",
            "--config.workdir=two",
            "--config.metrics.profile=(3, 3)",
            *overrides,
            devices=2,
            IDS=str(folder / f"two{i}.jsonl"),
            JAXTRAIN_COORDINATOR=f"127.0.0.1:{port}",
            JAXTRAIN_PROCESSES="2",
            JAXTRAIN_PROCESS=str(i),
            JAX_COMPILATION_CACHE_DIR=str(folder / "cache"),
        )
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], "\n".join(outputs)
    assert not list((folder / "cache").glob("*")), (
        "read back by one process, its collectives could meet others of the rest"
    )
    assert "test" in outputs[0] and "  loss " not in outputs[1], "only process 0 has the console"
    times = goodput.read(folder / "two")
    assert [(s.process, s.processes, s.step, s.end) for [s] in times.values()] == [
        (0, 2, 4, "ended"),
        (1, 2, 4, "ended"),
    ]
    assert all(
        s.seconds[goodput.OTHERS] > 0 and s.seconds[goodput.STEPS] > 0 for [s] in times.values()
    )
    assert all(
        len(rows) == 4 for i in range(2) for rows in ids(folder, f"two{i}.jsonl").values()
    ), "each reads its half"
    (folder / "two.jsonl").write_text(
        "".join((folder / f"two{i}.jsonl").read_text() for i in range(2))
    )
    one, two = ids(folder, "one.jsonl"), ids(folder, "two.jsonl")
    assert {p: two[p] for p in range(1, 5)} == {p: one[p] for p in range(1, 5)}
    for split in ("train", "test"):
        found, expected = records(folder / "two", split), records(folder / "one", split)
        assert found.keys() == expected.keys()
        for step in expected:
            numbers = [
                np.array([r[k] for k in sorted(r) if k != "split"])
                for r in (found[step], expected[step])
            ]
            np.testing.assert_allclose(*numbers, rtol=1e-4)
    assert hashes(folder / "two", 4).keys() == hashes(folder / "one", 4).keys()
    assert (folder / "two" / "classes.jsonl").read_bytes() == (
        folder / "one" / "classes.jsonl"
    ).read_bytes()
    [traced] = (folder / "two" / "traces").iterdir()
    assert traced.name == "steps-000003-000003-process-0", (
        "the other process took the same steps without a trace"
    )


def test_control_c_ends_a_run_and_the_same_command_resumes(folder, capsys):
    process = command(
        folder, "toy.py", "--config.train.steps=100000", "--config.train.eval_every=0"
    )
    metrics = folder / "runs" / "toy" / "checkpoints" / "20"
    deadline = time.monotonic() + 200
    while not metrics.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    # Request a trace of its next steps meanwhile.
    assert cli.main(["profile", str(folder / "runs" / "toy"), "--steps", "2"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"traces/steps-(\d{6})-(\d{6})-process-0\n", told) and re.search(
        r"\d%  backward", told
    ), told
    process.send_signal(signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()  # it has 100,000 steps, and would compete with all other tests
    assert process.returncode == 130 and "Traceback" not in output, output
    step = int(re.search(r"ended by Ctrl-C after step (\d+), saved in runs/toy", output)[1])
    assert (folder / "runs" / "toy" / "checkpoints" / str(step)).is_dir()
    output = run(
        folder, "toy.py", f"--config.train.steps={step + 1}", "--config.train.eval_every=0"
    )
    assert f"resuming from step {step}" in output


def test_a_run_ends_by_patience_and_keeps_its_best_step(folder):
    patient = (
        "--config.train.steps=50",
        "--config.train.eval_every=2",
        "--config.train.patience=3",
        "--config.train.min_delta=100",
    )
    args = (
        folder,
        "toy.py",
        *patient,
        "--config.checkpoint.best=accuracy",
        "--config.checkpoint.every=4",
        "--config.checkpoint.keep=1",
    )
    output = run(*args)
    # The first evaluation is progress. The three more, at steps 4, 6 and 8, are not.
    assert "ended at step 8: no progress of accuracy for 3 evaluations; the best " in output
    assert re.search(r"at most 48 more steps, 1 min at [\de.-]+ s each; .* 3 evaluations", output)
    assert "--config.train.patience=0 --config.train.steps=100" in output, "to train for longer"
    workdir = folder / "runs" / "toy"
    tests = records(workdir, "test")
    assert sorted(tests) == [2, 4, 6, 8]
    best = json.loads((workdir / "best.json").read_text())
    assert (
        best["value"] == pytest.approx(max(r["accuracy"] for r in tests.values()))
        and best["progress"]["step"] == 2
    )
    kept = {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()}
    assert {8, best["step"]} <= kept
    again = run(*args)
    assert "ended at step 8" in again and sorted(records(workdir, "test")) == [2, 4, 6, 8]


@pytest.mark.slow
def test_a_run_of_cycles_that_is_killed_in_one_ends_by_patience_as_the_undisturbed_one(folder):
    args = [
        "--config.train.steps=48",
        "--config.train.eval_every=4",
        "--config.train.patience=2",
        "--config.train.min_delta=100",
        "--config.optim.schedule=cycle",
        "--config.optim.cycle=4",
        "--config.optim.lr=0.01",
        "--config.checkpoint.best=accuracy",
        "--config.checkpoint.every=2",
    ]
    whole = run(folder, "toy.py", "--config.workdir=whole", *args)
    ending = re.search(r"ended at step 12: no progress .*", whole)
    killed = (folder, "toy.py", "--config.workdir=killed", *args)
    after = str(folder / "killed" / "checkpoints" / "10")
    run(*killed, code=-signal.SIGKILL, KILL_AT="11", KILL_AFTER=after)
    resumed = run(*killed)
    assert "resuming from step 10" in resumed and ending and ending[0] in resumed
    assert hashes(folder / "killed", 12) == hashes(folder / "whole", 12)
    best = [(folder / name / "best.json").read_text() for name in ("whole", "killed")]
    assert best[0] == best[1]


def test_patience_does_not_count_while_a_run_only_guesses(folder):
    output = run(
        folder,
        "toy.py",
        "--config.train.steps=8",
        "--config.train.eval_every=1",
        "--config.train.patience=2",
        "--config.train.min_delta=100",
        "--config.train.patience_from=1.0",
        "--config.checkpoint.best=accuracy",
    )
    reason = "accuracy never passed train.patience_from=1: nothing is learned; the best accuracy, "
    assert f"ended at step 8: the last of train.steps, and {reason}" in output


def test_a_run_ends_at_once_when_it_reaches_its_target(folder):
    fields = ["--config.train.steps=50", "--config.train.eval_every=2", "--config.train.target=0.0"]
    args = (folder, "toy.py", *fields, "--config.checkpoint.best=accuracy")
    output = run(*args)
    assert "ended at step 2: accuracy has reached train.target=0; the best accuracy, " in output
    assert "--config.train.target=None --config.train.steps=100" in output, "to train for longer"
    again = run(*args)
    assert "ended at step 2" in again
    assert sorted(records(folder / "runs" / "toy", "test")) == [2]
    longer = run(*args, "--config.train.target=None", "--config.train.steps=4")
    assert "resuming from step 2" in longer and "ended at step" not in longer


def test_a_best_metric_that_no_evaluation_has_is_reported_at_the_start(folder):
    output = run(folder, "toy.py", "--config.checkpoint.best=-los", code=2)
    assert "config.checkpoint.best names 'los'; expected one of: accuracy, loss" in output
    output = run(
        folder, "toy.py", "--config.checkpoint.best=loss", "--config.data.n_test=0", code=2
    )
    assert "config.checkpoint.best is 'loss', and there is no test split" in output


def test_a_best_metric_with_the_wrong_sign_is_refused_at_the_start(folder):
    for metric, remedy in (("loss", "'-loss'"), ("-accuracy", "'accuracy'")):
        output = run(folder, "toy.py", f"--config.checkpoint.best={metric}", code=2)
        assert f"config.checkpoint.best is '{metric}', of which the" in output
        assert f"is better; set {remedy}" in output
    assert not records(folder / "runs" / "toy", "train"), "before the first step"


def test_another_model_or_other_data_are_refused_with_a_remedy(folder):
    run(folder, "toy.py", "--config.train.steps=1")
    output = run(folder, "toy.py", "--config.train.steps=2", "--config.model.embed=64", code=2)
    assert "embed: 32 saved, 64 now. Set it back, or choose another workdir" in output
    output = run(folder, "toy.py", "--config.train.steps=2", "--config.data.exclude=(3,)", code=2)
    assert "order" in output and "config.workdir" in output


def parameters(workdir: pathlib.Path, step: int, group: str = "params") -> dict[str, np.ndarray]:
    arrays = orbax_steps.open_step(workdir / "checkpoints" / str(step))
    return {
        path.removeprefix(f"{group}/"): s.read(())
        for path, s in arrays.items()
        if path.startswith(f"{group}/")
    }


@pytest.mark.slow
def test_a_warm_start_on_two_processes_and_its_own_checkpoint_first_afterwards(folder):
    run(folder, "toy.py", "--config.workdir=first", "--config.train.steps=2")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    overrides = (
        "--config.workdir=second",
        "--config.train.steps=1",
        "--config.mesh.fsdp=2",
        "--config.optim.lr=1e-30",  # this step leaves every parameter as it was
        "--config.warm_start.source=first",
        "--config.warm_start.skip=('^head/',)",
    )
    both = [
        command(
            folder,
            "toy.py",
            *overrides,
            devices=2,
            IDS=str(folder / f"ids{i}.jsonl"),
            JAXTRAIN_COORDINATOR=f"127.0.0.1:{port}",
            JAXTRAIN_PROCESSES="2",
            JAXTRAIN_PROCESS=str(i),
        )
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], "\n".join(outputs)
    assert f"warm start from {folder / 'first'}" in outputs[0]
    assert "2 skipped, although in the source: head/b" in outputs[0]
    first, second = parameters(folder / "first", 2), parameters(folder / "second", 1)
    for group in (second, parameters(folder / "second", 1, "ema")):
        for path, x in group.items():
            if not path.startswith("head/"):
                np.testing.assert_allclose(x, first[path], rtol=1e-6, atol=1e-20)
        np.testing.assert_allclose(group["head/b"], 0, atol=1e-20)
        assert not np.allclose(group["head/w"], first["head/w"], atol=1e-4)
    output = run(folder, "toy.py", *overrides, "--config.train.steps=2", devices=2)
    assert "resuming from step 1" in output and "warm start" not in output


def test_a_warm_start_that_does_not_fit_or_is_damaged_stops_with_every_reason(folder):
    run(folder, "toy.py", "--config.workdir=first", "--config.train.steps=1")
    again = (folder, "toy.py", "--config.workdir=second", "--config.warm_start.source=first")
    output = run(*again, "--config.model.depth=1", "--config.warm_start.skip=('^probe/',)", code=2)
    assert "encoder/blocks/w_up: [2, 32, 128] in the source, [1, 32, 128] here" in output
    assert (
        "encoder/blocks/b_up" in output
        and "'^probe/' matches nothing" in output
        and "Traceback" not in output
    )
    step = folder / "first" / "checkpoints" / "1"
    data = max(step.rglob("d/*"), key=lambda p: p.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    output = run(*again, code=2)
    assert data.name in output and "Traceback" not in output


def test_evaluation_is_exact_on_a_ragged_last_batch():
    """There are 13 test rows. Padded batches of 8 on 8 devices equal one batch of 13 on one
    device."""
    data, found = toy_rows.Config(), []
    for batch, devices in ((8, 8), (13, 1)):
        config = config_lib.Config(
            model=toy.Config(depth=1), data=data, train=config_lib.Train(batch=batch)
        )
        mesh = layout_lib.make_mesh(-1, 1, 1, devices=jax.devices()[:devices])
        assembly = assemble(
            config, mesh, make_task=toy.make_task, fields=toy_rows.element_spec(data)
        )
        plan = assembly.abstract
        rows = feed.rows_for(plan.batch)
        assert isinstance(rows, Rows) and len(rows.ranges) == devices
        loader = toy_rows.make_loader(data, split="test", rows=rows, seed=0)
        state = state_lib.init_state(assembly.task, assembly.tx, plan, jax.random.key(0))
        step = step_lib.make_eval_step(assembly.task, assembly.layout)
        loader.seek(0)
        sums = [
            jax.device_get(step(state.variables, feed.put(next(loader)[1], plan.batch, rows)))
            for _ in range(loader.n_batches)
        ]
        loader.close()
        found.append(
            {
                k: (sum(s[k].total for s in sums), sum(float(s[k].weight) for s in sums))
                for k in sums[0]
            }
        )
    # which are sums
    assert all(weight == 13 for name, (_, weight) in found[0].items() if name != "classes")
    for name, (total, _) in found[0].items():  # a number, or counts by class
        np.testing.assert_allclose(total, found[1][name][0], rtol=1e-5)
