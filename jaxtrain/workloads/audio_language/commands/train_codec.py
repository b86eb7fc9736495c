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
import sys
import time
from collections.abc import Sequence

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
    began = time.perf_counter()
    clips = sources(args.sound)
    held = order.held_out(np.arange(len(clips)), args.test_share)
    parts = []
    for of_test in (False, True):
        some = [source for source, h in zip(clips, held, strict=True) if h == of_test]
        x, bad = codec.stacked(some, limit=args.frames, seed=args.seed)
        for name, reason in bad:
            print(f"warning: {name} is skipped: {reason}", file=sys.stderr)
        parts.append(x)
    made = codec.train(
        parts[0],
        codebooks=args.codebooks,
        size=args.size,
        components=args.components,
        rounds=args.rounds,
        seed=args.seed,
    )
    made.save(args.out)
    lines = [
        f"{args.out}: {args.codebooks} codebooks of {args.size}, {codec.FRAME_RATE:g} times a"
        f" second, from {len(parts[0]):,} times of {int((~held).sum())} recordings, in"
        f" {time.perf_counter() - began:.0f} s"
    ]
    columns = [codec.errors(made, x) for x in parts if len(x)]
    names = ("learned from", "held out")[: len(columns)]
    lines += [f"{'log-mel error after':>20}" + "".join(f"{name:>16}" for name in names)]
    lines += [f"{'the mean alone':>20}" + "".join(f"{alone:16.3f}" for _, alone in columns)]
    for k in range(args.codebooks):
        lines += [
            f"{f'{k + 1} codebooks':>20}" + "".join(f"{each[k]:16.3f}" for each, _ in columns)
        ]
    return "\n".join(lines)


def sources(paths: Sequence[str]) -> list[codec.Source]:
    """Find recordings of files, folders, manifests, each once. Raises DataError: none."""
    by_name: dict[str, codec.Source] = {}
    for text in paths:
        path = files_lib.expanded(text)
        if path.suffix == ".json":
            root = path.parent
            for example in chatml.read_manifest(path):
                try:
                    clips = [
                        piece.clip for piece in chatml.render(example) if piece.clip is not None
                    ]
                except chatml.ExampleError:
                    continue
                by_name |= {
                    str(source): source
                    for source in (chat_examples.source_of(clip, root) for clip in clips)
                }
            continue
        files = (
            sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
            if path.is_dir()
            else [path]
        )
        if not path.exists():
            raise DataError(
                f"{path} does not exist; name audio files, folders of them, or manifests"
            )
        for file in files if path.is_dir() else ():
            remedy = "; name that file itself, or the folder that it lies in"
            files_lib.inside(path, str(file.relative_to(path)), remedy=remedy)
        by_name |= {str(file): codec.Source(file) for file in files}
    if not by_name:
        raise DataError(
            f"no recordings in {', '.join(paths)}; expected files that end in one of:"
            f" {', '.join(SUFFIXES)}"
        )
    return list(by_name.values())
