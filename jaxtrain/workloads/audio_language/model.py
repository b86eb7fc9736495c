"""An audio language model (Higgs Audio v2): text and codec codes in one sequence.

Every place of a row is a text token or a column of K codes, one of each codebook, delayed against
each other (loaders/chat/chatml.py lays them out). All places share the causal attention. The norms
before it, and the feed-forward net with its norm, are chosen by the kind of a place. The input of a
column is the sum of its codes' embeddings. `loss` has the fields of a batch.

A batch has text and columns apart. A row is permuted to text first and columns last, and back, so
that each net computes its own places alone: two copies of [U, D] cost less than both nets
everywhere.

Shapes: B rows, U places, S text tokens, A columns, N and M labels, K codebooks, C codes of a
codebook, D embed, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxtrain import specs as specs_lib
from jaxtrain.nn import remat, transformer
from jaxtrain.nn.layers import lookup, rope_angles
from jaxtrain.parallel import kernels
from jaxtrain.types import OF_DATA, Array, Batch, OfData, PyTree, Shard, Spec
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
    chunk: int = 1024  # [labels] places of each device whose logits exist at the same time

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from checks.at_least(self, 1, "chunk")
        required = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
        for name, value in required.items():
            if getattr(self, name) != value:
                yield (
                    name,
                    f"is {getattr(self, name)!r}; with two feed-forward nets it must be {value!r}",
                )

    def validate_warm_start(
        self, source: Mapping[str, Any], place: str, data: checks.DataSection
    ) -> Iterator[str]:
        yield from _other_tokens(source, place, getattr(data, "tokenizer", ""))

    def foreign_model(self, folder: str) -> Mapping[str, Any]:
        from jaxtrain.workloads.audio_language import hugging_face  # which imports this module

        return hugging_face.saved_model(folder)

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "codebooks", "codebook_size"):
            value, needed = getattr(self, name), info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and (value < needed if name == "vocab" else value != needed):
                yield (
                    name,
                    f"is {value}, and the data have {needed}; config.model.{name}=None takes that",
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


def make_specs(c: Config) -> PyTree:
    l, d = c.depth, c.embed
    table, init = transformer.decoder_specs(c, c.vocab), specs_lib.truncated_normal(c.init_std)
    blocks = dict(table["blocks"])
    norm = transformer.norm_specs(c, "attention", (l,))
    blocks["audio"] = {**norm, **transformer.feed_forward_specs(c)}
    if c.audio_attention:
        weights = {
            name: spec
            for name, spec in transformer.attention_specs(c).items()
            if name != "scale_attention"
        }
        # The norm after it, before the shared attention. The one before it is blocks/audio's.
        blocks["audio_attention"] = {**weights, "scale_after": norm["scale_attention"]}
    codes = Spec((c.codebooks, c.n_codes, d), (None, "vocab", "embed"), init)
    return {**table, "blocks": blocks, "embed_audio": codes, "w_head_audio": codes}


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

_IN_ROW = (("batch", None, None), ("batch", None))


def take(x_bud: Array, at_bn: Array) -> Array:
    x_bnd: Array = jax.vmap(lambda x_ud, at_n: x_ud.at[at_n].get(mode="promise_in_bounds"))(
        x_bud, at_bn
    )
    return x_bnd


def _rows(shard: Shard, x_bud: Array, at_bn: Array) -> Array:
    b, n = at_bn.shape
    return kernels.local(
        shard, take, (x_bud, at_bn), _IN_ROW, shard.spec((b, n, x_bud.shape[2]), _IN_ROW[0])
    )


def states(shard: Shard, x_bud: Array, at_bn: Array) -> Array:
    """x[b, at[b, n]], [B, N, D]."""
    spec = shard.spec((*at_bn.shape, x_bud.shape[2]), _IN_ROW[0])
    return kernels.differentiable(shard, take, (x_bud, at_bn), _IN_ROW, spec, constants=1)


def embed_codes(c: Config, params: PyTree, codes_bak: Array, shard: Shard) -> Array:
    """[B, A, D]: the codebooks' embeddings, summed in the table's or the model's wider dtype."""
    w_kcd = params["embed_audio"]
    wide = jnp.promote_types(w_kcd.dtype, c.dtype)
    # there is one
    x_bad = cast(
        Array,
        sum(lookup(w_kcd[k], codes_bak[..., k], shard, dtype=wide) for k in range(c.codebooks)),
    )
    return (x_bad / c.codebooks if c.average_codes else x_bad).astype(c.dtype)


def layer(
    c: Config,
    w: PyTree,
    x_bud: Array,
    is_audio_bu: Array,
    nets: Callable[[Net, Net, Array], Array],
    shard: Shard,
    *,
    angles: tuple[Array, Array],
    mix: transformer.Mix,
    audio_attend: Callable[[PyTree, Array], tuple[Array, PyTree]],
) -> tuple[Array, PyTree]:
    """Compute one layer, and the second results of ``mix`` and ``audio_attend``.

    Args:
      nets: (text net, audio net, x) -> x: which places go through which.
      audio_attend: (weights, x) -> x after the columns' own attention, and keys and values to keep.
    """
    audio: dict[str, Array] = w["audio"]
    kept: tuple[Array, ...] = ()
    before = audio["scale_attention"]
    if c.audio_attention:
        with jax.named_scope("audio_attention"):
            x_bud, kept = audio_attend({**w["audio_attention"], "scale_attention": before}, x_bud)
        before = w["audio_attention"]["scale_after"]
    of_audio, of_text = (jnp.broadcast_to(s, x_bud.shape) for s in (before, w["scale_attention"]))
    chosen = jnp.where(is_audio_bu[..., None], of_audio, of_text)
    x_bud, more = transformer.attend(
        c, {**w, "scale_attention": chosen}, x_bud, shard, angles=angles, mix=mix
    )
    net = functools.partial(transformer.feed_forward, c, shard=shard)
    return nets(lambda x: net(w, x), lambda x: net(audio, x), x_bud), (more, kept)


def decode(c: Config, params: PyTree, batch: Batch, shard: Shard, *, keep: bool = False) -> Any:
    """Compute the last hidden states [B, U, D], after the last norm. Times a head they are logits.

    With ``keep``, also keys and values of all layers [L, B, U, G, head dimension], and of the
    columns' own attention.
    """
    (b, u), s = batch["place"].shape, batch["text"].shape[1]
    place_bu, slot_bu = batch["place"], batch["slot"]
    is_audio_bu = slot_bu >= s

    def apart(x_bud: Array) -> tuple[Array, Array]:
        x_bud = permute(shard, x_bud, place_bu, slot_bu)
        return x_bud[:, :s], x_bud[:, s:]

    def together(text_bsd: Array, audio_bad: Array) -> Array:
        x_bud = jnp.concatenate([text_bsd, audio_bad], axis=1)
        return shard(permute(shard, x_bud, slot_bu, place_bu), "batch", "seq", None)

    with jax.named_scope("embed"):
        text_bsd = lookup(params["embed"], batch["text"], shard, dtype=c.dtype)
        x_bud = together(text_bsd, embed_codes(c, params, batch["codes"], shard))
    position_bu = jnp.broadcast_to(jnp.arange(u)[None], (b, u))
    angles, run = rope_angles(c.rope, position_bu, c.k), transformer.mixer(c, None, shard)
    audio_angles = rope_angles(c.rope, place_bu[:, s:], c.k)

    def mix(q: Array, k: Array, v: Array) -> tuple[Array, PyTree]:
        return run(q, k, v)[0], (k, v) if keep else ()

    def nets(text: Net, audio: Net, x_bud: Array) -> Array:
        text_bsd, audio_bad = apart(x_bud)
        return together(text(text_bsd), audio(audio_bad))

    def audio_attend(w: PyTree, x_bud: Array) -> tuple[Array, PyTree]:
        text_bsd, audio_bad = apart(x_bud)
        audio_bad, kept = transformer.attend(c, w, audio_bad, shard, angles=audio_angles, mix=mix)
        kept = jax.tree.map(lambda x: _spread(x, place_bu[:, s:], u), kept)
        return together(text_bsd, audio_bad), kept

    def body(x_bud: Array, w: PyTree) -> tuple[Array, PyTree]:
        return layer(
            c, w, x_bud, is_audio_bu, nets, shard, angles=angles, mix=mix, audio_attend=audio_attend
        )

    x_bud, kept = remat.scan(
        body, x_bud, params["blocks"], c.remat, unroll=c.unroll, kernels=transformer.KERNELS
    )
    x_bud = transformer.norm(c, params, "", x_bud)
    return (x_bud, kept) if keep else x_bud


def _spread(x_bagk: Array, place_ba: Array, u: int) -> Array:
    """Values of columns, at their places in the row, and zeros elsewhere."""
    b, _, g, k = x_bagk.shape
    rows = jnp.arange(b)[:, None]
    return jnp.zeros((b, u, g, k), x_bagk.dtype).at[rows, place_ba].set(x_bagk)


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

    def size(specs: Mapping[str, Spec]) -> int:
        return sum(math.prod(x.shape) for name, x in specs.items() if name.startswith("w_"))

    attention, net = size(transformer.attention_specs(c)), size(transformer.feed_forward_specs(c))
    matrices = (s + a) * (attention + net) + c.audio_attention * a * attention
    heads = n * c.vocab * c.embed + m * c.codebooks * c.n_codes * c.embed
    scores = transformer.attention_flops(c, s + a, causal=causal)
    if c.audio_attention:
        scores += transformer.attention_flops(c, a, causal=causal)
    return (2 if frozen else 3) * 2 * (matrices + heads) + 3 * scores
