"""Generates puzzles with one solution into a folder that loaders.sudoku.sudoku reads.

    jaxtrain sudoku OUT [--kind sudoku|sudoku6|sudoku4|maze]
        [--grade easy|medium|hard|extreme] [--train 1000] [--test 1000]
        [--blanks 46 64] [--side 30] [--seed 0] [--format csv|npy]

    jaxtrain sudoku puzzles --train 1000 --test 1000

--grade keeps the Sudoku that need such steps, and none harder:

    easy      a cell with one candidate, or a digit with one place in a row, column or box
    medium    pairs: of cells or digits in a unit, and digits whose places in it lie in one other
              unit
    hard      chains through cells with two candidates and digits with two places
    extreme   a guess

csv: OUT/train.csv and OUT/test.csv with the columns source, question, answer, rating. The rating is
the number of guesses that the solver needs, or the length of a maze's path.
npy: OUT/train/ and OUT/test/ with all__inputs.npy and so on, and dataset.json. A seed gives the
same puzzles again, and no solution is in both splits. Of a grade, no symmetric copy is, either.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain.commands import arguments
from loaders.base import DataError, narrowed
from loaders.io import atomic_write
from loaders.sudoku import puzzle_generators, sudoku
from loaders.sudoku import puzzles as kinds


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain sudoku", __doc__)
    parser.add_argument("out", metavar="OUT", type=arguments.out_folder, help="the folder to make")
    parser.add_argument("--kind", choices=kinds.KINDS, default="sudoku", help="default: sudoku")
    parser.add_argument(
        "--train", type=arguments.positive, default=1000, help="puzzles to train on; default: 1000"
    )
    parser.add_argument("--test", type=int, default=1000, help="puzzles to test on; default: 1000")
    parser.add_argument(
        "--blanks",
        type=int,
        nargs=2,
        default=(46, 64),
        metavar=("FEWEST", "MOST"),
        help="of a Sudoku",
    )
    parser.add_argument(
        "--grade", choices=kinds.GRADES, default="", help="of a Sudoku; default: any"
    )
    parser.add_argument("--side", type=int, default=30, help="of a maze; default: 30")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")
    parser.add_argument("--format", choices=("csv", "npy"), default="csv", help="default: csv")
    args = parser.parse_args(argv)
    return make(args)


def make(args: argparse.Namespace) -> int:
    """Write the folder. Return the exit code. Raises DataError."""
    source = kinds.Source(
        kind=args.kind,
        grade=args.grade,
        n_train=args.train,
        n_test=args.test,
        blanks=tuple(args.blanks),
        side=args.side,
    )
    for where, text in sudoku.Config((source,)).validate():
        raise DataError(f"--{where.rpartition('.')[2].removeprefix('n_')} {text}")
    began = time.perf_counter()
    splits = puzzle_generators.generate(source, args.seed)
    seconds = time.perf_counter() - began
    args.out.mkdir(parents=True, exist_ok=True)
    for split, puzzles in splits.items():
        if args.format == "csv":
            write_csv(args.out, split, puzzles, source)
        else:
            write_npy(args.out, split, puzzles)
    _report(args, splits, seconds)
    return 0


def _report(args: argparse.Namespace, splits: Mapping[str, kinds.Puzzles], seconds: float) -> None:
    n_puzzles = n_open = 0  # n_open: with fewer blanks than --blanks asks for
    for puzzles in splits.values():
        blanks = (puzzles.inputs == 1).sum(1)
        n_puzzles += len(blanks)
        n_open += int((blanks < args.blanks[0]).sum())
    if n_open and args.kind in kinds.BOXES:
        print(
            f"{n_open} of {n_puzzles} have fewer than {args.blanks[0]} blanks: one more would give"
            " them several solutions"
        )
    ratings = np.concatenate([puzzles.rating for puzzles in splits.values()])
    difficulties = np.searchsorted(kinds.CLASS_EDGES[args.kind], ratings, side="right")
    classes = np.bincount(difficulties, minlength=5).tolist()
    rate = n_puzzles / seconds
    print(
        f"{n_puzzles} puzzles in {seconds:.1f} s, {rate:.0f} per second; by difficulty: {classes};"
        f" in {args.out}"
    )


def write_csv(out: pathlib.Path, split: str, puzzles: kinds.Puzzles, source: kinds.Source) -> None:
    origin = source.grade or "generated"
    columns = (puzzles.inputs, puzzles.labels, puzzles.rating)
    with atomic_write.table(out / f"{split}.csv") as rows:
        rows.writerow(("source", "question", "answer", "rating"))
        for board, solution, rating in zip(*columns, strict=True):
            question = kinds.to_text(source.kind, board)
            answer = kinds.to_text(source.kind, solution)
            rows.writerow((origin, question, answer, int(rating)))


def write_npy(out: pathlib.Path, split: str, puzzles: kinds.Puzzles) -> None:
    n_puzzles, n_cells = puzzles.inputs.shape
    folder = out / split
    folder.mkdir(exist_ok=True)
    # each puzzle has one board
    boards = np.arange(n_puzzles + 1, dtype=np.int32)
    groups = narrowed(puzzles.groups, np.int32, "the groups")
    arrays = {
        "inputs": puzzles.inputs,
        "labels": puzzles.labels,
        "puzzle_identifiers": puzzles.puzzle,
        "puzzle_indices": boards,
        "group_indices": groups,
    }
    for name, array in arrays.items():
        atomic_write.save(folder / f"all__{name}.npy", array)
    description = {
        "seq_len": n_cells,
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "sets": ["all"],
        "total_puzzles": n_puzzles,
    }
    text = json.dumps(description, indent=2)
    atomic_write.write(folder / "dataset.json", text + "\n")
