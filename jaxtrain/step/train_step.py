"""One optimizer step, and one batch of an evaluation.

Gradients of a global batch are sums over microbatches (a scan) and over the data axis of the mesh. Under plain jit the
reduction over "data" would sit inside the scan, once per microbatch. Here the scan runs under `jax.shard_map`, manual over
"data" alone, so that each group of devices keeps partial sums and they are reduced once, after it. For that the
parameters are first cast to varying over "data": else the transpose of their broadcast puts the reduction back inside.
The axes "fsdp" and "model" stay automatic.

A step may be skipped, identically on every process, because the decision is taken from one number that all of them have.
When its gradient norm is not finite, or a spike (`jaxtrain.step.guard`), the parameters, moments,
averages and carry stay as they
were and only the position advances. When any process asks to stop, not even that, so that the state saved then is that of a
whole step. No host waits for either decision: the state is selected on the device.
"""

import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import specs
from jaxtrain.config import Guard
from jaxtrain.optim import global_norm
from jaxtrain.parallel.layout import DATA, Layout, LayoutError
from jaxtrain.step import update as update_lib
from jaxtrain.step.guard import accept
from jaxtrain.step.state import HOST, Abstract, TrainState, to_memory
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Spec, Task, Variables

Metrics = dict[str, Mean]


def make_train_step(
    task: Task,
    tx: optax.GradientTransformation,
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
    """Jits `train_step` for an abstract state and batch: the state is donated, the new one lives where the old one did.

    Args:
      stage: one of the task's stages, where it has any.
      records: step's number (int32 [], 1 being the first) -> whether anybody reads its norms; in other steps that are not
        skipped they may be NaN, where that spares time. None = always.

    Raises LayoutError if a device's rows do not divide into ``accumulate`` microbatches.
    """
    for x in abstract.batch.values():
        rows = x.sharding.shard_shape(x.shape)[0]
        if rows % accumulate:
            parts = x.shape[0] // rows
            raise LayoutError(
                f"train.batch={x.shape[0]} puts {rows} rows on each of {parts} parts of mesh {dict(layout.mesh.shape)}, which "
                f"train.accumulate={accumulate} does not divide; make the batch a multiple of {parts * accumulate}"
            )

    if stage is not None:
        task = task._replace(loss=functools.partial(task.loss, stage=stage))

    shardings = jax.tree.map(lambda x: x.sharding, abstract.state)
    offloaded = any(s.memory_kind == HOST for s in jax.tree.leaves(shardings.opt_state))

    def step(state: TrainState, batch: Batch, stop: Array) -> tuple[TrainState, Metrics]:
        if offloaded:
            state = state.replace(opt_state=to_memory(state.opt_state, shardings.opt_state, "device"))
        new, metrics = train_step(task, tx, layout, state, batch, stop, accumulate=accumulate, ema=ema, guard=guard, seed=seed,
                                  records=records)  # fmt: skip
        if offloaded:
            new = new.replace(opt_state=to_memory(new.opt_state, shardings.opt_state))
        return new, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, layout.replicated()))


def train_step(
    task: Task,
    tx: optax.GradientTransformation,
    layout: Layout,
    state: TrainState,
    batch: Batch,
    stop: Array,
    *,
    accumulate: int,
    ema: float,
    guard: Guard,
    seed: int,
    records: Callable[[Array], Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """State and metrics after one global batch. Every metric is of this step: none mixes old and new parameters, and norms of
    parameters say which they are of: ``param_norm_before`` or ``param_norm_after`` the update (the same where it is skipped).

    Args:
      stop: int32 [devices], what each device's process asks for (`abstract_stop`); anything but zeros makes the step a no-op.
      records: as of `make_train_step`.
    """
    variables = state.variables
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    with jax.named_scope("loss_and_grad"):
        grads, out = gradients(task, layout, variables, with_rows(batch, layout), key, accumulate=accumulate)
    with jax.named_scope("guard"):
        norm, stopped = global_norm(grads), stop.sum() > 0
        good, norms = accept(guard, state.norms, norm, out.loss.total / out.loss.weight)
        accepted = good & ~stopped

    def kept(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)

    with jax.named_scope("update"):
        due = None if records is None else records(state.step + 1) | ~good
        moved = update_lib.update(tx, layout, grads, state.opt_state, variables.params, accepted, touched=out.touched, due=due)
        params, opt_state = moved.params, moved.opt_state
        carry = task.advance(params, out.carry, state.step)
        average = jax.tree.map(lambda old, new: ema * old + (1 - ema) * new, state.ema, params) if ema else state.ema
        new, old = (carry, opt_state, average, norms), (variables.carry, state.opt_state, state.ema, state.norms)
        carry, opt_state, average, norms = kept(new, old)
    metrics = {
        "loss": out.loss,
        **out.metrics,
        **update_lib.norms("grad_norm", grads),
        **moved.norms,
        "skipped": _unweighted((~good).astype(jnp.float32)),
        "stopped": _unweighted(stopped.astype(jnp.float32)),
    }
    return TrainState(state.step + ~stopped, Variables(params, variables.frozen, carry), opt_state, average, norms), metrics


def abstract_stop(layout: Layout) -> jax.ShapeDtypeStruct:
    """The argument ``stop`` of a step: one int32 on each device."""
    sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
    return jax.ShapeDtypeStruct((layout.mesh.size,), jnp.int32, sharding=sharding)


def put_stop(layout: Layout, stop: bool) -> Array:
    """What this process asks for, on its devices."""
    x = abstract_stop(layout)
    return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.full(1, stop, np.int32))


def gradients(
    task: Task, layout: Layout, variables: Variables, batch: Batch, key: Key, *, accumulate: int
) -> tuple[PyTree, LossOut]:
    """Gradients of the global mean loss, and the global sums. Reduces over the data axis once."""
    # A manual axis of size 1 has nothing to reduce, and XLA's partitioner stumbles over it (jax 0.10.2: a RET_CHECK).
    grouped = layout.mesh.shape[DATA] > 1
    # Where these are all rows, a CPU divides by the sum of weights at the loss, not in every gradient: a pass over them less.
    # On GPUs and TPUs the step stays the one whose memory was held against their compilers.
    alone = accumulate == 1 and not grouped and layout.devices.platform == "cpu"
    carry_parts = jax.tree.map(_carry_partition, task.specs.carry, is_leaf=specs.is_spec)

    def local(params: PyTree, frozen: PyTree, carry: PyTree, batch: Batch, key: Key) -> tuple:
        """This data group's share: sums over its microbatches, then one reduction."""
        given = carry
        if grouped:
            params, frozen, key = jax.lax.pcast((params, frozen, key), (DATA,), to="varying")
            carry = jax.tree.map(_varying, carry)

        def microbatch(carry: PyTree, rows: Batch) -> tuple[PyTree, LossOut]:
            def total(params: PyTree) -> tuple[Array, LossOut]:
                out = task.loss(Variables(params, frozen, carry), rows, key)
                if not isinstance(out, LossOut):
                    raise TypeError(f"the loss returned a {type(out).__name__}; expected a jaxtrain.types.LossOut")
                _require_means("loss", {"loss": out.loss, **out.metrics})
                if jnp.shape(out.loss.total):
                    raise TypeError(f"the loss's total has the shape {jnp.shape(out.loss.total)}; expected a sum over rows")
                return out.loss.total, out

            loss, pullback, out = jax.vjp(total, params, has_aux=True)
            (grads,) = pullback((1 / out.loss.weight).astype(loss.dtype) if alone else jnp.ones_like(loss))
            # Sums are kept where the parameters are: a shard of them on each device, not a replica.
            table = task.specs.params
            return jax.tree.map(lambda spec, g: layout.shard(g, *spec.axes), table, grads, is_leaf=specs.is_spec), out

        if accumulate == 1:
            grads, out = microbatch(carry, batch)
            sums, carry = (grads, out.loss, out.metrics, out.touched), out.carry
        else:
            cast = (lambda tree: jax.tree.map(_varying, tree)) if grouped else (lambda tree: tree)
            sums, carry = _accumulate(microbatch, task.specs.carry, carry, batch, accumulate, cast)
        if grouped:
            sums = jax.lax.psum(sums, DATA)
            if carry is not None:
                carry = jax.tree.map(lambda x, p: x if DATA in p else _equalised(x), carry, carry_parts)
        # A carry that the loss does not touch is identical on every group already, and needs no reduction.
        return *sums, given if carry is None else carry

    if grouped:
        whole = PartitionSpec()
        local = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(whole, whole, carry_parts, PartitionSpec(DATA), whole),
            out_specs=(whole, whole, whole, whole, carry_parts),
            axis_names={DATA},
        )
    grads, loss, metrics, touched, carry = local(variables.params, variables.frozen, variables.carry, batch, key)
    # In their own types: narrow ones are as many bytes as the parameters, and no more.
    if not alone:
        grads = jax.tree.map(lambda g: (g / loss.weight).astype(g.dtype), grads)
    return grads, LossOut(loss, metrics, carry, touched)


def _accumulate(
    microbatch: Callable, carry_table: PyTree, carry: PyTree, batch: Batch, n: int, cast: Callable[[PyTree], PyTree]
) -> tuple[tuple, PyTree]:
    """Scans ``microbatch`` over n microbatches. A carry with a batch axis is split like the batch; any other is handed on.
    None comes back for a carry that the loss leaves alone.

    Microbatch j takes the rows r with r mod n = j: a reshape to (rows / n, n) that leaves every row on its device, where
    (n, rows / n) would move them between the shards of "fsdp".
    """
    is_row = ["batch" in spec.axes for spec in jax.tree.leaves(carry_table, is_leaf=specs.is_spec)]
    structure = jax.tree.structure(carry)

    def part(carry: PyTree) -> tuple[list[Array], list[Array]]:
        leaves = jax.tree.leaves(carry)
        return [x for x, r in zip(leaves, is_row, strict=True) if r], [x for x, r in zip(leaves, is_row, strict=True) if not r]

    def whole(own: list[Array], shared: list[Array]) -> PyTree:
        owns, shares = iter(own), iter(shared)
        return jax.tree.unflatten(structure, [next(owns) if r else next(shares) for r in is_row])

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    def body(state: tuple[tuple, list[Array]], xs: tuple[Batch, list[Array]]) -> tuple[tuple[tuple, list[Array]], list[Array]]:
        (sums, shared), (rows, own) = state, xs
        grads, out = microbatch(whole(own, shared), rows)
        if out.carry is not None:
            own, shared = part(out.carry)
        sums = jax.tree.map(jnp.add, sums, (grads, out.loss, out.metrics, out.touched))
        return cast((sums, shared)), own

    own, shared = part(carry)
    xs = jax.tree.map(split, (dict(batch), own))
    rows, own = jax.tree.map(lambda x: x[0], xs)
    grads, out = jax.eval_shape(microbatch, whole(own, shared), rows)
    zeros = cast(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, out.loss, out.metrics, out.touched)))
    (sums, shared), own = jax.lax.scan(body, (zeros, shared), xs)
    return sums, None if out.carry is None else whole(jax.tree.map(join, own), shared)


def make_eval_step(task: Task, layout: Layout) -> jax.stages.Wrapped:
    """Jits `Task.evaluate` over the global batch: sums over all rows, on every device."""

    def step(variables: Variables, batch: Batch) -> Metrics:
        metrics = task.evaluate(variables, with_rows(batch, layout))
        _require_means("evaluation", metrics)
        return metrics

    return jax.jit(step, out_shardings=layout.replicated())


def _require_means(source: str, metrics: Metrics) -> None:
    """Raises TypeError for a metric that is not a `Mean`, while the step is traced and a traceback still shows the workload."""
    for name, value in metrics.items():
        if not isinstance(value, Mean):
            raise TypeError(
                f"metric {name!r} of the {source} is a {type(value).__name__}; expected a jaxtrain.types.Mean, "
                "a sum over rows and the sum of their weights (law 5 of docs/ARCHITECTURE.md)"
            )


def with_rows(batch: Batch, layout: Layout) -> Batch:
    """The batch with "row": every row's place in the global batch, which random draws fold in."""
    rows = next(iter(batch.values())).shape[0]
    return {**batch, "row": layout.shard(jnp.arange(rows, dtype=jnp.int32), "batch")}


def _carry_partition(spec: Spec) -> PartitionSpec:
    return PartitionSpec(*(DATA if axis == "batch" else None for axis in spec.axes))


def _equalised(x: Array) -> Array:
    """An array that is not a row's own, made the same on every group: by its mean, which leaves equal arrays as they are.

    A count has no mean of its own type, and is the same everywhere already.
    """
    return jax.lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.pmax(x, DATA)


def _varying(x: Array) -> Array:
    """Casts to varying over "data", also what already is: a scan's carry keeps its type, whichever the workload returns."""
    return jnp.where(jax.lax.pcast(jnp.ones((), bool), (DATA,), to="varying"), x, x)


def _unweighted(x: Array) -> Mean:
    return Mean(x, jnp.ones((), x.dtype))
