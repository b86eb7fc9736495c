"""Low-rank adapters (Hu et al. 2022): a transform of a task's parameter table and functions.

`config.lora` sorts every parameter by path into one of three: ``adapt``, ``train``, ``freeze``. An
adapted matrix W stays as it is, and W + alpha / rank × B A takes its place. The run trains
A [rank, last…] and B [first…, rank], which is zero at first. The two sides of W, first and last,
are "embed" and the other dimensions, in the order of the table. If neither end is "embed", they are
the first dimension and the others. A stack has its layers before both.

The workload gets an `Adapted` in place of an array. A layer that multiplies by it
(`nn.layers.project`) adds B (A x) to W x. The derivative of a frozen W is not computed then, and
the backward pass is a third shorter than with a merged matrix. A layer that casts it (``.astype``)
or takes it out of its stack merges it, one layer of a scanned stack at a time. A table of rows that
a workload looks up cannot be adapted.

A and B are the parameters ``…/w_a`` and ``…/w_b``. W and the frozen parameters are
`Variables.frozen`. They are made, or read from config.warm_start, at every start, and not saved.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxtrain import specs as specs_lib
from jaxtrain.config import Lora
from jaxtrain.types import Array, PyTree, Spec, Task, Unmerged, Variables
from loaders.io.checks import UserError

A, B = "w_a", "w_b"
KINDS = ("adapt", "train", "freeze")


class LoraError(UserError, ValueError):
    """Patterns that do not sort the parameters, or do not match a matrix. The message lists all."""


class _Order(NamedTuple):
    """The products of x with the two factors of an adapter, by whose ranks they meet (Z)."""

    inner: str  # factor that x meets first: "a" or "b"
    axis_of_rank: int  # of that factor
    to_low: str
    from_low: str


@flax.struct.dataclass
class Adapted(Unmerged):
    """A matrix W + scale × B A, or a stack of them, that is not merged yet."""

    w: Array  # [layers…, first…, last…]
    a: Array  # [layers…, rank, last…]
    b: Array  # [layers…, first…, rank]
    scale: float = dataclasses.field(metadata={"pytree_node": False})
    # dimensions of the first side
    n_first: int = dataclasses.field(metadata={"pytree_node": False})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.w.shape

    @property
    def dtype(self) -> Any:
        return self.w.dtype

    def astype(self, dtype: Any) -> Array:
        """Merge the matrix, in the wider of its own dtype and that of A."""
        wide = jnp.promote_types(self.w.dtype, self.a.dtype)
        low_rank: Array = product(self.a, self.b, self.n_first)
        merged = self.w.astype(wide) + self.scale * low_rank.astype(wide)
        return merged.astype(dtype)

    def project(
        self, equation: str, x: Array, product: Callable[[str, Array, Array], Array]
    ) -> Array:
        """Compute einsum(equation, x, the matrix) in x's dtype, without merging, by A and then B.

        ``equation`` is of one layer's matrix, and contracts all dimensions of one side.
        """
        order = self._order(equation)
        low = product(order.to_low, x, self._factor(order.inner))
        return self._from_low(equation, order, x, low, product)

    def project_each(
        self,
        equation: str,
        x: Array,
        others: Sequence["Adapted"],
        product: Callable[[str, Array, Array], Array],
    ) -> list[Array]:
        """Compute `project` with several matrices, whose inner factors are one product with x."""
        every = (self, *others)
        order = self._order(equation)
        if any(w.n_first != self.n_first for w in others):
            return [w.project(equation, x, product) for w in every]
        factors = [w._factor(order.inner) for w in every]
        axis = order.axis_of_rank
        low = product(order.to_low, x, jnp.concatenate(factors, axis=axis))
        ends = list(itertools.accumulate(factor.shape[axis] for factor in factors))
        lows = jnp.split(low, ends[:-1], axis=-1)
        return [
            w._from_low(equation, order, x, low, product)
            for w, low in zip(every, lows, strict=True)
        ]

    def _order(self, equation: str) -> "_Order":
        """Return the order in which x meets A and B: it is B first for a transposed matrix."""
        left, out = equation.split("->")
        of_x, of_w = left.split(",")
        of_a, of_b = of_w[self.n_first :], of_w[: self.n_first]
        of_low = "".join(i for i in of_x if i not in of_w) + "Z"
        if of_a[0] in of_x:
            return _Order("a", 0, f"{of_x},Z{of_a}->{of_low}", f"{of_low},{of_b}Z->{out}")
        return _Order("b", -1, f"{of_x},{of_b}Z->{of_low}", f"{of_low},Z{of_a}->{out}")

    def _factor(self, name: str) -> Array:
        return self.a if name == "a" else self.b

    def _from_low(
        self,
        equation: str,
        order: "_Order",
        x: Array,
        low: Array,
        product: Callable[[str, Array, Array], Array],
    ) -> Array:
        low = low * jnp.asarray(self.scale, x.dtype)
        adapter = product(order.from_low, low, self._factor("b" if order.inner == "a" else "a"))
        return product(equation, x, self.w) + adapter

    def __getitem__(self, layer: Any) -> Array:
        of_layer: Adapted = jax.tree.map(lambda x: x[layer], self)
        return of_layer.astype(of_layer.w.dtype)

    def __jax_array__(self) -> Array:
        return self.astype(self.w.dtype)


def product(a: Any, b: Any, n_first: int) -> Any:
    """Compute B A, [layers…, first…, last…], of arrays of JAX or of numpy."""
    n_layers = b.ndim - n_first - 1
    layers, rank = b.shape[:n_layers], b.shape[-1]
    first, last = b.shape[n_layers:-1], a.shape[n_layers + 1 :]
    c = b.reshape(*layers, math.prod(first), rank) @ a.reshape(*layers, rank, math.prod(last))
    return c.reshape(*layers, *first, *last)


def sides(spec: Spec) -> tuple[int, int]:
    """Count the dimensions before the matrix, and those of its first side."""
    n_layers = next((i for i, axis in enumerate(spec.axes) if axis != "layer"), len(spec.axes))
    axes = spec.axes[n_layers:]
    ends_in_embed = bool(axes) and axes[-1] == "embed" and axes[0] != "embed"
    return n_layers, len(axes) - 1 if ends_in_embed else 1


def sort(config: Lora, table: PyTree) -> dict[str, str]:
    """Return path -> adapt, train or freeze.

    Raises:
      LoraError: none or several of the patterns match a parameter, one to adapt is not a matrix, or
        lora.adapt matches nothing.
    """
    kind_of, problems = {}, []
    flat = _flat(table)
    patterns = {kind: getattr(config, kind) for kind in KINDS}
    for path, spec in flat.items():
        kinds = [kind for kind, pattern in patterns.items() if pattern and re.search(pattern, path)]
        if len(kinds) != 1:
            matches = " and ".join(f"lora.{kind}={patterns[kind]!r}" for kind in kinds)
            problems.append(
                f"parameter {path!r} matches {matches or 'none of lora.adapt, train, freeze'};"
                " exactly one of the three patterns must match it"
            )
            continue
        kind_of[path] = kinds[0]
        if kinds[0] == "adapt" and len(spec.shape) - sides(spec)[0] < 2:
            problems.append(
                f"parameter {path!r} {list(spec.shape)} is not a matrix:"
                f" lora.adapt={config.adapt!r} must not match it"
            )
    if "adapt" not in kind_of.values():
        problems.append(
            f"lora.adapt={config.adapt!r} matches no parameter; expected one of: {', '.join(flat)}"
        )
    if problems:
        raise LoraError("\n".join(problems))
    return kind_of


def adapt(task: Task, config: Lora) -> Task:
    """Give a task adapters for its parameters. Raises LoraError."""
    if not config.rank:
        return task
    table, kinds = _flat(task.specs.params), sort(config, task.specs.params)
    params, frozen = {}, {}
    for path, kind in kinds.items():
        spec = table[path]
        if kind == "train":
            params[path] = spec
            continue
        frozen[path] = spec._replace(dtype=config.dtype)
        if kind == "adapt":
            params |= {f"{path}/{name}": s for name, s in _factors(spec, config.rank).items()}

    def whole(variables: Variables) -> Variables:
        return combine(config, task.specs.params, variables)

    def on_whole(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda variables, *args, **stage: f(whole(variables), *args, **stage)

    def advance(params: PyTree, model_state: PyTree, step: Array) -> PyTree:
        try:
            return task.advance((), model_state, step)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LoraError(
                f"this task's model state follows its parameters, which adapters replace: {error}"
            ) from error

    generative = tuple(
        evaluation._replace(run=on_whole(evaluation.run)) for evaluation in task.generative
    )
    return task._replace(
        generative=generative,
        specs=Variables(_nested(params), _nested(frozen), task.specs.model_state),
        advance=advance,
        loss=on_whole(task.loss),
        evaluate=on_whole(task.evaluate),
        progress=on_whole(task.progress),
    )


def combine(config: Lora, table: PyTree, variables: Variables) -> Variables:
    """Return the variables as a task of this table sees them, with `Adapted` matrices."""
    trained, frozen, specs = _flat(variables.params), _flat(variables.frozen), _flat(table)
    scale = config.alpha / config.rank
    combined = {}
    for path, kind in sort(config, table).items():
        if kind == "train":
            combined[path] = trained[path]
        elif kind == "freeze":
            combined[path] = frozen[path]
        else:
            a, b = trained[f"{path}/{A}"], trained[f"{path}/{B}"]
            combined[path] = Adapted(frozen[path], a, b, scale, sides(specs[path])[1])
    return Variables(_nested(combined), (), variables.model_state)


def _factors(spec: Spec, rank: int) -> dict[str, Spec]:
    """Return A and B. As in peft, A is uniform, of variance 1 / (3 × numbers of the last side)."""
    n_layers, n_first = sides(spec)
    cut = n_layers + n_first
    last_shape, last_axes = spec.shape[cut:], spec.axes[cut:]
    a_shape = (*spec.shape[:n_layers], rank, *last_shape)
    a_axes = (*spec.axes[:n_layers], None, *last_axes)
    b_shape = (*spec.shape[:cut], rank)
    b_axes = (*spec.axes[:cut], None)
    return {
        A: Spec(a_shape, a_axes, _uniform(math.prod(last_shape))),
        B: Spec(b_shape, b_axes, specs_lib.zeros),
    }


def _uniform(n: int) -> Callable[[jax.Array, tuple[int, ...], Any], Array]:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, -1, 1) / math.sqrt(n)

    return init


def is_adapter(path: str) -> bool:
    """Tell whether a parameter is an adapter's, which no source of weights has."""
    return path.rpartition("/")[2] in (A, B)


_flat: Callable[[PyTree], dict[str, Any]] = functools.partial(
    flax.traverse_util.flatten_dict, sep="/"
)


def _nested(flat: Mapping[str, Any]) -> PyTree:
    return flax.traverse_util.unflatten_dict(dict(flat), sep="/")  # type: ignore[no-untyped-call]
