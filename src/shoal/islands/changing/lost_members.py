"""Members that a turn lacks: why they are absent, and whether the rest can decide without them.

absent         a member of the turn before merged nothing
left out       the others decided without this member's change
unreachable    refuses this member's key, or its process is dead, and a majority needs it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.commit_vote import name_islands
from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Seat,
    is_witness,
    majority,
)
from shoal.islands.membership.island_member import IslandMember


def describe_absent(
    fact: CommittedTurn, before: Iterable[Seat], reasons: Mapping[int, str], links: MemberLinks
) -> dict[int, str]:
    """Return why members are no committers of a turn: name → why.

    Args:
        before: seats of the turn before.
        reasons: why changes did not count.
    """
    gone, found = links.gone(before), {}
    for seat in before:
        if seat.name not in fact.committers and not is_witness(seat.name):
            dead = "its process ended" if seat.name in gone else "no change of it came in time"
            dead = "its key was taken out" if links.is_removed(seat.name) else dead
            found[seat.name] = reasons.get(seat.name, f"island {seat.name}: {dead}")
    return found


def describe_left_out(
    member: IslandMember, fact: CommittedTurn, before: Iterable[Seat], links: MemberLinks
) -> str:
    """Return who decided a turn without this member's change, and why; "" if it had no seat."""
    own, others = member.seat.name, fact.committers
    if own not in {seat.name for seat in before} or own in others or not others:
        return ""
    why = "its change came too late, or did not reach them"
    refusing = sorted(links.refusing().intersection(others))
    removed = [name for name in others if links.is_removed(name)]
    if refusing:
        why = f"the key of this island is not in the list of {name_islands(refusing)} any more"
    elif removed:
        whom = name_islands(removed)
        why = f"this island shut {whom} out, and others still list its key; try: the same list"
    return f"by {name_islands(others)}: {why}"


def list_unreachable(member: IslandMember, links: MemberLinks) -> tuple[int, ...]:
    """Return the members that refuse this one or are dead, if a majority needs them."""
    fact = member.fact
    if fact is None or not member.seated:
        return ()
    lost = (links.refusing() | links.gone(fact.seats)) & {*fact.names()}
    decides = len(fact.seats) - len(lost) >= majority(len(fact.seats))
    return () if decides else tuple(sorted(lost))
