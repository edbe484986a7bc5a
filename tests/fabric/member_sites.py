"""One member's side of its connections in a test: its port, its keys, what came, what it told."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.fabric.islands.member_links import MemberLinks
from shoal.wire.member_keys import MemberKeys


class Site:
    """One member on loopback; `made` is the folder of its keys, None: the token alone."""

    links_type = MemberLinks

    def __init__(
        self, index: int, made: Path | None, listed: Path | None = None, *, key: str = ""
    ) -> None:
        self.index, self.told, self.came = index, list[str](), list[Any]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.links: Any = None
        self.keys: Any = None
        if made is not None:
            own = made / (key or f"{index}.key")
            self.keys = MemberKeys(index, own, [listed or made / "all.pub"], self.told.append)

    def open(self, at: str = "", *, plain: bool = False, **others: str) -> Any:
        """Listen; addresses of others: i1="127.0.0.1:29400"."""
        known = {int(name[1:]): address for name, address in others.items()}
        self.links = self.links_type(
            self.index,
            7,
            {self.index: at or self.address, **known},
            b"the token of this test",
            lambda name, address, message: self.came.append(message),
            self.provide,
            self.told.append,
            None if plain else self.keys,
        )
        return self.links

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return the size of a change, and a piece of it."""
        return 1, b"w"

    def close(self) -> None:
        if self.links is not None:
            self.links.close()


def until(ready: Callable[[], Any], within_s: float = 10.0) -> None:
    until_s = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.01)
