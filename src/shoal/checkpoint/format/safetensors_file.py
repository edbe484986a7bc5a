"""The safetensors container: a JSON header that names tensors, then their bytes, and nothing else.

    8 bytes   length H of the header, little-endian
    H bytes   JSON {key: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {…}}
    the rest  tensor bytes, without holes, offsets counted from the end of the header

No code can hide in it, and any tool that reads safetensors reads our shards. The format has no
checksum, so the writer returns SHA-256 digests for the manifest. No torch here.

Source: safetensors 0.8, README "Format"; ours refuses the same holes and overlaps on reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import DTYPES

CHUNK_BYTES = 1 << 20
"""Bytes hashed and written at a time: small enough that the second access finds them in cache."""

LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000
METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file; `begin` and `end` are byte offsets from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of a tensor of this dtype and shape."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class WrittenFile:
    """Facts of a written file: its size, its header's digest, a digest per key."""

    size_bytes: int
    header_sha256: str
    sha256: dict[str, str]


def build_header(
    tensors: Sequence[TensorEntry], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorEntry]]:
    """Return the header for these tensors, and the tensors in file order with their offsets.

    Widest elements first, so that each tensor begins at a multiple of its element's size.

    Raises:
        CheckpointError: the format lacks a dtype, or a key is used twice.
    """
    for entry in tensors:
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.key}: dtype {entry.dtype} has no place in a safetensors file; "
                f"it holds {', '.join(DTYPES)}"
            )
    keys = [entry.key for entry in tensors]
    doubled = {key for key in keys if keys.count(key) > 1} if len({*keys}) < len(keys) else set()
    if doubled or METADATA in keys:
        raise CheckpointError(f"{min(doubled | {METADATA})}: the name is taken; give another one")
    ordered = sorted(tensors, key=lambda e: (-DTYPES[e.dtype][1], e.key))
    fields: dict[str, Any] = {METADATA: dict(metadata)}
    offsets = [0]
    for entry in ordered:
        offsets.append(offsets[-1] + entry.size_bytes)
        fields[entry.key] = {
            "dtype": DTYPES[entry.dtype][0],
            "shape": list(entry.shape),
            "data_offsets": offsets[-2:],
        }
    body = json.dumps(fields, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    header = len(body).to_bytes(LENGTH_BYTES, "little") + body
    placed = [
        TensorEntry(e.key, e.dtype, e.shape, len(header) + begin, len(header) + end)
        for e, begin, end in zip(ordered, offsets, offsets[1:], strict=False)
    ]
    return header, placed


def parse_header(header: bytes, file_bytes: int) -> dict[str, TensorEntry]:
    """Return the tensors that a header names, by key.

    Refuses holes, overlaps and bytes after the last tensor, so every byte belongs to one tensor.

    Raises:
        ValueError: the header is wrong; the text names the fault.
    """
    try:
        fields = json.loads(header[LENGTH_BYTES:])
    except (ValueError, RecursionError) as failure:
        raise ValueError("the header is not JSON") from failure
    names = {short: name for name, (short, _) in DTYPES.items()}
    entries: list[TensorEntry] = []
    try:
        for key, field in fields.items():
            if key != METADATA:
                begin, end = (int(offset) + len(header) for offset in field["data_offsets"])
                shape = tuple(int(n) for n in field["shape"])
                entries.append(TensorEntry(key, names[field["dtype"]], shape, begin, end))
    except (AttributeError, KeyError, TypeError, ValueError) as failure:
        raise ValueError("the header is not a safetensors header") from failure
    position = len(header)
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != position or entry.end - entry.begin != entry.size_bytes:
            raise ValueError(f"{entry.key} lies at other bytes than its shape and dtype need")
        position = entry.end
    if position != file_bytes:
        raise ValueError(f"has {file_bytes} bytes, its header describes {position}")
    return {entry.key: entry for entry in entries}


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; the system may take fewer at a time.

    Raises:
        OSError: for example a full disk.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def write_file(
    path: Path,
    tensors: Sequence[TensorEntry],
    data_of: Callable[[str], memoryview],
    metadata: Mapping[str, str],
) -> WrittenFile:
    """Write a new safetensors file and make it durable (fsync).

    Args:
        data_of: returns the bytes of a key; called once per key, in file order, so one tensor is in
            memory.

    Raises:
        OSError: the disk is full, or the file exists.
        CheckpointError: as `build_header`.
    """
    header, placed = build_header(tensors, metadata)
    digests: dict[str, str] = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, header)
        for entry in placed:
            data = data_of(entry.key)
            digest = hashlib.sha256()
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                digest.update(chunk)
                write_all(descriptor, chunk)
            digests[entry.key] = digest.hexdigest()
            data = chunk = memoryview(b"")  # not beside the next one
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size_bytes = placed[-1].end if placed else len(header)
    return WrittenFile(size_bytes, hashlib.sha256(header).hexdigest(), digests)
