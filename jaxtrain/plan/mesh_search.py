"""The search for the mesh and the options with which a step takes the least time.

Each mesh has a line of candidates: its options, the fastest first by `estimate`. The search takes
the mesh whose first candidate is the fastest, and settles that candidate:

    held bytes      exact, without a trace. More than a device has: the next of this mesh
    lower bound     of the traced step. The same
    program         compiled by the target's compiler. If it does not fit, the same
    offloaded       for GPUs elsewhere, which no compiler takes: the same, if it does not fit or
                    compile without optim.offload. Others may fit, and none of them is the mesh's

A candidate that fits is the mesh's only one, since the later ones recompute more or read the
matrices more often. The search ends when `ENOUGH` meshes have one that fits. The best is the one
with the shortest time by its program. Without a compiler, lower bounds and estimates decide.

All processes of a run make the same search, and agree on each candidate's bytes and time.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.parallel import cluster
from jaxtrain.plan import candidates, estimate, exposure, forecast, hlo, traffic, worker
from jaxtrain.plan.bound import Bound, bound_of
from jaxtrain.plan.candidates import NOTHING, Choice
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.forecast import Forecast
from jaxtrain.plan.memory import in_bytes, least, offloaded
from jaxtrain.plan.target import Target, abstractly
from loaders.io.checks import first_line

ENOUGH = 5  # meshes with a candidate that fits, between which the programs decide
MAX_REASONS = 5  # of meshes that no rule allows
ROOM = 0.95  # share of a device's memory that a compiled step may take
MIB = 1 << 20
MICROSECONDS = 1e6
UNREAD = "the time is a rough estimate, since this jaxlib cannot read the program of a newer libtpu"
ASSUMED = "uncalibrated: by assumed rates, to compare meshes alone"


class Candidate(NamedTuple):
    choice: Choice
    config: config_lib.Config
    estimate: float  # [s]
    smallest: tuple["Candidate", ...] = ()  # of its mesh, one of which takes the least memory


class Settled(NamedTuple):
    """A candidate that fits, or the reason for which it does not."""

    candidate: Candidate
    size: float  # [bytes] on a device
    reason: str = ""  # "" = it fits
    seconds: float = 0.0  # by its program, else by the estimate
    step: Compiled | None = None
    forecast: Forecast | None = None  # None = by the estimate

    @property
    def is_compiled(self) -> bool:
        return self.step is not None

    @property
    def is_unread(self) -> bool:
        """Whether nobody can read its program, so that its time is the estimate."""
        return self.step is not None and self.forecast is None and not self.reason


@dataclasses.dataclass
class Result:
    """All that a search knows, also if it was interrupted."""

    # (data, fsdp, model) that rules and rows allow
    meshes: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)
    fitting: list[Settled] = dataclasses.field(default_factory=list)  # compiled, if they can be
    unknown: list[Settled] = dataclasses.field(default_factory=list)  # that no compiler takes
    failed: list[Settled] = dataclasses.field(default_factory=list)
    refused: dict[str, list[Choice]] = dataclasses.field(default_factory=dict)  # by the reason

    @property
    def best(self) -> list[Settled]:
        """The fitting candidates, the fastest first."""
        return sorted(self.fitting, key=lambda each: each.seconds)

    @property
    def likely(self) -> list[Settled]:
        """The candidates that no compiler takes, the fastest first."""
        return sorted(self.unknown, key=lambda each: each.seconds)

    @property
    def nearest(self) -> Settled | None:
        """The one that lacks the least memory, None if each one failed for another reason."""
        sized = [settled for settled in self.failed if math.isfinite(settled.size)]
        return min(sized, key=lambda settled: settled.size, default=None)


class Search:
    """One search, whose `result` grows while it runs."""

    def __init__(
        self,
        config: config_lib.Config,
        target: Target,
        compiler: worker.Compiler | None,
        *,
        fields: tuple[str, ...],
        note: Callable[[str], None],
        base: Choice = NOTHING,
    ):
        """Prepare a search, which `run` makes.

        Args:
          compiler: of a candidate's last stage; None = there is none for the target.
          fields: options besides the mesh.
          note: takes a line for each candidate that is settled.
          base: values of every candidate.
        """
        self.result = Result()
        self._takes_offloaded = target.here or target.kind != "gpu"  # (`NO_OFFLOAD`)
        self._config, self._target, self._compiler = config, target, compiler
        self._fields, self._note, self._base = fields, note, base
        self.memory = min(cluster.gather(int(target.memory / MIB))) * MIB
        # of a mesh and its recomputation, for one microbatch: bytes beyond the exact ones
        self._beyond: dict[Any, float] = {}
        # of the smallest options of a mesh, if others did not fit: the lower bound
        self._bounds: dict[str, int] = {}
        self._not_compiled: set[tuple[str, bool]] = set()  # of which one candidate is listed
        self._failed: dict[Any, Settled] = {}  # without optim.offload, by the other values

    def run(self, enough: int = ENOUGH) -> Result:
        lines: list[tuple[float, int, Candidate, Iterator[Candidate]]] = []
        numbers = itertools.count()
        meshes = list(candidates.meshes(self._target))
        count = self._target.count
        self._note(
            f"{count} devices have {len(meshes)} meshes, which a rough estimate puts in order"
        )
        for mesh in meshes:
            line = self._line(self._base | mesh)
            first = next(line, None)
            if first:
                heapq.heappush(lines, (first.estimate, next(numbers), first, line))
        while lines and len(self.result.fitting) < enough:
            _, number, candidate, line = heapq.heappop(lines)
            if self._fits(self.settle(candidate)):
                continue
            following = next((each for each in line if not self._is_hopeless(each)), None)
            if following:
                heapq.heappush(lines, (following.estimate, number, following, line))
        return self.result

    def _fits(self, settled: Settled) -> bool:
        """Tell whether a candidate is its mesh's: it fits, by its program if there is a compiler.

        Candidates that the compiler cannot take are `Result.unknown`, one for each mesh.
        """
        return not settled.reason and (settled.is_compiled or self._compiler is None)

    def _line(self, mesh: Choice) -> Iterator[Candidate]:
        """Yield the candidates of a mesh, the fastest first, then split sequences."""
        yield from self._options(mesh)
        split = candidates.sequence(self._config, mesh, self._target)
        if split:
            yield from self._options(split)

    def _options(self, mesh: Choice) -> list[Candidate]:
        config = mesh.apply(self._config)
        try:
            assembly = abstractly(config, self._target)
        except (ValueError, TypeError) as error:
            self._refuse(mesh, str(error))
            return []
        rows = max(1, config.train.batch // estimate.row_shards(assembly))
        by_place: dict[bool, list[Candidate]] = {}  # of the optimizer's state
        train = replace(config.train, auto=self._config.train.auto)  # the mesh's has none
        for options in candidates.same_numbers(replace(config, train=train), rows, self._fields):
            choice = mesh | options
            changed = choice.apply(self._config)
            if objection := candidates.objection(changed):
                self._refuse(choice, objection)
                continue
            if changed.optim.offload != assembly.config.optim.offload:
                assembly = abstractly(changed, self._target)
            candidate = Candidate(choice, changed, self._estimate(assembly, changed))
            by_place.setdefault(changed.optim.offload, []).append(candidate)
        if by_place:
            self.result.meshes.add(_sizes(config))
        possible: list[Candidate] = []
        for of_place in by_place.values():
            configs = [candidate.config for candidate in of_place]
            smallest = tuple(of_place[i] for i in candidates.smallest(configs))
            lacks = [self._lack_of_state(candidate) for candidate in smallest]
            if any(lack is None for lack in lacks):
                possible += [candidate._replace(smallest=smallest) for candidate in of_place]
            else:
                self._add(min(filter(None, lacks), key=lambda lack: lack.size))
        return sorted(possible, key=lambda candidate: candidate.estimate)

    def _lack_of_state(self, candidate: Candidate) -> Settled | None:
        """Return the lack of memory for the state and gradients, None if there is none."""
        assembly = abstractly(candidate.config, self._target)
        size = float(least(assembly, tiled=self._target.tiled) + offloaded(assembly.abstract))
        if size <= self.memory:
            return None
        return Settled(candidate, size, _lack(size, "state and gradients take", self.memory))

    def candidate(self, choice: Choice) -> Candidate:
        """Make the candidate of a choice. Raises as `assemble` does."""
        config = choice.apply(self._config)
        assembly = abstractly(config, self._target)
        return Candidate(choice, config, self._estimate(assembly, config))

    def _estimate(self, assembly: Assembly, config: config_lib.Config) -> float:
        remat = getattr(config.model, "remat", "none")
        accumulate = config.train.accumulate
        return estimate.seconds(assembly, self._target, accumulate=accumulate, remat=remat)

    def _refuse(self, choice: Choice, reason: str) -> None:
        self.result.refused.setdefault(reason, []).append(choice)

    def settle(self, candidate: Candidate) -> Settled:
        """Find out whether a candidate fits, and note it."""
        try:
            settled = self._settled(candidate)
        except (ValueError, TypeError) as error:  # of its trace
            settled = Settled(candidate, math.inf, first_line(error))
        self._add(settled)
        return settled

    def _add(self, settled: Settled) -> None:
        config = settled.candidate.config
        if settled.reason:
            self.result.failed.append(settled)
            if not config.optim.offload:
                self._failed[_without_offload(settled.candidate)] = settled
        elif self._fits(settled):
            self.result.fitting.append(settled)
        else:
            self.result.unknown.append(settled)
        self._note(line(settled))

    def _settled(self, candidate: Candidate) -> Settled:
        if lack := self._lack_without_offload(candidate):
            return lack
        lower = bound_of(candidate.config, self._target)
        size = float(lower.peak)
        if size > self.memory:
            self._give_up(candidate, lower)
            return Settled(candidate, size, _lack(size, "it needs at least", self.memory))
        assembly = abstractly(candidate.config, self._target)
        takes_it = self._takes_offloaded or not offloaded(assembly.abstract)
        if self._compiler is None or not takes_it:
            self._not_compiled.add(_place(candidate))
            return Settled(candidate, size, seconds=candidate.estimate)
        program = self._program(candidate)
        count = candidate.config.train.accumulate
        likely = lower.certain + self._beyond.get(program, 0.0) / count
        if likely > self.memory:
            text = "by the program of another number of microbatches it needs"
            return Settled(candidate, likely, _lack(likely, text, self.memory))
        return self._compiled(candidate, assembly, lower)

    def _lack_without_offload(self, candidate: Candidate) -> Settled | None:
        """Return the lack of a candidate that no compiler takes, by the same one without offload.

        The bytes in host memory are all that it saves. None: the other one fits, or is not settled,
        or lacks fewer bytes.
        """
        if self._takes_offloaded or not candidate.config.optim.offload:
            return None
        other = self._failed.get(_without_offload(candidate))
        if other is None:
            return None
        if math.isinf(other.size):
            return other._replace(candidate=candidate, reason=f"without offload: {other.reason}")
        size = other.size - offloaded(abstractly(candidate.config, self._target).abstract)
        limit = self.memory * (ROOM if other.step else 1)
        if size <= limit:
            return None
        text = "by the same step without offload it needs at least"
        return other._replace(candidate=candidate, size=size, reason=_lack(size, text, limit))

    def _give_up(self, candidate: Candidate, lower: Bound) -> None:
        """Leave out all options like this one if even the smallest of them cannot fit."""
        self._bounds[str(candidate.choice)] = lower.peak
        for small in candidate.smallest:
            name = str(small.choice)
            if name not in self._bounds:
                self._bounds[name] = bound_of(small.config, self._target).peak
                if self._bounds[name] > self.memory:
                    size = float(self._bounds[name])
                    self._add(Settled(small, size, _lack(size, "it needs at least", self.memory)))

    def _is_hopeless(self, candidate: Candidate) -> bool:
        bounds = [self._bounds.get(str(small.choice), 0) for small in candidate.smallest]
        own = self._bounds.get(str(candidate.choice), 0)
        is_listed = _place(candidate) in self._not_compiled
        return is_listed or max(own, min(bounds, default=0)) > self.memory

    def _compiled(self, candidate: Candidate, assembly: Assembly, lower: Bound) -> Settled:
        assert self._compiler is not None
        answer = self._compiler(candidate.config)
        step = answer.compiled
        if not all(cluster.gather(int(step is not None))):
            reason = answer.error or "another process could not compile it"
            return Settled(candidate, math.inf, reason)
        assert step is not None
        size = MIB * max(cluster.gather(math.ceil((step.peak + lower.second) / MIB)))
        count = candidate.config.train.accumulate
        self._beyond[self._program(candidate)] = (size - lower.certain) * count
        limit = ROOM * self.memory
        if size > limit:
            return Settled(candidate, size, _lack(size, "its program takes", limit), step=step)
        expected = forecast_of(step, assembly, self._target) if step.text else None
        microseconds = math.ceil(
            MICROSECONDS * (expected.seconds if expected else candidate.estimate)
        )
        seconds = max(cluster.gather(microseconds)) / MICROSECONDS
        return Settled(candidate, size, seconds=seconds, step=step, forecast=expected)

    def _program(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return the values of a candidate but for the number of microbatches."""
        values = [value for value in candidate.choice.values if value[0] != candidates.ACCUMULATE]
        return tuple(map(str, values))


def _lack(size: float, text: str, limit: float) -> str:
    return f"{text} {in_bytes(size)} of {in_bytes(limit)}"


def _sizes(config: config_lib.Config) -> tuple[int, int, int]:
    return config.mesh.data, config.mesh.fsdp, config.mesh.model


def _place(candidate: Candidate) -> tuple[str, bool]:
    return str(candidate.config.mesh), candidate.config.optim.offload


def _without_offload(candidate: Candidate) -> tuple[str, ...]:
    values = candidate.choice.values
    return tuple(str(value) for value in values if value[0] != candidates.OFFLOAD)


def forecast_of(step: Compiled, assembly: Assembly, target: Target) -> Forecast:
    """Forecast a compiled step. Devices whose rates nobody knows have those of `estimate`."""
    mesh = dict(assembly.layout.mesh.shape)
    program = hlo.Program(step.text)
    by_measurements = forecast.forecast(program, mesh, target)
    if by_measurements:
        return by_measurements
    machine = estimate.machine_of(target, mesh)
    seconds = traffic.seconds_of_each(step.kernels, machine.rates)
    walked = exposure.exposure(program, mesh, seconds, machine.links)
    parts = {"kernels": walked.computing, "exchange": walked.exposed}
    total = walked.computing + walked.exposed
    return Forecast(total, parts, walked.exposed, None, ASSUMED)


def line(settled: Settled) -> str:
    """Write the time and memory of a candidate, or its lack."""
    choice = settled.candidate.choice
    if settled.reason:
        return f"{choice}: {settled.reason}"
    source = "by its compiler" if settled.is_compiled else "at least, not compiled"
    text = f"{choice}: {1e3 * settled.seconds:.2f} ms, {in_bytes(settled.size)} {source}"
    return f"{text}; {UNREAD}" if settled.is_unread else text


def lacks(settled: Sequence[Settled]) -> list[str]:
    """List the lacks of some candidates, the least one first."""
    return [line(each) for each in sorted(settled, key=lambda each: each.size)]


def no_mesh(result: Result, target: Target) -> str:
    """Write why no mesh of a target is allowed, by the reasons of most meshes."""
    reasons = sorted(result.refused.items(), key=lambda item: -len(item[1]))
    lines = [f"no mesh of the {target.count} devices of {target.name} is allowed"]
    for reason, choices in reasons[:MAX_REASONS]:
        more = f" and {len(choices) - 1} more" if len(choices) > 1 else ""
        lines.append(f"  {choices[0]}{more}: {reason}")
    if not reasons:
        lines.append(f"  its {target.slices} slices or nodes do not divide any")
    return "\n".join(lines)
