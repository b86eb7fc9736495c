"""Attention for NVIDIA GPUs by the flash kernel of Pallas.

It is for documents and heads that cuDNN's kernel does not take.

cuDNN takes documents as a mask [B, 1, T, S]. This kernel has no array that grows with T × S.

Pallas lowers it by Triton. From jax 0.11 on that raises a DeprecationWarning, which Python hides by
default.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, K head dimension.
"""

import jax.numpy as jnp

from jaxtrain.types import Array

NO_DOCUMENT = jnp.iinfo(jnp.int32).min  # the document of the places that fill the last tile


def flash(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    segments_bt: Array | None,
    interpret: bool = False,
) -> Array:
    """Compute self-attention [B, T, H, K]. ``interpret`` runs it anywhere, slowly."""
    from jax.experimental.pallas.ops.gpu import attention as kernel_lib

    b, t, h, k = q_bthk.shape
    tile = 64 if k <= 128 else 32  # as a multiprocessor's shared memory holds
    more = -t % tile
    segments_bt = jnp.zeros((b, t), jnp.int32) if segments_bt is None else segments_bt
    segments_bt = jnp.pad(segments_bt, ((0, 0), (0, more)), constant_values=NO_DOCUMENT)
    k_bshk, v_bshk = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (k_bsgk, v_bsgk))
    q_bthk, k_bshk, v_bshk = (
        jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (q_bthk, k_bshk, v_bshk)
    )
    sizes = kernel_lib.BlockSizes(
        block_q=tile, block_k=tile, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32
    )
    y_bthk: Array = kernel_lib.mha(
        q_bthk, k_bshk, v_bshk, segments_bt, k**-0.5, causal, block_sizes=sizes, interpret=interpret
    )
    return y_bthk[:, :t]
