"""Profile a few steps of a run, operation by operation: `train.trace = "100:103"`.

    RUN/traces/steps-100-103-rank-0.json          torch.profiler's trace, for chrome://tracing,
                                                  Perfetto or TensorBoard
    RUN/traces/steps-100-103-rank-0-memory.json   a device: its allocator's segments and blocks as
                                                  the last step leaves them; the CPU: every
                                                  allocation and release of the steps, in bytes

A step is one range named "step N", from its first pass to the optimizer's. Data loading,
validation and saves lie between two ranges. Every rank writes its own files.
Source   torch.profiler, torch.cuda.memory_snapshot
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from shoal.base.layouts.policies import LoopPolicy
from shoal.fabric import World
from shoal.fabric.device import is_accelerator, synchronize


class StepTrace:
    """Profiler of the steps that `text` names, on this rank.

    A run that is resumed among these steps traces the remaining ones.

    Args:
        text: "FIRST:LAST", both included.
        folder: the run folder.
        world: the processes.
        notice: prints a line for the user, by rank 0.
    """

    def __init__(
        self, text: str, folder: Path, world: World, notice: Callable[[str], None]
    ) -> None:
        self.text, self.folder, self.world, self.notice = text, folder / "traces", world, notice
        self.first, self.last = LoopPolicy.parse_trace("train.trace", text)
        self._from = self._done = 0
        self._seen: list[int] = []
        self._profile: Any = None
        self._step: Any = None
        self._wrote = False

    def before(self, step: int) -> None:
        """Start the range of a step, and the profiler at the first traced one."""
        if self._step is not None:  # the same step again: its passes failed
            self._step.__exit__(None, None, None)
        elif self._profile is not None and step != self._done + 1:  # a restore went elsewhere
            self._write()
        if self._profile is None and self.first <= step <= self.last and not self._wrote:
            self._start_profiler(step)
        if self._profile is not None:
            self._step = record_function(f"step {step}")
            self._step.__enter__()

    def after(self, step: int) -> None:
        """End the range of a step, and write the files after the last traced one."""
        self._seen = [*self._seen[:1], step]
        if self._step is None:
            return
        synchronize(self.world.device)  # its kernels are within its range
        self._step.__exit__(None, None, None)
        self._step, self._done = None, step
        if step >= self.last:
            self._write()

    def close(self) -> None:
        """Write the trace at the end of the run, or report that no named step was taken."""
        if self._profile is not None and self._done:
            self._write()
        elif not self._wrote and self._seen:
            first, last = self._seen[0], self._seen[-1]
            self.notice(
                f"train.trace = {self.text}: none of these steps was taken, but {first} to {last}; "
                f"try: train.trace={max(first, last - 3)}:{last}"
            )

    def _start_profiler(self, step: int) -> None:
        synchronize(self.world.device)  # kernels of earlier steps end before
        on_host = [ProfilerActivity.CPU]
        kinds = supported_activities() if is_accelerator(self.world.device) else on_host
        self._profile = profile(activities=kinds, record_shapes=True, profile_memory=True)
        self._profile.start()
        self._from = step

    def _write(self) -> None:
        """Stop the profiler and write both files; a full disk does not end the run."""
        profiled, self._profile, self._wrote = self._profile, None, True
        profiled.stop()
        name = f"steps-{self._from}-{self._done}-rank-{self.world.rank}"
        path = self.folder / f"{name}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(path))
            held = self._read_memory_events(path)
            (self.folder / f"{name}-memory.json").write_text(json.dumps(held), encoding="utf-8")
        except (OSError, RuntimeError) as failure:
            self.notice(f"train.trace = {self.text}: {path}: cannot be written: {failure}")
            return
        self.notice(
            f"train.trace = {self.text}: steps {self._from} to {self._done}, of every rank, "
            f"operations and memory: {self.folder}"
        )

    def _read_memory_events(self, trace: Path) -> list[dict[str, Any]]:
        """Return the memory of the steps: a device's segments, or the CPU's allocations."""
        if is_accelerator(self.world.device):
            return torch.cuda.memory_snapshot() if self.world.device.type == "cuda" else []
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        moves = [one for one in events if one.get("name") == "[memory]"]
        return [
            {
                "time_us": one["ts"],
                "bytes": one["args"]["Bytes"],
                "held_bytes": one["args"]["Total Allocated"],
                "address": one["args"]["Addr"],
            }
            for one in sorted(moves, key=lambda one: one["ts"])
        ]
