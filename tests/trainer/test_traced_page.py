"""Ranges of traced steps begin and end where the watch page counts a step's parts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.trainer.tracing.traced_page import TracedPage
from shoal.wire.phases import DATA, HOOKS, PASSES


class _Page:
    """Watch page that notes when it was called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, int]] = []

    def record_part(self, part: int) -> None:
        self.seen.append(("part", part, time.time_ns()))

    def record_step_end(self, step: int, *_: Any) -> None:
        self.seen.append(("end", step, time.time_ns()))


@pytest.mark.parametrize("again", [False, True])
def test_a_pause_around_a_step_is_not_in_its_range(again: bool) -> None:
    """A process that is not scheduled there has neither computed nor waited for others."""
    inner = _Page()
    page = TracedPage(inner)
    if again:  # the passes of the step failed once
        page.open_step(4)
        page.record_part(PASSES)
    page.open_step(4)
    time.sleep(0.05)
    page.record_part(PASSES)
    page.record_part(HOOKS)
    page.record_step_end(4, 0, None)
    time.sleep(0.05)
    page.record_part(DATA)
    step = [one for one in page.ranges if one.kind == "step"][-1]
    (_, _, begun_ns), *_, (_, _, ended_ns), _ = inner.seen[1 if again else 0 :]
    assert abs(step.start_ns - begun_ns) < 20e6
    assert abs(step.end_ns - ended_ns) < 20e6
    parts = [one for one in page.ranges if one.kind == "part"][-2:]
    assert step.start_ns == parts[0].start_ns
    assert all(step.start_ns <= one.start_ns <= one.end_ns <= step.end_ns for one in parts)


def test_the_device_ends_its_kernels_within_the_range() -> None:
    page = TracedPage(None)
    page.on_step_end = lambda: time.sleep(0.03)
    page.open_step(4)
    page.record_part(PASSES)
    page.record_step_end(4, 0, None)
    step, _ = page.ranges
    assert step.end_ns - step.start_ns >= 25e6
