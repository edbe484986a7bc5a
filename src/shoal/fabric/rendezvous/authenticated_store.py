"""A store at which processes of several machines meet, open to those alone who hold its token.

torch's TCPStore lets in whoever reaches its port: he may list, read and overwrite all keys, so also
the addresses by which ranks find each other. This one has both sides prove first that they know the
token, and seals what they say (wire/authenticated_stream.py). What serves it: store_server.py.
Nothing is encrypted: who can listen on the wire reads the keys, and addresses are all they hold.

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
from shoal.wire.authenticated_stream import Connection

TRY_S = 0.1


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

    def _connect(self) -> Connection:
        until_s = time.monotonic() + self._timeout().total_seconds()
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            try:
                made = socket.create_connection((self.host, self.port), timeout=left_s)
                return Connection(made, self._token, f"{self.host}:{self.port}")
            except OSError as failure:
                if time.monotonic() + TRY_S > until_s:
                    raise ClusterError(
                        f"nobody who knows the token answers at {self.host}:{self.port}: {failure}"
                    ) from failure
            time.sleep(TRY_S)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
