"""Everything that exists for CPUs alone: other forms of a few computations, with the same results.

XLA compiles these forms to faster programs for CPUs (docs/results/cpu-steps.md). The functions that
call them ask for the platform in one line. A program for GPUs or TPUs has none of them.

Shapes: N rows, I contracted and O other numbers of a matrix. Of attention: B batch, T queries,
S keys, H heads, G key/value heads, R = H / G, K head dimension. X = R × T are the queries of a
group's heads, one head after the other.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn import NEVER
from jaxtrain.types import Array, Mean, PyTree, Shard

Precision = jax.lax.Precision | None
NO_BATCH: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # dimensions, of a `dot_general`

# --- Vectors that are added to rows, or multiplied by them -------------------------------------


def spread(x: Array, shape: tuple[int, ...], shard: Shard) -> Array:
    """Broadcast x to every row. Its gradient, a sum over rows, is a product with ones.

    XLA turns the sum into windows, which takes several times as long as reading the rows.
    """
    n_row_axes = len(shape) - x.ndim
    if has_whole_rows(shape[:n_row_axes], shard):
        return _spread(shape, x)
    return jnp.broadcast_to(x, shape)


def scaled(y: Array, scale: Array, shard: Shard) -> Array:
    """Multiply every row of y by ``scale``. Its gradient is a product, as in `spread`."""
    n_row_axes = y.ndim - scale.ndim
    if has_whole_rows(y.shape[:n_row_axes], shard):
        return _scaled(y, scale)
    return _times(y, scale)


def has_whole_rows(rows: tuple[int, ...], shard: Shard) -> bool:
    """Whether no row [B, T, …] is split over devices along T."""
    return len(rows) < 2 or shard.size("seq", rows[1]) == 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(shape: tuple[int, ...], x: Array) -> Array:
    return jnp.broadcast_to(x, shape)


def _sum_of_rows(shape: tuple[int, ...], x: Array, dy: Array) -> tuple[Array]:
    n_row_axes = len(shape) - x.ndim
    n_rows = math.prod(shape[:n_row_axes])
    dy = dy.reshape(n_rows, -1)
    ones = jnp.ones(len(dy), dy.dtype)
    sums = jnp.dot(ones, dy, preferred_element_type=jnp.float32)
    dx = sums.astype(x.dtype)
    return (dx.reshape(x.shape),)


_spread.defvjp(lambda shape, x: (_spread(shape, x), x), _sum_of_rows)


def _times(y: Array, scale: Array) -> Array:
    rows = jnp.broadcast_to(scale, y.shape)
    return y * rows


@jax.custom_vjp
def _scaled(y: Array, scale: Array) -> Array:
    """Multiply with a gradient that keeps ``scale`` itself, not rows of it."""
    return _times(y, scale)


def _gradients_of_scaled(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    y, scale = residuals
    dx = _times(dy, scale)
    (d_scale,) = _sum_of_rows(dy.shape, scale, dy * y)
    return dx, d_scale


_scaled.defvjp(lambda y, scale: (_scaled(y, scale), (y, scale)), _gradients_of_scaled)

# --- Products ----------------------------------------------------------------------------------


def product(equation: str, x: Array, w: Array, shard: Shard, precision: Precision) -> Array:
    """Compute the einsum of activations and a matrix of the same dtype as one 2-d product.

    The rows, the contracted dimensions and the others become one dimension each. Otherwise
    gradients that contract over several dimensions (B and T) are computed after writing both
    operands out, transposed. With a part of a row on a device (a split sequence), the reshape would
    exchange tokens.
    """
    operands, of_y = equation.split("->")
    of_x, of_w = operands.split(",")
    rows = _without(of_x, of_w)
    outer = _without(of_w, of_x)
    inner = _without(of_x, rows)  # contracted
    is_matrix = of_w in (inner + outer, outer + inner)
    is_in_order = of_x == rows + inner and of_y == rows + outer
    has_whole = has_whole_rows(x.shape[: len(rows)], shard)
    if not (is_matrix and is_in_order and has_whole):
        return jnp.einsum(equation, x, w, precision=precision)
    size = dict(zip(of_x + of_w, x.shape + w.shape, strict=True))
    n_inner = math.prod(size[i] for i in inner)
    if of_w == inner + outer:
        axis = 0  # of w, that is contracted
        w = w.reshape(n_inner, -1)
    else:
        axis = 1
        w = w.reshape(-1, n_inner)
    x_ni = x.reshape(-1, n_inner)
    y_no = _multiply(axis, precision, x_ni, w)
    shape = [size[i] for i in rows + outer]
    return y_no.reshape(shape)


def _without(dimensions: str, excluded: str) -> str:
    """Return the letters of an einsum's operand that another one lacks."""
    return "".join(i for i in dimensions if i not in excluded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(axis: int, precision: Precision, x_ni: Array, w: Array) -> Array:
    """Multiply x by w, over w's dimension ``axis``.

    In the gradient, a product of N rows' transposes is up to twice as fast with the narrower array
    on its left. The barrier keeps XLA from making the slow product of the result's transpose.
    """
    contracted = ((1,), (axis,))
    return jax.lax.dot_general(x_ni, w, (contracted, NO_BATCH), precision)


def _multiply_forward(
    axis: int, precision: Precision, x_ni: Array, w: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _multiply(axis, precision, x_ni, w), (x_ni, w)


def _multiply_backward(
    axis: int, precision: Precision, residuals: tuple[Array, Array], dy_no: Array
) -> tuple[Array, Array]:
    x_ni, w = residuals
    contracted = ((1,), (1 - axis,))
    dx_ni = jax.lax.dot_general(dy_no, w, (contracted, NO_BATCH), precision)
    # in the order of w's dimensions
    left, right = x_ni, dy_no
    if axis == 1:
        left, right = dy_no, x_ni
    over_rows = (((0,), (0,)), NO_BATCH)
    if left.shape[1] <= right.shape[1]:
        dw = jax.lax.dot_general(left, right, over_rows, precision)
        return dx_ni, dw
    dw_transposed = jax.lax.dot_general(right, left, over_rows, precision)
    dw_transposed = jax.lax.optimization_barrier(dw_transposed)
    return dx_ni, dw_transposed.T


_multiply.defvjp(_multiply_forward, _multiply_backward)

# --- Attention ---------------------------------------------------------------------------------


@jax.custom_vjp
def heads_first(q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array) -> Array:
    """Compute softmax(q k^T / sqrt(K)) v, [B, T, H, K], over the keys of a mask [B or 1, T, S].

    Each query sees at least one key. All products have heads before places. If heads come after
    places, as in [B, T, H, K], XLA copies the operands, also the weights [T, S] of each head, and
    takes longer. Weights are divided by their sum after their product with the values, which has
    fewer numbers, and the backward pass keeps them undivided.

    It is for float32. The gradient takes the sum of weights times their derivatives from the
    result, which is too coarse in 16 bits.
    """
    return _attention_forward(q_bthk, k_bsgk, v_bsgk, mask_bts)[0]


def _attention_forward(
    q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array
) -> tuple[Array, tuple[Array, ...]]:
    g = k_bsgk.shape[2]
    scale = q_bthk.shape[-1] ** -0.5
    q_bgxk = _by_head(q_bthk, g)
    k_bgsk = _by_head(k_bsgk, g)
    x_bgxs = jnp.einsum("bgxk,bgsk->bgxs", q_bgxk, k_bgsk)
    x_bgxs *= scale
    x_bgxs = _masked(x_bgxs, mask_bts)
    x_max_bgx1 = x_bgxs.max(-1, keepdims=True)
    p_bgxs = jnp.exp(x_bgxs - x_max_bgx1)
    sum_bgx = p_bgxs.sum(-1)
    share_bgx = 1 / sum_bgx
    v_bgsk = _by_head(v_bsgk, g)
    y_bgxk = jnp.einsum("bgxs,bgsk->bgxk", p_bgxs, v_bgsk)
    y_bgxk *= share_bgx[..., None]
    y_bthk = _by_place(y_bgxk, q_bthk)
    return y_bthk, (q_bthk, k_bsgk, v_bsgk, y_bthk, p_bgxs, share_bgx)


def _attention_backward(residuals: tuple[Array, ...], dy_bthk: Array) -> tuple[Array | None, ...]:
    q_bthk, k_bsgk, v_bsgk, y_bthk, p_bgxs, share_bgx = residuals
    g = k_bsgk.shape[2]
    dy_bgxk = _by_head(dy_bthk, g)
    dy_bgxk *= share_bgx[..., None]
    y_bgxk = _by_head(y_bthk, g)
    dy_y_bgxk = dy_bgxk * y_bgxk
    delta_bgx = dy_y_bgxk.sum(-1)
    v_bgsk = _by_head(v_bsgk, g)
    dp_bgxs = jnp.einsum("bgxk,bgsk->bgxs", dy_bgxk, v_bgsk)
    delta_bgx1 = delta_bgx[..., None]
    dx_bgxs = p_bgxs * (dp_bgxs - delta_bgx1)
    scale = q_bthk.shape[-1] ** -0.5
    k_bgsk = _by_head(k_bsgk, g)
    dq_bgxk = jnp.einsum("bgxs,bgsk->bgxk", dx_bgxs, k_bgsk)
    dq_bgxk *= scale
    q_bgxk = _by_head(q_bthk, g)
    dk_bgsk = jnp.einsum("bgxs,bgxk->bgsk", dx_bgxs, q_bgxk)
    dk_bgsk *= scale
    dv_bgsk = jnp.einsum("bgxs,bgxk->bgsk", p_bgxs, dy_bgxk)
    dq_bthk = _by_place(dq_bgxk, q_bthk)
    dk_bsgk = _by_place(dk_bgsk, k_bsgk)
    dv_bsgk = _by_place(dv_bgsk, v_bsgk)
    return dq_bthk, dk_bsgk, dv_bsgk, None


heads_first.defvjp(_attention_forward, _attention_backward)


def _masked(x_bgxs: Array, mask_bts: Array) -> Array:
    """Set the scores of keys that a query does not see to `NEVER`."""
    b, g, _, _ = x_bgxs.shape
    _, t, s = mask_bts.shape
    x_bgrts = x_bgxs.reshape(b, g, -1, t, s)
    x_bgrts = jnp.where(mask_bts[:, None, None], x_bgrts, NEVER)
    return x_bgrts.reshape(x_bgxs.shape)


def _by_head(x_bthk: Array, g: int) -> Array:
    """Bring heads before places, [B, G, R × T, K]."""
    b, t, h, k = x_bthk.shape
    x_btgrk = x_bthk.reshape(b, t, g, h // g, k)
    x_bgrtk = x_btgrk.transpose(0, 2, 3, 1, 4)
    return x_bgrtk.reshape(b, g, -1, k)


def _by_place(x_bgxk: Array, like_bthk: Array) -> Array:
    """Bring places before heads again, [B, T, H, K]."""
    b, t, h, k = like_bthk.shape
    g = x_bgxk.shape[1]
    x_bgrtk = x_bgxk.reshape(b, g, h // g, t, k)
    x_btgrk = x_bgrtk.transpose(0, 3, 1, 2, 4)
    return x_btgrk.reshape(b, t, h, k)


# --- The update of one core ----------------------------------------------------------------------


def is_elementwise(opt_state: PyTree, params: PyTree) -> bool:
    """Whether each moment is floats of a parameter's shape. Others are not worth making twice."""
    shapes = {x.shape for x in jax.tree.leaves(params)}
    for x in jax.tree.leaves(opt_state):
        if x.ndim and x.shape not in shapes:
            return False
        if x.ndim and not jnp.issubdtype(x.dtype, jnp.floating):
            return False
    return True


def update_in_place(
    propose: Callable[[PyTree], tuple[PyTree, PyTree]],
    apply: Callable[[PyTree, Array], PyTree],
    measure: Callable[[PyTree], dict[str, Mean]],
    opt_state: PyTree,
    accepted: Array,
    *,
    due: Array | None,
    repeatable: bool,
) -> tuple[PyTree, PyTree, dict[str, Mean]]:
    """Write the norms, then the parameters, then the moments that the update reads.

    XLA for CPUs makes each output in a loop of its own. Without this order it copied the whole
    state in each step. Norms that nobody reads are left out.

    Args:
      propose: state of the optimizer -> updates, new state.
      apply: updates, whether they are accepted -> new parameters.
      measure: new parameters -> norms.
      due: whether the norms are read, bool []. None = always.
      repeatable: whether computing an update again costs less than keeping it.

    Returns:
      New parameters, new state of the optimizer, norms.
    """

    def measured() -> dict[str, Mean]:
        updates_to_measure = updates
        if repeatable:
            updates_to_measure, _ = propose(opt_state)
        new_params = apply(updates_to_measure, accepted)
        return measure(new_params)

    def unknown() -> dict[str, Mean]:
        shapes = jax.eval_shape(measured)
        nans: Mapping[str, Any] = jax.tree.map(_nan_like, shapes)
        return dict(nans)

    updates, _ = propose(opt_state)
    if due is None:
        norms = measured()
    else:
        norms = jax.lax.cond(due, measured, unknown)
    is_measured = _is_there(norms["update_norm"].total)
    params = apply(updates, accepted & is_measured)
    factor = _one_after(params)

    def wait(moment: Array) -> Array:
        if not moment.ndim:
            return moment
        waiting = moment * factor
        return waiting.astype(moment.dtype)

    after_params = jax.tree.map(wait, opt_state)
    _, new_state = propose(after_params)
    return params, new_state, norms


def _one_after(params: PyTree) -> Array:
    """Return 1, float32 [], of which XLA does not know that it is 1 before all are written."""
    are_written = []
    for x in jax.tree.leaves(params):
        if x.size:
            number = x.ravel()[0]
            are_written.append(_is_there(number))
    are_written.append(jnp.ones((), bool))
    # A sort, since XLA fuses other reductions into the loop of each moment, and all of them would
    # read all parameters. The program would grow with the square of the number of arrays.
    in_order = jnp.sort(jnp.stack(are_written))
    return in_order[0].astype(jnp.float32)


def _nan_like(x: jax.ShapeDtypeStruct) -> Array:
    return jnp.full(x.shape, jnp.nan, x.dtype)


def _is_there(x: Array) -> Array:
    """Return true, always, but data-dependent on x [], so XLA schedules its users after x."""
    n_bits = 8 * x.dtype.itemsize
    integer = np.dtype(f"uint{n_bits}")
    bits = jax.lax.bitcast_convert_type(x, integer)
    return (bits | 1) != 0
