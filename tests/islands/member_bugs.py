"""Planted bugs of the members' protocol, each of which a drawn world must find.

    with planted("small majority"): World(seed).run(50)     raises Violation for some seed

Each is what a hand could write: a check that is missing, a quorum that is one too small, a value
that is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import member_world
from member_space import LONE, explore
from member_world import Violation, World

from shoal.base.errors import ShoalError
from shoal.islands.membership import committed_turn, island_member, session_meeting, turn_chair
from shoal.islands.membership.committed_turn import CommittedTurn, Seat, start_session
from shoal.islands.membership.island_member import HANDLERS, IslandMember
from shoal.islands.membership.session_meeting import SessionMeeting
from shoal.islands.membership.turn_chair import TurnChair
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    Apply,
    CastVote,
    Offer,
    Prepare,
    Promise,
)
from shoal.islands.membership.witness_seat import WitnessSeat

CHAIR, MEMBER = turn_chair, island_member
install, vote, on_vote = IslandMember._install, IslandMember._vote, IslandMember._on_vote
on_prepare, reset, receive = IslandMember._on_prepare, IslandMember._reset, IslandMember.receive
fact_of, choose = IslandMember._fact, TurnChair.choose_voters
commit = committed_turn.commit_turn
start, find_newest = SessionMeeting.start, SessionMeeting._find_newest


def _report_no_vote(self: IslandMember, message: Prepare) -> None:
    voted, self.voted = self.voted, None
    on_prepare(self, message)
    self.voted = voted


def _offer_without_promise(self: IslandMember, offer: Offer) -> None:
    self.promised = offer.ballot
    self._vote(offer.ballot, offer.fact)


def _any_may_vote(self: IslandMember, offer: Offer) -> None:
    self.promised = max(self.promised, offer.ballot)
    if offer.ballot == self.promised:
        self._vote(offer.ballot, offer.fact)


def _majority_without_chair(self: IslandMember, cast: CastVote) -> None:
    on_vote(self, cast)
    fact = self.fact
    if fact is not None and cast.turn == fact.turn + 1 and cast.ballot == ALL_VOTE:
        facts = [one.fact for one in self.votes.values() if one.fact is not None]
        if len(facts) > len(fact.seats) // 2 and len({one.digest for one in facts}) == 1:
            self._install(facts[0])


def _seat_by_name(self: IslandMember) -> None:
    reset(self)
    self.seated = self.fact is not None and self.seat.name in self.fact.names()
    if self.seated and self.fact is not None:
        seat = self.fact.seat_of(self.seat.name)
        self.seat = seat if seat is not None and not self.fact.dealt else self.seat


def _never_heal(self: IslandMember, fact: CommittedTurn) -> None:
    install(self, fact)
    self.actions = [a._replace(heal=False) if isinstance(a, Apply) else a for a in self.actions]


def _own_fact_wins(self: IslandMember, fact: CommittedTurn) -> None:
    if self.voted is not None and self.voted[1].turn == fact.turn:
        fact = self.voted[1]
    install(self, fact)


def _vote_before_saved(self: IslandMember, ballot: Any, fact: Any) -> None:
    self.is_saved = True
    vote(self, ballot, fact)


def _any_turn(self: IslandMember, message: Any) -> None:
    if isinstance(message, CastVote | Promise | Offer | Prepare):
        message = message._replace(session=self._position()[0], turn=self._position()[1])
    receive(self, message)


def _keep_voting(self: IslandMember) -> None:
    votes = dict(getattr(self, "votes", {}))
    reset(self)
    self.votes = {name: cast for name, cast in votes.items() if self.fact is not None}


def _vote_without_merge(self: IslandMember, offer: Offer) -> None:
    if offer.ballot == self.promised:
        self._vote(offer.ballot, offer.fact)


def _count_objections(self: IslandMember, cast: CastVote) -> None:
    chair = self.chair
    if chair is not None and cast.fact is None and cast.ballot == chair.ballot:
        cast = cast._replace(fact=chair.fact)
    on_vote(self, cast)


def _with(**fields: Callable[..., Any]) -> Callable[..., CommittedTurn]:
    def made(before: Any, proposals: Any, weights: str, seats: Any, samples: int) -> CommittedTurn:
        fact = commit(before, proposals, weights, seats, samples)
        return fact._replace(**{k: f(before, proposals, fact) for k, f in fields.items()})

    return made


def _lose_samples(before: Any, proposals: Any, weights: str, seats: Any, n: int) -> CommittedTurn:
    merged = {one.seat.name for one in proposals}
    kept = tuple(
        spans if seat.name in merged else ()
        for seat, spans in zip(before.seats, before.dealt, strict=True)
    )
    return commit(before._replace(dealt=kept), proposals, weights, seats, n)


def _samples_twice(before: Any, proposals: Any, weights: str, seats: Any, n: int) -> CommittedTurn:
    return commit(before, [p._replace(used=p.used - 1) for p in proposals], weights, seats, n)


def _no_joiners(voters: Any, joiners: Any, proposals: Any = ()) -> tuple[Seat, ...]:
    return tuple(sorted(voters))


def _lowest_vote(self: TurnChair) -> CommittedTurn | None:
    voted = [one.voted for one in self.promises.values() if one.voted is not None]
    return min(voted, key=lambda cast: cast[0])[1] if voted else None


def _merge_the_odd(self: TurnChair, odd: set[int]) -> None:
    choose(self, set())


def _merge_the_absent(self: IslandMember, proposals: Any, weights: str, seats: Any) -> Any:
    return fact_of(self, proposals if proposals == () else self._ordered(), weights, seats)


def _decide_without_witnesses(self: IslandMember, cast: CastVote) -> None:
    on_vote(self, cast)
    fact = self.fact
    if fact is not None and cast.turn == fact.turn + 1 and cast.ballot == ALL_VOTE:
        votes = [self.votes.get(name) for name in fact.trainers()]
        facts = [None if one is None else one.fact for one in votes]
        if facts[0] is not None and len({one and one.digest for one in facts}) == 1:
            self._install(facts[0])


def _start_from_known(self: SessionMeeting, samples: int) -> CommittedTurn | None:
    fact, known = start(self, samples), find_newest(self)[1]
    if fact is None or known is None:
        return fact
    return start_session(fact.session, known, fact.seats, samples)


Patch = tuple[object, str, Any]
BUGS: dict[str, Patch] = {
    "a majority is one too few": (CHAIR, "majority", lambda n: max(1, n // 2)),
    "one promise is enough": (CHAIR, "promises_needed", lambda n: 1),
    "restarted members count as steady": (
        TurnChair, "_steady", lambda self: list(self.promises.values()),
    ),
    "a chair ignores earlier votes": (TurnChair, "find_decided", lambda self: None),
    "a chair adopts the oldest vote": (TurnChair, "find_decided", _lowest_vote),
    "a promise reports no vote": (HANDLERS, "Prepare", _report_no_vote),
    "an offer needs no promise": (HANDLERS, "Offer", _offer_without_promise),
    "voters are not fixed": (HANDLERS, "Offer", _any_may_vote),
    "a majority decides without a chair": (HANDLERS, "CastVote", _majority_without_chair),
    "objections count as votes": (HANDLERS, "CastVote", _count_objections),
    "committers vote without a merge": (HANDLERS, "Offer", _vote_without_merge),
    "a restarted member keeps its seat": (IslandMember, "_reset", _seat_by_name),
    "nobody heals": (IslandMember, "_install", _never_heal),
    "the own fact wins": (IslandMember, "_install", _own_fact_wins),
    "votes do not wait for the disk": (IslandMember, "_vote", _vote_before_saved),
    "messages of any turn count": (IslandMember, "receive", _any_turn),
    "votes of the last turn count": (IslandMember, "_reset", _keep_voting),
    "the divisor counts all seats": (
        MEMBER, "commit_turn", _with(divisor=lambda before, p, f: f.divisor + len(before.seats)),
    ),
    "committers are all seats": (
        MEMBER, "commit_turn", _with(committers=lambda before, p, f: before.names()),
    ),
    "samples of absent members are lost": (MEMBER, "commit_turn", _lose_samples),
    "a used sample is dealt again": (MEMBER, "commit_turn", _samples_twice),
    "nobody may join": (MEMBER, "seat_members", _no_joiners),
    "changes of absent members are divided by": (IslandMember, "_fact", _merge_the_absent),
    "the end of a window changes nothing": (IslandMember, "_prepare", lambda self: None),
    "a start needs no hearing": (SessionMeeting, "find_unheard", lambda self: ()),
    "only turns on disks are known": (
        SessionMeeting, "_find_newest", lambda self: (find_newest(self)[0],) * 2,
    ),
    "a session starts from a turn on no disk": (SessionMeeting, "start", _start_from_known),
    "a session has the number of another one": (
        session_meeting, "number_session", lambda known, starter: known + 1,
    ),
    "nobody starts anew": (member_world, "needs_common_start", lambda *given: False),
    "a witness keeps its seat": (WitnessSeat, "must_restart", lambda self, member, is_late: False),
    "a witness decides for weights that nobody has": (
        WitnessSeat, "may_decide", lambda self, member: True,
    ),
    "nobody awaits the witness": (HANDLERS, "CastVote", _decide_without_witnesses),
}  # fmt: skip
OF_WITNESSES = (
    *(name for name in BUGS if "witness" in name),
    *("nobody starts anew", "a session starts from a turn on no disk"),
)
"""Bugs that worlds without a witness do not show, or seldom."""
OF_SPACE = ("only turns on disks are known",)
"""Bugs that show where the other island stays dead: the enumeration of a lone island finds them."""


def draw_world(seed: int, *, witness: bool = False) -> World:
    """Return the world of a seed: five members, or two or three and a witness."""
    faults = (0.02, 0.05)[seed % 2]
    if not witness:
        return World(seed, faults=faults)
    return World(seed, 2 + seed // 2 % 2, faults, witnesses=1, least=1 + seed // 2 % 2)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug while the context is open."""
    target, attribute, value = BUGS[name]
    if target is HANDLERS:
        kinds = {kind.__name__: kind for kind in HANDLERS}
        with patch.dict(HANDLERS, {kinds[attribute]: value}):
            yield
    else:
        with patch.object(target, attribute, value):
            yield


def find_bug(name: str, most_rounds: int, rounds: int = 50) -> tuple[int, int, str] | None:
    """Return (seed, rounds until then, what did not hold), None if nothing was found.

    Args:
        most_rounds: rounds in which it must be found.
        rounds: of one world.
    """
    done, seed = 0, 0
    if name in OF_SPACE:
        return _find_in_space(name)
    with planted(name):
        while done < most_rounds:
            world = draw_world(seed, witness=name in OF_WITNESSES)
            try:
                done += world.run(rounds)
            except (Violation, KeyError, ValueError, ShoalError) as found:
                return seed, done + world.checks.rounds, str(found)
            seed += 1
    return None


def _find_in_space(name: str) -> tuple[int, int, str] | None:
    with planted(name):
        try:
            explore(LONE, rounds=1)
        except Violation as found:
            return 0, 0, str(found)
    return None
