"""Starts of a run from its events, and how an ended run goes on from its newest checkpoint."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.report.run_contents import RunContents
from shoal.view.script_lines import is_user_script

RESUMABLE = ("killed", "failed", "stopped", "abandoned", "unsaved")
"""States of a run that no process holds, and that a checkpoint continues."""


@dataclass(frozen=True)
class RunStart:
    """One start of all ranks.

    Attributes:
        time_s: seconds since 1970; None if its event has no time.
        step: of the checkpoint that it resumed from; None: from the beginning.
    """

    time_s: float | None
    step: int | None = None


def list_starts(events: list[Record]) -> list[RunStart]:
    """Return the starts and restarts of a run, oldest first.

    >>> names = [("run_started", None), ("resumed", 6), ("restarting", None), ("resumed", 9)]
    >>> events = [{"event": name, "step": step, "time_s": 1.0} for name, step in names]
    >>> [start.step for start in list_starts(events)]
    [6, 9]
    """
    found: list[RunStart] = []
    for event in events:
        time_s, step = event.get("time_s"), event.get("step")
        known_s = float(time_s) if is_number(time_s) else None
        if event["event"] in ("run_started", "restarting"):
            found.append(RunStart(known_s))
        elif event["event"] == "resumed" and is_number(step) and abs(step) < 1 << 53:
            before_s = found.pop().time_s if found and found[-1].step is None else known_s
            found.append(RunStart(before_s, int(step)))
    return found


@dataclass(frozen=True)
class RunContinuation:
    """Checkpoint and command with which a run goes on that ended before its last step.

    Attributes:
        saved: step of the newest checkpoint; None: none is on disk.
        lost_steps: steps after it, which are made again.
        command: of the next session.
    """

    saved: int | None
    lost_steps: int
    command: str


def find_continuation(run: RunContents, state: str) -> RunContinuation | None:
    """Return how a run goes on; None if it is done, runs, or cannot be continued.

    Args:
        run: its folder's contents.
        state: as `shoal runs` has it.
    """
    steps, of = run.metrics.steps, run.plan.get("steps")
    last = steps[-1] if steps else 0
    if state not in RESUMABLE or (is_number(of) and of and last >= of):
        return None
    saved = run.saved[-1] if run.saved else None
    folder = shlex.quote(str(run.folder))
    resume = f"shoal train --resume {folder}"
    if saved is None and not is_user_script(run.folder):
        resume = f"shoal train {shlex.quote(str(run.folder / 'run.toml'))}"
    return RunContinuation(saved, max(0, last - (saved or 0)), resume)
