"""Files and arrays are known by their content, and read again only when they change."""

import dataclasses
import json
import os
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from loaders import base
from loaders.audio import spectrogram
from loaders.audio.recordings import headers
from loaders.audio.recordings.annotations import Errors
from loaders.chat import chat_audio, codec
from loaders.film import multimodal
from loaders.io import content, files, machine
from loaders.text import token_files, tokenise, tokens
from tests.hostile import inputs
from tests.support import chat, corpus


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(content, "RECENT", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def opened(monkeypatch):
    """The files that are read whole, in order."""
    names = []
    whole = content.whole

    def noted(parts):
        names.extend(path.name for path in parts)
        return whole(parts)

    monkeypatch.setattr(content, "whole", noted)
    return names


def write(folder: pathlib.Path, n: int = 3) -> dict[str, list[pathlib.Path]]:
    folder.mkdir(parents=True)
    for i in range(n):
        (folder / f"{i}.bin").write_bytes(bytes([i]) * 1000)
    return {f"{i}.bin": [folder / f"{i}.bin"] for i in range(n)}


def test_a_file_is_read_again_when_it_changes_alone(tmp_path, opened):
    parts = write(tmp_path / "a")
    first = content.known(parts)
    assert sorted(opened) == ["0.bin", "1.bin", "2.bin"]
    opened.clear()
    assert content.known(parts) == first and not opened
    path = tmp_path / "a" / "1.bin"
    times = path.stat()
    with path.open("r+b") as file:  # in place, and with its old time
        file.write(b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = content.known(parts)
    assert opened == ["1.bin"] and again["1.bin"] != first["1.bin"]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    moved = content.known({name: [tmp_path / "b" / name] for name in parts})
    assert moved == again, "a copy elsewhere is the same data"


def test_a_file_that_changed_a_moment_ago_is_not_trusted(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(content, "RECENT", 60.0)
    parts = write(tmp_path / "a", n=1)
    assert content.known(parts) == content.known(parts)
    assert opened == ["0.bin", "0.bin"]


def test_beyond_the_bound_files_are_sampled(tmp_path, opened, monkeypatch):
    parts = write(tmp_path / "a")
    monkeypatch.setattr(content, "WHOLE", 2999)
    sampled = content.known(parts)
    assert not opened
    (tmp_path / "a" / "2.bin").write_bytes(b"other" * 200)
    assert content.known(parts)["2.bin"] != sampled["2.bin"]
    monkeypatch.setattr(content, "MAX_SAMPLED", 2)
    assert sorted(content.known(parts)) == ["0.bin", "2.bin"]


def test_a_sample_has_both_ends_and_blocks_between(tmp_path):
    size = 3 * content.N_BLOCKS * content.BLOCK
    path = tmp_path / "large"
    path.write_bytes(bytes(size))
    first = content.sample([path])
    for place in (0, size - 1):
        data = bytearray(size)
        data[place] = 1
        path.write_bytes(data)
        assert content.sample([path]) != first


def test_a_fingerprint_is_of_values_and_not_of_their_form(tmp_path):
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    same = [x, x.copy(), np.asfortranarray(x)]
    assert len({base.fingerprint(array) for array in same}) == 1
    changed = x.copy()
    changed[2, 3] = -1
    (tmp_path / "f").write_bytes(b"1")
    values = [x, changed, x.T, x.astype(np.int64), (x, 1), (x, 2), {"x": x}, "x", b"x", None]
    values += [tmp_path / "f", [x, x], np.float32(2.5)]
    assert len({base.fingerprint(value) for value in values}) == len(values)
    assert base.fingerprint(np.float64(2.5)) == base.fingerprint(2.5)
    for value in (object(), np.array([None])):
        with pytest.raises(TypeError, match="a fingerprint is of arrays"):
            base.fingerprint(value)


def test_large_arrays_are_sampled(monkeypatch):
    monkeypatch.setattr(content, "WHOLE_ARRAYS", 1000)
    x = np.zeros((content.N_BLOCKS, content.BLOCK), np.uint8)
    first = base.fingerprint(x)
    x[-1, -1] = 1
    assert base.fingerprint(x) != first


def make_tokens(folder: pathlib.Path) -> pathlib.Path:
    """Make three shards of 40 documents each."""
    inputs = []
    for i in range(3):
        inputs.append(folder / f"{i}.jsonl")
        lines = [json.dumps({"text": f"text {i} {n}"}) + "\n" for n in range(40)]
        inputs[-1].write_text("".join(lines))
    options = tokenise.Options("bytes", "", "text", "file")
    tokenise.make(folder / "corpus", [str(path) for path in inputs], options)
    return folder / "corpus"


def load(folder: pathlib.Path) -> tokens.Tokens:
    config = tokens.Config((tokens.Source(str(folder)),), context=8)
    return tokens.make_loader(config, split="train", rows=base.Rows(4, ((0, 4),)), seed=0)


def flip(path: pathlib.Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("bound", [content.WHOLE, 0])
def test_a_token_shard_that_was_changed_in_place_is_named(tmp_path, opened, monkeypatch, bound):
    folder = make_tokens(tmp_path)
    monkeypatch.setattr(content, "WHOLE", bound)
    first = load(folder).fingerprint
    opened.clear()
    assert load(folder).fingerprint == first and not opened, "nothing has changed"
    flip(folder / "00001.tokens")
    with pytest.raises(base.DataError, match="corpus/00001.tokens or .docs is not the file that"):
        load(folder)
    assert opened == (["00001.tokens", "00001.docs"] if bound else [])
    options = tokenise.Options("bytes", "", "text", "file")
    with pytest.raises(base.DataError, match="corpus/00001.tokens or .docs"):
        tokenise.make(folder, [str(tmp_path / f"{i}.jsonl") for i in range(3)], options)
    flip(folder / "00001.tokens")
    assert load(folder).fingerprint == first


def test_damage_that_left_the_times_as_they_were_is_found_by_reading_all(tmp_path, monkeypatch):
    folder = make_tokens(tmp_path)
    loader = load(folder)
    assert loader.compare_content(60.0) == (
        "3 of 3 shards were read whole, and are as tokens.json records"
    )
    assert loader.compare_content(-1.0).startswith("0 of 3 shards")
    flip(folder / "00002.docs")
    monkeypatch.setattr(content, "_stamp", lambda parts: [[0, 0, 0, 0]])
    with pytest.raises(base.DataError, match="corpus/00002.tokens or .docs"):
        loader.compare_content(60.0)


def test_a_machine_without_a_home_compares_at_each_start(tmp_path, opened, monkeypatch):
    folder = make_tokens(tmp_path)

    def nowhere(*parts):
        raise FileNotFoundError("there is no such home")

    monkeypatch.setattr(machine, "cache_folder", nowhere)
    for _ in range(2):
        token_files.compare(folder)
    assert len(opened) == 12


def recordings(path: pathlib.Path) -> str:
    """The fingerprint of recordings, in shards or as files of their own."""
    settings = dict(label="", test_share=0.0, threads=1, allow_debug_build=True)
    config = spectrogram.Config(train=str(path), **settings)
    rows = base.Rows(1, ((0, 1),))
    loader = spectrogram.make_loader(config, split="train", rows=rows, seed=0)
    loader.close()
    return loader.fingerprint


@pytest.mark.parametrize("bound", [content.WHOLE, 0])
def test_a_sample_of_a_recording_in_a_shard_is_part_of_the_fingerprint(
    tmp_path, monkeypatch, bound
):
    monkeypatch.setattr(content, "WHOLE", bound)
    shard = corpus.write(
        tmp_path / "train-0.arrow", corpus.table([corpus.wav(i) for i in range(3)], [0, 1, 0])
    )
    first = recordings(shard)
    assert recordings(shard) == first
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1  # a sample of a recording: the rows and sizes stay as they were
    shard.write_bytes(raw)
    assert recordings(shard) != first


def test_each_byte_of_a_recording_that_is_a_file_is_part_of_the_fingerprint(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.wav").write_bytes(corpus.wav(i, seconds=2.0))
    parts = [dict(path=f"{i}.wav", start=0.0, end=1.0) for i in range(2)]
    columns = {name: [part[name] for part in parts] for name in ("path", "start", "end")}
    audio = [{"bytes": None, "path": path} for path in columns.pop("path")]
    table = pa.table({"audio": pa.array(audio, corpus.AUDIO), **columns})
    shard = corpus.write(tmp_path / "train-0.arrow", table)
    first = recordings(shard)
    raw = bytearray((tmp_path / "1.wav").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "1.wav").write_bytes(raw)
    assert recordings(shard) != first


def replace_under_an_older_date(path: pathlib.Path, data: bytes) -> None:
    """As `cp -p` or `rsync -t` of an older file does, in place."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    older = before.st_mtime_ns - 10**12
    os.utime(path, ns=(older, older))
    assert path.stat().st_size == before.st_size and path.stat().st_ino == before.st_ino


def test_a_film_that_was_replaced_under_its_old_date_is_another(tmp_path, opened):
    inputs.film(tmp_path)
    path = tmp_path / "dataset.json"
    info = json.loads(path.read_text())
    del info["files"]  # as of a folder made by hand
    path.write_text(json.dumps(info))

    def fingerprint() -> str:
        config = multimodal.Config(path=str(tmp_path))
        loader = multimodal.make_loader(config, split="train", rows=base.Rows(1, ((0, 1),)), seed=0)
        loader.close()
        return loader.fingerprint

    first = fingerprint()
    assert len(opened) == 3 + len(info["subjects"])
    opened.clear()
    assert fingerprint() == first and not opened, "a start reads no file again"
    fmri = tmp_path / "fmri" / f"{info['subjects'][0]}.npy"
    times = fmri.stat()
    changed = bytearray(fmri.read_bytes())
    changed[-2:] = np.float16(0.25).tobytes()
    fmri.write_bytes(changed)
    os.utime(fmri, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fingerprint() != first and opened == [fmri.name]


def test_a_recording_that_was_replaced_under_an_older_date_is_encoded_again(
    tmp_path, opened, monkeypatch
):
    (tmp_path / "chat").mkdir()
    config = chat.corpus(tmp_path / "chat", n=12)
    decoded = []

    def noted(data, *rest):
        decoded.append(len(data))
        return chat.DECODE(data, *rest)

    monkeypatch.setattr(codec._rust, "decode", noted)

    def fingerprint(folder: pathlib.Path) -> str:
        chat.forget()
        names = {"manifest": "manifest.json", "tokenizer": "tokenizer.json", "codec": "codec.npz"}
        paths = {name: str(folder / file) for name, file in names.items()}
        moved = dataclasses.replace(config, **paths)
        rows = base.Rows(4, ((0, 4),))
        return chat_audio.make_loader(moved, split="train", rows=rows, seed=0).fingerprint

    first = fingerprint(tmp_path / "chat")
    assert len(decoded) == 3 and fingerprint(tmp_path / "chat") == first
    assert len(decoded) == 3 and not opened, "a start reads no recording again"

    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "chat", copy)
    assert fingerprint(copy) == first and len(decoded) == 3, "a copied folder keeps its codes"
    assert sorted(opened) == ["0.wav", "1.wav", "2.wav"]
    opened.clear()
    assert fingerprint(copy) == first and not opened, "and is read once"

    quiet = 0.5 * chat.wave(1, 0.8)
    soundfile.write(tmp_path / "quiet.wav", quiet, 32_000)
    replace_under_an_older_date(copy / "0.wav", (tmp_path / "quiet.wav").read_bytes())
    assert fingerprint(copy) != first and len(decoded) == 4
    assert fingerprint(copy) != first and len(decoded) == 4


def test_what_is_known_of_a_file_by_its_date_is_forgotten_under_an_older_date_too(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.zeros(16_000), 16_000, subtype="PCM_16")
    stamps = files.stamps([path])
    errors = Errors()
    first, n_read = headers.read_all([str(path)], {}, errors)
    assert n_read == 1
    again, n_read = headers.read_all([str(path)], first, errors)
    assert again == first and n_read == 0 and files.stamps([path]) == stamps

    soundfile.write(tmp_path / "b.wav", np.zeros(16_000), 8_000, subtype="PCM_16")
    replace_under_an_older_date(path, (tmp_path / "b.wav").read_bytes())
    again, n_read = headers.read_all([str(path)], first, errors)
    assert n_read == 1 and again[str(path)].rate == 8_000
    assert files.stamps([path]) != stamps
