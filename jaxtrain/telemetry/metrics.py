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
        total, _ = self._totals.pop(name, (None, 0.0))
        return total

    def means(self) -> dict[str, Any]:
        """Each sum, which may be an array, over its weight, a number. Without weight: nan."""
        self._read()
        means: dict[str, Any] = {}
        for name, (total, weight) in self._totals.items():
            mean = total / weight if weight else total * math.nan
            means[name] = mean if np.ndim(mean) else float(mean)
        return means

    def _read(self) -> None:
        if self._pending is None:
            return
        for name, (total, weight) in jax.device_get(dict(self._pending)).items():
            earlier_total, earlier_weight = self._totals.get(name, (0, 0.0))
            new_total = earlier_total + np.asarray(total, np.float64)
            self._totals[name] = new_total, earlier_weight + float(weight)
        self._pending = None


def mean(sums: Sequence[Mapping[str, Mean]]) -> dict[str, Any]:
    """Return the means of batches (`Sums`). Waits for the device."""
    total = Sums()
    for sums_of_batch in sums:
        total.add(sums_of_batch)
    return total.means()


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
        self._local_rows = local_rows or batch
        self._steps = steps
        self._batch = batch
        self._flops = flops
        self._full_flops = full_flops
        self._peak = peak
        # At the last call: the rows that the loader had made, and its threads' seconds of work.
        self._loader_rows = 0
        self._loader_seconds = 0.0
        # At the last call: the time, the step, and the seconds waited for data.
        self._last = (time.perf_counter(), 0, 0.0)

    def start(self, step: int, waited: float) -> None:
        """Start (again) to count here: after compilation, an evaluation, a restart."""
        self._last = (time.perf_counter(), step, waited)

    def rates(
        self,
        step: int,
        waited: float,
        loader: Mapping[str, Any] | None = None,
        *,
        document_flops: float = 0,
    ) -> dict[str, float]:
        """Return the rates since the last call.

        Args:
          loader: its diagnostics.
          document_flops: of the latest step, by its documents. 0 = it has none.
        """
        now = time.perf_counter()
        last_time, last_step, last_waited = self._last
        self._last = (now, step, waited)
        seconds = max(now - last_time, 1e-9)
        steps = step - last_step
        if steps:
            self.seconds_per_step = seconds / steps
        rates = {
            "steps_per_second": steps / seconds,
            "examples_per_second": steps * self._batch / seconds,
            "mfu": steps * self._flops / seconds / self._peak,
        }
        if self._full_flops:
            rates["mfu_full_attention"] = steps * self._full_flops / seconds / self._peak
        if document_flops:
            rates["mfu_documents"] = steps * document_flops / seconds / self._peak
        waiting = waited - last_waited
        rates["data_wait_share"] = min(waiting / seconds, 1.0)
        demand = steps * self._batch / max(seconds - waiting, 0.01 * seconds)
        rates |= self._supply(demand, loader or {})
        rates["eta_seconds"] = (self._steps - step) * seconds / steps if steps else math.nan
        return rates

    def _supply(self, demand: float, loader: Mapping[str, Any]) -> dict[str, float]:
        """Compare the rows/s that steps would take without a wait with those of the working loader.

        Nothing of a loader that does not count its rows and its threads' seconds, or made none
        since the last call.
        """
        if not {"rows", "seconds", "threads"} <= loader.keys() or not demand:
            return {}
        stages = loader["seconds"].items()
        seconds_of_work = sum(seconds for stage, seconds in stages if stage not in NOT_WORKING)
        rows = loader["rows"] - self._loader_rows
        seconds = seconds_of_work - self._loader_seconds
        self._loader_rows = loader["rows"]
        self._loader_seconds = seconds_of_work
        if rows <= 0 or seconds <= 0:
            return {}
        # if other processes' are as fast
        supply = loader["threads"] * rows / seconds * self._batch / self._local_rows
        return {
            "rows_asked_per_second": demand,
            "rows_given_per_second": supply,
            "cores_missing": machine.cores_missing(demand, supply, loader["threads"]),
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
    product = jax.jit(lambda x: x @ x)
    best = 0.0
    for n in (256, 1024):
        zeros = jax.device_put(jnp.zeros((n, n), jnp.float32), jax.local_devices()[0])
        x = jax.block_until_ready(product(zeros))
        start = time.perf_counter()
        end = start + 0.025
        while start < end:
            jax.block_until_ready(product(x))
            now = time.perf_counter()
            best = max(best, 2 * n**3 / (now - start))
            start = now
    # Host devices share the cores that one product already uses all of.
    count = jax.process_count() if devices[0].platform == "cpu" else len(devices)
    return best * count, f"measured float32 products on {kind}"
