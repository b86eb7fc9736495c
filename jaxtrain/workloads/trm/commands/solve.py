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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxtrain.commands import arguments

if TYPE_CHECKING:
    from jaxtrain.workloads.trm import solve
    from jaxtrain.workloads.trm.confidence import Scale
    from jaxtrain.workloads.trm.rollouts import Search
    from loaders.io import resumable

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
    "halts",
    "seconds",
)


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    return _solve(args)


def _parser() -> arguments.Parser:
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
    return parser


def _check(parser: arguments.Parser, args: argparse.Namespace) -> None:
    """Exit for options that exclude each other."""
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
    from jaxtrain.workloads.trm import solve

    cluster.start_jax()
    solver = solve.load(args.run, step=args.step, ema=args.ema)
    search = _search(args, solver)
    noises = args.noise or [_noise_of_run(args, solver)]
    _check_rollouts(search, noises)
    if search.rollouts > 1 and args.choose == "q":
        solve.need_head(solver)
    puzzles = solve.read_puzzles(args.puzzles, solver.kind, solver.side)
    if args.curve:
        return _curve(args, solver, puzzles, search, noises)
    batch = min(args.batch, len(puzzles))
    how = solve.How(noises[0], args.choose, args.seed, batch)
    scale = _calibrated(args, solver, puzzles, search, how)
    began = time.perf_counter()
    rows = _boards(args, solver, puzzles, search, how, scale)
    seconds = time.perf_counter() - began
    _print_answers(puzzles, rows)
    if search.rollouts > 1:
        _print_rollouts(search, how, rows, seconds)
    return 0


def _search(args: argparse.Namespace, solver: "solve.Solver") -> "Search":
    """Return the search of the options, or else of the run."""
    from jaxtrain.workloads.trm import rollouts, solve

    c = solver.c
    steps = args.steps or c.test_steps or c.halt_steps
    residual = args.residual
    if residual is None:
        residual = c.residual
    symmetry = args.symmetry or (c.symmetry and args.rollouts != 1)
    search = rollouts.Search(args.rollouts or c.rollouts, steps, args.stop, residual, symmetry)
    solve.limit_cycles(c, search.steps, "--steps" if args.steps else args.run)
    return search


def _noise_of_run(args: argparse.Namespace, solver: "solve.Solver") -> float:
    """Return the noise of a search without --noise."""
    if args.symmetry or args.rollouts == 1:
        return 0.0
    return solver.c.noise


def _check_rollouts(search: "Search", noises: Sequence[float]) -> None:
    """Raise DataError for rollouts that would all be the same, and for noise without rollouts."""
    from loaders.base import DataError

    if search.rollouts > 1 and not (search.symmetry or all(noises)):
        raise DataError(
            f"--rollouts is {search.rollouts}, and all would be the same; add --symmetry, or"
            " --noise, for example 0.3"
        )
    if search.rollouts == 1 and (search.symmetry or any(noises)):
        option = "--symmetry is set"
        if any(noises):
            option = f"--noise is {noises[0]:g}"
        raise DataError(
            f"{option} with one rollout, and the first has none; add --rollouts, for example 16"
        )


def _print_answers(puzzles: "Sequence[solve.Puzzle]", rows: Sequence[Mapping[str, str]]) -> None:
    n_answered = n_right = n_valid = 0
    for puzzle, row in zip(puzzles, rows, strict=True):
        n_valid += int(row["valid"])
        if puzzle.answer:
            n_answered += 1
            is_right = puzzle.answer == row["board"]
            n_right += is_right
    text = f"{len(rows)} boards, {n_valid} of them valid solutions"
    if n_answered:
        text += f"; {n_right} of {n_answered} are the table's answer"
    print(text)


def _print_rollouts(
    search: "Search", how: "solve.How", rows: Sequence[Mapping[str, str]], seconds: float
) -> None:
    n_boards = len(rows)
    n_of_head = n_of_any = 0  # boards that are valid by the head's choice, or in some rollout
    halts = 0.0
    for row in rows:
        n_of_head += int(row["q_valid"])
        n_of_any += float(row["solves"]) > 0
        halts += float(row["halts"])
    percent = 100 * (halts / n_boards)
    seconds_a_board = seconds / n_boards
    print(
        f"of {search.rollouts} rollouts each: the head's choice is valid for {n_of_head}, some"
        f" rollout for {n_of_any}; {percent:.1f} % of all but the first halted;"
        f" {seconds_a_board:.3g} s a board with compilation"
    )
    if halts:
        return
    text = "no rollout halted: the head chose between boards that it is not sure of"
    if how.noise:
        text = f"at noise {how.noise:g} {text}; lower it"
    print(text)


def _boards(
    args: argparse.Namespace,
    solver: "solve.Solver",
    puzzles: "Sequence[solve.Puzzle]",
    search: "Search",
    how: "solve.How",
    scale: "Scale",
) -> list[dict[str, str]]:
    """Solve the boards, and write or print them. Return the rows of the table."""
    from jaxtrain.workloads.trm import solve
    from loaders.io import resumable

    rows = []
    if not args.out:
        answers = solve.solve(solver, puzzles, search, how)
        for puzzle, answer in zip(puzzles, answers, strict=True):
            rows.append(_row(puzzle, answer, scale))
            confidence = scale(answer.q)
            text = f"{answer.board}  confidence {confidence:.3f}  steps {answer.steps}"
            if not answer.valid:
                text += "  not valid"
            print(text)
        return rows
    made_of = (solver.name, *map(str, puzzles), search, how, scale)
    with resumable.file(args.out, made_of) as file:
        if not file.n:
            file.write(_line(COLUMNS))
        rows = _read_rows(file)
        unsolved = puzzles[len(rows) :]
        answers = solve.solve(solver, unsolved, search, how)
        for puzzle, answer in zip(unsolved, answers, strict=True):
            row = _row(puzzle, answer, scale)
            rows.append(row)
            file.write(_line(list(row.values())))
    return rows


def _row(puzzle: "solve.Puzzle", answer: "solve.Solved", scale: "Scale") -> dict[str, str]:
    """Return the row of a board, by COLUMNS."""
    n_rollouts = len(answer.solved)
    q_valid = answer.q_valid(n_rollouts)
    solves = answer.solved.mean()
    values = (
        puzzle.question,
        answer.board,
        f"{scale(answer.q):.4f}",
        answer.steps,
        answer.halted,
        int(answer.valid),
        answer.rollout,
        int(q_valid),
        f"{answer.halts():.4f}",
        f"{solves:.4f}",
    )
    return dict(zip(COLUMNS, map(str, values), strict=True))


def _read_rows(file: "resumable.Records") -> list[dict[str, str]]:
    """Return the rows of an earlier attempt."""
    lines = [record.decode() for record in file.kept()]
    rows = []
    for values in list(csv.reader(lines))[1:]:  # after the header
        row = dict(zip(COLUMNS, values, strict=True))
        rows.append(row)
    return rows


def _calibrated(
    args: argparse.Namespace,
    solver: "solve.Solver",
    puzzles: "Sequence[solve.Puzzle]",
    search: "Search",
    how: "solve.How",
) -> "Scale":
    import numpy as np

    from jaxtrain.workloads.trm import confidence, solve
    from loaders.base import DataError

    if not args.calibrate:
        return confidence.Scale()
    calibration = solve.read_puzzles(args.calibrate, solver.kind, solver.side)
    boards = {puzzle.question for puzzle in puzzles}
    if shared := boards & {puzzle.question for puzzle in calibration}:
        raise DataError(
            f"--calibrate {args.calibrate} shares {len(shared)} boards with {args.puzzles}; take"
            f" others: {min(shared)}"
        )
    if any(not puzzle.answer for puzzle in calibration):
        raise DataError(
            f"--calibrate {args.calibrate} has boards without an answer; it needs a column answer"
        )
    how = how._replace(batch=min(args.batch, len(calibration)))
    answers = solve.solve(solver, calibration, search, how)
    logits = []
    right = []
    for puzzle, answer in zip(calibration, answers, strict=True):
        logits.append(answer.q)
        is_right = answer.board == puzzle.answer
        right.append(is_right)
    scale = confidence.fit(np.array(logits), np.array(right))
    n_right = sum(right)
    print(f"calibrated on {len(right)} boards, {n_right} of them right")
    return scale


def _curve(
    args: argparse.Namespace,
    solver: "solve.Solver",
    puzzles: "Sequence[solve.Puzzle]",
    search: "Search",
    noises: Sequence[float],
) -> int:
    from jaxtrain.workloads.trm import solve
    from loaders.io import atomic_write

    powers = {1 << i for i in range(search.rollouts.bit_length())}
    counts = sorted(powers | {search.rollouts})
    run = solve.program(solver, search)
    rows: list[tuple[object, ...]] = [CURVE]
    _print_row(CURVE)
    batch = min(args.batch, len(puzzles))
    for noise in noises:
        how = solve.How(noise, args.choose, args.seed, batch)
        list(solve.solve(solver, puzzles[:1], search, how, run=run))  # compiled before it is timed
        began = time.perf_counter()
        answers = list(solve.solve(solver, puzzles, search, how, run=run))
        seconds = time.perf_counter() - began
        seconds_a_pass = seconds / len(answers) / search.rollouts
        is_first = noise == noises[0]
        # the first rollout has neither noise nor symmetry: it is the same for each noise
        for n in counts if is_first else counts[1:]:
            varies = n > 1
            row = (
                noise if varies else 0.0,
                int(search.symmetry and varies),
                n,
                len(answers),
                *_shares(answers, n),
                f"{n * seconds_a_pass:.3g}",
            )
            rows.append(row)
            _print_row(row)
    atomic_write.write_csv(args.curve, rows)
    return 0


def _shares(answers: "Sequence[solve.Solved]", n: int) -> list[str]:
    """Return accuracies by head and by rules with their intervals, and the share that halts."""
    from jaxtrain.telemetry.report import class_scores

    n_boards = len(answers)
    n_by_q = n_by_check = 0
    halts = 0.0
    for answer in answers:
        n_by_q += answer.q_valid(n)
        n_by_check += bool(answer.solved[:n].any())
        halts += answer.halts()
    shares = []
    for n_right in (n_by_q, n_by_check):
        low, high = class_scores.interval(n_right, n_boards)
        shares += [n_right / n_boards, low, high]
    shares.append(halts / n_boards)
    return [f"{share:.4f}" for share in shares]


def _print_row(values: Sequence[object]) -> None:
    print("  ".join(f"{value:>10}" for value in values))


def _line(values: Sequence[object]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(values)
    return text.getvalue().encode()
