"""Make, rename and delete checkpoint folders: a name `step-N` is always a complete checkpoint.

    step-N.tmp-<id>          being written, or being deleted; the next save removes leftovers
    step-N                   complete: renamed to this after every file was durable
    step-N.damaged[-k]       was called step-N and did not verify; kept for inspection
    step-N.other[-k]         of a history that the other nodes did not continue (`save.node_local`)
    before_spikes.json       steps of checkpoints that stay beyond `keep`, since a spike follows

Renames are atomic, and durable once the parent folder is fsynced (POSIX; the Linux file systems
ext4, xfs, btrfs and NFS keep this order). Only rank 0 calls these, or each disk's keeper
(`save.node_local`). No torch here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path

from shoal.base.errors import CheckpointError
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.base.text.units import bytes_text
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest, encode
from shoal.checkpoint.format.safetensors_file import write_all

IN_USE: set[Path] = set()
"""Checkpoints that an upload copies: retention keeps them until it ends, and deletes them after the
next save."""

SPIKES_FILE, MOST_SPIKES = "before_spikes.json", 3
"""List of the checkpoints that stay because a spike follows, and their largest number."""

TEMPORARY = re.compile(r"step-[0-9]+\.tmp-[0-9a-f]+")


def fsync_folder(path: Path) -> None:
    """Fsync a folder, so that the names in it are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_temporary_path(folder: Path) -> Path:
    """Return a path beside `folder`, its name with `.tmp-` and random digits; create nothing."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")


def remove_leftovers(root: Path) -> None:
    """Delete temporary folders of dead saves and deletions."""
    for path in list(root.iterdir()) if root.is_dir() else ():
        if TEMPORARY.fullmatch(path.name):
            # One that cannot be deleted must not stop the save: the space check guards the disk.
            shutil.rmtree(path, ignore_errors=True)


def make_step_folder(final: Path, needed_bytes: int) -> Path:
    """Make the temporary folder for `final`, if the disk has room for `needed_bytes`.

    Raises:
        OSError: the folder cannot be made.
        CheckpointError: the disk lacks space.
    """
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    check_space(root, needed_bytes)
    folder = make_temporary_path(final)
    folder.mkdir()
    return folder


def commit(folder: Path, final: Path, manifest: Manifest) -> int:
    """Write the manifest of a complete folder and rename it to `final`; return its bytes.

    Raises:
        OSError: the disk refuses a write or the rename.
        Damaged: the manifest reads back otherwise than it was written.
    """
    data = encode(manifest)
    descriptor = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_folder(folder)
    read_manifest(folder)  # raises unless the disk gives back what was written
    os.rename(folder, final)
    fsync_folder(final.parent)
    return manifest.size_bytes


def quarantine(folder: Path, word: str = "damaged") -> Path:
    """Rename a checkpoint to the first free name of `.damaged[-k]`; `word` replaces damaged."""
    target, count = folder.with_name(f"{folder.name}.{word}"), 1
    while os.path.lexists(target):
        count += 1
        target = folder.with_name(f"{folder.name}.{word}-{count}")
    os.rename(folder, target)
    fsync_folder(folder.parent)
    return target


def delete_old_steps(root: Path, newest_step: int, keep: int) -> None:
    """Delete checkpoints beyond the `keep` newest, counted back from `newest_step`.

    Later steps are neither counted nor touched: the run went back before them, and they may be
    damaged. Checkpoints before spikes stay. A folder loses its name before its files, so a crash
    leaves no half of one.
    """
    past = [found for found in list_checkpoints(root) if found.step <= newest_step]
    before_spikes = _list_steps_before_spikes(root) if len(past) > keep else []
    for found in past[keep:]:
        if found.step not in before_spikes and found.path.resolve() not in IN_USE:
            _delete(found.path)


def keep_step_before(root: Path, step: int) -> None:
    """Keep the newest checkpoint before a spike, so that its step can be replayed.

    Of more than `MOST_SPIKES` such checkpoints the newest stay.

    Args:
        root: the folder of the checkpoints.
        step: the step with the spike.

    Raises:
        OSError: the list cannot be written.
    """
    before = next((found.step for found in list_checkpoints(root) if found.step < step), None)
    kept = _list_steps_before_spikes(root)
    if before is not None and before not in kept:
        kept = sorted([*kept, before])[-MOST_SPIKES:]
        write_atomically(root / SPIKES_FILE, json.dumps({"steps": kept}) + "\n")


def _list_steps_before_spikes(root: Path) -> list[int]:
    found = read_object(root / SPIKES_FILE).get("steps")
    return [one for one in found if isinstance(one, int)] if isinstance(found, list) else []


def delete_later_steps(root: Path, step: int) -> None:
    """Delete checkpoints of later steps than `step`, from before the run went back."""
    for found in list_checkpoints(root):
        if found.step > step and found.path.resolve() not in IN_USE:
            _delete(found.path)


def _delete(path: Path) -> None:
    doomed = make_temporary_path(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def check_space(root: Path, needed_bytes: int) -> None:
    """Refuse a save that does not fit on the disk, before it writes anything.

    Raises:
        CheckpointError: the disk lacks space.
    """
    status = os.statvfs(root)
    free_bytes = status.f_bavail * status.f_frsize
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"it needs {bytes_text(needed_bytes)}, {bytes_text(free_bytes)} are free on this disk"
        )
