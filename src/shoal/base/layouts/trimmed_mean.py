"""Number of changes that a trimmed mean drops: ⌊trim · changes⌋ at each end, which may be none.

trim 0.2, 5 changes   the least and the largest of five numbers are dropped
trim 0.2, 4 changes   ⌊0.8⌋ = 0: the plain mean, with one wrong owner in it
"""

from __future__ import annotations

import math
from typing import Any

from shoal.base.errors import ConfigError

FEWEST = 3
"""Changes of which one can be dropped at each end."""


def least_trim(changes: int) -> float:
    """Return the smallest `islands.trim` that drops one of so many changes at each end.

    Args:
        changes: at least FEWEST.

    >>> least_trim(3), least_trim(4), least_trim(5)
    (0.334, 0.25, 0.2)
    """
    return math.ceil(1000 / changes) / 1000


def check_trim(trim: float, changes: int, why: str) -> None:
    """Refuse a trimmed mean that drops nothing.

    Args:
        trim: `islands.trim`.
        changes: changes that are merged at a time.
        why: what makes them so many, in words.

    Raises:
        ConfigError: names the smallest value that drops one at each end.

    >>> check_trim(0.25, 4, "islands.count = 4")
    """
    if changes < FEWEST:
        raise ConfigError(
            f"islands.merge = trimmed: of {changes} change{'s' * (changes != 1)} at a time ({why}) "
            f"none can be dropped at each end; try: islands.merge=mean, or {FEWEST} changes"
        )
    if text := describe_untrimmed(trim, changes):
        raise ConfigError(f"{text} ({why}); try: islands.trim={least_trim(changes):g}")


def check_trimmed_policy(policy: Any) -> None:
    """Refuse a trimmed mean that drops none of the changes of a usual round.

    Args:
        policy: `IslandsPolicy`, its numbers settled.

    Raises:
        ConfigError: names the smallest value that drops one at each end.
    """
    if policy.data == "own" and policy.count == 1:
        return  # data.source may name the owners, which are counted later
    changes, why = policy.count, f"islands.count = {policy.count}"
    if policy.changes_members:
        changes, why = policy.least, f"islands.least = {policy.least}: a round may have so few"
    elif policy.sample < 1:
        changes = count_drawn(policy.sample, policy.count)
        why = f"islands.sample = {policy.sample:g} of {policy.count} owners"
    elif policy.regions > 1:
        changes = policy.count // policy.regions
        why = f"islands.regions = {policy.regions} of {policy.count} islands"
    check_trim(policy.trim, changes, why)


def count_drawn(share: float, active: int) -> int:
    """Return how many of the owners that have data left are drawn for a round.

    >>> count_drawn(0.2, 12), count_drawn(0.2, 1)
    (2, 1)
    """
    return max(1, round(share * active)) if active else 0


def describe_untrimmed(trim: float, changes: int) -> str:
    """Return that a trimmed mean drops none of so many changes; "" if it drops some.

    >>> describe_untrimmed(0.2, 4)
    'islands.trim = 0.2: drops none of 4 changes at each end, so one wrong change counts in full'
    """
    if changes >= FEWEST and int(trim * changes):
        return ""
    return (
        f"islands.trim = {trim:g}: drops none of {changes} changes at each end, so one wrong "
        f"change counts in full"
    )
