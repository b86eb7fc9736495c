"""Puzzles from a seed: Sudoku of a grade, mazes and lights, in splits that share no solution."""

import numpy as np

from loaders import _rust, order
from loaders.base import DataError
from loaders.io import machine
from loaders.sudoku import puzzles as kinds
from loaders.sudoku.puzzles import BOXES, GRADES, HELD_OUT, KINDS, MAZE, PUZZLE, Puzzles, Source

GENERATOR = 2  # changes whenever the same (source, seed) would generate other puzzles
TEST_SHARE = 0.2  # of the solutions that a generator finds


def generate(source: Source, seed: int) -> dict[str, Puzzles]:
    """Generate both splits of a source: no board twice, and nothing in both splits.

    Raises DataError. Of a Sudoku of any grade, no solution is in both splits. Of one of a grade,
    and of 6 × 6, no symmetric copy either: of a solution if they are 9 × 9. Smaller sides have so
    few different solutions that those are of the boards. No maze and no lights are in both splits,
    turned or mirrored.
    """
    sizes = {"train": source.n_train, "test": source.n_test}
    chosen: dict[str, list[tuple[np.ndarray, ...]]] = {"train": [], "test": []}
    seen: set[bytes] = set()
    start, idle, chunk = 0, 0, min(4096, 64 + source.n_train + source.n_test)
    while any(len(chosen[split]) < sizes[split] for split in chosen):
        if idle > 20:
            have = ", ".join(
                f"{len(chosen[split])} of {n} for {split}" for split, n in sizes.items()
            )
            which = f"{source.grade} {source.kind}".strip()
            blanks = f" with blanks={source.blanks}" if source.kind in BOXES else ""
            if not any(chosen.values()):
                raise DataError(
                    f"none of {start} {source.kind} puzzles{blanks} is {source.grade}; take another"
                    " grade or blanks"
                )
            raise DataError(
                f"no more different {which} puzzles{blanks}, after {have}; lower n_train and n_test"
            )
        boards, answers, rating = _chunk(source, seed, start, chunk)
        held = order.hash_of(HELD_OUT, _class_of(source, boards, answers))
        is_test = (held >> np.uint64(11)).astype(np.float64) < TEST_SHARE * 2.0**53
        idle += 1
        for board, answer, rate, test in zip(boards, answers, rating, is_test, strict=True):
            split = "test" if test else "train"
            if len(chosen[split]) < sizes[split] and (key := board.tobytes()) not in seen:
                seen.add(key)
                chosen[split].append((board, answer, rate))
                idle = 0
        start += chunk
    cells = (KINDS[source.kind] or source.side) ** 2
    return {
        split: kinds.singles(
            np.array([b for b, _, _ in rows], np.uint8).reshape(-1, cells),
            np.array([a for _, a, _ in rows], np.uint8).reshape(-1, cells),
            np.array([r for _, _, r in rows], np.int64),
        )
        for split, rows in chosen.items()
    }


def _class_of(source: Source, boards: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return uint64 [n]: puzzles with the same number are in the same split."""
    if source.kind in BOXES and (source.grade or source.kind == "sudoku6"):
        which = answers if source.kind == "sudoku" else boards
        return _rust.sudoku_invariant(which - np.uint8(1), threads=machine.cores())
    weights = order.mix(np.arange(1, answers.shape[1] + 1, dtype=np.uint64))
    equal = (
        [answers]
        if source.kind in BOXES
        else [boards[:, turn] for turn in kinds.turns(source.side)]
    )
    least: np.ndarray = np.min([(weights * each).sum(1, dtype=np.uint64) for each in equal], axis=0)
    return least


def _chunk(
    source: Source, seed: int, start: int, n: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate puzzles start … start + n - 1 of a seed with the grade, as symbols.

    Returns boards, answers, ratings.
    """
    if source.kind not in BOXES:
        make = make_maze if source.kind == "maze" else make_lights
        made = [make(source.side, seed, i) for i in range(start, start + n)]
        boards, answers = (np.stack([m[i].reshape(-1) for m in made]) for i in range(2))
        return (
            boards,
            answers,
            (answers == (1 + MAZE.index("o") if source.kind == "maze" else 2)).sum(1),
        )
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
        kept = grades == GRADES.index(source.grade)
        boards, answers, guesses = boards[kept], answers[kept], guesses[kept]
    return boards + np.uint8(1), answers + np.uint8(1), guesses


def make_lights(side: int, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate lights ``index`` of a seed: the board, and presses that switch it off.

    Each is uint8 [side, side]. Any number of presses is as likely as any other.
    """
    rng = np.random.default_rng([PUZZLE, seed, index])
    pressed = np.zeros(side * side, np.int32)
    pressed[rng.permutation(side * side)[: rng.integers(1, side * side + 1)]] = 1
    board = pressed @ kinds.crosses(side) % 2
    return tuple((x + 1).astype(np.uint8).reshape(side, side) for x in (board, pressed))  # type: ignore[return-value]


def make_maze(side: int, seed: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate maze ``index`` of a seed: the board and its solution, uint8 [side, side].

    A random spanning tree over every second cell (depth first), so that exactly one path joins two
    cells. Start and goal are the two ends of a longest path.
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
        if (
            not (0 <= y + dy < n and 0 <= x + dx < n)
            or (neighbour := (y + dy) * n + x + dx) in seen
        ):
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
        grid[1 + 2 * line[0], 1 + 2 * column[0]], grid[1 + 2 * line[-1], 1 + 2 * column[-1]] = (
            begin,
            goal,
        )
    return board, answer
