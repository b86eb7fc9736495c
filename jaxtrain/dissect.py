"""One step taken apart on one device: single examples, norms by parameter, activations, what-ifs.

The state is that before the step, and the batch is the step's own. All is computed again on one
device, so its last bits may differ from those of the run.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from jaxtrain import assembly as assembly_lib
from jaxtrain import optim, plan, specs, workload
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import Config, Mesh
from jaxtrain.optim import Optimizer
from jaxtrain.parallel.layout import make_mesh
from jaxtrain.run.init_or_restore import init_or_restore
from jaxtrain.run.stream import Data, Stream
from jaxtrain.step import update
from jaxtrain.step.accumulate import gradients
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import with_rows
from jaxtrain.telemetry import goodput
from jaxtrain.types import Array, Batch, Example, Mean, PyTree, Spec, Variables
from loaders.io.checks import UserError

ROW = "row:"  # begins the name of an example by its place in the batch
PRODUCTS = ("dot_general", "conv_general_dilated", "shard_map", "custom_call", "pallas_call")
INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)


class DissectError(UserError, ValueError):
    """An example or a learning rate that a step cannot have."""


class Row(NamedTuple):
    """An example of the batch, alone."""

    id: str
    weight: float  # in the loss of the batch
    loss: float  # mean over its own weight
    grad_norm: float  # of that mean
    shown: Example


class Variant(NamedTuple):
    """The step as it was, or as it would be."""

    name: str
    # metrics before the update, norms, and "loss_after" of the same batch after it
    numbers: dict[str, float]


class Step(NamedTuple):
    """A step, taken apart."""

    rows: list[Row]
    loss: float  # of the batch
    # the same from the rows alone: another number if the loss has statistics of the batch
    sum_of_rows: float
    # path -> norms of the parameter, its gradient, its update
    params: dict[str, tuple[float, float, float]]
    # scope, with the layer's number, and largest magnitude; in order
    activations: list[tuple[str, float]]
    variants: list[Variant]


def dissect(
    config: Config, step: int, *, without: Sequence[str] = (), lr: float | None = None
) -> Step:
    """Take a step apart. The workdir of ``config`` has the checkpoint before it, unless it is 1.

    ``without``: examples to leave out in another try, by id or as "row:3". ``lr``: the learning
    rate of another try. Raises DissectError, and the errors of a run's start.
    """
    on_one_device = dataclasses.replace(config, mesh=Mesh(1, 1, 1, config.mesh.axis_rules))
    mesh = make_mesh(1, 1, 1, devices=jax.local_devices()[:1])
    assembly = assembly_lib.assemble(on_one_device, mesh)
    plan.refuse_if_too_large(assembly)
    with (
        Data(assembly) as data,
        contextlib.closing(Checkpointer(on_one_device, assembly.task)) as checkpointer,
    ):
        newest = functools.partial(checkpointer.restore, assembly.abstract, data.state(0))
        state, saved_step, history, _ = init_or_restore(assembly, newest)
        if saved_step != step - 1:
            raise DissectError(
                f"the state before step {step} is not there: {config.workdir} has that after step"
                f" {saved_step}"
            )
        with Stream(data, goodput.Clock(), step=saved_step, offset=history.offset) as stream:
            item = stream.next(unless=lambda: False)
        assert item.step == step
        parts = _Parts(assembly, state, item.arrays, item.index)
        return parts.step(item.index - history.offset, without, lr)


def names(batch: Mapping[str, Any], n: int) -> list[str]:
    """Return the names of the ``n`` examples of a batch: their ids, or else their places."""
    index = batch.get("index")
    if index is None:
        return [f"{ROW}{k}" for k in range(n)]
    return [str(i) for i in jax.device_get(index).tolist()]


def kept(ids: Sequence[str], without: Sequence[str]) -> np.ndarray:
    """Return the places of the examples that stay. Raises DissectError: no such one, or none."""
    stays = np.ones(len(ids), bool)
    for name in without:
        place = name.removeprefix(ROW)
        if name.startswith(ROW) and place.isdecimal():
            rows = [int(place)]
        else:
            rows = [k for k, example in enumerate(ids) if example == name]
        if not rows or max(rows) >= len(ids):
            raise DissectError(
                f"--without {name}: the step has no such example; it has"
                f" {', '.join(ids[:8])}{' …' * (len(ids) > 8)}, and {ROW}0 to {ROW}{len(ids) - 1}"
                " by their places in the batch"
            )
        stays[rows] = False
    if not stays.any():
        raise DissectError("--without names every example of the step; leave one")
    return np.flatnonzero(stays)


class _Try(NamedTuple):
    """A step to take: as the run took it, or another."""

    name: str
    tx: Optimizer
    rows: np.ndarray  # places of the examples that it has


class _Parts:
    def __init__(self, assembly: Assembly, state: TrainState, batch: Batch, index: int):
        self._assembly = assembly
        self._config = assembly.config
        self._layout = assembly.layout
        self._task = assembly.task
        stage = assembly.task.stage(index)
        if stage is not None:
            loss = functools.partial(assembly.task.loss, stage=stage)
            self._task = assembly.task._replace(loss=loss)
        self._state = state
        self._batch = dict(with_rows(batch, assembly.layout))
        self._key = jax.random.fold_in(jax.random.key(assembly.config.seed), state.step)

    def step(self, position: int, without: Sequence[str], lr: float | None) -> Step:
        examples = self._examples(position)
        places = names(self._batch, len(examples))
        ids = [example.id or place for example, place in zip(examples, places, strict=True)]
        tries = self._tries(ids, without, lr)  # refuses a wrong id before the long part
        variants = []
        norms: list[list[list[float]]] = []  # of each try: columns by parameter
        for attempt in tries:
            variant, columns = self._try(attempt)
            variants.append(variant)
            norms.append(columns)
        norms_of_parameter = zip(*norms[0], strict=True)
        paths = specs.paths(self._state.variables.params)
        total, weight, norm = self._rows()
        rows = []
        with np.errstate(all="ignore"):
            mean = total / weight
            for i, example in enumerate(examples):
                row = Row(ids[i], float(weight[i]), float(mean[i]), float(norm[i]), example)
                rows.append(row)
            sum_of_rows = float(total.sum() / weight.sum())
        return Step(
            rows,
            variants[0].numbers["loss"],
            sum_of_rows,
            dict(zip(paths, norms_of_parameter, strict=True)),
            self._activations(),
            variants,
        )

    def _examples(self, position: int) -> list[Example]:
        """Return the examples of the batch, as the workload shows them."""
        show = workload.of(self._config.workload).examples
        if show is None:
            return [Example()] * self._batch["row"].shape[0]
        arrays = (self._state.variables.model_state, dict(self._batch))
        model_state, batch = jax.device_get(arrays)
        return list(show(self._config, model_state, batch, position))

    def _some(self, variables: Variables, batch: Batch, rows: Array) -> tuple[Variables, Batch]:
        """Return the variables and the batch of some rows."""

        def take(spec: Spec, x: Array) -> Array:
            return x[rows] if "batch" in spec.axes else x

        model_state = jax.tree.map(
            take, self._task.specs.model_state, variables.model_state, is_leaf=specs.is_spec
        )
        part = {name: x[rows] for name, x in batch.items()}
        return variables._replace(model_state=model_state), part

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sum of the loss, its weight and the gradient norm of each row alone."""

        def of_row(variables: Variables, batch: Batch, k: Array) -> tuple[Array, Array, Array]:
            variables, batch = self._some(variables, batch, k[None])
            grads, out = gradients(
                self._task, self._layout, variables, batch, self._key, accumulate=1
            )
            return out.loss.total, out.loss.weight, optim.global_norm(grads)

        @jax.jit
        def of_rows(variables: Variables, batch: Batch) -> tuple[Array, Array, Array]:
            places = jnp.arange(batch["row"].shape[0])
            columns: tuple[Array, Array, Array] = jax.lax.map(
                functools.partial(of_row, variables, batch), places
            )
            return columns

        total, weight, norm = jax.device_get(of_rows(self._state.variables, self._batch))
        return total, weight, norm

    def _move(
        self, attempt: _Try, state: TrainState, batch: Batch
    ) -> tuple[PyTree, PyTree, dict[str, Mean]]:
        """Gradients, new parameters and metrics of a step."""
        variables, batch = self._some(state.variables, batch, jnp.asarray(attempt.rows))
        accumulate = self._config.train.accumulate
        if len(attempt.rows) % accumulate:
            accumulate = 1
        grads, out = gradients(
            self._task, self._layout, variables, batch, self._key, accumulate=accumulate
        )
        finite = update.Gradients(grads, jnp.ones((), bool), out.sparse_rows)
        updated = update.update(attempt.tx, finite, state.opt_state, variables.params)
        new_variables = variables._replace(params=updated.params)
        loss_after = self._task.loss(new_variables, batch, self._key).loss
        numbers = {
            "loss": out.loss,
            **out.metrics,
            "loss_after": loss_after,
            **update.norms("grad_norm", optim.square_sums(grads)),
            **updated.norms,
        }
        return grads, updated.params, numbers

    def _try(self, attempt: _Try) -> tuple[Variant, list[list[float]]]:
        """Take a step. Return numbers, and norms (parameter, gradient, update)."""

        def change(new: Array, old: Array) -> Array:
            return new.astype(jnp.float32) - old.astype(jnp.float32)

        def norms(state: TrainState, batch: Batch) -> tuple[dict[str, Mean], list[Array]]:
            grads, new_params, numbers = self._move(attempt, state, batch)
            params = state.variables.params
            changes = jax.tree.map(change, new_params, params)
            columns = []
            for tree in (params, grads, changes):
                columns.append(jnp.stack([optim.global_norm(x) for x in jax.tree.leaves(tree)]))
            return numbers, columns

        numbers, columns = jax.device_get(jax.jit(norms)(self._state, self._batch))
        scalars = {}
        with np.errstate(all="ignore"):
            for name, mean in numbers.items():
                if not np.ndim(mean.total):
                    scalars[name] = float(mean.total / mean.weight)
        return Variant(attempt.name, scalars), [column.tolist() for column in columns]

    def _tries(self, ids: Sequence[str], without: Sequence[str], lr: float | None) -> list[_Try]:
        tx = self._assembly.tx
        all_rows = np.arange(len(ids))
        tries = [_Try("as it was", tx, all_rows)]
        if without:
            tries.append(_Try(f"without {', '.join(without)}", tx, kept(ids, without)))
        if lr is not None:
            tries.append(_Try(f"lr {lr:g}", self._with_rate(lr), all_rows))
        return tries

    def _with_rate(self, lr: float) -> Optimizer:
        """Make the optimizer whose learning rate at this step is ``lr``."""
        config = self._config
        steps = np.array([int(self._state.norms.steps)])

        def rate(rule: Any) -> float:
            rates = optim.learning_rates(rule, config.train.steps, steps)
            return math.nan if rates is None else float(rates[0])

        now = rate(config.optim)
        changed = config.optim
        if now > 0:
            changed = dataclasses.replace(config.optim, lr=lr * config.optim.lr / now)
        if not math.isclose(rate(changed), lr, rel_tol=1e-3):
            raise DissectError(
                f"--lr {lr:g}: optim.name={config.optim.name!r} with"
                f" optim.schedule={config.optim.schedule!r} has the rate {now:g} at this step"
                " whatever optim.lr is, so that it cannot be another"
            )
        return optim.make_optimizer(
            changed, self._assembly.task.specs.params, steps=config.train.steps
        )

    def _activations(self) -> list[tuple[str, float]]:
        magnitudes_of = jax.jit(functools.partial(largest, self._task.loss))
        magnitudes = jax.device_get(
            magnitudes_of(self._state.variables, dict(self._batch), self._key)
        )
        lines = []
        for scope, values in magnitudes.items():
            for place, x in np.ndenumerate(values):
                layer = "".join(f" [{i}]" for i in place)
                lines.append((scope + layer, float(x)))
        return lines


def largest(function: Callable[..., Any], *arguments: Any) -> dict[str, Array]:
    """Return the largest magnitude of each product and each loop's state of a function, by scope.

    To be jitted. A loop adds a first axis.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), "")[1]


def _run(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], scope: str
) -> tuple[list[Any], dict[str, Array]]:
    """Evaluate a jaxpr. Return its results and the magnitudes in it."""
    variables = [*jaxpr.constvars, *jaxpr.invars]
    values: dict[Any, Any] = dict(zip(variables, [*consts, *arguments], strict=True))
    magnitudes: dict[str, Array] = {}

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, jax.extend.core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        inner_scope = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        results, inner_magnitudes = _equation(equation, operands, inner_scope)
        for name, x in inner_magnitudes.items():
            n = sum(_is_of(earlier, name) for earlier in magnitudes)
            magnitudes[f"{name} #{n + 1}" if n else name] = x
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars], magnitudes


def _is_of(numbered: str, name: str) -> bool:
    """Whether a name is ``name`` or ``name`` with a number."""
    return numbered == name or numbered.startswith(f"{name} #")


def _equation(
    equation: Any, operands: Sequence[Any], scope: str
) -> tuple[list[Any], dict[str, Array]]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "scan":
        return _scan(params, operands, scope)
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    if primitive.name in INLINED and inner is not None:
        jaxpr = getattr(inner, "jaxpr", inner)
        return _run(jaxpr, getattr(inner, "consts", ()), operands, scope)
    bind_params: Any = primitive.get_bind_params(params)
    functions: tuple[Any, ...] = ()
    if isinstance(bind_params, tuple):  # of older versions of jax
        functions, bind_params = bind_params
    with equation.ctx.manager:
        results = primitive.bind(*functions, *operands, **bind_params)
    results = list(results) if primitive.multiple_results else [results]
    products = results if primitive.name in PRODUCTS else []
    kind = primitive.name.partition("_")[0]
    return results, _magnitudes(products, f"{scope or 'loss'}: {kind}")


def _scan(
    params: Mapping[str, Any], operands: Sequence[Any], scope: str
) -> tuple[list[Any], dict[str, Array]]:
    inner, n_carry = params["jaxpr"], params["num_carry"]
    consts = operands[: params["num_consts"]]
    carry_and_xs = list(operands[params["num_consts"] :])

    def body(state: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
        results, magnitudes = _run(inner.jaxpr, inner.consts, [*consts, *state, *x], scope)
        new_state = results[:n_carry]
        magnitudes |= _magnitudes(new_state, f"{scope or 'loss'}: state")
        return new_state, (results[n_carry:], magnitudes)

    last, (stacked, magnitudes) = jax.lax.scan(
        body,
        carry_and_xs[:n_carry],
        carry_and_xs[n_carry:],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*last, *stacked], magnitudes


def _magnitudes(results: Sequence[Any], name: str) -> dict[str, Array]:
    """Measure the largest magnitude of floats of two dimensions or more."""
    magnitudes: dict[str, Array] = {}
    for x in results:
        if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 and x.size:
            numbered = f"{name} {len(magnitudes)}" if magnitudes else name
            magnitudes[numbered] = jnp.abs(x).max().astype(jnp.float32)
    return magnitudes
