"""Drawn worlds of island members: processes, disks and wires are simulated, merges are hashes.

    world = World(seed, names=5); world.run(rounds=50)      raises Violation; one seed replays it

Faults at once: kill (disk intact, old or empty), one-way partition, reordering, loss, duplicates,
a flipped merge, a slow disk, a clock that jumps (a grace window ends at once), goodbyes, and the
loss of the meeting place (reports of disks do not arrive). Then faults stop, and the members must
go on.

A process without the weights of a turn copies them from a disk that has them, or waits.

    one history      a turn of a session has one fact, wherever it is applied
    one start        a session has one first turn
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
from collections.abc import Iterable
from typing import Any

from shoal.islands.membership.committed_turn import (
    FIRST_WITNESS,
    CommittedTurn,
    Seat,
    TurnProposal,
    is_witness,
    majority,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import (
    ArrivalReport,
    SessionMeeting,
    needs_common_start,
)
from shoal.islands.membership.turn_messages import (
    ALL_VOTE,
    Action,
    Apply,
    Await,
    CastVote,
    Merge,
    Propose,
    Send,
    Welcome,
)
from shoal.islands.membership.witness_seat import WitnessSeat

SAMPLES = 4
HISTORY = 4
"""Facts that a disk keeps; an old disk is one of them."""

REFUSED = 23
"""Changes of multiples of so many tokens do not count, as those that admission refuses."""

RUNNING = 640
"""Events after an answer of a running session, in which a process starts no other one."""

BUSY = 32
"""Messages under way, from which processes without a seat do not ask again."""

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
    """One start of a member: its machine, its weights, and its tasks.

    Attributes:
        meeting: reports of disks, while an island has no seat · rules: of a witness's seat.
        held: newest turn on its disk.
        healthy: its weights are those of the newest turn · asked: a merge that waits for that.
        awaits: members without which no vote is possible · welcomed_at: event of the last answer.
    """

    def __init__(self, member: IslandMember, held: CommittedTurn | None, count: int) -> None:
        self.member, self.weights = member, "" if held is None else held.weights
        self.held = held
        self.flip, self.healthy, self.applied_at = False, True, 0
        self.merged: set[str] = set()
        self.asked: Merge | None = None
        self.awaits: set[int] = set()
        self.welcomed_at = -RUNNING
        self.rules = WitnessSeat() if member.is_witness else None
        self.meeting: SessionMeeting | None = None
        if not member.is_witness:
            self.meeting = SessionMeeting(ArrivalReport(member.seat, held, "w"), count)


class Sight:
    """What a process sees of others by its connections: which of them are dead, or new."""

    def __init__(self, world: World, name: int) -> None:
        self.world, self.name = world, name

    def gone(self, seats: Iterable[tuple[int, int]]) -> set[int]:
        found = set()
        for name, boot in seats:
            one = self.world.processes.get(name)
            if one is None or one.member.seat.boot > boot:
                found.add(name)
        return {n for n in found if not {(n, self.name), (self.name, n)} & self.world.cut}

    def restarted(self, seats: Iterable[tuple[int, int]]) -> set[int]:
        return self.gone(seats) & {*self.world.processes}


class Checks:
    """What must hold of every vote and every applied fact, with the truth beside it."""

    def __init__(self) -> None:
        self.facts: dict[tuple[int, int], CommittedTurn] = {}
        self.before: dict[str, CommittedTurn] = {}
        self.votes: dict[tuple[int, int, tuple[int, int, int], str], set[int]] = {}
        self.chosen: set[str] = set()
        self.session = -1
        self.proposed: dict[tuple[int, int, Seat], TurnProposal] = {}
        self.rounds = 0

    def start(self, fact: CommittedTurn, before: CommittedTurn | None) -> None:
        """Note the first fact of a session."""
        if any(session == fact.session for session, _ in self.facts):
            raise Violation(f"two starts of session {fact.session}")
        self.session = fact.session
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
        if fact.session != self.session:
            raise Violation(f"session {fact.session} goes on beside a later one")
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
        self.boots, self.starts = dict.fromkeys(self.names, 0), 0
        self.clocks = {name: self.draw.choice((0, 0, 300)) for name in self.names}
        self.disks: dict[int, deque[CommittedTurn]] = {n: deque(maxlen=HISTORY) for n in self.names}
        self.processes: dict[int, Process] = {}
        self.wire: list[tuple[int, Any]] = []
        self.slow: list[tuple[int, Any]] = []
        self.vain: list[tuple[int, Any]] = []
        self.cut: set[tuple[int, int]] = set()
        self.meeting_open = True
        self.checks = Checks()
        self.count = names
        self.events, self.idle, self.sessions = 0, 0, 0
        self.strikes = False
        for name in self.names:
            self._start(name)

    # processes

    def _count_start(self, name: int) -> int:
        """Return the number of a start: by the machine's clock, and above the last one."""
        self.starts += 1
        self.boots[name] = max(self.boots[name] + 1, self.starts + self.clocks[name])
        return self.boots[name]

    def _start(self, name: int) -> None:
        disk = self.disks[name]
        held = disk[-1] if disk else None
        seat = Seat(name, self._count_start(name))
        member = self.member(seat, held, self.names, SAMPLES, least=self.least)
        self.processes[name] = Process(member, held, self.count)
        self._greet(name)
        self._perform(name)

    def _restart(self, name: int) -> None:
        disk = self.disks[name]
        kind = self.draw.random() if self._copies(disk) >= 2 else 1.0
        if kind < 0.25 and len(disk) > 1:
            for _ in range(self.draw.randrange(1, len(disk))):
                disk.pop()
        elif kind < 0.35:
            disk.clear()
        self._start(name)

    def _copies(self, disk: deque[CommittedTurn]) -> int:
        """Count the other disks that are as new: of a turn, not every copy is lost."""
        newest = [other[-1][:2] for other in self.disks.values() if other is not disk and other]
        return sum(not disk or one >= disk[-1][:2] for one in newest)

    def _kill(self, name: int) -> None:
        del self.processes[name]

    def _become_new(self, process: Process) -> None:
        """Give up the seat, as after a restart."""
        name = process.member.seat.name
        process.member = process.member.restarted(self._count_start(name), self.names)
        process.awaits, process.asked = set(), None
        if process.rules is None:
            report = ArrivalReport(process.member.seat, process.held, "w")
            process.meeting = SessionMeeting(report, self.count)

    def _greet(self, name: int) -> None:
        """Ask for a seat; before a session, report what the disk holds."""
        process = self.processes[name]
        if not process.member.leaves:
            process.member.greet()
        self._report(process)
        if process.meeting is not None and not self._is_running(process):
            self._begin(process, process.meeting)

    def _report(self, process: Process) -> None:
        """Send what the disk holds, and who was heard."""
        member, meeting = process.member, process.meeting
        if member.seated:
            return
        if process.rules is not None:
            report, to = process.rules.report(member), self.names
        elif meeting is not None:
            meeting.know(member.fact)
            report = meeting.own
            to = meeting.readers(self.names, is_running=self._is_running(process))
        else:
            return
        self.wire += [(other, report) for other in to if other != member.seat.name]

    def _is_running(self, process: Process) -> bool:
        return self.events - process.welcomed_at < RUNNING

    def _on_report(self, process: Process, report: ArrivalReport) -> None:
        if process.rules is not None:
            is_new = process.rules.add(report)
        elif process.meeting is not None:
            is_new = process.meeting.add(report)
            self._begin(process, process.meeting)
        else:
            return
        if is_new:
            self._report(process)

    def _begin(self, process: Process, meeting: SessionMeeting) -> None:
        newest, fact = meeting.newest(), meeting.begin(process.member)
        if fact is not None:
            self.checks.start(fact, newest)
            self.sessions += 1
            self._check_start(fact, newest)

    def _check_start(self, fact: CommittedTurn, newest: CommittedTurn | None) -> None:
        """Nothing that a disk of the session's members has is lost, and its weights exist."""
        every = [one.weights for disk in self.disks.values() for one in disk]
        if fact.round and fact.weights not in every:
            raise Violation(f"a session starts from round {fact.round}, which no disk has")
        held = [disk[-1] for name in fact.names() if (disk := self.disks[name])]
        if any(newest is None or one[:2] > newest[:2] for one in held):
            raise Violation(f"a session starts from round {fact.round}, and a disk has a later one")

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
        elif isinstance(action, Await):
            process.awaits = {*action.names} or {-1}
        elif isinstance(action, Merge):
            if not process.healthy:
                process.asked = action
                return
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
        if not disk or disk[-1][:2] < (vote.session, vote.turn - 1):
            raise Violation(f"{vote.seat} votes on turn {vote.turn} before its disk has the last")

    def _perform_apply(self, name: int, action: Apply) -> None:
        process, fact = self.processes[name], action.fact
        first = (fact.session, fact.turn) not in self.checks.facts
        self.checks.apply(fact)
        self.idle, process.applied_at = 0, self.events
        process.awaits, process.asked = set(), None
        if process.rules is not None:
            self._perform_witness(process, process.rules, action)
        else:
            self._take_weights(process, action)
            if action.train:
                process.meeting = None
            else:
                process.welcomed_at = self.events
            if process.healthy:
                self._queue_turn(process, fact)
            elif name in fact.names():
                self.wire.append((name, ("heal", process, fact)))
        if first and self.faults:
            self.strikes = self.draw.random() < 0.2

    def _perform_witness(self, process: Process, rules: WitnessSeat, action: Apply) -> None:
        member, fact = process.member, action.fact
        rules.note_turn(fact, is_seated=action.train)
        member.saved()
        if action.train:
            member.trained("", 0, 0)
            own = member.proposals[member.seat.name]
            self.checks.propose(Propose(member.seat, fact.session, fact.turn + 1, own))

    def _take_weights(self, process: Process, action: Apply) -> None:
        """Go on with the own merge of a turn, if it is the turn's; else the process must heal."""
        fact = action.fact
        known = process.healthy and fact.weights in (process.weights, *process.merged)
        if process.healthy and not (known or action.heal):
            name = process.member.seat.name
            raise Violation(f"member {name} goes on with weights that nobody committed")
        process.healthy = known or not fact.round
        if process.healthy:
            process.weights = fact.weights
        process.merged.clear()

    def _queue_turn(self, process: Process, fact: CommittedTurn) -> None:
        name = process.member.seat.name
        self.wire.append((name, ("saved", process, fact)))
        if process.member.seated:
            self.wire.append((name, ("trained", process, fact)))

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
        if kind == "heal":
            self._heal(name, process, fact)
        elif kind == "saved":
            disk = self.disks[name]
            disk.append(fact)
            self._note_saved(process)
        else:
            tokens = self.draw.randrange(1, 100)
            used = self.draw.choice((SAMPLES, SAMPLES, SAMPLES, SAMPLES - 1, 1))
            change = f"{fact.turn}.{name}.{self.boots[name]}"
            proposal = TurnProposal(member.seat, change, tokens, used)
            member.trained(change, tokens, used)
            own = member.proposals.get(name, proposal)
            self.checks.propose(Propose(member.seat, fact.session, fact.turn + 1, own))
        self._perform(name)

    def _note_saved(self, process: Process) -> None:
        process.member.saved()
        process.held = process.member.fact
        if process.meeting is not None and process.held is not None:
            process.meeting.hold(process.held)

    def _heal(self, name: int, process: Process, fact: CommittedTurn) -> None:
        """Copy the weights of a turn from the own disk, or that of a process which answers."""
        others = [n for n in self.processes if (n, name) not in self.cut or n == name]
        copies = [one for n in others for one in self.disks[n] if one.weights == fact.weights]
        if not copies:
            self.vain.append((name, ("heal", process, fact)))
            return
        self.disks[name].append(fact)
        process.weights, process.healthy = fact.weights, True
        self._note_saved(process)
        if process.member.seated:
            self.wire.append((name, ("trained", process, fact)))
        if process.asked is not None:
            asked, process.asked = process.asked, None
            self._perform_one(name, process, asked)

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
            asks = not (process.member.seated or process.member.leaves)
            if (asks and len(self.wire) < BUSY) or (late and not asks):
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
        is_report = isinstance(message, ArrivalReport)
        if is_report and not self.meeting_open:
            return
        if self.faults:
            kind = self.draw.random()
            if kind < 0.01:  # lost, or altered: its MAC does not fit
                return
            if kind < 0.03:
                self.wire.append((to, message))
        if is_report:
            self._on_report(process, message)
        else:
            process.member.receive(message)
            if isinstance(message, Welcome):
                process.welcomed_at = self.events
        if process.member.actions:
            self._perform(to)

    def _fault(self) -> None:
        draw, up = self.draw, sorted(self.processes)
        if draw.random() < 0.9 and not any(one.member.seated for one in self.processes.values()):
            return  # a start takes many messages, and little time
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
        """End a window of a process: what its driver does after some seconds without news."""
        process = self.processes[name]
        member, rules, fact = process.member, process.rules, process.member.fact
        sight = Sight(self, name)
        if rules is not None and rules.must_restart(member, is_late=self._is_late(process)):
            self._become_new(process)
        elif fact is None or not member.seated:
            if process.meeting is rules is None and not self._is_running(process):
                self._become_new(process)  # it lost its seat, and nobody answers
            self._greet(name)
        elif rules is not None:
            if rules.may_decide(member):
                held = [one.weights for disk in self.disks.values() for one in disk]
                if fact.round and fact.weights not in held:
                    raise Violation(f"a witness decides after turn {fact.turn}, which no disk has")
                member.grace_over()
            else:
                self._greet(name)  # the others may have gone on without it
        else:
            lost = sight.gone(fact.seats)
            if len(fact.seats) - len(lost) < majority(len(fact.seats)):
                process.awaits = lost
            if process.awaits and needs_common_start(member, process.awaits, sight):
                self._become_new(process)
            else:
                member.grace_over()
        self._perform(name)

    def _is_late(self, process: Process) -> bool:
        return self.events - process.applied_at > 2 * LATE

    def _idle(self) -> None:
        """Nothing is under way: time passes until windows end, disks write and links heal."""
        if self.slow or self.vain:
            self.wire = [*self.slow, *self.vain]
            self.slow, self.vain = [], []
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
        """End processes that have waited in vain, as after islands.wait_s, and start them again."""
        if not self.faults:
            return  # without faults nobody may need that
        self.meeting_open = self.meeting_open or self.draw.random() < 0.5
        for name, process in [*self.processes.items()]:
            if process.awaits or not (process.member.seated and process.healthy):
                self._kill(name)
                self._restart(name)

    # runs

    def run(self, rounds: int) -> int:
        """Run until so many rounds are merged, then without faults; return the merged rounds."""
        limit = 4000 + 3000 * rounds
        while self.checks.rounds < rounds:
            self.step()
            if self.events > limit:
                raise Violation(f"{self.checks.rounds} rounds in {self.events} events")
        self._calm()
        self.checks.check_samples(self._newest())
        return self.checks.rounds

    def _newest(self) -> CommittedTurn:
        """Return the newest turn that a process knows."""
        known = [one.member.fact for one in self.processes.values()]
        facts = [fact for fact in known if fact is not None]
        return max(facts, key=lambda fact: (fact.session, fact.turn))

    def _calm(self) -> None:
        """Without faults all go on, and everybody has a seat within a few turns."""
        self.faults, self.strikes, start = 0.0, False, self.checks.rounds
        self.cut.clear()
        self.meeting_open = True
        for name in self.names:
            if name not in self.processes:
                self._restart(name)
            self.processes[name].member.leaves = False
        limit = self.events + 5000
        while True:
            self.step()
            newest = self._newest()
            full = newest.committers == newest.trainers() and newest.names() == self.names
            if full and self.checks.rounds >= start + 3:
                return
            if self.events > limit:
                raise Violation(f"no progress: {newest.names()} after {self.events} events")
