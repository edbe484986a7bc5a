"""The only room that makes process groups, calls collectives and moves tensor bytes."""

from shoal.fabric.collectives.traffic_counts import Traffic
from shoal.fabric.world import World, start_world

__all__ = ["Traffic", "World", "start_world"]
