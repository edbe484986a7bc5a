"""Smallest period, slowest link and settings at which islands reach a target utilisation.

Every function evaluates `islands_cost` repeatedly. Utilisation grows with the period H and with the
link's rate, so bisection finds the smallest of either; other settings are tried one by one.
Source: the formulas and their sources are in `forecast/time/island_costs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.base.errors import PlanError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.forecast.time.island_costs import IslandsCost, IslandsFacts, islands_cost

RATES_BYTES_PER_S = tuple(mbit * 1e6 / 8 for mbit in (10, 50, 200, 1000))
"""Link rates of a table: from a home's uplink to a good line between two sites."""

LONGEST_PERIOD = 10**8
FASTEST_BYTES_PER_S = 1e15
LEAST_STREAMED = 8
"""Inner steps per period that four fragments need, each with a step of overlap."""


def smallest_period(policy: IslandsPolicy, facts: IslandsFacts, target: float = 0.95) -> int | None:
    """Return the smallest period H, in inner steps, at which utilisation reaches `target`.

    None if utilisation stays lower even at H = 10^8. The wait per round hardly depends on H, so H
    grows with target / (1 − target).

    Args:
        policy: its period only settles other open settings.
        target: share of the time in inner steps.

    Raises:
        PlanError: target is not between 0 and 1; other errors as in `islands_cost`.

    >>> from shoal.forecast.time.island_costs import IslandsFacts
    >>> smallest_period(IslandsPolicy("diloco", count=3), IslandsFacts(20e6, 0.5, 50e6 / 8))
    667
    """
    _check_target(target)
    policy = policy.resolved()
    least = policy.fragments * (policy.overlap + 1)

    def enough(period: int) -> bool:
        return islands_cost(replace(policy, period=period), facts).utilisation >= target

    high = least
    while not enough(high):
        if high > LONGEST_PERIOD:
            return None
        high *= 2
    return _bisect(least, high, enough)


def needed_bytes_per_s(policy: IslandsPolicy, facts: IslandsFacts, target: float = 0.95) -> float:
    """Return the slowest link, in bytes/s, on which utilisation reaches `target`.

    Args:
        facts: its own bytes_per_s is ignored.
        target: share of the time in inner steps.

    Returns:
        Bytes per second; inf if no link is fast enough: latency, coding or slow islands cost more.

    Raises:
        PlanError: target is not between 0 and 1; other errors as in `islands_cost`.

    >>> facts = IslandsFacts(20e6, 0.5, 1.0)
    >>> link = needed_bytes_per_s(IslandsPolicy("streaming-diloco", count=3), facts)
    >>> round(link * 8 / 1e6, 1)
    37.6
    """
    _check_target(target)

    def utilisation(bytes_per_s: float) -> float:
        return islands_cost(policy, replace(facts, bytes_per_s=bytes_per_s)).utilisation

    if utilisation(FASTEST_BYTES_PER_S) < target:
        return math.inf
    low, high = 1e-3, FASTEST_BYTES_PER_S
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilisation(middle) >= target else (middle, high)
    return high


def costs_by_link(
    policy: IslandsPolicy,
    facts: IslandsFacts,
    rates_bytes_per_s: Sequence[float] = RATES_BYTES_PER_S,
) -> list[IslandsCost]:
    """Predict `islands_cost` on each of several links, in their order.

    Args:
        rates_bytes_per_s: each replaces facts.bytes_per_s; default 10, 50, 200, 1000 Mbit/s.

    Raises:
        PlanError, ConfigError: as in `islands_cost`.
    """
    return [islands_cost(policy, replace(facts, bytes_per_s=rate)) for rate in rates_bytes_per_s]


@dataclass(frozen=True)
class IslandsProposal:
    """Keys of `[islands]` that raise the utilisation, with the resulting utilisation."""

    keys: tuple[tuple[str, str], ...]
    utilisation: float

    @property
    def command_text(self) -> str:
        """Return the settings as on the command line.

        >>> IslandsProposal((("codec", "int8"), ("period", "100")), 0.9).command_text
        'islands.codec=int8 islands.period=100'
        """
        return " ".join(f"islands.{key}={value}" for key, value in self.keys)


def propose_settings(
    policy: IslandsPolicy, facts: IslandsFacts, target: float = 0.95
) -> list[IslandsProposal]:
    """Propose settings for more utilisation, the mildest first, up to the first that suffices.

    int8, then streaming in 4 bits with more and more overlapped inner steps, then a longer period:
    the order of their quality cost in papers. Each proposal stands alone and gives more utilisation
    than `policy` and the proposals before it.

    Args:
        target: sufficient utilisation: a share of the time in inner steps.

    Returns:
        [] if `policy` itself suffices. The last proposal may fall short if none suffices.

    Raises:
        PlanError: target is not between 0 and 1; other errors as in `islands_cost`.

    >>> facts = IslandsFacts(20e6, 0.5, 50e6 / 8)
    >>> [
    ...     (way.command_text, round(way.utilisation, 2))
    ...     for way in propose_settings(IslandsPolicy("diloco", count=3), facts)
    ... ]
    [('islands.codec=int8', 0.84), ('islands.method=streaming-diloco', 0.98)]
    """
    _check_target(target)
    policy = policy.resolved()
    now = islands_cost(policy, facts).utilisation
    if now >= target:
        return []
    found: list[IslandsProposal] = []
    for keys, changed in _proposals(policy, smallest_period(policy, facts, target)):
        used = islands_cost(changed, facts).utilisation
        if used > max((way.utilisation for way in found), default=now):
            found.append(IslandsProposal(tuple(keys.items()), used))
        if used >= target:
            break
    return found


def _proposals(
    policy: IslandsPolicy, longer: int | None
) -> list[tuple[dict[str, str], IslandsPolicy]]:
    """Return (keys to type, the policy that they make), the mildest first."""
    found: list[tuple[dict[str, str], IslandsPolicy]] = []
    if policy.method == "streaming-diloco":
        if policy.codec in ("none", "bf16", "int8"):
            found.append(({"codec": "e3m0"}, replace(policy, codec="e3m0")))
        found += _list_longer_overlaps({}, policy)
    elif policy.codec in ("none", "bf16"):
        found.append(({"codec": "int8"}, replace(policy, codec="int8")))
    # Islands in two tiers, and islands that come and go, merge the whole model at once.
    whole = policy.regions > 1 or policy.changes_members
    if policy.method == "diloco" and policy.period >= LEAST_STREAMED and not whole:
        streaming = replace(policy, method="streaming-diloco", codec="", fragments=0, overlap=-1)
        keys = {"method": "streaming-diloco"}
        found += [(keys, streaming), *_list_longer_overlaps(keys, streaming.resolved())]
    if longer is not None:
        found.append(({"period": str(longer)}, replace(policy, period=longer)))
    return found


def _list_longer_overlaps(
    keys: dict[str, str], policy: IslandsPolicy
) -> list[tuple[dict[str, str], IslandsPolicy]]:
    """List policies that hide a fragment's exchange behind more inner steps than `policy`.

    Args:
        keys: keys of [islands] that make `policy`.

    Returns:
        (keys to type, policy) with 2, 5, 10 and the most steps of overlap, fewest first.
    """
    most = policy.period // policy.fragments - 1
    return [
        ({**keys, "overlap": str(steps)}, replace(policy, overlap=steps))
        for steps in sorted({2, 5, 10, most})
        if policy.overlap < steps <= most
    ]


def _bisect(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest number from low to high that satisfies `enough`, by bisection."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _check_target(target: float) -> None:
    if not 0 < target < 1:
        raise PlanError(f"target = {target:g}: a share between 0 and 1, both out; try: target=0.95")
