"""Masked patches, predicted from visible ones (He et al. 2022): the masks, the decoder, the error.

The caller chooses its targets: a patch's own values, or another encoder's features of it.

Shapes: B batch, N patches, V visible patches, D embed of the encoder, E of the decoder, P values
predicted for a patch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import Section
from jaxtrain.nn.layers import layer_norm, product, spread
from jaxtrain.specs import fan_in, ones, truncated_normal, zeros
from jaxtrain.types import Array, Key, PyTree, Shard, Spec
from jaxtrain.workloads.bird import vit
from loaders.io import checks

VARIANCE_EPS = 1e-6  # added to a patch's variance


@dataclass(frozen=True)
class Decoder(Section):
    """Width and depth of the decoder."""

    on_resume = checks.OnResume(checks.STATE)

    embed: int = 512  # [values] width of a token
    depth: int = 8  # [layers] number of layers of the decoder
    heads: int = 8  # [heads] number of heads of the attention

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(self, 1, "embed", "depth", "heads")
        if self.heads > 0 and self.embed % self.heads:
            yield "heads", f"is {self.heads}, which does not divide embed={self.embed}"

    def stack(self, c: vit.Encoder) -> vit.Stack:
        return vit.Stack(
            embed=self.embed,
            depth=self.depth,
            heads=self.heads,
            hidden=4 * self.embed,
            dtype=c.dtype,
            remat="none" if c.remat == "none" else "full",
        )


class Masks(NamedTuple):
    masked: Array  # float32 [B, N], 1 for a masked patch, the same number in every row
    visible: Array  # float32 [B, V, N], one-hot: the others, in order


def draw_masks(key_b: Key, grid: tuple[int, int], n_masked: int, block: int) -> Masks:
    """Mask exactly ``n_masked`` patches, in blocks of ``block`` × ``block`` as far as possible.

    As many blocks as would fit without overlap, then single patches.
    """
    rows, columns = grid
    n = rows * columns
    high = min(block, rows)
    wide = min(block, columns)
    # Blocks may stand over the edges, or patches there would be masked less often than others.
    places = (rows + high - 1, columns + wide - 1)
    n_blocks = n_masked // (high * wide)

    def mask(key: Key) -> Array:
        key_blocks, key_single = jax.random.split(key)
        block_order = rank(jax.random.uniform(key_blocks, (places[0] * places[1],)))
        is_block = (block_order < n_blocks).reshape(places)
        covered = jnp.zeros(grid, bool)
        for i in range(high):
            for j in range(wide):
                covered |= is_block[i : i + rows, j : j + columns]
        # Covered patches come first, and they are never too many.
        return rank(jax.random.uniform(key_single, (n,)) - covered.reshape(n)) < n_masked

    masked_bn = jax.vmap(mask)(key_b)
    place_bn = jnp.cumsum(~masked_bn, axis=1) - 1
    is_visible_b1n = ~masked_bn[:, None]
    place_b1n = place_bn[:, None]
    visible_bvn = is_visible_b1n & (place_b1n == jnp.arange(n - n_masked)[None, :, None])
    return Masks(masked_bn.astype(jnp.float32), visible_bvn.astype(jnp.float32))


def rank(x_n: Array) -> Array:
    """Return each value's place in ascending order, int32 [N]. Sorting would gather."""
    i = jnp.arange(x_n.shape[0])
    is_less_nm = x_n[None] < x_n[:, None]
    is_equal_nm = x_n[None] == x_n[:, None]
    is_before_nm = is_less_nm | (is_equal_nm & (i[None] < i[:, None]))
    return is_before_nm.sum(1)


def decoder_specs(c: vit.Encoder, d: Decoder, size: int) -> PyTree:
    """Return the parameters of a decoder of ``size`` values for each patch."""
    e = d.embed
    return {
        "w_in": Spec((c.embed, e), ("embed", "mlp"), fan_in(c.embed)),
        "b_in": Spec((e,), ("mlp",), zeros),
        "bias_mask": Spec((c.embed,), ("embed",), truncated_normal(0.02)),
        "bias_pos": Spec((c.n_patches, e), ("seq", "embed"), truncated_normal(0.02)),
        "layers": vit.stack_specs(d.stack(c)),
        "scale": Spec((e,), ("embed",), ones),
        "bias": Spec((e,), ("embed",), zeros),
        "w_out": Spec((e, size), ("embed", "patch"), fan_in(e)),
        "b_out": Spec((size,), ("patch",), zeros),
    }


def decode(
    c: vit.Encoder, d: Decoder, params: PyTree, seen: vit.Encoded, masks: Masks, shard: Shard
) -> Array:
    """float32 [B, N, P]: predictions for all patches from the encoder's states of the visible ones.

    CLS goes first, if there is one, without a position. A learned token replaces a masked patch.
    """
    filled_bnd = jnp.einsum("bvn,bvd->bnd", masks.visible, seen.patches, precision=vit.EXACT)
    filled_bnd += masks.masked[:, :, None] * params["bias_mask"][None, None]
    x_btd = jnp.concatenate([seen.cls, filled_bnd], axis=1)
    x_bte = product("btd,de->bte", x_btd, params["w_in"], shard)
    x_bte += spread(params["b_in"], x_bte.shape, shard)
    position_te = jnp.pad(params["bias_pos"], ((c.n_cls, 0), (0, 0)))
    x_bte += spread(position_te, x_bte.shape, shard)
    x_bte = vit.run_stack(d.stack(c), params["layers"], x_bte, shard)
    x_bne = x_bte[:, c.n_cls :].astype(jnp.float32)
    x_bne = layer_norm(x_bne, params["scale"], params["bias"], vit.EPS, shard)
    y_bnp = product("bne,ep->bnp", x_bne, params["w_out"], shard)
    return y_bnp + spread(params["b_out"], y_bnp.shape, shard)


def decoder_flops(c: vit.Encoder, d: Decoder, size: int) -> int:
    """Floating-point operations of a decoder's matrix products for one spectrogram, forward."""
    layers = vit.stack_flops(d.stack(c), c.n_cls + c.n_patches)
    projections = 2 * c.n_patches * d.embed * (c.embed + size)
    return layers + projections


def normalised(patches_bnp: Array) -> Array:
    """(x - mean) / sqrt(var + 1e-6) of each patch, with the variance over its P values."""
    centred_bnp = patches_bnp - patches_bnp.mean(-1, keepdims=True)
    variance_bn1 = jnp.square(centred_bnp).mean(-1, keepdims=True)
    return centred_bnp * jax.lax.rsqrt(variance_bn1 + VARIANCE_EPS)


def masked_error(pred_bnp: Array, target_bnp: Array, masked_bn: Array) -> Array:
    """float32 [B]: mean square over the masked patches of each row."""
    error_bn = jnp.square(pred_bnp - target_bnp).mean(-1)
    return (error_bn * masked_bn).sum(1) / masked_bn.sum(1)
