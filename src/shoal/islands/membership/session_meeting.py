"""Start of all members from their disks: who is awaited, who starts, from which turn.

    Arrival ─→ all     every process without a seat says what its disk holds, again and again
    expected           the seats of the newest turn that a disk holds or a witness knows; of a new
                       run: islands 0 … count − 1
    first one          of the expected; when all have arrived it starts the session: Decide ─→ all

A process that finds a running session never starts one: it asks for a seat there. One whose disk is
behind starts with the others, and takes their weights.

A turn whose committers all died before it was on a disk is lost: only a witness knows it. Its seats
still are the ones that must be there, as nobody else can have decided a later turn; the session
starts from the newest turn on a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        known: newest committed turn that a witness knows, which has no disk.
    """

    seat: Seat
    held: CommittedTurn | None
    start: str
    known: CommittedTurn | None = None

    def is_without(self, fact: CommittedTurn) -> bool:
        """Return whether its disk lacks the weights of a turn."""
        return fact.round > 0 and (self.held is None or self.held.weights != fact.weights)


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
        return _newest(one.held for one in self.arrivals.values())

    def find_lost(self) -> CommittedTurn | None:
        """Return a turn that a witness knows and no disk holds, if it is the newest one."""
        held, known = self.newest(), _newest(one.known for one in self.arrivals.values())
        return known if known is not None and _newest((held, known)) is not held else None

    def expected(self) -> tuple[int, ...]:
        """Return the names of the processes that must arrive.

        A user who starts fewer islands than the newest turn has seats leaves out the last ones. A
        witness with a seat is awaited too: it may be deciding turns with islands that joined later.
        """
        newest = self.find_lost() or self.newest()
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
        facts = [fact for one in self.arrivals.values() for fact in (one.held, one.known)]
        session = max((fact.session for fact in facts if fact is not None), default=-1)
        return start_session(session + 1, newest, seats, samples)

    def _seats(self) -> Sequence[Seat]:
        names = {*self.expected(), *(name for name in self.arrivals if name < self.count)}
        return [self.arrivals[name].seat for name in sorted(names)]


def _newest(facts: Iterable[CommittedTurn | None]) -> CommittedTurn | None:
    """Return the newest turn; the first of equal ones."""
    found = [fact for fact in facts if fact is not None]
    return max(found, key=lambda fact: (fact.session, fact.turn), default=None)
