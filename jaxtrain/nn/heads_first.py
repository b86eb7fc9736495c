"""Attention by XLA for CPUs, in products that have heads before places.

If heads come after places, as in [B, T, H, K], XLA for CPUs copies the operands, also the weights
[T, S] of each head, and takes longer (docs/results/cpu-steps.md). Weights are divided by their sum
after their product with the values, which has fewer numbers, and the backward pass keeps them
undivided.

It is for float32. The gradient takes the sum of weights times their derivatives from the result,
which is too coarse in 16 bits.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, R = H / G, K head dimension,
X = R × T: the queries of a group's heads, one head after the other.
"""

import jax
import jax.numpy as jnp

from jaxtrain.nn.layers import NEVER
from jaxtrain.types import Array


@jax.custom_vjp
def heads_first(q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array) -> Array:
    """Compute softmax(q k^T / sqrt(K)) v, [B, T, H, K], over the keys of a mask [B or 1, T, S].

    Each query sees at least one key.
    """
    return _forward(q_bthk, k_bsgk, v_bsgk, mask_bts)[0]


def _forward(
    q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array
) -> tuple[Array, tuple[Array, ...]]:
    g = k_bsgk.shape[2]
    x_bgxs = (
        jnp.einsum("bgxk,bgsk->bgxs", _by_head(q_bthk, g), _by_head(k_bsgk, g))
        * q_bthk.shape[-1] ** -0.5
    )
    x_bgrts = x_bgxs.reshape(*x_bgxs.shape[:2], -1, *mask_bts.shape[1:])
    x_bgxs = jnp.where(mask_bts[:, None, None], x_bgrts, NEVER).reshape(x_bgxs.shape)
    p_bgxs = jnp.exp(x_bgxs - x_bgxs.max(-1, keepdims=True))
    share_bgx = 1 / p_bgxs.sum(-1)
    y_bgxk = jnp.einsum("bgxs,bgsk->bgxk", p_bgxs, _by_head(v_bsgk, g)) * share_bgx[..., None]
    y_bthk = _by_place(y_bgxk, q_bthk)
    return y_bthk, (q_bthk, k_bsgk, v_bsgk, y_bthk, p_bgxs, share_bgx)


def _backward(kept: tuple[Array, ...], dy_bthk: Array) -> tuple[Array | None, ...]:
    q_bthk, k_bsgk, v_bsgk, y_bthk, p_bgxs, share_bgx = kept
    g = k_bsgk.shape[2]
    dy_bgxk = _by_head(dy_bthk, g) * share_bgx[..., None]
    delta_bgx = (dy_bgxk * _by_head(y_bthk, g)).sum(-1)
    dp_bgxs = jnp.einsum("bgxk,bgsk->bgxs", dy_bgxk, _by_head(v_bsgk, g))
    dx_bgxs = p_bgxs * (dp_bgxs - delta_bgx[..., None])
    scale = q_bthk.shape[-1] ** -0.5
    dq_bgxk = jnp.einsum("bgxs,bgsk->bgxk", dx_bgxs, _by_head(k_bsgk, g)) * scale
    dk_bgsk = jnp.einsum("bgxs,bgxk->bgsk", dx_bgxs, _by_head(q_bthk, g)) * scale
    dv_bgsk = jnp.einsum("bgxs,bgxk->bgsk", p_bgxs, dy_bgxk)
    return _by_place(dq_bgxk, q_bthk), _by_place(dk_bgsk, k_bsgk), _by_place(dv_bgsk, v_bsgk), None


heads_first.defvjp(_forward, _backward)


def _by_head(x_bthk: Array, g: int) -> Array:
    """Bring heads before places, [B, G, R × T, K]."""
    b, t, h, k = x_bthk.shape
    return x_bthk.reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4).reshape(b, g, -1, k)


def _by_place(x_bgxk: Array, like_bthk: Array) -> Array:
    """Bring places before heads again, [B, T, H, K]."""
    b, t, h, k = like_bthk.shape
    g = x_bgxk.shape[1]
    return x_bgxk.reshape(b, g, h // g, t, k).transpose(0, 3, 1, 2, 4).reshape(b, t, h, k)
