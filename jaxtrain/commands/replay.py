"""Make any step of a run again, and compare it with the run's records.

    jaxtrain replay RUN --step N [--until M] [--out DIR]

    jaxtrain replay runs/xcm --step 1200 --until 1210

The newest checkpoint before step N is linked into a workdir of its own, and the same steps are made from it. Each is compared
with the run's record of it: by its digest, if the run has config.metrics.digest, and else by loss and gradient norm. The run is
only read, so it may still train. Without a checkpoint before N the replay begins at step 0. On other devices, another mesh or
another version of jax the bits need not agree, and the line says how far apart the losses are.

Ends with 0 if all recorded steps are the same, else with 1.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from jaxtrain.commands import arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain replay", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run's workdir")
    parser.add_argument("--step", type=arguments.positive, required=True, metavar="N", help="the first step to make again")
    parser.add_argument("--until", type=arguments.positive, metavar="M", help="the last one; default: N")
    parser.add_argument("--out", metavar="DIR", help="the workdir of the replay; default: RUN-replay-N")
    arguments.add_workload(parser)
    args = parser.parse_args(argv)
    if args.until and args.until < args.step:
        parser.error(f"argument --until: {args.until} is before --step={args.step}")

    from jaxtrain import config, loop
    from jaxtrain.arrays.stored import StoredError
    from jaxtrain.parallel import cluster
    from jaxtrain.telemetry import console
    from jaxtrain.telemetry.report.run import RunError
    from loaders.io.files import FileError

    console.start_console()
    cluster.use_compilation_cache()
    cluster.use_threads_for_host_devices()
    mistakes = (*loop.USER_ERRORS, config.ConfigError, RunError, FileError, StoredError)
    return arguments.run(functools.partial(_replay, args), mistakes=mistakes)


def _replay(args: argparse.Namespace) -> int:
    from jaxtrain import loop
    from jaxtrain.telemetry.report import run as run_lib
    from jaxtrain.telemetry.report import steps

    run = run_lib.open_run(args.run)
    recorded, until = steps.read(run), args.until or args.step
    last = max(recorded.values["loss"])
    if until > last:
        raise run_lib.RunError(
            f"{args.run} has recorded its steps up to {last}, and step {until} is asked for; choose one of them"
        )
    out = pathlib.Path(args.out or f"{run.path}-replay-{args.step}")
    if out.exists():
        raise run_lib.RunError(f"{out} exists; remove it, or choose another --out")
    every = run.setting("metrics.every", 1)
    if not any(args.step <= step <= until for step in recorded.values["loss"]):
        raise run_lib.RunError(
            f"{args.run} has a record every {every} steps, and none from step {args.step} to {until}; add --until STEP"
        )
    config = _config(run, out, args.workload)
    begin = _link_newest(run.path, run.setting("checkpoint.folder", ""), args.step, out)
    if not begin:
        print(f"no checkpoint before step {args.step} is kept; the replay begins at step 0 and makes {until} steps")
    loop.run(config, {"source": f"a replay of {args.run}"}, until=until)
    compared = steps.Compared(recorded, steps.read(run_lib.open_run(str(out))))
    print(compared.summary())
    if compared.differs is None:
        return 0 if compared.steps else 1
    print(compared.apart())
    return 1


def _link_newest(workdir: pathlib.Path, folder: Any, step: int, out: pathlib.Path) -> int:
    """Link the newest checkpoint before ``step`` into the workdir of the replay. Return its step, or 0 without one."""
    saved = pathlib.Path(folder) if folder else workdir / "checkpoints"
    kept = [int(path.name) for path in saved.glob("*") if path.name.isdecimal()] if saved.is_dir() else []
    begin = max((n for n in kept if n < step), default=0)
    out.mkdir(parents=True)
    if begin:
        shutil.copytree(saved / str(begin), out / "checkpoints" / str(begin), copy_function=_link)
    return begin


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def _ships(loader: str) -> bool:
    return loader.startswith("loaders.")


def _config(run: Any, out: pathlib.Path, workload: str) -> Any:
    """Return the run's config with a workdir of its own, a record of each step, and nothing else that it would write."""
    from jaxtrain import config as config_lib
    from jaxtrain.arrays import run_workload
    from jaxtrain.telemetry.report.run import RunError

    if not run_workload.of_run(run.config, workload):
        raise RunError(f"{run.path}: {run_workload.unknown(run.config)}")
    named = {name: str(run.setting(name)) for name in ("loader", "optim.name", "optim.schedule")}  # modules that are imported
    own = [
        f"config.{name} is {text!r}" for name, text in named.items() if ":" in text or (name == "loader" and not _ships(text))
    ]
    if own and not workload:
        raise RunError(
            f"{run.path}: {own[0]}, which is imported only if you trust its code: name the run's workload with --workload"
        )
    found = config_lib.from_dict(run.config)
    steps = found.train.steps
    return dataclasses.replace(
        found,
        workdir=str(out),
        train=dataclasses.replace(found.train, eval_every=0, patience=0),
        checkpoint=dataclasses.replace(found.checkpoint, folder="", every=steps, best=""),
        metrics=config_lib.Metrics(every=1, digest=True),
    )
