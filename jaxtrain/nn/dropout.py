"""Dropout (Srivastava et al. 2014), whose draws depend on a key and on each row's place alone.

A row of the global batch is drawn for by its own key. Its numbers are the same on every mesh, with
any number of processes and of microbatches.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, K head dimension.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.nn import NEVER
from jaxtrain.nn.layers import product_in_float32
from jaxtrain.types import Array, Key, Shard


def drop(x: Array, rate: float, key: Key, row_b: Array) -> Array:
    """Set each number of x [B, …] to 0 with the probability ``rate``, and divide the others.

    Divided by 1 - rate, they keep their mean.

    Args:
      row_b: int32 [B], the rows' places in the global batch.
    """

    def keep(row: Array) -> Array:
        row_key = jax.random.fold_in(key, row)
        return jax.random.bernoulli(row_key, 1 - rate, x.shape[1:])

    is_kept = jax.vmap(keep)(row_b)
    scaled = x / (1 - rate)
    return jnp.where(is_kept, scaled, 0)


def attention(
    shard: Shard,
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    mask_bts: Array,
    drop_weights: Callable[[Array], Array],
) -> Array:
    """Compute drop(softmax(q k^T / sqrt(K))) v, [B, T, H, K], over the keys of a mask.

    Fused kernels of attention have no weights to draw for, so XLA computes this one on every
    platform. It has an array of all B × H × T × S weights.

    Args:
      mask_bts: bool [B or 1, T, S]; each query sees at least one key.
      drop_weights: of float32 [B, H, T, S].
    """
    b, t, h, k = q_bthk.shape
    repeat = functools.partial(jnp.repeat, repeats=h // k_bsgk.shape[2], axis=2)
    k_bshk = shard(repeat(k_bsgk), "batch", None, "heads", None)
    v_bshk = shard(repeat(v_bsgk), "batch", None, "heads", None)
    x_bhts = product_in_float32("bthk,bshk->bhts", q_bthk, k_bshk, shard)
    x_bhts = jnp.where(mask_bts[:, None], x_bhts * k**-0.5, NEVER)
    weight_bhts = jax.nn.softmax(x_bhts)
    weight_bhts = shard(drop_weights(weight_bhts), "batch", "heads", None, None)
    return jnp.einsum("bhts,bshk->bthk", weight_bhts.astype(v_bshk.dtype), v_bshk)
