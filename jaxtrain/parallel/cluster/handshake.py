"""Connections whose two ends prove to each other that they know the job's secret, before anything is parsed or said.

    process → coordinator   32 random bytes
    coordinator → process   32 random bytes
    process → coordinator   HMAC-SHA256 by the secret of "process" and both
    coordinator → process   HMAC-SHA256 by the secret of "coordinator" and both

and from then on messages: 4 bytes of length, JSON, and an HMAC of both, of the direction and of the message's number. A wrong
proof is answered by the end of the connection. Without a secret, on loopback, the key is empty.
"""

import hmac
import json
import os
import socket
import time
from typing import Any

NONCE, MAC = 32, 32  # [bytes]
LONGEST = 1 << 22  # [bytes] of a message
DEPTH = 64  # of the lists and objects in one


class HandshakeError(ConnectionError):
    """The other end is no process of this job, or not to be understood."""


class Line:
    """Packs and unpacks the messages of one connection, at one of its ends."""

    def __init__(self, secret: bytes, nonces: bytes, *, coordinator: bool):
        self._key = _mac(secret, b"messages", nonces)
        self._out, self._in = (b"<", b">") if coordinator else (b">", b"<")
        self._sent = self._read = 0
        self._received = bytearray()

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        head = len(body).to_bytes(4, "big")
        self._sent += 1
        return head + body + self._seal(self._out, self._sent, head + body)

    def unpack(self, data: bytes) -> list[Any]:
        """The messages that are whole with ``data``. Raises HandshakeError."""
        self._received += data
        messages = []
        while len(self._received) >= 4:
            size = int.from_bytes(self._received[:4], "big")
            if size > LONGEST:
                raise HandshakeError(f"a message of {size} bytes, and {LONGEST} is the limit")
            if len(self._received) < 4 + size + MAC:
                break
            text, seal = bytes(self._received[: 4 + size]), bytes(self._received[4 + size : 4 + size + MAC])
            del self._received[: 4 + size + MAC]
            self._read += 1
            if not hmac.compare_digest(seal, self._seal(self._in, self._read, text)):
                raise HandshakeError("a message that was changed on its way")
            messages.append(_parse(text[4:]))
        return messages

    def _seal(self, direction: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + text, "sha256")


class Guest:
    """A connection as the coordinator sees it: nobody in particular, until it has proven that it knows the secret.

    Attributes:
      line: None until then.
    """

    def __init__(self, connection: socket.socket, secret: bytes):
        self.connection, self._secret = connection, secret
        self.line: Line | None = None
        self._received, self._own = bytearray(), b""
        connection.setblocking(False)

    def receive(self) -> list[Any]:
        """The messages that have come. Raises OSError when the connection ended, or is to be ended."""
        limit = 1 << 16 if self.line else NONCE + MAC - len(self._received)
        try:
            data = self.connection.recv(limit)
        except BlockingIOError:
            return []
        if not data:
            raise HandshakeError("it closed the connection")
        if self.line:
            return self.line.unpack(data)
        self._received += data
        if not self._own and len(self._received) >= NONCE:
            self._own = os.urandom(NONCE)
            self.connection.send(self._own)
        if len(self._received) == NONCE + MAC:
            nonces = bytes(self._received[:NONCE]) + self._own
            if not hmac.compare_digest(bytes(self._received[NONCE:]), _mac(self._secret, b"process", nonces)):
                raise HandshakeError("it does not know the secret")
            self.connection.send(_mac(self._secret, b"coordinator", nonces))
            self.line = Line(self._secret, nonces, coordinator=True)
        return []


def prove(connection: socket.socket, secret: bytes) -> Line:
    """The same as any other process, within the connection's timeout in all. Raises OSError."""
    timeout = connection.gettimeout()
    until = None if timeout is None else time.monotonic() + timeout
    own = os.urandom(NONCE)
    connection.sendall(own)
    nonces = own + _exactly(connection, NONCE, until)
    connection.sendall(_mac(secret, b"process", nonces))
    try:
        answer = _exactly(connection, MAC, until)
    except ConnectionError as error:
        raise HandshakeError("what listens there has another JAXTRAIN_SECRET") from error
    if not hmac.compare_digest(answer, _mac(secret, b"coordinator", nonces)):
        raise HandshakeError("what listens there does not know JAXTRAIN_SECRET")
    connection.settimeout(timeout)
    return Line(secret, nonces, coordinator=False)


def _mac(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"jaxtrain " + who + b"\0" + nonces, "sha256")


def _exactly(connection: socket.socket, size: int, until: float | None) -> bytes:
    data = b""
    while len(data) < size:
        if until is not None:  # a byte now and then would be waited for without end
            connection.settimeout(max(until - time.monotonic(), 0.001))
        more = connection.recv(size - len(data))
        if not more:
            raise HandshakeError("it closed the connection")
        data += more
    return data


def _parse(text: bytes) -> Any:
    """JSON of a bounded depth. Raises HandshakeError."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HandshakeError("a message that is not JSON") from error
    level = [message]
    for _ in range(DEPTH):
        level = [y for x in level if isinstance(x, dict | list) for y in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return message
    raise HandshakeError(f"a message nested more than {DEPTH} deep")
