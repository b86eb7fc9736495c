"""Solves puzzles with a trained recursive model: the board, how sure the model is, and the steps that it took.

    jaxtrain solve RUN PUZZLES [--out FILE.csv]

    jaxtrain solve runs/trm-files puzzles/test.csv --out solved.csv

RUN is a run of jaxtrain.workloads.trm on Sudoku: its workdir, a step directory of it, or a folder of `jaxtrain export`. PUZZLES
is a CSV with a column question (and perhaps answer), as `jaxtrain sudoku` writes it, or text with a board a line:
digits row by row, . or 0 for blanks. FILE gets

    question, board
    confidence    in [0, 1]: that the board is right, by the model's own head
    steps         the first supervision step whose board is the last one
    halted        the first step at which the model was sure; 0: at none
    valid         whether it keeps the given digits, and each row, column and box holds every digit once

Interrupted, by a full disk, too, the same command goes on behind the boards that are done.
"""

import argparse
import csv
import functools
import io
import pathlib
from collections.abc import Sequence

from jaxtrain.commands import arguments

COLUMNS = ("question", "board", "confidence", "steps", "halted", "valid")


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain solve", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument("puzzles", metavar="PUZZLES", help="a CSV with a column question, or text with a board a line")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a CSV instead of printing boards")
    parser.add_argument("--batch", type=arguments.positive, default=64, help="boards computed together; default: 64")
    args = parser.parse_args(argv)

    return arguments.run_model(functools.partial(_solve, args))


def _solve(args: argparse.Namespace) -> int:
    from jaxtrain.workloads.trm import solve
    from loaders.io import records

    solver = solve.load(args.run, step=args.step, ema=args.ema)
    puzzles = solve.read_puzzles(args.puzzles, solver.side)
    boards: list[tuple[str, bool]] = []  # and whether each is valid
    if args.out:
        made_of = (solver.name, *(str(puzzle) for puzzle in puzzles), args.batch)
        with records.file(args.out, made_of) as file:
            if not file.n:
                file.write(_line(COLUMNS))
            for line in list(csv.reader(part.decode() for part in file.kept()))[1:]:
                boards.append((line[1], line[5] == "1"))
            first = len(boards)
            for puzzle, each in zip(puzzles[first:], solve.solve(solver, puzzles[first:], batch=args.batch), strict=True):
                confidence = f"{each.confidence:.4f}"
                file.write(_line((puzzle.question, each.board, confidence, each.steps, each.halted, int(each.valid))))
                boards.append((each.board, each.valid))
    else:
        for each in solve.solve(solver, puzzles, batch=args.batch):
            print(f"{each.board}  confidence {each.confidence:.3f}  steps {each.steps}{'' if each.valid else '  not valid'}")
            boards.append((each.board, each.valid))
    known = [(puzzle, board) for puzzle, (board, _) in zip(puzzles, boards, strict=True) if puzzle.answer]
    right = f"; {sum(p.answer == board for p, board in known)} of {len(known)} are the table's answer" if known else ""
    print(f"{len(boards)} boards, {sum(valid for _, valid in boards)} of them valid solutions{right}")
    return 0


def _line(values: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
