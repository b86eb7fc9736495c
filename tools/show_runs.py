"""Trains a recipe on this machine's accelerator, and keeps seed, curve and command on a page.

    python -m tools.show_runs characters --data /path/to/input.txt
    python -m tools.show_runs birds --data /path/to/esc10 --minutes 9  # again: the rest
    python -m tools.show_runs sudoku-hard --seed 1
    python -m tools.show_runs all --small --page /tmp/page.md  # each for some steps, on a CPU

A recipe is one config or two, each by `jaxtrain train`, so that a run that was cut off is resumed
by the same command. Its workdir is below --out. After --minutes, or by SIGTERM,
it is asked to save and end; the first exits with 3. A finished recipe is a section of the page of
this kind of device (docs/results/h100.md), which is begun if there is none. A section of the same
recipe, seed and device is replaced, and no other is touched.
"""

import argparse
import datetime
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loaders.io import atomic_write
from tools import child_group

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
MAX_POINTS = 12  # of a curve on the page
NO_DEVICE = "unknown"
NO_DEVICE_TEXT = "JAX finds no device; python -c 'import jax; jax.devices()' says why"


class Recipe(NamedTuple):
    title: str
    metrics: tuple[str, ...]  # of the evaluations, in the order of the table
    # of each stage: config, with {data} for --data and {out} for --out
    stages: Mapping[str, str]
    needs: str = ""  # the meaning of --data
    published: str = ""
    small: tuple[str, ...] = ()  # overrides of the small form


SMALL = ("train.steps=4", "train.eval_every=2", "checkpoint.every=2", "train.eval_batches=1")
SMALL_SUDOKU = (
    *("model.embed=32", "model.inner_multiple=32", "model.heads=4", "model.puzzle_embed=32"),
    *("model.dtype=float32", "model.halt_steps=2", "model.test_steps=2", "model.growth_steps=2"),
    *("train.batch=8", "optim.warmup=1", "model.rollouts=2", "model.cycles_low=1"),
)
TINY_SOURCE = "data.sources=({{'n_train': 16, 'n_test': 8, 'views': 8, 'grade': '{}'}},)"
SMALL_BIRDS = (
    *("model.embed=32", "model.depth=2", "model.heads=2", "model.patch=(64, 64)"),
    *("model.dtype=float32", "train.batch=4", "optim.warmup=1"),
)


def sudoku(grade: str) -> Recipe:
    return Recipe(
        f"Sudoku boards of grade {grade}, contract last, with rollouts",
        ("exact_accuracy", "accuracy"),
        {f"trm-{grade}": f"trm_sudoku:{grade}"},
        small=(*SMALL_SUDOKU, TINY_SOURCE.format(grade)),
    )


RECIPES = {
    "sudoku-medium": sudoku("medium"),
    "sudoku-hard": sudoku("hard"),
    "characters": Recipe(
        "Characters of Shakespeare, nanoGPT's model for a GPU",
        ("cross_entropy", "accuracy"),
        {"shakespeare_char": "shakespeare_char:{data},gpu"},
        needs="the text, input.txt",
        published="nanoGPT's README: 1.4697, its best evaluation of 200 batches",
        small=(
            *("model.embed=32", "model.depth=2", "model.heads=2", "model.mlp=64", "model.unroll=1"),
            *("model.dtype=float32", "data.context=64", "train.batch=4", "optim.warmup=1"),
            "model.generation={'prompts': ('R',), 'tokens': 4}",
        ),
    ),
    "birds": Recipe(
        "ESC-10, a masked autoencoder without labels, then with labels",
        ("accuracy", "probe_accuracy", "objective_loss"),
        {"esc10-mae": "esc10:{data},mae", "esc10-tuned": "esc10:{data},{out}/esc10-mae"},
        needs="the folder of ESC-10",
        published="a random forest on MFCC 72.7 %, people 95.7 %",
        small=SMALL_BIRDS,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes
    for name in RECIPES if args.recipe == "all" else (args.recipe,):
        if code := show(name, args, deadline):
            return code
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.show_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", choices=[*RECIPES, "all"])
    needs = "; ".join(f"{name}: {r.needs}" for name, r in RECIPES.items() if r.needs)
    parser.add_argument("--data", action="append", default=[], help=needs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="of this call")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/shown"))
    parser.add_argument("--page", type=pathlib.Path, help="default: that of this kind of device")
    parser.add_argument("--small", action="store_true", help="some steps of small models")
    args = parser.parse_args(argv)
    names = RECIPES if args.recipe == "all" else (args.recipe,)
    needing = [name for name in names if RECIPES[name].needs]
    if len(args.data) != len(needing):
        each = "; ".join(f"{name} needs {RECIPES[name].needs}" for name in needing)
        parser.error(f"--data: {len(args.data)} given; {each or 'none is needed'}")
    for path in args.data:
        if not pathlib.Path(path).exists():
            parser.error(f"--data={path}: there is no such file or folder")
    args.data_of = dict(zip(needing, args.data, strict=True))
    for name, path in args.data_of.items():
        if problem := error_of(name, path, small=args.small):
            parser.error(f"--data={path}: {problem}")
    if args.small and args.page is None:
        parser.error("--small shows that it works, and no page has its figures; give --page")
    refuse_a_page_without_a_folder(parser, args.page)
    return args


def refuse_a_page_without_a_folder(
    parser: argparse.ArgumentParser, page: pathlib.Path | None
) -> None:
    """End with an error: else a section would be lost after its run."""
    if page and not page.absolute().parent.is_dir():
        parser.error(f"--page={page}: {page.absolute().parent} is no folder; make it first")


def error_of(name: str, data: str, *, small: bool) -> str:
    """Return the error of a recipe's first config with these files, or an empty text.

    The later stages begin with runs that are not there yet. No device is taken.
    """
    from jaxtrain import config as config_lib

    recipe = RECIPES[name]
    config = next(iter(recipe.stages.values())).format(data=data, out="")
    pairs = (each.partition("=") for each in (*SMALL, *recipe.small) if small)
    settings = [(field, value) for field, _, value in pairs]
    try:
        config_lib.load(config, settings)
    except config_lib.ConfigError as error:
        return str(error)
    return ""


def show(name: str, args: argparse.Namespace, deadline: float) -> int:
    """Train the stages of a recipe, and write its section. Return the code to exit with."""
    recipe = RECIPES[name]
    device, kind = this_device()
    out = (args.out / f"seed-{args.seed}").absolute()
    if device == NO_DEVICE:
        print(f"show_runs: {NO_DEVICE_TEXT}", file=sys.stderr)
        return 2
    if (before := device_of(out, device)) != device:
        print(
            f"show_runs: {out} has runs of {before}, and this machine has {device}: a run is of"
            " one device; give another folder by --out",
            file=sys.stderr,
        )
        return 2
    commands, curves = [], {}
    for stage, config in recipe.stages.items():
        config = config.format(data=args.data_of.get(name, ""), out=out)
        command = ["jaxtrain", "train", f"--config={config}", f"--config.seed={args.seed}"]
        small = [f"--config.{setting}" for setting in (*SMALL, *recipe.small) if args.small]
        command += [f"--config.workdir={out / stage}", *small]
        print(shlex.join(command), flush=True)
        code = train(command, deadline)
        if code:
            return code
        commands.append(shlex.join(command))
        curves[stage] = curve(out / stage, recipe.metrics)
    page = args.page or RESULTS / f"{kind}.md"
    text = section(name, recipe, args.seed, commands, curves, device)
    add(page, device, f"{name}, seed {args.seed}, {device}", text)
    print(f"{page}: {recipe.title}, seed {args.seed}")
    return 0


def device_of(out: pathlib.Path, device: str) -> str:
    """Return the device of the runs in a folder, which is written there by the first of them."""
    path = out / "device"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        atomic_write.write(path, device + "\n")
    return path.read_text().strip()


def add(page: pathlib.Path, device: str, name: str, text: str) -> None:
    """Put a section on a page, which is begun if there is none."""
    head = f"# {device}\n\nAfter this page you know how fast each workload runs on it.\n"
    if not page.exists():
        print(f"{page} is new: add it to docs/results/index.md and mkdocs.yml")
    before = page.read_text() if page.exists() else head
    atomic_write.write(page, with_section(before, name, text))


def train(command: Sequence[str], deadline: float) -> int:
    """Run a stage. Return 0 at its end, 3 if time was over and it was saved, else its code."""
    with child_group.child([sys.executable, "-m", *command], ROOT) as process:
        try:
            code = process.wait(max(deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it saves, and ends with 75
            code = process.wait()
    if code == 75:
        print("the time was over, and the run is saved: the same command resumes it")
        return 3
    return code


def curve(workdir: pathlib.Path, metrics: Sequence[str]) -> list[dict[str, float]]:
    """Return step and metrics of the evaluations of a run, at most `MAX_POINTS`, and the last."""
    points = []
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("split") == "test":
            points.append({name: record[name] for name in ("step", *metrics) if name in record})
    every = -(-len(points) // MAX_POINTS)
    return points[::-1][::every][::-1] if points else []


def this_device() -> tuple[str, str]:
    """Return the device of this machine, and the name of its page: h100 or cpu."""
    command = "import jax; print(jax.devices()[0].device_kind)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    device = done.stdout.strip() or NO_DEVICE
    return device, page_name(device)


def page_name(device: str) -> str:
    """Return the chip's name, or the device's if it has other memory or is a part of a chip.

    So an A100 of 40 GB, and an instance (MIG) of an H100, have pages of their own.
    """
    from jaxtrain.parallel import chips

    chip = chips.find(device)
    sizes = [1e9 * int(size) for size in re.findall(r"(\d+) ?GB\b", device)]
    if chip and "MIG" not in device.split() and all(size == chip.memory for size in sizes):
        return chip.name
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-")


def section(
    name: str,
    recipe: Recipe,
    seed: int,
    commands: Sequence[str],
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    device: str,
) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"## {recipe.title}, seed {seed}", "", "```", *commands, "```", ""]
    published = f" Published: {recipe.published}." if recipe.published else ""
    lines += [f"Trained on one {device} on {today}.{published}", ""]
    for stage, points in curves.items():
        columns = [m for m in recipe.metrics if any(m in point for point in points)]
        lines += [f"| {stage}: step | {' | '.join(columns)} |", "|---:|" + "---:|" * len(columns)]
        for point in points:
            cells = [f"{point[column]:.4f}" if column in point else "" for column in columns]
            lines.append(f"| {point['step']:,} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def with_section(page: str, name: str, text: str) -> str:
    """Return the page with this section, in place of an earlier one of its name."""
    begins, ends = f"<!-- run {name} begins -->", f"<!-- run {name} ends -->"
    block = f"{begins}\n{text.strip()}\n{ends}\n"
    pattern = re.compile(re.escape(begins) + ".*?" + re.escape(ends) + "\n", re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _: block, page)
    return f"{page.rstrip()}\n\n{block}"


if __name__ == "__main__":
    sys.exit(main())
