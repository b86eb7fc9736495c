"""Attention for NVIDIA GPUs where documents, or a window to both sides, keep cuDNN's kernel from being used: Pallas, by Triton.

cuDNN takes documents as a mask [B, 1, T, S], or, packed, with softmax statistics for as many documents as a row may have: both
grow with T². Here a tile of queries reads the tiles of keys from the first to the last that can have something for it, by the
smallest and the largest document of each tile; none of the other tiles is read, and no array is larger than q (Dao et al. 2022;
Dao 2023). Documents need not be sorted, but only sorted ones leave tiles out.

From jax 0.11 on, lowering a kernel for Pallas's Triton backend raises a DeprecationWarning, which Python shows nobody unless it
is asked to (-W). The backend is whole in jax 0.11.2 and 0.12.0.1; a later jax is to remove it.

Shapes: B batch, T places, H heads, G key/value heads, R = H / G, K head dimension, N tiles; in a kernel Q queries and S keys of
a tile. Refs that end in ``_ref`` are in the GPU's memory.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.types import Array

NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)  # a score that no softmax sees; -inf would make nan of an empty row
NO_DOCUMENT = jnp.iinfo(jnp.int32).min  # the document of what fills the last tile
LOG2E = math.log2(math.e)


class Mask(NamedTuple):
    """Which keys a query sees, of those of its own document."""

    causal: bool
    window: int  # 0 = all
    tile: int  # queries and keys of a tile

    def keys(self, i: Array, last: Array | int) -> tuple[Array | int, Array | int]:
        """Tiles [from, to) of keys that tile i of queries can see, of ``last`` tiles."""
        first = jnp.maximum((i * self.tile - self.window + 1) // self.tile, 0) if self.window else 0
        if self.causal:
            last = i + 1
        elif self.window:
            last = jnp.minimum(((i + 1) * self.tile + self.window - 2) // self.tile + 1, last)
        return first, last

    def queries(self, j: Array, last: Array | int) -> tuple[Array | int, Array | int]:
        """Tiles [from, to) of queries that can see tile j of keys."""
        first = j if self.causal else 0
        if self.window:
            last = jnp.minimum(((j + 1) * self.tile + self.window - 2) // self.tile + 1, last)
            first = first if self.causal else jnp.maximum((j * self.tile - self.window + 1) // self.tile, 0)
        return first, last

    def seen(self, i: Array, j: Array, documents_q: Array, documents_s: Array) -> Array:
        """bool [Q, S]: what the queries of tile i see of the keys of tile j."""
        seen_qs = documents_q[:, None] == documents_s[None]
        back_qs = (i - j) * self.tile + jnp.arange(self.tile)[:, None] - jnp.arange(self.tile)[None]
        if self.causal:
            seen_qs &= back_qs >= 0
        if self.window:
            seen_qs &= jnp.abs(back_qs) < self.window
        return seen_qs


def flash(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    segments_bt: Array | None,
    interpret: bool = False,
) -> Array:
    """Attention of a sequence to itself, [B, T, H, K]; ``interpret`` runs it anywhere, slowly. Any T; K up to 256."""
    segments_bt = jnp.zeros(q_bthk.shape[:2], jnp.int32) if segments_bt is None else segments_bt
    tile = 64 if q_bthk.shape[3] <= 128 else 32  # what a multiprocessor's shared memory holds
    return _flash(Mask(causal, window, tile), interpret, q_bthk, k_bsgk, v_bsgk, segments_bt)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(mask: Mask, interpret: bool, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array) -> Array:
    return _forward(mask, interpret, q_bthk, k_bsgk, v_bsgk, segments_bt)[0]


def _forward(mask: Mask, interpret: bool, q: Array, k: Array, v: Array, segments_bt: Array) -> tuple[Array, tuple]:
    t, width, tile = q.shape[1], q.shape[3], mask.tile
    q_bthk, k_bsgk, v_bsgk = (_whole(x, tile) for x in (q, k, v))
    segments_bt, low_bn, high_bn = _documents(segments_bt, tile)
    b, whole, h, wide = q_bthk.shape
    r = h // k_bsgk.shape[2]
    pl = _pallas()
    of_queries, of_keys, row = _specs(pl, whole, wide, tile, low_bn.shape[1], lambda head: head // r)
    y_bthk, log_bht = _call(
        functools.partial(_forward_kernel, mask, whole // tile, LOG2E / math.sqrt(width)),
        (q_bthk, k_bsgk, v_bsgk, segments_bt, low_bn, high_bn),
        grid=(whole // tile, b, h),
        in_specs=[of_queries, of_keys, of_keys, *row],
        out_specs=[of_queries, pl.BlockSpec((None, None, tile), lambda i, b, h: (b, h, i))],
        out_shape=[q_bthk, jax.ShapeDtypeStruct((b, h, whole), jnp.float32)],
        name="flash_forward",
        interpret=interpret,
    )
    return (y := y_bthk[:, :t, :, :width]), (q, k, v, segments_bt[:, :t], y, log_bht)


def _backward(mask: Mask, interpret: bool, kept: tuple[Array, ...], dy: Array) -> tuple:
    q, k, v, segments_bt, y, log_bht = kept
    t, width, tile = q.shape[1], q.shape[3], mask.tile
    delta_bht = jnp.einsum("bthk,bthk->bht", dy, y, preferred_element_type=jnp.float32)
    delta_bht = jnp.pad(delta_bht, ((0, 0), (0, 0), (0, log_bht.shape[2] - t)))
    q_bthk, k_bsgk, v_bsgk, dy_bthk = (_whole(x, tile) for x in (q, k, v, dy))
    segments_bt, low_bn, high_bn = _documents(segments_bt, tile)
    b, whole, h, wide = q_bthk.shape
    g, scale = k_bsgk.shape[2], 1 / math.sqrt(width)
    pl = _pallas()
    args = (q_bthk, k_bsgk, v_bsgk, segments_bt, low_bn, high_bn, dy_bthk, log_bht, delta_bht)

    of_queries, of_keys, row = _specs(pl, whole, wide, tile, low_bn.shape[1], lambda head: head // (h // g))
    of_query = pl.BlockSpec((None, None, tile), lambda i, b, h: (b, h, i))
    (dq_bthk,) = _call(
        functools.partial(_query_kernel, mask, whole // tile, scale), args,
        grid=(whole // tile, b, h),
        in_specs=[of_queries, of_keys, of_keys, *row, of_queries, of_query, of_query],
        out_specs=[of_queries],
        out_shape=[q_bthk],
        name="flash_backward_queries",
        interpret=interpret,
    )  # fmt: skip
    # A tile of keys with all queries of its heads.
    all_queries = pl.BlockSpec((None, whole, h // g, wide), lambda j, b, g: (b, 0, g, 0))
    of_query = pl.BlockSpec((None, h // g, whole), lambda j, b, g: (b, g, 0))
    tile_of_keys = pl.BlockSpec((None, tile, None, wide), lambda j, b, g: (b, j, g, 0))
    dk_bsgk, dv_bsgk = _call(
        functools.partial(_key_kernel, mask, whole // tile, scale), args,
        grid=(whole // tile, b, g),
        in_specs=[all_queries, tile_of_keys, tile_of_keys, *row, all_queries, of_query, of_query],
        out_specs=[tile_of_keys, tile_of_keys],
        out_shape=[k_bsgk, v_bsgk],
        name="flash_backward_keys",
        interpret=interpret,
    )  # fmt: skip
    return *(x[:, :t, :, :width] for x in (dq_bthk, dk_bsgk, dv_bsgk)), None


_flash.defvjp(_forward, _backward)


def _forward_kernel(
    mask: Mask, tiles: int, scale: float, q_ref: Any, k_ref: Any, v_ref: Any, documents_ref: Any, low_ref: Any, high_ref: Any,
    y_ref: Any, log_ref: Any,
) -> None:  # fmt: skip
    pl, i = _pallas(), _pallas().program_id(0)
    q_qk = q_ref[...]
    documents_q = documents_ref[pl.ds(i * mask.tile, mask.tile)]

    def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y_qk, sum_q, top_q = state
        at = pl.ds(j * mask.tile, mask.tile)
        x_qs = jnp.where(mask.seen(i, j, documents_q, documents_ref[at]), _dot(q_qk, k_ref[at, :].T) * scale, NEVER)
        new_q = jnp.maximum(top_q, x_qs.max(1))
        # A query that has seen nothing yet adds up what is no score; the first real one shrinks that to zero.
        p_qs, shrink_q = jnp.exp2(x_qs - new_q[:, None]), jnp.exp2(top_q - new_q)
        y_qk = y_qk * shrink_q[:, None] + _dot(p_qs.astype(v_ref.dtype), v_ref[at, :])
        return y_qk, sum_q * shrink_q + p_qs.sum(1), new_q

    zero_q = jnp.zeros(mask.tile, jnp.float32)
    bounds = _bounds(mask.keys(i, tiles), documents_q, low_ref, high_ref)
    y_qk, sum_q, top_q = jax.lax.fori_loop(*bounds, step, (jnp.zeros(q_qk.shape, jnp.float32), zero_q, zero_q + NEVER))
    y_ref[...] = (y_qk / sum_q[:, None]).astype(y_ref.dtype)
    log_ref[...] = top_q + jnp.log2(sum_q)


def _query_kernel(
    mask: Mask, tiles: int, scale: float, q_ref: Any, k_ref: Any, v_ref: Any, documents_ref: Any, low_ref: Any, high_ref: Any,
    dy_ref: Any, log_ref: Any, delta_ref: Any, dq_ref: Any,
) -> None:  # fmt: skip
    pl, i = _pallas(), _pallas().program_id(0)
    q_qk, dy_qk, log_q, delta_q = q_ref[...], dy_ref[...], log_ref[...], delta_ref[...]
    documents_q = documents_ref[pl.ds(i * mask.tile, mask.tile)]

    def step(j: Array, dq_qk: Array) -> Array:
        at = pl.ds(j * mask.tile, mask.tile)
        k_sk = k_ref[at, :]
        seen_qs = mask.seen(i, j, documents_q, documents_ref[at])
        p_qs = jnp.where(seen_qs, jnp.exp2(_dot(q_qk, k_sk.T) * (scale * LOG2E) - log_q[:, None]), 0.0)
        dx_qs = p_qs * (_dot(dy_qk, v_ref[at, :].T) - delta_q[:, None]) * scale
        return dq_qk + _dot(dx_qs.astype(k_sk.dtype), k_sk)

    bounds = _bounds(mask.keys(i, tiles), documents_q, low_ref, high_ref)
    dq_ref[...] = jax.lax.fori_loop(*bounds, step, jnp.zeros(q_qk.shape, jnp.float32)).astype(dq_ref.dtype)


def _key_kernel(
    mask: Mask, tiles: int, scale: float, q_ref: Any, k_ref: Any, v_ref: Any, documents_ref: Any, low_ref: Any, high_ref: Any,
    dy_ref: Any, log_ref: Any, delta_ref: Any, dk_ref: Any, dv_ref: Any,
) -> None:  # fmt: skip
    pl, j = _pallas(), _pallas().program_id(0)
    k_sk, v_sk = k_ref[...], v_ref[...]
    documents_s = documents_ref[pl.ds(j * mask.tile, mask.tile)]
    first, last = _bounds(mask.queries(j, tiles), documents_s, low_ref, high_ref)

    def step(n: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        dk_sk, dv_sk = state
        r, i = n // (last - first), first + n % (last - first)  # all heads of these keys, one after the other
        at = pl.ds(i * mask.tile, mask.tile)
        q_qk, dy_qk = q_ref[at, r, :], dy_ref[at, r, :]
        seen_qs = mask.seen(i, j, documents_ref[at], documents_s)
        p_qs = jnp.where(seen_qs, jnp.exp2(_dot(q_qk, k_sk.T) * (scale * LOG2E) - log_ref[r, at][:, None]), 0.0)
        dx_qs = p_qs * (_dot(dy_qk, v_sk.T) - delta_ref[r, at][:, None]) * scale
        return dk_sk + _dot(dx_qs.astype(q_qk.dtype).T, q_qk), dv_sk + _dot(p_qs.astype(dy_qk.dtype).T, dy_qk)

    zero_sk = jnp.zeros(k_sk.shape, jnp.float32)
    dk_sk, dv_sk = jax.lax.fori_loop(0, q_ref.shape[1] * (last - first), step, (zero_sk, zero_sk))
    dk_ref[...], dv_ref[...] = dk_sk.astype(dk_ref.dtype), dv_sk.astype(dv_ref.dtype)


def _bounds(tiles: tuple[Array | int, Array | int], documents_s: Array, low_ref: Any, high_ref: Any) -> tuple[Array, Array]:
    """The tiles of [from, to) that may hold one of these documents: from the first to the last, at least one's own."""
    n = jnp.arange(low_ref.shape[0])
    near_n = (low_ref[...] <= documents_s.max()) & (high_ref[...] >= documents_s.min()) & (n >= tiles[0]) & (n < tiles[1])
    return jnp.where(near_n, n, low_ref.shape[0]).min(), jnp.where(near_n, n + 1, 0).max()


def _documents(segments_bt: Array, tile: int) -> tuple[Array, Array, Array]:
    """The document of every place, up to whole tiles, and the smallest and the largest of each tile.

    There are a power of two of tiles.
    """
    b, t = segments_bt.shape
    segments_bt = jnp.pad(segments_bt, ((0, 0), (0, -t % tile)), constant_values=NO_DOCUMENT)
    tiles_bnt = segments_bt.reshape(b, -1, tile)
    more = ((0, 0), (0, (1 << (tiles_bnt.shape[1] - 1).bit_length()) - tiles_bnt.shape[1]))
    low_bn = jnp.pad(tiles_bnt.min(2), more, constant_values=jnp.iinfo(jnp.int32).max)
    return segments_bt, low_bn, jnp.pad(tiles_bnt.max(2), more, constant_values=NO_DOCUMENT)


def _whole(x_bthk: Array, tile: int) -> Array:
    """Zeros after the last place up to whole tiles, and after a head's values up to a power of two, as Triton has them."""
    t, k = x_bthk.shape[1], x_bthk.shape[3]
    more = ((0, 0), (0, -t % tile), (0, 0), (0, max(16, 1 << (k - 1).bit_length()) - k))
    return jnp.pad(x_bthk, more) if any(after for _, after in more) else x_bthk


def _specs(pl: Any, t: int, k: int, tile: int, tiles: int, group: Any) -> tuple[Any, Any, list[Any]]:
    """The specs by which a program (tile of queries, row, head) finds its queries, all keys, and its row's documents."""
    row = [pl.BlockSpec((None, n), lambda i, b, h: (b, 0)) for n in (t, tiles, tiles)]
    of_queries = pl.BlockSpec((None, tile, None, k), lambda i, b, h: (b, i, h, 0))
    return of_queries, pl.BlockSpec((None, t, None, k), lambda i, b, h: (b, 0, group(h), 0)), row


def _call(
    kernel: Any, args: tuple[Array, ...], *, grid: tuple[int, ...], in_specs: list[Any], out_specs: list[Any],
    out_shape: list[Any], name: str, interpret: bool,
) -> Any:  # fmt: skip
    from jax.experimental.pallas import triton

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape]
    params = triton.CompilerParams(num_warps=4, num_stages=2)
    return _pallas().pallas_call(
        kernel, grid=grid, in_specs=in_specs, out_specs=out_specs, out_shape=shapes, name=name, interpret=interpret,
        compiler_params=params,
    )(*args)  # fmt: skip


def _dot(a: Array, b: Array) -> Array:
    return jax.lax.dot(a, b, preferred_element_type=jnp.float32)


def _pallas() -> Any:
    from jax.experimental import pallas

    return pallas
