"""Choice of a run's verdict: the fault that ended it, or the largest avoidable cost of a step.

    fault    what `shoal diagnose` finds, if the run did not get over it
    cost     the newest steps, replayed without each cost (step_replay.py): the largest gain
    nothing  no cost above `LEAST_SHARE` of a step, or above the spread of the steps

The step without the cost is a prediction: remove the cause, measure, compare.
docs/reference/verdict.md describes each kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import strip_control_characters
from shoal.base.text.units import seconds_text
from shoal.report.verdict.step_replay import (
    COMPARED,
    StepReplay,
    find_late_ranks,
    prepare_replay,
    replace_late_part,
)
from shoal.report.verdict.step_seconds import (
    BACKWARD,
    DATA,
    HOOKS,
    MOST_STEPS,
    PASSES,
    UPDATE,
    StepSeconds,
    read_step_seconds,
)
from shoal.view.diagnose import RunFinding, diagnose
from shoal.view.run_folder_reader import RunFolder
from shoal.view.script_lines import is_user_script

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEAST_SHARE = 0.05
"""Share of a step from which a cost is reported."""
WARM_UP_STEPS, LEAST_STEPS = 5, 20
"""Steps after each start that are left out · fewest other steps for a verdict on costs."""
SPREADS = 2.0
"""A gain below so many standard errors of its mean over blocks is noise."""
NOT_FATAL = ("slow_rank", "loader", "sample_left_out", "notice")
"""Findings that end no run."""


@dataclass(frozen=True)
class Verdict:
    """What a run suffers from most, and what its step would be without it.

    Attributes:
        kind: "fault", "input", "communication", "compute", "small_kernels", "memory",
            "micro_batch", "slow_rank", "late_stage", or "nothing".
        cause: the cause in a few words, as "rank 3's data".
        evidence: sentences with the measurements.
        share: share of a step; None if unknown.
        step_s: seconds of a step; None without steps.
        without_s: seconds of a step without the cause; None if unknown.
        command: what to try; "" for nothing.
    """

    kind: str
    cause: str
    evidence: tuple[str, ...] = ()
    share: float | None = None
    step_s: float | None = None
    without_s: float | None = None
    command: str = ""

    def line(self) -> str:
        """Return the verdict as one line.

        >>> Verdict("slow_rank", "rank 3's data", (), 0.31, 0.306, 0.214, "data.workers=4").line()
        "rank 3's data: 31% of a step; without it 306.0 → 214.0 ms; try: data.workers=4"
        """
        text = self.cause
        if self.share is not None:
            text += f": {self.share:.0%} of a step"
        if self.step_s is not None and self.without_s is not None:
            text += f"; without it {_change_text(self.step_s, self.without_s)}"
        if self.command:
            text += f"; try: {self.command}"
        return strip_control_characters(text).replace("\n", " ")


def _change_text(now_s: float, then_s: float) -> str:
    now, then = seconds_text(now_s), seconds_text(then_s)
    if now.split()[1:] == then.split()[1:]:
        now = now.split()[0]
    return f"{now} → {then}"


@dataclass(frozen=True)
class StepCost:
    """One avoidable cost of a step.

    Attributes:
        without_s: [steps] seconds of each step without it.
    """

    kind: str
    cause: str
    without_s: Array
    evidence: tuple[str, ...]
    command: str


def find_verdict(folder: Path) -> Verdict:
    """Return the verdict on a run, from its folder alone.

    Args:
        folder: a run folder, also a damaged, empty or copied one.
    """
    if (fault := _find_fault(folder)) is not None:
        return fault
    run = RunFolder(folder)
    rows = run.last_steps(MOST_STEPS)
    times = read_step_seconds(folder, rows)
    if times is not None:
        times = _drop_warm_up(times, run.events.read()[0])
    if times is None or len(times.steps) < LEAST_STEPS:
        return Verdict("nothing", f"no verdict yet: fewer than {LEAST_STEPS} steps after warm-up")
    replay = prepare_replay(times)
    return _largest_cost(replay, list(_list_costs(folder, replay)))


def _find_fault(folder: Path) -> Verdict | None:
    """Return the last fault that the run did not get over."""
    found = [one for one in diagnose(folder) if _is_fatal(one)]
    if not found:
        return None
    last = found[-1]
    why = (last.why,) if last.why else ()
    return Verdict("fault", strip_control_characters(last.what), why, command=last.command)


def _is_fatal(one: RunFinding) -> bool:
    return not one.advice and not one.over and one.kind not in NOT_FATAL


def _drop_warm_up(times: StepSeconds, events: Iterable[Record]) -> StepSeconds:
    """Return times without the first steps after each start."""
    starts = {int(times.steps[0]) - 1} if times.steps[0] <= 1 else set()
    for event in events:
        step = event.get("step")
        if event.get("event") in ("compute_started", "resumed") and is_number(step):
            starts.add(int(step))
    mask = times.steps > 0
    for start in starts:
        mask &= (times.steps <= start) | (times.steps > start + WARM_UP_STEPS)
    return times.select_steps(mask)


def _largest_cost(replay: StepReplay, costs: list[StepCost]) -> Verdict:
    """Return the verdict that names the cost with the largest gain, or "nothing to gain"."""
    step_s = replay.mean_s(replay.step_s)
    best, best_s = None, LEAST_SHARE * step_s
    for cost in costs:
        gains_s = replay.block_means_s(replay.step_s - cost.without_s)
        error_s = float(gains_s.std()) / max(1, len(gains_s)) ** 0.5
        gain_s = step_s - replay.mean_s(cost.without_s)
        if gain_s > max(best_s, SPREADS * error_s):
            best, best_s = cost, gain_s
    if best is None:
        text = (
            f"nothing to gain: no cost above {LEAST_SHARE:.0%} of a step ({seconds_text(step_s)})"
        )
        return Verdict("nothing", text, step_s=step_s)
    return Verdict(
        best.kind,
        best.cause,
        best.evidence,
        best_s / step_s,
        step_s,
        step_s - best_s,
        best.command,
    )


# ---- costs


PART_NAMES = {
    DATA: "data", PASSES: "passes", BACKWARD: "backward pass", UPDATE: "optimizer update",
    HOOKS: "callbacks",
}  # fmt: skip


def _list_costs(folder: Path, replay: StepReplay) -> Iterable[StepCost]:
    late = {part: find_late_ranks(replay, part) for part in COMPARED}
    for part in COMPARED:
        if late[part].any():
            yield _slow_rank_cost(folder, replay, late[part], part)
    yield _input_cost(folder, replay, late[DATA])


def _slow_rank_cost(folder: Path, replay: StepReplay, late: Array, part: int) -> StepCost:
    import numpy as np

    own_s = replace_late_part(replay, late, part)
    ranks = [replay.ranks[at] for at in np.flatnonzero(late)]
    name = PART_NAMES[part]
    if part == PASSES and replay.has_backward:
        name = "forward pass"
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:4]))}"
    late_s = replay.mean_s(replay.own_s[:, late, part].mean(axis=1))
    usual_s = replay.mean_s(np.median(replay.own_s[:, ~late, part], axis=1))
    evidence = (
        f"{who}: {seconds_text(late_s)} a step in its {name}; the others: {seconds_text(usual_s)}.",
        "The others wait for it at the sum of gradients.",
    )
    command = _slow_part_cure(folder, part)
    return StepCost("slow_rank", f"{who}'s {name}", replay.without(own_s), evidence, command)


def _slow_part_cure(folder: Path, part: int) -> str:
    if part == DATA:
        return _workers_cure(folder)
    if part == HOOKS:
        return "work of the callbacks on all ranks, or in a thread"
    return "shoal doctor on that host; look for other processes on its cores"


def _workers_cure(folder: Path) -> str:
    if is_user_script(folder):
        return "workers=4 of run.loader, and less work between two steps"
    return "data.workers=4"


def _input_cost(folder: Path, replay: StepReplay, late: Array) -> StepCost:
    """Return the cost of data that all ranks wait for, without the excess of a late rank."""
    import numpy as np

    own_s = replay.own_s.copy()
    common_s = np.median(own_s[:, ~late, DATA], axis=1)
    own_s[:, :, DATA] = np.maximum(own_s[:, :, DATA] - common_s[:, None], 0.0)
    each_s = replay.mean_s(common_s)
    evidence = (f"All ranks wait for data: {seconds_text(each_s)} a step.",)
    return StepCost(
        "input", "all ranks wait for data", replay.without(own_s), evidence, _workers_cure(folder)
    )
