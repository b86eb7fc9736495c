"""Prepares recordings for fast training: decoded, mono, at the front end's rate, 16 bits.

    jaxtrain prepare INDEX --out DIR             an index of jaxtrain index
    jaxtrain prepare SHARDS --out DIR --packed   Arrow or Parquet shards; a third smaller
    jaxtrain prepare INDEX --out DIR --part 0/4  one of four processes that share DIR

Rerun the same command to continue. Labels, rows and their order stay. Rows are those of the source
within the rounding to 16 bits. A crop of another rate begins at the nearest prepared sample.
Train on the result with the other fields as before:

    jaxtrain train --config=xcm --config.data.train=DIR

An hour takes 230 MB at 32 kHz. A recording that cannot be decoded whole is copied as it is.
"""

import functools
import re
import sys
from collections.abc import Sequence

from jaxtrain.commands import arguments

SHOWN = 10  # recordings that are copied as they are, with their reasons


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain prepare", __doc__)
    parser.add_argument(
        "source", metavar="SOURCE", help="index, or shards: folder, glob or address"
    )
    parser.add_argument(
        "--out",
        type=arguments.out_folder,
        required=True,
        metavar="DIR",
        help="folder to make, or to complete",
    )
    parser.add_argument(
        "--packed", action="store_true", help="pack samples without loss; they are read more slowly"
    )
    parser.add_argument(
        "--sample-rate",
        type=int,
        default=32_000,
        metavar="HZ",
        help="of the front end; default: 32000",
    )
    parser.add_argument(
        "--time-expansion",
        type=float,
        default=1.0,
        metavar="X",
        help="times slower than life that recordings are; default: 1",
    )
    parser.add_argument(
        "--channel",
        type=int,
        default=-1,
        help="of rows that name none, from 0; default: -1, the mean",
    )
    parser.add_argument(
        "--audio-root",
        default="",
        metavar="FOLDER",
        help="of recordings that shards name, and do not hold",
    )
    parser.add_argument(
        "--follow-links", action="store_true", help="links may lead out of the folders of the data"
    )
    parser.add_argument(
        "--part",
        default="0/1",
        metavar="K/N",
        help="make every N-th recording or shard, from number K",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="that decode; default: one for each core"
    )
    args = parser.parse_args(argv)
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", args.part)
    if not match or not int(match[1]) < int(match[2]):
        parser.error(
            f"--part is {args.part!r}; expected K/N with K from 0 to N - 1, for example 0/4"
        )
    if not 1_000 <= args.sample_rate <= 768_000:
        parser.error(f"--sample-rate is {args.sample_rate}; expected 1000 to 768000 Hz")
    if not 0 < args.time_expansion < 1e6:
        parser.error(f"--time-expansion is {args.time_expansion:g}; expected a number above 0")
    if not -1 <= args.channel < 1 << 15:
        parser.error(f"--channel is {args.channel}; expected a number from 0, or -1 for the mean")
    if not 0 <= args.threads <= 1024:
        parser.error(f"--threads is {args.threads}; expected 0 to 1024")

    from loaders.audio import prepared

    settings = prepared.Settings(args.sample_rate, args.time_expansion, args.channel, args.packed)
    counts = prepared.prepare(
        args.source,
        args.out,
        settings,
        part=(int(match[1]), int(match[2])),
        threads=args.threads,
        note=functools.partial(print, file=sys.stderr),
        audio_root=args.audio_root,
        links=args.follow_links,
    )
    for line in counts.kept[:SHOWN]:
        print(f"copied as it is: {line}", file=sys.stderr)
    if len(counts.kept) > SHOWN:
        n_hidden = len(counts.kept) - SHOWN
        print(f"and {n_hidden} more; --errors FILE lists every one", file=sys.stderr)
    arguments.list_errors(counts.kept)
    if counts.clipped:
        print(
            f"{counts.clipped} recordings have samples beyond full scale, which were clipped",
            file=sys.stderr,
        )
    print(
        f"{args.out}: {counts.made} prepared now, {counts.found} before, {len(counts.kept)} of them"
        f" copied as they are; {counts.bytes / 1e6:,.1f} MB"
    )
    if counts.missing:
        print(f"{counts.missing} are left to the other parts, or to rerun without --part")
    return 0
