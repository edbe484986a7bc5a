"""Vector of a step's single all-reduce, built and read by names.

    everyone = Group(range(world.size), world.rank)
    own = [Invariant("training_mode", True, everyone), Invariant("weights", 7, replicas)]
    vector = StepVector()
    vector.add("flags", [stop, save])
    vector.add_invariants(own, step, world)
    numbers = vector.summed(all_reduced.tolist(), own, world)
    numbers.sums("flags"), numbers.invariants.differs("weights")

Every rank adds the same names with the same lengths in the same order, for every kind of step:
batches, written-out passes, free passes, servers. So no reader counts positions. The vector holds
only sums over ranks: its length does not grow with them.

Values that must be equal on the ranks of a group take two numbers for all groups together. The
values of a group have one hash h, and rank r adds c_r · h_r, with integer coefficients c of the
step that sum to zero over the group. If all h are equal, the sum is exactly 0, since float64 adds
such numbers exactly. If one differs, the sum is not 0, but for a chance of about 2⁻²⁸ at 4,096
ranks. Ranks gather their values only if a sum is not 0, or if a guard requests them on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import BugError
from shoal.fabric import World

Value = float | int | str | Sequence[Any]
"""Type of a compared value: anything that a JSON round trip keeps, the same type on all ranks."""

NUMBERS, HASH_BITS, SUM_BITS = 2, 20, 52
"""Number of sums, with coefficients of their own · hash bits in each · bits of all terms."""
GROUPS = 32
"""Largest number of groups per rank; it bounds the number of terms."""


class InvariantGroup:
    """Ranks that must have equal values, as seen from one of them.

    Args:
        ranks: of the group, in one order on all its members.
        rank: this one.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        place = ranks.index(rank)
        self.first, self.size = ranks[0], len(ranks)
        self.rank, self.following = rank, ranks[(place + 1) % len(ranks)]


@dataclass(slots=True)
class Invariant:
    """A value of this rank that must be equal on all ranks of a group.

    Attributes:
        name: the same on all ranks.
        value: anything that a JSON round trip keeps.
        group: the ranks of which all must have it; None: it is not compared.
    """

    name: str
    value: Value
    group: InvariantGroup | None


def zero_sum_terms(invariants: Iterable[Invariant], step: int, ranks: int) -> list[float]:
    """Return this rank's terms of sums that are 0 if the members of all groups have equal values.

    Args:
        invariants: the values of this rank.
        step: from which all ranks draw the same coefficients.
        ranks: how many are summed over.
    """
    found: dict[int, tuple[InvariantGroup, list[tuple[str, Value]]]] = {}
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
            factor = _random_bits(draw, group.rank, bits) - _random_bits(
                draw, group.following, bits
            )
            totals[number] += factor * (code >> number * HASH_BITS & (1 << HASH_BITS) - 1)
    return list(map(float, totals))


class InvariantCheck:
    """Comparison of invariants over ranks, from a step's sums; finds the ranks that differ.

    Args:
        own: the values of this rank.
        sums: of `zero_sum_terms` over all ranks.
        gather: returns the values of all ranks, from this rank's; a collective.
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
        """Return whether a value of one of these names differs inside of a group.

        Every rank calls it, with the same names.
        """
        return not self.all_equal and any(self.first_differing_pair(name) for name in names)

    def by_rank(self, name: str) -> list[Any]:
        """Return the values of all ranks, None for a rank without one; every rank calls it."""
        return [one.get(name, (0, None))[1] for one in self._gather_invariants()]

    def first_differing_pair(self, name: str) -> tuple[int, int] | None:
        """Return the first two ranks of a group whose values differ; every rank calls it."""
        firsts: dict[int, tuple[int, Any]] = {}
        for rank, one in enumerate(self._gather_invariants() if not self.all_equal else ()):
            group, value = one.get(name, (-1, None))
            first, other = firsts.setdefault(group, (rank, value))
            if group >= 0 and other != value:
                return first, rank
        return None

    def _gather_invariants(self) -> list[dict[str, tuple[int, Any]]]:
        if not self._told:
            mine = [(o.name, o.group.first if o.group else -1, o.value) for o in self._own]
            self._told = [
                {name: (group, value) for name, group, value in told} for told in self._gather(mine)
            ]
        return self._told


MASK = 2**64 - 1


def _random_bits(step: int, rank: int, bits: int) -> int:
    """Draw an integer of `bits` bits, by the mixing steps of splitmix64."""
    mixed = (step * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03 + 1) & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) >> (64 - bits)


UNLIKE = "unlike"
"""Name of the sums that are 0 if all compared values are equal."""


@dataclass(slots=True)
class StepNumbers:
    """Sums of the all-reduce, by the names under which ranks added them.

    Attributes:
        entries: the numbers by name.
        invariants: the check of which compared values differ.
    """

    entries: Mapping[str, Sequence[float]]
    invariants: InvariantCheck

    def sums(self, name: str) -> Sequence[float]:
        """Return the numbers of an entry."""
        return self.entries[name]


class StepVector:
    """One rank's numbers of a step, until they are summed over ranks.

    Attributes:
        values: the numbers of the host.
        slices: position of each entry.
    """

    def __init__(self) -> None:
        self.values: list[float] = []
        self.slices: dict[str, slice] = {}

    def add(self, name: str, values: Sequence[float]) -> slice:
        """Add numbers that are summed over ranks, and return their slice."""
        if name in self.slices:
            raise BugError(f"the step's vector has two entries of the name {name}")
        start = len(self.values)
        self.values += values
        self.slices[name] = lies = slice(start, len(self.values))
        return lies

    def add_invariants(self, invariants: Sequence[Invariant], step: int, world: World) -> None:
        """Add the terms that show whether ranks have equal values."""
        self.add(UNLIKE, zero_sum_terms(invariants, step, world.size))

    def add_device_entry(self, name: str) -> None:
        """Name the numbers that the device appends after all numbers of the host; call it last."""
        self.slices[name] = slice(len(self.values), None)

    def name_sums(
        self, values: Sequence[float], own: Sequence[Invariant], world: World
    ) -> StepNumbers:
        """Return the all-reduced vector under the names of this one.

        Args:
            values: the sums.
            own: the compared values of this rank, of the entry `UNLIKE`.
            world: the ranks that were summed over.
        """
        entries = {name: values[lies] for name, lies in self.slices.items()}
        return StepNumbers(entries, InvariantCheck(own, entries[UNLIKE], world.gather_json))
