"""`shoal runs`: list the runs of a folder, with the state of each; no torch."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import typer

from shoal.base.errors import ConfigError

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
