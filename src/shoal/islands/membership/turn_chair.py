"""Ballot of a chair: the vote without the members that do not answer.

    Prepare →  ← Promise    of every voter, or of enough when the grace window ends
    the fact   a promise reports a vote that may have decided the turn: that fact again
               else: the merge of the changes of those that promised
               no change, or objections in two ballots before: the turn is discarded
    Offer →    ← CastVote   of the other committers, who merge the same changes: all agree
    Offer →    ← CastVote   of the rest, the chair last: a majority of the turn's seats decides

Without a chair a turn is decided only by the votes of all. So one member that never restarted, and
did not vote for that fact, proves that it was not decided.

A member that does not merge votes last, so that a wrong merge of the chair never gets its vote. If
most committers object, the chair's own merge is the odd one.

Source: Lamport 1998 (Paxos)
"""

from __future__ import annotations

from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Seat,
    TurnProposal,
    is_witness,
    majority,
    promises_needed,
)
from shoal.islands.membership.turn_messages import ALL_VOTE, Ballot, Promise


class TurnChair:
    """One ballot of one chair.

    Attributes:
        before: the committed turn before.
        promises: by name · voters: the seats that promised, fixed when the fact is chosen.
        proposals: changes that the committers merge.
        fact: as offered; None before.
        votes, objections: names.
        is_confirmed: all committers agreed, and the rest votes.
    """

    __slots__ = (
        "ballot", "before", "fact", "is_confirmed", "objections", "promises", "proposals", "voters",
        "votes",
    )  # fmt: skip

    def __init__(self, before: CommittedTurn, ballot: Ballot) -> None:
        self.before, self.ballot = before, ballot
        self.promises: dict[int, Promise] = {}
        self.voters: tuple[Seat, ...] = ()
        self.proposals: tuple[TurnProposal, ...] = ()
        self.fact: CommittedTurn | None = None
        self.is_confirmed = False
        self.votes: set[int] = set()
        self.objections: set[int] = set()

    def add_promise(self, promise: Promise) -> None:
        """Count a promise; the newest start of a process counts."""
        name = promise.seat.name
        if self.voters or self.before.seat_of(name) is None:
            return
        if name not in self.promises or self.promises[name].seat.boot <= promise.seat.boot:
            self.promises[name] = promise

    def missing(self) -> tuple[int, ...]:
        """Return the names of the seats that did not promise."""
        return tuple(name for name in self.before.names() if name not in self.promises)

    def _steady(self) -> list[Promise]:
        """Return the promises of members that did not restart since they got their seat."""
        return [one for one in self.promises.values() if one.seat in self.before.seats]

    def can_choose(self) -> bool:
        """Return whether enough members promised."""
        count = len(self.before.seats)
        enough = len(self.promises) >= majority(count)
        return enough and len(self._steady()) >= promises_needed(count)

    def find_decided(self) -> CommittedTurn | None:
        """Return the fact that an earlier ballot may have decided, None if none did."""
        voted = [one.voted for one in self.promises.values() if one.voted is not None]
        if not voted:
            return None
        ballot, fact = max(voted, key=lambda vote: vote[0])
        if ballot > ALL_VOTE:
            return fact
        unanimous = all(
            one.voted is not None and one.voted[1].digest == fact.digest for one in self._steady()
        )
        return fact if unanimous else None

    def choose_voters(self, odd: set[int]) -> None:
        """Fix the voters, and the changes that they merge.

        Args:
            odd: members whose merge differed from the others' in an earlier ballot.
        """
        ordered = [self.promises[name] for name in sorted(self.promises)]
        self.voters = tuple(one.seat for one in ordered)
        self.proposals = tuple(
            one.proposal
            for one in ordered
            if one.proposal is not None
            and one.seat in self.before.seats
            and one.seat.name not in odd
            and not is_witness(one.seat.name)
        )

    def is_decided(self) -> bool:
        """Return whether a majority of the seats voted for the fact."""
        return len(self.votes) >= majority(len(self.before.seats))

    def confirmers(self) -> set[int]:
        """Return the committers other than the chair."""
        return {one.seat.name for one in self.proposals} - {self.ballot[1]}

    def odd_members(self) -> set[int] | None:
        """Return the members whose merge differs from that of most; None while votes are missing.

        Two that differ are both right and both wrong: then the set is empty.
        """
        if not self.confirmers() <= self.votes | self.objections:
            return None
        objecting, committers = 2 * len(self.objections), len(self.confirmers() | {self.ballot[1]})
        if objecting > committers:
            return {self.ballot[1]}
        return set() if objecting == committers else set(self.objections)
