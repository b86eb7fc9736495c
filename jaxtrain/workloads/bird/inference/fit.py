"""Heads on frozen features, from few examples: linear, prototypes, and prototypes of patches.

    linear       logistic regression: softmax where each row has one class, else one for each class; standardised features
    prototypes   the mean direction of a class; scores by cosine (Snell et al. 2017)
    patches      directions of patches, of which the nearest in a window counts (prototypical probing, Rauch et al. 2025,
                 arXiv 2504.12880): begins with the patches that tell a class best from the others, and learns from there

The penalty is chosen by cross-validation over recordings: no recording is in two folds. What the folds say of rows that they
did not see calibrates the scores (a scale and an offset, Platt 1999) and gives each class the threshold that reaches a
precision.

Shapes: n rows, C classes, D features, N patches, K prototypes of a class.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.workloads.bird.inference import heads, probe
from jaxtrain.workloads.bird.inference.embeddings import Embeddings, EmbeddingsError
from jaxtrain.workloads.bird.inference.examples import Examples
from jaxtrain.workloads.bird.inference.heads import Head

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of linear
PULLS = (0.1, 1.0, 10.0)  # of patches: towards where the prototypes began
USUAL = {"linear": 1e-2, "prototypes": 0.0, "patches": 1.0}  # where too few examples allow no choice
FOLDS = 5
STEPS, RATE = 150, 0.02  # of patches
CANDIDATES = 128  # patches of a class that are tried as prototypes
MOST = 4 << 30  # [bytes] of patches in memory
PRIOR = 1e-3  # of calibration: nats that a scale of e costs
FEWEST = 5  # examples of a class from which its threshold is measured


class Fitted(NamedTuple):
    """A head, and what cross-validation says of it."""

    head: Head
    precision: np.ndarray  # float64 [C]: average precision of each class on held-out rows; nan without folds
    folds: int  # 0: too few examples
    penalty: float


# Arrays by name, logits by them: arrays, x -> [n, C].
Solve = Callable[[np.ndarray, Sequence[float]], list[dict[str, np.ndarray]]]  # weight [n, C], penalties -> arrays of each


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
    """Fits a head on rows of embeddings.

    Args:
      pool: "mean" or "cls": the features that linear and prototypes read.
      prototypes: of a class, of patches.
      precision: that thresholds are for.

    Raises EmbeddingsError.
    """
    for each in folders[1:]:
        if (each.encoder, dict(each.front_end)) != (folders[0].encoder, dict(folders[0].front_end)):
            raise EmbeddingsError(
                f"{each.folder} is of another encoder or front end than {folders[0].folder}; embed both by one run"
            )
    x = _features(folders, given, "patches" if method == "patches" else pool)
    y, known = given.y, given.known
    softmax = given.exclusive
    solve, penalties = _solver(method, x, y, softmax, prototypes, seed)
    fold = folds_of(given, seed)
    n_folds = int(fold.max()) + 1
    penalty, out = USUAL[method], None
    if n_folds > 1:
        penalty, out = _cross_validated(method, solve, penalties, x, y, known, fold, softmax)
    (arrays,) = solve(known, [penalty])
    scale, offset = (1.0, 0.0) if out is None else calibrated(out, y, known, softmax)
    arrays = _scaled(method, arrays, scale, offset)
    bounds = np.full(len(given.names), precision, np.float32)
    average = np.full(len(given.names), np.nan)
    if out is not None:
        z = scale * out + offset
        scores = np.asarray(jax.nn.softmax(z) if softmax else jax.nn.sigmoid(z), np.float64)
        for c in range(len(given.names)):
            rows = known[:, c] > 0
            average[c] = probe.average_precision(scores[rows, c], y[rows, c], np.ones((1, rows.sum())))[0]
            if y[rows, c].sum() >= FEWEST:
                bounds[c] = threshold(scores[rows, c], y[rows, c], precision)
    about = {
        "method": method, "penalty": penalty, "precision": precision, "folds": n_folds if out is not None else 0,
        "examples": [int(n) for n in (y * known).sum(0)], "rows": len(y), "embeddings": [str(e.folder) for e in folders],
    }  # fmt: skip
    head = Head(
        method, "mean" if method == "patches" else pool, "softmax" if softmax else "sigmoid", arrays, given.names, "", bounds,
        folders[0].encoder, folders[0].front_end, about,
    )  # fmt: skip
    return Fitted(head, average, n_folds if out is not None else 0, penalty)


def _features(folders: Sequence[Embeddings], given: Examples, kind: str) -> np.ndarray:
    """float32 [n, D]; of patches [n, N, D], views side by side."""
    parts, size = [], 0
    for each, rows in zip(folders, given.rows, strict=True):
        x = each.array(kind, 4) if kind == "patches" else each.array(kind, 2)
        size += len(rows) * int(np.prod(x.shape[1:])) * 4
        if size > MOST:
            raise EmbeddingsError(f"the patches of {len(given.y)} rows take more than {MOST >> 30} GiB; give fewer examples")
        parts.append(
            np.asarray(x[rows], np.float32).reshape(len(rows), *((-1, x.shape[-1]) if kind == "patches" else x.shape[1:]))
        )
    if len({part.shape[1:] for part in parts}) > 1:
        raise EmbeddingsError("the folders have features of different sizes; embed all by one run")
    x = np.concatenate(parts)
    if not np.isfinite(x).all():
        raise EmbeddingsError(f"{folders[0].folder} holds features that are no numbers; embed again")
    return x


def folds_of(given: Examples, seed: int) -> np.ndarray:
    """The fold of each row, int64 [n]: rows of a recording in one fold, classes spread. All 0 where too few allow none.

    Where some class is in one recording only, its rows are spread instead.
    """
    y = given.y * given.known
    by_class = [len(np.unique(given.group[y[:, c] > 0])) for c in range(y.shape[1])]
    group = given.group if min(by_class) > 1 else np.arange(len(y))
    n = int(min(FOLDS, *(len(np.unique(group[y[:, c] > 0])) for c in range(y.shape[1])), len(np.unique(group))))
    if n < 2:
        return np.zeros(len(y), np.int64)
    rng = np.random.default_rng(seed)
    names, first = np.unique(group, return_index=True)
    main = np.where(y[first].any(1), y[first].argmax(1), y.shape[1])
    fold = np.zeros(len(names), np.int64)
    at = 0
    for c in np.unique(main):
        rows = rng.permutation(np.flatnonzero(main == c))
        fold[rows] = (at + np.arange(len(rows))) % n
        at += len(rows)
    return fold[np.searchsorted(names, group)]


def _cross_validated(
    method: str,
    solve: Solve,
    penalties: Sequence[float],
    x: np.ndarray,
    y: np.ndarray,
    known: np.ndarray,
    fold: np.ndarray,
    softmax: bool,
) -> tuple[float, np.ndarray]:
    """The penalty with the least loss on held-out rows, and its logits [n, C] of them."""
    out = np.zeros((len(penalties), *y.shape), np.float32)
    for k in range(int(fold.max()) + 1):
        for i, arrays in enumerate(solve(known * (fold != k)[:, None], penalties)):
            out[i, fold == k] = _logits(method, arrays, x[fold == k])
    losses = []
    for z in out:
        scale, offset = calibrated(z, y, known, softmax)  # a scale that is not learned must not decide
        losses.append(loss(scale * z + offset, y, known, softmax))
    best = int(np.argmin(losses))
    return penalties[best], out[best]


def _logits(method: str, arrays: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    given = {name: jnp.asarray(value) for name, value in arrays.items()}
    x = x if method == "patches" else x[:, None]
    parts = [jnp.asarray(x[i : i + 64]) for i in range(0, len(x), 64)]
    return np.concatenate([np.asarray(heads.logits(method, given, part[:, 0], part)) for part in parts])


def loss(z: np.ndarray, y: np.ndarray, known: np.ndarray, softmax: bool) -> float:
    """Mean cross-entropy of logits, in nats; of sigmoids over what is known."""
    z = z.astype(np.float64)
    if softmax:
        top = z.max(1)
        return float((top + np.log(np.exp(z - top[:, None]).sum(1)) - (z * y).sum(1)).mean())
    return float(((np.logaddexp(0, z) - y * z) * known).sum() / known.sum())


def calibrated(z: np.ndarray, y: np.ndarray, known: np.ndarray, softmax: bool) -> tuple[float, float]:
    """Scale and offset of logits that give the least loss, with a weak prior at 1 and 0; a softmax needs no offset."""
    z = z.astype(np.float64)
    grid = np.exp(np.linspace(np.log(0.02), np.log(50), 41))
    total = lambda a, b: loss(a * z + b, y, known, softmax) + PRIOR * (np.log(a) ** 2 + b**2 / 100)  # noqa: E731
    if softmax:
        near = min(grid, key=lambda a: total(a, 0.0))
        fine = np.exp(np.linspace(np.log(near) - 0.2, np.log(near) + 0.2, 41))
        return float(min(fine, key=lambda a: total(a, 0.0))), 0.0
    weight = known / known.sum()
    best = (total(1.0, 0.0), 1.0, 0.0)
    for a in grid:
        b = 0.0
        for _ in range(20):  # Newton's steps for the offset of this scale: the loss is convex in it
            p = 1 / (1 + np.exp(-np.clip(a * z + b, -40, 40)))
            slope, bend = (weight * (p - y)).sum() + PRIOR * b / 50, (weight * p * (1 - p)).sum() + PRIOR / 50
            b -= float(np.clip(slope / bend, -3, 3))
        best = min(best, (total(a, b), float(a), b))
    return best[1], best[2]


def threshold(scores: np.ndarray, y: np.ndarray, precision: float) -> float:
    """The lowest score from which on the share of ``y`` reaches ``precision``; above all of them where none does."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    hits = np.cumsum(y[order])
    last = np.append(np.diff(ranked) != 0, True)  # of equal scores
    good = np.flatnonzero(last & (hits / np.arange(1, len(y) + 1) >= precision))
    if not len(good):
        return float(min(1.0, np.nextafter(np.float32(ranked[0]), np.float32(2))))
    at = good[-1]
    below = ranked[at + 1] if at + 1 < len(ranked) else 0.0
    return float((ranked[at] + below) / 2)


def _scaled(method: str, arrays: dict[str, np.ndarray], scale: float, offset: float) -> dict[str, np.ndarray]:
    """The arrays of a head whose logits are ``scale`` × those + ``offset``."""
    name = "w" if method == "linear" else "scale"
    out = {**arrays, name: arrays[name] * scale, "b": arrays["b"] * scale + offset}
    return {key: np.asarray(value, np.float32) for key, value in out.items()}


def _solver(
    method: str, x: np.ndarray, y: np.ndarray, softmax: bool, prototypes: int, seed: int
) -> tuple[Solve, Sequence[float]]:
    """What fits arrays to rows by their weights, and the penalties that it may be given."""
    if method == "linear":
        mean, std = x.mean(0), x.std(0) + 1e-6
        standard = ((x - mean) / std).astype(np.float32)

        def linear(weight: np.ndarray, penalties: Sequence[float]) -> list[dict[str, np.ndarray]]:
            w, b = map(np.asarray, _linear(standard, y, weight, np.asarray(penalties, np.float32), softmax=softmax))
            return [{"w": w[i] / std[:, None], "b": b[i] - (mean / std) @ w[i]} for i in range(len(penalties))]

        return linear, PENALTIES
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
            p, scale, b = map(np.asarray, _learn(directions, y, weight, begin, np.float32(penalty), softmax=softmax))
            found.append({"mean": mean, "prototypes": p, "scale": scale * ones, "b": b})
        return found

    return patches, PULLS


@functools.partial(jax.jit, static_argnames=("softmax", "steps"))
def _linear(
    x: jax.Array, y: jax.Array, weight: jax.Array, penalties: jax.Array, *, softmax: bool, steps: int = 100
) -> tuple[jax.Array, jax.Array]:
    """Weights [len(penalties), D, C] and biases, of penalty / 2 × |w|² + mean loss, by L-BFGS."""

    def fit_penalty(penalty: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(wb: tuple[jax.Array, jax.Array]) -> jax.Array:
            return _mean_loss(x @ wb[0] + wb[1][None], y, weight, softmax) + penalty / 2 * jnp.square(wb[0]).sum()

        solver = optax.lbfgs()
        wb = (jnp.zeros((x.shape[1], y.shape[1])), jnp.zeros(y.shape[1]))
        value_and_grad = optax.value_and_grad_from_state(total)

        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            wb, state = carry
            value, grad = value_and_grad(wb, state=state)
            updates, state = solver.update(grad, state, wb, value=value, grad=grad, value_fn=total)
            return (optax.apply_updates(wb, updates), state), None

        (wb, _), _ = jax.lax.scan(step, (wb, solver.init(wb)), length=steps)
        return wb

    return jax.lax.map(fit_penalty, penalties)


def _mean_loss(z: jax.Array, y: jax.Array, weight: jax.Array, softmax: bool) -> jax.Array:
    if softmax:
        each = -(y * jax.nn.log_softmax(z)).sum(1)
        return (each * weight[:, 0]).sum() / weight[:, 0].sum()
    return ((jnp.logaddexp(0, z) - y * z) * weight).sum() / weight.sum()


def _telling(directions: np.ndarray, y: np.ndarray, weight: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The ``k`` patches of each class that are nearest to its rows and farthest from others', float32 [C, K, D]."""
    rng = np.random.default_rng(seed)
    found = []
    for c in range(y.shape[1]):
        with_it = np.flatnonzero(y[:, c] * weight[:, c] > 0)
        without = np.flatnonzero((1 - y[:, c]) * weight[:, c] > 0)
        pool = directions[with_it].reshape(-1, directions.shape[-1])
        tried = pool[rng.permutation(len(pool))[:CANDIDATES]]
        cosines = [np.asarray(_nearest(tried, directions[rows])) for rows in (with_it, without)]
        contrast = cosines[0].mean(0) - (cosines[1].mean(0) if len(without) else 0.0)
        order = np.argsort(-contrast, kind="stable")
        chosen = [tried[order[0]]]
        for i in order[1:]:  # those that are not the same again
            if len(chosen) == k:
                break
            if max(float(tried[i] @ each) for each in chosen) < 0.9:
                chosen.append(tried[i])
        while len(chosen) < k:
            chosen.append(chosen[0])
        found.append(np.stack(chosen))
    return np.stack(found).astype(np.float32)


def _nearest(tried: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The cosine of each row's nearest patch, [rows, tried]."""
    parts = [(directions[i : i + 32] @ tried.T).max(1) for i in range(0, len(directions), 32)]
    return np.concatenate(parts) if parts else np.zeros((0, len(tried)), np.float32)


@functools.partial(jax.jit, static_argnames=("softmax",))
def _learn(
    directions: jax.Array, y: jax.Array, weight: jax.Array, begin: jax.Array, pull: jax.Array, *, softmax: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prototypes [C, K, D], their scale and offsets [C], by Adam."""

    def total(p: dict[str, jax.Array]) -> jax.Array:
        cosine = jnp.einsum("bnd,ckd->bnck", directions, heads.unit(p["prototypes"])).max((1, 3))
        z = jnp.exp(p["scale"]) * cosine + p["b"][None]
        return _mean_loss(z, y, weight, softmax) + pull / 2 * jnp.square(p["prototypes"] - begin).sum((1, 2)).mean()

    params: dict[str, Any] = {"prototypes": begin, "scale": jnp.log(10.0), "b": jnp.full(y.shape[1], 0.0 if softmax else -5.0)}
    tx = optax.adam(RATE)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        params, state = carry
        updates, state = tx.update(jax.grad(total)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), length=STEPS)
    return heads.unit(params["prototypes"]), jnp.exp(params["scale"]), params["b"]
