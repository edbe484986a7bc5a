"""Find out whether a run folder is still the one that this run took.

    owner.json     names the run that has the folder (checkpoint/format/lease.py); its text
                   identifies it
    ours           owner.json has our text, or is gone from the very same folder
    deleted        the folder is gone, or one without rows and run.toml lies there: a save made it
    replaced       another folder lies there, or another run took it

Whoever moves a run folder while the run trains, and puts another one in its place, would have two
runs in one folder: rows mixed, checkpoints overwritten, old ones removed. So each process looks
before it writes. The same text is found again in a sibling folder: there the run's folder lies now.

Limits: a folder without owner.json (a measurement, a script without a lease) is taken for ours; so
is another run's that has none, where the file system gave it the number of our deleted folder
"""

from __future__ import annotations

import os
from pathlib import Path

OWNER_FILE = "owner.json"
NEEDED = ("run.toml", "plan.json")
"""Files of a run folder without which no resume begins."""
OF_A_RUN = ("run.toml", "metrics.jsonl")
"""Files that the folder of any run has after its first step."""
OURS, DELETED, REPLACED = "ours", "deleted", "replaced"
NOWHERE = Path(os.devnull)
"""Stands for a folder that cannot be found: nothing can be read or written below it."""


class FolderOwner:
    """Compares a run folder with what it was when this process first looked.

    Attributes:
        folder: the run's, as it was given.
        text: of its owner.json; empty until there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, b""
        self._file = self._inode = (0, 0)
        self._needed: dict[str, bytes] = {}

    def learn(self) -> None:
        """Take the folder as it is now for this run's."""
        self.text = _read(self.folder / OWNER_FILE)
        self.note()

    def note(self) -> None:
        """Take the folder as it is now for this run's, and read no file."""
        self._file, self._inode = _stamp(self.folder / OWNER_FILE), _inode(self.folder)

    def state(self) -> str:
        """Return `OURS`, `DELETED` or `REPLACED`."""
        stamp = _stamp(self.folder / OWNER_FILE)
        if self._file == (0, 0):
            self.learn()
            return OURS if self.folder.exists() else DELETED
        if stamp == self._file:
            self.text = self.text or _read(self.folder / OWNER_FILE)
            return OURS
        if now := _read(self.folder / OWNER_FILE):
            if now != self.text:
                return REPLACED
            self.note()
            return OURS
        if not any((self.folder / name).exists() for name in OF_A_RUN):
            return DELETED
        return OURS if _inode(self.folder) == self._inode else REPLACED

    def remake(self) -> str:
        """Make the folder anew if it was deleted, with what a resume needs of it.

        Returns:
            The line for the user; empty where the folder was there.

        Raises:
            OSError: it cannot be made.
        """
        paths = [] if self._needed else [self.folder / name for name in NEEDED]
        self._needed |= {path.name: path.read_bytes() for path in paths if path.is_file()}
        if self.state() != DELETED:
            return ""
        where = self.moved_to()
        self.fill(self.folder)
        moved = f"are in {where}" if where else "are gone"
        return (
            f"{self.folder}: the run folder was {'moved' if where else 'deleted'} while the run "
            f"trains, and is made anew: earlier rows and checkpoints {moved}, the next checkpoint "
            f"holds all that a resume needs; try: a run.folder that nothing cleans up"
        )

    def fill(self, folder: Path) -> None:
        """Write into a new folder what a resume needs, and whose it is."""
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, data in {**self._needed, OWNER_FILE: self.text}.items():
            if data:
                (folder / name).write_bytes(data)

    def place(self) -> Path:
        """Return the folder as it lies now: as given, else a sibling; else `NOWHERE`."""
        if self.state() != REPLACED:
            return self.folder
        return self.moved_to() or NOWHERE

    def moved_to(self) -> Path | None:
        """Return the sibling of the folder that has our owner.json, if there is one."""
        if not self.text:
            return None
        try:
            siblings = sorted(self.folder.absolute().parent.iterdir())
        except OSError:
            return None
        others = (one for one in siblings if one.name != self.folder.name)
        found = next((one for one in others if _read(one / OWNER_FILE) == self.text), None)
        return self.folder.with_name(found.name) if found else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _stamp(path: Path) -> tuple[int, int]:
    """Return what identifies a file without reading it; (0, 0) where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _inode(folder: Path) -> tuple[int, int]:
    try:
        found = folder.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
