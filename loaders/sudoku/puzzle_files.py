"""Puzzles from a folder: CSV or npy files. `sudoku` has the formats."""

import itertools
import math
import pathlib
from collections.abc import Callable

import numpy as np
import pyarrow.csv

from loaders import _rust, order
from loaders.base import DataError, narrowed
from loaders.io import columnar, files, machine
from loaders.sudoku import puzzles as kinds
from loaders.sudoku.puzzles import BOXES, KINDS, Puzzles, Source

CHUNK = 8192  # [boards] checked together, as many as a cache holds


def read_csv(path: pathlib.Path, source: Source, seed: int, *, draw: int) -> Puzzles:
    """Return the puzzles of a table, or ``draw`` of them.

    Raises DataError, with the line and the cell.
    """
    try:
        text = pyarrow.csv.ConvertOptions(column_types={"question": "string", "answer": "string"})
        with columnar.native(
            files.inside(path.parent, path.name, remedy="; copy the file there")
        ) as file:
            table = pyarrow.csv.read_csv(file, convert_options=text)
        questions, answers = (table[name].to_pylist() for name in ("question", "answer"))
        rating = (
            np.zeros(len(questions))
            if "rating" not in table.column_names
            else np.asarray(table["rating"]).astype(float)
        )
    except (KeyError, OSError, ValueError) as error:
        if isinstance(error, files.FileError):
            raise
        raise DataError(
            f"{path}: {files.reason(error)}; expected the columns source, question, answer, rating"
        ) from error
    if not questions:
        raise DataError(
            f"{path} has no boards: no row follows its header; make some with `jaxtrain sudoku`"
        )
    if not (np.abs(rating) < 2**53).all():
        raise DataError(
            f"{path}:{_line(path, int(np.argmin(np.abs(rating) < 2**53)))}: the rating is no number"
        )
    chosen = np.arange(len(questions))
    if draw and draw < len(chosen):
        chosen = np.sort(order.permutation(seed, 0, len(chosen), np.arange(draw)))
    side = KINDS[source.kind] or math.isqrt(len(questions[chosen[0]] or ""))

    def where(i: int) -> str:
        return f"{path}:{_line(path, chosen[i])}"

    boards, solutions = (
        kinds.to_symbols(source.kind, side, [texts[i] or "" for i in chosen], where)
        for texts in (questions, answers)
    )
    check_answers(source.kind, boards, solutions, where)
    # mazes may have more than one path, and lights have one answer by their size
    if source.kind in BOXES:
        check_boards(source.kind, boards, where)
    return kinds.singles(boards, solutions, rating[chosen])


def _line(path: pathlib.Path, row: int) -> int:
    """Return the line of a table's row: the header is line 1, and blank lines are no rows."""
    with files.regular(path) as file:
        numbers = (number for number, line in enumerate(file, 1) if line.rstrip(b"\r\n"))
        return next(itertools.islice(numbers, int(row) + 1, None))


def check_answers(
    kind: str, inputs: np.ndarray, labels: np.ndarray, where: Callable[[int], str]
) -> None:
    """Raise DataError, with the line, if an answer is none. Arguments as of `check_boards`."""
    for start in range(0, len(inputs), CHUNK):
        boards, answers = (x[start : start + CHUNK] for x in (inputs, labels))
        if (bad := np.flatnonzero(~kinds.is_solved(kind, boards, answers))).size:
            board, answer = boards[bad[0]], answers[bad[0]]
            why = "it breaks a rule"
            if kind in BOXES:
                differs = np.flatnonzero(((board > 1) & (board != answer)) | (answer == 1))
                why_not = (
                    f"{kinds.name_of(differs[0], KINDS[kind])} is blank, or not as in the question"
                    if differs.size
                    else why
                )
                why = kinds.clash(kind, answer) or why_not
            raise DataError(
                f"{where(start + bad[0])}: the answer is no solution: {why}; correct or remove"
                " that row"
            )


def check_boards(kind: str, boards: np.ndarray, where: Callable[[int], str]) -> None:
    """Raise DataError, with the cell, if a Sudoku has no solution, or several.

    ``boards``: symbols, uint8 [n, cells]. ``where``: the name of board i, for example its file and
    line.
    """
    side = KINDS[kind]
    count, *_ = _rust.sudoku_solve(boards - np.uint8(1), threads=machine.cores())
    if not (bad := np.flatnonzero(count != 1)).size:
        return
    board = boards[bad[0]]
    if not count[bad[0]]:
        why = kinds.clash(kind, board) or "its clues contradict each other"
        raise DataError(f"{where(bad[0])}: the board has no solution: {why}; correct or remove it")
    for cell in np.flatnonzero(board == 1):
        tries = np.repeat(board[None] - np.uint8(1), side, axis=0)
        tries[:, cell] = np.arange(1, side + 1)
        if (_rust.sudoku_solve(tries, limit=1)[0] > 0).sum() > 1:  # with each digit there
            differs = kinds.name_of(int(cell), side)
            raise DataError(
                f"{where(bad[0])}: the board has several solutions, which differ in {differs}; add"
                " clues or remove it"
            )


def read_npy(folder: pathlib.Path, source: Source) -> Puzzles:
    """Return the puzzles of a folder of arrays. Raises DataError."""
    names = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    try:
        loaded = [files.array(files.inside(folder, f"all__{name}.npy")) for name in names]
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    for name, x in zip(names, loaded, strict=True):
        if x.ndim != (2 if name in names[:2] else 1) or x.dtype.kind not in "iu" or not len(x):
            raise DataError(
                f"{folder}: all__{name}.npy holds {x.dtype} {x.shape}; expected integers"
            )
    inputs, labels, ids, puzzles, groups = loaded
    symbols, cells = kinds.n_symbols(source.kind), inputs.shape[1]
    side = KINDS[source.kind] or math.isqrt(cells)
    for name, x in (("inputs", inputs), ("labels", labels)):
        if not 0 < x.shape[1] == side * side == cells:
            expected = (
                f"{side * side}"
                if KINDS[source.kind]
                else f"a square, and the {cells} of all__inputs.npy"
            )
            raise DataError(
                f"{folder}: all__{name}.npy has {x.shape[1]} cells in a row; expected {expected}"
            )
        if x.max() >= symbols or x.min() < 0:
            raise DataError(
                f"{folder}: all__{name}.npy has symbols {x.min()} to {x.max()}; a {source.kind} has"
                f" 0 to {symbols - 1}"
            )
    if any((np.diff(x.astype(np.int64)) < 0).any() or x[0] != 0 for x in (puzzles, groups)):
        raise DataError(f"{folder}: puzzle_indices and group_indices must increase from 0")
    if (
        len(inputs) != len(labels)
        or puzzles[-1] != len(inputs)
        or groups[-1] != len(ids)
        or len(puzzles) != len(ids) + 1
    ):
        raise DataError(f"{folder}: rows, puzzles and groups differ in number")
    # of which training could take no row
    if (empty := np.flatnonzero(np.diff(puzzles[groups]) == 0)).size:
        raise DataError(
            f"{folder}: group {empty[0]} has no row; leave it out of all__group_indices.npy"
        )
    puzzle = np.repeat(narrowed(ids, np.int32, f"the puzzles of {folder}"), np.diff(puzzles))
    return Puzzles(
        inputs,
        labels,
        puzzle,
        np.zeros(len(inputs), np.int64),
        np.asarray(puzzles, np.int64)[groups],
    )
