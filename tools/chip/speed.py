"""A case at full speed: steps a second, memory by the plan's bound, compile time, a profile."""

import pathlib
import tempfile
import time
from typing import Any

import jax

from jaxtrain.telemetry import metrics
from tools.chip import cases, operations


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
    case: cases.Case, data: cases.Data, device: jax.Device, *, quick: bool, parts: set[str]
) -> dict[str, Any]:
    """Measure ``parts`` ("speed", "profile"). A planned size that does not fit is halved."""
    chosen = cases.choose(case, data, device)
    refused: list[dict[str, Any]] = []
    while True:
        try:
            return {**_measure(case, chosen, device, quick=quick, parts=parts), "refused": refused}
        except jax.errors.JaxRuntimeError as error:
            config = cases.smaller(chosen)
            if "RESOURCE_EXHAUSTED" not in str(error) or config is None or len(refused) == 3:
                raise
            refused.append(
                {"rows": chosen.assembly.config.train.batch, "least_bytes": chosen.bound.peak}
            )
        chosen = cases.put_together(config, device, chosen.choice)


def _measure(
    case: cases.Case, chosen: cases.Chosen, device: jax.Device, *, quick: bool, parts: set[str]
) -> dict[str, Any]:
    task, config, small = chosen.assembly.task, chosen.assembly.config, device.platform == "cpu"
    found: dict[str, Any] = {
        "case": case.name,
        "parameters": cases.parameters(chosen),
        "choice": dict(chosen.choice),
        "rows": config.train.batch,
        "unit": case.unit,
        "flops_per_step": task.flops,
        "full_flops_per_step": task.full_flops or task.flops,
    }
    if quick:
        begin = time.perf_counter()
        program = cases.compiled(chosen)
        found["compile_seconds"] = {"cold": time.perf_counter() - begin, "cached": None}
    else:
        program, cold, cached = compile_times(chosen)
        found["compile_seconds"] = {"cold": cold, "cached": cached}
    steps = cases.Steps(chosen, cases.first_batch(chosen.assembly), program)
    if "speed" in parts:
        seconds = steps.seconds(0.2 if small else 1.5 if quick else 3.0)
        units = task.tokens or config.train.batch * getattr(config.model, "n_views", 1)
        analysis: Any = program.memory_analysis()
        fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        found |= {
            "seconds_per_step": seconds,
            "units_per_second": units / seconds,
            "flops_per_second": task.flops / seconds,
            "full_flops_per_second": found["full_flops_per_step"] / seconds,
            "memory": {
                "least": chosen.bound.peak,
                "compiler": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + fresh,
                "allocator": (device.memory_stats() or {}).get("peak_bytes_in_use"),
                "of": (device.memory_stats() or {}).get("bytes_limit"),
            },
            "loss": metrics.mean([steps()])["loss"],
        }
    if "profile" in parts:
        try:
            found["profile"] = profile(steps, n=2 if small else 4)
        except Exception as error:  # noqa: BLE001  whatever a profiler does, the figures above stay
            found["profile_error"] = f"{type(error).__name__}: {error}"
    return found


def profile(steps: cases.Steps, *, n: int) -> dict[str, Any]:
    """Return a trace of ``n`` steps in a row, summarised (`operations.Summary`)."""
    jax.block_until_ready([steps() for _ in range(2)])
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([steps() for _ in range(n)])
        found = operations.summary(operations.read(pathlib.Path(folder)))
    return {**found._asdict(), "steps": n, "next": operations.advice(found)}
