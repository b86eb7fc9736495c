"""Makes the codes of a manifest's recordings ahead of training, or turns codes back into sound.

    python -m tools.encode_audio manifest.json --codec codec.npz [--cache DIR] [--threads N]      # what training would do first
    python -m tools.encode_audio --listen clip.wav --codec codec.npz --out again.wav              # through the codec and back

Codes are kept where `loaders.chat_audio` looks for them: beside the recordings, or in --cache. Those that are there and newer
than their recording are left as they are. Ends with code 1 when a recording could not be encoded.
"""

import argparse
import pathlib
import sys
import time
import wave
from collections.abc import Sequence

import numpy as np

from loaders import _rust, chat_audio, chat_samples, codec
from loaders.base import DataError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.encode_audio", description=__doc__.splitlines()[0])
    parser.add_argument("manifest", nargs="?")
    parser.add_argument("--codec", required=True, help="a codec.npz, or module:function")
    parser.add_argument("--audio-root", default="", help="the folder that paths are relative to; default: the manifest's")
    parser.add_argument("--cache", default="", help="a folder for the codes; default: beside the recordings")
    parser.add_argument("--threads", type=int, default=0, help="default: one for each core")
    parser.add_argument("--codebooks", type=int, default=8, help="of module:function; default: 8")
    parser.add_argument("--codebook-size", type=int, default=1024, help="of module:function; default: 1024")
    parser.add_argument("--listen", metavar="AUDIO", help="a recording to hear as the codec hears it")
    parser.add_argument("--out", metavar="WAV", help="of --listen")
    args = parser.parse_args(argv)
    if (args.manifest is None) == (args.listen is None) or bool(args.listen) != bool(args.out):
        parser.error("give either a manifest, or --listen AUDIO --out WAV")
    try:
        return listen(args) if args.listen else encode(args)
    except (DataError, OSError, ValueError) as error:
        print(f"tools.encode_audio: {error}", file=sys.stderr)
        return 2


def encode(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    config = chat_audio.Config(
        manifest=args.manifest, codec=args.codec, audio_root=args.audio_root, cache=args.cache, threads=args.threads,
        codebooks=args.codebooks, codebook_size=args.codebook_size,
    )  # fmt: skip
    done, bad = chat_samples.encode_all(config, args.manifest)
    for name, reason in bad:
        print(f"{name}: {reason}")
    print(f"{done} recordings encoded, {len(bad)} could not be, in {time.perf_counter() - began:.1f} s")
    return 1 if bad else 0


def listen(args: argparse.Namespace) -> int:
    made = codec.open_codec(args.codec, codebooks=args.codebooks, size=args.codebook_size, frame_rate=codec.FRAME_RATE)
    if not isinstance(made, codec.Rvq):
        raise DataError(f"{args.codec} gives codes alone; --listen needs a codec.npz")
    samples, rate, _ = _rust.decode(pathlib.Path(args.listen).read_bytes())
    codes = made.encode(samples, rate)
    write_wav(args.out, codec.sound(made.decode(codes)))
    print(f"{args.out}: {codes.shape[1]} times of {len(codes)} codes, {codes.shape[1] / made.frame_rate:.2f} s")
    return 0


def write_wav(path: str | pathlib.Path, samples: np.ndarray, rate: int = codec.RATE) -> None:
    """16 bits, mono; what is louder than full scale is made quieter as a whole."""
    scaled = samples / max(1.0, float(np.abs(samples).max(initial=0)))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((scaled * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    sys.exit(main())
