"""Partition of a chain of costs into contiguous runs, as pipeline stages need it.

    first    the largest sum of a run is as small as can be
    then     the sum of the squares of the sums: the others are as equal as can be
    then     earlier runs are longer

Source: chain partitioning, Bokhari 1988, by dynamic programming in O(parts · length²).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

SAME = 1e-9
"""Relative difference below which two sums of floats count as equal."""


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a chain of costs into `parts` contiguous runs so that the largest sum of a run is least.

    Ties: the least sum of squares of the runs' sums wins, then longer earlier runs.

    Returns:
        The index at which each run begins, the first 0; no run is empty.

    Note:
        The function does not refuse more parts than costs; it then returns no valid partition.

    >>> partition([1, 1, 1, 1, 1], 2), partition([3, 1, 1, 1, 3], 3), partition([0, 0], 2)
    ([0, 3], [0, 1, 4], [0, 1])
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    largest, _ = _best_partition(before, parts, math.inf, max)
    _, starts = _best_partition(
        before, parts, largest * (1 + SAME), lambda sum_so_far, run: sum_so_far + run**2
    )
    return starts


def join_places(blocks: int, goes_with: list[int], together: Iterable[list[int]]) -> list[int]:
    """Return, for each block call, the number of the run of block calls that stays on one stage.

    Args:
        goes_with: of each call, the index of its block call.
        together: lists of calls that must lie on one stage.

    >>> join_places(5, [0, 1, 2, 3, 4], [[1, 3]])
    [0, 1, 1, 1, 2]
    """
    joined: set[int] = set()
    for calls in together:
        places = [goes_with[number] for number in calls]
        joined.update(range(min(places) + 1, max(places) + 1))
    runs = [0]
    for place in range(1, blocks):
        runs.append(runs[-1] + (place not in joined))
    return runs


def _best_partition(
    before: list[float], parts: int, limit: float, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least combined cost of `parts` runs of at most `limit` each, and their starts.

    Args:
        before: prefix sums: the sum of the first 0, 1, … costs.
    """
    length = len(before) - 1
    value = [0.0] + [math.inf] * length  # best combined cost of the first n costs
    chosen: list[list[int]] = []  # per part: start of the last run, for the first n costs
    for part in range(1, parts + 1):
        new = [math.inf] * (length + 1)
        begin = [0] * (length + 1)
        for stop in range(part, length + 1):
            for start in range(stop - 1, part - 2, -1):
                run = before[stop] - before[start]
                if run > limit:
                    break
                candidate = join(value[start], run)
                if candidate < new[stop] * (1 - SAME) or new[stop] == math.inf:
                    new[stop], begin[stop] = candidate, start
        value = new
        chosen.append(begin)
    starts, stop = [], length
    for begin in reversed(chosen):
        stop = begin[stop]
        starts.append(stop)
    return value[length], starts[::-1]
