"""Puzzles from a folder: CSV or npy files. `sudoku` has the formats."""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow.csv

from loaders import _rust, order
from loaders.base import DataError, narrowed
from loaders.io import checks, columnar, files, machine
from loaders.sudoku import puzzles as kinds
from loaders.sudoku.puzzles import BOXES, KINDS, Puzzles, Source

CHUNK = 8192  # [boards] checked together, as many as a cache holds


def read_csv(path: pathlib.Path, source: Source, seed: int, *, draw: int) -> Puzzles:
    """Return the puzzles of a table, or ``draw`` of them.

    Raises DataError, with the line and the cell, which lists every wrong board.
    """
    try:
        questions, answers, rating = _columns(path)
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
    is_number = np.abs(rating) < 2**53
    if not is_number.all():
        lines = _row_lines(path)
        listed = []
        for row in np.flatnonzero(~is_number).tolist():
            listed.append(f"{path}:{lines[row]}: the rating is no number")
        raise DataError(f"{listed[0]}{checks.more(len(listed))}", listed=listed)
    rows = np.arange(len(questions))
    if draw and draw < len(rows):
        rows = np.sort(order.permutation(seed, 0, len(rows), np.arange(draw)))
    side = KINDS[source.kind] or math.isqrt(len(questions[rows[0]] or ""))
    lines_of_rows = functools.cache(functools.partial(_row_lines, path))
    boards, solutions = to_boards(
        source.kind,
        side,
        [questions[row] or "" for row in rows],
        {i: answers[row] or "" for i, row in enumerate(rows)},
        lambda i: f"{path}:{lines_of_rows()[rows[i]]}",
    )
    return kinds.ungrouped(boards, solutions, rating[rows])


def to_boards(
    kind: str,
    side: int,
    questions: Sequence[str],
    answers: Mapping[int, str],
    where: Callable[[int], str],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the symbols of boards and of their answers, uint8 [n, cells] each.

    ``answers``: of the boards that have one, by their index. ``where``: the name of board i, for
    example its file and line.

    Raises DataError, which lists every wrong board: of another size, with other symbols, without a
    solution or with several, or with an answer that is none.
    """
    every_question = dict(enumerate(questions))
    problems = kinds.wrong_texts(kind, side, every_question)
    problems = {**kinds.wrong_texts(kind, side, answers), **problems}
    sound = [i for i in every_question if i not in problems]
    boards = kinds.to_symbols(kind, [questions[i] for i in sound])
    is_answered = np.array([i in answers for i in sound], bool)
    solutions = kinds.to_symbols(kind, [answers[i] for i in sound if i in answers])
    for row, problem in _wrong_answers(kind, boards[is_answered], solutions).items():
        problems[[i for i in sound if i in answers][row]] = problem
    if kind in BOXES and sound:  # mazes may have more than one path
        for row, problem in _wrong_boards(kind, boards).items():
            problems.setdefault(sound[row], problem)
    if problems:
        listed = [f"{where(i)}: {problems[i]}" for i in sorted(problems)]
        raise DataError(f"{listed[0]}{checks.more(len(listed))}", listed=listed)
    return boards, solutions


def _columns(path: pathlib.Path) -> tuple[list[str | None], list[str | None], np.ndarray]:
    """Return questions, answers and ratings. Raises KeyError, OSError, ValueError, FileError."""
    text = pyarrow.csv.ConvertOptions(column_types={"question": "string", "answer": "string"})
    table_file = files.inside(path.parent, path.name, remedy="; copy the file there")
    with columnar.native(table_file) as file:
        table = pyarrow.csv.read_csv(file, convert_options=text)
    questions = table["question"].to_pylist()
    answers = table["answer"].to_pylist()
    rating = np.zeros(len(questions))
    if "rating" in table.column_names:
        rating = np.asarray(table["rating"]).astype(float)
    return questions, answers, rating


def _row_lines(path: pathlib.Path) -> list[int]:
    """Return the line of each row: the header is line 1, and blank lines are no rows."""
    with files.regular(path) as file:
        numbers = [number for number, line in enumerate(file, 1) if line.rstrip(b"\r\n")]
    return numbers[1:]


def _wrong_answers(kind: str, boards: np.ndarray, answers: np.ndarray) -> dict[int, str]:
    """Return the error of each answer that is none. Symbols, uint8 [n, cells]."""
    problems = {}
    for start in range(0, len(boards), CHUNK):
        end = start + CHUNK
        is_solved = kinds.is_solved(kind, boards[start:end], answers[start:end])
        for row in (start + np.flatnonzero(~is_solved)).tolist():
            why = _why_unsolved(kind, boards[row], answers[row])
            problems[row] = f"the answer is no solution: {why}; correct or remove that row"
    return problems


def _why_unsolved(kind: str, board: np.ndarray, answer: np.ndarray) -> str:
    if kind not in BOXES:
        return "it breaks a rule"
    clash = kinds.clash(kind, answer)
    if clash:
        return clash
    is_given = board > 1
    differs = np.flatnonzero((is_given & (board != answer)) | (answer == 1))
    if not differs.size:
        return "it breaks a rule"
    cell = kinds.cell_name(differs[0], KINDS[kind])
    return f"{cell} is blank, or not as in the question"


def _wrong_boards(kind: str, boards: np.ndarray) -> dict[int, str]:
    """Return the error of each Sudoku without a solution, or with several. uint8 [n, cells]."""
    n_solutions, *_ = _rust.sudoku_solve(boards - np.uint8(1), threads=machine.cores())
    problems = {}
    for row in np.flatnonzero(n_solutions != 1).tolist():
        if n_solutions[row]:
            cell = _first_open_cell(kind, boards[row])
            problems[row] = (
                f"the board has several solutions, which differ in {cell}; add clues or remove it"
            )
        else:
            why = kinds.clash(kind, boards[row]) or "its clues contradict each other"
            problems[row] = f"the board has no solution: {why}; correct or remove it"
    return problems


def _first_open_cell(kind: str, board: np.ndarray) -> str:
    """Return the first cell in which two solutions of a board differ."""
    side = KINDS[kind]
    for cell in np.flatnonzero(board == 1):
        tries = np.repeat(board[None] - np.uint8(1), side, axis=0)  # with each digit there
        tries[:, cell] = np.arange(1, side + 1)
        n_solutions, *_ = _rust.sudoku_solve(tries, limit=1)
        if (n_solutions > 0).sum() > 1:
            return kinds.cell_name(int(cell), side)
    return "no cell"


def read_npy(folder: pathlib.Path, source: Source) -> Puzzles:
    """Return the puzzles of a folder of arrays. Raises DataError."""
    names = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    try:
        loaded = [files.array(files.inside(folder, f"all__{name}.npy")) for name in names]
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    for name, array in zip(names, loaded, strict=True):
        n_axes = 2 if name in ("inputs", "labels") else 1
        if array.ndim != n_axes or array.dtype.kind not in "iu" or not len(array):
            raise DataError(
                f"{folder}: all__{name}.npy holds {array.dtype} {array.shape}; expected integers"
            )
    inputs, labels, ids, puzzles, groups = loaded
    for name, array in (("inputs", inputs), ("labels", labels)):
        _check_symbols(f"{folder}: all__{name}.npy", array, inputs.shape[1], source.kind)
    for starts in (puzzles, groups):
        if (np.diff(starts.astype(np.int64)) < 0).any() or starts[0] != 0:
            raise DataError(f"{folder}: puzzle_indices and group_indices must increase from 0")
    are_as_many = len(inputs) == len(labels) == puzzles[-1] and len(puzzles) == len(ids) + 1
    if not are_as_many or groups[-1] != len(ids):
        raise DataError(f"{folder}: rows, puzzles and groups differ in number")
    # of which training could take no row
    empty = np.flatnonzero(np.diff(puzzles[groups]) == 0)
    if empty.size:
        raise DataError(
            f"{folder}: group {empty[0]} has no row; leave it out of all__group_indices.npy"
        )
    puzzle = np.repeat(narrowed(ids, np.int32, f"the puzzles of {folder}"), np.diff(puzzles))
    rating = np.zeros(len(inputs), np.int64)
    first_rows = np.asarray(puzzles, np.int64)[groups]
    return Puzzles(inputs, labels, puzzle, rating, first_rows)


def _check_symbols(name: str, boards: np.ndarray, n_cells: int, kind: str) -> None:
    """Refuse boards of another size than ``n_cells``, or of the kind, and unknown symbols."""
    side = KINDS[kind] or math.isqrt(n_cells)
    if not 0 < boards.shape[1] == side * side == n_cells:
        expected = f"a square, and the {n_cells} of all__inputs.npy"
        if KINDS[kind]:
            expected = f"{side * side}"
        raise DataError(f"{name} has {boards.shape[1]} cells in a row; expected {expected}")
    n_symbols = kinds.n_symbols(kind)
    if boards.max() >= n_symbols or boards.min() < 0:
        raise DataError(
            f"{name} has symbols {boards.min()} to {boards.max()}; a {kind} has"
            f" 0 to {n_symbols - 1}"
        )
