"""The numbers of a check of a card as one table on the console."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tools.chip import results_rows
from tools.chip.results_rows import Row


class Goal(NamedTuple):
    """The figure that one H100 is to reach (docs/results/h100.md, "The limit of each case")."""

    amount: float  # at least a share of the datasheet's FLOP/s, or at most milliseconds a step
    unit: str  # of `MFU_BY`, or ms
    rows: int = 0  # that a time is for


# kind of MFU -> the FLOP/s that count
MFU_BY = {
    "MFU": "flops_per_second",
    "causal MFU": "flops_per_second",
    "MFU by documents": "document_flops_per_second",
}
GOALS = {
    "vit-s": Goal(0.28, "MFU"),
    "vit-b": Goal(0.41, "MFU"),
    "lm-1b-2k": Goal(0.55, "causal MFU"),
    "lm-1b-8k": Goal(0.55, "MFU by documents"),
    "trm": Goal(0.27, "MFU"),
    "higgs-lora": Goal(0.36, "causal MFU"),
    "giblet": Goal(60, "ms", rows=64),
}
HOPPER = ("h100", "h200")  # chips that these goals are for
Found = Mapping[str, Any]


def rows(found: Found) -> Iterator[Row]:
    for number, part in enumerate(found["parts"], 1):
        if part["machine"]:
            yield ceilings(number, part)
    yield from correctness(found)
    for name, one in found["models"].items():
        if "too_large" in one:
            yield results_rows.too_large(name, one["too_large"])
            continue
        yield speed(name, one, found)
        yield from results_rows.apart(name, one)
    for unit, one in found["more"].items():
        yield from results_rows.rows(unit, one, found["more"])
    for failure in found["failures"]:
        yield Row("failed", failure["unit"], "did not run", failure["why"].strip().splitlines()[-1])
    for unit, reason in found["skipped"].items():
        yield Row("left out", unit, "not measured", reason)
    for unit in found["left_out"]:
        yield Row(
            "left out",
            unit,
            "did not run",
            "the call's time was over; the next call begins with it",
        )


def ceilings(number: int, part: Found) -> Row:
    m = part["machine"]
    reached = m["reached"]
    flops, moved = reached["flops_per_second"], reached["bytes_per_second"]
    compared = f"{_percent(flops, m['datasheet_flops_per_second'])}"
    compared += f" and {_percent(moved, m['datasheet_bytes_per_second'])}"
    what = f"part {number}, {part['when']}: bfloat16 product; copy in memory"
    return Row("reached", what, f"{flops / 1e12:.3g} TFLOP/s; {moved / 1e9:,.0f} GB/s", compared)


def correctness(found: Found) -> Iterator[Row]:
    checks = found["correctness"]
    if checks is None:
        return
    good = [one for one in checks if one["well"]]
    near = max(
        good, key=lambda one: one["found"] / one["bound"] if one["bound"] else 0.0, default=None
    )
    compared = (
        f"nearest to its bound: {near['name']}, {near['found']:.2g} of {near['bound']:g}"
        if near
        else ""
    )
    yield Row("correctness", f"{len(checks)} checks", f"{len(good)} within their bounds", compared)
    for one in checks:
        if not one["well"]:
            yield Row(
                "correctness",
                one["name"],
                f"FAILED: {one['found']:.3g}",
                f"bound {one['bound']:g}; {one['note']}",
            )


def speed(name: str, one: Found, found: Found) -> Row:
    units, memory, compiled = one["units_per_second"], one["memory"], one["compile_seconds"]
    used = [
        f"{part} {_gb(memory[part])}" for part in ("least", "compiler", "allocator") if memory[part]
    ]
    took = f"compile {compiled['cold']:.1f} s" + (
        f", cached {compiled['cached']:.1f} s" if compiled["cached"] else ""
    )
    halved = "; halved, for it did not fit where the plan said so" if one["refused"] else ""
    compared = [
        *mfu(one, found),
        *predicted(one),
        *beside_its_case(name, one, found),
        f"GB: {', '.join(used)}",
        took + halved,
        *goal(name, one, found),
    ]
    size = (
        f"{one['parameters'] / 1e6:,.1f} M parameters, {one['rows']} rows a"
        f" step{_choice(one['choice'])}"
    )
    figure = f"{units:,.0f} {one['unit']}/s, {1 / one['seconds_per_step']:.2f} steps/s"
    return Row("speed", f"{name}: {size}", figure, "; ".join(compared))


def predicted(one: Found) -> Iterator[str]:
    """Yield the measured time, relative to the step's roofline and to the plan's forecast."""
    roofline = one["predicted"]
    if roofline:
        measured = one["seconds_per_step"]
        yield (
            f"{1e3 * measured:.1f} ms a step, {measured / roofline['seconds']:.2f} × its roofline"
            f" ({roofline['seconds_of_bytes'] / roofline['seconds']:.0%} of it bytes)"
        )
        forecast = roofline["forecast"]
        if forecast:
            yield f"{measured / forecast['seconds']:.2f} × its forecast, {forecast['calibration']}"


def beside_its_case(name: str, one: Found, found: Found) -> Iterator[str]:
    """Yield a variant's speed relative to its case, if one part measured both."""
    case = found["models"].get(name.split()[0])
    if one["settings"] and case and case["part"] == one["part"]:
        yield f"{one['units_per_second'] / case['units_per_second']:.2f} × the speed of its case"


def mfu(one: Found, found: Found) -> Iterator[str]:
    """Of the datasheet: causal, full and by documents, once if they are the same."""
    peak = _machine(found)["datasheet_flops_per_second"]
    if not peak:
        return
    share, full_share = one["flops_per_second"] / peak, one["full_flops_per_second"] / peak
    by_documents = one["document_flops_per_second"] / peak
    if share == full_share:
        yield f"MFU {share:.1%}"
    elif by_documents == share:
        yield f"MFU causal {share:.1%} full {full_share:.1%}"
    else:
        yield f"MFU causal {share:.1%} by documents {by_documents:.1%} full {full_share:.1%}"


def goal(name: str, one: Found, found: Found) -> Iterator[str]:
    if name not in GOALS or _machine(found)["chip"] not in HOPPER:
        return
    amount, unit, n_rows = GOALS[name]
    if unit == "ms":
        text, is_reached = f"{amount:g} ms a step", 1e3 * one["seconds_per_step"] <= amount
    else:
        share = one[MFU_BY[unit]] / _machine(found)["datasheet_flops_per_second"]
        text, is_reached = f"{amount:.0%} {unit}", share >= amount
    result = "reached" if is_reached else "missed"
    if n_rows and one["rows"] != n_rows:
        result = f"not judged, it is for {n_rows} rows"
    yield f"goal {text}: {result}"


def text(found: Found) -> str:
    """For the console."""
    table = list(rows(found))
    widths = [max((len(row[i]) for row in table), default=0) for i in range(2)]
    lines = [title(found), ""]
    lines += [
        "  ".join(
            (row.part.ljust(widths[0]), row.what.ljust(widths[1]), f"{row.figure:32}", row.compared)
        )
        for row in table
    ]
    for failure in found["failures"]:
        lines += [
            "",
            f"{failure['unit']} did not run:",
            *(f"    {line}" for line in failure["why"].splitlines()),
        ]
    if (_machine(found) or {}).get("platform") == "cpu":
        lines += [
            "",
            (
                "This is the small form, on a CPU: it shows that everything works, and none of its"
                " figures is a speed."
            ),
        ]
    return "\n".join(lines)


def title(found: Found) -> str:
    m = _machine(found)
    newest = found["parts"][-1]
    if not m:
        return f"gpu_check, {newest['when']}: no machine"
    versions = ", ".join(
        f"{name} {version}" for name, version in m["versions"].items() if name in ("jax", "jaxlib")
    )
    seconds = ", ".join(f"{part['seconds']:.0f} s" for part in found["parts"])
    took = f"{found['form']} form, {seconds}"
    when = newest["when"]
    return f"gpu_check on {m['device']} ({m['cores']} cores), {versions}, {when}: {took}"


def _machine(found: Found) -> Any:
    """Return the newest part's machine. All parts have one kind of device."""
    return found["parts"][-1]["machine"]


def _gb(n: float) -> str:
    return f"{n / 1e9:.3g}"


def _percent(rate: float, peak: float | None) -> str:
    return f"{rate / peak:.0%} of the datasheet's" if peak else "no datasheet"


def _choice(choice: Mapping[str, str]) -> str:
    settings = [
        f"{path.partition('.')[2]}={value}"
        for path, value in choice.items()
        if path != "train.batch"
    ]
    return f", {', '.join(settings)}" if settings else ""
