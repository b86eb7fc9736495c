"""Connections whose two ends prove to each other that they know the job's secret.

    process → coordinator   32 random bytes
    coordinator → process   32 random bytes
    process → coordinator   HMAC-SHA256 by the secret of "process" and both
    coordinator → process   HMAC-SHA256 by the secret of "coordinator" and both

Messages follow: 4 bytes of length, JSON, and an HMAC of both, of the direction and of the
message's number. A wrong proof ends the connection. On loopback without a secret, the key is empty.
"""

import asyncio
import hmac
import json
import os
import socket
from typing import Any

NONCE, MAC = 32, 32  # [bytes]
MAX_MESSAGE = 1 << 22  # [bytes]


class HandshakeError(ConnectionError):
    """The other end is not a process of this job, or it sent something else than a message."""


class Line:
    """The messages of one authenticated connection, at one of its ends."""

    def __init__(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        secret: bytes,
        nonces: bytes,
        *,
        coordinator: bool,
    ):
        self._reader, self.writer = streams
        self._key = _mac(secret, b"messages", nonces)
        self._out, self._in = (b"<", b">") if coordinator else (b">", b"<")
        self._n_sent = 0
        self._n_read = 0

    async def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        message = len(body).to_bytes(4, "big") + body
        self._n_sent += 1
        self.writer.write(message + self._seal(self._out, self._n_sent, message))
        await self.writer.drain()

    def connection(self) -> socket.socket:
        """Return the connection, which stays open when the line is closed."""
        connection: socket.socket = self.writer.get_extra_info("socket").dup()
        return connection

    async def receive(self) -> Any:
        """Return the next message. Raises OSError if the connection ends, or has to."""
        head = await _read(self._reader, 4)
        size = int.from_bytes(head, "big")
        if size > MAX_MESSAGE:
            raise HandshakeError(f"a message of {size} bytes, and {MAX_MESSAGE} is the limit")
        body = await _read(self._reader, size)
        seal = await _read(self._reader, MAC)
        self._n_read += 1
        if not hmac.compare_digest(seal, self._seal(self._in, self._n_read, head + body)):
            raise HandshakeError("a message was changed on its way")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise HandshakeError("a message is not JSON") from error

    def _seal(self, direction: bytes, number: int, message: bytes) -> bytes:
        content = direction + number.to_bytes(8, "big") + message
        return hmac.digest(self._key, content, "sha256")


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Line:
    """Authenticate a process, as the coordinator. Raises OSError."""
    nonce_of_process = await _read(reader, NONCE)
    nonce = os.urandom(NONCE)
    writer.write(nonce)
    nonces = nonce_of_process + nonce
    proof = await _read(reader, MAC)
    if not hmac.compare_digest(proof, _mac(secret, b"process", nonces)):
        raise HandshakeError("it does not know the secret")
    writer.write(_mac(secret, b"coordinator", nonces))
    return Line((reader, writer), secret, nonces, coordinator=True)


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Line:
    """Authenticate to the coordinator, and it to us, as any other process. Raises OSError."""
    nonce = os.urandom(NONCE)
    writer.write(nonce)
    nonces = nonce + await _read(reader, NONCE)
    writer.write(_mac(secret, b"process", nonces))
    try:
        proof = await _read(reader, MAC)
    except ConnectionError as error:
        raise HandshakeError("the listener there has another JAXTRAIN_SECRET") from error
    if not hmac.compare_digest(proof, _mac(secret, b"coordinator", nonces)):
        raise HandshakeError("the listener there does not know JAXTRAIN_SECRET")
    return Line((reader, writer), secret, nonces, coordinator=False)


def _mac(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"jaxtrain " + role + b"\0" + nonces, "sha256")


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise HandshakeError("it closed the connection") from error
