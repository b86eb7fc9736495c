"""Compares contracts of training of the recursive model, rollouts, and grades of boards.

    python -m tools.trm_table [--seeds 0 1 2] [--contracts deep last]
                              [--grades easy:16:24 easy:28:36] [--boards 256] [--rollouts 16]
                              [--noise 0.1 0.3] [--out runs/trm-table]
                              [--config.section.field=value …]

Each contract is a config of configs/trm_sudoku.py, whose steps take about equal CPU time. A grade
is that of `jaxtrain sudoku`, with the fewest and the most blanks. Every core that this process may
use trains one run at a time, with one thread. Then `jaxtrain solve --curve` solves new boards of
each grade by rollouts under symmetries, and with --noise by rollouts with noise. OUT gets the runs,
the boards, the curves, and table.md: the mean over the seeds, the 95 % interval of all their boards
together, the range of the seeds, and the CPU seconds. Finished runs and curves are not computed
again.
"""

import argparse
import concurrent.futures
import csv
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtrain.telemetry.report import class_scores


class Result(NamedTuple):
    contract: str
    seed: int
    grade: str
    noise: float
    rollouts: int
    boards: int
    by_q: float
    by_check: float
    seconds: float  # a board
    cpu: float  # [seconds] of training


CURVE = {
    "noise": float,
    "rollouts": int,
    "boards": int,
    "by_q": float,
    "by_check": float,
    "seconds": float,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.trm_table", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contracts", nargs="+", default=["deep", "last"])
    parser.add_argument(
        "--grades",
        type=grade,
        nargs="+",
        default=["easy:16:24", "easy:28:36"],
        metavar="GRADE:FEWEST:MOST",
    )
    parser.add_argument("--boards", type=int, default=256, help="of each grade; default: 256")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument(
        "--noise", type=float, nargs="*", default=[], help="also rollouts with noise; default: none"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/trm-table"))
    args, overrides = parser.parse_known_args(argv)
    if unknown := [o for o in overrides if not o.startswith("--config.")]:
        parser.error(f"argument {unknown[0]!r} is unknown")
    args.out.mkdir(parents=True, exist_ok=True)
    for each in args.grades:
        boards(args, each)
    jobs = [
        functools.partial(job, args, contract, seed, overrides)
        for seed in args.seeds
        for contract in args.contracts
    ]
    page = table(
        sorted(
            side_by_side(jobs),
            key=lambda r: (args.contracts.index(r.contract), args.grades.index(r.grade)),
        )
    )
    (args.out / "table.md").write_text(page)
    print(page)
    return 0


def grade(text: str) -> str:
    """Return the type of a grade of the command line: name, fewest and most blanks."""
    name, *blanks = text.split(":")
    if len(blanks) != 2 or not all(b.isdigit() for b in blanks):
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected a grade and its fewest and most blanks, for example easy:16:24"
        )
    return text


def side_by_side(jobs: Sequence[Callable[[], list[Result]]]) -> list[Result]:
    """Run jobs, on each core one at a time. Return all results, in the order of the jobs."""
    cores = sorted(os.sched_getaffinity(0))[: len(jobs)]

    def lane(i: int) -> list[list[Result]]:
        os.sched_setaffinity(0, {cores[i]})  # of this thread, and of its processes
        return [job() for job in jobs[i :: len(cores)]]

    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        lanes = list(pool.map(lane, range(len(cores))))
    return [result for i in range(len(jobs)) for result in lanes[i % len(cores)][i // len(cores)]]


def job(
    args: argparse.Namespace, contract: str, seed: int, overrides: Sequence[str]
) -> list[Result]:
    """Train a run, and solve the boards of each grade with it."""
    run = args.out / f"{contract}-{seed}"
    cpu = train(contract, run, [*overrides, f"--config.seed={seed}"])
    searches = [("symmetry", ["--symmetry"])] + (
        [("noise", ["--noise", *map(str, args.noise)])] if args.noise else []
    )
    found = []
    for each in args.grades:
        for name, options in searches[: len(searches) if args.rollouts > 1 else 1]:
            rows = curve(run, args, each, name, options if args.rollouts > 1 else [])
            found += [
                Result(contract, seed, each, **row, cpu=cpu)
                for row in rows[0 if name == "symmetry" else 1 :]
            ]
    return found


def train(contract: str, run: pathlib.Path, overrides: Sequence[str]) -> float:
    """Train a run, unless it is finished. Return the CPU seconds that it took."""
    done = run / "cpu.json"
    if done.exists() and (kept := json.loads(done.read_text()))["overrides"] == list(overrides):
        return float(kept["seconds"])
    config = [f"--config=configs/trm_sudoku.py:{contract}", f"--config.workdir={run}"]
    seconds = start([sys.executable, "-m", "jaxtrain.main", *config, *overrides])
    done.write_text(json.dumps({"overrides": list(overrides), "seconds": seconds}))
    return seconds


def start(command: Sequence[str]) -> float:
    """Run a command. Return the CPU seconds of it and of the processes that it waited for."""
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def boards(args: argparse.Namespace, grade: str) -> pathlib.Path:
    """Return the table of a grade's boards, which is made once, by a seed that no training has."""
    name, fewest, most = grade.split(":")
    folder: pathlib.Path = args.out / f"{name}-{fewest}-{most}-{args.boards}"
    if not (folder / "test.csv").exists():
        sizes = ["--train=1", f"--test={args.boards}", "--blanks", fewest, most, "--seed=1000003"]
        start([sys.executable, "-m", "jaxtrain", "sudoku", str(folder), f"--grade={name}", *sizes])
    return folder / "test.csv"


def curve(
    run: pathlib.Path, args: argparse.Namespace, grade: str, search: str, options: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of a run's curve, as of `CURVE`."""
    table_of = boards(args, grade)
    out = run / f"{search}-{args.rollouts}-{table_of.parent.name}.csv"
    if not out.exists():
        several = [f"--rollouts={args.rollouts}", *options] if options else []
        solve = [
            sys.executable,
            "-m",
            "jaxtrain",
            "solve",
            str(run),
            str(table_of),
            "--ema",
            "--batch=32",
        ]
        start([*solve, "--curve", str(out), *several])
    with out.open(newline="") as file:
        return [
            {name: kind(row[name]) for name, kind in CURVE.items()} for row in csv.DictReader(file)
        ]


def table(results: Sequence[Result]) -> str:
    lines = [
        (
            "| contract | CPU s | grade | rollouts | by | solved, by the head | by the rules | 95 %"
            " | seeds | ms a board |"
        ),
        "|---|---:|---|---:|---|---:|---:|---|---|---:|",
    ]
    groups: dict[tuple[str, str, float, int], list[Result]] = {}
    for one in results:
        groups.setdefault((one.contract, one.grade, one.noise, one.rollouts), []).append(one)
    for (contract, grade, noise, rollouts), rows in groups.items():
        n = sum(row.boards for row in rows)
        low, high = class_scores.interval(round(sum(row.by_check * row.boards for row in rows)), n)
        q, check, cpu, seconds = (
            statistics.mean(getattr(row, name) for row in rows)
            for name in ("by_q", "by_check", "cpu", "seconds")
        )
        seeds = sorted(100 * row.by_check for row in rows)
        by = f"noise {noise:g}" if noise else "symmetry" if rollouts > 1 else ""
        lines.append(
            f"| {contract} | {cpu:.0f} | {grade} | {rollouts} | {by} | {100 * q:.1f} % |"
            f" {100 * check:.1f} % | {100 * low:.1f} to {100 * high:.1f} % | {seeds[0]:.1f} to"
            f" {seeds[-1]:.1f} % | {1000 * seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
