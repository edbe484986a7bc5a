"""Member of the islands as a state machine: events in, actions out.

    train     trained ─→ Propose to all; all proposals are in ─→ Merge
    vote      merged, and the last turn is on disk ─→ CastVote to all; all agree ─→ Apply
    grace     somebody is absent when the driver's window ends ─→ a chair's ballot (`turn_chair.py`)
    join      a process without a seat ─→ Hello to all; a seat in the next turn ─→ Apply
    part      a goodbye in its last proposal ─→ no seat in the next turn

A process that restarted has a new boot number and so no seat. It gets the seat of its name back in
the next turn. Where the turn needs its vote, it first learns from members that never restarted
which ballots they promised: what it promised itself before its restart is at most that. So nothing
but committed turns is on disk, and an old disk is a process that is behind.

A witness proposes nothing, at once: the others see that it is there. It seconds the vote of all
others, and promises and votes in ballots. It takes the chair only for a turn without a merge, where
no other member can: all of them restarted.

Too few members that never restarted: the member waits (`Await`). If the driver ends the wait, all
start together from the newest committed turn on their disks (`start_session`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.islands.commit_vote import Ballot as FullBallot
from shoal.islands.membership.commit_tally import CommitTally
from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Dealing,
    Seat,
    TurnProposal,
    commit_turn,
    is_witness,
    promises_needed,
    seat_members,
)
from shoal.islands.membership.turn_chair import TurnChair
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    Action,
    Apply,
    Await,
    Ballot,
    CastVote,
    Decide,
    Hello,
    Merge,
    Message,
    Offer,
    Prepare,
    Promise,
    Propose,
    Reject,
    Send,
    Welcome,
)

DISCARD_AFTER = 2
"""Ballots with objections, after which a chair discards the turn."""


class IslandMember:
    """One process of the protocol.

    The driver calls an event, then performs and clears `actions`.

    Args:
        seat: name and start of this process.
        fact: newest committed turn: of the session's start, or from disk; None: a new process.
        peers: names of all processes that may be members.
        samples: samples dealt to a member in a turn.
        least: committers of a merge; a turn of fewer is discarded. Of one alone nobody knows
            whether its merge is right.
        is_saved: `fact` is on this process's disk.
    """

    def __init__(
        self,
        seat: Seat,
        fact: CommittedTurn | None,
        peers: tuple[int, ...],
        samples: Dealing,
        *,
        least: int = 1,
        is_saved: bool = True,
    ) -> None:
        self.seat, self.fact, self.samples, self.least = seat, fact, samples, least
        self.peers = tuple(name for name in peers if name != seat.name)
        self.is_witness = is_witness(seat.name)
        self.actions: list[Action] = []
        self.early: dict[int, Propose] = {}
        self.joiners: dict[int, Seat] = {}
        self.is_saved, self.leaves = is_saved, False
        self._reset()

    def _reset(self) -> None:
        """Forget what belongs to the last turn."""
        self.seated = self.fact is not None and self.seat in self.fact.seats
        self.proposals: dict[int, TurnProposal] = {}
        self.votes: dict[int, CastVote] = {}
        self.promised: Ballot = ALL_VOTE
        self.voted: tuple[Ballot, CommittedTurn] | None = None
        self.pending: tuple[Ballot, CommittedTurn | None] | None = None
        self.offer: Offer | None = None
        self.chair: TurnChair | None = None
        self.own: set[str] = set()
        self.welcomes: dict[int, Ballot] = {}
        self.stands_in = False
        self.objected: list[set[int]] = []

    def restarted(self, boot: int, peers: tuple[int, ...]) -> IslandMember:
        """Return this process as after a restart: it has no seat, and knows the newest turn.

        Args:
            boot: number of the start.
        """
        seat = Seat(self.seat.name, boot)
        new = type(self)(seat, self.fact, peers, self.samples, least=self.least)
        new.leaves = self.leaves
        return new

    # events of the driver

    def greet(self) -> None:
        """Ask all others for the newest fact, and for a seat."""
        self._send(self.peers, Hello(self.seat, *self._position()))

    def trained(
        self,
        change: str,
        tokens: int,
        used: int,
        steps: int = 0,
        steps_per_s: float | None = None,
    ) -> None:
        """Offer this member's change of the turn; `TurnProposal` explains the fields."""
        if not self.seated or self.seat.name in self.proposals:
            return
        joiners = tuple(sorted(self.joiners.values()))
        proposal = TurnProposal(
            self.seat, change, tokens, used, joiners, self.leaves, steps, steps_per_s
        )
        self.proposals[self.seat.name] = proposal
        self._send(self._others(), Propose(self.seat, *self._position(), proposal))
        self._merge_if_complete()

    def merged(self, ballot: Ballot, weights: str, refused: tuple[int, ...] = ()) -> None:
        """Take the result of `Merge`.

        Args:
            refused: names whose changes do not count; all members refuse the same ones.
        """
        before, chair, offer = self.fact, self.chair, self.offer
        if before is None or not self.seated:
            return
        if ballot == ALL_VOTE and len(self.proposals) == len(before.seats):
            counted = _admitted(self._changes(), refused)
            self._vote(ballot, self._fact(counted, weights, self._all_seats()))
        elif chair is not None and chair.ballot == ballot and chair.fact is None:
            seats = seat_members(chair.voters, self.joiners.values(), chair.proposals)
            counted = _admitted(chair.proposals, refused)
            self._offer(chair, self._fact(counted, weights, seats))
        elif offer is not None and offer.ballot == ballot:
            counted = _admitted(offer.proposals, refused)
            fact = self._fact(counted, weights, offer.fact.seats)
            self._vote(ballot, offer.fact if fact.digest == offer.fact.digest else None)

    def saved(self) -> None:
        """Note that the last committed turn is on disk; a vote may wait for it."""
        self.is_saved = True
        if self.pending is not None:
            self._vote(*self.pending)

    def grace_over(self) -> None:
        """Decide without the absent members, or ask again; the driver's window has ended."""
        chair = self.chair
        if not self.seated:
            if not self.leaves:
                self.greet()
        elif chair is not None and not chair.voters and chair.can_choose():
            self._choose(chair)
        else:
            if chair is not None and not chair.voters:
                self.actions.append(Await(chair.missing()))
            self._prepare()

    def receive(self, message: Message) -> None:
        """Take a message of another process."""
        if isinstance(message, Hello):
            self._on_hello(message)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Decide):
            self._install(message.fact)
        elif self.fact is not None:
            here = self._position()
            if message[1:3] < here:
                self._send((message.seat.name,), Decide(self.seat, *here, self.fact))
            elif not (self.seated or self.stands_in):
                return
            elif message[1:3] == here:
                HANDLERS[type(message)](self, message)
            elif isinstance(message, Propose) and message[1:3] == (here[0], here[1] + 1):
                self.early[message.seat.name] = message
            else:
                self._send((message.seat.name,), Hello(self.seat, *here))

    # messages of this turn

    def _on_propose(self, message: Propose) -> None:
        if self.fact is not None and message.seat in self.fact.seats:
            self.proposals[message.seat.name] = message.proposal
            self._merge_if_complete()

    def _on_vote(self, vote: CastVote) -> None:
        before, chair = self.fact, self.chair
        if before is None:
            return
        if vote.ballot == ALL_VOTE and vote.seat in before.seats:
            self.votes[vote.seat.name] = vote
            if self.is_witness and self.seat.name not in self.votes:
                self._second(before)
            if len(self.votes) == len(before.seats):
                self._count_all(before)
        elif chair is not None and vote.ballot == chair.ballot and vote.seat in chair.voters:
            group = chair.votes if vote.fact is not None else chair.objections
            group.add(vote.seat.name)
            if not chair.is_confirmed:
                self._confirm(chair)
            elif chair.fact is not None and chair.is_decided():
                self._announce(before, chair.fact)

    def _on_prepare(self, message: Prepare) -> None:
        if message.ballot < self.promised:
            rejection = Reject(self.seat, *self._position(), self.promised)
            self._send((message.seat.name,), rejection)
            return
        if message.ballot > self.promised:
            self.pending = self.offer = None
        self.promised = message.ballot
        if self.chair is not None and self.chair.ballot < message.ballot:
            self.chair = None
        own = self.proposals.get(self.seat.name)
        self._send(
            (message.seat.name,),
            Promise(self.seat, *self._position(), message.ballot, self.voted, own),
        )

    def _on_promise(self, promise: Promise) -> None:
        chair = self.chair
        if chair is None or promise.ballot != chair.ballot or chair.voters:
            return
        chair.add_promise(promise)
        if not chair.missing() and chair.can_choose():
            self._choose(chair)

    def _on_reject(self, message: Reject) -> None:
        if message.promised > self.promised:
            self.promised, self.chair = message.promised, None

    def _on_offer(self, offer: Offer) -> None:
        if offer.ballot != self.promised or self.seat not in offer.voters:
            return
        if any(one.seat == self.seat for one in offer.proposals):
            self.offer = offer
            self.actions.append(Merge(offer.ballot, offer.proposals))
        else:
            self._vote(offer.ballot, offer.fact)

    def _on_hello(self, hello: Hello) -> None:
        if self.fact is None:
            return
        if not self.seated:
            here = self._position()
            if hello[1:3] < here:
                self._send((hello.seat.name,), Decide(self.seat, *here, self.fact))
            return
        if hello.seat not in self.fact.seats:
            known = self.joiners.get(hello.seat.name, hello.seat)
            self.joiners[hello.seat.name] = max(known, hello.seat)
        welcome = Welcome(self.seat, *self._position(), hello.seat, self.fact, self.promised)
        self._send((hello.seat.name,), welcome)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.to != self.seat:
            return
        self._install(welcome.fact)
        fact = self.fact
        if fact is None or self.seated or fact.digest != welcome.fact.digest:
            return
        if welcome.seat in fact.seats:
            self.welcomes[welcome.seat.name] = welcome.promised
        if self.seat.name in fact.names() and len(self.welcomes) >= promises_needed(
            len(fact.seats)
        ):
            self.stands_in = True
            self.promised = max(self.promised, *self.welcomes.values())

    # steps

    def _position(self) -> tuple[int, int]:
        """Return the session, and the turn that this member decides."""
        return (-1, -1) if self.fact is None else (self.fact.session, self.fact.turn + 1)

    def _others(self) -> tuple[int, ...]:
        names = () if self.fact is None else self.fact.names()
        return tuple(name for name in names if name != self.seat.name)

    def _send(self, names: tuple[int, ...], message: Message) -> None:
        """Send a message; this process's own copy is handled at once."""
        self.actions.append(Send(names, message))
        if self.seat.name in names:
            self.receive(message)

    def _ordered(self) -> tuple[TurnProposal, ...]:
        return tuple(self.proposals[name] for name in sorted(self.proposals))

    def _changes(self) -> tuple[TurnProposal, ...]:
        """Return the proposals that have a change; that of a witness says that it is there."""
        return tuple(one for one in self._ordered() if not is_witness(one.seat.name))

    def _all_seats(self) -> tuple[Seat, ...]:
        seats = () if self.fact is None else self.fact.seats
        proposals = self._ordered()
        joiners = {seat for proposal in proposals for seat in proposal.joiners}
        return seat_members(seats, joiners, proposals)

    def _fact(
        self, proposals: tuple[TurnProposal, ...], weights: str, seats: tuple[Seat, ...]
    ) -> CommittedTurn:
        """Return the next fact, as this member computes it."""
        assert self.fact is not None  # noqa: S101 - every caller has a turn
        fact = commit_turn(self.fact, proposals, weights, seats, self.samples)
        self.own.add(fact.digest)
        return fact

    def _merge_if_complete(self) -> None:
        if self.fact is None or not self.seated or self.promised != ALL_VOTE:
            return
        changes, count = self._changes(), len(self.proposals)
        is_open = self.voted is None and not self.is_witness
        if is_open and count == len(self.fact.seats) and len(changes) >= self.least:
            self.actions.append(Merge(ALL_VOTE, changes))

    def _vote(self, ballot: Ballot, fact: CommittedTurn | None) -> None:
        """Vote, once the last turn is on disk, unless a later ballot was promised meanwhile."""
        if ballot != self.promised:
            return
        if self.voted is not None and self.voted[0] == ballot:
            fact = self.voted[1]  # nobody votes twice in one ballot
        if not self.is_saved:
            self.pending = (ballot, fact)
            return
        self.pending = None
        if fact is not None:
            self.voted = (ballot, fact)
        to = (*self._others(), self.seat.name) if ballot == ALL_VOTE else (ballot[1],)
        self._send(to, CastVote(self.seat, *self._position(), ballot, fact))

    def _second(self, before: CommittedTurn) -> None:
        """Vote as all others did, or object if their votes differ; wait while one is missing."""
        if not set(before.trainers()) <= set(self.votes):
            return
        facts = [self.votes[name].fact for name in before.trainers()]
        alike = len({"" if fact is None else fact.digest for fact in facts}) == 1
        self._vote(ALL_VOTE, facts[0] if alike else None)

    def _count_all(self, before: CommittedTurn) -> None:
        """Decide a turn by the votes of all, or take the chair where they differ."""
        tally = CommitTally(before.names())
        for name, vote in self.votes.items():
            digest = "" if vote.fact is None else vote.fact.digest
            tally.add(name, FullBallot(vote.turn, 0, vote.fact is not None, digest, 0.0, None, 0))
        result, fact = tally.result(), self.votes[before.names()[0]].fact
        if result is not None and result.committed and fact is not None:
            if self.seat.name == before.names()[0]:
                self._announce(before, fact)
            else:
                self._install(fact)
        elif self.chair is None and self.seated:
            self._prepare()

    def _announce(self, before: CommittedTurn, fact: CommittedTurn) -> None:
        """Apply a decided turn, and send it to its members and to those of the turn before."""
        to = {*before.names(), *fact.names()} - {self.seat.name}
        self._install(fact)
        self._send(tuple(sorted(to)), Decide(self.seat, *self._position(), fact))

    def _prepare(self) -> None:
        """Start a ballot above all that this member knows."""
        if self.fact is None or (self.is_witness and not self._may_chair(self.fact)):
            return
        ballot = (self.promised[0] + 1, *self.seat)
        self.chair = TurnChair(self.fact, ballot)
        prepare = Prepare(self.seat, *self._position(), ballot)
        self._send((*self._others(), self.seat.name), prepare)

    def _may_chair(self, fact: CommittedTurn) -> bool:
        """Return whether this witness takes the chair: a member restarted and asks for a seat."""
        return any(name in self.joiners for name in fact.trainers())

    def _choose(self, chair: TurnChair) -> None:
        """Choose the fact of a ballot: the one that may be decided, or a merge of those present."""
        odd = {name for names in self.objected for name in names}
        chair.choose_voters(odd)
        decided = chair.find_decided()
        if decided is not None:
            chair.proposals = ()
            self._offer(chair, decided)
        elif self._can_merge(chair):
            self.actions.append(Merge(chair.ballot, chair.proposals))
        else:
            chair.proposals = ()
            seats = seat_members(chair.voters, self.joiners.values())
            weights = "" if self.fact is None else self.fact.weights
            self._offer(chair, self._fact((), weights, seats))

    def _can_merge(self, chair: TurnChair) -> bool:
        enough = len(chair.proposals) >= self.least and not self.is_witness
        return enough and len(self.objected) < DISCARD_AFTER

    def _offer(self, chair: TurnChair, fact: CommittedTurn) -> None:
        """Offer a fact to the committers, who merge the same changes."""
        chair.fact = fact
        self._send_offer(chair, fact, chair.confirmers())
        self._confirm(chair)

    def _confirm(self, chair: TurnChair) -> None:
        """Ask the rest to vote if all committers agree; start again if one objects."""
        odd = chair.odd_members()
        if chair.fact is None or odd is None:
            return
        if chair.objections:
            self.objected.append(odd)
            self._prepare()
            return
        chair.is_confirmed = True
        rest = {seat.name for seat in chair.voters} - chair.confirmers() - {self.seat.name}
        self._send_offer(chair, chair.fact, rest)
        self._vote(chair.ballot, chair.fact)

    def _send_offer(self, chair: TurnChair, fact: CommittedTurn, names: set[int]) -> None:
        if names:
            ballot, voters, proposals = chair.ballot, chair.voters, chair.proposals
            offer = Offer(self.seat, *self._position(), ballot, fact, voters, proposals)
            self._send(tuple(sorted(names)), offer)

    def _install(self, fact: CommittedTurn) -> None:
        """Apply a committed turn, if it is newer."""
        known = (-1, -2) if self.fact is None else (self.fact.session, self.fact.turn)
        if (fact.session, fact.turn) <= known:
            return
        follows = self.fact is not None and (fact.session, fact.turn - 1) == known
        unchanged = self.fact is not None and follows and fact.weights == self.fact.weights
        heal = not (follows and (fact.digest in self.own or unchanged))
        self.fact, self.is_saved = fact, False
        self.joiners = {n: s for n, s in self.joiners.items() if s > (fact.seat_of(n) or (n, -1))}
        self._reset()
        self.actions.append(Apply(fact, heal, self.seated))
        early, self.early = self.early, {}
        if self.seated:
            for message in early.values():
                self.receive(message)


def _admitted(
    proposals: tuple[TurnProposal, ...], refused: tuple[int, ...]
) -> tuple[TurnProposal, ...]:
    return tuple(one for one in proposals if one.seat.name not in refused)


HANDLERS: dict[type, Callable[[IslandMember, Any], None]] = {
    Propose: IslandMember._on_propose,
    CastVote: IslandMember._on_vote,
    Prepare: IslandMember._on_prepare,
    Promise: IslandMember._on_promise,
    Reject: IslandMember._on_reject,
    Offer: IslandMember._on_offer,
}
