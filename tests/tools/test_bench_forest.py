"""The forest on MFCC that a page compares the folder's config with, and the corpora of both."""

import json
import re
import wave

import numpy as np
import pytest

from jaxtrain import cli
from jaxtrain import config as config_lib
from loaders.audio import demo
from tools import bench_forest, sound_corpora


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for kind in sound_corpora.CORPORA:
        sound_corpora.write(kind, folder / kind, classes=2, each=3)
    return folder


@pytest.mark.parametrize("kind", sound_corpora.CORPORA)
def test_a_corpus_is_the_same_every_time_and_no_file_is_another(corpora, tmp_path, kind):
    sound_corpora.write(kind, tmp_path, classes=1, each=2)
    again = [path.read_bytes() for path in sorted(tmp_path.rglob("*.wav"))]
    found = [path.read_bytes() for path in sorted((corpora / kind).rglob("*.wav"))]
    assert found[:2] == again and len(set(found)) == len(found) == 6
    with wave.open(str(next((corpora / kind).rglob("*.wav")))) as file:
        x = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert abs(x).max() == 30_000


def test_shards_become_files_of_a_table_that_index_reads(tmp_path):
    source = demo.ensure(tmp_path / "cache", n_train=4, n_test=2)
    sound_corpora.unpack(str(source), tmp_path / "birds", "ebird_code")
    table = tmp_path / "birds" / "table.csv"
    out = tmp_path / "index"
    assert cli.main(["index", str(table), "--audio", str(table.parent), "--out", str(out)]) == 0
    splits = json.loads((out / "index.json").read_text())["splits"]
    assert {split: found["rows"] for split, found in splits.items()} == {"train": 4, "test": 2}


def test_mfcc_are_the_cosine_transform_of_each_frame():
    rng = np.random.default_rng(0)
    x_fw = rng.normal(size=(9, 32))
    k, w = np.arange(20)[:, None], np.arange(32)[None]
    basis = np.cos(np.pi * (w + 0.5) * k / 32) * np.sqrt(np.where(k, 2, 1) / 32)
    cepstra = x_fw @ basis.T
    mean, deviation, change, _ = bench_forest.mfcc(x_fw).reshape(4, 20)
    np.testing.assert_allclose(mean, cepstra.mean(0), atol=1e-12)
    np.testing.assert_allclose(deviation, cepstra.std(0), atol=1e-12)
    np.testing.assert_allclose(change, (cepstra[-1] - cepstra[0]) / 8, atol=1e-12)


def test_the_bench_prints_the_accuracy_on_the_split_of_a_run(tmp_path, capsys):
    pytest.importorskip("sklearn")
    sound_corpora.write("words", tmp_path / "words", classes=3, each=12)
    out = str(tmp_path / "index")
    argv = ["index", str(tmp_path / "words"), "--out", out, "--split", "recording=0.4"]
    assert cli.main(argv) == 0
    config = config_lib.load(f"folder:{out}", [])
    train, test = (bench_forest.features(config.data, split) for split in ("train", "test"))
    assert len(train[1]) + len(test[1]) == 36 and train[0].shape[1] == 80
    capsys.readouterr()
    assert bench_forest.main([f"--config=folder:{out}", "--seeds=1"]) == 0
    printed = capsys.readouterr().out
    percent = float(re.search(r"forest on MFCC: ([\d.]+) %", printed)[1])
    assert percent > 60, "chance is 33 %"
    assert f"of {len(test[1])} rows" in printed
