"""Single collectives for timing: through `World` as in a run, or bare as in a hand-written loop.

A run's collectives go through `World`, which counts them and allocates memory for results. On two
cores that costs 5 to 35 % of a call (docs/lab-log.md). A plan includes this cost; a measurement of
link speed does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shoal.fabric._torch import all_gather_single
from shoal.fabric.device import is_accelerator
from shoal.fabric.world import World

OF_PLANS = ("all_reduce", "reduce_scatter", "all_gather")
EVERY = (*OF_PLANS, "broadcast", "all_to_all")


def prepare_bare_collective(group: World, kind: str, size_bytes: int) -> Callable[[], object]:
    """Allocate the buffers of one bare collective; return the function that runs it once and waits.

    Every rank of the group must create and run it. Messages are float32 zeros.

    Args:
        kind: one of EVERY; on gloo a reduce-scatter is an all-to-all and a sum, as in runs.
        size_bytes: bytes of the summed, gathered or broadcast tensor, or of a rank's rows for all
            others; at least one element for each rank.
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


def prepare_run_collective(group: World, kind: str, size_bytes: int) -> Callable[[], object]:
    """Allocate the tensor of one of OF_PLANS; return the function that runs it once as a run does.

    Every rank of the group must create and run it. Messages are those of `prepare_bare_collective`.
    """
    each = max(1, size_bytes // 4 // group.size)
    tensor = torch.zeros(group.size * each, device=group.device)
    cuts = [each * rank for rank in range(group.size + 1)]

    def gather() -> None:
        work = group.all_gather_parts(tensor, cuts)
        if work is not None:
            work.wait()

    if kind == "all_reduce":
        return lambda: group.all_reduce(tensor)
    if kind == "reduce_scatter":
        return lambda: group.reduce_scatter(tensor, cuts).result()
    return gather
