"""The built-in corpus: its content, that it is the same each time, and that it is made once and
complete."""

import collections
import io
import json
import logging
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from loaders import base
from loaders.audio import demo, demo_birds, demo_outline, spectrogram
from loaders.io import machine

ROOT = pathlib.Path(__file__).parents[2]
N_TRAIN, N_TEST = 12, 12
MAKER = f"""
import logging, pathlib, sys
from loaders.audio import demo
logging.basicConfig(level=logging.INFO)
print(demo.ensure(pathlib.Path(sys.argv[1]), n_train={N_TRAIN}, n_test={N_TEST}))
"""


def start_maker(cache: pathlib.Path) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, cache], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )


def contents(corpus: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(corpus)): path.read_bytes()
        for path in sorted(corpus.rglob("*"))
        if path.is_file()
    }


def rows(corpus: pathlib.Path, split: str) -> list[dict]:
    state = json.loads((corpus / split / "state.json").read_text())
    shards = [(corpus / split / entry["filename"]).read_bytes() for entry in state["_data_files"]]
    return [row for shard in shards for row in pa.ipc.open_stream(shard).read_all().to_pylist()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return demo.ensure(tmp_path_factory.mktemp("cache"), n_train=N_TRAIN, n_test=N_TEST)


def test_layout_is_what_datasets_writes(corpus):
    assert json.loads((corpus / "dataset_dict.json").read_text()) == {"splits": ["train", "test"]}
    for split, n in (("train", N_TRAIN), ("test", N_TEST)):
        shards = sorted(path.name for path in (corpus / split).glob("*.arrow"))
        assert shards == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        state = json.loads((corpus / split / "state.json").read_text())
        assert [entry["filename"] for entry in state["_data_files"]] == shards and len(
            state["_fingerprint"]
        ) == 16
        info = json.loads((corpus / split / "dataset_info.json").read_text())
        for shard in shards:
            schema = pa.ipc.open_stream((corpus / split / shard).read_bytes()).schema
            assert schema.names == ["audio", "ebird_code"]
            assert schema.field("audio").type == pa.struct(
                [("bytes", pa.binary()), ("path", pa.string())]
            )
            assert schema.field("ebird_code").type == pa.int64()
            assert json.loads(schema.metadata[b"huggingface"]) == {
                "info": {"features": info["features"]}
            }
        assert info["features"]["audio"] == {"_type": "Audio"}
        assert info["features"]["ebird_code"]["_type"] == "ClassLabel"
        assert len(set(info["features"]["ebird_code"]["names"])) == len(demo_birds.SPECIES) >= 12
        assert len(rows(corpus, split)) == n


def test_every_species_in_both_splits_and_no_recording_in_both(corpus):
    train, test = rows(corpus, "train"), rows(corpus, "test")
    for split in (train, test):
        assert {row["ebird_code"] for row in split} == set(range(len(demo_birds.SPECIES)))
    for key in ("path", "bytes"):
        assert len({row["audio"][key] for row in train + test}) == N_TRAIN + N_TEST


def test_every_codec_decodes(corpus, tmp_path):
    expected = {
        "ogg": ("OGG", "VORBIS", 32000, 1),
        "mp3": ("MP3", "MPEG_LAYER_III", 44100, 2),
        "flac": ("FLAC", "PCM_16", 48000, 1),
        "wav": ("WAV", "PCM_16", 22050, 1),
    }
    seen = set()
    for row in rows(corpus, "train") + rows(corpus, "test"):
        path = row["audio"]["path"]
        rec = demo_birds.recording(int(path.partition("-")[0]))
        # libsndfile 1.2.2 sometimes reads nothing from MP3 in memory
        (tmp_path / path).write_bytes(row["audio"]["bytes"])
        with soundfile.SoundFile(tmp_path / path) as sound:
            suffix = path.rpartition(".")[2]
            assert (sound.format, sound.subtype, sound.samplerate, sound.channels) == expected[
                suffix
            ]
            samples = sound.read(dtype="float32")
        assert (path, row["ebird_code"]) == (rec.path, rec.label)
        assert len(samples) == round(rec.seconds * rec.codec.rate) and 3 <= rec.seconds <= 60
        assert 0.05 < np.abs(samples).max() < 1  # audible, and never clipped
        seen.add(suffix)
    assert seen == set(expected)


def test_encoded_sound_is_the_waveform(corpus):
    """Only lossless files can show this to the last bit. The recipe's number determines the
    waveform."""
    lossless = [
        row for row in rows(corpus, "train") if row["audio"]["path"].endswith(("flac", "wav"))
    ][:3]
    for row in lossless:
        samples, _ = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
        rec = demo_birds.recording(int(row["audio"]["path"].partition("-")[0]))
        np.testing.assert_allclose(samples, demo_birds.waveform(rec)[:, 0], atol=1.01 / 32768)


def test_full_corpus_is_balanced_small_and_free_of_codec_hints():
    recs = [demo_birds.recording(number) for number in range(demo.N_TRAIN + demo.N_TEST)]
    for split, n in ((recs[: demo.N_TRAIN], demo.N_TRAIN), (recs[demo.N_TRAIN :], demo.N_TEST)):
        assert set(collections.Counter(rec.label for rec in split).values()) == {
            n // len(demo_birds.SPECIES)
        }
        assert len({(rec.label, rec.codec) for rec in split}) == len(demo_birds.SPECIES) * 4
    assert sum(rec.seconds * rec.codec.kb_per_s for rec in recs) < 80_000  # kB
    seconds = [rec.seconds for rec in recs]
    assert min(seconds) == 3 and 30 < max(seconds) <= 60 and np.median(seconds) < np.mean(seconds)


def test_the_outline_of_the_corpus_agrees_with_the_corpus(corpus, monkeypatch):
    """The outline lets a run be checked before a minute is spent on making the corpus."""
    monkeypatch.setattr(demo, "N_TRAIN", N_TRAIN)
    monkeypatch.setattr(demo, "N_TEST", N_TEST)
    with demo_outline._birds.__wrapped__() as folder:
        info = [
            spectrogram.dataset_info(spectrogram.Config(train=str(path)))
            for path in (corpus, folder)
        ]
    assert info[0] == info[1] and info[0]["n_train"] == N_TRAIN


@pytest.mark.parametrize("config", ["xcm", "giblet"])
def test_nothing_is_made_for_a_run_that_is_refused(config, monkeypatch, tmp_path):
    """Neither the birds nor the film are made if the mesh does not fit the devices."""
    from jaxtrain import config as config_lib
    from jaxtrain.parallel import layout
    from jaxtrain.run import loop

    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    for name in ("JAXTRAIN_XCM", "JAXTRAIN_GIBLET"):
        monkeypatch.delenv(name, raising=False)
    given = {
        "mesh.data": "1",
        "mesh.fsdp": "3",
        "train.batch": "33",
        "workdir": str(tmp_path / "run"),
    }
    run = config_lib.load(config, given.items())
    assert run.model.n_classes == 12 if config == "xcm" else run.model.n_voxels == 2000, (
        "the info is there all the same"
    )
    with pytest.raises(layout.LayoutError, match="3"):
        loop.run(run)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("species", demo_birds.SPECIES, ids=lambda species: species.name)
def test_sings_throughout(species):
    rate = 22050
    for seed in range(5):
        song = demo_birds.sing(species, 20 * rate, rate, np.random.default_rng(seed))
        sounds = np.concatenate([[-1], np.flatnonzero(song), [len(song)]])
        assert np.diff(sounds).max() < 2 * rate
        assert 0.3 < np.abs(song).max() < 2 and np.isfinite(song).all()


def test_ogg_serial_keeps_sound_and_checksums():
    file = io.BytesIO()
    sound = np.random.default_rng(0).normal(0, 0.1, 40_000)
    soundfile.write(file, sound, 32000, format="OGG", subtype="VORBIS")
    written = file.getvalue()
    assert demo_birds._with_serial(written, int.from_bytes(written[14:18], "little")) == written
    other = demo_birds._with_serial(written, 7)
    assert other[14:18] == b"\7\0\0\0" and other != written
    a, b = (soundfile.read(io.BytesIO(data))[0] for data in (written, other))
    np.testing.assert_array_equal(a, b)


def test_two_processes_make_it_once_with_the_same_bytes(corpus, tmp_path):
    makers = [start_maker(tmp_path) for _ in range(2)]
    outs, errs = zip(*(maker.communicate(timeout=120) for maker in makers), strict=True)
    assert [maker.returncode for maker in makers] == [0, 0], errs
    assert sum(err.count("making the demo corpus") for err in errs) == 1
    made = pathlib.Path(outs[0].strip())
    assert outs[0] == outs[1] and made.name == corpus.name
    assert contents(made) == contents(corpus)
    assert {path.name for path in tmp_path.iterdir()} == {made.name, "birds.lock"}


def test_a_killed_maker_leaves_nothing_that_counts(corpus, tmp_path):
    maker = start_maker(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.tmp-*/train/*.arrow")):
        assert maker.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert not (tmp_path / corpus.name).exists() and list(tmp_path.glob("*.tmp-*"))
    made = demo.ensure(tmp_path, n_train=N_TRAIN, n_test=N_TEST)
    assert contents(made) == contents(corpus)
    assert {path.name for path in tmp_path.iterdir()} == {made.name, "birds.lock"}


def test_the_corpus_is_made_once_and_reported_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="jaxtrain"):
        made = demo.ensure(tmp_path, n_train=2, n_test=1)
        stamp = (made / "dataset_dict.json").stat().st_mtime_ns
        assert demo.ensure(tmp_path, n_train=2, n_test=1) == made
    assert (made / "dataset_dict.json").stat().st_mtime_ns == stamp
    (line,) = caplog.messages
    assert str(made) in line and "3 recordings" in line and " MB" in line
    assert [len(rows(made, split)) for split in ("train", "test")] == [2, 1]


def test_a_failed_maker_leaves_nothing(tmp_path, monkeypatch):
    def fail(rec, samples):
        raise RuntimeError("no encoder")

    monkeypatch.setattr(demo_birds, "encode", fail)
    with pytest.raises(RuntimeError, match="no encoder"):
        demo.ensure(tmp_path, n_train=2, n_test=1)
    assert [path.name for path in tmp_path.iterdir()] == ["birds.lock"]


def test_a_changed_recipe_is_another_folder(tmp_path, monkeypatch):
    made = demo.ensure(tmp_path, n_train=1, n_test=1)
    assert demo.ensure(tmp_path, n_train=1, n_test=2) != made
    monkeypatch.setattr(demo, "_recipe_hash", lambda: "another")
    assert demo.ensure(tmp_path, n_train=1, n_test=1) != made


def test_the_corpus_is_kept_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("JAXTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert machine.cache_folder() == pathlib.Path("/h/.cache/jaxtrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert machine.cache_folder("a", "b") == pathlib.Path("/x/jaxtrain/a/b")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    assert demo.ensure(n_train=1, n_test=1).parent == tmp_path


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(base.DataError, match=f"{tmp_path}/file.*JAXTRAIN_CACHE"):
        demo.ensure(tmp_path / "file" / "cache", n_train=1, n_test=1)


@pytest.mark.slow
def test_learnable_but_not_trivial():
    """Linear in each band's mean and deviation: no view of order or tempo, so far from chance and
    far from perfect."""

    def moments(number: int) -> tuple[np.ndarray, int]:
        rec = demo_birds.recording(number)
        rate, sound = rec.codec.rate, demo_birds.waveform(rec).mean(axis=1)
        start = max(len(sound) - 5 * rate, 0) // 2
        frame = rate // 40
        frames = np.lib.stride_tricks.sliding_window_view(sound[start : start + 5 * rate], frame)[
            :: rate // 100
        ]
        power_tk = np.abs(np.fft.rfft(frames * np.hanning(frame).astype(np.float32))) ** 2 / frame
        edges = 1127 * np.log1p(np.array([200, 10_500]) / 700)
        edges = 700 * np.expm1(np.linspace(*edges, 66) / 1127)
        bin_k = np.fft.rfftfreq(frame, 1 / rate)
        rise = (bin_k - edges[:-2, None]) / np.diff(edges)[:-1, None]
        fall = (edges[2:, None] - bin_k) / np.diff(edges)[1:, None]
        mel_tm = np.log(
            power_tk @ np.clip(np.minimum(rise, fall), 0, None).T.astype(np.float32) + 1e-7
        )
        return np.concatenate([mel_tm.mean(axis=0), mel_tm.std(axis=0)]), rec.label

    n = demo.N_TRAIN
    features, labels = map(np.array, zip(*map(moments, range(n + demo.N_TEST)), strict=True))
    features = (features - features[:n].mean(axis=0)) / features[:n].std(axis=0)
    one_hot = np.eye(len(demo_birds.SPECIES))[labels]

    means = (one_hot[:n].T @ features[:n]) / one_hot[:n].sum(axis=0)[:, None]
    nearest = np.square(features[:, None] - means).sum(axis=-1).argmin(axis=1)
    weights, velocity = np.zeros((features.shape[1], len(demo_birds.SPECIES))), 0.0
    for _ in range(1000):
        scores = np.exp(features[:n] @ weights)
        error = scores / scores.sum(axis=1, keepdims=True) - one_hot[:n]
        velocity = 0.9 * velocity + features[:n].T @ error / n + 1e-2 * weights
        weights -= 0.02 * velocity
    linear = (features @ weights).argmax(axis=1)

    nearest, linear = ((guess == labels)[n:].mean() for guess in (nearest, linear))
    print(
        f"linear {linear:.3f}, nearest mean {nearest:.3f}, chance {1 / len(demo_birds.SPECIES):.3f}"
    )
    assert 0.5 < linear < 0.95 and nearest < linear
