"""Messages between the members of a turn, and the actions that a member asks its driver for.

    ballot     (attempt, name, boot) of the chair; (0, −1, −1) is the vote of all without a chair
    session    and turn of a message: the turn that its sender decides

A driver may lose, repeat, delay and reorder messages. It must drop altered ones: every message
carries a MAC, or the connection proves its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.islands.membership.committed_turn import CommittedTurn, Seat, TurnProposal

Ballot = tuple[int, int, int]
ALL_VOTE: Ballot = (0, -1, -1)
"""Ballot without a chair, in which every member votes to all others."""


class Propose(NamedTuple):
    """A member's change is ready."""

    seat: Seat
    session: int
    turn: int
    proposal: TurnProposal


class CastVote(NamedTuple):
    """Vote of a member on the fact of a turn.

    Attributes:
        fact: as computed by the voter, or as offered by the chair; None: the voter objects.
    """

    seat: Seat
    session: int
    turn: int
    ballot: Ballot
    fact: CommittedTurn | None


class Prepare(NamedTuple):
    """A chair asks for promises to take no part in earlier ballots."""

    seat: Seat
    session: int
    turn: int
    ballot: Ballot


class Promise(NamedTuple):
    """Promise of a member.

    Attributes:
        voted: ballot and fact of its newest vote in this turn.
        proposal: its change, if it is ready.
    """

    seat: Seat
    session: int
    turn: int
    ballot: Ballot
    voted: tuple[Ballot, CommittedTurn] | None
    proposal: TurnProposal | None


class Reject(NamedTuple):
    """Answer to a ballot below the one that was promised."""

    seat: Seat
    session: int
    turn: int
    promised: Ballot


class Offer(NamedTuple):
    """Fact on which a chair asks for votes.

    Attributes:
        voters: members whose promises the chair held when it chose the fact; no other may vote.
        proposals: changes that the committers merge before they vote; (): the fact was adopted, or
            discards the turn.
    """

    seat: Seat
    session: int
    turn: int
    ballot: Ballot
    fact: CommittedTurn
    voters: tuple[Seat, ...]
    proposals: tuple[TurnProposal, ...]


class Decide(NamedTuple):
    """A committed turn."""

    seat: Seat
    session: int
    turn: int
    fact: CommittedTurn


class Hello(NamedTuple):
    """A process without a seat, or one that is behind, asks for the newest fact."""

    seat: Seat
    session: int
    turn: int


class Welcome(NamedTuple):
    """Answer to `Hello`.

    Attributes:
        to: the process that asked, so that a later start of it does not count the answer.
        promised: ballot that the sender promised in the turn after `fact`.
    """

    seat: Seat
    session: int
    turn: int
    to: Seat
    fact: CommittedTurn
    promised: Ballot


Message = Propose | CastVote | Prepare | Promise | Reject | Offer | Decide | Hello | Welcome


class Send(NamedTuple):
    """Send a message; `to` are names of members.

    The sender has handled its own copy already.
    """

    to: tuple[int, ...]
    message: Message


class Merge(NamedTuple):
    """Merge these changes, and report the hash of the weights to `IslandMember.merged`."""

    ballot: Ballot
    proposals: tuple[TurnProposal, ...]


class Apply(NamedTuple):
    """Install a committed turn, save it, and report the save to `IslandMember.saved`.

    Attributes:
        heal: this process has not merged the weights itself: load the state of another member.
        train: this process has a seat in the next turn, and trains on the samples dealt to it; a
            process that said goodbye ends once it has none.
    """

    fact: CommittedTurn
    heal: bool
    train: bool


class Await(NamedTuple):
    """Too few members answer: save, and report for whom this member waits."""

    names: tuple[int, ...]


Action = Send | Merge | Apply | Await
