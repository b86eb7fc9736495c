"""How good frozen features are, by classifiers that are trained on folders of `jaxtrain.workloads.bird.inference.embed`.

    linear     logistic regression: softmax, or one for each of several classes; its penalty chosen on a part of the train rows
    knn        the k nearest by cosine, weighted by exp(cosine / 0.07) (Wu et al. 2018)
    few shot   nearest mean of 1, 2, 4 … examples of each class, of many draws (Snell et al. 2017)
    scores     the run's supervised head as it is, where there is one

Measures, with percentile intervals of 95 % over bootstrap draws of the test recordings:

    accuracy   share of recordings whose best score is of (one of) its classes; those without a class do not count
    cmAP       mean over classes of average precision (BirdSet; Rauch et al. 2024); classes without a positive do not count
    AUROC      mean over classes of the area under the ROC curve, ties half; the same classes, and negatives are needed
"""

import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.workloads.bird.inference import embeddings
from loaders.audio.front_end import DEFAULT
from loaders.io import atomic_write as whole

MEASURES = ("accuracy", "cmAP", "AUROC")
PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TEMPERATURE = 0.07
MOST_CLASSES = 100_000
PART = 1000  # bootstrap draws whose sums are held at once, times a class


class ProbeError(ValueError):
    """Embeddings that cannot be used together."""


class Features(NamedTuple):
    """The valid rows of a folder of embeddings: decoded, and with a label."""

    x: np.ndarray  # float32 [n, D]
    y: np.ndarray  # uint8 [n, C]
    scores: np.ndarray | None  # float32 [n, C]
    group: np.ndarray | None  # int [n], of the folds
    multilabel: bool
    names: tuple[str, ...]
    front_end: Mapping[str, Any]  # `FrontEnd.settings` of the encoder that made them


def read(folder: str | pathlib.Path, *, kind: str = "mean", group: str | None = None) -> Features:
    """Reads a folder of embeddings. Raises ProbeError: it is unfinished, or has no labels or not this kind."""
    try:
        stored = embeddings.read(folder)
        return _features(stored, kind, group)
    except embeddings.EmbeddingsError as error:
        raise ProbeError(str(error)) from error


def _features(stored: embeddings.Embeddings, kind: str, group: str | None) -> Features:
    folder, meta, names = stored.folder, stored.about, stored.names

    def load(name: str, *dimensions: int) -> np.ndarray:
        return np.array(stored.array(name, *dimensions))

    weight = load("weight", 1)
    if meta["multilabel"]:
        y, known = load("labels", 2), weight > 0
    else:
        label = load("label", 1)
        known = (weight > 0) & (label >= 0)
        if label.dtype.kind not in "iu" or label.max(initial=0) >= (len(names) or MOST_CLASSES):
            raise ProbeError(f"{folder}/label.npy has class {label.max(initial=0)}, but names for {len(names)}; embed again")
        y = (label[:, None] == np.arange(len(names) or label.max() + 1)).astype(np.uint8)
    if not known.any():
        raise ProbeError(f"{folder} has no labels; embed it with --label")
    scores = load("scores", 2)[known] if (folder / "scores.npy").exists() else None
    if scores is not None and scores.shape[1] != y.shape[1]:
        scores = None  # of a run with other classes
    return Features(
        np.asarray(load(kind, 2)[known], np.float32),
        y[known],
        scores,
        load(group, 1)[known] if group else None,
        meta["multilabel"],
        names,
        meta.get("front_end", DEFAULT.settings),
    )


# Measures. A weight is how often each row counts: 1, or a bootstrap draw's.


def accuracy(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """[n, C], [n, C], [R, n] -> [R]."""
    has = y.any(1)
    right = y[np.arange(len(y)), score.argmax(1)] > 0
    return (weight[:, has] @ right[has]) / np.maximum(weight[:, has].sum(1), 1e-9)


def average_precision(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """sum_i (recall_i - recall_{i-1}) precision_i over the thresholds, [n], [n], [R, n] -> [R]; nan without a positive."""
    w, y, last = _sorted(score, positive, weight)
    hits, all_ = np.cumsum(w * y, 1)[:, last], np.cumsum(w, 1)[:, last]
    gained = np.diff(hits, axis=1, prepend=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(gained > 0, gained * hits / all_, 0).sum(1) / hits[:, -1]


def area_under_roc(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Chance that a positive scores above a negative, ties half; nan without both."""
    w, y, last = _sorted(score, positive, weight)
    hits, misses = (np.diff(np.cumsum(w * z, 1)[:, last], axis=1, prepend=0) for z in (y, 1 - y))
    below = misses.sum(1, keepdims=True) - np.cumsum(misses, 1) + misses / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return (hits * below).sum(1) / (hits.sum(1) * misses.sum(1))


def _sorted(score: np.ndarray, positive: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights and labels from the highest score down, and the last place of each distinct score."""
    order = np.argsort(-score, kind="stable")
    last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))
    return weight[:, order], positive[order].astype(np.float64), last


def over_classes(each: Any, score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Mean of a measure over the classes that have it, [R]."""
    by_class = np.stack([each(score[:, c], y[:, c], weight) for c in range(y.shape[1])], 1)
    known = np.isfinite(by_class)
    return np.where(known, by_class, 0).sum(1) / np.maximum(known.sum(1), 1)


def measure(score: np.ndarray, y: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Every one of `MEASURES`, [R] each."""
    parts = [weight[i : i + PART] for i in range(0, len(weight), PART)]
    whole = lambda f: np.concatenate([f(part.astype(np.float64)) for part in parts])  # noqa: E731
    return {
        "accuracy": whole(lambda w: accuracy(score, y, w)),
        "cmAP": whole(lambda w: over_classes(average_precision, score, y, w)),
        "AUROC": whole(lambda w: over_classes(area_under_roc, score, y, w)),
    }


def bootstrap(n: int, draws: int, *, seed: int = 0) -> np.ndarray:
    """float32 [draws + 1, n]: how often each row counts; the first is all of them once."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=draws)
    return np.concatenate([np.ones((1, n)), drawn]).astype(np.float32)


def summary(values: np.ndarray) -> dict[str, float]:
    """Of `measure` over `bootstrap`: the value of all rows, and the middle 95 % of the draws'."""
    low, high = np.percentile(values[1:], [2.5, 97.5]) if len(values) > 1 else (np.nan, np.nan)
    return {"value": float(values[0]), "low": float(low), "high": float(high)}


# Classifiers. Each gives scores [n, C] of the test rows.


def linear(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, multilabel: bool, seed: int = 0) -> np.ndarray:
    """Logistic regression by L-BFGS on standardised features, with the penalty that a held-out fifth of the rows likes best."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    x, x_test = (x - mean) / std, (x_test - mean) / std
    held = _fifth(y, seed)
    fit = functools.partial(_fit, multilabel=multilabel)
    penalties = np.asarray(PENALTIES, np.float32)
    # Rows are left out by their weight, so that one program does for both fits.
    w, b = map(np.asarray, fit(x, y, (~held).astype(np.float32), penalties))
    each = [_loss(x[held] @ w[i] + b[i], y[held], multilabel) for i in range(len(penalties))]
    best = penalties[int(np.argmin(each))]
    w, b = map(np.asarray, fit(x, y, np.ones(len(x), np.float32), np.array([best], np.float32)))
    return x_test @ w[0] + b[0]


def _fifth(y: np.ndarray, seed: int) -> np.ndarray:
    """bool [n]: a fifth of the rows, the same share of each first class."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(y), bool)
    first = np.where(y.any(1), y.argmax(1), -1)
    for c in np.unique(first):
        rows = rng.permutation(np.flatnonzero(first == c))
        held[rows[: len(rows) // 5]] = True
    if not held.any():
        held[rng.integers(len(y))] = True
    return held


def _loss(logits: np.ndarray, y: np.ndarray, multilabel: bool) -> float:
    logits = logits.astype(np.float64)
    if multilabel:
        return float((np.logaddexp(0, logits) - y * logits).sum(1).mean())
    top = logits.max(1, keepdims=True)
    return float((np.log(np.exp(logits - top).sum(1)) + top[:, 0] - (y * logits).sum(1)).mean())


@functools.partial(jax.jit, static_argnames=("multilabel", "steps"))
def _fit(
    x: jax.Array, y: jax.Array, weight: jax.Array, penalties: jax.Array, *, multilabel: bool, steps: int = 100
) -> tuple[jax.Array, jax.Array]:
    """Weights [len(penalties), D, C] and biases, of penalty / 2 × |w|² + mean loss."""
    y = jnp.asarray(y, jnp.float32)

    def fit_penalty(penalty: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(wb: tuple[jax.Array, jax.Array]) -> jax.Array:
            logits = x @ wb[0] + wb[1][None]
            if multilabel:
                each = (jnp.logaddexp(0, logits) - y * logits).sum(1)
            else:
                each = -(y * jax.nn.log_softmax(logits)).sum(1)
            return (each * weight).sum() / weight.sum() + penalty / 2 * jnp.square(wb[0]).sum()

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


def nearest(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, k: int = 20) -> np.ndarray:
    """Classes of the k nearest rows by cosine of centred features, weighted by exp(cosine / 0.07)."""
    x, x_test = _directions(x, x_test)
    scores = np.zeros((len(x_test), y.shape[1]), np.float32)
    for first in range(0, len(x_test), 1024):
        cosine = x_test[first : first + 1024] @ x.T
        near = np.argpartition(-cosine, min(k, len(x)) - 1, axis=1)[:, :k]
        weight = np.exp((np.take_along_axis(cosine, near, 1) - 1) / TEMPERATURE)
        scores[first : first + 1024] = np.einsum("nk,nkc->nc", weight, y[near]) / weight.sum(1, keepdims=True)
    return scores


def prototypes(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, shots: int, seed: int) -> np.ndarray:
    """Cosine with the mean of ``shots`` rows of each class; a class without any gets the lowest score."""
    rng = np.random.default_rng(seed)
    x, x_test = _directions(x, x_test)
    scores = np.full((len(x_test), y.shape[1]), -1.0, np.float32)
    for c in range(y.shape[1]):
        rows = np.flatnonzero(y[:, c])
        if len(rows):
            mean = x[rng.permutation(rows)[:shots]].mean(0)
            scores[:, c] = x_test @ (mean / max(np.linalg.norm(mean), 1e-9))
    return scores


def _directions(x: np.ndarray, x_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = x.mean(0)

    def direction(z: np.ndarray) -> np.ndarray:
        return (z - mean) / np.maximum(np.linalg.norm(z - mean, axis=1, keepdims=True), 1e-9)

    return direction(x), direction(x_test)


# The whole evaluation.


def evaluate(
    splits: Sequence[tuple[Features, Features]],
    *,
    draws: int = 1000,
    shots: Sequence[int] = (1, 2, 4, 8, 16),
    trials: int = 20,
    k: int = 20,
) -> dict[str, Any]:
    """Evaluates one (train, test) pair, or one for each fold, whose test rows are then scored together.

    Returns classifier -> measure -> value, low, high (and "folds", the value in each), and "few shot" -> shots -> the same of
    accuracy, or cmAP of several classes, over draws of the examples.
    """
    scores: dict[str, list[np.ndarray]] = {"linear": [], "knn": []}
    own = [test.scores for _, test in splits if test.scores is not None]
    if len(own) == len(splits):
        scores["scores"] = own
    for train, test in splits:
        if train.y.shape[1] != test.y.shape[1] or train.multilabel != test.multilabel:
            raise ProbeError(
                f"the train rows have {train.y.shape[1]} classes, the test rows {test.y.shape[1]}, or only one of them has "
                "several for a recording; embed both with the same --label and --multilabel"
            )
        if train.x.shape[1] != test.x.shape[1]:
            raise ProbeError(
                f"the train rows have {train.x.shape[1]} features, the test rows {test.x.shape[1]}; embed both with one run"
            )
        if unlike := [name for name, value in train.front_end.items() if test.front_end[name] != value]:
            both = ", ".join(f"{name} {train.front_end[name]} and {test.front_end[name]}" for name in unlike)
            raise ProbeError(
                f"the train and the test rows are of encoders with different front ends ({both}); embed both with one run"
            )
        scores["linear"].append(linear(train.x, train.y, test.x, multilabel=train.multilabel))
        scores["knn"].append(nearest(train.x, train.y, test.x, k=k))
    y = np.concatenate([test.y for _, test in splits])
    weight = bootstrap(len(y), draws)
    results: dict[str, Any] = {}
    for name, parts in scores.items():
        # Scores of different folds come from different classifiers: each row is made comparable first.
        joined = np.concatenate(parts if len(parts) == 1 else [_comparable(part) if name != "knn" else part for part in parts])
        best = np.concatenate(parts)
        measured = measure(joined, y, weight)
        measured["accuracy"] = np.concatenate(
            [accuracy(best, y, weight[i : i + PART].astype(np.float64)) for i in range(0, len(weight), PART)]
        )
        results[name] = {measure_name: summary(values) for measure_name, values in measured.items()}
        if len(splits) > 1:
            for (_, test), part in zip(splits, parts, strict=True):
                alone = measure(part, test.y, np.ones((1, len(test.y))))
                for measure_name, value in alone.items():
                    results[name][measure_name].setdefault("folds", []).append(float(value[0]))
    multilabel = splits[0][0].multilabel
    kind = "cmAP" if multilabel else "accuracy"
    few = {}
    for n in shots:
        values = []
        for trial in range(trials):
            each = [
                measure(prototypes(a.x, a.y, b.x, shots=n, seed=trial), b.y, np.ones((1, len(b.y))))[kind][0] for a, b in splits
            ]
            values.append(np.mean(each))
        low, high = np.percentile(values, [2.5, 97.5])
        few[str(n)] = {"value": float(np.mean(values)), "low": float(low), "high": float(high)}
    return {**results, "few shot": few}


def _comparable(score: np.ndarray) -> np.ndarray:
    """Softmax of each row: comparable between classifiers, and monotone within a row."""
    e = np.exp(score - score.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def folds_of(features: Features) -> list[tuple[Features, Features]]:
    """A pair for each fold: its rows to test on, all others to train on."""

    def part(rows: np.ndarray) -> Features:
        cut = lambda z: None if z is None else z[rows]  # noqa: E731
        return features._replace(x=features.x[rows], y=features.y[rows], scores=cut(features.scores), group=cut(features.group))

    group = features.group
    assert group is not None  # as `read` with ``group`` leaves it
    return [(part(group != fold), part(group == fold)) for fold in np.unique(group)]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each classifier of each named result."""
    lines = ["| features | classifier | " + " | ".join(MEASURES) + " |", "|---|---|" + "---:|" * len(MEASURES)]
    show = lambda m: f"{100 * m['value']:.1f} [{100 * m['low']:.1f}, {100 * m['high']:.1f}]"  # noqa: E731
    for name, result in results.items():
        for classifier in ("linear", "knn", "scores"):
            if classifier in result:
                lines.append(f"| {name} | {classifier} | " + " | ".join(show(result[classifier][m]) for m in MEASURES) + " |")
        for n, m in result["few shot"].items():
            lines.append(f"| {name} | {n} shot{'s' * (n != '1')} | {show(m)} |" + " |" * (len(MEASURES) - 1))
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Mapping[str, Any]], out: pathlib.Path) -> list[pathlib.Path]:
    """measures.png and few_shot.png; nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no pictures: matplotlib is missing (pip install 'jaxtrain[plots]')", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MEASURES), figsize=(4 * len(MEASURES), 0.6 + 0.7 * len(results) + 0.6), sharey=True)
    for axis, name in zip(axes, MEASURES, strict=True):
        for offset, classifier in enumerate(("linear", "knn", "scores")):
            rows = [(i, r[classifier][name]) for i, r in enumerate(results.values()) if classifier in r]
            if rows:
                at = np.array([i for i, _ in rows]) + 0.2 * (offset - 1)
                value = np.array([m["value"] for _, m in rows])
                error = np.abs(np.array([(m["low"], m["high"]) for _, m in rows]).T - value)
                axis.errorbar(100 * value, at, xerr=100 * error, fmt="o", capsize=3, label=classifier)
        axis.set_xlabel(f"{name} [%]")
        axis.set_yticks(range(len(results)), list(results))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[-1].legend()
    few, axis = pyplot.subplots(figsize=(6, 4))
    for name, result in results.items():
        shots = [int(n) for n in result["few shot"]]
        value, low, high = (100 * np.array([m[part] for m in result["few shot"].values()]) for part in ("value", "low", "high"))
        axis.plot(shots, value, "o-", label=name)
        axis.fill_between(shots, low, high, alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("examples of each class")
    axis.set_ylabel("nearest class mean [%]")
    axis.legend()
    paths = [out / "measures.png", out / "few_shot.png"]
    for path, one in zip(paths, (figure, few), strict=True):
        one.tight_layout()
        with whole.file(path) as file:
            one.savefig(file, dpi=120, format="png")
        pyplot.close(one)
    return paths


def report(results: Mapping[str, Mapping[str, Any]], out: str | pathlib.Path) -> str:
    """Writes results.json, results.md and the pictures. Returns the table."""
    out = pathlib.Path(out).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    text = table(results)
    whole.write(out / "results.json", json.dumps(results, indent=2) + "\n")
    pictures = "".join(f"\n![]({path.name})\n" for path in plot(results, out))
    whole.write(out / "results.md", f"Percent, with bootstrap intervals of 95 %.\n\n{text}{pictures}")
    return text
