"""Drawn worlds of island members: processes, disks and wires are simulated, merges are hashes.

    world = World(seed, names=5); world.run(rounds=50)      raises Violation; one seed replays it

Faults at once: kill (disk intact, old or empty), one-way partition, reordering, loss, duplicates,
a flipped merge, a slow disk, a clock that jumps (a grace window ends at once), goodbyes, and the
loss of the meeting place. Then faults stop, and the members must go on.

    one history      a turn of a session has one fact, wherever it is applied
    committed        whoever applies a fact finds the votes for it
    divisor          is the committers' tokens, and weights are the merge of just their changes
    samples          of an epoch: each used once, or still to be dealt
    on disk          nobody votes before its disk has the turn before
    progress         no end of waiting while enough members are up; once faults stop, turns commit
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from typing import Any

from shoal.islands.membership.committed_turn import (
    FIRST_WITNESS,
    CommittedTurn,
    Seat,
    TurnProposal,
    is_witness,
    majority,
    promises_needed,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    Action,
    Apply,
    CastVote,
    Merge,
    Propose,
    Send,
)

SAMPLES = 4
HISTORY = 4
"""Facts that a disk keeps; an old disk is one of them."""

REFUSED = 23
"""Changes of multiples of so many tokens do not count, as those that admission refuses."""

LATE = 512
"""Events without a committed turn, after which a window ends."""


class Violation(AssertionError):
    """A promise of the protocol that does not hold."""


def merge_hash(weights: str, proposals: tuple[TurnProposal, ...]) -> str:
    """Return the hash that stands for the merged weights: of the weights, changes and divisor."""
    changes = [(one.seat, one.change, one.tokens) for one in proposals]
    divisor = sum(one.tokens for one in proposals)
    return hashlib.sha256(f"{weights}{changes}{divisor}".encode()).hexdigest()[:16]


class Process:
    """One start of a member: its machine, its weights, and its tasks."""

    def __init__(self, member: IslandMember, weights: str) -> None:
        self.member, self.weights = member, weights
        self.flip, self.applied_at = False, 0
        self.merged: set[str] = set()


class Checks:
    """What must hold of every vote and every applied fact, with the truth beside it."""

    def __init__(self) -> None:
        self.facts: dict[tuple[int, int], CommittedTurn] = {}
        self.before: dict[str, CommittedTurn] = {}
        self.votes: dict[tuple[int, int, tuple[int, int, int], str], set[int]] = {}
        self.chosen: set[str] = set()
        self.proposed: dict[tuple[int, int, Seat], TurnProposal] = {}
        self.rounds = 0

    def start(self, fact: CommittedTurn, before: CommittedTurn | None) -> None:
        """Note the first fact of a session."""
        self.facts[fact.session, fact.turn] = fact
        self.chosen.add(fact.digest)
        if before is not None:
            self.before[fact.digest] = before

    def propose(self, message: Propose) -> None:
        key = (message.session, message.turn, message.seat)
        if self.proposed.setdefault(key, message.proposal) != message.proposal:
            raise Violation(f"{message.seat} offers two changes in turn {message.turn}")

    def vote(self, vote: CastVote) -> None:
        """Count a vote, and see whether it decides its turn."""
        if vote.fact is None:
            return
        before = self.facts[vote.session, vote.turn - 1]
        key = (vote.session, vote.turn, vote.ballot, vote.fact.digest)
        names = self.votes.setdefault(key, set())
        if vote.ballot == ALL_VOTE and vote.seat not in before.seats:
            return
        names.add(vote.seat.name)
        count = len(before.seats)
        if len(names) >= (count if vote.ballot == ALL_VOTE else majority(count)):
            self.chosen.add(vote.fact.digest)

    def apply(self, fact: CommittedTurn) -> None:
        key = (fact.session, fact.turn)
        known = self.facts.get(key)
        if known is not None:
            if known.digest != fact.digest:
                raise Violation(f"two histories: turn {fact.turn} of session {fact.session}")
            return
        if fact.digest not in self.chosen:
            raise Violation(f"turn {fact.turn}: a fact was applied that nobody committed")
        before = self.facts[fact.session, fact.turn - 1]
        self.facts[key], self.before[fact.digest] = fact, before
        made = [before.seat_of(name) for name in fact.committers]
        if any((fact.session, fact.turn, seat) not in self.proposed for seat in made):
            raise Violation(f"turn {fact.turn}: a committer offered no change")
        proposals = tuple(self.proposed[fact.session, fact.turn, seat] for seat in made)
        if fact.divisor != sum(one.tokens for one in proposals):
            raise Violation(f"turn {fact.turn}: the divisor is not that of its committers")
        wanted = merge_hash(before.weights, proposals) if proposals else before.weights
        if fact.weights != wanted:
            raise Violation(f"turn {fact.turn}: the weights are not the merge of the committers")
        self.rounds += bool(proposals)

    def check_samples(self, fact: CommittedTurn) -> None:
        """Every sample before the stream's end: used by one committed turn, or still open."""
        spans = [(s.start, s.stop) for part in fact.dealt for s in part]
        spans += [(span.start, span.stop) for span in fact.stream.open]
        at: CommittedTurn | None = fact
        while at is not None:
            before = self.before.get(at.digest)
            if before is not None and at.committers:
                dealt = dict(zip(before.names(), before.dealt, strict=True))
                for name in at.committers:
                    seat = before.seat_of(name)
                    left = self.proposed[at.session, at.turn, seat].used
                    for span in dealt[name]:
                        stop = min(span.stop, span.start + left)
                        left -= stop - span.start
                        if stop > span.start:
                            spans.append((span.start, stop))
            at = before
        end = 0
        for start, stop in sorted(spans):
            if start != end:
                raise Violation(f"sample {min(start, end)} is used twice or never")
            end = stop
        if end != fact.stream.cursor:
            raise Violation(f"samples from {end} on are lost")


class World:
    """Processes, disks and wires of some names, driven by one seed.

    Args:
        faults: probability of a fault before each event.
        member: class of the machines.
        names, witnesses: processes of each kind · least: committers of a merge.
    """

    def __init__(
        self,
        seed: int,
        names: int = 5,
        faults: float = 0.02,
        member: type[IslandMember] = IslandMember,
        *,
        witnesses: int = 0,
        least: int = 2,
    ) -> None:
        self.draw = random.Random(seed)
        self.names = (*range(names), *range(FIRST_WITNESS, FIRST_WITNESS + witnesses))
        self.faults, self.member, self.least = faults, member, least
        self.boots = dict.fromkeys(self.names, 0)
        self.disks: dict[int, deque[CommittedTurn]] = {n: deque(maxlen=HISTORY) for n in self.names}
        self.processes: dict[int, Process] = {}
        self.wire: list[tuple[int, Any]] = []
        self.slow: list[tuple[int, Any]] = []
        self.cut: set[tuple[int, int]] = set()
        self.meeting_open = True
        self.checks = Checks()
        self.session, self.events, self.idle = -1, 0, 0
        self.strikes = False
        self._meet()

    # processes

    def _start(self, name: int, fact: CommittedTurn | None, *, is_saved: bool = True) -> Process:
        seat = Seat(name, self.boots[name])
        member = self.member(seat, fact, self.names, SAMPLES, least=self.least, is_saved=is_saved)
        process = Process(member, "" if fact is None else fact.weights)
        self.processes[name] = process
        return process

    def _restart(self, name: int) -> None:
        self.boots[name] += 1
        disk = self.disks[name]
        kind = self.draw.random() if self._copies(disk) >= 2 else 1.0
        if kind < 0.25 and len(disk) > 1:
            for _ in range(self.draw.randrange(1, len(disk))):
                disk.pop()
        elif kind < 0.35:
            disk.clear()
        process = self._start(name, disk[-1] if disk else None)
        process.member.greet()
        self._perform(name)

    def _copies(self, disk: deque[CommittedTurn]) -> int:
        """Count the other disks that are as new: of a turn, not every copy is lost."""
        newest = [other[-1][:2] for other in self.disks.values() if other is not disk and other]
        return sum(not disk or one >= disk[-1][:2] for one in newest)

    def _kill(self, name: int) -> None:
        del self.processes[name]

    def _meet(self) -> None:
        """All start together from the newest fact on any disk; nobody has a seat."""
        held = [fact for disk in self.disks.values() for fact in disk]
        newest = max(held, key=lambda fact: (fact.session, fact.turn), default=None)
        self.session += 1
        for name in self.names:
            self.boots[name] += 1
        seats = [Seat(name, self.boots[name]) for name in self.names]
        fact = start_session(self.session, newest, seats, SAMPLES)
        self.checks.start(fact, newest)
        for name in self.names:
            self._start(name, fact, is_saved=False)
            self._perform_apply(name, Apply(fact, heal=True, train=True))

    # the driver of one process

    def _perform(self, name: int) -> None:
        process = self.processes[name]
        member = process.member
        while member.actions:
            actions, member.actions = member.actions, []
            for action in actions:
                self._perform_one(name, process, action)
        if self.strikes:
            self._strike(name)

    def _perform_one(self, name: int, process: Process, action: Action) -> None:
        if isinstance(action, Send):
            message = action.message
            if isinstance(message, CastVote):
                self._check_disk(name, message)
            self.wire += [(to, message) for to in action.to if to != name]
        elif isinstance(action, Merge):
            counted = tuple(one for one in action.proposals if one.tokens % REFUSED)
            refused = tuple({one.seat.name for one in action.proposals if not one.tokens % REFUSED})
            weights = merge_hash(process.weights, counted) if counted else process.weights
            fact = process.member.fact
            if process.flip and fact is not None and len(fact.trainers()) > 2:
                process.flip, weights = False, f"flip {self.draw.random()}"
            process.merged.add(weights)
            process.member.merged(action.ballot, weights, refused)
        elif isinstance(action, Apply):
            self._perform_apply(name, action)

    def _check_disk(self, name: int, vote: CastVote) -> None:
        self.checks.vote(vote)
        disk = self.disks[name]
        if is_witness(name):
            return  # it holds nothing that could be lost
        if not disk or (disk[-1].session, disk[-1].turn + 1) < (vote.session, vote.turn):
            raise Violation(f"{vote.seat} votes on turn {vote.turn} before its disk has the last")

    def _perform_apply(self, name: int, action: Apply) -> None:
        process, fact = self.processes[name], action.fact
        first = (fact.session, fact.turn) not in self.checks.facts
        self.checks.apply(fact)
        if action.heal:
            process.weights = fact.weights
        elif fact.weights != process.weights:
            if fact.weights not in process.merged:
                raise Violation(f"member {name} goes on with weights that nobody committed")
            process.weights = fact.weights
        process.merged.clear()
        self.idle, process.applied_at = 0, self.events
        tasks = [(name, ("saved", process, fact))]
        if action.train:
            tasks.append((name, ("trained", process, fact)))
        if is_witness(name):
            process.member.saved()
            if action.train:
                process.member.trained("", 0, 0)
                self.checks.propose(
                    Propose(
                        process.member.seat,
                        fact.session,
                        fact.turn + 1,
                        process.member.proposals[name],
                    )
                )
        else:
            self.wire += tasks
        if first and self.faults:
            self.strikes = self.draw.random() < 0.2

    def _strike(self, name: int) -> None:
        """Kill, or cut off, the first that knows a decision, while half of the messages is lost."""
        self.strikes = False
        self.wire = [
            one for one in self.wire if one[1][0].__class__ is str or self.draw.random() < 0.5
        ]
        if self.draw.random() < 0.7:
            self._kill(name)
        if self.draw.random() < 0.5:
            for other in self.draw.sample(self.names, 2):
                self.cut |= {(other, to) for to in self.names if to != other}

    def _task(self, name: int, task: tuple[str, Process, CommittedTurn]) -> None:
        kind, process, fact = task
        member = process.member
        if self.processes.get(name) is not process or member.fact is not fact:
            return
        if kind == "saved":
            self.disks[name].append(fact)
            member.saved()
        else:
            tokens = self.draw.randrange(1, 100)
            used = self.draw.choice((SAMPLES, SAMPLES, SAMPLES, SAMPLES - 1, 1))
            change = f"{fact.turn}.{name}.{self.boots[name]}"
            proposal = TurnProposal(member.seat, change, tokens, used)
            member.trained(change, tokens, used)
            own = member.proposals.get(name, proposal)
            self.checks.propose(Propose(member.seat, fact.session, fact.turn + 1, own))
        self._perform(name)

    # events

    def step(self) -> None:
        """Let one thing happen."""
        self.events += 1
        draw = self.draw
        if self.events % 64 == 0:
            self._greet_again()
        elif self.faults and draw.random() < self.faults:
            self._fault()
        elif self.wire:
            at = draw.randrange(len(self.wire))
            self.wire[at], self.wire[-1] = self.wire[-1], self.wire[at]
            to, what = self.wire.pop()
            self._deliver(to, what)
        else:
            self._idle()

    def _greet_again(self) -> None:
        """End the windows of processes without a seat, and of those that were left behind."""
        for name, process in self.processes.items():
            late = self.events - process.applied_at > LATE
            if late or not (process.member.seated or process.member.leaves):
                self._end_grace(name)

    def _deliver(self, to: int, what: Any) -> None:
        if what[0].__class__ is str:
            if self.faults and what[0] == "saved" and self.draw.random() < 0.05:
                self.slow.append((to, what))
            else:
                self._task(to, what)
            return
        process, message = self.processes.get(to), what
        if process is None or (message.seat.name, to) in self.cut:
            return
        if self.faults:
            kind = self.draw.random()
            if kind < 0.01:  # lost, or altered: its MAC does not fit
                return
            if kind < 0.03:
                self.wire.append((to, message))
        process.member.receive(message)
        if process.member.actions:
            self._perform(to)

    def _fault(self) -> None:
        draw, up = self.draw, sorted(self.processes)
        kind, name = draw.random(), draw.choice(self.names)
        down = [one for one in self.names if one not in self.processes]
        if kind < 0.25:
            if up:
                self._kill(draw.choice(up))
        elif kind < 0.55:
            if down:
                self._restart(draw.choice(down))
        elif kind < 0.65:
            self.cut.add((name, draw.choice(self.names)))
        elif kind < 0.75:
            self.cut.clear()
        elif kind < 0.85:
            if up:
                self._end_grace(draw.choice(up))
        elif kind < 0.90:
            if up:
                self.processes[draw.choice(up)].flip = True
        elif kind < 0.93:
            if up:
                self.processes[draw.choice(up)].member.leaves = True
        elif kind < 0.96:
            self.meeting_open = draw.random() < 0.5
        else:
            self.wire += self.slow
            self.slow = []

    def _end_grace(self, name: int) -> None:
        self.processes[name].member.grace_over()
        self._perform(name)

    def _idle(self) -> None:
        """Nothing is under way: time passes until windows end, disks write and links heal."""
        if self.slow:
            self.wire, self.slow = self.slow, []
            return
        for name in sorted(self.processes, key=lambda _: self.draw.random()):
            member = self.processes[name].member
            if member.leaves and not member.seated:
                self._kill(name)
                continue
            self._end_grace(name)
            if self.draw.random() < 0.7:
                break
        self.idle += 1
        if self.idle % 8 == 0:
            self._long_idle()

    def _long_idle(self) -> None:
        down = [name for name in self.names if name not in self.processes]
        if self.cut:
            self.cut.clear()
        elif down:
            for name in down:
                self._restart(name)
        else:
            self._end_waits()

    def _end_waits(self) -> None:
        """End the processes that wait for members too long; all meet if nobody has a seat."""
        newest = max(
            (p.member.fact for p in self.processes.values() if p.member.fact is not None),
            key=lambda fact: (fact.session, fact.turn),
            default=None,
        )
        if newest is not None:
            steady = [
                name
                for name, p in self.processes.items()
                if p.member.seat in newest.seats and p.member.fact is not None
            ]
            if len(steady) >= promises_needed(len(newest.seats)):
                return  # they can go on without a meeting
        seated = [name for name, p in self.processes.items() if p.member.seated]
        for name in seated:
            self._kill(name)
            self._restart(name)
        if not seated and (self.meeting_open or not self.faults):
            self._meet()
        self.meeting_open = self.meeting_open or self.draw.random() < 0.5

    # runs

    def run(self, rounds: int) -> int:
        """Run until so many rounds are merged, then without faults; return the merged rounds."""
        limit = 4000 + 3000 * rounds
        while self.checks.rounds < rounds:
            self.step()
            if self.events > limit:
                raise Violation(f"{self.checks.rounds} rounds in {self.events} events")
        self._calm()
        newest = max(self.checks.facts.values(), key=lambda fact: (fact.session, fact.turn))
        self.checks.check_samples(newest)
        return self.checks.rounds

    def _calm(self) -> None:
        """Without faults all go on, and everybody has a seat within a few turns."""
        self.faults, self.strikes, start = 0.0, False, self.checks.rounds
        self.cut.clear()
        for name in self.names:
            if name not in self.processes:
                self._restart(name)
            self.processes[name].member.leaves = False
        limit = self.events + 5000
        while True:
            self.step()
            newest = max(self.checks.facts.values(), key=lambda fact: (fact.session, fact.turn))
            full = newest.committers == newest.trainers() and newest.names() == self.names
            if full and self.checks.rounds >= start + 3:
                return
            if self.events > limit:
                raise Violation(f"no progress: {newest.names()} after {self.events} events")
