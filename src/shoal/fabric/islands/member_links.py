"""Connections between members that come and go: messages that may get lost, and bytes on request.

    every member    listens at its own address, and connects to the address of each other one
    message         JSON to a member; its sender forgets it if the member does not take it
    beat            every BEAT_S to each member; the answer names the start of its process
    gone            nobody listens at a member's address, or another start of it answers: its
                    process is dead. A member that is silent is not gone
    fetch           bytes by a key, in pieces with a hash each, on the connection of the last fetch
                    (idle_connections.py) or on a new one

No store and no first member: whoever dies takes nothing along. With keys (wire/member_keys.py)
every connection is encrypted, and both sides prove their keys. Without keys both sides prove that
they know the run's token, every frame has a MAC (wire/authenticated_stream.py), and nothing is
encrypted. The pieces of a fetch are raw bytes whose hash a frame names.

Source: failure detectors by heartbeat, Chandra and Toueg 1996. Beats accuse; the vote decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.layouts.changing_members import name_member, rank_address
from shoal.fabric.islands.idle_connections import ANSWER_S, IdleConnections, receive_pieces
from shoal.fabric.islands.island_rendezvous import listen_at, parse_address
from shoal.wire.authenticated_server import AuthenticatedServer, Peer
from shoal.wire.authenticated_stream import AuthenticatedConnection
from shoal.wire.encrypted_socket import (
    AlteredConnectionError,
    KeyRefusedError,
    OwnKeyRefusedError,
    StreamSocket,
)
from shoal.wire.member_keys import NAMELESS, MemberKeys, refuse_without_key

BEAT_S, CONNECT_S = 0.5, 3.0
PIECE_BYTES = 1 << 20
DIALED_S = 5.0
"""Seconds after its last beat for which a member counts as one that dials this one."""
STALE_S = 10.0
"""Age from which a message is not sent any more: of an hour's messages the last ones count."""
MOST_LINES = 50
"""Most different lines about refused connections: a stranger may come from many addresses."""
PLACE = re.compile(r"^(island \d+|the witness) at \S+")
UNHEARD_TRIES = 2
"""Connections without a greeting after which a member without keys asks if the other encrypts."""
NAMELESS_TRIES = 4
"""Refusals without a fingerprint before a line: the other direction mostly brings it meanwhile."""

OnMessage = Callable[[int, str, Any], None]
"""Called in another thread with a sender's number, its address, and its message."""

Provide = Callable[[str, int, int], tuple[int, bytes] | None]
"""Return (size of all, bytes from an offset on) of a key; None: not here."""


class MemberLinks:
    """Connections of one member to all others that it knows.

    Args:
        name, boot: of this process.
        addresses: HOST:PORT of the members by number, this one included; grows with those that
            send messages.
        token: shared secret; empty: whoever reaches the ports may join. Keys replace it.
        tell: called with one line on each refused connection.
        keys: of this member; None: nothing is encrypted.

    Attributes:
        refusing_are_gone: members that refuse this one count as dead, as too few others are left to
            decide without them. Else they decide first: they live, and see this one as dead.

    Raises:
        ClusterError: this process cannot listen at its address.
    """

    def __init__(
        self,
        name: int,
        boot: int,
        addresses: dict[int, str],
        token: bytes,
        on_message: OnMessage,
        provide: Provide,
        tell: Callable[[str], None],
        keys: MemberKeys | None = None,
    ) -> None:
        self.name, self.boot, self.addresses = name, boot, dict(addresses)
        self.token, self.keys = b"" if keys else token, keys
        self.refusing_are_gone = False
        self._tell, self._told, self._nameless = tell, set[str](), Counter[str]()
        self._unheard = Counter[str]()
        self._dialers: dict[int, tuple[str, float]] = {}
        self._idle = IdleConnections(
            lambda name, line: not self.find_problem(name, line.connection)
        )
        listener = listen_at(addresses[name], tell if keys else None)
        self._server = _MemberServer(self, listener, on_message, provide, tell)
        self._lines: dict[int, _PeerLine] = {}
        for other in self.addresses.keys() - {name}:
            self._line(other)

    @property
    def sent_bytes(self) -> int:
        """Bytes of pieces that other members fetched here."""
        return self._server.sent_bytes

    def send(self, names: Iterable[int], message: Any) -> None:
        """Send a message to members; one whose address is unknown gets none."""
        for name in names:
            if name != self.name and name in self.addresses:
                self._line(name).outbox.put((time.monotonic(), message))

    def gone(self, seats: Iterable[tuple[int, int]]) -> set[int]:
        """Return those of (number, start of its process) whose process is dead."""
        found = set()
        for name, boot in seats:
            line = self._lines.get(name)
            if line is None:
                continue
            is_lost = line.is_gone or (line.is_refused and self.refusing_are_gone)
            if is_lost or line.boot > boot or self.is_removed(name):
                found.add(name)
        return found

    def refusing(self) -> set[int]:
        """Return the members that refuse this one's key; their processes live."""
        return {name for name, line in self._lines.copy().items() if line.is_refused}

    def refusals(self) -> dict[int, str]:
        """Return why members refuse this one: name → a line with what to do."""
        return {name: one.refusal for name, one in self._lines.copy().items() if one.refusal}

    def answering(self) -> set[int]:
        """Return the members that answered this one's last message."""
        lines = self._lines.copy().items()
        return {n for n, one in lines if one.boot >= 0 and not (one.is_gone or one.is_silent)}

    def is_unreached(self, name: int) -> bool:
        """Return whether this process could not connect to a member when it last tried."""
        line = self._lines.get(name)
        return line is not None and (line.is_gone or line.is_silent)

    def is_removed(self, name: int) -> bool:
        """Return whether the key of a member was taken out of the list."""
        return self.keys is not None and self.keys.is_removed(name)

    def restarted(self, seats: Iterable[tuple[int, int]]) -> set[int]:
        """Return those whose process is dead, and another start of it answers."""
        found = set()
        for name, boot in seats:
            line = self._lines.get(name)
            if line is not None and line.boot > boot and not line.is_gone:
                found.add(name)
        return found

    def restart(self) -> int:
        """Count this process as started again; return the number of the start."""
        self.boot += 1
        return self.boot

    def learn(self, name: int, address: str) -> None:
        """Note the address of a member that sent a message."""
        if self.addresses.get(name) != address:
            self.addresses[name] = address
            if line := self._lines.pop(name, None):
                line.close()
        self._line(name)

    def note_dialer(self, name: int, address: str) -> None:
        """Note that a member is connected to this one: a beat of it came, or a message."""
        self._dialers[name] = address, time.monotonic()

    def dialers(self) -> dict[int, str]:
        """Return the addresses of the members that dial this one; some may be unknown otherwise."""
        since_s = time.monotonic() - DIALED_S
        return {
            name: at for name, (at, heard_s) in self._dialers.copy().items() if heard_s > since_s
        }

    def fetch(
        self,
        name: int,
        key: str,
        interrupted: Callable[[], bool] = lambda: False,
        *,
        lane: int = 0,
    ) -> bytes | None:
        """Return the bytes of a key from a member; None if it has them not.

        Args:
            lane: rank of the member's island that is asked.

        Raises:
            OSError: the member is not reached, or its bytes were altered, or this call was
                interrupted.
        """
        address = rank_address(self.addresses[name], lane)
        try:
            line, first = self._ask_first_piece(name, address, key, lane)
            try:
                found = receive_pieces(line, name, key, first, interrupted)
            except BaseException:
                line.close()
                raise
        except OSError as failure:
            self.report(failure)
            raise
        self._idle.put(name, address, line, lane)
        return found

    def _ask_first_piece(
        self, name: int, address: str, key: str, lane: int
    ) -> tuple[AuthenticatedConnection, Any]:
        """Return a connection, and its answer to the first request of a fetch.

        An idle connection that does not answer soon is replaced: the other side may have started
        again, or a router may have forgotten the connection.
        """
        request = ["piece", key, 0]
        if line := self._idle.pop(name, address, lane):
            try:
                return line, line.ask(request, CONNECT_S)
            except AlteredConnectionError:
                line.close()
                raise
            except OSError:
                line.close()
        line = self.connect(name, address)
        try:
            return line, line.ask(request, ANSWER_S)
        except BaseException:
            line.close()
            raise

    def find_problem(self, name: int, connection: StreamSocket) -> str:
        """Return why the other side of a connection may not be member `name`; "" without keys."""
        certificate = getattr(connection, "certificate", b"")
        return "" if self.keys is None else self.keys.find_problem(name, certificate)

    def refresh_keys(self) -> bool:
        """Read the list of keys again; return whether it changed."""
        if self.keys is None or not self.keys.refresh():
            return False
        self.forget_lines()
        self._idle.drop_refused()
        return True

    def connect(self, name: int, at: str) -> AuthenticatedConnection:
        """Connect to a member, encrypted if there are keys.

        Raises:
            OSError: it is not reached, or one side refuses the other; ConfigError for another
                token.
        """
        if self.keys is not None:
            encrypted = self.keys.connect(_dial(at), name, at)
            return AuthenticatedConnection(encrypted, self.token, at)
        if self._unheard[at] >= UNHEARD_TRIES:  # both sides wait for the other one's greeting
            refuse_without_key(self.name, name, _dial(at), at)
        connection = _dial(at)
        try:
            found = AuthenticatedConnection(connection, self.token, at)
        except (TimeoutError, ConnectionError):
            self._unheard[at] += 1
            raise
        del self._unheard[at]
        return found

    def report(self, failure: Exception) -> None:
        """Report a refused or altered connection, each line once."""
        if isinstance(failure, KeyRefusedError | AlteredConnectionError):
            self.report_line(str(failure))

    def report_line(self, line: str) -> None:
        """Report a line, unless it was reported since the list of keys changed.

        The two directions between two islands count as one, though their addresses differ.
        """
        about = PLACE.sub(r"\1", line)
        if NAMELESS in about:
            self._nameless[about] += 1
            whom = about.partition(NAMELESS)[0]
            is_told = any(one.startswith(whom) for one in self._told.copy())
            if is_told or self._nameless[about] < NAMELESS_TRIES:
                return
        if about not in self._told and len(self._told) < MOST_LINES:
            self._told.add(about)
            self._tell(line)

    def forget_lines(self) -> None:
        """Report repeated lines again from now on: the list of keys changed."""
        self._told.clear()
        self._nameless.clear()

    def close(self) -> None:
        """End all connections; messages that were not sent yet are sent first."""
        lines = list(self._lines.values())
        for line in lines:
            line.close()
        for line in lines:
            line.thread.join(CONNECT_S)
        self._idle.close()
        self._server.end()

    def _line(self, name: int) -> _PeerLine:
        if name not in self._lines:
            self._lines[name] = _PeerLine(self, name)
        return self._lines[name]


def _dial(at: str) -> socket.socket:
    return socket.create_connection(parse_address(at), timeout=CONNECT_S)


class _PeerLine:
    """Sender of messages and beats to one member, in a thread."""

    def __init__(self, links: MemberLinks, name: int) -> None:
        self.links, self.name, self.address = links, name, links.addresses[name]
        self.outbox: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        self.is_gone, self.is_refused, self.is_silent, self.boot = False, False, False, -1
        self.refusal = ""
        self._closed = threading.Event()
        self._connection: AuthenticatedConnection | None = None
        self.thread = threading.Thread(target=self._run, name=f"island-{name}", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._closed.set()
        self.outbox.put((0.0, None))

    def _run(self) -> None:
        while True:
            message = None
            with contextlib.suppress(queue.Empty):
                sent_s, message = self.outbox.get(timeout=BEAT_S)
                if message is not None and time.monotonic() - sent_s > STALE_S:
                    continue  # the member was not reached meanwhile
            if message is None and self._closed.is_set():
                break
            self._deliver(message)
        if self._connection is not None:
            self._connection.close()

    def _deliver(self, message: Any) -> None:
        """Send a message, or a beat; once more on a new connection if the old one was closed."""
        links = self.links
        request = ["message", links.name, links.addresses[links.name], message]
        for _ in range(2):
            try:
                if self._connection is None or links.is_removed(self.name):
                    self._drop()
                    self._connection = links.connect(self.name, self.address)
                answer = self._connection.ask(request, ANSWER_S)
                if isinstance(answer, str):
                    whom = name_member(self.name)
                    raise OwnKeyRefusedError(f"{whom} at {self.address}: {answer}")
                self.boot = max(self.boot, int(answer))
                self.is_gone = self.is_refused = self.is_silent = False
                self.refusal = ""
                if links.keys is not None:
                    links.keys.known_to.add(self.name)
                return
            except AlteredConnectionError as failure:
                self._drop()  # somebody on the way: its process lives
                links.report(failure)
            except ConnectionError as failure:
                self._drop()
                self.is_gone, self.is_refused = True, False
                if isinstance(failure, ConnectionRefusedError):
                    self.refusal = ""  # nobody listens there any more
            except OwnKeyRefusedError as failure:
                self._drop()
                self.is_gone, self.is_refused, self.refusal = False, True, str(failure)
                links.report(failure)
                return
            except (OSError, ConfigError, ValueError, TypeError) as failure:
                self._drop()  # silent, or a stranger: that is no proof of a dead process
                self.is_silent = True
                links.report(failure)
                return

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _MemberServer(AuthenticatedServer):
    """Server of one member's address, in a thread until `end`."""

    WHERE = "this island's port"

    def __init__(
        self,
        links: MemberLinks,
        listener: socket.socket,
        on_message: OnMessage,
        provide: Provide,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(listener, links.token, links.report_line if links.keys else tell)
        self._links, self._on_message, self._provide = links, on_message, provide
        self.sent_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="island-server", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Close all connections and the address."""
        self._ended.set()
        self._thread.join(2 * CONNECT_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            self.serve(BEAT_S / 4)
            self._refresh_keys()
        for peer in list(self.peers):
            self._drop(peer)
        self._listener.close()

    def wrap_connection(self, connection: socket.socket, host: str) -> StreamSocket:
        """Encrypt an accepted connection if there are keys."""
        keys, report = self._links.keys, self._links.report_line
        return connection if keys is None else keys.accept(connection, host, report)

    def describe_failure(self, peer: Peer, failure: OSError) -> str:
        """Return the reason to report; refusals and altered bytes count before the greeting too."""
        if self._links.keys is None:
            return super().describe_failure(peer, failure)
        told = isinstance(failure, KeyRefusedError | AlteredConnectionError)
        return str(failure) if told else ""

    def report_refusal(self, peer: Peer, why: str) -> None:
        """Report each refusal by its own line if there are keys, which names the island."""
        if self._links.keys is None:
            super().report_refusal(peer, why)
        elif why:
            named = why.startswith(("island ", "an island ", "the witness ", "somebody "))
            self._links.report_line(why if named else f"somebody at {peer.address}: {why}")

    def _refresh_keys(self) -> None:
        """Read the list of keys again, and end connections of keys that were taken out."""
        keys = self._links.keys
        if keys is None or not self._links.refresh_keys():
            return
        for peer in list(self.peers):
            certificate = getattr(peer.connection, "certificate", b"")
            if certificate and not keys.allows(certificate):
                self._drop(peer)

    def handle_request(self, peer: Peer, request: Any) -> None:
        """Take a message or a beat, or answer with a piece."""
        match request:
            case ["message", int(name), str(address), message]:
                if problem := self._links.find_problem(name, peer.connection):
                    self._links.report_line(problem)
                    self.answer(peer, problem)
                    return
                self.answer(peer, self._links.boot)
                self._links.note_dialer(name, address)
                if message is not None:
                    self._on_message(name, address, message)
            case ["piece", str(key), int(offset)]:
                found = self._provide(key, offset, PIECE_BYTES)
                if found is None:
                    self.answer(peer, None)
                    return
                size, piece = found
                self.sent_bytes += len(piece)
                digest = hashlib.sha256(piece).hexdigest()
                self.answer(peer, [size, len(piece), digest], piece)
            case _:
                raise ValueError("not one of a member's requests")
