"""Choice of the rank to blame for a hang: the one that waits least.

The evidence is watch pages, stack replies and /proc. Ranks that hang wait for each other in
collectives, all but one: that one is stopped, or does not answer because C code holds the GIL, or
runs code of its own. If all wait, one is in a collective that the others are not in, most often a
user's own.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.text.units import bytes_text
from shoal.launch.watch.page_reader import PageSnapshot
from shoal.wire.watch_page import PARTS

STOPPED, DEBUGGED, UNINTERRUPTIBLE = "T", "t", "D"
"""States of a process, as the kernel calls them."""
PASSES = tuple(map(PARTS.index, ("forward and backward", "sum over ranks", "backward")))
ONE_TO_ONE = ("send", "receive")
"""Messages, whose counts differ between ranks of a pipeline."""
LATE_S, AWAY_S = 1.5, 10.0
"""Seconds of silence after which a machine is late · is reported as away."""
GONE = "nothing is heard from its machine: it is down, or the link to it"


@dataclass(frozen=True)
class RankEvidence:
    """Evidence about one rank.

    Attributes:
        told: its page.
        answer: its reply to the request for stacks; None without a reply.
        state: of its process, by the kernel: `kernel_state`.
        host: its machine.
        away_s: seconds since its machine was last heard.
    """

    rank: int
    pid: int
    told: PageSnapshot
    answer: Mapping[str, Any] | None
    state: dict[str, str]
    host: str = field(default_factory=lambda: os.uname().nodename)
    away_s: float = 0.0

    @property
    def letter(self) -> str:
        """Return the kernel's letter for the state of the process."""
        return self.state.get("State", "?")[:1]

    @property
    def waits(self) -> bool:
        """Return whether the rank waits for other ranks.

        If a device runs the collectives, its host enqueues them and waits where it first reads a
        number: in Shoal's code between the data and the update, which by itself takes no time.
        """
        told, answer = self.told, self.answer or {}
        reads = told.part in PASSES and bool(answer.get("own"))
        return told.waits or reads or bool(answer.get("collective"))

    @property
    def between(self) -> bool:
        """Return whether the rank runs user code, between two calls of a run or its loader."""
        return not self.waits and bool((self.answer or {}).get("between"))

    @property
    def collective(self) -> str:
        """Return the last collective that the rank enqueued, or a user's own in which it is."""
        if self.by_user and self.answer:
            return f"torch.distributed.{self.answer['collective']}"
        if not self.told.last:
            return ""
        size = f" of {bytes_text(self.told.last_bytes)}" if self.told.last_bytes else ""
        return f"{self.told.last}{size}"

    @property
    def by_user(self) -> bool:
        """Return whether the rank is in a collective that a user's line called."""
        return bool(self.answer and self.answer.get("by_user"))

    @property
    def place(self) -> str:
        """Return the user's line where the rank is, in brackets; "" in none, or in Shoal's code."""
        if self.waits and not self.by_user:
            return ""
        place = self.answer.get("place") if self.answer else ""
        return f" ({place})" if place else ""

    @property
    def phase(self) -> str:
        """Return the phase of the rank, as text."""
        if self.told.phases:
            return self.told.phases
        part = PARTS[self.told.part] if 0 <= self.told.part < len(PARTS) else ""
        return f"step {self.told.step + 1}, {part}" if part else "the start"


@dataclass(frozen=True)
class Hang:
    """A hang to report.

    Attributes:
        why: what its rank does instead.
        collective: in which the others wait, or its last one.
        kind: whose deadline has passed.
        certain: the rank will not recover by itself.
        unlike: not a hang: the rank makes other collectives than the others; `why` describes them.
        away: its machine sends nothing.
        status: exit status of the run: 2 if the user must change something; 0: as usual.
    """

    rank: int
    pid: int
    host: str
    phase: str
    collective: str
    why: str
    kind: str
    deadline_s: float
    certain: bool
    unlike: bool = False
    away: bool = False
    status: int = 0

    @property
    def line(self) -> str:
        """Return the hang as one line, without numbers that differ between repetitions."""
        return self.why if self.unlike else f"hung in {self.phase}: {self.why}"


@dataclass(frozen=True)
class BlamedRank:
    """The rank to blame, before it is reported.

    Attributes:
        together: no rank is more to blame than the others.
        alone: it alone is in a collective of the user's own: a rank that waits in another one.
    """

    of: RankEvidence
    why: str
    collective: str
    certain: bool
    together: bool = False
    alone: int | None = None

    @property
    def is_compiling(self) -> bool:
        """Return whether the rank is compiling, which may take long."""
        return bool(self.of.answer and self.of.answer.get("compiling"))

    def make_hang(self, kind: str, deadline_s: float) -> Hang:
        """Return the hang to report."""
        one = self.of
        return Hang(
            one.rank, one.pid, one.host, one.phase, self.collective, self.why, kind, deadline_s,
            self.certain, away=one.away_s >= AWAY_S,
        )  # fmt: skip


def blame_rank(seen: Sequence[RankEvidence]) -> BlamedRank | None:
    """Return the rank that the others wait for; None while it cannot be known.

    It cannot be known while a debugger holds a rank, or a machine is silent for less than AWAY_S.

    Args:
        seen: every rank that runs, at least one.
    """
    if any(one.letter == DEBUGGED or one.state.get("TracerPid", "0") != "0" for one in seen):
        return None
    away = [one for one in seen if one.away_s > LATE_S]
    if away and max(one.away_s for one in away) < AWAY_S:
        return None
    waiting = [one for one in seen if one.waits and one not in away]
    collective = Counter(one.collective for one in waiting if one.collective).most_common(1)
    others = collective[0][0] if collective else ""
    if away:
        return BlamedRank(max(away, key=lambda one: one.away_s), GONE, others, False)
    if stopped := [one for one in seen if one.letter == STOPPED]:
        return BlamedRank(
            _least_advanced(stopped), "its process is stopped (SIGSTOP)", others, True
        )
    if silent := [one for one in seen if one.answer is None and not one.waits]:
        one = _least_advanced(silent)
        where = one.state.get("wchan", "")
        if one.letter == UNINTERRUPTIBLE:
            why = f"it waits in the kernel{f' ({where})' if where else ''}, often for a disk"
        elif one.told.live:
            why = "Python does not answer: a call into C keeps its lock"
        else:
            why = "it has not begun"
        return BlamedRank(one, why, others, False)
    if busy := [one for one in seen if not one.waits]:
        one = _least_advanced(busy)
        return BlamedRank(
            one, f"it is in no collective{one.place}", others or one.collective, False
        )
    return _blame_waiting_rank(seen, others)


def _least_advanced(found: Sequence[RankEvidence]) -> RankEvidence:
    """Return the rank with the least progress."""
    return min(found, key=lambda one: (one.told.step, one.told.begun, one.told.changed_s))


def _blame_waiting_rank(seen: Sequence[RankEvidence], others: str) -> BlamedRank:
    """Return the culprit if all wait: the rank in another collective than the others."""
    own = [one for one in seen if one.by_user]
    rest = [one for one in seen if not one.by_user]
    if own and rest:
        one, other = own[0], rest[0]
        if len(own) > len(rest):
            one, other = rest[0], own[0]
        why = f"it is in {one.collective}{one.place}, rank {other.rank} in {other.collective}"
        alone = other.rank if len(own) == 1 else None
        return BlamedRank(one, f"{why}{other.place}", other.collective, True, alone=alone)
    if own:
        lines = Counter(one.collective + one.place for one in seen)
        if len(lines) > 1:
            rare = min(lines, key=lambda line: lines[line])
            one = next(one for one in reversed(seen) if one.collective + one.place == rare)
            other = next(other for other in seen if other.collective + other.place != rare)
            why = f"it is in {rare}, rank {other.rank} in {other.collective}{other.place}"
            return BlamedRank(one, why, other.collective, True)
    alike = not any(one.told.last in ONE_TO_ONE for one in seen)
    behind = min(seen, key=lambda one: one.told.begun)
    ahead = max(seen, key=lambda one: one.told.begun)
    unlike = behind.collective != ahead.collective  # in the same collective they would continue
    if alike and unlike and behind.told.begun < ahead.told.begun:
        why = (
            f"it is in collective {behind.told.begun}, {behind.collective}, rank {ahead.rank} in "
            f"{ahead.told.begun}, {ahead.collective}"
        )
        return BlamedRank(behind, why, ahead.collective, True)
    last = max(seen, key=lambda one: one.told.changed_s)
    why = "all ranks wait for each other: what was sent does not arrive"
    return BlamedRank(last, why, others, False, together=True)


def kernel_state(pid: int) -> dict[str, str]:
    """Return Linux's State, TracerPid, Threads, wchan, stack of a process; {} if it is gone."""
    found: dict[str, str] = {}
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in ("State", "TracerPid", "Threads"):
                found[name] = value.strip()
        found["wchan"] = (process / "wchan").read_text(encoding="utf-8").strip("0\n ")
        found["stack"] = (process / "stack").read_text(encoding="utf-8").rstrip()  # for root alone
    return found


def write_stacks(path: Path, seen: Sequence[RankEvidence]) -> str:
    """Write the evidence about every rank; return the path for the event, "" on a full disk."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # a start that may be refused makes none
        path.write_text("\n".join(_format_evidence(one) for one in seen), encoding="utf-8")
        return str(path)
    return ""


def _format_evidence(one: RankEvidence) -> str:
    told = one.told
    head = (
        f"rank {one.rank} (pid {one.pid} on {one.host}): {one.phase}; {told.step} steps done; "
        f"collectives: {told.begun} enqueued, {told.ended} completed, the last one "
        f"{one.collective or 'none'}; "
        f"{'waits' if one.waits else 'does not wait'}"
    )
    if one.answer:
        return f"{head}\n{one.answer.get('stacks', '')}"
    lines = [f"{name}: {value}" for name, value in one.state.items() if value]
    return "\n".join([head, "did not answer; the kernel says of it:", *lines, ""])
