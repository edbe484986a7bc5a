"""All-to-all exchange of rows, with numbers of rows that depend on the data.

Protocol  rows are in order of their target: the first `sent[0]` are for rank 0, and so on. The
          received rows are in order of their source. `exchange_counts` exchanges the numbers of
          rows first, since both sides must know them.
Source    torch.distributed.all_to_all_single with split sizes; gloo and NCCL have it
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal.fabric.collectives.traffic_counts import ALL_TO_ALL
from shoal.fabric.world import World


def exchange_counts(world: World, counts: torch.Tensor, axis: str = "") -> torch.Tensor:
    """Exchange integers all-to-all: row r of `counts` goes to rank r; return the received rows.

    Every rank must call it.

    Args:
        counts: [size, …] integers, one row for each rank.
        axis: axis under which its bytes are counted; default: the world's.

    Returns:
        [size, …], row r from rank r; with one process a copy of `counts`.
    """
    if world.group is None:
        return counts.clone()
    arriving, counts = torch.empty_like(counts), counts.contiguous()
    _count(world, counts, [1] * world.size, axis)
    with world.traffic.waiting():
        dist.all_to_all_single(arriving, counts, group=world.group)
    return arriving


def all_to_all_rows(
    world: World,
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    axis: str = "",
) -> torch.Tensor:
    """Exchange rows all-to-all: send `sent[r]` rows to each rank r; return [sum of received, …].

    Every rank must call it, and waits until its rows have come.

    Args:
        rows: [sum of sent, …]: those for rank 0 first, then rank 1, …
        received: rows from each rank, as `exchange_counts` returns them.
        axis: as in `exchange_counts`.

    Returns:
        the received rows, rank 0's first; with one process `rows` itself.
    """
    if world.group is None:
        return rows
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    rows = rows.contiguous()
    _count(world, rows, sent, axis)
    with world.traffic.waiting():
        dist.all_to_all_single(arriving, rows, list(received), list(sent), group=world.group)
    return arriving


def _count(world: World, rows: torch.Tensor, sent: Sequence[int], axis: str) -> None:
    row_bytes = rows.element_size() * rows[:1].numel()
    sent_bytes = (sum(sent) - sent[world.rank]) * row_bytes
    world.traffic.count(ALL_TO_ALL, sent_bytes, world.size, axis or world.axis)
