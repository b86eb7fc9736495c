"""The check before a run allocates anything: whether a step fits on this machine's devices."""

import logging

from jaxtrain.assembly import Assembly
from jaxtrain.parallel import cluster
from jaxtrain.plan.compile import compiled
from jaxtrain.plan.errors import PlanError
from jaxtrain.plan.estimate import SLACK, Estimate, estimate
from jaxtrain.plan.memory import held, in_bytes, least
from jaxtrain.plan.remedies import ways
from jaxtrain.plan.target import Target, parse_target

log = logging.getLogger("jaxtrain")


def refuse_if_too_large(assembly: Assembly) -> None:
    """Raises PlanError when the step needs more than this machine's devices hold, with what would make it fit.

    The bytes of its arguments and gradients are exact. Otherwise the estimate only decides when to ask the compiler, which
    has the last word: a step that it finds to fit is not refused. Its program stays in the cache of programs for the run.
    """
    target = parse_target("")
    memory = target.memory
    traced = assembly.trace(assembly.task.stage(assembly.config.train.steps - 1))  # of a batch of the largest bucket
    needed = estimate(assembly, traced, target)
    size, factor = certain(assembly, needed, target), 1.0
    amount = f"at least {in_bytes(size)}"
    if cluster.agree(size <= memory < (1 + SLACK) * needed.peak):
        log.info("a step may need more memory than there is: it is compiled now, to be sure")
        try:
            size = compiled(assembly, traced).peak
            amount, factor = f"{in_bytes(size)}, by its compiler,", size / needed.peak
        except PlanError as error:
            size = max(needed.peak, int(memory) + 1)
            amount = f"about {in_bytes(size)} ({error})"
    if size > memory:
        raise PlanError(
            f"a step needs {amount} on each device, {in_bytes(needed.arguments)} of it for state and batch, and each of "
            f"{target.name} has {in_bytes(memory)}: {in_bytes(size - memory)} too little. "
            f"{ways(assembly.config, target, factor)}. --plan shows it all"
        )


def certain(assembly: Assembly, needed: Estimate, target: Target) -> int:
    """Bytes that are needed whatever the compiler does."""
    return max(needed.arguments, least(held(assembly.abstract, assembly.layout, tiled=target.tiled)))
