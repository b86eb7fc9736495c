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
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.plan import memory
from jaxtrain.plan.target import Target, abstractly
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
    update: int  # beyond the arguments: all gradients exist at once, but for `Task.measured`
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
    loops, is_read = kept_by_loops(traced.jaxpr.jaxpr, layout.mesh.size)
    leaves = jax.tree.leaves((abstract.state, abstract.batch, step_lib.abstract_stop(layout)))
    arguments = 0
    for leaf, leaf_is_read in zip(leaves, is_read, strict=True):
        if leaf_is_read and not memory.is_on_host(leaf):
            arguments += memory.device_bytes(leaf, tiled=tiled)
    least = memory.least(assembly, tiled=tiled)
    second = 0
    if assembly.config.guard.verify_every:
        second = memory.second(abstract, layout, tiled=tiled)
    return Bound(arguments, max(0, least - arguments), loops, second)


def bound_of(config: config_lib.Config, target: Target) -> Bound:
    """Compute the lower bound of a loop over layers: if they are written out, it has none.

    An offloaded state counts, since all of it is on the device during the update.
    """
    if getattr(config.model, "unroll", 1) != 1:
        config = replace(config, model=replace(config.model, unroll=1))
    assembly = abstractly(config, target)
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    lower = bound(assembly, traced, target)
    return lower._replace(update=lower.update + memory.offloaded(assembly.abstract))


def kept_by_loops(jaxpr: Any, devices: int) -> tuple[list[Array], list[bool]]:
    """Return the arrays in the fullest loop, the largest first, and which arguments are read."""
    jaxpr, is_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    arguments = [Value(("argument", i), frozenset()) for i in range(len(jaxpr.invars))]
    walk = _Walk(devices, set(arguments))
    walk.block(jaxpr, walk.new(jaxpr.constvars), arguments)
    return sorted(walk.fullest(), reverse=True), is_read


class Value(NamedTuple):
    """A value of the program. Equal computations have equal values."""

    key: Hashable
    loops: frozenset[int]  # that it depends on


def _loops_of(values: Sequence[Value]) -> frozenset[int]:
    return frozenset().union(*(value.loops for value in values))


class _Loop(NamedTuple):
    loops: frozenset[int]  # that it depends on
    reads: set[Hashable]  # keys of what it reads and does not overwrite
    stacks: dict[Hashable, Array]  # by key
    carry_and_body: list[Array]  # its carry, and what the fullest moment of its body has


class _Scan(NamedTuple):
    """The parameters of a loop. Its inputs are constants, the carry and stacked rows."""

    n_consts: int
    n_carry: int
    length: int
    unroll: int

    @property
    def rounds(self) -> int:
        """The rounds of the loop itself; those left over are written out after it."""
        return self.length - self.length % self.unroll

    @property
    def is_loop(self) -> bool:
        return self.rounds > self.unroll  # else all rounds are written out


class _Walk:
    def __init__(self, share: int, arguments: set[Value] | None):
        """``arguments``: of the step, whose memory a carry may take. None in a loop's body."""
        self._share = share
        self._arguments = arguments
        self._loops: list[_Loop] = []
        self._numbers = itertools.count()

    def new(self, variables: Sequence[Any], loops: frozenset[int] = frozenset()) -> list[Value]:
        return [Value(("new", next(self._numbers)), loops) for _ in variables]

    def fullest(self) -> list[Array]:
        """Return the arrays that are in memory while the fullest loop runs."""
        moments = [self._arrays_during(number) for number in range(len(self._loops))]
        return max(moments, key=_total, default=[])

    def _arrays_during(self, number: int) -> list[Array]:
        running = self._loops[number]
        read_now_or_later = set(running.reads)
        for loop in self._loops:
            if number in loop.loops:
                read_now_or_later |= loop.reads
        waiting = []
        for earlier in running.loops - {ROUND}:
            for key, array in self._loops[earlier].stacks.items():
                if key in read_now_or_later:
                    waiting.append(array)
        return [*waiting, *running.stacks.values(), *running.carry_and_body]

    def block(self, jaxpr: Any, consts: list[Value], inputs: list[Value]) -> list[Value]:
        """Walk through the equations of a jaxpr. Returns the values of its results."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Any, Value] = dict(zip(variables, [*consts, *inputs], strict=True))

        def value(v: Any) -> Value:
            if isinstance(v, core.Literal):
                return Value(("literal", repr(v.val), str(v.aval)), frozenset())
            return values[v]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [value(v) for v in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
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
        has_program = next(core.jaxprs_in_params(params), None) is not None
        identity = id(eqn) if has_program else repr(params)
        key = hash((name, identity, *(value.key for value in inputs)))
        loops = _loops_of(inputs)
        return [Value((key, i), loops) for i in range(len(eqn.outvars))]

    def _call(self, params: dict[str, Any], inputs: list[Value]) -> list[Value]:
        jaxpr: Any = params.get("jaxpr", params.get("call_jaxpr"))
        consts: Sequence[Any] = ()
        if isinstance(jaxpr, core.ClosedJaxpr):
            consts = jaxpr.consts
            jaxpr = jaxpr.jaxpr
        share = self._share
        for axis in params.get("newly_manual_axes", ()):  # of a shard_map: shapes are parts inside
            self._share //= params["mesh"].shape[axis]
        results = self.block(jaxpr, self.new(consts), inputs)
        self._share = share
        return results

    def _scan(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        scan = _scan_of(eqn.params)
        first_row = scan.n_consts + scan.n_carry
        consts, rows = inputs[: scan.n_consts], inputs[first_row:]
        body = _Walk(self._share, None)
        body_consts = body.new(consts)
        changing = body.new(inputs[scan.n_consts :], frozenset({ROUND}))
        closed = eqn.params["jaxpr"]
        body_results = body.block(closed.jaxpr, body.new(closed.consts), [*body_consts, *changing])

        loops = _loops_of(inputs)
        results = self.new(eqn.outvars, loops | {len(self._loops)})
        stacks: dict[Hashable, Array] = {}
        carry_and_body = body.fullest()
        reads: set[Hashable] = set()
        if scan.is_loop:
            if self._arguments is not None:
                for i, initial in enumerate(inputs[scan.n_consts : first_row]):
                    if body_results[i] != changing[i] and initial not in self._arguments:
                        carry_and_body.append(self._array(eqn, i, 1.0))
            # From a row of the body to the stacked array that has it.
            stacked = dict(zip(changing[scan.n_carry :], rows, strict=True))
            for i in range(scan.n_carry, len(body_results)):
                row = body_results[i]
                if row in stacked:
                    results[i] = stacked[row]  # equal rows are written once
                elif ROUND in row.loops:
                    stacked[row] = results[i]
                    part = scan.rounds / scan.length
                    stacks[results[i].key] = self._array(eqn, i, part)
            reads = {value.key for value in [*consts, *rows]}
        self._loops.append(_Loop(loops, reads, stacks, carry_and_body))
        return results

    def _array(self, eqn: Any, i: int, part: float) -> Array:
        aval = eqn.outvars[i].aval
        size = 0.0
        if isinstance(aval.dtype, np.dtype):  # a random key's is JAX's own
            size = math.prod(aval.shape) * aval.dtype.itemsize * part
        return Array(int(size) // self._share, f"{aval.str_short()} {eqn.source_info.name_stack}")


def _scan_of(params: dict[str, Any]) -> _Scan:
    if "ft_in" in params:  # from jax 0.11 on
        n_consts, n_carry, _ = map(len, params["ft_in"].unpack())
    else:
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    return _Scan(n_consts, n_carry, params["length"], params["unroll"])


def _total(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays)
