"""Makes the folder that `loaders.film.multimodal` reads, of a film and its viewers' brains."""

import argparse
import math
import pathlib
from collections.abc import Iterator

import numpy as np

from loaders.film import film_files, fmri, multimodal, segments, streams
from loaders.io import atomic_write
from loaders.io.files import DataError


def prepare(args: argparse.Namespace) -> str:
    """Make the folder. Return a line about it. Raises DataError."""
    args.out = args.out.resolve()
    paths = [
        args.video,
        *args.fmri,
        args.mask,
        args.codes,
        args.audio,
        args.embeddings,
        args.annotations,
    ]
    if missing := [str(p) for p in paths if p and not p.is_file()]:
        raise DataError(f"no such file: {', '.join(missing)}")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(
            f"{args.out} is {'not empty' if args.out.is_dir() else 'a file'}; choose another --out"
        )
    with atomic_write.folder(args.out) as partial:
        try:
            return _fill(partial, args)
        except DataError as error:
            raise DataError(str(error).replace(str(partial), str(args.out))) from error


def _fill(partial: pathlib.Path, args: argparse.Namespace) -> str:
    # Quick checks come first.
    tr, volumes, names = fmri.check(args.fmri, args.tr, args.volumes)
    text, since, note = segments.window_text(
        args.embeddings,
        args.annotations,
        columns=(args.start, args.end),
        slots=args.slots,
        tr=tr,
        volumes=volumes,
        cut=args.volumes is not None,
        start=args.film_start,
    )
    atomic_write.save(partial / "text.npy", np.ascontiguousarray(text))
    if args.codes:
        audio = _codes_from(segments.read_codes(args.codes), args)
    else:
        audio = streams.sound_features(
            args.audio, args.code_rate, args.bands, start=args.film_start
        )
    atomic_write.save(partial / "audio.npy", np.ascontiguousarray(audio))
    (partial / "fmri").mkdir()
    constant = fmri.write(partial, args.fmri, names, args.mask, volumes, np.dtype(args.dtype))
    limit = math.ceil(volumes * tr * args.fps)
    frames = streams.write_video(
        args.video, partial / "video.npy", args.fps, args.size, limit=limit, start=args.film_start
    )
    info = {
        "tr": tr,
        "fps": args.fps,
        "audio_rate": args.code_rate,
        "audio": "codes" if args.codes else "features",
        "film_start": args.film_start,
        "subjects": names,
        "text_since": since.tolist(),
        "made_of": {
            name: str(value)
            for name, value in vars(args).items()
            if isinstance(value, pathlib.Path)
        },
    }
    film_files.write(partial, info)
    # Read it as training will, or report the problem.
    made = multimodal.dataset_info(multimodal.Config(path=str(partial), test_share=0))
    return (
        f"{args.out}: {len(names)} viewers, {volumes} volumes of {made['n_voxels']} voxels every"
        f" {tr:g} s{f' ({constant} constant voxels are 0)' if constant else ''}; {frames} frames,"
        f" {made['n_frames']} in a window; {len(audio)} times of {audio.shape[1]} {info['audio']},"
        f" {made['audio_frames']} in a window; {text.shape[1]} values of text{note}"
        + "".join(
            f"\n{line}"
            for line in _clock_differences(args, tr, volumes, len(audio) / args.code_rate)
        )
    )


def _codes_from(codes: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """Return the codes from --film-start on. Raises DataError."""
    if args.film_start < 0:
        raise DataError(
            f"--film-start is {args.film_start:g}, and codes have none for silence before the film;"
            " give --audio"
        )
    kept = codes[round(args.film_start * args.code_rate) :]
    if not len(kept):
        raise DataError(f"--film-start is {args.film_start:g}, after the end of {args.codes}")
    return kept


def _clock_differences(
    args: argparse.Namespace, tr: float, volumes: int, sound: float
) -> Iterator[str]:
    """Lines about streams and scans that begin or end more than a TR apart."""
    film = streams.clock(args.video)
    if len(film.starts) == 2 and abs(late := film.starts["audio"] - film.starts["video"]) > tr:
        first, second = ("sound", "picture") if late < 0 else ("picture", "sound")
        yield (
            f"{args.video}: its {second} begins {abs(late):.3f} s after its {first}, and is placed"
            " there"
        )
        if args.codes:
            yield (
                f"{args.codes} is taken to begin with the film: check that it holds the"
                f" {abs(late):.3f} s, too"
            )
    for path in args.fmri:
        if abs(offset := fmri.offset(path)) > tr:
            yield (
                f"{path} says that it begins at {offset:g} s (toffset), which is not used: give"
                " --film-start"
            )
    lengths = {
        f"{args.video}": film.length - args.film_start,
        "its sound": sound,
        f"{volumes} volumes": volumes * tr,
    }
    known = {name: length for name, length in lengths.items() if math.isfinite(length)}
    if max(known.values()) - min(known.values()) > tr:
        listed = ", ".join(f"{name} {length:.1f} s" for name, length in known.items())
        yield (
            f"the lengths differ by more than a TR of {tr:g} s: {listed}; --film-start gives a"
            " scan's place in the film"
        )
