"""Benchmarks by name: torchmetrics' numbers, archives as they are published, classes by name, five
folds."""

import csv
import json
import pathlib
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain import cli
from jaxtrain.workloads.bird.commands import benchmark as command
from jaxtrain.workloads.bird.inference import benchmark
from tests.support import birds, corpus

DATA = pathlib.Path(__file__).parents[2] / "data" / "benchmark"
RATE = 32_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step that knows three classes."""
    return birds.make_run(tmp_path_factory.mktemp("run"), class_names=birds.NAMES)


def test_measures_are_torchmetrics():
    golden = np.load(DATA / "measures.npz")
    found = benchmark.scored(golden["scores"], golden["y"], draws=50)
    for name in ("cmAP", "AUROC", "accuracy"):
        assert found[name]["value"] == pytest.approx(float(golden[name]), abs=1e-6), name
        assert found[name]["low"] < found[name]["value"] < found[name]["high"]


def archive(folder: pathlib.Path, name: str, n: int) -> pathlib.Path:
    """A set of BirdSet as it is published: a tar file and metadata of each split."""
    folder.mkdir()
    for split, tag in (("train", "train"), ("test_5s", "test5s")):
        rows = []
        with tarfile.open(folder / f"{name}_{tag}_shard_0001.tar.gz", "w:gz") as tar:
            for i in range(n):
                file = f"{tag}{i}.wav"
                (folder.parent / file).write_bytes(corpus.wav(i + 100 * (tag == "train"), 0.6))
                tar.add(folder.parent / file, file)
                codes = [[], ["wren"], ["chiffchaff", "owl"], ["wren", "owl"]][i % 4]
                single = (codes or ["wren"])[0] if split == "train" else None
                rows.append(
                    dict(
                        filepath=file,
                        ebird_code=single,
                        ebird_code_multilabel=codes,
                        start_time=None,
                        end_time=None,
                    )
                )
        schema = pa.schema(
            [
                ("filepath", pa.string()),
                ("ebird_code", pa.string()),
                ("ebird_code_multilabel", pa.list_(pa.string())),
                ("start_time", pa.float64()),
                ("end_time", pa.float64()),
            ]
        )
        pq.write_table(
            pa.Table.from_pylist(rows, schema), folder / f"{name}_metadata_{split}.parquet"
        )
    return folder


def test_a_set_of_birdset_as_its_archive_publishes_it(run, tmp_path, capsys):
    place = archive(tmp_path / "HSN", "HSN", 8)
    args = [
        "benchmark",
        "birdset",
        "HSN",
        str(run),
        "--data",
        str(place),
        "--batch",
        "8",
        "--draws",
        "20",
    ]
    assert cli.main([*args, "--out", str(tmp_path / "own")]) == 0
    told = capsys.readouterr().out
    assert (
        "HSN, 8 segments (6 with a bird), 3 classes, by the run's own head" in told
        and "cmAP" in told
    )
    assert "1 classes are none of the run's, and count as never heard: owl" in told
    assert "the published HSN has 21 classes" in told
    found = json.loads((tmp_path / "own" / "results.json").read_text())

    # Computed by hand: the logits of the classes by their names, all segments, and the formula's
    # result.
    out = tmp_path / "own" / "embeddings" / "test_5s"
    logits, y = np.load(out / "scores.npy"), np.load(out / "labels.npy")
    assert json.loads((out / "embeddings.json").read_text())["class_names"] == [
        "chiffchaff",
        "owl",
        "wren",
    ]
    order = {name: i for i, name in enumerate(birds.NAMES)}
    ap = []
    for c, name in enumerate(("chiffchaff", "owl", "wren")):
        score = logits[:, order[name]] if name in order else np.zeros(len(logits))
        thresholds = np.unique(score)[::-1]
        precision = [y[score >= t, c].mean() for t in thresholds]
        recall = [y[score >= t, c].sum() / y[:, c].sum() for t in thresholds]
        ap.append((np.diff([0, *recall]) * precision).sum())
    assert found["cmAP"]["value"] == pytest.approx(np.mean(ap), abs=1e-6)
    own = logits[:, [order["chiffchaff"], order["wren"]]].argmax(1)
    has = y.any(1)
    right = y[:, [0, 2]][np.arange(len(y)), own] > 0
    assert found["top-1"]["value"] == pytest.approx(right[has].mean())

    assert cli.main([*args, "--out", str(tmp_path / "probed"), "--probe"]) == 0
    assert "by a linear probe on its train split" in capsys.readouterr().out
    args[2] = "POW"
    assert cli.main([*args, "--out", str(tmp_path / "other")]) == 2
    assert "and nothing of POW; name the set that is there" in capsys.readouterr().err


def test_esc10_in_five_folds_as_its_archive_publishes_it(run, tmp_path, capsys):
    folder = tmp_path / "ESC-50"
    for name in ("audio", "meta"):
        (folder / name).mkdir(parents=True)
    lines = []
    for i in range(20):
        file = f"{i % 5 + 1}-{i}-A-{i % 2}.wav"
        (folder / "audio" / file).write_bytes(corpus.wav(i, 0.6))
        lines.append([file, i % 5 + 1, i // 5 % 2, ("dog", "rain")[i // 5 % 2], i < 10 or i >= 15])
    with (folder / "meta" / "esc50.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filename", "fold", "target", "category", "esc10"), *lines])
    args = [
        "benchmark",
        "esc10",
        str(run),
        "--data",
        str(folder),
        "--out",
        str(tmp_path / "out"),
        "--batch",
        "8",
        "--draws",
        "20",
    ]
    assert cli.main(args) == 0
    told = capsys.readouterr().out
    assert "esc10, 15 clips of 2 classes in 5 folds" in told and "compare with no table" in told
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(found["linear"]["folds"]) == 5 and found["linear"]["value"] == pytest.approx(
        np.mean(found["linear"]["folds"])
    )
    (folder / "meta" / "esc50.csv").write_text("name,fold\na.wav,1\n")
    assert cli.main([*args[:-6], "--out", str(tmp_path / "none")]) == 2
    assert "is not ESC's table (filename, fold, category, esc10)" in capsys.readouterr().err


def test_the_sets_are_birdsets():
    assert set(command.SETS) == set(benchmark.SETS)
