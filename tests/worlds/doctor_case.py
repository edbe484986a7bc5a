"""What the test of `shoal doctor` runs on every member of a world: sums that one rank gets wrong."""

from __future__ import annotations

from typing import Any

import torch

from shoal.fabric import World
from shoal.machine.link_check import check_collectives, check_links, check_sums


class OffByOne:
    """A world of which one rank gets one collective wrong, from numbers of one dtype."""

    def __init__(self, world: World, rank: int, kind: str, dtype: torch.dtype) -> None:
        self.world, self.kind, self.dtype = world, kind, dtype
        self.wrong = world.rank == rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def _bad(self, kind: str, tensor: torch.Tensor) -> bool:
        return self.wrong and kind == self.kind and tensor.dtype == self.dtype and len(tensor) > 100

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.world.all_reduce(tensor)
        if self._bad("all-reduce", tensor):
            tensor[7] += 1

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.world.all_gather(tensor)
        if self._bad("all-gather", tensor):
            found[0, 7] += 1
        return found

    def reduce_scatter(self, tensor: torch.Tensor, cuts: list[int]) -> Any:
        pending = self.world.reduce_scatter(tensor, cuts)
        if self._bad("reduce-scatter", tensor):
            pending.work.wait()
            pending.work = None
            pending.received[0, 7] += 1
        return pending


def wrong_sum(world: World, rank: int, kind: str, dtype: str) -> list[Any]:
    """[ok, line] of the check of sums."""
    bad: Any = OffByOne(world, rank, kind, getattr(torch, dtype))
    told = check_sums(check_collectives(bad), world.size)
    return [told.ok, told.line()]


def links(world: World) -> list[list[Any]]:
    """[check, ok, line] of each check of a sound world."""
    return [[one.check, one.ok, one.line()] for one in check_links(world, ["here"] * world.size)]
