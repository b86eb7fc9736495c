"""The autoencoder as a user runs it: it ends when it stops improving, keeps its best step, and
draws its predictions."""

import json

import pytest
import safetensors.numpy

from jaxtrain.arrays import stored
from jaxtrain.commands import export
from tests.support import processes, small_runs


@pytest.fixture
def folder(tmp_path):
    return small_runs.giblet(tmp_path)


def test_a_run_ends_by_patience_and_keeps_its_best_step(folder):
    output = processes.run(folder, "giblet.py")
    # The first evaluation is progress. The three more, at steps 4, 6 and 8, are not.
    assert "ended at step 8: no progress of fmri_r for 3 evaluations" in output
    workdir = folder / "runs" / "giblet"
    tests = processes.records(workdir, "test")
    assert sorted(tests) == [2, 4, 6, 8]
    assert {"fmri_r", "fmri_r_null", "fmri_r2", "voxel_r", "voxel_r_null", "voxel_r2", "voxel_r_best"} <= tests[8].keys()
    best = json.loads((workdir / "best.json").read_text())
    assert best["value"] == pytest.approx(max(r["fmri_r"] for r in tests.values())) and best["progress"]["step"] == 2
    kept = {int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()}
    assert {8, best["step"]} <= kept
    assert {"step000008_fmri_0.png", "frame_0.png"} <= {p.name for p in (workdir / "pictures").iterdir()}
    exported = folder / "exported"
    assert export.main([str(workdir), "--out", str(exported)]) == 0
    arrays = safetensors.numpy.load_file(exported / "model.safetensors")
    state = stored.open_step(stored.find_step(workdir, None))
    model_state = [path for path in state if path.startswith("model_state/")]
    assert model_state and all((arrays[path.replace("/", ".")] == state[path].read(())).all() for path in model_state)
    warm = (f"--config.warm_start.source={exported}", "--config.workdir=runs/warm", "--config.train.steps=1")
    assert "warm start from" in processes.run(folder, "giblet.py", *warm, "--config.train.eval_every=1")
    assert export.main(["--reverse", str(exported), "--out", str(folder / "back")]) == 0
    back = stored.open_step(stored.find_step(folder / "back", None))
    assert all(
        (back[path].read(()) == state[path].read(())).all() for path in state if path.startswith(("model_state/", "params/"))
    )
    again = processes.run(folder, "giblet.py")
    assert "ended at step 8" in again and sorted(processes.records(workdir, "test")) == [2, 4, 6, 8]


def test_a_best_metric_that_no_evaluation_has_is_reported_at_the_start(folder):
    output = processes.run(folder, "giblet.py", "--config.checkpoint.best=-total_los", code=2)
    assert "config.checkpoint.best names 'total_los'; expected one of: audio_loss, " in output and "total_loss" in output
    output = processes.run(folder, "giblet.py", "--config.data.test_share=0", code=2)
    assert "config.checkpoint.best is 'fmri_r', and there is no test split" in output


def test_disagreements_of_model_and_data_are_reported_before_a_device_is_touched(folder):
    wrong = ("--config.model.n_voxels=13", "--config.model.reconstruct=frame", "--config.model.frame=4")
    output = processes.run(folder, "giblet.py", *wrong, "--config.checkpoint.best=", code=2)
    assert "config.model.n_voxels is 13, and the data have 12; nothing is cut or padded to fit" in output
    assert "config.model.frame is 4, and a window has the frames 0 … 3" in output
    assert "config.train.patience is 3, and checkpoint.best names no metric" in output
