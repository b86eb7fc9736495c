"""The front end alone, backgrounds, and recordings of several classes."""

import json

import numpy as np
import pyarrow as pa
import pytest

from loaders import _rust
from loaders.audio import spectrogram
from loaders.base import DataError, Rows
from tests.support import corpus

QUICK = {"label": "label", "clip_seconds": 0.2, "n_frames": 18, "threads": 2}


def loader(config, split="train", batch=8, seed=0, **options):
    return spectrogram.make_loader(
        config, split=split, rows=Rows(batch, ((0, batch),)), seed=seed, **options
    )


def one_batch(*args, **options):
    made = loader(*args, **options)
    position, batch = next(made)
    made.close()
    assert position == 1
    return {name: parts[0] for name, parts in batch.items()}


def lists(encoded, labels, names=("a", "b", "c"), kind="Sequence"):
    """A table whose labels are lists, as ``datasets`` 3 ("Sequence") and 4 ("List") write them."""
    feature = {"names": list(names), "_type": "ClassLabel"}
    features = {"audio": {"_type": "Audio"}, "label": {"feature": feature, "_type": kind}}
    audio = [{"bytes": data, "path": f"{i}.wav"} for i, data in enumerate(encoded)]
    schema = pa.schema({"audio": corpus.AUDIO, "label": pa.list_(pa.int64())})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if names else None
    return pa.table(
        [pa.array(audio, corpus.AUDIO), pa.array(labels, pa.list_(pa.int64()))],
        schema=schema.with_metadata(metadata),
    )


@pytest.mark.parametrize("seconds", [0.11, 0.2, 0.37])
@pytest.mark.parametrize("rate", [8_000, 22_050, 32_000, 44_100])
def test_the_front_end_gives_the_bytes_of_a_test_split(tmp_path, seconds, rate):
    """Recordings are shorter than the clip, as long, and longer, resampled or not."""
    waves = [corpus.noise(i, seconds, rate) for i in range(3)]
    encoded = [corpus.encode(wave, rate, "WAV", "FLOAT") for wave in waves]
    corpus.save_to_disk(tmp_path / "d", [corpus.table(encoded, [0, 1, 0])])
    config = spectrogram.Config(train=str(tmp_path / "d"), test_share=0.0, **QUICK)
    rows = one_batch(config, batch=3, in_order=True)["spectrogram"]
    for wave, row in zip(waves, rows, strict=True):
        found = spectrogram.front_end(wave, rate, clip_seconds=0.2, n_frames=18)
        assert found.dtype == np.float32 and found.shape == (18, 128)
        np.testing.assert_array_equal(found.view("u4"), row.view("u4"))
    decoded, source_rate, frames = spectrogram.decode(encoded[0])
    np.testing.assert_array_equal(decoded, waves[0])
    assert (source_rate, frames) == (rate, len(waves[0]))


def test_the_front_end_refuses_what_makes_no_spectrogram():
    wave = np.zeros(32_000, np.float32)
    np.testing.assert_array_equal(
        spectrogram.front_end(wave), _rust.fbank(np.zeros(160_000, np.float32), normalise=True)
    )
    for bad, match in (
        (dict(rate=0), "rate = 0 Hz must lie in 1000"),
        (dict(clip_seconds=9.0), "a clip of 288000 samples makes 898 frames; expected 1 to 512"),
        (dict(clip_seconds=0.01), "a clip of 320 samples makes 0 frames; expected 1 to 512"),
    ):
        with pytest.raises(ValueError, match=match):
            spectrogram.front_end(wave, **{"rate": 32_000, **bad})
    with pytest.raises(ValueError, match="NaN or too large"):
        spectrogram.front_end(np.full(32_000, np.nan, np.float32))


def test_a_training_split_in_order_is_read_as_a_test_split(tmp_path):
    corpus.save_to_disk(
        tmp_path / "d", [corpus.table([corpus.wav(i, 0.3) for i in range(5)], [0, 1, 0, 1, 0])]
    )
    config = spectrogram.Config(train=str(tmp_path / "d"), test=str(tmp_path / "d"), **QUICK)
    a, b = one_batch(config, "train", 4, in_order=True), one_batch(config, "test", 4)
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
    made = loader(config, batch=4, in_order=True)
    assert [batch["index"][0].tolist() for _, batch in made] == [[0, 1, 2, 3], [4, -1, -1, -1]]
    made.close()


@pytest.mark.parametrize("kind", ["Sequence", "List"])
def test_recordings_of_several_classes(tmp_path, kind):
    encoded = [corpus.wav(i, 0.25) for i in range(6)]
    labels = [[0], [], [2, 1], None, [1], [0, 1, 2]]
    half = [lists(encoded[i : i + 3], labels[i : i + 3], kind=kind) for i in (0, 3)]
    corpus.save_to_disk(tmp_path / "d", half)
    config = spectrogram.Config(train=str(tmp_path / "d"), multilabel=True, test_share=0.0, **QUICK)
    info = spectrogram.dataset_info(config)
    assert (
        info["multilabel"] and info["class_names"] == ("a", "b", "c") and info["n_unlabelled"] == 0
    )
    assert spectrogram.element_spec(config)["labels"] == (
        (3,),
        np.uint8,
    ) and "label" not in spectrogram.element_spec(config)
    batch = one_batch(config, in_order=True)
    expected = [
        [1, 0, 0],
        [0, 0, 0],
        [0, 1, 1],
        [0, 0, 0],
        [0, 1, 0],
        [1, 1, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert (
        batch["labels"].tolist() == expected
        and batch["labels"].dtype == np.uint8
        and "label" not in batch
    )
    drawn = one_batch(config, batch=6)
    assert drawn["labels"].tolist() == [expected[i] for i in drawn["index"]]


def test_values_that_should_be_lists_are_named(tmp_path):
    corpus.save_to_disk(tmp_path / "lists", [lists([corpus.wav(0, 0.25)], [[0]])])
    with pytest.raises(DataError, match="multilabel=true"):
        spectrogram.dataset_info(spectrogram.Config(train=str(tmp_path / "lists"), **QUICK))
    corpus.save_to_disk(tmp_path / "plain", [corpus.table([corpus.wav(0, 0.25)], [0])])
    with pytest.raises(DataError, match="needs lists"):
        spectrogram.dataset_info(
            spectrogram.Config(train=str(tmp_path / "plain"), multilabel=True, **QUICK)
        )
    corpus.save_to_disk(tmp_path / "nameless", [lists([corpus.wav(0, 0.25)], [[0]], names=())])
    with pytest.raises(DataError, match="names no classes"):
        spectrogram.dataset_info(
            spectrogram.Config(train=str(tmp_path / "nameless"), multilabel=True, **QUICK)
        )
    corpus.save_to_disk(tmp_path / "large", [lists([corpus.wav(0, 0.25)], [[3]])])
    with pytest.raises(DataError, match="has classes 3 to 3"):
        spectrogram.dataset_info(
            spectrogram.Config(train=str(tmp_path / "large"), multilabel=True, **QUICK)
        )


def test_a_background_comes_in_an_order_of_its_own(tmp_path):
    """The background is a function of the position alone. It has other recordings, with as many
    views. In testing nothing is drawn at random."""
    corpus.save_to_disk(
        tmp_path / "birds",
        [corpus.table([corpus.wav(i, 0.25) for i in range(10)], [i % 2 for i in range(10)])],
    )
    corpus.save_to_disk(
        tmp_path / "noise",
        [corpus.table([corpus.wav(100 + i, 0.25) for i in range(4)], [None] * 4, None)],
    )
    paths = dict(train=str(tmp_path / "birds"), test_share=0.2)
    plain = spectrogram.Config(**paths, views=2, **QUICK)
    config = spectrogram.Config(**paths, background=str(tmp_path / "noise"), views=2, **QUICK)
    assert (
        spectrogram.dataset_info(config)["background"]
        and not spectrogram.dataset_info(plain)["background"]
    )
    assert (
        spectrogram.element_spec(config)["background"]
        == spectrogram.element_spec(config)["spectrogram"]
    )
    batch, without = one_batch(config), one_batch(plain)
    assert batch["background"].shape == batch["spectrogram"].shape == (8, 2, 18, 128)
    np.testing.assert_array_equal(batch["spectrogram"], without["spectrogram"])
    made = loader(config)
    made.seek(2)
    first = next(made)[1]["background"][0]
    made.seek(2)
    np.testing.assert_array_equal(next(made)[1]["background"][0], first)
    assert (first != batch["background"]).any() and "background" in made.state(0)["order"]
    made.close()
    # Each of the four backgrounds appears twice in eight rows, and none is a bird.
    centres = one_batch(
        spectrogram.Config(train=str(tmp_path / "noise"), test_share=0.0, **QUICK),
        batch=4,
        in_order=True,
    )
    near = [
        np.abs(row[0] - centres["spectrogram"]).mean((1, 2)).argmin() for row in batch["background"]
    ]
    assert len(set(near)) >= 3
    test = one_batch(config, "test", 2)
    np.testing.assert_array_equal(test["background"], test["spectrogram"])
    assert dict(spectrogram.Config(train="demo", background=str(tmp_path / "none")).validate())[
        "background"
    ]
