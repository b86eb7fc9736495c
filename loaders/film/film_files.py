"""A film and the viewers' brain activity, as files.

The stimulus is stored once, and fMRI once for each viewer.

FOLDER/                  made by `jaxtrain prepare-giblet` (or by `write`)
  dataset.json           {"version": 1, "tr": seconds between volumes, "fps": frames/s of the video,
                         "audio_rate": times/s of the audio, "audio": "codes" or "features",
                         "subjects": [names], "files": {name: sha256} (a folder made by hand may
                         lack it), "text_since": [for each volume the first one whose row of
                         text.npy shares a segment with its own]} (without text_since, no two rows
                         share one)
  video.npy              uint8 [frames, height, width, 3], RGB
  audio.npy              int16 [times, codebooks], codes of 0 … 1023; or float16/32 [times,
                         features]
  text.npy               float16/32 [volumes, values]: the embeddings that belong to the window
                         before each volume
  fmri/<subject>.npy     float16/32 [volumes, voxels], every voxel z-scored over the volumes
"""

import functools
import hashlib
import json
import math
import mmap
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.base import DataError
from loaders.io import atomic_write, checks, files
from loaders.io import content as content_lib

VERSION = 1
LARGEST_CODE = 1023  # of a codebook
PIECE = 64 << 20  # [bytes] that are checked at a time
FLOATS = (np.float16, np.float32)
AUDIO = {"codes": (np.int16,), "features": FLOATS}


class Film(NamedTuple):
    """A folder, mapped. `release` gives the read pages back to the kernel."""

    info: Mapping[str, Any]
    video: np.ndarray
    audio: np.ndarray
    text: np.ndarray
    fmri: tuple[np.ndarray, ...]  # of the subjects that are read
    subjects: tuple[str, ...]
    folder: str

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays that are read, by the names of their files."""
        arrays = (self.video, self.audio, self.text, *self.fmri)
        return dict(zip(_array_names(self.subjects), arrays, strict=True))

    @property
    def n_volumes(self) -> int:
        return len(self.text)

    def release(self) -> None:
        """Give the mapped pages back, so that a process holds a batch and not the film."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return  # not on every system
        for array in (self.video, self.audio, self.text, *self.fmri):
            base: Any = array.base
            if isinstance(base, mmap.mmap):
                base.madvise(mmap.MADV_DONTNEED)


class Windows(NamedTuple):
    """The window of each volume in a stream (the video, or the audio)."""

    rate: float  # [1/s]
    length: int
    tr: float

    def stop(self, volume: np.ndarray | int) -> Any:
        """One past the last sample before t = volume · tr."""
        samples = np.asarray(volume) * self.tr * self.rate
        return np.ceil(samples - 1e-6).astype(np.int64)

    def start(self, volume: np.ndarray | int) -> Any:
        return self.stop(volume) - self.length


def windows(info: Mapping[str, Any]) -> tuple[Windows, Windows]:
    """Return the windows of video and of audio, by the entries of dataset.json."""
    tr = info["tr"]
    fps = info["fps"]
    audio_rate = info["audio_rate"]
    n_frames = math.ceil(tr * fps - 1e-6)
    n_times = math.floor(tr * audio_rate + 1e-6)
    return Windows(fps, n_frames, tr), Windows(audio_rate, n_times, tr)


def open_folder(
    path: str | os.PathLike[str], subjects: tuple[str, ...] = (), *, links: bool = False
) -> Film:
    """Map a folder, once in a process and again after it was replaced.

    ``subjects``: names of the viewers to read; empty = all. ``links``: whether links in the folder
    may lead out of it. Raises DataError: files that are missing, or do not fit together.
    """
    try:
        folder = files.expanded(path).absolute()
        stat = (folder / "dataset.json").stat()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        return _open_once(str(folder), subjects, version, links)
    except OSError as error:
        raise DataError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=4)
def _open_once(
    path: str, chosen: tuple[str, ...], version: tuple[int, int, int], links: bool
) -> Film:
    """``version`` distinguishes a dataset.json from a later one at the same path."""
    folder = pathlib.Path(path)
    info_path = files.inside(folder, "dataset.json", links=links, remedy=files.LINKS)
    info = _read_info(info_path)
    known_subjects = info["subjects"]
    unknown_subjects = [name for name in chosen if name not in known_subjects]
    if unknown_subjects:
        raise DataError(
            f"data.subjects names {', '.join(unknown_subjects)}; {folder} has"
            f" {', '.join(known_subjects)}"
        )
    subjects = tuple(chosen or known_subjects)
    _check_listed_files(folder, info, links=links)
    load = functools.partial(_load, folder, links=links)
    video = load("video.npy", 4, (np.uint8,))
    if video.shape[3] != 3:
        raise DataError(
            f"{folder / 'video.npy'} is {video.dtype} {video.shape}; expected 3 values for each"
            " pixel, RGB; save x[..., :3] of RGBA, or numpy.repeat(x[..., :1], 3, -1) of grey"
        )
    audio = load("audio.npy", 2, AUDIO[info["audio"]])
    text = load("text.npy", 2, FLOATS)
    fmri = tuple(load(f"fmri/{name}.npy", 2, FLOATS) for name in subjects)
    film = Film(info, video, audio, text, fmri, subjects, path)
    _check_fmri(film)
    _check_text_since(film)
    video_windows, audio_windows = windows(info)
    _check_windows(film, "video", video_windows, len(video))
    _check_windows(film, "audio", audio_windows, len(audio))
    return film


def _check_listed_files(folder: pathlib.Path, info: Mapping[str, Any], *, links: bool) -> None:
    """Raise DataError for a checksum of no file, which would be compared with nothing."""
    for name in info.get("files", {}):
        path = files.inside(folder, name, links=links, remedy=files.LINKS)
        if not path.is_file():
            raise DataError(
                f'{folder}/dataset.json: "files" has a checksum of {name!r}, which does not exist; '
                f"{checks.expected(name, _array_names(info['subjects']))}"
            )


def _load(
    folder: pathlib.Path, name: str, n_axes: int, dtypes: Sequence[Any], *, links: bool
) -> np.ndarray:
    """Map a file of the folder. Raises DataError: another shape or type."""
    path = files.inside(folder, name, links=links, remedy=files.LINKS)
    array: Any = files.array(path)
    expected_dtypes = [np.dtype(dtype) for dtype in dtypes]
    if array.ndim != n_axes or array.dtype not in expected_dtypes:
        kinds = " or ".join(dtype.name for dtype in expected_dtypes)
        raise DataError(
            f"{folder / name} is {array.dtype} {array.shape}; expected {n_axes} dimensions"
            f" of {kinds}"
        )
    if 0 in array.shape:
        raise DataError(f"{folder / name} is empty: its shape is {array.shape}")
    if not array.flags.c_contiguous:
        raise DataError(
            f"{folder / name} is Fortran-ordered (column-major); save numpy.ascontiguousarray of it"
        )
    # A plain array on the map: slices of np.memmap cost more than their content.
    offset_in_map = array.offset % mmap.ALLOCATIONGRANULARITY
    return np.ndarray(array.shape, array.dtype, buffer=array.base, offset=offset_in_map)


def _check_fmri(film: Film) -> None:
    """Raise DataError if a subject's fMRI fits neither the text nor the first subject's."""
    first = film.fmri[0]
    n_volumes = film.n_volumes
    n_voxels = first.shape[1]
    for name, voxels in zip(film.subjects, film.fmri, strict=True):
        if voxels.shape != (n_volumes, n_voxels) or voxels.dtype != first.dtype:
            raise DataError(
                f"{film.folder}/fmri/{name}.npy is {voxels.dtype} {voxels.shape};"
                f" expected {n_volumes} volumes, as text.npy has rows, of {n_voxels} voxels in"
                f" {first.dtype}, as the first subject has"
            )


def _check_text_since(film: Film) -> None:
    text_since = film.info.get("text_since")
    if text_since is None:
        return
    names_later = any(first > volume for volume, first in enumerate(text_since))
    if len(text_since) != film.n_volumes or names_later:
        raise DataError(
            f"{film.folder}/dataset.json: text_since must name for each of {film.n_volumes} volumes"
            " one that is not later"
        )


def _check_windows(film: Film, stream: str, window: Windows, n_samples: int) -> None:
    """Raise DataError if a window holds no sample, or the stream ends before the volumes do."""
    if not window.length:
        raise DataError(
            f"{film.folder}: {window.tr:g} s between volumes at {window.rate:g} a second hold not"
            f" one sample of {stream}; prepare it again with a higher rate"
        )
    n_missing = int(window.stop(film.n_volumes - 1)) - n_samples
    if n_missing > window.length:
        raise DataError(
            f"{film.folder}: the {stream} ends {n_missing / window.rate:.1f} s before the last of"
            f" {film.n_volumes} volumes; prepare it again with as many volumes as the film lasts"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_rate(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 1e-6 < value < 1e6


def _is_audio(value: Any) -> bool:
    return isinstance(value, str) and value in AUDIO


def _are_names(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    if not all(isinstance(name, str) and name for name in value):
        return False
    return len(set(value)) == len(value)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_checksums(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(sha256, str) for sha256 in value.values())


class _Entry(NamedTuple):
    """The rule for an entry of dataset.json."""

    is_valid: Callable[[Any], bool]
    expected: str
    optional: bool = False


ENTRIES = {
    "tr": _Entry(_is_rate, "a positive number of seconds"),
    "fps": _Entry(_is_rate, "a positive number"),
    "audio_rate": _Entry(_is_rate, "a positive number"),
    "audio": _Entry(_is_audio, " or ".join(AUDIO)),
    "subjects": _Entry(_are_names, "a list of names, each once"),
    "text_since": _Entry(_are_counts, "a list of volumes", optional=True),
    "files": _Entry(_are_checksums, "a sha256 for each file", optional=True),
}


def _read_info(path: pathlib.Path) -> Mapping[str, Any]:
    """Return the content of dataset.json. Raises DataError for an entry of no meaning."""
    info = files.read_json(path)
    if info.get("version") != VERSION:
        raise DataError(
            f"{path} has format version {info.get('version')!r}; expected {VERSION}; prepare it"
            " again"
        )
    for name, entry in ENTRIES.items():
        if entry.optional and name not in info:
            continue
        value = info.get(name)
        if not entry.is_valid(value):
            raise DataError(f"{path}: {name} is {str(value)[:80]!r}; expected {entry.expected}")
    return info


def digests(film: Film) -> Mapping[str, str]:
    """Return the sha256 of every file that is read, after a check of its contents. It is cached.

    Raises DataError: a file that dataset.json has another checksum of, numbers that are not finite,
    codes beyond the codebook.
    """
    folder = pathlib.Path(film.folder)
    audio_kind = film.info["audio"]
    # names of their own, since each digest of them says that the contents were checked
    checked_names = {name: f"checked {name}" for name in film.arrays}
    parts_of = {checked_names[name]: [folder / name] for name in film.arrays}
    cache = content_lib.Cache(parts_of)
    unread = cache.unread()
    for name, array in film.arrays.items():
        if checked_names[name] in unread:
            _check_values(folder / name, array, audio_kind)
    film.release()
    found = cache.digests(list(parts_of))
    sha256s = {name: found[checked_names[name]] for name in film.arrays}
    for name, expected in film.info.get("files", {}).items():
        if sha256s.get(name, expected).casefold() != expected.casefold():
            raise _changed(folder / name)
    return sha256s


def compare(film: Film, deadline: float) -> int:
    """Read the files whole, until a time of `time.monotonic`, and return how many were read.

    Raises DataError: a file that dataset.json has another checksum of.
    """
    folder = pathlib.Path(film.folder)
    recorded = dict(film.info.get("files", {}))
    for i, (name, expected) in enumerate(recorded.items()):
        if time.monotonic() > deadline:
            return i
        if _sha256(folder / name).casefold() != expected.casefold():
            raise _changed(folder / name)
    return len(recorded)


def _changed(path: pathlib.Path) -> DataError:
    return DataError(
        f"{path} is not the file whose checksum is in dataset.json: it was damaged or replaced;"
        ' prepare the folder again, or remove "files" from dataset.json if you changed it yourself'
    )


def _check_values(path: pathlib.Path, array: np.ndarray, audio_kind: str) -> None:
    """Raise DataError for numbers in ``array`` that no step should see."""
    holds_codes = path.name == "audio.npy" and audio_kind == "codes"
    first_row = array[:1]
    row_bytes = max(first_row.nbytes, 1)
    n_rows = max(1, PIECE // row_bytes)
    for start in range(0, len(array), n_rows):
        piece = array[start : start + n_rows]
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            first_broken = np.argwhere(~np.isfinite(piece))[0]
            raise DataError(
                f"{path} has numbers that are not finite, the first in row"
                f" {start + int(first_broken[0])}; replace them, for example by 0"
            )
        if holds_codes and not 0 <= piece.min() <= piece.max() <= LARGEST_CODE:
            raise DataError(
                f"{path} has codes from {piece.min()} to {piece.max()} behind row {start}; expected"
                f" 0 … {LARGEST_CODE}"
            )


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _array_names(subjects: Sequence[str]) -> list[str]:
    fmri_names = [f"fmri/{subject}.npy" for subject in subjects]
    return ["video.npy", "audio.npy", "text.npy", *fmri_names]


def write(folder: str | os.PathLike[str], info: Mapping[str, Any]) -> None:
    """Complete a folder of arrays with its dataset.json, checksums included.

    ``info``: "tr", "fps", "audio_rate", "audio", "subjects", "text_since" if rows share text, more.
    """
    folder = pathlib.Path(folder)
    sha256s = {name: _sha256(folder / name) for name in _array_names(info["subjects"])}
    content = json.dumps({"version": VERSION, **info, "files": sha256s}, indent=2)
    atomic_write.write(folder / "dataset.json", f"{content}\n")
