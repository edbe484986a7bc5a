"""What islands joined by slow links cost: seconds per outer step, utilisation, bytes, peak rate.

Each of R islands takes H inner steps of t seconds alone, then all average what changed, on a ring:

    sent per island and round   S = 2(R−1)/R · P · bits/8         P parameters
    one of F fragments          t_f = S/F / W + 2(R−1)·ε          W bytes/s of an island's link
    exposed per fragment        max(0, t_f − τ·t)                 sent beside the next τ inner steps
    round                       H·t + F · exposed + outer         outer: the optimizer's step
    utilisation                 H·t / round

Fragments leave one by one, every H/F steps, and one is on the way at a time, so τ ≤ H/F. They do
not make S smaller; they make it smooth: a link that hides everything must carry S/F in τ·t, against
S in H·t in the mean. The slowest island sets t and W.
Against the simulation in the Streaming DiLoCo paper (Gbit/s for a given utilisation, 10B and 100B,
two islands, H = 100, nothing hidden) this asks for 1.07 to 1.3 times its Gbit/s at 50 to 95 %, and
for 1.8 to 1.9 times at 99 %; at 4 bits with one step of overlap for 1.0 to 1.2 (24 fragments).
Sources: Douillard et al. 2023 and 2025; torchft `local_sgd.py` (one fragment in flight, τ ≤ H/F).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.planner.calculators.diloco import bytes_per_outer_step, check_period, outer_step_s


@dataclass(frozen=True)
class IslandsCase:
    """R islands, a model and a link; see the module for the letters.

    islands   R · parameters P · step_s t, of the slowest island · bytes_per_s W, per direction
    period    H · wire_bits per parameter · fragments F · overlap_steps τ · latency_s ε per message
    outer_s   that the outer optimizer stops an island per round
    Errors    PlanError on making one that cannot run
    """

    islands: int
    parameters: float
    step_s: float
    bytes_per_s: float
    period: int
    wire_bits: float = 32.0
    fragments: int = 1
    overlap_steps: int = 0
    latency_s: float = 0.0
    outer_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if self.islands < 2:
            raise PlanError(f"islands = {self.islands}: at least 2; nearest: islands=2")
        if not self.parameters > 0 or not self.step_s > 0:
            raise PlanError(
                f"parameters = {self.parameters:g}, step_s = {self.step_s:g}: both more than 0; "
                f"nearest: parameters=1e9 step_s=1"
            )
        check_period(self.period)
        if not 1 <= self.fragments <= self.period:
            raise PlanError(
                f"fragments = {self.fragments}: 1 to the period, {self.period}; nearest: "
                f"fragments={min(max(1, self.fragments), self.period)}"
            )
        if not 0 <= self.overlap_steps <= self.period // self.fragments:
            slot = self.period // self.fragments
            raise PlanError(
                f"overlap_steps = {self.overlap_steps}: one fragment is on the way at a time, and "
                f"they leave every {self.period}/{self.fragments} steps; nearest: "
                f"overlap_steps={slot}, or fragments={self.period // max(1, self.overlap_steps)}"
                if self.overlap_steps > 0
                else f"overlap_steps = {self.overlap_steps}: 0 or more; nearest: overlap_steps=0"
            )
        if self.latency_s < 0 or self.outer_s < 0:
            raise PlanError("latency_s, outer_s: 0 or more; nearest: latency_s=0 outer_s=0")
        self.fragment_s()

    def fragment_s(self) -> float:
        """Seconds in which one fragment is averaged. Errors: PlanError for no link or no bits."""
        return outer_step_s(
            self.parameters / self.fragments,
            self.islands,
            self.wire_bits,
            self.bytes_per_s,
            self.latency_s,
        )


@dataclass(frozen=True)
class IslandsCost:
    """One round of every island.

    compute_s + exposed_s + outer_s = round_s · sending_s  the link is busy
    sent_bytes        per island and round, and received as many
    mean_bytes_per_s  over the round · peak_bytes_per_s  while a fragment travels
    hiding_bytes_per_s  the rate at which nothing would be exposed; inf without overlap
    """

    compute_s: float
    exposed_s: float
    outer_s: float
    round_s: float
    sending_s: float
    sent_bytes: float
    mean_bytes_per_s: float
    peak_bytes_per_s: float
    hiding_bytes_per_s: float

    @property
    def utilisation(self) -> float:
        """Share of the time in which an island computes inner steps."""
        return self.compute_s / self.round_s


def islands_cost(case: IslandsCase) -> IslandsCost:
    """Seconds and bytes of one round.

    10B parameters in two islands, steps of 0.8 s, H = 100, bf16, 1 Gbit/s: the islands compute a
    third of the time; with 24 fragments in 4 bits, each sent beside one step, 79 %.

    >>> plain = IslandsCase(2, 10e9, 0.8, 125e6, 100, wire_bits=16)
    >>> cost = islands_cost(plain)
    >>> cost.round_s, round(cost.utilisation, 3), cost.sent_bytes / 1e9
    (240.0, 0.333, 20.0)
    >>> streaming = replace(plain, wire_bits=4, fragments=24, overlap_steps=1)
    >>> round(islands_cost(streaming).utilisation, 3)
    0.794
    """
    compute_s = case.period * case.step_s
    fragment_s, hidden_s = case.fragment_s(), case.overlap_steps * case.step_s
    exposed_s = case.fragments * max(0.0, fragment_s - hidden_s)
    round_s = compute_s + exposed_s + case.outer_s
    sent = bytes_per_outer_step(case.parameters, case.islands, case.wire_bits)
    spare_s = hidden_s - 2 * (case.islands - 1) * case.latency_s
    return IslandsCost(
        compute_s=compute_s,
        exposed_s=exposed_s,
        outer_s=case.outer_s,
        round_s=round_s,
        sending_s=case.fragments * fragment_s,
        sent_bytes=sent,
        mean_bytes_per_s=sent / round_s,
        peak_bytes_per_s=min(case.bytes_per_s, sent / case.fragments / fragment_s),
        hiding_bytes_per_s=sent / case.fragments / spare_s if spare_s > 0 else math.inf,
    )


def smallest_period(case: IslandsCase, target: float = 0.95) -> int:
    """The smallest H with which the islands compute for the share `target` of the time.

    What is exposed per round does not depend on H, so H = u/(1−u) · (exposed + outer)/t; at least
    one step per fragment, and τ per fragment.

    >>> smallest_period(IslandsCase(2, 10e9, 0.8, 125e6, 100, wire_bits=16))
    3800
    """
    _check_target(target)
    cost = islands_cost(case)
    waiting_s = cost.exposed_s + cost.outer_s
    least = case.fragments * max(1, case.overlap_steps)
    wanted = target / (1 - target) * waiting_s / case.step_s
    return max(least, math.ceil(wanted * (1 - 1e-12)))


def needed_bytes_per_s(case: IslandsCase, target: float = 0.95) -> float:
    """The slowest link with which the islands compute for the share `target` of the time.

    Gives inf where latency or the outer step alone take more.

    >>> case = IslandsCase(2, 10e9, 0.8, 1.0, 100, wire_bits=16)
    >>> [round(needed_bytes_per_s(case, u) * 8 / 1e9, 1) for u in (0.5, 0.8, 0.9, 0.95)]
    [2.0, 8.0, 18.0, 38.0]
    """
    _check_target(target)
    allowed_s = case.period * case.step_s * (1 - target) / target - case.outer_s
    messages_s = 2 * (case.islands - 1) * case.latency_s
    per_fragment_s = allowed_s / case.fragments + case.overlap_steps * case.step_s - messages_s
    if allowed_s < 0 or per_fragment_s <= 0:
        return math.inf
    sent = bytes_per_outer_step(case.parameters, case.islands, case.wire_bits)
    return sent / case.fragments / per_fragment_s


def utilisation_table(
    case: IslandsCase, rates_bytes_per_s: Sequence[float], periods: Sequence[int]
) -> list[list[float]]:
    """Utilisation by link (rows) and period (columns); τ is cut where H/F is shorter.

    >>> case = IslandsCase(2, 10e9, 0.8, 1.0, 100, wire_bits=16)
    >>> [[round(u, 2) for u in row] for row in utilisation_table(case, [1.25e8, 1.25e9], [30, 300])]
    [[0.13, 0.6], [0.6, 0.94]]
    """
    return [[_at(case, rate, period) for period in periods] for rate in rates_bytes_per_s]


def _at(case: IslandsCase, rate: float, period: int) -> float:
    fragments = min(case.fragments, period)
    overlap = min(case.overlap_steps, period // fragments)
    changed = replace(
        case, bytes_per_s=rate, period=period, fragments=fragments, overlap_steps=overlap
    )
    return islands_cost(changed).utilisation


def _check_target(target: float) -> None:
    if not 0 < target < 1:
        raise PlanError(
            f"target = {target:g}: a share between 0 and 1, both out; nearest: target=0.95"
        )
