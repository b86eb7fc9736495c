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

import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaders.base import DataError
from loaders.io import atomic_write, checks, files, machine

VERSION = 1
LARGEST_CODE = 1023  # of a codebook
PIECE = 64 << 20  # [bytes] that are looked at at once
AUDIO = {"codes": (np.int16,), "features": (np.float16, np.float32)}
FLOATS = (np.float16, np.float32)


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
        """The viewers that are read, by the names of their files."""
        return dict(
            zip(_names(self.subjects), (self.video, self.audio, self.text, *self.fmri), strict=True)
        )

    @property
    def n_volumes(self) -> int:
        return len(self.text)

    def release(self) -> None:
        """Give the mapped pages back, so that a process holds a batch and not the film."""
        for array in (self.video, self.audio, self.text, *self.fmri):
            base: Any = array.base
            # not on every system
            if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                base.madvise(mmap.MADV_DONTNEED)


class Windows(NamedTuple):
    """The window of each volume in a stream (the video, or the audio)."""

    rate: float  # [1/s]
    length: int
    tr: float

    def stop(self, volume: np.ndarray | int) -> Any:
        """One past the last sample before t = volume · tr."""
        return np.ceil(np.asarray(volume) * self.tr * self.rate - 1e-6).astype(np.int64)

    def start(self, volume: np.ndarray | int) -> Any:
        return self.stop(volume) - self.length


def windows(info: Mapping[str, Any]) -> tuple[Windows, Windows]:
    """Return the windows of video and of audio, by the entries of dataset.json."""
    tr = info["tr"]
    video = Windows(info["fps"], math.ceil(tr * info["fps"] - 1e-6), tr)
    return video, Windows(info["audio_rate"], math.floor(tr * info["audio_rate"] + 1e-6), tr)


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
        return _open_once(str(folder), subjects, (stat.st_ino, stat.st_mtime_ns), links)
    except OSError as error:
        raise DataError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=4)
def _open_once(path: str, chosen: tuple[str, ...], version: tuple[int, int], links: bool) -> Film:
    """``version`` distinguishes a dataset.json from a later one at the same path."""
    folder = pathlib.Path(path)
    info = _read_info(files.inside(folder, "dataset.json", links=links, remedy=files.LINKS))
    if unknown := [name for name in chosen if name not in info["subjects"]]:
        raise DataError(
            f"data.subjects names {', '.join(unknown)}; {folder} has {', '.join(info['subjects'])}"
        )
    subjects = tuple(chosen or info["subjects"])
    for name in info.get("files", {}):  # a checksum of no file would be compared with nothing
        if not files.inside(folder, name, links=links, remedy=files.LINKS).is_file():
            raise DataError(
                f'{folder}/dataset.json: "files" has a checksum of {name!r}, which does not exist; '
                f"{checks.expected(name, _names(info['subjects']))}"
            )

    def load(name: str, dimensions: int, dtypes: Sequence[Any]) -> np.ndarray:
        array: Any = files.array(files.inside(folder, name, links=links, remedy=files.LINKS))
        if array.ndim != dimensions or array.dtype not in [np.dtype(d) for d in dtypes]:
            kinds = " or ".join(np.dtype(d).name for d in dtypes)
            raise DataError(
                f"{folder / name} is {array.dtype} {array.shape}; expected {dimensions} dimensions"
                f" of {kinds}"
            )
        if 0 in array.shape:
            raise DataError(f"{folder / name} is empty: its shape is {array.shape}")
        if not array.flags.c_contiguous:
            raise DataError(
                f"{folder / name} is Fortran-ordered (column-major); save numpy.ascontiguousarray"
                " of it"
            )
        # A plain array on the map: slices of np.memmap cost more than their content.
        return np.ndarray(
            array.shape,
            array.dtype,
            buffer=array.base,
            offset=array.offset % mmap.ALLOCATIONGRANULARITY,
        )

    video = load("video.npy", 4, (np.uint8,))
    if video.shape[3] != 3:
        raise DataError(
            f"{folder / 'video.npy'} is {video.dtype} {video.shape}; expected 3 values for each"
            " pixel, RGB; save x[..., :3] of RGBA, or numpy.repeat(x[..., :1], 3, -1) of grey"
        )
    audio = load("audio.npy", 2, AUDIO[info["audio"]])
    text = load("text.npy", 2, FLOATS)
    fmri = tuple(load(f"fmri/{name}.npy", 2, FLOATS) for name in subjects)
    for name, x in zip(subjects, fmri, strict=True):
        if x.shape != (len(text), fmri[0].shape[1]) or x.dtype != fmri[0].dtype:
            raise DataError(
                f"{folder}/fmri/{name}.npy is {x.dtype} {x.shape}; expected {len(text)} volumes, as"
                f" text.npy has rows, of {fmri[0].shape[1]} voxels in {fmri[0].dtype}, as the first"
                " subject has"
            )
    film = Film(info, video, audio, text, fmri, subjects, path)
    since = info.get("text_since")
    if since is not None and (
        len(since) != len(text) or any(first > i for i, first in enumerate(since))
    ):
        raise DataError(
            f"{folder}/dataset.json: text_since must name for each of {len(text)} volumes one that"
            " is not later"
        )
    for name, window, n in zip(
        ("video", "audio"), windows(info), (len(video), len(audio)), strict=True
    ):
        if not window.length:
            raise DataError(
                f"{folder}: {info['tr']:g} s between volumes at {window.rate:g} a second hold not"
                f" one sample of {name}; prepare it again with a higher rate"
            )
        if (missing := int(window.stop(len(text) - 1)) - n) > window.length:
            raise DataError(
                f"{folder}: the {name} ends {missing / window.rate:.1f} s before the last of"
                f" {len(text)} volumes; prepare it again with as many volumes as the film lasts"
            )
    return film


def _read_info(path: pathlib.Path) -> Mapping[str, Any]:
    """Return the content of dataset.json. Raises DataError for an entry of no meaning."""
    info = files.read_json(path)
    if info.get("version") != VERSION:
        raise DataError(
            f"{path} has format version {info.get('version')!r}; expected {VERSION}; prepare it"
            " again"
        )

    def whole(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= 0

    def rate(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and 1e-6 < x < 1e6

    def names(x: Any) -> bool:
        return (
            isinstance(x, list)
            and bool(x)
            and all(isinstance(n, str) and n for n in x)
            and len(set(x)) == len(x)
        )

    rules = {
        "tr": (rate, "a positive number of seconds"),
        "fps": (rate, "a positive number"),
        "audio_rate": (rate, "a positive number"),
        "audio": (lambda x: isinstance(x, str) and x in AUDIO, " or ".join(AUDIO)),
        "subjects": (names, "a list of names, each once"),
        "text_since": (lambda x: isinstance(x, list) and all(map(whole, x)), "a list of volumes"),
        "files": (
            lambda x: isinstance(x, dict) and all(isinstance(v, str) for v in x.values()),
            "a sha256 for each file",
        ),
    }
    for name, (is_right, kind) in rules.items():
        if not is_right(info.get(name)) and (name in info or name not in ("text_since", "files")):
            raise DataError(f"{path}: {name} is {str(info.get(name))[:80]!r}; expected {kind}")
    return info


def digests(film: Film) -> Mapping[str, str]:
    """Return the sha256 of every file that is read, after a check of its contents. It is cached.

    Raises DataError: a file that dataset.json has another checksum of, numbers that are not finite,
    codes beyond the codebook.
    """
    folder = pathlib.Path(film.folder)
    stats = {name: os.stat(folder / name) for name in film.arrays}
    key = json.dumps(
        [
            str(folder),
            [[name, s.st_ino, s.st_size, s.st_mtime_ns] for name, s in stats.items()],
            film.info["audio"],
        ]
    )
    note = machine.cache_folder("films", hashlib.sha256(key.encode()).hexdigest()[:32])
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, files.FileError):
        found = files.read_json(note)
    if set(found) != set(film.arrays):
        found = {
            name: _digest(folder / name, array, film.info["audio"])
            for name, array in film.arrays.items()
        }
        film.release()
        # Without the note, the next start reads the film again.
        with contextlib.suppress(OSError), atomic_write.shared(note) as place:
            place.write_text(json.dumps(found))
    for name, expected in film.info.get("files", {}).items():
        if found.get(name, expected).casefold() != expected.casefold():
            raise DataError(
                f"{folder / name} is not the file whose checksum is in dataset.json: it was damaged"
                ' or replaced; prepare the folder again, or remove "files" from dataset.json if'
                " you changed it yourself"
            )
    return found


def _digest(path: pathlib.Path, array: np.ndarray, audio: str) -> str:
    """Return a file's sha256. Raises DataError for numbers in ``array`` that no step should see."""
    for start in range(0, len(array), rows := max(1, PIECE // max(array[:1].nbytes, 1))):
        some = array[start : start + rows]
        if some.dtype.kind == "f" and not np.isfinite(some).all():
            at = start + int(np.argwhere(~np.isfinite(some))[0][0])
            raise DataError(
                f"{path} has numbers that are not finite, the first in row {at}; replace them, for"
                " example by 0"
            )
        if (
            path.name == "audio.npy"
            and audio == "codes"
            and not 0 <= some.min() <= some.max() <= LARGEST_CODE
        ):
            raise DataError(
                f"{path} has codes from {some.min()} to {some.max()} behind row {start}; expected 0"
                f" … {LARGEST_CODE}"
            )
    return _sha256(path)


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(subjects: Sequence[str]) -> list[str]:
    return ["video.npy", "audio.npy", "text.npy", *(f"fmri/{name}.npy" for name in subjects)]


def write(folder: str | os.PathLike[str], info: Mapping[str, Any]) -> None:
    """Complete a folder of arrays with its dataset.json, checksums included.

    ``info``: "tr", "fps", "audio_rate", "audio", "subjects", "text_since" if rows share text, more.
    """
    folder = pathlib.Path(folder)
    files = {name: _sha256(folder / name) for name in _names(info["subjects"])}
    text = json.dumps({"version": VERSION, **info, "files": files}, indent=2)
    atomic_write.write(folder / "dataset.json", f"{text}\n")
