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
from collections.abc import Sequence

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
    n = sum(len(p.inputs) for p in splits.values())
    fewer = sum(int(((p.inputs == 1).sum(1) < args.blanks[0]).sum()) for p in splits.values())
    if fewer and args.kind in kinds.BOXES:
        print(
            f"{fewer} of {n} have fewer than {args.blanks[0]} blanks: one more would give them"
            " several solutions"
        )
    ratings = np.concatenate([p.rating for p in splits.values()])
    classes = np.bincount(
        np.searchsorted(kinds.EDGES[args.kind], ratings, side="right"), minlength=5
    )
    print(
        f"{n} puzzles in {seconds:.1f} s, {n / seconds:.0f} per second; by difficulty:"
        f" {classes.tolist()}; in {args.out}"
    )
    return 0


def write_csv(out: pathlib.Path, split: str, puzzles: kinds.Puzzles, source: kinds.Source) -> None:
    with atomic_write.table(out / f"{split}.csv") as rows:
        rows.writerow(("source", "question", "answer", "rating"))
        for board, answer, rating in zip(
            puzzles.inputs, puzzles.labels, puzzles.rating, strict=True
        ):
            texts = (kinds.to_text(source.kind, x) for x in (board, answer))
            rows.writerow((source.grade or "generated", *texts, int(rating)))


def write_npy(out: pathlib.Path, split: str, puzzles: kinds.Puzzles) -> None:
    n, folder = len(puzzles.inputs), out / split
    folder.mkdir(exist_ok=True)
    arrays = {
        "inputs": puzzles.inputs,
        "labels": puzzles.labels,
        "puzzle_identifiers": puzzles.puzzle,
        "puzzle_indices": np.arange(n + 1, dtype=np.int32),
        "group_indices": narrowed(puzzles.groups, np.int32, "the groups"),
    }
    for name, array in arrays.items():
        atomic_write.save(folder / f"all__{name}.npy", array)
    about = {
        "seq_len": puzzles.inputs.shape[1],
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "sets": ["all"],
    }
    atomic_write.write(
        folder / "dataset.json", json.dumps({**about, "total_puzzles": n}, indent=2) + "\n"
    )
