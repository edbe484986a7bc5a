"""HTTP server of one page of metrics: GET /metrics, / and /healthz, nothing else.

A request names no file: three paths are known by comparison, and no path reaches the file system.
Whoever connects may be hostile, so everything has a limit:

    head of a request    8 KiB, complete within 5 s, however slowly its bytes come
    answer               sent within 5 s
    connections          16 at a time; further ones get 503 at once
    the page             made at most once a second, and for at most a tenth of the time
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from shoal.view.metrics_server.exposition import CONTENT_TYPE

HEAD_BYTES = 8192
DEADLINE_S = 5.0
MOST_CONNECTIONS = 16
FRESH_S = 1.0
WORK_SHARE = 0.1
"""Share of the time that making pages may take."""
PLAIN = "text/plain; charset=utf-8"
INDEX = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Shoal metrics</title>
<h1>Shoal metrics</h1><p><a href="metrics">/metrics</a>: all runs, for Prometheus.</p></html>
"""
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class PageCache:
    """A page that is made again only if it is old enough; one thread at a time makes it.

    Args:
        make: returns the page.
    """

    def __init__(self, make: Callable[[], str]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._page, self._fresh_until_s = b"", 0.0

    def read(self) -> bytes:
        """Return the page, a second old at most, or ten times as old as its making takes."""
        with self._lock:
            began_s = time.monotonic()
            if began_s >= self._fresh_until_s:
                self._page = self._make().encode("utf-8", "replace")
                now_s = time.monotonic()
                self._fresh_until_s = now_s + max(FRESH_S, (now_s - began_s) / WORK_SHARE)
            return self._page


class _RequestReader(io.RawIOBase):
    """Reader of a request's head with a deadline and a limit of bytes, over all its parts."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._left = connection, HEAD_BYTES
        self._end_s = time.monotonic() + DEADLINE_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or self._left <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class MetricsServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Server of one page, with its index and a health check.

    Args:
        address: host and port; port 0: a free one, in `server_address`.
        make: returns the page.
        token: requests must bear it; None: no request needs one, and only a request to a loopback
            name is answered, so that no web page can read the metrics through the browser.
        warn: gets a line for each failure of the server's own.

    Raises:
        OSError: the address is in use, or not one of this machine.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        make: Callable[[], str],
        token: str | None,
        warn: Callable[[str], None],
    ) -> None:
        self.cache, self.warn = PageCache(make), warn
        self.token = None if token is None else token.encode()
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        info = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        self.address_family = info[0]
        super().__init__(info[4][:2], MetricsHandler)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, or at once that all are in use."""
        if self._slots.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # this system starts no further thread
                self._slots.release()
                self.shutdown_request(request)
            return
        request.setblocking(False)
        with contextlib.suppress(OSError):
            request.recv(HEAD_BYTES)  # what stays unread makes the system reset the connection
        with contextlib.suppress(OSError):
            request.send(BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, then free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Warn in one line, and not at all of a connection that broke."""
        failure = sys.exception()
        if not isinstance(failure, OSError):
            self.warn(f"a request was not answered: {type(failure).__name__}: {failure}")


class MetricsHandler(BaseHTTPRequestHandler):
    """Answer of one request; the connection closes after it."""

    protocol_version = "HTTP/1.1"
    server: MetricsServer

    def setup(self) -> None:
        """Read through the limits of a request's head."""
        super().setup()
        self.rfile = io.BufferedReader(_RequestReader(self.connection), HEAD_BYTES)

    def do_GET(self) -> None:
        """Answer one of the three paths."""
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(HTTPStatus.OK, PLAIN, b"ok\n")
        elif refusal := self._refusal():
            self._answer(*refusal)
        elif path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", INDEX.encode())
        elif path == "/metrics":
            self._answer_metrics()
        else:
            self._answer(HTTPStatus.NOT_FOUND, PLAIN, b"not found; try: /metrics\n")

    do_HEAD = do_GET

    def _answer_metrics(self) -> None:
        try:
            page = self.server.cache.read()
        except Exception as failure:  # a damaged folder must not end the server
            self.server.warn(f"the page was not made: {type(failure).__name__}: {failure}")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, PLAIN, b"the page was not made\n")
        else:
            self._answer(HTTPStatus.OK, CONTENT_TYPE, page)

    def _refusal(self) -> tuple[HTTPStatus, str, bytes] | None:
        """Return the answer to a request that may not read the metrics; None if it may."""
        if self.server.token is None:
            if is_loopback(_host_name(self.headers.get("Host", ""))):
                return None
            return HTTPStatus.FORBIDDEN, PLAIN, b"Host: not a name of this machine's loopback\n"
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.server.token)
        if same and scheme.lower() == "bearer":
            return None
        return HTTPStatus.UNAUTHORIZED, PLAIN, b"Authorization: Bearer TOKEN is needed\n"

    def handle_expect_100(self) -> bool:
        """Answer at once: no request has a body that is read."""
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request without a word of it; an unknown method is 405."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == 501 else HTTPStatus(code)
        self._answer(status, PLAIN, f"{status.phrase}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.close_connection = True
        self.request_version = self.protocol_version  # else 0.9 gets no status line
        self.connection.settimeout(DEADLINE_S)
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", "default-src 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Log nothing: a request's text may hold escapes of a terminal."""


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port.

    >>> _host_name("localhost:9877"), _host_name("[::1]:9877"), _host_name("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's own loopback, by its name or address.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "evil.example")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
