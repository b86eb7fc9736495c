"""Compare the forecast times of steps with measured ones, on the CPU devices of this machine.

    python -m tools.bench forecast --out DIR [--minutes N] [--workload NAME …] [--table]

Five workloads at three sizes on three meshes are 45 cells, the smallest sizes first. Each is
compiled and timed in a process of its own, and kept in DIR with its program: the next call
continues. `--minutes` ends it before the next cell. The table compares the cells in DIR with the
forecast by this machine's calibration (`jaxtrain plan --calibrate`), which has seen none of them.
"""

import argparse
import collections
import contextlib
import gzip
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from loaders.io import machine

SECONDS = 4.0  # of a measurement
SLICE, MIN_STEPS = 0.06, 3  # [s] of it; the fastest counts, since others share the processor
MESHES = {"1": (1, 1), "data 2": (2, 1), "data 2 × fsdp 2": (2, 2)}
DECODER = {"model.heads": "4", "model.kv_heads": "2", "model.head_dim": "16"}
ROWS = {
    "vit-s": ("8", "8", "16"),
    "lm-1b-2k": ("4", "8", "16"),
    "trm": ("16", "32", "32"),
    "higgs-lora": ("4", "4", "4"),
    "giblet": ("8", "16", "32"),
}
WIDTHS = {
    "vit-s": ({"model.embed": "32"}, {"model.embed": "64"}, {"model.embed": "128"}),
    "lm-1b-2k": (
        {"model.embed": "32", "model.mlp": "64"},
        {"model.embed": "64", "model.mlp": "128"},
        {"model.embed": "128", "model.mlp": "384"},
    ),
    "trm": (
        {"model.embed": "32", "model.puzzle_embed": "32"},
        {"model.embed": "64", "model.puzzle_embed": "64"},
        {"model.embed": "128", "model.puzzle_embed": "128"},
    ),
    "higgs-lora": (
        {"model.embed": "32", "model.mlp": "64"},
        {"model.embed": "64", "model.mlp": "128"},
        {"model.embed": "128", "model.mlp": "256"},
    ),
    "giblet": (
        {},
        {"model.trunk_widths": "(128, 128)", "model.bottleneck": "64"},
        {"model.trunk_widths": "(256, 256)", "model.bottleneck": "64", "model.head_width": "128"},
    ),
}


class Cell(NamedTuple):
    workload: str
    size: int
    mesh: str

    @property
    def devices(self) -> int:
        return math.prod(MESHES[self.mesh])

    @property
    def file(self) -> str:
        return f"{self.workload}-{self.size}-{self.mesh.replace(' × ', '-').replace(' ', '')}"


def cells(workloads: list[str]) -> Iterator[Cell]:
    """Yield all workloads at the smallest size first, so that each has cells if time is short."""
    for size in range(3):
        for workload in workloads:
            for mesh in MESHES:
                yield Cell(workload, size, mesh)


def measure(cell: Cell, out: pathlib.Path) -> None:
    """Compile and time a cell's step in this process, and keep both."""
    from jaxtrain import plan as plan_lib
    from jaxtrain.assembly import assemble
    from jaxtrain.parallel import cluster
    from jaxtrain.parallel import layout as layout_lib
    from jaxtrain.plan import bound as plan_bound
    from tools.chip import cases

    cluster.use_threads_for_host_devices()
    machine.keep_freed_memory()
    case = next(case for case in cases.CASES if case.name == cell.workload)
    data, fsdp = MESHES[cell.mesh]
    more = {
        **WIDTHS[cell.workload][cell.size],
        "train.batch": ROWS[cell.workload][cell.size],
        "mesh.data": str(data),
        "mesh.fsdp": str(fsdp),
    }
    config = case.config(cases.Data(out / "data", small=True), {}, more)
    target = plan_lib.parse_target("")
    config, _ = plan_lib.decide(config, target, "")
    mesh = layout_lib.make_mesh(data, fsdp, 1)
    assembly = assemble(plan_lib.resolve(config, target), mesh)
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    chosen = cases.Chosen(assembly, plan_bound.bound(assembly, traced, target), {})
    program = cases.compiled(chosen)
    steps = cases.Steps(chosen, cases.first_batch(assembly), program)
    seconds = _seconds(steps)
    with gzip.open(out / f"{cell.file}.hlo.gz", "wt", compresslevel=1) as file:
        file.write(program.as_text() or "")
    result = {"seconds": seconds, "load": os.getloadavg()[0], "mesh": dict(mesh.shape)}
    (out / f"{cell.file}.json").write_text(json.dumps(result))


def _seconds(step: Callable[[], Any]) -> float:
    """Return the mean time of a step, in the fastest of some slices of time."""
    import jax

    jax.block_until_ready([step() for _ in range(2)])
    end = time.perf_counter() + SECONDS
    fastest, n_steps = math.inf, MIN_STEPS
    while time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready([step() for _ in range(n_steps)])
        fastest = min(fastest, (time.perf_counter() - began) / n_steps)
        n_steps = max(MIN_STEPS, round(SLICE / fastest))
    return fastest


def compare(cell: Cell, out: pathlib.Path) -> tuple[float, float, Mapping[str, float]]:
    """Return the measured and the forecast seconds of a cell, and the forecast by kind."""
    from jaxtrain.plan import calibration, forecast, hlo

    kept: dict[str, Any] = json.loads((out / f"{cell.file}.json").read_text())
    with gzip.open(out / f"{cell.file}.hlo.gz", "rt") as file:
        program = hlo.Program(file.read())
    costs = calibration.load(cell.devices)
    if costs is None:
        sys.exit(calibration.refusal())
    found = forecast.on_hosts(program, kept["mesh"], costs)
    return kept["seconds"], found.seconds, found.by_kind


def table(workloads: list[str], out: pathlib.Path) -> None:
    errors: dict[int, list[float]] = collections.defaultdict(list)
    loads = list[float]()
    print("| workload | size | mesh | measured [ms] | forecast [ms] | error | most of it |")
    print("|---|---:|---|---:|---:|---:|---|")
    for cell in cells(workloads):
        if not (out / f"{cell.file}.json").exists():
            continue
        seconds, forecast, by_kind = compare(cell, out)
        loads.append(json.loads((out / f"{cell.file}.json").read_text())["load"])
        error = forecast / seconds - 1
        errors[cell.devices].append(abs(error))
        largest = list(by_kind)[:2]
        print(
            f"| {cell.workload} | {cell.size + 1} | {cell.mesh} | {1e3 * seconds:.1f} |"
            f" {1e3 * forecast:.1f} | {error:+.0%} | {', '.join(largest)} |"
        )
    if errors:
        print(f"\n{_summary([size for sizes in errors.values() for size in sizes])}")
        for n_devices, sizes in sorted(errors.items()):
            print(f"meshes of {n_devices}: {_summary(sizes)}")
        print(f"load of the machine: {min(loads):.1f} to {max(loads):.1f}")


def _summary(errors: list[float]) -> str:
    median = statistics.median(errors)
    return f"{len(errors)} cells: median {median:.1%}, largest {max(errors):.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workload", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.cell:
        workload, size, mesh = args.cell
        measure(Cell(workload, int(size), mesh), args.out)
        return 0
    end = time.monotonic() + 60 * args.minutes
    for cell in [] if args.table else cells(args.workload):
        if (out_file := args.out / f"{cell.file}.json").exists():
            continue
        if time.monotonic() > end:
            break
        flags = f"--xla_force_host_platform_device_count={cell.devices}"
        command = [sys.executable, "-m", "tools.bench", "forecast", "--out", str(args.out)]
        command += ["--cell", cell.workload, str(cell.size), cell.mesh]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        process = subprocess.run(command, env=env, capture_output=True, text=True)
        if process.returncode:
            print(process.stderr[-2000:], file=sys.stderr)
            return 1
        seconds = json.loads(out_file.read_text())["seconds"]
        print(f"{cell.file}: {1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
    with contextlib.suppress(BrokenPipeError):
        table(args.workload, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
