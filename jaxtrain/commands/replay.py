"""Make any step of a run again, compare it with the run's records, and write a page about it.

    jaxtrain replay RUN --step N [--until M] [--without ID…] [--lr X] [--mesh D,F,M]
        [--out DIR] [--no-page]

    jaxtrain replay runs/xcm --step 1200
    jaxtrain replay runs/xcm --step 1200 --until 1210 --no-page
    jaxtrain replay runs/xcm --step 1200 --without 3141 --lr 1e-4

The newest checkpoint before step N is linked into a workdir of its own, and the same steps are made
from it. Each is compared with the run's record of it: by its digest, if the run has
config.metrics.digest, and else by loss and gradient norm. The run is only read, so it may still
train. Without a checkpoint before N the replay begins at step 0. On other devices, another mesh or
another version of jax the bits need not agree: the replay says so, and how far apart the losses and
the gradient norms are. On another number of CPU cores it is compiled as the run was, and has as
many threads if these are enough for its devices.

DIR/step-N.html has the examples of step N with the loss and the gradient norm of each, the metrics
of the steps around it, norms by parameter, and the largest activations. These are computed on one
device. --without and --lr add the step without these examples (by id, or by place as row:3, a
packed row with all its documents), and the step with this learning rate.

Ends with 0 if all recorded steps are the same, else with 1.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.commands import arguments
from loaders.io.checks import UserError

if TYPE_CHECKING:
    from jaxtrain.telemetry.report.run import Run
    from jaxtrain.telemetry.report.step_differences import Steps

SHOWN = ("loss", "loss_after", "grad_norm", "update_norm")  # of what-ifs, in the terminal


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain replay", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run's workdir")
    parser.add_argument(
        "--step",
        type=arguments.positive,
        required=True,
        metavar="N",
        help="the first step to make again",
    )
    parser.add_argument(
        "--until", type=arguments.positive, metavar="M", help="the last one; default: N"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="ID",
        help="also try step N without these examples",
    )
    parser.add_argument(
        "--lr", type=_rate, metavar="X", help="also try step N with this learning rate"
    )
    text = "devices along data, fsdp and model; default: the run's mesh"
    parser.add_argument("--mesh", type=_mesh, metavar="D,F,M", help=text)
    text = "the workdir of the replay; default: RUN-replay-N"
    parser.add_argument("--out", type=arguments.out_folder, metavar="DIR", help=text)
    parser.add_argument(
        "--no-page", action="store_true", help="compare the steps, and write no page about step N"
    )
    arguments.add_workload(parser)
    args = parser.parse_args(argv)
    if args.until and args.until < args.step:
        parser.error(f"argument --until: {args.until} is before --step={args.step}")
    if args.no_page and (args.without or args.lr):
        parser.error(
            "argument --no-page: --without and --lr are parts of the page; omit one of them"
        )

    from jaxtrain.parallel import cluster
    from jaxtrain.telemetry import console

    console.start_console()
    cluster.use_compilation_cache()
    return _replay(args)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.2e-38 < value < 3.4e38:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected a number above 0, from 1.2e-38 to 3.4e38 as float32 holds it"
        )
    return value


def _mesh(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(
        size == "-1" or size.isdecimal() and int(size) > 0 for size in sizes
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected three numbers of devices: --mesh=2,4,1, or --mesh=-1,1,1 for all"
        )
    data, fsdp, model = map(int, sizes)
    return data, fsdp, model


def _replay(args: argparse.Namespace) -> int:
    from jaxtrain.parallel import cluster
    from jaxtrain.telemetry.report import run as run_lib
    from jaxtrain.telemetry.report import step_differences

    run, membership, until = run_lib.open_run(args.run), cluster.find(), args.until or args.step
    out = pathlib.Path(args.out or f"{run.path}-replay-{args.step}")
    cluster.use_threads_for_host_devices(_of_start(run, args.step, "threads"))
    problem = ""
    if membership.process == 0:
        try:
            recorded = step_differences.read(run)
            _refuse(args, run, recorded, until)
            _config(run, out, args)  # refused before a workdir is made
            _begin(args, run, out, until)
        except (UserError, OSError) as error:
            if membership.processes == 1:
                raise
            problem = str(error)
    config = _config(run, out, args)
    if membership.processes > 1:  # the others wait for process 0, and write nothing before
        cluster.await_peers(membership, config, refusal=problem)
    # The data at the run's beginning, for a replay without a checkpoint, which has its own digest.
    data = next(
        (s.facts["data"] for s in reversed(run.starts) if not s.first and "data" in s.facts), ""
    )
    _make(args, config, until, data)
    if membership.process:
        return 0  # process 0 compares
    made = run_lib.open_run(str(out))
    compared = step_differences.Compared(recorded, step_differences.read(made))
    lines = [*_otherwise(run, made, args.step), compared.summary()]
    lines += [compared.apart()] if compared.differs is not None else []
    print("\n".join(lines))
    if not args.no_page:
        _write_page(args, config, run, lines)
    return 0 if compared.steps and compared.differs is None else 1


def _refuse(args: argparse.Namespace, run: "Run", recorded: "Steps", until: int) -> None:
    from jaxtrain.telemetry.report.run import RunError

    first, last = min(recorded.values["loss"]), max(recorded.values["loss"])
    if until < first:
        raise RunError(
            f"{args.run} has recorded its steps from {first} on; choose --step or --until from"
            " there"
        )
    if until > last:
        raise RunError(
            f"{args.run} has recorded its steps up to {last}, and step {until} is asked for; choose"
            " one of them"
        )
    if not any(args.step <= step <= until for step in recorded.values["loss"]):
        every = f"{args.run} has a record every {run.setting('metrics.every', 1)} steps"
        raise RunError(f"{every}, and none from step {args.step} to {until}; add --until STEP")


def _begin(args: argparse.Namespace, run: "Run", out: pathlib.Path, until: int) -> None:
    """Make the workdir of the replay, with the newest checkpoint before its step.

    A checkpoint that the run deletes meanwhile is passed over. Raises RunError.
    """
    from jaxtrain.telemetry.report.run import RunError

    if out.exists():
        raise RunError(f"{out} exists; remove it, or choose another --out")
    if out.resolve().is_relative_to(run.path.resolve()):
        raise RunError(
            f"{out} is inside the run, which is only read; choose an --out outside of {run.path}"
        )
    saved = _kept(run)
    for begin in sorted((step for step in saved if step < args.step), reverse=True):
        if _link(saved[begin], out):
            return
    if run.setting("resume.path"):
        raise RunError(
            f"{args.run} began with a checkpoint of {run.setting('resume.path')}"
            " (config.resume.path), which is no longer there, and no checkpoint before step"
            f" {args.step} is kept; choose a step after {min(saved, default=until)}"
        )
    out.mkdir(parents=True)
    pace = run.latest.get("steps_per_second")
    cost = (
        f", about {until / pace:,.0f} s at the run's pace"
        if isinstance(pace, float) and pace > 0
        else ""
    )
    nearest = f"; steps from {min(saved) + 1} on begin at a kept checkpoint" if saved else ""
    start = (
        f"no checkpoint before step {args.step} is kept; the replay begins at step 0 and makes"
        f" {until} steps"
    )
    print(f"{start}{cost}{nearest}")


def _make(args: argparse.Namespace, config: Any, until: int, data: str) -> None:
    """Make the steps. If they are refused before the first of them, no workdir is left."""
    from jaxtrain.run import loop

    save = 0 if args.no_page else args.step - 1  # from which the page is made
    replay = loop.Replay(until, save, functools.partial(_check, args, config.workdir, data))
    try:
        loop.run(config, {"source": f"a replay of {args.run}"}, replay=replay)
    except (UserError, ValueError):
        if not (pathlib.Path(config.workdir) / "metrics.jsonl").exists():
            shutil.rmtree(config.workdir, ignore_errors=True)
        raise


def _check(args: argparse.Namespace, out: str, expected: str, data: Any, offset: int) -> None:
    """Refuse other data than the run's, and examples that step N does not have."""
    import jax
    import numpy as np

    from jaxtrain import dissect
    from loaders.base import DataError

    if expected and not list(pathlib.Path(out).glob("checkpoints/*")) and data.digest() != expected:
        raise DataError(
            f"{args.run} began with other data or in another order (digest {expected} then,"
            f" {data.digest()} now), and no checkpoint before step {args.step} is kept; put its"
            " data back"
        )
    if args.without and jax.process_count() == 1:
        rows = data.read(args.step - 1 - offset)
        index = {"index": np.concatenate(rows["index"])} if "index" in rows else {}
        dissect.kept(dissect.names(index, data.rows.batch), args.without)


def _compiler(run: "Run", step: int) -> dict[str, Any]:
    """Return the compiler's options of the run that its number of CPU cores made others."""
    from jaxtrain.compile import xla_options
    from loaders.io import machine

    cores = _of_start(run, step, "cores")
    if not cores:
        return {}
    theirs, own = (xla_options.defaults("cpu", count=1, cores=n) for n in (cores, machine.cores()))
    return {} if theirs == own else theirs


def _start(run: "Run", step: int) -> Any:
    starts = [start for start in run.starts if start.first < step] or run.starts[:1]
    return starts[-1] if starts else None


def _of_start(run: "Run", step: int, name: str) -> int:
    start = _start(run, step)
    found = start.facts.get(name) if start else 0
    return found if type(found) is int and 0 < found < 100_000 else 0


def _otherwise(run: "Run", made: "Run", step: int) -> list[str]:
    """List the versions, devices, cores and sizes of the mesh that differ from the run's."""
    from jaxtrain.arrays import saved_steps

    start = _start(run, step)
    if not start or not made.starts:
        return []
    again = made.starts[-1]
    names = [
        n
        for n in ("versions", "devices", "cores", "threads")
        if n in start.facts and n in again.facts
    ]
    one, two = (
        {
            **{name: s.facts[name] for name in names},
            "mesh": r.config.get("mesh"),
            "processes": s.processes,
        }
        for r, s in ((run, start), (made, again))
    )
    changes = [f"{name}: {old} → {new}" for name, old, new in saved_steps.changes(one, two)]
    return [f"{'; '.join(changes)}: so bits need not agree"] if changes else []


def _write_page(args: argparse.Namespace, config: Any, run: "Run", lines: list[str]) -> None:
    import jax

    from jaxtrain import dissect
    from jaxtrain.telemetry.report import step_page

    if jax.process_count() > 1:
        print("no page: it needs a replay by one process")
        return
    out, before = pathlib.Path(config.workdir), pathlib.Path(config.workdir, f"before-{args.step}")
    before.mkdir()
    try:
        if args.step > 1:
            shutil.copytree(
                out / "checkpoints" / str(args.step - 1),
                before / "checkpoints" / str(args.step - 1),
                copy_function=_link_file,
            )
        own = dataclasses.replace(config, workdir=str(before))
        found = dissect.dissect(own, args.step, without=args.without, lr=args.lr)
    finally:
        shutil.rmtree(before)
    for variant in found.variants[1:]:
        was = found.variants[0].numbers
        shown = (
            f"{name} {x:.6g} (as it was: {was[name]:.6g})"
            for name, x in variant.numbers.items()
            if name in SHOWN
        )
        print(f"{variant.name}: {', '.join(shown)}")
    path = out / f"step-{args.step}.html"
    path.write_text(step_page.html(run, args.step, found, lines), encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, step {args.step}; open it in a browser")


def _kept(run: "Run") -> dict[int, pathlib.Path]:
    found: dict[int, pathlib.Path] = run.checkpoints()
    if (other := run.setting("resume.path", "")) and run.starts:
        path = pathlib.Path(other, "checkpoints", str(run.starts[0].first))
        found |= {int(path.name): path} if path.is_dir() else {}
    return found


def _link(saved: pathlib.Path, out: pathlib.Path) -> bool:
    """Make a workdir with links to a checkpoint's files. False if one was deleted meanwhile."""
    from jaxtrain.telemetry.report.run import RunError

    try:
        shutil.copytree(saved, out / "checkpoints" / saved.name, copy_function=_link_file)
        saved.stat()
        return True
    except shutil.Error as error:
        shutil.rmtree(out, ignore_errors=True)
        for source, target, why in error.args[0]:
            if os.path.lexists(source):
                raise RunError(f"{source} cannot be copied to {target}: {why}") from error
    except OSError:
        shutil.rmtree(out, ignore_errors=True)
        if saved.exists():
            raise
    return False


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def _config(run: "Run", out: pathlib.Path, args: argparse.Namespace) -> Any:
    """Return the run's config with its own workdir, all steps recorded, and a page's checkpoint."""
    from jaxtrain import config as config_lib
    from jaxtrain.arrays import run_workload
    from jaxtrain.telemetry.report.run import RunError

    if not run.config:
        why = "is missing or cannot be read; put it back, since a replay needs the run's config"
        raise RunError(f"{run.path}/config.json {why}")
    if not run_workload.of_run(run.config, args.workload):
        raise RunError(f"{run.path}: {run_workload.unknown(run.config)}")
    # modules that are imported
    named = {name: str(run.setting(name)) for name in ("loader", "optim.name", "optim.schedule")}
    own = [
        f"config.{name} is {text!r}"
        for name, text in named.items()
        if ":" in text or (name == "loader" and not text.startswith("loaders."))
    ]
    if own and not args.workload:
        why = (
            "which is imported only if you trust its code: name the run's workload with --workload"
        )
        raise RunError(f"{run.path}: {own[0]}, {why}")
    # the linked checkpoint, the run's data
    own_start = {**run.config.get("resume", {}), "path": "", "data": "exact"}
    found = config_lib.from_dict({**run.config, "resume": own_start})
    # rewinds go back to regular saves
    every = found.checkpoint.every if found.guard.rewinds else found.train.steps
    stays = 0 if args.no_page else args.step - 1  # on disk, until the page is made
    data, fsdp, model = args.mesh or (found.mesh.data, found.mesh.fsdp, found.mesh.model)
    return dataclasses.replace(
        found,
        workdir=str(out),
        compiler=_compiler(run, args.step) | found.compiler,
        train=dataclasses.replace(found.train, eval_every=0, patience=0),
        mesh=dataclasses.replace(found.mesh, data=data, fsdp=fsdp, model=model),
        checkpoint=dataclasses.replace(
            found.checkpoint, folder="", every=every, keep_every=stays, best=""
        ),
        guard=dataclasses.replace(found.guard, verify_every=0),
        metrics=config_lib.Metrics(every=1, digest=True),
    )
