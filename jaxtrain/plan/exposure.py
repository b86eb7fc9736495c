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
memory, and the products of Pallas' attention are in no text.

GPUs pass an exchange on in a ring, and each of its steps takes a latency, however few its bytes
are. NCCL's own model (src/graph/tuning.cc, protocol LL128) has the latencies. It also knows trees
for sums, whose steps grow with the logarithm of the nodes. No latency is counted for TPUs.

On TPUs an exchange takes the links along the sides of the slice that its group spans (`torus`). Two
exchanges go at once if they share no way along a side.
"""

import collections
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from jaxtrain.plan import hlo
from jaxtrain.plan.hlo import Collective, Instruction, Program
from jaxtrain.plan.target import Target
from jaxtrain.plan.torus import Torus, torus_of

# Share of the datasheet's links that rings of NCCL reach: 370 of 450 GB/s on an H100's NVLink
# (nccl-tests, issue 212).
RING = 0.82
NVLINK_STEP, NETWORK_STEP = 1.9e-6, 4.0e-6  # [s] of a ring
NVLINK_TREE_STEP, NETWORK_TREE_STEP = 1.2e-6, 8.5e-6  # [s] of a tree
PERMUTE, ALL_TO_ALL = "collective-permute", "all-to-all"
Axes = tuple[str, ...]
Lanes = frozenset[Hashable]
NETWORK, WITHIN = frozenset({"network"}), frozenset({"within"})


class Routes(Protocol):
    """The ways of values between devices."""

    def lanes(self, collective: Collective) -> Lanes:
        """Return the links of an exchange. Each of them has one exchange at a time."""

    def seconds(self, collective: Collective) -> float:
        """Return the time of one execution."""


class Links(NamedTuple):
    within: float  # [bytes/s] that a GPU sends to others of its node
    network: float  # [bytes/s] that it sends to other nodes
    per_node: int  # GPUs of a node
    has_latency: bool = False  # of GPUs, by NCCL's model
    torus: Torus | None = None  # of a slice of TPUs
    link: float = 0.0  # [bytes/s] of one link of a chip in one direction, with a torus
    devices: int = 1  # that share a chip's links

    def lanes(self, collective: Collective) -> Lanes:
        if any(len(self._members(group)) > 1 for group in collective.groups):
            return NETWORK
        if self.torus is None:
            return WITHIN
        if collective.kind == PERMUTE:
            _, ways = self.torus.routed(self._pairs(collective))
            return ways
        return frozenset(self.torus.ways(self._first_part(collective)))

    def seconds(self, collective: Collective) -> float:
        """Return the time of one execution."""
        sent = collective.sent / collective.times
        within = sent / self.within if self.torus is None else self._on_torus(collective, sent)
        between = (self._between(collective.kind, group, sent) for group in collective.groups)
        return max(within, *between) + self.latency(collective)

    def _on_torus(self, collective: Collective, sent: float) -> float:
        """Return the time of an exchange, or of its part within a slice, of TPUs."""
        assert self.torus is not None
        if collective.kind == PERMUTE:
            load, _ = self.torus.routed(self._pairs(collective))
            return max(sent / self.within, load * sent / self.link)
        own, n_members = self._first_part(collective), len(collective.groups[0])
        of_device = self.link / self.devices
        if collective.kind == ALL_TO_ALL:
            values = sent * len(own) / (n_members - 1)
            return max(sent / self.within, self.torus.crossing(own) * values / of_device)
        n_links = self.torus.links(own)
        return sent / (n_links * of_device) if n_links else sent / self.within

    def _between(self, kind: str, group: Sequence[int], sent: float) -> float:
        """Return the time of a group's exchange between nodes."""
        members = self._members(group)
        if len(members) == 1:
            return 0.0
        least = min(members.values())
        if kind == ALL_TO_ALL:  # each GPU sends to all of other nodes over its own adapter
            return sent * (len(group) - least) / (len(group) - 1) / self.network
        # a ring leaves each node once, over the adapters of its members
        return sent / (least * self.network)

    def _first_part(self, collective: Collective) -> list[int]:
        """Return the members of a group in its first slice. The other groups are as this one."""
        group = collective.groups[0]
        node = group[0] // self.per_node
        return [place % self.per_node for place in group if place // self.per_node == node]

    def _pairs(self, collective: Collective) -> tuple[tuple[int, int], ...]:
        """Return the pairs of a permute within the first slice."""
        return tuple((i, j) for i, j in collective.groups if max(i, j) < self.per_node)

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
    chip = target.known_chip
    if not target.tiled:
        return Links(target.links * RING, chip.network, per_node, has_latency=True)
    sizes = mesh["data"], mesh["fsdp"], mesh["model"]
    torus = torus_of(target, sizes)
    link = target.link * chip.devices
    return Links(target.links, chip.network, per_node, torus=torus, link=link, devices=chip.devices)


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
        self._free: dict[Hashable, float] = {}  # when a link is free
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
        lanes = self._links.lanes(collective)
        self.link[axes] += self._weight * seconds
        end = seconds + max([self._clock, *(self._free.get(lane, 0.0) for lane in lanes)])
        self._free.update(dict.fromkeys(lanes, end))
        return _Running(axes, end)

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
