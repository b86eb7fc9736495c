"""Attention by tokamax's kernels for Hopper GPUs, for what cuDNN's do not take.

Each query sees the keys of one range: from the first of its document and window to the last.
Forward, blocks of keys that no query of a block sees are skipped, and backward those that the
causal mask hides.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, K head dimension.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn import remat
from jaxtrain.nn.tokamax_tracing import HOPPER, PACKAGE, trace_for
from jaxtrain.parallel.layout import generation
from jaxtrain.types import Array
from loaders.io import machine

LONGEST_HEAD = 256  # [values] for which a multiprocessor has room in the backward pass


class Settings(NamedTuple):
    causal: bool
    window: int  # 0 = all
    capability: str  # of the GPU that the program is for
    keep: str | None  # as in `nn.attention.within`


def fits(head_dim: int, capability: str) -> bool:
    """Tell whether the kernels are for heads of 16 bits and this size on such a GPU."""
    lowest, limit = HOPPER
    return lowest <= generation(capability) < limit and head_dim <= LONGEST_HEAD


@functools.cache
def is_installed() -> bool:
    return machine.has_package(PACKAGE)


def attend(
    settings: Settings, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array | None
) -> Array:
    """Compute the attention of a sequence to itself, [B, T, H, K].

    ``segments``: as in `nn.attention.attention`, equal numbers side by side for each document.
    """
    b, t = q_bthk.shape[:2]
    if segments_bt is None:
        segments_bt = jnp.zeros((b, t), jnp.int32)
    first_bt, end_bt = ranges(segments_bt, causal=settings.causal, window=settings.window)
    return _attend(settings, q_bthk, k_bsgk, v_bsgk, first_bt, end_bt)


def ranges(segments_bt: Array, *, causal: bool, window: int) -> tuple[Array, Array]:
    """Return the first key that each query sees, and the one after its last, int32 [B, T].

    With ``causal`` the last is not the query's own, which the kernel finds by itself.
    """
    t = segments_bt.shape[1]
    place_1t = jnp.arange(t, dtype=jnp.int32)[None]
    is_new_bt = segments_bt[:, 1:] != segments_bt[:, :-1]
    is_first_bt = jnp.pad(is_new_bt, ((0, 0), (1, 0)), constant_values=True)
    is_last_bt = jnp.pad(is_new_bt, ((0, 0), (0, 1)), constant_values=True)
    first_bt = jax.lax.cummax(jnp.where(is_first_bt, place_1t, 0), axis=1)
    end_bt = jax.lax.cummin(jnp.where(is_last_bt, place_1t + 1, t), axis=1, reverse=True)
    if window:
        first_bt = jnp.maximum(first_bt, place_1t - window + 1)
    if window and not causal:
        end_bt = jnp.minimum(end_bt, place_1t + window)
    return first_bt, end_bt


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, *args: Array) -> Array:
    """Take q, k, v, and the ranges of their keys."""
    *qkv, first_bt, end_bt = args
    y_bthk: Array = _kernel(settings, first_bt, end_bt)(*qkv)
    return y_bthk


def _kernel(settings: Settings, first_bt: Array, end_bt: Array) -> Callable[..., Array]:
    """Return tokamax's attention of q, k and v, which has a derivative.

    tokamax's public function has no ranges of keys, so this is the kernel behind it.
    """
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu

    trace_for(settings.capability)
    limits = {"k_start": first_bt[:, None]}  # of all heads
    if not settings.causal:
        limits["k_end"] = end_bt[:, None]
    mask = base.Mask(is_causal=settings.causal, **limits)
    return functools.partial(pallas_mosaic_gpu.PallasMosaicGpuFlashAttention(), mask=mask)


def _forward(settings: Settings, *args: Array) -> tuple[Array, Any]:
    *qkv, first_bt, end_bt = args
    y_bthk, pull = jax.vjp(_kernel(settings, first_bt, end_bt), *qkv)
    if not settings.keep:
        return y_bthk, pull
    named = remat.name(y_bthk, settings.keep)
    leaves, form = jax.tree.flatten(pull)
    for place, x in enumerate(leaves):
        if x is y_bthk:
            leaves[place] = named
        elif not any(x is each for each in args):
            leaves[place] = remat.name(x, settings.keep)
    return named, jax.tree.unflatten(form, leaves)


def _backward(settings: Settings, pull: Any, dy_bthk: Array) -> tuple[Array | None, ...]:
    dq_bthk, dk_bsgk, dv_bsgk = pull(dy_bthk)
    return dq_bthk, dk_bsgk, dv_bsgk, None, None


_attend.defvjp(_forward, _backward)
