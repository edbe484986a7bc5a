"""Event engine: run a short program per rank against a cost table and record a timeline.

A program is a list of operations: compute, collective, send, receive, allocate, free. Those of one
lane of a rank run one after the other; lanes (compute, link) run side by side, and one waits for
another if an operation `needs` it by name. Each operation starts once its predecessors are done, so
its start is a maximum of ends and no clock has to tick:

    start = max(end before on this lane, ends of `needs`, message there, last member to join)

The cost table gives the duration (teach/costs.py). Time is O(operations), memory's history O(n log
n) per rank. Operations that can never start are a deadlock: PlanError names the waiting ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.base.errors import PlanError
from shoal.base.plans.timeline import MemorySample, Timeline, TimelineSpan
from shoal.base.text.units import bytes_text, seconds_text

TIMED = ("compute", "collective", "send", "receive")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank.

    Attributes:
        kind: compute, collective, send, receive, allocate or free.
        what: kind of the drawn span: forward, all-reduce, …
        label: text inside it.
        key: names the message, the collective call, or the allocated tensor.
        ranks: members of the collective.
        peer: other end of a message.
        amount: the factor for the cost table: bytes, batches, shares; allocate: bytes.
        part: allocate: category of the bytes.
        lane: where it runs.
        name, needs: own name, and names of operations of this rank that must have ended.
    """

    kind: str
    what: str = "compute"
    label: str = ""
    key: Hashable = None
    ranks: Sequence[int] = ()
    peer: int = -1
    amount: float = 0.0
    part: str = ""
    lane: str = "compute"
    name: str = ""
    needs: tuple[str, ...] = ()


class Costs(Protocol):
    """Interface of a cost table, in the timeline's unit of time."""

    def seconds(self, op: Op) -> float:
        """Return the duration for which the operation occupies its lane."""


@dataclass
class _Lane:
    rank: int
    ops: list[tuple[int, Op]] = field(default_factory=list)
    position: int = 0
    clock: float = 0.0


class _EngineRun:
    """State of one run of the engine: sent messages, joined collectives, finished operations."""

    def __init__(self, programs: Sequence[Sequence[Op]], costs: Costs):
        self.costs = costs
        self.lanes: list[_Lane] = []
        self.ends: dict[tuple[int, str], float] = {}
        self.messages: dict[Hashable, float] = {}
        self.met: dict[Hashable, dict[int, tuple[_Lane, float]]] = {}
        self.waiting: dict[Hashable, list[_Lane]] = {}
        self.spans: list[TimelineSpan] = []
        self.changes: list[list[tuple[float, int, Op]]] = [[] for _ in programs]
        for rank, program in enumerate(programs):
            lanes: dict[str, _Lane] = {}
            for index, op in enumerate(program):
                lanes.setdefault(op.lane, _Lane(rank)).ops.append((index, op))
            self.lanes += lanes.values()

    def run(self) -> None:
        ready = list(self.lanes)
        while ready:
            lane = ready.pop()
            while lane.position < len(lane.ops):
                index, op = lane.ops[lane.position]
                missing = self.missing_event(lane, op)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(lane)
                    break
                if op.kind == "collective":
                    ready += self.join_collective(lane, op)
                    break
                ready += self.run_op(lane, index, op)
        stuck = [lane for lane in self.lanes if lane.position < len(lane.ops)]
        if stuck:
            raise PlanError(self.deadlock_text(stuck))

    def missing_event(self, lane: _Lane, op: Op) -> Hashable:
        """Return the event for which the operation still waits, None if none."""
        for name in op.needs:
            if (lane.rank, name) not in self.ends:
                return ("done", lane.rank, name)
        if op.kind == "receive" and op.key not in self.messages:
            return ("message", op.key)
        return None

    def start_s(self, lane: _Lane, op: Op) -> float:
        start = lane.clock
        for name in op.needs:
            start = max(start, self.ends[lane.rank, name])
        return start

    def run_op(self, lane: _Lane, index: int, op: Op) -> list[_Lane]:
        """Run one operation that waits for nothing; return the lanes that it wakes."""
        start = self.start_s(lane, op)
        woken: list[_Lane] = []
        if op.kind in ("allocate", "free"):
            self.changes[lane.rank].append((start, index, op))
            self.end(lane, op, start, start, woken)
            return woken
        if op.kind not in TIMED:
            raise PlanError(f"rank {lane.rank}, operation {index}: no such kind: {op.kind}")
        if op.kind == "receive":
            start = max(start, self.messages[op.key])
        end = start + self.costs.seconds(op)
        if op.kind == "send":
            if op.key in self.messages:
                raise PlanError(
                    f"rank {lane.rank}, operation {index}: {_op_text(op)} is sent twice"
                )
            self.messages[op.key] = end
            woken += self.waiting.pop(("message", op.key), [])
        self.end(lane, op, start, end, woken)
        return woken

    def join_collective(self, lane: _Lane, op: Op) -> list[_Lane]:
        """Add a rank to a collective; the last member ends it on all ranks.

        Returns:
            the lanes that may go on: those of all members, or [] while one is missing.

        Raises:
            PlanError: the rank is no member, or joins twice.
        """
        there = self.met.setdefault(op.key, {})
        if lane.rank not in op.ranks or lane.rank in there:
            wrong = "joins twice" if lane.rank in there else "is a collective of other ranks"
            index = lane.ops[lane.position][0]
            raise PlanError(f"rank {lane.rank}, operation {index}: {_op_text(op)} {wrong}")
        there[lane.rank] = lane, self.start_s(lane, op)
        if len(there) < len(op.ranks):
            return []
        start = max(at for _, at in there.values())
        end = start + self.costs.seconds(op)
        woken: list[_Lane] = []
        for member, _ in there.values():
            own = member.ops[member.position][1]
            self.end(member, own, start, end, woken)
            woken.append(member)
        del self.met[op.key]
        return woken

    def end(self, lane: _Lane, op: Op, start: float, end: float, woken: list[_Lane]) -> None:
        lane.clock = end
        if op.kind in TIMED:
            index = lane.ops[lane.position][0]
            if end > start or op.kind == "compute":  # a message that costs nothing is not drawn
                self.spans.append(TimelineSpan(lane.rank, start, end, op.what, op.label, op.lane))
            self.changes[lane.rank].append((start, index, op))
        lane.position += 1
        if op.name:
            self.ends[lane.rank, op.name] = end
            woken += self.waiting.pop(("done", lane.rank, op.name), [])

    def deadlock_text(self, stuck: list[_Lane]) -> str:
        """Return the cycle of waits from the first stuck lane, as one line."""
        by_rank: dict[int, _Lane] = {}
        for lane in stuck:
            by_rank.setdefault(lane.rank, lane)
        parts: list[str] = []
        at: _Lane | None = stuck[0]
        seen: set[int] = set()
        while at is not None and id(at) not in seen and len(parts) < 8:
            seen.add(id(at))
            index, op = at.ops[at.position]
            reason, rank = self.reason(at, op)
            parts.append(f"rank {at.rank}, operation {index}, {_op_text(op)} waits for {reason}")
            at = by_rank.get(rank)
        return "deadlock: " + "; ".join(parts)

    def reason(self, lane: _Lane, op: Op) -> tuple[str, int]:
        """Return the event and the rank for which the stuck operation waits."""
        missing = self.missing_event(lane, op)
        if isinstance(missing, tuple) and missing[0] == "done":
            return f"{missing[2]} of its own", -1
        if missing is not None:
            return f"a message of rank {op.peer}", op.peer
        there = self.met.get(op.key, {})
        absent = [rank for rank in op.ranks if rank not in there]
        shown = ", ".join(str(rank) for rank in absent[:4]) + (" …" if len(absent) > 4 else "")
        return f"rank {shown} to join", absent[0] if absent else -1


def _op_text(op: Op) -> str:
    """Format an operation for an error message."""
    return f"{op.what} {op.label or op.key or ''}".rstrip()


def run_ops(
    programs: Sequence[Sequence[Op]],
    costs: Costs,
    title: str = "",
    unit: str = "s",
    sample: str = "all",
) -> Timeline:
    """Run the programs of all ranks and return their timeline.

    Args:
        sample: instants at which memory is sampled: "all" after every change, which is the peak
            with outputs; "start" only when a timed operation starts, the rule of the training
            puzzles.

    Raises:
        PlanError: a deadlock (names the waiting ranks), a message sent twice, a free without an
            allocation.

    >>> from shoal.teach.costs import PuzzleCosts
    >>> ops = [Op("send", "send", key="x", peer=1)], [Op("receive", "receive", key="x", peer=0)]
    >>> run_ops(ops, PuzzleCosts(), unit="steps").end_s
    0.4
    """
    run = _EngineRun(programs, costs)
    run.run()
    spans = tuple(sorted(run.spans, key=lambda span: (span.rank, span.start_s)))
    memory: list[MemorySample] = []
    for rank, changes in enumerate(run.changes):
        memory += _memory_history(rank, sorted(changes, key=lambda change: change[:2]), sample)
    line = Timeline(title, len(programs), spans, tuple(memory), unit)
    line.facts["makespan"] = (
        f"{line.end_s:g} steps" if unit == "steps" else seconds_text(line.end_s)
    )
    if memory:
        peak = max(held.held_bytes for held in memory)
        line.facts["peak"] = f"{peak:,.0f}" if unit == "steps" else bytes_text(peak)
    return line


def _memory_history(
    rank: int, changes: list[tuple[float, int, Op]], sample: str
) -> list[MemorySample]:
    """Return a rank's held memory over time; a free names the key of its allocation."""
    things: dict[Hashable, Op] = {}
    parts: dict[str, float] = {}
    history: list[MemorySample] = []
    remembers = any(op.kind == "allocate" for _, _, op in changes)
    for time, index, op in changes if remembers else ():
        if op.kind == "allocate":
            if op.key in things:
                raise PlanError(f"rank {rank}, operation {index}: {op.key} is allocated twice")
            things[op.key] = op
            parts[op.part] = parts.get(op.part, 0.0) + op.amount
        elif op.kind == "free":
            if op.key not in things:
                raise PlanError(f"rank {rank}, operation {index}: free of {op.key}, not held")
            gone = things.pop(op.key)
            parts[gone.part] -= gone.amount
        if (op.kind in TIMED) == (sample == "start"):
            history.append(MemorySample(rank, time, sum(parts.values()), dict(parts)))
    return history
