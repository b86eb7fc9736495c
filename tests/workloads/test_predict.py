"""jaxtrain predict: the model's own volumes in order, in the space of the scans, and refusals."""

import dataclasses
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import nibabel
import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.arrays import stored_params
from jaxtrain.workloads.giblet import model as giblet
from jaxtrain.workloads.giblet import predict
from loaders.film import film_files, multimodal
from tests.support import runs
from tests.support.cases import initial

WIDTHS = dict(
    video_widths=(16, 16, 16),
    audio_widths=(8, 8),
    text_widths=(8, 8),
    trunk_widths=(16, 16),
    bottleneck=8,
    head_width=16,
    decoder_widths=(16, 16, 16, 16),
    decode_video_widths=(16, 16),
    decode_audio_widths=(16, 16),
    decode_text_widths=(16, 16),
    dtype="float32",
)

N, SHAPE, AFFINE = (
    21,
    (3, 4, 2),
    np.array([[-2.0, 0, 0, 9], [0, 2, 0, -7], [0, 0, 3, 1], [0, 0, 0, 1]]),
)


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """A film, two viewers of 12 voxels and their mask, and a model with its own statistics."""
    folder, rng = tmp_path_factory.mktemp("film"), np.random.default_rng(0)
    (folder / "fmri").mkdir()
    np.save(folder / "video.npy", rng.integers(0, 256, (4 * N, 3, 4, 3), np.uint8))
    np.save(folder / "audio.npy", rng.integers(0, 1024, (4 * N, 2), np.int16))
    np.save(folder / "text.npy", rng.standard_normal((N, 8), np.float32))
    for name in "ab":
        np.save(folder / "fmri" / f"{name}.npy", rng.standard_normal((N, 12)).astype(np.float16))
    film_files.write(
        folder, {"tr": 1.0, "fps": 4.0, "audio_rate": 4.0, "audio": "codes", "subjects": ["a", "b"]}
    )
    inside = np.zeros(SHAPE, np.uint8)
    inside.flat[rng.permutation(inside.size)[:12]] = 1
    nibabel.save(nibabel.Nifti1Image(inside, AFFINE), folder / "mask.nii.gz")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, film):
    data = multimodal.Config(path=str(film), hrf=("text",), hrf_seconds=6.0, test_share=0.5)
    info = multimodal.dataset_info(data)
    c = giblet.Config(**WIDTHS, **{name: info[name] for name in (*giblet.SIZES, "audio")})
    params = initial(giblet.make_specs(c))
    model_state = jax.tree.map(lambda x: x + 0.3, initial(giblet.make_model_state(c), 1))
    config = {
        "workload": giblet.__package__,
        "model": dataclasses.asdict(c),
        "data": dataclasses.asdict(data),
        "seed": 0,
    }
    state = {
        "step": jnp.array(1, jnp.int32),
        "params": params,
        "model_state": model_state,
        "opt_state": (),
    }
    folder = tmp_path_factory.mktemp("run")
    runs.save(folder, 1, state, run=config)
    return folder, c, params, model_state


def test_volumes_are_the_models_in_the_films_order(film, run, tmp_path):
    workdir, c, params, model_state = run
    out, r = tmp_path / "p.nii.gz", tmp_path / "r.nii"
    assert (
        cli.main(
            [
                "predict",
                str(workdir),
                str(film),
                "--out",
                str(out),
                "--correlation",
                str(r),
                "--batch",
                "8",
            ]
        )
        == 0
    )
    image = nibabel.load(out)
    assert image.shape == (*SHAPE, N) and image.get_data_dtype() == np.float32
    np.testing.assert_array_equal(image.affine, AFFINE)
    np.testing.assert_allclose(image.header.get_zooms(), (2, 2, 3, 1))
    inside = np.asanyarray(nibabel.load(film / "mask.nii.gz").dataobj) > 0
    got = np.asanyarray(image.dataobj)[inside].T
    assert (np.asanyarray(image.dataobj)[~inside] == 0).all()
    # The loader of training gives the same rows, in any order.
    data = multimodal.Config(
        path=str(film), hrf=("text",), hrf_seconds=6.0, average=True, test_share=0.0
    )
    loader = multimodal.make_loader(data, split="train", rows=multimodal.Rows(N, ((0, N),)), seed=3)
    _, batch = next(loader)
    loader.close()
    inputs = {name: jnp.asarray(batch[name][0]) for name in giblet.MODALITIES}
    expected = np.asarray(
        giblet.forward(c, params, model_state, inputs, stored_params.one_device().shard)[0].fmri
    )
    order = batch["volume"][0]
    np.testing.assert_allclose(got[order], expected, atol=1e-4, rtol=1e-4)
    assert np.ptp(got, axis=0).max() > 0
    measured = np.mean(
        [np.load(film / "fmri" / f"{name}.npy").astype(np.float32) for name in "ab"], axis=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_hand = np.nan_to_num([np.corrcoef(got[:, v], measured[:, v])[0, 1] for v in range(12)])
    np.testing.assert_allclose(np.asanyarray(nibabel.load(r).dataobj)[inside], by_hand, atol=1e-3)
    # An export has the running statistics as well.
    exported, again = tmp_path / "exported", tmp_path / "q.nii.gz"
    assert cli.main(["export", str(workdir), "--out", str(exported)]) == 0
    assert cli.main(["predict", str(exported), str(film), "--out", str(again), "--batch", "8"]) == 0
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("ending", [".nii.gz", pytest.param(".nii", marks=pytest.mark.slow)])
def test_a_disk_that_fills_midway_keeps_the_volumes_that_were_done(
    film, run, tmp_path, monkeypatch, capsys, ending
):
    argv = ["predict", str(run[0]), str(film), "--batch", "8", "--correlation"]
    assert (
        cli.main([*argv, str(tmp_path / f"r{ending}"), "--out", str(tmp_path / f"p{ending}")]) == 0
    )
    original, asked = predict.volumes, []

    def fills(*args, **options):
        for i, each in enumerate(original(*args, **options)):
            if i == 11:
                raise OSError(28, "No space left on device")
            yield each

    out = tmp_path / "out" / f"p{ending}"
    out.parent.mkdir()
    monkeypatch.setattr(predict, "volumes", fills)
    assert cli.main([*argv, str(tmp_path / f"r2{ending}"), "--out", str(out)]) == 2
    assert (
        f"{out} could not be written: No space left on device" in capsys.readouterr().err
        and not out.exists()
    )
    monkeypatch.setattr(
        predict, "volumes", lambda *a, **k: asked.append(k["first"]) or original(*a, **k)
    )
    assert cli.main([*argv, str(tmp_path / f"r2{ending}"), "--out", str(out)]) == 0
    assert asked == [11] and out.read_bytes() == (tmp_path / f"p{ending}").read_bytes()
    assert (tmp_path / f"r2{ending}").read_bytes() == (tmp_path / f"r{ending}").read_bytes()
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_a_damaged_array_without_checksums_is_one_line(film, run, tmp_path, capsys):
    damaged = shutil.copytree(run[0], tmp_path / "run")
    step = damaged / "checkpoints" / "1"
    (step / "manifest.json").unlink()
    stored = (step / "state" / "ocdbt.process_0" / "d").iterdir()
    arrays = max(stored, key=lambda path: path.stat().st_size)
    arrays.write_bytes(bytes(arrays.stat().st_size))
    assert cli.main(["predict", str(damaged), str(film), "--out", str(tmp_path / "x.nii")]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ") and "unverified" in warning
    assert error.startswith("error: ") and "cannot be read" in error


def test_errors_are_one_line(film, run, tmp_path, capsys):
    workdir = str(run[0])
    other = tmp_path / "other"
    (other / "fmri").mkdir(parents=True)
    for name in ("video", "audio", "text"):
        (other / f"{name}.npy").write_bytes((film / f"{name}.npy").read_bytes())
    np.save(other / "fmri" / "a.npy", np.zeros((N, 9), np.float16))
    film_files.write(other, {**json.loads((film / "dataset.json").read_text()), "subjects": ["a"]})
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "mask.nii.gz").write_bytes(b"no image")
    for argv, text in (
        ([str(tmp_path / "none")], "dataset.json"),
        ([str(other)], "n_voxels is 12"),
        ([str(film), "--mask", str(other)], "mask.nii.gz does not exist"),
        ([str(film), "--mask", str(empty)], "mask.nii.gz cannot be read"),
    ):
        assert cli.main(["predict", workdir, *argv, "--out", str(tmp_path / "x.nii")]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and text in told and told.count("\n") == 1, told
    with pytest.raises(SystemExit, match="2"):
        cli.main(
            [
                "predict",
                workdir,
                str(film),
                "--out",
                str(tmp_path / "x.nii"),
                "--correlation",
                str(tmp_path / "x.nii"),
            ]
        )
    assert "--out and --correlation are the same file" in capsys.readouterr().err
    assert not (tmp_path / "x.nii").exists()
