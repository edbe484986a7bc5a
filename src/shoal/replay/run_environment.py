"""Environment of a run or a replay as flat keys: versions, sources, processor, threads, device.

    checkpoints/step-N/manifest.json   versions of libraries, digests of the user's source files
    ranks.json                         device, processor and threads of rank 0, of the newest start

A step that does not repeat ran in another environment, or met a fault of that moment. The keys that
differ tell which. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError
from shoal.base.runlog.damaged_lines import (
    Record,
    iter_newest_lines,
    parse_event,
    read_object,
)
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest

NEIGHBOURS = ("accelerate", "deepspeed")
"""Libraries whose import Shoal answers."""
RANK_KEYS = {"device": "device", "device_name": "device", "processor": "processor",
             "instructions": "vector instructions", "threads": "threads"}  # fmt: skip
"""Key of an entry of ranks.json → key of the environment; a later one replaces an earlier one."""


def read_session_record(run: Path, step: int) -> Mapping[str, Any]:
    """Return the record of the first checkpoint at or after a step; {} if there is none.

    The session that took the step last wrote it: settings, layout, versions, sources.
    """
    for one in reversed(list_checkpoints(run / "checkpoints")):
        if one.step >= step:
            with suppress(CheckpointError):
                return read_manifest(one.path).record
    return {}


def read_run_environment(run: Path, step: int) -> dict[str, str]:
    """Return the environment in which a run took a step, as far as its folder has it."""
    record = read_session_record(run, step)
    for one in list_checkpoints(run / "checkpoints") if not record else ():
        with suppress(CheckpointError):
            record = read_manifest(one.path).record
            break
    return collect_environment(record, read_object(run / "ranks.json"))


def collect_environment(record: Mapping[str, Any], ranks: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a checkpoint's record and a ranks.json.

    >>> collect_environment({"versions": {"torch": "2.13.0"}}, {"ranks": [{"threads": 2}]})
    {'version of torch': '2.13.0', 'threads': '2'}
    """
    found: dict[str, str] = {}
    versions, code = record.get("versions"), record.get("code")
    if isinstance(versions, dict):
        found |= {f"version of {name}": str(one) for name, one in versions.items()}
    for one in code.values() if isinstance(code, dict) else ():
        if isinstance(one, list) and len(one) == 2:
            found[f"source of {Path(str(one[0])).name}"] = str(one[1])
    entries = ranks.get("ranks")
    first = entries[0] if isinstance(entries, list) and entries else {}
    for key, name in RANK_KEYS.items() if isinstance(first, dict) else ():
        if value := first.get(key):
            found[name] = str(value).partition(":")[0] if key == "device" else str(value)
    return found


def list_environment_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the keys that both environments have and that differ, each as one text.

    >>> list_environment_differences({"threads": "1", "device": "cpu"}, {"threads": "2"})
    ['threads: 1 → 2']
    """
    return [
        f"{key}: changed" if key.startswith("source of ") else f"{key}: {was} → {now[key]}"
        for key, was in then.items()
        if now.get(key, was) != was
    ]


def read_library(run: Path) -> Record:
    """Return the newest event of a run that names its script's library; {}: it has none."""
    for line in iter_newest_lines(run / "events.jsonl"):
        event = parse_event(line)
        if event is not None and event.get("event") == "library_run":
            return event if event.get("library") in NEIGHBOURS else {}
    return {}
