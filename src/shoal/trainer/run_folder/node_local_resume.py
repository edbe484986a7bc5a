"""Goes on from a peer's checkpoint where nodes share no disk, and says what a node missed.

Each node keeps the run's checkpoints, metrics.jsonl and lines for the user on its own disk, and its
own ranks' events. A node that was away lacks some: the newest checkpoint and the rows of the steps
in between come from a peer, and one line of its events.jsonl says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.base.runlog.damaged_lines import lines_from_end, parse_step
from shoal.base.runlog.events import Emit
from shoal.base.runlog.truncate_logs import cut_lines
from shoal.checkpoint.save.node_local import Brought, Keepers, bring_newest
from shoal.fabric import World
from shoal.parallel.program import Program
from shoal.trainer.metrics_recorder import Recorder
from shoal.trainer.run_folder.run_saves import Saving

ROWS_BYTES = 8 << 20
"""Of metrics.jsonl that a node gets from a peer at most: about 15,000 steps."""


class Bound(Protocol):
    """What of a run (`run.py`) it takes to ask the other nodes."""

    program: Program
    recorder: Recorder

    @property
    def saving(self) -> Saving:
        """How it saves."""


def told(folder: Path, world: World) -> str:
    """The line that says how a run without a shared folder keeps its checkpoints."""
    disks = sorted(set(world.keepers))
    return (
        f"run.folder = {folder}: lies on {len(disks)} disks (of ranks {', '.join(map(str, disks))} "
        f"and who sees the same), so every checkpoint is sent to all and kept whole on each; a "
        f"folder that all nodes share needs one"
    )


def bring(run: Bound, folder: Path, only: int | None, remote: Callable[[], None]) -> int | None:
    """Have the newest checkpoint of all nodes on each disk; every rank calls it.

    Args:
        only: the step that is wanted, and no other.
        remote: brings a newer one from a remote folder to rank 0's disk.

    Returns:
        its step; None where there is none, or none of that step.

    Raises:
        as `bring_newest`.
    """
    own, emit = run.program.world, run.recorder.events.emit
    # An adopted group of NCCL alone carries nothing of the host's.
    world = own if own.messages.type == "cpu" else run.saving.prepare().world
    # Of another folder than the run's, which all may see, nobody lacks anything.
    root, keepers = folder / "checkpoints", world.keepers
    found = bring_newest(root, keepers, world, emit, only)
    if run.program.plan.remote:
        remote()
        later = bring_newest(root, keepers, world, emit, only)
        found = found if found and later and later.step == found.step else later
    if found is None:
        return only
    if found.lacked and folder == run.recorder.folder:
        bring_rows(folder, found, keepers, world, emit)
    return found.step


def bring_rows(folder: Path, found: Brought, keepers: Keepers, world: World, emit: Emit) -> None:
    """Bring metrics.jsonl up to the step of a checkpoint that came from a peer; all ranks call it.

    Rows that a node has of steps after its own newest checkpoint go: its peers took those again.
    The newest ROWS_BYTES come; what a node lacks then is said in its events.jsonl.
    """
    path, lacks = folder / "metrics.jsonl", world.rank in found.lacked
    if lacks:
        cut_lines(path, found.lacked[world.rank])
    last = world.gather_json(_last_step(path) if lacks else found.step)
    first = min(last)
    rows = world.broadcast_json(
        _rows(path, first, found.step) if world.rank == found.source else "", found.source
    )
    if not lacks:
        return
    lines = [line for line in rows.splitlines() if _step(line.encode()) > last[world.rank]]
    text = (
        f"checkpoint of step {found.step} came from rank {found.source}'s node, which trained "
        f"without this one; so did {len(lines)} rows of metrics.jsonl"
    )
    missing = found.step - last[world.rank] - len(lines)
    if missing > 0:
        text += f"; the rows of {missing} more steps after step {last[world.rank]} are there alone"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as failure:  # a full disk must not stop training
        text += f"; they could not be written: {failure.strerror}"
    emit("notice", step=found.step, text=f"{text}; its events of that time are in its own folder")


def _step(line: bytes) -> int:
    """The step of a row; 0 for a line that cannot be read."""
    row = parse_step(line)
    return int(row["step"]) if row else 0


def _last_step(path: Path) -> int:
    """The newest step that a metrics.jsonl has a row of; 0 without any."""
    try:
        with path.open("rb") as file:
            newest = itertools.islice(lines_from_end(file), 8)
            return max((_step(line) for _, line in newest), default=0)
    except OSError:
        return 0


def _rows(path: Path, after: int, to: int) -> str:
    """The newest rows of steps after one, to another, as many as are sent."""
    kept, size_bytes = list[bytes](), 0
    try:
        with path.open("rb") as file:
            for _, line in lines_from_end(file):
                step, size_bytes = _step(line), size_bytes + len(line)
                if 0 < step <= after or size_bytes > ROWS_BYTES:
                    break
                if after < step <= to:
                    kept.append(line)
    except OSError:
        return ""
    return b"\n".join(reversed(kept)).decode(errors="replace")
