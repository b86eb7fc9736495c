"""Attention: one function, the kernel chosen by the platform that the program is for, wherever it is traced (`choose`).

    gpu   16-bit numbers: cuDNN's fused kernel; `flash` (Pallas, by Triton) for packed documents, for a window to both sides
          and for heads that cuDNN does not take. Neither has an array that grows with T × S
    tpu   the splash kernel of Pallas, for sequences and heads that fill its lanes; blocks that the mask empties are skipped
    else  XLA, which holds all B × H × T × S weights of a layer; on GPUs and TPUs, 16-bit models compute them again in the
          backward pass, so that no layer keeps them. For CPUs its products in float32 are those of `heads_first`

`within` calls them on a mesh, each device on its own rows and heads (`Sharder.kernel`). XLA splits its own attention by itself.

There is also `Ring`, for sequences that are split over devices. All of them compute
softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017) with a float32 softmax over the keys that a query may see:

- ``causal``: key s of query t only if s <= t
- ``window``: and only if t - s < window (Beltagy et al. 2020), 0 for all
- ``segments``: only keys of the query's own document. Padding is a segment of its own.

Shapes: B batch, T queries, S keys, H heads, G key/value heads (which divide H: Ainslie et al. 2023), R = H / G, K head
dimension, C keys at a time.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from jaxtrain.nn import remat
from jaxtrain.nn.flash import NEVER, flash
from jaxtrain.nn.heads_first import heads_first
from jaxtrain.types import Array, Shard

LANES = 128  # of a TPU's vector registers, which splash fills
BLOCK = 512  # [queries or keys] of a tile of splash, where it divides the sequence
HOPPER = (9, 0)  # compute capability from which cuDNN has heads of more than 128 values
CUDNN = 91000  # [version] that a program for GPUs is traced for where there is none
_ASKING = threading.Lock()  # what JAX asks the host is replaced for one thread at a time


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
    """`attention` of arrays that ``shard`` lays out over a mesh, for the devices of that mesh. Rows and heads are split.

    ``keep``: a name of `remat.scan` for what the backward pass reads of it; cuDNN's and `flash`'s is known by `is_forward`.
    ``policy``: of the layers around it, a word of `jaxtrain.nn.remat`. It decides whether XLA's own attention is computed again
    from q, k and v in the backward pass, as the kernels do it, or the whole layer is anyway (`remat.cheap`).
    """
    platform, capability = shard.devices
    run = functools.partial(attention, causal=causal, window=window, platform=platform, capability=capability, keep=keep)
    kernel = choose(
        q_bthk.shape, q_bthk.dtype, causal=causal, window=window, packed=segments_bt is not None, platform=platform,
        capability=capability,
    )  # fmt: skip
    if kernel == "xla":
        run = functools.partial(run, segments_bt=segments_bt)
        return (run if platform == "cpu" else remat.cheap(policy)(run))(q_bthk, k_bsgk, v_bsgk)
    query, key = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    if k_bsgk.shape[2] == q_bthk.shape[2]:
        key = query
    constants = () if segments_bt is None else (segments_bt,)
    return shard.kernel(
        lambda q, k, v, *s: run(q, k, v, segments_bt=s[0] if s else None), (q_bthk, k_bsgk, v_bsgk), (query, key, key),
        shard.spec(q_bthk.shape, query), constants=constants, constant_axes=[("batch", None)] * len(constants),
    )  # fmt: skip


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
    """Attention of a sequence to itself. Returns [B, T, H, K].

    Args:
      segments_bt: int32; documents that do not see each other.
      platform: "cpu", "gpu" or "tpu"; None = where this process computes.
      capability: of the GPUs, as "9.0"; "" = unknown.
      keep: see `within`.
    """
    if platform is None:
        platform, capability = host()
    kernel = choose(
        q_bthk.shape, q_bthk.dtype, causal=causal, window=window, packed=segments_bt is not None, platform=platform,
        capability=capability,
    )  # fmt: skip
    if kernel == "cudnn":
        return fused(q_bthk, k_bsgk, v_bsgk, causal=causal, window=window, capability=capability)
    if kernel == "flash":
        return flash(q_bthk, k_bsgk, v_bsgk, causal=causal, window=window, segments_bt=segments_bt)
    if kernel == "splash":
        return splash(q_bthk, k_bsgk, v_bsgk, causal=causal, window=window, segments_bt=segments_bt, keep=keep)
    t = jnp.arange(q_bthk.shape[1])
    mask_bts = visible(t, t, causal=causal, window=window)[None]
    if segments_bt is not None:
        mask_bts = mask_bts & same_segment(segments_bt, segments_bt)
    xla = heads_first if platform == "cpu" and q_bthk.dtype == jnp.float32 else masked
    y_bthk = xla(q_bthk, k_bsgk, v_bsgk, mask_bts)
    return remat.name(y_bthk, keep) if keep else y_bthk


def choose(
    shape: tuple[int, ...], dtype: Any, *, causal: bool, window: int, packed: bool, platform: str, capability: str = ""
) -> str:
    """The kernel for queries [B, T, H, K]: "cudnn", "flash", "splash" or "xla".

    What this asks is all that may decide it: a plan, which is traced on another machine, has to get the same.
    """
    if platform == "tpu" and splash_fits(shape):
        return "splash"
    if platform != "gpu" or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    generation = _generation(capability)
    if generation < (8, 0) or shape[3] > (256 if generation >= HOPPER else 128):
        return "xla"
    return "flash" if packed or shape[3] % 8 or window and not causal else "cudnn"


def is_forward(kernel: str) -> bool:
    """Whether a jaxpr calls the forward pass of cuDNN's kernel or of `flash` so. (Splash names what it keeps itself.)"""
    return kernel in ("dot_product_attention_fwd_wrapper", "flash_forward")


def host() -> tuple[str, str]:
    """(platform, compute capability) of where this process computes: of `jax.default_device`, else of its first device."""
    options: Any = jax.config  # jax adds its options as it is imported
    device: Any = options.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    device = device or jax.devices()[0]
    return ("gpu" if device.platform in ("cuda", "rocm") else device.platform), str(getattr(device, "compute_capability", ""))


def _generation(capability: str) -> tuple[int, ...]:
    """(9, 0) of "9.0". Unknown: the oldest that has the kernels. Another vendor's, as "gfx942": one that has none."""
    if not capability:
        return (8, 0)
    parts = capability.split(".")
    return tuple(int(n) for n in parts) if all(n.isdecimal() for n in parts) else (0, 0)


def fused(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool,
    window: int,
    capability: str = "",
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """cuDNN's kernel. An odd length gets a place that nobody sees: with a bias JAX derives even ones only (0.10 to 0.12).

    A window is to the left of a causal query: cuDNN has no other.
    """
    b, t = q_bthk.shape[:2]
    lengths = None
    if t % 2:
        q_bthk, k_bsgk, v_bsgk = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q_bthk, k_bsgk, v_bsgk))
        if not causal:
            lengths = jnp.full(b, t, jnp.int32)
    left = (window - 1, 0 if causal else window - 1) if window else None
    with _as_on(capability) if implementation == "cudnn" else contextlib.nullcontext():
        y_bthk = jax.nn.dot_product_attention(
            q_bthk, k_bsgk, v_bsgk, is_causal=causal, local_window_size=left, query_seq_lengths=lengths,
            key_value_seq_lengths=lengths, implementation=implementation,
        )  # fmt: skip
    return y_bthk[:, :t]


@contextlib.contextmanager
def _as_on(capability: str) -> Iterator[None]:
    """JAX asks this host for its cuDNN and its GPU (0.10 to 0.12); a program for other GPUs is traced as there.

    On a host with such a GPU nothing is replaced: the answers are its own.
    """
    if host() in (("gpu", capability), ("gpu", "")):
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    own = _generation(capability)

    def at_least(other: str) -> bool:
        return own >= _generation(other)

    def equal(other: str) -> bool:
        return own == _generation(other)

    with _ASKING, mock.patch.multiple(
        cudnn, check_cudnn_version=lambda: CUDNN, check_compute_capability=at_least, is_cuda_compute_capability_equal=equal
    ):  # fmt: skip
        yield


def masked(q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array) -> Array:
    """Attention to the keys where the mask [B or 1, T, S] is true, by XLA. A query that sees none averages them all."""
    return jax.nn.dot_product_attention(q_bthk, k_bsgk, v_bsgk, mask=mask_bts[:, None], implementation="xla")


def visible(t: Array, s: Array, *, causal: bool, window: int) -> Array:
    """bool [T, S]: whether the query at place t may see the key at place s."""
    back_ts = t[:, None] - s[None]
    seen_ts = jnp.ones(back_ts.shape, bool)
    if causal:
        seen_ts &= back_ts >= 0
    if window:
        seen_ts &= jnp.abs(back_ts) < window
    return seen_ts


def same_segment(a_bt: Array, b_bs: Array) -> Array:
    return a_bt[:, :, None] == b_bs[:, None]


def splash_fits(shape: tuple[int, ...]) -> bool:
    """Whether splash takes queries of this shape [B, T, H, K]."""
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
    """The kernel for TPUs; ``interpret`` runs it anywhere, slowly."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

    b, t, h, k = q_bthk.shape
    g = k_bsgk.shape[2]
    if window:
        one: mask_lib.Mask = mask_lib.LocalMask((t, t), (window - 1, 0 if causal else window - 1), 0)
    else:
        one = mask_lib.CausalMask((t, t)) if causal else mask_lib.FullMask((t, t))
    n = next(size for size in (BLOCK, 256, LANES) if t % size == 0)
    blocks = kernel_lib.BlockSizes(
        block_q=n, block_kv=n, block_kv_compute=n, block_q_dkv=n, block_kv_dkv=n, block_kv_dkv_compute=n, block_q_dq=n,
        block_kv_dq=n,
    )  # fmt: skip
    kernel = kernel_lib.make_splash_mqa_single_device(
        mask_lib.MultiHeadMask([one] * (h // g)), block_sizes=blocks, interpret=interpret, residual_checkpoint_name=keep
    )
    q_bgrtk = (q_bthk * k**-0.5).astype(q_bthk.dtype).reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4)
    k_bgsk, v_bgsk = (x.transpose(0, 2, 1, 3) for x in (k_bsgk, v_bsgk))
    segments_bt = jnp.zeros((b, t), jnp.int32) if segments_bt is None else segments_bt

    def row(q_grtk: Array, k_gsk: Array, v_gsk: Array, segments_t: Array) -> Array:
        segments = kernel_lib.SegmentIds(segments_t, segments_t)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segments))(q_grtk, k_gsk, v_gsk)

    y_bgrtk = jax.vmap(row)(q_bgrtk, k_bgsk, v_bgsk, segments_bt)
    return y_bgrtk.transpose(0, 3, 1, 2, 4).reshape(b, t, h, k)


class Ring(NamedTuple):
    """Attention over a sequence whose parts lie on the devices of a mesh axis, in order (Liu et al. 2023).

    Keys and values go around; each device adds what its queries take from the part that is there, ``chunk`` keys at a time, and
    remembers the softmax's normaliser alone, by which the backward pass computes the weights again (Dao et al. 2022). No
    device holds more than its part of the sequence and T × chunk weights of each head. Parts that the causal mask empties are
    computed too: they are half of them, and all devices would wait for the last one anyway.

    To be called where the axis is manual.
    """

    axis: str
    size: int  # devices along it
    groups: int  # key/value heads
    causal: bool = True
    window: int = 0
    chunk: int = 512

    def forward(self, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array) -> tuple[Array, Array]:
        """Returns (y [B, T, H, K], log of the softmax's normaliser [B, G, R, T] float32)."""
        q_bgrtk = self._grouped(q_bthk)
        # Zeros made of q vary over the devices as it does, as a loop's state must.
        zero_bgrt = jnp.zeros_like(q_bgrtk[..., 0], dtype=jnp.float32)
        state = (jnp.zeros_like(q_bgrtk, dtype=jnp.float32), zero_bgrt, zero_bgrt + NEVER)

        def chunk(state: tuple, kvs: tuple) -> tuple[tuple, None]:
            y_bgrtk, sum_bgrt, top_bgrt = state
            k_bcgk, v_bcgk, place_c, segments_bc = kvs
            x_bgrtc = self._scores(q_bgrtk, segments_bt, k_bcgk, place_c, segments_bc)
            new_bgrt = jnp.maximum(top_bgrt, x_bgrtc.max(-1))
            p_bgrtc = jnp.exp(x_bgrtc - new_bgrt[..., None]) * (x_bgrtc > NEVER)
            shrink_bgrt = jnp.exp(top_bgrt - new_bgrt)
            y_bgrtk = y_bgrtk * shrink_bgrt[..., None] + _einsum("bgrtc,bcgk->bgrtk", p_bgrtc.astype(v_bcgk.dtype), v_bcgk)
            return (y_bgrtk, sum_bgrt * shrink_bgrt + p_bgrtc.sum(-1), new_bgrt), None

        def part(i: Array, carry: tuple) -> tuple:
            state, kvs = carry
            state, _ = jax.lax.scan(chunk, state, self._chunks(i, *kvs))
            return state, self._turn(kvs)

        (y_bgrtk, sum_bgrt, top_bgrt), _ = jax.lax.fori_loop(0, self.size, part, (state, (k_bsgk, v_bsgk, segments_bt)))
        y_bgrtk = y_bgrtk / sum_bgrt[..., None]
        return self._flat(y_bgrtk).astype(q_bthk.dtype), top_bgrt + jnp.log(sum_bgrt)

    def backward(
        self, q_bthk: Array, k_bsgk: Array, v_bsgk: Array, segments_bt: Array, y_bthk: Array, log_bgrt: Array, dy_bthk: Array
    ) -> tuple[Array, Array, Array]:
        """Derivatives by q, k and v. Those by k and v travel with them."""
        q_bgrtk, dy_bgrtk = self._grouped(q_bthk), self._grouped(dy_bthk)
        delta_bgrt = (dy_bgrtk.astype(jnp.float32) * self._grouped(y_bthk).astype(jnp.float32)).sum(-1)
        scale = q_bthk.shape[-1] ** -0.5

        def chunk(dq_bgrtk: Array, kvs: tuple) -> tuple[Array, tuple]:
            k_bcgk, v_bcgk, place_c, segments_bc = kvs
            x_bgrtc = self._scores(q_bgrtk, segments_bt, k_bcgk, place_c, segments_bc)
            p_bgrtc = jnp.exp(x_bgrtc - log_bgrt[..., None]) * (x_bgrtc > NEVER)
            dv_bcgk = _einsum("bgrtc,bgrtk->bcgk", p_bgrtc.astype(dy_bgrtk.dtype), dy_bgrtk)
            dp_bgrtc = _einsum("bgrtk,bcgk->bgrtc", dy_bgrtk, v_bcgk)
            dx_bgrtc = (p_bgrtc * (dp_bgrtc - delta_bgrt[..., None]) * scale).astype(q_bgrtk.dtype)
            dk_bcgk = _einsum("bgrtc,bgrtk->bcgk", dx_bgrtc, q_bgrtk)
            return dq_bgrtk + _einsum("bgrtc,bcgk->bgrtk", dx_bgrtc, k_bcgk), (dk_bcgk, dv_bcgk)

        def part(i: Array, carry: tuple) -> tuple:
            dq_bgrtk, kvs, dkv = carry
            dq_bgrtk, grads = jax.lax.scan(chunk, dq_bgrtk, self._chunks(i, *kvs))
            dkv = tuple(old + jnp.moveaxis(new, 0, 1).reshape(old.shape) for old, new in zip(dkv, grads, strict=True))
            return dq_bgrtk, self._turn(kvs), self._turn(dkv)

        zeros = tuple(jnp.zeros_like(x, dtype=jnp.float32) for x in (k_bsgk, v_bsgk))
        start = (jnp.zeros_like(q_bgrtk, dtype=jnp.float32), (k_bsgk, v_bsgk, segments_bt), zeros)
        dq_bgrtk, _, (dk_bsgk, dv_bsgk) = jax.lax.fori_loop(0, self.size, part, start)
        return self._flat(dq_bgrtk).astype(q_bthk.dtype), dk_bsgk.astype(k_bsgk.dtype), dv_bsgk.astype(v_bsgk.dtype)

    def _scores(self, q_bgrtk: Array, segments_bt: Array, k_bcgk: Array, place_c: Array, segments_bc: Array) -> Array:
        t = q_bgrtk.shape[3]
        place_t = jax.lax.axis_index(self.axis) * t + jnp.arange(t)
        seen_btc = same_segment(segments_bt, segments_bc)
        seen_btc &= visible(place_t, place_c, causal=self.causal, window=self.window)[None]
        x_bgrtc = _einsum("bgrtk,bcgk->bgrtc", q_bgrtk, k_bcgk) * q_bgrtk.shape[-1] ** -0.5
        return jnp.where(seen_btc[:, None, None], x_bgrtc, NEVER)

    def _chunks(self, i: Array, k_bsgk: Array, v_bsgk: Array, segments_bs: Array) -> tuple[Array, ...]:
        """The part of the keys that is here in round i, cut along a new first axis, with the keys' places."""
        s = k_bsgk.shape[1]
        n = s // self.chunk if s % self.chunk == 0 else 1
        first = (jax.lax.axis_index(self.axis) - i) % self.size * s
        cut = [jnp.moveaxis(x.reshape(x.shape[0], n, s // n, *x.shape[2:]), 1, 0) for x in (k_bsgk, v_bsgk, segments_bs)]
        return cut[0], cut[1], (first + jnp.arange(s)).reshape(n, s // n), cut[2]

    def _turn(self, tree: Any) -> Any:
        return jax.lax.ppermute(tree, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)])

    def _grouped(self, x_bthk: Array) -> Array:
        b, t, h, k = x_bthk.shape
        g = self.groups
        return x_bthk.reshape(b, t, g, h // g, k).transpose(0, 2, 3, 1, 4)

    def _flat(self, x_bgrtk: Array) -> Array:
        b, g, r, t, k = x_bgrtk.shape
        return x_bgrtk.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, k)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
