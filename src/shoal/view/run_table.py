"""Rows of the runs in a folder: what state each is in, how far it is, when it last gave a sign.

A run is alive if a process of this machine holds the lock of its folder. That is read from
/proc/locks, without a lock of one's own, which would keep a starting run out. Of a folder on
another machine, or a copied one, only the age of its files is known.

    state       known by
    starting    alive, no step yet
    running     alive, or written within SILENT_S by another machine
    silent      nothing was written for that long
    hung        a hang was named, and no step came after it
    stopped     it ended on request, or its owner let the folder go before the last step
    ended       it completed
    killed      its processes are gone without an end, or one died
    abandoned   nothing was written for ABANDONED_S, and nobody here knows its processes
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.base.layouts.layout import Layout
from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    iter_lines_backward,
    parse_event,
    read_newest_steps,
    read_object,
)
from shoal.base.text.event_sentences import number_text, strip_control_characters
from shoal.base.text.units import count_text, seconds_text
from shoal.checkpoint.format.lease import LOCK_FILE, Owner, read_owner
from shoal.view.progress import count_unit, step_amount

SILENT_S = 120.0
"""Seconds without a sign of life after which a run is silent; longer for runs with slow steps."""
SLOW_STEPS = 10
"""A run is silent after as many of its own steps, where that is longer."""
ABANDONED_S = 86_400.0
MOST_EVENTS = 5_000
"""Events of a session that are read, the newest ones."""
RATE_STEPS = 20
SIGNS = ("metrics.jsonl", "events.jsonl", "phase.json", "rank_steps", "logs")
"""Files and folders whose time of change is a sign of life."""
SHORT_NAME = 20
"""Columns that a name keeps before the table loses its last column."""
ALIVE = ("starting", "running", "silent", "hung")


@dataclass(frozen=True)
class RunRow:
    """One run of a folder.

    Args:
        name: its path below the folder that was listed.
        path: its folder.
        state: as in the table above.
        how: how it ended, in words; "" if it did not.
        step, steps: the last step, and all of them; 0: unknown.
        loss, validation: the newest ones.
        rate: tokens or samples a second over the newest steps.
        unit: tokens or samples.
        layout: its name.
        started_s, last_sign_s: seconds since 1970; 0.0: unknown.
    """

    name: str
    path: str
    state: str
    how: str
    step: int
    steps: int
    loss: float | None
    validation: float | None
    rate: float | None
    unit: str
    layout: str
    started_s: float
    last_sign_s: float


def list_runs(folder: Path, now_s: float | None = None) -> list[RunRow]:
    """Return the runs in a folder and below it, the one with the newest sign of life first.

    Args:
        folder: a run folder, or one that holds some, at most three folders deep.
        now_s: the time, seconds since 1970; None: now.
    """
    found = {
        path.parent for depth in range(4) for path in folder.glob("*/" * depth + "events.jsonl")
    }
    now_s, held = now_s or time.time(), read_held_locks()
    rows = [read_row(path, folder, now_s, held) for path in found]
    return sorted(rows, key=lambda row: (-row.last_sign_s, row.name))


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


def read_row(path: Path, root: Path, now_s: float, held: set[int]) -> RunRow:
    """Return the row of one run folder, whatever is missing or damaged in it."""
    plan = read_object(path / "plan.json")
    events = _read_session(path / "events.jsonl")
    steps = read_newest_steps(path / "metrics.jsonl", RATE_STEPS)
    signs_s = [_changed_s(path / name) for name in SIGNS]
    last_s = max([*signs_s, *(_changed_s(one) for one in path.glob("rank_steps/*"))])
    step_s = max((s["step_s"] for s in steps if is_number(s.get("step_s"))), default=0.0)
    silent = now_s - last_s > max(SILENT_S, SLOW_STEPS * step_s)
    here = _is_held(path / LOCK_FILE, held)
    state, how = _state(events, steps, here, silent, read_owner(path), now_s - last_s)
    validated = [
        e["loss"] for e in events if e["event"] == "validated" and is_number(e.get("loss"))
    ]
    losses = [s["loss"] for s in steps if is_number(s.get("loss"))]
    starts = [e["time_s"] for e in events if is_number(e.get("time_s"))]
    below = path.relative_to(root) if path != root else Path(path.name)
    return RunRow(
        strip_control_characters(str(below)),
        str(path),
        state,
        strip_control_characters(how),
        steps[-1]["step"] if steps else 0,
        plan["steps"] if is_number(plan.get("steps")) else 0,
        losses[-1] if losses else None,
        validated[-1] if validated else None,
        _rate(steps, plan),
        count_unit(plan),
        _layout_name(plan),
        starts[0] if starts else 0.0,
        last_s,
    )


def _read_session(path: Path) -> list[Record]:
    """Return the newest events, from the last `run_started` on."""
    found: list[Record] = []
    try:
        with path.open("rb") as file:
            for _, line in iter_lines_backward(file):
                if (event := parse_event(line)) is not None:
                    found.append(event)
                if len(found) == MOST_EVENTS or (found and found[-1]["event"] == "run_started"):
                    break
    except OSError:
        return []
    return found[::-1]


def _state(
    events: list[Record],
    steps: list[Record],
    here: bool,
    silent: bool,
    owner: Owner | None,
    age_s: float,
) -> tuple[str, str]:
    """Return the state of a run, and how it ended.

    Args:
        events: of its last session.
        steps: its newest rows.
        here: a process of this machine holds its folder.
        silent: it gave no sign for longer than it should.
        owner: the process that its owner.json names; None: it let the folder go.
        age_s: seconds since its last sign.
    """
    names = [event["event"] for event in events]
    if "run_finished" in names and not here:
        how = str(events[names.index("run_finished")].get("how", "completed"))
        return ("ended" if how.startswith("completed") else "stopped"), how
    deaths = [e for e in events if e["event"] == "worker_died" and e.get("fatal")]
    hung = "hang" in names and not _stepped_since(events, steps, "hang")
    if here or (owner is not None and not owner.is_here and age_s < ABANDONED_S):
        begun = bool(steps) and _stepped_since(events, steps, "run_started")
        alive = "silent" if silent else "running" if begun else "starting"
        return ("hung" if hung else alive), ""
    if deaths or (owner is not None and owner.has_ended):
        return "killed", str(deaths[-1].get("how", "a rank died")) if deaths else "no end recorded"
    if owner is not None:
        return "abandoned", "a copy, or of another machine"
    return "stopped", "closed by its script"


def _stepped_since(events: list[Record], steps: list[Record], name: str) -> bool:
    """Return whether a step was recorded after the last event of a name."""
    last = [event for event in events if event["event"] == name][-1:]
    at = last[0].get("step") if last else None
    if is_number(at):
        return bool(steps) and steps[-1]["step"] > at
    resumed = [e["step"] for e in events if e["event"] == "resumed" and is_number(e.get("step"))]
    return bool(steps) and (not resumed or steps[-1]["step"] > resumed[-1])


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


def _rate(steps: list[Record], plan: Record) -> float | None:
    unit = count_unit(plan)
    known = [(step_amount(s, unit), s.get("step_s")) for s in steps]
    pairs = [(amount, s) for amount, s in known if amount and is_number(s) and s]
    if not pairs:
        return None
    return sum(amount for amount, _ in pairs) / sum(float(s or 0) for _, s in pairs)


def _layout_name(plan: Record) -> str:
    try:
        return Layout(**plan["layout"]).strategy
    except (KeyError, TypeError, ValueError):
        return ""


def table_lines(rows: Iterable[RunRow], width: int, now_s: float) -> list[str]:
    """Return the rows as a table; narrow terminals lose the last columns, and names their middle.

    Args:
        rows: in the order of the table.
        width: columns of the terminal.
        now_s: the time, for "started" and "last sign".
    """
    head = ("run", "state", "step", "loss", "valid.", "rate", "layout", "sign", "started")
    cells = [head, *(_cells(row, now_s) for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    kept = len(head)
    while kept > 4 and min(widths[0], SHORT_NAME) + sum(widths[1:kept]) + 2 * (kept - 1) > width:
        kept -= 1
    widths[0] = min(widths[0], max(SHORT_NAME, width - sum(widths[1:kept]) - 2 * (kept - 1)))
    lines = []
    for row in cells:
        texts = [_shorten_middle(row[0], widths[0]).ljust(widths[0]), row[1].ljust(widths[1])]
        texts += [text.rjust(w) for text, w in zip(row[2:kept], widths[2:kept], strict=True)]
        lines.append("  ".join(texts).rstrip())
    return lines


def _cells(row: RunRow, now_s: float) -> tuple[str, ...]:
    of = f"{row.step}/{row.steps}" if row.steps else str(row.step)
    rate = f"{count_text(row.rate)} {row.unit[:3]}/s" if row.rate else "–"
    started, sign = row.started_s, row.last_sign_s
    return (
        row.name,
        row.state,
        of,
        number_text(row.loss, 4),
        number_text(row.validation, 4),
        rate,
        row.layout or "–",
        _age_text(now_s - sign) if sign else "–",
        time.strftime("%m-%d %H:%M", time.localtime(started)) if started else "–",
    )


def _age_text(seconds: float) -> str:
    return "now" if seconds < 1 else f"{seconds_text(seconds)} ago"


def _shorten_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - tail - 1]}…{text[-tail:]}"
