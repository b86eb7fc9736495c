"""Encodes a manifest's recordings before training, or one recording into codes and back.

    jaxtrain encode-audio MANIFEST --codec CODEC [--cache DIR] [--threads N]
    jaxtrain encode-audio --listen AUDIO --codec CODEC --out WAV

    jaxtrain encode-audio manifest.json --codec codec.npz  as training would do first
    jaxtrain encode-audio --listen clip.wav --codec codec.npz --out again.wav
        through the codec and back

Codes are written for `loaders.chat.chat_audio`: next to the recordings, or in
--cache. Codes that are newer than their
recording stay as they are. Ends with 1 when a recording could not be encoded.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Sequence

from jaxtrain.commands import arguments
from loaders import _rust
from loaders.base import DataError
from loaders.chat import chat_audio, chat_examples, codec


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain encode-audio", __doc__)
    parser.add_argument(
        "manifest",
        metavar="MANIFEST",
        nargs="?",
        help="a manifest of recordings (loaders/chat/chatml.py)",
    )
    parser.add_argument("--codec", required=True, help="a codec.npz, or module:function")
    parser.add_argument(
        "--audio-root",
        default="",
        help="the folder that paths are relative to; default: the manifest's",
    )
    parser.add_argument(
        "--cache", default="", help="a folder for the codes; default: next to the recordings"
    )
    parser.add_argument("--threads", type=int, default=0, help="default: one for each core")
    parser.add_argument("--codebooks", type=int, default=8, help="of module:function; default: 8")
    parser.add_argument(
        "--codebook-size", type=int, default=1024, help="of module:function; default: 1024"
    )
    parser.add_argument(
        "--listen", metavar="AUDIO", help="a recording to encode and decode, to listen to"
    )
    parser.add_argument("--out", type=arguments.out_file, metavar="WAV", help="of --listen")
    args = parser.parse_args(argv)
    if (args.manifest is None) == (args.listen is None) or bool(args.listen) != bool(args.out):
        parser.error("give either a manifest, or --listen AUDIO --out WAV")
    return arguments.run(
        functools.partial(listen if args.listen else encode, args), errors=(OSError, ValueError)
    )


def encode(args: argparse.Namespace) -> int:
    """Write the codes of ``args.manifest``. Return the exit code. Raises DataError."""
    began = time.perf_counter()
    config = chat_audio.Config(
        manifest=args.manifest,
        codec=args.codec,
        audio_root=args.audio_root,
        cache=args.cache,
        threads=args.threads,
        codebooks=args.codebooks,
        codebook_size=args.codebook_size,
    )
    done, there, bad = chat_examples.encode_all(config, args.manifest)
    for name, reason in bad:
        print(f"{name}: {reason}")
    seconds = time.perf_counter() - began
    print(
        f"{done} recordings encoded, {there} were there already, {len(bad)} could not be encoded;"
        f" {seconds:.1f} s"
    )
    return 1 if bad else 0


def listen(args: argparse.Namespace) -> int:
    """Write ``args.listen`` as the codec has it. Return the exit code. Raises ValueError."""
    made = codec.open_codec(
        args.codec, codebooks=args.codebooks, size=args.codebook_size, frame_rate=codec.FRAME_RATE
    )
    if not isinstance(made, codec.Rvq):
        raise DataError(
            f"--codec is {args.codec!r}, which gives codes alone; --listen needs a codec.npz"
        )
    samples, rate, _ = _rust.decode(pathlib.Path(args.listen).read_bytes())
    codes = made.encode(samples, rate)
    codec.write_wav(args.out, codec.sound(made.decode(codes)))
    print(
        f"{args.out}: {codes.shape[1]} times of {len(codes)} codes,"
        f" {codes.shape[1] / made.frame_rate:.2f} s"
    )
    return 0
