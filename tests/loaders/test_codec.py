"""Sound through the codec and back: it gets better with every codebook, gives the same codes again,
and is audible."""

import json
import re

import numpy as np
import pytest
import soundfile

from jaxtrain.workloads.audio_language.commands import encode_audio, train_codec
from loaders import _rust
from loaders.base import DataError
from loaders.chat import codec


def chirps(seed, seconds=1.0, rate=32_000):
    """Sweeps and noise, all different, of one family."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(rate * seconds)) / rate
    f = rng.uniform(300, 3000) * np.exp(rng.uniform(-1, 1) * t)
    x = (
        rng.uniform(0.1, 0.5)
        * np.sin(2 * np.pi * np.cumsum(f) / rate)
        * (1 + np.sin(2 * np.pi * rng.uniform(2, 8) * t))
        / 2
    )
    return (x + 0.003 * rng.normal(size=len(t))).astype("f4")


@pytest.fixture(scope="module")
def learned():
    x = np.concatenate([codec.vectors(chirps(i), 32_000) for i in range(60)])
    return codec.train(x, codebooks=4, size=64, components=64, rounds=8)


def test_a_codec_gives_25_codes_a_second_at_any_rate(learned):
    assert codec.FRAME_RATE == 25
    for n, rate, times in (
        (32_000, 32_000, 25),
        (32_001, 32_000, 26),
        (1, 32_000, 1),
        (24_000, 24_000, 25),
        (12_000, 48_000, 7),
    ):
        codes = learned.encode(np.zeros(n, "f4"), rate)
        assert codes.shape == (4, times) and codes.dtype == np.int16
    with pytest.raises(ValueError, match="no samples"):
        learned.encode(np.zeros(0, "f4"), 32_000)


def test_every_codebook_makes_the_error_smaller_also_of_sound_it_has_not_learned(learned):
    x = np.concatenate([codec.vectors(chirps(i), 32_000) for i in range(100, 110)])
    each, alone = codec.errors(learned, x)
    assert alone > each[0] > each[1] > each[2] > each[3] and each[3] < 0.6 * alone
    again = learned.decode(learned.quantise(x).T)
    assert each[3] == pytest.approx(
        float(np.sqrt(((again.reshape(x.shape) - x) ** 2).mean())), rel=1e-5
    )


def test_codes_are_the_nearest_entries(learned):
    rest = (codec.vectors(chirps(7), 32_000) - learned.mean) @ learned.basis.T
    codes = learned.encode(chirps(7), 32_000)
    for k, book in enumerate(learned.books):
        brute = ((rest[:, None] - book[None]) ** 2).sum(-1)
        np.testing.assert_allclose(
            brute[np.arange(len(rest)), codes[k]], brute.min(1), rtol=1e-3, atol=1e-3
        )
        rest = rest - book[codes[k]]


def test_the_bands_are_those_of_the_filter_bank():
    """The energies of a tone, computed here in numpy by the same formulas, equal the
    extension's."""
    x = chirps(1)[: codec.WINDOW + 20 * codec.HOP]
    frames = x[np.arange(21)[:, None] * codec.HOP + np.arange(codec.WINDOW)].astype("f8")
    frames = frames - frames.mean(1, keepdims=True)
    frames[:, 1:] -= codec.EMPHASIS * frames[:, :-1].copy()
    power = np.abs(np.fft.rfft(frames * np.hanning(codec.WINDOW), codec.N_FFT)) ** 2
    found = np.log(np.maximum(power @ codec.mel_bands().T, codec.FLOOR))
    np.testing.assert_allclose(found, _rust.fbank(x), rtol=0, atol=0.02)


def test_sound_has_the_spectrogram_that_was_asked_for():
    """The analysis of Griffin and Lim's waveform is within 2 dB at every audible place, and not by
    chance."""
    asked = codec.log_mel(chirps(3), 32_000)
    heard = _rust.fbank(codec.sound(asked))
    assert heard.shape == asked.shape
    loud = asked > asked.max() - 6
    error = np.abs(heard - asked)[loud].mean()
    assert error < 0.5 < np.abs(np.roll(heard, 30, axis=0) - asked)[loud].mean()


def test_the_tools_train_encode_and_play(tmp_path, capsys):
    for i in range(12):
        soundfile.write(tmp_path / f"{i}.wav", chirps(i, 0.5), 32_000)
    (tmp_path / "bad.wav").write_bytes(b"nothing")
    out = str(tmp_path / "codec.npz")
    args = [
        out,
        str(tmp_path),
        "--codebooks=3",
        "--size=16",
        "--components=16",
        "--rounds=4",
        "--test-share=0.3",
    ]
    assert train_codec.main(args) == 0
    told = capsys.readouterr()
    assert "bad.wav is skipped" in told.err
    rows = [
        [float(x) for x in re.findall(r"\d+\.\d{3}", line)]
        for line in told.out.splitlines()
        if "codebooks  " in line
    ]
    assert len(rows) == 3 and all(
        a > b for col in zip(*rows, strict=True) for a, b in zip(col, col[1:], strict=False)
    )
    made = codec.open_codec(out, codebooks=0, size=0, frame_rate=0)
    assert (made.codebooks, made.size) == (3, 16)
    assert (
        train_codec.main(args) == 0
        and codec.open_codec(out, codebooks=0, size=0, frame_rate=0).name == made.name
    )

    parts = [{"type": "audio", "audio_url": name} for name in ("3.wav", "bad.wav")]
    samples = [{"messages": [{"role": "assistant", "content": part}]} for part in parts]
    (tmp_path / "manifest.json").write_text(json.dumps(samples))
    capsys.readouterr()
    assert encode_audio.main([str(tmp_path / "manifest.json"), "--codec", out]) == 1
    told = capsys.readouterr().out
    assert "1 recordings encoded" in told and "1 could not be" in told and "bad.wav" in told
    np.testing.assert_array_equal(
        np.load(tmp_path / f"3.wav.{made.name}.npy"), made.encode(chirps(3, 0.5), 32_000)
    )
    played = tmp_path / "again.wav"
    assert (
        encode_audio.main(
            ["--listen", str(tmp_path / "3.wav"), "--codec", out, "--out", str(played)]
        )
        == 0
    )
    samples, rate, _ = _rust.decode(played.read_bytes())
    assert rate == 32_000 and np.abs(samples).max() > 0.02
    assert encode_audio.main([str(tmp_path / "manifest.json"), "--codec", "nowhere.npz"]) == 2
    with pytest.raises(DataError, match="too few for 16 codes"):
        codec.train(np.zeros((3, 512), "f4"), size=16)
