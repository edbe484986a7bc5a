"""Detection of a rank for which the others wait, and of the part of the step in which it is slow.

If ranks meet in collectives, a slow one makes all slow, and every other rank's time looks like
communication. Each rank writes into its page how long it was in each part of its last steps without
waiting for a collective (wire/watch_page.py). This module compares those times, so nothing is sent
and no rank waits. Over `STEPS` steps a rank stands out in a part

    if its own time there exceeds the median of the others', step by step, in the median by more
    than `SHARE` of its step and by `LEAST_S`, and
    if of all ranks it waits least, and the others wait for most of that time.

Ranks may have different work by the plan, as pipeline stages have in their passes and in the
update. Then a rank's time there is compared with its own in calm windows before (at most `CALM` of
them), scaled by the change of the others' work. It stands out if it exceeds that as above, and the
others wait longer than before by `ROSE` of the excess. More is not required: a stage with spare
time first loses that.

A rank that stands out in two windows in a row is reported once, and again only after it was like
the others for as long. One long step changes no median, and a disturbance of all ranks makes none
wait least.

On a machine with more to do than cores, now one rank is late and now another. A rank that stands
out briefly (`LASTS`) and recovers is late by turns. As soon as another one is late after it, one
notice says that the machine is busy. From then on, only a rank that stays late is reported. A rank
whose excess is in fewer than `STEADY` of its steps waits for as long, too.

Limits   the sum over ranks counts as waiting, whole · steps in which ranks have unequal numbers
         of micro-batches are not compared where that counts · on a GPU the host's time counts:
         ranks wait for slow kernels in the sum, unseen · a delay in fewer than half of the steps
         is not reported
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from shoal.base.runlog.events import Emit
from shoal.launch.watch.page_reader import PageReader
from shoal.wire.phases import BACKWARD, DATA, HOOKS, PASSES, SUM, UPDATE
from shoal.wire.watch_page import PARTS, WAIT

STEPS, WINDOWS = 16, 2
"""Steps of a window · windows in a row: a rank is reported within 50 steps."""
SHARE, LEAST_S, WAITED = 0.15, 0.002, 0.5
"""Share of a step, and seconds per step, worth a report · the share of them that others wait."""

LASTS, LASTS_S, STEADY = 4, 5.0, 0.75
"""Windows, and seconds, from which a rank stays late · share of steps with half the excess."""

CALM, ROSE = 8, 0.25
"""Windows without a slow rank, of which a stage's usual times are made · see above."""

BUSY = (
    "ranks are late by turns, now one and now another: the machine is busy with other work, or has "
    "fewer cores than the ranks need; from now on only a rank that stays late is reported; "
    "try: ps -eo pid,psr,pcpu,comm --sort=-pcpu | head"
)

Row = Sequence[float]
"""A step of one rank: seconds by part without waiting, then waiting; signs as in a page."""
Usual = Sequence[Row]
"""By rank: seconds in each part and of waiting in a step, without signs."""


@dataclass(frozen=True)
class SlowPart:
    """A slow rank and its slow part: by seconds per step, and as a share of its step.

    Attributes:
        steady: share of the steps that have at least half of `extra_s`.
    """

    rank: int
    part: int
    extra_s: float
    share: float
    steady: float = 1.0


def detect_slow_ranks(
    window: Sequence[Sequence[Row]], usual: Usual | None = None
) -> list[SlowPart]:
    """Return ranks that the others wait for, by `window[step][rank]`; the slowest first.

    Args:
        usual: of windows before, for parts in which ranks have different work.

    >>> ahead, late = (0, 0.01, 0.02, 0, 0, 0, 0, 0.05), (0, 0.06, 0.02, 0, 0, 0, 0, 0)
    >>> (one,) = detect_slow_ranks([[ahead, late]] * 16)
    >>> one.rank, PARTS[one.part], round(one.extra_s, 3)
    (1, 'data', 0.05)
    """
    now = compute_medians(window)
    waits_s = [row[WAIT] for row in now]
    differ = {part for step in window for row in step for part in range(WAIT) if row[part] < 0}
    found = []
    for rank, own in enumerate(now):
        others = [other for other in range(len(now)) if other != rank]
        waited_s = median(waits_s[other] for other in others) - waits_s[rank]
        least = waits_s[rank] <= min(waits_s)
        load, rose_s = _compare_with_usual(usual, now, others) if usual else (1.0, 0.0)
        whole_s = median(math.fsum(abs(one) for one in step[rank] if one == one) for step in window)
        for part in (DATA, PASSES, BACKWARD, UPDATE, HOOKS):
            if any(row[part] != row[part] for row in now):
                continue  # NaN: not to be compared
            if part not in differ:
                extras_s = [
                    step[rank][part] - median(step[other][part] for other in others)
                    for step in window
                    if all(row[part] == row[part] for row in step)
                ]
                extra_s = median(extras_s)
                waited = least and waited_s > WAITED * extra_s
                waited = waited or (bool(differ) and rose_s > WAITED * extra_s)
            elif usual:
                extra_s = own[part] - load * usual[rank][part]
                extras_s = [abs(step[rank][part]) - load * usual[rank][part] for step in window]
                waited = rose_s > ROSE * extra_s
            else:
                continue
            if waited and extra_s > max(LEAST_S, SHARE * whole_s):
                steady = sum(one > extra_s / 2 for one in extras_s) / len(extras_s)
                found.append(SlowPart(rank, part, extra_s, extra_s / whole_s, steady))
    return sorted(found, key=lambda one: -one.extra_s)


def compute_medians(
    window: Sequence[Sequence[Row]], middle: Callable[[list[float]], float] = median
) -> Usual:
    """Return the median of each rank's steps, part by part; NaN if more than half of them are NaN.

    An epoch's short last step, in which some rank has fewer micro-batches, has no comparable part.
    """

    def of(values: Sequence[float]) -> float:
        known = [abs(one) for one in values if one == one]
        return middle(known) if 2 * len(known) > len(values) else math.nan

    ranks, parts = range(len(window[0])), range(WAIT + 1)
    return [[of([step[rank][part] for step in window]) for part in parts] for rank in ranks]


def _count_sum_as_wait(row: Row) -> Row:
    """Return a row in which the time between passes and update counts as waiting."""
    return [*row[:SUM], 0.0, *row[SUM + 1 : WAIT], row[WAIT] + row[SUM]]


def _compare_with_usual(usual: Usual, now: Usual, others: Sequence[int]) -> tuple[float, float]:
    """Return (factor of the others' work, seconds by which they wait longer) since `usual`."""

    def work_s(row: Row) -> float:
        return math.fsum(row[:WAIT])

    times = [work_s(now[one]) / work_s(usual[one]) for one in others if work_s(usual[one]) > 0]
    load = median(times) if times else 1.0
    return load, median(now[one][WAIT] - load * usual[one][WAIT] for one in others)


class SlowRankDetector:
    """Comparison of the ranks' pages: call `begin` at each start of them, and `look` often.

    Attributes:
        told: (rank, part) of reported ranks that have not recovered.
    """

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.reset()

    def reset(self) -> None:
        """Reset at a start of the ranks."""
        self.told: set[tuple[int, int]] = set()
        self._in_a_row: dict[tuple[int, int], int] = {}
        self._late: dict[tuple[int, int], tuple[int, float]] = {}  # windows, seconds in a row
        self._briefly_late, self._is_busy = set[int](), False
        self._calm: deque[Usual] = deque(maxlen=CALM)
        self._next = 0
        self._hosts: list[str] = []

    def poll(self, pages: Sequence[PageReader], steps: Sequence[int]) -> None:
        """Compare if all ranks have done a further window of steps; `steps` done by each."""
        done = min(steps)
        if len(pages) < 2 or not done:
            return
        if not self._next or done < self._next - STEPS:  # first steps, or steps done again
            self._next = done + STEPS
        if done >= self._next:
            self._hosts = [page.host for page in pages]
            self.compare([page.steps() for page in pages], done)

    def compare(self, kept: Sequence[Mapping[int, Row]], last: int) -> None:
        """Compare the ranks' steps up to `last`; report slow ranks, and forget recovered ones."""
        self._next = last + STEPS
        numbers = range(last - STEPS + 1, last + 1)
        if not all(number in rows for rows in kept for number in numbers):
            return
        separate = any(rows[last][BACKWARD] for rows in kept)
        window = [[_count_sum_as_wait(rows[number]) for rows in kept] for number in numbers]
        # The lower of two: one may hold the first slow steps.
        usual = compute_medians(self._calm, median_low) if self._calm else None
        found = {(one.rank, one.part): one for one in detect_slow_ranks(window, usual)}
        if not found:
            self._calm.append(compute_medians(window))
        for key in {*found, *self._in_a_row, *self.told}:
            before = self._in_a_row.get(key, 0)
            now = (max(0, before) + 1) if key in found else (min(0, before) - 1)
            self._in_a_row[key] = now
            if key in found:
                self._late[key] = now, now * STEPS * found[key].extra_s / found[key].share
            if now <= -WINDOWS:
                self.told.discard(key)
                del self._in_a_row[key]
                self._note_recovery(key)
        for key, one in found.items():
            if self._in_a_row[key] < WINDOWS or key in self.told or self._may_alternate(one):
                continue
            self.told.add(key)
            self.emit(
                "slow_rank",
                rank=one.rank,
                step=last,
                host=self._hosts[one.rank] if self._hosts else os.uname().nodename,
                phase="forward" if separate and one.part == PASSES else PARTS[one.part],
                extra_s=round(one.extra_s, 6),
                share=round(one.share, 4),
            )

    def _note_recovery(self, key: tuple[int, int]) -> None:
        """Remember a rank that was late briefly; forget such ranks after one that stayed late."""
        windows, seconds = self._late.pop(key, (0, 0.0))
        if self._has_lasted(windows, seconds):
            self._briefly_late.clear()
            self._is_busy = False
        elif windows >= WINDOWS:
            self._briefly_late.add(key[0])

    def _has_lasted(self, windows: int, seconds: float) -> bool:
        """Return whether a rank stays late; on a busy machine that takes twice as long."""
        times = 2 if self._is_busy else 1
        return windows >= times * LASTS and seconds >= times * LASTS_S

    def _may_alternate(self, one: SlowPart) -> bool:
        """Return whether ranks may be late in turn, so that none is slow; report that once."""
        if self._has_lasted(*self._late[one.rank, one.part]):
            return False
        by_turns = bool(self._briefly_late - {one.rank})
        if by_turns and not self._is_busy:
            self._is_busy = True
            self.emit("notice", text=BUSY)
        return by_turns or self._is_busy or one.steady < STEADY
