"""A case at full speed: steps a second, memory by the plan's bound, compile time."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxtrain import plan as plan_lib
from jaxtrain.data import feed
from jaxtrain.plan import forecast, hlo, traffic
from jaxtrain.telemetry import metrics
from jaxtrain.types import Batch, Task
from tools.chip import cases

LARGEST = 10  # scopes of a step's roofline that are kept


def compile_times(chosen: cases.Chosen) -> tuple[jax.stages.Compiled, float, float]:
    """Return the program, and the seconds of tracing and compiling it.

    They are with an empty cache of programs, and from it.

    To be called in a process that has a cache folder of its own (`gpu_check`).
    """
    begin = time.perf_counter()
    program = cases.compiled(chosen)
    cold = time.perf_counter() - begin
    jax.clear_caches()
    begin = time.perf_counter()
    cases.compiled(chosen)
    return program, cold, time.perf_counter() - begin


def measure(
    case: cases.Case,
    data: cases.Data,
    device: jax.Device,
    rates: Sequence[float],
    *,
    more: Mapping[str, str],
    quick: bool,
) -> dict[str, Any]:
    """Measure a case. A planned size that does not fit is halved. If one row does not, say so.

    ``rates``: [bytes/s] and [FLOP/s] that the card reaches. ``more``: settings of a variant.
    """
    chosen = cases.choose(case, data, device, more)
    refused: list[dict[str, Any]] = []
    memory = plan_lib.parse_target("").memory
    while chosen.bound.peak > memory:  # of a smaller card than the cases are for
        config = cases.smaller(chosen)
        if config is None:
            least = {"least": chosen.bound.peak, "of": memory}
            return {"case": case.name, "settings": dict(more), "too_large": least}
        chosen = cases.put_together(config, device, chosen.choice)
    while True:
        try:
            measured = _measure(case, chosen, device, traffic.Rates(*rates), quick=quick)
            return {**measured, "settings": dict(more), "refused": refused}
        except jax.errors.JaxRuntimeError as error:
            config = cases.smaller(chosen)
            if (
                "RESOURCE_EXHAUSTED" not in str(error)
                or config is None
                or len(refused) == cases.MAX_HALVINGS
            ):
                raise
            rows = chosen.assembly.config.train.batch
            refused.append({"rows": rows, "least_bytes": chosen.bound.peak})
        chosen = cases.put_together(config, device, chosen.choice)


def _measure(
    case: cases.Case,
    chosen: cases.Chosen,
    device: jax.Device,
    rates: traffic.Rates,
    *,
    quick: bool,
) -> dict[str, Any]:
    task = chosen.assembly.task
    config = chosen.assembly.config
    is_small = device.platform == "cpu"
    if quick:
        begin = time.perf_counter()
        program = cases.compiled(chosen)
        cold, cached = time.perf_counter() - begin, None
    else:
        program, cold, cached = compile_times(chosen)
    steps = cases.Steps(chosen, cases.first_batch(chosen.assembly), program)
    seconds = steps.seconds(0.2 if is_small else 1.5 if quick else 3.0)
    units = task.tokens or config.train.batch * getattr(config.model, "n_views", 1)
    full_flops = task.full_flops or task.flops
    return {
        "case": case.name,
        "parameters": cases.parameters(chosen),
        "choice": dict(chosen.choice),
        "rows": config.train.batch,
        "unit": case.unit,
        "flops_per_step": task.flops,
        "full_flops_per_step": full_flops,
        "compile_seconds": {"cold": cold, "cached": cached},
        "seconds_per_step": seconds,
        "units_per_second": units / seconds,
        "flops_per_second": task.flops / seconds,
        "full_flops_per_second": full_flops / seconds,
        "document_flops_per_second": _document_flops(task, steps.batch) / seconds,
        "predicted": _predicted(program, chosen, rates),
        "memory": _memory(program, chosen, device),
        "loss": metrics.mean([steps()])["loss"],
    }


def _document_flops(task: Task, batch: Batch) -> float:
    """Return the FLOPs of a step by the documents of its batch, or the task's."""
    counted = task.document_flops
    if counted is None:
        return task.flops
    return counted.count(*(feed.local_rows(batch[name]) for name in counted.fields))


def _predicted(
    program: jax.stages.Compiled, chosen: cases.Chosen, rates: traffic.Rates
) -> dict[str, Any] | None:
    """Return the roofline of the compiled step, or None if its text cannot be read.

    It is the bound, at the rates that this card reaches. "forecast" is the plan's
    (`jaxtrain plan`), with the shares that are fitted to measured steps, or None for devices that
    nothing is known of.
    """
    try:
        text = program.as_text() or ""
    except jax.errors.JaxRuntimeError:  # a libtpu that is newer than jaxlib
        return None
    read = hlo.Program(text)
    kernels = traffic.traffic(read)
    sums = traffic.roofline(kernels, rates)._asdict()
    largest = itertools.islice(sums["scopes"].items(), LARGEST)
    mesh = dict(chosen.assembly.layout.mesh.shape)
    planned = forecast.forecast(read, mesh, plan_lib.parse_target(""))
    names = ("seconds", "error", "calibration")
    found = {name: getattr(planned, name) for name in names} if planned else None
    return {**sums, "scopes": dict(largest), "forecast": found}


def _memory(
    program: jax.stages.Compiled, chosen: cases.Chosen, device: jax.Device
) -> dict[str, int | None]:
    """Return bytes: the plan's lower bound, the compiler's figure, the allocator's peak."""
    analysis: Any = program.memory_analysis()
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    statistics = device.memory_stats() or {}
    return {
        "least": chosen.bound.peak,
        "compiler": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + fresh,
        "allocator": statistics.get("peak_bytes_in_use"),
        "of": statistics.get("bytes_limit"),
    }
