"""Frames and sound of a film, as arrays of a dataset. Both are streamed, by PyAV."""

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from loaders.film import sources
from loaders.io.files import DataError

SOUND_RATE = 24_000  # [Hz] that sound is resampled to


class _Npy:
    """A .npy file [n, …] that is written row by row, with n unknown until the end."""

    def __init__(self, path: pathlib.Path, shape: tuple[int, ...], dtype: Any):
        self._file, self._shape, self._dtype, self.n = path.open("wb"), shape, np.dtype(dtype), 0
        self._header()
        self._start = self._file.tell()

    def append(self, row: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(row, self._dtype).data)
        self.n += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write n into the header. After an error from elsewhere, only close the file."""
        if kind is not None:
            with contextlib.suppress(OSError):  # of data that a full disk refused
                self._file.close()
            return
        with self._file:
            self._file.seek(0)
            self._header()
            assert self._file.tell() == self._start, "numpy pads a header for a longer first dimension"

    def _header(self) -> None:
        head = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.n, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, head)


def write_video(path: pathlib.Path, out: pathlib.Path, fps: float, size: tuple[int, int], *, limit: int) -> int:
    """uint8 [frames, height, width, 3]: the picture on the screen at k / fps, up to ``limit`` of them. Returns how many."""
    width, height = size
    with _Npy(out, (height, width, 3), np.uint8) as file:
        last, last_time = None, 0.0
        for time, frame in _decoded(path, "video"):
            picture = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
            # Until this one came, the one before was there.
            while last is not None and file.n < limit and file.n / fps < time - 1e-6:
                file.append(last)
            last, last_time = picture, time
            if file.n >= limit:
                break
        else:
            if last is None:
                raise DataError(f"{path}: its video holds no frame")
            while file.n < limit and file.n / fps <= last_time + 1e-6:
                file.append(last)
    return file.n


def sound_features(path: pathlib.Path, rate: float, bands: int) -> np.ndarray:
    """float32 [times, bands]: log mel energies around k / rate, each band z-scored."""
    av = sources.package("av")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE)
    frames = (frame for _, decoded in _decoded(path, "audio") for frame in resampler.resample(decoded))
    chunks = [frame.to_ndarray()[0] for frame in frames] + [frame.to_ndarray()[0] for frame in resampler.resample(None)]
    samples = np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
    window, bank = np.hanning(1024).astype(np.float32), mel_bank(bands, 1024)
    padded = np.pad(samples, 512)
    n = math.floor(len(samples) / SOUND_RATE * rate)
    if not n:
        raise DataError(f"{path}: its sound is shorter than {1 / rate:g} s")
    log = np.empty((n, bands), np.float32)
    for k in range(n):
        start = round(k * SOUND_RATE / rate)
        power = np.abs(np.fft.rfft(window * padded[start : start + 1024])) ** 2
        log[k] = np.log(bank @ power + 1e-6)
    return ((log - log.mean(0)) / np.maximum(log.std(0), 1e-6)).astype(np.float32)


def mel_bank(bands: int, n: int) -> np.ndarray:
    """float32 [bands, n / 2 + 1]: triangles of equal width on the mel scale 2595 log10(1 + f / 700), 50 Hz to half the rate."""
    low, high = (2595 * np.log10(1 + f / 700) for f in (50.0, SOUND_RATE / 2))
    edges = 700 * (10 ** (np.linspace(low, high, bands + 2) / 2595) - 1)
    f = np.arange(n // 2 + 1) * SOUND_RATE / n
    up = (f - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - f) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(np.minimum(up, down), 0).astype(np.float32)


def _decoded(path: pathlib.Path, kind: str) -> Iterator[tuple[float, Any]]:
    """(seconds from the stream's beginning, frame) in order."""
    av = sources.package("av")
    try:
        with av.open(str(path)) as container:
            streams = getattr(container.streams, kind)
            if not streams:
                raise DataError(f"{path} has no {kind}")
            stream = streams[0]
            stream.thread_type = "AUTO"
            first = None
            for frame in container.decode(stream):
                first = frame.time if first is None else first
                yield (frame.time or 0.0) - (first or 0.0), frame
    except av.error.FFmpegError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from error
