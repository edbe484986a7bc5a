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
    name_members,
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


def explain_start(
    missing: Iterable[int], unheard: Iterable[tuple[int, int]], answering: set[int], own: str
) -> str:
    """Return why a start waits for members that are alive; "" if none is known to be.

    Args:
        missing: names that did not arrive.
        unheard: of those that arrived, who has not heard which other.
        answering: members that answer this process · own: its address.

    >>> explain_start((), [(1, 2)], set(), "10.0.0.1:29400")
    'island 1 hears nothing of island 2; try: open the port of island 1 (router, firewall)'
    """
    if deaf := answering.intersection(missing):
        return (
            f"{name_members(deaf)} can be reached from here, and nothing arrives at {own}; try: "
            f"forward that TCP port to this machine (router, firewall)"
        )
    for pair in unheard:
        one, other = (name_members([name]) for name in pair)
        return f"{one} hears nothing of {other}; try: open the port of {one} (router, firewall)"
    return ""


def explain_shortage(member: IslandMember) -> str:
    """Return why the members that are left may not go on."""
    trainers = member.fact.trainers() if member.fact is not None else ()
    if member.fact is not None and len(trainers) < member.least:
        return f"{len(trainers)} of at least {member.least} islands (islands.least)"
    return "no majority of the last round's islands, and so nobody may go on"


def describe_wait(
    member: IslandMember, names: tuple[int, ...], wait_s: float, addresses: Mapping[int, str]
) -> str:
    """Return the error of a member that has waited in vain, with the way on.

    Args:
        names: the members that it waits for; (-1,) if they are not known.
        wait_s: seconds that it waited.
        addresses: where it looked for them.
    """
    missing = name_members(names) if names != (-1,) else "more islands"
    waited = f"waited {wait_s:g} s (islands.wait_s) for {missing}"
    trainers = set() if member.fact is None else set(member.fact.trainers())
    left, third = max(1, len(trainers - set(names))), ""
    if member.fact is None or not member.seated:
        fewer = f"islands: {waited}; try: start {missing}, or fewer islands (islands.count)"
        islands = [name for name in addresses if not is_witness(name)]
        if member.fact is None or left > 1 or not islands:
            return fewer
        at = [addresses.get(name, "ADDRESS") for name in range(max(islands) + 1)]
        asked = " and ".join(addresses.get(name, "an unknown address") for name in names)
        return (
            f"islands: {waited} at {asked}; try: start {missing}; if an address changed: "
            f"shoal train --resume RUN islands.count={len(at)} islands.at={','.join(at)} with the "
            f"new one; without {missing}: shoal train --resume RUN islands.count=1"
        )
    if len(trainers) == 2:
        third = " (with a third voter, shoal islands witness, one of two goes on alone)"
    return (
        f"islands: {explain_shortage(member)}; {waited}; the last round is saved; try: "
        f"shoal train --resume RUN on {missing} and here{third}; if {missing} will not come back, "
        f"--resume RUN islands.count={left}"
    )
