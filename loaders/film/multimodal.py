"""Windows of a film, and the viewers' brain activity. `loaders.film.film_files` has the files.

A row is a (subject, volume i). At t = i · tr it holds the ceil(tr · fps) last frames before t and
the floor(tr · audio_rate) last times of audio before t; before the film begins and after it ends,
`padding`. Windows are cut from memory maps into the batch, and mapped pages are given back after
every batch, so that a process holds a batch and not the film. In an epoch of 17 viewers × 920
volumes × 77,347 voxels (25 GB of windows, read from 3.9 GB of files) it never held more than 123 MB
with numpy (``pytest -m slow tests/loaders/test_multimodal.py -k flat -s``).

Continuous features can be convolved with the haemodynamic response (`glover`): x(i) = sum over k of
h(k · tr) window(i - k). Codes cannot: a mean of two codes is no code. Convolved frames are
delivered as float16 in 0..1, all else as it is stored.

The first volumes are train, the last ``test_share`` of them test. As many as needed between them
are in neither, so that no test window, with its convolved part, shares a frame, a code, a row of
text.npy or a segment with a training window.

Training example s = position × batch + row is place s mod n of epoch s // n (`loaders.order`) of
all (subject, volume) pairs. So viewers are mixed. "test" goes once through its rows, in an order
that is always the same and mixed.
"""

import concurrent.futures
import functools
import hashlib
import json
import math
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loaders import order
from loaders.base import DataError, DatasetInfo, Field, HostBatch, Loader, Rows
from loaders.film import demo_film, film_files
from loaders.film.film_files import Film, Windows, windows
from loaders.film.hrf import glover
from loaders.io import checks, files, machine

VERSION = 1  # changes whenever the same (seed, position, row) would give another row
PADDINGS = ("edge", "zero")
NORMS = ("sum", "peak")
STREAMS = ("video", "audio", "text")
# Files of the published size without content. They take no space on the disk, and serve to plan and
# to measure.
BLANK = dict(viewers=17, volumes=920, voxels=77_347)
BUILT_IN = ("demo", "blank")


@dataclass(frozen=True)
class Config(checks.DataSection):
    on_resume = checks.OnResume(
        checks.FREE, function=("average", "frame_skip", "padding", "hrf", "hrf_norm", "hrf_seconds")
    )

    # [path] folder of dataset.json; "demo": a film and viewers, made at the first use;
    # "blank": `BLANK`
    path: str = "demo"
    subjects: tuple[str, ...] = ()  # [names] viewers to read; empty = all
    # [bool] one row for each volume, with the mean of the viewers' fMRI,
    # instead of one for each viewer
    average: bool = False
    # [frames] stride: a window's first frame is used, and every frame_skip-th after it
    frame_skip: int = 1
    # [name] beyond the film: "edge" repeats its first or last frame,
    # "zero" is black, silent and empty
    padding: str = "edge"
    # [names] continuous features that are convolved with it: video, audio (not codes), text
    hrf: tuple[str, ...] = ()
    # [name] "sum": the response adds up to 1, a constant is unchanged;
    # "peak": its largest value is 1
    hrf_norm: str = "sum"
    hrf_seconds: float = 32.0  # [s] time after which the response is cut off
    test_share: float = 0.2  # [share] share of the volumes, the last ones, that are tested on
    follow_links: bool = False  # [bool] links in the folder may lead out of it
    # [threads] number of threads that cut windows; 0 = one for each core this process may use
    threads: int = 0

    def validate(self) -> Iterator[tuple[str, str]]:
        if self.path not in BUILT_IN and not (files.expanded(self.path) / "dataset.json").is_file():
            problem = (
                f"is {self.path!r}, which holds no dataset.json; `jaxtrain prepare-giblet`"
                " makes such a folder"
            )
            yield "path", problem
        yield from checks.at_least(self, 1, "frame_skip")
        yield from checks.choice(self, PADDINGS, "padding")
        yield from checks.choice(self, NORMS, "hrf_norm")
        if len(set(self.subjects)) < len(self.subjects):
            yield "subjects", f"is {', '.join(self.subjects)}; name each of them once"
        for name in self.hrf:
            if name not in STREAMS:
                yield "hrf", f"holds {name!r}; {checks.expected(name, STREAMS)}"
        if "video" in self.hrf and self.hrf_norm == "peak":
            problem = (
                "is 'peak', which makes frames brighter than white while hrf holds 'video'; use"
                " 'sum'"
            )
            yield "hrf_norm", problem
        yield from checks.within(self, "(0, 600]", "hrf_seconds")  # the response is over after 40 s
        yield from checks.within(self, "[0, 1)", "test_share")
        yield from checks.threads(self, least=0)

    def exists(self) -> bool:
        """Return False when reading the dataset info would first have to make the data."""
        if self.path == "demo":
            return demo_film.folder().is_dir()
        return self.path != "blank"


class Split(NamedTuple):
    """The volumes of each split. Volumes between them belong to neither."""

    train: np.ndarray
    test: np.ndarray


class Volumes(Loader):
    """Volumes of viewers, and the windows of film before them. Fields, r rows for each range:

    video           uint8 [r, frames · height · width · 3]; float16 if it is convolved
    audio           int16 or float [r, codebooks · times], a codebook's times next to each other
    text            float [r, values]
    fmri            float [r, voxels]
    subject, volume int32 [r] -1 in padding. The subject of an average is 0
    index           int32 [r] subject × volumes + volume, -1 in padding
    weight          float32 [r] 0 for padding
    """

    def __init__(
        self, config: Config, *, split: str, rows: Rows, seed: int, in_order: bool = False
    ):
        self._config = config
        self._in_order = in_order
        self._film = open_film(config, make=True)
        self._video_window, self._audio_window = windows(self._film.info)
        self._checksums = self._file_checksums()
        self._volumes = getattr(split_volumes(config), split)
        n_subjects = 1 if config.average else len(self._film.subjects)
        self._n_examples = n_subjects * len(self._volumes)
        if split == "train" and not self._n_examples:
            raise DataError(
                f"{config.path}: {self._film.n_volumes} volumes leave none to train on; lower"
                " data.test_share"
            )
        self._kernel = _kernel(config, self._film)
        self._text = _convolved_text(config, self._film)
        # A batch is large, so its rows are cut by several threads and none is made ahead.
        n_threads = config.threads or machine.cores()
        self._pool = concurrent.futures.ThreadPoolExecutor(n_threads, thread_name_prefix="windows")
        super().__init__(
            element_spec(config),
            train=split == "train" and not in_order,
            rows=rows,
            seed=seed,
            n_batches=-(-self._n_examples // rows.batch),
        )

    @property
    def fingerprint(self) -> str:
        info = dict(self._film.info)
        if self._checksums:
            info["files"] = self._checksums
        content = json.dumps(info, sort_keys=True)
        content_hash = hashlib.sha256(content.encode()).hexdigest()
        return content_hash[:16]

    def _file_checksums(self) -> dict[str, str]:
        """Return the checksums of all files, from dataset.json for a viewer that is not read."""
        listed = dict(self._film.info.get("files", {}))
        if self._config.path in BUILT_IN:
            return listed  # our own films are not read whole before they are used
        try:
            return {**listed, **film_files.digests(self._film)}
        except OSError as error:
            raise DataError(f"{error.filename}: {error.strerror}") from error

    def compare_content(self, seconds: float) -> str:
        recorded = self._film.info.get("files", {})
        if self._config.path in BUILT_IN or not recorded:
            return ""
        n_read = film_files.compare(self._film, time.monotonic() + seconds)
        return f"{n_read} of {len(recorded)} files were read whole, and are as dataset.json records"

    @property
    def order(self) -> dict[str, Any]:
        settings = dict(vars(self._config))
        for name in ("path", "threads", "follow_links"):
            del settings[name]
        return {"version": [order.VERSION, VERSION], "batch": self._rows.batch, **settings}

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _batch(self, position: int) -> HostBatch:
        batch = super()._batch(position)
        self._film.release()
        return batch

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        batch = self._empty(len(row))
        batch["subject"][:] = -1
        batch["volume"][:] = -1
        example = position * self._rows.batch + row
        valid, pair = self._pairs(example)
        n_volumes = len(self._volumes)
        subject, volume_index = np.divmod(pair, n_volumes)
        volume = self._volumes[volume_index]
        batch["subject"][valid] = subject
        batch["volume"][valid] = volume
        batch["index"][valid] = subject * self._film.n_volumes + volume
        batch["weight"][valid] = 1
        valid_rows = zip(valid.tolist(), subject.tolist(), volume.tolist(), strict=True)
        jobs = [self._pool.submit(self._fill, batch, *valid_row) for valid_row in valid_rows]
        for job in jobs:
            job.result()
        return batch

    def _pairs(self, example: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the examples that exist, by place, and the (subject, volume) pair of each."""
        if self._in_order:
            valid = np.flatnonzero(example < self._n_examples)
            return valid, example[valid]
        if self._train:
            _, pair = order.epochs(self._seed, self._n_examples, example)
            return np.arange(len(example)), pair
        return order.once(self._n_examples, example)

    def _fill(self, batch: Mapping[str, np.ndarray], row: int, subject: int, volume: int) -> None:
        """Write a volume's window and fMRI to a row of the batch."""
        self._write_video(batch["video"][row], volume)
        self._write_audio(batch["audio"][row], volume)
        batch["text"][row] = self._text[volume]
        fmri = self._film.fmri
        if self._config.average:
            volumes = [viewer[volume] for viewer in fmri]
            batch["fmri"][row] = np.mean(volumes, axis=0, dtype=np.float32)
        else:
            batch["fmri"][row] = fmri[subject][volume]

    def _write_video(self, out: np.ndarray, volume: int) -> None:
        video = self._film.video
        window = self._video_window
        skip = self._config.frame_skip
        shape = (_n_frames(self._config, window), *video.shape[1:])
        out = out.reshape(shape)
        if "video" not in self._config.hrf:
            self._cut(video, window, volume, skip, out=out)
            return
        total = np.zeros(shape, np.float32)
        scaled = np.empty(shape, np.float32)
        for lag, response in enumerate(self._kernel):
            if response:
                frames = self._cut(video, window, volume - lag, skip)
                total += np.multiply(frames, np.float32(response / 255), out=scaled)
        out[:] = total

    def _write_audio(self, out: np.ndarray, volume: int) -> None:
        audio = self._film.audio
        window = self._audio_window
        if "audio" in self._config.hrf:
            times = np.zeros((window.length, audio.shape[1]), np.float32)
            for lag, response in enumerate(self._kernel):
                past = self._cut(audio, window, volume - lag)
                times += response * past.astype(np.float32)
        else:
            times = self._cut(audio, window, volume)
        out.reshape(-1, window.length)[:] = times.T

    def _cut(
        self,
        stream: np.ndarray,
        window: Windows,
        volume: int,
        skip: int = 1,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return a window, padded beyond the ends of the stream: a view, or a copy in ``out``."""
        start = int(window.start(volume))
        stop = int(window.stop(volume))
        if start >= 0 and stop <= len(stream):
            samples = stream[start:stop:skip]
        else:
            indices = np.arange(start, stop, skip)
            samples = stream[np.clip(indices, 0, len(stream) - 1)]
            if self._config.padding == "zero":
                is_beyond = (indices < 0) | (indices >= len(stream))
                samples[is_beyond] = 0
        if out is None:
            return samples
        out[:] = samples
        return out


def _n_frames(config: Config, window: Windows) -> int:
    """Return the number of frames in a row: every ``frame_skip``-th one of the window."""
    return -(-window.length // config.frame_skip)


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype, read from the headers."""
    film = open_film(config)
    video, audio = windows(film.info)
    float32 = np.dtype(np.float32)
    int32 = np.dtype(np.int32)
    _, *frame_shape = film.video.shape
    n_pixel_values = _n_frames(config, video) * math.prod(frame_shape)
    video_dtype = np.dtype(np.float16 if "video" in config.hrf else np.uint8)
    n_audio_values = audio.length * film.audio.shape[1]
    audio_dtype = float32 if "audio" in config.hrf else film.audio.dtype
    first_fmri = film.fmri[0]
    fmri_dtype = float32 if config.average else first_fmri.dtype
    return {
        "video": Field((n_pixel_values,), video_dtype),
        "audio": Field((n_audio_values,), audio_dtype),
        "text": Field((film.text.shape[1],), float32),
        "fmri": Field((first_fmri.shape[1],), fmri_dtype),
        "subject": Field((), int32),
        "volume": Field((), int32),
        "index": Field((), int32),
        "weight": Field((), float32),
    }


def dataset_info(config: Config) -> DatasetInfo:
    """Return the dataset info of the film. Raises DataError.

    - n_frames (of a row), height, width, codebooks, audio_frames, n_text, n_voxels, audio,
      n_subjects.
    - n_train, n_test, n_between: the volumes of each split, and of neither.
    """
    film = open_film(config)
    video, audio = windows(film.info)
    _, height, width, _ = film.video.shape
    splits = split_volumes(config)
    n_train = len(splits.train)
    n_test = len(splits.test)
    return {
        "n_frames": _n_frames(config, video),
        "height": height,
        "width": width,
        "codebooks": film.audio.shape[1],
        "audio_frames": audio.length,
        "n_text": film.text.shape[1],
        "n_voxels": film.fmri[0].shape[1],
        "audio": film.info["audio"],
        "n_subjects": len(film.subjects),
        "n_train": n_train,
        "n_test": n_test,
        "n_between": film.n_volumes - n_train - n_test,
    }


def make_loader(
    config: Config, *, split: str, rows: Rows, seed: int, in_order: bool = False
) -> Volumes:
    """Return a loader of "train" or "test", perhaps in the film's order. Raises DataError."""
    return Volumes(config, split=split, rows=rows, seed=seed, in_order=in_order)


def split_volumes(config: Config) -> Split:
    """Return train and test volumes that share nothing. Raises DataError: none to test on."""
    film = open_film(config)
    n_volumes = film.n_volumes
    n_train = n_volumes - round(config.test_share * n_volumes)
    kernel_length = len(_kernel(config, film))
    first_candidate = _first_after(n_train, config, film, kernel_length)
    candidates = np.arange(first_candidate, n_volumes)
    # The oldest volume that a test row's text shares something with, itself or by convolution.
    oldest = candidates
    text_since = np.asarray(film.info.get("text_since") or np.arange(n_volumes))
    for lag in range(kernel_length if "text" in config.hrf else 1):
        past = np.maximum(candidates - lag, 0)
        oldest = np.minimum(oldest, text_since[past])
    test = candidates[oldest >= n_train]
    if config.test_share and not test.size:
        if candidates.size and "text_since" in film.info:
            remedy = (
                "segments of text span the border, or occur again: prepare the film with shorter"
                " ones, or fewer --slots"
            )
        else:
            remedy = "raise data.test_share, or set it to 0 to test on nothing"
            if kernel_length > 1:
                reach = (kernel_length - 1) * film.info["tr"]
                remedy = f"lower data.hrf_seconds (data.hrf reaches {reach:g} s back), {remedy}"
        raise DataError(
            f"{config.path}: data.test_share={config.test_share:g} holds out"
            f" {n_volumes - n_train} of {n_volumes} volumes, and each of them shares a frame, sound"
            f" or text with training; {remedy}"
        )
    return Split(np.arange(n_train), test)


def _first_after(n_train: int, config: Config, film: Film, kernel_length: int) -> int:
    """Return the first volume that shares neither frames nor sound with the first ``n_train``."""
    if not n_train:
        return 0
    first = n_train
    for stream, window in zip(("video", "audio"), windows(film.info), strict=True):
        reach = kernel_length - 1 if stream in config.hrf else 0
        train_stop = window.stop(n_train - 1)
        while first < film.n_volumes and window.start(first - reach) < train_stop:
            first += 1
    return first


def _kernel(config: Config, film: Film) -> np.ndarray:
    """Return the response at 0, tr, 2 tr, …, or 1 without convolution. Raises DataError."""
    if not config.hrf:
        return np.ones(1, np.float32)
    tr = film.info["tr"]
    seconds = config.hrf_seconds
    # Only the response's start, which is 0, may be left, or more undershoot than response.
    if not glover(tr, seconds, "none").sum() > 0:
        raise DataError(
            f"{config.path}: data.hrf_seconds={seconds:g} leaves nothing of the haemodynamic"
            f" response, with {tr:g} s between volumes; raise it, or set data.hrf to ()"
        )
    return glover(tr, seconds, config.hrf_norm)


def _convolved_text(config: Config, film: Film) -> np.ndarray:
    """Return the text's embeddings, float32 [volumes, values], which fit in memory."""
    text = np.asarray(film.text, np.float32)
    if "text" not in config.hrf:
        return text
    volumes = np.arange(len(text))
    total = np.zeros_like(text)
    for lag, response in enumerate(_kernel(config, film)):
        past = text[np.maximum(volumes - lag, 0)]
        if config.padding == "zero":
            past[:lag] = 0
        total += response * past
    return total


@functools.cache
def _outline() -> tempfile.TemporaryDirectory[str]:
    """Make the shapes of the built-in film, all zeros, in a folder that ends with the process.

    A run is checked with it before the film is made. It takes milliseconds.
    """
    folder = tempfile.TemporaryDirectory(prefix="jaxtrain-film-")
    demo_film.make_outline(pathlib.Path(folder.name))
    return folder


def open_film(config: Config, *, make: bool = False) -> Film:
    """Return the film of a config, made if ``make``, or its outline of zeros. Raises DataError."""
    path = config.path
    if path == "blank":
        path = str(demo_film.ensure_blank(**BLANK))
    elif path == "demo":
        if make or demo_film.folder().is_dir():
            path = str(demo_film.ensure())
        else:
            path = _outline().name
    film = film_files.open_folder(path, config.subjects, links=config.follow_links)
    if "audio" in config.hrf and film.info["audio"] == "codes":
        raise DataError(
            f"data.hrf holds 'audio', and {path} has codes, which have no mean; prepare features"
            " instead"
        )
    return film
