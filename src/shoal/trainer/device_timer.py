"""Timer of the parts of a step on a device, by events that are read one step later.

    host    mark(PASSES) ── mark(SUM) ── mark(UPDATE) ── end_step ──> seconds of the step before
    stream  ····· event ─ kernels ─ event ─ kernels ─ event ·····

The host only enqueues kernels, so its clock says little of where a step's time goes. An event in
the stream that computes costs microseconds. At the end of the next step all events of a step have
passed, since the host has read numbers that were computed after them: nothing waits. If they have
not, that step has no record.

Limits   time on other streams counts in the part in which the computing stream waits for it; waits
         for other ranks count as waiting in the sum alone

Source   torch.cuda.Event (cudaEventRecord, cudaEventQuery, cudaEventElapsedTime)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from shoal.wire.phases import DATA
from shoal.wire.watch_page import WAIT

MOST_MARKS = 4096
"""Marks of a step at most; later parts count as the last one of these."""


class DevicePartTimer:
    """Timer of parts by events in the device's current stream; see the module."""

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._make_event, self._stream = module.Event, module.current_stream(device)
        self._spare: list[Any] = []
        self._marks: list[tuple[int, Any]] = []
        self._before: tuple[list[tuple[int, Any]], Any] | None = None

    def mark(self, part: int) -> None:
        """Record the start of a part on the device."""
        if len(self._marks) < MOST_MARKS:
            self._marks.append((part, self._record()))

    def end_step(self) -> list[float] | None:
        """End a step; return the seconds by part of the step before, then those of waiting.

        Returns:
            None if the device has not done that step yet, or there was none.
        """
        end = self._record()
        before, self._before = self._before, (self._marks, end)
        self._marks = [(DATA, end)]
        return None if before is None else self._read(*before)

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._make_event(enable_timing=True)
        event.record(self._stream)
        return event

    def _read(self, marks: list[tuple[int, Any]], end: Any) -> list[float] | None:
        if not end.query():  # never waited for
            return None
        seconds = [0.0] * (WAIT + 1)
        for (part, event), (_, after) in pairwise([*marks, (DATA, end)]):
            seconds[part] += event.elapsed_time(after) / 1e3
        self._spare += [event for _, event in marks]  # `end` begins the next step
        return seconds
