"""Profile a few steps of a run, operation by operation: `train.trace = "100:103"`.

    RUN/traces/steps-100-103-rank-0.json          torch.profiler's trace, for chrome://tracing,
                                                  Perfetto or TensorBoard, with the parts of each
                                                  step, micro-batches, stages, collectives
    RUN/traces/steps-100-103-rank-0-memory.json   a device: its allocator's segments and blocks as
                                                  the last step leaves them; the CPU: every
                                                  allocation and release of the steps, in bytes

A step is one range named "step N", from its first pass to the optimizer's. Data loading,
validation and saves lie between two ranges. Every rank writes its own files, which `shoal trace`
merges. Before the first step and after the last one all ranks make a few small collectives, whose
ends align their clocks.
Source   torch.profiler, torch.cuda.memory_snapshot
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from shoal.base.layouts.policies import LoopPolicy
from shoal.base.plans.pipeline_actions import Action
from shoal.base.runlog.traced_steps import chrome_events, encode_rows, read_clock_name
from shoal.fabric import World
from shoal.fabric.device import is_accelerator, synchronize
from shoal.parallel.program import Program
from shoal.trainer.tracing.traced_calls import TracedCalls
from shoal.trainer.tracing.traced_page import TracedPage
from shoal.wire import phases

CLOCK_CALLS = 9
"""Collectives whose ends align the clocks of the ranks, at each end of a trace."""


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
        self._clocks: list[list[int]] = []
        self._watched: Any = None
        self.page: TracedPage | None = None
        self.calls = TracedCalls(self._pop_subject)

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
            if self.page is not None:
                self.page.open_step(step)

    def after(self, step: int) -> None:
        """End the range of a step, and write the files after the last traced one."""
        self._seen = [*self._seen[:1], step]
        if self._step is None:
            return
        self._step.__exit__(None, None, None)
        self._step, self._done = None, step
        if step >= self.last:
            self._stop_recording()
            self._clocks.append(self._read_clocks())
            self._write()

    def mark_ranges(self, program: Program) -> Program:
        """Return a program whose micro-batches and pipeline actions are ranges of traced steps."""
        if program.action_times is not None:
            program.action_times.mark_action = self.mark_action
        return replace(program, around=(*program.around, self.micro_batch))

    def micro_batch(self, step: int, index: int) -> AbstractContextManager[None] | None:
        """Return the range of a micro-batch; None outside of traced steps."""
        del step
        if self.page is None:
            return None
        return self.page.range("micro-batch", f"micro-batch {index}" if index >= 0 else "joins")

    def mark_action(self, act: Action) -> AbstractContextManager[None]:
        """Return the range of a pipeline's action, as F2@1; empty outside of traced steps."""
        return nullcontext() if self.page is None else self.page.range("action", act.text())

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
        self._clocks = [self._read_clocks()]
        self._profile.start()
        self._from = step
        self.page = phases.page = TracedPage(phases.page)
        self.world.traffic.page, self._watched = self.page, self.world.traffic.page
        self.world.traffic.subject = None
        self.page.on_wait_end = self.calls.note_wait_end
        # Kernels of a step are within its range.
        self.page.on_step_end = lambda: synchronize(self.world.device)
        self.calls.open()

    def _stop_recording(self) -> None:
        """Stop to record ranges and calls; what was recorded stays."""
        if self.page is not None and phases.page is self.page:
            phases.page, self.world.traffic.page = self.page.page, self._watched
            self.calls.close()

    def _read_clocks(self) -> list[int]:
        """Return the times at which collectives of all ranks end; every rank calls it."""
        found = []
        for _ in range(CLOCK_CALLS if self.world.size > 1 else 0):
            self.world.all_reduce_max(0)
            found.append(time.time_ns())
        return found

    def _pop_subject(self) -> str:
        """Return what the next call carries: a bucket of gradients, or an fsdp unit."""
        number, self.world.traffic.subject = self.world.traffic.subject, None
        unit = ""
        if self.page is not None:
            unit, self.page.subject = self.page.subject, ""
        return f"bucket {number}" if number is not None else unit

    def _write(self) -> None:
        """Stop the profiler and write both files; a full disk does not end the run."""
        profiled, self._profile, self._wrote = self._profile, None, True
        self._stop_recording()
        profiled.stop()
        name = f"steps-{self._from}-{self._done}-rank-{self.world.rank}"
        path = self.folder / f"{name}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(path))
            document = json.loads(path.read_text(encoding="utf-8"))
            held = self._list_memory_events(document)
            self._add_ranges(document)
            path.write_text(json.dumps(document), encoding="utf-8")
            (self.folder / f"{name}-memory.json").write_text(json.dumps(held), encoding="utf-8")
        except (OSError, RuntimeError) as failure:
            self.notice(f"train.trace = {self.text}: {path}: cannot be written: {failure}")
            return
        self.notice(
            f"train.trace = {self.text}: steps {self._from} to {self._done}, of every rank, "
            f"operations and memory: {self.folder}; one file of all ranks: shoal trace "
            f"{self.folder.parent}"
        )

    def _add_ranges(self, document: dict[str, Any]) -> None:
        """Add the ranges and calls of the steps to a profiler's trace, as events and as rows."""
        if self.page is None:
            return
        ranges = [one for one in self.page.ranges if one.end_ns]
        flights = [one for one in self.calls.flights if one.end_ns]
        zero_ns = int(document.get("baseTimeNanoseconds", 0))
        document["traceEvents"] += chrome_events(os.getpid(), ranges, flights, zero_ns)
        document["shoal"] = {
            "rank": self.world.rank,
            "ranks": self.world.size,
            "steps": [self._from, self._done],
            "clocks": self._clocks,
            "clock": read_clock_name(),
            **encode_rows(ranges, flights),
        }
        self.page = None

    def _list_memory_events(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the memory of the steps: a device's segments, or the CPU's allocations."""
        if is_accelerator(self.world.device):
            return torch.cuda.memory_snapshot() if self.world.device.type == "cuda" else []
        moves = [one for one in document["traceEvents"] if one.get("name") == "[memory]"]
        return [
            {
                "time_us": one["ts"],
                "bytes": one["args"]["Bytes"],
                "held_bytes": one["args"]["Total Allocated"],
                "address": one["args"]["Addr"],
            }
            for one in sorted(moves, key=lambda one: one["ts"])
        ]
