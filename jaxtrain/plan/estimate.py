"""What a step needs of one device, without compiling it."""

from typing import NamedTuple

import jax
from jax.interpreters import partial_eval

from jaxtrain.assembly import Assembly
from jaxtrain.plan import memory
from jaxtrain.plan.graph import split_of
from jaxtrain.plan.lifetimes import Peak
from jaxtrain.plan.peak import peak
from jaxtrain.plan.target import Target
from jaxtrain.step import train_step as step_lib

SLACK = 0.15  # by which the estimate of a step's peak may be off
DOUBT = 0.5  # by which the estimate of its temporaries may be too large, at the most: what does not fit even so is a problem


class Estimate(NamedTuple):
    """What a step needs of one device, without compiling it."""

    arguments: int  # [bytes] exact
    temporaries: Peak  # about

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries.bytes

    def surely(self) -> float:
        """Bytes that it needs at least, as far as the estimate was ever seen to be wrong."""
        return self.arguments + (1 - DOUBT) * self.temporaries.bytes


def estimate(assembly: Assembly, traced: jax.stages.Traced, target: Target) -> Estimate:
    """Of a traced step (`Assembly.trace`)."""
    state = jax.tree.leaves(assembly.abstract.state)
    leaves = [*state, *jax.tree.leaves((assembly.abstract.batch, step_lib.abstract_stop(assembly.layout)))]
    fullest = peak(
        traced.jaxpr,
        [split_of(x.sharding.spec, x.ndim) for x in leaves],
        dict(assembly.layout.mesh.shape),
        [i < len(state) and not memory.is_on_host(x) for i, x in enumerate(leaves)],
        target.compiler(assembly.config.compiler),
    )
    return Estimate(argument_bytes(assembly, traced, tiled=target.tiled), fullest)


def argument_bytes(assembly: Assembly, traced: jax.stages.Traced, *, tiled: bool) -> int:
    """Bytes on one device of the step's arguments: without those that it does not read, which JAX leaves out of the program."""
    leaves = jax.tree.leaves((assembly.abstract.state, assembly.abstract.batch, step_lib.abstract_stop(assembly.layout)))
    jaxpr = traced.jaxpr.jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    read = [x for x, is_used in zip(leaves, used, strict=True) if is_used and not memory.is_on_host(x)]
    return sum(memory.device_bytes(x, tiled=tiled) for x in read)
