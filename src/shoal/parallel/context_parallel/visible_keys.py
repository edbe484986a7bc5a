"""Visible keys: the part of every rank's keys that a rank's queries attend to.

    causal            own keys up to a query's own; all keys of ranks before
    causal, zigzag    see `zigzag.py`: half the work of a turn on every rank
    a mask            a sliding window, padding, both, a bias on the scores: of the own rows, the
                      columns of a rank's keys. If they hide everything, that rank is skipped,
                      and the ring ends with the last turn in which any rank sees a key

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


class VisibleBlock(NamedTuple):
    """Block of visible scores: queries, keys, whether it is causal, and its mask.

    Attributes:
        diagonal: each query sees only keys up to its own position.
        mask: [batch or 1, heads or 1, queries or 1, keys], boolean or added to the scores.
    """

    rows: slice
    keys: slice
    diagonal: bool = False
    mask: Tensor | None = None


class VisibleKeys(Protocol):
    """Keys that one rank sees; after `turns` turns of the ring no rank sees any more."""

    @property
    def turns(self) -> int:
        """Return the number of turns, at least 1: for the rank's own keys."""

    def of(self, source: int) -> Iterator[VisibleBlock]:
        """Yield the visible blocks of the keys of rank `source`."""


@dataclass(frozen=True)
class UnmaskedKeys:
    """Visible keys without a mask, with `tokens` per rank; `dealt`: in a zigzag."""

    rank: int
    turns: int
    tokens: int
    causal: bool
    dealt: bool

    def of(self, source: int) -> Iterator[VisibleBlock]:
        """Yield the block of all keys, of the diagonal and before it, or a half."""
        every, half = slice(None), self.tokens // 2
        if not self.causal or source == self.rank:
            yield VisibleBlock(every, every, self.causal)
        elif self.dealt:
            before = source < self.rank
            yield (
                VisibleBlock(every, slice(half))
                if before
                else VisibleBlock(slice(half, None), every)
            )
        elif source < self.rank:
            yield VisibleBlock(every, every)


@dataclass(frozen=True)
class MaskedKeys:
    """Visible keys with a mask: the rank's rows of it, and the kind of each rank's columns."""

    mask: Tensor
    kinds: Sequence[int]
    turns: int

    @staticmethod
    def by(mask: Tensor, axis: ContextAxis) -> MaskedKeys:
        """Classify the rank's mask rows by the source rank of the keys; every rank must call.

        Args:
            mask: [..., own queries or 1, keys of all ranks].
        """
        hidden = ~mask if mask.dtype == torch.bool else mask == -torch.inf
        open_to_all = ~hidden if mask.dtype == torch.bool else mask == 0
        parts = [
            torch.stack([(~hide).any(), show.all()])
            for hide, show in zip(
                hidden.chunk(axis.size, -1), open_to_all.chunk(axis.size, -1), strict=True
            )
        ]
        told = torch.stack(parts).tolist()  # one device synchronization
        kinds = [EVERYTHING if all_of_it else int(any_of_it) for any_of_it, all_of_it in told]
        by_turn = [kinds[(axis.rank - turn) % axis.size] != NOTHING for turn in range(axis.size)]
        needed = torch.tensor(by_turn, dtype=torch.int64, device=mask.device)
        axis.all_reduce(needed)
        return MaskedKeys(mask, kinds, max([0, *needed.nonzero().flatten().tolist()]) + 1)

    def of(self, source: int) -> Iterator[VisibleBlock]:
        """Yield nothing, everything, or the block under the mask columns of `source`'s keys."""
        every, kind = slice(None), self.kinds[source]
        if kind == EVERYTHING:
            yield VisibleBlock(every, every)
        elif kind == SOME:
            width = self.mask.shape[-1] // len(self.kinds)
            yield VisibleBlock(every, every, mask=self.mask.narrow(-1, source * width, width))


def split_in_groups(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> tuple[int, list[tuple[Tensor, ...]]]:
    """Split attention in independent parts: (dim of samples or heads, its parts).

    While a group travels, a rank holds its own keys and values, those it sends and those it
    receives. With groups of half of them or less, that is no more than two ranks' share.
    """
    for dim in (0, 1):
        groups = next((n for n in range(2, k.shape[dim] + 1) if k.shape[dim] % n == 0), 0)
        if groups:
            masks = mask.chunk(groups, dim) if mask.shape[dim] > 1 else (mask,) * groups
            several = (one.chunk(groups, dim) for one in (q, k, v))
            return dim, list(zip(*several, masks, strict=True))
    return 0, [(q, k, v, mask)]
