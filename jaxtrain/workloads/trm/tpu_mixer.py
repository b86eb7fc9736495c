"""The mixer over a row's tokens as one kernel of Pallas for TPUs, with its derivative.

XLA computes products over the 97 tokens of a board at an eighth of the peak of a TPU v5e, and
writes gate and values to memory. Here a row's states are in the chip's own memory from its
input to its result, next to the matrices, and tokens are columns of the left matrix:

    h = silu(w_gate x) (w_up x),  y = x + w_down h,  z = y / sqrt(mean_t(y^2) + eps)

The backward kernel computes them again from x. It adds up the gradients of the matrices over the
rows of a device in float32, and so they are added up over devices.

Shapes: B batch, T tokens, D embed, N inner width, 2 gate and up, P devices that split the rows.
"""

import functools
import logging
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.parallel import chips, kernels
from jaxtrain.types import Array, Axes, Shard

log = logging.getLogger("jaxtrain")
LANES = 128  # of a TPU's vector registers
ROWS = 8  # most of a step of the grid
BLOCKS = 6 << 20  # [bytes] of the blocks of two steps, of which one is moved while one is computed
VMEM = 32 << 20  # [bytes] that a kernel may take, if the chip has them
WIDE = 10  # float32 arrays [N, D] that the backward kernel holds at once
TALL = 6  # and [T, D]
SUMS = 3  # gradients of matrices, in float32, each with one that is moved
COPIES = 12  # of matrices in 16 bits, with those that are moved
# Share of all these bytes that libtpu needs: 20 MiB at 97 × 512 × 512, which it compiles in 14.
NEEDED = 0.7


class Form(NamedTuple):
    eps: float
    interpret: bool
    vmem: int = VMEM  # [bytes]


def fits(x_btd: Array, w_up_tcn: Array, shard: Shard) -> bool:
    """Tell whether the kernel takes these arrays on the devices of ``shard``."""
    _, t, d = x_btd.shape
    n = w_up_tcn.shape[2]
    is_whole = shard.size("mlp", n) == 1 and shard.size("seq", t) == 1
    fills_lanes = d % LANES == 0 and n % LANES == 0
    n_bytes = 4 * (WIDE * n + TALL * t) * d + (8 * SUMS + 2 * COPIES) * n * -(-t // LANES) * LANES
    platform, version = shard.devices
    is_for_tpus = platform == "tpu" and x_btd.dtype == jnp.bfloat16
    n_bytes += BLOCKS
    has_room = n_bytes <= VMEM and NEEDED * n_bytes <= chips.vmem(version, VMEM)
    return is_for_tpus and is_whole and fills_lanes and has_room


@functools.cache
def log_no_kernel(tokens: int, embed: int, inner: int, dtype: str) -> None:
    """Log once for each form that XLA mixes the tokens of a TPU's program."""
    log.info(
        "no kernel for TPUs mixes %d tokens of %d %s values with an inner width of %d on this mesh:"
        " XLA's own products are used, which write gate and values",
        tokens,
        embed,
        dtype,
        inner,
    )


def mix(
    w_up_tcn: Array,
    w_down_nt: Array,
    x_btd: Array,
    shard: Shard,
    *,
    eps: float,
    interpret: bool = False,
) -> Array:
    """Compute z [B, T, D] on each device's own rows. ``interpret`` runs it anywhere, slowly."""
    n_parts = shard.size("batch", x_btd.shape[0])
    # Each device has matrices of its own, whose float32 gradients are then added up.
    up_cnt, down_tn = (w.astype(jnp.float32) for w in (w_up_tcn.transpose(1, 2, 0), w_down_nt.T))
    w_pcnt = jnp.broadcast_to(up_cnt, (n_parts, *up_cnt.shape))
    w_ptn = jnp.broadcast_to(down_tn, (n_parts, *down_tn.shape))
    rows: Axes = ("batch", None, None)
    axes: list[Axes] = [rows, ("batch", None, None, None), rows]
    vmem = chips.vmem(shard.devices[1], VMEM)
    run = functools.partial(_mix, Form(eps, interpret, vmem))
    return kernels.kernel(shard, run, [x_btd, w_pcnt, w_ptn], axes, shard.spec(x_btd.shape, rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(form: Form, x_btd: Array, w_pcnt: Array, w_ptn: Array) -> Array:
    """Compute z of a device's rows with its own matrices, of which P is 1."""
    from jax.experimental import pallas as pl

    gate_nt, up_nt, down_tn = _matrices(x_btd, w_pcnt, w_ptn)
    z_btd: Array = pl.pallas_call(
        functools.partial(_forward, form.eps),
        out_shape=jax.ShapeDtypeStruct(x_btd.shape, x_btd.dtype),
        **_how(form, x_btd, (x_btd,), (gate_nt, up_nt, down_tn), products=3),
        out_specs=_of_rows(x_btd),
        name="mixer_forward",
    )(x_btd, gate_nt, up_nt, down_tn)
    return z_btd


def _matrices(x_btd: Array, w_pcnt: Array, w_ptn: Array) -> list[Array]:
    """Return gate, up and down in the type of x."""
    return [w.astype(x_btd.dtype) for w in (*w_pcnt[0], w_ptn[0])]


def _mix_forward(form: Form, *args: Array) -> tuple[Array, tuple[Array, ...]]:
    return _mix(form, *args), args


def _mix_backward(
    form: Form, args: tuple[Array, Array, Array], dz_btd: Array
) -> tuple[Array, Array, Array]:
    from jax.experimental import pallas as pl

    x_btd, w_pcnt, w_ptn = args
    gate_nt, up_nt, down_tn = _matrices(x_btd, w_pcnt, w_ptn)
    matrices = (gate_nt, up_nt, down_tn, gate_nt.T, up_nt.T, down_tn.T)
    of_matrix = [gate_nt, up_nt, down_tn.T]
    dx_btd, dgate_nt, dup_nt, ddown_nt = pl.pallas_call(
        functools.partial(_backward, form.eps),
        out_shape=[
            jax.ShapeDtypeStruct(x_btd.shape, x_btd.dtype),
            *(jax.ShapeDtypeStruct(matrix.shape, jnp.float32) for matrix in of_matrix),
        ],
        out_specs=[_of_rows(x_btd), *map(_whole, of_matrix)],
        **_how(form, x_btd, (x_btd, dz_btd), matrices, products=8),
        name="mixer_backward",
    )(x_btd, dz_btd, *matrices)
    return dx_btd, jnp.stack([dgate_nt, dup_nt])[None], ddown_nt.T[None]


_mix.defvjp(_mix_forward, _mix_backward)


def _how(
    form: Form,
    x_btd: Array,
    of_rows: tuple[Array, ...],
    matrices: tuple[Array, ...],
    *,
    products: int,
) -> dict[str, Any]:
    """Return the arguments of a kernel's call that both share. Products: each of N T D."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    b, t, d = x_btd.shape
    n = matrices[0].shape[0]
    # the backward kernel adds up over rows
    order: Literal["parallel", "arbitrary"] = "parallel" if products == 3 else "arbitrary"
    return dict(
        grid=(b // _rows(x_btd.shape, x_btd.dtype.itemsize),),
        in_specs=[*map(_of_rows, of_rows), *map(_whole, matrices)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(order,), vmem_limit_bytes=form.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * b * t * d * n,
            transcendentals=b * d * n,
            bytes_accessed=(len(of_rows) + 1) * x_btd.size * x_btd.dtype.itemsize,
        ),
        interpret=form.interpret,
    )


def _rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many rows a step of the grid has: a divisor of all rows."""
    b, t, d = shape
    of_row = 2 * SUMS * -(-t // 16) * 16 * d * itemsize  # x, its cotangent and its gradient
    most = max(1, min(ROWS, BLOCKS // of_row))
    return next(n for n in range(most, 0, -1) if b % n == 0)


def _of_rows(x_btd: Array) -> Any:
    from jax.experimental import pallas as pl

    _, t, d = x_btd.shape
    return pl.BlockSpec((_rows(x_btd.shape, x_btd.dtype.itemsize), t, d), lambda i: (i, 0, 0))


def _whole(matrix: Array) -> Any:
    from jax.experimental import pallas as pl

    return pl.BlockSpec(matrix.shape, lambda i: (0, 0))


def _forward(eps: float, x_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, z_ref: Any) -> None:
    def row(i: Array, _: None) -> None:
        x_td = x_ref[i]
        gate_nd, value_nd = _times(gate_ref[...], x_td), _times(up_ref[...], x_td)
        h_nd = (gate_nd * jax.nn.sigmoid(gate_nd) * value_nd).astype(x_td.dtype)
        y_td = x_td.astype(jnp.float32) + _times(down_ref[...], h_nd)
        z_ref[i] = (y_td * _scale(y_td, eps)).astype(z_ref.dtype)

    jax.lax.fori_loop(0, x_ref.shape[0], row, None)


def _backward(eps: float, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    x_ref, dz_ref, gate_ref, up_ref, down_ref, gate_tn_ref, up_tn_ref, down_nt_ref = refs[:8]
    dx_ref, sums = refs[8], refs[9:]

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        for ref in sums:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    def row(i: Array, _: None) -> None:
        x_td, dz_td = x_ref[i], dz_ref[i].astype(jnp.float32)
        dtype = x_td.dtype
        gate_nd, value_nd = _times(gate_ref[...], x_td), _times(up_ref[...], x_td)
        sigmoid_nd = jax.nn.sigmoid(gate_nd)
        silu_nd = gate_nd * sigmoid_nd
        h_nd = (silu_nd * value_nd).astype(dtype)
        y_td = x_td.astype(jnp.float32) + _times(down_ref[...], h_nd)
        scale_1d = _scale(y_td, eps)
        z_td = y_td * scale_1d
        dy_td = scale_1d * (dz_td - z_td * (z_td * dz_td).mean(0, keepdims=True))
        narrow_dy_td = dy_td.astype(dtype)
        dh_nd = _times(down_nt_ref[...], narrow_dy_td)
        slope_nd = sigmoid_nd + silu_nd * (1 - sigmoid_nd)
        dgate_nd = (dh_nd * value_nd * slope_nd).astype(dtype)
        dvalue_nd = (dh_nd * silu_nd).astype(dtype)
        dx_td = dy_td + _times(gate_tn_ref[...], dgate_nd) + _times(up_tn_ref[...], dvalue_nd)
        dx_ref[i] = dx_td.astype(dx_ref.dtype)
        factors = ((dgate_nd, x_td), (dvalue_nd, x_td), (h_nd, narrow_dy_td))
        for sum_ref, (left_nd, right_td) in zip(sums, factors, strict=True):
            sum_ref[...] += _times_turned(left_nd, right_td)

    jax.lax.fori_loop(0, x_ref.shape[0], row, None)


def _scale(y_td: Array, eps: float) -> Array:
    """Return 1 / sqrt(mean_t(y^2) + eps), [1, D]."""
    return jax.lax.rsqrt((y_td * y_td).mean(0, keepdims=True) + eps)


def _times(a: Array, b: Array) -> Array:
    """Multiply two matrices, with a float32 result."""
    axes = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _times_turned(a: Array, b: Array) -> Array:
    """Multiply a matrix by the transpose of another, with a float32 result."""
    axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
