"""Process groups, collectives and transfers of tensor bytes: no other package makes them."""

from shoal.fabric.collectives.traffic_counts import TrafficCounter
from shoal.fabric.world import World, start_world

__all__ = ["TrafficCounter", "World", "start_world"]
