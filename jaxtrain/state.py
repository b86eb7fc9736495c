"""The state of a run, before it exists (`Plan`) and after (`TrainState`)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain import specs
from jaxtrain.layout import Layout
from jaxtrain.types import Array, Key, PyTree, Task, Variables


class Norms(NamedTuple):
    """What the guard remembers of the gradient norms of good steps."""

    average: Array  # float32
    steps: Array  # int32


@flax.struct.dataclass
class TrainState:
    """Everything that a step reads and writes. ``ema`` is () without an average."""

    step: Array  # int32: batches read, which is also the position of the next one
    variables: Variables
    opt_state: PyTree
    ema: PyTree
    norms: Norms


class Plan(NamedTuple):
    """Shapes, dtypes and shardings of all that training holds: enough to restore, to compile and to count bytes."""

    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]


def make_plan(
    task: Task, tx: optax.GradientTransformation, layout: Layout, fields: Mapping[str, Any], *, batch: int, ema: bool
) -> Plan:
    """Plans a run without making an array.

    Args:
      fields: what a loader row holds, name -> (shape, dtype) (`loaders.base.Field`).

    Raises:
      LayoutError: a dimension that does not divide, by path.
      ValueError: the loader and the task disagree about the fields of a batch.
    """
    if missing := sorted(set(task.axes) - set(fields)):
        raise ValueError(
            f"the task reads the batch fields {missing}, which the loader does not give; it gives {sorted(fields)}"
        )
    variables = jax.tree.map(lambda part: specs.abstract(part, layout), task.specs, is_leaf=lambda x: x is not task.specs)
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated()),
        variables=variables,
        opt_state=_abstract_opt_state(tx, variables.params, layout),
        ema=variables.params if ema else (),
        norms=Norms(
            jax.ShapeDtypeStruct((), jnp.float32, sharding=layout.replicated()),
            jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated()),
        ),
    )
    rows = {
        name: jax.ShapeDtypeStruct(
            shape := (batch, *field.shape),
            field.dtype,
            sharding=layout.sharding(task.axes[name], shape, path=f"batch[{name!r}]"),
        )
        for name, field in fields.items()
        if name in task.axes
    }
    return Plan(state, rows)


def _abstract_opt_state(tx: optax.GradientTransformation, params: PyTree, layout: Layout) -> PyTree:
    """Moments live where their parameter does; counters are everywhere."""

    def absent(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)  # another group's rule keeps no moments of this parameter

    def place(moment: Any, param: jax.ShapeDtypeStruct) -> Any:
        return moment if absent(moment) else jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=param.sharding)

    return optax.tree_map_params(
        tx,
        place,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.replicated()),
        is_leaf=absent,
    )


def init_state(
    task: Task,
    tx: optax.GradientTransformation,
    plan: Plan,
    key: Key,
    *,
    start: Callable[[PyTree, PyTree], PyTree] = lambda params, given: params,
    given: PyTree = (),
) -> TrainState:
    """The state at step 0, every device making only its own part.

    Args:
      start: (initial parameters, given) -> parameters, for the trained and for the frozen ones; traced. What it does not use is
        not initialised either.
      given: arrays for ``start``; donated.
    """
    return make_init(task, tx, plan, start=start)(key, given)


def make_init(
    task: Task, tx: optax.GradientTransformation, plan: Plan, *, start: Callable[[PyTree, PyTree], PyTree]
) -> Callable[[Key, PyTree], TrainState]:
    """`init_state`, jitted for a plan and not called."""

    def init(key: Key, given: PyTree) -> TrainState:
        variables = specs.materialise(task.specs, key)
        variables = variables._replace(params=start(variables.params, given), frozen=start(variables.frozen, given))
        ema = jax.tree.map(jnp.copy, variables.params) if plan.state.ema else ()
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, variables, tx.init(variables.params), ema, Norms(jnp.zeros(()), zero))

    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, plan.state), donate_argnums=1)


def init_frozen(task: Task, plan: Plan, key: Key, *, start: Callable[[PyTree, PyTree], PyTree], given: PyTree) -> PyTree:
    """The frozen part of what `init_state` makes, for a state that was restored without it."""

    def init(key: Key, given: PyTree) -> PyTree:
        return start(specs.materialise(Variables((), task.specs.frozen, ()), key).frozen, given)

    make = jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, plan.state.variables.frozen), donate_argnums=1)
    return make(key, given)


def bytes_per_device(tree: PyTree) -> int:
    """Bytes that one device holds of a tree of abstract (or real) sharded arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
