"""Which tensors still lie in the files of a checkpoint, mapped into memory and read when used.

safetensors maps its files: a tensor that `from_pretrained` neither converts nor merges is a view of
its file's pages, which the system reads when somebody looks at them. Where such a tensor lies is
enough for other processes of the machine to map it too (weight_tables.py).

Protocol  /proc/self/smaps: a private mapping of a file without anonymous pages was never written
          into, so what is seen there is what the file holds
Limits    one written page, anywhere in a file, and none of its tensors counts as its own; Linux
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
"""Where Linux shows what a process has mapped."""


@contextmanager
def opened_unread() -> Iterator[None]:
    """Inside, safetensors files are opened without reading more of them than is looked at.

    Whoever opens one looks at its header and at each tensor's first page, of the file as it is
    mapped: the system would read as much around each as the disk reads ahead, up to all of it.
    Pages that are there already make it read nothing.
    """
    own: Any = sys.modules["safetensors"].safe_open

    def opened(path: Any, *given: Any, **named: Any) -> Any:
        with suppress(OSError, TypeError, ValueError):  # the library says better what is wrong
            _read_starts(path)
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
"""Modules by whose name `safe_open` files are opened."""


def _read_starts(path: Any) -> None:
    """Bring a safetensors file's header and its tensors' first pages into the page cache, alone."""
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
class AsRead:
    """A file that is mapped privately, and into which nothing was written.

    Attributes:
        start, stop: addresses.
        offset: of the file's part there.
        node: of the file.
    """

    start: int
    stop: int
    offset: int
    node: int
    path: str

    def place(self, address: int) -> int:
        """Where in the file an address is."""
        return self.offset + address - self.start


MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (r..p) ([0-9a-f]+) \S+ (\d+) +(/.*)")
"""First line of a mapping in smaps, of a file, private."""


def files_as_read() -> list[AsRead]:
    """Every file that this process maps privately and has not written into."""
    found, last = [], None
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        if told := MAPPING.fullmatch(line):
            start, stop, _, offset, node, path = told.groups()
            last = AsRead(int(start, 16), int(stop, 16), int(offset, 16), int(node), path)
            last = None if path.endswith(" (deleted)") else last
        elif line[0] in "0123456789abcdef":
            last = None
        elif line.startswith("Anonymous:") and last is not None and int(line.split()[1]) == 0:
            found.append(last)
    return found
