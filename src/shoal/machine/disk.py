"""How fast a folder takes bytes that must survive: written and synced, by all ranks at once."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

CHUNK_BYTES = 4 * 2**20


def write_bytes_per_s(folder: Path, size_bytes: int) -> float:
    """Rate of writing and syncing one new file there; it is removed again.

    Errors   OSError where the folder cannot be written
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunk = os.urandom(min(CHUNK_BYTES, size_bytes))  # what compresses would flatter
    with tempfile.TemporaryFile(dir=folder) as file:
        began_s = time.perf_counter()
        written = 0
        while written < size_bytes:
            written += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.perf_counter() - began_s)
