"""From Arrow shards on disk to the step: the loader's rate, the step's, and both together.

The loader has all cores.

The recordings are the demo's, read again and again, so they come from the page cache. For each form
of a row (spectrograms of float32 and of bfloat16, and 16-bit waveforms, of which the step makes the
spectrograms itself):

    loader      rows/s of the loader alone, on every core that this process may use
    demand      rows/s of the step alone, on a batch that stays on the device
    together    rows/s of `jaxtrain.data.feed` and the step, and the share of the time that the step
                waits for data
    overlap     of the copies to the device, the share that overlaps computation, by a trace of a
                few of those steps; a CPU has no copies: the rows are used where the loader wrote
                them
"""

import contextlib
import importlib
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.data import feed
from loaders.base import Loader, Rows
from loaders.io import machine
from tools.chip import cases, operations

FORMS = {
    "float32": {},
    "bfloat16": {"data.dtype": "bfloat16"},
    "waveform": {"data.form": "waveform"},
}


def measure(data: cases.Data, device: jax.Device, *, quick: bool) -> dict[str, Any]:
    case = next(case for case in cases.CASES if case.name == "vit-s")
    choice = dict(cases.choose(case, data, device).choice)
    if choice:
        # Batches on their way lie anywhere in the memory, and a step takes one large piece of it.
        # An H100 did not find 59.6 GiB of 73 beside them.
        choice["train.batch"] = str(int(choice["train.batch"]) // 2)
    seconds = 0.5 if data.small else 2.0 if quick else 4.0
    forms = dict(list(FORMS.items())[:1]) if quick else FORMS
    return {
        form: measure_form(case, data, device, choice, more, seconds)
        for form, more in forms.items()
    }


def measure_form(
    case: cases.Case,
    data: cases.Data,
    device: jax.Device,
    choice: cases.Overrides,
    more: cases.Overrides,
    seconds: float,
) -> dict[str, Any]:
    chosen = cases.put_together(case.config(data, choice, more), device, choice)
    a, batch = chosen.assembly, chosen.assembly.config.train.batch
    rows = feed.rows_for(a.abstract.batch)
    with _loader(a.config, rows) as loader:
        alone = rate(loader, batch, seconds)
        spent = loader.diagnostics()["seconds"]
    steps = cases.Steps(chosen, cases.first_batch(a))
    demand = batch / steps.seconds(seconds / 2)
    with _loader(a.config, rows) as loader:
        stream = feed.Feed(loader, a.abstract.batch, rows)
        with contextlib.closing(stream):
            together, share = end_to_end(stream, steps, batch, seconds)
            overlap, copied = overlap_of(stream, steps)
    return {
        "rows": batch,
        "bytes_per_row": sum(x.nbytes for x in steps.batch.values()) // batch,
        "cores": machine.cores(),
        "loader_rows_per_second": alone,
        "stage_seconds": spent,
        "demand_rows_per_second": demand,
        "rows_per_second": together,
        "wait_share": share,
        "copy_seconds_per_step": copied,
        "overlap": overlap,
    }


@contextlib.contextmanager
def _loader(config: Any, rows: Rows) -> Iterator[Loader]:
    loader = importlib.import_module(config.loader).make_loader(
        config.data, split="train", rows=rows, seed=config.seed
    )
    with contextlib.closing(loader):
        loader.seek(0)
        yield loader


def rate(loader: Loader, batch: int, seconds: float) -> float:
    """Rows a second, after as many batches as may wait when nobody takes them."""
    for _ in range(4):
        next(loader)
    begin, n = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        next(loader)
        n += 1
    return n * batch / (time.perf_counter() - begin)


def end_to_end(
    stream: feed.Feed, steps: cases.Steps, batch: int, seconds: float
) -> tuple[float, float]:
    """(rows a second, share of time waited for data), as in the loop: a step is read one late."""
    pending = None
    for _ in range(4):
        pending = steps(next(stream)[1])
    jax.block_until_ready(pending)
    begin, waited, n = time.perf_counter(), stream.waited, 0
    while time.perf_counter() - begin < seconds:
        out = steps(next(stream)[1])
        jax.block_until_ready(pending)
        pending, n = out, n + 1
    jax.block_until_ready(pending)
    took = time.perf_counter() - begin
    return n * batch / took, (stream.waited - waited) / took


def overlap_of(stream: feed.Feed, steps: cases.Steps, n: int = 4) -> tuple[float | None, float]:
    """(share of copies to the device that overlaps computation, seconds of copies a step)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([steps(next(stream)[1]) for _ in range(n)])
        found = operations.summary(operations.read(pathlib.Path(folder)))
    return found.overlap, found.copied / n
