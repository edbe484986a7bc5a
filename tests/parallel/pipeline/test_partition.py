"""The best of all ways to cut a chain, found without trying them all."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from shoal.planning.chain_partition import partition


def sums(costs: list[float], starts: tuple[int, ...]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise((*starts, len(costs)))]


def test_no_other_cut_is_better() -> None:
    draw = random.Random(0)
    for _ in range(200):
        length = draw.randint(1, 9)
        parts = draw.randint(1, length)
        costs = [float(draw.randint(0, 9)) for _ in range(length)]
        ways = [(0, *rest) for rest in combinations(range(1, length), parts - 1)]

        def worth(starts: tuple[int, ...], costs: list[float] = costs) -> tuple[float, float]:
            runs = sums(costs, starts)
            return max(runs), sum(run**2 for run in runs)

        found = partition(costs, parts)
        assert len(found) == parts
        assert worth(tuple(found)) == min(worth(way) for way in ways), (costs, parts, found)


def test_what_is_left_over_goes_to_the_middle_if_the_ends_are_loaded() -> None:
    assert sums([1] * 10, tuple(partition([1.3, *[1.0] * 8, 1.3], 4))) == [2, 3, 3, 2]
