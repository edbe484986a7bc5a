"""Error reports of ranks that lie in a run folder, as events.

    logs/rank-K.error.json    of Shoal's workers (launch/worker_errors.py)
    **/error.json             of torchrun (torch.distributed.elastic.multiprocessing.errors)

A report stands beside an event of the same death, unless the disk was full, the launcher was killed
first, or the rank only lost its peer. So it counts if the events record no end.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number, read_object

MOST_REPORTS = 64
MOST_FOLDERS = 256
MOST_BYTES = 1 << 20
SKIPPED = ("checkpoints", "tags", "rank_steps", "hub")


def read_error_reports(folder: Path, since_s: float) -> list[Record]:
    """Return the reports of the last start as `worker_died` events, the cause of the others first.

    Args:
        since_s: the last start, seconds since 1970; older reports are left out.
    """
    found = []
    for path in _find_reports(folder):
        if (event := _as_event(path, folder)) is not None and event["time_s"] >= since_s:
            found.append(event)
    return sorted(found, key=lambda event: (event["lost_peer"], event["time_s"]))


def _find_reports(folder: Path) -> list[Path]:
    found: list[Path] = []
    for seen, (root, folders, names) in enumerate(os.walk(folder)):
        if seen == MOST_FOLDERS:
            break
        folders[:] = [
            name for name in sorted(folders) if name not in SKIPPED and "island-" not in name
        ]
        for name in sorted(names):
            path = Path(root) / name
            if name.endswith("error.json") and path.is_file() and len(found) < MOST_REPORTS:
                found.append(path)
    return [path for path in found if path.stat().st_size <= MOST_BYTES]


def _as_event(path: Path, folder: Path) -> Record | None:
    """Return a report as an event; None if it is damaged."""
    record = read_object(path)
    if "message" in record:
        return _from_elastic(record, path)
    line, trace = record.get("line"), record.get("traceback")
    if not isinstance(line, str) and not isinstance(trace, str):
        return None
    code = record.get("exit_code")
    how = f"exit code {code}" if isinstance(code, int) else "exit code 1"
    return {
        **{"event": "worker_died", "rank": _rank_of_path(path.relative_to(folder)), "how": how},
        **{"traceback": str(trace or line), "time_s": _time_s(record.get("time_s"), path)},
        "lost_peer": record.get("lost_peer") is True,
    }


def _from_elastic(record: Record, path: Path) -> Record:
    """Return the event of torchrun's report, whose message is a text or an object."""
    message: Any = record["message"]
    inner: Any = message if isinstance(message, dict) else {"message": message}
    extra = inner.get("extraInfo") if isinstance(inner.get("extraInfo"), dict) else {}
    trace = str(extra.get("py_callstack") or inner.get("message") or "")
    told = str(extra.get("timestamp") or "")
    at_s = float(told) if re.fullmatch(r"\d{1,12}", told) else None
    return {
        **{"event": "worker_died", "rank": _rank_of_path(path), "how": "exit code 1"},
        **{"traceback": trace, "time_s": _time_s(at_s, path), "lost_peer": False},
    }


def _rank_of_path(path: Path) -> int | None:
    """Return the rank that a report's name, or its folder's, names.

    >>> _rank_of_path(Path("logs/rank-3.error.json")), _rank_of_path(Path("attempt_0/1/error.json"))
    (3, 1)
    """
    found = re.search(r"rank[-_](\d{1,9})\D", path.name) or re.fullmatch(
        r"(?:rank[-_])?(\d{1,9})", path.parent.name
    )
    return int(found[1]) if found else None


def _time_s(told: Any, path: Path) -> float:
    return float(told) if is_number(told) else path.stat().st_mtime
