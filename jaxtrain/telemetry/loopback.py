"""A page on the loopback alone, with an unguessable token."""

import http.server
import secrets
import sys

PATIENCE = 30  # [s] for which a client may be silent
HOSTS = ("127.0.0.1", "localhost")  # any other name was made to lead to this machine, by a page elsewhere


class Server(http.server.ThreadingHTTPServer):
    """Serves one page to those who give its ``token``. Raises OSError: the port is taken."""

    daemon_threads = True

    def __init__(self, handler: "type[Handler]", port: int = 0):
        """``port``: 0 = one that is free."""
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOSTS[0], port), handler)

    @property
    def address(self) -> str:
        return f"http://{HOSTS[0]}:{self.server_port}"

    def handle_error(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        """Print the traceback of an error here, but not of a connection that ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(http.server.BaseHTTPRequestHandler):
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
        """List no requests: their lines hold the token."""
