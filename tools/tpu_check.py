"""Check in the first minutes on a TPU slice which of the plan's figures hold there.

    python -m tools.tpu_check  # on every worker of the slice, each with all of its chips
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tools.tpu_check --minutes 20

    slice      the chips, and the slice's name in `jaxtrain plan`, followed by *2 for two of them
    memory     of a chip, and what the plan grants a program
    product    FLOP/s of one chip, and of the datasheet
    copy       bytes/s of one chip's memory, and of the datasheet
    links      bytes/s that a chip receives in a gather over all chips, and of the plan for one
               slice
    attention  each kernel of this platform, by name, against the formula
    mixer      the recursive model's kernel against the formula
    steps      the measured cases on all chips (`tools.chip.cases`): ms a step, by the compiler's
               own estimate and by the roofline, bytes in use at most so far, and the plan's lower
               bound

The checks are in the order of their worth, so that ten minutes reach the rates, all kernels and the
first steps. --minutes is looked at between two checks. After it no check begins, but one that has
begun ends, which may take 20 minutes more.

Worker 0 prints the lines, and writes them to --out as JSON. Each has a state:

    ok            compared, and as the plan says
    FAILED        not so on any worker, or an error of any worker, which the line names with its
                  number. The next check begins
    not compared  measured, and neither a table nor the compiler has a figure for it
    not run       a step that does not fit the slice, a kernel that the chip has no room for, or a
                  check that was left when the time was over

A step is ok if its loss is finite and it takes at most twice the longer one of the compiler's time
and the roofline's. Both leave out exchanges. It exits with 1 if a check failed, with 2 if it was
called wrongly, and with 3 if checks were left. All workers exit alike. On CPUs all is in its small
form, which shows that it works.

The others would wait without end for a worker that fails inside the links' gather or a step, which
all compute together. Such a worker prints the error with its number and the check's name to stderr,
and exits with 1 at once. JAX's coordination service ends the others within a minute. A check of any
worker that takes more than 20 minutes ends its process in the same way. Lines of earlier checks are
in --out by then.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

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

OK, FAILED, NOT_COMPARED, NOT_RUN = "ok", "FAILED", "not compared", "not run"
NEAR = 0.7  # [share] of a rate of the table that a chip should reach at least
SLOW = 2.0  # times the seconds of the compiled program that a step may take at most
GATHERED, SMALL_GATHERED = 1 << 26, 1 << 18  # [bytes] of a chip's part
HEARTBEAT = 30  # [s] without a word of a worker, after which the others are ended
LEFT = "the time was over"
LONGEST = 1200.0  # [s] of a check, of which a step's program takes two to four minutes to compile
MOST_GATHERED = 1 << 30  # [bytes] of all parts, which each chip then has
REPEATS = 10
ROWS_OF_SETTINGS = 4  # [chips] that the rows of `tpu_steps.SETTINGS` are for
SECONDS, SMALL_SECONDS = 3.0, 0.1  # of a case's steps
# Those of `tpu_steps.SETTINGS` by worth. The first three have kernels of their own: over short
# rows, over documents, and for a mixer. The last two are larger ones of the first two.
CASES = ("vit-s", "lm-1b-2k", "trm", "higgs-lora", "giblet", "vit-b", "lm-1b-8k")
T = TypeVar("T")


class Line(NamedTuple):
    name: str
    state: str
    text: str
    numbers: dict[str, Any]


Unit = Callable[[], Iterable[Line]]


class WorkerError(Exception):
    """An error of any worker, on all of them."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    began = time.monotonic()
    join()

    def is_over() -> bool:
        return bool(time.monotonic() - began > 60 * args.minutes)

    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="tpu_check-") as folder:
        for line in measure(units(args.cases, pathlib.Path(folder)), is_over):
            lines.append(line)
            write(args.out, lines)
    failed = [line.name for line in lines if line.state == FAILED]
    left = [line.name for line in lines if line.text == LEFT]
    if left:
        say(f"{LEFT}; --minutes gives it more, --cases= chooses cases")
    say(f"failed: {', '.join(failed) or 'nothing'}; all numbers: {args.out}")
    if failed:
        return 1
    return 3 if left else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.tpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ",".join(CASES)
    help_of_minutes = "begins no check after so many; default: 10"
    parser.add_argument("--minutes", type=float, default=10.0, help=help_of_minutes)
    parser.add_argument("--cases", default=names, help=f"of {names}; default: all, in this order")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("tpu_check.json"))
    args = parser.parse_args(argv)
    args.cases = args.cases.split(",")
    for name in args.cases:
        if name not in CASES:
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
        jax.distributed.initialize(
            membership.coordinator,
            membership.processes,
            membership.process,
            heartbeat_timeout_seconds=HEARTBEAT,
        )


def units(names: Sequence[str], folder: pathlib.Path) -> dict[str, Unit]:
    """Return the checks, those that tell most first."""
    device = jax.local_devices()[0]
    is_small = device.platform == "cpu"
    chip = chips.find(device.device_kind)
    checks: dict[str, Unit] = {
        "slice": functools.partial(_line, of_slice, jax.devices(), chip),
        "memory": functools.partial(_line, of_memory, device, chip),
        "rates": functools.partial(of_rates, device, chip),
    }
    if jax.device_count() > 1:
        checks["links"] = functools.partial(_line, of_links, chip, is_small)
    for name, shape in correctness.attention_shapes(quick=is_small).items():
        check = f"attention {name}"
        checks[check] = functools.partial(_line, of_attention, check, shape)
    checks["mixer"] = functools.partial(_line, of_mixer, is_small)
    data = cases.Data(folder, small=is_small)
    for name in names:
        checks[name] = functools.partial(_line, of_case, name, data, plan.parse_target(""))
    return checks


def _line(f: Callable[..., Line], *args: Any) -> list[Line]:
    return [f(*args)]


def _lines(check: Unit) -> list[Line]:
    return list(check())


def measure(checks: Mapping[str, Unit], is_over: Callable[[], bool]) -> Iterator[Line]:
    """Run checks until the time is over, and name the others. All workers have the same lines."""
    left = dict(checks)
    for name, check in checks.items():
        with deadline(name):
            if cluster.agree(is_over()):
                break
            try:
                lines = together(functools.partial(_lines, check))
                lines = [of_all_workers(line) for line in lines]
            except WorkerError as error:
                lines = [Line(name, FAILED, str(error), {})]
            del left[name]
            jax.clear_caches()
        yield from lines
    for name in left:
        yield Line(name, NOT_RUN, LEFT, {})


def together(f: Callable[[], T]) -> T:
    """Call f on all workers. Raises WorkerError on all of them if it raises on any.

    Without it the others would wait without end for the one that failed.
    """
    reason = ""
    try:
        result = f()
    except WorkerError as error:
        reason = str(error)
    except Exception as error:  # of the compiler or the device: the other checks go on
        reason = of_worker() + described(error)
    if any(cluster.gather(bool(reason))):
        raise WorkerError(next(filter(None, cluster.gather_texts(reason))))
    return result


def of_all_workers(line: Line) -> Line:
    """Return the line of the first worker on which it failed, else this worker's."""
    has_failed = cluster.gather(line.state == FAILED)
    if len(has_failed) == 1 or not any(has_failed):
        return line
    texts = cluster.gather_texts(json.dumps(line._asdict(), default=float))
    worker = has_failed.index(1)
    failed = Line(**json.loads(texts[worker]))
    return failed._replace(text=f"worker {worker}: {failed.text}")


@contextlib.contextmanager
def deadline(name: str) -> Iterator[None]:
    """End the process if a check takes too long: it may wait for a worker that never comes."""
    text = f"{of_worker()}{name}: no end after {LONGEST:g} s"
    timer = threading.Timer(LONGEST, end, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def collective(name: str) -> Iterator[None]:
    """End the process at an error if others wait for this worker inside the same program."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        end(f"{of_worker()}{name}: {described(error)}")


def end(text: str) -> None:
    """Exit with 1 at once: at a usual end JAX would wait for the other workers."""
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def of_worker() -> str:
    return f"worker {jax.process_index()}: " if jax.process_count() > 1 else ""


def described(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"


def of_slice(devices: Sequence[Any], chip: chips.Chip | None) -> Line:
    name = slice_name(devices, chip)
    kind, n_workers = devices[0].device_kind, jax.process_count()
    text = f"{len(devices)} × {kind}, {n_workers} workers; {name or 'no slice of a plan'}"
    numbers = {"devices": len(devices), "kind": kind, "workers": n_workers, "slice": name}
    state = OK if name else FAILED
    if devices[0].platform == "cpu":
        state = NOT_COMPARED
    return Line("slice", state, text, numbers)


def slice_name(devices: Sequence[Any], chip: chips.Chip | None) -> str:
    """Return the name of slices as in --plan=, by the places of their chips. "" = none has it."""
    if chip is None or not chip.is_tpu:
        return ""
    places: dict[int, list[tuple[int, ...]]] = {}
    for device in devices:
        places.setdefault(getattr(device, "slice_index", 0), []).append(tuple(device.coords))
    names = {name_of_places(own, chip) for own in places.values()}
    if len(names) > 1 or "" in names:
        return ""
    [name] = names
    return f"{name}*{len(places)}" if len(places) > 1 else name


def name_of_places(places: Sequence[tuple[int, ...]], chip: chips.Chip) -> str:
    """Return the name of one slice. "" = no slice has these places, each of them in use."""
    corners = np.array(places)
    sides = sorted((corners.max(0) - corners.min(0) + 1).tolist())
    n_chips = math.prod(sides)
    if len(set(places)) != n_chips or len(places) != n_chips * chip.devices:
        return ""
    known = slices.existing(chip.name)
    unused = len(sides) - len(known[0])  # the third coordinate of versions with two is 0
    exact = next((each for each in known if sorted((*each, *[1] * unused)) == sides), None)
    return slices.name(chip.name, exact) if exact else ""


def of_memory(device: Any, chip: chips.Chip | None) -> Line:
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    of_plan = chip.memory if chip else 0
    numbers = {"limit": limit, "plan": of_plan}
    if not (limit and of_plan):
        text = f"{limit / 2**30:.2f} GiB" if limit else "the device tells none"
        return Line("memory", NOT_COMPARED, text, numbers)
    text = f"{limit / 2**30:.2f} GiB, of the plan {of_plan / 2**30:.2f}"
    # more is well, and a plan may be short of it by a hundredth
    return Line("memory", OK if limit >= 0.99 * of_plan else FAILED, text, numbers)


def of_rates(device: jax.Device, chip: chips.Chip | None) -> Iterator[Line]:
    reached = ceilings.measure(device)
    yield rate("product", reached["flops_per_second"], chip.flops if chip else 0.0, "FLOP/s")
    yield rate("copy", reached["bytes_per_second"], chip.bandwidth if chip else 0.0, "bytes/s")


def of_links(chip: chips.Chip | None, is_small: bool) -> Line:
    named = slice_name(jax.devices(), chip)
    target = plan.parse_target(named) if named else None
    # Between slices the bytes are those of the network.
    of_plan = target.links if target and target.slices == 1 else 0.0
    with collective("links"):
        found = gathered(is_small=is_small)
    return rate("links", found, of_plan, "bytes/s")


def rate(name: str, found: float, of_table: float, unit: str) -> Line:
    numbers = {"found": found, "table": of_table}
    if not of_table:
        return Line(name, NOT_COMPARED, f"{found:.3g} {unit}", numbers)
    text = f"{found:.3g} {unit}, {found / of_table:.0%} of {of_table:.3g}"
    return Line(name, OK if found >= NEAR * of_table else FAILED, text, numbers)


def of_attention(name: str, shape: correctness.AttentionShape) -> Line:
    check = correctness.attention_of(name, shape)
    kernel = correctness.attention_kernel(shape)
    text = f"{kernel}: error {check.found:.1e}, bound {check.bound:.1e} ({check.note})"
    numbers = {**check._asdict(), "kernel": kernel}
    if not check.well or jax.default_backend() != "tpu" or kernel != "xla":
        return Line(name, OK if check.well else FAILED, text, numbers)
    larger = correctness.attention_kernel(shape, ("tpu", ""))
    if larger == "xla":
        return Line(name, FAILED, f"{text}; a kernel was expected", numbers)
    return Line(name, NOT_RUN, f"the chip has no room for {larger}; {text}", numbers)


def of_mixer(is_small: bool) -> Line:
    check = correctness.mixer(quick=is_small)
    if check is None:
        return Line("mixer", NOT_RUN, "its kernel does not take full width on this chip", {})
    text = f"error {check.found:.1e}, bound {check.bound:.1e} ({check.note})"
    return Line("mixer", OK if check.well else FAILED, text, check._asdict())


def gathered(*, is_small: bool) -> float:
    """Return the bytes/s that a device receives if each gathers the parts of all."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    size = SMALL_GATHERED if is_small else gathered_bytes(len(devices))
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


def gathered_bytes(count: int) -> int:
    """Return the bytes of a chip's part, of which each chip gets all."""
    return min(GATHERED, MOST_GATHERED // count // 4 * 4)


def of_case(name: str, data: cases.Data, target: plan.Target) -> Line:
    chosen = together(lambda: put_together(name, data, target))
    least = chosen.bound.peak
    if target.chip and least > target.memory:
        text = f"needs {least / 2**30:.1f} GiB of a chip's {target.memory / 2**30:.1f} at least"
        return Line(name, NOT_RUN, text, {"least_bytes": least})
    begin = time.perf_counter()
    program = together(lambda: cases.compiled(chosen))
    numbers: dict[str, Any] = {"compile_seconds": time.perf_counter() - begin, "least_bytes": least}
    batch = together(lambda: cases.first_batch(chosen.assembly))
    steps = together(lambda: cases.Steps(chosen, batch, program))
    with collective(name):
        seconds = steps.seconds(SMALL_SECONDS if data.small else SECONDS)
        [loss] = {float(x.total / x.weight) for x in [jax.device_get(steps()["loss"])]}
    numbers |= {"seconds": seconds, "loss": loss, **predicted(program, target)}
    memory = jax.local_devices()[0].memory_stats() or {}
    numbers["peak_bytes"] = memory.get("peak_bytes_in_use", 0)  # of all cases so far
    if target.chip:
        flops = chosen.assembly.task.flops
        numbers["mfu"] = flops / seconds / (jax.device_count() * target.chip.flops)
    return Line(name, state_of_step(numbers), text_of_step(numbers), numbers)


def put_together(name: str, data: cases.Data, target: plan.Target) -> cases.Chosen:
    case = next(case for case in cases.CASES if case.name == name)
    own = dict(tpu_steps.SETTINGS[name])
    if data.small:
        own = {"train.batch": str(2 * jax.device_count()), "train.accumulate": "1"}
    else:
        n_rows = case.config(data, {}, own).train.batch
        own["train.batch"] = str(rows(name, n_rows, jax.device_count()))
    config, _ = plan.decide(case.config(data, {}, own), target, "")
    config = resolve(config, target)
    mesh = layout.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    assembly = assemble(config, mesh)
    stage = assembly.task.stage(config.train.steps - 1)
    return cases.Chosen(assembly, bound(assembly, assembly.trace(stage), target), {})


def rows(name: str, n_rows: int, count: int) -> int:
    """Return the rows of a case for ``count`` chips, as many on each as in the tables."""
    n_chips = ROWS_OF_SETTINGS
    if name in tpu_steps.LARGER:
        n_chips = plan.parse_target(tpu_steps.LARGER[name]).count
    return max(1, n_rows // n_chips) * count


def predicted(program: jax.stages.Compiled, target: plan.Target) -> dict[str, float]:
    """Return the seconds of the compiled step by the table's rates, {} if they are unknown."""
    if not target.chip:
        return {}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # a libtpu that is newer than jaxlib
        if text := program.as_text():
            sums = tpu_steps.sums_of(traffic.traffic(hlo.Program(text)), target)
            return {"roofline": sums.seconds, "cycles": sums.cycles / (target.chip.clock or np.inf)}
    return {}


def state_of_step(numbers: Mapping[str, float]) -> str:
    if not np.isfinite(numbers["loss"]):
        return FAILED
    if "roofline" not in numbers:
        return NOT_COMPARED
    of_program = max(numbers["roofline"], numbers["cycles"])
    return OK if numbers["seconds"] <= SLOW * of_program else FAILED


def text_of_step(numbers: Mapping[str, float]) -> str:
    text = f"{1e3 * numbers['seconds']:.1f} ms, loss {numbers['loss']:.4f}"
    if "mfu" in numbers:
        text += f", MFU {numbers['mfu']:.0%}"
    if "roofline" in numbers:
        text += (
            f"; by the compiler's cycles {1e3 * numbers['cycles']:.0f} ms, by the roofline"
            f" {1e3 * numbers['roofline']:.0f} ms"
        )
    text += f"; at least {numbers['least_bytes'] / 2**30:.2f} GiB by the plan"
    if numbers["peak_bytes"]:
        text += f", at most {numbers['peak_bytes'] / 2**30:.2f} in use so far"
    return text


def write(path: pathlib.Path, lines: Sequence[Line]) -> None:
    line = lines[-1]
    say(f"{line.name:18} {line.state:12} {line.text}")
    if cluster.is_main():
        text = json.dumps([line._asdict() for line in lines], indent=1, default=float)
        atomic_write.write(path, text + "\n")


def say(text: str) -> None:
    if cluster.is_main():
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
