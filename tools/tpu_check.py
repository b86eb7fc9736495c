"""Check in the first minutes on a TPU slice which of the plan's figures hold there.

    python -m tools.tpu_check  # on every worker of the slice, each with all of its chips
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tools.tpu_check --minutes 20

    slice      the chips, and the slice's name in `jaxtrain plan`
    memory     of a chip, and what the plan grants a program
    product    FLOP/s of one chip, and of the datasheet
    copy       bytes/s of one chip's memory, and of the datasheet
    links      bytes/s that a chip receives in a gather over all chips, and of the plan
    attention  each kernel of this platform against the formula
    steps      the measured cases on all chips (`tools.chip.cases`): ms a step, by the compiler's
               own estimate and by the roofline, and bytes next to the plan's lower bound

The lines are in the order of use. Worker 0 prints the
lines, and writes them to --out as JSON. A case that fails is named, and the next one begins. It
exits with 1 if a check failed, with 2 if it was called wrongly, and with 3 if the time was over. On
CPUs all is in its small form, which shows that it works.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import plan
from jaxtrain.assembly import assemble
from jaxtrain.parallel import chips, cluster, layout
from jaxtrain.plan import hlo, slices, traffic
from jaxtrain.plan.bound import bound
from jaxtrain.plan.choices import resolve
from loaders.io import atomic_write
from tools.chip import cases, ceilings, correctness, tpu_steps

NEAR = 0.7  # [share] of a rate of the table that a chip should reach at least
GATHERED, SMALL_GATHERED = 1 << 26, 1 << 18  # [bytes] of a chip's part
REPEATS = 10
ROWS_OF_SETTINGS = 4  # [chips] that the rows of `tpu_steps.SETTINGS` are for
SECONDS, SMALL_SECONDS = 3.0, 0.1  # of a case's steps


class Line(NamedTuple):
    name: str
    is_well: bool
    text: str
    numbers: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    began = time.monotonic()
    join()
    lines: list[Line] = []
    code = 0
    with tempfile.TemporaryDirectory(prefix="tpu_check-") as folder:
        for line in measure(args.cases, pathlib.Path(folder)):
            lines.append(line)
            write(args.out, lines)
            if cluster.agree(time.monotonic() - began > 60 * args.minutes):
                say("the time was over; --minutes gives it more, --cases= chooses cases")
                code = 3
                break
    failed = [line.name for line in lines if not line.is_well]
    say(f"failed: {', '.join(failed) or 'nothing'}; all numbers: {args.out}")
    return 1 if failed else code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.tpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ",".join(tpu_steps.SETTINGS)
    parser.add_argument("--minutes", type=float, default=10.0, help="at most; default: 10")
    parser.add_argument("--cases", default=names, help=f"of {names}; default: all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tpu_check.json"))
    args = parser.parse_args(argv)
    args.cases = args.cases.split(",")
    for name in args.cases:
        if name not in tpu_steps.SETTINGS:
            parser.error(f"--cases={name} is unknown; expected of: {names}")
    if args.minutes <= 0:
        parser.error(f"--minutes={args.minutes}: expected a number above 0")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out={args.out}: {args.out.absolute().parent} is no folder")
    return args


def join() -> None:
    """Join the workers of the slice, by the environment of this one."""
    cluster.start_jax()
    cluster.use_threads_for_host_devices()
    membership = cluster.find()
    if membership.processes > 1:
        jax.distributed.initialize(membership.coordinator, membership.processes, membership.process)


def measure(names: Sequence[str], folder: pathlib.Path) -> Iterator[Line]:
    device = jax.local_devices()[0]
    is_small = device.platform == "cpu"
    chip = chips.find(device.device_kind)
    yield of_slice(jax.devices(), chip)
    yield of_memory(device, chip)
    reached = ceilings.measure(device)
    table = {"product": ("flops_per_second", "FLOP/s"), "copy": ("bytes_per_second", "bytes/s")}
    for name, (key, unit) in table.items():
        of_table = chip and {"product": chip.flops, "copy": chip.bandwidth}[name]
        yield rate(name, reached[key], of_table or 0.0, unit)
    if jax.device_count() > 1:
        named = slice_name(jax.devices(), chip)
        of_plan = plan.parse_target(named).links if named else 0.0
        yield rate("links", gathered(is_small=is_small), of_plan, "bytes/s")
    for check in correctness.attention(quick=is_small):
        text = f"error {check.found:.1e}, bound {check.bound:.1e} ({check.note})"
        yield Line(check.name, check.well, text, check._asdict())
    data = cases.Data(folder, small=is_small)
    for name in names:
        try:
            yield of_case(name, data, plan.parse_target(""))
        except Exception as error:  # of the compiler or the device: the other cases go on
            first = next(iter(str(error).splitlines()), "")
            yield Line(name, False, f"{type(error).__name__}: {first[:200]}", {})
        jax.clear_caches()


def of_slice(devices: Sequence[Any], chip: chips.Chip | None) -> Line:
    name = slice_name(devices, chip)
    kind, n_workers = devices[0].device_kind, jax.process_count()
    text = f"{len(devices)} × {kind}, {n_workers} workers; {name or 'no slice of a plan'}"
    numbers = {"devices": len(devices), "kind": kind, "workers": n_workers, "slice": name}
    return Line("slice", bool(name) or devices[0].platform == "cpu", text, numbers)


def slice_name(devices: Sequence[Any], chip: chips.Chip | None) -> str:
    """Return the name of a slice as in --plan=, by the places of its chips. "" = none has it."""
    if chip is None or not chip.is_tpu:
        return ""
    places = np.array([device.coords for device in devices])
    sides = sorted((places.max(0) - places.min(0) + 1).tolist())
    known = slices.existing(chip.name)
    if len(known[0]) == 2:  # their third coordinate is 0
        sides = sides[1:]
    if tuple(sides) not in {tuple(sorted(each)): each for each in known}:
        return ""
    exact = {tuple(sorted(each)): each for each in known}[tuple(sides)]
    return slices.name(chip.name, exact)


def of_memory(device: Any, chip: chips.Chip | None) -> Line:
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    of_plan = chip.memory if chip else 0
    text = f"{limit / 2**30:.2f} GiB, of the plan {of_plan / 2**30:.2f}"
    # more is well, and a plan may be short of it by a hundredth
    is_well = not (chip and limit) or limit >= 0.99 * of_plan
    return Line("memory", is_well, text, {"limit": limit, "plan": of_plan})


def rate(name: str, found: float, of_table: float, unit: str) -> Line:
    text = f"{found:.3g} {unit}"
    if of_table:
        text += f", {found / of_table:.0%} of {of_table:.3g}"
    is_well = not of_table or found >= NEAR * of_table
    return Line(name, is_well, text, {"found": found, "table": of_table})


def gathered(*, is_small: bool) -> float:
    """Return the bytes/s that a device receives if each gathers the parts of all."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    size = SMALL_GATHERED if is_small else GATHERED
    split = NamedSharding(mesh, PartitionSpec("all"))
    whole = NamedSharding(mesh, PartitionSpec())
    parts = jax.jit(lambda: jnp.ones(len(devices) * size // 4), out_shardings=split)()
    gather = jax.jit(lambda x: x + 1, out_shardings=whole)
    jax.block_until_ready(gather(parts))
    begin = time.perf_counter()
    for _ in range(REPEATS):
        last = gather(parts)
    jax.block_until_ready(last)
    seconds = (time.perf_counter() - begin) / REPEATS
    return (len(devices) - 1) * size / seconds


def of_case(name: str, data: cases.Data, target: plan.Target) -> Line:
    case = next(case for case in cases.CASES if case.name == name)
    count = jax.device_count()
    own = dict(tpu_steps.SETTINGS[name])
    if data.small:
        own = {"train.batch": str(2 * count), "train.accumulate": "1"}
    elif "train.batch" in own:
        own["train.batch"] = str(int(own["train.batch"]) * count // ROWS_OF_SETTINGS)
    config, _ = plan.decide(case.config(data, {}, own), target, "")
    config = resolve(config, target)
    mesh = layout.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    assembly = assemble(config, mesh)
    stage = assembly.task.stage(config.train.steps - 1)
    least = bound(assembly, assembly.trace(stage), target)
    chosen = cases.Chosen(assembly, least, {})
    begin = time.perf_counter()
    program = cases.compiled(chosen)
    numbers: dict[str, Any] = {"compile_seconds": time.perf_counter() - begin}
    steps = cases.Steps(chosen, cases.first_batch(assembly), program)
    seconds = steps.seconds(SMALL_SECONDS if data.small else SECONDS)
    numbers |= {"seconds": seconds, "least_bytes": least.peak, **predicted(program, target)}
    [loss] = {float(x.total / x.weight) for x in [jax.device_get(steps()["loss"])]}
    numbers["loss"] = loss
    text = f"{1e3 * seconds:.1f} ms, loss {loss:.4f}"
    if target.chip:
        peak = count * target.chip.flops
        numbers["mfu"] = assembly.task.flops / seconds / peak
        text += (
            f", MFU {numbers['mfu']:.0%}; by the compiler's cycles {1e3 * numbers['cycles']:.0f}"
            f" ms, by the roofline {1e3 * numbers['roofline']:.0f} ms"
        )
    return Line(name, bool(np.isfinite(loss)), text, numbers)


def predicted(program: jax.stages.Compiled, target: plan.Target) -> dict[str, float]:
    """Return the seconds of the compiled step by the table's rates, {} of an unknown chip."""
    if not target.chip:
        return {}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a libtpu that is newer than jaxlib
        kernels = traffic.traffic(hlo.Program(program.as_text() or ""))
        sums = tpu_steps.sums_of(kernels, target)
        clock = target.chip.clock or np.inf
        return {"roofline": sums.seconds, "cycles": sums.cycles / clock}
    return {"roofline": np.nan, "cycles": np.nan}


def write(path: pathlib.Path, lines: Sequence[Line]) -> None:
    line = lines[-1]
    say(f"{line.name:18} {'ok  ' if line.is_well else 'FAIL'} {line.text}")
    if cluster.is_main():
        text = json.dumps([line._asdict() for line in lines], indent=1, default=float)
        atomic_write.write(path, text + "\n")


def say(text: str) -> None:
    if cluster.is_main():
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
