"""The forward pass of a training step with dropout: of values in the residual, and of attention.

As in GPT-2 (Radford et al. 2019), ``model.dropout`` drops numbers of the embeddings, and of the
results of each attention and each feed-forward net, before they are added to the residual.
``model.attention_dropout`` drops the weights that a query gives its keys. An evaluation and
generations drop nothing.

Draws depend on the step's key, which is fold_in(seed, step), on the layer, on the part and on a
row's place in the global batch.

Shapes: B batch, T tokens, D embed, H heads, G key/value heads, K head dimension, L layers.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn import attention, dropout, remat, transformer
from jaxtrain.parallel.layout import LayoutError
from jaxtrain.specs import fold_in_path
from jaxtrain.types import Array, Batch, Key, PyTree, Shard
from jaxtrain.workloads.language.model import Config


class Draws(NamedTuple):
    """The draws of one layer of one step, or of its embeddings."""

    c: Config
    key: Key
    row_b: Array  # int32: places in the global batch
    shard: Shard

    def values(self, x_btd: Array, part: str) -> Array:
        """Drop numbers of the result of a part: "embed", "attention" or "mlp"."""
        if not self.c.dropout:
            return x_btd
        key = fold_in_path(self.key, part)
        x_btd = dropout.drop(x_btd, self.c.dropout, key, self.row_b)
        return self.shard(x_btd, "batch", "seq", None)

    def weights(self, weight_bhts: Array) -> Array:
        key = fold_in_path(self.key, "weights")
        return dropout.drop(weight_bhts, self.c.attention_dropout, key, self.row_b)

    def mix(self, segments_bt: Array | None) -> transformer.Mix:
        """Return attention within a row that drops weights, or the one without, if it is faster."""
        if not self.c.attention_dropout:
            return transformer.mixer(self.c, segments_bt, self.shard)

        def mix(q_bthk: Array, k_btgk: Array, v_btgk: Array) -> tuple[Array, None]:
            mask_bts = _mask(self.c, q_bthk.shape[1], segments_bt)
            run = functools.partial(dropout.attention, self.shard)
            of_draws = functools.partial(run, mask_bts=mask_bts, drop_weights=self.weights)
            y_bthk = remat.cheap(self.c.remat, of_draws, q_bthk, k_btgk, v_btgk)
            return remat.name(y_bthk, "attention"), None

        return mix


def decode(c: Config, params: PyTree, batch: Batch, shard: Shard, key: Key) -> Array:
    """Compute `transformer.decode` of a training step, whose ``batch`` has ``row`` [B] too."""
    position_bt = batch["positions"]
    angles = transformer.angles(c, position_bt)
    x_btd = transformer.embed(c, params, batch["tokens"], position_bt, shard)
    x_btd = Draws(c, key, batch["row"], shard).values(x_btd, "embed")

    def body(x_btd: Array, entry: tuple[PyTree, Key]) -> tuple[Array, PyTree]:
        w, key = entry
        draws = Draws(c, key, batch["row"], shard)
        mix = draws.mix(batch.get("segments"))
        return transformer.layer(c, shard, angles, mix, x_btd, w, draws.values)

    stack = (params["blocks"], jax.random.split(key, c.depth))
    return transformer.stacked(c, params, body, x_btd, stack, shard)


def _mask(c: Config, t: int, segments_bt: Array | None) -> Array:
    """Return the places that each query of T may see, bool [B or 1, T, T]."""
    places = jnp.arange(t)
    mask_bts = attention.visible(places, places, causal=True, window=c.window)[None]
    if segments_bt is not None:
        mask_bts = mask_bts & attention.same_segment(segments_bt, segments_bt)
    return mask_bts


def require_whole_rows(c: Config, shard: Shard, length: int) -> None:
    """Raise LayoutError if attention's weights are dropped in rows that devices share by places."""
    names = shard.names("seq", length)
    if c.attention_dropout and names:
        raise LayoutError(
            f"config.model.attention_dropout is {c.attention_dropout}, and the places of a row are"
            f" split over {', '.join(names)}, whose attention has no array of weights; set it to"
            " 0, which leaves model.dropout, or take the rule of 'seq' out of"
            " config.mesh.axis_rules"
        )
