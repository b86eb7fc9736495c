"""Cross-entropy over a large vocabulary whose logits are never whole.

Tokens are taken a chunk at a time. Each device has the logits of its part of the vocabulary (mesh
axes of "vocab") for its own tokens. The parts exchange the largest logit, the sum of exponentials
and the label's logit.

The columns of the matrix may be split over the tokens' own devices, as parameters are (fsdp). If it
then has more rows than these devices have tokens, they exchange columns for rows. Each computes the
logits of its rows for the tokens of all of them. No device has the whole matrix, or its gradient in
float32. Otherwise the matrix is gathered, and the parts of its gradient are summed.

The derivatives are computed along with the loss, so that no logit is computed twice. With
loss = sum_n w_n (lse_n + z lse_n^2 - (1 - s) x_n[label_n] - s mean_v x_nv) and p = exp(x - lse),

    d loss / d x_nv = w_n (p_nv (1 + 2 z lse_n) - (1 - s) [v = label_n] - s / V)

Shapes: B batch, T tokens of a row, N tokens, D embed, V vocabulary, C tokens of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.nn import NEVER
from jaxtrain.nn.layers import shared_columns
from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Axes, Shard


class Sums(NamedTuple):
    """Weighted sums over all tokens. Only ``loss`` has a derivative."""

    loss: Array  # cross-entropy (with smoothed labels, if they are) and z-loss
    cross_entropy: Array  # [nats]
    z: Array  # of lse^2, without its coefficient
    correct: Array  # tokens whose label has the largest logit, the first of equal ones


Grads = tuple[Array, ...]  # by x and by w; none unless they are asked for
State = tuple[Sums, Any]  # of the loop over chunks, with the gradient by w


class How(NamedTuple):
    """The settings that all tokens share."""

    z_loss: float
    smoothing: float
    chunk: int
    size: int
    axes: Axes


def cross_entropy(
    x_btd: Array,
    w_vd: Array,
    label_bt: Array,
    weight_bt: Array,
    shard: Shard,
    *,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    chunk: int = 1024,
    size: int | None = None,
    axes: Axes = ("vocab", None),
) -> Sums:
    """Sum weight × (-log softmax(w x)[label] + z_loss lse^2) with lse = log sum exp(w x).

    z_loss is of de Brébisson & Vincent (2016). Products are of ``x``'s dtype and summed in float32.
    ``w_vd`` is rounded to that dtype, and its gradient is not.

    Args:
      weight_bt: float32, 0 for tokens that do not count, which may have any label.
      smoothing: share of the target that is spread over the whole vocabulary, the label included.
      chunk: [tokens] on each device whose logits exist at the same time.
      size: rows of ``w_vd`` that are a vocabulary. The others fill it up, so that devices can share
        it.
      axes: logical axes of ``w_vd``, and of its gradient.
    """
    how = How(z_loss, smoothing, chunk, w_vd.shape[0] if size is None else size, axes)
    return _total(shard, how, x_btd, w_vd, label_bt, weight_bt)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(
    shard: Shard, how: How, x_btd: Array, w_vd: Array, label_bt: Array, weight_bt: Array
) -> Sums:
    return _run(shard, how, x_btd, w_vd, label_bt, weight_bt, grads=False)[0]


def _forward(shard: Shard, how: How, *args: Array) -> tuple[Sums, Grads]:
    return _run(shard, how, *args, grads=True)


def _backward(shard: Shard, how: How, grads: Grads, cotangent: Sums) -> tuple[Array | None, ...]:
    dx_btd, dw_vd = grads
    return (dx_btd * cotangent.loss).astype(dx_btd.dtype), dw_vd * cotangent.loss, None, None


_total.defvjp(_forward, _backward)


def _run(
    shard: Shard,
    how: How,
    x_btd: Array,
    w_vd: Array,
    label_bt: Array,
    weight_bt: Array,
    *,
    grads: bool,
) -> tuple[Sums, Grads]:
    z_loss, smoothing, chunk, v_used, (of_rows, of_columns) = how
    b, t, d = x_btd.shape
    v = w_vd.shape[0]
    vocab, rows = shard.names(of_rows, v), (*shard.names("batch", b), *shard.names("seq", t))
    columns, _ = shared_columns(shard, of_columns, d, (b, t))
    n_columns = shard.size(of_columns, d) if columns else 1
    # To gather sends the matrix and its gradient, to exchange sends the tokens and theirs.
    v_here, n_here = (
        v // shard.size(of_rows, v),
        b * t // (shard.size("batch", b) * shard.size("seq", t)),
    )
    exchanged = columns if v_here % n_columns == 0 and n_here * n_columns <= v_here else ()
    parts, others = (*vocab, *exchanged), tuple(name for name in rows if name not in exchanged)
    w_vd = w_vd.astype(x_btd.dtype)  # once, and before it is sent

    def local(x_btd: Array, w_vd: Array, label_bt: Array, weight_bt: Array) -> tuple[Sums, Grads]:
        if exchanged:
            w_vd = jax.lax.all_to_all(w_vd, exchanged, split_axis=0, concat_axis=1, tiled=True)
        n, first = label_bt.size, _place(parts) * w_vd.shape[0]
        count = -(-n // min(chunk, n))
        size = -(-n // count)
        pad = [(0, count * size - n)]
        x_ncd = jnp.pad(x_btd.reshape(n, d), [*pad, (0, 0)]).reshape(count, size, d)
        label_nc, weight_nc = (
            jnp.pad(y.reshape(n), pad).reshape(count, size) for y in (label_bt, weight_bt)
        )
        # The sums of each device are its own until the end.
        w_vd, x_ncd = _varying(w_vd, others), _varying(x_ncd, vocab)

        def one(state: State, xs: tuple[Array, ...]) -> tuple[State, Array | None]:
            sums, dw_vd = state
            own_weight_c = xs[2]
            x_cd, label_c, weight_c = (_over(_gathered, x, exchanged) for x in xs)
            x_cv = jnp.einsum("cd,vd->cv", x_cd, w_vd, preferred_element_type=jnp.float32)
            place_v = first + jnp.arange(w_vd.shape[0])
            own_cv = place_v[None] == label_c[:, None]
            if v_used < v:
                x_cv = jnp.where(place_v[None] < v_used, x_cv, NEVER)
            top_c = _over(jax.lax.pmax, jax.lax.stop_gradient(x_cv.max(-1)), parts)
            e_cv = jnp.exp(x_cv - top_c[:, None])
            sum_c = _over(jax.lax.psum, e_cv.sum(-1), parts)
            label_x_c = _over(jax.lax.psum, jnp.where(own_cv, x_cv, 0).sum(-1), parts)
            lse_c = top_c + jnp.log(sum_c)
            # The first of the largest, so that equal logits everywhere are not all right.
            best_c = jnp.where(x_cv == top_c[:, None], place_v[None], v).min(-1)
            right_c = _over(jax.lax.pmin, best_c, parts) == label_c
            target_x_c = label_x_c
            if smoothing:
                sum_x_c = _over(
                    jax.lax.psum, jnp.where(place_v[None] < v_used, x_cv, 0).sum(-1), parts
                )
                target_x_c = (1 - smoothing) * label_x_c + smoothing / v_used * sum_x_c
            each = (lse_c - target_x_c + z_loss * lse_c**2, lse_c - label_x_c, lse_c**2, right_c)
            if exchanged:  # each device adds those of its own tokens
                own = [
                    jax.lax.dynamic_slice_in_dim(y_c, _place(exchanged) * size, size)
                    for y_c in each
                ]
            else:
                own = list(each)
            sums = Sums(
                *(old + (own_weight_c * new).sum() for old, new in zip(sums, own, strict=True))
            )
            if not grads:
                return (sums, dw_vd), None
            slope_c = weight_c * (1 + 2 * z_loss * lse_c)
            target_cv = own_cv.astype(jnp.float32)
            if smoothing:
                target_cv = (1 - smoothing) * target_cv + smoothing / v_used * (
                    place_v[None] < v_used
                )
            dx_cv = (e_cv * (slope_c / sum_c)[:, None] - target_cv * weight_c[:, None]).astype(
                x_cd.dtype
            )
            dw_vd = dw_vd + jnp.einsum("cv,cd->vd", dx_cv, x_cd, preferred_element_type=jnp.float32)
            dx_cd = jnp.einsum("cv,vd->cd", dx_cv, w_vd, preferred_element_type=jnp.float32)
            dx_cd = _over(_scattered, _over(jax.lax.psum, dx_cd, vocab), exchanged)
            return (sums, dw_vd), dx_cd.astype(x_cd.dtype)

        zero = (weight_nc * 0).sum()  # made of the weights, to vary over the devices as they do
        start: State = (
            Sums(zero, zero, zero, zero),
            jnp.zeros_like(w_vd, dtype=jnp.float32) + zero if grads else (),
        )
        (sums, dw_vd), dx_ncd = jax.lax.scan(one, start, (x_ncd, label_nc, weight_nc))
        sums = Sums(*(_over(jax.lax.psum, x, rows) for x in sums))
        if dx_ncd is None:
            return sums, ()
        dx_btd = dx_ncd.reshape(count * size, d)[:n].reshape(x_btd.shape)
        if exchanged:
            dw_vd = _over(jax.lax.psum, dw_vd, others)
            return sums, (
                dx_btd,
                jax.lax.all_to_all(dw_vd, exchanged, split_axis=1, concat_axis=0, tiled=True),
            )
        dw_vd = _over(functools.partial(_scattered, scatter_dimension=1), dw_vd, columns)
        return sums, (
            dx_btd,
            _over(jax.lax.psum, dw_vd, tuple(name for name in rows if name not in columns)),
        )

    axes = (
        ("batch", "seq", None),
        (of_rows, of_columns if exchanged else None),
        ("batch", "seq"),
        ("batch", "seq"),
    )
    none: Any = PartitionSpec()  # in place of the sums' arrays
    of_dw = shard.spec((v, d), (of_rows, of_columns if columns else None))
    out = (Sums(none, none, none, none), (shard.spec((b, t, d), axes[0]), of_dw) if grads else ())
    return kernels.local(
        shard, local, (x_btd, w_vd, label_bt, weight_bt.astype(jnp.float32)), axes, out
    )


def _over(reduce: Callable[..., Array], x: Array, names: tuple[str, ...]) -> Array:
    return reduce(x, names) if names else x


_gathered = functools.partial(jax.lax.all_gather, tiled=True)
# each device gets its part of the sum
_scattered = functools.partial(jax.lax.psum_scatter, tiled=True)


def _varying(x: Array, names: tuple[str, ...]) -> Array:
    return jax.lax.pcast(x, names, to="varying") if names else x


def _place(names: tuple[str, ...]) -> Array | int:
    """Return which part of a dimension split over these axes this device has."""
    return jax.lax.axis_index(names) if names else 0
