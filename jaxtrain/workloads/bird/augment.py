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


@dataclass(frozen=True)
class Augment(Section):
    """Nothing by default."""

    on_resume = checks.OnResume(checks.FUNCTION)

    # [share] smallest share of the area in a random crop, which is resized to the whole; 1 = none
    crop: float = 1.0
    # [ratio] ratio of a crop's extent in time to that in mel, both as shares of the whole
    crop_ratio: tuple[float, float] = (0.75, 1.333)
    shift: int = 0  # [frames] largest rotation in time, either way
    # [share] share of the views to which a recording of data.background is added
    background: float = 0.0
    # [dB] ratio of the view to the added background, drawn uniformly
    background_snr: tuple[float, float] = (0.0, 20.0)
    # [1] alpha of mixup: a share drawn from Beta(alpha, alpha) of energy and label is the partner's
    mixup: float = 0.0
    gain: float = 0.0  # [2 std] largest change of level, either way
    noise: float = 0.0  # [2 std] standard deviation of noise on every value
    time_masks: int = 0  # [masks] number of spans of frames that are set to the view's mean
    time_mask: int = 40  # [frames] longest time mask
    mel_masks: int = 0  # [masks] number of spans of bands that are set to the view's mean
    mel_mask: int = 16  # [bands] widest mel mask

    def validate(self) -> Iterator[tuple[str, str]]:
        sizes = (
            "shift",
            "mixup",
            "gain",
            "noise",
            "time_masks",
            "time_mask",
            "mel_masks",
            "mel_mask",
        )
        yield from checks.not_negative(self, *sizes)
        yield from checks.within(self, "(0, 1]", "crop")
        yield from checks.within(self, "[0, 1]", "background")
        for name, low in (("crop_ratio", 0.0), ("background_snr", -float("inf"))):
            least, most = getattr(self, name)
            if not low < least <= most:
                yield name, f"is {getattr(self, name)}; expected a range, its smallest value first"


class Augmented(NamedTuple):
    x: Array  # float32, as the batch's spectrograms
    # float32 [B, V]: share of the row's own label, of which `partner` has the rest; None = all of
    # it
    own: Array | None


def augment(c: Augment, seed: int, batch: Batch, of: FrontEnd = DEFAULT) -> Augmented:
    """Return spectrograms [B, (V,) F, W] as training sees them. Raises ValueError: odd mixup."""
    x = batch["spectrogram"].astype(jnp.float32)
    x_bvfw = x if x.ndim == 4 else x[:, None]
    views = jnp.arange(x_bvfw.shape[1])
    keys_bv = jax.vmap(lambda e, i: jax.vmap(lambda v: view_key(seed, e, i, v))(views))(
        batch["epoch"], batch["index"]
    )

    def every(f: Callable[..., Array]) -> Callable[..., Array]:
        return jax.vmap(jax.vmap(f))

    x_bvfw = every(lambda x_fw, key: _place(c, x_fw, key))(x_bvfw, keys_bv)
    if c.background:
        other = batch["background"].astype(jnp.float32).reshape(x_bvfw.shape)
        x_bvfw = every(lambda x_fw, y_fw, key: _add_background(c, of, x_fw, y_fw, _part(key, 2)))(
            x_bvfw, other, keys_bv
        )
    own_bv = None
    if c.mixup:
        own_bv = every(lambda key: _own_share(c, _part(key, 3)))(keys_bv)
        x_bvfw = every(lambda x_fw, y_fw, own: _mix(of, x_fw, y_fw, own))(
            x_bvfw, partner(x_bvfw), own_bv
        )
    x_bvfw = every(lambda x_fw, key: _spoil(c, x_fw, key))(x_bvfw, keys_bv)
    return Augmented(x_bvfw.reshape(x.shape), own_bv)


def view_key(seed: int, epoch: Array, index: Array, view: Array) -> Key:
    key = jax.random.key(seed ^ STREAM)
    for part in (epoch, index, view):
        key = jax.random.fold_in(key, part)
    return key


def partner(x: Array) -> Array:
    """[B, …]: each row's partner: rows 2 k and 2 k + 1 change places."""
    if x.shape[0] % 2:
        raise ValueError(
            f"augment.mixup pairs rows, and {x.shape[0]} of them are together on a part of the"
            " mesh's data axis, or in a microbatch; make train.batch an even multiple"
        )
    return x.reshape(x.shape[0] // 2, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


def _part(key: Key, i: int) -> Key:
    return jax.random.fold_in(key, i)


def _place(c: Augment, x_fw: Array, key: Key) -> Array:
    if c.crop < 1:
        x_fw = _crop(c, x_fw, _part(key, 0))
    if c.shift:
        x_fw = jnp.roll(x_fw, jax.random.randint(_part(key, 1), (), -c.shift, c.shift + 1), axis=0)
    return x_fw


def _crop(c: Augment, x_fw: Array, key: Key) -> Array:
    """Return a random box, interpolated linearly to the whole's size (Szegedy et al. 2015)."""
    key_area, key_ratio, key_place = jax.random.split(key, 3)
    area = jax.random.uniform(key_area, (), minval=c.crop, maxval=1.0)
    low, high = jnp.log(jnp.array(c.crop_ratio, jnp.float32))
    ratio = jnp.exp(jax.random.uniform(key_ratio, (), minval=low, maxval=high))
    # shares of time and of mel
    extent = jnp.minimum(jnp.stack([jnp.sqrt(area * ratio), jnp.sqrt(area / ratio)]), 1.0)
    start = jax.random.uniform(key_place, (2,)) * (1 - extent)
    size = jnp.array(x_fw.shape, jnp.float32)
    # Products with two matrices of weights: a gather could not be split over devices.
    x_fw = jax.image.scale_and_translate(
        x_fw,
        x_fw.shape,
        (0, 1),
        1 / extent,
        -start * size / extent,
        method="linear",
        antialias=False,
    )
    return x_fw


def _add_background(c: Augment, of: FrontEnd, x_fw: Array, y_fw: Array, key: Key) -> Array:
    key_which, key_snr = jax.random.split(key)
    snr = jax.random.uniform(key_snr, (), minval=c.background_snr[0], maxval=c.background_snr[1])
    ln_x, ln_y = _ln_energy(of, x_fw), _ln_energy(of, y_fw)
    level_x, level_y = (jax.nn.logsumexp(z) for z in (ln_x, ln_y))
    weaker = level_x - level_y - snr * (jnp.log(10.0) / 10)
    mixed = _from_ln_energy(of, jnp.logaddexp(ln_x, ln_y + weaker))
    return jnp.where(jax.random.uniform(key_which) < c.background, mixed, x_fw)


def _own_share(c: Augment, key: Key) -> Array:
    """Return a row's share of its own recording: at least half, as its label stays stronger."""
    share = jax.random.beta(key, c.mixup, c.mixup)
    return jnp.maximum(share, 1 - share)


def _mix(of: FrontEnd, x_fw: Array, y_fw: Array, own: Array) -> Array:
    """ln (own e^x + (1 - own) e^y) (Zhang et al. 2018, in energies)."""
    # A share of exactly one has no logarithm for the rest.
    rest = jnp.log(jnp.maximum(1 - own, 1e-9))
    return _from_ln_energy(
        of, jnp.logaddexp(_ln_energy(of, x_fw) + jnp.log(own), _ln_energy(of, y_fw) + rest)
    )


def _spoil(c: Augment, x_fw: Array, key: Key) -> Array:
    mean = x_fw.mean()
    if c.gain:
        x_fw += jax.random.uniform(_part(key, 4), (), minval=-c.gain, maxval=c.gain)
    if c.noise:
        x_fw += c.noise * jax.random.normal(_part(key, 5), x_fw.shape)
    masked_f = _spans(_part(key, 6), x_fw.shape[0], c.time_masks, c.time_mask)
    masked_w = _spans(_part(key, 7), x_fw.shape[1], c.mel_masks, c.mel_mask)
    return jnp.where(masked_f[:, None] | masked_w[None, :], mean, x_fw)


def _spans(key: Key, size: int, n: int, longest: int) -> Array:
    """bool [size]: the union of n spans of 0 to ``longest`` places (Park et al. 2019)."""
    key_length, key_start = jax.random.split(key)
    length = jax.random.randint(key_length, (n,), 0, longest + 1)
    start = (jax.random.uniform(key_start, (n,)) * (size - length + 1)).astype(jnp.int32)
    place, start, stop = jnp.arange(size)[:, None], start[None], (start + length)[None]
    return ((place >= start) & (place < stop)).any(axis=1)


def _ln_energy(of: FrontEnd, x: Array) -> Array:
    return x * of.scale + of.mean


def _from_ln_energy(of: FrontEnd, x: Array) -> Array:
    return (x - of.mean) / of.scale
