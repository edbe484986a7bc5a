"""Tally of a vote of all members: every ballot must be in before the step is decided.

    waiting     a ballot is missing, or says that its island still saves the round before
    committed   all partners vote ok with one digest, and every island has saved
    discarded   else; `VoteResult.why` names the islands

Processes fill it from a gathering, a member from messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.islands.commit_vote import Ballot, VoteResult, decide_commit


class CommitTally:
    """Ballots of the members on one step; a member's newest ballot counts.

    Args:
        members: numbers of the members, ascending.
        partners: members that merge; default: all.
    """

    def __init__(self, members: Sequence[int], partners: Sequence[int] | None = None) -> None:
        self.members = tuple(members)
        self.partners = self.members if partners is None else tuple(partners)
        self._ballots: dict[int, Ballot] = {}

    def add(self, member: int, ballot: Ballot) -> None:
        """Count a ballot."""
        self._ballots[member] = ballot

    @property
    def ballots(self) -> list[Ballot]:
        """The ballots, in the order of the members."""
        return [self._ballots[member] for member in self.members]

    def missing(self) -> tuple[int, ...]:
        """Return the members without a ballot, or whose ballot says that they still save."""
        found = self._ballots
        return tuple(m for m in self.members if m not in found or found[m].saved is None)

    def result(self) -> VoteResult | None:
        """Return the result of the vote; None while it waits for a member.

        Raises:
            ClusterError: the ballots are for different rounds or fragments.
        """
        if self.missing():
            return None
        places = [self.members.index(member) for member in self.partners]
        return decide_commit(self.ballots, places)
