"""Pipeline schedules as drawings: one of them, or all-forward-all-backward beside 1F1B.

A rank's held amount is its micro-batches whose forward is done and whose backward is not: the
activations that wait. The bubble is the largest (last end − first start − work) over ranks. Beside
it stands the step's length up to the optimizer's barrier (all ranks sum the global norm before any
rank updates), and the bubble of the closed formula if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.base.layouts.schedule_names import canonical_schedule
from shoal.base.plans.timeline import Timeline
from shoal.base.text.units import seconds_text as usual_text
from shoal.planning.pipeline_schedules import make_schedule
from shoal.teach.costs import AnalyticalCosts
from shoal.teach.schedules_simulate import simulate_schedule, timeline_bubble

LARGEST = 10_000
"""Most actions of one kind in a drawing."""


@dataclass(frozen=True)
class PipelineCase:
    """Parameters of a drawing: seconds that one rank spends per micro-batch over all its chunks.

    Attributes:
        forward_s, input_s, weight_s: forward, gradient of the input, gradients of the weights.
    """

    ranks: int = 4
    micro_batches: int = 8
    chunks: int = 2
    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0


def pipeline(name: str, asked: PipelineCase) -> Timeline:
    """Show one step of a schedule over time.

    Raises:
        PlanError: an unknown schedule, or one that these numbers do not allow.

    >>> line = pipeline("1f1b", PipelineCase(ranks=4, micro_batches=8))
    >>> line.facts["bubble"], line.peak_bytes(0), line.peak_bytes(3)
    ('9.0 s = 37.5% of it, formula (p−1)(F+B+W): 9.0 s', 4.0, 1.0)
    """
    known = canonical_schedule(name)
    chunks = asked.chunks if known == "interleaved" else 1
    if asked.ranks * asked.micro_batches * chunks > LARGEST:
        raise PlanError(
            f"--ranks × --micro-batches = {asked.ranks} × {asked.micro_batches}: too much to "
            f"draw; try: --micro-batches {max(1, LARGEST // asked.ranks // chunks)}"
        )
    if asked.forward_s + asked.input_s + asked.weight_s <= 0:
        raise PlanError(
            "--forward, --backward, --weight = 0: nothing takes any time; try: --forward 1"
        )
    schedule = make_schedule(known, asked.ranks, asked.micro_batches, chunks)
    costs = AnalyticalCosts.for_pipeline(asked.forward_s, asked.input_s, asked.weight_s)
    line = simulate_schedule(schedule, costs, activation_bytes=1.0)
    title = (
        f"{known}, {_count_text(asked.ranks, 'rank')}, "
        f"{_count_text(asked.micro_batches, 'micro-batch')}"
    )
    title += f", {chunks} pieces of the model per rank" if chunks > 1 else ""
    facts = _facts(known, line, asked, chunks)
    return replace(line, title=title, facts=facts, held_unit="micro-batches")


def _figure_text(count: float) -> str:
    """Format a figure with at most two digits after the point and no trailing zeros.

    >>> _figure_text(4.0), _figure_text(2 / 3), _figure_text(1234567.0)
    ('4', '0.67', '1234567')
    """
    return f"{count:.2f}".rstrip("0").rstrip(".")


def _micro_batches_text(count: float) -> str:
    shown = _figure_text(count)
    return f"{shown} micro-batch{'' if shown == '1' else 'es'}"


def _count_text(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('ch') else 's'}"


def seconds_text(seconds: float) -> str:
    """Format seconds; rounding noise counts as 0.

    >>> seconds_text(9.0), seconds_text(1e-15)
    ('9.0 s', '0 s')
    """
    return usual_text(seconds) if seconds > 1e-9 else "0 s"


def closed_formula(name: str, asked: PipelineCase, chunks: int = 1) -> tuple[str, float] | None:
    """Return the bubble's formula and its seconds, if the literature gives one for these numbers.

    Without one (unequal F, B, W in split schedules, few micro-batches) only counting gives the
    bubble.

    >>> closed_formula("zero-bubble", PipelineCase(4, 8)), closed_formula("zbv", PipelineCase(4, 7))
    (('(p−1)(F+B−W)', 3.0), None)
    """
    p, m = asked.ranks, asked.micro_batches
    F, B, W = asked.forward_s, asked.input_s, asked.weight_s
    even = F == B == W
    if name in ("gpipe", "1f1b"):
        return "(p−1)(F+B+W)", (p - 1) * (F + B + W)
    if name == "interleaved":
        return "(p−1)(F+B+W)/v", (p - 1) * (F + B + W) / chunks
    if name == "zero-bubble" and even and m >= p:
        return "(p−1)(F+B−W)", (p - 1) * (F + B - W)
    if name == "zbv" and even and m >= 2 * p:
        return "0 for F=B=W", 0.0
    if name == "dualpipe" and even and m >= 2 * p:
        return "(p/2−1)(F+2B−W)", (p / 2 - 1) * (F + 2 * B - W)
    return None


def _facts(name: str, line: Timeline, asked: PipelineCase, chunks: int) -> dict[str, str]:
    bubble = timeline_bubble(line)
    closed = closed_formula(name, asked, chunks)
    says = f", formula {closed[0]}: {seconds_text(closed[1])}" if closed else ", counted"
    work = asked.micro_batches * (asked.forward_s + asked.input_s + asked.weight_s)
    return {
        "work of a rank": seconds_text(work),
        "bubble": f"{seconds_text(bubble)} = {bubble / work:.1%} of it{says}",
        "step up to the optimizer's barrier": seconds_text(line.end_s),
        "held at most": _micro_batches_text(max(held.held_bytes for held in line.memory)),
    }


def compare_afab_1f1b(asked: PipelineCase) -> tuple[tuple[Timeline, Timeline], tuple[str, ...]]:
    """Return both timelines, and sentences that compare them by their own figures.

    >>> lines = compare_afab_1f1b(PipelineCase(ranks=4, micro_batches=8))[1]
    >>> lines[0]
    'Same bubble: afab 9.0 s, 1f1b 9.0 s.'
    """
    first, second = pipeline("gpipe", asked), pipeline("1f1b", asked)
    bubbles = [timeline_bubble(line) for line in (first, second)]
    alike = "Same bubble" if abs(bubbles[0] - bubbles[1]) < 1e-9 else "Bubbles differ"
    held = [[line.peak_bytes(r) for r in range(line.ranks)] for line in (first, second)]
    shown = [", ".join(_figure_text(count) for count in counts[:8]) for counts in held]
    more = " …" if asked.ranks > 8 else ""
    return (first, second), (
        f"{alike}: afab {seconds_text(bubbles[0])}, 1f1b {seconds_text(bubbles[1])}.",
        f"Micro-batches held at once, rank by rank: afab {shown[0]}{more}; 1f1b {shown[1]}{more}.",
        "1f1b does a backward as soon as one is ready, so a rank waits with no more micro-batches "
        "than there are ranks behind it: more micro-batches shrink the bubble's share and cost no "
        "memory.",
    )
