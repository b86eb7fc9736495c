"""s3:// and hf:// through their own clients, from a stand-in that fails, is slow and cuts its
answers short."""

import collections
import hashlib
import http.server
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest

from tests.support import corpus

ROOT = pathlib.Path(__file__).parents[2]
# of a file's answers with a part of it, by their number
FAULTS = {1: "error", 2: "short", 3: "slow"}
CODE = """
from loaders.audio import remote
remote.WAIT, remote.PART, remote.TOGETHER = 0.01, 20_000, 1
print(remote.fetch({address!r}))
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the requests of both clients: listings, information about a file, and parts of it."""

    protocol_version = "HTTP/1.1"
    folder: pathlib.Path
    asked: collections.Counter
    wrong = ""  # name of a file whose bytes do not match its checksum

    def log_message(self, *args):
        pass

    def do_POST(self):
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.reply(
            json.dumps([self.hub_file(self.folder / name) for name in form["paths"]]).encode()
        )

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        path = urllib.parse.unquote(url.path)
        if found := re.fullmatch(r"/api/datasets/me/birds/tree/main/?(.*)", path):
            below = self.folder / found[1]
            files = (
                below.rglob("*")
                if query.get("recursive", "").lower() in ("true", "1")
                else below.iterdir()
            )
            return self.reply(json.dumps([self.hub_file(file) for file in sorted(files)]).encode())
        if path.startswith("/api/datasets/me/birds"):
            return self.reply(
                json.dumps(
                    {"id": "me/birds", "sha": "0" * 40, "private": False, "tags": []}
                ).encode()
            )
        if path.strip("/") == "bucket":
            return self.reply(self.s3_list(query), kind="application/xml")
        file = self.folder / re.sub(r"^/(bucket|datasets/me/birds/resolve/main)/", "", path)
        if not file.is_file():
            return self.reply(b"", 404)
        data = file.read_bytes()
        if file.name == self.wrong:
            data = data[:-1] + b"?"
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        head = {
            "ETag": f'"{hashlib.md5(file.read_bytes()).hexdigest()}"',
            "Last-Modified": "Sun, 01 Mar 2026 00:00:00 GMT",
        }
        if not wanted:
            return self.reply(data, **head)
        self.asked[file.name] += 1
        fault = FAULTS.get(self.asked[file.name])
        if fault == "error":
            return self.reply(b"", 503)
        time.sleep(0.2 * (fault == "slow"))
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        part = data[first : last + 1]
        part = part[: len(part) // 2] if fault == "short" else part
        self.reply(
            part,
            206,
            **head,
            **{"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"},
        )

    do_HEAD = do_GET

    def hub_file(self, file):
        name = str(file.relative_to(self.folder))
        if file.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        size, digest = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
        about = {"type": "file", "path": name, "oid": digest[:40], "size": size}
        return {**about, "lfs": {"oid": digest, "size": size, "pointerSize": 130}}

    def s3_list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, folders = [], set()
        for file in sorted(self.folder.rglob("*")):
            name = str(file.relative_to(self.folder))
            if not file.is_file() or not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            data = file.read_bytes()
            keys.append(
                f"<Contents><Key>{name}</Key><LastModified>2026-03-01T00:00:00.000Z</LastModified>"
                f"<Size>{len(data)}</Size>"
                f"<ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;</ETag>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        folders = [
            f"<CommonPrefixes><Prefix>{each}</Prefix></CommonPrefixes>" for each in sorted(folders)
        ]
        head = f"<Name>bucket</Name><Prefix>{prefix}</Prefix><KeyCount>{len(keys)}</KeyCount>"
        head += "<IsTruncated>false</IsTruncated>"
        return (
            "<?xml"
            f' version="1.0"?><ListBucketResult>{head}{"".join(keys + folders)}'
            "</ListBucketResult>".encode()
        )

    def reply(self, body, status=200, kind="application/json", **headers):
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.mark.parametrize(
    ("package", "address"),
    [("s3fs", "s3://bucket/train"), ("huggingface_hub", "hf://datasets/me/birds/train")],
    ids=["s3", "hf"],
)
def test_shards_come_whole_from_a_store_that_fails(tmp_path, package, address):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package} here")
    content = {}
    for i, n in enumerate((3, 1)):
        table = corpus.table([corpus.wav(j, 0.3) for j in range(n)], [0] * n)
        shard = corpus.write(tmp_path / "web" / "train" / f"data-{i:05d}-of-00002.arrow", table)
        content[shard.name] = shard.read_bytes()
    handler = type("Of", (Handler,), {"folder": tmp_path / "web", "asked": collections.Counter()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    env = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    env |= {
        "FSSPEC_S3": json.dumps({"anon": True, "endpoint_url": url}),
        "JAXTRAIN_CACHE": str(tmp_path / "cache"),
    }

    def fetch():
        code = CODE.format(address=address)
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
        )

    try:
        done = fetch()
        assert done.returncode == 0, done.stderr
        folder = pathlib.Path(done.stdout.strip())
        assert {path.name: path.read_bytes() for path in folder.rglob("*.arrow")} == content
        assert min(handler.asked.values()) > len(FAULTS)
        n = sum(handler.asked.values())
        assert fetch().returncode == 0 and sum(handler.asked.values()) == n, (
            "what is there is not copied again"
        )
        handler.wrong = min(content)
        env["JAXTRAIN_CACHE"] = str(tmp_path / "other")
        done = fetch()
        assert "came with the" in done.stderr and "and the store says" in done.stderr
        assert not list((tmp_path / "other").rglob(min(content)))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
