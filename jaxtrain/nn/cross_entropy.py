"""Cross-entropy over a large vocabulary whose logits are never whole.

Tokens are taken a chunk at a time. Each device has the logits of its part of the vocabulary (mesh
axes of "vocab") for its own tokens. The parts exchange the largest logit, the sum of exponentials
and the label's logit.

The columns of the matrix may be split over the tokens' own devices, as parameters are (fsdp). If it
then has more rows than these devices have tokens, they exchange columns for rows. Each computes the
logits of its rows for the tokens of all of them. No device has the whole matrix, or its gradient in
float32. Otherwise the matrix is gathered, and the parts of its gradient are summed.

The derivatives are computed along with the loss, so that no logit is computed twice. With
loss = sum_n w_n (lse_n + z lse_n^2 - (1 - s) x_n[label_n] - s mean_v x_nv) and p = exp(x - lse),

    d loss / d x_nv = w_n (p_nv (1 + 2 z lse_n) - (1 - s) [v = label_n] - s / V)

Shapes: B batch, T tokens of a row, N tokens, D embed, V vocabulary, C tokens of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.nn import NEVER
from jaxtrain.nn.layers import shared_columns
from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Axes, Shard

CHUNK = 1024  # [tokens]
CHUNK_ON_GPUS = 2048  # [tokens]
# [tokens] on TPUs whose devices hold the whole matrix. Each chunk reads and writes its gradient
CHUNK_ON_TPUS = 4096
EXACT = 1 << 24  # float32 has each whole number up to it
CHUNKS = {"gpu": CHUNK_ON_GPUS, "tpu": CHUNK_ON_TPUS}
NUMBERS = {"tpu": jnp.float32}
# [bytes] of a chunk's logits on a device. Below it a larger chunk pays: if devices share the matrix
# they also share the state, and the logits are the largest arrays.
MAX_SHARED_LOGITS = 1 << 30


class Sums(NamedTuple):
    """Weighted sums over all tokens. Only ``loss`` has a derivative."""

    loss: Array  # cross-entropy (with smoothed labels, if they are) and z-loss
    cross_entropy: Array  # [nats]
    z: Array  # of lse^2, without its coefficient
    correct: Array  # tokens whose label has the largest logit, the first of equal ones


Grads = tuple[Array, ...]  # by x and by w; none unless they are asked for


class Split(NamedTuple):
    """How the tokens and the matrix are split over devices, in names of mesh axes."""

    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # that the matrix's columns share with the tokens
    exchanged: tuple[str, ...] = ()  # those of ``columns`` if columns are exchanged for rows

    @property
    def parts(self) -> tuple[str, ...]:
        """The axes that the logits of a token are split over while they are computed."""
        return (*self.vocab, *self.exchanged)


class Settings(NamedTuple):
    """The settings that all tokens share."""

    z_loss: float
    smoothing: float
    chunk: int
    rows: int  # of the whole matrix
    vocab: int  # its rows that are a vocabulary
    axes: Axes
    split: Split
    # Type of words' numbers as the first of the largest logits is found. In float32, as the sums
    # over words, a TPU finds it in their kernel, which reads the logits once.
    number: Any = jnp.int32


class Tokens(NamedTuple):
    """Tokens of a device, or its chunks of tokens: [B, T] or [C] each, or [chunks, C]."""

    x: Array  # with a last dimension D
    label: Array
    weight: Array


class Chunk(NamedTuple):
    """The logits of some tokens for this device's part of the vocabulary, and what follows."""

    x_cd: Array
    weight_c: Array
    is_label_cv: Array
    word_v: Array  # numbers of this device's rows of the matrix
    e_cv: Array  # exp(logit - largest)
    sum_c: Array  # of e over the whole vocabulary
    lse_c: Array


def cross_entropy(
    x_btd: Array,
    w_vd: Array,
    label_bt: Array,
    weight_bt: Array,
    shard: Shard,
    *,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    chunk: int = 0,
    size: int | None = None,
    axes: Axes = ("vocab", None),
) -> Sums:
    """Sum weight × (-log softmax(w x)[label] + z_loss lse^2) with lse = log sum exp(w x).

    z_loss is of de Brébisson & Vincent (2016). Products are of ``x``'s dtype and summed in float32.
    ``w_vd`` is rounded to that dtype, and its gradient is not.

    Args:
      weight_bt: float32, 0 for tokens that do not count, which may have any label.
      smoothing: share of the target that is spread over the whole vocabulary, the label included.
      chunk: [tokens] on each device whose logits exist at the same time. 0 = `CHUNKS` or `CHUNK`.
      size: rows of ``w_vd`` that are a vocabulary. Others let devices have equal parts.
      axes: logical axes of ``w_vd``, and of its gradient.
    """
    vocab = w_vd.shape[0] if size is None else size
    split = Split()
    if shard.mesh is not None and shard.mesh.size > 1:
        split = _split(shard, axes, x_btd.shape, w_vd.shape[0])
        chunk = chunk or _chunk_of_several(shard, axes, w_vd.shape[0], split)
    chunk = chunk or CHUNKS.get(shard.devices[0], CHUNK)
    number = NUMBERS.get(shard.devices[0], jnp.int32) if w_vd.shape[0] < EXACT else jnp.int32
    settings = Settings(z_loss, smoothing, chunk, w_vd.shape[0], vocab, axes, split, number)
    return _total(shard, settings, x_btd, w_vd, label_bt, weight_bt)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(shard: Shard, settings: Settings, *arrays: Array) -> Sums:
    return _run(shard, settings, *arrays, grads=False)[0]


def _backward(
    shard: Shard, settings: Settings, grads: Grads, cotangent: Sums
) -> tuple[Array | None, ...]:
    dx_btd, dw_vd = grads
    return (dx_btd * cotangent.loss).astype(dx_btd.dtype), dw_vd * cotangent.loss, None, None


def _run(
    shard: Shard,
    settings: Settings,
    x_btd: Array,
    w_vd: Array,
    label_bt: Array,
    weight_bt: Array,
    *,
    grads: bool,
) -> tuple[Sums, Grads]:
    """Call `_of_device` on every device's own tokens and part of the matrix."""
    of_rows, of_columns = settings.axes
    w_vd = w_vd.astype(x_btd.dtype)  # once, and before it is sent
    args = (x_btd, w_vd, label_bt, weight_bt.astype(jnp.float32))
    x_axes = ("batch", "seq", None)
    w_axes = (of_rows, of_columns if settings.split.exchanged else None)
    token_axes = ("batch", "seq")
    out_grads: tuple[PartitionSpec, ...] = ()
    if grads:
        dw_axes = (of_rows, of_columns if settings.split.columns else None)
        out_grads = (shard.spec(x_btd.shape, x_axes), shard.spec(w_vd.shape, dw_axes))
    out = (PartitionSpec(), out_grads)  # sums are whole on every device
    run = functools.partial(_of_device, settings, grads)
    return kernels.local(shard, run, args, (x_axes, w_axes, token_axes, token_axes), out)


_total.defvjp(functools.partial(_run, grads=True), _backward)


def _chunk_of_several(shard: Shard, axes: Axes, v: int, split: Split) -> int:
    """Return `CHUNK` if devices share the matrix and the logits of a longer one are too many.

    On TPUs also if they are not, since a device has a part of the gradient alone. 0 = it is as on
    one device.
    """
    if split.columns and shard.devices[0] == "tpu":
        return CHUNK
    # If columns are exchanged for rows, a device has a part of the rows for all devices' tokens.
    n_words = v // shard.size(axes[0], v)
    n_bytes = CHUNK_ON_GPUS * n_words * jnp.dtype(jnp.float32).itemsize
    return CHUNK if split.columns and n_bytes > MAX_SHARED_LOGITS else 0


def _split(shard: Shard, axes: Axes, shape_btd: tuple[int, ...], v: int) -> Split:
    of_rows, of_columns = axes
    b, t, d = shape_btd
    vocab = shard.names(of_rows, v)
    tokens = (*shard.names("batch", b), *shard.names("seq", t))
    columns, _ = shared_columns(shard, of_columns, d, (b, t))
    if not columns:
        return Split(tokens, vocab)
    # To gather sends the matrix and its gradient, to exchange sends the tokens and theirs.
    n_columns = shard.size(of_columns, d)
    own_rows = v // shard.size(of_rows, v)
    own_tokens = b * t // (shard.size("batch", b) * shard.size("seq", t))
    can_exchange = own_rows % n_columns == 0 and own_tokens * n_columns <= own_rows
    return Split(tokens, vocab, columns, columns if can_exchange else ())


def _of_device(
    settings: Settings,
    grads: bool,
    x_btd: Array,
    w_vd: Array,
    label_bt: Array,
    weight_bt: Array,
) -> tuple[Sums, Grads]:
    """Sum over this device's tokens, a chunk at a time, then over all devices."""
    split = settings.split
    if split.exchanged:
        w_vd = jax.lax.all_to_all(w_vd, split.exchanged, split_axis=0, concat_axis=1, tiled=True)
    first_word = _place(split.parts) * w_vd.shape[0]
    n = label_bt.size
    n_chunks = -(-n // min(settings.chunk, n))
    chunks = Tokens(*(_chunks(x, n_chunks) for x in (x_btd, label_bt, weight_bt)))
    # The sums of each device are its own until the end.
    w_vd = _varying(w_vd, tuple(name for name in split.tokens if name not in split.exchanged))
    chunks = chunks._replace(x=_varying(chunks.x, split.vocab))

    def add_chunk(
        sums_and_dw: tuple[Sums, Any], tokens: Tokens
    ) -> tuple[tuple[Sums, Any], Array | None]:
        sums, dw_vd = sums_and_dw
        chunk, per_token = _measure(settings, w_vd, first_word, tokens)
        sums = jax.tree.map(lambda total, y_c: total + (tokens.weight * y_c).sum(), sums, per_token)
        if not grads:
            return (sums, dw_vd), None
        dx_cd, dw_vd = _add_gradients(settings, w_vd, dw_vd, chunk)
        return (sums, dw_vd), dx_cd

    zero = (chunks.weight * 0).sum()  # made of the weights, to vary over the devices as they do
    dw_vd: Any = jnp.zeros_like(w_vd, dtype=jnp.float32) + zero if grads else ()
    start = (Sums(zero, zero, zero, zero), dw_vd)
    (sums, dw_vd), dx_ncd = jax.lax.scan(add_chunk, start, chunks)
    sums = Sums(*(_over(jax.lax.psum, x, split.tokens) for x in sums))
    if dx_ncd is None:
        return sums, ()
    dx_nd = dx_ncd.reshape(-1, x_btd.shape[-1])
    dx_btd = dx_nd[:n].reshape(x_btd.shape)
    if split.tokens:
        dw_vd = _summed_over_tokens(split, dw_vd)
    return sums, (dx_btd, dw_vd)


def _chunks(x: Array, n_chunks: int) -> Array:
    """Cut tokens [B, T, …] into chunks. The last is filled with zeros, which have no weight."""
    x = x.reshape(-1, *x.shape[2:])
    size = -(-len(x) // n_chunks)
    filling = [(0, n_chunks * size - len(x)), *[(0, 0)] * (x.ndim - 1)]
    return jnp.pad(x, filling).reshape(n_chunks, size, *x.shape[1:])


def _measure(
    settings: Settings, w_vd: Array, first_word: Array | int, own: Tokens
) -> tuple[Chunk, Sums]:
    """Return the logits of a chunk, and the loss and metrics of each of its tokens."""
    split = settings.split
    x_cd, label_c, weight_c = (_over(_gathered, x, split.exchanged) for x in own)
    x_cv = jnp.einsum("cd,vd->cv", x_cd, w_vd, preferred_element_type=jnp.float32)
    word_v = first_word + jnp.arange(w_vd.shape[0])
    is_label_cv = word_v[None] == label_c[:, None]
    if settings.vocab < settings.rows:
        x_cv = jnp.where(word_v[None] < settings.vocab, x_cv, NEVER)
    top_c = _over(jax.lax.pmax, jax.lax.stop_gradient(x_cv.max(-1)), split.parts)
    e_cv = jnp.exp(x_cv - top_c[:, None])
    sum_c = _over(jax.lax.psum, e_cv.sum(-1), split.parts)
    label_x_c = _over(jax.lax.psum, jnp.where(is_label_cv, x_cv, 0).sum(-1), split.parts)
    lse_c = top_c + jnp.log(sum_c)
    # The first of the largest, so that equal logits everywhere are not all right.
    number_v = word_v.astype(settings.number)
    best_c = jnp.where(x_cv == top_c[:, None], number_v[None], settings.rows).min(-1)
    is_right_c = _over(jax.lax.pmin, best_c, split.parts) == label_c
    target_x_c = label_x_c
    if settings.smoothing:
        target_x_c = _smoothed_logit(settings, x_cv, word_v, label_x_c)
    per_token = Sums(
        loss=lse_c - target_x_c + settings.z_loss * lse_c**2,
        cross_entropy=lse_c - label_x_c,
        z=lse_c**2,
        correct=is_right_c,
    )
    if split.exchanged:  # each device adds those of its own tokens
        per_token = _of_own_tokens(split, per_token, len(own.label))
    return Chunk(x_cd, weight_c, is_label_cv, word_v, e_cv, sum_c, lse_c), per_token


def _of_own_tokens(split: Split, per_token: Sums, n_own: int) -> Sums:
    first = _place(split.exchanged) * n_own
    return Sums(*(jax.lax.dynamic_slice_in_dim(y_c, first, n_own) for y_c in per_token))


def _add_gradients(
    settings: Settings, w_vd: Array, dw_vd: Array, chunk: Chunk
) -> tuple[Array, Array]:
    """Return the derivatives of a chunk's loss by x, and add those by w to ``dw_vd``."""
    split = settings.split
    slope_c = chunk.weight_c * (1 + 2 * settings.z_loss * chunk.lse_c)
    target_cv = chunk.is_label_cv.astype(jnp.float32)
    if settings.smoothing:
        target_cv = _smoothed_target(settings, target_cv, chunk.word_v)
    dx_cv = chunk.e_cv * (slope_c / chunk.sum_c)[:, None] - target_cv * chunk.weight_c[:, None]
    dx_cv = dx_cv.astype(chunk.x_cd.dtype)
    dw_vd = dw_vd + jnp.einsum("cv,cd->vd", dx_cv, chunk.x_cd, preferred_element_type=jnp.float32)
    dx_cd = jnp.einsum("cv,vd->cd", dx_cv, w_vd, preferred_element_type=jnp.float32)
    dx_cd = _over(_scattered, _over(jax.lax.psum, dx_cd, split.vocab), split.exchanged)
    return dx_cd.astype(chunk.x_cd.dtype), dw_vd


def _smoothed_logit(settings: Settings, x_cv: Array, word_v: Array, label_x_c: Array) -> Array:
    """Return the mean of the logits, weighted by the smoothed target."""
    word_x_cv = jnp.where(word_v[None] < settings.vocab, x_cv, 0)
    sum_x_c = _over(jax.lax.psum, word_x_cv.sum(-1), settings.split.parts)
    share = settings.smoothing / settings.vocab
    return (1 - settings.smoothing) * label_x_c + share * sum_x_c


def _smoothed_target(settings: Settings, target_cv: Array, word_v: Array) -> Array:
    share = settings.smoothing / settings.vocab
    target_cv = (1 - settings.smoothing) * target_cv
    return target_cv + share * (word_v[None] < settings.vocab)


def _summed_over_tokens(split: Split, dw_vd: Array) -> Array:
    """Return this device's part of the sum of all devices' gradients by the matrix."""
    if split.exchanged:
        others = tuple(name for name in split.tokens if name not in split.exchanged)
        dw_vd = _over(jax.lax.psum, dw_vd, others)
        dw_vd = jax.lax.all_to_all(dw_vd, split.exchanged, split_axis=1, concat_axis=0, tiled=True)
        return dw_vd
    others = tuple(name for name in split.tokens if name not in split.columns)
    dw_vd = _over(functools.partial(_scattered, scatter_dimension=1), dw_vd, split.columns)
    return _over(jax.lax.psum, dw_vd, others)


def _over(reduce: Callable[..., Array], x: Array, names: tuple[str, ...]) -> Array:
    return reduce(x, names) if names else x


_gathered = functools.partial(jax.lax.all_gather, tiled=True)
# each device gets its part of the sum
_scattered = functools.partial(jax.lax.psum_scatter, tiled=True)


def _varying(x: Array, names: tuple[str, ...]) -> Array:
    return jax.lax.pcast(x, names, to="varying") if names else x


def _place(names: tuple[str, ...]) -> Array | int:
    """Return which part of a dimension split over these axes this device has."""
    return jax.lax.axis_index(names) if names else 0
