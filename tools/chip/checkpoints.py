"""The cost of a run's state: a save while it trains, a restore, and the time to start.

The latter is from the command to the first step.

Three runs of the program itself, `python -m jaxtrain.main`: one from nothing, with an empty cache
of compiled programs, that saves a few times, one that resumes from it, and one that goes as far
without a break. The last two must end with the same
bits: XLA adds in a fixed order here, which it does not by itself on GPUs.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from jaxtrain.telemetry import goodput
from tools.chip import cases

FIRST = re.compile(r"([\d.]+) s from the command to the first step: (.*)")


def measure(data: cases.Data, cache: pathlib.Path, *, quick: bool) -> dict[str, Any]:
    """Raise RuntimeError with the end of a run's log."""
    steps = 6 if data.small else 40 if quick else 100
    case = next(
        case for case in cases.CASES if case.name == ("vit-s" if data.small or quick else "vit-b")
    )
    sizes = case.small if data.small else {"train.batch": "256"}
    workdir = data.folder / "state"
    options = {
        **case.common(data),
        **sizes,
        "workdir": str(workdir),
        "checkpoint.every": str(steps // 2),
        "metrics.every": "1",
        "optim.warmup": "0",
        "optim.decay": "0",
    }
    source = f"{cases.ROOT}/{case.source(data)}"
    fresh = _run(source, {**options, "train.steps": str(steps)}, workdir, cache)
    saves = [record for record in _records(workdir) if record["split"] == "save"]
    options["train.steps"] = str(steps + steps // 2)
    again = _run(source, options, workdir, cache)
    whole = data.folder / "whole"
    _run(source, {**options, "workdir": str(whole)}, whole, cache)
    losses, expected = (
        [one["loss"] for one in _records(folder) if one["split"] == "train"]
        for folder in (workdir, whole)
    )
    return {
        "case": case.name,
        "bytes": sum(
            f.stat().st_size
            for f in (workdir / "checkpoints" / str(steps)).rglob("*")
            if f.is_file()
        ),
        "save_stall_seconds": [record["seconds"] for record in saves],
        "save_stall_steps": [record["steps"] for record in saves],
        "restore_seconds": again[goodput.RESTORE],
        "same_bits": losses == expected and len(losses) == steps + steps // 2,
        "first_step_seconds": {"fresh": fresh, "resumed": again},
    }


def _records(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _run(
    source: str, options: cases.Overrides, workdir: pathlib.Path, cache: pathlib.Path
) -> dict[str, float]:
    """Phase -> seconds, and all of them as "together"."""
    command = [
        sys.executable,
        "-m",
        "jaxtrain.main",
        f"--config={source}",
        *(f"--config.{k}={v}" for k, v in options.items()),
    ]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    done = subprocess.run(command, cwd=cases.ROOT, env=env, capture_output=True, text=True)
    match = (
        FIRST.findall((workdir / "logs" / "process-0.log").read_text())
        if done.returncode == 0
        else []
    )
    if not match:
        raise RuntimeError(
            f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    together, phases = match[-1]
    each = dict(phase.rsplit(" ", 1) for phase in phases.split(", "))
    return {"together": float(together), **{name: float(seconds) for name, seconds in each.items()}}
