"""Lists all runs under a folder: state, steps, time left, scores, restarts, goodput, disk.

    jaxtrain runs [DIR] [--metric NAME]

    jaxtrain runs runs

State is one of training, starting, ended, saved (by a signal or Ctrl-C, to be resumed), failed,
killed, stopped, queued (its SLURM job waits) or new. Step is the last that was read, and saved the
newest checkpoint's, from which the same command resumes. A score is the newest and the best of
config.checkpoint.best, else of the accuracy or the loss of the evaluations; --metric names another,
with "-" before one of which less is better. Goodput is the share of the wall time that went into
steps which were made for the first time.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.commands import arguments
from jaxtrain.telemetry import console

if TYPE_CHECKING:
    from jaxtrain.telemetry.report.run import Run

PATIENCE = 10  # [s] for an answer of SLURM
HEAD = tuple("run,state,step,saved,left,score,last,best,at step,restarts,goodput,disk".split(","))
LEFT = ("run", "state", "score")  # columns that begin at the left


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain runs", __doc__)
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        default="runs",
        help="a folder with runs in it; default: runs",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="of the evaluations, for example accuracy or -loss",
    )
    parser.add_argument("--json", action="store_true", help="for programs: a line for each run")
    args = parser.parse_args(argv)
    return _show(args.folder, args.metric, args.json)


def _show(folder: str, metric: str, as_json: bool) -> int:
    from jaxtrain.telemetry.report import run as run_lib

    top = pathlib.Path(folder)
    runs, launched = run_lib.find(top)
    folder_above = top.resolve().parent
    if (folder_above / run_lib.LAUNCHED).is_dir():
        launched.append(folder_above)  # a sweep, of which this is one run
    rows = {os.path.realpath(run.path): _row(run, metric) for run in runs}
    for workdir in sorted(_waiting(launched)):
        if workdir not in rows:  # it has not begun, and may have no folder yet
            path = pathlib.Path(workdir)
            run = run_lib.Run(path, workdir)
            if path.is_relative_to(top.resolve()):
                run = run_lib.named(path, top.resolve())
            rows[workdir] = _row(run, metric)
        if rows[workdir]["state"] not in ("training", "starting", "ended"):
            rows[workdir]["state"] = "queued"
    return _print(folder, [rows[path] for path in sorted(rows, key=pathlib.Path)], as_json)


def _print(folder: str, rows: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return 0
    if not rows:
        print(f"no run in {folder}, nor below it")
        return 0
    right = [i for i, name in enumerate(HEAD) if name not in LEFT]
    print(*console.columns([HEAD, *map(_cells, rows)], right=right), sep="\n")
    return 0


def _row(run: "Run", metric: str) -> dict[str, Any]:
    from jaxtrain.telemetry import goodput

    score = run.score(metric)
    share = goodput.goodput(run.seconds)
    return {
        "run": run.name,
        "workdir": str(run.path),
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "saved_step": run.saved_step,
        "eta_seconds": None if math.isnan(run.eta) else run.eta,
        "metric": score and score.name,
        "last": score and score.last,
        "best": score and score.best,
        "best_step": score and score.step,
        "restarts": goodput.restarts(run.starts),
        "goodput": None if math.isnan(share) else round(share, 4),
        "disk": run.disk,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def cell(name: str, write: Callable[[Any], str]) -> str:
        return "-" if row[name] is None else write(row[name])

    return (
        " ".join(row["run"].split("\n")),
        row["state"],
        f"{row['step']}/{row['steps'] or '?'}",
        cell("saved_step", str),
        cell("eta_seconds", console.duration),
        row["metric"] or "-",
        cell("last", "{:.4g}".format),
        cell("best", "{:.4g}".format),
        cell("best_step", str),
        str(row["restarts"]),
        cell("goodput", "{:.0%}".format),
        console.in_bytes(row["disk"], ".1f"),
    )


def _waiting(launched: list[pathlib.Path]) -> set[str]:
    """Return the workdirs of launches whose newest SLURM job waits in its queue."""
    if not launched or not shutil.which("squeue"):
        return set()
    from jaxtrain.commands import launch

    jobs: dict[str, str] = {}  # workdir -> its newest job
    for folder in launched:
        # `jaxtrain launch --status` reports the error
        with contextlib.suppress(launch.LaunchError):
            for job in launch._jobs(str(folder)):
                jobs[os.path.realpath(job["workdir"])] = job["job"]
    if not jobs:
        return set()
    command = ["squeue", "--noheader", "--array", "--states=PENDING", "--format=%i"]
    try:
        queue = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return set()  # it does not answer: the states of the runs' own files are shown
    pending = queue.stdout.split()
    return {workdir for workdir, job in jobs.items() if job in pending}
