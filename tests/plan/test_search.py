"""The search for a mesh and options: its order, its end, and a run that takes the first."""

import contextlib
import json
import re
import types
from dataclasses import replace

import jax
import pytest

from jaxtrain import cli, plan
from jaxtrain import config as config_lib
from jaxtrain.plan import candidates, estimate, mesh_report, mesh_search, worker
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.forecast import Forecast
from jaxtrain.step import update
from tests.plan.cases import load
from tests.plan.compilers import compiled_as, quickly
from tests.support import processes, small_runs

GPUS = "gpu:h100x8"
ROOMY = 64e9


@pytest.fixture
def language(tmp_path, monkeypatch):
    """Return a function: overrides -> a config of a small language model with 64 rows."""

    def make(*overrides):
        return load("language", tmp_path, monkeypatch, ("model.depth", "2"), *overrides)

    return make


def sizes(config):
    return config.mesh.data, config.mesh.fsdp, config.mesh.model


def test_the_programs_decide_between_five_meshes(language, monkeypatch):
    """The estimate puts model=4 last, so that no compiler sees it. Of the others, the one that is
    fastest by its program is the first, whatever its estimate."""
    quickly(monkeypatch)
    config = language()
    asked = compiled_as(monkeypatch, seconds=lambda config: 1 / config.mesh.fsdp)
    text, fits, _ = plan.report_search(config, GPUS)
    meshes = [sizes(config) for config in asked]
    assert fits and len(set(meshes)) == 5 and (1, 1, 8) not in meshes
    best = max(meshes, key=lambda mesh: mesh[1])
    assert "9 meshes are allowed for 64 rows a step, 5 candidates were settled, 5 fit" in text
    first = " ".join(
        f"--config.mesh.{n}={s}" for n, s in zip(("data", "fsdp", "model"), best, strict=True)
    )
    assert text.partition("\n2. ")[0].rstrip().endswith(first)
    assert "--config.mesh=auto --config.train.accumulate=auto --config.model.remat=auto" in text
    [narrow] = [config for config in asked if config.optim.moments == "bfloat16"]
    assert sizes(narrow) == best and "with other numbers than the config's" in text


def test_model_adds_up_the_side_of_a_matrix_that_it_leaves_whole(language):
    """That of attention's output, which has heads and their values on the other side, is the
    model's width, as of all other matrices that it splits."""
    config = language(("mesh.data", "4"), ("mesh.model", "2"))
    assembly = plan.abstractly(config, plan.parse_target(GPUS))
    split = [each for each in estimate._matrices(assembly) if each.share < 1]
    assert len(split) > 4
    assert {each.whole_width / each.layers for each in split} == {config.model.embed}


@pytest.mark.parametrize("model", [1, 2])
def test_heads_and_the_values_of_one_are_one_side_of_a_matrix(model, language):
    """On any mesh a matrix reads and writes as many numbers, by the part that is a device's."""
    config = language(("mesh.data", str(8 // model)), ("mesh.model", str(model)))
    found = list(estimate._matrices(plan.abstractly(config, plan.parse_target(GPUS))))
    c = config.model
    square, net = c.embed + c.embed / model, c.embed + c.mlp / model
    widths = sorted(each.width / each.layers for each in found if each.layers == c.depth)
    assert widths == [*[square] * 4, *[net] * 2]


def test_a_mesh_that_does_not_fit_takes_its_next_option(language, monkeypatch):
    quickly(monkeypatch)
    config = language(("model.remat", "auto"), ("mesh", "auto"), ("train.batch", "8"))
    monkeypatch.setattr(plan.Target, "memory", 10e9)

    def size(config):
        return 1e9 if config.model.remat == "full" else 9.6e9

    asked = compiled_as(monkeypatch, seconds=lambda config: 1.0, size=size)
    chosen, line = plan.decide(config, plan.parse_target(GPUS), GPUS)
    assert chosen.model.remat == "full" and chosen.train.accumulate == 1
    assert [c.model.remat for c in asked[:2]] == ["none", "none"] or asked[1].model.remat == "full"
    assert sum(c.model.remat == "full" for c in asked) == mesh_search.ENOUGH
    assert line.startswith("auto is mesh.data=") and "by its compiler 1.00 GB of 9.50 GB" in line


def test_a_search_that_finds_a_mesh_counts_those_without_room(language, monkeypatch):
    quickly(monkeypatch)

    def size(config):
        return 1e9 if sizes(config) == (1, 8, 1) else 1e12

    compiled_as(monkeypatch, seconds=lambda config: 1.0, size=size)
    text, fits, _ = plan.report_search(language(), GPUS)
    settled, fitting = re.search(r"(\d+) candidates were settled, (\d+) fit", text).groups()
    lines = text.partition("do not fit\n")[2].partition("\n\n")[0].splitlines()
    assert fits and len(lines) == mesh_report.MAX_LINES + 1
    assert lines[-1] == f"  and {int(settled) - int(fitting) - mesh_report.MAX_LINES} more"


@pytest.mark.parametrize(("memory", "fits"), [(720e6, True), (670e6, False)])
def test_one_microbatch_can_be_the_smallest(language, monkeypatch, memory, fits):
    """More of them hold a sum of gradients besides those of one, which few rows do not pay for."""
    sizes = {(1, "none"): 768e6, (1, "full"): 675e6, (2, "none"): 887e6, (2, "full"): 841e6}

    def bound_of(config, target):
        size = sizes[config.train.accumulate, config.model.remat]
        return plan.bound.Bound(0, int(size), [])

    monkeypatch.setattr(mesh_search, "bound_of", bound_of)
    monkeypatch.setattr(plan.Target, "memory", memory)
    options = "train.accumulate", "model.remat"
    config, target = language(("train.batch", "2")), plan.parse_target("gpu:h100x1")
    result = mesh_search.Search(config, target, None, fields=options, note=print).run()
    found = result.best[0] if fits else result.nearest
    assert (found.candidate.config.train.accumulate, found.size) == (1, 675e6)
    assert found.candidate.config.model.remat == "full" and bool(result.fitting) == fits
    assert len({str(each.candidate.choice) for each in result.failed}) == len(result.failed)


def test_a_larger_target_may_have_room_for_one_microbatch_alone(language, monkeypatch):
    def size(config, target, beyond):
        return 9e9 if config.train.accumulate > 1 else 1e9

    monkeypatch.setattr(mesh_report.remedies, "size", size)
    monkeypatch.setattr(plan.Target, "memory", 5e9)
    assert mesh_report.smallest(language(), plan.parse_target("gpu:h100x1")) == "gpu:h100x2"


def offload_after_one_microbatch(monkeypatch):
    """Let the estimate put those with offload before those of two microbatches."""

    def seconds(assembly, target, *, accumulate, remat):
        return accumulate + 0.5 * assembly.config.optim.offload + 0.1 * (remat == "full")

    monkeypatch.setattr(mesh_search.estimate, "seconds", seconds)


def test_candidates_that_no_compiler_takes_are_listed_apart(language, monkeypatch):
    """A step of one microbatch may fit only with its optimizer in host memory, which nothing
    proves. So each mesh goes on to its programs of more microbatches."""
    quickly(monkeypatch)
    offload_after_one_microbatch(monkeypatch)
    too_large = mesh_search.ROOM * plan.parse_target(GPUS).memory + 1e6

    def size(config):
        return 1e9 if config.train.accumulate > 1 else too_large

    offloaded = mesh_search.offloaded
    monkeypatch.setattr(mesh_search, "offloaded", lambda state: 100 * offloaded(state))
    compiled_as(monkeypatch, seconds=lambda config: 1e3, size=size)
    text, fits, _ = plan.report_search(language(), GPUS)
    apart = text.partition("may fit or not, since they are not compiled: without a card")[2]
    apart = re.findall("^   .* a step, at least .*data .*", apart, re.MULTILINE)
    assert fits and ", 5 fit" in text and len(apart) > 5
    assert len({head.rpartition(", data")[2] for head in apart}) == len(apart)
    assert "at least" not in text.partition("may fit or not")[0]


@pytest.mark.parametrize(
    ("n_bytes", "reason"),
    [
        (800e9, "by the same step without offload it needs at least 800.00 GB of "),
        (0, "without offload: INTERNAL: boom"),
    ],
)
def test_an_offloaded_step_saves_no_more_than_its_state(language, monkeypatch, n_bytes, reason):
    """Here that is some kilobytes, so that 800 GB stay too much. 0: it does not compile at all."""
    quickly(monkeypatch)

    def ask(job):
        step = Compiled(0, 0, int(n_bytes), {}, 1.0)
        return worker.Answer(step) if n_bytes else worker.Answer(None, "INTERNAL: boom")

    process = contextlib.nullcontext(types.SimpleNamespace(ask=ask))
    monkeypatch.setattr(worker, "Process", lambda kind: process)
    monkeypatch.setattr(worker.environment, "find", lambda kind: "here")
    monkeypatch.setattr(mesh_report, "MAX_LINES", 1)  # next to candidates that fit
    text, fits, _ = plan.report_search(language(("train.batch", "2")), "gpu:h100x2")
    assert not fits and ", 0 fit" in text and "problem: no candidate" in text
    assert f"optim.offload=True: {reason}" in text and "not compiled" not in text
    assert "gpu:h100x2: 3 meshes are allowed" in text, "another split of rows is no other mesh"


def test_beyond_the_largest_slice_there_are_several():
    larger = list(mesh_report._larger(plan.parse_target("tpu:v5e:16x16*2")))
    assert larger == [f"tpu:v5e:16x16*{n}" for n in (4, 8, 16)]
    larger = list(mesh_report._larger(plan.parse_target("tpu:v4:12x16x16")))
    assert larger[-5:] == ["tpu:v4:16x16x16", *(f"tpu:v4:16x16x16*{n}" for n in (2, 4, 8, 16))]
    counts = [plan.parse_target(name).count for name in larger]
    assert len(set(counts)) == len(counts), "one slice of each number of chips"


def test_options_are_those_that_a_workload_has(language, tmp_path, monkeypatch):
    fields = ("optim.offload", "model.remat", "train.accumulate")
    choices = candidates.same_numbers(language(), 2, fields)
    assert len(choices) == 8 and choices[0] == candidates.Choice()
    giblet = load("giblet", tmp_path, monkeypatch)
    of_batch = [dict(choice.values) for choice in candidates.same_numbers(giblet, 2, fields)]
    assert not any("train.accumulate" in values for values in of_batch), "it changes the loss"
    narrower = [dict(choice.values) for choice in candidates.narrower(giblet)]
    assert {"model.param_dtype": "bfloat16", "optim.masters": True} in narrower


def test_rows_that_are_too_few_are_split_by_their_places(language):
    config = language(("train.batch", "2"), ("mesh", "auto"))
    target = plan.parse_target(GPUS)
    found = mesh_search.Search(config, target, None, fields=(), note=print)
    assert found.run(enough=100).meshes
    rules = [dict(s.candidate.choice.values).get(candidates.RULES) for s in found.result.fitting]
    assert {"batch": "data", "seq": "fsdp"} in rules


def test_a_mesh_that_no_rule_allows_names_the_reason(language):
    config = language(("train.batch", "7"), ("model.heads", "1"), ("mesh.axis_rules.seq", "data"))
    with pytest.raises(plan.PlanError, match="no mesh of the 8 devices of gpu:h100x8 is allowed"):
        plan.report_search(config, GPUS)


def test_a_target_without_room_names_the_smallest_that_may_do(language, monkeypatch):
    """Most of the state is split over model and fsdp: so with more devices each needs less."""
    config = language()
    target = plan.parse_target(GPUS)
    split = plan.abstractly(
        candidates.Choice((("mesh.data", 1), ("mesh.fsdp", 8), ("mesh.model", 1))).apply(config),
        target,
    )
    least = plan.memory.least(split, tiled=False)
    monkeypatch.setattr(plan.Target, "memory", 0.75 * least)
    monkeypatch.setattr(candidates, "narrower", lambda config: [])
    text, fits, _ = plan.report_search(config, GPUS)
    assert not fits and "0 fit" in text and "do not fit\n" in text
    assert "problem: no candidate fits: mesh.data=" in text and "lacks the least" in text
    assert "The smallest target that may do, by its lower bound: gpu:h100x8*2" in text


def test_a_plan_without_a_single_change_that_would_do_names_the_smallest_target(
    language, monkeypatch
):
    config = language(("mesh.data", "1"), ("mesh.fsdp", "-1"))
    split = plan.abstractly(config, plan.parse_target(GPUS))
    monkeypatch.setattr(plan.Target, "memory", 0.75 * plan.memory.least(split, tiled=False))
    monkeypatch.setattr(plan.remedies, "_changes", lambda *of: ())
    monkeypatch.setattr(plan.hosts, "READING", 0.05)
    text, fits = plan.report(config, GPUS)
    assert not fits
    assert "No single change would make it fit on gpu:h100x8. The smallest target that may" in text
    assert (
        "do, by its lower bound: gpu:h100x8*2, with a mesh of jaxtrain plan … gpu:h100x8*2" in text
    )


def test_hours_by_the_last_stage_alone_say_so(tmp_path, monkeypatch):
    quickly(monkeypatch)
    compiled_as(monkeypatch, seconds=lambda config: 3.6)
    config = load("trm", tmp_path, monkeypatch, ("train.steps", "2000"))
    text, _, _ = plan.report_search(config, "gpu:h100x1")
    assert "   2.00 h for 2,000 steps, 2.00 chip-hours\n" in text
    growing = replace(config, model=replace(config.model, growth=10, first_low=1))
    monkeypatch.setattr(update, "MIN_BYTES_OF_NORMS", 0)
    text, _, _ = plan.report_search(growing, "gpu:h100x1")
    stage = plan.abstractly(growing, plan.parse_target("gpu:h100x1")).task.stage(1999)
    line = f"2.00 h for 2,000 steps, as if each were one of the last stage ({stage}) with norms, "
    assert line in text


def test_the_overrides_of_a_search_replace_each_auto(language, monkeypatch):
    """Also by a value that is the config's default."""
    quickly(monkeypatch)
    compiled_as(monkeypatch, seconds=lambda config: 1.0)
    auto = ("mesh", "auto"), ("train.accumulate", "auto"), ("model.remat", "auto")
    text, _, _ = plan.report_search(language(*auto), "gpu:h100x1")
    mesh = "--config.mesh.data=1 --config.mesh.fsdp=1 --config.mesh.model=1"
    assert f"   {mesh} --config.train.accumulate=1 --config.model.remat=none\n" in text


def test_a_search_without_a_compiler_says_so(language):
    text, fits, _ = plan.report_search(language(), GPUS)
    assert fits and "jaxtrain plan --setup gpu fetches the compiler" in text
    assert "1. " in text and "at least" in text


def test_a_program_that_cannot_be_read_has_the_estimate_as_its_time(language, monkeypatch):
    """By a newer libtpu. The estimate, which puts the meshes in order, chooses among them."""
    quickly(monkeypatch)
    unread = Compiled(0, 0, 10**6, None, 1.0)
    monkeypatch.setattr(worker, "is_at_hand", lambda target: True)
    monkeypatch.setattr(worker, "answer", lambda job, versions: worker.Answer(unread))
    config, target = language(("mesh", "auto")), plan.parse_target("tpu:v5e:2x2")
    search = mesh_search.Search(config, target, lambda c: worker.Answer(unread), fields=(), note=id)
    result = search.run()
    estimates = [each.candidate.estimate for each in result.best]
    assert estimates == sorted(estimates)
    assert [each.seconds for each in result.best] == pytest.approx(estimates, abs=1e-6)
    assert plan.decide(config, target, target.name)[0] == result.best[0].candidate.config
    text, fits, _ = plan.report_search(config, target.name)
    assert fits and " 0.00 ms" not in text
    assert "   the time is a rough estimate, since this jaxlib cannot read the program" in text


def test_candidates_that_do_not_compile_are_listed(language, monkeypatch):
    quickly(monkeypatch)
    compiled_as(monkeypatch, seconds=lambda config: 1.0)
    failing = types.SimpleNamespace(ask=lambda job: worker.Answer(None, "no ptxas"))
    monkeypatch.setattr(worker, "Process", lambda kind: contextlib.nullcontext(failing))
    monkeypatch.setattr(candidates, "same_numbers", lambda *of: [candidates.Choice()])
    text, fits, _ = plan.report_search(language(), GPUS)
    assert not fits and text.count("no ptxas") >= 10 and "no candidate compiles" in text


def test_a_run_whose_candidates_do_not_compile_names_the_compilers_error(language, monkeypatch):
    quickly(monkeypatch)
    compiled_as(monkeypatch, seconds=lambda config: 1.0)
    failing = types.SimpleNamespace(ask=lambda job: worker.Answer(None, "INTERNAL: no tiles"))
    monkeypatch.setattr(worker, "Process", lambda kind: contextlib.nullcontext(failing))
    target = plan.parse_target("gpu:h100x2")
    with pytest.raises(
        plan.PlanError, match="no candidate compiles:\n.*mesh.data=.*: INTERNAL: no ti"
    ):
        plan.decide(language(("mesh", "auto")), target, target.name)


def test_ctrl_c_prints_what_is_known(tmp_path, monkeypatch, capsys):
    small_runs.rows(tmp_path)
    asked = []

    def answer(job, versions=""):
        asked.append(job)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return worker.Answer(Compiled(0, 0, 1000, {}, 1.0, text="HloModule m"))

    monkeypatch.setattr(worker, "answer", answer)
    monkeypatch.setattr(mesh_search, "forecast_of", lambda *of: Forecast(0.1, {}, 0.0, None, ""))
    arguments = [f"--config={tmp_path}/rows.py", f"--config.workdir={tmp_path}/run", "--search"]
    assert cli.main(["plan", *arguments]) == 130
    out = capsys.readouterr()
    assert "interrupted: this is known so far" in out.out and "2. " in out.out
    assert out.err.count("by its compiler") == 2


def test_ctrl_c_before_the_first_candidate_says_so(language, monkeypatch, capsys):
    def interrupted(search, mesh):
        raise KeyboardInterrupt

    monkeypatch.setattr(mesh_search.Search, "_options", interrupted)
    text, fits, was_interrupted = plan.report_search(language(), GPUS)
    assert was_interrupted and not fits and "interrupted: this is known so far" in text
    assert "8 devices have 10 meshes" in capsys.readouterr().err


def rows_config(tmp_path, *overrides):
    small_runs.rows(tmp_path)
    workdir = ("workdir", str(tmp_path / "run"))
    return config_lib.load(f"{tmp_path}/rows.py", [workdir, *overrides])


def test_a_run_takes_the_first_mesh_and_keeps_it(tmp_path, monkeypatch):
    """Two meshes are really compiled here. A later start takes that of config.json."""
    monkeypatch.setattr(mesh_search, "ENOUGH", 2)
    config = rows_config(tmp_path, ("mesh", "auto"))
    assert config.train.auto == ("mesh",)
    first = plan.decide_once(config)
    data, fsdp, model = sizes(first)
    assert data * fsdp * model == jax.device_count() and not first.train.auto
    (tmp_path / "run").mkdir()
    config_lib.save(first, config.workdir)
    monkeypatch.setattr(mesh_search, "Search", lambda *a, **k: pytest.fail("it searches again"))
    assert plan.decide_once(config) == first
    path = tmp_path / "run" / "config.json"
    tree = json.loads(path.read_text())
    n = jax.device_count()
    # of other devices, damaged, or not a mesh for these rows
    for mesh in ({"data": 3}, {"data": "x"}, None, {"data": -2, "fsdp": -n // 2}, {"data": n}):
        path.write_text(json.dumps({**tree, "mesh": mesh}))
        config = replace(config, train=replace(config.train, batch=n - 1 if mesh else n))
        assert plan.auto._saved(config, plan.parse_target("")) is None


def test_a_resume_takes_no_other_rules_of_axes_than_are_given(tmp_path):
    given = {"batch": "data,fsdp"}
    config = rows_config(tmp_path, ("mesh.axis_rules", str(given)), ("mesh", "auto"))
    target = plan.parse_target("")
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "config.json"
    mesh = {"data": target.count, "fsdp": 1, "model": 1}
    # those of the first start, and those of a search that splits rows by their places
    for rules in (given, {**given, **candidates.SEQUENCE}):
        path.write_text(json.dumps({"mesh": {**mesh, "axis_rules": rules}}))
        assert plan.auto.of_earlier_start(config, target)[0].mesh.axis_rules == rules
    path.write_text(json.dumps({"mesh": {**mesh, "axis_rules": {}}}))
    with pytest.raises(
        plan.PlanError, match="mesh.axis_rules is .*,fsdp'}, and the run in .*{} an"
    ):
        plan.decide_once(config)


def test_auto_is_of_the_whole_mesh(tmp_path):
    config = rows_config(tmp_path, ("mesh.axis_rules", "{'seq': 'fsdp'}"), ("mesh", "auto"))
    assert config.mesh.axis_rules == {"seq": "fsdp"} and config.mesh.data == -1
    with pytest.raises(
        config_lib.ConfigError, match="mesh.fsdp is 4, and another size of the mesh"
    ):
        rows_config(tmp_path, ("mesh", "auto"), ("mesh.fsdp", "4"))


@pytest.mark.slow
def test_two_processes_take_the_same_mesh(folder):
    mesh = "--config.mesh=auto"
    steps = "--config.train.steps=4", "--config.checkpoint.every=2"
    both = processes.cluster(folder, "toy.py", mesh, *steps, processes=2)
    outputs = [p.communicate(timeout=500)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], "\n".join(outputs)
    assert "auto is mesh.data=" in outputs[0]
    [workdir] = (path.parent for path in folder.glob("**/config.json"))
    saved = json.loads((workdir / "config.json").read_text())
    assert -1 not in saved["mesh"].values() and saved["train"]["auto"] == []
