"""Notices that the ranks of a run stand still, from outside of them, and learns when that is late.

Each rank writes what it does into a page of memory (base/watch_page.py); the supervisor reads all
pages ten times a second. As long as any rank's page changes, the run lives: the others may wait for
that one. When none changes, the deadline of what the ranks are in counts:

    step        10 × the median step + 5 s, once five steps were seen, or told in metrics.jsonl
    others      (save, validation, …) the same, and 3 × the longest silence that one of them had
    not learnt  600 s and more (`FIRST_S`): what nobody has seen yet may take long

Time counts by the watch's own clock, which stands while this process gets no core: then the ranks
may get none either. Shortly before a deadline the ranks are asked where they are; of their answers
`hung.py` makes who is at fault. It is told at the deadline. A rank that is stopped, or in a
collective that the others are not in, will not come back: all are ended at once. One that is busy
in code of its own may be slow and not hung: it is waited for `patience` more; if it comes back, the
deadline of its kind is never below what that took.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from shoal.base.events import Emit
from shoal.base.lines import is_number, read_object
from shoal.base.phases import DATA, HOOKS, NOWHERE
from shoal.base.watch_page import can_watch
from shoal.launch.hung import STOPPED, Hang, Seen, find_culprit, kernel_state, write_stacks
from shoal.launch.page_reader import PageRead, Told, Watched
from shoal.launch.slow import SlowRanks
from shoal.launch.unit_calls import find_unlike_units
from shoal.launch.unlike import find_unlike

EVERY_S = 0.1
LONGEST_TICK_S = 0.5
"""Of a longer pause between two looks only so much counts."""
STEPS, MEDIANS, MARGIN_S = 5, 10.0, 5.0
ASK_S, ANSWER_S = 2.0, 1.5
"""Ranks are asked so long before a deadline · and may take so long to answer."""
AGAIN_S = 0.3
"""Where two answers are compared, between the first and the next request."""
TIMES, COMES_BACK = 3.0, 1.5

UNITS_S = 5.0
"""Silence after which it is compared which units ranks gather: what differs there never ends."""

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
    "finish the last save": 3600.0,  # as long as ranks wait for each other's (second_group.py)
    HOOK: 600.0,  # a user's own, now and then a long one
}
"""Patience with what cannot be learnt from the times before."""

AWAY_PATIENCE_S = 45.0
"""How long a machine is waited for after it was told to be away."""

_BY_PHASE = {
    "compile, first step": FIRST,
    "steps": STEP,  # of a row of shoal compare
    "merge with the other islands": MERGE,
    "meet the other islands": MERGE,
}


def kind_of(told: Told) -> str:
    """What a rank is in: an outermost phase, or a step. Each has a deadline of its own.

    >>> from dataclasses import replace
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


class Watchable(Protocol):
    """A rank's process; code: None while it runs."""

    @property
    def rank(self) -> int:
        """Which rank."""

    @property
    def pid(self) -> int:
        """Of its process."""

    @property
    def code(self) -> int | None:
        """How it ended."""


class Learnt:
    """The deadlines of one run, by kind; they outlive a restart.

    `heard` learns; `deadline_s` and `patience_s` say what was learnt.
    first_s   the deadline of what was not learnt yet, where FIRST_S does not say more
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

        in_data   they waited for data · told   the silence had passed its deadline
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


class Watch:
    """Watches the ranks of a run: `begin` at each start of them, `look` often.

    folder     the run's: stacks go to its logs
    patience_s how long a rank that may only be slow is waited for after it was told to be late
    times_s    gives what the run's own record tells of its steps: short ones pass between two looks
    twice      who is at fault is said of ranks that stood at the same lines when they were asked
               before: those of a user's own loop may be in collectives that no page tells of.
               Where all are between two calls into Shoal, that has a deadline of its own
    first_s    the deadline of what was not learnt yet (`Learnt`)
    """

    def __init__(
        self,
        folder: Path,
        emit: Emit,
        patience_s: float,
        times_s: Callable[[], Sequence[float]] = tuple,
        *,
        twice: bool = False,
        first_s: float = OTHER_FIRST_S,
    ) -> None:
        self.folder, self.emit, self.least_s, self.times_s = folder, emit, patience_s, times_s
        self.twice = twice
        self.learnt = Learnt(first_s)
        self.slow = SlowRanks(emit)
        self.pages: list[PageRead] = []
        self.clock_s = 0.0
        self._looked_s = time.monotonic()
        self._told: list[Told] = []
        self._number, self._unlike_told = 0, -1
        self._quiet()

    def begin(self, processes: int) -> list[str]:
        """Make a page for each rank of an attempt; their paths, none where this cannot be had."""
        self.close()
        made: list[Watched] = []
        if can_watch():
            try:
                for rank in range(processes):
                    made.append(Watched(f"shoal rank {rank}"))
            except OSError:  # no files left to open: the run goes on unwatched
                while made:
                    made.pop().close()
        self.pages = list(made)
        self.slow.begin()
        self._told = []
        self._compared = set[int]()
        self._step = (0, self.clock_s)
        self._quiet()
        return [page.path for page in made]

    def close(self) -> None:
        """Give the pages back."""
        for page in self.pages:
            page.close()
        self.pages = []

    def look(self, workers: Sequence[Watchable]) -> Hang | None:
        """Look, if it is time; the hang for which all ranks are to be ended now, if any."""
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < EVERY_S or not self.pages:
            return None
        self._looked_s = now_s
        self.clock_s += min(passed_s, LONGEST_TICK_S)
        told = [page.read() for page in self.pages]
        if not any(one.live for one in told) or all(one.code is not None for one in workers):
            return None
        before, self._told = self._told, told
        if before != told:
            self._heard(before)
            self.slow.look(self.pages, [one.step for one in told])
            return self.compare(workers)
        return self._silent([worker for worker in workers if worker.code is None])

    def left(self, workers: Sequence[Watchable]) -> dict[int, str]:
        """Ranks that ended with status 0 and have not closed their page: where each of them was."""
        found = {}
        for worker in workers if self.pages else ():
            if worker.code == 0 and (told := self.pages[worker.rank].read()).live:
                steps = read_object(self.folder / "plan.json").get("steps")
                of = f" of {steps}" if is_number(steps) else ""
                at = f"after step {told.step}{of}" if told.step else "before its first step"
                found[worker.rank] = f" {at}, in {told.doing}"
        return found

    def compare(self, workers: Sequence[Watchable], *, dead: bool = False) -> Hang | None:
        """Ranks whose collectives differ, if there are: what they sum is wrong.

        dead   one died, maybe of that: what ranks keep of a step under way counts too
        """
        if dead and (units := self.unlike_units(workers)) is not None:
            return replace(units, status=1)  # that of a rank that died
        kept = [page.calls(self._compared) for page in self.pages]
        for step in sorted(set(kept[0]).intersection(*kept[1:])) if len(kept) > 1 else ():
            if step < 0 and not dead:
                continue
            self._compared.add(step)
            unlike = find_unlike(step, {rank: one[step] for rank, one in enumerate(kept)})
            if unlike is None or not (unlike.certain or step > 0 > self._unlike_told):
                continue
            rank, line = unlike.rank, unlike.line
            self._unlike_told = step
            self.emit("collectives_differ", rank=rank, step=abs(step), text=line)
            if unlike.certain:
                pid, host = workers[rank].pid, self.pages[rank].host
                return Hang(rank, pid, host, "a step", "", line, STEP, 0.0, True, unlike=True)
            self.emit("notice", text=line)
        return None

    def unlike_units(self, workers: Sequence[Watchable]) -> Hang | None:
        """Tell of ranks that gather different units, if there are: they never come together."""
        told = {rank: page.read() for rank, page in enumerate(self.pages)}
        kinds = {rank: kind_of(one) for rank, one in told.items()}
        kinds = {rank: kind if kind in IN_ONE_ORDER else "" for rank, kind in kinds.items()}
        unlike = find_unlike_units(dict(enumerate(self.pages)), told, kinds)
        if unlike is None:
            return None
        rank = unlike.rank
        inside = told[rank].phases.split(": ")[0] if kinds[rank] == VALIDATION else ""
        step = told[rank].step + (not inside)
        line = unlike.line(inside or f"step {step}")
        self.emit("collectives_differ", rank=rank, step=step, text=line)
        pid = next((worker.pid for worker in workers if worker.rank == rank), 0)
        host = self.pages[rank].host
        return Hang(rank, pid, host, "a step", "", line, STEP, 0.0, True, unlike=True, status=2)

    def _heard(self, before: list[Told]) -> None:
        """Some rank did something."""
        silence_s = self.clock_s - self._since_s
        busy = [one for one in before if not one.waits] or before
        kinds = {kind_of(one) for one in busy}
        in_data = START in kinds or (STEP in kinds and any(one.part == DATA for one in busy))
        self.learnt.heard(kinds, silence_s, in_data=in_data, told=self._late is not None)
        if self._late is not None:
            who = f"rank {self._late.rank}"
            self.emit("notice", text=f"{who} goes on after {silence_s:.0f} s: slow, not hung")
        self._quiet()
        step, now_s = max(one.step for one in self._told), self.clock_s
        last, last_s = self._step
        if any(kind_of(one) not in (STEP, HOOK) for one in self._told) or step < last:
            self._step = (-1, now_s)  # what is under way is no plain step
        elif last < 0 or step > last:
            if 0 < last < step:
                count = step - last  # several at a time, where they are shorter than a look
                self.learnt.steps_s.extend([(now_s - last_s) / count] * min(count, STEPS))
            self._step = (step, now_s)

    def _quiet(self) -> None:
        """A silence begins."""
        self._since_s = self.clock_s
        self._late: Hang | None = None
        self._asked_s = self._ended_s = 0.0
        self._stood: object = None
        self._found: Hang | None = None
        self._next_s = -1.0
        self._units_compared = False

    def _silent(self, workers: Sequence[Watchable]) -> Hang | None:
        """No rank did anything since the last look."""
        silence_s = self.clock_s - self._since_s
        if self.learnt.usual_s is None:
            times_s = max(self.times_s(), self._paged_s(), key=len)
            self.learnt.steps_s.extend(times_s if len(times_s) >= STEPS else ())
        if self._late is not None:
            return self._late if silence_s >= self._ended_s else None
        if self._asked_s:
            answers = self._answers(workers)
            if answers is not None and self._compares_units():
                self._units_compared = True
                if (unlike := self.unlike_units(workers)) is not None:
                    return unlike
            elif answers is not None:
                self._find_culprit(workers, answers, silence_s)
        elif silence_s >= UNITS_S and self._compares_units():
            self._ask()
        elif self._found is None or silence_s >= self._next_s:
            least_s = min(self.learnt.deadline_s(kind_of(one)) for one in self._told)
            ask_s = ASK_S + self.twice * (ANSWER_S + AGAIN_S)
            if silence_s >= max(self._next_s, least_s - ask_s):
                self._ask()
        if self._found is not None and silence_s >= self._found.deadline_s:
            return self._tell(self._found, silence_s)
        return None

    def _paged_s(self) -> list[float]:
        """Seconds of the last steps by a page: many may pass between two looks."""
        rows = self.pages[0].steps().values()
        return [time_s for row in rows if math.isfinite(time_s := sum(map(abs, row[1:])))]

    def _ask(self) -> None:
        """Ask all ranks where they are; with the answers of other nodes come their ranks' units."""
        self._asked_s = self.clock_s
        for page in self.pages:
            page.ask()

    def _answers(self, workers: Sequence[Watchable]) -> dict[int, dict[str, Any] | None] | None:
        """The ranks' answers, once all have answered, or had time to."""
        answers = {worker.rank: self.pages[worker.rank].answer() for worker in workers}
        if None in answers.values() and self.clock_s - self._asked_s < ANSWER_S:
            return None
        self._asked_s = 0.0
        return answers

    def _compares_units(self) -> bool:
        """Tell whether this silence can show that ranks gather different units."""
        return not self._units_compared and self.pages[0].gathers_units

    def _find_culprit(
        self,
        workers: Sequence[Watchable],
        answers: Mapping[int, dict[str, Any] | None],
        silence_s: float,
    ) -> None:
        """Return the rank to blame, from the answers of the ranks."""
        if self.twice:
            before, self._stood = (
                self._stood,
                [one and one.get("stacks") for one in answers.values()],
            )
            if before != self._stood:
                self._found, self._next_s = None, silence_s + AGAIN_S
                return
        seen = [self.seen(worker, self._told[worker.rank], answers) for worker in workers]
        culprit = find_culprit(seen)
        if culprit and self.twice and all(one.letter == STOPPED for one in seen):
            why = "all processes are stopped, as by Ctrl-Z or a scheduler"
            culprit = replace(culprit, why=why, certain=False)  # and go on when that one likes
        if culprit is None:  # somebody looks at a rank with a debugger
            self._next_s = silence_s + ANSWER_S
            return
        kind = kind_of(culprit.of.told)
        if self.twice and all(one.between for one in seen):  # so nobody waits for anybody
            kind = BETWEEN
        if culprit.compiles:
            kind = FIRST
        if culprit.together:
            kind = max((kind_of(one.told) for one in seen), key=self.learnt.deadline_s)
        deadline_s = self.learnt.deadline_s(kind)
        if kind == MERGE and culprit.of.answer is not None and not culprit.certain:
            # It runs, and waits for other islands, by a deadline of its own: theirs is the fault.
            self._next_s = silence_s + deadline_s
            return
        self._found = culprit.hang(kind, deadline_s)
        self._found_seen = seen
        self._next_s = max(deadline_s - ASK_S, silence_s + ASK_S)

    def seen(
        self, worker: Watchable, told: Told, answers: Mapping[int, dict[str, Any] | None]
    ) -> Seen:
        """What is known of a rank."""
        return Seen(worker.rank, worker.pid, told, answers[worker.rank], kernel_state(worker.pid))

    def _tell(self, hang: Hang, silence_s: float) -> Hang | None:
        """Say who hangs; the hang itself if it is not worth waiting for."""
        self._number += 1
        path = self.folder / "logs" / f"hang-{self._number}.txt"
        wait_s = 0.0 if hang.certain else self.learnt.patience_s(hang.kind, self.least_s)
        if hang.away:  # the kernel ends ranks over a dead link before, where it can
            wait_s = AWAY_PATIENCE_S
        self._late, self._ended_s = hang, silence_s + wait_s
        self.emit(
            "hang",
            rank=hang.rank,
            host=hang.host,
            pid=hang.pid,
            phase=hang.phase,
            why=hang.why,
            collective=hang.collective,
            waited_s=round(silence_s, 2),
            deadline_s=round(hang.deadline_s, 2),
            ends_in_s=round(wait_s, 1) if wait_s < math.inf else None,
            stacks=write_stacks(path, self._found_seen),
        )
        return hang if hang.certain else None
