"""The fields that a config leaves to the plan."""

from dataclasses import replace

import pytest

from jaxtrain import plan
from jaxtrain.run import loop
from tests.plan.cases import DTYPE, load

AUTO = ("model.unroll", "0")
DEPTH = 4


def resolved(target, tmp_path, monkeypatch, *overrides):
    config = load("language", tmp_path, monkeypatch, DTYPE, AUTO, *overrides)
    assert config.model.depth == DEPTH
    return plan.resolve(config, plan.parse_target(target))


@pytest.mark.parametrize(
    ("target", "overrides", "unroll"),
    [
        ("gpu:h100x1", (), DEPTH),
        ("gpu:h100x8", (), DEPTH),
        ("gpu:h100x8", (("mesh.data", "2"), ("mesh.fsdp", "4")), 1),  # gathered side by side
        ("gpu:h100x1", (("model.unroll", "2"),), 2),
        ("tpu:v4:2x2x1", (), 1),
        ("", (), 1),  # this CPU
    ],
)
def test_layers_are_written_out_on_gpus(target, overrides, unroll, tmp_path, monkeypatch):
    assert resolved(target, tmp_path, monkeypatch, *overrides).model.unroll == unroll


def test_a_model_with_a_rule_of_its_own_keeps_it(tmp_path, monkeypatch):
    """An encoder decides at its first call whether its layers are written out, at any size."""
    for dtype in ("bfloat16", "float32"):
        changes = (AUTO, ("model.dtype", dtype), ("train.batch", "65536"))
        config = load("bird", tmp_path, monkeypatch, *changes)
        assert plan.resolve(config, plan.parse_target("gpu:h100x1")) == config


def test_a_stack_is_a_loop_if_written_out_it_does_not_fit(tmp_path, monkeypatch):
    """The smallest batch for which the loop's lower bound fits, and written-out layers do not."""
    target = plan.parse_target("gpu:h100x1")

    def bound_of(config):
        assembly = plan.abstractly(replace(config, model=replace(config.model, unroll=1)), target)
        return plan.bound.bound(assembly, assembly.trace(None), target)

    sizes = {}
    for exponent in range(15, 19):
        config = resolved(target.name, tmp_path, monkeypatch, ("train.batch", str(2**exponent)))
        sizes[bound_of(config).peak / target.memory] = config.model.unroll
    shares = sorted(sizes)
    assert all(sizes[share] == DEPTH for share in shares if share < 0.6)
    assert all(sizes[share] == 1 for share in shares if share > 0.7)
    assert shares[0] < 0.6 < 0.7 < shares[-1]


def test_a_run_is_of_the_resolved_config(tmp_path, monkeypatch):
    """It is the one that config.json and checkpoints have, and that the step is compiled of."""
    config = load("language", tmp_path, monkeypatch, AUTO, ("train.batch", "8"))

    def refuse(assembly):
        raise plan.PlanError(f"unroll is {assembly.config.model.unroll}")

    chosen = replace(config, model=replace(config.model, unroll=3))
    monkeypatch.setattr(plan, "resolve", lambda config, target: chosen)
    monkeypatch.setattr(plan, "refuse_if_too_large", refuse)
    with pytest.raises(plan.PlanError, match="unroll is 3"):
        loop.run(config)
