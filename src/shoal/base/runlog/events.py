"""Events of a run, as JSON lines that are readable later without torch.

Any code may emit an event; only `view` reads them. One event is one line in `events.jsonl`:
`{"time_s": …, "event": "worker_started", "rank": 0, "step": null, "pid": 4711}`. Several processes
append to one file: each line goes out in a single `write` on a descriptor opened with O_APPEND, so
lines never mix on a local file system.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.base.runlog.folder_owner import FolderOwner

EVENTS = {
    "run_started": "a run begins or resumes: the plan, the attempt, the machine",
    "library_run": "a script of another library trains: library, exact (losses by their targets)",
    "worker_started": "a worker process is up: rank, pid",
    "worker_died": "a process ended: rank, pid, how, its last traceback, at (the user's own line)",
    "hang": "all ranks stand still for one: rank, host, phase, why, collective, waited_s, stacks",
    "slow_rank": "all wait for one rank: rank, host, phase, extra_s and share of a step",
    "collectives_differ": "ranks make other collectives, so sums are wrong: rank, step, text",
    "worker_left_out": "a worker of servers that do not wait is gone: rank, left, samples, why",
    "staleness": "steps that weights lacked when gradients were applied: bound, largest, counts",
    "restarting": "all workers start again: attempt, of, saved (step of the last checkpoint)",
    "compute_started": "the first step is about to run: dtypes, parameters, validates (before it)",
    "checkpoint_saved": "a checkpoint is complete on disk: folder, bytes, seconds",
    "checkpoint_failed": "a save did not complete; the older ones are as they were: reason",
    "checkpoint_damaged": "a checkpoint failed verification: file, tensor, reason",
    "resumed": "state was restored: folder, step, position, what differs from then",
    "step_skipped": "non-finite numbers: rank, micro-batches, samples; the weights did not move",
    "sample_left_out": "a disk or a connection refused it: rank, sample, epoch, position, error",
    "drift": "bits changed in memory, or differ over replicas: ranks, tensor, of (which), text",
    "spike": "loss or norm leapt out, the update was made: reason, samples by rank, cure",
    "rewound": "back to a checkpoint: to (its step), left_out (samples of the stream), reason",
    "loss_scale_lowered": "fp16 overflowed, the weights did not move: ranks, the new scale",
    "validated": "validation loss: value, targets, by_source (of a mixture, owners), worst owner",
    "stop_requested": "a signal asked the run to save and stop: which, rank, steps made, step_s",
    "memory_peaks": "the most memory that each rank held until its run ended: bytes by rank",
    "run_finished": "the run ended: how, steps",
    "islands_met": "an island joined the others: count, owners, at, encrypted (by islands.key)",
    "round_committed": "islands merged: round, who, of owners, tokens, bytes, seconds, digest",
    "round_discarded": "a merge did not happen, on no island: round, why",
    "rounds_dropped": "another history of the run goes on: first, last, folder (of checkpoints)",
    "island_refused": "a change did not count: island, why",
    "island_lost": "others are silent and this island stops: islands, after_s, round",
    "notice": "one line for the user: text; opening: importance before the first step, short",
}
"""Every event by name, with its fields; `emit` refuses others so that no reader is surprised."""

Emit = Callable[..., None]
"""`emit(event, step=…, **fields)`: reports an event; packages receive it as an argument."""


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append an object to a file as one line of JSON."""
    append_lines(path, [record])


_encode = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False).encode


def _encode_line(record: dict[str, Any]) -> str:
    r"""Return a record as a line of JSON, which has no NaN.

    >>> _encode_line({"loss": 1.5, "metrics": {"precision": float("nan")}})
    '{"loss":1.5,"metrics":{"precision":null}}\n'
    """
    try:
        return _encode(record) + "\n"
    except ValueError:  # few records hold such a number
        from shoal.base.runlog.damaged_lines import replace_non_finite

        return _encode(replace_non_finite(record)) + "\n"


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append objects as lines of JSON, by a single `write` with O_APPEND.

    So lines of several processes do not mix. The file is created if missing; a value that is not
    JSON is written as its `str`, and a number that is not finite, at any depth, as null.

    Raises:
        OSError: the write failed; what was written of it is removed.
    """
    lines = [_encode_line(one) for one in records]
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = "".join(lines).encode()
        written = os.write(descriptor, data)
        if written < len(data):  # half a line would spoil the next one too
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


class EventLog:
    """Event log of one process: `EventLog(path, rank)` appends to `path`, events.jsonl.

    Attributes:
        path: None: nothing is written.
        rank: None for the supervisor.
        owner: prevents writes into a folder that another run's folder has replaced.
        emit: (event, *, step=None, **fields) writes one line now; KeyError for a name that is not
            in EVENTS. A line that the disk refuses is dropped and counted in `dropped`: a full disk
            must not kill training.
        listeners: functions that `emit` calls with every record, written or not.
    """

    def __init__(self, path: Path | None, rank: int | None) -> None:
        self.path = path
        self.owner: FolderOwner | None = None
        if path is not None:
            from shoal.base.runlog.folder_owner import FolderOwner  # many runs have no folder

            self.owner = FolderOwner(path.parent)
        self.rank = rank
        self.dropped = 0
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

    def emit(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Record `event` now, with JSON `fields`; KeyError for an unknown name."""
        if event not in EVENTS:
            raise KeyError(f"unknown event {event}")
        rank = fields.pop("rank", self.rank)
        record = {"time_s": time.time(), "event": event, "rank": rank, "step": step, **fields}
        if self.path is not None and self.owner is not None:
            try:
                append_line(self.owner.current_path() / self.path.name, record)
            except OSError:
                self.dropped += 1
        for listen in self.listeners:
            listen(record)
