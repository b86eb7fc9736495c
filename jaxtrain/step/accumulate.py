"""Gradients of a global batch: sums over microbatches (a scan) and over "data", reduced once.

Under plain jit the reduction over "data" would sit inside the scan, once per microbatch. Here the
scan runs under `jax.shard_map`, manual over "data" alone. Each group of devices keeps partial sums,
which are reduced after the scan. For that the parameters are first cast to varying over "data".
Without the cast, the transpose of their broadcast puts the reduction back inside. The axes "fsdp"
and "model" stay automatic.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain import specs
from jaxtrain.parallel.layout import DATA, Layout
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Spec, Task, Variables


def gradients(
    task: Task, layout: Layout, variables: Variables, batch: Batch, key: Key, *, accumulate: int
) -> tuple[PyTree, LossOut]:
    """Gradients of the global mean loss, and the global sums. Reduces over the data axis once."""
    # If accumulate and the data axis are 1, a CPU divides the loss by its weight, which saves a
    # pass over the gradients. GPUs and TPUs keep the step whose memory was checked against their
    # compilers.
    divided = accumulate == 1 and layout.mesh.shape[DATA] == 1 and layout.devices.platform == "cpu"
    if layout.mesh.shape[DATA] > 1:
        whole: Any = PartitionSpec()
        model_state = _state_partitions(task)
        sums = jax.shard_map(
            functools.partial(_reduced, task, layout, accumulate),
            mesh=layout.mesh,
            in_specs=(Variables(whole, whole, model_state), PartitionSpec(DATA), whole),
            out_specs=(whole, LossOut(whole, whole, model_state, whole)),
            axis_names={DATA},
        )
    else:  # XLA's partitioner fails on a manual axis of size 1 (jax 0.10.2: a RET_CHECK)
        sums = functools.partial(_summed, task, layout, accumulate, divided=divided)
    grads, out = sums(variables, batch, key)
    if out.model_state is None:
        out = out._replace(model_state=variables.model_state)
    if not divided:  # in their own dtype: narrow ones take as many bytes as the parameters
        grads = jax.tree.map(lambda g: (g / out.loss.weight).astype(g.dtype), grads)
    return grads, out


def _reduced(
    task: Task, layout: Layout, accumulate: int, variables: Variables, batch: Batch, key: Key
) -> tuple[PyTree, LossOut]:
    """Sum over this data group's rows, then reduce once over "data", which is manual here."""
    params, frozen, key = jax.lax.pcast(
        (variables.params, variables.frozen, key), (DATA,), to="varying"
    )
    local = Variables(params, frozen, jax.tree.map(_varying, variables.model_state))
    grads, out = _summed(task, layout, accumulate, local, batch, key, cast=_varying)
    grads, loss, metrics, sparse_rows = jax.lax.psum(
        (grads, out.loss, out.metrics, out.sparse_rows), DATA
    )
    # if the loss does not touch it, it is identical on every group already
    model_state = variables.model_state
    if out.model_state is not None:
        model_state = jax.tree.map(
            lambda x, p: x if DATA in p else _equalised(x), out.model_state, _state_partitions(task)
        )
    return grads, LossOut(loss, metrics, model_state, sparse_rows)


def _summed(
    task: Task,
    layout: Layout,
    n: int,
    variables: Variables,
    batch: Batch,
    key: Key,
    *,
    divided: bool = False,
    cast: Callable[[Array], Array] = lambda x: x,
) -> tuple[PyTree, LossOut]:
    """Sum over n microbatches. A model state's arrays with a batch axis are split like the batch.

    Microbatch j takes the rows r with r mod n = j. This reshape to (rows / n, n) leaves every row
    on its device. A reshape to (n, rows / n) would move rows between the shards of "fsdp".
    """
    if n == 1:
        return _microbatch(task, layout, variables, batch, key, divided=divided)

    def of_part(rows: Batch, own: PyTree, shared: PyTree) -> tuple[PyTree, LossOut]:
        return _microbatch(
            task, layout, variables._replace(model_state=_joined(own, shared)), rows, key
        )

    def body(state: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], PyTree]:
        (sums, shared), (rows, own) = state, xs
        grads, out = of_part(rows, own, shared)
        if out.model_state is not None:
            own, shared = _by_batch_axis(task, out.model_state)
        sums = jax.tree.map(jnp.add, sums, (grads, out._replace(model_state=None)))
        return jax.tree.map(cast, (sums, shared)), own

    own, shared = _by_batch_axis(task, variables.model_state)
    xs = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0),
        (dict(batch), own),
    )
    grads, out = jax.eval_shape(of_part, *jax.tree.map(lambda x: x[0], xs), shared)
    zeros = jax.tree.map(
        lambda x: cast(jnp.zeros(x.shape, x.dtype)), (grads, out._replace(model_state=None))
    )
    ((grads, sums), shared), own = jax.lax.scan(body, (zeros, shared), xs)
    if out.model_state is None:
        return grads, sums
    own = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), own)
    return grads, sums._replace(model_state=_joined(own, shared))


def _microbatch(
    task: Task,
    layout: Layout,
    variables: Variables,
    rows: Batch,
    key: Key,
    *,
    divided: bool = False,
) -> tuple[PyTree, LossOut]:
    """Gradients of the sum of losses, or of their mean if ``divided``, and the sums."""

    def total(params: PyTree) -> tuple[Array, LossOut]:
        out = task.loss(variables._replace(params=params), rows, key)
        if not isinstance(out, LossOut):
            raise TypeError(
                f"the loss returned a {type(out).__name__}; expected a jaxtrain.types.LossOut"
            )
        require_means("loss", {"loss": out.loss, **out.metrics})
        if jnp.shape(out.loss.total):
            raise TypeError(
                f"the loss's total has the shape {jnp.shape(out.loss.total)}; expected a sum over"
                " rows"
            )
        if not hasattr(out.loss.weight, "dtype"):
            text = f"the loss's weight is {out.loss.weight!r}, which no row decides"
            raise TypeError(
                f"{text}; expected the sum of the rows' weights, such as rows['weight'].sum()"
            )
        return out.loss.total, out

    loss, pullback, out = jax.vjp(total, variables.params, has_aux=True)
    (grads,) = pullback(
        (1 / out.loss.weight).astype(loss.dtype) if divided else jnp.ones_like(loss)
    )
    # Sums have the sharding of the parameters: each device has a shard, not a replica.
    return (
        jax.tree.map(
            lambda spec, g: layout.shard(g, *spec.axes),
            task.specs.params,
            grads,
            is_leaf=specs.is_spec,
        ),
        out,
    )


def require_means(source: str, metrics: dict[str, Any]) -> None:
    """Raise TypeError for a metric that is not a `Mean`, while a traceback shows the workload."""
    for name, value in metrics.items():
        if not isinstance(value, Mean):
            raise TypeError(
                f"metric {name!r} of the {source} is a {type(value).__name__}; expected a"
                " jaxtrain.types.Mean, a sum over rows and the sum of their weights (law 5 of"
                " docs/ARCHITECTURE.md)"
            )


def _by_batch_axis(task: Task, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Split the model state into the arrays with a batch axis and the others; None elsewhere."""

    def pick(own: bool) -> PyTree:
        def of(spec: Spec, x: Array) -> Array | None:
            return x if ("batch" in spec.axes) == own else None

        return jax.tree.map(of, task.specs.model_state, model_state, is_leaf=specs.is_spec)

    return pick(True), pick(False)


def _joined(own: PyTree, shared: PyTree) -> PyTree:
    return jax.tree.map(
        lambda a, b: b if a is None else a, own, shared, is_leaf=lambda x: x is None
    )


def _state_partitions(task: Task) -> PyTree:
    def of(spec: Spec) -> PartitionSpec:
        return PartitionSpec(*(DATA if axis == "batch" else None for axis in spec.axes))

    return jax.tree.map(of, task.specs.model_state, is_leaf=specs.is_spec)


def _equalised(x: Array) -> Array:
    """Return the mean of a shared array over data groups. Counts are the same on all already."""
    x = jax.lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.pmax(x, DATA)
    return x


def _varying(x: Array) -> Array:
    """Casts to varying over "data", also arrays that are: a scan's carry must keep its type."""
    return jnp.where(jax.lax.pcast(jnp.ones((), bool), (DATA,), to="varying"), x, x)
