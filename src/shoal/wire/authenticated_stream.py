"""Authenticated connections: both sides prove knowledge of a token, and MAC every frame.

The token itself (run_token.py) never crosses the network:

    server → client   HELLO and 32 random bytes
    client → server   32 random bytes, and the MAC of both
    server → client   the MAC of both in reverse order: detects a stranger on the server's port
    then, both ways   frames: length (4 bytes), MAC (16 bytes), JSON. The key of these MACs derives
                      from the token and all 64 bytes, and they include a counter: no frame can be
                      altered, replayed or dropped undetected

The server's side: authenticated_server.py. Nothing is encrypted by this file: a listener on the
wire can read all frames, unless the socket is one of encrypted_socket.py.

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
from shoal.wire.encrypted_socket import StreamSocket

HELLO, REFUSED = b"shoal-store-1\n", b"\0" * 32
NONCE, MAC, HEAD = 32, 16, struct.Struct("!I")
HELLO_S = 5.0
"""Seconds that a greeting may take."""
MOST_BYTES = 64 << 20
"""Most bytes of one frame from an authenticated peer."""
READ_BYTES = 1 << 16


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of the joined parts."""
    return hmac.digest(key, b"".join(parts), "sha256")


class AuthenticatedStream:
    """One direction of a connection: authenticates, verifies and counts frames."""

    def __init__(self, session: bytes, name: bytes) -> None:
        self._key = mac(session, name)
        self._count = 0

    def _next(self, text: bytes) -> bytes:
        self._count += 1
        return mac(self._key, struct.pack("!Q", self._count), text)[:MAC]

    def encode_frame(self, message: Any) -> bytes:
        """Return the authenticated frame of a message."""
        text = json.dumps(message).encode()
        if len(text) > MOST_BYTES:
            raise BugError(f"a message of {len(text)} bytes; at most {MOST_BYTES}")
        return HEAD.pack(len(text)) + self._next(text) + text

    def open(self, mac: bytes, text: bytes) -> Any:
        """Return a frame's message; raise ConnectionError if it is altered or out of order."""
        if not hmac.compare_digest(mac, self._next(text)):
            raise ConnectionError("a frame that the other side did not send")
        return json.loads(text)


def create_streams(
    token: bytes, of_server: bytes, of_client: bytes
) -> tuple[AuthenticatedStream, AuthenticatedStream]:
    """Return a connection's two directions: (client to server, server to client)."""
    session = mac(token, b"session", of_server, of_client)
    return AuthenticatedStream(session, b"client"), AuthenticatedStream(session, b"server")


class AuthenticatedConnection:
    """A client's end of an authenticated connection.

    Raises:
        OSError: the connection failed; ConfigError if the server's program or token is not this
            run's.
    """

    def __init__(self, connection: StreamSocket, token: bytes, at: str) -> None:
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
        self._says, self._hears = create_streams(token, theirs, mine)

    def ask(self, request: Any, within_s: float) -> Any:
        """Send a request and return the answer; raises TimeoutError or ConnectionError."""
        self.send(request, within_s)
        return self.receive(within_s)

    def send(self, request: Any, within_s: float) -> None:
        """Send a request; raises TimeoutError or ConnectionError."""
        self.connection.settimeout(max(within_s, 0.001))
        self.connection.sendall(self._says.encode_frame(request))

    def receive(self, within_s: float) -> Any:
        """Receive the next answer; raises TimeoutError or ConnectionError."""
        self.connection.settimeout(max(within_s, 0.001))
        (length,) = HEAD.unpack(self._read(HEAD.size))
        if length > MOST_BYTES:
            raise ConnectionError(f"a frame of {length} bytes")
        return self._hears.open(self._read(MAC), self._read(length))

    def receive_bytes(self, count: int, within_s: float) -> bytes:
        """Receive raw bytes that follow a frame; the frame names their hash."""
        self.connection.settimeout(max(within_s, 0.001))
        return self._read(count)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _read(self, count: int) -> bytes:
        read = bytearray()
        while len(read) < count:
            more = self.connection.recv(min(count - len(read), READ_BYTES))
            if not more:
                raise ConnectionError("the connection was closed")
            read += more
        return bytes(read)
