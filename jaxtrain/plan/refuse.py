"""The check before a run allocates anything: whether a step fits on this machine's devices."""

import logging

from jaxtrain.assembly import Assembly
from jaxtrain.parallel import cluster
from jaxtrain.plan.bound import bound
from jaxtrain.plan.compile import compiled
from jaxtrain.plan.memory import in_bytes
from jaxtrain.plan.remedies import ways
from jaxtrain.plan.target import PlanError, parse_target

log = logging.getLogger("jaxtrain")


def refuse_if_too_large(assembly: Assembly) -> None:
    """Raises PlanError if the step needs more memory than a device of this machine has.

    The bytes of state, batch and gradients are exact. If those fit and the lower bound does not,
    the compiler decides. Its program stays in the cache of programs for the run.
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
            size = compiled(assembly, traced).peak
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
