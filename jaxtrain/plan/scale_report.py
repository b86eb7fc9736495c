"""The growth of a run, for a person: a table of sizes, and what is lost where it grows badly.

efficiency    rows a second and device, by the forecast, of those of the smallest size that fits
limited by    the parts of the step's forecast, the largest first
below 80 %    the parts that grew in the time of a row and device, by the forecast, with the
              exchanges of the program that are behind them, and a mesh to compare
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

from jaxtrain import config as config_lib
from jaxtrain.parallel.layout import LayoutError
from jaxtrain.plan import estimate, hlo, mesh_report, scale
from jaxtrain.plan.compile import ask_for_no_chips
from jaxtrain.plan.forecast import Forecast
from jaxtrain.plan.memory import in_bytes
from jaxtrain.plan.mesh_search import Result, Search, Settled
from jaxtrain.plan.scale import STRONG, WEAK, Row
from jaxtrain.plan.target import Target

ENOUGH = 0.8  # efficiency below which the parts that grew are named
LARGE_SUMS = 0.2  # share of the bytes sent, from which on sums of whole arrays are named
LITTLE = 0.05  # share of a step, or of a loss, that is not named
MUCH_FASTER = 0.95  # share of a mesh's time by the estimate, below which another one is named
HEAD = (
    "chips",
    "mesh",
    "rows",
    "bytes a device",
    "TFLOP a device",
    "sent by each device",
    "compiled in",
    "step",
    "efficiency",
    "limited by",
)
EXCHANGE = "exchange"


def report(
    config: config_lib.Config, text: str, factor: int = scale.DOUBLE
) -> tuple[str, bool, bool]:
    """Compile the sizes of a range, as ``tpu:v5p:4..4096``, and compare them.

    ``factor``: between two sizes.

    Returns the text, whether a size fits, and whether Ctrl-C ended it. Raises PlanError for a range
    that is none, without a compiler, and if no size has a mesh.
    """
    targets = scale.parse_range(text, factor, _show_progress)
    ask_for_no_chips()
    rows: list[Row] = []
    interrupted = False
    try:
        for row in scale.rows(config, targets, _show_progress):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
    if rows and not interrupted:
        _refuse_without_a_mesh(rows)
    lines = [f"{text}: {_rule(config, targets)}", ""]
    if interrupted:
        lines[1:] = ["interrupted: this is known so far", ""]
    for growth in (WEAK, STRONG):
        lines += _growth_lines(growth, config, [row for row in rows if row.growth == growth])
    lines += _left_lines(rows, targets)
    fits = any(row.fits for row in rows)
    if rows and not fits and not interrupted:
        failed = [row.settled for row in rows]
        problem = mesh_report.too_small(config, targets[-1], Result(failed=failed))
        lines.append(f"problem: {problem}")
    return "\n".join(lines), fits, interrupted


def _show_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse_without_a_mesh(rows: Sequence[Row]) -> None:
    """Raise the error of the first size if no size has a mesh that divides its rows."""
    settled = [row.settled for row in rows]
    if not any(each.candidate.choice.values for each in settled):
        raise LayoutError(f"{rows[0].target.name}: {settled[0].reason}")


def _rule(config: config_lib.Config, targets: Sequence[Target]) -> str:
    mesh = config.mesh
    rule = f"data {mesh.data} × fsdp {mesh.fsdp} × model {mesh.model}, -1 takes the devices"
    if "mesh" in config.train.auto:
        rule = "the first mesh that fits of a search at each size"
    sizes = "1 size" if len(targets) == 1 else f"{len(targets)} sizes"
    return f"{sizes}, each compiled; mesh: {rule}"


def _growth_lines(growth: str, config: config_lib.Config, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    batch = config.train.batch
    if growth == WEAK:
        yield f"weak scaling: {batch} rows a step on the first size, more in proportion to devices"
    else:
        yield f"strong scaling: {batch} rows a step on each size"
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    base = next((row for row in rows if row.fits), None)
    for row in rows:
        yield f"| {' | '.join(_cells(row, base))} |"
    yield ""
    if base is None:
        return
    if base is not rows[0]:
        yield f"the smallest size of the range that fits is {base.target.name}"
    found = base.settled.forecast
    if found:
        yield f"steps are forecasts ({found.calibration})"
    for row in rows:
        if row.fits and config.train.auto:
            yield f"{row.chips} chips: {row.settled.candidate.choice.overrides()}"
    for row in rows:
        if row.fits and _efficiency(row, base) < ENOUGH:
            causes = "; ".join(_causes(row, base))
            yield f"{row.chips} chips, {_efficiency(row, base):.0%} of {base.chips}: {causes}"
    yield ""


def _efficiency(row: Row, base: Row) -> float:
    return base.seconds / row.seconds


def _cells(row: Row, base: Row | None) -> list[str]:
    settled, step = row.settled, row.settled.step
    if base is None or not row.fits:
        return [str(row.chips), _mesh(settled), str(row.batch), settled.reason, *[""] * 6]
    assert step is not None
    again = ", by an earlier plan" if step.again else ""
    return [
        str(row.chips),
        _mesh(settled),
        str(row.batch),
        in_bytes(settled.size),
        f"{sum(step.products.values()) / 1e12:.3g}",
        ", ".join(_sent(step.collectives or {})) or "nothing",
        f"{step.seconds:.0f} s{again}",
        f"{1e3 * settled.seconds:.2f} ms",
        f"{_efficiency(row, base):.0%}",
        ", ".join(_limits(settled)),
    ]


def _mesh(settled: Settled) -> str:
    if not settled.candidate.choice.values:
        return ""
    mesh = settled.candidate.config.mesh
    return f"{mesh.data} × {mesh.fsdp} × {mesh.model}"


def _sent(exchanges: hlo.Exchanges) -> Iterator[str]:
    """Yield the bytes sent by kind and axis, without those below a hundredth of all."""
    total = sum(exchanged.sent for exchanged in exchanges.values())
    for (kind, axes), exchanged in sorted(exchanges.items(), key=lambda item: -item[1].sent):
        if exchanged.sent >= 0.01 * total > 0:
            yield f"{in_bytes(exchanged.sent)} {kind} over {'+'.join(axes)}"


def _limits(settled: Settled) -> Iterator[str]:
    for part, seconds in _parts(settled.forecast).items():
        if seconds >= LITTLE * settled.seconds:
            yield f"{part} {seconds / settled.seconds:.0%}"


def _parts(found: Forecast | None) -> dict[str, float]:
    """Return the seconds of a step by kind of kernel, and of exposed exchanges by axes."""
    if found is None:
        return {}
    parts = {kind: seconds for kind, seconds in found.by_kind.items() if kind != EXCHANGE}
    for axes, exchange in found.exchanges.items():
        parts[f"{EXCHANGE} over {'+'.join(axes)}"] = exchange.exposed
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _causes(row: Row, base: Row) -> Iterator[str]:
    """Yield the parts whose time for a row and device grew, with their share of the loss."""
    mine, first = _parts(row.settled.forecast), _parts(base.settled.forecast)
    weight, weight_of_first = (each.target.count / each.batch for each in (row, base))
    loss = row.seconds - base.seconds
    for part, seconds in mine.items():
        growth = weight * seconds - weight_of_first * first.get(part, 0.0)
        if growth < LITTLE * loss:
            continue
        before = f"{1e3 * seconds:.2f} ms a step, {1e3 * first.get(part, 0.0):.2f} on {base.chips}"
        text = f"{part} is {growth / loss:.0%} of the loss ({before})"
        if part.startswith(EXCHANGE):
            text += _exchanged(row.settled, part)
        yield text
    data, fsdp = row.settled.candidate.config.mesh.data, row.settled.candidate.config.mesh.fsdp
    if estimate.gathers_by_sums(row.target, fsdp):
        yield (
            f"fsdp={fsdp} spans the whole slice, over which libtpu gathers and scatters by sums of"
            f" whole arrays, twice the bytes; compare data={2 * data} fsdp={fsdp // 2}, which"
            " gathers parts"
        )
    elif whole := _summed_whole(row):
        yield (
            f"libtpu adds up whole arrays over fsdp={fsdp}, the largest of them {whole}, and cuts"
            f" the sums, which sends twice the bytes of a scatter; compare data={4 * data}"
            f" fsdp={fsdp // 4}, over which it may scatter them"
        )
    elif other := _first_of_search(row):
        yield other


def _first_of_search(row: Row) -> str:
    """Name the mesh that a search compiles first if it is faster by the estimate, else ""."""
    mine = row.settled.candidate
    search = Search(mine.config, row.target, None, fields=(), note=lambda line: None)
    for first in search.run(enough=1).best:
        share = first.seconds / mine.estimate
        if share < MUCH_FASTER:
            mesh = first.candidate.config.mesh
            return (
                f"compare data={mesh.data} fsdp={mesh.fsdp} model={mesh.model}, which takes"
                f" {share:.0%} of this mesh's time by the rough estimate of a search"
            )
    return ""


def _summed_whole(row: Row) -> str:
    """Name the largest array that TPUs add up over fsdp, "" if such sums are a small part.

    libtpu (0.0.42) scatters over some groups of a torus only arrays of some shapes: over 512 chips
    8192 × 24576 numbers, and not 8192 × 28672 (docs/results/scale.md).
    """
    step, mesh = row.settled.step, row.settled.candidate.config.mesh
    if not row.target.tiled or step is None or mesh.fsdp % 4:
        return ""
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "model": mesh.model}
    found = list(hlo.collectives(hlo.Program(step.text)))
    sums = [each for each in found if each.kind == "all-reduce" and each.axes(sizes) == ("fsdp",)]
    of_sums = sum(each.sent for each in sums)
    if of_sums <= LARGE_SUMS * sum(each.sent for each in found):
        return ""
    largest = max(sums, key=lambda each: each.bytes)
    dims = max(largest.shapes, key=math.prod)
    return f"{'+'.join(sorted(set(largest.dtypes)))}[{','.join(map(str, dims))}]"


def _exchanged(settled: Settled, part: str) -> str:
    """Write the collectives over the axes of a part, with their types and how many begin early."""
    assert settled.step is not None
    found = hlo.collectives(hlo.Program(settled.step.text))
    mesh = settled.candidate.config.mesh
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "model": mesh.model}
    by_kind: dict[tuple[str, str], list[hlo.Collective]] = {}
    for collective in found:
        axes = "+".join(collective.axes(sizes))
        if part == f"{EXCHANGE} over {axes}":
            key = collective.kind, "+".join(sorted(set(collective.dtypes)))
            by_kind.setdefault(key, []).append(collective)
    texts = [_collective_text(kind, dtypes, each) for (kind, dtypes), each in _largest(by_kind)]
    return f": {', '.join(texts)}" if texts else ""


def _largest(
    by_kind: Mapping[tuple[str, str], list[hlo.Collective]],
) -> list[tuple[tuple[str, str], list[hlo.Collective]]]:
    """Return the kinds that send a twentieth of the bytes or more, the largest first."""

    def sent(item: tuple[tuple[str, str], list[hlo.Collective]]) -> float:
        return sum(collective.sent for collective in item[1])

    in_order = sorted(by_kind.items(), key=sent, reverse=True)
    total = sum(map(sent, in_order))
    return [item for item in in_order if sent(item) >= LITTLE * total]


def _collective_text(kind: str, dtypes: str, collectives: Sequence[hlo.Collective]) -> str:
    times = sum(collective.times for collective in collectives)
    early = sum(collective.times for collective in collectives if collective.is_async)
    sent = in_bytes(sum(collective.sent for collective in collectives))
    return f"{times} × {kind} in {dtypes}, {sent}, {early} of them asynchronous"


def _left_lines(rows: Sequence[Row], targets: Sequence[Target]) -> Iterator[str]:
    """Name the sizes that were not reached."""
    reached = {(row.target.name, row.growth) for row in rows}
    left = []
    for target in targets:
        missing = [each for each in (WEAK, STRONG) if (target.name, each) not in reached]
        only = f" ({missing[0]} scaling)" if len(missing) == 1 else ""
        left += [f"{target.name}{only}"] if missing else []
    if left:
        yield f"not compiled, so that nothing is known of them: {', '.join(left)}"
