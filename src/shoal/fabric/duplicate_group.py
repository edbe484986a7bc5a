"""A twin: the same processes over a second process group, so that a second thread may talk too.

Two threads must not use one process group: collectives are matched by their order, and two threads
have none. So what runs beside training (saving a checkpoint) speaks over a second group, always
gloo on the CPU, and the training thread's collectives never meet its messages.

Source: a shared group deadlocks asynchronous saves in several trainers (reliability row 24).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.fabric.collectives.json_messages import prove_peers
from shoal.fabric.collectives.traffic_counts import Traffic
from shoal.fabric.rendezvous.process_info import Place
from shoal.fabric.world import World

TWIN_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for the others' word: they may be writing to a slow disk meanwhile."""


def twin(world: World, timeout: timedelta = TWIN_TIMEOUT) -> World:
    """Make a World over a second process group, gloo on the CPU, for a thread beside training.

    A collective: every rank calls it, in its training thread.

    Args:
        world: of all processes.
        timeout: how long one of its collectives waits for the others.

    Returns:
        a World on the CPU with the same ranks; of one process, without any group.

    Raises:
        what torch raises when the ranks do not all come.

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
        prove_peers(group, world.ranks, world.key)
    place = Place(
        world.rank, world.size, world.local_rank, world.local_size, f"{world.started_by}, twin"
    )
    found = World(place, torch.device("cpu"), group)
    found.backend, found.key, found.keepers = "gloo", world.key, world.keepers
    found.traffic = Traffic(watched=False)  # the page is the training thread's
    return found


def leave(world: World) -> None:
    """Destroy a twin's process group, once no thread uses it; its World has none afterwards.

    A collective: it waits for all ranks (barrier). Without a group nothing happens. A group that is
    only dropped keeps gloo's threads alive, which abort the interpreter's exit.
    """
    group, world.group = world.group, None
    if group is not None:
        dist.barrier(group=group)
        dist.destroy_process_group(group)
