"""Remove libraries that a killed compiler left half written in torch.compile's cache.

Every file there is written atomically except shared libraries, which the linker writes in place. A
process that is killed meanwhile (its sibling died; memory ran out) leaves a truncated
one. Every later start, each restart of the run included, loads it and fails: "file too short",
or C++ errors if it was the probe for vector instructions. A library ends with the table that
its first 64 bytes announce, so a truncated one is recognised without loading it.

Source: ELF-64 object file format, "File header"; torch/_inductor/codecache.py (FileLock per key)
"""

from __future__ import annotations

import struct
from pathlib import Path

HEADER_BYTES = 64
ELF64 = b"\x7fELF\x02"


def remove_truncated_libraries(folder: Path) -> list[Path]:
    """Delete incomplete libraries below a cache folder of Inductor, and return their paths.

    Libraries that a living process is writing, under its lock, are left alone.
    """
    removed = []
    for path in folder.glob("*/*.so"):
        if not _is_complete(path) and _unlink(
            path, folder / "locks" / f"{path.name.split('.')[0]}.lock"
        ):
            removed.append(path)
    return removed


def _unlink(path: Path, lock: Path) -> bool:
    from filelock import FileLock, Timeout  # torch needs it; 0.02 s

    try:
        with FileLock(lock, timeout=0):
            if _is_complete(path):
                return False
            path.unlink(missing_ok=True)
            return True
    except (Timeout, OSError):
        return False


def _is_complete(path: Path) -> bool:
    """Return whether a file is as long as its ELF-64 header says; True for other formats."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        size_bytes = path.stat().st_size
    except OSError:
        return True
    if header[:5] != ELF64:
        return len(header) == HEADER_BYTES and any(header)
    if len(header) < HEADER_BYTES:
        return False
    order = "<" if header[5] == 1 else ">"
    (table_at,) = struct.unpack_from(order + "Q", header, 40)
    entry_bytes, entries = struct.unpack_from(order + "HH", header, 58)
    return table_at > 0 and table_at + entry_bytes * entries <= size_bytes
