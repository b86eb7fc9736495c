"""The whole plan of a run, for a person."""

import collections
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.assembly import Assembly
from jaxtrain.plan import (
    calibration,
    environment,
    exposure,
    forecast,
    hlo,
    hosts,
    mesh_advice,
    traffic,
    worker,
)
from jaxtrain.plan.auto import best_fit, of_earlier_start
from jaxtrain.plan.bound import Bound, bound
from jaxtrain.plan.choices import resolve
from jaxtrain.plan.compile import (
    NO_OFFLOAD,
    Compiled,
    ask_for_no_chips,
    compiler_options,
    is_at_hand,
)
from jaxtrain.plan.memory import held, in_bytes, least, offloaded
from jaxtrain.plan.mesh_report import remedy
from jaxtrain.plan.target import Target, abstractly, parse_target
from jaxtrain.types import Spec

SECOND = "second state of verified steps"  # of config.guard.verify_every
MAX_ARRAYS = 5  # that are listed of those that loops keep
MAX_SCOPES = 10  # of the program that are listed with their time
SMALL_SHARE = 0.01  # of a step, below which a kind of kernel is not listed
Forecasts = dict[tuple[Hashable, bool], forecast.Forecast]  # by stage, and whether it has norms


def report(config: config_lib.Config, text: str) -> tuple[str, bool]:
    """Write the plan for the devices of ``text``, and tell whether it is without problems."""
    target = parse_target(text)
    if not target.here:
        ask_for_no_chips()
    problems: list[str] = []
    choice = ""
    if resumed := of_earlier_start(config, target):
        config, choice = resumed
    elif fit := best_fit(config, target, text):
        if not fit.fits:
            problems.append(fit.problem(config.train.auto, target))
        config, choice = fit.config, str(fit)
    config = resolve(config, target)
    assembly = abstractly(config, target)
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
    for name, finding, is_good in hosts.checks(assembly, target, seconds):
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
        computing, moving = forecast.ideal(assembly, chip, target.count)
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
        if target.platform == "cpu":
            yield f"  no forecast: {calibration.refusal() or 'the program was not compiled'}"
        elif chip is None:
            yield f"  no forecast: the rates of {target.name} are not known"
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
        problems.append(f"it does not fit: {certain}. {remedy(config, target)}")
        return
    missing = "" if target.here else _missing(assembly, target)
    if missing:
        yield f"not compiled for it: {missing}"
        yield "this is a lower bound: what one layer needs comes on top"
        yield ""
        excess = needs.peak - target.memory
        if excess > 0:
            too_much = f"at least {in_bytes(excess)} too much"
            problems.append(f"it does not fit: {too_much}. {remedy(config, target)}")
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
    if target.chip.is_tpu:
        yield from mesh_advice.microbatch_lines(assembly)
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
    yield from mesh_advice.microbatch_lines(assembly)
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
        return NO_OFFLOAD
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
            problems.append(f"it does not fit: {answer.error}. {remedy(config, target)}")
        else:
            problems.append(f"it does not compile: {answer.error}")
        yield f"not {title}: {answer.error}"
        return
    peak = step.peak + needs.second
    excess = peak - target.memory
    if excess > 0:
        changes = remedy(config, target, peak - needs.peak)
        problems.append(f"it does not fit: {in_bytes(excess)} too much. {changes}")
    source = " by an earlier plan, whose figures were kept" if step.again else ""
    yield f"{title}, in {step.seconds:.0f} s{source}"
    yield _row("arguments", step.arguments)
    yield _row("while it runs", step.temporaries)
    if needs.second:
        yield _row(SECOND, needs.second)
    yield f"{_row('together', peak)}   of {in_bytes(target.memory)}"
    yield from roofline_lines(step, target)
    yield from _rows_lines(step, assembly, target)
    yield from _program_lines(step, assembly, target)


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
        f" {rates.flops / 1e12:g} TFLOP/s ({source}), without the time of links between devices"
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


def _program_lines(step: Compiled, assembly: Assembly, target: Target) -> Iterator[str]:
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
    seconds = _seconds_of_links(step, dict(assembly.layout.mesh.shape), target)
    for (kind, axes), exchanged in by_bytes:
        yield _exchange_line(kind, axes, exchanged, seconds.get((kind, axes)))


def _seconds_of_links(
    step: Compiled, mesh: Mapping[str, int], target: Target
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the time of the links by kind and mesh axes, {} if their rates are not known."""
    seconds: dict[tuple[str, tuple[str, ...]], float] = collections.defaultdict(float)
    if target.chip:
        links = exposure.links_of(target, mesh)
        for each in hlo.collectives(step.text):
            seconds[each.kind, each.axes(mesh)] += each.times * links.seconds(each)
    return seconds


def _exchange_line(
    kind: str, axes: Sequence[str], exchanged: hlo.Exchanged, seconds: float | None
) -> str:
    sent = f"{in_bytes(exchanged.sent):>12} sent"
    if seconds is not None:
        sent += f", {1e3 * seconds:.2f} ms of the links"
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


def _doubts(assembly: Assembly) -> Sequence[str]:
    """Return what is odd about the training data, if they can be read."""
    try:
        loader = hosts.make_loader(assembly, "train")
    except ValueError:
        return ()
    try:
        return loader.doubts()
    finally:
        loader.close()
