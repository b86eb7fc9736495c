"""Classes of an evaluation: the stored counts, the meaning of intervals, and the checks of lines
from elsewhere."""

import json

import numpy as np
import pytest

from jaxtrain.telemetry.report import class_scores
from jaxtrain.telemetry.report.run import Run
from tests.support.reports import counted


def test_a_line_holds_the_counts_of_many_classes_in_few_bytes():
    rng = np.random.default_rng(0)
    own = rng.integers(0, 409, 5000)
    answer = np.where(rng.random(5000) < 0.7, own, rng.integers(0, 409, 5000))
    found = class_scores.line(*counted(own, answer, 409))
    assert (found["n"], found["classes"], sum(found["right"])) == (
        5000,
        409,
        int((own == answer).sum()),
    )
    assert (
        found["rows"] == np.bincount(own, minlength=409).tolist() and len(json.dumps(found)) < 8_000
    )
    counts = [count for _, _, count in found["confused"]]
    assert counts == sorted(counts, reverse=True) and len(counts) == class_scores.MAX_PAIRS
    for a, b, count in found["confused"][:20]:
        assert a != b and count == ((own == a) & (answer == b)).sum()
    # more classes than a line holds: those with the most rows stay
    rare = np.stack([np.arange(1000.0)] * 3)
    found = class_scores.line(rare, None)
    assert (
        found["of"] == list(range(488, 1000)) == found["rows"]
        and "confused" not in found
        and found["classes"] == 1000
    )


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (0, 20, 0.0, 0.1611),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_intervals_are_wilsons(right, of, low, high):
    """The ends are the shares p at which right / of is exactly 1.96 deviations of p away."""
    assert class_scores.interval(right, of) == pytest.approx((low, high), abs=1e-4)
    for p in class_scores.interval(right, of):
        assert abs(right / of - p) == pytest.approx(
            class_scores.Z * np.sqrt(p * (1 - p) / of), abs=1e-9
        )


def test_invalid_lines_are_left_out(tmp_path):
    good = class_scores.line(*counted(np.array([0, 0, 1]), np.array([0, 1, 1]), 2))
    odd = [
        {"rows": [1]},
        {"right": [2, 9]},
        {"confused": [[0, 7, 1]]},
        {"confused": [[0, 1]]},
        {"n": 1},
        {"rows": ["x", 1]},
        {"of": 7},
    ]
    lines = [{"step": i, **good, **change} for i, change in enumerate([*odd, {"of": [0]}, {}])]
    (tmp_path / "classes.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines) + '[]\n{"step": 9, "n"'
    )
    found = class_scores.read(tmp_path / "classes.jsonl")
    assert list(found) == [8] and found[8]["confused"] == [[0, 1, 1]]
    assert class_scores.read(tmp_path / "none") == {}


def test_the_matrix_shows_the_names_of_classes_in_full(tmp_path):
    names = ["Acrocephalus schoenobaenus (song)", "Acrocephalus schoenobaenus (call)"]
    (tmp_path / "config.json").write_text(json.dumps({"model": {"class_names": names}}))
    counts = class_scores.line(*counted(np.array([0, 0, 1]), np.array([0, 1, 1]), 2))
    (tmp_path / "classes.jsonl").write_text(json.dumps({"step": 8, **counts}) + "\n")
    html = class_scores.section(Run(tmp_path, "run"))
    matrix = html.partition('class="matrix"')[2].partition("</table>")[0]
    for name in names:  # as a class and as an answer
        assert matrix.count(f">{name}</th>") == 2
