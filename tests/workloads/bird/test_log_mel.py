"""Spectrograms made on the device: Kaldi's numbers, the loader's numbers, on any mesh, and a whole
run that reads waveforms."""

import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.run import loop
from jaxtrain.workloads.bird import log_mel
from jaxtrain.workloads.bird import model as bird
from loaders import _rust
from loaders.audio import spectrogram
from loaders.audio.front_end import FrontEnd
from loaders.base import Rows
from tests.support import corpus
from tests.support.cases import initial

HERE = pathlib.Path(__file__).parents[2] / "data" / "fbank"
SHARED = pathlib.Path(__file__).parents[3] / ".." / "shared" / "golden" / "fbank"
TOLERANCES = json.loads((HERE / "tolerances.json").read_text())
made = jax.jit(log_mel.spectrogram, static_argnums=(1, 2))
NAMES = dict(workload="jaxtrain.workloads.bird", loader="loaders.audio.spectrogram")


def load(case):
    path = (SHARED if case.startswith("real_") else HERE) / f"{case}.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is only beside a checkout that has ../shared")
    with np.load(path) as file:
        return file["waveform"], file["reference"]


@pytest.mark.parametrize("case", TOLERANCES)
def test_it_is_kaldis_filter_bank_and_the_loaders(case):
    """The result is within the tolerances of the loader's filter bank, both to Kaldi's reference
    and to the loader's rows."""
    wave, reference = load(case)
    assert wave.dtype == np.int16
    off = np.abs(np.asarray(jax.jit(log_mel.log_mel)(wave[None]))[0] - reference)
    audible = reference >= reference.max(axis=1, keepdims=True) - np.log(1e7)
    tolerance = TOLERANCES[case]
    assert off.max() <= tolerance["max_abs"] and off.mean() <= tolerance["mean_abs"]
    assert off[audible].max() <= tolerance["max_abs_within_70dB"]
    rows = _rust.fbank(wave.astype(np.float32) / 32768, normalise=True)
    found = np.asarray(made(wave[None], 512)[0])
    assert found.shape == (512, 128) and found.dtype == np.float32
    off = np.abs(found - rows) * 8.86
    assert (
        off.max() <= tolerance["max_abs"] and off[: len(reference)].mean() <= tolerance["mean_abs"]
    )


@pytest.mark.parametrize("path", sorted(HERE.glob("choices/*.npz")), ids=lambda path: path.stem)
def test_other_front_ends_are_torchaudios(path):
    golden = dict(np.load(path))
    front_end, reference = FrontEnd(**json.loads(str(golden["front_end"]))), golden["reference"]
    off = np.abs(
        np.asarray(jax.jit(log_mel.log_mel, static_argnums=1)(golden["waveform"][None], front_end))[
            0
        ]
        - reference
    )
    audible = reference >= reference.max(axis=1, keepdims=True) - np.log(1e7)
    assert off.max() <= 5e-3 and off.mean() <= 2e-5 and off[audible].max() <= 2e-3
    n = len(reference) + 3
    row = np.asarray(made(golden["waveform"][None], n, front_end))[0]
    rows = spectrogram.front_end(
        golden["waveform"].astype("f4") / 32768,
        front_end.sample_rate,
        n_frames=n,
        of=front_end,
        clip_seconds=golden["waveform"].size / front_end.sample_rate,
    )
    np.testing.assert_allclose(row, rows, atol=5e-3 / 8.86)


def test_views_lengths_and_frames_that_are_left_out():
    wave = np.random.default_rng(0).integers(
        -9000, 9000, (2, 3, 800 + 6 * 320 + 17), dtype=np.int16
    )
    whole = np.asarray(made(wave, 9))
    assert whole.shape == (2, 3, 9, 128)
    each = np.stack(
        [_rust.front_end(w / np.float32(32768), 32_000, w.size, 9) for w in wave.reshape(6, -1)]
    )
    np.testing.assert_allclose(whole.reshape(6, 9, 128), each, atol=5e-4)
    assert (whole[0, 0, 7:] == whole[0, 0, :7].min()).all()
    np.testing.assert_allclose(made(wave, 4), whole[:, :, :4], atol=1e-6)


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 2)])
def test_rows_stay_on_their_device(sizes):
    """Split over devices, the numbers equal those of one device, and nothing is communicated."""
    layout = make_layout(make_mesh(*sizes, devices=jax.devices()[: math.prod(sizes)]), {})
    wave = np.random.default_rng(0).integers(-9000, 9000, (8, 2, 4000), dtype=np.int16)
    split = layout.sharding(("batch", None, None), wave.shape)
    compiled = (
        jax.jit(lambda x: log_mel.split(x, 12, layout.shard), in_shardings=split)
        .lower(wave)
        .compile()
    )
    assert "all-" not in compiled.as_text()
    np.testing.assert_allclose(compiled(jax.device_put(wave, split)), made(wave, 12), atol=1e-4)


def test_a_run_on_waveforms_has_the_loss_of_spectrograms(tmp_path):
    """Recordings of 16 bits at 32 kHz, which lose nothing on the way: views, a background, an
    evaluation, pictures."""
    for name, n in (("birds", 12), ("noise", 4)):
        encoded = [corpus.wav(i + 100 * n, 0.2) for i in range(n)]
        corpus.save_to_disk(tmp_path / name, [corpus.table(encoded, [i % 2 for i in range(n)])])
    tree = dict(
        **NAMES,
        model=dict(
            embed=16,
            depth=1,
            heads=2,
            patch=(8, 32),
            dtype="float32",
            n_frames=16,
            augment=dict(background=0.5, gain=0.1),
        ),
        data=dict(
            train=str(tmp_path / "birds"),
            background=str(tmp_path / "noise"),
            label="label",
            test_share=0.3,
            views=2,
            clip_seconds=0.1,
            n_frames=16,
            threads=2,
        ),
        train=dict(steps=2, batch=8),
        optim=dict(lr=1e-2, warmup=0, schedule="constant"),
        metrics=dict(every=1),
        compiler=dict(xla_backend_optimization_level=0),
    )
    waves, rows = (
        config_lib.from_dict(
            {**tree, "data": {**tree["data"], "form": form}, "workdir": str(tmp_path / "run")}
        )
        for form in ("waveform", "spectrogram")
    )
    assert (waves.model.form, rows.model.form) == ("waveform", "spectrogram")
    last = loop.run(waves).evaluation
    assert math.isfinite(last["objective_loss"]) and list((tmp_path / "run" / "pictures").iterdir())
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    first = next(line for line in lines if line["split"] == "train")

    layout = make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    task = bird.make_task(rows, layout.shard, 8)
    loader = spectrogram.make_loader(
        rows.data, split="train", rows=Rows(8, ((0, 8),)), seed=rows.seed
    )
    batch = {name: np.asarray(parts[0]) for name, parts in next(loader)[1].items()}
    loader.close()
    variables = initial(task.specs, rows.seed)
    run = jax.jit(task.loss, compiler_options={"xla_backend_optimization_level": 0})
    out = run(variables, {**batch, "row": np.arange(8, dtype="i4")}, jax.random.key(0))
    assert first["loss"] == pytest.approx(float(out.loss.total / out.loss.weight), rel=1e-3)
    probe = out.metrics["probe_loss"]
    assert first["probe_loss"] == pytest.approx(float(probe.total / probe.weight), rel=1e-3)


def test_a_form_that_does_not_go_together_is_refused(tmp_path):
    corpus.save_to_disk(
        tmp_path / "birds", [corpus.table([corpus.wav(i, 0.2) for i in range(4)], [0, 1, 0, 1])]
    )
    data = dict(train=str(tmp_path / "birds"), label="label")
    for changes, said in (
        (
            dict(data=dict(form="wave")),
            "config.data.form is 'wave'; expected one of: spectrogram, waveform",
        ),
        (
            dict(data=dict(form="waveform", dtype="bfloat16")),
            "config.data.dtype is 'bfloat16', which a spectrogram may have",
        ),
        (
            dict(model=dict(form="waveform")),
            "config.model.form is waveform, and the data have spectrogram; omit it",
        ),
        (
            dict(model=dict(views=2)),
            "config.model.views is 2, and the data have 1; omit it",
        ),
    ):
        tree = {
            **NAMES,
            "data": {**data, **changes.get("data", {})},
            "model": changes.get("model", {}),
            "workdir": str(tmp_path / "x"),
        }
        with pytest.raises(config_lib.ConfigError, match=re.escape(said)):
            config_lib.from_dict(tree)
