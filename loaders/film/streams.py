"""Frames and sound of a film, as arrays of a dataset. Both are streamed, by PyAV.

Both are on one clock. Its zero is the begin of the file's first stream, as players have it. A
stream that begins later has black pictures, or silence, until then. Every frame and sample lies
where its own time stamp says.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from loaders.film import foreign_files
from loaders.io.files import DataError

SOUND_RATE = 24_000  # [Hz] that sound is resampled to
MAX_GAP = 0.05  # [s] between the time stamps of sound that is taken for rounding


def write_video(
    path: pathlib.Path,
    out: pathlib.Path,
    fps: float,
    size: tuple[int, int],
    *,
    limit: int,
    start: float = 0.0,
) -> int:
    """Write uint8 [frames, height, width, 3], each at ``start`` + k / fps. Return how many."""
    width, height = size
    n, last, last_time = 0, np.zeros((height, width, 3), np.uint8), None
    with out.open("wb") as file:

        def append(until: float) -> int:
            """Repeat the last picture as long as it was there. Return all frames."""
            m = n
            while m < limit and m / fps < until - start:
                file.write(np.ascontiguousarray(last).data)
                m += 1
            return m

        def write_header() -> None:  # which numpy pads for a longer first dimension
            head = {"descr": "|u1", "fortran_order": False, "shape": (n, height, width, 3)}
            np.lib.format.write_array_header_1_0(file, head)

        write_header()
        for time, frame in _decoded(path, "video"):
            n = append(time - 1e-6)
            last, last_time = _upright(frame, width, height), time
            if n >= limit:
                break
        else:
            if last_time is None:
                raise DataError(f"{path}: its video holds no frame")
            n = append(last_time + 1e-6)
        file.seek(0)
        write_header()
    return n


def _upright(frame: Any, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: the picture as players turn it, by the file's own rotation."""
    turns = round(frame.rotation / 90) % 4
    width, height = (height, width) if turns % 2 else (width, height)
    return np.rot90(frame.reformat(width=width, height=height, format="rgb24").to_ndarray(), turns)


def sound_features(
    path: pathlib.Path, rate: float, bands: int, *, start: float = 0.0
) -> np.ndarray:
    """float32 [times, bands]: log mel energies around ``start`` + k / rate, each band z-scored."""
    samples = _sound(path)
    skipped = round(start * SOUND_RATE)
    samples = samples[skipped:] if skipped >= 0 else np.pad(samples, (-skipped, 0))
    window, bank = np.hanning(1024).astype(np.float32), mel_bank(bands, 1024)
    padded = np.pad(samples, 512)
    n = math.floor(len(samples) / SOUND_RATE * rate)
    if not n:
        raise DataError(f"{path}: its sound is shorter than {1 / rate:g} s")
    log = np.empty((n, bands), np.float32)
    for k in range(n):
        begin = round(k * SOUND_RATE / rate)
        power = np.abs(np.fft.rfft(window * padded[begin : begin + 1024])) ** 2
        log[k] = np.log(bank @ power + 1e-6)
    return np.asarray((log - log.mean(0)) / np.maximum(log.std(0), 1e-6), np.float32)


def _sound(path: pathlib.Path) -> np.ndarray:
    """float32 [samples] at `SOUND_RATE` from the clock's zero, silent where no frame is."""
    av = foreign_files.package("av")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE)
    # [samples], not rounded: a frame of AAC at 44.1 kHz has 557.28 of them
    chunks, n = [np.zeros(0, np.float32)], 0.0
    for time, decoded in _decoded(path, "audio"):
        late = round(time * SOUND_RATE - n)
        if late > (MAX_GAP * SOUND_RATE if n else 0):
            chunks.append(np.zeros(late, np.float32))
            n += late
        decoded.pts = None  # the resampler would fill gaps in its own way
        chunks += [frame.to_ndarray()[0] for frame in resampler.resample(decoded)]
        n += decoded.samples * SOUND_RATE / decoded.sample_rate
    chunks += [frame.to_ndarray()[0] for frame in resampler.resample(None)] if n else []
    return np.concatenate(chunks)


class Clock(NamedTuple):
    zero: float  # [s] of its time stamps, at which its first stream begins
    starts: dict[str, float]  # kind of stream -> [s] from ``zero`` on
    length: float  # [s] from ``zero`` on; nan if the file does not say it


def clock(path: pathlib.Path) -> Clock:
    """Return the clock of a file's sound and pictures. Raises DataError."""
    with _open(path) as container:
        return _clock(container)


def _clock(container: Any) -> Clock:
    starts = {}
    for kind in ("audio", "video"):
        if (stream := _stream(container, kind)) and stream.start_time is not None:
            starts[kind] = float(stream.start_time * stream.time_base)
    zero = min(starts.values(), default=0.0)
    length = container.duration / 1e6 if container.duration else math.nan
    return Clock(zero, {kind: start - zero for kind, start in starts.items()}, length)


def mel_bank(bands: int, n: int) -> np.ndarray:
    """Return float32 [bands, n / 2 + 1]: triangles in 2595 log10(1 + f / 700), from 50 Hz."""
    low, high = (2595 * np.log10(1 + f / 700) for f in (50.0, SOUND_RATE / 2))
    edges = 700 * (10 ** (np.linspace(low, high, bands + 2) / 2595) - 1)
    f = np.arange(n // 2 + 1) * SOUND_RATE / n
    up = (f - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - f) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(np.minimum(up, down), 0).astype(np.float32)


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    av = foreign_files.package("av")
    try:
        with av.open(str(path)) as container:
            yield container
    except av.error.FFmpegError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from error


def _stream(container: Any, kind: str) -> Any:
    """Return the first stream of a kind that is no cover picture, or None."""
    streams = getattr(container.streams, kind)
    return next((one for one in streams if "attached_pic" not in str(one.disposition)), None)


def _decoded(path: pathlib.Path, kind: str) -> Iterator[tuple[float, Any]]:
    """Yield (seconds on the clock, frame). One without a time stamp follows the one before."""
    with _open(path) as container:
        if not (stream := _stream(container, kind)):
            raise DataError(f"{path} has no {kind}")
        zero, following = _clock(container).zero, 0.0
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            time = following if frame.time is None else frame.time - zero
            following = time + (
                1 / float(stream.average_rate or 25)
                if kind == "video"
                else frame.samples / frame.sample_rate
            )
            yield time, frame
