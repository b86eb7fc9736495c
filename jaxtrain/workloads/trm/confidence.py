"""Confidence that says how often a board is right."""

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from loaders.base import DataError

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
        raise DataError(
            f"{len(q)} boards calibrate no confidence; expected at least {MIN_BOARDS} with answers"
        )
    n_right = int(right.sum())
    # Targets between 0 and 1, so that the fit exists if all are right, too.
    target = np.where(right, (n_right + 1) / (n_right + 2), 1 / (len(q) - n_right + 2))

    def loss(scale: np.ndarray) -> tuple[float, np.ndarray]:
        logit = scale[0] * q + scale[1]
        slope = expit(logit) - target
        return (np.logaddexp(0, logit) - target * logit).sum(), np.array([slope @ q, slope.sum()])

    start = np.array([0.0, math.log((n_right + 1) / (len(q) - n_right + 1))])
    return Scale(*minimize(loss, start, jac=True, options={"gtol": 1e-9}).x.tolist())
