"""A world of threads that can also pass tensors around a ring and deal rows out."""

from __future__ import annotations

import torch
from threads import Pending, ThreadAxis, on_ranks


class Turned:
    def __init__(self, came: list[torch.Tensor]) -> None:
        self.came = came

    def result(self) -> list[torch.Tensor]:
        return self.came


class RingAxis(ThreadAxis):
    """One rank's end."""

    def pass_on(self, tensors) -> Turned:
        rows = torch.cat([one.reshape(-1) for one in tensors])
        self._count("send", rows.numel(), rows)
        came = self._all(rows)[(self.rank - 1) % self.size]
        parts = came.split([one.numel() for one in tensors])
        return Turned([p.view(one.shape) for p, one in zip(parts, tensors, strict=True)])

    def all_to_all_rows(self, rows: torch.Tensor, sent, received) -> torch.Tensor:
        self._count("all_to_all", rows.numel(), rows)
        counts = self._all(torch.tensor(sent))
        every = self._all_uneven(rows, counts)
        came = []
        for source in range(self.size):
            start = int(counts[source][: self.rank].sum())
            came.append(every[source][start : start + int(counts[source][self.rank])])
        assert [len(one) for one in came] == list(received)
        return torch.cat(came)

    def _all_uneven(self, rows: torch.Tensor, counts) -> list[torch.Tensor]:
        return self._all(rows)


def in_a_ring(size: int, work) -> list:
    """`work(axis)` on every rank."""
    return on_ranks(size, lambda axis: work(RingAxis(axis.rank, axis.meeting)))


__all__ = ["Pending", "RingAxis", "in_a_ring"]
