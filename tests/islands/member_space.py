"""Enumerate all interleavings of a few members' messages, with one fault.

    space = explore("kill", names=3, rounds=2)     states, whole or not; raises Violation

A state is what processes, disks and wire hold. From each one follow: the delivery of any message
that is under way, and while it is unused the fault, of any process or message at any time. After
the fault, windows end once nothing is under way; one that ends earlier is a fault itself. Local work (training, a merge, a save) is done at once:
it touches one process, so its order with the others' changes nothing. So is a message to a dead
process, and one of a turn that its receiver has left: neither changes the receiver.

    kill        a process dies, and comes back with its disk, an old one or none
    lose        a message is lost · repeat  it arrives twice · cut  a link loses all from now on
    jump        a window ends too early
    flip        a merge is wrong · slow  a save ends late
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

from member_world import SAMPLES, Violation, merge_hash

from shoal.islands.membership import committed_turn
from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Seat,
    TurnProposal,
    majority,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    Apply,
    CastVote,
    Decide,
    Hello,
    Merge,
    Message,
    Send,
    Welcome,
)

FAULTS = ("kill", "lose", "repeat", "cut", "jump", "flip", "slow")
ATTEMPTS = 2
"""Ballots of chairs in one turn; more repeat the same."""

Wire = frozenset[tuple[int, int]]


class Node(NamedTuple):
    """One process: None is a dead one. `flip`: its next merge is wrong; `slow`: it saves late."""

    member: IslandMember | None
    weights: str
    disk: tuple[CommittedTurn, ...]
    boot: int
    flip: bool
    slow: bool
    key: int


class State(NamedTuple):
    """A state of the space.

    Attributes:
        facts: digest of each turn's fact, once somebody applied it.
        votes: (turn, ballot, digest, name) of the votes so far.
    """

    nodes: tuple[Node, ...]
    wire: Wire
    used: bool
    cut: tuple[int, int]
    facts: tuple[str, ...]
    votes: frozenset[tuple[Any, ...]]

    def key(self) -> int:
        return hash((*[n.key for n in self.nodes], *self[1:]))


class Space:
    """All states that follow from a start."""

    def __init__(self, fault: str, names: int, rounds: int) -> None:
        self.fault, self.names, self.rounds = fault, tuple(range(names)), rounds
        self.messages: list[Message] = []
        self.numbers: dict[Message, int] = {}
        self.turns: dict[str, CommittedTurn] = {}
        self.parents: dict[str, str] = {}
        self.states = self.finished = self.bounded = 0
        self.whole = True

    def start(self) -> State:
        """Return the state in which all members have started and trained."""
        fact = start_session(0, None, [Seat(name, 0) for name in self.names], SAMPLES)
        self.turns[fact.digest] = fact
        self.parents[fact.digest] = fact.digest
        nodes = [Node(None, "", (), 0, False, False, 0) for _ in self.names]
        state = State(tuple(nodes), frozenset(), False, (-1, -1), (), frozenset())
        state = state._replace(facts=(fact.digest,))
        for name in self.names:
            member = IslandMember(Seat(name, 0), fact, self.names, SAMPLES, is_saved=False)
            node = state.nodes[name]._replace(member=member)
            state = self._finish(state, name, node, [Apply(fact, heal=True, train=True)])
        return state

    def explore(self, most: int) -> None:
        """Visit states in a drawn order until all, or `most`, are known."""
        start, draw = self.start(), random.Random(0)
        known, stack = {start.key()}, [start]
        while stack:
            at = draw.randrange(len(stack)) if draw.random() < 0.5 else -1  # breadth, and ends
            stack[at], stack[-1] = stack[-1], stack[at]
            state = stack.pop()
            self.states += 1
            followers = 0
            for follower in self.followers(state):
                followers += 1
                key = follower.key()
                if key not in known:
                    if len(known) >= most:
                        self.whole = False
                        continue
                    known.add(key)
                    stack.append(follower)
            if not followers:
                self._check_end(state)

    def _check_end(self, state: State) -> None:
        live = [n.member for n in state.nodes if n.member is not None and n.member.fact is not None]
        done = sum(m.fact is not None and m.fact.turn >= self.rounds for m in live)
        if done >= majority(len(self.names)):
            self.finished += 1
        elif any(m.promised[0] >= ATTEMPTS for m in live):
            self.bounded += 1
        else:
            waiting = [n.member and member_key(n.member) for n in state.nodes]
            raise Violation(f"all wait: {waiting}")

    def followers(self, state: State) -> Iterator[State]:
        """Yield the states that follow."""
        for item in state.wire:
            if self._changes_nothing(state, *item):
                rest = state._replace(wire=state.wire - {item})
                alive = state.nodes[item[0]].member is not None
                message = self.messages[item[1]]
                cut = (message.seat.name, item[0]) == state.cut
                yield self._call(rest, item[0], "receive", message) if alive and not cut else rest
                return
        for item in state.wire:
            to, message = item[0], self.messages[item[1]]
            rest = state._replace(wire=state.wire - {item})
            yield self._call(rest, to, "receive", message)
            if not state.used and self.fault == "repeat":
                yield self._call(state._replace(used=True), to, "receive", message)
            if not state.used and self.fault == "lose":
                yield rest._replace(used=True)
        for name, node in enumerate(state.nodes):
            member = node.member
            if member is None:
                yield from self._restarts(state, name, node)
                continue
            if state.used and not state.wire and self._may_end_window(member):
                yield self._call(state, name, "grace_over")
            if node.slow and not member.is_saved:
                saved = node._replace(slow=False, disk=(*node.disk, member.fact))
                yield self._call(self._with(state, name, saved), name, "saved")
            if not state.used:
                yield from self._faults(state, name, node)

    def _changes_nothing(self, state: State, to: int, number: int) -> bool:
        """Return whether a message reaches nobody, or one who has left its turn."""
        member, message = state.nodes[to].member, self.messages[number]
        if member is None or (message.seat.name, to) == state.cut:
            return True
        fact = member.fact
        if fact is None or isinstance(message, Hello):
            return False
        if isinstance(message, Decide | Welcome):
            old = message.fact.turn <= fact.turn
            return old and (isinstance(message, Decide) or member.seated)
        return message.turn <= fact.turn

    def _may_end_window(self, member: IslandMember) -> bool:
        fact = member.fact
        if fact is None or not member.seated:
            return True
        return fact.turn < self.rounds and member.promised[0] < ATTEMPTS

    def _faults(self, state: State, name: int, node: Node) -> Iterator[State]:
        used = state._replace(used=True)
        if self.fault == "kill":
            yield self._with(used, name, node._replace(member=None))
        elif self.fault == "jump":
            yield self._call(used, name, "grace_over")
        elif self.fault == "flip":
            yield self._with(used, name, node._replace(flip=True))
        elif self.fault == "slow":
            yield self._with(used, name, node._replace(slow=True))
        elif self.fault == "cut":
            for to in self.names:
                if to != name:
                    yield used._replace(cut=(name, to))

    def _restarts(self, state: State, name: int, node: Node) -> Iterator[State]:
        for disk in {node.disk, node.disk[:-1], ()}:
            seat = Seat(name, node.boot + 1)
            member = IslandMember(seat, disk[-1] if disk else None, self.names, SAMPLES)
            weights = disk[-1].weights if disk else ""
            new = node._replace(member=member, disk=disk, boot=seat.boot, weights=weights)
            yield self._call(self._with(state, name, new), name, "greet")

    def _call(self, state: State, name: int, event: str, *arguments: Any) -> State:
        node = state.nodes[name]
        assert node.member is not None
        member = clone(node.member)
        getattr(member, event)(*arguments)
        actions, member.actions = member.actions, []
        return self._finish(state, name, node._replace(member=member), actions)

    def _finish(self, state: State, name: int, node: Node, actions: list[Any]) -> State:
        """Perform the actions of a process, and those that follow from them."""
        member, sent = node.member, set(state.wire)
        assert member is not None
        facts, votes = state.facts, state.votes
        while actions:
            action = actions.pop(0)
            if isinstance(action, Send):
                message = action.message
                if isinstance(message, CastVote) and message.fact is not None:
                    digest = message.fact.digest
                    self.turns[digest] = message.fact
                    votes |= {(message.turn, message.ballot, digest, name)}
                number = self.numbers.setdefault(message, len(self.messages))
                if number == len(self.messages):
                    self.messages.append(message)
                sent |= {(to, number) for to in action.to if to != name}
            elif isinstance(action, Merge):
                weights = merge_hash(node.weights, action.proposals)
                if node.flip:
                    node, weights = node._replace(flip=False), f"flip {weights}"
                member.merged(action.ballot, weights)
            elif isinstance(action, Apply):
                fact = action.fact
                facts = self._check_applied(facts, votes, fact)
                if not action.heal and fact.weights != self._merge(fact, node.weights):
                    raise Violation(f"member {name} goes on with weights of nobody")
                node = node._replace(weights=fact.weights)
                if not node.slow:
                    node = node._replace(disk=(*node.disk, fact))
                    member.saved()
                if action.train and fact.turn < self.rounds:
                    member.trained(f"{fact.turn}.{name}", name + 1, SAMPLES)
            actions += member.actions
            member.actions = []
        node = node._replace(key=hash((member_key(member), node[1], node[3:6], len(node.disk))))
        nodes = (*state.nodes[:name], node, *state.nodes[name + 1 :])
        return State(nodes, frozenset(sent), state.used, state.cut, facts, votes)

    def _merge(self, fact: CommittedTurn, weights: str) -> str:
        """Return the weights that a fact's changes make of these; a discarded turn keeps them."""
        before = self.turns[self.parents[fact.digest]]
        changes = tuple(
            TurnProposal(seat, f"{before.turn}.{seat.name}", seat.name + 1, SAMPLES)
            for seat in before.seats
            if seat.name in fact.committers
        )
        return merge_hash(weights, changes) if changes else weights

    def _check_applied(
        self, facts: tuple[str, ...], votes: frozenset[tuple[Any, ...]], fact: CommittedTurn
    ) -> tuple[str, ...]:
        if fact.turn < len(facts):
            if facts[fact.turn] != fact.digest:
                raise Violation(f"two histories: turn {fact.turn}")
            return facts
        if fact.turn > len(facts):
            raise Violation(f"turn {fact.turn} came before the one before it")
        before = self.turns[facts[-1]]
        self.parents[fact.digest] = before.digest
        count = len(before.seats)
        by_ballot: dict[Any, set[int]] = {}
        for turn, ballot, digest, name in votes:
            if turn == fact.turn and digest == fact.digest:
                by_ballot.setdefault(ballot, set()).add(name)
        if not any(
            len(names) >= (count if ballot == ALL_VOTE else majority(count))
            for ballot, names in by_ballot.items()
        ):
            raise Violation(f"turn {fact.turn}: a fact was applied that nobody committed")
        if fact.divisor != sum(name + 1 for name in fact.committers):
            raise Violation(f"turn {fact.turn}: the divisor is not that of its committers")
        if fact.weights != self._merge(fact, before.weights):
            raise Violation(f"turn {fact.turn}: the weights are not the merge of the committers")
        return (*facts, fact.digest)

    def _with(self, state: State, name: int, node: Node) -> State:
        key = None if node.member is None else member_key(node.member)
        node = node._replace(key=hash((key, node[1], node[3:6], len(node.disk))))
        return state._replace(nodes=(*state.nodes[:name], node, *state.nodes[name + 1 :]))


def clone(member: IslandMember) -> IslandMember:
    """Return a copy of a member that shares nothing that can change."""
    new = object.__new__(type(member))
    fields = new.__dict__ = member.__dict__.copy()
    new.actions = []
    for name in ("early", "joiners", "proposals", "votes", "own", "welcomes", "objected"):
        fields[name] = fields[name].copy()
    if member.chair is not None:
        chair = new.chair = copy.copy(member.chair)
        chair.promises = chair.promises.copy()
        chair.votes, chair.objections = chair.votes.copy(), chair.objections.copy()
    return new


def member_key(member: IslandMember) -> tuple[Any, ...]:
    """Return what tells a member's states apart."""
    chair = member.chair
    return (
        member.seat,
        None if member.fact is None else member.fact.digest,
        member.is_saved,
        member.stands_in,
        member.promised,
        _vote_key(member.voted),
        _vote_key(member.pending),
        None if member.offer is None else member.offer.ballot,
        tuple(sorted((name, one.seat.boot) for name, one in member.proposals.items())),
        tuple(sorted((n, v.fact and v.fact.digest) for n, v in member.votes.items())),
        tuple(sorted(member.early)),
        tuple(sorted(member.joiners.values())),
        tuple(sorted(member.welcomes.items())),
        tuple(tuple(sorted(names)) for names in member.objected),
        chair
        and (
            chair.ballot,
            tuple(sorted((n, p.seat, _vote_key(p.voted)) for n, p in chair.promises.items())),
            chair.voters,
            chair.fact and chair.fact.digest,
            chair.is_confirmed,
            tuple(sorted(chair.votes)),
            tuple(sorted(chair.objections)),
        ),
    )


def _vote_key(vote: tuple[Any, CommittedTurn | None] | None) -> tuple[Any, ...] | None:
    return vote and (vote[0], vote[1] and vote[1].digest)


def explore(
    fault: str, names: int = 3, rounds: int = 2, most: int = 200_000, *, witness: bool = False
) -> Space:
    """Explore the space of one fault; raise Violation with the state that breaks a promise.

    Args:
        witness: the last of the names is one.
    """
    first = names - 1 if witness else committed_turn.FIRST_WITNESS
    with patch.object(committed_turn, "FIRST_WITNESS", first):
        space = Space(fault, names, rounds)
        space.explore(most)
    return space
