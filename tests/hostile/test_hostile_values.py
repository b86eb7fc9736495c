"""Values that a file may hold and no command expects: each becomes one message, and none a traceback."""

import json
import os
import pathlib
import tarfile

import inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain import cli
from loaders import files

RAVEN = "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tSpecies\n1\ts\t{}\t0\t0.1\ta\n"
NO_UTF8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"0.wav\xff"], pa.binary()).buffers())
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }\n"


def refused(capsys, *argv: str) -> str:
    """What a command says on stderr, which has to refuse its input."""
    assert cli.main(list(argv)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("shape", ["(18446744073709551616, 0)", "(True,)", str((1,) * 65), "(0, 4611686018427387904)"])
def test_a_shape_that_no_array_has_is_refused(tmp_path, shape):
    header = (HEADER % shape).encode()
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(files.FileError, match=r"a\.npy cannot be read as an array"):
        files.array(path)


def test_features_of_two_runs_are_refused(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        inputs.embeddings(tmp_path / name)
    np.save(tmp_path / "b" / "mean.npy", np.zeros((12, 3), np.float32))
    said = refused(capsys, "probe", "--train", str(tmp_path / "a"), "--test", str(tmp_path / "b"), "--out", str(tmp_path / "c"))
    assert "the train rows have 4 features, the test rows 3" in said


def test_half_a_character_is_refused_in_every_file_of_json(tmp_path, capsys):
    with pytest.raises(files.FileError, match="is not JSON.*surrogates"):
        files.parse('{"a": ["\\ud800"]}', "x.json")
    assert files.parse('{"a": "\\ud83d\\udc26"}', "x.json") == {"a": "\N{BIRD}"}
    (tmp_path / "in.jsonl").write_text('{"text": "\\ud800"}\n{"text": "b"}\n')
    command = ("tokens", str(tmp_path / "out"), str(tmp_path / "in.jsonl"), "--tokenizer", "bytes")
    assert "line at byte 0" in refused(capsys, *command)


@pytest.mark.parametrize(
    "column",
    [
        {"ebird_code_multilabel": [5]},
        {"start_time": ["x"], "end_time": ["y"]},
        {"start_time": [[1.0]], "end_time": [[2.0]]},
        {"low_freq": ["x"]},
        {"local_time": pa.array([2**62], pa.timestamp("us"))},
        {"local_time": pa.array([0], pa.timestamp("ns", "Nowhere/Zone"))},
        {"filepath": NO_UTF8},
    ],
    ids=lambda column: f"{next(iter(column))} {type(next(iter(column.values())))}",
)
def test_metadata_of_other_kinds_is_refused(tmp_path, capsys, column):
    inputs.annotated(tmp_path)
    pq.write_table(pa.table({"filepath": ["0.wav"], "ebird_code": ["a"], **column}), tmp_path / "x_metadata_test.parquet")
    assert "x_metadata_test.parquet" in refused(capsys, "index", str(tmp_path), "--out", str(tmp_path / "out"))


@pytest.mark.parametrize(
    "name, text",
    [
        ("l.csv", "file,label\n0.wav," + "a" * 200_000 + "\n"),
        ("c.json", json.dumps({"recordings": [{"id": "1", "file-name": "0.wav", "gen": "\ud800"}]})),
    ],
    ids=["a long field", "half a character"],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, capsys, name, text):
    inputs.annotated(tmp_path)
    (tmp_path / name).write_text(text)
    assert name in refused(capsys, "index", str(tmp_path / name), "--out", str(tmp_path / "out"))


def test_a_channel_of_many_digits_is_none(tmp_path):
    inputs.annotated(tmp_path)
    (tmp_path / "0.selections.txt").write_text(RAVEN.format("9" * 5000))
    assert cli.main(["index", str(tmp_path), "--out", str(tmp_path / "out")]) == 0


def test_a_table_in_a_folder_is_not_read_through_a_link_out_of_it(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    inputs.annotated(tmp_path / "in")
    (tmp_path / "secret_metadata.csv").write_text("filepath,ebird_code\nsecret-name,a\n")
    os.symlink("../secret_metadata.csv", tmp_path / "in" / "x_metadata.csv")
    said = refused(capsys, "index", str(tmp_path / "in"), "--out", str(tmp_path / "out"))
    assert "leads out of" in said and "secret-name" not in said


@pytest.mark.parametrize("lie", [{"rate": 0}, {"rate": None}, {"frames": -5}, {"digest": None}, {"channels": "x"}], ids=str)
def test_headers_that_lie_are_read_again(tmp_path, capsys, lie):
    (tmp_path / "in").mkdir()
    inputs.annotated(tmp_path / "in")
    command = ["index", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    kept = tmp_path / "out" / "headers.cache"
    table = pq.read_table(kept)
    for name, value in lie.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array([value] * len(table)))
    pq.write_table(table, kept)
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "3 recordings read" in capsys.readouterr().out


def test_a_name_too_long_for_a_file_is_refused_in_an_archive(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x" * 300 + ".wav"))
    unpacked: pathlib.Path = tmp_path / "unpacked"
    said = refused(capsys, "index", str(tmp_path / "in"), "--unpack", str(unpacked), "--out", str(tmp_path / "out"))
    assert "a.tar cannot be unpacked" in said
