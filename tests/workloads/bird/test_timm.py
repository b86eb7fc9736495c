"""timm's vision transformers in and out: the same features, errors with their remedy for
unsupported models, and import as a start."""

import json
import pathlib
import runpy
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxtrain import cli, specs
from jaxtrain import config as config_lib
from jaxtrain.arrays import warm_start
from jaxtrain.run import loop
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.export import timm, timm_names
from jaxtrain.workloads.bird.inference import InferenceError, embed, encoder
from tests.support import corpus
from tests.support.birds import NAMES
from tests.support.timm_export import FRONT_END, MODEL, exported

BIRD = dict(workload="jaxtrain.workloads.bird", loader="loaders.audio.spectrogram")
DATA = pathlib.Path(__file__).parents[2] / "data" / "timm"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("out"))


def features(c, params, x):
    tokens = vit.encode(c, params, x[:, 0])
    return vit.pooled(c, params, tokens.cls if c.pool == "cls" else tokens.patches), tokens


@pytest.mark.parametrize("name", ["image", "pooled"])
def test_features_of_weights_from_elsewhere_are_timms(name, tmp_path):
    """Registers, positions of CLS, queries' norms, scales, exact GELU, and the norm behind the
    pooling, as in Bird-MAE."""
    folder = shutil.copytree(DATA / name, tmp_path / name)
    (folder / "front_end.json").write_text(
        json.dumps({"sample_rate": 16_000, "clip_seconds": 0.65})
    )
    model = encoder.load(str(folder))
    golden = np.load(DATA / f"{name}.npz")
    assert model.front_end.sample_rate == 16_000
    assert model.config.grid == tuple(
        n // p for n, p in zip(golden["x"].shape[2:], model.config.patch, strict=True)
    )
    found, tokens = jax.jit(lambda p, x: features(model.config, p, x))(model.params, golden["x"])
    np.testing.assert_allclose(found, golden["features"], rtol=0, atol=1e-5)
    before = golden["tokens"].shape[1] - tokens.patches.shape[1]
    np.testing.assert_allclose(tokens.patches, golden["tokens"][:, before:], rtol=0, atol=1e-5)


def test_an_export_has_the_features_that_timm_computed_of_it(out):
    """The names, shapes and config.json that timm loaded once, and its numbers."""
    golden = np.load(DATA / "out.npz")
    arrays = safetensors.numpy.load_file(out / "model.safetensors")
    assert {name: list(x.shape) for name, x in arrays.items()} == json.loads(str(golden["shapes"]))
    assert (out / "config.json").read_text() == str(golden["config"])
    model = encoder.load(str(out))
    assert model.digest == encoder.load(str(out.parent / "run")).digest, "and back in, bit for bit"
    found = np.asarray(
        jax.jit(lambda p, x: features(model.config, p, x)[0])(model.params, golden["x"])
    )
    np.testing.assert_allclose(found, golden["features"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        found @ model.head["w"] + model.head["b"], golden["logits"], rtol=0, atol=1e-5
    )
    assert "library_name: timm" in (out / "README.md").read_text()


def test_a_run_of_its_architecture_takes_every_array_of_it(out, tmp_path):
    """Our own file is removed, so the folder is taken as one from elsewhere."""
    bare = shutil.copytree(out, tmp_path / "bare")
    (bare / "jaxtrain.json").unlink()
    model, start = timm.from_folder(bare)
    assert {name: model[name] for name in MODEL if name not in ("dtype", "layer_scale")} == {
        name: value for name, value in MODEL.items() if name not in ("dtype", "layer_scale")
    }
    table = bird.make_specs(config_lib.section(bird.Config, {**model, "n_classes": 3}))
    leaves = zip(specs.paths(table), jax.tree.leaves(table, is_leaf=specs.is_spec), strict=True)
    rules = config_lib.section(config_lib.WarmStart, start)
    matches = warm_start.match(
        {path: (spec.shape, spec.dtype) for path, spec in leaves},
        warm_start.open_source(rules),
        rules,
    )
    params = encoder.load(str(out)).params
    assert {f"encoder/{path}" for path in specs.paths(params)} == matches.loaded.keys()
    assert set(matches.unused) == {"head/bias", "head/weight"}
    for path, x in zip(specs.paths(params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(
            matches.loaded[f"encoder/{path}"].stored.read(()), x, err_msg=path
        )


def test_an_encoder_without_a_class_token_comes_back_from_timms_names(tmp_path):
    """As timm has it: class_token=False, and a global pool over the patches."""
    out = exported(tmp_path, n_cls=0, n_registers=0)
    arguments = json.loads((out / "config.json").read_text())["model_args"]
    assert (arguments["class_token"], arguments["global_pool"]) == (False, "avg")
    assert "cls_token" not in safetensors.numpy.load_file(out / "model.safetensors")
    ours = encoder.load(str(tmp_path / "run"))
    assert encoder.load(str(out)).digest == ours.digest
    (out / "jaxtrain.json").unlink()
    model, _ = timm.from_folder(out)
    assert (model["n_cls"], model["pool"]) == (0, "patches")
    with pytest.raises(InferenceError, match="has no class token .* use 'mean'"):
        embed.embed(ours, None, tmp_path / "embedded", kinds=("cls",))


@pytest.mark.slow
def test_a_run_begins_with_it_and_is_exported_again(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = shutil.copytree(out, tmp_path / "bare")
    (bare / "jaxtrain.json").unlink()  # as from elsewhere
    model, start = timm.from_folder(bare)
    data = dict(
        train=str(out.parent / "shards"),
        label="label",
        n_frames=64,
        clip_seconds=0.65,
        threads=1,
        test_share=0.0,
        **FRONT_END,
    )
    config = config_lib.from_dict(
        dict(
            workload="jaxtrain.workloads.bird",
            loader="loaders.audio.spectrogram",
            model={**model, "dtype": "float32"},
            data=data,
            workdir="more",
            warm_start=start,
            checkpoint=dict(every=1),
            train=dict(steps=1, batch=8, eval_every=0),
            optim=dict(lr=1e-30),
        )
    )
    loop.run(config)
    assert (
        cli.main(["export", "more", "--format", "timm", "--license", "cc-by-4.0", "--out", "again"])
        == 0
    )
    before, after = (
        safetensors.numpy.load_file(f / "model.safetensors") for f in (out, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    for name in before.keys() - {"head.weight", "head.bias"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert "license: cc-by-4.0" in (tmp_path / "again" / "README.md").read_text()


def test_every_misfit_is_listed_with_what_would_allow_it(out, tmp_path, capsys):
    folder = shutil.copytree(DATA / "image", tmp_path / "image")
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    arrays["blocks.0.attn.rel_pos"] = arrays.pop("blocks.0.attn.qkv.bias")
    arrays["blocks.1.attn.rel_pos"] = arrays.pop("blocks.1.attn.qkv.bias")
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        timm.from_folder(folder)
    told = str(error.value)
    assert (
        "blocks/b_qkv is missing" in told and "blocks.0.attn.rel_pos [96] has no place here" in told
    )
    assert "config.warm_start.skip and unused" in told
    about = json.loads((folder / "config.json").read_text())
    about["model_args"] |= {"act_layer": "relu", "num_heads": 5}
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(
        ValueError,
        match=(
            r"num_heads is 5, which does not divide the width 32; the activation is 'relu';"
            r" expected"
        ),
    ):
        timm.from_folder(folder)

    # A run that would compute another function of the arrays, with positions on another grid.
    wrong = dict(BIRD, model=dict(MODEL, heads=4, n_frames=32, n_mels=64))
    wrong["data"] = dict(train=str(out.parent / "shards"), label="label")
    wrong["warm_start"] = dict(source=str(DATA / "image"), skip=("^(objective|probe)/",))
    with pytest.raises(config_lib.ConfigError) as error:
        config_lib.from_dict(wrong)
    told = str(error.value)
    assert "set config.model.mlp=gelu_exact" in told and "set config.model.eps=1e-06" in told
    assert "--config.warm_start.reshape={'^encoder/pos$': 'grid 4x2 to 2x4'}" in told

    missing = "encoder/w_patch is missing.*omit --format timm"
    for options, text in (
        (dict(positions="rope", mlp="swiglu"), "learned ones; model.mlp is"),
        (dict(patch_norm=True), "model.patch_norm is True"),
    ):
        with pytest.raises(ValueError, match=f"{text}.*{missing}"):
            timm_names.as_timm({}, {**MODEL, **options})
    assert (
        cli.main(
            [
                "embed",
                str(DATA / "image"),
                "--data",
                str(out.parent / "shards"),
                "--out",
                str(tmp_path / "e"),
            ]
        )
        == 2
    )
    assert "front_end.json there, for example" in capsys.readouterr().err


def test_positions_of_as_many_patches_are_resampled_to_another_grid():
    rules = config_lib.WarmStart(
        source=str(DATA / "image"), reshape={"^encoder/pos$": "grid 4x2 to 2x4"}, unused=(".",)
    )
    source = warm_start.open_source(rules)
    matches = warm_start.match({"encoder/pos": ((8, 32), "float32")}, source, rules)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = warm_start.load(
        matches, {"encoder": {"pos": jax.ShapeDtypeStruct((8, 32), "float32", sharding=here)}}
    )
    before = source["encoder/pos"].read(()).reshape(4, 2, 32)
    expected = jax.image.resize(before, (2, 4, 32), "linear").reshape(8, 32)
    np.testing.assert_allclose(found["encoder/pos"], expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_timm_itself_loads_an_export_and_its_example_runs(out, tmp_path):
    """This test needs timm, torch and torchaudio (dependency group "peers")."""
    pytest.importorskip("timm")
    torch = pytest.importorskip("torch")
    make = runpy.run_path(str(DATA / "make.py"), run_name="made")
    x = np.random.default_rng(3).standard_normal((2, 1, 64, 32), np.float32)
    model = encoder.load(str(out))
    found, _ = features(model.config, model.params, x)
    with torch.no_grad():
        theirs = make["load"](out)
        expected = theirs.forward_head(
            theirs.forward_features(torch.from_numpy(x)), pre_logits=True
        ).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    (tmp_path / "bird.wav").write_bytes(
        corpus.encode(corpus.noise(0, 0.65, 16_000), 16_000, "WAV", "FLOAT")
    )
    done = subprocess.run(
        [sys.executable, out / "example.py", tmp_path / "bird.wav"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shards = tmp_path / "one"
    corpus.write(
        shards / "data-train.arrow",
        corpus.table([(tmp_path / "bird.wav").read_bytes()], [0], NAMES),
    )
    embed.embed(
        model,
        encoder.data_config(model, train=str(shards), label="label"),
        tmp_path / "embedded",
        batch=8,
    )
    scores = np.array(jax.nn.softmax(np.load(tmp_path / "embedded" / "scores.npy")[0]))
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for _, name in found] == [NAMES[k] for k in np.argsort(-scores)[:5]]
    np.testing.assert_allclose(
        [float(score) for score, _ in found], np.sort(scores)[::-1][:5], rtol=0, atol=1e-3
    )
