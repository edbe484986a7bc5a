"""Codec `top2bit`: the largest 64 of every 4096 numbers, as 12-bit indices and 2-bit values.

    chunk     4096 numbers, the last may be shorter; of n numbers ⌈n / 64⌉ are sent
    place     within the chunk, ascending; two in three bytes, the first in the lower bits
    value     bit 1: below 0 · bit 0: above the mean magnitude of what its group sends
    group     16 chunks; a last chunk that is shorter is one of its own
    codebook  two numbers per group: the mean magnitudes of those above that mean, and of the others

    [codebooks] [places] [values, four in a byte, the first in the lowest bits] [zeros]

14 bits per number sent are 0.219 bits per number. Sums of such messages have many places, so a
message travels whole to everyone (`gathers`).

Source: Sarfi et al. 2025 (SparseLoCo: chunks, 12-bit places, 2-bit values, means of bins as
codebook). There a codebook has four bins over six deviations of a tensor; of the largest numbers
those hold few above the second border (Gaussian: 0.3 %), so here the border is their mean
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.fabric.compressed.codecs.base import align_up

CHUNK = 4096
SENT = 64
"""Numbers sent of each whole chunk."""
GROUP = 16 * CHUNK


class Top2BitCodec:
    """The codec `top2bit`: 64 largest of 4096 numbers, in two bits each, and their positions."""

    name = "top2bit"
    gathers = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def size_bytes(self, elements: int) -> int:
        """Return the encoded size of so many numbers: codebooks, positions and values."""
        return align_up(sum(self._sizes(elements)))

    def encode(self, numbers: Tensor, out: Tensor) -> None:
        """Encode the largest numbers of each chunk by position, sign and one of two magnitudes."""
        books, places, values = self._fields(out, numbers.numel())
        out[books.nbytes + places.nbytes + values.nbytes :] = 0
        chosen, codes = [], []
        for book, (start, stop, width) in zip(books, _groups(numbers.numel()), strict=True):
            rows = numbers[start:stop].view(-1, width)
            place = rows.abs().topk(-(-width * SENT // CHUNK), sorted=False).indices.sort(1).values
            codes.append(_encode_group(rows.gather(1, place).flatten(), book))
            chosen.append(place.flatten())
        if chosen:
            places.copy_(_pack_places(torch.cat(chosen)))
            values.copy_(_pack_values(torch.cat(codes)))

    def decode(
        self, packed: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False
    ) -> None:
        """Add ±(weight · magnitude) to `out`, zeroed unless `add`, at the encoded positions."""
        if not add:
            out.zero_()
        elements = out.numel()
        books, places, values = self._fields(packed, elements)
        sent = -(-elements // SENT)
        order = torch.arange(sent, device=out.device)
        where = _unpack_places(places)[:sent] + order // SENT * CHUNK
        group = order // (GROUP // CHUNK * SENT)
        if elements % CHUNK:  # the last chunk has a codebook of its own
            group[elements // CHUNK * SENT :] = len(books) - 1
        magnitudes = books * weight
        signed = torch.cat([magnitudes, -magnitudes], 1)
        out.index_add_(0, where, signed[group, _unpack_values(values)[:sent]])

    def _sizes(self, elements: int) -> tuple[int, int, int]:
        """Return the bytes of codebooks, positions and values."""
        sent = -(-elements // SENT)
        groups = sum(1 for _ in _groups(elements))
        return 2 * groups * self.dtype.itemsize, 3 * -(-sent // 2), -(-sent // 4)

    def _fields(self, packed: Tensor, elements: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views (codebooks [groups, 2], positions, values); the last two are bytes."""
        if not elements:
            return packed.new_empty(0, 2, dtype=self.dtype), packed[:0], packed[:0]
        books, places, values = packed[: sum(self._sizes(elements))].split(self._sizes(elements))
        return books.view(self.dtype).view(-1, 2), places, values


def _groups(elements: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, chunk length) of every group."""
    whole = elements // CHUNK * CHUNK
    found = [(start, min(start + GROUP, whole), CHUNK) for start in range(0, whole, GROUP)]
    return found + ([(whole, elements, elements - whole)] if whole < elements else [])


def _encode_group(kept: Tensor, book: Tensor) -> Tensor:
    """Encode one group's numbers as codes [sent], and write its codebook [2]."""
    magnitudes = kept.abs().double()
    large = magnitudes > magnitudes.mean()
    for place, among in enumerate((~large, large)):
        book[place] = (magnitudes * among).sum() / among.sum().clamp(min=1)
    if not bool(book.isfinite().all()):
        book.fill_(math.nan)
    return (kept < 0) * 2 + large.long()


def _pack_places(places: Tensor) -> Tensor:
    """Pack pairs of 12-bit positions into three bytes each."""
    pairs = torch.nn.functional.pad(places, (0, len(places) % 2)).view(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 12).int().view(torch.uint8).view(-1, 4)[:, :3].flatten()


def _unpack_places(packed: Tensor) -> Tensor:
    first, second, third = packed.view(-1, 3).long().unbind(1)
    return torch.stack([first | (second & 15) << 8, second >> 4 | third << 4], 1).flatten()


def _pack_values(codes: Tensor) -> Tensor:
    """Pack four two-bit codes into each byte."""
    fours = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6


def _unpack_values(packed: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, device=packed.device)
    return (packed.long().unsqueeze(1) >> shifts & 3).flatten()
