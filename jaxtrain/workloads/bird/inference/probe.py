"""Measures of features by the classifiers that `jaxtrain.workloads.bird.commands.probe` lists."""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax
from sklearn.neighbors import KNeighborsRegressor

from jaxtrain.workloads.bird.inference import (
    InferenceError,
    embeddings,
    evidence,
    logistic,
    measures,
)
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from jaxtrain.workloads.bird.inference.measures import MEASURES
from loaders.audio.front_end import DEFAULT
from loaders.io import atomic_write, files, machine

TEMPERATURE = 0.07
CLASSIFIERS = ("linear", "knn", "scores")


class Features(NamedTuple):
    """The valid rows of a folder of embeddings: decoded, and with a label."""

    x: np.ndarray  # float32 [n, D]
    y: np.ndarray  # uint8 [n, C]
    scores: np.ndarray | None  # float32 [n, C]
    group: np.ndarray | None  # int [n], of the folds
    multilabel: bool
    names: tuple[str, ...]
    front_end: Mapping[str, Any]  # `FrontEnd.settings` of the encoder that made them
    folder: Embeddings
    rows: np.ndarray  # int64 [n], in the folder


def read(folder: str | pathlib.Path, *, kind: str = "mean", group: str | None = None) -> Features:
    """Read embeddings. Raises InferenceError: unfinished, without labels or not this kind."""
    stored = embeddings.read(folder)
    y, is_labelled = stored.labels()
    if not is_labelled.any():
        raise InferenceError(f"{folder} has no labels; embed it with --label")
    scores = None
    if stored.has("scores"):
        run_scores = np.array(stored.array("scores", 2)[is_labelled])
        if run_scores.shape[1] == y.shape[1]:  # else they are of a run with other classes
            scores = run_scores
    folds = np.array(stored.array(group, 1)[is_labelled]) if group else None
    return Features(
        x=stored.features(kind, is_labelled),
        y=y[is_labelled],
        scores=scores,
        group=folds,
        multilabel=stored.metadata["multilabel"],
        names=stored.names,
        front_end=stored.metadata.get("front_end", DEFAULT.settings),
        folder=stored,
        rows=np.flatnonzero(is_labelled),
    )


# Classifiers. Each gives scores [n, C] of the test rows.


def linear(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, multilabel: bool) -> np.ndarray:
    """Fit logistic regression on standardised features, with a held-out fifth's best penalty."""
    mean = x.mean(0)
    std = x.std(0) + 1e-6
    x = (x - mean) / std
    x_test = (x_test - mean) / std
    is_held_out = _fifth(y)
    softmax = not multilabel

    x_train = x[~is_held_out]
    y_train = y[~is_held_out]
    x_held_out = x[is_held_out]
    y_held_out = y[is_held_out]

    def held_out_loss(penalty: float) -> float:
        w, b = logistic.fit(x_train, y_train, penalty, softmax=softmax)
        return logistic.loss(x_held_out @ w + b, y_held_out, softmax=softmax)

    penalty = min(logistic.PENALTIES, key=held_out_loss)
    w, b = logistic.fit(x, y, penalty, softmax=softmax)
    logits: np.ndarray = x_test @ w + b
    return logits


def _fifth(y: np.ndarray) -> np.ndarray:
    """bool [n]: a fifth of the rows, the same share of each first class."""
    rng = np.random.default_rng(0)
    is_held_out = np.zeros(len(y), bool)
    first_class = np.where(y.any(1), y.argmax(1), -1)
    for c in np.unique(first_class):
        rows = rng.permutation(np.flatnonzero(first_class == c))
        is_held_out[rows[: len(rows) // 5]] = True
    if not is_held_out.any():
        is_held_out[rng.integers(len(y))] = True
    return is_held_out


def nearest(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, k: int = 20) -> np.ndarray:
    """Classes of the k nearest rows by centred features' cosine, weighted by exp(cosine / 0.07)."""
    neighbours = KNeighborsRegressor(
        min(k, len(x)),
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp(-distance / TEMPERATURE),
    )
    mean = x.mean(0)
    neighbours.fit(x - mean, y.astype(np.float32))
    scores: np.ndarray = neighbours.predict(x_test - mean)
    return scores


def prototypes(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, *, shots: int, seed: int
) -> np.ndarray:
    """Return the cosine with the mean of ``shots`` rows of each class, or the lowest score."""
    rng = np.random.default_rng(seed)
    mean = x.mean(0)
    x = _unit(x - mean)
    x_test = _unit(x_test - mean)
    scores = np.full((len(x_test), y.shape[1]), -1.0, np.float32)
    for c in range(y.shape[1]):
        rows = np.flatnonzero(y[:, c])
        if len(rows):
            examples = rng.permutation(rows)[:shots]
            prototype = x[examples].mean(0)
            length = max(np.linalg.norm(prototype), 1e-9)
            scores[:, c] = x_test @ (prototype / length)
    return scores


def _unit(x: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(x, axis=1, keepdims=True)
    unit: np.ndarray = x / np.maximum(length, 1e-9)
    return unit


# The whole evaluation.


def evaluate(
    splits: Sequence[tuple[Features, Features]],
    *,
    draws: int = 1000,
    shots: Sequence[int] = (1, 2, 4, 8, 16),
    trials: int = 20,
) -> dict[str, Any]:
    """Evaluate one (train, test) pair, or one a fold, whose test rows are then scored together.

    Returns classifier -> measure -> value, low, high (and "folds", the value in each), and "few
    shot" -> shots -> the same of accuracy, or cmAP of several classes, over draws of the examples.
    """
    scores: dict[str, list[np.ndarray]] = {"linear": [], "knn": []}
    run_scores = [test.scores for _, test in splits if test.scores is not None]
    if len(run_scores) == len(splits):
        scores["scores"] = run_scores
    for train, test in splits:
        _refuse_unlike(train, test)
        scores["linear"].append(linear(train.x, train.y, test.x, multilabel=train.multilabel))
        scores["knn"].append(nearest(train.x, train.y, test.x))
    y = np.concatenate([test.y for _, test in splits])
    weight = measures.bootstrap(len(y), draws)
    results: dict[str, Any] = {}
    for name, parts in scores.items():
        # Scores of folds come from different classifiers: each row is made comparable first.
        if len(parts) > 1 and name != "knn":
            joined = np.concatenate([softmax(part, axis=1) for part in parts])
        else:
            joined = np.concatenate(parts)
        results[name] = measures.summarised(joined, y, weight)
        if len(splits) > 1:
            for (_, test), part in zip(splits, parts, strict=True):
                for key, value in _values(part, test.y).items():
                    results[name][key].setdefault("folds", []).append(value)
    few_shot = {}
    for n in shots:
        values = [_few_shot(splits, n, seed) for seed in range(trials)]
        value = float(np.mean(values))
        low, high = np.percentile(values, [2.5, 97.5]).tolist()
        few_shot[str(n)] = {"value": value, "low": low, "high": high}
    of_recordings = evidence_of(splits)
    about = {**of_recordings.about(), "in words": of_recordings.lines()}
    return {**results, "few shot": few_shot, "evidence": about}


def evidence_of(splits: Sequence[tuple[Features, Features]]) -> evidence.Evidence:
    """Return the evidence of one (train, test) pair, or of one a fold."""
    tested: evidence.Recordings = {}
    shared: set[str] = set()
    for train, test in splits:
        of_test = evidence.recordings_of(test.folder, test.rows)
        shared |= of_test.keys() & evidence.recordings_of(train.folder, train.rows).keys()
        tested |= of_test
    return evidence.of(tested, shared)


def _few_shot(splits: Sequence[tuple[Features, Features]], shots: int, seed: int) -> np.floating:
    """Return the mean accuracy over splits, or cmAP of several classes, for a draw of examples."""
    measure = "cmAP" if splits[0][0].multilabel else "accuracy"
    values = []
    for train, test in splits:
        scores = prototypes(train.x, train.y, test.x, shots=shots, seed=seed)
        values.append(_values(scores, test.y)[measure])
    return np.mean(values)


def _values(scores: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return each measure of all rows."""
    measured = measures.measure(scores, y, np.ones((1, len(y))))
    return {name: float(value) for name, (value,) in measured.items()}


def _refuse_unlike(train: Features, test: Features) -> None:
    if train.y.shape[1] != test.y.shape[1] or train.multilabel != test.multilabel:
        raise InferenceError(
            f"the train rows have {train.y.shape[1]} classes, the test rows {test.y.shape[1]}, or"
            " only one of them has several for a recording; embed both with the same --label and"
            " --multilabel"
        )
    if train.x.shape[1] != test.x.shape[1]:
        raise InferenceError(
            f"the train rows have {train.x.shape[1]} features, the test rows {test.x.shape[1]};"
            " embed both with one run"
        )
    differences = []
    for name, value in train.front_end.items():
        if value != test.front_end[name]:
            differences.append(f"{name} {value} and {test.front_end[name]}")
    if differences:
        raise InferenceError(
            "the train and the test rows are of encoders with different front ends"
            f" ({', '.join(differences)}); embed both with one run"
        )


def folds_of(features: Features) -> list[tuple[Features, Features]]:
    """Return a pair for each fold: its rows to test on, all others to train on."""
    group = features.group
    assert group is not None  # as `read` with ``group`` leaves it

    splits = []
    for fold in np.unique(group):
        is_test = group == fold
        splits.append((_part(features, ~is_test), _part(features, is_test)))
    return splits


def _part(features: Features, rows: np.ndarray) -> Features:
    scores = None if features.scores is None else features.scores[rows]
    group = None if features.group is None else features.group[rows]
    return features._replace(
        x=features.x[rows],
        y=features.y[rows],
        scores=scores,
        group=group,
        rows=features.rows[rows],
    )


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each classifier of each named result."""
    lines = [
        "| features | classifier | " + " | ".join(MEASURES) + " |",
        "|---|---|" + "---:|" * len(MEASURES),
    ]
    other_cells = " |" * (len(MEASURES) - 1)
    for name, result in results.items():
        for classifier in CLASSIFIERS:
            if classifier in result:
                values = result[classifier]
                cells = [measures.percent(values[key], 1) for key in MEASURES]
                lines.append(f"| {name} | {classifier} | {' | '.join(cells)} |")
        for n, interval in result["few shot"].items():
            shots = "1 shot" if n == "1" else f"{n} shots"
            lines.append(f"| {name} | {shots} | {measures.percent(interval, 1)}{other_cells} |")
    notes = []
    for name, result in results.items():
        notes += [f"{name}: {line}" for line in result["evidence"]["in words"]]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Mapping[str, Any]], out: pathlib.Path) -> list[pathlib.Path]:
    """measures.png and few_shot.png, or nothing without matplotlib."""
    try:
        matplotlib = machine.package("matplotlib")
    except ModuleNotFoundError:
        print("no pictures: matplotlib is missing (pip install 'jaxtrain[plots]')", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    paths = [out / "measures.png", out / "few_shot.png"]
    _save_figure(_measures_figure(results), paths[0])
    _save_figure(_few_shot_figure(results), paths[1])
    return paths


def _measures_figure(results: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw a panel for each measure: a row for each result, a point for each classifier."""
    from matplotlib import pyplot

    height = 1.2 + 0.7 * len(results)
    size = (4 * len(MEASURES), height)
    figure, axes = pyplot.subplots(1, len(MEASURES), figsize=size, sharey=True)
    for axis, measure in zip(axes, MEASURES, strict=True):
        for offset, classifier in enumerate(CLASSIFIERS):
            heights = []
            intervals = []
            for i, result in enumerate(results.values()):
                if classifier in result:
                    heights.append(i + 0.2 * (offset - 1))
                    intervals.append(result[classifier][measure])
            if intervals:
                value, low, high = _percentages(intervals)
                axis.errorbar(
                    value,
                    heights,
                    xerr=np.abs([low - value, high - value]),
                    fmt="o",
                    capsize=3,
                    label=classifier,
                )
        axis.set_xlabel(f"{measure} [%]")
        axis.set_yticks(range(len(results)), list(results))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[-1].legend()
    return figure


def _few_shot_figure(results: Mapping[str, Mapping[str, Any]]) -> Any:
    """Draw a line for each result, over the number of examples."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for name, result in results.items():
        shots = [int(n) for n in result["few shot"]]
        value, low, high = _percentages(list(result["few shot"].values()))
        axis.plot(shots, value, "o-", label=name)
        axis.fill_between(shots, low, high, alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("examples of each class")
    axis.set_ylabel("nearest class mean [%]")
    axis.legend()
    return figure


def _percentages(intervals: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return value, low and high of each interval, float64 [3, n] %."""
    parts = [[interval[part] for interval in intervals] for part in ("value", "low", "high")]
    return 100 * np.array(parts)


def _save_figure(figure: Any, path: pathlib.Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    with atomic_write.file(path) as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)


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
