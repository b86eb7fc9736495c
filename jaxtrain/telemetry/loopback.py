"""A page on the loopback alone, with an unguessable token and a bound on requests at once."""

import contextlib
import http.server
import secrets
import socket
import sys
import threading
from typing import Any

AT_ONCE = 32  # requests. With more, the slowest one is closed
PATIENCE = 30  # [s] for which a client may be silent
# any other name was made to lead to this machine, by a page elsewhere
HOSTS = ("127.0.0.1", "localhost")


class Server(http.server.ThreadingHTTPServer):
    """Serves one page. Raises OSError: the port is taken, or not allowed.

    Attributes:
      token: who asks has to give it.
    """

    daemon_threads = True

    def __init__(self, handler: "type[Handler]", port: int = 0):
        """``port``: 0 = one that is free."""
        self.token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._open: dict[Any, None] = {}  # the requests at hand, the oldest first
        super().__init__((HOSTS[0], port), handler)

    @property
    def address(self) -> str:
        return f"http://{HOSTS[0]}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > AT_ONCE else None
            if oldest:
                # Else a client that sends a byte now and then would keep others out.
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error here, but not of a connection that ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
    timeout = PATIENCE
    server_version = "jaxtrain"
    sys_version = ""
    server: Server

    def is_allowed(self, token: str) -> bool:
        """Whether who asks gave the server's token, and asked this machine by its own name."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        expected = self.server.token
        return host in HOSTS and secrets.compare_digest(token.encode(), expected.encode())

    def send(self, code: int, body: bytes, kind: str, *, policy: str = "") -> None:
        """Answers. ``policy``: a Content-Security-Policy, for a page that has none of its own."""
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        if policy:
            headers["Content-Security-Policy"] = policy
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """List no requests: their lines hold the token."""
