"""The time that a step waits for exchanges between chips, by the order of its compiled program.

The program's text is scheduled: an exchange runs from its start to the instruction that waits for
it, and the kernels between hide it. A walk through the text keeps a clock:

    kernels     take the time of their roofline (`traffic`), or of a forecast
    exchanges   take their bytes by the rate of their links, one after the other on the same links
    waits       last until the exchange has ended. That time is exposed
    fusions     of TPUs can hold exchanges. Of a product, it takes the longer of both. Others wait
    loops       are walked through twice. The other rounds are as the second
    conditions  take the branch with the longest kernels

An exchange between nodes and one within a node use different links. It is an estimate for comparing
programs and meshes, not a measurement: the kernels of an exchange also take multiprocessors and
memory, and attention's products are in no text.

GPUs pass an exchange on in a ring, and each of its steps takes a latency, however few its bytes
are. NCCL's own model (src/graph/tuning.cc, protocol LL128) has the latencies. It also knows trees
for sums, whose steps grow with the logarithm of the nodes. No latency is counted for TPUs.

On TPUs a permute by one place along a mesh axis takes one link of each chip, and one by more places
shares each link with the others on their way. A ring of links has one for each direction, so that
two permutes in opposite directions go at once. In a row that is not closed, the part from its end
to its begin takes the links of the other direction. Other exchanges take all links of a chip.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from jaxtrain.plan import hlo
from jaxtrain.plan.hlo import Collective, Instruction, Program
from jaxtrain.plan.target import Target

# Share of the datasheet's links that rings of NCCL reach: 370 of 450 GB/s on an H100's NVLink
# (nccl-tests, issue 212).
RING = 0.82
NVLINK_STEP, NETWORK_STEP = 1.9e-6, 4.0e-6  # [s] of a ring
NVLINK_TREE_STEP, NETWORK_TREE_STEP = 1.2e-6, 8.5e-6  # [s] of a tree
PERMUTE = "collective-permute"
Axes = tuple[str, ...]
Lane = tuple[str, ...]  # links. One that begins as another one has, is a part of it
NETWORK, WITHIN = ("network",), ("within",)


class Routes(Protocol):
    """The ways of values between devices."""

    def lane(self, collective: Collective) -> Lane:
        """Return the links of an exchange, which have one exchange at a time."""

    def seconds(self, collective: Collective) -> float:
        """Return the time of one execution."""


class Links(NamedTuple):
    within: float  # [bytes/s] that a GPU sends to others of its node
    network: float  # [bytes/s] that it sends to other nodes
    per_node: int  # GPUs of a node
    has_latency: bool = False  # of GPUs, by NCCL's model
    link: float = 0.0  # [bytes/s] of one link of a TPU in one direction; 0 = there is a switch
    ring: int = 0  # devices of a mesh axis, or their divisor, that is a ring of links; 0 = none is
    mesh: Mapping[str, int] = {}  # axis -> size, to know the links of a permute

    def lane(self, collective: Collective) -> Lane:
        if any(len(self._members(group)) > 1 for group in collective.groups):
            return NETWORK
        shifts = self._shifts(collective)
        if len(shifts) != 1:
            return WITHIN
        [(axis, places)] = shifts
        size = self.mesh[axis]
        if not self.ring or size % self.ring:
            return (*WITHIN, axis)
        return (*WITHIN, axis, "forwards" if 2 * places <= size else "backwards")

    def _shifts(self, collective: Collective) -> set[tuple[str, int]]:
        """Return those of a permute over single links, none of another exchange."""
        if not (self.link and self.mesh and collective.kind == PERMUTE):
            return set()
        return collective.shifts(self.mesh)

    def seconds(self, collective: Collective) -> float:
        """Return the time of one execution."""
        rate = self.within
        for axis, places in self._shifts(collective):
            n_shared = min(places, self.mesh[axis] - places)
            rate = min(rate, self.link / n_shared)
        for group in collective.groups:
            members = self._members(group)
            if len(members) > 1:  # a ring leaves each node once, over the adapters of its members
                rate = min(rate, min(members.values()) * self.network)
        return collective.sent / collective.times / rate + self.latency(collective)

    def latency(self, collective: Collective) -> float:
        """Return the seconds of one execution that do not depend on its bytes."""
        if not self.has_latency or collective.kind == PERMUTE:
            return 0.0
        return max(self._latency(collective.kind, group) for group in collective.groups)

    def _latency(self, kind: str, group: Sequence[int]) -> float:
        n_nodes = len(self._members(group))
        ring = (len(group) - n_nodes) * NVLINK_STEP + (n_nodes - 1) * NETWORK_STEP
        if kind != "all-reduce":
            return ring
        depth = math.log2(n_nodes)
        tree = (len(group) / n_nodes - 1) * NVLINK_TREE_STEP + depth * NETWORK_TREE_STEP
        return 2 * min(ring, tree)

    def _members(self, group: Sequence[int]) -> Mapping[int, int]:
        """Return node -> how many of a group's GPUs it has."""
        return collections.Counter(place // self.per_node for place in group)


def links_of(target: Target, mesh: Mapping[str, int]) -> Links:
    """Return the links of a target of GPUs, or of slices of TPUs, for a mesh (axis -> size)."""
    per_node = jax.local_device_count() if target.here else target.count // target.slices
    share = 1.0 if target.tiled else RING
    return Links(
        target.links * share,
        target.known_chip.network,
        per_node,
        has_latency=not target.tiled,
        link=target.link,
        ring=target.ring,
        mesh=mesh,
    )


class Exchange(NamedTuple):
    """All exchanges of a step over the same mesh axes."""

    link: float  # [s] on the links
    exposed: float  # [s] of it that no kernel hides


class Exposure(NamedTuple):
    computing: float  # [s] of the kernels
    exchanges: dict[Axes, Exchange]  # by mesh axes, the longest first
    kernels: Mapping[str, float] = {}  # name -> [s] of all executions in a step

    @property
    def exposed(self) -> float:
        return sum(exchange.exposed for exchange in self.exchanges.values())

    @property
    def link(self) -> float:
        return sum(exchange.link for exchange in self.exchanges.values())

    @property
    def share(self) -> float:
        """The exposed share of the step."""
        seconds = self.computing + self.exposed
        return self.exposed / seconds if seconds else 0.0


def exposure(
    program: Program, mesh: Mapping[str, int], seconds: Mapping[str, float], links: Routes
) -> Exposure:
    """Estimate the exposed time of a scheduled program on a mesh (axis -> size).

    ``seconds``: of one execution of each kernel, by its name.
    """
    walk = _Walk(program, seconds, links, mesh)
    for name in program.entries:
        walk.through(name)
    exchanges = {axes: Exchange(walk.link[axes], walk.exposed[axes]) for axes in walk.link}
    longest_first = sorted(exchanges.items(), key=lambda item: -item[1].link)
    return Exposure(sum(walk.kernels.values()), dict(longest_first), dict(walk.kernels))


class _Running(NamedTuple):
    axes: Axes
    end: float  # by the clock


class _Walk:
    def __init__(
        self,
        program: Program,
        seconds: Mapping[str, float],
        links: Routes,
        mesh: Mapping[str, int],
    ):
        self._program, self._seconds, self._links, self._mesh = program, seconds, links, mesh
        self._clock = 0.0
        self._free: dict[Lane, float] = {}  # when these links are free
        self._weight = 1.0  # rounds that one round stands for
        self._lengths: dict[str, float] = {}  # of computations
        self.kernels: dict[str, float] = collections.defaultdict(float)
        self.link: dict[Axes, float] = collections.defaultdict(float)
        self.exposed: dict[Axes, float] = collections.defaultdict(float)

    def through(self, computation: str) -> None:
        running: dict[str, list[_Running]] = {}
        for i in self._program.bodies.get(computation, ()):
            collectives = list(self._collectives(computation, i))
            if collectives:
                exchanges = [self._begin(each) for each in collectives]
                is_async = any(each.is_async for each in collectives)
                if i.op.endswith("-start") and is_async:
                    running[i.name] = exchanges
                    continue
                if is_async:  # within a product
                    self._compute(i.name)
                self._wait(exchanges)
            elif i.op.endswith("-done"):
                for name in i.operands:
                    self._wait(running.pop(name, []))
            elif i.op == "while":
                self._loop(i)
            elif i.op == "conditional":
                self.through(max(self._called(i), key=self._length))
            else:
                self._compute(i.name)
                for target in self._called(i):
                    self.through(target)

    def _length(self, computation: str) -> float:
        """Return the seconds of a computation's kernels, each loop's of one round."""
        if computation not in self._lengths:
            seconds = 0.0
            for i in self._program.bodies[computation]:
                seconds += self._seconds.get(i.name, 0.0)
                seconds += sum(self._length(target) for target in self._called(i))
            self._lengths[computation] = seconds
        return self._lengths[computation]

    def _collectives(self, computation: str, i: Instruction) -> Iterator[Collective]:
        """Yield the exchange that an instruction is, or those inside of its kernel."""
        if found := hlo.collective(self._program, computation, i):
            yield found
        if i.op in ("async-start", "fusion"):
            for _, target in i.called:
                for inner in self._program.bodies.get(target, ()):
                    yield from self._collectives(target, inner)

    def _called(self, i: Instruction) -> Iterator[str]:
        for _, target in i.called:
            if target in self._program.bodies and target not in self._program.inlined:
                yield target

    def _begin(self, collective: Collective) -> _Running:
        axes = collective.axes(self._mesh)
        seconds = self._links.seconds(collective)
        lane = self._links.lane(collective)
        self.link[axes] += self._weight * seconds
        begin = self._clock
        for other, free in self._free.items():
            n = min(len(lane), len(other))
            if lane[:n] == other[:n]:
                begin = max(begin, free)
        self._free[lane] = begin + seconds
        return _Running(axes, self._free[lane])

    def _wait(self, exchanges: Sequence[_Running]) -> None:
        for exchange in exchanges:
            waiting = max(0.0, exchange.end - self._clock)
            self.exposed[exchange.axes] += self._weight * waiting
            self._clock += waiting

    def _compute(self, kernel: str) -> None:
        if seconds := self._seconds.get(kernel, 0.0):
            self._clock += seconds
            self.kernels[kernel] += self._weight * seconds

    def _loop(self, i: Instruction) -> None:
        rounds = hlo.trips(i, self._program.bodies) or 1
        bodies = [target for role, target in i.called if role == "body"]
        weight = self._weight
        for of_round in (1, rounds - 1) if rounds > 1 else (rounds,):
            self._weight = weight * of_round
            for body in bodies:
                self.through(body)
        self._weight = weight
