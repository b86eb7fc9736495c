"""The time of a step, forecast from its compiled program, and how far to trust the forecast.

A kernel takes its launch and then max(bytes / rate, FLOP / rate), with the share of each rate that
kernels of its kind reach. A walk through the program adds them up, and the exchanges that no kernel
hides (`exposure`). The shares are fitted to measured steps, a `Calibration`, and the forecast's
error is that of other measured steps, which the fit has not seen.

The steps of an H100 were fitted by one share for all kinds: six steps determine no more.
A device that nobody measured has no shares: its forecast is the bound alone, at the full rates.
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrain.assembly import Assembly
from jaxtrain.parallel import chips
from jaxtrain.plan import calibration, cpu_work, exposure, kinds, traffic
from jaxtrain.plan.hlo import Program
from jaxtrain.plan.memory import in_bytes
from jaxtrain.plan.target import Target
from jaxtrain.step import state as state_lib

UNCALIBRATED = "uncalibrated: the bound alone"


class Fit(NamedTuple):
    """Measured steps of a chip against their rooflines."""

    share: float  # of the measured rates that steps reach
    error: float  # the largest of steps that a fit to half of them has not seen
    steps: int
    but: str = ""  # steps that the fit does not hold for


# By the chip's kind. Of docs/results/h100.md and compiled-steps.md, both of commit 85350cd7
FITS = {
    "NVIDIA H100": Fit(
        0.82, 0.12, 6, "35% too low with attention over packed rows of 8,192 tokens"
    ),
}


class Forecast(NamedTuple):
    seconds: float  # of a step
    by_kind: Mapping[str, float]  # kind -> [s] in a step, the largest first; "exchange": exposed
    exposed: float  # [s] of exchanges that no kernel hides
    error: float | None  # share of the time, None = never measured
    calibration: str  # as for a person
    exchanges: Mapping[exposure.Axes, exposure.Exchange] = {}  # by mesh axes


class Share(NamedTuple):
    """Of the rates of a chip, as kernels of one kind reach them."""

    bandwidth: float = 1.0
    flops: float = 1.0
    launch: float = 0.0  # [s]


class ChipCosts(NamedTuple):
    rates: traffic.Rates
    shares: Mapping[str, Share]  # by kind
    name: str
    fit: Fit | None = None

    @property
    def error(self) -> float | None:
        return self.fit.error if self.fit else None

    def seconds(self, kernel: traffic.Kernel, kind: str) -> float:
        share = self.shares.get(kind, Share())
        moving = (kernel.read + kernel.written) / (share.bandwidth * self.rates.bandwidth)
        computing = kernel.flops / (share.flops * self.rates.flops)
        return share.launch + max(moving, computing)

    def describe(self) -> str:
        if self.fit is None:
            return UNCALIBRATED
        but = f", {self.fit.but}" if self.fit.but else ""
        return f"{self.name}: within {self.fit.error:.0%} on {self.fit.steps} steps{but}"


def forecast(program: Program, mesh: Mapping[str, int], target: Target) -> Forecast | None:
    """Forecast a step on a mesh (axis -> size), None if nothing is known of such devices."""
    if target.platform == "cpu":
        host_costs = calibration.load(target.count)
        return None if host_costs is None else on_hosts(program, mesh, host_costs)
    if target.chip is None:
        return None
    costs = _costs_of(target.chip)
    instructions = {i.name: i for _, i in program.executed()}
    seconds, kind_of = {}, {}
    for kernel in traffic.traffic(program):
        kind = kinds.kind(kernel, instructions[kernel.name], program)
        kind_of[kernel.name] = kind
        seconds[kernel.name] = costs.seconds(kernel, kind)
    walked = exposure.exposure(program, mesh, seconds, exposure.links_of(target, mesh))
    calibrated = costs.describe() + _devices_note(costs, target) + _network_note(target)
    return _add_up(walked, kind_of, costs.error, calibrated)


def _devices_note(costs: ChipCosts, target: Target) -> str:
    """Say that the steps were of one card, if a target has more, or return ""."""
    if costs.fit is None or target.count == 1:
        return ""
    return ", all of them on one card; exchanges are by the rate of the links and not measured"


def _network_note(target: Target) -> str:
    """Say that the rate between a target's nodes or slices is assumed, if it is, or return ""."""
    chip = target.known_chip
    if target.slices == 1 or not chip.network_is_assumed:
        return ""
    between = "slices" if chip.is_tpu else "nodes"
    return (
        f"; the rate between {between}, {in_bytes(chip.network)}/s a device, is assumed: no page of"
        " its vendor that was read states it"
    )


def _costs_of(chip: chips.Chip) -> ChipCosts:
    fit = FITS.get(chip.kind)
    shares = dict.fromkeys(kinds.KINDS, Share(fit.share, fit.share)) if fit else {}
    return ChipCosts(rates_of(chip), shares, chip.kind, fit)


def on_hosts(program: Program, mesh: Mapping[str, int], costs: cpu_work.HostCosts) -> Forecast:
    """Forecast a step on devices that share a machine's cores."""
    instructions = {i.name: i for _, i in program.executed()}
    seconds, kind_of = {}, {}
    for kernel, work in cpu_work.works(program, costs.threads):
        kind_of[kernel.name] = kinds.kind(kernel, instructions[kernel.name], program)
        seconds[kernel.name] = costs.seconds(work)
    walked = exposure.exposure(program, mesh, seconds, costs.exchanges)
    found = _add_up(walked, kind_of, costs.error, costs.describe())
    calling = costs.seconds(cpu_work.work_of_call(program))
    by_kind = {**found.by_kind, "call": calling}
    return found._replace(seconds=found.seconds + calling, by_kind=_largest_first(by_kind))


def _add_up(
    walked: exposure.Exposure, kind_of: Mapping[str, str], error: float | None, calibrated: str
) -> Forecast:
    by_kind: dict[str, float] = collections.defaultdict(float)
    for name, of_step in walked.kernels.items():
        by_kind[kind_of[name]] += of_step
    if walked.exposed:
        by_kind["exchange"] = walked.exposed
    seconds = walked.computing + walked.exposed
    return Forecast(
        seconds, _largest_first(by_kind), walked.exposed, error, calibrated, walked.exchanges
    )


def _largest_first(by_kind: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(by_kind.items(), key=lambda item: -item[1]))


def rates_of(chip: chips.Chip) -> traffic.Rates:
    """Return the rates measured on such a chip, or else those of its datasheet."""
    if chip.measured_flops:
        return traffic.Rates(chip.measured_bandwidth, chip.measured_flops)
    return traffic.Rates(chip.bandwidth, chip.flops)


def ideal(assembly: Assembly, chip: chips.Chip, count: int) -> tuple[float, float]:
    """Return the seconds of a step's FLOP at the peak, and of reading and writing the state."""
    state = assembly.abstract.state
    frozen = state_lib.bytes_per_device(state.variables.frozen)  # is not written
    moved = 2 * state_lib.bytes_per_device(state) - frozen
    return assembly.task.flops / (count * chip.flops), moved / chip.bandwidth
