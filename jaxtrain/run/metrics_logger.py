"""Logs and writes steps, each read a step late, so that the device never waits for the host."""

import functools
import logging
import math
import os
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.stream import Data, Item, Stream
from jaxtrain.step import digest
from jaxtrain.step import train_step as step_lib
from jaxtrain.step.guard import SkippedSteps
from jaxtrain.step.state import TrainState
from jaxtrain.telemetry import console, jsonl, metrics, traces, training_sources, writers
from jaxtrain.telemetry.report import class_scores
from jaxtrain.telemetry.report.step_differences import DIGEST, DIGESTS
from jaxtrain.telemetry.unreadable import Unreadable
from jaxtrain.types import Mean
from loaders.shuffle_stats import ShuffleStats

log = logging.getLogger("jaxtrain")


class Pending(NamedTuple):
    """A step whose metrics are not read yet."""

    out: Mapping[str, Mean]
    item: Item
    digests: jax.Array | None  # of the batch and of the state after the step


class MetricsLogger:
    """A context. Process 0 writes, and every process reads its steps.

    Attributes:
      skipped: steps skipped in a row.
    """

    def __init__(
        self,
        assembly: Assembly,
        data: Data,
        stream: Stream,
        process: ProcessContext,
        programs: StepCompiler,
        *,
        first: int,
        peak: tuple[float, str],
    ):
        """``peak``: `metrics.peak_flops`."""
        config = assembly.config
        self._config = config
        self._task = assembly.task
        self._data = data
        self._stream = stream
        self._process = process
        self._first = first
        self._everywhere = assembly.layout.replicated()
        self.skipped = SkippedSteps(config.guard, step=first)
        self._pending: Pending | None = None
        self._programs = programs
        process.confirm()
        self._records: list[writers.JsonlWriter] = []
        self._digests: list[writers.JsonlWriter] = []
        if cluster.is_main():
            _write_config(config)
            _write_sources(config.workdir, data)
            self._records = [writers.JsonlWriter(config.workdir, first)]
            if config.metrics.digest:
                digests = writers.JsonlWriter(config.workdir, first, DIGESTS, jsonl.step_problem)
                self._digests = [digests]
        for tracker in process.trackers:
            tracker.resume(first)
        self._writers = [*self._records, *process.trackers]
        arrays_of_batch = specs.paths({digest.BATCH: assembly.abstract.batch})
        self._digested = arrays_of_batch + specs.paths(saved_parts(assembly.abstract.state))
        self._unnamed = True  # whether no line of them names the arrays yet
        self._lines = writers.Lines(config.workdir)
        self._traces = traces.Traces(
            config.workdir, config.metrics.profile, process=jax.process_index()
        )
        self._read_last = first
        self._unreadable = Unreadable("to train on")
        self._untested = Unreadable("to test on")
        flops, source = peak
        log.info("MFU is of %.2f TFLOP/s (%s)", flops / 1e12, source)
        self._meter = metrics.Meter(
            steps=config.train.steps,
            batch=config.train.batch,
            flops=assembly.task.flops,
            full_flops=assembly.task.full_flops,
            peak=flops,
            local_rows=sum(stop - start for start, stop in data.rows.ranges),
        )
        self._n_measured = 0  # records of steps; the first has what a start takes
        self._shuffle_stats: ShuffleStats | None = None
        if data.train.population and "index" in assembly.abstract.batch and cluster.is_main():
            self._shuffle_stats = ShuffleStats(data.train.population)

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._traces.close(self._read_last)
        self._unreadable.look(self._data.train.diagnostics())
        self._unreadable.close()
        self._untested.close()
        # the trackers end later, once the checkpoints are written
        open_files: list[writers.Writer | writers.Lines] = [*self._records, *self._digests]
        if not self._process.has_lost:
            open_files.append(self._lines)
        for writer in open_files:
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
        self._meter.start(step, self._stream.waited)

    def push(self, out: Mapping[str, Mean], item: Item, state: TrainState) -> bool:
        """Read the step before this one, and keep this one.

        True when that step agreed to stop: it changed nothing.

        ``state``: after this step, for its digest, computed before the next step takes its place.
        """
        if self.flush():
            return True
        digests = None
        if self._is_recorded(item.step):
            digests = self._digests_of(item, state)
        self._pending = Pending(out, item, digests)
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
        pending, self._pending = self._pending, None
        step = pending.item.step
        began = time.perf_counter()
        record = metrics.mean([pending.out])
        seconds = time.perf_counter() - began
        if record.pop("stopped"):
            return True
        self._process.clock.read(step, seconds)
        self._process.beat(f"step {step + 1}")
        if pending.digests is not None:
            record |= self._read_digest(step, jax.device_get(pending.digests))
        self._read(step, record, pending.item)
        return False

    def _digests_of(self, item: Item, state: TrainState) -> jax.Array | None:
        """Start to compute the digests of a batch and a state, if the config asks for them."""
        if not self._config.metrics.digest:
            return None
        return self._programs.digest(item.bucket)(dict(item.arrays), saved_parts(state))

    def _read_digest(self, step: int, parts: np.ndarray) -> dict[str, int]:
        """Write the digests of the arrays. Return the state's, for the record."""
        line: dict[str, Any] = {"arrays": parts.astype(">u4").tobytes().hex()}
        if self._unnamed:
            line["names"] = self._digested
            self._unnamed = False
        self._write(step, "train", line, self._digests)
        is_of_state = [not name.startswith(f"{digest.BATCH}/") for name in self._digested]
        high, low = parts[is_of_state].sum(0, dtype=digest.WORD)
        return dict(zip(DIGEST, (int(high), int(low)), strict=True))

    def rewound(self, item: Item, state: TrainState) -> None:
        """Write the digests of the arrays again: those that a checkpoint after this step has."""
        if self._config.metrics.digest and self._is_recorded(item.step):
            digests = jax.device_get(self._digests_of(item, state))
            self._read_digest(item.step, digests)

    def _is_recorded(self, step: int) -> bool:
        return bool(step_lib.is_recorded(self._config, step))

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
            _warn_of_skipped(step, record, item, self._config.model)
        if self._is_recorded(step) or skipped:
            self._write_step(step, record, item)

    def _write_step(self, step: int, record: dict[str, Any], item: Item) -> None:
        loader = self._data.train.diagnostics()
        self._unreadable.look(loader)
        rates = self._meter.rates(
            step, self._stream.waited, loader, document_flops=self._document_flops(item)
        )
        self._n_measured += 1
        if self._config.train.patience and self._n_measured == 2:
            log.info("%s", self._longest(step))
        goodput = self._process.clock.goodput()
        self._write(step, "train", record | rates | {"goodput": goodput})
        if self._shuffle_stats:
            self._write(step, "data", self._shuffle_stats.record())
        line = console.progress_line(
            step,
            self._config.train.steps,
            record["loss"],
            rates,
            terms={name: record[name] for name in self._task.terms},
            slowest=loader.get("slowest"),
        )
        self._process.console.progress(line)

    def _document_flops(self, item: Item) -> float:
        """Return the FLOPs of a step by the documents of its batch, 0 if it has none."""
        counted = self._task.document_flops
        if counted is None:
            return 0
        arrays = [item.arrays[name] for name in counted.fields]
        rows = [feed.local_rows(x) for x in arrays]
        if rows[0].shape[1:] != arrays[0].shape[1:]:
            return 0  # the sequence is split over devices
        return counted.flops(*rows) * len(arrays[0]) / len(rows[0])

    def _longest(self, step: int) -> str:
        train = self._config.train
        return console.longest_line(
            train.steps - step,
            self._meter.seconds_per_step,
            every=train.eval_every,
            patience=train.patience,
            metric=self._config.checkpoint.best.lstrip("-"),
        )

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
        self._untested.look(self._data.test.diagnostics())
        self._process.confirm()
        with self._process.writing():
            if generations and cluster.is_main():
                self._lines.write(writers.GENERATIONS, step, generations)
                for writer in self._writers:
                    writer.generations(step, generations)
            class_counts = counts["classes"]
            if class_counts is not None and cluster.is_main():
                scores = class_scores.line(class_counts, counts["confusions"])
                self._lines.write(class_scores.FILE, step, [scores])
        self._write(step, "test", record)
        numbers = [f"{name} {value:.4f}" for name, value in record.items() if not math.isnan(value)]
        log.info("step %d test  %s", step, "  ".join(numbers))

    def saved(self, step: int, saved: Saved) -> None:
        """Write how long the loop waited for a save."""
        record = {
            "seconds": saved.seconds,
            "steps": saved.seconds / self._meter.seconds_per_step,
            "failures": saved.failures,
        }
        self._write(step, "save", record)
        self._process.beat(f"step {step + 1}")

    def write_waiting(self) -> bool:
        """Try again to write what a full disk refused. Return whether all is written."""
        is_written = False
        with self._process.writing():
            is_written = all([file.flush() for file in (*self._records, *self._digests)])
            is_written &= self._lines.flush()
        return is_written

    def verified(self, step: int, *, wrong: bool) -> None:
        self._write(step, "verify", {"miscomputed": float(wrong)})

    def _inputs(self, item: Item) -> None:
        """Draw the inputs of the run's first batch, while the next step is computed."""
        self._process.starting("its pictures")  # which are compiled
        draw = jax.jit(self._task.pictures, out_shardings=self._everywhere)
        self.pictures(draw(item.arrays))  # every process takes part

    def pictures(self, pictures: Mapping[str, jax.Array], *, step: int = 0) -> None:
        """Write arrays [n, height, width] in 0..1 into workdir/pictures. Step 0 is the start."""
        # a wait, in which a workdir may go
        host_pictures = jax.device_get(dict(pictures)) if cluster.is_main() else {}
        self._process.confirm()
        if not cluster.is_main():
            return
        with self._process.writing():
            self._write_files(step, host_pictures)
            for writer in self._writers:
                writer.pictures(step, host_pictures)

    def _write_files(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Write pictures as files. A full disk leaves them out."""
        prefix = f"step{step:06}_" if step else ""
        files = {f"{prefix}{name}": images for name, images in pictures.items()}
        folder = os.path.join(self._config.workdir, "pictures")
        try:
            writers.write_pictures(folder, files)
        except OSError as error:
            if error.errno not in writers.FULL:
                raise
            log.error(
                "%s cannot be written (%s); pictures of step %d are left out",
                folder,
                error.strerror,
                step,
            )

    def _write(
        self,
        step: int,
        split: str,
        record: Mapping[str, Any],
        into: Sequence[writers.Writer] | None = None,
    ) -> None:
        if into is None:
            into = self._writers
        with self._process.writing():
            if into and not self._process.has_lost:
                self._process.lease.confirm()
                for writer in into:
                    writer.write(step, split, record)


def _write_config(config: config_lib.Config) -> None:
    """Write the config and the learning rates of all steps into the workdir."""
    config_lib.save(config, config.workdir)
    rates = functools.partial(optim.learning_rates, config.optim, config.train.steps)
    writers.write_schedule(config.workdir, config.train.steps, rates)


def _write_sources(workdir: str, data: Data) -> None:
    """Write what the run is trained on into the workdir. A full disk leaves it out."""
    try:
        training_sources.write(workdir, data.train.sources())
    except OSError as error:
        if error.errno not in writers.FULL:
            raise
        log.error(
            "%s cannot be written (%s), and is left out",
            os.path.join(workdir, training_sources.FILE),
            error.strerror,
        )


def _warn_of_skipped(
    step: int, record: Mapping[str, Any], item: Item, model: config_lib.ModelSection
) -> None:
    examples: object = "not named by the loader"
    if "index" in item.arrays:
        examples = feed.local_values(item.arrays["index"])
    rows = {}
    for name in model.doubted:
        if name in item.arrays:
            rows[name] = feed.local_rows(item.arrays[name])
    doubt = model.row_doubts(rows)
    log.warning(
        "step %d skipped: loss %g, gradient norm %g; examples %s%s",
        step,
        record["loss"],
        record["grad_norm"],
        examples,
        f"; {doubt}" if doubt else "",
    )
