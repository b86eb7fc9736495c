"""Continuations of prompts, all rows at once, with a cache of keys and values.

Shapes: B prompts, P places of the longest prompt, N new tokens, S = P + N, V vocabulary, L layers,
G key/value heads, K head dimension.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn import attention, transformer
from jaxtrain.types import Array, Key, PyTree, Shard

Cache = tuple[Array, Array]  # keys and values, [L, B, S, G, K]


def generate(
    c: transformer.Decoder,
    params: PyTree,
    prompt_bp: Array,
    length_b: Array,
    key: Key,
    shard: Shard,
    *,
    n_new: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    ends: Sequence[int] = (),
) -> Array:
    """Continue each prompt, int32 [B, N].

    After one of the tokens ``ends`` all further ones are the first of them.

    A row draws by its own key, fold_in(key, row), so that it does not depend on the other prompts.

    Args:
      prompt_bp: int32. Places from ``length_b`` on are not read.
      temperature: divides the logits. 0 takes the largest.
      top_p: draws from the fewest tokens whose probabilities add up to it (Holtzman et al. 2020).
    """
    keys_b = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(length_b)))
    logits_bv, cache = prefill(c, params, prompt_bp, length_b, shard, n_new=n_new)

    def write(
        state: tuple[Array, Cache, Array], i: Array
    ) -> tuple[tuple[Array, Cache, Array], Array]:
        logits_bv, cache, ended_b = state

        def draw(logits_v: Array, key: Key) -> Array:
            key = jax.random.fold_in(key, i)
            return choose(logits_v, key, temperature=temperature, top_p=top_p)

        token_b = jax.vmap(draw)(logits_bv, keys_b)
        if ends:
            token_b = jnp.where(ended_b, ends[0], token_b)
        logits_bv, cache = extend(c, params, token_b, length_b + i, cache, shard)
        ended_b = ended_b | jnp.isin(token_b, jnp.array(ends, jnp.int32))
        return (logits_bv, cache, ended_b), token_b

    start = (logits_bv, cache, jnp.zeros(len(length_b), bool))
    _, tokens_nb = jax.lax.scan(write, start, jnp.arange(n_new))
    return tokens_nb.T


def pad(ids: Sequence[Sequence[int]], n: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pad prompts with zeros to int32 [B, P], P at least ``n``, and return lengths, int32 [B]."""
    length_b = np.array([len(i) for i in ids], np.int32)
    prompt_bp = np.zeros((len(ids), max(n, length_b.max())), np.int32)
    for row, i in enumerate(ids):
        prompt_bp[row, : len(i)] = i
    return prompt_bp, length_b


def choose(
    logits_v: Array, key: Key, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> Array:
    """Draw one token, int32, from the ``top_k`` likeliest ones (Fan et al. 2018). 0 = from all."""
    if temperature == 0:
        return logits_v.argmax().astype(jnp.int32)
    logits_v = logits_v / temperature
    if 0 < top_k < logits_v.size:
        least = jax.lax.top_k(logits_v, top_k)[0][-1]
        logits_v = jnp.where(logits_v >= least, logits_v, -jnp.inf)
    if top_p < 1:
        order_v = jnp.argsort(-logits_v)
        p_v = jax.nn.softmax(logits_v[order_v])
        p_likelier_v = jnp.cumsum(p_v) - p_v
        nothing_v = jnp.full_like(logits_v, -jnp.inf)
        allowed_v = jnp.where(p_likelier_v < top_p, logits_v[order_v], -jnp.inf)
        logits_v = nothing_v.at[order_v].set(allowed_v)
    return jax.random.categorical(key, logits_v).astype(jnp.int32)


def prefill(
    c: transformer.Decoder,
    params: PyTree,
    prompt_bp: Array,
    length_b: Array,
    shard: Shard,
    *,
    n_new: int,
) -> tuple[Array, Cache]:
    """Return logits [B, V] after each prompt, and the cache with ``n_new`` free places."""
    b, p = prompt_bp.shape
    place_bp = jnp.broadcast_to(jnp.arange(p)[None], (b, p))
    run = transformer.mixer(c, None, shard)

    def mix(q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
        return run(q, k, v)[0], (k, v)

    x_bpd = transformer.embed(c, params, prompt_bp, place_bp, shard)
    body = functools.partial(transformer.layer, c, shard, transformer.angles(c, place_bp), mix)
    x_bpd, cache = jax.lax.scan(body, x_bpd, params["blocks"])
    last_bd = jnp.take_along_axis(x_bpd, (length_b - 1)[:, None, None], axis=1)[:, 0]
    padding = [(0, 0), (0, 0), (0, n_new), (0, 0), (0, 0)]
    k_lbtgk, v_lbtgk = (jnp.pad(x, padding) for x in cache)
    return _logits(c, params, last_bd), (k_lbtgk, v_lbtgk)


def extend(
    c: transformer.Decoder,
    params: PyTree,
    token_b: Array,
    place_b: Array,
    cache: Cache,
    shard: Shard,
) -> tuple[Array, Cache]:
    """Return logits [B, V] after one more token at ``place_b`` of each row, and the new cache."""
    places_s = jnp.arange(cache[0].shape[2])
    seen_bs = attention.visible(place_b, places_s, causal=True, window=c.window)
    x_btd = transformer.embed(c, params, token_b[:, None], place_b[:, None], shard)
    angles = transformer.angles(c, place_b[:, None])

    def layer(x_btd: Array, w_kv: tuple[PyTree, Array, Array]) -> tuple[Array, Cache]:
        w, *old = w_kv
        return transformer.layer(c, shard, angles, cached(old, place_b, seen_bs), x_btd, w)

    x_btd, cache = jax.lax.scan(layer, x_btd, (params["blocks"], *cache))
    return _logits(c, params, x_btd[:, 0]), cache


def cached(old: Sequence[Array], place_b: Array, seen_bs: Array) -> transformer.Mix:
    """Make a token's attention to ``seen_bs`` of a cache [B, S, G, K], added at ``place_b``."""
    here_bs = jnp.arange(seen_bs.shape[1])[None] == place_b[:, None]

    def mix(q_bthk: Array, k_btgk: Array, v_btgk: Array) -> tuple[Array, Cache]:
        old_k, old_v = old
        k = jnp.where(here_bs[..., None, None], k_btgk, old_k)
        v = jnp.where(here_bs[..., None, None], v_btgk, old_v)
        return attention.masked(q_bthk, k, v, seen_bs[:, None]), (k, v)

    return mix


def _logits(c: transformer.Decoder, params: PyTree, x_bd: Array) -> Array:
    x_bd = transformer.norm(c, params, "", x_bd)
    w_vd = transformer.head(c, params).astype(x_bd.dtype)
    return jnp.einsum("bd,vd->bv", x_bd, w_vd, preferred_element_type=jnp.float32)
