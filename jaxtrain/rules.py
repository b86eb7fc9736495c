"""Update rules that optax does not have as they are needed here, and the memory that any rule's moments take.

Moments are kept in float32, in bfloat16, or in 8 bits (after Dettmers et al. 2022, with power-law codes instead of a table).
Both smaller forms are rounded at random, without bias: an average that moves by a thousandth per step would stand still where
the nearest number is half a hundredth away. The draws are a hash of (step, place), so that no mesh changes a number.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.specs import path_name
from jaxtrain.types import Array, PyTree, Spec

SMALL = 4096  # [elements] moments of fewer stay in float32 under "int8"
ROW = 64  # [elements] least that share a scale
# field of a rule's state -> codes and their law: value = scale × sign(code) (|code| / codes)^power
LAWS = {"mu": (127, 2, jnp.int8), "nu": (255, 4, jnp.uint8)}


class MuonState(NamedTuple):
    count: Array
    mu: PyTree


class FactoredState(NamedTuple):
    count: Array
    row: PyTree  # mean of squares over the columns, [..., rows, 1]
    column: PyTree  # and over the rows, [..., 1, columns]
    whole: PyTree  # squares of what is not factored


class StoredState(NamedTuple):
    """A rule's state with moments in few bits. ``scales``: field -> float32, of the moment's rank, one for each row."""

    rule: Any
    scales: dict[str, PyTree]


class MasterState(NamedTuple):
    masters: PyTree  # float32
    rule: Any


class RuleError(ValueError):
    """A rule that cannot be applied to a parameter. The message names the remedy."""


def matrix_axes(path: str, spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of the rows and of the columns of a parameter's matrices; every other one counts matrices.

    "layer" counts matrices, and so does a nameless dimension beside two others (query, key and value side by side). "head_dim"
    goes with the heads before it. Raises RuleError where this does not leave two.
    """
    groups: list[list[int]] = []
    for i, axis in enumerate(spec.axes):
        if axis == "head_dim" and groups and spec.axes[i - 1] in ("heads", "kv_heads"):
            groups[-1].append(i)
        elif axis != "layer":
            groups.append([i])
    if len(groups) > 2:
        groups = [group for group in groups if spec.axes[group[0]] is not None]
    if len(groups) != 2:
        raise RuleError(
            f"{path!r} with the axes {spec.axes} has {len(groups)} dimensions beside its layers, and muon needs "
            "matrices; give it another rule with optim.groups"
        )
    return tuple(groups[0]), tuple(groups[1])


def is_hidden_matrix(path: str, spec: Spec) -> bool:
    """Whether Muon is meant for it: a matrix between hidden states, not a table, a head, a vector."""
    if {"vocab", "puzzle"} & set(spec.axes):
        return False
    try:
        matrix_axes(path, spec)
    except RuleError:
        return False
    return True


def scale_by_muon(specs: dict[str, Spec], *, momentum: float, scale: str) -> optax.GradientTransformation:
    """B <- momentum B + g; u = g + momentum B; every matrix of u is orthogonalised (Jordan et al. 2024) and scaled.

    scale: "rms" 0.2 sqrt(max(rows, columns)), which moves as far as AdamW does (Liu et al. 2025); "in_out" and "out_in"
    sqrt(max(1, outputs / inputs)) for parameters stored with the inputs or the outputs first. ``specs``: path -> Spec.
    """

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu = jax.tree.map(lambda b, g: momentum * b + g, state.mu, grads)

        def one(path: tuple, g: Array, b: Array) -> Array:
            name = path_name(path)
            rows, columns = matrix_axes(name, specs[name])
            many = tuple(i for i in range(g.ndim) if i not in rows + columns)
            order = many + rows + columns
            u = jnp.transpose(g + momentum * b, order)
            n, m = (math.prod(g.shape[i] for i in group) for group in (rows, columns))
            factor = {
                "rms": 0.2 * math.sqrt(max(n, m)),
                "in_out": math.sqrt(max(1, m / n)),
                "out_in": math.sqrt(max(1, n / m)),
            }[scale]
            x = factor * orthogonalise(u.reshape(*u.shape[: len(many)], n, m))
            return jnp.transpose(x.reshape(u.shape), np.argsort(order))

        return jax.tree.map_with_path(one, grads, mu), MuonState(state.count + 1, mu)

    return optax.GradientTransformation(init, update)


def orthogonalise(x: Array, *, steps: int = 5, eps: float = 1e-7) -> Array:
    """[..., n, m] matrices with their singular values near 1: Newton-Schulz, x <- a x + (b g + c g g) x with g = x x^T."""
    a, b, c = 3.4445, -4.775, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else jnp.swapaxes(x, -1, -2)
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), eps)
    for _ in range(steps):
        g = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * g + c * g @ g) @ x
    return x if wide else jnp.swapaxes(x, -1, -2)


def scale_by_adafactor(
    *, power: float = 0.8, eps: float = 1e-30, least: int = 128, clip: float = 1.0
) -> optax.GradientTransformation:
    """g / sqrt(v), v of rank one over the two largest dimensions (Shazeer & Stern 2018); no first moment, no relative rates.

    v's average forgets with 1 - t^-power. Parameters whose second largest dimension is below ``least`` keep all of v. An update
    whose root mean square exceeds ``clip`` is scaled down to it.
    """

    def two(shape: tuple[int, ...]) -> tuple[int, int] | None:
        if len(shape) < 2:
            return None
        *_, second, first = np.argsort(shape, kind="stable").tolist()
        return None if shape[second] < least else (first, second)

    def init(params: PyTree) -> FactoredState:
        def zeros(without: int | None) -> PyTree:
            """Without one of the two dimensions; or, None, what is not factored. An empty one is a single 0."""

            def one(p: Array) -> Array:
                shape, dims = list(p.shape), two(p.shape)
                if (dims is None) != (without is None):
                    shape = [1] * p.ndim
                elif dims is not None:
                    shape[dims[without]] = 1
                return jnp.zeros(shape, jnp.float32)

            return jax.tree.map(one, params)

        return FactoredState(jnp.zeros((), jnp.int32), zeros(0), zeros(1), zeros(None))

    def update(grads: PyTree, state: FactoredState, params: PyTree = None) -> tuple[PyTree, FactoredState]:
        del params
        count = state.count + 1
        keep = 1 - count.astype(jnp.float32) ** -power

        def one(g: Array, row: Array, column: Array, whole: Array) -> tuple[Array, ...]:
            squares = g * g + eps
            if dims := two(g.shape):
                first, second = dims
                row = keep * row + (1 - keep) * squares.mean(first, keepdims=True)
                column = keep * column + (1 - keep) * squares.mean(second, keepdims=True)
                u = g * jax.lax.rsqrt(row / row.mean(second, keepdims=True)) * jax.lax.rsqrt(column)
            else:
                whole = keep * whole + (1 - keep) * squares
                u = g * jax.lax.rsqrt(whole)
            return u / jnp.maximum(1.0, jnp.sqrt(jnp.mean(u * u)) / clip), row, column, whole

        leaves, tree = jax.tree.flatten(grads)
        found = [one(g, *(m for m in ms)) for g, *ms in zip(leaves, *map(jax.tree.leaves, state[1:]), strict=True)]
        u, row, column, whole = (tree.unflatten(x) for x in zip(*found, strict=True)) if found else [grads] * 4
        return u, FactoredState(count, row, column, whole)

    return optax.GradientTransformation(init, update)


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule that computes in float32 and keeps float32 moments, whatever its parameters' dtype."""

    def wide(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda params: tx.init(wide(params)), lambda grads, state, params=None: tx.update(wide(grads), state, params)
    )


def stored(tx: optax.GradientTransformation, how: str) -> optax.GradientTransformation:
    """A rule whose moments (fields ``mu`` and ``nu`` of its state, float32) are kept as "bfloat16" or "int8"."""
    if how == "float32":
        return tx

    def put(state: Any, salt: Array) -> Any:
        names = [name for name in LAWS if name in state._fields]
        if how == "bfloat16":
            narrow = {
                name: jax.tree.map(lambda x, i=i: round_to_bfloat16(x, salt + np.uint32(i << 30)), getattr(state, name))
                for i, name in enumerate(names)
            }
            return state._replace(**narrow)
        scales = {name: jax.tree.map(row_scales, getattr(state, name)) for name in names}
        codes = {
            name: jax.tree.map(
                lambda x, s, name=name, i=i: quantise(x, s, salt + np.uint32(i << 30), name), getattr(state, name), scales[name]
            )
            for i, name in enumerate(names)
        }
        return StoredState(state._replace(**codes), scales)

    def get(state: Any) -> Any:
        if how == "bfloat16":
            return state._replace(
                **{n: jax.tree.map(lambda x: x.astype(jnp.float32), getattr(state, n)) for n in LAWS if n in state._fields}
            )
        return state.rule._replace(
            **{
                name: jax.tree.map(lambda c, s, name=name: dequantise(c, s, name), getattr(state.rule, name), scale)
                for name, scale in state.scales.items()
            }
        )

    def init(params: PyTree) -> Any:
        return put(tx.init(params), jnp.uint32(0))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        updates, new = tx.update(grads, get(state), params)
        return updates, put(new, new.count.astype(jnp.uint32))

    return optax.GradientTransformation(init, update)


def with_masters(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Applies ``tx`` to float32 copies of the parameters, which take part in the state; the parameters are those, rounded.

    Its updates are the differences of the rounded parameters, so that ``apply_updates`` lands on them exactly.
    """

    def init(params: PyTree) -> MasterState:
        masters = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
        return MasterState(masters, tx.init(masters))

    def update(grads: PyTree, state: MasterState, params: PyTree, **extra) -> tuple[PyTree, MasterState]:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, rule = tx.update(grads, state.rule, state.masters, **extra)
        masters = jax.tree.map(jnp.add, state.masters, updates)
        moves = jax.tree.map(lambda m, p: m.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), masters, params)
        return moves, MasterState(masters, rule)

    return optax.GradientTransformationExtraArgs(init, update)


def row_axis(shape: tuple[int, ...]) -> int | None:
    """The dimension that shares a scale, whole: the last one of at least `ROW`. None: not quantised.

    Blocks of a dimension would be finer. But to spread their scales over 4,096 columns a TPU writes them out, in float32: for
    the autoencoder of 8.36 billion parameters on eight v4 22 GB beside the state, by the compiler, where rows take 4.
    """
    wide = [axis for axis, size in enumerate(shape) if size >= ROW]
    return max(wide, default=None) if math.prod(shape) >= SMALL else None


def row_scales(x: Array) -> Array:
    """float32, of x's rank: the largest magnitude of each row; a single 1 for what is not quantised."""
    if (axis := row_axis(x.shape)) is None:
        return jnp.ones((1,) * x.ndim, jnp.float32)
    return jnp.abs(x).max(axis, keepdims=True)


def quantise(x: Array, scales: Array, salt: Array, name: str) -> Array:
    """Codes of x in 8 bits, unbiased; a positive "nu" never becomes 0, by which the update would be divided."""
    if row_axis(x.shape) is None:
        return x
    n, power, dtype = LAWS[name]
    y = jnp.clip(jnp.abs(x) / jnp.broadcast_to(jnp.where(scales > 0, scales, 1), x.shape), 0, 1)
    low = jnp.clip(jnp.floor(y ** (1 / power) * n), 0, n - 1)
    below, above = (low / n) ** power, ((low + 1) / n) ** power
    code = low + (uniform(x.shape, salt) < (y - below) / (above - below))
    if name == "nu":
        code = jnp.where(x > 0, jnp.maximum(code, 1), 0)
    return (code * jnp.sign(x)).astype(dtype)


def dequantise(codes: Array, scales: Array, name: str) -> Array:
    """float32 values of codes."""
    if row_axis(codes.shape) is None:
        return codes
    n, power, _ = LAWS[name]
    c = codes.astype(jnp.float32)
    return jnp.sign(c) * (jnp.abs(c) / n) ** power * jnp.broadcast_to(scales, c.shape)


def round_to_bfloat16(x: Array, salt: Array) -> Array:
    """float32 to one of the two nearest bfloat16, unbiased."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (_hash(x.shape, salt) >> np.uint32(16))
    return jax.lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def uniform(shape: tuple[int, ...], salt: Array) -> Array:
    """float32 in [0, 1), of each place and the salt."""
    return (_hash(shape, salt) >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _hash(shape: tuple[int, ...], salt: Array) -> Array:
    """uint32 of each place: its number, mixed by the finalizer of MurmurHash3 (Appleby). Elementwise, so it moves no data."""
    h = jnp.full(shape, salt * np.uint32(0x9E3779B9), jnp.uint32)
    for i in range(len(shape)):
        stride = np.uint32(math.prod(shape[i + 1 :]) % 2**32)
        h = h + jax.lax.broadcasted_iota(jnp.uint32, shape, i) * stride
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))
