"""Puzzles from a seed: Sudoku of a grade and mazes, in splits that share no solution."""

import itertools
from typing import NoReturn

import numpy as np

from loaders import _rust, order
from loaders.base import DataError
from loaders.io import machine
from loaders.sudoku import puzzles as kinds
from loaders.sudoku.puzzles import BOXES, GRADES, HELD_OUT, KINDS, MAZE, PUZZLE, Puzzles, Source

GENERATOR = 2  # changes whenever the same (source, seed) would generate other puzzles
MAX_IDLE_CHUNKS = 20  # in a row, without a new puzzle
TEST_SHARE = 0.2  # of the solutions that a generator finds


def generate(source: Source, seed: int) -> dict[str, Puzzles]:
    """Generate both splits of a source: no board twice, and nothing in both splits.

    Raises DataError. Of a Sudoku of any grade, no solution is in both splits. Of one of a grade,
    and of 6 × 6, no symmetric copy either: of a solution if they are 9 × 9. Smaller sides have so
    few different solutions that those are of the boards. No maze is in both splits, turned or
    mirrored.
    """
    sizes = {"train": source.n_train, "test": source.n_test}
    puzzles: dict[str, list[tuple[np.ndarray, ...]]] = {"train": [], "test": []}
    seen: set[bytes] = set()
    start = n_idle_chunks = 0
    chunk = min(4096, 64 + source.n_train + source.n_test)
    while any(len(puzzles[split]) < sizes[split] for split in puzzles):
        if n_idle_chunks > MAX_IDLE_CHUNKS:
            _refuse_more(source, {split: len(puzzles[split]) for split in sizes}, start)
        boards, answers, rating = _chunk(source, seed, start, chunk)
        draw = order.hash_of(HELD_OUT, _class_of(source, boards, answers))
        is_test = (draw >> np.uint64(11)).astype(np.float64) < TEST_SHARE * 2.0**53
        n_idle_chunks += 1
        for board, *puzzle, of_test in zip(boards, answers, rating, is_test, strict=True):
            split = "test" if of_test else "train"
            key = board.tobytes()
            if len(puzzles[split]) < sizes[split] and key not in seen:
                seen.add(key)
                puzzles[split].append((board, *puzzle))
                n_idle_chunks = 0
        start += chunk
    n_cells = (KINDS[source.kind] or source.side) ** 2
    return {split: _as_arrays(rows, n_cells) for split, rows in puzzles.items()}


def _as_arrays(rows: list[tuple[np.ndarray, ...]], n_cells: int) -> Puzzles:
    boards = np.array([board for board, _, _ in rows], np.uint8)
    answers = np.array([answer for _, answer, _ in rows], np.uint8)
    rating = np.array([rate for _, _, rate in rows], np.int64)
    return kinds.ungrouped(boards.reshape(-1, n_cells), answers.reshape(-1, n_cells), rating)


def _refuse_more(source: Source, n_generated: dict[str, int], n_tried: int) -> NoReturn:
    blanks = f" with blanks={source.blanks}" if source.kind in BOXES else ""
    if not any(n_generated.values()):
        raise DataError(
            f"none of {n_tried} {source.kind} puzzles{blanks} is {source.grade}; take another"
            " grade or blanks"
        )
    sizes = {"train": source.n_train, "test": source.n_test}
    have = ", ".join(f"{n_generated[split]} of {n} for {split}" for split, n in sizes.items())
    name = f"{source.grade} {source.kind}".strip()
    raise DataError(
        f"no more different {name} puzzles{blanks}, after {have}; lower n_train and n_test"
    )


def _class_of(source: Source, boards: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return uint64 [n]: puzzles with the same number are in the same split."""
    if source.kind in BOXES and (source.grade or source.kind == "sudoku6"):
        grids = answers if source.kind == "sudoku" else boards
        return _rust.sudoku_invariant(grids - np.uint8(1), threads=machine.cores())
    if source.kind in BOXES:
        equivalent = [answers]
    else:
        equivalent = [boards[:, turn] for turn in kinds.turns(source.side)]
    weights = order.mix(np.arange(1, answers.shape[1] + 1, dtype=np.uint64))
    sums = [(weights * grids).sum(1, dtype=np.uint64) for grids in equivalent]
    least: np.ndarray = np.min(sums, axis=0)
    return least


def _chunk(
    source: Source, seed: int, start: int, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate puzzles start … start + n - 1 of a seed with the grade, as symbols.

    Returns boards, answers, ratings.
    """
    if source.kind == "maze":
        mazes = [make_maze(source.side, seed, i) for i in range(start, start + n)]
        boards = np.stack([board.reshape(-1) for board, _ in mazes])
        answers = np.stack([answer.reshape(-1) for _, answer in mazes])
        path = 1 + MAZE.index("o")
        return boards, answers, (answers == path).sum(1)
    boards, answers, guesses = _rust.sudoku_generate(
        n,
        side=KINDS[source.kind],
        seed=seed,
        start=start,
        blanks=source.blanks,
        threads=machine.cores(),
    )
    if source.grade:
        grades, _ = _rust.sudoku_grade(boards, threads=machine.cores())
        is_of_grade = grades == GRADES.index(source.grade)
        boards = boards[is_of_grade]
        answers = answers[is_of_grade]
        guesses = guesses[is_of_grade]
    return boards + np.uint8(1), answers + np.uint8(1), guesses


def make_maze(side: int, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate maze ``index`` of a seed: the board and its solution, uint8 [side, side].

    A random spanning tree over every second cell (depth first), so that exactly one path joins two
    cells. Start and goal are the two ends of a longest path.
    """
    wall, free, start, goal, path = (np.uint8(1 + i) for i in range(len(MAZE)))
    n = (side - 1) // 2  # cells along a side
    first, joined = _spanning_tree(n, np.random.default_rng([PUZZLE, seed, index]))
    board = np.full((side, side), wall)
    board[1 : 2 * n : 2, 1 : 2 * n : 2] = free
    for cell, others in joined.items():
        for neighbour in others:
            board[_between(cell, neighbour, n)] = free
    ends = _farthest(joined, first)
    cells = _farthest(joined, ends[0])
    answer = board.copy()
    for cell in cells:
        answer[_place(cell, n)] = path
    for cell, neighbour in itertools.pairwise(cells):
        answer[_between(cell, neighbour, n)] = path
    for grid in (board, answer):
        grid[_place(cells[0], n)] = start
        grid[_place(cells[-1], n)] = goal
    return board, answer


def _spanning_tree(n: int, rng: np.random.Generator) -> tuple[int, dict[int, list[int]]]:
    """Return the first cell of a random walk over n × n cells, and the cells joined to each."""
    first = int(rng.integers(n * n))
    turns = rng.permuted(np.tile(np.arange(4), (n * n, 1)), axis=1).tolist()
    visited = {first}
    walk = [first]
    joined: dict[int, list[int]] = {cell: [] for cell in range(n * n)}
    while walk:
        cell = walk[-1]
        if not turns[cell]:
            walk.pop()
            continue
        y, x = divmod(cell, n)
        dy, dx = ((0, 1), (1, 0), (0, -1), (-1, 0))[turns[cell].pop()]
        is_inside = 0 <= y + dy < n and 0 <= x + dx < n
        neighbour = (y + dy) * n + x + dx
        if is_inside and neighbour not in visited:
            visited.add(neighbour)
            joined[cell].append(neighbour)
            joined[neighbour].append(cell)
            walk.append(neighbour)
    return first, joined


def _farthest(joined: dict[int, list[int]], start: int) -> list[int]:
    """Return the path from the cell farthest from ``start`` back to it."""
    previous = {start: start}
    queue = [start]
    for cell in queue:
        for neighbour in joined[cell]:
            if neighbour not in previous:
                previous[neighbour] = cell
                queue.append(neighbour)
    path = [queue[-1]]
    while path[-1] != start:
        path.append(previous[path[-1]])
    return path


def _place(cell: int, n: int) -> tuple[int, int]:
    """Return row and column of a cell on the board, where walls lie between cells."""
    row, column = divmod(cell, n)
    return 1 + 2 * row, 1 + 2 * column


def _between(a: int, b: int, n: int) -> tuple[int, int]:
    """Return the place of the wall between two neighbours."""
    (row_a, column_a), (row_b, column_b) = _place(a, n), _place(b, n)
    return (row_a + row_b) // 2, (column_a + column_b) // 2
