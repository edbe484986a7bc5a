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
import time
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.event_sentences import signal_text, strip_control_characters
from shoal.view.diagnosis.finding import death_line
from shoal.view.diagnosis.folder_evidence import FolderEvidence, read_evidence, read_held_locks
from shoal.view.progress import no_steps_text
from shoal.view.script_lines import has_restarted, is_user_script

ABANDONED_S = 86_400.0
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
        cause: the key of `end_rules.ENDS`, "gone", or "error_report", if no event describes the
            end; else "".
    """

    word: str
    how: str = ""
    step: int = 0
    steps: int = 0
    last_sign_s: float = 0.0
    alive: bool = False
    cause: str = ""


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
    has_ended = not state.alive and _read_end(seen) is not None
    if not seen.islands or state.word == "damaged" or has_ended:
        return state
    each = [_decide_alone(one) for one in seen.islands]
    worst = min(each, key=lambda one: WRONG.index(one.word) if one.word in WRONG else len(WRONG))
    if seen.held and not worst.alive:
        worst = next((one for one in each if one.alive), state)
    place = next((k for k, one in enumerate(each) if one is worst), None)
    name = "" if place is None else f"{seen.islands[place].folder.name}: "
    how = strip_control_characters(f"{name}{worst.how}") if worst.how else ""
    return replace(
        worst,
        how=how,
        step=min(one.step for one in each),
        steps=max(one.steps for one in each),
        last_sign_s=max(seen.last_s, *(one.last_sign_s for one in each)),
        cause="",
    )


def _decide_alone(seen: FolderEvidence) -> FolderState:
    alive = _may_live(seen)
    word, how, cause = _decide_living(seen) if alive else _decide_ended(seen)
    how = strip_control_characters(how)
    return FolderState(word, how, seen.step, seen.planned, seen.last_s, alive, cause)


def _may_live(seen: FolderEvidence) -> bool:
    """Return whether a process holds the folder, or may do so on another machine."""
    if seen.held or seen.owner is None or seen.owner.is_here:
        return seen.held
    end = _read_end(seen)
    return seen.age_s < ABANDONED_S and (end is None or end[0] == "hung")


Decision = tuple[str, str, str]
"""(word, how, cause) of a state."""


def _decide_living(seen: FolderEvidence) -> Decision:
    hung = seen.last("hang")
    if hung and not seen.stepped_since("hang") and not seen.met_since(hung):
        return "hung", "", ""
    if seen.silent:
        return "silent", seen.damage, "silent"
    is_training = seen.begun and not seen.is_restarting
    return ("running" if is_training else "starting"), seen.damage, ""


def _decide_ended(seen: FolderEvidence) -> Decision:
    if (found := _read_end(seen)) is not None:
        return (*found, found[0] if found[0] == "unsaved" else "")
    if seen.reports:
        return (*describe_death(seen.reports[0], made_steps=seen.begun), "error_report")
    if seen.owner is not None and seen.owner.has_ended:
        return "killed", "no end recorded", "gone"
    if seen.owner is not None and seen.owner.is_here:
        return "abandoned", "a copy: its process works in another folder", ""
    if seen.owner is not None:
        return "abandoned", f"of {seen.owner.host}, no sign for a day", "elsewhere"
    return _describe_no_end(seen)


def _read_end(seen: FolderEvidence) -> tuple[str, str] | None:
    """Return the state that the session's last word shows; None without one."""
    for place in range(len(seen.events) - 1, -1, -1):
        event = seen.events[place]
        name, after = event["event"], seen.events[place + 1 :]
        if name not in ENDINGS:
            continue
        if name == "run_finished":
            state, how = _describe_finish(str(event.get("how", "completed")))
            is_idle = event.get("steps_here") == 0 and 0 < seen.planned <= seen.step
            return state, f"{how}; {no_steps_text(seen.step, seen.planned)}" if is_idle else how
        if has_restarted(after, seen.folder) or seen.met_since(event):
            return None
        if name == "worker_died":
            return describe_death(event, made_steps=seen.begun)
        if not seen.stepped_since(name):
            return ("hung", "a hang") if name == "hang" else ("failed", "ranks made unlike calls")
    return None


def _describe_finish(how: str) -> tuple[str, str]:
    if re.search(r"could not be written|save failed", how):
        return "unsaved", how
    return ("ended" if how.startswith("completed") else "stopped"), how


def describe_death(event: Record, *, made_steps: bool) -> tuple[str, str]:
    """Return the state that a death leaves, and its line.

    >>> describe_death({"rank": 0, "pid": 7, "how": "exit code 2"}, made_steps=False)
    ('refused', 'rank 0 (pid 7): exit code 2')
    """
    how, words = str(event.get("how", "ended")), death_line(event)
    if how.startswith("ended by the watch"):
        return "hung", words
    if "SIG" in how or how.startswith(("killed", "ended")):
        return "killed", words
    if how.startswith("exit code 2") and not made_steps:
        return "refused", words
    if how.startswith("exit code 3"):
        return "diverged", words
    return "failed", words


def _describe_no_end(seen: FolderEvidence) -> Decision:
    """Return the state of a folder that nobody holds and that records no end."""
    if seen.damage.startswith("events.jsonl") and not seen.events:
        return "damaged", seen.damage, "damaged"
    if (stop := seen.last("stop_requested")) is not None and not seen.met_since(stop):
        how = f"by {signal_text(str(stop.get('signal', 'a signal')))}; no end recorded"
        after = seen.events[seen.events.index(stop) :]
        saved = any(one["event"] == "checkpoint_saved" for one in after) or not seen.begun
        return ("stopped", how, "") if saved else ("unsaved", how, "unsaved_stop")
    if not seen.events and not seen.steps:
        return "unstarted", "no run ever started there", "unstarted"
    where = f"step {seen.step} of {seen.planned}" if seen.planned else f"step {seen.step}"
    if seen.planned and seen.step >= seen.planned:
        return "ended", f"{where}; no end recorded", ""
    if is_user_script(seen.folder):
        return _describe_script_end(seen)
    if not seen.events:
        return "damaged", "events.jsonl: is missing or empty", "damaged"
    if seen.torn or seen.damage:
        return "damaged", seen.damage or "events.jsonl: its last lines cannot be read", "damaged"
    if not seen.planned:
        return "stopped", "no end recorded", ""
    return "abandoned", f"no end recorded at {where}", "no_end"


def _describe_script_end(seen: FolderEvidence) -> Decision:
    """Return the state of an own loop: `run.close` emits `memory_peaks`, and nothing else."""
    peaks = seen.last("memory_peaks")
    if not seen.ranks_s or (peaks and not seen.met_since(peaks)):
        return "ended", "closed by its script", ""
    if len(seen.hosts) > 1:
        return "abandoned", "no end recorded here", "no_end_here"
    return "stopped", "its script left without run.close()", ""
