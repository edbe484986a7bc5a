"""Start of all members from their disks: who is awaited, who starts, from which turn.

    Arrival ─→ all     every process without a seat says what its disk holds, again and again
    expected           the seats of the newest turn on any disk; of a new run: islands 0 … count − 1
    first one          of the expected; when all have arrived it starts the session: Decide ─→ all

A process that finds a running session never starts one: it asks for a seat there. One whose disk is
behind starts with the others, and takes their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Dealing,
    Seat,
    is_witness,
    start_session,
)


class ArrivalReport(NamedTuple):
    """A process without a seat.

    Attributes:
        held: newest committed turn on its disk; None: none.
        start: hash of its first weights, which must be equal on all.
    """

    seat: Seat
    held: CommittedTurn | None
    start: str


class SessionMeeting:
    """Arrivals so far, as one of the processes knows them.

    Args:
        own: this process.
        count: islands of a new run.
    """

    def __init__(self, own: ArrivalReport, count: int) -> None:
        self.own, self.count = own, count
        self.arrivals = {own.seat.name: own}

    def add(self, arrival: ArrivalReport) -> None:
        """Note an arrival; the newest start of a process counts."""
        known = self.arrivals.get(arrival.seat.name)
        if known is None or known.seat.boot <= arrival.seat.boot:
            self.arrivals[arrival.seat.name] = arrival

    def hold(self, fact: CommittedTurn) -> None:
        """Note that a newer turn is on this process's disk."""
        self.own = self.own._replace(held=fact)
        self.arrivals[self.own.seat.name] = self.own

    def newest(self) -> CommittedTurn | None:
        """Return the newest turn that a disk holds."""
        held = [one.held for one in self.arrivals.values() if one.held is not None]
        return max(held, key=lambda fact: (fact.session, fact.turn), default=None)

    def expected(self) -> tuple[int, ...]:
        """Return the names of the processes that must arrive.

        A user who starts fewer islands than the newest turn has seats leaves out the last ones. A
        witness with a seat is awaited too: it may be deciding turns with islands that joined later.
        """
        newest = self.newest()
        names = () if newest is None else newest.names()
        islands = tuple(name for name in names if name < self.count) or tuple(range(self.count))
        return (*islands, *filter(is_witness, names))

    def missing(self) -> tuple[int, ...]:
        """Return the names that did not arrive."""
        return tuple(name for name in self.expected() if name not in self.arrivals)

    def find_unequal_starts(self) -> tuple[int, ...]:
        """Return the names whose first weights are not those of this process."""
        found = [one for one in self.arrivals.values() if not is_witness(one.seat.name)]
        return tuple(one.seat.name for one in found if one.start != self.own.start)

    def start(self, samples: Dealing) -> CommittedTurn | None:
        """Return the first turn of a session, if this process starts it and all are there."""
        if self.missing() or self.own.seat.name != min(self.expected()):
            return None
        newest, seats = self.newest(), self._seats()
        sessions = [one.held.session for one in self.arrivals.values() if one.held is not None]
        return start_session(max(sessions, default=-1) + 1, newest, seats, samples)

    def _seats(self) -> Sequence[Seat]:
        names = {*self.expected(), *(name for name in self.arrivals if name < self.count)}
        return [self.arrivals[name].seat for name in sorted(names)]
