"""Gradients of a global batch: sums over microbatches (a scan) and over "data", reduced once.

Under plain jit the reduction over "data" would sit inside the scan, once per microbatch. Here the
scan runs under `jax.shard_map`, manual over "data" alone. Each group of devices keeps partial sums,
which are reduced after the scan. For that the parameters are first cast to varying over "data".
Without the cast, the transpose of their broadcast puts the reduction back inside. The axes "fsdp"
and "model" stay automatic.

With one microbatch there is nothing to add up before, and each gradient is reduced as early as the
model allows (`jaxtrain.parallel.replicas`).
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.parallel import replicas
from jaxtrain.parallel.layout import DATA, Layout
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Spec, Task, Variables

# (variables, rows, key) -> gradients of a sum, or of a mean, and the sums
Summed = Callable[[Variables, Batch, Key], tuple[PyTree, LossOut]]


def gradients(
    task: Task, layout: Layout, variables: Variables, batch: Batch, key: Key, *, accumulate: int
) -> tuple[PyTree, LossOut]:
    """Gradients of the global mean loss, and the global sums. Reduces over the data axis once."""
    has_replicas = layout.mesh.shape[DATA] > 1
    is_whole = accumulate == 1 and not has_replicas
    # A CPU divides the loss by its weight where it can, which saves a pass over the gradients. GPUs
    # and TPUs keep the step whose memory was checked against their compilers.
    divides_loss = layout.devices.platform == "cpu" and is_whole
    sums_early = has_replicas and accumulate == 1
    measured = task.measured if is_whole else ()
    of_microbatch = functools.partial(
        _microbatch, task, layout, divided=divides_loss, sums_early=sums_early, measured=measured
    )
    if has_replicas:
        over_data = _over_data(task, layout, of_microbatch, accumulate)
        grads, out = over_data(variables, batch, key)
    elif accumulate > 1:
        grads, out = _accumulated(task, of_microbatch, accumulate, variables, batch, key)
    else:
        grads, out = of_microbatch(variables, batch, key)
    if sums_early and layout.devices.platform == "gpu":
        grads = jax.tree.map(_joined, grads, task.specs.params)
    if out.model_state is None:
        out = out._replace(model_state=variables.model_state)
    if not divides_loss:  # in their own dtype: narrow ones take as many bytes as the parameters
        grads = jax.tree.map(lambda g: (g / out.loss.weight).astype(g.dtype), grads)
        sums = jax.tree.map(lambda x: x / out.loss.weight**2, out.square_sums)
        out = out._replace(square_sums=sums)
    return grads, out


def _microbatch(
    task: Task,
    layout: Layout,
    variables: Variables,
    rows: Batch,
    key: Key,
    *,
    divided: bool,
    sums_early: bool,
    measured: tuple[str, ...],
) -> tuple[PyTree, LossOut]:
    """Gradients of the sum of losses, or of their mean if ``divided``, and the sums.

    They are of all replicas if ``sums_early``, else of this one. ``measured``: as in `Task`.
    """

    def total(params: PyTree, zeros: Mapping[str, Array]) -> tuple[Array, LossOut]:
        own_rows = {**rows, "square_sums": zeros} if zeros else rows
        with contextlib.ExitStack() as stack:
            if sums_early:
                own = replicas.shared(layout, params, task.specs.params)
                params = stack.enter_context(own)
            out = task.loss(variables._replace(params=params), own_rows, key)
        if not _is_sum(out):
            _raise_for_loss(out)
        return out.loss.total, out

    zeros = {path: jnp.zeros((), jnp.float32) for path in measured}
    loss, pullback, out = jax.vjp(total, variables.params, zeros, has_aux=True)
    if divided:
        cotangent = 1 / out.loss.weight
        cotangent = cotangent.astype(loss.dtype)
    else:
        cotangent = jnp.ones_like(loss)
    grads, square_sums = pullback(cotangent)
    # Sums have the sharding of the parameters: each device has a shard, not a replica.
    grads = jax.tree.map(lambda g, spec: layout.shard(g, *spec.axes), grads, task.specs.params)
    return grads, out._replace(square_sums=square_sums)


def _joined(gradient: Array, spec: Spec) -> Array:
    """Join the gradients of layers that are written out before another kernel reads them.

    XLA would join them in each kernel of the update. Such a kernel writes one array, so that the
    update read all of its arrays three times, and copied a moment.
    """
    is_stack = spec.axes[:1] == ("layer",)
    whole: Array = jax.lax.optimization_barrier(gradient) if is_stack else gradient
    return whole


def _over_data(task: Task, layout: Layout, of_microbatch: Summed, accumulate: int) -> Summed:
    """Sum over the rows of each data group, then reduce once over "data", which is manual here.

    One microbatch reduces its gradients itself.
    """
    partitions = _state_partitions(task)

    def of_group(variables: Variables, batch: Batch, key: Key) -> tuple[PyTree, LossOut]:
        params = variables.params
        frozen, key = jax.lax.pcast((variables.frozen, key), (DATA,), to="varying")
        model_state = jax.tree.map(_varying, variables.model_state)
        if accumulate > 1:
            params = jax.lax.pcast(params, (DATA,), to="varying")
            varying = Variables(params, frozen, model_state)
            grads, out = _accumulated(
                task, of_microbatch, accumulate, varying, batch, key, cast=_varying
            )
            grads = replicas.summed_over_data(layout, grads)
        else:
            grads, out = of_microbatch(Variables(params, frozen, model_state), batch, key)
        of_this_group = (out.loss, out.metrics, out.sparse_rows)
        loss, metrics, sparse_rows = replicas.summed_over_data(layout, of_this_group)
        if out.model_state is None:
            # the loss does not touch it: it is identical on every group already
            model_state = variables.model_state
        else:
            shared = functools.partial(_shared, layout)
            model_state = jax.tree.map(shared, out.model_state, partitions)
        return grads, LossOut(loss, metrics, model_state, sparse_rows)

    replicated: Any = PartitionSpec()
    variables_specs = Variables(replicated, replicated, partitions)
    out_specs = LossOut(replicated, replicated, partitions, replicated)
    return jax.shard_map(
        of_group,
        mesh=layout.mesh,
        in_specs=(variables_specs, PartitionSpec(DATA), replicated),
        out_specs=(replicated, out_specs),
        axis_names={DATA},
    )


def _accumulated(
    task: Task,
    of_microbatch: Summed,
    n: int,
    variables: Variables,
    batch: Batch,
    key: Key,
    *,
    cast: Callable[[Array], Array] = lambda x: x,
) -> tuple[PyTree, LossOut]:
    """Sum over n microbatches. A model state's arrays with a batch axis are split like the batch.

    Microbatch j takes the rows r with r mod n = j. This reshape to (rows / n, n) leaves every row
    on its device. A reshape to (n, rows / n) would move rows between the shards of "fsdp".
    """

    def split(x: Array) -> Array:
        n_rows = len(x) // n
        x = x.reshape(n_rows, n, *x.shape[1:])
        return jnp.moveaxis(x, 1, 0)

    def joined(parts: Array) -> Array:
        x = jnp.moveaxis(parts, 0, 1)
        return x.reshape(-1, *x.shape[2:])

    def of_part(rows: Batch, of_rows: PyTree, shared: PyTree) -> tuple[PyTree, LossOut]:
        model_state = _merged(of_rows, shared)
        variables_of_part = variables._replace(model_state=model_state)
        return of_microbatch(variables_of_part, rows, key)

    def body(state: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], PyTree]:
        sums, shared = state
        rows, of_rows = xs
        grads, out = of_part(rows, of_rows, shared)
        if out.model_state is not None:
            of_rows, shared = _by_batch_axis(task, out.model_state)
        out = out._replace(model_state=None)
        sums = jax.tree.map(jnp.add, sums, (grads, out))
        return jax.tree.map(cast, (sums, shared)), of_rows

    def zero(x: jax.ShapeDtypeStruct) -> Array:
        return cast(jnp.zeros(x.shape, x.dtype))

    of_rows, shared = _by_batch_axis(task, variables.model_state)
    parts = jax.tree.map(split, (dict(batch), of_rows))
    first_part = jax.tree.map(lambda x: x[0], parts)
    grads, out = jax.eval_shape(of_part, *first_part, shared)
    sums_out = out._replace(model_state=None)
    zeros = jax.tree.map(zero, (grads, sums_out))
    last_state, of_rows = jax.lax.scan(body, (zeros, shared), parts)
    (grads, sums), shared = last_state
    if out.model_state is None:
        return grads, sums
    of_rows = jax.tree.map(joined, of_rows)
    model_state = _merged(of_rows, shared)
    return grads, sums._replace(model_state=model_state)


def _is_sum(out: Any) -> bool:
    """Whether a loss returns sums over rows, as law 5 of docs/ARCHITECTURE.md has them."""
    if not isinstance(out, LossOut):
        return False
    means = (out.loss, *out.metrics.values())
    if not all(isinstance(value, Mean) for value in means):
        return False
    total, weight = out.loss
    is_scalar = jnp.shape(total) == ()
    return is_scalar and hasattr(weight, "dtype")


def _raise_for_loss(out: Any) -> None:
    """Raise TypeError for a loss that is no sum, while a traceback shows the workload."""
    if not isinstance(out, LossOut):
        kind = type(out).__name__
        raise TypeError(f"the loss returned a {kind}; expected a jaxtrain.types.LossOut")
    require_means("loss", {"loss": out.loss, **out.metrics})
    total, weight = out.loss
    shape = jnp.shape(total)
    if shape:
        raise TypeError(f"the loss's total has the shape {shape}; expected a sum over rows")
    raise TypeError(
        f"the loss's weight is {weight!r}, which no row decides; expected the sum of the"
        " rows' weights, such as rows['weight'].sum()"
    )


def require_means(source: str, metrics: dict[str, Any]) -> None:
    """Raise TypeError for a metric that is not a `Mean`, while a traceback shows the workload."""
    for name, value in metrics.items():
        if not isinstance(value, Mean):
            kind = type(value).__name__
            raise TypeError(
                f"metric {name!r} of the {source} is a {kind}; expected a"
                " jaxtrain.types.Mean, a sum over rows and the sum of their weights (law 5 of"
                " docs/ARCHITECTURE.md)"
            )


def _by_batch_axis(task: Task, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Split the model state into the arrays with a batch axis and the others; None elsewhere."""

    def if_of_rows(x: Array, spec: Spec) -> Array | None:
        return x if "batch" in spec.axes else None

    def if_shared(x: Array, spec: Spec) -> Array | None:
        return None if "batch" in spec.axes else x

    table = task.specs.model_state
    of_rows = jax.tree.map(if_of_rows, model_state, table)
    shared = jax.tree.map(if_shared, model_state, table)
    return of_rows, shared


def _merged(of_rows: PyTree, shared: PyTree) -> PyTree:
    def present(x: Array | None, y: Array | None) -> Array | None:
        return y if x is None else x

    return jax.tree.map(present, of_rows, shared, is_leaf=lambda x: x is None)


def _state_partitions(task: Task) -> PyTree:
    def partition(spec: Spec) -> PartitionSpec:
        mesh_axes = [DATA if axis == "batch" else None for axis in spec.axes]
        return PartitionSpec(*mesh_axes)

    table = task.specs.model_state
    return jax.tree.map(partition, table, is_leaf=lambda x: isinstance(x, Spec))


def _shared(layout: Layout, x: Array, partition: PartitionSpec) -> Array:
    """Return the mean over data groups of an array that is not split over them.

    Counts are the same on all already.
    """
    if DATA in partition:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = replicas.wide_on_cpus(layout, functools.partial(jax.lax.pmean, axis_name=DATA), x)
    else:
        x = jax.lax.pmax(x, DATA)
    return x


def _varying(x: Array) -> Array:
    """Casts to varying over "data", also arrays that are: a scan's carry must keep its type."""
    true = jnp.ones((), bool)
    true = jax.lax.pcast(true, (DATA,), to="varying")
    return jnp.where(true, x, x)
