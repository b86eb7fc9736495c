"""Boards with one solution: Sudoku of 9 × 9, 6 × 6, 4 × 4, mazes, and mixtures.

They are read or generated. A source is a folder or, if its path is empty, a generator. There are
three formats, each with the splits "train" and "test":

  CSV    train.csv, test.csv: columns source, question, answer, rating; a board's characters row by
         row (`puzzles`). Of train, ``n_train`` rows are drawn by config.seed. A question with
         several solutions, and an answer that is none, is an error.
  npy    train/, test/: all__inputs.npy and all__labels.npy (uint8 [n, cells], symbols as below),
         all__puzzle_identifiers.npy (int [p]), all__puzzle_indices.npy (int [p + 1]: rows of a
         puzzle), all__group_indices.npy (int [g + 1]: puzzles of a group). Training takes one row
         of each group in an epoch. Its rows are already augmented, and are not augmented again.
  none   generated: see `puzzle_generators`. Kept in $JAXTRAIN_CACHE/puzzles (or
         ~/.cache/jaxtrain/puzzles), by the options of their generation. Their info follows from
         these alone, without generating anything.

Row r of a batch belongs to the source whose share of the batch covers r. Example s of a source (s =
position × its rows in a batch + r) is place s mod n of its epoch s // n (`loaders.order`). Its
augmentation is a function of (seed, epoch, index). "test" goes once through all sources, in an
order that is always the same and mixed: its first batches are a fair sample.
"""

import functools
import hashlib
import logging
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders import order
from loaders.base import DataError, DatasetInfo, Field, Loader, Rows, refuse_invalid
from loaders.io import atomic_write, checks, files, machine
from loaders.sudoku.puzzle_files import read_csv, read_npy
from loaders.sudoku.puzzle_generators import GENERATOR, generate
from loaders.sudoku.puzzles import (
    BOXES,
    CLASS_EDGES,
    GRADES,
    KINDS,
    VIEW,
    Puzzles,
    Source,
    augment,
    n_symbols,
)

log = logging.getLogger("jaxtrain")

VERSION = 1  # changes whenever the same (seed, epoch, index) would give another board
MAX_SIDE = 40  # [cells] of a maze
IGNORED = -100  # the label of a cell that is not predicted


@dataclass(frozen=True)
class Config(checks.DataSection):
    # the fingerprint and the order have those that change a row
    on_resume = checks.OnResume(checks.FREE)

    sources: tuple[Source, ...] = (Source(),)  # [sources] sources of a batch
    seed: int = 0  # [seed] seed of generated puzzles, and of the drawn rows of a CSV

    def validate(self) -> Iterator[tuple[str, str]]:
        if not self.sources:
            yield "sources", "is empty; name at least one, for example ({'kind': 'sudoku'},)"
        for i, source in enumerate(self.sources):
            for name, text in _source_errors(source):
                yield f"sources[{i}].{name}", text


def _source_errors(source: Source) -> Iterator[tuple[str, str]]:
    yield from checks.choice(source, KINDS, "kind")
    yield from checks.positive(source, "share")
    yield from checks.at_least(source, 0 if source.path else 1, "n_train")
    yield from checks.not_negative(source, "n_test", "views")
    if not 5 <= source.side <= MAX_SIDE:
        yield "side", f"is {source.side}; expected 5 to {MAX_SIDE}"
    smallest, largest = source.blanks
    if not 0 <= smallest <= largest:
        example = "expected the fewest and the most, for example (46, 64)"
        yield "blanks", f"is {source.blanks}; {example}"
    if source.grade:
        yield from checks.choice(source, GRADES, "grade")
        if source.path or source.kind not in BOXES:
            text = f"is {source.grade!r}, of a generated Sudoku alone; leave it empty"
            yield "grade", text
    if source.path and not files.expanded(source.path).is_dir():
        yield "path", f"is {source.path!r}, which is no folder; leave it empty to generate puzzles"


class Boards(Loader):
    """Puzzles and their solutions. Fields, r rows for each range:

    inputs, labels      int32 [r, cells]; labels that are not predicted are -100
    puzzle              int32 [r] row of the puzzle embedding
    difficulty          int32 [r] class of the puzzle's rating (`CLASS_EDGES`)
    index, epoch        int32 [r] the puzzle in its source and split, -1 in padding
    weight              float32 [r] 0 for padding
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self._config = config
        sources = config.sources
        self._puzzles = [_split(source, config.seed, split) for source in sources]
        self._first_id = np.cumsum([0, *(_n_ids(source, config.seed) for source in sources)])
        shares = np.cumsum([0.0, *(source.share for source in sources)])
        # of each source's rows in a batch
        self._bounds = np.round(shares / shares[-1] * rows.batch).astype(int)
        empty = np.flatnonzero(np.diff(self._bounds) == 0)
        if split == "train" and empty.size:
            raise DataError(
                f"sources[{empty[0]}].share gives no row of a batch of {rows.batch}; raise it, or"
                " the batch"
            )
        self._starts = np.cumsum([0, *(len(puzzles.inputs) for puzzles in self._puzzles)])
        n_batches = -(-int(self._starts[-1]) // rows.batch)
        super().__init__(
            element_spec(config), train=split == "train", rows=rows, seed=seed, n_batches=n_batches
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for puzzles in self._puzzles:
            for array in puzzles:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    @property
    def order(self) -> dict[str, Any]:
        return {
            "version": [order.VERSION, VERSION],
            "batch": self._rows.batch,
            "bounds": self._bounds.tolist(),
            "views": [source.views for source in self._config.sources],
        }

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        batch = self._empty(len(row))
        batch["labels"][:] = IGNORED
        if self._train:
            self._fill_train(batch, position, row)
        else:
            self._fill_test(batch, position, row)
        return batch

    def _fill_train(self, batch: dict[str, np.ndarray], position: int, row: np.ndarray) -> None:
        for k, source in enumerate(self._config.sources):
            first_row, end_row = self._bounds[k : k + 2]
            places = np.flatnonzero((row >= first_row) & (row < end_row))
            if not places.size:
                continue
            puzzles = self._puzzles[k]
            seed = self._seed + (k << 32)  # sources draw independently
            example = position * int(end_row - first_row) + row[places] - first_row
            epoch, group = order.epochs(seed, len(puzzles.groups) - 1, example)
            group_size = np.diff(puzzles.groups)[group].astype(np.uint64)
            draw = order.hash_of(VIEW, seed, epoch, group)
            index = puzzles.groups[group] + ((draw >> np.uint64(32)) % group_size).astype(np.int64)
            boards = puzzles.inputs[index]
            answers = puzzles.labels[index]
            if source.views:
                view = (draw & np.uint64(0xFFFFFFFF)) % np.uint64(source.views + 1)
                boards, answers = augment(source.kind, seed, index, view, boards, answers)
            self._fill(batch, places, k, index, epoch, boards, answers)

    def _fill_test(self, batch: dict[str, np.ndarray], position: int, row: np.ndarray) -> None:
        valid, number = order.once(int(self._starts[-1]), position * self._rows.batch + row)
        source = np.searchsorted(self._starts, number, side="right") - 1
        for k in np.unique(source):
            puzzles = self._puzzles[k]
            places = valid[source == k]
            index = number[source == k] - self._starts[k]
            boards, answers = puzzles.inputs[index], puzzles.labels[index]
            self._fill(batch, places, k, index, np.zeros_like(index), boards, answers)

    def _fill(
        self,
        batch: dict[str, np.ndarray],
        places: np.ndarray,
        k: int,
        index: np.ndarray,
        epoch: np.ndarray,
        boards: np.ndarray,
        answers: np.ndarray,
    ) -> None:
        """Write puzzles ``index`` of source ``k`` into ``places`` of a batch."""
        puzzles = self._puzzles[k]
        n_cells = boards.shape[1]
        edges = CLASS_EDGES[self._config.sources[k].kind]
        labels = np.where(answers == 0, IGNORED, answers.astype(np.int32))
        batch["inputs"][places, :n_cells] = boards
        batch["labels"][places, :n_cells] = labels
        batch["puzzle"][places] = puzzles.puzzle[index] + self._first_id[k]
        batch["difficulty"][places] = np.searchsorted(edges, puzzles.rating[index], side="right")
        batch["index"][places] = index
        batch["epoch"][places] = epoch
        batch["weight"][places] = 1


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype.

    Smaller boards of a mixture are padded to the largest.
    """
    n_cells = max(_n_cells(source, config.seed) for source in config.sources)
    cells = Field((n_cells,), np.dtype(np.int32))
    scalar = Field((), np.dtype(np.int32))
    return {
        "inputs": cells,
        "labels": cells,
        "puzzle": scalar,
        "difficulty": scalar,
        "index": scalar,
        "epoch": scalar,
        "weight": Field((), np.dtype(np.float32)),
    }


def dataset_info(config: Config) -> DatasetInfo:
    """Return n_cells, vocab, n_puzzles, n_difficulties, n_train and n_test.

    vocab is symbols, padding included, and n_puzzles is ids. n_train and n_test are of each source.
    Raises DataError.
    """
    n_train: list[int] = []
    n_test: list[int] = []
    symbols = []
    for source in config.sources:
        symbols.append(n_symbols(source.kind))
        if not source.path:  # generated: that many, of those symbols
            n_train.append(source.n_train)
            n_test.append(source.n_test)
            continue
        for split, sizes in (("train", n_train), ("test", n_test)):
            puzzles = _split(source, config.seed, split)
            sizes.append(len(puzzles.inputs))
            symbols.append(int(puzzles.inputs.max(initial=0)) + 1)
            symbols.append(int(puzzles.labels.max(initial=0)) + 1)
    return {
        "n_cells": element_spec(config)["inputs"].shape[0],
        "vocab": max(symbols),
        "n_puzzles": sum(_n_ids(source, config.seed) for source in config.sources),
        "n_difficulties": 1 + max(len(CLASS_EDGES[source.kind]) for source in config.sources),
        "n_train": tuple(n_train),
        "n_test": tuple(n_test),
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Boards:
    """Return a loader of ``split``, "train" or "test".

    Raises DataError if it cannot be read or generated.
    """
    refuse_invalid(config)
    return Boards(config, split=split, rows=rows, seed=seed)


def _n_cells(source: Source, seed: int) -> int:
    if source.path:
        return int(_split(source, seed, "train").inputs.shape[1])
    return (KINDS[source.kind] or source.side) ** 2


def _n_ids(source: Source, seed: int) -> int:
    if not source.path:
        return 1  # `ungrouped`
    ids = [_split(source, seed, split).puzzle for split in ("train", "test")]
    return 1 + max(int(of_split.max(initial=0)) for of_split in ids)


def _split(source: Source, seed: int, split: str) -> Puzzles:
    """Return a split, read once in a process, and again when a file has changed."""
    if not source.path:
        return _generated(source, seed)[split]
    folder = files.expanded(source.path)
    places = [folder / f"{split}.csv", *sorted((folder / split).glob("*"))]
    return _split_once(source, seed, split, files.stamps(places))


@functools.lru_cache(maxsize=16)
def _split_once(source: Source, seed: int, split: str, _: files.Stamps) -> Puzzles:
    folder = files.expanded(source.path)
    table = folder / f"{split}.csv"
    if table.is_file():
        return read_csv(table, source, seed, draw=source.n_train if split == "train" else 0)
    if (folder / split / "all__inputs.npy").is_file():
        return read_npy(folder / split, source)
    content = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else ""
    raise DataError(
        f"{source.path} has neither {split}.csv nor {split}/all__inputs.npy; it holds"
        f" {content or 'nothing'}"
    )


@functools.lru_cache(maxsize=8)
def _generated(source: Source, seed: int) -> dict[str, Puzzles]:
    """Both splits of a generated source, out of the cache if they were generated before.

    Raises DataError.
    """
    path = _cache_file(source, seed)
    try:
        return _read_splits(path, source)
    except (files.FileError, KeyError):
        pass  # none yet, or a damaged file, which is replaced
    began = time.perf_counter()
    splits = generate(source, seed)
    n_puzzles = source.n_train + source.n_test
    seconds = time.perf_counter() - began
    arrays = {}
    for split, puzzles in splits.items():
        for field in Puzzles._fields:
            arrays[f"{split}_{field}"] = getattr(puzzles, field)
    try:
        with atomic_write.shared(path) as partial, partial.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        log.warning(
            "generated %d %s puzzles in %.1f s; %s cannot keep them: %s",
            n_puzzles,
            source.kind,
            seconds,
            path,
            error.strerror,
        )
    else:
        text = "generated %d %s puzzles in %.1f s, kept in %s"
        log.info(text, n_puzzles, source.kind, seconds, path)
    return splits


def _cache_file(source: Source, seed: int) -> pathlib.Path:
    options = (
        GENERATOR,
        source.kind,
        source.n_train,
        source.n_test,
        source.blanks,
        source.side,
        source.grade,
        seed,
    )
    digest = hashlib.sha256(repr(options).encode()).hexdigest()
    return machine.cache_folder("puzzles", f"{source.kind}-{digest[:16]}.npz")


def _read_splits(path: pathlib.Path, source: Source) -> dict[str, Puzzles]:
    """Read generated puzzles. Raises FileError, KeyError: there are none, or others."""
    arrays = files.arrays(path, most=machine.most_memory())
    splits = {}
    for split, size in (("train", source.n_train), ("test", source.n_test)):
        puzzles = Puzzles(*(arrays[f"{split}_{field}"] for field in Puzzles._fields))
        if len(puzzles.inputs) != size:
            raise KeyError(split)
        splits[split] = puzzles
    return splits
