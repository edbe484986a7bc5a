"""Start of all members from their disks: who is awaited, who starts, from which turn.

    Arrival ─→ all     every process without a seat says what its disk holds, again and again, and
                       which processes it has heard
    expected           the seats of the newest turn that a disk holds or a process knows; of a new
                       run: islands 0 … count − 1
    first one          of the expected; it starts the session when all have arrived, and each of
                       them has heard all others: Decide ─→ all

A process that finds a running session never starts one: it asks for a seat there. One whose disk is
behind starts with the others, and takes their weights.

A report may be old: its process has a seat meanwhile. That process knows no start that is younger
than its report, and the newest turn names it. So neither a restarted process nor one that knows the
running session starts another one with it.

A turn whose committers all died before it was on a disk is lost: only a witness knows it, or an
island without its weights. Its seats still are the ones that must be there, as nobody else can have
decided a later turn; the session starts from the newest turn on a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Dealing,
    Seat,
    is_witness,
    promises_needed,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.turn_messages import Decide, Send

SESSION_BITS = 20
"""Bits of a session's number after the time of its start."""


class ArrivalReport(NamedTuple):
    """A process without a seat.

    Attributes:
        held: newest committed turn on its disk; None: none.
        start: hash of its first weights, which must be equal on all.
        known: newest committed turn that it knows; a witness has no disk.
        heard: processes without a seat whose reports it has, its own included.
    """

    seat: Seat
    held: CommittedTurn | None
    start: str
    known: CommittedTurn | None = None
    heard: tuple[Seat, ...] = ()

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
        self.count = count
        self.arrivals: dict[int, ArrivalReport] = {}
        self._note_own(own)

    def add(self, arrival: ArrivalReport) -> bool:
        """Note an arrival; the newest start of a process counts.

        Returns:
            Whether it is of a process that was not known.
        """
        known = self.arrivals.get(arrival.seat.name)
        is_new = known is None or known.seat.boot < arrival.seat.boot
        if known is None or _age(known) < _age(arrival):
            self.arrivals[arrival.seat.name] = arrival
        if is_new:
            self._note_own(self.own)
        return is_new

    def hold(self, fact: CommittedTurn) -> None:
        """Note that a newer turn is on this process's disk."""
        self._note_own(self.own._replace(held=fact))

    def know(self, fact: CommittedTurn | None) -> None:
        """Note the newest turn that this process knows."""
        if fact is not self.own.known:
            self._note_own(self.own._replace(known=fact))

    def _note_own(self, report: ArrivalReport) -> None:
        self.arrivals[report.seat.name] = report
        heard = tuple(sorted(one.seat for one in self.arrivals.values()))
        self.own = self.arrivals[report.seat.name] = report._replace(heard=heard)

    def newest(self) -> CommittedTurn | None:
        """Return the newest turn that a disk holds."""
        return self._find_newest()[0]

    def find_lost(self) -> CommittedTurn | None:
        """Return the newest turn if its weights are lost: a process knows it, no disk holds it."""
        return _find_lost(*self._find_newest())

    def _find_newest(self) -> tuple[CommittedTurn | None, CommittedTurn | None]:
        """Return the newest turn that a disk holds, and the newest one that is known."""
        held = newest = None
        for one in self.arrivals.values():
            if one.held is not None and (held is None or one.held[:2] > held[:2]):
                held = one.held
            if one.known is not None and (newest is None or one.known[:2] > newest[:2]):
                newest = one.known
        is_newer = newest is not None and (held is None or newest[:2] > held[:2])
        return held, newest if is_newer else held

    def expected(self) -> tuple[int, ...]:
        """Return the names of the processes that must arrive.

        A user who starts fewer islands than the newest turn has seats leaves out the last ones. A
        witness with a seat is awaited too: it may be deciding turns with islands that joined later.
        Where disks were set back all islands are awaited: another disk may have later rounds.
        """
        held, newest = self._find_newest()
        every = tuple(range(self.count))
        if newest is None:
            return every
        names, lost = newest.names(), _find_lost(held, newest)
        islands = tuple(name for name in names if name < self.count) or every
        if lost is not None and lost.round > 1 + (0 if held is None else held.round):
            islands = every  # each vote waits for the disk: these lack more than a lost turn
        return (*islands, *filter(is_witness, names))

    def missing(self) -> tuple[int, ...]:
        """Return the names that did not arrive, or have a seat in the newest turn."""
        newest, found = self._find_newest()[1], self.arrivals
        seats = () if newest is None else newest.seats
        return tuple(n for n in self.expected() if n not in found or found[n].seat in seats)

    def find_unheard(self) -> tuple[tuple[int, int], ...]:
        """Return which of the expected that arrived has not heard which other: (name, other)."""
        found = [self.arrivals[name] for name in self.expected() if name in self.arrivals]
        return tuple(
            (one.seat.name, other.seat.name)
            for one in found
            for other in found
            if other.seat not in one.heard
        )

    def find_unequal_starts(self) -> tuple[int, ...]:
        """Return the names whose first weights are not those of this process."""
        found = [one for one in self.arrivals.values() if not is_witness(one.seat.name)]
        return tuple(one.seat.name for one in found if one.start != self.own.start)

    def start(self, samples: Dealing) -> CommittedTurn | None:
        """Return the first turn of a session, if this process starts it and all are there."""
        if self.own.seat.name != min(self.expected()) or self.missing() or self.find_unheard():
            return None
        newest, seats = self.newest(), self._seats()
        facts = [fact for one in self.arrivals.values() for fact in (one.held, one.known)]
        known = max((fact.session for fact in facts if fact is not None), default=-1)
        return start_session(number_session(known, self.own.seat), newest, seats, samples)

    def begin(self, member: IslandMember) -> CommittedTurn | None:
        """Start the session if this process starts it and all are there; return its first turn."""
        if member.seated:
            return None
        self.know(member.fact)
        fact = self.start(member.samples)
        if fact is not None:
            decision = Decide(member.seat, fact.session, fact.turn, fact)
            others = tuple(name for name in fact.names() if name != member.seat.name)
            member.actions.append(Send(others, decision))
            member.receive(decision)
        return fact

    def readers(self, names: Iterable[int], *, is_running: bool) -> tuple[int, ...]:
        """Return who gets this process's report: all, or witnesses alone beside a running session.

        A witness learns it in any case: it decides no turn for an island that lacks its weights.
        """
        others = (name for name in names if name != self.own.seat.name)
        return tuple(name for name in others if is_witness(name) or not is_running)

    def _seats(self) -> Sequence[Seat]:
        """Return the seats of a start: who was expected, and others that have heard of it."""
        found, own = self.arrivals, self.own.seat
        more = (name for name in found if name < self.count and own in found[name].heard)
        return [found[name].seat for name in sorted({*self.expected(), *more})]


class SeenProcesses(Protocol):
    """Detector of dead and restarted processes, as a process's connections show them."""

    def gone(self, seats: Iterable[tuple[int, int]]) -> set[int]:
        """Return those whose process is dead."""

    def restarted(self, seats: Iterable[tuple[int, int]]) -> set[int]:
        """Return those whose process is dead, and another start of it answers."""


def needs_common_start(member: IslandMember, awaited: set[int], seen: SeenProcesses) -> bool:
    """Return whether only a common start helps: too few processes never restarted.

    Args:
        awaited: the members without which no vote is possible. All are there again, as new
            processes, if only a start of all helps.
    """
    fact = member.fact
    if fact is None or not (member.seated and member.is_saved):
        return False
    steady = len(fact.seats) - len(seen.gone(fact.seats))
    return awaited <= seen.restarted(fact.seats) and steady < promises_needed(len(fact.seats))


def number_session(known: int, starter: Seat) -> int:
    """Return the number of a session: above all known ones, and of no other session.

    Nobody may know an earlier session, if it ended before a disk had a turn of it. The number has
    the time of the start first, then bits of the starter.

    >>> number_session(-1, Seat(0, 7)) >> SESSION_BITS, number_session(9 << 20, Seat(0, 7)) >> 20
    (7, 10)
    """
    bits = int.from_bytes(sha256(f"{tuple(starter)}".encode()).digest()[:4], "big")
    time = max((known >> SESSION_BITS) + 1, starter.boot)
    return (time << SESSION_BITS) + bits % (1 << SESSION_BITS)


def _age(report: ArrivalReport) -> tuple[object, ...]:
    """Return what grows with each report of a process: of two the later one counts."""
    turns = [(-1, -1) if one is None else one[:2] for one in (report.held, report.known)]
    return report.seat.boot, *turns, len(report.heard), sum(seat.boot for seat in report.heard)


def _find_lost(held: CommittedTurn | None, newest: CommittedTurn | None) -> CommittedTurn | None:
    """Return the newest turn if its weights are lost: no disk holds them."""
    if newest is None or newest is held or not newest.round:
        return None
    return None if held is not None and held.weights == newest.weights else newest
