"""Authenticated store: a torch Store for processes that know a token.

torch's TCPStore accepts whoever reaches its port: a stranger may list, read and overwrite all keys,
such as the addresses by which ranks find each other. Here both sides first prove that they know the
token, and authenticate every message (wire/authenticated_stream.py). The server is in
store_server.py. Nothing is encrypted: a listener on the wire reads the keys, and addresses are all
they hold.

Source: `torch.distributed.Store`, whose methods the client has
"""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.wire.authenticated_stream import AuthenticatedConnection

TRY_S = 0.1


def to_base64(value: bytes) -> str:
    """Return a value as base64, for JSON."""
    return base64.b64encode(value).decode()


_made: list[AuthenticatedStore] = []
"""References to stores: a C++ reference alone loses the methods of the Python object."""


class AuthenticatedStore(dist.Store):
    """Client of the authenticated store: a `torch.distributed.Store` for holders of the token.

    Each thread has its own connection, so no thread waits behind another's wait.
    """

    def __init__(self, host: str, port: int, token: bytes, timeout: timedelta) -> None:
        """Connect to the server. ConfigError: another token; ClusterError: nobody answers."""
        super().__init__()
        self.host, self.port, self._token = host, port, token
        self.set_timeout(timeout)
        self._mine = threading.local()
        self._mine.line = self._connect()
        _made.append(self)

    def clone(self) -> AuthenticatedStore:
        """Return the store itself: threads do not share a connection."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._request("set", key, to_base64(_bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return [base64.b64decode(value) for value in self._request("get", list(keys))]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Set several keys' values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a counter that starts at 0, and return the sum."""
        return int(self._request("add", key, value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value ("": no value yet), and return its value."""
        told = self._request(
            "compare_set", key, to_base64(_bytes(expected)), to_base64(_bytes(desired))
        )
        return base64.b64decode(told)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._request("check", list(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; raise dist.DistStoreError after the timeout."""
        self._request("wait", list(keys), within=timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return bool(self._request("delete", key))

    deleteKey = delete_key  # by this name torch calls it from C++

    def has_extended_api(self) -> bool:
        """Return False: the store has neither queues nor append."""
        return False

    def _request(self, *request: Any, within: timedelta | None = None) -> Any:
        """Send a request and return the answer; raise dist.DistStoreError as torch's stores do."""
        line = getattr(self._mine, "line", None)
        try:
            if line is None:
                line = self._mine.line = self._connect()
            return line.ask(list(request), (within or self._timeout()).total_seconds())
        except OSError as failure:
            self._mine.line = None  # a late answer would be taken for that of the next request
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

    def _connect(self) -> AuthenticatedConnection:
        until_s = time.monotonic() + self._timeout().total_seconds()
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            try:
                made = socket.create_connection((self.host, self.port), timeout=left_s)
                return AuthenticatedConnection(made, self._token, f"{self.host}:{self.port}")
            except OSError as failure:
                if time.monotonic() + TRY_S > until_s:
                    raise ClusterError(
                        f"nobody who knows the token answers at {self.host}:{self.port}: {failure}"
                    ) from failure
            time.sleep(TRY_S)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
