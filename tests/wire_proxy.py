"""A relay on loopback that records what passes, and alters chosen TLS records on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

RECORD_HEAD = 5

Tamper = Callable[[bytes, bytes], list[bytes] | None]
"""(a record, the one after it) → what is sent in the place of both; None: close the connection."""


def flip(first: bytes, then: bytes) -> list[bytes] | None:
    """One bit of the first record is another."""
    middle = (RECORD_HEAD + len(first)) // 2
    return [first[:middle] + bytes([first[middle] ^ 1]) + first[middle + 1 :], then]


def replay(first: bytes, then: bytes) -> list[bytes] | None:
    return [first, first, then]


def drop(first: bytes, then: bytes) -> list[bytes] | None:
    return [then]


def swap(first: bytes, then: bytes) -> list[bytes] | None:
    return [then, first]


def cut(first: bytes, then: bytes) -> list[bytes] | None:
    return None


TAMPERS: dict[str, Tamper] = {
    "altered": flip,
    "replayed": replay,
    "dropped": drop,
    "reordered": swap,
    "cut": cut,
}


class Proxy:
    """Connections to a port of this machine, by way of this one.

    Attributes:
        seen: all bytes that passed, in both directions.
        from_client: bytes of each connection's client.
        tampered: how often a tamper was done.
    """

    def __init__(self, port: int) -> None:
        self.target, self.seen, self.from_client = port, bytearray(), list[bytearray]()
        self.tampered = 0
        self._armed: dict[bool, Tamper] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = {self._listener}
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, how: Tamper, *, to_server: bool) -> None:
        """Tamper with the next record of a direction; without two of them, with one and b""."""
        self._armed[to_server] = how

    def close(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # nobody is there now
                    client.close()
                    continue
                self._open |= {client, server}
                log = bytearray()
                self.from_client.append(log)
                for source, sink, to_server in ((client, server, True), (server, client, False)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    args = (source, sink, to_server, log)
                    threading.Thread(target=self._relay, args=args, daemon=True).start()

    def _relay(
        self, source: socket.socket, sink: socket.socket, to_server: bool, log: bytearray
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if to_server:
                    log += data
                if to_server in self._armed:
                    data = self._tampered(source, data, to_server)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _tampered(self, source: socket.socket, data: bytes, to_server: bool) -> bytes:
        """The bytes with one tamper; those of whole records, of which more may have to come."""
        how = self._armed[to_server]
        needs = 1 if how in (flip, replay, cut) else 2
        while len(records := cut_records(data)[0]) < needs or cut_records(data)[1]:
            more = source.recv(1 << 16)
            if not more:
                return data
            self.seen += more
            data += more
        if self._armed.pop(to_server, None) is None:
            return data
        self.tampered += 1
        first, then = records[0], records[1] if len(records) > 1 else b""
        found = how(first, then)
        if found is None:
            source.close()
            raise ConnectionAbortedError
        return b"".join([*found, *records[2:]])


def cut_records(data: bytes) -> tuple[list[bytes], bytes]:
    """TLS records, and the beginning of another."""
    found = []
    while len(data) >= RECORD_HEAD:
        size = RECORD_HEAD + int.from_bytes(data[3:RECORD_HEAD])
        if len(data) < size:
            break
        found.append(data[:size])
        data = data[size:]
    return found, data
