"""Folders as people have them: skipped files are counted, and tables next to recordings find their
recordings."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain import cli
from loaders.io import atomic_write
from tests.field import corpus
from tests.field.corpus import rows_of
from tests.support.corpus import encode, noise

BIRDNET = "Start (s),End (s),Scientific name,Common name,Confidence\n2,3,Erithacus,{},0.9\n"


def index(*argv) -> int:
    return cli.main(["index", *map(str, argv)])


def counts(out) -> dict:
    return json.loads((out / "index.json").read_text())["errors"]


@pytest.fixture
def recordings(tmp_path):
    corpus.write_recordings(tmp_path / "recordings")
    return tmp_path / "recordings"


def test_everything_that_is_left_out_is_counted(recordings, tmp_path, capsys):
    (recordings / "c.wma").write_bytes(bytes.fromhex("3026b2758e66cf11") + bytes(99))
    (recordings / "no-ending").write_bytes((recordings / "a.wav").read_bytes())
    (recordings / "d.wv").write_bytes(b"wvpk" + bytes(99))
    (recordings / "a.wav.data").write_text("[]")
    (recordings / "events.csv").write_text("file,start,end,label\na.wav,2,3,robin\n")
    (recordings / "README.txt").write_text("Recorded in spring.\n")
    (recordings / "._a.wav").write_bytes(bytes(99))
    (recordings / "more.zip").write_bytes(b"PK\x03\x04")
    assert index(recordings, "--labels=none", "--out", tmp_path / "out") == 0
    assert counts(tmp_path / "out") == {
        "unread-sound": 4,
        "unread-table": 2,
        "hidden-file": 1,
        "other-file": 1,
    }
    n, told = len(corpus.RECORDINGS), capsys.readouterr()
    listed = (
        "1 hidden-file, 2 unread-table, 4 unread-sound, 1 other-file, listed in"
        f" {tmp_path / 'out'}/errors.csv"
    )
    assert told.out.splitlines()[-1] == f"{n} recordings used, {n} without labels; {listed}"


def test_recordings_in_folders_of_the_system_are_counted(recordings, tmp_path):
    for folder in (".old/deep", ".Trash-1000/files", "$RECYCLE.BIN/S-1-5", "@eaDir", "__MACOSX"):
        (recordings / folder).mkdir(parents=True)
        (recordings / folder / "c.wav").write_bytes((recordings / "a.wav").read_bytes())
    assert index(recordings, "--labels=none", "--out", tmp_path / "out") == 0
    assert counts(tmp_path / "out") == {"hidden-file": 5}
    assert {row[1] for row in rows_of(tmp_path / "out")} == set(corpus.RECORDINGS)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "unread-sound",
            (
                "a.voc a.sph a.dsf a.snd a.wve a.gsm a.amr a.mka a.3gp a.mov a.wma a.aac a.zc"
                " sphere-without-ending"
            ),
        ),
        (
            "unread-table",
            "a.json a.xml a.parquet a.sqlite a.db a.xlsx a.TextGrid a.eaf a.data a.csv list.txt",
        ),
        ("other-file", "a.jpg Thumbs.db notes.txt LICENSE settings.ini"),
    ],
)
def test_every_other_file_is_counted_by_its_kind(tmp_path, kind, names):
    (tmp_path / "rec" / "index").mkdir(parents=True)
    (tmp_path / "rec" / "a.wav").write_bytes(encode(noise(0, 1.0, 8000), 8000))
    for name in names.split():
        (tmp_path / "rec" / name).write_bytes(
            {"sp": b"NIST_1A\n   1024\n", "li": b"a.wav robin"}.get(name[:2], b"anything")
        )
    for _ in range(2):  # the command's own index, in the same folder, is not one of them
        assert index(tmp_path / "rec", "--out", tmp_path / "rec" / "index") == 0
        assert counts(tmp_path / "rec" / "index") == {kind: len(names.split())}


def test_recordings_that_a_table_does_not_name_are_counted(recordings, tmp_path):
    (tmp_path / "events.csv").write_text(
        "file,start,end,label\na.wav,2,3,robin\nA/x.wav,2,3,robin\n"
    )
    assert index(tmp_path / "events.csv", "--audio", recordings, "--out", tmp_path / "out") == 0
    assert counts(tmp_path / "out") == {"no-table": len(corpus.RECORDINGS) - 2}
    (tmp_path / "events.csv").rename(recordings / "events.csv")
    assert index(recordings / "events.csv", "--out", tmp_path / "near") == 0
    near = [name for name in corpus.RECORDINGS if name.rpartition("/")[0] in ("", "A")]
    assert counts(tmp_path / "near") == {"no-table": len(near) - 2}


def test_the_second_writer_of_an_index_is_reported(recordings, tmp_path, capsys):
    with atomic_write.alone(tmp_path / ".out.partial"):
        (tmp_path / ".out.partial" / "mine").touch()
        assert index(recordings, "--labels=none", "--out", tmp_path / "out") == 2
        assert f"{tmp_path}/out: another process writes it now" in capsys.readouterr().err
        assert (tmp_path / ".out.partial" / "mine").exists(), "nothing of the other's is touched"
    assert index(recordings, "--labels=none", "--out", tmp_path / "out") == 0
    assert not (tmp_path / "out" / "mine").exists() and not (tmp_path / ".out.partial").exists()


def test_tables_next_to_recordings(recordings, tmp_path):
    """Tables of BirdNET and Raven are read. An empty table is a recording without events, and
    recordings without a table are counted."""
    line = "1\tSpectrogram 1\t1\t{}\t{}\t1\t9\t{}\n"
    (recordings / "a.BirdNET.selection.table.txt").write_text(
        f"{corpus.RAVEN}\tCommon Name\n{line.format(2, 3, 'robin')}"
    )
    (recordings / "A" / "x.Table.1.selections.txt").write_text(
        f"{corpus.RAVEN}\tSpecies\n{line.format(4, 5, 'wren')}"
    )
    (recordings / "B" / "x.Table.1.selections.txt").write_text(f"{corpus.RAVEN}\tSpecies\n")
    assert index(recordings, "--out", tmp_path / "out", "--windows=15") == 0
    found = [row[1:] for row in rows_of(tmp_path / "out")]
    assert found == [
        ("A/x.wav", 0.0, 15.0, ("wren",)),
        ("A/x.wav", 15.0, 30.0, ()),
        ("B/x.wav", 0.0, 15.0, ()),
        ("B/x.wav", 15.0, 30.0, ()),
        ("a.wav", 0.0, 15.0, ("robin",)),
        ("a.wav", 15.0, 30.0, ()),
    ]
    assert counts(tmp_path / "out") == {"no-events": 1, "no-table": len(corpus.RECORDINGS) - 3}


def test_subfolders_or_tables_are_the_labels(recordings, tmp_path, capsys):
    """BirdNET writes its tables next to recordings, which a person may have sorted by class."""
    line = "1\tSpectrogram 1\t1\t2\t3\t1\t9\trobin\n"
    (recordings / "A" / "x.BirdNET.selection.table.txt").write_text(
        f"{corpus.RAVEN}\tCommon Name\n{line}"
    )
    assert index(recordings, "--out", tmp_path / "out") == 2
    assert "--labels folder" in capsys.readouterr().err
    assert index(recordings, "--labels=folder", "--out", tmp_path / "out") == 0
    assert counts(tmp_path / "out")["unread-table"] == 1
    assert ("train", "A/x.wav", 0.0, 30.0, ("A",)) in rows_of(tmp_path / "out")


def test_result_tables_in_another_tree_find_the_recording_of_their_folder(recordings, tmp_path):
    tables = []
    for folder in ("A", "B"):
        tables.append(tmp_path / "results" / folder / "x.BirdNET.results.csv")
        tables[-1].parent.mkdir(parents=True)
        tables[-1].write_text(BIRDNET.format(f"bird of {folder}"))
    assert index(*tables, "--audio", recordings, "--out", tmp_path / "out") == 0
    assert [row[1::3] for row in rows_of(tmp_path / "out")] == [
        ("A/x.wav", ("bird of A",)),
        ("B/x.wav", ("bird of B",)),
    ]
    tables[0].rename(tmp_path / "x.BirdNET.results.csv")
    assert (
        index(tmp_path / "x.BirdNET.results.csv", "--audio", recordings, "--out", tmp_path / "out")
        == 2
    )


def test_a_header_that_contradicts_the_name_is_reported(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    comment = (
        b"Recorded at 19:17:30 23/06/2021 (UTC+1) by AudioMoth 24F3190361DBF81E at medium gain. "
    )
    item = b"ICMT" + len(comment).to_bytes(4, "little") + comment
    wav = (
        encode(noise(0, 0.5, 8000), 8000, "WAV", "PCM_16")
        + b"LIST"
        + (4 + len(item)).to_bytes(4, "little")
        + b"INFO"
        + item
    )
    # in UTC, in local time, and wrong
    for name in ("20210623_181730.WAV", "20210623_191730.WAV", "20210623_201730.WAV"):
        (folder / name).write_bytes(wav)
    assert index(folder, "--out", tmp_path / "out", "--on=duplicate-content=keep") == 0
    assert counts(tmp_path / "out")["other-time"] == 1
    assert "20210623_201730.WAV: its name states" in (tmp_path / "out" / "errors.csv").read_text()


def test_a_dry_run_prints_the_meaning_of_every_column(recordings, tmp_path, capsys):
    (tmp_path / "t.csv").write_text(
        "Filename,Start (ms),End"
        " (ms),Species,notes\na.wav,2000,3000,robin,loud\nnone.wav,1,2,wren,\n"
    )
    assert index(tmp_path / "t.csv", "--audio", recordings, "--dry-run") == 1
    told = capsys.readouterr().out
    for text in (
        "start        Start (ms) [ms]",
        "label        Species",
        "ignored      notes",
        "a.wav [2, 3) s: robin",
    ):
        assert text in told, told
    assert "missing-file: 1 (refused)" in told and sorted(
        path.name for path in tmp_path.iterdir()
    ) == ["recordings", "t.csv"]


def test_a_missing_folder_an_empty_split_and_a_list_of_species_are_reported(
    recordings, tmp_path, capsys
):
    table = tmp_path / "species.csv"
    table.write_text("file,label\na.wav,robin\na.wav,wren\nb.wav,robin\n")
    assert index(table, "--audio", tmp_path / "recording", "--out", tmp_path / "out") == 2
    assert (
        f"is not a folder; name the folder of the recordings; did you mean '{recordings}'?"
        in capsys.readouterr().err
    )
    assert index(table, "--audio", recordings, "--out", tmp_path / "out") == 2
    assert (
        "nothing was written; correct it, or add --on conflicting-labels="
        in capsys.readouterr().err
    )
    table.write_text("file,label\na.wav,robin\n")
    assert (
        index(table, "--audio", recordings, "--split", "recording=0.01", "--out", tmp_path / "out")
        == 0
    )
    assert "--split recording=0.01 put no recording into test; of few" in capsys.readouterr().err


def test_a_date_that_contradicts_the_files_name_is_reported(tmp_path):
    """Two of four dates have the day first, and the fourth, with its month first, decides the
    column."""
    names = [
        f"A_2024{month}{day}_053000.wav"
        for month, day in (("05", "01"), ("05", "12"), ("06", "03"), ("06", "14"))
    ]
    (tmp_path / "audio").mkdir()
    for seed, name in enumerate(names):
        (tmp_path / "audio" / name).write_bytes(encode(noise(seed, 1.0, 8_000), 8_000))
    dates = ("01/05/2024", "12/05/2024", "06/03/2024", "06/14/2024")
    lines = [f"{name},wren,{date}" for name, date in zip(names, dates, strict=True)]
    (tmp_path / "d.csv").write_text("\n".join(["file,label,date", *lines, ""]))
    assert index(tmp_path / "d.csv", "--audio", tmp_path / "audio", "--out", tmp_path / "out") == 0
    assert counts(tmp_path / "out") == {"other-time": 2}


def test_a_table_next_to_recordings_is_about_none_elsewhere(recordings, tmp_path, capsys):
    """B/ has recordings of its own, but none with this name. A number is a part of a name: YSM1 is
    not SM1."""
    (recordings / "A" / "only.wav").write_bytes((recordings / "a.wav").read_bytes()[:-200])
    line = f"{corpus.RAVEN}\tSpecies\n1\tS\t1\t2\t3\t1\t9\twren\n"
    for name in ("B/only.Table.1.selections.txt", "a.1.Table.1.selections.txt"):
        table = recordings / name
        table.write_text(line)
        assert index(table, "--audio", recordings, "--out", tmp_path / "out") == 2
        assert "missing-file: 1 (refused)" in capsys.readouterr().err
        table.unlink()
    raven = f"{corpus.RAVEN}\tBegin File\tSpecies\n1\tS\t1\t2\t3\t1\t9\t{{}}\trobin\n"
    trees = {"A/z.txt": "2\t3\trobin\n", "A/z.Table.1.selections.txt": raven.format("z.flac")}
    for name, text in {**trees, "A/x.Table.1.selections.txt": raven.format("x.wav")}.items():
        # the recordings have a folder A, and z.flac lies in B/deep
        table = tmp_path / "tables" / name
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(text)
        assert index(table, "--audio", recordings, "--out", tmp_path / "out") == (
            2 if name in trees else 0
        )
        assert ("missing-file: 1 (refused)" in capsys.readouterr().err) == (name in trees)
    assert [row[1] for row in rows_of(tmp_path / "out")] == ["A/x.wav"]
    (tmp_path / "t.csv").write_text("file,label\nB/x.wav,robin\n")
    assert index(tmp_path / "t.csv", "--audio", recordings / "A", "--out", tmp_path / "out") == 2
    assert (
        f"which is not below {recordings / 'A'}, but {recordings / 'B' / 'x.wav'}"
        in capsys.readouterr().err
    )
    (recordings / "YSM1.wav").write_bytes((recordings / "a.wav").read_bytes()[:-400])
    (tmp_path / "t.csv").write_text("file,start,end,label\nSM1,2,3,robin\n")
    assert index(tmp_path / "t.csv", "--audio", recordings, "--out", tmp_path / "out") == 2
    assert "missing-file: 1 (refused)" in capsys.readouterr().err


def test_channels_of_a_table_are_used_or_asked_for(tmp_path, capsys):
    (tmp_path / "rec").mkdir()
    for name, seed in (("a.wav", 0), ("b.wav", 1)):
        stereo = np.stack([noise(seed, 1.0, 8000), noise(seed + 2, 1.0, 8000)], 1)
        soundfile.write(tmp_path / "rec" / name, stereo, 8000)
    argv = (
        tmp_path / "t.csv",
        "--audio",
        tmp_path / "rec",
        "--out",
        tmp_path / "out",
        "--channels=table",
    )
    for column, more in (("Kanal", ()), ("ch", ()), ("side", ("--channel-column=side",))):
        (tmp_path / "t.csv").write_text(
            f"file,start,end,label,{column}\na.wav,0.2,0.5,robin,2\nb.wav,0.2,0.5,wren,1\n"
        )
        assert index(*argv, *more) == 0
        rows = pq.read_table(tmp_path / "out" / "data").sort_by("channel")
        assert (
            rows["channel"].to_pylist(),
            [each["path"] for each in rows["audio"].to_pylist()],
        ) == (
            [0, 1],
            ["b.wav", "a.wav"],
        )
    capsys.readouterr()
    assert index(*argv) == 2
    told = capsys.readouterr().err
    assert "no-channel: 2 (refused)" in told and "--channel-column" in told
    assert index(*argv, "--on=no-channel=keep") == 0 and index(*argv, "--windows=0.5") == 2
    assert "windows have no channel" in capsys.readouterr().err


def test_folders_of_splits_are_no_labels(recordings, tmp_path, capsys):
    for name, split in (("a.wav", "train"), ("b.wav", "test")):
        (tmp_path / "rec" / "robin" / split).mkdir(parents=True)
        (recordings / name).rename(tmp_path / "rec" / "robin" / split / name)
    argv = (tmp_path / "rec", "--out", tmp_path / "out")
    assert index(*argv, "--labels=folder") == 2 and not (tmp_path / "out").exists()
    assert "test, train, which are splits" in (told := capsys.readouterr().err)
    pattern = told.split("--labels '")[1].split("'")[0]
    assert index(*argv, "--labels", pattern) == 0
    assert [row[4] for row in rows_of(tmp_path / "out")] == [("robin",)] * 2
