"""Log-mel spectrograms of recordings in Arrow or Parquet shards: the Python face of the Rust pipeline.

One row of a batch is one crop of one recording: float32 [n_frames, 128], Kaldi log-mel, padded with its minimum and
normalised as (x + 7.2) / 8.86. Training draws a random crop in a permuted order without end; testing takes the centre crop
of every recording once. Which row holds what is a function of (seed, position, row) alone: see `loaders.order`.

With ``views`` > 1 a row is [views, n_frames, 128]: that many crops of one recording, each drawn for itself, or in testing
spread evenly. Views that overlap are decoded once, so that in MP3 and Vorbis a view can differ in the last bits from the
same crop decoded alone. With ``dtype="bfloat16"`` the rows are rounded to nearest even, and half as many bytes cross to
the device.

With ``form="waveform"`` a row is the crop itself, int16 [160000] of 5 s: the samples at 32 kHz that the filter bank would take,
times 32768, rounded to nearest even and clipped. The model makes the spectrogram, on the device (`jaxtrain.nn.log_mel`): less
to do for the cores, and 1.2 times the bytes of a float32 row. What is quieter than a 16-bit sample can say differs.

`front_end` is the same alone: a waveform in, the spectrogram out that a test split would hold of it, byte for byte.

With ``multilabel`` the column of labels holds a list of classes for each recording, and a row has "labels" instead of "label".
With ``background`` a training row also has that many crops of another recording, of noise, drawn in an order of its own.

What is known of the shards without reading audio (places, labels, class names) is kept for corpora of 16 shards or more in
$JAXTRAIN_CACHE/index (or ~/.cache/jaxtrain/index) until a shard's name, size or time changes. Of 528,422 rows in 690 shards
on a local disk (python -m tools.index_scale): 7.3 s without it where no file is in memory, 0.14 s where all are, 0.2 s from
its 14 MB in either case, and 19 MB resident. A seek takes 0.03 ms in the global order and 12 ms in the block order.

A path is one of

    a folder that ``datasets.save_to_disk`` wrote      its shards, in the order that state.json gives
    such a folder of several splits                    its train/; and its test/, unless ``test`` names another
    a folder of ``*.arrow``, as in the datasets cache  by name; with several splits (``name-train-00000-of-00007.arrow``),
                                                       those of "train", and of "test"
    a folder of ``*.parquet``, as the Hub stores them  the same, also where they lie in its data/
    a glob, or one file                                by name
    "demo"                                             the built-in corpus, made at its first use
"""

import difflib
import functools
import glob
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from loaders import checks, machine, order
from loaders.base import DataError, Facts, Field, HostBatch, Population, Rows

try:
    from loaders import _rust
except ImportError as error:
    raise ModuleNotFoundError(
        "the Rust extension loaders._rust is not built; `make train` and `make test` do it, or: maturin develop --release"
    ) from error

N_MELS = 128
RATE = 32_000  # [Hz] that the filter bank is defined at
WINDOW, HOP = 800, 320  # [samples] of a frame
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FORMS = ("spectrogram", "waveform")
ORDERS = ("global", "block")
BACKGROUND = 0x6E6F697365  # sets the order of a background apart from that of the recordings
CACHED_SHARDS = 16  # fewer are indexed in less time than is worth a file


@dataclass(frozen=True)
class Config(checks.DataSection):
    """What is read, and how fast. Fields from ``bad_budget`` on change no number."""

    train: str = "demo"  # [path] folder or glob of shards, or "demo": synthetic birds, made at the first use
    test: str = ""  # [path] folder or glob to test on; empty = test/ beside train's train/, else a share of train
    test_share: float = 0.05  # [share] of the recordings kept for testing where no path holds any, chosen by row number
    label: str = "ebird_code"  # [column] of class labels (int64 ClassLabel); empty = no labels
    multilabel: bool = False  # [bool] the column holds lists of class labels, of any length
    background: str = ""  # [path] recordings of noise, for model.augment.background; empty = none
    audio_root: str = ""  # [path] of recordings that lie beside the shards, not in them; empty = each shard's folder
    exclude: tuple[int, ...] = ()  # [rows] of train's recordings that are never read
    exclude_paths: tuple[str, ...] = ()  # [names] of train's recordings, as in audio.path, never read; "@file": one a line
    sample_rate: int = 32_000  # [Hz] of the waveform before the filter bank; recordings are resampled to it
    clip_seconds: float = 5.0  # [s] of a recording in a row; shorter recordings are padded with silence
    n_frames: int = 512  # [frames] of a row, 10 ms each; a clip's frames are padded with their minimum
    views: int = 1  # [crops] of one recording in a row
    form: str = "spectrogram"  # [name] of a row: "spectrogram", or "waveform", of which the device makes the spectrogram
    dtype: str = "float32"  # [name] of a spectrogram's values: "float32" or "bfloat16"; a waveform's are int16
    order: str = "global"  # [name] of training: "global" permutes all rows; "block" runs of them, for network file systems
    block_rows: int = 8  # [rows] that lie side by side in a block of order="block", at most
    block_window: int = 256  # [blocks] whose rows are permuted among themselves, and that are read ahead
    bad_budget: float = 0.01  # [share] of the recordings that may be unreadable before the run stops
    threads: int = 0  # [threads] that decode; 0 = one for each core this process may use
    depth: int = 2  # [batches] finished ones that may wait
    allow_debug_build: bool = False  # [bool] go on with an extension that was built without optimisation

    def problems(self) -> Iterator[tuple[str, str]]:
        """(field, what is wrong and the remedy) of every mistake that shows without reading a shard."""
        for field in ("train", "test", "background"):
            path = getattr(self, field)
            if path and path != "demo":
                try:
                    find_shards(path, "test" if field == "test" else "train")
                except DataError as error:
                    yield field, str(error)
        if self.multilabel and not self.label:
            yield "multilabel", "is True, and label names no column"
        if not self.train:
            yield "train", 'is empty; name a folder or glob of Arrow shards, or use "demo"'
        yield from checks.within(self, "[0, 1]", "test_share", "bad_budget")
        if self.test_share == 1:
            yield "test_share", "is 1, which leaves nothing to train on"
        if self.sample_rate != RATE:
            yield "sample_rate", f"is {self.sample_rate}; the filter bank is defined at {RATE} Hz"
        elif not math.isfinite(self.clip_seconds):
            yield "clip_seconds", f"is {self.clip_seconds}; use a number of seconds, for example 5.0"
        elif not 1 <= (frames := n_clip_frames(self.clip_samples)) <= self.n_frames:
            longest = (WINDOW + (self.n_frames - 1) * HOP) / RATE
            yield (
                "clip_seconds",
                f"is {self.clip_seconds}, which makes {frames} frames; n_frames={self.n_frames} holds "
                f"{WINDOW / RATE:g} s to {longest:g} s",
            )
        yield from checks.choice(self, FORMS, "form")
        yield from checks.choice(self, DTYPES, "dtype")
        yield from checks.choice(self, ORDERS, "order")
        if self.form == "waveform" and self.dtype != "float32":
            yield "dtype", f"is {self.dtype!r}, of a spectrogram; form='waveform' has rows of int16: leave it out"
        if self.audio_root and not pathlib.Path(self.audio_root).expanduser().is_dir():
            yield (
                "audio_root",
                f"is {self.audio_root!r}, which is no folder{_nearest(pathlib.Path(self.audio_root).expanduser())}",
            )
        for name in self.exclude_paths:
            if name.startswith("@") and not pathlib.Path(name[1:]).expanduser().is_file():
                yield "exclude_paths", f"names the list {name[1:]!r}, which is no file{_nearest(pathlib.Path(name[1:]))}"
        yield from checks.not_negative(self, "threads")
        yield from checks.at_least(self, 1, "depth", "views", "block_rows", "block_window")
        if bad := [row for row in self.exclude if row < 0]:
            yield "exclude", f"holds {bad[0]}; rows are counted from 0"
        if _rust.build_profile() != "release" and not self.allow_debug_build:
            yield (
                "allow_debug_build",
                f"is False, and the extension is a {_rust.build_profile()} build, which is many times slower; build it "
                "with: maturin develop --release",
            )

    def exists(self) -> bool:
        """False when reading the facts would first have to make the data."""
        return "demo" not in (self.train, self.test)

    @property
    def clip_samples(self) -> int:
        return round(self.clip_seconds * self.sample_rate)


class Lists(NamedTuple):
    """The classes of all recordings of an index: those of recording i are classes[starts[i] : starts[i + 1]]."""

    names: tuple[str, ...]
    starts: np.ndarray  # int64 [n + 1]
    classes: np.ndarray  # int64

    def hot(self, index: np.ndarray) -> np.ndarray:
        """int [r] recordings, -1 for none -> uint8 [r, classes], 1 for each class of a recording."""
        found = np.zeros((len(index), len(self.names)), np.uint8)
        for row, i in zip(found, index, strict=True):
            if i >= 0:
                row[self.classes[self.starts[i] : self.starts[i + 1]]] = 1
        return found


class Split(NamedTuple):
    """The recordings of a split: some rows of an index."""

    index: "_rust.Index | None"  # None: the split is empty
    rows: np.ndarray  # int64 [n]
    lists: Lists | None  # with `Config.multilabel`

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes; empty where the data do not name them."""
        return self.lists.names if self.lists else tuple(self.index.class_names or ())


class Spectrograms:
    """A `loaders.base.Loader`. Fields, r rows for each range:

    spectrogram  float32 or bfloat16 [r, n_frames, 128], or [r, views, n_frames, 128] of several views
    waveform     int16 [r, samples], or [r, views, samples]  instead of spectrogram with ``form="waveform"``
    label        int32 [r]    the class; -1 where it is null
    labels       uint8 [r, classes]  instead of label with ``multilabel``: 1 for each class that the recording has
    background   as spectrogram, with a ``background``: of another recording; in testing, where nothing reads it, the same one
    index        int32 [r]    the recording's row in its split's index; -1 in the padding of a ragged last batch
    epoch        int32 [r]
    weight       float32 [r]  0 for padding, and in "test" for a recording that cannot be read

    The arrays are read-only, aligned to 64 bytes, and own their memory: it is used again when the last of a batch's arrays
    is gone, JAX arrays that alias them included.
    """

    def __init__(
        self,
        pipeline: "_rust.Pipeline | None",
        *,
        fields: dict[str, Field],
        n_batches: int,
        state: dict[str, Any],
        background: "_rust.Pipeline | None" = None,
        lists: Lists | None = None,
        population: Population | None = None,
    ):
        self.fields = fields
        self._clip = next(name for name in ("spectrogram", "waveform") if name in fields)
        self.n_batches = n_batches
        self.population = population
        self._pipeline = pipeline
        self._background = background
        self._lists = lists
        self._state = state

    def __iter__(self) -> "Spectrograms":
        return self

    def __next__(self) -> tuple[int, HostBatch]:
        if self._pipeline is None:
            raise StopIteration
        try:
            position, batch = self._pipeline.next()
            if "background" in self.fields:
                batch["background"] = (self._background.next()[1] if self._background else batch)[self._clip]
        except RuntimeError as error:
            raise DataError(str(error)) from error
        # The extension gives bfloat16 as uint16, for which numpy has a name.
        for name in {self._clip, "background"} & set(batch):
            batch[name] = [rows.view(self.fields[name].dtype) for rows in batch[name]]
        if self._lists:
            del batch["label"]
            batch["labels"] = [self._lists.hot(index) for index in batch["index"]]
        return position, batch

    def seek(self, position: int) -> None:
        for pipeline in (self._pipeline, self._background):
            if pipeline is not None:
                pipeline.seek(position)

    def state(self, position: int) -> dict[str, Any]:
        return {"position": position, **self._state}

    def diagnostics(self) -> dict[str, Any]:
        return {} if self._pipeline is None else self._pipeline.diagnostics()

    def close(self) -> None:
        for pipeline in (self._pipeline, self._background):
            if pipeline is not None:
                pipeline.close()


def front_end(wave: np.ndarray, rate: int = RATE, *, clip_seconds: float = 5.0, n_frames: int = 512) -> np.ndarray:
    """A mono waveform, float32 [n] at ``rate`` Hz, as an encoder sees it: float32 [n_frames, 128].

    Resampled to 32 kHz; its centre where it is longer than the clip, between zeros where it is shorter; Kaldi log-mel, padded
    with the minimum, and normalised: the bytes that the pipeline gives of the same samples in a test split. `decode` makes such
    a waveform of a file's bytes.

    Raises ValueError: a rate of 0, a clip that makes no frame or more than ``n_frames``, samples that are not finite.
    """
    wave = np.ascontiguousarray(wave, np.float32)
    return _rust.front_end(wave, rate, round(clip_seconds * RATE), n_frames)


decode = _rust.decode


def fields(config: Config) -> dict[str, Field]:
    """Field -> shape of one row, dtype."""
    scalar = Field((), np.dtype(np.int32))
    views = () if config.views == 1 else (config.views,)
    if config.form == "waveform":
        clip = Field((*views, config.clip_samples), np.dtype(np.int16))
    else:
        clip = Field((*views, config.n_frames, N_MELS), DTYPES[config.dtype])
    found = {config.form: clip, "label": scalar}
    if config.background:
        found["background"] = clip
    if config.multilabel:  # as many as the data name
        del found["label"]
        found["labels"] = Field((len(_splits(config)["train"].names),), np.dtype(np.uint8))
    return {**found, "index": scalar, "epoch": scalar, "weight": Field((), np.dtype(np.float32))}


def facts(config: Config) -> Facts:
    """What the data themselves decide, read without decoding.

    n_train, n_test: recordings of each split. n_recordings: rows of train's index, excluded ones included: one more than
    the largest ``index`` in a batch. n_unlabelled: recordings of both splits whose label is null. class_names, n_classes:
    of the label, both absent when the data do not name classes. views, n_frames, form, multilabel, background: of a row.

    Raises:
      DataError: shards that cannot be used, or that hold other classes in "test" than in "train".
    """
    splits = _splits(config)
    train, test = splits["train"], splits["test"]
    found = {
        "n_train": len(train.rows),
        "n_test": len(test.rows),
        "n_recordings": train.index.n_rows,
        "n_unlabelled": sum(
            int((s.index.labels[s.rows] < 0).sum())
            for s in splits.values()
            if s.index and config.label and not config.multilabel
        ),
        "views": config.views,
        "n_frames": config.n_frames,
        "form": config.form,
        "multilabel": config.multilabel,
        "background": bool(config.background),
    }
    if names := train.names:
        found |= {"n_classes": len(names), "class_names": names}
    return found


def make_loader(config: Config, *, split: str, rows: Rows, seed: int, in_order: bool = False) -> Spectrograms:
    """A loader of ``split`` ("train" or "test") that starts to work at its first ``seek`` or ``next``.

    ``in_order``: "train" is read as "test" always is: each recording once, in order, its centre or its views evenly.

    Raises:
      DataError: shards that cannot be used; in ``next``: more unreadable recordings than ``bad_budget`` allows.
    """
    for field, text in config.problems():
        raise DataError(f"data.{field} {text}")
    index, chosen, lists = _splits(config)[split]
    train = split == "train" and not in_order
    n_batches = -(-len(chosen) // rows.batch)
    state = {
        "seed": seed,
        "fingerprint": index.fingerprint if index else "",
        "order": {
            "version": _rust.ORDER_VERSION,
            "batch": rows.batch,
            "n_rows": len(chosen),
            "rows": f"{int(order.hash_of(len(chosen), _fold(chosen))[0]):016x}",  # covers exclude and test_share
        },
    }
    block = None
    if config.order == "block":
        block = (config.block_rows, config.block_window)
        state["order"] |= {"block": list(block)}  # other than these, and another recording is at a position

    def pipeline(index: "_rust.Index", chosen: np.ndarray, seed: int) -> "_rust.Pipeline":
        try:
            return _rust.Pipeline(
                index,
                rows=chosen,
                batch=rows.batch,
                ranges=list(rows.ranges),
                seed=seed,
                train=train,
                sample_rate=config.sample_rate,
                clip_samples=config.clip_samples,
                n_frames=config.n_frames,
                views=config.views,
                form="waveform" if config.form == "waveform" else config.dtype,
                block=block,
                threads=config.threads or machine.cores(),
                depth=config.depth,
                bad_budget=config.bad_budget,
            )
        except ValueError as error:
            raise DataError(str(error)) from error

    noise = None
    if config.background and train:
        found = _open(find_shards(made(config.background), "train"), config, label="")
        state["order"] |= {"background": found.fingerprint}
        noise = pipeline(found, np.arange(found.n_rows), int(order.hash_of(BACKGROUND, seed)[0]))
    return Spectrograms(
        pipeline(index, chosen, seed) if index is not None else None,
        fields=fields(config),
        n_batches=n_batches,
        state=state,
        background=noise,
        lists=lists,
        population=Population(chosen, index.first_rows) if index is not None else None,
    )


def n_clip_frames(n_samples: int) -> int:
    """Whole frames in a clip."""
    return 0 if n_samples < WINDOW else 1 + (n_samples - WINDOW) // HOP


def find_shards(path: str, split: str) -> list[pathlib.Path]:
    """The shards of ``split`` ("train" or "test") at a path, in order. See the module's docstring.

    Raises:
      DataError: nothing is there; says what is there instead.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_file():
        return [folder]
    if folder.is_dir():
        if shards := _split_shards(folder, split):
            return shards
        inside = sorted(p.name for p in folder.iterdir())
        if splits := sorted({*_by_split(folder), *(name for name in inside if _shards(folder / name))}):
            raise DataError(f"is {path!r}, a folder without the split {split!r}; it has {', '.join(splits)}")
        raise DataError(f"is {path!r}, a folder without Arrow or Parquet shards; it holds {', '.join(inside[:5]) or 'nothing'}")
    if glob.has_magic(path):
        if found := sorted(p for p in map(pathlib.Path, glob.glob(str(folder), recursive=True)) if p.is_file()):
            return found
        fixed = next(p for p in folder.parents if not glob.has_magic(str(p)))
        there = f"{fixed} exists" if fixed.is_dir() else f"{fixed} does not exist{_nearest(fixed)}"
        raise DataError(f"is {path!r}, which matches no file; {there}")
    raise DataError(f"is {path!r}, which does not exist{_nearest(folder)}")


def _nearest(path: pathlib.Path) -> str:
    """The remedy for a missing path: a sibling of nearly this name, or how far down the path exists."""
    parent, missing = path.absolute().parent, path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    siblings = sorted(p.name for p in parent.iterdir())
    if close := difflib.get_close_matches(missing, siblings, n=1):
        return f"; did you mean {str(parent / close[0])!r}?"
    return f"; {parent} exists, and holds {', '.join(siblings[:5]) or 'nothing'}{', …' if len(siblings) > 5 else ''}"


def _split_shards(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """A folder's shards of one split; none when it holds others only."""
    if any(_shards(folder / name) for name in ("train", "test")):
        return _shards(folder / split)
    if groups := _by_split(folder):
        return groups.get(split, [])
    return _shards(folder) or _in_data(folder, split)


def _in_data(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
    """A repository of the Hub keeps its shards in data/, named by their splits."""
    return _by_split(folder / "data").get(split, []) if not _shards(folder) else []


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    """The shards right in a folder: those that state.json lists, or by name."""
    state = folder / "state.json"
    if state.is_file():
        try:
            return [folder / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"has a broken {state}: {error!r}; save the dataset again") from error
    # cache-….arrow are results of datasets' map and filter, beside the data that they came from
    shards = [p for p in folder.glob("*.arrow") if not p.name.startswith(("cache-", "tmp"))]
    return sorted(shards or folder.glob("*.parquet"))


def _by_split(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """Shards of a folder by split: name-SPLIT.arrow, name-SPLIT-00000-of-00007.arrow, SPLIT-00000-of-00007.parquet.

    Empty when no name speaks of "train" or "test": then the folder is not split, whatever else has a dash in its name.
    """
    groups: dict[str, list[pathlib.Path]] = {}
    if (folder / "state.json").is_file():
        return groups
    for shard in _shards(folder):
        match = re.fullmatch(r"(?:.+-)?([A-Za-z]\w*?)(-\d{5}-of-\d{5}(-[0-9a-f]{16})?)?\.(arrow|parquet)", shard.name)
        groups.setdefault(match[1] if match else "", []).append(shard)
    return groups if {"train", "test"} & set(groups) else {}


def _splits(config: Config) -> dict[str, Split]:
    train_path, test_path = (made(path) for path in (config.train, config.test))
    shards = find_shards(train_path, "train")
    train, train_lists = _open(shards, config), _lists(shards, config)
    rows = np.arange(train.n_rows)
    if excluded := sorted(set(config.exclude)):
        if excluded[-1] >= train.n_rows:
            raise DataError(f"exclude names row {excluded[-1]}, but {train_path} has {train.n_rows} recordings")
        rows = np.setdiff1d(rows, excluded)
    if names := _listed(config.exclude_paths):
        paths = train.paths()
        if missing := sorted(names.difference(paths)):
            raise DataError(f"exclude_paths names {missing[0]!r}, which is no audio.path in {train_path}")
        rows = np.array([row for row in rows if paths[row] not in names], np.int64)

    folder = pathlib.Path(train_path).expanduser()
    beside = _split_shards(folder, "test") if not test_path and folder.is_dir() and _has_splits(folder) else []
    if test_path or beside:
        test_shards = find_shards(test_path, "test") if test_path else beside
        test = _open(test_shards, config)
        splits = {
            "train": Split(train, rows, train_lists),
            "test": Split(test, np.arange(test.n_rows), _lists(test_shards, config)),
        }
        train_names, test_names = (splits[name].names for name in ("train", "test"))
        if test_names != train_names:
            raise DataError(
                f"{test_path or folder / 'test'} has other classes than {train_path}: {len(test_names)} and "
                f"{len(train_names)} names; both must name the same ones in the same order"
            )
    else:
        held = order.held_out(rows, config.test_share)
        splits = {
            name: Split(train, rows[held == is_test], train_lists) for name, is_test in (("train", False), ("test", True))
        }
    if not len(splits["train"].rows):
        raise DataError(f"{train_path} leaves no recordings to train on, of {train.n_rows}")
    if not len(splits["test"].rows):
        splits["test"] = Split(None, np.arange(0), None)
    return splits


def _has_splits(folder: pathlib.Path) -> bool:
    return bool(_shards(folder / "test")) or "test" in _by_split(folder) or _in_data(folder, "test")


def made(path: str) -> str:
    """The folder behind "demo", made at its first use; any other path as it is."""
    if path != "demo":
        return path
    from loaders import demo  # brings encoders along, which nothing else here needs

    return str(demo.ensure())


def _listed(names: Sequence[str]) -> set[str]:
    """Names, those of "@file" read from it."""
    found: set[str] = set()
    for name in names:
        if name.startswith("@"):
            try:
                lines = pathlib.Path(name[1:]).expanduser().read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"exclude_paths: cannot read the list {name[1:]}: {error}") from error
            found.update(line.strip() for line in lines if line.strip())
        else:
            found.add(name)
    return found


def _open(shards: Sequence[pathlib.Path], config: Config, *, label: str | None = None) -> "_rust.Index":
    label = ("" if config.multilabel else config.label) if label is None else label
    try:
        root = os.path.expanduser(config.audio_root) or None
        return _open_once(_stats(shards), label, root)
    except (ValueError, OSError) as error:
        hint = "; where it holds lists of classes, set data.multilabel=true" if "list" in str(error).lower() else ""
        raise DataError(f"{error}{hint}") from error


def _stats(shards: Sequence[pathlib.Path]) -> tuple[tuple[str, int, int], ...]:
    return tuple((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in shards)


def _lists(shards: Sequence[pathlib.Path], config: Config) -> Lists | None:
    return _lists_once(_stats(shards), config.label) if config.multilabel else None


@functools.lru_cache(maxsize=4)
def _lists_once(stats: tuple[tuple[str, int, int], ...], label: str) -> Lists:
    """Every recording's classes; audio is not read. Raises DataError."""
    from loaders import columnar  # brings pyarrow along, which nothing else here needs

    columns, names = [], None
    for path, _, _ in stats:
        column, names = columnar.read(pathlib.Path(path), label)
        if not columnar.is_list(column.type):
            raise DataError(
                f"{path}: column {label!r} holds {column.type}, and data.multilabel=true wants lists of int64 classes"
            )
        columns.append(column)
    if names is None:
        raise DataError(f"{stats[0][0]}: column {label!r} names no classes; cast it to a list of ClassLabel and save it again")
    rows = [row or [] for column in columns for row in column.to_pylist()]
    classes = np.array([one for row in rows for one in row], np.int64)
    if len(classes) and not 0 <= classes.min() <= classes.max() < len(names):
        raise DataError(f"{stats[0][0]}: column {label!r} has class {classes.max()}, and there are names for {len(names)}")
    return Lists(tuple(names), np.cumsum([0, *map(len, rows)]), classes)


@functools.lru_cache(maxsize=4)
def _open_once(stats: tuple[tuple[str, int, int], ...], label: str, root: str | None) -> "_rust.Index":
    """Facts and two loaders read the same shards: they are indexed once, and again when a file changed."""
    cache = machine.cache_folder("index") if len(stats) >= CACHED_SHARDS else None
    return _rust.Index([path for path, _, _ in stats], label=label or None, root=root, cache=cache)


def _fold(rows: np.ndarray) -> int:
    """A number that changes with the rows."""
    return int(np.bitwise_xor.reduce(order.hash_of(np.arange(len(rows)), rows), initial=np.uint64(0)))
