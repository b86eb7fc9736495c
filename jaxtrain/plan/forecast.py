"""The time of a step, forecast from its compiled program, and how far to trust the forecast.

A kernel takes its launch and then max(bytes / rate, FLOP / rate), with the share of each rate that
kernels of its kind reach. A walk through the program adds them up, and the exchanges that no kernel
hides (`exposure`). The shares are fitted to measured steps, a `Calibration`, and the forecast's
error is that of other measured steps, which the fit has not seen.

A device that nobody measured has no shares: its forecast is the bound alone, at the full rates.
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxtrain.parallel import chips
from jaxtrain.plan import exposure, kinds, traffic
from jaxtrain.plan.exposure import Routes
from jaxtrain.plan.hlo import Instruction, Program
from jaxtrain.plan.target import Target

UNCALIBRATED = "uncalibrated: the bound alone"


class Costs(Protocol):
    """The costs of kernels and exchanges on some devices."""

    @property
    def name(self) -> str:
        """What was measured, as for a person."""

    @property
    def error(self) -> float | None:
        """The largest of the measured steps that were not fitted, None = there are none."""

    @property
    def steps(self) -> int:
        """How many such steps there are."""

    def seconds(self, kernel: traffic.Kernel, kind: str) -> float:
        """Return the time of one execution."""

    def routes(self, target: Target) -> Routes: ...


class Forecast(NamedTuple):
    seconds: float  # of a step
    by_kind: Mapping[str, float]  # kind -> [s] in a step, the largest first; "exchange": exposed
    exposed: float  # [s] of exchanges that no kernel hides
    error: float | None  # share of the time, None = never measured
    calibration: str  # as for a person


class Share(NamedTuple):
    """Of the rates of a chip, as kernels of one kind reach them."""

    bandwidth: float = 1.0
    flops: float = 1.0
    launch: float = 0.0  # [s]


class ChipCosts(NamedTuple):
    rates: traffic.Rates
    shares: Mapping[str, Share]  # by kind
    name: str
    error: float | None = None
    steps: int = 0

    def seconds(self, kernel: traffic.Kernel, kind: str) -> float:
        share = self.shares.get(kind, Share())
        moving = (kernel.read + kernel.written) / (share.bandwidth * self.rates.bandwidth)
        computing = kernel.flops / (share.flops * self.rates.flops)
        return share.launch + max(moving, computing)

    def routes(self, target: Target) -> Routes:
        return exposure.links_of(target)


def forecast(program: Program, mesh: Mapping[str, int], target: Target) -> Forecast | None:
    """Forecast a step on a mesh (axis -> size), None if nothing is known of such devices."""
    costs = costs_of(target)
    if costs is None:
        return None
    instructions = {i.name: i for _, i in program.executed()}
    seconds, kind_of = _kernels(program, instructions, costs)
    walked = exposure.exposure(program, mesh, seconds, costs.routes(target))
    by_kind: dict[str, float] = collections.defaultdict(float)
    for name, of_step in walked.kernels.items():
        by_kind[kind_of[name]] += of_step
    if walked.exposed:
        by_kind["exchange"] = walked.exposed
    return Forecast(
        walked.computing + walked.exposed,
        dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        walked.exposed,
        costs.error,
        describe(costs),
    )


def _kernels(
    program: Program, instructions: Mapping[str, Instruction], costs: Costs
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of one execution, and the kind, of each kernel by its name."""
    seconds, kind_of = {}, {}
    for kernel in traffic.traffic(program):
        kind = kinds.kind(kernel, instructions[kernel.name], program)
        kind_of[kernel.name] = kind
        seconds[kernel.name] = costs.seconds(kernel, kind)
    return seconds, kind_of


def costs_of(target: Target) -> Costs | None:
    if target.chip is None:
        return None
    return ChipCosts(rates_of(target.chip), {}, target.chip.kind)


def rates_of(chip: chips.Chip) -> traffic.Rates:
    """Return the rates measured on such a chip, or else those of its datasheet."""
    if chip.measured_flops:
        return traffic.Rates(chip.measured_bandwidth, chip.measured_flops)
    return traffic.Rates(chip.bandwidth, chip.flops)


def describe(costs: Costs) -> str:
    if costs.error is None:
        return UNCALIBRATED
    return f"{costs.name}: within {costs.error:.0%} on {costs.steps} steps"
