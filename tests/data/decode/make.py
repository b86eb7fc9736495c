"""Make the recordings in this folder: `python tests/data/decode/make.py`.

The recordings are kept in the repository because the Rust tests and benches have no encoders.
tests/loaders/test_decode.py compares them, and many more, with libsndfile.
"""

from pathlib import Path

import numpy as np
import soundfile


def song(rate: int, seconds: float, channels: int, seed: int) -> np.ndarray:
    """Two syllables a second over faint noise, as float32 [n, channels]."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(rate * seconds)) / rate
    inside = t * 2 % 1.0
    sweep = (
        np.sin(2 * np.pi * (2000 * inside + 1500 * inside**2) / 2)
        * np.sin(np.pi * np.minimum(inside * 2, 1)) ** 2
    )
    left = 0.4 * sweep + 0.003 * rng.standard_normal(len(t))
    right = 0.2 * np.roll(sweep, 40) + 0.003 * rng.standard_normal(len(t))
    return np.stack([left, right], axis=1)[:, :channels].astype(np.float32)


def main() -> None:
    here = Path(__file__).parent
    soundfile.write(
        here / "vorbis_32k_mono.ogg", song(32000, 7.3, 1, 0), 32000, format="OGG", subtype="VORBIS"
    )
    soundfile.write(
        here / "opus_48k_stereo.opus", song(48000, 7.3, 2, 3), 48000, format="OGG", subtype="OPUS"
    )
    soundfile.write(
        here / "wav_22k_mono.wav",
        song(22050, 0.5, 1, 4)[:, 0],
        22050,
        format="WAV",
        subtype="PCM_24",
    )
    soundfile.write(here / "mp3_44k_stereo.mp3", song(44100, 7.3, 2, 1), 44100, format="MP3")
    soundfile.write(
        here / "flac_48k_stereo.flac",
        song(48000, 7.3, 2, 2),
        48000,
        format="FLAC",
        subtype="PCM_16",
    )


if __name__ == "__main__":
    main()
