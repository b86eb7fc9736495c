"""Learns an audio codec (loaders/chat/codec.py), and prints how well it reconstructs others.

It does so for each of its codebooks.

    jaxtrain train-codec CODEC.npz SOUND … [--codebooks 8] [--size 1024] [--frames 200000]

    jaxtrain train-codec codec.npz sounds/ manifest.json

SOUND are audio files (WAV, FLAC, MP3, OGG, Opus), folders of them, or manifests
(loaders/chat/chatml.py). A share of the recordings (--test-share) is kept apart to measure on. The
error is the root mean square of log-mel values, in nats of power (0.23 is 1 dB), after one
codebook, two, and so on. Of ESC-10 with the defaults, 5.43 with none, then 1.61, 1.38, 1.27, 1.21,
1.16, 1.12, 1.10, 1.07 (learned from 346 of the 400 recordings, 25 s on two cores).
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.commands import arguments
from loaders import order
from loaders.base import DataError
from loaders.chat import chat_examples, chatml, codec
from loaders.io import files as files_lib

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga")


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain train-codec", __doc__)
    parser.add_argument("out", type=arguments.out_file, metavar="CODEC.npz")
    parser.add_argument(
        "sound", metavar="SOUND", nargs="+", help="audio files, folders of them, manifests"
    )
    parser.add_argument("--codebooks", type=arguments.positive, default=8, help="default: 8")
    parser.add_argument(
        "--size", type=arguments.positive, default=1024, help="codes of each; default: 1024"
    )
    parser.add_argument(
        "--components",
        type=arguments.positive,
        default=128,
        help="principal components of four frames; default: 128",
    )
    parser.add_argument(
        "--rounds", type=arguments.positive, default=15, help="of k-means; default: 15"
    )
    parser.add_argument(
        "--frames",
        type=arguments.positive,
        default=200_000,
        help="times (40 ms) to learn from, at most; default: 200000",
    )
    parser.add_argument(
        "--test-share", type=float, default=0.1, help="of the recordings; default: 0.1"
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")
    args = parser.parse_args(argv)
    print(train(args))
    return 0


def train(args: argparse.Namespace) -> str:
    """Write the codec. Return a table of its errors. Raises DataError."""
    start = time.perf_counter()
    recordings = sources(args.sound)
    numbers = np.arange(len(recordings))
    is_held_out = order.held_out(numbers, args.test_share)
    train_numbers = np.flatnonzero(~is_held_out)
    test_numbers = np.flatnonzero(is_held_out)
    train_vectors = _vectors([recordings[i] for i in train_numbers], args)
    test_vectors = _vectors([recordings[i] for i in test_numbers], args)
    rvq = codec.train(
        train_vectors,
        codebooks=args.codebooks,
        size=args.size,
        components=args.components,
        rounds=args.rounds,
        seed=args.seed,
    )
    rvq.save(args.out)
    seconds = time.perf_counter() - start
    summary = (
        f"{args.out}: {args.codebooks} codebooks of {args.size}, {codec.FRAME_RATE:g} times a"
        f" second, from {len(train_vectors):,} times of {len(train_numbers)} recordings, in"
        f" {seconds:.0f} s"
    )
    table = _table(rvq, {"learned from": train_vectors, "held out": test_vectors})
    return "\n".join([summary, *table])


def _vectors(recordings: Sequence[codec.Source], args: argparse.Namespace) -> np.ndarray:
    """Draw vectors [N, 512] of recordings, and print a warning of each broken one."""
    x_nv, broken = codec.stacked(recordings, limit=args.frames, seed=args.seed)
    for name, reason in broken:
        print(f"warning: {name} is skipped: {reason}", file=sys.stderr)
    return x_nv


def _table(rvq: codec.Rvq, vectors: Mapping[str, np.ndarray]) -> list[str]:
    """Return the lines of a table of errors, with a column for each name that has vectors."""
    header = f"{'log-mel error after':>20}"
    mean_row = f"{'the mean alone':>20}"
    rows = [f"{f'{k + 1} codebooks':>20}" for k in range(rvq.codebooks)]
    for name, x_nv in vectors.items():
        if not len(x_nv):
            continue
        errors, error_of_mean = codec.errors(rvq, x_nv)
        header += f"{name:>16}"
        mean_row += f"{error_of_mean:16.3f}"
        for k, error in enumerate(errors):
            rows[k] += f"{error:16.3f}"
    return [header, mean_row, *rows]


def sources(paths: Sequence[str]) -> list[codec.Source]:
    """Find recordings of files, folders, manifests, each once. Raises DataError: none."""
    by_name: dict[str, codec.Source] = {}
    for text in paths:
        path = files_lib.expanded(text)
        if path.suffix == ".json":
            recordings = _of_manifest(path)
        elif path.is_dir():
            recordings = _of_folder(path)
        elif path.exists():
            recordings = [codec.Source(path)]
        else:
            raise DataError(
                f"{path} does not exist; name audio files, folders of them, or manifests"
            )
        for source in recordings:
            by_name[str(source)] = source
    if not by_name:
        raise DataError(
            f"no recordings in {', '.join(paths)}; expected files that end in one of:"
            f" {', '.join(SUFFIXES)}"
        )
    return list(by_name.values())


def _of_manifest(path: pathlib.Path) -> list[codec.Source]:
    """Return the recordings of a manifest's examples, as far as they are conversations."""
    recordings = []
    for example in chatml.read_manifest(path):
        try:
            clips = chatml.clips_of(chatml.render(example))
        except chatml.ExampleError:
            continue
        for clip in clips:
            recordings.append(chat_examples.source_of(clip, path.parent))
    return recordings


def _of_folder(folder: pathlib.Path) -> list[codec.Source]:
    """Return the audio files below a folder. Raises FileError for one that a link leads out to."""
    recordings = []
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() in SUFFIXES:
            name = str(file.relative_to(folder))
            remedy = "; name that file itself, or the folder that it lies in"
            files_lib.inside(folder, name, remedy=remedy)
            recordings.append(codec.Source(file))
    return recordings
