"""What a step holds at its peak, on one device, estimated from its jaxpr without compiling it.

The jaxpr is walked once (`jaxtrain.plan.peak_rules`). Every array is followed with the mesh axes that split its dimensions
(batch, fsdp and model spread from the arguments and from the constraints in the program as XLA's partitioner spreads them), so
that sizes are those of one device. Then it is decided what becomes an array in memory at all, and a last pass counts what lives
at the same time (`jaxtrain.plan.lifetimes`).

It is an estimate. Its tests compare it with the compilers' own figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.interpreters import partial_eval

from jaxtrain.plan import lifetimes, peak_rules
from jaxtrain.plan.graph import Compiler, Graph, Split, Value, constants, pin
from jaxtrain.plan.lifetimes import Peak


def peak(closed: Any, splits: Sequence[Split], mesh: Mapping[str, int], donated: Sequence[bool], compiler: Compiler) -> Peak:
    """The fullest moment of a closed jaxpr whose arguments are split over a mesh (axis -> size) as ``splits`` says.

    Args:
      donated: for each argument, whether a result may take its place. What is in host memory may not.
    """
    jaxpr = closed.jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    graph = Graph(mesh, compiler)
    split = [s for s, u in zip(splits, used, strict=True) if u]
    free = [d for d, u in zip(donated, used, strict=True) if u]
    avals = [cast(jax.core.ShapedArray, v.aval) for v in jaxpr.invars]
    inputs = [Value(aval.shape, aval.dtype, s, None) for aval, s in zip(avals, split, strict=True)]
    outputs = peak_rules.block(graph, jaxpr, constants(closed.consts), inputs)
    if compiler.halves:  # GPUs and TPUs were seen to
        pin(graph.nodes)
    given = [v for v, f in zip(inputs, free, strict=True) if f]
    return lifetimes.fullest(graph, inputs, outputs, reusable={id(v) for v in given}, replaced=_pairs(given, outputs))


def _pairs(given: Sequence[Value], outputs: Sequence[Value]) -> list[tuple[Value, Value]]:
    """Donated inputs, each with the result that takes its place: the next of its kind, as JAX matches them."""
    free: dict[tuple[Sequence[int], np.dtype], list[Value]] = {}
    for v in reversed(outputs):
        if not v.on_host:
            free.setdefault((v.shape, v.dtype), []).append(v)
    return [(v, free[v.shape, v.dtype].pop()) for v in given if free.get((v.shape, v.dtype))]
