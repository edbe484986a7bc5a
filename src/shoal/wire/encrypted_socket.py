"""Socket of a TLS connection, with the errors of a plain socket and one line for each refusal.

    handshake     TLS 1.3 with a certificate on both sides, before the first byte; `check` judges it
    would block   BlockingIOError, as of a plain socket; `waits_for_read`: a send needs bytes first
    cut           end of the stream, or ConnectionError: the same as a process that died
    altered       AlteredConnectionError: a record was altered, replayed, dropped or reordered
    not allowed   KeyRefusedError: this side refuses the other one's key, or the other way round

Only whole records with a correct tag reach the caller, in the order in which they were sent. The
connection ends with each of these errors.

Source: TLS 1.3, RFC 8446
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Protocol

REFUSING_ALERTS = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE", "ACCESS_DENIED")
"""Ends of the names of TLS alerts by which the other side refuses a certificate."""
PLAIN_REASONS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "HTTP_REQUEST", "PACKET_LENGTH")
"""Beginnings of the reasons of a failed handshake with a program that does not encrypt."""


class KeyRefusedError(PermissionError):
    """This side or the other one does not allow the key of a connection."""


class OwnKeyRefusedError(KeyRefusedError):
    """The other side refuses the key of this one: its process lives."""


class AlteredConnectionError(ConnectionAbortedError):
    """Bytes of an encrypted connection are not those that the other side sent."""


class StreamSocket(Protocol):
    """Methods of a socket that authenticated connections use."""

    def recv(self, count: int, /) -> bytes:
        """Return received bytes, b"" at the end of the stream."""

    def send(self, data: bytes | bytearray, /) -> int:
        """Send the first of some bytes; return how many."""

    def sendall(self, data: bytes, /) -> None:
        """Send all bytes."""

    def settimeout(self, seconds: float | None, /) -> None:
        """Limit the time of each call; 0: no call blocks."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option of the TCP connection."""

    def fileno(self) -> int:
        """Return the file descriptor."""

    def close(self) -> None:
        """Close the connection."""


def is_refusal(failure: ssl.SSLError) -> bool:
    """Return whether the other side refused this side's certificate by an alert."""
    reason = failure.reason or ""
    return "_ALERT_" in reason and any(text in reason for text in REFUSING_ALERTS)


def is_plain(failure: ssl.SSLError) -> bool:
    """Return whether the other side does not encrypt."""
    return (failure.reason or "").startswith(PLAIN_REASONS)


def accepts_tls(connection: socket.socket, claim: str) -> bool:
    """Return whether the other side of a new connection encrypts; the connection is closed.

    Args:
        claim: server name that the other side reads.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        tls = context.wrap_socket(connection, server_hostname=claim)
    except ssl.SSLError as failure:
        return "_ALERT_" in (failure.reason or "")
    except OSError:
        return False
    finally:
        connection.close()
    with tls, contextlib.suppress(OSError):
        tls.recv(1)  # until the other side misses a certificate, and reports that
    return True


class EncryptedSocket:
    """One end of an encrypted connection.

    Args:
        tls: the wrapped socket, before its handshake.
        check: returns why the other side's certificate (DER) is refused, "" if it is allowed.
        explain: returns the error to raise for one of TLS; the second value: in the handshake.

    Attributes:
        certificate: of the other side; b"" before the end of the handshake.
        waits_for_read: the last call needs bytes of the other side before it can send.
    """

    def __init__(
        self,
        tls: ssl.SSLSocket,
        check: Callable[[bytes], str],
        explain: Callable[[ssl.SSLError, bool], OSError],
    ) -> None:
        self._tls, self._check, self._explain = tls, check, explain
        self.certificate, self.waits_for_read = b"", False

    def authenticate(self) -> None:
        """Prove both sides' keys to each other, if that is not done yet.

        Raises:
            KeyRefusedError: one side refuses the key of the other one.
        """
        if self.certificate:
            return
        with self._plain_errors():
            self._tls.do_handshake()
        found = self._tls.getpeercert(binary_form=True) or b""
        if why := self._check(found):
            raise KeyRefusedError(why)
        self.certificate = found

    def recv(self, count: int, /) -> bytes:
        """Return at most `count` received bytes, b"" at the end of the stream."""
        self.authenticate()
        with self._plain_errors():
            return self._tls.recv(count)

    def send(self, data: bytes | bytearray, /) -> int:
        """Send the first of some bytes; return how many."""
        self.authenticate()
        with self._plain_errors():
            return self._tls.send(data)

    def sendall(self, data: bytes, /) -> None:
        """Send all bytes."""
        self.authenticate()
        with self._plain_errors():
            self._tls.sendall(data)

    def settimeout(self, seconds: float | None, /) -> None:
        """Limit the time of each call; 0: no call blocks."""
        self._tls.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option of the TCP connection."""
        self._tls.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._tls.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._tls.close()

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Raise what a plain socket raises, or what `explain` returns."""
        self.waits_for_read = False
        try:
            yield
        except ssl.SSLWantReadError as failure:
            self.waits_for_read = True
            raise BlockingIOError("more bytes of the other side are needed") from failure
        except ssl.SSLWantWriteError as failure:
            raise BlockingIOError("the connection takes no bytes now") from failure
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as failure:
            raise ConnectionResetError("the connection was closed") from failure
        except ssl.SSLError as failure:
            raise self._explain(failure, not self.certificate) from failure
