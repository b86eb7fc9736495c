"""Norms, rotary positions, products with matrices, and rows of a table split over devices."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxtrain.config import Section
from jaxtrain.nn import cpu, remat
from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Axes, PyTree, Shard, T, Unmerged
from loaders.io import checks


@dataclass(frozen=True)
class Rope(Section):
    """Rotary positions. A factor above 1 stretches them over a longer context, as in Llama 3."""

    on_resume = checks.OnResume(checks.FUNCTION)

    theta: float = 1e4  # [1] longest wavelength over 2 pi, of the pair that turns slowest
    # [1] factor by which wavelengths much longer than the original context are stretched; 1 = none
    factor: float = 1.0
    # [1] original context over the wavelength from which on all of the factor applies
    low: float = 1.0
    high: float = 4.0  # [1] original context over the wavelength up to which none of it does
    original: int = 8192  # [tokens] context that the model was first trained with

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.under("rope", checks.positive(self, "theta", "factor", "low", "original"))
        if self.high <= self.low:
            yield "rope.high", f"is {self.high}, not above rope.low={self.low}"


def rms_norm(x: Array, scale: Array, eps: float, shard: Shard | None = None) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) scale over the last axis (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    mean_square = (y * y).mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(mean_square + eps)
    return scaled(y, scale, shard).astype(x.dtype)


def layer_norm(
    x: Array, scale: Array, bias: Array | None, eps: float, shard: Shard | None = None
) -> Array:
    """Compute (x - mean) / sqrt(var + eps) scale + bias over the last axis (Ba et al. 2016)."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    variance = (y * y).mean(-1, keepdims=True)
    y = scaled(y * jax.lax.rsqrt(variance + eps), scale, shard)
    if bias is not None:
        y = y + spread(bias, y.shape, shard)
    return y.astype(x.dtype)


def spread(x: Array, shape: tuple[int, ...], shard: Shard | None) -> Array:
    """Broadcast x over the dimensions that ``shape`` has before its own. None = a few rows."""
    if shard is not None and shard.devices[0] == "cpu":
        return cpu.spread(x, shape, shard)
    return jnp.broadcast_to(x, shape)


def scaled(y: Array, scale: Array, shard: Shard | None) -> Array:
    """Multiply every row of y by ``scale``."""
    if shard is not None and shard.devices[0] == "cpu":
        return cpu.scaled(y, scale, shard)
    return y * jnp.broadcast_to(scale, y.shape)


def gelu(x: Array) -> Array:
    """Compute x Φ(x), by the error function (Hendrycks & Gimpel 2016)."""
    return _gelu(x) if jax.__version_info__ >= (0, 12) else jax.nn.gelu(x, approximate=False)


@jax.custom_jvp
def _gelu(x: Array) -> Array:
    """Compute GELU with its own derivative, as jax 0.12.0 refuses `erfc`'s over manual axes."""
    return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_derivative(xs: tuple[Array], dxs: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = xs, dxs
    cumulative = 0.5 * jax.lax.erfc(-x * 2**-0.5)
    density = jnp.exp(-0.5 * x * x) * (2 * math.pi) ** -0.5
    return x * cumulative, dx * (cumulative + x * density)


def rope_angles(rope: Rope, position_bt: Array, head_dim: int) -> tuple[Array, Array]:
    """Return cos and sin [B, T, 1, K / 2] of the angles t theta^(-2 i / K) (Su et al. 2021)."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.factor != 1:
        frequencies = _stretched(rope, frequencies)
    position_bt1 = position_bt[..., None].astype(jnp.float32)
    angle_btk = position_bt1 * jnp.asarray(frequencies, jnp.float32)[None, None]
    return jnp.cos(angle_btk)[:, :, None], jnp.sin(angle_btk)[:, :, None]


def _stretched(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Divide the frequencies f with original × f / 2 pi < low by the factor.

    Those with > high stay, and those between are interpolated (Llama 3.1, Grattafiori et al. 2024).
    """
    turns = rope.original * frequencies / (2 * math.pi)
    share = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
    return frequencies * share + frequencies / rope.factor * (1 - share)


def rotate(x_bthk: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + K / 2)."""
    a, b = jnp.split(x_bthk.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_sin
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_bthk.dtype)


def product(
    equation: str, x: Array, w: Array, shard: Shard, *, precision: jax.lax.Precision | None = None
) -> Array:
    """Compute the einsum of activations and one matrix, in the activations' dtype.

    No product of a model has a batch dimension. GPUs and TPUs take several dimensions as they are,
    and under FSDP the partitioner exchanges less with them. A float32 matrix whose gradient devices
    add up (`sums_gradients`) has a float32 gradient of 16-bit operands.
    """
    if sums_gradients(shard) and w.dtype == jnp.float32 and x.dtype.itemsize < 4:
        return _summed_product(equation, precision, x, w)
    w = w.astype(x.dtype)
    if shard.devices[0] == "cpu":
        return cpu.product(equation, x, w, shard, precision)
    return jnp.einsum(equation, x, w, precision=precision)


def sums_gradients(shard: Shard) -> bool:
    """Whether devices add up gradients, each of them those of its own rows.

    These sums are in float32 over every axis. Over "fsdp" the partitioner sends a gradient in the
    type that a product or a sum gives it, so that 16 bits would be rounded by each device of a
    ring, and over "data" before it is sent.
    """
    mesh = shard.mesh
    return mesh is not None and mesh.size > mesh.shape.get("model", 1)


def after_sums(x: T, w: PyTree, shard: Shard) -> tuple[T, PyTree]:
    """Return both. In loops on GPUs with fsdp, x's cotangent waits for w's summed gradients."""
    fsdp = 1 if shard.mesh is None else shard.mesh.shape.get("fsdp", 1)
    waits = shard.devices[0] == "gpu" and fsdp > 1 and not remat.are_written_out()
    after: tuple[T, PyTree] = _after_sums(x, w) if waits else (x, w)
    return after


@jax.custom_vjp
def _after_sums(x: T, w: PyTree) -> tuple[T, PyTree]:
    """Order the exchanges of a layer's gradients.

    XLA sends those of a round of a loop in an order of its own, and nothing hides the last of them.
    With the largest done before attention's derivatives, the last is a smaller one. Layers that are
    written out have no such end, and wait longer with it.
    """
    return x, w


def _after_sums_forward(x: PyTree, w: PyTree) -> tuple[Any, list[Any]]:
    is_trained = [() if leaf.perturbed else None for leaf in jax.tree.leaves(w)]  # static
    return jax.tree.map(lambda leaf: leaf.value, (x, w)), is_trained


def _after_sums_backward(is_trained: list[Any], cotangents: tuple[Any, PyTree]) -> Any:
    """Frozen weights have no gradient to wait for, and get none. None is a zero."""
    dx, dw = jax.tree.map(lambda leaf: None if isinstance(leaf, SymbolicZero) else leaf, cotangents)
    leaves, tree = jax.tree.flatten(dw, is_leaf=lambda leaf: leaf is None)
    pairs = zip(is_trained, leaves, strict=True)
    leaves = [None if trained is None else leaf for trained, leaf in pairs]
    return jax.lax.optimization_barrier((dx, jax.tree.unflatten(tree, leaves)))


_after_sums.defvjp(_after_sums_forward, _after_sums_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_product(
    equation: str, precision: jax.lax.Precision | None, x: Array, w: Array
) -> Array:
    return jnp.einsum(equation, x, w.astype(x.dtype), precision=precision)


def _summed_forward(
    equation: str, precision: jax.lax.Precision | None, x: Array, w: Array
) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return jnp.einsum(equation, x, w, precision=precision), (x, w)


def _summed_backward(
    equation: str,
    precision: jax.lax.Precision | None,
    factors: tuple[Array, Array],
    dy: Array,
) -> tuple[Array, Array]:
    x, w = factors
    operands, of_y = equation.split("->")
    of_x, of_w = operands.split(",")
    dx = jnp.einsum(f"{of_y},{of_w}->{of_x}", dy, w, precision=precision)
    left, right = (of_y, of_x) if of_w[0] in of_y else (of_x, of_y)
    factor_of = {of_x: x, of_y: dy}
    dw = jnp.einsum(
        f"{left},{right}->{of_w}",
        factor_of[left],
        factor_of[right],
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return dx, dw


_summed_product.defvjp(_summed_forward, _summed_backward)


def biases(b: Array, y: Array, shard: Shard) -> Array:
    """Broadcast a bias to y's shape and dtype. Its gradient is summed up in its own dtype."""
    if sums_gradients(shard):
        return spread(b, y.shape, shard).astype(y.dtype)
    return spread(b.astype(y.dtype), y.shape, shard)


def product_in_float32(equation: str, x: Array, w: Array, shard: Shard) -> Array:
    """Compute the einsum of activations and one matrix of their dtype, summed up in float32.

    JAX's own derivative of it multiplies in float32, the matrix and the activations widened. On
    GPUs and TPUs the cotangent of 16-bit products is rounded to their dtype first.
    """
    if shard.devices[0] == "cpu" or x.dtype == jnp.float32:
        return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32)
    return _narrow_product(equation, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_product(equation: str, x: Array, w: Array) -> Array:
    return jnp.einsum(equation, x, w, preferred_element_type=jnp.float32)


def _narrow_forward(equation: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _narrow_product(equation, x, w), (x, w)


def _narrow_backward(equation: str, factors: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = factors
    _, pull = jax.vjp(functools.partial(jnp.einsum, equation), x, w)
    gradients: tuple[Array, Array] = pull(dy.astype(x.dtype))
    return gradients


_narrow_product.defvjp(_narrow_forward, _narrow_backward)


def project(equation: str, x: Array, w: Array | Unmerged, shard: Shard) -> Array:
    """Compute `product` with a matrix. If it is adapted (`jaxtrain.nn.lora`), it is not merged."""
    if isinstance(w, Unmerged):
        return w.project(equation, x, functools.partial(product, shard=shard))
    return product(equation, x, w, shard)


def project_each(
    equation: str, x: Array, ws: Sequence[Array | Unmerged], shard: Shard
) -> list[Array]:
    """Compute `project` with each of several matrices.

    On GPUs and TPUs adapters of them read x once, since memory's bytes bind their products.
    """
    first, *others = ws
    if shard.devices[0] == "cpu" or not all(type(w) is type(first) for w in others):
        return [project(equation, x, w, shard) for w in ws]
    if isinstance(first, Unmerged):
        of_shard = functools.partial(product, shard=shard)
        return first.project_each(equation, x, others, of_shard)
    return [product(equation, x, w, shard) for w in ws if not isinstance(w, Unmerged)]


class TableParts(NamedTuple):
    """How a table is split while its rows are looked up, in names of mesh axes."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # that split the indices too, and exchange looked-up columns
    index_axis: int = 0  # dimension of the indices [B, T] that ``columns`` split
    # Whether looked-up rows are rounded before the parts are added up: they are one row and zeros.
    # XLA for CPUs fails at sums of bfloat16 over some mesh axes.
    rounds: bool = False


def lookup(
    w_vd: Array,
    index_bt: Array,
    shard: Shard,
    *,
    axes: Axes = ("vocab", "embed"),
    dtype: Any = None,
) -> Array:
    """Look up rows w[index], [B, T, D], of a table that is split over devices.

    Each device looks into its part of the table, and the parts are added up or put together. If the
    table's columns and the indices are split over the same devices, the table is gathered. If it
    has more rows than there are indices, each device looks up its columns of all their indices, and
    the results are exchanged. Then no device has the whole table, or its gradient.

    Args:
      dtype: of the result, rounded before it is sent. None = the table's.
    """
    parts = TableParts()
    if shard.mesh is not None and shard.mesh.size > 1:
        parts = _table_parts(shard, axes, w_vd.shape, index_bt.shape)
    look_up = functools.partial(_exchanged_rows if parts.columns else _rows, parts, dtype=dtype)
    w_axes = (axes[0], axes[1] if parts.columns else None)
    out = shard.spec((*index_bt.shape, w_vd.shape[1]), ("batch", "seq", None))
    arg_axes = (w_axes, ("batch", "seq"))
    return kernels.differentiable(shard, look_up, (w_vd, index_bt), arg_axes, out, constants=1)


def _table_parts(
    shard: Shard, axes: Axes, shape_vd: tuple[int, ...], shape_bt: tuple[int, ...]
) -> TableParts:
    (v, d), (b, t) = shape_vd, shape_bt
    rows = shard.names(axes[0], v)
    columns, index_axis = shared_columns(shard, axes[1], d, (b, t))
    n_own_indices = b * t // (shard.size("batch", b) * shard.size("seq", t))
    n_own_rows = v // shard.size(axes[0], v) if rows else v
    if n_own_indices > n_own_rows:
        columns = ()
    return TableParts(rows, columns, index_axis, rounds=shard.devices[0] == "gpu")


def _exchanged_rows(parts: TableParts, w_vd: Array, index_bt: Array, dtype: Any) -> Array:
    """Look up this device's columns of the indices of all devices that share them."""
    axis = parts.index_axis
    index_bt = jax.lax.all_gather(index_bt, parts.columns, axis=axis, tiled=True)
    columns_btd = _rows(parts, w_vd, index_bt, dtype)
    rows_btd: Array = jax.lax.all_to_all(
        columns_btd, parts.columns, split_axis=axis, concat_axis=2, tiled=True
    )
    return rows_btd


def _rows(parts: TableParts, w_vd: Array, index_bt: Array, dtype: Any) -> Array:
    dtype = dtype or w_vd.dtype
    if parts.rows:
        type_of_sum = dtype if parts.rounds else w_vd.dtype
        rows_btd = _rows_of_part(w_vd, index_bt, parts.rows, type_of_sum)
    else:
        rows_btd = jnp.take(w_vd, index_bt, axis=0)
    return rows_btd.astype(dtype)


def _rows_of_part(w_vd: Array, index_bt: Array, row_parts: tuple[str, ...], dtype: Any) -> Array:
    """Look up the rows that this device's part of the table has, and add up those of all parts."""
    n = w_vd.shape[0]
    own_bt = index_bt - jax.lax.axis_index(row_parts) * n
    inside = (own_bt >= 0) & (own_bt < n)
    rows_btd = jnp.take(w_vd, jnp.clip(own_bt, 0, n - 1), axis=0)
    own_btd = jnp.where(inside[..., None], rows_btd, 0).astype(dtype)
    sum_btd: Array = jax.lax.psum(own_btd, row_parts)
    return sum_btd


def shared_columns(
    shard: Shard, axis: str | None, d: int, shape_bt: tuple[int, int]
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that both the columns of a table and B or T of [B, T] are split over.

    Also returns which of the two it is. ``axis`` is the logical axis of the ``d`` columns.
    """
    column_parts = shard.names(axis, d)
    if column_parts:
        for i, (rows, size) in enumerate(zip(("batch", "seq"), shape_bt, strict=True)):
            if set(column_parts) <= set(shard.names(rows, size)):
                return column_parts, i
    return (), 0
