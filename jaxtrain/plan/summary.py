"""The whole plan of a run, for a person."""

import shutil
import time
from collections.abc import Iterator

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import disk_usage
from jaxtrain.data import feed
from jaxtrain.parallel import chips
from jaxtrain.plan import environment, worker
from jaxtrain.plan.bound import Bound, bound
from jaxtrain.plan.compile import ask_for_no_chips, compiler_options, is_at_hand
from jaxtrain.plan.memory import device_bytes, held, host_memory, in_bytes, least, offloaded
from jaxtrain.plan.remedies import ways
from jaxtrain.plan.target import GPUS_PER_NODE, Target, abstractly, parse_target
from jaxtrain.step import state as state_lib
from loaders import base
from loaders.io import files, machine

SECOND = "second state of verified steps"  # of config.guard.verify_every
MFU = 0.4  # share of the peak that hours are projected with
READING = 0.7  # [s] for which the loader's rows are counted


def report(config: config_lib.Config, text: str) -> tuple[str, bool]:
    target = parse_target(text)
    if not target.here:
        ask_for_no_chips()
    assembly = abstractly(config, target)
    problems: list[str] = []
    mesh = " × ".join(f"{name} {size}" for name, size in assembly.layout.mesh.shape.items())
    count = specs.count(assembly.task.specs.params)
    lines = [
        f"{count:,} parameters on {target.name}, mesh {mesh}, {config.train.batch} rows a step"
    ]
    if options := compiler_options(config, target):
        shown = [
            f"{name}={value!r}" if value == "" else f"{name}={value}"
            for name, value in options.items()
        ]
        lines += [f"compiled with {', '.join(shown)}"]
    lines += ["", "held by each device between steps"]
    parts = held(assembly.abstract, assembly.layout, tiled=target.tiled)
    lines += [f"  {name:28}{in_bytes(size):>12}" for name, size in parts.items() if size]
    lines += [
        f"  {'together':28}{in_bytes(sum(parts.values())):>12}   of {in_bytes(target.memory)}"
    ]
    if away := offloaded(assembly.abstract):
        lines += [
            f"  {'in host memory: optimizer':28}{in_bytes(away):>12}   on the device during the"
            " update"
        ]
    # Clipping by the global norm, and the guard, need all gradients before the first update.
    lines += [f"  {'with gradients':28}{in_bytes(least(parts)):>12}", ""]
    lines += _step_lines(assembly, target, text, problems)

    flops, chip = assembly.task.flops, target.chip
    lines += ["a step computes", f"  {flops:.3e} FLOP of the model"]
    if chip:
        computing, moving = _ideal(assembly, chip, target.count)
        ideal = max(computing, moving)
        hours = config.train.steps * ideal / MFU / 3600
        lines += [
            (
                f"  {1e3 * computing:.2f} ms at the peak of {target.count} × {chip.kind},"
                f" {chip.flops / 1e12:g} TFLOP/s each"
            ),
            (
                f"  {1e3 * moving:.2f} ms to read the state and write it again once, at"
                f" {chip.bandwidth / 1e12:g} TB/s"
            ),
            f"  {hours:.2f} h for {config.train.steps:,} steps at {MFU:.0%} of what takes longer",
            f"  {config.train.batch / ideal * MFU:,.0f} rows/s from the loader at {MFU:.0%} of it",
        ]
        if tokens := assembly.task.tokens:
            lines += [
                f"  {tokens / ideal * MFU:,.0f} tokens/s at {MFU:.0%} of it, padding included"
            ]
    else:
        lines += [
            "  no ideal time: the chip table has no such device; name one, for example"
            " --plan=gpu:h100x1"
        ]
    lines += [""]

    lines += ["where the parameters live", *_rules(assembly), ""]
    for name, text, well in checks(config, assembly, target):
        lines += [f"{name:14}{text}"]
        problems += [] if well else [text]
    lines += ["", *([f"problem: {text}" for text in problems] or ["this run has no problem"])]
    return "\n".join(lines), not problems


def _ideal(assembly: Assembly, chip: chips.Chip, count: int) -> tuple[float, float]:
    """Return the seconds of a step's FLOP at the peak, and of reading and writing the state."""
    state = assembly.abstract.state
    moved = 2 * state_lib.bytes_per_device(state) - state_lib.bytes_per_device(
        state.variables.frozen
    )
    return assembly.task.flops / (count * chip.flops), moved / chip.bandwidth


def _step_lines(
    assembly: Assembly, target: Target, text: str, problems: list[str]
) -> Iterator[str]:
    config = assembly.config
    each = {stage: bound(assembly, assembly.trace(stage), target) for stage in assembly.stages()}
    stage, needed = max(each.items(), key=lambda item: item[1].peak)
    yield "a step needs at least" + ("" if stage is None else f" (stage {stage})")
    yield f"  {'state and batch that it reads':32}{in_bytes(needed.arguments):>12}"
    is_loops = needed.temporaries > needed.update
    beside = "arrays that its loops keep" if is_loops else "gradients"
    yield f"  {beside:32}{in_bytes(needed.temporaries):>12}"
    for size, what in needed.kept[:5] if is_loops else ():
        yield f"      {in_bytes(size):>12}  {what}"
    if needed.second:
        yield f"  {SECOND:32}{in_bytes(needed.second):>12}"
    yield f"  {'together':32}{in_bytes(needed.peak):>12}   of {in_bytes(target.memory)}"
    yield ""
    over = needed.certain - target.memory
    if over > 0:
        problems.append(
            f"it does not fit: state and gradients alone are {in_bytes(over)} more than a device"
            f" has. {ways(config, target)}"
        )
    elif missing := "" if target.here else _missing(assembly, target):
        yield from (
            f"not compiled for it: {missing}",
            "this is a lower bound: what one layer needs comes on top",
            "",
        )
        if (over := needed.peak - target.memory) > 0:
            problems.append(
                f"it does not fit: at least {in_bytes(over)} too much. {ways(config, target)}"
            )
    else:
        jobs = [worker.Job(config, text, stage) for stage in each]
        answers = [worker.answer(job) for job in jobs] if is_at_hand(target) else worker.ask(jobs)
        for (stage, first), answer in zip(assembly.stages().items(), answers, strict=True):
            title = "compiled for it" + (
                "" if stage is None else f", stage {stage} from step {first}"
            )
            yield from _compiled_lines(config, target, title, answer, each[stage], problems)


def _missing(assembly: Assembly, target: Target) -> str:
    """Return the reason for which a step cannot be compiled for devices elsewhere, or ""."""
    if not (is_at_hand(target) or environment.find(target.kind)):
        return f"its compiler is not here; jaxtrain plan --setup {target.kind} fetches it"
    if target.kind == "gpu" and offloaded(assembly.abstract):
        return "without a card, XLA's compiler for GPUs takes offloaded arrays for the device's"
    return ""


def _compiled_lines(
    config: config_lib.Config,
    target: Target,
    title: str,
    answer: worker.Answer,
    needed: Bound,
    problems: list[str],
) -> Iterator[str]:
    if (step := answer.compiled) is None:
        remedy = f". {ways(config, target)}" if answer.too_large else ""
        problems.append(
            f"it does not {'fit' if answer.too_large else 'compile'}: {answer.error}{remedy}"
        )
        yield from (f"not {title}: {answer.error}", "")
        return
    peak = step.peak + needed.second
    if (over := peak - target.memory) > 0:
        problems.append(
            f"it does not fit: {in_bytes(over)} too much."
            f" {ways(config, target, peak - needed.peak)}"
        )
    before = " by an earlier plan, whose figures were kept" if step.again else ""
    yield f"{title}, in {step.seconds:.0f} s{before}"
    yield f"  {'arguments':28}{in_bytes(step.arguments):>12}"
    yield f"  {'while it runs':28}{in_bytes(step.temporaries):>12}"
    if needed.second:
        yield f"  {SECOND:28}{in_bytes(needed.second):>10}"
    yield f"  {'together':28}{in_bytes(peak):>12}   of {in_bytes(target.memory)}"
    if step.library_calls:
        calls = sorted(step.library_calls.items(), key=lambda item: -item[1])
        yield f"  calls of libraries and kernels: {', '.join(f'{n} × {name}' for name, n in calls)}"
    if step.products:
        most = sorted(step.products.items(), key=lambda item: -item[1])
        yield (
            "  products of matrices, by operands:"
            f" {', '.join(f'{flops:.2e} FLOP {types}' for types, flops in most)}"
        )
    if step.collectives is None:
        yield "  the collectives are unknown: this jaxlib cannot read the program of a newer libtpu"
    for (kind, axes), (times, sent, early) in sorted(
        (step.collectives or {}).items(), key=lambda item: -item[1].sent
    ):
        took = f", {1e3 * sent / target.chip.links:.2f} ms of the links" if target.chip else ""
        yield (
            f"  {times:5} × {kind:20} over {'+'.join(axes):12} {in_bytes(sent):>12} sent{took},"
            f" {early} of them asynchronous"
        )
    yield ""


def _rules(assembly: Assembly) -> Iterator[str]:
    """Yield a line for each parameter: its shape, how it is split, and which axes do not divide."""
    variables, table, layout = (
        assembly.abstract.state.variables,
        assembly.task.specs,
        assembly.layout,
    )
    rows, sizes = [], {"": 1, **layout.mesh.shape}
    splits = {
        axis
        for axis, rule in layout.axis_rules.items()
        if any(sizes[n] > 1 for n in rule.rstrip("?").split(","))
    }
    for part in ("params", "frozen", "model_state"):
        leaves = jax.tree.leaves(getattr(table, part), is_leaf=specs.is_spec)
        arrays = jax.tree.leaves(getattr(variables, part))
        for path, spec, x in zip(specs.paths(getattr(table, part)), leaves, arrays, strict=True):
            placed = tuple(x.sharding.spec) + (None,) * (len(spec.shape) - len(x.sharding.spec))
            axes = list(zip(spec.axes, spec.shape, placed, strict=True))
            split = [
                f"{axis}→{at if isinstance(at, str) else '+'.join(at)}"
                for axis, _, at in axes
                if at
            ]
            wished = [
                f"{axis} ({n}) does not divide" for axis, n, at in axes if axis in splits and not at
            ]
            shape = f"{np.dtype(x.dtype).name}[{','.join(map(str, spec.shape))}]"
            name = path if part == "params" else f"{part}: {path}"
            rows.append(
                (
                    name,
                    shape,
                    "; ".join(filter(None, (", ".join(split) or "whole", ", ".join(wished)))),
                )
            )
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, shape, how in rows:
        yield f"  {name:{widths[0]}}  {shape:{widths[1]}}  {how}"


def checkpoints(config: config_lib.Config, state: state_lib.TrainState) -> tuple[int, int]:
    """Return how many checkpoints a run holds at most, with the one in writing, and their bytes."""
    saved = state.replace(variables=state.variables._replace(frozen=()))
    n_bytes = sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(saved))
    keep = config.checkpoint.keep + 1  # one more while it is written
    keep += (
        config.train.steps // config.checkpoint.keep_every if config.checkpoint.keep_every else 0
    )
    return keep + bool(config.checkpoint.best), n_bytes


def free_space(place: str, keep: int, saved: int) -> tuple[str, bool]:
    """Tell whether ``keep`` checkpoints of ``saved`` bytes fit into a folder, with those there."""
    text = f"{keep} checkpoints of {in_bytes(saved)} need {in_bytes(keep * saved)}"
    if "://" in place:
        return f"{text} in {place}, whose free space is not known", True
    folder = files.expanded(place).absolute()
    folder = next(p for p in (folder, *folder.parents) if p.exists())
    there, free = disk_usage.held(place, keep - 1, saved), shutil.disk_usage(folder).free
    text += f", of which {in_bytes(there)} are there" if there else ""
    return f"{text}; {folder} has {in_bytes(free)} free", keep * saved - there <= free


def checks(
    config: config_lib.Config, assembly: Assembly, target: Target
) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, finding, whether it is good) of the data, the disk and the host's memory."""
    yield from _check_data(config, assembly, target)
    state = assembly.abstract.state
    keep, saved = checkpoints(config, state)
    text, fits = free_space(
        disk_usage.folder_of(config.workdir, config.checkpoint.folder), keep, saved
    )
    # A plan for devices elsewhere is for a disk elsewhere.
    yield "disk", text if target.here else f"{text} here", not target.here or fits

    local = (
        jax.local_device_count()
        if target.here
        else min(target.count, 4 if target.tiled else GPUS_PER_NODE)
    )
    # a save is written from a copy on the host
    copy = min(local * state_lib.bytes_per_device(state), saved)
    # The rows are the feed's, and the loader's.
    rows = 4 * local * sum(device_bytes(x, tiled=False) for x in assembly.abstract.batch.values())
    away = local * offloaded(assembly.abstract)
    need = copy + rows + away
    if target.here and jax.devices()[0].platform == "cpu":
        yield (
            "host memory",
            f"{in_bytes(need)} for a save and batches on their way, besides what the devices hold",
            True,
        )
        return
    own = f"{in_bytes(away)} of it for the optimizer's state, the rest " if away else ""
    text = (
        f"{in_bytes(need)}, {own}for a save and batches on their way, on a host of {local} devices"
    )
    if target.here:
        yield (
            "host memory",
            f"{text}; {in_bytes(host_memory())} are available",
            need <= host_memory(),
        )
    else:
        yield "host memory", text, True


def _check_data(
    config: config_lib.Config, assembly: Assembly, target: Target
) -> Iterator[tuple[str, str, bool]]:
    """Read one device's rows of a training and of a test batch, and measure the loader's rate."""
    source, findings, rate = base.module(config.loader), [], ""
    for split in ("train", "test"):
        began = time.perf_counter()
        loader = source.make_loader(
            config.data,
            split=split,
            rows=feed.rows_of_one(assembly.abstract.batch),
            seed=config.seed,
        )
        try:
            if not loader.n_batches:
                findings.append(f"{split} has no rows")
                continue
            loader.seek(0)
            next(loader)
            took = time.perf_counter() - began
            if split == "train":
                rate = _rate(loader, assembly, target)
        except ValueError as error:
            yield "data", f"{split}: {error}", False
            return
        finally:
            loader.close()
        count = (
            f"{loader.n_batches:,} batches, the first of them"
            if loader.n_batches > 1
            else "1 batch,"
        )
        findings.append(f"{split} has {count} read in {took:.1f} s")
    yield "data", "; ".join(findings), True
    if rate:
        yield "loader", rate, True


def _rate(loader: base.Loader, assembly: Assembly, target: Target) -> str:
    """Compare the rows/s that the loader gives here with those that a step asks for."""
    given, threads = feed.measure(loader, READING), loader.diagnostics().get("threads")
    text = f"{given:,.0f} rows/s, measured here for {READING:g} s"
    if threads:
        cores = min(threads, machine.cores())
        text += f" on {cores} core{'s' * (cores > 1)}"
    if not (target.chip and given):
        return text
    asked = assembly.config.train.batch / max(_ideal(assembly, target.chip, target.count)) * MFU
    text += f"; a step asks for {asked:,.0f}"
    if threads and (missing := machine.cores_missing(asked, given, threads)):
        text += f": {missing:,} more such core{'s' * (missing > 1)}, on all hosts together"
    elif asked > given:
        text += ": steps will wait for data, if a process gives no more there"
    return text
