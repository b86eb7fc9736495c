"""An audio language model (Higgs Audio v2): text and codec codes in one sequence, a feed-forward net for each of the two.

A row is a conversation. Every place of it is a text token or a column of K codes, one of each codebook, delayed against each
other (loaders/chat/chatml.py lays them out). All places share the causal attention; the norms
before it, and the feed-forward net
with its norm, are chosen by the kind of a place. The input of a column is the sum of its codes' embeddings.

The batch has text and columns apart, so that each place goes through its own net alone. Its fields, of a row with U = S + A
places, S of them text and A of them columns (those of a bucket, the same for all its rows; a row's spare ones are its last):

    text          int32 [S]     tokens, in order
    codes         int32 [A, K]  columns, in order
    place         int32 [U]     where each text token, then where each column stands
    slot          int32 [U]     the inverse: which of them stands at each place
    text_at       int32 [N]     places whose state predicts a token, and
    text_target   int32 [N]     the token; negative = nothing
    audio_at      int32 [M]     places whose state predicts a column, and
    audio_target  int32 [M, K]  its codes; negative = nothing
    label_scale   float32 [1 + K]  rows of the global batch over its labels: text, codebooks (these again over the number of
                                   codebooks that have labels); 0 where there are none

Loss = mean over text labels of their cross-entropy + mean over codebooks of the mean over their labels. Its two denominators
are the global batch's, which no microbatch knows: hence ``label_scale``, by which the loss is a sum over rows.

Why gathered: with places chosen by `where`, both nets are computed everywhere. A permutation of a row to text first, columns
last, and back, costs two copies of [U, D], forward and backward, and each net computes its own places alone. At a small size on
two cores a step then is 1.4 times as fast (1.6 by the shortest; python -m tools.bench_train --model=higgs --branches).

Shapes: B rows, U places, S text tokens, A columns, N and M labels, K codebooks, C codes of a codebook, D embed, V vocabulary,
L layers.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxtrain import specs as specs_lib
from jaxtrain.arrays import stored
from jaxtrain.config import Config as RunConfig
from jaxtrain.nn import remat, sampling, transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.nn.hugging_face import LAYER, HuggingFaceError, decoder_fields, folded, own_export
from jaxtrain.nn.layers import Rope, lookup, rope_angles
from jaxtrain.types import OF_DATA, Array, Batch, Export, Hub, Key, LossOut, Mean, OfData, PyTree, Shard, Spec, Task, Variables
from loaders.io import checks, files

Net = Callable[[Array], Array]  # [B, U, D] -> [B, U, D]
N_SPECIAL = 2  # of each codebook: begin and end of a stream


@dataclass(frozen=True)
class Config(transformer.Decoder):
    """The release's choices by default; its published sizes are `PRESETS`."""

    vocab: OfData[int] = OF_DATA  # [tokens] known to the model; None = as the data have
    codebooks: OfData[int] = OF_DATA  # [codebooks] of a column; None = as the data have
    codebook_size: OfData[int] = OF_DATA  # [codes] of each, without begin and end; None = as the data have
    average_codes: bool = False  # [bool] a column's input is the mean of its codes' embeddings, not their sum
    audio_attention: bool = (
        False  # [bool] before the shared attention, one of columns to columns alone, with weights of its own
    )
    buckets: tuple[tuple[int, int, int, int, float], ...] | None = (
        None  # [S, A, N, M, share] of the rows; None = as the data have
    )
    chunk: int = 1024  # [labels] of each device whose logits exist at the same time

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from checks.at_least(self, 1, "chunk")
        required = {"norm": "rms", "activation": "swiglu", "positions": "rope", "bias": False}
        for name, value in required.items():
            if getattr(self, name) != value:
                yield name, f"is {getattr(self, name)!r}; with two feed-forward nets it must be {value!r}"

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "codebooks", "codebook_size"):
            value, needed = getattr(self, name), facts.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and (value < needed if name == "vocab" else value != needed):
                yield name, f"is {value}, and the data have {needed}; config.model.{name}=None takes that"

    @property
    def n_codes(self) -> int:
        """Rows of a codebook's table."""
        return self.codebook_size + N_SPECIAL


# Sizes as published.
PRESETS: dict[str, dict[str, Any]] = {
    "v2": dict(
        embed=3072, depth=28, heads=24, kv_heads=8, head_dim=128, mlp=8192, eps=1e-5, vocab=128256, codebooks=8,
        codebook_size=1024, rope=dict(theta=5e5, factor=32.0, low=1.0, high=4.0, original=8192),
    )
}  # fmt: skip
# Section `lora` of a run that adapts every matrix of every layer, both nets', and leaves tables, heads and norms alone.
ADAPTERS: dict[str, Any] = dict(
    rank=32,
    alpha=64.0,
    adapt=r"^blocks/(audio/|audio_attention/)?w_",
    freeze=r"^(embed|w_head)(_audio)?$|^scale$|/scale_[^/]*$",
    dtype="bfloat16",
)


def make_specs(c: Config) -> PyTree:
    l, d = c.depth, c.embed
    table, init = transformer.decoder_specs(c, c.vocab), specs_lib.truncated_normal(c.init_std)
    blocks = dict(table["blocks"])
    norm = transformer.norm_specs(c, "attention", (l,))
    blocks["audio"] = {**norm, **transformer.feed_forward_specs(c)}
    if c.audio_attention:
        weights = {name: spec for name, spec in transformer.attention_specs(c).items() if name != "scale_attention"}
        # The norm after it, before the shared attention; the one before it is blocks/audio's.
        blocks["audio_attention"] = {**weights, "scale_after": norm["scale_attention"]}
    codes = Spec((c.codebooks, c.n_codes, d), (None, "vocab", "embed"), init)
    return {**table, "blocks": blocks, "embed_audio": codes, "w_head_audio": codes}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def permute(shard: Shard, x_bud: Array, index_bu: Array, inverse_bu: Array) -> Array:
    """x[b, index[b, u]], whose derivative is a gather, too: by the inverse."""
    return _rows(shard, x_bud, index_bu)


def _permute_forward(shard: Shard, x_bud: Array, index_bu: Array, inverse_bu: Array) -> tuple[Array, Array]:
    return _rows(shard, x_bud, index_bu), inverse_bu


def _permute_backward(shard: Shard, inverse_bu: Array, g_bud: Array) -> tuple:
    return _rows(shard, g_bud, inverse_bu), None, None


permute.defvjp(_permute_forward, _permute_backward)

_IN_ROW = (("batch", None, None), ("batch", None))


def _take(x_bud: Array, at_bn: Array) -> Array:
    return jax.vmap(lambda x_ud, at_n: x_ud.at[at_n].get(mode="promise_in_bounds"))(x_bud, at_bn)


def _rows(shard: Shard, x_bud: Array, at_bn: Array) -> Array:
    b, n = at_bn.shape
    return shard.local(_take, (x_bud, at_bn), _IN_ROW, shard.spec((b, n, x_bud.shape[2]), _IN_ROW[0]))


def states(shard: Shard, x_bud: Array, at_bn: Array) -> Array:
    """x[b, at[b, n]], [B, N, D]."""
    spec = shard.spec((*at_bn.shape, x_bud.shape[2]), _IN_ROW[0])
    return shard.differentiable(_take, (x_bud,), _IN_ROW[:1], spec, constants=(at_bn,), constant_axes=_IN_ROW[1:])


def embed_codes(c: Config, params: PyTree, codes_bak: Array, shard: Shard) -> Array:
    """[B, A, D]: the codebooks' embeddings, summed."""
    w_kcd = params["embed_audio"]
    x_bad = cast(Array, sum(lookup(w_kcd[k], codes_bak[..., k], shard) for k in range(c.codebooks)))  # there is one
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
    """One layer, and the second results of ``mix`` and ``audio_attend``.

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
    x_bud, more = transformer.attend(c, {**w, "scale_attention": chosen}, x_bud, shard, angles=angles, mix=mix)
    net = functools.partial(transformer.feed_forward, c, shard=shard)
    return nets(lambda x: net(w, x), lambda x: net(audio, x), x_bud), (more, kept)


def decode(c: Config, params: PyTree, batch: Batch, shard: Shard, *, keep: bool = False, gathered: bool = True) -> Any:
    """Last hidden states [B, U, D], after the last norm; times a head they are logits.

    Args:
      keep: also return keys and values of all layers [L, B, U, G, head dimension], and of the columns' own attention.
      gathered: each place through its own net; else both nets everywhere, and a choice between them: the same numbers.
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
        if not gathered:
            return jnp.where(is_audio_bu[..., None], audio(x_bud), text(x_bud))
        text_bsd, audio_bad = apart(x_bud)
        return together(text(text_bsd), audio(audio_bad))

    def audio_attend(w: PyTree, x_bud: Array) -> tuple[Array, PyTree]:
        text_bsd, audio_bad = apart(x_bud)
        audio_bad, kept = transformer.attend(c, w, audio_bad, shard, angles=audio_angles, mix=mix)
        kept = jax.tree.map(lambda x: _spread(x, place_bu[:, s:], u), kept)
        return together(text_bsd, audio_bad), kept

    def body(x_bud: Array, w: PyTree) -> tuple[Array, PyTree]:
        return layer(c, w, x_bud, is_audio_bu, nets, shard, angles=angles, mix=mix, audio_attend=audio_attend)

    x_bud, kept = remat.scan(body, x_bud, params["blocks"], c.remat, unroll=c.unroll, kernels=transformer.KERNELS)
    x_bud = transformer.norm(c, params, "", x_bud)
    return (x_bud, kept) if keep else x_bud


def _spread(x_bagk: Array, place_ba: Array, u: int) -> Array:
    """Values of columns, at their places in the row; zeros elsewhere."""
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


def measure(c: Config, params: PyTree, x_bud: Array, batch: Batch, shard: Shard) -> tuple[Array, dict[str, Mean]]:
    """The loss, summed over rows, and the sums of every metric."""
    scale = batch["label_scale"].max(0)  # the same in all rows

    def sums(x_bnd: Array, w_vd: Array, target_bn: Array) -> tuple[Array, Array, Array]:
        weight_bn = (target_bn >= 0).astype(jnp.float32)
        labelled = cross_entropy(x_bnd, w_vd, target_bn, weight_bn, shard, chunk=c.chunk, axes=transformer.TABLE)
        return labelled.loss, labelled.correct, weight_bn.sum()

    with jax.named_scope("text_head"):
        nats, right, n = sums(states(shard, x_bud, batch["text_at"]), transformer.head(c, params), batch["text_target"])
    total = nats * scale[0]
    metrics = {"text": Mean(nats, n), "text_accuracy": Mean(right, n)}
    with jax.named_scope("audio_head"):
        x_bmd = states(shard, x_bud, batch["audio_at"])
        for k in range(c.codebooks):
            nats, right, n = sums(x_bmd, params["w_head_audio"][k], batch["audio_target"][..., k])
            total += nats * scale[1 + k]
            metrics |= {f"audio_{k}": Mean(nats, n), f"audio_accuracy_{k}": Mean(right, n)}
    return total, metrics


class Model(NamedTuple):
    """The part of the run that every function of the task reads."""

    c: Config
    shard: Shard
    gathered: bool  # `decode`'s


def make_task(config: RunConfig, shard: Shard, batch: int, *, gathered: bool = True) -> Task:
    """``gathered`` is `decode`'s."""
    c: Config = config.model
    model = Model(c, shard, gathered)
    row = {name: ("batch", None) for name in ("text", "place", "slot", "text_at", "text_target", "audio_at", "label_scale")}
    frozen = bool(config.lora.rank)
    flops = [batch * sum(b[4] * step_flops(c, b, causal=x, frozen=frozen) for b in c.buckets or ()) for x in (True, False)]
    return Task(
        specs=Variables(make_specs(c)),
        loss=functools.partial(loss, model),
        evaluate=functools.partial(evaluate, model),
        axes={"index": ("batch",), **row, **{name: ("batch", None, None) for name in ("codes", "audio_target")}},
        flops=int(flops[0]),
        full_flops=int(flops[1]),
        finish=functools.partial(finish, c),
        tokens=batch * sum(b[4] * (b[0] + b[1]) for b in c.buckets or ()),
        predict=functools.partial(predict, model),
    )


def loss(model: Model, variables: Variables, batch: Batch, key: Key) -> LossOut:
    del key  # nothing is random
    x_bud = decode(model.c, variables.params, batch, model.shard, gathered=model.gathered)
    total, metrics = measure(model.c, variables.params, x_bud, batch, model.shard)
    return LossOut(Mean(total, jnp.float32(batch["row"].shape[0])), metrics)


def predict(model: Model, variables: Variables, batch: Batch) -> dict[str, Array]:
    """Logits ``text`` [B, U, V] and ``audio`` [B, U, K, codes] of every place, for the fields of the loader's batches."""
    x_bud = decode(model.c, variables.params, batch, model.shard, gathered=model.gathered)
    return {"text": text_logits(model.c, variables.params, x_bud), "audio": audio_logits(variables.params, x_bud)}


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    x_bud = decode(model.c, variables.params, batch, model.shard, gathered=model.gathered)
    return measure(model.c, variables.params, x_bud, batch, model.shard)[1]


def finish(c: Config, record: Mapping[str, Any]) -> dict[str, float]:
    """Adds the loss over a whole split, whose labels no batch's scale counts."""
    audio = [record[f"audio_{k}"] for k in range(c.codebooks) if not math.isnan(record[f"audio_{k}"])]
    parts = {"text": record["text"], "audio": sum(audio) / len(audio) if audio else math.nan}
    return {**record, **parts, "loss": sum(x for x in parts.values() if not math.isnan(x))}


class Streams(NamedTuple):
    """How each stream draws: text, then the codebooks, one number for all of them or one for each."""

    text_temperature: float = 0.7
    text_top_k: int = 0  # 0 = all
    temperature: tuple[float, ...] = (1.0,)  # 0 = always the likeliest code
    top_k: tuple[int, ...] = (0,)

    def codebook(self, k: int) -> dict[str, Any]:
        """The arguments of `sampling.choose` for a codebook."""
        pick = lambda values: values[k if len(values) > 1 else 0]  # noqa: E731
        return {"temperature": pick(self.temperature), "top_k": pick(self.top_k)}


class Written(NamedTuple):
    """The continuation of each prompt: at every place a token, or a column."""

    tokens: Array  # int32 [B, N], -1 where a column stands and after the end
    columns: Array  # int32 [B, N, K], -1 where none stands


class Writing(NamedTuple):
    """The state of each row between two places."""

    x_bd: Array  # last hidden state, normalised
    cache: PyTree
    was_b: Array  # int32: the token that was written last; -1 after a column
    column_b: Array  # int32: columns of the current recording so far; 0 outside
    end_b: Array  # int32: the column where the first codebook ended; `NEVER` before
    done_b: Array  # bool


def prefill(c: Config, params: PyTree, prompt: Batch, length_b: Array, shard: Shard, *, n_new: int) -> tuple[Array, PyTree]:
    """The last state [B, D] of each prompt, laid out as rows are, and the cache with ``n_new`` free places."""
    x_bud, kept = decode(c, params, prompt, shard, keep=True)
    padding = [(0, 0), (0, 0), (0, n_new), (0, 0), (0, 0)]
    is_audio_bu = jnp.pad(prompt["slot"] >= prompt["text"].shape[1], [(0, 0), (0, n_new)])
    cache = (jax.tree.map(lambda x: jnp.pad(x, padding), kept), is_audio_bu)
    return _take(x_bud, (length_b - 1)[:, None])[:, 0], cache


def extend(
    c: Config, params: PyTree, token_b: Array, codes_bk: Array, is_audio_b: Array, place_b: Array, cache: PyTree, shard: Shard
) -> tuple[Array, PyTree]:
    """State [B, D] of one more place of each row, a token or a column, and the cache with it. Both nets run: rows differ."""
    (shared, columns), is_audio_bu = cache
    u = is_audio_bu.shape[1]
    is_audio_bu = jnp.where(jnp.arange(u)[None] == place_b[:, None], is_audio_b[:, None], is_audio_bu)
    seen_bu = sampling.visible(place_b, u, c.window)
    text_bd = lookup(params["embed"], token_b[:, None], shard, dtype=c.dtype)
    x_btd = jnp.where(is_audio_b[:, None, None], embed_codes(c, params, codes_bk[:, None], shard), text_bd)
    angles = rope_angles(c.rope, place_b[:, None], c.k)
    is_audio_bt = is_audio_b[:, None]

    def nets(text: Net, audio: Net, x_btd: Array) -> Array:
        return jnp.where(is_audio_bt[..., None], audio(x_btd), text(x_btd))

    def body(x_btd: Array, w_kv: tuple) -> tuple[Array, PyTree]:
        w, kept, kept_columns = w_kv

        def audio_attend(w: PyTree, x_btd: Array) -> tuple[Array, PyTree]:
            mix = sampling.cached(kept_columns, place_b, seen_bu & is_audio_bu)
            y_btd, new = transformer.attend(c, w, x_btd, shard, angles=angles, mix=mix)
            return jnp.where(is_audio_bt[..., None], y_btd, x_btd), new

        mix = sampling.cached(kept, place_b, seen_bu)
        return layer(c, w, x_btd, is_audio_bt, nets, shard, angles=angles, mix=mix, audio_attend=audio_attend)

    x_btd, kept = jax.lax.scan(body, x_btd, (params["blocks"], shared, columns))
    return transformer.norm(c, params, "", x_btd)[:, 0], (kept, is_audio_bu)


class Grammar(NamedTuple):
    """The rules of a row: the tokens around a recording, and how its codebooks begin and end."""

    opens: int  # the token that a recording's columns follow
    closes: int  # the token after them
    ends: int  # the token after which a row is done
    begin: int  # the code before a codebook's stream
    end: int  # the code after it
    longest: int  # [columns] of codes after which a recording is ended; 0 = no limit
    shift_k: Array  # int32 [K]: columns by which each codebook is late


class Place(NamedTuple):
    """The content of the next place of each row: a token, or a column of codes."""

    token_b: Array
    codes_bk: Array
    is_audio_b: Array  # bool
    column_b: Array  # int32: its number in the recording
    end_b: Array  # int32: the column where the first codebook ended; `NEVER` before


NEVER = jnp.iinfo(jnp.int32).max // 2  # a column that no recording reaches


def generate(
    c: Config,
    params: PyTree,
    prompt: Batch,
    length_b: Array,
    key: Key,
    shard: Shard,
    *,
    n_new: int,
    opens: int,
    closes: int,
    ends: int,
    delay: bool = True,
    longest: int = 0,
    streams: Streams = Streams(),  # noqa: B008
) -> Written:
    """Continues each prompt: text, and from a token ``opens`` on a recording's columns, until its codebooks have ended.

    Column 0 is begins alone. The first codebook ends a recording by drawing its end at some column; with a delay, codebook k
    follows k columns later. Then ``closes`` is written. A row draws by its own key, fold_in(key, row), place and stream: a
    prompt's continuation does not depend on the others.

    Args:
      prompt: "text", "codes", "place", "slot" of `loaders.chat.chatml.row`, of ``length_b`` valid places.
      n_new: [places] that are written at most.
      ends: the token after which a row is done.
      longest: [columns] of codes at most, after which a recording is ended; 0 = as many as fit.
    """
    grammar = Grammar(
        opens, closes, ends, c.codebook_size, c.codebook_size + 1, longest, jnp.arange(c.codebooks) * delay
    )  # fmt: skip
    keys_b = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(length_b)))

    def write(state: Writing, i: Array) -> tuple[Writing, tuple[Array, Array]]:
        token_b, drawn_bk = draw(c, params, streams, grammar, state.x_bd, keys_b, i)
        place = next_place(grammar, state, token_b, drawn_bk)
        is_audio_b = place.is_audio_b
        fed_b = jnp.where(state.done_b, ends, place.token_b)
        x_bd, cache = extend(c, params, fed_b, place.codes_bk, is_audio_b, length_b + i, state.cache, shard)
        new = Writing(
            x_bd, cache, jnp.where(is_audio_b, -1, place.token_b), jnp.where(is_audio_b, place.column_b + 1, 0), place.end_b,
            state.done_b | (~is_audio_b & (place.token_b == ends)),
        )  # fmt: skip
        tokens_b = jnp.where(is_audio_b | state.done_b, -1, place.token_b)
        return new, (tokens_b, jnp.where(is_audio_b[:, None], place.codes_bk, -1))

    x_bd, cache = prefill(c, params, prompt, length_b, shard, n_new=n_new)
    last_b = _last_tokens(prompt, length_b)
    zero_b = jnp.zeros_like(length_b)
    start = Writing(x_bd, cache, last_b, zero_b, zero_b + NEVER, zero_b > 0)
    _, (tokens_nb, columns_nbk) = jax.lax.scan(write, start, jnp.arange(n_new))
    return Written(tokens_nb.T, jnp.moveaxis(columns_nbk, 0, 1))


def draw(
    c: Config, params: PyTree, streams: Streams, grammar: Grammar, x_bd: Array, keys_b: Array, i: Array
) -> tuple[Array, Array]:
    """A token [B] and a code of each codebook [B, K] from the last state; stream s draws by fold_in(fold_in(key, i), s)."""
    x_btd, at_b = x_bd[:, None], jax.vmap(lambda key: jax.random.fold_in(key, i))(keys_b)
    allowed_kc = jnp.broadcast_to(jnp.arange(c.n_codes)[None] < grammar.begin, (c.codebooks, c.n_codes))
    allowed_kc = allowed_kc.at[0, grammar.end].set(True)

    def choose(logits_bv: Array, stream: int, **how: Any) -> Array:
        def of_row(logits_v: Array, key: Key) -> Array:
            return sampling.choose(logits_v, jax.random.fold_in(key, stream), **how)

        return jax.vmap(of_row)(logits_bv, at_b)

    text = {"temperature": streams.text_temperature, "top_k": streams.text_top_k}
    token_b = choose(text_logits(c, params, x_btd)[:, 0], 0, **text)
    logits_bkc = jnp.where(allowed_kc[None], audio_logits(params, x_btd)[:, 0], -jnp.inf)
    codes_bk = [choose(logits_bkc[:, k], 1 + k, **streams.codebook(k)) for k in range(c.codebooks)]
    return token_b, jnp.stack(codes_bk, axis=1)


def next_place(grammar: Grammar, state: Writing, token_b: Array, drawn_bk: Array) -> Place:
    """The next place of each row from a drawn token and drawn codes, by its state and which codebooks have begun or ended."""
    # A recording continues until its last codebook has ended; after that its closing token.
    inside_b = (state.was_b == grammar.opens) | ((state.was_b < 0) & (state.column_b <= state.end_b + grammar.shift_k[-1]))
    closing_b = (state.was_b < 0) & ~inside_b
    at_b = jnp.where(inside_b, state.column_b, 0)
    full_b = (at_b > grammar.longest) if grammar.longest else jnp.zeros_like(inside_b)
    ending_b = inside_b & (at_b > 0) & (state.end_b == NEVER) & ((drawn_bk[:, 0] == grammar.end) | full_b)
    end_b = jnp.where(ending_b, at_b, jnp.where(inside_b, state.end_b, NEVER))
    stream_bk = at_b[:, None] - grammar.shift_k[None]  # column of each codebook's own sequence
    over_bk = stream_bk >= end_b[:, None]
    codes_bk = jnp.where(stream_bk <= 0, grammar.begin, jnp.where(over_bk, grammar.end, drawn_bk))
    return Place(jnp.where(closing_b, grammar.closes, token_b), codes_bk, inside_b & ~state.done_b, at_b, end_b)


def _last_tokens(prompt: Batch, length_b: Array) -> Array:
    """The token that each prompt ends with; none may end within a recording."""
    slot_b = jnp.take_along_axis(prompt["slot"], (length_b - 1)[:, None], axis=1)
    return jnp.take_along_axis(prompt["text"], jnp.minimum(slot_b, prompt["text"].shape[1] - 1), axis=1)[:, 0]


def step_flops(c: Config, bucket: tuple[int, int, int, int, float], *, causal: bool, frozen: bool) -> int:
    """FLOPs of one row of a bucket, forward and backward: each place through its own net, labelled ones alone through heads.

    Matrices that are ``frozen`` have no derivative of their own; their adapters' products are left out.
    """
    s, a, n, m, _ = bucket
    size = lambda specs: sum(math.prod(x.shape) for name, x in specs.items() if name.startswith("w_"))  # noqa: E731
    attention, net = size(transformer.attention_specs(c)), size(transformer.feed_forward_specs(c))
    matrices = (s + a) * (attention + net) + c.audio_attention * a * attention
    heads = n * c.vocab * c.embed + m * c.codebooks * c.n_codes * c.embed
    scores = transformer.attention_flops(c, s + a, causal=causal)
    if c.audio_attention:
        scores += transformer.attention_flops(c, a, causal=causal)
    return (2 if frozen else 3) * 2 * (matrices + heads) + 3 * scores


# Names in the released weights, which hold the same numbers in the same order under other names and shapes.

_TOP = {
    "embed": "embed_tokens.weight",
    "embed_audio": "audio_codebook_embeddings.weight",
    "scale": "norm.weight",
    "w_head": "audio_decoder_proj.text_lm_head.weight",
    "w_head_audio": "audio_decoder_proj.audio_lm_head.weight",
}
_LAYER = {
    **LAYER,
    "audio/scale_attention": "audio_input_layernorm.weight",
    "audio/scale_mlp": "audio_post_attention_layernorm.weight",
    **{f"audio/{name}": f"audio_{LAYER[name]}" for name in ("w_gate", "w_up", "w_down")},
    **{f"audio_attention/w_{x}": f"audio_attn.{y}_proj.weight" for x, y in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))},
    "audio_attention/scale_after": "audio_post_audio_attn_layer_norm.weight",
}
_ELSEWHERE = ("audio_tower", "audio_encoder_proj")  # an encoder of waveforms, which this model does without
_CONFIG = ("text_config or text", "audio_num_codebooks", "audio_codebook_size")  # of config.json
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """The released weights' names of a parameter. ``config`` is the saved section ``model``."""
    if path in _TOP:
        return _TOP[path]
    return [f"layers.{i}.{_LAYER[path.removeprefix('blocks/')]}" for i in range(config["depth"])]


def export_shape(config: Mapping[str, Any], path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one exported array: heads and their dimensions are one axis there, codebooks and codes another."""
    if path in ("embed_audio", "w_head_audio"):
        return (shape[0] * shape[1], shape[2])
    return folded(path.rpartition("/")[2], shape)


def export_files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """config.json and the tokenizer's files of the weights that a run began with. ``config`` is the whole run's."""
    del dtype
    source = pathlib.Path(config["warm_start"]["source"] or "?").expanduser()
    there = {name: files.inside(source, name) for name in _FILES if (source / name).is_file()}
    found = {name: files.read(path, most=files.MOST_JSON) for name, path in there.items()}
    # Of a model of Hugging Face; not our own export's, which is a run's, and not what another program keeps under that name.
    if "config.json" in found and "model_type" not in files.read_json(source / "config.json"):
        found.pop("config.json")
    return found


def export_hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """What the card says: with the tokenizer it plays what a text asks for."""
    del config
    metrics = ("text", "audio", "text_accuracy", "audio_accuracy_0")
    example = "$ jaxtrain generate-audio . 'a dog' --codec codec.npz --out played" if "tokenizer.json" in files else ""
    return Hub("jaxtrain", "text-to-audio", metrics, example)


EXPORT = Export(export_names, export_shape, export_files, export_hub)


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections ``model`` and ``warm_start`` for a folder with config.json and safetensors, or one of `jaxtrain export`.

    Raises HuggingFaceError.
    """
    if own := own_export(folder, __name__, ("vocab", "codebooks", "codebook_size", "average_codes", "audio_attention")):
        return own, dict(source=str(folder))
    path = pathlib.Path(folder).expanduser() / "config.json"
    try:
        h = files.read_json(path)
        if missing := [name for name in _CONFIG if not any(key in h for key in name.split(" or "))]:
            remedy = "name a folder of Higgs Audio v2, or one of `jaxtrain export` with its jaxtrain.json"
            raise HuggingFaceError(f"{path} has no {', no '.join(missing)}; {remedy}")
        text = h.get("text_config") or h["text"]
        codebooks, size = h["audio_num_codebooks"], h["audio_codebook_size"]
        own = {"head_dim": h["head_dim"]} if "head_dim" in h else {}
        model = dict(decoder_fields({**text, **own}, path), vocab=text["vocab_size"], codebooks=codebooks, codebook_size=size)
        there = stored.open_safetensors(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise error if isinstance(error, HuggingFaceError) else HuggingFaceError(f"{path}: {error!r}") from error
    model |= dict(
        tied="audio_decoder_proj/text_lm_head/weight" not in there,
        audio_attention="layers/0/audio_attn/q_proj/weight" in there,
        average_codes=bool(h.get("audio_embed_avg", False)),
    )
    table = make_specs(Config(**{**model, "rope": Rope()}))
    slashes = lambda name: name.replace(".", "/")  # noqa: E731
    blocks = [path.removeprefix("blocks/") for path in specs_lib.paths(table) if path.startswith("blocks/")]
    renames = [(rf"^layers/(\d+)/{slashes(_LAYER[name])}$", rf"blocks/{name}[\1]") for name in blocks]
    renames += [(f"^{slashes(_TOP[name])}$", name) for name in table if name != "blocks"]
    unused = [f"^{prefix}/" for prefix in _ELSEWHERE if any(name.startswith(f"{prefix}/") for name in there)]
    reshape = {"w_(q|k|v|out)$|^(embed|w_head)_audio$": "fold"}
    return model, dict(source=str(folder), renames=tuple(renames), reshape=reshape, unused=tuple(unused))
