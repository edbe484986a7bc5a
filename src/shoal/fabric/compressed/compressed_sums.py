"""Compressed sums over ranks: addends travel as codes, with error feedback on each rank.

A Sender serves one tensor that is summed repeatedly. A step calls `begin`, then `send`, which
returns a Flight whose `result` is the sum, then `commit` if the step counted. Checkpoints save the
residuals (`kept`) and load them (`take`). `data_parallel/compress.py` explains error feedback and
its guarantees.

Source: pairwise all-to-all, Thakur et al. 2005
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.errors import BugError
from shoal.fabric.collectives.sharded_collectives import ScatterGradients, free_storage
from shoal.fabric.collectives.traffic_counts import REDUCE_SCATTER
from shoal.fabric.collectives.uneven_collectives import PendingGather
from shoal.fabric.compressed.codecs.base import Codec, SegmentedCodec
from shoal.fabric.compressed.codecs.feedback import Residual, encode_with_error
from shoal.fabric.compressed.codecs.int8 import Int8Codec
from shoal.fabric.compressed.codecs.sign import SignCodec
from shoal.fabric.device import is_accelerator
from shoal.fabric.world import World

BLOCK = 1024
"""Gradients that share a scale. A bucket holds many layers whose gradients differ by magnitudes,
so blocks are short; scales are 0.4 % of the bytes.
"""
BIT_BLOCK = 64
"""Block of one-bit codes, whose numbers take their block's magnitude: within a row of a layer,
where magnitudes are similar. Scales are a third of the bytes; in blocks of 1024 a small Llama was
three times as far behind.
"""

CODES: dict[str, Callable[[torch.dtype], Codec]] = {
    "int8": lambda dtype: Int8Codec(dtype, BLOCK),
    "one-bit": lambda dtype: SignCodec(dtype, BIT_BLOCK),
}
"""Element-wise gradient codecs, by the name that users write."""


@dataclass
class PendingExchange:
    """Handle of a pending exchange; it keeps `source` alive until the exchange is done."""

    work: dist.Work | None
    received: Tensor
    source: Tensor | None

    def result(self) -> Tensor:
        """Wait for the bytes of every rank for this one and return them: [ranks, own bytes]."""
        if self.work is not None:
            self.work.wait()
        # A reference to the work would keep its process group alive beyond `destroy`.
        self.work = self.source = None
        return self.received


def start_encoded_all_to_all(world: World, packed: Tensor, sizes: Sequence[int]) -> PendingExchange:
    """Start an all-to-all of encoded bytes, the sending half of a sum.

    Args:
        packed: [bytes], the parts for rank 0, 1, … in order, each `sizes[rank]` long.

    Counted as a reduce-scatter, since the receivers sum the decoded parts.
    """
    if world.group is None:
        return PendingExchange(None, packed.unsqueeze(0), packed)
    world.traffic.count(REDUCE_SCATTER, packed.numel(), world.size, world.axis)
    own = sizes[world.rank]
    received = packed.new_empty(world.size * own)
    work = dist.all_to_all_single(
        received, packed, [own] * world.size, list(sizes), world.group, async_op=True
    )
    return PendingExchange(work, received.view(world.size, own), packed)


class PendingSum(Protocol):
    """Handle of a pending sum; every rank calls `turn` once, then `result(out)`.

    Attributes:
        turn: wait for the first half and send the second, if the code has one.
        result: wait, and overwrite `out` with the sum, or with this rank's part of it.
    """

    def turn(self) -> None:
        """Wait for the first half and send the second, if the codec has one."""

    def result(self, out: torch.Tensor) -> None:
        """Wait for the sum and write it, or this rank's part of it, to `out`."""


class CompressedSum(Protocol):
    """Interface of a compressed sum: it sums one flat tensor per step, with error feedback.

    send(flat)             start to sum [elements] over all ranks, which all must call it; returns a
                           PendingSum. `flat` may change as soon as it returns
    begin()                start a step, and discard the residual of an uncommitted one
    commit()               commit the step: its encoding error is added to the next message (error
                           feedback)
    state_dict()           state for a checkpoint, by name, as of the last commit; not copies
    load_state_dict(kept)  load that state
    nothing()              the state at the start of a run
    """

    def send(self, flat: torch.Tensor) -> PendingSum:
        """Start to sum [elements] over all ranks; `flat` may change as soon as this returns."""

    def begin(self) -> None:
        """Start a step and discard the residual of an uncommitted one."""

    def commit(self) -> None:
        """Commit the step: its residual becomes current."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs for error feedback, by name; not copies."""

    def load_state_dict(self, kept: Mapping[str, Tensor]) -> None:
        """Load the state that `state_dict` returned."""

    def nothing(self) -> dict[str, Tensor]:
        """Return `state_dict` as it is at the start of a run: zero residuals."""


class ResidualCompressedSum:
    """Base class of compressed sums whose only state is the residuals in `rests`, by name.

    Attributes:
        starts: offsets in each rank's part at which blocks restart (`SegmentedCodec`); (): none.
    """

    rests: Mapping[str, Residual]
    codec: Codec
    starts: Sequence[Sequence[int]] = ()

    def by(self, code: str) -> None:
        """Switch the codec to another of CODES; the residuals stay."""
        self.codec = CODES[code](self.codec.dtype)

    def codec_of(self, rank: int) -> Codec:
        """Return the codec of a rank's part."""
        starts = self.starts[rank] if self.starts else ()
        return SegmentedCodec(self.codec, starts) if starts else self.codec

    def sizes(self, lengths: Sequence[int]) -> list[int]:
        """Return the encoded bytes of one part per rank; parts of equal length get equal sizes.

        Collectives of equal parts are cheaper, so shorter codes are padded with zeros.
        """
        found = [self.codec_of(rank).size_bytes(one) for rank, one in enumerate(lengths)]
        return found if len(set(lengths)) > 1 else [max(found)] * len(found)

    def begin(self) -> None:
        """Start a step and discard the residuals of an uncommitted one."""
        for rest in self.rests.values():
            rest.begin()

    def commit(self) -> None:
        """Commit the step: its residuals are added to the next message."""
        for rest in self.rests.values():
            rest.commit()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residuals by name, for a checkpoint; not copies."""
        return {name: rest.standing for name, rest in self.rests.items()}

    def load_state_dict(self, kept: Mapping[str, Tensor]) -> None:
        """Load the residuals that `state_dict` returned, as those of the next step."""
        for name, rest in self.rests.items():
            rest.standing.copy_(kept[name])
            rest.begin()

    def nothing(self) -> dict[str, Tensor]:
        """Return the state at the start of a run: `state_dict` with zero residuals."""
        zeros = {name: torch.zeros_like(rest.standing) for name, rest in self.rests.items()}
        return {**self.state_dict(), **zeros}


class CompressedAllReduce(ResidualCompressedSum):
    """Compressed all-reduce (sum): `CompressedAllReduce(elements, codec, world, starts)`.

    Each part goes encoded to the rank that owns it. The owner sums the parts and sends the encoded
    sum to all ranks, so every rank ends with the same bits. Parts are equal, so the buffer is
    padded to a multiple of the ranks. Each rank keeps its encoding error; the owner also keeps that
    of the encoded sum.
    """

    def __init__(
        self, elements: int, codec: Codec, world: World, starts: Sequence[Sequence[int]] = ()
    ) -> None:
        self.world, self.codec, self.starts = world, codec, starts
        self.part = -(-elements // world.size)
        self.left = Residual(self.part * world.size, codec.dtype, world.device)
        self.left_of_sum = Residual(self.part, codec.dtype, world.device)
        self.rests = {"left": self.left, "left_of_sum": self.left_of_sum}

    def send(self, flat: torch.Tensor) -> PendingSum:
        """Encode `flat` plus the residual, and start to send each rank the part that it sums."""
        parts = self.left.add(flat).view(self.world.size, self.part)
        return _PendingCompressedAllReduce(
            self, _start_parts_exchange(self, parts.unbind(), self.world)
        )


class _PendingCompressedAllReduce:
    def __init__(self, sender: CompressedAllReduce, rows: PendingExchange) -> None:
        self.sender, self.rows = sender, rows
        ranks = range(sender.world.size)
        self.codecs = [sender.codec_of(rank) for rank in ranks]
        self.cuts = [0, *accumulate(sender.sizes([sender.part for _ in ranks]))]
        self.gathered = torch.empty(0, dtype=torch.uint8)

    def turn(self) -> None:
        """Sum the received parts in the order of the ranks, and send the encoded sum."""
        sender, world = self.sender, self.sender.world
        received = self.rows.result()
        total = torch.empty(sender.part, dtype=sender.codec.dtype, device=received.device)
        own_codec = self.codecs[world.rank]
        _sum_decoded_rows(own_codec, received, total)
        self.gathered = received.new_empty(self.cuts[-1])
        own = self.gathered[self.cuts[world.rank] : self.cuts[world.rank + 1]]
        encode_with_error(own_codec, sender.left_of_sum.add(total), own)
        self.work = world.all_gather_parts(self.gathered, self.cuts)

    def result(self, out: torch.Tensor) -> None:
        """Decode all parts, this rank's too, so that all ranks have the same bits."""
        if self.work is not None:
            self.work.wait()
        sender = self.sender
        elements, dtype = sender.part * sender.world.size, sender.codec.dtype
        fits = out.numel() == elements and out.dtype == dtype
        total = out if fits else torch.empty(elements, dtype=dtype, device=out.device)
        for rank, (start, stop) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            part = total[sender.part * rank : sender.part * (rank + 1)]
            self.codecs[rank].decode(self.gathered[start:stop], part)
        if total is not out:
            out.copy_(total[: out.numel()])


class CompressedReduceScatter(ResidualCompressedSum):
    """Sender of a compressed reduce-scatter: `CompressedReduceScatter(cuts, codec, world, starts)`.

    Rank r gets only the sum of elements cuts[r] to cuts[r + 1], summed in the codec's dtype. Each
    rank keeps its encoding error.
    """

    def __init__(
        self,
        cuts: Sequence[int],
        codec: Codec,
        world: World,
        starts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.world, self.codec, self.cuts, self.starts = world, codec, cuts, starts
        self.left = Residual(cuts[-1], codec.dtype, world.device)
        self.rests = {"left": self.left}

    def send(self, flat: torch.Tensor) -> PendingSum:
        """Encode `flat` plus the residual, and start to send each rank the part that it sums."""
        numbers = self.left.add(flat[: self.cuts[-1]])
        parts = [numbers[a:b] for a, b in zip(self.cuts, self.cuts[1:], strict=False)]
        return _PendingCompressedReduceScatter(self, _start_parts_exchange(self, parts, self.world))


class _PendingCompressedReduceScatter:
    def __init__(self, sender: CompressedReduceScatter, rows: PendingExchange) -> None:
        self.sender, self.rows = sender, rows

    def turn(self) -> None:
        """Do nothing: a reduce-scatter has no second half."""

    def result(self, out: torch.Tensor) -> None:
        """Sum the received parts, in the order of the ranks."""
        wide = self.sender.codec.dtype
        total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        own = self.sender.codec_of(self.sender.world.rank)
        _sum_decoded_rows(own, self.rows.result(), total)
        if total is not out:
            out.copy_(total)


class FsdpCompressedReduceScatter:
    """Compressed reduce-scatter for one unit of `fully_shard`; built from a `ScatterGradients`.

    Args:
        plain: provides traffic, norms and buffers.
        code: one of CODES.
        world: the ranks of the unit.
        sizes: elements of a rank's rows of each parameter, in order.

    It also keeps the residuals of a Sender; they exist after the first call.
    """

    def __init__(
        self, plain: ScatterGradients, code: str, world: World, sizes: Sequence[int] = ()
    ) -> None:
        self.plain, self.code, self.world, self.sizes = plain, code, world, sizes
        self.allocate = plain.allocate
        self.sum: CompressedReduceScatter | None = None
        self.held: Mapping[str, Tensor] = {}

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter over the ranks of the unit, compressed; waits for the result."""
        self.plain.norms.append(torch.linalg.vector_norm(input_tensor))
        if self.sum is None:
            part = output_tensor.numel()
            wide = torch.float64 if input_tensor.dtype == torch.float64 else torch.float32
            cuts = [part * rank for rank in range(self.world.size + 1)]
            starts = block_starts(self.sizes) if sum(self.sizes) == part else []
            codec = CODES[self.code](wide)
            self.sum = CompressedReduceScatter(cuts, codec, self.world, [starts] * self.world.size)
            if self.held:
                self.sum.load_state_dict(self.held)
            self.held = {}
        if input_tensor.numel() != self.sum.cuts[-1] or group.size() != self.world.size:
            raise BugError(
                f"a unit sends {input_tensor.numel()} gradients to {group.size()} ranks, and sent "
                f"{self.sum.cuts[-1]} to {self.world.size}: what codes left out fits no more"
            )
        with self.plain.traffic.waiting():
            flight = self.sum.send(input_tensor)
            flight.turn()
            flight.result(output_tensor)
        if not is_accelerator(input_tensor.device):
            free_storage(input_tensor)  # as `ScatterGradients` does

    def by(self, code: str) -> None:
        """Switch the codec to another of CODES; the residuals stay."""
        self.code = code
        if self.sum is not None:
            self.sum.by(code)

    def begin(self) -> None:
        """Start a step and discard the residuals of an uncommitted one."""
        if self.sum is not None:
            self.sum.begin()

    def commit(self) -> None:
        """Commit the step: its residuals are added to the next message."""
        if self.sum is not None:
            self.sum.commit()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residuals by name, for a checkpoint; not copies."""
        return dict(self.held) if self.sum is None else self.sum.state_dict()

    def load_state_dict(self, kept: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; before the first sum it waits in `held`."""
        if self.sum is None:
            self.held = kept
        else:
            self.sum.load_state_dict(kept)

    def nothing(self) -> dict[str, Tensor]:
        """Return the state at the start of a run: zero residuals; {} before the first sum."""
        return {} if self.sum is None else self.sum.nothing()


def block_starts(sizes: Sequence[int]) -> list[int]:
    """Return the offsets in concatenated tensors at which a tensor starts inside a block.

    >>> block_starts([32, 128, 64, 5, 64])
    [32, 229]
    """
    found, last = [], 0
    for place in list(accumulate(sizes))[:-1]:
        if (place - last) % BIT_BLOCK:
            found.append(place)
            last = place
    return found


def _start_parts_exchange(
    sender: ResidualCompressedSum, parts: Sequence[torch.Tensor], world: World
) -> PendingExchange:
    """Encode one part per rank and start to send it; in place, parts become encoding errors."""
    sizes = sender.sizes([part.numel() for part in parts])
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=world.device)
    for rank, (part, row) in enumerate(zip(parts, packed.split(sizes), strict=True)):
        encode_with_error(sender.codec_of(rank), part, row)
    return start_encoded_all_to_all(world, packed, sizes)


def _sum_decoded_rows(codec: Codec, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Sum the decoded rows [rows, bytes] in their order, and write the sum to `out` [elements]."""
    for place, packed in enumerate(rows):
        codec.decode(packed, out, add=place > 0)


class TopKAllReduce(ResidualCompressedSum):
    """Sender of a top-k all-reduce: the sum of each rank's largest magnitudes.

    Args:
        elements, dtype, world: size, dtype and ranks of the sum.
        share: share of the elements that a rank sends, at least one element; the residual stays
            for the next message.

    Returns:
        the same sum on every rank, 0 where no rank sent a value.
    """

    def __init__(self, elements: int, dtype: torch.dtype, world: World, share: float) -> None:
        self.world, self.dtype = world, dtype
        self.count = max(1, math.ceil(share * elements))
        self.left = Residual(elements, dtype, world.device)
        self.rests = {"left": self.left}

    def send(self, flat: torch.Tensor) -> PendingSum:
        """Send the largest numbers and their indices to all ranks."""
        numbers, world = self.left.add(flat), self.world
        chosen = top_k_indices(numbers, self.count)
        own = pack_indices(numbers, chosen)
        numbers[chosen] = 0
        cuts = [own.numel() * rank for rank in range(world.size + 1)]
        gathered = own.new_empty(cuts[-1])
        gathered[cuts[world.rank] : cuts[world.rank + 1]] = own
        return _PendingTopKAllReduce(self, gathered, world.all_gather_parts(gathered, cuts))


class _PendingTopKAllReduce:
    def __init__(
        self, sender: TopKAllReduce, gathered: torch.Tensor, work: PendingGather | None
    ) -> None:
        self.sender, self.gathered, self.work = sender, gathered, work

    def turn(self) -> None:
        """Do nothing: a top-k sum has no second half."""

    def result(self, out: torch.Tensor) -> None:
        """Sum the received numbers in the order of the ranks; indices of one rank are distinct."""
        if self.work is not None:
            self.work.wait()
        wide = self.sender.dtype
        total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        total.zero_()
        for packed in self.gathered.view(self.sender.world.size, -1):
            values, at = unpack_indices(packed, wide)
            total.index_add_(0, at, values)
        if total is not out:
            out.copy_(total)


def top_k_indices(numbers: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest magnitudes of [elements], int64; NaN is largest."""
    return numbers.abs().topk(count, sorted=False).indices


def pack_indices(numbers: Tensor, places: Tensor) -> Tensor:
    """Pack the numbers at some indices with the indices: [count · (itemsize + 4)] uint8 (top-k).

    Source: Aji and Heafield 2017.
    """
    values = numbers[places].view(torch.uint8)
    return torch.cat([values, places.to(torch.int32).view(torch.uint8)])


def unpack_indices(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (values [count] in `dtype`, indices [count] int64) that `pack_indices` packed."""
    count = packed.numel() // (dtype.itemsize + 4)
    values, places = packed.clone().split([count * dtype.itemsize, count * 4])
    return values.view(dtype), places.clone().view(torch.int32).long()
