"""Headers that lie: safetensors, as an export to take back and as the start of a run."""

import json
import pathlib

import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain.arrays import safetensors, safetensors_reader, stored, warm_start

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS = {
    "a number": b"5",
    "a list": b"[]",
    "null": b"null",
    "deep": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep enough for a walk": b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}",
    "no UTF-8": b'{"\xff": 1}',
    "many digits": b'{"a": ' + b"9" * 9000 + b"}",
    **{
        f"entry {json.dumps(entry)[:40]}": json.dumps({"a": entry}).encode()
        for entry in (
            5,
            None,
            [],
            "x",
            {},
            {**F32, "dtype": 5},
            {**F32, "dtype": ["F32"]},
            {**F32, "dtype": "F31"},
            {**F32, "shape": 4},
            {**F32, "shape": [-2, -2]},
            {**F32, "shape": [2.0, 2]},
            {**F32, "shape": [True, 4]},
            {**F32, "shape": ["2", 2]},
            {**F32, "shape": [2**62, 2**62]},
            {**F32, "shape": [2**64]},
            {**F32, "shape": [1] * 100},
            {**F32, "shape": None},
            {**F32, "data_offsets": [0]},
            {**F32, "data_offsets": [16, 0]},
            {**F32, "data_offsets": [-16, 0]},
            {**F32, "data_offsets": [0, 2**63]},
            {**F32, "data_offsets": None},
            {**F32, "data_offsets": [0.0, 16.0]},
            {**F32, "data_offsets": {"0": 0, "1": 16}},
            {**F32, "data_offsets": [1, 17]},
            {**F32, "shape": [0, 2**62], "data_offsets": [0, 16]},
        )
    },
}


def write(folder: pathlib.Path, header: bytes, *, length: int | None = None) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    content = (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(16)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_lies_is_refused_by_every_reader(tmp_path, what):
    folder = write(tmp_path / "in", HEADERS[what])
    with pytest.raises(stored.StoredError, match="model.safetensors"):
        safetensors.reverse(str(folder), str(tmp_path / "out"))
    with pytest.raises(warm_start.WarmStartError, match="model.safetensors"):
        warm_start.open_source(config_lib.WarmStart(source=str(folder)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**62, 2**64 - 1])
def test_a_length_that_lies_is_refused(tmp_path, length):
    with pytest.raises(stored.StoredError, match="does not fit in a file"):
        safetensors_reader.open_safetensors(write(tmp_path / "in", b"{}", length=length))


@pytest.mark.parametrize("step", [-1, 2**31, 1.5, "10", True, [1], {"a": 1}])
def test_a_step_that_is_no_number_of_a_step_is_refused(tmp_path, step):
    folder = write(tmp_path / "in", json.dumps({"a": F32}).encode())
    (folder / "jaxtrain.json").write_text(json.dumps({"step": step, "paths": {"a": "a"}}))
    with pytest.raises(stored.StoredError, match="its step is"):
        safetensors.reverse(str(folder), str(tmp_path / "out"))


def test_paths_that_lie_within_each_other_are_refused(tmp_path):
    header = {
        name: {**F32, "shape": [2], "data_offsets": [at, at + 8]}
        for at, name in ((0, "a"), (8, "a.b"))
    }
    with pytest.raises(stored.StoredError, match="path of a folder"):
        safetensors.reverse(
            str(write(tmp_path / "in", json.dumps(header).encode())), str(tmp_path / "out")
        )


@pytest.mark.parametrize("name", ["../secret.safetensors", "/dev/zero", "", "\0", 5, None])
def test_an_index_names_files_of_its_folder_alone(tmp_path, name):
    header = json.dumps({"a": F32}).encode()
    write(tmp_path / "outside", header)
    (tmp_path / "outside" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    folder = write(tmp_path / "in", header)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(stored.StoredError, match="leads out|names|weight_map"):
        safetensors_reader.open_safetensors(folder)


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path):
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    write(repository / "blobs", json.dumps({"a": F32}).encode())
    (repository / "blobs" / "model.safetensors").rename(repository / "blobs" / "abc")
    snapshot = repository / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    np.testing.assert_array_equal(
        safetensors_reader.open_safetensors(snapshot)["a"].read(()), np.zeros((2, 2), np.float32)
    )
