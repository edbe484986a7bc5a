"""What passed its check in this start: a start that proves its layout builds the model twice.

Once in float64, as the proof trains it, and once as the run has it. Both builds are traced and
labelled anew; a split whose program is that of one that passed, but for its format, is not checked
a second time. Outside of `checked_once`, in a loop of one's own, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PASSED: ContextVar[set[object] | None] = ContextVar("passed", default=None)
"""Programs that passed, as `check.known_by` tells them apart; None outside of a start."""


@contextmanager
def checked_once() -> Iterator[None]:
    """Context manager of one start, in which a block that passed is not checked a second time."""
    before = PASSED.set(set())
    try:
        yield
    finally:
        PASSED.reset(before)
