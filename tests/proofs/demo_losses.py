"""Compare losses in 16 bits of newer operations with another order's, in the runs of the demos.

    python -m tests.proofs.demo_losses --text /path/to/input.txt --higgs DIR [--only birds trm]

The operations are those of half_losses, on the configs, rows and schedules of the demos: the
built-in birds, characters of a text, generated boards, the generated film, and adapters on the base
that `python -m tools.demo_higgs --out DIR` trains. Each way is a run of --steps by the trainer
itself, whose metrics have each loss. A row of the table has the mean of |loss - the older one's
loss| / loss over all steps and over the first ten. It exits with 1 under the condition of
half_losses.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.proofs import half_losses
from tools import demo_higgs

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAYS = ("older", "other order", "float32", "newer")
EACH = (
    "train.eval_every=0",
    "metrics.every=1",
    "model.dtype=bfloat16",
)


class Demo(NamedTuple):
    operation: str  # of half_losses
    config: str
    mesh: tuple[int, int]  # data and fsdp
    other_order: tuple[int, int]
    both: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    newer: tuple[str, ...] = ()


def demos(text: str, higgs: pathlib.Path) -> dict[str, Demo]:
    """Return the demos: ``text`` is the path of the characters, ``higgs`` that of demo_higgs."""
    data = demo_higgs.data_flags(higgs, "adapters")
    adapters = (
        *(f"data.{name}={value}" for name, value in data.items()),
        f"warm_start.source={higgs / 'base-weights'}",
    )
    kept = ("model.remat=none", "model.unroll=4", "train.accumulate=1")
    loop = ("model.remat=full", "model.unroll=1", "train.accumulate=4")
    trm = ("model.inner_multiple=128",)
    chunks = ("model.chunk=192",), ("model.chunk=48",)  # of 12 × 64 / 4 tokens of a device
    return {
        "giblet": Demo("gram", "giblet:demo", (1, 8), (2, 4)),
        "characters": Demo(
            "chunks", f"shakespeare_char:{text}", (1, 4), (4, 1), older=chunks[0], newer=chunks[1]
        ),
        "trm": Demo(
            "glu",
            "trm_sudoku:deep",
            (1, 1),
            (2, 1),
            trm,
            ("model.kernel=xla",),
            ("model.kernel=auto",),
        ),
        "birds": Demo("vit", "xcm", (1, 1), (2, 1)),
        "higgs": Demo("higgs", "higgs_demo:adapters", (1, 1), (2, 1), adapters, loop, kept),
    }


def train(demo: Demo, way: str, steps: int, folder: pathlib.Path) -> np.ndarray:
    """Train a demo in one of `WAYS`. Return the loss of each step, float64 [steps]."""
    workdir = folder / way.replace(" ", "-")
    mesh = demo.other_order if way == "other order" else demo.mesh
    devices = mesh[0] * mesh[1]
    fields = [*EACH, *demo.both, *(demo.newer if way == "newer" else demo.older)]
    fields += ["model.dtype=float32"] if way == "float32" else []
    fields += [f"train.steps={steps}", f"checkpoint.every={steps}", f"workdir={workdir}"]
    fields += [f"mesh.data={mesh[0]}", f"mesh.fsdp={mesh[1]}"]
    command = [sys.executable, "-m", "tests.proofs.demo_losses", "--run", demo.operation, way]
    command += [f"--config={demo.config}", *(f"--config.{field}" for field in fields)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [x for line in lines if (x := json.loads(line))["split"] == "train" and "loss" in x]
    if [x["step"] for x in found] != list(range(1, steps + 1)):
        sys.exit(f"{workdir / 'metrics.jsonl'} has not the loss of each of {steps} steps")
    return np.array([x["loss"] for x in found])


def run(operation: str, way: str, argv: Sequence[str]) -> int:
    """Train in this process, with the older or the newer operation."""
    from jaxtrain import main as trainer

    one = half_losses.comparisons()[operation]
    with one.newer() if way == "newer" else one.older():
        return trainer.main(argv)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["--run"]:
        return run(argv[1], argv[2], argv[3:])
    parser = argparse.ArgumentParser(
        "python -m tests.proofs.demo_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(demos("", pathlib.Path()))
    parser.add_argument("--text", help="a file, of the characters")
    parser.add_argument("--higgs", type=pathlib.Path, help="a folder of tools.demo_higgs")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(argv)
    if "characters" in args.only and not args.text:
        parser.error("the characters need --text FILE; or name the other demos by --only")
    if "higgs" in args.only and not args.higgs:
        parser.error("higgs needs --higgs DIR; or name the other demos by --only")
    code = 0
    print("| demo | loss | newer operation: all steps, the first | another order | float32 |")
    print("|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            demo = demos(str(args.text), (args.higgs or pathlib.Path()).absolute())[name]
            losses = {way: train(demo, way, args.steps, pathlib.Path(folder, name)) for way in WAYS}
            older = losses.pop("older")
            line, good = half_losses.row(older, losses)
            code = code if good else 1
            span = f"{older[:8].mean():.3f} to {older[-8:].mean():.3f}"
            print(f"| {name} | {span} | {line} |", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
