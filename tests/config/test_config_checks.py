"""Values that make no sense by themselves, together or on this machine are named with a remedy."""

import pathlib
import sys

import pytest

from tests.config.toys import errors, load


def test_options_of_the_compiler_are_read_as_they_are_written_and_named_by_xla():
    assert load(
        "--config.compiler.xla_a=true",
        "--config.compiler.xla_b=98304",
        "--config.compiler.xla_c=/d",
    ).compiler == {
        "xla_a": "true",
        "xla_b": 98304,
        "xla_c": "/d",
    }
    found = errors(
        "--config.compiler.--xla_a=1", "--config.compiler.fast=1", "--config.compiler.xla_b=(1, 2)"
    )
    assert "say xla_a" in found["compiler.--xla_a"] and "begin with xla_" in found["compiler.fast"]
    assert (
        found["compiler.xla_b"] == "is (1, 2) (tuple); expected true or false, a number or a string"
    )


@pytest.mark.parametrize(
    ("arguments", "path", "told"),
    [
        (["train.batch=10", "train.accumulate=4"], "train.batch", "accumulate=4"),
        (["train.batch=36", "mesh.data=8"], "train.batch", "32 and 40"),
        (["train.batch=4", "mesh.data=8"], "train.batch", "the nearest that does is 8"),
        (
            ["train.batch=32", "mesh.data=2", "mesh.fsdp=2", "train.accumulate=16"],
            "train.batch",
            "64",
        ),
        (["train.steps=0"], "train.steps", "at least 1"),
        (["train.ema=1"], "train.ema", "[0, 1)"),
        (["optim.schedule=cosin"], "optim.schedule", "did you mean 'cosine'?"),
        (["optim.name=adam"], "optim.name", "adamw"),
        (["optim.lr=0"], "optim.lr", "positive"),
        (
            ["optim.decay=5"],
            "optim.decay",
            "schedule='cosine' has no decay phase; set config.optim.decay=0 too",
        ),
        (["optim.warmup=50", "train.steps=40"], "optim.warmup", "train.steps=40"),
        (
            ["optim.schedule=wsd", "optim.warmup=30", "optim.decay=20", "train.steps=40"],
            "optim.decay",
            "train.steps=40",
        ),
        (["optim.b2=1"], "optim.b2", "[0, 1)"),
        (["optim.decayed=("], "optim.decayed", "not a regular expression"),
        (["optim.groups=({'match': '['},)"], "optim.groups[0].match", "not a regular expression"),
        (["optim.groups=({'match': 'w', 'lr': -1},)"], "optim.groups[0].lr", "-1"),
        (["mesh.data=-1", "mesh.fsdp=-1"], "mesh.data", "only one axis"),
        (["mesh.model=0"], "mesh.model", "-1 for the rest"),
        (["mesh.axis_rules.embed=fdsp?"], "mesh.axis_rules.embed", "did you mean 'fsdp'?"),
        (["mesh.axis_rules.vocap=fsdp"], "mesh.axis_rules.vocap", "did you mean 'vocab'?"),
        (["checkpoint.every=0"], "checkpoint.every", "at least 1"),
        (["checkpoint.folder=gcs://bucket/run"], "checkpoint.folder", "did you mean 'gs'?"),
        (["metrics.every=0"], "metrics.every", "at least 1"),
        (["seed=-1"], "seed", "2**32"),
        (["model.whole=-1"], "model.whole", "negative"),
        (["model.n_classes=5"], "model.n_classes", "3 classes"),
        (["data.path=/nowhere/at/all"], "data.path", "does not exist"),
        (["workload=toy_wrkload"], "workload", "toy_wrkload"),
        (
            ["workload=json"],
            "workload",
            "the module json has no WORKLOAD; add the line WORKLOAD = Workload(config=Config,",
        ),
        (
            ["workload=toy_loader"],
            "workload",
            "the module toy_loader has no WORKLOAD",
        ),
        (
            ["loader=toy_workload"],
            "loader",
            "whose Config is not a DataSection; derive it from loaders.io.checks.DataSection",
        ),
        (["train.batch.size=3"], "train.batch.size", "not a section"),
    ],
)
def test_a_value_that_is_invalid_is_reported_with_the_remedy(arguments, path, told):
    found = errors(*[f"--config.{a}" for a in arguments])
    assert list(found) == [path]
    assert told in found[path]


@pytest.mark.parametrize("function", ["element_spec", "dataset_info", "make_loader"])
def test_a_loader_without_one_of_its_functions_is_reported(here, monkeypatch, function):
    load()
    monkeypatch.delattr(sys.modules["toy_loader"], function)
    found = errors()
    assert list(found) == ["loader"]
    assert "toy_loader" in found["loader"] and repr(function) in found["loader"]


@pytest.mark.parametrize(
    ("config", "make_task", "told"),
    [
        (
            "Config",
            "None",
            "is 'wrong', a module without the function 'make_task'; docs/your-model",
        ),
        (
            "dict",
            "make_task",
            "is 'wrong', a module without a dataclass named Config; docs/your-mo",
        ),
        (
            "Layer",
            "make_task",
            "whose Config is not a ModelSection; derive it from jaxtrain.config",
        ),
        ("7", "make_task", "whose WORKLOAD has the config 7; expected a dataclass"),
        ("lambda: Layer", "make_task", "whose Config is not a ModelSection"),
    ],
)
def test_a_workload_with_a_wrong_field_is_reported(here, monkeypatch, config, make_task, told):
    (here / "wrong.py").write_text(
        "from jaxtrain import Workload\nfrom toy_workload import Config, Layer, make_task\n"
        f"WORKLOAD = Workload(config={config}, make_task={make_task})\n"
    )
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    found = errors("--config.workload=wrong")
    assert list(found) == ["workload"] and told in found["workload"]


@pytest.mark.parametrize("workdir", ["file/runs", "file", "/proc/nothing/runs", "/sys/runs"])
def test_a_workdir_that_cannot_be_written_is_reported(here, workdir):
    """The error is also reported to root, who has all permissions: the path is below a file, or in
    a folder in which the kernel creates no files."""
    (here / "file").touch()
    if workdir.startswith("/") and not pathlib.Path(workdir).parents[-2].exists():
        pytest.skip("not a Linux machine")
    found = errors(f"--config.workdir={workdir}")
    assert (
        list(found) == ["workdir"] and workdir in found["workdir"] and "choose" in found["workdir"]
    )


def test_looking_at_a_workdir_leaves_nothing_behind(here):
    before = sorted(here.rglob("*"))
    load("--config.workdir=deep/er/runs")
    assert sorted(p for p in here.rglob("*") if "__pycache__" not in p.parts) == before


def test_all_errors_are_reported_together(here):
    (here / "file").touch()
    found = errors(
        "--config.trian.steps=3",
        "--config.train.bacth=3",
        "--config.train.batch=30",
        "--config.mesh.data=8",
        "--config.model.whole=x",
        "--config.model.first.width=1.5",
        "--config.model.nothing.at.all=1",
        "--config.optim.lr=-1",
        "--config.optim.lr.peak=1",
        "--config.data.path=/nowhere",
        "--config.workdir=file/runs",
    )
    assert set(found) == {
        "trian",
        "train.bacth",
        "train.batch",
        "model.whole",
        "model.first.width",
        "model.nothing",
        "optim.lr",
        "optim.lr.peak",
        "data.path",
        "workdir",
    }


@pytest.mark.parametrize("steps", [10, 200, 4_000])
def test_a_share_of_the_run_is_so_many_steps(steps):
    """A share such as 0.05 fits a run of any length, so shortening the run needs no second flag."""
    given = [
        "optim.warmup=0.05",
        "optim.decay=0.2",
        "optim.schedule=wsd",
        "train.eval_every=0.1",
        "checkpoint.every=0.5",
    ]
    config = load(
        *(f"--config.{text}" for text in [*given, "metrics.every=0.001", f"train.steps={steps}"])
    )
    assert (config.optim.warmup, config.optim.decay) == (
        max(1, round(0.05 * steps)),
        round(0.2 * steps),
    )
    assert (config.train.eval_every, config.checkpoint.every) == (steps // 10, steps // 2)
    assert config.metrics.every == max(1, steps // 1000), "at least one step"
    assert all(
        type(x) is int for x in (config.optim.warmup, config.train.eval_every, config.metrics.every)
    )
    neither = errors("--config.optim.warmup=1.5")["optim.warmup"]
    assert "a whole number, or a share of the run between 0 and 1" in neither
    assert errors("--config.train.steps=0.5")["train.steps"].endswith("a whole number"), (
        "a share of what"
    )


def test_an_interval_longer_than_the_run_is_reported_with_one_that_fits():
    long = ["--config.optim.schedule=wsd", "--config.optim.warmup=100", "--config.optim.decay=2000"]
    found = errors("--config.train.steps=40", *long)
    assert set(found) == {"optim.warmup", "optim.decay"}, "both at once"
    assert found["optim.warmup"].endswith(
        "set config.optim.warmup=2, or config.optim.warmup=0.05 of any run"
    )
    assert found["optim.decay"].endswith(
        "set config.optim.decay=8, or config.optim.decay=0.2 of any run"
    )
    # these values are accepted
    for remedies in (["warmup=2", "decay=8"], ["warmup=0.05", "decay=0.2"]):
        assert (
            load(
                "--config.train.steps=40", *long, *(f"--config.optim.{text}" for text in remedies)
            ).optim.decay
            == 8
        )
    text = errors(
        "--config.train.steps=40",
        "--config.optim.schedule=wsd",
        "--config.optim.warmup=30",
        "--config.optim.decay=20",
    )
    assert text["optim.decay"].endswith("at most 10 fits")


def test_a_cycle_divides_the_run_and_is_longer_than_its_warm_up():
    cycles = ["--config.optim.schedule=cycle", "--config.optim.cycle=40"]
    assert load("--config.train.steps=120", *cycles, "--config.optim.warmup=0.1").optim.warmup == 4
    short = load("--config.train.steps=30", *cycles, "--config.optim.warmup=0.1")
    assert short.optim.warmup == 3, "a share of the only cycle, which is the run"
    found = errors("--config.train.steps=100", *cycles, "--config.optim.warmup=40")
    assert set(found) == {"optim.cycle", "optim.warmup"}
    assert "set config.train.steps=80 or 120, or config.optim.cycle=0" in found["optim.cycle"]
    assert found["optim.warmup"].endswith("set config.optim.warmup=3")
    other = errors("--config.optim.cycle=40", "--config.optim.schedule=cosine")
    assert "has no cycles" in other["optim.cycle"]


def test_a_target_without_a_metric_or_an_evaluation_is_refused():
    best = "--config.checkpoint.best=-loss"
    found = errors("--config.train.target=1.0", "--config.train.eval_every=0", best)
    assert found["train.target"].startswith("is 1, and ")
    found = errors("--config.train.target=1.0")
    assert found["train.target"].endswith("checkpoint.best names no metric, for example 'accuracy'")


@pytest.mark.parametrize(
    ("wrong", "rests", "others"),
    [
        ("train.steps=many", ["optim.warmup=20000", "optim.schedule=wsd", "optim.decay=0.2"], {}),
        ("train.accumulate=2.5", ["train.batch=7"], {}),
        ("train.batch=all", ["train.accumulate=3"], {"optim.lr": -1}),
        ("optim.warmup=()", ["train.steps=50", "optim.schedule=wsd"], {"optim.decay": 60}),
        ("train.eval_every=x", ["train.patience=3", "checkpoint.best=-loss"], {"model.whole": -1}),
        ("model.whole=a", [], {"train.batch": 0}),
        ("model.n_classes=three", [], {}),
    ],
)
def test_a_default_that_replaces_a_value_of_the_wrong_type_is_not_reported(wrong, rests, others):
    """Other errors are reported together with the wrong type."""
    path = wrong.partition("=")[0]
    given = [wrong, *rests, *(f"{name}={value}" for name, value in others.items())]
    found = errors(*(f"--config.{text}" for text in given))
    assert set(found) == {path, *others} and "; expected " in found[path]


def test_an_interval_that_never_comes_up_is_reported_with_one_that_does(caplog):
    """The run still starts: its last step is saved, evaluated and recorded."""
    longer = [
        "--config.train.eval_every=1000",
        "--config.checkpoint.every=500",
        "--config.metrics.every=5",
    ]
    load("--config.train.steps=40", *longer)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        record.getMessage()
        == "train.eval_every=1000, checkpoint.every=500: longer than train.steps=40, so that only"
        " the last step counts; --config.train.eval_every=4 --config.checkpoint.every=4 would"
        " do, or 0.1 of any run"
    )
    caplog.clear()
    load(
        "--config.train.steps=40",
        *longer,
        "--config.train.eval_every=4",
        "--config.checkpoint.every=0.1",
    )
    patient = [
        "--config.train.steps=1000",
        "--config.checkpoint.best=-loss",
        "--config.train.patience=5",
    ]
    load(*patient, "--config.train.eval_every=50")
    assert not caplog.records
    load(*patient, "--config.train.eval_every=200")
    assert (
        caplog.records[0]
        .getMessage()
        .endswith(
            "the run has 5 evaluations, so that it never ends early; --config.train.eval_every=50"
            " would do"
        )
    )
