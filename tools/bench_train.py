"""Training steps compared with PyTorch, eager and by torch.compile, on the same cores.

The formulas are the same.

    python -m tools.bench train --model=language [--embed=128] [--depth=4] [--heads=4]
        [--context=64] [--batch=12] [--rounds=50]
    python -m tools.bench train --model=bird [--embed=128] [--depth=3] [--heads=4] [--patch=32]
        [--batch=32] [--rounds=20]
    python -m tools.bench train --model=giblet [--batch=32] [--rounds=10]
    python -m tools.bench train --model=trm [--embed=128] [--batch=32] [--rounds=10] [--cells=81]
        [--low=6]
    python -m tools.bench train --table [language-128 bird-demo …]
        # of docs/results/cpu-steps.md, by row

A model is the small GPT-2 of configs/shakespeare_char.py, the supervised ViT of the demo birds, the
autoencoder of the film demo, or the recursive model. A step is forward, backward, gradient clipping
and the update. Weights and rows are the same on both sides, and the losses of 20 steps are compared
first. If they differ, the command exits with 1.

Steps alternate, ours and theirs, so that other work of the machine meets all. The medians are
compared. `torch.compile` takes the forward pass with the loss (of TRM the net), and so its
gradients. If it cannot (without a C++ compiler), a line says so. The extra `bench` has PyTorch.
"""

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from loaders.io import machine

MODELS = ("trm", "language", "bird", "giblet")
# Rows of the table: name -> what is measured, and the arguments.
ROWS = {
    "language-128": ("language, d 128, 4 layers, 12 × 64 tokens", ("--model=language",)),
    "language-256": (
        "language, d 256, 4 layers, 12 × 64 tokens",
        ("--model=language", "--embed=256", "--rounds=30"),
    ),
    "language-512": (
        "language, d 512, 4 layers, 12 × 64 tokens",
        ("--model=language", "--embed=512", "--heads=8", "--rounds=10"),
    ),
    "bird-demo": (
        "bird, the demo: d 128, 3 layers, 32 × 65 tokens",
        ("--model=bird", "--rounds=30"),
    ),
    "bird-384": (
        "bird, d 384, 6 layers, 8 × 257 tokens",
        (
            "--model=bird",
            "--embed=384",
            "--depth=6",
            "--heads=6",
            "--patch=16",
            "--batch=8",
            "--rounds=10",
        ),
    ),
    "giblet-demo": ("giblet, the demo: 85 M parameters, 32 rows", ("--model=giblet",)),
    "trm-128": ("TRM, d 128, 32 × 97 tokens", ("--model=trm",)),
    "trm-256": ("TRM, d 256, 8 × 97 tokens", ("--model=trm", "--embed=256", "--batch=8")),
    "trm-512": (
        "TRM, d 512, 4 × 97 tokens",
        ("--model=trm", "--embed=512", "--batch=4", "--rounds=5"),
    ),
}
COLUMNS = (
    "step",
    "eager / ours, medians",
    "of the shortest",
    "of single rounds",
    "of least CPU time",
    "torch.compile / ours, medians",
    "of the shortest",
    "GFLOP/s: ours, eager, compiled",
    "PyTorch's product",
    "load",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}"
SAME = 20  # [steps] whose losses are compared


class Times(NamedTuple):
    wall: Sequence[float]
    cpu: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.wall)


def measure(
    sides: Mapping[str, Callable[[], float]], rounds: int
) -> tuple[dict[str, Times], dict[str, float]]:
    """Return steps in turn: times and last losses, by name."""
    times = {name: Times([], []) for name in sides}
    losses = {
        name: float(step()) for name, step in sides.items()
    }  # the first step of each warms up
    for _ in range(rounds):
        for name, step in sides.items():
            began, spent = time.perf_counter(), time.process_time()
            losses[name] = float(step())
            times[name].wall.append(time.perf_counter() - began)  # type: ignore[attr-defined]
            times[name].cpu.append(time.process_time() - spent)  # type: ignore[attr-defined]
    return times, losses


def ratios(ours: Times, theirs: Times) -> tuple[float, float, tuple[float, float], float]:
    """Theirs over ours: of medians, shortest, a round's least and largest, least CPU time."""
    rounds = [t / o for o, t in zip(ours.wall, theirs.wall, strict=True)]
    return (
        theirs.median / ours.median,
        min(theirs.wall) / min(ours.wall),
        (min(rounds), max(rounds)),
        min(theirs.cpu) / min(ours.cpu),
    )


def row(label: str, times: Mapping[str, Times], flops: float, product: float, load: float) -> str:
    """Return a row of the table: ours, eager and, if it could be compiled, torch.compile."""
    ours, eager, *compiled = times.values()
    median, shortest, (least, most), cpu = ratios(ours, eager)
    more = ratios(ours, compiled[0])[:2] if compiled else None
    rates = ", ".join(f"{flops / side.median / 1e9:.0f}" for side in times.values())
    cells = (
        label,
        f"{median:.2f}",
        f"{shortest:.2f}",
        f"{least:.2f} to {most:.2f}",
        f"{cpu:.2f}",
        *((f"{x:.2f}" for x in more) if more else ("not compiled", "")),
        rates,
        f"{product:.0f}",
        f"{load:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def product_rate() -> float:
    """GFLOP/s of PyTorch's product of two float32 matrices of 1024 × 1024: the best of twenty."""
    import torch

    x = torch.randn(1024, 1024)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - began)
    return 2 * 1024**3 / min(seconds) / 1e9


def agree(
    ours: Callable[[], float], theirs: Callable[[], float], within: float, steps: int
) -> bool:
    """Whether the first ``steps`` losses are equal. Print their distance, also after 20."""
    both = [(float(ours()), float(theirs())) for _ in range(SAME)]
    each = [abs(a / b - 1) for a, b in both]
    first = max(each[:steps])
    print(
        f"losses of {SAME} steps, {both[0][0]:.4f} to {both[-1][0]:.4f}, are within {max(each):.1e}"
        f" of each other's, of the first {steps} within"
        f" {first:.1e}{'' if first <= within else f', more than {within}'}",
        flush=True,
    )
    return first <= within


def compiled_or_why(make: Callable[[], Callable[[], float]]) -> Callable[[], float] | None:
    try:
        step = make()
        step()
    except Exception as error:  # of Dynamo, Inductor or the C++ compiler that it starts
        print(
            f"torch.compile is left out: {type(error).__name__}:"
            f" {str(error).strip().splitlines()[0]}",
            flush=True,
        )
        return None
    return step


def compare(args: argparse.Namespace, size: Mapping[str, int]) -> int:
    # and PyTorch, which --table does not need
    model = importlib.import_module(f"tools.torch_steps.{args.model}")
    bench = model.sides(size)
    compiled = bench.others.get("torch.compile")
    sides = {
        "jaxtrain": bench.ours,
        **{name: make() for name, make in bench.others.items() if make is not compiled},
    }
    same = True
    if bench.within is not None:
        ours, theirs, *_ = bench.same() if bench.same else sides.values()
        same = agree(ours, theirs, bench.within, bench.steps)
    if compiled and not args.eager and (step := compiled_or_why(compiled)):
        sides["torch.compile"] = step
    times, losses = measure(sides, size["rounds"])
    for name, side in times.items():
        print(
            f"{name:15} {1e3 * side.median:8.1f} ms per step, {bench.count / side.median:9.0f}"
            f" {bench.unit}/s, {bench.ours.flops / side.median / 1e9:6.1f} GFLOP/s; loss"
            f" {losses[name]:.3f}"
        )
    ours, *others = times.values()
    for name, side in zip(list(times)[1:], others, strict=True):
        median, shortest, (least, most), cpu = ratios(ours, side)
        print(
            f"{name} / jaxtrain: medians {median:.2f} (single rounds {least:.2f} to {most:.2f}),"
            f" shortest {shortest:.2f}, least CPU time {cpu:.2f}, which a busy machine disturbs"
            " less"
        )
    if args.row:
        print(row(args.row, times, bench.ours.flops, product_rate(), os.getloadavg()[0]))
    return 0 if same else 1


def table(names: Sequence[str], *options: str) -> int:
    """Measure and print each row in its own process. Other output of it goes to stderr."""
    print(HEAD, flush=True)
    failed = 0
    for name in names or ROWS:
        label, arguments = ROWS[name]
        command = [
            sys.executable,
            "-m",
            "tools.bench_train",
            *arguments,
            *options,
            f"--row={label}",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        *others, last = done.stdout.splitlines() or [""]
        print(
            "\n".join([f"{name}:", *others, *([] if last.startswith("|") else [last])]),
            file=sys.stderr,
            flush=True,
        )
        if last.startswith("|"):
            print(last, flush=True)
        failed |= done.returncode
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.bench train", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--table",
        nargs="*",
        choices=ROWS,
        metavar="ROW",
        help="a Markdown table of these rows, or of all",
    )
    parser.add_argument("--model", choices=MODELS, default="trm")
    sizes = (
        "embed",
        "depth",
        "heads",
        "context",
        "patch",
        "cells",
        "low",
        "high",
        "inner",
        "batch",
        "rounds",
    )
    for name in sizes:
        parser.add_argument(f"--{name}", type=int, help="size; default: the model's own")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--row", metavar="LABEL", help="print a row of the table, called so, last")
    args = parser.parse_args(argv)
    if args.table is not None:
        return table(args.table, *["--eager"] * args.eager)
    machine.keep_freed_memory()  # as a run does; PyTorch, in the same process, has the same of it
    defaults = importlib.import_module(f"tools.torch_steps.{args.model}").DEFAULTS
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    if unknown := sorted(given.keys() - defaults.keys()):
        parser.error(f"--{unknown[0]}: {args.model} has no such size; it has {', '.join(defaults)}")
    return compare(args, {**defaults, **given})


if __name__ == "__main__":
    sys.exit(main())
