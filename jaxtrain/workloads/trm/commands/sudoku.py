"""Generates puzzles with one solution into a folder that loaders.sudoku.sudoku reads.

    jaxtrain sudoku OUT [--kind sudoku|sudoku4|maze] [--train 1000] [--test 1000] [--blanks 46 64] [--side 30] [--seed 0]
                        [--format csv|npy]

    jaxtrain sudoku puzzles --train 1000 --test 1000

csv: OUT/train.csv and OUT/test.csv with the columns source, question, answer, rating. The rating is the number of guesses that
the solver needs. npy: OUT/train/ and OUT/test/ with all__inputs.npy and so on, and dataset.json. Mazes are npy only. A seed
gives the same puzzles again, and no solution is in both splits.
"""

import argparse
import csv
import functools
import io
import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from jaxtrain.commands import arguments
from loaders.base import DataError, narrowed
from loaders.io import atomic_write
from loaders.sudoku import sudoku


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain sudoku", __doc__)
    parser.add_argument("out", metavar="OUT", type=pathlib.Path, help="the folder to make")
    parser.add_argument("--kind", choices=sudoku.KINDS, default="sudoku", help="default: sudoku")
    parser.add_argument("--train", type=arguments.positive, default=1000, help="puzzles to train on; default: 1000")
    parser.add_argument("--test", type=int, default=1000, help="puzzles to test on; default: 1000")
    parser.add_argument("--blanks", type=int, nargs=2, default=(46, 64), metavar=("FEWEST", "MOST"), help="of a Sudoku")
    parser.add_argument("--side", type=int, default=30, help="of a maze; default: 30")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--format", choices=("csv", "npy"), default="csv", help="default: csv")
    args = parser.parse_args(argv)
    if args.kind == "maze" and args.format == "csv":
        parser.error("--kind is maze, and a CSV holds Sudoku only; add --format=npy")
    return arguments.run(functools.partial(make, args), mistakes=(DataError,))


def make(args: argparse.Namespace) -> int:
    """Write the folder. Return the exit code. Raises DataError."""
    source = sudoku.Source(kind=args.kind, n_train=args.train, n_test=args.test, blanks=tuple(args.blanks), side=args.side)
    for where, text in sudoku.Config((source,)).problems():
        raise DataError(f"--{where.rpartition('.')[2].removeprefix('n_')} {text}")
    began = time.perf_counter()
    splits = sudoku.generate(source, args.seed)
    seconds = time.perf_counter() - began
    args.out.mkdir(parents=True, exist_ok=True)
    for split, puzzles in splits.items():
        (write_csv if args.format == "csv" else write_npy)(args.out, split, puzzles)
    n = sum(len(p.inputs) for p in splits.values())
    ratings = np.concatenate([p.rating for p in splits.values()])
    classes = np.bincount(np.searchsorted(sudoku.EDGES[args.kind], ratings, side="right"), minlength=5)
    print(f"{n} puzzles in {seconds:.1f} s, {n / seconds:.0f} per second; by difficulty: {classes.tolist()}; in {args.out}")
    return 0


def write_csv(out: pathlib.Path, split: str, puzzles: sudoku.Puzzles) -> None:
    def text(board: np.ndarray) -> str:
        return "".join("." if symbol == 1 else str(symbol - 1) for symbol in board.tolist())

    with atomic_write.file(out / f"{split}.csv") as raw, io.TextIOWrapper(raw, newline="", write_through=True) as file:
        rows = csv.writer(file)
        rows.writerow(("source", "question", "answer", "rating"))
        for board, answer, rating in zip(puzzles.inputs, puzzles.labels, puzzles.rating, strict=True):
            rows.writerow(("generated", text(board), text(answer), int(rating)))


def write_npy(out: pathlib.Path, split: str, puzzles: sudoku.Puzzles) -> None:
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
    about = {"seq_len": puzzles.inputs.shape[1], "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "sets": ["all"]}
    atomic_write.write(folder / "dataset.json", json.dumps({**about, "total_puzzles": n}, indent=2) + "\n")
