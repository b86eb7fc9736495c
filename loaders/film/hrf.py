"""The haemodynamic response: how the blood follows the neurons' activity."""

import math

import numpy as np


def glover(tr: float, seconds: float = 32.0, norm: str = "sum") -> np.ndarray:
    """Return the canonical haemodynamic response at 0, tr, 2 tr, … below ``seconds``, float32.

    g(t; 6 / 0.9, 0.9) - 0.35 g(t; 12 / 0.9, 0.9), with g the gamma density of a shape and a scale
    [s]: Glover (1999), with the delays, dispersion and undershoot that fMRI packages have agreed
    on. ``norm``: its "sum" or its "peak" is 1, or "none".
    """
    t = np.arange(0, seconds, tr)
    scale = 0.9

    def gamma(delay: float) -> np.ndarray:
        k = delay / scale  # the shape
        g: np.ndarray = np.exp(
            (k - 1) * np.log(np.maximum(t, 1e-300) / scale)
            - t / scale
            - math.lgamma(k)
            - math.log(scale)
        )
        return g

    h = gamma(6.0) - 0.35 * gamma(12.0)
    return np.asarray(h / {"sum": h.sum(), "peak": h.max(), "none": 1.0}[norm], np.float32)
