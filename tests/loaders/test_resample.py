"""The Rust resampler is compared with sums of sines in closed form and with libsoxr's best quality
(tests/data/resample)."""

import json
import pathlib

import numpy as np
import pytest

from loaders import _rust

HERE = pathlib.Path(__file__).parents[1] / "data" / "resample"
CASES = json.loads((HERE / "tolerances.json").read_text())
RATES = [8000, 11025, 16000, 22050, 24000, 31999, 44100, 48000, 88200, 96000, 192000]


@pytest.fixture(params=CASES)
def case(request):
    facts = CASES[request.param]
    with np.load(HERE / f"{request.param}.npz") as file:
        data = dict(file)
    rate = int(request.param.split("_")[0])

    def convert(name):
        return _rust.resample(data[name].astype(np.float32) / 32768, rate, 32000)

    return facts, data, convert


def test_tones_pass_unchanged_and_on_time(case):
    facts, data, convert = case
    got = convert("multitone_in")
    assert len(got) == facts["expected_length"] and got.dtype == np.float32
    phase = (
        2 * np.pi * np.outer(np.arange(len(got)) / 32000, data["tone_freq_hz"]) + data["tone_phase"]
    )
    start, stop = facts["multitone_compare"]
    off = np.abs(got - np.sin(phase) @ data["tone_amp"])[start:stop]
    # The input's own rounding to int16 is 2e-5 of this.
    assert off.max() <= 1e-4 <= facts["tolerance"]["multitone_vs_analytic_max"]


def test_a_sweep_equals_soxrs(case):
    facts, data, convert = case
    start, stop = facts["sweep_compare"]
    off = np.abs(convert("sweep_in") - data["sweep_out"])[start:stop]
    assert off.max() <= facts["tolerance"]["sweep_vs_out_max"]


def test_tones_above_the_output_band_vanish(case):
    facts, _, convert = case
    if "alias_compare" not in facts:
        pytest.skip("nothing lies above the output band")
    start, stop = facts["alias_compare"]
    rms = np.sqrt(np.mean(convert("alias_in")[start:stop].astype(np.float64) ** 2))
    assert rms <= facts["tolerance"]["alias_out_rms"]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("target", [32000, 16000])
def test_length_is_exact(rate, target):
    for n in [0, 1, 2, 999, 1000, 1001, 12345]:
        assert len(_rust.resample(np.zeros(n, np.float32), rate, target)) == (
            2 * n * target + rate
        ) // (2 * rate)


@pytest.mark.parametrize("rate", RATES)
def test_every_rate_keeps_constants_and_time(rate):
    # A slow bump: its peak shows a delay of a hundredth of a sample, its plateau the gain.
    n = rate // 4
    t = np.arange(n) / rate
    wave = np.exp(-0.5 * ((t - 0.125) / 0.004) ** 2)
    got = _rust.resample(wave.astype(np.float32), rate, 32000)
    expected = np.exp(-0.5 * ((np.arange(len(got)) / 32000 - 0.125) / 0.004) ** 2)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    flat = _rust.resample(np.ones(n, np.float32), rate, 32000)
    np.testing.assert_allclose(flat[640:-640], 1, atol=2e-5)


@pytest.mark.parametrize("rate", [8000, 22050, 31999, 44100, 48000, 96000])
def test_noise_equals_soxrs_in_the_common_band(rate):
    soxr = pytest.importorskip("soxr")
    rng = np.random.default_rng(rate)
    spectrum = rng.standard_normal(rate // 2 + 1) + 1j * rng.standard_normal(rate // 2 + 1)
    spectrum[int(0.85 * min(rate, 32000) / 2) :] = 0
    wave = np.fft.irfft(spectrum, rate)
    wave = (0.2 * wave / wave.std()).astype(np.float32)
    off = _rust.resample(wave, rate, 32000) - soxr.resample(wave, rate, 32000, quality="VHQ")
    assert np.abs(off[640:-640]).max() < 1e-3


def test_the_same_rate_changes_nothing():
    wave = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(_rust.resample(wave, 32000, 32000), wave)
