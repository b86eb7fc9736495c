"""Recordings with samples that are no numbers are named: by index, and by what reads their rows."""

import json
import logging

import numpy as np
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain.telemetry.unreadable import Unreadable
from loaders.audio import spectrogram
from loaders.base import Rows

RATE = 1000
VALUES = {"nan": np.nan, "infinite": -np.inf, "huge": 1e20}
FORMATS = {"wav": ("WAV", "FLOAT"), "w64": ("W64", "DOUBLE"), "aiff": ("AIFF", "FLOAT")}


def write(path, value=None, form="wav", channels=1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(list(path.name.encode()))
    samples = 0.1 * rng.standard_normal((3000, channels))
    if value is not None:
        samples[2345, -1] = value
    container, subtype = FORMATS[form]
    soundfile.write(path, samples, RATE, format=container, subtype=subtype)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("channels", [1, 2])
def test_index_names_the_recording(tmp_path, capsys, value, form, channels):
    write(tmp_path / "rec" / "robin" / f"bad.{form}", VALUES[value], form, channels)
    write(tmp_path / "rec" / "wren" / "a.wav")
    out = tmp_path / "out"
    argv = ["index", str(tmp_path / "rec"), "--out", str(out)]
    assert cli.main(argv) == 2
    told = capsys.readouterr().err
    assert "not-finite: 1 (refused)" in told
    assert f"robin/bad.{form}: 1 of 3000 samples are NaN, infinite or beyond 1e12" in told
    assert "the first at 2.345 s" in told
    assert cli.main([*argv, "--on", "not-finite=keep"]) == 0
    assert cli.main([*argv, "--on", "not-finite=keep"]) == 0, "from the headers that are kept"
    assert json.loads((out / "index.json").read_text())["errors"]["not-finite"] == 1


def test_a_loader_counts_it_by_the_name_of_its_file(tmp_path, caplog):
    for name in "abc":
        write(tmp_path / "rec" / "wren" / f"{name}.wav")
    bad = tmp_path / "rec" / "robin" / "bad.wav"
    write(bad, np.nan)
    out = tmp_path / "out"
    argv = ["index", str(tmp_path / "rec"), "--out", str(out), "--on", "not-finite=keep"]
    assert cli.main(argv) == 0
    config = spectrogram.Config(
        train=str(out),
        label="label",
        test_share=0.0,
        threads=1,
        clip_seconds=3.0,
        bad_budget=0.5,
        allow_debug_build=True,
    )
    loader = spectrogram.make_loader(config, split="train", rows=Rows(4, ((0, 4),)), seed=0)
    unreadable = Unreadable("to train on")
    with caplog.at_level(logging.WARNING, logger="jaxtrain"):
        for _ in range(3):
            next(loader)
            unreadable.look(loader.diagnostics())
        unreadable.close()
    loader.close()
    lines = caplog.text.splitlines()
    assert len(lines) == 2 and lines[1].count("1 examples to train on could not be used") == 1
    assert f"an example to train on cannot be used: {bad}: " in lines[0]
    assert "NaN" in lines[0] and "row" not in lines[0].rpartition("bad.wav")[2]
