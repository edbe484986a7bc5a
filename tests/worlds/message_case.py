"""What ranks say to each other, said in every way that a world has."""

from __future__ import annotations

from typing import Any

from shoal.fabric import World

LONG = 100


def talk(world: World) -> dict[str, Any]:
    """Every rank's view of messages that are equal, short, long, in part equal, and one rank's."""
    rank = world.rank
    before = dict(world.traffic.sent_bytes)
    equal = world.gather_json({"a": [1, 2]})
    equal_bytes = world.traffic.sent_bytes.total() - sum(before.values())
    return {
        "equal": equal,
        "equal_bytes": equal_bytes,
        "short": world.gather_json(rank),
        "long": world.gather_json(f"{rank}" * (LONG + rank)),
        "pairs": world.gather_json(f"{rank // 2}" * LONG),
        "one": world.broadcast_json(["é"] * LONG if rank == 1 else None, 1),
        "agreed": world.find_differing_rank({"same": True}),
        "unlike": world.find_differing_rank("same" if rank < 2 else f"other {rank}"),
        "places": [
            world.find_differing_indices([1, -5, 2**62]),
            world.find_differing_indices([1, -5 - (rank == 1), rank - 2**63]),
        ],
    }
