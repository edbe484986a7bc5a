"""Everything in a run folder that bears on its state, read once, whatever is missing or damaged.

No file is opened that is no regular file, and of a long file only the end is read. The lock of a
run is looked up in /proc/locks: to try it would keep a starting run out.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_lines_backward,
    parse_event,
    parse_object,
    parse_step,
    read_object,
)
from shoal.checkpoint.format.lease import LOCK_FILE, Owner, read_owner
from shoal.view.diagnosis.error_reports import read_error_reports

SILENT_S = 120.0
"""Seconds without a sign of life after which a run is silent; longer for runs with slow steps."""
SLOW_STEPS = 10
"""A run is silent after as many of its own steps, where that is longer."""
CLOCK_S = 2.0
"""Difference between a file's time and an event's that says nothing."""
SKEW_S = 900.0
"""Difference of two clocks from which a file server's clock counts as wrong."""
MOST_EVENTS = 5_000
"""Events of a session that are read, the newest ones."""
MOST_HISTORY = 5_000
"""Events of all sessions that are read, the newest ones."""
ROWS_BYTES, SESSION_BYTES, HISTORY_BYTES = 1 << 20, 4 << 20, 16 << 20
"""Bytes at the end of metrics.jsonl and events.jsonl that are read."""
FIRST_BYTES = 1 << 16
"""Bytes at the beginning of a log that are read."""
PROCESSES = "processes.jsonl"
LAST_S = 32_503_680_000.0
"""Seconds from 1970 to the year 3000; a later time is damage."""
NEWEST_STEPS = 20
SIGNS = ("metrics.jsonl", "events.jsonl", "phase.json", "rank_steps", "logs", "owner.json")
"""Files and folders whose time of change is a sign of life."""


@dataclass(frozen=True)
class FolderEvidence:
    """Everything in a run folder that bears on its state.

    Attributes:
        events: of the last session, at most the newest MOST_EVENTS.
        steps: the newest rows of metrics.jsonl.
        damages: why events.jsonl, metrics.jsonl and plan.json cannot be read, in this order.
        torn: a complete line of events.jsonl after the last readable one cannot be read.
        held: a process of this machine holds the folder.
        owner: the process that owner.json names; None: it let the folder go.
        ranks: ranks.json.
        reports: error reports of ranks, as events.
        rows_s: when metrics.jsonl last changed; seconds since 1970, as all times here.
        last_s, age_s: the last sign of life, and the seconds since then.
        islands: the same of each island's own folder.
    """

    folder: Path
    plan: Record
    events: list[Record]
    steps: list[Record]
    damages: tuple[str, ...]
    torn: bool
    held: bool
    owner: Owner | None
    ranks: Record
    reports: list[Record]
    rows_s: float
    last_s: float
    age_s: float
    islands: tuple[FolderEvidence, ...] = ()

    @property
    def step(self) -> int:
        """Return the newest step, 0 if there is none."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def damage(self) -> str:
        """Return the first damage, "" if there is none."""
        return next(iter(self.damages), "")

    @property
    def planned(self) -> int:
        """Return the number of steps of the plan, 0 if unknown."""
        steps = self.plan.get("steps")
        return int(steps) if is_number(steps) and steps > 0 else 0

    @property
    def ranks_s(self) -> float:
        """Return when the ranks last met, seconds since 1970; 0.0: unknown."""
        return _time_of(self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the machines of the ranks, by name."""
        listed = self.ranks.get("ranks")
        rows = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        return tuple(sorted({str(one["host"]) for one in rows if one.get("host")}))

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
        resumed = [e.get("step") for e in self.events if e["event"] == "resumed"]
        first = next(filter(is_number, reversed(resumed)), 0)
        return bool(self.steps) and (not resumed or self.step > first)

    def met_since(self, event: Record) -> bool:
        """Return whether the ranks met again after an event, so that a later session began."""
        at_s = event.get("time_s")
        return is_number(at_s) and self.ranks_s > at_s

    @property
    def is_restarting(self) -> bool:
        """Return whether the ranks were started again and have not yet computed since."""
        newest = {event["event"]: place for place, event in enumerate(self.events)}
        again = newest.get("restarting")
        if again is None:
            return False
        computed = [newest[name] for name in ("resumed", "compute_started") if name in newest]
        if computed:
            return max(computed) < again
        return not self.met_since(self.events[again])  # own loops may restore nothing

    @property
    def started_s(self) -> float:
        """Return when the session began, 0.0 if unknown."""
        return next((at_s for event in self.events if (at_s := _time_of(event))), 0.0)

    @property
    def begun(self) -> bool:
        """Return whether the newest session has made a step."""
        if not self.steps or not self.stepped_since("run_started"):
            return False
        started_s = _time_of(self.last("run_started") or {})
        events_s = _changed_s(self.folder / "events.jsonl")
        older = self.rows_s < min(started_s, events_s) - CLOCK_S  # rows of an earlier session
        return not older or self.last("compute_started") is not None


def read_evidence(folder: Path, now_s: float, held: set[int]) -> FolderEvidence:
    """Read what bears on the state of a run folder; what is damaged counts as absent.

    Args:
        held: as `read_held_locks` returns it.
    """
    lines, damage = _read_lines(folder / "events.jsonl", SESSION_BYTES)
    events, torn = _newest_session(lines)
    if lines and not events:
        damage = "events.jsonl: no line of it can be read"
    rows, unreadable = _read_lines(folder / "metrics.jsonl", ROWS_BYTES)
    steps = _newest_steps(rows, NEWEST_STEPS)
    if rows and not steps:
        unreadable = "metrics.jsonl: no line of it can be read"
    plan = _read_object(folder / "plan.json")
    no_plan = "" if plan or not (folder / "plan.json").exists() else "plan.json: cannot be read"
    ranks = _read_object(folder / "ranks.json")
    started_s = _time_of(events[0]) if events and events[0]["event"] == "run_started" else 0.0
    is_held = _is_held(folder / LOCK_FILE, held)
    last_s = find_last_sign_s(folder)
    if is_held:
        last_s -= _file_clock_error_s(folder, events)
    return FolderEvidence(
        folder=folder,
        plan=plan,
        events=events,
        steps=steps,
        damages=tuple(filter(None, (damage, unreadable, no_plan))),
        torn=torn,
        held=is_held,
        owner=_read_owner(folder),
        ranks=ranks,
        reports=[] if is_held else read_error_reports(folder, max(started_s, _time_of(ranks))),
        rows_s=_changed_s(folder / "metrics.jsonl"),
        last_s=last_s,
        age_s=now_s - last_s,
        islands=tuple(
            read_evidence(one, now_s, held)
            for one in sorted(folder.glob("island-*"))
            if (one / "events.jsonl").exists()
        ),
    )


def read_event_history(folder: Path) -> list[Record]:
    """Return the newest events of all sessions, the oldest of them first."""
    lines = _read_lines(folder / "events.jsonl", HISTORY_BYTES)[0]
    found = [event for line in lines[:MOST_HISTORY] if (event := parse_event(line)) is not None]
    return found[::-1]


def read_step_rows(folder: Path, most: int) -> list[Record]:
    """Return the newest rows of metrics.jsonl, at most `most`, the oldest of them first."""
    return _newest_steps(_read_lines(folder / "metrics.jsonl", ROWS_BYTES)[0], most)


def read_first_start_s(folder: Path) -> float:
    """Return when the first session of a run began, seconds since 1970; 0.0: unknown.

    A loop of the user's own writes no event of its start: its first event may be a save, and the
    records of its ranks and processes are older.
    """
    ranks_s = _time_of(_read_object(folder / "ranks.json"))
    found = [ranks_s, *(_read_first_time(folder / name) for name in ("events.jsonl", PROCESSES))]
    return min((at_s for at_s in found if at_s), default=0.0)


def _read_first_time(path: Path) -> float:
    """Return the time of the first readable line of a log; 0.0 without one."""
    try:
        if not _is_file(path):
            return 0.0
        with path.open("rb") as file:
            lines = file.read(FIRST_BYTES).splitlines(keepends=True)
    except OSError:
        return 0.0
    records = (parse_object(line) for line in lines if line.endswith(b"\n"))
    return next((at_s for one in records if one and (at_s := _time_of(one))), 0.0)


def read_last_validation(folder: Path) -> float | None:
    """Return the newest loss of a validation, of any session; None without one."""
    for line in _read_lines(folder / "events.jsonl", SESSION_BYTES)[0]:
        if b'"validated"' not in line or (event := parse_event(line)) is None:
            continue
        loss = event.get("loss")
        if event["event"] == "validated" and is_number(loss):
            return float(loss)
    return None


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


def _read_lines(path: Path, most_bytes: int) -> tuple[list[bytes], str]:
    """Return the complete lines at the end of a file, newest first, and why it cannot be read."""
    try:
        if not path.exists() and not path.is_symlink():
            return [], ""
        if not _is_file(path):
            return [], f"{path.name}: is no file"
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError as failure:
        return [], f"{path.name}: {failure.strerror or failure}"
    lines = [line for _, line in iter_lines_backward(BytesIO(data)) if line.strip()]
    if size and not lines:
        return [], f"{path.name}: no line of it can be read"
    return (lines[:-1] or lines if size > most_bytes else lines), ""


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


def _newest_steps(lines: list[bytes], most: int) -> list[Record]:
    found: list[Record] = []
    for line in lines:
        if (row := parse_step(line)) is not None:
            found.append(row)
        if len(found) == most:
            break
    return found[::-1]


def _read_object(path: Path) -> Record:
    return read_object(path) if _is_file(path) else {}


def _time_of(record: Record) -> float:
    """Return an event's time, 0.0 if it has none that a calendar knows."""
    at_s = record.get("time_s")
    return float(at_s) if is_number(at_s) and 0 < at_s < LAST_S else 0.0


def _is_file(path: Path) -> bool:
    """Return whether a path is a regular file: to open a pipe would wait for ever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _read_owner(folder: Path) -> Owner | None:
    """Return the owner that owner.json names; None if there is none, or it is damaged."""
    owner = read_owner(folder) if _is_file(folder / "owner.json") else None
    if owner is None or not is_number(owner.started_s) or not 0 <= owner.started_s < LAST_S:
        return None
    texts = (owner.host, owner.boot)
    return owner if all(isinstance(text, str) for text in texts) else None


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
