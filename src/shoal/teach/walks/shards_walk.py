"""Toy model with small integers, which FSDP's and ZeRO's step-throughs train.

    x[k+1] = x[k] · s[k],    s[k] = sum of the n weights of unit k,    loss = x[K]

so that the gradient of any weight of unit k is x[k] times the product of the later sums: all whole
numbers, compared exactly. Rank r owns weight r of every unit and trains on its own sample x[0].
"""

from __future__ import annotations

import math


def first_weights(units: int, ranks: int) -> list[list[int]]:
    """Return initial weights [unit][rank], from 1 to 3.

    >>> first_weights(2, 3)
    [[1, 2, 3], [2, 3, 1]]
    """
    return [[(rank - 2 * unit) % 3 + 1 for rank in range(ranks)] for unit in range(units)]


def make_samples(ranks: int, micro_batches: int = 1) -> list[list[int]]:
    """Return one sample per micro-batch and rank, [micro-batch][rank]."""
    return [[1 + rank + ranks * turn for rank in range(ranks)] for turn in range(micro_batches)]


def gradient(weights: list[list[int]], sample: int) -> list[int]:
    """Return the gradient of any weight of each unit, for one sample.

    >>> gradient([[1, 2], [2, 2]], 5)
    [20, 15]
    """
    sums = [sum(unit) for unit in weights]
    return [
        sample * math.prod(sums[:unit]) * math.prod(sums[unit + 1 :]) for unit in range(len(sums))
    ]


def summed_gradient(weights: list[list[int]], batch: list[list[int]]) -> list[int]:
    """Return one process's gradient for the whole batch, summed over all samples."""
    parts = [gradient(weights, sample) for turn in batch for sample in turn]
    return [sum(part[unit] for part in parts) for unit in range(len(weights))]
