"""One optimizer step, and one batch of an evaluation.

A step may be skipped, identically on every process, because the decision is taken from one number
that all of them have. When its gradient norm is not finite, or a spike (`jaxtrain.step.guard`), the
parameters, moments, averages and model state stay as they were and only the position advances. If
any process asks to stop, the position stays too, so the saved state is that of a whole step. No
host waits for either decision: the state is selected on the device.
"""

import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Guard
from jaxtrain.optim import Optimizer, global_norm
from jaxtrain.parallel.layout import Layout, LayoutError
from jaxtrain.step import update as update_lib
from jaxtrain.step.accumulate import gradients, require_means
from jaxtrain.step.guard import accept
from jaxtrain.step.state import HOST, Abstract, TrainState, to_memory
from jaxtrain.types import Array, Batch, Mean, PyTree, Task, Variables

Metrics = dict[str, Mean]


def make_train_step(
    task: Task,
    tx: Optimizer,
    layout: Layout,
    abstract: Abstract,
    *,
    accumulate: int,
    ema: float,
    guard: Guard,
    seed: int,
    stage: Hashable = None,
    records: Callable[[Array], Array] | None = None,
) -> jax.stages.Wrapped:
    """Jit `train_step` for an abstract state and batch, and a ``stage`` of the task.

    The state is donated, and the new one has its shardings. ``records``: number of a step (int32
    [], from 1) -> whether its norms are read; in other steps they may be NaN. None = always.
    Raises LayoutError if a device's rows do not divide into ``accumulate`` microbatches.
    """
    for x in abstract.batch.values():
        rows = x.sharding.shard_shape(x.shape)[0]
        if rows % accumulate:
            parts = x.shape[0] // rows
            raise LayoutError(
                f"train.batch={x.shape[0]} puts {rows} rows on each of {parts} parts of mesh"
                f" {dict(layout.mesh.shape)}, which train.accumulate={accumulate} does not divide;"
                f" make the batch a multiple of {parts * accumulate}"
            )

    if stage is not None:
        task = task._replace(loss=functools.partial(task.loss, stage=stage))

    shardings = jax.tree.map(lambda x: x.sharding, abstract.state)
    offloaded = any(s.memory_kind == HOST for s in jax.tree.leaves(shardings.opt_state))
    update = update_lib.choose(layout, abstract.state.opt_state, abstract.state.variables.params)

    def step(state: TrainState, batch: Batch, stop: Array) -> tuple[TrainState, Metrics]:
        if offloaded:
            state = state.replace(
                opt_state=to_memory(state.opt_state, shardings.opt_state, "device")
            )
        new, metrics = train_step(
            task,
            tx,
            layout,
            state,
            batch,
            stop,
            accumulate=accumulate,
            ema=ema,
            guard=guard,
            seed=seed,
            update=update,
            records=records,
        )
        if offloaded:
            new = new.replace(opt_state=to_memory(new.opt_state, shardings.opt_state))
        return new, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated()))


def train_step(
    task: Task,
    tx: Optimizer,
    layout: Layout,
    state: TrainState,
    batch: Batch,
    stop: Array,
    *,
    accumulate: int,
    ema: float,
    guard: Guard,
    seed: int,
    update: update_lib.Update = update_lib.update,
    records: Callable[[Array], Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """Compute state and metrics of one global batch.

    Every metric is of this step: none mixes old and new parameters, whose norms are
    ``param_norm_before`` and ``param_norm_after``. If ``stop`` (int32 [devices], `abstract_stop`)
    is not all zero, the step is a no-op. ``update`` is the order of writing
    (`step.update.choose`), and ``records`` as of `make_train_step`.
    """
    variables = state.variables
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    with jax.named_scope("loss_and_grad"):
        grads, out = gradients(
            task, layout, variables, with_rows(batch, layout), key, accumulate=accumulate
        )
    with jax.named_scope("guard"):
        norm, stopped = global_norm(grads), stop.sum() > 0
        good, norms = accept(guard, state.norms, norm, out.loss.total / out.loss.weight)
        accepted = good & ~stopped

    def kept(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)

    with jax.named_scope("update"):
        due = None if records is None else records(state.step + 1) | ~good
        given = update_lib.Gradients(grads, accepted, out.sparse_rows, due)
        params, opt_state, changes = update(tx, given, state.opt_state, variables.params)
        model_state = task.advance(params, out.model_state, state.step)
        average = (
            jax.tree.map(lambda old, new: ema * old + (1 - ema) * new, state.ema, params)
            if ema
            else state.ema
        )
        new, old = (
            (model_state, opt_state, average, norms),
            (variables.model_state, state.opt_state, state.ema, state.norms),
        )
        model_state, opt_state, average, norms = kept(new, old)
    own = {
        "loss": out.loss,
        **update_lib.norms("grad_norm", grads),
        **changes,
        "skipped": _unweighted((~good).astype(jnp.float32)),
        "stopped": _unweighted(stopped.astype(jnp.float32)),
    }
    if taken := sorted(own.keys() & out.metrics.keys()):
        raise ValueError(
            f"the loss returns metrics named {', '.join(taken)}, and every step has its own; rename"
            " them"
        )
    metrics = {**out.metrics, **own}
    return (
        TrainState(
            state.step + ~stopped,
            Variables(params, variables.frozen, model_state),
            opt_state,
            average,
            norms,
        ),
        metrics,
    )


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


def _unweighted(x: Array) -> Mean:
    return Mean(x, jnp.ones((), x.dtype))
