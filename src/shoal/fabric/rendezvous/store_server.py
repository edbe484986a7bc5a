"""Server of the authenticated store, in a thread of rank 0: see authenticated_store.py."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable
from typing import Any

from shoal.fabric.rendezvous.authenticated_store import to_base64
from shoal.wire.authenticated_server import AuthenticatedServer, Peer


class StoreServer(AuthenticatedServer):
    """Server that holds the store's keys, in its own thread, until the process ends."""

    def __init__(
        self, listener: socket.socket, token: bytes, tell: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(listener, token, tell)
        self._kept: dict[str, str] = {}  # base64
        self._parked: dict[str, list[tuple[Peer, list[Any]]]] = {}  # by a key that is missing
        threading.Thread(target=self._run, name="shoal-store", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.serve()

    def handle_request(self, peer: Peer, request: Any) -> None:
        """Answer one request of a AuthenticatedStore."""
        kept = self._kept
        match request:
            case ["set", str(key), str(value)]:
                kept[key] = value
                self.answer(peer, True)
                self._answer_waiting(key)
            case ["add", str(key), int(number)]:
                total = int(base64.b64decode(kept.get(key, "MA=="))) + number
                kept[key] = to_base64(str(total).encode())
                self.answer(peer, total)
                self._answer_waiting(key)
            case ["compare_set", str(key), str(expected), str(value)]:
                found = kept.get(key)
                if found == expected or (found is None and not expected):
                    kept[key] = value
                    self.answer(peer, value)
                    self._answer_waiting(key)
                else:
                    self.answer(peer, expected if found is None else found)
            case ["wait" | "get", list(keys)]:
                missing = next((key for key in keys if key not in kept), None)
                if missing is not None:
                    self._parked.setdefault(str(missing), []).append((peer, request))
                else:
                    get = request[0] == "get"
                    self.answer(peer, [kept[key] for key in keys] if get else True)
            case ["check", list(keys)]:
                self.answer(peer, all(key in kept for key in keys))
            case ["delete", str(key)]:
                self.answer(peer, kept.pop(key, None) is not None)
            case _:
                raise ValueError("not one of the store's requests")

    def _answer_waiting(self, key: str) -> None:
        for peer, request in self._parked.pop(key, []):
            if peer in self.peers:
                self.handle_request(peer, request)
