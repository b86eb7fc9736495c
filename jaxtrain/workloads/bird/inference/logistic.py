"""Logistic regression of classes on frozen features, by scikit-learn (the extra ``probe``).

Shapes: n rows, C classes, D features.
"""

import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
NEVER = 20.0  # [nats] the logit of a class without examples is minus this
MAX_STEPS = 300


def fit(
    x: np.ndarray,
    y: np.ndarray,
    penalty: float,
    *,
    softmax: bool,
    known: np.ndarray | None = None,
    n: float = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise penalty / 2 × |w|² + sum of losses / n. Returns the weights [D, C] and biases [C].

    ``softmax``: each row has one class. If not, each class has a regression of its own, in which
    the entries of ``y`` count that are ``known``, [n, C], or all if that is None. ``n`` = 0 is the
    number of rows.
    """
    n_classes = y.shape[1]
    w = np.zeros((x.shape[1], n_classes))
    b = np.full(n_classes, -NEVER)
    n = n or max(len(x), 1)
    c = 1 / (n * penalty)
    if softmax:
        _fit_softmax(x, y.argmax(1), c, w, b)
        return w, b
    for i in range(n_classes):
        rows = slice(None) if known is None else known[:, i] > 0
        is_positive = y[rows, i] > 0
        if not is_positive.any():
            continue
        if is_positive.all():
            b[i] = NEVER
        else:
            w[:, i], b[i] = _binary(x[rows], is_positive, c)
    return w, b


def _fit_softmax(x: np.ndarray, label: np.ndarray, c: float, w: np.ndarray, b: np.ndarray) -> None:
    """Write weights and biases of the classes that have examples into ``w`` and ``b``."""
    classes = np.unique(label)
    if len(classes) < 2:
        b[classes] = 0
    # scikit-learn fits the difference v of both: v / 2 and -v / 2 have half of its |v|²
    elif len(classes) == 2:
        is_second = label == classes[1]
        coefficients, bias = _binary(x, is_second, 2 * c)
        w[:, classes] = np.outer(coefficients, (-0.5, 0.5))
        b[classes] = (-bias / 2, bias / 2)
    else:
        regression = _regression(x, label, c)
        w[:, classes] = regression.coef_.T
        b[classes] = regression.intercept_


def _binary(x: np.ndarray, positive: np.ndarray, c: float) -> tuple[np.ndarray, float]:
    regression = _regression(x, positive, c)
    return regression.coef_[0], regression.intercept_[0]


def _regression(x: np.ndarray, label: np.ndarray, c: float) -> LogisticRegression:
    # weak penalties have far minima
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return LogisticRegression(C=c, tol=1e-6, max_iter=MAX_STEPS).fit(x, label)


def loss(z: np.ndarray, y: np.ndarray, *, softmax: bool, known: np.ndarray | None = None) -> float:
    """Mean cross-entropy of logits [n, C], in nats, without a softmax over all ``known``."""
    z = z.astype(np.float64)
    if softmax:
        log_total = np.logaddexp.reduce(z, axis=1)
        losses = log_total - (z * y).sum(1)
        return float(losses.mean())
    losses = np.logaddexp(0, z) - y * z
    if known is None:
        return float(losses.mean())
    return float((losses * known).sum() / known.sum())
