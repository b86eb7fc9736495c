"""Fields that are given as auto: the plan chooses what fits, a run decides once."""

import contextlib
import json
import logging
import math
import re
import types

import jax
import pytest

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.plan import auto, worker
from jaxtrain.plan.compile import Compiled
from tests.plan.cases import load
from tests.support import processes

AUTO = ("train.accumulate", "model.remat")
ALL = (*((path, "auto") for path in AUTO), ("model.unroll", "0"))
ROOMY = 64e9
GPU = "gpu:h100x1"


@pytest.fixture
def language(tmp_path, monkeypatch):
    """Return a function: overrides -> a config of the language model with 64 rows."""

    def make(*overrides):
        small = ("model.dtype", "bfloat16"), ("model.depth", "3"), ("train.batch", "16")
        return load("language", tmp_path, monkeypatch, *small, *overrides)

    return make


def with_bounds(monkeypatch, peak):
    """Give each choice a lower bound without a trace."""

    def bound(config, target):
        size = int(peak(config.train.accumulate, config.model.remat))
        return plan.bound.Bound(0, size // 2, [plan.bound.Array(size, "kept")])

    monkeypatch.setattr(auto, "bound_of", bound)


def with_memory(monkeypatch, memory):
    monkeypatch.setattr(plan.Target, "memory", memory)


def decided(config, text=""):
    target = plan.parse_target(text)
    config, line = plan.decide(config, target, text)
    config = plan.resolve(config, target)
    return (config.train.accumulate, config.model.remat, config.model.unroll), line


def test_a_cpu_with_room_recomputes_nothing_and_compiles_nothing(language, monkeypatch):
    monkeypatch.setattr(worker, "answer", lambda job: pytest.fail("compiled"))
    with_memory(monkeypatch, ROOMY)
    config = language(*ALL)
    assert config.train.auto == AUTO
    values, line = decided(config)
    assert values == (1, "none", 1)
    assert re.match(
        "auto is train.accumulate=1, model.remat=none: at least .* of 64.00 GB that a step may",
        line,
    )
    assert decided(language()) == ((1, "none", 1), ""), "without auto there is no choice"


def test_less_memory_takes_smaller_microbatches_then_recomputes(language, monkeypatch):
    """The sizes are those of plans with the fields set by hand."""
    rows = ("train.batch", "64")
    target = plan.parse_target("")

    def least(accumulate, remat):
        fields = ("train.accumulate", str(accumulate)), ("model.remat", remat)
        config = language(*fields, rows)
        assembly = plan.abstractly(config, target)
        lower = plan.bound.bound(assembly, assembly.trace(None), target)
        return lower.peak + sum(array.bytes for array in lower.kept)

    config = language(*ALL, rows)
    largest, smaller, recomputed = least(1, "none"), least(2, "none"), least(1, "full")
    assert largest > smaller > recomputed
    with_memory(monkeypatch, largest - 1)
    assert decided(config)[0] == (2, "none", 1)
    with_memory(monkeypatch, recomputed)
    assert decided(config)[0] == (1, "full", 1)


@pytest.mark.parametrize(
    ("text", "mesh", "order"),
    [
        ("tpu:v5e:2x2", "4", [(1, "none"), (1, "full"), (2, "none"), (2, "full")]),
        ("tpu:v5e:2x2", "1", [(1, "none"), (2, "none"), (4, "none"), (8, "none")]),
        ("gpu:h100x4", "4", [(1, "none"), (2, "none"), (4, "none"), (8, "none")]),
    ],
)
def test_a_tpu_slice_recomputes_before_it_gathers_matrices_again(language, text, mesh, order):
    rows = ("train.batch", "32"), ("mesh.fsdp", mesh), ("mesh.data", "-1")
    config = language(*ALL, *rows)
    choices = [dict(choice.values) for choice in auto.choices(config, plan.parse_target(text))]
    found = [(choice["train.accumulate"], choice["model.remat"]) for choice in choices]
    assert found[:4] == order


def test_a_field_that_is_not_auto_keeps_its_value(language, monkeypatch):
    with_memory(monkeypatch, ROOMY)
    config = language(("train.accumulate", "auto"), ("model.remat", "full"), ("model.unroll", "3"))
    assert config.train.auto == ("train.accumulate",)
    assert decided(config)[0] == (1, "full", 3)


def process_that_answers(monkeypatch, ask):
    """Let ``ask`` answer each job in place of the process of a compiler."""
    process = contextlib.nullcontext(types.SimpleNamespace(ask=ask))
    monkeypatch.setattr(worker, "Process", lambda kind: process)
    monkeypatch.setattr(worker.environment, "find", lambda kind: "here")


def on_gpus(monkeypatch, peak):
    """Answer for the compiler of GPUs. Returns the list of choices that it is asked for."""
    asked = []

    def ask(job):
        model = job.config.model
        values = job.config.train.accumulate, model.remat, model.unroll
        asked.append(values)
        size = peak(*values)
        if math.isinf(size):
            return worker.Answer(None, "out of memory", too_large=True)
        return worker.Answer(Compiled(0, 0, int(size), None, 1.0))

    process_that_answers(monkeypatch, ask)
    return asked


def test_on_gpus_the_compiler_decides_and_layers_are_written_out(language, monkeypatch):
    with_memory(monkeypatch, 10e9)
    with_bounds(monkeypatch, lambda accumulate, remat: 5e9)
    config = language(*ALL)
    depth = config.model.depth
    asked = on_gpus(monkeypatch, lambda accumulate, remat, unroll: 9.4e9)
    values, line = decided(config, GPU)
    assert values == (1, "none", depth) and asked == [values]
    assert "by its compiler 9.40 GB of 9.50 GB that a step may take" in line
    asked = on_gpus(monkeypatch, lambda accumulate, remat, unroll: 9.6e9 if unroll > 1 else 9.4e9)
    assert decided(config, GPU)[0] == (1, "none", 1) and asked == [values, (1, "none", 1)]


def test_on_tpus_the_compiler_decides_and_layers_stay_a_loop(language, monkeypatch):
    """Written out they were no faster by a TPU's compiler: docs/results/compiled-steps.md."""
    with_memory(monkeypatch, 10e9)
    with_bounds(monkeypatch, lambda accumulate, remat: 5e9)
    config = language(*ALL, ("mesh.data", "1"), ("mesh.fsdp", "-1"))
    sizes = {"none": 9.6e9, "full": 9.4e9}
    asked = on_gpus(monkeypatch, lambda accumulate, remat, unroll: sizes[remat])
    values, line = decided(config, "tpu:v5e:2x2")
    assert values == (1, "full", 1) and asked == [(1, "none", 1), values]
    assert "by its compiler 9.40 GB of 9.50 GB" in line


def test_a_choice_that_cannot_fit_by_another_ones_program_is_not_compiled(language, monkeypatch):
    """A step needs 80 GB a microbatch, or 64 in a loop: 8 of them fit into 10 GB. One that the
    compiler refuses is followed by the next."""
    with_memory(monkeypatch, 10e9)
    with_bounds(monkeypatch, lambda accumulate, remat: 1e6)
    config = language(*ALL, ("train.batch", "64"))
    depth = config.model.depth

    def peak(accumulate, remat, unroll):
        return (80e9 if unroll > 1 else 64e9) / accumulate if remat == "none" else 0.0

    asked = on_gpus(monkeypatch, peak)
    assert decided(config, GPU)[0] == (8, "none", 1)
    assert asked == [(1, "none", depth), (1, "none", 1), (8, "none", 1)]
    asked = on_gpus(
        monkeypatch, lambda *values: math.inf if values[0] < 4 else peak(64, *values[1:])
    )
    assert decided(config, GPU)[0] == (4, "none", depth) and len(asked) == 5
    on_gpus(monkeypatch, lambda accumulate, remat, unroll: 1e9 if remat == "full" else math.inf)
    assert decided(config, GPU)[0] == (1, "full", depth)


def test_a_compiler_that_fails_is_no_step_that_is_too_large(language, monkeypatch):
    config = language(*ALL)
    with_bounds(monkeypatch, lambda accumulate, remat: 1e6)
    on_gpus(monkeypatch, lambda *values: 0)
    process_that_answers(monkeypatch, lambda job: worker.Answer(None, "no ptxas"))
    with pytest.raises(plan.PlanError, match="cannot be decided: no ptxas"):
        decided(config, GPU)


def test_without_a_compiler_the_lower_bound_decides(language, monkeypatch):
    monkeypatch.setattr(worker.environment, "find", lambda kind: None)
    monkeypatch.setattr(worker, "Process", lambda kind: pytest.fail("compiled"))
    config = language(*ALL)
    values, line = decided(config, GPU)
    assert values == (1, "none", config.model.depth) and "at least" in line
    text, _ = plan.report(config, GPU)
    assert line in text and "not compiled for it" in text


def test_a_run_that_fits_nowhere_names_the_smallest_choice(language, monkeypatch, tmp_path):
    with_memory(monkeypatch, 1e3)
    sizes = {(1, "none"): 9e3, (2, "none"): 7e3, (1, "full"): 5e3, (2, "full"): 3e3}
    with_bounds(monkeypatch, lambda *values: sizes[values])
    config = language(("train.accumulate", "auto"), ("model.remat", "auto"))
    rows = config.train.batch // jax.device_count()
    with pytest.raises(plan.PlanError) as error:
        plan.decide_once(config)
    assert re.match(
        "train.accumulate and model.remat are auto, and nothing fits: the smallest choice,"
        rf" train.accumulate={rows}, model.remat=full, needs at least 6.00 kB on each device, and"
        r" a step may take 1.00 kB of each of .*\. ",
        str(error.value),
    )
    text, is_good = plan.report(config, "")
    assert f"problem: {error.value}" in text and not is_good, "a plan says the same"


@pytest.mark.parametrize("place", ["", GPU])
def test_the_smallest_choice_need_not_be_the_last_one(language, monkeypatch, place):
    """Several microbatches have a sum of the gradients besides those of one."""
    with_memory(monkeypatch, 10e9)
    sizes = {(1, "none"): 60e9, (2, "none"): 40e9, (1, "full"): 9.6e9, (2, "full"): 9.8e9}
    with_bounds(monkeypatch, lambda *values: 1e9 if place else sizes[values])
    on_gpus(monkeypatch, lambda accumulate, remat, _: sizes[accumulate, remat])
    target = plan.parse_target(place)
    config = language(*ALL[:2], ("train.batch", str(2 * target.count)))
    found = auto.best_fit(config, target, place)
    assert dict(found.choice.values) == {"train.accumulate": 1, "model.remat": "full"}
    assert not found.fits and "the smallest choice" in str(found)


@pytest.mark.parametrize(
    ("peak", "size"),
    [(math.inf, "by its compiler more than 9.50 GB"), (12e9, "by its compiler 12.00 GB")],
)
def test_a_bound_is_not_compared_with_programs(language, monkeypatch, peak, size):
    """That of a larger program may be below the size of a smaller one."""
    with_memory(monkeypatch, 10e9)
    with_bounds(monkeypatch, lambda accumulate, remat: 11e9 if remat == "none" else 1e9)
    on_gpus(monkeypatch, lambda *values: peak)
    config = language(("model.remat", "auto"), ("train.batch", "4"))
    found = str(auto.best_fit(config, plan.parse_target(GPU), GPU))
    assert found.startswith(f"auto is model.remat=full: {size}")


def test_a_size_by_another_ones_program_is_named_so(language, monkeypatch):
    with_memory(monkeypatch, 10e9)
    with_bounds(monkeypatch, lambda *values: 1e6)
    on_gpus(monkeypatch, lambda *values: 80e9)
    config = language(("train.accumulate", "auto"), ("train.batch", "4"))
    found = auto.best_fit(config, plan.parse_target(GPU), GPU)
    assert str(found).startswith(
        "auto is train.accumulate=4: by the program of another number of microbatches 20.00 GB of"
        " 9.50 GB that a step may take, the smallest choice"
    )


@pytest.mark.parametrize("place", ["", GPU])
def test_a_choice_that_does_not_fit_has_the_size_that_was_compared(language, monkeypatch, place):
    """By the bound alone 9.9 GB fit, and compiled ones may take 95 % of a device."""
    with_memory(monkeypatch, 10e9)
    with_bounds(monkeypatch, lambda *values: 6e9)
    on_gpus(monkeypatch, lambda *values: 9.6e9)
    target = plan.parse_target(place)
    config = language(("train.accumulate", "auto"), ("train.batch", str(target.count)))
    found = auto.best_fit(config, target, place)
    size, limit = (9.6e9, 9.5e9) if place else (12e9, 10e9)
    assert (found.limit, found.fits) == (limit, False)
    assert found.size == pytest.approx(size, abs=auto.MIB)


def test_processes_with_other_limits_choose_for_the_least_of_them(language, monkeypatch):
    """It is agreed once, before the first bound."""
    config = language(*ALL)
    with_memory(monkeypatch, ROOMY)
    sizes = {(1, "none"): 9e6, (2, "none"): 7e6}
    with_bounds(monkeypatch, lambda *values: sizes.get(values, 1e6))
    asked = []

    def gather(value):
        asked.append(value)
        return [value, 15]  # the other process has 15 MiB

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(auto.cluster, "gather", gather)
    found = auto.best_fit(config, plan.parse_target(""), "")
    assert found.config.train.accumulate == 2 and found.limit == 15 * auto.MIB
    assert asked == [int(ROOMY / auto.MIB)]


def test_a_resumed_run_keeps_the_choice_of_its_first_start(language, monkeypatch, tmp_path):
    config = language(*ALL)
    with_bounds(monkeypatch, lambda accumulate, remat: 1e6)
    with_memory(monkeypatch, ROOMY)
    first = plan.decide_once(config)
    assert (first.train.accumulate, first.model.remat, first.train.auto) == (1, "none", ())
    other = {
        "train": {"accumulate": 2},
        "model": {"remat": "save attention", "unroll": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(other))
    resumed = plan.decide_once(config)
    assert resumed.train.accumulate == 2
    text, _ = plan.report(config, "")
    assert "auto is train.accumulate=2, model.remat=save attention" in text
    assert "as at the run's first start" in text, "a plan shows what a resume takes"
    assert (resumed.model.remat, resumed.model.unroll) == ("save attention", 3)
    for damage in ("{", "[]", '{"train": 1}', json.dumps({**other, "train": {"accumulate": 7}})):
        (tmp_path / "config.json").write_text(damage)
        assert plan.decide_once(config) == first, "it does not divide the rows, or is damaged"
    config_lib.save(first, str(tmp_path))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["train"]["accumulate"] == 1 and saved["train"]["auto"] == []


def test_a_resume_on_devices_with_less_memory_decides_again(language, monkeypatch, caplog):
    """As on fewer devices, each of which then has more rows at once."""
    config = language(*ALL)
    with_bounds(monkeypatch, lambda accumulate, remat: 8e6 / accumulate)
    with_memory(monkeypatch, ROOMY)
    first = plan.decide_once(config)
    config_lib.save(first, config.workdir)
    with_memory(monkeypatch, 9e6)
    with caplog.at_level(logging.INFO):
        resumed = plan.decide_once(config)
    assert (first.train.accumulate, resumed.train.accumulate) == (1, 2)
    assert "at the run's first start, which needs at least 16.00 MB of 9.00 MB here" in caplog.text
    with_memory(monkeypatch, ROOMY)
    assert plan.decide_once(config).train.accumulate == 1, "config.json has the first choice"


@pytest.mark.parametrize(
    ("workload", "overrides", "error"),
    [
        (
            "giblet",
            [("train.accumulate", "auto")],
            "train.accumulate is auto, and the loss of this model has statistics",
        ),
        ("language", [("model.unroll", "auto")], "model.unroll is 'auto'"),
        ("language", [("model.depth", "auto")], "model.depth is 'auto'"),
        (
            "language",
            [("train.auto", "('model.remat',)"), ("model.remat", "auto")],
            "train.auto is set, and so are fields that are auto",
        ),
        (
            "language",
            [("train.auto", "('model.rematt',)")],
            "names 'model.rematt'; expected one of: train.accumulate, .*did you mean 'model.remat'",
        ),
    ],
)
def test_errors_of_auto_are_named(workload, overrides, error, tmp_path, monkeypatch):
    with pytest.raises(config_lib.ConfigError, match=error):
        load(workload, tmp_path, monkeypatch, *overrides)


@pytest.mark.slow
def test_two_processes_decide_alike_and_a_start_later_keeps_it(folder):
    auto = "--config.train.accumulate=auto"
    steps = "--config.train.steps=6", "--config.checkpoint.every=3"
    both = processes.cluster(folder, "toy.py", auto, *steps, processes=2)
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], "\n".join(outputs)
    assert "auto is train.accumulate=1: at least" in outputs[0]
    [workdir] = (path.parent for path in folder.glob("**/config.json"))
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["train"]["accumulate"] == 1 and saved["train"]["auto"] == []
    again = processes.run(folder, "toy.py", auto, *steps)
    assert "auto is train.accumulate=1, as at the run's first start" in again
