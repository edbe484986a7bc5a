"""Exit status, lost steps and next command at the end of `shoal train`.

130, 138 and 143 promise that `--resume` continues after the last step that was made. A stop is
therefore checked against the disk: steps that no checkpoint holds make it exit status 1, and are
reported.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record
from shoal.cli.islands import island_folder, island_folders
from shoal.launch import RunOutcome
from shoal.launch.end_report import (
    ONE_THREAD,
    command_line,
    exceeds_report_bytes,
    is_report_due,
)
from shoal.view import RunFolder
from shoal.view.run_folder_reader import last_session_events

UNSAVED_STATUS = 1
LEAD = len("or train longer: ")
"""Most columns in front of a command."""
LAST_STEPS = 50
"""Last lines of metrics.jsonl that are searched for the newest step."""
HEADER_BYTES = 200
"""Size of a rank's log that holds nothing but its first line."""


@dataclass(frozen=True)
class SessionEnding:
    """Steps made and saved by one session of a run.

    Attributes:
        began: whether the session reached its first step.
        made: its last step, 0 if it made none.
        saved: step of the newest checkpoint, or None.
        reason: why the last save failed, if one did.
    """

    folder: Path
    began: bool
    made: int
    saved: int | None
    reason: str = ""

    @staticmethod
    def of(folder: Path) -> SessionEnding:
        """Read the ending of a run folder's last session, or of its last attempt."""
        run = RunFolder(folder)
        events = last_session_events(run.events.read()[0])
        restarts = [i for i, event in enumerate(events) if event["event"] == "restarting"]
        attempt = events[restarts[-1] :] if restarts else events
        steps = [record["step"] for record in run.last_steps(LAST_STEPS)]
        made = max(steps, default=0) if any(map(_is_compute_start, attempt)) else 0
        began = any(map(_is_compute_start, events))
        failed = [str(e.get("reason")) for e in events if e["event"] == "checkpoint_failed"]
        saved = max(run.checkpoints(), default=None)
        return SessionEnding(folder, began, made, saved, failed[-1] if failed else "")

    @property
    def lost(self) -> int:
        """Return the number of steps that were made and that no checkpoint holds."""
        return max(0, self.made - (self.saved or 0))

    def status(self, outcome: RunOutcome) -> int:
        """Return the exit status: the outcome's own; for a stop that lost steps 1."""
        unsaved = self.saved is None or self.lost
        return UNSAVED_STATUS if outcome.status == "stopped" and unsaved else outcome.exit_code

    def error_line(self, outcome: RunOutcome) -> str:
        """Return the line for standard error; empty if nothing went wrong."""
        if outcome.status == "failed":
            return outcome.message
        if outcome.status == "unsaved":
            newest = "there is none" if self.saved is None else f"the newest is step-{self.saved}"
            why = f" ({self.reason})" if self.reason else ""
            return f"{outcome.message}{why}: {newest}, so {self.lost_steps_text()} lost"
        if outcome.status == "stopped" and self.made and self.status(outcome) == UNSAVED_STATUS:
            newest = f"the newest checkpoint is step-{self.saved}"
            held = "nothing was saved" if self.saved is None else newest
            return f"{outcome.message}; {held}: {self.lost_steps_text()} lost"
        # A stop that lost nothing needs no line; else the lost steps follow the signal's name.
        return outcome.message if ";" in outcome.message else ""

    def lost_steps_text(self) -> str:
        """Return the lost steps with their verb, such as "steps 3 – 5 are"."""
        if self.lost == 1:
            return f"step {self.made} is"
        return f"steps {self.made - self.lost + 1} – {self.made} are"

    def next_command_lines(self, outcome: RunOutcome) -> str:
        """Return the run folder and the next command, as lines; an error may name a better one."""
        advice = outcome.message.rpartition("; try: ")[2]
        if outcome.status == "failed" and f"shoal train --resume {self.folder}" in advice:
            return f"run folder: {self.folder}\nnext: {advice}"
        return next_lines(self.folder, self.status(outcome), outcome.status, self.saved)

    def is_empty(self, outcome: RunOutcome) -> bool:
        """Return whether a stop came so early that the folder holds neither steps nor logs."""
        logs = (self.folder / "logs").glob("rank-*.log")
        quiet = all(log.stat().st_size < HEADER_BYTES for log in logs)
        bare = self.saved is None and not (self.folder / "metrics.jsonl").exists()
        return outcome.status == "stopped" and bare and quiet

    def remove_folder(self) -> str:
        """Remove the folder of a run that never made a step; return the last line to print."""
        shutil.rmtree(self.folder)
        return "stopped before the first step: nothing to save, and no run folder is left"


def islands_exit_status(folder: Path, outcomes: Sequence[RunOutcome]) -> tuple[int, str, list[str]]:
    """Return the exit status of a run of islands, checking the folder of each island.

    Returns:
        the exit status, the worst `status` of an outcome, and lines for standard error.
    """
    statuses, bad, lines = [], [], []
    for index, outcome in enumerate(outcomes):
        ending = SessionEnding.of(island_folder(folder, index))
        statuses.append(ending.status(outcome))
        if outcome.status == "failed" or statuses[-1] == UNSAVED_STATUS:
            bad.append(statuses[-1])
        if trouble := ending.error_line(outcome):
            lines.append(f"island {index}: {trouble}")
    found = {outcome.status for outcome in outcomes}
    how = next(one for one in ("failed", "unsaved", "stopped", "finished") if one in found)
    if bad:  # a negative status is a signal
        return (max(bad) if min(bad) > 0 else 1), how, lines
    return max(statuses), how, lines


def _is_compute_start(event: Record) -> bool:
    return event["event"] == "compute_started"


def next_lines(folder: Path, status: int, how: str, saved: int | None) -> str:
    """Return the run folder and the next command, as lines.

    Args:
        how: `status` of an Outcome.
    """
    shown = f"run folder: {folder}\nnext: "
    islands = island_folders(folder)  # all islands hold the same merged weights
    resume = shell_command("shoal", "train", "--resume", str(folder))
    again = shell_command("shoal", "train", str(folder / "run.toml"))
    if status == 0:
        source = str(islands[0] if islands else folder)
        export = shell_command("shoal", "checkpoint", "export", source, f"{folder.name}-exported")
        unit = "epochs" if _trains_epochs(folder) else "steps"
        longer = shell_command("shoal", "train", "--resume", str(folder), f"train.{unit}=N")
        return f"{shown}{export}\nor train longer: {longer}"
    held = saved is not None or bool(islands)
    if how == "unsaved":
        return f"{shown}mend that, then: {resume if held else again}"
    if held:
        return f"{shown}{resume}"
    if how == "stopped":
        return f"{shown}to begin again: {again}"
    return f"{shown}mend the above, then start a new run"


def _trains_epochs(folder: Path) -> bool:
    """Return whether the run's length is given in epochs."""
    try:
        train = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8")).get("train", {})
    except (OSError, ValueError):
        return False
    return isinstance(train, dict) and bool(train.get("epochs"))


def error_text(text: str) -> str:
    """Return an error as lines for standard error, wrapped at blanks on a narrow terminal."""
    text = f"shoal: {text}"
    if sys.stderr.isatty() and "\n" not in text:
        width = shutil.get_terminal_size().columns
        text = "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))
    return text + "\n"


def shell_command(*words: str) -> str:
    """Quote a command for a shell; on a narrow terminal continue it over several lines.

    >>> shell_command("shoal", "train", "--resume", "my runs/a")
    "shoal train --resume 'my runs/a'"
    """
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else sys.maxsize
    lines = [""]
    for word in map(shlex.quote, words):
        room = width if len(lines) > 1 else width - LEAD
        if lines[-1] and len(lines[-1]) + len(word) + 3 > room:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def write_end_report(folder: Path) -> str:
    """Write the report of a run that ends, in its folder; return the line for the user.

    Args:
        folder: of the run, or of a run of islands.

    Returns:
        "report: FILE"; of a huge run the command; of a report that fails the reason; for a run of
        a few steps or seconds "", and if it has islands, whose owners it lists, the command.
    """
    if not is_report_due(folder):
        return command_line(folder) if island_folders(folder) else ""
    if exceeds_report_bytes(folder):
        return command_line(folder)
    os.environ.update(ONE_THREAD)  # nothing else of this process computes from here on
    from shoal.report import report_page

    return report_page.write_end_report(folder)
