"""A field of the data that a config leaves open stays as a run's checkpoints have it."""

import dataclasses
import json
import logging

import pytest

from jaxtrain import config as config_lib
from jaxtrain.run import loop
from loaders.text import packing
from tests.support.documents import corpus

MODEL = dict(embed=16, depth=1, heads=2, mlp=16, vocab=1000, dtype="float32")


def config_of(folder, name, steps, **data):
    return config_lib.from_dict(
        {
            "workdir": str(folder / name),
            "workload": "jaxtrain.workloads.language",
            "loader": "loaders.text.tokens",
            "model": dict(MODEL),
            "data": {
                "sources": ({"path": str(folder / "x")},),
                "context": 64,
                "window": 64,
                "threads": 1,
                **data,
            },
            "train": {"steps": steps, "batch": 8, "eval_every": 0},
            "optim": {"schedule": "constant", "warmup": 0},
            "checkpoint": {"every": 2},
            "metrics": {"every": 1},
        }
    )


def losses(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {x["step"]: x["loss"] for x in records if x["split"] == "train"}


# 5: of another version's rule. 64: of none, as runs had before there was a limit
@pytest.mark.slow
@pytest.mark.parametrize("limit", [5, 64])
def test_a_resumed_run_keeps_its_limit_of_documents(tmp_path, caplog, limit, monkeypatch):
    corpus(tmp_path / "x", longest=6, n=2000)
    whole = loop.run(config_of(tmp_path, "whole", 4, documents=limit))
    loop.run(config_of(tmp_path, "parts", 2, documents=limit))
    monkeypatch.setattr(packing, "LIMITS", (32,))
    monkeypatch.setattr(packing, "MUCH", 1.0)
    config = config_of(tmp_path, "parts", 4)
    assert config.model.documents == 32
    with caplog.at_level(logging.INFO, "jaxtrain"):
        resumed = loop.run(config)
    assert "resuming from step 2" in caplog.text and resumed.step == whole.step == 4
    assert f"read as at the run's newest checkpoint: data.documents={limit}" in caplog.text
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")
    saved = json.loads((tmp_path / "parts" / "config.json").read_text())
    assert saved["data"]["documents"] == saved["model"]["documents"] == limit


def test_a_new_run_records_the_limit_that_its_documents_gave(tmp_path):
    corpus(tmp_path / "x")
    loop.run(config_of(tmp_path, "run", 2))
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["data"]["documents"] == saved["model"]["documents"] == 32


def test_a_recorded_limit_above_that_of_the_model_is_refused(tmp_path):
    corpus(tmp_path / "x")
    loop.run(config_of(tmp_path, "run", 2, documents=50))
    config = config_of(tmp_path, "run", 4)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, documents=40))
    with pytest.raises(config_lib.ConfigError, match="row of the data has up to 50"):
        loop.run(config)
