"""Continuations of prompts: text, and columns of codes between tokens that open and close them.

Shapes: as in `model`; N new places.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn import attention, sampling, transformer
from jaxtrain.nn.layers import lookup, rope_angles
from jaxtrain.types import Array, Batch, Key, PyTree, Shard
from jaxtrain.workloads.audio_language import model
from jaxtrain.workloads.audio_language.model import Config, Net


class Streams(NamedTuple):
    """How each stream draws: text, then the codebooks, with one number for all or one each."""

    text_temperature: float = 0.7
    text_top_k: int = 0  # 0 = all
    temperature: tuple[float, ...] = (1.0,)  # 0 = always the likeliest code
    top_k: tuple[int, ...] = (0,)

    def codebook(self, k: int) -> dict[str, Any]:
        """Return the arguments of `sampling.choose` for a codebook."""

        def pick(values: Sequence[Any]) -> Any:
            return values[k if len(values) > 1 else 0]

        return {"temperature": pick(self.temperature), "top_k": pick(self.top_k)}


class Written(NamedTuple):
    """The continuation of each prompt: at every place a token, or a column."""

    tokens: Array  # int32 [B, N], -1 for columns and after the end
    columns: Array  # int32 [B, N, K], -1 for text


class Writing(NamedTuple):
    """The state of each row between two places."""

    x_bd: Array  # last hidden state, normalised
    cache: PyTree
    was_b: Array  # int32: the token that was written last; -1 after a column
    column_b: Array  # int32: columns of the current recording so far; 0 outside
    end_b: Array  # int32: the column of the first codebook's end, `NEVER` before
    done_b: Array  # bool


def prefill(
    c: Config, params: PyTree, prompt: Batch, length_b: Array, shard: Shard, *, n_new: int
) -> tuple[Array, PyTree]:
    """Return each prompt's last state [B, D], and a cache with ``n_new`` free places."""
    x_bud, kept = model.decode(c, params, prompt, shard, keep=True)
    padding = [(0, 0), (0, 0), (0, n_new), (0, 0), (0, 0)]
    is_audio_bu = jnp.pad(prompt["slot"] >= prompt["text"].shape[1], [(0, 0), (0, n_new)])
    cache = (jax.tree.map(lambda x: jnp.pad(x, padding), kept), is_audio_bu)
    return model.take(x_bud, (length_b - 1)[:, None])[:, 0], cache


def extend(
    c: Config,
    params: PyTree,
    token_b: Array,
    codes_bk: Array,
    is_audio_b: Array,
    place_b: Array,
    cache: PyTree,
    shard: Shard,
) -> tuple[Array, PyTree]:
    """State [B, D] and cache of one more place of each row. Both nets run, as rows differ."""
    (shared, columns), is_audio_bu = cache
    u = is_audio_bu.shape[1]
    is_audio_bu = jnp.where(
        jnp.arange(u)[None] == place_b[:, None], is_audio_b[:, None], is_audio_bu
    )
    seen_bu = attention.visible(place_b, jnp.arange(u), causal=True, window=c.window)
    text_bd = lookup(params["embed"], token_b[:, None], shard, dtype=c.dtype)
    x_btd = jnp.where(
        is_audio_b[:, None, None], model.embed_codes(c, params, codes_bk[:, None], shard), text_bd
    )
    angles = rope_angles(c.rope, place_b[:, None], c.k)
    is_audio_bt = is_audio_b[:, None]

    def nets(text: Net, audio: Net, x_btd: Array) -> Array:
        return jnp.where(is_audio_bt[..., None], audio(x_btd), text(x_btd))

    def body(x_btd: Array, w_kv: tuple[Any, ...]) -> tuple[Array, PyTree]:
        w, kept, kept_columns = w_kv

        def audio_attend(w: PyTree, x_btd: Array) -> tuple[Array, PyTree]:
            mix = sampling.cached(kept_columns, place_b, seen_bu & is_audio_bu)
            y_btd, new = transformer.attend(c, w, x_btd, shard, angles=angles, mix=mix)
            return jnp.where(is_audio_bt[..., None], y_btd, x_btd), new

        mix = sampling.cached(kept, place_b, seen_bu)
        return model.layer(
            c, w, x_btd, is_audio_bt, nets, shard, angles=angles, mix=mix, audio_attend=audio_attend
        )

    x_btd, kept = jax.lax.scan(body, x_btd, (params["blocks"], shared, columns))
    return transformer.norm(c, params, "", x_btd)[:, 0], (kept, is_audio_bu)


class Grammar(NamedTuple):
    """The rules of a row: the tokens around a recording, and its codebooks' delay and length."""

    opens: int  # the token that a recording's columns follow
    closes: int  # the token after them
    ends: int  # the token after which a row is done
    delay: bool = True  # codebook k is k columns late
    longest: int = 0  # [columns] of codes after which a recording is ended; 0 = as many as fit


class Place(NamedTuple):
    """The content of the next place of each row: a token, or a column of codes."""

    token_b: Array
    codes_bk: Array
    is_audio_b: Array  # bool
    column_b: Array  # int32: its number in the recording
    end_b: Array  # int32: the column of the first codebook's end, `NEVER` before


NEVER = jnp.iinfo(jnp.int32).max // 2  # a column that no recording reaches


def generate(
    c: Config,
    params: PyTree,
    prompt: Batch,
    length_b: Array,
    key: Key,
    shard: Shard,
    grammar: Grammar,
    *,
    n_new: int,
    streams: Streams = Streams(),  # noqa: B008
) -> Written:
    """Continue each prompt: text, and from a token ``opens`` on a recording's columns.

    Column 0 is begins alone. The first codebook ends a recording by drawing its end at some column.
    With a delay, codebook k follows k columns later. Then ``closes`` is written. A row draws by its
    own key, fold_in(key, row), place and stream: a continuation does not depend on others.

    Args:
      prompt: "text", "codes", "place", "slot" of `loaders.chat.chatml.row`, of ``length_b`` valid
      places.
      n_new: [places] that are written at most.
    """
    keys_b = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(length_b)))

    def write(state: Writing, i: Array) -> tuple[Writing, tuple[Array, Array]]:
        token_b, drawn_bk = draw(c, params, streams, state.x_bd, keys_b, i)
        place = next_place(c, grammar, state, token_b, drawn_bk)
        is_audio_b = place.is_audio_b
        fed_b = jnp.where(state.done_b, grammar.ends, place.token_b)
        x_bd, cache = extend(
            c, params, fed_b, place.codes_bk, is_audio_b, length_b + i, state.cache, shard
        )
        new = Writing(
            x_bd,
            cache,
            jnp.where(is_audio_b, -1, place.token_b),
            jnp.where(is_audio_b, place.column_b + 1, 0),
            place.end_b,
            state.done_b | (~is_audio_b & (place.token_b == grammar.ends)),
        )
        tokens_b = jnp.where(is_audio_b | state.done_b, -1, place.token_b)
        return new, (tokens_b, jnp.where(is_audio_b[:, None], place.codes_bk, -1))

    x_bd, cache = prefill(c, params, prompt, length_b, shard, n_new=n_new)
    # None ends within a recording, so that its last place is a token.
    slot_b = jnp.take_along_axis(prompt["slot"], (length_b - 1)[:, None], axis=1)
    last_b = jnp.take_along_axis(
        prompt["text"], jnp.minimum(slot_b, prompt["text"].shape[1] - 1), axis=1
    )[:, 0]
    zero_b = jnp.zeros_like(length_b)
    start = Writing(x_bd, cache, last_b, zero_b, zero_b + NEVER, zero_b > 0)
    _, (tokens_nb, columns_nbk) = jax.lax.scan(write, start, jnp.arange(n_new))
    return Written(tokens_nb.T, jnp.moveaxis(columns_nbk, 0, 1))


def draw(
    c: Config, params: PyTree, streams: Streams, x_bd: Array, keys_b: Array, i: Array
) -> tuple[Array, Array]:
    """Draw a token [B] and codes [B, K] from a state; stream s by fold_in(fold_in(key, i), s)."""
    x_btd, at_b = x_bd[:, None], jax.vmap(lambda key: jax.random.fold_in(key, i))(keys_b)
    allowed_kc = jnp.broadcast_to(
        jnp.arange(c.n_codes)[None] < c.codebook_size, (c.codebooks, c.n_codes)
    )
    allowed_kc = allowed_kc.at[0, c.codebook_size + 1].set(True)

    def choose(logits_bv: Array, stream: int, **how: Any) -> Array:
        def of_row(logits_v: Array, key: Key) -> Array:
            return sampling.choose(logits_v, jax.random.fold_in(key, stream), **how)

        return jax.vmap(of_row)(logits_bv, at_b)

    text = {"temperature": streams.text_temperature, "top_k": streams.text_top_k}
    token_b = choose(model.text_logits(c, params, x_btd)[:, 0], 0, **text)
    logits_bkc = jnp.where(allowed_kc[None], model.audio_logits(params, x_btd)[:, 0], -jnp.inf)
    codes_bk = [choose(logits_bkc[:, k], 1 + k, **streams.codebook(k)) for k in range(c.codebooks)]
    return token_b, jnp.stack(codes_bk, axis=1)


def next_place(
    c: Config, grammar: Grammar, state: Writing, token_b: Array, drawn_bk: Array
) -> Place:
    """Return each row's next place from a token and codes, by its state and codebooks."""
    # the codes before a codebook's stream, and after it
    begin, end = c.codebook_size, c.codebook_size + 1
    shift_k = jnp.arange(c.codebooks) * grammar.delay  # [columns] by which each codebook is late
    # A recording continues until its last codebook has ended, then its closing token follows.
    inside_b = (state.was_b == grammar.opens) | (
        (state.was_b < 0) & (state.column_b <= state.end_b + shift_k[-1])
    )
    closing_b = (state.was_b < 0) & ~inside_b
    at_b = jnp.where(inside_b, state.column_b, 0)
    full_b = (at_b > grammar.longest) if grammar.longest else jnp.zeros_like(inside_b)
    ending_b = inside_b & (at_b > 0) & (state.end_b == NEVER) & ((drawn_bk[:, 0] == end) | full_b)
    end_b = jnp.where(ending_b, at_b, jnp.where(inside_b, state.end_b, NEVER))
    stream_bk = at_b[:, None] - shift_k[None]  # column of each codebook's own sequence
    over_bk = stream_bk >= end_b[:, None]
    codes_bk = jnp.where(stream_bk <= 0, begin, jnp.where(over_bk, end, drawn_bk))
    return Place(
        jnp.where(closing_b, grammar.closes, token_b),
        codes_bk,
        inside_b & ~state.done_b,
        at_b,
        end_b,
    )
