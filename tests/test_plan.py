"""Plans against the compilers: on CPU devices, and on TPU slices that are nowhere near."""

import importlib.util
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import chips, liveness, plan, train
from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib

ROOT = pathlib.Path(__file__).parent.parent
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the extra topology is not installed")
BOARDS = "({'kind': 'sudoku4', 'n_train': 20, 'n_test': 5, 'blanks': (3, 6)},)"
BIRD = (("model.embed", "64"), ("model.depth", "2"), ("model.heads", "2"))
TRM = (("data.sources", BOARDS), ("train.batch", "64"))
LANGUAGE = (("model.unroll", "1"), ("train.batch", "64"), ("model.samples.prompts", "('one',)"))
NARROW = "(32, 32, 32)"
WIDTHS = ("trunk", "decode_video", "decode_audio", "decode_text")
GIBLET = (
    ("train.batch", "16"), ("model.dtype", "float32"), ("model.video_widths", NARROW), ("model.head_width", "32"),
    ("model.bottleneck", "32"), ("model.decoder_widths", "(64, 64, 64, 64)"),
    *((f"model.{name}_widths", "(64, 64)") for name in WIDTHS),
)  # fmt: skip
WORKLOADS = {
    "bird": ("configs/xcm.py", BIRD),
    "trm": ("configs/trm_sudoku.py:4x4", TRM),
    "language": ("configs/shakespeare_char.py:{text}", LANGUAGE),
    "giblet": ("configs/giblet.py:blank", GIBLET),
    "language, recomputed": ("configs/shakespeare_char.py:{text}", (*LANGUAGE, ("model.remat", "full"))),
    "trm, recomputed": ("configs/trm_sudoku.py:4x4", (*TRM, ("model.remat", "full"))),
}


DTYPE = ("model.dtype", "bfloat16")
LARGE = {
    "bird": (("model.embed", "128"), ("model.depth", "4"), ("model.heads", "4"), ("model.patch", "(16, 16)"), DTYPE),
    "trm": (
        ("data.sources", "({'n_train': 20, 'n_test': 5, 'blanks': (20, 30)},)"), ("model.embed", "128"), ("model.heads", "4"),
        ("model.inner_multiple", "256"), ("model.puzzle_embed", "128"), ("model.puzzle_tokens", "16"), DTYPE,
        ("model.cycles_low", "6"),
    ),
    "language": (
        ("model.embed", "512"), ("model.depth", "8"), ("model.heads", "8"), ("model.mlp", "1536"), ("data.context", "512"),
        DTYPE,
    ),
}  # fmt: skip
LARGE["trm, recomputed"] = LARGE["trm"]
LARGE["language, recomputed"] = LARGE["language"]


def load(workload, tmp_path, monkeypatch, *overrides):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("JAXTRAIN_XCM", raising=False)
    source, own = WORKLOADS[workload]
    if "{text}" in source:
        (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
        source = source.format(text=tmp_path / "text.txt")
    return config_lib.load(source, [*own, ("workdir", str(tmp_path)), *overrides])


def on(mesh, devices):
    sizes = dict(zip(("data", "fsdp", "model"), mesh, strict=True))
    return layout_lib.make_mesh(**sizes, devices=devices[: np.prod(mesh)])


def bytes_agree(config, mesh, target):
    """The plan's with the compiler's: exactly what is passed to a step, and within 15 % what it needs in all."""
    assembly = plan.assemble(config, mesh)
    stage = assembly.task.stage(config.train.steps - 1)
    options = {} if target.tiled else {"xla_backend_optimization_level": 0}  # of the machine code alone
    traced = assembly.trace(stage)
    found = plan.compiled(assembly, traced, options=options)
    planned = plan.estimate(assembly, traced, target)
    assert planned.arguments == found.arguments
    assert found.temporaries > 3 * found.arguments or "giblet" in config.workload, "the activations are most of it"
    assert planned.peak == pytest.approx(found.peak, rel=plan.SLACK)
    return assembly, found


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("workload", ["bird", "trm", "language", pytest.param("giblet", marks=pytest.mark.slow)])
def test_bytes_on_a_host_device_are_the_compilers(workload, mesh, tmp_path, monkeypatch):
    config = load(workload, tmp_path, monkeypatch, ("model.dtype", "float32"))
    bytes_agree(config, on(mesh, jax.devices()), plan.parse_target(""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "mesh", "change"),
    [
        ("trm", (1, 1, 1), DTYPE),
        ("language", (1, 1, 1), DTYPE),
        ("bird", (1, 1, 1), DTYPE),
        ("language", (2, 2, 2), ("model.remat", "full")),
        ("trm", (1, 1, 1), ("model.remat", "full")),
    ],
)
def test_bytes_of_halves_and_of_recomputed_layers_on_a_host_device(workload, mesh, change, tmp_path, monkeypatch):
    config = load(workload, tmp_path, monkeypatch, ("model.dtype", "float32"), change)
    bytes_agree(config, on(mesh, jax.devices()), plan.parse_target(""))


@needs_libtpu
@pytest.mark.parametrize(
    ("workload", "topology", "mesh"),
    [
        ("bird", "v4:2x2x1", (2, 2, 1)),
        pytest.param("bird", "v5e:2x2", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("bird", "v6e:2x2", (1, 4, 1), marks=pytest.mark.slow),
        pytest.param("trm", "v4:2x2x1", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("trm", "v5e:2x2", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("trm", "v6e:2x2", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("bird", "v4:2x2x1*2", (2, 4, 1), marks=pytest.mark.slow),
        pytest.param("language", "v4:2x2x1", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("language", "v5e:2x2", (1, 4, 1), marks=pytest.mark.slow),
        pytest.param("language, recomputed", "v6e:2x2", (1, 4, 1), marks=pytest.mark.slow),
        pytest.param("trm, recomputed", "v4:2x2x1", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("trm, recomputed", "v5e:2x2", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("trm, recomputed", "v6e:2x2", (1, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_bytes_on_a_tpu_are_its_compilers(workload, topology, mesh, tmp_path, monkeypatch):
    # Large: beside its memory a chip has some 0.1 GB near its cores, where the compiler puts what it can of a small step.
    rows = 16 if "language" in workload else 192
    config = load(workload, tmp_path, monkeypatch, *LARGE[workload], ("train.batch", str(rows * math.prod(mesh))))
    target = plan.parse_target(f"tpu:{topology}")
    assembly, found = bytes_agree(config, on(mesh, plan.tpu_devices(target)), target)
    if found.collectives is not None:  # which jaxlib can read depends on libtpu's version
        spanned = {axis for _, axes in found.collectives for axis in axes}
        wanted = {name for name, size in assembly.layout.mesh.shape.items() if size > 1}
        # Slices send to each other, which is no collective.
        assert spanned == wanted - ({"data"} if target.slices > 1 else set()), "no device works alone"
        if workload == "bird" and "fsdp" in wanted:
            planned = plan.estimate(assembly, assembly.trace(None), target).temporaries.moved
            kinds = [{"all-gather"}, {"reduce-scatter"}]  # weights are gathered, their gradients scattered
            if ("collective-permute", ("fsdp",)) in found.collectives:  # both in rings, piece by piece beside products
                kinds = [{"all-gather", "reduce-scatter", "collective-permute"}]
            for some in kinds:
                sent = [
                    sum(x for (kind, axes), (_, x) in moved.items() if kind in some and axes == ("fsdp",))
                    for moved in (planned, found.collectives)
                ]
                assert sent[0] == pytest.approx(sent[1], rel=0.35)


def test_a_target_that_is_unknown_names_those_that_are():
    for text in (
        "k80",
        "gpu:k80x8",
        "gpu:h100",
        "tpu:v4",
        "tpu:v9:2x2",
        "tpu:h100:2x2",
        "gpu:h100x0",
        "tpu:v4:0x2",
        "tpu:v4:2x2*0",
    ):
        with pytest.raises(
            plan.PlanError, match="is unknown; say for example --plan=tpu:v4:2x2x4 .*v6e.* --plan=gpu:h100x8 .*h200"
        ):
            plan.parse_target(text)


def test_targets_know_their_devices():
    assert plan.parse_target("tpu:v4:2x2x4").count == 16 and plan.parse_target("tpu:v4:2x2x4*2").count == 32
    assert plan.parse_target("gpu:h100x8").memory == plan.parse_target("gpu:H100x8").memory == 80e9
    assert plan.parse_target("").count == 8
    assert chips.find("TPU v5 lite").name == "v5e" and chips.find("TPU v5").name == "v5p" and chips.find("cpu") is None


@needs_libtpu
def test_a_topology_that_there_is_not_is_an_error():
    with pytest.raises(plan.PlanError, match="libtpu knows no such topology"):
        plan.tpu_devices(plan.parse_target("tpu:v4:3x5x7"))


def test_the_full_recipe_on_gpus(tmp_path, monkeypatch):
    """35 applications of the net, seven of them forward and backward: 3.3e13 FLOP for 768 rows, by hand."""
    monkeypatch.chdir(ROOT)
    few = ("data.sources", "({'n_train': 20, 'n_test': 5, 'blanks': (20, 30)},)")
    config = config_lib.load("configs/trm_sudoku.py", [few, ("workdir", str(tmp_path))])
    text, well = plan.report(config, "gpu:h100x8")
    mix, channels = 3 * 97 * 512 * 512, 3 * 512 * 1536 * 97
    flops = 768 * (2 * 2 * 35 * (mix + channels) + 3 * (2 * 81 * 512 * 11 + 2 * 512 * 2))
    assert well, text
    assert f"{flops:.3e} FLOP" in text
    assert f"{1e3 * flops / (8 * 989e12):.2f} ms at the peak" in text
    assert f"{65104 * flops / (0.4 * 8 * 989e12) / 3600:.2f} h for 65,104 steps" in text
    # Two moments and an average of 5,029,378 parameters in float32; 153.1 MB of slots for 768 rows, on eight devices.
    for line in ("parameters                      20.12 MB", "optimizer                       40.23 MB", "19.14 MB"):
        assert line in text
    assert "data          train has 1 batch, read in" in text
    assert re.search(r"ms to read the state and write it again once, at 3.35 TB/s", text)


def test_the_plan_tells_which_rule_split_what_and_what_stayed_whole(tmp_path, monkeypatch):
    config = load(
        "bird", tmp_path, monkeypatch, ("mesh.fsdp", "2"), ("mesh.model", "4"), ("model.heads", "4"), ("model.n_classes", "14")
    )
    text, _ = plan.report(config, "gpu:h100x8")
    assert "compiled with xla_gpu_enable_latency_hiding_scheduler=True" in text
    rows = {line.split()[0]: " ".join(line.split()[2:]) for line in text.splitlines() if " float32[" in line}
    assert rows["encoder/blocks/w_up"] == "embed→fsdp, mlp→model"
    assert rows["encoder/b_patch"] == "embed→fsdp"
    assert rows["objective/supervised/w"] == "embed→fsdp; vocab (14) does not divide"
    assert rows["objective/supervised/b"] == "whole; vocab (14) does not divide"
    moved = dict(re.findall(r"× (\S+ +over \S+) +([\d.]+ k?M?B) sent, [\d.]+ ms of the links", text))
    assert {" ".join(what.split()) for what in moved} >= {
        "all-gather over fsdp",  # parameters
        "reduce-scatter over fsdp",  # their gradients
        "all-reduce over model",  # activations
    }


def test_what_speaks_against_a_run_is_told(tmp_path, monkeypatch):
    config = load("bird", tmp_path, monkeypatch, ("model.embed", "16384"), ("model.depth", "40"), ("checkpoint.keep", "100000"))
    text, well = plan.report(config, "gpu:l40sx1")
    assert not well
    assert "problem: it does not fit: " in text and "problem: 100001 checkpoints of" in text


def test_a_plan_makes_no_array(tmp_path, monkeypatch):
    """A model of 1.3e11 parameters is planned on this machine."""
    config = load("bird", tmp_path, monkeypatch, ("model.embed", "16384"), ("model.depth", "40"), ("mesh.fsdp", "32"))
    before = len(jax.live_arrays())
    text, _ = plan.report(config, "gpu:h200x32")
    assert int(text.split()[0].replace(",", "")) > 1e11
    assert len(jax.live_arrays()) == before


TIGHT = (("model.embed", "2048"), ("model.depth", "56"), ("train.batch", "64"), ("train.ema", "0.99"))


def test_what_does_not_fit_is_told_with_the_single_changes_that_would_make_it(tmp_path, monkeypatch):
    target = plan.parse_target("gpu:l40sx8")
    text, well = plan.report(load("bird", tmp_path, monkeypatch, *TIGHT), target.name)
    told = next(line for line in text.splitlines() if line.startswith("problem: it"))
    assert not well and "GB too much" in told
    ways = re.findall(r"--config\.([\w.]+)=(\S+)((?: --config\S+)*) would make it ([\d.]+) GB", told)
    assert "mesh.fsdp" in {name for name, *_ in ways}
    for name, value, more, size in ways:  # each of them, taken, is what it says
        changes = [(name, value), *re.findall(r"--config\.([\w.]+)=(\S+)", more)]
        changed = plan.abstractly(load("bird", tmp_path, monkeypatch, *TIGHT, *changes), target)
        needed = plan.estimate(changed, changed.trace(None), target)
        assert needed.peak <= target.memory and f"{needed.peak / 1e9:.2f}" == size


def test_a_run_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    config = load("bird", tmp_path, monkeypatch, *TIGHT, ("train.batch", "4096"), ("model.dtype", "float32"))
    before = len(jax.live_arrays())
    with pytest.raises(plan.PlanError, match="a step needs at least .* GB on each device, .* too little"):
        train.run(config)
    assert len(jax.live_arrays()) == before and not (tmp_path / "checkpoints").exists()


def test_the_compiler_has_the_last_word_where_the_estimate_is_too_high(tmp_path, monkeypatch):
    """A run is not refused, and a plan finds no problem; with an estimate that is right both would tell it all."""
    config = load("trm", tmp_path, monkeypatch, ("model.dtype", "float32"), ("train.steps", "1"), ("optim.warmup", "0"))
    assembly = plan.assemble(config, on((8, 1, 1), jax.devices()))
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    right = plan.estimate(assembly, traced, plan.parse_target(""))
    memory = 2 * right.peak
    monkeypatch.setattr(plan.Target, "memory", memory)
    wrong = right._replace(temporaries=right.temporaries._replace(bytes=3 * memory))
    monkeypatch.setattr(plan, "estimate", lambda *_: wrong)
    monkeypatch.setattr(plan, "remedies", lambda *args, **kwargs: [])
    plan.refuse_if_too_large(assembly)
    text, _ = plan.report(config, "")
    assert "compiled for it" in text and "not fit" not in text
    monkeypatch.setattr(plan.Target, "memory", right.peak // 2)
    with pytest.raises(plan.PlanError, match="a step needs .*by its compiler.* too little"):
        plan.refuse_if_too_large(assembly)
    text, well = plan.report(config, "")
    assert not well and "problem: it does not fit: " in text


def test_without_a_compiler_a_doubtful_estimate_is_no_problem(tmp_path, monkeypatch):
    config = load("trm", tmp_path, monkeypatch, ("train.steps", "1"), ("optim.warmup", "0"))
    assembly = plan.abstractly(config, target := plan.parse_target("gpu:h100x1"))
    right = plan.estimate(assembly, assembly.trace(assembly.task.stage(config.train.steps - 1)), target)
    monkeypatch.setattr(plan, "remedies", lambda *args, **kwargs: [])
    for memory, verdict in ((0.8 * right.peak, "it may not fit: "), (0.4 * right.peak, "problem: it does not fit: ")):
        monkeypatch.setattr(plan.Target, "memory", memory)
        text, well = plan.report(config, target.name)
        assert verdict in text and well == ("problem" not in verdict), text


def in_place(p, m, g):
    return p + g, m * 0.9 + g, g.sum()


def measured(p, m, g):
    new = p + g
    return new, m * 0.9 + g, (new * new).sum() - (p * p).sum()


def guarded(p, m, g):
    """As a step does: what may come to nothing, and parameters that are made of the old moment, too."""
    moment, good = m * 0.9 + g, g.sum() < 1
    new = jnp.where(good, p - jnp.sqrt(moment), p)
    return new, jnp.where(good, moment, m), (new * new).sum() - (p * p).sum()


@pytest.mark.parametrize(("step", "copies"), [(in_place, 0), (measured, 1), (guarded, 2)])
def test_donated_arrays_that_are_read_beside_their_results_are_copied_on_a_cpu(step, copies):
    xs = [jax.ShapeDtypeStruct((1024, 256), np.float32)] * 3
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*xs)
    found = traced.lower().compile().memory_analysis().temp_size_in_bytes
    whole = [((), ())] * 3
    planned = liveness.peak(traced.jaxpr, whole, {}, [True, True, False], plan.parse_target("").compiler)
    assert found // 2**20 == copies and planned.bytes == pytest.approx(found, abs=1000)


def test_unrolled_layers_that_a_cpu_would_not_recompute_are_counted_as_kept(tmp_path, monkeypatch):
    """XLA for CPUs merges what a checkpoint wants computed again with what was computed, outside of loops."""
    unrolled = (("model.dtype", "float32"), ("model.unroll", "12"), ("train.batch", "8"))
    peaks, here = [], plan.parse_target("")
    for remat in ("none", "full"):
        assembly = plan.abstractly(load("language", tmp_path, monkeypatch, *unrolled, ("model.remat", remat)), here)
        peaks.append(plan.estimate(assembly, assembly.trace(None), here).peak)
    assert peaks[0] == peaks[1]
