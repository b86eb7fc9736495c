"""Logs and writes steps, each read a step late, so that the device never waits for the host."""

import functools
import logging
import math
import os
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import optim, specs
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import Saved
from jaxtrain.checkpoint.checkpointer import saved_parts
from jaxtrain.data import feed
from jaxtrain.parallel import cluster
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.run.process_context import ProcessContext
from jaxtrain.run.stream import Data, Item
from jaxtrain.step import digest
from jaxtrain.step.guard import SkippedSteps
from jaxtrain.step.state import TrainState
from jaxtrain.telemetry import console, jsonl, metrics, traces, writers
from jaxtrain.telemetry.report import class_scores
from jaxtrain.telemetry.report.step_differences import DIGEST, DIGESTS
from jaxtrain.types import Mean
from loaders.shuffle_stats import ShuffleStats

log = logging.getLogger("jaxtrain")


class MetricsLogger:
    """A context. Process 0 writes, and every process reads its steps.

    Attributes:
      skipped: steps skipped in a row.
    """

    def __init__(
        self,
        assembly: Assembly,
        data: Data,
        process: ProcessContext,
        *,
        first: int,
        peak: tuple[float, str],
    ):
        """``peak``: `metrics.peak_flops`."""
        config, task = assembly.config, assembly.task
        self._config, self._task, self._data, self._process, self._first = (
            config,
            task,
            data,
            process,
            first,
        )
        self._everywhere = assembly.layout.replicated()
        self.skipped = SkippedSteps(config.guard, step=first)
        self._pending: tuple[Mapping[str, Mean], Item, jax.Array | None] | None = None
        self._digest = (
            jax.jit(digest.of_batch_and_state, out_shardings=self._everywhere)
            if config.metrics.digest
            else None
        )
        process.confirm()
        if cluster.is_main():
            config_lib.save(config, config.workdir)
            rates = functools.partial(optim.learning_rates, config.optim, config.train.steps)
            writers.write_schedule(config.workdir, config.train.steps, rates)
        self._writers = writers.make_writers(config, first) if cluster.is_main() else []
        self._digests: list[writers.Writer] = []
        if config.metrics.digest and cluster.is_main():
            self._digests = [
                writers.JsonlWriter(config.workdir, first, DIGESTS, jsonl.step_problem)
            ]
        abstract = assembly.abstract
        self._digested = specs.paths({digest.BATCH: abstract.batch}) + specs.paths(
            saved_parts(abstract.state)
        )
        self._unnamed = True  # whether no line of them names the arrays yet
        self._lines = writers.Lines(config.workdir)
        self._traces = traces.Traces(
            config.workdir, config.metrics.profile, process=jax.process_index()
        )
        self._read_last = first
        flops, source = peak
        log.info("MFU is of %.2f TFLOP/s (%s)", flops / 1e12, source)
        self._meter = metrics.Meter(
            steps=config.train.steps,
            batch=config.train.batch,
            flops=task.flops,
            full_flops=task.full_flops,
            peak=flops,
            local_rows=sum(stop - start for start, stop in data.rows.ranges),
        )
        population = data.train.population
        named = "index" in assembly.abstract.batch
        self._shuffle_stats = (
            ShuffleStats(population) if population and named and cluster.is_main() else None
        )

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._traces.close(self._read_last)
        closing: list[writers.Writer | writers.Lines] = [*reversed(self._writers), *self._digests]
        for writer in closing if self._process.has_lost else [*closing, self._lines]:
            try:
                writer.close()
            except WorkdirError:  # the error that ends the run says more
                if kind is None:
                    raise

    def start_clock(self, step: int) -> None:
        """Count the pace from here: waits since the last step are not the training's."""
        self._process.beat(f"step {step + 1}")
        self._process.clock.steps(step)
        if self._traces.is_due(step):
            self._traces.turn(step)
        self._meter.start(step, self._data.waited)

    def push(self, out: Mapping[str, Mean], item: Item, state: TrainState) -> bool:
        """Read the step before this one, and keep this one.

        True when that step agreed to stop: it changed nothing.

        ``state``: after this step, for its digest, computed before the next step takes its place.
        """
        if self.flush():
            return True
        digested = self._digest and self._is_recorded(item.step)
        self._pending = (
            out,
            item,
            self._digest(dict(item.arrays), saved_parts(state))
            if self._digest and digested
            else None,
        )
        # a trace has whole steps: here the host waits for this one
        if self._traces.is_due(item.step):
            stopped = self.flush()
            self._traces.turn(item.step)
            return stopped
        return False

    def flush(self) -> bool:
        """Read the step that is kept, waiting for it. True when it agreed to stop."""
        if not self._pending:
            return False
        (out, item, digested), self._pending = self._pending, None
        step = item.step
        began = time.perf_counter()
        record = metrics.mean([out])
        self._process.clock.read(step, time.perf_counter() - began)
        self._process.beat(f"step {step + 1}")
        if record.pop("stopped"):
            return True
        if digested is not None:
            record |= self._read_digest(step, jax.device_get(digested))
        self._read(step, record, item)
        return False

    def _read_digest(self, step: int, parts: np.ndarray) -> dict[str, int]:
        """Write the digests of the arrays. Return the state's, for the record."""
        line = {
            "arrays": parts.astype(">u4").tobytes().hex(),
            **({"names": self._digested} if self._unnamed else {}),
        }
        self._unnamed = False
        self._write(step, "train", line, self._digests)
        of_state = parts[[not name.startswith(f"{digest.BATCH}/") for name in self._digested]]
        return dict(zip(DIGEST, map(int, of_state.sum(0, dtype=digest.WORD)), strict=True))

    def rewound(self, item: Item, state: TrainState) -> None:
        """Write the digests of the arrays again: those that a checkpoint after this step has."""
        if self._digest and self._is_recorded(item.step):
            self._read_digest(
                item.step, jax.device_get(self._digest(dict(item.arrays), saved_parts(state)))
            )

    def _is_recorded(self, step: int) -> bool:
        return step % self._config.metrics.every == 0 or step == self._config.train.steps

    def _read(self, step: int, record: dict[str, Any], item: Item) -> None:
        self._read_last = step
        if step == self._first + 1:
            log.info("%s", self._process.clock.line())
        if item.is_first:
            self._inputs(item)
        if self._shuffle_stats:
            self._shuffle_stats.add(feed.local_values(item.arrays["index"]))
        skipped = bool(record["skipped"])
        self.skipped.add(step, skipped=skipped)
        if skipped:
            examples = (
                feed.local_values(item.arrays["index"])
                if "index" in item.arrays
                else "not named by the loader"
            )
            loss, norm = record["loss"], record["grad_norm"]
            log.warning(
                "step %d skipped: loss %g, gradient norm %g; examples %s",
                step,
                loss,
                norm,
                examples,
            )
        steps = self._config.train.steps
        if self._is_recorded(step) or skipped:
            loader = self._data.train.diagnostics()
            rates = self._meter.rates(step, self._data.waited, loader)
            self._write(step, "train", record | rates | {"goodput": self._process.clock.goodput()})
            if self._shuffle_stats:
                self._write(step, "data", self._shuffle_stats.record())
            terms = {name: record[name] for name in self._task.terms}
            line = console.progress_line(
                step, steps, record["loss"], rates, terms=terms, slowest=loader.get("slowest")
            )
            self._process.console.progress(line)

    def evaluating(self, step: int, batch: int, n: int) -> None:
        """Show how far the evaluation after ``step`` is: at batch number ``batch`` of ``n``."""
        self._process.console.progress(
            f"evaluation after step {step}: batch {batch} of {n}", passing=True
        )

    def evaluated(
        self,
        step: int,
        record: Mapping[str, float],
        generations: Sequence[Mapping[str, Any]],
        counts: Mapping[str, np.ndarray | None],
    ) -> None:
        """Write an evaluation's results. ``counts``: by `jaxtrain.types.COUNTS`, or None."""
        self._process.confirm()
        with self._process.writing():
            if generations and cluster.is_main():
                self._lines.write(writers.GENERATIONS, step, generations)
                for writer in self._writers:
                    writer.generations(step, generations)
            if (of_classes := counts["classes"]) is not None and cluster.is_main():
                self._lines.write(
                    class_scores.FILE, step, [class_scores.line(of_classes, counts["confusions"])]
                )
        self._write(step, "test", record)
        log.info(
            "step %d test  %s",
            step,
            "  ".join(f"{k} {v:.4f}" for k, v in record.items() if not math.isnan(v)),
        )

    def saved(self, step: int, saved: Saved) -> None:
        """Write how long the loop waited for a save."""
        steps = saved.seconds / self._meter.seconds_per_step
        self._write(
            step, "save", {"seconds": saved.seconds, "steps": steps, "failures": saved.failures}
        )
        self._process.beat(f"step {step + 1}")

    def verified(self, step: int, *, wrong: bool) -> None:
        self._write(step, "verify", {"miscomputed": float(wrong)})

    def _inputs(self, item: Item) -> None:
        """Draw the inputs of the run's first batch, while the next step is computed."""
        self._process.starting("its pictures")  # which are compiled
        # every process takes part
        self.pictures(jax.jit(self._task.pictures, out_shardings=self._everywhere)(item.arrays))

    def pictures(self, pictures: Mapping[str, jax.Array], *, step: int = 0) -> None:
        """Write arrays [n, height, width] in 0..1 into workdir/pictures. Step 0 is the start."""
        # a wait, in which a workdir may go
        host = jax.device_get(dict(pictures)) if cluster.is_main() else {}
        self._process.confirm()
        if cluster.is_main():
            prefix = f"step{step:06}_" if step else ""
            named = {f"{prefix}{name}": images for name, images in host.items()}
            folder = os.path.join(self._config.workdir, "pictures")
            with self._process.writing():
                try:
                    writers.write_pictures(folder, named)
                except OSError as error:
                    if error.errno not in writers.FULL:
                        raise
                    log.error(
                        "%s cannot be written (%s); pictures of step %d are left out",
                        folder,
                        error.strerror,
                        step,
                    )
                for writer in self._writers:
                    writer.pictures(step, host)

    def _write(
        self,
        step: int,
        split: str,
        record: Mapping[str, Any],
        into: Sequence[writers.Writer] | None = None,
    ) -> None:
        into = self._writers if into is None else into
        with self._process.writing():
            if into and not self._process.has_lost:
                self._process.lease.confirm()
                for writer in into:
                    writer.write(step, split, record)
