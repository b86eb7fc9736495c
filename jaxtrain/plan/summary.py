"""The whole plan of a run, for a person."""

import itertools
import shutil
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import disk_usage
from jaxtrain.data import feed
from jaxtrain.parallel import chips
from jaxtrain.plan import calibration, environment, forecast, hlo, mesh_advice, traffic, worker
from jaxtrain.plan.auto import decide
from jaxtrain.plan.bound import Bound, bound
from jaxtrain.plan.choices import resolve
from jaxtrain.plan.compile import Compiled, ask_for_no_chips, compiler_options, is_at_hand
from jaxtrain.plan.memory import device_bytes, held, host_memory, in_bytes, least, offloaded
from jaxtrain.plan.remedies import ways
from jaxtrain.plan.target import GPUS_PER_NODE, Target, abstractly, parse_target
from jaxtrain.step import state as state_lib
from jaxtrain.types import Spec
from loaders import base
from loaders.io import files, machine

SECOND = "second state of verified steps"  # of config.guard.verify_every
READING = 0.7  # [s] for which the loader's rows are counted
MAX_ARRAYS = 5  # that are listed of those that loops keep
MAX_SCOPES = 10  # of the program that are listed with their time
CHIPS_OF_TPU_HOST = 4
SMALL_SHARE = 0.01  # of a step, below which a kind of kernel is not listed
Forecasts = dict[tuple[Hashable, bool], forecast.Forecast]  # by stage, and whether it has norms


def report(config: config_lib.Config, text: str) -> tuple[str, bool]:
    """Write the plan for the devices of ``text``, and tell whether it is without problems."""
    target = parse_target(text)
    if not target.here:
        ask_for_no_chips()
    config, choice = decide(config, target, text)
    config = resolve(config, target)
    assembly = abstractly(config, target)
    problems: list[str] = []
    forecasts: Forecasts = {}
    lines = [
        *_title_lines(assembly, target),
        *([choice] if choice else []),
        "",
        "held by each device between steps",
        *_held_lines(assembly, target),
        "",
        *_step_lines(assembly, target, text, problems, forecasts),
        "a step computes",
        *_time_lines(assembly, target, forecasts),
        "",
        "where the parameters live",
        *_rules(assembly),
        "",
    ]
    seconds = _seconds_of_run(assembly, forecasts) / config.train.steps
    for name, finding, is_good in checks(config, assembly, target, seconds):
        lines.append(f"{name:14}{finding}")
        if not is_good:
            problems.append(finding)
    lines.append("")
    doubts = _doubts(assembly)
    lines += [f"warning: {doubt}" for doubt in doubts]
    lines += [f"problem: {problem}" for problem in problems]
    if not problems:
        lines.append("this run has no other problem" if doubts else "this run has no problem")
    return "\n".join(lines), not problems


def _row(name: str, n_bytes: float, *, width: int = 40) -> str:
    return f"  {name}{in_bytes(n_bytes):>{width - len(name)}}"


def _title_lines(assembly: Assembly, target: Target) -> Iterator[str]:
    config = assembly.config
    mesh = " × ".join(f"{name} {size}" for name, size in assembly.layout.mesh.shape.items())
    n_parameters = specs.count(assembly.task.specs.params)
    rows = f"{config.train.batch} rows a step"
    yield f"{n_parameters:,} parameters on {target.name}, mesh {mesh}, {rows}"
    options = compiler_options(config, target)
    if options:
        values = {name: "''" if value == "" else value for name, value in options.items()}
        yield f"compiled with {', '.join(f'{name}={value}' for name, value in values.items())}"


def _held_lines(assembly: Assembly, target: Target) -> Iterator[str]:
    parts = held(assembly.abstract, assembly.layout, tiled=target.tiled)
    for name, size in parts.items():
        if size:
            yield _row(name, size)
    yield f"{_row('together', sum(parts.values()))}   of {in_bytes(target.memory)}"
    in_host_memory = offloaded(assembly.abstract)
    if in_host_memory:
        row = _row("in host memory: optimizer", in_host_memory)
        yield f"{row}   on the device during the update"
    # Clipping by the global norm, and the guard, need all gradients before the first update.
    yield _row("with gradients", least(assembly, tiled=target.tiled))


def _time_lines(assembly: Assembly, target: Target, forecasts: Forecasts) -> Iterator[str]:
    train, task, chip = assembly.config.train, assembly.task, target.chip
    yield f"  {task.flops:.3e} FLOP of the model"
    if chip:
        computing, moving = _ideal(assembly, chip, target.count)
        yield (
            f"  {1e3 * computing:.2f} ms at the peak of {target.count} × {chip.kind},"
            f" {chip.flops / 1e12:g} TFLOP/s each"
        )
        yield (
            f"  {1e3 * moving:.2f} ms to read the state and write it again once, at"
            f" {chip.bandwidth / 1e12:g} TB/s"
        )
    seconds = _seconds_of_run(assembly, forecasts)
    if not seconds:
        if chip is None:
            yield f"  no forecast: {calibration.refusal() or 'the program was not compiled'}"
        return
    calibrated = next(iter(forecasts.values())).calibration
    yield f"  {seconds / 3600:.2f} h for {train.steps:,} steps by the forecast ({calibrated})"
    per_step = seconds / train.steps
    yield f"  {train.batch / per_step:,.0f} rows/s from the loader"
    if task.tokens:
        yield f"  {task.tokens / per_step:,.0f} tokens/s, padding included"


def _seconds_of_run(assembly: Assembly, forecasts: Forecasts) -> float:
    """Return the forecast time of all steps, 0 if a program has no forecast."""
    train, every = assembly.config.train, assembly.config.metrics.every
    stages = assembly.stages()
    ends = [*list(stages.values())[1:], train.steps]
    seconds = 0.0
    for (stage, first), last in zip(stages.items(), ends, strict=True):
        if (stage, True) not in forecasts:
            return 0.0
        with_norms = forecasts[stage, True].seconds
        without = forecasts.get((stage, False), forecasts[stage, True]).seconds
        seconds += (last - first) * (with_norms + (every - 1) * without) / every
    return seconds


def _ideal(assembly: Assembly, chip: chips.Chip, count: int) -> tuple[float, float]:
    """Return the seconds of a step's FLOP at the peak, and of reading and writing the state."""
    state = assembly.abstract.state
    frozen = state_lib.bytes_per_device(state.variables.frozen)  # is not written
    moved = 2 * state_lib.bytes_per_device(state) - frozen
    return assembly.task.flops / (count * chip.flops), moved / chip.bandwidth


def _step_lines(
    assembly: Assembly, target: Target, text: str, problems: list[str], forecasts: Forecasts
) -> Iterator[str]:
    config = assembly.config
    stages = assembly.stages()
    bounds = {stage: bound(assembly, assembly.trace(stage), target) for stage in stages}
    stage = max(bounds, key=lambda stage: bounds[stage].peak)
    needs = bounds[stage]
    yield "a step needs at least" + ("" if stage is None else f" (stage {stage})")
    yield from _bound_lines(needs, target)
    excess = needs.certain - target.memory
    if excess > 0:
        certain = f"state and gradients alone are {in_bytes(excess)} more than a device has"
        problems.append(f"it does not fit: {certain}. {ways(config, target)}")
        return
    missing = "" if target.here else _missing(assembly, target)
    if missing:
        yield f"not compiled for it: {missing}"
        yield "this is a lower bound: what one layer needs comes on top"
        yield ""
        excess = needs.peak - target.memory
        if excess > 0:
            too_much = f"at least {in_bytes(excess)} too much"
            problems.append(f"it does not fit: {too_much}. {ways(config, target)}")
        return
    every = config.metrics.every
    programs = {True: f", with norms, every {every}th step"}  # by whether they have norms
    if assembly.has_norms(1):
        programs = {True: ""}
    else:
        programs[False] = ", without norms, the other steps"
    jobs = [
        worker.Job(config, text, stage, has_norms) for has_norms in programs for stage in bounds
    ]
    for job, answer in zip(jobs, _answers(jobs, target), strict=True):
        title = "compiled for it"
        if job.stage is not None:
            title += f", stage {job.stage} from step {stages[job.stage]}"
        title += programs[job.has_norms]
        yield from _answer_lines(assembly, target, title, answer, bounds[job.stage], problems)
        if answer.compiled:
            found = _forecast(answer.compiled, assembly, target)
            if found:
                forecasts[job.stage, job.has_norms] = found
                yield from forecast_lines(found)
            yield from _mesh_lines(assembly, target, job, answer.compiled, bounds[job.stage])
        yield ""


def _forecast(step: Compiled, assembly: Assembly, target: Target) -> forecast.Forecast | None:
    if not step.text:
        return None
    mesh = dict(assembly.layout.mesh.shape)
    return forecast.forecast(hlo.Program(step.text), mesh, target)


def forecast_lines(found: forecast.Forecast) -> Iterator[str]:
    """Yield the forecast time of a step, how far to trust it, and the kinds that take most."""
    yield f"  {1e3 * found.seconds:.2f} ms a step by the forecast ({found.calibration})"
    parts = [
        f"{kind} {seconds / found.seconds:.0%}"
        for kind, seconds in found.by_kind.items()
        if seconds >= SMALL_SHARE * found.seconds
    ]
    yield f"    by kind: {', '.join(parts)}"


def _answers(jobs: Sequence[worker.Job], target: Target) -> list[worker.Answer]:
    if is_at_hand(target):
        return [worker.answer(job) for job in jobs]
    return worker.ask(jobs)


def _mesh_lines(
    assembly: Assembly, target: Target, job: worker.Job, step: Compiled, needs: Bound
) -> Iterator[str]:
    """Yield the exposed time of exchanges between GPUs, and what would make it less."""
    if not target.chip:
        return
    rates = forecast.rates_of(target.chip)
    found = mesh_advice.measure(step, assembly, target, rates)
    if found is None:
        return
    yield from mesh_advice.exposure_lines(found)
    changed = mesh_advice.changed_options(job.config, found)
    if changed is not None:
        [answer] = _answers([job._replace(config=changed)], target)
        if answer.compiled:
            better = mesh_advice.measure(answer.compiled, assembly, target, rates)
            assert better is not None
            yield mesh_advice.options_line(found, better, answer.compiled, target)
    beyond = step.peak - needs.arguments - needs.temporaries
    yield from mesh_advice.mesh_lines(assembly, target, found, beyond)


def _bound_lines(needs: Bound, target: Target) -> Iterator[str]:
    yield _row("state and batch that it reads", needs.arguments, width=44)
    if needs.temporaries > needs.update:
        yield _row("arrays that its loops keep", needs.temporaries, width=44)
        for array in needs.kept[:MAX_ARRAYS]:
            yield f"      {in_bytes(array.bytes):>12}  {array.name}"
    else:
        yield _row("gradients", needs.temporaries, width=44)
    if needs.second:
        yield _row(SECOND, needs.second, width=44)
    yield f"{_row('together', needs.peak, width=44)}   of {in_bytes(target.memory)}"
    yield ""


def _missing(assembly: Assembly, target: Target) -> str:
    """Return the reason for which a step cannot be compiled for devices elsewhere, or ""."""
    if not (is_at_hand(target) or environment.find(target.kind)):
        return f"its compiler is not here; jaxtrain plan --setup {target.kind} fetches it"
    if target.kind == "gpu" and offloaded(assembly.abstract):
        return "without a card, XLA's compiler for GPUs takes offloaded arrays for the device's"
    return ""


def _answer_lines(
    assembly: Assembly,
    target: Target,
    title: str,
    answer: worker.Answer,
    needs: Bound,
    problems: list[str],
) -> Iterator[str]:
    config = assembly.config
    step = answer.compiled
    if step is None:
        if answer.too_large:
            problems.append(f"it does not fit: {answer.error}. {ways(config, target)}")
        else:
            problems.append(f"it does not compile: {answer.error}")
        yield f"not {title}: {answer.error}"
        return
    peak = step.peak + needs.second
    excess = peak - target.memory
    if excess > 0:
        remedy = ways(config, target, peak - needs.peak)
        problems.append(f"it does not fit: {in_bytes(excess)} too much. {remedy}")
    source = " by an earlier plan, whose figures were kept" if step.again else ""
    yield f"{title}, in {step.seconds:.0f} s{source}"
    yield _row("arguments", step.arguments)
    yield _row("while it runs", step.temporaries)
    if needs.second:
        yield _row(SECOND, needs.second)
    yield f"{_row('together', peak)}   of {in_bytes(target.memory)}"
    yield from roofline_lines(step, target)
    yield from _rows_lines(step, assembly, target)
    yield from _program_lines(step, target)


def roofline_lines(step: Compiled, target: Target) -> Iterator[str]:
    """Yield the time of the kernels by their bytes and products, and that of the largest scopes."""
    chip = target.chip
    if not (step.kernels and chip):
        return
    rates = forecast.rates_of(chip)
    source = "the datasheet's rates, which no program reaches"
    if chip.measured_flops:
        source = "the rates measured on such a card"
    padded = " with the padding of tiles" if chip.is_tpu else ""
    sums = traffic.roofline(step.kernels, rates)
    yield (
        f"  {1e3 * sums.seconds:.2f} ms at the roofline of {rates.bandwidth / 1e12:.2f} TB/s and"
        f" {rates.flops / 1e12:g} TFLOP/s ({source}), without exchanges between devices"
    )
    yield (
        f"  of this {sums.seconds_of_bytes / sums.seconds:.0%} is bound by bytes:"
        f" {in_bytes(sums.read)} read, {in_bytes(sums.written)} written{padded},"
        f" {sums.flops:.3e} FLOP in products, {sums.kernels:,} kernels"
    )
    if chip.clock and sums.cycles:
        yield (
            f"  {1e3 * sums.cycles / chip.clock:.2f} ms by the compiler's own estimate, cycles at"
            f" {chip.clock / 1e9:g} GHz, without kernels of Pallas, exchanges and copies that"
            " overlap others"
        )
    for scope, seconds in itertools.islice(sums.scopes.items(), MAX_SCOPES):
        yield f"    {1e3 * seconds:8.2f} ms  {scope}"


def _rows_lines(step: Compiled, assembly: Assembly, target: Target) -> Iterator[str]:
    """Yield a line if more rows would cost little, since the parameters' bytes take the time."""
    chip = target.chip
    if not (step.kernels and chip):
        return
    parts = held(assembly.abstract, assembly.layout, tiled=target.tiled)
    train = assembly.config.train
    matrices = train.accumulate * (parts["parameters"] + parts["frozen"])
    rows = traffic.rows_for_little_more(
        step.kernels, forecast.rates_of(chip), rows=train.batch, matrices=matrices
    )
    if rows >= 2 * train.batch:
        yield (
            f"  the parameters' bytes take most of this time: {rows} rows would take about"
            f" {traffic.LITTLE_MORE:.0%} longer than {train.batch}"
        )


def _program_lines(step: Compiled, target: Target) -> Iterator[str]:
    if step.library_calls:
        calls = [f"{count} × {name}" for name, count in _largest_first(step.library_calls)]
        yield f"  calls of libraries and kernels: {', '.join(calls)}"
    if step.products:
        products = [f"{flops:.2e} FLOP {types}" for types, flops in _largest_first(step.products)]
        yield f"  products of matrices, by operands: {', '.join(products)}"
    if step.unknown:
        yield (
            f"  {step.unknown} loops have an unknown number of rounds, and count once in all"
            " figures but the memory"
        )
    if step.collectives is None:
        yield "  the collectives are unknown: this jaxlib cannot read the program of a newer libtpu"
        return
    by_bytes = sorted(step.collectives.items(), key=lambda item: -item[1].sent)
    for (kind, axes), exchanged in by_bytes:
        yield _exchange_line(kind, axes, exchanged, target)


def _exchange_line(kind: str, axes: Sequence[str], exchanged: hlo.Exchanged, target: Target) -> str:
    sent = f"{in_bytes(exchanged.sent):>12} sent"
    if target.chip:
        sent += f", {1e3 * exchanged.sent / target.links:.2f} ms of the links"
    asynchronous = f"{exchanged.early} of them asynchronous"
    return f"  {exchanged.times:5} × {kind:20} over {'+'.join(axes):12} {sent}, {asynchronous}"


def _largest_first(amounts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(amounts.items(), key=lambda item: -item[1])


def _rules(assembly: Assembly) -> Iterator[str]:
    """Yield a line for each parameter: its shape, how it is split, and which axes do not divide."""
    variables = assembly.abstract.state.variables
    split_axes = _split_axes(assembly)
    rows = list[tuple[str, str, str]]()
    for part in ("params", "frozen", "model_state"):
        specs_of_part = getattr(assembly.task.specs, part)
        leaves = jax.tree.leaves(specs_of_part, is_leaf=specs.is_spec)
        arrays = jax.tree.leaves(getattr(variables, part))
        for path, spec, array in zip(specs.paths(specs_of_part), leaves, arrays, strict=True):
            name = path if part == "params" else f"{part}: {path}"
            dims = ",".join(map(str, spec.shape))
            shape = f"{np.dtype(array.dtype).name}[{dims}]"
            rows.append((name, shape, _describe_split(spec, array.sharding.spec, split_axes)))
    name_width = max((len(name) for name, _, _ in rows), default=0)
    shape_width = max((len(shape) for _, shape, _ in rows), default=0)
    for name, shape, split in rows:
        yield f"  {name:{name_width}}  {shape:{shape_width}}  {split}"


def _split_axes(assembly: Assembly) -> set[str]:
    """Return the logical axes whose rule names a mesh axis of more than one device."""
    layout = assembly.layout
    sizes = {"": 1, **layout.mesh.shape}
    split_axes = set()
    for axis, rule in layout.axis_rules.items():
        mesh_axes = rule.rstrip("?").split(",")
        if any(sizes[mesh_axis] > 1 for mesh_axis in mesh_axes):
            split_axes.add(axis)
    return split_axes


def _describe_split(
    spec: Spec, placement: Sequence[str | tuple[str, ...] | None], split_axes: set[str]
) -> str:
    placement = (*placement, *[None] * (len(spec.shape) - len(placement)))
    split = []
    indivisible = []
    for axis, size, mesh_axes in zip(spec.axes, spec.shape, placement, strict=True):
        if mesh_axes:
            names = mesh_axes if isinstance(mesh_axes, str) else "+".join(mesh_axes)
            split.append(f"{axis}→{names}")
        elif axis in split_axes:
            indivisible.append(f"{axis} ({size}) does not divide")
    description = ", ".join(split) or "whole"
    if indivisible:
        description += f"; {', '.join(indivisible)}"
    return description


def checkpoints(config: config_lib.Config, state: state_lib.TrainState) -> tuple[int, int]:
    """Return how many checkpoints a run holds at most, with the one in writing, and their bytes."""
    saved = state.replace(variables=state.variables._replace(frozen=()))
    n_bytes = sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(saved))
    rules = config.checkpoint
    count = rules.keep + 1  # one more while it is written
    if rules.keep_every:
        count += config.train.steps // rules.keep_every
    if rules.best:
        count += 1
    return count, n_bytes


def free_space(place: str, count: int, n_bytes: int) -> tuple[str, bool]:
    """Tell whether ``count`` checkpoints of ``n_bytes`` fit into a folder, with those there."""
    needs = count * n_bytes
    text = f"{count} checkpoints of {in_bytes(n_bytes)} need {in_bytes(needs)}"
    if "://" in place:
        return f"{text} in {place}, whose free space is not known", True
    folder = files.expanded(place).absolute()
    folder = next(p for p in (folder, *folder.parents) if p.exists())
    existing = disk_usage.held(place, count - 1, n_bytes)
    free = shutil.disk_usage(folder).free
    if existing:
        text += f", of which {in_bytes(existing)} are there"
    return f"{text}; {folder} has {in_bytes(free)} free", needs - existing <= free


def checks(
    config: config_lib.Config, assembly: Assembly, target: Target, seconds: float = 0.0
) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, finding, whether it is good) of the data, the disk and the host's memory.

    ``seconds``: of a step by the forecast, 0 = there is none.
    """
    yield from _check_data(assembly, target, seconds)
    count, n_bytes = checkpoints(config, assembly.abstract.state)
    folder = disk_usage.folder_of(config.workdir, config.checkpoint.folder)
    text, fits = free_space(folder, count, n_bytes)
    if target.here:
        yield "disk", text, fits
    else:  # a plan for devices elsewhere is for a disk elsewhere
        yield "disk", f"{text} here", True
    yield "host memory", *_check_host_memory(assembly, target, n_bytes)


def _check_host_memory(
    assembly: Assembly, target: Target, bytes_of_checkpoint: int
) -> tuple[str, bool]:
    abstract = assembly.abstract
    local_devices = _local_devices(target)
    # A save is written from a copy on the host.
    state = state_lib.bytes_per_device(abstract.state)
    copy = min(local_devices * state, bytes_of_checkpoint)
    # The rows are the feed's, and the loader's.
    batch = sum(device_bytes(x, tiled=False) for x in abstract.batch.values())
    rows = 4 * local_devices * batch
    optimizer = local_devices * offloaded(abstract)
    needs = copy + rows + optimizer
    use = "for a save and batches on their way"
    if target.here and jax.devices()[0].platform == "cpu":
        return f"{in_bytes(needs)} {use}, besides what the devices hold", True
    if optimizer:
        use = f"{in_bytes(optimizer)} of it for the optimizer's state, the rest {use}"
    text = f"{in_bytes(needs)}, {use}, on a host of {local_devices} devices"
    if not target.here:
        return text, True
    available = host_memory()
    return f"{text}; {in_bytes(available)} are available", needs <= available


def _local_devices(target: Target) -> int:
    if target.here:
        return jax.local_device_count()
    return min(target.count, CHIPS_OF_TPU_HOST if target.tiled else GPUS_PER_NODE)


def _check_data(
    assembly: Assembly, target: Target, seconds_of_step: float
) -> Iterator[tuple[str, str, bool]]:
    """Read one device's rows of a training and of a test batch, and measure the loader's rate."""
    findings = []
    rate = ""
    for split in ("train", "test"):
        began = time.perf_counter()
        loader = _make_loader(assembly, split)
        try:
            if not loader.n_batches:
                findings.append(f"{split} has no rows")
                continue
            loader.seek(0)
            next(loader)
            seconds = time.perf_counter() - began
            if split == "train":
                rate = _rate(loader, assembly, target, seconds_of_step)
        except ValueError as error:
            yield "data", f"{split}: {error}", False
            return
        finally:
            loader.close()
        batches = "1 batch,"
        if loader.n_batches > 1:
            batches = f"{loader.n_batches:,} batches, the first of them"
        findings.append(f"{split} has {batches} read in {seconds:.1f} s")
    yield "data", "; ".join(findings), True
    if rate:
        yield "loader", rate, True


def _doubts(assembly: Assembly) -> Sequence[str]:
    """Return what is odd about the training data, if they can be read."""
    try:
        loader = _make_loader(assembly, "train")
    except ValueError:
        return ()
    try:
        return loader.doubts()
    finally:
        loader.close()


def _make_loader(assembly: Assembly, split: str) -> base.Loader:
    config = assembly.config
    make_loader = base.module(config.loader).make_loader
    rows = feed.rows_of_one(assembly.abstract.batch)
    return make_loader(config.data, split=split, rows=rows, seed=config.seed)


def _rate(loader: base.Loader, assembly: Assembly, target: Target, seconds_of_step: float) -> str:
    """Compare the rows/s that the loader gives here with those that a step asks for."""
    measured = feed.measure(loader, READING)
    threads = loader.diagnostics().get("threads")
    text = f"{measured:,.0f} rows/s, measured here for {READING:g} s"
    if threads:
        text += f" on {_cores(min(threads, machine.cores()))}"
    if not measured:
        return text
    at_most = ""
    if not seconds_of_step and target.chip:
        seconds_of_step = max(_ideal(assembly, target.chip, target.count))
        at_most = "at most "
    if not seconds_of_step:
        return text
    demand = assembly.config.train.batch / seconds_of_step
    text += f"; a step asks for {at_most}{demand:,.0f}"
    if threads and (missing := machine.cores_missing(demand, measured, threads)):
        return f"{text}: {missing:,} more such core{'s' * (missing > 1)}, on all hosts together"
    if demand > measured:
        text += ": steps will wait for data, if a process gives no more there"
    return text


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
