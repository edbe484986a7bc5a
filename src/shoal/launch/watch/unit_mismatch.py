"""Comparison of the units that ranks gather under sharded layouts, by the ranks' pages.

Under fsdp and hsdp the k-th collective of units in a group must be of one unit on all of its ranks.
Ranks write the last ones into their pages (wire/watch_page.py). No correct run has one of these,
however slow it is:

    another unit     the k-th collective of a group is of unit A on one rank, of unit B on another
    another order    after unit k one rank made more collectives of other kinds than another one
                     made before its unit k + 1, in the same step: each waits for the other

So the report needs no measurement of the run, and a rank that reads data, compiles or computes for
minutes is not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.base.text.rank_differences import blocks_line
from shoal.launch.watch.page_reader import PageReader, PageSnapshot, RecordedUnitCall

NONE_MORE = "no further block"


@dataclass(frozen=True)
class UnitMismatch:
    """Ranks that gather different units.

    Attributes:
        rank: one of the smallest group.
        calls: by rank, the unit and pass.
    """

    rank: int
    calls: Mapping[int, str]

    def line(self, when: str) -> str:
        """Return the difference as one line.

        Args:
            when: "step 3".
        """
        return blocks_line(self.calls, when)


def compare_units(
    pages: Mapping[int, PageReader], told: Mapping[int, PageSnapshot], kinds: Mapping[int, str]
) -> UnitMismatch | None:
    """Return the first difference between ranks of a group; None without one.

    Args:
        told: by rank, the present contents of its page.
        kinds: phase of each rank, "" if ranks may rightly make other collectives in it (a save).
    """
    by_group: dict[int, dict[int, dict[int, RecordedUnitCall]]] = {}
    for rank, page in pages.items():
        for key, calls in page.units().items():
            by_group.setdefault(key, {})[rank] = calls
    for groups in by_group.values():
        if len(groups) < 2:
            continue
        if unlike := _compare_unit_numbers(groups) or _compare_unit_order(groups, told, kinds):
            often = Counter(unlike.values())
            rank = min(unlike, key=lambda rank: (often[unlike[rank]], -rank))
            return UnitMismatch(rank, unlike)
    return None


def _compare_unit_numbers(groups: Mapping[int, Mapping[int, RecordedUnitCall]]) -> dict[int, str]:
    """Return by rank the units of the first collective that is not of one unit; {} without one."""
    for number in sorted({number for calls in groups.values() for number in calls}):
        found = {rank: calls[number].text for rank, calls in groups.items() if number in calls}
        if len(set(found.values())) > 1:
            return found
    return {}


def _compare_unit_order(
    groups: Mapping[int, Mapping[int, RecordedUnitCall]],
    told: Mapping[int, PageSnapshot],
    kinds: Mapping[int, str],
) -> dict[int, str]:
    """Return by rank its next unit, or NONE_MORE if it continued without; {} if in order."""
    last = {rank: max(calls) for rank, calls in groups.items()}
    ahead = max(last, key=lambda rank: last[rank])
    done: list[int] = []
    for rank, number in last.items():
        calls, others = groups[rank], groups[ahead]
        alike = kinds[rank] == kinds[ahead] != "" and told[rank].step == told[ahead].step
        if not alike or number not in others or number + 1 not in others:
            continue
        here = told[rank].begun - calls[number].begun
        there = others[number + 1].begun - others[number].begun
        if here > there:
            done.append(rank)
    if not done:
        return {}
    number = min(last[rank] for rank in done)
    found = {rank: NONE_MORE for rank in done if last[rank] == number}
    found |= {r: calls[number + 1].text for r, calls in groups.items() if number + 1 in calls}
    return dict(sorted(found.items()))
