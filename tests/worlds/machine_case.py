"""What the test of a measured machine runs on every member of a world."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from shoal.cli.links import measure_collectives as measure_all
from shoal.fabric import World
from shoal.fabric.exchanges.timed_collectives import prepare_bare_collective
from shoal.machine import link_rates
from shoal.machine.link_rates import measure_links
from shoal.machine.measure import MeasurementSizes, measure_machine

TINY = MeasurementSizes((16, 32), (4096, 16384), (1024, 65536), 4096, 2, 1)


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


def every(world: World) -> dict[str, Any]:
    """All collectives in groups of 2 and 4; rank 3 is late to every broadcast to a pair's other."""

    def slow(group: World, kind: str, size_bytes: int) -> Callable[[], object]:
        call = prepare_bare_collective(group, kind, size_bytes)
        if kind != "broadcast" or world.rank != 3 or group.size != 2:
            return call
        return lambda: (time.sleep(0.03), call())

    asked = {"sizes": [1024, 65536], "groups": [], "repeats": 3}
    with mock.patch.object(link_rates, "prepare_bare_collective", slow):
        return measure_all(world, asked)


def axes(world: World) -> dict[str, Any]:
    """Two axes of two ranks each."""
    return measure_links(world, {"across": 2, "inside": 2}, (1024, 65536))
