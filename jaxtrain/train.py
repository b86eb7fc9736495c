"""The whole program, top to bottom: assemble, then the loop."""

import contextlib
import functools
import importlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping

import jax
import numpy as np
import optax

from jaxtrain import checkpoint as checkpoint_lib
from jaxtrain import cluster, compiler, feed, lora, metrics, optim, specs
from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib
from jaxtrain import plan as plan_lib
from jaxtrain import state as state_lib
from jaxtrain import step as step_lib
from jaxtrain.checkpoint import warm_start
from jaxtrain.types import Batch, Mean, PyTree, Task
from loaders.base import DataError
from loaders.mixing import Mixing

log = logging.getLogger("jaxtrain")

# What a user can mend: the message says how, and no traceback is wanted.
USER_ERRORS = (
    config_lib.ConfigError,
    cluster.ClusterError,
    cluster.RendezvousError,
    layout_lib.LayoutError,
    plan_lib.PlanError,
    optim.OptimError,
    lora.LoraError,
    checkpoint_lib.CheckpointError,
    warm_start.WarmStartError,
    DataError,
)


class Preempted(Exception):
    """A signal asked the run to end; it is saved, and the same command goes on."""


def run(config: config_lib.Config) -> dict[str, float]:
    """Trains ``config`` to its last step, going on from the newest checkpoint in its workdir.

    Returns the last evaluation (empty without a test split, and for a run that had ended with weights only).

    Raises:
      USER_ERRORS: a mistake with its remedy.
      Preempted: one of config.preemption.signals came, to this process or another.
      FloatingPointError: config.guard.patience steps in a row were not finite, or spikes, and there is no rewind left.
    """
    with contextlib.ExitStack() as closing:
        return _run(config, closing)


def _run(config: config_lib.Config, closing: contextlib.ExitStack) -> dict[str, float]:
    start_up = metrics.StartUp()
    start_up.done("imports and config")

    # 1. Processes meet; process 0 has the console, and each its log.
    stop = closing.enter_context(contextlib.closing(cluster.StopSignals(config.preemption.signals)))
    closing.callback(cluster.Notices(cluster.metadata_server(os.environ), stop.ask).close)
    found = cluster.find()
    logs = os.path.join(config.workdir, "logs")
    console = metrics.start_console(process=found.process, folder=logs)
    closing.callback(console.finish)
    try:
        cluster.initialize(found, config, leave=stop.check)
    except cluster.Stopped as error:
        raise Preempted(f"ended by {stop.reason}: {error}") from error
    stop.install()  # jax.distributed takes SIGTERM for itself
    watchdog = cluster.Watchdog(
        logs,
        process=found.process,
        processes=found.processes,
        timeout=config.distributed.step_timeout,
        start_timeout=config.distributed.start_timeout,
    )
    closing.callback(watchdog.close)

    # 2. Devices, and the rules by which arrays live on them.
    mesh = layout_lib.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    layout = layout_lib.make_layout(mesh, config.mesh.axis_rules)
    options = compiler.options(config.compiler, mesh.devices.flat[0].device_kind, count=mesh.size, device=mesh.local_devices[0])
    start_up.done("processes and devices")

    # 3. What is trained, and how.
    task = importlib.import_module(config.workload).make_task(config, layout.shard, config.train.batch)
    task = lora.adapt(task, config.lora)
    tx = optim.make_optimizer(config.optim, task.specs.params, steps=config.train.steps)

    # 4. All that training will hold, before any of it exists.
    source = importlib.import_module(config.loader)
    plan = state_lib.make_plan(
        task,
        tx,
        layout,
        source.fields(config.data),
        batch=config.train.batch,
        ema=config.train.ema > 0,
        offload=config.optim.offload,
    )
    rows = feed.rows_for(plan.batch)
    log.info(
        "%s parameters, %.1f MB of state per device; mesh %s on %d × %s",
        f"{specs.count(task.specs.params):,}",
        state_lib.bytes_per_device(plan.state) / 1e6,
        dict(mesh.shape),
        mesh.size,
        mesh.devices.flat[0].device_kind,
    )

    assembly = plan_lib.Assembly(config, layout, task, tx, plan)
    traced = functools.cache(assembly.trace)
    plan_lib.refuse(assembly, traced(task.stage(config.train.steps - 1)))  # with the largest of the loader's shapes
    start_up.done("plan")

    # 5. The loaders, which start to work at seek.
    loader = source.make_loader(config.data, split="train", rows=rows, seed=config.seed)
    test = source.make_loader(config.data, split="test", rows=rows, seed=config.seed)
    closing.callback(test.close)
    kinds, test_kinds = feed.shapes(loader), feed.shapes(test)
    batches, test_batches = (
        [state_lib.make_batch(task, layout, fields, config.train.batch) for fields in k.fields] for k in (kinds, test_kinds)
    )

    start_up.done("data")

    # 6. The state: the newest checkpoint of this workdir, else that of config.resume, else config.warm_start, else the
    #    initialisation.
    watchdog.starting("its checkpoint")
    checkpointer = checkpoint_lib.Checkpointer(config, task)
    closing.callback(checkpointer.close)
    if checkpointer.is_finished():
        log.info("the run has already ended at step %d, with weights only", config.train.steps)
        return {}
    restored = checkpointer.restore(plan, loader.state(0))
    if restored:
        state, step, history, found = restored
        state = _with_frozen(config, task, plan, state)
        log.info("going on from step %d: %s", step, found)
    else:
        state, step, history = _initial_state(config, task, tx, plan), 0, checkpoint_lib.History()
    offset = history.offset
    if cluster.is_main():
        config_lib.save(config, config.workdir)
    writers = metrics.make_writers(config, step) if cluster.is_main() else []
    for writer in writers:
        closing.callback(writer.close)
    if step >= config.train.steps:
        log.info("the run has already reached step %d; raise config.train.steps to go on", step)

    start_up.done("state")

    # 7. The steps, compiled while the loader's first batches are on their way; first all processes must mean the same step.
    watchdog.starting("its compilation")
    loader.seek(step - offset)
    stream = closing.enter_context(contextlib.closing(feed.Feed(loader, plan.batch, rows)))
    began = time.perf_counter()

    def program_of(step: int) -> tuple[Hashable, int]:
        """What the program of a step depends on: its stage, and its batch's shape."""
        return task.stage(step), kinds.at(step - offset)

    @functools.cache
    def lowered(program: tuple[Hashable, int]) -> jax.stages.Lowered:
        stage, shape = program
        if batches[shape] == plan.batch:
            return traced(stage).lower()
        return assembly._replace(plan=plan._replace(batch=batches[shape])).trace(stage).lower()

    def compiled(program: tuple[Hashable, int]) -> Callable:
        return compiler.compile(lowered(program), options, config.compiler)

    evaluations = [step_lib.make_eval_step(task, layout).lower(plan.state.variables, batch) for batch in test_batches]
    alike = {"data": json.dumps(loader.state(0)), "evaluation": "".join(x.as_text() for x in evaluations)}
    if step < config.train.steps:
        alike["step"] = lowered(program_of(step)).as_text()
    cluster.compare(alike)
    if problem := _best_problem(config, task, evaluations[0].out_info if test.n_batches else None):
        raise config_lib.ConfigError([("checkpoint.best", problem)])
    programs = closing.enter_context(
        contextlib.closing(step_lib.Programs(program_of, compiled, start=step, stop=config.train.steps))
    )
    if len(programs.starts) > 1:
        log.info(
            "%d programs, by (stage, shape of a batch), compiled ahead; first at %s", len(programs.starts), programs.starts
        )
    if programs.starts:
        programs.at(step)
    eval_steps = [compiler.compile(evaluation, options, config.compiler) for evaluation in evaluations]
    stops = [step_lib.put_stop(layout, asked) for asked in (False, True)]
    peak, peak_source = metrics.peak_flops()
    start_up.done("compilation")
    log.info("compiled in %.1f s; MFU is of %.2f TFLOP/s (%s)", time.perf_counter() - began, peak / 1e12, peak_source)
    meter = metrics.Meter(
        steps=config.train.steps, batch=config.train.batch, flops=task.flops, peak=peak, full_flops=task.full_flops
    )
    skipped_in_a_row, last_good, gone_bad, begins = 0, step, False, step
    population = getattr(loader, "population", None)
    mixing = Mixing(population) if population and "index" in plan.batch and cluster.is_main() else None

    progress = jax.jit(task.progress, out_shardings=layout.replicated())
    trials = [(trial, jax.jit(trial.run, out_shardings=layout.replicated())) for trial in task.trials]

    def evaluate(step: int) -> dict[str, float]:
        """Sums over the test split (at the end: the whole of it), on all devices; reported once."""
        whole = step == config.train.steps or not config.train.eval_batches
        n = test.n_batches if whole else min(config.train.eval_batches, test.n_batches)
        variables = state.variables._replace(params=state.ema) if config.train.ema else state.variables
        test.seek(0)
        sums = []
        for i in range(n):
            watchdog.beat(f"batch {i + 1} of the evaluation after step {step}")
            stop.check()
            batch = feed.put(next(test)[1], plan.batch, rows)
            sums.append(eval_steps[test_kinds.at(i)](variables, batch))
            if i == 0:
                pictures = progress(variables, batch)  # every process takes part
        if cluster.is_main():
            named = {f"step{step:06}_{name}": images for name, images in pictures.items()}
            metrics.write_pictures(os.path.join(config.workdir, "pictures"), named)
        record, samples = task.finish(metrics.mean(sums)), []
        for trial, attempt in trials:
            watchdog.beat(f"a trial of the evaluation after step {step}")
            numbers, lines = trial.judge(jax.device_get(attempt(variables)))
            record |= numbers
            samples += lines
        if samples and cluster.is_main():
            metrics.write_samples(config.workdir, step, samples)
        for writer in writers:
            writer.write(step, "test", record)
        log.info("step %d test  %s", step, "  ".join(f"{k} {v:.4f}" for k, v in record.items() if not math.isnan(v)))
        return record

    def report(step: int, out: step_lib.Metrics, batch: Batch) -> bool:
        """Waits for a step and writes its record. True when it came to nothing because a process asked to stop."""
        nonlocal skipped_in_a_row, last_good, gone_bad
        record = metrics.mean([out])
        watchdog.beat(f"step {step + 1}")
        if record.pop("stopped"):
            return True
        if step == begins + 1:
            start_up.done("first step")
            log.info(start_up.line())
        if mixing:
            mixing.add(feed.local_values(batch["index"]))
        if record["skipped"]:
            skipped_in_a_row += 1
            gone_bad = gone_bad or skipped_in_a_row >= config.guard.patience
            rows_read = feed.local_values(batch["index"]) if "index" in batch else "not named by the loader"
            log.warning(
                "step %d skipped: loss %g, gradient norm %g; recordings %s",
                step,
                record["loss"],
                record["grad_norm"],
                rows_read,
            )
        else:
            skipped_in_a_row, last_good = 0, last_good if gone_bad else step
        if step % config.metrics.every == 0 or step == config.train.steps or record["skipped"]:
            rates = meter.rates(step, stream.waited)
            for writer in writers:
                writer.write(step, "train", record | rates)
                if mixing:
                    writer.write(step, "data", mixing.record())
            slowest = loader.diagnostics().get("slowest")
            console.progress(metrics.progress_line(step, config.train.steps, record["loss"], rates, slowest=slowest))
        return False

    def save(step: int) -> None:
        seconds, failures = checkpointer.save(step, state, loader.state(step - offset), history)
        waited = {"seconds": seconds, "steps": seconds / meter.seconds_per_step, "failures": failures}
        for writer in writers:
            writer.write(step, "save", waited)
        watchdog.beat(f"step {step + 1}")

    def rewind(step: int) -> state_lib.TrainState:
        """The state before things went bad; the batches since then have been read, and count as skipped."""
        nonlocal history, skipped_in_a_row, last_good, gone_bad
        found = checkpointer.rewind(plan, last_good) if history.rewinds < config.guard.rewinds else None
        if not found:
            raise FloatingPointError(
                f"{config.guard.patience} steps in a row after {last_good} were skipped: their gradients were not finite, or "
                f"spikes. Lower config.optim.lr, look at those recordings, or raise config.guard.rewinds (it is "
                f"{config.guard.rewinds}, and the run has rewound {history.rewinds} times). The last checkpoint in "
                f"{config.workdir} is from before"
            )
        older, at = found
        history = history._replace(rewinds=history.rewinds + 1)
        log.warning(
            "%d steps in a row after %d were skipped: the state is again that of step %d, and batches %d to %d count as "
            "skipped (rewind %d of %d)",
            config.guard.patience,
            last_good,
            at,
            at + 1,
            step,
            history.rewinds,
            config.guard.rewinds,
        )
        skipped_in_a_row, last_good, gone_bad = 0, step, False
        return older.replace(step=state.step, variables=older.variables._replace(frozen=state.variables.frozen))

    # 8. The loop. A step is reported one late, so that the device always has its next one before we wait; where we wait
    #    anyway, for a checkpoint or an evaluation, at once.
    latest, pending, last = [feed.blank(batch) for batch in batches], None, {}
    cluster.barrier("compiled")
    watchdog.beat(f"step {step + 1}")
    meter.begin(step, stream.waited)
    if restored and test.n_batches and _looks(config, step):
        if not cluster.agree(metrics.is_written(config.workdir, step, "test")):
            last = evaluate(step)  # a kill came between the checkpoint and its evaluation
            checkpointer.score(step, last)
    while step < config.train.steps and not checkpointer.stalled(step):
        shape = kinds.at(step - offset)  # of the next batch, also where it does not come
        if item := stream.next(unless=stop.check):
            position, latest[shape] = item
            step = position + offset
        batch = latest[shape]
        if item and step == 1:
            pictures = jax.jit(task.pictures, out_shardings=layout.replicated())(batch)  # every process takes part
            if cluster.is_main():
                metrics.write_pictures(os.path.join(config.workdir, "pictures"), pictures)
        asked = stop.check()
        with jax.transfer_guard("disallow"):
            state, out = programs.at(step - 1 if item else step)(state, batch, stops[asked])
        if pending and report(*pending):
            break
        pending = (step, out, batch)
        checkpointer.poll()
        saves, looks = checkpointer.is_due(step), _looks(config, step)
        if saves or looks or gone_bad:
            if report(*pending):
                break
            pending = None
        if gone_bad:
            state = rewind(step)
        resumable = step < config.train.steps or config.checkpoint.final == "resumable"
        if saves and resumable:
            save(step)
        if looks and test.n_batches:
            last = evaluate(step)
            checkpointer.score(step, last)
            if checkpointer.stalled(step) and not saves:
                save(step)
        if saves and not resumable:
            save(step)  # last: nothing goes on from it, neither to this evaluation
        if not pending:
            meter.begin(step, stream.waited)
    else:
        if step < config.train.steps:
            log.info(
                "ended at step %d: no progress of %s for %d evaluations", step, config.checkpoint.best, config.train.patience
            )
        return last

    # 9. Some process asked to stop: no step since has changed the state.
    step = int(state.step)
    checkpointer.save(step, state, loader.state(step - offset), history)
    raise Preempted(f"ended by {stop.reason} after step {step}, saved in {config.workdir}")


def _initial_state(
    config: config_lib.Config, task: Task, tx: optax.GradientTransformation, plan: state_lib.Plan
) -> state_lib.TrainState:
    """The state at step 0: initialised, and with config.warm_start the parameters of its source laid over."""
    start, given = _warm_start(config, {**_by_path(plan.state.variables.params), **_by_path(plan.state.variables.frozen)})
    return state_lib.init_state(task, tx, plan, jax.random.key(config.seed), start=start, given=given)


def _with_frozen(
    config: config_lib.Config, task: Task, plan: state_lib.Plan, state: state_lib.TrainState
) -> state_lib.TrainState:
    """A restored state with its frozen parameters, which no checkpoint holds, as they were at step 0."""
    if not jax.tree.leaves(plan.state.variables.frozen):
        return state
    start, given = _warm_start(config, {**_by_path(plan.state.variables.params), **_by_path(plan.state.variables.frozen)})
    frozen = _by_path(plan.state.variables.frozen)
    given = {path: x for path, x in given.items() if path in frozen}
    made = state_lib.init_frozen(task, plan, jax.random.key(config.seed), start=start, given=given)
    return state.replace(variables=state.variables._replace(frozen=made))


def _warm_start(config: config_lib.Config, table: dict[str, jax.ShapeDtypeStruct]) -> tuple[Callable, dict[str, jax.Array]]:
    """What lays the source's arrays over initial parameters: both arguments of `state.init_state`. No source has adapters."""
    if not config.warm_start.source:
        return (lambda params, given: params), {}
    problems = warm_start.damage(config.warm_start) if cluster.is_main() else []
    if cluster.agree(len(problems)):
        raise warm_start.WarmStartError(config.warm_start.source, problems or ["process 0 found it damaged"])
    table = {path: x for path, x in table.items() if not lora.is_adapter(path)}
    source = warm_start.open_source(config.warm_start)
    matches = warm_start.match({path: (x.shape, x.dtype) for path, x in table.items()}, source, config.warm_start)
    log.info("warm start from %s: %s", config.warm_start.source, matches.report())
    return functools.partial(warm_start.overlay, matches), warm_start.load(matches, table)


def _by_path(tree: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(zip(specs.paths(tree), jax.tree.leaves(tree), strict=True))


def _best_problem(config: config_lib.Config, task: Task, evaluated: Mapping[str, Mean] | None) -> str:
    """What is wrong with the metric that config.checkpoint.best names, at the start. None: nothing is tested on."""
    best = config.checkpoint.best.lstrip("-")
    if not best:
        return ""
    if evaluated is None:
        return f"is {config.checkpoint.best!r}, and there is nothing to test on; leave it away, and train.patience"
    with np.errstate(all="ignore"):
        known = task.finish({name: np.ones(mean.total.shape)[()] for name, mean in evaluated.items()})
    if task.trials or best in known:  # what a trial finds is only known when it has
        return ""
    return f"names {best!r}; an evaluation has {', '.join(sorted(known))}"


def _looks(config: config_lib.Config, step: int) -> bool:
    every = config.train.eval_every
    return step == config.train.steps or bool(every and step % every == 0)
