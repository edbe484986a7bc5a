"""`shoal watch`: a run on the terminal, live or copied, from its folder alone; no torch."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError
from shoal.base.runlog.damaged_lines import replace_non_finite
from shoal.base.text.terminal_encoding import READABLE

if TYPE_CHECKING:
    from shoal.view.watch.watch_state import WatchedRun

RUN = typer.Argument(..., metavar="RUN", help="A run folder or name, also of a run yet to come.")
ONCE = typer.Option(False, "--once", help="Print the state of the moment and exit.")
AS_JSON = typer.Option(False, "--json", help="Print the state of the moment as JSON and exit.")


def watch(path: Path = RUN, once: bool = ONCE, as_json: bool = AS_JSON) -> None:
    """Show a run: ranks as rows, curves, waits, foreseen beside measured, events, time left.

    Reads the folder only, without a lock, so it may run anywhere the folder is. Keys: q quits, tab
    changes the view, ? lists the others. Through a pipe it prints the state once. Exit status: 0,
    or 2 without a run to print; Ctrl-C 130.
    """
    from shoal.view.diagnosis.run_folders import find_named_run
    from shoal.view.watch.run_watcher import IslandsWatcher
    from shoal.view.watch.watch_screen import ScreenOptions

    path = find_named_run(path)
    _check_single_run(path)
    live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    watcher = IslandsWatcher(path)
    braille = _can_print("⣿━")
    if not live or once or as_json:
        state = watcher.read()
        if state.row is None:
            from shoal.view.diagnosis.run_folders import explain_no_run

            raise ConfigError(explain_no_run(path))
        _print_state(state, as_json=as_json, braille=braille)
        return
    from shoal.view.watch.terminal_screen import TerminalScreen
    from shoal.view.watch.watch_loop import watch_run

    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    colour = not os.environ.get("NO_COLOR")
    with TerminalScreen(sys.stdout, keyboard, colour=colour) as screen:
        watch_run(watcher.read, screen, ScreenOptions(braille=braille))


def _check_single_run(path: Path) -> None:
    """Refuse a folder of several runs.

    Raises:
        ConfigError: names the newest of them.
    """
    if (path / "events.jsonl").exists() or (path / "run.toml").exists():
        return
    found = [one.parent for one in path.glob("*/events.jsonl")]
    if (path.exists() and not path.is_dir()) or any(
        not one.name.startswith("island-") for one in found
    ):
        from shoal.view.diagnosis.run_folders import explain_no_run

        raise ConfigError(explain_no_run(path))


def _can_print(letters: str) -> bool:
    try:
        letters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _print_state(state: WatchedRun, *, as_json: bool, braille: bool) -> None:
    from shoal.view.watch.styled_lines import line_text
    from shoal.view.watch.watch_screen import ScreenOptions, render_snapshot

    if as_json:
        typer.echo(json.dumps(replace_non_finite(_state_record(state)), indent=1))
        return
    width = shutil.get_terminal_size().columns
    lines = render_snapshot(state, width, ScreenOptions(braille=braille), time.time())
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        typer.echo(line_text(line).encode(encoding, READABLE).decode(encoding))


def _state_record(state: WatchedRun) -> dict[str, object]:
    """Return the state as JSON values; unknown figures are null."""
    from shoal.base.runlog.rank_records import PARTS

    ranks = [
        {**asdict(rank), "seconds": dict(zip(PARTS, rank.seconds, strict=True))}
        for rank in state.ranks
    ]
    last = state.progress.last or {}
    return {
        "run": asdict(state.row) if state.row else None,
        "left_s": state.progress.left_s(),
        "last_step": {key: last.get(key) for key in ("step", "loss", "grad_norm", "lr", "step_s")},
        "phases": [phase.name for phase in state.phases.phases],
        "forecast": state.forecast,
        "waits": state.waits,
        "ranks": ranks,
        "islands": [asdict(island) for island in state.islands],
        "validations": [{"step": step, "loss": loss} for step, loss in state.validations],
        "events": [{"time_s": event.time_s, "text": event.text} for event in state.events[-20:]],
    }
