"""StepCompiler compiles programs ahead of the steps that need them."""

import dataclasses
import json
import threading
import time
import types

import jax
import pytest

from jaxtrain import cli
from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.parallel.layout import Devices
from jaxtrain.run.step_compiler import CompileAhead
from jaxtrain.step import update
from tests.support import toy, toy_rows
from tests.support.pages import examples


def test_programs_are_compiled_once_each_in_order_and_before_they_are_needed():
    order, gate = [], threading.Event()

    def compiled(stage):
        if stage == 2:
            gate.wait(10)
        order.append(stage)
        return lambda: stage

    programs = CompileAhead(lambda step: min(step // 5, 3), compiled)
    programs.start(3, 19)
    assert programs.starts == {0: 3, 1: 5, 2: 10, 3: 15}
    assert programs.at(3)() == 0 and programs.at(4)() == 0 and programs.at(5)() == 1
    late = threading.Thread(target=programs.at, args=(10,))
    late.start()
    gate.set()
    late.join(10)
    assert [programs.at(step)() for step in (10, 18)] == [2, 3] and order == [0, 1, 2, 3]
    assert 10 in programs.late and 3 not in programs.late
    programs.close()


def test_a_compilation_that_fails_is_raised_at_its_step_and_not_before():
    def compiled(stage):
        if stage:
            raise ValueError("stage 1 does not fit")
        return lambda: stage

    programs = CompileAhead(lambda step: step, compiled)
    programs.start(0, 2)
    assert programs.at(0)() == 0
    with pytest.raises(ValueError, match="stage 1 does not fit"):
        programs.at(1)
    programs.close()


def test_an_evaluation_is_compiled_after_the_first_step_and_its_failure_ends_the_run_early():
    order = []

    def compiled(stage):
        order.append(stage)
        return lambda: stage

    def evaluation():
        order.append("evaluation")
        return lambda: "evaluated"

    programs = CompileAhead(lambda step: step // 5, compiled)
    programs.start(0, 10, others=[evaluation])
    assert programs.at(0)() == 0 and programs.other(0)() == "evaluated" and programs.at(9)() == 1
    assert order == [0, "evaluation", 1]
    programs.close()

    def too_large():
        raise ValueError("the evaluation does not fit")

    programs = CompileAhead(lambda step: 0, compiled)
    programs.start(0, 1_000_000, others=[too_large])
    with pytest.raises(ValueError, match="does not fit"):
        # at one of the first steps, although the evaluation was not requested
        for step in range(1_000_000):
            programs.at(step)
    with pytest.raises(ValueError, match="does not fit"):
        programs.other(0)
    programs.close()


def test_a_run_without_steps_left_has_its_evaluation():
    programs = CompileAhead(lambda step: 0, lambda stage: None)
    programs.start(5, 5, others=[lambda: lambda: "evaluated"])
    assert programs.other(0)() == "evaluated"
    programs.close()


def test_the_program_of_a_likely_first_step_is_compiled_before_it_is_known_and_once():
    order = []

    def compiled(stage):
        order.append(stage)
        return lambda: stage

    programs = CompileAhead(lambda step: step // 5, compiled)
    programs.expect(6)
    deadline = time.monotonic() + 60
    while not order and time.monotonic() < deadline:
        time.sleep(0.001)
    programs.start(5, 15, others=[lambda: lambda: order.append("evaluation")])
    assert programs.at(5)() == 1 and programs.at(14)() == 2
    programs.other(0)()
    assert order == [1, 2, "evaluation"]
    programs.close()

    order.clear()
    programs = CompileAhead(lambda step: step // 5, compiled)
    # the newest checkpoint was damaged, and the run resumes from the one before it
    programs.expect(9)
    programs.start(4, 8)
    assert programs.at(4)() == 0 and programs.at(7)() == 1 and sorted(order) == [0, 1]
    programs.close()


def test_norms_are_computed_by_a_second_program_only_if_they_read_much(monkeypatch):
    """The rule counts the bytes of gradients, parameters and moments of a device."""
    config = config_lib.Config(model=toy.Config(), metrics=config_lib.Metrics(every=5))
    config = dataclasses.replace(config, train=config_lib.Train(steps=12, batch=8))

    def steps_with_norms(count):
        mesh = jax.make_mesh(
            (count, 1, 1), ("data", "fsdp", "model"), devices=jax.devices()[:count]
        )
        assembly = assemble(
            config, mesh, make_task=toy.make_task, fields=toy_rows.element_spec(None)
        )
        return [step for step in range(1, 13) if assembly.has_norms(step)]

    every_step = list(range(1, 13))
    assert steps_with_norms(4) == every_step
    n_bytes = 4 * sum(x.size * 4 for x in jax.tree.leaves(toy_parameters()))  # with Adam's two
    monkeypatch.setattr(update, "MIN_BYTES_OF_NORMS", n_bytes)
    assert steps_with_norms(4) == [5, 10, 12], "those that are recorded, and the last"
    assert steps_with_norms(1) == every_step, "one CPU has norms in a branch"
    monkeypatch.setattr(update, "MIN_BYTES_OF_NORMS", n_bytes + 100)
    assert steps_with_norms(4) == every_step


def test_norms_have_a_program_of_their_own_from_fewer_bytes_on_tpus(monkeypatch):
    monkeypatch.setattr(update, "bytes_per_device", lambda arrays: 2 << 30)
    tpus, gpus = (
        types.SimpleNamespace(devices=Devices(kind), mesh=None) for kind in ("tpu", "gpu")
    )
    assert update.are_norms_expensive(tpus, {}, {})
    assert not update.are_norms_expensive(gpus, {}, {})


def toy_parameters():
    config = config_lib.Config(model=toy.Config(), train=config_lib.Train(batch=8))
    mesh = jax.make_mesh((1, 1, 1), ("data", "fsdp", "model"), devices=jax.devices()[:1])
    assembly = assemble(config, mesh, make_task=toy.make_task, fields=toy_rows.element_spec(None))
    return assembly.abstract.state.variables.params


def test_a_run_with_a_second_program_has_the_same_states_and_records(tmp_path, monkeypatch, caplog):
    """Verified steps are computed twice by the same program, on each mesh."""
    for name in ("my_workload.py", "my_config.py", "my_loader.py"):
        (tmp_path / name).write_text(examples()[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def train(name):
        command = ["train", "--config=my_config.py", f"--config.workdir={name}"]
        settings = {
            "train.steps": 7,
            "metrics.every": 3,
            "metrics.digest": "true",
            "checkpoint.every": 4,
            "guard.verify_every": 2,
        }
        assert not cli.main(
            command + [f"--config.{name}={value}" for name, value in settings.items()]
        )
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        digests = (tmp_path / name / "digests.jsonl").read_text()
        kept = ("step", "split", "loss", "update_norm", "param_norm_after", "miscomputed")
        return [{k: record.get(k) for k in kept} for record in records], digests

    one, digests = train("one")
    monkeypatch.setattr(update, "MIN_BYTES_OF_NORMS", 0)
    caplog.set_level("INFO")
    two, digests_of_two = train("two")
    assert "2 programs, by (stage, bucket, norms), are compiled ahead" in caplog.text
    assert "{(None, 0, False): 0, (None, 0, True): 2}" in caplog.text
    assert two == one and digests_of_two == digests
    recorded = [line["step"] for line in two if line["update_norm"] is not None]
    assert recorded == [3, 6, 7]
