"""The whole program, on one page: assemble, then the loop."""

import contextlib
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxtrain import assembly as assembly_lib
from jaxtrain import plan
from jaxtrain.checkpoint import data_of_run
from jaxtrain.compile.attempt_programs import AttemptPrograms
from jaxtrain.config import Config
from jaxtrain.parallel import cluster
from jaxtrain.run.checkpoint_manager import CheckpointManager
from jaxtrain.run.evaluate import Evaluator, is_missed
from jaxtrain.run.init_or_restore import init_or_restore
from jaxtrain.run.metrics_logger import MetricsLogger
from jaxtrain.run.process_context import Preempted, ProcessContext
from jaxtrain.run.schedule import Schedule
from jaxtrain.run.step_compiler import StepCompiler
from jaxtrain.run.stream import Data, Stream
from jaxtrain.run.verify import Verifier
from jaxtrain.step.state import TrainState
from jaxtrain.telemetry import goodput, metrics
from loaders.io import machine

__all__ = ["Preempted", "Result", "run"]

log = logging.getLogger("jaxtrain")


class Result(NamedTuple):
    """The end of a run."""

    state: TrainState | None  # None: the run had ended before, with weights only
    step: int
    # the last one; empty without a test split, or if this start evaluated nothing
    evaluation: dict[str, float]


class Replay(NamedTuple):
    """Steps of another run that are made again. The schedules stay those of config.train.steps."""

    until: int  # the last step
    save: int  # a step whose state is saved, too; 0 = none
    # raises an error before the first step; gets the data, the offset of their position, and the
    # digest of the weights that the state was initialised from
    check: Callable[[Data, int, str], None]


def run(
    config: Config,
    command: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    replay: Replay | None = None,
) -> Result:
    """Trains ``config`` to its last step, resuming from the newest checkpoint in its workdir.

    Args:
      command: how the run was launched ("source" of the config, "overrides"), for the report.

    Raises:
      UserError: an error with its remedy.
      Preempted: one of config.preemption.signals came, to this process or another; it is saved.
      KeyboardInterrupt: Ctrl-C, likewise.
      FloatingPointError: config.guard.patience steps in a row were not finite, or spikes, and no
      rewind is left.
    """
    with contextlib.ExitStack() as closing:
        process = closing.enter_context(ProcessContext.join(config, command))
        with process.phase(goodput.PLAN):
            config = data_of_run.settled(config)
            config = plan.resolve(plan.decide_once(config), plan.parse_target(""))
        assembly = assembly_lib.assemble(config)
        log.info("%s", assembly_lib.describe(assembly))
        attempts = AttemptPrograms(config, assembly.layout.mesh)
        with process.phase(goodput.PLAN):
            if not attempts.has_earlier:  # it has been compiled and allocated before
                assembly.compiler_options()  # the compiler refuses unknown ones
                plan.refuse_if_too_large(assembly)
        with process.phase(goodput.INDEX):
            data = closing.enter_context(Data(assembly))
            process.clock.reads(data.digest())
        with process.phase(goodput.RESTORE):
            checkpoints = closing.enter_context(CheckpointManager(assembly, data, process))
            if checkpoints.finished():
                log.info(
                    "the run has already ended at step %d, with weights only", config.train.steps
                )
                return Result(None, config.train.steps, {})
        with process.phase(goodput.COMPILATION, "its compilation"):
            # measured, perhaps, and therefore while nothing else computes
            peak = attempts.peak(metrics.peak_flops)
            # The compilation takes the longest. The state is made or restored at the same time.
            programs = closing.enter_context(
                StepCompiler(assembly, data, process.clock, attempts, likely=checkpoints.likely())
            )
        with process.phase(goodput.RESTORE, "its checkpoint"):
            state, step, history, warm = init_or_restore(
                assembly, checkpoints.newest, in_memory=checkpoints.in_memory
            )
            process.clock.resumed(step, warm=warm)
        due = Schedule(
            config,
            has_tests=data.test.n_batches > 0 and not replay,
            extra_save=replay.save if replay else 0,
        )
        if step >= due.steps:
            log.info(
                "the run has already reached step %d; raise config.train.steps to train on", step
            )
            if not is_missed(config, step, due=due.at(step).evaluate):
                return Result(state, step, {})  # and nothing is compiled
        with process.phase(goodput.COMPILATION, "its compilation"):
            if replay:
                replay.check(data, history.offset, warm)
            stream = closing.enter_context(
                Stream(data, process.clock, step=step, offset=history.offset)
            )
            metrics_logger = closing.enter_context(
                MetricsLogger(assembly, data, stream, process, programs, first=step, peak=peak)
            )
            programs.ready(step, history.offset)
            machine.give_back_freed_memory()  # what compiling and restoring took
            verify = Verifier(assembly, data, programs, metrics_logger)
            evaluate = Evaluator(assembly, data, programs, metrics_logger, checkpoints, process)
        with process.phase(goodput.OTHERS):
            cluster.barrier("compiled")
        metrics_logger.start_clock(step)
        end = min(due.steps, replay.until) if replay else due.steps

        # killed between a save and its evaluation
        missed = is_missed(config, step, due=due.at(step).evaluate)
        last = evaluate(state, step) if missed else {}
        while step < end and not evaluate.stopped and not checkpoints.stalled(step):
            # 1. Fetch the next batch. If a stop was requested while the loader is stalled, reuse
            #    the previous batch: that step is a no-op that only carries the stop flag.
            batch = stream.next(unless=process.stopping)
            step = batch.step
            stop = programs.stop[process.stopping()]
            if verify.is_due(step):
                state, out = verify(programs.at(batch), state, batch, stop)
            else:
                with jax.transfer_guard("disallow"):
                    state, out = programs.at(batch)(state, batch.arrays, stop)
            # 2. Read the step before this one, while the device computes this one. All processes
            #    agree to stop inside a step.
            if metrics_logger.push(out, batch, state):
                break
            checkpoints.poll()
            now = due.at(step)
            # 3. If the host waits anyway, read this step too.
            reads = now.save or now.evaluate or now.remember
            waits = reads or metrics_logger.skipped.broken
            if waits and metrics_logger.flush():
                break
            # 4. Rewind before a save: a bad state never reaches the disk.
            if metrics_logger.skipped.broken:
                skipped = metrics_logger.skipped
                state, history = checkpoints.rewind(state, step, skipped, history)
                metrics_logger.rewound(batch, state)
            if now.remember:
                recorded = metrics_logger.write_waiting()
                checkpoints.remember(step, state, history, recorded=recorded)
            # 5. Save, then evaluate: a kill between the two costs one evaluation.
            if now.save and now.resumable:
                metrics_logger.saved(step, checkpoints.save(step, state, history))
            if now.evaluate:
                last = evaluate(state, step)
            # 6. Save the final, weights-only checkpoint after the evaluation. It cannot be resumed.
            if checkpoints.owes(now, step):
                metrics_logger.saved(step, checkpoints.save(step, state, history))
            if waits:
                metrics_logger.start_clock(step)
        else:
            if not evaluate.stopped:
                metrics_logger.flush()  # the last step of a replay: nothing waited for it
                checkpoints.report_end(step)
                return Result(state, step, last)

        # 7. The step that was refused has changed nothing: the state is that of the step before.
        #    An evaluation that was given up is made by the next start.
        step = int(state.step)
        checkpoints.save(step, state, history)
        raise process.end(f" after step {step}, saved in {config.workdir}")
