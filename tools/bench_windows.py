"""The cost of a window out of a long file, by codec.

python -m tools.bench windows [--hours=2] [--windows=20] [--out=FOLDER]

Writes a recording of each kind, then reads windows of 5 s at random places of it, three ways in
turn: with the loader's decoders, as a slice of a whole decode, and with soundfile's seek. Prints
the CPU time of a window (user and system, which other processes on the machine hardly change), that
of the same window at the start, and the largest difference from the whole decode. A first window
may read an index for later ones (MP3 of a variable bit rate): it is listed apart.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import soundfile

from loaders import _rust

RATE, SECONDS = 32_000, 5
KINDS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "WAV": ("WAV", None, {}),
    "FLAC": ("FLAC", None, {}),
    "Vorbis": ("OGG", "VORBIS", {}),
    "Opus": ("OGG", "OPUS", {}),
    "MP3, constant": ("MP3", None, {"bitrate_mode": "CONSTANT"}),
    "MP3, variable": ("MP3", None, {"bitrate_mode": "VARIABLE", "compression_level": 0.5}),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder that keeps the recordings; default: none"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(
            "CPU milliseconds of a window of 5 s      ours: first  at start  anywhere   whole"
            " decode  soundfile's seek  off by"
        )
        for name in KINDS:
            measure(name, write(folder, name, args.hours), args.windows)


def write(folder: pathlib.Path, name: str, hours: float) -> pathlib.Path:
    """Write noise under a swell, minute by minute, unless it is there."""
    kind, subtype, options = KINDS[name]
    path = folder / f"{name.replace(', ', '-').lower()}-{hours:g}h"
    if not path.exists():
        rng = np.random.default_rng(0)
        rate = 48_000 if name == "Opus" else RATE  # that it always decodes to
        with soundfile.SoundFile(
            path, "w", rate, 1, subtype=subtype, format=kind, **options
        ) as file:
            for _ in range(round(hours * 3600)):
                file.write((rng.standard_normal(rate) * rng.uniform(0.003, 0.1)).astype(np.float32))
    return path


def cpu(action: Callable[[], object]) -> float:
    """Return the CPU time of a call in milliseconds."""
    begin = time.process_time()
    action()
    return 1e3 * (time.process_time() - begin)


def measure(name: str, path: pathlib.Path, n: int) -> None:
    """Print the line of one recording."""
    data = path.read_bytes()
    whole = np.zeros(0, np.float32)

    def decode() -> None:
        nonlocal whole
        whole = _rust.decode(data)[0]

    entire = None if name.startswith("MP3, variable") else cpu(decode)
    rate, frames, *_ = _rust.recording_info(path)
    length = SECONDS * rate
    places = np.random.default_rng(1).integers(0, frames - length, n).tolist()
    first = cpu(lambda: _rust.decode(data, frames - length - 1000, length))
    if entire is None:
        entire = cpu(decode)
    start = cpu(lambda: [_rust.decode(data, k, length) for k in range(n)]) / n
    anywhere = cpu(lambda: [_rust.decode(data, place, length) for place in places]) / n

    def theirs() -> None:
        with soundfile.SoundFile(path) as file:
            for place in places:
                file.seek(place)
                file.read(length, dtype="float32")

    seek = cpu(theirs) / n
    off = max(
        abs(_rust.decode(data, place, length)[0] - whole[place : place + length]).max()
        for place in places
    )
    print(
        f"{name:38s} {first:13.1f} {start:9.1f} {anywhere:9.1f} {entire:15.0f} {seek:17.1f}"
        f" {off:8.1e}"
    )


if __name__ == "__main__":
    main()
