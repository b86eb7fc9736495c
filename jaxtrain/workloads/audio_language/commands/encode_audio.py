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
    is_one_task = (args.manifest is None) != (args.listen is None)
    if not is_one_task or bool(args.listen) != bool(args.out):
        parser.error("give either a manifest, or --listen AUDIO --out WAV")
    task = listen if args.listen else encode
    return arguments.run(functools.partial(task, args), errors=(OSError, ValueError))


def encode(args: argparse.Namespace) -> int:
    """Write the codes of ``args.manifest``. Return the exit code. Raises DataError."""
    start = time.perf_counter()
    config = chat_audio.Config(
        manifest=args.manifest,
        codec=args.codec,
        audio_root=args.audio_root,
        cache=args.cache,
        threads=args.threads,
        codebooks=args.codebooks,
        codebook_size=args.codebook_size,
    )
    n_encoded, n_cached, failures = chat_examples.encode_all(config, args.manifest)
    for name, reason in failures:
        print(f"{name}: {reason}")
    seconds = time.perf_counter() - start
    print(
        f"{n_encoded} recordings encoded, {n_cached} were there already, {len(failures)} could not"
        f" be encoded; {seconds:.1f} s"
    )
    return 1 if failures else 0


def listen(args: argparse.Namespace) -> int:
    """Write ``args.listen`` as the codec has it. Return the exit code. Raises ValueError."""
    rvq = codec.open_codec(
        args.codec, codebooks=args.codebooks, size=args.codebook_size, frame_rate=codec.FRAME_RATE
    )
    if not isinstance(rvq, codec.Rvq):
        raise DataError(
            f"--codec is {args.codec!r}, which gives codes alone; --listen needs a codec.npz"
        )
    content = pathlib.Path(args.listen).read_bytes()
    samples, rate, _ = _rust.decode(content)
    codes = rvq.encode(samples, rate)
    log_mel = rvq.decode(codes)
    codec.write_wav(args.out, codec.sound(log_mel))
    n_codebooks, n_times = codes.shape
    seconds = n_times / rvq.frame_rate
    print(f"{args.out}: {n_times} times of {n_codebooks} codes, {seconds:.2f} s")
    return 0
