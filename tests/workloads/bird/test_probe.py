"""Measures match their definitions, row by row. Classifiers run on features with known answers.
Reports."""

import importlib.util
import json

import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.workloads.bird.commands import probe as command
from jaxtrain.workloads.bird.inference import logistic, measures, probe


def toy(n=60, classes=3, seed=0, spread=1.0):
    """Features around one corner for each class."""
    rng = np.random.default_rng(seed)
    label = np.arange(n) % classes
    x = 3 * np.eye(classes, 8)[label] + spread * rng.normal(size=(n, 8))
    return x.astype("f4"), np.eye(classes, dtype="u1")[label]


def slow_average_precision(score, y):
    found, before = 0.0, 0.0
    for threshold in sorted(set(score), reverse=True):
        taken = score >= threshold
        recall = y[taken].sum() / y.sum()
        found += (recall - before) * y[taken].mean()
        before = recall
    return found


def slow_auroc(score, y):
    pairs = [(a > b) + (a == b) / 2 for a in score[y == 1] for b in score[y == 0]]
    return np.mean(pairs)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("fast", "slow"),
    [(measures.average_precision, slow_average_precision), (measures.area_under_roc, slow_auroc)],
)
def test_measures_equal_their_definitions_for_every_bootstrap_draw(fast, slow, ties):
    rng = np.random.default_rng(0)
    score, y = rng.normal(size=40), rng.integers(0, 2, 40)
    score = np.round(score) if ties else score
    weight = measures.bootstrap(40, 20)
    for w, found in zip(weight, fast(score, y, weight), strict=True):
        # a draw has its rows as often as they were drawn
        rows = np.repeat(np.arange(40), w.astype(int))
        assert found == pytest.approx(slow(score[rows], y[rows]))
    assert (weight[0] == 1).all() and (weight.sum(1) == 40).all()


def test_classes_without_a_positive_do_not_count_and_no_call_rows_do():
    """As in BirdSet, a recording without a bird is a negative of each class, and is not a row of
    the accuracy."""
    score = np.array([[0.9, 0.1, 0.5], [0.8, 0.7, 0.5], [0.3, 0.2, 0.5], [0.95, 0.1, 0.5]])
    y = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]], "u1")
    found = {name: v[0] for name, v in measures.measure(score, y, np.ones((1, 4))).items()}
    first, second = (
        slow_average_precision(score[:, 0], y[:, 0]),
        slow_average_precision(score[:, 1], y[:, 1]),
    )
    assert found["cmAP"] == pytest.approx((first + second) / 2)
    assert found["AUROC"] == pytest.approx(
        (slow_auroc(score[:, 0], y[:, 0]) + slow_auroc(score[:, 1], y[:, 1])) / 2
    )
    # Row 0 is right, row 1 is not, row 2's best score is of class 2, row 3 has no class.
    assert found["accuracy"] == pytest.approx(1 / 3)


def test_an_interval_is_as_wide_as_the_binomials():
    rng = np.random.default_rng(0)
    y = np.eye(2, dtype="u1")[np.zeros(400, int)]
    score = np.where(rng.random((400, 1)) < 0.7, [[1.0, 0.0]], [[0.0, 1.0]])
    m = measures.summary(measures.accuracy(score, y, measures.bootstrap(400, 2000)))
    half = 1.96 * np.sqrt(m["value"] * (1 - m["value"]) / 400)
    assert m["high"] - m["value"] == pytest.approx(half, rel=0.15) and m["value"] - m[
        "low"
    ] == pytest.approx(half, rel=0.15)


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_linear_probe_is_at_its_minimum(multilabel):
    x, y = toy(spread=2.0)
    w, b = logistic.fit(x, y, 0.1, softmax=not multilabel)
    logits = x @ w + b
    e = np.exp(logits - logits.max(1, keepdims=True))
    p = 1 / (1 + np.exp(-logits)) if multilabel else e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(x.T @ (p - y) / 60 + 0.1 * w, 0, atol=2e-4)
    np.testing.assert_allclose((p - y).mean(0), 0, atol=2e-4)


def test_a_class_without_examples_is_the_least_likely():
    """A fold, or a part of the training rows, may lack a class that its held-out rows have."""
    x, y = toy()
    rows = y[:, 2] == 0
    for softmax in (True, False):
        w, b = logistic.fit(x[rows], y[rows], 0.1, softmax=softmax)
        z = x @ w + b
        assert (z.argmin(1) == 2).all() and (z[rows].argmax(1) == y[rows].argmax(1)).mean() > 0.9


def test_two_classes_have_the_minimum_of_a_softmax():
    x, y = toy(classes=2, spread=2.0)
    w, b = logistic.fit(x, y, 0.1, softmax=True)
    e = np.exp(x @ w + b)
    p = e / e.sum(1, keepdims=True)
    np.testing.assert_allclose(x.T @ (p - y) / 60 + 0.1 * w, 0, atol=2e-4)


def test_without_scikit_learn_the_command_says_how_to_install_it(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "sklearn" else found(name, *more),
    )
    for argv in (
        ["probe", "--train", "a", "--test", "b", "--out", "c"],
        ["fit", "a", "--out", "b.npz"],
        ["benchmark", "esc10", "run", "--data", "a", "--out", "b"],
        ["benchmark", "birdset", "HSN", "run", "--data", "a", "--out", "b", "--probe"],
    ):
        assert cli.main(argv) == 2
        assert (
            capsys.readouterr().err
            == "error: the package sklearn is missing; pip install 'jaxtrain[probe]'\n"
        )


def test_classifiers_find_what_is_there_and_nothing_in_noise():
    (x, y), (x_test, y_test) = toy(), toy(seed=1)
    for score in (
        probe.linear(x, y, x_test, multilabel=False),
        probe.linear(x, y, x_test, multilabel=True),
        probe.nearest(x, y, x_test),
        probe.prototypes(x, y, x_test, shots=8, seed=0),
    ):
        assert measures.accuracy(score, y_test, np.ones((1, 60)))[0] > 0.9
    noise = np.random.default_rng(2).normal(size=x.shape).astype("f4")
    blind = probe.linear(
        noise, y, np.random.default_rng(3).normal(size=x.shape).astype("f4"), multilabel=False
    )
    assert measures.accuracy(blind, y_test, np.ones((1, 60)))[0] < 0.6


def test_the_nearest_are_by_cosine():
    x, y = np.array([[1, 0], [0.9, 0.1], [-1, 0], [0, -1]], "f4"), np.eye(4, dtype="u1")
    found = probe.nearest(x, y, np.array([[2, 0.1]], "f4") + x.mean(0), k=2)
    assert set(np.flatnonzero(found[0])) == {0, 1} and found.sum() == pytest.approx(1)


def test_more_examples_are_better_and_a_class_without_any_is_last():
    (x, y), (x_test, y_test) = toy(spread=3.0, n=300), toy(seed=1, spread=3.0, n=300)
    rates = [
        np.mean(
            [
                measures.accuracy(
                    probe.prototypes(x, y, x_test, shots=n, seed=s), y_test, np.ones((1, 300))
                )
                for s in range(10)
            ]
        )
        for n in (1, 4, 32)
    ]
    assert rates[0] < rates[1] < rates[2]
    assert (
        probe.prototypes(x, y * np.array([1, 1, 0], "u1"), x_test, shots=2, seed=0)[:, 2] == -1
    ).all()


def folder(path, x, y, **extra):
    path.mkdir()
    meta = {
        "version": 1,
        "done": len(x),
        "rows": len(x),
        "class_names": ["a", "b", "c"],
        "multilabel": y.ndim == 2,
    }
    (path / "embeddings.json").write_text(json.dumps(meta))
    arrays = {
        "mean": x,
        "labels" if y.ndim == 2 else "label": y,
        "weight": np.ones(len(x), "f4"),
        **extra,
    }
    for name, z in arrays.items():
        np.save(path / f"{name}.npy", z)
    return str(path)


def test_the_command_writes_a_table_with_intervals_and_pictures(tmp_path, capsys):
    (x, y), (x_test, y_test) = toy(), toy(seed=1)
    weight = np.ones(60, "f4")
    weight[:5] = 0  # unreadable, and labelled at random
    label = np.where(weight > 0, y.argmax(1), 2 - y.argmax(1))
    train = folder(tmp_path / "train", x, label, weight=weight)
    test = folder(tmp_path / "test", x_test, y_test.argmax(1), scores=y_test.astype("f4"))
    out = tmp_path / "out"
    assert command.main(["--train", train, "--test", test, "--out", str(out), "--draws", "50"]) == 0
    found = json.loads((out / "results.json").read_text())["train"]
    assert found["linear"]["accuracy"]["value"] > 0.9 and found["scores"]["cmAP"]["value"] == 1
    assert (
        found["linear"]["accuracy"]["low"]
        <= found["linear"]["accuracy"]["value"]
        <= found["linear"]["accuracy"]["high"]
    )
    assert set(found["few shot"]) == {"1", "2", "4", "8", "16"}
    assert (out / "results.md").read_text().count("| train |") == 8 and (
        out / "measures.png"
    ).stat().st_size > 5000
    assert (out / "few_shot.png").exists() and "AUROC" in capsys.readouterr().out


def test_folds_are_predicted_from_the_others(tmp_path):
    x, y = toy()
    fold = np.arange(60) // 20
    source = folder(tmp_path / "all", x, y.argmax(1), fold=fold)
    splits = probe.folds_of(probe.read(source, group="fold"))
    assert [set(test.group) for _, test in splits] == [{0}, {1}, {2}] and all(
        len(train.x) == 40 for train, _ in splits
    )
    assert (
        command.main(
            ["--train", source, "--folds", "fold", "--out", str(tmp_path / "out"), "--draws", "20"]
        )
        == 0
    )
    found = json.loads((tmp_path / "out" / "results.json").read_text())["all"]["linear"]["accuracy"]
    assert len(found["folds"]) == 3 and found["value"] == pytest.approx(np.mean(found["folds"]))


def test_several_classes_are_judged_by_average_precision(tmp_path):
    x, y = toy(n=90)
    y = y | np.roll(y, 1, 1) * (np.arange(90) % 2)[:, None].astype("u1")
    source = folder(tmp_path / "all", x, y, fold=np.arange(90) // 30)
    found = probe.evaluate(
        probe.folds_of(probe.read(source, group="fold")), draws=20, shots=(4,), trials=2
    )
    assert found["linear"]["cmAP"]["value"] > 0.8 and found["few shot"]["4"]["value"] > 0.6


def test_folders_that_cannot_be_used_are_named(tmp_path, capsys):
    x, y = toy()
    good = folder(tmp_path / "good", x, y.argmax(1))
    unlabelled = folder(tmp_path / "unlabelled", x, np.full(60, -1))
    meta = tmp_path / "part" / "embeddings.json"
    folder(tmp_path / "part", x, y.argmax(1))
    meta.write_text(meta.read_text().replace('"done": 60', '"done": 8'))
    later = folder(tmp_path / "later", x, y.argmax(1))
    (tmp_path / "later" / "embeddings.json").write_text(
        meta.read_text().replace('"version": 1', '"version": 2')
    )
    for arguments, text in (
        (
            ["--train", later, "--test", good],
            "is of version 2, and this jaxtrain reads 1; embed again",
        ),
        (["--train", str(tmp_path / "none"), "--test", good], "make them with `jaxtrain embed`"),
        (
            ["--train", str(tmp_path / "part"), "--test", good],
            "rerun the same `jaxtrain embed` to resume",
        ),
        (["--train", unlabelled, "--test", good], "has no labels"),
        (["--train", good, "--folds", "fold"], "has no fold.npy"),
    ):
        assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert text in capsys.readouterr().err
