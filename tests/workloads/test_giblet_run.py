"""The autoencoder as a user runs it: it draws its predictions, and its export has all that an
evaluation needs."""

import json

import jax
import pytest
import safetensors.numpy

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import orbax_steps, warm_start
from jaxtrain.commands import export
from jaxtrain.workloads.giblet import model as giblet
from tests.support import processes, small_runs


@pytest.fixture
def folder(tmp_path):
    return small_runs.giblet(tmp_path)


def test_a_run_draws_its_predictions_and_its_export_has_the_running_statistics(folder):
    processes.run(folder, "giblet.py", "--config.train.steps=2")
    workdir = folder / "runs" / "giblet"
    tests = processes.records(workdir, "test")
    assert list(tests) == [2]
    assert {
        "fmri_r",
        "fmri_r_null",
        "fmri_r2",
        "voxel_r",
        "voxel_r_null",
        "voxel_r2",
        "voxel_r_best",
    } <= tests[2].keys()
    assert json.loads((workdir / "best.json").read_text())["value"] == pytest.approx(
        tests[2]["fmri_r"]
    )
    assert {"step000002_fmri_0.png", "frame_0.png"} <= {
        p.name for p in (workdir / "pictures").iterdir()
    }
    exported = folder / "exported"
    assert export.main([str(workdir), "--out", str(exported)]) == 0
    arrays = safetensors.numpy.load_file(exported / "model.safetensors")
    state = orbax_steps.open_step(orbax_steps.find_step(workdir, None))
    model_state = [path for path in state if path.startswith("model_state/")]
    assert model_state and all(
        (arrays[path.replace("/", ".")] == state[path].read(())).all() for path in model_state
    )
    assert export.main(["--reverse", str(exported), "--out", str(folder / "back")]) == 0
    back = orbax_steps.open_step(orbax_steps.find_step(folder / "back", None))
    assert all(
        (back[path].read(()) == state[path].read(())).all()
        for path in state
        if path.startswith(("model_state/", "params/"))
    )
    # A run can start from the export: each parameter is found in it.
    table = giblet.make_specs(
        config_lib.section(
            giblet.Config, json.loads((workdir / "config.json").read_text())["model"]
        )
    )
    shapes = dict(
        zip(
            specs.paths(table),
            ((s.shape, s.dtype) for s in jax.tree.leaves(table, is_leaf=specs.is_spec)),
            strict=True,
        )
    )
    rules = config_lib.WarmStart(source=str(exported))
    assert (
        warm_start.match(shapes, warm_start.open_source(rules), rules).loaded.keys()
        == shapes.keys()
    )


def test_disagreements_of_model_and_data_are_reported_before_a_device_is_touched(folder):
    wrong = (
        "--config.model.n_voxels=13",
        "--config.model.reconstruct=frame",
        "--config.model.frame=4",
    )
    output = processes.run(folder, "giblet.py", *wrong, "--config.checkpoint.best=", code=2)
    assert (
        "config.model.n_voxels is 13, and the data have 12; nothing is cut or padded to fit"
        in output
    )
    assert "config.model.frame is 4, and a window has the frames 0 … 3" in output
    assert "config.train.patience is 3, and checkpoint.best names no metric" in output
