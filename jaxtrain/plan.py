"""What a run will hold, move and cost, before any of it exists, on devices that need not be here.

    python -m jaxtrain.main --config=… --plan                  # the devices of this machine
    python -m jaxtrain.main --config=… --plan=tpu:v4:2x2x4     # a TPU slice; its step is compiled here, by libtpu
    python -m jaxtrain.main --config=… --plan=tpu:v4:2x2x4*2   # two such slices
    python -m jaxtrain.main --config=… --plan=gpu:h100x8       # so many GPUs of one node or more

Nothing here makes an array. What a device holds between steps is exact: the sum over the abstract state, with the tiles that
TPUs pad to. Compiling for a TPU needs the package libtpu (extra: topology) and no TPU.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import math
import os
import pathlib
import re
import shutil
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters import partial_eval

from jaxtrain import chips, cluster, compiler, feed, hlo, liveness, specs
from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib
from jaxtrain import state as state_lib
from jaxtrain import step as step_lib
from jaxtrain.assembly import Assembly, assemble
from jaxtrain.types import PyTree

log = logging.getLogger("jaxtrain")
MFU = 0.4  # share of the peak that hours are projected with
SLACK = 0.15  # by which the estimate of a step's peak may be off
DOUBT = 0.5  # by which the estimate of its temporaries may be too large, at the most: what does not fit even so is a problem
GPUS_PER_NODE = 8


class PlanError(ValueError):
    """A target that is unknown, or a run that does not fit. The message has the remedy."""


class Target(NamedTuple):
    """Devices to plan for."""

    name: str  # as the user wrote it
    chip: chips.Chip | None  # None: not in the table, as CPUs are not
    count: int  # devices
    here: bool  # they are this machine's
    topology: str = ""  # of a TPU slice, for the compiler
    slices: int = 1

    @property
    def tiled(self) -> bool:
        return bool(self.chip and self.chip.kind.startswith("TPU"))

    @property
    def memory(self) -> float:
        """Bytes that a program may use on one device."""
        if self.here and (stats := jax.local_devices()[0].memory_stats()) and "bytes_limit" in stats:
            return stats["bytes_limit"]
        return self.chip.memory if self.chip else host_memory() / jax.local_device_count()

    @property
    def compiler(self) -> liveness.Compiler:
        """How XLA compiles for it."""
        known = self.chip is not None
        size = (lambda shape, t: padded(shape, t.itemsize)) if self.tiled else (lambda shape, t: math.prod(shape) * t.itemsize)
        newer = known and self.chip.name in ("v5e", "v6e")
        return liveness.Compiler(
            size,
            self.tiled,
            recomputes=known,
            recomputes_logistic=newer,
            halves=known,
            merges=not known,
            copies=not known,
        )


def parse_target(text: str) -> Target:
    """Raises PlanError for a target that is unknown, with those that are."""
    if not text:
        device = jax.devices()[0]
        return Target(f"{jax.device_count()} × {device.device_kind}", chips.find(device.device_kind), jax.device_count(), True)
    platform, _, rest = text.lower().partition(":")
    known = {p: [c.name for c in chips.CHIPS if c.kind.startswith(k)] for p, k in (("tpu", "TPU"), ("gpu", "NVIDIA"))}
    if platform == "gpu" and (match := re.fullmatch(r"(\w+?)x(\d+)", rest)) and match[1] in known["gpu"] and int(match[2]):
        return Target(text, chips.by_name(match[1]), int(match[2]), False)
    if platform == "tpu" and (match := re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?:\*(\d+))?", rest)) and match[1] in known["tpu"]:
        count, slices = math.prod(int(n) for n in match[2].split("x")), int(match[3] or 1)
        if count * slices:
            return Target(text, chips.by_name(match[1]), count * slices, False, f"{match[1]}:{match[2]}", slices)
    raise PlanError(
        f"--plan={text} is unknown; say for example --plan=tpu:v4:2x2x4 ({', '.join(known['tpu'])}) or --plan=gpu:h100x8 "
        f"({', '.join(known['gpu'])})"
    )


def abstractly(config: config_lib.Config, target: Target) -> Assembly:
    """The run on a mesh of devices that need not exist."""
    m = config.mesh
    mesh = layout_lib.abstract_mesh(m.data, m.fsdp, m.model, count=target.count, what=target.name)
    devices = layout_lib.devices_like(jax.devices()[0]) if target.here else layout_lib.devices_of(target.chip.kind)
    return assemble(config, mesh, devices=devices)


def device_bytes(x: jax.ShapeDtypeStruct, *, tiled: bool) -> int:
    """Bytes of one device's part of an array; ``tiled``: as a TPU lays it out.

    A TPU pads the last two dimensions in memory to tiles of 8 × 128 words of 32 bits, fewer rows where there are fewer, and
    chooses which two dimensions these are so that the padding is least; a vector is padded to 128 to 1024 words.
    """
    shape, size = x.sharding.shard_shape(x.shape), np.dtype(x.dtype).itemsize
    return padded(shape, size) if tiled else math.prod(shape) * size


def padded(shape: Sequence[int], size: int) -> int:
    """Bytes of an array of values of ``size`` bytes in a TPU's memory."""
    packed = max(1, 4 // size)  # values in a word
    if 0 in shape:
        return 0
    if len(shape) < 2:
        n = math.prod(shape)
        return _up(n, min(max(_power(n), 128 * packed), 1024)) * size
    ways = [
        math.prod(shape) // (rows * columns) * _up(rows, min(max(_power(rows), packed), 8)) * _up(columns, 128)
        for i, rows in enumerate(shape)
        for j, columns in enumerate(shape)
        if i != j
    ]
    return min(ways) * size


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def held(plan: state_lib.Plan, layout: layout_lib.Layout, *, tiled: bool) -> dict[str, int]:
    """Bytes that one device holds between two steps, by what they are; what is in host memory aside (`offloaded`)."""

    def size(tree: PyTree) -> int:
        return sum(device_bytes(x, tiled=tiled) for x in jax.tree.leaves(tree) if not _is_on_host(x))

    state = plan.state
    return {
        "parameters": size(state.variables.params),
        "frozen": size(state.variables.frozen),
        "optimizer": size(state.opt_state),
        "average of the parameters": size(state.ema),
        "carry": size(state.variables.carry),
        "counters": size((state.step, state.norms, step_lib.abstract_stop(layout))),
        "batch": size(plan.batch),
    }


def offloaded(plan: state_lib.Plan) -> int:
    """Bytes that host memory holds for one device between two steps."""
    return sum(device_bytes(x, tiled=False) for x in jax.tree.leaves(plan.state) if _is_on_host(x))


def argument_bytes(assembly: Assembly, traced: jax.stages.Traced, *, tiled: bool) -> int:
    """Bytes on one device of the step's arguments: without those that it does not read, which JAX leaves out of the program."""
    leaves = jax.tree.leaves((assembly.plan.state, assembly.plan.batch, step_lib.abstract_stop(assembly.layout)))
    jaxpr = traced.jaxpr.jaxpr
    _, read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return sum(device_bytes(x, tiled=tiled) for x, is_read in zip(leaves, read, strict=True) if is_read and not _is_on_host(x))


def _is_on_host(x: jax.ShapeDtypeStruct) -> bool:
    return x.sharding.memory_kind == state_lib.HOST


def least(held: Mapping[str, int]) -> int:
    """Bytes that one device needs at the least while a step runs: what it holds, and gradients of the parameters' types."""
    return sum(held.values()) + held["parameters"]


class Estimate(NamedTuple):
    """What a step needs of one device, without compiling it."""

    arguments: int  # [bytes] exact
    temporaries: liveness.Peak  # about

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries.bytes

    def surely(self) -> float:
        """Bytes that it needs at least, as far as the estimate was ever seen to be wrong."""
        return self.arguments + (1 - DOUBT) * self.temporaries.bytes


def estimate(assembly: Assembly, traced: jax.stages.Traced, target: Target) -> Estimate:
    """Of a traced step (`Assembly.trace`)."""
    state = jax.tree.leaves(assembly.plan.state)
    leaves = [*state, *jax.tree.leaves((assembly.plan.batch, step_lib.abstract_stop(assembly.layout)))]
    peak = liveness.peak(
        traced.jaxpr,
        [liveness.split_of(x.sharding.spec, x.ndim) for x in leaves],
        dict(assembly.layout.mesh.shape),
        [i < len(state) and not _is_on_host(x) for i, x in enumerate(leaves)],
        target.compiler,
    )
    return Estimate(argument_bytes(assembly, traced, tiled=target.tiled), peak)


def remedies(config: config_lib.Config, target: Target, *, factor: float = 1.0) -> list[str]:
    """Single changes of the config with which the step fits, each planned anew.

    ``factor``: by which a compiler's figure for the config was larger than the estimate.
    """

    @functools.cache
    def needed(text: str) -> float:
        """Bytes on a device; NaN where the change does not go with the rest of the config."""
        try:
            assembly = abstractly(changed[text], target)
            parts = held(assembly.plan, assembly.layout, tiled=target.tiled)
            whole = parts["parameters"] + parts["optimizer"] + parts["average of the parameters"]
            if factor * whole > memory:  # hopeless: seen without a trace
                return math.inf
            stage = assembly.task.stage(config.train.steps - 1)
            return factor * estimate(assembly, assembly.trace(stage), target).peak
        except (ValueError, TypeError):
            return math.nan

    changed, memory = dict(_changes(config, target)), target.memory
    kinds: dict[str, list[str]] = {}
    for text in changed:
        kinds.setdefault(text.partition("=")[0], []).append(text)
    found = []
    for texts in kinds.values():
        for text in texts:
            if needed(text) <= memory:
                found.append(f"{text} would make it {_bytes(needed(text))}")
                break
            # The last changes most: where that does not fit, none of its kind does.
            if needed(text) > memory and next(n for n in map(needed, reversed(texts)) if not math.isnan(n)) > memory:
                break
    return found


def _changes(config: config_lib.Config, target: Target) -> Iterator[tuple[str, config_lib.Config]]:
    """What could be changed, the least step of each kind first."""
    m, t = config.mesh, config.train
    data, fsdp, model = layout_lib.mesh_sizes((m.data, m.fsdp, m.model), target.count, target.name)
    for n in (fsdp * k for k in range(2, data + 1) if data % k == 0):
        text = f"--config.mesh.fsdp={n} --config.mesh.data={data * fsdp // n}"
        yield text, replace(config, mesh=replace(m, data=data * fsdp // n, fsdp=n, model=model))
    if getattr(config.model, "remat", "") == "none":
        yield "--config.model.remat=full", replace(config, model=replace(config.model, remat="full"))
    for n in (t.accumulate * 2**k for k in range(1, 11)):
        yield f"--config.train.accumulate={n}", replace(config, train=replace(t, accumulate=n))
    if getattr(config.model, "dtype", "") == "float32":
        yield "--config.model.dtype=bfloat16", replace(config, model=replace(config.model, dtype="bfloat16"))
    o = config.optim
    for moments in ("bfloat16", "int8") if o.moments == "float32" else ("int8",) if o.moments == "bfloat16" else ():
        yield f"--config.optim.moments={moments}", replace(config, optim=replace(o, moments=moments))
    if not o.offload:
        yield "--config.optim.offload=true", replace(config, optim=replace(o, offload=True))
    if t.ema:
        yield "--config.train.ema=0", replace(config, train=replace(t, ema=0.0))


def refuse_if_too_large(assembly: Assembly) -> None:
    """Raises PlanError when the step needs more than this machine's devices hold, with what would make it fit.

    What its arguments and gradients take is exact. Otherwise the estimate only tells when the compiler is to be asked, which
    has the last word: a step that it finds to fit is not refused. Its program stays in the cache of programs for the run.
    """
    target = parse_target("")
    memory = target.memory
    traced = assembly.trace(assembly.task.stage(assembly.config.train.steps - 1))  # of a batch of the largest bucket
    needed = estimate(assembly, traced, target)
    size, factor = _certain(assembly, needed, target), 1.0
    told = f"at least {_bytes(size)}"
    if cluster.agree(size <= memory < (1 + SLACK) * needed.peak):
        log.info("a step may need more memory than there is: it is compiled now, to be sure")
        try:
            size = compiled(assembly, traced).peak
            told, factor = f"{_bytes(size)}, by its compiler,", size / needed.peak
        except PlanError as error:
            size = max(needed.peak, int(memory) + 1)
            told = f"about {_bytes(size)} ({error})"
    if size > memory:
        raise PlanError(
            f"a step needs {told} on each device, {_bytes(needed.arguments)} of it for state and batch, and each of "
            f"{target.name} has {_bytes(memory)}: {_bytes(size - memory)} too little. "
            f"{_ways(assembly.config, target, factor)}. --plan shows it all"
        )


def _certain(assembly: Assembly, needed: Estimate, target: Target) -> int:
    """Bytes that are needed whatever the compiler does."""
    return max(needed.arguments, least(held(assembly.plan, assembly.layout, tiled=target.tiled)))


def _ways(config: config_lib.Config, target: Target, factor: float = 1.0) -> str:
    found = remedies(config, target, factor=factor)
    return f"One of these would do: {'; '.join(found)}" if found else "No single change would make it fit"


class Compiled(NamedTuple):
    """What a compiler says of the step."""

    arguments: int  # [bytes] on one device
    temporaries: int
    peak: int
    collectives: dict[tuple[str, tuple[str, ...]], tuple[int, float]] | None  # hlo.summary; None: its text cannot be read
    seconds: float  # that compiling took


def _ask_for_no_chips() -> None:
    """Tells libtpu, where it is installed, what it would ask a metadata server, and complain about where there is none.

    It also refuses to be loaded by two processes. To be called before the first device is touched; a run cannot follow.
    """
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v4-8"),  # any will do: a topology says its own
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)


def tpu_devices(target: Target) -> list[Any]:
    """The chips of a topology, which need not exist. Those of two cores act as one device ("megacore"), as JAX runs them."""
    from jax.experimental import topologies

    _ask_for_no_chips()
    options: dict[str, Any] = {"chip_config_name": "megacore"} if target.chip.name in ("v4", "v5p") else {}
    if target.slices > 1:
        options["num_slices"] = target.slices
    try:
        return list(topologies.get_topology_desc(target.topology, platform="tpu", **options).devices)
    except Exception as error:
        raise PlanError(f"--plan={target.name}: libtpu knows no such topology: {str(error).splitlines()[0]}") from error


def compiler_options(config: config_lib.Config, target: Target) -> dict[str, Any]:
    """What a step for the target is compiled with. Raises ConfigError for options that a compiler at hand refuses."""
    if target.here:
        device = jax.local_devices()[0]
        kind = device.device_kind
    else:
        kind, device = target.chip.kind, None
        if target.topology and importlib.util.find_spec("libtpu"):
            device = tpu_devices(target)[0]
        elif not target.topology:
            with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave CPUs out
                device = jax.devices("cpu")[0]  # jaxlib's own compiler knows the options for GPUs by name
    return compiler.options(config.compiler, kind, count=target.count, device=device)


def compiled(assembly: Assembly, traced: jax.stages.Traced, *, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compiles a step on the assembly's real mesh, with the options of a run; ``options`` come over them.

    Raises PlanError when the compiler finds that it does not fit, ConfigError when it refuses an option of the config.
    """
    began = time.perf_counter()
    own, mesh = assembly.config.compiler, assembly.layout.mesh
    device = mesh.devices.flat[0]
    options = {**compiler.options(own, device.device_kind, count=mesh.size, device=device), **(options or {})}
    try:
        program = compiler.compile(traced.lower(), options, own)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PlanError(f"the compiler says: {str(error).splitlines()[0]}") from error
    memory = program.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    try:
        found = hlo.summary(hlo.collectives(program.as_text()), dict(assembly.layout.mesh.shape))
    except jax.errors.JaxRuntimeError:  # a libtpu newer than jaxlib can write what jaxlib does not know
        found = None
    return Compiled(arguments, temporaries, arguments + temporaries + fresh, found, time.perf_counter() - began)


def host_memory() -> float:
    """Bytes that this machine could still give to a process."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PlanError("/proc/meminfo names no MemAvailable")


def report(config: config_lib.Config, text: str) -> tuple[str, bool]:
    """The whole plan for a person, and whether all of it is well."""
    target = parse_target(text)
    if not target.here:
        _ask_for_no_chips()
    assembly = abstractly(config, target)
    lines, problems = [], []
    mesh = dict(assembly.layout.mesh.shape)
    count = specs.count(assembly.task.specs.params)
    lines += [f"{count:,} parameters on {target.name}, mesh {_mesh(mesh)}, {config.train.batch} rows a step"]
    if options := compiler_options(config, target):
        lines += [f"compiled with {', '.join(f'{name}={value}' for name, value in options.items())}"]
    lines += [""]
    lines += ["held by each device between steps"]
    parts = held(assembly.plan, assembly.layout, tiled=target.tiled)
    lines += [f"  {name:28}{_bytes(size):>12}" for name, size in parts.items() if size]
    lines += [f"  {'together':28}{_bytes(sum(parts.values())):>12}   of {_bytes(target.memory)}"]
    if away := offloaded(assembly.plan):
        lines += [f"  {'in host memory: optimizer':28}{_bytes(away):>12}   on the device during the update"]
    # Clipping by the global norm, and the guard, need all of them before the first parameter moves.
    lines += [f"  {'with gradients':28}{_bytes(least(parts)):>12}", ""]
    lines += _step_lines(config, assembly, target, problems)

    flops, chip = assembly.task.flops, target.chip
    lines += ["a step computes", f"  {flops:.3e} FLOP of the model"]
    if chip:
        computing = flops / (target.count * chip.flops)
        state = assembly.plan.state
        written = state_lib.bytes_per_device(state) - state_lib.bytes_per_device(state.variables.frozen)
        moving = (state_lib.bytes_per_device(state) + written) / chip.bandwidth
        ideal = max(computing, moving)
        hours = config.train.steps * ideal / MFU / 3600
        lines += [
            f"  {1e3 * computing:.2f} ms at the peak of {target.count} × {chip.kind}, {chip.flops / 1e12:g} TFLOP/s each",
            f"  {1e3 * moving:.2f} ms to read the state and write it again once, at {chip.bandwidth / 1e12:g} TB/s",
            f"  {hours:.2f} h for {config.train.steps:,} steps at {MFU:.0%} of what takes longer",
        ]
        if tokens := assembly.task.tokens:
            lines += [f"  {tokens / ideal * MFU:,.0f} tokens/s at {MFU:.0%} of it, padding included"]
    else:
        lines += ["  no ideal time: the chip table has no such device; name one, for example --plan=gpu:h100x1"]
    lines += [""]

    lines += ["where the parameters live", *_rules(assembly), ""]
    for name, text, well in checks(config, assembly, target):
        lines += [f"{name:14}{text}"]
        if not well:
            problems.append(text)
    lines += ["", *(f"problem: {text}" for text in problems)] if problems else ["", "nothing speaks against this run"]
    return "\n".join(lines), not problems


def _step_lines(config: config_lib.Config, assembly: Assembly, target: Target, problems: list[str]) -> Iterator[str]:
    """The fullest stage's fullest moment."""
    each = {stage: estimate(assembly, assembly.trace(stage), target) for stage in assembly.stages()}
    stage, needed = max(each.items(), key=lambda item: item[1].peak)
    gradients = sum(device_bytes(x, tiled=target.tiled) for x in jax.tree.leaves(assembly.plan.state.variables.params))
    yield "a step at its fullest moment, estimated" + ("" if stage is None else f" (stage {stage})")
    yield f"  {'state and batch that it reads':32}{_bytes(needed.arguments):>12}"
    yield f"  {'activations, gradients':32}{_bytes(needed.temporaries.bytes):>12}   (gradients alone {_bytes(gradients)})"
    for size, what in needed.temporaries.largest[:5]:
        yield f"      {_bytes(size):>12}  {what}"
    yield f"  {'together':32}{_bytes(needed.peak):>12}   of {_bytes(target.memory)}"
    yield ""
    if target.count > 1:
        yield "a step sends between devices, estimated"
        yield from _collective_lines(needed.temporaries.moved, target)
        yield ""
    over, doubtful = needed.peak - target.memory, (1 + SLACK) * needed.peak > target.memory
    told = f"{_bytes(over)} too much, as estimated. {_ways(config, target)}" if over > 0 else ""
    if (certain := _certain(assembly, needed, target)) > target.memory:
        sure = f"state and gradients alone are {_bytes(certain - target.memory)} more than a device has"
        problems.append(f"it does not fit: {sure}, and with activations it is {told}")
    elif (target.here and doubtful) or (target.topology and importlib.util.find_spec("libtpu")):
        for each_stage, start in assembly.stages().items():
            yield from _compiled_lines(config, target, each_stage, start, each[each_stage], problems)
    else:
        if target.topology:
            yield from ("not compiled for it: that needs the package libtpu; pip install 'jaxtrain[topology]'", "")
        if needed.surely() > target.memory:
            problems.append(f"it does not fit: {told}")
        elif over > 0:
            yield from (f"it may not fit: {told}", "")


def _collective_lines(table: Mapping[tuple[str, tuple[str, ...]], tuple[int, float]], target: Target) -> Iterator[str]:
    """What one device sends in a step, the most first (`hlo.summary`, or the estimate of the same form)."""
    for (kind, axes), (times, sent) in sorted(table.items(), key=lambda item: -item[1][1]):
        took = f", {1e3 * sent / target.chip.links:.2f} ms of the links" if target.chip else ""
        yield f"  {times:5} × {kind:20} over {'+'.join(axes):12} {_bytes(sent):>12} sent{took}"


def _compiled_lines(
    config: config_lib.Config, target: Target, stage: Hashable, start: int, needed: Estimate, problems: list[str]
) -> Iterator[str]:
    """What the compiler says, which counts where the estimate says something else."""
    title = "compiled for it" if stage is None else f"compiled for it, stage {stage} from step {start}"
    devices = None if target.here else tpu_devices(target)
    mesh = layout_lib.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model, devices=devices)
    assembly = assemble(config, mesh)
    try:
        found = compiled(assembly, assembly.trace(stage))
    except PlanError as error:
        problems.append(f"it does not fit: {error}. {_ways(config, target, max(1.0, target.memory / needed.peak))}")
        yield from (f"not {title}: {error}", "")
        return
    if (over := found.peak - target.memory) > 0:
        problems.append(f"it does not fit: {_bytes(over)} too much. {_ways(config, target, found.peak / needed.peak)}")
    yield f"{title}, in {found.seconds:.0f} s"
    yield f"  {'arguments':28}{_bytes(found.arguments):>12}"
    yield f"  {'while it runs':28}{_bytes(found.temporaries):>12}"
    yield f"  {'together':28}{_bytes(found.peak):>12}   of {_bytes(target.memory)}"
    if found.collectives is None:
        yield "  what moves between devices cannot be read: this jaxlib does not know all that this libtpu writes"
    yield from _collective_lines(found.collectives or {}, target)
    yield ""


def _rules(assembly: Assembly) -> Iterator[str]:
    """One line for each parameter: its axes, what the rules made of them, and what stayed whole."""
    variables, table, layout = assembly.plan.state.variables, assembly.task.specs, assembly.layout
    rows = []
    for part in ("params", "frozen", "carry"):
        leaves = jax.tree.leaves(getattr(table, part), is_leaf=specs.is_spec)
        arrays = jax.tree.leaves(getattr(variables, part))
        for path, spec, x in zip(specs.paths(getattr(table, part)), leaves, arrays, strict=True):
            placed = tuple(x.sharding.spec) + (None,) * (len(spec.shape) - len(x.sharding.spec))
            split = [
                f"{axis}→{place if isinstance(place, str) else '+'.join(place)}"
                for axis, place in zip(spec.axes, placed, strict=True)
                if place
            ]
            wished = [
                f"{axis} ({size}) does not divide"
                for axis, size, place in zip(spec.axes, spec.shape, placed, strict=True)
                if axis and not place and _splits(layout, axis)
            ]
            how = ", ".join(split) or "whole"
            shape = f"{np.dtype(x.dtype).name}[{','.join(map(str, spec.shape))}]"
            name = path if part == "params" else f"{part}: {path}"
            rows.append((name, shape, f"{how}; {', '.join(wished)}" if wished else how))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, shape, how in rows:
        yield f"  {name:{widths[0]}}  {shape:{widths[1]}}  {how}"


def _splits(layout: layout_lib.Layout, axis: str) -> bool:
    return any(layout.mesh.shape[name] > 1 for name in layout.axis_rules[axis].rstrip("?").split(",") if name)


def checks(config: config_lib.Config, assembly: Assembly, target: Target) -> Iterator[tuple[str, str, bool]]:
    """(what, finding, whether it is well) of the data, the disk and the host's memory."""
    yield _check_data(config, assembly)
    state = assembly.plan.state
    saved = sum(
        x.size * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(state.replace(variables=state.variables._replace(frozen=())))
    )
    keep = config.checkpoint.keep + 1  # one more while it is written
    keep += config.train.steps // config.checkpoint.keep_every if config.checkpoint.keep_every else 0
    keep += bool(config.checkpoint.best)
    folder = pathlib.Path(config.workdir).absolute()
    folder = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    text = f"{keep} checkpoints of {_bytes(saved)} need {_bytes(keep * saved)}; {folder} has {_bytes(free)} free"
    yield "disk", text, keep * saved <= free

    local = jax.local_device_count() if target.here else min(target.count, GPUS_PER_NODE if not target.tiled else 4)
    copy = min(local * state_lib.bytes_per_device(state), saved)  # a save goes on from a copy on the host
    rows = 4 * local * sum(device_bytes(x, tiled=False) for x in assembly.plan.batch.values())  # the feed's, and the loader's
    away = local * offloaded(assembly.plan)
    need = copy + rows + away
    if target.here and jax.devices()[0].platform == "cpu":
        yield "host memory", f"{_bytes(need)} for a save and batches on their way, besides what the devices hold", True
        return
    own = f"{_bytes(away)} of it for the optimizer's state, the rest " if away else ""
    text = f"{_bytes(need)}, {own}for a save and batches on their way, on a host of {local} devices"
    if target.here:
        yield "host memory", f"{text}; {_bytes(host_memory())} are available", need <= host_memory()
    else:
        yield "host memory", text, True


def _check_data(config: config_lib.Config, assembly: Assembly) -> tuple[str, str, bool]:
    """Reads one device's rows of a training and of a test batch."""
    source, found = importlib.import_module(config.loader), []
    for split in ("train", "test"):
        began = time.perf_counter()
        loader = source.make_loader(config.data, split=split, rows=feed.rows_of_one(assembly.plan.batch), seed=config.seed)
        try:
            if not loader.n_batches:
                found.append(f"{split} has no rows")
                continue
            loader.seek(0)
            next(loader)
        except ValueError as error:
            return "data", f"{split}: {error}", False
        finally:
            loader.close()
        count = f"{loader.n_batches:,} batches, the first of them" if loader.n_batches > 1 else "1 batch,"
        found.append(f"{split} has {count} read in {time.perf_counter() - began:.1f} s")
    return "data", "; ".join(found), True


def _mesh(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh.items())


def _bytes(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"
