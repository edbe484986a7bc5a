"""`shoal runs`: list the runs of a folder, with the state of each; no torch."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import typer

from shoal.base.errors import ConfigError

FOLDER = typer.Argument(Path("runs"), metavar="[FOLDER]", help="Holds run folders; default: runs.")
ALIVE_ONLY = typer.Option(False, "--alive", help="Only runs that have not ended.")
AS_JSON = typer.Option(False, "--json", help="One JSON document: a list of rows.")


def runs(folder: Path = FOLDER, alive: bool = ALIVE_ONLY, as_json: bool = AS_JSON) -> None:
    """List the runs of a folder: state, step, loss, validation, rate, layout, last sign of life.

    Reads the folders only, also while their runs write. Exit status: 0, or 2 without a folder.
    """
    from shoal.view.run_table import ALIVE, list_runs, table_lines

    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; try: shoal runs FOLDER, or shoal train first")
    now_s = time.time()
    rows = [row for row in list_runs(folder, now_s) if not alive or row.state in ALIVE]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    elif rows:
        typer.echo("\n".join(table_lines(rows, shutil.get_terminal_size().columns, now_s)))
    else:
        typer.echo(f"{folder}: no runs{' that go on' if alive else ''}")
