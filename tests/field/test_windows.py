"""Windows of people's recordings: no event is lost on an edge, and no window is there twice."""

import json

import numpy as np
import pytest
import soundfile

from jaxtrain import cli
from tests.field.corpus import rows_of

RATE = 1000


def write_sound(path, seconds: float, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.1
    soundfile.write(path, samples, RATE)


def index(tmp_path, table: str, *options: str, code: int = 0):
    """Index a table of recordings in tmp_path/audio. Returns its rows, and its counts of errors."""
    source = tmp_path / "table.csv"
    source.write_text(table)
    out = tmp_path / "out"
    argv = ["index", str(source), "--audio", str(tmp_path / "audio"), "--out", str(out), *options]
    assert cli.main(argv) == code
    if code:
        return [], {}
    counts = json.loads((out / "index.json").read_text())["errors"]
    return [(name, start, end, labels) for _, name, start, end, labels in rows_of(out)], counts


EVENTS = "file,start,end,label\na.wav,2.9,3.1,wren\na.wav,5.8,6.15,wren\na.wav,7.0,8.0,robin\n"


def test_an_event_on_the_edge_of_windows_is_in_one(tmp_path):
    write_sound(tmp_path / "audio" / "a.wav", 12)
    rows, counts = index(tmp_path, EVENTS, "--windows", "3")
    assert [row[3] for row in rows] == [("wren",), ("wren",), ("robin", "wren"), ()]
    assert not counts


def test_an_event_between_windows_is_counted(tmp_path, capsys):
    write_sound(tmp_path / "audio" / "a.wav", 12)
    rows, counts = index(tmp_path, EVENTS, "--windows", "2", "--hop", "6")
    assert [row[3] for row in rows] == [(), ("robin", "wren"), ()]
    assert counts == {"between-windows": 1}
    assert "table.csv:2: [2.9, 3.1) s" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [5.001, 5.05, 5.24])
def test_a_little_more_sound_than_a_window_makes_no_twin(tmp_path, seconds):
    write_sound(tmp_path / "audio" / "a.wav", seconds)
    end = round(seconds * RATE) / RATE
    table = f"file,start,end,label\na.wav,{end - 0.01},{end},wren\n"
    rows, _ = index(tmp_path, table, "--windows", "5")
    assert rows == [("a.wav", 0.0, end, ("wren",))]


ANSWERED = """file,start,end,label,validated
a.wav,1,2,wren,present
a.wav,5,6,wren,not present
a.wav,9,10,wren,(not validated)
a.wav,13,14,wren,noch nicht \u00fcberpr\u00fcft
a.wav,13.5,13.7,robin,yes
a.wav,17,18,wren,NA
b.wav,1,2,wren,pending
"""


def test_an_answer_that_is_none_is_neither_a_class_nor_none(tmp_path, capsys):
    for n, name in enumerate("ab"):
        write_sound(tmp_path / "audio" / f"{name}.wav", 20, seed=n)
    rows, counts = index(tmp_path, ANSWERED)
    assert rows == [
        ("a.wav", 1, 2, ("wren",)),
        ("a.wav", 5, 6, ()),
        ("a.wav", 13.5, 13.7, ("robin",)),
    ]
    assert counts == {"unanswered": 4}
    assert "table.csv:4" in capsys.readouterr().err
    rows, counts = index(tmp_path, ANSWERED, "--windows", "2")
    labels = {start: names for _, start, _, names in rows}
    silent = dict.fromkeys((2.0, 4.0, 6.0, 10.0, 14.0, 18.0), ())
    assert labels == {0.0: ("wren",), 12.0: ("robin",), **silent}
    rows, _ = index(tmp_path, ANSWERED, "--answer-column", "none")
    assert [row[3] for row in rows].count(("wren",)) == 6


def test_a_column_of_classes_may_leave_some_open(tmp_path):
    write_sound(tmp_path / "audio" / "a.wav", 20)
    table = "file,start,end,robin,wren\na.wav,1,2,1,0\na.wav,5,6,0,NA\na.wav,9,10,0,unsure\n"
    rows, counts = index(tmp_path, table, "--windows", "4")
    assert [(row[1], row[3]) for row in rows] == [(0.0, ("robin",)), (12.0, ()), (16.0, ())]
    assert counts == {"unanswered": 2}


@pytest.mark.parametrize("cells", ["accepted pending", "accepted zu_pr\u00fcfen", "pendiente todo"])
def test_a_status_that_is_open_is_asked_about(tmp_path, cells, capsys):
    write_sound(tmp_path / "audio" / "a.wav", 20)
    first, second = cells.split()
    table = f"file,start,end,label,status\na.wav,1,2,wren,{first}\na.wav,5,6,wren,{second}\n"
    index(tmp_path, table, code=2)
    told = capsys.readouterr().err
    assert "'status' holds" in told and "--answer-column" in told


@pytest.mark.parametrize(
    "columns", ["playback,songtype", "rain,wind,call type", "playback,birdcall"]
)
def test_flags_next_to_words_are_no_classes(tmp_path, columns, capsys):
    write_sound(tmp_path / "audio" / "a.wav", 20)
    n_flags = columns.count(",")
    lines = [f"file,start,end,{columns}"]
    lines.append("a.wav,3,5," + "FALSE," * n_flags + "trill")
    lines.append("a.wav,8,9," + "TRUE," * n_flags + "buzz")
    index(tmp_path, "\n".join(lines) + "\n", code=2)
    told = capsys.readouterr().err
    name = columns.rpartition(",")[2]
    assert f"{name!r} holds words such as 'trill'" in told
    index(tmp_path, "\n".join(lines) + "\n", "--label-column", name)


@pytest.mark.parametrize(
    ("line", "option", "rest"),
    [
        ("a.wav,5,5,owl", "reversed-times=drop", ""),  # a moment, as APLOSE's points
        ("a.wav,9,6,owl", "reversed-times=drop", ""),
        ("a.wav,10,13,owl", "beyond-end=drop", ""),
        ("a.wav,5,6,????", "open-label=drop", ""),
        ("a.wav,5,6,wren\na.wav,5.5,9,wren", "overlapping-times=drop", "wren"),
    ],
    ids=["moment", "reversed", "beyond", "unknown", "overlapping"],
)
def test_a_line_that_is_dropped_makes_no_example_without_a_class(tmp_path, line, option, rest):
    write_sound(tmp_path / "audio" / "a.wav", 12)
    table = f"file,start,end,label\na.wav,1,2,robin\n{line}\n"
    rows, _ = index(tmp_path, table, "--windows", "4", "--on", option)
    found = {start: labels for _, start, _, labels in rows}
    dropped = 4.0 if "10,13" not in line else 8.0
    assert found[0.0] == ("robin",)
    assert found.get(dropped) == ((rest,) if rest else None), "there is a call, of no known class"
    if rest:
        assert 8.0 not in found, "the second call ends there"
    rows, _ = index(tmp_path, table, "--windows", "4", "--on", option, "--no-empty")
    assert all(row[3] for row in rows)


@pytest.mark.parametrize("cell", ["unknown", ""])
def test_an_open_class_takes_its_line_and_windows_along(tmp_path, cell):
    write_sound(tmp_path / "audio" / "a.wav", 16)
    table = f"file,start,end,wren,owl\na.wav,1,2,1,0\na.wav,5,6,1,{cell}\na.wav,6,7,1,0\n"
    rows, counts = index(tmp_path, table, "--windows", "4")
    assert [(row[1], row[3]) for row in rows] == [(0.0, ("wren",)), (8.0, ()), (12.0, ())]
    assert counts == {"open-class": 1}
    rows, _ = index(tmp_path, table)
    assert [row[1:3] for row in rows] == [(1, 2), (6, 7)]
    rows, counts = index(tmp_path, table, "--windows", "4", "--on", "open-class=keep")
    assert rows[1][3] == ("wren",) and counts == {"open-class": 1}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("a.wav,five,6,owl,", "bad-row"),
        ("a.wav,5,6,owl,,7", "bad-row"),
        ("a.wav,,,owl,", "no-times"),
        ("a.wav,50,60,owl,", "outside-recording"),
        ("a.wav,5,6,owl,2024-13-40", "bad-date"),
    ],
)
def test_windows_of_a_recording_with_a_dropped_line_are_not_of_no_class(tmp_path, line, kind):
    for n, name in enumerate("ab"):
        write_sound(tmp_path / "audio" / f"{name}.wav", 12, seed=n)
    table = f"file,start,end,label,date\na.wav,1,2,wren,\n{line}\nb.wav,1,2,wren,2024-05-01\n"
    rows, counts = index(tmp_path, table, "--windows", "4", "--on", f"{kind}=drop")
    of_a = [(row[1], row[3]) for row in rows if row[0] == "a.wav"]
    others = [(8.0, ())] if kind == "bad-date" else []  # its times are known
    assert of_a == [(0.0, ("wren",)), *others] and counts == {kind: 1}
    assert [row[1] for row in rows if row[0] == "b.wav"] == [0.0, 4.0, 8.0]


def test_a_dropped_line_is_of_the_split_of_its_recording(tmp_path):
    write_sound(tmp_path / "audio" / "a.wav", 12)
    table = "file,start,end,label,split\na.wav,1,2,wren,test\na.wav,5,x,wren,\n"
    options = ("--windows", "4", "--on", "bad-row=drop", "--split", "column=split")
    rows, counts = index(tmp_path, table, *options)
    assert [row[1] for row in rows] == [0.0] and counts == {"bad-row": 1}
