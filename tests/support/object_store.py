"""A stand-in for an object store on loopback: the part of Google's JSON API that the checkpoints'
clients use.

Objects are whole or absent, and there are no folders or renames. A read may ask for a range, and a
write may require that nobody wrote in between. ``python object_store.py PORT FOLDER`` serves until
it is killed. The objects outlive it.
"""

import base64
import contextlib
import hashlib
import json
import pathlib
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Store:
    """Objects by (bucket, name). Each is a file, named by the hash of its name, with the name in
    its first line."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, bucket: str, name: str) -> pathlib.Path:
        return self._folder / hashlib.sha256(f"{bucket}/{name}".encode()).hexdigest()

    def get(self, bucket: str, name: str) -> tuple[bytes, dict] | None:
        try:
            head, _, data = self._path(bucket, name).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return data, json.loads(head)

    def put(self, bucket: str, name: str, data: bytes) -> dict:
        old = self.get(bucket, name)
        generation = str(int(old[1]["generation"]) + 1 if old else 1)
        about = {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "name": name,
            "bucket": bucket,
            "generation": generation,
            "metageneration": "1",
            "size": str(len(data)),
            "etag": generation,
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "storageClass": "STANDARD",
        }
        new = self._path(bucket, name).with_suffix(f".{threading.get_ident()}")
        new.write_bytes(json.dumps(about).encode() + b"\n" + data)
        new.replace(self._path(bucket, name))
        return about

    def delete(self, bucket: str, name: str) -> bool:
        path = self._path(bucket, name)
        existed = path.exists()
        path.unlink(missing_ok=True)
        return existed

    def all(self, bucket: str) -> list[dict]:
        heads = []
        for path in self._folder.iterdir():
            # a request deletes it meanwhile: it is in no list
            with contextlib.suppress(FileNotFoundError):
                if not path.suffix:
                    heads.append(json.loads(path.open("rb").readline()))
        return sorted((h for h in heads if h["bucket"] == bucket), key=lambda h: h["name"])


class Server(ThreadingHTTPServer):
    def handle_error(self, request, address):
        if not isinstance(sys.exception(), ConnectionError):  # of a client that was killed
            super().handle_error(request, address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store
    uploads: dict[str, tuple[str, str, bytearray]] = {}

    def log_message(self, *_):
        pass

    def _answer(self, code: int, body: bytes | dict = b"", **headers: str) -> None:
        kind = "application/json" if isinstance(body, dict) else "application/octet-stream"
        body = json.dumps(body).encode() if isinstance(body, dict) else body
        self.send_response(code)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            # a client that was killed, or has read enough
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

    def _missing(self) -> None:
        self._answer(
            404,
            {
                "error": {
                    "code": 404,
                    "message": "No such object",
                    "errors": [{"reason": "notFound"}],
                }
            },
        )

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {k: v[0] for k, v in urllib.parse.parse_qs(url.query).items()}
        body = self._body()
        with self.store.lock:
            self._route(self.command, url.path, query, body, self._answer)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _handle

    def _route(self, method, path, query, body, answer) -> None:
        if path == "/batch/storage/v1":
            return self._batch(body)
        found = re.fullmatch(
            r"(/upload|/download)?/storage/v1/b/([^/]+)"
            r"(/o(?:/(.+?))?(/(?:rewriteTo|copyTo)/b/(.+?)/o/(.+)|/moveTo/o/(.+))?)?",
            path,
        )
        if not found:
            return answer(404, {"error": {"code": 404, "message": path}})
        upload, bucket, objects, name, copy, to_bucket, to_name, moved = found.groups()
        name, to_name = (urllib.parse.unquote(x) if x else x for x in (name, to_name or moved))
        if not objects:
            return answer(
                200,
                {
                    "kind": "storage#bucket",
                    "id": bucket,
                    "name": bucket,
                    "location": "HERE",
                    "storageClass": "STANDARD",
                },
            )
        if upload == "/upload":
            return self._upload(method, bucket, query, body, answer)
        if copy:
            source = self.store.get(bucket, name)
            if not source:
                return self._missing()
            about = self.store.put(to_bucket or bucket, to_name, source[0])
            if moved:
                self.store.delete(bucket, name)
                return answer(200, about)
            return answer(
                200,
                {
                    "kind": "storage#rewriteResponse",
                    "done": True,
                    "resource": about,
                    "objectSize": about["size"],
                },
            )
        if not name:
            return answer(200, self._list(bucket, query))
        found = self.store.get(bucket, name)
        if not found:
            return self._missing()
        data, about = found
        if method == "DELETE":
            if query.get("ifGenerationMatch", about["generation"]) != about["generation"]:
                return answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            self.store.delete(bucket, name)
            return answer(204)
        if query.get("alt") != "media":
            return answer(200, about)
        for key, same in (("ifGenerationMatch", True), ("ifGenerationNotMatch", False)):
            if key in query and (query[key] == about["generation"]) != same:
                return answer(412 if same else 304)
        headers = {
            "x_goog_generation": about["generation"],
            "ETag": about["etag"],
            "x_goog_hash": f"md5={about['md5Hash']}",
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted or wanted.groups() == ("", ""):
            return answer(200, data, **headers)
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        end = min(int(last), len(data) - 1) if first and last else len(data) - 1
        if start >= len(data):
            return answer(416, **headers)
        return answer(
            206, data[start : end + 1], Content_Range=f"bytes {start}-{end}/{len(data)}", **headers
        )

    def _list(self, bucket: str, query: dict[str, str]) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], []
        for about in self.store.all(bucket):
            rest = about["name"].removeprefix(prefix)
            if not about["name"].startswith(prefix) or not query.get("startOffset", "") <= about[
                "name"
            ] < query.get("endOffset", "\uffff"):
                continue
            if delimiter and delimiter in rest:
                prefixes.append(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(about)
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(set(prefixes))}

    def _upload(self, method, bucket, query, body, answer) -> None:
        kind, name = query.get("uploadType"), query.get("name", "")
        if kind == "resumable" and "upload_id" in query:
            bucket, name, got = self.uploads[query["upload_id"]]
            got += body
            end = re.fullmatch(r"bytes .*/(\d+)", self.headers.get("Content-Range", ""))
            if self.headers.get("Content-Range", "").endswith("/*") or (
                end and len(got) < int(end[1])
            ):
                return answer(308, Range=f"bytes=0-{len(got) - 1}")
            body = bytes(got)
        elif kind == "resumable":
            name = name or json.loads(body)["name"]
            key = str(len(self.uploads))
            self.uploads[key] = (bucket, name, bytearray())
            host = self.headers["Host"]
            at = (
                f"http://{host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            )
            return answer(200, {}, Location=at)
        elif kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[
                1
            ].encode()
            parts = body.split(b"--" + boundary)[1:3]
            about, data = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
            name, body = json.loads(about)["name"], re.sub(rb"\r?\n\Z", b"", data)
        old = self.store.get(bucket, name)
        if query.get("ifGenerationMatch", g := old[1]["generation"] if old else "0") != g:
            return answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        return answer(200, self.store.put(bucket, name, body))

    def _batch(self, body: bytes) -> None:
        """Several deletions in one request, which is gcsfs's only request of this form."""
        parts = []
        for i, found in enumerate(
            re.finditer(rb"DELETE \S*?/storage/v1/b/([^/]+)/o/(\S+) HTTP", body)
        ):
            bucket, name = (urllib.parse.unquote(x.decode()) for x in found.groups())
            code = (
                "204 No Content"
                if self.store.delete(bucket, name.split("?")[0])
                else "404 Not Found"
            )
            parts.append(
                "--parts\r\nContent-Type: application/http\r\nContent-ID:"
                f" <response-{i}>\r\n\r\nHTTP/1.1 {code}\r\n\r\n\r\n"
            )
        text = "".join(parts).encode() + b"--parts--\r\n"
        self.send_response(200)
        self.send_header("Content-Type", "multipart/mixed; boundary=parts")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def environment(port: int) -> dict[str, str]:
    """The environment that sends the clients to the stand-in: those of Orbax's files, of its
    arrays, and of Google's own library."""
    return {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anonymous",
        "FSSPEC_GS_TOKEN": "anon",
        "FSSPEC_GCS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


if __name__ == "__main__":
    Handler.store = Store(pathlib.Path(sys.argv[2]))
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
