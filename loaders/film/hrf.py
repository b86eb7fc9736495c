"""The haemodynamic response: how the blood follows the neurons' activity."""

import math

import numpy as np


def glover(tr: float, seconds: float = 32.0, norm: str = "sum") -> np.ndarray:
    """Return the canonical haemodynamic response at 0, tr, 2 tr, … below ``seconds``, float32.

    g(t; 6 / 0.9, 0.9) - 0.35 g(t; 12 / 0.9, 0.9), with g the gamma density of a shape and a scale
    [s]: Glover (1999), with the delays, dispersion and undershoot that fMRI packages have agreed
    on. ``norm``: its "sum" or its "peak" is 1, or "none".
    """
    times = np.arange(0, seconds, tr)
    peak = _gamma_density(times, 6.0)
    undershoot = _gamma_density(times, 12.0)
    response = peak - 0.35 * undershoot
    scales = {"sum": response.sum(), "peak": response.max(), "none": 1.0}
    return np.asarray(response / scales[norm], np.float32)


def _gamma_density(times: np.ndarray, delay: float) -> np.ndarray:
    """Return the density at ``times`` [s] of the gamma distribution with the mean ``delay`` [s]."""
    scale = 0.9
    shape = delay / scale
    log_times = np.log(np.maximum(times, 1e-300) / scale)
    log_decay = (shape - 1) * log_times - times / scale
    log_density = log_decay - math.lgamma(shape) - math.log(scale)
    density: np.ndarray = np.exp(log_density)
    return density
