"""A lower bound of a step's memory on one device, read from its jaxpr without compiling it.

A loop (`jax.lax.scan`) writes its stacked results round by round, so each of them is in memory as
a whole from the loop's start to the end of the last loop that reads it. No compiler can fuse it
away or compute it again. Such results are the activations that the forward pass keeps for the
backward pass, and the gradients of stacked layers. The bound is the most of them at any loop:

    a loop that runs    its stacked results, and those of earlier loops that it or a later one reads
    inside its body     the same again, on top
    an outermost loop   its carry too: the sums of gradients over microbatches
    one device          each array divided by the number of devices that may share it

One loop is earlier than another if the other depends on it. The order in the text does not count,
since a compiler may change it. Everything else counts nothing: it may be fused, computed again or
written in place of something else. So the bound has neither the memory of one layer while it is
computed nor the activations of layers that are written out (`model.unroll` = depth).
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jaxtrain.assembly import Assembly
from jaxtrain.plan import memory
from jaxtrain.plan.target import Target
from jaxtrain.step import train_step as step_lib

CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "shard_map",
}
# Their results are their operands under other names.
RENAMES = {
    "copy",
    "optimization_barrier",
    "pcast",
    "pvary",
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
}
ROUND = -1  # among the loops that a value depends on: it is another one in each round of this loop


class Array(NamedTuple):
    bytes: int  # on one device
    name: str  # type, shape and scope


class Bound(NamedTuple):
    """The bytes that a step needs of one device, at least."""

    arguments: int  # of the state and the batch, exactly; without what the step does not read
    update: int  # beyond the arguments: all gradients exist at once
    kept: list[Array]  # beyond the arguments, in the fullest loop; the largest first
    second: int = 0  # of the second state that config.guard.verify_every holds

    @property
    def temporaries(self) -> int:
        return max(self.update, _total(self.kept))

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.second

    @property
    def certain(self) -> int:
        """The part that is plain arithmetic: state, batch and gradients."""
        return self.arguments + self.update + self.second


def bound(assembly: Assembly, traced: jax.stages.Traced, target: Target) -> Bound:
    """Compute the lower bound of a traced step (`Assembly.trace`)."""
    abstract, layout, tiled = assembly.abstract, assembly.layout, target.tiled
    leaves = jax.tree.leaves((abstract.state, abstract.batch, step_lib.abstract_stop(layout)))
    kept, used = kept_by_loops(traced.jaxpr.jaxpr, layout.mesh.size)
    read = [x for x, u in zip(leaves, used, strict=True) if u and not memory.is_on_host(x)]
    arguments = sum(memory.device_bytes(x, tiled=tiled) for x in read)
    least = memory.least(memory.held(abstract, layout, tiled=tiled))
    second = (
        memory.second(abstract, layout, tiled=tiled) if assembly.config.guard.verify_every else 0
    )
    return Bound(arguments, max(0, least - arguments), kept, second)


def kept_by_loops(jaxpr: Any, devices: int) -> tuple[list[Array], list[bool]]:
    """Return the arrays in the fullest loop, the largest first, and which arguments are read."""
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    arguments = [Value(("argument", i), frozenset()) for i in range(len(jaxpr.invars))]
    walk = _Walk(devices, set(arguments))
    walk.block(jaxpr, walk.new(jaxpr.constvars), arguments)
    return sorted(walk.fullest(), reverse=True), used


class Value(NamedTuple):
    """A value of the program. Equal computations have equal values."""

    key: Hashable
    after: frozenset[int]  # the loops that it depends on


class _Loop(NamedTuple):
    after: frozenset[int]  # the loops that it depends on
    reads: set[Hashable]  # keys of what it reads and does not overwrite
    stacks: dict[Hashable, Array]  # by key
    others: list[Array]  # its carry, and what the fullest moment of its body has


class _Walk:
    def __init__(self, share: int, arguments: set[Value] | None):
        """``arguments``: of the step, whose memory a carry may take. None in a loop's body."""
        self._share, self._arguments = share, arguments
        self._loops: list[_Loop] = []
        self._numbers = itertools.count()

    def new(self, variables: Sequence[Any], after: frozenset[int] = frozenset()) -> list[Value]:
        return [Value(("new", next(self._numbers)), after) for _ in variables]

    def fullest(self) -> list[Array]:
        moments = []
        for i, loop in enumerate(self._loops):
            later = [other for n, other in enumerate(self._loops) if n == i or i in other.after]
            read = set().union(*(other.reads for other in later))
            earlier = [self._loops[n].stacks.items() for n in loop.after - {ROUND}]
            waiting = [array for stacks in earlier for key, array in stacks if key in read]
            moments.append([*waiting, *loop.stacks.values(), *loop.others])
        return max(moments, key=_total, default=[])

    def block(self, jaxpr: Any, consts: list[Value], inputs: list[Value]) -> list[Value]:
        known: dict[Any, Value] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
        )

        def value(v: Any) -> Value:
            if isinstance(v, core.Literal):
                return Value(("literal", repr(v.val), str(v.aval)), frozenset())
            return known[v]

        for eqn in jaxpr.eqns:
            known.update(
                zip(eqn.outvars, self._equation(eqn, [value(v) for v in eqn.invars]), strict=True)
            )
        return [value(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(eqn, inputs)
        if name in CALLS:
            return self._call(params, inputs)
        if name in RENAMES:
            return inputs
        # Two equations with programs of their own (kernels, branches) are never equal.
        inner = next(core.jaxprs_in_params(params), None)
        key = hash((name, repr(params) if inner is None else id(eqn), *(v.key for v in inputs)))
        after = frozenset().union(*(v.after for v in inputs))
        return [Value((key, i), after) for i in range(len(eqn.outvars))]

    def _call(self, params: dict[str, Any], inputs: list[Value]) -> list[Value]:
        inner: Any = params.get("jaxpr", params.get("call_jaxpr"))
        share = self._share
        for axis in params.get("newly_manual_axes", ()):  # of a shard_map: shapes are parts inside
            self._share //= params["mesh"].shape[axis]
        closed = isinstance(inner, core.ClosedJaxpr)
        results = self.block(
            inner.jaxpr if closed else inner, self.new(inner.consts if closed else ()), inputs
        )
        self._share = share
        return results

    def _scan(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        params, inner = eqn.params, eqn.params["jaxpr"]
        if "ft_in" in params:  # from jax 0.11 on
            n_consts, n_carry, _ = map(len, params["ft_in"].unpack())
        else:
            n_consts, n_carry = params["num_consts"], params["num_carry"]
        last, length = n_consts + n_carry, params["length"]
        body = _Walk(self._share, None)
        consts = body.new(range(n_consts))
        changing = body.new(range(n_consts, len(inputs)), frozenset({ROUND}))
        made = body.block(inner.jaxpr, body.new(inner.consts), [*consts, *changing])

        after = frozenset().union(*(v.after for v in inputs))
        results = self.new(eqn.outvars, after | {len(self._loops)})
        rows = length - length % params["unroll"]  # those of the loop itself
        is_loop = rows > params["unroll"]  # else all rounds are written out
        stacks, others = {}, body.fullest()
        if is_loop and self._arguments is not None:
            for i, before in enumerate(inputs[n_consts:last]):
                if made[i] != changing[i] and before not in self._arguments:
                    others.append(self._array(eqn, i, 1.0))
        known = dict(zip(changing[n_carry:], inputs[last:], strict=True))
        for i in range(n_carry, len(made) if is_loop else 0):
            if made[i] in known:
                results[i] = known[made[i]]  # equal rows are written once
            elif ROUND in made[i].after:
                known[made[i]] = results[i]
                stacks[results[i].key] = self._array(eqn, i, rows / length)
        reads = {v.key for v in [*inputs[:n_consts], *inputs[last:]]} if is_loop else set()
        self._loops.append(_Loop(after, reads, stacks, others))
        return results

    def _array(self, eqn: Any, i: int, part: float) -> Array:
        aval = eqn.outvars[i].aval
        known = isinstance(aval.dtype, np.dtype)  # a random key's is JAX's own
        size = math.prod(aval.shape) * aval.dtype.itemsize * part if known else 0
        return Array(int(size) // self._share, f"{aval.str_short()} {eqn.source_info.name_stack}")


def _total(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays)
