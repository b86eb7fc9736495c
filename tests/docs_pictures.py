"""Draw the pictures of the docs that no notebook draws.

python -m tests.docs_pictures report runs/xcm-demo  # docs/report.png and docs/classes.png
python -m tests.docs_pictures head runs/xcm-resumed  # docs/runs.png, of a run that was interrupted
python -m tests.docs_pictures plan  # docs/plan.svg: compiles four plans, in minutes
python -m tests.docs_pictures loader  # docs/results/loader.svg, from the table of its page
python -m tests.docs_pictures scale  # docs/results/scale.svg, from the tables of its page
"""

import base64
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from PIL import Image

from tests.support.chromium import Browser

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PLANNED, DEVICES = "giblet:blank", (1, 2, 4, 8)
UNITS = {"GB": 1.0, "MB": 1e-3, "kB": 1e-6, "B": 1e-9}
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "docs",
        "svg.fonttype": "none",  # text, where outlines of letters take more than the picture
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def jaxtrain(*arguments: object) -> str:
    command = [sys.executable, "-m", "jaxtrain", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def save(figure, path: pathlib.Path) -> None:
    """Write a figure without its date, so that the same numbers give the same file."""
    figure.set_layout_engine("constrained")
    figure.savefig(path, metadata={"Date": None})


def parts_of(plan: str) -> dict[str, float]:
    """The memory of a device by part [GB], from the text of a plan."""

    def size(name: str) -> float:
        found = re.search(rf"^  {name} +([\d.]+) (\w?B)\b", plan, re.M)
        return float(found[1]) * UNITS[found[2]] if found else 0.0

    running = size("while it runs") or size("gradients")
    return {
        "parameters": size("parameters"),
        "optimizer": size("optimizer"),
        "batch": size("batch"),
        "gradients and activations": running,
    }


def plan() -> None:
    texts = [jaxtrain("plan", f"--config={PLANNED}", f"gpu:h100x{n}") for n in DEVICES]
    bars = [parts_of(text) for text in texts]
    figure, axis = pyplot.subplots(figsize=(7, 2.6))
    names = [f"{n} × H100" for n in DEVICES]
    left = [0.0] * len(bars)
    for part in bars[0]:
        axis.barh(names, [bar[part] for bar in bars], left=left, label=part, height=0.62)
        left = [at + bar[part] for at, bar in zip(left, bars, strict=True)]
    for at, (end, text) in enumerate(zip(left, texts, strict=True)):
        fits = "fits" if "this run has no problem" in text else "does not fit"
        axis.text(
            end + 1.5, at, f"{end:.1f} GB, {fits}", va="center", bbox={"color": "white", "pad": 1}
        )
    axis.axvline(80, color="black", linestyle=":", linewidth=1)
    axis.text(81, 3.4, "80 GB", va="bottom")
    axis.set(xlabel="memory of each device [GB]", xlim=(0, 185))
    axis.invert_yaxis()
    axis.legend(frameon=False, loc="lower right")
    save(figure, DOCS / "plan.svg")


def loader() -> None:
    page = DOCS / "results" / "loader.md"
    table = re.search(r"^\| examples/s.*?\n\n", page.read_text(), re.M | re.S)
    assert table, f"{page} has no table of examples/s"
    head, _, ours, *others, ratio = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].strip().split("\n")
    )
    best = [max(float(row[i]) for row in others) for i in range(1, len(head))]
    figure, axis = pyplot.subplots(figsize=(7, 2.8))
    for shift, label, values in (
        (-0.2, "jaxtrain", [float(x) for x in ours[1:]]),
        (0.2, f"best of {len(others)} alternatives", best),
    ):
        bars = axis.bar([i + shift for i in range(len(values))], values, width=0.38, label=label)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    axis.set_xticks(
        range(len(best)),
        [f"{name}\n{times}" for name, times in zip(head[1:], ratio[1:], strict=True)],
    )
    axis.set(ylabel="examples/s, one core")
    axis.legend(frameon=False)
    save(figure, DOCS / "results" / "loader.svg")


def efficiencies(section: str, growth: str) -> dict[int, float]:
    """Chips -> efficiency [%], from the table of a section of docs/results/scale.md."""
    table = re.search(rf"^{growth} scaling.*?\n\n(.*?)\n(?:\n|\Z)", section, re.I | re.M | re.S)
    rows = [line.split("|") for line in table[1].splitlines()[2:]] if table else []
    return {int(row[1]): float(row[9].strip(" %")) for row in rows if row[9].strip()}


def scale() -> None:
    page = (DOCS / "results" / "scale.md").read_text()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for section in page.split("\n## ")[1:]:
        for axis, growth in zip(axes, ("weak", "strong"), strict=True):
            found = efficiencies(section, growth)
            if len(found) > 1:
                title = section.partition("\n")[0]
                axis.plot(found.keys(), found.values(), marker="o", markersize=3, label=title)
    for axis, growth in zip(axes, ("weak", "strong"), strict=True):
        axis.axhline(80, color="black", linestyle=":", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(title=f"{growth} scaling", xlabel="chips")
    axes[0].set(ylabel="efficiency by the forecast [%]", ylim=(0, 140))
    lines, titles = axes[0].get_legend_handles_labels()
    figure.legend(lines, titles, frameon=False, fontsize=7, loc="outside right center")
    save(figure, DOCS / "results" / "scale.svg")


def report(run: str) -> None:
    with page_of(run) as browser:
        take(browser, 0, 1164, 828, DOCS / "report.png")
        place = "document.querySelector('{}').getBoundingClientRect().top"
        top, bottom = (
            browser.value(place.format(section)) for section in ("#classes", "#pictures")
        )
        take(browser, top, 850, bottom - top, DOCS / "classes.png")


def head(run: str) -> None:
    with page_of(run) as browser:
        take(browser, 0, 1164, 1160, DOCS / "runs.png")


@contextlib.contextmanager
def page_of(run: str) -> Iterator[Browser]:
    """The report of a run, drawn in a browser."""
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder, "report.html")
        jaxtrain("report", run, "--out", page)
        with Browser(width=1164, height=828) as browser:
            browser.call("Emulation.setScrollbarsHidden", hidden=True)
            browser.open(page.as_uri())
            browser.until("document.querySelector('.charts svg, .charts canvas')")
            yield browser


def take(browser: Browser, top: float, width: float, height: float, path: pathlib.Path) -> None:
    """Write a part of a page that begins at its left edge, in 64 colours."""
    part = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
    picture = browser.call("Page.captureScreenshot", clip=part, captureBeyondViewport=True)["data"]
    Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64, dither=0).save(
        path, optimize=True
    )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    pictures = {"report": report, "head": head, "plan": plan, "loader": loader, "scale": scale}
    pictures[sys.argv[1]](*sys.argv[2:])
