"""Learn how long ranks may be silent: what they are in, and its deadline.

    step        10 × the median step + 5 s, once five steps were seen, or told in metrics.jsonl
    others      (save, validation, …) the same, and 3 × the longest silence that one of them had
    not learnt  600 s and more (`FIRST_S`): what nobody has seen yet may take long

A rank that is busy in code of its own may be slow and not hung: it is waited for `patience` more;
if it comes back, the deadline of its kind is never below what that took.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

from shoal.launch.watch.page_reader import Told
from shoal.wire.phases import HOOKS, NOWHERE

STEPS, MEDIANS, MARGIN_S = 5, 10.0, 5.0
TIMES, COMES_BACK = 3.0, 1.5
"""Deadlines are so many times the longest silence · what came back may take so much longer."""

START, STEP, FIRST, HOOK, MERGE = "start", "step", "first step", "hooks", "merge"
VALIDATION = "validation"
IN_ONE_ORDER = (STEP, FIRST, VALIDATION)
"""Groups of ranks that make all their collectives of units in one order."""
BETWEEN = "between two calls"
"""A validation of the user's own, a plot: never learnt, as nobody tells where it begins."""
FIRST_S = {
    FIRST: 1800.0,  # compilers take minutes for a large model, and tell nothing
    MERGE: 86_400.0,  # islands wait for each other, by deadlines of their own
}
OTHER_FIRST_S, NEW_S = 600.0, 1800.0
"""Seconds of silence in what was not learnt yet: as long as a collective of torch's may take. And
how much longer data may be read, a model be built, the first step be compiled."""
MORE_S = {
    START: NEW_S,  # the first batch of a start may come after all that were read before
    "data": 86_400.0,  # prepared once, for hours, by code that tells nothing
    "save": 1800.0,  # a disk may stand still for minutes, and go on
    "finish the last save": 3600.0,  # as long as ranks wait for each other's (duplicate_group.py)
    HOOK: 600.0,  # a user's own, now and then a long one
}
"""Patience with what cannot be learnt from the times before."""

_BY_PHASE = {
    "compile, first step": FIRST,
    "steps": STEP,  # of a row of shoal compare
    "merge with the other islands": MERGE,
    "meet the other islands": MERGE,
}


def kind_of(told: Told) -> str:
    """What a rank is in: an outermost phase, or a step. Each has a deadline of its own.

    >>> from dataclasses import replace
    >>> from shoal.wire.phases import DATA
    >>> told = Told(True, 9, 1.0, 3, DATA, 7, 7, "all_reduce", 8, False, "validation 3/10: data")
    >>> kind_of(told), kind_of(replace(told, phases="")), kind_of(replace(told, part=NOWHERE))
    ('validation', 'step', 'validation')
    """
    if told.phases:
        outer = told.phases.split(": ")[0]
        name, _, count = outer.rpartition(" ")
        name = name if "/" in count else outer
        return _BY_PHASE.get(name, name)
    return {NOWHERE: START, HOOKS: HOOK}.get(told.part, STEP)


class Learnt:
    """The deadlines of one run, by kind; they outlive a restart.

    `heard` learns; `deadline_s` and `patience_s` say what was learnt.

    Args:
        first_s: the deadline of what was not learnt yet, where FIRST_S does not say more.
    """

    def __init__(self, first_s: float = OTHER_FIRST_S) -> None:
        self.first_s = first_s
        self.steps_s: deque[float] = deque(maxlen=100)
        self.longest_s: dict[str, float] = {}
        self.came_back_s: dict[str, float] = {}
        self.data_s = 0.0
        self._under_way_s: dict[str, float] = {}

    @property
    def usual_s(self) -> float | None:
        """10 × the median step + 5 s; None before five steps."""
        if len(self.steps_s) < STEPS:
            return None
        return MEDIANS * statistics.median(self.steps_s) + MARGIN_S

    def knows(self, kind: str) -> bool:
        """Whether `kind` was seen to its end, and steps were."""
        return self.usual_s is not None and (kind == STEP or kind in self.longest_s)

    def deadline_s(self, kind: str) -> float:
        """How long all ranks may be silent while one that is not waiting is in `kind`."""
        usual_s = self.usual_s
        if usual_s is None or not self.knows(kind):
            return FIRST_S.get(kind, self.first_s)
        longest_s = 0.0 if kind == STEP else TIMES * self.longest_s[kind]
        return max(usual_s, longest_s, self.came_back_s.get(kind, 0.0))

    def patience_s(self, kind: str, least_s: float) -> float:
        """How long it may go on after its deadline, where it may only be slow.

        An epoch begins as the run's first batch did: the longest wait for data.
        """
        if kind == STEP:
            return max(least_s, TIMES * self.data_s)
        return max(least_s, MORE_S.get(kind, 0.0 if self.knows(kind) else NEW_S))

    def heard(
        self, kinds: Collection[str], silence_s: float, *, in_data: bool = False, told: bool = False
    ) -> None:
        """Ranks were in `kinds`, silent for so long, and went on.

        Args:
            in_data: they waited for data.
            told: the silence had passed its deadline.
        """
        for kind in [kind for kind in self._under_way_s if kind not in kinds]:
            longest_s = self._under_way_s.pop(kind)
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), longest_s)
        for kind in kinds:
            self._under_way_s[kind] = max(self._under_way_s.get(kind, 0.0), silence_s)
            if told:
                self.came_back_s[kind] = COMES_BACK * silence_s
        if in_data:
            self.data_s = max(self.data_s, silence_s)
