"""A run's numbers as one table, on the console and in docs/results/h100.md."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

BEGIN, END = "<!-- gpu_check begins -->", "<!-- gpu_check ends -->"
# What one H100 is to reach.
GOALS = {
    "lm-1b-2k": ("full MFU", 0.55),
    "lm-1b-8k": ("full MFU", 0.55),
    "vit-s": ("spectrograms/s", 13_000),
    "trm": ("MFU", 0.40),
}
HOPPER = ("h100", "h200")  # chips that these goals are for
Found = Mapping[str, Any]


class Row(NamedTuple):
    part: str
    what: str
    figure: str
    compared: str


def rows(found: Found) -> Iterator[Row]:
    yield from ceilings(found)
    yield from correctness(found)
    for name, one in found.get("models", {}).items():
        if "seconds_per_step" in one:
            yield speed(name, one, found)
    for form, one in found.get("feeding", {}).items():
        yield feeding(form, one)
    if "state" in found:
        yield from state(found["state"])
    for name, one in found.get("models", {}).items():
        if "profile" in one:
            yield profile(name, one["profile"])
    for failure in found["failures"]:
        yield Row("failed", failure["unit"], "did not run", failure["why"].strip().splitlines()[-1])
    for unit in found["left_out"]:
        yield Row("left out", unit, "did not run", "the time of the whole run was over")


def ceilings(found: Found) -> Iterator[Row]:
    if "ceilings" not in found:
        return
    one, sheet = found["ceilings"], found["machine"]
    product, copy = one["product"]["flops_per_second"], one["copy"]["bytes_per_second"]
    sizes = ", ".join(f"{size}: {_tera(rate)}" for size, rate in one["product"]["by_size"].items())
    compared = f"{_percent(product, sheet['datasheet_flops_per_second'])}; by size {sizes}"
    yield Row(
        "ceilings", f"{one['product']['dtype']} product", f"{_tera(product)} TFLOP/s", compared
    )
    yield Row(
        "ceilings",
        "copy in memory",
        f"{copy / 1e9:.0f} GB/s",
        _percent(copy, sheet["datasheet_bytes_per_second"]),
    )
    yield Row(
        "ceilings",
        "copy from the host",
        f"{one['from_host']['bytes_per_second'] / 1e9:.1f} GB/s",
        "pageable memory",
    )


def correctness(found: Found) -> Iterator[Row]:
    checks = found.get("correctness")
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
    compared = [*mfu(one, found), f"GB: {', '.join(used)}", took + halved, *goal(name, one, found)]
    size = (
        f"{one['parameters'] / 1e6:,.1f} M parameters, {one['rows']} rows a"
        f" step{_choice(one['choice'])}"
    )
    figure = f"{units:,.0f} {one['unit']}/s, {1 / one['seconds_per_step']:.2f} steps/s"
    return Row("speed", f"{name}: {size}", figure, "; ".join(compared))


def mfu(one: Found, found: Found) -> Iterator[str]:
    """Causal and full, of the datasheet and of the measured product, once if they are the same."""
    peaks = {"MFU": found["machine"]["datasheet_flops_per_second"]}
    peaks["of the product"] = (
        found["ceilings"]["product"]["flops_per_second"] if "ceilings" in found else None
    )
    rates = {"": one["flops_per_second"]}
    if one["full_flops_per_second"] != one["flops_per_second"]:
        rates = {"causal ": rates[""], "full ": one["full_flops_per_second"]}
    for name, peak in peaks.items():
        if peak:
            yield " ".join(
                [name, " ".join(f"{kind}{rate / peak:.1%}" for kind, rate in rates.items())]
            )


def goal(name: str, one: Found, found: Found) -> Iterator[str]:
    if name not in GOALS or found["machine"]["chip"] not in HOPPER:
        return
    kind, wanted = GOALS[name]
    if kind.endswith("/s"):
        rate, text = one["units_per_second"], f"{wanted:,} {kind}"
    else:
        flops = one["full_flops_per_second" if kind.startswith("full") else "flops_per_second"]
        rate, text = flops / found["machine"]["datasheet_flops_per_second"], f"{wanted:.0%} {kind}"
    yield f"goal {text}: {'reached' if rate >= wanted else 'missed'}"


def feeding(form: str, one: Found) -> Row:
    overlap = (
        "no copies"
        if one["overlap"] is None
        else f"{one['overlap']:.0%} of the copies overlap computation"
    )
    stages = {
        stage: s for stage, s in one["stage_seconds"].items() if stage not in ("idle", "wait")
    }
    slowest = max(stages, key=lambda stage: stages[stage])
    compared = (
        f"loader {one['loader_rows_per_second']:,.0f} on {one['cores']} cores (most in {slowest}), "
        f"demand {one['demand_rows_per_second']:,.0f}; waiting {one['wait_share']:.0%}; {overlap}"
    )
    return Row(
        "feeding",
        f"{form}: {one['bytes_per_row'] / 1e3:.0f} kB a row",
        f"{one['rows_per_second']:,.0f} rows/s",
        compared,
    )


def state(one: Found) -> Iterator[Row]:
    stalls = ", ".join(f"{steps:.1f}" for steps in one["save_stall_steps"])
    longest = f"longest stall {max(one['save_stall_seconds']):.2f} s"
    yield Row(
        "state", f"{one['case']}: save, {one['bytes'] / 1e6:,.0f} MB", f"{stalls} steps", longest
    )
    for name, run in one["first_step_seconds"].items():
        each = ", ".join(
            f"{phase} {seconds:.1f}" for phase, seconds in run.items() if phase != "together"
        )
        yield Row("state", f"command to first step, {name}", f"{run['together']:.1f} s", each)
    yield Row("state", "restore", f"{one['restore_seconds']:.1f} s", "of the resumed run")
    same = "equal, each step's" if one["same_bits"] else "FAILED: they differ"
    yield Row(
        "state",
        "loss of the resumed run and of one without a break",
        same,
        "XLA adds in a fixed order",
    )


def profile(name: str, one: Found) -> Row:
    most = ", ".join(f"{row[0][:40]} {row[3]:.0%}" for row in one["top"][:3])
    figure = f"{one['matrix']:.0%} in matrix units, gaps {one['idle']:.0%}"
    return Row("profile", name, figure, f"most: {most}; next: {one['next']}")


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
    if found.get("machine", {}).get("platform") == "cpu":
        lines += [
            "",
            (
                "This is the small form, on a CPU: it shows that everything works, and none of its"
                " figures is a speed."
            ),
        ]
    return "\n".join(lines)


def title(found: Found) -> str:
    m = found.get("machine")
    if not m:
        return f"gpu_check, {found['when']}: no machine"
    versions = ", ".join(
        f"{name} {version}" for name, version in m["versions"].items() if name in ("jax", "jaxlib")
    )
    took = f"{found['form']} form, {found['seconds']:.0f} s"
    return f"gpu_check on {m['device']} ({m['cores']} cores), {versions}, {found['when']}: {took}"


def markdown(found: Found) -> str:
    """Return the section of docs/results/h100.md: a chip's figures, and a line of missing ones."""
    m = found.get("machine", {})
    if m.get("platform") in (None, "cpu"):
        return (
            "No figure of this section has been measured on a chip yet. The last run found only a"
            " CPU."
        )
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    table = list(rows(found))
    seen = {(row.part, row.what.partition(":")[0]) for row in table}
    missing: dict[str, list[str]] = {}
    for part, what in expected():
        if not any(p == part and (what is None or w == what) for p, w in seen):
            missing.setdefault(part, []).extend([what] if what else [])
    head = (
        f"Measured on one {m['device']} with {m['cores']} cores, {found['when']} ({found['form']}"
        f" form; {versions})."
    )
    lines = [head, "", "| part | what | figure | compared with |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    if missing:
        named = [
            f"{part} of {', '.join(cases)}" if cases else part for part, cases in missing.items()
        ]
        lines += ["", f"Not measured on a chip yet: {'; '.join(named)}."]
    return "\n".join(lines)


def expected() -> Iterator[tuple[str, str | None]]:
    """(part, case) of a full run on a chip."""
    from tools.chip import cases, feeding

    yield from (("ceilings", None), ("correctness", None))
    yield from (("speed", case.name) for case in cases.CASES)
    yield from (("feeding", form) for form in feeding.FORMS)
    yield ("state", None)
    yield from (("profile", case.name) for case in cases.CASES)


def write_readme(source: pathlib.Path, readme: pathlib.Path) -> int:
    """Replace the text between the marks. 2 with a message if that fails."""
    try:
        found = json.loads(source.read_text())
        before, _, rest = readme.read_text().partition(BEGIN)
        old, mark, after = rest.partition(END)
        if not mark:
            raise ValueError(f"{readme} has no {BEGIN} … {END} to write between")
        readme.write_text(f"{before}{BEGIN}\n{markdown(found)}\n{END}{after}")
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {source} cannot become a section of {readme}: {error}")
        return 2
    return 0


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g}"


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
