"""Shows the page of `jaxtrain report` in a browser, of runs that train, and keeps it current.

    jaxtrain watch RUN… [--port PORT] [--every SECONDS]

    jaxtrain watch runs/xcm-demo

It serves on this machine alone, under an address with a token that it prints, and only reads:
several may watch a run, also one of another machine on a shared disk. Ctrl-C ends it. It needs the
extra: report.
"""

import math
import os
import threading
import time
from collections.abc import Sequence

from jaxtrain.commands import arguments
from jaxtrain.telemetry import loopback
from loaders.io.checks import UserError

# times as long as a page took, until it is made again: that of a million records takes seconds
PAUSE = 9


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain watch", __doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's workdir")
    parser.add_argument(
        "--port", type=int, default=0, help="of 127.0.0.1; default: one that is free"
    )
    parser.add_argument(
        "--every",
        type=arguments.positive,
        default=10,
        metavar="SECONDS",
        help="between looks; default: 10",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="by which runs are ranked, for example accuracy or -loss",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.port < 1 << 16:
        parser.error(
            f"argument --port: {args.port}; expected a number below 65536, or 0 for one that is"
            " free"
        )
    pages = Pages(args.runs, args.metric, args.every)
    pages.current()  # runs that cannot be shown are reported now
    try:
        server = Server(pages, args.port)
    except OSError as error:
        from jaxtrain.telemetry.report.run import RunError

        raise RunError(
            f"port {args.port} of 127.0.0.1 cannot be used: {error.strerror}; choose another --port"
        ) from error
    with server:
        print(f"{server.address}   (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class Pages:
    """The page, made again after changes, at most every ``every`` s, for a tenth of the time."""

    def __init__(self, paths: Sequence[str], metric: str, every: float):
        from jaxtrain.telemetry.report import page

        self._paths = paths
        self._metric = metric
        self._every = every
        self._plotly = page.library()
        self._lock = threading.Lock()
        self._text = b""
        self._version = 0
        self._current_until = -math.inf
        self._state_of_page: tuple[object, ...] = ()

    def current(self) -> tuple[bytes, int]:
        """Return the page, and a number that rises when it changes. Raises UserError."""
        from jaxtrain.telemetry.report import page
        from jaxtrain.telemetry.report import run as run_lib

        with self._lock:
            began = time.monotonic()
            if began < self._current_until:
                return self._text, self._version
            runs = run_lib.open_runs(self._paths)
            state: list[object] = []
            for run in runs:
                state.append(run.state)
                for name in WATCHED:
                    state.append(_changed(run.path / name))
            if tuple(state) != self._state_of_page:
                self._version += 1
                html = page.Page(runs, self._metric).html(
                    plotly=self._plotly, every=self._every, version=self._version
                )
                self._text = html.encode()
                self._state_of_page = tuple(state)
            now = time.monotonic()
            self._current_until = now + max(self._every, PAUSE * (now - began))
            return self._text, self._version


WATCHED = (
    "metrics.jsonl",
    "generations.jsonl",
    "classes.jsonl",
    "pictures",
    "config.json",
    "goodput",
)


def _changed(path: os.PathLike[str]) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


class Server(loopback.Server):
    """Answer GET /TOKEN/ with the page, GET /TOKEN/version with its number, others with 404."""

    def __init__(self, pages: Pages, port: int = 0):
        super().__init__(Handler, port)
        self.pages = pages

    @property
    def address(self) -> str:
        return f"{super().address}/{self.token}/"


class Handler(loopback.Handler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        token, _, name = self.path.removeprefix("/").partition("/")
        if not self.is_allowed(token) or self.path.count("/") != 2 or name not in ("", "version"):
            self.send(404, b"not found\n", "text/plain")
            return
        try:
            text, version = self.server.pages.current()
        except UserError as error:  # moved or deleted meanwhile
            self.send(503, f"{error}\n".encode(), "text/plain; charset=utf-8")
            return
        if name == "version":
            self.send(200, str(version).encode(), "text/plain")
        else:
            self.send(200, text, "text/html; charset=utf-8")
