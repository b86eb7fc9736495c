"""The file of an index, as rust/core/src/source/cache.rs documents it."""

import os

import numpy as np
import pytest

from loaders import _rust
from tests.support import corpus


@pytest.fixture
def shards(tmp_path):
    table = corpus.table([b"first", b"", b"third", None, b"fifth"], [0, None, 1, 1, 0])
    return [
        corpus.write(tmp_path / "0.arrow", table, batch=2),
        corpus.write_parquet(tmp_path / "1.parquet", table, compression="snappy"),
        corpus.write_parquet(tmp_path / "2.parquet", table, compression="none", row_group_size=2),
    ]


def content(index):
    read = [index.encoded(row) for row in range(len(index)) if row % 5 != 3]
    return (
        index.labels.tolist(),
        index.class_names,
        index.fingerprint,
        index.first_rows.tolist(),
        index.paths(),
        read,
    )


def open_cached(shards, folder, label="label"):
    return content(_rust.Index(shards, label=label, cache=folder))


def test_the_cache_holds_what_the_shards_say(shards, tmp_path):
    fresh = content(_rust.Index(shards, label="label"))
    for _ in range(2):
        assert open_cached(shards, tmp_path / "cache") == fresh
    (file,) = (tmp_path / "cache").iterdir()
    time = file.stat().st_mtime_ns
    assert open_cached(shards, tmp_path / "cache") == fresh
    assert file.stat().st_mtime_ns == time, "it was read, not written again"


def test_a_shard_that_changed_is_read_again(shards, tmp_path):
    before = open_cached(shards, tmp_path / "cache")
    other = corpus.table([b"fifth", b"", b"third", None, b"first"], [1, None, 1, 1, 0])
    stat = shards[0].stat()
    corpus.write(shards[0], other, batch=2)
    os.utime(shards[0], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # of the same size
    after = open_cached(shards, tmp_path / "cache")
    assert after[0][0] == 1 and after != before
    assert len(list((tmp_path / "cache").iterdir())) == 1, "the old one is replaced"
    assert open_cached(shards[:2], tmp_path / "cache")[0] == after[0][:10]
    assert open_cached(shards, tmp_path / "cache", label=None)[0] == [-1] * 15


def test_a_broken_cache_is_made_again(shards, tmp_path):
    fresh = open_cached(shards, tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()
    rng = np.random.default_rng(0)
    cuts = [good[:size] for size in (0, 1, 17, 40, len(good) // 2, len(good) - 1)]
    for broken in (
        *cuts,
        good + b"x",
        *(flip(good, int(at)) for at in rng.integers(len(good), size=200)),
    ):
        file.write_bytes(broken)
        assert open_cached(shards, tmp_path / "cache") == fresh
        assert file.read_bytes() == good


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def test_a_folder_that_cannot_be_written_costs_nothing(shards, tmp_path):
    (tmp_path / "file").write_text("")
    assert open_cached(shards, tmp_path / "file" / "cache") == open_cached(
        shards, tmp_path / "cache"
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [
        next((tmp_path / "cache").iterdir()).name
    ]
