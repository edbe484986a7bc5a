"""The names of pipeline schedules, and other names under which people know them."""

from __future__ import annotations

from shoal.base.errors import PlanError, one_of

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe")
"""Names of pipeline schedules; `afab` is another name of gpipe."""

ALIASES = {"afab": "gpipe", "zb-h1": "zero-bubble", "zb-v": "zbv"}


def canonical(name: str) -> str:
    """The name under which a schedule is known; PlanError for one that is not.

    >>> canonical("afab"), canonical("zb-h1")
    ('gpipe', 'zero-bubble')
    """
    known = ALIASES.get(name, name)
    if known not in SCHEDULES:
        raise PlanError(one_of("layout.schedule", name, [*SCHEDULES, "afab"]))
    return known
