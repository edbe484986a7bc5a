"""Costs of pauses between steps: validation and saves, per step of the run.

A rank records the time of a pause in the step that follows it (`other`). The events of the step
before say whether it was a validation or a save. A save in the background slows the steps that it
overlaps; if there are enough others, the difference of the means counts as well.

These costs belong to no single step, so a step is taken with its share of all pauses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.units import seconds_text
from shoal.report.order_statistics import median
from shoal.report.verdict.step_costs import StepCost
from shoal.report.verdict.step_replay import StepReplay
from shoal.report.verdict.step_seconds import OTHER, StepSeconds

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEAST_SHARE, LEAST_PAUSES, LEAST_OVERLAPS = 0.1, 3, 5
NAMES = {
    "validated": ("validation", "validation between steps", "a larger train.validate_every"),
    "checkpoint_saved": ("saves", "saves of checkpoints", "a larger checkpoint.every"),
}
"""Event → kind of the cost, its cause, its cure."""


def list_pause_costs(
    times: StepSeconds, replay: StepReplay, events: Sequence[Record]
) -> Iterator[StepCost]:
    """Yield the costs of validation and saves.

    Args:
        times: the steps of the replay, as recorded.
        replay: the same steps, ready for a replay.
        events: of the run, oldest first.
    """
    import numpy as np

    paused_s = median(times.seconds[:, :, OTHER].astype(np.float64), axis=1)
    if not times.by_rank:
        return
    each_s = replay.mean_s(replay.step_s)
    now_s = replay.step_s + paused_s.mean()
    for name, (kind, cause, command) in NAMES.items():
        steps, spans = _steps_and_spans(events, name)
        after = np.isin(times.steps - 1, steps)
        own_s = float(paused_s[after].sum()) / len(paused_s)
        text = f"{cause}: {after.sum()} in {len(paused_s)} steps"
        if kind == "saves":
            own_s += _slowdown_s(times, replay, spans, after)
        if after.sum() < LEAST_PAUSES:
            continue
        yield StepCost(
            kind,
            cause,
            np.maximum(now_s - own_s, 0.0),
            (f"{text}, {seconds_text(own_s)} per step of {seconds_text(each_s)}.",),
            command,
            LEAST_SHARE,
            now_s,
        )


def _steps_and_spans(events: Sequence[Record], name: str) -> tuple[list[int], list[list[float]]]:
    """Return the steps of an event, and the begin and end of each in seconds since 1970."""
    steps, spans = [], []
    for event in events:
        step = event.get("step")
        if event.get("event") != name or not is_number(step) or abs(step) >= 1 << 62:
            continue
        steps.append(int(step))
        end_s, seconds = event.get("time_s"), event.get("seconds")
        if is_number(end_s) and is_number(seconds):
            spans.append([end_s - seconds, end_s])
    return steps, spans


def _slowdown_s(
    times: StepSeconds, replay: StepReplay, spans: list[list[float]], after: Array
) -> float:
    """Return the seconds per step by which steps are longer that a save overlaps."""
    end_s = times.end_s.mean(axis=1)
    begin_s = end_s - replay.step_s
    overlaps = after.copy()
    for from_s, to_s in spans:
        overlaps |= (begin_s < to_s) & (end_s > from_s)
    if min(overlaps.sum(), (~overlaps).sum()) < LEAST_OVERLAPS:
        return 0.0
    longer_s = float(replay.step_s[overlaps].mean() - median(replay.step_s[~overlaps]))
    error_s = float(replay.step_s[overlaps].std()) / int(overlaps.sum()) ** 0.5
    return max(0.0, longer_s) * float(overlaps.mean()) if longer_s > 2 * error_s else 0.0
