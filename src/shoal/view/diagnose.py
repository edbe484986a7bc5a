"""Diagnosis of a run from its folder alone: failures, ranks, causes and next commands.

    events.jsonl         events of the run itself (diagnosis/event_rules.py, death_rules.py)
    the folder's state   the end, if no event describes it (diagnosis/folder_state.py, end_rules.py)
    *error.json          errors of ranks, if no event describes them (diagnosis/error_reports.py)
    metrics.jsonl        figures of its steps: where they wait

Every finding rests on a file. A fault that the run did not notice is not found here; `shoal doctor`
checks the machine. Neither torch nor the run's own modules are loaded.
"""

from __future__ import annotations

import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import DAMAGED, strip_control_characters
from shoal.base.text.units import seconds_text
from shoal.view.diagnosis.continuation import (
    NEXT_RUN,
    Continuation,
    adapt_findings,
    find_continuation,
)
from shoal.view.diagnosis.death_rules import ALLOCATOR, WATCHED
from shoal.view.diagnosis.end_rules import diagnose_damage, diagnose_end
from shoal.view.diagnosis.event_rules import LEFT_ISLAND, LEFT_OUT, LOOKS
from shoal.view.diagnosis.finding import RunFinding
from shoal.view.diagnosis.folder_evidence import (
    FolderEvidence,
    read_event_history,
    read_evidence,
    read_held_locks,
    read_step_rows,
)
from shoal.view.diagnosis.folder_state import decide_state
from shoal.view.script_lines import LOOP_CURE, is_repeated_death, is_user_script, loader_cure

__all__ = (
    "ALLOCATOR",
    "LOOKS",
    "WATCHED",
    "RunFinding",
    "diagnose",
    "findings_text",
    "read_continuation",
)

NOTES = ("resumed", "fragmentation", LEFT_ISLAND)
"""Advice that does not concern speed."""
OTHER_NUMBERS = re.compile(r"(?<!island )(?<!\d)\d+")
"""Numbers in which findings may differ and still be repeats: all but those of an island."""
NEIGHBOURS = 64
"""Events before a death in which the same death of another rank is looked for."""
LEAST_STEPS = 50
"""Steps from which a wait counts as regular."""
MUCH = 0.2
"""Share of a step's time from which a wait is reported."""


def diagnose(folder: Path) -> list[RunFinding]:
    """Return the findings about a run, oldest first; advice comes last."""
    evidence = read_evidence(folder, time.time(), read_held_locks())
    state, is_script = decide_state(evidence), is_user_script(folder)
    found = _merge_repeats(_drop_repeated_errors(_diagnose_events(evidence, is_script)))
    kinds = {one.kind for one in found}
    ends = [one for one in diagnose_end(evidence, state) if not kinds & KNOWN.get(one.kind, set())]
    found += [*ends, *diagnose_damage(evidence, state)]
    found += _find_advice(folder, {one.kind for one in found})
    return adapt_findings(found, evidence, state)


def read_continuation(folder: Path) -> Continuation | None:
    """Return the way on from the end of a run that was not done; None if there is none."""
    evidence = read_evidence(folder, time.time(), read_held_locks())
    return find_continuation(evidence, decide_state(evidence))


KNOWN = {"unsaved": {"stop_requested", "checkpoint_failed"}}
"""State → findings from events that describe it already."""


def _diagnose_events(evidence: FolderEvidence, is_script: bool) -> list[RunFinding]:
    """Return the findings from the events of all sessions."""
    folder, events = evidence.folder, read_event_history(evidence.folder)
    found: list[RunFinding] = []
    for place, event in enumerate(events):
        name = str(event.get("event"))
        if (look := LOOKS.get(name)) is None or is_repeated_death(
            event, events[max(0, place - NEIGHBOURS) : place]
        ):
            continue
        try:
            seen = look(event, events[place + 1 :], folder)
        except DAMAGED:
            seen = RunFinding(name, f"{name}: its line in events.jsonl is damaged", "", "")
        if seen is not None:
            found.append(replace(seen, over=seen.over or (is_script and evidence.met_since(event))))
    return found


def findings_text(folder: Path, found: list[RunFinding]) -> str:
    """Return findings as text for a terminal, each with its evidence and the next command."""
    wrong = [one for one in found if not one.advice]
    wrong.sort(key=lambda one: one.over)  # what the run did not get over first
    # Nobody knows who starts a script again: its launcher or a person.
    how = "; the run went on" if is_user_script(folder) else "; the run went on by itself"
    lines = [strip_control_characters(f"{folder}: no fault")] if not wrong else []
    for number, one in enumerate(wrong, 1):
        lines += _finding_lines(f"{number}. ", one, how)
    for one in found:
        if one.advice:
            lines += _finding_lines("note: " if one.kind in NOTES else "speed: ", one, how)
    return "\n".join(lines)


def _finding_lines(lead: str, one: RunFinding, how: str) -> list[str]:
    over = how if one.over else ""
    lines = [f"{lead}{one.what}{over}"]
    if one.why:
        lines += [f"   why: {one.why}"]
    if one.command:
        lead = "" if one.command.startswith(NEXT_RUN) else "next: "
        lines += [f"   {lead}{one.command}"]
    return [strip_control_characters(line) for line in lines]


def _drop_repeated_errors(found: list[RunFinding]) -> list[RunFinding]:
    """Drop deaths by an error that an earlier finding already reports."""
    said = tuple(one.what for one in found if one.kind == "drift")
    return [one for one in found if one.kind != "worker_died" or not one.what.endswith(said)]


def _merge_repeats(found: Iterable[RunFinding]) -> list[RunFinding]:
    """Merge repeated equal findings into the last one, with their count."""
    kept: dict[tuple[Any, ...], tuple[RunFinding, int]] = {}
    for one in found:
        # Each unreadable sample is a loss of its own.
        what = one.what if one.kind == LEFT_OUT else OTHER_NUMBERS.sub("#", one.what)
        key = (one.kind, str(one.rank), what, one.why)
        before = kept.pop(key, None)
        kept[key] = one, 1 if before is None else before[1] + 1
    return [
        one
        if times == 1
        else RunFinding(**{**asdict(one), "what": f"{one.what} (the last of {times} alike)"})
        for one, times in kept.values()
    ]


# ---- figures of its steps


def _find_advice(folder: Path, kinds: set[str]) -> list[RunFinding]:
    steps = read_step_rows(folder, 10 * LEAST_STEPS)
    if len(steps) < LEAST_STEPS or kinds & {"slow_rank"}:
        return []  # waiting for a slow rank looks like waiting for the network
    step_s, toml = _values(steps, "step_s"), shlex.quote(str(folder / "run.toml"))
    key_name = "" if is_user_script(folder) else " (train.accumulate)"
    asked = {
        "comm_exposed_s": (
            "communication",
            f"ranks wait for sums and gathers longer than these can hide behind computation: more "
            f"samples a step{key_name} or a layout that sends less",
            f"shoal plan {toml} --top 5",
        ),
        "data_wait_s": (
            "data",
            "samples are read between steps, and not while one computes",
            f"shoal train --resume {shlex.quote(str(folder))} data.workers=2",
        ),
    }
    if is_user_script(folder):
        is_loop_timed = bool(_values(steps, "loop_s"))
        kind, why, _ = asked["data_wait_s"]
        if not is_loop_timed:
            why = "samples are read between steps, or the loop's own code runs there"
        asked["data_wait_s"] = kind, why, loader_cure(is_loop_timed=is_loop_timed)
        asked["loop_s"] = "own code", "the loop's own code runs between two steps", LOOP_CURE
    found = []
    for key, (kind, why, command) in asked.items():
        waits = _values(steps, key)
        whole, usual = _share(waits, step_s, sum), _share(waits, step_s, statistics.median)
        if min(whole, usual) > MUCH:  # both: one long wait is no habit
            what = f"{kind} takes {usual:.0%} of a step ({seconds_text(statistics.median(waits))})"
            found.append(RunFinding(kind, what, why, command, advice=True))
    return found


def _share(waits: list[float], step_s: list[float], total: Callable[[list[float]], float]) -> float:
    """Return the share of the waits in the time of the steps, 0.0 without either."""
    whole_s = total(step_s) if step_s else 0.0
    return total(waits) / whole_s if waits and whole_s else 0.0


def _values(steps: list[Record], key: str) -> list[float]:
    return [step[key] for step in steps if is_number(step.get(key))]
