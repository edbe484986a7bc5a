"""Read a file of `torch.save` without running it: a zip of one pickle and the tensors' bytes.

    NAME/data.pkl    names the tensors, and their storages (`pickle_reader.py`)
    NAME/data/KEY    one storage's bytes, stored, not compressed
    NAME/byteorder   little; absent before torch 2.1

The file is mapped; a tensor is a view of its pages until it is copied. Every storage is compared
with its CRC-32 before the first of its tensors is returned, a check that torch itself omits.
Nothing is unpacked and no name of the archive becomes a path. Part of a file is read the same way:
a `.distcp` file is one such zip after another. No torch here.

Source: torch 2.13, `serialization.py` (`_start_save`); PKWARE's APPNOTE 6.3.10 for zip.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import DTYPES
from shoal.checkpoint.foreign.inert_objects import InertTensor
from shoal.checkpoint.foreign.pickle_reader import read_pickle

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A tensor as bytes: its shape, and one dim more, the bytes of an element."""

LOCAL = struct.Struct("<4s22xHH")
"""Header before each member: a mark, and the lengths of its name and its extra field."""


def map_file(path: Path) -> memoryview:
    """Map a file's bytes for reading.

    Raises:
        CheckpointError: the path is no file, or an empty one.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe that somebody put here would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be opened: {failure.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise CheckpointError(f"{path}: is {'empty' if not status.st_size else 'no file'}")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Member:
    begin: int
    end: int
    crc: int


class TorchFile:
    """Content of one `torch.save` archive: its `value`, with inert tensors, and their bytes.

    Args:
        data: the file's bytes, or the part of a file that is one archive.
        where: prefix of messages.

    Raises:
        CheckpointError: another kind of file (the old format of torch before 1.6 too), one that is
            cut, compressed, or of the other byte order.
        Refused: as `read_pickle`.
    """

    def __init__(self, data: memoryview, where: str) -> None:
        self.data, self.where = data, where
        self.members = self._list_members()
        folders = [
            folder
            for folder, _, file in (name.rpartition("/") for name in self.members)
            if file == "data.pkl" and "/" not in folder
        ]
        if len(folders) != 1:
            raise CheckpointError(
                f"{where}: is a zip archive, but not one that torch.save wrote: {len(folders)} "
                f"pickles in it are called NAME/data.pkl"
            )
        self.folder = folders[0]
        order = self.members.get(f"{self.folder}/byteorder")
        if order is not None and bytes(data[order.begin : order.end]) != b"little":
            raise CheckpointError(f"{where}: its bytes are not in little-endian order")
        if f"{self.folder}/constants.pkl" in self.members:
            raise CheckpointError(
                f"{where}: is a TorchScript module, a program; try: torch.save of its state_dict()"
            )
        self.checked: set[str] = set()
        self.pickle_bytes = self._read_member(f"{self.folder}/data.pkl")
        self.value = read_pickle(self.pickle_bytes, where)

    def view(self, tensor: InertTensor) -> Bytes:
        """Return a view of a tensor's bytes in the file, in its own strides.

        Raises:
            CheckpointError: bytes are missing or damaged, or fewer than the shape's elements
                (`expand_strategy`), since an import writes all elements.
        """
        storage = tensor.storage
        what = f"{self.where}: a tensor of shape {list(tensor.size)}"
        data = self._read_member(f"{self.folder}/data/{storage.key}")
        if len(data) != storage.elements * DTYPES[storage.dtype][1]:
            raise CheckpointError(
                f"{what} lies in a storage of {storage.elements} elements of {storage.dtype}, "
                f"which has {len(data)} bytes"
            )
        width = DTYPES[tensor.dtype][1]
        count = math.prod(tensor.size)
        last = sum((n - 1) * step for n, step in zip(tensor.size, tensor.stride, strict=True))
        if not count:
            return np.empty((*tensor.size, width), np.uint8)
        if (tensor.offset + last + 1) * width > len(data):
            raise CheckpointError(f"{what} ends outside of its storage of {len(data)} bytes")
        if count * width > len(data):
            raise CheckpointError(
                f"{what} has more elements than its storage; try: save tensor.clone()"
            )
        steps = zip(tensor.size, tensor.stride, strict=True)
        strides = (*(step * width if n > 1 else 0 for n, step in steps), 1)
        return np.ndarray(
            (*tensor.size, width), np.uint8, data, offset=tensor.offset * width, strides=strides
        )

    def storage_key(self, tensor: InertTensor) -> tuple[Any, ...]:
        """Return a key that is equal for two names of one tensor."""
        return (tensor.storage.key, tensor.dtype, tensor.offset, tensor.size, tensor.stride)

    def _read_member(self, name: str) -> memoryview:
        """Return a member's bytes after comparing their CRC-32."""
        member = self.members.get(name)
        if member is None:
            raise CheckpointError(f"{self.where}: {name} is missing in it")
        data = self.data[member.begin : member.end]
        if name not in self.checked:
            # torch writes 0 if set_crc32_options disabled the checksum.
            if member.crc and zlib.crc32(data) != member.crc:
                raise CheckpointError(
                    f"{self.where}: {name} does not match its CRC-32: the file is damaged; "
                    f"try: copy it anew"
                )
            self.checked.add(name)
        return data

    def _list_members(self) -> dict[str, _Member]:
        """Return the byte range of each member; no two overlap, so none counts twice."""
        where = self.where
        if bytes(self.data[:2]) != b"PK":
            raise CheckpointError(
                f"{where}: is no file that torch.save writes since torch 1.6; try, where it "
                f"can be trusted: torch.save(torch.load(FILE, weights_only=True), NEW_FILE)"
            )
        try:
            infos = zipfile.ZipFile(cast(IO[bytes], _MappedFile(self.data))).infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, OSError, NotImplementedError):
            raise CheckpointError(f"{where}: is no whole zip archive: it was cut short") from None
        found: dict[str, _Member] = {}
        end_before = 0
        for info in sorted(infos, key=lambda one: one.header_offset):
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise CheckpointError(f"{where}: its members are packed, torch.save packs none")
            if info.filename in found:
                raise CheckpointError(f"{where}: holds two members of one name")
            header = self.data[info.header_offset : info.header_offset + LOCAL.size]
            mark, name_bytes, extra_bytes = (
                LOCAL.unpack(header) if len(header) == LOCAL.size else (b"", 0, 0)
            )
            begin = info.header_offset + LOCAL.size + name_bytes + extra_bytes
            end = begin + info.file_size
            if mark != b"PK\3\4" or info.header_offset < end_before or end > len(self.data):
                raise CheckpointError(
                    f"{where}: its list of members does not agree with their bytes"
                )
            found[info.filename] = _Member(begin, end, info.CRC)
            end_before = end
        return found


class _MappedFile:
    """Mapped bytes as a file for `zipfile`, which never reads past their end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.position = data, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: len(self.data)}[whence]
        if start + offset < 0:
            raise OSError("before the beginning")
        self.position = start + offset
        return self.position

    def read(self, count: int = -1) -> bytes:
        stop = len(self.data) if count < 0 else min(self.position + count, len(self.data))
        found = bytes(self.data[self.position : stop])
        self.position += len(found)
        return found
