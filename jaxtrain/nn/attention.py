"""Attention as one function. `choose` picks the kernel by the platform that the program is for.

    gpu   16-bit numbers: cuDNN's fused kernels (`nn.cudnn`). They refuse other heads, windows to
          both sides, and several documents on cards before Hopper or without a known bound of their
          number. Then it is tokamax's kernel on Hopper if it is installed
          (`nn.tokamax_attention`), or XLA some keys at a time (`nn.ring`). None of them has an
          array that grows with T × S. cuDNN's keeps H × T float32 numbers for each document that a
          row may have. So rows of more than MAX_DOCUMENTS are refused, too
    tpu   kernels of Pallas, if sequences and heads fill their lanes: for short rows without
          documents one that writes its result alone (`nn.short`), for documents one that computes
          the blocks with pairs alone (`nn.pair_blocks`), and splash (`nn.splash`)
    else  XLA, which holds all B × H × T × S weights of a layer. On TPUs, 16-bit models compute
          them again in the backward pass, so that no layer keeps them. For CPUs its products in
          float32 are those of `nn.cpu`

`within` calls them on a mesh, each device on its own rows and heads. XLA splits its own attention
by itself. `nn.ring` also takes sequences that are split over devices. All of them compute
softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017) with a float32 softmax over the keys that a query
may see:

- ``causal``: key s of query t only if s <= t
- ``window``: and only if t - s < window (Beltagy et al. 2020), 0 for all
- ``segments``: only keys of the query's own document. Padding is a segment of its own.

Shapes: B batch, T queries, S keys, H heads, G key/value heads (which divide H: Ainslie et al.
2023), K head dimension.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn import cpu, cudnn, pair_blocks, remat, tokamax_attention
from jaxtrain.nn.short import short, short_fits
from jaxtrain.nn.splash import LANES, document_blocks, splash, splash_fits
from jaxtrain.parallel import chips, kernels, one_device
from jaxtrain.parallel.layout import generation
from jaxtrain.types import Array, Axes, Shard

log = logging.getLogger("jaxtrain")
Shape = tuple[int, ...]
# compute capability from which kernels have heads of more than 128 values, and take documents
HOPPER = (9, 0)
# [documents] of a row. For each the kernel keeps a float32 number for each head and place: 128 of
# them are four times the bytes of 16-bit queries of 64 values.
MAX_DOCUMENTS = 128
INSTEAD_OF_CUDNN = {
    "tokamax": "tokamax's kernel is used instead",
    "chunked": "XLA's own is used instead, some keys at a time",
}


class Masks(NamedTuple):
    """Which keys a query may see, as far as it decides the kernel."""

    causal: bool = False
    window: int = 0
    packed: bool = False  # rows have documents
    documents: int = 0  # most of a row; 0 = unknown
    length: int = 0  # of a row whose last places are padding; 0 = none is


def within(
    shard: Shard,
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool = False,
    window: int = 0,
    segments_bt: Array | None = None,
    blocks: Array | None = None,
    documents: int = 0,
    length: int = 0,
    keep: str | None = None,
    policy: str = "none",
) -> Array:
    """Compute `attention` of arrays that ``shard`` lays out over a mesh. Rows and heads are split.

    Args:
      blocks: those of ``segments_bt`` by `blocks_of`. None = they are found here.
      documents: the most that a row of ``segments`` has, without padding. 0 = unknown. If it is 1,
        places of segment 0 are padding at the end of a row.
      length: of rows without documents. The places after it are padding, which no query before it
        sees. 0 = there is none.
      keep: a name of `remat.scan` for the activations that the backward pass reads. `is_forward`
        knows those of cuDNN.
      policy: of the layers around it, a word of `jaxtrain.nn.remat`. By `remat.cheap` it decides
        whether XLA's own attention is computed again from q, k and v in the backward pass.
    """
    masks = Masks(causal, window, segments_bt is not None, documents, length)
    q_bthk, segments_bt, masks = _without_padding(q_bthk, segments_bt, shard.devices, masks)
    n_parts = shard.size("heads", q_bthk.shape[2])
    kernel = choose(q_bthk, shard.devices, masks, keys=k_bsgk.shape, n_parts=n_parts)
    _log_refusal(q_bthk, shard.devices, masks, kernel)
    run: Callable[..., Array] = functools.partial(
        _call, kernel, shard.devices, masks, length=length, keep=keep
    )
    if length and kernel != "cudnn":
        segments_bt = _padding_as_document(q_bthk, length)
    if kernel == "xla":
        run = functools.partial(run, segments_bt=segments_bt)
        return _split_by_xla(shard, run, policy, q_bthk, k_bsgk, v_bsgk)
    if kernel not in ("splash", "pair_blocks"):
        blocks = None
    return _on_each_device(shard, run, q_bthk, k_bsgk, v_bsgk, segments_bt, blocks)


def blocks_of(
    segments_bt: Array, shard: Shard, head_dim: int, *, causal: bool, window: int
) -> Array | None:
    """Find the blocks of documents for the kernels of TPUs, once for all layers, on each device.

    They are those of `splash.document_blocks`, int32 [B, N, 4], or the steps of
    `pair_blocks.document_steps` over each device's own rows, int32 [I, 1 + P]. None if no such
    kernel takes these rows.
    """
    b, t = segments_bt.shape
    kernel = _for_documents((b, t, 1, head_dim), shard.devices[1], causal=causal)
    if not kernel:
        return None
    find = pair_blocks.document_steps if kernel == "pair_blocks" else document_blocks
    find = functools.partial(find, causal=causal, window=window)
    rows = shard.spec((b,), ("batch",))
    with jax.named_scope("document_blocks"):
        blocks = kernels.local(shard, find, [segments_bt], [("batch", None)], rows)
    # an axis rule may split their first axis where it splits no rows: each layer then finds them
    return blocks if shard.spec(blocks.shape[:1], ("batch",)) == rows else None


def _split_by_xla(shard: Shard, run: Callable[..., Array], policy: str, *qkv: Array) -> Array:
    """Call XLA's own attention on whole arrays, which XLA splits."""
    if shard.devices[0] == "cpu":
        return run(*qkv)
    return remat.cheap(policy, run, *qkv)


def _on_each_device(shard: Shard, run: Callable[..., Array], *arrays: Array | None) -> Array:
    """Call a kernel on each device's own rows and heads: of q, k, v, segments and their blocks.

    Keys are split as queries are, also if the axis rules have another axis for keys.
    """
    args = [x for x in arrays if x is not None]
    of_head: Axes = ("batch", None, "heads", None)
    axes = [of_head] * 3 + [("batch", *[None] * (x.ndim - 1)) for x in args[3:]]
    out = shard.spec(args[0].shape, of_head)
    return kernels.kernel(shard, run, args, axes, out, constants=len(args) - 3)


def attention(
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    *,
    causal: bool = False,
    window: int = 0,
    segments_bt: Array | None = None,
    documents: int = 0,
    devices: tuple[str, str] | None = None,
    keep: str | None = None,
) -> Array:
    """Compute the attention of a sequence to itself, [B, T, H, K].

    Args:
      segments_bt: int32, documents that do not see each other.
      documents: as in `within`.
      devices: that the program is for: "cpu", "gpu" or "tpu", and the capability of GPUs, as "9.0".
        Empty = unknown. None = those of this process.
      keep: as in `within`.
    """
    devices = one_device.host() if devices is None else devices
    masks = Masks(causal, window, segments_bt is not None, documents)
    q_bthk, segments_bt, masks = _without_padding(q_bthk, segments_bt, devices, masks)
    kernel = choose(q_bthk, devices, masks, keys=k_bsgk.shape)
    run = functools.partial(_call, kernel, devices, masks, keep=keep)
    return run(q_bthk, k_bsgk, v_bsgk, segments_bt)


def _call(
    kernel: str,
    devices: tuple[str, str],
    masks: Masks,
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    segments_bt: Array | None = None,
    blocks: Array | None = None,
    *,
    length: int = 0,
    keep: str | None,
) -> Array:
    qkv = (q_bthk, k_bsgk, v_bsgk)
    causal, window = masks.causal, masks.window
    if kernel == "cudnn" and segments_bt is not None:
        attend = functools.partial(cudnn.packed, documents=masks.documents, capability=devices[1])
        return attend(*qkv, segments_bt, causal=causal, window=window)
    if kernel == "cudnn":
        return cudnn.fused(*qkv, causal=causal, window=window, length=length, capability=devices[1])
    if kernel in INSTEAD_OF_CUDNN:
        return _instead_of_cudnn(kernel, devices[1], masks, keep, *qkv, segments_bt)
    if kernel == "short":
        y_bthk = short(*qkv, causal=causal, window=window, version=devices[1])
        return remat.name(y_bthk, keep) if keep else y_bthk
    if kernel in ("pair_blocks", "splash"):
        by_blocks: Callable[..., Array] = splash
        if kernel == "pair_blocks":
            by_blocks = pair_blocks.pair_blocks
        attend = functools.partial(by_blocks, segments_bt=segments_bt, blocks=blocks)
        return attend(*qkv, causal=causal, window=window, keep=keep)
    mask_bts = _mask(q_bthk.shape[1], causal, window, segments_bt)
    return _by_xla(devices[0], qkv, mask_bts, keep)


def _instead_of_cudnn(
    kernel: str,
    capability: str,
    masks: Masks,
    keep: str | None,
    q_bthk: Array,
    k_bsgk: Array,
    v_bsgk: Array,
    segments_bt: Array | None,
) -> Array:
    args = (q_bthk, k_bsgk, v_bsgk, segments_bt)
    if kernel == "tokamax":
        settings = tokamax_attention.Settings(masks.causal, masks.window, capability, keep)
        return tokamax_attention.attend(settings, *args)
    from jaxtrain.nn import ring  # which imports this module

    return ring.whole(*args, causal=masks.causal, window=masks.window, keep=keep)


def _by_xla(
    platform: str, qkv: tuple[Array, Array, Array], mask_bts: Array, keep: str | None
) -> Array:
    if platform == "cpu" and qkv[0].dtype == jnp.float32:
        y_bthk = cpu.heads_first(*qkv, mask_bts)
    else:
        y_bthk = masked(*qkv, mask_bts)
    return remat.name(y_bthk, keep) if keep else y_bthk


def _without_padding(
    q_bthk: Array, segments_bt: Array | None, devices: tuple[str, str], masks: Masks
) -> tuple[Array, Array | None, Masks]:
    """Take rows of one document, with padding at the end, as one sequence on GPUs.

    No query before the padding sees it under a causal mask. Any other row is NaN.
    """
    is_narrow = q_bthk.dtype in (jnp.bfloat16, jnp.float16)
    is_one = masks.causal and masks.documents == 1
    if segments_bt is None or devices[0] != "gpu" or not (is_one and is_narrow):
        return q_bthk, segments_bt, masks
    is_new_bt = segments_bt[:, 1:] != segments_bt[:, :-1]
    is_other_b = (is_new_bt & (segments_bt[:, 1:] != 0)).any(1)
    # added, it is a part of the kernel that rotates q, and has no derivative
    poison_b = jnp.where(is_other_b, jnp.nan, 0).astype(q_bthk.dtype)
    return q_bthk + poison_b[:, None, None, None], None, masks._replace(packed=False)


def _padding_as_document(q_bthk: Array, length: int) -> Array:
    """Return documents, int32 [B, T]: 0 up to ``length``, and 1 for the places after it."""
    b, t = q_bthk.shape[:2]
    is_padding = jnp.arange(t) >= length
    return jnp.broadcast_to(is_padding.astype(jnp.int32), (b, t))


def choose(
    q_bthk: Array, devices: tuple[str, str], masks: Masks, *, keys: Shape = (), n_parts: int = 1
) -> str:
    """Return the kernel for queries of this shape: "xla", "chunked", "tokamax", or a module's name.

    Of this process only an installed tokamax may decide it: plans are traced on other machines.

    ``keys``: their shape, () = that of the queries. ``n_parts``: into which devices split heads.
    """
    platform, capability = devices
    if platform == "tpu":
        return _choose_for_tpus(q_bthk, capability, masks, keys or q_bthk.shape, n_parts)
    if platform != "gpu" or q_bthk.dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    if refusal_of_cudnn(q_bthk, devices, masks):
        return _choose_instead(q_bthk, capability)
    return "cudnn"


def _choose_instead(q_bthk: Array, capability: str) -> str:
    is_for_tokamax = tokamax_attention.fits(q_bthk.shape[3], capability)
    return "tokamax" if is_for_tokamax and tokamax_attention.is_installed() else "chunked"


def _choose_for_tpus(q_bthk: Array, version: str, masks: Masks, keys: Shape, n_parts: int) -> str:
    """Choose by the heads of one device, and log once if XLA has to do."""
    b, t, h, k = q_bthk.shape
    queries = (b, t, h // n_parts, k)
    own_keys = (*keys[:2], keys[2] // n_parts, k)
    may_be_short = not (masks.packed or masks.length) and q_bthk.dtype == jnp.bfloat16
    if may_be_short and short_fits(queries, own_keys, version):
        return "short"
    if kernel := _for_long_rows(queries, version, masks):
        if masks.packed and kernel == "splash":
            _log_splash(t, k, version, causal=masks.causal)
        return kernel
    rows = "with documents" if masks.packed else "of one sequence"
    is_by_keys = may_be_short and short_fits(queries, queries, version)
    key_heads = own_keys[2] if is_by_keys else 0
    next_length = _next_length(queries, version, masks)
    _log_no_kernel(rows, *queries[1:], q_bthk.dtype.name, key_heads, next_length)
    return "xla"


def _for_long_rows(queries: Shape, version: str, masks: Masks) -> str:
    """Return the kernel of TPUs for rows of any length, "" if none takes them."""
    if masks.packed:
        return _for_documents(queries, version, causal=masks.causal)
    return "splash" if splash_fits(queries, packed=masks.length > 0) else ""


def _for_documents(queries: Shape, version: str, *, causal: bool) -> str:
    """Return the kernel of TPUs for rows of documents, "" if none takes them."""
    has_room = _vmem_for_documents(version) == pair_blocks.VMEM
    if has_room and pair_blocks.pair_blocks_fit(queries, causal=causal):
        return "pair_blocks"
    return "splash" if splash_fits(queries, packed=True) else ""


def _vmem_for_documents(version: str) -> int:
    """Return how many of its bytes `pair_blocks` may take of a core's own memory."""
    return chips.vmem(version, pair_blocks.VMEM)


def _next_length(queries: Shape, version: str, masks: Masks) -> int:
    """Return the tokens of the next longer rows that a kernel takes, 0 if those are far."""
    b, t, h, k = queries
    first = (t // LANES + 1) * LANES
    for longer in range(first, 2 * first, LANES):
        if _for_long_rows((b, longer, h, k), version, masks):
            return longer
    return 0


def refusal_of_cudnn(q_bthk: Array, devices: tuple[str, str], masks: Masks) -> str:
    """Return the reason for which cuDNN's kernels for 16-bit numbers are no choice, or ""."""
    capability = generation(devices[1])
    head_dim, longest_head = q_bthk.shape[3], _longest_head(capability)
    name = devices[1] or "an unknown one"
    if capability < (8, 0):
        return f"cards of compute capability {name}, below 8.0"
    if head_dim % 8 or head_dim > longest_head:
        return f"heads of {head_dim} values, only multiples of 8 up to {longest_head}"
    if masks.window and not masks.causal:
        return "a window to both sides"
    if masks.packed and capability < HOPPER:
        return f"documents on compute capability {name}, below 9.0"
    if masks.packed and not masks.documents:
        return "documents whose number in a row is unknown; model.documents is its bound"
    if masks.packed and masks.documents > MAX_DOCUMENTS:
        return (
            f"rows of up to {masks.documents} documents, only {MAX_DOCUMENTS}; data.documents"
            " limits them, and pads the rows"
        )
    return ""


def _longest_head(capability: tuple[int, ...]) -> int:
    return 256 if capability >= HOPPER else 128


def _log_refusal(q_bthk: Array, devices: tuple[str, str], masks: Masks, kernel: str) -> None:
    """Log the attention in the place of cuDNN's on a GPU, once for each reason."""
    if kernel in INSTEAD_OF_CUDNN:
        fits_tokamax = tokamax_attention.fits(q_bthk.shape[3], devices[1])
        _log_once(refusal_of_cudnn(q_bthk, devices, masks), kernel, fits_tokamax)


@functools.cache
def _log_splash(tokens: int, head_dim: int, version: str, *, causal: bool) -> None:
    """Log why documents that `pair_blocks` does not take have the kernel with larger blocks."""
    vmem = _vmem_for_documents(version)
    if vmem < pair_blocks.VMEM:
        least = pair_blocks.VMEM >> 20
        reason = f"TPU {version}, whose cores have {vmem >> 20} MiB of VMEM, below {least}"
    else:
        longest = tokens
        while longest and not pair_blocks.pair_blocks_fit((1, longest, 1, head_dim), causal=causal):
            longest -= pair_blocks.BLOCK
        kind = "causal rows" if causal else "rows"
        reason = f"{kind} of {tokens} tokens with heads of {head_dim} values, only up to {longest}"
    log.info(
        "pair_blocks, the kernel of TPUs for documents, does not take %s: splash is used", reason
    )


@functools.cache
def _log_no_kernel(
    rows: str,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: str,
    key_heads: int,  # 0 = they are not the reason
    next_length: int,
) -> None:
    log.info(
        "no kernel for TPUs takes rows %s of %d tokens with %d heads of %d %s values%s: XLA's own"
        " attention is used, which writes all pairs of tokens%s",
        rows,
        tokens,
        heads,
        head_dim,
        dtype,
        f" and {key_heads} key head{'s' * (key_heads > 1)}" if key_heads else "",
        f"; one takes rows of {next_length}" if next_length else "",
    )


@functools.cache
def _log_once(refusal: str, kernel: str, fits_tokamax: bool) -> None:
    remedy = ""
    if kernel == "chunked" and fits_tokamax:
        remedy = "; tokamax has a kernel: pip install 'jaxtrain[tokamax]' in Python 3.12 or newer"
    instead = INSTEAD_OF_CUDNN[kernel]
    log.info("cuDNN's attention does not take %s: %s%s", refusal, instead, remedy)


def is_forward(kernel: str) -> bool:
    """Whether this jaxpr is the forward pass of cuDNN. Others name their own activations."""
    return kernel == "dot_product_attention_fwd_wrapper"


def masked(q_bthk: Array, k_bsgk: Array, v_bsgk: Array, mask_bts: Array) -> Array:
    """Compute attention under a mask [B or 1, T, S] by XLA. Without a key it averages all."""
    return jax.nn.dot_product_attention(
        q_bthk, k_bsgk, v_bsgk, mask=mask_bts[:, None], implementation="xla"
    )


def _mask(t: int, causal: bool, window: int, segments_bt: Array | None) -> Array:
    """Return the places that each query of T may see, bool [B or 1, T, T]."""
    places = jnp.arange(t)
    mask_bts = visible(places, places, causal=causal, window=window)[None]
    if segments_bt is not None:
        mask_bts = mask_bts & same_segment(segments_bt, segments_bt)
    return mask_bts


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
