"""Rounds of data owners: those that train in a round, and the samples that each of them uses.

An owner has an endless stream of its own samples, as `base/plans/batches.py` describes: position p
is a sample of epoch p // n, where n is the number of its samples. The state is one position per
owner, and the numbers n are known to all islands. So every island computes the same, and no sample
numbers travel:

    active    owners that have samples and epochs left, and were not refused too often
    drawn     max(1, round(share · active)) of them: the least hashes of (seed, round, owner)
    range     of one owner: H steps, or E epochs, from its position; not beyond its last epoch
    commit    the position of an owner moves on if its change was admitted

So each own sample is used once in every own epoch of the committed rounds.

Source: McMahan et al. 2017, "Communication-efficient learning of deep networks", algorithm 1
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.islands.sample_ranges import SampleRange, SampleStream, cut_steps

MOST_DRAWS = 100_000
"""Owners times rounds up to which the steps of a run are counted in advance: about a second."""


@dataclass(frozen=True)
class OwnerSchedule:
    """Schedule of a run's data owners; the same on every island.

    Attributes:
        held: samples of each owner.
        batch: samples per optimizer step of one owner.
        period: inner steps between merges.
        epochs: passes of an owner over its samples between merges; 0: `period` steps.
        last_epoch: passes after which an owner has no samples left; 0: none, its epochs never end.
        share: share of the active owners that trains in a round.
        seed: of the draws.
    """

    held: tuple[int, ...]
    batch: int
    period: int
    epochs: int = 0
    last_epoch: int = 0
    share: float = 1.0
    seed: int = 0

    @property
    def round_steps(self) -> int:
        """Return the most inner steps that a data owner takes in a round."""
        if not self.epochs:
            return self.period
        return max(1, self.epochs * -(-max(self.held) // self.batch))

    def count_rounds(self, total_steps: int) -> int:
        """Return the rounds of the whole run.

        Args:
            total_steps: inner steps of an owner, if no last epoch limits them.

        >>> OwnerSchedule((100, 20), 10, period=4, last_epoch=3).count_rounds(0)
        8
        """
        if not self.last_epoch:
            return max(1, -(-total_steps // self.round_steps))
        if self.epochs:
            return -(-self.last_epoch // self.epochs)
        return max(1, -(-self.last_epoch * -(-max(self.held) // self.batch) // self.period))

    def active(self, positions: Sequence[int], stopped: Collection[int] = ()) -> list[int]:
        """Return the data owners that have samples to train on, without the `stopped` ones."""
        return [
            owner
            for owner, (samples, position) in enumerate(zip(self.held, positions, strict=True))
            if samples
            and owner not in stopped
            and not (self.last_epoch and position >= self.last_epoch * samples)
        ]

    def draw(
        self, round_number: int, positions: Sequence[int], stopped: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return the data owners that train in a round, ascending; () if none is active.

        Args:
            stopped: owners whose changes were refused too often.

        >>> schedule = OwnerSchedule((5, 5, 0, 5, 5), 2, period=1, share=0.5)
        >>> len(schedule.draw(0, [0] * 5)), schedule.draw(0, [0] * 5) == schedule.draw(0, [0] * 5)
        (2, True)
        """
        active = self.active(positions, stopped)
        count = max(1, round(self.share * len(active))) if active else 0
        if count == len(active):
            return tuple(active)
        order = sorted(
            active,
            key=lambda owner: hashlib.sha256(
                f"owners {self.seed} {round_number} {owner}".encode()
            ).digest(),
        )
        return tuple(sorted(order[:count]))

    def count_group_steps(
        self,
        owners: Collection[int],
        rounds: range,
        positions: Sequence[int],
        *,
        stopped: Collection[int] = (),
        first_step: int = 0,
    ) -> int:
        """Return the step count of a group after the last round, if no change is refused.

        A round in which none of its owners is drawn counts as a step: each save has a step of its
        own.

        Args:
            owners: those that the group trains.
            rounds: the rounds that are left.
            positions: of all owners before these rounds.
            stopped: owners whose changes were refused too often.
            first_step: step count before these rounds.

        Returns:
            The step count; 0 (unknown) if counting would take longer than MOST_DRAWS draws.

        >>> schedule = OwnerSchedule((9, 5), 4, period=2, last_epoch=1)
        >>> schedule.count_group_steps([0], range(9), [0, 0])
        3
        """
        if len(rounds) * len(self.held) > MOST_DRAWS:
            return 0
        step, now = first_step, list(positions)
        for number in rounds:
            drawn = self.draw(number, now, stopped)
            if not drawn:
                break
            own = sum(self.count_steps(owner, now[owner]) for owner in drawn if owner in owners)
            step += max(1, own)
            now = self.advance(now, drawn, drawn)
        return step

    def next_range(self, owner: int, position: int) -> SampleRange:
        """Return the samples of a data owner's next round, as positions of its stream.

        >>> OwnerSchedule((10,), 4, period=2, last_epoch=1).next_range(0, 8)
        SampleRange(start=8, stop=10)
        """
        samples = self.held[owner]
        if self.epochs:
            stop = (position // samples + self.epochs) * samples
        else:
            wanted = SampleStream(position).count_samples([self.period], self.batch, samples)
            stop = position + wanted[0]
        if self.last_epoch:
            stop = min(stop, self.last_epoch * samples)
        return SampleRange(position, stop)

    def cut_steps(self, owner: int, position: int) -> list[tuple[int, int]]:
        """Return the (start, stop) positions of a data owner's inner steps in its next round."""
        return cut_steps((self.next_range(owner, position),), self.held[owner], self.batch)

    def count_steps(self, owner: int, position: int) -> int:
        """Return the number of `cut_steps`: a step ends at the end of an epoch at the latest."""
        span, samples = self.next_range(owner, position), self.held[owner]
        first_end = min(span.stop, (span.start // samples + 1) * samples)
        whole, rest = divmod(span.stop - first_end, samples)
        parts = (first_end - span.start, rest)
        each = -(-samples // self.batch)
        return whole * each + sum(-(-part // self.batch) for part in parts)

    def advance(
        self, positions: Sequence[int], drawn: Collection[int], admitted: Collection[int]
    ) -> list[int]:
        """Return the positions after a committed round; a refused owner repeats its samples."""
        return [
            self.next_range(owner, position).stop
            if owner in drawn and owner in admitted
            else position
            for owner, position in enumerate(positions)
        ]
