"""cuDNN's fused attention, traced for GPUs that need not be here.

`fused` is for rows of one sequence. `packed` is for rows of several documents, each of which the
kernel takes as a sequence of its own: no work is done for pairs of two documents, and no mask
exists. JAX's public function has no such argument, so that it calls the one below.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, K head dimension, M documents of a
row, padding included.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal
from unittest import mock

import jax
import jax.numpy as jnp

from jaxtrain.parallel import one_device
from jaxtrain.parallel.layout import generation
from jaxtrain.types import Array

# [version] of JAX from which keys of fewer heads than queries are read at the right places. Before
# it, their offsets are multiples of the queries' heads.
GROUPED_DOCUMENTS = (0, 11, 2)
NO_DOCUMENT = jnp.iinfo(jnp.int32).min  # the document of the places that fill a row
UNUSED = -1  # in the place of a document that a row does not have
CUDNN = 91100  # [version] that a program for GPUs is traced for on a host without one
_PATCHING = threading.Lock()  # one thread at a time replaces JAX's questions to the host


def fused(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    length: int = 0,
    capability: str = "",
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Call cuDNN's kernel, which has left windows alone. Odd lengths get a place that none sees.

    The kernel writes zeros to the places from ``length`` on, and to their gradients. 0 = none.
    """
    b, t = q_bthk.shape[:2]
    if t % 2:
        q_bthk, k_bsgk, v_bsgk = (
            jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_bthk, k_bsgk, v_bsgk)
        )
        if not causal:
            length = length or t
    lengths = jnp.full(b, length, jnp.int32) if length else None
    left = (window - 1, 0 if causal else window - 1) if window else None
    with _as_on(capability) if implementation == "cudnn" else contextlib.nullcontext():
        y_bthk = jax.nn.dot_product_attention(
            q_bthk,
            k_bsgk,
            v_bsgk,
            is_causal=causal,
            local_window_size=left,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )
    return y_bthk[:, :t]


def packed(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    segments_bt: Array,
    *,
    documents: int,
    causal: bool,
    window: int,
    capability: str = "",
) -> Array:
    """Compute the attention of each document of a row to itself, [B, T, H, K].

    A row with more than ``documents``, of which padding is none, is NaN.

    Args:
      segments_bt: int32, equal numbers side by side for each document, and for padding.
      window: to the left, 0 = all. It takes ``causal``.
    """
    from jax._src.cudnn import fused_attention_stablehlo as kernel

    t, h = q_bthk.shape[1:3]
    most = documents + 1 + t % 2  # with padding, and the place that makes the length even
    if t % 2:
        filling = ((0, 0), (0, 1), (0, 0), (0, 0))
        q_bthk, k_bsgk, v_bsgk = (jnp.pad(x, filling) for x in (q_bthk, k_bsgk, v_bsgk))
        segments_bt = jnp.pad(segments_bt, filling[:2], constant_values=NO_DOCUMENT)
    starts_bm, lengths_bm, n_b = bounds(segments_bt, most)
    if jax.__version_info__ < GROUPED_DOCUMENTS:
        k_bsgk, v_bsgk = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (k_bsgk, v_bsgk))
    # Added, it is a part of the kernel that rotates q, and has no derivative.
    poison_b = jnp.where(n_b <= most, 0, jnp.nan).astype(q_bthk.dtype)
    q_bthk = q_bthk + poison_b[:, None, None, None]
    # JAX puts the rows' offsets side by side, without UNUSED, and takes them and the lengths in
    # pairs. So a row has no end here, which would be one offset more than it has lengths.
    offsets_bm = jnp.pad(starts_bm, ((0, 0), (0, 1)), constant_values=UNUSED)
    mask = kernel.MaskType.PADDING_CAUSAL if causal else kernel.MaskType.PADDING
    with _as_on(capability):
        y_bthk: Array = kernel.dot_product_attention(
            q_bthk,
            k_bsgk,
            v_bsgk,
            q_seqlen=lengths_bm,
            kv_seqlen=lengths_bm,
            q_offsets=offsets_bm,
            kv_offsets=offsets_bm,
            scale=q_bthk.shape[3] ** -0.5,
            mask_type=mask,
            sliding_window_length=min(window, t) if window else None,
        )
    return y_bthk[:, :t]


def bounds(segments_bt: Array, most: int) -> tuple[Array, Array, Array]:
    """Return the first places of a row's documents, their lengths, and their number.

    The first two are int32 [B, M] of M = ``most`` documents, in order, UNUSED after the last one.
    The third is int32 [B], also of documents beyond ``most``, which the first two leave out.
    """
    t = segments_bt.shape[1]
    is_new_bt = segments_bt[:, 1:] != segments_bt[:, :-1]
    is_first_bt = jnp.pad(is_new_bt, ((0, 0), (1, 0)), constant_values=True)
    firsts_bt = jnp.sort(jnp.where(is_first_bt, jnp.arange(t), t), axis=1)
    ends_bt = jnp.pad(firsts_bt[:, 1:], ((0, 0), (0, 1)), constant_values=t)
    short = ((0, 0), (0, max(0, most - t)))
    starts_bm = jnp.pad(firsts_bt, short, constant_values=t)[:, :most]
    ends_bm = jnp.pad(ends_bt, short, constant_values=t)[:, :most]
    is_used_bm = starts_bm < t
    starts_bm = jnp.where(is_used_bm, starts_bm, UNUSED).astype(jnp.int32)
    lengths_bm = jnp.where(is_used_bm, ends_bm - starts_bm, UNUSED).astype(jnp.int32)
    return starts_bm, lengths_bm, is_first_bt.sum(1, dtype=jnp.int32)


@contextlib.contextmanager
def _as_on(capability: str) -> Iterator[None]:
    """Trace as on a host with a GPU of this capability, unless this is one (JAX 0.10 to 0.12)."""
    if one_device.host() in (("gpu", capability), ("gpu", "")):
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    planned = generation(capability)

    def at_least(other: str) -> bool:
        return planned >= generation(other)

    def equal(other: str) -> bool:
        return planned == generation(other)

    with (
        _PATCHING,
        mock.patch.multiple(
            cudnn,
            check_cudnn_version=lambda: CUDNN,
            check_compute_capability=at_least,
            is_cuda_compute_capability_equal=equal,
        ),
    ):
        yield
