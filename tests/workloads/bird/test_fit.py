"""jaxtrain fit: a head from few examples that detect accepts, its report on held-out rows, labels
of tables, and refusals."""

import csv
import json
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain.workloads.bird.inference import (
    embeddings,
    fit,
    heads,
    labelled_rows,
    measures,
    review,
)
from loaders.audio.front_end import DEFAULT
from loaders.base import DataError
from tests.support import birds, chromium, corpus

RATE, CLIP = 32_000, 0.5
TONES = {"low": (200.0, 3_000.0), "high": (6_000.0, 14_000.0)}  # [Hz] of bands


def call(name: str, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Noise in a band."""
    spectrum = np.fft.rfft(rng.standard_normal(round(seconds * RATE)))
    hz = np.fft.rfftfreq(round(seconds * RATE), 1 / RATE)
    spectrum[(hz < TONES[name][0]) | (hz > TONES[name][1])] = 0
    wave = np.fft.irfft(spectrum, round(seconds * RATE))
    return (0.2 * wave / wave.std()).astype(np.float32)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run, and the embeddings of its recordings of 4 s, in which each window of 0.5 s holds one
    tone, the other, or none."""
    folder = tmp_path_factory.mktemp("world")
    run = birds.make_run(folder, embed=64, patch=(16, 16))
    truth = []
    rng = np.random.default_rng(0)
    for n in range(8):
        wave = corpus.noise(n, 4.0, RATE) * 0.03
        for i, what in enumerate(rng.permutation(["low", "low", "high", "high", "", "", "", ""])):
            at = i * CLIP
            truth.append((f"{n}.wav", at, at + CLIP, str(what)))
            if what:
                begin = round((at + 0.1) * RATE)
                wave[begin : begin + round(0.3 * RATE)] += call(str(what), 0.3, rng)
        (folder / "recordings" / ("new" if n >= 5 else "old")).mkdir(parents=True, exist_ok=True)
        soundfile.write(
            folder / "recordings" / ("new" if n >= 5 else "old") / f"{n}.wav", wave, RATE
        )
    argv = [
        "embed",
        str(run),
        "--recordings",
        str(folder / "recordings" / "old"),
        "--out",
        str(folder / "emb"),
        "--batch",
        "8",
    ]
    assert cli.main([*argv, "--kinds", "mean,patches"]) == 0
    return folder, run, truth


def labels(path, truth, per_class: int):
    """Labels some examples of each class from the old recordings, one a recording at a time."""
    lines = [("file", "start", "end", "label")]
    for what in (*TONES, ""):
        rows = [row for row in truth if row[3] == what and int(row[0][0]) < 5]
        rows = sorted(
            rows, key=lambda row: (sum(r[0] == row[0] and r[1] < row[1] for r in rows), row[0])
        )[:per_class]
        lines += [
            (f"old/{file}", start + 0.1, end - 0.1, label or "nothing")
            for file, start, end, label in rows
        ]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


@pytest.mark.parametrize("method", ["linear", "prototypes", "patches"])
def test_a_head_of_few_examples_detects_in_new_recordings(world, tmp_path, method, capsys):
    folder, run, truth = world
    table = labels(tmp_path / "labels.csv", truth, 5)
    argv = ["fit", str(folder / "emb"), "--labels", str(table), "--method", method]
    assert cli.main([*argv, "--out", str(tmp_path / "head.npz"), "--precision", "0.9"]) == 0
    told = capsys.readouterr().out
    assert "5 folds" in told and "high" in told
    argv = [
        run,
        folder / "recordings" / "new",
        "--out",
        tmp_path / "out",
        "--model",
        tmp_path / "head.npz",
        "--no-merge",
    ]
    birds.run_detect(*argv)
    rows = birds.scores_of(tmp_path / "out")
    expected = {(file, start): what or "nothing" for file, start, _, what in truth}
    y = np.array(
        [
            [expected[row["file"], row["start_time"]] == what for what in ("high", "low")]
            for row in rows
        ],
        np.float32,
    )
    z = np.array([[row[what] for what in ("high", "low")] for row in rows])
    average = [
        measures.average_precision(z[:, c], y[:, c], np.ones((1, len(y))))[0] for c in range(2)
    ]
    assert min(average) > 0.95, average
    # The thresholds in the head keep the requested precision.
    found = [
        row
        for row in birds.table(tmp_path / "out" / "detections.csv")
        if row["Common name"] in TONES
    ]
    right = [
        expected[row["File"].rpartition("/")[2], float(row["Start (s)"])] == row["Common name"]
        for row in found
    ]
    assert len(right) >= 8 and np.mean(right) >= 0.85
    # Another run's encoder is refused.
    other = birds.make_run(tmp_path)
    argv = [
        "detect",
        str(other),
        str(folder / "recordings"),
        "--out",
        str(tmp_path / "x"),
        "--model",
        str(tmp_path / "head.npz"),
    ]
    assert cli.main(argv) == 2 and "was fitted on 64 features" in capsys.readouterr().err


def test_a_full_disk_leaves_no_head(world, tmp_path, capsys, small_disk):
    folder, _, truth = world
    disk, table = small_disk(8), labels(tmp_path / "labels.csv", truth, 5)
    (disk / "ballast").write_bytes(bytes(8192))
    argv = [
        "fit",
        str(folder / "emb"),
        "--labels",
        str(table),
        "--method",
        "prototypes",
        "--out",
        str(disk / "head.npz"),
    ]
    assert cli.main(argv) == 2 and [path.name for path in disk.iterdir()] == ["ballast"]
    told = capsys.readouterr().err
    assert told.startswith(
        f"error: {disk / 'head.npz'} could not be written: No space left on device"
    ), told


def test_a_head_of_an_index_is_that_of_its_embeddings(world, tmp_path, capsys):
    """fit INDEX --run embeds its rows: of each recording, the annotated part. The embeddings stay,
    and are not recomputed."""
    folder, run, truth = world
    rows = [
        ("file", "start", "end", "label"),
        *((f"old/{f}", a, b, what) for f, a, b, what in truth if what and int(f[0]) < 5),
    ]
    with open(tmp_path / "events.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    index = tmp_path / "index"
    assert (
        cli.main(
            [
                "index",
                str(tmp_path / "events.csv"),
                "--audio",
                str(folder / "recordings"),
                "--out",
                str(index),
            ]
        )
        == 0
    )
    argv = ["fit", str(index), "--run", str(run), "--batch", "8", "--method", "prototypes"]
    assert cli.main([*argv, "--out", str(tmp_path / "head.npz")]) == 0
    made = embeddings.read(tmp_path / "head-embeddings")
    given = labelled_rows.own([made])
    assert given.names == ("high", "low") and given.exclusive and len(given.y) == len(rows) - 1
    places = made.places()
    told = {(f"old/{f}", a): what for f, a, _, what in truth}
    assert [told[each] for each in zip(places.paths, places.start, strict=True)] == [
        given.names[c] for c in given.y.argmax(1)
    ]
    # The row is embedded like the window of the same seconds in the whole recording.
    windows = embeddings.read(folder / "emb")
    where = {
        each: i
        for i, each in enumerate(zip(windows.places().paths, windows.places().start, strict=True))
    }
    same = [
        where[path.removeprefix("old/"), start]
        for path, start in zip(places.paths, places.start, strict=True)
    ]
    np.testing.assert_allclose(made.array("mean", 2), windows.array("mean", 2)[same], atol=1e-4)
    assert (
        cli.main(
            [
                "fit",
                str(made.folder),
                "--method",
                "prototypes",
                "--out",
                str(tmp_path / "again.npz"),
            ]
        )
        == 0
    )
    first, again = (heads.read(tmp_path / name) for name in ("head.npz", "again.npz"))
    assert first.digest == again.digest and first.encoder == again.encoder == made.encoder
    assert json.loads((made.folder / "embeddings.json").read_text())["examples_per_second"] > 0
    assert cli.main([*argv, "--out", str(tmp_path / "head.npz")]) == 0
    capsys.readouterr()
    assert json.loads((made.folder / "embeddings.json").read_text())["examples_per_second"] == 0, (
        "nothing was left to do"
    )
    for argv, text in (
        ([str(index)], "is an index of recordings; name the run that embeds it: --run RUN"),
        ([str(made.folder), "--run", str(run)], "none of the folders is an index"),
        ([str(index), "--run", str(run), "--split", "valid"], "without the split 'valid'"),
        ([str(index), "--run", str(tmp_path)], str(tmp_path)),
    ):
        assert cli.main(["fit", *argv, "--out", str(tmp_path / "x.npz")]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and text in told and told.count("\n") == 1, told


def fake(folder, x, y, names, groups=None, **about):
    """Embeddings, as `jaxtrain embed` would write them."""
    folder.mkdir()
    np.save(folder / "mean.npy", x.astype("f4"))
    np.save(folder / "label.npy", y.argmax(1))
    np.save(folder / "weight.npy", np.ones(len(x), "f4"))
    paths = [f"{g}.wav" for g in (groups if groups is not None else range(len(x)))]
    start = np.zeros(len(x)) + np.arange(len(x)) * 1.0
    rows = pa.table({"path": paths, "start": start, "end": start + 1.0, "clock": [None] * len(x)})
    pq.write_table(
        rows.cast(
            pa.schema({"path": "string", "start": "double", "end": "double", "clock": "string"})
        ),
        folder / "rows.parquet",
    )
    content = {
        "version": 1,
        "done": len(x),
        "rows": len(x),
        "class_names": names,
        "multilabel": False,
        "root": "",
        "encoder": "e",
        "front_end": DEFAULT.settings,
    }
    (folder / "embeddings.json").write_text(json.dumps({**content, **about}))
    return folder


def test_cross_validation_calibrates_and_finds_thresholds(tmp_path):
    """Two classes that overlap: scores are probabilities, and a threshold reaches the precision on
    unseen rows."""
    rng = np.random.default_rng(0)
    n = 1200
    label = rng.integers(0, 2, n)
    x = rng.normal(size=(n, 6)) + label[:, None] * np.array([0.9, 0, 0, 0, 0, 0])
    y = np.eye(2)[label]
    folder = embeddings.read(fake(tmp_path / "e", x[:600], y[:600], ["a", "b"]))
    fitted = fit.fit([folder], labelled_rows.own([folder]), precision=0.8)
    assert fitted.head.scores == "softmax" and fitted.folds == 5
    z = x[600:] @ fitted.head.arrays["w"] + fitted.head.arrays["b"]
    p = np.exp(z[:, 1]) / np.exp(z).sum(1)
    # The best possible score: the likelihood ratio of the two normals.
    best = 1 / (1 + np.exp(-(0.9 * x[600:, 0] - 0.405)))
    assert np.abs(p - best).mean() < 0.06
    said = p >= fitted.head.thresholds[1]
    assert 0.72 < y[600:, 1][said].mean() < 0.9 and said.mean() > 0.1
    at_chance = fit.threshold(p, y[600:, 1], 0.8)
    assert y[600:, 1][p >= at_chance].mean() >= 0.8


def test_a_threshold_between_classes_that_are_apart_lies_in_the_gap():
    """The threshold does not lie among the scores of the others, some of which a precision of 0.9
    would allow."""
    scores, y = (
        np.concatenate([np.linspace(1e-9, 1e-5, 60), np.linspace(0.8, 1, 40)]),
        np.repeat([0, 1], [60, 40]),
    )
    assert 0.3 < fit.threshold(scores, y, 0.9) < 0.8
    scores[0] = 0.9  # one of the others has the score of a positive
    assert 0.3 < fit.threshold(scores, y, 0.9) < 0.8 < fit.threshold(scores, y, 1.0)


def test_folds_keep_recordings_together(tmp_path):
    x, label = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) // 4 % 2
    groups = np.arange(40) // 4
    folder = embeddings.read(fake(tmp_path / "e", x, np.eye(2)[label], ["a", "b"], groups))
    given = labelled_rows.own([folder])
    fold = fit.folds_of(given, 0)
    assert sorted(set(fold)) == [0, 1, 2, 3, 4]
    assert all(len(set(fold[groups == g])) == 1 for g in set(groups))
    assert all(set(fold[label == c]) == {0, 1, 2, 3, 4} for c in (0, 1))


@pytest.mark.parametrize("method", ["linear", "prototypes", "patches"])
def test_a_class_may_be_absent_from_the_rows_outside_a_fold(tmp_path, method):
    y = np.array([[1, 0], [1, 1], [0, 1], [0, 0]])
    x = y @ np.eye(2, 6) + 0.1 * np.random.default_rng(0).normal(size=(4, 6))
    folder = fake(tmp_path / "e", x, y, ["a", "b"], multilabel=True)
    np.save(folder / "labels.npy", y.astype("u1"))
    np.save(folder / "patches.npy", x[:, None, None].astype("f2"))
    stored = embeddings.read(folder)
    examples = labelled_rows.own([stored])
    fold = fit.folds_of(examples, 0)
    assert set(fold[y[:, 1] > 0]) == {0} and set(fold) == {0, 1}
    fitted = fit.fit([stored], examples, method=method)
    assert fitted.folds == 2
    assert all(np.isfinite(array).all() for array in fitted.head.arrays.values())


def test_one_example_a_class_needs_no_folds_and_says_so(tmp_path, capsys):
    x = np.array([[1.0, 0, 0], [0, 1.0, 0]])
    folder = fake(tmp_path / "e", x, np.eye(2), ["a", "b"])
    assert (
        cli.main(["fit", str(folder), "--out", str(tmp_path / "h.npz"), "--method", "prototypes"])
        == 0
    )
    assert "no cross-validation" in capsys.readouterr().out
    head = heads.read(tmp_path / "h.npz")
    z = np.asarray(heads.logits("prototypes", head.arrays, x.astype("f4"), x.astype("f4")[:, None]))
    assert z.argmax(1).tolist() == [0, 1] and head.thresholds.tolist() == pytest.approx([0.9, 0.9])


def test_folds_go_by_recording_and_few_examples_say_how_few(tmp_path, capsys):
    """Class c is in one recording, of which there is a copy. Windows of class b overlap."""
    recordings = [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    label = np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 0, 0])
    x = np.random.default_rng(0).normal(size=(12, 3)) + 3 * np.eye(3)[label]
    folder = fake(tmp_path / "e", x, np.eye(3)[label], ["a", "b", "c"], recordings)
    rows = pq.read_table(folder / "rows.parquet")
    start = np.where(np.arange(12) == 7, 6.5, np.arange(12))
    content = [f"{8 if n == 9 else n}" for n in recordings]
    content[9] = content[8]
    rows = rows.set_column(1, "start", pa.array(start, pa.float64()))
    rows = rows.set_column(2, "end", pa.array(start + 1, pa.float64()))
    pq.write_table(rows.append_column("content", pa.array(content)), folder / "rows.parquet")
    given = labelled_rows.own([embeddings.read(folder)])
    assert given.recordings.tolist() == [7, 2, 1]
    assert given.apart.tolist() == [7, 2, 2]
    assert fit.folds_of(given, 0).max() == 1
    assert cli.main(["fit", str(folder), "--out", str(tmp_path / "h.npz")]) == 0
    told = capsys.readouterr().out
    assert "2 folds of 10 recordings, mean average precision" in told
    assert "of 2 of 3 classes" in told
    assert "not validated, as all examples are of one recording: c" in told
    assert "little evidence: b (2 examples in 2 recordings)" in told
    about = heads.read(tmp_path / "h.npz").about
    assert about["examples"] == [7, 2, 2] and about["recordings"] == [7, 2, 1]
    assert about["average_precision"][2] is None and about["average_precision"][0] > 0.5


def test_windows_of_one_event_are_one_example_and_no_validation(world, tmp_path, capsys):
    """A recording, and its copy under another name, with windows that overlap."""
    _, run, _ = world
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    for n in range(2):
        wave = corpus.noise(n, 0.501, RATE)
        soundfile.write(recordings / f"{n}.wav", wave, RATE)
    (recordings / "copy.wav").write_bytes((recordings / "0.wav").read_bytes())
    argv = ["embed", str(run), "--recordings", str(recordings), "--batch", "8"]
    assert cli.main([*argv, "--kinds", "mean", "--out", str(tmp_path / "e")]) == 0
    stored = embeddings.read(tmp_path / "e")
    assert stored.n == 3 and len(set(stored.recordings())) == 2
    table = tmp_path / "t.csv"
    table.write_text("file,start,end,label\n0.wav,0.1,0.2,owl\ncopy.wav,0.1,0.2,owl\n")
    argv = ["fit", str(tmp_path / "e"), "--labels", str(table), "--background", "4"]
    assert cli.main([*argv, "--out", str(tmp_path / "h.npz")]) == 0
    told = capsys.readouterr().out
    assert "no cross-validation: each class is in one recording" in told
    assert heads.read(tmp_path / "h.npz").about["recordings"] == [1]


def test_each_form_of_a_label_table_is_understood(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 3))
    folder = embeddings.read(fake(tmp_path / "e", x, np.eye(2)[[0] * 6], ["a", "b"], [0] * 6))
    (tmp_path / "t.csv").write_text(
        "file,start,end,label,answer\n0.wav,0,1,owl,yes\n0.wav,0.9,2,owl,no\n"
        "/elsewhere/0.wav,2.1,2.2,wren,x\n0.wav,3,4,owl,skip\n"
    )
    given = labelled_rows.of_table([folder], str(tmp_path / "t.csv"), background=1)
    assert (
        given.names == ("owl", "wren")
        and given.rows[0].tolist()[:3] == [0, 1, 2]
        and given.rows[0][3] in (4, 5)  # row 3 was skipped
    )
    assert given.y.tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]
    assert given.known.tolist() == [[1, 1], [1, 0], [1, 1], [1, 1]]
    assert not given.exclusive


def test_times_of_raven_that_may_count_over_several_files_are_refused(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 3))
    # rows of 0 to 3 s in the first recording, and of 3 to 6 s in the second
    data = fake(tmp_path / "e", x, np.eye(2)[[0] * 6], ["a", "b"], [0, 0, 0, 1, 1, 1])
    folder = embeddings.read(data)
    columns = "Selection\tBegin Time (s)\tEnd Time (s)\tBegin File\tAnnotation\n"
    path = tmp_path / "t.txt"
    path.write_text(f"{columns}1\t0.5\t1\t0.wav\towl\n2\t3.5\t4\t1.wav\twren\n")
    with pytest.raises(DataError, match="may count over all 2 files"):
        labelled_rows.of_table([folder], str(path))
    path.write_text(f"{columns}1\t0.5\t1\t0.wav\towl\n2\t2.9\t3.5\t1.wav\twren\n")
    assert labelled_rows.of_table([folder], str(path)).names == ("owl", "wren")


@pytest.mark.parametrize(
    ("text", "y", "known"),
    [
        (
            "file,start,end,owl,wren\n0.wav,0,1,1,0\n0.wav,1,2,0,1\n0.wav,2,3,0,0\n",
            [[1, 0], [0, 1], [0, 0]],
            [[1, 1]] * 3,
        ),
        (
            "file,start,end,label\n0.wav,0,1,owl\n0.wav,1,2,wren\n0.wav,2,3,\n",
            [[1, 0], [0, 1], [0, 0]],
            [[1, 1]] * 3,
        ),
        (
            "file,start,end,label\n0.wav,0,1,owl\n0.wav,1,2,wren\n0.wav,2,3,nocall\n",
            [[1, 0], [0, 1], [0, 0]],
            [[1, 1]] * 3,
        ),
        (
            "file,start,end,label,answer\n0.wav,0,1,owl,yes\n0.wav,1,2,wren,yes\n"
            "0.wav,2,3,No bird,yes\n0.wav,3,4,nocall,no\n",
            [[1, 0], [0, 1], [0, 0]],
            [[1, 1]] * 3,
        ),
        (
            "file,start,end,label,answer\n0.wav,0,0.3,owl,yes\n0.wav,0.5,1,owl,no\n"
            "0.wav,1,2,owl,no\n0.wav,2,3,wren,yes\n0.wav,3,4,wren,\n",
            [[1, 0], [0, 0], [0, 1]],
            [[1, 1], [1, 0], [1, 1]],
        ),
    ],
)
def test_rows_without_a_class_are_examples_and_one_yes_decides(tmp_path, text, y, known):
    folder = embeddings.read(
        fake(tmp_path / "e", np.ones((4, 3)), np.eye(2)[[0] * 4], ["a", "b"], [0] * 4)
    )
    (tmp_path / "t.csv").write_text(text)
    given = labelled_rows.of_table([folder], str(tmp_path / "t.csv"))
    assert (given.rows[0].tolist(), given.y.tolist(), given.known.tolist()) == ([0, 1, 2], y, known)


def test_labels_that_are_no_name_of_a_call_are_counted(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(6, 3))
    labels = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]] * 2)
    data = fake(tmp_path / "e", x, labels, ["nocall", "owl", "wren"], [0, 1, 2, 3, 4, 5])
    assert cli.main(["fit", str(data), "--out", str(tmp_path / "own.npz")]) == 0
    assert heads.read(tmp_path / "own.npz").names == ("owl", "wren")
    assert "the class 'nocall' has rows without a class" in capsys.readouterr().err
    lines = [f"{n}.wav,{label}" for n, label in enumerate(["nocall", "owl", "unknown"] * 2)]
    (tmp_path / "t.csv").write_text("\n".join(["file,label", *lines]) + "\n")
    table = ["fit", str(data), "--labels", str(tmp_path / "t.csv")]
    assert cli.main([*table, "--out", str(tmp_path / "t.npz")]) == 0
    assert heads.read(tmp_path / "t.npz").names == ("owl", "unknown")
    said = capsys.readouterr().err
    assert "no-label" in said and "t.csv:2: 'nocall'" in said
    assert "open-label" in said and "t.csv:4: 'unknown'" in said


@pytest.mark.parametrize(
    ("text", "y", "known"),
    [
        # an answer that is none makes its row neither an example nor a background
        (
            "file,start,end,label,validated\n0.wav,0,1,owl,present\n0.wav,1,2,owl,(not validated)\n"
            "0.wav,2,3,wren,no\n0.wav,3,4,owl,NA\n0.wav,3,4,wren,unsicher\n",
            [[1, 0], [0, 0]],
            [[1, 1], [0, 1]],
        ),
        # next to another answer it leaves its class open
        (
            "file,start,end,label,answer\n0.wav,0,1,owl,yes\n0.wav,0,1,wren,skip\n"
            "0.wav,1,2,wren,yes\n0.wav,2,2.4,owl,no\n0.wav,2.5,3,owl,unsure\n0.wav,3,4,,skip\n",
            [[1, 0], [0, 1]],
            [[1, 0], [1, 1]],
        ),
        (
            "file,start,end,owl,wren\n0.wav,0,1,1,unknown\n0.wav,1,2,0,1\n0.wav,2,3,0,\n"
            "0.wav,3,4,pending,NA\n",
            [[1, 0], [0, 1], [0, 0]],
            [[1, 0], [1, 1], [1, 0]],
        ),
        # a bit of a short call is neither
        (
            "file,start,end,label\n0.wav,0.95,1.2,owl\n0.wav,2.9,3.1,wren\n0.wav,2,3,owl\n",
            [[1, 0], [1, 1], [0, 1]],
            [[1, 1]] * 3,
        ),
    ],
)
def test_an_answer_that_is_none_makes_no_example(tmp_path, text, y, known):
    """Rows of 1 s of a recording of 6 s, of which the last two have no line."""
    folder = embeddings.read(
        fake(tmp_path / "e", np.ones((6, 3)), np.eye(2)[[0] * 6], ["a", "b"], [0] * 6)
    )
    (tmp_path / "t.csv").write_text(text)
    given = labelled_rows.of_table([folder], str(tmp_path / "t.csv"), background=9)
    assert given.y.tolist() == [*y, [0, 0], [0, 0]]
    assert given.known.tolist() == [*known, [1, 1], [1, 1]]
    assert given.rows[0].tolist()[-2:] == [4, 5]


def test_labels_of_other_recordings_are_counted(tmp_path, capsys):
    """A table with other column names. Half of it is about recordings without embeddings."""
    x = np.random.default_rng(0).normal(size=(6, 3))
    folder = fake(tmp_path / "e", x, np.eye(2)[[0] * 6], ["a", "b"], [0] * 6)
    lines = ["Begin File,Start (ms),End (ms),Species", "0.wav,0,1000,owl", "0.wav,2000,3000,wren"]
    lines += [f"typo{n}.wav,0,1000,owl" for n in range(2)] + [
        "0.wav,9000,9500,tit",
        "A/0.wav,4000,5000,owl",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    argv = [
        "fit",
        str(folder),
        "--labels",
        str(tmp_path / "t.csv"),
        "--out",
        str(tmp_path / "h.npz"),
        "--method",
        "prototypes",
    ]
    assert cli.main(argv) == 0
    told = capsys.readouterr()
    assert (
        "absent-recording: 3 (dropped)" in told.err and "t.csv:4: [0, 1) s of typo0.wav" in told.err
    )
    assert told.out.endswith(
        "3 rows used, 0 without a class; 3 absent-recording, listed in"
        f" {tmp_path / 'h-errors.csv'}\n"
    )
    assert heads.read(tmp_path / "h.npz").names == ("owl", "wren")
    assert len((tmp_path / "h-errors.csv").read_text().splitlines()) == 4
    (tmp_path / "t.csv").write_text("file,vogel,start,end\n0.wav,owl,0,1\n0.wav,wren,2,3\n")
    assert cli.main(argv) == 2 and "--label-column" in capsys.readouterr().err
    assert cli.main([*argv, "--label-column", "vogel"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,start,end,label\n9.wav,0,1,owl\n", "none of it is in"),
        (
            "file,start,end,label\n0.wav,x,1,owl\n",
            "t.csv:2 has 'x' as its 'start', which is no number",
        ),
        (
            "file,start,end,label,answer\n0.wav,0,1,owl,banana\n",
            "has 'banana' as its answer; expected yes, no or skip",
        ),
        ("file,start,end,label\n0.wav,0,1,owl;wren\n", "split it with --separator ';'"),
        ("a,b\n1,2\n", "expected file, start, end, label"),
        ("file,start,end,label\n0.wav,0,1,owl\n", "has no counter-example"),
        (
            "file,start,end,label\n/one/0.mp3,0,1,owl\n/two/0.mp3,1,2,wren\n",
            "'/two/0.mp3', another line '/one/0.mp3'",
        ),
        ("file,start,end,label\n0.wav,0,1,\n", "has no label in any line"),
        (None, "holds no embeddings"),
    ],
)
def test_an_error_is_one_line(tmp_path, capsys, text, said):
    folder = tmp_path / "none"
    if text is not None:
        folder = fake(tmp_path / "e", np.ones((3, 2)), np.eye(2)[[0] * 3], ["a", "b"], [0] * 3)
        (tmp_path / "t.csv").write_text(text)
    assert (
        cli.main(
            [
                "fit",
                str(folder),
                "--labels",
                str(tmp_path / "t.csv"),
                "--out",
                str(tmp_path / "h.npz"),
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1
    assert not (tmp_path / "h.npz").exists()


def test_search_finds_what_sounds_alike(world, tmp_path, capsys):
    folder, run, truth = world
    emb = str(folder / "emb")
    high = [(file, start) for file, start, _, what in truth if what == "high" and int(file[0]) < 5]
    new = next(row for row in truth if row[3] == "high" and int(row[0][0]) >= 5)
    query = f"{folder / 'recordings' / 'new' / new[0]}@{new[1]}"
    argv = [
        "search",
        emb,
        "--like",
        query,
        "--run",
        str(run),
        "--top",
        "8",
        "--out",
        str(tmp_path / "hits.csv"),
    ]
    assert cli.main(argv) == 0
    hits = birds.table(tmp_path / "hits.csv")
    assert len(hits) == 8 and sum((row["file"], float(row["start"])) in high for row in hits) >= 7
    # The scores are the cosines of all rows, and an example of another folder is found again.
    x = np.load(folder / "emb" / "mean.npy")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    at = int(hits[0]["row"])
    assert (
        cli.main(
            [
                "search",
                emb,
                "--like",
                f"{emb}@{at}",
                "--out",
                str(tmp_path / "again.csv"),
                "--top",
                "99",
            ]
        )
        == 0
    )
    again = birds.table(tmp_path / "again.csv")
    order = np.argsort(-(x @ x[at]), kind="stable")
    assert int(again[0]["row"]) == at and len(again) == len(x)
    np.testing.assert_allclose(
        [float(row["score"]) for row in again], (x @ x[at])[order], atol=2e-4
    )
    # The head's score of each row, the highest first.
    table = labels(tmp_path / "labels.csv", truth, 5)
    assert (
        cli.main(
            [
                "fit",
                emb,
                "--labels",
                str(table),
                "--out",
                str(tmp_path / "h.npz"),
                "--method",
                "patches",
            ]
        )
        == 0
    )
    assert (
        cli.main(
            [
                "search",
                emb,
                "--model",
                str(tmp_path / "h.npz"),
                "--class",
                "low",
                "--out",
                str(tmp_path / "low.csv"),
            ]
        )
        == 0
    )
    low = [(file, start) for file, start, _, what in truth if what == "low"]
    assert all(
        (row["file"], float(row["start"])) in low for row in birds.table(tmp_path / "low.csv")[:8]
    )
    other = birds.make_run(tmp_path)
    capsys.readouterr()
    for argv, text in (
        (["--like", query, "--run", str(other)], "is of the encoder"),
        (["--like", f"{emb}@999", "--run", str(run)], "has no row 999"),
        (["--like", emb], "name a row of it"),
        (["--like", "nothing.wav", "--run", str(run)], "nothing.wav: No such file"),
        (["--model", str(tmp_path / "h.npz")], "name one of them: --class"),
        (["--model", str(tmp_path / "h.npz"), "--class", "owl"], "names the class 'owl'"),
    ):
        assert cli.main(["search", emb, *argv]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and text in told and told.count("\n") == 1


def test_an_approximate_search_finds_the_same_rows_or_says_what_it_needs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 16))
    emb = fake(tmp_path / "emb", x, np.eye(2)[rng.integers(0, 2, 3000)], ["a", "b"])
    weight = np.ones(3000, "f4")
    weight[7] = 0  # cannot be decoded: never found
    np.save(emb / "weight.npy", weight)
    argv = ["search", str(emb), "--like", f"{emb}@7", f"{emb}@9", "--top", "10", "--out"]
    assert cli.main([*argv, str(tmp_path / "exact.csv")]) == 0
    monkeypatch.setitem(sys.modules, "usearch", None)
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    capsys.readouterr()
    assert cli.main([*argv, str(tmp_path / "x.csv"), "--approximate"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --approximate needs usearch: pip install 'jaxtrain[search]'\n"
    )
    monkeypatch.undo()
    pytest.importorskip("usearch")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    for name in ("first.csv", "second.csv"):  # created, and read again
        assert cli.main([*argv, str(tmp_path / name), "--approximate"]) == 0
    assert ("rows are in the index" in capsys.readouterr().err) and len(
        list((tmp_path / "cache" / "search").iterdir())
    ) == 1
    exact, first, second = (
        birds.table(tmp_path / f"{name}.csv") for name in ("exact", "first", "second")
    )
    assert (
        first == second and len({row["row"] for row in exact} & {row["row"] for row in first}) >= 9
    )
    assert first[0]["row"] == "9" and "7" not in {row["row"] for row in first}


def by_keys(items, out, judge) -> None:
    """Answers every window in the page, in a real browser, by its keys."""
    with birds.served(items, out) as server, chromium.Browser() as browser:
        browser.open(server.address)
        for number, item in enumerate(items):
            browser.until(birds.shown(number))
            answer, label = judge(item)
            browser.press("c" if label else answer[0])
            if label:
                browser.until("document.activeElement.id === 'name'")
                for key in (*label, "Enter"):
                    browser.press(key)
        until = time.monotonic() + 20
        while len(birds.table(out)) < len(items) and time.monotonic() < until:
            time.sleep(0.05)


@pytest.mark.parametrize(
    "page",
    [
        False,
        pytest.param(
            True,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
            ],
        ),
    ],
    ids=["answers", "keys in a browser"],
)
def test_answers_of_a_review_make_the_head_better(world, tmp_path, page):
    """Fit, detect, review, fit: with answers to the detections, average precision on new recordings
    rises."""
    folder, run, truth = world
    emb, old, new = (
        str(folder / "emb"),
        folder / "recordings" / "old",
        folder / "recordings" / "new",
    )
    expected = {(file, start): what for file, start, _, what in truth}
    # one example of each, and one wrong label
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        row = {what: next(r for r in truth if r[3] == what) for what in ("high", "low", "")}
        lines = [(*row["high"][:3], "high"), (*row["low"][:3], "low"), (*row[""][:3], "high")]
        csv.writer(file).writerows([("file", "start", "end", "label"), *lines])

    def precision(model) -> float:
        out = tmp_path / f"new-{model}"
        birds.run_detect(run, new, "--out", out, "--model", tmp_path / model)
        rows = birds.scores_of(out)
        each = [
            measures.average_precision(
                np.array([r[what] for r in rows]),
                np.array([expected[r["file"], r["start_time"]] == what for r in rows], np.float32),
                np.ones((1, len(rows))),
            )[0]
            for what in TONES
        ]
        return float(np.mean(each))

    argv = ["fit", emb, "--method", "linear", "--out"]
    assert (
        cli.main([*argv, str(tmp_path / "first.npz"), "--labels", str(tmp_path / "labels.csv")])
        == 0
    )
    birds.run_detect(
        run,
        old,
        "--out",
        tmp_path / "found",
        "--model",
        tmp_path / "first.npz",
        "--threshold",
        0,
        "--no-merge",
    )
    items = review.read(str(tmp_path / "found"), order="diverse")

    def judge(item) -> tuple[str, str]:
        what = expected[item.name, item.start]
        return "yes" if what else "no", what if what != item.label else ""

    if page:
        by_keys(items, tmp_path / "answers.csv", judge)
    else:
        session = review.Session(items, tmp_path / "answers.csv")
        for number, item in enumerate(items):
            session.answer(number, *judge(item))
    assert (
        cli.main([*argv, str(tmp_path / "second.npz"), "--labels", str(tmp_path / "answers.csv")])
        == 0
    )
    first, second = precision("first.npz"), precision("second.npz")
    assert second > first and second > 0.9, (first, second)
    # `jaxtrain index` reads the answers, too: a rejected detection is not a label.
    assert (
        cli.main(
            [
                "index",
                str(tmp_path / "answers.csv"),
                "--audio",
                str(old),
                "--out",
                str(tmp_path / "i"),
                "--on",
                "all=keep",
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "i" / "index.json").read_text())["classes"] == ["high", "low"]
