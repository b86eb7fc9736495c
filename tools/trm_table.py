"""Compares contracts of training of the recursive model, rollouts and grades of boards.

Their CPU time is equal.

    python -m tools.trm_table [--minutes 4] [--seeds 0 1 2] [--contracts deep last]
        [--grades easy medium] [--blanks 16 24]
                              [--boards 256] [--rollouts 16] [--noise 0.1 0.3] [--out
                              runs/trm-table] [--config.section.field=value …]

Each contract is a config of configs/trm_sudoku.py. Two short runs say what its start and a step
cost in CPU seconds. The steps of its runs follow, so that each takes that many minutes of one core.
Then `jaxtrain solve --curve` solves new boards of each grade. OUT gets the runs, the boards, the
curves, and table.md: the mean over the seeds, the 95 % interval of all their boards together, and
the CPU seconds of training. Finished runs are not trained again.
"""

import argparse
import csv
import json
import pathlib
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.workloads.trm import confidence

SHORT, LONG = 5, 25  # [steps] of the runs that are timed


class Result(NamedTuple):
    """A row of a curve of `jaxtrain solve`."""

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
    steps: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.trm_table", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=4.0, help="of CPU time for each training; default: 4")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--contracts", nargs="+", default=["deep", "last"])
    parser.add_argument("--grades", nargs="+", default=["easy", "medium"])
    parser.add_argument("--blanks", type=int, nargs=2, default=(16, 24))
    parser.add_argument("--boards", type=int, default=256, help="of each grade; default: 256")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/trm-table"))
    args, overrides = parser.parse_known_args(argv)
    if unknown := [o for o in overrides if not o.startswith("--config.")]:
        parser.error(f"argument {unknown[0]!r} is unknown")
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for contract in args.contracts:
        steps = steps_of(contract, 60 * args.minutes, args.out, overrides)
        for seed in args.seeds:
            run = args.out / f"{contract}-{seed}"
            cpu = train(contract, run, steps, [*overrides, f"--config.seed={seed}"])
            for grade in args.grades:
                rows = curve(run, boards(args, grade), args)
                results += [Result(contract, seed, grade, *row, cpu=cpu, steps=steps) for row in rows]
    page = table(results)
    (args.out / "table.md").write_text(page)
    print(page)
    return 0


def train(contract: str, run: pathlib.Path, steps: int, overrides: Sequence[str]) -> float:
    """Train a run, unless it is finished. Return the CPU seconds that it took."""
    done = run / "cpu.json"
    if done.exists() and (kept := json.loads(done.read_text()))["steps"] == steps:
        return float(kept["seconds"])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    config = [f"--config=configs/trm_sudoku.py:{contract}", f"--config.workdir={run}", f"--config.train.steps={steps}"]
    subprocess.run([sys.executable, "-m", "jaxtrain.main", *config, *overrides], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    done.write_text(json.dumps({"steps": steps, "seconds": seconds}))
    return seconds


def steps_of(contract: str, seconds: float, out: pathlib.Path, overrides: Sequence[str]) -> int:
    """Return the steps that a contract takes in so many CPU seconds, with its start."""
    quiet = [*overrides, "--config.train.eval_every=0"]
    train(contract, out / f"{contract}-warm", SHORT, quiet)  # its programs are compiled and kept
    short, long = (train(contract, out / f"{contract}-{steps}-steps", steps, quiet) for steps in (SHORT, LONG))
    each = max(long - short, 1e-3) / (LONG - SHORT)
    return max(int((seconds - short) / each) + SHORT, LONG)


def boards(args: argparse.Namespace, grade: str) -> pathlib.Path:
    """Return the table of a grade's boards, which is made once, by a seed that no training has."""
    folder = args.out / f"{grade}-{args.blanks[0]}-{args.blanks[1]}-{args.boards}"
    if not (folder / "test.csv").exists():
        sizes = ["--train=1", f"--test={args.boards}", "--blanks", *map(str, args.blanks), "--seed=1000003"]
        run = [sys.executable, "-m", "jaxtrain", "sudoku", str(folder), f"--grade={grade}", *sizes]
        subprocess.run(run, check=True)
    return folder / "test.csv"


def curve(
    run: pathlib.Path, table_of: pathlib.Path, args: argparse.Namespace
) -> list[tuple[float, int, int, float, float, float]]:
    """Return noise, rollouts, boards, accuracies and seconds a board of a run's curve.

    A row has both accuracies.
    """
    out = run / f"curve-{table_of.parent.name}.csv"
    rollouts = [f"--rollouts={args.rollouts}", "--noise", *map(str, args.noise)] if args.rollouts > 1 else []
    solve = [sys.executable, "-m", "jaxtrain", "solve", str(run), str(table_of), "--ema", "--curve", str(out), *rollouts]
    subprocess.run(solve, check=True)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    floats = [[float(row[name]) for name in ("noise", "by_q", "by_check", "seconds")] for row in rows]
    counts = [(int(row["rollouts"]), int(row["boards"])) for row in rows]
    return [(noise, n, m, q, check, s) for (noise, q, check, s), (n, m) in zip(floats, counts, strict=True)]


def table(results: Sequence[Result]) -> str:
    """Return the table as Markdown, a row for each contract, grade, rollouts and noise."""
    lines = [
        "| contract | CPU s | steps | grade | rollouts | noise | solved, by the head | 95 % | by the rules | ms a board |",
        "|---|---:|---:|---|---:|---:|---:|---|---:|---:|",
    ]
    groups: dict[tuple[str, str, int, float], list[Result]] = {}
    for one in results:
        groups.setdefault((one.contract, one.grade, one.rollouts, one.noise), []).append(one)
    for (contract, grade, rollouts, noise), rows in groups.items():
        n = sum(row.boards for row in rows)
        low, high = confidence.interval(round(sum(row.by_q * row.boards for row in rows)), n)
        q, check, cpu, seconds = (
            statistics.mean(getattr(row, name) for row in rows) for name in ("by_q", "by_check", "cpu", "seconds")
        )
        lines.append(
            f"| {contract} | {cpu:.0f} | {rows[0].steps} | {grade} | {rollouts} | {noise:g} | {100 * q:.1f} % "
            f"| {100 * low:.1f} to {100 * high:.1f} % | {100 * check:.1f} % | {1000 * seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
