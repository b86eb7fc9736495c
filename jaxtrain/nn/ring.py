"""Attention over a sequence that is split over devices.

Shapes: B batch, T queries, S keys, H heads, G key/value heads, R = H / G, K head dimension, C keys
at a time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.nn import NEVER, remat
from jaxtrain.nn.attention import same_segment, visible
from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Axes, Shard

Arrays = tuple[Array, ...]
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


class Ring(NamedTuple):
    """Attention over a sequence whose parts lie on the devices of a mesh axis, in order.

    Keys and values go around (Liu et al. 2023). Each device computes the attention of its queries
    to the part that is there, ``chunk`` keys at a time. It keeps only the softmax's normaliser, by
    which the backward pass computes the weights again (Dao et al. 2022). No device holds more than
    its part of the sequence and T × chunk weights of each head. Parts that the causal mask empties
    are computed too. They are half of them, and all devices would wait for the last one anyway.

    The axis must be manual in a call.
    """

    axis: str
    size: int  # devices along it
    causal: bool = True
    window: int = 0
    chunk: int = 512

    def forward(
        self, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array
    ) -> tuple[Array, Array]:
        """Return (y [B, T, H, K], log of the softmax's normaliser [B, G, R, T] float32)."""
        q_bgrtk = _by_group(q_bthk, k_bsgk.shape[2])
        # Zeros made of q vary over the devices as it does, as a loop's state must.
        zero_bgrt = jnp.zeros_like(q_bgrtk[..., 0], dtype=jnp.float32)
        state = (jnp.zeros_like(q_bgrtk, dtype=jnp.float32), zero_bgrt, zero_bgrt + NEVER)

        def chunk(state: Arrays, kvs: Arrays) -> tuple[Arrays, None]:
            y_bgrtk, sum_bgrt, top_bgrt = state
            k_bcgk, v_bcgk, place_c, segments_bc = kvs
            x_bgrtc = self._scores(q_bgrtk, segments_bt, k_bcgk, place_c, segments_bc)
            new_bgrt = jnp.maximum(top_bgrt, x_bgrtc.max(-1))
            p_bgrtc = jnp.exp(x_bgrtc - new_bgrt[..., None]) * (x_bgrtc > NEVER)
            shrink_bgrt = jnp.exp(top_bgrt - new_bgrt)
            y_bgrtk = y_bgrtk * shrink_bgrt[..., None]
            y_bgrtk += _einsum("bgrtc,bcgk->bgrtk", p_bgrtc.astype(v_bcgk.dtype), v_bcgk)
            sum_bgrt = sum_bgrt * shrink_bgrt + p_bgrtc.sum(-1)
            return (y_bgrtk, sum_bgrt, new_bgrt), None

        def part(i: Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            state, kvs = carry
            state, _ = jax.lax.scan(chunk, state, self._chunks(i, *kvs))
            return state, self._turn(kvs)

        (y_bgrtk, sum_bgrt, top_bgrt), _ = jax.lax.fori_loop(
            0, self.size, part, (state, (k_bsgk, v_bsgk, segments_bt))
        )
        y_bgrtk = y_bgrtk / sum_bgrt[..., None]
        return _by_place(y_bgrtk).astype(q_bthk.dtype), top_bgrt + jnp.log(sum_bgrt)

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
        q_bgrtk, dy_bgrtk, y_bgrtk = (
            _by_group(x, k_bsgk.shape[2]) for x in (q_bthk, dy_bthk, y_bthk)
        )
        delta_bgrt = (dy_bgrtk.astype(jnp.float32) * y_bgrtk.astype(jnp.float32)).sum(-1)
        scale = q_bthk.shape[-1] ** -0.5

        def chunk(dq_bgrtk: Array, kvs: Arrays) -> tuple[Array, Arrays]:
            k_bcgk, v_bcgk, place_c, segments_bc = kvs
            x_bgrtc = self._scores(q_bgrtk, segments_bt, k_bcgk, place_c, segments_bc)
            p_bgrtc = jnp.exp(x_bgrtc - log_bgrt[..., None]) * (x_bgrtc > NEVER)
            dv_bcgk = _einsum("bgrtc,bgrtk->bcgk", p_bgrtc.astype(dy_bgrtk.dtype), dy_bgrtk)
            dp_bgrtc = _einsum("bgrtk,bcgk->bgrtc", dy_bgrtk, v_bcgk)
            dx_bgrtc = (p_bgrtc * (dp_bgrtc - delta_bgrt[..., None]) * scale).astype(q_bgrtk.dtype)
            dk_bcgk = _einsum("bgrtc,bgrtk->bcgk", dx_bgrtc, q_bgrtk)
            dq_bgrtk = dq_bgrtk + _einsum("bgrtc,bcgk->bgrtk", dx_bgrtc, k_bcgk)
            return dq_bgrtk, (dk_bcgk, dv_bcgk)

        def part(i: Array, carry: tuple[Array, Arrays, Arrays]) -> tuple[Array, Arrays, Arrays]:
            dq_bgrtk, kvs, dkv = carry
            dq_bgrtk, grads = jax.lax.scan(chunk, dq_bgrtk, self._chunks(i, *kvs))
            dkv = tuple(
                old + jnp.moveaxis(new, 0, 1).reshape(old.shape)
                for old, new in zip(dkv, grads, strict=True)
            )
            return dq_bgrtk, self._turn(kvs), self._turn(dkv)

        zeros = tuple(jnp.zeros_like(x, dtype=jnp.float32) for x in (k_bsgk, v_bsgk))
        start = (jnp.zeros_like(q_bgrtk, dtype=jnp.float32), (k_bsgk, v_bsgk, segments_bt), zeros)
        dq_bgrtk, _, (dk_bsgk, dv_bsgk) = jax.lax.fori_loop(0, self.size, part, start)
        return (
            _by_place(dq_bgrtk).astype(q_bthk.dtype),
            dk_bsgk.astype(k_bsgk.dtype),
            dv_bsgk.astype(v_bsgk.dtype),
        )

    def _scores(
        self, q_bgrtk: Array, segments_bt: Array, k_bcgk: Array, place_c: Array, segments_bc: Array
    ) -> Array:
        t = q_bgrtk.shape[3]
        place_t = jax.lax.axis_index(self.axis) * t + jnp.arange(t)
        seen_btc = same_segment(segments_bt, segments_bc)
        seen_btc &= visible(place_t, place_c, causal=self.causal, window=self.window)[None]
        x_bgrtc = _einsum("bgrtk,bcgk->bgrtc", q_bgrtk, k_bcgk) * q_bgrtk.shape[-1] ** -0.5
        return jnp.where(seen_btc[:, None, None], x_bgrtc, NEVER)

    def _chunks(
        self, i: Array, k_bsgk: Array, v_bsgk: Array, segments_bs: Array
    ) -> tuple[Array, ...]:
        """Cut the part of the keys of round i along a new first axis, and add the keys' places."""
        s = k_bsgk.shape[1]
        n = s // self.chunk if s % self.chunk == 0 else 1
        first = (jax.lax.axis_index(self.axis) - i) % self.size * s
        cut = [
            jnp.moveaxis(x.reshape(x.shape[0], n, s // n, *x.shape[2:]), 1, 0)
            for x in (k_bsgk, v_bsgk, segments_bs)
        ]
        return cut[0], cut[1], (first + jnp.arange(s)).reshape(n, s // n), cut[2]

    def _turn(self, tree: Any) -> Any:
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(tree, self.axis, to_next)


def _by_group(x_bthk: Array, g: int) -> Array:
    b, t, h, k = x_bthk.shape
    return x_bthk.reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4)


def _by_place(x_bgrtk: Array) -> Array:
    b, g, r, t, k = x_bgrtk.shape
    return x_bgrtk.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def over_mesh(shard: Shard, ring: Ring, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _ring_forward(shard, ring, q, k, v, segments)[0]


def _ring_forward(shard: Shard, ring: Ring, *args: Array) -> tuple[Array, Arrays]:
    axes, (query, _, of_log) = _ring_axes(shard, *args[:2])
    y, log = kernels.local(shard, ring.forward, args, axes, (query, of_log))
    y, log = remat.name(y, "attention"), remat.name(log, "attention")
    return y, (*args, y, log)


def _ring_backward(
    shard: Shard, ring: Ring, residuals: Arrays, dy: Array
) -> tuple[Array | None, ...]:
    axes, (query, key, _) = _ring_axes(shard, *residuals[:2])
    of_log = ("batch", "kv_heads", None, "seq")
    all_axes = (*axes, axes[0], of_log, axes[0])
    grads = kernels.local(shard, ring.backward, (*residuals, dy), all_axes, (query, key, key))
    return (*grads, None)


over_mesh.defvjp(_ring_forward, _ring_backward)


def _ring_axes(
    shard: Shard, q: Array, k: Array
) -> tuple[tuple[Axes, ...], tuple[PartitionSpec, ...]]:
    """Return the logical axes of q, k, v and segments, and the partitions of q, k and the log."""
    query: Axes = ("batch", "seq", "heads", None)
    key: Axes = ("batch", "seq", "kv_heads", None)
    rows: Axes = ("batch", "seq")
    b, t, h, _ = q.shape
    g = k.shape[2]
    log = shard.spec((b, g, h // g, t), ("batch", "kv_heads", None, "seq"))
    return (query, key, key, rows), (shard.spec(q.shape, query), shard.spec(k.shape, key), log)
