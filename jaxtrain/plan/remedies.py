"""The check before a run that a step fits, and single changes of a config for one that does not."""

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.config import factories
from jaxtrain.parallel import cluster
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan.bound import bound
from jaxtrain.plan.compile import compiled
from jaxtrain.plan.memory import held, in_bytes, least, offloaded
from jaxtrain.plan.target import PlanError, Target, abstractly, parse_target

log = logging.getLogger("jaxtrain")


def refuse_if_too_large(assembly: Assembly) -> None:
    """Raise PlanError if the step needs more memory than a device of this machine has.

    The bytes of state, batch and gradients are exact. If those fit and the lower bound does not,
    the compiler decides, whose program stays in the cache for the run.
    """
    config, target = assembly.config, parse_target("")
    memory = target.memory
    stage = assembly.task.stage(config.train.steps - 1)  # the batch is of the largest bucket
    traced = assembly.trace(stage)
    needed = bound(assembly, traced, target)
    size, amount = float(needed.certain), f"at least {in_bytes(needed.certain)}"
    beyond = None
    if cluster.agree(size <= memory < needed.peak):
        log.info("a step may need more memory than there is: it is compiled now, to be sure")
        try:
            size = compiled(assembly, traced).peak + needed.second
            beyond, amount = size - needed.peak, f"{in_bytes(size)}, by its compiler,"
        except PlanError as error:
            size = max(needed.peak, memory + 1)
            amount = f"at least {in_bytes(size)} ({error})"
    if size > memory:
        raise PlanError(
            f"a step needs {amount} on each device, {in_bytes(needed.arguments)} of it for state "
            f"and batch, and each of {target.name} has {in_bytes(memory)}: "
            f"{in_bytes(size - memory)} too little. {ways(config, target, beyond)}. "
            "--plan shows it all"
        )


def remedies(config: config_lib.Config, target: Target, beyond: float | None = None) -> list[str]:
    """List single changes of the config whose step may fit, each with its memory.

    ``beyond``: bytes of the compiled step beyond its lower bound, in proportion to the rows of a
    microbatch. None = unknown: each change has its lower bound.
    """

    @functools.cache
    def needed(text: str) -> float:
        """Return the bytes on a device, NaN if the change contradicts the rest of the config."""
        try:
            assembly = abstractly(changed[text], target)
            parts = held(assembly.abstract, assembly.layout, tiled=target.tiled)
            away = offloaded(assembly.abstract)  # all of it is on the device during the update
            if least(parts) + away > memory:  # it needs no trace
                return math.inf
            traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
            rows = config.train.accumulate / changed[text].train.accumulate
            found = bound(assembly, traced, target)
            return max(found.peak, found.certain + away) + rows * (beyond or 0.0)
        except (ValueError, TypeError):
            return math.nan

    changed, memory = dict(_changes(config, target)), target.memory
    kinds: dict[str, list[str]] = {}
    for text in changed:
        kinds.setdefault(text.partition("=")[0], []).append(text)
    fitting, how = [], "at least" if beyond is None else "about"
    for texts in kinds.values():
        for text in texts:
            if needed(text) <= memory:
                fitting.append(f"{text} would make it {how} {in_bytes(needed(text))}")
                break
            # The last one changes most. If it does not fit, none of its kind does.
            every = map(needed, reversed(texts))
            if needed(text) > memory and next(n for n in every if not math.isnan(n)) > memory:
                break
    return fitting


def ways(config: config_lib.Config, target: Target, beyond: float | None = None) -> str:
    """Write `remedies` as a sentence without its full stop."""
    if not (changes := remedies(config, target, beyond)):
        return "No single change would make it fit"
    return f"One of these may do: {'; '.join(changes)}"


def _changes(config: config_lib.Config, target: Target) -> Iterator[tuple[str, config_lib.Config]]:
    m, t = config.mesh, config.train
    data, fsdp, model = layout_lib.mesh_sizes((m.data, m.fsdp, m.model), target.count, target.name)
    for n in (fsdp * k for k in range(2, data + 1) if data % k == 0):
        text = f"--config.mesh.fsdp={n} --config.mesh.data={data * fsdp // n}"
        yield text, replace(config, mesh=replace(m, data=data * fsdp // n, fsdp=n, model=model))
    if getattr(config.model, "remat", "") == "none":
        yield (
            "--config.model.remat=full",
            replace(config, model=replace(config.model, remat="full")),
        )
    for n in (t.accumulate * 2**k for k in range(1, 11)):
        yield f"--config.train.accumulate={n}", replace(config, train=replace(t, accumulate=n))
    if getattr(config.model, "dtype", "") == "float32":
        yield (
            "--config.model.dtype=bfloat16",
            replace(config, model=replace(config.model, dtype="bfloat16")),
        )
    o = config.optim
    narrower = {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}.get(o.moments, ())
    for moments in () if factories.is_factory(o.name) else narrower:
        yield (
            f"--config.optim.moments={moments}",
            replace(config, optim=replace(o, moments=moments)),
        )
    if not o.offload:
        yield "--config.optim.offload=true", replace(config, optim=replace(o, offload=True))
    if config.guard.verify_every:
        yield (
            "--config.guard.verify_every=0",
            replace(config, guard=replace(config.guard, verify_every=0)),
        )
    if t.ema:
        yield "--config.train.ema=0", replace(config, train=replace(t, ema=0.0))
