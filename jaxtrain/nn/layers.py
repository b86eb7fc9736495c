"""Norms, rotary positions, products with matrices, and rows of a table split over devices."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Section
from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Axes, Shard, Unmerged
from loaders.io import checks

# a score that no softmax sees; -inf would make nan of an empty row
NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclass(frozen=True)
class Rope(Section):
    """Rotary positions. A factor above 1 stretches them over a longer context, as in Llama 3."""

    on_resume = checks.OnResume(checks.FUNCTION)

    theta: float = 1e4  # [1] longest wavelength over 2 pi, of the pair that turns slowest
    # [1] by which wavelengths much longer than the original context are stretched; 1 = none
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
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
    return scaled(y, scale, shard).astype(x.dtype)


def layer_norm(
    x: Array, scale: Array, bias: Array | None, eps: float, shard: Shard | None = None
) -> Array:
    """Compute (x - mean) / sqrt(var + eps) scale + bias over the last axis (Ba et al. 2016)."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = scaled(y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps), scale, shard)
    return (y if bias is None else y + spread(bias, y.shape, shard)).astype(x.dtype)


def spread(x: Array, shape: tuple[int, ...], shard: Shard | None) -> Array:
    """Broadcast x over the dimensions that ``shape`` has before its own, to every row.

    For CPUs its gradient, a sum over rows, is a product with ones. XLA turns the sum into windows
    there, which takes several times as long as reading the rows.

    Args:
      shard: None = a few rows.
    """
    return (
        _spread(shape, x)
        if _by_ones(shape[: len(shape) - x.ndim], shard)
        else jnp.broadcast_to(x, shape)
    )


def scaled(y: Array, scale: Array, shard: Shard | None) -> Array:
    """Multiply every row of y by ``scale``. For CPUs its gradient is a product, as in `spread`."""
    if _by_ones(y.shape[: y.ndim - scale.ndim], shard):
        return _scaled(y, scale)
    return y * jnp.broadcast_to(scale, y.shape)


def _by_ones(rows: tuple[int, ...], shard: Shard | None) -> bool:
    return (
        shard is not None
        and shard.devices[0] == "cpu"
        and (len(rows) < 2 or shard.size("seq", rows[1]) == 1)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(shape: tuple[int, ...], x: Array) -> Array:
    return jnp.broadcast_to(x, shape)


def _sum_of_rows(shape: tuple[int, ...], x: Array, dy: Array) -> tuple[Array]:
    dy = dy.reshape(math.prod(shape[: len(shape) - x.ndim]), -1)
    ones = jnp.ones(len(dy), dy.dtype)
    return (jnp.dot(ones, dy, preferred_element_type=jnp.float32).astype(x.dtype).reshape(x.shape),)


_spread.defvjp(lambda shape, x: (_spread(shape, x), x), _sum_of_rows)


@jax.custom_vjp
def _scaled(y: Array, scale: Array) -> Array:
    """Multiply with a gradient that keeps ``scale`` itself, not rows of it."""
    return y * jnp.broadcast_to(scale, y.shape)


def _gradients_of_scaled(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    y, scale = kept
    return dy * jnp.broadcast_to(scale, dy.shape), *_sum_of_rows(dy.shape, scale, dy * y)


_scaled.defvjp(lambda y, scale: (_scaled(y, scale), (y, scale)), _gradients_of_scaled)


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
    below = 0.5 * jax.lax.erfc(-x * 2**-0.5)
    return x * below, dx * (below + x * jnp.exp(-0.5 * x * x) * (2 * math.pi) ** -0.5)


def rope_angles(rope: Rope, position_bt: Array, head_dim: int) -> tuple[Array, Array]:
    """Return cos and sin [B, T, 1, K / 2] of the angles t theta^(-2 i / K) (Su et al. 2021).

    A factor divides the frequencies f with original × f / 2 pi < low, leaves those with > high, and
    interpolates between (Llama 3.1, Grattafiori et al. 2024).
    """
    f = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if rope.factor != 1:
        turns = rope.original * f / (2 * math.pi)
        keep = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
        f = f * keep + f / rope.factor * (1 - keep)
    angle_btk = position_bt[..., None].astype(jnp.float32) * jnp.asarray(f, jnp.float32)[None, None]
    return jnp.cos(angle_btk)[:, :, None], jnp.sin(angle_btk)[:, :, None]


def rotate(x_bthk: Array, cos_sin: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + K / 2)."""
    a, b = jnp.split(x_bthk.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_sin
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_bthk.dtype)


def product(
    equation: str, x: Array, w: Array, shard: Shard, *, precision: jax.lax.Precision | None = None
) -> Array:
    """Compute the einsum of activations and one matrix, in the activations' dtype.

    No product of a model has a batch dimension. For CPUs the rows, the contracted dimensions and
    the others become one dimension each. Else gradients that contract over several dimensions (B
    and T) are computed after writing both operands out, transposed. With a part of a row on a
    device (a split sequence), that would exchange tokens. GPUs and TPUs take several dimensions as
    they are, and under FSDP the partitioner exchanges less with them.
    """
    w = w.astype(x.dtype)
    (of_x, of_w), of_y = (left := equation.split("->"))[0].split(","), left[1]
    rows, inner = (tuple(i for i in of_x if (i in of_w) == shared) for shared in (False, True))
    outer = tuple(i for i in of_w if i not in inner)
    whole = len(rows) < 2 or shard.size("seq", x.shape[1]) == 1
    if (
        shard.devices[0] != "cpu"
        or (*rows, *inner) != tuple(of_x)
        or (*rows, *outer) != tuple(of_y)
        or not whole
    ):
        return jnp.einsum(equation, x, w, precision=precision)
    size = dict(zip(of_x + of_w, x.shape + w.shape, strict=True))
    n_inner = math.prod(size[i] for i in inner)
    first = (*inner, *outer) == tuple(of_w)
    if not first and (*outer, *inner) != tuple(of_w):
        return jnp.einsum(equation, x, w, precision=precision)
    w = w.reshape(n_inner, -1) if first else w.reshape(-1, n_inner)
    y = _multiply(0 if first else 1, precision, x.reshape(-1, n_inner), w)
    return y.reshape(*(size[i] for i in (*rows, *outer)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(axis: int, precision: jax.lax.Precision | None, x_ni: Array, w: Array) -> Array:
    """Multiply x by w, over w's dimension ``axis``, for CPUs.

    In the gradient, a product of N rows' transposes is up to twice as fast with the narrower array
    on its left. The barrier keeps XLA from making the slow product of the result's transpose.
    """
    return jax.lax.dot_general(x_ni, w, (((1,), (axis,)), ((), ())), precision)


def _multiply_forward(
    axis: int, precision: jax.lax.Precision | None, x_ni: Array, w: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _multiply(axis, precision, x_ni, w), (x_ni, w)


def _multiply_backward(
    axis: int, precision: jax.lax.Precision | None, kept: tuple[Array, Array], dy_no: Array
) -> tuple[Array, Array]:
    x_ni, w = kept
    dx_ni = jax.lax.dot_general(dy_no, w, (((1,), (1 - axis,)), ((), ())), precision)
    left, right = (x_ni, dy_no) if axis == 0 else (dy_no, x_ni)  # in the order of w's dimensions
    rows = (((0,), (0,)), ((), ()))
    if left.shape[1] <= right.shape[1]:
        return dx_ni, jax.lax.dot_general(left, right, rows, precision)
    return dx_ni, jax.lax.optimization_barrier(jax.lax.dot_general(right, left, rows, precision)).T


_multiply.defvjp(_multiply_forward, _multiply_backward)


def project(equation: str, x: Array, w: Array | Unmerged, shard: Shard) -> Array:
    """Compute `product` with a matrix. If it is adapted (`jaxtrain.nn.lora`), it is not merged."""
    if isinstance(w, Unmerged):
        return w.project(equation, x, lambda equation, x, w: product(equation, x, w, shard))
    return product(equation, x, w, shard)


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
    v, d = w_vd.shape
    b, t = index_bt.shape
    names, (columns, split) = shard.names(axes[0], v), shared_columns(shard, axes[1], d, (b, t))
    here = b * t // (shard.size("batch", b) * shard.size("seq", t))
    if here > v // (shard.size(axes[0], v) if names else 1):
        columns = ()

    def local(w_vd: Array, index_bt: Array) -> Array:
        if columns:
            index_bt = jax.lax.all_gather(index_bt, columns, axis=split, tiled=True)
        if names:
            n = w_vd.shape[0]
            own_bt = index_bt - jax.lax.axis_index(names) * n
            inside = (own_bt >= 0) & (own_bt < n)
            rows_btd = jnp.take(w_vd, jnp.clip(own_bt, 0, n - 1), axis=0)
            # In the table's type: XLA for CPUs fails at sums of bfloat16 over some mesh axes.
            rows_btd = jax.lax.psum(jnp.where(inside[..., None], rows_btd, 0), names)
        else:
            rows_btd = jnp.take(w_vd, index_bt, axis=0)
        rows_btd = rows_btd.astype(dtype or w_vd.dtype)
        if columns:
            rows_btd = jax.lax.all_to_all(
                rows_btd, columns, split_axis=split, concat_axis=2, tiled=True
            )
        return rows_btd

    return kernels.differentiable(
        shard,
        local,
        (w_vd, index_bt),
        ((axes[0], axes[1] if columns else None), ("batch", "seq")),
        shard.spec((b, t, d), ("batch", "seq", None)),
        constants=1,
    )


def shared_columns(
    shard: Shard, axis: str | None, d: int, shape_bt: tuple[int, int]
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that both the columns of a table and B or T of [B, T] are split over.

    Also returns which of the two it is. ``axis`` is the logical axis of the ``d`` columns.
    """
    names = shard.names(axis, d)
    for i, (rows, size) in enumerate(zip(("batch", "seq"), shape_bt, strict=True)):
        if names and set(names) <= set(shard.names(rows, size)):
            return names, i
    return (), 0
