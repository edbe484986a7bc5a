"""A store at which processes of several machines meet, open to those alone who hold its token.

torch's TCPStore lets in whoever reaches its port: he may list, read and overwrite all keys, so also
the addresses by which ranks find each other. This one has both sides prove first that they know the
token (base/token.py), which itself never crosses the network:

    server → client   HELLO and 32 random bytes
    client → server   32 random bytes, and the MAC of both
    server → client   the MAC of both the other way round: who took the server's port is noticed
    then, both ways   frames: length (4 bytes), MAC (16 bytes), JSON. The key of these MACs comes of
                      the token and all 64 bytes, and they count: no frame can be altered, said
                      again or left out unnoticed

What serves it: store_server.py.
Nothing is encrypted: who can listen on the wire reads the keys, and addresses are all they hold.

Source: HMAC-SHA256, RFC 2104; `torch.distributed.Store`, whose methods the client has
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.base.errors import BugError, ClusterError, ConfigError

HELLO, REFUSED = b"shoal-store-1\n", b"\0" * 32
NONCE, MAC, HEAD = 32, 16, struct.Struct("!I")
HELLO_S, TRY_S = 5.0, 0.1
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
            raise BugError(f"a message of {len(text)} bytes for the store; at most {MOST_BYTES}")
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


def coded(value: bytes) -> str:
    """A value as JSON carries it: base64."""
    return base64.b64encode(value).decode()


_made: list[GuardedStore] = []
"""Kept: what of torch refers to a store in C++ alone loses the methods of its Python object."""


class GuardedStore(dist.Store):
    """The store as a process sees it: a `torch.distributed.Store` for those who hold the token.

    Each thread has a connection of its own, so none waits behind another's wait.
    """

    def __init__(self, host: str, port: int, token: bytes, timeout: timedelta) -> None:
        """Connect. Errors: ConfigError for another token, ClusterError where nobody answers."""
        super().__init__()
        self.host, self.port, self._token = host, port, token
        self.set_timeout(timeout)
        self._mine = threading.local()
        self._mine.line = self._connect()
        _made.append(self)

    def clone(self) -> GuardedStore:
        """Itself: threads do not share a connection."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self._ask("set", key, coded(_bytes(value)))

    def get(self, key: str) -> bytes:
        """A key's value, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several keys' values, once all are there."""
        return [base64.b64decode(value) for value in self._ask("get", list(keys))]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Keep several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a number, from 0 on; gives the sum."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key that has the expected value, or none where "" is expected; gives its value."""
        told = self._ask("compare_set", key, coded(_bytes(expected)), coded(_bytes(desired)))
        return base64.b64decode(told)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Errors: dist.DistStoreError"""
        self._ask("wait", list(keys), within=timeout)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask("delete", key))

    deleteKey = delete_key  # by this name torch calls it from C++

    def has_extended_api(self) -> bool:
        """No queues and no append."""
        return False

    def _ask(self, *request: Any, within: timedelta | None = None) -> Any:
        """The server's answer. Errors: dist.DistStoreError, with which torch's stores fail too."""
        line = getattr(self._mine, "line", None)
        try:
            if line is None:
                line = self._mine.line = self._connect()
            return line.ask(list(request), (within or self._timeout()).total_seconds())
        except OSError as failure:
            self._mine.line = None  # an answer may come yet, which would be the next one's
            if line is not None:
                line.connection.close()
            if isinstance(failure, TimeoutError):
                raise dist.DistStoreError(f"wait timeout: {request[0]} {request[1:]}") from None
            raise dist.DistStoreError(
                f"the store at {self.host}:{self.port} is gone: {failure}"
            ) from failure

    def _timeout(self) -> timedelta:
        found: timedelta = self.timeout  # type: ignore[attr-defined]  # not in torch's stubs
        return found

    def _connect(self) -> _Connection:
        until_s = time.monotonic() + self._timeout().total_seconds()
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            try:
                made = socket.create_connection((self.host, self.port), timeout=left_s)
                return _Connection(made, self._token, f"{self.host}:{self.port}")
            except OSError as failure:
                if time.monotonic() + TRY_S > until_s:
                    raise ClusterError(
                        f"nobody who knows the token answers at {self.host}:{self.port}: {failure}"
                    ) from failure
            time.sleep(TRY_S)


class _Connection:
    """A client's connection, once both sides have proven that they know the token."""

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
                "or SHOAL_TOKEN differs; nearest: the same SHOAL_TOKEN for all processes of a run"
            )
        self._says, self._hears = lines(token, theirs, mine)

    def ask(self, request: list[Any], within_s: float) -> Any:
        """The answer to a request. Errors: TimeoutError, ConnectionError"""
        self.connection.settimeout(max(within_s, 0.001))
        self.connection.sendall(self._says.seal(request))
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


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
