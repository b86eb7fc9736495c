"""The messages of a run about the state that it resumes from."""

import dataclasses
import json

import pytest

from jaxtrain.checkpoint import History, Restored
from jaxtrain.config import Config, Optim, Train, WarmStart
from jaxtrain.run import init_or_restore
from tests.support import runs


def resumed(tmp_path, caplog, before, now, *, step):
    """The warnings of a run with the config ``now``, resumed from ``step`` of a run with
    ``before``."""
    (tmp_path / "meta").mkdir(exist_ok=True)
    (tmp_path / "meta" / "metadata").write_text(json.dumps({"config": dataclasses.asdict(before)}))
    caplog.clear()
    with caplog.at_level("WARNING", "jaxtrain"):
        init_or_restore._report_schedule(now, Restored(None, step, History(), tmp_path))
    return caplog.text


def config(steps, **optim):
    return Config(train=Train(steps=steps), optim=Optim(lr=1e-3, warmup=10, **optim))


def test_a_longer_cosine_is_reported_as_another_schedule(tmp_path, caplog):
    text = resumed(tmp_path, caplog, config(100), config(200), step=100)
    assert "the schedule of the learning rate changes (train.steps from 100 to 200)" in text
    assert "at step 100 it is 0.000541, and was to be 0" in text
    text = resumed(tmp_path, caplog, config(100), config(100, lr_floor=0.1), step=60)
    assert "optim.lr_floor from 0.0 to 0.1" in text


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        (config(100), config(100), 60),
        (config(100, schedule="constant"), config(200, schedule="constant"), 100),
        (config(100), config(60), 60),  # this run has ended
        # no decay yet: both are in the stable phase
        (config(100, schedule="wsd"), config(300, schedule="wsd"), 50),
    ],
)
def test_an_unchanged_schedule_is_not_mentioned(tmp_path, caplog, before, now, step):
    assert not resumed(tmp_path, caplog, before, now, step=step)


def test_the_config_of_another_version_is_left_alone(tmp_path, caplog):
    (tmp_path / "meta").mkdir()
    for text in (
        "{}",
        '{"config": {"optim": {"learning_rate": 3}, "train": {"steps": 5}}}',
        "cut sho",
    ):
        (tmp_path / "meta" / "metadata").write_text(text)
        init_or_restore._report_schedule(config(100), Restored(None, 5, History(), tmp_path))
    assert not caplog.text


def test_every_process_starts_from_the_step_that_process_0_found(tmp_path, monkeypatch):
    """The source trains on: another process may see a newer step."""
    for step in (10, 20):
        runs.save(tmp_path, step, runs.state(0, step))
    rules = WarmStart(source=str(tmp_path))
    assert init_or_restore._exact(rules).source == str(tmp_path / "checkpoints" / "20")
    monkeypatch.setattr(init_or_restore.cluster, "agree", lambda step: 10)
    assert init_or_restore._exact(rules).source == str(tmp_path / "checkpoints" / "10")
