"""Makes the folder that loaders/film/multimodal.py reads, of a film and the brains of its viewers.

    jaxtrain prepare-giblet --out FOLDER --video film.m4v --fmri sub-01.nii.gz sub-02.nii.gz \\
        --codes codes.npz --annotations segments.xlsx --embeddings embeddings.npz

    --video        any film that FFmpeg decodes: frames at --fps (a frame stays until the next one
                   comes), scaled to --size
    --fmri         one 4-D NIfTI file for each viewer. Its name without ending is the viewer's.
                   Further axes of one are dropped. All have one grid, one TR and equally many
                   volumes, of which --volumes takes the first. --mask is a NIfTI of that grid.
                   Without it, a voxel counts when its standard deviation over time exceeds the 10th
                   percentile in at least half of the viewers
    --codes        npz with one array [codebooks, times] (or [1, codebooks, times]) of integers 0 …
                   1023, --code-rate a second (default: 75, as EnCodec). Or:
    --audio        a file whose sound becomes features: the logarithms of --bands mel bands,
                   --code-rate a second, z-scored
    --embeddings   npz with one array [segments, values]; --annotations (xlsx, or text with commas,
                   semicolons or tabs) gives each segment's time in its columns --start and --end:
                   seconds, or times as 1:02:03.5 (with a point, unless semicolons or tabs separate
                   the columns). A volume has the last --slots segments that touch the window before
                   it, the latest last, with zeros for missing ones. Without --annotations there is
                   a row for each volume
    --film-start   the time of the film [s] at the first volume: for a scan that has a part of the
                   film, or that began before it (below 0). Film, sound and segments are shifted
                   together
    Arrays may also come as .npy.

Pictures and sound are on one clock, by their own time stamps: a stream that begins later than the
other has black pictures, or silence, until then. Begins and lengths that differ by more than a TR
are reported.

Needs the packages of the extra `giblet` (PyAV, nibabel, openpyxl). The fMRI of one viewer is in
memory at a time. Video and sound are streamed. FOLDER appears complete or not at all. Its
mask.nii.gz puts predictions back into the brain.
"""

import argparse
import functools
import math
import pathlib
from collections.abc import Sequence

from jaxtrain.commands import arguments
from loaders.film import preparation


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain prepare-giblet", __doc__)
    parser.add_argument(
        "--out", required=True, type=arguments.out_folder, help="the folder to make"
    )
    parser.add_argument(
        "--video", required=True, type=pathlib.Path, help="any film that FFmpeg decodes"
    )
    parser.add_argument(
        "--fmri",
        required=True,
        nargs="+",
        type=pathlib.Path,
        help="one 4-D NIfTI file for each viewer",
    )
    parser.add_argument("--mask", type=pathlib.Path, help="a NIfTI; default: voxels that vary")
    parser.add_argument("--codes", type=pathlib.Path, help="of the sound; or --audio")
    parser.add_argument(
        "--audio", type=pathlib.Path, help="a file whose sound becomes features; or --codes"
    )
    parser.add_argument(
        "--embeddings", required=True, type=pathlib.Path, help="of segments or volumes"
    )
    parser.add_argument(
        "--annotations", type=pathlib.Path, help="CSV or xlsx; default: a row for each volume"
    )
    parser.add_argument(
        "--tr", type=float, help="[s] between volumes; default: the NIfTI files' own"
    )
    parser.add_argument(
        "--film-start",
        type=float,
        default=0.0,
        help="[s] of the film at the first volume; default: 0",
    )
    parser.add_argument("--volumes", type=int, help="how many to take; default: all")
    parser.add_argument("--fps", type=float, default=25.0, help="frames a second; default: 25")
    parser.add_argument(
        "--size", type=_size, default=(160, 90), metavar="WIDTHxHEIGHT", help="default: 160x90"
    )
    parser.add_argument(
        "--code-rate", type=float, default=75.0, help="[1/s] of codes, or of features; default: 75"
    )
    parser.add_argument("--bands", type=int, default=8, help="mel bands of --audio; default: 8")
    parser.add_argument("--slots", type=int, default=3, help="segments of a volume; default: 3")
    parser.add_argument("--start", default="start", help="column of --annotations; default: start")
    parser.add_argument("--end", default="end", help="column of --annotations; default: end")
    parser.add_argument(
        "--dtype",
        choices=("float16", "float32"),
        default="float16",
        help="of the fMRI; default: float16",
    )
    args = parser.parse_args(argv)
    if (args.codes is None) == (args.audio is None):
        parser.error("give either --codes or --audio")
    for name in ("fps", "code_rate", "bands", "slots", "tr", "volumes"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            parser.error(
                f"--{name.replace('_', '-')} is {value}; expected a positive, finite number"
            )
    if not math.isfinite(args.film_start):
        parser.error(f"--film-start is {args.film_start}; expected a number of seconds")
    return arguments.run(functools.partial(_prepare, args), errors=(OSError,))


def _prepare(args: argparse.Namespace) -> int:
    print(preparation.prepare(args))
    return 0


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected for example 160x90")
    return int(width), int(height)
