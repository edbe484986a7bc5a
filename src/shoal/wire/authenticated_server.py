"""Server side of authenticated connections: it answers only clients that know the token.

The client's side and the protocol are in authenticated_stream.py.

From a stranger the server reads 64 bytes, within HELLO_S; above STRANGERS strangers it drops the
oldest. An authenticated peer's frame has a limit too (MOST_BYTES).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from shoal.wire import authenticated_stream
from shoal.wire.authenticated_stream import (
    HEAD,
    HELLO,
    MAC,
    MOST_BYTES,
    NONCE,
    READ_BYTES,
    REFUSED,
    AuthenticatedStream,
    create_streams,
    mac,
)
from shoal.wire.encrypted_socket import StreamSocket

STRANGERS = 128
ENCRYPTED = b"\x16\x03"
"""First bytes of a TLS connection."""

_log = logging.getLogger("shoal")


class Peer:
    """A connection at the server, of a stranger until `known`."""

    def __init__(self, connection: StreamSocket, address: str) -> None:
        self.connection, self.address = connection, address
        self.since_s = time.monotonic()
        self.nonce = os.urandom(NONCE)
        self.known = False
        self.hears: AuthenticatedStream | None = None
        self.says: AuthenticatedStream | None = None
        self.came, self.goes = bytearray(), bytearray(HELLO + self.nonce)


class AuthenticatedServer:
    """Server for clients that know the token: call `serve` repeatedly, or in a thread.

    A subclass implements the requests (`do`) and replies by `answer`.

    Args:
        listener: a listening socket bound to the private address; the server owns it.
        tell: called once, with one line on the first refused stranger; None: the line is logged.
    """

    WHERE = "the store of this run"
    """Words for this server in a refusal."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._listener, self._token = listener, token
        self._tell = tell or (lambda line: _log.warning("shoal: %s", line))
        self._told = False
        self.peers: dict[Peer, None] = {}  # in the order of connection
        self._wakes = selectors.DefaultSelector()
        listener.setblocking(False)
        self._wakes.register(listener, selectors.EVENT_READ)

    def handle_request(self, peer: Peer, request: Any) -> None:
        """Handle a peer's request; a ValueError, KeyError or TypeError drops the peer."""
        raise NotImplementedError

    def left(self, peer: Peer) -> None:
        """Handle the end of a peer's connection."""

    def wrap_connection(self, connection: socket.socket, host: str) -> StreamSocket:
        """Return the socket of an accepted connection, which does not block; may encrypt it."""
        return connection

    def report_refusal(self, peer: Peer, why: str) -> None:
        """Report a dropped connection: the first one."""
        if not self._told:
            self._told = True
            self._tell(
                f"somebody at {peer.address} was refused at {self.WHERE}: {why}; "
                "further ones are not told"
            )

    def describe_failure(self, peer: Peer, failure: OSError) -> str:
        """Return the reason to report for a failed connection; "": none, a stranger went away."""
        return str(failure) if peer.known else ""

    def serve(self, wait_s: float | None = None) -> None:
        """Serve pending requests, waiting at most `wait_s` for the first."""
        strangers = [peer for peer in self.peers if not peer.known]
        if strangers:
            wait_s = (
                authenticated_stream.HELLO_S
                if wait_s is None
                else min(wait_s, authenticated_stream.HELLO_S)
            )
        for key, events in self._wakes.select(wait_s):
            peer = key.data
            if peer is None:
                self._accept()
            elif peer in self.peers:
                self._serve(peer, events)
        late_s = time.monotonic() - authenticated_stream.HELLO_S
        strangers = [peer for peer in self.peers if not peer.known]
        many = max(0, len(strangers) - STRANGERS)
        for place, peer in enumerate(strangers):
            if place < many or peer.since_s < late_s:
                self._drop(peer, "said nothing that counts")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it went away again; or files have run out for now
            connection, address = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = str(address[0])
            peer = Peer(self.wrap_connection(connection, host), host)
            self.peers[peer] = None
            self._wakes.register(peer.connection, selectors.EVENT_READ, peer)
            self._serve(peer, selectors.EVENT_WRITE)

    def _drop(self, peer: Peer, why: str = "") -> None:
        if why:
            self.report_refusal(peer, why)
        self.peers.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):
            self._wakes.unregister(peer.connection)
        peer.connection.close()
        self.left(peer)

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(peer)
            if events & selectors.EVENT_READ:
                self._read(peer)
        except OSError as failure:
            self._drop(peer, self.describe_failure(peer, failure))
        except (ValueError, LookupError, TypeError, RecursionError) as failure:
            self._drop(peer, f"no request: {failure}")

    def _read(self, peer: Peer) -> None:
        try:
            read = peer.connection.recv(READ_BYTES if peer.known else NONCE + 32)
        except BlockingIOError:
            self._send(peer)  # a handshake went on: what waited for it can leave
            return
        if not read:
            raise ConnectionError("")
        peer.came += read
        self._receive(peer)

    def _send(self, peer: Peer) -> None:
        with contextlib.suppress(BlockingIOError):
            while peer.goes:
                del peer.goes[: peer.connection.send(peer.goes)]
        if peer in self.peers:
            # An encrypted connection may have to read before it can send.
            sends = peer.goes and not getattr(peer.connection, "waits_for_read", False)
            wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if sends else 0)
            self._wakes.modify(peer.connection, wants, peer)

    def _receive(self, peer: Peer) -> None:
        if not peer.known and not self._handle_hello(peer):
            return
        for request in self._frames(peer):
            self.handle_request(peer, request)

    def _handle_hello(self, peer: Peer) -> bool:
        """Return whether a peer has proven that it knows the token."""
        if len(peer.came) < NONCE + 32:
            return False
        nonce, said = bytes(peer.came[:NONCE]), bytes(peer.came[NONCE : NONCE + 32])
        del peer.came[: NONCE + 32]
        if not hmac.compare_digest(said, mac(self._token, b"client", peer.nonce, nonce)):
            with contextlib.suppress(OSError):
                peer.connection.send(REFUSED)
            encrypts = nonce.startswith(ENCRYPTED)
            why = "it encrypts (islands.key), and this process has no key"
            self._drop(peer, why if encrypts else "it does not know the token")
            return False
        peer.known = True
        peer.hears, peer.says = create_streams(self._token, peer.nonce, nonce)
        peer.goes += mac(self._token, b"server", nonce, peer.nonce)
        self._send(peer)
        return True

    def _frames(self, peer: Peer) -> Iterator[Any]:
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

    def answer(self, peer: Peer, message: Any, raw: bytes = b"") -> None:
        """Answer a peer's request; each request gets one answer, in order.

        Args:
            raw: bytes after the frame, without a MAC of their own: the message names their hash.
        """
        if peer.says is not None:
            peer.goes += peer.says.encode_frame(message)
            peer.goes += raw
            try:
                self._send(peer)
            except OSError:
                self._drop(peer)
