"""Admission of islands' changes to the mean, decided from a few numbers before the sum.

Every island sees the same numbers: whether change m_i is finite, and the products G_ij = m_i · m_j.
So all islands refuse the same changes without a message. In this order:

    finite   m_i has a NaN or an infinity: refused
    norm     ‖m_i‖ is more than e^(bound · s) × c: refused
    cosine   of m_i to the mean of the others' directions is below `cosine`, with ≥ 3 islands left:
             the worst is refused and the rest judged again. Of two it is unknown which is wrong,
             so that is only reported. The rest must be a majority, else no island is admitted

c  the median of the norms that were admitted in the last 20 committed rounds, of all islands; or
   this round's median if that is larger: if most norms grow, a learning rate rose or the data
   changed, and no single island is at fault. (Not if others exist and only one is finite.) In
   the first round this round's median alone, if ≥ 3 islands have one; with 2 it is only reported
s  1.4826 · MAD of the logarithms of those norms, clamped to 0.2 … 0.5. Logarithms, because a
   learning rate or a warm-up multiplies norms. At least 0.2: after equal norms in the past,
   10 % more must not be refused; with the usual bound of 8 it allows 5 × the median, more than the
   3 × between the first rounds of a warm-up. At most 0.5, 55 ×: a fast growth in the past must not
   admit × 1000
   Of two middle values the lower one is the median, so that one of two islands cannot raise it.
   An island that did k times as many steps has a change between √k and k times as large. So a norm
   is tested twice, as it is and per token, against the past in the same units, and is refused only
   if both tests fail

The others' directions are changes scaled to length 1, unweighted; otherwise a huge or fast change
would make the honest ones look wrong. Correct changes from different data have cosines near 0, so
the bound is below 0.

Fragments of a model differ in size: each has its own `AdmissionTest`.

Source: Hampel 1974 (median and MAD as robust location and scale); Blanchard et al. 2017 (Krum: one
wrong sender spoils a mean); templar's checks of norm and finiteness in SparseLoCo runs are kin
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from shoal.base.errors import CheckpointError
from shoal.islands.commit_vote import name_islands

ROUNDS = 20
LEAST_SPREAD = 0.2
MOST_SPREAD = 0.5
NORMAL = 1.4826  # standard deviation / MAD of normally distributed numbers
TINY = 1e-12  # a squared length that is nothing but rounding, beside directions of length 1

Change = tuple[float, float]
"""(norm of a change, above 0, tokens that it was trained on)."""


@dataclass(frozen=True)
class AdmissionVerdict:
    """Admitted and refused islands of a merge; islands go by their numbers.

    Attributes:
        refused: reason by island, one line that names the island.
        told: warnings on changes that look odd and were admitted.
        norms: of every finite change · cosines: to the mean of the others' directions.
        tokens: tokens that each island trained on.
    """

    admitted: tuple[int, ...]
    refused: dict[int, str]
    told: tuple[str, ...]
    norms: dict[int, float]
    cosines: dict[int, float]
    tokens: dict[int, float]


class AdmissionTest:
    """Admission test for the islands' changes to one fragment, with past norms as memory.

    `judge` refuses changes that are not finite, too large or opposed to the others, and has no side
    effect. `commit` adds a round's admitted norms to the memory of the last 20.

    Args:
        bound: most deviations (1.4826 · MAD of log norms, clamped to 0.2 … 0.5) of a norm above the
            median of past rounds.
        cosine: least cosine of a change to the mean of the others' directions, with 3 islands or
            more.

    Attributes:
        names: of the owners whose changes are judged, for texts; () if islands are.
    """

    def __init__(self, bound: float, cosine: float) -> None:
        self.bound, self.cosine = bound, cosine
        self.names: Sequence[str] = ()
        self._past: deque[list[Change]] = deque(maxlen=ROUNDS)

    def judge(
        self,
        finite: Sequence[bool],
        gram: Sequence[Sequence[float]],
        tokens: Sequence[float],
        islands: Sequence[int] | None = None,
    ) -> AdmissionVerdict:
        """Judge the changes; the same numbers and past give the same verdict. No side effects.

        Args:
            gram: [R, R]: inner products of the decoded changes.
            tokens: [R]: tokens that each change was trained on.
            islands: [R]: islands of the changes, if only some merge; default: 0, 1, 2, …
        """
        named = list(range(len(finite))) if islands is None else list(islands)
        worked = dict(zip(named, map(float, tokens), strict=True))
        squares = {island: gram[at][at] for at, island in enumerate(named)}
        norms = {
            island: math.sqrt(max(squares[island], 0.0))
            for island, good in zip(named, finite, strict=True)
            if good and math.isfinite(squares[island])
        }
        refused = {
            island: f"{self.label(island)}: its change is not finite"
            for island in named
            if island not in norms
        }
        told: list[str] = []
        compared = {island: (norm, worked[island]) for island, norm in norms.items() if norm > 0}
        past = [change for round_ in self._past for change in round_]
        refused |= self._too_large(compared, past, told, alone=len(named) == 1)
        left = [island for island in norms if island not in refused]
        products = {(i, j): gram[a][b] for a, i in enumerate(named) for b, j in enumerate(named)}
        directions = _UnitChanges(left, norms, products)
        refused |= self._find_opposed(directions, left, told)
        admitted = tuple(island for island in named if island not in refused)
        cosines = directions.cosines(left)
        return AdmissionVerdict(admitted, refused, tuple(told), norms, cosines, worked)

    def label(self, island: int) -> str:
        """Return the name of the sender of a change, for a person."""
        return f"owner {self.names[island]}" if self.names else f"island {island}"

    def _label_both(self, pair: Sequence[int]) -> str:
        return " and ".join(map(self.label, pair)) if self.names else name_islands(pair)

    def commit(self, verdict: AdmissionVerdict) -> None:
        """Add the admitted norms of a committed round to the memory."""
        admitted = [
            (verdict.norms[island], verdict.tokens[island])
            for island in verdict.admitted
            if verdict.norms[island] > 0
        ]
        if admitted:
            self._past.append(admitted)

    def state(self) -> dict[str, Any]:
        """Return the past for a checkpoint: by round, admitted norms with their tokens."""
        return {"past": [[list(change) for change in round_] for round_ in self._past]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the past that `state` returned.

        Raises:
            CheckpointError: the value is not one of `state`.
        """
        try:
            past = [[(float(a), float(b)) for a, b in round_] for round_ in state["past"]]
            changes = [change for round_ in past for change in round_]
            sound = all(0 < norm < math.inf and 0 <= tokens < math.inf for norm, tokens in changes)
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError(
                f"the islands' past norms are damaged: {state}; pairs of a norm above 0 and a "
                f"number of tokens are wanted, by round"
            )
        self._past = deque(past, ROUNDS)

    def _too_large(
        self, now: Mapping[int, Change], past: Sequence[Change], told: list[str], *, alone: bool
    ) -> dict[int, str]:
        if not past and len(now) < 3:
            self._warn_of_unequal_pair(now, told)
            return {}
        alike = alone or len(now) > 1
        readings = [_NormTest(power, past, now, self.bound, alike) for power in (0.0, 1.0)]
        if all(reading.grown for reading in readings):
            least = min(reading.growth for reading in readings)
            told.append(f"most changes grew alike: to {_times(least)} the median of past rounds")
        refused = {}
        for island in now:
            mildest = min(readings, key=lambda reading: reading.excess(island))
            if mildest.excess(island) > 0:
                factor, limit = _times(mildest.factor[island]), _times(mildest.limit)
                usual = "past rounds" if past else "this round"
                line = f"its change is {factor} the median of {usual} (bound {limit})"
                refused[island] = f"{self.label(island)}: {line}"
        return refused

    def _warn_of_unequal_pair(self, now: Mapping[int, Change], told: list[str]) -> None:
        if len(now) < 2:
            return
        small, large = sorted(now, key=lambda island: now[island][0])
        factor = math.log(now[large][0]) - math.log(now[small][0])
        if factor > self.bound * LEAST_SPREAD:
            told.append(
                f"{self.label(large)}: its change is {_times(factor)} that of {self.label(small)}, "
                f"and no past round says which is right"
            )

    def _find_opposed(
        self, directions: _UnitChanges, left: Sequence[int], told: list[str]
    ) -> dict[int, str]:
        remaining, refused = list(directions.pointing), {}
        while len(remaining) >= 3:
            cosines = directions.cosines(remaining)
            worst = min(remaining, key=lambda island: cosines[island])
            if cosines[worst] >= self.cosine:
                break
            remaining.remove(worst)
            refused[worst] = (
                f"{self.label(worst)}: its change points against the mean of the others, cosine "
                f"{cosines[worst]:.2f} (bound {self.cosine:g})"
            )
        if refused and 2 * len(remaining) <= len(directions.pointing):
            line = "no majority of the changes points the same way"
            return {island: f"{self.label(island)}: {line}" for island in left}
        if len(remaining) == 2:
            cosine = directions.cosines(remaining)[remaining[0]]
            if cosine < self.cosine:
                told.append(
                    f"{self._label_both(remaining)}: their changes point apart, cosine "
                    f"{cosine:.2f} (bound {self.cosine:g})"
                )
        return refused


class RefusalCounter:
    """Consecutive refused rounds of each island; at `limit` the island must stop.

    A round that admits an island resets its count to 0; a round without the island changes nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_a_row: dict[int, int] = {}

    def count(self, islands: Iterable[int], refused: Collection[int]) -> tuple[int, ...]:
        """Count one round: its islands, and those that any fragment refused.

        Returns:
            the islands that must stop now.
        """
        for island in islands:
            times = self._in_a_row.get(island, 0)
            self._in_a_row[island] = times + 1 if island in refused else 0
        return self.at_limit()

    def at_limit(self) -> tuple[int, ...]:
        """Return the islands that were refused `limit` times in a row."""
        return tuple(i for i, times in sorted(self._in_a_row.items()) if times >= self.limit)

    def state(self) -> dict[str, int]:
        """Return the counts by island, for a checkpoint."""
        return {str(island): times for island, times in self._in_a_row.items() if times}

    def load(self, state: Mapping[str, int]) -> None:
        """Load the counts that `state` returned."""
        self._in_a_row = {int(island): times for island, times in state.items()}


class _NormTest:
    """Logarithms of norms / tokens^power, minus the median of the same in the past.

    Attributes:
        growth: this round's median.
        limit: the largest allowed value · all are logarithms of factors.
    """

    def __init__(
        self,
        power: float,
        past: Sequence[Change],
        now: Mapping[int, Change],
        bound: float,
        alike: bool,
    ) -> None:
        def read(change: Change) -> float:
            norm, tokens = change
            return math.log(norm) - power * math.log(tokens or 1.0)

        found = {island: read(change) for island, change in now.items()}
        known = [read(change) for change in past] or list(found.values())
        usual = median_low(known)
        mad = median_low([abs(value - usual) for value in known])
        room = bound * min(max(NORMAL * mad, LEAST_SPREAD), MOST_SPREAD)
        self.factor = {island: value - usual for island, value in found.items()}
        self.growth = median_low(self.factor.values()) if alike and now else 0.0
        self.grown = self.growth > room
        self.limit = room + max(self.growth, 0.0)

    def excess(self, island: int) -> float:
        return self.factor[island] - self.limit


class _UnitChanges:
    """Changes scaled to length 1; `pointing` are those that are not 0."""

    def __init__(
        self,
        islands: Sequence[int],
        norms: Mapping[int, float],
        products: Mapping[tuple[int, int], float],
    ) -> None:
        self.pointing = [island for island in islands if norms[island] > 0]
        self._cosine = {
            (i, j): products[i, j] / norms[i] / norms[j]
            for i in self.pointing
            for j in self.pointing
        }

    def cosines(self, islands: Sequence[int]) -> dict[int, float]:
        """Return each island's cosine to the mean of the others; 0 if that mean is 0."""
        pointing = [island for island in islands if island in self.pointing]
        found = {}
        for island in pointing:
            others = [other for other in pointing if other != island]
            along = math.fsum(self._cosine[island, other] for other in others)
            square = math.fsum(self._cosine[a, b] for a in others for b in others)
            found[island] = along / math.sqrt(square) if square > TINY else 0.0
        return found


def _times(logarithm: float) -> str:
    factor = math.exp(min(logarithm, 700.0))
    return f"{factor:.0f} ×" if 10 <= factor < 1e6 else f"{factor:.2g} ×"
