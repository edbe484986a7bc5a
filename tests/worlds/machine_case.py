"""What the test of a measured machine runs on every member of a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.fabric import World
from shoal.machine.links import measure_links
from shoal.machine.measure import Sizes, measure_machine

TINY = Sizes((16, 32), (4096, 16384), (1024, 65536), 4096, 2, 1)


def measure(world: World, cache: str) -> dict[str, Any]:
    """The document, the same one read again, and what this rank has sent."""
    first = measure_machine(world, Path(cache), TINY)
    sent = world.traffic.sent_bytes.total()
    second = measure_machine(world, Path(cache), TINY)
    return {
        "first": first,
        "second": second,
        "quiet": world.traffic.sent_bytes.total() - sent < 65536,
    }


def axes(world: World) -> dict[str, Any]:
    """Two axes of two ranks each."""
    return measure_links(world, {"across": 2, "inside": 2}, (1024, 65536))
