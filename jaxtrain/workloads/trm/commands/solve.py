"""Solves puzzles with a trained recursive model: the board, how sure it is, and its steps.

    jaxtrain solve RUN PUZZLES [--out FILE.csv] [--rollouts N] [--symmetry] [--noise S] [--steps K]
                   [--stop none|halt|check] [--residual R] [--choose q|check]
                   [--calibrate FILE] [--curve FILE.csv] [--seed 0] [--batch 64]

    jaxtrain solve runs/trm-last puzzles/test.csv --out solved.csv
    jaxtrain solve runs/trm-last puzzles/test.csv --rollouts 16 --symmetry --stop check \
        --choose check --out solved.csv
    jaxtrain solve runs/trm-last puzzles/test.csv --rollouts 64 --noise 0.1 0.3 1 --curve curve.csv

RUN is a run of jaxtrain.workloads.trm: its workdir, a step directory of it, or a folder of
`jaxtrain export`. PUZZLES is a CSV with a column question (and perhaps answer), as `jaxtrain
sudoku` writes it, or text with a board a line: digits row by row, . or 0 for blanks. A board
without a solution, or with several, is an error. FILE gets

    question, board
    confidence    in [0, 1]: that the board is right, by the model's own head
    steps         the first supervision step whose board is the last one
    halted        the first step at which the model was sure; 0: at none
    valid         whether it keeps the given digits, and each row, column and box holds every digit
                  once
    rollout       the number of the chosen rollout; 0 is the model's own
    q_valid       whether the board that the head prefers is valid
    halts         share of the other rollouts that the model was sure of at a step
    solves        share of the rollouts whose board is valid

Each rollout is another pass over the board. By --symmetry it sees the board with other names of its
digits, its lines in another order, or transposed (mazes: turned or mirrored), and its
answer is put back. By --noise it has Gaussian noise of standard deviation S in both states, whose
own size is 1, before each supervision step. By --choose q the head chooses among the rollouts. By
--choose check the rules do, if any board keeps them. By --stop halt a rollout ends when the head is
sure. By --stop check all those of a board end when one keeps the rules. By --residual a rollout
ends when its state changes by less. The confidence is fitted by --calibrate to a table with
answers, which may share no board with PUZZLES. For the first 1, 2, 4 … of N rollouts and each S,
--curve writes accuracy with 95 % intervals, and their share of the seconds a board.

Interrupted, by a full disk, too, the same command goes on behind the boards that are done.
"""

import argparse
import csv
import io
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain.commands import arguments

if TYPE_CHECKING:
    from jaxtrain.workloads.trm import solve
    from jaxtrain.workloads.trm.confidence import Scale
    from jaxtrain.workloads.trm.rollouts import Search

MAX_SIZE = 1e38  # of noise and residuals, in float32
COLUMNS = (
    "question",
    "board",
    "confidence",
    "steps",
    "halted",
    "valid",
    "rollout",
    "q_valid",
    "halts",
    "solves",
)
CURVE = (
    *(
        "noise",
        "symmetry",
        "rollouts",
        "boards",
        "by_q",
        "q_low",
        "q_high",
        "by_check",
        "check_low",
        "check_high",
    ),
    *("halts", "seconds"),
)


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain solve", __doc__)
    arguments.add_run(parser, ema=True)
    parser.add_argument(
        "puzzles",
        metavar="PUZZLES",
        help="a CSV with a column question, or text with a board a line",
    )
    parser.add_argument(
        "--out",
        type=arguments.out_file,
        metavar="FILE",
        help="write a CSV instead of printing boards",
    )
    parser.add_argument(
        "--batch", type=arguments.positive, default=64, help="boards computed together; default: 64"
    )
    parser.add_argument(
        "--rollouts", type=arguments.positive, metavar="N", help="default: the run's model.rollouts"
    )
    parser.add_argument(
        "--noise", type=_size, nargs="+", metavar="S", help="default: the run's model.noise"
    )
    parser.add_argument(
        "--symmetry",
        action="store_true",
        help="each rollout sees a symmetric board; default: as the run",
    )
    parser.add_argument(
        "--steps",
        type=arguments.positive,
        metavar="K",
        help="supervision steps; default: the run's",
    )
    parser.add_argument(
        "--stop", choices=("none", "halt", "check"), default="none", help="default: none"
    )
    parser.add_argument(
        "--residual", type=_size, metavar="R", help="default: the run's model.residual"
    )
    parser.add_argument(
        "--choose", choices=("q", "check"), default="q", help="default: q, the halting head"
    )
    parser.add_argument(
        "--calibrate", metavar="FILE", help="boards with answers, to fit the confidence to"
    )
    parser.add_argument(
        "--curve",
        type=arguments.out_file,
        metavar="FILE",
        help="write the accuracy by rollouts and noise",
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of the noise; default: 0")
    args = parser.parse_args(argv)
    if args.noise and len(args.noise) > 1 and not args.curve:
        parser.error(
            f"--noise has {len(args.noise)} values, for --curve alone; give one, or --curve FILE"
        )
    if args.curve and args.stop == "check":
        parser.error(
            "--stop check ends rollouts by each other, and --curve counts the first 1, 2, 4 … of"
            " them; leave it"
        )
    if args.curve and args.calibrate:
        parser.error(
            "--calibrate fits the confidence of boards, and --curve writes none; leave one of them"
        )
    if args.curve and args.out:
        parser.error("--curve and --out are two commands; run one after the other")

    return _solve(args)


def _size(text: str) -> float:
    """Return the type of an argument that is a size: a number of at least 0 that float32 has."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a number from 0 to {MAX_SIZE:g}")
    return value


def _solve(args: argparse.Namespace) -> int:
    from jaxtrain.parallel import cluster
    from jaxtrain.workloads.trm import rollouts, solve
    from loaders.base import DataError

    cluster.start_jax()
    solver = solve.load(args.run, step=args.step, ema=args.ema)
    c = solver.c
    symmetry = args.symmetry or (c.symmetry and args.rollouts != 1)
    noises = args.noise or [0.0 if args.symmetry or args.rollouts == 1 else c.noise]
    search = rollouts.Search(
        args.rollouts or c.rollouts,
        args.steps or c.test_steps or c.halt_steps,
        args.stop,
        c.residual if args.residual is None else args.residual,
        symmetry,
    )
    solve.limit_cycles(c, search.steps, "--steps" if args.steps else args.run)
    if search.rollouts > 1 and not (symmetry or all(noises)):
        raise DataError(
            f"--rollouts is {search.rollouts}, and all would be the same; add --symmetry, or"
            " --noise, for example 0.3"
        )
    if search.rollouts == 1 and (symmetry or any(noises)):
        raise DataError(
            f"{f'--noise is {noises[0]:g}' if any(noises) else '--symmetry is set'} with one"
            " rollout, and the first has none; add --rollouts, for example 16"
        )
    if search.rollouts > 1 and args.choose == "q":
        solve.need_head(solver)
    puzzles = solve.read_puzzles(args.puzzles, solver.kind, solver.side)
    if args.curve:
        return _curve(args, solver, puzzles, search, noises)
    how = solve.How(noises[0], args.choose, args.seed, min(args.batch, len(puzzles)))
    scale = _calibrated(args, solver, puzzles, search, how)
    began = time.perf_counter()
    found = _boards(args, solver, puzzles, search, how, scale)
    seconds = (time.perf_counter() - began) / max(len(puzzles), 1)
    known = [
        (puzzle, row["board"]) for puzzle, row in zip(puzzles, found, strict=True) if puzzle.answer
    ]
    right = (
        f"; {sum(p.answer == board for p, board in known)} of {len(known)} are the table's answer"
        if known
        else ""
    )
    print(
        f"{len(found)} boards, {sum(int(row['valid']) for row in found)} of them valid"
        f" solutions{right}"
    )
    if search.rollouts > 1:
        halts = sum(float(row["halts"]) for row in found) / len(found)
        print(
            f"of {search.rollouts} rollouts each: the head's choice is valid for"
            f" {sum(int(row['q_valid']) for row in found)}, some rollout for"
            f" {sum(float(row['solves']) > 0 for row in found)}; {100 * halts:.1f} % of all but the"
            f" first halted; {seconds:.3g} s a board with compilation"
        )
        if not halts:
            at, remedy = (f"at noise {how.noise:g} ", "; lower it") if how.noise else ("", "")
            print(
                f"{at}no rollout halted: the head chose between boards that it is not sure"
                f" of{remedy}"
            )
    return 0


def _boards(
    args: argparse.Namespace,
    solver: "solve.Solver",
    puzzles: "list[solve.Puzzle]",
    search: "Search",
    how: "solve.How",
    scale: "Scale",
) -> list[dict[str, str]]:
    """Solve the boards, and write or print them. Return the rows of the table."""
    from jaxtrain.workloads.trm import solve
    from loaders.io import resumable

    def row(puzzle: "solve.Puzzle", each: "solve.Solved") -> dict[str, str]:
        sure, shares = f"{scale(each.q):.4f}", (f"{each.halts():.4f}", f"{each.solved.mean():.4f}")
        flags = int(each.valid), each.rollout, int(each.q_valid(len(each.solved)))
        values = (puzzle.question, each.board, sure, each.steps, each.halted, *flags, *shares)
        return dict(zip(COLUMNS, map(str, values), strict=True))

    if not args.out:
        found = []
        for puzzle, each in zip(puzzles, solve.solve(solver, puzzles, search, how), strict=True):
            found.append(row(puzzle, each))
            valid = "" if each.valid else "  not valid"
            print(f"{each.board}  confidence {scale(each.q):.3f}  steps {each.steps}{valid}")
        return found
    made_of = (solver.name, *(str(puzzle) for puzzle in puzzles), search, how, scale)
    with resumable.file(args.out, made_of) as file:
        if not file.n:
            file.write(_line(COLUMNS))
        lines = list(csv.reader(part.decode() for part in file.kept()))[1:]
        found = [dict(zip(COLUMNS, line, strict=True)) for line in lines]
        left = puzzles[len(found) :]
        for puzzle, each in zip(left, solve.solve(solver, left, search, how), strict=True):
            found.append(row(puzzle, each))
            file.write(_line(list(found[-1].values())))
    return found


def _calibrated(
    args: argparse.Namespace,
    solver: "solve.Solver",
    puzzles: "list[solve.Puzzle]",
    search: "Search",
    how: "solve.How",
) -> "Scale":
    import numpy as np

    from jaxtrain.workloads.trm import confidence, solve
    from loaders.base import DataError

    if not args.calibrate:
        return confidence.Scale()
    known = solve.read_puzzles(args.calibrate, solver.kind, solver.side)
    if shared := {puzzle.question for puzzle in known} & {puzzle.question for puzzle in puzzles}:
        raise DataError(
            f"--calibrate {args.calibrate} shares {len(shared)} boards with {args.puzzles}; take"
            f" others: {min(shared)}"
        )
    if any(not puzzle.answer for puzzle in known):
        raise DataError(
            f"--calibrate {args.calibrate} has boards without an answer; it needs a column answer"
        )
    found = list(
        solve.solve(solver, known, search, how._replace(batch=min(args.batch, len(known))))
    )
    q = np.array([each.q for each in found])
    right = np.array(
        [each.board == puzzle.answer for puzzle, each in zip(known, found, strict=True)]
    )
    scale = confidence.fit(q, right)
    print(f"calibrated on {len(q)} boards, {right.sum()} of them right")
    return scale


def _curve(
    args: argparse.Namespace,
    solver: "solve.Solver",
    puzzles: "list[solve.Puzzle]",
    search: "Search",
    noises: list[float],
) -> int:
    from jaxtrain.telemetry.report import class_scores
    from jaxtrain.workloads.trm import solve
    from loaders.io import atomic_write

    counts = sorted({1 << i for i in range(search.rollouts.bit_length())} | {search.rollouts})
    run = solve.program(solver, search)
    rows: list[tuple[object, ...]] = [CURVE]
    print("  ".join(f"{name:>10}" for name in CURVE))
    for noise in noises:
        how = solve.How(noise, args.choose, args.seed, min(args.batch, len(puzzles)))
        list(solve.solve(solver, puzzles[:1], search, how, run=run))  # compiled before it is timed
        began = time.perf_counter()
        found = list(solve.solve(solver, puzzles, search, how, run=run))
        seconds = (time.perf_counter() - began) / len(found) / search.rollouts
        halts = sum(each.halts() for each in found) / len(found)
        for n in counts if noise == noises[0] else counts[1:]:
            right = (
                sum(each.q_valid(n) for each in found),
                sum(bool(each.solved[:n].any()) for each in found),
            )
            shares = [
                f"{x:.4f}"
                for k in right
                for x in (k / len(found), *class_scores.interval(k, len(found)))
            ]
            own = n == 1  # without noise or symmetry
            values = (
                0.0 if own else noise,
                int(search.symmetry and not own),
                n,
                len(found),
                *shares,
                f"{halts:.4f}",
            )
            rows.append((*values, f"{n * seconds:.3g}"))
            print("  ".join(f"{value:>10}" for value in rows[-1]))
    atomic_write.write_csv(args.curve, rows)
    return 0


def _line(values: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
