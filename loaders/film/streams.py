"""Frames and sound of a film, as arrays of a dataset. Both are streamed, by PyAV.

Both are on one clock. Its zero is the begin of the file's first stream, as players have it. A
stream that begins later has black pictures, or silence, until then. Every frame and sample lies
where its own time stamp says.
"""

import contextlib
import math
import pathlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from loaders.film import foreign_files
from loaders.io.files import DataError

SOUND_RATE = 24_000  # [Hz] that sound is resampled to
MAX_GAP = 0.05  # [s] between the time stamps of sound that is taken for rounding
MEL_WINDOW = 1024  # [samples]


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
    n_frames = 0
    picture = np.zeros((height, width, 3), np.uint8)
    picture_time = None
    with out.open("wb") as file:
        _write_header(file, (n_frames, height, width, 3))

        def repeat_picture(until: float) -> int:
            """Write the latest picture as long as it was shown. Return the number of all frames."""
            n_written = n_frames
            while n_written < limit and n_written / fps < until - start:
                file.write(np.ascontiguousarray(picture).data)
                n_written += 1
            return n_written

        for time, frame in _decoded(path, "video"):
            n_frames = repeat_picture(time - 1e-6)
            picture = _upright(frame, width, height)
            picture_time = time
            if n_frames >= limit:
                break
        else:
            if picture_time is None:
                raise DataError(f"{path}: its video holds no frame")
            n_frames = repeat_picture(picture_time + 1e-6)
        file.seek(0)
        _write_header(file, (n_frames, height, width, 3))
    return n_frames


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> None:
    """Write the header of an array, which numpy pads for a longer first dimension."""
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _upright(frame: Any, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: the picture as players turn it, by the file's own rotation."""
    quarter_turns = round(frame.rotation / 90) % 4
    if quarter_turns % 2:
        width, height = height, width
    picture = frame.reformat(width=width, height=height, format="rgb24")
    return np.rot90(picture.to_ndarray(), quarter_turns)


def sound_features(
    path: pathlib.Path, rate: float, bands: int, *, start: float = 0.0
) -> np.ndarray:
    """float32 [times, bands]: log mel energies around ``start`` + k / rate, each band z-scored."""
    samples = _sound(path)
    n_skipped = round(start * SOUND_RATE)
    if n_skipped >= 0:
        samples = samples[n_skipped:]
    else:
        samples = np.pad(samples, (-n_skipped, 0))
    seconds = len(samples) / SOUND_RATE
    n_times = math.floor(seconds * rate)
    if not n_times:
        raise DataError(f"{path}: its sound is shorter than {1 / rate:g} s")
    taper = np.hanning(MEL_WINDOW).astype(np.float32)
    bank = mel_bank(bands, MEL_WINDOW)
    padded = np.pad(samples, MEL_WINDOW // 2)
    log_energies = np.empty((n_times, bands), np.float32)
    for k in range(n_times):
        begin = round(k * SOUND_RATE / rate)
        window = taper * padded[begin : begin + MEL_WINDOW]
        spectrum = np.fft.rfft(window)
        power = np.abs(spectrum) ** 2
        energies = bank @ power
        log_energies[k] = np.log(energies + 1e-6)
    centred = log_energies - log_energies.mean(0)
    deviation = np.maximum(log_energies.std(0), 1e-6)
    return np.asarray(centred / deviation, np.float32)


def _sound(path: pathlib.Path) -> np.ndarray:
    """float32 [samples] at `SOUND_RATE` from the clock's zero, silent where no frame is."""
    av = foreign_files.package("av")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE)
    chunks = [np.zeros(0, np.float32)]
    # Not rounded: a frame of AAC at 44.1 kHz has 557.28 samples at `SOUND_RATE`.
    n_samples = 0.0
    for time, frame in _decoded(path, "audio"):
        gap = round(time * SOUND_RATE - n_samples)
        max_gap = MAX_GAP * SOUND_RATE if n_samples else 0
        if gap > max_gap:
            chunks.append(np.zeros(gap, np.float32))
            n_samples += gap
        frame.pts = None  # the resampler would fill gaps in its own way
        chunks += _resampled(resampler, frame)
        n_samples += frame.samples * SOUND_RATE / frame.sample_rate
    if n_samples:
        chunks += _resampled(resampler, None)  # the samples that it still holds
    return np.concatenate(chunks)


def _resampled(resampler: Any, frame: Any) -> list[np.ndarray]:
    return [part.to_ndarray()[0] for part in resampler.resample(frame)]


class Clock(NamedTuple):
    zero: float  # [s] of its time stamps, at which its first stream begins
    starts: dict[str, float]  # kind of stream -> [s] from ``zero`` on
    length: float  # [s] from ``zero`` on; nan if the file does not say it


def clock(path: pathlib.Path) -> Clock:
    """Return the clock of a file's sound and pictures. Raises DataError."""
    with _open(path) as container:
        return _clock(container)


def _clock(container: Any) -> Clock:
    stamps = {}
    for kind in ("audio", "video"):
        stream = _stream(container, kind)
        if stream and stream.start_time is not None:
            stamps[kind] = float(stream.start_time * stream.time_base)
    zero = min(stamps.values(), default=0.0)
    starts = {kind: stamp - zero for kind, stamp in stamps.items()}
    length = math.nan
    if container.duration:
        length = container.duration / 1e6  # it is in microseconds
    return Clock(zero, starts, length)


def mel_bank(bands: int, n: int) -> np.ndarray:
    """Return float32 [bands, n / 2 + 1]: triangles in 2595 log10(1 + f / 700), from 50 Hz."""
    lowest_mel = 2595 * np.log10(1 + 50.0 / 700)
    highest_frequency = SOUND_RATE / 2
    highest_mel = 2595 * np.log10(1 + highest_frequency / 700)
    mels = np.linspace(lowest_mel, highest_mel, bands + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    widths = (edges[1:] - edges[:-1])[:, None]
    frequencies = np.arange(n // 2 + 1) * SOUND_RATE / n
    rising = (frequencies - edges[:-2, None]) / widths[:-1]
    falling = (edges[2:, None] - frequencies) / widths[1:]
    return np.maximum(np.minimum(rising, falling), 0).astype(np.float32)


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
    for stream in getattr(container.streams, kind):
        if "attached_pic" not in str(stream.disposition):
            return stream
    return None


def _decoded(path: pathlib.Path, kind: str) -> Iterator[tuple[float, Any]]:
    """Yield (seconds on the clock, frame). One without a time stamp follows the one before."""
    with _open(path) as container:
        stream = _stream(container, kind)
        if not stream:
            raise DataError(f"{path} has no {kind}")
        zero = _clock(container).zero
        stream.thread_type = "AUTO"
        next_time = 0.0
        for frame in container.decode(stream):
            time = next_time if frame.time is None else frame.time - zero
            if kind == "video":
                frame_rate = stream.average_rate or 25
                duration = 1 / float(frame_rate)
            else:
                duration = frame.samples / frame.sample_rate
            next_time = time + duration
            yield time, frame
