"""State of a run folder: the one function that decides it, for `shoal runs` and `shoal diagnose`.

A run is alive if a process of this machine holds the lock of its folder. That is read from
/proc/locks, without a lock of one's own, which would keep a starting run out. Of a folder on
another machine, or a copied one, only the age of its files is known.

    state       known by
    starting    alive, no step yet
    running     alive, or written within SILENT_S by another machine
    silent      nothing was written for that long
    hung        a hang was named, and no step came after it
    stopped     it ended on request, or its script let the folder go
    ended       it completed
    unsaved     it completed or stopped, and the last checkpoint could not be written
    refused     exit status 2 before a step: something to correct
    failed      an exception, or a rank that left
    diverged    exit status 3: the numbers are at fault
    killed      a signal ended it, or its processes are gone without an end
    abandoned   no end is recorded, and nobody here knows its processes
    damaged     its events cannot be read
    unstarted   the folder was made, and no run ever started there
"""

from __future__ import annotations

import re
import stat
import time
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_lines_backward,
    parse_event,
    parse_step,
    read_object,
)
from shoal.base.text.event_sentences import died_text, signal_text, strip_control_characters
from shoal.checkpoint.format.lease import LOCK_FILE, Owner, read_owner
from shoal.view.script_lines import has_restarted, is_user_script

SILENT_S = 120.0
"""Seconds without a sign of life after which a run is silent; longer for runs with slow steps."""
SLOW_STEPS = 10
"""A run is silent after as many of its own steps, where that is longer."""
ABANDONED_S = 86_400.0
SKEW_S = 900.0
"""Difference of two clocks from which a file server's clock counts as wrong."""
MOST_EVENTS = 5_000
"""Events of a session that are read, the newest ones."""
TAIL_BYTES = 16 << 20
"""Bytes at the end of a file that are read."""
NEWEST_STEPS = 20
SIGNS = ("metrics.jsonl", "events.jsonl", "phase.json", "rank_steps", "logs")
"""Files and folders whose time of change is a sign of life."""
ALIVE = ("starting", "running", "silent", "hung")
WRONG = (
    *("hung", "diverged", "failed", "killed", "damaged", "unsaved", "refused", "abandoned"),
    *("silent", "unstarted"),
)
"""States to which `shoal diagnose` has an answer, the worst first."""
ENDINGS = ("worker_died", "run_finished", "hang", "collectives_differ")
"""Events that may be the last word of a session."""


@dataclass(frozen=True)
class FolderState:
    """State of a run folder.

    Attributes:
        word: as in the table above.
        how: how it came to that, in words; "" if the word says all.
        step, steps: the newest step, and all of them; 0: unknown.
        last_sign_s: seconds since 1970; 0.0: unknown.
        alive: a process may still work in the folder.
    """

    word: str
    how: str = ""
    step: int = 0
    steps: int = 0
    last_sign_s: float = 0.0
    alive: bool = False


@dataclass(frozen=True)
class FolderEvidence:
    """Everything in a run folder that bears on its state.

    Attributes:
        events: of the last session, at most the newest MOST_EVENTS.
        steps: the newest rows of metrics.jsonl.
        damage: what cannot be read in the folder, in words; "" nothing.
        torn: a complete line of events.jsonl after the last readable one cannot be read.
        held: a process of this machine holds the folder.
        owner: the process that owner.json names; None: it let the folder go.
        ranks_s: when the ranks last met (ranks.json); 0.0: unknown.
        last_s, age_s: the last sign of life, and the seconds since then.
        islands: the same of each island's own folder.
    """

    folder: Path
    plan: Record
    events: list[Record]
    steps: list[Record]
    damage: str
    torn: bool
    held: bool
    owner: Owner | None
    ranks_s: float
    last_s: float
    age_s: float
    islands: tuple[FolderEvidence, ...] = ()

    @property
    def step(self) -> int:
        """Return the newest step, 0 if there is none."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def planned(self) -> int:
        """Return the number of steps of the plan, 0 if unknown."""
        steps = self.plan.get("steps")
        return int(steps) if is_number(steps) and steps > 0 else 0

    @property
    def silent(self) -> bool:
        """Return whether the run gave no sign for longer than it should."""
        step_s = max((s["step_s"] for s in self.steps if is_number(s.get("step_s"))), default=0.0)
        return self.age_s > max(SILENT_S, SLOW_STEPS * step_s)

    def last(self, name: str) -> Record | None:
        """Return the newest event of a name."""
        return next((one for one in reversed(self.events) if one["event"] == name), None)

    def stepped_since(self, name: str) -> bool:
        """Return whether a step was recorded after the newest event of a name."""
        at = (self.last(name) or {}).get("step")
        if is_number(at):
            return self.step > at
        resumed = [e["step"] for e in self.events if e["event"] == "resumed"]
        first = next(filter(is_number, reversed(resumed)), 0)
        return bool(self.steps) and (not resumed or self.step > first)


def read_folder_state(folder: Path, now_s: float | None = None) -> FolderState:
    """Return the state of one run folder, whatever is missing or damaged in it.

    Args:
        folder: a run folder; a run of islands is as its islands are.
        now_s: the time, seconds since 1970; None: now.
    """
    return decide_state(read_evidence(folder, now_s or time.time(), read_held_locks()))


def decide_state(seen: FolderEvidence) -> FolderState:
    """Return the state that the evidence of a folder shows."""
    state = _decide_alone(seen)
    if not seen.islands or state.word in ("damaged", "unstarted"):
        return state
    each = [_decide_alone(one) for one in seen.islands]
    worst = min(each, key=lambda one: WRONG.index(one.word) if one.word in WRONG else len(WRONG))
    if seen.held and not worst.alive:
        worst = next((one for one in each if one.alive), state)
    name = seen.islands[each.index(worst)].folder.name if worst in each else ""
    how = f"{name}: {worst.how}" if worst.how and name else worst.how
    steps = {"step": min(one.step for one in each), "steps": max(one.steps for one in each)}
    last_s = max(seen.last_s, *(one.last_sign_s for one in each))
    return replace(worst, how=how, last_sign_s=last_s, **steps)


def _decide_alone(seen: FolderEvidence) -> FolderState:
    word, how = _decide(seen)
    alive = word in ALIVE and _may_live(seen)
    how = strip_control_characters(how)
    return FolderState(word, how, seen.step, seen.planned, seen.last_s, alive)


def _decide(seen: FolderEvidence) -> tuple[str, str]:
    """Return the state of a run, and how it came to that."""
    if _may_live(seen):
        hung = seen.last("hang")
        if hung and not seen.stepped_since("hang") and not _met_since(seen, hung):
            return "hung", ""
        begun = bool(seen.steps) and seen.stepped_since("run_started")
        return ("silent" if seen.silent else "running" if begun else "starting"), seen.damage
    if (found := _read_end(seen)) is not None:
        return found
    if seen.owner is not None and seen.owner.has_ended:
        return "killed", "no end recorded"
    if seen.owner is not None:
        return "abandoned", "a copy, or of another machine"
    if seen.damage and not seen.events:
        return "damaged", seen.damage
    return _describe_no_end(seen)


def _may_live(seen: FolderEvidence) -> bool:
    owner = seen.owner
    return seen.held or (
        owner is not None and not owner.is_here and seen.age_s < ABANDONED_S and not _is_over(seen)
    )


def _is_over(seen: FolderEvidence) -> bool:
    """Return whether the newest session has recorded its end."""
    return seen.last("run_finished") is not None


def _read_end(seen: FolderEvidence) -> tuple[str, str] | None:
    """Return the state that the session's last word shows; None without one."""
    for place in range(len(seen.events) - 1, -1, -1):
        event = seen.events[place]
        name, after = event["event"], seen.events[place + 1 :]
        if name not in ENDINGS:
            continue
        if name == "run_finished":
            return _describe_finish(str(event.get("how", "completed")))
        if has_restarted(after, seen.folder) or _met_since(seen, event):
            return None
        if name == "worker_died":
            return describe_death(event, made_steps=seen.stepped_since("run_started"))
        if not seen.stepped_since(name):
            return "hung", "a hang, after which nothing came"
    return None


def _met_since(seen: FolderEvidence, event: Record) -> bool:
    """Return whether the ranks met again after an event, so that a later session began."""
    at_s = event.get("time_s")
    return is_number(at_s) and seen.ranks_s > at_s


def _describe_finish(how: str) -> tuple[str, str]:
    if re.search(r"could not be written|save failed", how):
        return "unsaved", how
    return ("ended" if how.startswith("completed") else "stopped"), how


def describe_death(event: Record, *, made_steps: bool) -> tuple[str, str]:
    """Return the state that a death leaves, and its line.

    >>> describe_death({"rank": 0, "pid": 7, "how": "exit code 2"}, made_steps=False)
    ('refused', 'rank 0 (pid 7): exit code 2')
    """
    how, words = str(event.get("how", "ended")), died_text(event)
    if how.startswith("ended by the watch"):
        return "hung", words
    if "SIG" in how or how.startswith(("killed", "ended")):
        return "killed", words
    if how.startswith("exit code 2") and not made_steps:
        return "refused", words
    if how.startswith("exit code 3"):
        return "diverged", words
    return "failed", words


def _describe_no_end(seen: FolderEvidence) -> tuple[str, str]:
    """Return the state of a folder that nobody holds and that records no end."""
    if (stop := seen.last("stop_requested")) is not None:
        name = signal_text(str(stop.get("signal", "a signal")))
        saved = seen.last("checkpoint_saved") is not None or not seen.steps
        return ("stopped" if saved else "unsaved"), f"by {name}, without an end"
    if not seen.events and not seen.steps:
        return "unstarted", "no run ever started there"
    where = f"step {seen.step} of {seen.planned}" if seen.planned else f"step {seen.step}"
    if seen.planned and seen.step >= seen.planned:
        return "ended", f"{where}; no end recorded"
    if is_user_script(seen.folder):
        return "stopped", "closed by its script"
    if seen.torn or seen.damage:
        return "damaged", seen.damage or "the last line of events.jsonl cannot be read"
    return "abandoned", f"no end recorded, {where}"


# ---- reading a folder


def read_evidence(folder: Path, now_s: float, held: set[int]) -> FolderEvidence:
    """Read what bears on the state of a run folder; what is damaged counts as absent.

    Args:
        held: as `read_held_locks` returns it.
    """
    lines, damage = _read_lines(folder / "events.jsonl")
    events, torn = _newest_session(lines)
    if lines and not events and not damage:
        damage = "events.jsonl: no line of it can be read"
    rows, unreadable = _read_lines(folder / "metrics.jsonl")
    steps = _newest_steps(rows)
    if rows and not steps:
        unreadable = unreadable or "metrics.jsonl: no line of it can be read"
    is_held = _is_held(folder / LOCK_FILE, held)
    last_s = find_last_sign_s(folder)
    if is_held:
        last_s -= _file_clock_error_s(folder, events)
    return FolderEvidence(
        folder=folder,
        plan=_read_object(folder / "plan.json"),
        events=events,
        steps=steps,
        damage=damage or unreadable,
        torn=torn,
        held=is_held,
        owner=read_owner(folder) if _is_file(folder / "owner.json") else None,
        ranks_s=_time_of(_read_object(folder / "ranks.json")),
        last_s=last_s,
        age_s=now_s - last_s,
        islands=tuple(
            read_evidence(one, now_s, held)
            for one in sorted(folder.glob("island-*"))
            if (one / "events.jsonl").exists()
        ),
    )


def read_held_locks(table: Path = Path("/proc/locks")) -> set[int]:
    """Return the inodes of the files that processes of this machine hold a flock on.

    Devices are not compared: btrfs and overlay file systems name another one there than `stat`.
    """
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  WRITE 1234 08:01:131074 0 EOF, or <none>:0 for what has no inode
    words = [line.split() for line in lines if " FLOCK " in line]
    inodes = [row[-3].rpartition(":")[2] for row in words if len(row) > 5]
    return {int(inode) for inode in inodes if inode.isdecimal() and inode != "0"}


def find_last_sign_s(folder: Path) -> float:
    """Return when a file of the run last changed, seconds since 1970; 0.0: unknown."""
    paths = [*(folder / name for name in SIGNS), *folder.glob("rank_steps/*")]
    return max(map(_changed_s, paths))


def _read_lines(path: Path) -> tuple[list[bytes], str]:
    """Return the complete lines at the end of a file, newest first, and why it cannot be read."""
    try:
        if not path.exists() and not path.is_symlink():
            return [], ""
        if not _is_file(path):
            return [], f"{path.name}: is no file"
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError as failure:
        return [], f"{path.name}: {failure.strerror or failure}"
    lines = [line for _, line in iter_lines_backward(BytesIO(data)) if line.strip()]
    if size and not lines:
        return [], f"{path.name}: no line of it can be read"
    return (lines[:-1] or lines if size > TAIL_BYTES else lines), ""


def _newest_session(lines: list[bytes]) -> tuple[list[Record], bool]:
    """Return the newest events from the last `run_started` on, and whether a later line is torn."""
    found: list[Record] = []
    torn = False
    for line in lines:
        if (event := parse_event(line)) is None:
            torn = torn or not found
            continue
        found.append(event)
        if len(found) == MOST_EVENTS or event["event"] == "run_started":
            break
    return found[::-1], torn


def _newest_steps(lines: list[bytes]) -> list[Record]:
    found: list[Record] = []
    for line in lines:
        if (row := parse_step(line)) is not None:
            found.append(row)
        if len(found) == NEWEST_STEPS:
            break
    return found[::-1]


def _read_object(path: Path) -> Record:
    return read_object(path) if _is_file(path) else {}


def _time_of(record: Record) -> float:
    return float(record["time_s"]) if is_number(record.get("time_s")) else 0.0


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file: to open a pipe would wait for ever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _is_held(path: Path, held: set[int]) -> bool:
    try:
        return path.stat().st_ino in held
    except OSError:
        return False


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _file_clock_error_s(folder: Path, events: list[Record]) -> float:
    """Return the negative seconds by which a file server's clock is behind this machine's, or 0."""
    newest_s = _time_of(events[-1]) if events else 0.0
    error_s = _changed_s(folder / "events.jsonl") - newest_s
    return error_s if newest_s and error_s < -SKEW_S else 0.0
