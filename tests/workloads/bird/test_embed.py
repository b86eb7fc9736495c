"""Embeddings of a dataset: their source, resuming, refusals, and the exported encoder on one
recording."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pyarrow as pa
import pytest

from jaxtrain import assembly, cli
from jaxtrain import config as config_lib
from jaxtrain.arrays import safetensors, warm_start
from jaxtrain.run import init_or_restore, loop
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.commands import embed as command
from jaxtrain.workloads.bird.commands import probe
from jaxtrain.workloads.bird.inference import InferenceError, embed, encoder
from loaders.audio import demo, spectrogram
from tests.hostile import damage

BIRD = dict(workload="jaxtrain.workloads.bird", loader="loaders.audio.spectrogram")
ROOT = pathlib.Path(__file__).parents[3]
MODEL = dict(
    embed=32,
    depth=2,
    heads=2,
    patch=(32, 32),
    n_frames=256,
    dtype="float32",
    pool="patches",
)
FRONT_END = dict(sample_rate=16_000, n_mels=64, f_max=7_500.0, mean=-6.0)
N = 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return demo.ensure(tmp_path_factory.mktemp("corpus"), n_train=N, n_test=9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """A run of one step, with its own choice of front end."""
    workdir = tmp_path_factory.mktemp("run")
    data = dict(train=str(corpus), n_frames=256, clip_seconds=2.5, threads=2, **FRONT_END)
    config = config_lib.from_dict(
        dict(
            workload="jaxtrain.workloads.bird",
            loader="loaders.audio.spectrogram",
            model=MODEL,
            data=data,
            workdir=str(workdir),
            train=dict(steps=1, batch=8, eval_every=0, ema=0.5),
            mesh=dict(data=8),
        )
    )
    loop.run(config)
    return workdir


def made(model, corpus, out, **options):
    data = encoder.data_config(model, train=str(corpus), views=options.pop("views", 1), threads=2)
    return embed.embed(model, data, out, batch=8, **options)


def arrays(folder):
    return {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}


def recordings(corpus):
    for shard in sorted((corpus / "train").glob("*.arrow")):
        yield from pa.ipc.open_stream(shard).read_all().to_pylist()


def test_features_are_the_encoders_of_each_recording_in_order(trained, corpus, tmp_path):
    model = encoder.load(str(trained))
    found = made(model, corpus, tmp_path / "out", kinds=command.KINDS, columns=("ebird_code",))
    assert found["done"] == N and found["unreadable"] == 0 and len(found["class_names"]) == 12
    got, rows = arrays(tmp_path / "out"), list(recordings(corpus))
    x = []
    for row in rows:
        wave, rate, _ = spectrogram.decode(row["audio"]["bytes"])
        of = spectrogram.FrontEnd(**FRONT_END)
        x.append(spectrogram.front_end(wave, rate, clip_seconds=2.5, n_frames=256, of=of))
    cls, patches = jax.jit(lambda p, x: vit.encode(model.config, p, x))(model.params, np.stack(x))
    np.testing.assert_allclose(got["mean"], patches.mean(1), rtol=0, atol=1e-4)
    np.testing.assert_allclose(got["cls"], cls.mean(1), rtol=0, atol=1e-4)
    np.testing.assert_allclose(got["patches"][:, 0], patches, rtol=0, atol=2e-2)
    np.testing.assert_allclose(
        got["scores"], got["mean"] @ model.head["w"] + model.head["b"], rtol=0, atol=1e-4
    )
    assert (
        got["label"].tolist() == [row["ebird_code"] for row in rows] == got["ebird_code"].tolist()
    )
    assert got["index"].tolist() == list(range(N)) and (got["weight"] == 1).all()


def test_the_average_and_an_untrained_encoder_are_others(trained):
    one, ema, random = (encoder.load(str(trained), **o) for o in ({}, {"ema": True}, {"random": 3}))
    assert len({m.digest for m in (one, ema, random)}) == 3
    assert (
        encoder.load(str(trained), random=3).digest
        == random.digest
        != encoder.load(str(trained), random=4).digest
    )


def test_the_best_step_is_read_if_the_run_has_one_and_no_other_is_named(trained, tmp_path, capsys):
    workdir = shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(workdir / "checkpoints" / "1", workdir / "checkpoints" / "2")
    best = workdir / "best.json"
    for named, expected in ((1, "1"), (7, "2")):  # step 7 is not kept
        best.write_text(json.dumps({"step": named, "value": 0.5, "metric": "accuracy"}))
        assert pathlib.Path(encoder.load(str(workdir)).path).name == expected
        line = f"step 1, the best of {workdir} by checkpoint.best\n"
        assert (line in capsys.readouterr().err) == (expected == "1")
    best.write_text(json.dumps({"step": 1, "value": 0.5, "metric": "accuracy"}))
    assert pathlib.Path(encoder.load(str(workdir), step=2).path).name == "2"


@pytest.mark.parametrize("views", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_result(
    trained, corpus, tmp_path, views, monkeypatch
):
    model = encoder.load(str(trained))
    whole = made(model, corpus, tmp_path / "whole", views=views)
    real, taken = spectrogram.Spectrograms.__next__, []

    def fails(self):
        if len(taken) == 2:
            raise OSError("the disk is gone")
        taken.append(real(self))
        return taken[-1]

    monkeypatch.setattr(spectrogram.Spectrograms, "__next__", fails)
    with pytest.raises(OSError, match="gone"):
        made(model, corpus, tmp_path / "parts", views=views)
    monkeypatch.undo()
    noted = json.loads((tmp_path / "parts" / embed.ABOUT).read_text())
    assert 0 < noted["done"] < N
    assert made(model, corpus, tmp_path / "parts", views=views)["done"] == N == whole["done"]
    for name, x in arrays(tmp_path / "whole").items():
        np.testing.assert_array_equal(np.load(tmp_path / "parts" / f"{name}.npy"), x, err_msg=name)
    with pytest.raises(InferenceError, match="views was"):
        made(model, corpus, tmp_path / "parts", views=views + 1)


def test_the_command_names_what_is_wrong(trained, corpus, tmp_path, capsys):
    for arguments, text in (
        ([str(tmp_path / "none"), "--out", "x"], "none does not exist; expected a run's workdir"),
        (
            [str(trained), "--out", str(tmp_path / "x"), "--data", str(tmp_path / "nothing")],
            "does not exist",
        ),
        ([str(trained), "--out", str(tmp_path / "x"), "--columns", "audio"], "expected integers"),
    ):
        assert command.main(arguments) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main([str(trained), "--out", str(tmp_path / "x"), "--kinds", "max"])
    assert "'max' is unknown; expected one of: mean, cls, patches" in capsys.readouterr().err
    assert (
        command.main([str(trained), "--out", str(tmp_path / "out"), "--split", "test", "--ema"])
        == 0
    )
    assert "9 recordings (0 unreadable)" in capsys.readouterr().out


def test_another_front_end_is_refused_in_one_line(trained, corpus, tmp_path, capsys):
    """The refusal covers embed's data section, a config that contradicts itself, an export of it,
    and the folders of a probe."""
    model = encoder.load(str(trained))
    assert model.config.n_mels == 64 and model.config.front_end == spectrogram.FrontEnd(**FRONT_END)
    with pytest.raises(
        InferenceError, match="on other spectrograms than are asked for: n_mels 64 and 128, f_max"
    ):
        encoder.data_config(model, n_mels=128, f_max=8000.0)
    line = safetensors.export(
        str(trained), str(tmp_path / "export"), safetensors.Options(only="^encoder/")
    )
    assert "step 1" in line
    for name in ("jaxtrain.json", "config.json"):
        file = tmp_path / "export" / name
        file.write_text(file.read_text().replace('"hop_ms": 10.0', '"hop_ms": 5.0', 1))
    damage.seal(tmp_path / "export")
    assert (
        command.main(
            [str(tmp_path / "export"), "--out", str(tmp_path / "x"), "--data", str(corpus)]
        )
        == 2
    )
    assert (
        "sections model and data name different front ends: hop 160 and 80 samples"
        in capsys.readouterr().err
    )
    run = shutil.copytree(trained, tmp_path / "run")
    (run / "checkpoints" / "1" / "manifest.json").unlink()
    meta = run / "checkpoints" / "1" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"hop_ms": 10.0', '"hop_ms": 5.0', 1))
    assert (
        cli.main(["export", str(run), "--out", str(tmp_path / "y")]) == 2
        and not (tmp_path / "y").exists()
    )
    told = capsys.readouterr().err
    assert (
        "sections model and data name different front ends: hop " in told
        and told.count("error: ") == 1
    ), told
    for name in ("a", "b"):
        made(model, corpus, tmp_path / name)
    file = tmp_path / "b" / embed.ABOUT
    file.write_text(file.read_text().replace('"n_mels": 64', '"n_mels": 32'))
    folders = [
        "--train",
        str(tmp_path / "a"),
        "--test",
        str(tmp_path / "b"),
        "--out",
        str(tmp_path / "p"),
        "--draws",
        "2",
    ]
    assert probe.main(folders) == 2
    assert (
        "encoders with different front ends (n_mels 64 and 32); embed both with one run"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("source", ["run", "export"])
def test_a_start_from_an_encoder_of_another_front_end_is_refused(trained, corpus, tmp_path, source):
    """Its shapes are the same, so nothing else would report the difference. A user who intends it
    sets `other_front_end`."""
    if source == "export":
        safetensors.export(str(trained), str(tmp_path / "export"))
    warm = dict(
        source=str(trained if source == "run" else tmp_path / "export"),
        skip=("^(objective|probe)/",),
    )
    data = dict(
        train=str(corpus), n_frames=256, clip_seconds=2.5, threads=2, **{**FRONT_END, "mean": -5.0}
    )
    made = dict(
        workload="jaxtrain.workloads.bird",
        loader="loaders.audio.spectrogram",
        model=MODEL,
        data=data,
        mesh=dict(data=8),
        train=dict(steps=1, batch=8, eval_every=0),
    )
    config = config_lib.from_dict({**made, "warm_start": warm, "workdir": str(tmp_path / "new")})
    with pytest.raises(
        warm_start.WarmStartError,
        match="trained on other spectrograms than this run's: mean -6 and -5; set",
    ):
        init_or_restore._warm_start(assembly.assemble(config), config.warm_start)
    for change in (
        {"data": {**data, "mean": -6.0}},
        {"warm_start": {**warm, "other_front_end": True}},
    ):
        config = config_lib.from_dict(
            {**made, "warm_start": warm, "workdir": str(tmp_path / "new"), **change}
        )
        assert init_or_restore._warm_start(assembly.assemble(config), config.warm_start)[
            1
        ].keys() >= {"encoder/pos"}


BLOCKED = (
    "flax",
    "optax",
    "orbax",
    "tensorstore",
    "pyarrow",
    "etils",
    "ml_collections",
    "soundfile",
    "PIL",
)


def test_an_exported_encoder_needs_numpy_jax_and_the_front_end(trained, corpus, tmp_path):
    """The export's example, alone in a process with nothing else, prints the output of `jaxtrain
    embed`. Embed reads the export, too."""
    line = safetensors.export(
        str(trained), str(tmp_path / "export"), safetensors.Options(ema=True, only="^encoder/")
    )
    assert "ema of step 1" in line
    header = (tmp_path / "export" / "model.safetensors").read_bytes()
    assert (
        b"encoder.blocks.1.w_qkv" in header
        and b"probe" not in header
        and b"objective" not in header
    )
    made(encoder.load(str(trained), ema=True), corpus, tmp_path / "out")
    assert (
        encoder.load(str(tmp_path / "export")).digest == encoder.load(str(trained), ema=True).digest
    )
    (tmp_path / "bird.ogg").write_bytes(next(recordings(corpus))["audio"]["bytes"])
    program = (
        f"import sys, runpy\nfor n in {BLOCKED}: sys.modules[n] = None\nsys.argv = ['example.py',"
        " 'bird.ogg']\n"
    )
    program += "runpy.run_path('export/example.py', run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    values = np.array(done.stdout.split(), float)
    np.testing.assert_allclose(values, np.load(tmp_path / "out" / "mean.npy")[0], rtol=0, atol=1e-4)
    done = subprocess.run(
        [sys.executable, "export/example.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "usage: python export/example.py RECORDING"
    ), done.stderr
    example = (tmp_path / "export" / "example.py").read_text().splitlines()
    assert len([line for line in example[1:] if not line.startswith(("import", "from"))]) <= 10


def test_shards_next_to_each_other_have_a_training_split(corpus, tmp_path):
    """Without a folder train/ or test/, the command that such a run names as the next one takes all
    recordings."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, shard in enumerate(
        sorted(corpus.glob("train/*.arrow")) or sorted(corpus.rglob("*.arrow"))
    ):
        (flat / f"data-{i:05}.arrow").write_bytes(shard.read_bytes())
    data = encoder.of_split(spectrogram.Config(train=str(flat)), "train")
    assert not list(data.validate()) and spectrogram.dataset_info(data)["n_train"]
