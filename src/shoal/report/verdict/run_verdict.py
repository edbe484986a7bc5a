"""Choice of a run's verdict: the fault that ended it, or the largest avoidable cost of a step.

    fault    what `shoal diagnose` finds, if the run did not get over it (fault_search.py)
    cost     the newest steps, replayed without each cost (step_replay.py): the largest gain
    nothing  no cost above `LEAST_SHARE` of a step, or above the spread of the steps; a step much
             longer than foreseen is named with its part (forecast_gap.py)

The step without the cost is a prediction: remove the cause, measure, compare.
docs/reference/verdict.md describes each kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import strip_control_characters
from shoal.base.text.units import seconds_text
from shoal.report.verdict.device_costs import list_device_costs
from shoal.report.verdict.fault_search import RunFault, find_fault
from shoal.report.verdict.forecast_gap import (
    ForecastGap,
    find_forecast_gap,
    measure_parts,
    parts_text,
)
from shoal.report.verdict.pause_costs import list_pause_costs
from shoal.report.verdict.processor_shares import (
    evidence_sentences,
    list_processor_costs,
    read_run_processor_times,
)
from shoal.report.verdict.run_facts import read_run_facts
from shoal.report.verdict.stage_costs import list_stage_costs
from shoal.report.verdict.step_costs import StepCost, list_step_costs
from shoal.report.verdict.step_replay import StepReplay, prepare_replay
from shoal.report.verdict.step_seconds import MOST_STEPS, StepSeconds, read_step_seconds
from shoal.view.diagnosis.folder_evidence import read_event_history
from shoal.view.run_folder_reader import RunFolder
from shoal.view.script_lines import script_settings

LEAST_SHARE = 0.05
"""Share of a step from which a cost is reported."""
WARM_UP_STEPS, LEAST_STEPS = 5, 20
"""Steps after each start that are left out · fewest other steps for a verdict on costs."""
DEFECT = 1.25
"""Weight of the gain of one rank or stage: it is a defect, costs of all ranks belong to a setup."""
STARVED = 0.8
"""Share of the processor time asked for below which evidence names the rank that gets it."""
SPREADS = 2.0
"""A gain below so many standard errors of its mean over blocks is noise."""


@dataclass(frozen=True)
class Verdict:
    """The largest avoidable cost or fault of a run, and its step without it.

    Attributes:
        kind: "fault", "input", "communication", "compute", "small_kernels", "memory",
            "micro_batch", "slow_rank", "late_stage", "busy_machine", "callbacks", "validation",
            "saves", or "nothing".
        cause: the cause in a few words, as "rank 3's data".
        evidence: sentences with the measurements.
        share: share by which a step gets shorter; None if unknown.
        step_s: seconds of a step; None without steps.
        without_s: seconds of a step without the cause; None if unknown.
        command: what to try; "" for nothing.
        steps: number of steps of which `step_s` is the mean; 0 if unknown.
        parts_s: seconds of a step by part, the mean over ranks, as recorded; {} if unknown.
    """

    kind: str
    cause: str
    evidence: tuple[str, ...] = ()
    share: float | None = None
    step_s: float | None = None
    without_s: float | None = None
    command: str = ""
    steps: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the verdict as one line.

        >>> Verdict("slow_rank", "rank 3's data", (), 0.30, 0.306, 0.214, "data.workers=4").line()
        "rank 3's data; without it a step is 30% shorter: 306.0 → 214.0 ms; try: data.workers=4"
        """
        text = self.cause
        if self.share is not None and self.step_s is not None and self.without_s is not None:
            change = _change_text(self.step_s, self.without_s)
            text += f"; without it a step is {self.share:.0%} shorter: {change}"
        elif self.share is not None:
            text += f": {self.share:.0%} of the steps"
        if self.command:
            text += f"; try: {self.command}"
        return strip_control_characters(text).replace("\n", " ")


def _change_text(now_s: float, then_s: float) -> str:
    now, then = seconds_text(now_s), seconds_text(then_s)
    if now.split()[1:] == then.split()[1:]:
        now = now.split()[0]
    return f"{now} → {then}"


def find_verdict(folder: Path) -> Verdict:
    """Return the verdict on a run, from its folder alone.

    Args:
        folder: a run folder, also a damaged, empty or copied one.
    """
    rows = RunFolder(folder).last_steps(MOST_STEPS)
    events = read_event_history(folder)
    if (fault := find_fault(folder, events, rows)) is not None:
        return _fault_verdict(fault, rows)
    found = _read_steps(folder, events, rows)
    if found is None:
        return Verdict("nothing", f"no verdict yet: fewer than {LEAST_STEPS} steps after warm-up")
    times, replay = found
    facts = read_run_facts(folder, rows, len(times.ranks))
    costs = [
        *list_step_costs(replay, facts),
        *list_stage_costs(replay, facts),
        *list_device_costs(replay, facts),
        *list_pause_costs(times, replay, events),
    ]
    processor = read_run_processor_times(folder, times)
    costs += list_processor_costs(replay, processor)
    parts_s = measure_parts(times, replay)
    verdict = replace(_largest_cost(replay, costs), parts_s=parts_s)
    if verdict.kind == "nothing":
        cause = f"{verdict.cause} ({parts_text(parts_s)})"
        verdict = replace(verdict, cause=cause)
    elif verdict.kind != "busy_machine":
        starved = evidence_sentences(processor, below=STARVED)
        verdict = replace(verdict, evidence=(*verdict.evidence, *starved))
    if facts.is_script:
        verdict = replace(verdict, command=script_settings(verdict.command))
    return _add_gap(verdict, find_forecast_gap(times, replay, facts))


def _add_gap(verdict: Verdict, gap: ForecastGap | None) -> Verdict:
    """Return a verdict; one that finds nothing to gain names a step much longer than predicted."""
    if gap is None or verdict.kind != "nothing":
        return verdict
    evidence = (*verdict.evidence, gap.sentence())
    return replace(verdict, cause=f"{verdict.cause}, {gap.short_text()}", evidence=evidence)


def read_replay(folder: Path) -> tuple[StepSeconds, StepReplay] | None:
    """Return the steps that a verdict is computed from; None for fewer than `LEAST_STEPS`."""
    rows = RunFolder(folder).last_steps(MOST_STEPS)
    return _read_steps(folder, read_event_history(folder), rows)


def _read_steps(
    folder: Path, events: Sequence[Record], rows: Sequence[Record]
) -> tuple[StepSeconds, StepReplay] | None:
    times = read_step_seconds(folder, rows)
    if times is not None:
        times = _drop_warm_up(times, events)
    if times is None or len(times.steps) < LEAST_STEPS:
        return None
    return times, prepare_replay(times)


def _fault_verdict(fault: RunFault, rows: Sequence[Record]) -> Verdict:
    """Return the verdict on a fault; for skipped steps, seconds per step that changed weights."""
    cause = strip_control_characters(fault.cause)
    step_s = [row["step_s"] for row in rows[WARM_UP_STEPS:] if is_number(row.get("step_s"))]
    if fault.share is None or not step_s or fault.share >= 1:
        return Verdict("fault", cause, fault.evidence, fault.share, command=fault.command)
    without_s = statistics.fmean(step_s)
    now_s = without_s / (1 - fault.share)
    return Verdict(
        "fault", cause, fault.evidence, fault.share, now_s, without_s, command=fault.command
    )


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


def _largest_cost(replay: StepReplay, costs: Iterable[StepCost]) -> Verdict:
    """Return the verdict that names the cost with the largest gain, or "nothing to gain"."""
    step_s = replay.mean_s(replay.step_s)
    best, best_now_s, best_s, weight = None, step_s, LEAST_SHARE * step_s, 1.0
    for cost in costs:
        each_s = replay.step_s if cost.now_s is None else cost.now_s
        gains_s = replay.block_means_s(each_s - cost.without_s)
        error_s = float(gains_s.std()) / max(1, len(gains_s)) ** 0.5
        now_s = replay.mean_s(each_s)
        gain_s = now_s - replay.mean_s(cost.without_s)
        own_weight = DEFECT if cost.kind in ("slow_rank", "late_stage") else 1.0
        if gain_s <= max(LEAST_SHARE * now_s, SPREADS * error_s, cost.least_share * now_s):
            continue
        if best is None or gain_s * own_weight > best_s * weight:
            best, best_now_s, best_s, weight = cost, now_s, gain_s, own_weight
    if best is None:
        least, step = f"{LEAST_SHARE:.0%}", seconds_text(step_s)
        text = f"nothing to gain: no avoidable cost above {least} of a step, which takes {step}"
        return Verdict("nothing", text, step_s=step_s, steps=len(replay.step_s))
    return Verdict(
        best.kind,
        best.cause,
        best.evidence,
        best_s / best_now_s,
        best_now_s,
        best_now_s - best_s,
        best.command,
        len(replay.step_s),
    )
