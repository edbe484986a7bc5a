"""Comparison of the ranks' collectives, by their pages.

Ranks of one process group must make the same calls, in the same order. It reports:

    another call    name, shape or format differ at the same place, or one rank makes more
    another order   the same calls of equal shapes come from lines that have changed places: they
                    sum unrelated tensors, and nothing fails
    another line    a line of the user's that no other rank has; a rank without samples may add its
                    zeros in another line, so this is only reported, and the run continues
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Call = tuple[str, str, str]
"""(name, shape and format, line)"""


@dataclass(frozen=True)
class CollectiveMismatch:
    """Two ranks whose collectives differ.

    Attributes:
        rank: the one to be blamed, as far as that can be known.
        line: for a person.
        certain: sums are wrong; else only the user can know.
    """

    rank: int
    line: str
    certain: bool


def compare_collectives(step: int, pages: Mapping[int, bytes]) -> CollectiveMismatch | None:
    """Return the first difference between ranks in a step; None if their calls agree.

    Args:
        step: its number, negative while it is under way: then a rank may still have calls to make.
        pages: by rank, the calls of that step in its page; text that ends in a line break was cut.
    """
    by_group: dict[str, dict[int, list[Call]]] = {}
    if any(lines.endswith(b"\n") for lines in pages.values()):  # the page had no room for the rest
        step = -abs(step)
    for rank, lines in pages.items():
        for line in lines.decode(errors="replace").splitlines():
            group, _, rest = line.partition("\t")
            call = tuple(rest.split("\t"))
            if len(call) == 3:
                by_group.setdefault(group, {}).setdefault(rank, []).append(call)
    found = []
    for group, calls in by_group.items():
        members = group.rpartition(":")[2].split(",")
        everyone = {rank: calls.get(rank, []) for rank in pages if str(rank) in members}
        found += [one for one in [_compare_group(step, everyone)] if one is not None]
    return min(found, key=lambda one: not one.certain, default=None)


def _compare_group(step: int, calls: Mapping[int, Sequence[Call]]) -> CollectiveMismatch | None:
    first, *others = sorted(calls)
    if step < 0:
        common = min(len(made) for made in calls.values())
        calls = {rank: made[:common] for rank, made in calls.items()}
    differ = {rank: _first_mismatch(calls[first], calls[rank]) for rank in others}
    for rank, unlike in differ.items():
        if unlike is None:
            continue
        place, certain = unlike
        agree = 1 + sum(one is None for one in differ.values())
        blamed = rank if 2 * agree >= len(calls) else first
        here, there = _format_call(calls[first], place), _format_call(calls[rank], place)
        why = "what they add up does not belong together" if certain else "do they belong together?"
        return CollectiveMismatch(
            blamed,
            f"step {abs(step)}: rank {first} calls {here}, rank {rank} {there}: {why}; "
            f"try: the same calls in the same order on every rank",
            certain,
        )
    return None


def _first_mismatch(ours: Sequence[Call], theirs: Sequence[Call]) -> tuple[int, bool] | None:
    """Return (index of the first call that differs, whether sums are wrong); certain ones first."""
    lines = None
    for place, (here, there) in enumerate(zip(ours, theirs, strict=False)):
        if here[:2] != there[:2]:
            return place, True
        if here[2] != there[2]:
            if here in theirs and there in ours:
                return place, True
            if lines is None and here[2].startswith("/") and there[2].startswith("/"):
                lines = (place, False)
    if len(ours) != len(theirs):
        return min(len(ours), len(theirs)), True
    return lines


def _format_call(calls: Sequence[Call], place: int) -> str:
    if place >= len(calls):
        return "none more"
    name, form, line = calls[place]
    lines = [Path(one).name if one.startswith("/") else one for one in line.split(" from ")]
    where = f" at {' from '.join(lines)}" if line else ""
    return f"{name}{f' of {form}' if form else ''}{where}"
