"""Attention some keys at a time, also over a sequence that is split over devices.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, R = H / G, K head dimension, C keys
at a time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.nn import NEVER, remat
from jaxtrain.nn.attention import same_segment, visible
from jaxtrain.nn.cudnn import NO_DOCUMENT
from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Axes, Shard

Arrays = tuple[Array, ...]
OF_LOG: Axes = ("batch", "heads", None, "seq")  # of the softmax's normaliser [B, G, R, T]
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def attention(
    shard: Shard,
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    segments_bt: Array | None,
    *,
    causal: bool,
    window: int,
) -> Array:
    """Compute `nn.attention.within` for arrays whose logical axis "seq" is split.

    The activations that the backward pass reads are named "attention". Raises ValueError if "seq"
    is split over several mesh axes.
    """
    b, t = q_bthk.shape[:2]
    names = shard.names("seq", t)
    if len(names) > 1:
        raise ValueError(
            "config.mesh.axis_rules: a sequence can be split over one mesh axis, and 'seq' has"
            f" {names}"
        )
    if segments_bt is None:
        segments_bt = jnp.zeros((b, t), jnp.int32)
    ring = Ring(names[0], shard.size("seq", t), causal, window)
    return over_mesh(shard, ring, q_bthk, k_bsgk, v_bsgk, segments_bt)


def whole(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    segments_bt: Array | None,
    *,
    causal: bool,
    window: int,
    keep: str | None,
) -> Array:
    """Compute attention within sequences that are on one device, some keys at a time.

    ``keep``: as in `nn.attention.within`.
    """
    b, t = q_bthk.shape[:2]
    ring = Ring(causal=causal, window=window)
    if segments_bt is None:
        segments_bt = jnp.zeros((b, t), jnp.int32)
    filling = -t % ring.chunk if t > ring.chunk else 0
    if filling:
        places = ((0, 0), (0, filling))
        segments_bt = jnp.pad(segments_bt, places, constant_values=NO_DOCUMENT)
        q_bthk, k_bsgk, v_bsgk = (
            jnp.pad(x, (*places, (0, 0), (0, 0))) for x in (q_bthk, k_bsgk, v_bsgk)
        )
    y_bthk = _on_one_device(ring, keep, q_bthk, k_bsgk, v_bsgk, segments_bt)
    return y_bthk[:, :t]


class Ring(NamedTuple):
    """Attention over a sequence whose parts lie on the devices of a mesh axis, in order.

    Keys and values go around (Liu et al. 2023). Each device computes the attention of its queries
    to the part that is there, ``chunk`` keys at a time. It keeps only the softmax's normaliser, by
    which the backward pass computes the weights again (Dao et al. 2022). No device holds more than
    its part of the sequence and T × chunk weights of each head. Parts that the causal mask empties
    are computed too. They are half of them, and all devices would wait for the last one anyway.

    The axis must be manual in a call.
    """

    axis: str = ""  # "" = the sequence is on one device
    size: int = 1  # devices along the axis
    causal: bool = True
    window: int = 0
    chunk: int = 512

    def forward(
        self, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array
    ) -> tuple[Array, Array]:
        """Return (y [B, T, H, K], log of the softmax's normaliser [B, G, R, T] float32)."""
        g = k_bsgk.shape[2]
        q_bgrtk = _by_group(q_bthk, g)
        # Zeros made of q vary over the devices as it does, as a loop's state must.
        q_bgrt = q_bgrtk[..., 0]
        zero_bgrt = jnp.zeros_like(q_bgrt, dtype=jnp.float32)
        zero_bgrtk = jnp.zeros_like(q_bgrtk, dtype=jnp.float32)
        start = (zero_bgrtk, zero_bgrt, zero_bgrt + NEVER)

        def chunk(state: Arrays, kvs: Arrays) -> tuple[Arrays, None]:
            y_bgrtk, sum_bgrt, top_bgrt = state
            k_bcgk, v_bcgk, place_c, segments_bc = kvs
            x_bgrtc = self._scores(q_bgrtk, segments_bt, k_bcgk, place_c, segments_bc)
            top_of_chunk_bgrt = x_bgrtc.max(-1)
            new_top_bgrt = jnp.maximum(top_bgrt, top_of_chunk_bgrt)
            p_bgrtc = _weights(x_bgrtc, new_top_bgrt)
            shrink_bgrt = jnp.exp(top_bgrt - new_top_bgrt)
            y_bgrtk = y_bgrtk * shrink_bgrt[..., None]
            narrow_bgrtc = p_bgrtc.astype(v_bcgk.dtype)
            y_bgrtk += _einsum("bgrtc,bcgk->bgrtk", narrow_bgrtc, v_bcgk)
            sum_bgrt = sum_bgrt * shrink_bgrt
            sum_bgrt += p_bgrtc.sum(-1)
            return (y_bgrtk, sum_bgrt, new_top_bgrt), None

        def part(i: Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            state, kvs = carry
            chunks = self._chunks(i, *kvs)
            state, _ = jax.lax.scan(chunk, state, chunks)
            return state, self._turn(kvs)

        kvs = (k_bsgk, v_bsgk, segments_bt)
        state, _ = self._each_part(part, (start, kvs))
        y_bgrtk, sum_bgrt, top_bgrt = state
        y_bgrtk = y_bgrtk / sum_bgrt[..., None]
        y_bthk = _by_place(y_bgrtk)
        y_bthk = y_bthk.astype(q_bthk.dtype)
        log_bgrt = top_bgrt + jnp.log(sum_bgrt)
        return y_bthk, log_bgrt

    def backward(
        self,
        q_bthk: Array,
        k_bsgk: Array,
        v_bsgk: Array,
        segments_bt: Array,
        y_bthk: Array,
        log_bgrt: Array,
        dy_bthk: Array,
    ) -> tuple[Array, Array, Array]:
        """Return the derivatives by q, k and v. Those by k and v travel with them."""
        _, s, g, _ = k_bsgk.shape
        q_bgrtk = _by_group(q_bthk, g)
        dy_bgrtk = _by_group(dy_bthk, g)
        y_bgrtk = _by_group(y_bthk, g)
        dy_y_bgrtk = dy_bgrtk.astype(jnp.float32) * y_bgrtk.astype(jnp.float32)
        delta_bgrt = dy_y_bgrtk.sum(-1)
        scale = q_bthk.shape[-1] ** -0.5

        def chunk(dq_bgrtk: Array, kvs: Arrays) -> tuple[Array, Arrays]:
            k_bcgk, v_bcgk, place_c, segments_bc = kvs
            x_bgrtc = self._scores(q_bgrtk, segments_bt, k_bcgk, place_c, segments_bc)
            p_bgrtc = _weights(x_bgrtc, log_bgrt)
            narrow_bgrtc = p_bgrtc.astype(dy_bgrtk.dtype)
            dv_bcgk = _einsum("bgrtc,bgrtk->bcgk", narrow_bgrtc, dy_bgrtk)
            dp_bgrtc = _einsum("bgrtk,bcgk->bgrtc", dy_bgrtk, v_bcgk)
            dx_bgrtc = p_bgrtc * (dp_bgrtc - delta_bgrt[..., None])
            dx_bgrtc = dx_bgrtc * scale
            dx_bgrtc = dx_bgrtc.astype(q_bgrtk.dtype)
            dk_bcgk = _einsum("bgrtc,bgrtk->bcgk", dx_bgrtc, q_bgrtk)
            dq_bgrtk += _einsum("bgrtc,bcgk->bgrtk", dx_bgrtc, k_bcgk)
            return dq_bgrtk, (dk_bcgk, dv_bcgk)

        def part(i: Array, carry: tuple[Array, Arrays, Arrays]) -> tuple[Array, Arrays, Arrays]:
            dq_bgrtk, kvs, (dk_bsgk, dv_bsgk) = carry
            chunks = self._chunks(i, *kvs)
            dq_bgrtk, (dk_nbcgk, dv_nbcgk) = jax.lax.scan(chunk, dq_bgrtk, chunks)
            dk_bsgk += _joined(dk_nbcgk, s)
            dv_bsgk += _joined(dv_nbcgk, s)
            return dq_bgrtk, self._turn(kvs), self._turn((dk_bsgk, dv_bsgk))

        kvs = (k_bsgk, v_bsgk, segments_bt)
        zero_k_bsgk = jnp.zeros_like(k_bsgk, dtype=jnp.float32)
        zero_v_bsgk = jnp.zeros_like(v_bsgk, dtype=jnp.float32)
        zero_q_bgrtk = jnp.zeros_like(q_bgrtk, dtype=jnp.float32)
        start = (zero_q_bgrtk, kvs, (zero_k_bsgk, zero_v_bsgk))
        dq_bgrtk, _, (dk_bsgk, dv_bsgk) = self._each_part(part, start)
        dq_bthk = _by_place(dq_bgrtk)
        dq_bthk = dq_bthk.astype(q_bthk.dtype)
        dk_bsgk = dk_bsgk.astype(k_bsgk.dtype)
        dv_bsgk = dv_bsgk.astype(v_bsgk.dtype)
        return dq_bthk, dk_bsgk, dv_bsgk

    def _scores(
        self, q_bgrtk: Array, segments_bt: Array, k_bcgk: Array, place_c: Array, segments_bc: Array
    ) -> Array:
        *_, t, k = q_bgrtk.shape
        place_t = self._index() * t + jnp.arange(t)
        seen_btc = same_segment(segments_bt, segments_bc)
        seen_tc = visible(place_t, place_c, causal=self.causal, window=self.window)
        seen_btc &= seen_tc[None]
        x_bgrtc = _einsum("bgrtk,bcgk->bgrtc", q_bgrtk, k_bcgk)
        x_bgrtc = x_bgrtc * k**-0.5
        seen_b11tc = seen_btc[:, None, None]
        return jnp.where(seen_b11tc, x_bgrtc, NEVER)

    def _chunks(
        self, i: Array, k_bsgk: Array, v_bsgk: Array, segments_bs: Array
    ) -> tuple[Array, ...]:
        """Cut the part of the keys of round i along a new first axis, and add the keys' places."""
        s = k_bsgk.shape[1]
        n, filling = self._cuts(s)
        if filling:
            places = ((0, 0), (0, filling))
            segments_bs = jnp.pad(segments_bs, places, constant_values=NO_DOCUMENT)
            k_bsgk, v_bsgk = (jnp.pad(x, (*places, (0, 0), (0, 0))) for x in (k_bsgk, v_bsgk))
        device = (self._index() - i) % self.size  # that the part belongs to
        first = device * s
        k_nbcgk = _cut(k_bsgk, n)
        v_nbcgk = _cut(v_bsgk, n)
        segments_nbc = _cut(segments_bs, n)
        place_s = first + jnp.arange(s + filling)
        return k_nbcgk, v_nbcgk, place_s.reshape(n, -1), segments_nbc

    def _cuts(self, s: int) -> tuple[int, int]:
        """Return the number of chunks of S keys, and the keys that fill the last one.

        Without a divisor, as of a prime S, equal chunks would be small.
        """
        least = -(-s // self.chunk)
        for n in range(least, 2 * least):
            if s % n == 0:
                return n, 0
        return least, least * self.chunk - s

    def _each_part(self, part: Callable[[Any, Any], Any], start: Any) -> Any:
        # In a loop of one round JAX would compute the scores of all chunks first, and keep them.
        if not self.axis:
            return part(0, start)
        return jax.lax.fori_loop(0, self.size, part, start)

    def _index(self) -> Array | int:
        return jax.lax.axis_index(self.axis) if self.axis else 0

    def _turn(self, tree: Any) -> Any:
        if not self.axis:
            return tree
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(tree, self.axis, to_next)


def _weights(x_bgrtc: Array, log_bgrt: Array) -> Array:
    """Compute the weights of keys, times a normaliser of this logarithm. Unseen keys have 0."""
    p_bgrtc = jnp.exp(x_bgrtc - log_bgrt[..., None])
    return p_bgrtc * (x_bgrtc > NEVER)


def _cut(x: Array, n: int) -> Array:
    """Cut the sequence [B, S, …] in n parts along a new first axis."""
    b, s, *remaining = x.shape
    parts = x.reshape(b, n, s // n, *remaining)
    return jnp.moveaxis(parts, 1, 0)


def _joined(parts: Array, s: int) -> Array:
    """Join the parts of a sequence of S places again, without what fills the last part."""
    n, b, c, *remaining = parts.shape
    x = jnp.moveaxis(parts, 0, 1)
    x = x.reshape(b, n * c, *remaining)
    return x[:, :s]


def _by_group(x_bthk: Array, g: int) -> Array:
    b, t, h, k = x_bthk.shape
    x_btgrk = x_bthk.reshape(b, t, g, h // g, k)
    return x_btgrk.transpose(0, 2, 3, 1, 4)


def _by_place(x_bgrtk: Array) -> Array:
    b, g, r, t, k = x_bgrtk.shape
    x_btgrk = x_bgrtk.transpose(0, 3, 1, 2, 4)
    return x_btgrk.reshape(b, t, g * r, k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _on_one_device(ring: Ring, keep: str | None, *args: Array) -> Array:
    return _in_one_piece(ring.forward)(*args)[0]


def _forward(ring: Ring, keep: str | None, *args: Array) -> tuple[Array, Arrays]:
    y, log = _in_one_piece(ring.forward)(*args)
    if keep:
        y = remat.name(y, keep)
        log = remat.name(log, keep)
    return y, (*args, y, log)


def _backward(
    ring: Ring, keep: str | None, residuals: Arrays, dy: Array
) -> tuple[Array | None, ...]:
    return (*_in_one_piece(ring.backward)(*residuals, dy), None)


def _in_one_piece(f: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Keep JAX from computing the masks of all chunks before a loop over layers."""
    return jax.checkpoint(f, prevent_cse=False)


_on_one_device.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def over_mesh(shard: Shard, ring: Ring, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _ring_forward(shard, ring, q, k, v, segments)[0]


def _ring_forward(shard: Shard, ring: Ring, *args: Array) -> tuple[Array, Arrays]:
    axes, (query, _, of_log) = _ring_axes(shard, *args[:2])
    y, log = kernels.local(shard, ring.forward, args, axes, (query, of_log))
    y = remat.name(y, "attention")
    log = remat.name(log, "attention")
    return y, (*args, y, log)


def _ring_backward(
    shard: Shard, ring: Ring, residuals: Arrays, dy: Array
) -> tuple[Array | None, ...]:
    axes, (query, key, _) = _ring_axes(shard, *residuals[:2])
    of_query = axes[0]
    all_axes = (*axes, of_query, OF_LOG, of_query)
    args = (*residuals, dy)
    grads = kernels.local(shard, ring.backward, args, all_axes, (query, key, key))
    return (*grads, None)


over_mesh.defvjp(_ring_forward, _ring_backward)


def _ring_axes(
    shard: Shard, q: Array, k: Array
) -> tuple[tuple[Axes, ...], tuple[PartitionSpec, ...]]:
    """Return the logical axes of q, k, v and segments, and the partitions of q, k and the log.

    Keys are split as queries are, since each device computes with the heads of its own queries.
    """
    head: Axes = ("batch", "seq", "heads", None)
    b, t, h, _ = q.shape
    g = k.shape[2]
    log = shard.spec((b, g, h // g, t), OF_LOG)
    partitions = (shard.spec(q.shape, head), shard.spec(k.shape, head), log)
    return (head, head, head, ("batch", "seq")), partitions
