"""A duplicate process group: the same ranks over a second gloo group, for a second thread.

Two threads must not use one process group: ranks match collectives by their order, and two threads
have no common order. So background work (saving a checkpoint) uses a second group, always gloo on
the CPU. Its messages never mix with the training thread's collectives.

Source: a shared group deadlocks asynchronous saves in several trainers (reliability row 24).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.fabric.collectives.json_messages import authenticate_peers
from shoal.fabric.collectives.traffic_counts import TrafficCounter
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.fabric.world import World

TWIN_TIMEOUT = timedelta(hours=1)
"""Time that a rank waits for the other ranks, which may be writing to a slow disk."""


def duplicate_world(world: World, timeout: timedelta = TWIN_TIMEOUT) -> World:
    """Create a World over a second process group, gloo on the CPU, for a background thread.

    A collective: every rank must call it, in its training thread.

    Args:
        world: of all processes.
        timeout: time limit of each of its collectives.

    Returns:
        a World on the CPU with the same ranks; without a group if there is one process.

    Raises:
        RuntimeError: of torch, if not all ranks call it in time.

    Note:
        messages and small tensors: gloo over TCP, 0.2 ms per message on one machine.
    """
    group = None
    if world.group is not None:
        part = len(world.ranks) < dist.get_world_size()  # made without the others
        ranks = list(world.ranks) if part else None
        group = dist.new_group(
            ranks, backend="gloo", timeout=timeout, use_local_synchronization=part
        )
        authenticate_peers(group, world.ranks, world.key)
    place = ProcessInfo(
        world.rank, world.size, world.local_rank, world.local_size, f"{world.started_by}, twin"
    )
    found = World(place, torch.device("cpu"), group)
    found.backend, found.key, found.keepers = "gloo", world.key, world.keepers
    found.traffic = TrafficCounter(watched=False)  # the page is the training thread's
    return found


def destroy_duplicate(world: World) -> None:
    """Destroy a duplicate group, once no thread uses it; its World has none afterwards.

    A collective: it waits for all ranks (barrier). Without a group it does nothing. A group that is
    only dereferenced keeps gloo's threads alive, which abort the interpreter at exit.
    """
    group, world.group = world.group, None
    if group is not None:
        dist.barrier(group=group)
        dist.destroy_process_group(group)
