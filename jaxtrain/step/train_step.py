"""One optimizer step, and one batch of an evaluation.

A step may be skipped, identically on every process, because the decision is taken from one number
that all of them have. When its gradient norm is not finite, or a spike (`jaxtrain.step.guard`), the
parameters, moments, averages and model state stay as they were and only the position advances. If
any process asks to stop, the position stays too, so the saved state is that of a whole step. No
host waits for either decision: the state is selected on the device.
"""

import functools
from collections.abc import Callable, Hashable, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Config, Guard
from jaxtrain.optim import Optimizer, root_of_sum, square_sums
from jaxtrain.parallel.layout import Layout, LayoutError
from jaxtrain.step import update as update_lib
from jaxtrain.step.accumulate import gradients, require_means
from jaxtrain.step.guard import GuardState
from jaxtrain.step.state import Abstract, TrainState, to_memory
from jaxtrain.types import Array, Batch, Mean, PyTree, Task, Variables

Metrics = dict[str, Mean]
Step = Callable[[TrainState, Batch, Array], tuple[TrainState, Metrics]]


def make_train_step(
    config: Config,
    layout: Layout,
    task: Task,
    tx: Optimizer,
    abstract: Abstract,
    stage: Hashable = None,
    *,
    has_norms: bool = True,
) -> jax.stages.Wrapped:
    """Jit `train_step` for an abstract state and batch, and a stage of the task's loss.

    The state is donated, and the new one has its shardings. Raises LayoutError if a device's rows
    do not divide into microbatches.
    """
    if config.train.accumulate > 1:
        _require_microbatches(layout, abstract, config.train.accumulate)
    if stage is not None:
        task = task._replace(loss=functools.partial(task.loss, stage=stage))
    shardings = jax.tree.map(lambda x: x.sharding, abstract.state)

    def step(state: TrainState, batch: Batch, stop: Array) -> tuple[TrainState, Metrics]:
        return train_step(config, layout, task, tx, state, batch, stop, has_norms=has_norms)

    run = _offloaded(step, shardings.opt_state) if config.optim.offload else step
    return jax.jit(run, donate_argnums=0, out_shardings=(shardings, layout.replicated()))


def _offloaded(on_device: Step, shardings: PyTree) -> Step:
    """Move the optimizer's state from host memory before a step, and back after it."""

    def step(state: TrainState, batch: Batch, stop: Array) -> tuple[TrainState, Metrics]:
        state = state.replace(opt_state=to_memory(state.opt_state, shardings, "device"))
        new, metrics = on_device(state, batch, stop)
        return new.replace(opt_state=to_memory(new.opt_state, shardings)), metrics

    return step


def _require_microbatches(layout: Layout, abstract: Abstract, accumulate: int) -> None:
    for x in abstract.batch.values():
        rows = x.sharding.shard_shape(x.shape)[0]
        if rows % accumulate:
            parts = x.shape[0] // rows
            raise LayoutError(
                f"train.batch={x.shape[0]} puts {rows} rows on each of {parts} parts of mesh"
                f" {dict(layout.mesh.shape)}, which train.accumulate={accumulate} does not divide;"
                f" make the batch a multiple of {parts * accumulate}"
            )


def train_step(
    config: Config,
    layout: Layout,
    task: Task,
    tx: Optimizer,
    state: TrainState,
    batch: Batch,
    stop: Array,
    *,
    has_norms: bool = True,
) -> tuple[TrainState, Metrics]:
    """Compute state and metrics of one global batch.

    Every metric is of this step: none mixes old and new parameters, whose norms are
    ``param_norm_before`` and ``param_norm_after``. The norms of a step that config.metrics does not
    record may be NaN, and are missing without ``has_norms``. If ``stop`` (int32 [devices],
    `abstract_stop`) is not all zero, the step is a no-op.
    """
    variables = state.variables
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    with jax.named_scope("loss_and_grad"):
        rows = with_rows(batch, layout)
        n_parts = config.train.accumulate
        grads, out = gradients(task, layout, variables, rows, key, accumulate=n_parts)
    with jax.named_scope("guard"):
        sums = square_sums(grads, out.square_sums)
        norm = root_of_sum(sums)
        stopped = stop.sum() > 0
        mean_loss = out.loss.total / out.loss.weight
        good, norms = accept(config.guard, state.norms, norm, mean_loss)
        accepted = good & ~stopped
    with jax.named_scope("update"):
        update: update_lib.Update = update_lib.update_without_norms
        if has_norms:
            update = update_lib.choose(layout, state.opt_state, variables.params)
        due = is_recorded(config, state.step + 1) | ~good
        proposed = update_lib.Gradients(grads, accepted, out.sparse_rows, due, out.square_sums)
        moved = update(tx, proposed, state.opt_state, variables.params)
        model_state = task.advance(moved.params, out.model_state, state.step)
        ema = state.ema
        if config.train.ema:
            ema = _averaged(config.train.ema, state.ema, moved.params)
        model_state, opt_state, ema, norms = jax.tree.map(
            lambda new, old: jnp.where(accepted, new, old),
            (model_state, moved.opt_state, ema, norms),
            (variables.model_state, state.opt_state, state.ema, state.norms),
        )
    own_metrics = {
        "loss": out.loss,
        **update_lib.norms("grad_norm", sums),
        **moved.norms,
        "skipped": _as_metric(~good),
        "stopped": _as_metric(stopped),
    }
    taken_names = own_metrics.keys() & out.metrics.keys()
    if taken_names:
        _raise_for_names(taken_names)
    new_variables = Variables(moved.params, variables.frozen, model_state)
    new = TrainState(state.step + ~stopped, new_variables, opt_state, ema, norms)
    return new, {**out.metrics, **own_metrics}


def is_recorded(config: Config, number: Any) -> Any:
    """Whether the metrics of step ``number``, from 1 on, are recorded: bool, or bool []."""
    return (number % config.metrics.every == 0) | (number == config.train.steps)


def _raise_for_names(names: Set[str]) -> None:
    raise ValueError(
        f"the loss returns metrics named {', '.join(sorted(names))}, and every step has its own;"
        " rename them"
    )


def accept(guard: Guard, state: GuardState, norm: Array, loss: Array) -> tuple[Array, GuardState]:
    """Whether a step is accepted, by its gradient norm and loss, and the guard's next state."""
    # a finite loss can have a gradient that is not
    is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    is_spike = jnp.zeros((), bool)
    if guard.spike:
        is_spike = norm > guard.spike * state.average
    is_settled = state.steps >= round(1 / (1 - guard.decay))
    good = is_finite & ~(is_spike & is_settled)
    # a plain mean until the decay takes over
    decay = jnp.minimum(guard.decay, state.steps / (state.steps + 1.0))
    average = decay * state.average + (1 - decay) * norm
    return good, GuardState(jnp.where(good, average, state.average), state.steps + good)


def _averaged(decay: float, average: PyTree, params: PyTree) -> PyTree:
    return jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, params)


def abstract_stop(layout: Layout) -> jax.ShapeDtypeStruct:
    """Return the argument ``stop`` of a step: one int32 on each device."""
    sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
    return jax.ShapeDtypeStruct((layout.mesh.size,), jnp.int32, sharding=sharding)


def put_stop(layout: Layout, stop: bool) -> Array:
    """Return the stop request of this process, on its devices."""
    x = abstract_stop(layout)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.full(1, stop, np.int32))


def make_eval_step(task: Task, layout: Layout) -> jax.stages.Wrapped:
    """Jits `Task.evaluate` over the global batch: sums over all rows, on every device."""

    def step(variables: Variables, batch: Batch) -> Metrics:
        metrics = task.evaluate(variables, with_rows(batch, layout))
        require_means("evaluation", metrics)
        return metrics

    return jax.jit(step, out_shardings=layout.replicated())


def with_rows(batch: Batch, layout: Layout) -> Batch:
    """Return the batch with "row": each row's place in the global batch, for random draws."""
    rows = next(iter(batch.values())).shape[0]
    return {**batch, "row": layout.shard(jnp.arange(rows, dtype=jnp.int32), "batch")}


def _as_metric(flag: Array) -> Mean:
    return Mean(flag.astype(jnp.float32), jnp.ones((), jnp.float32))
