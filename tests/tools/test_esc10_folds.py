"""The comparison of objectives: its configs and its margins."""

import json
import pathlib
import runpy

import numpy as np
import pytest

from jaxtrain.workloads.bird import model as bird
from tools import esc10_folds

CONFIG = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "configs" / "esc10_folds.py"))


def test_there_is_a_config_for_every_objective_and_none_for_others():
    assert set(bird.OBJECTIVES) == set(esc10_folds.OBJECTIVES)
    assert set(CONFIG["OBJECTIVES"]) == {*esc10_folds.OBJECTIVES, esc10_folds.ALONE}
    for objective in CONFIG["OBJECTIVES"]:
        config = CONFIG["get_config"](f"/esc10,{objective},2")
        on = [name for name in bird.OBJECTIVES if config.model.get(name, {}).get("weight")]
        assert on == [objective.removesuffix("_long")] and config.data.train == "/esc10/*/*.arrow"
        assert config.data.clip_seconds == config.data.n_frames * 5 / 512
    for bad in ("/esc10", "/esc10,none,1", "/esc10,mae,6", ",mae,1"):
        with pytest.raises(ValueError, match="is not PATH,OBJECTIVE,FOLD"):
            CONFIG["get_config"](bad)


def test_the_folds_leave_out_every_recording_once():
    """test/ is fold 5 and comes first. The shards of train/ are folds 1 to 4."""
    left_out = [CONFIG["get_config"](f"/esc10,diet,{fold}").data.exclude for fold in range(6)]
    assert left_out[0] == () and sorted(sum(left_out, ())) == list(range(400))
    assert left_out[5][0] == 0 and left_out[1][0] == 80 and left_out[4][-1] == 399


def test_a_run_with_other_overrides_is_not_reused(tmp_path, capsys):
    (tmp_path / "mae_1").mkdir()
    noted = {"path": "/esc10", "overrides": ["--config.train.steps=9"], "cpu_seconds": 3.5}
    (tmp_path / "mae_1" / "finished.json").write_text(json.dumps(noted))
    assert esc10_folds.train("/esc10", "mae", 1, tmp_path, ["--config.train.steps=9"]) == 3.5
    with pytest.raises(
        SystemExit, match="mae_1 was trained on /esc10 with .*steps=9.*choose another --out"
    ):
        esc10_folds.main(
            [
                "/esc10",
                "--out",
                str(tmp_path),
                "--folds",
                "1",
                "--objectives",
                "mae",
                "--config.train.steps=8",
            ]
        )
    with pytest.raises(SystemExit):
        esc10_folds.main(["/esc10", "--steps=8"])
    assert "unrecognized arguments: --steps=8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        esc10_folds.main(["/esc10", "--objectives=mae,supervised_long"])
    assert "give it alone" in capsys.readouterr().err


def test_a_margin_is_of_the_same_recordings():
    """Two classifiers that are right on nearly the same recordings differ by less than the width of
    either's own interval."""
    rng = np.random.default_rng(0)
    random = rng.random(400) < 0.6
    better = random | (rng.random(400) < 0.1)
    found = esc10_folds.margins({"random": random, "mae": better}, np.zeros(400, int), 500)["mae"]
    assert set(found) == {"value", "low", "high"}
    assert found["value"] == pytest.approx(better.mean() - random.mean(), abs=1e-6)
    assert 0 < found["low"] < found["value"] < found["high"] and found["high"] - found["low"] < 0.08
