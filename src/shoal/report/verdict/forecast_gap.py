"""Steps that take much longer than predicted: by how much, and in which part.

    foreseen   seconds of a step by term, from plan.json
    measured   seconds of the newest steps by part, the mean over ranks

It is no cost with a cure: the machine is slower than its calibration, shares its cores, or the
planner is wrong. But a reader who sees both numbers must not read "nothing to gain" alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.text.units import seconds_text
from shoal.report.verdict.run_facts import SENT, RunFacts
from shoal.report.verdict.step_replay import StepReplay
from shoal.report.verdict.step_seconds import (
    BACKWARD,
    DATA,
    HOOKS,
    PASSES,
    SUM,
    UPDATE,
    WAITING,
    StepSeconds,
)

MUCH = 1.5
"""Measured over foreseen seconds of a step from which a gap is reported."""
PART_GROUPS = {
    "forward and backward": (PASSES, BACKWARD),
    "communication": (SUM, WAITING),
    "data": (DATA,),
    "the optimizer": (UPDATE,),
    "callbacks": (HOOKS,),
}


@dataclass(frozen=True)
class ForecastGap:
    """A step's measured and predicted seconds, and the part with the largest difference."""

    step_s: float
    foreseen_s: float
    part: str
    part_s: float
    part_foreseen_s: float

    def short_text(self) -> str:
        """Return the gap as part of a sentence on a step."""
        return f"{self.step_s / self.foreseen_s:.1f} times what was foreseen, mostly in {self.part}"

    def sentence(self) -> str:
        """Return the gap with its seconds."""
        return (
            f"A step was foreseen to take {seconds_text(self.foreseen_s)}; the largest difference "
            f"is in {self.part}: {seconds_text(self.part_s)} instead of "
            f"{seconds_text(self.part_foreseen_s)}."
        )


def find_forecast_gap(
    times: StepSeconds, replay: StepReplay, facts: RunFacts
) -> ForecastGap | None:
    """Return the gap between a run's steps and its forecast; None below `MUCH`, or without one."""
    step_s, foreseen_s = replay.mean_s(replay.step_s), sum(facts.foreseen_s.values())
    if foreseen_s <= 0 or step_s < MUCH * foreseen_s:
        return None
    foreseen = dict.fromkeys(PART_GROUPS, 0.0)
    for term, seconds in facts.foreseen_s.items():
        foreseen[_group_of(term)] += seconds
    measured = measure_parts(times, replay)
    part = max(PART_GROUPS, key=lambda name: measured[name] - foreseen[name])
    return ForecastGap(step_s, foreseen_s, part, measured[part], foreseen[part])


def measure_parts(times: StepSeconds, replay: StepReplay) -> dict[str, float]:
    """Return the seconds of a step by part, the mean over ranks."""
    return {
        name: replay.mean_s(times.seconds[:, :, list(parts)].sum(axis=2).mean(axis=1))
        for name, parts in PART_GROUPS.items()
    }


def parts_text(parts_s: Mapping[str, float]) -> str:
    """Return the parts of a step with their shares, the longest first, without small ones.

    >>> parts_text({"data": 0.001, "the optimizer": 0.2, "forward and backward": 0.799})
    'forward and backward 80%, the optimizer 20%'
    """
    whole_s = sum(parts_s.values()) or 1.0
    pairs = sorted(parts_s.items(), key=lambda pair: -pair[1])
    shares = [(name, seconds / whole_s) for name, seconds in pairs]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)


def _group_of(term: str) -> str:
    """Return the part of a step to which a term of the forecast belongs.

    >>> [_group_of(term) for term in ("matrix", "gradients_across", "bubble", "optimizer")]
    ['forward and backward', 'communication', 'communication', 'the optimizer']
    """
    if term.startswith((*SENT, "bubble")):
        return "communication"
    return "the optimizer" if term == "optimizer" else "forward and backward"
