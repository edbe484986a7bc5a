"""Tensors in few bytes: numbers as int8 with a scale per block, or only the largest with places.

    int8   a block of 1024 numbers has one scale, its largest magnitude / 127, in the numbers' own
           format; each number is the nearest multiple of it, −127 … 127: 1.004 bytes instead of 4.
           The error of a number is at most half a scale
    top-k  k values in their own format and k places as int32: 8 bytes for each that is sent

Scales and codes of a row lie in one row of bytes, so that one collective moves both. What is not
finite stays so: a block with a NaN or an infinity in it decodes to NaN where its codes are.

Source: Dettmers 2016 (8-bit approximations), block-wise as in Dettmers et al. 2022; Aji and
Heafield 2017 (top-k). Nothing here rounds at random: what is lost comes back by error feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.fabric.traffic import REDUCE_SCATTER
from shoal.fabric.world import World

BLOCK = 1024
CHUNK = 128 * BLOCK
LARGEST_CODE = 127
ALIGNED = 8
"""Rows of bytes begin at multiples of this, so that scales may be read where they lie."""


def int8_bytes(elements: int, element_bytes: int = 4) -> int:
    """Bytes that so many numbers take as int8 with their scales.

    >>> int8_bytes(1024), int8_bytes(2048), int8_bytes(0)
    (1032, 2056, 0)
    """
    blocks = -(-elements // BLOCK)
    return -(-(blocks * element_bytes + elements) // ALIGNED) * ALIGNED


def pack_int8(rows: torch.Tensor) -> torch.Tensor:
    """Rows of numbers as rows of bytes, scales then codes; what they leave out stays in `rows`.

    rows    [rows, elements], float32 or float64, each row without gaps; changed in place
    Gives   [rows, int8_bytes(elements)], uint8
    """
    count, elements = rows.shape
    packed = torch.zeros(
        count, int8_bytes(elements, rows.element_size()), dtype=torch.uint8, device=rows.device
    )
    for row, row_bytes in zip(rows, packed, strict=True):
        scales, codes = _fields(row_bytes, elements, rows.dtype)
        for start, stop, width in _chunks(elements, rows.device):
            numbers = row[start:stop].view(-1, width)
            scale = numbers.abs().amax(1, keepdim=True).div_(LARGEST_CODE)
            # 0/0, and anything over a scale that vanished, is code 0; scales below the normal
            # range are so coarse that the largest number is more than 127 of them.
            code = (numbers / scale).round_().nan_to_num_(0, 0, 0)
            code.clamp_(-LARGEST_CODE, LARGEST_CODE)
            codes[start:stop].view(-1, width).copy_(code)
            scales[start // BLOCK : start // BLOCK + len(scale)] = scale.squeeze(1)
            numbers.sub_(code.mul_(scale))
    return packed


def unpack_int8(
    packed: torch.Tensor, elements: int, dtype: torch.dtype, out: torch.Tensor, *, add: bool = False
) -> None:
    """Write a row that `pack_int8` packed over `out`: the same bits from the same bytes everywhere.

    packed  [int8_bytes(elements)] · dtype  of the numbers that were packed
    out     [at most elements]: the first ones · add  to what `out` holds, instead of over it
    """
    scales, codes = _fields(packed, elements, dtype)
    for start, stop, width in _chunks(out.numel(), out.device):
        scale = scales[start // BLOCK : -(-stop // BLOCK)].unsqueeze(1)
        decoded = codes[start:stop].view(-1, width).to(dtype).mul_(scale)
        numbers = out[start:stop].view(-1, width)
        if add:
            numbers.add_(decoded)
        else:
            numbers.copy_(decoded)


def sum_int8(rows: torch.Tensor, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Write the sum of what all rows [rows, bytes] hold over `out` [elements], in their order."""
    for place, packed in enumerate(rows):
        unpack_int8(packed, out.numel(), dtype, out, add=place > 0)


def _fields(
    packed: torch.Tensor, elements: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, codes) of one row of bytes, views."""
    if not elements:  # a rank may own nothing of a bucket; such a row has no place in memory
        return packed.new_empty(0, dtype=dtype), packed.new_empty(0, dtype=torch.int8)
    at = -(-elements // BLOCK) * dtype.itemsize
    return packed[:at].view(dtype), packed[at : at + elements].view(torch.int8)


def _chunks(elements: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """(start, stop, length of a block) of runs of whole blocks, then of the block that is not.

    On a CPU runs are short: what is computed on the way then stays in its cache (measured: a third
    of the time, most of which went into memory that was new to the process).
    """
    whole = elements // BLOCK * BLOCK
    step = CHUNK if device.type == "cpu" else max(whole, 1)
    for start in range(0, whole, step):
        yield start, min(start + step, whole), BLOCK
    if whole < elements:
        yield whole, elements, elements - whole


def largest(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` largest magnitudes of [elements], int64; NaN is larger than any."""
    return numbers.abs().topk(count, sorted=False).indices


def pack_places(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The numbers at some places, and the places: [count · (itemsize + 4)] uint8."""
    values = numbers[places].view(torch.uint8)
    return torch.cat([values, places.to(torch.int32).view(torch.uint8)])


def unpack_places(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [count] in `dtype`, places [count] int64) of what `pack_places` packed."""
    count = packed.numel() // (dtype.itemsize + 4)
    values, places = packed.clone().split([count * dtype.itemsize, count * 4])
    return values.view(dtype), places.clone().view(torch.int32).long()


@dataclass
class PendingRows:
    """An exchange under way; `source` is held until it is done."""

    work: dist.Work | None
    received: torch.Tensor
    source: torch.Tensor | None

    def result(self) -> torch.Tensor:
        """Wait, then give what every rank had for this one: [ranks, own bytes], in their order."""
        if self.work is not None:
            self.work.wait()
        # A work that is kept would keep its process group alive beyond `destroy`.
        self.work = self.source = None
        return self.received


def exchange(world: World, packed: torch.Tensor, sizes: Sequence[int]) -> PendingRows:
    """Begin to give every rank its part of everybody's bytes: the sending half of a sum.

    packed   [bytes], the parts for rank 0, 1, … one after another, each `sizes[rank]` long
    Counted as a reduce-scatter, which it is for those who then add up what they decode.
    """
    if world.group is None:
        return PendingRows(None, packed.unsqueeze(0), packed)
    world.traffic.count(REDUCE_SCATTER, packed.numel(), world.size)
    own = sizes[world.rank]
    received = packed.new_empty(world.size * own)
    work = dist.all_to_all_single(
        received, packed, [own] * world.size, list(sizes), world.group, async_op=True
    )
    return PendingRows(work, received.view(world.size, own), packed)
