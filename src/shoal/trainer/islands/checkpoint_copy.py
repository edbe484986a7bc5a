"""Copy of another island's checkpoint: equal slices cross the network once.

    manifest   names the files, and the hash of each slice
    header     of each file: where its slices lie
    slices     the first one of each hash is fetched, as many at a time as BATCH_BYTES hold; the
               others are copies on this disk

After a merge the weights of the model are the merged ones, and a checkpoint has both. So an island
that joins fetches 16 bytes of 20 for a parameter in fp32 with AdamW inside and momentum outside.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shoal.checkpoint.format.listing import slices_by_file
from shoal.checkpoint.format.manifest import FILE_NAME, Manifest, decode
from shoal.checkpoint.format.safetensors_file import (
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    TensorEntry,
    parse_header,
    write_all,
)

BATCH_BYTES = 64 << 20
"""Bytes that are in memory at a time, if no slice is larger."""

Fetch = Callable[[str, str], bytes]
"""Return bytes of a file of the checkpoint: all of them for "", else those of "BEGIN-END,…"."""

FirstSlices = dict[str, tuple[Path, int]]
"""Hash of a slice → the file and the offset of the first one that has it."""


def read_ranges(path: Path, ranges: str, offset: int, length: int) -> tuple[int, bytes] | None:
    """Return (size of all ranges, bytes of them from an offset on); None: they are not there.

    Args:
        ranges: "BEGIN-END,…", joined in this order; "" for the whole file.
    """
    found = bytearray()
    try:
        with path.open("rb") as file:
            pairs = [(0, file.seek(0, os.SEEK_END))]
            if ranges:
                pairs = [(int(a), int(b)) for a, b in (one.split("-") for one in ranges.split(","))]
            size = sum(end - begin for begin, end in pairs)
            for begin, end in pairs:
                skipped = min(offset, end - begin)
                offset -= skipped
                file.seek(begin + skipped)
                found += file.read(min(length - len(found), end - begin - skipped))
    except (OSError, ValueError):
        return None
    return size, bytes(found)


def copy_checkpoint(folder: Path, fetch: Fetch) -> None:
    """Write all files of another island's checkpoint into a new folder, the manifest last.

    Raises:
        OSError: the other island has them no more, or the disk is full.
        CheckpointError: its manifest is damaged.
    """
    text = fetch(FILE_NAME, "")
    manifest, first = decode(text, folder / FILE_NAME), FirstSlices()
    for name in sorted(manifest.files):
        _copy_file(folder, manifest, name, fetch, first)
    with _NewFile(folder / FILE_NAME) as file:
        file.write(text, 0)


def _copy_file(
    folder: Path, manifest: Manifest, name: str, fetch: Fetch, first: FirstSlices
) -> None:
    """Write one file; slices that are in `first` come from this disk."""
    header, entries = _fetch_header(manifest, name, fetch)
    digests = {piece.key: piece.sha256 for _, piece in slices_by_file(manifest)[name]}
    path, new = folder / name, list[TensorEntry]()
    equal = list[tuple[TensorEntry, tuple[Path, int]]]()
    for entry in entries:
        digest = digests.get(entry.key, entry.key)  # a key that no tensor names is fetched
        if digest in first:
            equal.append((entry, first[digest]))
        else:
            first[digest] = path, entry.begin
            new.append(entry)
    with _NewFile(path) as file:
        file.write(header, 0)
        for batch in _cut_batches(new):
            ranges = ",".join(f"{entry.begin}-{entry.end}" for entry in batch)
            data = memoryview(fetch(name, ranges))
            if len(data) != sum(entry.size_bytes for entry in batch):
                raise ConnectionError(f"{name}: {len(data)} bytes came for {ranges}")
            for entry in batch:
                file.write(data[: entry.size_bytes], entry.begin)
                data = data[entry.size_bytes :]
        for entry, (source, begin) in equal:
            file.write(_read_bytes(source, begin, entry.size_bytes), entry.begin)


def _fetch_header(manifest: Manifest, name: str, fetch: Fetch) -> tuple[bytes, list[TensorEntry]]:
    """Return the header of a file, and its slices in the order of their bytes."""
    expected = manifest.files[name]
    length = int.from_bytes(fetch(name, f"0-{LENGTH_BYTES}"), "little") + LENGTH_BYTES
    if length > min(expected.size_bytes, HEADER_LIMIT_BYTES):
        raise ConnectionError(f"{name}: its header is too long")
    header = fetch(name, f"0-{length}")
    if hashlib.sha256(header).hexdigest() != expected.header_sha256:
        raise ConnectionError(f"{name}: its header is not that of its manifest")
    found = parse_header(header, expected.size_bytes).values()
    return header, sorted(found, key=lambda entry: (entry.begin, entry.end))


def _cut_batches(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Yield slices in order, as many at a time as BATCH_BYTES hold, and at least one."""
    batch, held_bytes = list[TensorEntry](), 0
    for entry in entries:
        if batch and held_bytes + entry.size_bytes > BATCH_BYTES:
            yield batch
            batch, held_bytes = [], 0
        batch.append(entry)
        held_bytes += entry.size_bytes
    if batch:
        yield batch


def _read_bytes(path: Path, begin: int, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(count)


class _NewFile:
    """A new file, written at any offset and durable at the end of `with`."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, data: bytes | memoryview, begin: int) -> None:
        """Write bytes at an offset."""
        os.lseek(self._descriptor, begin, os.SEEK_SET)
        write_all(self._descriptor, data)

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
