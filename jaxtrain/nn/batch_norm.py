"""Batch norm, and the one way to a statistic of the global batch.

A loss sees the rows of its group along the mesh axis "data". A statistic over all rows is a sum
over its rows, then over that axis, inside the loss. It is the same on every mesh. It does not
decompose over microbatches. With train.accumulate = n it is of a microbatch: of the rows r of the
whole batch with the same r mod n, on every mesh.
"""

import jax
import jax.numpy as jnp

from jaxtrain.parallel.layout import DATA
from jaxtrain.types import Array, PyTree, T


def over_data(x: T) -> T:
    """Sum x, or each array of a tree, over the groups along "data", unless one sees all rows."""
    context = jax.sharding.get_abstract_mesh()
    grouped = not context.empty and DATA in context.manual_axes
    return jax.lax.psum(x, DATA) if grouped else x


def member(row_b: Array, groups: int, batch: int) -> Array:
    """Return which of G equal runs of the batch's rows a row belongs to, float32 [B, G], one-hot.

    Args:
      row_b: int32 [B] places in the global batch of ``batch`` rows.
    """
    return (
        (row_b * groups // batch)[:, None] == jnp.arange(groups, dtype=row_b.dtype)[None]
    ).astype(jnp.float32)


def batch_norm(
    x_bd: Array,
    scale_d: Array,
    bias_d: Array,
    running: PyTree,
    member_bg: Array | None,
    *,
    momentum: float,
    eps: float,
) -> tuple[Array, PyTree]:
    """Compute (x - mean) / sqrt(var + eps) scale + bias for each channel (Ioffe & Szegedy 2015).

    Args:
      running: {"mean": [D], "var": [D]}, the statistics of an evaluation.
      member_bg: `member` in training: mean and (biased) variance are of each group's rows. None in
        an evaluation.
      momentum: share of this batch in the new running values. They have the mean of several groups,
        and of the unbiased variance, n / (n - 1) times the biased.

    Returns:
      float32 [B, D], and the new running values, without gradient.
    """
    x_bd = x_bd.astype(jnp.float32)
    if member_bg is None:
        mean_bd = jnp.broadcast_to(running["mean"], x_bd.shape)
        var_bd = jnp.broadcast_to(running["var"], x_bd.shape)
        new = running
    else:
        # Products and sums, not a matrix product, which some devices would round to bfloat16.
        n_g1 = over_data(member_bg.sum(0))[:, None]
        mean_gd = over_data((member_bg[:, :, None] * x_bd[:, None]).sum(0)) / jnp.broadcast_to(
            n_g1, (n_g1.shape[0], x_bd.shape[1])
        )
        mean_bd = (member_bg[:, :, None] * mean_gd[None]).sum(1)
        centred_bd = x_bd - mean_bd  # before squaring: channels of raw codes have means of hundreds
        square_gd = over_data((member_bg[:, :, None] * (centred_bd * centred_bd)[:, None]).sum(0))
        var_bd = (
            member_bg[:, :, None] * (square_gd / jnp.broadcast_to(n_g1, square_gd.shape))[None]
        ).sum(1)
        unbiased_gd = square_gd / jnp.broadcast_to(jnp.maximum(n_g1 - 1, 1), square_gd.shape)
        now = jax.lax.stop_gradient({"mean": mean_gd.mean(0), "var": unbiased_gd.mean(0)})
        new = jax.tree.map(lambda old, new: (1 - momentum) * old + momentum * new, running, now)
    y_bd = (x_bd - mean_bd) * jax.lax.rsqrt(var_bd + eps)
    return y_bd * jnp.broadcast_to(scale_d, y_bd.shape) + jnp.broadcast_to(bias_d, y_bd.shape), new
