"""The doctor and a replay notice data that are no longer those of the run."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain.doctor import data
from loaders.io import content

CONFIG = """
def get_config(corpus="corpus"):
    return dict(
        workload="jaxtrain.workloads.language", loader="loaders.text.tokens",
        model=dict(embed=8, depth=1, heads=2, mlp=8, dtype="float32"),
        data=dict(sources=(dict(path=corpus),), context=8, packing="concat"),
        train=dict(steps=3, batch=8, eval_every=0), optim=dict(lr=0.1, schedule="constant"),
        checkpoint=dict(every=1), metrics=dict(every=1, digest=True), workdir="run",
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run on two shards, and the same texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "RECENT", 0.0)
    pathlib.Path("cfg.py").write_text(CONFIG)
    for i in range(2):
        lines = [json.dumps({"text": f"text {i} {n}"}) + "\n" for n in range(40)]
        pathlib.Path(f"{i}.jsonl").write_text("".join(lines))
    make_tokens("0.jsonl", "1.jsonl")
    assert cli.main(["train", "--config=cfg.py"]) == 0
    return tmp_path


def make_tokens(*inputs):
    assert cli.main(["tokens", "corpus", *inputs, "--tokenizer=bytes"]) == 0


def findings():
    overrides: list[tuple[str, str]] = []
    checks = data.examine(
        source="cfg.py", overrides=overrides, process=0, processes=1, wanted=0.0
    ).checks
    return {check.name: (check.verdict, check.text) for check in checks}


def rot():
    """Change half of each shard, and note its times as if nothing had changed."""
    for path in pathlib.Path("corpus").glob("*.tokens"):
        tokens = np.fromfile(path, np.uint16)
        tokens[::2] = ord("x")
        tokens.tofile(path)
    parts_of = {}
    for i in range(2):
        names = (f"0000{i}.tokens", f"0000{i}.docs")
        parts_of[f"0000{i}"] = [pathlib.Path("corpus") / name for name in names]
    for cached in pathlib.Path("cache/digests").iterdir():
        entries = json.loads(cached.read_text())
        for name in entries:
            entries[name][0] = content._stamp(parts_of[name])
        cached.write_text(json.dumps(entries))


def test_the_doctor_compares_the_data_with_their_records_and_with_the_checkpoint(folder):
    checks = findings()
    assert checks["content"][0] == "ok" and "2 of 2 shards were read whole" in checks["content"][1]
    assert checks["resume"] == ("ok", "the data are those of checkpoint 3")
    shutil.rmtree("corpus")
    make_tokens("1.jsonl", "0.jsonl")
    verdict, text = findings()["resume"]
    assert verdict == "fail" and "run/checkpoints/3 was trained on other data or in another" in text


def test_damage_that_no_start_sees_is_named_by_the_doctor_and_by_a_replay(folder, capsys):
    rot()
    verdict, text = findings()["content"]
    assert verdict == "fail" and "is not the file that tokens.json records" in text
    assert cli.main(["replay", "run", "--step", "3", "--no-page"]) == 1
    said = capsys.readouterr().out
    assert "step 3 differs: digest" in said
    assert "the data have changed: corpus/0000" in said
