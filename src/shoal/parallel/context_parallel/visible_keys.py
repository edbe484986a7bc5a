"""What of every rank's keys a rank's queries see, in attention over parts of a sequence.

    causal            own keys up to a query's own; all keys of ranks before
    causal, zigzag    see `zigzag.py`: half the work of a turn on every rank
    a mask            a sliding window, padding, both, a bias on the scores: of the own rows, the
                      columns of a rank's keys. Where they hide everything that rank is passed over,
                      and the ring ends with the last turn in which anybody sees anything

Protocol  with a mask one all-reduce of as many numbers as ranks: who sees anything in which turn
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:  # only types
    from shoal.parallel.context_parallel.attention_axis import ContextAxis


NOTHING, SOME, EVERYTHING = range(3)


class Seen(NamedTuple):
    """Queries, keys, whether a query sees only keys up to its own place, and what it sees else.

    Attributes:
        mask: [batch or 1, heads or 1, queries or 1, keys], boolean or added to the scores.
    """

    rows: slice
    keys: slice
    diagonal: bool = False
    mask: Tensor | None = None


class Visible(Protocol):
    """What one rank sees. turns: after so many of the ring nobody sees any more."""

    @property
    def turns(self) -> int:
        """At least 1: the keys that a rank holds itself."""

    def of(self, source: int) -> Iterator[Seen]:
        """What is seen of the keys of rank `source`."""


@dataclass(frozen=True)
class Unmasked:
    """Without a mask: rank of size, each with `tokens`; `dealt`: in a zigzag."""

    rank: int
    turns: int
    tokens: int
    causal: bool
    dealt: bool

    def of(self, source: int) -> Iterator[Seen]:
        """All of it, what is on the diagonal and before it, or a half."""
        every, half = slice(None), self.tokens // 2
        if not self.causal or source == self.rank:
            yield Seen(every, every, self.causal)
        elif self.dealt:
            before = source < self.rank
            yield Seen(every, slice(half)) if before else Seen(slice(half, None), every)
        elif source < self.rank:
            yield Seen(every, every)


@dataclass(frozen=True)
class Masked:
    """With a mask: the own rows of it, and what each rank's columns of them show."""

    mask: Tensor
    kinds: Sequence[int]
    turns: int

    @staticmethod
    def by(mask: Tensor, axis: ContextAxis) -> Masked:
        """Look at the own rows [..., own queries or 1, keys of all ranks]; every rank must call."""
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        open_to_all = ~hidden if mask.dtype == torch.bool else mask == 0
        parts = [
            torch.stack([(~hide).any(), show.all()])
            for hide, show in zip(
                hidden.chunk(axis.size, -1), open_to_all.chunk(axis.size, -1), strict=True
            )
        ]
        told = torch.stack(parts).tolist()  # one look at the device
        kinds = [EVERYTHING if all_of_it else int(any_of_it) for any_of_it, all_of_it in told]
        by_turn = [kinds[(axis.rank - turn) % axis.size] != NOTHING for turn in range(axis.size)]
        needed = torch.tensor(by_turn, dtype=torch.int64, device=mask.device)
        axis.all_reduce(needed)
        return Masked(mask, kinds, max([0, *needed.nonzero().flatten().tolist()]) + 1)

    def of(self, source: int) -> Iterator[Seen]:
        """Nothing, everything, or what the columns of this rank's keys say."""
        every, kind = slice(None), self.kinds[source]
        if kind == EVERYTHING:
            yield Seen(every, every)
        elif kind == SOME:
            width = self.mask.shape[-1] // len(self.kinds)
            yield Seen(every, every, mask=self.mask.narrow(-1, source * width, width))


def in_small_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> tuple[int, list[tuple[Tensor, ...]]]:
    """Attention in parts that know nothing of each other: (dim of samples or heads, its parts).

    While a group travels, a rank holds its own keys and values, what it hands on and what comes:
    for a half or less of them at a time that is no more than two ranks' share.
    """
    for dim in (0, 1):
        groups = next((n for n in range(2, k.shape[dim] + 1) if k.shape[dim] % n == 0), 0)
        if groups:
            masks = mask.chunk(groups, dim) if mask.shape[dim] > 1 else (mask,) * groups
            several = (one.chunk(groups, dim) for one in (q, k, v))
            return dim, list(zip(*several, masks, strict=True))
    return 0, [(q, k, v, mask)]
