"""Rows of a check's table on all but speed: peers, bits, kills, feeding, errors of the plan.

`problems` says which of their results are a failure of the check.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tools import bench_feeding

Found = Mapping[str, Any]
APART = 0.10  # [share] by which a forecast may miss without being named
LEAST = "memory, least"
BOUND = "a bound: it has the stacks of loops, and no layers that are written out"
MAX_NAMES = 4  # arrays that a row names


class Row(NamedTuple):
    part: str
    what: str
    figure: str
    compared: str


def problems(one: Found) -> list[str]:
    """Return the reasons why a unit's result is a failure."""
    kind = one["kind"]
    if kind == "peers":
        pairs = (("losses", "bound"), ("gradients", "gradient_bound"))
        return [
            f"{what} of {way} are {x:.1e} apart, more than {one[bound]:g}"
            for what, bound in pairs
            for way, x in one[what].items()
            if x is not None and not x <= one[bound]
        ]
    if kind == "bits-fixed" and one["differing"]:
        return ["steps do not repeat in XLA's fixed order"]
    if kind.startswith("kills"):
        commands = [name for name in ("prove", "replay") if one[name]["broken"]]
        if kind.endswith("-fixed"):
            commands += [name for name in ("prove", "replay") if not one[name]["same"]]
        return [f"jaxtrain {name}: {one[name]['lines'][-1:]}" for name in dict.fromkeys(commands)]
    return []


def rows(unit: str, one: Found, more: Found) -> Iterator[Row]:
    kind = one["kind"]
    if kind == "peers":
        yield peers(one)
    elif kind == "feeding":
        yield from feeding(one)
    elif kind.startswith("bits"):
        yield bits(one, more)
    else:
        for command in ("prove", "replay"):
            yield killed(kind, command, one)
    for problem in problems(one):
        yield Row("FAILED", unit, problem, "")


def too_large(name: str, one: Found) -> Row:
    figure = f"needs {one['least'] / 1e9:.3g} GB at least"
    compared = f"the card has {one['of'] / 1e9:.3g}; no size of the case fits"
    return Row("too large", name, figure, compared)


def apart(name: str, one: Found) -> Iterator[Row]:
    """Name each forecast of the plan that is more than a tenth off."""
    memory, roofline = one["memory"], one["predicted"]
    pairs = []
    if memory["allocator"]:
        for what, part in ((LEAST, "least"), ("memory, compiler", "compiler")):
            pairs.append((what, memory[part] / 1e9, memory["allocator"] / 1e9, "GB"))
    if roofline:
        what, seconds = time_to_compare(roofline)
        pairs.append((what, 1e3 * seconds, 1e3 * one["seconds_per_step"], "ms"))
    for forecast, planned, measured, unit in pairs:
        difference = measured / planned - 1
        if abs(difference) > APART:
            figure = f"{planned:.3g} {unit} planned, {measured:.3g} measured"
            compared = f"{difference:+.0%}" + f"; {BOUND}" * (forecast == LEAST)
            yield Row("apart", f"{name}: {forecast}", figure, compared)


def time_to_compare(predicted: Found) -> tuple[str, float]:
    """Return the name and the seconds of a step that a measured time is held against.

    They are the plan's forecast. A chip that no fit is of has the bound alone.
    """
    forecast = predicted["forecast"]
    if forecast and forecast["error"] is not None:
        return "time, forecast", forecast["seconds"]
    return "time, the bound alone (uncalibrated)", predicted["seconds"]


def peers(one: Found) -> Row:
    name = one["case"]
    ratios = ", ".join(f"{way} {x:.2f}" for way, x in one["ours_by_theirs"].items())
    again = one["again"]["units_per_second"] / one["ours"]["units_per_second"]
    notes = [f"ours again: {again:.2f} of the first time"]
    for way, x in one["losses"].items():
        side = one["theirs"][way]
        fewer = f" of {side['rows']} rows (of {one['rows']})" if side["refused"] else ""
        losses = "losses of other rows"
        if x is not None:
            losses = f"losses {x:.1e}, gradients' norms {one['gradients'][way]:.1e} apart"
        memory = f", {side['bytes'] / 1e9:.3g} GB" if side["bytes"] else ""
        notes.append(f"{way}: {side['units_per_second']:,.0f} {one['unit']}/s{fewer}, {losses}")
        notes[-1] += memory
    notes += [f"{way} failed: {why.splitlines()[-1]}" for way, why in one["failures"].items()]
    return Row("peers", f"{name}: ours ÷ PyTorch's", ratios, "; ".join(notes))


def bits(one: Found, more: Found) -> Row:
    kind, name = one["kind"], one["case"]
    is_fixed = kind.endswith("-fixed")
    earliest = one["earliest"]
    figure = f"{one['repeats']} repeats, {one['differing']} differ"
    notes = []
    if earliest:
        names = ", ".join(earliest["names"][:MAX_NAMES])
        loss = "the loss too" if earliest["has_loss"] else "not the loss"
        notes.append(
            f"first in step {earliest['step']}, {earliest['n_arrays']} of {one['arrays']} arrays,"
            f" {loss}: {names}"
        )
    free = more.get(f"bits {name}")
    if is_fixed and free:
        cost = one["seconds_per_step"] / free["seconds_per_step"]
        notes.append(f"a step takes {cost:.2f} × that of XLA's own order")
    order = "fixed order" if is_fixed else "XLA's order"
    what = f"{name}, {order}: {1e3 * one['seconds_per_step']:.1f} ms a step"
    return Row("bits", what, figure, "; ".join(notes))


def killed(kind: str, command: str, one: Found) -> Row:
    result = one[command]
    order = "fixed order" if kind.endswith("-fixed") else "XLA's order"
    figure = "the same bits" if result["same"] else "other bits"
    if result["broken"]:
        figure = "did not run"
    return Row("kills", f"{one['case']}, {order}: {command}", figure, " | ".join(result["lines"]))


def feeding(one: Found) -> Iterator[Row]:
    cores = f"{one['cores']} cores, {one['physical']} of them physical"
    for name, share in one["of_one_thread"].items():
        yield Row("feeding", name, cores, bench_feeding.result(share, one["physical"]))
    for name, by_threads in one["rows"].items():
        first = next(iter(by_threads.values()))
        name_of_rate = "rows_per_cpu_second"
        for n, ways in by_threads.items():
            ours, alone = ways["threads"], first["threads"]
            figure = f"{ours['rows_per_second']:,.0f} rows/s, {ours[name_of_rate]:,.0f} a CPU s"
            shares = [
                f"{way} {ways[way][name_of_rate] / first[way][name_of_rate]:.2f}"
                for way in ("threads", "processes", "digests")
            ]
            compared = f"of one's: {', '.join(shares)}" if ours is not alone else ""
            yield Row("feeding", f"{name}, {n} threads", figure, compared)
