"""Canonical units: a division of the merged state that is the same for every layout.

    vector   all tensors of a change, flat, one after another by name; then the running statistics
    unit     UNIT numbers of it (fewer at both ends): it is coded, hashed, sent and summed by itself
    rank k   of an island of R ranks has consecutive units: about the k-th of R equal parts

    one rank      [ 0 │ 1 │ 2 │ 3 │ 4 ]
    two ranks     [ 0 │ 1 │ 2 ] [ 3 │ 4 ]      rank 1 fetches units 3 and 4 from the one rank above

So islands whose layouts differ exchange units, and all of them compute on the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

UNIT = 262_144
"""Numbers of a unit: a multiple of the block of numbers that share a codec's scale."""


class UnitSegment(NamedTuple):
    """Part of a unit: the numbers `start` … `stop` − 1 of a flat tensor."""

    name: str
    start: int
    stop: int


Unit = tuple[UnitSegment, ...]


def cut_units(sizes: Mapping[str, int], unit: int = UNIT) -> tuple[Unit, ...]:
    """Cut the tensors, flat and by name, into units.

    Args:
        sizes: numbers of each whole tensor.

    >>> [[tuple(one) for one in unit] for unit in cut_units({"b": 3, "a": 2}, 4)]
    [[('a', 0, 2), ('b', 0, 2)], [('b', 2, 3)]]
    """
    units: list[Unit] = []
    open_unit: list[UnitSegment] = []
    free = unit
    for name in sorted(sizes):
        start = 0
        while start < sizes[name]:
            stop = min(sizes[name], start + free)
            open_unit.append(UnitSegment(name, start, stop))
            free -= stop - start
            start = stop
            if not free:
                units.append(tuple(open_unit))
                open_unit, free = [], unit
    return (*units, tuple(open_unit)) if open_unit else tuple(units)


def count_numbers(unit: Unit) -> int:
    """Return the numbers of a unit."""
    return sum(one.stop - one.start for one in unit)


@dataclass(frozen=True)
class CanonicalUnits:
    """All units of a change.

    Attributes:
        coded: units of the weights' change, in the run's codec.
        plain: units of the running statistics, uncoded.
    """

    coded: tuple[Unit, ...]
    plain: tuple[Unit, ...]

    @property
    def all(self) -> tuple[Unit, ...]:
        """All units, in their order."""
        return self.coded + self.plain

    def cuts(self, ranks: int) -> list[int]:
        """Return the first unit of each rank of an island, and the number of units.

        >>> CanonicalUnits(cut_units({"a": 9}, 2), ()).cuts(2)
        [0, 3, 5]
        """
        ends = list(accumulate(map(count_numbers, self.all), initial=0))
        inner = [bisect_left(ends, rank * ends[-1] / ranks) for rank in range(1, ranks)]
        return [0, *inner, len(ends) - 1]

    def of_rank(self, rank: int, ranks: int) -> CanonicalUnits:
        """Return the units of one rank of an island."""
        first, last = self.cuts(ranks)[rank : rank + 2]
        split = len(self.coded)
        return CanonicalUnits(
            self.coded[first:last], self.plain[max(0, first - split) : max(0, last - split)]
        )


def join_segments(units: Sequence[Unit]) -> dict[str, list[UnitSegment]]:
    """Return the segments of consecutive units by tensor, in order.

    >>> list(join_segments(cut_units({"b": 3, "a": 2}, 4)))
    ['a', 'b']
    """
    found: dict[str, list[UnitSegment]] = {}
    for unit in units:
        for one in unit:
            found.setdefault(one.name, []).append(one)
    return found
