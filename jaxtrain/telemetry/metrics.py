"""Numbers of a run: means over batches, rates, and the share of the chips' peak (MFU)."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel import chips
from jaxtrain.types import Mean
from loaders.io import machine

NOT_WORKING = ("idle", "wait")  # stages of a loader in which its threads wait for others


class Sums:
    """Sums over batches, in float64 on the host, each read while the device computes the next."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[np.ndarray, float]] = {}
        self._pending: Mapping[str, Mean] | None = None

    def add(self, sums: Mapping[str, Mean]) -> None:
        """Add a batch's. Waits for those of the batch before."""
        self._read()
        self._pending = sums

    def pop(self, name: str) -> np.ndarray | None:
        """Take a sum out, undivided, or None if there is none of that name."""
        self._read()
        return self._totals.pop(name, (None, 0.0))[0]

    def means(self) -> dict[str, Any]:
        """Each sum, which may be an array, over its weight, a number. Without weight: nan."""
        self._read()
        means = {
            name: total / weight if weight else total * math.nan
            for name, (total, weight) in self._totals.items()
        }
        return {name: x if np.ndim(x) else float(x) for name, x in means.items()}

    def _read(self) -> None:
        if self._pending is None:
            return
        for name, (total, weight) in jax.device_get(dict(self._pending)).items():
            before, weight_before = self._totals.get(name, (0, 0.0))
            self._totals[name] = (
                before + np.asarray(total, np.float64),
                weight_before + float(weight),
            )
        self._pending = None


def mean(sums: Sequence[Mapping[str, Mean]]) -> dict[str, Any]:
    """Return the means of batches (`Sums`). Waits for the device."""
    added = Sums()
    for each in sums:
        added.add(each)
    return added.means()


class Meter:
    """Rates between two progress lines: examples/s, MFU, share of waiting for data, time left.

    ``seconds_per_step``: the latest, nan before the first.
    """

    def __init__(
        self,
        *,
        steps: int,
        batch: int,
        flops: int,
        peak: float,
        full_flops: int = 0,
        local_rows: int = 0,
    ):
        """``local_rows``: of the batch, that this process's loader reads. 0 = all."""
        self.seconds_per_step = math.nan
        self._local_rows, self._worked = local_rows or batch, (0, 0.0)
        self._steps, self._batch, self._flops, self._full_flops, self._peak = (
            steps,
            batch,
            flops,
            full_flops,
            peak,
        )
        self._start = self._last = (time.perf_counter(), 0, 0.0)

    def start(self, step: int, waited: float) -> None:
        """Start (again) to count here: after compilation, an evaluation, a restart."""
        self._last = (time.perf_counter(), step, waited)

    def rates(
        self, step: int, waited: float, loader: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Return the rates since the last call. ``loader``: its diagnostics."""
        now = time.perf_counter()
        then, first, waited_then = self._last
        seconds, steps = max(now - then, 1e-9), step - first
        self._last = (now, step, waited)
        self.seconds_per_step = seconds / steps if steps else self.seconds_per_step
        return {
            "steps_per_second": steps / seconds,
            "examples_per_second": steps * self._batch / seconds,
            "mfu": steps * self._flops / seconds / self._peak,
            **(
                {"mfu_full_attention": steps * self._full_flops / seconds / self._peak}
                if self._full_flops
                else {}
            ),
            "data_wait_share": min((waited - waited_then) / seconds, 1.0),
            **self._supply(
                steps * self._batch / max(seconds - (waited - waited_then), 0.01 * seconds),
                loader or {},
            ),
            "eta_seconds": (self._steps - step) * seconds / steps if steps else math.nan,
        }

    def _supply(self, asked: float, loader: Mapping[str, Any]) -> dict[str, float]:
        """Compare the rows/s that steps would take without a wait with those of the working loader.

        Nothing of a loader that does not count its rows and its threads' seconds, or made none
        since the last call.
        """
        if not {"rows", "seconds", "threads"} <= loader.keys() or not asked:
            return {}
        worked = sum(
            seconds for stage, seconds in loader["seconds"].items() if stage not in NOT_WORKING
        )
        (rows_then, worked_then), self._worked = self._worked, (loader["rows"], worked)
        rows, seconds = loader["rows"] - rows_then, worked - worked_then
        if rows <= 0 or seconds <= 0:
            return {}
        # if other processes' are as fast
        given = loader["threads"] * rows / seconds * self._batch / self._local_rows
        missing = machine.cores_missing(asked, given, loader["threads"])
        return {
            "rows_asked_per_second": asked,
            "rows_given_per_second": given,
            "cores_missing": missing,
        }


def peak_flops() -> tuple[float, str]:
    """Return the FLOP/s of all devices, and the source.

    It is the datasheet's dense bf16 peak if the chip is known, else that of the best of the float32
    matrix products which fit into 50 ms. A large one fills many cores. A small one often ends
    before another program takes its core, so that other work lowers the result less.
    """
    devices = jax.devices()
    kind = devices[0].device_kind
    if chip := chips.find(kind):
        return chip.flops * len(devices), f"{kind} datasheet, bf16"
    product, best = jax.jit(lambda x: x @ x), 0.0
    for n in (256, 1024):
        x = jax.block_until_ready(
            product(jax.device_put(jnp.zeros((n, n), jnp.float32), jax.local_devices()[0]))
        )
        start = time.perf_counter()
        end = start + 0.025
        while start < end:
            jax.block_until_ready(product(x))
            seconds, start = time.perf_counter() - start, time.perf_counter()
            best = max(best, 2 * n**3 / seconds)
    # Host devices share the cores that one product already uses all of.
    count = jax.process_count() if devices[0].platform == "cpu" else len(devices)
    return best * count, f"measured float32 products on {kind}"
