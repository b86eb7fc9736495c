"""The whole program, top to bottom: assemble, then the loop."""

import importlib
import logging
import math
import os
import time

import jax

from jaxtrain import checkpoint as checkpoint_lib
from jaxtrain import config as config_lib
from jaxtrain import distributed, feed, metrics, optim, specs
from jaxtrain import layout as layout_lib
from jaxtrain import state as state_lib
from jaxtrain import step as step_lib
from loaders.base import DataError

log = logging.getLogger("jaxtrain")

# What a user can mend: the message says how, and no traceback is wanted.
USER_ERRORS = (
    config_lib.ConfigError,
    layout_lib.LayoutError,
    optim.OptimError,
    checkpoint_lib.CheckpointError,
    DataError,
)


def run(config: config_lib.Config) -> dict[str, float]:
    """Trains ``config`` to its last step, going on from the newest checkpoint in its workdir.

    Returns the last evaluation (empty without a test split).

    Raises:
      USER_ERRORS: a mistake with its remedy.
      FloatingPointError: the loss is not finite.
    """
    # 1. Processes meet; process 0 has the console.
    distributed.initialize(distributed.cluster(os.environ), config.distributed)
    console = metrics.start_console(main=distributed.is_main())
    os.makedirs(config.workdir, exist_ok=True)

    # 2. Devices, and the rules by which arrays live on them.
    mesh = layout_lib.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model)
    layout = layout_lib.make_layout(mesh, config.mesh.rules)

    # 3. What is trained, and how.
    task = importlib.import_module(config.workload).make_task(config, layout.shard, config.train.batch)
    tx = optim.make_optimizer(config.optim, task.specs.params, steps=config.train.steps)

    # 4. All that training will hold, before any of it exists.
    source = importlib.import_module(config.loader)
    plan = state_lib.make_plan(task, tx, layout, source.fields(config.data), batch=config.train.batch, ema=config.train.ema > 0)
    rows = feed.rows_for(plan.batch)
    log.info(
        "%s parameters, %.1f MB of state per device; mesh %s on %d × %s",
        f"{specs.count(task.specs.params):,}",
        state_lib.bytes_per_device(plan.state) / 1e6,
        dict(mesh.shape),
        mesh.size,
        mesh.devices.flat[0].device_kind,
    )

    # 5. The loaders, which start to work at seek.
    loader = source.make_loader(config.data, split="train", rows=rows, seed=config.seed)
    test = source.make_loader(config.data, split="test", rows=rows, seed=config.seed)

    # 6. The state: the newest checkpoint of this workdir, else the initialisation.
    checkpointer = checkpoint_lib.Checkpointer(config.workdir, config, task)
    restored = checkpointer.restore(plan, loader.state(0))
    if restored:
        state, step = restored
        log.info("going on from step %d of %s", step, config.workdir)
    else:
        state, step = state_lib.init_state(task, tx, plan, jax.random.key(config.seed)), 0
    if distributed.is_main():
        config_lib.save(config, config.workdir)
    writers = metrics.make_writers(config, step) if distributed.is_main() else []
    if step >= config.train.steps:
        log.info("the run has already reached step %d; raise config.train.steps to go on", step)

    # 7. The steps, compiled while the loader's first batches are on their way.
    loader.seek(step)
    stream = feed.Feed(loader, plan.batch, rows)
    began = time.perf_counter()
    train_step = step_lib.make_train_step(
        task, tx, layout, plan, accumulate=config.train.accumulate, ema=config.train.ema, seed=config.seed
    )
    train_step = train_step.lower(plan.state, plan.batch).compile()
    eval_step = step_lib.make_eval_step(task, layout)
    peak, peak_source = metrics.peak_flops()
    log.info("compiled in %.1f s; MFU is of %.2f TFLOP/s (%s)", time.perf_counter() - began, peak / 1e12, peak_source)
    meter = metrics.Meter(steps=config.train.steps, batch=config.train.batch, flops=task.flops, peak=peak)

    def evaluate(step: int) -> dict[str, float]:
        """Sums over the whole test split, on all devices; reported once."""
        variables = state.variables._replace(params=state.ema) if config.train.ema else state.variables
        test.seek(0)
        sums = [eval_step(variables, feed.put(next(test)[1], plan.batch, rows)) for _ in range(test.n_batches)]
        record = metrics.mean(sums)
        for writer in writers:
            writer.write(step, "test", record)
        log.info("step %d test  %s", step, "  ".join(f"{k} {v:.4f}" for k, v in record.items()))
        return record

    def report(step: int, out: step_lib.Metrics) -> None:
        record = metrics.mean([out])
        if not math.isfinite(record["loss"]):
            raise FloatingPointError(
                f"the loss of step {step} is {record['loss']}; {config.workdir} keeps the checkpoint before it"
            )
        if step % config.metrics.every == 0 or step == config.train.steps:
            rates = meter.rates(step, stream.waited)
            for writer in writers:
                writer.write(step, "train", record | rates)
            console.progress(metrics.progress_line(step, config.train.steps, record["loss"], rates))

    # 8. The loop. Metrics are read one step late, so that the device always has its next step before we wait.
    pending, last = None, {}
    try:
        meter.begin(step, stream.waited)
        while step < config.train.steps:
            step, batch = next(stream)
            if step == 1:
                pictures = jax.jit(task.pictures, out_shardings=layout.replicated())(batch)  # every process takes part
                if distributed.is_main():
                    metrics.write_pictures(os.path.join(config.workdir, "pictures"), pictures)
            with jax.transfer_guard("disallow"):
                state, out = train_step(state, batch)
            if pending:
                report(*pending)
            pending = (step, out)
            done = step == config.train.steps
            look = done or (config.train.eval_every and step % config.train.eval_every == 0)
            if look:  # we wait now anyway
                report(*pending)
                pending = None
            checkpointer.save(step, state, loader.state(step), force=done)
            if look and test.n_batches:
                last = evaluate(step)
                meter.begin(step, stream.waited)
    finally:
        console.finish()
        stream.close()
        test.close()
        checkpointer.close()
        for writer in writers:
            writer.close()
    return last
