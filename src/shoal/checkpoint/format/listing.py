"""List and verify the checkpoints of a folder.

A checkpoint is a folder `step-N` with a manifest; temporary and quarantined folders have other
names and are never found. No torch here, so `shoal checkpoint list` and `verify` answer at once.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import CheckpointError
from shoal.checkpoint.format.checkpoint_faults import Damaged, explain
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest, StoredSlice, decode
from shoal.checkpoint.format.stored_shard import StoredReader

NamedSlice = tuple[str, StoredSlice]
"""A tensor's name and one of its slices."""

STEP_FOLDER = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True)
class Found:
    """A folder named and laid out as a checkpoint; nothing in it is verified yet."""

    step: int
    path: Path


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, `root/step-N`, without touching the disk.

    >>> step_folder(Path("checkpoints"), 1200).name
    'step-1200'
    """
    return root / f"step-{step}"


def find(root: Path) -> list[Found]:
    """List every `step-N` folder in `root` that has a manifest file, newest step first.

    Nothing is verified. [] if `root` is missing.
    """
    found: list[Found] = []
    for path in root.iterdir() if root.is_dir() else ():
        match = STEP_FOLDER.fullmatch(path.name)
        if match and (path / FILE_NAME).is_file():
            found.append(Found(int(match[1]), path))
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
            raise Damaged(file, "is not a regular file")
        data = file.read_bytes()
    except FileNotFoundError as failure:
        raise Damaged(file, "is missing: the checkpoint is not complete") from failure
    except OSError as failure:
        raise Damaged(file, f"cannot be read: {failure.strerror}") from failure
    manifest = decode(data, file)
    named = STEP_FOLDER.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise Damaged(file, f"is of step {manifest.step}, its folder is called {path.name}")
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
        problems += file_problems(path, manifest, name, slices)
    return [str(problem) for problem in [*problems, *strangers(path, manifest)]]


def strangers(path: Path, manifest: Manifest) -> list[Damaged]:
    """Return the folder's entries that the manifest does not list; they are never opened."""
    try:
        names = sorted(os.listdir(path))
    except OSError as failure:
        return [Damaged(path, f"cannot be listed: {explain(failure)}")]
    return [
        Damaged(path / name, f"is not listed in {FILE_NAME}; it is never read, remove it")
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


def file_problems(
    path: Path, manifest: Manifest, name: str, slices: Sequence[NamedSlice]
) -> list[Damaged]:
    """Return every problem of one shard file: size, header, each slice, and unlisted keys."""
    try:
        with StoredReader(path / name, manifest.files[name]) as reader:
            return _slice_problems(reader, manifest, slices)
    except Damaged as problem:
        return [problem]


def _slice_problems(
    reader: StoredReader, manifest: Manifest, slices: Sequence[NamedSlice]
) -> list[Damaged]:
    problems: list[Damaged] = []
    for name, piece in slices:
        tensor = manifest.tensors[name]
        try:
            reader.read(name, tensor.shape, tensor.dtype, piece, None)
        except Damaged as problem:
            problems.append(problem)
    unlisted = sorted(reader.entries.keys() - {piece.key for _, piece in slices})
    problems += [
        Damaged(reader.path, f"is in this file, {FILE_NAME} does not list it", key)
        for key in unlisted
    ]
    return problems
