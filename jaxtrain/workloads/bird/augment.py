"""Augmentation of log-mel spectrograms on the device, inside the step.

All that is drawn for a view is a pure function of (seed, epoch, recording, view): neither batch,
mesh nor microbatches change it. A recording is mixed with the row next to it in the batch: rows 2 k
and 2 k + 1 are partners. They follow each other in the data's order, so the partner is a function
of (seed, epoch, recording) too, on every mesh that gives each device an even number of rows. With
train.accumulate = n it is the next row of the microbatch, n further on.

In order: crop, shift, background, mixup, gain, noise, masks. Recordings add up as sound does: in
energy, not in its logarithm. docs/workloads/augmentations.png has each alone.

Shapes: B batch, V views of a recording, F frames, W mels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.config import Section
from jaxtrain.types import Array, Batch, Key
from loaders.audio.front_end import DEFAULT, FrontEnd
from loaders.io import checks

STREAM = 0x61756700  # sets these draws apart from others of the same seed
CROP_RATIO = (0.75, 1.333)  # a crop's extent in time to that in mel, shares of the whole
BACKGROUND_SNR = (0.0, 20.0)  # [dB] by which a background is weaker, drawn evenly

# A view's key is folded with these numbers, one for each augmentation.
CROP, SHIFT, BACKGROUND, MIXUP, GAIN, NOISE, TIME_MASKS, MEL_MASKS = range(8)


@dataclass(frozen=True)
class Augment(Section):
    """Nothing by default."""

    on_resume = checks.OnResume(checks.FUNCTION)

    # [share] smallest share of the area in a random crop, which is resized to the whole; 1 = none
    crop: float = 1.0
    shift: int = 0  # [frames] largest rotation in time, either way
    # [share] share of the views to which a recording of data.background is added
    background: float = 0.0
    # [1] alpha of mixup: a share drawn from Beta(alpha, alpha) of energy and label is the partner's
    mixup: float = 0.0
    gain: float = 0.0  # [2 std] largest change of level, either way
    noise: float = 0.0  # [2 std] standard deviation of noise on every value
    time_masks: int = 0  # [masks] number of spans of frames that are set to the view's mean
    time_mask: int = 40  # [frames] longest time mask
    mel_masks: int = 0  # [masks] number of spans of bands that are set to the view's mean
    mel_mask: int = 16  # [bands] widest mel mask

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.not_negative(self, "shift", "mixup", "gain", "noise")
        yield from checks.not_negative(self, "time_masks", "time_mask", "mel_masks", "mel_mask")
        yield from checks.within(self, "(0, 1]", "crop")
        yield from checks.within(self, "[0, 1]", "background")


class Augmented(NamedTuple):
    x: Array  # float32, as the batch's spectrograms
    # float32 [B, V]: share of the row's own label, of which `partner` has the rest; None = all of
    # it
    own_share: Array | None


def augment(c: Augment, seed: int, batch: Batch, of: FrontEnd = DEFAULT) -> Augmented:
    """Return spectrograms [B, (V,) F, W] as training sees them. Raises ValueError: odd mixup."""
    x = batch["spectrogram"].astype(jnp.float32)
    x_bvfw = x if x.ndim == 4 else x[:, None]
    keys_bv = view_keys(seed, batch, x_bvfw.shape[1])

    x_bvfw = every_view(lambda x_fw, key: _place(c, x_fw, key))(x_bvfw, keys_bv)
    if c.background:
        y_bvfw = batch["background"].astype(jnp.float32).reshape(x_bvfw.shape)
        add = every_view(lambda x_fw, y_fw, key: _add_background(c, of, x_fw, y_fw, key))
        x_bvfw = add(x_bvfw, y_bvfw, keys_bv)
    share_bv = None
    if c.mixup:
        share_bv = every_view(lambda key: _own_share(c, key))(keys_bv)
        mix = every_view(lambda x_fw, y_fw, share: _mix(of, x_fw, y_fw, share))
        x_bvfw = mix(x_bvfw, partner(x_bvfw), share_bv)
    x_bvfw = every_view(lambda x_fw, key: _spoil(c, x_fw, key))(x_bvfw, keys_bv)
    return Augmented(x_bvfw.reshape(x.shape), share_bv)


def every_view(function: Callable[..., Array]) -> Callable[..., Array]:
    """Map ``function`` of one view over arrays [B, V, …]."""
    return jax.vmap(jax.vmap(function))


def view_keys(seed: int, batch: Batch, n_views: int) -> Key:
    """Return the keys [B, V] of a batch's views."""
    view_v = jnp.arange(n_views)

    def keys_of_row(epoch: Array, index: Array) -> Key:
        return jax.vmap(lambda view: view_key(seed, epoch, index, view))(view_v)

    return jax.vmap(keys_of_row)(batch["epoch"], batch["index"])


def view_key(seed: int, epoch: Array, index: Array, view: Array) -> Key:
    key = jax.random.key(seed ^ STREAM)
    for part in (epoch, index, view):
        key = jax.random.fold_in(key, part)
    return key


def partner(x: Array) -> Array:
    """[B, …]: each row's partner: rows 2 k and 2 k + 1 change places."""
    n_rows, *shape = x.shape
    if n_rows % 2:
        raise ValueError(
            f"augment.mixup pairs rows, and {n_rows} of them are together on a part of the"
            " mesh's data axis, or in a microbatch; make train.batch an even multiple"
        )
    pairs = x.reshape(n_rows // 2, 2, *shape)
    return pairs[:, ::-1].reshape(x.shape)


def _place(c: Augment, x_fw: Array, key: Key) -> Array:
    if c.crop < 1:
        x_fw = _crop(c, x_fw, jax.random.fold_in(key, CROP))
    if c.shift:
        key_shift = jax.random.fold_in(key, SHIFT)
        shift = jax.random.randint(key_shift, (), -c.shift, c.shift + 1)
        x_fw = jnp.roll(x_fw, shift, axis=0)
    return x_fw


def _crop(c: Augment, x_fw: Array, key: Key) -> Array:
    """Return a random box, interpolated linearly to the whole's size (Szegedy et al. 2015)."""
    key_area, key_ratio, key_place = jax.random.split(key, 3)
    area = jax.random.uniform(key_area, (), minval=c.crop, maxval=1.0)
    low, high = jnp.log(jnp.array(CROP_RATIO, jnp.float32))
    ratio = jnp.exp(jax.random.uniform(key_ratio, (), minval=low, maxval=high))
    time_share = jnp.sqrt(area * ratio)
    mel_share = jnp.sqrt(area / ratio)
    extent = jnp.minimum(jnp.stack([time_share, mel_share]), 1.0)
    start = jax.random.uniform(key_place, (2,)) * (1 - extent)
    size = jnp.array(x_fw.shape, jnp.float32)
    # Products with two matrices of weights: a gather could not be split over devices.
    cropped_fw: Array = jax.image.scale_and_translate(
        x_fw,
        x_fw.shape,
        (0, 1),
        1 / extent,
        -start * size / extent,
        method="linear",
        antialias=False,
    )
    return cropped_fw


def _add_background(c: Augment, of: FrontEnd, x_fw: Array, y_fw: Array, key: Key) -> Array:
    key_chosen, key_snr = jax.random.split(jax.random.fold_in(key, BACKGROUND))
    least, most = BACKGROUND_SNR
    snr = jax.random.uniform(key_snr, (), minval=least, maxval=most)
    ln_x = _ln_energy(of, x_fw)
    ln_y = _ln_energy(of, y_fw)
    level_x = jax.nn.logsumexp(ln_x)
    level_y = jax.nn.logsumexp(ln_y)
    change_y = level_x - level_y - snr * (jnp.log(10.0) / 10)
    mixed_fw = _from_ln_energy(of, jnp.logaddexp(ln_x, ln_y + change_y))
    return jnp.where(jax.random.uniform(key_chosen) < c.background, mixed_fw, x_fw)


def _own_share(c: Augment, key: Key) -> Array:
    """Return a row's share of its own recording: at least half, as its label stays stronger."""
    share = jax.random.beta(jax.random.fold_in(key, MIXUP), c.mixup, c.mixup)
    return jnp.maximum(share, 1 - share)


def _mix(of: FrontEnd, x_fw: Array, y_fw: Array, share: Array) -> Array:
    """ln (share e^x + (1 - share) e^y) (Zhang et al. 2018, in energies)."""
    # A share of exactly one has no logarithm for the rest.
    ln_y_share = jnp.log(jnp.maximum(1 - share, 1e-9))
    ln_x = _ln_energy(of, x_fw) + jnp.log(share)
    ln_y = _ln_energy(of, y_fw) + ln_y_share
    return _from_ln_energy(of, jnp.logaddexp(ln_x, ln_y))


def _spoil(c: Augment, x_fw: Array, key: Key) -> Array:
    mean = x_fw.mean()
    if c.gain:
        key_gain = jax.random.fold_in(key, GAIN)
        x_fw += jax.random.uniform(key_gain, (), minval=-c.gain, maxval=c.gain)
    if c.noise:
        x_fw += c.noise * jax.random.normal(jax.random.fold_in(key, NOISE), x_fw.shape)
    n_frames, n_mels = x_fw.shape
    key_time = jax.random.fold_in(key, TIME_MASKS)
    masked_f = _spans(key_time, n_frames, c.time_masks, c.time_mask)
    key_mel = jax.random.fold_in(key, MEL_MASKS)
    masked_w = _spans(key_mel, n_mels, c.mel_masks, c.mel_mask)
    return jnp.where(masked_f[:, None] | masked_w[None, :], mean, x_fw)


def _spans(key: Key, size: int, n_spans: int, longest: int) -> Array:
    """bool [size]: the union of spans of 0 to ``longest`` places (Park et al. 2019)."""
    key_length, key_start = jax.random.split(key)
    length = jax.random.randint(key_length, (n_spans,), 0, longest + 1)
    start = jax.random.uniform(key_start, (n_spans,)) * (size - length + 1)
    start = start.astype(jnp.int32)
    place_p1 = jnp.arange(size)[:, None]
    start_1n = start[None]
    stop_1n = (start + length)[None]
    return ((place_p1 >= start_1n) & (place_p1 < stop_1n)).any(axis=1)


def _ln_energy(of: FrontEnd, x: Array) -> Array:
    return x * of.scale + of.mean


def _from_ln_energy(of: FrontEnd, x: Array) -> Array:
    return (x - of.mean) / of.scale
