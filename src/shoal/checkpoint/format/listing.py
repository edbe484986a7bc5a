"""List and verify the checkpoints of a folder.

A checkpoint is a folder `step-N` with a manifest; temporary and quarantined folders have other
names and are never found. No torch here, so `shoal checkpoint list` and `verify` answer at once.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import CheckpointError
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, describe_failure
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest, StoredSlice, decode
from shoal.checkpoint.format.stored_shard import StoredShardReader

NamedSlice = tuple[str, StoredSlice]
"""A tensor's name and one of its slices."""

STEP_FOLDER = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class CheckpointEntry:
    """A folder named and laid out as a checkpoint; nothing in it is verified yet."""

    step: int
    path: Path


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, `root/step-N`, without touching the disk.

    >>> step_folder(Path("checkpoints"), 1200).name
    'step-1200'
    """
    return root / f"step-{step}"


def list_checkpoints(root: Path) -> list[CheckpointEntry]:
    """List every `step-N` folder in `root` that has a manifest file, newest step first.

    Nothing is verified. [] if `root` is missing.
    """
    found: list[CheckpointEntry] = []
    for path in root.iterdir() if root.is_dir() else ():
        match = STEP_FOLDER.fullmatch(path.name)
        if match and (path / FILE_NAME).is_file():
            found.append(CheckpointEntry(int(match[1]), path))
    return sorted(found, key=lambda f: f.step, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """Read and verify the manifest of the checkpoint folder `path`; other files are not opened.

    Raises:
        Damaged: it is missing, unreadable or no regular file, its bytes differ from those that were
            written, or it is of another step than the folder's name.
        CheckpointError: another version of Shoal wrote the format.
    """
    file = path / FILE_NAME
    try:
        # A pipe or a device in its place would make the read wait, or never end.
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise DamagedFileError(file, "is not a regular file")
        data = file.read_bytes()
    except FileNotFoundError as failure:
        raise DamagedFileError(file, "is missing: the checkpoint is not complete") from failure
    except OSError as failure:
        raise DamagedFileError(file, f"cannot be read: {failure.strerror}") from failure
    manifest = decode(data, file)
    named = STEP_FOLDER.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise DamagedFileError(
            file, f"is of step {manifest.step}, its folder is called {path.name}"
        )
    return manifest


def verify(path: Path) -> list[str]:
    """Return every problem of a checkpoint, one line each; empty if every byte is as written.

    Reads all files once (about as fast as SHA-256, 1 GB/s or more); executes nothing.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as problem:
        return [str(problem)]
    problems: list[CheckpointError] = []
    for name, slices in slices_by_file(manifest).items():
        problems += check_shard_file(path, manifest, name, slices)
    return [str(problem) for problem in [*problems, *find_unlisted_files(path, manifest)]]


def find_unlisted_files(path: Path, manifest: Manifest) -> list[DamagedFileError]:
    """Return the folder's entries that the manifest does not list; they are never opened."""
    try:
        names = sorted(os.listdir(path))
    except OSError as failure:
        return [DamagedFileError(path, f"cannot be listed: {describe_failure(failure)}")]
    return [
        DamagedFileError(path / name, f"is not listed in {FILE_NAME}; it is never read, remove it")
        for name in names
        if name != FILE_NAME and name not in manifest.files
    ]


def slices_by_file(manifest: Manifest) -> dict[str, list[NamedSlice]]:
    """Return (tensor, slice) of everything in each file of the checkpoint."""
    grouped: dict[str, list[NamedSlice]] = {file: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.slices:
            grouped[piece.file].append((name, piece))
    return grouped


def check_shard_file(
    path: Path, manifest: Manifest, name: str, slices: Sequence[NamedSlice]
) -> list[DamagedFileError]:
    """Return every problem of one shard file: size, header, each slice, and unlisted keys."""
    try:
        with closing(StoredShardReader(path / name, manifest.files[name])) as reader:
            return _check_slices(reader, manifest, slices)
    except DamagedFileError as problem:
        return [problem]


def _check_slices(
    reader: StoredShardReader, manifest: Manifest, slices: Sequence[NamedSlice]
) -> list[DamagedFileError]:
    problems: list[DamagedFileError] = []
    for name, piece in slices:
        tensor = manifest.tensors[name]
        try:
            reader.read(name, tensor.shape, tensor.dtype, piece, None)
        except DamagedFileError as problem:
            problems.append(problem)
    unlisted = sorted(reader.entries.keys() - {piece.key for _, piece in slices})
    problems += [
        DamagedFileError(reader.path, f"is in this file, {FILE_NAME} does not list it", key)
        for key in unlisted
    ]
    return problems
