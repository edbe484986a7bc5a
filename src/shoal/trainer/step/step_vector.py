"""The vector of a step's one all-reduce, built and read by names.

    everyone = Group(range(world.size), world.rank)
    own = [Invariant("training_mode", True, everyone), Invariant("weights", 7, replicas)]
    vector = StepVector()
    vector.add("flags", [stop, save])
    vector.add_invariants(own, step, world)
    numbers = vector.summed(all_reduced.tolist(), own, world)
    numbers.sums("flags"), numbers.invariants.differs("weights")

Every rank adds the same names with as many numbers in the same order, whatever way leads into the
step: batches, written-out passes, free passes, servers. So no reader counts positions. All that it
holds are sums over ranks: its length does not grow with them.

Values that ranks of a group must have in common take two numbers for all groups together: the
values of a group have one hash h, and rank r adds c_r · h_r, with whole coefficients c of the step
that sum to zero over the group. Where all h are equal the sum is exactly 0, since float64 adds such
numbers exactly; where one differs it is not, but for a chance of about 2⁻²⁸ at 4,096 ranks. Ranks
tell each other their values only where a sum is not 0, or where a guard asks for them on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import BugError
from shoal.fabric import World

Value = float | int | str | Sequence[Any]
"""Type of a compared value: anything that JSON keeps as it is, the same type on all ranks."""

NUMBERS, HASH_BITS, SUM_BITS = 2, 20, 52
"""Sums, with coefficients of their own · bits of a hash in each · bits of all terms together."""
GROUPS = 32
"""Groups that one rank is a member of, at most: bounds the number of terms."""


class Group:
    """Ranks that must agree on a value, as one of them sees them.

    Args:
        ranks: of the group, in one order on all its members.
        rank: this one.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        place = ranks.index(rank)
        self.first, self.size = ranks[0], len(ranks)
        self.rank, self.following = rank, ranks[(place + 1) % len(ranks)]


@dataclass(frozen=True)
class Invariant:
    """A value of this rank.

    Attributes:
        name: the same on all ranks.
        value: as above.
        group: the ranks that must have it in common; None: nobody compares it.
    """

    name: str
    value: Value
    group: Group | None


def zero_sum_terms(invariants: Iterable[Invariant], step: int, ranks: int) -> list[float]:
    """Return this rank's terms of the sums that are 0 where the members of all groups agree.

    Args:
        invariants: the values of this rank.
        step: from which all ranks draw the same coefficients.
        ranks: how many are summed over.
    """
    found: dict[int, tuple[Group, list[tuple[str, Value]]]] = {}
    for one in invariants:
        if one.group is not None and one.group.size > 1:
            _, values = found.setdefault(id(one.group), (one.group, []))
            values.append((one.name, one.value))
    totals = [0] * NUMBERS
    bits = SUM_BITS - HASH_BITS - (ranks * GROUPS).bit_length()
    for group, values in found.values():
        digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        code = int.from_bytes(digest)
        for number in range(NUMBERS):
            draw = step * NUMBERS + number
            # Differences around a ring sum to zero.
            factor = _drawn(draw, group.rank, bits) - _drawn(draw, group.following, bits)
            totals[number] += factor * (code >> number * HASH_BITS & (1 << HASH_BITS) - 1)
    return list(map(float, totals))


class InvariantCheck:
    """Find which invariants differ, and on which ranks, from a step's sums.

    Args:
        own: the values of this rank.
        sums: of `zero_sum_terms` over all ranks.
        gather: gives every rank's value for this rank's; a collective.
    """

    def __init__(
        self,
        own: Sequence[Invariant],
        sums: Sequence[float] = (),
        gather: Callable[[Any], list[Any]] = lambda own: [own],
    ) -> None:
        self._own, self.all_equal, self._gather = own, not any(sums), gather
        self._told: list[dict[str, tuple[int, Any]]] = []

    def differs(self, *names: str) -> bool:
        """Tell whether a value of one of these names differs inside of a group.

        Every rank calls it, with the same names.
        """
        return any(self.first_pair(name) for name in names)

    def by_rank(self, name: str) -> list[Any]:
        """Return what every rank has, None where one has nothing; every rank calls it."""
        return [one.get(name, (0, None))[1] for one in self._everyone()]

    def first_pair(self, name: str) -> tuple[int, int] | None:
        """Return the first two ranks of a group whose values differ; every rank calls it."""
        firsts: dict[int, tuple[int, Any]] = {}
        for rank, one in enumerate(self._everyone() if not self.all_equal else ()):
            group, value = one.get(name, (-1, None))
            first, other = firsts.setdefault(group, (rank, value))
            if group >= 0 and other != value:
                return first, rank
        return None

    def _everyone(self) -> list[dict[str, tuple[int, Any]]]:
        if not self._told:
            mine = [(o.name, o.group.first if o.group else -1, o.value) for o in self._own]
            self._told = [
                {name: (group, value) for name, group, value in told} for told in self._gather(mine)
            ]
        return self._told


MASK = 2**64 - 1


def _drawn(step: int, rank: int, bits: int) -> int:
    """Draw a whole number of so many bits, by the mixing steps of splitmix64."""
    mixed = (step * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03 + 1) & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) >> (64 - bits)


UNLIKE = "unlike"
"""Name of the sums that are 0 where ranks have in common what they compare."""


@dataclass(frozen=True)
class StepNumbers:
    """The sums of the all-reduce, by the names under which ranks added them.

    Attributes:
        slices: where each entry lies in `values`.
        values: the summed vector.
        invariants: which of the values differ that ranks must have in common.
    """

    slices: Mapping[str, slice]
    values: Sequence[float]
    invariants: InvariantCheck

    def sums(self, name: str) -> Sequence[float]:
        """Return the numbers of an entry."""
        return self.values[self.slices[name]]


class StepVector:
    """One rank's numbers of a step, until they are summed over ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._slices: dict[str, slice] = {}

    def add(self, name: str, values: Sequence[float]) -> slice:
        """Add numbers that are summed over ranks, and return where they lie."""
        if name in self._slices:
            raise BugError(f"the step's vector has two entries of the name {name}")
        start = len(self.values)
        self.values += values
        self._slices[name] = lies = slice(start, len(self.values))
        return lies

    def add_invariants(self, invariants: Sequence[Invariant], step: int, world: World) -> None:
        """Add the terms that say whether ranks have these values in common."""
        self.add(UNLIKE, zero_sum_terms(invariants, step, world.size))

    def add_rest(self, name: str) -> None:
        """Name what is appended on the device after all numbers of the host; call it last."""
        self._slices[name] = slice(len(self.values), None)

    def summed(
        self, values: Sequence[float], own: Sequence[Invariant], world: World
    ) -> StepNumbers:
        """Return the all-reduced vector under the names of this one.

        Args:
            values: the sums.
            own: what this rank compares, under the name `UNLIKE`.
            world: the ranks that were summed over.
        """
        sums = values[self._slices[UNLIKE]]
        return StepNumbers(self._slices, values, InvariantCheck(own, sums, world.gather_json))
