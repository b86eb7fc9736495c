"""A recording that is slower than life has the scores of the same sound at its own speed, at times
and frequencies of its file, and a clock of life."""

import struct
from datetime import datetime

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain import cli
from loaders.audio.recordings import windows
from tests.support import corpus
from tests.support.birds import CLIP, NAMES, make_run, run_detect, scores_of, table

RATE = 32_000
TIMES = 10
NAME = "MILL_20240501_223000.wav"
HOP = 0.25


def write(folder, rate, te=b""):
    """The same samples at a rate, and a GUANO chunk that states a time expansion."""
    folder.mkdir(parents=True)
    soundfile.write(folder / NAME, corpus.noise(3, 1.6, RATE), rate)
    if te:
        chunk = b"GUANO|Version: 1.0\nTimestamp: 2024-05-01T22:30:00\nTE: " + te + b"\n"
        chunk += b" " * (len(chunk) % 2)
        with open(folder / NAME, "ab") as file:
            file.write(b"guan" + struct.pack("<I", len(chunk)) + chunk)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of life's speed, one of slow recordings, and the same sound for each."""
    folder = tmp_path_factory.mktemp("slow")
    run = make_run(folder / "life")
    slow_run = make_run(folder / "slow", data={"time_expansion": float(TIMES)})
    recordings = write(folder / "rec", RATE)
    slow = write(folder / "slow-rec", RATE // TIMES)
    return folder, run, slow_run, recordings, slow


def times(row, *names):
    return [round(row[name], 6) for name in names]


@pytest.mark.parametrize("by_option", [False, True])
def test_detections_are_those_of_the_sound_at_lifes_speed(world, tmp_path, by_option):
    _, run, slow_run, recordings, slow = world
    tables = ("--threshold", 0, "--no-merge", "--overlap")
    run_detect(run, recordings, "--out", tmp_path / "life", *tables, CLIP - HOP)
    if by_option:
        slow_run = run
        tables = ("--time-expansion", TIMES, *tables)
    run_detect(slow_run, slow, "--out", tmp_path / "slow", *tables, TIMES * (CLIP - HOP))
    expected = scores_of(tmp_path / "life")
    got = scores_of(tmp_path / "slow")
    assert len(got) == len(expected) > 4
    for row, of_life in zip(got, expected, strict=True):
        assert [row[name] for name in NAMES] == [of_life[name] for name in NAMES]
        places = times(of_life, "start_time", "end_time")
        assert times(row, "start_time", "end_time") == [round(TIMES * t, 6) for t in places]
        assert row["clock_time"] == of_life["clock_time"]
    lines = table(tmp_path / "slow/detections.csv")
    begin = datetime.fromisoformat("2024-05-01T22:30:00")
    for line in lines:
        passed = datetime.fromisoformat(line["Clock"]) - begin
        assert passed.total_seconds() * TIMES == pytest.approx(float(line["Start (s)"]))
    for name, high in (("life", "16000.0"), ("slow", "1600.0")):
        (selections,) = (tmp_path / name / "raven").glob("*.txt")
        assert {row["High Freq (Hz)"] for row in table(selections)} == {high}


def test_embeddings_and_queries_have_the_times_of_the_file(world, tmp_path, capsys):
    _, run, slow_run, recordings, slow = world
    overlap = CLIP - HOP
    embed = ["embed", "--kinds", "mean", "--batch", "8", "--recordings"]
    argvs = {
        "life": [run, recordings, "--overlap", overlap],
        "slow": [slow_run, slow, "--overlap", TIMES * overlap],
        "option": [run, slow, "--overlap", TIMES * overlap, "--time-expansion", TIMES],
    }
    rows = {}
    for name, (model, *argv) in argvs.items():
        out = tmp_path / name
        assert cli.main([embed[0], str(model), *embed[1:], *map(str, argv), "--out", str(out)]) == 0
        rows[name] = pq.read_table(out / "rows.parquet").to_pylist()
    for name in ("slow", "option"):
        assert [row["clock"] for row in rows[name]] == [row["clock"] for row in rows["life"]]
        for row, of_life in zip(rows[name], rows["life"], strict=True):
            places = times(of_life, "start", "end")
            assert times(row, "start", "end") == [round(TIMES * t, 6) for t in places]
        np.testing.assert_array_equal(
            np.load(tmp_path / name / "mean.npy"), np.load(tmp_path / "life/mean.npy")
        )
        # the query is the third row itself
        hits = tmp_path / f"{name}.csv"
        query = f"{slow / NAME}@{rows[name][2]['start']}"
        argv = ["search", str(tmp_path / name), "--like", query, "--top", "1", "--out", str(hits)]
        assert cli.main(argv) == 0
        (hit,) = table(hits)
        assert hit["row"] == "2" and float(hit["score"]) > 0.9999
        capsys.readouterr()
        assert cli.main(["search", str(tmp_path / name), "--like", f"{slow / NAME}@17"]) == 2
        assert "has 16.000 s, and the query begins at 17.0 s" in capsys.readouterr().err


def test_rows_of_an_index_have_the_clock_of_life(world, tmp_path):
    _, _, slow_run, _, slow = world
    index = ["index", str(slow), "--labels", "none", "--windows", "5", "--out"]
    assert cli.main([*index, str(tmp_path / "index")]) == 0
    argv = ["embed", str(slow_run), "--data", str(tmp_path / "index"), "--kinds", "mean"]
    assert cli.main([*argv, "--label", "", "--out", str(tmp_path / "emb")]) == 0
    rows = pq.read_table(tmp_path / "emb/rows.parquet").to_pylist()
    assert [row["start"] for row in rows][:3] == [0.0, 5.0, 10.0]
    assert [row["clock"][-9:] for row in rows][1:3] == ["00.500000", "T22:30:01"]


def test_a_header_that_states_another_time_expansion_is_named(world, tmp_path, capsys):
    _, run, slow_run, _, _ = world
    bat = write(tmp_path / "bat", RATE // TIMES, te=b"10")
    capsys.readouterr()
    index = ["index", str(bat), "--labels", "none", "--out", str(tmp_path / "index")]
    assert cli.main(index) == 0
    said = capsys.readouterr().err
    assert "GUANO header (TE) states the time expansion 10; train with --config.data." in said
    assert cli.main([*index, "--on", "time-expansion=refuse"]) == 2
    capsys.readouterr()
    run_detect(run, bat, "--out", tmp_path / "fast")
    assert "and it is read with 1; say --time-expansion 10" in capsys.readouterr().err
    life = write(tmp_path / "life", RATE, te=b"1")
    for folder, expansion, word in (
        (bat, 10.0, ""),
        (life, 1.0, ""),
        (life, 10.0, "states the time expansion 1, and it is read with 10"),
    ):
        errors = windows.lenient()
        cut = windows.cut(
            [str(folder)], seconds=1.0, hop=1.0, time_expansion=expansion, errors=errors
        )
        assert len(cut.recordings) == 1, "it is used all the same"
        assert [word in text for _, text in errors.lines] == [True] * bool(word)


def test_a_chunk_of_wildlife_acoustics_states_it(tmp_path):
    (bat,) = write(tmp_path / "bat", RATE // TIMES).iterdir()
    fields = ((0, b"\1\0"), (1, b"SM2BAT+"), (0x0F, b"\x0a\0"), (0xFFFF, b"\0"))
    body = b"".join(struct.pack("<HI", number, len(x)) + x for number, x in fields)
    with open(bat, "ab") as file:
        file.write(b"wamd" + struct.pack("<I", len(body)) + body)
    errors = windows.lenient()
    windows.cut([str(bat)], seconds=1.0, hop=1.0, errors=errors)
    ((kind, text),) = errors.lines
    assert kind == "time-expansion" and "WAMD header states the time expansion 10" in text


def test_a_rate_that_is_none_in_life_is_named(world, tmp_path, capsys):
    _, run, _, recordings, _ = world
    run_detect(run, recordings, "--out", tmp_path / "out", "--time-expansion", 100, code=2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and "which time_expansion=100 makes 3200000" in said


def test_boxes_end_where_the_file_does(world, tmp_path):
    _, run, _, _, _ = world
    folder = tmp_path / "low"
    folder.mkdir()
    soundfile.write(folder / "a.wav", corpus.noise(1, 1.0, 8000), 8000)
    run_detect(run, folder, "--threshold", 0, "--out", tmp_path / "out")
    (selections,) = (tmp_path / "out/raven").glob("*.txt")
    assert {row["High Freq (Hz)"] for row in table(selections)} == {"4000.0"}


def test_a_table_that_states_a_time_expansion_is_named(world, tmp_path, capsys):
    *_, slow = world
    table = tmp_path / "bats.csv"
    for column, value, is_named in (("TE", "10", True), ("Time expansion", "1", False)):
        table.write_text(f"file,start,end,label,{column}\n{NAME},0,1,noctule,{value}\n")
        index = ["index", str(table), "--audio", str(slow), "--out", str(tmp_path / column)]
        capsys.readouterr()
        assert cli.main(index) == 0
        said = capsys.readouterr().err
        assert ("bats.csv:2 states the time expansion 10 of " in said) == is_named
        assert ("--config.data.time_expansion=10" in said) == is_named
        assert "unused-column" not in said
    table.write_text(f"file,start,end,label,TE\n{NAME},0,1,noctule,10\n")
    assert cli.main([*index, "--on", "time-expansion=refuse"]) == 2
    guano = write(tmp_path / "bat", RATE // TIMES, te=b"10")
    index = ["index", str(table), "--audio", str(guano), "--out", str(tmp_path / "both")]
    capsys.readouterr()
    assert cli.main(index) == 0
    assert capsys.readouterr().err.count("states the time expansion") == 1, "once a recording"


@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_a_prepared_recording_is_cut_as_the_one_it_was_made_from(world, tmp_path, rate, capsys):
    """It has the rate of the front end, and so seconds of life. Windows have the original's."""
    _, run, slow_run, _, _ = world
    slow = write(tmp_path / "rec", rate // TIMES)
    index = ["index", str(slow), "--labels", "none", "--out", str(tmp_path / "index")]
    prepare = ["prepare", str(tmp_path / "index"), "--time-expansion", str(TIMES)]
    assert cli.main(index) == 0
    assert cli.main([*prepare, "--out", str(tmp_path / "prepared")]) == 0
    tables = ("--threshold", 0, "--no-merge", "--overlap", TIMES * (CLIP - HOP))
    run_detect(slow_run, slow, "--out", tmp_path / "slow", *tables)
    run_detect(slow_run, tmp_path / "prepared/audio", "--out", tmp_path / "made", *tables)
    expected = scores_of(tmp_path / "slow")
    got = scores_of(tmp_path / "made")
    assert len(got) == len(expected) > 2
    for row, of_slow in zip(got, expected, strict=True):
        for name in ("start_time", "end_time"):
            assert row[name] == pytest.approx(of_slow[name], abs=1e-6)
        for name in NAMES:
            assert row[name] == pytest.approx(of_slow[name], abs=2e-3)
    capsys.readouterr()
    command = ["detect", str(run), str(tmp_path / "prepared/audio"), "--out", str(tmp_path / "no")]
    assert cli.main(command) == 1
    said = capsys.readouterr().err
    assert "header (jaxtrain prepare) states the time expansion 10, and it is read with 1" in said
