"""Copy of a script's folder, in which `shoal prove -- train.py` runs the script.

    script below the working folder   the working folder is copied; the script runs in the copy
    script outside of it              both folders are copied

Small files are copied. Large files and folders of many files are linked: the script can read them
through the link, and the write guard of the proof stops writes to them. So no file of the user's
folder changes.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path

SKIPPED = frozenset((".git", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache"))
"""Entries that no script reads."""

FILE_BYTES = 8 * 2**20
"""Largest size of a file that is copied."""

FOLDER_ENTRIES = 500
"""Most entries of a folder that is copied."""


@dataclass
class CopyBudget:
    """Files and bytes that may still be copied; the rest is linked."""

    files: int = 4000
    size_bytes: int = 256 * 2**20

    def spend(self, size_bytes: int) -> bool:
        """Deduct a file from the budget and return True; return False if it does not fit."""
        if size_bytes > FILE_BYTES or self.files < 1 or self.size_bytes < size_bytes:
            return False
        self.files -= 1
        self.size_bytes -= size_bytes
        return True


def copy_script_folder(script: Path, cwd: Path, target: Path) -> tuple[Path, Path]:
    """Copy the folder of a script below `target`.

    Args:
        script: the script.
        cwd: the folder in which the user started the command.
        target: a folder that exists.

    Returns:
        (script, working folder) in the copy.
    """
    script, cwd, budget = script.resolve(), cwd.resolve(), CopyBudget()
    working = target / cwd.name if cwd.name else target / "root"
    if script.is_relative_to(cwd):
        # The script's own folder first, so that a large project does not use up its budget.
        own = script.parent.relative_to(cwd)
        copy_tree(script.parent, working / own, budget)
        if own.parts:
            copy_tree(cwd, working, budget)
        return working / script.relative_to(cwd), working
    home = target / "script" / script.parent.name
    copy_tree(script.parent, home, budget)
    copy_tree(cwd, working, budget)
    return home / script.name, working


def copy_tree(source: Path, target: Path, budget: CopyBudget) -> None:
    """Copy a folder, breadth first, within a budget; existing entries of the target stay."""
    folders = deque([(source, target)])
    while folders:
        here, there = folders.popleft()
        there.mkdir(parents=True, exist_ok=True)
        for entry in sorted(os.scandir(here), key=lambda one: one.name):
            copied = there / entry.name
            if entry.name in SKIPPED or copied.is_symlink() or copied.is_file():
                continue
            if entry.is_symlink() or not _is_copied(entry, budget):
                if not copied.exists():
                    copied.symlink_to(os.path.realpath(entry.path))
            elif entry.is_dir():
                folders.append((Path(entry.path), copied))
            else:
                shutil.copy2(entry.path, copied)


def _is_copied(entry: os.DirEntry[str], budget: CopyBudget) -> bool:
    """Return whether an entry is copied, not linked."""
    if entry.is_dir():
        if os.path.exists(os.path.join(entry.path, "pyvenv.cfg")) or budget.files < 1:
            return False
        try:
            with os.scandir(entry.path) as entries:
                return sum(1 for _ in entries) <= FOLDER_ENTRIES
        except OSError:
            return False
    return entry.is_file() and budget.spend(entry.stat().st_size)
