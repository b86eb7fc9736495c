"""Make any step of a run again, compare it with the run's records, and write a page about it.

    jaxtrain replay RUN --step N [--until M] [--without ID…] [--lr X] [--mesh D,F,M]
        [--out DIR] [--no-page]

    jaxtrain replay runs/xcm --step 1200
    jaxtrain replay runs/xcm --step 1200 --until 1210 --no-page
    jaxtrain replay runs/xcm --step 1200 --without 3141 --lr 1e-4

The newest intact checkpoint before step N is linked into a workdir of its own, and the same steps
are made from it. Each is compared with the run's record of it: by its digest, if the run has
config.metrics.digest, and else by loss and gradient norm. The run is only read, so it may still
train. Without a checkpoint before N the replay begins at step 0. On other devices, another mesh,
another version of jax or with other options of it the bits need not agree: the replay says so, and
how far apart the losses and the gradient norms are. On another number of CPU cores it is compiled
as the run was, and has as many threads if these are enough for its devices.

DIR/step-N.html has the examples of step N with the loss and the gradient norm of each, the metrics
of the steps around it, norms by parameter, and the largest activations. These are computed on one
device. --without and --lr add the step without these examples (by id, or by place as row:3, a
packed row with all its documents), and the step with this learning rate.

Ends with 0 if all recorded steps are the same, else with 1.
"""

import argparse
import dataclasses
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain.commands import arguments
from loaders.io.checks import UserError

if TYPE_CHECKING:
    from jaxtrain.telemetry.report.run import Run
    from jaxtrain.telemetry.report.step_differences import Steps

AXES = ("data", "fsdp", "model")
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
    cluster.start_jax()
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
    valid = [size for size in sizes if size == "-1" or (size.isdecimal() and int(size) > 0)]
    if len(sizes) != 3 or valid != sizes:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected three numbers of devices: --mesh=2,4,1, or --mesh=-1,1,1 for all"
        )
    data, fsdp, model = map(int, sizes)
    return data, fsdp, model


def _replay(args: argparse.Namespace) -> int:
    from jaxtrain.parallel import cluster
    from jaxtrain.telemetry.report import run as run_lib
    from jaxtrain.telemetry.report import step_differences

    run = run_lib.open_run(args.run)
    membership = cluster.find()
    until = args.until or args.step
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
    _make(args, config, until, _at_beginning(run))
    if membership.process:
        return 0  # process 0 compares
    replayed = run_lib.open_run(str(out))
    compared = step_differences.Compared(recorded, step_differences.read(replayed))
    lines = [
        *_different_conditions(run, replayed, args.step),
        *_other_splits(run, args.step, until),
        compared.summary(),
    ]
    if compared.differs is not None:
        lines += [compared.apart(), *_changed_data(config)]
    print("\n".join(lines))
    if not args.no_page:
        _write_page(args, config, run, lines)
    is_same = bool(compared.steps) and compared.differs is None
    return 0 if is_same else 1


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

    A checkpoint that is damaged, or that the run deletes meanwhile, is passed over. Raises
    RunError.
    """
    from jaxtrain.telemetry.report.run import RunError

    if out.exists():
        raise RunError(f"{out} exists; remove it, or choose another --out")
    if out.resolve().is_relative_to(run.path.resolve()):
        raise RunError(
            f"{out} is inside the run, which is only read; choose an --out outside of {run.path}"
        )
    saved = _checkpoints(run)
    for step in sorted(saved, reverse=True):
        if step < args.step and _link(saved[step], out) and _is_intact(saved[step], out):
            return
    if run.setting("resume.path"):
        raise RunError(
            f"{args.run} began with a checkpoint of {run.setting('resume.path')}"
            " (config.resume.path), which is no longer there, and no checkpoint before step"
            f" {args.step} is kept; choose a step after {min(saved, default=until)}"
        )
    out.mkdir(parents=True)
    text = (
        f"no checkpoint before step {args.step} is kept; the replay begins at step 0 and makes"
        f" {until} steps"
    )
    pace = run.latest.get("steps_per_second")
    if isinstance(pace, float) and pace > 0:
        text += f", about {until / pace:,.0f} s at the run's pace"
    if saved:
        text += f"; steps from {min(saved) + 1} on begin at a kept checkpoint"
    print(text)


def _at_beginning(run: "Run") -> dict[str, str]:
    """Return the digests of data and weights of a run's start, for a replay of its first steps."""
    from jaxtrain.telemetry import goodput

    digests = {}
    for start in run.starts:
        if start.first or not start.step:
            continue
        for name in (goodput.DATA, goodput.WARM):
            if name in start.facts:
                digests[name] = start.facts[name]
    return digests


def _make(args: argparse.Namespace, config: Any, until: int, digests: Mapping[str, str]) -> None:
    """Make the steps. If they are refused before the first of them, no workdir is left."""
    from jaxtrain.run import loop

    save = 0 if args.no_page else args.step - 1  # from which the page is made
    replay = loop.Replay(until, save, functools.partial(_check, args, config, digests))
    try:
        loop.run(config, {"source": f"a replay of {args.run}"}, replay=replay)
    except (UserError, ValueError):
        if not (pathlib.Path(config.workdir) / "metrics.jsonl").exists():
            shutil.rmtree(config.workdir, ignore_errors=True)
        raise


def _check(
    args: argparse.Namespace,
    config: Any,
    digests: Mapping[str, str],
    data: Any,
    offset: int,
    warm: str,
) -> None:
    """Refuse other data or weights than the run's, and examples that step N does not have."""
    import jax
    import numpy as np

    from jaxtrain import dissect
    from jaxtrain.telemetry import goodput
    from loaders.base import DataError

    # a checkpoint has the digest of its data, and the weights
    begins_at_0 = not list(pathlib.Path(config.workdir).glob("checkpoints/*"))
    no_checkpoint = f"and no checkpoint before step {args.step} is kept"
    expected = digests.get(goodput.DATA, "")
    if begins_at_0 and expected and data.digest() != expected:
        raise DataError(
            f"{args.run} began with other data or in another order (digest {expected} then,"
            f" {data.digest()} now), {no_checkpoint}; put its data back"
        )
    expected = digests.get(goodput.WARM, "")
    if begins_at_0 and expected and warm != expected:
        raise DataError(
            f"{args.run} began with other weights than those of config.warm_start.source ="
            f" {config.warm_start.source} (digest {expected} then, {warm} now), {no_checkpoint};"
            " put its weights back"
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
    options_of_run = xla_options.defaults("cpu", count=1, cores=cores)
    options_here = xla_options.defaults("cpu", count=1, cores=machine.cores())
    return {} if options_of_run == options_here else options_of_run


def _of_start(run: "Run", step: int, name: str) -> int:
    start = run.start_of(step)
    number: Any = start.facts.get(name) if start else 0
    is_plausible = type(number) is int and 0 < number < 100_000
    return number if is_plausible else 0


def _mesh_of(run: "Run", start: Any) -> dict[str, int]:
    """Return the sizes of the mesh of a start, as it recorded them, or else the run's."""
    recorded = start.facts.get("mesh") if start else None
    sizes = {name: run.setting(f"mesh.{name}", -1) for name in AXES}
    if isinstance(recorded, dict) and all(type(recorded.get(name)) is int for name in AXES):
        sizes = {name: recorded[name] for name in AXES}
    return sizes


def _other_splits(run: "Run", step: int, until: int) -> list[str]:
    """Return a line for each later start that made steps of a replay on another mesh."""
    first = run.start_of(step)
    lines = []
    for start in run.starts:
        made = max(start.first + 1, step), min(start.step, until)
        if not first or start is first or made[0] > made[1]:
            continue
        split, first_split = _split_of(run, start), _split_of(run, first)
        if split != first_split:
            lines.append(
                f"steps {made[0]} to {made[1]} were made by {split}, and step {step} by"
                f" {first_split}: so their bits need not agree"
            )
    return lines


def _split_of(run: "Run", start: Any) -> str:
    """Describe the processes and the mesh of a start."""
    mesh = " × ".join(str(size) for size in _mesh_of(run, start).values())
    processes = "1 process" if start.processes == 1 else f"{start.processes} processes"
    return f"{processes} on mesh {mesh}"


def _different_conditions(run: "Run", replayed: "Run", step: int) -> list[str]:
    """List the versions, devices, cores, options and sizes of the mesh that are not the run's."""
    from jaxtrain.arrays import saved_steps

    start = run.start_of(step)
    if not start or not replayed.starts:
        return []
    start_again = replayed.starts[-1]
    names = start.facts.keys() & start_again.facts.keys()
    conditions = _conditions(run, start, names)
    conditions_again = _conditions(replayed, start_again, names)
    changes = []
    for name, old, new in saved_steps.changes(conditions, conditions_again):
        changes.append(f"{name}: {old} → {new}")
    if not changes:
        return []
    return [f"{'; '.join(changes)}: so bits need not agree"]


def _changed_data(config: Any) -> list[str]:
    """Read the training data whole, and return a line if they are not as they were recorded."""
    from loaders import base

    rows = base.Rows(config.train.batch, ((0, 1),))
    make_loader = base.module(config.loader).make_loader
    try:
        loader = make_loader(config.data, split="train", rows=rows, seed=config.seed)
    except base.DataError as error:
        return [f"the data have changed: {error}"]
    try:
        line = loader.compare_content(math.inf)
    except base.DataError as error:
        return [f"the data have changed: {error}"]
    finally:
        loader.close()
    return [f"the data have not changed: {line}"] if line else []


def _conditions(run: "Run", start: Any, names: Collection[str]) -> dict[str, Any]:
    """Return what may decide the bits of a start, of its facts those in ``names``."""
    conditions = {}
    for name in ("versions", "devices", "cores", "threads", "environment"):
        if name in names:
            conditions[name] = start.facts[name]
    return {**conditions, "mesh": _mesh_of(run, start), "processes": start.processes}


def _write_page(args: argparse.Namespace, config: Any, run: "Run", lines: list[str]) -> None:
    import jax

    from jaxtrain import dissect
    from jaxtrain.telemetry.report import step_page

    if jax.process_count() > 1:
        print("no page: it needs a replay by one process")
        return
    out = pathlib.Path(config.workdir)
    dissected = out / f"before-{args.step}"  # a workdir that ends before the step
    dissected.mkdir()
    try:
        if args.step > 1:
            checkpoint = f"checkpoints/{args.step - 1}"
            shutil.copytree(out / checkpoint, dissected / checkpoint, copy_function=_link_file)
        config = dataclasses.replace(config, workdir=str(dissected))
        step = dissect.dissect(config, args.step, without=args.without, lr=args.lr)
    finally:
        shutil.rmtree(dissected)
    original = step.variants[0].numbers
    for variant in step.variants[1:]:
        numbers = []
        for name, number in variant.numbers.items():
            if name in SHOWN:
                numbers.append(f"{name} {number:.6g} (as it was: {original[name]:.6g})")
        print(f"{variant.name}: {', '.join(numbers)}")
    path = out / f"step-{args.step}.html"
    path.write_text(step_page.html(run, args.step, step, lines), encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, step {args.step}; open it in a browser")


def _checkpoints(run: "Run") -> dict[int, pathlib.Path]:
    """Return the run's checkpoints by their steps, with the one that it began with."""
    checkpoints: dict[int, pathlib.Path] = run.checkpoints()
    other_run = run.setting("resume.path", "")
    if other_run and run.starts:
        first_step = run.starts[0].first
        path = pathlib.Path(other_run, "checkpoints", str(first_step))
        if path.is_dir():
            checkpoints[first_step] = path
    return checkpoints


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


def _is_intact(saved: pathlib.Path, out: pathlib.Path) -> bool:
    """Whether a linked checkpoint is as it was written. If not, say so and remove the workdir."""
    from jaxtrain.arrays import checksums, source

    try:
        problems = source.find(out / "checkpoints" / saved.name, verified=False).damage()
    except checksums.NoManifest:
        return True  # a reader names the checkpoint that has no checksums
    if problems:
        shutil.rmtree(out)
        print(f"{saved} is damaged, and passed over: {'; '.join(problems)}")
    return not problems


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
        raise RunError(
            f"{run.path}/config.json is missing or cannot be read; put it back, since a replay"
            " needs the run's config"
        )
    if not run_workload.of_run(run.config, args.workload):
        raise RunError(f"{run.path}: {run_workload.unknown(run.config)}")
    if not args.workload:
        _refuse_modules(run)
    # the linked checkpoint, the run's data
    resume = {**run.config.get("resume", {}), "path": "", "data": "exact"}
    # of which `_different_conditions` tells
    resume["allow"] = [*resume.get("allow", ()), config_lib.ENVIRONMENT]
    config = config_lib.from_dict({**run.config, "resume": resume})
    # rewinds go back to regular saves
    every = config.checkpoint.every if config.guard.rewinds else config.train.steps
    keep_every = 0 if args.no_page else args.step - 1  # until the page is made
    # of the start that made the step, which may have had fewer processes than the newest
    sizes = _mesh_of(run, run.start_of(args.step))
    if args.mesh:
        sizes = dict(zip(AXES, args.mesh, strict=True))
    accumulate = _of_start(run, args.step, "accumulate") or config.train.accumulate
    return dataclasses.replace(
        config,
        workdir=str(out),
        compiler=_compiler(run, args.step) | config.compiler,
        train=dataclasses.replace(config.train, eval_every=0, patience=0, accumulate=accumulate),
        mesh=dataclasses.replace(
            config.mesh, data=sizes["data"], fsdp=sizes["fsdp"], model=sizes["model"]
        ),
        checkpoint=dataclasses.replace(
            config.checkpoint, folder="", every=every, keep_every=keep_every, best=""
        ),
        guard=dataclasses.replace(config.guard, verify_every=0),
        metrics=config_lib.Metrics(every=1, digest=True),
    )


def _refuse_modules(run: "Run") -> None:
    """Raise RunError if the config names a module that is not of this package."""
    from jaxtrain.telemetry.report.run import RunError

    for name in ("loader", "optim.name", "optim.schedule"):
        text = str(run.setting(name))
        if ":" in text or (name == "loader" and not text.startswith("loaders.")):
            raise RunError(
                f"{run.path}: config.{name} is {text!r}, which is imported only if you trust its"
                " code: name the run's workload with --workload"
            )
