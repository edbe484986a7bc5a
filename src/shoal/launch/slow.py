"""Names the rank for which the others wait, and the part of the step in which it is slow.

Where ranks meet in collectives, a slow one makes all slow, and every other rank's time looks like
communication. Each rank keeps in its page how long it was in each part of its last steps without
waiting for a collective (base/watch_page.py); here those times are compared, so nothing is sent and
nobody waits. Over `STEPS` steps a rank stands out in a part

    if its own time there exceeds the median of the others', step by step, in the median by more
    than `SHARE` of its step and by `LEAST_S`, and
    if of all ranks it waits least, and the others wait for most of that time.

In two windows in a row it is told, once; again only after it was like the others for as long. One
long step changes no median, and where all ranks are disturbed alike none waits least for it.

Limits   ranks of this machine only · the sum over ranks is taken for waiting, whole · a pipeline's
         stages, and ranks with unequal numbers of micro-batches, are not compared where that counts
         · on a GPU the host's time counts: kernels that are slow are waited for in the sum, unseen
         · what takes long in fewer than half of the steps is not told
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.base.events import Emit
from shoal.base.phases import BACKWARD, DATA, HOOKS, PASSES, SUM, UPDATE
from shoal.base.watch_page import PARTS, WAIT, Watched

STEPS, WINDOWS = 16, 2
"""Steps of a window · windows in a row: a rank is told within 50 steps wherever it began."""
SHARE, LEAST_S, WAITED = 0.15, 0.002, 0.5
"""Of a step, and seconds a step, that are worth a word · the share of them that others wait."""

Row = Sequence[float]
"""A step of one rank: seconds by part without waiting, then waiting (`Watched.steps`)."""


@dataclass(frozen=True)
class Slow:
    """A rank and the part in which it stands out: by seconds a step, and as a share of its step."""

    rank: int
    part: int
    extra_s: float
    share: float


def stands_out(window: Sequence[Sequence[Row]]) -> list[Slow]:
    """Ranks that the others wait for, by `window[step][rank]`; the longest first.

    >>> ahead, late = (0, 0.01, 0.02, 0, 0, 0, 0, 0.05), (0, 0.06, 0.02, 0, 0, 0, 0, 0)
    >>> (one,) = stands_out([[ahead, late]] * 16)
    >>> one.rank, PARTS[one.part], round(one.extra_s, 3)
    (1, 'data', 0.05)
    """
    ranks = range(len(window[0]))
    # Whatever a rank does between its passes and its update, it waits there for the others.
    waits_s = [median(step[rank][WAIT] + step[rank][SUM] for step in window) for rank in ranks]
    found = []
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        waited_s = median(waits_s[other] for other in others) - waits_s[rank]
        if waits_s[rank] > min(waits_s):
            continue
        whole_s = median(math.fsum(one for one in step[rank] if one == one) for step in window)
        for part in (DATA, PASSES, BACKWARD, UPDATE, HOOKS):
            if any(step[one][part] != step[one][part] for step in window for one in ranks):
                continue  # NaN: not to be compared
            extra_s = median(
                step[rank][part] - median(step[other][part] for other in others) for step in window
            )
            if extra_s > max(LEAST_S, SHARE * whole_s) and waited_s > WAITED * extra_s:
                found.append(Slow(rank, part, extra_s, extra_s / whole_s))
    return sorted(found, key=lambda one: -one.extra_s)


class SlowRanks:
    """Compares the ranks' pages: `begin` at each start of them, `look` often.

    told   (rank, part) of those that were told and have not recovered
    """

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.begin()

    def begin(self) -> None:
        """Ranks start; what they did before counts no more."""
        self.told: set[tuple[int, int]] = set()
        self._in_a_row: dict[tuple[int, int], int] = {}
        self._next = 0

    def look(self, pages: Sequence[Watched], steps: Sequence[int]) -> None:
        """Compare, if all ranks have done a window's steps more; `steps` done by each."""
        done = min(steps)
        if len(pages) < 2 or not done:
            return
        if not self._next or done < self._next - STEPS:  # first steps, or steps done again
            self._next = done + STEPS
        if done >= self._next:
            self.compare([page.steps() for page in pages], done)

    def compare(self, kept: Sequence[Mapping[int, Row]], last: int) -> None:
        """Compare the ranks' steps up to `last`, and tell who is slow, or no longer is."""
        self._next = last + STEPS
        numbers = range(last - STEPS + 1, last + 1)
        if not all(number in rows for rows in kept for number in numbers):
            return
        separate = any(rows[last][BACKWARD] for rows in kept)
        found = {
            (one.rank, one.part): one
            for one in stands_out([[rows[number] for rows in kept] for number in numbers])
        }
        for key in {*found, *self._in_a_row, *self.told}:
            before = self._in_a_row.get(key, 0)
            now = (max(0, before) + 1) if key in found else (min(0, before) - 1)
            self._in_a_row[key] = now
            if now <= -WINDOWS:
                self.told.discard(key)
                del self._in_a_row[key]
        for key, one in found.items():
            if self._in_a_row[key] < WINDOWS or key in self.told:
                continue
            self.told.add(key)
            self.emit(
                "slow_rank",
                rank=one.rank,
                step=last,
                host=os.uname().nodename,
                phase="forward" if separate and one.part == PASSES else PARTS[one.part],
                extra_s=round(one.extra_s, 6),
                share=round(one.share, 4),
            )
