"""Upload a run's checkpoints to its remote folder, in a thread of rank 0, while training goes on.

    saved, or resumed from  ──hear──> the newest of the run, and of each tag, that is to be copied
    thread                  ──put───> files, then the manifest (remote_folder); older ones are
                            skipped
    next step, or the end   ──tell──> a line for each copy that failed; it is tried at the next save

A local checkpoint that retention deletes before its copy begins is not copied: a newer one follows.
Limits: one process copies. Where that takes longer than the time between saves, the newest one goes
next, and a local checkpoint stays until its copy is done, one more than `checkpoint.keep`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.checkpoint.format.checkpoint_faults import describe_failure, short_path
from shoal.checkpoint.remote.remote_folder import RemoteFolder, is_tag, protect_from_deletion
from shoal.fabric import World
from shoal.wire.phases import phase

DEADLINE_S, HEARD_S = 3600.0, 30.0
"""Seconds that a run's end waits for the last copy, and between messages to the other ranks."""


class CheckpointUploader:
    """Uploader of one run's checkpoints: `hear` takes the run's events, `ended` waits.

    Args:
        folder: of the run.
        keep: newest checkpoints that stay in the remote folder.
        tell: prints one line for the user; called in the thread that calls `hear`.
    """

    def __init__(
        self, folder: Path, remote: RemoteFolder, keep: int, tell: Callable[[str], None]
    ) -> None:
        self.folder = folder.resolve()
        self.remote = remote
        self.keep = keep
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "shoal-copies")
        self._lock = threading.Lock()
        self._wanted: dict[str, Path] = {}
        self._failed: dict[str, Path] = {}
        self._newest: Path | None = None
        self._lines: list[str] = []
        self._running: Future[None] | None = None

    def handle_event(self, record: dict[str, Any]) -> None:
        """Handle one event of the run; also report copies that failed since the last event."""
        self._report_failures()
        if record["event"] not in ("checkpoint_saved", "resumed"):
            return
        checkpoint = Path(record["folder"]).resolve()
        base = checkpoint.parent.parent
        if not base.is_relative_to(self.folder):
            return  # of another run
        below = "".join(f"{part}/" for part in base.relative_to(self.folder).parts)
        with self._lock:
            self._wanted = {**self._failed, **self._wanted, below: checkpoint}
            self._failed = {}
            if self._running is None or self._running.done():
                self._running = self._thread.submit(self._run_uploads)

    def _run_uploads(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._running = None
                    return
                below, checkpoint = self._wanted.popitem()
            try:
                with protect_from_deletion(checkpoint):
                    self.remote.upload_checkpoint(
                        checkpoint, below, 1 if is_tag(below) else self.keep
                    )
            except Exception as failure:
                if checkpoint.is_dir():  # else retention deleted it, and a newer one follows
                    reason = (
                        str(failure)
                        if isinstance(failure, ShoalError)
                        else describe_failure(failure)
                    )
                    with self._lock:
                        self._failed[below] = checkpoint
                    self._lines.append(f"{reason}; {short_path(checkpoint)} was not copied there")
            else:
                self._newest = checkpoint

    def ended(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for copies under way, report failures, return whether all ended."""
        running = self._running
        if running is not None and futures.wait([running], wait_s).not_done:
            return False
        self._report_failures()
        if self._newest is not None:
            self._tell(f"checkpoint.remote = {self.remote.address}: has {short_path(self._newest)}")
        self._thread.shutdown()
        return True

    def _report_failures(self) -> None:
        while self._lines:
            self._tell(self._lines.pop(0))


def start_uploads(
    folder: Path,
    address: str,
    keep: int,
    world: World,
    hear: Callable[[Callable[[dict[str, Any]], None]], None],
    tell: Callable[[str], None],
) -> Callable[[], None]:
    """Start uploads of a run's checkpoints; return a function that waits for the last one.

    Args:
        folder: of the run.
        keep: newest checkpoints that stay there.
        tell: prints one line for the user.
        hear: registers a function that is then called with every event of the run.

    Returns:
        A function that every rank calls at the end. It returns when the last copy is there, has
        failed, or takes longer than an hour.
    """
    uploader = None
    if world.is_first:
        uploader = CheckpointUploader(folder, RemoteFolder(address), keep, tell)
        hear(uploader.handle_event)

    def finish() -> None:
        until_s, lines = time.monotonic() + DEADLINE_S, ["is still written to", "is given up"]
        with phase("copy the last checkpoint"):
            while True:
                over = uploader is None or uploader.ended(HEARD_S)
                late = time.monotonic() > until_s
                if uploader is not None and not over and (late or len(lines) > 1):
                    tell(f"checkpoint.remote = {address}: {lines.pop(-1 if late else 0)}")
                # No rank may wait in one collective for long: rank 0 sends a message now and then.
                if world.broadcast_json(over or late):
                    return

    return finish
