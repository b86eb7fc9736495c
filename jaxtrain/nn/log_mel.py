"""The spectrogram of a waveform on the device, inside the step: the numbers of the loader's (rust/core/src/fbank.rs).

Kaldi's log-mel filter bank at 32 kHz (feat/feature-window.cc, feat/mel-computations.cc). Of each frame, 800 samples every 320,
of which only whole ones count: its mean subtracted, y[i] = x[i] - 0.97 x[i - 1], a symmetric Hann window, zeros up to 1024,
|FFT|², 128 triangles in mel(f) = 1127 ln(1 + f / 700) from 20 Hz to 16 kHz, and ln(max(energy, 2⁻²³)). Tables are made in
float64, everything else is float32.

Shapes: … any, R waveforms, N samples, F whole frames of them, W = 128 mels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.types import Array, Shard

RATE, WINDOW, HOP, N_FFT, N_MELS = 32_000, 800, 320, 1024, 128
PART = 160  # [samples] the largest that divides window and hop
EMPHASIS, FLOOR = 0.97, 2.0**-23
SCALE, MEAN = 8.86, -7.2  # a spectrogram's values times SCALE plus MEAN are ln energy
FULL = 32768  # the int16 that would be 1.0


def spectrogram(wave: Array, n_frames: int) -> Array:
    """Samples [..., N], int16 at 32 kHz, as the model sees them: float32 [..., n_frames, W].

    The first ``n_frames`` frames; missing ones hold the minimum of those that are there; then (x - MEAN) / SCALE.
    """
    x_rfw = log_mel(wave.reshape(-1, wave.shape[-1])[:, : WINDOW + (n_frames - 1) * HOP])
    missing = n_frames - x_rfw.shape[1]
    least_r11 = x_rfw.min((1, 2), keepdims=True)
    x_rfw = jnp.concatenate([x_rfw, jnp.broadcast_to(least_r11, (x_rfw.shape[0], missing, N_MELS))], axis=1)
    return ((x_rfw - MEAN) / SCALE).reshape(*wave.shape[:-1], n_frames, N_MELS)


def split(wave: Array, n_frames: int, shard: Shard) -> Array:
    """`spectrogram` of rows [B, …] that devices share: each makes its own, where XLA would gather them for the transform."""
    axes = ("batch", *(None,) * (wave.ndim - 1))
    shape = (*wave.shape[:-1], n_frames, N_MELS)
    make = functools.partial(spectrogram, n_frames=n_frames)
    return shard.local(make, (wave,), (axes,), shard.spec(shape, (*axes, None)))


def log_mel(x_rn: Array) -> Array:
    """ln of the mel energies of int16 samples [R, N], N >= 800: float32 [R, F, W]."""
    x_rn = x_rn.astype(jnp.int32)
    f = 1 + (x_rn.shape[1] - WINDOW) // HOP
    # Frames as five slices side by side: a gather could not be split over devices.
    parts_rmp = x_rn[:, : WINDOW + (f - 1) * HOP].reshape(x_rn.shape[0], -1, PART)
    each = HOP // PART
    frames_rfn = jnp.concatenate([parts_rmp[:, j : j + each * (f - 1) + 1 : each] for j in range(WINDOW // PART)], axis=-1)
    # In integers, for of a loud constant what float32 left of it would be heard.
    y_rfn = frames_rfn * WINDOW - frames_rfn.sum(-1, keepdims=True)
    y_rfn = y_rfn.astype(jnp.float32) / (WINDOW * FULL)
    before_rfn = jnp.concatenate([y_rfn[..., :1], y_rfn[..., :-1]], axis=-1)  # the first has weight 0
    window_n, bands_kw = _tables()
    spectrum_rfk = jnp.fft.rfft((y_rfn - EMPHASIS * before_rfn) * window_n[None, None], N_FFT)[..., : N_FFT // 2]
    power_rfk = jnp.square(spectrum_rfk.real) + jnp.square(spectrum_rfk.imag)
    energy_rfw = jnp.einsum("rfk,kw->rfw", power_rfk, bands_kw, precision=jax.lax.Precision.HIGHEST)
    return jnp.log(jnp.maximum(energy_rfw, FLOOR))


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """float32: the window [WINDOW], and the triangles [N_FFT / 2, W]."""
    window_n = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / (WINDOW - 1))
    mel = lambda hz: 1127.0 * np.log1p(hz / 700.0)  # noqa: E731
    low = mel(20.0)
    step = (mel(RATE / 2) - low) / (N_MELS + 1)
    at_kw = ((mel(np.arange(N_FFT // 2) * RATE / N_FFT) - low) / step)[:, None] - np.arange(N_MELS)[None]
    return window_n.astype(np.float32), np.maximum(np.minimum(at_kw, 2 - at_kw), 0).astype(np.float32)
