"""Shards on a server that fails, is slow and cuts its answers short: the copies are complete,
bounded and resumed."""

import contextlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from loaders.audio import remote, remote_cache, shards
from loaders.audio.spectrogram import Config, dataset_info, make_loader
from loaders.base import DataError, Rows
from tests.support import corpus, object_store, processes

pytest.importorskip("aiohttp")
ROOT = pathlib.Path(__file__).parents[2]


class Store(http.server.ThreadingHTTPServer):
    """Serves a folder with ranges and tags. ``faults`` is called before each part and returns None,
    "error", "short" or "slow"."""

    daemon_threads = True

    def __init__(self, folder: pathlib.Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.asked, self.faults = folder, [], lambda path, n: None
        self.claim = 0  # [bytes] that the server states as the size of every file, unless 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Store

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        path = self.server.folder / self.path.strip("/")
        if path.is_dir():
            base = self.path.rstrip("/")
            links = "".join(
                f'<a href="{base}/{p.name}{"/" * p.is_dir()}">{p.name}</a>'
                for p in sorted(path.iterdir())
            )
            return self.send(200, links.encode(), body, {"Content-Type": "text/html"})
        if not path.is_file():
            return self.send(404, b"", body, {})
        data = path.read_bytes()
        headers = {
            "Accept-Ranges": "bytes",
            "ETag": f'"{path.stat().st_mtime_ns}"',
            "Content-Type": "application/x-arrow",
        }
        wanted = self.headers.get("Range")
        if not wanted:
            return self.send(200, data, body, headers)
        first, last = (int(text) for text in wanted.removeprefix("bytes=").split("-"))
        self.server.asked.append((path.name, first))
        fault = self.server.faults(
            path.name, sum(name == path.name for name, _ in self.server.asked)
        )
        if fault == "error":
            return self.send(503, b"", body, {})
        if fault == "slow":
            time.sleep(0.05)
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.send(206, part[: len(part) // 2] if fault == "short" else part, body, headers)

    def send(self, status: int, data: bytes, body: bool, headers: dict):
        self.send_response(status)
        size = self.server.claim if self.server.claim and not body else len(data)
        for name, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAIT", 0.01)
    monkeypatch.setattr(remote, "PART", 20_000)
    monkeypatch.setattr(remote, "TOGETHER", 2)
    monkeypatch.setattr(remote, "_held", {})
    monkeypatch.setattr(remote, "_copies", {})
    for split, n in (("train", 3), ("test", 2)):
        shard = corpus.table([corpus.wav(i, 0.5) for i in range(n)], [i % 2 for i in range(n)])
        corpus.write(tmp_path / "web" / "birds" / split / "data-00000-of-00001.arrow", shard)
    server = Store(tmp_path / "web")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.arrow")}


def test_a_run_reads_shards_from_an_address(store, tmp_path):
    address = f"{store.url}/birds/"
    config = Config(train=address, label="label", clip_seconds=0.4, n_frames=64, threads=1)
    assert not config.exists() and not list(config.validate()), (
        "nothing is copied to look at a config"
    )
    assert (dataset_info(config)["n_train"], dataset_info(config)["n_test"]) == (3, 2)
    processes.wait_for(config.exists)  # the info needs the headers, and the rest comes meanwhile
    local = Config(**{**config.__dict__, "train": str(tmp_path / "web" / "birds")})
    batches = []
    for each in (config, local):
        loader = make_loader(each, split="train", rows=Rows(3, ((0, 3),)), seed=0)
        batches.append({name: part[0].tobytes() for name, part in next(loader)[1].items()})
        loader.close()
    assert batches[0] == batches[1]


def test_a_system_without_fdatasync_copies(store, monkeypatch):
    """On macOS there is only fsync."""
    monkeypatch.delattr(os, "fdatasync", raising=False)
    assert (
        dataset_info(Config(train=f"{store.url}/birds/", label="label", threads=1))["n_train"] == 3
    )


def test_errors_slow_answers_and_truncation_are_overcome(store, tmp_path):
    store.faults = lambda name, n: {1: "error", 2: "short", 3: "slow", 5: "error"}.get(n)
    folder = pathlib.Path(remote.fetch(f"{store.url}/birds/"))
    assert content(folder) == content(tmp_path / "web" / "birds")
    n = len(store.asked)
    remote._held.clear()
    remote.fetch(f"{store.url}/birds/")
    assert len(store.asked) == n, "what is there is not copied again"


@pytest.fixture
def long_shard(store, tmp_path, monkeypatch):
    """65 parts, requested one after the other."""
    monkeypatch.setattr(remote, "TOGETHER", 1)
    monkeypatch.setattr(remote, "AT_ONCE", 1)
    content = corpus.table([corpus.wav(i, 0.5) for i in range(40)], [i % 2 for i in range(40)])
    shard = corpus.write(tmp_path / "web" / "long" / "data-00000-of-00001.arrow", content)
    (shard.parent / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": shard.name}]})
    )
    return shard


def batches(path, n=5):
    config = Config(
        train=path, label="label", clip_seconds=0.4, n_frames=64, threads=2, test_share=0.1
    )
    with contextlib.closing(
        make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=3)
    ) as loader:
        for _ in range(n):
            yield {name: part[0].tobytes() for name, part in next(loader)[1].items()}


def test_a_run_begins_before_all_is_there_and_reads_the_same(store, tmp_path, long_shard):
    store.faults = lambda name, n: "error" if n == 2 else "slow"
    expected = list(batches(str(long_shard.parent)))
    found = batches(f"{store.url}/long/")
    first = [next(found)]
    asked, n_parts = len(store.asked), -(-long_shard.stat().st_size // remote.PART)
    assert n_parts > 60 and 3 < asked < n_parts / 2, (
        "eight rows are there, and most of the shard is not"
    )
    store.faults = lambda name, n: None
    assert first + list(found) == expected
    folder = pathlib.Path(remote.fetch(f"{store.url}/long/"))
    assert content(folder) == content(long_shard.parent) and not list(folder.rglob(".*.parts"))
    assert len(store.asked) == n_parts + 2, (
        "each part and state.json came once, but for the part that failed"
    )


def test_a_store_that_ends_midway_ends_the_run_and_the_next_one_resumes(
    store, tmp_path, long_shard
):
    address = f"{store.url}/long/"
    store.faults = lambda name, n: "error" if n > 30 else None
    with pytest.raises(
        DataError,
        match=r"is incomplete, and the rest cannot be copied .*after 6 tries .*; rerun to resume",
    ):
        list(batches(address))
    with pytest.raises(DataError, match="after 6 tries"):
        remote.fetch(address)
    store.faults, store.asked = lambda name, n: None, []
    assert list(batches(address)) == list(batches(str(long_shard.parent)))
    remote.fetch(address)
    assert len(store.asked) < 40, "what was there is not asked for again"


def test_an_interrupted_copy_resumes_and_a_changed_file_begins_again(store, tmp_path):
    shard = tmp_path / "web" / "birds" / "train" / "data-00000-of-00001.arrow"
    store.faults = lambda name, n: "error" if n > 2 else None
    with pytest.raises(DataError, match="cannot be had after 6 tries .*; rerun to resume"):
        remote.fetch(f"{store.url}/birds/train/")
    # in any order of the requests
    came = set([first for name, first in store.asked if name == shard.name][:2])
    store.faults, store.asked = lambda name, n: None, []
    folder = pathlib.Path(remote.fetch(f"{store.url}/birds/train/"))
    assert len(came) == 2 and not came & {first for _, first in store.asked}, "two parts were there"
    assert content(folder) == content(shard.parent)
    corpus.write(shard, corpus.table([corpus.wav(7, 0.6)], [0]))
    remote._held.clear()
    remote.fetch(f"{store.url}/birds/train/")
    assert content(folder) == content(shard.parent)


def test_the_cache_is_bounded_and_what_is_in_use_stays(store, tmp_path, monkeypatch):
    size = sum(map(len, content(tmp_path / "web" / "birds" / "train").values()))
    first = pathlib.Path(remote.fetch(f"{store.url}/birds/train/"))
    monkeypatch.setenv("JAXTRAIN_SHARDS_GB", str(1.2 * size / 1e9))
    with pytest.raises(DataError, match="runs use .* of the cache's"):
        remote.fetch(f"{store.url}/birds/test/")
    assert content(first), "this process has it mapped"
    remote._held.pop(str(first)).close() if hasattr(remote._held[str(first)], "close") else None
    second = pathlib.Path(remote.fetch(f"{store.url}/birds/test/"))
    assert content(second) and not first.exists()
    monkeypatch.setenv("JAXTRAIN_SHARDS_GB", "0.00001")
    with pytest.raises(DataError, match="and the cache may hold 0.0 GB; set JAXTRAIN_SHARDS_GB"):
        remote.fetch(f"{store.url}/birds/train/")


def test_a_servers_claimed_size_evicts_nothing_from_the_cache_before_the_bytes_arrive(
    store, tmp_path, monkeypatch
):
    first = pathlib.Path(remote.fetch(f"{store.url}/birds/train/"))
    whole = content(first)
    size = sum(map(len, whole.values()))
    remote._held.clear()
    monkeypatch.setenv("JAXTRAIN_SHARDS_GB", str(2 * size / 1e9))
    for claim, reason in (
        (3 * size, "and the cache may hold"),
        (int(1.9 * size), "cannot be had after 6 tries .*bytes came"),
    ):
        store.claim = claim
        with pytest.raises(DataError, match=reason):
            remote.fetch(f"{store.url}/birds/test/")
        assert content(first) == whole


@pytest.mark.parametrize("limit", ["nan", "-1", "much"])
def test_a_limit_of_the_cache_is_a_number(tmp_path, monkeypatch, limit):
    monkeypatch.setenv("JAXTRAIN_SHARDS_GB", limit)
    with pytest.raises(DataError, match=f"JAXTRAIN_SHARDS_GB is '{limit}'; expected a number"):
        remote_cache.DiskBudget(tmp_path, 1, "https://x")


def test_a_copy_serves_without_a_network(store, caplog):
    address = f"{store.url}/birds/train/"
    folder = remote.fetch(address)
    remote._held.clear()
    store.shutdown()
    store.server_close()
    assert remote.fetch(address) == folder and "the copy of before is used" in caplog.text


def test_addresses_that_hold_nothing_say_so(store):
    with pytest.raises(DataError, match="holds no Arrow or Parquet shards|cannot be listed"):
        remote.fetch(f"{store.url}/nothing/")
    with pytest.raises(DataError, match="s3://bucket/x (needs s3fs|cannot be listed)"):
        shards.resolve("s3://bucket/x")


def test_a_bucket_of_google_through_gcsfs(tmp_path):
    """The real client requests files from a stand-in. A copy with a different MD5 is refused, and
    nothing of it stays."""
    pytest.importorskip("gcsfs")
    objects = object_store.Store(tmp_path / "objects")
    server = object_store.Server(
        ("127.0.0.1", 0), type("Handler", (object_store.Handler,), {"store": objects})
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    made = corpus.write(
        tmp_path / "a.arrow", corpus.table([corpus.wav(i, 0.3) for i in range(3)], [0, 1, 0])
    ).read_bytes()
    for split in ("train", "test"):
        objects.put("birds", f"xcm/{split}/data-00000-of-00001.arrow", made)
    objects.put("birds", "bad/a.arrow", made)
    path = objects._path("birds", "bad/a.arrow")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    env = {
        **os.environ,
        **object_store.environment(server.server_address[1]),
        "JAXTRAIN_CACHE": str(tmp_path / "cache"),
    }
    code = (
        "from loaders.audio import remote\nfor name in ('xcm', 'bad'):"
        " print(remote.fetch(f'gs://birds/{name}'))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert set(content(pathlib.Path(done.stdout.strip())).values()) == {made}, done.stderr
    assert (
        "DataError: birds/bad/a.arrow came with the md5" in done.stderr
        and "and the store says" in done.stderr
    )
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 2


def test_checksums_of_stores():
    assert remote._digest({"md5Hash": "1B2M2Y8AsgTpgAmY7PhCfg=="}) == (
        "md5",
        "d41d8cd98f00b204e9800998ecf8427e",
    )
    assert remote._digest({"lfs": {"sha256": "ab"}}) == ("sha256", "ab")
    tag = "d41d8cd98f00b204e9800998ecf8427e"
    assert remote._digest({"ETag": f'"{tag}"', "StorageClass": "STANDARD"}) == ("md5", tag)
    assert remote._digest({"ETag": f'"{tag}-3"', "StorageClass": "STANDARD"}) == (
        "",
        "",
    ), "of several parts"


def test_a_wrong_checksum_is_refused(tmp_path):
    class System:
        def cat_file(self, path, start, end):
            return b"x" * (end - start)

    file = remote.File("bucket/a.arrow", "a.arrow", 100, "t", ("md5", "0" * 32))
    assert remote._prepare(file, tmp_path)
    with pytest.raises(DataError, match="the store says 0000"):
        remote._Copy(
            System(), [file], tmp_path, remote_cache.DiskBudget(tmp_path, 100, "gs://bucket")
        ).wait()
    assert not [path for path in tmp_path.iterdir() if "a.arrow" in path.name]


def test_an_index_with_a_wrong_checksum_is_never_taken_for_whole(tmp_path, monkeypatch):
    """The copy of a refused file goes, as do the parts of a complete one. The error is set before,
    however slowly, and a run waits for the threads of the others."""

    class System:
        def cat_file(self, path, start, end):
            if path.endswith(".arrow"):
                time.sleep(0.1)
            return b"x" * (end - start)

    fail = remote._Copy._fail

    def fail_slowly(copy, error):
        time.sleep(0.3)
        fail(copy, error)

    monkeypatch.setattr(remote._Copy, "_fail", fail_slowly)
    digests = {"state.json": ("md5", "0" * 32), "a.arrow": ("", "")}
    files = [remote.File(name, name, 100, "t", digest) for name, digest in digests.items()]
    assert all(remote._prepare(file, tmp_path) for file in files)
    budget = remote_cache.DiskBudget(tmp_path, 200, "gs://bucket")
    with pytest.raises(DataError, match=r"state\.json came with the md5"):
        remote._Copy(System(), files, tmp_path, budget).wait(texts=True)
