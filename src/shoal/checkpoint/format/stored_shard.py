"""Read one shard file of a checkpoint, and verify everything against the manifest.

On opening: regular file, size, digest of the header, then the header itself. On reading a slice:
its bytes are hashed while they are copied to their destination. Bytes are only ever copied, never
interpreted, so a file full of pickle is just a file with the wrong digest. No torch here.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from shoal.base.plans.tensor_shards import Box
from shoal.checkpoint.format import boxes
from shoal.checkpoint.format.checkpoint_faults import DamagedFileError, describe_failure
from shoal.checkpoint.format.manifest import FILE_NAME, StoredFile, StoredSlice
from shoal.checkpoint.format.safetensors_file import (
    CHUNK_BYTES,
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    TensorEntry,
    parse_header,
)

MISMATCH = f"does not match its hash in {FILE_NAME}"


class StoredShardReader:
    """An open shard file whose size and header are those of the manifest; the caller closes it.

    Raises:
        Damaged: here and in `read`, with the file, the slice and the difference.
    """

    def __init__(self, path: Path, expected: StoredFile) -> None:
        self.path = path
        try:
            # Without O_NONBLOCK, opening a named pipe that somebody put here would wait for ever.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError as failure:
            raise DamagedFileError(path, "is missing") from failure
        except OSError as failure:
            raise DamagedFileError(path, f"cannot be opened: {failure.strerror}") from failure
        try:
            self.entries = self._open(expected)
        except BaseException:
            self.close()
            raise

    def _open(self, expected: StoredFile) -> dict[str, TensorEntry]:
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFileError(self.path, "is not a regular file")
        if status.st_size != expected.size_bytes:
            raise DamagedFileError(
                self.path,
                f"has {status.st_size} bytes, {FILE_NAME} says {expected.size_bytes}",
            )
        first = self._bytes(0, min(LENGTH_BYTES, status.st_size))
        length = LENGTH_BYTES + int.from_bytes(first, "little")
        if length > min(status.st_size, HEADER_LIMIT_BYTES):
            raise DamagedFileError(self.path, f"header {MISMATCH}")
        header = self._bytes(0, length)
        if hashlib.sha256(header).hexdigest() != expected.header_sha256:
            raise DamagedFileError(self.path, f"header {MISMATCH}")
        try:
            return parse_header(header, status.st_size)
        except ValueError as failure:
            raise DamagedFileError(self.path, str(failure)) from failure

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        piece: StoredSlice,
        into: memoryview | None,
    ) -> None:
        """Hash one slice of tensor `name`, and copy it to `into` unless that is None.

        Args:
            shape, dtype: of the whole tensor, from the manifest.
            into: bytes, exactly as many as the slice has.
        """
        label = boxes.format_slice(name, piece.box, shape)
        entry = self.entries.get(piece.key)
        if entry is None:
            raise DamagedFileError(self.path, f"is not in this file, {FILE_NAME} says it is", label)
        if entry.dtype != dtype or not _holds(entry.shape, piece.box):
            raise DamagedFileError(
                self.path, f"has another shape or dtype than {FILE_NAME} says", label
            )
        digest = hashlib.sha256()
        chunk = memoryview(bytearray(CHUNK_BYTES)) if into is None else into
        done, size_bytes = 0, entry.end - entry.begin
        try:
            while done < size_bytes:
                start = 0 if into is None else done
                part = chunk[start : start + min(CHUNK_BYTES, size_bytes - done)]
                got = os.preadv(self.descriptor, [part], entry.begin + done)
                if got == 0:
                    raise DamagedFileError(self.path, "was cut short while it was read", label)
                digest.update(part[:got])
                done += got
        except OSError as failure:
            raise DamagedFileError(
                self.path, f"cannot be read: {describe_failure(failure)}", label
            ) from failure
        if digest.hexdigest() != piece.sha256:
            raise DamagedFileError(self.path, MISMATCH, label)

    def _bytes(self, begin: int, count: int) -> bytes:
        try:
            return os.pread(self.descriptor, count, begin)
        except OSError as failure:
            raise DamagedFileError(
                self.path, f"cannot be read: {describe_failure(failure)}"
            ) from failure

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def _holds(shape: tuple[int, ...], box: Box) -> bool:
    return shape == tuple(stop - start for start, stop in box)
