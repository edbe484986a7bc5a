"""Bytes from one rank to one other, which no message carries: a file of another machine's disk.

A rank sends and hears at the same time, so ranks that pass bytes on in a ring do not wait for each
other in turn. Who is at the other end has proven itself when the group was made (`messages.py`).
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric.world import World

PAIR_S = 120.0
"""How long one piece is waited for: its sender, or its receiver, may wait for a disk."""
TAG = 7402


def swap(
    world: World,
    out: tuple[int, torch.Tensor] | None,
    into: tuple[int, torch.Tensor] | None,
    within_s: float = PAIR_S,
) -> None:
    """Send bytes to a rank and take bytes of a rank, both at once.

    out, into   (rank, [bytes] uint8 in host memory); None: nothing that way
    Errors      ClusterError naming the rank that did not take, or send, within the time
    """
    works = []
    if out is not None:
        to, sent = out
        works.append((to, dist.isend(sent, group=world.group, group_dst=to, tag=TAG)))
    if into is not None:
        source, room = into
        works.append((source, dist.irecv(room, group=world.group, group_src=source, tag=TAG)))
    for peer, work in works:
        try:
            if work is not None:
                work.wait(timedelta(seconds=within_s))
        except RuntimeError as failure:
            raise ClusterError(
                f"rank {world.rank}: no bytes pass between it and rank {peer} within "
                f"{within_s:g} s: {failure}"
            ) from failure
