"""A run of the bird encoder as a user meets it, its files, its errors, and its shipped configs."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.telemetry.report import trace
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird.export import EXPORT
from tests.support.processes import ROOT, records, run

TRACED = "--config.metrics.profile=(2, 2)"


def test_a_run_leaves_its_files_in_the_workdir(folder, corpus):
    output = run(
        folder,
        f"tiny.py:{corpus}",
        "--config.train.steps=2",
        "--config.metrics.tensorboard=true",
        TRACED,
    )
    workdir = folder / "runs" / "tiny"
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["model"]["n_classes"] == 12 and saved["train"]["steps"] == 2
    assert list(records(workdir, "train")) == [1, 2] and list(records(workdir, "test")) == [2]
    mixed = records(workdir, "data")
    assert (
        list(mixed) == [1, 2]
        and mixed[2]["window_unique"] == 16 > mixed[2]["window_unique_expected"] > 10
    )
    assert {p.name for p in (workdir / "pictures").iterdir()} >= {"input_0.png", "augmented_0.png"}
    assert list((workdir / "tensorboard").iterdir())
    assert (workdir / "checkpoints" / "2").is_dir()
    line = next(line for line in output.splitlines() if line.startswith("step 2/2"))
    for part in (
        "loss",
        " = supervised ",
        " + probe ",
        "examples/s",
        "MFU",
        "waiting for data",
        "left",
    ):
        assert part in line
    line = next(
        line for line in output.splitlines() if "from the command to the first step" in line
    )
    assert re.search("compiled$", output, re.M), (
        "the seconds of the compilation are in this line alone"
    )
    whole, phases = line.split(" s from the command to the first step: ")
    named = dict(phase.rsplit(" ", 1) for phase in phases.split(", "))
    assert {"imports and config", "compilation", "first step"} <= named.keys()
    assert (
        float(whole) == pytest.approx(sum(map(float, named.values())), abs=0.5)
        and float(named["compilation"]) > 0
    )
    last = output[output.index("the run has ended; it left") :].splitlines()
    paths = [line.rpartition(": ")[2] for line in last[1 : last.index("next")]]
    names = ("checkpoints", "metrics.jsonl", "classes.jsonl", "pictures", "tensorboard", "traces")
    assert paths == [f"runs/tiny/{name}" for name in names] and all(
        (folder / path).exists() for path in paths
    )
    rates = pytest.approx([1e-3, 5e-4, 0.0], abs=1e-9)
    assert json.loads((workdir / "schedule.json").read_text()) == {"step": [0, 1, 2], "lr": rates}
    [traced] = (workdir / "traces").iterdir()
    found = trace.of_folder(traced)
    assert traced.name == "steps-000002-000002-process-0" and sum(
        found.parts.values()
    ) == pytest.approx(1)
    assert min(found.parts[part] for part in ("forward", "backward", "optimizer")) > 0.001, found
    assert list(traced.glob("plugins/profile/*/*.trace.json.gz")), "for Perfetto"
    typed = [line.partition(": ")[2] for line in last[last.index("next") + 1 :]]
    page, longer, export, embed, _ = typed
    assert page == "jaxtrain report runs/tiny --out runs/tiny/report.html"
    again = [
        f"--config=tiny.py:{corpus}",
        "--config.metrics.tensorboard=true",
        TRACED,
        "--config.train.steps=4",
    ]
    assert shlex.split(longer) == ["jaxtrain", "train", *again]
    assert export == "jaxtrain export runs/tiny --out runs/tiny-weights" and embed.startswith(
        "jaxtrain embed runs/tiny "
    )
    # The suggested commands can be typed one after the other. All run in one process, because
    # imports take longer than the work.
    program = (
        "import shlex, sys; from jaxtrain import cli; sys.exit(any([cli.main(shlex.split(x)[1:])"
        " for x in sys.argv[1:]]))"
    )
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{folder}",
        "IDS": str(folder / "ids.jsonl"),
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *typed], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(records(workdir, "train")) == [1, 2, 3, 4] and "resuming from step 2" in done.stderr
    assert (folder / "runs" / "tiny-weights" / "model.safetensors").stat().st_size > 1000
    assert np.isfinite(np.load(folder / "runs" / "tiny-embeddings" / "mean.npy")).all()
    assert "encoder/w_patch" in done.stdout and (workdir / "report.html").stat().st_size > 1_000_000


def test_errors_come_together_and_before_a_device_is_touched(folder, corpus):
    output = run(
        folder,
        f"tiny.py:{corpus}",
        "--config.trian.steps=3",
        "--config.train.batch=7",
        "--config.optim.lr=fast",
        "--config.data.test=/no/such/place",
        "--config.train.accumulate=2",
        code=2,
        JAX_PLATFORMS="none_such",  # using a device would fail
    )
    for part in (
        "trian",
        "did you mean 'train'",
        "config.train.batch is 7",
        "optim.lr",
        "/no/such/place",
    ):
        assert part in output, output
    assert "Traceback" not in output


def test_a_shipped_config_without_its_data_is_explained_too(capsys, monkeypatch):
    from jaxtrain.commands import explain

    monkeypatch.delenv("JAXTRAIN_XCL", raising=False)
    assert explain.main(["--config=xcl"]) == 2
    told = capsys.readouterr()
    assert "config.data.exclude" in told.out and "(495640, 495763," in told.out
    assert "config.data.train is empty; name a folder" in told.err
    assert explain.main(["--config=folder"]) == 2, "what it takes from an index has values, too"
    told = capsys.readouterr()
    assert (
        "config.data.clip_seconds" in told.out
        and "config.data.train is empty; name a folder" in told.err
    )
    assert explain.main(["--config=esc10_folds"]) == 2, "which takes three things"
    told = capsys.readouterr()
    assert (
        "config.model.mask.ratio" in told.out
        and "config.data.train is empty; name a folder" in told.err
    )


def test_the_birds_names_are_one_for_each_layer():
    c = bird.Config(n_classes=3, embed=32, depth=2, heads=4)
    table = bird.make_specs(c)
    names = [EXPORT.names({"depth": 2}, path) for path in specs.paths(table)]
    flat = [n for name in names for n in ([name] if isinstance(name, str) else name)]
    assert len(flat) == len(set(flat)) and {
        "encoder.blocks.1.w_qkv",
        "encoder.w_patch",
        "probe.b",
    } <= set(flat)
    assert all(len(n) == 2 for n in names if isinstance(n, list))


def test_xcl_is_xcm_without_five_recordings(tmp_path):
    paths = {name: ROOT / "configs" / f"{name}.py" for name in ("xcm", "xcl")}
    xcm, xcl = (runpy.run_path(str(path))["get_config"](str(tmp_path)) for path in paths.values())
    assert xcl.data.exclude == (495640, 495763, 497541, 498645, 501254)
    assert xcl.data.exclude_of == 528_422, "the rows are those of one mirror"
    del xcl.data.exclude, xcl.data.exclude_of
    assert xcl == xcm


FRAMES = """def get_config():
    workload, loader = "jaxtrain.workloads.bird", "loaders.audio.spectrogram"
    return dict(workload=workload, loader=loader, data=dict(train="demo", clip_seconds=2.5))
"""


def test_the_model_has_the_frames_and_bands_of_the_data(tmp_path):
    (tmp_path / "frames.py").write_text(FRAMES)
    overrides = [("data.n_frames", "256"), ("data.n_mels", "64"), ("data.form", "waveform")]
    config, problems = config_lib.read(str(tmp_path / "frames.py"), overrides, make_data=False)
    assert not problems
    assert (config.model.n_frames, config.model.n_mels, config.model.form) == (256, 64, "waveform")
    wrong = [("data.n_mels", "x")]
    _, [(path, problem)] = config_lib.read(str(tmp_path / "frames.py"), wrong, make_data=False)
    assert path == "data.n_mels" and "is 'x'" in problem


@pytest.mark.parametrize(
    ("rows", "loss", "multilabel"),
    [({}, "softmax", False), ({"rows_of_no_class": 3}, "asymmetric", True)],
)
def test_the_folders_config_takes_the_loss_from_the_index(rows, loss, multilabel, tmp_path):
    split = {"rows": 9, "rows_of_several_classes": 0, "median_seconds": 3.0, **rows}
    (tmp_path / "index.json").write_text(
        json.dumps({"classes": ["a"], "splits": {"train": split, "test": split}})
    )
    found = runpy.run_path(str(ROOT / "configs" / "folder.py"))["get_config"](str(tmp_path))
    assert (
        found.model.supervised.get("loss", "softmax"),
        found.data.multilabel,
        found.data.clip_seconds,
    ) == (
        loss,
        multilabel,
        3.0,
    )


@pytest.mark.parametrize(("n_rows", "cycle"), [(300, 300), (6_400, 800), (99_000, 3_000)])
def test_a_cycle_of_the_folders_config_is_four_passes_within_limits(n_rows, cycle, tmp_path):
    split = {"rows": n_rows, "rows_of_each_class": [n_rows // 4, n_rows - n_rows // 4]}
    split |= {"median_seconds": 1.0}
    (tmp_path / "index.json").write_text(
        json.dumps({"classes": ["a", "b"], "splits": {"train": split, "test": split}})
    )
    found = runpy.run_path(str(ROOT / "configs" / "folder.py"))["get_config"](str(tmp_path))
    assert (found.optim.cycle, found.train.eval_every, found.train.steps) == (
        cycle,
        cycle,
        10 * cycle,
    )
    assert found.checkpoint.best == "accuracy"
    assert 0.75 < found.train.patience_from <= 0.8, "more than always the same class has"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("views=2", "config.model.views is decided by the data; set data.views"),
        ("n_classes=5", "config.model.n_classes is decided by the data; omit it"),
        ("veiws=2", "config.model.veiws does not exist"),
    ],
)
def test_no_flag_sets_a_fact_of_the_data(flag, said):
    name, value = flag.split("=")
    _, problems = config_lib.read("xcm", [(f"model.{name}", value)], make_data=False)
    (problem,) = problems
    assert said in f"config.{problem[0]} {problem[1]}"
    assert "class_names" not in problem[1]


def test_explain_lists_no_fact_of_the_data():
    config, _ = config_lib.read("xcm", make_data=False)
    lines = config_lib.explain(config)
    assert "config.model.views " not in lines and "config.data.views " in lines
