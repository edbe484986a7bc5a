"""Codec interface, and the base class of codecs with one scale per block.

A codec turns a vector of n numbers into `size_bytes(n)` bytes and back, from that vector alone:

    decode(encode(x)) ≈ x        out = weight · decoded, or out += weight · decoded

Decoding gives the same bits from the same bytes on every machine: it consists of copies and of
single multiplications and additions per number, each rounded once; nothing is summed up and
nothing fused. Encoding of finite numbers does so too for none, bf16, int8 and e3m0, whose only
reductions are maxima; sign and top2bit take means and choose among equals, so their bytes are the
same only on machines of one type with as many threads.

A block with a NaN or an infinity decodes to NaN, so that non-finite values stay visible.

Blocks with a scale lie in memory as

    [scale of block 0, 1, …, in the numbers' format] [codes of block 0, 1, …] [zeros]

the whole a multiple of 8 bytes long, so that scales may be read where they lie, one piece after
another. A block is coded while it is in the processor's cache; `benchmarks/codecs.py` measures what
that is worth beside the same passes over all numbers.

Source: block-wise scales as in Dettmers 2016 and Dettmers et al. 2022
Limits: bytes are in little-endian order, as on x86 and ARM. An instance has no state: any thread
        may use it
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 65_536
"""Numbers that share a scale."""
RUN = 65_536
"""Numbers encoded at a time on a CPU: with intermediate results 0.5 MiB (fp32)."""
ALIGNED = 8
"""Encoded pieces have a size and an offset that are multiples of so many bytes."""


class Codec(Protocol):
    """Interface of a codec: encode and decode vectors of one dtype.

    Attributes:
        name: as users write it.
        dtype: dtype of input and decoded numbers: float32 or float64.
        gathers: a sum of such messages is not small, so each message travels whole to every rank.
    """

    name: str
    dtype: torch.dtype
    gathers: bool

    def size_bytes(self, elements: int) -> int:
        """Return the encoded size of so many numbers, scales and padding included."""

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        """Encode a vector into `out`.

        Args:
            numbers: [elements] in `dtype`, without gaps; left as they are.
            out: [size_bytes(elements)] uint8, aligned; every byte is written.
        """

    def decode(
        self, packed: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Overwrite `out` with weight · decoded vector, or add it to `out`.

        Args:
            packed: [size_bytes(elements)] uint8, aligned.
            out: [elements] in `dtype`, without gaps.
            weight: rounded to `dtype`; weight 0 keeps NaN.
        """


class BlockScaledCodec(ABC):
    """Base class of codecs with one scale per block; a subclass finds and packs the codes.

    Attributes:
        bits: bits per code.
        block: numbers that share a scale: a multiple of 8, at most RUN.
    """

    name: str
    bits: int
    gathers = False

    def __init__(self, dtype: torch.dtype, block: int = BLOCK) -> None:
        self.dtype, self.block = dtype, block

    def size_bytes(self, elements: int) -> int:
        """Return the encoded size of so many numbers: scales, codes and padding."""
        return align_up(self._scale_bytes(elements) + self._code_bytes(elements))

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        """Encode a vector block by block; a block with a non-finite number decodes to NaN."""
        elements = numbers.numel()
        scales, codes = self._fields(out, elements)
        out[scales.nbytes + codes.nbytes :] = 0
        room = self.allocate_scratch(longest_run(elements, numbers.device), numbers.device)
        for start, stop, width in iter_block_runs(elements, self.block, numbers.device):
            rows = numbers[start:stop].view(-1, width)
            scale = scales[start // self.block :][: len(rows)].unsqueeze(1)
            self.pack(rows, scale, codes[self._code_bytes(start) : self._code_bytes(stop)], room)
        broken = ~scales.isfinite()
        if bool(broken.any()):
            scales.masked_fill_(broken, math.nan)
            for place in broken.nonzero().flatten().tolist():
                start = place * self.block
                codes[self._code_bytes(start) : self._code_bytes(start + self.block)] = 0

    def decode(
        self, packed: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Write code · (weight · scale), each product rounded, to `out`, or add it."""
        elements = out.numel()
        scales, codes = self._fields(packed, elements)
        factors = scales * weight
        padded = align_up(longest_run(elements, out.device))
        units = torch.empty(padded, dtype=self.dtype, device=out.device)
        for start, stop, width in iter_block_runs(elements, self.block, out.device):
            coded = codes[self._code_bytes(start) : self._code_bytes(stop)]
            self.unpack(coded, units[: len(coded) * 8 // self.bits])
            numbers, target = (t.view(-1, width) for t in (units[: stop - start], out[start:stop]))
            factor = factors[start // self.block :][: len(target)].unsqueeze(1)
            if add:
                target.add_(numbers.mul_(factor))
            else:
                torch.mul(numbers, factor, out=target)

    @abstractmethod
    def allocate_scratch(self, elements: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return scratch memory in which `pack` encodes so many numbers at a time."""

    @abstractmethod
    def pack(self, numbers: Tensor, scale: Tensor, codes: Tensor, room: tuple[Tensor, ...]) -> None:
        """Encode blocks [blocks, width] as scales [blocks, 1] and bytes [codes, rounded up].

        A non-finite scale marks a non-finite block, whose codes are ignored.
        """

    @abstractmethod
    def unpack(self, codes: Tensor, units: Tensor) -> None:
        """Write the numbers of codes [bytes], in units of their scale, to [bytes · 8 / bits]."""

    def _fields(self, packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """Return (scales, codes) as views."""
        if not elements:  # an empty tensor may have no place in memory to look at
            return packed.new_empty(0, dtype=self.dtype), packed.new_empty(0)
        at, end = self._scale_bytes(elements), self._code_bytes(elements)
        return packed[:at].view(self.dtype), packed[at : at + end]

    def _scale_bytes(self, elements: int) -> int:
        return -(-elements // self.block) * self.dtype.itemsize

    def _code_bytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8)


class SegmentedCodec:
    """A codec for a vector in which blocks restart at given offsets, so that none spans two rows.

    Args:
        starts: ascending offsets; a block that would span an offset ends there.
    """

    def __init__(self, codec: Codec, starts: Sequence[int]) -> None:
        self.codec, self.starts = codec, starts
        self.name, self.dtype, self.gathers = codec.name, codec.dtype, codec.gathers

    def size_bytes(self, elements: int) -> int:
        """Return the encoded size of so many numbers: the sum over segments, each padded."""
        ends = [min(place, elements) for place in (*self.starts, elements)]
        return sum(self.codec.size_bytes(b - a) for a, b in pairwise([0, *ends]))

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        """Encode the segments of a vector one after another."""
        place = 0
        for piece in numbers.tensor_split(list(self.starts)):
            size = self.codec.size_bytes(piece.numel())
            self.codec.encode(piece, out[place : place + size])
            place += size
        out[place:] = 0

    def decode(
        self, packed: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Decode the segments one after another: overwrite `out`, or add to it."""
        place = 0
        for piece in out.tensor_split(list(self.starts)):
            size = self.codec.size_bytes(piece.numel())
            self.codec.decode(packed[place : place + size], piece, weight=weight, add=add)
            place += size


def align_up(size: int) -> int:
    """Return the next multiple of ALIGNED.

    >>> align_up(0), align_up(1), align_up(8)
    (0, 8, 8)
    """
    return -(-size // ALIGNED) * ALIGNED


def longest_run(elements: int, device: torch.device) -> int:
    """Return the length of the longest of `iter_block_runs`."""
    return min(elements, RUN) if device.type == "cpu" else elements


def iter_block_runs(
    elements: int, block: int, device: torch.device
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, block length) of runs of whole blocks, then of the incomplete block.

    On a CPU a run is short enough to stay in the cache; on a device one run has all whole blocks.
    """
    whole = elements // block * block
    step = max(RUN // block, 1) * block if device.type == "cpu" else max(whole, 1)
    for start in range(0, whole, step):
        yield start, min(start + step, whole), block
    if whole < elements:
        yield whole, elements, elements - whole
