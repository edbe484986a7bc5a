"""Idle connections to other members: the next fetch needs no new connection and no handshake.

    one       per rank of a member: the connection of the last finished fetch
    not used  at another address, after IDLE_S, or where `is_allowed` says no

A connection belongs to its caller alone once it is popped. Two fetches at a time use two
connections, and the one that ends last is closed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.base.layouts.changing_members import name_member
from shoal.wire.authenticated_stream import AuthenticatedConnection

ANSWER_S = 10.0
"""Longest wait for an answer, and for a piece."""
IDLE_S = 60.0
"""Longest idle time: routers forget a silent connection without a word to its ends."""


class _IdleConnection(NamedTuple):
    address: str
    connection: AuthenticatedConnection
    since_s: float


class IdleConnections:
    """Idle connections of one process, at most one per rank of a member; for several threads.

    Args:
        is_allowed: whether the other side of a connection may be a member of that number.
    """

    def __init__(self, is_allowed: Callable[[int, AuthenticatedConnection], bool]) -> None:
        self._is_allowed = is_allowed
        self._found: dict[tuple[int, int], _IdleConnection] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def pop(self, name: int, address: str, lane: int = 0) -> AuthenticatedConnection | None:
        """Return the connection to a member's rank; None without one that can be used.

        Args:
            address: of the rank · lane: its number.
        """
        with self._lock:
            found = self._found.pop((name, lane), None)
        if found is None:
            return None
        if self._is_usable(name, address, found):
            return found.connection
        found.connection.close()
        return None

    def put(
        self, name: int, address: str, connection: AuthenticatedConnection, lane: int = 0
    ) -> None:
        """Hand over a connection without open requests; it is closed if there is one already."""
        with self._lock:
            is_needed = not self._is_closed and (name, lane) not in self._found
            if is_needed:
                self._found[name, lane] = _IdleConnection(address, connection, time.monotonic())
        if not is_needed:
            connection.close()

    def drop_refused(self) -> None:
        """Close the connections whose other side is not allowed any more."""
        with self._lock:
            for key, one in list(self._found.items()):
                if not self._is_allowed(key[0], one.connection):
                    self._found.pop(key).connection.close()

    def close(self) -> None:
        """Close all connections, and those that are handed over later."""
        with self._lock:
            self._is_closed = True
            found, self._found = self._found, {}
        for one in found.values():
            one.connection.close()

    def _is_usable(self, name: int, address: str, found: _IdleConnection) -> bool:
        is_recent = time.monotonic() - found.since_s < IDLE_S
        return found.address == address and is_recent and self._is_allowed(name, found.connection)


def receive_pieces(
    line: AuthenticatedConnection,
    name: int,
    key: str,
    first: Any,
    interrupted: Callable[[], bool],
) -> bytes | None:
    """Return the bytes of a key, all pieces of it; None if the other side has them not.

    Args:
        first: answer to the request for the first piece.
    """
    answer, found = first, bytearray()
    while answer is not None:
        size, length, digest = answer
        piece = line.receive_bytes(length, ANSWER_S)
        if hashlib.sha256(piece).hexdigest() != digest:
            raise ConnectionError(f"{name_member(name)}: a piece of {key} was altered")
        found += piece
        if len(found) >= size or not piece:
            return bytes(found)
        if interrupted():
            raise InterruptedError(f"{name_member(name)}: {key} is not wanted any more")
        answer = line.ask(["piece", key, len(found)], ANSWER_S)
    return None
