"""Continuations of prompts: text, and columns of codes between tokens that open and close them.

All rows are written at once, a place at a time. A place is a token or a column of codes.

Shapes: as in `model`; P places of the longest prompt, N new places, U = P + N places of the cache,
T = 1 place that is written.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxtrain.nn import attention, sampling, transformer
from jaxtrain.nn.layers import lookup, rope_angles
from jaxtrain.types import Array, Batch, Key, PyTree, Shard
from jaxtrain.workloads.audio_language import model
from jaxtrain.workloads.audio_language.model import Config, Net

NEVER = jnp.iinfo(jnp.int32).max // 2  # a column that no recording reaches
Number = TypeVar("Number", int, float)


class Streams(NamedTuple):
    """How each stream draws: text, then the codebooks, with one number for all or one each."""

    text_temperature: float = 0.7
    text_top_k: int = 0  # 0 = all
    temperature: tuple[float, ...] = (1.0,)  # 0 = always the likeliest code
    top_k: tuple[int, ...] = (0,)


class Prompts(NamedTuple):
    """The rows that are continued."""

    fields: Batch  # "text", "codes", "place" and "slot" of `loaders.chat.chatml.row`
    length_b: Array  # int32: valid places of each row


class Continuations(NamedTuple):
    """The continuation of each prompt: at every place a token, or a column."""

    tokens: Array  # int32 [B, N], -1 for columns and after the end
    columns: Array  # int32 [B, N, K], -1 for text


class Grammar(NamedTuple):
    """The rules of a row: the tokens around a recording, and its codebooks' delay and length."""

    opens: int  # the token that a recording's columns follow
    closes: int  # the token after them
    ends: int  # the token after which a row is done
    delay: bool = True  # codebook k is k columns late
    longest: int = 0  # [columns] of codes after which a recording is ended; 0 = as many as fit


class Cache(NamedTuple):
    """Keys and values of all places, and which of them are columns."""

    kv: PyTree  # of the attention that all places share, [L, B, U, G, head dimension] each
    audio_kv: PyTree  # of the columns' own attention, as these; () without it
    is_audio_bu: Array  # bool


class State(NamedTuple):
    """The state of each row between two places."""

    x_bd: Array  # last hidden state, normed
    cache: Cache
    last_token_b: Array  # int32: the token that was written last; -1 after a column
    n_columns_b: Array  # int32: columns of the current recording so far; 0 outside
    end_column_b: Array  # int32: column at which the first codebook ends; `NEVER` until it does
    is_done_b: Array  # bool


class Content(NamedTuple):
    """The content of the next place of each row: a token, or a column of codes."""

    token_b: Array  # int32, read if the place is no column
    codes_bk: Array  # int32, read if it is one
    is_audio_b: Array  # bool
    column_b: Array  # int32: the column's number in its recording
    end_column_b: Array  # int32: as in `State`


def generate(
    c: Config,
    params: PyTree,
    prompts: Prompts,
    key: Key,
    shard: Shard,
    grammar: Grammar,
    *,
    n_new: int,
    streams: Streams = Streams(),  # noqa: B008
) -> Continuations:
    """Continue each prompt: text, and from a token ``opens`` on a recording's columns.

    Column 0 is begins alone. The first codebook ends a recording by drawing its end at some column.
    With a delay, codebook k follows k columns later. Then ``closes`` is written. A row draws by its
    own key, fold_in(key, row), place and stream: a continuation does not depend on others.

    Args:
      n_new: [places] that are written at most.
    """
    length_b = prompts.length_b
    keys_b = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(length_b)))

    def write(state: State, i: Array) -> tuple[State, tuple[Array, Array]]:
        token_b, drawn_bk = draw(c, params, streams, state.x_bd, keys_b, i)
        content = next_content(c, grammar, state, token_b, drawn_bk)
        is_audio_b = content.is_audio_b
        input_b = jnp.where(state.is_done_b, grammar.ends, content.token_b)
        x_bd, cache = extend(
            c, params, input_b, content.codes_bk, is_audio_b, length_b + i, state.cache, shard
        )
        new_state = _next_state(grammar, state, content, x_bd, cache)
        is_no_token_b = is_audio_b | state.is_done_b
        tokens_b = jnp.where(is_no_token_b, -1, content.token_b)
        columns_bk = jnp.where(is_audio_b[:, None], content.codes_bk, -1)
        return new_state, (tokens_b, columns_bk)

    start = _first_state(c, params, prompts, shard, n_new)
    _, (tokens_nb, columns_nbk) = jax.lax.scan(write, start, jnp.arange(n_new))
    return Continuations(tokens_nb.T, jnp.moveaxis(columns_nbk, 0, 1))


def _first_state(c: Config, params: PyTree, prompts: Prompts, shard: Shard, n_new: int) -> State:
    """Return the state after the prompts. None ends within a recording: its last place is text."""
    x_bd, cache = prefill(c, params, prompts, shard, n_new=n_new)
    text_bs = prompts.fields["text"]
    last_b1 = (prompts.length_b - 1)[:, None]
    slot_b1 = jnp.take_along_axis(prompts.fields["slot"], last_b1, axis=1)
    slot_b1 = jnp.minimum(slot_b1, text_bs.shape[1] - 1)
    last_token_b = jnp.take_along_axis(text_bs, slot_b1, axis=1)[:, 0]
    zero_b = jnp.zeros_like(prompts.length_b)
    return State(x_bd, cache, last_token_b, zero_b, zero_b + NEVER, zero_b > 0)


def _next_state(
    grammar: Grammar, state: State, content: Content, x_bd: Array, cache: Cache
) -> State:
    """Return the state after a place whose hidden state is ``x_bd``."""
    is_audio_b = content.is_audio_b
    last_token_b = jnp.where(is_audio_b, -1, content.token_b)
    n_columns_b = jnp.where(is_audio_b, content.column_b + 1, 0)
    is_end_b = ~is_audio_b & (content.token_b == grammar.ends)
    is_done_b = state.is_done_b | is_end_b
    return State(x_bd, cache, last_token_b, n_columns_b, content.end_column_b, is_done_b)


def prefill(
    c: Config, params: PyTree, prompts: Prompts, shard: Shard, *, n_new: int
) -> tuple[Array, Cache]:
    """Return each prompt's last state [B, D], and a cache with ``n_new`` free places."""

    def with_free_places(z_lbpgk: Array) -> Array:
        return jnp.pad(z_lbpgk, [(0, 0), (0, 0), (0, n_new), (0, 0), (0, 0)])

    fields = prompts.fields
    x_bpd, (kv, audio_kv) = model.decode_with_cache(c, params, fields, shard)
    is_audio_bp = fields["slot"] >= fields["text"].shape[1]
    is_audio_bu = jnp.pad(is_audio_bp, [(0, 0), (0, n_new)])
    kv = jax.tree.map(with_free_places, kv)
    audio_kv = jax.tree.map(with_free_places, audio_kv)
    last_b1 = (prompts.length_b - 1)[:, None]
    x_bd = model.take(x_bpd, last_b1)[:, 0]
    return x_bd, Cache(kv, audio_kv, is_audio_bu)


def extend(
    c: Config,
    params: PyTree,
    token_b: Array,
    codes_bk: Array,
    is_audio_b: Array,
    place_b: Array,
    cache: Cache,
    shard: Shard,
) -> tuple[Array, Cache]:
    """Return the state [B, D] of one more place of each row, and the cache with that place.

    Both nets compute all rows, as rows differ in the kind of their places.
    """
    u = cache.is_audio_bu.shape[1]
    is_new_bu = jnp.arange(u)[None] == place_b[:, None]
    is_audio_bu = jnp.where(is_new_bu, is_audio_b[:, None], cache.is_audio_bu)
    visible_bu = attention.visible(place_b, jnp.arange(u), causal=True, window=c.window)
    text_btd = lookup(params["embed"], token_b[:, None], shard, dtype=c.dtype)
    is_audio_bt = is_audio_b[:, None]
    is_audio_bt1 = is_audio_b[:, None, None]
    audio_btd = model.embed_codes(c, params, codes_bk[:, None], shard)
    x_btd = jnp.where(is_audio_bt1, audio_btd, text_btd)
    angles = rope_angles(c.rope, place_b[:, None], c.k)

    def nets(text_net: Net, audio_net: Net, x_btd: Array) -> Array:
        is_audio_bt1 = is_audio_bt[..., None]
        audio_btd = audio_net(x_btd)
        return jnp.where(is_audio_bt1, audio_btd, text_net(x_btd))

    def layer(x_btd: Array, weights_and_cache: tuple[Any, ...]) -> tuple[Array, PyTree]:
        w, kv, audio_kv = weights_and_cache
        mix = sampling.cached(kv, place_b, visible_bu)

        def audio_attend(w: PyTree, x_btd: Array) -> tuple[Array, PyTree]:
            mix = sampling.cached(audio_kv, place_b, visible_bu & is_audio_bu)
            y_btd, new_kv = transformer.attend(c, w, x_btd, shard, angles=angles, mix=mix)
            return jnp.where(is_audio_bt[..., None], y_btd, x_btd), new_kv

        paths = model.Paths(is_audio_bt, angles, mix, nets, audio_attend)
        return model.layer(c, w, x_btd, paths, shard)

    stack = (params["blocks"], cache.kv, cache.audio_kv)
    x_btd, (kv, audio_kv) = jax.lax.scan(layer, x_btd, stack)
    x_btd = transformer.norm(c, params, "", x_btd)
    return x_btd[:, 0], Cache(kv, audio_kv, is_audio_bu)


def draw(
    c: Config, params: PyTree, streams: Streams, x_bd: Array, keys_b: Array, i: Array
) -> tuple[Array, Array]:
    """Draw a token [B] and codes [B, K] from a state; stream s by fold_in(fold_in(key, i), s)."""
    x_btd = x_bd[:, None]
    place_keys_b = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys_b)
    may_follow_kc = _codes_that_may_follow(c)

    def choose(logits_bv: Array, stream: int, temperature: float, top_k: int) -> Array:
        def choose_of_row(logits_v: Array, key: Key) -> Array:
            key = jax.random.fold_in(key, stream)
            return sampling.choose(logits_v, key, temperature=temperature, top_k=top_k)

        return jax.vmap(choose_of_row)(logits_bv, place_keys_b)

    text_logits_bv = model.text_logits(c, params, x_btd)[:, 0]
    token_b = choose(text_logits_bv, 0, streams.text_temperature, streams.text_top_k)
    may_follow_bkc = may_follow_kc[None]
    logits_bkc = model.audio_logits(params, x_btd)[:, 0]
    logits_bkc = jnp.where(may_follow_bkc, logits_bkc, -jnp.inf)
    codes = []
    for k in range(c.codebooks):
        temperature = _of_codebook(streams.temperature, k)
        top_k = _of_codebook(streams.top_k, k)
        codes_b = choose(logits_bkc[:, k], 1 + k, temperature, top_k)
        codes.append(codes_b)
    return token_b, jnp.stack(codes, axis=1)


def _codes_that_may_follow(c: Config) -> Array:
    """Return the codes that are drawn, bool [K, C]: no begin, and an end of the first codebook."""
    is_code_1c = jnp.arange(c.n_codes)[None] < c.codebook_size
    is_code_kc = jnp.broadcast_to(is_code_1c, (c.codebooks, c.n_codes))
    return is_code_kc.at[0, c.codebook_size + 1].set(True)


def _of_codebook(numbers: Sequence[Number], k: int) -> Number:
    """Return the number of codebook k: its own, or the one of all."""
    if len(numbers) == 1:
        return numbers[0]
    return numbers[k]


def next_content(
    c: Config, grammar: Grammar, state: State, token_b: Array, drawn_bk: Array
) -> Content:
    """Return each row's next place from a token and codes that were drawn, by its state.

    A recording continues until its last codebook has ended. Then its closing token follows.
    """
    begin_code = c.codebook_size
    end_code = c.codebook_size + 1
    delay_k = jnp.arange(c.codebooks) * grammar.delay  # [columns]
    is_opened_b = state.last_token_b == grammar.opens
    follows_column_b = state.last_token_b < 0
    last_column_b = state.end_column_b + delay_k[-1]
    continues_b = follows_column_b & (state.n_columns_b <= last_column_b)
    is_inside_b = is_opened_b | continues_b
    closes_b = follows_column_b & ~is_inside_b
    column_b = jnp.where(is_inside_b, state.n_columns_b, 0)
    end_column_b = _end_column(c, grammar, state, is_inside_b, column_b, drawn_bk[:, 0])
    # The column of each codebook's own sequence: 0 is its begin, then come codes, then its ends.
    step_bk = column_b[:, None] - delay_k[None]
    has_ended_bk = step_bk >= end_column_b[:, None]
    codes_bk = jnp.where(has_ended_bk, end_code, drawn_bk)
    codes_bk = jnp.where(step_bk <= 0, begin_code, codes_bk)
    token_b = jnp.where(closes_b, grammar.closes, token_b)
    is_audio_b = is_inside_b & ~state.is_done_b
    return Content(token_b, codes_bk, is_audio_b, column_b, end_column_b)


def _end_column(
    c: Config,
    grammar: Grammar,
    state: State,
    is_inside_b: Array,
    column_b: Array,
    first_code_b: Array,
) -> Array:
    """Return the column at which the first codebook ends: this one if it draws its end here."""
    if grammar.longest:
        is_full_b = column_b > grammar.longest
    else:
        is_full_b = jnp.zeros_like(is_inside_b)
    may_end_b = is_inside_b & (column_b > 0) & (state.end_column_b == NEVER)
    draws_end_b = first_code_b == c.codebook_size + 1
    ends_b = may_end_b & (draws_end_b | is_full_b)
    earlier_b = jnp.where(is_inside_b, state.end_column_b, NEVER)
    return jnp.where(ends_b, column_b, earlier_b)
