"""Makes the folder that loaders/film/multimodal.py reads, of a film and the brains of its viewers.

    jaxtrain prepare-giblet --out FOLDER --video film.m4v --fmri sub-01.nii.gz sub-02.nii.gz \\
        --codes codes.npz --annotations segments.xlsx --embeddings embeddings.npz

    --video        any film that FFmpeg decodes: frames at --fps (a frame stays until the next one comes), scaled to --size
    --fmri         one 4-D NIfTI file for each viewer; its name without ending is the viewer's. Further axes of one are dropped.
                   All have one grid, one TR and equally many volumes, of which --volumes takes the first. --mask is a NIfTI
                   of that grid; without it, a voxel counts when its standard deviation over time exceeds the 10th percentile
                   in at least half of the viewers
    --codes        npz with one array [codebooks, times] (or [1, codebooks, times]) of integers 0 … 1023, --code-rate a second
                   (default: 75, as EnCodec). Or:
    --audio        a file whose sound becomes features: the logarithms of --bands mel bands, --code-rate a second, z-scored
    --embeddings   npz with one array [segments, values]; --annotations (xlsx, or text with commas, semicolons or tabs) gives
                   each segment's time in its columns --start and --end: seconds, or times as 1:02:03.5 (with a point,
                   unless semicolons or tabs separate the columns). A volume has the
                   last --slots segments that touch the window before it, the latest last, zeros where there are fewer.
                   Without --annotations there is a row for each volume
    Arrays may also come as .npy.

Needs the packages of the extra `giblet` (PyAV, nibabel, openpyxl). The fMRI of one viewer is in memory at a time; video and
sound are streamed. FOLDER appears whole or not at all; mask.nii.gz in it puts predictions back into the brain.
"""

import argparse
import contextlib
import csv
import datetime
import functools
import importlib
import io
import math
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from jaxtrain.commands import arguments
from loaders.audio.recordings import tables
from loaders.base import DataError
from loaders.film import film_files, multimodal, scans
from loaders.io import atomic_write, files, machine

SOUND_RATE = 24_000  # [Hz] that sound is resampled to
MOST_SHEET = 64 << 20  # [bytes] of a workbook, unpacked, which openpyxl makes objects of
MOST_ROWS, MOST_CELLS = 1 << 20, 1 << 24  # of a sheet; Excel's have that many rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain prepare-giblet", __doc__)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="the folder to make")
    parser.add_argument("--video", required=True, type=pathlib.Path, help="any film that FFmpeg decodes")
    parser.add_argument("--fmri", required=True, nargs="+", type=pathlib.Path, help="one 4-D NIfTI file for each viewer")
    parser.add_argument("--mask", type=pathlib.Path, help="a NIfTI; default: voxels that vary")
    parser.add_argument("--codes", type=pathlib.Path, help="of the sound; or --audio")
    parser.add_argument("--audio", type=pathlib.Path, help="a file whose sound becomes features; or --codes")
    parser.add_argument("--embeddings", required=True, type=pathlib.Path, help="of segments or volumes")
    parser.add_argument("--annotations", type=pathlib.Path, help="CSV or xlsx; default: a row for each volume")
    parser.add_argument("--tr", type=float, help="[s] between volumes; default: what the NIfTI files say")
    parser.add_argument("--volumes", type=int, help="how many to take; default: all")
    parser.add_argument("--fps", type=float, default=25.0, help="frames a second; default: 25")
    parser.add_argument("--size", type=_size, default=(160, 90), metavar="WIDTHxHEIGHT", help="default: 160x90")
    parser.add_argument("--code-rate", type=float, default=75.0, help="[1/s] of codes, or of features; default: 75")
    parser.add_argument("--bands", type=int, default=8, help="mel bands of --audio; default: 8")
    parser.add_argument("--slots", type=int, default=3, help="segments of a volume; default: 3")
    parser.add_argument("--start", default="start", help="column of --annotations; default: start")
    parser.add_argument("--end", default="end", help="column of --annotations; default: end")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="of the fMRI; default: float16")
    args = parser.parse_args(argv)
    if (args.codes is None) == (args.audio is None):
        parser.error("give either --codes or --audio")
    for name in ("fps", "code_rate", "bands", "slots", "tr", "volumes"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected a positive, finite number")
    return arguments.run(functools.partial(_prepare, args), mistakes=(DataError, OSError))


def _prepare(args: argparse.Namespace) -> int:
    print(prepare(args))
    return 0


def prepare(args: argparse.Namespace) -> str:
    """Makes the folder. Returns a line about it. Raises DataError."""
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
    # What is quick to refuse comes first.
    tr, volumes, names = check_fmri(args.fmri, args.tr, args.volumes)
    text, since, note = window_text(args, tr, volumes)
    atomic_write.save(partial / "text.npy", np.ascontiguousarray(text))
    audio = read_codes(args.codes) if args.codes else sound_features(args.audio, args.code_rate, args.bands)
    atomic_write.save(partial / "audio.npy", np.ascontiguousarray(audio))
    (partial / "fmri").mkdir()
    constant = write_fmri(partial, args.fmri, names, args.mask, volumes, np.dtype(args.dtype))
    frames = write_video(args.video, partial / "video.npy", args.fps, args.size, limit=math.ceil(volumes * tr * args.fps))
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
    # Reads it as training will, or says what does not fit.
    facts = multimodal.facts(multimodal.Config(path=str(partial), test_share=0))
    return (
        f"{args.out}: {len(names)} viewers, {volumes} volumes of {facts['n_voxels']} voxels every {tr:g} s"
        f"{f' ({constant} constant voxels are 0)' if constant else ''}; {frames} frames, {facts['n_frames']} in a window; "
        f"{len(audio)} times of {audio.shape[1]} {info['audio']}, {facts['audio_frames']} in a window; "
        f"{text.shape[1]} values of text{note}"
    )


# fMRI.


def check_fmri(paths: Sequence[pathlib.Path], tr: float | None, volumes: int | None) -> tuple[float, int, list[str]]:
    """Reads the headers: TR [s], volumes to take, and the viewers' names. Raises DataError."""
    given: Any = "--tr"
    shapes, names = {}, [path.name.removesuffix(".gz").removesuffix(".nii") for path in paths]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"--fmri: the viewers {', '.join(twice)} are given twice")
    for path in paths:
        image = _nifti(path)
        shape, axis = _over_time(path, image)
        if image.get_data_dtype().kind not in "iuf":
            raise DataError(f"{path} holds {image.get_data_dtype()}; expected real numbers")
        shapes[path] = shape
        _same_place(path, image, paths[0])
        units = _read(path, image.header.get_xyzt_units)  # a code that stands for none is a KeyError
        unit = {"sec": 1.0, "msec": 1e-3, "usec": 1e-6}.get(units[1], 0.0)
        own_tr = unit * float(image.header.get_zooms()[axis])
        said = 0 < own_tr < math.inf  # many writers leave 1 there, and no unit
        if tr is None and not said:
            raise DataError(f"{path} does not say its TR with a unit; give --tr")
        tr, given = (own_tr, path) if tr is None else (tr, given)
        if said and abs(own_tr - tr) > 1e-3:
            raise DataError(f"{path} has a TR of {own_tr:g} s, and {given} says {tr:g} s; omit --tr, or correct the header")
    if len({shape[:3] for shape in shapes.values()}) > 1:
        raise DataError(f"--fmri: the grids differ: {', '.join(f'{p.name} {s[:3]}' for p, s in shapes.items())}")
    lengths = {shape[3] for shape in shapes.values()}
    if volumes is None and len(lengths) > 1:
        listed = ", ".join(f"{p.name} {s[3]}" for p, s in shapes.items())
        raise DataError(
            f"--fmri: the numbers of volumes differ ({listed}); take the first ones of all with --volumes={min(lengths)}"
        )
    if volumes and volumes > min(lengths):
        shortest = min(shapes, key=lambda path: shapes[path][3])
        raise DataError(f"--volumes={volumes}, and {shortest} has only {min(lengths)}")
    assert tr is not None  # given, or what the first file says
    return round(tr, 6), volumes or lengths.pop(), names


def _same_place(path: pathlib.Path, image: Any, first: pathlib.Path) -> None:
    """Raises DataError where voxels of ``image`` lie a tenth of a voxel or more from where the first viewer's are."""
    other = _nifti(first)
    if not all(int(x.header["qform_code"]) or int(x.header["sform_code"]) for x in (image, other)):
        return  # one of them does not say where it lies
    corners = np.array([*np.ndindex(2, 2, 2)]) * (np.array(image.shape[:3]) - 1)
    apart = corners @ (image.affine - other.affine)[:3, :3].T + (image.affine - other.affine)[:3, 3]
    if np.linalg.norm(apart, axis=1).max() > 0.1 * min(other.header.get_zooms()[:3]):
        raise DataError(
            f"{path} lies elsewhere in space than {first} (their affines differ); resample it to that grid, for example with "
            "nilearn.image.resample_to_img"
        )


def write_fmri(
    folder: pathlib.Path,
    paths: Sequence[pathlib.Path],
    names: Sequence[str],
    mask: pathlib.Path | None,
    volumes: int,
    dtype: Any,
) -> int:
    """fmri/<viewer>.npy and mask.nii.gz. Returns how many voxels of the mask are constant in a viewer."""
    nibabel = _package("nibabel")
    first = _nifti(paths[0])
    if mask:
        image = _nifti(mask)
        if image.shape[3:] == (1,):
            image = image.slicer[..., 0]
        if image.shape[:3] != first.shape[:3] or len(image.shape) != 3:
            raise DataError(f"{mask} has the shape {image.shape}, and the volumes {first.shape[:3]}")
        _same_place(mask, image, paths[0])
        inside = _read(mask, lambda: np.asanyarray(image.dataobj)) > 0
    else:
        votes = np.zeros(first.shape[:3])
        for path in paths:
            x = _volumes(path, volumes)
            spread = np.where(np.isfinite(x).all(3), np.nan_to_num(x, posinf=0, neginf=0).std(3), 0)
            votes += spread > np.percentile(spread, 10)
        inside = votes >= 0.5 * len(paths)
    if not inside.any():
        raise DataError(f"{mask or 'the mask of voxels that vary'} holds no voxel")
    constant = 0
    for path, name in zip(paths, names, strict=True):
        x = np.ascontiguousarray(_volumes(path, volumes)[inside].T)  # [volumes, voxels]
        if not np.isfinite(x).all():
            raise DataError(f"{path} has values that are not finite in {(~np.isfinite(x)).any(0).sum()} voxels of the mask")
        z = np.empty(x.shape, dtype)
        for start in range(0, x.shape[1], 4096):  # in float64, of some voxels at a time
            some = x[:, start : start + 4096].astype(np.float64)
            deviation = some.std(0)
            varies = (some.min(0) < some.max(0)) & (deviation > 0)  # a constant's is not 0 where its mean is rounded
            constant += int((~varies).sum())
            z[:, start : start + 4096] = np.where(varies, (some - some.mean(0)) / np.where(varies, deviation, 1), 0)
        atomic_write.save(folder / "fmri" / f"{name}.npy", z)
    nibabel.save(nibabel.Nifti1Image(inside.astype(np.uint8), first.affine), folder / "mask.nii.gz")
    return constant


def _over_time(path: pathlib.Path, image: Any) -> tuple[tuple[int, ...], int]:
    """The shape [x, y, z, time] of a scan, and which of its axes is time: some writers add axes of one. Raises DataError."""
    long = [axis for axis in range(3, len(image.shape)) if image.shape[axis] > 1]
    if len(image.shape) < 4 or len(long) > 1 or min(image.shape) < 1:
        raise DataError(
            f"{path} has the shape {image.shape}; expected x, y, z and time: choose one of the scans in it, for example with "
            "nibabel's image.slicer[..., 0]"
        )
    axis = long[0] if long else 3
    return (*image.shape[:3], image.shape[axis]), axis


def _volumes(path: pathlib.Path, n: int) -> np.ndarray:
    """float32 [x, y, z, n], or float64 where the file has that."""
    image = _nifti(path)
    shape, axis = _over_time(path, image)
    part = tuple(slice(None) if i < 3 else slice(n) if i == axis else 0 for i in range(len(image.shape)))
    dtype = np.float64 if image.get_data_dtype().itemsize > 4 else np.float32
    if (size := math.prod(shape[:3]) * n * np.dtype(dtype).itemsize) > (most := machine.most_memory()):
        raise DataError(f"{path} takes {size:,} bytes for {n} volumes, and this machine has {most:,}; take fewer: --volumes")
    return _read(path, lambda: np.asanyarray(image.dataobj[part], dtype))


def _nifti(path: pathlib.Path) -> Any:
    _package("nibabel")
    return scans.nifti(path)


def _read(path: pathlib.Path, reading: Callable[[], Any]) -> Any:
    """Returns what ``reading`` returns; whatever it raises is reported as a file that cannot be read (DataError)."""
    try:
        return reading()
    except (DataError, MemoryError):
        raise
    except Exception as error:  # libraries raise what they like for a broken file: zlib.error, BadZipFile, HeaderDataError, …
        raise DataError(f"{path} cannot be read: {files.said(error)}") from error


# Video and sound.


class _Npy:
    """A .npy file [n, …] that is written row by row, with n unknown until the end."""

    def __init__(self, path: pathlib.Path, shape: tuple[int, ...], dtype: Any):
        self._file, self._shape, self._dtype, self.n = path.open("wb"), shape, np.dtype(dtype), 0
        self._header()
        self._start = self._file.tell()

    def append(self, row: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(row, self._dtype).data)
        self.n += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Says n in the header; after an error, which comes from elsewhere, the file is only closed."""
        if kind is not None:
            with contextlib.suppress(OSError):  # of what a full disk did not take
                self._file.close()
            return
        with self._file:
            self._file.seek(0)
            self._header()
            assert self._file.tell() == self._start, "numpy pads a header for a longer first dimension"

    def _header(self) -> None:
        head = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.n, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, head)


def write_video(path: pathlib.Path, out: pathlib.Path, fps: float, size: tuple[int, int], *, limit: int) -> int:
    """uint8 [frames, height, width, 3]: the picture on the screen at k / fps, up to ``limit`` of them. Returns how many."""
    width, height = size
    with _Npy(out, (height, width, 3), np.uint8) as file:
        last, last_time = None, 0.0
        for time, frame in _decoded(path, "video"):
            picture = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
            # Until this one came, the one before was there.
            while last is not None and file.n < limit and file.n / fps < time - 1e-6:
                file.append(last)
            last, last_time = picture, time
            if file.n >= limit:
                break
        else:
            if last is None:
                raise DataError(f"{path}: its video holds no frame")
            while file.n < limit and file.n / fps <= last_time + 1e-6:
                file.append(last)
    return file.n


def sound_features(path: pathlib.Path, rate: float, bands: int) -> np.ndarray:
    """float32 [times, bands]: log mel energies around k / rate, each band z-scored."""
    av = _package("av")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE)
    frames = (frame for _, decoded in _decoded(path, "audio") for frame in resampler.resample(decoded))
    chunks = [frame.to_ndarray()[0] for frame in frames] + [frame.to_ndarray()[0] for frame in resampler.resample(None)]
    samples = np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
    window, bank = np.hanning(1024).astype(np.float32), mel_bank(bands, 1024)
    padded = np.pad(samples, 512)
    n = math.floor(len(samples) / SOUND_RATE * rate)
    if not n:
        raise DataError(f"{path}: its sound is shorter than {1 / rate:g} s")
    log = np.empty((n, bands), np.float32)
    for k in range(n):
        start = round(k * SOUND_RATE / rate)
        power = np.abs(np.fft.rfft(window * padded[start : start + 1024])) ** 2
        log[k] = np.log(bank @ power + 1e-6)
    return ((log - log.mean(0)) / np.maximum(log.std(0), 1e-6)).astype(np.float32)


def mel_bank(bands: int, n: int) -> np.ndarray:
    """float32 [bands, n / 2 + 1]: triangles of equal width on the mel scale 2595 log10(1 + f / 700), 50 Hz to half the rate."""
    low, high = (2595 * np.log10(1 + f / 700) for f in (50.0, SOUND_RATE / 2))
    edges = 700 * (10 ** (np.linspace(low, high, bands + 2) / 2595) - 1)
    f = np.arange(n // 2 + 1) * SOUND_RATE / n
    up = (f - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - f) / (edges[2:] - edges[1:-1])[:, None]
    return np.maximum(np.minimum(up, down), 0).astype(np.float32)


def _decoded(path: pathlib.Path, kind: str) -> Iterator[tuple[float, Any]]:
    """(seconds from the stream's beginning, frame) in order."""
    av = _package("av")
    try:
        with av.open(str(path)) as container:
            streams = getattr(container.streams, kind)
            if not streams:
                raise DataError(f"{path} has no {kind}")
            stream = streams[0]
            stream.thread_type = "AUTO"
            first = None
            for frame in container.decode(stream):
                first = frame.time if first is None else first
                yield (frame.time or 0.0) - (first or 0.0), frame
    except av.error.FFmpegError as error:
        raise DataError(f"{path} cannot be decoded: {error}") from error


# Codes, embeddings, annotations.


def read_codes(path: pathlib.Path) -> np.ndarray:
    """int16 [times, codebooks]."""
    codes = _only_array(path)
    codes = codes[0] if codes.ndim == 3 and len(codes) == 1 else codes
    if codes.ndim != 2 or not codes.size or not np.issubdtype(codes.dtype, np.integer):
        raise DataError(f"{path} holds {codes.dtype} {codes.shape}; expected integers [codebooks, times]")
    if codes.shape[0] > codes.shape[1]:
        raise DataError(
            f"{path} holds {codes.shape[0]} codebooks of {codes.shape[1]} times; expected [codebooks, times]: transpose it"
        )
    if codes.min() < 0 or codes.max() > film_files.LARGEST_CODE:
        raise DataError(f"{path} holds codes from {codes.min()} to {codes.max()}; expected 0 … {film_files.LARGEST_CODE}")
    return np.ascontiguousarray(codes.T).astype(np.int16)


def window_text(args: argparse.Namespace, tr: float, volumes: int) -> tuple[np.ndarray, np.ndarray, str]:
    """float32 [volumes, values]; for each volume the first one that shares a segment with it; and a note about both."""
    embeddings = _only_array(args.embeddings)
    if embeddings.ndim != 2 or not embeddings.size or not np.issubdtype(embeddings.dtype, np.floating):
        raise DataError(
            f"{args.embeddings} holds {embeddings.dtype} {embeddings.shape}; expected floating-point numbers [rows, values]"
        )
    with np.errstate(over="ignore"):
        embeddings = embeddings.astype(np.float32)
    if broken := int((~np.isfinite(embeddings)).any(1).sum()):
        raise DataError(f"{args.embeddings} has values that are not finite in float32, in {broken} of its rows")
    if not args.annotations:
        if len(embeddings) < volumes or (len(embeddings) > volumes and args.volumes is None):
            raise DataError(
                f"{args.embeddings} has {len(embeddings)} rows for {volumes} volumes; give one for each, or --annotations"
            )
        return embeddings[:volumes], np.arange(volumes), ""
    times = read_annotations(args.annotations, args.start, args.end)
    if len(times) != len(embeddings):
        raise DataError(f"{args.annotations} has {len(times)} segments, and {args.embeddings} {len(embeddings)} rows")
    text = np.zeros((volumes, args.slots, embeddings.shape[1]), np.float32)
    first = np.full(len(times), volumes)  # volume that has each segment
    since = np.arange(volumes)
    for i in range(volumes):
        # The first volume's window lies before the film, and holds what the film begins with.
        low, high = max(i - 1, 0) * tr, max(i, 1) * tr
        touching = np.flatnonzero((times[:, 0] < high) & ((times[:, 1] > low) | (times[:, 0] >= low)))  # or a moment in it
        latest = touching[np.argsort(times[touching, 0], kind="stable")][-args.slots :]
        text[i, args.slots - len(latest) :] = embeddings[latest]
        first[latest] = np.minimum(first[latest], i)
        since[i] = min([i, *first[latest]])
    without, unused = int((~text.any((1, 2))).sum()), int((first == volumes).sum())
    if unused == len(times):
        raise DataError(
            f"{args.annotations}: no segment touches the {volumes * tr:g} s of film; they lie from {times.min():g} to "
            f"{times.max():g} in {args.start} and {args.end}, which are seconds"
        )
    note = f" (none in {without} volumes; {unused} of {len(times)} segments are in no volume)"
    return text.reshape(volumes, -1), since, note if without or unused else ""


def read_annotations(path: pathlib.Path, start: str, end: str) -> np.ndarray:
    """float64 [segments, 2]: when each begins and ends [s]; a cell is a number of seconds, or a time as 1:02:03.5 or 02:03."""
    rows, separator = _read(path, lambda: _table(path))
    _, head = rows[0] if rows else (0, [])
    head = [str(cell).strip() for cell in head]
    columns = {name: _column(head, name) for name in (start, end)}
    if absent := [name for name, at in columns.items() if at is None]:
        raise DataError(f"{path} has no column {' and no '.join(absent)}; expected one of: {', '.join(head)} (--start, --end)")
    spans = []
    for number, row in rows[1:]:
        if separator and any(str(cell).strip() for cell in row[len(head) :]):
            raise DataError(
                f"{path}: row {number} has {len(row)} cells, and the header {len(head)}: {row}; put quotes around a cell that "
                f"holds the separator {separator!r}"
            )
        cells = [row[at] if at < len(row) else None for at in columns.values() if at is not None]
        if separator == "," and (commas := [cell for cell in cells if "," in str(cell)]):
            raise DataError(
                f"{path}: row {number} has {commas[0]!r}, and commas separate the columns, so that one in a number is unclear; "
                "write numbers with a point, or separate the columns by semicolons"
            )
        try:
            times = [_seconds(cell) for cell in cells]
        except (TypeError, ValueError):
            raise DataError(f"{path}: row {number} has no seconds, nor hh:mm:ss, in {start} and {end}: {row}") from None
        if not times[0] <= times[1]:
            raise DataError(f"{path}: row {number} ends at {times[1]:g} s, before it begins at {times[0]:g} s")
        spans.append(times)
    if not spans:
        raise DataError(f"{path} has no segment")
    return np.array(spans)


def _column(head: Sequence[str], name: str) -> int | None:
    """The place of a column of that name, in any case where none is spelt the same; None where there is none."""
    if name in head:
        return head.index(name)
    folded = [each.casefold() for each in head]
    return folded.index(name.casefold()) if name.casefold() in folded else None


def _table(path: pathlib.Path) -> tuple[list[tuple[int, list[Any]]], str]:
    """The rows of a table that hold anything, with their numbers from 1 on; and its separator, "" of a workbook."""
    if path.suffix.lower() == ".xlsx":
        return _sheet(path), ""
    text = tables.text_of(path)
    first, _, rest = text.partition("\n")
    said = tables.said_separator(first)
    separator = said or tables.separator(first)
    rows = enumerate(csv.reader(io.StringIO(rest if said else text), delimiter=separator), 2 if said else 1)
    return [(number, row) for number, row in rows if any(row)], separator


def _sheet(path: pathlib.Path) -> list[tuple[int, list[Any]]]:
    """The rows of a workbook's first sheet that hold anything, with their numbers. Raises DataError where it could grow."""
    openpyxl = _package("openpyxl")
    rows, cells = [], 0
    with files.regular(path) as file:
        files.check_archive(zipfile.ZipFile(file), path, most=MOST_SHEET, remedy="; save the sheet as CSV")
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # what it claims; rows would be filled up to that
        for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
            cells += len(row)
            if number > MOST_ROWS or cells > MOST_CELLS:
                raise DataError(
                    f"{path} has more than {MOST_ROWS:,} rows or {MOST_CELLS:,} cells, with the empty ones between those that "
                    "hold something; save the sheet as CSV"
                )
            if any(cell not in (None, "") for cell in row):
                rows.append((number, list(row)))
        book.close()
    return rows


def _seconds(cell: Any) -> float:
    """A cell of a table in seconds. Raises ValueError."""
    if isinstance(cell, datetime.timedelta):  # a workbook's
        return cell.total_seconds()
    if isinstance(cell, datetime.time):
        return datetime.timedelta(
            hours=cell.hour, minutes=cell.minute, seconds=cell.second, microseconds=cell.microsecond
        ).total_seconds()
    if not isinstance(cell, str):
        return float(cell)
    *higher, last = cell.strip().split(":")
    if len(higher) > 2 or not all(part.isdecimal() for part in higher) or (len(higher) == 2 and int(higher[1]) >= 60):
        raise ValueError(cell)
    seconds = tables.number(last)
    if seconds is None or (higher and not 0 <= seconds < 60):
        raise ValueError(cell)
    for place, part in enumerate(reversed(higher), start=1):
        seconds += int(part) * 60.0**place
    return seconds


def _only_array(path: pathlib.Path) -> np.ndarray:
    """The array of a .npy, or the one of two dimensions or more of an npz."""

    def read() -> dict[str, np.ndarray]:
        if zipfile.is_zipfile(path):
            return files.arrays(path, most=machine.most_memory())
        return {path.name: np.array(files.array(path))}

    arrays = _read(path, read)
    candidates = [array for array in arrays.values() if array.ndim >= 2]
    if len(candidates) > 1:
        candidates = [array for array in candidates if array.size > 1]  # a codec's scale may be there
    if len(candidates) != 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(f"{path} holds {shapes or 'nothing'}; expected one array of two dimensions")
    return candidates[0]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"needs the package {name}; install it with: pip install 'jaxtrain[giblet]'") from error


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected for example 160x90")
    return int(width), int(height)
