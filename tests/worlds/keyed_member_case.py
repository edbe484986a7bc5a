"""Islands with keys, as processes: connections by way of relays, and a list that is read often."""

from __future__ import annotations

from typing import Any
from unittest import mock

import member_case
from shoal.fabric import World
from shoal.fabric.islands.member_links import MemberLinks
from shoal.wire import member_keys


def train(world: World, *, relays: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
    """`member_case.train`, connecting to island K at relays["K"]."""
    connect = MemberLinks.connect

    def by_relay(links: MemberLinks, name: int, at: str) -> Any:
        return connect(links, name, (relays or {}).get(str(name), at))

    with (
        mock.patch.object(MemberLinks, "connect", by_relay),
        mock.patch.object(member_keys, "REFRESH_S", 0.1),
    ):
        return member_case.train(world, **asked)
