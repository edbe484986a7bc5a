"""Write and verify one rank's file; join all ranks' parts into one manifest.

A part is JSON, since it travels between ranks: the file's name, size and header digest, and for
each slice (name, global shape, dtype, key, box, sha256).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint.agreement.rank_pieces import HeldSlice
from shoal.checkpoint.format.listing import check_shard_file, slices_by_file
from shoal.checkpoint.format.manifest import (
    Manifest,
    StoredFile,
    StoredSlice,
    StoredTensor,
    to_plain_json,
)
from shoal.checkpoint.format.safetensors_file import TensorEntry, write_file
from shoal.wire.phases import phase


def write_shard(folder: Path, rank: int, blocks: Sequence[HeldSlice]) -> dict[str, Any]:
    """Write, fsync, read back and compare this rank's file, without communication.

    Returns:
        This rank's part of the manifest, empty if there is nothing to write.

    Raises:
        OSError: the disk is full.
        Damaged: the disk returns other bytes than were written.
    """
    if not blocks:
        return {}
    path = folder / f"rank-{rank}.safetensors"
    by_key = {block.key: block for block in blocks}
    entries = [TensorEntry(block.key, block.dtype, block.shape) for block in blocks]

    def memory_of(key: str) -> memoryview:
        told.step()
        return by_key[key].memory()

    try:
        with phase("write", of=len(blocks)) as told:
            done = write_file(path, entries, memory_of, {"format": "pt"})
    except OSError as failure:
        failure.filename = failure.filename or str(path)  # so that the message names the file
        raise
    part = {
        "file": path.name,
        "size_bytes": done.size_bytes,
        "header_sha256": done.header_sha256,
        "slices": [
            (b.name, b.global_shape, b.dtype, b.key, b.box, done.sha256[b.key]) for b in blocks
        ],
    }
    _drop_page_cache(path)
    alone = join_parts(0, [part], {}, {})
    for problem in check_shard_file(folder, alone, path.name, slices_by_file(alone)[path.name]):
        raise problem
    return part


def join_parts(
    step: int, parts: Sequence[dict[str, Any]], aliases: Mapping[str, str], record: dict[str, Any]
) -> Manifest:
    """Join all ranks' parts into a manifest."""
    files: dict[str, StoredFile] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    slices: dict[str, list[StoredSlice]] = {}
    for part in parts:
        if not part:
            continue
        files[part["file"]] = StoredFile(part["size_bytes"], part["header_sha256"])
        for name, shape, dtype, key, box, sha256 in part["slices"]:
            kinds[name] = tuple(shape), dtype
            stored = StoredSlice(part["file"], key, tuple((a, b) for a, b in box), sha256)
            slices.setdefault(name, []).append(stored)
    tensors = {
        name: StoredTensor(shape, dtype, tuple(slices[name]))
        for name, (shape, dtype) in kinds.items()
    }
    return Manifest(step, tensors, files, dict(aliases), to_plain_json(record))


def _drop_page_cache(path: Path) -> None:
    """Drop the file from the page cache, so that reading back reads the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
