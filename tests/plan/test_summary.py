"""The figures of a plan, and the configs that it refuses."""

import dataclasses
import math
import re
import types

import jax
import pytest

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.assembly import assemble
from jaxtrain.commands import train as train_command
from jaxtrain.plan import traffic, worker
from jaxtrain.plan.bound import Array
from jaxtrain.plan.compile import Compiled
from jaxtrain.run import loop
from jaxtrain.step import update
from tests.plan import scheduled
from tests.plan.cases import ROOT, load, on
from tests.support import installed, small_runs


@pytest.fixture(autouse=True)
def short_reading(monkeypatch):
    """Count a loader's rows for a moment only."""
    monkeypatch.setattr(plan.hosts, "READING", 0.05)


def only(monkeypatch, name):
    """Let remedies try the changes of one field alone."""
    remedies = plan.remedies
    every = remedies._changes
    monkeypatch.setattr(
        remedies, "_changes", lambda *of: (change for change in every(*of) if name in change[0])
    )


@pytest.mark.usefixtures("libtpu")
def test_an_unknown_topology_is_an_error():
    target = dataclasses.replace(plan.parse_target("tpu:v4:2x2x1"), topology="v4:3x5x7")
    with pytest.raises(plan.PlanError, match="libtpu knows no such topology"):
        plan.compile.tpu_devices(target)


@pytest.mark.parametrize("name", ["gpu:h100x4*2", "tpu:v5p:2x2x1*2"])
def test_an_exchange_between_nodes_has_the_time_of_the_network(name):
    program = scheduled.text(scheduled.start("a", scheduled.BETWEEN), scheduled.done("a"))
    exchanges = {("all-reduce", ("data",)): plan.hlo.Exchanged(3, 12e6, 3)}
    step = Compiled(0, 0, 0, exchanges, 1.0, text=program)
    mesh, target = {"data": 2, "fsdp": 4, "model": 1}, plan.parse_target(name)
    found = plan.forecast.forecast(plan.hlo.Program(program), mesh, target)
    assembly = types.SimpleNamespace(layout=types.SimpleNamespace(mesh=types.SimpleNamespace()))
    assembly.layout.mesh.shape = mesh
    [line] = plan.summary._program_lines(step, assembly, target)
    assert f"{1e3 * found.exchanges['data',].link:.2f} ms of the links" in line
    sending = 12e6 / target.known_chip.network
    assert sending <= found.exchanges["data",].link < 1.1 * sending, "and the latency of GPUs"


@installed.needs("trm")
def test_the_full_recipe_on_gpus(tmp_path, monkeypatch):
    """35 applications of the net, seven of them forward and backward: 3.3e13 FLOP for 768 rows,
    calculated by hand."""
    monkeypatch.chdir(ROOT)
    few = ("data.sources", "({'n_train': 20, 'n_test': 5, 'blanks': (20, 30)},)")
    config = config_lib.load("configs/trm_sudoku.py", [few, ("workdir", str(tmp_path))])
    text, well = plan.report(config, "gpu:h100x8")
    mix, channels = 3 * 97 * 512 * 512, 3 * 512 * 1536 * 97
    flops = 768 * (2 * 2 * 35 * (mix + channels) + 3 * (2 * 81 * 512 * 11 + 2 * 512 * 2))
    assert well, text
    assert f"{flops:.3e} FLOP" in text
    assert f"{1e3 * flops / (8 * 989e12):.2f} ms at the peak" in text
    assert " h for " not in text, "without the compiler there is no forecast"
    # Two moments and an average of 5,029,378 parameters in float32, and 153.1 MB of slots for 768
    # rows, on eight devices.
    for line in (
        "parameters                      20.12 MB",
        "optimizer                       40.23 MB",
        "19.14 MB",
    ):
        assert line in text
    assert "data          train has 1 batch, read in" in text
    # The loader's rows are counted here, and compared with what a step asks for.
    [given] = re.findall(r"^loader +([\d,]+) rows/s, measured here", text, re.MULTILINE)
    asked = f"{768 * 8 * 989e12 / flops:,.0f}"
    assert f"; a step asks for at most {asked}" in text
    is_slow = float(given.replace(",", "")) < float(asked.replace(",", ""))
    assert ("steps will wait for data" in text) == is_slow
    assert re.search(r"ms to read the state and write it again once, at 3.35 TB/s", text)


def test_an_offloaded_optimizer_on_gpus_is_not_compiled_though_the_compiler_is_here(
    tmp_path, monkeypatch
):
    """Without a GPU, that compiler refuses host memory, or counts it as device memory."""
    config = load("bird", tmp_path, monkeypatch, ("optim.offload", "True"), ("mesh.fsdp", "8"))
    monkeypatch.setattr(plan.environment, "find", lambda kind: tmp_path)
    text, well = plan.report(config, "gpu:h100x8")
    assert (
        well
        and "not compiled for it: without a card" in text
        and "in host memory: optimizer" in text
    )


def test_the_plan_tells_which_rule_split_what_and_what_stayed_whole(tmp_path, monkeypatch):
    config = load(
        "bird",
        tmp_path,
        monkeypatch,
        ("mesh.fsdp", "2"),
        ("mesh.model", "8"),
        ("model.heads", "8"),
    )
    text, _ = plan.report(config, "gpu:h100x16")
    [options] = [line for line in text.splitlines() if line.startswith("compiled with ")]
    assert "xla_gpu_enable_latency_hiding_scheduler=True" in options
    rows = {
        line.split()[0]: " ".join(line.split()[2:])
        for line in text.splitlines()
        if " float32[" in line
    }
    assert rows["encoder/blocks/w_up"] == "embed→fsdp, mlp→model"
    assert rows["encoder/b_patch"] == "embed→fsdp"
    assert rows["objective/supervised/w"] == "embed→fsdp; vocab (12) does not divide"
    assert rows["objective/supervised/b"] == "whole; vocab (12) does not divide"
    # This loader counts its threads, so that cores can be asked for.
    [loader] = re.findall(r"^loader +(.*)$", text, re.MULTILINE)
    line = (
        r"[\d,]+ rows/s, measured here for 0.05 s on \d+ cores?; a step asks for at most [\d,]+, "
        r"[\d,]+ on each host: [\d,]+ more such cores, on all hosts .*"
    )
    assert re.fullmatch(line, loader), loader


def test_problems_of_a_planned_run_are_reported_without_an_array(tmp_path, monkeypatch):
    """A model of 1.3e11 parameters is planned on this machine."""
    before = len(jax.live_arrays())
    config = load(
        "bird",
        tmp_path,
        monkeypatch,
        ("model.embed", "16384"),
        ("model.depth", "40"),
        ("checkpoint.keep", "100000"),
    )
    text, well = plan.report(config, "gpu:l40sx1")
    assert not well
    assert int(text.split()[0].replace(",", "")) > 1e11
    assert len(jax.live_arrays()) == before
    assert "problem: it does not fit: " in text
    (line,) = [line for line in text.splitlines() if "100001 checkpoints of" in line]
    assert line.startswith("disk ") and line.endswith("free here"), (
        "another machine's disk is a note, no verdict"
    )


def test_a_disk_that_is_too_small_is_a_problem_here_and_a_note_elsewhere(tmp_path, monkeypatch):
    config = load(
        "bird", tmp_path, monkeypatch, ("checkpoint.keep", "100000000"), ("data.threads", "1")
    )
    checks = plan.hosts.checks
    for name, verdict in (("", False), ("gpu:h100x8", True)):
        target = plan.parse_target(name)
        found = {
            what: (text, well)
            for what, text, well in checks(plan.abstractly(config, target), target)
        }
        assert "100000001 checkpoints of" in found["disk"][0] and found["disk"][1] == verdict


def test_the_disk_is_that_of_the_checkpoints_and_what_is_there_is_not_asked_for_again(
    tmp_path, monkeypatch
):
    saves = tmp_path / "saves"
    saves.mkdir()

    def small(folder):
        return types.SimpleNamespace(free=2000 if str(folder).startswith(str(saves)) else 1 << 60)

    report = plan.hosts
    monkeypatch.setattr(report.shutil, "disk_usage", small)
    monkeypatch.setattr(report, "checkpoints", lambda config, state: (3, 1000))
    target = plan.parse_target("")

    def disk(*overrides):
        config = load("bird", tmp_path, monkeypatch, ("data.threads", "1"), *overrides)
        found = {
            what: (text, well)
            for what, text, well in report.checks(plan.abstractly(config, target), target)
        }
        return found["disk"]

    assert disk()[1]
    text, well = disk(("checkpoint.folder", str(saves)))
    assert not well and f"{saves} has" in text
    (saves / "10").mkdir()
    (saves / "10" / "state").write_bytes(bytes(5000))
    text, well = disk(("checkpoint.folder", str(saves)))
    assert well and "of which" in text


TIGHT = (
    ("model.embed", "2048"),
    ("model.depth", "56"),
    ("train.batch", "64"),
    ("train.ema", "0.99"),
)


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_reported_with_single_changes_that_would_fit(
    tmp_path, monkeypatch
):
    target = plan.parse_target("gpu:l40sx8")
    text, well = plan.report(load("bird", tmp_path, monkeypatch, *TIGHT), target.name)
    told = next(line for line in text.splitlines() if line.startswith("problem: it"))
    assert not well and "GB more than a device has" in told
    ways = re.findall(
        r"--config\.([\w.]+)=(\S+)((?: --config\S+)*) would make it at least ([\d.]+) GB", told
    )
    assert "mesh.fsdp" in {name for name, *_ in ways}
    for name, value, more, size in ways:  # each remedy, if applied, gives the stated figure
        changes = [(name, value), *re.findall(r"--config\.([\w.]+)=(\S+)", more)]
        changed = plan.abstractly(load("bird", tmp_path, monkeypatch, *TIGHT, *changes), target)
        needed = plan.bound.bound(changed, changed.trace(None), target)
        assert needed.peak <= target.memory and f"{needed.peak / 1e9:.2f}" == size


def test_a_run_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    config = load(
        "bird", tmp_path, monkeypatch, *TIGHT, ("train.batch", "4096"), ("model.dtype", "float32")
    )
    before = len(jax.live_arrays())
    with pytest.raises(
        plan.PlanError, match="a step needs at least .* GB on each device, .* too little"
    ):
        loop.run(config)
    assert len(jax.live_arrays()) == before and not (tmp_path / "checkpoints").exists()


def test_a_run_that_exceeds_a_devices_memory_names_the_plan(tmp_path, monkeypatch, capsys):
    def exhaust(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nBuffers: …"
        )

    monkeypatch.setattr(loop, "run", exhaust)
    source = f"--config={small_runs.rows(tmp_path)}/rows.py"
    assert train_command.main([source, f"--config.workdir={tmp_path}"]) == 2
    told = (
        "a device has too little memory: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes; the"
        " same"
    )
    assert f"{told} command with --plan names remedies" in capsys.readouterr().err


def with_memory(monkeypatch, memory):
    monkeypatch.setattr(plan.Target, "memory", memory)


def test_the_compiler_decides_if_a_bound_is_too_large(tmp_path, monkeypatch):
    """A run is refused, or a plan reports a problem, only if the compiler also finds it too
    large."""
    changes = ("model.depth", "1"), ("train.steps", "1"), ("optim.warmup", "0")
    config = load("language", tmp_path, monkeypatch, *changes)
    assembly = assemble(config, on((8, 1, 1), jax.devices()))
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    right = plan.bound.bound(assembly, traced, plan.parse_target(""))
    found = plan.compile.compiled(assembly, traced).peak
    wrong = right._replace(kept=[Array(3 * found, "nothing")])
    for module in ("remedies", "summary"):
        monkeypatch.setattr(getattr(plan, module), "bound", lambda *_: wrong)
    remedies = plan.remedies
    monkeypatch.setattr(remedies, "remedies", lambda *args, **kwargs: [])
    with_memory(monkeypatch, 2 * found)
    plan.refuse_if_too_large(assembly)
    text, _ = plan.report(config, "")
    assert "compiled for it" in text and "not fit" not in text
    with_memory(monkeypatch, found // 2)
    assert right.certain < found // 2
    with pytest.raises(plan.PlanError, match="a step needs .*by its compiler.* too little"):
        plan.refuse_if_too_large(assembly)
    text, well = plan.report(config, "")
    assert not well and "problem: it does not fit: " in text


def test_without_a_compiler_a_plan_has_a_lower_bound_and_names_the_command_that_fetches_one(
    tmp_path, monkeypatch
):
    config = load("language", tmp_path, monkeypatch, ("mesh.data", "1"))
    assembly = plan.abstractly(config, target := plan.parse_target("gpu:h100x1"))
    needed = plan.bound.bound(assembly, assembly.trace(None), target)
    assert needed.certain < 0.5 * needed.peak
    remedies = plan.remedies
    monkeypatch.setattr(remedies, "remedies", lambda *args, **kwargs: [])
    for memory, verdict in (
        (1.1, "this run has no problem"),
        (0.9, "problem: it does not fit: at least "),
    ):
        with_memory(monkeypatch, memory * needed.peak)
        text, well = plan.report(config, target.name)
        assert verdict in text and well == ("problem:" not in verdict), text
        assert (
            "not compiled for it: its compiler is not here; jaxtrain plan --setup gpu fetches it"
            in text
        )
        assert "this is a lower bound: what one layer needs comes on top" in text
        assert f"{needed.kept[0].bytes / 1e6:.2f} MB  {needed.kept[0].name}" in text


def test_a_verified_step_has_a_second_state(tmp_path, monkeypatch):
    verified = ("guard.verify_every", "200")
    config, target = (
        load("language", tmp_path, monkeypatch, ("mesh.data", "1"), verified),
        plan.parse_target("gpu:h100x1"),
    )
    assembly = plan.abstractly(config, target)
    state = sum(
        math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(assembly.abstract.state)
    )
    needed = plan.bound.bound(assembly, assembly.trace(None), target)
    assert needed.second == state and needed.peak == needed.arguments + needed.temporaries + state
    with_memory(monkeypatch, needed.peak - state / 2)
    text, well = plan.report(config, target.name)
    assert not well and re.search(r"second state of verified steps +\S+ [kMG]B", text)
    assert "--config.guard.verify_every=0 would make it at least" in text
    split = plan.abstractly(
        load("language", tmp_path, monkeypatch, ("mesh.fsdp", "8"), verified),
        plan.parse_target("gpu:h100x8"),
    )
    assert (
        plan.bound.bound(split, split.trace(None), plan.parse_target("gpu:h100x8")).second
        < state / 4
    )


def test_remedies_count_what_the_compiler_found_beyond_the_bound(tmp_path, monkeypatch):
    """The excess counts by the rows of a microbatch: it is half as large with twice as many
    microbatches."""
    config = load(
        "trm", tmp_path, monkeypatch, ("model.cycles_high", "1"), ("model.cycles_low", "1")
    )
    assembly = plan.abstractly(config, target := plan.parse_target("gpu:h100x1"))
    least = plan.bound.bound(
        assembly, assembly.trace(assembly.task.stage(config.train.steps - 1)), target
    ).peak
    only(monkeypatch, "accumulate")
    with_memory(monkeypatch, 1e9)
    [way] = plan.remedies.remedies(config, target, 3e9)
    assert re.fullmatch(r"--config.train.accumulate=4 would make it about 75\d.\d\d MB", way)
    [way] = plan.remedies.remedies(config, target)
    size = re.fullmatch(r"--config.train.accumulate=2 would make it at least (\S+) MB", way)[1]
    assert 1e6 * float(size) > least, "sums of gradients come on top"


@installed.needs("giblet")
def test_steps_without_norms_have_lines_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan.summary, "_missing", lambda *_: "")
    asked = []

    def ask(jobs):
        asked.extend((job.stage, job.has_norms) for job in jobs)
        sizes = {True: 3_000_000_000, False: 2_000_000_000}
        kernels = (
            traffic.Kernel("k", "fusion", "jit(step)/update/add", 1, 10**9, 0, 0.0),
            traffic.Kernel("k", "product", "jit(step)/loss_and_grad/dot", 1, 10**6, 0, 1e9),
        )
        return [
            worker.Answer(
                Compiled(1_000_000_000, 0, sizes[job.has_norms], None, 1.0, kernels=kernels)
            )
            for job in jobs
        ]

    monkeypatch.setattr(worker, "ask", ask)
    config = load("giblet", tmp_path, monkeypatch)
    text, _ = plan.report(config, "gpu:h100x8")
    assert asked == [(None, True)] and "compiled for it, in 1 s" in text
    assert re.search(
        r"take most of this time: \d{3} rows would take about 10% longer than 16", text
    )
    monkeypatch.setattr(update, "MIN_BYTES_OF_NORMS", 0)
    text, _ = plan.report(config, "gpu:h100x8")
    assert asked[1:] == [(None, True), (None, False)]
    assert "compiled for it, with norms, every 10th step, in 1 s" in text
    assert "compiled for it, without norms, the other steps, in 1 s" in text
    assert "3.00 GB" in text and "2.00 GB" in text
