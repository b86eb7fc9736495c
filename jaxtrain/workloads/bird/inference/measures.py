"""Measures of scores against labels, each with its bootstrap draws.

    accuracy   share of rows whose best score is of (one of) their classes, without rows of no class
    cmAP       mean of average precision over classes with a positive (BirdSet; Rauch et al. 2024)
    AUROC      mean of the area under the ROC curve, ties half, over those with negatives, too

scikit-learn's scores take one draw of weights at a time and sort for each: 5 to 10 times slower
than one sort for all draws.

Shapes: n rows, C classes, R draws. A weight is how often a row counts.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

MEASURES = ("accuracy", "cmAP", "AUROC")
PART = 1000  # bootstrap draws whose sums are held at once, times a class


def accuracy(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[n, C], [n, C], [R, n] -> [R]."""
    has_class = y.any(1)
    best = score.argmax(1)
    is_right = y[np.arange(len(y)), best] > 0
    n_right = weight[:, has_class] @ is_right[has_class]
    n_rows = weight[:, has_class].sum(1)
    share: np.ndarray = n_right / np.maximum(n_rows, 1e-9)
    return share


def average_precision(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return sum_i (recall_i - recall_{i-1}) precision_i, [R, n] -> [R], nan without positives."""
    w, y, last = _sorted(score, positive, weight)
    hits = np.cumsum(w * y, 1)[:, last]
    n_rows = np.cumsum(w, 1)[:, last]
    gained = _steps(hits)
    with np.errstate(invalid="ignore", divide="ignore"):
        terms = np.where(gained > 0, gained * hits / n_rows, 0)
        precision: np.ndarray = terms.sum(1) / hits[:, -1]
    return precision


def area_under_roc(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the chance that a positive scores higher, ties half, [R, n] -> [R], or nan."""
    w, y, last = _sorted(score, positive, weight)
    positives = _steps(np.cumsum(w * y, 1)[:, last])
    negatives = _steps(np.cumsum(w * (1 - y), 1)[:, last])
    n_positives = positives.sum(1)
    n_negatives = negatives.sum(1)
    below = n_negatives[:, None] - np.cumsum(negatives, 1) + negatives / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        area: np.ndarray = (positives * below).sum(1) / (n_positives * n_negatives)
    return area


def _steps(totals: np.ndarray) -> np.ndarray:
    """Undo a cumulative sum, [R, m]."""
    return np.diff(totals, axis=1, prepend=0)


def _sorted(
    score: np.ndarray, positive: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights and labels from the highest score down, and the last place of each distinct score."""
    order = np.argsort(-score, kind="stable")
    y = positive[order].astype(np.float64)
    is_last = np.append(np.diff(score[order]) != 0, True)
    return weight[:, order], y, np.flatnonzero(is_last)


def over_classes(
    of_class: Callable[..., Any], score: np.ndarray, y: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Mean of a measure over the classes that have it, [R]."""
    columns = []
    for of_score, of_y in zip(score.T, y.T, strict=True):
        columns.append(of_class(of_score, of_y, weight))
    by_class = np.stack(columns, 1)
    is_finite = np.isfinite(by_class)
    total = np.where(is_finite, by_class, 0).sum(1)
    mean: np.ndarray = total / np.maximum(is_finite.sum(1), 1)
    return mean


def measure(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Compute every one of `MEASURES`, [R] each."""
    measured: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}
    for first in range(0, len(weight), PART):
        w = weight[first : first + PART].astype(np.float64)
        measured["accuracy"].append(accuracy(score, y, w))
        measured["cmAP"].append(over_classes(average_precision, score, y, w))
        measured["AUROC"].append(over_classes(area_under_roc, score, y, w))
    return {name: np.concatenate(parts) for name, parts in measured.items()}


def bootstrap(n: int, draws: int) -> np.ndarray:
    """Draw weights, float32 [draws + 1, n]. The first row counts every row once."""
    rng = np.random.default_rng(0)
    resampled = rng.multinomial(n, np.full(n, 1 / n), size=draws)
    return np.concatenate([np.ones((1, n)), resampled]).astype(np.float32)


def summary(values: np.ndarray) -> dict[str, float]:
    """Summarise `measure` over `bootstrap`: all rows' value, and the middle 95 % of the draws."""
    low = high = np.nan
    if len(values) > 1:
        low, high = np.percentile(values[1:], [2.5, 97.5])
    return {"value": float(values[0]), "low": float(low), "high": float(high)}


def summarised(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the `summary` of each measure."""
    measured = measure(score, y, weight)
    return {name: summary(values) for name, values in measured.items()}


def percent(interval: dict[str, float], digits: int) -> str:
    """Format a `summary`: 71.3 [70.2, 72.5]."""
    value, low, high = (f"{100 * interval[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
