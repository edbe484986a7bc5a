"""Continuation of a run that ended before it was done: what is saved, what is lost, how to go on.

    end       state and step, as `shoal runs` has them
    saved     the newest complete checkpoint, and the steps after it, which are lost
    restart   what the launcher did about the end, if the events record it
    next      the command that goes on, or that starts anew if nothing was saved

`adapt_command` also corrects the commands of findings: no command may be proposed that Shoal would
refuse. A complete run has nothing left to train, a run without a checkpoint cannot be resumed, and
a resume with a key that changes the result needs --force.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.event_sentences import strip_control_characters
from shoal.view.diagnosis.finding import RunFinding
from shoal.view.diagnosis.folder_evidence import FolderEvidence
from shoal.view.diagnosis.folder_state import FolderState
from shoal.view.script_lines import AGAIN, ANEW, is_user_script, script_command

CUT = ("killed", "failed", "hung", "stopped", "abandoned", "unsaved", "diverged")
"""States of a run that ended before it was done."""
NEXT_RUN = "try in the next run: "
FREE_KEYS = ("data.workers",)
"""Proposed keys that do not change the result (config/differences.py)."""
READS = re.compile(r"shoal checkpoint (list|verify) ")
USER_MUST_ACT = ("exit code 2", "exit code 3")
"""Beginnings of a death after which no launcher restarts."""


@dataclass(frozen=True)
class Continuation:
    """The way on from the end of a run that was not done.

    Attributes:
        end: the state, with its step.
        saved_step: step of the newest complete checkpoint; None: nothing was saved.
        saved: folder of that checkpoint; "" for none.
        last_step: the newest step; 0: none.
        restart: what the launcher did; "" unknown.
        command: the next command, or what to do with a script; "" if a finding has to be met first.
    """

    end: str
    saved_step: int | None
    saved: str
    last_step: int
    restart: str
    command: str

    @property
    def lost(self) -> str:
        """Return a sentence on the lost steps.

        >>> Continuation("killed", 64, "step-64", 71, "", "").lost
        'steps 65–71 are lost: 7 steps'
        """
        first, last = (self.saved_step or 0) + 1, self.last_step
        if last < first:
            return "no step is lost"
        if last == first:
            return f"step {last} is lost: 1 step"
        return f"steps {first}–{last} are lost: {last - first + 1} steps"

    def lines(self, cause_command: str = "") -> list[str]:
        """Return lines for a terminal.

        Args:
            cause_command: the command of the fault; one that goes on with a cure stands as the next
                one, any other looks into the cause; "" none.
        """
        is_cure = re.search(r"\bshoal train |^start the script", cause_command) is not None
        saved = "no complete checkpoint is in this folder"
        if self.saved_step is not None:
            saved = f"step {self.saved_step} is the newest complete checkpoint ({self.saved})"
        pairs = (
            ("end", self.end),
            ("saved", f"{saved}; {self.lost}"),
            ("restart", self.restart),
            ("next", cause_command if is_cure else self.command),
            ("cause", "" if is_cure else cause_command),
        )
        return [
            strip_control_characters(f"{name}: {text}").replace("\n", " ")
            for name, text in pairs
            if text
        ]

    def record(self) -> Record:
        """Return the continuation as a JSON object."""
        return {**asdict(self), "lost": self.lost}


def find_continuation(seen: FolderEvidence, state: FolderState) -> Continuation | None:
    """Return the way on from a run's end; None if it runs, is done, or never made a step.

    Args:
        seen: the evidence that led to `state`.
    """
    if state.word not in CUT or state.alive:
        return None
    is_script = is_user_script(seen.folder)
    if is_script and state.word == "stopped" and not state.cause and "closed" in state.how:
        return None  # a loop of one's own that came to its end
    step, saved = _find_saved(seen)
    last_step = max((seen.step, *(one.step for one in seen.islands)))
    of = f" of {state.steps}" if state.steps >= last_step else ""
    where = f" at step {last_step}{of}" if last_step else " before its first step"
    command = "" if state.word == "diverged" else restart_command(seen)
    if is_script:
        command = AGAIN if saved else ANEW
    how = f" ({state.how})" if state.word == "stopped" and state.how else ""
    return Continuation(
        f"{state.word}{where}{how}", step, str(saved or ""), last_step, _restart_text(seen), command
    )


def restart_command(seen: FolderEvidence) -> str:
    """Return the command that goes on, or that starts anew if nothing was saved."""
    whole = _whole_run(seen.folder)
    if is_user_script(seen.folder):
        return f"shoal train --resume {shlex.quote(str(whole))}"  # script_command rewrites it
    return _fill_resume(seen, "", "")


def adapt_command(
    command: str, seen: FolderEvidence, state: FolderState, *, is_over: bool = False
) -> str:
    """Return a finding's command as the run's state allows it; "" if Shoal would refuse it.

    Args:
        is_over: the run went on by itself, so keys that change its numbers are for the next run.
    """
    if READS.match(command) and _find_saved(seen)[0] is None:
        return ""
    if is_user_script(seen.folder):
        command = script_command(command)
        return ANEW if command == AGAIN and _find_saved(seen)[0] is None else command
    found = _parse_resume(command)
    if found is None:
        return command
    setting, keys = found
    if state.word == "ended" or (is_over and _changes_result(keys)):
        words = f"{setting}{keys}".strip()
        return f"{NEXT_RUN}{words}" if words else ""
    resumed = _fill_resume(seen, setting, keys)
    return f"once it has stopped: {resumed}" if state.alive else resumed


def adapt_findings(
    found: list[RunFinding], seen: FolderEvidence, state: FolderState
) -> list[RunFinding]:
    """Return the findings with commands that the run's state allows."""
    return [
        replace(one, command=adapt_command(one.command, seen, state, is_over=one.over))
        for one in found
    ]


def _parse_resume(command: str) -> tuple[str, str] | None:
    """Return the setting before a resume, and the keys behind it; None for another command.

    >>> _parse_resume("A=1 shoal train --resume 'my run' data.workers=2")
    ('A=1 ', ' data.workers=2')
    """
    setting, found, rest = command.partition("shoal train --resume ")
    if not found or (setting and not re.fullmatch(r"[A-Z_]+=\S+ ", setting)):
        return None
    try:
        _, *keys = shlex.split(rest)
    except ValueError:
        return None
    return setting, "".join(f" {key}" for key in keys)


def _fill_resume(seen: FolderEvidence, setting: str, keys: str) -> str:
    """Return the command that goes on with a run, or starts it anew, with a setting and keys."""
    whole = _whole_run(seen.folder)
    held = whole != seen.folder or _find_saved(seen)[0] is not None
    if not held:
        return f"{setting}shoal train {shlex.quote(f'{whole}/run.toml')}{keys}"
    force = " --force" if _changes_result(keys) else ""
    return f"{setting}shoal train --resume {shlex.quote(str(whole))}{force}{keys}"


def _changes_result(keys: str) -> bool:
    """Return whether a resume with these keys needs `--force`."""
    return any(key.partition("=")[0] not in FREE_KEYS for key in keys.split())


def _whole_run(folder: Path) -> Path:
    """Return the run that an island's folder belongs to, or the folder itself."""
    is_island = re.fullmatch(r"island-\d+", folder.name) is not None
    return folder.parent if is_island and (folder.parent / "run.toml").is_file() else folder


def _find_saved(seen: FolderEvidence) -> tuple[int | None, Path | None]:
    """Return step and folder of the newest complete checkpoint; with islands, a common one."""
    holders = [seen.folder]
    steps = list_saved_steps(seen.folder)
    if not steps and seen.islands:
        each = {one.folder: set(list_saved_steps(one.folder)) for one in seen.islands}
        common = set.intersection(*each.values()) or set.union(*each.values())
        steps = sorted(common)
        holders = [folder for folder, held in each.items() if steps and steps[-1] in held]
    if not steps:
        return None, None
    return steps[-1], holders[0] / "checkpoints" / f"step-{steps[-1]}"


def _restart_text(seen: FolderEvidence) -> str:
    """Return what the launcher did about the end, from the events of the last session."""
    restarts = [one for one in seen.events if one["event"] == "restarting"]
    died = seen.last("worker_died")
    if died is None and not restarts:
        return ""
    if is_user_script(seen.folder):
        return ""  # nobody knows who starts a script again
    times = (
        f"{len(restarts)} of {restarts[-1].get('of', '?')} restarts were made" if restarts else ""
    )
    if died is None or died.get("fatal") is not True:
        return times
    if times:
        return f"{times}, then the launcher gave up"
    how = str(died.get("how") or "")
    if how.startswith(USER_MUST_ACT):
        return f"none: after {how[:11]} a restart would end the same way"
    if _allowed_restarts(seen.folder) == 0:
        return "none: launch.restarts = 0"
    return "none: the launcher gave up after this death"


def _allowed_restarts(folder: Path) -> object:
    """Return launch.restarts of run.toml; None if it cannot be read."""
    path = folder / "run.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return None
    launch = table.get("launch")
    return launch.get("restarts") if isinstance(launch, dict) else None
