"""Requests that no scraper sends: drawn by a seed, sent to a server, their answers checked."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable

STATUSES = {200, 400, 403, 404, 405, 414, 431, 503, 505}
PATHS = (
    "/../../etc/passwd", "/metrics/../../secret", "/%2e%2e/%2e%2e/secret", "//etc/passwd", "file:///etc/passwd",
    "/metrics/", "/metrics%00", "/metrics;x", "*", "..", "\\..\\secret", "http://127.0.0.1/secret", "/secret",
    "/\x1b[2J", "/<script>alert(1)</script>", "/healthz/..", "/metrics\x00", "/?" + "a" * 3000, "/" + "a" * 70_000,
)  # fmt: skip
METHODS = (
    "POST",
    "PUT",
    "DELETE",
    "TRACE",
    "CONNECT",
    "OPTIONS",
    "PATCH",
    "get",
    "GETX",
    "\x00",
    "__init__",
    "GET",
)
VERSIONS = (
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/9.9",
    "HTTP/2.0",
    "HTTP/1.x",
    "HTTP/-1.1",
    "HTTP",
    "",
    "HTTP/1.1 x",
)
HEADERS = (
    b"Content-Length: -1", b"Content-Length: 99999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue",
    b"Authorization: Bearer \xff\xfe", b"Authorization: Basic Og==", b"Authorization:", b": x", b"no colon", b" folded",
    b"Host: evil.example", b"Host: [::1", b"Host:", b"Connection: keep-alive, upgrade", b"Upgrade: h2c", b"Range: bytes=0-",
    b"X: " + b"y" * 9000, b"A: \x00\x1b[31m", b"Cookie: ../../secret",
)  # fmt: skip


def _paths(rng: random.Random) -> bytes:
    return f"{rng.choice(('GET', 'HEAD'))} {rng.choice(PATHS)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _methods(rng: random.Random) -> bytes:
    path = rng.choice(("/metrics", "/", "/healthz"))
    return f"{rng.choice(METHODS)} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _versions(rng: random.Random) -> bytes:
    line = rng.choice(("\r\n", "\n", "\r"))
    return f"GET /metrics {rng.choice(VERSIONS)}{line}Host: localhost{line}{line}".encode()


def _headers(rng: random.Random) -> bytes:
    lines = rng.choices(HEADERS, k=rng.choice((1, 2, 5, 120)))
    body = rng.choice((b"", b"0\r\n\r\nGET /secret HTTP/1.1\r\n\r\n", rng.randbytes(300)))
    return b"GET /metrics HTTP/1.1\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + body


def _bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 20, 500, 20_000))) + rng.choice((b"", b"\r\n\r\n"))


def _mutated(rng: random.Random) -> bytes:
    found = bytearray(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n")
    for _ in range(rng.randint(1, 6)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def _torn(rng: random.Random) -> bytes:
    whole = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return whole[: rng.randrange(len(whole))]


def _tls(rng: random.Random) -> bytes:
    return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(506)


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _paths, _methods, _versions, _headers, _bytes, _mutated, _torn, _tls,
)  # fmt: skip


def draw(rng: random.Random) -> bytes:
    """One hostile request."""
    return rng.choice(KINDS)(rng)


def send(port: int, request: bytes, *, hang_up: bool = False) -> bytes:
    """The whole answer; b"" if the server closed without one, or if the client hangs up."""
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        try:
            connection.sendall(request)
            if hang_up:
                return b""
            connection.shutdown(socket.SHUT_WR)
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        except TimeoutError:
            raise
        except OSError:  # the server closed with a request unread
            return b""
    return b"".join(parts)


def check(request: bytes, answer: bytes, secret: bytes) -> int:
    """The status of an answer, 0 without one; an answer is a known status without a word that must not be there."""
    assert secret not in answer, request[:200]
    assert not re.search(b'Traceback|File "', answer), request[:200]
    if not answer:
        return 0
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    status = int(answer.split(b" ", 2)[1])
    assert status in STATUSES, (request[:200], answer[:200])
    return status
