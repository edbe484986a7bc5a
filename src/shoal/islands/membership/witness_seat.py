"""Seat of a witness: when it gives the seat up, and when it decides a turn for islands.

    keep         an island never restarted, or one that restarted has the newest weights on its disk
    decide       the islands restarted: a turn without a merge gives one with the weights its seat
    give up      no vote can go on, as too few never restarted; or the turn is lost: all islands
                 that merged it restarted, and their disks lack it
    afterwards   all islands start together (`session_meeting.py`), and the witness asks for a seat

No clock: the driver says when it has waited long enough.
"""

from __future__ import annotations

from shoal.islands.membership.committed_turn import CommittedTurn, promises_needed
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import ArrivalReport


class WitnessSeat:
    """Rules by which a witness keeps or gives up its seat, from the reports of islands' disks.

    Attributes:
        was_seated: it had a seat in this process.
        arrivals: newest report of each island's disk, by name.
        mergers, weights: of the newest turn with a merge.
    """

    def __init__(self) -> None:
        self.was_seated = False
        self.arrivals: dict[int, ArrivalReport] = {}
        self.mergers: frozenset[int] = frozenset()
        self.weights = ""

    def add(self, arrival: ArrivalReport) -> bool:
        """Note what an island without a seat has on its disk; its newest start counts.

        Returns:
            Whether it is of a process that was not known.
        """
        known = self.arrivals.get(arrival.seat.name)
        if known is None or known.seat.boot <= arrival.seat.boot:
            self.arrivals[arrival.seat.name] = arrival
        return known is None or known.seat.boot < arrival.seat.boot

    def report(self, member: IslandMember) -> ArrivalReport:
        """Return what this witness says to islands before a session."""
        heard = sorted([member.seat, *(one.seat for one in self.arrivals.values())])
        return ArrivalReport(member.seat, None, "", member.fact, tuple(heard))

    def note_turn(self, fact: CommittedTurn, *, is_seated: bool) -> None:
        """Note a committed turn: its mergers have the weights, also after turns without a merge."""
        self.was_seated = self.was_seated or is_seated
        if fact.committers or fact.weights != self.weights:
            self.mergers = frozenset(fact.committers)
        self.weights = fact.weights

    def must_restart(self, member: IslandMember, *, is_late: bool) -> bool:
        """Return whether the seat is of no use: an older start has it, or no vote can go on.

        Args:
            is_late: no turn was decided for so long that the islands may have lost the newest one.
        """
        fact = member.fact
        if fact is None:
            return False
        known = fact.seat_of(member.seat.name)
        if not member.seated:
            return not self.was_seated and known is not None and known >= member.seat
        again = [name for name in fact.trainers() if name in member.joiners]
        too_few = len(fact.seats) - len(again) < promises_needed(len(fact.seats)) or is_late
        return len(again) == len(fact.trainers()) and (too_few or self._is_lost(member, fact))

    def may_decide(self, member: IslandMember) -> bool:
        """Return whether an island that asks for its seat again has the weights of the turn."""
        return member.fact is not None and any(
            not report.is_without(member.fact) for report in self._reports(member, member.fact)
        )

    def _is_lost(self, member: IslandMember, fact: CommittedTurn) -> bool:
        """Return whether all that had the weights of a turn restarted, and lack them."""
        if not self.mergers or not self.mergers <= set(fact.trainers()):
            return False
        found = self._reports(member, fact)
        return len(found) == len(fact.trainers()) and all(one.is_without(fact) for one in found)

    def _reports(self, member: IslandMember, fact: CommittedTurn) -> list[ArrivalReport]:
        """Return what the newest starts of the islands that ask for a seat have on their disks."""
        found = [self.arrivals.get(name) for name in fact.trainers()]
        return [
            one
            for one in found
            if one is not None and one.seat == member.joiners.get(one.seat.name)
        ]
