"""Process groups, collectives and transfers of tensor bytes: no other package makes them."""

from shoal.fabric.collectives.traffic_counts import Traffic
from shoal.fabric.world import World, start_world

__all__ = ["Traffic", "World", "start_world"]
