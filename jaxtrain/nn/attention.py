"""Attention: one function, the kernel chosen by platform.

Shapes: B batch, T queries, S keys, H heads, K head dimension.
"""

import jax
import jax.numpy as jnp

from jaxtrain.types import Array


def attention(q_bthk: Array, k_bshk: Array, v_bshk: Array) -> Array:
    """softmax(q k^T / sqrt(K)) v over all positions (Vaswani et al. 2017); the softmax is float32. Returns [B, T, H, K]."""
    # cuDNN's fused kernel takes 16-bit inputs only.
    fused = jax.default_backend() == "gpu" and q_bthk.dtype in (jnp.bfloat16, jnp.float16)
    return jax.nn.dot_product_attention(q_bthk, k_bshk, v_bshk, implementation="cudnn" if fused else "xla")
