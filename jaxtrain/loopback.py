"""A page of this machine: served on the loopback alone, to whoever knows its token, to a bounded number of requests at once."""

import http.server
import secrets
import threading

AT_ONCE = 32  # requests; further ones are closed unanswered
PATIENCE = 30  # [s] for which a client may be silent
HOSTS = ("127.0.0.1", "localhost")  # any other name was made to lead to this machine, by a page elsewhere


class Server(http.server.ThreadingHTTPServer):
    """Serves one page. Raises OSError: the port is taken, or not allowed.

    Attributes:
      token: who asks has to give it.
    """

    daemon_threads = True

    def __init__(self, handler: "type[Handler]", port: int = 0):
        """``port``: 0 = one that is free."""
        self.token, self._open = secrets.token_urlsafe(24), threading.BoundedSemaphore(AT_ONCE)
        super().__init__((HOSTS[0], port), handler)

    @property
    def address(self) -> str:
        return f"http://{HOSTS[0]}:{self.server_port}"

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

    timeout = PATIENCE
    server_version, sys_version = "jaxtrain", ""
    server: Server

    def is_allowed(self, token: str) -> bool:
        """Whether who asks gave the server's token, and asked this machine by its own name."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        return host in HOSTS and secrets.compare_digest(token.encode(), self.server.token.encode())

    def send(self, code: int, body: bytes, kind: str, *, policy: str = "") -> None:
        """Answers. ``policy``: a Content-Security-Policy, for a page that has none of its own."""
        self.send_response(code)
        headers = {
            "Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        } | ({"Content-Security-Policy": policy} if policy else {})  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not listed: their lines hold the token."""
