"""The ONNX file of a bird run gives our features and scores, computed by onnx's reference in NumPy,
and by onnxruntime."""

import functools
import io
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.reference
import pytest
import soundfile

from jaxtrain import cli, specs
from jaxtrain import config as config_lib
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.export import onnx as bird_onnx
from jaxtrain.workloads.bird.inference import detect, encoder, heads
from loaders.audio import spectrogram
from tests.support import corpus, runs

BIRD = dict(workload="jaxtrain.workloads.bird", loader="loaders.audio.spectrogram")
NAMES = ("blackbird", "chiffchaff", "wren")
DATA = dict(label="label", n_frames=64, n_mels=32, sample_rate=16_000, clip_seconds=0.6, threads=1)
SIZES = dict(
    embed=32,
    depth=2,
    heads=2,
    patch=(16, 16),
    n_frames=64,
    n_mels=32,
    dtype="float32",
    class_names=NAMES,
    n_classes=3,
)
MODELS = {
    # A head of its own with a softmax, and all features of timm's transformers.
    "supervised": dict(pool="patches", n_registers=2, qk_norm=True, layer_scale=0.5, mlp="gelu"),
    # Several classes, from the probe, the features that timm's models lack, and a front end without
    # bands above 6 kHz.
    "probe": dict(
        positions="rope", mlp="swiglu", supervised=dict(weight=0.0), diet=dict(weight=1.0)
    ),
    "pooled": dict(
        norm="pooled", mlp="gelu_exact", eps=1e-6, pool="patches", n_cls=0, patch_norm=True
    ),
}


def run(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A run with random weights."""
    data = {
        **DATA,
        "train": str(folder / "shards"),
        **({"f_max": 6000.0} if name == "probe" else {}),
    }
    corpus.write(
        folder / "shards" / "data-train.arrow",
        corpus.table([corpus.wav(0, 0.7)] * 4, [0, 1, 2, 0], NAMES),
    )
    config = config_lib.from_dict(
        dict(
            workload="jaxtrain.workloads.bird",
            loader="loaders.audio.spectrogram",
            model={**SIZES, **MODELS[name]},
            data=data,
            workdir=str(folder / "run"),
        )
    )
    rng = np.random.default_rng(0)

    def made(path, s):
        return (0.2 * rng.standard_normal(s.shape) + ("scale" in path)).astype(np.float32)

    params = specs.map_specs(made, bird.make_specs(config.model))
    state = {"step": jnp.array(1, jnp.int32), "params": params, "model_state": (), "opt_state": ()}
    saved = json.loads(config_lib.to_json(config))
    saved["model"]["multilabel"] = name == "probe"
    runs.save(folder / "run", 1, state, run=saved)
    return folder / "run"


def waves(n: int) -> np.ndarray:
    """Clips of 16 bits, [n, 9600]: noise, quiet and loud, one on top of a constant, and silence."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 9600)) * np.geomspace(0.3, 1e-3, n)[:, None]
    x += np.sin(np.arange(9600) * np.geomspace(0.05, 2, n)[:, None]) * 0.2
    x[1] = x[1] * 0.1 + 0.7
    x[-1] = 0
    return (np.clip(np.rint(x * 32767), -32768, 32767) / 32768).astype(np.float32)


def ours(folder: pathlib.Path, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Features and scores as `jaxtrain embed` and `detect` compute them, from the loader's
    spectrograms."""
    model = encoder.load(str(folder))
    head = detect.head_of(model)
    made = np.stack(
        [
            spectrogram.front_end(each, 16_000, clip_seconds=0.6, n_frames=64, of=model.front_end)
            for each in x
        ]
    )

    def compute(params, arrays, made):
        tokens = vit.encode(model.config, params, made)
        pooled = {
            name: vit.pooled(model.config, params, each)
            for name, each in (("cls", tokens.cls), ("mean", tokens.patches))
        }
        return pooled[head.pool], heads.scores(head, arrays, pooled, tokens.patches)

    return tuple(map(np.asarray, jax.jit(compute)(model.params, head.arrays, made)))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Maps the name of a model to its run and the run's export."""

    @functools.cache
    def case(name: str) -> tuple[pathlib.Path, pathlib.Path]:
        folder = tmp_path_factory.mktemp(name)
        made = run(folder, name)
        assert (
            cli.main(["export", str(made), "--format", "onnx", "--out", str(folder / "out")]) == 0
        )
        return made, folder / "out"

    return case


@pytest.mark.parametrize("name", MODELS)
def test_the_file_gives_our_features_and_scores(case, name):
    made, out = case(name)
    model = onnx.load(out / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [each.version for each in model.opset_import] == [20] and model.ir_version == 9
    about = {each.key: each.value for each in model.metadata_props}
    assert (about["sample_rate"], about["samples"], json.loads(about["classes"])) == (
        "16000",
        "9600",
        list(NAMES),
    )
    assert about["scores"] == ("sigmoid" if name == "probe" else "softmax") and (
        about["run"],
        about["step"],
    ) == ("run", "1")
    x = waves(4)
    expected = ours(made, x)
    evaluate = onnx.reference.ReferenceEvaluator(model)
    for rows in (slice(0, 4), slice(2, 3)):  # any number of them
        for found, value in zip(
            evaluate.run(["features", "scores"], {"waveform": x[rows]}), expected, strict=True
        ):
            np.testing.assert_allclose(found, value[rows], rtol=0, atol=1e-4)
    assert np.ptp(expected[1], axis=0).max() > 0.01, "the waveforms differ to the model"


def test_the_folder_is_an_export_like_others(case):
    """The import of an export, its checksums, and its card."""
    made, out = case("supervised")
    assert encoder.load(str(out)).digest == encoder.load(str(made)).digest
    assert {"model.onnx", "example_onnx.py", "model.safetensors"} <= {
        line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()
    }
    assert bird_onnx.COMMAND in (out / "README.md").read_text()


def test_large_arrays_lie_next_to_the_file(case, tmp_path, monkeypatch):
    made, out = case("supervised")
    monkeypatch.setattr(bird_onnx, "LARGEST", 10_000)
    monkeypatch.setattr(bird_onnx, "PAGE", 4096)
    assert (
        cli.main(
            [
                "export",
                str(made),
                "--format",
                "onnx",
                "--format",
                "timm",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert (tmp_path / "out" / "model.onnx").stat().st_size < (
        out / "model.onnx"
    ).stat().st_size / 2
    onnx.checker.check_model(tmp_path / "out" / "model.onnx")
    x = {"waveform": waves(2)}
    small, whole = (
        onnx.reference.ReferenceEvaluator(onnx.load(f / "model.onnx")).run(None, x)
        for f in (tmp_path / "out", out)
    )
    for a, b in zip(small, whole, strict=True):
        np.testing.assert_array_equal(a, b)


def test_models_that_onnx_cannot_represent_are_reported(case, tmp_path, capsys):
    made, _ = case("supervised")
    out = tmp_path / "out"
    assert (
        cli.main(["export", str(made), "--format", "onnx", "--only", "^probe/", "--out", str(out)])
        == 2
    )
    assert "encoder/w_patch is missing; expected (256, 32)" in capsys.readouterr().err
    assert (
        cli.main(
            ["export", str(made), "--format", "onnx", "--only", "^encoder/", "--out", str(out)]
        )
        == 0
    )
    names = [each.name for each in onnx.load(out / "model.onnx").graph.output]
    assert names == ["features"], "an encoder alone has no scores"
    with pytest.raises(SystemExit):
        cli.main(["export", str(out), "--format", "onnx", "--push", "me/birds"])
    assert "--format belongs to an export of RUN" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_gives_the_same_and_the_example_runs(case, name, tmp_path):
    """This test needs onnxruntime (dependency group "peers")."""
    runtime = pytest.importorskip("onnxruntime")
    made, out = case(name)
    session = runtime.InferenceSession(str(out / "model.onnx"))
    x = waves(5)
    expected = ours(made, x)
    for rows in (slice(0, 5), slice(2, 3)):
        for found, value in zip(
            session.run(["features", "scores"], {"waveform": x[rows]}), expected, strict=True
        ):
            np.testing.assert_allclose(found, value[rows], rtol=0, atol=1e-4)
    file = io.BytesIO()
    soundfile.write(file, x[:3].reshape(-1), 16_000, format="WAV", subtype="PCM_16")
    (tmp_path / "bird.wav").write_bytes(file.getvalue())
    done = subprocess.run(
        [sys.executable, out / "example_onnx.py", tmp_path / "bird.wav"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for i, line in enumerate(done.stdout.splitlines()):
        start, *best = line.split("\t")
        assert start == f"{0.6 * i:g} s"
        assert {each.split()[0]: float(each.split()[1]) for each in best} == pytest.approx(
            dict(zip(NAMES, expected[1][i], strict=True)), abs=1e-3
        )
