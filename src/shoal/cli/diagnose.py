"""`shoal diagnose`: print a run's failures, ranks, causes and next commands; no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.base.errors import ConfigError

if TYPE_CHECKING:
    from shoal.report.verdict import Verdict
    from shoal.view.diagnose import RunFinding

RUN = typer.Argument(..., metavar="RUN", help="A run folder, also a copy, or a name in runs/.")
CAUSES = {"communication": "communication", "data": "input"}
"""Kind of advice → kind of the verdict beside which it is printed: they must not contradict."""
PARTS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer update",
    "hooks": "callbacks",
}
"""Part of a step in an event → its name in a verdict, if another one."""
AS_JSON = typer.Option(
    False, "--json", help="One JSON line per finding, and one for the verdict (kind: verdict)."
)


@dataclass(frozen=True)
class FolderDiagnosis:
    """Diagnosis of one run folder, as text and JSON print it.

    Attributes:
        state: as in `shoal runs`.
        found: the findings that are printed.
        verdict: None if a finding says the same.
        goodput: a sentence; "" if unknown.
        sessions: a line each; () of a run with one session.
    """

    folder: Path
    state: str
    found: tuple[RunFinding, ...]
    verdict: Verdict | None
    goodput: str
    sessions: tuple[str, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return the findings and the verdict as JSON objects with the same keys."""
        run = {"run": str(self.folder), "state": self.state}
        found = [{**run, **one.record()} for one in self.found]
        if (verdict := self.verdict) is None:
            return found
        record = {
            **run,
            "kind": "verdict",
            "what": self.verdict_line(),
            "why": " ".join(verdict.evidence),
            "command": verdict.command,
            "rank": None,
            "step": None,
            "over": False,
            "advice": True,
            "verdict_kind": verdict.kind,
            "cause": verdict.cause,
            "share": verdict.share,
            "step_s": verdict.step_s,
            "without_s": verdict.without_s,
            "parts_s": verdict.parts_s,
            "goodput": self.goodput,
            "sessions": list(self.sessions),
        }
        return [*found, record]

    def verdict_line(self) -> str:
        """Return the verdict; for a completed run also the remedy for the next one."""
        if self.verdict is None:
            return ""
        line = self.verdict.line()
        if self.verdict.kind != "fault" and self.state == "ended":
            line = line.replace("; try: ", "; try in the next run: ")
        return line

    def lines(self, *, is_one_of_many: bool, has_end: bool) -> list[str]:
        """Return the lines for a terminal.

        Args:
            is_one_of_many: other folders are printed too.
            has_end: the command of the first lasting fault is printed with the run's end.
        """
        from shoal.base.text.event_sentences import strip_control_characters
        from shoal.view.diagnose import findings_text

        shown = list(self.found)
        if has_end:
            lasting = (one for one in shown if not (one.advice or one.over) and one.command)
            first = next(lasting, None)
            shown = [replace(one, command="") if one is first else one for one in shown]
        lines = []
        if is_one_of_many and any(not one.advice for one in shown):
            lines.append(strip_control_characters(f"{self.folder}:"))
        lines.append(findings_text(self.folder, shown))
        if self.verdict is not None:
            lines.append(f"verdict: {self.verdict_line()}")
            if self.verdict.evidence:
                lines.append(f"   why: {' '.join(self.verdict.evidence)}")
            if self.verdict.parts_s and self.verdict.kind != "nothing":
                from shoal.report.verdict.forecast_gap import parts_text

                lines.append(f"   a step, mean of ranks: {parts_text(self.verdict.parts_s)}")
        if self.goodput:
            lines.append(f"goodput: {self.goodput}")
        return [*lines, *self.sessions]


def diagnose(path: Path = RUN, as_json: bool = AS_JSON) -> None:
    """Tell what went wrong in a run, to whom, why, and what to type next; it reads its folder only.

    Of a run that ended before it was done: the newest complete checkpoint, the lost steps, and the
    command that goes on. Advice on speed ("speed:") is no fault, and neither is the verdict.

    Exit status: 0 no fault, 1 there is or was one, 2 no run folder.
    """
    from shoal.view.diagnose import read_continuation
    from shoal.view.diagnosis.run_folders import explain_no_run, find_named_run, is_listed_run

    path = find_named_run(path)
    if not is_listed_run(path):
        raise ConfigError(explain_no_run(path))
    islands = sorted(one.parent for one in path.glob("island-*/events.jsonl"))
    each = [diagnose_folder(folder) for folder in (path, *islands)]
    if islands and not each[0].found:
        each = each[1:]  # its islands have the steps
    faults = [one for folder in each for one in folder.found if not one.advice]
    onward = read_continuation(path)
    if as_json:
        goes_on = {"continuation": onward.record() if onward else None}
        for record in (one for folder in each for one in folder.records()):
            typer.echo(json.dumps({**record, **goes_on}))
    else:
        for folder in each:
            lines = folder.lines(is_one_of_many=bool(islands), has_end=onward is not None)
            typer.echo("\n".join(lines))
        if onward is not None:
            lasting = next((one.command for one in faults if not one.over and one.command), "")
            typer.echo("\n".join(onward.lines(lasting)))
    if faults:
        raise typer.Exit(1)


def diagnose_folder(folder: Path) -> FolderDiagnosis:
    """Return the diagnosis of one folder: what its text and its JSON have in common."""
    from shoal.base.text.event_sentences import strip_control_characters
    from shoal.report.goodput import compute_goodput
    from shoal.report.verdict import find_verdict
    from shoal.view.diagnose import diagnose as find_all
    from shoal.view.diagnosis.folder_evidence import read_event_history
    from shoal.view.diagnosis.folder_state import read_folder_state
    from shoal.view.diagnosis.session_history import session_lines

    found, verdict, state = find_all(folder), find_verdict(folder), read_folder_state(folder)
    shown = tuple(
        _omit_figures(one, verdict)
        for one in found
        if CAUSES.get(one.kind, verdict.kind) == verdict.kind
    )
    names = {strip_control_characters(one.what) for one in found}
    is_known = verdict.kind == "fault" and verdict.cause in names
    return FolderDiagnosis(
        folder,
        state.word,
        shown,
        None if is_known else verdict,
        compute_goodput(folder).text(),
        tuple(session_lines(read_event_history(folder), state.step)),
    )


def _omit_figures(one: RunFinding, verdict: Verdict) -> RunFinding:
    """Return a slow rank without what the verdict says of that part: figures, cause, command.

    Both measure the same part over other steps: two numbers for one fact confuse.
    """
    what, _, _ = one.what.partition(": ")
    rank, _, part = what.partition(" is slow in ")
    cause = f"rank {one.rank}'s {PARTS.get(part, part)}"
    if one.kind != "slow_rank" or verdict.kind != "slow_rank" or verdict.cause != cause:
        return one
    return replace(
        one, what=f"{rank} is slow in {part}; the others wait for it", why="", command=""
    )
