"""`shoal diagnose`: print a run's failures, ranks, causes and next commands; no torch."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from shoal.base.errors import ConfigError

RUN = typer.Argument(..., metavar="RUN", help="A run folder, also a copy of one.")
CAUSES = {"communication": "communication", "data": "input"}
"""Kind of advice → kind of the verdict beside which it is printed: they must not contradict."""
AS_JSON = typer.Option(False, "--json", help="One JSON line per finding.")


def diagnose(path: Path = RUN, as_json: bool = AS_JSON) -> None:
    """Tell what went wrong in a run, to whom, why, and what to type next; it reads its folder only.

    Exit status: 0 nothing is wrong, 1 something is or was, 2 no run folder.
    """
    from shoal.view.diagnose import diagnose as look
    from shoal.view.diagnose import findings_text
    from shoal.view.diagnosis.folder_state import read_folder_state
    from shoal.view.diagnosis.run_folders import explain_no_run, is_run_folder

    if not is_run_folder(path) and not (path / "run.toml").exists():
        raise ConfigError(explain_no_run(path))
    wrong = False
    for folder in (path, *sorted(one.parent for one in path.glob("island-*/events.jsonl"))):
        found, state = look(folder), read_folder_state(folder).word
        wrong = wrong or any(not one.advice for one in found)
        if as_json:
            for one in found:
                typer.echo(json.dumps({"run": str(folder), "state": state, **one.record()}))
        else:
            from shoal.report.verdict import find_verdict

            verdict = find_verdict(folder)
            found = [one for one in found if CAUSES.get(one.kind, verdict.kind) == verdict.kind]
            typer.echo(findings_text(folder, found))
            typer.echo(f"verdict: {verdict.line()}")
    if wrong:
        raise typer.Exit(1)
