"""The state of a run, before it exists (`Abstract`) and after (`TrainState`)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain import specs
from jaxtrain.optim import Optimizer
from jaxtrain.parallel.layout import Layout, LayoutError
from jaxtrain.step.guard import GuardState
from jaxtrain.types import Array, Key, PyTree, Task, Variables

# [elements] of an optimizer's array that may be whole on every device, whatever its parameter
WHOLE = 4096
HOST = "pinned_host"  # memory kind of offloaded arrays
# How initial values are compiled on CPUs: they are computed once, and LLVM's second level takes
# longer than that by far. The numbers are the same, with jax 0.12 but for a last bit here and there
# (tests/test_state.py); at level 0 they are not.
QUICK = {"xla_backend_optimization_level": 1}


class TrainState(flax.struct.PyTreeNode):  # type: ignore[no-untyped-call]  # flax
    """Everything that a step reads and writes. ``ema`` is () without an average."""

    step: Array  # int32: batches read, which is also the position of the next one
    variables: Variables
    opt_state: PyTree
    ema: PyTree
    norms: GuardState


class Abstract(NamedTuple):
    """Shapes, dtypes and shardings of all that training holds, to restore and compile."""

    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]


def make_abstract(
    task: Task,
    tx: Optimizer,
    layout: Layout,
    fields: Mapping[str, Any],
    *,
    batch: int,
    ema: bool,
    offload: bool = False,
) -> Abstract:
    """Plan a run of rows ``fields``, name -> (shape, dtype), without making an array.

    Raises LayoutError: a dimension that does not divide, by path, or ``offload`` (the optimizer's
    state in host memory) on devices that cannot reach it; ValueError: the loader and the task
    disagree about the fields of a batch.
    """
    if missing := sorted(set(task.axes) - set(fields)):
        raise ValueError(
            f"the task reads the batch fields {missing}, which the loader does not give; it gives"
            f" {sorted(fields)}"
        )

    def scalar(dtype: Any) -> Any:
        """Stands for an array that does not exist yet."""
        return jax.ShapeDtypeStruct((), dtype, sharding=layout.replicated())

    variables = Variables(*(specs.abstract(table, layout) for table in task.specs))
    state = TrainState(
        step=scalar(jnp.int32),
        variables=variables,
        opt_state=_abstract_opt_state(tx, variables.params, layout, offload=offload),
        ema=variables.params if ema else (),
        norms=GuardState(scalar(jnp.float32), scalar(jnp.int32)),
    )
    return Abstract(state, make_batch(task, layout, fields, batch))


def make_batch(
    task: Task, layout: Layout, fields: Mapping[str, Any], batch: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return a batch of ``batch`` rows, as far as the task reads it. Raises LayoutError."""
    arrays = {}
    for name, field in fields.items():
        if name in task.axes:
            shape = (batch, *field.shape)
            sharding = layout.sharding(task.axes[name], shape, path=f"batch[{name!r}]")
            arrays[name] = jax.ShapeDtypeStruct(shape, field.dtype, sharding=sharding)
    return arrays


def _abstract_opt_state(tx: Optimizer, params: PyTree, layout: Layout, *, offload: bool) -> PyTree:
    """Lay an optimizer's state out as the parameters whose paths end its own, else whole.

    Moments live where their parameter does. Other arrays (means of rows, scales of blocks) are
    split along each dimension that they share with it and that still divides.
    """
    if offload:
        _require_host_memory(layout)
    table = dict(zip(specs.paths(params), jax.tree.leaves(params), strict=True))

    def place(keys: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        path = specs.path_name(keys)
        names = [name for name in table if f"/{path}".endswith(f"/{name}")]
        parameter = max(names, key=len, default=None)
        sharding = layout.replicated()
        if parameter is not None:
            sharding = table[parameter].sharding
            if x.shape != table[parameter].shape:
                sharding = _shared_sharding(table[parameter], x.shape)
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        _require_split(path, x, parameter, table)
        if offload and parameter is not None:
            x = x.update(sharding=sharding.with_memory_kind(HOST))
        return x

    return jax.tree.map_with_path(place, jax.eval_shape(tx.init, params))


def _require_host_memory(layout: Layout) -> None:
    """Raise LayoutError if the devices have no host memory. Those of a plan need not be here."""
    if isinstance(layout.mesh, jax.sharding.Mesh):
        device = layout.mesh.devices.flat[0]
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise LayoutError(
                f"optim.offload=True needs memory of kind {HOST!r}, and {device.device_kind} has"
                f" {kinds}; unset it"
            )


def _shared_sharding(param: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of an array of statistics of a parameter."""
    mesh = param.sharding.mesh
    return NamedSharding(mesh, _divisible(mesh, _shared_parts(param, shape), shape))


def _shared_parts(param: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> list[Any]:
    """Return a parameter's partition along the dimensions that an array of statistics shares."""
    parts = [*param.sharding.spec, *[None] * (param.ndim - len(param.sharding.spec))]
    if len(shape) == param.ndim:
        return parts
    if len(shape) > param.ndim:
        return [None] * (len(shape) - param.ndim) + parts
    remaining = iter(zip(param.shape, parts, strict=True))
    return [next((part for n, part in remaining if n == size), None) for size in shape]


def _require_split(
    path: str,
    x: jax.ShapeDtypeStruct,
    parameter: str | None,
    table: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raise LayoutError for a large array of an optimizer that is split less than its parameter."""

    if parameter is None:
        params, allowed_size, belongs_to = list(table.values()), WHOLE, "no parameter"
    else:
        params = [table[parameter]]
        allowed_size = max(WHOLE, _shard_size(params[0]))
        belongs_to = f"parameter {parameter!r} of shape {params[0].shape}"
    if _n_parts(x) >= max(map(_n_parts, params)) or _shard_size(x) <= allowed_size:
        return
    raise LayoutError(
        f"optim.name: the optimizer's state {path!r} of shape {x.shape} belongs to {belongs_to},"
        f" and cannot be split over the mesh {dict(x.sharding.mesh.shape)} as parameters are; set"
        " mesh.fsdp=1 and mesh.model=1, or use another optimizer"
    )


def _shard_size(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.sharding.shard_shape(x.shape))


def _n_parts(x: jax.ShapeDtypeStruct) -> int:
    return int(math.prod(x.shape) // max(1, _shard_size(x)))


def _divisible(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, spec: Sequence[Any], shape: tuple[int, ...]
) -> PartitionSpec:
    """Return the parts of ``spec`` that divide ``shape``."""
    parts = []
    for part, size in zip((*spec, *[None] * len(shape)), shape, strict=False):
        names = (part,) if isinstance(part, str) else part or ()
        n_parts = math.prod(mesh.shape[name] for name in names)
        parts.append(part if size % n_parts == 0 else None)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def to_memory(tree: PyTree, shardings: PyTree, kind: str | None = None) -> PyTree:
    """Inside a jitted function: every array in the memory of its sharding, or of ``kind``."""
    if kind:
        shardings = jax.tree.map(lambda s: s.with_memory_kind(kind), shardings)
    return jax.tree.map(jax.device_put, tree, shardings)


def init_state(
    task: Task,
    tx: Optimizer,
    abstract: Abstract,
    key: Key,
    *,
    start: Callable[[PyTree, PyTree], PyTree] = lambda params, given: params,
    given: PyTree = (),
) -> TrainState:
    """Return the state at step 0, each device making its own part alone.

    ``start``: (initial parameters, given) -> parameters, traced, for trained and for frozen ones.
    What it does not use is not initialised. ``given``: its arrays, which are donated.
    """
    state: TrainState = make_init(task, tx, abstract, start=start)(key, given)
    return state


def make_init(
    task: Task, tx: Optimizer, abstract: Abstract, *, start: Callable[[PyTree, PyTree], PyTree]
) -> jax.stages.Wrapped:
    """`init_state`, jitted and not called."""

    def init(key: Key, given: PyTree) -> TrainState:
        variables = specs.materialise(task.specs, key)
        variables = variables._replace(
            params=start(variables.params, given), frozen=start(variables.frozen, given)
        )
        ema = jax.tree.map(jnp.copy, variables.params) if abstract.state.ema else ()
        zero = jnp.zeros((), jnp.int32)
        opt_state = tx.init(variables.params)
        return TrainState(zero, variables, opt_state, ema, GuardState(jnp.zeros(()), zero))

    return _jit_once(init, abstract.state)


def init_frozen(
    task: Task,
    abstract: Abstract,
    key: Key,
    *,
    start: Callable[[PyTree, PyTree], PyTree],
    given: PyTree,
) -> PyTree:
    """Return the frozen part of `init_state`'s result, for a state that was restored without it."""

    def init(key: Key, given: PyTree) -> PyTree:
        return start(specs.materialise(Variables((), task.specs.frozen, ()), key).frozen, given)

    return _jit_once(init, abstract.state.variables.frozen)(key, given)


def _jit_once(init: Callable[[Key, PyTree], PyTree], made: PyTree) -> jax.stages.Wrapped:
    """``init`` for one call, with the shardings of ``made``. Its second argument is donated."""
    shardings = jax.tree.map(lambda x: x.sharding, made)
    meshes = [s.mesh for s in jax.tree.leaves(shardings) if isinstance(s.mesh, jax.sharding.Mesh)]
    on_cpus = bool(meshes) and meshes[0].devices.flat[0].platform == "cpu"
    return jax.jit(
        init,
        out_shardings=shardings,
        donate_argnums=1,
        compiler_options=dict(QUICK) if on_cpus else None,
    )


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of a tree of abstract or real arrays that a device, not its host, holds."""
    on_device = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != HOST]
    return sum(_shard_size(x) * np.dtype(x.dtype).itemsize for x in on_device)
