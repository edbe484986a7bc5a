"""Sample ranges of each island: ranges of one endless stream, dealt round by round.

Positions count samples in the stream that `base/plans/batches.py` describes. The state is one
integer and a short list: all positions before `cursor` were dealt, except the unused ones in
`open`. Every island runs the same round:

    steps         = inner_steps(H, speeds)               H_i = max(1, round(H · v_i / v_max))
    wanted        = stream.samples_of(steps, batch, n)   samples of exactly these steps
    after, dealt  = stream.deal(wanted)                  open ranges first, island by island
    island i runs   cut_steps(dealt[i], n, batch)         exactly H_i steps
    commit          samples used after the last message are in flight: the next message has them
    refused         stream = after.give_back(dealt samples, and samples in flight)

Only the samples of a refused or discarded round are dealt again; they return whole. After a crash
the run continues from the last committed `stream`, saved before the deal, so that any number of
islands can resume. So over committed rounds each position is used exactly once.

A step is contiguous and never straddles an epoch, so a step at the end of an epoch or of an open
range is short. It counts as one of the H_i: `count_samples` deals fewer samples instead, so that no
remainder causes short steps for ever. With period 1, island i of R trains on [p + i·B, p +
(i+1)·B), which together is data parallelism's step of R·B; only where an epoch ends they differ:
there data parallelism makes one short step, and of the islands just one does.

Source: Liu et al. 2024 (asynchronous local SGD: inner steps by speed)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from shoal.base.errors import BugError, CheckpointError
from shoal.base.plans.batches import cut_step


@dataclass(frozen=True, order=True)
class SampleRange:
    """Samples at stream positions start … stop − 1."""

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class SampleStream:
    """Samples not yet dealt to islands: all positions from `cursor` on, and those in `open`.

    Attributes:
        open: ranges before the cursor; sorted, none empty, none touching another or the cursor.
    """

    cursor: int = 0
    open: tuple[SampleRange, ...] = ()

    def deal(
        self, wanted: Sequence[int]
    ) -> tuple[SampleStream, tuple[tuple[SampleRange, ...], ...]]:
        """Deal wanted[i] samples to island i, in the order of the islands, open ranges first.

        Returns:
            the remaining stream, and each island's spans.

        Raises:
            BugError: a number is negative.

        >>> after, dealt = SampleStream(100, (SampleRange(8, 10),)).deal([4, 4])
        >>> [[(span.start, span.stop) for span in spans] for spans in dealt], after.cursor
        ([[(8, 10), (100, 102)], [(102, 106)]], 106)
        """
        beyond = SampleRange(
            self.cursor, self.cursor + sum(wanted) + 1
        )  # one more: it never runs out
        left: tuple[SampleRange, ...] = (*self.open, beyond)
        dealt = []
        for samples in wanted:
            taken, left = split_ranges(left, samples)
            dealt.append(taken)
        return SampleStream(left[-1].start, left[:-1]), tuple(dealt)

    def return_unused(self, spans: Iterable[SampleRange]) -> SampleStream:
        """Return the stream with unused spans added back; ranges that touch are joined.

        Raises:
            BugError: positions are open already, or were never dealt.

        >>> SampleStream(16).return_unused(
        ...     [SampleRange(12, 16), SampleRange(4, 6), SampleRange(6, 8)]
        ... )
        SampleStream(cursor=12, open=(SampleRange(start=4, stop=8),))
        """
        merged: list[SampleRange] = []
        for span in sorted([*self.open, *(span for span in spans if span.samples)]):
            if merged and span.start < merged[-1].stop:
                raise BugError(f"samples {span.start} … {merged[-1].stop - 1} came back twice")
            if merged and span.start == merged[-1].stop:
                merged[-1] = SampleRange(merged[-1].start, span.stop)
            else:
                merged.append(span)
        if merged and merged[-1].stop > self.cursor:
            raise BugError(
                f"samples up to {merged[-1].stop - 1} came back, dealt are those before "
                f"{self.cursor}"
            )
        at_the_end = bool(merged) and merged[-1].stop == self.cursor
        cursor = merged.pop().start if at_the_end else self.cursor
        return SampleStream(cursor, tuple(merged))

    def count_samples(
        self, steps: Sequence[int], batch: int, samples_per_epoch: int | None
    ) -> list[int]:
        """Return the samples that each island's steps[i] steps use, if dealt from here.

        Args:
            batch: samples per optimizer step of one island.
            samples_per_epoch: None for a stream without epochs.

        >>> SampleStream(8).count_samples([2, 2], batch=4, samples_per_epoch=10)
        [6, 6]
        """
        beyond = SampleRange(self.cursor, self.cursor + sum(steps) * batch)
        cuts = iter(cut_steps((*self.open, beyond), samples_per_epoch, batch))
        return [sum(stop - start for start, stop in islice(cuts, count)) for count in steps]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint."""
        return {"cursor": self.cursor, "open": [[span.start, span.stop] for span in self.open]}

    @staticmethod
    def from_json(kept: Any) -> SampleStream:
        """Parse the JSON values of a checkpoint; raise CheckpointError for anything else."""
        try:
            found = SampleStream(kept["cursor"], tuple(SampleRange(*pair) for pair in kept["open"]))
            ends = [end for span in found.open for end in (span.start, span.stop)]
            ends.append(found.cursor)
            sound = all(type(end) is int for end in ends) and ends[0] >= 0
            sound = sound and all(before < after for before, after in pairwise(ends))
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise CheckpointError(
                f"the islands' place in the data is damaged: {kept}; a cursor and a sorted list of "
                f"open ranges before it are wanted"
            )
        return found


def split_ranges(
    spans: Sequence[SampleRange], samples: int
) -> tuple[tuple[SampleRange, ...], tuple[SampleRange, ...]]:
    """Split spans into the first `samples` samples and the rest.

    Raises:
        BugError: the spans have fewer samples, or the number is negative.
    """
    first, left = [], []
    missing = samples
    for span in spans:
        cut = min(span.stop, span.start + missing)
        missing -= cut - span.start
        if cut > span.start:
            first.append(SampleRange(span.start, cut))
        if cut < span.stop:
            left.append(SampleRange(cut, span.stop))
    if missing or samples < 0:
        raise BugError(f"{samples} samples of spans that hold {sum(s.samples for s in spans)}")
    return tuple(first), tuple(left)


def drop_consumed(spans: Sequence[SampleRange], consumed: int) -> tuple[SampleRange, ...]:
    """Return an island's spans without the first `consumed` samples.

    Raises:
        BugError: the spans have fewer samples, or the number is negative.

    >>> drop_consumed((SampleRange(8, 10), SampleRange(100, 104)), consumed=3)
    (SampleRange(start=101, stop=104),)
    """
    return split_ranges(spans, consumed)[1]


def cut_steps(
    spans: Iterable[SampleRange], samples_per_epoch: int | None, batch: int
) -> list[tuple[int, int]]:
    """Cut spans into optimizer steps: (start, stop) positions of at most `batch` samples each.

    No step straddles a span or an epoch, so the last one of either may be short.

    Args:
        samples_per_epoch: None for a stream without epochs.
        batch: samples per step of one island.

    >>> cut_steps((SampleRange(0, 3), SampleRange(8, 14)), samples_per_epoch=10, batch=4)
    [(0, 3), (8, 10), (10, 14)]
    """
    steps = []
    for span in spans:
        start = span.start
        while start < span.stop:
            most = min(batch, span.stop - start)
            stop = cut_step(start, samples_per_epoch, most, micro_batch=most)[0].stop
            steps.append((start, stop))
            start = stop
    return steps


def inner_steps(period: int, speeds: Sequence[float | None]) -> list[int]:
    """Return the inner steps of each island in a round, by its speed; None: as the fastest.

    Args:
        period: H, the steps of the fastest island; every island runs at least 1.
        speeds: measured steps per second of each island; None or 0: not measured yet.

    >>> inner_steps(50, [4.0, 1.0, None, 0.01])
    [50, 12, 50, 1]
    """
    fastest = max((speed for speed in speeds if speed), default=1.0)
    return [max(1, round(period * (speed or fastest) / fastest)) for speed in speeds]
