"""Predicted costs of islands on slow links: seconds per round, utilisation, bytes, memory.

Each of R islands takes H inner steps of t seconds alone. The weights have P fragments; the islands
merge one at a time, and send each fragment τ inner steps before they apply its result:

    coded       C = β·n                          n parameters of a fragment, β bytes of each
    sent        S = 2(R−1)/R · C                 coded twice: own message, then a share of the mean
                S = (R−1) · C                    codecs whose sums do not stay small: all to all
    exchange    x = max(S/W, coding) + 6·ε + outer       W bytes/s of an island's link, ε latency
    round       T = H·t + P · (own + max(0, x − τ·t))
    utilisation H·t / T

Coding overlaps the link, chunk by chunk. The sender codes a message once, and the owner decodes its
parts twice; the owner codes the mean, and all decode it. Six messages follow one another: two
halves, and two gatherings of a length and its content. `outer` is the outer optimizer's step and
the digest; `own` is the difference and the blend, during which an island's inner steps stop.
Fragments do not reduce the bytes sent; they make the traffic smooth. Islands of unequal speed take
H_i = max(1, round(H·v_i/v_max)) steps; T then comes from a simulation with a clock per island.

Owners (`islands.data=own`) may be more than the R groups of processes that train them, and only a
share of them trains in a round: m messages per group. Then a group takes m·H steps, and sends

    S = (m + 1)(R−1)/R · C, or m·(R−1)·C         m = 1 is the above; twice as much under scaffold

Its memory holds m messages, the states of the inner optimizers of all its owners if they take
turns, and their controls.

Not counted: the core that the exchange takes from inner steps, and losses on the link.
The Streaming DiLoCo paper simulates the Gbit/s for a given utilisation (10B and 100B, two islands,
H = 100, nothing hidden). These formulas need 1.07 to 1.3 times its Gbit/s at 50 to 95 %, and 1.8 to
1.9 times at 99 %. At 4 bits with one step of overlap they need 1.0 to 1.25 times (24 fragments).
Sources: Douillard et al. 2023 (DiLoCo), 2025 (streaming); Liu et al. 2024 (steps by speed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import PlanError, check_not_negative, check_positive
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.forecast.time.codec_costs import CODINGS, MEMORY_BYTES_PER_S, coded_bytes

DIGEST_BYTES_PER_S = 1e9
"""SHA-256 by one core; 1.1 to 1.5 were measured. Without SHA instructions less than half."""

MESSAGES = 6
"""Sequential messages of an exchange."""

OWN_PASSES = 6
"""Memory passes over a fragment that stop the inner steps: difference 3 (two reads, one write),
blend 3."""

OUTER_PASSES = 14
"""Memory passes during the inner steps: the outer step 11 (measured, Nesterov), the Gram matrix of
the received fragments 2 (measured, 3 islands), cutting 1."""

STATES = {"sgd": 1, "adagrad": 1, "rmsprop": 1}
"""Numbers per parameter that an outer optimizer keeps; 2 for all others."""


@dataclass(frozen=True)
class IslandsFacts:
    """Facts of a model, of islands and of their links, known before a run.

    Attributes:
        parameters: elements of the whole model.
        step_s: seconds of the fastest island's inner step.
        bytes_per_s: of the slowest island's link, each direction; all its processes share it.
        latency_s: seconds of a message.
        near_bytes_per_s: of links inside a region (islands.regions); 0: as bytes_per_s.
        speeds: of every island, as a share of the fastest; () if all are equally fast.
        tokens: tokens of one island's inner step; 0 if unknown.
        ranks: processes of an island; each works on its share on its own core.
        element_bytes: 4, or 8 for float64 parameters.
        inner_numbers: numbers per parameter that the inner optimizer keeps, for owners that take
            turns.

    Raises:
        PlanError: in the constructor: parameters, step_s, bytes_per_s or ranks of 0 or less;
            latency_s, near_bytes_per_s or tokens below 0; a speed that is not in (0, 1].
    """

    parameters: float
    step_s: float
    bytes_per_s: float
    latency_s: float = 0.0
    near_bytes_per_s: float = 0.0
    speeds: tuple[float, ...] = ()
    tokens: float = 0.0
    ranks: int = 1
    element_bytes: int = 4
    inner_numbers: float = 0.0

    def __post_init__(self) -> None:
        """Refuse impossible facts."""
        for name, value, nearest in (
            ("parameters", self.parameters, "1e9"),
            ("step_s", self.step_s, "1"),
            ("bytes_per_s", self.bytes_per_s, "125e6"),
            ("ranks", self.ranks, "1"),
        ):
            check_positive(nearest, **{name: value})
        check_not_negative(
            latency_s=self.latency_s, near_bytes_per_s=self.near_bytes_per_s, tokens=self.tokens
        )
        if not all(0 < speed <= 1 for speed in self.speeds):
            wrong = next(speed for speed in self.speeds if not 0 < speed <= 1)
            raise PlanError(f"speeds: {wrong:g} is no share of the fastest island's speed; try: 1")


@dataclass(frozen=True)
class IslandsCost:
    """Predicted cost of one round of islands: the mean of rounds that differ (islands.regions).

    Attributes:
        steps: inner steps of every island, in their order.
        compute_s: seconds in them, mean of islands.
        waited_s: seconds outside inner steps; compute_s + waited_s = round_s.
        exposed_s: part of waited_s for the exchange or slower islands; the rest is an island's own
            work on a merge (difference and blend).
        exchange_s: sum over all fragments, each from the message to the vote, overlapped or not; of
            a round in which all islands meet.
        sent_bytes: sent per island and round; as many are received.
        mean_bytes_per_s: over the round.
        peak_bytes_per_s: during the exchange of a fragment.
        hiding_bytes_per_s: the slowest link on which `overlap` inner steps hide an exchange, 0 if
            islands send nothing, inf if no link is fast enough.
        memory_bytes: of the host, per process: merged weights and outer state of every tier, and
            error feedback of codecs.
        bytes_per_token: sent by an island per trained token; 0 if tokens are unknown.
    """

    steps: tuple[int, ...]
    compute_s: float
    waited_s: float
    exposed_s: float
    round_s: float
    exchange_s: float
    sent_bytes: float
    mean_bytes_per_s: float
    peak_bytes_per_s: float
    hiding_bytes_per_s: float
    memory_bytes: float
    bytes_per_token: float

    @property
    def utilisation(self) -> float:
        """Return the share of the time in which an island takes inner steps."""
        return self.compute_s / self.round_s

    def record(self) -> dict[str, Any]:
        """Return all figures by name as a JSON object: infinite ones are null."""
        known = {name: None if value == math.inf else value for name, value in vars(self).items()}
        return {**known, "steps": list(self.steps), "utilisation": self.utilisation}


def islands_cost(policy: IslandsPolicy, facts: IslandsFacts) -> IslandsCost:
    """Predict seconds, bytes and memory of one round of islands.

    Args:
        policy: `[islands]`; its open settings are settled in a copy.

    Raises:
        ConfigError: a policy that cannot run.
        PlanError: method none, or speeds that are not one per island.

    20M parameters in 3 islands of one process, steps of 0.5 s, 50 Mbit/s: DiLoCo in fp32 waits
    for 17.5 s after 25 s of work, streaming in 4 bits beside 5 steps for almost nothing.

    >>> facts = IslandsFacts(20e6, 0.5, 50e6 / 8)
    >>> cost = islands_cost(IslandsPolicy("diloco", count=3), facts)
    >>> round(cost.utilisation, 3), round(cost.sent_bytes / 1e6, 1)
    (0.588, 106.7)
    >>> streaming = IslandsPolicy("streaming-diloco", count=3, overlap=5)
    >>> round(islands_cost(streaming, facts).utilisation, 3)
    0.996
    """
    policy = policy.resolved()
    _check(policy, facts)
    steps, times = island_paces(policy, facts)
    compute_s = sum(h * t for h, t in zip(steps, times, strict=True)) / len(steps)
    own_s = _passes_s(OWN_PASSES, facts, facts.parameters / policy.fragments)
    tiers = _island_tiers(policy, facts)
    each = [predict_exchange(policy, facts, group, bytes_per_s) for group, bytes_per_s, _ in tiers]
    pace = sorted(set(zip(steps, times, strict=True)))
    total_s = sent = 0.0
    for (_, _, rounds), one in zip(tiers, each, strict=True):
        total_s += rounds * _simulate_round_s(policy, pace, one.seconds, own_s)
        sent += rounds * policy.fragments * one.sent_bytes
    round_s, far = max(total_s, compute_s), each[-1]  # rounding alone could make it smaller
    learnt = facts.tokens * sum(steps) / len(steps)
    return IslandsCost(
        steps=steps,
        compute_s=compute_s,
        waited_s=round_s - compute_s,
        exposed_s=max(0.0, round_s - compute_s - policy.fragments * own_s),
        round_s=round_s,
        exchange_s=policy.fragments * far.seconds,
        sent_bytes=sent,
        mean_bytes_per_s=sent / round_s,
        peak_bytes_per_s=far.sent_bytes / far.travel_s if far.sent_bytes else 0.0,
        hiding_bytes_per_s=_hiding_bytes_per_s(far, policy.overlap * facts.step_s),
        memory_bytes=facts.element_bytes
        * facts.parameters
        / facts.ranks
        * (_extra_copies(policy) + _owner_copies(policy, facts)),
        bytes_per_token=sent / learnt if learnt else 0.0,
    )


@dataclass(frozen=True)
class FragmentExchange:
    """Exchange of one fragment: bytes that an island sends, and its seconds.

    Attributes:
        travel_s: of the link, or of coding if that is slower.
        seconds: of the whole exchange.
    """

    sent_bytes: float
    coding_s: float
    travel_s: float
    seconds: float


def predict_exchange(
    policy: IslandsPolicy, facts: IslandsFacts, islands: int, bytes_per_s: float
) -> FragmentExchange:
    """Return the exchange of one fragment among a number of islands; `policy` is settled."""
    elements, coding = facts.parameters / policy.fragments, CODINGS[policy.codec]
    elements *= 1 + (policy.method == "scaffold")
    coded = coded_bytes(policy.codec, elements, facts.element_bytes)
    others, messages = islands - 1, mean_messages(policy)
    sent = others * coded * messages
    if not coding.gathers:
        sent = (messages + 1) * others / islands * coded
    encoded, decoded = (1, 1 + islands) if coding.gathers else (1 + 1 / islands, 3)
    plain_bytes = facts.element_bytes * elements / facts.ranks
    coding_s = plain_bytes * (
        encoded / coding.encode_bytes_per_s + decoded / coding.decode_bytes_per_s
    )
    digest_s = plain_bytes * (1 + _outer_state_count(policy)) / DIGEST_BYTES_PER_S
    outer_s = _passes_s(OUTER_PASSES, facts, elements) + digest_s
    travel_s = max(sent / bytes_per_s, coding_s)
    latency_s = MESSAGES * facts.latency_s if others else 0.0
    return FragmentExchange(sent, coding_s, travel_s, travel_s + latency_s + outer_s)


def mean_messages(policy: IslandsPolicy) -> float:
    """Return the mean number of messages that a group of processes sends in a round.

    >>> mean_messages(IslandsPolicy("fedavg", count=100, data="own", concurrent=2, sample=0.2))
    10.0
    """
    if not policy.owned:
        return 1.0
    return max(1, round(policy.sample * policy.count)) / policy.groups


def _hiding_bytes_per_s(one: FragmentExchange, hidden_s: float) -> float:
    """Return the rate of the link on which an exchange takes no longer than `hidden_s`."""
    if not one.sent_bytes:
        return 0.0
    left_s = hidden_s - (one.seconds - one.travel_s)
    return one.sent_bytes / left_s if left_s > one.coding_s else math.inf


def island_paces(
    policy: IslandsPolicy, facts: IslandsFacts
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return (inner steps per round, seconds of a step) of every island; `policy` is settled.

    >>> facts = IslandsFacts(1e6, 1.0, 1e6, speeds=(1.0, 0.25))
    >>> island_paces(IslandsPolicy("diloco", count=2).resolved(), facts)
    ((50, 12), (1.0, 4.0))
    """
    speeds = facts.speeds or (1.0,) * policy.groups
    fastest, period = max(speeds), policy.period * mean_messages(policy)
    steps = tuple(max(1, round(period * speed / fastest)) for speed in speeds)
    return steps, tuple(facts.step_s * fastest / speed for speed in speeds)


def _simulate_round_s(
    policy: IslandsPolicy, paces: list[tuple[int, float]], exchange_s: float, own_s: float
) -> float:
    """Return the mean seconds of rounds after the first, simulated with a clock per pace."""
    rounds = 3
    clocks, ends = [0.0] * len(paces), []
    for _ in range(rounds):
        done = [0] * len(paces)
        for fragment in range(policy.fragments):
            applies = [max(1, (fragment + 1) * h // policy.fragments) for h, _ in paces]
            for i, (_, step_s) in enumerate(paces):
                sends = max(1, done[i], applies[i] - policy.overlap)
                clocks[i] += (sends - done[i]) * step_s
                done[i] = sends
            arrives = max(clocks) + own_s / 2 + exchange_s
            for i, (_, step_s) in enumerate(paces):
                ready = clocks[i] + own_s / 2 + (applies[i] - done[i]) * step_s
                clocks[i] = max(ready, arrives) + own_s / 2
                done[i] = applies[i]
        ends.append(max(clocks))
    return (ends[-1] - ends[0]) / (rounds - 1)


def _island_tiers(policy: IslandsPolicy, facts: IslandsFacts) -> list[tuple[int, float, float]]:
    """Return (islands that meet, bytes/s of their link, share of the rounds), all islands last."""
    if policy.method == "noloco":
        return [(min(2, policy.count), facts.bytes_per_s, 1.0)]
    far = 1 / policy.far_period if policy.regions > 1 else 1.0
    near = (
        policy.groups // policy.regions,
        facts.near_bytes_per_s or facts.bytes_per_s,
        1.0 - far,
    )
    return [*([near] if far < 1 else []), (policy.groups, facts.bytes_per_s, far)]


def _passes_s(passes: float, facts: IslandsFacts, elements: float) -> float:
    return passes * facts.element_bytes * elements / facts.ranks / MEMORY_BYTES_PER_S


def _outer_state_count(policy: IslandsPolicy) -> int:
    """Return the outer optimizer's numbers of state per parameter."""
    if policy.method == "fedopt":
        return 2
    if policy.outer == "sgd" and not policy.outer_momentum:
        return 0
    return STATES.get(policy.outer, 2)


def _extra_copies(policy: IslandsPolicy) -> int:
    """Return the memory of an island beside its weights, in values per parameter."""
    tiers = 2 if policy.regions > 1 else 1
    return tiers * (1 + _outer_state_count(policy)) + (2 if CODINGS[policy.codec].feedback else 0)


def _owner_copies(policy: IslandsPolicy, facts: IslandsFacts) -> float:
    """Return the memory for data owners, in values per parameter: messages, optimizer states."""
    if not policy.owned:
        return 0.0
    owners, controls = len(policy.owners_of(0)), int(policy.method == "scaffold")
    inner = facts.inner_numbers * owners if owners > 1 else 0.0
    return mean_messages(policy) * (1 + controls) + inner + controls * (owners + 1)


def _check(policy: IslandsPolicy, facts: IslandsFacts) -> None:
    if not policy.on:
        raise PlanError("islands.method = none: nothing to foresee; try: islands.method=diloco")
    if facts.speeds and len(facts.speeds) != policy.groups:
        raise PlanError(
            f"speeds: {len(facts.speeds)} for islands.count = {policy.groups}; one for each island"
        )
