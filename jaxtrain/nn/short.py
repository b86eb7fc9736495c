"""Attention for TPUs over short rows: all scores of a row and head stay on the chip.

A kernel of Pallas with a grid over rows and the heads that fill the 128 lanes. It writes its
result and nothing else. The backward kernel computes the scores again from q, k and v. The kernels
of `splash` also write their sums, of which most is padding for rows as short as these, and take
only multiples of 128 tokens.

Two heads of 64 values are multiplied as one of 128, with zeros in the place of the other head. A
matrix unit of 128 × 128 takes as long for 64 values as for 128, and no head is moved to other
lanes.

Shapes: B batch, T queries and S keys, which are as many, H heads, G key/value heads, K head
dimension, P = H × K or G × K, L lanes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.parallel import chips
from jaxtrain.types import Array

LANES = 128  # of a TPU's vector registers
LONGEST = 640  # [tokens] of a row whose scores fit into VMEM with their gradients
ROWS = 8  # most of a step of the grid
BLOCKS = 6 << 20  # [bytes] of the blocks of two steps, of which one is moved while one is computed
VMEM = 32 << 20  # [bytes] that a kernel may take, if the chip has them
SCORES = 8  # float32 arrays [T, T] that the backward kernel holds at once
HIDDEN = -1e30  # score of a key that a query does not see
OPERANDS = 7  # of the backward kernel: q, k, v, dy, dq, dk and dv


class Form(NamedTuple):
    head_dim: int
    group: int  # heads of queries that share one of keys
    causal: bool
    window: int
    interpret: bool
    vmem: int = VMEM  # [bytes]


def short_fits(queries: tuple[int, ...], keys: tuple[int, ...], version: str = "") -> bool:
    """Tell whether the kernel takes queries [B, T, H, K] and keys [B, S, G, K].

    ``version``: of the TPU, as "v5e". "" = unknown.
    """
    _, t, h, k = queries
    fills_lanes = LANES % k == 0 and k >= 32 and h * k % LANES == 0
    # with a margin for the sums, of two operands in float32
    n_bytes = 4 * SCORES * t * -(-t // LANES) * LANES + BLOCKS + BLOCKS // 3
    has_room = t <= LONGEST and n_bytes <= chips.vmem(version, VMEM)
    return has_room and fills_lanes and (k == LANES or keys[2] == h)


def short(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    version: str = "",
    interpret: bool = False,
) -> Array:
    """Call the kernel for TPUs. ``interpret`` runs it anywhere, slowly.

    ``version``: of the TPU, as "v5e". "" = unknown.
    """
    b, t, h, k = q_bthk.shape
    # so that the activations which the backward pass reads have no padded heads
    flat = [x.reshape(b, t, -1) for x in (q_bthk, k_bsgk, v_bsgk)]
    vmem = chips.vmem(version, VMEM)
    form = Form(k, h // k_bsgk.shape[2], causal, window, interpret, vmem)
    y_btp: Array = _attend(form, *flat)
    return y_btp.reshape(b, t, h, k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, q_btp: Array, k_bsp: Array, v_bsp: Array) -> Array:
    [y_btp] = _call(_forward, form, (q_btp, k_bsp, v_bsp), (0,))
    return y_btp


def _attend_forward(form: Form, *qkv: Array) -> tuple[Array, tuple[Array, ...]]:
    return _attend(form, *qkv), qkv


def _attend_backward(form: Form, qkv: tuple[Array, ...], dy_btp: Array) -> tuple[Array, ...]:
    return tuple(_call(_backward, form, (*qkv, dy_btp), (0, 1, 1)))


_attend.defvjp(_attend_forward, _attend_backward)


def _call(
    kernel: Any, form: Form, args: tuple[Array, ...], results: tuple[int, ...]
) -> list[Array]:
    """Call a kernel, with results of the forms of these arguments."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (b, t, p), dtype = args[0].shape, args[0].dtype
    assert p % (LANES * form.group) == 0, f"heads of {p} values do not fill lanes"
    rows = _rows(b, t, dtype.itemsize)
    of_query = pl.BlockSpec((rows, t, LANES), lambda i, j, n: (i, 0, j * form.group + n))
    of_key = pl.BlockSpec((rows, t, LANES), lambda i, j, n: (i, 0, j))
    blocks = [of_query, of_key, of_key, of_query][: len(args)]
    arrays = [*args, *(args[place] for place in results)]
    sums = [pltpu.VMEM((rows, t, LANES), jnp.float32)] * (len(results) - 1)
    # q k and p v forward; backward q k, and two for the gradients of each
    products = 2 if len(results) == 1 else 5
    out: list[Array] = pl.pallas_call(
        functools.partial(kernel, form),
        grid=(b // rows, p // LANES // form.group, form.group),
        in_specs=blocks,
        out_specs=[blocks[place] for place in results],
        out_shape=[jax.ShapeDtypeStruct(args[place].shape, dtype) for place in results],
        scratch_shapes=sums,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=form.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * b * p * t * t,
            transcendentals=b * t * t * p // form.head_dim,
            bytes_accessed=sum(x.size for x in arrays) * dtype.itemsize,
        ),
        interpret=form.interpret,
        name=f"short_attention{kernel.__name__}",
    )(*args)
    return out


def _rows(b: int, t: int, itemsize: int) -> int:
    """Return how many rows a step of the grid has: a divisor of all rows."""
    of_row = 2 * OPERANDS * -(-t // 16) * 16 * LANES * itemsize
    most = max(1, min(ROWS, BLOCKS // of_row))
    return next(n for n in range(most, 0, -1) if b % n == 0)


def _forward(form: Form, q_ref: Any, k_ref: Any, v_ref: Any, y_ref: Any) -> None:
    def row(i: Array, _: None) -> None:
        q_tl, k_sl, v_sl = q_ref[i], k_ref[i], v_ref[i]
        seen_ts = _seen(form, q_tl.shape[0], query_axis=0)
        y_tl = jnp.zeros(q_tl.shape, jnp.float32)
        for lanes in _heads(form, q_tl.shape):
            s_ts = _product(_of_head(q_tl, lanes), k_sl, "tl,sl->ts") * form.head_dim**-0.5
            if seen_ts is not None:
                s_ts = jnp.where(seen_ts, s_ts, HIDDEN)
            p_ts = jnp.exp(s_ts - s_ts.max(1, keepdims=True))
            total_t1 = p_ts.sum(1, keepdims=True)
            of_head_tl = _product(p_ts.astype(v_sl.dtype), v_sl, "ts,sl->tl") / total_t1
            y_tl = jnp.where(lanes, of_head_tl, y_tl)
        y_ref[i] = y_tl.astype(y_ref.dtype)

    _for_each_row(row, q_ref.shape[0])


def _backward(form: Form, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    q_ref, k_ref, v_ref, dy_ref, dq_ref, dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = refs
    head_of_group = pl.program_id(2)

    @pl.when(head_of_group == 0)
    def _() -> None:
        dk_sum_ref[...] = jnp.zeros(dk_sum_ref.shape, jnp.float32)
        dv_sum_ref[...] = jnp.zeros(dv_sum_ref.shape, jnp.float32)

    def row(i: Array, _: None) -> None:
        q_tl, k_sl, v_sl, dy_tl = q_ref[i], k_ref[i], v_ref[i], dy_ref[i]
        seen_st = _seen(form, q_tl.shape[0], query_axis=1)
        dq_tl = jnp.zeros(q_tl.shape, jnp.float32)
        dk_sl, dv_sl = dk_sum_ref[i], dv_sum_ref[i]
        # Queries are columns, so that all sums over keys are sums of rows.
        for lanes in _heads(form, q_tl.shape):
            q_of_head_tl, dy_of_head_tl = _of_head(q_tl, lanes), _of_head(dy_tl, lanes)
            s_st = _product(k_sl, q_of_head_tl, "sl,tl->st") * form.head_dim**-0.5
            if seen_st is not None:
                s_st = jnp.where(seen_st, s_st, HIDDEN)
            p_st = jnp.exp(s_st - s_st.max(0, keepdims=True))
            p_st /= p_st.sum(0, keepdims=True)
            dp_st = _product(v_sl, dy_of_head_tl, "sl,tl->st")
            mean_1t = (p_st * dp_st).sum(0, keepdims=True)
            ds_st = (p_st * (dp_st - mean_1t) * form.head_dim**-0.5).astype(q_tl.dtype)
            dv_sl += _product(p_st.astype(q_tl.dtype), dy_of_head_tl, "st,tl->sl")
            dk_sl += _product(ds_st, q_of_head_tl, "st,tl->sl")
            dq_tl += _product(ds_st, _of_head(k_sl, lanes), "st,sl->tl")
        dq_ref[i] = dq_tl.astype(dq_ref.dtype)
        dk_sum_ref[i], dv_sum_ref[i] = dk_sl, dv_sl

    _for_each_row(row, q_ref.shape[0])

    @pl.when(head_of_group == form.group - 1)
    def _() -> None:
        dk_ref[...] = dk_sum_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)


def _for_each_row(row: Any, n: int) -> None:
    jax.lax.fori_loop(0, n, row, None)


def _heads(form: Form, shape: tuple[int, ...]) -> list[Array]:
    """Return the lanes of each head, bool [T, L]."""
    lane_tl = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    k = form.head_dim
    return [(lane_tl >= first) & (lane_tl < first + k) for first in range(0, LANES, k)]


def _of_head(x_tl: Array, lanes: Array) -> Array:
    """Set the lanes of other heads to 0. In float32, since v5e selects no 16-bit numbers."""
    return jnp.where(lanes, x_tl.astype(jnp.float32), 0).astype(x_tl.dtype)


def _product(a: Array, b: Array, equation: str) -> Array:
    """Multiply two matrices by an equation such as "ts,sl->tl", with a float32 result."""
    left, right, result = equation.replace("->", ",").split(",")
    [summed] = set(left) - set(result)
    axes = (((left.index(summed),), (right.index(summed),)), ((), ()))
    # 16-bit operands are multiplied exactly, and float32 in as many passes as XLA takes
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _seen(form: Form, t: int, *, query_axis: int) -> Array | None:
    """Tell which keys a query sees, bool [T, T]. None = all."""
    if not (form.causal or form.window):
        return None
    query, key = (
        jax.lax.broadcasted_iota(jnp.int32, (t, t), axis) for axis in (query_axis, 1 - query_axis)
    )
    back = query - key
    seen = back >= 0 if form.causal else jnp.ones((t, t), bool)
    if form.window:
        seen &= jnp.abs(back) < form.window
    return seen
