"""Collectives as a loop written by hand would time them: nothing counted, buffers made beforehand.

What a run sends goes through `World`, which counts it and gives results memory of their own. On
two cores that is 5 to 35 % of a call (docs/lab-log.md); whoever asks how fast links are wants to
know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shoal.fabric._torch import all_gather_single
from shoal.fabric.device import is_accelerator
from shoal.fabric.world import World

EVERY = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def bare_call(group: World, kind: str, size_bytes: int) -> Callable[[], object]:
    """Make the buffers of one collective; gives the function that runs it once, and waits.

    Every rank of the group must make and run it. Messages are float32, all 0.
    kind         one of EVERY; on gloo a reduce-scatter is an all-to-all and a sum, as in runs
    size_bytes   what is summed, gathered, broadcast, or what a rank holds for all others; at least
                 one element for each rank
    """
    each = max(1, size_bytes // 4 // group.size)
    whole = torch.zeros(group.size * each, device=group.device)
    if group.group is None:
        return lambda: None
    pieces, part = torch.zeros_like(whole), whole.new_zeros(each)

    def exchange() -> None:
        dist.all_to_all_single(pieces, whole, group=group.group)

    def exchange_and_add() -> None:
        exchange()
        torch.sum(pieces.view(group.size, each), 0, out=part)

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(part, whole, group=group.group)

    root = group.ranks[0]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group.group),
        "reduce_scatter": reduce_scatter if is_accelerator(whole.device) else exchange_and_add,
        "all_gather": lambda: all_gather_single(whole, part, group=group.group),
        "broadcast": lambda: dist.broadcast(whole, root, group=group.group),
        "all_to_all": exchange,
    }
    return calls[kind]
