"""Attention for TPUs by the splash kernel of Pallas, which skips blocks that the mask empties.

For rows of documents, `document_blocks` tells once a batch which blocks have keys of a query's
document. All layers and heads share that. The rows of a device are one sequence then, so that the
kernel's lists of blocks are those of all rows.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, R = H / G, K head dimension, N
blocks of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxtrain.types import Array

LANES = 128  # of a TPU's vector registers, which splash fills
BLOCK = 512  # [queries or keys] of a tile, if it divides the sequence
MOST_BLOCKS = 512  # of a row, so that its lists fit into a chip's scalar memory
LISTS = 3 << 18  # [bytes] of a call's lists in scalar memory, which has 1 MiB
BYTES = 3  # of a step of the lists: the block that it reads, and whether it is computed
TOKENS_LAST = Layout((0, 2, 3, 1))  # of arrays [B, T, H, K] in the device's memory
PADDING = 0  # the document of the places that fill a row, which are its last


def splash_fits(shape: tuple[int, ...], *, packed: bool) -> bool:
    """Tell whether splash takes queries of this shape [B, T, H, K].

    ``packed``: the lists of a row with documents must fit into a chip's scalar memory.
    """
    _, t, _, k = shape
    if t % LANES or k % 64:
        return False
    return not packed or _list_bytes(t) <= LISTS


def block_size(t: int) -> int:
    size = next(size for size in (BLOCK, 256, LANES) if t % size == 0)
    while t // size > MOST_BLOCKS and t % (2 * size) == 0:
        size *= 2
    return size


def rows_of_a_call(t: int) -> int:
    """Return how many rows of documents a call of the kernel takes."""
    return max(1, LISTS // _list_bytes(t))


def _list_bytes(t: int) -> int:
    """Return the bytes of a row's lists of blocks."""
    n = t // block_size(t)
    return n * -(-n // LANES) * LANES * BYTES


def document_blocks(
    segments_bt: Array, *, causal: bool, window: int, size: int | None = None
) -> Array:
    """Find the blocks with keys for each block of queries, and the queries for each of keys.

    Returns int32 [B, N, 4]: the first and last block of keys, the first and last one of queries.
    They are exact if the numbers of documents grow along a row, with `PADDING` at its end. In any
    other order they have all that is needed and more.

    ``size``: tokens of a block, None = those of `block_size`.
    """
    size = size or block_size(segments_bt.shape[1])
    shared_bnm = shared_blocks(segments_bt, (size, size), causal=causal, window=window)
    return jnp.stack([*ends(shared_bnm), *ends(shared_bnm.swapaxes(1, 2))], axis=2)


def shared_blocks(
    segments_bt: Array, sizes: tuple[int, int], *, causal: bool, window: int
) -> Array:
    """Tell which blocks of N queries see a document of which blocks of M keys, bool [B, N, M].

    ``sizes``: tokens of a block of queries, and of one of keys.
    """
    b = len(segments_bt)
    of_queries, of_keys = sizes
    largest = jnp.iinfo(jnp.int32).max
    numbers_bt = jnp.where(segments_bt == PADDING, largest, segments_bt)
    queries_bnt = numbers_bt.reshape(b, -1, of_queries)
    keys_bms = numbers_bt.reshape(b, -1, of_keys)
    shared_bnm = queries_bnt.min(2)[:, :, None] <= keys_bms.max(2)[:, None]
    shared_bnm &= keys_bms.min(2)[:, None] <= queries_bnt.max(2)[:, :, None]
    first_n, first_m = (
        size * jnp.arange(count) for size, count in zip(sizes, shared_bnm.shape[1:], strict=True)
    )
    back_nm = first_n[:, None] - first_m[None]  # from a block's first key to its first query
    if causal:
        shared_bnm &= (back_nm > -of_queries)[None]
    if window:
        # the nearest query and key of two blocks
        shared_bnm &= ((back_nm - of_keys + 1 < window) & (1 - back_nm - of_queries < window))[None]
    return shared_bnm


def ends(is_needed_bnm: Array) -> tuple[Array, Array]:
    """Return the first and the last place along the last axis, int32 [B, N]."""
    first = is_needed_bnm.argmax(2)
    last = is_needed_bnm.shape[2] - 1 - is_needed_bnm[:, :, ::-1].argmax(2)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def splash(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    segments_bt: Array | None,
    blocks: Array | None = None,
    interpret: bool = False,
    keep: str | None = None,
) -> Array:
    """Call the kernel for TPUs. ``interpret`` runs it anywhere, slowly.

    ``blocks``: those of `document_blocks`, int32 [B, N, 4]. None = they are found here.
    """
    b, t, h, k = q_bthk.shape
    g = k_bsgk.shape[2]
    scaled_bthk = (q_bthk * k**-0.5).astype(q_bthk.dtype)
    heads = h // g if segments_bt is None else h
    kernel = _kernel((heads, t), causal, window, interpret=interpret, keep=keep)
    if segments_bt is not None:
        if blocks is None:
            blocks = document_blocks(segments_bt, causal=causal, window=window)
        arrays = (scaled_bthk, k_bsgk, v_bsgk, segments_bt, blocks)
        rows = rows_of_a_call(t)
        parts = [
            _of_documents(kernel, *(x[first : first + rows] for x in arrays))
            for first in range(0, b, rows)
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    q_bgrtk = scaled_bthk.reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4)
    k_bgsk, v_bgsk = (x.transpose(0, 2, 1, 3) for x in (k_bsgk, v_bsgk))
    y_bgrtk: Array = jax.vmap(jax.vmap(kernel))(q_bgrtk, k_bgsk, v_bgsk)
    return y_bgrtk.transpose(0, 3, 1, 2, 4).reshape(b, t, h, k)


def _kernel(
    heads_and_tokens: tuple[int, int],
    causal: bool,
    window: int,
    *,
    interpret: bool,
    keep: str | None,
) -> Any:
    """Make the kernel for one head of keys and values, by a mask that is the same for all rows."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

    heads, t = heads_and_tokens
    mask: mask_lib.Mask = mask_lib.FullMask((t, t))
    if window:
        ahead = 0 if causal else window - 1
        mask = mask_lib.LocalMask((t, t), (window - 1, ahead), 0)
    elif causal:
        mask = mask_lib.CausalMask((t, t))
    n = block_size(t)
    return kernel_lib.make_splash_mqa_single_device(
        mask_lib.MultiHeadMask([mask] * heads),
        block_sizes=kernel_lib.BlockSizes(
            block_q=n,
            block_kv=n,
            block_kv_compute=n,
            block_q_dkv=n,
            block_kv_dkv=n,
            block_kv_dkv_compute=n,
            block_q_dq=n,
            block_kv_dq=n,
        ),
        interpret=interpret,
        residual_checkpoint_name=keep,
    )


def _of_documents(
    kernel: Any, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array, blocks: Array
) -> Array:
    """Call a kernel on the rows as one sequence, with lists of the blocks of their documents."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    b, t, h, k = q_bthk.shape
    has_function = kernel.kwargs["mask_function"] is not None
    places: Any = jnp.arange(b * t, dtype=jnp.int32) if has_function else None

    def mask_info(first: Array, last: Array, *, by_keys: bool = False) -> info.MaskInfo:
        data_next, is_active = _lists(first, last)
        if by_keys:
            data_next, is_active = data_next.T, is_active.T
        return info.MaskInfo(data_next[None], None, is_active[None], None, places)

    first_key, last_key, first_query, last_query = jnp.moveaxis(blocks, 2, 0)
    of_queries = mask_info(first_key, last_key)
    of_keys = mask_info(first_query, last_query, by_keys=True)
    kwargs = {**kernel.kwargs, "is_mqa": False}
    on_rows: Any = kernel_lib.SplashAttentionKernel(of_queries, of_queries, of_keys, **kwargs)
    if k < LANES and not kernel.kwargs["interpret"]:
        # Rotated with the few values of a head in the lanes, q would be two to four times its size.
        q_bthk, k_bsgk, v_bsgk = (
            with_layout_constraint(x, TOKENS_LAST) for x in (q_bthk, k_bsgk, v_bsgk)
        )
    # a row's blocks are whole, so that no block of queries is active with another row's keys
    q_hnk, k_gnk, v_gnk = (
        x.transpose(2, 0, 1, 3).reshape(-1, b * t, k) for x in (q_bthk, k_bsgk, v_bsgk)
    )
    ids = segments_bt.reshape(b * t)
    y_hnk: Array = on_rows(q_hnk, k_gnk, v_gnk, kernel_lib.SegmentIds(ids, ids))
    return y_hnk.reshape(h, b, t, k).transpose(1, 2, 0, 3)


def _lists(first_bn: Array, last_bn: Array) -> tuple[Array, Array]:
    """Return the block that each step reads, int16 or int32, and whether it is computed, int8.

    Both are [B N, N], in the chip's scalar memory. Steps after the last one read its block again,
    which moves nothing.
    """
    n = first_bn.shape[1]
    first_of_row = n * jnp.arange(len(first_bn), dtype=jnp.int32)[:, None, None]
    steps = jnp.arange(n, dtype=jnp.int32)[None, None]
    block_bnm = first_bn[:, :, None] + steps
    is_active = block_bnm <= last_bn[:, :, None]
    data_next = first_of_row + jnp.minimum(block_bnm, last_bn[:, :, None])
    is_short = data_next.size // n <= jnp.iinfo(jnp.int16).max
    data_next = data_next.astype(jnp.int16 if is_short else jnp.int32)
    return data_next.reshape(-1, n), is_active.astype(jnp.int8).reshape(-1, n)
