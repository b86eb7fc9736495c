"""The types that every module agrees on."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax

PyTree = Any
Array = jax.Array
Key = jax.Array
Axes = tuple[str | None, ...]  # logical axis names, one for each dimension
Batch = Mapping[str, Array]  # field -> [batch, ...]
Shard = Callable[..., Array]  # shard(x, "batch", "seq", "embed") pins x to the layout's sharding; `jaxtrain.layout.Sharder`
Initializer = Callable[[Key, tuple[int, ...], Any], Array]  # (key, shape, dtype) -> array


class Spec(NamedTuple):
    """A parameter before it exists. One table of these per model yields everything else (`jaxtrain.specs`)."""

    shape: tuple[int, ...]
    axes: Axes
    init: Initializer
    dtype: Any = "float32"


class Mean(NamedTuple):
    """A weighted mean that has not been divided yet, so that sums over microbatches and devices stay exact."""

    total: Array
    weight: Array


class Variables(NamedTuple):
    """What a task computes with."""

    params: PyTree  # differentiated, optimised, saved
    frozen: PyTree = ()  # read-only base weights; reloaded from their source, not saved again
    carry: PyTree = ()  # task-owned, without gradient: teacher averages, batch statistics, recurrent state


class LossOut(NamedTuple):
    loss: Mean
    metrics: dict[str, Mean]
    carry: PyTree = ()  # as the loss leaves it; None = as it was, which spares a reduction of it over the data axis
    touched: Mapping[str, Array] = {}  # path of a table -> int32 [rows]: how often the loss read each row


def _keep_carry(params: PyTree, carry: PyTree, step: Array) -> PyTree:
    del params, step
    return carry


def _no_pictures(batch: Batch) -> dict[str, Array]:
    del batch
    return {}


def _one_stage(step: int) -> Hashable:
    del step
    return None


def _as_it_is(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(record)


def _no_progress(variables: Variables, batch: Batch) -> dict[str, Array]:
    del variables, batch
    return {}


class Trial(NamedTuple):
    """A measurement that an evaluation makes besides summing over the test split."""

    run: Callable[[Variables], PyTree]  # on the devices of all processes; arrays
    judge: Callable[[PyTree], tuple[dict[str, float], list[dict[str, Any]]]]  # on one host -> for the record, for samples.jsonl


class Task(NamedTuple):
    """A workload as a value: a few pure functions over one table of parameters.

    A workload module offers ``Config`` (a frozen dataclass; a field whose value is None takes the data's fact of that
    name) and ``make_task(config, shard, batch) -> Task``, where ``config`` is the whole run's and ``batch`` the rows of a
    global step. It may offer ``export_names(config, path)``, the names that a parameter is exported under
    (`jaxtrain export`).

    `loss` and `evaluate` see some rows of the global batch, not all: a microbatch, one device group's share. What they
    return are sums over those rows (law 5). ``batch["row"]`` (int32) is each row's place in the global batch; random draws
    for a row fold it in, so that the same numbers are drawn on every mesh.

    A curriculum that changes what is computed is a `stage`: where it is not None, `loss` takes it as the static argument
    ``stage``, and one program is compiled for each. What changes from step to step without another program is traced.
    """

    specs: Variables  # trees of Spec
    loss: Callable[[Variables, Batch, Key], LossOut]
    evaluate: Callable[[Variables, Batch], dict[str, Mean]]
    axes: dict[str, Axes]  # batch field -> logical axes, "batch" first
    flops: int  # model FLOPs of one global step, forward and backward; of the last stage; masked places of attention left out
    advance: Callable[[PyTree, PyTree, Array], PyTree] = _keep_carry  # (new params, carry, step) -> carry
    pictures: Callable[[Batch], dict[str, Array]] = _no_pictures  # name -> [n, height, width] in 0..1, as the model sees it
    stage: Callable[[int], Hashable] = _one_stage  # step -> static variant of the loss
    progress: Callable[[Variables, Batch], dict[str, Array]] = _no_progress  # like pictures, of a test batch at an evaluation
    finish: Callable[[Mapping[str, Any]], dict[str, float]] = _as_it_is  # means over a test split, also arrays -> its record
    trials: tuple[Trial, ...] = ()
    tokens: float = 0  # places of a sequence model's global step, on average; 0 = it has none
    full_flops: int = 0  # the same with the places that a causal mask or a window leaves out; 0 = there are none
