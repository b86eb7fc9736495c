"""Boards: generated ones have one solution, every view stays valid, folders are read, and the order
is a pure function."""

import csv
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.workloads.trm.commands import sudoku as sudoku_command
from loaders import _rust
from loaders.base import DataError, Rows
from loaders.sudoku import puzzles, sudoku

SMALL = sudoku.Source(n_train=40, n_test=12, blanks=(20, 40))
SOURCES = {
    "sudoku": SMALL,
    "sudoku4": sudoku.Source(kind="sudoku4", n_train=40, n_test=12, blanks=(3, 8)),
    "sudoku6": sudoku.Source(kind="sudoku6", n_train=40, n_test=12, blanks=(10, 24)),
    "maze": sudoku.Source(kind="maze", n_train=6, n_test=2, side=12),
}


def valid_sudoku(board, answer, side):
    """Checks the rules: every digit is once in each row, column and box, and the clues are kept."""
    (high, wide), digits = {4: (2, 2), 6: (2, 3), 9: (3, 3)}[side], set(range(2, side + 2))
    grid = answer.reshape(side, side)
    boxes = (
        grid.reshape(side // high, high, side // wide, wide)
        .transpose(0, 2, 1, 3)
        .reshape(side, side)
    )
    units = all(set(unit) == digits for units in (grid, grid.T, boxes) for unit in units.tolist())
    return units and all(b in (1, a) for b, a in zip(board.tolist(), answer.tolist(), strict=True))


def valid_maze(board, answer):
    """The path runs from start to goal, over free cells, without a branch."""
    side = round(len(board) ** 0.5)
    board, answer = board.reshape(side, side), answer.reshape(side, side)
    start, goal, path = (1 + puzzles.MAZE.index(symbol) for symbol in "SGo")
    if not ((board == answer) | ((board == 2) & (answer == path))).all():
        return False
    here, seen = tuple(np.argwhere(answer == start)[0]), set()
    while answer[here] != goal:
        seen.add(here)
        ways = [(here[0] + dy, here[1] + dx) for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))]
        ways = [w for w in ways if w not in seen and answer[w] in (path, goal)]
        if len(ways) != 1:
            return False
        here = ways[0]
    return len(seen) == (answer == path).sum() + 1


def valid(kind, board, answer):
    if kind in puzzles.BOXES:
        return valid_sudoku(board, answer, puzzles.KINDS[kind])
    return valid_maze(board, answer)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_view_of_every_puzzle_is_valid(kind):
    """The property that augmentation must keep. For Sudoku, the solution must also stay the only
    one."""
    made = sudoku.generate(SOURCES[kind], 3)["train"]
    n, views = len(made.inputs), 25
    index, view = np.repeat(np.arange(n), views), np.tile(np.arange(views), n).astype(np.uint64)
    boards, answers = sudoku.augment(kind, 5, index, view, made.inputs[index], made.labels[index])
    assert all(valid(kind, board, answer) for board, answer in zip(boards, answers, strict=True))
    assert puzzles.is_solved(kind, boards, answers).all()
    np.testing.assert_array_equal(boards[::views], made.inputs)
    different = len({b.tobytes() for b in boards[:views]})
    assert different > (20 if kind in puzzles.BOXES else 3)
    text = [puzzles.to_text(kind, board) for board in boards]
    np.testing.assert_array_equal(puzzles.to_symbols(kind, text), boards)
    if kind in puzzles.BOXES:
        count, _, first = _rust.sudoku_solve(boards - np.uint8(1))
        assert (count == 1).all()
        np.testing.assert_array_equal(first + 1, answers)
        some = boards.reshape(n, views, -1)[:20, :9].reshape(180, -1) - np.uint8(1)
        for numbers in (_rust.sudoku_invariant(some), _rust.sudoku_grade(some)[0]):
            assert (numbers.reshape(20, 9) == numbers[::9, None]).all(), (
                "symmetric copies have one number"
            )


def test_a_view_is_a_function_of_seed_index_and_number_alone():
    puzzles = sudoku.generate(SMALL, 0)["train"]
    index, view = np.arange(40), np.arange(40).astype(np.uint64)
    (together,) = sudoku.augment("sudoku", 1, index, view, puzzles.inputs)
    for i in (0, 7, 39):
        (alone,) = sudoku.augment(
            "sudoku", 1, index[i : i + 1], view[i : i + 1], puzzles.inputs[i : i + 1]
        )
        np.testing.assert_array_equal(alone[0], together[i])
    (other,) = sudoku.augment("sudoku", 2, index, view, puzzles.inputs)
    assert (other[1:] != together[1:]).any(axis=1).all()


def test_all_parts_of_the_augmentation_happen():
    """The cells of this board all differ in kind: rows leave their band, digits are renamed, and
    some boards are transposed."""
    k = 4000
    cells = np.tile((np.arange(81) % 9 + 2).astype(np.uint8), (k, 1))
    (digits,) = sudoku.augment("sudoku", 0, np.arange(k), np.ones(k, np.uint64), cells)
    grids = digits.reshape(k, 9, 9)
    by_columns = (grids == grids[:, :1]).all((1, 2))  # all rows alike: not transposed
    assert 0.45 < by_columns.mean() < 0.55
    firsts = grids[by_columns][:, 0]
    assert all(0.08 < (firsts[:, 0] == d).mean() < 0.15 for d in range(2, 11))


@pytest.mark.parametrize("kind", SOURCES)
def test_splits_are_generated_apart(kind):
    splits = sudoku.generate(SOURCES[kind], 3)
    assert {name: len(p.inputs) for name, p in splits.items()} == {
        "train": SOURCES[kind].n_train,
        "test": SOURCES[kind].n_test,
    }
    answers = {name: {a.tobytes() for a in p.labels} for name, p in splits.items()}
    assert not answers["train"] & answers["test"]
    assert len({b.tobytes() for p in splits.values() for b in p.inputs}) == sum(
        len(p.inputs) for p in splits.values()
    )


def least(board):
    """The first of all symmetric copies of a 4 × 4 board, found by trying each."""
    swaps = [np.array([[0, 1], [1, 0]])[list(k)] for k in np.ndindex(2, 2, 2)]
    lines = [
        (2 * band[:, None] + np.stack([first, second])[band]).ravel()
        for band, first, second in swaps
    ]
    copies = []
    for grid in (board.reshape(4, 4), board.reshape(4, 4).T):
        for rows in lines:
            for columns in lines:
                copy = grid[rows][:, columns].ravel().tolist()
                names = {1: 1}
                copies.append(tuple(names.setdefault(s, len(names) + 1) for s in copy))
    return min(copies)


@pytest.mark.parametrize(
    "kind, grade", [("sudoku4", "easy"), ("sudoku6", ""), ("sudoku", "extreme"), ("maze", "")]
)
def test_no_symmetric_copy_is_in_both_splits(kind, grade):
    blanks = (40, 60) if kind == "sudoku" else (8, 20)
    # of 9 × 9 boards, one in 80 is extreme
    n_train, n_test = (12, 4) if grade == "extreme" else (150, 60)
    splits = sudoku.generate(
        sudoku.Source(
            kind=kind, grade=grade, n_train=n_train, n_test=n_test, blanks=blanks, side=11
        ),
        1,
    )
    if kind == "maze":

        def copies(board):
            return min(
                x.tobytes() for g in (board, board.T) for x in map(np.rot90, [g] * 4, range(4))
            )  # noqa: E731

        numbers = {s: {copies(b.reshape(11, 11)) for b in p.inputs} for s, p in splits.items()}
    else:
        which = "labels" if kind == "sudoku" else "inputs"
        numbers = {
            s: set(_rust.sudoku_invariant(getattr(p, which) - np.uint8(1)).tolist())
            for s, p in splits.items()
        }
    assert not numbers["train"] & numbers["test"]
    if kind == "sudoku4":
        both = np.concatenate([p.inputs for p in splits.values()])
        classes = [least(board) for board in both]
        assert len(
            set(zip(classes, _rust.sudoku_invariant(both - np.uint8(1)).tolist(), strict=True))
        ) == len(set(classes))
        assert len(set(classes)) == len(set(_rust.sudoku_invariant(both - np.uint8(1)).tolist())), (
            "one number, one class"
        )
    if grade:
        grades, _ = _rust.sudoku_grade(splits["test"].inputs - np.uint8(1))
        assert (grades == puzzles.GRADES.index(grade)).all()
        assert (splits["test"].rating > 0).all() == (grade == "extreme"), (
            "singles need no guess of the solver, a guess does"
        )


def test_symmetric_solutions_are_those_that_are_known():
    """There are 2 different boards of 4 × 4, 49 of 6 × 6 (Pettersen), and billions of 9 × 9."""
    for side, fewest, most in ((4, 2, 2), (6, 45, 49), (9, 2000, 2000)):
        _, answers, _ = _rust.sudoku_generate(2000, side=side, blanks=(0, 0))
        assert fewest <= len(set(_rust.sudoku_invariant(answers).tolist())) <= most


def test_grades_are_what_a_slow_solver_needs():
    """A 9 × 9 board is graded by singles alone, then with the removals of pairs, written out cell
    by cell."""
    boards, _, guesses = _rust.sudoku_generate(60, side=9, blanks=(50, 60), seed=4)
    grades, backtracks = _rust.sudoku_grade(boards)
    assert set(grades.tolist()) == {0, 1, 2, 3} and (backtracks <= guesses).all()
    units = [[(i, j) for j in range(9)] for i in range(9)] + [
        [(j, i) for j in range(9)] for i in range(9)
    ]
    units += [
        [(3 * a + i, 3 * b + j) for i in range(3) for j in range(3)]
        for a in range(3)
        for b in range(3)
    ]

    def reduce(marks, pairs):
        before = {cell: set(m) for cell, m in marks.items()}
        for unit in units:
            for cell in unit:
                if len(marks[cell]) == 1:
                    for other in unit:
                        if other != cell:
                            marks[other] -= marks[cell]
            places = {d: {cell for cell in unit if d in marks[cell]} for d in range(1, 10)}
            for d, cells in places.items():
                if len(cells) == 1:
                    marks[next(iter(cells))] &= {d}
                if not pairs:
                    continue
                for other in units:
                    if cells <= set(other):
                        for cell in set(other) - cells:
                            marks[cell] -= {d}
                for e in places:
                    if len(cells) == 2 and d != e and places[e] == cells:
                        for cell in cells:
                            marks[cell] &= {d, e}
            for a in unit if pairs else ():
                for b in unit:
                    if a != b and len(marks[a]) == 2 and marks[a] == marks[b]:
                        for cell in set(unit) - {a, b}:
                            marks[cell] -= marks[a]
        return marks != before

    for board, grade in zip(boards.reshape(-1, 9, 9), grades, strict=True):
        marks = {
            (i, j): {int(board[i, j])} if board[i, j] else set(range(1, 10))
            for i in range(9)
            for j in range(9)
        }
        found = 2
        for needed, pairs in ((0, False), (1, True)):
            while reduce(marks, pairs):
                pass
            if all(len(m) == 1 for m in marks.values()):
                found = min(found, needed)
        assert found == min(grade, 2)


def test_more_boards_than_there_are_is_an_error():
    with pytest.raises(DataError, match="no more different sudoku4 puzzles"):
        sudoku.generate(replace(SOURCES["sudoku4"], blanks=(0, 0), n_train=400), 0)
    with pytest.raises(
        DataError, match="none of [0-9]+ sudoku4 puzzles .* is extreme; take another grade"
    ):
        sudoku.generate(replace(SOURCES["sudoku4"], grade="extreme", n_train=2, n_test=2), 0)


def test_a_4_by_4_maze_and_9_by_9_by_the_numbers():
    info = {kind: sudoku.dataset_info(sudoku.Config((source,))) for kind, source in SOURCES.items()}
    found = {kind: (f["n_cells"], f["vocab"], f["n_puzzles"]) for kind, f in info.items()}
    sizes = {
        "sudoku": (81, 11, 1),
        "sudoku6": (36, 8, 1),
        "sudoku4": (16, 6, 1),
        "maze": (144, 6, 1),
    }
    assert found == sizes and [puzzles.kind_of(*size[:2]) for size in sizes.values()] == list(sizes)


# The loader


def batches(config, n, *, split="train", batch=12, ranges=None, seed=0, start=0):
    loader = sudoku.make_loader(
        config, split=split, rows=Rows(batch, ranges or ((0, batch),)), seed=seed
    )
    loader.seek(start)
    found = []
    for _ in range(n):
        _, fields = next(loader)
        found.append({name: np.concatenate(parts) for name, parts in fields.items()})
    return found


def test_rows_do_not_depend_on_who_reads_them_nor_on_where_the_reading_began():
    config = sudoku.Config((SMALL,))
    whole = batches(config, 6)
    for name in whole[0]:
        parts = [
            batches(config, 6, ranges=((0, 3), (6, 9))),
            batches(config, 6, ranges=((3, 6), (9, 12))),
        ]
        for i in range(6):
            a, b = (np.split(p[i][name], 2) for p in parts)
            np.testing.assert_array_equal(np.concatenate([a[0], b[0], a[1], b[1]]), whole[i][name])
        np.testing.assert_array_equal(batches(config, 1, start=4)[0][name], whole[4][name])


def test_an_epoch_is_every_puzzle_once_each_time_seen_another_way():
    config = sudoku.Config((replace(SMALL, n_train=36),))
    found = batches(config, 6)
    for epoch in range(2):
        rows = [b["index"] for b in found[3 * epoch : 3 * epoch + 3]]
        assert sorted(np.concatenate(rows)) == list(range(36))
    boards = {}
    for b in found:
        for i, board in zip(b["index"], b["inputs"], strict=True):
            boards.setdefault(int(i), set()).add(board.tobytes())
    assert sum(len(views) == 2 for views in boards.values()) > 30
    assert all(
        valid_sudoku(i, l, 9) for b in found for i, l in zip(b["inputs"], b["labels"], strict=True)
    )


def test_a_test_split_comes_once_and_its_padding_does_not_count():
    config = sudoku.Config((SMALL,))
    loader = sudoku.make_loader(config, split="test", rows=Rows(5, ((0, 5),)), seed=0)
    found = list(loader)
    assert [position for position, _ in found] == [1, 2, 3] and loader.n_batches == 3
    index = np.concatenate([b["index"][0] for _, b in found])
    weight = np.concatenate([b["weight"][0] for _, b in found])
    assert sorted(index[weight == 1]) == list(range(12)) and index[weight == 1].tolist() != list(
        range(12)
    )
    assert (found[-1][1]["labels"][0][2:] == sudoku.IGNORED).all() and weight.sum() == 12


def test_a_mixture_keeps_its_shares_pads_and_numbers_its_tasks():
    sources = (replace(SMALL, share=2.0), SOURCES["sudoku4"], SOURCES["maze"])
    config = sudoku.Config(sources)
    info = sudoku.dataset_info(config)
    assert (info["n_cells"], info["vocab"], info["n_puzzles"]) == (144, 11, 3)
    for b in batches(config, 5):
        assert b["puzzle"].tolist() == [0] * 6 + [1] * 3 + [2] * 3
        assert (b["labels"][:6, 81:] == sudoku.IGNORED).all() and (b["inputs"][6:9, 16:] == 0).all()
        assert all(
            valid_sudoku(i[:16], l[:16], 4)
            for i, l in zip(b["inputs"][6:9], b["labels"][6:9], strict=True)
        )
        assert all(valid_maze(i, l) for i, l in zip(b["inputs"][9:], b["labels"][9:], strict=True))
    tests = batches(config, 3, split="test")
    assert np.bincount(np.concatenate([b["puzzle"][b["weight"] > 0] for b in tests])).tolist() == [
        12,
        12,
        2,
    ]
    with pytest.raises(DataError, match=r"sources\[0\].share gives no row"):
        sudoku.make_loader(config, split="train", rows=Rows(1, ((0, 1),)), seed=0)


def test_a_checkpoint_compares_the_settings_of_its_data():
    def state(config, seed=0):
        return sudoku.make_loader(
            config, split="train", rows=Rows(12, ((0, 12),)), seed=seed
        ).state(7)

    first = state(sudoku.Config((SMALL,)))
    assert first["position"] == 7 and first == state(sudoku.Config((SMALL,)))
    for other in (
        state(sudoku.Config((SMALL,)), 1),
        state(sudoku.Config((SMALL,), seed=1)),
        state(sudoku.Config((replace(SMALL, views=3),))),
    ):
        assert other != first


# Folders, through the command that writes them


@pytest.mark.parametrize("kind, what", [("csv", "sudoku"), ("npy", "sudoku"), ("csv", "maze")])
def test_the_loader_reads_the_boards_that_the_command_wrote(tmp_path, kind, what):
    arguments = [
        "--train=30",
        "--test=9",
        "--blanks",
        "20",
        "40",
        "--seed=3",
        "--side=8",
        f"--format={kind}",
    ]
    assert sudoku_command.main([str(tmp_path / "out"), f"--kind={what}", *arguments]) == 0
    made = sudoku.generate(
        sudoku.Source(kind=what, n_train=30, n_test=9, blanks=(20, 40), side=8), 3
    )
    source = sudoku.Source(kind=what, path=str(tmp_path / "out"), n_train=0)
    for split in made:
        read = sudoku._split(source, 0, split)
        np.testing.assert_array_equal(read.inputs, made[split].inputs)
        np.testing.assert_array_equal(read.labels, made[split].labels)
        if kind == "csv":
            np.testing.assert_array_equal(read.rating, made[split].rating)
    assert sudoku.dataset_info(sudoku.Config((source,)))["vocab"] == puzzles.n_symbols(what)


def write_csv(folder, rows):
    for split in ("train", "test"):
        with open(folder / f"{split}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("source", "question", "answer", "rating"), *rows])


def test_a_csv_is_drawn_from_and_its_errors_are_named(tmp_path):
    answer = "1234341221434321"
    blank = (0, 1, 2, 3, 4, 5, 8, 10, 12, 15)  # in this order, one solution is left
    rows = [
        (str(i), "".join("." if c in blank[:i] else d for c, d in enumerate(answer)), answer, i)
        for i in range(10)
    ]
    write_csv(tmp_path, rows)
    source = sudoku.Source(kind="sudoku4", path=str(tmp_path), n_train=4)
    found = [sudoku._split(source, seed, "train") for seed in range(3)]
    assert all(len(p.inputs) == 4 for p in found) and len({p.rating.tobytes() for p in found}) > 1
    assert len(sudoku._split(source, 0, "test").inputs) == 10
    assert [(p.inputs == 1).sum(1).tolist() == p.rating.tolist() for p in found] == [True] * 3
    for broken, message in (
        (
            [("0", "." * 15, answer, 0)],
            "train.csv:2: '[.]{15}' has 15 characters; a board of this kind has 16",
        ),
        (
            [("0", "2" + answer[1:], answer, 0)],
            "train.csv:2: .* row 1, column 1 is blank, or not as in the question",
        ),
        (
            [("0", answer[:5] + "7" + answer[6:], answer, 0)],
            "train.csv:2: row 2, column 2 is '7'; expected 1 to 4",
        ),
        (
            [("0", "²" + answer[1:], answer, 0)],
            "train.csv:2: row 1, column 1 is '²'; expected 1 to 4",
        ),
        (
            [("0", answer, answer, 0), ("1", "." * 16, answer, 0)],
            "csv:3: the board has several solutions, which differ in row 1",
        ),
        ([("0", answer, answer, "hard")], "could not convert string to float"),
        (
            [("0", answer, answer, 0), ("0", answer, answer, "1e30")],
            "train.csv:3: the rating is no number",
        ),
        (
            [("0", answer, answer, 0), ("1", "." * 16, "1" * 16, 0)],
            "csv:3: .* no solution: row 1, column 1 and row 1, column 2 are both",
        ),
        ([], r"train.csv has no boards: no row follows its header"),
    ):
        write_csv(tmp_path, broken)
        with pytest.raises(DataError, match=message):
            sudoku._split(source, 0, "train")
    lines = [
        "source,question,answer,rating",
        "",
        f"0,{answer},{answer},0",
        "",
        "",
        f"1,{'.' * 16},{answer},0",
    ]
    for end in ("\n", "\r\n"):
        (tmp_path / "train.csv").write_bytes(end.join(lines).encode())
        with pytest.raises(DataError, match="csv:6: the board has several solutions"):
            sudoku._split(source, 0, "train")


@pytest.mark.parametrize("side", [4, 6, 9])
def test_an_answer_is_a_solution_only_by_its_rows_and_columns_and_boxes(side):
    """Each rule is broken alone, so that no check of a rule can be left out."""
    kind = next(kind for kind, of in puzzles.KINDS.items() if of == side)
    high, wide = puzzles.BOXES[kind]
    line = np.arange(side)
    solution = (line[:, None] % high * wide + line[:, None] // high + line) % side
    only_columns, only_rows = np.tile(line[:, None], side), np.tile(line, (side, 1))
    no_box = (line[:, None] + line) % side  # a Latin square
    swapped = solution.copy()
    swapped[0, :2] = swapped[0, 1::-1]  # its row and its box are right, but two columns are wrong
    turned = swapped.T if high == wide else only_rows
    boards = 2 + np.array(
        [solution, only_columns, only_rows, no_box, swapped, turned, solution[::-1]], np.uint8
    )
    boards = boards.reshape(len(boards), -1)
    expected = [True, False, False, False, False, False, True]
    for blank in (np.ones_like(boards), np.where(line.repeat(side) % 2, boards, 1)):
        assert puzzles.is_solved(kind, blank, boards).tolist() == expected
        assert (
            np.asarray(puzzles.is_solved(kind, jnp.array(blank), jnp.array(boards))).tolist()
            == expected
        )
    assert [valid_sudoku(board, board, side) for board in boards] == expected
    boards[0, 0] = 1
    assert not puzzles.is_solved(kind, boards, boards)[0], "a blank is no digit"


@pytest.mark.parametrize(
    "kind, shape", [("sudoku4", (5, 0)), ("sudoku4", (5, 15)), ("maze", (5, 15)), ("maze", (5, 0))]
)
def test_boards_have_the_cells_of_their_kind(tmp_path, kind, shape):
    (tmp_path / "train").mkdir()
    for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices"):
        np.save(
            tmp_path / "train" / f"all__{name}.npy",
            np.zeros(shape if name in ("inputs", "labels") else 5, np.uint8),
        )
    with pytest.raises(
        DataError, match=f"all__inputs.npy has {shape[1]} cells in a row; expected "
    ):
        sudoku._split(sudoku.Source(kind=kind, path=str(tmp_path)), 0, "train")


def test_groups_of_a_folder_give_one_row_in_an_epoch(tmp_path):
    """Two groups: puzzles 0 and 1 have three rows together, and puzzle 2 has two. Ids choose the
    embedding."""
    inputs = np.arange(5 * 16, dtype=np.uint8).reshape(5, 16) % 5 + 1
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        for name, array in {
            "inputs": inputs,
            "labels": inputs,
            "puzzle_identifiers": np.array([4, 7, 1]),
            "puzzle_indices": np.array([0, 1, 3, 5]),
            "group_indices": np.array([0, 2, 3]),
        }.items():
            np.save(folder / f"all__{name}.npy", array)
    config = sudoku.Config((sudoku.Source(kind="sudoku4", path=str(tmp_path), views=0),))
    assert sudoku.dataset_info(config)["n_puzzles"] == 8
    found = batches(config, 60, batch=2)
    for b in found:
        assert sorted(i // 3 for i in b["index"]) == [0, 1], (
            "one of rows 0 to 2, one of rows 3 and 4"
        )
        assert [{0: 4, 1: 7, 2: 7, 3: 1, 4: 1}[i] for i in b["index"]] == b["puzzle"].tolist()
    assert {int(i) for b in found for i in b["index"]} == set(range(5))
    np.save(tmp_path / "train" / "all__group_indices.npy", np.array([0, 2, 2, 3]))
    with pytest.raises(DataError, match="train: group 1 has no row"):
        batches(config, 1, batch=2)


def test_errors_of_the_config_are_named():
    wrong = sudoku.Source(kind="chess", share=0, path="no such folder")
    config = sudoku.Config(
        (
            wrong,
            replace(SMALL, blanks=(9, 3)),
            replace(SMALL, grade="hardest"),
            replace(SOURCES["maze"], grade="easy"),
            sudoku.Source(kind="maze", side=1000),
        )
    )
    assert [where for where, _ in config.validate()] == [
        "sources[0].kind",
        "sources[0].share",
        "sources[0].path",
        "sources[1].blanks",
        "sources[2].grade",
        "sources[3].grade",
        "sources[4].side",
    ]


def test_generated_puzzles_are_made_once_and_their_facts_need_none(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    times = []
    generate = sudoku.generate
    monkeypatch.setattr(sudoku, "generate", lambda *a: times.append(a) or generate(*a))
    config = sudoku.Config(tuple(SOURCES.values()), seed=11)
    known = sudoku.dataset_info(config)
    assert sudoku.element_spec(config)["inputs"].shape == (144,) and known["n_test"] == (
        12,
        12,
        12,
        2,
    )
    assert not times and not list(tmp_path.iterdir())
    rows = Rows(50, ((0, 50),))

    def first():
        sudoku._generated.cache_clear()
        sudoku._split_once.cache_clear()
        loader = sudoku.make_loader(config, split="train", rows=rows, seed=0)
        loader.seek(0)
        return loader.fingerprint, next(loader)[1]

    once, kept = first(), len(times)
    assert kept == 4 and len(list((tmp_path / "puzzles").iterdir())) == 4
    again = first()
    assert len(times) == 4 and again[0] == once[0]
    for name, parts in once[1].items():
        np.testing.assert_array_equal(parts[0], again[1][name][0])
    for path in (tmp_path / "puzzles").iterdir():  # the state that a full disk leaves
        path.write_bytes(path.read_bytes()[:500])
    assert first()[0] == once[0] and len(times) == 8
    # The dataset info describes the generated boards.
    generated = [generate(s, 11) for s in SOURCES.values()]
    assert known["n_train"] == tuple(len(g["train"].inputs) for g in generated)
    assert known["n_cells"] == max(g["train"].inputs.shape[1] for g in generated)
    assert known["vocab"] > max(int(g[s].labels.max()) for g in generated for s in g)
    assert known["n_puzzles"] == 4


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "file"))
    sudoku._generated.cache_clear()
    with caplog.at_level("WARNING", "jaxtrain"):
        assert len(sudoku._generated(SOURCES["sudoku4"], 12)["train"].inputs) == 40
    assert str(tmp_path / "file") in caplog.text
