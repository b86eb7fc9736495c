"""Makes the folder that `loaders.film.multimodal` reads, of a film and the brains of its viewers."""

import argparse
import math
import pathlib

import numpy as np

from loaders.film import film_files, fmri, media, multimodal, segments
from loaders.io import atomic_write
from loaders.io.files import DataError


def prepare(args: argparse.Namespace) -> str:
    """Make the folder. Return a line about it. Raises DataError."""
    args.out = args.out.resolve()
    paths = [args.video, *args.fmri, args.mask, args.codes, args.audio, args.embeddings, args.annotations]
    if missing := [str(p) for p in paths if p and not p.is_file()]:
        raise DataError(f"no such file: {', '.join(missing)}")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(f"{args.out} is {'not empty' if args.out.is_dir() else 'a file'}; choose another --out")
    with atomic_write.folder(args.out) as partial:
        try:
            return _fill(partial, args)
        except DataError as error:
            raise DataError(str(error).replace(str(partial), str(args.out))) from error


def _fill(partial: pathlib.Path, args: argparse.Namespace) -> str:
    # Quick checks come first.
    tr, volumes, names = fmri.check(args.fmri, args.tr, args.volumes)
    text, since, note = segments.window_text(
        args.embeddings, args.annotations, columns=(args.start, args.end), slots=args.slots, tr=tr, volumes=volumes,
        cut=args.volumes is not None,
    )  # fmt: skip
    atomic_write.save(partial / "text.npy", np.ascontiguousarray(text))
    audio = segments.read_codes(args.codes) if args.codes else media.sound_features(args.audio, args.code_rate, args.bands)
    atomic_write.save(partial / "audio.npy", np.ascontiguousarray(audio))
    (partial / "fmri").mkdir()
    constant = fmri.write(partial, args.fmri, names, args.mask, volumes, np.dtype(args.dtype))
    frames = media.write_video(args.video, partial / "video.npy", args.fps, args.size, limit=math.ceil(volumes * tr * args.fps))
    info = {
        "tr": tr,
        "fps": args.fps,
        "audio_rate": args.code_rate,
        "audio": "codes" if args.codes else "features",
        "subjects": names,
        "text_since": since.tolist(),
        "made_of": {name: str(value) for name, value in vars(args).items() if isinstance(value, pathlib.Path)},
    }
    film_files.write(partial, info)
    # Read it as training will, or report the problem.
    facts = multimodal.facts(multimodal.Config(path=str(partial), test_share=0))
    return (
        f"{args.out}: {len(names)} viewers, {volumes} volumes of {facts['n_voxels']} voxels every {tr:g} s"
        f"{f' ({constant} constant voxels are 0)' if constant else ''}; {frames} frames, {facts['n_frames']} in a window; "
        f"{len(audio)} times of {audio.shape[1]} {info['audio']}, {facts['audio_frames']} in a window; "
        f"{text.shape[1]} values of text{note}"
    )
