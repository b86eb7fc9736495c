"""Boards with one solution: Sudoku of 9 × 9, 6 × 6, 4 × 4, mazes, lights, and mixtures.

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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaders import order
from loaders.base import DataError, DatasetInfo, Field, Loader, Rows, refuse_invalid
from loaders.io import atomic_write, checks, files, machine
from loaders.sudoku import puzzles as kinds
from loaders.sudoku.puzzle_files import read_csv, read_npy
from loaders.sudoku.puzzle_generators import GENERATOR, generate
from loaders.sudoku.puzzles import (
    BOXES,
    EDGES,
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
MAX_SIDE = 40  # [cells] of a maze or of lights
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
        for i, s in enumerate(self.sources):
            where = f"sources[{i}]"
            yield from checks.under(where, checks.choice(s, KINDS, "kind"))
            yield from checks.under(where, checks.positive(s, "share"))
            yield from checks.under(where, checks.at_least(s, 0 if s.path else 1, "n_train"))
            yield from checks.under(where, checks.not_negative(s, "n_test", "views"))
            if not 5 <= s.side <= MAX_SIDE:
                yield f"{where}.side", f"is {s.side}; expected 5 to {MAX_SIDE}"
            if not 0 <= s.blanks[0] <= s.blanks[1]:
                yield (
                    f"{where}.blanks",
                    f"is {s.blanks}; expected the fewest and the most, for example (46, 64)",
                )
            if s.grade:
                yield from checks.under(where, checks.choice(s, GRADES, "grade"))
                if s.path or s.kind not in BOXES:
                    yield (
                        f"{where}.grade",
                        f"is {s.grade!r}, of a generated Sudoku alone; leave it empty",
                    )
            if (
                s.kind == "lights"
                and not s.path
                and 5 <= s.side <= MAX_SIDE
                and not kinds.has_one_answer(s.side)
            ):
                near = [side for side in range(5, MAX_SIDE + 1) if kinds.has_one_answer(side)]
                yield (
                    f"{where}.side",
                    (
                        f"is {s.side}, at which lights have no answer or several; expected one of"
                        f" {near}"
                    ),
                )
            if s.path and not files.expanded(s.path).is_dir():
                yield (
                    f"{where}.path",
                    f"is {s.path!r}, which is no folder; leave it empty to generate puzzles",
                )


class Boards(Loader):
    """Puzzles and their solutions. Fields, r rows for each range:

    inputs, labels      int32 [r, cells]; labels that are not predicted are -100
    puzzle              int32 [r] row of the puzzle embedding
    difficulty          int32 [r] class of the puzzle's rating (`EDGES`)
    index, epoch        int32 [r] the puzzle in its source and split, -1 in padding
    weight              float32 [r] 0 for padding
    """

    def __init__(self, config: Config, *, split: str, rows: Rows, seed: int):
        self._config = config
        self._puzzles = [_split(source, config.seed, split) for source in config.sources]
        self._first_id = np.cumsum([0, *(_n_ids(source, config.seed) for source in config.sources)])
        shares = np.cumsum([0.0, *(source.share for source in config.sources)])
        # of each source's rows in a batch
        self._bounds = np.round(shares / shares[-1] * rows.batch).astype(int)
        if split == "train" and (empty := np.flatnonzero(np.diff(self._bounds) == 0)).size:
            raise DataError(
                f"sources[{empty[0]}].share gives no row of a batch of {rows.batch}; raise it, or"
                " the batch"
            )
        self._starts = np.cumsum([0, *(len(p.inputs) for p in self._puzzles)])
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
        (self._fill_train if self._train else self._fill_test)(batch, position, row)
        return batch

    def _fill_train(self, batch: dict[str, np.ndarray], position: int, row: np.ndarray) -> None:
        for k, (source, puzzles) in enumerate(
            zip(self._config.sources, self._puzzles, strict=True)
        ):
            at = np.flatnonzero((row >= self._bounds[k]) & (row < self._bounds[k + 1]))
            if not at.size:
                continue
            seed = self._seed + (k << 32)  # sources draw independently
            example = position * int(np.diff(self._bounds)[k]) + row[at] - self._bounds[k]
            epoch, group = order.epochs(seed, len(puzzles.groups) - 1, example)
            first, size = puzzles.groups[group], np.diff(puzzles.groups)[group]
            draw = order.hash_of(VIEW, seed, epoch, group)
            index = first + ((draw >> np.uint64(32)) % size.astype(np.uint64)).astype(np.int64)
            boards, answers = puzzles.inputs[index], puzzles.labels[index]
            if source.views:
                view = (draw & np.uint64(0xFFFFFFFF)) % np.uint64(source.views + 1)
                boards, answers = augment(source.kind, seed, index, view, boards, answers)
            self._fill(batch, at, k, index, epoch, boards, answers)

    def _fill_test(self, batch: dict[str, np.ndarray], position: int, row: np.ndarray) -> None:
        valid, number = order.once(int(self._starts[-1]), position * self._rows.batch + row)
        source = np.searchsorted(self._starts, number, side="right") - 1
        for k in np.unique(source):
            at, index = valid[source == k], number[source == k] - self._starts[k]
            puzzles = self._puzzles[k]
            self._fill(
                batch,
                at,
                k,
                index,
                np.zeros_like(index),
                puzzles.inputs[index],
                puzzles.labels[index],
            )

    def _fill(
        self,
        batch: dict[str, np.ndarray],
        at: np.ndarray,
        k: int,
        index: np.ndarray,
        epoch: np.ndarray,
        boards: np.ndarray,
        answers: np.ndarray,
    ) -> None:
        """Write puzzles ``index`` of source ``k`` into the places ``at`` of a batch."""
        puzzles, cells = self._puzzles[k], boards.shape[1]
        batch["inputs"][at, :cells] = boards
        batch["labels"][at, :cells] = np.where(answers == 0, IGNORED, answers.astype(np.int32))
        batch["puzzle"][at] = puzzles.puzzle[index] + self._first_id[k]
        batch["difficulty"][at] = np.searchsorted(
            EDGES[self._config.sources[k].kind], puzzles.rating[index], side="right"
        )
        batch["index"][at], batch["epoch"][at], batch["weight"][at] = index, epoch, 1


def element_spec(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype.

    Smaller boards of a mixture are padded to the largest.
    """
    cells = Field((max(_n_cells(s, config.seed) for s in config.sources),), np.dtype(np.int32))
    scalar = Field((), np.dtype(np.int32))
    return {
        "inputs": cells,
        "labels": cells,
        **{name: scalar for name in ("puzzle", "difficulty", "index", "epoch")},
        "weight": Field((), np.dtype(np.float32)),
    }


def dataset_info(config: Config) -> DatasetInfo:
    """Return n_cells, vocab, n_puzzles, n_difficulties, n_train and n_test.

    vocab is symbols, padding included, and n_puzzles is ids. n_train and n_test are of each source.
    Raises DataError.
    """
    sizes: dict[str, list[int]] = {"train": [], "test": []}
    symbols = [n_symbols(s.kind) for s in config.sources]
    for source in config.sources:
        if not source.path:  # generated: that many, of those symbols
            sizes["train"].append(source.n_train)
            sizes["test"].append(source.n_test)
            continue
        for split in sizes:
            puzzles = _split(source, config.seed, split)
            sizes[split].append(len(puzzles.inputs))
            symbols += [int(x.max(initial=0)) + 1 for x in (puzzles.inputs, puzzles.labels)]
    return {
        "n_cells": element_spec(config)["inputs"].shape[0],
        "vocab": max(symbols),
        "n_puzzles": sum(_n_ids(s, config.seed) for s in config.sources),
        "n_difficulties": 1 + max(len(EDGES[s.kind]) for s in config.sources),
        **{f"n_{split}": tuple(each) for split, each in sizes.items()},
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
        return 1  # `singles`
    return 1 + max(
        int(_split(source, seed, split).puzzle.max(initial=0)) for split in ("train", "test")
    )


def _split(source: Source, seed: int, split: str) -> Puzzles:
    """Return a split, read once in a process, and again when a file has changed."""
    if not source.path:
        return _kept(source, seed)[split]
    folder = files.expanded(source.path)
    places = [folder / f"{split}.csv", *sorted((folder / split).glob("*"))]
    return _split_once(source, seed, split, files.stamps(places))


@functools.lru_cache(maxsize=16)
def _split_once(source: Source, seed: int, split: str, _: files.Stamps) -> Puzzles:
    folder = files.expanded(source.path)
    if (folder / f"{split}.csv").is_file():
        return read_csv(
            folder / f"{split}.csv", source, seed, draw=source.n_train if split == "train" else 0
        )
    if (folder / split / "all__inputs.npy").is_file():
        return read_npy(folder / split, source)
    content = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else ""
    raise DataError(
        f"{source.path} has neither {split}.csv nor {split}/all__inputs.npy; it holds"
        f" {content or 'nothing'}"
    )


@functools.lru_cache(maxsize=8)
def _kept(source: Source, seed: int) -> dict[str, Puzzles]:
    """Both splits of a generated source, out of the cache if they were generated before.

    Raises DataError.
    """
    made_of = (
        GENERATOR,
        source.kind,
        source.n_train,
        source.n_test,
        source.blanks,
        source.side,
        source.grade,
        seed,
    )
    name = f"{source.kind}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.npz"
    path = machine.cache_folder("puzzles", name)
    try:
        arrays = files.arrays(path, most=machine.most_memory())
        splits = {
            s: Puzzles(*(arrays[f"{s}_{field}"] for field in Puzzles._fields))
            for s in ("train", "test")
        }
        if [len(splits[s].inputs) for s in ("train", "test")] == [source.n_train, source.n_test]:
            return splits
    except (files.FileError, KeyError):
        pass  # none yet, or a damaged file, which is replaced
    began = time.perf_counter()
    splits = generate(source, seed)
    n, seconds = source.n_train + source.n_test, time.perf_counter() - began
    try:
        with atomic_write.shared(path) as place, place.open("wb") as file:
            np.savez(
                file,
                **{f"{s}_{f}": getattr(p, f) for s, p in splits.items() for f in Puzzles._fields},
            )
        log.info("generated %d %s puzzles in %.1f s, kept in %s", n, source.kind, seconds, path)
    except OSError as error:
        log.warning(
            "generated %d %s puzzles in %.1f s; %s cannot keep them: %s",
            n,
            source.kind,
            seconds,
            path,
            error.strerror,
        )
    return splits
