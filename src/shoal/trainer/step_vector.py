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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.base.errors import BugError


@dataclass(frozen=True)
class StepNumbers:
    """What the all-reduce gave, by the names under which ranks added it.

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


def same_on_all_ranks(
    ranks: int, by_rank: Mapping[str, Sequence[float]], sums: Mapping[str, Sequence[float]]
) -> StepNumbers:
    """Return the numbers of a step in which every rank has the same; nothing is sent.

    Args:
        ranks: how many have them.
        by_rank: entries that each rank has.
        sums: entries that are sums over ranks already.
    """
    vector = StepVector(ranks, 0)
    for name, values in by_rank.items():
        vector.add_sums(name, [value for value in values for _ in range(ranks)])
    for name, values in sums.items():
        vector.add_sums(name, values)
    return vector.summed(vector.values)
