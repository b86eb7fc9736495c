"""Values that make no sense by themselves, together, or on this machine, are named with the remedy."""

import pathlib
import sys

import pytest
from toys import load, mistakes


def test_options_of_the_compiler_are_read_as_they_are_written_and_named_by_xla():
    assert load("--config.compiler.xla_a=true", "--config.compiler.xla_b=98304", "--config.compiler.xla_c=/d").compiler == {
        "xla_a": "true",
        "xla_b": 98304,
        "xla_c": "/d",
    }
    found = mistakes("--config.compiler.--xla_a=1", "--config.compiler.fast=1", "--config.compiler.xla_b=(1, 2)")
    assert "say xla_a" in found["compiler.--xla_a"] and "begin with xla_" in found["compiler.fast"]
    assert found["compiler.xla_b"] == "is (1, 2) (tuple); expected true or false, a number or a string"


@pytest.mark.parametrize(
    ("arguments", "path", "told"),
    [
        (["train.batch=10", "train.accumulate=4"], "train.batch", "accumulate=4"),
        (["train.batch=36", "mesh.data=8"], "train.batch", "32 and 40"),
        (["train.batch=32", "mesh.data=2", "mesh.fsdp=2", "train.accumulate=16"], "train.batch", "64"),
        (["train.steps=0"], "train.steps", "at least 1"),
        (["train.ema=1"], "train.ema", "[0, 1)"),
        (["optim.schedule=cosin"], "optim.schedule", "did you mean 'cosine'?"),
        (["optim.name=adam"], "optim.name", "adamw"),
        (["optim.lr=0"], "optim.lr", "positive"),
        (["optim.decay=5"], "optim.decay", "schedule is 'cosine'"),
        (["optim.warmup=50", "train.steps=40"], "optim.warmup", "train.steps=40"),
        (["optim.schedule=wsd", "optim.warmup=30", "optim.decay=20", "train.steps=40"], "optim.decay", "train.steps=40"),
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
        (["workload=json"], "workload", "without a dataclass named Config"),
        (["workload=toy_loader"], "workload", "whose Config is not a ModelSection; derive it from jaxtrain.config"),
        (["loader=toy_workload"], "loader", "whose Config is not a DataSection; derive it from loaders.checks.DataSection"),
        (["train.batch.size=3"], "train.batch.size", "not a section"),
    ],
)
def test_a_value_that_makes_no_sense_is_reported_with_the_remedy(arguments, path, told):
    found = mistakes(*[f"--config.{a}" for a in arguments])
    assert list(found) == [path]
    assert told in found[path]


@pytest.mark.parametrize(
    ("owner", "function"), [("workload", "make_task"), ("loader", "fields"), ("loader", "facts"), ("loader", "make_loader")]
)
def test_a_workload_or_a_loader_without_one_of_its_functions_is_reported(here, monkeypatch, owner, function):
    load()
    monkeypatch.delattr(sys.modules[f"toy_{owner}"], function)
    found = mistakes()
    assert list(found) == [owner]
    assert f"toy_{owner}" in found[owner] and repr(function) in found[owner]


@pytest.mark.parametrize("workdir", ["file/runs", "file", "/proc/nothing/runs", "/sys/runs"])
def test_a_workdir_that_cannot_be_written_is_reported(here, workdir):
    """Also to root, whom no permission stops: below a file, or where the kernel takes no files."""
    (here / "file").touch()
    if workdir.startswith("/") and not pathlib.Path(workdir).parents[-2].exists():
        pytest.skip("not a Linux machine")
    found = mistakes(f"--config.workdir={workdir}")
    assert list(found) == ["workdir"] and workdir in found["workdir"] and "choose" in found["workdir"]


def test_looking_at_a_workdir_leaves_nothing_behind(here):
    before = sorted(here.rglob("*"))
    load("--config.workdir=deep/er/runs")
    assert sorted(p for p in here.rglob("*") if "__pycache__" not in p.parts) == before


def test_all_mistakes_are_reported_together(here):
    (here / "file").touch()
    found = mistakes(
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
        "trian", "train.bacth", "train.batch", "model.whole", "model.first.width", "model.nothing", "optim.lr", "optim.lr.peak",
        "data.path", "workdir",
    }  # fmt: skip
