"""Attention as one function. `choose` picks the kernel by the platform that the program is for.

    gpu   16-bit numbers: cuDNN's fused kernel (`nn.cudnn`), or Pallas's (`nn.flash`) for packed
          documents and other heads. Neither has an array that grows with T × S. XLA takes a window
          over documents, or to both sides
    tpu   the splash kernel of Pallas (`nn.splash`), if sequences and heads fill its lanes
    else  XLA, which holds all B × H × T × S weights of a layer. On GPUs and TPUs, 16-bit models
          compute them again in the backward pass, so that no layer keeps them. For CPUs its
          products in float32 are those of `nn.heads_first`

`within` calls them on a mesh, each device on its own rows and heads. XLA splits its own attention
by itself. `nn.ring` is for sequences that are split over devices. All of them compute softmax(q k^T
/ sqrt(K)) v (Vaswani et al. 2017) with a float32 softmax over the keys that a query may see:

- ``causal``: key s of query t only if s <= t
- ``window``: and only if t - s < window (Beltagy et al. 2020), 0 for all
- ``segments``: only keys of the query's own document. Padding is a segment of its own.

Shapes: B batch, T queries, S keys, H heads, G key/value heads (which divide H: Ainslie et al.
2023), K head dimension.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn import cudnn, remat
from jaxtrain.nn.flash import flash
from jaxtrain.nn.heads_first import heads_first
from jaxtrain.nn.splash import splash, splash_fits
from jaxtrain.parallel import kernels, one_device
from jaxtrain.types import Array, Axes, Shard


def within(
    shard: Shard,
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool = False,
    window: int = 0,
    segments_bt: Array | None = None,
    keep: str | None = None,
    policy: str = "none",
) -> Array:
    """Compute `attention` of arrays that ``shard`` lays out over a mesh. Rows and heads are split.

    Args:
      keep: a name of `remat.scan` for the activations that the backward pass reads. `is_forward`
        knows those of cuDNN and `flash`.
      policy: of the layers around it, a word of `jaxtrain.nn.remat`. By `remat.cheap` it decides
        whether XLA's own attention is computed again from q, k and v in the backward pass.
    """
    platform, capability = shard.devices
    run = functools.partial(
        attention, causal=causal, window=window, platform=platform, capability=capability, keep=keep
    )
    kernel = choose(
        q_bthk.shape,
        q_bthk.dtype,
        causal=causal,
        window=window,
        packed=segments_bt is not None,
        platform=platform,
        capability=capability,
    )
    if kernel == "xla":
        run = functools.partial(run, segments_bt=segments_bt)
        return (run if platform == "cpu" else remat.cheap(policy)(run))(q_bthk, k_bsgk, v_bsgk)
    query: Axes = ("batch", None, "heads", None)
    key: Axes = ("batch", None, "kv_heads", None)
    if k_bsgk.shape[2] == q_bthk.shape[2]:
        key = query
    args, axes = [q_bthk, k_bsgk, v_bsgk], [query, key, key]
    if segments_bt is not None:
        args, axes = [*args, segments_bt], [*axes, ("batch", None)]
    return kernels.kernel(
        shard,
        lambda q, k, v, s=None: run(q, k, v, segments_bt=s),
        args,
        axes,
        shard.spec(q_bthk.shape, query),
        constants=len(args) - 3,
    )


def attention(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool = False,
    window: int = 0,
    segments_bt: Array | None = None,
    platform: str | None = None,
    capability: str = "",
    keep: str | None = None,
) -> Array:
    """Compute the attention of a sequence to itself, [B, T, H, K].

    Args:
      segments_bt: int32, documents that do not see each other.
      platform: "cpu", "gpu" or "tpu". None = the platform of this process.
      capability: of the GPUs, as "9.0". Empty = unknown.
      keep: as in `within`.
    """
    if platform is None:
        platform, capability = one_device.host()
    kernel = choose(
        q_bthk.shape,
        q_bthk.dtype,
        causal=causal,
        window=window,
        packed=segments_bt is not None,
        platform=platform,
        capability=capability,
    )
    if kernel == "cudnn":
        return cudnn.fused(
            q_bthk, k_bsgk, v_bsgk, causal=causal, window=window, capability=capability
        )
    if kernel == "flash":
        return flash(q_bthk, k_bsgk, v_bsgk, causal=causal, segments_bt=segments_bt)
    if kernel == "splash":
        return splash(
            q_bthk, k_bsgk, v_bsgk, causal=causal, window=window, segments_bt=segments_bt, keep=keep
        )
    t = jnp.arange(q_bthk.shape[1])
    mask_bts = visible(t, t, causal=causal, window=window)[None]
    if segments_bt is not None:
        mask_bts = mask_bts & same_segment(segments_bt, segments_bt)
    xla = heads_first if platform == "cpu" and q_bthk.dtype == jnp.float32 else masked
    y_bthk = xla(q_bthk, k_bsgk, v_bsgk, mask_bts)
    return remat.name(y_bthk, keep) if keep else y_bthk


def choose(
    shape: tuple[int, ...],
    dtype: Any,
    *,
    causal: bool,
    window: int,
    packed: bool,
    platform: str,
    capability: str = "",
) -> str:
    """Return the kernel for queries [B, T, H, K]: "cudnn", "flash", "splash" or "xla".

    Only these arguments may decide it, since a plan is traced on another machine.
    """
    if platform == "tpu" and splash_fits(shape):
        return "splash"
    if platform != "gpu" or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    if not cudnn.fits(shape, capability):
        return "xla"
    if not packed and shape[3] % 8 == 0 and (causal or not window):
        return "cudnn"
    return "xla" if window else "flash"


def is_forward(kernel: str) -> bool:
    """Whether this jaxpr is the forward pass of cuDNN or `flash`. Splash names its own."""
    return kernel in ("dot_product_attention_fwd_wrapper", "mha")


def masked(q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array) -> Array:
    """Compute attention under a mask [B or 1, T, S] by XLA. Without a key it averages all."""
    return jax.nn.dot_product_attention(
        q_bthk, k_bsgk, v_bsgk, mask=mask_bts[:, None], implementation="xla"
    )


def visible(t: Array, s: Array, *, causal: bool, window: int) -> Array:
    """Tell whether the query at place t may see the key at place s, bool [T, S]."""
    back_ts = t[:, None] - s[None]
    seen_ts = jnp.ones(back_ts.shape, bool)
    if causal:
        seen_ts &= back_ts >= 0
    if window:
        seen_ts &= jnp.abs(back_ts) < window
    return seen_ts


def same_segment(a_bt: Array, b_bs: Array) -> Array:
    return a_bt[:, :, None] == b_bs[:, None]
