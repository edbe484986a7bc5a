"""Cuts a chain of costs into runs: the slowest stage sets a pipeline's pace.

    first    the largest sum of a run is as small as can be
    then     the sum of the squares of the sums: the others are as equal as can be
    then     earlier runs are longer

Source: chain partitioning, Bokhari 1988, by dynamic programming in O(parts · length²).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

SAME = 1e-9
"""Relative difference below which two sums of floats are the same."""


def partition(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a chain of costs into `parts` runs so that the largest sum of a run is least.

    Returns:
        the index at which each run begins, the first 0; no run is empty.

    Ties   the least sum of squares of the runs' sums, then longer earlier runs

    Note:
        more parts than costs are not refused, and give no partition.

    >>> partition([1, 1, 1, 1, 1], 2), partition([3, 1, 1, 1, 3], 3), partition([0, 0], 2)
    ([0, 3], [0, 1, 4], [0, 1])
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    largest, _ = _best(before, parts, math.inf, max)
    _, starts = _best(
        before, parts, largest * (1 + SAME), lambda sum_so_far, run: sum_so_far + run**2
    )
    return starts


def _best(
    before: list[float], parts: int, limit: float, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least joined value of `parts` runs of at most `limit` each, and where they begin.

    Args:
        before: sum of the first 0, 1, … costs.
    """
    length = len(before) - 1
    value = [0.0] + [math.inf] * length  # of the best way to cut the first n costs
    chosen: list[list[int]] = []  # per part: where the last run begins, for the first n costs
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
