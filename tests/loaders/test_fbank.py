"""The Rust front end against torchaudio's Kaldi fbank and its float64 formula (tests/data/fbank)."""

import json
import pathlib

import numpy as np
import pytest

from loaders import _rust

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
    # A float32 transform cannot see a band that is 70 dB below the loudest of its frame any better.
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
    np.testing.assert_allclose(got, (expected + 7.2) / 8.86, atol=TOLERANCES[case]["max_abs"] / 8.86 + 1e-6)
    assert (got[n:] == got[:n].min()).all()


def test_only_whole_windows_count():
    wave = np.random.default_rng(0).standard_normal(800 + 2 * 320).astype(np.float32)
    assert [len(_rust.fbank(wave[:n])) for n in (800, 1119, 1120, 1440)] == [1, 1, 2, 3]
    np.testing.assert_array_equal(_rust.fbank(wave[:1119]), _rust.fbank(wave)[:1])


def test_a_clip_without_a_whole_window_is_an_error():
    with pytest.raises(ValueError, match="799 samples make 0 frames"):
        _rust.fbank(np.ones(799, np.float32))
