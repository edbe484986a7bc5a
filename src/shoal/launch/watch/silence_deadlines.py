"""Deadlines for the silence of ranks, learnt for each phase of a run.

    step        10 × the median step + 5 s, after five steps, or from metrics.jsonl
    others      (save, validation, …) the same, and 3 × the longest silence that one of them had
    not learnt  600 s and more (`FIRST_S`): a phase without a measurement may take long

A rank that is busy in its own code may be slow and not hung: the watch waits `patience` more. If it
recovers, the deadline of its kind is never below the time that it took.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

from shoal.launch.watch.page_reader import PageSnapshot
from shoal.wire.phases import HOOKS, NOWHERE

STEPS, MEDIANS, MARGIN_S = 5, 10.0, 5.0
TIMES, COMES_BACK = 3.0, 1.5
"""Deadlines are so many times the longest silence · a recovered rank may take so much longer."""

START, STEP, FIRST, HOOK, MERGE = "start", "step", "first step", "hooks", "merge"
VALIDATION = "validation"
IN_ONE_ORDER = (STEP, FIRST, VALIDATION)
"""Groups of ranks that make all their collectives of units in one order."""
BETWEEN = "between two calls"
"""A validation of the user's own, or a plot: never learnt, as its start is unknown."""
FIRST_S = {
    FIRST: 1800.0,  # compilers take minutes for a large model, without a sign of life
    MERGE: 86_400.0,  # islands wait for each other, by deadlines of their own
}
OTHER_FIRST_S, NEW_S = 600.0, 1800.0
"""Seconds of silence in phases that are not learnt yet: as long as a collective of torch may take.

And the additional time to read data, build a model, or compile the first step.
"""
MORE_S = {
    START: NEW_S,  # the first batch of a start may come after all that were read before
    "data": 86_400.0,  # prepared once, for hours, by code without a sign of life
    "save": 1800.0,  # a disk may stand still for minutes, and go on
    "finish the last save": 3600.0,  # as long as ranks wait for each other's (duplicate_group.py)
    HOOK: 600.0,  # a user's own, now and then a long one
}
"""Patience with phases that cannot be learnt from earlier ones."""

_BY_PHASE = {
    "compile, first step": FIRST,
    "steps": STEP,  # of a row of shoal compare
    "merge with the other islands": MERGE,
    "meet the other islands": MERGE,
}


def classify_phase(told: PageSnapshot) -> str:
    """Return the kind of a rank's phase: an outermost phase, or a step. Each has its own deadline.

    >>> from dataclasses import replace
    >>> from shoal.wire.phases import DATA
    >>> told = PageSnapshot(
    ...     True, 9, 1.0, 3, DATA, 7, 7, "all_reduce", 8, False, "validation 3/10: data"
    ... )
    >>> (
    ...     classify_phase(told),
    ...     classify_phase(replace(told, phases="")),
    ...     classify_phase(replace(told, part=NOWHERE)),
    ... )
    ('validation', 'step', 'validation')
    """
    if told.phases:
        outer = told.phases.split(": ")[0]
        name, _, count = outer.rpartition(" ")
        name = name if "/" in count else outer
        return _BY_PHASE.get(name, name)
    return {NOWHERE: START, HOOKS: HOOK}.get(told.part, STEP)


class SilenceDeadlines:
    """Learnt deadlines of one run, by kind; they outlive a restart.

    `learn_silence` learns; `deadline_s` and `patience_s` return what was learnt.

    Args:
        first_s: the deadline of kinds that are not learnt yet and have no longer one in FIRST_S.
    """

    def __init__(self, first_s: float = OTHER_FIRST_S) -> None:
        self.first_s = first_s
        self.steps_s: deque[float] = deque(maxlen=100)
        self.longest_s: dict[str, float] = {}
        self.came_back_s: dict[str, float] = {}
        self.data_s = 0.0
        self._under_way_s: dict[str, float] = {}

    @property
    def step_deadline_s(self) -> float | None:
        """Return 10 × the median step + 5 s; None before five steps."""
        if len(self.steps_s) < STEPS:
            return None
        return MEDIANS * statistics.median(self.steps_s) + MARGIN_S

    def is_learnt(self, kind: str) -> bool:
        """Return whether a phase of `kind` ended, and steps were measured."""
        return self.step_deadline_s is not None and (kind == STEP or kind in self.longest_s)

    def deadline_s(self, kind: str) -> float:
        """Return the seconds that all ranks may be silent while a busy rank is in `kind`."""
        usual_s = self.step_deadline_s
        if usual_s is None or not self.is_learnt(kind):
            return FIRST_S.get(kind, self.first_s)
        longest_s = 0.0 if kind == STEP else TIMES * self.longest_s[kind]
        return max(usual_s, longest_s, self.came_back_s.get(kind, 0.0))

    def patience_s(self, kind: str, least_s: float) -> float:
        """Return the seconds after its deadline that a busy rank may recover before it is hung.

        Args:
            kind: kind of the rank's phase, from `classify_phase`.
            least_s: lower bound.

        Returns:
            for steps, three times the longest wait for data, since an epoch begins as the run's
            first batch did; else a constant of the phase.
        """
        if kind == STEP:
            return max(least_s, TIMES * self.data_s)
        return max(least_s, MORE_S.get(kind, 0.0 if self.is_learnt(kind) else NEW_S))

    def learn_silence(
        self, kinds: Collection[str], silence_s: float, *, in_data: bool = False, told: bool = False
    ) -> None:
        """Update the deadlines of `kinds` after a silence of ranks in them has ended.

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
