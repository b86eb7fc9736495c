"""An evaluation: sums over the test split, pictures of the model at work, generations of tasks."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.assembly import Assembly
from jaxtrain.config import Config
from jaxtrain.parallel import cluster
from jaxtrain.run.checkpoint_manager import CheckpointManager
from jaxtrain.run.metrics_logger import MetricsLogger
from jaxtrain.run.process_context import ProcessContext
from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.stream import Data
from jaxtrain.step.state import TrainState
from jaxtrain.telemetry import goodput, metrics, writers
from jaxtrain.types import COUNTS, Variables
from loaders.io import machine

AGREE_EVERY = 16  # [batches] of an evaluation, after which several processes agree to stop


class Evaluator:
    """Evaluates, records, and scores checkpoints. Every process calls the same methods.

    Attributes:
      stopped: whether the last evaluation was given up, because the run has to end.
    """

    def __init__(
        self,
        assembly: Assembly,
        data: Data,
        programs: StepCompiler,
        metrics_logger: MetricsLogger,
        checkpoints: CheckpointManager,
        process: ProcessContext,
    ):
        self._config = assembly.config
        self._task = assembly.task
        self._data = data
        self._programs = programs
        self._metrics_logger = metrics_logger
        self._checkpoints = checkpoints
        self._process = process
        self.stopped = False
        everywhere = assembly.layout.replicated()
        self._progress = jax.jit(self._task.progress, out_shardings=everywhere)
        self._generative = [
            (evaluation, jax.jit(evaluation.run, out_shardings=everywhere))
            for evaluation in self._task.generative
        ]

    def __call__(self, state: TrainState, step: int) -> dict[str, float]:
        """Return the record of ``state`` over config.train.eval_batches, at the end over all.

        It is empty if the run has to end meanwhile (`stopped`).
        """
        with self._process.clock.during(goodput.EVALUATION):
            machine.give_back_freed_memory()  # a step's
            try:
                return self._evaluate(state, step)
            finally:
                machine.give_back_freed_memory()

    def _evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        n = self._data.test.n_batches
        train = self._config.train
        if train.eval_batches and step != train.steps:
            n = min(train.eval_batches, n)
        variables = state.variables
        if train.ema:
            variables = variables._replace(params=state.ema)
        sums = metrics.Sums()
        pictures: Mapping[str, jax.Array] = {}
        batches = self._data.test_batches(n)
        for i in range(n):
            self._process.beat(f"batch {i + 1} of the evaluation after step {step}")
            if self._stops(step, i):
                return {}
            self._metrics_logger.evaluating(step, i + 1, n)
            bucket, batch = next(batches)
            sums.add(self._programs.evaluation(bucket)(variables, batch))
            if i == 0:
                pictures = self._progress(variables, batch)  # every process takes part
        self._metrics_logger.pictures(pictures, step=step)
        counts = {name: sums.pop(name) for name in COUNTS}
        record = self._task.finish(sums.means())
        generations = self._generate(variables, step, record)
        if self.stopped:
            return {}
        self._metrics_logger.evaluated(step, record, generations, counts)
        self._checkpoints.score(step, record)
        return record

    def _stops(self, step: int, batch: int) -> bool:
        """Note whether the run has to end: all processes agree. Not before final weights."""
        if step == self._config.train.steps and self._config.checkpoint.final != "resumable":
            return False
        if batch % AGREE_EVERY == 0 or jax.process_count() == 1:
            self.stopped = any(cluster.gather(int(self._process.stopping())))
        return self.stopped

    def _generate(
        self, variables: Variables, step: int, record: dict[str, float]
    ) -> list[Mapping[str, Any]]:
        """Run the generative evaluations. Add their metrics to ``record``, return their lines."""
        generations: list[Mapping[str, Any]] = []
        for evaluation, run in self._generative:
            self._process.beat(f"a generative evaluation after step {step}")
            if self._stops(step, 0):
                break
            self._process.console.progress(
                f"evaluation after step {step}: prompts are answered", passing=True
            )
            outputs = jax.device_get(run(variables))
            numbers, lines = evaluation.score(outputs)
            record |= numbers
            generations += lines
        return generations


def is_missed(config: Config, step: int, *, due: bool) -> bool:
    """Whether a kill came between the save of ``step`` and its evaluation. All processes ask."""
    if not step or not due:
        return False
    return not cluster.agree(writers.is_written(config.workdir, step, "test"))
