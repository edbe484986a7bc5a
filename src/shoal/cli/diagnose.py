"""`shoal diagnose`: print a run's failures, ranks, causes and next commands; no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError

if TYPE_CHECKING:
    from shoal.report.verdict import Verdict
    from shoal.view.diagnose import RunFinding

RUN = typer.Argument(..., metavar="RUN", help="A run folder, also a copy of one.")
CAUSES = {"communication": "communication", "data": "input"}
"""Kind of advice → kind of the verdict beside which it is printed: they must not contradict."""
PARTS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer update",
    "hooks": "callbacks",
}
"""Part of a step in an event → its name in a verdict, if another one."""
AS_JSON = typer.Option(False, "--json", help="One JSON line per finding.")


def diagnose(path: Path = RUN, as_json: bool = AS_JSON) -> None:
    """Tell what went wrong in a run, to whom, why, and what to type next; it reads its folder only.

    Of a run that ended before it was done: the newest complete checkpoint, the lost steps, and the
    command that goes on. Advice on speed ("faster:") is no fault.

    Exit status: 0 nothing is wrong, 1 something is or was, 2 no run folder.
    """
    from shoal.view.diagnose import diagnose as look
    from shoal.view.diagnose import read_continuation
    from shoal.view.diagnosis.folder_state import read_folder_state
    from shoal.view.diagnosis.run_folders import explain_no_run, is_run_folder

    if not is_run_folder(path) and not (path / "run.toml").exists():
        raise ConfigError(explain_no_run(path))
    islands = sorted(one.parent for one in path.glob("island-*/events.jsonl"))
    each = [(folder, look(folder)) for folder in (path, *islands)]
    faults = [one for _, found in each for one in found if not one.advice]
    onward = read_continuation(path)
    if as_json:
        for folder, found in each:
            facts = {"run": str(folder), "state": read_folder_state(folder).word}
            goes_on = {"continuation": onward.record() if onward else None}
            for one in found:
                typer.echo(json.dumps({**facts, **one.record(), **goes_on}))
    else:
        for folder, found in each:
            if islands and folder == path and not found:
                continue  # its islands have the steps
            _print_findings(folder, found, is_one_of_many=bool(islands), has_end=onward is not None)
        if onward is not None:
            lasting = next((one.command for one in faults if not one.over and one.command), "")
            typer.echo("\n".join(onward.lines(lasting)))
    if faults:
        raise typer.Exit(1)


def _print_findings(
    folder: Path, found: list[RunFinding], *, is_one_of_many: bool, has_end: bool
) -> None:
    """Print the findings about one folder, then its verdict unless a finding says the same.

    Args:
        has_end: the command of the first lasting fault is printed with the run's end.
    """
    from shoal.base.text.event_sentences import strip_control_characters
    from shoal.report.verdict import find_verdict
    from shoal.view.diagnose import findings_text
    from shoal.view.diagnosis.folder_state import read_folder_state

    verdict = find_verdict(folder)
    shown = [
        _omit_figures(one, verdict)
        for one in found
        if CAUSES.get(one.kind, verdict.kind) == verdict.kind
    ]
    if has_end:
        first = next((one for one in shown if not (one.advice or one.over) and one.command), None)
        shown = [replace(one, command="") if one is first else one for one in shown]
    if is_one_of_many and any(not one.advice for one in shown):
        typer.echo(strip_control_characters(f"{folder}:"))
    typer.echo(findings_text(folder, shown))
    names = {strip_control_characters(one.what) for one in found}
    if verdict.kind == "fault" and verdict.cause in names:
        return
    line = verdict.line()
    if verdict.kind != "fault" and read_folder_state(folder).word == "ended":
        line = line.replace("; try: ", "; try in the next run: ")
    typer.echo(f"verdict: {line}")


def _omit_figures(one: RunFinding, verdict: Verdict) -> RunFinding:
    """Return a slow rank without its figures and command if the verdict has those of that part.

    Both measure the same part over other steps: two numbers for one fact confuse.
    """
    what, _, _ = one.what.partition(": ")
    rank, _, part = what.partition(" is slow in ")
    cause = f"rank {one.rank}'s {PARTS.get(part, part)}"
    if one.kind != "slow_rank" or verdict.kind != "slow_rank" or verdict.cause != cause:
        return one
    return replace(one, what=f"{rank} is slow in {part}; the others wait for it", command="")
