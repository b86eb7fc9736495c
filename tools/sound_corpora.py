"""Small corpora of sound, each a folder of files for each class.

    python -m tools.sound_corpora words|textures|chirps|digits DIR [--classes 10] [--each 60]
        [--seed 0]
    python -m tools.sound_corpora shards DIR [--data demo] [--label ebird_code]

words      two to four vowels after each other, of speakers of other pitch, size and tempo
textures   noise of a spectrum and a beat, at any level
chirps     a sweep anywhere in 2 s of noise that is about as loud
digits     the English digits by six voices: gliding formants, hiss, and stops
shards     the recordings of ``--data``: the demo birds, or a folder that Hugging Face `datasets`
           saved, with a table of the class (column ``--label``) and split of each

Each class of the first four has a recipe of its own, from which each of its files is drawn.
`jaxtrain index DIR` indexes them. Of shards it is `jaxtrain index DIR/table.csv --audio DIR`.
"""

import argparse
import csv
import pathlib
import wave
from collections.abc import Callable
from typing import Any

import numpy as np

from loaders import _rust
from loaders.audio import demo, shards

RATE = 16_000  # [Hz]
VOWELS = (
    (730, 1090, 2440),
    (270, 2290, 3010),
    (300, 870, 2240),
    (530, 1840, 2480),
    (570, 840, 2410),
)
# A sound: how loud its voice is, its formants [Hz], how loud its hiss, its centre [Hz], seconds.
SOUNDS = {
    "ee": (1.0, (270, 2290, 3010), 0.0, 3_000, 0.12),
    "i": (1.0, (390, 1990, 2550), 0.0, 3_000, 0.09),
    "e": (1.0, (530, 1840, 2480), 0.0, 3_000, 0.10),
    "a": (1.0, (730, 1090, 2440), 0.0, 3_000, 0.12),
    "u": (1.0, (640, 1190, 2390), 0.0, 3_000, 0.10),
    "o": (1.0, (570, 840, 2410), 0.0, 3_000, 0.12),
    "oo": (1.0, (300, 870, 2240), 0.0, 3_000, 0.13),
    "r": (0.6, (310, 1060, 1380), 0.0, 3_000, 0.08),
    "w": (0.5, (290, 610, 2150), 0.0, 3_000, 0.07),
    "n": (0.4, (250, 1400, 2300), 0.0, 3_000, 0.09),
    "v": (0.3, (250, 1100, 2300), 0.1, 4_500, 0.07),
    "z": (0.3, (250, 1700, 2600), 0.3, 5_500, 0.10),
    "s": (0.0, (250, 1700, 2600), 0.4, 5_500, 0.12),
    "f": (0.0, (250, 1100, 2300), 0.12, 4_500, 0.10),
    "th": (0.0, (250, 1400, 2600), 0.10, 6_000, 0.09),
    "-": (0.0, (300, 1500, 2500), 0.0, 3_000, 0.05),  # before a stop is released
    "t": (0.0, (300, 1700, 2600), 0.4, 4_000, 0.03),
    "k": (0.0, (300, 1900, 2500), 0.4, 2_000, 0.03),
}
DIGITS = (
    "z ee r o oo",
    "w u n",
    "- t oo",
    "th r ee",
    "f o r",
    "f a i v",
    "s i - k s",
    "s e v u n",
    "e ee - t",
    "n a i n",
)
VOICES = ((95, 1.12), (110, 1.0), (125, 1.05), (180, 0.92), (205, 0.88), (230, 0.95))
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


def digit(number: int) -> Recipe:
    """Return the recipe of a digit, in the voice (pitch [Hz], size) of one of six speakers."""
    names = DIGITS[number].split()

    def say(rng: np.random.Generator) -> Any:
        pitch, size = VOICES[rng.integers(len(VOICES))]
        tempo = rng.uniform(0.75, 1.3)
        sounds = [SOUNDS[name] for name in names]
        seconds = [tempo * sound[-1] * rng.uniform(0.8, 1.2) for sound in sounds]
        counts = [max(1, int(100 * each)) for each in seconds]  # [frames] of 10 ms
        voice, formants, hiss, centre = (
            _glided(np.repeat([sound[i] for sound in sounds], counts, axis=0)) for i in range(4)
        )
        formants = formants * size * rng.normal(1, 0.04, 3)
        pitches = pitch * rng.uniform(0.9, 1.1) * np.linspace(1.05, rng.uniform(0.8, 1), len(voice))
        spoken = _spoken(pitches, formants, voice) + _hissed(centre, hiss, rng)
        noise = _noise(len(spoken), -0.5, rng)
        return spoken + noise * spoken.std() * 10 ** (-rng.uniform(15, 35) / 20)

    return say


CORPORA: dict[str, Callable[[int], Recipe]] = {
    "words": word,
    "textures": texture,
    "chirps": chirp,
    "digits": digit,
}


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


def unpack(data: str, folder: pathlib.Path, label: str) -> None:
    """Write the recordings of ``data`` by split and class, and table.csv: file, label, split."""
    source = str(demo.ensure()) if data == "demo" else data
    rows = []
    for split in ("train", "test"):
        index = _rust.Index([str(p) for p in shards.find_shards(source, split)], label=label)
        names = index.class_names or []
        for row in range(index.n_rows):
            name = names[index.labels[row]]
            suffix = pathlib.Path(index.path(row) or "x.ogg").suffix
            path = pathlib.Path(split, name, f"{row:04}{suffix}")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(index.encoded(row))
            rows.append((path, name, split))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "split"), *rows])


def _glided(x: np.ndarray) -> Any:
    """Return values [frames, …] that move to the next ones within 50 ms."""
    window = np.hanning(7)[1:-1] / np.hanning(7).sum()
    columns = np.reshape(x, (len(x), -1)).astype(float)
    padded = np.pad(columns, ((2, 2), (0, 0)), mode="edge")
    glided = [np.convolve(column, window, "valid") for column in padded.T]
    return np.stack(glided, axis=1).reshape(x.shape)


def _spoken(pitches: np.ndarray, formants: np.ndarray, voice: np.ndarray) -> Any:
    """Return the harmonics of a pitch, as strong as the resonances of each frame make them."""
    n = len(pitches) * RATE // 100
    frames, times = np.arange(len(pitches)), np.arange(n) / (RATE / 100)
    phase = 2 * np.pi * np.cumsum(np.interp(times, frames, pitches)) / RATE
    out = np.zeros(n)
    for harmonic in range(1, int(5_000 / pitches.max())):
        distance = (harmonic * pitches[:, None] - formants) / (60 + 0.05 * formants)
        strength = voice * (1 / (1 + distance**2)).sum(1) / np.sqrt(harmonic)
        out += np.interp(times, frames, strength) * np.sin(harmonic * phase)
    return out / max(out.std(), 1e-9)


def _hissed(centre: np.ndarray, hiss: np.ndarray, rng: np.random.Generator) -> Any:
    """Return noise about the centre of each frame."""
    n = len(hiss) * RATE // 100
    frames, times = np.arange(len(hiss)), np.arange(n) / (RATE / 100)
    out = np.zeros(n)
    for middle in np.unique(np.round(centre[hiss > 0.02], -3)):
        near = np.maximum(0, 1 - abs(centre - middle) / 1_000) * hiss
        out += _band(_noise(n, 0, rng), max(middle, 1_000), 0.4) * np.interp(times, frames, near)
    return out


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
    parser.add_argument("kind", choices=(*CORPORA, "shards"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="demo")
    parser.add_argument("--label", default="ebird_code")
    args = parser.parse_args()
    if args.kind == "shards":
        unpack(args.data, args.folder, args.label)
        return 0
    write(args.kind, args.folder, classes=args.classes, each=args.each, seed=args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
