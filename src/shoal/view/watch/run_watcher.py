"""Read what a screen shows of a run folder, again and again, while its run writes it.

A folder may not exist yet, be deleted, replaced by another run's, or copied; its logs may be
truncated by a resume. Each file is read on from where the last reading ended. The row of `shoal
runs` is read more rarely the longer its reading takes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    parse_event,
    read_newest,
)
from shoal.base.runlog.folder_owner import folder_inode
from shoal.base.text.event_sentences import DAMAGED, died_text, event_text
from shoal.base.text.forecast_text import plan_comment
from shoal.view.island_lines import sum_rounds
from shoal.view.live import STYLES
from shoal.view.phase_lines import read_current_phases
from shoal.view.progress import RunProgress, count_unit, step_amount
from shoal.view.run_folder_reader import RunFolder, last_session_events
from shoal.view.run_table import RunRow, read_held_locks, read_row, weigh_losses
from shoal.view.watch.figure_texts import (
    forecast_texts,
    left_texts,
    wait_texts,
)
from shoal.view.watch.loss_history import LossHistory
from shoal.view.watch.rank_states import (
    DEVICES_FILE,
    RankDevice,
    collect_rank_states,
    read_devices,
    read_rank_devices,
)
from shoal.view.watch.rank_tail import RankTail, compute_lateness_s
from shoal.view.watch.styled_lines import clean_text
from shoal.view.watch.watch_state import EventLine, IslandState, RankState, WatchedRun

EVENTS = 500
"""Events that are kept, the newest ones."""
ROW_EVERY_S = 2.0
ROW_SHARE = 0.01
"""Share of a core that reading the row of `shoal runs` may take."""
VALIDATIONS = 200


class RunWatcher:
    """Reader of one run folder; call `read` again and again.

    Args:
        path: the folder; it may not exist yet.
        name: shown for it; default: the folder's name.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = clean_text(name or path.resolve().name)
        self._identity = (0, 0)
        self._seen = False

    def read(self) -> WatchedRun:
        """Read what is new, and return the state of the run."""
        identity = folder_inode(self.path)
        if not any(identity) or not _has_begun(self.path):
            if self._seen:
                return replace(self._compose(), message=f"{self.path} was deleted; its last state:")
            there = "no run in it yet" if any(identity) else "no such folder yet"
            return WatchedRun(self.name, message=clean_text(f"{there}; waiting for {self.path}"))
        if identity != self._identity:
            self._identity, self._seen = identity, True
            self._open()
        self._read_logs()
        return self._compose()

    def _open(self) -> None:
        """Start with a folder that is new, or another than before."""
        self.folder = RunFolder(self.path)
        self.progress = RunProgress(None)
        self.history, self.tail = LossHistory(), RankTail(self.path)
        self.events: deque[Record] = deque(maxlen=EVENTS)
        self.sentences: list[EventLine] = []
        self.lateness_s: dict[int, float] = {}
        self.hosts: dict[int, RankDevice] = {}
        self.samples: dict[tuple[str, int], str] = {}
        self.ranks: list[RankState] = []
        self._versions: dict[str, tuple[int, int, int]] = {}
        self._row: RunRow | None = None
        self._row_due_s = 0.0
        self.folder.metrics.skip()
        self.folder.events.skip()
        self.events.extend(read_newest(self.path / "events.jsonl", parse_event, EVENTS))
        self.sentences = _event_lines(self.events)
        self.history.read(self.path / "metrics.jsonl")
        newest = self.folder.last_steps(20)
        self.progress.add(newest, cut_back=False)
        self.history.add(newest)

    def _read_logs(self) -> None:
        events, replaced = self.folder.events.read()
        if replaced:
            self.events.clear()
            self.sentences = []
        self.events.extend(events)
        self.sentences = [*self.sentences, *_event_lines(events)][-EVENTS:]
        steps, cut_back = self.folder.metrics.read()
        self.progress.add(steps, cut_back)
        self.history.add(steps)
        if self._is_changed("plan.json"):
            self.progress.plan = self.folder.plan()
            total = self.progress.plan.get("steps")
            self.progress.total_steps = int(total) if is_number(total) else None
        if self._is_changed("ranks.json"):
            self.hosts = read_rank_devices(self.path / "ranks.json")
        if self._is_changed(DEVICES_FILE):
            self.samples = read_devices(self.path)
        if self.tail.read():
            self.lateness_s = compute_lateness_s(self.tail.rows)
        if time.monotonic() >= self._row_due_s or any(e["event"] in ENDS for e in events):
            began_s = time.process_time()
            self._row = read_row(self.path, self.path, time.time(), read_held_locks())
            cost_s = time.process_time() - began_s
            self._row_due_s = time.monotonic() + max(ROW_EVERY_S, cost_s / ROW_SHARE)

    def _is_changed(self, name: str) -> bool:
        try:
            status = os.stat(self.path / name)
        except OSError:
            return False
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        changed = self._versions.get(name) != version
        self._versions[name] = version
        return changed

    def _compose(self) -> WatchedRun:
        events = list(self.events)
        session = last_session_events(events)
        validations = [
            (float(e["step"]), float(e["loss"]))
            for e in events
            if e["event"] == "validated" and is_number(e.get("loss")) and is_number(e.get("step"))
        ][-VALIDATIONS:]
        self.progress.validations = [loss for step, loss in validations if step]
        since_s = max((e["time_s"] for e in session if _is_start(e)), default=0.0)
        phases = read_current_phases(self.path, since_s)
        over = self._row is not None and not self._row.alive
        ranks = collect_rank_states(
            self.tail, self.lateness_s, self.hosts, self.samples, self.progress.plan, session
        )
        left, done = left_texts(self.progress, self.history.points, events, time.time())
        return WatchedRun(
            self.name,
            row=self._row,
            progress=self.progress,
            phases=replace(phases, phases=()) if over else phases,
            points=self.history.points,
            validations=validations,
            ranks=ranks,
            forecast=forecast_texts(self.progress, self.tail.peaks()),
            comment=plan_comment(self.progress.plan, self.progress.mean("step_s")),
            waits=wait_texts(self.progress, ranks),
            left=left,
            done=done,
            events=self.sentences,
        )

    def island(self, state: WatchedRun) -> IslandState | None:
        """Return the run as an island of a larger one; None before its folder exists."""
        if state.row is None:
            return None
        try:
            totals = sum_rounds(self.events)
        except DAMAGED:
            totals = None
        share = totals.exposed_s / totals.seconds if totals and totals.seconds else None
        rounds, discarded = (totals.rounds, totals.discarded) if totals else (0, 0)
        last, row = self.progress.last, state.row
        if last is not None:  # the row is read more rarely
            loss = float(last["loss"]) if is_number(last.get("loss")) else row.loss
            row = replace(row, step=int(last["step"]), loss=loss, rate=self.progress.rate())
        return IslandState(row, rounds, discarded, share)

    def newest_loss(self) -> tuple[float, float | None] | None:
        """Return the newest loss, and the tokens or samples of its step; None without one."""
        last = self.progress.last if self._seen else None
        if last is None or not is_number(last.get("loss")):
            return None
        return float(last["loss"]), step_amount(last, count_unit(self.progress.plan))


def _has_begun(folder: Path) -> bool:
    """Return whether a run has written; a loop of the user's own may have steps and no event."""
    return any((folder / name).exists() for name in BEGINNINGS)


BEGINNINGS = ("events.jsonl", "metrics.jsonl", "ranks.json")
"""Files of which a run that has begun has one."""
ENDS = ("run_started", "run_finished", "worker_died", "hang", "restarting")
"""Events after which the state of a run may be another."""


class IslandsWatcher:
    """Reader of a run folder, and of the islands in it if there are any; like `RunWatcher`."""

    def __init__(self, path: Path) -> None:
        self.path, self.whole = path, RunWatcher(path)
        self.members: dict[str, RunWatcher] = {}

    def read(self) -> WatchedRun:
        """Read what is new, and return the state of the run with its islands."""
        state = self.whole.read()
        for folder in sorted(self.path.glob("island-*/"), key=_island_number):
            if _has_begun(folder) and folder.name not in self.members:
                self.members[folder.name] = RunWatcher(folder)
        if not self.members:
            return state
        watched = {name: (one, one.read()) for name, one in self.members.items()}
        islands = [i for one, found in watched.values() if (i := one.island(found)) is not None]
        first = next(iter(watched.values()))[1]
        ranks = [
            replace(rank, name=f"{name.rpartition('-')[2]}/{rank.name}")
            for name, (_, found) in watched.items()
            for rank in found.ranks
        ]
        events = [
            replace(event, text=f"{name}: {event.text}")
            for name, (_, found) in watched.items()
            for event in found.events
        ]
        merged = sorted([*state.events, *events], key=lambda event: event.time_s)[-EVENTS:]
        return replace(
            first,
            name=self.whole.name,
            message=state.message,
            row=_join_rows(state.row, islands, self.members.values()),
            ranks=ranks,
            events=merged,
            islands=islands,
        )


def _join_rows(
    whole: RunRow | None, islands: Sequence[IslandState], members: Iterable[RunWatcher]
) -> RunRow | None:
    """Return the row of all islands, with the end of the islands if they all ended alike.

    Their launcher may record no end. While they train, the loss and the rate are of their newest
    steps.
    """
    if whole is None or not islands:
        return whole
    rows = [one.row for one in islands]
    if not whole.alive and len({row.state for row in rows}) == 1:
        whole = replace(whole, state=rows[0].state, how=rows[0].how, alive=rows[0].alive)
    if whole.alive and whole.state == "running" and not any(row.alive for row in rows):
        whole = replace(whole, state="starting")  # its launcher starts them again
    losses = [one.newest_loss() for one in members]
    rates = [row.rate for row in rows if row.rate is not None]
    if whole.alive and None not in losses:
        loss = weigh_losses([one for one in losses if one is not None])
        whole = replace(whole, loss=loss, rate=sum(rates) if rates else whole.rate)
    return replace(whole, layout=rows[0].layout)


def _island_number(path: Path) -> tuple[int, str]:
    digits = path.name.rpartition("-")[2]
    return (int(digits) if digits.isdecimal() else 1 << 30, path.name)


def _is_start(event: Record) -> bool:
    starts = event["event"] in ("run_started", "restarting")
    return starts and is_number(event.get("time_s"))


def _event_lines(events: Iterable[Record]) -> list[EventLine]:
    return [line for event in events if (line := _event_line(event)) is not None]


def _event_line(event: Record) -> EventLine | None:
    try:
        dead = event["event"] == "worker_died"
        text = died_text(event) if dead else event_text(event)
    except DAMAGED:
        return None
    if text is None:
        return None
    time_s = float(event["time_s"]) if is_number(event.get("time_s")) else 0.0
    return EventLine(time_s, clean_text(text), STYLES.get(event["event"], ""))
