"""Solves puzzles with a trained recursive model: the board, how sure the model is, and the steps that it took.

    jaxtrain solve RUN PUZZLES [--out FILE.csv]

    jaxtrain solve runs/trm-files puzzles/test.csv --out solved.csv

RUN is a run of jaxtrain.workloads.trm on Sudoku: its workdir, or a step directory of it. PUZZLES is a CSV with a column
question (and answer, where there is one), as `jaxtrain sudoku` writes it, or text with a board a line: digits row by row, . or
0 for blanks. FILE gets

    question, board
    confidence    in [0, 1]: that the board is right, by the model's own head
    steps         the first supervision step whose board is the last one
    halted        the first step at which the model was sure; 0: at none
    valid         whether it keeps what was given, and each row, column and box holds every digit once
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

    from jaxtrain import config
    from jaxtrain.checkpoint import read as stored
    from jaxtrain.checkpoint import warm_start
    from jaxtrain.inference import solve

    mistakes = (solve.SolveError, stored.StoredError, warm_start.WarmStartError, config.ConfigError)
    return arguments.run(functools.partial(_solve, args), mistakes=mistakes)


def _solve(args: argparse.Namespace) -> int:
    from jaxtrain import cluster
    from jaxtrain.inference import solve
    from loaders import whole

    cluster.use_compilation_cache()
    solver = solve.load(args.run, step=args.step, ema=args.ema)
    puzzles = solve.read_puzzles(args.puzzles, solver.side)
    found = list(solve.solve(solver, puzzles, batch=args.batch))
    if args.out:
        text = io.StringIO()
        rows = [
            (p.question, s.board, f"{s.confidence:.4f}", s.steps, s.halted, int(s.valid))
            for p, s in zip(puzzles, found, strict=True)
        ]
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
        whole.write(args.out, text.getvalue())
    else:
        for each in found:
            print(f"{each.board}  confidence {each.confidence:.3f}  steps {each.steps}{'' if each.valid else '  not valid'}")
    known = [(p, s) for p, s in zip(puzzles, found, strict=True) if p.answer]
    right = f"; {sum(p.answer == s.board for p, s in known)} of {len(known)} are the table's answer" if known else ""
    print(f"{len(found)} boards, {sum(s.valid for s in found)} of them valid solutions{right}")
    return 0
