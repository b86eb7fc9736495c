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
    has = y.any(1)
    right = y[np.arange(len(y)), score.argmax(1)] > 0
    share: np.ndarray = (weight[:, has] @ right[has]) / np.maximum(weight[:, has].sum(1), 1e-9)
    return share


def average_precision(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return sum_i (recall_i - recall_{i-1}) precision_i, [R, n] -> [R], nan without positives."""
    w, y, last = _sorted(score, positive, weight)
    hits, all_ = np.cumsum(w * y, 1)[:, last], np.cumsum(w, 1)[:, last]
    gained = np.diff(hits, axis=1, prepend=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision: np.ndarray = np.where(gained > 0, gained * hits / all_, 0).sum(1) / hits[:, -1]
    return precision


def area_under_roc(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the chance that a positive scores higher, ties half, [R, n] -> [R], or nan."""
    w, y, last = _sorted(score, positive, weight)
    hits, misses = (np.diff(np.cumsum(w * z, 1)[:, last], axis=1, prepend=0) for z in (y, 1 - y))
    below = misses.sum(1, keepdims=True) - np.cumsum(misses, 1) + misses / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        area: np.ndarray = (hits * below).sum(1) / (hits.sum(1) * misses.sum(1))
    return area


def _sorted(
    score: np.ndarray, positive: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights and labels from the highest score down, and the last place of each distinct score."""
    order = np.argsort(-score, kind="stable")
    last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))
    return weight[:, order], positive[order].astype(np.float64), last


def over_classes(
    each: Callable[..., Any], score: np.ndarray, y: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Mean of a measure over the classes that have it, [R]."""
    by_class = np.stack([each(score[:, c], y[:, c], weight) for c in range(y.shape[1])], 1)
    known = np.isfinite(by_class)
    mean: np.ndarray = np.where(known, by_class, 0).sum(1) / np.maximum(known.sum(1), 1)
    return mean


def measure(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Compute every one of `MEASURES`, [R] each."""
    parts = [weight[i : i + PART].astype(np.float64) for i in range(0, len(weight), PART)]
    of_classes = {"cmAP": average_precision, "AUROC": area_under_roc}
    measured = {
        name: [over_classes(each, score, y, w) for w in parts] for name, each in of_classes.items()
    }
    measured = {"accuracy": [accuracy(score, y, w) for w in parts], **measured}
    return {name: np.concatenate(values) for name, values in measured.items()}


def bootstrap(n: int, draws: int, *, seed: int = 0) -> np.ndarray:
    """Draw weights, float32 [draws + 1, n]. The first row counts every row once."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws)
    return np.concatenate([np.ones((1, n)), drawn]).astype(np.float32)


def summary(values: np.ndarray) -> dict[str, float]:
    """Summarise `measure` over `bootstrap`: all rows' value, and the middle 95 % of the draws."""
    low, high = np.percentile(values[1:], [2.5, 97.5]) if len(values) > 1 else (np.nan, np.nan)
    return {"value": float(values[0]), "low": float(low), "high": float(high)}


def summarised(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the `summary` of each measure."""
    return {name: summary(values) for name, values in measure(score, y, weight).items()}


def percent(m: dict[str, float], digits: int) -> str:
    """Format a `summary`: 71.3 [70.2, 72.5]."""
    return (
        f"{100 * m['value']:.{digits}f} [{100 * m['low']:.{digits}f}, {100 * m['high']:.{digits}f}]"
    )
