"""The whole program, on one page: assemble, then the loop."""

import contextlib
import logging
import types
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain import assembly as assembly_lib
from jaxtrain import checkpoint, optim, plan
from jaxtrain.checkpoint import warm_start
from jaxtrain.checkpoint.init_or_restore import begin
from jaxtrain.checkpoint.rewinds import Saves
from jaxtrain.compile.step_compiler import Programs
from jaxtrain.config import Config, ConfigError
from jaxtrain.data.stream import Data
from jaxtrain.evaluate import Evaluator, is_missed
from jaxtrain.nn import lora
from jaxtrain.parallel import cluster
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.process_context import Host, Preempted
from jaxtrain.schedule import Schedule
from jaxtrain.telemetry import goodput, metrics
from jaxtrain.telemetry.metrics_logger import Log
from loaders.base import DataError
from loaders.io import machine

__all__ = ["USER_ERRORS", "Preempted", "run"]

log = logging.getLogger("jaxtrain")

# Mistakes that a user can fix: the message says how, so that no traceback is shown.
USER_ERRORS = (
    ConfigError,
    cluster.ClusterError,
    cluster.RendezvousError,
    WorkdirError,
    layout_lib.LayoutError,
    plan.PlanError,
    optim.OptimError,
    lora.LoraError,
    checkpoint.CheckpointError,
    warm_start.WarmStartError,
    DataError,
)


def run(config: Config, told: Mapping[str, Any] = types.MappingProxyType({})) -> dict[str, float]:
    """Trains ``config`` to its last step, resuming from the newest checkpoint in its workdir.

    ``told``: what the report shall know of the command, kept with this start: "source" of the config, "overrides" of it.

    Returns the last evaluation (empty without a test split, and for a run that had ended with weights only).

    Raises:
      USER_ERRORS: a mistake with its remedy.
      Preempted: one of config.preemption.signals came, to this process or another.
      FloatingPointError: config.guard.patience steps in a row were not finite, or spikes, and no rewind is left.
    """
    with contextlib.ExitStack() as closing:
        host = closing.enter_context(Host(config, told))
        assembly = assembly_lib.assemble(config)
        assembly.compiler_options()  # those that the compiler refuses are reported before data is read
        log.info("%s", assembly_lib.describe(assembly))
        host.clock.switch(goodput.PLAN)
        plan.refuse_if_too_large(assembly)  # before anything is allocated
        host.clock.switch(goodput.INDEX)
        data = closing.enter_context(Data(assembly, host.clock))
        host.clock.switch(goodput.RESTORE)
        saves = closing.enter_context(Saves(assembly, data, host))
        if saves.finished():
            log.info("the run has already ended at step %d, with weights only", config.train.steps)
            return {}
        host.clock.switch(goodput.COMPILATION)
        host.starting("its compilation")
        peak = metrics.peak_flops()  # measured, perhaps, and therefore while nothing else computes
        # Beside the compilation, which takes the longest, the state is made or restored.
        programs = closing.enter_context(Programs(assembly, data, host.clock, likely=saves.likely()))
        host.clock.switch(goodput.RESTORE)
        host.starting("its checkpoint")
        state, step = begin(assembly, saves)
        host.clock.resumed(step)
        due = Schedule(config, tests=data.test.n_batches > 0)
        if step >= due.steps:
            log.info("the run has already reached step %d; raise config.train.steps to train on", step)
            if not is_missed(config, step, due=due.at(step).evaluate):
                return {}  # and nothing is compiled
        host.clock.switch(goodput.COMPILATION)
        host.starting("its compilation")
        data.start(step, saves.history.offset)
        note = closing.enter_context(Log(assembly, data, host, first=step, peak=peak))
        programs.ready(step)
        machine.give_back_freed_memory()  # what compiling and restoring took
        evaluate = Evaluator(assembly, data, programs, note, saves, host)
        host.clock.switch(goodput.OTHERS)
        host.meet("compiled")
        note.start_clock(step)

        last = evaluate.if_missed(state, step, due=due.at(step).evaluate)  # killed between a save and its evaluation
        while step < due.steps and not saves.stalled(step):
            # 1. The next batch; while none comes and somebody asks to stop, an old one, for a step that changes nothing.
            batch = data.next(unless=host.stopping)
            step, stop = batch.step, programs.stop[host.stopping()]
            with jax.transfer_guard("disallow"):
                state, out = programs.at(batch)(state, batch.arrays, stop)
            # 2. Read the step before this one, while the device computes this one. All processes agree to stop inside a step.
            if note.push(out, batch):
                break
            saves.poll()
            now = due.at(step)
            # 3. Where the host waits anyway, read this step too.
            waits = now.save or now.evaluate or note.streak.broken
            if waits and note.flush():
                break
            # 4. Rewind before a save: a bad state never reaches the disk.
            if note.streak.broken:
                state = saves.rewind(state, step, note.streak)
            # 5. Save, then evaluate: a kill between the two costs one evaluation.
            if now.save and now.resumable:
                note.saved(step, saves.save(step, state))
            if now.evaluate:
                last = evaluate(state, step)
            # 6. What ends a run is saved last: nothing is resumed from it.
            if saves.owes(now, step):
                note.saved(step, saves.save(step, state))
            if waits:
                note.start_clock(step)
        else:
            if step < due.steps:
                best, patience = config.checkpoint.best, config.train.patience
                log.info("ended at step %d: no progress of %s for %d evaluations", step, best, patience)
            return last

        # 7. The step that was refused has changed nothing: the state is that of the step before.
        step = int(state.step)
        saves.save(step, state)
        raise Preempted(f"ended by {host.reason} after step {step}, saved in {config.workdir}")
