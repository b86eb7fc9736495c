"""The spectrogram of a waveform on the device, inside the step: the Rust loader's numbers.

Kaldi's log-mel filter bank (feat/feature-window.cc, feat/mel-computations.cc) of a front end, by
default 800 samples every 320 at 32 kHz and 128 mels. Of each whole frame: its mean subtracted, y[i]
= x[i] - 0.97 x[i - 1], a symmetric Hann window, zeros up to a power of two, |FFT|², triangles in
mel(f) = 1127 ln(1 + f / 700), and ln(max(energy, 2⁻²³)). Tables are made in float64, everything
else is float32.

Shapes: … any, R waveforms, N samples, F whole frames of them, W mels.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.parallel import kernels
from jaxtrain.types import Array, Shard
from loaders.audio.front_end import DEFAULT, FrontEnd

EMPHASIS = 0.97
FLOOR = 2.0**-23
FULL = 32768  # the int16 that would be 1.0
PARTS = 16  # slices of a frame, at most, given by samples that window and hop share


def spectrogram(wave: Array, n_frames: int, of: FrontEnd = DEFAULT) -> Array:
    """Return int16 samples [..., N] as the model sees them: float32 [..., n_frames, W].

    Missing frames hold the minimum of the others. Then (x - mean) / (2 std).
    """
    n_samples = of.window + (n_frames - 1) * of.hop
    wave_rn = wave.reshape(-1, wave.shape[-1])[:, :n_samples]
    x_rfw = log_mel(wave_rn, of)
    n_rows, n_whole, _ = x_rfw.shape
    least_r11 = x_rfw.min((1, 2), keepdims=True)
    padding_rfw = jnp.broadcast_to(least_r11, (n_rows, n_frames - n_whole, of.n_mels))
    x_rfw = jnp.concatenate([x_rfw, padding_rfw], axis=1)
    x_rfw = (x_rfw - of.mean) / of.scale
    return x_rfw.reshape(*wave.shape[:-1], n_frames, of.n_mels)


def split(wave: Array, n_frames: int, shard: Shard, of: FrontEnd = DEFAULT) -> Array:
    """`spectrogram` of rows [B, …] on each device, which XLA would gather for the transform."""
    axes = ("batch", *(None,) * (wave.ndim - 1))
    shape = (*wave.shape[:-1], n_frames, of.n_mels)
    make = functools.partial(spectrogram, n_frames=n_frames, of=of)
    return kernels.local(shard, make, (wave,), (axes,), shard.spec(shape, (*axes, None)))


def log_mel(x_rn: Array, of: FrontEnd = DEFAULT) -> Array:
    """ln of the mel energies of int16 samples [R, N], at least one window: float32 [R, F, W]."""
    # In integers: float32 would leave an audible rest of a loud constant.
    frames_rfn = _frames(x_rn.astype(jnp.int32), of.window, of.hop)
    y_rfn = frames_rfn * of.window - frames_rfn.sum(-1, keepdims=True)
    y_rfn = y_rfn.astype(jnp.float32) / (of.window * FULL)
    # the first has weight 0
    previous_rfn = jnp.concatenate([y_rfn[..., :1], y_rfn[..., :-1]], axis=-1)
    window_n, bands_kw = tables(of)
    half = bands_kw.shape[0]
    y_rfn = (y_rfn - EMPHASIS * previous_rfn) * window_n[None, None]
    spectrum_rfk = jnp.fft.rfft(y_rfn, 2 * half)[..., :half]
    power_rfk = jnp.square(spectrum_rfk.real) + jnp.square(spectrum_rfk.imag)
    energy_rfw = jnp.einsum("rfk,kw->rfw", power_rfk, bands_kw, precision=jax.lax.Precision.HIGHEST)
    return jnp.log(jnp.maximum(energy_rfw, FLOOR))


def _frames(x_rn: Array, window: int, hop: int) -> Array:
    """Return frames [R, F, window] as slices side by side: devices could not split a gather."""
    n_rows, n_samples = x_rn.shape
    n_frames = 1 + (n_samples - window) // hop
    part = math.gcd(window, hop)
    if window // part > PARTS:
        part = hop  # and the last slice holds more than the window
    parts_of_window = -(-window // part)
    parts_of_hop = hop // part
    last_start = parts_of_hop * (n_frames - 1)
    n_read = (last_start + parts_of_window) * part
    n_missing = max(0, n_read - n_samples)
    x_rn = jnp.pad(x_rn[:, :n_read], ((0, 0), (0, n_missing)))
    parts_rmp = x_rn.reshape(n_rows, -1, part)
    slices = [parts_rmp[:, i : i + last_start + 1 : parts_of_hop] for i in range(parts_of_window)]
    return jnp.concatenate(slices, axis=-1)[..., :window]


@functools.cache
def tables(of: FrontEnd) -> tuple[np.ndarray, np.ndarray]:
    """Of a front end, float32: the window [N], and the triangles [transform's size / 2, W]."""
    half = 1 << ((of.window - 1).bit_length() - 1)
    angle_n = 2 * np.pi * np.arange(of.window) / (of.window - 1)
    window_n = 0.5 - 0.5 * np.cos(angle_n)

    def mel(hz: Any) -> Any:
        return 1127.0 * np.log1p(hz / 700.0)

    low = mel(of.f_min)
    step = (mel(of.highest) - low) / (of.n_mels + 1)
    hz_k = np.arange(half) * of.sample_rate / (2 * half)
    place_k = (mel(hz_k) - low) / step  # of a bin, in bands
    place_kw = place_k[:, None] - np.arange(of.n_mels)[None]
    bands_kw = np.maximum(np.minimum(place_kw, 2 - place_kw), 0)
    return window_n.astype(np.float32), bands_kw.astype(np.float32)
