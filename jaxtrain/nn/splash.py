"""Attention for TPUs by the splash kernel of Pallas, which skips blocks that the mask empties.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, R = H / G, K head dimension.
"""

import jax
import jax.numpy as jnp

from jaxtrain.types import Array

LANES = 128  # of a TPU's vector registers, which splash fills
BLOCK = 512  # [queries or keys] of a tile, if it divides the sequence


def splash_fits(shape: tuple[int, ...]) -> bool:
    """Tell whether splash takes queries of this shape [B, T, H, K]."""
    return shape[1] % LANES == 0 and shape[3] % 64 == 0


def splash(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    segments_bt: Array | None,
    interpret: bool = False,
    keep: str | None = None,
) -> Array:
    """Call the kernel for TPUs. ``interpret`` runs it anywhere, slowly."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

    b, t, h, k = q_bthk.shape
    g = k_bsgk.shape[2]
    mask: mask_lib.Mask = mask_lib.FullMask((t, t))
    if window:
        ahead = 0 if causal else window - 1
        mask = mask_lib.LocalMask((t, t), (window - 1, ahead), 0)
    elif causal:
        mask = mask_lib.CausalMask((t, t))
    n = next(size for size in (BLOCK, 256, LANES) if t % size == 0)
    blocks = kernel_lib.BlockSizes(
        block_q=n,
        block_kv=n,
        block_kv_compute=n,
        block_q_dkv=n,
        block_kv_dkv=n,
        block_kv_dkv_compute=n,
        block_q_dq=n,
        block_kv_dq=n,
    )
    kernel = kernel_lib.make_splash_mqa_single_device(
        mask_lib.MultiHeadMask([mask] * (h // g)),
        block_sizes=blocks,
        interpret=interpret,
        residual_checkpoint_name=keep,
    )
    scaled_bthk = (q_bthk * k**-0.5).astype(q_bthk.dtype)
    q_bgrtk = scaled_bthk.reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4)
    k_bgsk, v_bgsk = (x.transpose(0, 2, 1, 3) for x in (k_bsgk, v_bsgk))
    if segments_bt is None:
        segments_bt = jnp.zeros((b, t), jnp.int32)

    def row(q_grtk: Array, k_gsk: Array, v_gsk: Array, segments_t: Array) -> Array:
        segments = kernel_lib.SegmentIds(segments_t, segments_t)
        y_grtk: Array = jax.vmap(lambda q, k, v: kernel(q, k, v, segments))(q_grtk, k_gsk, v_gsk)
        return y_grtk

    y_bgrtk = jax.vmap(row)(q_bgrtk, k_bgsk, v_bgsk, segments_bt)
    return y_bgrtk.transpose(0, 3, 1, 2, 4).reshape(b, t, h, k)
