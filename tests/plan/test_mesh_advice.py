"""The lines of a plan about exchanges between GPUs, and the meshes and options that it proposes."""

import re
import types

import jax
import pytest

from jaxtrain import plan
from jaxtrain.compile import xla_options
from jaxtrain.parallel.layout import LayoutError
from jaxtrain.plan import hlo, mesh_advice, summary, traffic, worker
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.exposure import Exchange, Exposure
from tests.plan.cases import load
from tests.plan.scheduled import WITHIN, done, kernel, start, text

FSDP = (("mesh.fsdp", "8"), ("train.batch", "64"))
KERNELS = "klmnopqrst"  # 27 µs, in which a sum over eight cards is hidden
ADAPTERS = (
    ("lora.rank", "2"),
    ("lora.adapt", "blocks/w_"),
    ("lora.freeze", "^(?!blocks/w_)"),
    ("train.accumulate", "8"),
)


def lines(target, config):
    target = plan.parse_target(target)
    found = Exposure(1.0, {("fsdp",): Exchange(0.8, 0.5)})
    assembly = plan.abstractly(config, target)
    return "\n".join(mesh_advice.mesh_lines(assembly, target, found, 0.0))


def test_data_is_proposed_if_its_sums_are_short_and_the_state_fits(tmp_path, monkeypatch):
    config = load("language", tmp_path, monkeypatch, *FSDP)
    found = lines("gpu:h100x8", config)
    proposal = r"less: --config.mesh.data=8 --config.mesh.fsdp=1 --config.mesh.model=1, about \S+ "
    assert re.search(proposal, found)
    monkeypatch.setattr(plan.Target, "memory", 1e6)
    assert not lines("gpu:h100x8", config)
    replicas = load("language", tmp_path, monkeypatch, ("mesh.data", "8"), ("train.batch", "64"))
    assert not lines("gpu:h100x8", replicas)


def test_fsdp_on_a_node_is_proposed_to_a_larger_model(tmp_path, monkeypatch):
    config = load("language", tmp_path, monkeypatch, ("mesh.fsdp", "16"), ("train.batch", "64"))
    monkeypatch.setattr(mesh_advice, "LITTLE", 0)  # as if its sums were long
    assert "less: --config.mesh.data=2 --config.mesh.fsdp=8" in lines("gpu:h100x8*2", config)


def test_one_microbatch_is_proposed_for_frozen_matrices_over_fsdp(tmp_path, monkeypatch):
    config = load("language", tmp_path, monkeypatch, *FSDP, *ADAPTERS)
    line = "for each of 8 microbatches: --config.train.accumulate=1 sends 1/8"
    needs = types.SimpleNamespace(arguments=0, temporaries=0)
    for name in ("gpu:h100x8", "tpu:v5e:2x4"):
        target = plan.parse_target(name)
        assembly = plan.abstractly(config, target)
        job = worker.Job(config, name, worker.LAST)
        found = "\n".join(summary._mesh_lines(assembly, target, job, step(kernel("k")), needs))
        assert line in found, "before: on GPUs alone"
    config = load("language", tmp_path, monkeypatch, *FSDP, ("train.accumulate", "8"))
    assert not list(mesh_advice.microbatch_lines(plan.abstractly(config, target)))


def test_a_plan_refuses_a_mesh_over_nodes_as_a_run_would(tmp_path, monkeypatch):
    config = load("language", tmp_path, monkeypatch, ("mesh.model", "16"))
    with pytest.raises(LayoutError, match="2 nodes do not divide data × fsdp = 1"):
        plan.abstractly(config, plan.parse_target("gpu:h100x8*2"))
    config = load("language", tmp_path, monkeypatch, *FSDP[1:], ("mesh.fsdp", "16"))
    assert plan.abstractly(config, plan.parse_target("gpu:h100x8*2")).layout.mesh.size == 16
    slices = plan.parse_target("tpu:v4:2x2x2*2")
    with pytest.raises(LayoutError, match="2 slices do not divide data=1"):
        plan.abstractly(config, slices)


def step(*body):
    kernels = traffic.traffic(hlo.Program(text(*body)))
    return Compiled(10**9, 0, 10**9, None, 1.0, kernels=kernels, text=text(*body))


def test_more_overlap_is_tried_if_much_is_exposed(tmp_path, monkeypatch):
    """The config's own options are kept, and those of one that has them are not changed."""
    exposed = step(start("a", WITHIN), done("a"), *map(kernel, KERNELS))
    hidden = step(start("a", WITHIN), *map(kernel, KERNELS), done("a"))
    config = load("language", tmp_path, monkeypatch, *FSDP, ("compiler.xla_gpu_x", "1"))
    target = plan.parse_target("gpu:h100x8")
    assembly = plan.abstractly(config, target)
    asked = []

    def answer(result):
        def answers(jobs, target):
            asked.extend(job.config.compiler for job in jobs)
            return [worker.Answer(result)]

        return answers

    def printed(first, second, config=config):
        monkeypatch.setattr(summary, "_answers", answer(second))
        needs = plan.bound.Bound(0, 0, [])
        job = worker.Job(config, target.name)
        return "\n".join(summary._mesh_lines(assembly, target, job, first, needs))

    found = printed(exposed, hidden)
    assert re.search(r"0\.0\d ms of the links over fsdp, of which 0\.0\d ms are exposed", found)
    line = "more overlap: 0.00 ms exposed, 1.00 GB with --config.compiler.optimization_level=O1"
    assert line in found
    assert asked == [{**config.compiler, **mesh_advice.MORE_OVERLAP}]
    assert "no gain by --config.compiler" in printed(exposed, exposed)
    assert "overlap:" not in printed(hidden, hidden)
    own = load("language", tmp_path, monkeypatch, *FSDP, ("compiler.optimization_level", "O2"))
    assert "overlap:" not in printed(exposed, hidden, own) and len(asked) == 2


@pytest.mark.parametrize("name", ["optimization_level", "memory_fitting_level"])
def test_levels_are_passed_to_each_release_of_jax(name, tmp_path, monkeypatch):
    config = load("language", tmp_path, monkeypatch, (f"compiler.{name}", "O1"))
    cpu = jax.devices()[0]
    options = xla_options.options(config.compiler, "cpu", count=8, device=cpu)
    assert options[name] == "O1"
    with pytest.raises(ValueError, match=f"compiler.{name} is 'O9'; expected one of: O0, O1"):
        load("language", tmp_path, monkeypatch, (f"compiler.{name}", "O9"))
