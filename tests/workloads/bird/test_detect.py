"""jaxtrain detect: scores equal the head's, tables read back as the same rows, resuming, broken
files, refusals."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.inference import detect, detections, encoder, heads
from loaders.audio import spectrogram
from loaders.audio.recordings import windows
from tests.hostile import damage
from tests.support import corpus
from tests.support.birds import CLIP, NAMES, make_run, run_detect, scores_of, table

BIRD = dict(workload="jaxtrain.workloads.bird", loader="loaders.audio.spectrogram")
ROOT = pathlib.Path(__file__).parents[3]
RATE, HOP = 32_000, 0.25
# name, seconds, rate, channels, format
FILES = (
    ("a/20240501_053000.wav", 3.1, 32_000, 1, "WAV"),
    ("a/deep/b.flac", 2.0, 48_000, 2, "FLAC"),
    ("short.wav", 0.3, 32_000, 1, "WAV"),
    ("c.ogg", 1.6, 16_000, 1, "OGG"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step, as a run would save it."""
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    for seed, (name, seconds, rate, channels, kind) in enumerate(FILES):
        wave = np.stack([corpus.noise(seed + c, seconds, rate) for c in range(channels)], 1)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / name, wave, rate, format=kind)
    return folder


def contents(out) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def found(run, recordings, tmp_path_factory):
    """Detections of every window, with a threshold that half of the windows of a class reach."""
    out = tmp_path_factory.mktemp("found") / "out"
    run_detect(run, recordings, "--out", out, "--overlap", CLIP - HOP, "--threshold", 0)
    return out


def test_scores_are_the_heads_of_each_window(run, recordings, found):
    rows = scores_of(found)
    model = encoder.load(str(run))
    at = [(row["file"], row["start_time"]) for row in rows]
    assert [t for name, t in at if name == "a/20240501_053000.wav"] == [
        *np.arange(0, 2.75, 0.25),
        2.6,
    ], "the last at the end"
    assert [row["end_time"] for row in rows if row["file"] == "short.wav"] == [0.3]
    assert [name for name, _ in at] == sorted(name for name, _ in at)
    x = []
    for row in rows:
        wave, rate, _ = spectrogram.decode((recordings / row["file"]).read_bytes())
        if row["file"] == "c.ogg":
            # resampled with the samples around the window, which a front end of one window does not
            # see
            continue
        part = wave[round(row["start_time"] * rate) : round(row["end_time"] * rate)]
        if rate == RATE:
            x.append((row, spectrogram.front_end(part, rate, clip_seconds=CLIP, n_frames=64)))
    _, patches = jax.jit(lambda p, x: vit.encode(model.config, p, x))(
        model.params, np.stack([each for _, each in x])
    )
    expected = jax.nn.softmax(patches.mean(1) @ model.head["w"] + model.head["b"][None])
    got = np.array([[row[name] for name in NAMES] for row, _ in x])
    assert len(got) == 13
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)
    clocks = [row["clock_time"] for row in rows if row["file"] == "a/20240501_053000.wav"]
    assert clocks[0] == "2024-05-01T05:30:00" and clocks[1] == "2024-05-01T05:30:00.250000"
    assert {row["clock_time"] for row in rows if row["file"] == "c.ogg"} == {None}


def test_tables_come_back_as_the_same_rows(run, recordings, found, tmp_path):
    rows = scores_of(found)
    bounds = {name: float(np.median([row[name] for row in rows])) for name in NAMES}
    (tmp_path / "bounds.csv").write_text(
        "class,threshold\n" + "".join(f"{k},{v!r}\n" for k, v in bounds.items())
    )
    before = contents(found / "scores")
    run_detect(
        run,
        recordings,
        "--out",
        found,
        "--overlap",
        CLIP - HOP,
        "--threshold",
        tmp_path / "bounds.csv",
    )
    assert contents(found / "scores") == before, "another threshold needs no other scores"
    # Computed by hand: neighbouring windows above the threshold are one detection, whose score is
    # their best.
    expected = []
    for file in sorted({row["file"] for row in rows}):
        for name in NAMES:
            last = None
            for row in (row for row in rows if row["file"] == file):
                if np.float32(row[name]) < np.float32(bounds[name]):
                    continue
                if last and row["start_time"] <= last[2]:
                    last[2:4] = [row["end_time"], max(last[3], row[name])]
                else:
                    last = [file, row["start_time"], row["end_time"], row[name], name]
                    expected.append(last)
    expected = sorted(
        (file, round(start, 6), round(end, 6), name) for file, start, end, _, name in expected
    )
    assert len(expected) > 5
    got = [
        (
            os.path.relpath(row["File"], recordings),
            float(row["Start (s)"]),
            float(row["End (s)"]),
            row["Common name"],
        )
        for row in table(found / "detections.csv")
    ]
    assert sorted(got) == expected
    per = {row["file"]: int(row["detections"]) for row in table(found / "recordings.csv")}
    assert sum(per.values()) == len(expected) and set(per) == {name for name, *_ in FILES}
    # Back through `jaxtrain index`, without a flag.
    tracks = sorted((found / "audacity").rglob("*.txt"))
    for name, given in {
        "raven": [found / "raven"],
        "csv": [found / "detections.csv"],
        "audacity": tracks,
    }.items():
        out = tmp_path / name
        assert cli.main(["index", *map(str, given), "--out", str(out)]) == 0
        classes = json.loads((out / "index.json").read_text())["classes"]
        back = [
            row
            for path in (out / "data").glob("*.parquet")
            for row in pq.read_table(path).to_pylist()
        ]
        events = [
            (r["audio"]["path"], r["start"], r["end"], classes[c])
            for r in back
            for c in r["labels"]
        ]
        assert (
            sorted(
                (name, round(start, 6), round(end, 6), label) for name, start, end, label in events
            )
            == expected
        ), name
    labels = (found / "audacity" / "a" / "20240501_053000.wav.txt").read_text().splitlines()
    assert [tuple(line.split("\t")) for line in labels] == [
        (f"{start:.6f}", f"{end:.6f}", name)
        for file, start, end, name in sorted(
            expected, key=lambda e: (e[1], e[2], NAMES.index(e[3]))
        )
        if file == "a/20240501_053000.wav"
    ]


def test_a_killed_command_resumes_to_the_same_bytes(run, recordings, found, tmp_path, monkeypatch):
    """SIGKILL in the middle. A part that was cut off is rebuilt, and three processes work without
    knowledge of each other."""
    run_detect(run, recordings, "--out", tmp_path / "whole", "--overlap", 0.4, "--threshold", 0.3)
    small = "from jaxtrain.workloads.bird.inference import detect; detect.PART = 8"
    small += "; import sys; from jaxtrain import cli; sys.exit(cli.main())"
    command = [
        sys.executable,
        "-c",
        small,
        "detect",
        run,
        recordings,
        "--overlap",
        "0.4",
        "--threshold",
        "0.3",
    ]
    command = [
        *map(str, command),
        "--batch",
        "8",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "killed"),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    patience = time.monotonic() + 120
    while (
        not (n := len(list((tmp_path / "killed" / "scores").glob("part-*"))))
        and time.monotonic() < patience
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert n
    monkeypatch.setattr(detect, "PART", 8)
    first = sorted((tmp_path / "killed" / "scores").glob("part-*"))[0]
    first.write_bytes(first.read_bytes()[:-40])
    argv = (run, recordings, "--overlap", 0.4, "--threshold", 0.3)
    run_detect(*argv, "--out", tmp_path / "killed")
    for number in (2, 0, 1):
        for name, value in (
            ("COORDINATOR", "127.0.0.1:9"),
            ("PROCESSES", "3"),
            ("PROCESS", str(number)),
        ):
            monkeypatch.setenv(f"JAXTRAIN_{name}", value)
        run_detect(*argv, "--out", tmp_path / "shared")
        assert (tmp_path / "shared" / "detections.csv").exists() == (number == 1), (
            "the last one writes the tables"
        )
    killed = contents(tmp_path / "killed")
    assert len([name for name in killed if name.startswith("scores/part")]) > 3
    assert killed == contents(tmp_path / "shared")
    of_whole = {
        name: text
        for name, text in contents(tmp_path / "whole").items()
        if name.startswith(("raven", "detect"))
    }
    tables = {
        name: text for name, text in killed.items() if name in of_whole and name != detect.ABOUT
    }
    assert tables == {name: text for name, text in of_whole.items() if name != detect.ABOUT}, (
        "parts change no table"
    )


def test_a_full_disk_keeps_the_finished_windows(
    run, recordings, tmp_path, capsys, monkeypatch, small_disk
):
    monkeypatch.setattr(detect, "PART", 8)
    argv = (run, recordings, "--overlap", 0.4, "--threshold", 0.3)
    run_detect(*argv, "--out", tmp_path / "whole")
    disk = small_disk(400, lazily=True)
    free = (lambda f: f.f_bavail * f.f_frsize)(os.statvfs(disk))
    (disk / "ballast").write_bytes(bytes(free - 36_000))
    capsys.readouterr()
    run_detect(*argv, "--out", disk / "out", code=2)
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        told.startswith("error: ")
        and "No space left on device; free some space, then rerun the command" in told
    )
    kept = len(list((disk / "out" / "scores").glob("part-*")))
    assert 0 < kept < len(list((tmp_path / "whole" / "scores").glob("part-*")))
    (disk / "ballast").unlink()
    run_detect(*argv, "--out", disk / "out")
    assert contents(disk / "out") == contents(tmp_path / "whole")


def test_recordings_with_the_longest_names_get_tables(run, tmp_path, capsys):
    folder = tmp_path / "some"
    folder.mkdir()
    for n, name in enumerate(("n" * 251, "n" * 250 + "m", "short")):
        (folder / f"{name}.wav").write_bytes(corpus.wav(n, 0.6, RATE))
    (folder / "phone.amr").write_bytes(b"#!AMR" + bytes(99))
    run_detect(run, folder, "--out", tmp_path / "out", "--threshold", 0)
    assert [len(list((tmp_path / "out" / kind).iterdir())) for kind in ("raven", "audacity")] == [
        3,
        3,
    ]
    told = capsys.readouterr().out.splitlines()[-1]
    assert (
        told == "3 recordings used, 0 without detections; 1 unread-sound, listed in"
        f" {tmp_path / 'out'}/errors.csv"
    )
    assert (
        cli.main(["index", str(tmp_path / "out" / "raven"), "--out", str(tmp_path / "index")]) == 0
    )


def test_broken_files_are_listed_and_end_nothing(run, recordings, tmp_path, capsys):
    folder = tmp_path / "some"
    folder.mkdir()
    good = (recordings / "short.wav").read_bytes()
    (folder / "good.wav").write_bytes(good)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "noise.mp3").write_bytes(b"no recording" * 99)
    flac = bytearray((recordings / "a/deep/b.flac").read_bytes())
    flac[len(flac) // 3 : len(flac) // 2] = bytes(len(flac) // 2 - len(flac) // 3)
    (folder / "torn.flac").write_bytes(flac)
    (folder / "link.wav").symlink_to(recordings / "short.wav")
    run_detect(run, folder, "--out", tmp_path / "out", "--threshold", 0, code=1)
    listed = table(tmp_path / "out" / "errors.csv")
    assert {row["kind"] for row in listed} == {"empty-file", "unreadable-file", "link-outside"}
    assert any("windows cannot be decoded: FLAC: " in row["text"] for row in listed), (
        "with the reason that index would give"
    )
    assert all(
        any(name in row["text"] for row in listed)
        for name in ("empty.wav", "noise.mp3", "torn.flac", "link.wav")
    )
    rows = {row["file"]: row for row in table(tmp_path / "out" / "recordings.csv")}
    assert (
        rows["good.wav"]["unreadable_windows"] == "0"
        and int(rows["torn.flac"]["unreadable_windows"]) > 0
    )
    torn = [row for row in scores_of(tmp_path / "out") if row["file"] == "torn.flac"]
    assert None in {row["wren"] for row in torn} and not all(row["wren"] is None for row in torn)
    assert "torn.flac: " in capsys.readouterr().err


def test_detections_follow_the_options():
    rows = [
        (0.0, 1.0, [0.9, 0.1]),
        (0.5, 1.5, [0.6, 0.2]),
        (1.0, 2.0, [0.2, 0.8]),
        (2.0, 3.0, [0.7, np.nan]),
    ]
    rows = [(start, end, np.array(scores, np.float32)) for start, end, scores in rows]
    options = detections.Options(np.array([0.5, 0.5], np.float32))
    of = lambda **changes: [  # noqa: E731
        (d.start, d.end, d.label, round(d.score, 3))
        for d in detections.of_recording(iter(rows), options._replace(**changes))
    ]
    assert of() == [(0.0, 1.5, 0, 0.9), (1.0, 2.0, 1, 0.8), (2.0, 3.0, 0, 0.7)]
    assert of(min_duration=1.2) == [(0.0, 1.5, 0, 0.9)]
    assert of(merge=False) == [
        (0.0, 1.0, 0, 0.9),
        (0.5, 1.5, 0, 0.6),
        (1.0, 2.0, 1, 0.8),
        (2.0, 3.0, 0, 0.7),
    ]
    assert of(thresholds=np.array([0.95, 0.1], np.float32)) == [(0.0, 2.0, 1, 0.8)]


def test_every_source_gives_the_same_windows(recordings, tmp_path):
    assert (
        cli.main(["index", str(recordings), "--out", str(tmp_path / "index"), "--labels", "none"])
        == 0
    )
    (tmp_path / "list.txt").write_text("".join(f"{recordings / name}\n" for name, *_ in FILES))
    sources = {
        "": [recordings],
        " ": [tmp_path / "index"],
        str(recordings): [tmp_path / "list.txt"],
    }
    sources["  "] = [recordings / name for name, *_ in FILES]
    options = dict(seconds=CLIP, hop=HOP)
    cut = [
        windows.cut([*map(str, given)], root=root.strip(), errors=windows.lenient(), **options)
        for root, given in sources.items()
    ]
    assert {(each.digest, each.root, each.n) for each in cut} == {
        (cut[0].digest, str(recordings), cut[0].n)
    }
    whole = list(cut[0].between(0, cut[0].n))
    assert [*cut[0].between(0, 12), *cut[0].between(12, 13), *cut[0].between(13, cut[0].n)] == whole


def test_embeddings_of_windows_keep_path_times_and_clock(run, recordings, found, tmp_path, capsys):
    out = tmp_path / "embedded"
    argv = [
        "embed",
        str(run),
        "--recordings",
        str(recordings),
        "--overlap",
        "0.25",
        "--out",
        str(out),
        "--batch",
        "8",
    ]
    assert cli.main([*argv, "--kinds", "mean,patches"]) == 0
    rows, scored = pq.read_table(out / "rows.parquet").to_pylist(), scores_of(found)
    keys = (("path", "file"), ("start", "start_time"), ("end", "end_time"), ("clock", "clock_time"))
    assert [[row[key] for key, _ in keys] for row in rows] == [
        [row[key] for _, key in keys] for row in scored
    ]
    assert json.loads((out / "embeddings.json").read_text())["root"] == str(recordings)
    z = np.load(out / "scores.npy")
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    np.testing.assert_allclose(
        p, [[row[name] for name in NAMES] for row in scored], atol=1e-5, rtol=0
    )
    assert cli.main([*argv, "--kinds", "mean,patches"]) == 0, "nothing is left to do"
    assert (
        cli.main([*argv, "--kinds", "cls"]) == 2
        and "holds embeddings of something else" in capsys.readouterr().err
    )


def test_scores_of_some_classes(run, recordings, tmp_path):
    argv = (run, recordings / "c.ogg", "--out", tmp_path / "out", "--threshold", 0)
    run_detect(*argv, "--classes", "wren,blackbird")
    row, *_ = scores_of(tmp_path / "out")
    assert list(row)[4:] == ["blackbird", "wren"] and row["blackbird"] + row["wren"] < 1, (
        "of a softmax over all classes"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"--overlap": "0.5"}, "--overlap is 0.5; windows have 0.5 s"),
        ({"--threshold": "1.5"}, "--threshold is 1.5; scores lie in [0, 1]"),
        ({"--threshold": "nothing.csv"}, "neither a number nor a file"),
        ({"--classes": "wrem"}, "for example wren"),
        (
            {"--overlap": "0.4999999"},
            "windows would begin every 0 s; at least 0.001 s apart: give less overlap",
        ),
        ({"--min-duration": "-1"}, "--min-duration is -1.0"),
        ({"--out": "{recordings}"}, "holds other things than detections"),
        ({"RECORDING": "nothing.wav"}, "nothing.wav does not exist"),
        ({"RECORDING": "{empty}"}, "holds no recordings"),
        ({"RUN": "{recordings}"}, "holds no step"),
        ({"--batch": "16"}, "holds scores of something else: batch was 8 and is 16"),
    ],
)
def test_an_error_is_one_line(run, recordings, found, tmp_path, capsys, change, text):
    (tmp_path / "empty").mkdir()
    places = {"recordings": recordings, "empty": tmp_path / "empty"}
    change = {key: value.format(**places) for key, value in change.items()}
    rest = [part for key, value in change.items() if key.startswith("--") for part in (key, value)]
    out = found if "--batch" in change else tmp_path / "out"
    given = [
        change.get("RUN", str(run)),
        change.get("RECORDING", str(recordings)),
        "--out",
        str(out),
        "--overlap",
        "0.25",
    ]
    capsys.readouterr()
    assert cli.main(["detect", *given, "--batch", "8", *rest]) == 2
    told = capsys.readouterr().err.splitlines()
    assert (
        told[-1].startswith("error: ")
        and text in told[-1]
        and len([t for t in told if t.startswith("error")]) == 1
    )


def test_a_run_without_a_head_is_named(run, tmp_path, capsys):
    assert (
        cli.main(["export", str(run), "--only", "^encoder/", "--out", str(tmp_path / "export")])
        == 0
    )
    assert (
        cli.main(["detect", str(tmp_path / "export"), "x.wav", "--out", str(tmp_path / "out")]) == 2
    )
    assert "has no head for classes" in capsys.readouterr().err


def test_a_front_end_that_is_not_the_encoders_is_refused(run, recordings, tmp_path, capsys):
    """A run whose config contradicts itself, and a head that was fitted on other spectrograms."""
    other = shutil.copytree(run, tmp_path / "run")
    meta = other / "checkpoints" / "1" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"sample_rate": 32000', '"sample_rate": 22050', 1))
    damage.seal(other)
    model = encoder.load(str(run))
    arrays = {"w": np.zeros((32, 1), np.float32), "b": np.zeros(1, np.float32)}
    settings = {**model.front_end.settings, "n_mels": 64}
    heads.save(
        tmp_path / "h.npz",
        heads.Head("linear", "mean", "sigmoid", arrays, ("owl",), "", None, model.digest, settings),
    )
    for argv, text in (
        ([other], "sections model and data name different front ends: sample_rate "),
        (
            [run, "--model", tmp_path / "h.npz"],
            "was fitted on recordings with data.n_mels=64, and ",
        ),
    ):
        given = ["detect", *argv[:1], recordings, *argv[1:], "--out", tmp_path / "out"]
        assert cli.main([str(each) for each in given]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and text in told and told.count("\n") == 1, told
    assert not (tmp_path / "out").exists()
