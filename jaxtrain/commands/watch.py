"""Shows the page of `jaxtrain report` in a browser, of runs that train, and keeps it current.

    jaxtrain watch RUN… [--port PORT] [--every SECONDS]

    jaxtrain watch runs/xcm-demo

It serves on this machine alone, under an address with a token that it prints, and only reads: several may watch a run, also one
of another machine on a shared disk. Ctrl-C ends it. It needs the extra: report.
"""

import functools
import http.server
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence

from jaxtrain.commands import arguments

MOST_OPEN = 32  # requests at once


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain watch", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's workdir")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; default: one that is free")
    parser.add_argument("--every", type=arguments.positive, default=10, metavar="SECONDS", help="between looks; default: 10")
    parser.add_argument("--metric", default="", metavar="NAME", help="by which runs are ranked, for example accuracy or -loss")
    args = parser.parse_args(argv)
    if not 0 <= args.port < 1 << 16:
        parser.error(f"argument --port: {args.port}; expected a number below 65536, or 0 for one that is free")

    from jaxtrain.report.run import RunError
    from loaders.files import FileError

    action = functools.partial(_serve, args.runs, args.port, args.every, args.metric)
    return arguments.run(action, mistakes=(RunError, FileError))


def _serve(paths: Sequence[str], port: int, every: int, metric: str) -> int:
    from jaxtrain.report.run import RunError

    pages = Pages(paths, metric, every)
    pages.current()  # what cannot be shown is reported now
    token = secrets.token_urlsafe(16)
    try:
        server = Server(port, token, pages)
    except OSError as error:
        raise RunError(f"port {port} of 127.0.0.1 cannot be used: {error.strerror}; choose another --port") from error
    with server:
        print(f"http://127.0.0.1:{server.server_address[1]}/{token}/   (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class Pages:
    """The page, made again when a file of the runs has changed, and at most every ``every`` seconds."""

    def __init__(self, paths: Sequence[str], metric: str, every: float):
        from jaxtrain.report import page

        self._paths, self._metric, self._every = paths, metric, every
        self._plotly, self._lock = page.library(), threading.Lock()
        self._text, self._version, self._at = b"", 0, -math.inf
        self._seen: tuple[object, ...] = ()

    def current(self) -> tuple[bytes, int]:
        """The page, and its version: a number that rises whenever it changes. Raises RunError, FileError."""
        from jaxtrain.commands.report import names
        from jaxtrain.report import page
        from jaxtrain.report import run as run_lib

        with self._lock:
            if time.monotonic() - self._at < self._every and self._text:
                return self._text, self._version
            runs = [run_lib.open_run(path, name) for path, name in zip(self._paths, names(self._paths), strict=True)]
            seen = (*(_changed(run.path / name) for run in runs for name in WATCHED), *(run.state for run in runs))
            if seen != self._seen:
                self._version += 1
                made = page.Page(runs, self._metric).html(plotly=self._plotly, every=self._every, version=self._version)
                self._text, self._seen = made.encode(), seen
            self._at = time.monotonic()
            return self._text, self._version


WATCHED = ("metrics.jsonl", "samples.jsonl", "pictures", "config.json", "goodput")


def _changed(path: os.PathLike) -> tuple[int, int]:
    try:
        about = os.stat(path)
    except OSError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


class Server(http.server.ThreadingHTTPServer):
    """On loopback. It answers GET /TOKEN/ with the page, and GET /TOKEN/version with its number; all else with 404."""

    daemon_threads = True

    def __init__(self, port: int, token: str, pages: Pages):
        self.token, self.pages, self._open = token, pages, threading.BoundedSemaphore(MOST_OPEN)
        super().__init__(("127.0.0.1", port), Handler)

    def process_request(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        if self._open.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.release()


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    timeout = 30  # [s] that a client may be silent
    server: Server

    def do_GET(self) -> None:
        host, (token, _, rest) = self.headers.get("Host", "").rpartition(":")[0], self.path.removeprefix("/").partition("/")
        asked = secrets.compare_digest(token.encode(), self.server.token.encode()) and self.path.count("/") == 2
        if not asked or rest not in ("", "version") or host not in ("127.0.0.1", "localhost"):  # a name that leads here
            self._answer(404, b"not found\n", "text/plain")
            return
        from jaxtrain.report.run import RunError
        from loaders.files import FileError

        try:
            text, version = self.server.pages.current()
        except (RunError, FileError) as error:  # moved or deleted meanwhile
            self._answer(503, f"{error}\n".encode(), "text/plain; charset=utf-8")
            return
        if rest == "version":
            self._answer(200, str(version).encode(), "text/plain")
        else:
            self._answer(200, text, "text/html; charset=utf-8")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        for name, value in (
            ("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nobody's news."""
