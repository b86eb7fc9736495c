"""Classes with commas and semicolons survive every way in and out."""

import csv

import numpy as np
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain.workloads.bird.inference import InferenceError, detect, heads, review
from loaders.audio.recordings import class_names
from loaders.base import DataError
from tests.field.corpus import rows_of
from tests.support import birds, corpus

RATE = 32_000
NAMES = ("Cockerel, domestic", "warbler; marsh", "dog")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run, recordings of one class each, their labels, and a head that `fit` made of them."""
    folder = tmp_path_factory.mktemp("names")
    run = birds.make_run(folder)
    lines = [("file", "start", "end", "label")]
    for n in range(6):
        wave = corpus.noise(n, 0.5, RATE) * 0.05
        wave += 0.3 * np.sin(np.arange(len(wave)) * (0.1 + 0.4 * (n % 3)))
        (folder / "rec").mkdir(exist_ok=True)
        soundfile.write(folder / "rec" / f"{n}.wav", wave, RATE)
        lines.append((f"{n}.wav", 0.1, 0.4, NAMES[n % 3]))
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)
    argv = ["embed", str(run), "--recordings", str(folder / "rec"), "--batch", "8"]
    assert cli.main([*argv, "--kinds", "mean", "--out", str(folder / "emb")]) == 0
    argv = ["fit", str(folder / "emb"), "--labels", str(folder / "labels.csv")]
    argv += ["--separator", "none", "--method", "prototypes"]
    assert cli.main([*argv, "--out", str(folder / "head.npz")]) == 0
    return folder, run


def test_fit_and_index_ask_and_take_one_name(world, tmp_path, capsys):
    folder, _ = world
    assert heads.read(folder / "head.npz").names == tuple(sorted(NAMES))
    table = str(folder / "labels.csv")
    fit = ["fit", str(folder / "emb"), "--labels", table, "--out", str(tmp_path / "h.npz")]
    index = ["index", table, "--audio", str(folder / "rec"), "--out", str(tmp_path / "index")]
    for argv in (fit, index):
        assert cli.main(argv) == 2
        told = capsys.readouterr().err
        assert "or keep it as one name: --separator none" in told
    assert cli.main([*index, "--separator", "none"]) == 0
    assert {row[4] for row in rows_of(tmp_path / "index")} == {(name,) for name in NAMES}
    (tmp_path / "classes.txt").write_text('dog\n"warbler; marsh",Sumpfrohrs\nCockerel, domestic\n')
    assert cli.main([*index, "--classes", str(tmp_path / "classes.txt")]) == 0
    assert {row[4] for row in rows_of(tmp_path / "index")} == {(name,) for name in NAMES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cockerel, domestic", ["Cockerel, domestic"]),
        ("dog,Cockerel, domestic", ["Cockerel, domestic", "dog"]),
        ('"warbler; marsh",dog', ["dog", "warbler; marsh"]),
        ("warbler; marsh", ["warbler; marsh"]),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_detect_takes_the_names_of_some_classes(world, tmp_path, text, expected, is_file):
    folder, run = world
    names = text
    if is_file:
        names = tmp_path / "classes.txt"
        names.write_text("\n".join(class_names.split_names(text, NAMES)) + "\n")
    argv = [run, folder / "rec", "--model", folder / "head.npz", "--classes", names]
    birds.run_detect(*argv, "--out", tmp_path / "out")
    assert list(birds.scores_of(tmp_path / "out")[0])[4:] == expected


def test_tables_of_detect_and_answers_of_review_come_back(world, tmp_path, capsys):
    folder, run = world
    out = tmp_path / "out"
    argv = [run, folder / "rec", "--model", folder / "head.npz", "--threshold", 0]
    birds.run_detect(*argv, "--out", out)
    expected = {(name,) for name in NAMES}
    for source in ("raven", "audacity", "detections.csv"):
        argv = ["index", str(out / source), "--audio", str(folder / "rec")]
        assert cli.main([*argv, "--on", "shared-times=keep", "--out", str(tmp_path / source)]) == 0
        labels = {label for row in rows_of(tmp_path / source) for label in row[4]}
        assert {(label,) for label in labels} == expected, source
    items = review.read(str(out))
    session = review.Session(items, tmp_path / "answers.csv")
    assert set(session.labels) == set(NAMES)
    for number, item in enumerate(items):
        is_right = item.label == NAMES[int(item.name[0]) % 3]
        session.answer(number, "yes" if is_right else "no")
    session.answer(0, "yes", "a, b; c")
    for label in ("[a, b]", "NA", "-"):
        with pytest.raises(InferenceError, match="would be read as"):
            session.answer(0, "yes", label)
    argv = ["fit", str(folder / "emb"), "--labels", str(tmp_path / "answers.csv")]
    argv += ["--method", "prototypes", "--out", str(tmp_path / "h.npz")]
    assert cli.main(argv) == 0
    assert "a, b; c" in heads.read(tmp_path / "h.npz").names
    argv = ["index", str(tmp_path / "answers.csv"), "--audio", str(folder / "rec")]
    assert cli.main([*argv, "--out", str(tmp_path / "index")]) == 0
    assert "a, b; c" in {label for row in rows_of(tmp_path / "index") for label in row[4]}
    capsys.readouterr()


def test_a_file_of_classes_has_names_with_separators_in_quotes(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text('a;b\n"Cockerel, domestic";rooster\nc, d\n"e; f"\n')
    classes = class_names.read(str(path), {"c, d"})
    assert classes.names == ["a", "Cockerel, domestic", "c, d", "e; f"]
    assert classes.of("rooster") == "Cockerel, domestic" and classes.of("b") == "a"
    path.write_text('"Cockerel, domestic"\n\nCockerel, young\n')
    with pytest.raises(DataError, match=r"classes.txt:3 is 'Cockerel, young'; expected one name"):
        detect.read_classes(str(path))
    path.write_text('"Cockerel, domestic"\n"Cockerel, young"\n')
    assert detect.read_classes(str(path)) == ("Cockerel, domestic", "Cockerel, young")
    with pytest.raises(DataError, match="quote that does not end"):
        class_names.split_names('"a,b', ())
