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

from jaxtrain.workloads.bird.inference import InferenceError, evidence, heads, logistic
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
    folds: int  # 0: no class is in two recordings
    penalty: float
    evidence: evidence.Evidence


HeadArrays = dict[str, np.ndarray]  # by name
# The weights of rows [n, C], penalties -> the arrays of a head for each penalty.
Solve = Callable[[np.ndarray, Sequence[float]], list[HeadArrays]]


def fit(
    folders: Sequence[Embeddings],
    examples: Examples,
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
    _refuse_unlike(folders)
    x = _features(folders, examples, "patches" if method == "patches" else pool)
    y = examples.y
    softmax = examples.exclusive
    solve, penalties = _solver(method, x, y, softmax, prototypes, seed)
    fold = folds_of(examples, seed)
    if fold.any():
        n_folds = int(fold.max()) + 1
        penalty, held_out = _cross_validated(method, solve, penalties, x, examples, fold)
        rows, counted = _counted(examples)
        scale, offset = calibrated(held_out[rows], y[rows], counted[rows], softmax)
        to_scores = jax.nn.softmax if softmax else jax.nn.sigmoid
        scores = np.asarray(to_scores(scale * held_out + offset), np.float64)
        average, bounds = _measured(scores, examples, precision)
    else:
        n_folds = 0
        penalty = USUAL[method]
        scale = 1.0
        offset = 0.0
        average = np.full(len(examples.names), np.nan)
        bounds = np.full(len(examples.names), precision, np.float32)
    (arrays,) = solve(examples.known, [penalty])
    factor = "w" if method == "linear" else "scale"
    arrays[factor] = arrays[factor] * scale
    arrays["b"] = arrays["b"] * scale + offset
    float_arrays = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    recordings: evidence.Recordings = {}
    for folder, rows in zip(folders, examples.rows, strict=True):
        recordings |= evidence.recordings_of(folder, rows)
    of_recordings = evidence.of(recordings)
    about = {
        "method": method,
        "penalty": penalty,
        "precision": precision,
        "folds": n_folds,
        "examples": examples.apart.tolist(),
        "recordings": examples.recordings.tolist(),
        "average_precision": [None if np.isnan(value) else value for value in average.tolist()],
        "trained_on": of_recordings.trained,
        "rows": len(y),
        "embeddings": [str(folder.folder) for folder in folders],
    }
    head = Head(
        kind=method,
        pool="mean" if method == "patches" else pool,
        scores="softmax" if softmax else "sigmoid",
        arrays=float_arrays,
        names=examples.names,
        name="",
        thresholds=bounds,
        encoder=folders[0].encoder,
        front_end=dict(folders[0].front_end),
        about=about,
    )
    return Fitted(head, average, n_folds, penalty, of_recordings)


def _refuse_unlike(folders: Sequence[Embeddings]) -> None:
    first = folders[0]
    for folder in folders[1:]:
        is_same_encoder = folder.encoder == first.encoder
        if not is_same_encoder or dict(folder.front_end) != dict(first.front_end):
            raise InferenceError(
                f"{folder.folder} is of another encoder or front end than {first.folder}; embed"
                " both by one run"
            )


def _measured(
    scores: np.ndarray, examples: Examples, precision: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return average precision and threshold of each class, from held-out scores [n, C].

    A class in one recording has no held-out scores of its own.
    """
    n_classes = len(examples.names)
    average = np.full(n_classes, np.nan)
    bounds = np.full(n_classes, precision, np.float32)
    n_apart = examples.apart
    for c in np.flatnonzero(examples.recordings > 1).tolist():
        rows = examples.known[:, c] > 0
        y = examples.y[rows, c]
        average[c] = average_precision_score(y, scores[rows, c])
        if n_apart[c] >= MIN_EXAMPLES:
            bounds[c] = threshold(scores[rows, c], y, precision)
    return average, bounds


def _features(folders: Sequence[Embeddings], examples: Examples, kind: str) -> np.ndarray:
    """float32 [n, D], or of patches [n, N, D], views side by side."""
    parts = []
    n_bytes = 0
    for folder, rows in zip(folders, examples.rows, strict=True):
        shape = folder.all_features(kind).shape
        values_of_row = int(np.prod(shape[1:]))
        n_bytes += len(rows) * values_of_row * 4
        if n_bytes > MAX_BYTES:
            raise InferenceError(
                f"the patches of {len(examples.y)} rows take more than {MAX_BYTES >> 30} GiB; give"
                " fewer examples"
            )
        x = folder.features(kind, rows)
        if kind == "patches":
            x = x.reshape(len(rows), -1, shape[-1])
        parts.append(x)
    if len({part.shape[1:] for part in parts}) > 1:
        raise InferenceError("the folders have features of different sizes; embed all by one run")
    return np.concatenate(parts)


def folds_of(examples: Examples, seed: int) -> np.ndarray:
    """Return the fold of each row, int64 [n], all 0 if no class is in two recordings.

    A recording is in one fold. Classes are spread.
    """
    y = examples.y * examples.known
    fold = np.zeros(len(y), np.int64)
    n_recordings = examples.recordings
    several = n_recordings[n_recordings > 1]
    if not len(several):
        return fold
    n_folds = min(FOLDS, int(several.min()))
    no_class = y.shape[1]
    main_class = np.where(y.any(1), y.argmax(1), no_class)
    splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed)
    # rows without a class may be fewer than folds
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        for k, (_, rows) in enumerate(splitter.split(y, main_class, examples.group)):
            fold[rows] = k
    return fold


def _counted(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows [n] and their entries [n, C] that count in a loss on held-out rows.

    A class in one recording does not, since no other recording of it is left to fit.
    """
    is_alone = examples.recordings < 2
    counted = np.where(is_alone, 0, examples.known)
    rows = np.ones(len(counted), bool)
    if examples.exclusive:
        rows = examples.y[:, is_alone].sum(1) == 0
    return rows, counted


def _cross_validated(
    method: str,
    solve: Solve,
    penalties: Sequence[float],
    x: np.ndarray,
    examples: Examples,
    fold: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Return the penalty with the least loss on held-out rows, and its logits [n, C] of them."""
    softmax = examples.exclusive
    z = np.zeros((len(penalties), *examples.y.shape), np.float32)
    for k in range(int(fold.max()) + 1):
        is_held_out = fold == k
        train_weight = examples.known * ~is_held_out[:, None]
        for i, arrays in enumerate(solve(train_weight, penalties)):
            z[i, is_held_out] = logits(method, arrays, x[is_held_out])
    losses = []
    rows, counted = _counted(examples)
    y, known = examples.y[rows], counted[rows]
    for of_penalty in z[:, rows]:
        # a scale that is not learned must not decide
        scale, offset = calibrated(of_penalty, y, known, softmax)
        calibrated_z = scale * of_penalty + offset
        losses.append(logistic.loss(calibrated_z, y, softmax=softmax, known=known))
    best = int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
    return penalties[best], z[best]


def logits(method: str, arrays: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Logits [rows, classes] of a fitted head. ``x``: pooled features, or those of patches."""
    on_device = {name: jnp.asarray(value) for name, value in arrays.items()}
    x = x if method == "patches" else x[:, None]
    parts = []
    for first in range(0, len(x), 64):
        part = jnp.asarray(x[first : first + 64])
        part_logits = heads.logits(method, on_device, part[:, 0], part)
        parts.append(np.asarray(part_logits))
    return np.concatenate(parts)


def calibrated(
    z: np.ndarray, y: np.ndarray, known: np.ndarray, softmax: bool
) -> tuple[float, float]:
    """Scale and offset of logits that give the least loss, with a weak prior at 1 and 0.

    They are of all classes together, which keeps scores comparable: scikit-learn calibrates each
    class alone, without a prior. A softmax needs no offset.
    """

    def total(log_scale_and_offset: np.ndarray) -> float:
        log_scale, offset = log_scale_and_offset
        scaled = np.exp(log_scale) * z + offset
        loss = logistic.loss(scaled, y, softmax=softmax, known=known)
        distance = log_scale**2 + offset**2 / 100  # from the prior's mode
        return float(loss + PRIOR * distance)

    offset_bounds = (0, 0) if softmax else (None, None)
    optimum = minimize(total, (0.0, 0.0), bounds=((-4, 4), offset_bounds))
    log_scale, offset = optimum.x
    return float(np.exp(log_scale)), float(offset)


def threshold(scores: np.ndarray, y: np.ndarray, precision: float) -> float:
    """Return the score that finds most of ``y`` at a ``precision``, or one above all scores.

    Of equal ones the highest: between the last of ``y`` and what is below it.
    """
    precisions, recalls, bounds = precision_recall_curve(y, scores)
    precise = np.flatnonzero(precisions[:-1] >= precision)
    if not len(precise):
        highest = np.float32(bounds[-1])
        above_all = np.nextafter(highest, np.float32(2))
        return float(min(1.0, above_all))
    recall = recalls[precise]
    most_complete = np.flatnonzero(recall == recall.max())
    best = precise[most_complete[-1]]
    below = bounds[best - 1] if best else 0.0
    return float((bounds[best] + below) / 2)


def _solver(
    method: str, x: np.ndarray, y: np.ndarray, softmax: bool, prototypes: int, seed: int
) -> tuple[Solve, Sequence[float]]:
    """Return the function that fits arrays to rows by their weights, and the penalties to try."""
    if method == "linear":
        return _linear_solver(x, y, softmax), logistic.PENALTIES
    mean = x.reshape(-1, x.shape[-1]).mean(0)
    directions = np.asarray(heads.unit(jnp.asarray(x - mean)))
    ones = np.ones(y.shape[1], np.float32)
    if method == "prototypes":

        def solve_means(weight: np.ndarray, penalties: Sequence[float]) -> list[HeadArrays]:
            del penalties
            total_cd = (y * weight).T @ directions
            unit_cd = np.asarray(heads.unit(jnp.asarray(total_cd)))
            # away from the rows without a class (Rocchio 1971)
            total_d = (weight.mean(1) * (y.sum(1) == 0)) @ directions
            if total_d.any():
                apart_cd = unit_cd - np.asarray(heads.unit(jnp.asarray(total_d)))
                unit_cd = np.asarray(heads.unit(jnp.asarray(apart_cd)))
            return [
                {
                    "mean": mean,
                    "prototypes": unit_cd[:, None],
                    "scale": 10 * ones,
                    "b": 0 * ones,
                }
            ]

        return solve_means, (0.0,)

    def solve_patches(weight: np.ndarray, penalties: Sequence[float]) -> list[HeadArrays]:
        begin = _telling(directions, y, weight, prototypes, seed)
        heads_arrays = []
        for penalty in penalties:
            pull = np.float32(penalty)
            p, scale, b = _learn(directions, y, weight, begin, pull, softmax=softmax)
            heads_arrays.append(
                {
                    "mean": mean,
                    "prototypes": np.asarray(p),
                    "scale": np.asarray(scale) * ones,
                    "b": np.asarray(b),
                }
            )
        return heads_arrays

    return solve_patches, PULLS


def _linear_solver(x: np.ndarray, y: np.ndarray, softmax: bool) -> Solve:
    mean = x.mean(0)
    std = x.std(0) + 1e-6
    standard = ((x - mean) / std).astype(np.float32)

    def solve(weight: np.ndarray, penalties: Sequence[float]) -> list[HeadArrays]:
        rows = weight.any(1)
        x_rows = standard[rows]
        y_rows = y[rows]
        known = weight[rows]
        n = rows.sum() if softmax else weight.sum()
        heads_arrays = []
        for penalty in penalties:
            w, b = logistic.fit(x_rows, y_rows, penalty, softmax=softmax, known=known, n=n)
            offset = b - (mean / std) @ w
            heads_arrays.append({"w": w / std[:, None], "b": offset})
        return heads_arrays

    return solve


def _telling(
    directions: np.ndarray, y: np.ndarray, weight: np.ndarray, k: int, seed: int
) -> np.ndarray:
    """Return ``k`` patches a class, near to its rows and far from others', float32 [C, K, D]."""
    rng = np.random.default_rng(seed)
    prototypes = []
    for c in range(y.shape[1]):
        counts = weight[:, c] > 0
        has_class = y[:, c] > 0
        with_class = directions[counts & has_class]
        without = directions[counts & ~has_class]
        if not len(with_class):  # all its examples are in the fold that is held out
            with_class = directions
        patches = with_class.reshape(-1, directions.shape[-1])
        numbers = rng.permutation(len(patches))
        candidates = patches[numbers[:CANDIDATES]]
        contrast = np.asarray(_nearest(candidates, with_class)).mean(0)
        if len(without):
            contrast = contrast - np.asarray(_nearest(candidates, without)).mean(0)
        best_first = candidates[np.argsort(-contrast, kind="stable")]
        prototypes.append(np.stack(_distinct(best_first, k)))
    return np.stack(prototypes).astype(np.float32)


def _distinct(directions: np.ndarray, k: int) -> list[np.ndarray]:
    """Return the first ``k`` that are not nearly the same, filled up with the first."""
    distinct: list[np.ndarray] = []
    for direction in directions:
        if len(distinct) == k:
            break
        if all(float(direction @ earlier) < 0.9 for earlier in distinct):
            distinct.append(direction)
    n_missing = k - len(distinct)
    return distinct + distinct[:1] * n_missing


def _nearest(candidates: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Return the cosine of each row's nearest patch, [rows, candidates]."""
    parts = []
    for first in range(0, len(directions), 32):
        cosine = directions[first : first + 32] @ candidates.T
        parts.append(cosine.max(1))
    return np.concatenate(parts)


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
        unit_ckd = heads.unit(p["prototypes"])
        cosine = jnp.einsum("bnd,ckd->bnck", directions, unit_ckd).max((1, 3))
        z = jnp.exp(p["scale"]) * cosine + p["b"][None]
        if softmax:
            losses = -(y * jax.nn.log_softmax(z)).sum(1)
            weights = weight[:, 0]
        else:
            losses = jnp.logaddexp(0, z) - y * z
            weights = weight
        distance = jnp.square(p["prototypes"] - begin).sum((1, 2)).mean()
        return (losses * weights).sum() / weights.sum() + pull / 2 * distance

    params: dict[str, Any] = {
        "prototypes": begin,
        "scale": jnp.log(10.0),
        "b": jnp.full(y.shape[1], 0.0 if softmax else -5.0),
    }
    tx = optax.adam(RATE)

    def step(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
        params, state = carry
        grads = jax.grad(total)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    begin_carry = (params, tx.init(params))
    (params, _), _ = jax.lax.scan(step, begin_carry, length=STEPS)
    return heads.unit(params["prototypes"]), jnp.exp(params["scale"]), params["b"]
