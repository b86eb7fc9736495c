"""Heads on frozen features, from few examples: linear, prototypes, and prototypes of patches.

`jaxtrain.workloads.bird.commands.fit` has the methods. Logistic regression is by a softmax if each
row has one class. Prototypes are those of Snell et al. 2017. Prototypical probing (Rauch et al.
2025, arXiv 2504.12880) begins with the patches that tell a class best from the others. No recording
is in two folds. A scale and an offset calibrate the scores (Platt 1999).

Shapes: n rows, C classes, D features, N patches, K prototypes of a class.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import minimize
from sklearn.metrics import average_precision_score, precision_recall_curve
from sklearn.model_selection import StratifiedGroupKFold

from jaxtrain.workloads.bird.inference import InferenceError, heads, logistic
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from jaxtrain.workloads.bird.inference.heads import Head
from jaxtrain.workloads.bird.inference.labelled_rows import Examples

PULLS = (0.1, 1.0, 10.0)  # of patches: towards the first prototypes
USUAL = {"linear": 1e-2, "prototypes": 0.0, "patches": 1.0}  # if too few examples allow no choice
FOLDS = 5
STEPS, RATE = 150, 0.02  # of patches
CANDIDATES = 128  # patches of a class that are tried as prototypes
MAX_BYTES = 4 << 30  # of patches in memory
PRIOR = 1e-3  # of calibration: nats that a scale of e costs
MIN_EXAMPLES = 5  # examples of a class from which its threshold is measured


class Fitted(NamedTuple):
    """A head, and its scores in cross-validation."""

    head: Head
    # float64 [C]: average precision of each class on held-out rows, nan without folds
    precision: np.ndarray
    folds: int  # 0: too few examples
    penalty: float


# Arrays by name, logits by them: arrays, x -> [n, C].
# weight [n, C], penalties -> arrays of each
Solve = Callable[[np.ndarray, Sequence[float]], list[dict[str, np.ndarray]]]


def fit(
    folders: Sequence[Embeddings],
    given: Examples,
    *,
    method: str = "linear",
    pool: str = "mean",
    prototypes: int = 1,
    precision: float = 0.9,
    seed: int = 0,
) -> Fitted:
    """Fit a head whose thresholds reach ``precision``. Raises InferenceError.

    ``pool``: the features that linear and prototypes read. ``prototypes``: of a class, of patches.
    """
    for each in folders[1:]:
        if (each.encoder, dict(each.front_end)) != (folders[0].encoder, dict(folders[0].front_end)):
            other = f"is of another encoder or front end than {folders[0].folder}"
            raise InferenceError(f"{each.folder} {other}; embed both by one run")
    x = _features(folders, given, "patches" if method == "patches" else pool)
    y, known = given.y, given.known
    softmax = given.exclusive
    solve, penalties = _solver(method, x, y, softmax, prototypes, seed)
    fold = folds_of(given, seed)
    n_folds = int(fold.max()) + 1 if fold.any() else 0
    penalty, scale, offset = USUAL[method], 1.0, 0.0
    bounds = np.full(len(given.names), precision, np.float32)
    average = np.full(len(given.names), np.nan)
    if n_folds:
        penalty, out = _cross_validated(method, solve, penalties, x, given, fold)
        scale, offset = calibrated(out, y, known, softmax)
        z = scale * out + offset
        scores = np.asarray(jax.nn.softmax(z) if softmax else jax.nn.sigmoid(z), np.float64)
        for c in range(len(given.names)):
            rows = known[:, c] > 0
            average[c] = average_precision_score(y[rows, c], scores[rows, c])
            if y[rows, c].sum() >= MIN_EXAMPLES:
                bounds[c] = threshold(scores[rows, c], y[rows, c], precision)
    (arrays,) = solve(known, [penalty])
    factor = "w" if method == "linear" else "scale"
    arrays |= {factor: arrays[factor] * scale, "b": arrays["b"] * scale + offset}
    arrays = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    about = {
        "method": method,
        "penalty": penalty,
        "precision": precision,
        "folds": n_folds,
        "examples": [int(n) for n in (y * known).sum(0)],
        "rows": len(y),
        "embeddings": [str(e.folder) for e in folders],
    }
    head = Head(
        method,
        "mean" if method == "patches" else pool,
        "softmax" if softmax else "sigmoid",
        arrays,
        given.names,
        "",
        bounds,
        folders[0].encoder,
        dict(folders[0].front_end),
        about,
    )
    return Fitted(head, average, n_folds, penalty)


def _features(folders: Sequence[Embeddings], given: Examples, kind: str) -> np.ndarray:
    """float32 [n, D], or of patches [n, N, D], views side by side."""
    parts, size = [], 0
    for each, rows in zip(folders, given.rows, strict=True):
        shape = each.array(kind, 4 if kind == "patches" else 2).shape
        size += len(rows) * int(np.prod(shape[1:])) * 4
        if size > MAX_BYTES:
            gib = MAX_BYTES >> 30
            raise InferenceError(
                f"the patches of {len(given.y)} rows take more than {gib} GiB; give fewer examples"
            )
        x = each.features(kind, rows)
        parts.append(x.reshape(len(rows), -1, shape[-1]) if kind == "patches" else x)
    if len({part.shape[1:] for part in parts}) > 1:
        raise InferenceError("the folders have features of different sizes; embed all by one run")
    return np.concatenate(parts)


def folds_of(given: Examples, seed: int) -> np.ndarray:
    """Return the fold of each row, int64 [n], all 0 if too few allow none. Classes are spread.

    A recording is in one fold, unless some class is in one recording only.
    """
    y = given.y * given.known

    def smallest(group: np.ndarray) -> int:
        return min(len(np.unique(group[each > 0])) for each in y.T)

    group = given.group if smallest(given.group) > 1 else np.arange(len(y))
    fold, n = np.zeros(len(y), np.int64), min(FOLDS, smallest(group))
    if n < 2:
        return fold
    main = np.where(y.any(1), y.argmax(1), y.shape[1])
    # rows without a class may be fewer than folds
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        for k, (_, rows) in enumerate(
            StratifiedGroupKFold(n, shuffle=True, random_state=seed).split(y, main, group)
        ):
            fold[rows] = k
    return fold


def _cross_validated(
    method: str,
    solve: Solve,
    penalties: Sequence[float],
    x: np.ndarray,
    given: Examples,
    fold: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Return the penalty with the least loss on held-out rows, and its logits [n, C] of them."""
    y, known, softmax = given.y, given.known, given.exclusive
    out = np.zeros((len(penalties), *y.shape), np.float32)
    for k in range(int(fold.max()) + 1):
        for i, arrays in enumerate(solve(known * (fold != k)[:, None], penalties)):
            out[i, fold == k] = logits(method, arrays, x[fold == k])
    losses = []
    for z in out:
        # a scale that is not learned must not decide
        scale, offset = calibrated(z, y, known, softmax)
        losses.append(logistic.loss(scale * z + offset, y, softmax=softmax, known=known))
    best = int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
    return penalties[best], out[best]


def logits(method: str, arrays: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Logits [rows, classes] of a fitted head. ``x``: pooled features, or those of patches."""
    given = {name: jnp.asarray(value) for name, value in arrays.items()}
    x = x if method == "patches" else x[:, None]
    parts = [jnp.asarray(x[i : i + 64]) for i in range(0, len(x), 64)]
    return np.concatenate(
        [np.asarray(heads.logits(method, given, part[:, 0], part)) for part in parts]
    )


def calibrated(
    z: np.ndarray, y: np.ndarray, known: np.ndarray, softmax: bool
) -> tuple[float, float]:
    """Scale and offset of logits that give the least loss, with a weak prior at 1 and 0.

    They are of all classes together, which keeps scores comparable: scikit-learn calibrates each
    class alone, without a prior. A softmax needs no offset.
    """

    def total(at: np.ndarray) -> float:
        fit = logistic.loss(np.exp(at[0]) * z + at[1], y, softmax=softmax, known=known)
        return float(fit + PRIOR * (at[0] ** 2 + at[1] ** 2 / 100))

    log_scale, offset = minimize(
        total, (0.0, 0.0), bounds=((-4, 4), (0, 0) if softmax else (None, None))
    ).x
    return float(np.exp(log_scale)), float(offset)


def threshold(scores: np.ndarray, y: np.ndarray, precision: float) -> float:
    """Return the score that finds most of ``y`` at a ``precision``, or one above all scores.

    Of equal ones the highest: between the last of ``y`` and what is below it.
    """
    reached, found, bounds = precision_recall_curve(y, scores)
    good = np.flatnonzero(reached[:-1] >= precision)
    if not len(good):
        return float(min(1.0, np.nextafter(np.float32(bounds[-1]), np.float32(2))))
    best = good[np.flatnonzero(found[good] == found[good].max())[-1]]
    return float((bounds[best] + (bounds[best - 1] if best else 0.0)) / 2)


def _solver(
    method: str, x: np.ndarray, y: np.ndarray, softmax: bool, prototypes: int, seed: int
) -> tuple[Solve, Sequence[float]]:
    """Return the function that fits arrays to rows by their weights, and the penalties to try."""
    if method == "linear":
        mean, std = x.mean(0), x.std(0) + 1e-6
        standard = ((x - mean) / std).astype(np.float32)

        def linear(weight: np.ndarray, penalties: Sequence[float]) -> list[dict[str, np.ndarray]]:
            rows, found = weight.any(1), []
            n = rows.sum() if softmax else weight.sum()
            for penalty in penalties:
                w, b = logistic.fit(
                    standard[rows], y[rows], penalty, softmax=softmax, known=weight[rows], n=n
                )
                found.append({"w": w / std[:, None], "b": b - (mean / std) @ w})
            return found

        return linear, logistic.PENALTIES
    flat = x.reshape(-1, x.shape[-1])
    mean = flat.mean(0)
    directions = np.asarray(heads.unit(jnp.asarray(x - mean)))
    ones = np.ones(y.shape[1], np.float32)
    if method == "prototypes":

        def means(weight: np.ndarray, penalties: Sequence[float]) -> list[dict[str, np.ndarray]]:
            del penalties
            p = np.asarray(heads.unit(jnp.asarray((y * weight).T @ directions)))
            return [{"mean": mean, "prototypes": p[:, None], "scale": 10 * ones, "b": 0 * ones}]

        return means, (0.0,)

    def patches(weight: np.ndarray, penalties: Sequence[float]) -> list[dict[str, np.ndarray]]:
        begin = _telling(directions, y, weight, prototypes, seed)
        found = []
        for penalty in penalties:
            p, scale, b = map(
                np.asarray,
                _learn(directions, y, weight, begin, np.float32(penalty), softmax=softmax),
            )
            found.append({"mean": mean, "prototypes": p, "scale": scale * ones, "b": b})
        return found

    return patches, PULLS


def _telling(
    directions: np.ndarray, y: np.ndarray, weight: np.ndarray, k: int, seed: int
) -> np.ndarray:
    """Return ``k`` patches a class, near to its rows and far from others', float32 [C, K, D]."""
    rng = np.random.default_rng(seed)
    found = []
    for c in range(y.shape[1]):
        with_it = np.flatnonzero(y[:, c] * weight[:, c] > 0)
        without = np.flatnonzero((1 - y[:, c]) * weight[:, c] > 0)
        pool = directions[with_it].reshape(-1, directions.shape[-1])
        tried = pool[rng.permutation(len(pool))[:CANDIDATES]]
        cosines = [np.asarray(_nearest(tried, directions[rows])) for rows in (with_it, without)]
        contrast = cosines[0].mean(0) - (cosines[1].mean(0) if len(without) else 0.0)
        chosen: list[np.ndarray] = []
        for i in np.argsort(-contrast, kind="stable"):  # without duplicates
            if len(chosen) < k and all(float(tried[i] @ each) < 0.9 for each in chosen):
                chosen.append(tried[i])
        while len(chosen) < k:
            chosen.append(chosen[0])
        found.append(np.stack(chosen))
    return np.stack(found).astype(np.float32)


def _nearest(tried: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Return the cosine of each row's nearest patch, [rows, tried]."""
    parts = [(directions[i : i + 32] @ tried.T).max(1) for i in range(0, len(directions), 32)]
    return np.concatenate(parts) if parts else np.zeros((0, len(tried)), np.float32)


@functools.partial(jax.jit, static_argnames=("softmax",))
def _learn(
    directions: jax.Array,
    y: jax.Array,
    weight: jax.Array,
    begin: jax.Array,
    pull: jax.Array,
    *,
    softmax: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prototypes [C, K, D], their scale and offsets [C], by Adam."""

    def total(p: dict[str, jax.Array]) -> jax.Array:
        cosine = jnp.einsum("bnd,ckd->bnck", directions, heads.unit(p["prototypes"])).max((1, 3))
        z = jnp.exp(p["scale"]) * cosine + p["b"][None]
        if softmax:
            each, counted = -(y * jax.nn.log_softmax(z)).sum(1), weight[:, 0]
        else:
            each, counted = jnp.logaddexp(0, z) - y * z, weight
        far = jnp.square(p["prototypes"] - begin).sum((1, 2)).mean()
        return (each * counted).sum() / counted.sum() + pull / 2 * far

    params: dict[str, Any] = {
        "prototypes": begin,
        "scale": jnp.log(10.0),
        "b": jnp.full(y.shape[1], 0.0 if softmax else -5.0),
    }
    tx = optax.adam(RATE)

    def step(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        params, state = carry
        updates, state = tx.update(jax.grad(total)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
    return heads.unit(params["prototypes"]), jnp.exp(params["scale"]), params["b"]
