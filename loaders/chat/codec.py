"""Sound as codes, and back: residual vector quantisation of log-mel frames, learned by k-means.

A recording becomes the log-mel spectrogram of `loaders._rust.fbank` (128 bands, 100 frames/s, ln of
the power). Four frames together are one vector. Its principal components are quantised by one
codebook after the other, each on the residual that those before it leave (Gray 1984; Zeghidour et
al. 2021): K codes at 25 times a second. Codebooks are learned by k-means on the residuals, one
after the other. To decode, the codes' entries are added up, and `sound` finds a waveform with that
spectrogram (Griffin & Lim 1984). A neural codec is better, and its codes can come as files or from
a user's function (loaders/chat/chat_examples.py); this one needs no download, and is learned from
any recordings in minutes (`jaxtrain train-codec`). A codec is one file, codec.npz:

    version   int      1
    mean      float32 [512]        of the vectors: band b of the i-th of four frames is at 128 i + b
    basis     float32 [P, 512]     principal components, orthonormal
    books     float32 [K, C, P]    codebooks

Codes of a recording of n samples at 32 kHz: int16 [K, T], T = ceil(n / 1280), with silence after
its end.

Shapes: N vectors, P principal components, K codebooks, C codes of each, T times, S bins of a
spectrum.
"""

import base64
import contextlib
import fcntl
import hashlib
import importlib
import os
import pathlib
import wave
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders import _rust
from loaders.base import DataError, narrowed
from loaders.io import atomic_write, files, machine

VERSION = 1
MAX_CODEC = 1 << 30  # [bytes] of a codec.npz
MAX_CODES = 1 << 15  # of a codebook: they are kept as int16
RATE, WINDOW, HOP, N_MELS = 32_000, 800, 320, 128  # of the filter bank
STACK = 4  # frames in a vector
N_FFT, EMPHASIS = 1024, 0.97
FRAME_RATE = RATE / HOP / STACK  # [1/s]
MAX_RECORDING = 4 << 30  # [bytes] of a file
FLOOR = float(np.finfo(np.float32).eps)  # smallest energy of a band


class Rvq(NamedTuple):
    """The project's own codec: residual vector quantisation."""

    mean: np.ndarray
    basis: np.ndarray
    books: np.ndarray
    name: str = "rvq"  # part of the name of files of codes, which changes with the codes

    @property
    def frame_rate(self) -> float:
        """Codes of a codebook in a second [1/s]."""
        return FRAME_RATE

    @property
    def codebooks(self) -> int:
        return len(self.books)

    @property
    def size(self) -> int:
        return int(self.books.shape[1])

    def encode(self, wave: np.ndarray, rate: int) -> np.ndarray:
        """Sound float32 [n] at ``rate`` Hz -> codes int16 [K, T]. Raises ValueError."""
        return narrowed(self.quantise(vectors(wave, rate)).T, np.int16, "the codes")

    def quantise(self, x_nv: np.ndarray) -> np.ndarray:
        """Vectors [N, 512] -> codes [N, K]."""
        rest_np = (x_nv - self.mean) @ self.basis.T
        codes = []
        for book_cp in self.books:
            codes.append(nearest(rest_np, book_cp)[0])
            rest_np = rest_np - book_cp[codes[-1]]
        return np.stack(codes, axis=1) if codes else np.zeros((len(x_nv), 0), np.int64)

    def decode(self, codes_kt: np.ndarray, n: int | None = None) -> np.ndarray:
        """Codes [K, T] -> log-mel float32 [4 T, 128], by the first ``n`` codebooks."""
        x_tp = sum(
            book_cp[codes_t]
            for book_cp, codes_t in list(zip(self.books, codes_kt, strict=True))[:n]
        )
        return np.asarray(x_tp @ self.basis + self.mean, np.float32).reshape(-1, N_MELS)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        with atomic_write.file(path) as file:
            np.savez(file, version=VERSION, mean=self.mean, basis=self.basis, books=self.books)


class Function(NamedTuple):
    """A user's codec: a function of a module, (wave float32 [n], rate in Hz) -> codes [K, T]."""

    call: Callable[[np.ndarray, int], np.ndarray]
    name: str
    codebooks: int
    size: int
    frame_rate: float

    def encode(self, wave: np.ndarray, rate: int) -> np.ndarray:
        codes = np.asarray(self.call(wave, rate))
        if codes.ndim != 2 or len(codes) != self.codebooks or codes.dtype.kind not in "iu":
            raise ValueError(
                f"{self.name} gives {codes.dtype} {codes.shape}; expected integers"
                f" [{self.codebooks}, times]"
            )
        return narrowed(codes, np.int16, f"the codes of {self.name}")


Codec = Rvq | Function


def open_codec(text: str, *, codebooks: int, size: int, frame_rate: float) -> Codec:
    """Open a codec.npz, or a user's "module:function", never a checkpoint's. Raises DataError."""
    path = files.expanded(text)
    if path.is_file():
        try:
            content = files.read(path, most=MAX_CODEC)
            found = files.arrays(path, most=MAX_CODEC)
            if int(found["version"]) != VERSION:
                raise DataError(
                    f"{path} has version {found['version']}; expected {VERSION}: train it again"
                )
            mean, basis, books = (
                found[name].astype(np.float32) for name in ("mean", "basis", "books")
            )
        except (ValueError, KeyError, TypeError) as error:
            raise (
                error
                if isinstance(error, DataError)
                else DataError(f"{path} is not a codec: {error}")
            ) from error
        components = basis.shape[0] if basis.ndim == 2 else -1
        shapes = (mean.shape, basis.shape, books.shape[2:])
        if (
            shapes != ((STACK * N_MELS,), (components, STACK * N_MELS), (components,))
            or not books.size
            or books.shape[1] > MAX_CODES
        ):
            raise DataError(
                f"{path} is not a codec: its arrays have the shapes {mean.shape}, {basis.shape} and"
                f" {books.shape}"
            )
        return Rvq(mean, basis, books, name=f"rvq-{hashlib.sha256(content).hexdigest()[:10]}")
    module, colon, function = text.partition(":")
    if not colon:
        raise DataError(
            f"{text} does not exist; name a codec.npz (`jaxtrain train-codec` makes one) or"
            " module:function"
        )
    try:
        call = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"{text}: {error}; name a function that takes (wave, rate) and returns codes [K, T]"
        ) from error
    return Function(call, text.replace(":", ".").replace("/", "."), codebooks, size, frame_rate)


def log_mel(wave: np.ndarray, rate: int) -> np.ndarray:
    """Return the log-mel spectrogram of float32 [n] at ``rate`` Hz: [4 T, 128].

    Values are ln of the bands' energies. T = ceil(n / 1280) at 32 kHz. Raises ValueError for sound
    without samples.
    """
    wave = np.ascontiguousarray(wave, np.float32)
    if rate != RATE:
        wave = _rust.resample(wave, rate, RATE)
    if not len(wave):
        raise ValueError("it has no samples")
    frames = STACK * -(-len(wave) // (HOP * STACK))
    return _rust.fbank(
        np.concatenate([wave, np.zeros(WINDOW + (frames - 1) * HOP, np.float32)])[
            : WINDOW + (frames - 1) * HOP
        ]
    )


def vectors(wave: np.ndarray, rate: int) -> np.ndarray:
    """Return the vectors that are quantised, float32 [T, 512], of float32 [n] at ``rate`` Hz."""
    return log_mel(wave, rate).reshape(-1, STACK * N_MELS)


def nearest(
    x_np: np.ndarray, book_cp: np.ndarray, chunk: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """Return the closest entry to each vector, int64 [N], and its squared distance, float32 [N]."""
    entry, distance = np.empty(len(x_np), np.int64), np.empty(len(x_np), np.float32)
    half_c = (book_cp**2).sum(1) / 2
    for start in range(0, len(x_np), chunk):
        x = x_np[start : start + chunk]
        score = x @ book_cp.T - half_c
        at = score.argmax(1)
        entry[start : start + chunk] = at
        distance[start : start + chunk] = (x**2).sum(1) - 2 * score[np.arange(len(x)), at]
    return entry, distance


def k_means(x_np: np.ndarray, n: int, *, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """Return means float32 [n, P] (Lloyd 1982). One without vectors moves to the farthest one."""
    book_cp = x_np[rng.choice(len(x_np), n, replace=len(x_np) < n)].copy()
    for _ in range(rounds):
        entry, distance = nearest(x_np, book_cp)
        count = np.bincount(entry, minlength=n)
        by_entry = np.argsort(entry, kind="stable")
        starts = np.concatenate([[0], np.cumsum(count)[:-1]])
        full = np.flatnonzero(count)
        book_cp[full] = np.add.reduceat(x_np[by_entry], starts[full], axis=0) / count[full, None]
        empty = np.flatnonzero(count == 0)
        book_cp[empty] = x_np[np.argsort(-distance, kind="stable")[: len(empty)]]
    return book_cp


def train(
    x_nv: np.ndarray,
    *,
    codebooks: int = 8,
    size: int = 1024,
    components: int = 128,
    rounds: int = 15,
    seed: int = 0,
) -> Rvq:
    """Train a codec on vectors [N, 512]. Raises DataError for fewer vectors than codes."""
    if len(x_nv) < size:
        raise DataError(
            f"{len(x_nv)} vectors (40 ms each) are too few for {size} codes; give more sound or a"
            " smaller size"
        )
    rng = np.random.default_rng(seed)
    mean = x_nv.mean(0, dtype=np.float64).astype(np.float32)
    centred = x_nv - mean
    _, basis = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    basis = np.ascontiguousarray(basis[:, ::-1][:, :components].T, np.float32)
    rest = centred @ basis.T
    books = []
    for _ in range(codebooks):
        books.append(k_means(rest, size, rounds=rounds, rng=rng))
        rest = rest - books[-1][nearest(rest, books[-1])[0]]
    return Rvq(mean, basis, np.stack(books))


def errors(codec: Rvq, x_nv: np.ndarray) -> tuple[list[float], float]:
    """Return the root mean squared error of log-mels after each codebook, and of the mean."""
    codes = codec.quantise(x_nv).T
    rest = x_nv - codec.mean
    differences = [
        codec.decode(codes, n + 1).reshape(x_nv.shape) - x_nv for n in range(codec.codebooks)
    ]
    return [float(np.sqrt((x**2).mean())) for x in differences], float(np.sqrt((rest**2).mean()))


def sound(log_mel_fm: np.ndarray, *, rounds: int = 60, seed: int = 0) -> np.ndarray:
    """Return sound float32 [n] of nearly this log-mel, from random phases (Griffin & Lim 1984)."""
    power_fs = spectrum(np.exp(log_mel_fm.astype(np.float64)))
    response = (
        np.abs(1 - EMPHASIS * np.exp(-2j * np.pi * np.arange(power_fs.shape[1]) / N_FFT)) ** 2
    )
    magnitude = np.sqrt(power_fs / response)
    magnitude[:, :2] = 0  # the filter bank removes the mean, so nothing is known of it
    window = np.zeros(N_FFT)
    window[:WINDOW] = np.hanning(WINDOW)
    n = WINDOW + (len(magnitude) - 1) * HOP
    phase = np.exp(2j * np.pi * np.random.default_rng(seed).random(magnitude.shape))
    frames = np.arange(len(magnitude))[:, None] * HOP + np.arange(WINDOW)
    weight = np.zeros(n)
    np.add.at(weight, frames, np.broadcast_to(window[:WINDOW] ** 2, frames.shape))
    weight = np.maximum(weight, 1e-3)
    for i in range(rounds + 1):
        waves = np.fft.irfft(magnitude * phase, N_FFT)[:, :WINDOW] * window[:WINDOW]
        wave = np.bincount(frames.ravel(), waves.ravel(), n) / weight
        if i < rounds:
            spectra = np.fft.rfft(wave[frames] * window[:WINDOW], N_FFT)
            phase = spectra / np.maximum(np.abs(spectra), 1e-12)
    return wave.astype(np.float32)


def write_wav(path: str | pathlib.Path, samples: np.ndarray, rate: int = RATE) -> None:
    """Write 16 bits, mono, atomically, and quieter if samples are beyond full scale."""
    scaled = samples / max(1.0, float(np.abs(samples).max(initial=0)))
    with atomic_write.file(path) as opened, wave.open(opened, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((scaled * 32767).astype("<i2").tobytes())


def spectrum(energy_fm: np.ndarray, rounds: int = 30) -> np.ndarray:
    """Return the power [F, 513], not negative, of these energies of bands (Lee & Seung 2001)."""
    bands = mel_bands()
    power: np.ndarray = np.maximum(
        energy_fm @ (bands / np.maximum(bands.sum(1, keepdims=True), 1e-9)), 1e-12
    )
    total = bands.sum(0)
    for _ in range(rounds):
        ratio = energy_fm / np.maximum(power @ bands.T, 1e-12)
        power = power * (ratio @ bands) / np.maximum(total, 1e-9)
    return power


def mel_bands() -> np.ndarray:
    """Return the weights of Kaldi's mel bands, float64 [128, 513], as in rust/core/src/fbank."""

    def mel(hz: Any) -> Any:
        return 1127.0 * np.log1p(hz / 700.0)

    low, step = mel(20.0), (mel(RATE / 2) - mel(20.0)) / (N_MELS + 1)
    place = (mel(np.arange(N_FFT // 2 + 1) * RATE / N_FFT) - low) / step - np.arange(N_MELS)[
        :, None
    ]
    bands: np.ndarray = np.maximum(np.minimum(place, 2 - place), 0)
    bands[:, -1] = 0
    return bands


class Source(NamedTuple):
    """A recording: a file, or its content in base64."""

    path: pathlib.Path | None
    raw: str = ""

    def __str__(self) -> str:
        return str(self.path) if self.path else f"raw_audio of {len(self.raw)} characters"

    def read(self) -> bytes:
        """Return the encoded recording. Raises ValueError: no base64; FileError: not opened."""
        if self.path is None:
            return base64.b64decode(self.raw, validate=True)
        return files.read(self.path, most=MAX_RECORDING)

    def codes(self, codec: Codec, cache: str) -> pathlib.Path:
        """Return its file of codes: next to it, or in a folder, named by its path or content."""
        if self.path and not cache:
            return self.path.with_name(f"{self.path.name}.{codec.name}.npy")
        key = hashlib.sha256(
            (str(self.path.absolute()) if self.path else self.raw).encode()
        ).hexdigest()[:24]
        folder = files.expanded(cache) if cache else machine.cache_folder("codes")
        return folder / f"{key}.{codec.name}.npy"

    def is_kept(self, codes: pathlib.Path) -> bool:
        """Whether the file of codes is there and not older than the recording."""
        try:
            return codes.stat().st_mtime_ns >= (self.path.stat().st_mtime_ns if self.path else 0)
        except OSError:
            return False


def encode(source: Source, codec: Codec, cache: str) -> None:
    """Keep the codes of a recording. Raises ValueError or OSError, DataError if none are kept."""
    path = source.codes(codec, cache)
    wave, rate, _ = _rust.decode(source.read())
    codes = codec.encode(wave, rate)
    if codes.size and not (0 <= codes.min() and codes.max() < codec.size):
        raise ValueError(
            f"{codec.name} gives codes from {codes.min()} to {codes.max()}; expected 0 to"
            f" {codec.size - 1}"
        )
    codes = np.ascontiguousarray(narrowed(codes, np.int16, f"the codes of {codec.name}"))
    try:
        with atomic_write.shared(path) as place:
            atomic_write.save(place, codes)
    except OSError as error:
        raise DataError(
            f"codes cannot be kept in {path.parent} ({error}); set data.cache to a folder for them"
        ) from error


@contextlib.contextmanager
def only_one(folders: Sequence[pathlib.Path]) -> Iterator[None]:
    """Hold a lock between processes, in the first folder that can be written and has locks."""
    with contextlib.ExitStack() as closing:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                file = closing.enter_context((folder / ".codes.lock").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                break
        yield


def read(path: pathlib.Path) -> np.ndarray:
    """Read a file of codes, integers [K, T]. Raises ValueError."""
    codes = np.array(files.array(path))
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {codes.dtype} {codes.shape}; expected integers [codebooks, times]"
        )
    return codes


def read_many(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read codes made elsewhere: name of the recording in the manifest -> codes int16 [K, T].

    An .npz has an array for each name. Arrow IPC (.arrow, .feather) and .parquet have the columns
    audio_url (string) and codes (a list of K lists of T integers). Raises DataError.
    """
    path = files.expanded(path)
    try:
        if path.suffix == ".npz":
            table: dict[str, Any] = dict(files.arrays(path, most=MAX_RECORDING))
        else:
            from loaders.io import columnar  # imports pyarrow, which other codes do without

            columns = columnar.read_some(path, "audio_url", "codes")
            if missing := {"audio_url", "codes"} - columns.keys():
                raise ValueError(f"it has no column {min(missing)!r}")
            table = {
                url: np.array(codes)
                for url, codes in zip(columns["audio_url"], columns["codes"], strict=True)
            }
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read as codes: {files.reason(error)}") from error
    for name, codes in table.items():
        if codes.ndim != 2 or codes.dtype.kind not in "iu":
            raise DataError(
                f"{path}: {name} holds {codes.dtype} {codes.shape}; expected integers [codebooks,"
                " times]"
            )
    return {
        name: narrowed(codes, np.int16, f"{path}: the codes of {name}")
        for name, codes in table.items()
    }


def stacked(
    sources: Sequence[Source], *, limit: int, seed: int = 0
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Draw about ``limit`` vectors [N, 512] of all, and return (recording, reason) of bad ones."""
    rng = np.random.default_rng(seed)
    drawn: list[np.ndarray] = []
    bad: list[tuple[str, str]] = []
    share = -(-limit // max(len(sources), 1))
    for source in sources:
        try:
            wave, rate, _ = _rust.decode(source.read())
            x = vectors(wave, rate)
        except (ValueError, OSError) as error:
            bad.append((str(source), str(error)))
            continue
        drawn.append(x[np.sort(rng.choice(len(x), min(len(x), share), replace=False))])
    return np.concatenate(drawn) if drawn else np.zeros((0, STACK * N_MELS), np.float32), bad
