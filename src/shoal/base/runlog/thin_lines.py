"""Thinning of logs that grow with the length of a run: fewer lines of its earlier part.

A log that is over its size keeps its newer half as it is, and of the older half every second line
of each series. So after many rounds old lines lie further apart than new ones, the first and the
newest are there, and the file never is much over its size.
"""

from __future__ import annotations

import os
from pathlib import Path

from shoal.base.runlog.damaged_lines import parse_object


def thin_lines(path: Path, most_bytes: int, series: str = "") -> bool:
    """Thin out a log of JSON lines if it is over a size; return whether it was.

    Damaged lines of the older half are dropped. The file is replaced atomically; only the process
    that appends to it may call this.

    Args:
        path: the log.
        most_bytes: its size.
        series: key by which lines belong to a series, each of which is thinned alone.

    Raises:
        OSError: the file cannot be read or replaced; it then stays as it is.
    """
    if path.stat().st_size <= most_bytes:
        return False
    lines = path.read_bytes().splitlines(keepends=True)
    older, newer = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    kept, seen = [], dict[str, int]()
    for line in older:
        record = parse_object(line)
        if record is None:
            continue
        name = str(record.get(series))
        if seen.setdefault(name, 0) % 2 == 0:
            kept.append(line)
        seen[name] += 1
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(b"".join(kept + newer))
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return True
