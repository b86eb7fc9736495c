"""Compiles a config's training step for devices that are not here, and says what it will cost.

    python -m tools.compile_for --config=configs/trm_sudoku.py --topology=v4:2x2x4 [--config.section.field=value …] [--mfu=0.4]

A TPU topology needs the package libtpu (extra: topology) and no TPU: the real step is compiled by XLA for all of its chips,
and what it needs in memory and moves between chips is read off the program. ``--topology=h100`` (or another name of
`jaxtrain.metrics.PEAK_FLOPS`, without its vendor) makes the plan for one such GPU: state and FLOPs, without compiling.

Hours are FLOPs of the model over the datasheet's peak times ``--mfu``. With a curriculum every stage is compiled and costed.
"""

import argparse
import importlib
import math
import re
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies

from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib
from jaxtrain import metrics, optim, specs
from jaxtrain import state as state_lib
from jaxtrain import step as step_lib

TPUS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--topology", default="v4:2x2x4")
    parser.add_argument("--mfu", type=float, default=0.4)
    args, rest = parser.parse_known_args(argv)
    source, overrides, _ = config_lib.parse_args(rest)
    config = config_lib.load(source, overrides)
    generation = args.topology.partition(":")[0]
    if generation in TPUS:
        devices, kind = _tpu(args.topology), TPUS[generation]
    else:
        kind = next((name for name in metrics.PEAK_FLOPS if generation.upper() in name.upper()), "")
        if not kind:
            sys.exit(f"--topology={args.topology} is unknown; there are {', '.join([*TPUS, *metrics.PEAK_FLOPS])}")
        devices = jax.devices()[:1]
    mesh = layout_lib.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model, devices=devices)
    layout = layout_lib.make_layout(mesh, config.mesh.rules)
    task = importlib.import_module(config.workload).make_task(config, layout.shard, config.train.batch)
    tx = optim.make_optimizer(config.optim, task.specs.params, steps=config.train.steps)
    fields = importlib.import_module(config.loader).fields(config.data)
    plan = state_lib.make_plan(task, tx, layout, fields, batch=config.train.batch, ema=config.train.ema > 0)

    peak = metrics.PEAK_FLOPS[kind] * mesh.size
    seconds = task.flops / (args.mfu * peak)
    print(f"{specs.count(task.specs.params):,} parameters; mesh {dict(mesh.shape)} of {kind}")
    print(f"state {state_lib.bytes_per_device(plan.state) / 1e6:.1f} MB per device, of which the carry "
          f"{state_lib.bytes_per_device(plan.state.variables.carry) / 1e6:.1f} MB")  # fmt: skip
    print(f"{task.flops:.3e} FLOP per step; at {args.mfu:.0%} of {peak / 1e15:.2f} PFLOP/s {1e3 * seconds:.2f} ms per step, "
          f"{config.train.steps} steps in {config.train.steps * seconds / 3600:.2f} h")  # fmt: skip
    if generation not in TPUS:
        return
    starts: dict = {}
    for step in range(config.train.steps):
        starts.setdefault(task.stage(step), step)
    for stage, start in starts.items():
        began = time.perf_counter()
        step = step_lib.make_train_step(
            task, tx, layout, plan, accumulate=config.train.accumulate, ema=config.train.ema, guard=config.guard,
            seed=config.seed, stage=stage,
        )  # fmt: skip
        compiled = step.lower(plan.state, plan.batch, step_lib.abstract_stop(layout)).compile()
        memory, took = compiled.memory_analysis(), time.perf_counter() - began
        need = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        print(f"stage {stage} from step {start}: compiled in {took:.0f} s; {need / 1e9:.2f} GB per device "
              f"({memory.temp_size_in_bytes / 1e9:.2f} GB while it runs); {_collectives(compiled.as_text())}")  # fmt: skip


def _tpu(topology: str) -> list:
    """The chips of a topology. Those of two cores each act as one device ("megacore"), as JAX runs them."""
    options = {"chip_config_name": "megacore"} if topology.startswith(("v4", "v5p")) else {}
    return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)


def _collectives(hlo: str) -> str:
    found: dict[str, list[int]] = {}
    names = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    for line in hlo.splitlines():
        if match := re.search(names, line):
            shapes = re.findall(r"\b(?:bf16|[fsu]\d+|pred)\[([\d,]*)\]", line[: match.start()])
            sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
            found.setdefault(match[1], []).append(int(np.sum(sizes)))
    return "; ".join(f"{len(sizes)} {name} of {sum(sizes):,} values" for name, sizes in found.items()) or "no collectives"


if __name__ == "__main__":
    main()
