"""Connections open to those alone who hold a token: both sides prove it, and seal what they say.

The token itself (run_token.py) never crosses the network:

    server → client   HELLO and 32 random bytes
    client → server   32 random bytes, and the MAC of both
    server → client   the MAC of both the other way round: who took the server's port is noticed
    then, both ways   frames: length (4 bytes), MAC (16 bytes), JSON. The key of these MACs comes of
                      the token and all 64 bytes, and they count: no frame can be altered, said
                      again or left out unnoticed

The server's side: authenticated_server.py. Nothing is encrypted: who can listen on the wire reads
along.

Source: HMAC-SHA256, RFC 2104
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from typing import Any

from shoal.base.errors import BugError, ConfigError

HELLO, REFUSED = b"shoal-store-1\n", b"\0" * 32
NONCE, MAC, HEAD = 32, 16, struct.Struct("!I")
HELLO_S = 5.0
"""How long a greeting may take."""
MOST_BYTES = 64 << 20
"""Of one frame, from a peer that knows the token."""
READ_BYTES = 1 << 16


def mac(key: bytes, *parts: bytes) -> bytes:
    """The HMAC-SHA256 of the parts, joined."""
    return hmac.digest(key, b"".join(parts), "sha256")


class Line:
    """One direction of a connection: seals and opens frames, and counts them."""

    def __init__(self, session: bytes, name: bytes) -> None:
        self._key = mac(session, name)
        self._count = 0

    def _next(self, text: bytes) -> bytes:
        self._count += 1
        return mac(self._key, struct.pack("!Q", self._count), text)[:MAC]

    def seal(self, message: Any) -> bytes:
        """A frame that says it."""
        text = json.dumps(message).encode()
        if len(text) > MOST_BYTES:
            raise BugError(f"a message of {len(text)} bytes; at most {MOST_BYTES}")
        return HEAD.pack(len(text)) + self._next(text) + text

    def open(self, mac: bytes, text: bytes) -> Any:
        """What a frame says. Errors: ConnectionError where it was altered or is out of turn."""
        if not hmac.compare_digest(mac, self._next(text)):
            raise ConnectionError("a frame that the other side did not send")
        return json.loads(text)


def lines(token: bytes, of_server: bytes, of_client: bytes) -> tuple[Line, Line]:
    """(what the client says, what the server says) on a connection."""
    session = mac(token, b"session", of_server, of_client)
    return Line(session, b"client"), Line(session, b"server")


class Connection:
    """A client's end, once both sides have proven that they know the token.

    Raises:
        OSError: ConfigError for a program or a token that is not this run's.
    """

    def __init__(self, connection: socket.socket, token: bytes, at: str) -> None:
        self.connection = connection
        try:
            self._greet(token, at)
        except BaseException:
            connection.close()
            raise

    def _greet(self, token: bytes, at: str) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.settimeout(HELLO_S)
        hello = self._read(len(HELLO))
        if hello != HELLO:
            raise ConfigError(f"{at}: another program listens there, it is no store of a run")
        theirs, mine = self._read(NONCE), os.urandom(NONCE)
        self.connection.sendall(mine + mac(token, b"client", theirs, mine))
        answer = self._read(32)
        if answer == REFUSED or not hmac.compare_digest(
            answer, mac(token, b"server", mine, theirs)
        ):
            raise ConfigError(
                f"{at}: the store there has another token than this process: it is another run's, "
                "or SHOAL_TOKEN differs; try: the same SHOAL_TOKEN for all processes of a run"
            )
        self._says, self._hears = lines(token, theirs, mine)

    def ask(self, request: Any, within_s: float) -> Any:
        """The answer to a request. Errors: TimeoutError, ConnectionError"""
        self.say(request, within_s)
        return self.hear(within_s)

    def say(self, request: Any, within_s: float) -> None:
        """Send a request. Errors: TimeoutError, ConnectionError"""
        self.connection.settimeout(max(within_s, 0.001))
        self.connection.sendall(self._says.seal(request))

    def hear(self, within_s: float) -> Any:
        """The next answer. Errors: TimeoutError, ConnectionError"""
        self.connection.settimeout(max(within_s, 0.001))
        (length,) = HEAD.unpack(self._read(HEAD.size))
        if length > MOST_BYTES:
            raise ConnectionError(f"a frame of {length} bytes")
        return self._hears.open(self._read(MAC), self._read(length))

    def _read(self, count: int) -> bytes:
        read = bytearray()
        while len(read) < count:
            more = self.connection.recv(min(count - len(read), READ_BYTES))
            if not more:
                raise ConnectionError("the connection was closed")
            read += more
        return bytes(read)
