"""Boards with exactly one solution: Sudoku of 9 × 9 and 4 × 4, mazes, and mixtures of them, read or generated.

A source is a folder or, if its path is empty, a generator. There are three formats, each with the splits "train" and "test":

  CSV    train.csv, test.csv: columns source, question, answer, rating; 81 or 16 characters a board, row by row, "." or 0 for
         a blank. Of train, ``n_train`` rows are drawn by config.seed. An answer that is no solution is an error.
  npy    train/, test/: all__inputs.npy and all__labels.npy (uint8 [n, cells], symbols as below), all__puzzle_identifiers.npy
         (int [p]), all__puzzle_indices.npy (int [p + 1]: rows of a puzzle), all__group_indices.npy (int [g + 1]: puzzles of a
         group). Training takes one row of each group in an epoch. Its rows are already augmented, and are not augmented again.
  none   generated: see `rust/core/src/sudoku.rs` and `make_maze`. A solution is in "train" or in "test" by its hash, so that no
         test board has the solution of a training board. Kept in $JAXTRAIN_CACHE/puzzles (or ~/.cache/jaxtrain/puzzles), by
         the options of their generation. Their `facts` follow from these alone, without generating anything.

Symbols of Sudoku: 0 padding, 1 blank, d + 1 for the digit d. Of a maze: 0 padding, then "# SGo": wall, free, start, goal, path.

Row r of a batch belongs to the source whose share of the batch covers r. Sample s of a source (s = position × its rows in a
batch + r) is place s mod n of its epoch s // n (`loaders.order`). Its augmentation is a function of (seed, epoch, index).
"test" goes once through all sources, in an order that is always the same and mixed: its first batches are a fair sample.
"""

import functools
import hashlib
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow.csv

from loaders import _rust, order
from loaders.base import DataError, Facts, Field, Loader, Rows, narrowed, refuse_problems
from loaders.io import checks, columnar, files, machine

log = logging.getLogger("jaxtrain")

KINDS = {"sudoku": 9, "sudoku4": 4, "maze": 0}  # name -> side. A maze's is Source.side
VERSION = 1  # changes whenever the same (seed, epoch, index) would give another board
GENERATOR = 1  # changes whenever the same (source, seed) would generate other puzzles
IGNORED = -100  # the label of a cell that is not predicted
MAZE = "# SGo"
# Domains of the hashes: two uses of the same numbers draw independently.
PUZZLE, VIEW, HELD_OUT, DIGITS, BANDS, LINES, STACKS, COLUMNS, TURN = range(32, 41)
TEST_SHARE = 0.2  # of the solutions that a generator finds
# Difficulty classes begin at these guesses of the solver (or ratings of a CSV), and at these lengths of a maze's path.
EDGES = {"sudoku": (1, 4, 16, 64), "sudoku4": (1, 4, 16, 64), "maze": (40, 80, 120, 160)}


@dataclass(frozen=True)
class Source:
    """Puzzles of one kind."""

    kind: str = "sudoku"  # [name] sudoku (9 × 9), sudoku4 (4 × 4) or maze
    path: str = ""  # [path] folder of CSV or npy files; empty = generated
    share: float = 1.0  # [1] of a batch, relative to the other sources
    n_train: int = 1000  # [puzzles] to train on, generated or drawn from a CSV; 0 = all of a CSV
    n_test: int = 1000  # [puzzles] generated to test on
    blanks: tuple[int, int] = (46, 64)  # [cells] fewest and most blanks of a generated Sudoku
    views: int = 1000  # [views] augmentations of a training puzzle besides itself, one in an epoch; 0 = none
    side: int = 30  # [cells] of a generated maze


@dataclass(frozen=True)
class Config(checks.DataSection):
    on_resume = checks.OnResume(checks.FREE)  # the fingerprint and the order have those that change a row

    sources: tuple[Source, ...] = (Source(),)  # [sources] of a batch
    seed: int = 0  # [seed] of generated puzzles, and of the drawn rows of a CSV

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.sources:
            yield "sources", "is empty; name at least one, for example ({'kind': 'sudoku'},)"
        for i, s in enumerate(self.sources):
            where = f"sources[{i}]"
            yield from checks.under(where, checks.choice(s, KINDS, "kind"))
            yield from checks.under(where, checks.positive(s, "share"))
            yield from checks.under(where, checks.at_least(s, 0 if s.path else 1, "n_train"))
            yield from checks.under(where, checks.not_negative(s, "n_test", "views"))
            yield from checks.under(where, checks.at_least(s, 5, "side"))
            if not 0 <= s.blanks[0] <= s.blanks[1]:
                yield f"{where}.blanks", f"is {s.blanks}; expected the fewest and the most, for example (46, 64)"
            if s.path and not pathlib.Path(s.path).expanduser().is_dir():
                yield f"{where}.path", f"is {s.path!r}, which is no folder; leave it empty to generate puzzles"


class Puzzles(NamedTuple):
    """One split of one source."""

    inputs: np.ndarray  # uint8 [n, cells]
    labels: np.ndarray  # uint8 [n, cells]; 0: not predicted
    puzzle: np.ndarray  # int32 [n] id in the puzzle embedding, within the source
    rating: np.ndarray  # int64 [n] guesses, or a path's length
    groups: np.ndarray  # int64 [g + 1] first row of each group. Training takes one row of a group in an epoch


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
        self._bounds = np.round(shares / shares[-1] * rows.batch).astype(int)  # of each source's rows in a batch
        if split == "train" and (empty := np.flatnonzero(np.diff(self._bounds) == 0)).size:
            raise DataError(f"sources[{empty[0]}].share gives no row of a batch of {rows.batch}; raise it, or the batch")
        self._starts = np.cumsum([0, *(len(p.inputs) for p in self._puzzles)])
        n_batches = -(-int(self._starts[-1]) // rows.batch)
        super().__init__(fields(config), train=split == "train", rows=rows, seed=seed, n_batches=n_batches)

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

    def diagnostics(self) -> dict[str, Any]:
        return {"puzzles": [len(p.inputs) for p in self._puzzles]}

    def _part(self, position: int, row: np.ndarray) -> dict[str, np.ndarray]:
        batch = self._empty(len(row))
        batch["labels"][:] = IGNORED
        (self._fill_train if self._train else self._fill_test)(batch, position, row)
        return batch

    def _fill_train(self, batch: dict[str, np.ndarray], position: int, row: np.ndarray) -> None:
        for k, (source, puzzles) in enumerate(zip(self._config.sources, self._puzzles, strict=True)):
            at = np.flatnonzero((row >= self._bounds[k]) & (row < self._bounds[k + 1]))
            if not at.size:
                continue
            seed = self._seed + (k << 32)  # sources draw independently
            sample = position * int(np.diff(self._bounds)[k]) + row[at] - self._bounds[k]
            epoch, group = order.epochs(seed, len(puzzles.groups) - 1, sample)
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
            self._fill(batch, at, k, index, np.zeros_like(index), puzzles.inputs[index], puzzles.labels[index])

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
        batch["difficulty"][at] = np.searchsorted(EDGES[self._config.sources[k].kind], puzzles.rating[index], side="right")
        batch["index"][at], batch["epoch"][at], batch["weight"][at] = index, epoch, 1


def fields(config: Config) -> dict[str, Field]:
    """Return the fields of a batch: name -> shape of one row, dtype. Smaller boards of a mixture are padded to the largest."""
    cells = Field((max(_n_cells(s, config.seed) for s in config.sources),), np.dtype(np.int32))
    scalar = Field((), np.dtype(np.int32))
    return {
        "inputs": cells,
        "labels": cells,
        **{name: scalar for name in ("puzzle", "difficulty", "index", "epoch")},
        "weight": Field((), np.dtype(np.float32)),
    }


def facts(config: Config) -> Facts:
    """Facts of the puzzles: n_cells, vocab (symbols, padding included), n_puzzles (ids), n_difficulties, n_train and n_test.

    n_train and n_test are of each source. Raises DataError.
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
        "n_cells": fields(config)["inputs"].shape[0],
        "vocab": max(symbols),
        "n_puzzles": sum(_n_ids(s, config.seed) for s in config.sources),
        "n_difficulties": 1 + max(len(EDGES[s.kind]) for s in config.sources),
        **{f"n_{split}": tuple(each) for split, each in sizes.items()},
    }


def make_loader(config: Config, *, split: str, rows: Rows, seed: int) -> Boards:
    """Return a loader of ``split``, "train" or "test". Raises DataError if it cannot be read or generated."""
    refuse_problems(config)
    return Boards(config, split=split, rows=rows, seed=seed)


def n_symbols(kind: str) -> int:
    """Return the number of symbols of a cell, padding included."""
    return 6 if kind == "maze" else KINDS[kind] + 2


def augment(kind: str, seed: int, index: np.ndarray, view: np.ndarray, *boards: np.ndarray) -> tuple[np.ndarray, ...]:
    """Augments each [k, cells] array in the same way, as a function of (seed, index, view) alone.

    Sudoku: the digits are renamed, bands and the rows in them, stacks and the columns in them are permuted, and half of the
    boards are transposed. A maze: one of the eight symmetries of the square. View 0 is the puzzle itself.
    """
    if kind == "maze":
        side = round(boards[0].shape[1] ** 0.5)
        grid = np.arange(side * side).reshape(side, side)
        turned = np.stack([np.rot90(g, q) for g in (grid, grid.T) for q in range(4)]).reshape(8, -1)
        which = np.where(view == 0, 0, order.hash_of(TURN, seed, index, view) % np.uint64(8)).astype(int)
        return tuple(np.take_along_axis(x, turned[which], axis=1) for x in boards)

    side = KINDS[kind]
    root, unchanged = round(side**0.5), np.asarray(view) == 0

    def shuffled(domain: int, n: int, m: int = 1) -> np.ndarray:
        """[k, m, n]: m permutations of n for each board."""
        keys = order.hash_of(domain, seed, index[:, None], view[:, None], np.arange(m * n)[None]).reshape(-1, m, n)
        return np.where(unchanged[:, None, None], np.arange(n), np.argsort(keys, axis=2))

    def lines(bands: int, inside: int) -> np.ndarray:
        """[k, side]: rows (or columns) that stay in their bands, and bands in any order."""
        band, line = shuffled(bands, root)[:, 0], shuffled(inside, root, root)
        return (band[:, :, None] * root + line).reshape(-1, side)

    rows, columns = lines(BANDS, LINES), lines(STACKS, COLUMNS)
    digits = np.concatenate([np.tile([0, 1], (len(index), 1)), shuffled(DIGITS, side)[:, 0] + 2], axis=1)
    turn = (order.hash_of(TURN, seed, index, view) % np.uint64(2) == 1) & ~unchanged
    which = np.arange(len(index))[:, None, None]

    def apply(x: np.ndarray) -> np.ndarray:
        grid = np.take_along_axis(digits, x.astype(np.int64), axis=1).reshape(-1, side, side)
        grid = grid[which, rows[:, :, None], columns[:, None, :]]
        return np.where(turn[:, None, None], grid.transpose(0, 2, 1), grid).reshape(x.shape).astype(x.dtype)

    return tuple(apply(x) for x in boards)


def _n_cells(source: Source, seed: int) -> int:
    if source.path:
        return _split(source, seed, "train").inputs.shape[1]
    return (source.side if source.kind == "maze" else KINDS[source.kind]) ** 2


def _n_ids(source: Source, seed: int) -> int:
    if not source.path:
        return 1  # `_singles`
    return 1 + max(int(_split(source, seed, split).puzzle.max(initial=0)) for split in ("train", "test"))


@functools.lru_cache(maxsize=16)
def _split(source: Source, seed: int, split: str) -> Puzzles:
    folder = pathlib.Path(source.path).expanduser()
    if not source.path:
        return _kept(source, seed)[split]
    if (folder / f"{split}.csv").is_file():
        return _read_csv(folder / f"{split}.csv", source, seed, draw=source.n_train if split == "train" else 0)
    if (folder / split / "all__inputs.npy").is_file():
        return _read_npy(folder / split, source)
    content = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) if folder.is_dir() else ""
    raise DataError(f"{source.path} has neither {split}.csv nor {split}/all__inputs.npy; it holds {content or 'nothing'}")


@functools.lru_cache(maxsize=8)
def _kept(source: Source, seed: int) -> dict[str, Puzzles]:
    """Both splits of a generated source, out of the cache if they were generated before. Raises DataError."""
    made_of = (GENERATOR, source.kind, source.n_train, source.n_test, source.blanks, source.side, seed)
    name = f"{source.kind}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.npz"
    path = machine.cache_folder("puzzles", name)
    try:
        arrays = files.arrays(path, most=machine.most_memory())
        splits = {s: Puzzles(*(arrays[f"{s}_{field}"] for field in Puzzles._fields)) for s in ("train", "test")}
        if [len(splits[s].inputs) for s in ("train", "test")] == [source.n_train, source.n_test]:
            return splits
    except (files.FileError, KeyError):
        pass  # none yet, or a damaged file, which is replaced
    began = time.perf_counter()
    splits = generate(source, seed)
    n, seconds = source.n_train + source.n_test, time.perf_counter() - began
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{name}.{os.getpid()}")
        with temporary.open("wb") as file:
            np.savez(file, **{f"{s}_{f}": getattr(p, f) for s, p in splits.items() for f in Puzzles._fields})
        temporary.replace(path)
        log.info("generated %d %s puzzles in %.1f s, kept in %s", n, source.kind, seconds, path)
    except OSError as error:
        log.warning("generated %d %s puzzles in %.1f s; %s cannot keep them: %s", n, source.kind, seconds, path, error.strerror)
    return splits


def _singles(inputs: np.ndarray, labels: np.ndarray, rating: np.ndarray) -> Puzzles:
    """Puzzles of which each is a group of its own, and all share one id."""
    n = len(inputs)
    return Puzzles(inputs, labels, np.zeros(n, np.int32), rating.astype(np.int64), np.arange(n + 1))


def _read_csv(path: pathlib.Path, source: Source, seed: int, *, draw: int) -> Puzzles:
    try:
        text = pyarrow.csv.ConvertOptions(column_types={"question": "string", "answer": "string"})
        with columnar.native(files.inside(path.parent, path.name, remedy="; copy the file there")) as file:
            table = pyarrow.csv.read_csv(file, convert_options=text)
        questions, answers = (table[name].to_pylist() for name in ("question", "answer"))
        rating = np.zeros(len(questions)) if "rating" not in table.column_names else np.asarray(table["rating"]).astype(float)
    except (KeyError, OSError, ValueError) as error:
        if isinstance(error, files.FileError):
            raise
        raise DataError(f"{path}: {files.said(error)}; expected the columns source, question, answer, rating") from error
    if not questions:
        raise DataError(f"{path} has no boards: no row follows its header; make some with `jaxtrain sudoku`")
    if not (np.abs(rating) < 2**53).all():
        raise DataError(f"{path}: the rating of row {int(np.argmin(np.abs(rating) < 2**53))} is no number")
    chosen = np.arange(len(questions))
    if draw and draw < len(chosen):
        chosen = np.sort(order.permutation(seed, 0, len(chosen), np.arange(draw)))
    side = KINDS[source.kind]
    if not side:
        raise DataError(f"{path} is a table, and mazes are in {path.stem}/all__inputs.npy")
    sides = []
    for texts in (questions, answers):
        picked = [texts[i] for i in chosen]
        if (wrong := next((i for i, t in zip(chosen, picked, strict=True) if len(t or "") != side * side), None)) is not None:
            raise DataError(f"{path}: row {wrong} has {len(texts[wrong] or '')} characters; expected {side * side}")
        codes = np.frombuffer("".join(picked).replace(".", "0").encode("ascii", "replace"), np.uint8).reshape(-1, side * side)
        if ((codes < ord("0")) | (codes > ord("0") + side)).any():
            raise DataError(f"{path} has characters other than . and 0 to {side}")
        sides.append(codes - ord("0") + 1)
    inputs, labels = sides
    if (bad := np.flatnonzero(((inputs != 1) & (inputs != labels)).any(1) | (labels == 1).any(1))).size:
        raise DataError(f"{path}: the answer of row {chosen[bad[0]]} has blanks, or does not solve its question")
    if (bad := np.flatnonzero(~_are_solutions(labels - 2, side))).size:
        raise DataError(
            f"{path}: the answer of row {chosen[bad[0]]} is no solution: a row, column or box of it lacks a digit; correct or "
            "remove that row"
        )
    return _singles(inputs, labels, rating[chosen])


def _are_solutions(digits: np.ndarray, side: int) -> np.ndarray:
    """uint8 [n, cells], digits from 0 on -> bool [n]: whether every row, column and box holds each digit once."""
    root = math.isqrt(side)
    right = np.ones(len(digits), bool)
    for start in range(0, len(digits), 8192):  # boards on the last axis, as many as a cache holds: numpy works on them at once
        some = slice(start, start + 8192)
        bits = np.left_shift(np.uint16(1), np.ascontiguousarray(digits[some].T), dtype=np.uint16)
        grid = bits.reshape(root, root, root, root, -1)  # band, row in it, stack, column in it, board
        for axes in ((0, 1), (2, 3), (1, 3)):
            right[some] &= (np.bitwise_or.reduce(grid, axes) == (1 << side) - 1).all((0, 1))
    return right


def _read_npy(folder: pathlib.Path, source: Source) -> Puzzles:
    names = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    try:
        loaded = [files.array(files.inside(folder, f"all__{name}.npy")) for name in names]
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    for name, x in zip(names, loaded, strict=True):
        if x.ndim != (2 if name in names[:2] else 1) or x.dtype.kind not in "iu" or not len(x):
            raise DataError(f"{folder}: all__{name}.npy holds {x.dtype} {x.shape}; expected integers")
    inputs, labels, ids, puzzles, groups = loaded
    symbols, cells = n_symbols(source.kind), inputs.shape[1]
    side = KINDS[source.kind] or math.isqrt(cells)
    for name, x in (("inputs", inputs), ("labels", labels)):
        if not 0 < x.shape[1] == side * side == cells:
            expected = f"{side * side}" if KINDS[source.kind] else f"a square, and the {cells} of all__inputs.npy"
            raise DataError(f"{folder}: all__{name}.npy has {x.shape[1]} cells in a row; expected {expected}")
        if x.max() >= symbols or x.min() < 0:
            raise DataError(
                f"{folder}: all__{name}.npy has symbols {x.min()} to {x.max()}; a {source.kind} has 0 to {symbols - 1}"
            )
    if any((np.diff(x.astype(np.int64)) < 0).any() or x[0] != 0 for x in (puzzles, groups)):
        raise DataError(f"{folder}: puzzle_indices and group_indices must increase from 0")
    if len(inputs) != len(labels) or puzzles[-1] != len(inputs) or groups[-1] != len(ids) or len(puzzles) != len(ids) + 1:
        raise DataError(f"{folder}: rows, puzzles and groups differ in number")
    if (empty := np.flatnonzero(np.diff(puzzles[groups]) == 0)).size:  # of which training could take no row
        raise DataError(f"{folder}: group {empty[0]} has no row; leave it out of all__group_indices.npy")
    puzzle = np.repeat(narrowed(ids, np.int32, f"the puzzles of {folder}"), np.diff(puzzles))
    return Puzzles(inputs, labels, puzzle, np.zeros(len(inputs), np.int64), np.asarray(puzzles, np.int64)[groups])


def generate(source: Source, seed: int) -> dict[str, Puzzles]:
    """Generate both splits of a source: no board twice, and no solution in both splits. Raises DataError."""
    sizes = {"train": source.n_train, "test": source.n_test}
    chosen: dict[str, list[tuple[np.ndarray, ...]]] = {"train": [], "test": []}
    seen: set[bytes] = set()
    start, idle, chunk = 0, 0, min(4096, 64 + source.n_train + source.n_test)
    while any(len(chosen[split]) < sizes[split] for split in chosen):
        if idle > 20:
            have = ", ".join(f"{len(chosen[split])} of {n} for {split}" for split, n in sizes.items())
            raise DataError(
                f"no more different {source.kind} puzzles with blanks={source.blanks}, after {have}; lower n_train and n_test"
            )
        boards, answers, rating = _chunk(source, seed, start, chunk)
        weights = np.arange(1, answers.shape[1] + 1, dtype=np.uint64)
        held = order.hash_of(HELD_OUT, (order.mix(weights) * answers).sum(1, dtype=np.uint64))
        is_test = (held >> np.uint64(11)).astype(np.float64) < TEST_SHARE * 2.0**53
        idle += 1
        for board, answer, rate, test in zip(boards, answers, rating, is_test, strict=True):
            split = "test" if test else "train"
            if len(chosen[split]) < sizes[split] and (key := board.tobytes()) not in seen:
                seen.add(key)
                chosen[split].append((board, answer, rate))
                idle = 0
        start += chunk
    cells = _chunk(source, seed, 0, 1)[0].shape[1]
    return {
        split: _singles(
            np.array([b for b, _, _ in rows], np.uint8).reshape(-1, cells),
            np.array([a for _, a, _ in rows], np.uint8).reshape(-1, cells),
            np.array([r for _, _, r in rows], np.int64),
        )
        for split, rows in chosen.items()
    }


def _chunk(source: Source, seed: int, start: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate puzzles start … start + n - 1 of a seed, as symbols: boards, answers, ratings."""
    if source.kind == "maze":
        mazes = [make_maze(source.side, seed, i) for i in range(start, start + n)]
        boards, answers = (np.stack([m[i].reshape(-1) for m in mazes]) for i in range(2))
        return boards, answers, (answers == 1 + MAZE.index("o")).sum(1)
    side = KINDS[source.kind]
    boards, answers, guesses = _rust.sudoku_generate(
        n, side=side, seed=seed, start=start, blanks=source.blanks, threads=machine.cores()
    )
    return boards + np.uint8(1), answers + np.uint8(1), guesses


def make_maze(side: int, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate maze number ``index`` of a seed: the board and its solution, uint8 [side, side] each.

    A random spanning tree over every second cell (depth first), so that exactly one path joins two cells. Start and goal are
    the two ends of a longest path.
    """
    wall, free, begin, goal, path = (np.uint8(1 + i) for i in range(len(MAZE)))
    rng = np.random.default_rng([PUZZLE, seed, index])
    n = (side - 1) // 2
    board = np.full((side, side), wall)
    first = int(rng.integers(n * n))
    turns = rng.permuted(np.tile(np.arange(4), (n * n, 1)), axis=1).tolist()
    seen, stack = {first}, [first]
    joined: dict[int, list[int]] = {cell: [] for cell in range(n * n)}
    while stack:
        cell = stack[-1]
        if not turns[cell]:
            stack.pop()
            continue
        y, x = divmod(cell, n)
        dy, dx = ((0, 1), (1, 0), (0, -1), (-1, 0))[turns[cell].pop()]
        if not (0 <= y + dy < n and 0 <= x + dx < n) or (neighbour := (y + dy) * n + x + dx) in seen:
            continue
        seen.add(neighbour)
        joined[cell].append(neighbour)
        joined[neighbour].append(cell)
        stack.append(neighbour)
        board[1 + 2 * y + dy, 1 + 2 * x + dx] = free
    board[1 : 2 * n : 2, 1 : 2 * n : 2] = free

    def farthest(start: int) -> list[int]:
        """Return the path from the cell farthest from ``start`` back to it."""
        before, queue = {start: start}, [start]
        for cell in queue:
            for neighbour in joined[cell]:
                if neighbour not in before:
                    before[neighbour] = cell
                    queue.append(neighbour)
        cells = [queue[-1]]
        while cells[-1] != start:
            cells.append(before[cells[-1]])
        return cells

    line, column = np.divmod(np.array(farthest(farthest(first)[0])), n)
    answer = board.copy()
    answer[1 + 2 * line, 1 + 2 * column] = path
    answer[1 + line[1:] + line[:-1], 1 + column[1:] + column[:-1]] = path
    for grid in (board, answer):
        grid[1 + 2 * line[0], 1 + 2 * column[0]], grid[1 + 2 * line[-1], 1 + 2 * column[-1]] = begin, goal
    return board, answer
