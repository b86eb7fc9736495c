"""A search of the plan, for a person: its progress, the best candidates, the others' lacks."""

import functools
import math
import sys
from collections.abc import Iterator

from jaxtrain import config as config_lib
from jaxtrain.plan import candidates, estimate, mesh_search, remedies, worker
from jaxtrain.plan import slices as slices_lib
from jaxtrain.plan.compile import NO_OFFLOAD, ask_for_no_chips
from jaxtrain.plan.memory import in_bytes, least
from jaxtrain.plan.mesh_search import Result, Search, Settled
from jaxtrain.plan.target import PlanError, Target, abstractly, parse_target

OPTIONS = (candidates.OFFLOAD, candidates.REMAT, candidates.ACCUMULATE)
MAX_LINES = 12  # of candidates that do not fit
LITTLE = 0.05  # share of a step that is not named
MAX_DOUBLINGS = 9  # of a target that is too small
NUMBERS_OF_SLICES = (2, 4, 8, 16)  # of the largest ones, likewise


def report(config: config_lib.Config, text: str) -> tuple[str, bool, bool]:
    """Search for the devices of ``text``.

    Returns the text, whether a candidate fits, and whether Ctrl-C ended the search. Raises
    PlanError if no mesh is allowed, or none can have room.
    """
    target = parse_target(text)
    if not target.here:
        ask_for_no_chips()
    with worker.compiler(target, text) as compiler:
        run = functools.partial(
            Search, config, target, compiler, fields=options(target), note=_show_progress
        )
        first = run()
        narrower = Result()
        interrupted = False
        try:
            first.run()
            narrower = _narrower(config, first.result, run)
        except KeyboardInterrupt:
            interrupted = True
    result = first.result
    if not (result.meshes or interrupted):
        raise PlanError(mesh_search.no_mesh(result, target))
    lines = [
        *_title_lines(config, target, result),
        *([] if compiler else [_missing(target)]),
        *(["interrupted: this is known so far"] if interrupted else []),
        "",
        *_fitting_lines(config, target, result),
        *_unknown_lines(result),
        *_narrower_lines(result, narrower),
        *_failed_lines(result),
    ]
    fits = bool(result.fitting or narrower.fitting)
    if not fits and not interrupted:
        lines.append(f"problem: {too_small(config, target, result)}")
    return "\n".join(lines), fits, interrupted


def options(target: Target) -> tuple[str, ...]:
    """List the fields besides the mesh. A CPU's device has no other memory than the host's."""
    return OPTIONS[1:] if target.platform == "cpu" else OPTIONS


def _show_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _narrower(config: config_lib.Config, result: Result, run: functools.partial[Search]) -> Result:
    """Try moments and parameters in 16 bits: with the best candidate, or else with each mesh."""
    proposals = Result()
    for values in candidates.narrower(config):
        if result.fitting:
            choice = result.best[0].candidate.choice | values
            one = run(base=values)
            one.settle(one.candidate(choice))
        else:
            one = run(base=values)
            one.run(enough=1)
        proposals.fitting += one.result.fitting
        proposals.failed += one.result.failed
    return proposals


def _title_lines(config: config_lib.Config, target: Target, result: Result) -> Iterator[str]:
    n_settled = len(result.fitting) + len(result.unknown) + len(result.failed)
    yield (
        f"{target.name}: {len(result.meshes)} meshes are allowed for {config.train.batch} rows a"
        f" step, {n_settled} candidates were settled, {len(result.fitting)} fit"
    )


def _missing(target: Target) -> str:
    return (
        "nothing is compiled: bytes are lower bounds, and times rough estimates; jaxtrain plan"
        f" --setup {target.kind} fetches the compiler"
    )


def _fitting_lines(config: config_lib.Config, target: Target, result: Result) -> Iterator[str]:
    for number, settled in enumerate(result.best, start=1):
        yield f"{number}. {_summary(settled)}"
        yield from _time_lines(config, target, settled)
        yield f"   {settled.candidate.choice.overrides()}"
        yield ""
    if result.fitting and not result.best[0].candidate.config.optim.offload:
        yield f"a run searches by itself, at its first start, with {_auto(config)}"
        yield ""


def _unknown_lines(result: Result) -> Iterator[str]:
    if not result.unknown:
        return
    yield f"may fit or not, since they are not compiled: {NO_OFFLOAD}"
    for settled in result.likely:
        yield f"   {_summary(settled)}"
        yield f"   {settled.candidate.choice.overrides()}"
    yield ""


def _auto(config: config_lib.Config) -> str:
    names = ["mesh"]
    if not config.model.reads_whole_microbatches:
        names.append(candidates.ACCUMULATE)
    if hasattr(config.model, "remat"):
        names.append(candidates.REMAT)
    return " ".join(f"--config.{name}=auto" for name in names)


def _summary(settled: Settled) -> str:
    mesh = settled.candidate.config.mesh
    sizes = f"data {mesh.data} × fsdp {mesh.fsdp} × model {mesh.model}"
    source = "" if settled.step else "at least "
    return f"{1e3 * settled.seconds:.2f} ms a step, {source}{in_bytes(settled.size)}, {sizes}"


def _time_lines(config: config_lib.Config, target: Target, settled: Settled) -> Iterator[str]:
    """Yield exchanges by axis, the parts of the time, and the hours of the run."""
    step = settled.step
    if step and step.collectives:
        by_axes: dict[str, float] = {}
        for (kind, axes), exchanged in step.collectives.items():
            name = f"{kind} over {'+'.join(axes)}"
            by_axes[name] = by_axes.get(name, 0.0) + exchanged.sent
        for name, sent in sorted(by_axes.items(), key=lambda item: -item[1]):
            yield f"   {in_bytes(sent)} sent by {name}"
    if settled.forecast:
        shares = [
            f"{kind} {seconds / settled.seconds:.0%}"
            for kind, seconds in settled.forecast.by_kind.items()
            if seconds >= LITTLE * settled.seconds
        ]
        yield f"   limited by {', '.join(shares)} ({settled.forecast.calibration})"
    if settled.is_unread:
        yield f"   {mesh_search.UNREAD}"
    hours = config.train.steps * settled.seconds / 3600
    line = f"   {hours:.2f} h for {config.train.steps:,} steps"
    doubt = _doubt(settled, target) if settled.step else ""
    if doubt:
        line += f", as if each were {doubt}"
    if target.chip:
        line += f", {hours * target.count / target.chip.devices:.2f} chip-hours"
    yield line


def _doubt(settled: Settled, target: Target) -> str:
    """Name the step that stands for all of a run's, or "" if it has no others."""
    assembly = abstractly(settled.candidate.config, target)
    doubt = ""
    if len(stages := assembly.stages()) > 1:
        doubt = f" of the last stage ({[*stages][-1]})"
    if not assembly.has_norms(1):
        doubt += " with norms"
    return doubt and f"one{doubt}"


def _narrower_lines(result: Result, narrower: Result) -> Iterator[str]:
    if not (narrower.fitting or narrower.failed):
        return
    yield "with other numbers than the config's, which no run takes by itself"
    for settled in narrower.best:
        gain = ""
        if result.fitting:
            gain = f", {settled.seconds / result.best[0].seconds - 1:+.1%} of the time"
        yield f"   {_summary(settled)}{gain}"
        yield f"   {settled.candidate.choice.overrides()}"
    for settled in narrower.failed:
        yield f"   {mesh_search.line(settled)}"
    yield ""


def _failed_lines(result: Result) -> Iterator[str]:
    lines = mesh_search.lacks(result.failed)
    if lines:
        yield "do not fit"
        shown = lines[:MAX_LINES] if result.fitting else lines
        yield from (f"  {line}" for line in shown)
        if len(lines) > len(shown):
            yield f"  and {len(lines) - len(shown)} more"
        yield ""


def too_small(config: config_lib.Config, target: Target, result: Result) -> str:
    """Write the lack if nothing fits, and the smallest target that may do."""
    nearest = result.nearest
    if nearest is None:
        return "no candidate compiles, and each one's error is above"
    limit = target.memory * (mesh_search.ROOM if nearest.step else 1)
    text = (
        f"no candidate fits: {nearest.candidate.choice} lacks the least, with"
        f" {in_bytes(nearest.size)} of {in_bytes(limit)} on each device"
    )
    if target.here or target.chip is None:
        return f"{text}; more devices, or devices with more memory, would do"
    larger = smallest(config, target)
    if not larger:
        rows = f"a step of train.batch={config.train.batch}"
        return f"{text}, and no target of more {target.chip.name} has a mesh with room for {rows}"
    return f"{text}. The smallest target that may do, by its lower bound: {larger}"


def remedy(config: config_lib.Config, target: Target, beyond: float | None = None) -> str:
    """Write the changes by which a step fits (`remedies.ways`), else the smallest target for it."""
    text = remedies.ways(config, target, beyond)
    if text != remedies.NO_CHANGE or target.here or target.chip is None:
        return text
    larger = smallest(config, target)
    if not larger:
        return text
    return (
        f"{text} on {target.name}. The smallest target that may do, by its lower bound: {larger},"
        f" with a mesh of jaxtrain plan … {larger} --search"
    )


def smallest(config: config_lib.Config, target: Target) -> str:
    """Return the smallest larger target whose devices have room for a step, "" without one."""
    for name in _larger(target):
        larger = parse_target(name)
        changed = [mesh.apply(config) for mesh in candidates.meshes(larger)]
        # replicas split nothing but rows, which fsdp splits as well
        least_data = min((each.mesh.data for each in changed), default=1)
        if any(_has_room(each, larger) for each in changed if each.mesh.data == least_data):
            return name
    return ""


def _has_room(config: config_lib.Config, target: Target) -> bool:
    """Tell whether a step may fit with all layers computed again."""
    try:
        assembly = abstractly(config, target)
        if candidates.objection(config) or least(assembly, tiled=target.tiled) > target.memory:
            return False
        rows = max(1, config.train.batch // estimate.row_shards(assembly))
    except (ValueError, TypeError):
        return False
    choices = candidates.same_numbers(config, rows, OPTIONS[1:])
    configs = [choice.apply(config) for choice in choices]
    small = (configs[i] for i in candidates.smallest(configs))
    return any(remedies.size(each, target, 0.0) <= target.memory for each in small)


def _larger(target: Target) -> Iterator[str]:
    """Yield the names of targets with more devices of the same chip: slices, then several."""
    chip = target.known_chip
    if target.tiled:
        # of as many chips the first one has the most even sides
        by_count = {math.prod(sides): sides for sides in reversed(slices_lib.existing(chip.name))}
        counts = sorted(by_count)
        for n_chips in counts:
            if n_chips * chip.devices > target.count:
                yield slices_lib.name(chip.name, by_count[n_chips])
        for n in NUMBERS_OF_SLICES:
            if n * counts[-1] * chip.devices > target.count:
                yield f"{slices_lib.name(chip.name, by_count[counts[-1]])}*{n}"
        return
    count = target.count
    for _ in range(MAX_DOUBLINGS):
        count *= 2
        nodes = -(-count // chip.domain)
        yield f"gpu:{chip.name}x{min(count, chip.domain)}" + (f"*{nodes}" if nodes > 1 else "")
