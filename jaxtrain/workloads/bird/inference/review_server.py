"""The page of `jaxtrain review`: served on the loopback alone, with an unguessable token.

It names windows by numbers, never a file. A request without the token, or for another host, as a
page elsewhere could make a browser send, is refused. Nothing is fetched from anywhere else.
"""

import json
import pathlib
import re
import secrets
import urllib.parse
from collections.abc import Callable
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
        is_number = length.isdecimal() and len(length) < 10
        n_bytes = int(length) if is_number else MAX_BODY + 1
        # Read before it is refused: a connection that is closed on unread bytes loses its answer.
        body = self.rfile.read(min(n_bytes, 10 * MAX_BODY))
        self._answer(lambda path: self._post(path, body, n_bytes))

    def _answer(self, action: Callable[[str], None]) -> None:
        path, _, query = self.path.partition("?")
        in_query = urllib.parse.parse_qs(query).get("token", [""])[0]
        if not self.is_allowed(self.headers.get("X-Token") or in_query):
            self._refuse(
                403,
                "open the address that jaxtrain review printed: its token is missing or wrong",
            )
            return
        try:
            action(path)
        except ValueError as error:
            self._refuse(400, str(error))
        except IndexError:
            self._refuse(404, "there is no such window")
        except ConnectionError:
            pass  # the client is gone
        except OSError as error:
            reason = error.strerror or error
            self._refuse(
                500, f"the answer was not saved: {reason}; free some space, then answer again"
            )

    def _get(self, path: str) -> None:
        if path == "/":
            self._send_page()
            return
        if path == "/open":
            self._show(self.server.session.first_open())
            return
        match = re.fullmatch(r"/(item|sound|picture)/(\d{1,9})", path)
        if not match:
            self._refuse(404, "there is no such page")
            return
        number = int(match[2])
        if match[1] == "item":
            self._show(number)
        elif match[1] == "sound":
            self._send(200, review.sound(self.server.session.items[number]), "audio/wav")
        else:
            self._send(200, review.picture(self.server.session.items[number]), "image/png")

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(12)
        body = PAGE.read_text().replace("NONCE", nonce).encode()
        policy = (
            f"default-src 'self'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline';"
            " frame-ancestors 'none'"
        )
        self._send(200, body, "text/html; charset=utf-8", policy)

    def _post(self, path: str, body: bytes, n_bytes: int) -> None:
        if path != "/answer" or not self.headers.get("X-Token"):
            self._refuse(404, "there is no such page")
            return
        if n_bytes > MAX_BODY:
            self._refuse(413, f"a request has at most {MAX_BODY} bytes")
            return
        request = json.loads(body)
        if not isinstance(request, dict):
            request = {}
        number = request.get("number")
        answer = request.get("answer")
        label = request.get("label")
        if type(number) is not int or not isinstance(answer, str) or not isinstance(label, str):
            raise ValueError("expected number, answer and label")
        if number < 0:
            raise ValueError("expected number, answer and label")
        session = self.server.session
        session.answer(number, answer, label)
        self._show(min(number + 1, len(session.items) - 1))

    def _show(self, number: int) -> None:
        session = self.server.session
        content = {
            "item": session.about(number),
            "counts": session.counts(),
            "labels": session.labels[:1000],
        }
        self._send_json(200, content)

    def _refuse(self, code: int, reason: str) -> None:
        self._send_json(code, {"error": reason})

    def _send_json(self, code: int, content: dict[str, Any]) -> None:
        self._send(code, json.dumps(content, ensure_ascii=False).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send(code, body, kind, policy=policy)
