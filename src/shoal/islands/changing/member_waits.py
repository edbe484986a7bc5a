"""Waits of a member, in words: for whom, why, and the way on.

start         not all have met yet: a closed port, a refused key, a witness that had a seat
shortage      a majority of the last turn's members is lost
in vain       islands.wait_s has passed: an error with the commands, which name the run folder
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import filterfalse
from typing import NamedTuple

from shoal.base.layouts.changing_members import name_member
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.membership.committed_turn import is_witness, name_members
from shoal.islands.membership.island_member import IslandMember

HAD_SEAT = "it had a seat in the last round, and may have decided later ones with another island"
UNKNOWN = (-1,)
"""Names of members of which only the number is known."""


class ResumeCommand(NamedTuple):
    """Command that goes on with this island's run folder.

    Attributes:
        text: `shoal train --resume` and the folder.
        is_whole: it starts all islands of this machine, so it takes their number alone.
    """

    text: str
    is_whole: bool = False

    def without(self, own: int, left: Iterable[int], addresses: Mapping[int, str]) -> str:
        """Return the command of an island for those that are left: each has one of its own.

        Args:
            own: number of this island · left: of all that are left.

        >>> ResumeCommand("shoal train --resume runs/x").without(2, [0, 2], {0: "a:1", 2: "c:1"})
        'shoal train --resume runs/x islands.count=2 islands.index=1 islands.at=a:1,c:1'
        """
        names = sorted({own, *left})
        known = [addresses[name] for name in names if name in addresses]
        command = f"{self.text} islands.count={len(names)}"
        if self.is_whole or len(names) == 1 or len(known) < len(names):
            return command  # for one alone `--resume` sets the others
        return f"{command} islands.index={names.index(own)} islands.at={','.join(known)}"

    def at_new_address(self, addresses: Mapping[int, str]) -> str:
        """Return the command with the addresses of all islands, of which one may be replaced."""
        islands = [name for name in addresses if not is_witness(name)]
        at = [addresses.get(name, "ADDRESS") for name in range(1 + max(islands, default=0))]
        return f"{self.text} islands.count={len(at)} islands.at={','.join(at)}"


class WaitReport:
    """Lines on a start that waits: one, and one more for each reason that is found later.

    Args:
        wait_s: longest wait · tell: called with each line.
    """

    def __init__(self, wait_s: float, tell: Callable[[str], None]) -> None:
        self._wait_s, self._tell, self._told = wait_s, tell, set[str]()

    def report(self, names: Iterable[int], why: str) -> None:
        """Report for whom the start waits, and why."""
        if why not in self._told and (why or not self._told):
            self._told.add(why)
            line = f"waits for {name_members(names)}, at most {self._wait_s:g} s"
            self._tell(f"{line}; {why}" if why else line)


def explain_start(
    missing: Iterable[int],
    unheard: Iterable[tuple[int, int]],
    links: MemberLinks,
) -> str:
    """Return why a start waits; "" if no more is known than that others are not there.

    Args:
        missing: names that did not arrive.
        unheard: of those that arrived, who has not heard which other.
    """
    missing, own = {*missing}, links.addresses[links.name]
    refusals = links.refusals()
    if refused := [refusals[name] for name in sorted(missing & refusals.keys())]:
        return "; ".join(refused)
    if deaf := links.answering() & missing:
        return (
            f"{name_members(deaf)} can be reached from here, and nothing arrives at {own}; try: "
            f"forward that TCP port to this machine (router, firewall)"
        )
    for pair in unheard:
        one, other = map(name_member, pair)
        return f"{one} hears nothing of {other}; try: open the port of {one} (router, firewall)"
    if missing and all(map(is_witness, missing)):
        return f"{HAD_SEAT}; try: {_start_again(missing, links.addresses)}"
    return ""


def explain_shortage(member: IslandMember) -> str:
    """Return why the members that are left may not go on."""
    trainers = member.fact.trainers() if member.fact is not None else ()
    if member.fact is not None and len(trainers) < member.least:
        return f"{len(trainers)} of at least {member.least} islands (islands.least)"
    return "no majority of the last round's islands, and so nobody may go on"


def describe_wait(
    member: IslandMember,
    names: tuple[int, ...],
    first: tuple[int, ...],
    wait_s: float,
    links: MemberLinks,
    resume: ResumeCommand,
) -> str:
    """Return the error of a member that has waited in vain, with the way on.

    Args:
        names: the members that it waits for, or UNKNOWN.
        first: those that it had lost when the wait began; others may only have given up before it.
        wait_s: seconds that it waited.
    """
    missing, fact = _name_missing(names), member.fact
    waited = f"waited {wait_s:g} s (islands.wait_s) for {missing}"
    if refused := [why for name, why in sorted(links.refusals().items()) if name in names]:
        return f"islands: {waited}: {'; '.join(refused)}"
    start = _start_again(names, links.addresses)
    if fact is None and {*names} <= links.dialers().keys():
        return (
            f"islands: {waited}, whose run goes on: it dials this island, and gives it no seat; "
            f"try: shoal islands show on its machine; for a run of its own here: another port in "
            f"islands.at"
        )
    if fact is None:
        return f"islands: {waited}; try: {start}, or fewer islands (islands.count)"
    lost = first if member.seated and first else names
    known = fact.trainers() if member.seated else filterfalse(is_witness, links.addresses)
    left = {*known} - {*lost}
    without = resume.without(member.seat.name, left, links.addresses)
    if member.seated:
        third = ""
        if len(fact.trainers()) == len(fact.seats) == 2:
            third = " (with a third voter, shoal islands witness, one of two goes on alone)"
        return (
            f"islands: {explain_shortage(member)}; {waited}; the last round is saved; try: "
            f"{start}, and here: {resume.text}{third}; if {_name_missing(lost)} will not come "
            f"back: {without}"
        )
    if all(map(is_witness, names)):
        return f"islands: {waited}: {HAD_SEAT}; try: {start}; then here: {resume.text}"
    asked = " and ".join(links.addresses.get(name, "an unknown address") for name in names)
    return (
        f"islands: {waited} at {asked}; try: {start}, and here: {resume.text}; if an address "
        f"changed: {resume.at_new_address(links.addresses)} with the new one; without {missing}: "
        f"{without}"
    )


def _name_missing(names: Iterable[int]) -> str:
    return "more islands" if names == UNKNOWN else name_members(names)


def _start_again(names: Iterable[int], addresses: Mapping[int, str]) -> str:
    """Return the words for a start of members on their machines."""
    islands = tuple(name for name in names if not is_witness(name))
    ways = [f"start {_name_missing(islands)}"] if islands else []
    if any(map(is_witness, names)):
        at = ",".join(addresses[name] for name in sorted(addresses) if not is_witness(name))
        ways.append(
            f"start the witness, on any machine: shoal islands witness {at} --listen with "
            f"HOST:PORT of that machine"
        )
    return " and ".join(ways)
