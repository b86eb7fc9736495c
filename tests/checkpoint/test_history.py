"""The best step and the step of the last progress, over restarts."""

import math
from types import SimpleNamespace

import pytest
from etils import epath

from jaxtrain.checkpoint import CheckpointError
from jaxtrain.checkpoint.history import Scores
from jaxtrain.config import Checkpoint


def scores(folder, best="-loss", min_delta=0.1):
    return Scores(epath.Path(folder) / "best.json", Checkpoint(best=best), min_delta)


def kept(policy, steps):
    return policy.should_preserve([SimpleNamespace(step=step) for step in steps], context=None)


def test_the_best_step_stays_and_progress_needs_more_than_min_delta(tmp_path):
    ours = scores(tmp_path)
    assert ours.progress is None and kept(ours, [1]) == [False]
    for step, loss in ((10, 2.0), (20, 1.95), (30, 1.8), (40, 1.9)):
        ours.add(step, {"loss": loss})
    assert kept(ours, [10, 20, 30, 40]) == [False, False, True, False]
    assert ours.progress == 30
    again = scores(tmp_path)  # as after a restart
    assert kept(again, [20, 30]) == [False, True] and again.progress == 30
    again.add(50, {"loss": 1.75})
    assert kept(again, [30, 50]) == [False, True] and again.progress == 30, (
        "better, but not by enough to be progress"
    )


def test_a_value_is_passed_by_a_better_one_alone(tmp_path):
    ours = scores(tmp_path)
    assert ours.has_passed(None) and not ours.has_passed(9.0), "before the first evaluation"
    ours.add(7, {"loss": 2.0})
    assert [ours.has_passed(least) for least in (2.5, 2.0, 1.5, None)] == [True, False, False, True]
    assert ours.described() == "the best loss, 2.0000, is of step 7, which is kept"


def test_a_target_is_reached_by_its_own_value_or_a_better_one(tmp_path):
    ours = scores(tmp_path)
    assert not ours.has_reached(9.0), "before the first evaluation"
    ours.add(7, {"loss": 2.0})
    reached = [ours.has_reached(target) for target in (2.5, 2.0, 1.5, None)]
    assert reached == [True, True, False, False]


@pytest.mark.parametrize("best", ["-loss", "loss"])
def test_a_value_that_is_not_finite_is_never_the_best_and_no_progress(tmp_path, best):
    ours, odd = scores(tmp_path, best), (math.nan, math.inf, -math.inf)
    for step, loss in enumerate(odd, 1):
        ours.add(step, {"loss": loss})
    assert kept(ours, [1, 2, 3]) == [False] * 3 and ours.progress == 1, (
        "patience counts from the first evaluation"
    )
    again = scores(tmp_path, best)  # best.json is read as it was written
    assert again.progress == 1 and "NaN" not in (tmp_path / "best.json").read_text()
    again.add(4, {"loss": 2.0})
    for step, loss in enumerate(odd, 5):
        again.add(step, {"loss": loss})
    assert (
        kept(scores(tmp_path, best), [1, 4, 5, 6, 7]) == [False, True, False, False, False]
        and again.progress == 4
    )


def test_a_value_in_the_file_that_is_not_finite_is_refused(tmp_path):
    (tmp_path / "best.json").write_text(
        '{"step": 5, "value": NaN, "metric": "loss", "progress": {"step": 5, "value": NaN}}'
    )
    with pytest.raises(CheckpointError, match="has no step with its value; remove it"):
        scores(tmp_path)


def test_another_metric_starts_a_new_best(tmp_path, caplog):
    scores(tmp_path).add(1, {"loss": 0.1})
    ours = scores(tmp_path, best="-perplexity")
    ours.add(2, {"perplexity": 5.0})
    assert kept(ours, [1, 2]) == [False, True] and "is of '-loss'" in caplog.text
    other = scores(tmp_path, best="perplexity")  # the largest value is the best from now on
    other.add(3, {"perplexity": 1.0})
    assert kept(other, [2, 3]) == [False, True] and other.progress == 3


@pytest.mark.parametrize(
    "content", ["", '{"step": 1', "[]", '{"step": 1}', '{"step": 1, "value": 2.0, "progress": 5}']
)
def test_a_damaged_best_step_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(CheckpointError, match="best.json .*remove it"):
        scores(tmp_path)


def test_the_largest_value_is_the_best_without_a_minus(tmp_path):
    ours = scores(tmp_path, best="accuracy", min_delta=0.0)
    for step, accuracy in ((1, 0.5), (2, 0.7), (3, 0.6)):
        ours.add(step, {"accuracy": accuracy})
    assert kept(ours, [1, 2, 3]) == [False, True, False]


def test_an_unknown_metric_is_an_error_that_lists_those_of_the_evaluation(tmp_path):
    with pytest.raises(CheckpointError, match="names 'loss'; an evaluation has accuracy, loss_2"):
        scores(tmp_path).add(1, {"loss_2": 1.0, "accuracy": 0.5})
    scores(tmp_path, best="").add(1, {})
    assert not (tmp_path / "best.json").exists()
