"""`shoal runs`: list the runs of a folder, with the state of each; no torch.

`shoal islands show`: the members of a run of islands, round by round.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import parse_event

FOLDER = typer.Argument(
    Path("runs"), metavar="[FOLDER|RUN]", help="Holds run folders, or is one; default: runs."
)
ALIVE_ONLY = typer.Option(False, "--alive", help="Only runs that have not ended.")
AS_JSON = typer.Option(False, "--json", help="One JSON document: a list of rows.")


def runs(folder: Path = FOLDER, alive: bool = ALIVE_ONLY, as_json: bool = AS_JSON) -> None:
    """List the runs of a folder: state, step, loss, validation, rate, layout, last sign of life.

    Reads the folders only, also while their runs write. A terminal shows the columns that fit, a
    pipe all of them. Exit status: 0, or 2 without a folder.
    """
    from shoal.view.diagnosis.run_folders import find_named_run
    from shoal.view.run_table import hidden_columns_line, list_runs, table_lines, worst_line

    folder = find_named_run(folder)
    _check_folder(folder)
    now_s = time.time()
    rows = [row for row in list_runs(folder, now_s) if not alive or row.alive]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    elif rows:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        lines = table_lines(rows, width, now_s)
        lines += filter(None, [hidden_columns_line(rows, width, now_s), worst_line(rows)])
        typer.echo("\n".join(lines))
    else:
        typer.echo(f"{folder}: no runs{' that go on' if alive else ''}")


def _check_folder(folder: Path) -> None:
    """Refuse a path that is no folder.

    Raises:
        ConfigError: names what is there instead.
    """
    from shoal.view.diagnosis.run_folders import explain_no_run

    if folder.is_dir():
        return
    if folder == Path("runs") and not folder.exists():
        raise ConfigError(
            f"no folder runs/ in {Path.cwd()}; try: shoal runs FOLDER, or shoal train first"
        )
    raise ConfigError(explain_no_run(folder))


islands_app = typer.Typer(
    help="See the members of a run of islands, make the key of an island, or start a witness.",
    no_args_is_help=True,
)
RUN = typer.Argument(..., metavar="RUN", help="A run folder, or that of one island.")
MEMBERS_JSON = typer.Option(False, "--json", help="One JSON document.")


@islands_app.callback()
def island_options() -> None:
    """See the members of a run of islands, make the key of an island, or start a witness."""


@islands_app.command("show")
def show_islands(run: Path = RUN, as_json: bool = MEMBERS_JSON) -> None:
    """List who merged in each round, with steps and tokens, who joined, who left and why."""
    from shoal.view.members.island_members import (
        collect_members,
        list_missing_rounds,
        member_lines,
    )

    _check_folder(run)
    rounds = collect_members(_read_island_events(run))
    if not rounds:
        raise ConfigError(
            f"{run}: no round of islands has ended there; try: shoal runs, for the folders of runs"
        )
    if as_json:
        missing = list_missing_rounds(rounds)
        typer.echo(json.dumps({"rounds": [one.to_json() for one in rounds], "missing": missing}))
    else:
        typer.echo("\n".join(member_lines(rounds)))


def _read_island_events(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the events of every island whose folder is here, by island."""
    folders = {int(path.name.rpartition("-")[2]): path for path in run.glob("island-[0-9]*")}
    found = {}
    for island, path in sorted((folders or {_island_index(run): run}).items()):
        file = path / "events.jsonl"
        lines = file.read_bytes().splitlines() if file.is_file() else []
        found[island] = [event for line in lines if (event := parse_event(line)) is not None]
    return found


def _island_index(run: Path) -> int:
    """Return the number of an island by its own run folder, 0 if nothing tells it."""
    number = run.name.removeprefix("island-")
    if number.isdecimal():
        return int(number)
    import tomllib

    try:
        kept = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))
        return int(kept.get("islands", {}).get("index", 0))
    except (OSError, ValueError):
        return 0
