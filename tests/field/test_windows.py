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
