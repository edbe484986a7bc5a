"""Enumerate all interleavings of a few members' messages, with one fault.

    space = explore("kill", names=3, rounds=2)     states, whole or not; raises Violation

A state is what processes, disks and wire hold. From each one follow: the delivery of any message
that is under way, and while it is unused the fault, of any process or message at any time. After
the fault, windows end once nothing is under way; one that ends earlier is a fault itself. Local work (training, a merge, a save) is done at once:
it touches one process, so its order with the others' changes nothing. So is a message to a dead
process, and one of a turn that its receiver has left: neither changes the receiver.

    kill        a process dies, and comes back with its disk, an old one or none
    lone        the same, of an island and a witness; the other island died before, for good
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
    commit_turn,
    majority,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import ArrivalReport, SessionMeeting
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
from shoal.islands.membership.witness_seat import WitnessSeat

FAULTS = ("kill", "lose", "repeat", "cut", "jump", "flip", "slow")
LONE = "lone"
DEAD = -1
"""Start of a process that never comes back."""

ATTEMPTS = 2
"""Ballots of chairs in one turn; more repeat the same."""

Wire = frozenset[tuple[int, int]]


class Node(NamedTuple):
    """One process: None is a dead one. `flip`: its next merge is wrong; `slow`: it saves late.

    Attributes:
        meeting: reports of disks, while an island has no seat · rules: of a witness's seat.
    """

    member: IslandMember | None
    weights: str
    disk: tuple[CommittedTurn, ...]
    boot: int
    flip: bool
    slow: bool
    key: int
    meeting: SessionMeeting | None = None
    rules: WitnessSeat | None = None


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
        self.messages: list[Message | ArrivalReport] = []
        self.numbers: dict[Message | ArrivalReport, int] = {}
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
            node = state.nodes[name]._replace(member=member, rules=_rules_of(member))
            state = self._finish(state, name, node, [Apply(fact, heal=True, train=True)])
        return state

    def start_lone(self) -> State:
        """Return the state after island 1 died: island 0 has merged a round without it."""
        seats = [Seat(name, 0) for name in self.names]
        facts = [start_session(0, None, seats, SAMPLES)]
        for mergers, left in ((seats[:2], seats), (seats[:1], [seats[0], seats[2]])):
            changes = [self._change(seat, facts[-1].turn) for seat in mergers]
            weights = merge_hash(facts[-1].weights, tuple(changes))
            facts.append(commit_turn(facts[-1], changes, weights, tuple(left), SAMPLES))
        for before, fact in zip([facts[0], *facts], facts, strict=False):
            self.turns[fact.digest], self.parents[fact.digest] = fact, before.digest
        self.rounds += facts[-1].turn
        nodes = tuple(Node(None, "", (), DEAD, False, False, 0) for _ in self.names)
        digests = tuple(fact.digest for fact in facts)
        state = State(nodes, frozenset(), False, (-1, -1), digests, frozenset())
        for name in (0, 2):
            member = IslandMember(seats[name], facts[-1], self.names, SAMPLES, least=1)
            node = Node(member, facts[-2].weights, (facts[1],), 0, False, False, 0)
            node = node._replace(rules=_rules_of(member))
            apply = [Apply(facts[-1], heal=False, train=True)]
            state = self._finish(state, name, node, apply)
        return state

    def _change(self, seat: Seat, turn: int) -> TurnProposal:
        return TurnProposal(seat, f"{turn}.{seat.name}", seat.name + 1, SAMPLES)

    def explore(self, most: int) -> None:
        """Visit states in a drawn order until all, or `most`, are known."""
        start = self.start_lone() if self.fault == LONE else self.start()
        draw = random.Random(0)
        known, stack = {start.key()}, [start]
        edges: list[tuple[int, int]] = []
        goals: set[int] = set()
        while stack:
            at = draw.randrange(len(stack)) if draw.random() < 0.5 else -1  # breadth, and ends
            stack[at], stack[-1] = stack[-1], stack[at]
            state = stack.pop()
            self.states += 1
            followers, here = 0, state.key()
            for follower in self.followers(state):
                followers += 1
                key = follower.key()
                if self.fault == LONE:
                    edges.append((here, key))
                if key not in known:
                    if len(known) >= most:
                        self.whole = False
                        continue
                    known.add(key)
                    stack.append(follower)
            if not followers:
                self._check_end(state)
            if self._is_done(state) or self._may_wait(state):
                goals.add(here)
        if self.fault == LONE and self.whole and not known <= _reaching(goals, edges):
            raise Violation("from a state on nobody goes on, and no disk was set back")

    def _may_wait(self, state: State) -> bool:
        """Return whether the lone island waits for the other, as its disk lost rounds, or chairs on."""
        island, last = state.nodes[0], self.turns[state.facts[-1]]
        held = island.disk[-1].round if island.disk else 0
        live = [node.member for node in state.nodes if node.member is not None]
        was_set_back = island.meeting is not None and last.round - held > 1
        return was_set_back or any(member.promised[0] >= ATTEMPTS for member in live)

    def _check_end(self, state: State) -> None:
        live = [n.member for n in state.nodes if n.member is not None and n.member.fact is not None]
        if self._is_done(state):
            self.finished += 1
        elif any(m.promised[0] >= ATTEMPTS for m in live):
            self.bounded += 1
        else:
            waiting = [n.member and member_key(n.member) for n in state.nodes]
            raise Violation(f"all wait: {waiting}")

    def _is_done(self, state: State) -> bool:
        """Return whether most processes know the last turn."""
        facts = [n.member.fact for n in state.nodes if n.member is not None]
        done = sum(fact is not None and fact.turn >= self.rounds for fact in facts)
        return done >= majority(len(self.names))

    def followers(self, state: State) -> Iterator[State]:
        """Yield the states that follow."""
        for item in state.wire:
            if self._changes_nothing(state, *item):
                rest = state._replace(wire=state.wire - {item})
                alive = state.nodes[item[0]].member is not None
                message = self.messages[item[1]]
                cut = (message.seat.name, item[0]) == state.cut
                yield self._receive(rest, item[0], message) if alive and not cut else rest
                return
        for item in state.wire:
            to, message = item[0], self.messages[item[1]]
            rest = state._replace(wire=state.wire - {item})
            yield self._receive(rest, to, message)
            if not state.used and self.fault == "repeat":
                yield self._receive(state._replace(used=True), to, message)
            if not state.used and self.fault == "lose":
                yield rest._replace(used=True)
        for name, node in enumerate(state.nodes):
            member = node.member
            if member is None:
                yield from self._restarts(state, name, node)
                continue
            if state.used and not state.wire and self._may_end_window(member):
                yield self._end_window(state, name)
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
        if isinstance(message, ArrivalReport):
            return state.nodes[to].meeting is None and state.nodes[to].rules is None
        if fact is None or isinstance(message, Hello):
            return False
        here = fact.session, fact.turn
        if isinstance(message, Decide | Welcome):
            old = (message.fact.session, message.fact.turn) <= here
            return old and (isinstance(message, Decide) or member.seated)
        return (message.session, message.turn) <= here

    def _may_end_window(self, member: IslandMember) -> bool:
        fact = member.fact
        if fact is None or not member.seated:
            return True
        return fact.turn < self.rounds and member.promised[0] < ATTEMPTS

    def _faults(self, state: State, name: int, node: Node) -> Iterator[State]:
        used = state._replace(used=True)
        if self.fault in ("kill", LONE):
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
        if node.boot == DEAD:
            return
        for disk in {node.disk, node.disk[:-1], ()}:
            seat = Seat(name, node.boot + 1)
            member = IslandMember(seat, disk[-1] if disk else None, self.names, SAMPLES)
            weights = disk[-1].weights if disk else ""
            new = node._replace(member=member, disk=disk, boot=seat.boot, weights=weights)
            yield self._greet(self._with(state, name, self._with_report(new)), name)

    def _with_report(self, node: Node) -> Node:
        """Return a process without a seat, with what it reports of its disk."""
        member, rules = node.member, None
        assert member is not None
        if rules := _rules_of(member):
            return node._replace(meeting=None, rules=rules)
        report = ArrivalReport(member.seat, node.disk[-1] if node.disk else None, "w")
        count = sum(not committed_turn.is_witness(name) for name in self.names)
        return node._replace(meeting=SessionMeeting(report, count), rules=None)

    def _greet(self, state: State, name: int) -> State:
        """Ask for a seat; report what the disk holds, and start a session if all are there."""
        state = self._call(state, name, "greet")
        node = state.nodes[name]
        member, meeting = node.member, node.meeting
        assert member is not None
        if member.seated or (meeting is node.rules is None):
            return state
        actions: list[Any] = []
        if node.rules is not None:
            report = node.rules.report(member)
        else:
            assert meeting is not None
            member, meeting = clone(member), clone_meeting(meeting)
            meeting.begin(member)
            actions, member.actions, report = member.actions, [], meeting.own
        others = tuple(other for other in self.names if other != name)
        node = node._replace(member=member, meeting=meeting)
        return self._finish(state, name, node, [Send(others, report), *actions])

    def _end_window(self, state: State, name: int) -> State:
        """What a driver does after some seconds without news."""
        node = state.nodes[name]
        member, rules = node.member, node.rules
        assert member is not None
        if rules is None:
            if member.fact is None or not member.seated:
                return self._greet(state, name)
            return self._call(state, name, "grace_over")
        if rules.must_restart(member, is_late=False):
            seat = node.boot + 1
            new = node._replace(member=member.restarted(seat, self.names), boot=seat)
            return self._greet(self._with(state, name, new), name)
        if not member.seated:
            return self._greet(state, name)
        return self._call(state, name, "grace_over") if rules.may_decide(member) else state

    def _receive(self, state: State, name: int, message: Message | ArrivalReport) -> State:
        node = state.nodes[name]
        if not isinstance(message, ArrivalReport):
            return self._call(state, name, "receive", message)
        assert node.member is not None
        member, actions, meeting, rules = clone(node.member), [], node.meeting, node.rules
        if rules is not None:
            rules = clone_rules(rules)
            is_new = rules.add(message)
        elif meeting is not None:
            meeting = clone_meeting(meeting)
            is_new = meeting.add(message)
            meeting.begin(member)
            actions, member.actions = member.actions, []
        else:
            return state
        node = node._replace(member=member, meeting=meeting, rules=rules)
        state = self._finish(state, name, node, actions)
        return self._greet(state, name) if is_new and not member.seated else state

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
                facts = self._check_applied(state, facts, votes, fact)
                if node.rules is not None:
                    node = node._replace(rules=clone_rules(node.rules))
                    node.rules.note_turn(fact, is_seated=action.train)
                elif action.train:
                    node = node._replace(meeting=None)
                if self.fault == LONE and action.heal and not self._has_weights(node, fact):
                    if action.train:
                        raise Violation(f"member {name} has a seat, and nobody has the weights")
                    continue
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
        node = node._replace(key=node_key(node))
        nodes = (*state.nodes[:name], node, *state.nodes[name + 1 :])
        return State(nodes, frozenset(sent), state.used, state.cut, facts, votes)

    def _has_weights(self, node: Node, fact: CommittedTurn) -> bool:
        """Return whether a process of the lone island has the weights of a turn, or none is needed."""
        kept = {node.weights, *(one.weights for one in node.disk)}
        return node.rules is not None or not fact.round or fact.weights in kept

    def _merge(self, fact: CommittedTurn, weights: str) -> str:
        """Return the weights that a fact's changes make of these; a discarded turn keeps them."""
        before = self.turns[self.parents[fact.digest]]
        changes = tuple(
            self._change(seat, before.turn) for seat in before.seats if seat.name in fact.committers
        )
        return merge_hash(weights, changes) if changes else weights

    def _check_applied(
        self,
        state: State,
        facts: tuple[str, ...],
        votes: frozenset[tuple[Any, ...]],
        fact: CommittedTurn,
    ) -> tuple[str, ...]:
        last = self.turns[facts[-1]]
        if fact.session < last.session:
            raise Violation(f"session {fact.session} goes on beside a later one")
        if fact.session > last.session:
            return self._check_start(state, facts, fact)
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

    def _check_start(
        self, state: State, facts: tuple[str, ...], fact: CommittedTurn
    ) -> tuple[str, ...]:
        """A session starts from the newest turn on a disk of its members."""
        held = [node.disk[-1] for node in state.nodes if node.rules is None and node.disk]
        newest = max(held, key=lambda one: (one.session, one.turn), default=None)
        if newest is None or (fact.turn, fact.weights) != (newest.turn + 1, newest.weights):
            raise Violation(f"a session starts from round {fact.round}")
        self.turns[fact.digest], self.parents[fact.digest] = fact, newest.digest
        return (*facts[: fact.turn], fact.digest)

    def _with(self, state: State, name: int, node: Node) -> State:
        node = node._replace(key=node_key(node))
        return state._replace(nodes=(*state.nodes[:name], node, *state.nodes[name + 1 :]))


def _reaching(goals: set[int], edges: list[tuple[int, int]]) -> set[int]:
    """Return the states from which a goal can be reached."""
    before: dict[int, list[int]] = {}
    for first, then in edges:
        before.setdefault(then, []).append(first)
    found, stack = set(goals), [*goals]
    while stack:
        for state in before.get(stack.pop(), ()):
            if state not in found:
                found.add(state)
                stack.append(state)
    return found


def _rules_of(member: IslandMember) -> WitnessSeat | None:
    return WitnessSeat() if member.is_witness else None


def node_key(node: Node) -> int:
    """Return what tells a process's states apart."""
    key = None if node.member is None else member_key(node.member)
    reports: tuple[Any, ...] = ()
    if node.meeting is not None:
        reports = tuple(node.meeting.arrivals[name] for name in sorted(node.meeting.arrivals))
    elif node.rules is not None:
        rules = node.rules
        told = tuple(rules.arrivals[name] for name in sorted(rules.arrivals))
        reports = (*told, rules.was_seated, rules.mergers, rules.weights)
    return hash((key, node[1], node[3:6], len(node.disk), reports))


def clone_meeting(meeting: SessionMeeting) -> SessionMeeting:
    new = copy.copy(meeting)
    new.arrivals = meeting.arrivals.copy()
    return new


def clone_rules(rules: WitnessSeat) -> WitnessSeat:
    new = copy.copy(rules)
    new.arrivals = rules.arrivals.copy()
    return new


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
        witness: the last of the names is one; of `LONE` it always is.
    """
    first = names - 1 if witness or fault == LONE else committed_turn.FIRST_WITNESS
    with patch.object(committed_turn, "FIRST_WITNESS", first):
        space = Space(fault, names, rounds)
        space.explore(most)
    return space
