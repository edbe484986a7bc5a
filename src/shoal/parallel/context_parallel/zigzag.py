"""Zigzag distribution of a causal sequence, so that every rank has equal work in attention.

A rank holds neighbouring tokens everywhere else. With causal attention the first rank would then
see almost no keys and the last one all, so that all ranks wait for the last. Zigzag cuts the
sequence into 2n chunks and gives rank r the chunks r and 2n − 1 − r: an early and a late one, which
together see as many keys on every rank.

    n = 4      chunk     0  1  2  3  4  5  6  7
               rank      0  1  2  3  3  2  1  0

Protocol  one all-to-all before attention (q, k and v together) and one after it (the result);
          the backward pass has one of each as well
Source    2n chunks: Llama 3 (2407.21783, §3.3.2), zigzag ring attention (Zhu 2024,
          ring-flash-attention); the imbalance: Brandon et al. 2023 (2311.09431)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # only types
    from shoal.parallel.context_parallel.attention_axis import ContextAxis

ChunkAssignment = Callable[[int, int], tuple[int, int]]


def contiguous_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the chunks of a rank that holds neighbouring tokens.

    >>> contiguous_chunks(1, 4)
    (2, 3)
    """
    return 2 * rank, 2 * rank + 1


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the chunks of a rank with equal work.

    >>> zigzag_chunks(1, 4)
    (1, 6)
    """
    return rank, 2 * size - 1 - rank


def redistribute(
    tensors: Sequence[Tensor], axis: ContextAxis, start: ChunkAssignment, goal: ChunkAssignment
) -> list[Tensor]:
    """Move tensors from the distribution `start` to the distribution `goal`.

    Args:
        tensors: [..., own tokens, dim] of one dtype, an even number of tokens each.
    """
    size, rank = axis.size, axis.rank
    at = {chunk: one for one in range(size) for chunk in start(one, size)}
    to = {chunk: one for one in range(size) for chunk in goal(one, size)}
    have, want = start(rank, size), goal(rank, size)
    halves = [one.unflatten(-2, (2, one.shape[-2] // 2)).unbind(-3) for one in tensors]
    going = sorted(range(2), key=lambda k: (to[have[k]], have[k]))
    rows = torch.stack([torch.cat([half[k].reshape(-1) for half in halves]) for k in going])
    sent = [sum(to[chunk] == one for chunk in have) for one in range(size)]
    received = [sum(at[chunk] == one for chunk in want) for one in range(size)]
    came = axis.all_to_all_rows(rows, sent, received)
    order = sorted(want, key=lambda chunk: (at[chunk], chunk))
    first, second = (came[order.index(chunk)] for chunk in want)
    lengths = [half[0].numel() for half in halves]
    return [
        torch.cat([early.view(half[0].shape), late.view(half[0].shape)], -2)
        for half, early, late in zip(
            halves, first.split(lengths), second.split(lengths), strict=True
        )
    ]
