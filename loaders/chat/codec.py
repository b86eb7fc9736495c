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
from loaders.chat import code_stamp
from loaders.io import atomic_write, files, machine

VERSION = 1
MAX_CODEC = 1 << 30  # [bytes] of a codec.npz
MAX_CODES = 1 << 15  # of a codebook: they are kept as int16
# of the filter bank
RATE = 32_000  # [Hz]
WINDOW = 800  # [samples]
HOP = 320  # [samples]
N_MELS = 128
N_FFT = 1024  # [samples]
EMPHASIS = 0.97  # of a sample on the one after it
STACK = 4  # frames in a vector
VECTOR = STACK * N_MELS  # values of a vector
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
        codes_nk = self.quantise(vectors(wave, rate))
        return narrowed(codes_nk.T, np.int16, "the codes")

    def quantise(self, x_nv: np.ndarray) -> np.ndarray:
        """Vectors [N, 512] -> codes [N, K]."""
        residual_np = (x_nv - self.mean) @ self.basis.T
        codes = [np.zeros((len(x_nv), 0), np.int64)]
        for book_cp in self.books:
            code_n, _ = nearest(residual_np, book_cp)
            codes.append(code_n[:, None])
            residual_np = residual_np - book_cp[code_n]
        return np.concatenate(codes, axis=1)

    def decode(self, codes_kt: np.ndarray, n: int | None = None) -> np.ndarray:
        """Codes [K, T] -> log-mel float32 [4 T, 128], by the first ``n`` codebooks."""
        entries = []
        for book_cp, code_t in zip(self.books[:n], codes_kt[:n], strict=True):
            entries.append(book_cp[code_t])
        x_tv = sum(entries) @ self.basis + self.mean
        return np.asarray(x_tv, np.float32).reshape(-1, N_MELS)

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
        return _open_rvq(path)
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
    name = text.replace(":", ".").replace("/", ".")
    return Function(call, name, codebooks, size, frame_rate)


def _open_rvq(path: pathlib.Path) -> Rvq:
    """Open a codec.npz. Raises DataError."""
    try:
        content = files.read(path, most=MAX_CODEC)
        arrays = files.arrays(path, most=MAX_CODEC)
        version = arrays["version"]
        if int(version) != VERSION:
            raise DataError(f"{path} has version {version}; expected {VERSION}: train it again")
        mean = arrays["mean"].astype(np.float32)
        basis = arrays["basis"].astype(np.float32)
        books = arrays["books"].astype(np.float32)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a codec: {error}") from error
    is_mean = mean.shape == (VECTOR,)
    is_basis = basis.shape[1:] == (VECTOR,)
    are_books = books.shape[2:] == basis.shape[:1]
    fits = is_mean and is_basis and are_books
    if not fits or not books.size or books.shape[1] > MAX_CODES:
        raise DataError(
            f"{path} is not a codec: its arrays have the shapes {mean.shape}, {basis.shape} and"
            f" {books.shape}"
        )
    digest = hashlib.sha256(content).hexdigest()
    return Rvq(mean, basis, books, name=f"rvq-{digest[:10]}")


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
    n_vectors = -(-len(wave) // (HOP * STACK))
    n_frames = STACK * n_vectors
    n_samples = WINDOW + (n_frames - 1) * HOP
    no_sound = np.zeros(n_samples, np.float32)
    padded = np.concatenate([wave, no_sound])
    return _rust.fbank(padded[:n_samples])


def vectors(wave: np.ndarray, rate: int) -> np.ndarray:
    """Return the vectors that are quantised, float32 [T, 512], of float32 [n] at ``rate`` Hz."""
    return log_mel(wave, rate).reshape(-1, VECTOR)


def nearest(
    x_np: np.ndarray, book_cp: np.ndarray, chunk: int = 8192
) -> tuple[np.ndarray, np.ndarray]:
    """Return the closest entry to each vector, int64 [N], and its squared distance, float32 [N]."""
    entry_n = np.empty(len(x_np), np.int64)
    distance_n = np.empty(len(x_np), np.float32)
    half_squares_c = (book_cp**2).sum(1) / 2
    for start in range(0, len(x_np), chunk):
        span = slice(start, start + chunk)
        x = x_np[span]
        score = x @ book_cp.T - half_squares_c
        best = score.argmax(1)
        best_score = score[np.arange(len(x)), best]
        entry_n[span] = best
        distance_n[span] = (x**2).sum(1) - 2 * best_score
    return entry_n, distance_n


def k_means(x_np: np.ndarray, n: int, *, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """Return means float32 [n, P] (Lloyd 1982). One without vectors moves to the farthest one."""
    is_few = len(x_np) < n
    first_means = rng.choice(len(x_np), n, replace=is_few)
    book_cp = x_np[first_means].copy()
    for _ in range(rounds):
        entry_n, distance_n = nearest(x_np, book_cp)
        count_c = np.bincount(entry_n, minlength=n)
        by_entry = np.argsort(entry_n, kind="stable")
        first_c = np.cumsum(count_c) - count_c  # of each entry's vectors in that order
        full = np.flatnonzero(count_c)
        sums = np.add.reduceat(x_np[by_entry], first_c[full], axis=0)
        book_cp[full] = sums / count_c[full, None]
        empty = np.flatnonzero(count_c == 0)
        farthest_first = np.argsort(-distance_n, kind="stable")
        book_cp[empty] = x_np[farthest_first[: len(empty)]]
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
    centred_nv = x_nv - mean
    covariance = (centred_nv.T @ centred_nv).astype(np.float64)
    _, eigenvectors = np.linalg.eigh(covariance)  # columns, of the largest eigenvalue last
    largest_first = eigenvectors[:, ::-1]
    basis = np.ascontiguousarray(largest_first[:, :components].T, np.float32)
    residual_np = centred_nv @ basis.T
    books = []
    for _ in range(codebooks):
        book_cp = k_means(residual_np, size, rounds=rounds, rng=rng)
        code_n, _ = nearest(residual_np, book_cp)
        residual_np = residual_np - book_cp[code_n]
        books.append(book_cp)
    return Rvq(mean, basis, np.stack(books))


def errors(codec: Rvq, x_nv: np.ndarray) -> tuple[list[float], float]:
    """Return the root mean squared error of log-mels after each codebook, and of the mean."""
    codes_kn = codec.quantise(x_nv).T
    of_codebooks = []
    for k in range(codec.codebooks):
        decoded_nv = codec.decode(codes_kn, k + 1).reshape(x_nv.shape)
        of_codebooks.append(_root_mean_square(decoded_nv - x_nv))
    return of_codebooks, _root_mean_square(x_nv - codec.mean)


def _root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


def sound(log_mel_fm: np.ndarray, *, rounds: int = 60, seed: int = 0) -> np.ndarray:
    """Return sound float32 [n] of nearly this log-mel, from random phases (Griffin & Lim 1984)."""
    magnitude_fs = _magnitude(log_mel_fm)
    n_frames = len(magnitude_fs)
    n_samples = WINDOW + (n_frames - 1) * HOP
    window = np.hanning(WINDOW)
    starts = np.arange(n_frames)[:, None] * HOP
    sample_fw = starts + np.arange(WINDOW)  # the samples of each frame
    squares_fw = np.broadcast_to(window**2, sample_fw.shape)
    weight = np.zeros(n_samples)
    np.add.at(weight, sample_fw, squares_fw)
    weight = np.maximum(weight, 1e-3)

    def waveform(phase_fs: np.ndarray) -> np.ndarray:
        """Return the samples [n] whose frames are closest to these spectra."""
        frames = np.fft.irfft(magnitude_fs * phase_fs, N_FFT)
        windowed = frames[:, :WINDOW] * window
        sums: np.ndarray = np.bincount(sample_fw.ravel(), windowed.ravel(), n_samples)
        return sums / weight

    turns = np.random.default_rng(seed).random(magnitude_fs.shape)
    wave = waveform(np.exp(2j * np.pi * turns))
    for _ in range(rounds):
        spectrum_fs = np.fft.rfft(wave[sample_fw] * window, N_FFT)
        magnitude = np.maximum(np.abs(spectrum_fs), 1e-12)
        wave = waveform(spectrum_fs / magnitude)
    return wave.astype(np.float32)


def _magnitude(log_mel_fm: np.ndarray) -> np.ndarray:
    """Return the magnitudes of spectra [F, 513] before the filter bank's pre-emphasis."""
    power_fs = spectrum(np.exp(log_mel_fm.astype(np.float64)))
    bin_s = np.arange(power_fs.shape[1])
    delay_s = np.exp(-2j * np.pi * bin_s / N_FFT)  # of one sample
    response_s = np.abs(1 - EMPHASIS * delay_s) ** 2
    magnitude_fs: np.ndarray = np.sqrt(power_fs / response_s)
    magnitude_fs[:, :2] = 0  # the filter bank removes the mean, so nothing is known of it
    return magnitude_fs


def write_wav(path: str | pathlib.Path, samples: np.ndarray, rate: int = RATE) -> None:
    """Write 16 bits, mono, atomically, and quieter if samples are beyond full scale."""
    largest = float(np.abs(samples).max(initial=0))
    scaled = samples / max(1.0, largest)
    int16_samples = (scaled * 32767).astype("<i2")
    with atomic_write.file(path) as opened, wave.open(opened, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(int16_samples.tobytes())


def spectrum(energy_fm: np.ndarray, rounds: int = 30) -> np.ndarray:
    """Return the power [F, 513], not negative, of these energies of bands (Lee & Seung 2001)."""
    bands_ms = mel_bands()
    band_sum_m = bands_ms.sum(1, keepdims=True)
    bin_sum_s = bands_ms.sum(0)
    means_ms = bands_ms / np.maximum(band_sum_m, 1e-9)
    power_fs: np.ndarray = np.maximum(energy_fm @ means_ms, 1e-12)
    for _ in range(rounds):
        energy_of_power_fm = np.maximum(power_fs @ bands_ms.T, 1e-12)
        ratio_fm = energy_fm / energy_of_power_fm
        power_fs = power_fs * (ratio_fm @ bands_ms) / np.maximum(bin_sum_s, 1e-9)
    return power_fs


def mel_bands() -> np.ndarray:
    """Return the weights of Kaldi's mel bands, float64 [128, 513], as in rust/core/src/fbank."""

    def mel(hz: Any) -> Any:
        return 1127.0 * np.log1p(hz / 700.0)

    lowest = mel(20.0)
    step = (mel(RATE / 2) - lowest) / (N_MELS + 1)
    hz_s = np.arange(N_FFT // 2 + 1) * RATE / N_FFT
    place_s = (mel(hz_s) - lowest) / step
    rise_ms = place_s - np.arange(N_MELS)[:, None]
    triangle_ms = np.minimum(rise_ms, 2 - rise_ms)
    bands_ms: np.ndarray = np.maximum(triangle_ms, 0)
    bands_ms[:, -1] = 0
    return bands_ms


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
        key = str(self.path.absolute()) if self.path else self.raw
        digest = hashlib.sha256(key.encode()).hexdigest()
        folder = files.expanded(cache) if cache else machine.cache_folder("codes")
        return folder / f"{digest[:24]}.{codec.name}.npy"

    def kept(self, codes: pathlib.Path) -> code_stamp.Kept:
        """Say whether a file of codes is of this recording as it is now."""
        if self.path:
            return code_stamp.decide(codes, self.path)
        return code_stamp.Kept.YES if codes.exists() else code_stamp.Kept.NO  # named by its content

    def read_stamped(self) -> tuple[bytes, bytes]:
        """Return the encoded recording, and the stamp of codes that are made of it."""
        if not self.path:
            return self.read(), b""
        status = code_stamp.settled(code_stamp.status_of(self.path))  # before it is read
        content = self.read()
        stamp = code_stamp.Stamp(hashlib.sha256(content).digest(), status)
        return content, stamp.packed()


def encode(source: Source, codec: Codec, cache: str) -> None:
    """Keep the codes of a recording. Raises ValueError or OSError, DataError if none are kept."""
    path = source.codes(codec, cache)
    recording, stamp = source.read_stamped()
    wave, rate, _ = _rust.decode(recording)
    codes = codec.encode(wave, rate)
    if codes.size:
        smallest = codes.min()
        largest = codes.max()
        if not (0 <= smallest and largest < codec.size):
            raise ValueError(
                f"{codec.name} gives codes from {smallest} to {largest}; expected 0 to"
                f" {codec.size - 1}"
            )
    codes = narrowed(codes, np.int16, f"the codes of {codec.name}")
    codes = np.ascontiguousarray(codes)
    try:
        with atomic_write.shared(path) as place:
            atomic_write.save(place, codes, after=stamp)
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
                lock = folder / ".codes.lock"
                file = closing.enter_context(lock.open("w"))
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
            table = files.arrays(path, most=MAX_RECORDING)
        else:
            table = _read_columns(path)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read as codes: {files.reason(error)}") from error
    int16_codes = {}
    for name, codes in table.items():
        if codes.ndim != 2 or codes.dtype.kind not in "iu":
            raise DataError(
                f"{path}: {name} holds {codes.dtype} {codes.shape}; expected integers [codebooks,"
                " times]"
            )
        int16_codes[name] = narrowed(codes, np.int16, f"{path}: the codes of {name}")
    return int16_codes


def _read_columns(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read the codes of an Arrow or Parquet file, by their recordings. Raises ValueError."""
    from loaders.io import columnar  # imports pyarrow, which other codes do without

    columns = columnar.read_some(path, "audio_url", "codes")
    missing = {"audio_url", "codes"} - columns.keys()
    if missing:
        raise ValueError(f"it has no column {min(missing)!r}")
    table = {}
    for url, codes in zip(columns["audio_url"], columns["codes"], strict=True):
        table[url] = np.array(codes)
    return table


def stacked(
    sources: Sequence[Source], *, limit: int, seed: int = 0
) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Draw about ``limit`` vectors [N, 512], and return (recording, reason) of broken ones."""
    rng = np.random.default_rng(seed)
    parts = [np.zeros((0, VECTOR), np.float32)]
    broken: list[tuple[str, str]] = []
    share = -(-limit // max(len(sources), 1))
    for source in sources:
        try:
            wave, rate, _ = _rust.decode(source.read())
            x_tv = vectors(wave, rate)
        except (ValueError, OSError) as error:
            broken.append((str(source), str(error)))
            continue
        n_vectors = min(len(x_tv), share)
        times = rng.choice(len(x_tv), n_vectors, replace=False)
        parts.append(x_tv[np.sort(times)])
    return np.concatenate(parts), broken
