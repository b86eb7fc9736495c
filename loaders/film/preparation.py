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
    sources = [args.video, *args.fmri]
    sources += [args.mask, args.codes, args.audio, args.embeddings, args.annotations]
    missing_files = [str(path) for path in sources if path and not path.is_file()]
    if missing_files:
        raise DataError(f"no such file: {', '.join(missing_files)}")
    _check_is_free(args.out)
    with atomic_write.folder(args.out) as partial:
        try:
            return _fill(partial, args)
        except DataError as error:
            texts = [text.replace(str(partial), str(args.out)) for text in error.listed]
            message = str(error).replace(str(partial), str(args.out))
            raise DataError(message, listed=texts) from error


def _check_is_free(out: pathlib.Path) -> None:
    """Raise DataError if something is at the path ``out`` already."""
    if out.is_dir():
        if any(out.iterdir()):
            raise DataError(f"{out} is not empty; choose another --out")
    elif out.exists():
        raise DataError(f"{out} is a file; choose another --out")


def _fill(partial: pathlib.Path, args: argparse.Namespace) -> str:
    start = args.film_start
    # Quick checks come first.
    tr, volumes, names = fmri.check(args.fmri, args.tr, args.volumes)
    text, text_since, text_note = segments.window_text(
        args.embeddings,
        args.annotations,
        columns=(args.start, args.end),
        slots=args.slots,
        tr=tr,
        volumes=volumes,
        cut=args.volumes is not None,
        start=start,
    )
    atomic_write.save(partial / "text.npy", np.ascontiguousarray(text))
    if args.codes:
        audio_kind = "codes"
        codes = segments.read_codes(args.codes)
        audio = _codes_from_start(codes, args)
    else:
        audio_kind = "features"
        audio = streams.sound_features(args.audio, args.code_rate, args.bands, start=start)
    atomic_write.save(partial / "audio.npy", np.ascontiguousarray(audio))
    (partial / "fmri").mkdir()
    dtype = np.dtype(args.dtype)
    n_constant = fmri.write(partial, args.fmri, names, args.mask, volumes, dtype)
    n_frames = streams.write_video(
        args.video,
        partial / "video.npy",
        args.fps,
        args.size,
        limit=math.ceil(volumes * tr * args.fps),
        start=start,
    )
    info = {
        "tr": tr,
        "fps": args.fps,
        "audio_rate": args.code_rate,
        "audio": audio_kind,
        "film_start": start,
        "subjects": names,
        "text_since": text_since.tolist(),
        "made_of": _path_arguments(args),
    }
    film_files.write(partial, info)
    # Read it as training will, or report the problem.
    config = multimodal.Config(path=str(partial), test_share=0)
    dataset_info = multimodal.dataset_info(config)
    constant_note = f" ({n_constant} constant voxels are 0)" if n_constant else ""
    summary = (
        f"{args.out}: {len(names)} viewers,"
        f" {volumes} volumes of {dataset_info['n_voxels']} voxels every {tr:g} s{constant_note};"
        f" {n_frames} frames, {dataset_info['n_frames']} in a window;"
        f" {len(audio)} times of {audio.shape[1]} {audio_kind},"
        f" {dataset_info['audio_frames']} in a window;"
        f" {text.shape[1]} values of text{text_note}"
    )
    sound_seconds = len(audio) / args.code_rate
    return "\n".join([summary, *_clock_differences(args, tr, volumes, sound_seconds)])


def _path_arguments(args: argparse.Namespace) -> dict[str, str]:
    paths = {}
    for name, value in vars(args).items():
        if isinstance(value, pathlib.Path):
            paths[name] = str(value)
    return paths


def _codes_from_start(codes: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """Return the codes from --film-start on. Raises DataError."""
    if args.film_start < 0:
        raise DataError(
            f"--film-start is {args.film_start:g}, and codes have none for silence before the film;"
            " give --audio"
        )
    n_skipped = round(args.film_start * args.code_rate)
    codes = codes[n_skipped:]
    if not len(codes):
        raise DataError(f"--film-start is {args.film_start:g}, after the end of {args.codes}")
    return codes


def _clock_differences(
    args: argparse.Namespace, tr: float, volumes: int, sound_seconds: float
) -> Iterator[str]:
    """Yield lines about streams and scans that begin or end more than a TR apart."""
    film = streams.clock(args.video)
    if len(film.starts) == 2:
        delay = film.starts["audio"] - film.starts["video"]
        if abs(delay) > tr:
            earlier = "picture"
            later = "sound"
            if delay < 0:
                earlier = "sound"
                later = "picture"
            yield (
                f"{args.video}: its {later} begins {abs(delay):.3f} s after its {earlier}, and is"
                " placed there"
            )
            if args.codes:
                yield (
                    f"{args.codes} is taken to begin with the film: check that it holds the"
                    f" {abs(delay):.3f} s, too"
                )
    for path in args.fmri:
        offset = fmri.offset(path)
        if abs(offset) > tr:
            yield (
                f"{path} says that it begins at {offset:g} s (toffset), which is not used: give"
                " --film-start"
            )
    lengths = {"its sound": sound_seconds, f"{volumes} volumes": volumes * tr}
    film_seconds = film.length - args.film_start
    if math.isfinite(film_seconds):
        lengths = {str(args.video): film_seconds, **lengths}
    if max(lengths.values()) - min(lengths.values()) > tr:
        listed = ", ".join(f"{name} {length:.1f} s" for name, length in lengths.items())
        yield (
            f"the lengths differ by more than a TR of {tr:g} s: {listed}; --film-start gives a"
            " scan's place in the film"
        )
