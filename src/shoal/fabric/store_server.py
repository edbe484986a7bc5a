"""Serves a store for those who know its token, in a thread of rank 0: see guarded_store.py.

Of a stranger 64 bytes are read, within HELLO_S; of more than STRANGERS at a time the eldest goes.
What a known peer may send at once has a limit too (MOST_BYTES).
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from shoal.fabric import guarded_store
from shoal.fabric.guarded_store import (
    HEAD,
    HELLO,
    MAC,
    MOST_BYTES,
    NONCE,
    READ_BYTES,
    REFUSED,
    Line,
    coded,
    lines,
    mac,
)

STRANGERS = 128

_log = logging.getLogger("shoal")


class _Peer:
    """A connection at the server, of a stranger until `known`."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address = connection, address
        self.since_s = time.monotonic()
        self.nonce = os.urandom(NONCE)
        self.known = False
        self.hears: Line | None = None
        self.says: Line | None = None
        self.came, self.goes = bytearray(), bytearray(HELLO + self.nonce)


class Server:
    """Keeps the keys, in a thread of its own, until the process ends.

    listener   bound to the private address, and listening; it is taken over
    tell       is given one line, once, of the first stranger who was refused
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        tell: Callable[[str], None] = lambda line: _log.warning("shoal: %s", line),
    ) -> None:
        self._listener, self._token, self._tell = listener, token, tell
        self._told = False
        self._kept: dict[str, str] = {}  # base64
        self._parked: dict[str, list[tuple[_Peer, list[Any]]]] = {}  # by a key that is missing
        self._peers: dict[_Peer, None] = {}  # in the order of their coming
        self._wakes = selectors.DefaultSelector()
        listener.setblocking(False)
        self._wakes.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="shoal-store", daemon=True).start()

    def _run(self) -> None:
        while True:
            strangers = [peer for peer in self._peers if not peer.known]
            for key, events in self._wakes.select(guarded_store.HELLO_S if strangers else None):
                peer = key.data
                if peer is None:
                    self._accept()
                elif peer in self._peers:
                    self._serve(peer, events)
            late_s = time.monotonic() - guarded_store.HELLO_S
            strangers = [peer for peer in self._peers if not peer.known]
            many = max(0, len(strangers) - STRANGERS)
            for place, peer in enumerate(strangers):
                if place < many or peer.since_s < late_s:
                    self._drop(peer, "said nothing that counts")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it went away again; or files have run out for now
            connection, address = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(connection, str(address[0]))
            self._peers[peer] = None
            self._wakes.register(connection, selectors.EVENT_READ, peer)
            self._send(peer)

    def _drop(self, peer: _Peer, why: str = "") -> None:
        if why and not self._told:
            self._told = True
            self._tell(
                f"somebody at {peer.address} was refused at the store of this run: {why}; "
                "further ones are not told"
            )
        self._peers.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._wakes.unregister(peer.connection)
        peer.connection.close()

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(peer)
            if events & selectors.EVENT_READ:
                read = peer.connection.recv(READ_BYTES if peer.known else NONCE + 32)
                if not read:
                    raise ConnectionError("")
                peer.came += read
                self._hear(peer)
        except BlockingIOError:
            return
        except OSError as failure:
            self._drop(peer, str(failure) if peer.known else "")
        except (ValueError, KeyError, TypeError, RecursionError) as failure:
            self._drop(peer, f"no request: {failure}")

    def _send(self, peer: _Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.goes:
                del peer.goes[: peer.connection.send(peer.goes)]
        if peer in self._peers:
            wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.goes else 0)
            self._wakes.modify(peer.connection, wants, peer)

    def _hear(self, peer: _Peer) -> None:
        if not peer.known and not self._greet(peer):
            return
        for request in self._frames(peer):
            self._do(peer, request)

    def _greet(self, peer: _Peer) -> bool:
        """Whether a peer has proven that it knows the token."""
        if len(peer.came) < NONCE + 32:
            return False
        nonce, said = bytes(peer.came[:NONCE]), bytes(peer.came[NONCE : NONCE + 32])
        del peer.came[: NONCE + 32]
        if not hmac.compare_digest(said, mac(self._token, b"client", peer.nonce, nonce)):
            with contextlib.suppress(OSError):
                peer.connection.send(REFUSED)
            self._drop(peer, "it does not know the token")
            return False
        peer.known = True
        peer.hears, peer.says = lines(self._token, peer.nonce, nonce)
        peer.goes += mac(self._token, b"server", nonce, peer.nonce)
        self._send(peer)
        return True

    def _frames(self, peer: _Peer) -> Iterator[Any]:
        while peer.hears is not None and len(peer.came) >= HEAD.size + MAC:
            (length,) = HEAD.unpack_from(peer.came)
            if length > MOST_BYTES:
                raise ConnectionError(f"a frame of {length} bytes")
            begins = HEAD.size + MAC
            if len(peer.came) < begins + length:
                return
            proof, text = bytes(peer.came[HEAD.size : begins]), bytes(peer.came[begins:][:length])
            del peer.came[: begins + length]
            yield peer.hears.open(proof, text)

    def _do(self, peer: _Peer, request: list[Any]) -> None:
        kept = self._kept
        match request:
            case ["set", str(key), str(value)]:
                kept[key] = value
                self._answer(peer, True)
                self._arrived(key)
            case ["add", str(key), int(number)]:
                total = int(base64.b64decode(kept.get(key, "MA=="))) + number
                kept[key] = coded(str(total).encode())
                self._answer(peer, total)
                self._arrived(key)
            case ["compare_set", str(key), str(expected), str(value)]:
                found = kept.get(key)
                if found == expected or (found is None and not expected):
                    kept[key] = value
                    self._answer(peer, value)
                    self._arrived(key)
                else:
                    self._answer(peer, expected if found is None else found)
            case ["wait" | "get", list(keys)]:
                missing = next((key for key in keys if key not in kept), None)
                if missing is not None:
                    self._parked.setdefault(str(missing), []).append((peer, request))
                else:
                    get = request[0] == "get"
                    self._answer(peer, [kept[key] for key in keys] if get else True)
            case ["check", list(keys)]:
                self._answer(peer, all(key in kept for key in keys))
            case ["delete", str(key)]:
                self._answer(peer, kept.pop(key, None) is not None)
            case _:
                raise ValueError("not one of the store's requests")

    def _arrived(self, key: str) -> None:
        for peer, request in self._parked.pop(key, []):
            if peer in self._peers:
                self._do(peer, request)

    def _answer(self, peer: _Peer, message: Any) -> None:
        if peer.says is not None:
            peer.goes += peer.says.seal(message)
            try:
                self._send(peer)
            except OSError:
                self._drop(peer)
