"""Kinds of puzzles on a grid: their symbols, their text, their rules and their symmetries.

Symbol 0 is padding. The others, in the order of the characters that a table has for them:

  sudoku, sudoku6, sudoku4   1 blank ("." or 0), d + 1 for the digit d; boxes of 3 × 3, 2 × 3 (2
                             rows) and 2 × 2
  maze                       "# SGo": wall, free, start, goal, path
  lights                     "01": off and on in a board, left alone and pressed in its answer. A
                             press switches its cell and the cells above, below, left and right of
                             it. All lights are off after the pressed ones
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loaders import order
from loaders.base import DataError

# name -> side. 0: it is Source.side
KINDS = {"sudoku": 9, "sudoku6": 6, "sudoku4": 4, "maze": 0, "lights": 0}
BOXES = {"sudoku": (3, 3), "sudoku6": (2, 3), "sudoku4": (2, 2)}  # rows and columns of a box
MAZE, LIGHTS = "# SGo", "01"
# of a Sudoku: singles, pairs, chains, guesses (rust/core/src/sudoku_grades.rs)
GRADES = ("easy", "medium", "hard", "extreme")
# Domains of the hashes: two uses of the same numbers draw independently.
PUZZLE, VIEW, HELD_OUT, DIGITS, BANDS, LINES, STACKS, COLUMNS, TURN = range(32, 41)
# Difficulty classes begin at these guesses of the solver (or ratings of a CSV), lengths of a maze's
# path, and presses.
EDGES = {
    **dict.fromkeys(BOXES, (1, 4, 16, 64)),
    "maze": (40, 80, 120, 160),
    "lights": (8, 16, 32, 64),
}


@dataclass(frozen=True)
class Source:
    """Puzzles of one kind."""

    kind: str = "sudoku"  # [name] sudoku (9 × 9), sudoku6 (6 × 6), sudoku4 (4 × 4), maze or lights
    path: str = ""  # [path] folder of CSV or npy files; empty = generated
    share: float = 1.0  # [1] of a batch, relative to the other sources
    n_train: int = 1000  # [puzzles] to train on, generated or drawn from a CSV; 0 = all of a CSV
    n_test: int = 1000  # [puzzles] generated to test on
    blanks: tuple[int, int] = (46, 64)  # [cells] fewest and most blanks of a generated Sudoku
    # [views] augmentations of a training puzzle besides itself, one in an epoch; 0 = none
    views: int = 1000
    side: int = 30  # [cells] of a generated maze, or of generated lights
    # [name] of a generated Sudoku: easy, medium, hard or extreme, by the steps that it needs; empty
    # = any
    grade: str = ""


class Puzzles(NamedTuple):
    inputs: np.ndarray  # uint8 [n, cells]
    labels: np.ndarray  # uint8 [n, cells]; 0: not predicted
    puzzle: np.ndarray  # int32 [n] id in the puzzle embedding, within the source
    rating: np.ndarray  # int64 [n] guesses, a path's length, or presses
    # int64 [g + 1] first row of each group. Training takes one row of a group in an epoch
    groups: np.ndarray


def singles(inputs: np.ndarray, labels: np.ndarray, rating: np.ndarray) -> Puzzles:
    """Return puzzles of which each is a group of its own, and all share one id."""
    n = len(inputs)
    return Puzzles(inputs, labels, np.zeros(n, np.int32), rating.astype(np.int64), np.arange(n + 1))


def n_symbols(kind: str) -> int:
    """Return the number of symbols of a cell, padding included."""
    return 1 + len(characters(kind))


def characters(kind: str) -> str:
    """Return the characters of symbols 1, 2, … in a table."""
    return {"maze": MAZE, "lights": LIGHTS}.get(kind) or ".123456789"[: KINDS[kind] + 1]


def kind_of(n_cells: int, vocab: int) -> str:
    """Return the kind whose boards have so many cells and symbols, or "" if there is none."""
    side = math.isqrt(n_cells)
    fits = (
        kind for kind in KINDS if n_symbols(kind) == vocab and side == (KINDS[kind] or max(side, 3))
    )
    return next(fits, "") if side * side == n_cells else ""


def to_text(kind: str, board: np.ndarray) -> str:
    """Return the text of a board's symbols.

    Padding, which a model may answer, is a blank, or else a question mark.
    """
    return "".join(
        (("." if kind in BOXES else "?") + characters(kind))[symbol] for symbol in board.tolist()
    )


def to_symbols(
    kind: str, side: int, texts: Sequence[str], where: Callable[[int], str]
) -> np.ndarray:
    """Return the symbols of boards as text, uint8 [n, side²].

    Raises DataError: another size, or a symbol that the kind lacks. ``where``: the name of text i
    in an error, for example its file and line.
    """
    cells, known = side * side, characters(kind)
    known_as = f"{known!r}" if kind not in BOXES else f"1 to {side}, or . or 0 for a blank"
    for i, text in enumerate(texts):
        if len(text) != cells:
            raise DataError(
                f"{where(i)}: {text[:90]!r} has {len(text)} characters; a board of this kind has"
                f" {cells} of {known_as}"
            )
    codes = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8).reshape(-1, cells)
    symbols = np.zeros(256, np.uint8)
    symbols[list(known.encode())] = np.arange(1, 1 + len(known))
    if kind in BOXES:
        symbols[ord("0")] = 1
    boards = symbols[codes]
    if (unknown := np.argwhere(boards == 0)).size:
        i, cell = unknown[0]
        raise DataError(
            f"{where(i)}: {name_of(cell, side)} is {texts[i][cell]!r}; expected {known_as}"
        )
    return boards


def name_of(cell: int, side: int) -> str:
    return f"row {cell // side + 1}, column {cell % side + 1}"


def clash(kind: str, board: np.ndarray) -> str:
    """Return two equal digits in a row, column or box, by their cells, or "" without any."""
    side, (high, wide) = KINDS[kind], BOXES[kind]
    line, column = np.divmod(np.arange(side * side), side)
    same = (board[:, None] == board) & (board[:, None] > 1)
    units = [line, column, line // high * high + column // wide]
    pairs = np.argwhere(np.triu(same & np.any([u[:, None] == u for u in units], axis=0), 1))
    if not len(pairs):
        return ""
    first, second = (name_of(cell, side) for cell in pairs[0])
    return f"{first} and {second} are both {board[pairs[0][0]] - 1}"


def is_solved(kind: str, boards: Any, answers: Any) -> Any:
    """Return whether answers [..., cells] keep the givens and every rule: bool [...].

    The givens are those of boards [..., cells]. Arrays of NumPy, or of any library with its
    methods. Of a maze: the path has no branch, and joins start and goal if no walls stand alone. A
    shorter one may exist.
    """
    lead, side = answers.shape[:-1], math.isqrt(answers.shape[-1])
    answers = answers.astype("int32")
    if kind == "lights":
        return (((boards == 2) + (answers == 2) @ crosses(side)) % 2 == 0).all(-1) & (
            answers > 0
        ).all(-1)
    if kind == "maze":
        wall, free, start, goal, path = range(1, 6)
        on, ends = answers >= start, (answers == start) | (answers == goal)
        ways = on @ (crosses(side) - np.eye(side * side, dtype=np.int32))
        kept = (answers == boards) | ((boards == free) & (answers == path))
        return kept.all(-1) & (~on | (ways == 2 - ends)).all(-1)
    # Distinct powers of two: as many as a unit has cells add up to all of them in one way alone.
    high, wide = BOXES[kind]
    grid = (1 << answers).reshape(-1, side // high, high, side // wide, wide)
    whole = (1 << (side + 2)) - 4
    rows, columns, boxes = (
        (grid.sum(axes) == whole).all((1, 2)) for axes in ((3, 4), (1, 2), (2, 4))
    )
    return (rows & columns & boxes).reshape(lead) & ((boards < 2) | (boards == answers)).all(-1)


@functools.lru_cache(maxsize=4)
def crosses(side: int) -> np.ndarray:
    """Return int32 [cells, cells]: 1 for each cell and those above, below, left and right."""
    line, column = np.divmod(np.arange(side * side), side)
    return ((abs(line[:, None] - line) + abs(column[:, None] - column)) <= 1).astype(np.int32)


@functools.lru_cache(maxsize=8)
def has_one_answer(side: int) -> bool:
    """Return whether each board of lights has exactly one answer.

    The presses of the first row decide those of each next one, if no light is to change. So the
    answer is the only one if the first row's presses are found from the row below the last.
    """
    # a cell, and those left and right of it
    near = np.tri(side, k=1, dtype=np.int32) * np.tri(side, k=1, dtype=np.int32).T
    above, row = np.zeros_like(near), np.eye(side, dtype=np.int32)
    for _ in range(side):
        above, row = row, (near @ row + above) % 2
    rows = [int("".join(map(str, line)), 2) for line in row.tolist()]
    while rows:
        pivot = max(rows)
        rows.remove(pivot)
        if not pivot:
            return False
        top = pivot.bit_length()
        rows = [row ^ pivot if row.bit_length() == top else row for row in rows]
    return True


def augment(
    kind: str, seed: int, index: np.ndarray, view: np.ndarray, *boards: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Augments each [k, cells] array in the same way, as a function of (seed, index, view) alone.

    Sudoku: the digits are renamed, bands and the rows in them, stacks and the columns in them are
    permuted, and half of the boards are transposed, if their boxes are square. Others: one of the
    eight symmetries of the square. View 0 is the puzzle itself.
    """
    unchanged = np.asarray(view) == 0
    if kind not in BOXES:
        which = np.where(
            unchanged, 0, order.hash_of(TURN, seed, index, view) % np.uint64(8)
        ).astype(int)
        places = turns(math.isqrt(boards[0].shape[1]))[which]
        return tuple(np.take_along_axis(x, places, axis=1) for x in boards)

    side, (high, wide) = KINDS[kind], BOXES[kind]

    def shuffled(domain: int, n: int, m: int = 1) -> np.ndarray:
        """[k, m, n]: m permutations of n for each board."""
        keys = order.hash_of(
            domain, seed, index[:, None], view[:, None], np.arange(m * n)[None]
        ).reshape(-1, m, n)
        return np.where(unchanged[:, None, None], np.arange(n), np.argsort(keys, axis=2))

    digits = np.concatenate(
        [np.tile([0, 1], (len(index), 1)), shuffled(DIGITS, side)[:, 0] + 2], axis=1
    )
    turn = (order.hash_of(TURN, seed, index, view) % np.uint64(2) == 1) & ~unchanged
    rows = shuffled(BANDS, side // high)[:, 0], shuffled(LINES, high, side // high)
    columns = shuffled(STACKS, side // wide)[:, 0], shuffled(COLUMNS, wide, side // wide)
    places = moved(kind, rows, columns, turn)
    named = (np.take_along_axis(digits, x.astype(np.int64), axis=1) for x in boards)
    return tuple(
        np.take_along_axis(y, places, axis=1).astype(x.dtype)
        for x, y in zip(boards, named, strict=True)
    )


def moved(kind: str, rows: tuple[Any, Any], columns: tuple[Any, Any], turn: Any) -> Any:
    """Return the cell of a Sudoku that each place takes, int [k, cells]. Arrays as of `is_solved`.

    ``rows``: permutations of the bands, [k, bands], and of the rows in each, [k, bands, rows].
    ``columns``: those of the stacks and of the columns in them. ``turn``: bool [k] of boards that
    are transposed, if their boxes are square.
    """
    side, (high, wide) = KINDS[kind], BOXES[kind]
    row, column = (
        (band[:, :, None] * size + line).reshape(-1, side)
        for (band, line), size in ((rows, high), (columns, wide))
    )
    cell = row[:, :, None] * side + column[:, None, :]
    if high == wide:
        cell = cell + turn[:, None, None] * (cell.transpose(0, 2, 1) - cell)
    return cell.reshape(-1, side * side)


def turns(side: int) -> np.ndarray:
    """Return the square's eight symmetries, int [8, cells]: the source of each place.

    The first is none.
    """
    grid = np.arange(side * side).reshape(side, side)
    return np.stack([np.rot90(g, q) for g in (grid, grid.T) for q in range(4)]).reshape(8, -1)
