"""Classes without a row to train on, and recordings that are trained and tested on, are named."""

import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from jaxtrain import cli
from loaders.audio import spectrogram
from loaders.base import Rows
from tests.support.processes import ROOT

RATE = 1000
EVENTS = """file,label,split
a.wav,robin,train
b.wav,robin,train
c.wav,robin,test
d.wav,wren,test
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doubts")
    (folder / "audio").mkdir()
    rng = np.random.default_rng(0)
    for name in "abcd":
        soundfile.write(folder / "audio" / f"{name}.wav", 0.1 * rng.standard_normal(8000), RATE)
    (folder / "events.csv").write_text(EVENTS)
    return folder


def index(folder, out, *options: str, table: str = "events.csv"):
    argv = ["index", str(folder / table), "--audio", str(folder / "audio"), "--out", str(out)]
    assert cli.main([*argv, *options]) == 0
    return str(out)


def loader_of(**settings):
    config = spectrogram.Config(label="label", threads=1, allow_debug_build=True, **settings)
    return spectrogram.make_loader(config, split="train", rows=Rows(1, ((0, 1),)), seed=0)


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_class_without_a_row_to_train_on_is_named(folder, tmp_path, capsys, multilabel):
    out = index(folder, tmp_path / "index")
    expected = "1 of 2 classes has no row to train on: 'wren' (1 to test on)"
    assert expected in capsys.readouterr().err
    assert cli.main(["index", "--show", out]) == 0
    assert expected in capsys.readouterr().out
    loader = loader_of(train=out, multilabel=multilabel)
    loader.close()
    assert loader.doubts() == [expected]


def test_a_listed_class_that_no_row_has_is_named(folder, tmp_path, capsys):
    (tmp_path / "classes.txt").write_text("robin\nwren\nowl\n")
    index(folder, tmp_path / "index", "--classes", str(tmp_path / "classes.txt"))
    assert "2 of 3 classes have no row to train on: 'wren' (1 to test on), 'owl'" in (
        capsys.readouterr().err
    )


def test_recordings_that_are_trained_and_tested_on_are_named(folder, tmp_path):
    (folder / "all.csv").write_text(EVENTS.replace(",test", ",train"))
    train = index(folder, tmp_path / "train", table="all.csv")
    test = index(folder, tmp_path / "test")
    loader = loader_of(train=train, test=test)
    loader.close()
    [doubt] = loader.doubts()
    assert doubt.startswith("2 of 2 recordings to test on are trained on, too")
    assert "c.wav" in doubt and "d.wav" in doubt


def test_windows_are_held_out_by_recording(folder, tmp_path):
    (folder / "all.csv").write_text(EVENTS.replace(",test", ",train"))
    train = index(folder, tmp_path / "train", "--windows", "1", table="all.csv")
    config = spectrogram.Config(train=train, label="", test_share=0.5, allow_debug_build=True)
    names = {}
    for split in ("train", "test"):
        names[split] = set(spectrogram.recordings(config, split=split, most=100))
    assert names["train"] and names["test"] and names["train"].isdisjoint(names["test"])
    loader = loader_of(train=train, test_share=0.5)
    loader.close()
    assert not any("to test on are trained" in doubt for doubt in loader.doubts())


@pytest.mark.slow
def test_plan_and_train_name_them(folder, tmp_path):
    out = index(folder, tmp_path / "index")
    config = [f"--config=folder:{out}", "--config.train.steps=1", "--config.train.batch=2"]
    told = {}
    for command in ("plan", "train"):
        argv = [sys.executable, "-m", "jaxtrain.cli", command, *config]
        environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        told[command] = done.stdout + done.stderr
        assert "1 of 2 classes has no row to train on: 'wren' (1 to test on)" in told[command]
    assert "this run has no other problem" in told["plan"]
