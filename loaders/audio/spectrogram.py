"""Log-mel spectrograms of recordings in Arrow or Parquet shards, of the Rust pipeline.

One row of a batch is one crop of one recording: float32 [n_frames, n_mels], Kaldi log-mel, padded
with its minimum and normalised as (x - mean) / (2 std); `loaders.audio.front_end` has its options.
Training draws a random crop in a permuted order without end. Testing takes the centre crop of every
recording once. A row is a function of (seed, position, row) alone: see `loaders.order`.

With ``views`` > 1 a row is [views, n_frames, n_mels]: that many crops of one recording, drawn
independently, or in testing spread evenly. Views that overlap are decoded once, so that in MP3 and
Vorbis a view can differ in the last bits from the same crop decoded alone. With
``dtype="bfloat16"`` the rows are rounded to nearest even, and half as many bytes cross to the
device.

With ``form="waveform"`` a row is the crop itself, int16 [160000] of 5 s: the samples that the
filter bank would take, times 32768, rounded to nearest even and clipped. The model makes the
spectrogram on the device. Sound below the resolution of 16 bits differs.

A row of an index that `jaxtrain index` wrote is a part of a recording: crops are drawn inside it,
and one that is longer than the part is laid around it (``around``). If a whole recording is shorter
than a crop, ``short`` decides its place.

With ``multilabel`` the column of labels holds a list of classes for each recording, and a row has
"labels" instead of "label". With ``background`` a training row also has as many crops of another
recording, of noise, drawn in an independent order.

`loaders.audio.shards` says which files a path names.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import ml_dtypes
import numpy as np

try:
    from loaders import _rust
except ImportError as error:
    raise ModuleNotFoundError(
        "the Rust extension loaders._rust is not built; say `make train` in the checkout, or pip"
        " install its wheel"
    ) from error

from loaders import order as order_lib
from loaders.audio import doubts, remote
from loaders.audio.front_end import DEFAULT, FrontEnd
from loaders.audio.pipeline_settings import PipelineSettings
from loaders.audio.shards import (
    ClassLists,
    find_shards,
    fingerprint,
    has_split,
    index_file,
    index_root,
    label_column,
    nearest,
    open_index,
    read_class_lists,
    resolve,
    shards_of_split,
    splits_of,
)
from loaders.base import (
    DataError,
    DatasetInfo,
    Field,
    HostBatch,
    Loader,
    Population,
    Rows,
    refuse_invalid,
)
from loaders.io import checks, files, machine

log = logging.getLogger("jaxtrain")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
CHOICES = {
    "short": ("random", "centre", "start", "origin"),
    "short_fill": ("silence", "repeat"),
    "around": ("recording", "silence"),
    "form": ("spectrogram", "waveform"),
    "dtype": tuple(DTYPES),
    "order": ("global", "block"),
}
# Of order="block". A block is a run of neighbouring rows of a shard, permuted as a whole. The rows
# of a window of blocks are permuted among themselves, and are read ahead.
BLOCK_ROWS = 8  # at most
BLOCK_WINDOW = 256
READY_BATCHES = 2  # decoded ahead of the one that is read
# domain of the hash: the background's order is independent of the recordings'
BACKGROUND = 0x6E6F697365


@dataclass(frozen=True)
class Config(FrontEnd, checks.DataSection):
    """Which recordings are read, and how. Fields from ``bad_budget`` on change no number."""

    # Free: the fingerprint and the order have them, or they change no number.
    on_resume = checks.OnResume(
        checks.FREE,
        function=("label", "multilabel", "clip_seconds", "n_frames", "views", "form", "dtype"),
    )

    # [path] folder, glob or address of shards, or "demo": synthetic birds, made at the first use
    train: str = "demo"
    # [path] folder or glob of the test data; empty = test/ next to train's train/, else some
    # recordings of train
    test: str = ""
    train_split: str = "train"  # [name] split of train's folder that is trained on
    # [name] split that is tested on, of test's folder or else of train's
    test_split: str = "test"
    # [share] share of the recordings that is kept for testing, by row number, or by name if an
    # index has several rows of one, if no path or split holds test data
    test_share: float = 0.05
    label: str = "ebird_code"  # [column] column of class labels (int64 ClassLabel); empty = none
    # [bool] whether the column of labels holds lists of class labels, of any length
    multilabel: bool = False
    background: str = ""  # [path] recordings of noise, for model.augment.background; empty = none
    # [path] folder of recordings that are files of their own; empty = each shard's folder
    audio_root: str = ""
    exclude: tuple[int, ...] = ()  # [rows] rows of train's recordings that are never read
    # [rows] number of rows of the index that exclude was written for: with another number, exclude
    # names none; 0 = any
    exclude_of: int = 0
    # [names] names of recordings that are never read: an audio.path, or an id (XC1); "@file" names
    # a list of them, one a line
    exclude_paths: tuple[str, ...] = ()
    # [1] factor by which recordings are slower than life: their rate is this times the headers'
    time_expansion: float = 1.0
    clip_seconds: float = 5.0  # [s] length of a crop of a recording
    # [name] place of a recording that is shorter than a crop: "random" (in testing the centre),
    # "centre", "start", or "origin" (in testing the centre, else the start)
    short: str = "random"
    # [name] surroundings of a recording that is shorter than a crop: "silence", or "repeat", the
    # recording itself again and again
    short_fill: str = "silence"
    # [name] surroundings of a part that is shorter than a crop: the "recording" around it, or
    # "silence"
    around: str = "recording"
    # [number] channel, from 0, of recordings whose row names none; -1 = the mean of all channels
    channel: int = -1
    # [frames] number of frames of a row, hop_ms each. A clip's frames are padded with their minimum
    n_frames: int = 512
    views: int = 1  # [crops] number of crops of one recording in a row
    # [name] content of a row: a "spectrogram", or a "waveform", of which the device makes the
    # spectrogram
    form: str = "spectrogram"
    # [name] type of a spectrogram's values: "float32" or "bfloat16"; a waveform's are int16
    dtype: str = "float32"
    # [name] order of training: "global" permutes all rows; "block" permutes runs of them, for
    # network file systems
    order: str = "global"
    # [share] share of the recordings that may be unreadable before the run stops
    bad_budget: float = 0.01
    # [bool] whether links in folders of shards and of recordings may lead out of them
    follow_links: bool = False
    threads: int = 0  # [threads] threads that decode; 0 = one for each core this process may use
    # [bool] whether to accept an extension that was built without optimisation
    allow_debug_build: bool = False

    def validate(self) -> Iterator[tuple[str, str]]:
        """Every error that shows without reading a shard: (field, problem with its remedy)."""
        yield from self._validate_paths()
        if self.multilabel and not self.label:
            yield "multilabel", "is True, but label names no column"
        if self.label == "audio":
            yield "label", "is 'audio', the column of recordings; name that of the class labels"
        if not self.train:
            yield "train", 'is empty; name a folder or glob of Arrow shards, or use "demo"'
        yield from checks.within(self, "[0, 1]", "test_share", "bad_budget")
        if self.test_share == 1:
            yield "test_share", "is 1, which leaves nothing to train on"
        front_end_problems = list(super().validate())
        yield from front_end_problems
        yield from checks.positive(self, "time_expansion")
        if not math.isfinite(self.clip_seconds):
            yield (
                "clip_seconds",
                f"is {self.clip_seconds}; use a number of seconds, for example 5.0",
            )
        elif not front_end_problems:
            yield from self._validate_clip()
        yield from checks.at_least(self, -1, "channel")
        yield from checks.not_negative(self, "exclude_of")
        for name, choices in CHOICES.items():
            yield from checks.choice(self, choices, name)
        if self.form == "waveform" and self.dtype != "float32":
            yield (
                "dtype",
                f"is {self.dtype!r}, which a spectrogram may have; form='waveform' has rows of"
                " int16: unset it",
            )
        if self.audio_root and not files.expanded(self.audio_root).is_dir():
            hint = nearest(files.expanded(self.audio_root))
            yield "audio_root", f"is {self.audio_root!r}, which is not a folder{hint}"
        for name in self.exclude_paths:
            if name.startswith("@") and not files.expanded(name[1:]).is_file():
                hint = nearest(pathlib.Path(name[1:]))
                yield "exclude_paths", f"names the list {name[1:]!r}, which is not a file{hint}"
        yield from checks.threads(self, least=0)
        yield from checks.at_least(self, 1, "views")
        negative_rows = [row for row in self.exclude if row < 0]
        if negative_rows:
            yield "exclude", f"holds {negative_rows[0]}; rows are counted from 0"
        profile = _rust.build_profile()
        if profile != "release" and not self.allow_debug_build:
            yield (
                "allow_debug_build",
                f"is False, but the extension is a {profile} build, which is many times slower;"
                " say `make train` in the checkout, or pip install its wheel",
            )

    def _validate_paths(self) -> Iterator[tuple[str, str]]:
        yield from self._validate_path("train", self.train, self.train_split)
        yield from self._validate_path("test", self.test, self.test_split)
        yield from self._validate_path("background", self.background, "train")
        if self.test or self.train == "demo":
            return
        folder = files.expanded(self.train)
        if not folder.is_dir():
            return
        with contextlib.suppress(DataError):  # an error of train's
            if has_split(folder, self.test_split):
                yield from _validate_rows("train", shards_of_split(folder, self.test_split))
            elif self.test_split != "test":
                expected = checks.expected(self.test_split, splits_of(folder))
                yield "test_split", f"is {self.test_split!r}; {expected}"

    def _validate_path(self, field: str, path: str, split: str) -> Iterator[tuple[str, str]]:
        # imports pyarrow, which an exported encoder's example does without
        from loaders.audio import prepared

        if not path or path == "demo" or remote.is_remote(path):
            return
        try:
            problem = prepared.problem(path, self)
            if problem:
                yield field, problem
                return
            shards = find_shards(path, split, links=self.follow_links)
            if field != "background":
                yield from _validate_rows(field, shards)
        except DataError as error:
            yield field, str(error)

    def _validate_clip(self) -> Iterator[tuple[str, str]]:
        frames = self.n_clip_frames(self.clip_samples)
        if not 1 <= frames <= self.n_frames:
            shortest = self.window / self.sample_rate
            longest = (self.window + (self.n_frames - 1) * self.hop) / self.sample_rate
            yield (
                "clip_seconds",
                f"is {self.clip_seconds}, which makes {frames} frames; n_frames={self.n_frames}"
                f" holds {shortest:g} s to {longest:g} s",
            )

    def exists(self) -> bool:
        """Return False when reading the dataset info would first have to copy the data."""
        paths = (self.train, self.test, self.background)
        return all(remote.is_complete(path) for path in paths if remote.is_remote(path))

    def missing(self) -> str:
        """Why no row can be read yet: the data must be copied, or the built-in birds made."""
        from loaders.audio import demo  # imports encoders, which nothing else here needs

        if self.train == "demo" and not demo.folder().is_dir():
            return "the built-in birds are not made yet; the first run makes them"
        return super().missing()

    @property
    def clip_samples(self) -> int:
        return round(self.clip_seconds * self.sample_rate)


@dataclass(frozen=True)
class Split:
    """The recordings of a split: some rows of an index."""

    index: "_rust.Index | None"  # None: the split is empty
    rows: np.ndarray  # int64 [n]
    lists: ClassLists | None  # with `Config.multilabel`
    shards: Sequence[pathlib.Path] = ()  # of the index

    @property
    def n_unlabelled(self) -> int:
        """The number of recordings whose label is null."""
        if not self.index:
            return 0
        labels = self.index.labels[self.rows]
        return int((labels < 0).sum())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, or none if the data do not name them."""
        if self.lists:
            return self.lists.names
        class_names = self.index.class_names if self.index else None
        return tuple(class_names or ())

    def rows_of_classes(self) -> np.ndarray:
        """Return the number of rows with each class, int64 [classes]."""
        n_classes = len(self.names)
        if self.lists:
            is_in_split = np.zeros(len(self.lists.starts) - 1, bool)
            is_in_split[self.rows] = True
            is_counted = np.repeat(is_in_split, np.diff(self.lists.starts))
            return np.bincount(self.lists.classes[is_counted], minlength=n_classes)
        if self.index is None:
            return np.zeros(n_classes, np.int64)
        labels = self.index.labels[self.rows]
        return np.bincount(labels[labels >= 0], minlength=n_classes)

    def recording_paths(self, audio_root: str) -> list[str]:
        """Return the paths of its recordings, each once."""
        if self.index is None:
            return []
        file = index_file(self.shards[0])
        root = audio_root or (str(index_root(file)) if file else "")
        return [os.path.join(root, name) for name in _names(self.index, self.rows)]

    @property
    def has_parts(self) -> bool:
        """Whether its rows are parts of recordings, as those of an index."""
        return self.index is not None and self.index.part(0) is not None


class Spectrograms(Loader):
    """Crops of recordings. Fields, r rows for each range:

    spectrogram  float32 or bfloat16 [r, n_frames, n_mels], of several views [r, views, …]
    waveform     int16 [r, samples] or [r, views, samples], instead with ``form="waveform"``
    label        int32 [r]    the class; -1 if it is null
    labels       uint8 [r, classes]  instead with ``multilabel``: 1 for each class it has
    background   as these, with a ``background``: of another recording, in testing of the same one
    index        int32 [r]    the recording's row in its split's index; -1 in padding
    epoch        int32 [r]
    weight       float32 [r]  0 for padding, and in "test" for a recording that cannot be read

    The arrays are read-only, aligned to 64 bytes, and own their memory: it is reused when the last
    of a batch's arrays is gone, JAX arrays that alias them included.
    """

    fingerprint: str = ""
    order: dict[str, Any] = {}

    def __init__(
        self, config: Config, *, split: str, rows: Rows, seed: int, in_order: bool = False
    ):
        self._splits = _splits(config)
        recordings = self._splits[split]
        self._recordings = recordings
        index = recordings.index
        train = split == "train" and not in_order
        super().__init__(
            element_spec(config),
            train=train,
            rows=rows,
            seed=seed,
            n_batches=-(-len(recordings.rows) // rows.batch),
        )
        self._config = config
        self._lists = recordings.lists
        self.order = _order_settings(config, recordings.rows, rows.batch)
        self._pipelines: list[_rust.Pipeline] = []
        if index is not None:
            self._pipelines.append(self._make_pipeline(index, recordings.rows, seed))
            self.fingerprint = _fingerprint(index, recordings.shards, config)
            self.population = Population(recordings.rows, index.first_rows)
        if config.background and train:
            links = config.follow_links
            shards = find_shards(resolve(config.background, wait=False), "train", links=links)
            noise = open_index(shards, label="", audio_root=config.audio_root, links=links)
            noise_seed = int(order_lib.hash_of(BACKGROUND, seed)[0])
            self.order["background"] = _fingerprint(noise, shards, config)
            self._pipelines.append(self._make_pipeline(noise, np.arange(noise.n_rows), noise_seed))

    def _make_pipeline(self, index: "_rust.Index", rows: np.ndarray, seed: int) -> "_rust.Pipeline":
        batch, ranges = self._rows
        settings = pipeline_settings(
            self._config, rows, batch, ranges, seed=seed, train=self._train
        )
        try:
            return _rust.Pipeline(index, settings)
        except ValueError as error:
            raise DataError(str(error)) from error

    def seek(self, position: int) -> None:
        super().seek(position)
        for pipeline in self._pipelines:
            pipeline.seek(position)

    def doubts(self) -> list[str]:
        """Classes without a row to train on, and recordings of an index in both splits."""
        train, test = self._splits["train"], self._splits["test"]
        n_test = test.rows_of_classes() if test.names else np.zeros(len(train.names), np.int64)
        sentences = doubts.of_classes(train.names, train.rows_of_classes(), n_test)
        if train.has_parts and test.has_parts:
            audio_root = self._config.audio_root
            sentences += doubts.of_recordings(
                train.recording_paths(audio_root), test.recording_paths(audio_root)
            )
        return sentences

    def sources(self) -> list[tuple[str, int, str]]:
        """Name, bytes and digest of the recordings of an index."""
        split = self._recordings
        file = index_file(split.shards[0]) if split.shards else None
        if split.index is None or file is None:
            return []
        # imports pyarrow, which a batch does not need
        from loaders.audio import prepared
        from loaders.audio.recordings import store

        contents: dict[str, tuple[int, str]] = {}
        if not (file.parent / prepared.NAME).is_file():  # else the contents are no recording's
            contents = store.read_contents(file.parent)
        return [(name, *contents.get(name, (0, ""))) for name in _names(split.index, split.rows)]

    def diagnostics(self) -> dict[str, Any]:
        return self._pipelines[0].diagnostics() if self._pipelines else {}

    def close(self) -> None:
        super().close()
        for pipeline in self._pipelines:
            pipeline.close()

    def _batch(self, position: int) -> HostBatch:
        """Return the pipeline's next batch: it works ahead, and its position is this loader's."""
        try:
            batches = [pipeline.next()[1] for pipeline in self._pipelines]
        except RuntimeError as error:
            raise DataError(f"{error}{remote.reasons()}") from error
        batch = batches[0]
        clip = self._config.form
        if "background" in self.element_spec:
            batch["background"] = batches[-1][clip]
        # The extension gives bfloat16 as uint16, for which numpy has no name of its own.
        for name in {clip, "background"} & set(batch):
            dtype = self.element_spec[name].dtype
            batch[name] = [rows.view(dtype) for rows in batch[name]]
        if self._lists:
            del batch["label"]
            batch["labels"] = [self._lists.hot(index) for index in batch["index"]]
        return batch


def pipeline_settings(
    config: Config,
    rows: np.ndarray,
    batch: int,
    ranges: Sequence[tuple[int, int]],
    *,
    seed: int,
    train: bool,
) -> PipelineSettings:
    """Return the settings of a pipeline that reads these rows of an index as a config says."""
    form = "waveform" if config.form == "waveform" else config.dtype
    has_blocks = config.order == "block"
    return PipelineSettings(
        rows=rows,
        batch=batch,
        ranges=list(ranges),
        seed=seed,
        train=train,
        bank=filter_bank(config),
        time_expansion=config.time_expansion,
        clip_samples=config.clip_samples,
        n_frames=config.n_frames,
        views=config.views,
        form=cast(Literal["float32", "bfloat16", "waveform"], form),
        channel=config.channel if config.channel >= 0 else None,
        short=cast(Literal["random", "centre", "start", "origin"], config.short),
        repeat=config.short_fill == "repeat",
        silence=config.around == "silence",
        block=(BLOCK_ROWS, BLOCK_WINDOW) if has_blocks else None,
        threads=config.threads or machine.cores(),
        depth=READY_BATCHES,
        bad_budget=config.bad_budget,
    )


def filter_bank(of: FrontEnd) -> "_rust.FilterBank":
    """Return the tables of a front end. Raises ValueError for what its ``validate`` reports."""
    return _filter_bank(**of.settings)


_filter_bank = functools.lru_cache(maxsize=16)(_rust.FilterBank)


def front_end(
    wave: np.ndarray,
    rate: int = 32_000,
    *,
    clip_seconds: float = 5.0,
    n_frames: int = 512,
    of: FrontEnd = DEFAULT,
) -> np.ndarray:
    """Return mono sound, float32 [n] at ``rate`` Hz, as an encoder with front end ``of`` sees it.

    Float32 [n_frames, n_mels], byte for byte what the pipeline gives for the same samples in a test
    split: resampled, cut to its centre or put between zeros to the clip's length, then Kaldi
    log-mel, padded with the minimum and normalised. `decode` makes such a waveform from a file.

    Raises ValueError: a rate of 0, a clip that makes no frame or more than ``n_frames``, samples
    that are not finite.
    """
    wave = np.ascontiguousarray(wave, np.float32)
    clip_samples = round(clip_seconds * of.sample_rate)
    return _rust.front_end(wave, rate, clip_samples, n_frames, bank=filter_bank(of))


decode = _rust.decode


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype."""
    scalar = Field((), np.dtype(np.int32))
    shape: tuple[int, ...]
    if config.form == "waveform":
        shape, dtype = (config.clip_samples,), np.dtype(np.int16)
    else:
        shape, dtype = (config.n_frames, config.n_mels), DTYPES[config.dtype]
    if config.views > 1:
        shape = (config.views, *shape)
    clip = Field(shape, dtype)
    spec = {config.form: clip}
    if not config.multilabel:
        spec["label"] = scalar
    if config.background:
        spec["background"] = clip
    if config.multilabel:  # as many classes as the data name
        n_classes = len(_splits(config, make=False)["train"].names)
        spec["labels"] = Field((n_classes,), np.dtype(np.uint8))
    spec["index"] = scalar
    spec["epoch"] = scalar
    spec["weight"] = Field((), np.dtype(np.float32))
    return spec


def dataset_info(config: Config) -> DatasetInfo:
    """Return the dataset info, read without decoding. "demo" need not be made for it.

    - n_train, n_test: recordings of each split.
    - n_recordings: rows of train's index, excluded ones included: one more than the largest
      ``index`` in a batch.
    - n_unlabelled: recordings of both splits whose label is null.
    - class_names, n_classes: of the label, both absent if the data do not name classes.
    - views, n_frames, n_mels, front_end, form, multilabel, background: of a row.

    Raises:
      DataError: shards that cannot be used, or that hold other classes in "test" than in "train".
    """
    splits = _splits(config, make=False)
    train = splits["train"]
    n_unlabelled = 0
    if config.label and not config.multilabel:
        n_unlabelled = sum(split.n_unlabelled for split in splits.values())
    info: dict[str, Any] = {
        "n_train": len(train.rows),
        "n_test": len(splits["test"].rows),
        "n_recordings": train.index.n_rows if train.index else 0,
        "n_unlabelled": n_unlabelled,
        "background": bool(config.background),
        "views": config.views,
        "n_frames": config.n_frames,
        "n_mels": config.n_mels,
        "front_end": config.front_end,
        "form": config.form,
        "multilabel": config.multilabel,
    }
    if train.names:
        info["n_classes"] = len(train.names)
        info["class_names"] = train.names
    return info


def recordings(config: Config, *, split: str = "train", most: int) -> list[str]:
    """Return the names of a split's recordings, or none of data with more than ``most`` rows.

    Raises DataError: shards that cannot be used.
    """
    recordings = _splits(config, make=False)[split]
    if recordings.index is None or len(recordings.rows) > most:
        return []
    return _names(recordings.index, recordings.rows)


def _names(index: "_rust.Index", rows: np.ndarray) -> list[str]:
    """Return the names of the recordings of some rows, each once."""
    names = index.paths()
    unique_names = dict.fromkeys(names[row] for row in rows.tolist())
    return list(filter(None, unique_names))


def make_loader(
    config: Config, *, split: str, rows: Rows, seed: int, in_order: bool = False
) -> Spectrograms:
    """Return a loader that starts to work at its first ``seek`` or ``next``.

    ``in_order``: "train" is read as "test" always is: each recording once, in order.

    Raises DataError: unusable shards, or in ``next`` more bad recordings than ``bad_budget``.
    """
    refuse_invalid(config)
    return Spectrograms(config, split=split, rows=rows, seed=seed, in_order=in_order)


def _fingerprint(index: "_rust.Index", shards: Sequence[pathlib.Path], config: Config) -> str:
    return fingerprint(index, shards, audio_root=config.audio_root, links=config.follow_links)


def _order_settings(config: Config, rows: np.ndarray, batch: int) -> dict[str, Any]:
    """Return everything but the seed and the data that decides a row of a batch."""
    hashes = order_lib.hash_of(np.arange(len(rows)), rows)
    folded = int(np.bitwise_xor.reduce(hashes, initial=np.uint64(0)))
    # A digest of the rows and their order, which covers exclude and test_share.
    digest = int(order_lib.hash_of(len(rows), folded)[0])
    decisive: dict[str, Any] = {
        "version": _rust.ORDER_VERSION,
        "batch": batch,
        "n_rows": len(rows),
        "rows": f"{digest:016x}",
        "short": config.short,
        "short_fill": config.short_fill,
        "around": config.around,
        "channel": config.channel,
        "time_expansion": config.time_expansion,
        **config.settings,
    }
    if config.order == "block":
        decisive["block"] = [BLOCK_ROWS, BLOCK_WINDOW]
    return decisive


def _splits(config: Config, *, make: bool = True) -> dict[str, Split]:
    """Return both splits; without ``make`` an outline will do. Raises DataError."""
    # Lists of classes are read from the shards themselves, so these must be whole.
    train_path = resolve(config.train, make=make, wait=config.multilabel)
    test_path = resolve(config.test, make=make, wait=config.multilabel)
    train_shards = find_shards(train_path, config.train_split, links=config.follow_links)
    index, lists = _open(train_shards, config)
    rows = _without_excluded(index, train_path, config)
    test_shards = _find_test_shards(train_path, test_path, config)
    if test_shards:
        train = Split(index, rows, lists, train_shards)
        test = _open_test(test_shards, config)
        if test.names != train.names:
            raise DataError(
                f"{test_path or files.expanded(train_path) / 'test'} has other classes than"
                f" {train_path}: {len(test.names)} and {len(train.names)} names; both must name the"
                " same ones in the same order"
            )
    else:
        is_test = order_lib.held_out(_recording_numbers(index, rows), config.test_share)
        train = Split(index, rows[~is_test], lists, train_shards)
        test = Split(index, rows[is_test], lists, train_shards)
    if not len(train.rows):
        raise DataError(f"{train_path} leaves no recordings to train on, of {index.n_rows}")
    if not len(test.rows):
        test = Split(None, np.arange(0), None)
    return {"train": train, "test": test}


def _recording_numbers(index: "_rust.Index", rows: np.ndarray) -> np.ndarray:
    """Return a number for each row, int64 [n], by which it is held out: one of its recording.

    Of shards that is its row, and of an index a hash of its name, if recordings have several rows.
    """
    if index.part(0) is None:
        return rows
    names = [name or "" for name in index.paths()]
    number_of: dict[str, int] = {}
    for name in set(names):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        number_of[name] = int.from_bytes(digest, "big") >> 1
    if len(number_of) == len(names):
        return rows
    return np.array([number_of[names[row]] for row in rows.tolist()], np.int64)


def _find_test_shards(train_path: str, test_path: str, config: Config) -> list[pathlib.Path]:
    """Return the shards of "test", or none if a share of train's recordings is tested on."""
    if test_path:
        return find_shards(test_path, config.test_split, links=config.follow_links)
    folder = files.expanded(train_path)
    if folder.is_dir() and has_split(folder, config.test_split):
        return shards_of_split(folder, config.test_split, links=config.follow_links)
    return []


def _open_test(shards: list[pathlib.Path], config: Config) -> Split:
    index, lists = _open(shards, config)
    return Split(index, np.arange(index.n_rows), lists, shards)


def _without_excluded(index: "_rust.Index", path: str, config: Config) -> np.ndarray:
    """Return the rows of train's index that may be read. Raises DataError."""
    rows = np.arange(index.n_rows)
    excluded = sorted(set(config.exclude))
    if config.exclude_of not in (0, index.n_rows):
        log.warning(
            "exclude was written for an index of %d rows, and %s has %d: it excludes none;"
            " unreadable recordings are counted",
            config.exclude_of,
            path,
            index.n_rows,
        )
    elif excluded:
        if excluded[-1] >= index.n_rows:
            raise DataError(
                f"exclude names row {excluded[-1]}, but {path} has {index.n_rows} recordings"
            )
        rows = np.setdiff1d(rows, excluded)
    names = _excluded_names(config.exclude_paths)
    if names:
        excluded_rows, n_known = index.rows_named(names)
        if n_known < len(names):
            unknown = next(name for name in sorted(names) if not index.rows_named({name})[1])
            raise DataError(
                f"exclude_paths names {unknown!r}, which is not an audio.path in {path}, nor"
                " an id of one"
            )
        rows = np.setdiff1d(rows, excluded_rows)
    return rows


def _excluded_names(names: Sequence[str]) -> set[str]:
    excluded: set[str] = set()
    for name in names:
        if not name.startswith("@"):
            excluded.add(name)
            continue
        try:
            lines = files.lines(files.read_text(files.expanded(name[1:]), most=files.MAX_JSON))
        except (OSError, files.FileError) as error:
            raise DataError(f"exclude_paths: cannot read the list {name[1:]}: {error}") from error
        excluded.update(line.strip() for line in lines if line.strip())
    return excluded


def _open(
    shards: Sequence[pathlib.Path], config: Config
) -> tuple["_rust.Index", ClassLists | None]:
    column = label_column(shards, config.label, config.multilabel)
    label = "" if config.multilabel else column
    index = open_index(shards, label=label, audio_root=config.audio_root, links=config.follow_links)
    lists = read_class_lists(shards, column) if config.multilabel else None
    return index, lists


def _validate_rows(field: str, shards: Sequence[pathlib.Path]) -> Iterator[tuple[str, str]]:
    """Yield the error of reading events of recordings as clips, as of BirdSet's "test"."""
    from loaders.io import columnar  # imports pyarrow, which a batch does not need

    names = None if index_file(shards[0]) else columnar.timed(shards[0])
    if names:
        start, end = names
        yield (
            field,
            f"leads to {shards[0]}, whose rows are events of long recordings (columns {start!r} and"
            f" {end!r}): the loader would read the centre of each recording instead. Of BirdSet,"
            " score test_split='test_5s'; make an index of other events with jaxtrain index",
        )
