"""Confidence that says how often a board is right, and intervals of accuracies."""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from loaders.base import DataError

FOLDS = 5
BINS = 10  # of confidence
MIN_BOARDS = 20


class Scale(NamedTuple):
    """The probability that a board is right, 1 / (1 + exp(-(slope q + offset))), q of the head."""

    slope: float = 1.0
    offset: float = 0.0

    def __call__(self, q: float) -> float:
        return float(expit(self.slope * q + self.offset))


def fit(q: np.ndarray, right: np.ndarray) -> Scale:
    """Fit a scale to boards with answers (Platt 1999). Raises DataError for fewer than 20."""
    if len(q) < MIN_BOARDS:
        raise DataError(f"{len(q)} boards calibrate no confidence; expected at least {MIN_BOARDS} with answers")
    return _fit(q, right)


def _fit(q: np.ndarray, right: np.ndarray) -> Scale:
    n_right = int(right.sum())
    # Targets between 0 and 1, so that the fit exists if all are right, too.
    target = np.where(right, (n_right + 1) / (n_right + 2), 1 / (len(q) - n_right + 2))

    def loss(scale: np.ndarray) -> tuple[float, np.ndarray]:
        logit = scale[0] * q + scale[1]
        slope = expit(logit) - target
        return (np.logaddexp(0, logit) - target * logit).sum(), np.array([slope @ q, slope.sum()])

    start = np.array([0.0, math.log((n_right + 1) / (len(q) - n_right + 1))])
    return Scale(*minimize(loss, start, jac=True, options={"gtol": 1e-9}).x.tolist())


def errors(q: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the expected calibration error of logits as they are, and of scales of other folds."""
    fold = np.arange(len(q)) % FOLDS
    after = np.empty(len(q))
    for k in range(FOLDS):
        scale = _fit(q[fold != k], right[fold != k])
        after[fold == k] = expit(scale.slope * q[fold == k] + scale.offset)
    return _calibration_error(expit(q), right), _calibration_error(after, right)


def _calibration_error(p: np.ndarray, right: np.ndarray) -> float:
    """Return the mean distance of confidence and accuracy over bins, weighted by boards."""
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    return float(sum(abs((p - right)[bins == k].sum()) for k in range(BINS)) / len(p))


def interval(right: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    share, spread = right / n, z * math.sqrt(right * (n - right) / n**3 + (z / (2 * n)) ** 2)
    centre = share + z * z / (2 * n)
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
