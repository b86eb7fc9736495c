"""Measures of features by the classifiers that `jaxtrain.workloads.bird.commands.probe` lists."""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax
from sklearn.neighbors import KNeighborsRegressor

from jaxtrain.workloads.bird.inference import InferenceError, embeddings, logistic, measures
from jaxtrain.workloads.bird.inference.measures import MEASURES
from loaders.audio.front_end import DEFAULT
from loaders.io import atomic_write, files

TEMPERATURE = 0.07


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
    """Read embeddings. Raises InferenceError: unfinished, without labels or not this kind."""
    stored = embeddings.read(folder)
    y, known = stored.labels()
    if not known.any():
        raise InferenceError(f"{folder} has no labels; embed it with --label")
    scores = np.array(stored.array("scores", 2)[known]) if stored.has("scores") else None
    if scores is not None and scores.shape[1] != y.shape[1]:
        scores = None  # of a run with other classes
    folds = np.array(stored.array(group, 1)[known]) if group else None
    front_end = stored.metadata.get("front_end", DEFAULT.settings)
    x = stored.features(kind, known)
    return Features(x, y[known], scores, folds, stored.metadata["multilabel"], stored.names, front_end)


# Classifiers. Each gives scores [n, C] of the test rows.


def linear(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, multilabel: bool, seed: int = 0
) -> np.ndarray:
    """Fit logistic regression on standardised features, with a held-out fifth's best penalty."""
    mean, std = x.mean(0), x.std(0) + 1e-6
    x, x_test = (x - mean) / std, (x_test - mean) / std
    held, softmax = _fifth(y, seed), not multilabel

    def held_out(penalty: float) -> float:
        w, b = logistic.fit(x[~held], y[~held], penalty, softmax=softmax)
        return logistic.loss(x[held] @ w + b, y[held], softmax=softmax)

    w, b = logistic.fit(x, y, min(logistic.PENALTIES, key=held_out), softmax=softmax)
    logits: np.ndarray = x_test @ w + b
    return logits


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


def nearest(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, k: int = 20) -> np.ndarray:
    """Classes of the k nearest rows by centred features' cosine, weighted by exp(cosine / 0.07)."""
    neighbours = KNeighborsRegressor(
        min(k, len(x)),
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp(-distance / TEMPERATURE),
    )
    scores: np.ndarray = neighbours.fit(x - x.mean(0), y.astype(np.float32)).predict(
        x_test - x.mean(0)
    )
    return scores


def prototypes(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, shots: int, seed: int
) -> np.ndarray:
    """Return the cosine with the mean of ``shots`` rows of each class, or the lowest score."""
    rng = np.random.default_rng(seed)
    mean = x.mean(0)
    x, x_test = (
        (z - mean) / np.maximum(np.linalg.norm(z - mean, axis=1, keepdims=True), 1e-9)
        for z in (x, x_test)
    )
    scores = np.full((len(x_test), y.shape[1]), -1.0, np.float32)
    for c in range(y.shape[1]):
        rows = np.flatnonzero(y[:, c])
        if len(rows):
            mean = x[rng.permutation(rows)[:shots]].mean(0)
            scores[:, c] = x_test @ (mean / max(np.linalg.norm(mean), 1e-9))
    return scores


# The whole evaluation.


def evaluate(
    splits: Sequence[tuple[Features, Features]],
    *,
    draws: int = 1000,
    shots: Sequence[int] = (1, 2, 4, 8, 16),
    trials: int = 20,
    k: int = 20,
) -> dict[str, Any]:
    """Evaluate one (train, test) pair, or one a fold, whose test rows are then scored together.

    Returns classifier -> measure -> value, low, high (and "folds", the value in each), and "few
    shot" -> shots -> the same of accuracy, or cmAP of several classes, over draws of the examples.
    """
    scores: dict[str, list[np.ndarray]] = {"linear": [], "knn": []}
    own = [test.scores for _, test in splits if test.scores is not None]
    if len(own) == len(splits):
        scores["scores"] = own
    for train, test in splits:
        _refuse_unlike(train, test)
        scores["linear"].append(linear(train.x, train.y, test.x, multilabel=train.multilabel))
        scores["knn"].append(nearest(train.x, train.y, test.x, k=k))
    y = np.concatenate([test.y for _, test in splits])
    weight = measures.bootstrap(len(y), draws)
    results: dict[str, Any] = {}
    for name, parts in scores.items():
        # Scores of folds come from different classifiers: each row is made comparable first.
        joined = np.concatenate(
            parts if len(parts) == 1 or name == "knn" else [softmax(part, axis=1) for part in parts]
        )
        results[name] = measures.summarised(joined, y, weight)
        if len(splits) > 1:
            for (_, test), part in zip(splits, parts, strict=True):
                for key, (value,) in measures.measure(
                    part, test.y, np.ones((1, len(test.y)))
                ).items():
                    results[name][key].setdefault("folds", []).append(float(value))
    kind = "cmAP" if splits[0][0].multilabel else "accuracy"
    few = {}

    def few_shot(n: int, draw: int) -> np.floating:
        scored = [(prototypes(a.x, a.y, b.x, shots=n, seed=draw), b.y) for a, b in splits]
        return np.mean(
            [
                float(measures.measure(score, y, np.ones((1, len(y))))[kind][0])
                for score, y in scored
            ]
        )

    for n in shots:
        values = [few_shot(n, draw) for draw in range(trials)]
        low, high = np.percentile(values, [2.5, 97.5])
        few[str(n)] = {"value": float(np.mean(values)), "low": float(low), "high": float(high)}
    return {**results, "few shot": few}


def _refuse_unlike(train: Features, test: Features) -> None:
    if train.y.shape[1] != test.y.shape[1] or train.multilabel != test.multilabel:
        raise InferenceError(
            f"the train rows have {train.y.shape[1]} classes, the test rows {test.y.shape[1]}, or"
            " only one of them has several for a recording; embed both with the same --label and"
            " --multilabel"
        )
    widths, both = (train.x.shape[1], test.x.shape[1]), "embed both with one run"
    if widths[0] != widths[1]:
        raise InferenceError(
            f"the train rows have {widths[0]} features, the test rows {widths[1]}; {both}"
        )
    of = [(name, value, test.front_end[name]) for name, value in train.front_end.items()]
    unlike = [f"{name} {a} and {b}" for name, a, b in of if a != b]
    if unlike:
        raise InferenceError(
            "the train and the test rows are of encoders with different front ends"
            f" ({', '.join(unlike)}); {both}"
        )


def folds_of(features: Features) -> list[tuple[Features, Features]]:
    """Return a pair for each fold: its rows to test on, all others to train on."""

    group = features.group
    assert group is not None  # as `read` with ``group`` leaves it

    def part(rows: np.ndarray) -> Features:
        scores = None if features.scores is None else features.scores[rows]
        return features._replace(
            x=features.x[rows], y=features.y[rows], scores=scores, group=group[rows]
        )

    return [(part(group != fold), part(group == fold)) for fold in np.unique(group)]


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each classifier of each named result."""
    lines = [
        "| features | classifier | " + " | ".join(MEASURES) + " |",
        "|---|---|" + "---:|" * len(MEASURES),
    ]
    for name, result in results.items():
        for classifier in ("linear", "knn", "scores"):
            if classifier in result:
                cells = " | ".join(measures.percent(result[classifier][key], 1) for key in MEASURES)
                lines.append(f"| {name} | {classifier} | {cells} |")
        for n, found in result["few shot"].items():
            cells = measures.percent(found, 1) + " |" * (len(MEASURES) - 1)
            lines.append(f"| {name} | {n} shot{'s' * (n != '1')} | {cells} |")
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Mapping[str, Any]], out: pathlib.Path) -> list[pathlib.Path]:
    """measures.png and few_shot.png, or nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no pictures: matplotlib is missing (pip install 'jaxtrain[plots]')", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(MEASURES), figsize=(4 * len(MEASURES), 0.6 + 0.7 * len(results) + 0.6), sharey=True
    )
    for axis, name in zip(axes, MEASURES, strict=True):
        for offset, classifier in enumerate(("linear", "knn", "scores")):
            rows = [
                (i, r[classifier][name]) for i, r in enumerate(results.values()) if classifier in r
            ]
            if rows:
                at = np.array([i for i, _ in rows]) + 0.2 * (offset - 1)
                value = np.array([m["value"] for _, m in rows])
                error = np.abs(np.array([(m["low"], m["high"]) for _, m in rows]).T - value)
                axis.errorbar(
                    100 * value, at, xerr=100 * error, fmt="o", capsize=3, label=classifier
                )
        axis.set_xlabel(f"{name} [%]")
        axis.set_yticks(range(len(results)), list(results))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[-1].legend()
    few, axis = pyplot.subplots(figsize=(6, 4))
    for name, result in results.items():
        shots = [int(n) for n in result["few shot"]]
        value, low, high = (
            100 * np.array([m[part] for m in result["few shot"].values()])
            for part in ("value", "low", "high")
        )
        axis.plot(shots, value, "o-", label=name)
        axis.fill_between(shots, low, high, alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("examples of each class")
    axis.set_ylabel("nearest class mean [%]")
    axis.legend()
    paths = [out / "measures.png", out / "few_shot.png"]
    for path, one in zip(paths, (figure, few), strict=True):
        one.tight_layout()
        with atomic_write.file(path) as file:
            one.savefig(file, dpi=120, format="png")
        pyplot.close(one)
    return paths


def report(results: Mapping[str, Mapping[str, Any]], out: str | pathlib.Path) -> str:
    """Write results.json, results.md and the pictures. Return the table."""
    out = files.expanded(out)
    out.mkdir(parents=True, exist_ok=True)
    text = table(results)
    atomic_write.write(out / "results.json", json.dumps(results, indent=2) + "\n")
    pictures = "".join(f"\n![]({path.name})\n" for path in plot(results, out))
    atomic_write.write(
        out / "results.md", f"Percent, with bootstrap intervals of 95 %.\n\n{text}{pictures}"
    )
    return text
