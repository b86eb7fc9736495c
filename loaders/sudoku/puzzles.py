"""Kinds of puzzles on a grid: their symbols, their text, their rules and their symmetries.

Symbol 0 is padding. The others, in the order of the characters that a table has for them:

  sudoku, sudoku6, sudoku4   1 blank ("." or 0), d + 1 for the digit d; boxes of 3 × 3, 2 × 3 (2
                             rows) and 2 × 2
  maze                       "# SGo": wall, free, start, goal, path
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from loaders import order

# name -> side. 0: it is Source.side
KINDS = {"sudoku": 9, "sudoku6": 6, "sudoku4": 4, "maze": 0}
BOXES = {"sudoku": (3, 3), "sudoku6": (2, 3), "sudoku4": (2, 2)}  # rows and columns of a box
MAZE = "# SGo"
# of a Sudoku: singles, pairs, chains, guesses (rust/core/src/sudoku_grades.rs)
GRADES = ("easy", "medium", "hard", "extreme")
# Domains of the hashes: two uses of the same numbers draw independently.
PUZZLE, VIEW, HELD_OUT, DIGITS, BANDS, LINES, STACKS, COLUMNS, TURN = range(32, 41)
# Difficulty classes begin at these guesses of the solver (or ratings of a CSV), and lengths of a
# maze's path.
CLASS_EDGES = {**dict.fromkeys(BOXES, (1, 4, 16, 64)), "maze": (40, 80, 120, 160)}


@dataclass(frozen=True)
class Source:
    """Puzzles of one kind."""

    kind: str = "sudoku"  # [name] sudoku (9 × 9), sudoku6 (6 × 6), sudoku4 (4 × 4) or maze
    path: str = ""  # [path] folder of CSV or npy files; empty = generated
    share: float = 1.0  # [1] of a batch, relative to the other sources
    n_train: int = 1000  # [puzzles] to train on, generated or drawn from a CSV; 0 = all of a CSV
    n_test: int = 1000  # [puzzles] generated to test on
    blanks: tuple[int, int] = (46, 64)  # [cells] fewest and most blanks of a generated Sudoku
    # [views] augmentations of a training puzzle besides itself, one in an epoch; 0 = none
    views: int = 1000
    side: int = 30  # [cells] of a generated maze's side
    # [name] of a generated Sudoku: easy, medium, hard or extreme, by the steps that it needs; empty
    # = any
    grade: str = ""


class Puzzles(NamedTuple):
    inputs: np.ndarray  # uint8 [n, cells]
    labels: np.ndarray  # uint8 [n, cells]; 0: not predicted
    puzzle: np.ndarray  # int32 [n] id in the puzzle embedding, within the source
    rating: np.ndarray  # int64 [n] guesses, or a path's length
    # int64 [g + 1] first row of each group. Training takes one row of a group in an epoch
    groups: np.ndarray


def ungrouped(inputs: np.ndarray, labels: np.ndarray, rating: np.ndarray) -> Puzzles:
    """Return puzzles of which each is a group of its own, and all share one id."""
    n = len(inputs)
    return Puzzles(inputs, labels, np.zeros(n, np.int32), rating.astype(np.int64), np.arange(n + 1))


def n_symbols(kind: str) -> int:
    """Return the number of symbols of a cell, padding included."""
    return 1 + len(characters(kind))


def characters(kind: str) -> str:
    """Return the characters of symbols 1, 2, … in a table."""
    if kind == "maze":
        return MAZE
    return ".123456789"[: KINDS[kind] + 1]


def kind_of(n_cells: int, vocab: int) -> str:
    """Return the kind whose boards have so many cells and symbols, or "" if there is none."""
    side = math.isqrt(n_cells)
    if side * side != n_cells:
        return ""
    for kind, side_of_kind in KINDS.items():
        if n_symbols(kind) == vocab and side == (side_of_kind or max(side, 3)):
            return kind
    return ""


def to_text(kind: str, board: np.ndarray) -> str:
    """Return the text of a board's symbols.

    Padding, which a model may answer, is a blank, or else a question mark.
    """
    padding = "." if kind in BOXES else "?"
    alphabet = padding + characters(kind)
    return "".join(alphabet[symbol] for symbol in board.tolist())


def to_symbols(kind: str, texts: Sequence[str]) -> np.ndarray:
    """Return the symbols of boards as text, uint8 [n, cells]. `wrong_texts` has found no error."""
    if not texts:
        return np.zeros((0, 0), np.uint8)
    text_of_all = "".join(texts).encode()
    codes = np.frombuffer(text_of_all, np.uint8).reshape(len(texts), -1)
    return _symbol_of_code(kind)[codes]


def _symbol_of_code(kind: str) -> np.ndarray:
    """Return the symbol of each character code, uint8 [256]; 0: none."""
    alphabet = characters(kind)
    symbols = np.zeros(256, np.uint8)
    symbols[list(alphabet.encode())] = np.arange(1, 1 + len(alphabet))
    if kind in BOXES:
        symbols[ord("0")] = 1
    return symbols


def wrong_texts(kind: str, side: int, texts: Mapping[int, str]) -> dict[int, str]:
    """Return the error of each board as text that has another size, or a symbol of no kind."""
    n_cells = side * side
    allowed = set(characters(kind))
    expected = repr(characters(kind))
    if kind in BOXES:
        allowed.add("0")
        expected = f"1 to {side}, or . or 0 for a blank"
    problems = {}
    for i, text in texts.items():
        if len(text) != n_cells:
            problems[i] = (
                f"{text[:90]!r} has {len(text)} characters; a board of this kind has"
                f" {n_cells} of {expected}"
            )
        elif not allowed.issuperset(text):
            cell = next(k for k, character in enumerate(text) if character not in allowed)
            problems[i] = f"{cell_name(cell, side)} is {text[cell]!r}; expected {expected}"
    return problems


def cell_name(cell: int, side: int) -> str:
    return f"row {cell // side + 1}, column {cell % side + 1}"


def clash(kind: str, board: np.ndarray) -> str:
    """Return two equal digits in a row, column or box, by their cells, or "" without any."""
    side = KINDS[kind]
    height, width = BOXES[kind]
    row, column = np.divmod(np.arange(side * side), side)
    box = row // height * height + column // width
    in_one_unit = np.any([unit[:, None] == unit for unit in (row, column, box)], axis=0)
    are_equal = (board[:, None] == board) & (board[:, None] > 1)
    pairs = np.argwhere(np.triu(are_equal & in_one_unit, 1))
    if not len(pairs):
        return ""
    a, b = pairs[0]
    return f"{cell_name(a, side)} and {cell_name(b, side)} are both {board[a] - 1}"


def is_solved(kind: str, boards: Any, answers: Any) -> Any:
    """Return whether answers [..., cells] keep the givens and every rule: bool [...].

    The givens are those of boards [..., cells]. Arrays of NumPy, or of any library with its
    methods. Of a maze: the path has no branch, and joins start and goal if no walls stand alone. A
    shorter one may exist.
    """
    side = math.isqrt(answers.shape[-1])
    answers = answers.astype("int32")
    if kind == "maze":
        _, free, start, goal, path = range(1, 6)
        on_path = answers >= start
        is_end = (answers == start) | (answers == goal)
        n_steps = on_path @ neighbours(side)  # from a cell to the next ones of the path
        keeps_board = (answers == boards) | ((boards == free) & (answers == path))
        is_way = ~on_path | (n_steps == 2 - is_end)
        return keeps_board.all(-1) & is_way.all(-1)
    # Distinct powers of two: as many as a unit has cells add up to all of them in one way alone.
    height, width = BOXES[kind]
    grid = (1 << answers).reshape(-1, side // height, height, side // width, width)
    all_digits = (1 << (side + 2)) - 4
    rows = (grid.sum((3, 4)) == all_digits).all((1, 2))
    columns = (grid.sum((1, 2)) == all_digits).all((1, 2))
    boxes = (grid.sum((2, 4)) == all_digits).all((1, 2))
    keeps_rules = (rows & columns & boxes).reshape(answers.shape[:-1])
    return keeps_rules & ((boards < 2) | (boards == answers)).all(-1)


@functools.lru_cache(maxsize=4)
def neighbours(side: int) -> np.ndarray:
    """Return int32 [cells, cells]: 1 for the cells above, below, left and right of each."""
    row, column = np.divmod(np.arange(side * side), side)
    distance = abs(row[:, None] - row) + abs(column[:, None] - column)
    adjacency: np.ndarray = (distance == 1).astype(np.int32)
    return adjacency


def augment(
    kind: str, seed: int, index: np.ndarray, view: np.ndarray, *boards: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Augments each [k, cells] array in the same way, as a function of (seed, index, view) alone.

    Sudoku: the digits are renamed, bands and the rows in them, stacks and the columns in them are
    permuted, and half of the boards are transposed, if their boxes are square. Others: one of the
    eight symmetries of the square. View 0 is the puzzle itself.
    """
    is_first_view = np.asarray(view) == 0
    if kind not in BOXES:
        symmetry = order.hash_of(TURN, seed, index, view) % np.uint64(8)
        sources = turns(math.isqrt(boards[0].shape[1]))
        places = sources[np.where(is_first_view, 0, symmetry).astype(int)]
        return tuple(np.take_along_axis(board, places, axis=1) for board in boards)

    side = KINDS[kind]
    height, width = BOXES[kind]

    def shuffled(domain: int, n: int, m: int = 1) -> np.ndarray:
        """[k, m, n]: m permutations of n for each board."""
        numbers = np.arange(m * n)[None]
        keys = order.hash_of(domain, seed, index[:, None], view[:, None], numbers)
        permutations = np.argsort(keys.reshape(-1, m, n), axis=2)
        return np.where(is_first_view[:, None, None], np.arange(n), permutations)

    padding_and_blank = np.tile([0, 1], (len(index), 1))
    names = np.concatenate([padding_and_blank, shuffled(DIGITS, side)[:, 0] + 2], axis=1)
    is_odd = order.hash_of(TURN, seed, index, view) % np.uint64(2) == 1
    rows = shuffled(BANDS, side // height)[:, 0], shuffled(LINES, height, side // height)
    columns = shuffled(STACKS, side // width)[:, 0], shuffled(COLUMNS, width, side // width)
    places = cells_at(kind, rows, columns, is_odd & ~is_first_view)
    augmented = []
    for board in boards:
        renamed = np.take_along_axis(names, board.astype(np.int64), axis=1)
        augmented.append(np.take_along_axis(renamed, places, axis=1).astype(board.dtype))
    return tuple(augmented)


def cells_at(kind: str, rows: tuple[Any, Any], columns: tuple[Any, Any], turn: Any) -> Any:
    """Return the cell of a Sudoku that each place takes, int [k, cells]. Arrays as of `is_solved`.

    ``rows``: permutations of the bands, [k, bands], and of the rows in each, [k, bands, rows].
    ``columns``: those of the stacks and of the columns in them. ``turn``: bool [k] of boards that
    are transposed, if their boxes are square.
    """
    side = KINDS[kind]
    height, width = BOXES[kind]
    row = _lines_at(*rows, height, side)
    column = _lines_at(*columns, width, side)
    cell = row[:, :, None] * side + column[:, None, :]
    if height == width:
        cell = cell + turn[:, None, None] * (cell.transpose(0, 2, 1) - cell)
    return cell.reshape(-1, side * side)


def _lines_at(bands: Any, lines: Any, size: int, side: int) -> Any:
    """Return the row (or column) that each row takes, int [k, side], from bands of ``size``."""
    return (bands[:, :, None] * size + lines).reshape(-1, side)


def turns(side: int) -> np.ndarray:
    """Return the square's eight symmetries, int [8, cells]: the source of each place.

    The first is none.
    """
    grid = np.arange(side * side).reshape(side, side)
    symmetries = [np.rot90(board, quarters) for board in (grid, grid.T) for quarters in range(4)]
    return np.stack(symmetries).reshape(8, -1)
