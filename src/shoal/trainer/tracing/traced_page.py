"""Watch page of a process that also keeps the ranges of traced steps.

It stands in the place of the process's watch page, or of none, and passes every record on. So the
ranges of a trace are those moments from which the page counts the seconds of a step's parts.

    part    "forward and backward", inside it "backward"; "sum over ranks", "optimizer", …
    wait    for collectives; inside of a part
    range   micro-batches and actions of a pipeline, which the trainer opens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.base.runlog.traced_steps import TracedRange
from shoal.wire.phases import BACKWARD, DATA, NOWHERE, PASSES
from shoal.wire.watch_page import PARTS

ABSENT = {"exit_order": None, "timer": None, "is_closed": False, "folder": None}
"""Attributes of a process without a watch page."""


class TracedPage:
    """Page that records ranges, around another page or none.

    Attributes:
        ranges: in the order of their starts.
        on_wait_end: called before a wait ends.
        on_step_end: called before the range of a step ends.
        subject: text of the newest record of an fsdp unit's collective; the next call takes it.
    """

    def __init__(self, page: Any) -> None:
        self.page, self.ranges, self.subject = page, list[TracedRange](), ""
        self.on_wait_end: Callable[[], None] = lambda: None
        self.on_step_end: Callable[[], None] = lambda: None
        self._parts: list[TracedRange] = []
        self._waits: list[TracedRange] = []
        self._step: TracedRange | None = None
        self._is_begun = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other page; without one, a function that does nothing."""
        if self.page is not None:
            return getattr(self.page, name)
        return ABSENT.get(name, lambda *_, **__: None)

    def open_step(self, step: int) -> None:
        """Begin the range of a step, perhaps once more; the first part after it moves its start."""
        self.end_parts()
        self._step, self._is_begun = self.open("step", f"step {step}"), False

    def record_part(self, part: int) -> None:
        """Begin a part of a step; BACKWARD is a range inside of PASSES."""
        if self.page is not None:
            self.page.record_part(part)
        within = [one.name for one in self._parts]
        if part == BACKWARD and within == [PARTS[PASSES]]:
            self._start_part(part)
        elif part == PASSES and within == [PARTS[PASSES], PARTS[BACKWARD]]:
            self._end(self._parts.pop())
        elif part != PASSES or within != [PARTS[PASSES]]:
            self.end_parts()
            if part not in (NOWHERE, DATA):
                self._start_part(part)

    def record_step_end(self, *facts: Any) -> None:
        """End the range of a step, at the moment from which the page counts none of its parts.

        A process that is not scheduled between here and the end of the profiler's own range would
        else have computed for all that time.
        """
        if self._step is not None:
            self.on_step_end()
            self.end_parts()
            self._end(self._step)
            self._step = None
        if self.page is not None:
            self.page.record_step_end(*facts)

    def record_wait_start(self) -> None:
        """Begin a wait for collectives."""
        if self.page is not None:
            self.page.record_wait_start()
        self._waits.append(self.open("wait", "wait for ranks"))

    def record_wait_end(self, count: int) -> None:
        """End a wait for `count` collectives."""
        self.on_wait_end()
        if self._waits:
            self._end(self._waits.pop())
        if self.page is not None:
            self.page.record_wait_end(count)

    def record_unit_collective(self, key: int, number: int, text: bytes) -> None:
        """Note the unit that the next collective is of."""
        self.subject = text.rstrip(b"\0").decode(errors="replace")
        if self.page is not None:
            self.page.record_unit_collective(key, number, text)

    def end_parts(self) -> None:
        """End the open parts."""
        while self._parts:
            self._end(self._parts.pop())

    def open(self, kind: str, name: str) -> TracedRange:
        """Begin a range of a kind."""
        found = TracedRange(kind, name, time.time_ns())
        self.ranges.append(found)
        return found

    def _start_part(self, part: int) -> None:
        self._parts.append(self.open("part", PARTS[part]))
        if self._step is not None and not self._is_begun:
            self._step.start_ns, self._is_begun = self._parts[0].start_ns, True

    def _end(self, one: TracedRange) -> None:
        one.end_ns = time.time_ns()

    @contextmanager
    def range(self, kind: str, name: str) -> Iterator[None]:
        """Record a range while the context is open."""
        found = self.open(kind, name)
        try:
            yield
        finally:
            self._end(found)
