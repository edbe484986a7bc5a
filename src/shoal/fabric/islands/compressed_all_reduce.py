"""Compressed all-reduce between islands: encoded parts go to owners, encoded sums to all islands.

    first half    island i encodes part j of its numbers and sends it to j, which decodes all
    between       the owners know whether messages are finite, and the inner products of all pairs,
                  [R, R]; admission is decided with these, before anything is summed
    second half   owner j decodes again, sums Σ wᵢ·mᵢ in the order of the islands, divides, encodes
                  the sum once and sends the same bytes to all; all decode them, the owner too

An island sends (R−1)/R of the encoded whole in each half, 2(R−1)/R in total. All islands end with
the same bits, since they decode the same bytes. A sum that is encoded at every hop of a ring
(prime) diverges instead.

A codec that `gathers` has sums that are larger than its messages. Its messages travel whole, every
island computes the whole sum and the products of its share, and there is no second half.

An island may send no message, or several: those of owners that it trained in turn. R is then the
number of messages. Messages are summed in the order of their senders, so that the sum does not
depend on who sent which. Instead of a sum, `merge_rows` takes the median or the trimmed mean.

Numbers are encoded in chunks, each sent by its own exchange. Chunk k + 1 is encoded while chunk k
travels, and decoded chunks are still in the cache when they are summed.

Source: reduce-scatter and all-gather as in Rabenseifner 2004; coded twice, by senders and owner,
as in 1-bit Adam's compressed all-reduce (Tang et al. 2021); Yin et al. 2018 (median, trimmed mean)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.base.errors import BugError
from shoal.fabric.islands.inter_island_links import Deadline, IslandConnections, PendingLinkExchange

if TYPE_CHECKING:
    from shoal.fabric.compressed.codecs import Codec, ErrorFeedback

COARSE, FINE = 65_536, 4096
"""Parts are multiples of the first (a codec's block), or of the second if parts have few blocks."""
PRODUCT_BLOCK = 8192
"""Numbers per block of inner products, whose doubles stay in the cache: a fifth of the time."""
CHUNK_BYTES, MOST_BLOCKS = 131_072, 4
"""Bytes encoded and sent at a time · most numbers of such a chunk."""

SUM = "sum"
"""Owner index in the tags of sums; the tags of messages have an owner's number there."""


def is_sum_tag(tag: str) -> bool:
    """Return whether an error-feedback tag belongs to a sum that this island sent.

    >>> is_sum_tag("0/sum/3"), is_sum_tag("0/1/3")
    (True, False)
    """
    return tag.split("/")[-2] == SUM


def chunk_elements(codec: Codec) -> int:
    """Return the elements that are encoded and sent at a time, whole blocks."""
    blocks = round(CHUNK_BYTES / codec.size_bytes(COARSE))
    return COARSE * min(max(blocks, 1), MOST_BLOCKS)


class ChunkLayout:
    """Partition of a vector into a part per island that sums it, and of parts into chunks.

    Args:
        chunk: elements per chunk.

    >>> cut = ChunkLayout(100_001, 4)
    >>> [cut.piece(owner, 0) for owner in range(4)], cut.chunks
    ([(0, 28672), (28672, 57344), (57344, 86016), (86016, 100001)], 1)
    >>> [ChunkLayout(3, 2).piece(owner, 0) for owner in range(2)]
    [(0, 3), (3, 3)]
    """

    def __init__(self, elements: int, owners: int, chunk: int = COARSE) -> None:
        self.elements, self.chunk = elements, chunk
        unit = COARSE if elements >= 16 * COARSE * owners else FINE
        self.part = -(-elements // (owners * unit)) * unit
        self.chunks = -(-min(self.part, elements) // chunk)

    def piece(self, owner: int, chunk: int) -> tuple[int, int]:
        """Return (start, stop) of a chunk of an owner's part; may be empty."""
        end = min(self.part * (owner + 1), self.elements)
        start = min(self.part * owner + chunk * self.chunk, end)
        return start, min(start + self.chunk, end)


@dataclass(frozen=True)
class MergeRule:
    """Rule of a merge: the weighted mean of the admitted messages, or a robust value.

    Attributes:
        name: mean, median or trimmed; the last two ignore weights.
        trim: share of the messages that `trimmed` drops at each end.
    """

    name: str = "mean"
    trim: float = 0.0


MEAN = MergeRule()


def merge_rows(rows: Tensor, rule: MergeRule) -> Tensor:
    """Return the median, or the trimmed mean, of every column.

    The median of an even number of values is the mean of the middle two. The trimmed mean drops
    ⌊trim · R⌋ values at each end, and fewer if none would be left.

    Args:
        rows: [R, elements].

    Returns:
        [elements].

    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [100.0], [-50.0]])
    >>> (
    ...     merge_rows(rows, MergeRule("median")).item(),
    ...     merge_rows(rows, MergeRule("trimmed", 0.2)).item(),
    ... )
    (2.0, 2.0)
    """
    count = len(rows)
    drop = (count - 1) // 2 if rule.name == "median" else int(rule.trim * count)
    drop = min(drop, (count - 1) // 2)
    return rows.sort(dim=0).values[drop : count - drop].mean(dim=0)


class CompressedExchange:
    """State after the first half: finiteness and inner products of all messages.

    Args:
        senders: by island, the senders of its messages; () if each island sends its own.

    Attributes:
        order: indices of the messages in `senders`, island by island, by ascending sender.
        finite: [R]: whether each island's decoded message has neither NaN nor infinity, nor a
            number whose square overflows.
        gram: [R][R]: inner products of the decoded messages over this island's part, summed in
            float64 in a fixed order. The sum of all islands' matrices is that of whole messages.
    """

    def __init__(
        self,
        links: IslandConnections,
        codec: Codec,
        feedback: ErrorFeedback | None,
        tag: str,
        elements: int,
        senders: Sequence[Sequence[int]] = (),
    ) -> None:
        self.links, self.codec, self.feedback, self.tag = links, codec, feedback, tag
        self.is_by_sender = bool(senders)
        self.senders = senders or [(island,) for island in range(links.count)]
        self.counts = [len(one) for one in self.senders]
        flat = [sender for one in self.senders for sender in one]
        self.order = sorted(range(len(flat)), key=flat.__getitem__)
        owners = 1 if codec.gathers else links.count
        self.cut = ChunkLayout(elements, owners, chunk_elements(codec))
        self.own = 0 if codec.gathers else links.index
        self._rule = MEAN
        self.codes: list[Tensor] = []
        self._products = torch.zeros(len(flat), len(flat), dtype=torch.float64)

    @property
    def gram(self) -> list[list[float]]:
        """Inner products of the decoded messages over this island's part: [R][R]."""
        return self._products.tolist()

    @property
    def finite(self) -> list[bool]:
        """Finiteness of each island's decoded message; see the class."""
        return self._products.diagonal().isfinite().tolist()

    def run_first_half(self, flats: Sequence[Tensor], deadline: Deadline) -> None:
        """Encode and exchange all chunks, and compute `gram` and `finite` of the messages.

        Args:
            flats: this island's messages, in the order of its senders.
        """
        own = self.senders[self.links.index]
        tags = [f"{self.tag}.{one}" if self.is_by_sender else self.tag for one in own]

        def start(chunk: int) -> PendingLinkExchange:
            owners = [0] if self.codec.gathers else range(self.links.count)
            sizes = [self._size(owner, chunk) for owner in owners for _ in flats]
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
            parts = iter(packed.split(sizes))
            for owner in owners:
                first, last = self.cut.piece(owner, chunk)
                for tag, flat in zip(tags, flats, strict=True):
                    self._encode(f"{tag}/{owner}/{chunk}", flat[first:last], next(parts))
            coming = [count * self._size(self.own, chunk) for count in self.counts]
            if self.codec.gathers:
                return self.links.exchange_all(packed, deadline, coming)
            to = [len(flats) * self._size(owner, chunk) for owner in owners]
            return self.links.exchange(packed, to, coming, deadline)

        def end(chunk: int, received: Tensor) -> None:
            self.codes.append(received.view(len(self.order), self._size(self.own, chunk)))
            if not self.codec.gathers or chunk % self.links.count == self.links.index:
                self._multiply(chunk)

        self.links.stream(self.cut.chunks, start, end, deadline)

    def finish(
        self,
        weights: Sequence[float],
        divisor: float,
        *,
        deadline_s: float,
        rule: MergeRule = MEAN,
    ) -> Tensor:
        """Run the second half: Σ weights[i] · decoded message i / divisor, equal bits everywhere.

        Args:
            weights: [R], the same on every island; a message of weight 0 is not read, even if it
                has NaN.
            divisor: non-zero, the same on every island.
            rule: another way to merge the messages whose weight is not 0.

        Returns:
            [elements] in the codec's dtype.

        Raises:
            IslandLost: an island failed or did not answer in time.
        """
        if len(weights) != len(self.order) or not divisor:
            raise BugError(f"weights {list(weights)} / {divisor} for {len(self.order)} messages")
        self._rule = rule
        total = torch.empty(self.cut.elements, dtype=self.codec.dtype)
        if self.codec.gathers:
            for chunk in range(self.cut.chunks):
                first, last = self.cut.piece(0, chunk)
                self._sum_chunk(chunk, weights, divisor, total[first:last])
        else:
            with self.links.deadline_scope(
                "the second half of an exchange", deadline_s
            ) as deadline:
                self._distribute_sums(weights, divisor, total, deadline)
        return total

    def _distribute_sums(
        self, weights: Sequence[float], divisor: float, total: Tensor, deadline: Deadline
    ) -> None:
        """Send the sum of this island's part to all islands, and decode theirs into `total`."""
        islands = range(self.links.count)

        def start(chunk: int) -> PendingLinkExchange:
            first, last = self.cut.piece(self.own, chunk)
            part = torch.empty(last - first, dtype=self.codec.dtype)
            self._sum_chunk(chunk, weights, divisor, part)
            code = torch.empty(self._size(self.own, chunk), dtype=torch.uint8)
            self._encode(f"{self.tag}/{SUM}/{chunk}", part, code)
            coming = [self._size(owner, chunk) for owner in islands]
            return self.links.exchange_all(code, deadline, coming)

        def end(chunk: int, received: Tensor) -> None:
            sizes = [self._size(owner, chunk) for owner in islands]
            for owner, code in zip(islands, received.split(sizes), strict=True):
                first, last = self.cut.piece(owner, chunk)
                if last > first:
                    self.codec.decode(code, total[first:last])

        self.links.stream(self.cut.chunks, start, end, deadline)

    def _size(self, owner: int, chunk: int) -> int:
        first, last = self.cut.piece(owner, chunk)
        return self.codec.size_bytes(last - first) if last > first else 0

    def _encode(self, tag: str, numbers: Tensor, out: Tensor) -> None:
        if not numbers.numel():
            return
        if self.feedback is None:
            self.codec.encode(numbers, out)
        else:
            self.feedback.encode(tag, self.codec, numbers, out)

    def _multiply(self, chunk: int) -> None:
        """Add the inner products of one received chunk to the Gram matrix."""
        first, last = self.cut.piece(self.own, chunk)
        if first == last:
            return
        decoded = self._decode_rows(chunk, range(len(self.order)), last - first)
        for block in decoded.split(PRODUCT_BLOCK, dim=1):
            wide = block.double()
            self._products += wide @ wide.T

    def _sum_chunk(self, chunk: int, weights: Sequence[float], divisor: float, out: Tensor) -> None:
        """Write Σ weights[i] · message i / divisor to `out`, for one chunk of this island's part.

        The islands' decoded messages are added in order, for equal bits in every run.

        Args:
            weights: weight of each island; 0 leaves its message out.
            divisor: the sum is divided by it.
            out: [elements of the chunk]; zero if all weights are 0.
        """
        if not out.numel():
            return
        admitted = [message for message in self.order if weights[message]]
        if not admitted:
            out.zero_()
        elif self._rule != MEAN:
            out.copy_(merge_rows(self._decode_rows(chunk, admitted, out.numel()), self._rule))
            return
        for place, message in enumerate(admitted):
            code = self.codes[chunk][message]
            self.codec.decode(code, out, weight=weights[message], add=place > 0)
        out.div_(divisor)

    def _decode_rows(self, chunk: int, messages: Sequence[int], elements: int) -> Tensor:
        """Return the decoded chunk of some messages: [messages, elements]."""
        rows = torch.empty(len(messages), elements, dtype=self.codec.dtype)
        for message, row in zip(messages, rows, strict=True):
            self.codec.decode(self.codes[chunk][message], row)
        return rows
