"""A stand-in for the part of tokamax that attention uses, which computes its formula by XLA."""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.nn import attention


@dataclass(frozen=True)
class Mask:
    is_causal: bool
    k_start: jax.Array | None = None  # [B, 1, T] first key of a query
    k_end: jax.Array | None = None  # [B, 1, T] the one after its last


def formula(q_bthk, k_bsgk, v_bsgk, *, mask):
    t = q_bthk.shape[1]
    place_11s = jnp.arange(t)[None, None]
    seen_bts = jnp.ones((1, t, t), bool)
    if mask.is_causal:
        seen_bts &= jnp.tri(t, dtype=bool)[None]
    if mask.k_start is not None:
        seen_bts &= place_11s >= mask.k_start[:, 0, :, None]
    if mask.k_end is not None:
        seen_bts &= place_11s < mask.k_end[:, 0, :, None]
    return attention.masked(q_bthk, k_bsgk, v_bsgk, seen_bts)


def modules(kernel: Callable = formula) -> Mapping[str, types.SimpleNamespace]:
    """Return entries for sys.modules."""
    base = types.SimpleNamespace(Mask=Mask)
    gpu = types.SimpleNamespace(PallasMosaicGpuFlashAttention=lambda: kernel)
    attention_ops = types.SimpleNamespace(base=base, pallas_mosaic_gpu=gpu)
    parents = ("tokamax", "tokamax._src", "tokamax._src.ops")
    return {
        **{name: types.SimpleNamespace() for name in parents},
        "tokamax._src.ops.attention": attention_ops,
    }
