"""Starts and restarts of a run, from its events."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.runlog.damaged_lines import Record, is_number


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
