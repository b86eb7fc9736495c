"""The check before a run that a step fits, and single changes of a config for one that does not."""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.config import factories
from jaxtrain.parallel import cluster
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan.bound import bound
from jaxtrain.plan.compile import compiled
from jaxtrain.plan.memory import in_bytes, least, offloaded
from jaxtrain.plan.target import PlanError, Target, abstractly, parse_target

NARROWER = {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}  # moments
log = logging.getLogger("jaxtrain")


def refuse_if_too_large(assembly: Assembly) -> None:
    """Raise PlanError if the step needs more memory than a device of this machine has.

    The bytes of state, batch and gradients are exact. If those fit and the lower bound does not,
    the compiler decides, whose program stays in the cache for the run.
    """
    config = assembly.config
    target = parse_target("")
    memory = target.memory
    stage = assembly.task.stage(config.train.steps - 1)  # the batch is of the largest bucket
    traced = assembly.trace(stage)
    lower_bound = bound(assembly, traced, target)
    size = float(lower_bound.certain)
    amount = f"at least {in_bytes(lower_bound.certain)}"
    beyond = None
    if cluster.agree(size <= memory < lower_bound.peak):
        log.info("a step may need more memory than there is: it is compiled now, to be sure")
        try:
            size = compiled(assembly, traced).peak + lower_bound.second
            beyond = size - lower_bound.peak
            amount = f"{in_bytes(size)}, by its compiler,"
        except PlanError as error:
            size = max(lower_bound.peak, memory + 1)
            amount = f"at least {in_bytes(size)} ({error})"
    if size > memory:
        raise PlanError(
            f"a step needs {amount} on each device, {in_bytes(lower_bound.arguments)} of it for "
            f"state and batch, and each of {target.name} has {in_bytes(memory)}: "
            f"{in_bytes(size - memory)} too little. {ways(config, target, beyond)}. "
            "--plan shows it all"
        )


def remedies(config: config_lib.Config, target: Target, beyond: float | None = None) -> list[str]:
    """List single changes of the config whose step may fit, each with its memory.

    ``beyond``: bytes of the compiled step beyond its lower bound, in proportion to the rows of a
    microbatch. None = unknown: each change has its lower bound.
    """
    changes = dict(_changes(config, target))

    @functools.cache
    def size_of(change: str) -> float:
        changed = changes[change]
        rows = config.train.accumulate / changed.train.accumulate
        return size(changed, target, rows * (beyond or 0.0))

    by_kind: dict[str, list[str]] = {}
    for change in changes:
        by_kind.setdefault(change.partition("=")[0], []).append(change)
    accuracy = "at least" if beyond is None else "about"
    fitting = []
    for changes_of_kind in by_kind.values():
        remedy = _first_that_fits(changes_of_kind, size_of, target.memory)
        if remedy:
            fitting.append(f"{remedy} would make it {accuracy} {in_bytes(size_of(remedy))}")
    return fitting


def _first_that_fits(
    changes: Sequence[str], size_of: Callable[[str], float], memory: float
) -> str | None:
    for change in changes:
        size = size_of(change)
        if size <= memory:
            return change
        # The last one changes most. If it does not fit, none of its kind does.
        if size > memory and _last_size(changes, size_of) > memory:
            return None
    return None


def _last_size(changes: Sequence[str], size_of: Callable[[str], float]) -> float:
    """Return the size by the last change that does not contradict the config."""
    return next(size for change in reversed(changes) if not math.isnan(size := size_of(change)))


def size(config: config_lib.Config, target: Target, beyond: float) -> float:
    """Return the bytes of a step on a device, NaN if the config contradicts itself."""
    try:
        assembly = abstractly(config, target)
        on_host = offloaded(assembly.abstract)  # all of it is on the device during the update
        if least(assembly, tiled=target.tiled) + on_host > target.memory:  # it needs no trace
            return math.inf
        traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
        lower_bound = bound(assembly, traced, target)
        return max(lower_bound.peak, lower_bound.certain + on_host) + beyond
    except (ValueError, TypeError):
        return math.nan


NO_CHANGE = "No single change would make it fit"


def ways(config: config_lib.Config, target: Target, beyond: float | None = None) -> str:
    """Write `remedies` as a sentence without its full stop."""
    changes = remedies(config, target, beyond)
    if not changes:
        return NO_CHANGE
    return f"One of these may do: {'; '.join(changes)}"


def _changes(config: config_lib.Config, target: Target) -> Iterator[tuple[str, config_lib.Config]]:
    """Yield single changes as arguments, each with the config that it makes."""
    yield from _changes_of_mesh(config, target)
    model, train, optim = config.model, config.train, config.optim
    if getattr(model, "remat", "") == "none":
        change = "--config.model.remat=full"
        yield change, replace(config, model=replace(model, remat="full"))
    for k in range(1, 11):
        n = train.accumulate * 2**k
        change = f"--config.train.accumulate={n}"
        yield change, replace(config, train=replace(train, accumulate=n))
    if getattr(model, "dtype", "") == "float32":
        change = "--config.model.dtype=bfloat16"
        yield change, replace(config, model=replace(model, dtype="bfloat16"))
    narrower = NARROWER.get(optim.moments, ())
    if factories.is_factory(optim.name):
        narrower = ()
    for moments in narrower:
        change = f"--config.optim.moments={moments}"
        yield change, replace(config, optim=replace(optim, moments=moments))
    if not optim.offload:
        change = "--config.optim.offload=true"
        yield change, replace(config, optim=replace(optim, offload=True))
    if config.guard.verify_every:
        change = "--config.guard.verify_every=0"
        yield change, replace(config, guard=replace(config.guard, verify_every=0))
    if train.ema:
        change = "--config.train.ema=0"
        yield change, replace(config, train=replace(train, ema=0.0))


def _changes_of_mesh(
    config: config_lib.Config, target: Target
) -> Iterator[tuple[str, config_lib.Config]]:
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    data, fsdp, model = layout_lib.mesh_sizes(sizes, target.count, target.name)
    for k in range(2, data + 1):
        if data % k == 0:
            change = f"--config.mesh.fsdp={fsdp * k} --config.mesh.data={data // k}"
            mesh = replace(config.mesh, data=data // k, fsdp=fsdp * k, model=model)
            yield change, replace(config, mesh=mesh)
