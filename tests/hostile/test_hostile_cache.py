"""A damaged cache entry is rebuilt: nothing waits for it, and nothing in it is unpickled."""

import gzip
import json
import os
import pickle

import numpy as np
import pytest

from jaxtrain.plan import plan_cache
from loaders.audio import remote, shards
from loaders.film import film_files
from loaders.io import machine
from loaders.sudoku import sudoku
from tests.hostile import inputs

KINDS = ("a pipe", "a folder", "a device", "garbage", "a pickle", "of other kinds", "a bomb")


class Payload:
    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (self.ran,)


def damage(path, kind: str, ran) -> None:
    content = {
        "garbage": b"\x80\x04garbage" * 9,
        "a pickle": pickle.dumps(Payload(str(ran))),
        "of other kinds": gzip.compress(
            b'{"arguments": "x", "temporaries": [], "peak": {}, "seconds": 0, "text": 5}'
        ),
        "a bomb": gzip.compress(bytes(4 << 20)),
    }
    path.unlink()
    if kind in content:
        path.write_bytes(content[kind])
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "a pipe" else os.mkdir)(path)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_cache, "MAX_UNPACKED", 1 << 20)
    sudoku._generated.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_cache_entry_is_not_used(cache, tmp_path, kind):
    said = plan_cache.Figures(1, 2, 3, 0.5, "text")
    plan_cache.keep("a", said)
    assert plan_cache.find("a") == said
    damage(machine.cache_folder(plan_cache.FOLDER, "a.json.gz"), kind, tmp_path / "ran")
    assert plan_cache.find("a") is None

    source = sudoku.Source(kind="sudoku4", n_train=4, n_test=2)
    boards = sudoku._generated(source, 0)["train"].inputs
    sudoku._generated.cache_clear()
    [path] = (cache / "puzzles").iterdir()
    damage(path, kind, tmp_path / "ran")
    assert (sudoku._generated(source, 0)["train"].inputs == boards).all()

    (tmp_path / "film").mkdir()
    inputs.film(tmp_path / "film")
    found = film_files.digests(film := film_files.open_folder(tmp_path / "film"))
    [path] = (cache / "digests").iterdir()
    damage(path, kind, tmp_path / "ran")
    assert film_files.digests(film) == found

    note = shards._note_of(tmp_path)
    note.parent.mkdir(parents=True)
    note.touch()
    damage(note, kind, tmp_path / "ran")
    assert shards._noted_root(tmp_path) == ""

    file = remote.File("gs://x/a.arrow", "a.arrow", 100, "tag", ("", ""))
    copy = tmp_path / "copy"
    assert remote._prepare(file, copy)
    if kind != "a folder":
        damage(copy / ".a.arrow.json", kind, tmp_path / "ran")
    assert remote._prepare(file, copy) and json.loads((copy / ".a.arrow.json").read_text()) == {
        "tag": "tag"
    }
    assert not (tmp_path / "ran").exists()


def test_nothing_of_numpys_files_is_unpickled(tmp_path):
    from loaders.io import files

    np.savez(
        tmp_path / "a.npz", x=np.array([Payload(str(tmp_path / "ran"))], object), allow_pickle=True
    )
    with pytest.raises(files.FileError):
        files.arrays(tmp_path / "a.npz")
    assert not (tmp_path / "ran").exists()
