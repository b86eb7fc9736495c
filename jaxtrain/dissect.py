"""One step taken apart on one device: single examples, norms by parameter, activations, what-ifs.

The state is that before the step, and the batch is the step's own. All is computed again on one
device, so its last bits may differ from those of the run.
"""

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
from jaxtrain.config import Config, Mesh
from jaxtrain.optim import Optimizer
from jaxtrain.parallel.layout import make_mesh
from jaxtrain.run.checkpoint_manager import CheckpointManager
from jaxtrain.run.init_or_restore import init_or_restore
from jaxtrain.run.process_context import ProcessContext
from jaxtrain.run.stream import Data
from jaxtrain.step import update
from jaxtrain.step.accumulate import gradients
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import with_rows
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
    one = dataclasses.replace(config, mesh=Mesh(1, 1, 1, config.mesh.axis_rules))
    assembly = assembly_lib.assemble(one, make_mesh(1, 1, 1, devices=jax.local_devices()[:1]))
    plan.refuse_if_too_large(assembly)
    process = ProcessContext(one)
    with (
        Data(assembly, process.clock) as data,
        CheckpointManager(assembly, data, process) as checkpoints,
    ):
        state, at, history = init_or_restore(assembly, checkpoints)
        if at != step - 1:
            raise DissectError(
                f"the state before step {step} is not there: {config.workdir} has that after step"
                f" {at}"
            )
        data.start(at, history.offset)
        item = data.next(unless=lambda: False)
        assert item.step == step
        return _Parts(assembly, state, item.arrays, item.index).step(
            item.index - history.offset, without, lr
        )


def names(batch: Mapping[str, Any], n: int) -> list[str]:
    """Return the names of the ``n`` examples of a batch: their ids, or else their places."""
    index = batch.get("index")
    return (
        [f"{ROW}{k}" for k in range(n)]
        if index is None
        else [str(i) for i in jax.device_get(index).tolist()]
    )


def kept(ids: Sequence[str], without: Sequence[str]) -> np.ndarray:
    """Return the places of the examples that stay. Raises DissectError: no such one, or none."""
    left = np.ones(len(ids), bool)
    for name in without:
        place = name.removeprefix(ROW)
        rows = (
            [int(place)]
            if name.startswith(ROW) and place.isdecimal()
            else [k for k, i in enumerate(ids) if i == name]
        )
        if not rows or max(rows) >= len(ids):
            raise DissectError(
                f"--without {name}: the step has no such example; it has"
                f" {', '.join(ids[:8])}{' …' * (len(ids) > 8)}, and {ROW}0 to {ROW}{len(ids) - 1}"
                " by their places in the batch"
            )
        left[rows] = False
    if not left.any():
        raise DissectError("--without names every example of the step; leave one")
    return np.flatnonzero(left)


class _Parts:
    def __init__(self, assembly: Assembly, state: TrainState, batch: Batch, index: int):
        self._assembly, self._config, self._layout = assembly, assembly.config, assembly.layout
        stage = assembly.task.stage(index)
        task = assembly.task
        self._task = (
            task if stage is None else task._replace(loss=functools.partial(task.loss, stage=stage))
        )
        self._state, self._batch = state, dict(with_rows(batch, assembly.layout))
        self._key = jax.random.fold_in(jax.random.key(assembly.config.seed), state.step)

    def step(self, position: int, without: Sequence[str], lr: float | None) -> Step:
        shown = self._shown(position)
        ids = [
            example.id or own
            for example, own in zip(shown, names(self._batch, len(shown)), strict=True)
        ]
        tries = self._tries(ids, without, lr)  # refuses a wrong id before the long part
        made = [self._try(*each) for each in tries]
        params = dict(
            zip(
                specs.paths(self._state.variables.params),
                zip(*made[0][1], strict=True),
                strict=True,
            )
        )
        variants = [variant for variant, _ in made]
        total, weight, norm = self._rows()
        with np.errstate(all="ignore"):
            each = zip(ids, weight, total / weight, norm, shown, strict=True)
            rows = [Row(i, float(w), float(loss), float(g), e) for i, w, loss, g, e in each]
            alone = float(total.sum() / weight.sum())
        return Step(rows, variants[0].numbers["loss"], alone, params, self._activations(), variants)

    def _shown(self, position: int) -> list[Example]:
        show = workload.of(self._config.workload).get("examples")
        n = self._batch["row"].shape[0]
        if show is None:
            return [Example()] * n
        return list(
            show(
                self._config,
                *jax.device_get((self._state.variables.model_state, dict(self._batch))),
                position,
            )
        )

    def _some(self, variables: Variables, batch: Batch, rows: Array) -> tuple[Variables, Batch]:
        """Return the variables and the batch of some rows."""

        def chosen(spec: Spec, x: Array) -> Array:
            return x[rows] if "batch" in spec.axes else x

        model_state = jax.tree.map(
            chosen, self._task.specs.model_state, variables.model_state, is_leaf=specs.is_spec
        )
        return variables._replace(model_state=model_state), {
            name: x[rows] for name, x in batch.items()
        }

    def _rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sum of the loss, its weight and the gradient norm of each row alone."""

        def alone(variables: Variables, batch: Batch, k: Array) -> tuple[Array, Array, Array]:
            variables, batch = self._some(variables, batch, k[None])
            grads, out = gradients(
                self._task, self._layout, variables, batch, self._key, accumulate=1
            )
            return out.loss.total, out.loss.weight, optim.global_norm(grads)

        each = jax.jit(
            lambda v, b: jax.lax.map(functools.partial(alone, v, b), jnp.arange(b["row"].shape[0]))
        )
        return tuple(jax.device_get(each(self._state.variables, self._batch)))

    def _moved(
        self, tx: Optimizer, state: TrainState, batch: Batch, kept: np.ndarray
    ) -> tuple[PyTree, PyTree, dict[str, Mean]]:
        """Gradients, new parameters and metrics of a step of the rows ``kept``."""
        variables, batch = self._some(state.variables, batch, jnp.asarray(kept))
        n = self._config.train.accumulate
        grads, out = gradients(
            self._task,
            self._layout,
            variables,
            batch,
            self._key,
            accumulate=1 if len(kept) % n else n,
        )
        given = update.Gradients(grads, jnp.ones((), bool), out.sparse_rows)
        moved = update.update(tx, given, state.opt_state, variables.params)
        after = self._task.loss(variables._replace(params=moved.params), batch, self._key).loss
        numbers = {
            "loss": out.loss,
            **out.metrics,
            "loss_after": after,
            **update.norms("grad_norm", grads),
            **moved.norms,
        }
        return grads, moved.params, numbers

    def _try(self, name: str, tx: Optimizer, kept: np.ndarray) -> tuple[Variant, list[list[float]]]:
        """Take the step with some rows. Return numbers, norms (parameter, gradient, update)."""

        def norms(state: TrainState, batch: Batch) -> tuple[dict[str, Mean], list[Array]]:
            grads, new, numbers = self._moved(tx, state, batch, kept)
            params = state.variables.params
            moved = jax.tree.map(
                lambda n, o: n.astype(jnp.float32) - o.astype(jnp.float32), new, params
            )
            each = [
                [optim.global_norm(x) for x in jax.tree.leaves(tree)]
                for tree in (params, grads, moved)
            ]
            return numbers, [jnp.stack(column) for column in each]

        numbers, columns = jax.device_get(jax.jit(norms)(self._state, self._batch))
        with np.errstate(all="ignore"):
            scalars = {
                n: float(mean.total / mean.weight)
                for n, mean in numbers.items()
                if not np.ndim(mean.total)
            }
        return Variant(name, scalars), [x.tolist() for x in columns]

    def _tries(
        self, ids: Sequence[str], without: Sequence[str], lr: float | None
    ) -> list[tuple[str, Optimizer, np.ndarray]]:
        everything = np.arange(len(ids))
        tries = [("as it was", self._assembly.tx, everything)]
        if without:
            tries.append((f"without {', '.join(without)}", self._assembly.tx, kept(ids, without)))
        if lr is not None:
            tries.append((f"lr {lr:g}", self._with_rate(lr), everything))
        return tries

    def _with_rate(self, lr: float) -> Optimizer:
        """Make the optimizer whose learning rate at this step is ``lr``."""
        config, done = self._config, int(self._state.norms.steps)

        def rate(of: Any) -> float:
            found = optim.learning_rates(of, config.train.steps, np.array([done]))
            return math.nan if found is None else float(found[0])

        now = rate(config.optim)
        changed = (
            dataclasses.replace(config.optim, lr=lr * config.optim.lr / now)
            if now > 0
            else config.optim
        )
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
        arguments = self._state.variables, dict(self._batch), self._key
        found = jax.device_get(jax.jit(functools.partial(largest, self._task.loss))(*arguments))
        every = (
            (name, place, x)
            for name, values in found.items()
            for place, x in np.ndenumerate(values)
        )
        return [(name + "".join(f" [{i}]" for i in place), float(x)) for name, place, x in every]


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
    values: dict[Any, Any] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True)
    )
    found: dict[str, Array] = {}

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, jax.extend.core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        where = "/".join(filter(None, (scope, str(equation.source_info.name_stack))))
        results, inside = _equation(equation, given, where)
        for name, x in inside.items():
            n = sum(other == name or other.startswith(f"{name} #") for other in found)
            found[f"{name} #{n + 1}" if n else name] = x
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars], found


def _equation(
    equation: Any, given: Sequence[Any], where: str
) -> tuple[list[Any], dict[str, Array]]:
    primitive, params = equation.primitive, equation.params
    if primitive.name == "scan":
        return _scan(params, given, where)
    inner = params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr")
    if primitive.name in INLINED and inner is not None:
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, where)
    # of older versions of jax with functions before it
    rest: Any = primitive.get_bind_params(params)
    functions, rest = rest if isinstance(rest, tuple) else ((), rest)
    with equation.ctx.manager:
        results = primitive.bind(*functions, *given, **rest)
    results = list(results) if primitive.multiple_results else [results]
    shown = results if primitive.name in PRODUCTS else []
    return results, _sizes(shown, f"{where or 'loss'}: {primitive.name.partition('_')[0]}")


def _scan(
    params: Mapping[str, Any], given: Sequence[Any], where: str
) -> tuple[list[Any], dict[str, Array]]:
    inner, n, m = params["jaxpr"], params["num_consts"], params["num_carry"]
    consts, carry, xs = given[:n], list(given[n : n + m]), list(given[n + m :])

    def body(state: list[Any], x: list[Any]) -> tuple[list[Any], Any]:
        results, found = _run(inner.jaxpr, inner.consts, [*consts, *state, *x], where)
        return results[:m], (results[m:], found | _sizes(results[:m], f"{where or 'loss'}: state"))

    last, (stacked, found) = jax.lax.scan(
        body, carry, xs, length=params["length"], reverse=params["reverse"]
    )
    return [*last, *stacked], found


def _sizes(results: Sequence[Any], name: str) -> dict[str, Array]:
    """Measure the largest magnitude of floats of two dimensions or more."""
    chosen = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 and x.size]
    return {
        f"{name} {i}" if i else name: jnp.abs(x).max().astype(jnp.float32)
        for i, x in enumerate(chosen)
    }
