"""Shares of the data owners in the committed merges: rounds, inner steps and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_OWNERS = 6
"""Owners that the line at the end of a run lists; the report has all."""


@dataclass
class OwnerShares:
    """Sums over the committed rounds since this start of the run.

    Attributes:
        names, held: of all owners, by number: their names and their training samples.
        first_round: round with which this start of the run begins.
        last_round: rows of the newest round, by name, for its event; owners that were not drawn
            have none.
    """

    names: Sequence[str]
    held: Sequence[int]
    first_round: int = 0
    last_round: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: int = 0
    sums: dict[int, list[float]] = field(default_factory=dict)

    def add_round(
        self, steps: Mapping[int, int], weights: Mapping[int, float], *, by_size: bool
    ) -> None:
        """Add a committed round.

        Args:
            steps: inner steps of each owner that trained.
            weights: weight of each owner's change; 0 if it was refused.
            by_size: the merge is a mean by these weights; medians count all changes alike.
        """
        counted = {owner: weight if by_size else 1.0 for owner, weight in weights.items() if weight}
        whole = sum(counted.values()) or 1.0
        self.rounds += 1
        self.last_round = {}
        for owner, count in steps.items():
            weight = counted.get(owner, 0.0) / whole
            sums = self.sums.setdefault(owner, [0, 0, 0.0])
            for place, number in enumerate((1, count, weight)):
                sums[place] += number
            self.last_round[self.names[owner]] = {
                "samples": self.held[owner],
                "steps": count,
                "weight": weight,
            }

    def describe(self) -> str:
        """Return the line at the end of a run.

        >>> shares = OwnerShares(("east", "north"), (30, 10))
        >>> shares.add_round({0: 3}, {0: 30.0}, by_size=True)
        >>> shares.describe()
        'owners by mean weight: east 100.0% (30 samples, 1 rounds, 3 steps), 1 never trained'
        """
        rows = sorted(self.sums.items(), key=lambda one: -one[1][2])
        words = [
            f"{self.names[owner]} {weight / max(1, self.rounds):.1%} ({self.held[owner]} samples, "
            f"{rounds:g} rounds, {steps:g} steps)"
            for owner, (rounds, steps, weight) in rows[:MOST_OWNERS]
        ]
        if len(rows) > MOST_OWNERS:
            words.append(f"{len(rows) - MOST_OWNERS} others in the report")
        if absent := len(self.held) - len(rows):
            words.append(f"{absent} never trained")
        since = f" since round {self.first_round}" if self.first_round else ""
        return f"owners by mean weight{since}: {', '.join(words)}"
