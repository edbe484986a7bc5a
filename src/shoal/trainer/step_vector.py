"""The vector of a step's one all-reduce, built and read by names.

    sums       width numbers, added up over ranks
    by rank    width × ranks numbers, [width, ranks]: each rank fills its own column, with zeros in
               the others, so the sum is the table of what every rank has

    vector = StepVector(ranks, rank)
    vector.add_sums("flags", [stop, save])
    vector.add_by_rank("lr", [rate])
    numbers = vector.summed(all_reduced.tolist())
    numbers.sums("flags"), numbers.row("lr")

Every rank adds the same names with the same widths in the same order, whatever way leads into the
step: batches, written-out passes, free passes, servers. So no reader counts positions.

A guard that only has to know whether ranks of a group have the same whole number needs no column
per rank: rank r adds c_r · h_r, with whole coefficients c of the step that sum to zero over the
group. The sum is exactly 0 where all h are equal, and most surely not where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.base.errors import BugError


@dataclass(frozen=True)
class StepNumbers:
    """The sums of the all-reduce, by the names under which ranks added them.

    Attributes:
        ranks: columns of the entries by rank.
        slices: where each entry lies in `values`.
        values: the summed vector.
    """

    ranks: int
    slices: Mapping[str, slice]
    values: Sequence[float]

    def sums(self, name: str) -> Sequence[float]:
        """Return the numbers of a summed entry."""
        return self.values[self.slices[name]]

    def rows(self, name: str) -> list[Sequence[float]]:
        """Return, for each number of an entry by rank, what every rank has."""
        found = self.values[self.slices[name]]
        return [found[start : start + self.ranks] for start in range(0, len(found), self.ranks)]

    def row(self, name: str) -> Sequence[float]:
        """Return what every rank has of an entry of one number."""
        return self.values[self.slices[name]]


class StepVector:
    """One rank's numbers of a step, until they are summed over ranks.

    Args:
        ranks: processes of the all-reduce.
        rank: this one's place among them.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.values: list[float] = []
        self._slices: dict[str, slice] = {}

    def add_sums(self, name: str, values: Sequence[float]) -> slice:
        """Add numbers that are summed over ranks, and return where they lie."""
        return self._add(name, values)

    def add_by_rank(self, name: str, values: Sequence[float]) -> slice:
        """Add numbers that every rank learns from every other one, below 2**53 if whole.

        Returns:
            Where this rank's own column lies.
        """
        table = [0.0] * (len(values) * self.ranks)
        table[self.rank :: self.ranks] = values
        lies = self._add(name, table)
        return slice(lies.start + self.rank, lies.stop, self.ranks)

    def add_rest(self, name: str) -> None:
        """Name what is appended on the device after all numbers of the host; call it last."""
        self._slices[name] = slice(len(self.values), None)

    def summed(self, values: Sequence[float]) -> StepNumbers:
        """Return the all-reduced vector under the names of this one."""
        return StepNumbers(self.ranks, self._slices, values)

    def _add(self, name: str, values: Sequence[float]) -> slice:
        if name in self._slices:
            raise BugError(f"the step's vector has two entries of the name {name}")
        start = len(self.values)
        self.values += values
        self._slices[name] = lies = slice(start, len(self.values))
        return lies


HASH_BITS, SUM_BITS = 26, 52
"""Bits of what is compared by a zero sum · of all terms together: float64 adds them exactly."""


def zero_sum_term(value: int, step: int, members: Sequence[int], rank: int, terms: int) -> int:
    """Return c · h of this rank, a term of a sum that is 0 where all members have the same value.

    Args:
        value: h, of which `HASH_BITS` count.
        step: from which all members draw the same coefficients.
        members: ranks that are compared, in one order for all of them.
        rank: this one.
        terms: how many terms are added up at most, over all ranks and groups.
    """
    bits = SUM_BITS - HASH_BITS - max(1, terms).bit_length()
    place = members.index(rank)
    following = members[(place + 1) % len(members)]
    # Differences around a ring sum to zero.
    coefficient = _drawn(step, rank, bits) - _drawn(step, following, bits)
    return coefficient * (value & (1 << HASH_BITS) - 1)


def _drawn(step: int, rank: int, bits: int) -> int:
    """Draw a whole number of so many bits, by the mixing steps of splitmix64."""
    mixed = (step * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03 + 1) & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) >> (64 - bits)


MASK = 2**64 - 1
