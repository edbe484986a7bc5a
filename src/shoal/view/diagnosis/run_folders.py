"""Run folders below a folder, found by their files; and why a path is none."""

from __future__ import annotations

import os
import shlex
from difflib import get_close_matches
from pathlib import Path

from shoal.base.text.event_sentences import strip_control_characters

MARKS = ("events.jsonl", "metrics.jsonl", "owner.lock", "owner.json", "plan.json")
"""Files of which each run folder has one."""
INSIDE = ("checkpoints", "logs", "rank_steps", "tags", "hub")
"""Folders of a run that hold no runs."""
DEPTH = 3


def is_run_folder(path: Path) -> bool:
    """Return whether a path is a folder with files of a run."""
    return any(os.path.lexists(path / name) for name in MARKS)


def is_listed_run(path: Path) -> bool:
    """Return whether `shoal runs` lists a folder: a run, or one in which none ever started."""
    if is_run_folder(path) or (path / "run.toml").is_file():
        return True
    return path.is_dir() and path in find_run_folders(path.parent)


def find_named_run(path: Path) -> Path:
    """Return the folder of a run: the path, or runs/PATH if only that is a run folder.

    So a command takes the name that `shoal runs` lists. A path that exists is never replaced.
    """
    below = Path("runs") / path
    if os.path.lexists(path) or path.is_absolute() or ".." in path.parts:
        return path
    return below if is_listed_run(below) else path


def find_run_folders(folder: Path) -> list[Path]:
    """Return a run folder itself, and those below it, at most DEPTH folders deep.

    Beside other runs, or in a folder called runs, an empty folder and one with only a run.toml
    count too: somebody made it for a run.
    """
    found = [folder] if is_run_folder(folder) else []
    for path in _list_folders(folder):
        found += _find_below(path, DEPTH - 1)
    if folder.absolute().name == "runs" or any(one.parent == folder for one in found):
        made = (path for path in _list_folders(folder) if path not in found)
        found += [path for path in made if folder not in found and _is_unstarted(path)]
    return found


def _find_below(path: Path, depth: int) -> list[Path]:
    found = [path] if is_run_folder(path) else []
    below = [one for one in _list_folders(path) if not (found and one.name in INSIDE)]
    return found + [run for one in below if depth for run in _find_below(one, depth - 1)]


def _is_unstarted(path: Path) -> bool:
    """Return whether a folder is empty, unreadable, or holds only a configuration."""
    try:
        names = {one.name for one in os.scandir(path)}
    except OSError:
        return True
    return names <= {"run.toml", "logs"}


def _list_folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(path / one.name for one in entries if one.is_dir())
    except OSError:
        return []


def explain_no_run(path: Path) -> str:
    """Return why a path is no run folder, with what to type instead: "PATH: …; try: …"."""
    shown = strip_control_characters(str(path))
    if path.is_dir():
        return _explain_folder(path, shown)
    if path.exists() or path.is_symlink():
        kind = "a file" if path.is_file() else "no folder"
        return f"{shown}: is {kind}, and no run folder; try: {_find_above(path) or 'shoal runs'}"
    return f"{shown}: does not exist; try: {_nearest_run_text(path)}"


def _explain_folder(path: Path, shown: str) -> str:
    """Return why a folder is no run: it holds runs, is a part of one, or neither."""
    runs = [one for one in find_run_folders(path) if one != path]
    if runs:
        newest = max(runs, key=_changed_s)
        count = f"{len(runs)} runs" if len(runs) > 1 else "a run"
        hint = f"try: {_quote(newest)}, or shoal runs {_quote(path)}"
        return f"{shown}: is no run folder, but holds {count}; {hint}"
    if is_run_folder(path):
        return f"{shown}: has not begun: no event, no step; try: shoal watch {_quote(path)}"
    return f"{shown}: no run folder; try: {_find_above(path) or 'shoal runs'}"


def _find_above(path: Path) -> str:
    above = next((one for one in list(path.parents)[:DEPTH] if is_run_folder(one)), None)
    return _quote(above) if above else ""


def _nearest_run_text(path: Path) -> str:
    """Return the run with the nearest name, else the command that lists the runs there."""
    parent = path.parent if path.parent.is_dir() else Path("runs")
    runs = {one.name: one for one in find_run_folders(parent) if one.parent == parent}
    if not runs and parent != Path("runs"):
        runs = {one.name: one for one in find_run_folders(Path("runs"))}
    near = get_close_matches(path.name, runs, 1, 0.5)
    if near:
        return _quote(runs[near[0]])
    return f"shoal runs {_quote(next(iter(runs.values())).parent)}" if runs else "shoal runs"


def _changed_s(path: Path) -> float:
    try:
        return (path / "events.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def _quote(path: Path) -> str:
    return strip_control_characters(shlex.quote(str(path)))
