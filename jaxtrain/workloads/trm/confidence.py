"""Confidence that says how often a board is right, and intervals of accuracies."""

import math
from typing import NamedTuple

import numpy as np

from loaders.base import DataError

FOLDS = 5
BINS = 10
MIN_BOARDS = 20


class Scale(NamedTuple):
    """The probability that a board is right, 1 / (1 + exp(-(slope q + offset))), q of the head."""

    slope: float = 1.0
    offset: float = 0.0

    def __call__(self, q: float) -> float:
        return float(_sigmoid(np.array(self.slope * q + self.offset)))


def fit(q: np.ndarray, right: np.ndarray) -> Scale:
    """Fit a scale to boards whose answers are known (Platt 1999).

    Raises DataError for fewer than 20 of them.
    """
    if len(q) < MIN_BOARDS:
        raise DataError(f"{len(q)} boards calibrate no confidence; expected at least {MIN_BOARDS} with answers")
    return _fit(q, right)


def _fit(q: np.ndarray, right: np.ndarray) -> Scale:
    """Fit by Newton's method, to targets (n_right + 1) / (n_right + 2) and 1 / (n_wrong + 2).

    The fit exists if all are right, too.
    """
    n_right = int(right.sum())
    target = np.where(right, (n_right + 1) / (n_right + 2), 1 / (len(q) - n_right + 2))
    x = np.stack([q, np.ones_like(q)], 1)
    scale = np.array([0.0, math.log((n_right + 1) / (len(q) - n_right + 1))])
    for _ in range(100):
        p = _sigmoid(x @ scale)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-9 * np.eye(2)
        step = np.linalg.solve(hessian, x.T @ (p - target))
        while np.isfinite(step).all() and _loss(x @ (scale - step), target) > _loss(x @ scale, target) + 1e-12:
            step /= 2
        scale = scale - step
        if abs(step).max() < 1e-9:
            break
    return Scale(*scale.tolist())


def errors(q: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return the expected calibration error of logits as they are, and of scales of other folds."""
    fold = np.arange(len(q)) % FOLDS
    after = np.empty(len(q))
    for k in range(FOLDS):
        scale = _fit(q[fold != k], right[fold != k])
        after[fold == k] = [scale(each) for each in q[fold == k]]
    return calibration_error(_sigmoid(q), right), calibration_error(after, right)


def calibration_error(p: np.ndarray, right: np.ndarray) -> float:
    """Return the mean distance of confidence and accuracy over ten bins, weighted by boards.

    The bins are of confidence.
    """
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    return float(sum(abs((p - right)[bins == k].sum()) for k in range(BINS)) / len(p))


def interval(right: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    share, spread = right / n, z * math.sqrt(right * (n - right) / n**3 + (z / (2 * n)) ** 2)
    centre = share + z * z / (2 * n)
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -80, 80)))


def _loss(logit: np.ndarray, target: np.ndarray) -> float:
    return float((np.logaddexp(0, logit) - target * logit).sum())
