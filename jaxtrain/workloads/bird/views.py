"""Rows of a batch as the encoder's views: spectrograms, labels, masks.

Shapes: B rows, V views of a row, R = B V spectrograms, F frames, W mels.
"""

import jax
import jax.numpy as jnp

from jaxtrain.specs import fold_in_path
from jaxtrain.types import Array, Batch, Key, PyTree, Shard
from jaxtrain.workloads.bird import augment, log_mel, masked, vit
from jaxtrain.workloads.bird.classes import Labels
from jaxtrain.workloads.bird.settings import Settings


def with_spectrograms(c: Settings, batch: Batch, shard: Shard) -> Batch:
    """Add spectrograms to a batch of waveforms, in place of a background's waveforms too."""
    if c.form != "waveform":
        return batch
    fields = {"spectrogram": "waveform"}
    if c.augment.background:
        fields["background"] = "background"
    with jax.named_scope("log_mel"):
        spectrograms = {
            name: log_mel.split(batch[waveform], c.n_frames, shard, c.spectrograms)
            for name, waveform in fields.items()
        }
    return {**batch, **spectrograms}


def flat(c: Settings, x: Array) -> Array:
    """[B, F, W] or [B, V, F, W] -> float32 [R, F, W]."""
    return x.reshape(-1, c.n_frames, c.n_mels).astype(jnp.float32)


def repeated(c: Settings, x_b: Array) -> Array:
    """[B, …] -> [R, …]: every row once for each of its views, without a gather."""
    if c.n_views == 1:
        return x_b
    n_rows, *shape = x_b.shape
    x_bv = jnp.broadcast_to(x_b[:, None], (n_rows, c.n_views, *shape))
    return x_bv.reshape(-1, *shape)


def pooled(c: Settings, params: PyTree, encoded: vit.Encoded) -> Array:
    """Return the features [R, D] that objectives and probe read, by the encoder's ``params``."""
    tokens = encoded.cls if c.pool == "cls" else encoded.patches
    return vit.pooled(c, params, tokens)


def labels_of_rows(c: Settings, batch: Batch) -> Labels:
    if c.multilabel:
        return Labels(batch["labels"], None, None, batch["weight"])
    label_b = batch["label"]
    return Labels(label_b, None, None, batch["weight"] * (label_b >= 0))


def labels_of_views(c: Settings, batch: Batch, share_bv: Array | None) -> Labels:
    """Of R spectrograms, with the ``share_bv`` of `Inputs`."""
    of_rows = labels_of_rows(c, batch)
    label_r = repeated(c, of_rows.label)
    partner_r = share_r = None
    if share_bv is not None:
        partner_r = repeated(c, augment.partner(of_rows.label))
        share_r = share_bv.reshape(-1)
    return Labels(label_r, partner_r, share_r, repeated(c, of_rows.weight) / c.n_views)


def masks(c: Settings, seed: int, batch: Batch) -> masked.Masks:
    """Of R spectrograms: a function of (seed, epoch, recording, view), as augmentations are."""
    index_r = repeated(c, batch["index"])
    epoch_r = repeated(c, batch["epoch"])
    view_r = jnp.arange(index_r.shape[0]) % c.n_views

    def mask_key(epoch: Array, index: Array, view: Array) -> Key:
        return fold_in_path(augment.view_key(seed, epoch, index, view), "masks")

    keys_r = jax.vmap(mask_key)(epoch_r, index_r, view_r)
    return masked.draw_masks(keys_r, c.grid, c.n_masked, c.mask.block)


def unpatchify(c: Settings, x_rnp: Array) -> Array:
    """[R, N, P] -> [R, F, W], the inverse of `vit.patchify`."""
    rows, columns = c.grid
    f, w = c.patch
    x = x_rnp.reshape(-1, rows, columns, f, w)
    return x.transpose(0, 1, 3, 2, 4).reshape(-1, c.n_frames, c.n_mels)


def as_picture(x_rfw: Array) -> Array:
    """[R, F, W] -> [R, W, F] in 0..1, each from its quietest to its loudest value."""
    low = x_rfw.min((1, 2), keepdims=True)
    high = x_rfw.max((1, 2), keepdims=True)
    return ((x_rfw - low) / (high - low + 1e-9)).transpose(0, 2, 1)
