"""Resume from a peer's checkpoint on nodes without a shared disk, with the rows a node missed.

Each node writes the run's checkpoints, metrics.jsonl, the files of sampled steps and lines for the
user to its own disk, and the events of its own ranks. A node that was away lacks some of them. A
peer sends the newest checkpoint and the rows of the steps in between, and one line in the node's
events.jsonl reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.base.runlog.damaged_lines import iter_newest_lines, parse_step
from shoal.base.runlog.events import Emit
from shoal.base.runlog.truncate_logs import truncate_steps
from shoal.checkpoint.save.node_local import Keepers, SyncedCheckpoint, sync_newest
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer.metrics_recorder import STEP_FILES, MetricsRecorder
from shoal.trainer.run_folder.run_saves import RunSaver

ROWS_BYTES = 8 << 20
"""At most so many bytes of each file come from a peer: of metrics.jsonl about 15,000 steps."""


class SyncedRun(Protocol):
    """The attributes of a run (`run.py`) that the exchange with other nodes needs."""

    program: Program
    recorder: MetricsRecorder

    @property
    def checkpoint_saver(self) -> RunSaver:
        """The saver of the run's checkpoints."""


def format_disks_notice(folder: Path, world: World) -> str:
    """Return the line that reports how a run without a shared folder stores its checkpoints."""
    disks = sorted(set(world.keepers))
    return (
        f"run.folder = {folder}: lies on {len(disks)} disks (those of ranks "
        f"{', '.join(map(str, disks))}), so each of them gets every checkpoint whole; a folder "
        f"that all nodes share needs one copy"
    )


def sync_newest_checkpoint(
    run: SyncedRun, folder: Path, only: int | None, remote: Callable[[], None]
) -> int | None:
    """Fetch the newest checkpoint of all nodes to each disk; every rank calls it.

    Args:
        only: the step to fetch, and no other.
        remote: fetches a newer checkpoint from a remote folder to rank 0's disk.

    Returns:
        The step of the checkpoint; None if there is none, or none of that step.

    Raises:
        CheckpointError: as `sync_newest`.
    """
    own, emit = run.program.world, run.recorder.events.emit
    # An adopted group with NCCL alone cannot send host tensors.
    world = own if own.messages.type == "cpu" else run.checkpoint_saver.prepare().world
    # A folder other than the run's may be visible to all ranks: then no node lacks a checkpoint.
    root, keepers = folder / "checkpoints", world.keepers
    found = sync_newest(root, keepers, world, emit, only)
    if run.program.plan.remote:
        remote()
        later = sync_newest(root, keepers, world, emit, only)
        found = found if found and later and later.step == found.step else later
    if found is None:
        return only
    if found.lacked and folder == run.recorder.folder:
        sync_metrics_rows(folder, found, keepers, world, emit)
    return found.step


def sync_metrics_rows(
    folder: Path, found: SyncedCheckpoint, keepers: Keepers, world: World, emit: Emit
) -> None:
    """Extend the files of steps to that of a checkpoint that came from a peer; all ranks call it.

    Rows of steps after the node's own newest checkpoint are cut: its peers repeated those steps.
    The peer sends the newest ROWS_BYTES of each file; an event in events.jsonl reports the rows of
    metrics.jsonl that are still missing.
    """
    text = failed = ""
    for name in STEP_FILES:
        last, lines = _fetch_lines(folder / name, found, world)
        if world.rank not in found.lacked:
            continue
        if not text:
            text = _format_rows_notice(found, last, len(lines))
        try:
            if lines:
                with (folder / name).open("a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines)
        except OSError as failure:  # a full disk must not stop training
            failed = f"; they could not be written: {failure.strerror}"
    if text:
        text = f"{text}{failed}; its events of that time are in its own folder"
        emit("notice", step=found.step, text=text)


def _fetch_lines(path: Path, found: SyncedCheckpoint, world: World) -> tuple[int, list[str]]:
    """Return this node's newest step in a file, and the peer's lines of later steps."""
    lacks = world.rank in found.lacked
    if lacks:
        truncate_steps(path, found.lacked[world.rank])
    last = world.gather_json(_read_last_step(path) if lacks else found.step)
    rows = world.broadcast_json(
        _read_rows(path, min(last), found.step) if world.rank == found.source else "",
        found.source,
    )
    own = last[world.rank]
    return own, [one for one in rows.splitlines() if _parse_row_step(one.encode()) > own]


def _format_rows_notice(found: SyncedCheckpoint, last: int, count: int) -> str:
    """Return the line that reports a checkpoint of a peer, and rows of metrics.jsonl."""
    text = (
        f"checkpoint of step {found.step} came from rank {found.source}'s node, which trained "
        f"without this one; so did {count} rows of metrics.jsonl"
    )
    missing = found.step - last - count
    if missing > 0:
        text += f"; the rows of {missing} more steps after step {last} are there alone"
    return text


def _parse_row_step(line: bytes) -> int:
    """Return the step of a row; 0 for a line that cannot be parsed."""
    row = parse_step(line)
    return int(row["step"]) if row else 0


def _read_last_step(path: Path) -> int:
    """Return the newest step that has a row in a file; 0 without any."""
    return max(map(_parse_row_step, iter_newest_lines(path, 8)), default=0)


def _read_rows(path: Path, after: int, to: int) -> str:
    """Return the newest rows of steps after + 1 … to, at most ROWS_BYTES of them."""
    kept, size_bytes = list[bytes](), 0
    for line in iter_newest_lines(path):
        step, size_bytes = _parse_row_step(line), size_bytes + len(line)
        if 0 < step <= after or size_bytes > ROWS_BYTES:
            break
        if after < step <= to:
            kept.append(line)
    return b"\n".join(reversed(kept)).decode(errors="replace")
