"""Findings from the state of a folder: the ends that no event of the run describes."""

from __future__ import annotations

import shlex

from shoal.base.text.units import seconds_text
from shoal.view.diagnosis.continuation import restart_command
from shoal.view.diagnosis.death_rules import diagnose_death
from shoal.view.diagnosis.finding import RunFinding
from shoal.view.diagnosis.folder_evidence import FolderEvidence
from shoal.view.diagnosis.folder_state import FolderState
from shoal.view.script_lines import is_user_script


def diagnose_end(seen: FolderEvidence, state: FolderState) -> list[RunFinding]:
    """Return the findings about an end without an event.

    Args:
        seen: the evidence that led to `state`.
    """
    if state.cause == "error_report":
        return _diagnose_reports(seen)
    if state.cause == "gone":
        return [_diagnose_launcher_death(seen)]
    if state.cause in ENDS:
        is_script = state.cause == "unstarted" and not (seen.folder / "run.toml").exists()
        texts = UNSTARTED_SCRIPT if is_script else ENDS[state.cause]
        names = _texts(seen, state)
        what, why, command = (text.format(**names) for text in texts)
        return [RunFinding(state.word, what, why, command, step=seen.step or None)]
    return []


def diagnose_damage(seen: FolderEvidence, state: FolderState) -> list[RunFinding]:
    """Return a finding per unreadable file that `state` does not name."""
    why = "a disk, an editor or a copy damaged it; the findings lack what stood in it"
    command = f"ls -l {shlex.quote(str(seen.folder))}"
    named = state.how if state.cause == "damaged" else ""
    others = [damage for damage in seen.damages if damage != named]
    return [RunFinding("damaged", damage, why, command) for damage in others]


ENDS: dict[str, tuple[str, str, str]] = {
    "elsewhere": (
        "no end is recorded at {where}, and nothing was written for {age}",
        "the folder is of {host}, and this machine cannot ask whether its processes live",
        "shoal runs {above}, on that machine",
    ),
    "no_end": (
        "no end is recorded at {where}: the run was abandoned",
        "no process holds the folder, and neither its end nor a death stands in events.jsonl",
        "{again}",
    ),
    "no_end_here": (
        "no end is recorded here at {where}: a rank of another machine ended, or the network did",
        "the run was on {hosts}, and this folder has neither a death nor the end of run.close()",
        "shoal diagnose {run}, on the other machines",
    ),
    "damaged": (
        "the events of the run cannot be read: {how}",
        "without them nobody knows how the run ended",
        "ls -l {run}",
    ),
    "unstarted": (
        "the folder was made, and no run ever started there",
        "it has neither events nor steps",
        "shoal train {run}/run.toml",
    ),
    "silent": (
        "nothing was written for {age}, and {who}",
        "a run writes at each step, and between steps the phase that it is in",
        "tail -n 50 {run}/logs/*",
    ),
    "unsaved": (
        "{how}",
        "the disk, or the file system, refused the last checkpoint",
        "df -h {run}",
    ),
    "unsaved_stop": (
        "{how}: no checkpoint was written after it",
        "the run ended before it could save",
        "shoal checkpoint list {run}",
    ),
}
"""Cause of a state → the failure, the evidence, the next command."""
UNSTARTED_SCRIPT = (
    ENDS["unstarted"][0],
    "it has neither run.toml nor steps; a script that ends in shoal.parallelize prints the reason",
    "start the script again",
)


def _texts(seen: FolderEvidence, state: FolderState) -> dict[str, str]:
    of = f"step {state.step} of {state.steps}" if state.steps else f"step {state.step}"
    holder = "a process of this machine holds the folder"
    return {
        "where": of,
        "age": seconds_text(max(0.0, seen.age_s)),
        "host": seen.owner.host if seen.owner else "another machine",
        "hosts": ", ".join(seen.hosts),
        "how": state.how,
        "run": shlex.quote(str(seen.folder)),
        "again": restart_command(seen),
        "above": shlex.quote(str(seen.folder.parent)),
        "who": holder if seen.held else "its processes are of another machine",
    }


def _diagnose_reports(seen: FolderEvidence) -> list[RunFinding]:
    """Diagnose error reports, without those of ranks that only lost the one that failed."""
    causes = [event for event in seen.reports if not event["lost_peer"]] or seen.reports
    found: dict[str, RunFinding] = {}
    for event in causes:
        one = diagnose_death(event, [], seen.folder)
        if one is not None:
            found.setdefault(event["traceback"].rstrip().rpartition("\n")[2], one)
    return list(found.values())


def _diagnose_launcher_death(seen: FolderEvidence) -> RunFinding:
    """Diagnose a run whose owner is gone without an event: it was killed with its launcher."""
    who, whose = "its launcher", "a launcher"
    if is_user_script(seen.folder):
        who = "its process on this machine" if len(seen.hosts) > 1 else "its first process"
        whose = "a script"
    owner = seen.owner.text() if seen.owner else ""
    return RunFinding(
        "killed",
        f"the run ended without a word: {who} ({owner}) was killed, or the machine went down",
        f"{whose} takes owner.json away as it ends, and this one is still there",
        restart_command(seen),
    )
