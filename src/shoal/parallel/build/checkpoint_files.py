"""Find tensors whose memory is still the mapped file of a checkpoint, read on first use.

safetensors maps its files: a tensor that `from_pretrained` neither converts nor merges is a view of
its file's pages, which the system reads on first access. The position of such a tensor in its file
is enough for other processes of the machine to map it too (weight_tables.py).

Protocol  /proc/self/smaps: a private mapping of a file without anonymous pages was never written
          into, so its memory equals the file
Limits    one written page, anywhere in a file, excludes all tensors of that file; Linux only
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMAPS = Path("/proc/self/smaps")
"""Linux's list of the memory mappings of this process."""


@contextmanager
def open_without_readahead() -> Iterator[None]:
    """Open safetensors files, inside the context, without reading more than the accessed pages.

    Opening a file reads its header and each tensor's first page, through the mapping. The system
    would read as much around each as the disk reads ahead, up to all of it. Pages that are in the
    page cache already prevent this read-ahead.
    """
    own: Any = sys.modules["safetensors"].safe_open

    def opened(path: Any, *given: Any, **named: Any) -> Any:
        with suppress(OSError, TypeError, ValueError):  # safe_open raises the better error
            _read_first_pages(path)
        return own(path, *given, **named)

    def give(given: Any, taken: Any) -> None:
        for name in OPENERS:  # transformers may have been imported inside
            if getattr(sys.modules.get(name), "safe_open", None) is taken:
                setattr(sys.modules[name], "safe_open", given)  # noqa: B010 (for mypy)

    give(opened, own)
    try:
        yield
    finally:
        give(own, opened)


OPENERS = ("safetensors", "safetensors.torch", "transformers.modeling_utils")
"""Modules that have `safe_open` as an attribute."""


def _read_first_pages(path: Any) -> None:
    """Read only a safetensors file's header and its tensors' first pages into the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        size = int.from_bytes(os.pread(file, 8, 0), "little")
        header = json.loads(os.pread(file, size, 8))
        for name, told in header.items():
            if name != "__metadata__":
                os.pread(file, 1, 8 + size + told["data_offsets"][0])
    finally:
        os.close(file)


@dataclass(frozen=True)
class UnmodifiedMapping:
    """A file that is mapped privately and was never written into.

    Attributes:
        start, stop: addresses of the mapping.
        offset: offset of the mapping in the file.
        node: inode of the file.
    """

    start: int
    stop: int
    offset: int
    node: int
    path: str

    def file_offset(self, address: int) -> int:
        """Return the offset in the file of an address."""
        return self.offset + address - self.start


MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (r..p) ([0-9a-f]+) \S+ (\d+) +(/.*)")
"""First line of a private mapping of a file in smaps."""


def unmodified_mappings() -> list[UnmodifiedMapping]:
    """Return every file that this process maps privately and has not written into."""
    found, last = [], None
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        if told := MAPPING.fullmatch(line):
            start, stop, _, offset, node, path = told.groups()
            last = UnmodifiedMapping(
                int(start, 16), int(stop, 16), int(offset, 16), int(node), path
            )
            last = None if path.endswith(" (deleted)") else last
        elif line[0] in "0123456789abcdef":
            last = None
        elif line.startswith("Anonymous:") and last is not None and int(line.split()[1]) == 0:
            found.append(last)
    return found
