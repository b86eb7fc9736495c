"""Windows of a film, and what viewers' brains did then: the stimulus stored once, fMRI once for each viewer.

    FOLDER/                  made by `jaxtrain prepare-giblet` (or by `write`)
      dataset.json           {"version": 1, "tr": seconds between volumes, "fps": frames/s of the video,
                             "audio_rate": times/s of the audio, "audio": "codes" or "features",
                             "subjects": [names], "files": {name: sha256},
                             "text_since": [for each volume the first one whose row of text.npy shares a segment with its own]}
                             (without text_since, no two rows share one)
      video.npy              uint8 [frames, height, width, 3], RGB
      audio.npy              int16 [times, codebooks], codes of 0 … 1023; or float16/32 [times, features]
      text.npy               float16/32 [volumes, values]: the embeddings that belong to the window before each volume
      fmri/<subject>.npy     float16/32 [volumes, voxels], every voxel z-scored over the volumes

A row is a (subject, volume i). At t = i · tr it holds the ceil(tr · fps) last frames before t and the floor(tr · audio_rate)
last times of audio before t; before the film begins and after it ends, `padding`. Windows are cut from memory maps into the
batch, and mapped pages are given back after every batch, so that a process holds a batch and not the film: in an epoch of 17
viewers × 920 volumes × 77,347 voxels (25 GB of windows, read from 3.9 GB of files) never more than 123 MB, numpy included
(``pytest -m slow tests/loaders/test_multimodal.py -k flat -s``).

Continuous features can be convolved with the haemodynamic response (`glover`): x(i) = sum over k of h(k · tr) window(i - k).
Codes cannot: a mean of two codes is no code. Convolved frames leave as float16 in 0..1, all else as it is stored.

Volumes 0 … n - 1 are train, the last ``test_share`` of them test; as many as are needed lie in neither, so that no test window,
nor what is convolved into it, shares a frame, a code, a row of text.npy or a segment in it with a training window.

Training sample s = position × batch + row is place s mod n of epoch s // n (`loaders.order`), of all (subject, volume): viewers
come mixed. "test" goes once through its rows, in an order that is always the same and mixed.
"""

import concurrent.futures
import functools
import hashlib
import json
import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loaders import checks, machine, order
from loaders.base import DataError, Facts, Field, HostBatch, Rows

VERSION = 1
PADDINGS = ("edge", "zero")
NORMS = ("sum", "peak")
AUDIO = {"codes": (np.int16,), "features": (np.float16, np.float32)}
FLOATS = (np.float16, np.float32)
STREAMS = ("video", "audio", "text")
# Files of the published size without content, which take no room on the disk: to plan and to measure with.
BLANK = dict(viewers=17, volumes=920, voxels=77_347)
MADE = ("demo", "blank")


@dataclass(frozen=True)
class Config(checks.DataSection):
    path: str = (
        "demo"  # [path] folder of dataset.json; "demo": a film and its viewers, generated at the first use; "blank": `BLANK`
    )
    subjects: tuple[str, ...] = ()  # [names] of the viewers to read; empty = all
    average: bool = False  # [bool] one row for each volume, with the mean of the viewers' fMRI, instead of one for each viewer
    frame_skip: int = 1  # [frames] every how manieth of a window is used, from its first
    padding: str = "edge"  # [name] beyond the film: "edge" repeats its first or last frame, "zero" is black, silent and empty
    hrf: tuple[str, ...] = ()  # [names] continuous features that are convolved with it: video, audio (not codes), text
    hrf_norm: str = (
        "sum"  # [name] "sum": the response adds up to 1, a constant stays what it is; "peak": its largest value is 1
    )
    hrf_seconds: float = 32.0  # [s] after which the response is cut off
    test_share: float = 0.2  # [share] of the volumes, the last ones, that are tested on
    threads: int = 0  # [threads] that cut windows; 0 = one for each core this process may use

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.exists() and not (pathlib.Path(self.path).expanduser() / "dataset.json").is_file():
            yield "path", f"is {self.path!r}, which holds no dataset.json; `jaxtrain prepare-giblet` makes such a folder"
        yield from checks.at_least(self, 1, "frame_skip")
        yield from checks.choice(self, PADDINGS, "padding")
        yield from checks.choice(self, NORMS, "hrf_norm")
        if len(set(self.subjects)) < len(self.subjects):
            yield "subjects", f"is {', '.join(self.subjects)}; each is read once"
        for name in self.hrf:
            if name not in STREAMS:
                yield "hrf", f"holds {name!r}; {checks.expected(name, STREAMS)}"
        if "video" in self.hrf and self.hrf_norm == "peak":
            yield "hrf_norm", "is 'peak', which makes frames brighter than white, and hrf holds 'video'; use 'sum'"
        yield from checks.within(self, "(0, 600]", "hrf_seconds")  # the response is over after 40 s
        yield from checks.within(self, "[0, 1)", "test_share")
        yield from checks.not_negative(self, "threads")

    def exists(self) -> bool:
        """False when reading the facts would first have to make the data."""
        return self.path not in MADE


def glover(tr: float, seconds: float = 32.0, norm: str = "sum") -> np.ndarray:
    """The canonical haemodynamic response at 0, tr, 2 tr, … below ``seconds``, float32.

    g(t; 6 / 0.9, 0.9) - 0.35 g(t; 12 / 0.9, 0.9), with g the gamma density of a shape and a scale [s]: Glover (1999), with the
    delays, dispersion and undershoot that fMRI packages have agreed on. Its "sum" or its "peak" is 1, or "none" of them.
    """
    t = np.arange(0, seconds, tr)
    scale = 0.9

    def gamma(delay: float) -> np.ndarray:
        shape = delay / scale
        log = (shape - 1) * np.log(np.maximum(t, 1e-300) / scale) - t / scale - math.lgamma(shape) - math.log(scale)
        return np.exp(log)

    h = gamma(6.0) - 0.35 * gamma(12.0)
    return (h / {"sum": h.sum(), "peak": h.max(), "none": 1.0}[norm]).astype(np.float32)


class Data(NamedTuple):
    """A folder, mapped. Pages that were read belong to the kernel; `release` gives them back."""

    info: Mapping[str, Any]
    video: np.ndarray
    audio: np.ndarray
    text: np.ndarray
    fmri: tuple[np.ndarray, ...]  # of the subjects that are read
    subjects: tuple[str, ...]

    @property
    def n_volumes(self) -> int:
        return len(self.text)

    def release(self) -> None:
        for array in (self.video, self.audio, self.text, *self.fmri):
            if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                array.base.madvise(mmap.MADV_DONTNEED)


class Windows(NamedTuple):
    """Where the window of each volume lies in a stream."""

    rate: float  # [1/s]
    length: int
    tr: float

    def stop(self, volume: np.ndarray | int) -> Any:
        """One past the last sample before t = volume · tr."""
        return np.ceil(np.asarray(volume) * self.tr * self.rate - 1e-6).astype(np.int64)

    def start(self, volume: np.ndarray | int) -> Any:
        return self.stop(volume) - self.length


class Split(NamedTuple):
    """Volumes of each split; those between belong to none."""

    train: np.ndarray
    test: np.ndarray


class Moments:
    """A `loaders.base.Loader`. Fields, r rows for each range:

    video           uint8 [r, frames · height · width · 3]; float16 where it is convolved
    audio           int16 or float [r, codebooks · times], a codebook's times side by side
    text            float [r, values]
    fmri            float [r, voxels]
    subject, volume int32 [r] -1 in padding; of an average, subject is 0
    index           int32 [r] subject × volumes + volume, -1 in padding
    weight          float32 [r] 0 for padding
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self.fields = fields(config)
        self._config, self._rows, self._seed, self._train = config, rows, seed, split == "train"
        self._data = open_folder(config)
        self._volumes = getattr(split_volumes(config), split)
        self._n = len(self._volumes) * (1 if config.average else len(self._data.subjects))
        self.n_batches = -(-self._n // rows.batch)
        if self._train and not self._n:
            raise DataError(f"{config.path}: {self._data.n_volumes} volumes leave none to train on; lower data.test_share")
        self._kernel = _kernel(config, self._data)
        self._text = _convolved_text(config, self._data)
        self._pool = concurrent.futures.ThreadPoolExecutor(config.threads or machine.cores(), thread_name_prefix="windows")
        self._position, self._closed = 0, False

    def __iter__(self) -> "Moments":
        return self

    def __next__(self) -> tuple[int, HostBatch]:
        if self._closed or (not self._train and self._position >= self.n_batches):
            raise StopIteration
        parts = [self._range(np.arange(start, stop)) for start, stop in self._rows.ranges]
        self._data.release()
        self._position += 1
        return self._position, {name: [part[name] for part in parts] for name in self.fields}

    def seek(self, position: int) -> None:
        self._position = position

    def state(self, position: int) -> dict[str, Any]:
        changes = {name: value for name, value in vars(self._config).items() if name not in ("path", "threads")}
        return {
            "position": position,
            "seed": self._seed,
            "fingerprint": hashlib.sha256(json.dumps(self._data.info, sort_keys=True).encode()).hexdigest()[:16],
            "order": {"version": [order.VERSION, VERSION], "batch": self._rows.batch, **changes},
        }

    def diagnostics(self) -> dict[str, Any]:
        return {"subjects": len(self._data.subjects), "volumes": len(self._volumes), "rows": self._n}

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _range(self, row: np.ndarray) -> dict[str, np.ndarray]:
        batch = {name: np.zeros((len(row), *field.shape), field.dtype) for name, field in self.fields.items()}
        for name in ("subject", "volume", "index"):
            batch[name][:] = -1
        sample = self._position * self._rows.batch + row
        if self._train:
            epoch, place = np.divmod(sample, self._n)
            number = np.empty_like(place)
            for e in np.unique(epoch):
                number[epoch == e] = order.permutation(self._seed, int(e), self._n, place[epoch == e])
            there = np.arange(len(row))
        else:
            there = np.flatnonzero(sample < self._n)
            number = order.permutation(0, 0, self._n, sample[there]) if there.size else there
        subject, which = np.divmod(number, len(self._volumes))
        volume = self._volumes[which]
        batch["subject"][there], batch["volume"][there] = subject, volume
        batch["index"][there], batch["weight"][there] = subject * self._data.n_volumes + volume, 1
        jobs = [self._pool.submit(self._fill, batch, *job) for job in zip(there, subject, volume, strict=True)]
        for job in jobs:
            job.result()
        return batch

    def _fill(self, batch: Mapping[str, np.ndarray], at: int, subject: int, volume: int) -> None:
        """One row, cut straight into its place."""
        data, config = self._data, self._config
        video, audio = streams(config, data.info)
        shape = (-(-video.length // config.frame_skip), *data.video.shape[1:])
        if "video" in config.hrf:
            total, one = np.zeros(shape, np.float32), np.empty(shape, np.float32)
            for k, h in enumerate(self._kernel):
                if h:
                    frames = self._cut(data.video, video, volume - k, config.frame_skip)
                    total += np.multiply(frames, np.float32(h / 255), out=one)
            batch["video"][at].reshape(shape)[:] = total
        else:
            self._cut(data.video, video, volume, config.frame_skip, out=batch["video"][at].reshape(shape))
        kernel = self._kernel if "audio" in config.hrf else np.ones(1, np.float32)
        if len(kernel) > 1:
            sound = sum(h * self._cut(data.audio, audio, volume - k).astype(np.float32) for k, h in enumerate(kernel))
        else:
            sound = self._cut(data.audio, audio, volume)
        batch["audio"][at].reshape(-1, audio.length)[:] = sound.T
        batch["text"][at] = self._text[volume]
        if config.average:
            batch["fmri"][at] = np.mean([x[volume] for x in data.fmri], axis=0, dtype=np.float32)
        else:
            batch["fmri"][at] = data.fmri[subject][volume]

    def _cut(
        self, stream: np.ndarray, windows: Windows, volume: int, skip: int = 1, out: np.ndarray | None = None
    ) -> np.ndarray:
        """A window, with what lies beyond the stream padded. Inside it a view, or one copy into ``out``."""
        start, stop = int(windows.start(volume)), int(windows.stop(volume))
        if start >= 0 and stop <= len(stream):
            found = stream[start:stop:skip]
        else:
            places = np.arange(start, stop, skip)
            found = stream[np.clip(places, 0, len(stream) - 1)]
            if self._config.padding == "zero":
                found[(places < 0) | (places >= len(stream))] = 0
        if out is None:
            return found
        out[:] = found
        return out


def fields(config: Config) -> dict[str, Field]:
    """Field -> shape of one row, dtype; read from the headers."""
    data = open_folder(config)
    video, audio = streams(config, data.info)
    frames = -(-video.length // config.frame_skip)
    sound = data.audio.dtype if "audio" not in config.hrf else np.dtype(np.float32)
    integer = Field((), np.dtype(np.int32))
    return {
        "video": Field(
            (frames * math.prod(data.video.shape[1:]),), np.dtype(np.float16 if "video" in config.hrf else np.uint8)
        ),
        "audio": Field((audio.length * data.audio.shape[1],), sound),
        "text": Field((data.text.shape[1],), np.dtype(np.float32)),
        "fmri": Field((data.fmri[0].shape[1],), np.dtype(np.float32) if config.average else data.fmri[0].dtype),
        **{name: integer for name in ("subject", "volume", "index")},
        "weight": Field((), np.dtype(np.float32)),
    }


def facts(config: Config) -> Facts:
    """n_frames (of a row), height, width, codebooks, audio_frames, n_text, n_voxels, audio; and the volumes of each split."""
    data = open_folder(config)
    video, audio = streams(config, data.info)
    splits = split_volumes(config)
    return {
        "n_frames": -(-video.length // config.frame_skip),
        "height": data.video.shape[1],
        "width": data.video.shape[2],
        "codebooks": data.audio.shape[1],
        "audio_frames": audio.length,
        "n_text": data.text.shape[1],
        "n_voxels": data.fmri[0].shape[1],
        "audio": data.info["audio"],
        "n_subjects": len(data.subjects),
        "n_train": len(splits.train),
        "n_test": len(splits.test),
        "n_between": data.n_volumes - len(splits.train) - len(splits.test),
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Moments:
    """A loader of ``split``, "train" or "test". Raises DataError for a folder that is not whole."""
    return Moments(config, split=split, rows=rows, seed=seed)


def streams(config: Config, info: Mapping[str, Any]) -> tuple[Windows, Windows]:
    """The windows of video and audio."""
    tr = info["tr"]
    video = Windows(info["fps"], math.ceil(tr * info["fps"] - 1e-6), tr)
    return video, Windows(info["audio_rate"], math.floor(tr * info["audio_rate"] + 1e-6), tr)


def split_volumes(config: Config) -> Split:
    """Training volumes, and the test volumes that share nothing with them. Raises DataError when none are left to test on."""
    data = open_folder(config)
    n = data.n_volumes
    n_train = n - round(config.test_share * n)
    taps = len(_kernel(config, data))
    first = n_train
    for name, windows in zip(STREAMS, streams(config, data.info), strict=False):
        back = taps - 1 if name in config.hrf else 0
        while first < n and n_train and windows.start(first - back) < windows.stop(n_train - 1):
            first += 1
    # The oldest volume that a test row's text shares something with, itself or what is convolved into it.
    since = np.asarray(data.info.get("text_since") or np.arange(n))
    within = test = np.arange(first, n)
    oldest = [since[np.maximum(test - k, 0)] for k in range(taps if "text" in config.hrf else 1)]
    test = test[np.min(oldest, axis=0) >= n_train]
    if config.test_share and not test.size:
        shorter = f"lower data.hrf_seconds (data.hrf reaches {(taps - 1) * data.info['tr']:g} s back), " * (taps > 1)
        remedy = f"{shorter}raise data.test_share, or test on nothing with 0"
        if within.size and "text_since" in data.info:
            remedy = "segments of text last over the border, or come back: prepare the film with shorter ones, or fewer --slots"
        raise DataError(
            f"{config.path}: data.test_share={config.test_share:g} holds out {n - n_train} of {n} volumes, and none is "
            f"left that shares no frame, sound or text with training; {remedy}"
        )
    return Split(np.arange(n_train), test)


def _kernel(config: Config, data: Data) -> np.ndarray:
    if not config.hrf:
        return np.ones(1, np.float32)
    tr, seconds = data.info["tr"], config.hrf_seconds
    if not glover(tr, seconds, "none").sum() > 0:  # nothing but its start at 0, or the undershoot
        raise DataError(
            f"{config.path}: data.hrf_seconds={seconds:g} leaves nothing of the haemodynamic response, with {tr:g} s between "
            "volumes; raise it, or leave data.hrf empty"
        )
    return glover(tr, seconds, config.hrf_norm)


def _convolved_text(config: Config, data: Data) -> np.ndarray:
    """float32 [volumes, values]: small enough to be held."""
    text = np.asarray(data.text, np.float32)
    if "text" not in config.hrf:
        return text
    total, volumes = np.zeros_like(text), np.arange(len(text))
    for k, h in enumerate(_kernel(config, data)):
        past = text[np.maximum(volumes - k, 0)]
        if config.padding == "zero":
            past[:k] = 0
        total += h * past
    return total


def open_folder(config: Config) -> Data:
    """Maps a folder. Raises DataError for what is missing, or does not fit together."""
    path = config.path
    try:
        if path in MADE:
            from loaders import demo_film  # makes both

            path = str(demo_film.ensure() if path == "demo" else demo_film.ensure_blank(**BLANK))
        folder = pathlib.Path(path).expanduser().absolute()
        there = (folder / "dataset.json").stat()
        data = _open(str(folder), config.subjects, (there.st_ino, there.st_mtime_ns))
    except OSError as error:
        raise DataError(f"{path}: {error}") from error
    if "audio" in config.hrf and data.info["audio"] == "codes":
        raise DataError(f"data.hrf holds 'audio', and {path} has codes, of which there is no mean; prepare features instead")
    return data


@functools.lru_cache(maxsize=4)
def _open(path: str, wanted: tuple[str, ...], version: tuple[int, int]) -> Data:
    """``version`` tells one dataset.json of a path from a later one."""
    folder = pathlib.Path(path)
    info = _read_info(folder / "dataset.json")
    if unknown := [name for name in wanted if name not in info["subjects"]]:
        raise DataError(f"data.subjects names {', '.join(unknown)}; {folder} has {', '.join(info['subjects'])}")
    subjects = tuple(wanted or info["subjects"])

    def load(name: str, dimensions: int, dtypes: Sequence[Any]) -> np.ndarray:
        try:
            array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy has many for what is no array file
            raise DataError(f"{folder / name} cannot be read as an array: {error}") from error
        if array.ndim != dimensions or array.dtype not in [np.dtype(d) for d in dtypes]:
            kinds = " or ".join(np.dtype(d).name for d in dtypes)
            raise DataError(f"{folder / name} is {array.dtype} {array.shape}; {dimensions} dimensions of {kinds} are wanted")
        if 0 in array.shape:
            raise DataError(f"{folder / name} is empty: its shape is {array.shape}")
        if not array.flags.c_contiguous:
            raise DataError(f"{folder / name} is in Fortran's order; save it again as numpy.ascontiguousarray has it")
        # A plain array on the map: slices of np.memmap cost more than what they hold.
        return np.ndarray(array.shape, array.dtype, buffer=array.base, offset=array.offset % mmap.ALLOCATIONGRANULARITY)

    video = load("video.npy", 4, (np.uint8,))
    audio = load("audio.npy", 2, AUDIO[info["audio"]])
    text = load("text.npy", 2, FLOATS)
    fmri = tuple(load(f"fmri/{name}.npy", 2, FLOATS) for name in subjects)
    for name, x in zip(subjects, fmri, strict=True):
        if x.shape != (len(text), fmri[0].shape[1]) or x.dtype != fmri[0].dtype:
            raise DataError(
                f"{folder}/fmri/{name}.npy is {x.dtype} {x.shape}; all subjects have {len(text)} volumes, as text.npy has "
                f"rows, of {fmri[0].shape[1]} voxels in {fmri[0].dtype}"
            )
    data = Data(info, video, audio, text, fmri, subjects)
    since = info.get("text_since")
    if since is not None and (len(since) != len(text) or any(first > i for i, first in enumerate(since))):
        raise DataError(f"{folder}/dataset.json: text_since does not say for each of {len(text)} volumes one that is not later")
    for name, windows, n in zip(STREAMS, streams(Config(), info), (len(video), len(audio)), strict=False):
        if not windows.length:
            raise DataError(
                f"{folder}: {info['tr']:g} s between volumes at {windows.rate:g} a second hold no whole time of {name}; "
                "prepare it again with a higher rate"
            )
        if (missing := int(windows.stop(len(text) - 1)) - n) > windows.length:
            raise DataError(
                f"{folder}: the {name} ends {missing / windows.rate:.1f} s before the last of {len(text)} volumes; prepare it "
                "again with as many volumes as the film lasts"
            )
    return data


def _read_info(path: pathlib.Path) -> Mapping[str, Any]:
    """dataset.json. Raises DataError for an entry that is missing or has no meaning."""
    try:
        info = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if not isinstance(info, dict):
        raise DataError(f"{path} holds a {type(info).__name__}; an object is wanted")
    if info.get("version") != VERSION:
        raise DataError(f"{path} has format version {info.get('version')!r}, and this reads {VERSION}; prepare it again")

    def whole(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= 0

    def rate(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and 1e-6 < x < 1e6

    def names(x: Any) -> bool:
        return isinstance(x, list) and bool(x) and all(isinstance(n, str) and n for n in x) and len(set(x)) == len(x)

    wanted = {
        "tr": (rate, "a positive number of seconds"),
        "fps": (rate, "a positive number"),
        "audio_rate": (rate, "a positive number"),
        "audio": (lambda x: isinstance(x, str) and x in AUDIO, " or ".join(AUDIO)),
        "subjects": (names, "a list of names, each once"),
        "text_since": (lambda x: isinstance(x, list) and all(map(whole, x)), "a list of volumes"),
    }
    for name, (right, kind) in wanted.items():
        if not right(info.get(name)) and (name in info or name != "text_since"):
            raise DataError(f"{path}: {name} is {str(info.get(name))[:80]!r}; {kind} is wanted")
    return info


def write(folder: str | os.PathLike, info: Mapping[str, Any]) -> None:
    """Completes a folder whose arrays are there: dataset.json, with their checksums. It is written last, whole or not at all.

    Args:
      info: "tr", "fps", "audio_rate", "audio", "subjects", and "text_since" where rows share text; further entries are kept.
    """
    folder = pathlib.Path(folder)
    names = ["video.npy", "audio.npy", "text.npy", *(f"fmri/{name}.npy" for name in info["subjects"])]
    files = {}
    for name in names:
        with (folder / name).open("rb") as file:
            files[name] = hashlib.file_digest(file, "sha256").hexdigest()
    temporary = folder / f".dataset.json.{os.getpid()}"
    temporary.write_text(json.dumps({"version": VERSION, **info, "files": files}, indent=2) + "\n")
    temporary.replace(folder / "dataset.json")
