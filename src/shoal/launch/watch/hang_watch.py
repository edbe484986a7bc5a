"""Hang detection from outside of the ranks, with deadlines that it learns.

Each rank writes its progress into a page of memory (wire/watch_page.py); the supervisor reads all
pages ten times a second. As long as any rank's page changes, the run lives: the others may wait for
that rank. When none changes, the deadline of the ranks' phase counts (`silence_deadlines.py`).

Time counts by the watch's own clock, which stops while this process gets no core: then the ranks
may get none either. Shortly before a deadline the watch asks the ranks for their positions, and
`blamed_rank.py` derives the rank to blame. The watch reports it at the deadline. A rank that is
stopped, or in a collective that the others are not in, cannot recover: all are ended at once. After
seconds they are ended if ranks made different calls of a run (`call_mismatch.py`), ran different
blocks (`unit_mismatch.py`), or one is alone in a collective of the user's own. A rank that is busy
in its own code may be slow and not hung: the watch waits `patience` more. If it recovers, the
deadline of its kind is never below the time that it took.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shoal.base.runlog.damaged_lines import is_number, read_object
from shoal.base.runlog.events import Emit
from shoal.launch.watch.blamed_rank import (
    STOPPED,
    BlamedRank,
    Hang,
    RankEvidence,
    blame_rank,
    kernel_state,
    write_stacks,
)
from shoal.launch.watch.call_mismatch import (
    Answers,
    compare_calls,
    detect_caught_error,
    format_call_mismatch,
    format_waiting_line,
    has_fewer_calls,
)
from shoal.launch.watch.collective_mismatch import compare_collectives
from shoal.launch.watch.device_records import DeviceRecordFile, DeviceSampler
from shoal.launch.watch.page_reader import OwnedPage, PageReader, PageSnapshot
from shoal.launch.watch.process_records import ProcessRecordFile
from shoal.launch.watch.silence_deadlines import (
    BETWEEN,
    FIRST,
    HOOK,
    IN_ONE_ORDER,
    MERGE,
    OTHER_FIRST_S,
    START,
    STEP,
    STEPS,
    VALIDATION,
    SilenceDeadlines,
    classify_phase,
)
from shoal.launch.watch.slow_ranks import SlowRankDetector
from shoal.launch.watch.step_records import StepRecordFile
from shoal.launch.watch.unit_mismatch import compare_units
from shoal.wire.phases import DATA
from shoal.wire.watch_page import supports_watch_pages

EVERY_S = 0.1
LONGEST_TICK_S = 0.5
"""At most so much of a longer pause between two readings counts."""
ASK_S, ANSWER_S = 2.0, 1.5
"""Seconds before a deadline at which ranks are asked · that they may take to answer."""
AGAIN_S = 0.3
"""Seconds between two requests whose answers are compared."""

UNLIKE_S, ALONE_S, WAITING_S = 5.0, 8.0, 30.0
"""Silence after which calls and units of ranks are compared, since a difference never ends · after
which one rank alone in a collective of the user's own is reported · after which a line reports the
ranks that wait and for whom, and again after twice that, and so on.
"""

AWAY_PATIENCE_S = 45.0
"""Seconds to wait for a machine after it was reported as away."""


class WatchedProcess(Protocol):
    """Process of a rank; code: None while it runs."""

    @property
    def rank(self) -> int:
        """Return the rank."""

    @property
    def pid(self) -> int:
        """Return the pid."""

    @property
    def code(self) -> int | None:
        """Return the exit code; None while the process runs."""


class HangWatch:
    """Watch over the ranks of a run: call `begin` at each start of them, and `look` often.

    Args:
        folder: the run's: stacks go to its logs.
        patience_s: seconds to wait for a rank that may only be slow, after it was reported.
        times_s: returns step times from the run's own record: short steps pass between two
            readings.
        twice: blame a rank only if the ranks stood at the same lines in the request before. Ranks
            of a user's own loop may be in collectives that no page shows. If all are between two
            calls into Shoal, a deadline of its own counts.
        first_s: the deadline of phases that are not learnt yet (`SilenceDeadlines`).
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
        self.learnt = SilenceDeadlines(first_s)
        self.slow = SlowRankDetector(emit)
        self.pages: list[PageReader] = []
        self.own: Mapping[int, PageReader] = {}
        self.records, self.sampler = StepRecordFile(folder), DeviceSampler()
        self.devices, self.processes = DeviceRecordFile(folder), ProcessRecordFile(folder)
        self.clock_s = 0.0
        self._looked_s = time.monotonic()
        self._told: list[PageSnapshot] = []
        self._number, self._unlike_told = 0, -1
        self._start_silence()

    def start_attempt(self, processes: int) -> list[str]:
        """Make a page for each rank of an attempt; return their paths, [] if it fails."""
        self.close()
        made: list[OwnedPage] = []
        if supports_watch_pages():
            try:
                for rank in range(processes):
                    made.append(OwnedPage(f"shoal rank {rank}"))
            except OSError:  # no files left to open: the run continues unwatched
                while made:
                    made.pop().close()
        self.pages, self.own = list(made), dict(enumerate(made))
        self.records.reset()
        self.slow.reset()
        self._told = []
        self._compared = set[int]()
        self._step = (0, self.clock_s)
        self._start_silence()
        return [page.path for page in made]

    def keep(self, folder: Path | None, node: int, ranks: Sequence[int]) -> None:
        """Set the ranks of the pages, once they are known, and the run's folder."""
        self.folder = folder or Path(os.devnull)
        self.own = dict(zip(ranks, self.pages, strict=True))
        self.records, self.devices = (
            StepRecordFile(self.folder, node),
            DeviceRecordFile(self.folder),
        )
        self.processes = ProcessRecordFile(self.folder)

    def close(self) -> None:
        """Close the pages."""
        self.records.append_steps(self.own)
        self.sampler.close()
        for page in self.pages:
            page.close()
        self.pages, self.own = [], {}

    def poll(self, workers: Sequence[WatchedProcess]) -> Hang | None:
        """Read the pages if it is time; return the hang for which all ranks must end, if any."""
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < EVERY_S or not self.pages:
            return None
        self._looked_s = now_s
        self.clock_s += min(passed_s, LONGEST_TICK_S)
        self.record_devices()
        told = [page.read() for page in self.pages]
        if told != self._told:
            self.records.append_steps(self.own)
        if any(one.step for one in told):
            self.processes.append_sample(workers, self.own)
        if not any(one.live for one in told) or all(one.code is not None for one in workers):
            return None
        before, self._told = self._told, told
        if before != told:
            self._end_silence(before)
            pairs = zip(self.pages, told, strict=True)
            self.slow.poll(self.pages, [page.recorded_step(one.step) for page, one in pairs])
            return self.compare(workers)
        return self._handle_silence([worker for worker in workers if worker.code is None])

    def record_devices(self) -> None:
        """Write the devices of this machine if a sample of them is due; it waits for nothing."""
        if self.sampler.path is None or not self.folder.is_dir():
            return
        if (found := self.sampler.poll()) is not None:
            self.devices.append_sample(os.uname().nodename, found)

    def left(self, workers: Sequence[WatchedProcess]) -> dict[int, str]:
        """Return the positions of ranks that ended with status 0 without closing their page."""
        found = {}
        for worker in workers if self.pages else ():
            if worker.code == 0 and (told := self.pages[worker.rank].read()).live:
                steps = read_object(self.folder / "plan.json").get("steps")
                of = f" of {steps}" if is_number(steps) else ""
                at = f"after step {told.step}{of}" if told.step else "before its first step"
                found[worker.rank] = f" {at}, in {told.activity}"
        return found

    def compare(self, workers: Sequence[WatchedProcess], *, dead: bool = False) -> Hang | None:
        """Return ranks whose collectives differ, if there are: their sums are wrong.

        Args:
            dead: a rank died, maybe of that: the calls of a step under way count too.
        """
        if dead and (unlike := self.report_mismatch(workers)) is not None:
            return replace(unlike, status=1)  # as of a rank that died
        kept = [page.calls(self._compared) for page in self.pages]
        for step in sorted(set(kept[0]).intersection(*kept[1:])) if len(kept) > 1 else ():
            if step < 0 and not dead:
                continue
            self._compared.add(step)
            found = compare_collectives(step, {rank: one[step] for rank, one in enumerate(kept)})
            if found is None or not (found.certain or step > 0 > self._unlike_told):
                continue
            rank, line = found.rank, found.line
            self._unlike_told = step
            self.emit("collectives_differ", rank=rank, step=abs(step), text=line)
            if found.certain:
                pid, host = workers[rank].pid, self.pages[rank].host
                return Hang(rank, pid, host, "a step", "", line, STEP, 0.0, True, unlike=True)
            self.emit("notice", text=line)
        return None

    def report_mismatch(
        self, workers: Sequence[WatchedProcess], answers: Answers | None = None
    ) -> Hang | None:
        """Report ranks that made other calls or ran other blocks, if there are: they never meet.

        Args:
            answers: of the ranks, with the user's lines; None: one has died, and none was asked.
        """
        calls = compare_calls(dict(enumerate(self.pages)))
        if calls:
            now = {rank: self.pages[rank].read().inside for rank in calls}
            places = {rank: (answers or {}).get(rank) for rank in calls if now[rank] == calls[rank]}
            return self._report_call_mismatch(calls, workers, places, met=answers is None)
        return self._report_unit_mismatch(workers)

    def _report_unit_mismatch(self, workers: Sequence[WatchedProcess]) -> Hang | None:
        told = {rank: page.read() for rank, page in enumerate(self.pages)}
        kinds = {rank: classify_phase(one) for rank, one in told.items()}
        kinds = {rank: kind if kind in IN_ONE_ORDER else "" for rank, kind in kinds.items()}
        unlike = compare_units(dict(enumerate(self.pages)), told, kinds)
        if unlike is None:
            return None
        rank = unlike.rank
        inside = told[rank].phases.split(": ")[0] if kinds[rank] == VALIDATION else ""
        step = told[rank].step + (not inside)
        line = unlike.line(inside or f"step {step}")
        self.emit("collectives_differ", rank=rank, step=step, text=line)
        return self._make_mismatch_hang(rank, line, workers)

    def _report_call_mismatch(
        self,
        calls: dict[int, str],
        workers: Sequence[WatchedProcess],
        answers: Answers,
        *,
        met: bool = False,
    ) -> Hang:
        """Report ranks in different calls, the first of which is one of the smallest group."""
        return self._report_mismatch_line(
            next(iter(calls)), format_call_mismatch(calls, answers, met=met), workers
        )

    def _report_mismatch_line(
        self, rank: int, line: str, workers: Sequence[WatchedProcess]
    ) -> Hang:
        step = self.pages[rank].read().step + 1
        self.emit("collectives_differ", rank=rank, step=step, text=line)
        return self._make_mismatch_hang(rank, line, workers)

    def _make_mismatch_hang(self, rank: int, line: str, workers: Sequence[WatchedProcess]) -> Hang:
        pid = next((worker.pid for worker in workers if worker.rank == rank), 0)
        host = self.pages[rank].host
        return Hang(rank, pid, host, "a step", "", line, STEP, 0.0, True, unlike=True, status=2)

    def _end_silence(self, before: list[PageSnapshot]) -> None:
        """Learn from a silence that ended: some rank made progress."""
        silence_s = self.clock_s - self._since_s
        busy = [one for one in before if not one.waits] or before
        kinds = {classify_phase(one) for one in busy}
        in_data = START in kinds or (STEP in kinds and any(one.part == DATA for one in busy))
        self.learnt.learn_silence(kinds, silence_s, in_data=in_data, told=self._late is not None)
        late = self._late
        if late is not None and before[late.rank].changes != self._told[late.rank].changes:
            who = f"rank {late.rank}"
            self.emit("notice", text=f"{who} goes on after {silence_s:.0f} s: slow, not hung")
        self._start_silence()
        step, now_s = max(one.step for one in self._told), self.clock_s
        last, last_s = self._step
        if any(classify_phase(one) not in (STEP, HOOK) for one in self._told) or step < last:
            self._step = (-1, now_s)  # the present phase is no plain step
        elif last < 0 or step > last:
            if 0 < last < step:
                count = step - last  # several at a time, where they are shorter than a look
                self.learnt.steps_s.extend([(now_s - last_s) / count] * min(count, STEPS))
            self._step = (step, now_s)

    def _start_silence(self) -> None:
        """Restart the measurement of the time without progress."""
        self._since_s = self.clock_s
        self._late: Hang | None = None
        self._asked_s = self._ended_s = 0.0
        self._stood: object = None
        self._found: Hang | None = None
        self._next_s = -1.0
        self._ask_at_s = UNLIKE_S

    def _handle_silence(self, workers: Sequence[WatchedProcess]) -> Hang | None:
        """Handle a reading without progress of any rank; return the hang to end the ranks for."""
        silence_s = self.clock_s - self._since_s
        if self.learnt.step_deadline_s is None:
            times_s = max(self.times_s(), self._page_step_times_s(), key=len)
            self.learnt.steps_s.extend(times_s if len(times_s) >= STEPS else ())
        if self._late is not None:
            return self._late if silence_s >= self._ended_s else None
        if self._asked_s:
            answers = self._collect_answers(workers)
            if answers is not None and (
                hang := self._evaluate_answers(workers, answers, silence_s)
            ):
                return hang
        elif silence_s >= self._ask_at_s and len(self.pages) > 1:
            self._ask_positions()
        elif self._found is None or silence_s >= self._next_s:
            least_s = min(self.learnt.deadline_s(classify_phase(one)) for one in self._told)
            ask_s = ASK_S + self.twice * (ANSWER_S + AGAIN_S)
            if silence_s >= max(self._next_s, least_s - ask_s):
                self._ask_positions()
        if self._found is not None and silence_s >= self._found.deadline_s:
            return self._report_hang(self._found, silence_s)
        return None

    def _page_step_times_s(self) -> list[float]:
        """Return the seconds of the last steps by a page: many may pass between two readings."""
        rows = self.pages[0].steps().values()
        return [time_s for row in rows if math.isfinite(time_s := sum(map(abs, row[1:])))]

    def _ask_positions(self) -> None:
        """Ask all ranks for their positions; other nodes add their ranks' units."""
        self._asked_s = self.clock_s
        for page in self.pages:
            page.ask()

    def _collect_answers(self, workers: Sequence[WatchedProcess]) -> Answers | None:
        """Return the ranks' answers, once all have answered, or their time is over."""
        answers = {worker.rank: self.pages[worker.rank].answer() for worker in workers}
        if None in answers.values() and self.clock_s - self._asked_s < ANSWER_S:
            return None
        self._asked_s = 0.0
        return answers

    def _evaluate_answers(
        self, workers: Sequence[WatchedProcess], answers: Answers, silence_s: float
    ) -> Hang | None:
        """Evaluate the answers of all ranks; return the hang that never ends, if it is one."""
        due_s, told = self._ask_at_s, dict(enumerate(self._told))
        if silence_s >= due_s:
            self._ask_at_s = {UNLIKE_S: ALONE_S, ALONE_S: WAITING_S}.get(due_s, 2 * due_s)
        if due_s == UNLIKE_S and (unlike := self.report_mismatch(workers, answers)) is not None:
            return unlike
        rank, line = detect_caught_error(told, answers)
        if line and silence_s >= UNLIKE_S:
            return self._report_mismatch_line(rank, line, workers)
        if silence_s >= due_s >= WAITING_S and (
            line := format_waiting_line(told, answers, silence_s)
        ):
            self.emit("notice", text=line)
        culprit = self._choose_blamed_rank(workers, answers, silence_s)
        if culprit is None or culprit.alone is None or silence_s < ALONE_S or not self.twice:
            return None
        rank, other = culprit.of.rank, culprit.alone
        calls = {rank: culprit.of.collective, other: told[other].inside or culprit.collective}
        return self._report_call_mismatch(calls, workers, answers)

    def _choose_blamed_rank(
        self, workers: Sequence[WatchedProcess], answers: Answers, silence_s: float
    ) -> BlamedRank | None:
        """Return the rank to blame, from the answers of the ranks."""
        if self.twice:
            before, self._stood = (
                self._stood,
                [one and one.get("stacks") for one in answers.values()],
            )
            if before != self._stood:
                self._found, self._next_s = None, silence_s + AGAIN_S
                return None
        seen = [
            self.collect_evidence(worker, self._told[worker.rank], answers) for worker in workers
        ]
        culprit = self._clear_unconfirmed_alone(blame_rank(seen))
        if culprit and self.twice and all(one.letter == STOPPED for one in seen):
            why = "all processes are stopped, as by Ctrl-Z or a scheduler"
            culprit = replace(culprit, why=why, certain=False)  # and may be continued
        if culprit is None:  # a debugger holds a rank
            self._next_s = silence_s + ANSWER_S
            return None
        kind = classify_phase(culprit.of.told)
        if self.twice and all(one.between for one in seen):  # so no rank waits
            kind = BETWEEN
        if culprit.is_compiling:
            kind = FIRST
        if culprit.together:
            kind = max((classify_phase(one.told) for one in seen), key=self.learnt.deadline_s)
        deadline_s = self.learnt.deadline_s(kind)
        if culprit.alone is not None:
            deadline_s = ALONE_S
            if self.twice:  # the line of unlike calls is more precise
                self._next_s = silence_s + ANSWER_S
                return culprit
        if kind == MERGE and culprit.of.answer is not None and not culprit.certain:
            # It waits for other islands, by a deadline of its own: the fault is theirs.
            self._next_s = silence_s + deadline_s
            return None
        self._found = culprit.make_hang(kind, deadline_s)
        self._found_seen = seen
        self._next_s = max(deadline_s - ASK_S, silence_s + ASK_S)
        return culprit

    def _clear_unconfirmed_alone(self, culprit: BlamedRank | None) -> BlamedRank | None:
        """Set `culprit.alone` to None unless that rank's page shows more calls than the culprit's.

        Otherwise the other rank may still receive what the culprit has sent.

        Args:
            culprit: its `alone` is a rank that waits in another collective, or None; None passes
                through.
        """
        if culprit is None or culprit.alone is None:
            return culprit
        behind = has_fewer_calls(self.pages[culprit.of.rank], self.pages[culprit.alone])
        return culprit if behind else replace(culprit, alone=None)

    def collect_evidence(
        self, worker: WatchedProcess, told: PageSnapshot, answers: Answers
    ) -> RankEvidence:
        """Collect the evidence about a rank: process, page, stack replies, kernel state."""
        return RankEvidence(
            worker.rank, worker.pid, told, answers[worker.rank], kernel_state(worker.pid)
        )

    def _report_hang(self, hang: Hang, silence_s: float) -> Hang | None:
        """Report the hang; return it if waiting for it is useless."""
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
