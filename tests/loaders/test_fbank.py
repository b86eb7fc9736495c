"""The Rust front end against torchaudio's Kaldi fbank and its float64 formula
(tests/data/fbank)."""

import json
import pathlib

import numpy as np
import pytest

from loaders import _rust
from loaders.audio.front_end import FrontEnd
from loaders.audio.spectrogram import filter_bank

HERE = pathlib.Path(__file__).parents[1] / "data" / "fbank"
SHARED = pathlib.Path(__file__).parents[2] / ".." / "shared" / "golden" / "fbank"
TOLERANCES = json.loads((HERE / "tolerances.json").read_text())


def load(case: str) -> dict[str, np.ndarray]:
    # The recordings are not ours to copy into the repository.
    path = (SHARED if case.startswith("real_") else HERE) / f"{case}.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is only beside a checkout that has ../shared")
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("case", TOLERANCES)
def test_log_mel_is_kaldis(case):
    golden = load(case)
    reference = golden["reference"]
    got = _rust.fbank(golden["waveform"].astype(np.float32) / 32768)
    assert got.shape == reference.shape and got.dtype == np.float32
    off = np.abs(got - reference)
    # A float32 transform cannot resolve a band that is 70 dB below the loudest of its frame any
    # better.
    audible = reference >= reference.max(axis=1, keepdims=True) - np.log(1e7)
    tolerance = TOLERANCES[case]
    assert off.max() <= tolerance["max_abs"]
    assert off.mean() <= tolerance["mean_abs"]
    assert off[audible].max() <= tolerance["max_abs_within_70dB"]


@pytest.mark.parametrize("case", TOLERANCES)
def test_normalised_rows_are_padded_with_the_clips_minimum(case):
    golden = load(case)
    reference = golden["reference"].astype(np.float64)
    n = len(reference)
    expected = np.full((512, 128), reference.min())
    expected[:n] = reference
    got = _rust.fbank(golden["waveform"].astype(np.float32) / 32768, normalise=True)
    assert got.shape == (512, 128)
    np.testing.assert_allclose(
        got, (expected + 7.2) / 8.86, atol=TOLERANCES[case]["max_abs"] / 8.86 + 1e-6
    )
    assert (got[n:] == got[:n].min()).all()


@pytest.mark.parametrize("path", sorted(HERE.glob("choices/*.npz")), ids=lambda path: path.stem)
def test_other_front_ends_are_kaldis_too(path):
    """The numbers are torchaudio's (tests/data/fbank/choices/make.py), and agree within the
    smallest of the tolerances above."""
    golden = dict(np.load(path))
    front_end, reference = FrontEnd(**json.loads(str(golden["front_end"]))), golden["reference"]
    got = _rust.fbank(golden["waveform"].astype(np.float32) / 32768, bank=filter_bank(front_end))
    assert (
        got.shape
        == reference.shape
        == (front_end.n_clip_frames(len(golden["waveform"])), front_end.n_mels)
    )
    off = np.abs(got - reference)
    audible = reference >= reference.max(axis=1, keepdims=True) - np.log(1e7)
    assert off.max() <= 5e-3 and off.mean() <= 2e-5 and off[audible].max() <= 2e-3


def test_mean_and_deviation_are_those_of_the_front_end():
    wave = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    plain = _rust.fbank(wave)
    got = _rust.fbank(wave, bank=filter_bank(FrontEnd(mean=-4.0, std=2.5)), normalise=True)[
        : len(plain)
    ]
    np.testing.assert_allclose(got, (plain + 4) / 5, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "bad, said",
    [
        (dict(sample_rate=900), "sample_rate is 900; it must lie in [1000, 768000]"),
        (dict(window_ms=0.1), "window_ms is 0.1; at 32000 Hz it must lie in [0.5, 1024]"),
        (dict(hop_ms=0.0), "hop_ms is 0.0; at 32000 Hz it must lie in [0.03125,"),
        (dict(n_mels=0), "n_mels is 0; it must lie in [1, 4096]"),
        (
            dict(f_max=20_000.0),
            "f_max is 20000.0; it must lie in [0, 16000], where 0 is half of sample_rate=32000",
        ),
        (dict(f_min=4000.0, f_max=3000.0), "f_min is 4000.0; it must lie in [0, 3000)"),
        (dict(mean=float("inf")), "mean is inf"),
        (dict(std=0.0), "std is 0.0; it must be a positive number"),
    ],
)
def test_front_ends_that_are_invalid_are_reported(bad, said):
    assert any(f"{name} {text}".startswith(said) for name, text in FrontEnd(**bad).validate())
    if "f_min" not in bad and "f_max" not in bad:  # whose message names both
        with pytest.raises(ValueError, match=said.split("_ms")[0].split()[0]):
            filter_bank(FrontEnd(**bad))


def test_only_whole_windows_count():
    wave = np.random.default_rng(0).standard_normal(800 + 2 * 320).astype(np.float32)
    assert [len(_rust.fbank(wave[:n])) for n in (800, 1119, 1120, 1440)] == [1, 1, 2, 3]
    np.testing.assert_array_equal(_rust.fbank(wave[:1119]), _rust.fbank(wave)[:1])


def test_a_clip_without_a_whole_window_is_an_error():
    with pytest.raises(ValueError, match="799 samples make 0 frames"):
        _rust.fbank(np.ones(799, np.float32))
