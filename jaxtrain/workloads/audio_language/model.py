"""An audio language model (Higgs Audio v2): text and codec codes in one sequence.

Every place of a row is a text token or a column of K codes, one of each codebook, delayed against
each other (loaders/chat/chatml.py lays them out). All places share the causal attention. The norms
before it, and the feed-forward net with its norm, are chosen by the kind of a place. The input of a
column is the sum of its codes' embeddings. `loss` has the fields of a batch.

A batch has text and columns apart. A row is permuted to text first and columns last, and back, so
that each net computes its own places alone: two copies of [U, D] cost less than both nets
everywhere.

Shapes: B rows, U places, S text tokens, A columns, N and M labels, K codebooks, C codes of a
codebook, D embed, V vocabulary, L layers. In attention: H heads, G key/value heads, K head
dimension.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain import specs as specs_lib
from jaxtrain.nn import remat, transformer
from jaxtrain.nn.layers import lookup, rope_angles
from jaxtrain.parallel import kernels
from jaxtrain.types import OF_DATA, Array, Axes, Batch, OfData, PyTree, Shard, Spec
from loaders.base import DataError
from loaders.io import checks, files
from loaders.text import tokenizer as tokenizer_lib

Net = Callable[[Array], Array]  # [B, U, D] -> [B, U, D]
N_SPECIAL = 2  # of each codebook: begin and end of a stream


@dataclass(frozen=True)
class Config(transformer.Decoder):
    """The release's choices by default. Its published sizes are `PRESETS`."""

    on_resume = checks.OnResume(
        checks.FUNCTION,
        free=("buckets", "chunk"),
        state=("vocab", "codebooks", "codebook_size", "audio_attention"),
    )

    vocab: OfData[int] = OF_DATA  # [tokens] tokens known to the model; None = as the data have
    # [codebooks] number of codebooks of a column; None = as the data have
    codebooks: OfData[int] = OF_DATA
    # [codes] number of codes of each codebook, without begin and end; None = as the data have
    codebook_size: OfData[int] = OF_DATA
    # [bool] a column's input is the mean of its codes' embeddings, not their sum
    average_codes: bool = False
    # [bool] whether an attention of columns alone, with its own weights, comes before the shared
    # one
    audio_attention: bool = False
    # [S, A, N, M, share] shapes of rows, and their share; None = the data's
    buckets: tuple[tuple[int, int, int, int, float], ...] | None = None
    # [labels] places of each device whose logits exist at the same time; 0 = 2048 on GPUs, 4096
    # on TPUs, else 1024; devices that share the matrix have 1024 on TPUs, and on GPUs if these
    # logits are more than 1 GiB
    chunk: int = 0

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from checks.not_negative(self, "chunk")
        required = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
        for name, expected in required.items():
            value = getattr(self, name)
            if value != expected:
                yield name, f"is {value!r}; with two feed-forward nets it must be {expected!r}"

    def validate_warm_start(
        self, source: Mapping[str, Any], place: str, data: checks.DataSection
    ) -> Iterator[str]:
        yield from _other_tokens(source, place, getattr(data, "tokenizer", ""))

    def foreign_model(self, folder: str) -> Mapping[str, Any]:
        from jaxtrain.workloads.audio_language import hugging_face  # which imports this module

        return hugging_face.saved_model(folder)

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "codebooks", "codebook_size"):
            value = getattr(self, name)
            of_data = info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif of_data is not None and not _suffices(name, value, of_data):
                yield (
                    name,
                    f"is {value}, and the data have {of_data}; config.model.{name}=None takes that",
                )

    @property
    def n_codes(self) -> int:
        """Rows of a codebook's table."""
        return self.codebook_size + N_SPECIAL


def _other_tokens(source: Mapping[str, Any], place: str, tokenizer: str) -> Iterator[str]:
    """Yield why weights were trained on other text tokens than those of the run's tokenizer."""
    theirs = ""
    for path in (f"{place}/tokenizer.json", *_tokenizers(source)):
        if not theirs and path and files.expanded(path).is_file():
            theirs = path
    if not theirs or not tokenizer:
        return
    try:
        difference = tokenizer_lib.difference(
            tokenizer_lib.token_ids(theirs), tokenizer_lib.token_ids(tokenizer)
        )
    except DataError as error:
        yield str(error)
        return
    if difference:
        yield (
            f"its tokens are those of {theirs}, and this run's are those of {tokenizer}:"
            f" {difference}; set config.data.tokenizer to the former, or"
            " config.warm_start.other_front_end=true to train the embedding anew"
        )


def _tokenizers(source: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths that a run's config names as its tokenizer."""
    for section in ("data", "model"):
        path = (source.get(section) or {}).get("tokenizer")
        if isinstance(path, str):
            yield path


def _suffices(name: str, value: int, of_data: int) -> bool:
    """Whether a model of this size can be trained on the data: its vocabulary may be larger."""
    if name == "vocab":
        return value >= of_data
    return value == of_data


def make_specs(c: Config) -> PyTree:
    specs = transformer.decoder_specs(c, c.vocab)
    blocks = specs["blocks"]
    norm = transformer.norm_specs(c, "attention", (c.depth,))
    blocks["audio"] = {**norm, **transformer.feed_forward_specs(c)}
    if c.audio_attention:
        blocks["audio_attention"] = _audio_attention_specs(c)
    shape = (c.codebooks, c.n_codes, c.embed)
    axes = (None, "vocab", "embed")
    codes = Spec(shape, axes, specs_lib.truncated_normal(c.init_std))
    specs["embed_audio"] = codes
    specs["w_head_audio"] = codes
    return specs


def _audio_attention_specs(c: Config) -> dict[str, Spec]:
    """Return the table of the columns' own attention.

    Its norm is the one after it, before the shared attention. The one before it is blocks/audio's.
    """
    specs = transformer.attention_specs(c)
    specs["scale_after"] = specs.pop("scale_attention")
    return specs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def permute(shard: Shard, x_bud: Array, index_bu: Array, inverse_bu: Array) -> Array:
    """x[b, index[b, u]], whose derivative is a gather, too: by the inverse."""
    return _rows(shard, x_bud, index_bu)


def _permute_forward(
    shard: Shard, x_bud: Array, index_bu: Array, inverse_bu: Array
) -> tuple[Array, Array]:
    return _rows(shard, x_bud, index_bu), inverse_bu


def _permute_backward(shard: Shard, inverse_bu: Array, g_bud: Array) -> tuple[Any, ...]:
    return _rows(shard, g_bud, inverse_bu), None, None


permute.defvjp(_permute_forward, _permute_backward)

_STATES: Axes = ("batch", None, None)
_IN_ROW = (_STATES, ("batch", None))


def take(x_bud: Array, at_bn: Array) -> Array:
    """x[b, at[b, n]], [B, N, D], of places that exist."""

    def take_of_row(x_ud: Array, at_n: Array) -> Array:
        return x_ud.at[at_n].get(mode="promise_in_bounds")

    x_bnd: Array = jax.vmap(take_of_row)(x_bud, at_bn)
    return x_bnd


def _rows(shard: Shard, x_bud: Array, at_bn: Array) -> Array:
    """Take states on each device, without a derivative."""
    partition = _partition(shard, x_bud, at_bn)
    return kernels.local(shard, take, (x_bud, at_bn), _IN_ROW, partition)


def states(shard: Shard, x_bud: Array, at_bn: Array) -> Array:
    """x[b, at[b, n]], [B, N, D], whose derivative by x is the transpose."""
    partition = _partition(shard, x_bud, at_bn)
    return kernels.differentiable(shard, take, (x_bud, at_bn), _IN_ROW, partition, constants=1)


def _partition(shard: Shard, x_bud: Array, at_bn: Array) -> PartitionSpec:
    """Return the partition of states that are taken at ``at_bn``."""
    b, n = at_bn.shape
    d = x_bud.shape[2]
    return shard.spec((b, n, d), _STATES)


def embed_codes(c: Config, params: PyTree, codes_bak: Array, shard: Shard) -> Array:
    """[B, A, D]: the codebooks' embeddings, summed in the table's or the model's wider dtype."""
    w_kcd = params["embed_audio"]
    wide = jnp.promote_types(w_kcd.dtype, c.dtype)

    def embeddings() -> Iterator[Array]:
        for k in range(c.codebooks):
            yield lookup(w_kcd[k], codes_bak[..., k], shard, dtype=wide)

    sum_bad = cast(Array, sum(embeddings()))  # there is a codebook
    if c.average_codes:
        sum_bad /= c.codebooks
    return sum_bad.astype(c.dtype)


class RowOrder(NamedTuple):
    """The order of a batch's places, by which text and columns are split and joined again."""

    place_bu: Array  # int32: the place in the row of each text token, then of each column
    slot_bu: Array  # int32: the inverse
    n_text: int  # S
    shard: Shard

    @property
    def is_audio_bu(self) -> Array:
        return self.slot_bu >= self.n_text

    @property
    def audio_place_ba(self) -> Array:
        return self.place_bu[:, self.n_text :]

    def split(self, x_bud: Array) -> tuple[Array, Array]:
        """Return the states of text [B, S, D], and of columns [B, A, D]."""
        x_bud = permute(self.shard, x_bud, self.place_bu, self.slot_bu)
        return x_bud[:, : self.n_text], x_bud[:, self.n_text :]

    def join(self, text_bsd: Array, audio_bad: Array) -> Array:
        """Return the states of whole rows [B, U, D]."""
        x_bud = jnp.concatenate([text_bsd, audio_bad], axis=1)
        x_bud = permute(self.shard, x_bud, self.slot_bu, self.place_bu)
        return self.shard(x_bud, "batch", "seq", None)

    def spread(self, z_bagk: Array) -> Array:
        """Return keys or values of columns at their places [B, U, G, head dimension], else 0."""
        place_ba = self.audio_place_ba
        b, _, g, k = z_bagk.shape
        u = self.place_bu.shape[1]
        row_b1 = jnp.arange(b)[:, None]
        zeros_bugk = jnp.zeros((b, u, g, k), z_bagk.dtype)
        return zeros_bugk.at[row_b1, place_ba].set(z_bagk)


class Paths(NamedTuple):
    """The ways of text and of columns through a layer."""

    is_audio_bu: Array  # bool: places of columns
    angles: tuple[Array, Array]  # of all places
    mix: transformer.Mix  # the attention that all places share
    nets: Callable[[Net, Net, Array], Array]  # (text's net, columns' net, x) -> x
    # (weights, x) -> x after the columns' own attention, and its keys and values
    audio_attend: Callable[[PyTree, Array], tuple[Array, PyTree]]


def layer(
    c: Config, w: PyTree, x_bud: Array, paths: Paths, shard: Shard
) -> tuple[Array, tuple[PyTree, PyTree]]:
    """Compute one layer. Return keys and values too: all places', and the columns' own."""
    w_audio: dict[str, Array] = w["audio"]
    audio_scale_d = w_audio["scale_attention"]
    audio_kv: PyTree = ()
    if c.audio_attention:
        w_own = {**w["audio_attention"], "scale_attention": audio_scale_d}
        with jax.named_scope("audio_attention"):
            x_bud, audio_kv = paths.audio_attend(w_own, x_bud)
        audio_scale_d = w_own["scale_after"]
    audio_scale_bud = jnp.broadcast_to(audio_scale_d, x_bud.shape)
    text_scale_bud = jnp.broadcast_to(w["scale_attention"], x_bud.shape)
    scale_bud = jnp.where(paths.is_audio_bu[..., None], audio_scale_bud, text_scale_bud)
    w_shared = {**w, "scale_attention": scale_bud}
    x_bud, kv = transformer.attend(c, w_shared, x_bud, shard, angles=paths.angles, mix=paths.mix)

    def text_net(x: Array) -> Array:
        return transformer.feed_forward(c, w, x, shard)

    def audio_net(x: Array) -> Array:
        return transformer.feed_forward(c, w_audio, x, shard)

    return paths.nets(text_net, audio_net, x_bud), (kv, audio_kv)


def decode(c: Config, params: PyTree, batch: Batch, shard: Shard) -> Array:
    """Compute the last normed hidden states [B, U, D]. Times a head they are logits."""
    return _decode(c, params, batch, shard, keep=False)[0]


def decode_with_cache(
    c: Config, params: PyTree, batch: Batch, shard: Shard
) -> tuple[Array, tuple[PyTree, PyTree]]:
    """Compute `decode`, and keys and values of all layers [L, B, U, G, head dimension].

    They are those of all places, and those of the columns' own attention.
    """
    return _decode(c, params, batch, shard, keep=True)


def _decode(
    c: Config, params: PyTree, batch: Batch, shard: Shard, *, keep: bool
) -> tuple[Array, tuple[PyTree, PyTree]]:
    """Compute the last hidden states, and with ``keep`` keys and values."""
    n_text = batch["text"].shape[1]
    order = RowOrder(batch["place"], batch["slot"], n_text, shard)
    is_audio_bu = order.is_audio_bu
    with jax.named_scope("embed"):
        text_bsd = lookup(params["embed"], batch["text"], shard, dtype=c.dtype)
        audio_bad = embed_codes(c, params, batch["codes"], shard)
        x_bud = order.join(text_bsd, audio_bad)
    b, u = batch["place"].shape
    position_bu = jnp.broadcast_to(jnp.arange(u)[None], (b, u))
    angles = rope_angles(c.rope, position_bu, c.k)
    audio_angles = rope_angles(c.rope, order.audio_place_ba, c.k)
    attend_within_rows = transformer.mixer(c, None, shard)

    def mix(q_buhk: Array, k_bugk: Array, v_bugk: Array) -> tuple[Array, PyTree]:
        y_buhk, _ = attend_within_rows(q_buhk, k_bugk, v_bugk)
        return y_buhk, (k_bugk, v_bugk) if keep else ()

    def nets(text_net: Net, audio_net: Net, x_bud: Array) -> Array:
        text_bsd, audio_bad = order.split(x_bud)
        return order.join(text_net(text_bsd), audio_net(audio_bad))

    def audio_attend(w: PyTree, x_bud: Array) -> tuple[Array, PyTree]:
        text_bsd, audio_bad = order.split(x_bud)
        audio_bad, kv = transformer.attend(c, w, audio_bad, shard, angles=audio_angles, mix=mix)
        kv = jax.tree.map(order.spread, kv)
        return order.join(text_bsd, audio_bad), kv

    paths = Paths(is_audio_bu, angles, mix, nets, audio_attend)

    def body(x_bud: Array, w: PyTree) -> tuple[Array, tuple[PyTree, PyTree]]:
        return layer(c, w, x_bud, paths, shard)

    x_bud, kv = remat.scan(
        body,
        x_bud,
        params["blocks"],
        c.remat,
        unroll=c.unroll,
        shard=shard,
        kernels=transformer.KERNELS,
        once=True,
    )
    return transformer.norm(c, params, "", x_bud), kv


def text_logits(c: Config, params: PyTree, x_bud: Array) -> Array:
    """[B, U, V] float32."""
    w_vd = transformer.head(c, params).astype(x_bud.dtype)
    return jnp.einsum("bud,vd->buv", x_bud, w_vd, preferred_element_type=jnp.float32)


def audio_logits(params: PyTree, x_bud: Array) -> Array:
    """[B, U, K, C] float32."""
    w_kcd = params["w_head_audio"].astype(x_bud.dtype)
    return jnp.einsum("bud,kcd->bukc", x_bud, w_kcd, preferred_element_type=jnp.float32)


def step_flops(
    c: Config, bucket: tuple[int, int, int, int, float], *, causal: bool, frozen: bool
) -> int:
    """Count the FLOPs of one row of a bucket, forward and backward.

    Each place goes through its own net, and labelled ones alone through the heads. Matrices that
    are ``frozen`` have no derivative. Their adapters' products are left out.
    """
    s, a, n, m, _ = bucket
    attention = _matrix_size(transformer.attention_specs(c))
    net = _matrix_size(transformer.feed_forward_specs(c))
    layers = (s + a) * (attention + net)
    scores = transformer.attention_flops(c, s + a, causal=causal)
    if c.audio_attention:
        layers += a * attention
        scores += transformer.attention_flops(c, a, causal=causal)
    text_head = n * c.vocab * c.embed
    audio_head = m * c.codebooks * c.n_codes * c.embed
    products = 2 * (layers + text_head + audio_head)
    n_products = 2 if frozen else 3  # forward, by the activations, by the matrix
    return n_products * products + 3 * scores


def _matrix_size(specs: Mapping[str, Spec]) -> int:
    """Return the number of parameters in matrices, of all layers."""
    n_params = 0
    for name, spec in specs.items():
        if name.startswith("w_"):
            n_params += math.prod(spec.shape)
    return n_params
