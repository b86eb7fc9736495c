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
        logit = self.slope * q + self.offset
        return float(expit(logit))


def fit(q: np.ndarray, right: np.ndarray) -> Scale:
    """Fit a scale to boards with answers (Platt 1999). Raises DataError for fewer than 20."""
    if len(q) < MIN_BOARDS:
        raise DataError(
            f"{len(q)} boards calibrate no confidence; expected at least {MIN_BOARDS} with answers"
        )
    n_right = int(right.sum())
    n_wrong = len(q) - n_right
    # Targets between 0 and 1, so that the fit exists if all are right, too.
    target_of_right = (n_right + 1) / (n_right + 2)
    target_of_wrong = 1 / (n_wrong + 2)
    target = np.where(right, target_of_right, target_of_wrong)

    def loss(scale: np.ndarray) -> tuple[float, np.ndarray]:
        slope, offset = scale
        logit = slope * q + offset
        losses = np.logaddexp(0, logit) - target * logit
        d_logit = expit(logit) - target
        d_slope = d_logit @ q
        d_offset = d_logit.sum()
        return losses.sum(), np.array([d_slope, d_offset])

    odds = (n_right + 1) / (n_wrong + 1)
    start = np.array([0.0, math.log(odds)])
    fitted = minimize(loss, start, jac=True, options={"gtol": 1e-9})
    slope, offset = fitted.x.tolist()
    return Scale(slope, offset)
