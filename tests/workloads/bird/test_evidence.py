"""Scores on recordings that a run was trained on are said to be no evidence, in the result."""

import csv
import json
import shutil

import numpy as np
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain.telemetry import training_sources
from jaxtrain.workloads.bird.inference import embeddings, evidence, heads, trained_on
from loaders.audio import spectrogram
from loaders.base import Rows
from tests.support import birds, corpus

RATE = 32_000
CLASSES = ("robin", "wren")


def write(folder, names, seed: int) -> None:
    """Recordings of 0.5 s, folder/CLASS/NAME.wav."""
    for n, name in enumerate(names):
        for c, label in enumerate(CLASSES):
            path = folder / label / f"{label}-{name}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            wave = corpus.noise(seed + 10 * n + c, 0.5, RATE) * 0.1
            wave += 0.3 * np.sin(np.arange(len(wave)) * (0.2 + 0.5 * c))
            soundfile.write(path, wave, RATE)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run on an index of "seen", and recordings of which some are copies of those."""
    folder = tmp_path_factory.mktemp("evidence")
    write(folder / "seen", "abc", seed=0)
    write(folder / "new", "abc", seed=500)
    for label in CLASSES:
        copy = folder / "seen" / label / f"{label}-a.wav"
        (folder / "new" / label / "renamed.wav").write_bytes(copy.read_bytes())
    assert cli.main(["index", str(folder / "seen"), "--out", str(folder / "index")]) == 0
    data = {"train": str(folder / "index"), "label": "label"}
    run = birds.make_run(folder, data=data)
    return folder, run


def embed(run, out, *argv) -> embeddings.Embeddings:
    args = ["embed", str(run), "--out", str(out), "--batch", "8", "--kinds", "mean,cls", *argv]
    assert cli.main(args) == 0
    return embeddings.read(out)


def labels(folder, out):
    """A table of the labels of new/ by its subfolders."""
    lines = [("file", "start", "end", "label")]
    for path in sorted((folder / "new").rglob("*.wav")):
        lines.append((f"{path.parent.name}/{path.name}", 0, 0.5, path.parent.name))
    with open(out, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return out


def test_what_a_run_was_trained_on_is_known_by_content_and_name(world, tmp_path):
    folder, run = world
    by_name = embed(run, tmp_path / "a", "--recordings", str(folder / "seen"))
    assert by_name.trained() == [True] * 6
    assert (
        embed(run, tmp_path / "b", "--recordings", str(folder / "new")).trained().count(True) == 6
    )
    data = spectrogram.Config(train=str(folder / "index"), label="label", test_share=0.0)
    loader = spectrogram.make_loader(data, split="train", rows=Rows(2, ((0, 2),)), seed=0)
    sources = list(loader.sources())
    loader.close()
    assert sources[0][0] == "robin/robin-a.wav" and sources[0][1] == 32_044
    training_sources.write(str(run), sources)
    training_sources.write(str(run), sources[:1])  # adds nothing
    try:
        by_content = embed(run, tmp_path / "c", "--recordings", str(folder / "new"))
    finally:
        (run / training_sources.FILE).unlink()
    is_copy = [name.endswith("renamed.wav") for name in by_content.places().paths]
    assert by_content.trained() == is_copy and sum(is_copy) == 2


def test_a_converted_recording_may_be_one_that_was_trained_on():
    names = [frozenset(["xc1"]), frozenset(), frozenset(["xc1.mp3"])]
    trained = trained_on.TrainedOn(frozenset([(9, "a")]), *names)
    other = (8, "b")
    assert trained.has("new/z.wav", (9, "a")) is True
    assert trained.has("new/XC1.flac", other) is None
    assert trained.has("new/XC1.mp3", other) is False and trained.has("XC2.wav", other) is False
    seen = evidence.of({"a": False, "b": None})
    assert evidence.of({"a": True, "b": None}).trained == 1
    assert "not known whether" in seen.lines()[0] and "converted" in seen.lines()[0]


def test_fit_says_so_of_its_own_validation(world, tmp_path, capsys):
    folder, run = world
    training_sources.write(str(run), [("robin/robin-a.wav", 32_044, "0" * 32)])
    embed(run, tmp_path / "unseen", "--recordings", str(folder / "new"))
    (run / training_sources.FILE).unlink()
    embed(run, tmp_path / "seen", "--recordings", str(folder / "new"))
    table = labels(folder, tmp_path / "t.csv")
    for name, trained in (("seen", 6), ("unseen", 0)):
        capsys.readouterr()
        argv = ["fit", str(tmp_path / name), "--labels", str(table), "--method", "prototypes"]
        assert cli.main([*argv, "--out", str(tmp_path / "h.npz")]) == 0
        told = capsys.readouterr().out
        expected = "no evidence: the run was trained on 6 of these 8 recordings"
        assert (expected in told) == bool(trained), told
        assert heads.read(tmp_path / "h.npz").about["trained_on"] == trained


def test_a_run_whose_data_are_gone_says_that_it_does_not_know(world, tmp_path, capsys):
    folder, _ = world
    run = birds.make_run(tmp_path)
    shutil.rmtree(tmp_path / "shards")
    stored = embed(run, tmp_path / "e", "--recordings", str(folder / "new"))
    assert set(stored.trained()) == {None}
    table = labels(folder, tmp_path / "t.csv")
    argv = ["fit", str(tmp_path / "e"), "--labels", str(table), "--method", "prototypes"]
    assert cli.main([*argv, "--out", str(tmp_path / "h.npz")]) == 0
    assert "it is not known whether the run was trained on" in capsys.readouterr().out


def test_probe_says_so_of_the_run_and_of_its_classifiers(world, tmp_path, capsys):
    folder, run = world
    embed(run, tmp_path / "e")
    argv = ["probe", "--train", str(tmp_path / "e"), "--test", str(tmp_path / "e"), "--draws", "5"]
    assert cli.main([*argv, "--out", str(tmp_path / "p")]) == 0
    told = capsys.readouterr().out
    first = "e: no evidence: the run was trained on 6 of these 6 recordings"
    second = "e: no evidence: 6 of these 6 recordings are among those that the classifier"
    assert first in told and second in told
    assert first in (tmp_path / "p" / "results.md").read_text()
    results = json.loads((tmp_path / "p" / "results.json").read_text())
    assert results["e"]["evidence"]["the run was trained on"] == 6
    assert results["e"]["evidence"]["the classifier was fitted on"] == 6


def test_a_benchmark_says_so(world, tmp_path, capsys):
    """ESC's folder with the recordings that the run was trained on."""
    folder, run = world
    (tmp_path / "esc" / "meta").mkdir(parents=True)
    (tmp_path / "esc" / "audio").mkdir()
    lines = [("filename", "fold", "category", "esc10")]
    for n, path in enumerate(sorted((folder / "seen").rglob("*.wav"))):
        (tmp_path / "esc" / "audio" / path.name).write_bytes(path.read_bytes())
        lines.append((path.name, n % 3, path.parent.name, "True"))
    with open(tmp_path / "esc" / "meta" / "esc50.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)
    argv = ["benchmark", "esc10", str(run), "--data", str(tmp_path / "esc"), "--draws", "5"]
    assert cli.main([*argv, "--batch", "8", "--out", str(tmp_path / "out")]) == 0
    assert "no evidence: the run was trained on 6 of these 6" in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["evidence"]["the run was trained on"] == 6
