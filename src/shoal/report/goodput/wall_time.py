"""Division of a run's wall time: committed steps, start-up, validation, saves, lost steps, gaps.

    events.jsonl   starts, restarts and ends: the run's attempts, with the step each resumed from
    metrics.jsonl  seconds of the committed steps, and those before the first one of an attempt,
                   which are its start; a resume has cut those that were made again
    rank_steps/    pauses between steps, from which the time of saves is taken; starts and ends of a
                   loop of the user's own, which writes no event of them

    |– attempt 0: start | steps 1–30 | steps 31–37, lost –| gap |– attempt 1: start | steps 31–70 –|

An attempt's time goes first to its start, then to committed steps, validation and saves. The rest
is lost if the next attempt resumed from an older step (or the run went back by itself), else
"other". Each part gets at most what the attempt has left, so the parts always add up to the wall
time, also for damaged files and clocks that jump.
"""

from __future__ import annotations

import bisect
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record, is_number, read_object
from shoal.base.text.units import seconds_text
from shoal.report.metric_series import StepMetrics, read_step_metrics
from shoal.report.order_statistics import median
from shoal.report.verdict.step_seconds import LONGEST_S, OTHER, StepSeconds, read_step_seconds
from shoal.view.diagnosis.folder_evidence import read_event_history

STARTS = ("run_started", "restarting")
"""Events with which an attempt begins."""
LAST_STEP = 1 << 62
OWN_NAMES = ("committed", "between")
PART_NAMES = {"lost": "steps made again", "skipped": "skipped steps"}
MOST_PARTS, LEAST_SHARE, LEAST_SESSION_S = 3, 0.01, 1.0
"""Other parts that a line names · share of the sessions from which it does · seconds of sessions
below which shares say nothing."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's wall time; the fields that end in `_s` after `wall_s` add up to it.

    Attributes:
        wall_s: from the first event to the last one.
        committed_s: in steps that the run kept.
        skipped_s: in steps that changed no weights.
        start_s: from a start until its first step: processes, data, model, resume, first batch.
        validation_s: in validation.
        saves_s: in saves, while the steps wait; writing in the background counts as steps.
        lost_s: in steps that were made again after a restart or a rewind, and until it was noticed.
        between_s: between the sessions of a run, as in a queue.
        other_s: everything else: callbacks after the last step, the proof, the end.
        steps: committed steps.
        lost_steps: `lost_s` in steps at the mean pace: at most so many were made again.
        starts: attempts.
        ranks: ranks of the last attempt.
        session_starts: seconds of the start of each attempt; their sum is `start_s`.
    """

    wall_s: float = 0.0
    committed_s: float = 0.0
    skipped_s: float = 0.0
    start_s: float = 0.0
    validation_s: float = 0.0
    saves_s: float = 0.0
    lost_s: float = 0.0
    between_s: float = 0.0
    other_s: float = 0.0
    steps: int = 0
    lost_steps: int = 0
    starts: int = 0
    ranks: int = 1
    session_starts: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        """Return the share of the wall time in committed steps."""
        return self.committed_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def session_s(self) -> float:
        """Return the seconds in which a session of the run was there."""
        return self.wall_s - self.between_s

    @property
    def session_share(self) -> float:
        """Return the share of the sessions' time in committed steps."""
        return self.committed_s / self.session_s if self.session_s > 0 else 0.0

    @property
    def device_hours(self) -> float:
        """Return the hours of all ranks' devices, without those between sessions."""
        return self.ranks * self.session_s / 3600

    def text(self) -> str:
        """Return the share of the sessions' time in steps, and the longest other parts.

        "" of sessions of less than a second.


        >>> Goodput(10.0, committed_s=5.0, start_s=4.0, between_s=1.0, starts=1).text()
        '56% of the 9.0 s in which a session ran went into committed steps; start 44%'
        """
        if self.session_s < LEAST_SESSION_S:
            return ""
        others = {name: s for name, s in self.parts().items() if name not in OWN_NAMES}
        most = sorted(others.items(), key=lambda pair: -pair[1])[:MOST_PARTS]
        shares = [
            f"{PART_NAMES.get(name, name)} {seconds / self.session_s:.0%}"
            for name, seconds in most
            if seconds >= LEAST_SHARE * self.session_s
        ]
        sessions = "a session" if self.starts < 2 else f"{self.starts:,} sessions"
        text = (
            f"{self.session_share:.0%} of the {seconds_text(self.session_s)} in which {sessions} "
            f"ran went into committed steps"
        )
        return f"{text}; {', '.join(shares)}" if shares else text

    def parts(self) -> dict[str, float]:
        """Return seconds by part, without `_s` in the names; their sum is `wall_s`."""
        names = [one.name for one in fields(self) if one.name.endswith("_s")]
        return {name.removesuffix("_s"): getattr(self, name) for name in names if name != "wall_s"}


@dataclass(frozen=True)
class _Attempt:
    """One start of all ranks: its times in seconds since 1970, and the step that it began after."""

    begin_s: float
    train_s: float
    end_s: float
    after_step: int
    events: tuple[Record, ...]

    @property
    def finished(self) -> bool:
        """Return whether the attempt ended by itself."""
        return any(event.get("event") == "run_finished" for event in self.events)

    @property
    def rewound(self) -> bool:
        """Return whether the run went back to an older step by itself."""
        return any(event.get("event") == "rewound" for event in self.events)


def compute_goodput(folder: Path, metrics: StepMetrics | None = None) -> Goodput:
    """Return the goodput of a run; all zero for a folder without events.

    Args:
        folder: a run folder, also a damaged, empty or copied one.
        metrics: the columns of its metrics.jsonl, if they are read already.
    """
    events = [event for event in read_event_history(folder) if is_number(event.get("time_s"))]
    is_loop = not any(event.get("event") in (*STARTS, "compute_started") for event in events)
    if metrics is None:
        metrics = read_step_metrics(folder / "metrics.jsonl")
    steps, sums = metrics.steps, metrics.running_sum("step_s")
    if len(sums) != len(steps):
        steps, sums = array("q"), array("d")
    times = read_step_seconds(folder, [])
    if is_loop:
        met_s = read_object(folder / "ranks.json").get("time_s")
        attempts = _list_loop_attempts(events, times, (steps, sums), met_s)
    else:
        attempts = _split_attempts(events)
    if not attempts:
        return Goodput()
    skipped = _steps_of(events, "step_skipped")
    save_s = _mean_save(times, events)
    if times is not None and times.by_rank:  # a run without an end: until its last step
        attempts[-1] = replace(attempts[-1], end_s=_last_time(attempts[-1], times))
    total = Goodput(starts=len(attempts), ranks=_count_ranks(folder, events), steps=len(steps))
    previous_s = attempts[0].begin_s
    for at, attempt in enumerate(attempts):
        until = min((one.after_step for one in attempts[at + 1 :]), default=LAST_STEP)
        first, last = (bisect.bisect_right(steps, one) for one in (attempt.after_step, until))
        if first < last:
            took_s = sums[last - 1] - (sums[first - 1] if first else 0.0)
            # Before its first step, a session still starts: its loop's set-up, the first batch.
            before_s = min(
                _wait_of(metrics, first), _seconds_of(steps, sums, steps[first], first, last)
            )
            took_s, attempt = (
                took_s - before_s,
                replace(attempt, train_s=attempt.train_s + before_s),
            )
            skipped_s = sum(_seconds_of(steps, sums, step, first, last) for step in skipped)
            skipped_s -= before_s if steps[first] in skipped else 0.0  # counted as the start
            spent = max(0.0, took_s - skipped_s), skipped_s
        else:
            spent = 0.0, 0.0
        total = _add(total, between_s=max(0.0, attempt.begin_s - previous_s))
        total = _add_attempt(total, attempt, spent, save_s, at + 1 < len(attempts))
        previous_s = max(previous_s, attempt.end_s)
    pace_s = (total.committed_s + total.skipped_s) / max(1, total.steps)
    lost = round(total.lost_s / pace_s) if pace_s > 0 else 0
    wall_s = sum(total.parts().values())
    return replace(total, lost_steps=lost, wall_s=wall_s)


def _add(total: Goodput, **seconds: float) -> Goodput:
    return replace(total, **{name: getattr(total, name) + s for name, s in seconds.items()})


def _add_attempt(
    total: Goodput,
    attempt: _Attempt,
    spent: tuple[float, float],
    save_s: float,
    has_next: bool,
) -> Goodput:
    """Add the parts of one attempt, each at most what is left of its time.

    Args:
        total: of the attempts before.
        attempt: the attempt.
        spent: seconds of its committed steps, and of its skipped ones.
        save_s: mean pause by a save.
        has_next: another attempt followed.
    """
    left_s = max(0.0, attempt.end_s - attempt.begin_s)

    def spend(seconds: float) -> float:
        nonlocal left_s
        part_s = min(max(0.0, seconds), left_s) if seconds == seconds else 0.0
        left_s -= part_s
        return part_s

    start_s = spend(attempt.train_s - attempt.begin_s)
    committed_s, skipped_s = spend(spent[0]), spend(spent[1])
    validation_s = spend(sum(_validation_seconds(attempt.events).values()))
    saves = sum(event.get("event") == "checkpoint_saved" for event in attempt.events)
    saves_s = spend(saves * save_s)
    is_lost = attempt.rewound or (has_next and not attempt.finished)
    rest = {"lost_s" if is_lost else "other_s": left_s}
    total = replace(total, session_starts=(*total.session_starts, start_s))
    return _add(
        total,
        start_s=start_s,
        committed_s=committed_s,
        skipped_s=skipped_s,
        validation_s=validation_s,
        saves_s=saves_s,
        **rest,
    )


def _seconds_of(
    steps: Sequence[float], sums: Sequence[float], step: int, first: int, last: int
) -> float:
    """Return the seconds of a step among the rows `first` to `last`; 0 if it is not there."""
    at = bisect.bisect_left(steps, step, first, last)
    if at == last or steps[at] != step:
        return 0.0
    return max(0.0, sums[at] - (sums[at - 1] if at else 0.0))


def _wait_of(metrics: StepMetrics, at: int) -> float:
    """Return the seconds from the step before a row until its own passes; 0 if unknown."""
    columns = [metrics.columns.get(name, ()) for name in ("data_wait_s", "loop_s")]
    return sum(one[at] for one in columns if at < len(one) and 0 < one[at] < LONGEST_S)


def _steps_of(events: Sequence[Record], name: str) -> set[int]:
    """Return the steps of an event."""
    steps = (event.get("step") for event in events if event.get("event") == name)
    return {int(step) for step in steps if is_number(step)}


def _validation_seconds(events: Sequence[Record]) -> dict[int, float]:
    """Return the seconds of validations by the step before them."""
    found: dict[int, float] = {}
    for event in events:
        step, seconds = event.get("step"), event.get("seconds")
        if event.get("event") == "validated" and is_number(step) and is_number(seconds):
            found[int(step)] = found.get(int(step), 0.0) + seconds
    return found


def _mean_save(times: StepSeconds | None, events: Sequence[Record]) -> float:
    """Return the mean pause of the steps by a save; 0 if unknown."""
    if times is None or not times.by_rank:
        return 0.0
    pauses_s = median(times.seconds[:, :, OTHER], axis=1)
    by_step = {int(step): float(s) for step, s in zip(times.steps, pauses_s, strict=True)}
    # The pause before an attempt's first step is its start.
    starts = _steps_of(events, "compute_started")
    validations = _validation_seconds(events)
    found = []
    for event in events:
        step = event.get("step")
        if event.get("event") == "checkpoint_saved" and is_number(step) and int(step) not in starts:
            pause_s = by_step.get(int(step) + 1)
            if pause_s is not None:
                found.append(max(0.0, pause_s - validations.get(int(step), 0.0)))
    return statistics.fmean(found) if found else 0.0


def _last_time(attempt: _Attempt, times: StepSeconds) -> float:
    """Return the end of an attempt: its last event, or the last step if that is later."""
    end_s = float(times.end_s[-1].max())
    most_s = attempt.end_s + LONGEST_S
    return max(attempt.end_s, end_s) if attempt.begin_s <= end_s <= most_s else attempt.end_s


def _split_attempts(events: Sequence[Record]) -> list[_Attempt]:
    """Return the attempts of a run, oldest first."""
    groups: list[list[Record]] = []
    for event in events:
        name = event.get("event")
        # A launcher that is none of Shoal's writes no start; `compute_started` is one then.
        begins = name in STARTS or (name == "compute_started" and _has_trained(groups))
        if begins or not groups:
            groups.append([])
        groups[-1].append(event)
    return [_make_attempt(group) for group in groups]


def _list_loop_attempts(
    events: Sequence[Record],
    times: StepSeconds | None,
    metrics: tuple[Sequence[float], Sequence[float]],
    met_s: object,
) -> list[_Attempt]:
    """Return the attempts of a loop of the user's own, which writes no event of a start.

    A session begins with `resumed`, if it restored anything, and the newest one when its ranks met.
    Without records of the ranks there is none: nothing tells when a step was made.

    Args:
        events: of all sessions.
        times: times of the steps.
        metrics: steps, and the sums of their seconds.
        met_s: when the ranks of the newest session met, seconds since 1970.
    """
    if times is None or not times.by_rank:
        return []
    groups: list[list[Record]] = [[]]
    for event in events:
        if event.get("event") == "resumed" and is_number(event.get("step")):
            groups.append([])
        groups[-1].append(event)
    firsts = [int(group[0]["step"]) if at else 0 for at, group in enumerate(groups)]
    ends_s = times.end_s.max(axis=1)
    found: list[_Attempt] = []
    for at, (group, after) in enumerate(zip(groups, firsts, strict=True)):
        after = after if abs(after) < LAST_STEP else 0
        until = min(firsts[at + 1 :], default=LAST_STEP)
        since_s = float(group[0]["time_s"]) if at else 0.0
        mask = (times.steps > after) & (times.steps <= until) & (ends_s >= since_s)
        if not mask.any():
            continue
        first, last = mask.nonzero()[0][[0, -1]]
        train_s = float(ends_s[first]) - _seconds_until(metrics, after, int(times.steps[first]))
        begin_s = since_s or train_s
        if at + 1 == len(groups) and is_number(met_s) and met_s < train_s:
            begin_s = min(float(met_s), begin_s)
        end_s = max([float(ends_s[last]), *(float(one["time_s"]) for one in group)])
        found.append(_Attempt(begin_s, max(train_s, begin_s), end_s, after, tuple(group)))
    return found


def _seconds_until(
    metrics: tuple[Sequence[float], Sequence[float]], after: int, step: int
) -> float:
    """Return the seconds of the steps after one step, up to another."""
    steps, sums = metrics
    first, last = (bisect.bisect_right(steps, one) for one in (after, step))
    return max(0.0, sums[last - 1] - (sums[first - 1] if first else 0.0)) if last > first else 0.0


def _has_trained(groups: list[list[Record]]) -> bool:
    return bool(groups) and any(one.get("event") == "compute_started" for one in groups[-1])


def _make_attempt(group: Sequence[Record]) -> _Attempt:
    times_s = [float(event["time_s"]) for event in group]
    begin_s, end_s = times_s[0], max(times_s)
    trains = [event for event in group if event.get("event") == "compute_started"]
    resumed = [event for event in group if event.get("event") == "resumed"]
    train_s = float(trains[0]["time_s"]) if trains else end_s
    step = next((e["step"] for e in (*trains, *resumed) if is_number(e.get("step"))), 0)
    after = int(step) if abs(step) < LAST_STEP else 0
    return _Attempt(begin_s, train_s, end_s, after, tuple(group))


def _count_ranks(folder: Path, events: Sequence[Record]) -> int:
    entries = read_object(folder / "ranks.json").get("ranks")
    if isinstance(entries, list) and entries:
        return len(entries)
    for event in reversed(events):
        count = event.get("processes")
        if event.get("event") == "run_started" and is_number(count) and 1 <= count <= 1 << 20:
            return int(count)
    return 1
