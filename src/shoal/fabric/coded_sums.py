"""Sums over ranks whose addends travel as short codes, each rank keeping what its codes leave out.

A sender serves one tensor that is summed again and again, and knows three moments: `begin` of a
step, `send`, which gives a flight that a later `result` brings home, and `commit`, when the step
counted. Why errors are kept, and what that promises, stands in `parallel/compress.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shoal.fabric.codecs import (
    PendingRows,
    exchange,
    int8_bytes,
    largest,
    pack_int8,
    pack_places,
    sum_int8,
    unpack_int8,
    unpack_places,
)
from shoal.fabric.world import World


class Flight(Protocol):
    """One tensor on its way."""

    def turn(self) -> None:
        """The first half is there: send the second, if the code has one."""

    def result(self, out: torch.Tensor) -> None:
        """Wait, then write the sum, or this rank's part of it, over `out`."""


class Sender(Protocol):
    """Codes one tensor, and keeps what that leaves out."""

    def send(self, flat: torch.Tensor) -> Flight:
        """Begin to sum [elements] over all ranks; `flat` may change as soon as this returns."""

    def begin(self) -> None:
        """A step begins: what an uncommitted one left behind is forgotten."""

    def commit(self) -> None:
        """The step counted: what was kept is valid."""


class Residual:
    """What codes left out of a tensor so far, on this rank.

    A step that is skipped must leave it as it was, so there are two: `standing` is valid, `coming`
    becomes so by `commit`. A step that sends several times goes on from `coming`.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.standing = torch.zeros(elements, dtype=dtype, device=device)
        self.coming = torch.zeros_like(self.standing)
        self.written = False

    def add(self, numbers: torch.Tensor) -> torch.Tensor:
        """numbers [at most elements] + what is left; the caller subtracts what it sends, in place.

        Gives   [elements], `coming` itself
        """
        before = self.coming if self.written else self.standing
        count = numbers.numel()
        torch.add(before[:count], numbers, out=self.coming[:count])
        self.written = True
        return self.coming

    def begin(self) -> None:
        """See `Sender.begin`."""
        self.written = False

    def commit(self) -> None:
        """See `Sender.commit`."""
        if self.written:
            self.standing, self.coming = self.coming, self.standing
            self.written = False


class Int8Sum:
    """A whole sum on every rank: codes of each part to its owner, codes of its sum to all.

    Parts are equal, so the buffer is padded to a multiple of the ranks. The owner keeps the error
    of the second code.
    """

    def __init__(self, elements: int, dtype: torch.dtype, world: World) -> None:
        self.world, self.dtype = world, dtype
        self.part = -(-elements // world.size)
        self.left = Residual(self.part * world.size, dtype, world.device)
        self.left_of_sum = Residual(self.part, dtype, world.device)

    def send(self, flat: torch.Tensor) -> Flight:
        """Send every owner the codes of its part."""
        packed = pack_int8(self.left.add(flat).view(self.world.size, self.part))
        sizes = [packed.shape[1]] * self.world.size
        return _Int8Flight(self, exchange(self.world, packed.view(-1), sizes))

    def begin(self) -> None:
        """See `Sender.begin`."""
        self.left.begin()
        self.left_of_sum.begin()

    def commit(self) -> None:
        """See `Sender.commit`."""
        self.left.commit()
        self.left_of_sum.commit()


class _Int8Flight:
    def __init__(self, sender: Int8Sum, rows: PendingRows) -> None:
        self.sender, self.rows = sender, rows
        size_bytes = int8_bytes(sender.part, sender.dtype.itemsize)
        ranks = sender.world.size
        self.cuts = [size_bytes * rank for rank in range(ranks + 1)]
        self.gathered = torch.empty(0, dtype=torch.uint8)

    def turn(self) -> None:
        """Add up what came, in the order of the ranks, and send a code of it to all."""
        sender, world = self.sender, self.sender.world
        received = self.rows.result()
        total = torch.empty(sender.part, dtype=sender.dtype, device=received.device)
        sum_int8(received, sender.dtype, total)
        own = pack_int8(sender.left_of_sum.add(total).unsqueeze(0))[0]
        self.gathered = own.new_empty(self.cuts[-1])
        self.gathered[self.cuts[world.rank] : self.cuts[world.rank + 1]] = own
        self.work = world.gather_parts(self.gathered, self.cuts)

    def result(self, out: torch.Tensor) -> None:
        """Decode all parts; the own one too, so that all ranks have the same bits."""
        if self.work is not None:
            self.work.wait()
        sender = self.sender
        parts = out.split(sender.part)  # the padding may be all of the last ones
        for part, packed in zip(parts, self.gathered.view(sender.world.size, -1), strict=False):
            unpack_int8(packed, sender.part, sender.dtype, part)


class ScatteredInt8Sum:
    """Each rank gets the sum of its own part: codes of each part to its owner, and no more."""

    def __init__(self, cuts: Sequence[int], dtype: torch.dtype, world: World) -> None:
        self.world, self.dtype, self.cuts = world, dtype, cuts
        self.left = Residual(cuts[-1], dtype, world.device)

    def send(self, flat: torch.Tensor) -> Flight:
        """Send every owner the codes of its part."""
        packed = []
        numbers = self.left.add(flat[: self.cuts[-1]])
        for start, stop in zip(self.cuts, self.cuts[1:], strict=False):
            packed.append(pack_int8(numbers[start:stop].unsqueeze(0))[0])
        sizes = [one.numel() for one in packed]
        return _ScatteredFlight(self, exchange(self.world, torch.cat(packed), sizes))

    def begin(self) -> None:
        """See `Sender.begin`."""
        self.left.begin()

    def commit(self) -> None:
        """See `Sender.commit`."""
        self.left.commit()


class _ScatteredFlight:
    def __init__(self, sender: ScatteredInt8Sum, rows: PendingRows) -> None:
        self.sender, self.rows = sender, rows

    def turn(self) -> None:
        """One half is all."""

    def result(self, out: torch.Tensor) -> None:
        """Add up what came, in the order of the ranks."""
        wide = self.sender.dtype
        total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        sum_int8(self.rows.result(), wide, total)
        if total is not out:
            out.copy_(total)


class LargestSum:
    """A whole sum on every rank, of each rank's largest numbers only.

    share   of the elements that a rank sends, at least one of them
    """

    def __init__(self, elements: int, dtype: torch.dtype, world: World, share: float) -> None:
        self.world, self.dtype = world, dtype
        self.count = max(1, math.ceil(share * elements))
        self.left = Residual(elements, dtype, world.device)

    def send(self, flat: torch.Tensor) -> Flight:
        """Send the largest with their places to all."""
        numbers, world = self.left.add(flat), self.world
        chosen = largest(numbers, self.count)
        own = pack_places(numbers, chosen)
        numbers[chosen] = 0
        cuts = [own.numel() * rank for rank in range(world.size + 1)]
        gathered = own.new_empty(cuts[-1])
        gathered[cuts[world.rank] : cuts[world.rank + 1]] = own
        return _LargestFlight(self, gathered, world.gather_parts(gathered, cuts))

    def begin(self) -> None:
        """See `Sender.begin`."""
        self.left.begin()

    def commit(self) -> None:
        """See `Sender.commit`."""
        self.left.commit()


class _LargestFlight:
    def __init__(self, sender: LargestSum, gathered: torch.Tensor, work: dist.Work | None) -> None:
        self.sender, self.gathered, self.work = sender, gathered, work

    def turn(self) -> None:
        """One half is all."""

    def result(self, out: torch.Tensor) -> None:
        """Add up what came, in the order of the ranks; a rank's places are all different."""
        if self.work is not None:
            self.work.wait()
        wide = self.sender.dtype
        total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        total.zero_()
        for packed in self.gathered.view(self.sender.world.size, -1):
            values, at = unpack_places(packed, wide)
            total.index_add_(0, at, values)
        if total is not out:
            out.copy_(total)
