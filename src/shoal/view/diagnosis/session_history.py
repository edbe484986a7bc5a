"""Sessions of a run: from which step to which each one trained, and how it ended.

run_started, restarting     a session begins
compute_started, resumed    its first step
run_finished, worker_died   its last step, and how it ended
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import signal_text, strip_control_characters

STARTS = ("run_started", "restarting")
SHOWN_SESSIONS = 4
"""Newest sessions of a run that are listed."""
LARGEST_STEP = 1 << 62


def session_lines(events: Sequence[Record], newest_step: int) -> list[str]:
    """Return a line for each of the newest sessions; [] if the run has one session.

    Args:
        events: of the run, oldest first.
        newest_step: the run's newest step, for a session that records no end.
    """
    sessions = _split_sessions(events)
    if len(sessions) < 2:
        return []
    firsts = [_first_step(session) for session in sessions]
    lines = []
    for place, session in enumerate(sessions):
        is_newest = place + 1 == len(sessions)
        last = _last_step(session, firsts[place], newest_step if is_newest else 0)
        made = last - firsts[place]
        steps = f"steps {firsts[place] + 1}–{last}" if made > 1 else f"step {last}"
        whence = f", resumed from step {firsts[place]}" if firsts[place] else ""
        if whence and place and _finished_step(sessions[place - 1]) == firsts[place]:
            whence += ", no step lost"
        text = f"{steps if made > 0 else 'no step'}{whence}; {_end_text(session, is_newest)}"
        lines.append(strip_control_characters(f"session {place + 1}: {text}"))
    return lines[-SHOWN_SESSIONS:]


def _split_sessions(events: Sequence[Record]) -> list[list[Record]]:
    """Return the events of each session in which the ranks came as far as their first step."""
    groups: list[list[Record]] = []
    for event in events:
        if event.get("event") in STARTS or not groups:
            groups.append([])
        groups[-1].append(event)
    return [one for one in groups if any(e.get("event") == "compute_started" for e in one)]


def _step(event: Record) -> int:
    step = event.get("step")
    return int(step) if is_number(step) and abs(step) < LARGEST_STEP else 0


def _first_step(session: Sequence[Record]) -> int:
    begins = [one for one in session if one.get("event") in ("compute_started", "resumed")]
    return max(map(_step, begins), default=0)


def _last_step(session: Sequence[Record], first: int, newest_step: int) -> int:
    return max(first, newest_step, *map(_step, session))


def _finished_step(session: Sequence[Record]) -> int | None:
    """Return the last step of a session that ended in order, as its end recorded it."""
    ends = [one for one in session if one.get("event") == "run_finished" and "step" in one]
    return _step(ends[-1]) if ends else None


def _end_text(session: Sequence[Record], is_newest: bool) -> str:
    """Return how a session ended, by whom if a signal asked for it."""
    for event in reversed(session):
        if event.get("event") == "run_finished":
            how = str(event.get("how") or "completed")
            stops = [one for one in session if one.get("event") == "stop_requested"]
            by = f" by {signal_text(str(stops[-1].get('signal', 'a signal')))}" if stops else ""
            return f"{how}{by}"
        if event.get("event") == "worker_died":
            return f"rank {event.get('rank')} {event.get('how') or 'ended'}"
    return "no end recorded yet" if is_newest else "no end recorded"
