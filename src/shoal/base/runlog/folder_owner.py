"""Detection of run folders that were deleted or replaced while the run uses them.

    owner.json     names the run that owns the folder (checkpoint/format/lease.py); its text
                   identifies the run
    ours           owner.json has our text, or is missing from the very same folder
    deleted        the folder is missing, or has neither rows nor run.toml: a save created it
    replaced       another folder has its path, or another run owns it

If a user moves a run folder while the run trains, and puts another one in its place, two runs would
share one folder: rows mixed, checkpoints overwritten, old ones removed. So each process checks
before it writes. If a sibling folder has the same text, the run's folder was moved there.

Limits: a folder without owner.json (a measurement, a script without a lease) counts as ours; so
does another run's folder without one, if the file system reused the inode of our deleted folder.
"""

from __future__ import annotations

import os
from pathlib import Path

OWNER_FILE = "owner.json"
NEEDED = ("run.toml", "plan.json")
"""Files of a run folder that a resume requires."""
OF_A_RUN = ("run.toml", "metrics.jsonl")
"""Files that the folder of any run has after its first step."""
OURS, DELETED, REPLACED = "ours", "deleted", "replaced"
NOWHERE = Path(os.devnull)
"""Path that stands for a folder that cannot be found: no file exists below it."""


class FolderOwner:
    """Comparison of a run folder with its state when this process first saw it.

    Attributes:
        folder: the run's folder, as given.
        text: content of its owner.json; empty until there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, b""
        self._file = self._inode = (0, 0)
        self._needed: dict[str, bytes] = {}

    def record_with_owner(self) -> None:
        """Record the present folder as this run's."""
        self.text = _read(self.folder / OWNER_FILE)
        self.record_identity()

    def record_identity(self) -> None:
        """Record the present folder as this run's, without reading a file."""
        self._file, self._inode = (
            _file_identity(self.folder / OWNER_FILE),
            folder_inode(self.folder),
        )

    def state(self) -> str:
        """Compare the folder with the recorded one: return `OURS`, `DELETED` or `REPLACED`."""
        stamp = _file_identity(self.folder / OWNER_FILE)
        if self._file == (0, 0):
            self.record_with_owner()
            return OURS if self.folder.exists() else DELETED
        if stamp == self._file:
            self.text = self.text or _read(self.folder / OWNER_FILE)
            return OURS
        if now := _read(self.folder / OWNER_FILE):
            if now != self.text:
                return REPLACED
            self.record_identity()
            return OURS
        if not any((self.folder / name).exists() for name in OF_A_RUN):
            return DELETED
        return OURS if folder_inode(self.folder) == self._inode else REPLACED

    def recreate(self) -> str:
        """Recreate a deleted folder, with the files that a resume requires.

        Returns:
            The line for the user; empty if the folder exists.

        Raises:
            OSError: the folder cannot be created.
        """
        paths = [] if self._needed else [self.folder / name for name in NEEDED]
        self._needed |= {path.name: path.read_bytes() for path in paths if path.is_file()}
        if self.state() != DELETED:
            return ""
        where = self.find_moved_folder()
        self.fill(self.folder)
        moved = f"are in {where}" if where else "are gone"
        return (
            f"{self.folder}: the run folder was {'moved' if where else 'deleted'} while the run "
            f"trains, and is made anew: earlier rows and checkpoints {moved}, the next checkpoint "
            f"holds all that a resume needs; try: a run.folder that nothing cleans up"
        )

    def fill(self, folder: Path) -> None:
        """Write the files that a resume requires, and owner.json, into a new folder."""
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, data in {**self._needed, OWNER_FILE: self.text}.items():
            if data:
                (folder / name).write_bytes(data)

    def current_path(self) -> Path:
        """Return the present folder: as given, else a sibling; else `NOWHERE`."""
        if self.state() != REPLACED:
            return self.folder
        return self.find_moved_folder() or NOWHERE

    def find_moved_folder(self) -> Path | None:
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


def _file_identity(path: Path) -> tuple[int, int]:
    """Return (inode, mtime in ns) of a file, without opening it; (0, 0) if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def folder_inode(folder: Path) -> tuple[int, int]:
    """Return (device, inode) of a folder; (0, 0) if it is missing."""
    try:
        found = folder.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
