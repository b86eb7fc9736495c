"""The page of `jaxtrain review`: served on the loopback alone, with an unguessable token.

It names windows by numbers, never a file. A request without the token, or for another host, as a
page elsewhere could make a browser send, is refused. Nothing is fetched from anywhere else.
"""

import json
import pathlib
import re
import secrets
import urllib.parse
from typing import Any

from jaxtrain.telemetry import loopback
from jaxtrain.workloads.bird.inference import review

PAGE = pathlib.Path(__file__).with_name("review_page.html")
MAX_BODY = 10_000  # [bytes] of a request


class Server(loopback.Server):
    """Answers the page's requests, at ``address``. Raises OSError: the port is taken."""

    def __init__(self, session: review.Session, port: int = 0):
        super().__init__(_Handler, port)
        self.session = session

    @property
    def address(self) -> str:
        return f"{super().address}/?token={self.token}"


class _Handler(loopback.Handler):
    server: Server

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        self._length = int(length) if length.isdecimal() and len(length) < 10 else MAX_BODY + 1
        # Read before it is refused: a connection that is closed on unread bytes loses its answer.
        self._body = self.rfile.read(min(self._length, 10 * MAX_BODY))
        self._answer(self._post)

    def _answer(self, action: Any) -> None:
        path, _, query = self.path.partition("?")
        if not self.is_allowed(
            self.headers.get("X-Token") or urllib.parse.parse_qs(query).get("token", [""])[0]
        ):
            return self._send(
                403,
                {
                    "error": (
                        "open the address that jaxtrain review printed: its token is missing or"
                        " wrong"
                    )
                },
            )
        try:
            action(path)
        except ValueError as error:
            self._send(400, {"error": str(error)})
        except IndexError:
            self._send(404, {"error": "there is no such window"})
        except ConnectionError:
            pass  # the client is gone
        except OSError as error:
            reason = error.strerror or error
            self._send(
                500,
                {
                    "error": (
                        f"the answer was not saved: {reason}; free some space, then answer again"
                    )
                },
            )

    def _get(self, path: str) -> None:
        session = self.server.session
        found = re.fullmatch(r"/(item|sound|picture)/(\d{1,9})", path)
        if path == "/":
            nonce = secrets.token_urlsafe(12)
            body = PAGE.read_text().replace("NONCE", nonce).encode()
            policy = (
                f"default-src 'self'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline';"
                " frame-ancestors 'none'"
            )
            self._send(200, body, "text/html; charset=utf-8", policy)
        elif path == "/open":
            self._show(session.first_open())
        elif found and found[1] == "item":
            self._show(int(found[2]))
        elif found:
            make, kind = (
                (review.sound, "audio/wav")
                if found[1] == "sound"
                else (review.picture, "image/png")
            )
            self._send(200, make(session.items[int(found[2])]), kind)
        else:
            self._send(404, {"error": "there is no such page"})

    def _post(self, path: str) -> None:
        if path != "/answer" or not self.headers.get("X-Token"):
            return self._send(404, {"error": "there is no such page"})
        if self._length > MAX_BODY:
            return self._send(413, {"error": f"a request has at most {MAX_BODY} bytes"})
        given = json.loads(self._body)
        given = given if isinstance(given, dict) else {}
        number, answer, label = (given.get(name) for name in ("number", "answer", "label"))
        if (
            type(number) is not int
            or number < 0
            or not isinstance(answer, str)
            or not isinstance(label, str)
        ):
            raise ValueError("expected number, answer and label")
        self.server.session.answer(number, answer, label)
        self._show(min(number + 1, len(self.server.session.items) - 1))

    def _show(self, number: int) -> None:
        session = self.server.session
        self._send(
            200,
            {
                "item": session.about(number),
                "counts": session.counts(),
                "labels": session.labels[:1000],
            },
        )

    def _send(
        self,
        code: int,
        content: Any,
        kind: str = "application/json",
        policy: str = "default-src 'none'",
    ) -> None:
        body = (
            content
            if isinstance(content, bytes)
            else json.dumps(content, ensure_ascii=False).encode()
        )
        self.send(code, body, kind, policy=policy)
