"""Rows of a batch as the encoder's views: spectrograms, labels, masks, stochastic depth.

Shapes: B rows, V views of a row, R = B V spectrograms, F frames, W mels, L layers.
"""

import jax
import jax.numpy as jnp

from jaxtrain.specs import fold_in_path
from jaxtrain.types import Array, Batch, Key, PyTree, Shard
from jaxtrain.workloads.bird import augment, log_mel, masked, vit
from jaxtrain.workloads.bird.classes import Labels
from jaxtrain.workloads.bird.settings import Settings


def with_spectrograms(c: Settings, batch: Batch, shard: Shard) -> Batch:
    if c.form != "waveform":
        return batch
    fields = {
        "spectrogram": "waveform",
        **({"background": "background"} if c.augment.background else {}),
    }
    with jax.named_scope("log_mel"):
        made = {
            name: log_mel.split(batch[wave], c.n_frames, shard, c.spectrograms)
            for name, wave in fields.items()
        }
    return {**batch, **made}


def flat(c: Settings, x: Array) -> Array:
    """[B, F, W] or [B, V, F, W] -> float32 [R, F, W]."""
    return x.reshape(-1, c.n_frames, c.n_mels).astype(jnp.float32)


def repeated(c: Settings, x_b: Array) -> Array:
    """[B, …] -> [R, …]: every row once for each of its views, without a gather."""
    if c.n_views == 1:
        return x_b
    return jnp.broadcast_to(x_b[:, None], (x_b.shape[0], c.n_views, *x_b.shape[1:])).reshape(
        -1, *x_b.shape[1:]
    )


def pooled(c: Settings, params: PyTree, encoded: vit.Encoded) -> Array:
    """Return the features [R, D] that objectives and probe read, by the encoder's ``params``."""
    return vit.pooled(c, params, encoded.cls if c.pool == "cls" else encoded.patches)


def labels_of_rows(c: Settings, batch: Batch) -> Labels:
    own_b = batch["labels" if c.multilabel else "label"]
    weight_b = batch["weight"] if c.multilabel else batch["weight"] * (own_b >= 0)
    return Labels(own_b, None, None, weight_b)


def labels_of_views(c: Settings, batch: Batch, share_bv: Array | None) -> Labels:
    """Of R spectrograms, with the ``share_bv`` of `Inputs`."""
    rows = labels_of_rows(c, batch)
    return Labels(
        repeated(c, rows.own),
        None if share_bv is None else repeated(c, augment.partner(rows.own)),
        None if share_bv is None else share_bv.reshape(-1),
        repeated(c, rows.weight) / c.n_views,
    )


def masks(c: Settings, seed: int, batch: Batch) -> masked.Masks:
    """Of R spectrograms: a function of (seed, epoch, recording, view), as augmentations are."""
    index_r, epoch_r = repeated(c, batch["index"]), repeated(c, batch["epoch"])
    view_r = jnp.arange(index_r.shape[0]) % c.n_views
    keys_r = jax.vmap(lambda e, i, v: fold_in_path(augment.view_key(seed, e, i, v), "masks"))(
        epoch_r, index_r, view_r
    )
    return masked.draw_masks(keys_r, c.grid, c.n_masked, c.mask.block)


def survival(c: Settings, batch: Batch, key: Key, name: str) -> Array | None:
    """`vit.survival` of R spectrograms in a pass ``name``, by the step's key and place."""
    if not c.drop_path:
        return None
    place_r = (
        repeated(c, batch["row"]) * c.n_views
        + jnp.arange(batch["row"].shape[0] * c.n_views) % c.n_views
    )
    return vit.survival(
        c, jax.vmap(lambda r: jax.random.fold_in(fold_in_path(key, name), r))(place_r)
    )


def unpatchify(c: Settings, x_rnp: Array) -> Array:
    """[R, N, P] -> [R, F, W], the inverse of `vit.patchify`."""
    (rows, columns), (f, w) = c.grid, c.patch
    return (
        x_rnp.reshape(-1, rows, columns, f, w)
        .transpose(0, 1, 3, 2, 4)
        .reshape(-1, c.n_frames, c.n_mels)
    )


def as_picture(x_rfw: Array) -> Array:
    """[R, F, W] -> [R, W, F] in 0..1, each from its quietest to its loudest value."""
    low, high = x_rfw.min((1, 2), keepdims=True), x_rfw.max((1, 2), keepdims=True)
    return ((x_rfw - low) / (high - low + 1e-9)).transpose(0, 2, 1)
