"""DiLoCo step by step: islands train alone for H steps, then their changes move shared weights.

Island i minimizes (w − c_i)²/2 on its own data, whose optimum is c_i; the mean of all c_i is the
optimum of all data. A round is

    w_i ← W, then H inner steps w_i ← w_i − γ·(w_i − c_i)
    Δ = W − mean(w_i)                          the outer gradient: one message per round
    m ← μ·m + Δ,  W ← W − η·(Δ + μ·m)          Nesterov momentum, as torch.optim.SGD computes it

With H = 1, η = 1 and μ = 0 this is data parallelism: W − γ·mean gradient. All numbers are exact
fractions.

Source: Douillard et al. 2023 (DiLoCo); Stich 2019 (local SGD).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from shoal.base.plans.timeline import Timeline, TimelineSpan
from shoal.base.text.units import bytes_text, seconds_text
from shoal.teach.calculators.collectives_costs import ring_all_reduce_s
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks

PERIOD, ROUNDS = 50, 3
INNER_RATE, OUTER_RATE, MOMENTUM = Fraction(1, 64), Fraction(7, 10), Fraction(9, 10)
STEP_S, WEIGHT_BYTES, BITS_PER_S, LATENCY_S = 0.5, 80e6, 100e6, 0.02
"""An inner step, the weights (20 million in fp32), and the link between islands."""


@dataclass
class SharedWeights:
    """Weights W that all islands share, and their outer optimizer; one number stands for all.

    Attributes:
        period: H, inner steps of a round.
    """

    optima: list[Fraction]
    period: int = PERIOD
    outer_rate: Fraction = OUTER_RATE
    momentum: Fraction = MOMENTUM
    merged: Fraction = Fraction(0)
    velocity: Fraction = Fraction(0)

    def inner_steps(self) -> list[Fraction]:
        """Return every island's weights after H steps alone."""
        found = []
        for optimum in self.optima:
            own = self.merged
            for _ in range(self.period):
                own -= INNER_RATE * (own - optimum)
            found.append(own)
        return found

    def outer_step(self, own: list[Fraction]) -> Fraction:
        """Move W by the mean change of the islands, and return that change Δ."""
        change = self.merged - sum(own, Fraction(0)) / len(own)
        self.velocity = self.momentum * self.velocity + change
        self.merged -= self.outer_rate * (change + self.momentum * self.velocity)
        return change


def local_steps(ranks: int) -> StepThrough:
    """Show three rounds of DiLoCo on `ranks` islands.

    Raises:
        PlanError: a number of islands that cannot be shown.

    >>> walk = local_steps(4)
    >>> walk.facts["time in inner steps"], walk.facts["with an exchange in every step"]
    ('72.0 %', '4.9 %')
    """
    check_ranks("DiLoCo", ranks)
    world = SharedWeights([Fraction(4 * island) for island in range(ranks)])
    _check_period_one(world.optima)
    start = tuple(
        (_cell(world.merged, "whole"), *[TableCell("", "none")] * 3) for _ in world.optima
    )
    steps = []
    for turn in range(ROUNDS):
        before, own = world.merged, world.inner_steps()
        _check_closed_form(world, own)
        rows = tuple(
            (
                _cell(before, "whole"),
                _cell(w, "own"),
                _cell(before - w, "own"),
                TableCell("", "none"),
            )
            for w in own
        )
        title = f"round {turn + 1}: {PERIOD} inner steps"
        steps.append(WalkStep(title, ("each island alone, on its own data", "no message"), rows))
        change = world.outer_step(own)
        rows = tuple(
            (_cell(world.merged, "whole"), TableCell("", "none"), _cell(change, "part"),
             _cell(world.velocity, "whole"))
            for _ in own
        )  # fmt: skip
        happens = ("mean of the changes: one all-reduce", "outer Nesterov step moves W")
        steps.append(WalkStep(f"round {turn + 1}: exchange", happens, rows))
    return _finish(ranks, start, steps, world)


def _check_period_one(optima: list[Fraction]) -> None:
    """Check that H = 1 with a plain outer step is data parallelism."""
    one = SharedWeights(optima, period=1, outer_rate=Fraction(1), momentum=Fraction(0))
    weights = Fraction(0)
    for _ in range(3):
        one.outer_step(one.inner_steps())
        weights -= INNER_RATE * sum(weights - optimum for optimum in optima) / len(optima)
        check_equal("weights with H = 1", one.merged, weights)


def _check_closed_form(world: SharedWeights, own: list[Fraction]) -> None:
    """Check each island against the closed form c + (W − c)·(1 − γ)^H."""
    left = (1 - INNER_RATE) ** world.period
    for w, optimum in zip(own, world.optima, strict=True):
        check_equal("inner steps", w, optimum + (world.merged - optimum) * left)


def _finish(
    ranks: int,
    start: tuple[tuple[TableCell, ...], ...],
    steps: list[WalkStep],
    world: SharedWeights,
) -> StepThrough:
    """Return the walk with its timeline and the cost of the link."""
    inner_s = PERIOD * STEP_S
    link_s = ring_all_reduce_s(ranks, WEIGHT_BYTES, LATENCY_S, 8 / BITS_PER_S)
    spans = []
    for turn in range(ROUNDS):
        at = turn * (inner_s + link_s)
        for island in range(ranks):
            spans.append(TimelineSpan(island, at, at + inner_s, "compute", f"{PERIOD} steps"))
            spans.append(
                TimelineSpan(island, at + inner_s, at + inner_s + link_s, "all-reduce", "Δ", "link")
            )
    mean = sum(world.optima) / len(world.optima)
    facts = {
        "time in inner steps": f"{100 * inner_s / (inner_s + link_s):.1f} %",
        "with an exchange in every step": f"{100 * STEP_S / (STEP_S + link_s):.1f} %",
        "one exchange": f"{seconds_text(link_s)} for {bytes_text(WEIGHT_BYTES)} at 100 Mbit/s",
        "an island sends per inner step": bytes_text(
            2 * (ranks - 1) / ranks * WEIGHT_BYTES / PERIOD
        ),
    }
    title = f"DiLoCo, {ranks} islands, H = {PERIOD}"
    return StepThrough(
        title=title,
        story=(
            f"Islands start from the same W. Each takes {PERIOD} steps alone, towards the optimum "
            "of its own data. Then the mean of their changes is the gradient of an outer "
            f"optimizer (rate {float(OUTER_RATE):g}, Nesterov momentum {float(MOMENTUM):g}), "
            f"which moves W. The optimum of all data is {float(mean):g}.",
        ),
        rows=tuple(f"island {island}" for island in range(ranks)),
        columns=("W", "own w", "change", "momentum"),
        start=start,
        steps=tuple(steps),
        checked="inner steps equal their closed form; with H = 1, outer rate 1 and no momentum the "
        "same code takes the steps of data parallelism, as exact fractions",
        looks={"whole": "the same on all", "part": "mean over islands"},
        timeline=Timeline(title, ranks, tuple(spans), facts=facts, member="island"),
        facts=facts,
    )


def _cell(number: Fraction, look: str) -> TableCell:
    return TableCell(f"{float(number):.2f}", look)
