"""Committed fact of a turn: who merged, by which divisor, and who decides the next turn.

    turn     a decision of the members: a merged round, or a discarded one
    seat     a member as the others know it: its name, and the start of its process (boot)
    round    merged rounds so far; a discarded turn leaves it

Every member computes the fact from the same proposals, so one digest names all of it:

    committers   members whose changes are in the merge
    divisor      sum of the committers' tokens
    stream       samples of absent and discarded members return to it, then the next turn is dealt
    seats        members of the next turn: those that voted, and new ones that asked to join

A majority of the seats decides. A process that restarted lost its promises and votes, so a ballot
also needs promises of so many seats that never restarted that every majority has one of them. With
n seats a majority are n//2 + 1, and the others are n − majority + 1.

At most as many new names enter at once as leave the old members a majority: new members may die
before they vote.

A witness has a seat, and neither weights nor samples: it votes for what all others voted for.

Source: Lamport 1998 (Paxos); Howard et al. 2016 (quorums of the phases need only meet each other)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from shoal.base.layouts.changing_members import FIRST_WITNESS, name_member
from shoal.islands.commit_vote import name_islands
from shoal.islands.sample_ranges import SampleRange, SampleStream, drop_consumed

Dealing = int | Callable[[SampleStream, Sequence[float | None]], Sequence[int]]
"""Samples of a member in a turn: as many for each, or by the stream and the members' speeds."""


def is_witness(name: int) -> bool:
    """Return whether a name is that of a witness."""
    return name >= FIRST_WITNESS


def name_members(names: Iterable[int]) -> str:
    """Return the names for a person.

    >>> name_members([2, 1, 10_000])
    'islands 1 and 2 and the witness'
    """
    ordered = sorted(names)
    islands = [name for name in ordered if not is_witness(name)]
    witnesses = [name_member(FIRST_WITNESS)] if len(ordered) > len(islands) else []
    return " and ".join(([name_islands(islands)] if islands else []) + witnesses)


class Seat(NamedTuple):
    """Member of a turn: its name, and the number of its process's start."""

    name: int
    boot: int


class TurnProposal(NamedTuple):
    """Change that a member offers for a turn.

    Attributes:
        change: hash of the change.
        tokens: its weight in the mean.
        used: samples of those dealt that it used.
        joiners: processes that asked this member to join.
        leaves: the member has no seat in the next turn: it says goodbye.
        steps: inner steps behind the change · steps_per_s: its speed, without waits.
    """

    seat: Seat
    change: str
    tokens: int
    used: int
    joiners: tuple[Seat, ...] = ()
    leaves: bool = False
    steps: int = 0
    steps_per_s: float | None = None


class MemberWork(NamedTuple):
    """Work of a committer in a turn, as all members committed it.

    Attributes:
        samples: of those dealt to it, that it used.
        tokens: its weight in the mean.
        steps_per_s: its speed, by which the next turn is dealt; None: not measured.
    """

    name: int
    steps: int
    samples: int
    tokens: int
    steps_per_s: float | None = None


class CommittedTurn(NamedTuple):
    """Fact after a turn, equal on all members; it stands in every checkpoint.

    Attributes:
        session: start of all members from their disks, in which this turn was decided.
        weights: hash of the merged weights and outer state.
        work: steps and samples of each committer.
        dealt: samples of each of `seats` in the next turn.
        digest: hash of everything above, and of the turn before.
    """

    session: int
    turn: int
    round: int
    weights: str
    committers: tuple[int, ...]
    divisor: int
    work: tuple[MemberWork, ...]
    seats: tuple[Seat, ...]
    stream: SampleStream
    dealt: tuple[tuple[SampleRange, ...], ...] = ()
    digest: str = ""

    def names(self) -> tuple[int, ...]:
        """Return the names of the next turn's members."""
        return tuple(seat.name for seat in self.seats)

    def trainers(self) -> tuple[int, ...]:
        """Return the names of the next turn's members that are no witnesses."""
        return tuple(name for name in self.names() if not is_witness(name))

    def returned(self) -> SampleStream:
        """Return the stream with all dealt samples back in it."""
        return self.stream.return_unused(span for spans in self.dealt for span in spans)

    def seat_of(self, name: int) -> Seat | None:
        """Return the seat of a member, None if it has none."""
        return next((seat for seat in self.seats if seat.name == name), None)


def majority(members: int) -> int:
    """Return the votes that decide a turn.

    >>> [majority(members) for members in (1, 2, 3, 4, 5)]
    [1, 2, 2, 3, 3]
    """
    return members // 2 + 1


def promises_needed(members: int) -> int:
    """Return how many members that never restarted must promise, so that each majority has one.

    >>> [promises_needed(members) for members in (1, 2, 3, 4, 5)]
    [1, 1, 2, 2, 3]
    """
    return members - majority(members) + 1


def seat_members(
    voters: Iterable[Seat], joiners: Iterable[Seat], proposals: Iterable[TurnProposal] = ()
) -> tuple[Seat, ...]:
    """Return the seats of the next turn, by name.

    A restarted process takes over the seat of its name. New names are as many as leave the voters a
    majority, and at least one. If all voters but witnesses leave, all keep their seats for the
    resume.

    Args:
        proposals: changes of the turn; a voter that says goodbye in its own gets no seat.

    >>> old, new = [Seat(0, 1), Seat(1, 1)], [Seat(1, 2), Seat(2, 1), Seat(3, 1)]
    >>> seat_members(old, new)
    (Seat(name=0, boot=1), Seat(name=1, boot=2), Seat(name=2, boot=1))
    """
    seats = set(voters)
    staying = seats - {one.seat for one in proposals if one.leaves}
    if all(is_witness(seat.name) for seat in staying):
        staying = seats
    found = {seat.name: seat for seat in staying}
    free = max(1, len(found) - 1)
    for seat in sorted(joiners):
        if seat.name in found:
            found[seat.name] = max(seat, found[seat.name])
        elif free:
            found[seat.name] = seat
            free -= 1
    return tuple(found[name] for name in sorted(found))


def start_session(
    session: int, before: CommittedTurn | None, seats: Sequence[Seat], samples: Dealing
) -> CommittedTurn:
    """Return the fact with which all members start together from their disks.

    Args:
        before: newest turn that all of them hold; None: a new run.
        samples: dealt to each member in a turn.
    """
    stream = SampleStream() if before is None else before.returned()
    turn, round_number, weights = (-1, 0, "") if before is None else before[1:4]
    start = CommittedTurn(session, turn + 1, round_number, weights, (), 0, (), tuple(seats), stream)
    return _seal(start, samples, before)


def commit_turn(
    before: CommittedTurn,
    proposals: Sequence[TurnProposal],
    weights: str,
    seats: tuple[Seat, ...],
    samples: Dealing,
) -> CommittedTurn:
    """Return the fact after a turn; without proposals the turn is discarded.

    Args:
        proposals: of the committers, by name.
        weights: hash of the merged weights; that of `before` if the turn is discarded.
        samples: dealt to each member in the next turn.
    """
    used = {proposal.seat.name: proposal.used for proposal in proposals}
    stream = before.stream
    for seat, spans in zip(before.seats, before.dealt, strict=True):
        stream = stream.return_unused(drop_consumed(spans, used.get(seat.name, 0)))
    work = tuple(
        MemberWork(one.seat.name, one.steps, one.used, one.tokens, one.steps_per_s)
        for one in proposals
    )
    after = CommittedTurn(
        before.session,
        before.turn + 1,
        before.round + bool(proposals),
        weights,
        tuple(one.name for one in work),
        sum(one.tokens for one in work),
        work,
        seats,
        stream,
    )
    return _seal(after, samples, before)


def _seal(fact: CommittedTurn, samples: Dealing, before: CommittedTurn | None) -> CommittedTurn:
    """Deal the next turn's samples, and hash the fact."""
    speeds, trainers = {one.name: one.steps_per_s for one in fact.work}, fact.trainers()
    if isinstance(samples, int):
        wanted: Sequence[int] = [samples] * len(trainers)
    else:
        wanted = samples(fact.stream, [speeds.get(name) for name in trainers])
    stream, dealt = fact.stream.deal([*wanted, *[0] * (len(fact.seats) - len(trainers))])
    past = "" if before is None else before.digest
    found = fact._replace(stream=stream, dealt=dealt)
    return found._replace(digest=sha256(f"{past}{tuple(found)}".encode()).hexdigest()[:32])
