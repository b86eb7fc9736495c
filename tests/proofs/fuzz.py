"""Coverage-guided fuzzing of the readers of other people's files: make fuzz, or

    python -m tests.proofs.fuzz                            every target for 5 minutes of CPU time
    python -m tests.proofs.fuzz flac wav --minutes 30      these
    python -m tests.proofs.fuzz --keep  and keep their corpora, minimised, in rust/fuzz/corpus

It builds rust/fuzz on the stable toolchain, with the coverage that libFuzzer reads
(RUSTC_BOOTSTRAP=1), and gives each target a corpus of small real files, made here by the encoders
of the extra `dev`, besides those of rust/fuzz/corpus. The assertions for every input
(rust/fuzz/fuzz_targets) are: no panic (symphonia's, which the loader turns into errors, are
listed), no abort, finite samples, and memory and CPU time within bounds that grow with its size.
Prints a row for each target, and exits with 1 if one has found something. The input is in the
folder that it names, and belongs into a test.

It needs cargo, a C++ compiler (libFuzzer is C++) and libfuzzer-sys, which cargo fetches.
"""

import argparse
import io
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import soundfile

from loaders.io import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]
FUZZ = ROOT / "rust" / "fuzz"
FLAGS = (
    "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
    " -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
    " -Cllvm-args=-sanitizer-coverage-trace-compares"
    " -Cllvm-args=-simplifycfg-branch-fold-threshold=0 -Ccodegen-units=1 --cfg fuzzing"
)
MEMORY = 2048  # [MB] of a target's process, beyond what it asserts itself
LARGEST = 64 << 10  # [bytes] of an input
KEPT = 30 << 10  # [bytes] of a target's corpus that is kept


class Target(NamedTuple):
    binary: str
    what: str


TARGETS = {
    "arrow": Target("arrow", "Arrow IPC streams and files"),
    "parquet": Target("parquet", "Parquet, its encodings and decompressors"),
    "wav": Target("decode", "WAV and its chunks"),
    "flac": Target("decode", "FLAC"),
    "mp3": Target("decode", "MP3"),
    "vorbis": Target("decode", "OGG Vorbis"),
    "opus": Target("decode", "OGG Opus"),
    "m4a": Target("decode", "M4A (AAC, ALAC), ALAC in CAF"),
    "other": Target("decode", "AIFF, CAF, ADPCM, G.711"),
    "sudoku": Target("sudoku", "boards"),
}
# (format, subtype) of soundfile
ENCODERS: Mapping[str, Sequence[tuple[str, str]]] = {
    "wav": [
        ("WAV", "PCM_16"),
        ("WAV", "PCM_24"),
        ("WAV", "PCM_U8"),
        ("WAV", "FLOAT"),
        ("WAVEX", "PCM_32"),
        ("WAV", "DOUBLE"),
    ],
    "flac": [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("FLAC", "PCM_S8")],
    "mp3": [("MP3", "MPEG_LAYER_III")],
    "vorbis": [("OGG", "VORBIS")],
    "opus": [("OGG", "OPUS")],
    "other": [
        ("AIFF", "PCM_16"),
        ("CAF", "PCM_16"),
        ("WAV", "MS_ADPCM"),
        ("WAV", "IMA_ADPCM"),
        ("WAV", "ULAW"),
        ("WAV", "ALAW"),
    ],
}
# (codec, container, layout of samples) of FFmpeg's libraries
AV_ENCODERS = {"m4a": [("aac", "mp4", "fltp"), ("alac", "mp4", "s16p"), ("alac", "caf", "s16p")]}


def av_encode(
    codec: str, container: str, wave: np.ndarray, rate: int, form: str, **options: str
) -> bytes:
    """Encode float32 [n, channels] by FFmpeg as ``form``, with a container's ``options``."""
    import av

    file = io.BytesIO()
    planes = wave.T if form == "fltp" else (wave.T * 32767).astype(np.int16)
    planes = np.ascontiguousarray(planes if form.endswith("p") else planes.T.reshape(1, -1))
    layout = "stereo" if wave.shape[1] == 2 else "mono"
    with av.open(file, "w", format=container, options=options) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(planes, format=form, layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    return file.getvalue()


def seeds(name: str) -> Iterator[bytes]:
    """Small real files of a target's format."""
    if name in ("arrow", "parquet"):
        for path in sorted((ROOT / "tests" / "data" / "shards").glob(f"*.{name}")):
            yield path.read_bytes()
    elif name == "sudoku":
        yield bytes(81)
        from loaders import _rust

        yield from (
            board.tobytes() for board in _rust.sudoku_generate(4, side=9, blanks=(20, 55))[0]
        )
        yield from (
            board.tobytes() * 6 for board in _rust.sudoku_generate(2, side=4, blanks=(4, 12))[0]
        )
    else:
        for rate, channels, seconds in (
            (48_000 if name == "opus" else 16_000, 1, 0.1),
            (48_000, 2, 0.05),
        ):
            t = np.arange(round(rate * seconds)) / rate
            noise = 0.1 * np.random.default_rng(rate).standard_normal((len(t), channels))
            wave = np.clip(0.5 * np.sin(2 * np.pi * 1000 * t)[:, None] + noise, -1, 1)
            for kind, subtype in ENCODERS.get(name, ()):
                file = io.BytesIO()
                soundfile.write(file, wave, rate, format=kind, subtype=subtype)
                yield file.getvalue()
            for codec, container, form in AV_ENCODERS.get(name, ()):
                yield av_encode(codec, container, wave.astype(np.float32), rate, form)


def build(target_folder: pathlib.Path) -> pathlib.Path:
    """Compiles the targets. Returns the folder of their binaries. Raises CalledProcessError."""
    host = re.search(
        r"host: (\S+)",
        subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout,
    )
    assert host, "rustc -vV names the host"
    # With --target, what runs while it is built (build scripts, macros) is built without coverage.
    command = [
        "cargo",
        "build",
        "--release",
        "--locked",
        "--manifest-path",
        str(FUZZ / "Cargo.toml"),
        "--target",
        host[1],
    ]
    environment = {
        **os.environ,
        "RUSTC_BOOTSTRAP": "1",
        "RUSTFLAGS": FLAGS,
        "CARGO_TARGET_DIR": str(target_folder),
    }
    subprocess.run(command, env=environment, check=True)
    return target_folder / host[1] / "release"


class Result(NamedTuple):
    runs: int
    coverage: int  # of the program's edges, those that were seen
    inputs: int  # of the corpus at its end
    seconds: float  # of CPU time
    found: tuple[pathlib.Path, ...]  # inputs that broke a bound
    # places in symphonia that panicked, which the loader answers with an error
    caught: tuple[str, ...]


def fuzz(
    name: str, binary: pathlib.Path, corpus: pathlib.Path, found: pathlib.Path, *, seconds: float
) -> Result:
    """Run a target for ``seconds`` of CPU time, or until it finds something.

    libFuzzer counts by the clock, which is faster on a busy machine. So it is started again for the
    remaining seconds. ``corpus``: the folder of inputs, which it extends. ``found``: the folder
    where it puts an input that breaks a bound.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds(name)):
        (corpus / f"seed-{i}").write_bytes(seed)
    if (kept := FUZZ / "corpus" / f"{name}.zip").exists():
        with zipfile.ZipFile(kept) as archive:
            archive.extractall(corpus)
    before, began, runs, text = _written(found), _children(), 0, ""
    new: tuple[pathlib.Path, ...] = ()
    while (left := seconds - (_children() - began)) > 0 and not new:
        command = [
            str(binary),
            f"-max_total_time={math.ceil(left)}",
            f"-max_len={LARGEST}",
            f"-rss_limit_mb={MEMORY}",
            "-timeout=60",
            # by the clock: what other programs keep waiting is not slow; targets assert CPU time
            "-report_slow_units=60",
            f"-artifact_prefix={found}/",
            "-print_final_stats=1",
            str(corpus),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text += (latest := done.stdout.decode(errors="replace"))
        new = tuple(sorted(path for path, _ in _written(found) - before))
        if done.returncode and not new:
            raise RuntimeError(
                f"{name} ended with code {done.returncode}, and left no input:\n{latest[-3000:]}"
            )
        runs += int(([0] + re.findall(r"^#(\d+)\s", latest, re.M))[-1])
    if new:
        print(text[-3000:], file=sys.stderr)
    coverage = re.findall(r"cov: (\d+)", text)
    caught = tuple(sorted(set(re.findall(r"^caught: .*?(symphonia-\S+)", text, re.M))))
    inputs = len(list(corpus.iterdir()))
    return Result(
        runs, int(coverage[-1]) if coverage else 0, inputs, _children() - began, new, caught
    )


def _written(folder: pathlib.Path) -> set[tuple[pathlib.Path, int]]:
    """Return files and when each was written: a recurring crash has its old name."""
    return {(path, path.stat().st_mtime_ns) for path in folder.iterdir()}


def _children() -> float:
    """Return the CPU time [s] of the processes that this one started and waited for."""
    return sum(os.times()[2:4])


def keep(name: str, binary: pathlib.Path, corpus: pathlib.Path) -> int:
    """Put the smallest inputs of that coverage, `KEPT` bytes, into rust/fuzz/corpus. Count them."""
    place = FUZZ / "corpus" / f"{name}.zip"
    place.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        subprocess.run(
            [binary, "-merge=1", "-timeout=60", folder, corpus], capture_output=True, check=True
        )
        size = 0
        for path in sorted(
            pathlib.Path(folder).iterdir(), key=lambda path: (path.stat().st_size, path.name)
        ):
            size += path.stat().st_size
            if size > KEPT:
                break
            archive.writestr(
                zipfile.ZipInfo(path.name[:16]), path.read_bytes(), zipfile.ZIP_DEFLATED
            )
        return len(archive.namelist())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of CPU time for each target; default: 5"
    )
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=machine.cache_folder("fuzz"),
        help="of builds and corpora",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the corpora, minimised, in rust/fuzz/corpus"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]!r}; expected one of: {', '.join(TARGETS)}")
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes is {args.minutes}; expected a number above 0")
    binaries = build(args.folder / "target")
    failed = False
    caught: tuple[str, ...] = ()
    print(
        "| target | what | CPU minutes | runs | edges | inputs | found"
        " |\n|---|---|---:|---:|---:|---:|---|",
        flush=True,
    )
    for name in args.targets or TARGETS:
        target, corpus = TARGETS[name], args.folder / "corpus" / name
        result = fuzz(
            name,
            binaries / target.binary,
            corpus,
            args.folder / "found" / name,
            seconds=60 * args.minutes,
        )
        found = ", ".join(map(str, result.found)) or "nothing"
        counts = (
            f"{result.seconds / 60:.1f} | {result.runs:,} | {result.coverage:,} | {result.inputs:,}"
        )
        print(f"| {name} | {target.what} | {counts} | {found} |", flush=True)
        caught += result.caught
        failed |= bool(result.found)
        if args.keep and not result.found:
            keep(name, binaries / target.binary, corpus)
    if caught:
        print(
            "symphonia panicked, and the loader said that the file is damaged:"
            f" {', '.join(sorted(set(caught)))}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
