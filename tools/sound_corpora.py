"""Small corpora of synthetic sound, each a folder of WAV files for each class.

    python -m tools.sound_corpora words|textures|chirps DIR [--classes 10] [--each 60] [--seed 0]

words      two to four vowels after each other, of speakers of other pitch, size and tempo
textures   noise of a spectrum and a beat, at any level
chirps     a sweep anywhere in 2 s of noise that is about as loud

Each class has a recipe of its own, from which each of its files is drawn. `jaxtrain index DIR`
indexes them.
"""

import argparse
import pathlib
import wave
from collections.abc import Callable
from typing import Any

import numpy as np

RATE = 16_000  # [Hz]
VOWELS = (
    (730, 1090, 2440),
    (270, 2290, 3010),
    (300, 870, 2240),
    (530, 1840, 2480),
    (570, 840, 2410),
)
Recipe = Callable[[np.random.Generator], Any]  # an array of samples


def word(number: int) -> Recipe:
    """Return the recipe of a word: its vowels' formants [Hz] (Peterson & Barney 1952)."""
    chosen = np.random.default_rng([1, number])
    vowels = chosen.integers(len(VOWELS), size=chosen.integers(2, 5))

    def say(rng: np.random.Generator) -> Any:
        pitch = rng.uniform(90, 250)
        size = rng.uniform(0.88, 1.18)
        parts = []
        for vowel in vowels:
            seconds = rng.uniform(0.09, 0.18)
            formants = size * np.array(VOWELS[vowel]) * rng.normal(1, 0.03, 3)
            parts.append(_vowel(pitch * rng.uniform(0.92, 1.08), formants, seconds))
        voice = _placed(np.concatenate(parts), 1.0, rng)
        return voice + _noise(len(voice), 0, rng) * voice.std() * 10 ** (-rng.uniform(10, 25) / 20)

    return say


def texture(number: int) -> Recipe:
    """Return the recipe of a texture: the bands of its spectrum, and how fast it beats."""
    chosen = np.random.default_rng([2, number])
    slope = chosen.uniform(-1.2, 0.2)
    centre = np.exp(chosen.uniform(np.log(300), np.log(5_000)))
    beats = np.exp(chosen.uniform(np.log(2), np.log(20)))

    def sound(rng: np.random.Generator) -> Any:
        n = 2 * RATE
        broad = _noise(n, slope, rng)
        band = _band(_noise(n, 0, rng), centre * rng.normal(1, 0.08), 0.25)
        phase = 2 * np.pi * (beats * rng.normal(1, 0.08) * np.arange(n) / RATE + rng.uniform())
        beating = band * (1 + rng.uniform(0.5, 1.0) * np.sin(phase))
        return broad + beating * 10 ** (rng.uniform(-12, 0) / 20)

    return sound


def chirp(number: int) -> Recipe:
    """Return the recipe of a sweep from one frequency to another, once or several times."""
    chosen = np.random.default_rng([3, number])
    low, high = np.exp(chosen.uniform(np.log(600), np.log(6_000), 2))
    seconds = chosen.uniform(0.08, 0.4)
    times = chosen.integers(1, 4)

    def sound(rng: np.random.Generator) -> Any:
        scale = rng.normal(1, 0.04)
        n = int(seconds * rng.uniform(0.8, 1.25) * RATE)
        frequency = scale * low * (high / low) ** (np.arange(n) / n)
        sweep = np.sin(2 * np.pi * np.cumsum(frequency) / RATE) * np.hanning(n)
        call = np.tile(np.concatenate([sweep, np.zeros(n // 3)]), times)
        level = 10 ** (rng.uniform(0, 10) / 20)
        noise = _noise(2 * RATE, rng.uniform(-1, 0), rng)
        return _placed(call * np.sqrt(2) * level, 2.0, rng) + noise

    return sound


CORPORA: dict[str, Callable[[int], Recipe]] = {"words": word, "textures": texture, "chirps": chirp}


def write(
    kind: str, folder: pathlib.Path, *, classes: int = 10, each: int = 60, seed: int = 0
) -> None:
    """Write ``each`` files of the first ``classes`` recipes of `CORPORA`."""
    for number in range(classes):
        recipe = CORPORA[kind](number)
        place = folder / f"{kind}{number:02}"
        place.mkdir(parents=True, exist_ok=True)
        for i in range(each):
            x = recipe(np.random.default_rng([seed, number, i]))
            _write_wav(place / f"{kind}{number:02}_{i:04}.wav", x)


def _vowel(pitch: float, formants: np.ndarray, seconds: float) -> Any:
    """Return the harmonics of a pitch, as strong as the resonances make them."""
    t = np.arange(int(seconds * RATE)) / RATE
    harmonics = pitch * np.arange(1, int(5_000 / pitch))
    width = 60 + 0.05 * formants
    distance = (harmonics[:, None] - formants) / width
    strength = (1 / (1 + distance**2)).sum(1) / np.sqrt(harmonics)
    waves = np.sin(2 * np.pi * harmonics[:, None] * t) * strength[:, None]
    return waves.sum(0) * np.hanning(len(t)) ** 0.3


def _placed(x: np.ndarray, seconds: float, rng: np.random.Generator) -> Any:
    n = max(int(seconds * RATE), len(x) + 1)
    out = np.zeros(n)
    start = rng.integers(n - len(x))
    out[start : start + len(x)] = x
    return out


def _noise(n: int, slope: float, rng: np.random.Generator) -> Any:
    """Return noise of standard deviation 1, whose amplitude falls as frequency ** slope."""
    frequency = np.maximum(np.fft.rfftfreq(n, 1 / RATE), 50)
    x = np.fft.irfft(np.fft.rfft(rng.normal(size=n)) * frequency**slope, n)
    return x / x.std()


def _band(x: np.ndarray, centre: float, octaves: float) -> Any:
    frequency = np.maximum(np.fft.rfftfreq(len(x), 1 / RATE), 1)
    shape = np.exp(-0.5 * (np.log2(frequency / centre) / octaves) ** 2)
    x = np.fft.irfft(np.fft.rfft(x) * shape, len(x))
    return x / x.std()


def _write_wav(path: pathlib.Path, x: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((x / abs(x).max() * 30_000).astype("<i2").tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools.sound_corpora",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=CORPORA)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.kind, args.folder, classes=args.classes, each=args.each, seed=args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
